"""A network in one process on a virtual clock, with a fault at any chosen message.

For the simulated cluster (`torch_ecrec.testing`): nodes are the real ones, only their `Port` differs. Nothing sleeps and
nothing is concurrent; the order of events follows from the seed. Requests and answers travel unordered, with a random
delay; messages to and from the coordinator travel in order (a TCP connection).

Every request gets a number, counted from 0 in the order of sending; a `Fault` names one. The kinds:

    crash_sender     its sender dies right after sending it (the message may still arrive)
    crash_receiver   its receiver dies when it arrives, before handling it
    drop             it never arrives; the caller's time limit runs out
    lose_answer      it is handled, but the answer never arrives
    duplicate        it arrives twice
"""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_ecrec.transport.wire import Answer, Ok, Outcome, Request, Unknown

FAULTS = ("crash_sender", "crash_receiver", "drop", "lose_answer", "duplicate")
DELAY_S = (0.0002, 0.003)
EOF_S = 0.002  # after which a peer's death is noticed


@dataclass
class Fault:
    """What happens to request number `message`. `fired` turns true when it did."""

    kind: str
    message: int
    fired: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"unknown fault {self.kind!r}; expected one of {', '.join(FAULTS)}")


class VirtualClock:
    """Events in virtual time, in a fixed order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, action))

    def advance(self) -> bool:
        """Does the next event; false if there is none."""
        if not self._events:
            return False
        self.now_s, _, action = heapq.heappop(self._events)
        action()
        return True


@dataclass
class LocalNetwork:
    """Carries requests between nodes registered in `handlers`.

    Attributes:
        handlers: process name -> how it handles a request.
        crash: called with the name of a process that a fault kills.
        may_crash: which processes faults may kill; a crash fault on another one does not fire.
    """

    seed: int
    crash: Callable[[str], None] = lambda name: None
    may_crash: Callable[[str], bool] = lambda name: True
    faults: list[Fault] = field(default_factory=list)
    clock: VirtualClock = field(default_factory=VirtualClock)
    handlers: dict[str, Callable[[Request, Callable[[Answer], None]], None]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    sent: list[tuple[str, str, str]] = field(default_factory=list)  # (sender, receiver, request class)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def delay_s(self) -> float:
        return self.random.uniform(*DELAY_S)

    def port(self, name: str, tell: Callable[[dict[str, Any]], None]) -> LocalPort:
        return LocalPort(self, name, tell)

    def kill(self, name: str) -> None:
        """The process is gone: it handles and sends nothing more; what it sent may still arrive."""
        if name not in self.dead:
            self.dead.add(name)
            self.crash(name)

    def _fault_of(self, message: int, kind: str, victim: str | None = None) -> bool:
        for fault in self.faults:
            if fault.message == message and fault.kind == kind and not fault.fired:
                if victim is not None and (victim in self.dead or not self.may_crash(victim)):
                    return False
                fault.fired = True
                return True
        return False

    def send(
        self, sender: str, receiver: str, request: Request, timeout_s: float, done: Callable[[Outcome], None]
    ) -> None:
        if sender in self.dead:
            return
        number = len(self.sent)
        self.sent.append((sender, receiver, type(request).__name__))
        ended = False

        def end(outcome: Outcome) -> None:
            nonlocal ended
            if not ended and sender not in self.dead:
                ended = True
                done(outcome)

        self.clock.later(timeout_s, lambda: end(Unknown(f"no answer within {timeout_s:g} s")))
        lose_answer = self._fault_of(number, "lose_answer")

        def reply(answer: Answer) -> None:
            if receiver not in self.dead and not lose_answer:
                self.clock.later(self.delay_s(), lambda: end(Ok(answer)))

        def arrive() -> None:
            if receiver not in self.dead and self._fault_of(number, "crash_receiver", receiver):
                self.kill(receiver)
            if receiver in self.dead or receiver not in self.handlers:
                self.clock.later(EOF_S, lambda: end(Unknown("eof")))
            else:
                self.handlers[receiver](copy.copy(request), reply)

        if not self._fault_of(number, "drop"):
            self.clock.later(self.delay_s(), arrive)
            if self._fault_of(number, "duplicate"):
                self.clock.later(self.delay_s(), arrive)
        if self._fault_of(number, "crash_sender", sender):
            self.kill(sender)


@dataclass
class LocalPort:
    """One process's `Port` (see `transport/node.py`)."""

    network: LocalNetwork
    name: str
    to_coordinator: Callable[[dict[str, Any]], None]

    def call(self, peer: str, request: Request, timeout_s: float, done: Callable[[Outcome], None]) -> None:
        self.network.send(self.name, peer, request, timeout_s, done)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.name not in self.network.dead:
                action()

        self.network.clock.later(delay_s, unless_dead)

    def tell(self, message: dict[str, Any]) -> None:
        if self.name not in self.network.dead:
            self.to_coordinator(message)
