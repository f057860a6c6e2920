"""The control channel of the simulated cluster: the real `Router` and `Coordinator`, virtual connections and processes.

    plane = ControlPlane(settings, seed, clock, handlers, announce)
    process = plane.start("server")         # connects, joins; `handlers.on_welcome` follows
    plane.reset([process.connection])       # both sides notice, a moment later, each in its own time

A `VirtualProcess` does on its side what `member.Member` does in a real one: it joins, or joins again if it had not read
its name when the connection ended; it rejoins, skips rosters that are older than its own, and ends when told to.
A connection is a `Line` each way: in order, now and then slow. What is under way when it is reset never arrives; what a
process said before it died may. A probe's answer says whether the process was alive when the probe arrived.

Every message that is sent is counted, from 0; `Handlers.on_sent` is called after each, and may let things happen.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.network import EOF_S, Line, VirtualClock
from torch_ecrec.coordinator.checkpointing import Ledger
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.processes.member import join_message, rejoin_message
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import Address
from torch_ecrec.spec.job import JobSpec
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
STRANGER_S = 0.1  # after it has found a coordinator of another cluster
TICK_S = 0.5


@dataclass(eq=False)
class VirtualProcess:
    """A server or trainer process, as far as its membership goes.

    Attributes:
        number: which process of the simulation it is.
        name: "" until it was welcomed.
        life: of the coordinator, as it said.
        roster: the newest that it was told.
        restored: the checkpoint that the cluster began with.
        run, inexact: as it was told.
        restarted: a trainer: the cluster has trained before, as the coordinator said.
        dead: it has ended.
        led: since when the coordinator leads that it has looked for last; 0: there is one alone.
        domain: of a server; see `coordinator/domains.py`.
        launch, relaunched, again: of a trainer; see `messages.Entering`.
        strangers: so often did it find a coordinator of another cluster.
        waits: why it is not let in yet, as it was told.
    """

    role: str
    rank: int
    number: int
    job: JobSpec | None
    name: str = ""
    life: int = 0
    code: Message = field(default_factory=dict)
    roster: messages.Roster | None = None
    restarted: bool = False
    restored: messages.Restored | None = None
    run: str = ""
    inexact: list[tuple[int, str]] = field(default_factory=list)
    dead: bool = False
    led: int = 0
    connection: VirtualConnection | None = None
    predecessor: VirtualProcess | None = None
    domain: str = ""
    launch: str = ""
    relaunched: bool = False
    again: bool = False
    strangers: int = 0
    waits: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Where it runs: it has the name of the first process there."""
        return self.name if self.predecessor is None else self.predecessor.host

    @property
    def machine(self) -> int:
        """The same as a number."""
        return self.number if self.predecessor is None else self.predecessor.machine

    @property
    def hello(self) -> Message:
        hello: Message = {
            "role": self.role,
            "birth": f"process {self.number}",
            "address": [f"10.0.{self.machine >> 8}.{self.machine & 255}", 1 + self.number],
            "domain": self.domain,
            "led": self.led,
        }
        if self.job is None:
            return hello
        start = {"launch": self.launch, "relaunched": self.relaunched, "again": self.again}
        return {**hello, **start, "rank": self.rank, "job": self.job.to_json()}


class Handlers(Protocol):
    """What the cluster does with what a process is told, and what it knows of one."""

    def on_welcome(self, process: VirtualProcess) -> None:
        """It has a name: its node can be built."""

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        """For its node."""

    def on_fatal(self, process: VirtualProcess, word: messages.Fatal | messages.Refused) -> None:
        """It is told to end, and why."""

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
        if self.open:
            if not self.stalled:
                self._carry(False, lambda: self.plane.deliver(self, message))
            self.plane.count(self)

    def say(self, message: Message) -> None:
        """To the coordinator."""
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
            self.plane.clock.later(self.plane.random.uniform(*BACK_S), lambda: self.plane.connect(self.process))
        self.open = False


