"""The file under a tiered store: records, appended, in segments that are used again once empty.

    segment 0                          segment 1                          segment 2 (open: in memory)
    | 4 KiB block | 4 KiB block | ...  | 4 KiB block | ...                | ...
      records

A *place* is the number of a cell: segment by segment, block by block. A record that is written again gets another
place, and the cell that it had is dead. When dead cells are many, the segments that have the fewest live ones are read
and what is live in them is appended again, *in order of position*: so scans by position read long runs.

A record that is larger than a block has a *bucket* of several blocks; no record lies in two buckets.

Nothing in the file need survive, since a slot that is lost is decoded from others; so nothing is ever synced.

Shapes: U records, B bytes of a record.

Does not know which record is at a place; `TieredStore` does.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.records.pages import untouched
from torch_ecrec.records.positions import Bytes
from torch_ecrec.records.tiers.disk import BLOCK_BYTES, File
from torch_ecrec.records.tiers.kernels import pack, unpack

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20
LEAST_SEGMENT_BYTES = 64 << 10
RUN_BYTES = 256 << 10  # of neighbours that are read as one
READ_BYTES = 1 << 20  # at a time
GARBAGE = 1.5  # the file holds so many times as many cells as are live, at most

Places = NDArray[np.int64]
_kept = threading.local()


def bucket_of(record_bytes: int) -> int:
    """Returns the bytes of a bucket for such records: whole blocks of which at most an eighth is lost, if 4 can do."""
    cell, least = record_bytes, -(-record_bytes // BLOCK_BYTES)
    sizes = [count * BLOCK_BYTES for count in range(least, max(least + 1, 5))]
    return next((size for size in sizes if size % cell <= size // 8), min(sizes, key=lambda size: size % cell / size))


def segment_bytes_of(record_bytes: int, rows: int) -> int:
    """Returns the bytes of a segment of a file for at most so many records: whole buckets."""
    bucket = bucket_of(record_bytes)
    want = min(SEGMENT_BYTES, max(LEAST_SEGMENT_BYTES, rows * record_bytes // 64))
    return max(1, want // bucket) * bucket


def _scratch_of_thread(size: int) -> Bytes:
    """Returns memory into which this thread alone reads. It is kept: the system takes time to make pages of it."""
    found: Bytes | None = getattr(_kept, "scratch", None)
    if found is None or len(found) < size:
        found = _kept.scratch = untouched(size, np.uint8)
    return found[:size]


def buffer_bytes_of(record_bytes: int, rows: int) -> int:
    """Returns the bytes of memory that the buffers of such a file take."""
    return segment_bytes_of(record_bytes, rows) + max(READ_BYTES, bucket_of(record_bytes))


class SegmentLog:
    """Records in a file.

    Args:
        file: where segments are.
        record_bytes: B.
        rows: how many records may be live at once.

    Attributes:
        segments: how many the file has.
        written_bytes, read_bytes, reads: so far.
        failed_reads: of `reads`.
    """

    def __init__(self, file: File, record_bytes: int, rows: int) -> None:
        self._file = file
        self._cell_bytes, self._bucket_bytes = record_bytes, bucket_of(record_bytes)
        self._per_bucket = self._bucket_bytes // self._cell_bytes
        self._segment_bytes = segment_bytes_of(record_bytes, rows)
        self.per_segment = self._segment_bytes // self._bucket_bytes * self._per_bucket
        self._live = np.zeros(0, np.int64)  # cells of each segment
        self._empty: list[int] = []
        self._open = -1  # the segment that is being filled; -1: none is
        self._begun = np.zeros(0, np.int64)  # how often each segment was begun
        self._filled = 0  # cells of it
        self._buffer = untouched(self._segment_bytes, np.uint8)
        self._scratch = untouched(buffer_bytes_of(record_bytes, rows) - self._segment_bytes, np.uint8)
        self.written_bytes = self.read_bytes = self.reads = self.failed_reads = 0

    @property
    def memory_bytes(self) -> int:
        """Returns how many bytes of memory its buffers take."""
        return len(self._buffer) + len(self._scratch)

    @property
    def file_bytes(self) -> int:
        """Returns how long the file is, in bytes."""
        return self.segments * self._segment_bytes

    @property
    def segments(self) -> int:
        return len(self._live)

    @property
    def live(self) -> int:
        """Returns how many cells are live: a record lies in each."""
        return int(self._live.sum())

    # writing ------------------------------------------------------------------------------------

    def append(self, records_XW: Any, at_U: Places) -> Places:
        """Appends records, (U,) places in some array, in their order. Returns where they are: (U,) int64.

        Raises:
            TierFailed: the file cannot be written.
        """
        places_U = np.empty(len(at_U), np.int64)
        done = 0
        while done < len(at_U):
            if self._open < 0:
                self._begin_segment()
            count = min(len(at_U) - done, self.per_segment - self._filled)
            some = at_U[done : done + count]
            pack(records_XW, some, self._buffer, self._filled, *self._geometry)
            places_U[done : done + count] = self._open * self.per_segment + self._filled + np.arange(count)
            self._filled += count
            self._live[self._open] += count
            done += count
            if self._filled == self.per_segment:
                self._end_segment()
        return places_U

    @property
    def _geometry(self) -> tuple[int, int, int]:
        return self._per_bucket, self._bucket_bytes, self._cell_bytes

    def _begin_segment(self) -> None:
        if self._empty:
            self._open = self._empty.pop()
        else:
            self._open = self.segments
            self._live, self._begun = np.append(self._live, 0), np.append(self._begun, 0)
        self._begun[self._open] += 1
        self._filled = 0

    def _end_segment(self) -> None:
        """Writes the open segment to the file; none is open from then on."""
        self._file.write(self._open * self._segment_bytes, self._buffer)
        self.written_bytes += self._segment_bytes
        closed, self._open = self._open, -1
        if not self._live[closed]:
            self._empty.append(closed)

    @property
    def open_segment(self) -> int:
        """The segment that is in memory; -1: none is."""
        return self._open

    def versions(self, places_U: Places) -> Places:
        """Returns what changes when other records may be at some places: (U,) int64."""
        versions: Places = self._begun[places_U // self.per_segment]
        return versions

    def flip_(self, place: int, bit: int) -> None:
        """Flips one bit of the record at a place in the file: for tests and `chaos`."""
        segment, cell = divmod(place, self.per_segment)
        bucket, cell = divmod(cell, self._per_bucket)
        at = segment * self._segment_bytes + bucket * self._bucket_bytes + cell * self._cell_bytes + bit // 8
        self._file.flip_(at // BLOCK_BYTES * BLOCK_BYTES, at % BLOCK_BYTES * 8 + bit % 8)

    def let_go(self, places_U: Places) -> None:
        """What is at these places, (U,) int64, does not count any more."""
        segments_U = places_U // self.per_segment
        gone_S = np.bincount(segments_U, minlength=self.segments)
        self._live -= gone_S
        for segment in np.flatnonzero((gone_S > 0) & (self._live == 0)).tolist():
            if segment != self._open:
                self._empty.append(segment)

    def to_clean(self) -> NDArray[np.bool_] | None:
        """Returns which segments are to be emptied by appending again what is live in them; None if that can wait."""
        used = self.segments - len(self._empty)
        most = max(4, int(GARBAGE * self.live / self.per_segment) + 3)
        if used <= most:
            return None
        order = np.argsort(self._live, kind="stable")
        order = order[(self._live[order] > 0) & (order != self._open)]
        chosen = order[: max(1, min(len(order), used - most + 8))]
        if not len(chosen):
            return None
        flags = np.zeros(self.segments, np.bool_)
        flags[chosen] = True
        return flags

    # reading ------------------------------------------------------------------------------------

    def read(
        self, places_U: Places, seals_U: SealsOf, into_XB: Bytes, at_U: Places, apart: bool = False
    ) -> NDArray[np.bool_]:
        """Reads records, each to a place in some array; twice, where they do not fit at first.

        A read may end early, or fail, and be right when it is asked for again: that costs no repair.

        Args:
            places_U: (U,) int64.
            seals_U: (U,) uint32, that the records should fit.
            into_XB: (X, B) uint8. Written.
            at_U: (U,) int64, where in it.
            apart: this is another thread than the one that writes. What it finds counts only if `versions` are the
                same before and after.

        Returns:
            (U,) bool, which do not fit their seals, or could not be read: those are zeros.
        """
        broken_U = self._read(places_U, seals_U, into_XB, at_U, apart)
        if broken_U.any():
            (again,) = np.nonzero(broken_U)
            broken_U[again] = self._read(places_U[again], seals_U[again], into_XB, at_U[again], apart)
        return broken_U

    def _read(self, places_U: Places, seals_U: SealsOf, into_XB: Bytes, at_U: Places, apart: bool) -> NDArray[np.bool_]:
        broken_U = np.zeros(len(places_U), np.bool_)
        target = into_XB.view(np.uint32), seals_U
        segments_U, cells_U = np.divmod(places_U, self.per_segment)
        buckets_U, cells_U = np.divmod(cells_U, self._per_bucket)
        offsets_U = cells_U * self._cell_bytes
        in_open_U = segments_U == self._open
        if in_open_U.any():
            (some,) = np.nonzero(in_open_U)
            starts = buckets_U[some] * self._bucket_bytes + offsets_U[some]
            unpack(self._buffer, starts, *target, at_U, some, broken_U)
        (some,) = np.nonzero(~in_open_U)
        if len(some):
            numbers_U = segments_U * (self._segment_bytes // self._bucket_bytes) + buckets_U
            some = some[np.argsort(numbers_U[some], kind="stable")]
            scratch = self._scratch if not apart else _scratch_of_thread(len(self._scratch))
            most = len(scratch) // self._bucket_bytes
            numbers = numbers_U[some]
            new = np.concatenate([[True], numbers[1:] != numbers[:-1]])
            rank = np.cumsum(new) - 1  # of its bucket among those that are read
            (first,) = np.nonzero(new)
            for begin in range(0, len(first), most):
                end = min(begin + most, len(first))
                here = slice(first[begin], first[end] if end < len(first) else len(numbers))
                bad_R = self._fill(numbers[first[begin:end]], scratch)
                part, ranks = some[here], rank[here] - begin
                unpack(scratch, ranks * self._bucket_bytes + offsets_U[part], *target, at_U, part, broken_U)
                if bad_R is not None:
                    lost = part[bad_R[ranks]]
                    broken_U[lost] = True
                    into_XB[at_U[lost]] = 0
        return broken_U

    def _fill(self, numbers_R: Places, scratch: Bytes) -> NDArray[np.bool_] | None:
        """Reads buckets, ascending, to scratch memory one behind the other; returns which could not be, if any."""
        size = self._bucket_bytes
        breaks = np.flatnonzero(np.diff(numbers_R) != 1) + 1
        firsts = np.concatenate([[0], breaks])
        lengths = np.diff(np.append(firsts, len(numbers_R)))
        if (lengths * size > RUN_BYTES).any():
            most = RUN_BYTES // size
            pieces = -(-lengths // most)
            inside = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            firsts, lengths = np.repeat(firsts, pieces) + inside * most, np.repeat(lengths, pieces) - inside * most
            lengths = np.minimum(lengths, most)
        results = self._file.read(numbers_R[firsts] * size, lengths * size, scratch, firsts * size)
        self.reads += len(firsts)
        self.read_bytes += len(numbers_R) * size
        short = results != lengths * size
        if not short.any():
            return None
        self.failed_reads += int(short.sum())
        worst = int(results[short].min())
        log.error(
            "%d of %d reads of %s failed: %s",
            int(short.sum()),
            len(firsts),
            self._file.name,
            os.strerror(-worst) if worst < 0 else "they end too early",
        )
        bad_R = np.zeros(len(numbers_R), np.bool_)
        for first, length in zip(firsts[short].tolist(), lengths[short].tolist(), strict=True):
            bad_R[first : first + length] = True
        return bad_R
