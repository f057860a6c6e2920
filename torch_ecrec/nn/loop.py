"""The user's loop over a reader, as far as it can be seen: is it one that goes on exactly after a restart?

After a restart a loop runs again from its top. It goes on where it was if it begins with the right pass, leaves it in
time, and trains by nothing that only its own variables know. What gives such a loop away is looked for where batches
are drawn, and refused by name; a loop's counts, which it may only print, are told once.

    judge.on_draw(...)       before each draw
    judge.on_pass_over(...)  another pass begins
    judge.on_forward(...)    a batch is trained on

Does not know how batches are brought back (`reader.py` does). Sees the frame that draws, and no others: a loop that
keeps its state elsewhere is not seen through.
"""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import logging
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

from torch_ecrec.nn.random_states import GENERATORS, state_of

log = logging.getLogger(__name__)

FRAMES_MOST = 12
LOOKS = 3  # at the variables of a loop, in each pass: what moves from each to the next moves with the batches
PIPELINES = "torchrec.distributed.train_pipeline"  # these draw ahead of what they train on

_COUNT_PASSES = (
    "Write `for epoch in batches.epochs(N): for batch in batches: ...`; or let the loop begin with `batches.epoch`, or"
    " with what follows from `model.steps_done`, or count passes in something attached"
)
_AROUND = {
    enumerate: "`enumerate` counts from 0 again after a restart in the middle of a pass. Write"
    " `for i, batch in batches.enumerate(): ...`, which goes on counting",
    zip: "`zip` begins the others anew after a restart. Attach one reader that gives what belongs together",
    itertools.islice: "`islice` counts from 0 again after a restart in the middle of a pass. Leave the pass when"
    " `batches.drawn` is what it should be",
}


