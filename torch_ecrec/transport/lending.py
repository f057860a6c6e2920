"""Lends tensors in shared memory to a reader on the same host, instead of sending their bytes.

Each end has a `Lending`. Beside a message go *notes* to the other end:

    shown      segments that it has not seen yet (number, size), with their files (SCM_RIGHTS)
    returned   segments of its own that are not looked at here any more, once for each time that they were lent
    forgotten  segments that are not used again, and need not stay mapped
    placed     which of the message's tensors are not sent, and where each of them lies (segment, offset)

The loan of a message is one per segment, however many of its tensors lie there. It ends when the last tensor built from
it is gone. When the connection ends, what was lent on it is never used again by its owner: the reader may still look.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torch_ecrec.runtime import shared
from torch_ecrec.runtime.shared import Mapping, Pool, Segment
from torch_ecrec.runtime.tensors import as_array

FILES_MOST = 200  # with one message; Linux takes 253
SEEN_MOST = 4 * shared.SEGMENTS_MOST  # of one connection: more than a pool has, with those it is about to forget
_COUNTS = struct.Struct("<4I")  # shown, returned, forgotten, placed

Places = dict[int, tuple[int, int]]  # which tensor of a message -> segment, offset


def byte_view(tensor: Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of a contiguous CPU tensor, without a copy."""
    return as_array(tensor).reshape(-1).view(np.uint8)


class Loan:
    """The tensors that one message lends. `Lending.lend` makes it, and `place` fills it, tensor by tensor."""

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._numbers: set[int] = set()
        self.shown: list[Segment] = []
        self.places: Places = {}

    def place(self, which: int, tensor: Tensor) -> bool:
        """Lends a tensor of the message. Its memory must not be released before `notes`. False: it must be sent."""
        place = self._place(tensor)
        if place is not None:
            self.places[which] = place
        return place is not None

    def _place(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.nbytes < shared.LEAST_BYTES:
            return None
        pool = self._lending.pool
        found = pool.find(tensor.data_ptr())
        if found is None:
            memory = pool.take(tensor.nbytes)
            if memory is None:
                return None
            memory[:] = byte_view(tensor)
            found = pool.find(memory.__array_interface__["data"][0])
            assert found is not None
        segment, offset = found
        if segment.number not in self._numbers:
            if not self._lending.show(segment, self.shown):
                return None
            self._numbers.add(segment.number)
        return segment.number, offset

    def notes(self) -> bytes:
        """Returns the notes to send with the message."""
        return self._lending.notes(self.shown, self.places)


class Lending:
    """One end of a connection: what it lends to the other end, and what it borrows from it.

    Args:
        pool: of this process.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        # of the other end; only the thread that reads from it uses these two
        self.files: deque[int] = deque()  # come with notes, not looked at yet
        self._seen: dict[int, Mapping] = {}
        self._returned: deque[int] = deque()  # not told yet
        self._forgotten: deque[int] = deque()  # likewise
        self._lock = threading.Lock()  # guards all below; taken before the pool's
        self._ended = False
        self._shown: dict[int, Segment] = {}
        self._lent: Counter[int] = Counter()

    # as who lends -----------------------------------------------------------------------------------

    def lend(self) -> Loan:
        return Loan(self)

    def show(self, segment: Segment, shown: list[Segment]) -> bool:
        """Counts a loan of a segment; adds it to `shown` if the other end has not seen it. False: it cannot be lent."""
        with self._lock:
            if self._ended or (segment.number not in self._shown and len(shown) == FILES_MOST):
                return False
            if segment.number not in self._shown:
                self._shown[segment.number] = segment
                shown.append(segment)
            self._lent[segment.number] += 1
            self.pool.lend(segment, self)
            return True

    def forget(self, segment: int) -> None:
        self._forgotten.append(segment)

    @property
    def owes(self) -> bool:
        """Whether there are notes that the other end has not been told."""
        return bool(self._returned or self._forgotten)

    def notes(self, shown: Sequence[Segment], places: Places) -> bytes:
        """Returns what the other end is to be told now; b"" if nothing."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        with self._lock:
            for number in forgotten:
                self._shown.pop(number, None)
                del self._lent[number]
        if not (shown or returned or forgotten or places):
            return b""
        numbers = [number for segment in shown for number in (segment.number, segment.size)]
        numbers += returned + forgotten
        numbers += [number for which, place in places.items() for number in (which, *place)]
        counts = _COUNTS.pack(len(shown), len(returned), len(forgotten), len(places))
        return counts + struct.pack(f"<{len(numbers)}Q", *numbers)

    # as who borrows ---------------------------------------------------------------------------------

    def take_file(self, fd: int) -> None:
        """Keeps a file descriptor until its notes are read. Raises ValueError if more come than two messages have."""
        self.files.append(fd)
        if len(self.files) > 2 * FILES_MOST:
            raise ValueError("files that were not shown")

    def take_notes(self, notes: bytes) -> Places:
        """Reads notes; returns where tensors lie. Raises ValueError if malformed, OSError if a file is not mapped."""
        try:
            *counts, placed = _COUNTS.unpack_from(notes)
            ends = [0, 2 * counts[0], 2 * counts[0] + counts[1], 2 * counts[0] + counts[1] + counts[2]]
            numbers = struct.unpack_from(f"<{ends[3] + 3 * placed}Q", notes, _COUNTS.size)
        except struct.error as error:
            raise ValueError(f"not notes: {error}") from error
        shown, returned, forgotten = (numbers[begin:end] for begin, end in itertools.pairwise(ends))
        places = numbers[ends[3] :]
        for number, size in zip(shown[::2], shown[1::2], strict=True):
            self._see(number, size)
        for number in forgotten:
            self._seen.pop(number, None)
        with self._lock:
            for number in returned:
                segment = self._shown.get(number)
                if segment is None:
                    continue  # forgotten meanwhile
                if not self._lent[number]:
                    raise ValueError("more was returned than was lent")
                self._lent[number] -= 1
                self.pool.give_back(segment)
        return dict(zip(places[::3], zip(places[1::3], places[2::3], strict=True), strict=True))

    def _see(self, number: int, size: int) -> None:
        if not self.files:
            raise ValueError("a file is missing")
        fd = self.files.popleft()
        try:
            if len(self._seen) >= SEEN_MOST:
                raise ValueError(f"more than {SEEN_MOST} segments")
            if not shared.is_whole(fd, size):
                raise ValueError("a file is shorter than was said, or may become so")
            self._seen[number] = Mapping(fd, size, writable=False)
        finally:
            os.close(fd)

    def borrow(self, number: int) -> NDArray[np.uint8]:
        """Returns the memory of a segment of the other end, read-only: a write to it ends this process.

        The loan is given back when nobody refers to the memory any more.

        Raises:
            ValueError: it was not shown.
        """
        mapping = self._seen.get(number)
        if mapping is None:
            raise ValueError("a segment that was not shown")
        return shared.held(mapping, mapping.size, number, self._returned)

    def let_go(self) -> None:
        """Unmaps the other end's segments that nobody uses: no more is read from the connection."""
        self._seen.clear()
        while self.files:
            os.close(self.files.popleft())

    # both -------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Takes note that the connection has ended: what was lent on it is never reused. May be called again."""
        with self._lock:
            self._ended = True
            for number, segment in self._shown.items():
                self.pool.leave(segment, self, self._lent[number])
            self._shown, self._lent = {}, Counter()
