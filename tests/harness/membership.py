"""The control channel of the simulated cluster: the real `Router` and `Coordinator`, virtual connections and processes.

    plane = ControlPlane(settings, seed, clock, handlers, announce)
    process = plane.start("server")         # connects, joins; `handlers.on_welcome` follows
    plane.reset([process.connection])       # both sides notice, a moment later, each in its own time

A `VirtualProcess` has the real rules of a member (`protocol/membership.py:Membership`), which the plane drives as
`processes/member.py:Member` does in a real process; only the pauses between two attempts are shorter, as a step takes
milliseconds here.
A connection is a `Line` each way: in order, now and then slow. What is under way when it is reset never arrives; what a
process said before it died may. A probe's answer says whether the process was alive when the probe arrived.

Every message that is sent is counted, from 0; `Handlers.on_sent` is called after each, and may let things happen.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from harness.network import EOF_S, Line, VirtualClock
from torch_ecrec.coordinator.checkpointing import Manifests
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.protocol import membership, messages
from torch_ecrec.protocol.bounds import Address, Role
from torch_ecrec.protocol.membership import Connect, Membership, Pace, join_of
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.transport.control import Lines, encode_line
from torch_ecrec.transport.liveness import ALIVE, GONE, UNREACHABLE
from torch_ecrec.transport.liveness import PROBE_S as PROBED_S

Message = dict[str, Any]
RESTART_S = 0.1  # from the end of a coordinator to the start of the next
REJOIN_S = 0.2  # from the start of a coordinator to the last member that finds it, at most
HELD_S = 0.3  # from the start of a coordinator to the first join that counts
BACK_S = (0.001, 0.05)  # from the end of a connection to the next one, where the coordinator lives
NOTICED_S = (0.0005, 0.03)  # until a side notices that its connection was reset
PROBE_S = (0.0002, 0.004)  # until a probe arrives, and until its answer does
LATE_PROBE_S = (0.05, 0.9)
TRY_AGAIN_S = 0.02
PACE = Pace(give_up_s=120.0, stands_s=3600.0, least_s=0.0, most_s=0.1)  # pauses of `BACK_S` come before
TICK_S = 0.5


class VirtualProcess:
    """A server or trainer process, as far as its membership goes.

    Args:
        join: what it says to join.
        number: which process of the simulation it is.
        now_s: when it starts.
        predecessor: one on whose host it runs; None: it has one of its own.

    Attributes:
        rules: the real ones of a member.
        connection: the one it has; None: none.
        dead: it has ended.
        strangers: so often did it find a coordinator of another cluster.
        waits: why it is not let in yet, as it was told.
    """

    def __init__(
        self, join: messages.Join, number: int, now_s: float, predecessor: VirtualProcess | None = None
    ) -> None:
        self.number, self.predecessor = number, predecessor
        address = f"10.0.{self.machine >> 8}.{self.machine & 255}", 1 + number
        self.rules = Membership(msgspec.structs.replace(join, address=address), "the address", PACE, now_s)
        self.connection: VirtualConnection | None = None
        self.dead = False
        self.strangers = 0
        self.waits: list[str] = []

    @property
    def role(self) -> str:
        return self.rules.join.role

    @property
    def rank(self) -> int:
        return self.rules.join.rank

    @property
    def job(self) -> JobSpec | None:
        return self.rules.join.job

    @property
    def domain(self) -> str:
        return self.rules.join.domain

    @property
    def name(self) -> str:
        """ "" until it was welcomed."""
        return self.rules.name

    @property
    def restarted(self) -> bool:
        return self.rules.restarted

    @property
    def restored(self) -> messages.Restored | None:
        return self.rules.restored

    @property
    def host(self) -> str:
        """Where it runs: it has the name of the first process there."""
        return self.name if self.predecessor is None else self.predecessor.host

    @property
    def machine(self) -> int:
        """The same as a number."""
        return self.number if self.predecessor is None else self.predecessor.machine


class Handlers(Protocol):
    """What the cluster does with what a process is told, and what it knows of one."""

    def on_welcome(self, process: VirtualProcess) -> None:
        """It has a name: its node can be built."""

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        """For its node."""

    def on_over(self, process: VirtualProcess, error: BaseException) -> None:
        """Its membership has ended, or it could not join; or the coordinator refused a message of its."""

    def known(self, process: VirtualProcess) -> messages.Known:
        """What its node tells a coordinator that it rejoins."""

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        """Message `number` of the control channel is on its way."""


class Center:
    """A coordinator's process, as connections see it: what arrives it does at once, until another is in its place.

    Attributes:
        router: the real one.
    """

    router: Router

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def do(self, action: Callable[[], None]) -> None:
        """Something has arrived."""
        if self._plane.center is self and self._plane.lives:
            action()


def _carried(message: Message) -> Message:
    """Returns a message as it is read from a line."""
    (read,) = Lines().feed(encode_line(message))
    return read


class VirtualConnection:
    """A connection of a process with one coordinator. To the router, it is a `Peer`.

    Attributes:
        stalled: what the coordinator sends from now on never arrives; what the process says does.
    """

    def __init__(self, plane: ControlPlane, process: VirtualProcess, number: int, center: Center) -> None:
        self.plane, self.process, self.center = plane, process, center
        self.open, self.stalled = True, False
        seed = f"{process.number} {number} {plane.seed}"
        self._to, self._from = Line(plane.clock, f"to {seed}"), Line(plane.clock, f"from {seed}")

    @property
    def peer(self) -> str:
        return f"process {self.process.number}"

    def send(self, message: Message) -> None:
        """To the process."""
        message = _carried(message)
        if self.open:
            if not self.stalled:
                self._carry(False, lambda: self.plane.deliver(self, message))
            self.plane.count(self)

    def say(self, message: Message) -> None:
        """To the coordinator."""
        message = _carried(message)
        if self.open:
            self._carry(True, lambda: self._heard(message))
            self.plane.count(self)

    def _carry(self, to_coordinator: bool, action: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.plane.passes(self.process, to_coordinator):
                action()
            else:
                self.plane.held(self.process, to_coordinator, arrive)

        (self._from if to_coordinator else self._to).carry(arrive)

    def _heard(self, message: Message) -> None:
        if self.open:
            self.center.do(lambda: self.center.router.on_message(self, message, self.plane.clock.now_s))

    def admit(self) -> None:
        pass

    def close(self) -> None:
        """By the coordinator: the process reads what was sent, then the end."""
        self._carry(False, self.noticed_by_process)
        self.plane.clock.later(0.0, self.noticed_by_coordinator)

    def end_of_process(self) -> None:
        """What it said before may arrive, and then its end."""
        self.plane.clock.later(EOF_S, self.left)

    def left(self) -> None:
        """By the process: what it said before arrives, and then the end."""
        if self.process.connection is self:
            self.process.connection = None
        self._carry(True, self.noticed_by_coordinator)

    def noticed_by_coordinator(self) -> None:
        self.center.do(lambda: self.center.router.on_closed(self, self.plane.clock.now_s))

    def noticed_by_process(self) -> None:
        if self.process.connection is self and not self.process.dead:
            self.process.connection = None
            self.plane.clock.later(self.plane.random.uniform(*BACK_S), lambda: self.plane.lose(self.process))
        self.open = False


class ControlPlane:
    """All processes' control connections, and the coordinator they lead to.

    Args:
        settings: of the cluster.
        seed: of the delays.
        clock: the cluster's.
        handlers: the cluster.
        announce: gets every event of the coordinator.
        manifests: of the coordinators; None: there are no checkpoints.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        seed: int,
        clock: VirtualClock,
        handlers: Handlers,
        announce: Callable[[Message], None],
        manifests: Manifests | None = None,
    ) -> None:
        self.settings, self.seed, self._manifests = settings, seed, manifests
        self.clock, self.handlers, self._announce = clock, handlers, announce
        self.random = random.Random(f"control {seed}")
        self.processes: list[VirtualProcess] = []
        self.late_probes = False
        self.passes: Callable[[VirtualProcess, bool], bool] = lambda process, to_coordinator: True
        self.held: Callable[[VirtualProcess, bool, Callable[[], None]], None] = lambda *_: None
        self.answers: Callable[[VirtualProcess], bool] = lambda process: True  # its kernel, to a probe
        self.is_stopped: Callable[[], bool] = lambda: False  # the coordinator
        self.sent = 0
        self.connections = 0  # so far
        self.term = 0  # which coordinator it is
        self._down = False  # nobody is in the place of the last one yet
        self.center: Center  # the one, or the last one
        self.begin()
        clock.later(1.0, self._tick)

    def begin(self) -> None:
        """The first coordinator is there."""
        center = Center(self)
        center.router = self.new_router(center, f"{self.term}", again=self.term > 0)
        self.center = center

    @property
    def lives(self) -> bool:
        """A coordinator is there that acts."""
        return not self._down

    @property
    def router(self) -> Router:
        return self.center.router

    @property
    def core(self) -> Coordinator:
        return self.router.core

    def new_router(self, center: Center, run: str, again: bool, led: int = 0) -> Router:
        """What a coordinator begins with. `again`: it comes after another. `led`: see `Router`."""

        def probe(name: str, number: int, address: Address) -> None:
            process = self.processes[address[1] - 1]
            delays_s = [self.random.uniform(*(LATE_PROBE_S if self.late_probes else PROBE_S)) for _ in range(2)]

            def answer(found: str) -> None:
                center.do(lambda: center.router.on_probed(name, number, found, self.clock.now_s))

            def arrive() -> None:
                if not self.answers(process):
                    self.clock.later(PROBED_S, lambda: answer(UNREACHABLE))
                    return
                found = GONE if process.dead else ALIVE
                self.clock.later(delays_s[1], lambda: answer(found))

            self.clock.later(delays_s[0], arrive)

        return Router(
            dataclasses.replace(self.settings, checkpoint=dataclasses.replace(self.settings.checkpoint, run=run)),
            manifests=self._manifests,
            probe=probe,
            announce=self._announce,
            joins_from_s=self.clock.now_s + (HELD_S if again else 0.0),
            led=led,
        )

    def _tick(self) -> None:
        if self.lives and not self.is_stopped():
            self.router.on_tick(self.clock.now_s)
        self.clock.later(TICK_S, self._tick)

    def _let_in(self) -> None:
        if self.lives:
            self.router.on_tick(self.clock.now_s)

    def count(self, connection: VirtualConnection) -> None:
        self.sent += 1
        self.handlers.on_sent(self.sent - 1, connection)

    # processes ----------------------------------------------------------------------------------

    def start(
        self,
        role: Role,
        rank: int = -1,
        job: JobSpec | None = None,
        predecessor: VirtualProcess | None = None,
        domain: str = "",
        launch: str = "",
        relaunched: bool = False,
        again: bool = False,
    ) -> VirtualProcess:
        """A process starts, and joins.

        Args:
            predecessor: one on whose host it runs; else it has one of its own.
            domain: of a server, what it says of that.
            launch, relaunched, again: of a trainer, what it says of its start.
        """
        number = len(self.processes)
        join = join_of(
            role,
            f"process {number}",
            number,
            rank=rank,
            job=job,
            domain=domain,
            launch=launch,
            relaunched=relaunched,
            again=again,
            experiment=self.settings.experiment,
        )
        return self.add(VirtualProcess(join, number, self.clock.now_s, predecessor))

    def add(self, process: VirtualProcess) -> VirtualProcess:
        """It is there, and looks for a coordinator."""
        self.processes.append(process)
        self._go_on(process)
        return process

    def _go_on(self, process: VirtualProcess) -> None:
        """Does what its rules say is to be done, and is next."""
        if process.dead:
            return
        step, now_s = process.rules.step(self.clock.now_s), self.clock.now_s
        self._do(process)
        if isinstance(step, Connect):
            self._try(process, now_s + step.limit_s)
        elif step.until_s < math.inf and not process.dead:
            self.clock.at(step.until_s, lambda: self._go_on(process))

    def _try(self, process: VirtualProcess, until_s: float) -> None:
        """It tries to connect, again and again."""
        if process.dead:
            return
        center = self.find(process) if self._is_open(process) else None
        if center is not None:
            process.connection = self.connection_with(center, process)
            known = self.handlers.known(process) if process.rules.is_joined else None
            process.rules.connected(self.clock.now_s, self.led(process), known)
        elif self.clock.now_s < until_s:
            self.clock.later(TRY_AGAIN_S, lambda: self._try(process, until_s))
            return
        else:
            error = ClusterUnavailable("nobody is there")
            process.rules.missed(self.clock.now_s, error, silent=not self._is_open(process))
        self._go_on(process)

    def lose(self, process: VirtualProcess, why: str = "eof") -> None:
        """It sees that its connection has ended, if it has no other by now."""
        if process.connection is None and process.rules.is_connected:
            process.rules.closed(why)
            self._go_on(process)

    def _do(self, process: VirtualProcess) -> None:
        for effect in process.rules.take():
            if isinstance(effect, membership.Say):
                self._say(process, effect.word)
            elif isinstance(effect, membership.SayLeave):
                self._say(process, messages.Leave())
            elif isinstance(effect, membership.Build):
                self.handlers.on_welcome(process)
                process.rules.built(process.name)
                self._do(process)
            elif isinstance(effect, membership.Tell):
                self.handlers.on_control(process, effect.word)
            elif isinstance(effect, membership.Close):
                process.connection = None
            elif isinstance(effect, membership.End):
                self.handlers.on_over(process, effect.error)
            elif isinstance(effect, membership.Note) and effect.refused:
                self.handlers.on_over(process, ClusterError(effect.text))

    def find(self, process: VirtualProcess) -> Center | None:
        """Where a process finds a coordinator that it can connect with."""
        return self.center if self.lives else None

    def connection_with(self, center: Center, process: VirtualProcess) -> VirtualConnection:
        """Another one. The process need not be a member."""
        self.connections += 1
        return VirtualConnection(self, process, self.connections, center)

    def _is_open(self, process: VirtualProcess) -> bool:
        """Both ways: what a connection needs to begin."""
        return self.passes(process, True) and self.passes(process, False)

    def led(self, process: VirtualProcess) -> int:
        """Since when the coordinator leads that it has found; 0: there is one alone."""
        return 0

    def tell(self, process: VirtualProcess, word: messages.OfMember) -> None:
        """What a process wants to say is lost while it has no connection."""
        self._say(process, word)

    def _say(self, process: VirtualProcess, word: messages.OfMember | messages.Join | messages.Rejoin) -> None:
        if process.connection is not None and not process.dead:
            process.connection.say(messages.json_of(word))

    def end(self, process: VirtualProcess) -> None:
        """It is gone, however that came."""
        if not process.dead:
            process.dead = True
            if process.connection is not None:
                process.connection.end_of_process()

    def leave(self, process: VirtualProcess) -> None:
        """It is told to end, says so, and ends."""
        process.rules.leave()
        self._do(process)
        self.end(process)

    def deliver(self, connection: VirtualConnection, message: Message) -> None:
        """A message of the coordinator has arrived at its process."""
        process = connection.process
        if not connection.open or process.dead or process.connection is not connection:
            return
        process.strangers += message["type"] == "other_cluster"
        if message["type"] == "waits":
            process.waits.append(message["reason"])
        process.rules.heard(message)
        self._do(process)
        self._go_on(process)

    # faults -------------------------------------------------------------------------------------

    def reset(self, connections: Sequence[VirtualConnection | None]) -> None:
        """Connections end at once; both sides notice, each in its own time. What was under way is lost."""
        for connection in connections:
            if connection is not None and connection.open:
                connection.open = False
                self.clock.later(self.random.uniform(*NOTICED_S), connection.noticed_by_coordinator)
                self.clock.later(self.random.uniform(*NOTICED_S), connection.noticed_by_process)

    def kill_coordinator(self) -> None:
        """It is gone, and another one comes soon, which knows nothing."""
        if not self.lives:
            return
        self._down = True
        self.term += 1
        for process in self.processes:
            if process.connection is not None and not process.dead:
                process.connection.open, process.connection = False, None

        def start() -> None:
            self._down = False
            self.begin()
            self.clock.later(HELD_S, self._let_in)
            for process in self.processes:
                if not process.dead:
                    self.clock.later(self.random.uniform(0.0, REJOIN_S), lambda p=process: self.lose(p))  # type: ignore[misc]

        self.clock.later(RESTART_S, start)
