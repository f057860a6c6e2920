"""The costs of tables on erasure-coded servers: memory there and in the trainers, bytes of messages in a step.

Worked example: 1,000 rows of 16 weights with row-wise Adagrad are records of 68 bytes; k = 2 and r = 1 add 500
parities of 68 bytes. Two trainers that ask for 10 rows each get 10 x 16 x 4 bytes, send as many gradients, and name the
rows with 8 bytes each time; 20 rows have changed then, so that 20 x (8 + 68) bytes are folded, once for each parity.
Where the table's slot pools two bags of 5 ids, each trainer names 10 ids with 4 bytes and both lengths with 4, and gets
2 x 16 x 4 bytes; its push has the same again.

Nobody knows which ids will come: they are taken to be drawn alike, with as many different rows as that gives. Ids with
favourites have fewer, so traffic and logs are what they may be at most, on average.

Pure numbers: knows neither TorchRec nor a running cluster. `tests/simulated/test_planner_costs.py` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.tiers.budget import LEAST_SHARE, least_budget, need_of, room_of
from torch_ecrec.runtime.checks import require, require_int, require_kind, take_fields
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import POOLINGS, WIRES

ROW_BYTES = 8  # the name of a row in a message, and in a log
ID_BYTES, WEIGHT_BYTES, LENGTH_BYTES = 4, 4, 4  # of an id of a bag, of its weight, and of the bag's length
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}  # on the wire; in memory a number has 4
CALL_MS = 0.3  # of a core, for a call however small: docs/design.md, "The path of a step's bytes"


@dataclass(frozen=True)
class Servers:
    """The servers on which a plan may put tables.

    Args:
        code: k, r and the number of slots.
        memory_bytes: of the server of each slot, for its records, parities and logs; None: as much as it takes.
        tier: servers have a disk for records that do not fit in `memory_bytes`: see docs/tiers.md.
        window_steps: as in `Settings`.
        snapshot_every: as given to `DistributedModelParallel`. Logs must reach back as far.
        wire: as in `Settings`.
        pooling: as in `Settings`, of the trainers.
    """

    code: CodeSpec = CodeSpec()
    memory_bytes: int | None = None
    window_steps: int = 2
    snapshot_every: int = 1
    wire: str = "float32"
    pooling: str = "whole"
    tier: bool = False

    def __post_init__(self) -> None:
        take_fields(self)
        require_kind("code", self.code, CodeSpec)
        require(
            not self.tier or self.memory_bytes is not None,
            "`Servers(tier=True)` needs `memory_bytes`: how much of the records a server keeps in memory",
        )
        require(self.wire in WIRES, f"`wire` must be one of {', '.join(WIRES)}, got {self.wire!r}")
        require(self.pooling in POOLINGS, f"`pooling` must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        require_int("window_steps", self.window_steps, 1)
        require_int("snapshot_every", self.snapshot_every, 0)
        if self.memory_bytes is not None:
            require_int("memory_bytes", self.memory_bytes, 1)

    @property
    def number_bytes(self) -> int:
        """The bytes of a weight, or of a number of a gradient, in a message."""
        return NUMBER_BYTES[self.wire]

    @property
    def log_steps(self) -> int:
        """The most steps that logs hold: docs/assumptions.md, "Memory"."""
        return 4 * self.window_steps + max(self.snapshot_every - 1, 0)


@dataclass(frozen=True)
class Cost:
    """The cost of one table, or of several together, in bytes.

    Args:
        records, parities, logs: on all servers together.
        asked, answered: of tensors in the lookups of one step of all trainers, and in their answers.
        pushes, folds: likewise.
        trainer: in each trainer, of rows and gradients on their way.
    """

    records: int = 0
    parities: int = 0
    logs: int = 0
    asked: int = 0
    answered: int = 0
    pushes: int = 0
    folds: int = 0
    trainer: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def lookups(self) -> int:
        """The bytes of lookups and their answers, of one step of all trainers."""
        return self.asked + self.answered

    @property
    def memory(self) -> int:
        """The bytes of memory on all servers together."""
        return self.records + self.parities + self.logs


def different_rows(rows: int, ids: float) -> int:
    """Returns how many of `rows` rows are among `ids` ids on average, if each id may be any row."""
    if rows == 1:
        return min(1, math.ceil(ids))
    return round(-rows * math.expm1(ids * math.log1p(-1 / rows)))


def different_slots(slots: int, ids: float) -> float:
    """Returns how many of `slots` slots have an id of a bag of `ids` ids on average, at least 1, if rows are dealt
    alike."""
    return max(1.0, slots * (1 - (1 - 1 / slots) ** ids))


def cost_of(
    table: TableSpec,
    ids: float,
    trainers: int,
    servers: Servers,
    sums: float | None = None,
    weighted: bool = False,
) -> Cost:
    """Returns the cost of a table.

    Args:
        ids: in a batch of one trainer.
        trainers: their number.
        sums: that slots make of these ids' bags, one for each bag and slot with ids of it; None: trainers look up rows.
            Those of empty bags count, which are not sent.
        weighted: each id of a bag has a weight, which the slot that pools it is told.
    """
    code = servers.code
    record = optimizer(table.optimizer.kind).schema(table.dim, table.weights).nbytes
    of_trainer = different_rows(table.rows, ids)
    changed = different_rows(table.rows, ids * trainers)
    asked, answered = of_trainer * ROW_BYTES, of_trainer * servers.number_bytes * table.dim
    held = of_trainer * (ROW_BYTES + 4 * table.dim)
    if sums is not None:
        of_id = ID_BYTES + (WEIGHT_BYTES if weighted else 0)
        asked, answered = round(of_id * ids + LENGTH_BYTES * sums), round(4 * table.dim * sums)
        held = asked + answered
    delta = changed * (ROW_BYTES + record)
    return Cost(
        records=table.rows * record,
        parities=-(-table.rows // code.k) * code.parities * record,
        logs=(1 + code.parities) * delta * servers.log_steps,
        asked=trainers * asked,
        answered=trainers * answered,
        pushes=trainers * (asked + answered),
        folds=code.parities * delta,
        trainer=held * (2 + servers.window_steps),  # rows or sums, gradients, kept pushes
    )


def slot_sizes(tables: Sequence[TableSpec], code: CodeSpec) -> list[list[tuple[int, int]]]:
    """Returns the stores of each slot for some tables: how many records, and the bytes of each."""
    job = JobSpec(tables=tuple(tables), code=code, trainers=1) if tables else None
    found: list[list[tuple[int, int]]] = [[] for _ in range(code.slots)]
    for table_group, layout in zip(job.table_groups, job.layouts, strict=True) if job is not None else ():
        for slot in range(code.slots):
            for rows in (layout.data_rows(slot), layout.parity_rows(slot)):
                found[slot].append((rows, table_group.schema.nbytes))
    return found


@dataclass(frozen=True)
class Fit:
    """How tables fit on servers.

    Args:
        whole: bytes of the largest slot: records, parities and logs.
        needed: bytes of memory that its server must have; with a tier less than these.
        in_memory: which part of its records and parities is in memory then; the others are on its disk.
        on_disk: bytes of these.
    """

    whole: int
    needed: int
    in_memory: float = 1.0
    on_disk: int = 0


def fit_of(tables: Sequence[TableSpec], cost: Cost, servers: Servers) -> Fit:
    """Returns how some tables fit on the servers; without a tier all that they take must be in memory."""
    code = servers.code
    logs = -(-cost.logs // code.slots)
    found = []
    for sizes in slot_sizes(tables, code):
        held = sum(rows * nbytes for rows, nbytes in sizes)
        if not servers.tier or servers.memory_bytes is None:
            found.append(Fit(held + logs, held + logs))
            continue
        need = need_of(sizes)
        share = min(1.0, max(0.0, room_of(need, servers.memory_bytes, logs) / max(1, need.frames)))
        least = max(least_budget(need), need.fixed + need.frames // LEAST_SHARE + logs)
        found.append(Fit(held + logs, least, share, round((1 - share) * held)))
    return max(found, key=lambda fit: (fit.needed, fit.on_disk))
