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

import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

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

    def lend(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bytes, list[Segment]]:
        """Lends the large tensors of a message.

        Args:
            tensors: of the message. The memory of what is lent must not be released before the message is under way.

        Returns:
            The tensors that must be sent, the notes that go with the message, and the segments to show with them.
        """
        sent: list[Tensor] = []
        places: list[int] = []
        lent: set[int] = set()  # the segments of this loan, by number
        shown: list[Segment] = []
        for which, tensor in enumerate(tensors):
            place = None if tensor.nbytes < shared.LEAST_BYTES else self._place(tensor, lent, shown)
            if place is None:
                sent.append(tensor)
            else:
                places += (which, *place)
        return sent, self._notes(shown, places), shown

    def _place(self, tensor: Tensor, lent: set[int], shown: list[Segment]) -> tuple[int, int] | None:
        """Returns where a tensor lies that is lent now; None if it must be sent."""
        found = self.pool.find(tensor.data_ptr())
        if found is None:
            memory = self.pool.take(tensor.nbytes)
            if memory is None:
                return None
            memory[:] = byte_view(tensor)
            found = self.pool.find(memory.__array_interface__["data"][0])
            assert found is not None
        segment, offset = found
        if segment.number not in lent:
            if not self._show(segment, shown):
                return None
            lent.add(segment.number)
        return segment.number, offset

    def _show(self, segment: Segment, shown: list[Segment]) -> bool:
        """Counts a loan of a segment; adds it to `shown` if the other end has not seen it. False: it cannot be lent."""
        number = segment.number
        with self._lock:
            if self._ended:
                return False
            if number not in self._shown:
                if len(shown) == FILES_MOST:
                    return False
                self._shown[number] = segment
                shown.append(segment)
            self._lent[number] += 1
            self.pool.lend(segment, self.forget)
            return True

    def forget(self, segment: int) -> None:
        self._forgotten.append(segment)

    @property
    def owes(self) -> bool:
        """Whether there are notes that the other end has not been told."""
        return bool(self._returned or self._forgotten)

    def _notes(self, shown: Sequence[Segment], places: list[int]) -> bytes:
        """Returns what the other end is to be told now; b"" if nothing. `places`: three numbers for each."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        if not (shown or returned or forgotten or places):
            return b""
        if forgotten:
            with self._lock:
                for number in forgotten:
                    self._shown.pop(number, None)
                    del self._lent[number]
        numbers = [number for segment in shown for number in (segment.number, segment.size)]
        numbers += (*returned, *forgotten, *places)
        counts = len(shown), len(returned), len(forgotten), len(places) // 3
        return struct.pack(f"<4I{len(numbers)}Q", *counts, *numbers)

    # as who borrows ---------------------------------------------------------------------------------

    def take_files(self, files: Iterable[int]) -> None:
        """Keeps file descriptors until their notes are read. Raises ValueError if more come than two messages have."""
        self.files.extend(files)
        if len(self.files) > 2 * FILES_MOST:
            raise ValueError("files that were not shown")

    def take_notes(self, notes: bytes) -> Places:
        """Reads notes; returns where tensors lie. Raises ValueError if malformed, OSError if a file is not mapped."""
        try:
            shown, returned, forgotten, placed = _COUNTS.unpack_from(notes)
            many = 2 * shown + returned + forgotten + 3 * placed
            numbers = struct.unpack_from(f"<{many}Q", notes, _COUNTS.size)
        except struct.error as error:
            raise ValueError(f"not notes: {error}") from error
        for at in range(0, 2 * shown, 2):
            self._see(numbers[at], numbers[at + 1])
        begin = 2 * shown + returned
        for number in numbers[begin : begin + forgotten]:
            self._seen.pop(number, None)
        if returned:
            self._take_back(numbers[2 * shown : begin])
        begin += forgotten
        return {numbers[at]: (numbers[at + 1], numbers[at + 2]) for at in range(begin, many, 3)}

    def _take_back(self, returned: Sequence[int]) -> None:
        """Takes back segments that the other end does not look at any more, once for each time that one is named."""
        with self._lock:
            for number in returned:
                segment = self._shown.get(number)
                if segment is None:
                    continue  # forgotten meanwhile
                if not self._lent[number]:
                    raise ValueError("more was returned than was lent")
                self._lent[number] -= 1
                self.pool.give_back(segment)

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
                self.pool.leave(segment, self.forget, self._lent[number])
            self._shown, self._lent = {}, Counter()
