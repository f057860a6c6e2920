"""Which checkpoints a cluster writes, as its coordinator is told at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_ecrec.protocol.bounds import Scalar
from torch_ecrec.runtime.checks import require, require_int, take_fields
from torch_ecrec.spec.settings import Beyond, CheckpointPolicy, CheckpointSaver


@dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints a cluster writes.

    Args:
        url: where; any that fsspec knows. "": none.
        every_steps: one is due after each step of training that is a multiple of it; 0: not by steps.
        every_s: one is due so long after the one before; 0: not by time.
        keep: so many are kept, with what they build on.
        policy: "full": all records; "one-shot": what has changed since the last full one; "consecutive": since the last
            one; "intermittent": one-shot, and a full one when that is expected to cost less in total.
        bytes_per_s: limit of what each server process writes; 0: none. None: what the cores of its machine allow for.
        timeout_s: one that takes longer is void.
        beyond: when more is lost than parity can repair: "stop", or go back to the newest "checkpoint"; or "partial":
            only the slots that are lost do, and the others stay as they are. That is not exact.
        most_lost_samples: the portion of lost samples from 0 to 1 beyond which "partial" is as "checkpoint".
        saver: which rows are saved more often, for "partial": between two checkpoints, every `portion` of the interval,
            that portion of each slot's rows, as this saver picks them (`records/savers.py`); "everything": none are.
        portion: above 0, below 1.
        again_s: before the next try, by how many were void one after the other.
        encoding: of the parts: names and values, as `storage` reads them.
        run: a word of this coordinator's, letters and digits; see `RunningJob`.
    """

    url: str = ""
    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 3
    policy: CheckpointPolicy = "full"
    bytes_per_s: float | None = None
    timeout_s: float = 3600.0
    beyond: Beyond = "stop"
    most_lost_samples: float = 0.1
    saver: CheckpointSaver = "everything"
    portion: float = 0.125
    again_s: tuple[float, ...] = (2.0, 5.0, 15.0, 60.0)
    encoding: tuple[tuple[str, Scalar], ...] = ()
    run: str = "run"

    def __post_init__(self) -> None:
        take_fields(self)
        require_int("every_steps", self.every_steps, 0)
        require_int("keep", self.keep, 1)
        require(self.every_s >= 0, f"`every_s` must not be negative, got {self.every_s}")
        least = 0.0 if self.bytes_per_s is None else self.bytes_per_s
        require(least >= 0, f"`bytes_per_s` must not be negative, got {least}")
        require(self.timeout_s > 0, f"`timeout_s` must be positive, got {self.timeout_s}")
        require(bool(self.again_s), "`again_s` must not be empty")
        require(
            self.beyond == "stop" or bool(self.url),
            f"`beyond` is {self.beyond!r}, but no checkpoints are written: add --checkpoint URL --checkpoint-every N",
        )
        most = self.most_lost_samples
        require(0 <= most <= 1, f"`most_lost_samples` must be from 0 to 1, got {most}")
        require(0 < self.portion < 1, f"`portion` must be above 0 and below 1, got {self.portion}")
        if self.saver != "everything":
            self._check_saver()
        due = bool(self.every_steps or self.every_s)
        require(due == bool(self.url), "checkpoints need both: where they are kept, and how often one is written")

    def _check_saver(self) -> None:
        require(
            self.beyond == "partial",
            f"`saver` is {self.saver!r}, whose saves only a partial recovery reads, but `beyond` is {self.beyond!r}:"
            " --beyond partial, or leave --checkpoint-saver",
        )
        least = math.ceil(1 / self.portion)
        require(
            not self.every_steps or self.every_steps >= least,
            f"`every_steps` must be at least {least}, so that a `portion` of it is a step, got {self.every_steps}",
        )

    @property
    def saves_every(self) -> int:
        """Steps of training between two prioritised saves; 0: there are none, or they come by time."""
        return 0 if self.saver == "everything" else round(self.portion * self.every_steps)


NO_CHECKPOINTS = CheckpointSettings()
