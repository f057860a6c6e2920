"""A coordinator that was started again knows nothing: members of the one before tell it what they know.

It waits until everybody of the newest placement has rejoined, or `REGATHER_S` from the first, and `LATE_S` from the
last: who comes late may not be alone, since others were behind the same switch. Who is missing then is lost. A server
that nobody can reach who is back is not waited for: its host went with the coordinator's, or is cut off from all. Nor
is one whose process is known to be gone: members know where each other listen. Where more would be lost than parity
repairs, training stands for those who are missing (`silence.py`): what took the coordinator may have taken a member's
way to it, too. What they said, taken together, is `MemberReports`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import Address
from torch_ecrec.protocol.messages import NO_HOST, Rejoin, SlotPlace
from torch_ecrec.spec.job import JobSpec

REGATHER_S, SPARES_S = 2.5, 0.5  # for all who host a slot or train; then for the others
LATE_S = 1.0  # after the last who has come: members look for a coordinator every second
AGAIN_S = 3.0  # after that long, who was turned away has come again
LATE_MOST_S = 10.0  # for those who come one after the other


@dataclass(frozen=True)
class MemberReports:
    """Combines the knowledge of the members that a coordinator before had. `said`: what each told, by its name."""

    said: Mapping[str, Rejoin]

    @property
    def placement(self) -> messages.Placement | None:
        """The newest placement that anybody knows."""
        known = (one.known.placement for one in self.said.values())
        return max((p for p in known if p is not None), key=lambda p: p.epoch, default=None)

    @property
    def job(self) -> JobSpec | None:
        return next((one.known.job for one in self.said.values() if one.known.job is not None), None)

    @property
    def done(self) -> set[int]:
        """Trainers that had left before, as the others were told; where there are none, as the servers were.

        Servers may not have heard that trainers were started again since: those in the newest era have.
        """
        trainers = [one for one in self.said.values() if one.role == "trainer"]
        era = max((one.known.era for one in self.said.values()), default=0)
        told = trainers or [one for one in self.said.values() if one.known.era == era]
        return {rank for one in told for rank in one.known.left}

    @property
    def trainers(self) -> int:
        """For how many trainers it is known where they are: they spoke, or had left."""
        return len({one.rank for one in self.said.values() if one.role == "trainer"} | self.done)

    @property
    def world(self) -> set[str]:
        """Who is in the newest roster that somebody was told."""
        furthest = max(self.said.values(), key=lambda one: one.roster, default=None)
        return set() if furthest is None else set(furthest.world)

    @property
    def hosts(self) -> set[str]:
        """Servers that host slots in the newest placement."""
        placement = self.placement
        return set() if placement is None else {place.server for place in placement.slots if place.server != NO_HOST}

    @property
    def partial_restores(self) -> list[messages.PartialRestore]:
        """Slots that began anew, as who knows of most of them does, and of where they went on."""

        def knows(one: Rejoin) -> tuple[int, int, int]:
            lives = [at for partial_restore in one.known.partial_restores for _, _, at in partial_restore.lives]
            return len(one.known.partial_restores), one.known.era, len(lives) - lives.count(None)

        newest = max(self.said.values(), key=knows, default=None)
        return [] if newest is None else list(newest.known.partial_restores)

    def reads(self, slot: int, incarnation: int) -> bool:
        """Returns whether a life of a slot was to begin with a checkpoint, and nobody knows of a step where it went
        on."""
        lives = [life for partial_restore in self.partial_restores for life in partial_restore.lives]
        return (slot, incarnation, None) in lives

    @property
    def saves(self) -> messages.Saves:
        """Prioritised saves that count, as who knows of the newest does, of those that have heard where all go on."""
        era = max((one.known.era for one in self.said.values()), default=0)
        said = [one.known.saves for one in self.said.values() if one.known.era == era]
        return max(said, key=lambda saves: (saves.done, saves.newest), default=messages.Saves())

    @property
    def kept(self) -> dict[tuple[int, int], bool]:
        """(slot, incarnation) of those that have all their records -> whether dense snapshots are there."""
        return {(slot, life): dense for one in self.said.values() for slot, life, dense in one.known.kept}

    @property
    def unsettled(self) -> bool:
        """Servers were going back, or not all know of the same era, or that a restore has ended."""
        known = [one.known for one in self.said.values()]
        restoring = {one.placement.restoring for one in known if one.placement is not None}
        return any(one.frozen for one in known) or len({one.era for one in known}) > 1 or len(restoring) > 1

    def slots(self) -> tuple[list[SlotPlace], set[int]]:
        """Returns the newest placement that is known, with what its hosts know better.

        A slot may have been rebuilt since. And some may know a later life of it than the placement does, whose host did
        not come back: nobody listens to the life before any more.

        Returns:
            The slots, and which of them are lost like that: their host is not known.
        """
        placement = self.placement
        found = [] if placement is None else list(placement.slots)
        most = len(self.partial_restores)
        for one in self.said.values():  # who has not heard of the last slots that began anew may lack parity
            for i, incarnation in one.known.whole if len(one.known.partial_restores) == most else ():
                if found[i].incarnation == incarnation and found[i].server == one.name:
                    found[i] = SlotPlace(found[i].server, incarnation, True)
        lost = set()
        for one in self.said.values():
            for i, incarnation in enumerate(one.known.incarnations):
                if incarnation > found[i].incarnation:
                    found[i] = SlotPlace(NO_HOST, incarnation, False)
                    lost.add(i)
        return found, lost


class Regathering:
    """Whether members of the coordinator before are telling what they know, and what they have told.

    Attributes:
        active: they are.
        said: by name, in order of arrival; empty when it is not active.
        dead: members that are not back, and whose process is known to be gone.
    """

    def __init__(self) -> None:
        self.active = False
        self.said: dict[str, Rejoin] = {}
        self.dead: set[str] = set()
        self._cannot_reach: dict[str, frozenset[str]] = {}  # who is back -> whom not, as it has said last
        self._others: dict[
            str, tuple[str, float]
        ] = {}  # session ids of members of other clusters -> run, and when last
        self._until_s = self._last_s = 0.0
        self._settled_s = math.inf  # since when nobody is missing whom it waits for

    @property
    def run(self) -> str | None:
        """The cluster of those who are back and know where slots are; None: nobody of them does."""
        return next((one.run for one in self.said.values() if one.known.placement is not None), None)

    def begin(self, now_s: float, lease_s: float) -> None:
        self.active, self.said, self._until_s = True, {}, now_s + REGATHER_S
        self.dead, self._others = set(), {}
        self._cannot_reach, self._settled_s = {}, math.inf
        self._last_s = now_s + max(min(lease_s, LATE_MOST_S), REGATHER_S)

    def add(self, rejoin: Rejoin, now_s: float) -> None:
        """Adds what a member that is back has told."""
        self._until_s = max(self._until_s, min(now_s + LATE_S, self._last_s))
        self.said[rejoin.name] = rejoin
        self.dead.discard(rejoin.name)
        self._cannot_reach.pop(rejoin.name, None)

    def is_outnumbered(self, other: Rejoin, now_s: float) -> bool:
        """Returns whether more members of another cluster look for their coordinator here than are back of this one."""
        self._others[other.session_id] = other.run, now_s
        recent = [run for run, at_s in self._others.values() if now_s - at_s <= AGAIN_S]
        return recent.count(other.run) > sum(one.known.placement is not None for one in self.said.values())

    def on_beat(self, name: str, unreachable: Iterable[str]) -> None:
        """Notes whom a member cannot reach, though it tries."""
        self._cannot_reach[name] = frozenset(unreachable)

    def missing(self) -> dict[str, Address]:
        """Members that are not back, and where they listen if they live."""
        if not self.active:
            return {}
        known = MemberReports(self.said)
        wanted = known.world | known.hosts
        addresses = {name: at for one in self.said.values() for name, at in one.addresses.items() if name in wanted}
        return {name: at for name, at in addresses.items() if name not in self.said and name not in self.dead}

    def gone(self, known: MemberReports) -> set[str]:
        """Members that are not back, and that nobody can reach who is back and was in a roster with them.

        Two hosts say so at least: the link of one may have failed. Who is on the same host never does; so nobody counts
        as gone of whose host somebody is back.
        """
        found = set()
        for missing in known.world - self.said.keys():
            knew = [one for one in self.said.values() if missing in one.world]
            hosts = {one.name if one.address is None else one.address[0] for one in knew}
            agreed = all(missing in self._cannot_reach.get(one.name, ()) for one in knew)
            if agreed and len(hosts) > 1:
                found.add(missing)
        return found

    def forget(self, name: str) -> bool:
        """Forgets a member that is gone again, as if it had not come back; returns whether it had."""
        self._cannot_reach.pop(name, None)
        return self.said.pop(name, None) is not None

    def knows_better(self, rejoin: Rejoin) -> bool:
        """Returns whether somebody else of that name is back already, and knows as much or more."""
        said = self.said.get(rejoin.name)
        return said is not None and said.session_id != rejoin.session_id and _newest(rejoin) <= _newest(said)

    def is_over(self, now_s: float, job: JobSpec | None) -> bool:
        """Returns whether everybody is back who is needed, or the time is up. `job`: where none of them knows it."""
        if not self.active or (not self.said and now_s < self._until_s):
            return False
        known = MemberReports(self.said)
        placement, job = known.placement, known.job or job
        if placement is not None and job is not None and known.trainers == job.trainers:
            settled = self.said.keys() | self.gone(known) | self.dead
            if known.hosts <= settled:  # spares may be a little later; no trainer is gone: all are back, or done
                self._settled_s = min(self._settled_s, now_s)
                return now_s >= min(self._until_s, self._settled_s + (0 if known.world <= settled else SPARES_S))
        self._settled_s = math.inf  # perhaps not any more: somebody can be reached again
        return now_s >= self._until_s

    def end(self) -> MemberReports:
        """Ends the regathering, and returns what was told in it."""
        known = MemberReports(self.said)
        self.active, self.said = False, {}
        return known


def _newest(rejoin: Rejoin) -> tuple[int, int]:
    """Returns how new a member's knowledge is, to be compared: epoch, version of the roster."""
    return rejoin.known.placement.epoch if rejoin.known.placement is not None else -1, rejoin.roster
