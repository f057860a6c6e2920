"""Links of the simulated cluster that fail: between two processes, or one and the coordinator.

    links = Links(SimulatedCluster(Scenario(...)))
    links.cut_at(17, Cut("server-0", "server-1"))  # from request 17 on nothing passes between them, either way
    links.cut_at(17, Cut("server-0", "server-1", one_way=True))  # only what server-0 sends is lost
    links.cut_at(17, Cut("server-0", COORDINATOR, heals_s=2.5))  # and passes again 2.5 s later
    links.cut_at(17, Outage({"server-0", "server-1"}, 2.5))  # two hosts without network, for 2.5 s
    links.cut_at(17, Outage({COORDINATOR}, 2.5, frozen=True))  # one stands still; its kernel answers for it
    links.go().check_against(undisturbed)

A process stands for a host: a server that is fenced and comes back as another is on the host of the one before, where
the cut goes on. From the first cut on processes send heartbeats as the real ones do, with those that they cannot reach:
tries need both ways, and a complaint follows `SILENT_S` after the cut began.

What is sent on a link that is cut waits in the sender's kernel, as with TCP. When the link heals it arrives, late (and
in order, where the coordinator is at one end); or it is *lost*, as the connections have ended meanwhile. Connections
with the coordinator end by themselves once they are cut for `ENDS_S`; in an outage members end theirs earlier, after
`MEMBER_ENDS_S`, and look for the coordinator, as real ones do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from harness.membership import VirtualProcess
from harness.result import SimulationResult
from harness.simulation import SimulatedCluster
from torch_ecrec.protocol import messages
from torch_ecrec.transport.control import UNANSWERED_BY_COORDINATOR_S, UNANSWERED_S
from torch_ecrec.transport.reachability import SILENT_S

COORDINATOR = "coordinator"
BEAT_S = 0.25
FIRST_TRY_S, LOOKS_S = 0.2, 1.0  # as Linux has it; as members have it
ENDS_S, MEMBER_ENDS_S = UNANSWERED_S, UNANSWERED_BY_COORDINATOR_S


@dataclass(frozen=True)
class Cut:
    """Nothing passes between two hosts, which are called as the first processes there.

    Args:
        one_way: only from `one` to `other`.
        heals_s: after so long everything passes again; None: never.
        lost: what was sent meanwhile never arrives; else it does, late.
        backs_off: kernels try in pauses, each twice as long as the one before: what waits arrives with the next try.
    """

    one: str
    other: str
    one_way: bool = False
    heals_s: float | None = None
    lost: bool = False
    backs_off: bool = False

    @property
    def ways(self) -> list[tuple[str, str]]:
        there, back = (self.one, self.other), (self.other, self.one)
        return [there] if self.one_way else [there, back]


@dataclass(frozen=True)
class Outage:
    """Some hosts are silent together: without network, or `frozen`. `seconds`: for how long."""

    hosts: frozenset[str]
    seconds: float
    frozen: bool = False


def back_s(waited_s: float) -> float:
    """Once the network is back, how long it is until what has waited so long arrives.

    A kernel sends again after 0.2 s, then after twice as long each time. Or the connection ends before, and another is
    made, as members look for their coordinator once a second.
    """
    pause_s = tried_s = FIRST_TRY_S
    while tried_s < waited_s:
        pause_s *= 2
        tried_s += pause_s
    return min(tried_s - waited_s, max(MEMBER_ENDS_S - waited_s, 0.0) + LOOKS_S)


class Links:
    """All links of a cluster.

    Attributes:
        cuts: host and host that nothing passes from and to -> since when.
        frozen: hosts that stand still.
        healed: how many cuts have.
        waited: how many messages waited in kernels.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.cuts: dict[tuple[str, str], float] = {}
        self.frozen: set[str] = set()
        self.healed = self.waited = 0
        self._planned: list[tuple[int, Cut | Outage]] = []
        self._waiting: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._waits_since_s: dict[tuple[str, str], float] = {}
        self._beats = False
        cluster.network.passes, cluster.network.held = self._passes, self._hold
        cluster.plane.passes, cluster.plane.held = self._reaches, self._hold_word
        cluster.plane.answers = self._answers
        cluster.plane.is_stopped = lambda: COORDINATOR in self.frozen

    def cut_at(self, message: int, cut: Cut | Outage) -> None:
        """It begins with that request."""
        self._planned.append((message, cut))

    def cut(self, cut: Cut) -> None:
        """It begins now."""
        clock = self.cluster.network.clock
        self._begin_beats()
        for way in cut.ways:
            self.cuts.setdefault(way, clock.now_s)
        if cut.heals_s is not None:
            clock.later(cut.heals_s, lambda: self._heal(cut))
        if COORDINATOR in (cut.one, cut.other):
            clock.later(ENDS_S, lambda: self._end(cut))

    def fail(self, outage: Outage) -> None:
        """It begins now."""
        clock = self.cluster.network.clock
        self._begin_beats()
        if outage.frozen:
            self.frozen |= outage.hosts
            clock.later(outage.seconds, lambda: self._thaw(outage))
            return
        everybody = {process.host for process in self.cluster.plane.processes if process.name} | {COORDINATOR}
        for one in sorted(outage.hosts):
            for other in sorted(everybody - {one}):
                if other > one or other not in outage.hosts:
                    self.cut(Cut(one, other, heals_s=outage.seconds, backs_off=True))
        clock.later(MEMBER_ENDS_S, self._end_at_members)

    def _thaw(self, outage: Outage) -> None:
        self.healed += 1
        self.frozen -= outage.hosts
        for way in [way for way in self._waiting if self.frozen.isdisjoint(way) and way not in self.cuts]:
            for arrive in self._waiting.pop(way):
                arrive()

    def _end_at_members(self) -> None:
        """Members whose words to the coordinator are not acknowledged look for it."""
        for process in self.cluster.plane.processes:
            connection = process.connection
            if connection is not None and not process.dead and (process.host, COORDINATOR) in self.cuts:
                connection.noticed_by_process()

    def _begin_beats(self) -> None:
        if not self._beats:
            self._beats = True
            self._beat()

    def go(self) -> SimulationResult:
        """See `SimulatedCluster.go`."""
        return self.cluster.go()

    def _heal(self, cut: Cut) -> None:
        self.healed += 1
        if cut.lost:
            self._end(cut)
        clock = self.cluster.network.clock
        for way in cut.ways:
            if cut.backs_off and self._waiting.get(way):
                clock.later(back_s(clock.now_s - self._waits_since_s[way]), functools.partial(self._open, way))
            else:
                self._open(way)

    def _open(self, way: tuple[str, str]) -> None:
        self.cuts.pop(way, None)
        for arrive in self._waiting.pop(way, []):
            if COORDINATOR in way:
                arrive()
            else:
                self.cluster.network.clock.later(self.cluster.network.delay_s(late=True), arrive)

    def _end(self, cut: Cut) -> None:
        """Connections on that link end, with what waits on them, if it is still cut."""
        if not any(way in self.cuts for way in cut.ways):
            return
        for way in cut.ways:
            self._waiting.pop(way, None)
        if COORDINATOR in (cut.one, cut.other):
            ends = [process for process in self.cluster.plane.processes if process.host in (cut.one, cut.other)]
            self.cluster.plane.reset([process.connection for process in ends])

    # what the network asks ----------------------------------------------------------------------

    def _way(self, sender: str, receiver: str) -> tuple[str, str]:
        return self._host_of(sender), self._host_of(receiver)

    def _host_of(self, name: str) -> str:
        process = self.cluster.process_of.get(name)
        return name if process is None else process.host  # nobody: a slot without a host

    def _passes(self, sender: str, receiver: str) -> bool:
        while self._planned and len(self.cluster.network.sent) > self._planned[0][0]:
            planned = self._planned.pop(0)[1]
            self.fail(planned) if isinstance(planned, Outage) else self.cut(planned)
        return self._is_open(*self._way(sender, receiver))

    def _is_open(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.cuts and self.frozen.isdisjoint((sender, receiver))

    def _answers(self, process: VirtualProcess) -> bool:
        """The kernel there answers, whatever its processes do."""
        return not {(process.host, COORDINATOR), (COORDINATOR, process.host)} & self.cuts.keys()

    def _hold(self, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        self._wait(self._way(sender, receiver), arrive)

    def _wait(self, way: tuple[str, str], arrive: Callable[[], None]) -> None:
        self.waited += 1
        if not self._waiting.get(way):
            self._waits_since_s[way] = self.cluster.network.clock.now_s
        self._waiting.setdefault(way, []).append(arrive)

    @staticmethod
    def _way_of_words(process: VirtualProcess, to_coordinator: bool) -> tuple[str, str]:
        return (process.host, COORDINATOR) if to_coordinator else (COORDINATOR, process.host)

    def _reaches(self, process: VirtualProcess, to_coordinator: bool) -> bool:
        return self._is_open(*self._way_of_words(process, to_coordinator))

    def _hold_word(self, process: VirtualProcess, to_coordinator: bool, arrive: Callable[[], None]) -> None:
        self._wait(self._way_of_words(process, to_coordinator), arrive)

    # what processes say of it -------------------------------------------------------------------

    def _unreachable(self, process: VirtualProcess) -> list[str]:
        long_ago_s = self.cluster.network.clock.now_s - SILENT_S
        hosts = {
            one if one != process.host else other
            for (one, other), since_s in self.cuts.items()
            if process.host in (one, other) and since_s <= long_ago_s
        }
        return [other.name for other in self.cluster.plane.processes if other.name and other.host in hosts]

    def _beat(self) -> None:
        for process in self.cluster.plane.processes:
            if process.name and not process.dead and process.host not in self.frozen:
                self.cluster.plane.tell(process, messages.Beat(unreachable=self._unreachable(process)))
        self.cluster.network.clock.later(BEAT_S, self._beat)
