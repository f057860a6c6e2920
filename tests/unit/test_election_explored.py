"""Which of several coordinators leads: random schedules, and the ones that were found to break it once.

What may happen in them, and what must hold, is in `tests/support/election_explorer.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from election_explorer import run, schedule
from election_processes import Proc
from election_world import World

from torch_ecrec.coordinator import election
from torch_ecrec.coordinator.election import Candidate
from torch_ecrec.transport.etcd import Last, Leader

SEEDS = 80  # of each profile
# What cannot be otherwise: all who know of a run are stopped for longer than one that knows of none waits; members were
# told that a run is over, and who led it was killed before etcd could be told, or could not reach it for a while.
# And one starts that knows of no run, as etcd is put back to the end of an earlier one.
ASLEEP, UNTOLD, ENDED = {"second-asleep"}, {"led-on-untold"}, {"second-over"}
PROFILES = {
    "plain": set[str](),
    "forget1calm": set[str](),
    "forget2calm": set[str](),
    "restore1calm": ENDED,
    "endscalm": UNTOLD,
    "forget1": ASLEEP,
    "forget2": ASLEEP,
    "restore1": ASLEEP | ENDED,
}


@pytest.mark.parametrize("profile", PROFILES)
def test_random_schedules(profile: str) -> None:
    explore(profile, range(SEEDS))


def explore(profile: str, seeds: range) -> None:
    for seed in seeds:
        kinds = {found.kind for found in run(schedule(seed, profile)).finds}
        assert kinds <= PROFILES[profile], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(SEEDS, 2000, 200))
@pytest.mark.parametrize("profile", PROFILES)
def test_more_of_them(profile: str, begin: int) -> None:
    explore(profile, range(begin, begin + 200))


def planned(processes: int, *events: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    """A schedule."""
    return {"seed": 1, "ttl": 2, "procs": processes, "empty": False, "events": list(events), **more}


ONCE_FOUND = {
    "put back to before the run all end": planned(3, (8.0, "restore", 3.0, 7.99)),
    "put back into the run before all end": planned(
        1, (4.6, "end"), (6.0, "start"), (6.1, "start"), (10.0, "restore", 3.0, 7.0)
    ),
    "put back while nobody led two hold": planned(2, (3.0, "stop", "L", 3.5), (12.02, "restore", 0.05, 7.35)),
    "fenced one forgets the newest revision": planned(2, (4.0, "kill", "L"), (9.0, "restore", 3.0, 6.0)),
    "and members never find it": planned(2, (4.0, "kill", 0), (8.0, "cut", 1, 3.0), (14.0, "restore", 3.0, 8.4)),
    "a lease of before is back members never follow": planned(3, (3.9, "cut", "L", 4.0), (6.5, "restore", 1.9, 5.0)),
    "likewise and two hold": planned(2, (4.0, "stop", 0, 3.0), (7.0, "restore", 0.3, 5.0)),
    "forgotten twice between two looks two hold": planned(
        2, (1.0, "start"), (3.0, "forget", 1.6), (7.94, "forget", 0.0), seed=0
    ),
    "forgotten as the first run begins two runs": planned(2, (5.212, "forget", 0.0), seed=2, empty=True),
    "leader stopped between look and take two hold": planned(
        2, (2.9, "before", 0, "revoke", 6.0), (3.0, "forget", 0.0), (9.0, "forget", 0.0)
    ),
    "slow store another run begins beside who leads": planned(
        2, (0.0, "begins", 0, 4.0), (8.9, "forget", 0.0), empty=True
    ),
    "equal revisions members stay with who hangs": planned(
        3, (3.0, "forget", 0.0), (3.38, "forget", 0.0), (3.6799999999999997, "stop", "L", 1000000000.0), seed=0
    ),
    "forgotten then an outage another run begins": planned(
        2, (3.3, "forget", 0.3), (3.4, "kill", 0), (3.9, "start"), (6.4, "outage", 1.6), seed=0
    ),
    "one who knows is cut off for a lease": planned(
        2, (3.3, "forget", 0.3), (3.4, "kill", 0), (3.9, "start"), (4.5, "cut", 1, 1.9)
    ),
    "the leader itself is cut off": planned(1, (3.3, "forget", 2.0), (3.9, "start"), (5.0, "cut", 0, 2.6), seed=0),
    "the end is not heard cut": planned(2, (4.0, "end"), (4.1, "cut", 0, 1.1), ignored=["led-on-untold"]),
    "outage longer than 5 s": planned(2, (4.0, "outage", 9.0), (4.5, "end")),
    "put back as the run ends": planned(2, (3.0, "stop", "L", 2.5), (9.0, "restore", 0.0, 4.4), (9.01, "end"), seed=0),
    "put back between grant and take two hold": planned(3, (4.0, "kill", "L"), (9.0, "restore", 3.0, 3.287), seed=0),
    "the same mod revision of another last": planned(
        3, (7.0, "kill", 0), (7.0, "before", 1, "grant", 16.0), (14.0, "forget", 0.0), (18.0, "kill", 2), empty=True
    ),
    "the same mod revision and members never find it": planned(
        3, (7.0, "kill", 0), (7.0, "before", 1, "grant", 16.0), (14.0, "forget", 0.0), (18.0, "kill", 2), empty=True
    ),
    "one that starts while etcd is put back to when nobody led": planned(
        1, (4.0, "kill", "L"), (12.0, "start"), (25.0, "restore", 0.0, 15.0), (25.01, "start")
    ),
    "who wakes is settled while who was cut off acts": planned(
        2, (4.0, "stop", 0, 3.3), (7.2, "cut", 1, 3), (7.3, "restore", 0.0, 3.4)
    ),
    "a mark of ones own is put back": planned(
        2, (3.0, "forget", 0.0), (3.1, "stop", 0, 6.9), (9.9, "restore", 0.0, 6.7)
    ),
    "stopped before revoke and the mark put back": planned(
        2, (2.9, "before", 0, "revoke", 6.9), (3.0, "forget", 0.0), (9.95, "restore", 0.0, 6.8)
    ),
    "stopped before revoke after an outage": planned(
        2, (4.0, "cut", 1, 6.0), (4.0, "cut", 0, 3.0), (7.0, "before", 0, "revoke", 7.0), (15.6, "restore", 0.0, 7.0)
    ),
    "stopped before grant and the mark that a run begins put back": planned(
        2, (0.0, "before", 0, "grant", 4.0), (9.0, "restore", 0.0, 5.0), empty=True
    ),
    "an end is read and etcd put back before another look": planned(
        2, (4.0, "stop", 0, 5.0), (7.0, "end"), (9.03, "restore", 0.0, 2.4)
    ),
    "to look for what a run begins with takes longer than a lease": planned(
        2, (0.0, "begins", 0, 3.0), (0.05, "begins", 1, 3.0), (60.0, "outage", 0.0)
    ),
    "likewise where nobody has led": planned(
        2, (0.0, "begins", 0, 3.0), (0.05, "begins", 1, 3.0), (60.0, "outage", 0.0), empty=True
    ),
    "who is fenced has not said what it knew": planned(
        1,
        (7.369, "cut", "L", 4.4),
        (7.544, "pace", "L", 0.485),
        (7.572, "forget", 0.6),
        (7.703, "start"),
        (8.751, "start"),
        seed=60448,
        ignored=["second-asleep"],
    ),
    "who marked a run begins the next under the same word": planned(
        2, (0.04, "cut", 0, 20.0), (12.0, "end"), empty=True
    ),
    "who ends a run deposes another that leads it": planned(
        1,
        (3.601, "cut", "L", 8.441),
        (3.943, "end"),
        (3.978, "fault", 0, "late", 0.6),
        (8.242, "start"),
        (14.353, "start"),
        seed=290,
        ttl=5,
        ignored=["led-on-untold"],
    ),
}


@pytest.mark.parametrize("name", ONCE_FOUND)
def test_what_was_found_once(name: str) -> None:
    assert not run(ONCE_FOUND[name]).finds


@pytest.mark.parametrize("portion", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("of_a_lease", [0.1, 0.18, 0.21, 0.25, 0.29])
@pytest.mark.parametrize("candidates", [1, 2])
def test_slow_calls_do_not_make_the_lead_move(
    candidates: int, of_a_lease: float, portion: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many of them take so long, and nothing else happens: it is taken once, and held from then on.

    One that was quick made the next ones have little time: an etcd that was slow now and then was worse than one that
    always was.
    """
    ttl_s, took, held = 4, list[float](), list[bool]()
    on_take, call, draws = World.on_take, Proc.call, random.Random(1)

    def sometimes_slow(self: Proc, name: str, do: Callable[[], Any]) -> Any:
        self.pace = (of_a_lease if draws.random() < portion else 0.001) * ttl_s
        return call(self, name, do)

    monkeypatch.setattr(Proc, "call", sometimes_slow)

    def takes(self: World, leader: Leader, last: Last) -> None:
        took.append(self.now)
        on_take(self, leader, last)

    monkeypatch.setattr(World, "on_take", takes)
    world = World(1, ttl_s, candidates, [], False)
    for i in range(400):
        world.at((20 + i / 10) * ttl_s, lambda: held.append(any(one.holds for one in world.procs)))
    world.stop_at = 60.0 * ttl_s
    assert not world.go().finds
    assert took and took[-1] < 20 * ttl_s and len(held) == 400
    assert sum(held) >= 396  # the first slow ones in a long while may cost a renewal


# mutations ----------------------------------------------------------------------------------------


def acts_for_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "MARGIN", 1.6)


def begins_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "UNKNOWN_LEASES", 0.0)


def leads_at_once_after_a_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "FORGOTTEN_LEASES", 0.0)


def believes_what_it_finds_after_a_sleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "SETTLED", 0.0)


def renews_without_a_look(patch: pytest.MonkeyPatch) -> None:
    """What etcd has said may be old."""
    patch.setattr(election, "LOOKED", math.inf)
    patch.setattr(Candidate, "_lasts", property(lambda self: True))


def knows_no_time(patch: pytest.MonkeyPatch) -> None:
    """Revisions grow by what was seen alone."""

    def me(self: Candidate, last: Last) -> Last:
        return Last(self.id, self.run, 0, self.began_with, last.counts_from)

    patch.setattr(Candidate, "_me", me)


MUTATIONS = [
    acts_for_longer,
    begins_at_once,
    leads_at_once_after_a_mark,
    believes_what_it_finds_after_a_sleep,
    renews_without_a_look,
    knows_no_time,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for name in ONCE_FOUND:
            test_what_was_found_once(name)
        for profile in PROFILES:
            test_random_schedules(profile)
