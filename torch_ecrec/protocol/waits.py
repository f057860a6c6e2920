"""For which servers others wait: the time in which an answer of one is still out, and most others have answered.

Trainers wait for lookups, and servers for folds that those who hold their parities acknowledge: each is a *round*. Of a
round that several servers answer, a server is *late* from the moment on at which half of the others have
answered. What all wait for alike (another trainer's push, a busy trainer) is so no server's, and up to half of the
servers may be late at once. Example: of three servers b answers after 2 ms, c after 3 ms, a after 500 ms: a is late for
498 ms, and c for 1 ms; `usual_s` is 2 ms.

Pure bookkeeping: the time is an argument, and nothing is averaged here. Time that passes while two rounds wait for the
same server counts once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from torch_ecrec.protocol.status import WaitedFor


class Round:
    """One lookup, or one step's folds: the servers whose answers are out, each with how many.

    Half of the `others` are to answer first.
    """

    def __init__(self, servers: Collection[str], now_s: float) -> None:
        self.out = Counter(servers)
        self.others, self.since_s, self.usual = len(self.out) - 1, now_s, False


class ServerWaits:
    """Since it was asked last (`take`), for whom one process has waited.

    Args:
        now_s: of a clock that only goes forward, as everywhere here.
    """

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._rounds: dict[Round, None] = {}
        self._late: Counter[str] = Counter()  # server -> rounds in which it is
        self._late_since_s: dict[str, float] = {}
        self._late_s: defaultdict[str, float] = defaultdict(float)
        self._lookups, self._usual_s = 0, 0.0
        self._held_s, self._held_since_s = 0.0, math.inf

    def asked(self, servers: Collection[str], now_s: float) -> Round:
        """Notes that a round has gone out. `servers`: the host of each slot that is asked."""
        one = Round(servers, now_s)
        if one.others:  # of one alone nobody can say that it is late
            self._rounds[one] = None
            self._lookups += 1
        return one

    def answered(self, one: Round, server: str, now_s: float) -> None:
        """Notes that a slot of a server has answered."""
        if one not in self._rounds or one.out[server] == 0:
            return
        one.out[server] -= 1
        if one.out[server]:
            return
        del one.out[server]
        if one.usual:
            self._is_here(server, now_s)
        elif 2 * (one.others + 1 - len(one.out)) >= one.others:
            one.usual = True
            self._usual_s += now_s - one.since_s
            for late in one.out:
                self._late_since_s.setdefault(late, now_s)
                self._late[late] += 1
        if not one.out:
            del self._rounds[one]

    def end(self, one: Round, now_s: float) -> None:
        """Ends a round for which nobody waits any more."""
        if self._rounds.pop(one, self) is None and one.usual:
            for server in one.out:
                self._is_here(server, now_s)

    def end_all(self, now_s: float) -> None:
        """Slots are elsewhere: what is out is asked again there, and says nothing of those who were asked before."""
        for one in list(self._rounds):
            self.end(one, now_s)

    def held(self, is_so: bool, now_s: float) -> None:
        """Notes that a trainer may not go on, since earlier steps are not acknowledged; or may again."""
        if is_so:
            self._held_since_s = now_s
        elif not math.isinf(self._held_since_s):
            self._held_s += now_s - self._held_since_s
            self._held_since_s = math.inf

    def _is_here(self, server: str, now_s: float) -> None:
        self._late[server] -= 1
        if not self._late[server]:
            del self._late[server]
            self._late_s[server] += now_s - self._late_since_s.pop(server)

    def take(self, now_s: float) -> WaitedFor:
        """Returns what was waited for since the last call, and begins to count anew."""
        for server, since_s in self._late_since_s.items():
            self._late_s[server] += now_s - since_s
            self._late_since_s[server] = now_s
        if not math.isinf(self._held_since_s):
            self._held_s += now_s - self._held_since_s
            self._held_since_s = now_s
        found = WaitedFor(now_s - self._since_s, self._lookups, self._usual_s, dict(self._late_s), self._held_s)
        self._since_s, self._lookups, self._usual_s, self._held_s = now_s, 0, 0.0, 0.0
        self._late_s.clear()
        return found


class SlotWaits:
    """`ServerWaits` of one process, by slots: it knows the time, and where they live.

    Args:
        now_s: of a clock that only goes forward.
        host_of: the server that hosts a slot; None: not known yet.
    """

    def __init__(self, now_s: Callable[[], float], host_of: Callable[[int], str | None]) -> None:
        self._now_s, self._host_of = now_s, host_of
        self._servers = ServerWaits(now_s())

    def begin(self, slots: Collection[int]) -> Round:
        """Begins a round: all of these are asked at once."""
        return self._servers.asked([host for slot in slots if (host := self._host_of(slot))], self._now_s())

    def answered(self, one: Round, slot: int) -> None:
        """Notes that a slot has answered."""
        if (host := self._host_of(slot)) is not None:
            self._servers.answered(one, host, self._now_s())

    def end(self, one: Round) -> None:
        """Ends a round for which nobody waits any more."""
        self._servers.end(one, self._now_s())

    def end_all(self) -> None:
        """Slots are elsewhere from now on."""
        self._servers.end_all(self._now_s())

    def held(self, is_so: bool) -> None:
        """Notes that a trainer may not go on, or may again, as `ServerWaits.held` does."""
        self._servers.held(is_so, self._now_s())

    def take(self) -> WaitedFor:
        """Returns what was waited for since the last call, as `ServerWaits.take` does."""
        return self._servers.take(self._now_s())
