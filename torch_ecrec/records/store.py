"""Where records lie. `Shard` has the verbs; a store has the bytes, in memory here, in memory and on a disk in `tiers/`.

A verb asks for the records that it is about to read or change, and is given a `View`: an array of records, their seals,
and where each record that it asked for lies in that array. Kernels index the array by those places, so that they are
the same for all stores. In memory the array is all records, a place is a position, and a view costs nothing.

    store.at([7, 3], Use.CHANGE)     in memory:  View(all records, all seals, [7, 3])
                                     in tiers:   View(the frames, their seals, [120, 4]), once both are in frames

Invariants. A view is valid until the next call of its store. Whoever asked for `CHANGE`, `FOLD` or `REPLACE` changes
the bytes and keeps up the seals before then; whoever asked for `READ` changes nothing.

Shapes: P records of the store, U asked for, X of the array of a view, B bytes of a record.

Does not know what a record holds, steps or slots, and does not lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from torch_ecrec.codec import seals
from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.records.pages import Memory, ReadyMemory
from torch_ecrec.records.positions import Bytes, Positions

INITIAL_AT_ONCE = 1 << 16  # records

First = Callable[[Positions], Bytes]
"""What some records are, (U, B) uint8 fresh, before anything was written to them, by their positions, (U,) int64."""


class Use(Enum):
    """Says for which purpose records are asked for."""

    READ = "read"  # to read them, as training does: they will soon be asked for again
    CHANGE = "change"  # to read and change them
    FOLD = "fold"  # to XOR something into them: what they are need not be known
    REPLACE = "replace"  # to overwrite each of them wholly


class View(NamedTuple):
    """Records where they lie now."""

    records_XB: Bytes  # (X, B) uint8, contiguous
    seals_X: SealsOf | None  # (X,) uint32; None where the store keeps none
    at_U: Positions  # (U,) int64, where each that was asked for is in these; -1 for a position of -1


class RecordStore(Protocol):
    """Records by position, zeros at first. Implemented by `MemoryStore` and `tiers/tiered.py:TieredStore`.

    Attributes:
        rows: how many there are.
        nbytes: bytes of each.
        frames: for how many of them there is memory.
        sealed: seals are kept.
        in_place: all records are one array in memory, and places are positions.
    """

    rows: int
    nbytes: int
    frames: int
    sealed: bool
    in_place: bool

    def begin_(self, first: First) -> None:
        """Gives every record its first value, now or when it is first asked for."""

    def at(self, positions_U: Positions, use: Use) -> View:
        """Returns where some records lie.

        Args:
            positions_U: (U,) int64, -1 skips one.
            use: what is done with them.

        Raises:
            IndexError: a position is out of range. A store in memory leaves that to the kernels, which look anyway.
        """

    def absent(self, positions_U: Positions) -> Any:
        """Returns what reads those of some records that are on a disk only, a `Reading` for `look`; None: none is."""

    def look(self, positions_U: Positions, read: Any = None) -> View:
        """As `at` to read, for one who passes by (a rebuild, a checkpoint): others stay where they are for training.

        Args:
            positions_U: as of `at`.
            read: what `absent` has returned for the same ones, once it was run: only what has changed since is read.
        """

    def seals_at(self, positions_U: Positions) -> SealsOf:
        """Returns the seals of some records, (U,) uint32 fresh, wherever these are. Only where seals are kept."""

    def broken_run(self, first: int, end: int) -> Positions:
        """Returns which from `first` to `end` do not fit their seals, of those in memory: (M,) int64, ascending.

        Those on a disk only are for `scan`. Only where seals are kept.
        """

    def scan(self, first: int, end: int, most_bytes: int) -> tuple[int, Any]:
        """Begins to look at those from `first` to `end` that are on a disk only.

        Returns:
            How far that goes for so many bytes of the disk, but for one at least; and what reads them, a `Reading` for
            `scanned`; None: none of them is there.
        """

    def scanned(self, reading: Any) -> tuple[Positions, Positions]:
        """Returns which of these, (M,) int64, fit their seals, and which do not. Those that have moved are neither."""

    def keep_last_(self, runs: Sequence[tuple[int, int]]) -> None:
        """Keeps some records in memory until no others are left to leave it; see `TieredStore.keep_last_`."""

    def take_damaged(self) -> Positions:
        """Returns those that came from a disk since the last call and do not fit their seals: (M,) int64, ascending."""

    def want(self, positions_U: Positions) -> tuple[Any, bool]:
        """Prepares some records that are needed soon; see `TieredStore.want`."""

    def arrive(self, reading: Any) -> None:
        """Takes in what `want` has asked for, as it was read; see `TieredStore.arrive`."""

    def pin(self, later: Sequence[Positions]) -> None:
        """Keeps some records in memory once they are there, until others are named; see `TieredStore.pin`."""

    def soon(self) -> Any:
        """Returns what to read before frames are emptied the next time, a `Reading` for `settle`; None: nothing."""

    def settle(self, reading: Any) -> None:
        """Takes in what `soon` has asked for, as it was read."""

    def below(self) -> Positions:
        """Returns those that are on a disk and not in memory, (M,) int64: for tests and `chaos`."""

    def flip_below_(self, position: int, bit: int) -> None:
        """Flips a bit of such a one on the disk."""

    def prepare(self, begin: int, end: int) -> None:
        """All records from `begin` to `end` are about to be written: see `Memory.merge`."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def figures(self) -> Any:
        """Returns the figures of its disk, a `TierFigures`; None: it has none."""


