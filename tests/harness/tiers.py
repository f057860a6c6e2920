"""Tiers of simulated servers: a few frames, and a disk that is memory, and that can be late to nothing but can fail.

`FRAMES` is how many records of each store are in memory, in all simulations that do not say: pytest's `--tier-frames`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import MemoryStore, RecordStore
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.records.tiers.tiered import TieredStore

FRAMES = 0  # no tier


class VirtualFile:
    """A file in memory, which a fork of the process has for itself.

    Args:
        fault: is asked at each read of so many places which of them fail: (R,) results to put in place of theirs where
            they are not 0.
    """

    def __init__(self, fault: Callable[[int], Any] | None = None) -> None:
        self.name, self._content, self.fault = "a virtual file", np.zeros(0, np.uint8), fault
        self.full = False

    def write(self, offset: int, content: Any) -> None:
        if self.full:
            raise TierFailed(f"{self.name} cannot be written: No space left on device")
        end = offset + len(content)
        if end > len(self._content):
            self._content = np.concatenate([self._content, np.zeros(end - len(self._content), np.uint8)])
        self._content[offset:end] = content

    def read(self, offsets_R: Any, lengths_R: Any, into: Any, at_R: Any) -> Any:
        results_R = np.empty(len(offsets_R), np.int64)
        wrong_R = np.zeros(len(offsets_R), np.int64) if self.fault is None else self.fault(len(offsets_R))
        for i, (offset, length, at) in enumerate(zip(offsets_R, lengths_R, at_R, strict=True)):
            found = self._content[offset : offset + length]
            results_R[i] = wrong_R[i] or len(found)
            if not wrong_R[i]:
                into[at : at + len(found)] = found
        return results_R


class SmallTier(Tier):
    """As many frames for each store as are wanted, whatever that takes."""

    def __init__(self, frames: int, fault: Callable[[int], Any] | None = None) -> None:
        self.frames, self.fault, self.files = frames, fault, list[VirtualFile]()

    @property
    def how(self) -> str:
        return "virtual"

    def run(self, work: Callable[[], None]) -> None:
        work()

    def make(self, rows: int, nbytes: int, parity: bool, sealed: bool) -> RecordStore:
        if not rows or not sealed:
            return MemoryStore(rows, nbytes, sealed=sealed)
        self.files.append(VirtualFile(self.fault))
        return TieredStore(rows, nbytes, self.files[-1], self.frames)


def tier_of(frames: int | None) -> Tier | None:
    """Returns the tier of a simulated server; None: none."""
    wanted = FRAMES if frames is None else frames
    return SmallTier(wanted) if wanted else None
