"""etcd as the coordinators of a cluster see it, on a virtual clock, with candidates that run beside each other.

    run = Elections(candidates=2, faults={7: Fault("unanswered")})
    run.until(30.0)

Each call of a candidate is a moment: it may fail before it is done or after, be done late, or take long, and the other
candidates go on meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_ecrec.coordinator.election import FORGOTTEN_LEASES, RETRY_S, SETTLED, Candidate, Standing
from torch_ecrec.testing.etcd import VirtualEtcd
from torch_ecrec.transport.etcd import NOBODY, EtcdUnavailable, Last, Leader

T = TypeVar("T")
TTL_S = 2
CALL_S = 0.01
SOON_S = (2.5 + SETTLED) * TTL_S
BEGAN_S = 1e9  # of the time of day


@dataclass(frozen=True)
class Fault:
    """What happens at a call.

    Args:
        kind: "refused": nothing is done, and an error comes. "unanswered": it is done, and an error comes. "late": an
            error comes, and it is done after `seconds`. "slow": it takes so long, half of it before it is done.
            "outage": etcd answers nobody for so long, and no lease ends. "forgets": likewise, and then it is empty.
        seconds: see there.
    """

    kind: str
    seconds: float = 0.0


class Caller:
    """The `Keys` of one candidate."""

    def __init__(self, run: Elections, number: int) -> None:
        self._run, self._number = run, number

    def _call(self, do: Callable[[], T]) -> T:
        return self._run.call(self._number, do)

    def look(self) -> tuple[Leader | None, Last]:
        return self._call(self._run.etcd.look)

    def grant(self, ttl_s: int) -> int:
        return self._call(lambda: self._run.etcd.grant(ttl_s, self._run.now_s))

    def renew(self, lease: int) -> bool:
        return self._call(lambda: self._run.etcd.renew(lease, self._run.now_s))

    def revoke(self, lease: int) -> None:
        try:
            self._call(lambda: self._run.etcd.revoke(lease))
        except EtcdUnavailable:
            return

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
        return self._call(lambda: self._run.etcd.take(me, address, lease, last))

    def write(self, said: Last, last: Last) -> bool:
        return self._call(lambda: self._run.etcd.write(said, last))


class Elections:
    """Candidates beside each other.

    Args:
        candidates: how many.
        faults: by the number of the call, of all candidates together.
        pauses: (candidate, from, to): it does nothing then.
        empty: etcd knows nothing, else it knows of a run that is over.
        replaced: a candidate that is fenced is followed by another, as its process would be.

    Attributes:
        calls: made so far.
        fired: faults that were.
        led: ids of who has led, in order.
        disturbed_s: until when there were faults and pauses.
        word: of the run.
        soon_s: for one to lead, once nothing is disturbed any more.
        forgot: etcd has been empty, and nobody has led since: who led may act, although etcd does not say so.
    """

    def __init__(
        self,
        candidates: int = 2,
        faults: Mapping[int, Fault] | None = None,
        pauses: tuple[tuple[int, float, float], ...] = (),
        replaced: bool = True,
        empty: bool = False,
    ) -> None:
        self.now_s, self.etcd, self.calls = 0.0, VirtualEtcd(), 0
        if not empty:
            self.etcd.last = Last("before", "a run that is over", self.etcd.revision, over=True)
        self.fired: list[Fault] = []
        self.led: list[str] = []
        self.forgot, self.word, self.soon_s = False, "", SOON_S
        self.disturbed_s = max((until_s for _, _, until_s in pauses), default=0.0)
        self._faults, self._pauses, self._replaced = dict(faults or {}), pauses, replaced
        self._later: list[tuple[float, Callable[[], Any]]] = []
        self._out_until_s, self._newest = 0.0, 0
        self.candidates = [self._candidate(i) for i in range(candidates)]
        self._due = [0.1 * i for i in range(candidates)]
        self._busy, self._ended = set[int](), set[int]()

    def _candidate(self, number: int, known: Last = NOBODY) -> Candidate:
        return Candidate(
            Caller(self, number),
            (f"host{number}", 1),
            TTL_S,
            lambda: f"run{number}",
            lambda: self.now_s,
            lambda: f"what run{number} begins with",
            known,
            lambda: BEGAN_S + self.now_s,
        )

    def fault(self, call: int, fault: Fault) -> None:
        """One more."""
        self._faults[call] = fault

    def forget(self, out_s: float = 0.0) -> None:
        """etcd answers nobody for so long, and is empty then."""
        self.etcd.forget()
        self.forgot, self._out_until_s = True, self.now_s + out_s
        self.disturbed_s = max(self.disturbed_s, self._out_until_s)
        self.soon_s = SOON_S + FORGOTTEN_LEASES * TTL_S

    def join(self) -> Candidate:
        """One more, that knows nothing."""
        self.candidates.append(self._candidate(len(self.candidates)))
        self._due.append(self.now_s)
        return self.candidates[-1]

    def end(self) -> str:
        """Who leads ends the run, and itself. Returns its id."""
        number = next(i for i, one in enumerate(self.candidates) if one.holds)
        one = self.candidates[number]
        self._ended.add(number)
        self._due[number] = math.inf
        assert self.etcd.write(over(one, self.etcd.last), self.etcd.last)
        one.resign()
        self.led, self.word = [], ""
        return one.id

    def until(self, end_s: float) -> Elections:
        """Lets time pass."""
        while self.now_s < end_s:
            self.pass_to(min(self.now_s + CALL_S, end_s))
        return self

    def pass_to(self, now_s: float) -> None:
        """Time passes, and whoever is not in the middle of a call does what is due."""
        while (number := self._next(now_s)) is not None:
            self.now_s = max(self.now_s, self._due[number])
            self._look()
            self._step(number)
        self.now_s = max(self.now_s, now_s)
        self._look()

    def _next(self, now_s: float) -> int | None:
        free = [i for i in range(len(self.candidates)) if i not in self._busy and self._due[i] <= now_s]
        return min(free, key=lambda i: self._due[i], default=None)

    def _step(self, number: int) -> None:
        for who, from_s, to_s in self._pauses:
            if who == number and from_s <= self.now_s < to_s:
                self._due[number] = to_s
                return
        self._busy.add(number)
        try:
            wait_s = self.candidates[number].step()
        except EtcdUnavailable:
            wait_s = RETRY_S
        self._busy.discard(number)
        if number in self._ended:  # meanwhile
            return
        self._due[number] = self.now_s + max(wait_s, CALL_S)
        if self.candidates[number].standing is Standing.FENCED and self._replaced:
            self.candidates[number] = self._candidate(number, self.candidates[number].known)

    def call(self, number: int, do: Callable[[], T]) -> T:
        """A call of a candidate."""
        self.calls += 1
        fault = self._faults.get(self.calls, Fault("none"))
        if fault.kind != "none":
            self.fired.append(fault)
            self.disturbed_s = max(self.disturbed_s, self.now_s + fault.seconds)
        if fault.kind in ("outage", "forgets"):
            self._out_until_s = self.now_s + fault.seconds
            kept = {lease: (ttl_s, until_s + fault.seconds) for lease, (ttl_s, until_s) in self.etcd.leases.items()}
            self.etcd.leases = kept
            if fault.kind == "forgets":
                self.forget(fault.seconds)
        self.pass_to(self.now_s + (fault.seconds / 2 if fault.kind == "slow" else CALL_S / 2))
        if fault.kind in ("refused", "late") or self.now_s < self._out_until_s:
            if fault.kind == "late":
                self._later.append((self.now_s + fault.seconds, do))
            raise EtcdUnavailable(fault.kind)
        found = do()
        self._look()
        self.pass_to(self.now_s + (fault.seconds / 2 if fault.kind == "slow" else CALL_S / 2))
        if fault.kind == "unanswered":
            raise EtcdUnavailable(fault.kind)
        return found

    def _look(self) -> None:
        """Whoever acts is who etcd says, and nobody acts again after another has."""
        for at_s, do in list(self._later):
            if at_s <= self.now_s:
                self._later.remove((at_s, do))
                try:
                    do()
                except EtcdUnavailable:
                    continue
        self.etcd.expire(self.now_s)
        holding = [one for one in self.candidates if one.holds]
        for one in holding:
            leader = self.etcd.leader
            knows = leader is not None and leader.id == one.id
            assert knows or (self.forgot and leader is None), f"{one.id} acts, and {leader} leads"
            self.forgot = self.forgot and leader is None
            if leader is not None:
                assert leader.revision >= self._newest, "members follow a leader of before"
                self._newest = leader.revision
            if not self.led or self.led[-1] != one.id:
                assert one.id not in self.led, "who was followed by another acts again"
                assert one.again or not self.led, "somebody has led before"
                self.led.append(one.id)
        self.word = self.word or (self.run if self.led else "")
        assert {one.run for one in holding} <= {self.word}, "the word of the run"
        assert len(holding) <= 1, "one acts"
        assert all(one.began_with == f"what {one.run} begins with" for one in holding), "what the run began with"

    @property
    def run(self) -> str:
        return self.etcd.last.run


def over(one: Candidate, last: Last) -> Last:
    """What it writes at the end of its run."""
    return dataclasses.replace(one._me(last), over=True)


def faults() -> list[Fault]:
    """Every kind, short and longer than a lease."""
    plain = [Fault("refused"), Fault("unanswered")]
    return plain + [Fault(kind, seconds) for kind in ("late", "slow", "outage") for seconds in (0.3, 1.9, 2.5, 7.0)]


def describe(fault: Fault) -> str:
    return " ".join(map(str, dataclasses.astuple(fault)))