class Judge:
    """Looks at one loop.

    Args:
        counters: whole numbers of what the user has attached, by name, as they are now.
        attached: what the user has attached.
    """

    def __init__(self, counters: Callable[[], Mapping[str, int]] = dict, attached: Collection[object] = ()) -> None:
        self._counters, self._attached = counters, attached
        self._thread = threading.get_ident()
        self.pipelined = False
        self._counts_passes = False  # the loop is known to begin with the pass that training goes on in
        self._counts_batches = False  # and to count the batches of a pass from where training goes on
        self._counted: Mapping[str, int] = {}  # when the present pass began
        self._asked = False  # for a batch, in this life
        self._drawn_before_forward = 0
        self._trained = self._restored = False
        self._looks: list[dict[str, Any]] = []  # at the variables of the loop
        self._told = self._counts_now = False

    # what the loop asks ---------------------------------------------------------------------------

    def on_epoch_asked(self) -> None:
        """The loop has asked for the pass. If it does so before it draws, its passes follow from that."""
        self._counts_passes |= not self._asked

    def on_count_asked(self) -> None:
        """The loop has asked for the batches of the pass."""
        self._counts_batches = self._counts_now = True

    def on_restored(self) -> None:
        """This life goes on after another."""
        self._restored = True

    # draws ----------------------------------------------------------------------------------------

    def on_draw(self, stream: Iterator[Any], drawn: int, caller: FrameType) -> None:
        """A batch is about to be drawn.

        Args:
            stream: what draws.
            drawn: batches of the pass that it has drawn in this life.
            caller: the frame that called it.

        Raises:
            RuntimeError: the loop is one that could not be brought back.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a batch is drawn on another thread than the one that called `attach`: what happens there while a step"
                " runs cannot be brought back after a restart. Draw on the training thread; or attach what draws ahead"
                " itself, with state_dict and load_state_dict"
            )
        frame: FrameType | None = caller
        for _ in range(0 if self.pipelined else FRAMES_MOST):  # a generator or a progress bar may lie between
            if frame is None:
                break
            self.pipelined |= str(frame.f_globals.get("__name__")).startswith(PIPELINES)
            frame = frame.f_back
        if not self._asked:
            self._check_around(stream, caller)  # takes some 50 ms: every object of the process is asked
            if not (self._counts_passes or self._attached) and _is_in_outer_loop(caller):
                raise RuntimeError(
                    "the loop over what `attach` returned is within another one, and nothing tells whether that would"
                    f" begin with the first pass after a restart, or with the one that training goes on in."
                    f" {_COUNT_PASSES}"
                )
        if drawn <= LOOKS:
            self._look(drawn, caller)
        self._asked, self._counts_now = True, False
        self._drawn_before_forward += not self._trained

    @staticmethod
    def _check_around(stream: Iterator[Any], caller: FrameType) -> None:
        """Refuses what counts batches by itself, also around generators (progress bars are)."""
        holders, frame = gc.get_referrers(stream), caller
        while True:
            for holder in [*holders, *gc.get_referrers(*(h for h in holders if type(h) is tuple))]:  # `zip` has one
                for kind, why in _AROUND.items():
                    if isinstance(holder, kind):
                        raise RuntimeError(f"what `attach` returned is drawn from through `{kind.__name__}`: {why}")
            generators = [
                found
                for found in (gc.get_referrers(frame) if frame.f_code.co_flags & inspect.CO_GENERATOR else ())
                if isinstance(found, GeneratorType) and found.gi_frame is frame
            ]
            if not generators or frame.f_back is None:
                return
            holders, frame = gc.get_referrers(generators[0]), frame.f_back

    def _look(self, drawn: int, caller: FrameType) -> None:
        """At the variables of the loop: does it count, or draw from a generator, that nobody would bring back?"""
        frame: FrameType | None = caller
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        if frame is None or self.pipelined:
            return
        now = self._variables(frame)
        if drawn == 0:
            self._looks.clear()
        self._looks.append(now)
        if len(self._looks) < 2:
            return
        before = self._looks[-2]
        for name, value in now.items():
            if not isinstance(value, int) and name in before and not _same(before[name], value):
                raise RuntimeError(
                    f"the loop draws from `{name}`, a generator of its own, which begins anew after a restart: other"
                    f" numbers than without one. Attach it: `model.attach(..., {name.rpartition('.')[2]}={name})`"
                )
        if len(self._looks) <= LOOKS or self._told or self._counts_now:
            return
        counts = [name for name, value in now.items() if isinstance(value, int) and self._counts_up(name)]
        if counts:
            self._told = True
            log.warning(
                "the loop counts in `%s`, which begins anew after a restart: if it trains by that, not only prints it,"
                " attach what counts, or use `batches.drawn`, `batches.epoch` or `model.steps_done`, which go on",
                "`, `".join(counts),
            )

    def _counts_up(self, name: str) -> bool:
        """By the same number with every batch that was looked at."""
        seen = [value for look in self._looks if isinstance(value := look.get(name), int)]
        if len(seen) < len(self._looks):
            return False
        moves = {later - earlier for earlier, later in itertools.pairwise(seen)}
        return len(moves) == 1 and moves != {0}

    def _variables(self, frame: FrameType) -> dict[str, Any]:
        """Whole numbers, and states of generators, of a frame and of its `self`, but for what is attached."""
        found: dict[str, Any] = {}
        known = {id(thing) for thing in self._attached}

        def look(values: Mapping[str, Any], prefix: str, numbers: bool) -> None:
            for name, value in list(values.items()):
                if numbers and type(value) is int:
                    found[prefix + name] = value
                elif isinstance(value, GENERATORS) and id(value) not in known:
                    if not isinstance(value, random.SystemRandom):
                        found[prefix + name] = state_of(value)

        if frame.f_locals is not frame.f_globals:
            look(frame.f_globals, "", numbers=False)
        look(frame.f_locals, "", numbers=True)
        owner = frame.f_locals.get("self")
        if id(owner) not in known and hasattr(owner, "__dict__"):
            look(vars(owner), "self.", numbers=True)
        return found

    def on_pass_begun(self) -> None:
        """What is attached is as at the begin of a pass."""
        self._counted = self._counters()

    def on_pass_over(self, epoch: int, drawn: int, whole: bool, length: int) -> None:
        """Another pass begins: would the loop begin with the right one, and leave it in time, after a restart?

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
        """A training forward begins.

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
        self._trained = True

    def on_end(self, drawn: int, whole: bool) -> None:
        """Training is over, in a pass of which so many batches were drawn. Warns if that may be too late."""
        if self._restored and not whole and not self._counts_batches and not self._attached:
            log.warning(
                "the last pass was left after %d batches, in a life that did not begin it: a loop that has counted its"
                " batches by itself has trained on more than without the restart (`batches.drawn` counts all)",
                drawn,
            )


def _same(a: Any, b: Any) -> bool:
    """Of two states of one generator."""
    return repr(a) == repr(b) if not hasattr(a, "numel") else bool((a == b).all())


def _is_in_outer_loop(frame: FrameType) -> bool:
    """Whether the `for` that draws is written within another loop of the same function."""
    here = frame.f_lasti
    instructions = list(dis.get_instructions(frame.f_code))
    if not any(one.offset == here and one.opname == "FOR_ITER" for one in instructions):
        return False
    return any("JUMP_BACKWARD" in one.opname and one.argval < here < one.offset for one in instructions)
