"""Prioritised saves: when the cluster writes one, and which count.

Between two checkpoints the rows that matter most are saved more often: every r-th part of the interval a portion r of
each slot's rows, which its saver picks (`records/savers.py`). Such a save is written as a checkpoint is, by
`checkpointing.py`, and is none: nobody begins with it but slots that are lost beyond repair, on top of the checkpoint
that it is on (`partial.py`).

    interval 8, r = 1/4      step   8           10    12    14    16
                                    everything  some  some  some  everything

Invariants
- A save that counts is of a step that all slots have applied and none has taken back: when trainers were lost and all
  go back, those of later steps are forgotten, one that is being written too.
- A checkpoint that counts ends them all: they were on the one before.
- At most ceil(1/r) are on one checkpoint, however long none succeeds.

Pure, as the coordinator is.
"""

from __future__ import annotations

import math

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol.messages import Saves
from torch_ecrec.protocol.status import SavesStatus


class Saving:
    """The prioritised saves of one cluster.

    Args:
        settings: of its checkpoints.

    Attributes:
        known: those that count.
        due: steps of training after which one is; None: none is by steps.
        failing: why the last try came to nothing, "" if it did not.
    """

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self.known = Saves()
        self.due: int | None = None
        self.failing = ""
        self._next_s: float | None = None  # by time
        self._void = 0  # one after the other
        self._not_before_s = 0.0
        self._under_way: tuple[str, int] | None = None  # name, and steps of training; None: they were taken back

    @property
    def wanted(self) -> bool:
        """There are to be some."""
        return self._settings.saver != "everything"

    # when -----------------------------------------------------------------------------------------

    def is_due(self, now_s: float) -> bool:
        """Returns whether one is to be written; asked from time to time."""
        most = math.ceil(1 / self._settings.portion)
        if not self.wanted or not self.known.base or len(self.known.since) >= most:
            return False
        if self._next_s is None and self._settings.every_s:
            self._wait(now_s)
        by_time = self._next_s is not None and now_s >= self._next_s
        return now_s >= self._not_before_s and (by_time or self.due is not None)

    def _wait(self, now_s: float) -> None:
        span_s = self._settings.portion * self._settings.every_s
        self.due, self._next_s = None, now_s + span_s if span_s else None

    # which ----------------------------------------------------------------------------------------

    def on_checkpoint(self, folder: str, done: int, now_s: float) -> None:
        """Notes that a checkpoint counts. `done`: steps of training until then."""
        self.known = Saves(folder, done)
        self._wait(now_s)

    def on_begun(self, folder: str, done: int) -> None:
        """Notes that a save is being written."""
        self._under_way = folder, done

    def on_written(self, now_s: float) -> bool:
        """Notes that all of a save is durable. Returns whether it counts: not if its step was taken back meanwhile."""
        if self._under_way is None:
            return False
        self.known = Saves(self.known.base, self.known.done, [*self.known.since, self._under_way])
        self._under_way, self.failing, self._void = None, "", 0
        self._wait(now_s)
        return True

    def on_void(self, reason: str, now_s: float) -> None:
        """Notes that a save came to nothing: the next attempt waits."""
        again_s = self._settings.again_s
        self._void += 1
        self._not_before_s = now_s + again_s[min(self._void, len(again_s)) - 1]
        self._under_way, self.failing = None, reason

    def forget_after(self, done: int) -> None:
        """Forgets saves of later steps, since training goes on after so many: earlier than it was in some slots."""
        self.known = self.known.until(done)
        if self._under_way is not None and self._under_way[1] > done:
            self._under_way = None

    def on(self, base: str) -> list[tuple[str, int]]:
        """Returns the saves on that checkpoint, oldest first."""
        return list(self.known.since) if self.known.base == base else []

    def status(self) -> SavesStatus:
        """Returns what `torch-ecrec status` shows of prioritised saves."""
        saver, portion = self._settings.saver, self._settings.portion
        return SavesStatus(saver, portion, len(self.known.since), self.known.newest, self.failing)
