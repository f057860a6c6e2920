"""Row numbers in few bytes: as differences, in runs of equal ones or one by one in the smallest unsigned numbers.

    rows 5 8 11 14 40 43 46      differences 3 3 3 26 3 3: runs (3, 3 times), (26, once), (3, twice)
    rows 5 6 9 70 71             differences 1 3 61 1: less the least of them, 1, they are 0 2 60 0, a byte each

A slot of a full checkpoint has arithmetic progressions, a few runs for any number of rows; an incremental one has
ascending rows, mostly a byte or two each. Rows in any other order, and twice the same, are written too.

Shapes: N rows, R runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel

ROW_MOST = 1 << 53  # rows are below: differences fit into 8 bytes with room
ALIGN = 8  # bytes: what follows row numbers begins at a multiple
_WIDTHS = (1, 2, 4, 8)
_RUN_BYTES = 12  # a difference of 8 bytes, and how many times, of 4

Row = Annotated[int, Meta(ge=0, lt=ROW_MOST)]
Width = Annotated[int, Meta(ge=0, le=8)]


class RowIds(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the numbers of N rows are written.

    Attributes:
        first: the first row.
        runs: R; 0: differences one by one, each of `width` bytes, less `least`.
        width, least: see `runs`; 0 where there are runs, or one row.
    """

    first: Row
    runs: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    width: Width = 0
    least: Annotated[int, Meta(gt=-ROW_MOST, lt=ROW_MOST)] = 0

    def nbytes(self, count: int) -> int:
        """Bytes of `count` rows so written, to the next multiple of `ALIGN`."""
        return _aligned(_RUN_BYTES * self.runs if self.runs else self.width * (count - 1))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@kernel()
def _survey(rows_N: Any) -> Any:
    """Returns the least and largest row, the least and largest difference, and how many runs there are, of two rows or
    more."""
    low = high = rows_N[0]
    least = most = before = rows_N[1] - rows_N[0]
    runs = 1
    for i in range(1, rows_N.shape[0]):
        step = rows_N[i] - rows_N[i - 1]
        runs += step != before
        before = step
        low, high = min(low, rows_N[i]), max(high, rows_N[i])
        least, most = min(least, step), max(most, step)
    return low, high, least, most, runs


@kernel()
def _write_runs(rows_N: Any, steps_R: Any, times_R: Any) -> None:
    run, before = -1, np.int64(0)
    for i in range(1, rows_N.shape[0]):
        step = rows_N[i] - rows_N[i - 1]
        if run < 0 or step != before:
            run += 1
            steps_R[run], times_R[run] = step, 0
        times_R[run] += 1
        before = step


@kernel()
def _write_steps(rows_N: Any, least: Any, width: Any, into: Any) -> None:
    """Differences less `least`, each in `width` bytes, the lowest first."""
    if width == 1:  # nearly all: without an inner loop it is vectorised
        for i in range(1, rows_N.shape[0]):
            into[i - 1] = rows_N[i] - rows_N[i - 1] - least
        return
    for i in range(1, rows_N.shape[0]):
        left = rows_N[i] - rows_N[i - 1] - least
        for j in range((i - 1) * width, i * width):
            into[j] = left & 0xFF
            left >>= 8


def encode(rows_N: Positions) -> tuple[RowIds, Bytes]:
    """Returns row numbers as bytes.

    Args:
        rows_N: (N,) int64, N >= 1, 0 to `ROW_MOST` - 1, in any order.

    Returns:
        How they are written, and (`nbytes`,) uint8.
    """
    require(rows_N.ndim == 1 and rows_N.dtype == np.int64 and len(rows_N) > 0, "`rows_N` must be (N,) int64, N >= 1")
    first = low = high = int(rows_N[0])
    if len(rows_N) > 1:
        low, high, least, most, runs = map(int, _survey(rows_N))
    require(low >= 0 and high < ROW_MOST, f"rows must be 0 to {ROW_MOST - 1}, got {low} to {high}")
    if len(rows_N) == 1:
        return RowIds(first), np.empty(0, np.uint8)
    width = next(width for width in _WIDTHS if most - least < 1 << (8 * width))
    if _RUN_BYTES * runs < width * (len(rows_N) - 1):
        ids = RowIds(first, runs=runs)
        found = np.zeros(ids.nbytes(len(rows_N)), np.uint8)
        _write_runs(rows_N, found[: 8 * runs].view("<i8"), found[8 * runs : _RUN_BYTES * runs].view("<u4"))
    else:
        ids = RowIds(first, width=width, least=least)
        found = np.zeros(ids.nbytes(len(rows_N)), np.uint8)
        _write_steps(rows_N, least, width, found)
    return ids, found


def decode(ids: RowIds, count: int, data: Bytes) -> Positions:
    """Returns the row numbers of which `encode` gave these bytes.

    Args:
        ids: how they are written.
        count: N >= 1.
        data: (`ids.nbytes(count)`,) uint8.

    Raises:
        ValueError: no `count` rows, or some that cannot be.
    """
    if count == 1:
        return np.array([ids.first], np.int64)
    if ids.runs:
        steps_R = data[: 8 * ids.runs].view("<i8")
        times_R = data[8 * ids.runs : _RUN_BYTES * ids.runs].view("<u4").astype(np.int64)
        require(int(times_R.sum()) == count - 1, f"runs are of {int(times_R.sum()) + 1} rows, not {count}")
        steps = np.repeat(steps_R, times_R)
    else:
        require(ids.width in _WIDTHS, f"row numbers have 1, 2, 4 or 8 bytes, not {ids.width}")
        steps = data[: ids.width * (count - 1)].view(f"<u{ids.width}").astype(np.int64) + ids.least
    rows_N = np.empty(count, np.int64)
    rows_N[0] = ids.first
    np.cumsum(steps, out=rows_N[1:])
    rows_N[1:] += ids.first
    require(int(rows_N.min()) >= 0, "a row is negative")
    return rows_N


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    encode(np.arange(64))  # one run
    encode(np.arange(64) ** 2)  # differences
