"""Judges by its calls whether the user's loop over a reader goes on exactly after a restart.

After a restart a loop runs again from its top. It goes on where it was if it begins with the right pass, leaves it in
time, and trains by nothing that only its own variables know. The first two follow from what the loop asks `Reader` for
and what is attached; a loop that asks for nothing is refused where that would matter.

    inspector.on_draw()          before each draw
    inspector.on_pass_over(...)  another pass begins
    inspector.on_forward()       a batch is trained on
    inspector.on_push()          its gradients were sent
    inspector.on_keep()          a snapshot is taken: training would go on with this draw

Does not know how batches are brought back (`reader.py` does). Does not look at the loop's code or variables: what a
loop keeps there `torch-ecrec rehearse` finds, by running the script.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

FRAMES_MOST = 32  # between a draw and the pipeline that draws
PIPELINES = "torchrec.distributed.train_pipeline"  # these draw ahead of what they train on

_COUNT_PASSES = (
    "Write `for epoch in batches.epochs(N): for batch in batches: ...`; or let the loop begin with `batches.epoch`, or"
    " with what follows from `model.steps_done`, or count passes in something attached"
)


class LoopInspector:
    """Judges one loop over a reader.

    Args:
        counters: whole numbers of what the user has attached, by name, as they are now.
        attached: whether the user has attached anything of his own, which may count.
    """

    def __init__(self, counters: Callable[[], Mapping[str, int]] = dict, attached: bool = False) -> None:
        self._counters, self._attached = counters, attached
        self._thread = threading.get_ident()
        self.pipelined = False
        self._drew: weakref.ref[Any] | None = None  # the pipeline that drew last
        self._counts_passes = False  # the loop is known to begin with the pass that training goes on in
        self._counts_batches = False  # and to count the batches of a pass from where training goes on
        self._counted: Mapping[str, int] = {}  # when the present pass began
        self._asked = False  # for a batch, in this life
        self._drawn_before_forward = 0
        self._trained = self._restored = False
        self._in_forward = False  # one has begun, and nothing was pushed since
        self._drawn_within = False  # since it has begun
        self._draws_within = False  # once so when its gradients were pushed

    # what the loop asks ---------------------------------------------------------------------------

    def on_epoch_asked(self) -> None:
        """Called when the loop reads the pass's number. If it does so before it draws, its passes follow from it."""
        self._counts_passes |= not self._asked

    def on_count_asked(self) -> None:
        """Called when the loop reads the number of batches drawn in the pass."""
        self._counts_batches = True

    def on_restored(self) -> None:
        """Called when this process goes on after a restart."""
        self._restored = True

    # draws ----------------------------------------------------------------------------------------

    @property
    def on_its_thread(self) -> bool:
        """Whether the thread that trains asks."""
        return threading.get_ident() == self._thread

    def on_draw(self, ahead: int = 0) -> None:
        """Called before a batch is drawn.

        Args:
            ahead: batches that were drawn before, and not trained on.

        Raises:
            RuntimeError: on another thread than the one that trains; or a pipeline was left with batches that it has
                drawn ahead.
        """
        if not self.on_its_thread:
            raise RuntimeError(
                "a batch is drawn on another thread than the one that called `attach`: what happens there while a step"
                " runs cannot be brought back after a restart. Draw on the training thread; or attach what draws ahead"
                " itself, with state_dict and load_state_dict"
            )
        draws, pipeline = _pipeline_that_draws()
        if ahead and self._drew is not None and (not draws or (pipeline is not None and self._drew() is not pipeline)):
            raise RuntimeError(
                f"a pipeline was left with {ahead} batches that it has drawn and not trained on, and"
                f" {'another pipeline' if draws else 'a loop'} draws now: after a restart these would be"
                " trained on. Have `progress` called until it raises StopIteration; or go on with the same pipeline,"
                " where it has an iterator of the next pass"
            )
        self._drew = self._drew if pipeline is None else weakref.ref(pipeline)
        self.pipelined = self.pipelined or draws
        self._asked = True
        self._drawn_before_forward += not self._trained
        self._drawn_within = self._in_forward

    def on_pass_begun(self) -> None:
        """Called when everything attached is as at the beginning of a pass: notes the counters."""
        self._counted = self._counters()

    def on_pass_over(self, epoch: int, drawn: int, whole: bool, length: int) -> None:
        """Called when another pass begins: would the loop, after a restart, begin with the right one and end in time?

        Args:
            epoch, drawn, whole: of the pass that is over; whether it was drawn to its end.
            length: batches of a pass; -1: not known.
        """
        now = self._counters()
        self._counts_passes |= any(now[name] == count + 1 for name, count in self._counted.items() if name in now)
        self._counts_batches |= now != self._counted
        if not self._counts_passes:
            raise RuntimeError(
                "a second pass over what `attach` returned, and nothing tells whether this loop would begin with the"
                f" first pass after a restart, or with the one that training goes on in. {_COUNT_PASSES}"
            )
        if not whole and not self._counts_batches and drawn != length:
            raise RuntimeError(
                f"pass {epoch} over what `attach` returned was left after {drawn} batches: after a restart in the"
                " middle of a pass, a loop that counts batches by itself would leave it later. Let it use"
                " `batches.drawn` or `model.steps_done`, or count in something attached"
            )

    # steps ----------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Called when a training forward begins.

        Raises:
            RuntimeError: the loop draws ahead, or trains on what was not drawn.
        """
        if self._drawn_before_forward == 0:
            raise RuntimeError(
                "the model is trained on a batch that was not drawn from what `attach` returned: iterate that, not the"
                " reader itself"
            )
        if not self.pipelined and not self._trained and self._drawn_before_forward > 1 and not self._restored:
            raise RuntimeError(
                f"{self._drawn_before_forward} batches were drawn before the first was trained on: a loop that looks at"
                " some, or draws ahead, cannot be brought back after a restart (TorchRec's pipelines can). Look at"
                " batches of another reader; batches that are to be left out must be left out by the reader"
            )
        self._trained = self._in_forward = True
        self._drawn_within = False

    def on_push(self) -> None:
        """Called when gradients were pushed: a step was trained."""
        self._draws_within |= self._drawn_within
        self._in_forward = self._drawn_within = False

    def on_keep(self) -> None:
        """Called when a draw is to be where training goes on after a restart.

        Raises:
            RuntimeError: the batch drawn before it is still to be trained on.
        """
        if self._draws_within and self._in_forward and not self.pipelined:
            raise RuntimeError(
                "batches are drawn between a forward and its backward: a restart would leave one out, which is drawn"
                " and not trained on when a step ends. Draw after the backward, one batch for each step (TorchRec's"
                " pipelines may draw ahead)"
            )

    def on_end(self, drawn: int, whole: bool) -> None:
        """Called when training is over, after `drawn` batches of a pass. Warns if the loop perhaps ended it late."""
        if self._restored and not whole and not self._counts_batches and not self._attached:
            log.warning(
                "the last pass was left after %d batches, in a life that did not begin it: a loop that has counted its"
                " batches by itself has trained on more than without the restart (`batches.drawn` counts all)",
                drawn,
            )


class Given:
    """What a forward was called with, known again by its objects, which this does not keep alive."""

    def __init__(self, batch: object) -> None:
        self._parts = [weakref.ref(part) for part in _parts(batch)]

    def is_again(self, batch: object) -> bool:
        """Returns whether another forward is called with the same objects."""
        parts = list(_parts(batch))
        same = len(parts) == len(self._parts) and all(
            known() is part for known, part in zip(self._parts, parts, strict=True)
        )
        return bool(parts) and same


def _parts(batch: object) -> Iterator[Any]:
    """Yields the objects of a batch, those within containers, that can be referred to weakly: numbers cannot."""
    if isinstance(batch, (list, tuple, dict)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _parts(part)
    elif type(batch).__weakrefoffset__:
        yield batch


def _pipeline_that_draws() -> tuple[bool, Any]:
    """Returns whether one of TorchRec's pipelines is among the callers, perhaps behind a generator or progress bar; and
    which, if the caller is a method."""
    frame: FrameType | None = sys._getframe()
    for _ in range(FRAMES_MOST):
        if frame is None:
            return False, None
        if str(frame.f_globals.get("__name__")).startswith(PIPELINES):
            return True, frame.f_locals.get("self")
        frame = frame.f_back
    return False, None
