"""What is simulated: tables, loads, faults, and trainers that are small functions of what they looked up.

So a wrong read anywhere changes everything that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from harness.network import LATE
from torch_ecrec.client.client import Client
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.schema import Schema
from torch_ecrec.spec.experiment import Experiment
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

NO_LEASE_S = 1e9
BAGS = 4  # of a table group, a trainer and a step, that slots pool


def small_tables() -> tuple[TableSpec, ...]:
    """Two table groups: one with state, that is placed, a table of it whole on one slot, and one without; row counts
    that leave padding, or partial stripes and rotations."""
    adagrad = OptimizerSpec("rowwise_adagrad", lr=0.1)
    return (
        TableSpec("a", rows=17, dim=3, low=-1.0, high=1.0, optimizer=adagrad),
        TableSpec("b", rows=8, dim=3, low=-0.5, high=0.5, optimizer=adagrad, sharding="table_wise"),
        TableSpec("c", rows=13, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
    )


def half_tables() -> tuple[TableSpec, ...]:
    """A table group of each dtype: one with an odd number of weights of 16 bits, whose last word is half empty."""
    adam, adagrad = OptimizerSpec("adam", lr=0.1), OptimizerSpec("rowwise_adagrad", lr=0.1)
    return (
        TableSpec("a", rows=17, dim=3, low=-1.0, high=1.0, optimizer=adagrad, weights="float16"),
        TableSpec("b", rows=8, dim=3, low=-0.5, high=0.5, optimizer=adagrad, weights="float16"),
        TableSpec("c", rows=13, dim=2, low=-1.0, high=1.0, optimizer=adam, weights="bfloat16"),
        TableSpec("d", rows=9, dim=3, low=-1.0, high=1.0, optimizer=adagrad),
    )


@dataclass(frozen=True)
class Load:
    """Rows first to end - 1 of a table group get other values, or a function of those that they hold (`change`).

    `writers` says who writes what of it in training: "first", trainer 0 all; "rows" and "columns", each trainer some;
    "all", each of them everything, of which the last one's counts.
    """

    table_group: int
    first: int
    end: int
    change: bool = False
    writers: str = "first"

    def values(self, before_UW: torch.Tensor) -> torch.Tensor:
        """(U, W) what the rows hold then; a changed row keeps its last column, as optimizer state is kept."""
        if self.change:
            after_UW = before_UW * 0.5 + 1.0
            after_UW[:, -1] = before_UW[:, -1]
            return after_UW
        rng = np.random.default_rng([self.table_group, self.first, self.end])
        return torch.from_numpy(rng.random(tuple(before_UW.shape), dtype=np.float32) + 0.25)

    def part(
        self, trainer: int, trainers: int, values_UW: torch.Tensor, schema: Schema
    ) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """What one trainer writes of it: rows (u,), bytes of their records (u, b), the first byte; None: nothing."""
        rows, words = torch.arange(self.first, self.end), torch.arange(schema.nbytes // 4)
        if self.writers == "all":
            values_UW = values_UW + (trainers - 1 - trainer)
        elif self.writers == "first":
            rows = rows if trainer == 0 else rows[:0]
        elif self.writers == "rows":
            rows = share(rows, trainer, trainers)
        else:
            words = share(words, trainer, trainers)
        if not len(rows) or not len(words):
            return None
        first, last = 4 * int(words[0]), 4 * int(words[-1]) + 4
        return rows, records_with(values_UW, schema)[rows - self.first, first:last].contiguous(), first


def share(things: torch.Tensor, trainer: int, trainers: int) -> torch.Tensor:
    """Those of a trainer: as many for each, and what is left of them, or none, for the last."""
    each = -(-len(things) // trainers)
    return things[trainer * each : (trainer + 1) * each]


LOADS = (  # of `small_tables`: table a in portions and some of it twice; stripes that a shares with b; some of c
    Load(0, 0, 9),
    Load(0, 9, 17),
    Load(0, 4, 12, change=True),
    Load(0, 15, 20, change=True),
    Load(1, 3, 8),
    Load(1, 2, 9, change=True),
)


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Args:
        loads: what trainer 0 loads before training, in this order.
        overwrites: what is loaded in training, in this order: (step, ended, what). After that step; once it has
            ended (the dense model of it is kept, and does not know of it), or before.
        loads_before: what the first trainers load, who are lost before they have loaded all; None: the same.
        kills: (slot, step) pairs: the host of the slot dies when that step is complete at trainer 0.
        settle_first: such a kill waits until the cluster is whole again, so that the losses stay within the contract.
        reborn: a killed server process starts again and joins.
        trainer_kills: (trainer, step) pairs: that trainer dies when it has completed the step.
        random_trainer_kills: so many trainers die at random moments, likewise.
        random_coordinator_kills: the coordinator dies so often, likewise.
        trainers_return: faults may kill trainers; whenever one dies, all of them are ended and started again.
        random_kills: so many servers die at random moments, as often as `kill_probability` says per event.
        noise: how often a request is dropped, its answer lost, or it arrives twice: a probability for each.
        late: how often a request or an answer takes much longer than others.
        touch: how many of all rows a trainer touches in a step, as a share.
        pooled: whether trainers have bags pooled by the slots, too (`bags_of`).
        asks_ahead: whether lookups of the next step travel with some pushes (`trainer_scripts.asks_ahead`).
        announces: so many steps before a lookup trainers tell slots with tiers of it (`trainer_scripts.announced`).
        verify_every: how many events lie between two looks of the verifiers.
        checkpoint: which checkpoints are written (`tests/harness/checkpoints.py`).
        domains: failure domains of server processes, in the order in which they start, again and again.
        restore: the checkpoint that the cluster begins with, and the job that it is of.
        lease_s: who was silent for so long is lost. For clusters with heartbeats (`tests/harness/links.py`).
        standstill_s: how long training stands for members that are silent; see `ClusterSettings`.
        drain_slow: see `ClusterSettings`.
        experiment: that all processes take part in.
        tier_frames: how many records of each store are in memory, the others in a tier; 0: all are; None: as pytest's
            `--tier-frames` says (`tests/harness/tiers.py`).
        coordinators: of several, one leads and the others stand by (`tests/harness/standbys.py`); one is started again.
    """

    code: CodeSpec = CodeSpec(slots=3, k=2, r=1)
    tables: tuple[TableSpec, ...] = field(default_factory=small_tables)
    trainers: int = 2
    spares: int = 1
    steps: int = 4
    seed: int = 0
    network_seed: int = 0
    kills: tuple[tuple[int, int], ...] = ()
    settle_first: bool = True
    domains: tuple[str, ...] = ()
    reborn: bool = False
    trainer_kills: tuple[tuple[int, int], ...] = ()
    random_trainer_kills: int = 0
    trainers_return: bool = False
    random_coordinator_kills: int = 0
    without_spare: str = "survivor"
    rebuild_chunk_bytes: int = 48
    rebuild_bytes_per_s: float = 100e6
    random_kills: int = 0
    kill_probability: float = 0.01
    noise: float = 0.0
    late: float = LATE
    verify_every: int = 60
    call_timeout_s: float = 0.25
    wire: str = "float32"
    pooling: str = "whole"
    touch: float = 0.4
    pooled: bool = True
    asks_ahead: bool = True
    announces: int = 4
    snapshot_every: int = 1
    loads: tuple[Load, ...] = ()
    loads_before: tuple[Load, ...] | None = None
    overwrites: tuple[tuple[int, bool, Load], ...] = ()
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    restore: tuple[Restored, JobSpec] | None = None
    lease_s: float = NO_LEASE_S
    standstill_s: float = 0.0
    coordinators: int = 1
    drain_slow: bool = False
    experiment: Experiment = Experiment()
    tier_frames: int | None = None

    @cached_property
    def job(self) -> JobSpec:
        return JobSpec(self.tables, self.code, self.trainers, self.seed)

    @property
    def cluster(self) -> ClusterSettings:
        """What its coordinator is told."""
        return ClusterSettings(
            self.code,
            self.spares,
            self.without_spare,
            self.lease_s,
            self.standstill_s,
            checkpoint=self.checkpoint,
            restore=self.restore,
            drain_slow=self.drain_slow,
            experiment=self.experiment,
        )


