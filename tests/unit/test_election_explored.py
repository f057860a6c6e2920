"""Which of several coordinators leads: all states of two of them within a few leases.

What may happen in them is in `tests/support/election_states.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from election_states import TTL, State, explore, go_on, led
from harness.etcd import VirtualEtcd

from torch_ecrec.coordinator import election
from torch_ecrec.coordinator.election import Candidate, Renew
from torch_ecrec.transport.etcd import Run


def lost() -> State:
    """One leads, and etcd loses its data."""
    return led().lose()[1]


def put_back() -> State:
    """The first has led, and was stopped as it was about to renew its lease. The second leads, and etcd is put back to
    when the first led."""
    state = led().tick().ask(0)[1].hear(0)[1]
    assert isinstance(state.processes[0].one.ask(state.now), Renew)
    state.backup = state.etcd.copy()
    state = go_on(state, TTL + 1, stopped=0)
    assert state.processes[1].one.holds(state.now)
    return state.lose()[1]


FIRST, LED, LOST, PUT_BACK = (State, 2, 1_000), (led, 4, 15_000), (lost, 4, 1_000), (put_back, 3, 1_000)


@pytest.mark.parametrize(("begin", "ticks", "least"), [FIRST, LED, LOST, PUT_BACK])
def test_every_state(begin: Callable[[], State], ticks: int, least: int) -> None:
    found = explore(begin(), ticks)
    print(f"{found} states")
    assert found > least


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("begin", "ticks", "losses"), [(State, 3, 0), (led, 5, 0), (lost, 5, 0), (put_back, 4, 0), (led, 4, 1)]
)
def test_every_state_of_a_longer_time(begin: Callable[[], State], ticks: int, losses: int) -> None:
    print(f"{explore(begin(), ticks, losses)} states")


# mutations ----------------------------------------------------------------------------------------


def acts_for_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "MARGIN", 1.6)


def counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Its lease, not from when it asked for it."""
    on_renewed = Candidate._on_renewed

    def later(self: Candidate, was_there: bool, now_s: float) -> float:
        self._asked_s = now_s
        return on_renewed(self, was_there, now_s)

    patch.setattr(Candidate, "_on_renewed", later)


def leads_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    on_renewed = Candidate._on_renewed
    patch.setattr(Candidate, "_on_renewed", lambda self, was_there, now_s: on_renewed(self, True, now_s))


def believes_an_old_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "FRESH", math.inf)


def does_not_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidate, "_has_watched", True)


def takes_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    """It writes over a leader, and a run that it has not read."""

    def take(self: VirtualEtcd, address: tuple[str, int], lease: int, ttl_s: int, run: Run, seen: int) -> None:
        self.leader = None
        before(self, address, lease, ttl_s, run, 0 if self.run is None else self.run.revision)

    before = VirtualEtcd.take
    patch.setattr(VirtualEtcd, "take", take)


MUTATIONS = [
    (acts_for_longer, LED),
    (counts_from_the_answer, LED),
    (leads_without_its_lease, LED),
    (takes_whatever_is_there, FIRST),
    (does_not_watch, LOST),
    (believes_an_old_look, PUT_BACK),
]


@pytest.mark.parametrize(("mutate", "where"), MUTATIONS)
def test_a_mutation_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None],
    where: tuple[Callable[[], State], int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, ticks, _ = where
    mutate(monkeypatch)
    with pytest.raises(AssertionError) as found:
        explore(begin(), ticks)
    print(found.value)
