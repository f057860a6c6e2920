"""Heartbeats of a member, and whether it deserves them: one that hangs falls silent, so that its lease ends.

They have a thread of their own, since what else is done later waits for the node, which may draw first values for a
minute. So their coming says nothing of the node by itself. Before each, a *pulse* that was sent through the timers and
the node must be back; one that is not, while neither of the two computes, says that they hang: a deadlock, or a call
that never returns. After a lease others go on without it. It cannot always hear that, as what the coordinator says
waits for the node, too; so a while later its process ends: somebody starts another, who has the memory. A node that
knows why (`Node.stalled`: its disk does not answer) ends at once.

No thread of Python's runs while a call in C holds the interpreter's lock. Then the coordinator asks, and one answers
that needs no lock (`runtime/unlocked.py`); each turn of the heartbeats tells that one what it needs to know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from torch_ecrec.errors import Fenced
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.status import Report
from torch_ecrec.runtime.cores import Idle, wanted_s
from torch_ecrec.runtime.lifetime import end_with_stacks
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.liveness import SignOfLife
from torch_ecrec.transport.node import Node
from torch_ecrec.transport.timers import Timers

log = logging.getLogger(__name__)

BEAT_MOST_S = 0.25  # between two heartbeats; figures go with one in `heartbeat_s`
HANGS_S = 1.0  # without a pulse, and without computing: a heartbeat less harms nothing, so it need not be certain
ENDS_S = 30.0  # after a lease of hanging
LATE_S = 5.0  # a turn that comes so much later is told to the log
IDLE = 0.05  # of a core: a thread that uses less, and waits for less, does not compute


class Pulse:
    """Whether a node and its timers still move, as the caller looks from time to time.

    Args:
        timers: those of the node.
        node: gives it.
        pause_s: between two looks.
    """

    def __init__(self, timers: Timers, node: Callable[[], Node], pause_s: float) -> None:
        self._timers, self._node = timers, node
        self._back = True
        self._idle = Idle(self._wanted_s, pause_s, IDLE)

    @property
    def hangs_s(self) -> float:
        """For how long they have not moved, nor computed."""
        return self._idle.seconds

    def beats(self) -> bool:
        """Returns whether heartbeats are sent, or were a moment ago."""
        self._idle.look()
        if self._back:
            self._idle.seconds, self._back = 0.0, False
            self._timers.later(0.0, lambda: self._node().run(self._come_back))
        return self.hangs_s < HANGS_S

    def _come_back(self) -> None:
        self._back = True

    def _wanted_s(self) -> float:
        """Returns for how many seconds both threads have wanted a core. While another one has the node, that counts."""
        return sum(map(wanted_s, (self._timers.thread_id, self._node().turn_of)))


class Heartbeats:
    """When they are due: several times a second, so that a silence is noticed; with figures once in `heartbeat_s`."""

    def __init__(
        self, settings: Settings, timers: Timers, node: Callable[[], Node], on_error: Callable[[BaseException], None]
    ) -> None:
        self.timers = Timers(on_error, "heartbeat")
        self.pause_s = min(settings.heartbeat_s, BEAT_MOST_S)
        self._heartbeat_s, self._ends_s = settings.heartbeat_s, settings.lease_s + ENDS_S
        self._due_s, self._next_s = 0.0, math.inf
        self._node, self._pulse, self._silent = node, Pulse(timers, node, self.pause_s), False

    def begin(
        self,
        tell: Callable[[messages.Beat], None],
        unreachable: Callable[[], list[str]],
        figures: Callable[[], Report],
        sign: SignOfLife | None,
    ) -> None:
        """Begins to send heartbeats, until `timers` are closed.

        Args:
            tell: says something to the coordinator.
            unreachable: whom this member cannot reach.
            figures: for `status`.
            sign: answers for this process while no Python runs here; None: nobody does.
        """
        if sign is not None:
            sign.ends(self._ends_s, Fenced.exit_code)

        def beat() -> None:
            silent = self._is_silent()
            if sign is not None:
                sign.turn(not silent)  # first: what follows may take long
            self._note_turn()
            if not silent:
                tell(self._word(unreachable(), figures))
            self._next_s = time.monotonic() + self.pause_s
            self.timers.later(self.pause_s, beat)

        self.timers.later(self.pause_s, beat)

    def _note_turn(self) -> None:
        late_s = time.monotonic() - self._next_s
        if late_s > LATE_S:
            log.warning("nothing ran here for %.1f s: a call held the interpreter's lock, or it was stopped", late_s)

    def _is_silent(self) -> bool:
        if (stalled := self._node().stalled()) is not None:
            end_with_stacks(f"torch-ecrec: {stalled}", stalled.exit_code)
        silent = not self._pulse.beats()
        if silent != self._silent:
            self._silent = silent
            log.warning("this process hangs: it says no more that it lives" if silent else "this process goes on")
        if self._pulse.hangs_s > self._ends_s:
            end_with_stacks(f"torch-ecrec: this process has hung for {self._ends_s:g} s", Fenced.exit_code)
        return silent

    def _word(self, unreachable: list[str], figures: Callable[[], Report]) -> messages.Beat:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return messages.Beat(unreachable=unreachable)
        self._due_s = now_s + self._heartbeat_s
        return messages.Beat(figures(), unreachable)
