"""The lead of a cluster, as a process keeps it: over an etcd in memory, with its own thread and clock."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import wait_until
from harness.etcd import VirtualEtcd

from torch_ecrec.coordinator.election import RENEWS, EtcdPutBack, Standing
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes import coordination, leadership
from torch_ecrec.processes.leadership import LeaderGate, LeaderLease
from torch_ecrec.protocol.build import Build
from torch_ecrec.protocol.messages import whole_build
from torch_ecrec.transport.etcd import EtcdUnavailable, Run

LIMIT_S = 60.0
LEASE_S = 2


class Ending(VirtualEtcd):
    """Of an etcd that answers `unheard` of those calls too late that say that a run is over."""

    unheard = renewed = 0

    def renew(self, lease: int) -> bool:
        self.renewed += 1
        return super().renew(lease)

    def end(self, run: Run) -> bool:
        if self.unheard:
            self.unheard -= 1
            raise EtcdUnavailable("late")
        return super().end(run)

    def leads(self) -> bool:
        return self.look().leader is not None

    @property
    def newest(self) -> Run:
        found = self.look().run
        assert found is not None
        return found


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Ending:
    found = Ending(time.monotonic)
    monkeypatch.setattr(leadership, "EtcdKeys", lambda *_: found)
    return found


def standing_by(lease_s: int = LEASE_S) -> LeaderLease:
    return LeaderLease("etcd://a/ads", ("here", 1), lease_s, lambda: "none", None)


def office() -> LeaderLease:
    found = standing_by()
    assert found.stand(lambda: None) is Standing.LEADING
    return found


def test_what_waits_for_the_lead_is_done_in_order() -> None:
    holds, done = False, list[object]()
    gate = LeaderGate(lambda: holds)
    for number in range(leadership.WAITING_MOST):
        gate.do(lambda number=number: done.append(number), in_place_of="beat" if number % 2 else None)
    assert not gate.go_on() and not done and len(gate) == leadership.WAITING_MOST, "for a moment, each word counts"
    holds = True
    assert gate.go_on() and done == [*range(leadership.WAITING_MOST)] and not len(gate)
    gate.do(lambda: done.append("now"), in_place_of="beat")
    assert done[-1] == "now"


def test_what_is_said_again_and_again_fills_no_memory_while_etcd_is_away() -> None:
    """Ten members say four times a second that they live, for an hour; and some things happen once."""
    holds, done, others = False, list[tuple[str, int]](), 0
    gate = LeaderGate(lambda: holds)
    for number in range(10 * 4 * 3600):
        word = f"beat of {number % 10}", number
        gate.do(lambda word=word: done.append(word), in_place_of=word[0])
        if number % 1000 == 0:
            others += 1
            gate.do(lambda number=number: done.append(("once", number)))
    assert len(gate) <= leadership.WAITING_MOST + others + 10
    holds = True
    assert gate.go_on() and not len(gate)
    assert [number for what, number in done if what == "once"] == [*range(0, 144_000, 1000)]
    assert [number for _, number in done] == sorted(number for _, number in done), "in order"
    newest = dict(done)
    assert all(newest[f"beat of {member}"] == 143_990 + member for member in range(10))


def test_words_that_are_said_again_are_those_of_one_member() -> None:
    peers = object(), object()
    beats = [{"type": "beat"}, {"type": "beat", "report": {"slots": []}}, {"type": "progress"}, {"type": "leave"}]
    marks = [[coordination._said_again(peer, word) for word in beats] for peer in peers]  # type: ignore[arg-type]
    assert marks[0][3] is None and len({*marks[0][:3], *marks[1][:3]}) == 6


def test_who_does_nothing_any_more_keeps_no_lead(keys: Ending) -> None:
    """Its threads go on, but for the one that acts: the lease was renewed for ever."""
    hangs, fenced, leads = threading.Event(), threading.Event(), office()
    leads.keep(fenced.set, hangs.is_set)
    wait_until(lambda: keys.renewed > RENEWS + 1, LIMIT_S, "longer than a lease has gone by")
    wait_until(lambda: leads.holds and keys.leads(), LIMIT_S, "it leads")
    hangs.set()
    wait_until(lambda: not keys.leads() and not leads.holds, LIMIT_S, "its lease ends")
    hangs.clear()
    assert fenced.wait(LIMIT_S) and not leads.holds
    leads.close(over=False)
    assert keys.newest.word == leads.candidate.run and not keys.newest.over


@pytest.mark.parametrize("unheard", [0, 3, 10**6])
def test_the_end_of_a_run_is_said_again(keys: Ending, unheard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "ENDS_S", 1.0)
    keys.unheard = unheard
    office().close(over=True)
    assert keys.newest.over == (unheard <= 10)


def test_an_etcd_that_has_lost_its_data_is_named_and_ends_the_lead(
    keys: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    """Who leads does not act any more, and who stands by again, in that process, says it once more, and ends."""
    fenced, leads = threading.Event(), office()
    leads.keep(fenced.set, lambda: False)
    wait_until(lambda: keys.renewed > 1, LIMIT_S, "it has looked")
    keys.forget()
    assert fenced.wait(LIMIT_S)
    wait_until(lambda: not leads.holds, LIMIT_S, "it acts no more")
    assert "has lost its data" in caplog.text and "start all coordinators again" in caplog.text
    leads.close(over=True)
    assert keys.look().run is None, "its end is nobody's business any more"
    with pytest.raises(EtcdPutBack, match="start all coordinators again"):
        LeaderLease("etcd://a/ads", ("here", 1), LEASE_S, lambda: "none", leads.candidate.view).stand(lambda: None)
    assert office().holds, "one that is started again leads"


def test_who_waits_for_leases_of_another_length_stands_by_nobody(keys: Ending) -> None:
    """It would take the lead too early, where etcd has lost its data."""
    keys.run, lease = Run("run", "another", "none", revision=10), keys.grant(300)
    keys.take(("here", 1), lease, 300, Run("run", "another", "none"), 10)
    with pytest.raises(
        ClusterError, match="here:1, which leads at etcd://a/ads, has --leader-lease 300, and this one 2"
    ):
        standing_by().stand(lambda: None)
    keys.end(keys.newest)
    assert office().holds, "nobody leads any more"


def told(version: str, **more: str) -> str:
    return Build(version, {**whole_build().messages, **more}).told().decode()


@pytest.mark.parametrize("leads", [True, False], ids=["led", "nobody-leads"])
def test_who_is_of_another_build_stands_by_nobody(keys: Ending, leads: bool) -> None:
    """It would lead at the next election. While nobody leads, that would be at once."""
    lease = keys.grant(LEASE_S if leads else 0)
    keys.run = Run("run", "another", "none", revision=10, build=told("9.9.1", Adopt="0"))
    if leads:
        keys.take(("here", 1), lease, LEASE_S, keys.run, 10)
    with pytest.raises(
        ClusterError, match=r"may not stand by at etcd://a/ads: .*version 9\.9\.1, here .*: Adopt\)\. St"
    ):
        standing_by().stand(lambda: None)
    assert keys.newest.leader == "another"
    keys.end(keys.newest)
    assert office().holds, "the run is over: who is next begins another"


@pytest.mark.parametrize("build", ["", told("9.9.1")], ids=["of-before", "compatible"])
def test_who_is_of_a_compatible_build_stands_by_and_leads(keys: Ending, build: str) -> None:
    keys.run = Run("run", "another", "none", revision=10, build=build)
    found = office()
    assert found.candidate.again and keys.newest.word == "run"
    assert keys.newest.build == whole_build().told().decode(), "it says which it is"


def test_a_defect_costs_the_lead(
    keys: Ending, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ended without a word: the process acted no more, and knew nothing of it."""
    fenced, leads = threading.Event(), office()
    monkeypatch.setattr(leads.candidate, "ask", lambda now_s: 1 / 0)
    leads.keep(fenced.set, lambda: False)
    assert fenced.wait(LIMIT_S) and "ZeroDivisionError" in caplog.text
    leads.close(over=False)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock")
def test_a_lease_ends_while_its_host_is_suspended(keys: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s, now = [0.0], time.clock_gettime
    monkeypatch.setattr(
        leadership.time, "clock_gettime", lambda which: now(which) + (which == time.CLOCK_BOOTTIME) * slept_s[0]
    )
    leads = office()
    assert leads.holds
    slept_s[0] = LEASE_S
    assert not leads.holds
    leads.close(over=False)
