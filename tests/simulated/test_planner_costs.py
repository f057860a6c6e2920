"""What the planner says that tables cost, beside what a simulated cluster holds and sends: bytes, counted there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Scenario, SimulatedCluster
from models import CPU, META, collection, job_of, table
from torch import Tensor, nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from virtual_session import VirtualSession
from virtual_trainers import Trainers, TurnsSession

from torch_ecrec import DistributedModelParallel
from torch_ecrec.errors import TierFailed
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Report, Topology
from torch_ecrec.planner.estimates import Cost, Servers, cost_of, fit_of, slot_sizes
from torch_ecrec.processes.member import KINDS
from torch_ecrec.protocol.status import SlotReport
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.records.tiers.tiered import TieredStore
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

TABLES = (
    TableSpec("users", 3001, 16, -1.0, 1.0, OptimizerSpec("rowwise_adagrad", 0.1)),
    TableSpec("items", 799, 8, -1.0, 1.0, OptimizerSpec("adam", 0.1), weights="float16"),
)
IDS, TRAINERS, STEPS = 400, 2, 12
CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(12, 4, 1), CodeSpec(4, 2, protection="none")]


class Measured:
    """A cluster that trains on ids drawn alike, and counts the tensors of its messages."""

    def __init__(self, code: CodeSpec) -> None:
        self.cluster = SimulatedCluster(Scenario(tables=TABLES, code=code, trainers=TRAINERS, spares=0, late=0.0))
        while len(self.cluster.clients) < TRAINERS or len(self.cluster.hosts) < code.slots:
            assert self.cluster.network.clock.advance()
        self.sent: Counter[str] = Counter()
        self.log_bytes = 0
        handlers = self.cluster.network.handlers
        for name in list(handlers):
            handlers[name] = counting(handlers[name], self.sent)
        self.sessions = []
        for client in sorted(self.cluster.clients.values(), key=lambda client: client.trainer):
            session = VirtualSession(client, lambda message: None, lambda: None, False)
            session.cluster = self.cluster
            self.sessions.append(session)

    def slots(self) -> list[SlotReport]:
        found = {}
        for host in self.cluster.hosts.values():
            for slot in host.slots.values():
                found[slot.index] = slot.figures()
        return [found[index] for index in sorted(found)]

    def train(self) -> None:
        random = torch.Generator().manual_seed(1)
        for session in self.sessions:
            session.loaded()
        for _ in range(STEPS):
            batches = []
            for session in self.sessions:
                rows = [
                    session.arrange(s, torch.randint(0, table_group.rows, (IDS,), generator=random))[0]
                    for s, table_group in enumerate(session.job.table_groups)
                ]
                session.lookup_parts(rows)
                batches.append(rows)
            for session, rows in zip(self.sessions, batches, strict=True):
                gradients = [
                    torch.ones(len(r), table_group.dim)
                    for r, table_group in zip(rows, session.job.table_groups, strict=True)
                ]
                session.push(rows, gradients, [0.1] * len(rows))
                session.snapshot(torch.zeros(8, dtype=torch.uint8), [session.step - 1])
            self.log_bytes = max(self.log_bytes, sum(slot.log_bytes for slot in self.slots()))
        for session in self.sessions:
            session.flush()


def slot_bytes(tables: Sequence[TableSpec], code: CodeSpec) -> list[int]:
    """The bytes of records and parities of each slot, as the planner has them."""
    return [sum(rows * nbytes for rows, nbytes in sizes) for sizes in slot_sizes(tables, code)]


def counting(handler: Any, sent: Counter[str]) -> Any:
    """A handler of requests that counts the bytes of tensors of what it is asked and answers, by kind."""

    def count(message: Any) -> None:
        kind = KINDS.get(type(message).__name__, "other")
        sent[kind] += sum(tensor.nbytes for tensor in tensors(message))

    def handle(request: Any, answer: Any) -> Any:
        count(request)

        def answered(message: Any) -> None:
            count(message)
            answer(message)

        return handler(request, answered)

    return handle


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in a message."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__struct_fields__"):
        for name in value.__struct_fields__:
            yield from tensors(getattr(value, name))


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code.slots}-{code.k}-{code.parities}")
def test_costs_are_what_a_cluster_holds_and_sends(code: CodeSpec) -> None:
    servers = Servers(code)
    costs = [cost_of(table, IDS, TRAINERS, servers) for table in TABLES]
    cost = sum(costs, Cost())
    measured = Measured(code)
    measured.train()
    slots = measured.slots()
    assert [slot.record_bytes + slot.parity_bytes for slot in slots] == slot_bytes(TABLES, code)
    assert sum(slot.record_bytes for slot in slots) == cost.records
    assert sum(slot.parity_bytes for slot in slots) == cost.parities
    assert cost.logs / servers.log_steps <= measured.log_bytes <= cost.logs
    for kind, bytes_ in (("lookup", cost.lookups), ("push", cost.pushes), ("fold", cost.folds)):
        assert measured.sent[kind] / STEPS == pytest.approx(bytes_, rel=0.03), kind
    assert sum(slot_bytes(TABLES, code)) == cost.records + cost.parities
    largest = max(slot.record_bytes + slot.parity_bytes + slot.log_bytes for slot in slots)
    assert largest <= fit_of(TABLES, cost, servers).needed


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code.slots}-{code.k}-{code.parities}")
def test_what_fits_with_a_disk_is_what_servers_take(code: CodeSpec, tmp_path: Path) -> None:
    """The least that is told is taken by each server, and not by all with less; frames are as many as is told."""
    larger = [dataclasses.replace(table, rows=1000 * table.rows) for table in TABLES]
    needed = fit_of(larger, Cost(), Servers(code, memory_bytes=1, tier=True)).needed
    assert made(tmp_path, larger, code, needed)
    with pytest.raises(TierFailed, match=r"`tier_memory_bytes` of .* is too little"):
        made(tmp_path, larger, code, int(0.98 * needed))
    for memory_bytes in (2 * needed, 4 * needed):
        fit = fit_of(larger, Cost(), Servers(code, memory_bytes=memory_bytes, tier=True))
        stores = made(tmp_path, larger, code, memory_bytes)
        shares = [sum(s.frames for s in of_slot) / sum(s.rows for s in of_slot) for of_slot in stores]
        assert fit.needed <= memory_bytes and min(shares) == pytest.approx(fit.in_memory, rel=0.01)
        assert (fit.in_memory == 1.0) == (fit.on_disk == 0)


def test_logs_that_need_more_than_is_left_for_them_leave_less_for_records() -> None:
    larger = [dataclasses.replace(table, rows=1000 * table.rows) for table in TABLES]
    servers = Servers(CODES[0], memory_bytes=96 << 20, tier=True)
    few, many = (fit_of(larger, Cost(logs=logs), servers) for logs in (0, 128 << 20))
    assert few.in_memory > many.in_memory and few.on_disk < many.on_disk and few.needed < many.needed


def made(folder: Path, tables: Sequence[TableSpec], code: CodeSpec, memory_bytes: int) -> list[list[TieredStore]]:
    """The stores of each slot, as a server with a tier makes them."""
    found = []
    for sizes in slot_sizes(tables, code):
        tier = Tier(folder, memory_bytes)
        stores = [tier.make(rows, nbytes, False, True) for rows, nbytes in sizes]
        found.append([store for store in stores if isinstance(store, TieredStore)])
    return found


def test_a_narrow_wire_halves_what_travels_and_nothing_else() -> None:
    wide, narrow = (cost_of(TABLES[0], IDS, TRAINERS, Servers(wire=wire)) for wire in ("float32", "bfloat16"))
    rows = wide.lookups // (8 + 4 * 16)
    assert narrow.lookups == narrow.pushes == rows * (8 + 2 * 16)
    assert (wide.memory, wide.folds, wide.trainer) == (narrow.memory, narrow.folds, narrow.trainer)


def test_snapshots_now_and_then_lengthen_the_logs() -> None:
    every, now_and_then = (cost_of(TABLES[0], IDS, TRAINERS, Servers(snapshot_every=n)) for n in (1, 9))
    assert now_and_then.logs == 2 * every.logs and now_and_then.records == every.records


@pytest.mark.parametrize(
    ("name", "value"), [("wire", "int8"), ("pooling", "all"), ("window_steps", 0), ("memory_bytes", 0)]
)
def test_servers_refuse_what_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        Servers(**{name: value})


# --- models whose bags slots pool ------------------------------------------------------------------------------------

BATCH = 64
LARGE = {"large": (9000, {"l": 1})}  # it is dealt out, and leaves room for the others, which are whole


@dataclass(frozen=True)
class Pools:
    """Tables, by name (rows, ids of a bag by feature), and how bags of their whole tables travel.

    Args:
        weighted: ids have weights, "given" with the batch or "learned".
        samples: of each table's features, where they have batch sizes of their own.
        pooling: of which tables slots may pool.
    """

    tables: Mapping[str, tuple[int, Mapping[str, int]]]
    pooled: bool
    weighted: str = ""
    samples: Mapping[str, list[int]] = field(default_factory=dict)
    pooling: str = "whole"

    @property
    def bags(self) -> dict[str, tuple[str, int, int]]:
        """By feature: its table, the ids of a bag, and how many bags a batch has."""
        return {
            feature: (name, ids, self.samples.get(name, [BATCH] * len(bags))[i])
            for name, (_, bags) in self.tables.items()
            for i, (feature, ids) in enumerate(bags.items())
        }

    def module(self) -> nn.Module:
        configs = [table(name, rows, 16, *bags) for name, (rows, bags) in self.tables.items()]
        bags = collection("rowwise_adagrad", configs, META, is_weighted=bool(self.weighted))
        if self.weighted != "learned":
            return Embedded(bags)
        positions = {feature: PositionWeightedModule(ids) for feature, (_, ids, _) in self.bags.items()}
        return Embedded(FeatureProcessedEmbeddingBagCollection(bags, positions))  # type: ignore[arg-type]

    def batch(self, seed: int) -> KeyedJaggedTensor:
        random = torch.Generator().manual_seed(seed)
        ids = [
            torch.randint(0, self.tables[name][0], (many * samples,), generator=random)
            for name, many, samples in self.bags.values()
        ]
        lengths = [torch.full((samples,), many, dtype=torch.int32) for _, many, samples in self.bags.values()]
        values = torch.cat(ids)
        weights = torch.rand(len(values), generator=random) if self.weighted else None
        if not self.samples:
            return KeyedJaggedTensor.from_lengths_sync(list(self.bags), values, torch.cat(lengths), weights)
        most = max(samples for _, _, samples in self.bags.values())
        own = [torch.arange(most) % samples for _, _, samples in self.bags.values()]
        return KeyedJaggedTensor(
            keys=list(self.bags),
            values=values,
            lengths=torch.cat(lengths),
            weights=weights,
            stride_per_key_per_rank=[[samples] for _, _, samples in self.bags.values()],
            inverse_indices=(list(self.bags), torch.stack(own)),
        )


class Embedded(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags, self.scale = bags, nn.Parameter(torch.ones(()))

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.scale * self.bags(batch).values().square().mean()


CASES = {
    "long bags": Pools({"a": (1000, {"f": 20}), "b": (1000, {"g": 5}), **LARGE}, True),
    "short ones beside them": Pools({"a": (1000, {"f": 20}), "b": (50, {"g": 1}), **LARGE}, True),
    "long ones beside many short": Pools({"a": (1000, {"f": 2}), "b": (50, {"g": 1, "h": 1}), **LARGE}, False),
    "two features of a table": Pools({"a": (1000, {"f": 20, "g": 3}), **LARGE}, True),
    "fewer bags of one": Pools({"a": (1000, {"f": 20, "g": 3}), **LARGE}, True, samples={"a": [BATCH, 8]}),
    "none, by the setting": Pools({"a": (1000, {"f": 20}), **LARGE}, False, pooling="rows"),
    "rows of the large one": Pools({"a": (1000, {"f": 20}), "large": (9000, {"l": 7})}, True),
    "parts of the large one": Pools({"a": (1000, {"f": 20}), "large": (9000, {"l": 7})}, True, pooling="parts"),
    "parts, beside rows": Pools({"a": (1000, {"f": 1}), "large": (9000, {"l": 12, "m": 4})}, True, pooling="parts"),
    "too short for parts": Pools({"a": (1000, {"f": 1}), "large": (9000, {"l": 8, "m": 3})}, False, pooling="parts"),
    "given weights": Pools({"a": (1000, {"f": 20}), **LARGE}, True, "given"),
    "learned weights": Pools({"a": (1000, {"f": 20}), **LARGE}, False, "learned"),
}


@pytest.mark.parametrize("name", CASES)
def test_costs_of_pooled_bags_are_what_models_send(name: str) -> None:
    case, code = CASES[name], CodeSpec(3, 2, 1)
    report = Report()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=TRAINERS, compute_device="cpu"),
        batch_size=BATCH,
        servers=Servers(code, pooling=case.pooling),
        stats=report,
        constraints={
            name: ParameterConstraints(
                sharding_types=["erasure_coded_row_wise" if name in LARGE else "erasure_coded_table_wise"],
                pooling_factors=[float(ids) for ids in bags.values()],
                batch_sizes=case.samples.get(name),
            )
            for name, (_, bags) in case.tables.items()
        },
    )
    module = case.module()
    plan = planner.plan(module, get_default_sharders())
    job = dataclasses.replace(job_of(module, TRAINERS, plan=plan), code=code)
    assert [table.name for table in job.tables if job.home_of(table.name) is None] == ["large"]
    sent, run = send(case, plan, job)
    assert (run.pooled > 0) == case.pooled
    (of_all,) = (line.split() for line in report.servers if line.split()[0] == "all")
    for kind, said in zip(("lookup", "push", "fold"), of_all[-3:], strict=True):
        assert float(said) == pytest.approx(sent[kind] / STEPS / 1e6, rel=0.03, abs=5e-4), kind


def send(case: Pools, plan: ShardingPlan, job: Any) -> tuple[Counter[str], Trainers]:
    """What trainers of the model send and are sent, in bytes of tensors by kind."""
    sent: Counter[str] = Counter()

    class Counting(dict[str, Any]):
        def __setitem__(self, name: str, handler: Any) -> None:
            super().__setitem__(name, counting(handler, sent))

    def script(rank: int, session: TurnsSession) -> None:
        model = DistributedModelParallel(case.module(), device=CPU, session=session, plan=plan)
        for step in range(STEPS):
            model(case.batch(TRAINERS * step + rank)).backward()
        session.flush()

    run = Trainers(job, script, pooling=case.pooling)
    run.network.handlers = Counting(run.network.handlers)
    return sent, run.go()
