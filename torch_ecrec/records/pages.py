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
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.runtime.kernels import LINE_BYTES

LEAST_BYTES = 4 << 20  # smaller memory is left to NumPy
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25  # since Linux 6.1; Python does not name it yet

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


class Memory:
    """Memory that is zero at first, for records.

    Args:
        size: in bytes.
        scattered: it is first written here and there; `merge` is called before stretches of it are filled.

    Attributes:
        array: (size,) uint8; begins with a cache line, so that no record lies in one more than it must.

    Raises:
        MemoryError: there is not as much.
    """

    def __init__(self, size: int, scattered: bool = False) -> None:
        self._first = 0  # address of the first huge page that could be
        self._small = np.zeros(0, np.bool_)  # for each huge page, whether it is not merged yet
        if not HUGE_PAGE_BYTES or size < LEAST_BYTES:
            memory = np.zeros(size + LINE_BYTES, np.uint8)
            first = -memory.__array_interface__["data"][0] % LINE_BYTES
            self.array: NDArray[np.uint8] = memory[first : first + size]
            return
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {size} bytes of memory: {os.strerror(error.errno or 0)}") from error
        self.array = np.frombuffer(mapping, np.uint8)
        mapping.madvise(mmap.MADV_NOHUGEPAGE if scattered else mmap.MADV_HUGEPAGE)
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
