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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec.field import as_words
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.records import captured
from torch_ecrec.records.captured import KEPT, MARKED
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime import shared

POOL_BYTES = 16 << 20  # of kept records in one piece of memory
LOOKS_MOST = 1 << 18  # marks, for one portion: where hardly any record is wanted, steps do not wait for all of them

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

    def rooms(self, positions_U: Positions) -> Iterator[tuple[slice, Bytes]]:
        """Memory for some, in as many pieces as it takes: which of them, and (those, B) uint8 to be filled."""
        self._number_P[positions_U] = np.arange(self._count, self._count + len(positions_U))
        done = 0
        while done < len(positions_U):
            piece, first = divmod(self._count, self._most)
            if piece == len(self._pieces):
                self._pieces.append(np.empty((self._most, self._record_bytes), np.uint8))
            some = min(self._most - first, len(positions_U) - done)
            yield slice(done, done + some), self._pieces[piece][first : first + some]
            self._count, done = self._count + some, done + some

    def memory_of(self, count: int) -> int:
        """Bytes that so many take."""
        return count * (self._number_P.itemsize + self._record_bytes)

    def add(self, positions_U: Positions, records_UB: Bytes) -> int:
        """Copies some; returns the memory that they take."""
        for some, room in self.rooms(positions_U):
            room[:] = records_UB[some]
        return self.memory_of(len(positions_U))

    def put_into(self, records_NB: Bytes, at_M: Positions, positions_M: Positions) -> None:
        """records[at[i]] = the one that was kept of positions[i]."""
        piece_M, row_M = np.divmod(self._number_P[positions_M].astype(np.int64), self._most)
        records_NW = records_NB.view(np.uint32)
        for piece in np.flatnonzero(np.bincount(piece_M)):
            its = np.flatnonzero(piece_M == piece)
            captured.copy(as_words(self._pieces[piece]), row_M[its], records_NW, at_M[its])

    def clear(self) -> None:
        """Nobody will ask for them any more."""
        self._pieces.clear()


class Capture:
    """Records of one slot as they were after a step.

    Args:
        held: of the slot. Nothing of it is missing, and its log reaches back to `step`.
        step: which.
        marks: of the records that are wanted. Mutated.
        look: told of records (slab, (U,) int64 positions) some of which are damaged when what they hold is taken; and
            of those that are kept at the beginning, whether they are.

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
            at_M = captured.pick_(self._marks[slab], positions[slab], self._next if slab == self._slab else 0)
            if not len(at_M):
                continue
            positions_M, broken = positions[slab][at_M], 0
            for some, room_MB in self._kept[slab].rooms(positions_M):
                broken += self._held.shards[slab].source.take_before(
                    positions_M[some], deltas[slab], at_M[some], room_MB
                )
            self.kept_bytes += self._kept[slab].memory_of(len(at_M))
            if broken:
                self._look(slab, positions_M)

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
        slab, shard = self._slab, shards[self._slab]
        most, end = max(1, most_bytes // shard.schema.nbytes), min(shard.data_rows, self._next + LOOKS_MOST)
        wanted_N, source_N, self._next = captured.scan(self._marks[slab], self._next, end, most)
        records_NB = shared.empty((len(wanted_N), shard.schema.nbytes), np.uint8)
        if shard.source.take(source_N, records_NB):
            self._look(slab, source_N[source_N >= 0])
        kept_M = np.flatnonzero(source_N < 0)
        self._kept[slab].put_into(records_NB, kept_M, wanted_N[kept_M])
        return Portion(slab, self._held.layouts[slab].row_at(self._held.index, wanted_N), records_NB)

    @property
    def fraction(self) -> float:
        """How far the scan is, of all records."""
        rows = [shard.data_rows for shard in self._held.shards]
        done = sum(rows[: self._slab]) + (self._next if self._slab < len(rows) else 0)
        return done / max(1, sum(rows))
