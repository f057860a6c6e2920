"""A process on the data plane: one lock, an outbox, and calls to slots that are repeated until they are answered.

Everything that a node does happens inside `run`: a message that arrives, an answer, a timer, a call from the user's
thread. State needs no other lock. What a node wants done outside (calls, answers, timers) goes into the outbox and is
done after the lock is released, so no lock is ever held across a call and two nodes in one process cannot deadlock.

The same code runs over RPC (threads, real time) and in the simulated cluster (one thread, virtual time): both are
a `Port`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

from torch_ecrec.errors import ClusterError
from torch_ecrec.protocol.messages import OfMember, Placement
from torch_ecrec.protocol.wire import A, Answer, Malformed, Ok, Outcome, Refused, Request, Unknown
from torch_ecrec.transport.complaints import Complaints

log = logging.getLogger(__name__)
COMPLAINTS = Complaints(log, "messages")  # of this process: no node's state

RETRY_S = 0.02  # pause before a call that failed is made again
RETRY_MOST_S = 0.5


class Port(Protocol):
    """A node's access to network, clock and coordinator.

    `processes/member.py:Member` is the real one, `local.py:LocalPort` that of the simulation.
    None of the methods blocks or raises for network conditions.
    """

    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None: ...

    def later(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def now_s(self) -> float:
        """Returns the time in seconds, of a monotonic clock."""

    def tell(self, word: OfMember) -> None:
        """Sends a message to the coordinator."""


class RetryingCall(Generic[A]):
    """One request to a slot, wherever it lives, repeated until it is answered or cancelled.

    If it was made for one incarnation, it is not repeated to a later one: `lost` is called instead.
    """

    def __init__(
        self,
        node: Node,
        slot: int,
        make: Callable[[int], Request[A]],
        done: Callable[[A], None],
        bound_to: int | None,
        lost: Callable[[], None] | None,
    ) -> None:
        self.node, self.slot, self.make, self.done, self.bound_to, self.lost = node, slot, make, done, bound_to, lost
        self.attempt = 0  # only the newest attempt may ask for another
        self.failures = 0
        self.incarnation = -1

    def send(self) -> None:
        placement = self.node.placement
        place = placement.slots[self.slot] if placement is not None else None
        if place is None or (self.bound_to is not None and place.incarnation < self.bound_to):
            self.node.later(RETRY_S, self._retry_of(self.attempt))  # the placement that names it is on its way
            return
        if self.bound_to is not None and place.incarnation > self.bound_to:
            self._end()
            if self.lost is not None:
                self.lost()
            return
        self.attempt += 1
        self.incarnation = place.incarnation
        attempt, incarnation = self.attempt, place.incarnation
        request = self.make(incarnation)
        request.era = self.node.era
        self.node.call(place.server, request, lambda outcome: self._on_outcome(attempt, incarnation, request, outcome))

    def cancel(self) -> None:
        self._end()

    def _end(self) -> None:
        self.node.calls.pop(self, None)

    def _on_outcome(self, attempt: int, incarnation: int, request: Request[A], outcome: Outcome[A]) -> None:
        if self not in self.node.calls or incarnation != self.incarnation:
            return  # an incarnation that has been replaced cannot speak for the present one (rule 2)
        answer = outcome.answer if isinstance(outcome, Ok) else None
        if answer is not None and not isinstance(answer, Refused):
            self._end()
            self.done(answer)
        elif isinstance(answer, Malformed) and self.node.gives_up(request, answer):
            self._end()
        elif attempt == self.attempt:
            self.failures += 1
            delay_s = min(RETRY_S * 2 ** min(self.failures - 1, 6), RETRY_MOST_S)
            self.node.later(delay_s, self._retry_of(attempt))

    def _retry_of(self, attempt: int) -> Callable[[], None]:
        def retry() -> None:
            if self in self.node.calls and attempt == self.attempt:
                self.send()

        return retry


class Node:
    """The base of server and client processes on the data plane.

    Args:
        name: the process's name in the placement and on the network.
        port: the way out.
        call_timeout_s: a call not answered by then counts as unknown.
    """

    def __init__(self, name: str, port: Port, call_timeout_s: float) -> None:
        self.name = name
        self.port = port
        self.call_timeout_s = call_timeout_s
        self.era = 0  # which life of the trainers this node takes part in
        self.placement: Placement | None = None
        self.calls: dict[RetryingCall[Any], None] = {}  # in order of creation
        self.turn_of = 0  # the thread that is inside `run`, or was last, as the system numbers it
        self._lock = threading.Lock()
        self._answers: list[Callable[[], None]] = []
        self._outbox: list[Callable[[], None]] = []

    def run(self, action: Callable[..., object], *args: Any) -> None:
        """Runs `action` under the node's lock; then, outside of it, all that `action` emitted. Not reentrant."""
        with self._lock:  # a signal that came after `acquire` and before the turn would leave it taken
            effects = self._turn(action, args)
        for effect in effects:
            effect()

    def run_if_idle(self, action: Callable[..., object], *args: Any) -> bool:
        """Like `run`, but does nothing and returns False while the node is busy."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            effects = self._turn(action, args)
        finally:
            self._lock.release()
        for effect in effects:
            effect()
        return True

    def _turn(self, action: Callable[..., object], args: Sequence[Any]) -> list[Callable[[], None]]:
        """Runs `action` under the lock, which is held. Returns the effects to run once it is released."""
        self.turn_of = threading.get_native_id()
        try:
            action(*args)
        finally:
            effects = self._answers + self._outbox
            self._answers, self._outbox = [], []
        return effects

    # inside run ---------------------------------------------------------------------------------

    def emit(self, effect: Callable[[], None]) -> None:
        self._outbox.append(effect)

    def emit_answer(self, effect: Callable[[], None]) -> None:
        """Emits an effect that runs before those of `emit`: trainers wait for rows, and nobody for folds."""
        self._answers.append(effect)

    def call(self, peer: str, request: Request[A], done: Callable[[Outcome[A]], None]) -> None:
        if peer == self.name:
            self.emit(lambda: self.handle(request, lambda answer: self.run(done, Ok(answer))))
        else:

            def judged(outcome: Outcome[A]) -> None:
                self.run(lambda: done(self._believed(peer, request, outcome)))

            self.emit(lambda: self.port.call(peer, request, self.call_timeout_s, judged))

    def _believed(self, peer: str, request: Request[A], outcome: Outcome[A]) -> Outcome[A]:
        fault = self.fault_of_answer(request, outcome.answer) if isinstance(outcome, Ok) else None
        if fault is None:
            return outcome
        if request.era == self.era:  # else it may be an honest one that came late: this node has gone back since
            COMPLAINTS.add(f"an answer of {peer} is not believed", fault)
        return Unknown(f"{peer} answered what is no answer: {fault}")

    def fault_of_answer(self, request: Request[Any], answer: Answer) -> str | None:
        """Returns why an answer cannot be one to this request; None if it can."""
        return None

    def gives_up(self, request: Request[Any], refusal: Malformed) -> bool:
        """Returns whether a request that was refused as malformed is given up, and not repeated."""
        return False

    def now_s(self) -> float:
        return self.port.now_s()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.emit(lambda: self.port.later(delay_s, lambda: self.run(action)))

    def tell(self, word: OfMember) -> None:
        self.emit(lambda: self.port.tell(word))

    def ask(
        self,
        slot: int,
        make: Callable[[int], Request[A]],
        done: Callable[[A], None],
        *,
        bound_to: int | None = None,
        lost: Callable[[], None] | None = None,
    ) -> RetryingCall[A]:
        """Asks a slot until it answers.

        Args:
            slot: the slot to ask.
            make: builds the request for a given incarnation of the slot.
            done: called once, inside `run`, with an answer that is not `Refused`.
            bound_to: only this incarnation is meant; when it has been replaced, `lost` is called and nothing is sent.
        """
        call = RetryingCall(self, slot, make, done, bound_to, lost)
        self.calls[call] = None
        call.send()
        return call

    def ask_once(self, slot: int, make: Callable[[int], Request[A]], done: Callable[[A | None], None]) -> None:
        """Asks a slot once; `done` gets its answer, or None if it refused or could not be reached."""
        assert self.placement is not None
        place = self.placement.slots[slot]

        def on_outcome(outcome: Outcome[A]) -> None:
            answer = outcome.answer if isinstance(outcome, Ok) else None
            done(None if isinstance(answer, Refused) else answer)

        request = make(place.incarnation)
        request.era = self.era
        self.call(place.server, request, on_outcome)

    def host_of(self, slot: int) -> str | None:
        """Returns the server that has a slot; None if that is not known yet."""
        return None if self.placement is None else self.placement.slots[slot].server

    def place(self, placement: Placement) -> bool:
        """Takes over a newer placement, and repeats calls to slots that moved. Returns whether it was newer."""
        old = self.placement
        if old is not None and placement.epoch <= old.epoch:
            return False
        self.placement = placement
        for call in list(self.calls):
            if call in self.calls and call.incarnation != placement.slots[call.slot].incarnation:
                call.failures = 0
                call.send()
        return True

    # outside run --------------------------------------------------------------------------------

    def stalled(self) -> ClusterError | None:
        """Returns with what this process must end, since what it waits for hangs; None: it may go on. On any thread."""
        return None

    def handle(self, request: Request[Any], reply: Callable[[Answer], None]) -> None:
        """Handles a request of another process. Calls `reply` once, at once or later."""
        COMPLAINTS.add("a request to who serves none", type(request).__name__)
        reply(Refused(f"{self.name} serves no requests"))
