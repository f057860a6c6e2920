"""The lead of a cluster, as a process keeps it: over an etcd in memory, with its own thread and clock."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import wait_until

from torch_ecrec.coordinator.election import RENEWS, Standing
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes import leadership
from torch_ecrec.processes.leadership import Office
from torch_ecrec.testing.etcd import VirtualEtcd
from torch_ecrec.testing.standbys import Keys
from torch_ecrec.transport.etcd import NOBODY, EtcdUnavailable, Last

LIMIT_S = 60.0
LEASE_S = 2


class Ending(Keys):
    """Of an etcd that answers `unheard` of those calls too late that say that a run is over."""

    unheard = renewed = 0

    def renew(self, lease: int) -> bool:
        self.renewed += 1
        return super().renew(lease)

    def write(self, said: Last, last: Last) -> bool:
        if self.unheard and said.over:
            self.unheard -= 1
            raise EtcdUnavailable("late")
        return super().write(said, last)

    @property
    def last(self) -> Last:
        return self.look()[1]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Ending:
    found = Ending(VirtualEtcd(), time.monotonic)
    monkeypatch.setattr(leadership, "EtcdKeys", lambda *_: found)
    return found


def standing_by(lease_s: int = LEASE_S) -> Office:
    return Office("etcd://a/ads", ("here", 1), lease_s, lambda: "none", NOBODY)


def office() -> Office:
    found = standing_by()
    assert found.stand(lambda: None) is Standing.LEADING
    return found


def test_who_does_nothing_any_more_keeps_no_lead(keys: Ending) -> None:
    """Its threads go on, but for the one that acts: the lease was renewed for ever."""
    hangs, leads = threading.Event(), office()
    leads.keep(lambda: None, hangs.is_set)
    wait_until(lambda: keys.renewed > RENEWS + 1, LIMIT_S, "longer than a lease has gone by")
    wait_until(lambda: leads.holds and keys.leader() is not None, LIMIT_S, "it leads")
    hangs.set()
    wait_until(lambda: keys.leader() is None and not leads.holds, LIMIT_S, "its lease ends")
    hangs.clear()
    wait_until(lambda: leads.holds, LIMIT_S, "nobody has led meanwhile: it leads again")
    leads.close(over=False)
    assert keys.leader() is None and keys.last.run == leads.run


@pytest.mark.parametrize("unheard", [0, 3, 10**6])
def test_the_end_of_a_run_is_said_again(keys: Ending, unheard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "ENDS_S", 1.0)
    keys.unheard = unheard
    office().close(over=True)
    assert keys.last.over == (unheard <= 10)


def test_the_end_of_a_run_is_said_to_an_etcd_that_has_forgotten_it(keys: Ending) -> None:
    leads = office()
    keys._etcd.forget()
    leads.close(over=True)
    assert keys.last.over and keys.last.run == leads.run and keys.last.counts_from > 0


def test_who_leads_says_so_again_where_etcd_has_forgotten(keys: Ending, caplog: pytest.LogCaptureFixture) -> None:
    leads = office()
    before = keys.leader()
    assert before is not None
    leads.keep(lambda: None, lambda: False)
    keys._etcd.forget()
    wait_until(lambda: (found := keys.leader()) is not None and found.revision > before.revision, LIMIT_S, "it leads")
    assert leads.holds and keys.last.run == leads.run and leads.led == before.revision
    assert "etcd knows nothing of this run any more" in caplog.text
    leads.close(over=False)


def test_who_waits_for_leases_of_another_length_stands_by_nobody(keys: Ending) -> None:
    """It would take the lead too early, or too late, where etcd has forgotten who leads."""
    keys._etcd.last = Last("before", "earlier", 3, over=True)
    leads = standing_by(300)
    assert leads.stand(lambda: None) is Standing.LEADING
    with pytest.raises(
        ClusterError, match="here:1, which leads at etcd://a/ads, has --leader-lease 300, and this one 2"
    ):
        standing_by().stand(lambda: None)
    leads.close(over=True)
    assert office().holds, "nobody leads any more"


def test_a_defect_costs_the_lead(
    keys: Ending, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ended without a word: the process acted no more, and knew nothing of it."""
    fenced, leads = threading.Event(), office()
    monkeypatch.setattr(leads._candidate, "step", lambda: 1 / 0)
    leads.keep(fenced.set, lambda: False)
    assert fenced.wait(LIMIT_S) and "ZeroDivisionError" in caplog.text
    leads.close(over=False)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock")
def test_a_lease_ends_while_its_host_is_suspended(keys: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s, now = [0.0], time.clock_gettime
    monkeypatch.setattr(
        leadership.time, "clock_gettime", lambda which: now(which) + (which == time.CLOCK_BOOTTIME) * slept_s[0]
    )
    keys._etcd.last = Last("before", "earlier", 3, over=True)
    leads = standing_by(300)
    assert leads.stand(lambda: None) is Standing.LEADING and leads.holds
    slept_s[0] = 301.0
    assert not leads.holds
    leads.close(over=False)
