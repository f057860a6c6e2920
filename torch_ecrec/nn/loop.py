"""The user's loop over a reader, as far as it can be seen: is it one that goes on exactly after a restart?

After a restart a loop runs again from its top. It goes on where it was if it begins with the right pass, leaves it in
time, and trains by nothing that only its own variables know. What gives such a loop away is looked for where batches
are drawn, and refused by name; a loop's counts, which it may only print, are told once.

    judge.on_draw(...)       before each draw
    judge.on_pass_over(...)  another pass begins
    judge.on_forward(...)    a batch is trained on

Does not know how batches are brought back (`reader.py` does). Sees the frame that draws, and no others: a loop that
keeps its state elsewhere is not seen through. What variables hold `loop_variables.py` looks at.
"""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType, GeneratorType
from typing import Any

from torch_ecrec.nn.loop_variables import Variable, Variables, inside

log = logging.getLogger(__name__)

FRAMES_MOST = 12
LOOKS = 3  # at the variables of a loop, at the begin of each pass; then after twice as many batches each time
PIPELINES = "torchrec.distributed.train_pipeline"  # these draw ahead of what they train on

_COUNT_PASSES = (
    "Write `for epoch in batches.epochs(N): for batch in batches: ...`; or let the loop begin with `batches.epoch`, or"
    " with what follows from `model.steps_done`, or count passes in something attached"
)
_AROUND = {
    enumerate: "`enumerate` counts from 0 again after a restart in the middle of a pass. Write"
    " `for i, batch in batches.enumerate(): ...`, which goes on counting",
    zip: "`zip` begins the others anew after a restart. Attach one reader that gives what belongs together",
    itertools.zip_longest: "`zip_longest` begins the others anew after a restart. Attach one reader that gives what"
    " belongs together",
    itertools.cycle: "`cycle` keeps the batches of the first pass and draws no more, so no step would end, and after a"
    " restart it has others. Write `for epoch in batches.epochs(N): for batch in batches: ...`",
    itertools.islice: "`islice` counts from 0 again after a restart in the middle of a pass. Leave the pass when"
    " `batches.drawn` is what it should be",
}


class Judge:
    """Looks at one loop.

    Args:
        counters: whole numbers of what the user has attached, by name, as they are now.
        attached: what the user has attached.
        known: all that is brought back, or is the reader's; None: what is attached.
    """

    def __init__(
        self,
        counters: Callable[[], Mapping[str, int]] = dict,
        attached: Collection[object] = (),
        known: Collection[object] | None = None,
    ) -> None:
        self._counters, self._attached = counters, attached
        self._thread = threading.get_ident()
        self.pipelined = False
        self._counts_passes = False  # the loop is known to begin with the pass that training goes on in
        self._counts_batches = False  # and to count the batches of a pass from where training goes on
        self._counted: Mapping[str, int] = {}  # when the present pass began
        self._asked = False  # for a batch, in this life
        self._drawn_before_forward = 0
        self._trained = self._restored = False
        self._variables = Variables(inside(attached) if known is None else known)
        self._looks: list[dict[str, Variable]] = []  # at the variables of the loop, in the present pass
        self._bound: set[str] | None = None  # those that it had before its first batch
        self._generators: dict[str, tuple[Any, Any]] = {}  # and their random states, when they were looked at last
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
        if drawn <= LOOKS or drawn & (drawn - 1) == 0:
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
        """At the variables of the loop: does it train by something that nobody would bring back?

        Raises:
            RuntimeError: it draws from a generator, or moves something with a state, that was not attached.
        """
        frame: FrameType | None = caller
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        if frame is None or self.pipelined:
            return
        now = self._variables.of(frame)
        if self._bound is None:
            self._bound = set(now)
        self._check_generators(now)
        if drawn == 0:
            self._looks.clear()
        self._looks.append(now)
        moved = [name for name in now if name in self._bound and self._has_moved(name)]
        for name in moved:
            if now[name].attachable:
                short = name.rpartition(".")[2]
                raise RuntimeError(
                    f"`{name}` changes with the batches, and begins anew after a restart. Attach it:"
                    f" `model.attach(..., {short}={name})`"
                )
        if drawn == LOOKS and not self._told:
            self._tell([name for name in now if self._is_kept(name, now[name], name in moved)])

    def _check_generators(self, now: Mapping[str, Variable]) -> None:
        """Between any two looks, of different passes too."""
        for variable in now.values():
            for path, (generator, state) in variable.generators.items():
                last, self._generators[path] = self._generators.get(path), (generator, state)
                if last is not None and last[0] is generator and not _same(last[1], state):
                    short = re.sub(r"\W+", "_", path.rpartition(".")[2]).strip("_")
                    raise RuntimeError(
                        f"the loop draws from `{path}`, a generator of its own, which begins anew after a restart:"
                        f" other numbers than without one. Attach it: `model.attach(..., {short}={path})`"
                    )

    def _has_moved(self, name: str) -> bool:
        """In this pass."""
        seen = [look[name].sum for look in self._looks if name in look]
        return len(set(seen)) > 1

    def _is_kept(self, name: str, variable: Variable, moved: bool) -> bool:
        """Whether the loop keeps something in a variable from batch to batch."""
        if all(name in look and look[name].number is not None for look in self._looks):
            return not self._counts_now and self._counts_up(name)
        return variable.hidden or moved

    def _tell(self, names: Sequence[str]) -> None:
        if names:
            self._told = True
            log.warning(
                "the loop keeps `%s` in variables of its own, which begin anew after a restart: if it trains by them,"
                " not only prints them, attach what keeps them, or use `batches.drawn`, `batches.epoch` or"
                " `model.steps_done`, which go on",
                "`, `".join(names),
            )

    def _counts_up(self, name: str) -> bool:
        """By the same number with every batch that was looked at."""
        seen = [number for look in self._looks if (number := look[name].number) is not None]
        moves = {later - earlier for earlier, later in itertools.pairwise(seen)}
        return len(moves) == 1 and moves != {0}

    def sums(self, caller: FrameType) -> dict[str, int]:
        """What the loop keeps in its variables, to be compared after a restart (`check_variables`)."""
        return self._variables.sums(caller)

    def check_variables(self, caller: FrameType, then: Mapping[str, int]) -> None:
        """The first draw after a restart: tells of variables that are other than they were at this draw."""
        now = self._variables.sums(caller)
        names = [name for name, value in then.items() if name in now and now[name] != value]
        if names:
            log.warning(
                "after the restart variables of the loop are other than before: %s. If the loop trains by them, not"
                " only prints them, it trains otherwise from here on: attach what keeps them",
                ", ".join(names),
            )

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
    here = begin = frame.f_lasti
    instructions = list(dis.get_instructions(frame.f_code))
    if not any(one.offset == here and one.opname == "FOR_ITER" for one in instructions):
        return False
    for one in reversed(instructions):  # a long loop's has prefixes, and is jumped to before them
        if one.offset == begin - 2 and one.opname == "EXTENDED_ARG":
            begin = one.offset
    return any("JUMP_BACKWARD" in one.opname and one.argval < begin < one.offset for one in instructions)
