"""Coordinators of the simulated cluster that stand by each other: the real `Candidate`, `LeaderGate` and `Router`.

    cluster = SimulatedCluster(Scenario(coordinators=2))
    cluster.plane.kill(cluster.plane.leading, back_s=0.02)      # its supervisor starts another at the same port
    cluster.plane.ask({"type": "stop", "led": 11})              # a tool, where etcd says that one leads

Each has a port, and may lead, be followed, stand by there again, and lead again. What is said to one that stands by
waits there unread, ends of connections too, as in the backlog of a listener: until it leads, or its process ends. Here
nobody looks after that backlog, so that words may wait for as long as anybody stands by (a real coordinator that stands
by closes whoever comes: `ControlServer.turn_away`, which is no rule that anything here may rest on).

Members look who leads with the real `Elected`, as often as they do it, and give up a connection with one that another
has followed. All that takes its time from etcd passes `FASTER` times as fast, since a step takes milliseconds here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.etcd import VirtualEtcd
from harness.membership import (
    HELD_S,
    NOTICED_S,
    TICK_S,
    Center,
    ControlPlane,
    VirtualConnection,
    VirtualProcess,
)
from torch_ecrec.coordinator.election import POLL_S, Begin, Candidate, EtcdPutBack, Standing
from torch_ecrec.processes.leadership import LeaderGate
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.transport.etcd import EtcdUnavailable, Leader, View
from torch_ecrec.transport.whereabouts import LOOK_S, Elected, is_followed

FASTER = 20
TTL_S = 2
AGAIN_S = 0.001  # from the end of one that was followed to its standing by again, in the same process
TOOL = 50_000  # the number of a tool's process, which is no member
ASKED_S = 0.5  # how long a tool waits for an answer


class Standby(Center):
    """A coordinator's process, from its start to its end.

    Attributes:
        number: of its port.
        candidate: what it is.
        leads: it has begun to lead, whether or not it may act at the moment.
        dead: it has ended.
        stopped: by SIGSTOP, until it is woken.
        connections: that it has, or that wait at its port.
        waited: how many words waited there until it led.
    """

    def __init__(self, plane: StandbyPlane, number: int, looks_in_s: float, known: View | None) -> None:
        super().__init__(plane)
        self.number, self._standbys = number, plane
        self.leads = self.dead = self.stopped = False
        self.connections: list[VirtualConnection] = []
        self.waiting = self.waited = 0
        self._turn = 0  # of `step`: an earlier one that is still due is void
        plane.started += 1
        address = f"coordinator-{number}", number
        self.candidate = Candidate(f"candidate{plane.started}", address, TTL_S, f"run{number}", known)
        self._gate = LeaderGate(lambda: not self.stopped and self.leads and self.holds)
        plane.clock.later(looks_in_s, self.step) if looks_in_s else self.step()

    @property
    def holds(self) -> bool:
        """It may act."""
        return self.candidate.holds(self._standbys.now_of_etcd())

    def do(self, action: Callable[[], None]) -> None:
        if not self.dead:
            self.waiting += not self.leads
            self._gate.do(action)

    def step(self) -> None:
        """Does what the thread of its office does, again and again."""
        if self.dead or self.stopped:
            return
        question, now = self.candidate.ask(self._standbys.now_of_etcd()), self._standbys.now_of_etcd
        try:
            if not self._standbys.reaches_etcd(self):
                raise EtcdUnavailable("its host is cut off")
            found = "none" if isinstance(question, Begin) else question.of(self._standbys.etcd)
            wait_s = self.candidate.answer(found, now())
        except EtcdUnavailable:
            wait_s = self.candidate.fail()
        except EtcdPutBack:
            self._standbys.end_coordinator(self, back_s=AGAIN_S)  # as an init system starts it again
            return
        if self.candidate.standing is Standing.FENCED or (self.leads and self.candidate.standing is Standing.OVER):
            self._standbys.end_coordinator(self, back_s=AGAIN_S, known=self.candidate.view)
            return
        if self.candidate.standing is Standing.LEADING and not self.leads:
            candidate = self.candidate
            self.router = self._standbys.new_router(self, candidate.run, candidate.again, candidate.led)
            self.leads, self.waited = True, self.waiting
            self._standbys.on_leads(self)
            self._standbys.clock.later(HELD_S, lambda: self.do(self._let_in))
        self.tick(ticks=False)
        self._turn += 1
        turn = self._turn
        self._standbys.clock.later(wait_s / self._standbys.faster, lambda: self.step() if turn == self._turn else None)

    def _let_in(self) -> None:
        self.router.on_tick(self._standbys.clock.now_s)

    def tick(self, ticks: bool = True) -> None:
        """What waited is done, and what is due from time to time."""
        if not self.dead and self._gate.go_on() and ticks:
            self._let_in()


class StandbyPlane(ControlPlane):
    """Control connections with whoever leads.

    Attributes:
        center: who has begun to lead last.
        ports: the process at each port; None: nobody listens there.
        leaderships: so many have begun.
        on_leadership: called when another does.
        faster: how much faster than here etcd's time passes.
        reaches_etcd: whether a coordinator's process does.
    """

    def begin(self) -> None:
        self.etcd = VirtualEtcd(self.now_of_etcd)
        self.started = 0  # candidates
        self.ports: dict[int, Standby | None] = {}
        self.leaderships = 0
        self.on_leadership: Callable[[Standby], None] = lambda center: None
        self.faster: float = FASTER
        self.reaches_etcd: Callable[[Standby], bool] = lambda center: True
        self._looks: dict[int, Elected] = {}
        self._found: dict[int, Leader | None] = {}
        self._leaders: dict[VirtualConnection, Leader] = {}
        self._before_s = 0.0  # of etcd's time has passed before the cluster's begins
        self.starts(0)
        first = self.ports[0]
        assert first is not None
        while not first.leads:  # the cluster begins once it has watched for a lease
            self._before_s += POLL_S
            first.step()

    def stand_by(self, coordinators: int) -> None:
        """So many are there, with the first."""
        for number in range(1, coordinators):
            self.starts(number)
        self.clock.later(LOOK_S / self.faster, self._follow)

    def now_of_etcd(self) -> float:
        return self._before_s + self.clock.now_s * self.faster

    def starts(self, number: int, looks_in_s: float = 0.0, known: View | None = None) -> None:
        """A process starts at a port.

        Args:
            looks_in_s: so much later it looks for the first time whether anybody leads.
            known: what etcd has said to that process before.
        """
        self.ports[number] = None
        self.ports[number] = Standby(self, number, looks_in_s, known)

    def on_leads(self, center: Standby) -> None:
        """One begins to lead: everything that it knows, members tell it."""
        self.center, self.term = center, self.term + 1
        self.leaderships += 1
        self.on_leadership(center)

    @property
    def leading(self) -> Standby | None:
        """Who acts at the moment."""
        center = self.center
        assert isinstance(center, Standby)
        return center if not center.dead and not center.stopped and center.holds else None

    @property
    def lives(self) -> bool:
        return self.leading is not None

    def _tick(self) -> None:
        for center in list(self.ports.values()):
            if center is not None and center.leads:
                center.tick()
        self.clock.later(TICK_S, self._tick)

    # members ------------------------------------------------------------------------------------

    def look_of(self, number: int) -> Elected:
        """How a process looks who leads; it remembers what it has seen."""
        if number not in self._looks:
            self._looks[number] = Elected("etcd", self.etcd)
        return self._looks[number]

    def find(self, process: VirtualProcess) -> Center | None:
        """Who leads, as etcd says; None: nobody, or nobody listens there."""
        leader = self._found[process.number] = self.look_of(process.number).look()
        return None if leader is None else self.ports[leader.address[1]]

    def led(self, process: VirtualProcess) -> int:
        leader = self._found[process.number]
        assert leader is not None
        return leader.revision

    def connection_with(self, center: Center, process: VirtualProcess) -> VirtualConnection:
        assert isinstance(center, Standby)
        connection = super().connection_with(center, process)
        center.connections.append(connection)
        self._leaders[connection] = Leader(("", center.number), self.led(process))
        return connection

    def _follow(self) -> None:
        """Every member looks whether another leads than the one that it is connected with."""
        for process in self.processes:
            connection = process.connection
            if process.dead or connection is None or not self._is_open(process):
                continue
            if is_followed(self._leaders[connection], self.look_of(process.number).look()):
                connection.left()
                self.lose(process, "another leads now")
        self.clock.later(LOOK_S / self.faster, self._follow)

    # tools --------------------------------------------------------------------------------------

    def ask(self, word: dict[str, Any]) -> Leader | None:
        """A tool looks who leads, and says something there on behalf of that leader; it waits, and then gives up.

        Returns:
            Who led; None: nobody, or nobody listens there.
        """
        leader = Elected("etcd", self.etcd).look()
        center = None if leader is None else self.ports[leader.address[1]]
        if leader is None or center is None:
            return None
        tool = VirtualProcess(join_of("server", "a tool", 0), TOOL, self.clock.now_s)
        tool.dead, self._found[TOOL] = True, leader
        connection = self.connection_with(center, tool)
        connection.say({**word, "led": leader.revision})
        self.clock.later(ASKED_S, connection.left)
        return leader

    # faults -------------------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        """Whoever leads."""
        if self.leading is not None:
            self.end_coordinator(self.leading, AGAIN_S)

    def end_coordinator(
        self, center: Standby, back_s: float, vanishes: bool = False, looks_in_s: float = 0.0, known: View | None = None
    ) -> None:
        """Its process ends, and so do the connections that it has and those that wait; another starts at its port.

        Args:
            back_s: so much later.
            looks_in_s, known: see `starts`.
            vanishes: its host is gone: nobody hears that a connection has ended.
        """
        center.dead, self.ports[center.number] = True, None
        for connection in center.connections:
            if connection.open and not vanishes:
                connection.open = False
                self.clock.later(self.random.uniform(*NOTICED_S), connection.noticed_by_process)
        self.clock.later(back_s, lambda: self.starts(center.number, looks_in_s, known))

    def stop(self, center: Standby, seconds: float) -> None:
        """Its process stands still, and goes on as if nothing had been."""

        def wake() -> None:
            center.stopped = False
            center.tick(ticks=False)  # what has arrived meanwhile is looked at before it knows
            center.step()

        center.stopped = True
        self.clock.later(seconds, wake)

    def resign(self, center: Standby, back_s: float, looks_in_s: float = 0.0) -> None:
        """It is told to end, and leaves the lead to another. The others: see `end_coordinator`."""
        center.candidate.resign()
        self.etcd.revoke(center.candidate.lease)
        self.end_coordinator(center, back_s, looks_in_s=looks_in_s)
