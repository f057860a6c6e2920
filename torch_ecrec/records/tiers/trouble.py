"""Trouble of a server's disk, made on demand: for `torch-ecrec chaos`.

    errors    some reads fail, each once, as of a bad sector
    full      nothing more can be written
    slow      whatever is read or written waits for a while
    hung      likewise, for ever
    flip      a bit of a record in the file changes (`SegmentLog.flip_`)

Real-time signals ask for it: `trouble_signals` has their numbers.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.positions import Bytes
from torch_ecrec.records.tiers.disk import ScratchFile

ERRORS = 4  # reads that fail
SLOW_S = 1.0
KINDS = ("errors", "full", "slow", "hung", "flip")
_EVER_S = 1e9


def trouble_signals() -> dict[str, int]:
    """Returns the signal that asks for each kind of trouble: real-time ones, which nothing else uses."""
    return {kind: signal.SIGRTMIN + 1 + i for i, kind in enumerate(KINDS)}


class Trouble:
    """What is wrong with the disk of one server. Any thread may begin it.

    Attributes:
        failing: so many reads are still to fail.
        full: nothing can be written.
    """

    def __init__(self) -> None:
        self.failing, self.full = 0, False
        self._until_s = 0.0
        self._lock = threading.Lock()  # guards `failing`

    def begin(self, kind: str) -> None:
        """Begins some trouble: "errors", "full", "slow" or "hung"."""
        if kind == "errors":
            with self._lock:
                self.failing += ERRORS
        elif kind == "full":
            self.full = True
        else:
            self._until_s = time.monotonic() + {"slow": SLOW_S, "hung": _EVER_S}[kind]

    def wait(self) -> None:
        """Waits for as long as the disk is slow."""
        while (left_s := self._until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 1.0))

    def take(self, most: int) -> int:
        """Returns how many reads of so many fail now."""
        with self._lock:
            taken = min(most, self.failing)
            self.failing -= taken
        return taken


class TroubledFile(ScratchFile):
    """A file whose disk may be in trouble."""

    def __init__(self, trouble: Trouble, *about: Any) -> None:
        super().__init__(*about)
        self._trouble = trouble

    def _write(self, offset: int, content: Bytes) -> None:
        self._trouble.wait()
        if self._trouble.full:
            raise TierFailed(f"{self.name} cannot be written: {os.strerror(errno.ENOSPC)}")
        super()._write(offset, content)

    def _read(self, offsets_R: Any, lengths_R: Any, into: Any, at_R: Any) -> Any:
        self._trouble.wait()
        results_R = super()._read(offsets_R, lengths_R, into, at_R)
        failed = self._trouble.take(len(results_R))
        results_R[:failed] = -errno.EIO
        return results_R


def file_of(trouble: Trouble | None) -> Callable[..., ScratchFile]:
    """Returns what makes files: as `ScratchFile`, with that trouble, if there may be any."""
    return ScratchFile if trouble is None else lambda *about: TroubledFile(trouble, *about)
