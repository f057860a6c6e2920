"""What the planner says that tables cost, beside what a simulated cluster holds and sends: bytes, counted there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Scenario, SimulatedCluster
from torch import Tensor
from virtual_session import VirtualSession

from torch_ecrec.planner.estimates import Cost, Servers, cost_of, largest_slot, slot_bytes
from torch_ecrec.processes.member import KINDS
from torch_ecrec.protocol.status import SlotReport
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
            handlers[name] = self._counting(handlers[name])
        self.sessions = []
        for client in sorted(self.cluster.clients.values(), key=lambda client: client.trainer):
            session = VirtualSession(client, lambda message: None, lambda: None, False)
            session.cluster = self.cluster
            self.sessions.append(session)

    def _counting(self, handler: Any) -> Any:
        def count(message: Any) -> None:
            kind = KINDS.get(type(message).__name__, "other")
            self.sent[kind] += sum(tensor.nbytes for tensor in tensors(message))

        def handle(request: Any, answer: Any) -> Any:
            count(request)

            def answered(message: Any) -> None:
                count(message)
                answer(message)

            return handler(request, answered)

        return handle

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
                    session.arrange(s, torch.randint(0, slab.rows, (IDS,), generator=random))[0]
                    for s, slab in enumerate(session.job.slabs)
                ]
                session.lookup_parts(rows)
                batches.append(rows)
            for session, rows in zip(self.sessions, batches, strict=True):
                gradients = [torch.ones(len(r), slab.dim) for r, slab in zip(rows, session.job.slabs, strict=True)]
                session.push(rows, gradients, [0.1] * len(rows))
                session.snapshot(torch.zeros(8, dtype=torch.uint8), [session.step - 1])
            self.log_bytes = max(self.log_bytes, sum(slot.log_bytes for slot in self.slots()))
        for session in self.sessions:
            session.flush()


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
    assert largest <= largest_slot(TABLES, cost, code)


def test_a_narrow_wire_halves_what_travels_and_nothing_else() -> None:
    wide, narrow = (cost_of(TABLES[0], IDS, TRAINERS, Servers(wire=wire)) for wire in ("float32", "bfloat16"))
    rows = wide.lookups // (8 + 4 * 16)
    assert narrow.lookups == narrow.pushes == rows * (8 + 2 * 16)
    assert (wide.memory, wide.folds, wide.trainer) == (narrow.memory, narrow.folds, narrow.trainer)


def test_snapshots_now_and_then_lengthen_the_logs() -> None:
    every, now_and_then = (cost_of(TABLES[0], IDS, TRAINERS, Servers(snapshot_every=n)) for n in (1, 9))
    assert now_and_then.logs == 2 * every.logs and now_and_then.records == every.records


@pytest.mark.parametrize(("name", "value"), [("wire", "int8"), ("window_steps", 0), ("memory_bytes", 0)])
def test_servers_refuse_what_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        Servers(**{name: value})
