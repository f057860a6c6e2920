"""A new file of this machine, written past the page cache where its file system can (`O_DIRECT`).

Checkpoints are large, and nobody reads them soon. Through the page cache a byte costs about eight times as much of a
core: a page is found for it, it is copied, and the kernel writes it later, beside the steps. And what the machine had
in the cache is gone then.

Bytes are gathered in a huge page, and written when that is full: the kernel finds and holds one page, not 512.
(Measured outside this repository: 33 us of a core for a MiB, where small pages took 120 to 190.) What is left at the
end goes through the cache. Where the file system refuses (`tmpfs` of older kernels, some of a network), all does.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np

from torch_ecrec.records.pages import Memory
from torch_ecrec.runtime.checks import require

BUFFER_BYTES = 2 << 20  # written at once: a huge page of x86-64, a multiple of every device's block


class DirectFile:
    """A file that is not there yet. Append to it, then `sync`.

    Args:
        path: of it.

    Raises:
        OSError: it is there, or cannot be created.

    After an error it is broken: what is in the file is not known, and nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        # As many bytes that begin where a huge page would; in small ones until they were full once: a part of a small
        # slot does not fill one.
        self._pages = Memory(2 * BUFFER_BYTES, scattered=True)
        self._first = -self._pages.array.__array_interface__["data"][0] % BUFFER_BYTES
        self._memory = self._pages.array[self._first : self._first + BUFFER_BYTES]
        self._held = 0  # bytes of it that are not written yet
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._open, self._broken = True, False
        try:
            self._go_past_cache(True)
        except OSError:
            self._direct = False

    def _go_past_cache(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self._direct = direct

    def write(self, view: memoryview) -> None:
        """Appends bytes. Raises OSError; ValueError: it is closed, or broken."""
        self._check()
        left = np.frombuffer(view, np.uint8)  # copied by NumPy, which lets other threads run meanwhile
        while len(left):
            count = min(len(left), BUFFER_BYTES - self._held)
            self._memory[self._held : self._held + count] = left[:count]
            self._held += count
            left = left[count:]
            if self._held == BUFFER_BYTES:
                self._pages.merge(self._first, self._first + BUFFER_BYTES)
                self._flush()

    def _check(self) -> None:
        require(self._open and not self._broken, "the file is closed" if not self._open else "writing it has failed")

    def _flush(self) -> None:
        self._broken = True  # until all is written
        left = self._memory[: self._held].data
        if self._direct and self._held < BUFFER_BYTES:
            self._go_past_cache(False)
        while left.nbytes:
            try:
                left = left[os.write(self._handle, left) :]
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._go_past_cache(False)  # it was promised, or what a short write has left is no block
        self._held, self._broken = 0, False

    def sync(self) -> None:
        """Makes all of the file survive the loss of power, but for its name. Raises as `write`."""
        self._check()
        self._flush()
        os.fsync(self._handle)

    def close(self) -> None:
        """Lets go of it; what was not synced may be lost. Twice is once."""
        if self._open:
            self._open = False
            os.close(self._handle)
