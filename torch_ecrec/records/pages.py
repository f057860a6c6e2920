"""The memory of records: zeros, in huge pages. Memory that is first written here and there begins with small pages.

Linux backs memory with *huge pages* (2 MiB on x86-64) where that is asked for: scattered records are read faster, since
the processor knows the place of a page more often. But whoever writes the first byte of a huge page waits until all of
it is zeroed. Memory that is filled from one end to the other does not notice. The new host of a lost slot does: the
records of its first step lie in thousands of places, and all of its memory would be zeroed before that step is done.

Example: a host with 4 GB that writes 3,000 records here and there zeroes 4 GB in huge pages, and 12 MB in small ones.

So memory that is first written at random starts in small pages. Before a stretch of it is filled as a whole, its pages
are *merged* into huge ones, which keep what was written. (Measured outside this repository: in huge pages alone, 3,000
writes over 1 GB took 70 ms where the memory had been in use lately, and 2.3 s where it had not; in small ones, 5 ms. To
fill the rest then took 0.05 s in huge pages, 0.4 s in small ones, 0.1 s in pages merged before.)

A process that may need such memory later, and has time now, has it *ready*: in huge pages, all of them written before.
Then there is nothing to zero and nothing to merge while others wait.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.runtime.kernels import LINE_BYTES
from torch_ecrec.runtime.threads import Worker, log_error

log = logging.getLogger(__name__)

LEAST_BYTES = 4 << 20  # smaller memory is left to NumPy
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python names neither yet
_MADV_COLLAPSE = 25  # since Linux 6.1
_NORESERVE = 0x4000  # likewise
READY_SHARE = 0.1  # of a core, that makes memory ready
READY_SPARE = 8  # memory is made ready where an eighth of it and more of what there is stay free
LOOK_BYTES = 64 << 20  # after as many it is looked again how much is free: others may make memory ready, too

_libc = ctypes.CDLL(None)


def _huge_page_bytes() -> int:
    """Returns the size of a huge page; 0 if the system has none, or they are switched off."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):  # not Linux, or built without them
        return 0
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return size


HUGE_PAGE_BYTES = _huge_page_bytes()


