"""The deltas of a slot's last steps, by which it undoes and redoes steps and reads records as of an earlier step.

Terms. An *entry* is one step's change: for each table group, the positions that changed (ascending) and their deltas,
old XOR new of the record bytes. The log holds the steps floor+1 .. last without a gap. To see a record as of step t,
XOR it with the deltas of all steps after t. Example: a byte is 5 as of step 7; step 8 made it 4 (delta 1), step 9 made
it 6 (delta 2). `changes(after=7, through=9)` is 1 ^ 2 = 3, and 6 ^ 3 = 5.

A sealed log keeps the seal of each delta (`codec/seals.py`), made by who applied or folded it or when it is appended,
and a sum of each entry's positions, and looks at them whenever an entry is used. A delta is what nobody else may have,
so one that is damaged is an error: the slot's next host has the records from elsewhere, and needs no such log.

Invariants. `floor <= last`. `floor` only rises; `last` rises by one with `append` and falls by one with `pop`. Arrays
are kept, not copied, and never written.

Shapes: U positions of an entry, Q positions asked for, B bytes in a record.

Does not know records, parities or peers, and does not lock: its owner does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from torch_ecrec.codec import seals
from torch_ecrec.codec.field import as_words
from torch_ecrec.records.positions import Bytes, Positions, require_ascending
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.kernel_cache import kernel

Entry = tuple[tuple[Positions, Bytes], ...]
Sealed = tuple[
    tuple[seals.SealsOf, int], ...
]  # for each table group: the seals of its deltas, and a sum of its positions


def _plain_name(table_group: int, position: int) -> str:
    return f"position {position} of table group {table_group}"


@kernel()
def _match(positions_U: Any, wanted_Q: Any, index_Q: Any) -> Any:
    """index[q] = where wanted[q] is in the ascending positions, or -1; returns the number of matches.

    Searches forward from the last hit with doubling strides, so that ascending queries cost little; starts over when a
    query is smaller than the one before.
    """
    size = positions_U.shape[0]
    count, cursor = 0, 0
    for q in range(wanted_Q.shape[0]):
        wanted = wanted_Q[q]
        if q > 0 and wanted < wanted_Q[q - 1]:
            cursor = 0
        low, stride = cursor, 1
        while cursor + stride <= size and positions_U[cursor + stride - 1] < wanted:
            low = cursor + stride
            stride *= 2
        high = min(cursor + stride - 1, size)
        while low < high:
            middle = (low + high) // 2
            if positions_U[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        cursor = low
        if low < size and positions_U[low] == wanted:
            index_Q[q] = low
            count += 1
        else:
            index_Q[q] = -1
    return count


@kernel()
def _xor_matches(result_QW: Any, deltas_UW: Any, index_Q: Any) -> None:
    for q in range(index_Q.shape[0]):
        index = index_Q[q]
        if index >= 0:
            for j in range(result_QW.shape[1]):
                result_QW[q, j] ^= deltas_UW[index, j]


class DeltaLog:
    """The deltas of the steps floor + 1 to last.

    Args:
        table_groups: number of table groups of each entry.
        floor: the step before the first that will be appended.
        sealed: what is damaged is found when it is used.
        name_of: what a position of a table group is called in errors.
        error: what is raised of an entry that is damaged: below, `MemoryDamaged`.
    """

    def __init__(
        self,
        table_groups: int,
        floor: int = 0,
        sealed: bool = False,
        name_of: Callable[[int, int], str] = _plain_name,
        error: Callable[[str], Exception] = RuntimeError,
    ) -> None:
        require_int("table_groups", table_groups, 0)
        require_int("floor", floor, 0)
        self._table_groups = table_groups
        self._floor = floor  # only grows
        self._entries: deque[Entry] = deque()  # of the steps floor+1, floor+2, ...
        self._bytes = 0
        self._sealed: deque[Sealed] | None = deque() if sealed else None
        self._name_of, self._error = name_of, error

    @property
    def floor(self) -> int:
        """The earliest step that the log can go back to."""
        return self._floor

    @property
    def last(self) -> int:
        """The latest step held, or `floor` when there is none."""
        return self._floor + len(self._entries)

    @property
    def bytes(self) -> int:
        """The memory of all positions and deltas held, in bytes."""
        return self._bytes

    def append(
        self,
        step: int,
        positions: Sequence[Positions],
        deltas: Sequence[Bytes],
        of_deltas: Sequence[seals.SealsOf | None] | None = None,
    ) -> None:
        """Adds the next step.

        Args:
            step: `last + 1`.
            positions: for each table group (U,) int64, ascending, no duplicates. Kept: must not be written afterwards.
            deltas: for each table group (U, B) uint8. Kept, too.
            of_deltas: for each table group (U,) uint32, the seals of its deltas, where they are known already. Kept.

        Raises:
            ValueError: another step, or a shape, a dtype or the order of positions does not fit. Nothing was changed.
        """
        require(step == self.last + 1, f"`step` must be {self.last + 1}, the next after the last, got {step}")
        for name, arrays in (("positions", positions), ("deltas", deltas)):
            require(
                len(arrays) == self._table_groups,
                f"`{name}` must be one of each of {self._table_groups} table groups, got {len(arrays)}",
            )
        for table_group, (positions_U, deltas_UB) in enumerate(zip(positions, deltas, strict=True)):
            require_ascending(f"positions[{table_group}]", positions_U)
            if deltas_UB.ndim != 2 or deltas_UB.dtype != np.uint8 or len(deltas_UB) != len(positions_U):
                raise ValueError(
                    f"`deltas[{table_group}]` must be 2-D uint8 with {len(positions_U)} rows, got {deltas_UB.dtype} of"
                    f" {deltas_UB.shape}"
                )
        entry = tuple(zip(positions, deltas, strict=True))
        sealed = None if self._sealed is None else self._seal(entry, of_deltas)
        self._entries.append(entry)
        if self._sealed is not None and sealed is not None:
            self._sealed.append(sealed)
        self._bytes += _entry_bytes(entry)

    def _seal(self, entry: Entry, of_deltas: Sequence[seals.SealsOf | None] | None) -> Sealed:
        """Returns the checksums by which an entry is checked later.

        Raises ValueError if given seals do not fit its deltas.
        """
        known = [None] * self._table_groups if of_deltas is None else of_deltas
        require(
            len(known) == self._table_groups,
            f"`of_deltas` must be one of each of {self._table_groups} table groups, got {len(known)}",
        )
        found = []
        for table_group, ((positions_U, deltas_UB), seals_U) in enumerate(zip(entry, known, strict=True)):
            if seals_U is None:
                seals_U = seals.seals_of(deltas_UB)
            elif seals_U.dtype != np.uint32 or seals_U.shape != positions_U.shape:
                wanted = f"`of_deltas[{table_group}]` must be uint32 of shape {positions_U.shape}"
                raise ValueError(f"{wanted}, got {seals_U.dtype} of {seals_U.shape}")
            found.append((seals_U, _sum_of(positions_U)))
        return tuple(found)

    def pop(self) -> Entry:
        """Removes and returns the entry of the last step; `last` falls by one.

        Raises:
            LookupError: the log is empty.
            MemoryDamaged: the entry is not what was appended.
        """
        if not self._entries:
            raise LookupError(f"the log holds no step after {self._floor}")
        self.check(self.last)
        entry = self._entries.pop()
        if self._sealed is not None:
            self._sealed.pop()
        self._bytes -= _entry_bytes(entry)
        return entry

    def get(self, step: int) -> Entry:
        """Returns the entry of a step: (positions_U, deltas_UB) of each table group.

        Raises:
            LookupError: the step is not held.
        """
        if not self._floor < step <= self.last:
            raise LookupError(f"step {step} is not in the log, which holds {self._floor + 1}..{self.last}")
        return self._entries[step - self._floor - 1]

    def check(self, step: int, table_group: int | None = None, rows_M: Positions | None = None) -> None:
        """Checks that an entry is still what was appended.

        Args:
            step: the entry's.
            table_group: this one only.
            rows_M: (M,) int64, which of its deltas; all of them without.

        Raises:
            LookupError: the step is not held.
            MemoryDamaged: it is not.
        """
        entry = self.get(step)
        if self._sealed is None:
            return
        sealed = self._sealed[step - self._floor - 1]
        for index in range(self._table_groups) if table_group is None else (table_group,):
            (positions_U, deltas_UB), (seals_U, total) = entry[index], sealed[index]
            if _sum_of(positions_U) != total:
                raise self._error(
                    f"positions in the delta log of step {step}, table group {index}, are damaged in memory"
                )
            deltas_UB = np.ascontiguousarray(deltas_UB)
            rows = np.arange(len(positions_U)) if rows_M is None else rows_M
            broken_M = seals.broken(deltas_UB, seals_U, rows)
            if len(broken_M):
                name = self._name_of(index, int(positions_U[rows[broken_M[0]]]))
                many = f"{len(broken_M)} deltas of step {step} are damaged in memory"
                raise self._error(f"{many}, first that of {name}")

    def forget(self, through: int) -> None:
        """Drops the steps up to `through`. Never lowers the floor."""
        while self._entries and self._floor < through:
            self._bytes -= _entry_bytes(self._entries.popleft())
            if self._sealed is not None:
                self._sealed.popleft()
            self._floor += 1

    def parts(
        self, table_group: int, positions_Q: Positions, after: int, through: int
    ) -> list[tuple[Positions, Bytes]]:
        """Returns the changes that `changes` joins step by step, and only of the records that each step touched.

        Returns:
            For each step that touched some: (M,) int64, ascending indices into `positions_Q`, and (M, B) uint8, the
            deltas of these. Not to be written.

        Raises:
            As `changes`.
        """
        return [
            (rows_M, deltas_UB[index_Q[rows_M]])
            for index_Q, deltas_UB in self._matches(table_group, positions_Q, after, through)
            for rows_M in [np.flatnonzero(index_Q >= 0).astype(np.int64, copy=False)]
        ]

    def changes(self, table_group: int, positions_Q: Positions, after: int, through: int) -> Bytes | None:
        """Returns how the steps after < t <= through changed some records.

        Args:
            table_group: index of the table group.
            positions_Q: (Q,) int64, in any order (ascending is fastest), duplicates allowed.
            after: at least `floor`.
            through: at most `last`. Not above `after`: no change.

        Returns:
            (Q, B) uint8, the XOR of the deltas of each record, fresh; or None when none of them was touched.

        Raises:
            ValueError: `table_group` or `positions_Q` does not fit.
            LookupError: the log does not reach back to `after`, or forward to `through`.
            MemoryDamaged: a delta of them is not what was appended.
        """
        result: Bytes | None = None
        for index_Q, deltas_UB in self._matches(table_group, positions_Q, after, through):
            if result is None:
                result = np.zeros((len(positions_Q), deltas_UB.shape[1]), np.uint8)
            _xor_matches(result.view(np.uint32), as_words(deltas_UB), index_Q)
        return result

    def _matches(
        self, table_group: int, positions_Q: Positions, after: int, through: int
    ) -> Iterator[tuple[Positions, Bytes]]:
        """Yields, for each step that touched some of them, their indices in its entry (-1: untouched), and its deltas.

        All steps share one buffer of indices.
        """
        require(
            0 <= table_group < self._table_groups,
            f"`table_group` must be in 0..{self._table_groups - 1}, got {table_group}",
        )
        if positions_Q.ndim != 1 or positions_Q.dtype != np.int64:
            raise ValueError(f"`positions_Q` must be a 1-D int64 array, got {positions_Q.ndim}-D {positions_Q.dtype}")
        if after < self._floor or through > self.last:
            raise LookupError(
                f"steps {after + 1}..{through} are not all in the log, which holds {self._floor + 1}..{self.last}"
            )
        positions_Q = np.ascontiguousarray(positions_Q)
        index_Q = np.empty(len(positions_Q), np.int64)
        for step in range(after + 1, through + 1):
            positions_U, deltas_UB = self.get(step)[table_group]
            if _match(np.ascontiguousarray(positions_U), positions_Q, index_Q):
                self.check(step, table_group, index_Q[index_Q >= 0])
                yield index_Q, deltas_UB


def _sum_of(positions_U: Positions) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(positions_U).data)


def _entry_bytes(entry: Entry) -> int:
    return sum(positions_U.nbytes + deltas_UB.nbytes for positions_U, deltas_UB in entry)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    log = DeltaLog(1)
    positions_U = np.zeros(1, np.int64)
    log.append(1, [positions_U], [np.ones((1, 4), np.uint8)])
    log.changes(0, positions_U, 0, 1)
