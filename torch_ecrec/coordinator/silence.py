"""Members that are only silent: when they are given up, and when training stands for them. Pure: time is an argument.

Who is *known to be dead* (nobody listens any more where it did, or it has left) is lost at once, and is not looked at
here. Who is *silent* may be cut off, frozen or hung, and may be back in a moment with all that it holds. One cause
often silences several: a switch, a host that is paused, the coordinator's own cable. So the rule looks at all of them:

    over      silent for longer than its limit: its lease, or what is usual where others cannot reach it either, or no
              limit where its connection has ended and its host does not answer
    quiet     not heard of since those that are over fell silent, whatever its own limit is

    nobody is heard             this process is cut off itself, and does nothing
    nobody but of one host, of  training stands as below: that host, and this process with it, may be cut off; not so
    three or more               where all trainers are there, who can go on
    the code repairs all that   those that are over are given up: their slots go to hosts that are heard
    are quiet together
    it does not                 training stands, for `limit_s` at most; then those that are over are given up, too

Example: (k, r) = (2, 1), slots on a, b, c. b and c lose their network at once. 1.5 s later b is over, and c is quiet:
two slots are more than one parity repairs, so both are waited for. They are back after 3 s, and go on with every bit.

Who comes back may not be the last: members look for the coordinator once a second, and a kernel sends again after up to
twice the time that it has waited. So others that were silent as well are *excused* for `RETURNS_S`, once in a silence;
after a moment only, those who fell silent at the same time, for as long again as it lasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch_ecrec.coordinator.members import HEARD_S, MemberRecord, Members
from torch_ecrec.coordinator.suspicion import Suspicion
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.status import Standstill

AWAY_S = 1.5  # who was silent for longer has been away
MOMENT_S = 0.5  # who was silent for longer, and not so long, was for a moment: no heartbeat is so late by itself
TOGETHER_S = 0.5  # two who were heard last within that fell silent together
AGAIN_S = 1.0  # beyond that a kernel sends again after as long as it has waited: its first pause, and a heartbeat
RETURNS_S = 5.0  # from the return of one to that of others: 4 s for the end of a connection, and one to connect again


class Silence:
    """Who is silent, and for whom training stands.

    Args:
        limit_s: how long training stands, at most, for members that the code could not repair together.
        members, suspicion: who is heard of, and who cannot be reached.
        announce: tells observers of an event.

    Attributes:
        quiet: members that nothing was heard of lately: no slot is given to them.
    """

    def __init__(
        self, limit_s: float, members: Members, suspicion: Suspicion, announce: Callable[[Event], None]
    ) -> None:
        self.limit_s = limit_s
        self._members, self._suspicion, self._announce = members, suspicion, announce
        self.quiet: frozenset[str] = frozenset()
        self._unreachable: set[str] = set()  # the connection has ended, and nothing answers there
        self._excused: dict[str, tuple[float, float]] = {}  # name -> silent since, and excused until
        self._momentarily: dict[str, tuple[float, float]] = {}  # likewise
        self._awaited: dict[str, str] = {}  # name -> why
        self._until_s = math.inf

    # what is heard ------------------------------------------------------------------------------

    def on_unreachable(self, name: str, is_so: bool) -> None:
        """Notes whether a member's host answers, after its connection has ended."""
        (self._unreachable.add if is_so else self._unreachable.discard)(name)

    def on_heard(self, name: str, now_s: float) -> None:
        """Notes that a member is heard of, before its record says so. Others that were silent may be on their way back,
        too."""
        self._unreachable.discard(name)
        since_s = self._members.by_name[name].heard_s
        for other in self._members.present() if now_s - since_s > MOMENT_S else ():
            if other.name == name:
                continue
            if now_s - since_s <= AWAY_S:
                if abs(other.heard_s - since_s) <= TOGETHER_S:
                    self._momentarily[other.name] = other.heard_s, now_s + (now_s - since_s) + AGAIN_S
            elif now_s - other.heard_s > HEARD_S:
                if self._excused.get(other.name, (math.nan, 0.0))[0] != other.heard_s:
                    self._excused[other.name] = other.heard_s, now_s + RETURNS_S

    # who is over, and for whom training stands --------------------------------------------------

    def look(self, now_s: float) -> dict[str, str]:
        """Members that are silent for longer than their limit, and why they may be given up; notes who is quiet."""
        present = self._members.present()
        self._unreachable &= {one.name for one in present}
        for excused in (self._excused, self._momentarily):
            for gone in excused.keys() - {one.name for one in present}:
                del excused[gone]
        over = {one.name: why for one in present if (why := self._why_over(one, now_s))}
        for name, witness in self._suspicion.silent(self._members.by_name, now_s).items():
            silent_s = now_s - self._members.by_name[name].heard_s
            if not self._is_excused(self._members.by_name[name], now_s):
                over.setdefault(name, f"{witness} cannot reach it, and it was not heard of for {silent_s:.1f} s")
        heard = [now_s - self._members.by_name[name].heard_s for name in over]
        since_s = min(max(heard, default=2 * HEARD_S) / 2, HEARD_S)
        self.quiet = frozenset(over) | {
            one.name for one in present if now_s - one.heard_s > since_s and (over or self._suspicion.beats(one.name))
        }
        return over

    def _why_over(self, one: MemberRecord, now_s: float) -> str:
        if self._is_excused(one, now_s):
            return ""
        if one.name in self._unreachable:
            return "its connection ended, and its process cannot be reached"
        lease_s = self._members.lease_s
        return f"not heard of for {lease_s:g} s" if now_s - one.heard_s > lease_s else ""

    def _is_excused(self, one: MemberRecord, now_s: float) -> bool:
        found = (excused.get(one.name) for excused in (self._excused, self._momentarily))
        return any(until is not None and until[0] == one.heard_s and now_s < until[1] for until in found)

    @property
    def hears_nobody(self) -> bool:
        """Nothing is heard of any member: it is this process that is cut off."""
        present = self._members.present()
        return bool(present) and all(one.name in self.quiet for one in present)

    def may_be_cut_off(self, trainers: int, away: Iterable[str] = ()) -> bool:
        """Returns whether this process may be cut off from all but members of one host, or is from all.

        It is so where none of several other hosts is heard. That host might have all records, or could repair them; but
        nothing would be left if it was lost. And training would not go on before the others are back: not unless all
        trainers are there.

        Args:
            trainers: how many there are to be.
            away: hosts of members of before that are not back.
        """
        present = self._members.present()
        heard = [one for one in present if one.name not in self.quiet]
        hosts = {one.where for one in heard}
        others = {*away, *(one.where for one in present)} - hosts
        train = sum(one.role == "trainer" for one in heard) >= trainers
        return self.hears_nobody or (len(hosts) == 1 and len(others) > 1 and not train)

    @property
    def stands(self) -> bool:
        """Whether training stands still and waits for somebody."""
        return bool(self._awaited)

    def stand(self, over: dict[str, str], now_s: float) -> bool:
        """Has training stand for these; returns whether that has lasted too long."""
        news = over.keys() != self._awaited.keys()
        if self.hears_nobody:
            self._until_s = math.inf
        elif math.isinf(self._until_s):
            self._until_s = now_s + self.limit_s
            news = True
        if now_s >= self._until_s:
            return True
        self._awaited = dict(over)
        if news:
            self._announce(events.StandsStill(sorted(over), "; ".join(sorted(set(over.values()))), self._left_s(now_s)))
            for trainer in self._members.present("trainer"):
                self.send_to(trainer.name, now_s)
        return False

    def end(self, now_s: float) -> None:
        """Ends the standstill: training waits for nobody any more."""
        self._until_s = math.inf
        if not self._awaited:
            return
        self._awaited = {}
        self._announce(events.GoesOn())
        for trainer in self._members.present("trainer"):
            self.send_to(trainer.name, now_s)

    def send_to(self, name: str, now_s: float) -> None:
        """Tells a trainer for whom all wait: it has patience with them, for so long."""
        self._members.send(name, messages.Stands(sorted(self._awaited), self._left_s(now_s)))

    def _left_s(self, now_s: float) -> float | None:
        """Returns for how long training will stand at most; None: until somebody is heard."""
        return None if math.isinf(self._until_s) else round(max(self._until_s - now_s, 0.0), 1)

    def status(self, now_s: float) -> Standstill | None:
        """Returns for whom training stands; None: for nobody."""
        return Standstill(dict(self._awaited), self._left_s(now_s)) if self._awaited else None
