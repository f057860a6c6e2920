"""The costs of tables on erasure-coded servers: memory there and in the trainers, bytes of messages in a step.

Worked example: 1,000 rows of 16 weights with row-wise Adagrad are records of 68 bytes; k = 2 and r = 1 add 500
parities of 68 bytes. Two trainers that ask for 10 rows each get 10 x 16 x 4 bytes, send as many gradients, and name the
rows with 8 bytes each time; 20 rows have changed then, so that 20 x (8 + 68) bytes are folded, once for each parity.

Nobody knows which ids will come: they are taken to be drawn alike, with as many different rows as that gives. Ids with
favourites have fewer, so traffic and logs are what they may be at most, on average.

Pure numbers: knows neither TorchRec nor a running cluster. `tests/simulated/test_planner_costs.py` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.runtime.checks import require, require_int, take_fields
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import WIRES

ROW_BYTES = 8  # the name of a row in a message, and in a log
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}  # on the wire; in memory a number has 4
CALL_MS = 0.3  # of a core, for a call however small: docs/design.md, "The path of a step's bytes"


@dataclass(frozen=True)
class Servers:
    """The servers on which a plan may put tables.

    Args:
        code: k, r and the number of slots.
        memory_bytes: of the server of each slot, for its records, parities and logs; None: as much as it takes.
        window_steps, wire: as in `Settings`.
        snapshot_every: as given to `DistributedModelParallel`. Logs must reach back as far.
    """

    code: CodeSpec = CodeSpec()
    memory_bytes: int | None = None
    window_steps: int = 2
    snapshot_every: int = 1
    wire: str = "float32"

    def __post_init__(self) -> None:
        take_fields(self)
        require(self.wire in WIRES, f"`wire` must be one of {', '.join(WIRES)}, got {self.wire!r}")
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
        lookups, pushes, folds: of tensors in the messages of one step of all trainers.
        trainer: in each trainer, of rows and gradients on their way.
    """

    records: int = 0
    parities: int = 0
    logs: int = 0
    lookups: int = 0
    pushes: int = 0
    folds: int = 0
    trainer: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def memory(self) -> int:
        """The bytes of memory on all servers together."""
        return self.records + self.parities + self.logs


def different_rows(rows: int, ids: float) -> int:
    """Returns how many of `rows` rows are among `ids` ids on average, if each id may be any row."""
    if rows == 1:
        return min(1, math.ceil(ids))
    return round(-rows * math.expm1(ids * math.log1p(-1 / rows)))


def cost_of(table: TableSpec, ids: float, trainers: int, servers: Servers) -> Cost:
    """Returns the cost of a table.

    Args:
        ids: in a batch of one trainer.
        trainers: their number.
    """
    code = servers.code
    record = optimizer(table.optimizer.kind).schema(table.dim, table.weights).nbytes
    of_trainer = different_rows(table.rows, ids)
    changed = different_rows(table.rows, ids * trainers)
    asked = trainers * of_trainer * (ROW_BYTES + servers.number_bytes * table.dim)
    delta = changed * (ROW_BYTES + record)
    return Cost(
        records=table.rows * record,
        parities=-(-table.rows // code.k) * code.parities * record,
        logs=(1 + code.parities) * delta * servers.log_steps,
        lookups=asked,
        pushes=asked,
        folds=code.parities * delta,
        trainer=of_trainer * (ROW_BYTES + 4 * table.dim) * (2 + servers.window_steps),  # rows, gradients, kept pushes
    )


def slot_bytes(tables: Sequence[TableSpec], code: CodeSpec) -> list[int]:
    """Returns the exact bytes of records and parities of some tables on each slot."""
    total = np.zeros(code.slots, np.int64)
    for slab in JobSpec(tables=tuple(tables), code=code, trainers=1).slabs if tables else ():
        layout = layout_of(code.slots, code.k, code.parities, slab.rows)
        total += (layout.data_first[:, -1] + layout.parity_first[:, -1]) * slab.schema.nbytes
    return [int(size) for size in total]


def largest_slot(tables: Sequence[TableSpec], cost: Cost, code: CodeSpec) -> int:
    """Returns the bytes of the largest slot, with its share of the logs."""
    return max(slot_bytes(tables, code)) + -(-cost.logs // code.slots)
