"""Candidates beside each other on a virtual clock, with faults at their questions: `coordinator/election.py` over time.

    run = Elections(2, {7: Fault("unanswered")})
    run.until(30.0)

A question is done half of `CALL_S` after it was asked, and answered as much later. Each may go wrong.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.etcd import VirtualEtcd

from torch_ecrec.coordinator.election import Begin, Candidate, EtcdPutBack, Standing
from torch_ecrec.transport.etcd import EtcdUnavailable, View

TTL_S = 2
CALL_S = 0.01


@dataclass(frozen=True)
class Fault:
    """What happens at a question.

    Args:
        kind: "refused": nothing is done, and there is no answer. "unanswered": it is done. "late": there is no answer,
            and it is done after `seconds`. "slow": it takes so long, half of it before it is done. "outage": etcd
            answers nobody for so long, and leases begin anew then. "stopped": its process is, after it has asked.
        seconds: see there.
    """

    kind: str
    seconds: float = 0.0


class Elections:
    """Candidates beside each other.

    Args:
        candidates: how many.
        faults: by the number of the question, of all candidates together.
        pace_s: how long each question takes.

    Attributes:
        asked: questions so far; `fired`: faults that were.
        led: ids of who has acted, in order.
        disturbed_s: until when there were faults.
    """

    def __init__(
        self,
        candidates: int = 2,
        faults: Mapping[int, Fault] | None = None,
        pace_s: Callable[[], float] = lambda: CALL_S,
    ) -> None:
        self.now_s, self.etcd = 0.0, VirtualEtcd(lambda: self.now_s)
        self.asked, self.fired, self.led, self.disturbed_s = 0, list[Fault](), list[str](), 0.0
        self._faults, self._pace_s, self._out_until_s = dict(faults or {}), pace_s, 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self.lives = itertools.count(), itertools.count()
        self.candidates: list[Candidate] = []
        for _ in range(candidates):
            self.join()

    def join(self, at: int = -1, known: View | None = None) -> Candidate:
        """One more; or one in the place of another, whose process goes on."""
        life = next(self.lives)
        one = Candidate(f"c{life}", (f"host{life}", 1), TTL_S, f"run{life}", known)
        if at < 0:
            self.candidates.append(one)
        else:
            self.candidates[at] = one
        self.at(self.now_s + 0.1 * len(self.candidates), lambda: self._ask(one))
        return one

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when_s, next(self._count), do))

    def until(self, end_s: float) -> Elections:
        """Lets time pass."""
        while self._later and self._later[0][0] <= end_s:
            when_s, _, do = heapq.heappop(self._later)
            self.now_s = max(self.now_s, when_s)
            do()
            self.check()
        self.now_s = max(self.now_s, end_s)
        return self

    @property
    def pending(self) -> bool:
        """Not all faults were yet."""
        return len(self.fired) < len(self._faults)

    def acting(self) -> list[Candidate]:
        return [one for one in self.candidates if one.holds(self.now_s)]

    def check(self) -> None:
        """Whoever acts is who etcd says, and nobody acts again after another has."""
        acting, leader = self.acting(), self.etcd.leader
        assert len(acting) <= 1, f"{[one.id for one in acting]} act"
        for one in acting:
            assert leader is not None and (leader.id, leader.revision) == (one.id, one.led), f"{leader} leads"
            if not self.led or self.led[-1] != one.id:
                assert one.id not in self.led, "who was followed by another acts again"
                assert one.again or not self.led, "somebody has led before"
                self.led.append(one.id)

    def _ask(self, one: Candidate) -> None:
        if one not in self.candidates or one.standing is Standing.OVER:
            return
        self.asked += 1
        fault = self._faults.get(self.asked, Fault("none"))
        if fault.kind != "none":
            self.fired.append(fault)
            self.disturbed_s = max(self.disturbed_s, self.now_s + fault.seconds)
        question, takes_s, answered = one.ask(self.now_s), self._pace_s(), list[Any]()
        slow_s = takes_s + (fault.seconds if fault.kind == "slow" else 0.0)
        woken_s = self.now_s + (fault.seconds if fault.kind == "stopped" else 0.0)
        if fault.kind == "outage":
            self._out_until_s = self.now_s + fault.seconds
            self.etcd.leases = {lease: (TTL_S, self._out_until_s + TTL_S) for lease in self.etcd.leases}

        def effect() -> None:
            if self.now_s < self._out_until_s:
                return
            try:
                answered.append("what it begins with" if isinstance(question, Begin) else question.of(self.etcd))
            except EtcdUnavailable:
                return

        def answer() -> None:
            heard = bool(answered) and fault.kind not in ("unanswered", "late")
            try:
                wait_s = one.answer(answered[0], self.now_s) if heard else one.fail()
            except EtcdPutBack:
                self.join(self.candidates.index(one))
                return
            if one.standing is Standing.FENCED:
                self.join(self.candidates.index(one), one.view)
            self.at(self.now_s + wait_s, lambda: self._ask(one))

        if fault.kind != "refused":
            self.at(self.now_s + (fault.seconds if fault.kind == "late" else slow_s / 2), effect)
        self.at(max(self.now_s + slow_s, woken_s), answer)


def faults() -> list[Fault]:
    """Every kind, short and longer than a lease."""
    lasting = [
        Fault(kind, seconds) for kind in ("late", "slow", "outage", "stopped") for seconds in (0.3, 1.9, 2.5, 7.0)
    ]
    return [Fault("refused"), Fault("unanswered"), *lasting]


def describe(fault: Fault) -> str:
    return " ".join(map(str, dataclasses.astuple(fault)))
