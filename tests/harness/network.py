"""A simulated network in one process, on a virtual clock, with a fault at any chosen message.

For the simulated cluster (`simulation.py`): nodes are the real ones, only their `Port` differs. Nothing sleeps,
nothing is concurrent; the order of events follows from the seed. Requests and answers travel unordered, with a random
delay; messages to and from the coordinator travel in order on a `Line` (a TCP connection each), now and then slowly.

What arrives was written as bytes and read again, by the codec of the transports: a message that it refuses is an error.

Every request gets a number, counted from 0 in the order of sending; a `Fault` names one. The kinds:

    crash_sender     its sender dies right after sending it (the message may still arrive)
    crash_receiver   its receiver dies when it arrives, before handling it
    crash_after      its receiver dies right after handling it (what it sent, the answer included, may still arrive)
    crash_coordinator  the coordinator dies as it is sent
    drop             it never arrives; the caller's time limit runs out
    lose_answer      it is handled, but the answer never arrives
    duplicate        it arrives twice, the second time perhaps much later
    late             it arrives much later
    late_answer      its answer arrives much later

With `noise` p, every request suffers drop, lose_answer or duplicate with probability p each, whatever `faults` says.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.messages import OfMember
from torch_ecrec.protocol.wire import A, Answer, Ok, Outcome, Request, Unknown

CRASHES = ("crash_sender", "crash_receiver", "crash_after")
CRASH_COORDINATOR = "crash_coordinator"
NOISES = ("drop", "lose_answer", "duplicate")
LATES = ("late", "late_answer")
LOSSES = NOISES + LATES
FAULTS = CRASHES + LOSSES
DELAY_S = (0.0002, 0.003)
LATE_S = (0.0002, 0.05)  # a request or answer that dawdles, and the second arrival of a duplicate
LATE = 0.03  # how often one dawdles, unless said otherwise
LINE_S = (0.0005, 0.002)  # to and from the coordinator
SLOW_LINE_S = (0.002, 0.03)  # the same when the other side is slow to read
SLOW_LINE = 0.1  # how often it is
EOF_S = 0.002  # after which a peer's death is noticed


@dataclass
class Fault:
    """A fault to be injected at request number `message`.

    Attributes:
        fired: it happened.
        skipped: it did not, as the process that was to die may not: a trainer, one that is dead, or one too many.
    """

    kind: str
    message: int
    fired: bool = False
    skipped: bool = False

    def __post_init__(self) -> None:
        if self.kind not in (*FAULTS, CRASH_COORDINATOR):
            raise ValueError(f"unknown fault {self.kind!r}; expected one of {', '.join(FAULTS)}")


class VirtualClock:
    """Runs events in virtual time, in a fixed order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Events of one time happen in the order in which they were given."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, action))

    def advance(self) -> bool:
        """Runs the next event; returns False if there is none."""
        if not self._events:
            return False
        self.now_s, _, action = heapq.heappop(self._events)
        action()
        return True


class Line:
    """One direction of a connection with the coordinator: delays vary, the order of messages stays."""

    def __init__(self, clock: VirtualClock, seed: str) -> None:
        self._clock, self._random = clock, random.Random(seed)
        self._last_s = 0.0

    def carry(self, action: Callable[[], None]) -> None:
        slow = self._random.random() < SLOW_LINE
        delay_s = self._random.uniform(*(SLOW_LINE_S if slow else LINE_S))
        self._last_s = max(self._last_s, self._clock.now_s + delay_s)
        self._clock.at(self._last_s, action)  # a delay would be rounded, and could let one overtake the one before


