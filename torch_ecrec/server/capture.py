"""What a slot gives to a checkpoint: its records as they were after one step, in portions, while later steps go on.

A capture of step t goes through the records once, in the order of their positions. Records that a later step changes
before the scan has reached them are kept first, as they were after t: by the delta, `old = new XOR delta`, so that the
step itself is not slower for it. So what is written is of t, whatever was applied meanwhile, and taken back too: only
steps after t are, and what they had changed is kept already.

Example: t = 7, the scan is at position 10. Step 8 changes the records 4 and 20. Record 4 was written as of 7 already;
the old bytes of record 20 are kept, and written when the scan comes there.

Pure: no threads, no files. What writes the portions asks for them inside `Node.run`.

Shapes: P records of a slab, U of them changed by a step, N in a portion, B record bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.records.positions import Bytes, Positions

POOL_BYTES = 16 << 20  # of kept records in one piece of memory

CLEAN, MARKED, KEPT = 0, 1, 2  # of a record: not in the capture; to be written as it is; to be written as it was kept

Marks = list[NDArray[np.uint8]]  # of each slab, (P,): CLEAN or MARKED


@dataclass(frozen=True)
class Portion:
    """Some records of one slab.

    Args:
        slab: which.
        rows_N: (N,) int64, slab rows, ascending within a rank of the layout.
        records_NB: (N, B) uint8.
    """

    slab: int
    rows_N: Positions
    records_NB: Bytes


def all_marked(held: Holdings) -> Marks:
    """Marks of every record of a slot."""
    return [np.full(shard.data_rows, MARKED, np.uint8) for shard in held.shards]


def none_marked(held: Holdings) -> Marks:
    """Marks of none."""
    return [np.zeros(shard.data_rows, np.uint8) for shard in held.shards]


def mark_changed_(marks: Marks, held: Holdings, after: int) -> None:
    """Marks what the logged steps after `after` have changed. Raises LookupError if the log does not reach back."""
    for step in range(after + 1, held.rule.applied + 1):
        for marks_P, (positions_U, _) in zip(marks, held.log.get(step), strict=True):
            marks_P[positions_U] = MARKED


class _Kept:
    """Records of one slab that were kept, in the order in which that was; found by their positions.

    So a portion costs what it has, however many steps have kept something.
    """

    def __init__(self, count: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._number_P = np.empty(count, np.min_scalar_type(count))  # of those that are KEPT
        self._most = max(1, POOL_BYTES // record_bytes)  # records of a piece
        self._pieces: list[Bytes] = []
        self._count = 0

    def add(self, positions_U: Positions, records_UB: Bytes) -> int:
        """Copies some; returns the memory that they take."""
        self._number_P[positions_U] = np.arange(self._count, self._count + len(positions_U))
        done = 0
        while done < len(positions_U):
            piece, first = divmod(self._count, self._most)
            if piece == len(self._pieces):
                self._pieces.append(np.empty((self._most, self._record_bytes), np.uint8))
            some = min(self._most - first, len(positions_U) - done)
            self._pieces[piece][first : first + some] = records_UB[done : done + some]
            self._count, done = self._count + some, done + some
        return self._number_P.itemsize * len(positions_U) + records_UB.nbytes

    def put_into(self, records_NB: Bytes, at_M: Positions, positions_M: Positions) -> None:
        """records[at[i]] = the one that was kept of positions[i]."""
        piece_M, row_M = np.divmod(self._number_P[positions_M].astype(np.int64), self._most)
        for piece in np.unique(piece_M):
            its = np.flatnonzero(piece_M == piece)
            records_NB[at_M[its]] = self._pieces[piece][row_M[its]]

    def clear(self) -> None:
        """Nobody will ask for them any more."""
        self._pieces.clear()


class Capture:
    """Records of one slot as they were after a step.

    Args:
        held: of the slot. Nothing of it is missing, and its log reaches back to `step`.
        step: which.
        marks: of the records that are wanted. Mutated.
        look: told of records (slab, (U,) int64 positions) before what they hold is taken: whether they are damaged.

    Attributes:
        kept_bytes: memory of what was kept, which is the price of not pausing.

    Raises:
        LookupError: the log does not reach back to `step`.
    """

    def __init__(
        self, held: Holdings, step: int, marks: Marks, look: Callable[[int, Positions], None] = lambda slab, at: None
    ) -> None:
        self.step, self.kept_bytes = step, 0
        self._look = look
        self._held, self._marks = held, marks
        self._slab = self._next = 0  # where the scan is
        self._kept = [_Kept(shard.data_rows, shard.schema.nbytes) for shard in held.shards]
        for later in range(step + 1, held.rule.applied + 1):
            for slab, (positions_U, _) in enumerate(held.log.get(later)):
                wanted_U = positions_U[marks[slab][positions_U] == MARKED]
                look(slab, wanted_U)
                self._keep(slab, wanted_U, held.records_as_of(slab, wanted_U, step))

    def before_forgetting(self, positions: Sequence[Positions], deltas: Sequence[Bytes]) -> None:
        """A step was applied that changed these records (U,) of each slab by these deltas (U, B)."""
        for slab in range(self._slab, len(self._marks)):
            positions_U, marks_P = positions[slab], self._marks[slab]
            wanted_U = marks_P[positions_U] == MARKED
            if slab == self._slab:
                wanted_U &= positions_U >= self._next
            at = np.flatnonzero(wanted_U)
            if len(at):
                self._look(slab, positions_U[at])
                old_UB = self._held.shards[slab].gather(positions_U[at])
                np.bitwise_xor(old_UB, deltas[slab][at], out=old_UB)
                self._keep(slab, positions_U[at], old_UB)

    def _keep(self, slab: int, positions_U: Positions, records_UB: Bytes) -> None:
        if len(positions_U):
            self._marks[slab][positions_U] = KEPT
            self.kept_bytes += self._kept[slab].add(positions_U, records_UB)

    def next_portion(self, most_bytes: int) -> Portion | None:
        """The next records, of at most so many bytes (at least one record); None: that was all.

        A portion may have fewer, or none where nothing is marked.
        """
        shards = self._held.shards
        while self._slab < len(shards) and self._next >= shards[self._slab].data_rows:
            self._kept[self._slab].clear()
            self._slab, self._next = self._slab + 1, 0
        if self._slab == len(shards):
            return None
        slab, first = self._slab, self._next
        end = min(shards[slab].data_rows, first + max(1, most_bytes // shards[slab].schema.nbytes))
        wanted_N = first + np.flatnonzero(self._marks[slab][first:end]).astype(np.int64, copy=False)
        self._look(slab, wanted_N)
        records_NB = shards[slab].gather(wanted_N)
        kept_M = np.flatnonzero(self._marks[slab][wanted_N] == KEPT).astype(np.int64, copy=False)
        self._kept[slab].put_into(records_NB, kept_M, wanted_N[kept_M])
        self._next = end
        return Portion(slab, self._held.layouts[slab].row_at(self._held.index, wanted_N), records_NB)

    @property
    def fraction(self) -> float:
        """How far the scan is, of all records."""
        rows = [shard.data_rows for shard in self._held.shards]
        done = sum(rows[: self._slab]) + (self._next if self._slab < len(rows) else 0)
        return done / max(1, sum(rows))
