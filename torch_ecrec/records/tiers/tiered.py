"""A store of which some records are in memory, in frames, and the others in a file: `RecordStore` with a disk below.

For each record there are 13 bytes: its frame, if it has one; its place in the file, if it was ever put there, and the
seal that it had then; and how often it was changed. What was never written has neither: it is what `begin_` says, and
is computed when it is asked for.

    position    frame    place    count
    0           12       -        3       in memory only: changed since it was computed
    1           -        7        1       in the file
    2           4        9        200     in both: as it was read, unless frame 4 is dirty
    3           -        -        0       never written

*Which stay.* What was asked for since the last but one step stays: a step under way has it. So does what is pinned
(`pin`), since a later step has it. Of the rest those go that were changed least often, round robin among equals (LFU),
and last what is to be kept (`keep_last_`). A count is kept when its record goes, and all are halved now and then. On
real rows that is within a point of exact LFU, where policies that forget what they let go lose two to seven.

*Folds.* What is folded into a record need not know it: a record that is absent gets a frame of zeros, which is marked
*pending*, and is XORed with what is in the file before it is read or goes. So parities can be on disk, and no step
waits for one to be read: `soon` names those that go next, and `settle` has them XORed before they do.

*Damage.* The seals of all records are in memory, so that also a disk that gives back what was there before is found
out. What does not fit its seal, or cannot be read, does not fit it in its frame either: whoever looks for damage finds
it. `take_damaged` says so at once.

Where more is used at once than there are frames, there are more for a while: nothing ever fails for the budget.

Shapes: P records, F frames, U asked for, A absent ones, B bytes and W words of a record.

Does not know steps: each `CHANGE` is taken for one.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec import seals
from torch_ecrec.codec.seals import SEAL_BYTES, SealsOf
from torch_ecrec.errors import TierFailed
from torch_ecrec.records.pages import Memory, release, untouched
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.store import First, Use, View
from torch_ecrec.records.tiers.disk import File
from torch_ecrec.records.tiers.kernels import (
    ABSENT,
    COMING,
    COUNT,
    DIRTY,
    PENDING,
    copy_frames,
    find,
    frames_of,
    histogram,
    in_segments,
    sweep,
    want,
    xor_frames,
)
from torch_ecrec.records.tiers.log import SegmentLog
from torch_ecrec.runtime.checks import require

NO_PLACE = (1 << 32) - 1
ROW_BYTES = 4 + 4 + SEAL_BYTES + 1  # of memory for a record, wherever it is
FRAME_BYTES = SEAL_BYTES + 4 + 8 + 4  # of memory for a frame, beside its record
HALVE_AFTER = 1024  # steps
LAST_CALL = (1 << 32) - 2  # that has a number: then they are counted anew
SLACK, LEAST_SLACK = 16, 1024  # more frames than there should be are given back once they are a 16th, and so many
SPARE = 1 / 32  # of the frames are emptied at once, at least
CLEANED_AT_ONCE = 1 << 14  # records
SCAN_BYTES = 16384  # of the scrubber's rate, for each record that it has read: training needs the disk, too
_ALL = np.uint32(0xFFFFFFFF)
_STATES = {  # what becomes of a frame's state: what is added, and what stays
    Use.READ: (np.uint32(0), _ALL),
    Use.CHANGE: (np.uint32(DIRTY), _ALL),
    Use.FOLD: (np.uint32(DIRTY), _ALL),
    Use.REPLACE: (np.uint32(DIRTY), ~np.uint32(PENDING)),
}


class TierFigures(NamedTuple):
    """What a tiered store has done so far: the fields of `SlotReport` with `tier_` before them."""

    memory_bytes: int
    file_bytes: int
    hits: int
    misses: int
    reads: int
    failed_reads: int
    written_bytes: int


class Reading:
    """Records on their way from the file: see `TieredStore.want`.

    Args:
        file: that has them.
        positions_A, places_A: (A,) int64, which, and where.
        seals_A: (A,) uint32, that they should fit.
        nbytes: of a record.
        asked_A: (A,) int64, which of those that were asked for they are.
    """

    def __init__(
        self,
        file: SegmentLog,
        positions_A: Positions,
        places_A: Positions,
        seals_A: SealsOf,
        nbytes: int,
        asked_A: Positions,
    ) -> None:
        self._file = file
        self.positions_A, self.places_A, self.seals_A, self.asked_A = positions_A, places_A, seals_A, asked_A
        self.versions_A = file.versions(places_A)
        self._nbytes = nbytes
        self.broken_A = np.ones(len(positions_A), np.bool_)

    def run(self) -> None:
        """Reads them: waits for the disk. On any thread."""
        every_A = np.arange(len(self.positions_A))
        # Not before: of those that wait for their turn there may be many.
        self.records_AB: Bytes = np.empty((len(self.positions_A), self._nbytes), np.uint8)
        self.broken_A = self._file.read(self.places_A, self.seals_A, self.records_AB, every_A, apart=True)


class TieredStore:
    """Records in frames of memory, and in a file.

    Args:
        rows, nbytes: P and B.
        file: where the others are.
        frames: how many records are in memory; may be changed at any time.

    Attributes:
        hits, misses: records that were asked for by training, which had a frame, or were read; those that were never
            written count as neither.
        damaged: how many did not fit their seals, or could not be read.
    """

    in_place = False
    sealed = True

    def __init__(self, rows: int, nbytes: int, file: File, frames: int) -> None:
        require(rows < 1 << 31, f"a store has fewer than 2^31 records, got {rows}")
        self.rows, self.nbytes, self.frames = rows, nbytes, max(1, frames)
        self._first: First | None = None
        self._log = SegmentLog(file, nbytes, rows)
        # Of as many frames as there are records: what is never touched takes no memory, and may be more than there is.
        self._records_FB: Bytes = Memory(rows * nbytes, sparse=True).array.reshape(-1, nbytes)
        self._seals_F: SealsOf = untouched(rows, np.uint32)
        self._position_F = untouched(rows, np.int32)  # plus 1; see `_positions_of`
        self._meta_F = untouched(2 * rows, np.uint32).reshape(-1, 2)  # the call of its last use, and its state
        self._frame_P, self._place_P = np.full(rows, ABSENT, np.int32), np.full(rows, NO_PLACE, np.uint32)
        self._count_P, self._seal_P = np.zeros(rows, np.uint8), np.zeros(rows, np.uint32)  # where it has no frame
        self._free_F, self._free = untouched(rows, np.int32), 0  # a stack, and how many there are on it
        self._top = 0  # frames below it were given out at least once
        self._in_use = self._hand = 0
        self._call = 1  # the number of the last call
        self._steps = [1, 1]  # the calls of the last two steps
        self._halve_in = HALVE_AFTER
        self.hits = self.misses = self.damaged = 0
        self._found: list[Positions] = []  # damaged ones, since the last `take_damaged`
        self._failed: TierFailed | None = None
        self._due = False  # frames were emptied: others will be before long
        self._to_pin: Sequence[Positions] = ()  # of them, those with frames are pinned
        self._last_to_go: Sequence[tuple[int, int]] = ()  # first positions and ends, ascending: see `keep_last_`

    # RecordStore --------------------------------------------------------------------------------

    def begin_(self, first: First) -> None:
        self._first = first

    def at(self, positions_U: Positions, use: Use) -> View:
        self._require_whole()
        positions_U = np.ascontiguousarray(positions_U)
        self._next_call(use)
        bump, (mark, keep) = np.uint32(use in (Use.CHANGE, Use.FOLD)), _STATES[use]
        at_U, absent_U = np.empty(len(positions_U), np.int64), np.empty(len(positions_U), np.int64)
        count, pending, outside = find(
            positions_U, self._frame_P, self._meta_F, np.uint32(self._call), bump, mark, keep, at_U, absent_U
        )
        if outside >= 0:
            raise IndexError(f"position {positions_U[outside]} is out of range: there are {self.rows} records")
        if count:
            self._give_frames(absent_U[:count], use, int(mark + bump))
            frames_of(positions_U, self._frame_P, at_U)
        if use is not Use.REPLACE:
            self.hits += len(positions_U) - count
        if pending and use in (Use.READ, Use.CHANGE):
            self._settle(np.unique(at_U[self._is(PENDING, at_U) & (at_U >= 0)]))
        return View(self._records_FB, self._seals_F, at_U)

    def _require_whole(self) -> None:
        """Raises what a write raised before: what is in frames and what is in the file may not fit since then."""
        if self._failed is not None:
            raise self._failed

    def _is(self, flag: int, frames_V: Positions) -> NDArray[np.bool_]:
        """Which frames have a flag in their state."""
        flags_V: NDArray[np.bool_] = self._meta_F[frames_V, 1] & flag != 0
        return flags_V

    def keep_last_(self, runs: Sequence[tuple[int, int]]) -> None:
        """Some records go when no others are left to go: they count as if they were changed all the time.

        Args:
            runs: of positions, each a first one and an end, ascending, none of them over another.
        """
        self._last_to_go = runs
        self._count_them()

    def _count_them(self) -> None:
        if not self._last_to_go:
            return
        for first, end in self._last_to_go:
            self._count_P[first:end] = COUNT
        firsts, ends = np.array(self._last_to_go).T
        positions_F = self._position_F[: self._top].astype(np.int64) - 1
        run_F = np.searchsorted(firsts, positions_F, "right") - 1
        theirs_F = (run_F >= 0) & (positions_F < ends[run_F])
        self._meta_F[: self._top, 1][theirs_F] |= np.uint32(COUNT)

    def absent(self, positions_U: Positions) -> Reading | None:
        some = self._only_below(positions_U)
        return self._reading(positions_U[some], some) if len(some) else None

    def _only_below(self, which: Positions | slice) -> Positions:
        """Returns the indices of those of some records that are on the disk, and not whole in memory."""
        below_U = ~self._whole(self._frame_P[which].astype(np.int64)) & self._written(self._place_P[which])
        return np.flatnonzero(below_U)

    def look(self, positions_U: Positions, read: Reading | None = None) -> View:
        self._require_whole()
        if read is not None:
            self.settle(read)
        records_UB = np.empty((len(positions_U), self.nbytes), np.uint8)
        seals_U = np.empty(len(positions_U), np.uint32)
        at_U = np.arange(len(positions_U))
        frame_U = self._frame_P[positions_U]
        there_U = frame_U >= 0
        if there_U.any():
            frames_V = frame_U[there_U].astype(np.int64)
            pending_V = frames_V[self._is(PENDING, frames_V)]
            if len(pending_V):
                self._settle(np.unique(pending_V))
            words_FW, words_UW = self._records_FB.view(np.uint32), records_UB.view(np.uint32)
            copy_frames(words_FW, self._seals_F, frames_V, words_UW, seals_U, at_U[there_U])
        if read is not None:
            (some,) = np.nonzero(self._unmoved(read) & ~read.broken_A & ~there_U[read.asked_A])
            words_AW, words_UW = read.records_AB.view(np.uint32), records_UB.view(np.uint32)
            copy_frames(words_AW, read.seals_A, some, words_UW, seals_U, read.asked_A[some])
            there_U[read.asked_A[some]] = True
        absent_U = at_U[~there_U]
        if len(absent_U):
            self._bring(positions_U[absent_U], records_UB, seals_U, absent_U)
        return View(records_UB, seals_U, at_U)

    def seals_at(self, positions_U: Positions) -> SealsOf:
        frame_U, place_U = self._frame_P[positions_U].astype(np.int64), self._place_P[positions_U]
        seals_U = np.where(place_U == NO_PLACE, 0, self._seal_P[positions_U]).astype(np.uint32)
        there_U, whole_U = frame_U >= 0, self._whole(frame_U)
        new_U = (place_U == NO_PLACE) & ~whole_U
        if self._first is not None and new_U.any():
            seals_U[new_U] = seals.seals_of(self._first(positions_U[new_U]))
        seals_U[whole_U] = 0
        seals_U[there_U] ^= self._seals_F[frame_U[there_U]]  # linear: of what was folded, and of the record
        return seals_U

    def broken_run(self, first: int, end: int) -> Positions:
        frame_U, place_U = self._frame_P[first:end].astype(np.int64), self._place_P[first:end]
        broken_U = np.zeros(end - first, np.bool_)
        (some,) = np.nonzero(frame_U >= 0)  # linear: what was only folded fits, too
        broken_U[some[seals.broken(self._records_FB, self._seals_F, frame_U[some])]] = True
        (late,) = np.nonzero(~self._whole(frame_U) & (place_U != NO_PLACE) & ~self._written(place_U))
        if len(late):
            records_LB, places_L = np.empty((len(late), self.nbytes), np.uint8), place_U[late].astype(np.int64)
            seals_L = self._seal_P[first:end][late]
            broken_U[late] |= self._log.read(places_L, seals_L, records_LB, np.arange(len(late)))
        return first + np.flatnonzero(broken_U)

    def scan(self, first: int, end: int, most_bytes: int) -> tuple[int, Reading | None]:
        some = self._only_below(slice(first, end))
        most = max(1, most_bytes // SCAN_BYTES)
        if len(some) > most:
            end, some = first + int(some[most]), some[:most]
        return end, self._reading(first + some) if len(some) else None

    def scanned(self, reading: Reading) -> tuple[Positions, Positions]:
        frame_A = self._frame_P[reading.positions_A].astype(np.int64)
        same_A = ~self._whole(frame_A) & self._unmoved(reading)
        broken_A = reading.broken_A
        return reading.positions_A[same_A & ~broken_A], reading.positions_A[same_A & broken_A]

    def take_damaged(self) -> Positions:
        found, self._found = self._found, []
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def want(self, positions_U: Positions) -> tuple[Reading | None, bool]:
        """Notes that some records are needed soon.

        Args:
            positions_U: (U,) int64, in 0..P-1.

        Returns:
            What reads those of them that must be, to be called without the lock and then given to `arrive`; None where
            nobody need read any. And whether any is on its way, by this or by others.
        """
        new_U = np.empty(len(positions_U), np.int64)
        self._begin_call()
        file, none = self._log, np.uint32(NO_PLACE)
        count, coming = want(
            positions_U,
            self._frame_P,
            self._place_P,
            none,
            file.per_segment,
            file.open_segment,
            np.uint32(self._call),
            self._meta_F,
            new_U,
        )
        if not count:
            return None, coming > 0
        return self._reading(new_U[:count]), True

    def _reading(self, positions_A: Positions, asked_A: Positions | None = None) -> Reading:
        """Returns what reads some records, which are in the file. `asked_A`: None for all that were asked for."""
        places_A = self._place_P[positions_A].astype(np.int64)
        asked_A = np.arange(len(positions_A)) if asked_A is None else asked_A
        return Reading(self._log, positions_A, places_A, self._seal_P[positions_A], self.nbytes, asked_A)

    def _unmoved(self, reading: Reading) -> NDArray[np.bool_]:
        """Which records are still where they were when it was made: what was read is what they are in the file."""
        same_A: NDArray[np.bool_] = self._place_P[reading.positions_A] == reading.places_A
        return same_A & (self._log.versions(reading.places_A) == reading.versions_A)

    def _written(self, place_V: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which places are on the disk, and not in the segment that is still in memory."""
        there_V: NDArray[np.bool_] = place_V != NO_PLACE
        return there_V & (place_V // self._log.per_segment != self._log.open_segment)

    def _whole(self, frames_V: Positions) -> NDArray[np.bool_]:
        """Which of some frames, less than 0 for none, have the whole record."""
        return (frames_V >= 0) & ~self._is(PENDING, np.maximum(frames_V, 0))

    def arrive(self, reading: Reading) -> None:
        """Records were read: those that are still where they were, and that nobody has brought, get frames."""
        self._require_whole()
        positions_A = reading.positions_A
        coming_A = self._frame_P[positions_A] == COMING
        self._frame_P[positions_A[coming_A]] = ABSENT
        (some,) = np.nonzero(coming_A & self._unmoved(reading))
        if not len(some):
            return
        self._begin_call()
        at_V = self._frames_for(positions_A[some], 0)
        words_XW, words_AW = self._records_FB.view(np.uint32), reading.records_AB.view(np.uint32)
        copy_frames(words_AW, reading.seals_A, some, words_XW, self._seals_F, at_V)
        self.misses += len(some)
        broken = reading.broken_A[some]
        if broken.any():
            self._on_broken(positions_A[some[broken]], self._seals_F, at_V[broken])

    def pin(self, later: Sequence[Positions]) -> None:
        """Pins records: once they are in memory, they stay there until others are named in their place.

        They go after all others that the call under way does not need: then nothing else is left to go.

        Args:
            later: (N,) int64 each, in 0..P-1, in any order, with repetitions. Not copied.
        """
        self._to_pin = later

    def _pinned(self) -> Positions:
        """Returns the frames of pinned records, (V,) int64, with repetitions."""
        frames = [self._frame_P[positions_N] for positions_N in self._to_pin]
        frames_N = np.concatenate(frames).astype(np.int64) if frames else np.empty(0, np.int64)
        return frames_N[frames_N >= 0]

    def soon(self) -> Reading | None:
        if not self._due:
            return None
        self._due, hand = False, self._hand
        frames = self._pick(max(1, int(2 * SPARE * self.frames)), self._steps[0])
        self._hand = hand
        positions_V = self._positions_of(frames[self._is(PENDING, frames)])
        positions_A = positions_V[self._written(self._place_P[positions_V])]
        return self._reading(positions_A) if len(positions_A) else None

    def settle(self, reading: Reading) -> None:
        positions_A = reading.positions_A
        frames_A = self._frame_P[positions_A].astype(np.int64)
        (some,) = np.nonzero((frames_A >= 0) & ~self._whole(frames_A) & self._unmoved(reading))
        if len(some):
            # of one that was asked for twice, once: XORed twice it would be gone, and its seal with it
            some = some[np.unique(frames_A[some], return_index=True)[1]]
            broken = reading.broken_A[some]
            if broken.any():
                self._on_broken(positions_A[some[broken]], reading.seals_A, some[broken])
            self._add(reading.records_AB[some], reading.seals_A[some], frames_A[some])

    def _on_broken(self, positions_M: Positions, seals_X: SealsOf, at_M: Positions) -> None:
        """These came damaged: their seals stay so that they do not fit, which of zeros they could."""
        zeros_M = seals_X[at_M] == 0
        seals_X[at_M[zeros_M]] = 1
        self.damaged += len(positions_M)
        self._found.append(positions_M)

    def below(self) -> Positions:
        absent_M = np.flatnonzero(self._frame_P == ABSENT)  # what is being read was there before
        return absent_M[self._written(self._place_P[absent_M])]

    def flip_below_(self, position: int, bit: int) -> None:
        self._log.flip_(int(self._place_P[position]), bit)

    def prepare(self, begin: int, end: int) -> None:
        pass  # frames are filled in turn

    @property
    def memory_bytes(self) -> int:
        held = self._top * (self.nbytes + FRAME_BYTES)
        return held + self.rows * ROW_BYTES + self._log.memory_bytes

    # for people ---------------------------------------------------------------------------------

    def figures(self) -> TierFigures:
        file = self._log
        return TierFigures(
            self.memory_bytes,
            file.file_bytes,
            self.hits,
            self.misses,
            file.reads,
            file.failed_reads,
            file.written_bytes,
        )

    @property
    def file(self) -> SegmentLog:
        """Returns the log in the file, where records without frames lie."""
        return self._log

    @property
    def in_memory(self) -> int:
        """Returns how many records have frames."""
        return self._in_use

    # frames -------------------------------------------------------------------------------------

    def _begin_call(self) -> None:
        """Gives the call that begins its number; weeks of training have more calls than there are numbers."""
        if self._call >= LAST_CALL:
            self._count_calls_anew()
        self._call += 1

    def _count_calls_anew(self) -> None:
        """Numbers the calls of before by what is asked of them: which side of the last two steps they are on."""
        edges = np.array([*self._steps, self._call])  # ascending

        def anew(calls: Any) -> Any:
            return np.searchsorted(edges, calls, "left") + np.searchsorted(edges, calls, "right")

        uses_F = self._meta_F[: self._top, 0]
        uses_F[:] = anew(uses_F)
        *self._steps, self._call = anew(edges).tolist()

    def _next_call(self, use: Use) -> None:
        self._begin_call()
        if use in (Use.CHANGE, Use.FOLD):
            self._steps = [self._steps[1], self._call]
            if self._top > self.frames + self.frames // SLACK + LEAST_SLACK:
                self._shrink()
            self._halve_in -= 1
            if not self._halve_in:
                self._halve_in = HALVE_AFTER
                self._count_P >>= 1
                states_F = self._meta_F[: self._top, 1]
                states_F[:] = states_F & ~np.uint32(COUNT) | (states_F & COUNT) >> 1
                self._count_them()

    def _shrink(self) -> None:
        """Gives memory back that was needed once: to a call of many records, or before another store had its share."""
        excess = self._in_use - self.frames
        if excess > 0 and len(frames := self._pick(excess, self._steps[0])):
            self._put_away(frames)
        top = max(self.frames, self._in_use)
        if top + top // SLACK + LEAST_SLACK >= self._top:
            return
        high_V = top + np.flatnonzero(self._position_F[top : self._top])
        free_V = np.sort(self._free_F[: self._free].astype(np.int64))
        low_V, free_V = free_V[: len(high_V)], free_V[len(high_V) :]
        words_FW = self._records_FB.view(np.uint32)
        copy_frames(words_FW, self._seals_F, high_V, words_FW, self._seals_F, low_V)
        self._meta_F[low_V], self._position_F[low_V] = self._meta_F[high_V], self._position_F[high_V]
        self._frame_P[self._positions_of(low_V)] = low_V
        self._free = int(np.searchsorted(free_V, top))
        self._free_F[: self._free] = free_V[: self._free]
        self._top = top
        for array in (self._records_FB, self._seals_F, self._position_F, self._meta_F):
            release(array, top)
        page = slice(top, top + mmap.PAGESIZE)  # others have a part of the first
        self._position_F[page] = 0

    def _give_frames(self, absent_A: Positions, use: Use, state: int) -> None:
        """Gives absent records frames, and puts there what they are. `state`: added to that of the frames."""
        frames_A = self._frames_for(absent_A, state)
        if use is Use.FOLD:
            pending_A = (self._place_P[absent_A] != NO_PLACE) | (self._first is not None)
            self._meta_F[frames_A[pending_A], 1] |= PENDING
            self._records_FB[frames_A] = 0
            self._seals_F[frames_A] = 0
        elif use is not Use.REPLACE:
            self.misses += int((self._place_P[absent_A] != NO_PLACE).sum())
            self._bring(absent_A, self._records_FB, self._seals_F, frames_A)

    def _frames_for(self, positions_A: Positions, state: int) -> Positions:
        """Gives records frames, whose content is still to be written: (A,) int64."""
        frames_A = self._take(len(positions_A))
        self._frame_P[positions_A] = frames_A
        self._position_F[frames_A] = positions_A + 1
        self._meta_F[frames_A, 0] = self._call
        most = np.uint32(COUNT - (state & COUNT))
        self._meta_F[frames_A, 1] = np.minimum(self._count_P[positions_A], most) + np.uint32(state)
        self._in_use += len(frames_A)
        return frames_A

    def _bring(self, positions_A: Positions, into_XB: Bytes, seals_X: SealsOf, at_A: Positions) -> None:
        """Puts some records, which have no frames or pending ones, as they are without, to places in some array."""
        places_A = self._place_P[positions_A]
        new_A = places_A == NO_PLACE
        if new_A.any():
            at_V = at_A[new_A]
            if self._first is None:
                into_XB[at_V] = 0
                seals_X[at_V] = 0
            else:
                values_VB = self._first(positions_A[new_A])
                into_XB[at_V] = values_VB
                seals_X[at_V] = seals.seals_of(values_VB)
        if not new_A.all():
            (some,) = np.nonzero(~new_A)
            seals_V = self._seal_P[positions_A[some]]
            seals_X[at_A[some]] = seals_V
            broken = self._log.read(places_A[some].astype(np.int64), seals_V, into_XB, at_A[some])
            if broken.any():
                self._on_broken(positions_A[some[broken]], seals_X, at_A[some[broken]])

    def _settle(self, frames_V: Positions) -> None:
        """These frames have what was folded only: from now on they have the records."""
        base_VB = np.empty((len(frames_V), self.nbytes), np.uint8)
        seals_V = np.empty(len(frames_V), np.uint32)
        self._bring(self._positions_of(frames_V), base_VB, seals_V, np.arange(len(frames_V)))
        self._add(base_VB, seals_V, frames_V)

    def _add(self, base_VB: Bytes, seals_V: SealsOf, frames_V: Positions) -> None:
        """Adds what records are without what was folded into their frames."""
        xor_frames(base_VB.view(np.uint32), seals_V, self._records_FB.view(np.uint32), self._seals_F, frames_V)
        self._meta_F[frames_V, 1] = self._meta_F[frames_V, 1] & ~np.uint32(PENDING) | DIRTY

    def _positions_of(self, frames_V: Positions) -> Positions:
        return self._position_F[frames_V].astype(np.int64) - 1

    def _take(self, count: int) -> Positions:
        """Returns so many frames that nobody has; empties some where there are too few."""
        missing = self._in_use + count - self.frames
        if missing > 0:
            self._empty(missing)
        again = min(count, self._free)
        self._free -= again
        new = np.arange(self._top, self._top + count - again)
        self._top += len(new)
        return np.concatenate([self._free_F[self._free : self._free + again].astype(np.int64), new])

    def _empty(self, count: int) -> None:
        """Empties at least so many frames, and some more, unless all others are in use by this call."""
        want = max(count, min(self._in_use, int(SPARE * self.frames)))
        # First what no step under way has; then what is not pinned.
        for before, pinned in ((self._steps[0], False), (self._call, False), (self._call, True)):
            frames = self._pick(want, before, pinned)
            if len(frames):
                self._put_away(frames)
            count = want = count - len(frames)
            if count <= 0:
                return

    def _pick(self, want: int, before: int, pinned: bool = False) -> Positions:
        """Returns the frames with the lowest counts of those that were used last before a call.

        Those of pinned records are among them only if `pinned`.
        """
        stay_V = np.empty(0, np.int64) if pinned else self._pinned()
        calls_V = self._meta_F[stay_V, 0]
        self._meta_F[stay_V, 0] = self._call  # for now
        frames = self._pick_any(want, before)
        self._meta_F[stay_V, 0] = calls_V
        return frames

    def _pick_any(self, want: int, before: int) -> Positions:
        top = self._top
        position_F, meta_F = self._position_F[:top], self._meta_F[:top]
        found = np.zeros(COUNT + 1, np.int64)
        # What the last step has changed, and nobody has asked for since, is not under way any more.
        done = self._steps[1] if self._steps[1] < self._call else self._steps[0]
        histogram(position_F, meta_F, before, done, found)
        below = np.cumsum(found)
        want = min(want, int(below[-1]))
        if not want:
            return np.empty(0, np.int64)
        threshold = int(np.searchsorted(below, want))
        equal = want - (int(below[threshold - 1]) if threshold else 0)
        out = np.empty(want, np.int64)
        picked, self._hand = sweep(position_F, meta_F, before, done, self._hand % top, threshold, equal, out)
        return out[:picked]

    def _put_away(self, frames_V: Positions) -> None:
        """Empties frames: what is in the file already as it is in the frame is not written again."""
        pending_V = self._is(PENDING, frames_V)
        if pending_V.any():
            self._settle(frames_V[pending_V])
        dirty_V = frames_V[self._is(DIRTY, frames_V)]
        if len(dirty_V):
            positions_V = self._positions_of(dirty_V)
            order = np.argsort(positions_V)
            self._write(positions_V[order], self._records_FB, self._seals_F, dirty_V[order])
        positions_V = self._positions_of(frames_V)
        self._frame_P[positions_V] = ABSENT
        self._count_P[positions_V] = self._meta_F[frames_V, 1] & COUNT
        self._position_F[frames_V] = 0
        self._free_F[self._free : self._free + len(frames_V)] = frames_V
        self._free += len(frames_V)
        self._in_use -= len(frames_V)
        self._due = True
        self._clean()

    def _write(self, positions_V: Positions, records_XB: Bytes, seals_X: SealsOf, at_V: Positions) -> None:
        """Puts records into the file; where they were before does not count any more."""
        before_V = self._place_P[positions_V]
        had_V = before_V != NO_PLACE
        if had_V.any():
            self._log.let_go(before_V[had_V].astype(np.int64))
        try:
            self._place_P[positions_V] = self._log.append(records_XB.view(np.uint32), at_V)
        except TierFailed as error:
            self._failed = error
            raise
        self._seal_P[positions_V] = seals_X[at_V]

    # the file -----------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Appends again what is live in segments that have little of it, in order of position."""
        chosen_S = self._log.to_clean()
        if chosen_S is None:
            return
        out = np.empty(self.rows, np.int64)
        count = in_segments(self._place_P, self._log.per_segment, chosen_S, np.uint32(NO_PLACE), out)
        for begin in range(0, count, CLEANED_AT_ONCE):
            positions_V = out[begin : min(count, begin + CLEANED_AT_ONCE)]
            records_VB = np.empty((len(positions_V), self.nbytes), np.uint8)
            seals_V, every_V = self._seal_P[positions_V], np.arange(len(positions_V))
            broken = self._log.read(self._place_P[positions_V].astype(np.int64), seals_V, records_VB, every_V)
            if broken.any():
                self._on_unclean(positions_V[broken], seals_V, every_V[broken])
            self._write(positions_V, records_VB, seals_V, every_V)

    def _on_unclean(self, positions_M: Positions, seals_X: SealsOf, at_M: Positions) -> None:
        """The file has these no more: a frame that has the whole record must write it."""
        frames_M = self._frame_P[positions_M].astype(np.int64)
        have_M = self._whole(frames_M)
        self._meta_F[frames_M[have_M], 1] |= np.uint32(DIRTY)
        if not have_M.all():
            self._on_broken(positions_M[~have_M], seals_X, at_M[~have_M])


def warm() -> None:
    """Compiles or loads every kernel of a tiered store."""
    store, positions_U = TieredStore(3, 4, _Nothing(), 1), np.arange(2)
    for use in Use:
        store.at(positions_U, use)
        store.at(positions_U + 1, use)
    store.look(positions_U)
    store.want(positions_U)
    chosen_S = np.ones(1, np.bool_)
    in_segments(store._place_P, store.file.per_segment, chosen_S, np.uint32(NO_PLACE), np.empty(3, np.int64))


class _Nothing:
    """A file of which nothing is read: all that is written here stays in the open segment."""

    name = "no file"

    def write(self, offset: int, content: Bytes) -> None:
        raise AssertionError("nothing is written")

    def read(self, offsets_R: Any, lengths_R: Any, into: Any, at_R: Any) -> Any:
        raise AssertionError("nothing is read")

    def flip_(self, offset: int, bit: int) -> None:
        raise AssertionError("nothing is there to flip")