def mapped(size: int, advice: int | None = None, sparse: bool = False) -> NDArray[np.uint8]:
    """Returns new memory of zeros, which begins with a page.

    Args:
        size: in bytes, at least 1.
        advice: of `madvise`.
        sparse: most of it will never be written: it may be more than the system has, unless that forbids it.

    Raises:
        MemoryError: there is not as much.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sparse and sys.platform == "linux" else 0)
    try:
        mapping = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise MemoryError(f"no {size} bytes of memory: {os.strerror(error.errno or 0)}") from error
    if advice is not None:
        mapping.madvise(advice)
    return np.frombuffer(mapping, np.uint8)


def untouched(count: int, dtype: Any) -> NDArray[Any]:
    """Returns zeros that begin with a page and take no memory until they are written, one page after the other.

    There may be more of them than the system has memory.
    """
    size = count * np.dtype(dtype).itemsize
    return mapped(max(1, size), sparse=True)[:size].view(dtype)


def release(array: NDArray[Any], first: int = 0) -> None:
    """Gives the memory of an array's items from `first` on back to the system, whole pages: they are zeros then."""
    begin = array.ctypes.data + first * (array.nbytes // max(1, len(array)))
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (array.ctypes.data + array.nbytes) & -mmap.PAGESIZE
    if begin < end:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class Memory:
    """Memory that is zero at first, for records.

    Args:
        size: in bytes.
        scattered: it is first written here and there; `merge` is called before stretches of it are filled.
        ready: memory that was written before, all zeros, of `size` bytes; None: it is new.
        sparse: most of it will never be written: see `mapped`.

    Attributes:
        array: (size,) uint8; begins with a cache line, so that no record lies in one more than it must.

    Raises:
        MemoryError: there is not as much.
    """

    def __init__(
        self, size: int, scattered: bool = False, ready: NDArray[np.uint8] | None = None, sparse: bool = False
    ) -> None:
        self._first = 0  # address of the first huge page that could be
        self._small = np.zeros(0, np.bool_)  # for each huge page, whether it is not merged yet
        self.array: NDArray[np.uint8]
        if ready is not None:
            self.array = ready
            return
        if not HUGE_PAGE_BYTES or size < LEAST_BYTES:
            memory = np.zeros(size + LINE_BYTES, np.uint8)
            first = -memory.__array_interface__["data"][0] % LINE_BYTES
            self.array = memory[first : first + size]
            return
        self.array = mapped(size, mmap.MADV_NOHUGEPAGE if scattered else mmap.MADV_HUGEPAGE, sparse)
        if scattered:
            begin = self._address
            self._first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._small = np.ones((begin + size - self._first) // HUGE_PAGE_BYTES, np.bool_)

    @property
    def _address(self) -> int:
        address: int = self.array.__array_interface__["data"][0]
        return address

    def merge(self, begin: int, end: int) -> None:
        """Merges small pages into huge ones, wherever one would hold some of the bytes from `begin` to `end`.

        If the system refuses, pages stay small; an untouched one becomes huge when it is first written.
        """
        offset = self._address - self._first
        pages = slice(max(begin + offset, 0) // HUGE_PAGE_BYTES, -(-(end + offset) // HUGE_PAGE_BYTES))
        for page in pages.start + np.flatnonzero(self._small[pages]):
            address = self._first + int(page) * HUGE_PAGE_BYTES
            for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
                _libc.madvise(address, HUGE_PAGE_BYTES, advice)
        self._small[pages] = False


class ReadyMemory:
    """Memory that is written before anybody needs it, on a thread that takes a tenth of a core.

    Args:
        room: returns the bytes of memory that this process may have, and how many of them are in use by anybody; (0, 0)
            if that is not known, and nothing is made ready then.
    """

    def __init__(self, room: Callable[[], tuple[int, int]]) -> None:
        self._room = room
        self._lock = threading.Lock()  # guards all below
        self._sizes: tuple[int, ...] = ()  # what is wanted, also what is too small to be made ready
        self._ready: list[NDArray[np.uint8]] = []
        self._taken = False  # some of it was: there is not all that is wanted any more
        self._turn = 0  # rises when other sizes are wanted

    def prepare(self, sizes: Sequence[int]) -> None:
        """Begins to make pieces of memory ready, of these sizes in bytes, in place of those that were wanted before."""
        wanted = tuple(sizes)
        with self._lock:
            if wanted == self._sizes and not self._taken:
                return
            self._sizes, self._ready, self._taken = wanted, [], False
            self._turn += 1
            turn = self._turn
        large = [size for size in wanted if HUGE_PAGE_BYTES and size >= LEAST_BYTES]
        if large:
            Worker(partial(self._write, turn, large), "ready memory", log_error).start()

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Returns `size` bytes of zeros that were written before, and are the caller's now; None: there are none.

        They are of the piece that was made for as much. A larger one, which is there, is for somebody else.
        """
        with self._lock:
            wanted = min((one for one in self._sizes if one >= size), default=0)
            best = next((array for array in self._ready if len(array) == wanted), None)
            if best is None or not size:
                return None
            self._ready, self._taken = [array for array in self._ready if array is not best], True
            return best[:size]

    @property
    def bytes(self) -> int:
        """How many bytes are ready."""
        with self._lock:
            return sum(map(len, self._ready))

    def _has_room(self, size: int, done: int = 0) -> bool:
        """Whether there is memory for what is left of a piece of so many bytes."""
        limit, used = self._room()
        if limit and limit - used - (size - done) >= limit // READY_SPARE:
            return True
        log.info("no %d bytes of memory are made ready: %d of %d are in use", size, used, limit)
        return False

    def _write(self, turn: int, sizes: Sequence[int]) -> None:
        """Makes memory ready until other sizes are wanted."""
        for size in sizes:
            if not self._has_room(size):
                return
            array = mapped(size, mmap.MADV_HUGEPAGE)
            address: int = array.__array_interface__["data"][0]
            for begin in range(0, size, HUGE_PAGE_BYTES):
                if self._turn != turn or (begin % LOOK_BYTES == 0 and not self._has_room(size, begin)):
                    return
                began_s, many = time.thread_time(), min(HUGE_PAGE_BYTES, size - begin)
                if _libc.madvise(address + begin, many, _MADV_POPULATE_WRITE):  # an older Linux
                    array[begin : begin + many : mmap.PAGESIZE] = 0
                time.sleep((time.thread_time() - began_s) * (1 / READY_SHARE - 1))
            with self._lock:
                if self._turn == turn:
                    self._ready.append(array)
