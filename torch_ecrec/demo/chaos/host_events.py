"""Events of hosts, of the network between them and of who leads: who may be lost by each, and how it is felt.

Nobody may be lost but whom it may cost:

    kill-host       all that run there; all trainers, if one does
    cut             servers at both ends, of which one is to be fenced. Where one end is the coordinator's, it does not
                    hear of those at the other: they are lost by its lease or before, trainers too
    cut-trainers    servers at both ends. Trainers wait; the coordinator says at once that it can do nothing
    unplug-coordinator      with election, another leads, to whom the servers of that host are silent alone, and it may
                    place their slots elsewhere. Without, nobody: who hears nobody suspects itself
    slow-link, lossy-link, kill-leader, stop-leader, kill-etcd, stop-etcd, blip, wrong-coordinator      nobody

`World` is what is known of who is where; it has no clock and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch_ecrec.demo.report import Record
from torch_ecrec.protocol.status import Unresolved
from torch_ecrec.spec.job import CodeSpec

AWAY_S = (1.0, 4.0, 10.0)  # of a host
ETCD_AWAY_S = (2.0, 5.0, 10.0)
CUT_S = (2.0, 5.0, 9.0)
CUT_TRAINERS_S = (2.0, 4.0)  # torchrun's hosts give each other up after 15 s
LINK_S = (4.0, 8.0, 15.0)
STOP_LEADER_S = (5.0, 12.0)  # longer than its lease
SLOW = ({"bits_per_s": 1e7}, {"delay_s": 0.1, "jitter_s": 0.02})  # 1 % of a link of 1 Gbit/s; a link across a continent
LOSSY = ({"loss": 0.02}, {"loss": 0.1})
MET_LEAST = 20  # packets that a bad link must have held up
BLIP_S = (1.0, 2.0, 3.0)
UNPLUG_S = (2.0, 6.0)  # longer than the lease, so much
WRONG_S = (3.0, 8.0)  # a coordinator of another code stands in the place of the right one


@dataclass
class World:
    """Where each member of the cluster is.

    Args:
        record: of the run, with the last status.
        code: of the cluster.
        hosts: how many there are.
        where: hosts of members, by name.
        leads: the host of the coordinator that leads.
        may_lead: hosts of coordinators: with election another may lead at any time, if etcd is slow, say.
    """

    record: Record
    code: CodeSpec
    hosts: int
    leads: Callable[[], int]
    may_lead: Collection[int]
    where: dict[str, int] = field(default_factory=dict)

    def present(self) -> set[str]:
        """Returns the members that the coordinator sees."""
        return {one.name for one in self.record.members if one.present} - self.record.lost.keys()

    def on(self, host: int, role: str | None = None) -> list[str]:
        """Returns the members on a host. `role`: only those of this role."""
        roles = self.record.roles
        return sorted(n for n in self.present() if self.where.get(n) == host and role in (None, roles.get(n)))

    def slots_on(self, host: int) -> list[int]:
        """Returns the slots whose servers are on a host."""
        return [slot for slot, (name, _) in enumerate(self.record.places) if self.where.get(name) == host]

    def ranks_on(self, host: int) -> list[int]:
        """Returns the ranks of the trainers that are on a host."""
        return [rank for rank, name in self.record.trainers.items() if self.where.get(name) == host]

    # whom an event may hit ----------------------------------------------------------------------

    def may_die(self, most_slots: int, alive: Collection[int]) -> list[int]:
        """Returns the hosts with at most `most_slots` slots, which may die."""
        return [host for host in alive if len(self.slots_on(host)) <= most_slots]

    def may_be_cut(self, most_slots: int, alive: Collection[int], trainers: bool) -> list[tuple[int, int]]:
        """Returns pairs of hosts whose link may be cut. `trainers`: both have some, and neither has the coordinator."""
        found = []
        for one in alive:
            for other in alive:
                cost = max(len(self.slots_on(one)), len(self.slots_on(other)))
                of_trainers = bool(self.ranks_on(one) and self.ranks_on(other))
                leads = self.leads() in (one, other)
                if one != other and cost <= most_slots and of_trainers == trainers and not (trainers and leads):
                    found.append((one, other))
        return found

    def busy(self, alive: Collection[int]) -> list[int]:
        """Returns the hosts that send enough for a bad link to be felt: a spare's sends heartbeats only."""
        return [host for host in alive if self.slots_on(host) or self.ranks_on(host)]

    # whom it may cost ---------------------------------------------------------------------------

    def lost_with(self, host: int) -> set[str]:
        """Returns the members that may be lost with a host."""
        return {*self.on(host), *(self.record.trainers.values() if self.ranks_on(host) else ())}

    def lost_by_cut(self, one: int, other: int) -> set[str]:
        """Returns the members that may be lost when the link between two hosts is cut."""
        servers = {name for host in (one, other) for name in self.on(host, "server")}
        apart = {one, other} & set(self.may_lead) and (self.ranks_on(one) or self.ranks_on(other))
        return servers | (set(self.record.trainers.values()) if apart else set())

    # by what it was felt ------------------------------------------------------------------------

    def felt_of_loss(self, names: Collection[str], since_s: float) -> str:
        """Returns a text if the coordinator has said since (time of day) that all of these are lost; "" if not."""
        status = self.record.status
        if status is None or status.time_s <= since_s or not status.slots:
            return ""
        left = self.present() & set(names)
        return "" if left else f"lost: {', '.join(sorted(names)) or 'nobody'}"

    def felt_of_cut(self, one: int, other: int, names: Collection[str], lost: Collection[str]) -> str:
        """Returns a complaint of one end about the other, or a new loss at one end; "" if there is none.

        Where another coordinator has come to lead at one end meanwhile, who cannot join it is none that it could lose.
        """
        status = self.record.status
        for entry in status.unreachable if status is not None else ():
            if {self.where.get(entry.who), self.where.get(entry.whom)} == {one, other}:
                return f"{entry.who} cannot reach {entry.whom}"
        gone = sorted(name for name in names if name in self.record.lost and name not in lost)
        if gone:
            return f"{gone[0]} is lost: {self.record.lost[gone[0]]}"
        begun = status is not None and status.slots and status.regathering is None
        away = sorted(set(names) - self.present() - set(lost)) if begun and self.leads() in (one, other) else []
        return f"{away[0]} has not joined the coordinator that leads" if away else ""

    def felt_as_unresolved(self, one: int, other: int) -> str:
        """Returns a text if the coordinator says that trainers at both ends cannot reach each other; "" if not."""
        unresolved = Unresolved([], "") if self.record.status is None else self.record.status.unresolved
        for pair in unresolved.pairs:
            trainers = all(self.record.roles.get(name) == "trainer" for name in pair)
            if trainers and {self.where.get(name) for name in pair} == {one, other}:
                return f"{' and '.join(sorted(pair))}: {unresolved.why}"
        return ""