def touched(scenario: Scenario, step: int, trainer: int) -> list[np.ndarray]:
    """Rows of each table group that a trainer touches in a step: a function of nothing but its arguments."""
    rng = np.random.default_rng([scenario.seed, step, trainer])
    return [
        np.flatnonzero(rng.random(table_group.rows) < scenario.touch).astype(np.int64)
        for table_group in scenario.job.table_groups
    ]


def bags_of(
    scenario: Scenario, step: int, trainer: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Bags of each table group that a trainer has pooled in a step: rows (N,), lengths (G,), in every other step
    weights (N,).

    A function of nothing but its arguments. Some bags are empty, and some rows come twice.
    """
    rng, found = np.random.default_rng([scenario.seed, step, trainer, 1]), []
    for table_group in scenario.job.table_groups:
        lengths = torch.from_numpy(rng.integers(0, 5, BAGS).astype(np.int32))
        rows = torch.from_numpy(rng.integers(0, table_group.rows, int(lengths.sum())))
        factors = torch.from_numpy(rng.random(len(rows), dtype=np.float32))
        found.append((rows, lengths, factors if step % 2 else None))
    return found


def loss_of(weights: Sequence[torch.Tensor], dense: float) -> float:
    """A trainer's loss: a function of all that it looked up, and of its dense model, which is one number."""
    return sum(float(weight_UD.double().sum()) for weight_UD in weights) + dense


def gradients_of(weights: Sequence[torch.Tensor], step: int, trainer: int, dense: float) -> list[torch.Tensor]:
    return [torch.sin(weight_UD * 3 + step + trainer + dense) for weight_UD in weights]


def numbers_in(records_UB: torch.Tensor, schema: Schema) -> torch.Tensor:
    """(U, W) float32, what records hold."""
    return torch.from_numpy(numbers_of(records_UB.numpy(), schema))


def records_with(numbers_UW: torch.Tensor, schema: Schema) -> torch.Tensor:
    """(U, B) uint8, records that hold these numbers."""
    return torch.from_numpy(records_of(numbers_UW.numpy(), schema))


def load_all(
    client: Client,
    loads: Sequence[Load],
    on_read: Callable[[int, torch.Tensor], None] = lambda number, numbers_UW: None,
) -> Iterator[Callable[[], bool]]:
    """What a session of trainer 0 does to load: yields conditions to wait for, as a trainer's script does.

    Args:
        client: of trainer 0, which knows where it resumes.
        loads: in this order.
        on_read: gets the number of a load that changes what there is, and what it has read.
    """
    for table_group, rows in client.left_behind():
        yield client.may_push
        client.run(client.load, table_group, client.route(table_group, rows), None)
    for number, load in enumerate(loads):
        route = client.route(load.table_group, torch.arange(load.first, load.end))
        schema = client.job.table_groups[load.table_group].schema
        numbers_UW = torch.zeros(load.end - load.first, schema.width)
        if load.change:
            read: list[torch.Tensor] = []
            client.run(client.read, load.table_group, route, read.append)
            yield lambda read=read: bool(read)  # type: ignore[misc]
            numbers_UW = numbers_in(read[0], schema)
            on_read(number, numbers_UW)
        yield client.may_push
        client.run(client.load, load.table_group, route, records_with(load.values(numbers_UW), schema))
    yield client.all_acknowledged
    client.run(client.end_loading)


def dense_after(dense: float, losses: Mapping[int, float]) -> float:
    """The dense model after a step, given the losses of all trainers."""
    return float(np.tanh(dense + 0.1 * sum(losses[trainer] for trainer in sorted(losses))))


def payload_of(dense: float) -> torch.Tensor:
    """The dense model as bytes, for a snapshot."""
    return torch.tensor([dense], dtype=torch.float64).view(torch.uint8)
