"""Copies one shard's records as they were at one moment, in portions, while steps go on.

Each record has a mark: clean, it is not wanted; marked, it is, and is in its shard as it is wanted; kept, there is a
copy of it as it was, with its seal of then, in pieces of memory, in the order in which they were kept:

    marks    number     pieces (two records each)
    kept     1          [of position 2, of position 0] [of position 4, -]
    clean    -
    kept     0
    marked   -
    kept     2

What is done to a record is done while it is in the cache: it is copied, and checked against its seal. So a portion
costs what it has, however large the shard is and however many steps have kept something.

A kept record's seal is its seal of now XOR that of what has changed, as `codec/seals.py` has it, and never made from
the copy: whatever was damaged, before it was kept or since, shows in the portion that has it.

Shapes: P records of a shard, U of them changed by a step, M wanted, X where they lie, C pieces, R records of a piece, B
bytes and W words of a record.

Does not know steps, slots or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from torch_ecrec.codec.field import WORD_BYTES, as_words
from torch_ecrec.codec.seals import SEAL_BYTES, SealsOf, seal_at
from torch_ecrec.records.positions import Bytes, Positions, check_positions
from torch_ecrec.records.store import MemoryStore, RecordStore
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import AHEAD, addresses, pointer, prefetch

CLEAN, MARKED, KEPT = 0, 1, 2
POOL_BYTES = 16 << 20  # of kept records in one piece of memory
LOOKS_MOST = 1 << 18  # marks, for one portion: where hardly any record is wanted, steps do not wait for all of them

MarksOf = NDArray[np.uint8]  # (P,)
_NO_SEALS = np.empty(0, np.uint32)


@kernel()
def _find(marks_P: Any, first: Any, positions_U: Any, number_P: Any, kept: Any, at_U: Any) -> Any:
    """Finds the changed records that are marked and at `first` or behind it: these are kept from now on.

    Args:
        kept: how many are kept so far.
        at_U: written: of those, the indices into `positions_U`.

    Returns:
        How many they are.
    """
    count = 0
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        if position >= first and marks_P[position] == MARKED:
            marks_P[position] = KEPT
            number_P[position] = kept + count
            at_U[count] = i
            count += 1
    return count


@kernel()
def _keep(
    source_XW: Any, seals_X: Any, at_M: Any, deltas_UW: Any, index_M: Any, kept: Any, address_C: Any, piece_rows: Any
) -> None:
    """Copies what changed records were: each at at[m] of the source, changed by deltas[index[m]]."""
    words, sealed = source_XW.shape[1], seals_X.shape[0] > 0
    source, deltas, size = source_XW.ctypes.data, deltas_UW.ctypes.data, words * WORD_BYTES
    for m in range(at_M.shape[0]):
        if m + AHEAD < at_M.shape[0]:
            prefetch(source + at_M[m + AHEAD] * size, size)
        index, number = index_M[m], kept + m
        place = address_C[number // piece_rows] + number % piece_rows * (size + SEAL_BYTES)
        into_W = carray(pointer(place), words + 1, np.uint32)
        for j in range(words):
            into_W[j] = source_XW[at_M[m], j] ^ deltas_UW[index, j]
        if sealed:
            into_W[words] = seals_X[at_M[m]] ^ seal_at(deltas + index * size, words)


@kernel()
def _scan(marks_P: Any, first: Any, end: Any, positions_M: Any) -> Any:
    """Writes the next wanted positions; returns how many, and where to go on. `positions_M` has room for one more."""
    count, position, most = 0, first, positions_M.shape[0] - 1
    while position < end and count < most:
        positions_M[count] = position  # overwritten by the next one if it is not wanted: no branch to guess
        count += marks_P[position] != CLEAN
        position += 1
    return count, position


@kernel()
def _copy(
    marks_P: Any,
    positions_M: Any,
    source_XW: Any,
    seals_X: Any,
    at_M: Any,
    number_P: Any,
    address_C: Any,
    piece_rows: Any,
    into_MW: Any,
    broken_M: Any,
) -> Any:
    """Copies records into `into_MW`, those that are kept from their pieces; returns how many are broken.

    Args:
        broken_M: written: which of them are broken.
    """
    count = positions_M.shape[0]
    words, sealed, broken = source_XW.shape[1], seals_X.shape[0] > 0, 0
    source, into, size = source_XW.ctypes.data, into_MW.ctypes.data, words * WORD_BYTES
    from_M = np.empty(count, np.int64)
    for m in range(count):
        if marks_P[positions_M[m]] == KEPT:
            number = np.int64(number_P[positions_M[m]])
            from_M[m] = address_C[number // piece_rows] + number % piece_rows * (size + SEAL_BYTES)
        else:
            from_M[m] = source + at_M[m] * size
    for m in range(count):
        if m + AHEAD < count:
            prefetch(from_M[m + AHEAD], size)
        is_kept = marks_P[positions_M[m]] == KEPT
        from_W = carray(pointer(from_M[m]), words + is_kept, np.uint32)
        for j in range(words):
            into_MW[m, j] = from_W[j]
        if sealed:
            seal = from_W[words] if is_kept else seals_X[at_M[m]]
            if seal_at(into + m * size, words) != seal:
                broken_M[broken] = m
                broken += 1
    return broken


class Captured:
    """The wanted records of one shard as they are at construction. `keep` must be told of every later change.

    Args:
        store: the shard's own records.
        marks_P: (P,) uint8, `MARKED` where a record is wanted, else `CLEAN`. Mutated.

    Attributes:
        next: position from which on records were not given yet.
        kept_bytes: memory of what is kept.
    """

    def __init__(self, store: RecordStore, marks_P: MarksOf) -> None:
        count, self._bytes, self._store = store.rows, store.nbytes, store
        good = marks_P.dtype == np.uint8 and marks_P.shape == (count,) and marks_P.flags.c_contiguous
        require(good, f"`marks_P` must be {count} contiguous uint8, got {marks_P.dtype} of {marks_P.shape}")
        require(not count or marks_P.max() <= MARKED, "`marks_P` must be CLEAN or MARKED")
        self._marks_P = marks_P
        self._number_P = np.empty(count, np.uint32 if count < 1 << 32 else np.uint64)  # of those that are KEPT
        self._piece_rows = max(1, POOL_BYTES // (self._bytes + SEAL_BYTES))
        self._pieces: list[Bytes] = []
        self._address_C = np.empty(0, np.int64)
        self._kept = self.next = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept * (self._number_P.itemsize + self._bytes + SEAL_BYTES)

    def keep(self, positions_U: Positions, deltas_UB: Bytes) -> None:
        """Called after records changed: keeps the old values of those that are wanted and were not given or kept yet.

        Args:
            positions_U: (U,) int64, no duplicates.
            deltas_UB: (U, B) uint8, what has changed in each since they were as wanted: old XOR new.

        Raises:
            ValueError: the arguments do not fit.
            IndexError: a position is out of range. Nothing was changed then.
        """
        positions_U, deltas_UW = check_positions(positions_U, len(self._marks_P)), as_words(deltas_UB)
        wanted = (len(positions_U), self._bytes)
        fits = deltas_UB.shape == wanted and deltas_UB.dtype == np.uint8
        require(fits, f"`deltas_UB` must be uint8 of {wanted}, got {deltas_UB.dtype} of {deltas_UB.shape}")
        self._make_room(len(positions_U))
        at_U = np.empty(len(positions_U), np.int64)
        count = _find(self._marks_P, self.next, positions_U, self._number_P, self._kept, at_U)
        if not count:
            return
        index_M = at_U[:count]
        source_XW, seals_X, at_M = self._look(positions_U[index_M])
        _keep(source_XW, seals_X, at_M, deltas_UW, index_M, self._kept, self._address_C, self._piece_rows)
        self._kept += count

    def _look(self, positions_M: Positions, read: Any = None) -> tuple[NDArray[np.uint32], SealsOf, Positions]:
        """Records where they lie, as kernels take them. `read`: see `RecordStore.look`."""
        view = self._store.look(positions_M, read)
        return view.records_XB.view(np.uint32), _NO_SEALS if view.seals_X is None else view.seals_X, view.at_U

    def _make_room(self, count: int) -> None:
        """Makes room for `count` more records. Memory that is never written costs nothing."""
        while len(self._pieces) * self._piece_rows < self._kept + count:
            self._pieces.append(np.empty((self._piece_rows, self._bytes + SEAL_BYTES), np.uint8))
        if len(self._pieces) != len(self._address_C):
            self._address_C = addresses(self._pieces, self._bytes + SEAL_BYTES, np.uint8)

    def _next(self, most: int) -> tuple[Positions, int]:
        """Returns the positions of the next portion, (M,) int64, and where the one after it begins."""
        end = min(len(self._marks_P), self.next + LOOKS_MOST)
        positions_M = np.empty(min(most, end - self.next) + 1, np.int64)
        count, behind = _scan(self._marks_P, self.next, end, positions_M)
        return positions_M[:count], behind

    def absent(self, most: int) -> Any:
        """Returns what reads those of the next portion that are on a disk only; None: none is."""
        return None if self._store.in_place else self._store.absent(self._next(most)[0])

    def portion(self, most: int, read: Any = None) -> tuple[Positions, Bytes, Positions]:
        """Returns the next records.

        Args:
            most: records, at least 1. There may be fewer, or none where nothing is wanted.
            read: what `absent` has returned for as many, once it was run.

        Returns:
            Their positions, (M,) int64, ascending; the records, (M, B) uint8, fresh; and the positions of those that
            do not fit their seals, whether they are damaged in the shard or where they were kept.
        """
        positions_M, self.next = self._next(most)
        count = len(positions_M)
        records_MB, broken_M = shared.empty((count, self._bytes), np.uint8), np.empty(count, np.int64)
        source_XW, seals_X, at_M = self._look(positions_M, read)
        broken = _copy(
            self._marks_P,
            positions_M,
            source_XW,
            seals_X,
            at_M,
            self._number_P,
            self._address_C,
            self._piece_rows,
            records_MB.view(np.uint32),
            broken_M,
        )
        return positions_M, records_MB, positions_M[broken_M[:broken]]

    @property
    def is_over(self) -> bool:
        """Whether all wanted records were given."""
        return self.next >= len(self._marks_P)

    def let_go(self) -> None:
        """Releases the memory of the kept values: no more portions will be asked for."""
        self._pieces.clear()
        self._address_C = np.empty(0, np.int64)
        self._kept = 0


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    record, marked, at = np.zeros((1, WORD_BYTES), np.uint8), np.full(1, MARKED, np.uint8), np.zeros(1, np.int64)
    captured = Captured(MemoryStore(1, WORD_BYTES), marked)
    captured.keep(at, record)
    captured.portion(1)
