"""The roster: who is in the cluster, and how each is called.

Whoever is in it is told all of it, and may call all others at once: nobody waits for anybody. A new *version* is sent
whenever somebody comes or goes. A connection to or from who is not in it any more ends (`transport/sockets.py`); what
was sent on it before is known by its incarnation and era.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import MemberRecord, Members
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import Rejoin

SPARES_AWAITED_S = 5.0  # before slots are placed for the first time, after the last who has joined


class Roster:
    """The present roster.

    Args:
        spares: servers that are waited for beyond one per slot before the first version.
        announce: tells observers of an event.

    Attributes:
        version: its number; 0: there was none yet.
        names: who is in it, servers first, in order of arrival.
    """

    def __init__(self, spares: int, job: RunningJob, members: Members, announce: Callable[[Event], None]) -> None:
        self.spares, self._job, self._members, self._announce = spares, job, members, announce
        self.version = 0
        self.names: list[str] = []

    @property
    def is_split(self) -> bool:
        """A member was told another version than the present one."""
        return any(member.roster != self.version for member in self._members.present())

    def servers(self) -> list[str]:
        """Servers that can be given slots, in order of arrival."""
        names = set(self.names)
        return [member.name for member in self._members.present("server") if member.name in names]

    def renew(self, now_s: float, placed: bool, anew: bool = False) -> bool:
        """Takes in who may come in, without who is not there any more, and tells all of them.

        Args:
            placed: slots have been given to servers: training has begun, and does not wait for spares.
            anew: also if nobody has come or gone.

        Returns:
            Whether somebody has come, or slots can be placed for the first time.
        """
        job = self._job
        if job.fatal is not None or job.spec is None:
            return False
        servers, trainers = self._callable("server"), self._callable("trainer")
        done = self._members.done if placed else set()  # the first roster has all of them
        if len({member.rank for member in trainers} | done) < job.spec.trainers:
            trainers = [one for one in trainers if one.name in self.names]  # the others are on their way
        if not placed and self._waits(servers, trainers, now_s):
            return False
        names = [member.name for member in (*servers, *trainers)]
        come = not set(names) <= set(self.names)
        if come or anew or len(names) < len(self.names):
            self._tell(names)
        return come or not placed

    def _waits(self, servers: list[MemberRecord], trainers: list[MemberRecord], now_s: float) -> bool:
        """Returns whether somebody is missing, or spares are on their way, before slots are placed."""
        slots = self._job.code.slots
        if not trainers or len(servers) < slots:
            return True
        waited_s = now_s - max(member.joined_s for member in (*servers, *trainers))
        return len(servers) < slots + self.spares and waited_s < SPARES_AWAITED_S

    def _callable(self, role: str) -> list[MemberRecord]:
        return [member for member in self._members.present(role) if member.endpoint]

    def drop(self, names: Iterable[str]) -> None:
        """Takes these out of the roster, since they are gone, and tells the others."""
        gone = set(names)
        if gone & set(self.names):
            self._tell([name for name in self.names if name not in gone])

    def _tell(self, names: list[str]) -> None:
        self.version, self.names = self.version + 1, names
        for name in names:
            self.send_to(name)
        self._announce(events.RosterIs(self.version, list(names)))

    def send_to(self, name: str) -> None:
        """Tells a member the present roster."""
        known = [self._members.by_name[one] for one in self.names]
        addresses = {member.name: member.address for member in known if member.address is not None}
        self._members.by_name[name].roster = self.version
        endpoints = {member.name: member.endpoint for member in known}
        self._members.send(name, messages.Roster(self.version, endpoints, addresses))

    def learn(self, said: Iterable[Rejoin]) -> None:
        """Takes over the newest roster that members of the coordinator before know, of those who are back; the number
        never becomes less."""
        known = {member.name for member in self._members.present()}
        for one in said:
            if one.roster > 0 and one.roster >= self.version:
                self.version, self.names = one.roster, list(one.world)
        self.names = [name for name in self.names if name in known]