@dataclass
class LocalNetwork:
    """Carries requests between nodes registered in `handlers`.

    Attributes:
        handlers: process name -> how it handles a request.
        crash: called with the name of a process that a fault kills.
        crash_coordinator: called when a fault kills the coordinator.
        may_crash: which processes faults may kill; a crash fault on another one does not fire.
        noise: how often a request is dropped, its answer lost, or it arrives twice: a probability for each.
        late: how often a request or an answer takes much longer than others.
        sent: every request so far: (sender, receiver, class).
        passes: whether anything passes from a sender to a receiver now.
        held: gets what was sent and does not pass: sender, receiver, and its arrival. It is lost unless that says more.
        overdue: numbers of the requests whose time limit ran out although neither they nor their answer were lost and
            the receiver lives: it kept them waiting.
    """

    seed: int
    crash: Callable[[str], None] = lambda name: None
    may_crash: Callable[[str], bool] = lambda name: True
    crash_coordinator: Callable[[], None] = lambda: None
    passes: Callable[[str, str], bool] = lambda sender, receiver: True
    held: Callable[[str, str, Callable[[], None]], None] = lambda sender, receiver, arrive: None
    faults: list[Fault] = field(default_factory=list)
    noise: float = 0.0
    late: float = LATE
    clock: VirtualClock = field(default_factory=VirtualClock)
    handlers: dict[str, Callable[[Request[Any], Callable[[Answer], None]], None]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    sent: list[tuple[str, str, str]] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.noise_random = random.Random(f"noise {self.seed}")

    def delay_s(self, late: bool = False) -> float:
        return self.random.uniform(*(LATE_S if late or self.random.random() < self.late else DELAY_S))

    def port(self, name: str, tell: Callable[[OfMember], None]) -> LocalPort:
        return LocalPort(self, name, tell)

    def kill(self, name: str) -> None:
        """Kills a process: it handles and sends nothing more. Messages that it sent may still arrive."""
        if name not in self.dead:
            self.dead.add(name)
            self.crash(name)

    def _fires(self, message: int, kind: str, victim: str | None = None) -> bool:
        for fault in self.faults:
            if fault.message == message and fault.kind == kind and not fault.fired:
                fault.skipped = victim is not None and (victim in self.dead or not self.may_crash(victim))
                fault.fired = not fault.skipped
                return fault.fired
        return kind in NOISES and self.noise > 0 and self.noise_random.random() < self.noise

    def send(
        self, sender: str, receiver: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]
    ) -> None:
        if sender in self.dead:
            return
        written, number = WIRE.encode(request)[0], len(self.sent)
        self.sent.append((sender, receiver, type(request).__name__))
        drop, lose_answer, duplicate, late, late_answer = (self._fires(number, kind) for kind in LOSSES)
        ended = False

        def end(outcome: Outcome[A]) -> None:
            nonlocal ended
            if not ended and sender not in self.dead:
                ended = True
                done(outcome)

        def time_is_up() -> None:
            way = self.passes(sender, receiver) and self.passes(receiver, sender)
            if way and not ended and {sender, receiver}.isdisjoint(self.dead) and not drop and not lose_answer:
                self.overdue.append(number)
            end(Unknown(f"no answer within {timeout_s:g} s"))

        def reply(answer: Any) -> None:
            answer = WIRE.decode_answer(WIRE.encode(answer)[0], type(request))
            if receiver not in self.dead and not lose_answer:
                delay_s = self.delay_s(late_answer)
                if self.passes(receiver, sender):
                    self.clock.later(delay_s, lambda: end(Ok(answer)))
                else:
                    self.held(receiver, sender, lambda: end(Ok(answer)))

        def arrive() -> None:
            if self._fires(number, "crash_receiver", receiver):
                self.kill(receiver)
            if receiver in self.dead or receiver not in self.handlers:
                self.clock.later(EOF_S, lambda: end(Unknown("eof")))
            else:
                self.handlers[receiver](WIRE.decode_request(written), reply)
            if self._fires(number, "crash_after", receiver):
                self.kill(receiver)

        self.clock.later(timeout_s, time_is_up)
        if not drop and not self.passes(sender, receiver):
            self.held(sender, receiver, arrive)
        elif not drop:
            self.clock.later(self.delay_s(late), arrive)
            if duplicate:
                self.clock.later(self.delay_s(late=True), arrive)
        if self._fires(number, "crash_sender", sender):
            self.kill(sender)
        if self._fires(number, CRASH_COORDINATOR):
            self.crash_coordinator()


@dataclass
class LocalPort:
    """The `Port` of one simulated process (see `transport/node.py`)."""

    network: LocalNetwork
    name: str
    to_coordinator: Callable[[OfMember], None]

    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None:
        self.network.send(self.name, peer, request, timeout_s, done)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if self.name not in self.network.dead:
                action()

        self.network.clock.later(delay_s, unless_dead)

    def now_s(self) -> float:
        return self.network.clock.now_s

    def tell(self, word: OfMember) -> None:
        if self.name not in self.network.dead:
            self.to_coordinator(word)
