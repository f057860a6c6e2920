"""Links of the simulated cluster that fail: between two processes, or one and the coordinator.

    links = Links(SimulatedCluster(Scenario(...)))
    links.cut_at(17, "server-0", "server-1")        # from request 17 on nothing passes between them, either way
    links.cut_at(17, "server-0", "server-1", one_way=True)      # only what server-0 sends is lost
    links.cut_at(17, "server-0", COORDINATOR)
    links.go().check_against(undisturbed)

A process stands for a host: a server that is fenced and comes back as another is on the host of the one before, where
the cut goes on. From the first cut on processes send heartbeats as the real ones do, with those that they cannot reach:
tries need both ways, and a complaint follows `SILENT_S` after the cut began. What the coordinator and a process that is
cut off from it say to each other is lost.
"""

from __future__ import annotations

from torch_ecrec.testing.membership import VirtualProcess
from torch_ecrec.testing.result import SimulationResult
from torch_ecrec.testing.simulation import SimulatedCluster
from torch_ecrec.transport.reachability import SILENT_S

COORDINATOR = "coordinator"
BEAT_S = 0.25


class Links:
    """All links of a cluster.

    Attributes:
        cuts: host and host that nothing passes from and to -> since when.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.cuts: dict[tuple[str, str], float] = {}
        self._planned: list[tuple[int, str, str, bool]] = []
        cluster.network.passes = self._passes
        cluster.plane.passes = lambda process: self._is_open(process.host, COORDINATOR)

    def cut_at(self, message: int, one: str, other: str, one_way: bool = False) -> None:
        """Nothing passes between two hosts from that request on. They are called as the first processes there."""
        self._planned.append((message, one, other, one_way))

    def cut(self, one: str, other: str, one_way: bool = False) -> None:
        """Nothing passes between two hosts from now on; `one_way`: nothing from one to the other."""
        first, now_s = not self.cuts, self.cluster.network.clock.now_s
        self.cuts.setdefault((one, other), now_s)
        if not one_way:
            self.cuts.setdefault((other, one), now_s)
        if first:
            self._beat()

    def go(self) -> SimulationResult:
        """See `SimulatedCluster.go`."""
        return self.cluster.go()

    def _passes(self, sender: str, receiver: str) -> bool:
        while self._planned and len(self.cluster.network.sent) > self._planned[0][0]:
            self.cut(*self._planned.pop(0)[1:])
        processes = self.cluster.process_of
        return (processes[sender].host, processes[receiver].host) not in self.cuts

    def _is_open(self, one: str, other: str) -> bool:
        """Both ways: what a connection needs."""
        return (one, other) not in self.cuts and (other, one) not in self.cuts

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
            if process.name and not process.dead:
                word = {"type": "beat", "unreachable": self._unreachable(process)}
                self.cluster.plane.tell(process, word)
        self.cluster.network.clock.later(BEAT_S, self._beat)
