"""Initial weights: uniform between a table's bounds, seeded per row. Optimizer state is zero.

They depend on (seed, table, row of the table, column) alone, so not on the number of slots or the code. Where weights
have 16 bits they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_ecrec.records.halves import records_of
from torch_ecrec.records.positions import Bytes, Floats, Positions
from torch_ecrec.records.schema import Schema
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@kernel()
def _mix(x: Any) -> Any:
    """Mixes bits by splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


@kernel()
def _initialise(
    records_PW: Any, rows_P: Any, seed: Any, first_T: Any, low_T: Any, high_T: Any, index_T: Any, dim: Any
) -> None:
    golden = np.uint64(_GOLDEN)
    unit = np.float32(2.0**-24)
    table = 0
    for i in range(rows_P.shape[0]):
        row = rows_P[i]
        if row < 0:  # padding
            for j in range(records_PW.shape[1]):
                records_PW[i, j] = np.float32(0)
            continue
        while table > 0 and row < first_T[table]:
            table -= 1
        while table + 1 < first_T.shape[0] and row >= first_T[table + 1]:
            table += 1
        low, span = low_T[table], high_T[table] - low_T[table]
        key = _mix(seed + golden)
        key = _mix((key ^ np.uint64(index_T[table])) + golden)
        key = _mix((key ^ np.uint64(row - first_T[table])) + golden)
        for j in range(dim):
            key += golden
            records_PW[i, j] = low + span * (np.float32(np.int64(_mix(key) >> np.uint64(40))) * unit)
        for j in range(dim, records_PW.shape[1]):
            records_PW[i, j] = np.float32(0)


@dataclass(frozen=True)
class InitialRecords:
    """The records of a table group before anything was loaded or trained.

    Args:
        schema: of the records.
        seed: of the job, at least 0; taken modulo 2^64.
        first_rows: (T,) row in the table group where each table starts, ascending from 0.
        low, high: (T,) bounds of each table.
        table_indices: (T,) index of each table in the job.

    Raises:
        ValueError: a value for each table is needed, or the first row is not 0.
    """

    schema: Schema
    seed: int
    first_rows: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    table_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        tables = len(self.first_rows)
        require(tables > 0 and self.first_rows[0] == 0, "`first_rows` must start with 0")
        for name in ("low", "high", "table_indices"):
            values = getattr(self, name)
            require(len(values) == tables, f"`{name}` must have a value for each of {tables} tables, got {len(values)}")

    def of(self, rows_P: Positions) -> Bytes:
        """Returns the initial records of some rows of the table group: (P, B) uint8, fresh."""
        records_PW = np.zeros((len(rows_P), self.schema.width), np.float32)
        self.fill_(records_PW, rows_P)
        return records_of(records_PW, self.schema)

    def fill_(self, records_PW: Floats, rows_P: Positions) -> None:
        """Gives records their initial values, in place, as numbers.

        Args:
            records_PW: (P, W) float32, contiguous. Mutated.
            rows_P: (P,) int64, the row in the table group of each record; -1: it is padding, and all zeros.

        Raises:
            ValueError: a shape or a dtype does not fit, or a row is less than -1.
        """
        if records_PW.ndim != 2 or records_PW.dtype != np.float32 or not records_PW.flags.c_contiguous:
            raise ValueError(f"`records_PW` must be contiguous 2-D float32, got {records_PW.ndim}-D {records_PW.dtype}")
        width = self.schema.width
        require(records_PW.shape[1] == width, f"`records_PW` must have {width} columns, got {records_PW.shape[1]}")
        shape = (len(records_PW),)
        if rows_P.shape != shape or rows_P.dtype != np.int64:  # words for a dtype take longer than a few rows
            raise ValueError(f"`rows_P` must be int64 of shape {shape}, got {rows_P.dtype} of {rows_P.shape}")
        require(len(rows_P) == 0 or int(rows_P.min()) >= -1, "`rows_P` must not be less than -1")
        as_array: Any = np.array
        _initialise(
            records_PW,
            np.ascontiguousarray(rows_P),
            np.uint64(self.seed % 2**64),
            as_array(self.first_rows, np.int64),
            as_array(self.low, np.float32),
            as_array(self.high, np.float32),
            as_array(self.table_indices, np.int64),
            self.schema.dim,
        )


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    InitialRecords(Schema.of(1), 0, (0,), (0.0,), (0.0,), (0,)).of(np.zeros(1, np.int64))
