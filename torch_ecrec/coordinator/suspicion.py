"""Who cannot reach whom, as members complain of it, and what follows. Pure: the time is an argument.

A *complaint* is a pair (who, whom) that `who` repeats with every heartbeat: it tries, and nothing comes back
(`transport/reachability.py`). It is *fresh* while `who` itself is heard. A server that names itself has no threads or
descriptors for connections: it is of no use, and the first to go.

- `silent`: a fresh complaint, and the coordinator does not hear of the accused either, for longer than is usual
  (`transport/accrual.py`): its host is gone or cut off. Two witnesses, so nobody waits for the end of its lease; and
  somebody of a third host is heard, so it is not the coordinator that is cut off.
- `cuts`: a fresh complaint that is `CUT_S` old, while both are heard all that time: the network between the two is cut.
  If both are needed for training, one must go. `smallest_cover` says who. One that computes in a call that holds the
  interpreter's lock accepts no connection, so that its kernel may answer nobody in the end: that is no cut.

Example: slots 0, 1, 2 on a, b, c, with r = 1. a and b complain of each other: a is fenced (the first by name), and its
slot goes to a spare. a joins again as d, and still cannot reach b; a spare is not needed, so that is no cut. Until
`REMEMBERED_S` after the last complaint, d gets a slot only if all others have such troubles too (`troubles`). A
coordinator that follows one that died has not heard of it: until all have tried each other it moves no slot (`learns`).

Whoever is fenced wrongly costs a repair and harms nothing: incarnations see to that (docs/protocol.md). The rules here
only choose whom it costs least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from itertools import combinations

from torch_ecrec.coordinator.members import HEARD_S, MemberRecord
from torch_ecrec.transport.accrual import Accrual

SILENT_S = 1.5  # with a complaint, it is taken for lost, until it is known what is usual; heartbeats come every 0.25 s
SILENT_LEAST_S, SILENT_MOST_S = 0.75, 5.0
CUT_S = 1.5
REMEMBERED_S = 30.0
LEARNS_S = 3.0  # within that members have tried each other, and said whom they cannot reach
PAUSE_LEAST_S, PAUSE_MOST_S = 3.0, 60.0  # between two that are fenced for cuts: twice as long each time
COVER_MOST = 8  # servers that are fenced at once, at most

Pair = tuple[str, str]


def smallest_cover(
    pairs: Collection[Pair], slots: Callable[[str], int], may: Callable[[Collection[str]], bool]
) -> set[str]:
    """Returns the fewest servers without which no pair is left.

    Args:
        pairs: who cannot reach whom.
        slots: how many slots a server hosts; 0: it is none that can be fenced.
        may: whether these can be spared together.

    Returns:
        Of several the one with the fewest slots, then the first by name. Empty: there is none.
    """
    servers = sorted({name for pair in pairs for name in pair if slots(name)}, key=lambda name: (slots(name), name))
    for size in range(1, min(len(servers), COVER_MOST) + 1):
        found = [set(some) for some in combinations(servers, size) if all({*some} & {*pair} for pair in pairs)]
        for some in sorted(found, key=lambda some: (sum(map(slots, some)), sorted(some))):
            if may(some):
                return some
    return set()


class Suspicion:
    """Complaints of members about members.

    Attributes:
        unresolved: pairs that nothing can be done about, as the coordinator decided last, and why.
        learns: a coordinator before may have known of pairs that have not been said again yet.
    """

    def __init__(self) -> None:
        self.unresolved: tuple[list[Pair], str] = ([], "")
        self.learns = False
        self._since: dict[Pair, float] = {}
        self._beats: dict[str, tuple[float, Accrual]] = {}  # when the last one came, and how they come
        self._computed: dict[str, float] = {}  # when one said last that it computes, and can say nothing else
        self._troubles: dict[frozenset[str], float] = {}  # two hosts -> until when it is remembered
        self._next_s = 0.0  # nobody is fenced before
        self._pause_s = PAUSE_LEAST_S
        self._learns_until_s = self._follows_until_s = 0.0
        self._woke_s = -math.inf  # when this process stood still last, until then

    def follow(self, now_s: float) -> None:
        """Begins to learn anew, as the coordinator before is gone, with what it remembered."""
        self._follows_until_s = now_s + REMEMBERED_S
        self.on_arrival(now_s)

    def on_arrival(self, now_s: float) -> None:
        """Notes that somebody has come: some members may try each other for the first time."""
        if now_s < self._follows_until_s:
            self.learns, self._learns_until_s = True, now_s + LEARNS_S

    def on_beat(self, who: str, unreachable: Iterable[str], known: dict[str, MemberRecord], now_s: float) -> None:
        """Notes a heartbeat, and whom its sender cannot reach; whom it does not name it reaches again."""
        last_s, usual = self._beats.get(who, (now_s, None))
        usual = usual or _usual()
        if last_s < now_s:
            usual.ended(now_s - last_s)
        self._beats[who] = now_s, usual
        accused = {whom for whom in unreachable if whom in known and known[whom].present}
        for pair in [pair for pair in self._since if pair[0] == who and pair[1] not in accused]:
            del self._since[pair]
        for whom in accused:
            self._since.setdefault((who, whom), now_s)
            self._troubles[_hosts(known[who], known[whom])] = now_s + REMEMBERED_S

    def on_computing(self, who: str, now_s: float) -> None:
        """Notes that a member is heard of, by no heartbeat: the time until the next one says nothing of how they
        come."""
        self._computed[who] = now_s
        if who in self._beats:
            self._beats[who] = now_s, self._beats[who][1]

    def forget_gone(self, known: dict[str, MemberRecord], now_s: float) -> bool:
        """Drops suspicions that are over. Returns whether two hosts are trusted to reach each other again, or the time
        of learning has ended."""
        gone = [pair for pair in self._since if not all(name in known and known[name].present for name in pair)]
        for pair in gone:
            del self._since[pair]
        self._beats = {who: beats for who, beats in self._beats.items() if who in known and known[who].present}
        self._computed = {who: at_s for who, at_s in self._computed.items() if now_s - at_s <= CUT_S}
        troubles = len(self._troubles)
        self._troubles = {hosts: until_s for hosts, until_s in self._troubles.items() if until_s > now_s}
        has_learned = self.learns and now_s >= self._learns_until_s
        if has_learned:
            self.learns = False
        return len(self._troubles) < troubles or has_learned

    def on_tick(self, since_s: float, now_s: float) -> None:
        """Leaves time out during which this process stood still: what was said meanwhile is not read yet.

        Args:
            since_s: since the last tick.
        """
        stood_still_s = since_s - HEARD_S
        if stood_still_s > 0:
            self._woke_s = now_s
            if self.learns:
                self._learns_until_s += stood_still_s
            self._troubles = {hosts: until_s + stood_still_s for hosts, until_s in self._troubles.items()}

    def complaints(self, now_s: float) -> list[tuple[str, str, float]]:
        """Returns who cannot reach whom, and for how long the coordinator has known."""
        return [(who, whom, now_s - since_s) for (who, whom), since_s in self._since.items()]

    def silent(self, known: dict[str, MemberRecord], now_s: float) -> dict[str, str]:
        """Members that neither the coordinator hears of nor who is named beside them can reach.

        Both may be on one host, whose own network is gone: then nobody of other hosts is heard. So somebody of a third
        host must be, where there is one. And what waited here while this process stood still, from before its network
        was gone perhaps, is no word of now: the accused must be silent for as long again.
        """
        found = {}
        for who, whom in self._since:
            silent_s = now_s - max(known[whom].heard_s, self._woke_s)
            fresh_s = min(silent_s / 2, HEARD_S)
            if silent_s < self.limit_s(whom) or now_s - known[who].heard_s > fresh_s:
                continue
            ends = {known[who].where, known[whom].where}
            third = [one for one in known.values() if one.present and one.where not in ends]
            if not third or any(now_s - one.heard_s <= fresh_s for one in third):
                found[whom] = who
        return found

    def beats(self, who: str) -> bool:
        """Returns whether heartbeats of this member have come."""
        return who in self._beats

    def limit_s(self, who: str) -> float:
        """Returns how long a member may be silent, as it was heard of until now."""
        return self._beats[who][1].limit_s if who in self._beats else SILENT_S

    def cuts(self, known: dict[str, MemberRecord], now_s: float, for_s: float = CUT_S) -> list[Pair]:
        """Pairs that are heard, both, and cannot reach each other, as has been said for so long.

        Of one that was silent itself meanwhile, only what is said since it is back counts: others have not tried again.
        """

        def heard(name: str) -> bool:
            answers = now_s - self._computed.get(name, -math.inf) > CUT_S  # who connects
            return answers and now_s - known[name].heard_s <= HEARD_S

        return sorted(
            pair
            for pair, since_s in self._since.items()
            if all(map(heard, pair)) and now_s - max(since_s, *(known[name].back_s for name in pair)) >= for_s
        )

    def troubles(self, server: str, needed: Collection[str], known: dict[str, MemberRecord]) -> int:
        """Returns how many of those who are needed it could not reach lately, or could not reach it."""
        others = [known[name] for name in needed if name != server and name in known]
        return sum(_hosts(known[server], other) in self._troubles for other in others)

    def may_fence(self, now_s: float) -> bool:
        """Returns whether it is long enough ago that somebody was fenced for a cut."""
        if now_s > self._next_s + PAUSE_MOST_S:
            self._pause_s = PAUSE_LEAST_S
        return now_s >= self._next_s

    def fenced(self, now_s: float) -> None:
        """Notes that somebody was given up: the next one not before a pause, which grows."""
        self._next_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, PAUSE_MOST_S)


def _usual() -> Accrual:
    return Accrual(SILENT_S, SILENT_LEAST_S, SILENT_MOST_S)


def _hosts(one: MemberRecord, other: MemberRecord) -> frozenset[str]:
    """Returns the hosts of two members, which outlive their names; their names if both are of one host, or none is
    known."""
    if one.host and other.host and one.host != other.host:
        return frozenset((one.host, other.host))
    return frozenset((one.name, other.name))