class ControlPlane:
    """All processes' control connections, and the coordinator they lead to.

    Args:
        settings: of the cluster.
        seed: of the delays.
        clock: the cluster's.
        handlers: the cluster.
        announce: gets every event of the coordinator.
        ledger: of the coordinators; None: there are no checkpoints.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        seed: int,
        clock: VirtualClock,
        handlers: Handlers,
        announce: Callable[[Message], None],
        ledger: Ledger | None = None,
    ) -> None:
        self.settings, self.seed, self._ledger = settings, seed, ledger
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
        self.life = 0  # which coordinator it is
        self._down = False  # nobody is in the place of the last one yet
        self.center: Center  # the one, or the last one
        self.begin()
        clock.later(1.0, self._tick)

    def begin(self) -> None:
        """The first coordinator is there."""
        center = Center(self)
        center.router = self.new_router(center, f"{self.life}", again=self.life > 0)
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
            ledger=self._ledger,
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
        role: str,
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
        process = VirtualProcess(role, rank, len(self.processes), job, predecessor=predecessor, domain=domain)
        process.launch, process.relaunched, process.again = launch, relaunched, again
        self.processes.append(process)
        self.connect(process)
        return process

    def connect(self, process: VirtualProcess) -> None:
        """It has no connection: it tries until there is a coordinator, and says who it is."""
        if process.dead or process.connection is not None:
            return
        center = self.find(process) if self._is_open(process) else None
        if center is None:
            self.clock.later(TRY_AGAIN_S, lambda: self.connect(process))
            return
        process.connection = self.connection_with(center, process)
        if not process.name:
            process.connection.say(join_message(**process.hello))
            return
        rejoin = rejoin_message(
            self.handlers.known(process),
            hello=process.hello,
            name=process.name,
            code=process.code,
            life=process.life,
            endpoint=process.name,
            roster=process.roster,
            restored=process.restored,
            run=process.run,
            inexact=process.inexact,
        )
        process.connection.say(rejoin)

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

    def tell(self, process: VirtualProcess, word: messages.OfMember) -> None:
        """What a process wants to say is lost while it has no connection."""
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
        self.tell(process, messages.Leave())
        self.end(process)

    def deliver(self, connection: VirtualConnection, message: Message) -> None:
        """A message of the coordinator has arrived at its process."""
        process = connection.process
        if not connection.open or process.dead or process.connection is not connection:
            return
        word = messages.from_coordinator(message)
        if isinstance(word, messages.Welcome):
            assert not process.name, f"{process.name} was welcomed twice"
            process.name, process.life, process.code = word.name, word.life, message["code"]
            process.restarted, process.restored, process.run = word.restarted, word.restored, word.run
            self.handlers.on_welcome(process)
            self.tell(process, messages.Listens(process.name))
        elif isinstance(word, messages.Roster):
            if process.roster is None or word.version > process.roster.version:
                process.roster = word
        elif isinstance(word, messages.Waits):
            process.waits.append(word.reason)
        elif isinstance(word, messages.OtherCluster):
            process.strangers += 1
            process.connection = None
            self.clock.later(STRANGER_S, lambda: self.connect(process))
        elif isinstance(word, messages.KnownInexact):
            process.inexact = word.known
        elif isinstance(word, (messages.Fatal, messages.Refused)):
            self.handlers.on_fatal(process, word)
        else:
            if isinstance(word, messages.Rejoined):
                process.life = word.life
            elif isinstance(word, messages.Job):
                process.run = word.run
            self.handlers.on_control(process, word)

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
        self.life += 1
        for process in self.processes:
            if process.connection is not None and not process.dead:
                process.connection.open, process.connection = False, None

        def start() -> None:
            self._down = False
            self.begin()
            self.clock.later(HELD_S, self._let_in)
            for process in self.processes:
                if not process.dead:
                    self.clock.later(self.random.uniform(0.0, REJOIN_S), lambda p=process: self.connect(p))  # type: ignore[misc]

        self.clock.later(RESTART_S, start)
