"""Files without names on a disk, read at many places at once: by io_uring, or by threads where that is forbidden.

A disk answers a hundred reads in little more time than one, if it is given all of them together. Linux takes them in
one system call by io_uring: two rings of memory that the process and the kernel share, one of requests and one of
results. Both are arrays here, so that a batch is a few operations on arrays and one call, with no Python per read. (The
package `liburing` makes three calls from Python for each.)

Containers often forbid io_uring (`/proc/sys/kernel/io_uring_disabled`, seccomp). Then threads do it, one read each at a
time, for about twice the CPU time a read.

A file has no name from the start: it ends with the process, however that ends.

Does not know what it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.pages import untouched
from torch_ecrec.runtime.threads import Worker, log_error

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096  # reads and writes past the page cache begin and end with one
THREADS = 16
DEPTH = 256  # reads that the kernel has at once, of one batch
RINGS = 4  # batches at once: of training's readings, of two in the background, and of the node itself

_SETUP, _ENTER = 425, 426  # system calls, the same numbers on every architecture
_SQ_RING, _CQ_RING, _SQES = 0, 0x8000000, 0x10000000  # offsets at which the rings are mapped
_GETEVENTS, _SINGLE_MMAP, _READ = 1, 1, 22

_PARAMS = np.dtype(
    [
        *((name, "<u4") for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq")),
        ("reserved", "<u4", 3),
        *((f"sq_{name}", "<u4") for name in ("head", "tail", "mask", "count", "flag", "dropped", "array", "more")),
        ("sq_address", "<u8"),
        *((f"cq_{name}", "<u4") for name in ("head", "tail", "mask", "count", "overflow", "cqes", "flag", "more")),
        ("cq_address", "<u8"),
    ]
)
_REQUEST = np.dtype(
    [
        *(("opcode", "u1"), ("flags", "u1"), ("priority", "<u2"), ("handle", "<i4"), ("offset", "<u8")),
        *(("address", "<u8"), ("length", "<u4"), ("how", "<u4"), ("number", "<u8"), ("more", "<u8", 3)),
    ]
)
_RESULT = np.dtype([("number", "<u8"), ("result", "<i4"), ("flags", "<u4")])

Numbers = NDArray[np.int64]


class Reader(Protocol):
    """Reads many places of a file at once. Implemented by `Uring` and `Threads`.

    Attributes:
        name: how it reads, for people.
    """

    name: str

    def read(self, handle: int, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        """Reads all, and waits for all.

        Args:
            handle: of the file.
            offsets_R, lengths_R: (R,) int64, which bytes of it.
            into: uint8, contiguous. Written.
            at_R: (R,) int64, where in `into` each goes.

        Returns:
            (R,) int64, how many bytes were read of each; or minus the number of the error.
        """


class Uring:
    """Reads by io_uring. Some threads read at once; others wait.

    Raises:
        OSError: the system has none, or forbids it.
    """

    def __init__(self) -> None:
        self.name = "io_uring"
        self._free = queue.SimpleQueue[_Ring]()
        self._free.put(_Ring())
        with contextlib.suppress(OSError):  # there may be room for fewer (`ulimit -l`, before Linux 5.12): one will do
            for _ in range(RINGS - 1):
                self._free.put(_Ring())

    def read(self, handle: int, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        results_R, ring = np.empty(len(offsets_R), np.int64), self._free.get()
        try:
            ring.read(handle, offsets_R, lengths_R, into.ctypes.data + at_R, results_R)
        finally:
            self._free.put(ring)
        return results_R


class _Ring:
    """Two rings that the kernel shares with this process. One batch at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = np.zeros((), _PARAMS)
        handle = self._libc.syscall(_SETUP, DEPTH, ctypes.c_void_p(params.ctypes.data))
        if handle < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._handle = int(handle)
        try:
            self._map(params)
        except BaseException:
            os.close(self._handle)
            raise

    def _map(self, params: Any) -> None:
        if not int(params["features"]) & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.4")
        entries, results = int(params["sq_entries"]), int(params["cq_entries"])
        size = max(int(params["sq_array"]) + 4 * entries, int(params["cq_cqes"]) + _RESULT.itemsize * results)
        shared = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._maps = [
            mmap.mmap(self._handle, size, flags=shared, offset=_SQ_RING),
            mmap.mmap(self._handle, entries * _REQUEST.itemsize, flags=shared, offset=_SQES),
        ]

        def words(name: str, count: int = 1) -> NDArray[np.uint32]:
            return np.frombuffer(self._maps[0], np.uint32, count, int(params[name]))

        self._tail, self._requests = words("sq_tail"), np.frombuffer(self._maps[1], _REQUEST, entries)
        self._head_of_results, self._tail_of_results = words("cq_head"), words("cq_tail")
        self._results = np.frombuffer(self._maps[0], _RESULT, results, int(params["cq_cqes"]))
        words("sq_array", entries)[:] = np.arange(entries)
        self._entries, self._mask, self._results_mask = entries, entries - 1, results - 1

    def __del__(self) -> None:
        if hasattr(self, "_maps"):
            os.close(self._handle)

    def read(self, handle: int, offsets_R: Numbers, lengths_R: Numbers, addresses_R: Numbers, into_R: Numbers) -> None:
        """Reads all; `into_R` is what `Reader.read` returns."""
        begun = done = 0
        into_R[:] = -errno.EIO
        while done < len(into_R):
            count = min(len(into_R) - begun, self._entries - (begun - done))
            if count:
                tail, some = int(self._tail[0]), slice(begun, begun + count)
                at = (tail + np.arange(count)) & self._mask
                made = np.zeros(count, _REQUEST)
                made["opcode"], made["handle"], made["offset"] = _READ, handle, offsets_R[some]
                made["address"], made["length"], made["number"] = addresses_R[some], lengths_R[some], np.arange(count)
                made["number"] += np.uint64(begun)
                self._requests[at] = made
                self._tail[0] = (tail + count) & 0xFFFFFFFF
                begun += count
            waits = begun - done if begun == len(into_R) else max(1, self._entries // 2)
            done += self._take(into_R, count, waits)

    def _take(self, into_R: Numbers, submit: int, least: int) -> int:
        """Hands so many requests over, waits until so many results are there, and takes all that are."""
        while True:
            taken = self._libc.syscall(_ENTER, self._handle, submit, least, _GETEVENTS, None, 0)
            if taken >= submit:
                break
            if taken >= 0:  # of some only, for want of memory, and then it does not wait
                submit -= taken
                continue
            number = ctypes.get_errno()
            if number not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise OSError(number, os.strerror(number))
        head, tail = int(self._head_of_results[0]), int(self._tail_of_results[0])
        count = (tail - head) & 0xFFFFFFFF
        results = self._results[(head + np.arange(count)) & self._results_mask]
        into_R[results["number"]] = results["result"]
        self._head_of_results[0] = tail
        return count


class Workers:
    """Some threads, and what they are to do."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads, self._queue = threads, queue.SimpleQueue[Callable[[], None] | None]()
        for _ in range(threads):
            Worker(partial(_serve, self._queue), name, log_error).start()

    def put(self, work: Callable[[], None]) -> None:
        """Has one of them do something."""
        self._queue.put(work)

    def end(self) -> None:
        """Ends the threads, once they have done what there is."""
        for _ in range(self._threads):
            self._queue.put(None)


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (one := work.get()) is not None:
        one()
        del one  # its records, and the slot that it was for, would be kept until there is more to do


class Threads:
    """Reads by threads, each one place at a time."""

    def __init__(self) -> None:
        self.name = f"{THREADS} threads"
        self._work = Workers("tier reader", THREADS)
        weakref.finalize(self, self._work.end)

    def read(self, handle: int, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        results_R, target, left = np.empty(len(offsets_R), np.int64), into.data, queue.SimpleQueue[None]()
        places = list(zip(offsets_R.tolist(), lengths_R.tolist(), at_R.tolist(), strict=True))

        def share(first: int) -> None:
            for i in range(first, len(places), THREADS):
                offset, length, at = places[i]
                try:
                    results_R[i] = os.preadv(handle, [target[at : at + length]], offset)
                except OSError as error:
                    results_R[i] = -(error.errno or errno.EIO)
            left.put(None)

        shares = min(THREADS, len(places))
        for first in range(shares):
            self._work.put(lambda first=first: share(first))  # type: ignore[misc]
        for _ in range(shares):
            left.get()
        return results_R


def reader(how: str = "") -> Reader:
    """Returns the best reader of this system. `how`: "uring" or "threads" alone; "": either.

    Raises:
        OSError: io_uring was asked for, and cannot be had.
    """
    if how == "threads":
        return Threads()
    try:
        return Uring()
    except OSError as error:
        if how == "uring":
            raise
        found = Threads()
        found.name += f" (io_uring: {error.strerror})"
        return found


class File(Protocol):
    """What a log is in. Implemented by `ScratchFile`, and on virtual time by `tests/harness/tiers.py`.

    Attributes:
        name: for people.
    """

    name: str

    def write(self, offset: int, content: NDArray[np.uint8]) -> None:
        """Writes bytes, whole blocks, from an offset on. Raises TierFailed."""

    def read(self, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        """Reads blocks, as `Reader.read` says."""

    def flip_(self, offset: int, bit: int) -> None:
        """Flips one bit of the block that begins at an offset, as a failing disk does: for tests and `chaos`."""


class Watch:
    """Since when a disk has not answered. A disk that hangs returns no error: only another thread can notice it."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}  # by thread: of what it waits for now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The disk is asked for something within."""
        me = threading.get_ident()
        self._begun_s[me] = time.monotonic()
        try:
            yield
        finally:
            del self._begun_s[me]

    @property
    def unanswered_s(self) -> float:
        """Seconds for which the oldest request has waited; 0: there is none. On any thread."""
        begun_s = list(self._begun_s.values())
        return time.monotonic() - min(begun_s) if begun_s else 0.0


class ScratchFile:
    """A file without a name, read and written past the page cache where its file system can.

    Args:
        folder: where.
        reader: reads it.
        watch: is told what the disk is asked for; None: nobody watches.

    Raises:
        TierFailed: it cannot be made.
    """

    def __init__(self, folder: Path, reader: Reader, watch: Watch | None = None) -> None:
        self._folder, self._reader, self._watch = folder, reader, watch or Watch()
        self.name = f"the file of a tier in {folder}"
        with self._watch.waiting():
            self._handle = self._make()

    def _make(self) -> int:
        """Opens a file without a name; where the file system has none such, one whose name is removed at once."""
        flags = os.O_RDWR | os.O_CLOEXEC
        for direct in (os.O_DIRECT, 0):
            if not direct:
                log.warning("%s cannot be read past the page cache, which takes memory of its own", self._folder)
            try:
                return os.open(self._folder, flags | direct | os.O_TMPFILE, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise TierFailed(f"no file can be made in {self._folder}: {error.strerror}") from error
            handle = self._make_named(flags | direct)
            if handle >= 0:
                return handle
        raise TierFailed(f"no file can be made in {self._folder}")

    def _make_named(self, flags: int) -> int:
        path = self._folder / f".torch_ecrec-tier-{os.getpid()}-{id(self):x}"
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                return -1
            raise TierFailed(f"no file can be made in {self._folder}: {error.strerror}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def write(self, offset: int, content: NDArray[np.uint8]) -> None:
        with self._watch.waiting():
            self._write(offset, content)

    def _write(self, offset: int, content: NDArray[np.uint8]) -> None:
        view = content.data
        try:
            while len(view):
                count = os.pwrite(self._handle, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise TierFailed(f"{self.name} cannot be written: {error.strerror}") from error

    def read(self, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        with self._watch.waiting():
            try:
                return self._read(offsets_R, lengths_R, into, at_R)
            except OSError as error:  # of all reads, not of one
                raise TierFailed(f"{self.name} cannot be read: {error.strerror}") from error

    def _read(self, offsets_R: Numbers, lengths_R: Numbers, into: NDArray[np.uint8], at_R: Numbers) -> Any:
        return self._reader.read(self._handle, offsets_R, lengths_R, into, at_R)

    def flip_(self, offset: int, bit: int) -> None:
        block = untouched(BLOCK_BYTES, np.uint8)
        os.preadv(self._handle, [block.data], offset)
        block[bit // 8] ^= np.uint8(1 << (bit % 8))
        os.pwrite(self._handle, block.data, offset)
