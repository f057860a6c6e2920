"""Trouble of the store of checkpoints: how long it lasts, and by what it was felt."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_ecrec.demo.report import Void

FELT_LIMIT_S = 240.0  # for the store's trouble to be felt: a checkpoint is tried a minute after the last one, at most
SLOW_OPENS = 5  # that had to wait


@dataclass
class Trouble:
    """A trouble of the store that is under way.

    Args:
        kind: of `STORE_EVENTS`.
        delayed, void: how many opens had waited, and checkpoints had come to nothing, before it.
        entry: of the schedule.
    """

    kind: str
    since_s: float
    delayed: int
    void: int
    entry: dict[str, Any]

    def felt(self, void: Sequence[Void], delayed: int) -> str:
        """By what it was felt, "" if it was not yet. `void`: checkpoints that have come to nothing since."""
        if self.kind == "slow-store":
            waited = delayed - self.delayed
            return f"{waited} opens had to wait" if waited >= SLOW_OPENS else ""
        error = os.strerror(errno.ENOSPC if self.kind == "full-disk" else errno.ENOTDIR)
        return next((one.reason for one in void if error in one.reason), "")
