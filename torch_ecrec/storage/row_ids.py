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
from numpy.typing import NDArray

from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime.checks import require

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


def encode(rows_N: Positions) -> tuple[RowIds, Bytes]:
    """Row numbers as bytes.

    Args:
        rows_N: (N,) int64, N >= 1, 0 to `ROW_MOST` - 1, in any order.

    Returns:
        How they are written, and (`nbytes`,) uint8.
    """
    require(rows_N.ndim == 1 and rows_N.dtype == np.int64 and len(rows_N) > 0, "`rows_N` must be (N,) int64, N >= 1")
    low, high = int(rows_N.min()), int(rows_N.max())
    require(low >= 0 and high < ROW_MOST, f"rows must be 0 to {ROW_MOST - 1}, got {low} to {high}")
    first = int(rows_N[0])
    if len(rows_N) == 1:
        return RowIds(first), np.empty(0, np.uint8)
    steps = np.diff(rows_N)
    starts_R = np.concatenate([[0], np.flatnonzero(steps[1:] != steps[:-1]) + 1])
    least = int(steps.min())
    span = int(steps.max()) - least
    width = next(width for width in _WIDTHS if span < 1 << (8 * width))
    if _RUN_BYTES * len(starts_R) < width * len(steps):
        ids = RowIds(first, runs=len(starts_R))
        times_R = np.diff(np.append(starts_R, len(steps))).astype("<u4")
        pieces: list[NDArray[Any]] = [steps[starts_R].astype("<i8"), times_R]
    else:
        ids = RowIds(first, width=width, least=least)
        pieces = [(steps - least).astype(f"<u{width}")]
    found = np.zeros(ids.nbytes(len(rows_N)), np.uint8)
    offset = 0
    for piece in pieces:
        found[offset : offset + piece.nbytes] = piece.view(np.uint8)
        offset += piece.nbytes
    return ids, found


def decode(ids: RowIds, count: int, data: Bytes) -> Positions:
    """The inverse of `encode`.

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
