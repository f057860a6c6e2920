"""Memory that other processes of this host read in place, so that what is sent within a host is written once.

    segment   an anonymous file in memory (memfd), mapped here to be written, and in its readers to be read; it is
              sealed, so that nobody can take from a reader what it looks at
    pool      the segments of this process; `empty` gives arrays in them, and hands a segment out again only when
              no array of it is left here and every reader has given it back

So what lies in an array of `empty` must not be changed once it has been sent: a reader may look at it for as long as it
likes, also after this process has died. Nothing has a name in any file system, and nothing is left behind.

A process has at most one pool, from `enable` on. Without one `empty` is numpy's. Does not know who the readers are, nor
how they learn of a segment: `transport/lending.py` does.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import itertools
import math
import mmap
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from torch_ecrec.runtime.lifetime import belongs_here

LEAST_BYTES = 1 << 14  # less is copied faster than it is lent
SEGMENTS_MOST = 256  # of a process; each is an open file, of which it may have 1024
FILES_LEFT = 64  # of the files that it may have open: for connections, which nothing goes on without
SPARE_MOST = 2  # a segment serves for what needs at least its half
_GRAIN = 1 << 16  # sizes are multiples of it
IDLE_S = 10.0  # a segment that nobody has used for so long goes back to the system

Forget = Callable[[int], object]  # a reader's: told, with the pool's lock held, which segment is not used again

_libc = ctypes.CDLL(None, use_errno=True)


def _prepare() -> bool:
    if not hasattr(os, "memfd_create"):
        return False
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_ssize_t,
    )
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return True


AVAILABLE = _prepare()  # on Linux


class Mapping:
    """A file's bytes mapped as memory, for as long as this object lives. Raises OSError.

    All its pages are mapped at once: one by one, at their first use, they took a few per cent of a job's first minute.
    Python's own `mmap` would keep a file descriptor for each.
    """

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, access, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
        self.address, self.size = int(address), size

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if hasattr(self, "address"):
            munmap(self.address, self.size)


def is_whole(fd: int, size: int) -> bool:
    """Returns whether a file has `size` bytes and can never shrink: a read beyond its end would kill the reader."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # not a file of the kind that is sealed
        return False
    return bool(sealed) and os.fstat(fd).st_size >= size