class MemoryStore:
    """All records in memory.

    Args:
        rows: how many records.
        nbytes: of each.
        scattered: they are first written here and there; `prepare` is called before many in a row are.
        sealed: keeps seals.
        ready: memory for them that was made ready; None: there is none.

    Attributes:
        records_PB: (P, B) uint8, all of them.
        seals_P: (P,) uint32, theirs; None: none are kept.
    """

    in_place = True

    def __init__(
        self, rows: int, nbytes: int, scattered: bool = False, sealed: bool = True, ready: Bytes | None = None
    ) -> None:
        self.rows, self.nbytes, self.frames, self.sealed = rows, nbytes, rows, sealed
        self.memory = Memory(rows * nbytes, scattered, ready)
        self.records_PB: Bytes = self.memory.array.reshape(-1, nbytes)
        self.seals_P: SealsOf | None = np.zeros(rows, np.uint32) if sealed else None

    def begin_(self, first: First) -> None:
        for start in range(0, self.rows, INITIAL_AT_ONCE):
            positions_U = np.arange(start, min(self.rows, start + INITIAL_AT_ONCE))
            some = slice(start, start + len(positions_U))
            values_UB = first(positions_U)
            self.records_PB[some] = values_UB
            if self.seals_P is not None:
                self.seals_P[some] = seals.seals_of(values_UB)

    def at(self, positions_U: Positions, use: Use) -> View:
        return View(self.records_PB, self.seals_P, positions_U)

    def absent(self, positions_U: Positions) -> None:
        return None

    def look(self, positions_U: Positions, read: Any = None) -> View:
        return View(self.records_PB, self.seals_P, positions_U)

    def seals_at(self, positions_U: Positions) -> SealsOf:
        assert self.seals_P is not None
        found: SealsOf = self.seals_P[positions_U]
        return found

    def broken_run(self, first: int, end: int) -> Positions:
        assert self.seals_P is not None
        return seals.broken_run(self.records_PB, self.seals_P, first, end)

    def scan(self, first: int, end: int, most_bytes: int) -> tuple[int, None]:
        return end, None

    def scanned(self, reading: Any) -> tuple[Positions, Positions]:
        raise TypeError("nothing is read here")

    def keep_last_(self, runs: Sequence[tuple[int, int]]) -> None:
        pass  # none leaves

    def take_damaged(self) -> Positions:
        return np.empty(0, np.int64)

    def want(self, positions_U: Positions) -> tuple[Any, bool]:
        return None, False

    def arrive(self, reading: Any) -> None:
        raise TypeError("nothing is read here")

    def pin(self, later: Sequence[Positions]) -> None:
        pass

    def soon(self) -> None:
        return None

    def settle(self, reading: Any) -> None:
        raise TypeError("nothing is read here")

    def below(self) -> Positions:
        return np.empty(0, np.int64)

    def flip_below_(self, position: int, bit: int) -> None:
        raise TypeError("nothing is on a disk here")

    def prepare(self, begin: int, end: int) -> None:
        self.memory.merge(begin * self.nbytes, end * self.nbytes)

    @property
    def memory_bytes(self) -> int:
        return self.rows * self.nbytes

    def figures(self) -> None:
        return None


Stores = Callable[[int, int, bool, bool], RecordStore]
"""Makes the store of some records: (rows, nbytes, parity, sealed)."""


def stores_in(ready: ReadyMemory) -> Stores:
    """Returns what makes stores for records written here and there: in ready memory, as far as there is some."""

    def make(rows: int, nbytes: int, parity: bool, sealed: bool) -> RecordStore:
        return MemoryStore(rows, nbytes, True, sealed, ready.take(rows * nbytes))

    return make
