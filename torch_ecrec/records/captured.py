"""What a capture does to many records at once: it finds those that are wanted, and copies them out of their shard.

Each record has a mark: clean, it is not wanted; marked, it is, and is in its shard as it is wanted; kept, there is a
copy of it as it was. A copy is checked against the record's seal while it is in the cache: one pass over memory that is
much larger.

Shapes: P records of a shard, U of them changed by a step, N taken, M wanted, R rows of a target, B bytes and W words of
a record.

Does not know steps, slots or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec.field import WORD_BYTES, as_words
from torch_ecrec.codec.seals import SealsOf, seal_at
from torch_ecrec.records.positions import Bytes, Positions, check_positions
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import first_outside, prefetch_row

CLEAN, MARKED, KEPT = 0, 1, 2

MarksOf = NDArray[np.uint8]  # (P,)
Words = NDArray[np.uint32]


@kernel()
def _pick(marks_P: Any, positions_U: Any, first: Any, at_U: Any) -> Any:
    count = 0
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        if position >= first and marks_P[position] == MARKED:
            marks_P[position] = KEPT
            at_U[count] = i
            count += 1
    return count


@kernel()
def _scan(marks_P: Any, first: Any, end: Any, most: Any, positions_M: Any, source_M: Any) -> Any:
    count, position = 0, first
    while position < end and count < most:
        mark = marks_P[position]
        positions_M[count] = position  # overwritten by the next one if it is not wanted: no branch to guess
        source_M[count] = -1 if mark == KEPT else position
        count += mark != CLEAN
        position += 1
    return count, position


@kernel()
def _take(source_PW: Any, seals_P: Any, positions_N: Any, into_NW: Any) -> Any:
    words, sealed, broken = source_PW.shape[1], seals_P.shape[0] > 0, 0
    into = into_NW.ctypes.data
    for i in range(positions_N.shape[0]):
        prefetch_row(source_PW, positions_N, i)
        position = positions_N[i]
        if position < 0:
            continue
        for j in range(words):
            into_NW[i, j] = source_PW[position, j]
        if sealed:
            broken += seal_at(into + i * words * WORD_BYTES, words) != seals_P[position]
    return broken


@kernel()
def _take_before(source_PW: Any, seals_P: Any, positions_N: Any, deltas_UW: Any, at_N: Any, into_NW: Any) -> Any:
    words, sealed, broken = source_PW.shape[1], seals_P.shape[0] > 0, 0
    source = source_PW.ctypes.data
    for i in range(positions_N.shape[0]):
        prefetch_row(source_PW, positions_N, i)
        prefetch_row(deltas_UW, at_N, i)
        position, at = positions_N[i], at_N[i]
        for j in range(words):
            into_NW[i, j] = source_PW[position, j] ^ deltas_UW[at, j]
        if sealed:
            broken += seal_at(source + position * words * WORD_BYTES, words) != seals_P[position]
    return broken


@kernel()
def _copy(source_PW: Any, rows_M: Any, into_RW: Any, at_M: Any) -> None:
    for i in range(rows_M.shape[0]):
        prefetch_row(source_PW, rows_M, i)
        for j in range(source_PW.shape[1]):
            into_RW[at_M[i], j] = source_PW[rows_M[i], j]


def pick_(marks_P: MarksOf, positions_U: Positions, first: int) -> Positions:
    """Which of some records are marked, and at `first` or behind it; they count as kept from now on.

    Args:
        marks_P: mutated.
        positions_U: (U,) int64, no duplicates.
        first: a position.

    Returns:
        (M,) int64, ascending indices into `positions_U`, fresh.
    """
    at_U = np.empty(len(positions_U), np.int64)
    return at_U[: _pick(marks_P, positions_U, first, at_U)]


def scan(marks_P: MarksOf, first: int, end: int, most: int) -> tuple[Positions, Positions, int]:
    """The next records that are wanted.

    Args:
        marks_P: of all.
        first, end: positions; it looks at no other.
        most: records, at least 1.

    Returns:
        Their positions, (M,) int64, ascending; the same, with -1 where a record was kept; the position where to go on.
    """
    most = min(most, end - first)
    positions_M, source_M = np.empty(most + 1, np.int64), np.empty(most + 1, np.int64)  # one that is not wanted, too
    count, then = _scan(marks_P, first, end, most, positions_M, source_M)
    return positions_M[:count], source_M[:count], then


def copy(source_PW: Words, rows_M: Positions, into_RW: Words, at_M: Positions) -> None:
    """into[at[i]] = source[rows[i]]; (M,) int64 each, contiguous."""
    _copy(source_PW, rows_M, into_RW, at_M)


class Source:
    """Where records are copied from: those of a shard, as they are when it is asked.

    Args:
        records_PB: (P, B) uint8, contiguous.
        seals_P: (P,) uint32, theirs; None: there are none.
    """

    def __init__(self, records_PB: Bytes, seals_P: SealsOf | None) -> None:
        self._records_PW, self._bytes = records_PB.view(np.uint32), records_PB.shape[1]
        self._seals_P = np.empty(0, np.uint32) if seals_P is None else seals_P

    def take(self, positions_N: Positions, into_NB: Bytes) -> int:
        """Copies records.

        Args:
            positions_N: (N,) int64; -1 leaves a row of `into_NB` as it is.
            into_NB: (N, B) uint8, contiguous. Mutated.

        Returns:
            How many do not fit their seals; 0 where there are none.

        Raises:
            ValueError: `into_NB` has another shape.
            IndexError: a position is out of range. Nothing was changed then.
        """
        positions_N, into_NW = self._checked(positions_N, -1, into_NB)
        return int(_take(self._records_PW, self._seals_P, positions_N, into_NW))

    def take_before(self, positions_N: Positions, deltas_UB: Bytes, at_N: Positions, into_NB: Bytes) -> int:
        """The same of records as they were before the last step, which has changed all of them.

        Args:
            positions_N: (N,) int64.
            deltas_UB: (U, B) uint8, what it has changed, old XOR new.
            at_N: (N,) int64, the delta of each record.
            into_NB: (N, B) uint8, contiguous. Mutated.
        """
        positions_N, into_NW = self._checked(positions_N, 0, into_NB)
        at_N, deltas_UW = check_positions(at_N, len(deltas_UB)), as_words(deltas_UB)
        require(at_N.shape == positions_N.shape, f"`at_N` must be {len(positions_N)} indices, got {len(at_N)}")
        return int(_take_before(self._records_PW, self._seals_P, positions_N, deltas_UW, at_N, into_NW))

    def _checked(self, positions_N: Positions, least: int, into_NB: Bytes) -> tuple[Positions, Words]:
        shape, rows = (len(positions_N), self._bytes), len(self._records_PW)
        good = into_NB.dtype == np.uint8 and into_NB.shape == shape and into_NB.flags.c_contiguous
        require(good, f"`into_NB` must be contiguous uint8 of {shape}, got {into_NB.dtype} of {into_NB.shape}")
        positions_N = np.ascontiguousarray(positions_N, dtype=np.int64)
        if (outside := first_outside(positions_N, least, rows)) >= 0:
            raise IndexError(f"position {positions_N[outside]} is out of range: there are {rows} records")
        return positions_N, into_NB.view(np.uint32)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    words, at = np.zeros((1, 1), np.uint32), np.zeros(1, np.int64)
    pick_(np.zeros(1, np.uint8), at, 0)
    scan(np.zeros(1, np.uint8), 0, 1, 1)
    source, record = Source(words.view(np.uint8), np.zeros(1, np.uint32)), np.zeros((1, 4), np.uint8)
    source.take(at, record)
    source.take_before(at, record, at, record.copy())
    copy(words, at, words.copy(), at)