class _Held:
    """Owns the memory of arrays, and appends `token` to `gone` when the last array of it is gone."""

    def __init__(self, mapping: Mapping, size: int, token: Any, gone: deque[Any]) -> None:
        self._mapping, self._token, self._gone = mapping, token, gone
        self.__array_interface__ = {"data": (mapping.address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._gone.append(self._token)  # on whatever thread, with whatever held: no more than this


def held(mapping: Mapping, size: int, token: Any, gone: deque[Any]) -> NDArray[np.uint8]:
    """Returns the first `size` bytes of a mapping. When the last array of them is gone, `gone` gets `token`."""
    return np.asarray(_Held(mapping, size, token, gone))


class Segment:
    """A file of shared memory, and who uses it. It is open for as long as this object lives."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create("torch_ecrec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and self.fd >= most - FILES_LEFT:  # the lowest number that was free
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.mapping = Mapping(self.fd, size, writable=True)
        # guarded by the pool's lock
        self.held = False  # by an array of this process
        self.lent = 0  # how often it was lent and not given back
        self.lost = False  # lent to somebody who will not say when it is given back
        self.dropped = False
        self.freed_s = 0.0  # when it was given back
        self.readers: set[Forget] = set()

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


class Pool:
    """The shared-memory segments of this process.

    Args:
        most_bytes: of all segments together, free ones included.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._gone: deque[Segment] = deque()  # segments whose last array here is gone
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards all below
        belongs_here(self)
        self._bytes = self._count = 0
        self._free: list[Segment] = []  # ordered by when they were given back, the earliest first
        self._held: list[tuple[int, Segment]] = []  # by address, ascending

    def on_forked(self) -> None:
        """Drops the pool in a forked child: the parent goes on to hand out the very same memory."""
        self._lock = threading.Lock()
        if _pool is self:
            enable(0)

    @property
    def bytes(self) -> int:
        """The size of all segments in bytes, free ones included."""
        with self._lock:
            self._sort_gone()
            return self._bytes

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Returns `size` bytes, uninitialised; None if the pool is full."""
        with self._lock:
            self._sort_gone()
            now_s = time.monotonic()
            while self._free and now_s - self._free[0].freed_s > IDLE_S:
                self._drop(self._free.pop(0))
            segment = self._reuse(size) or self._make(size)
            if segment is None:
                return None
            segment.held = True
            bisect.insort(self._held, (segment.mapping.address, segment))
            return held(segment.mapping, size, segment, self._gone)

    def find(self, address: int) -> tuple[Segment, int] | None:
        """Returns the segment in which an array of this process lies, and its offset there; None if in none."""
        with self._lock:
            at = bisect.bisect_right(self._held, address, key=lambda entry: entry[0]) - 1
            if at >= 0:
                segment = self._held[at][1]
                if address < segment.mapping.address + segment.size:
                    return segment, address - segment.mapping.address
        return None

    def lend(self, segment: Segment, forget: Forget) -> None:
        """Counts a loan of the segment to the reader of `forget`. It must be in use here, or lent already."""
        with self._lock:
            segment.lent += 1
            segment.readers.add(forget)

    def give_back(self, segment: Segment) -> None:
        with self._lock:
            segment.lent -= 1
            if not segment.held and not segment.lost:
                self._settle(segment)

    def leave(self, segment: Segment, forget: Forget, times: int) -> None:
        """Called when a reader is gone with `times` loans that it never returns: the segment is not used again."""
        with self._lock:
            segment.readers.discard(forget)
            segment.lent -= times
            segment.lost |= times > 0
            if not segment.held:
                self._settle(segment)

    def _sort_gone(self) -> None:
        while self._gone:
            segment = self._gone.popleft()
            segment.held = False
            at = bisect.bisect_left(self._held, segment.mapping.address, key=lambda entry: entry[0])
            del self._held[at]
            self._settle(segment)

    def _settle(self, segment: Segment) -> None:
        """Called when this process holds the segment no more: frees it unless somebody else reads it."""
        if segment.lost:
            self._drop(segment)
        elif not segment.lent and not segment.dropped and segment not in self._free:
            segment.freed_s = time.monotonic()
            self._free.append(segment)

    def _reuse(self, size: int) -> Segment | None:
        fitting = [segment for segment in self._free if size <= segment.size <= SPARE_MOST * max(size, _GRAIN)]
        if not fitting:
            return None
        best = min(reversed(fitting), key=lambda segment: segment.size)  # of equals, what caches may still have
        self._free.remove(best)
        return best

    def _make(self, size: int) -> Segment | None:
        size = _rounded(size)
        while self._free and not self._has_room(size):
            self._drop(self._free.pop(0))
        if not self._has_room(size):
            return None
        with contextlib.suppress(OSError):  # no more files, or no more memory
            segment = Segment(next(self._numbers), size)
            self._bytes += size
            self._count += 1
            return segment
        return None

    def _has_room(self, size: int) -> bool:
        return self._bytes + size <= self.most_bytes and self._count < SEGMENTS_MOST

    def _drop(self, segment: Segment) -> None:
        """Drops a segment: it is not used again. A reader that is about to be shown it may still be."""
        if not segment.dropped:
            segment.dropped = True
            self._bytes -= segment.size
            self._count -= 1
            for forget in segment.readers:
                forget(segment.number)
            segment.readers.clear()


def _rounded(size: int) -> int:
    """Returns a size at least an eighth larger, so that what varies a little from step to step fits next time.

    There are eight sizes to a power of two: what is about as large is of one size.
    """
    wanted = size + size // 8
    grain = max(_GRAIN, 1 << max(0, wanted.bit_length() - 4))
    return -(-wanted // grain) * grain


_pool: Pool | None = None


def enable(most_bytes: int) -> None:
    """Gives this process a pool of at most `most_bytes`; 0 removes it. A pool of the same size stays."""
    global _pool
    if most_bytes == 0 or not AVAILABLE:
        _pool = None
    elif _pool is None or _pool.most_bytes != most_bytes:
        _pool = Pool(most_bytes)


def pool() -> Pool | None:
    """Returns the pool of this process, or None."""
    return _pool


def empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Like `numpy.empty`, in shared memory if the pool has room and the array is large enough."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if _pool is not None and size >= LEAST_BYTES:
        memory = _pool.take(size)
        if memory is not None:
            return memory.view(kind).reshape(shape)
    return np.empty(shape, kind)
