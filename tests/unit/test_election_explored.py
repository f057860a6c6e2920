"""Which of several coordinators leads: random schedules, and the ones that were found to break it once.

What may happen in them, and what must hold, is in `tests/support/election_explorer.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from election_explorer import run, schedule

from torch_ecrec.coordinator import election
from torch_ecrec.coordinator.election import Candidate
from torch_ecrec.transport.etcd import Last

SEEDS = 120  # of each profile
# What cannot be otherwise: all who know of a run are stopped for longer than one that knows of none waits; members were
# told that a run is over, and who led it was killed before etcd could be told, or could not reach it for a while.
ASLEEP, UNTOLD = {"second-asleep"}, {"led-on-untold"}
PROFILES = {
    "plain": set[str](),
    "forget1calm": set[str](),
    "forget2calm": set[str](),
    "restore1calm": set[str](),
    "endscalm": UNTOLD,
    "forget1": ASLEEP,
    "forget2": ASLEEP,
    "restore1": ASLEEP,
}


@pytest.mark.parametrize("profile", PROFILES)
def test_random_schedules(profile: str) -> None:
    for seed in range(SEEDS):
        kinds = {found.kind for found in run(schedule(seed, profile)).finds}
        assert kinds <= PROFILES[profile], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(SEEDS, 2000, 200))
@pytest.mark.parametrize("profile", PROFILES)
def test_more_of_them(profile: str, begin: int) -> None:
    for seed in range(begin, begin + 200):
        kinds = {found.kind for found in run(schedule(seed, profile)).finds}
        assert kinds <= PROFILES[profile], f"seed {seed}"


ONCE_FOUND: dict[str, dict[str, Any]] = {
    "put back to before the run all end": {
        "seed": 1,
        "ttl": 2,
        "procs": 3,
        "empty": False,
        "events": [
            (8.0, "restore", 3.0, 7.99),
        ],
    },
    "put back into the run before all end": {
        "seed": 1,
        "ttl": 2,
        "procs": 1,
        "empty": False,
        "events": [
            (4.6, "end"),
            (6.0, "start"),
            (6.1, "start"),
            (10.0, "restore", 3.0, 7.0),
        ],
    },
    "put back while nobody led two hold": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (3.0, "stop", "L", 3.5),
            (12.02, "restore", 0.05, 7.35),
        ],
    },
    "fenced one forgets the newest revision": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (4.0, "kill", "L"),
            (9.0, "restore", 3.0, 6.0),
        ],
    },
    "and members never find it": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (4.0, "kill", 0),
            (8.0, "cut", 1, 3.0),
            (14.0, "restore", 3.0, 8.4),
        ],
    },
    "a lease of before is back members never follow": {
        "seed": 1,
        "ttl": 2,
        "procs": 3,
        "empty": False,
        "events": [
            (3.9, "cut", "L", 4.0),
            (6.5, "restore", 1.9, 5.0),
        ],
    },
    "likewise and two hold": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (4.0, "stop", 0, 3.0),
            (7.0, "restore", 0.3, 5.0),
        ],
    },
    "forgotten twice between two looks two hold": {
        "seed": 0,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (1.0, "start"),
            (3.0, "forget", 1.6),
            (7.94, "forget", 0.0),
        ],
    },
    "forgotten as the first run begins two runs": {
        "seed": 2,
        "ttl": 2,
        "procs": 2,
        "empty": True,
        "events": [
            (5.212, "forget", 0.0),
        ],
    },
    "leader stopped between look and take two hold": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (2.9, "before", 0, "revoke", 6.0),
            (3.0, "forget", 0.0),
            (9.0, "forget", 0.0),
        ],
    },
    "slow store another run begins beside who leads": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": True,
        "events": [
            (0.0, "begins", 0, 4.0),
            (8.9, "forget", 0.0),
        ],
    },
    "equal revisions members stay with who hangs": {
        "seed": 0,
        "ttl": 2,
        "procs": 3,
        "empty": False,
        "events": [
            (3.0, "forget", 0.0),
            (3.38, "forget", 0.0),
            (3.6799999999999997, "stop", "L", 1000000000.0),
        ],
    },
    "forgotten then an outage another run begins": {
        "seed": 0,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (3.3, "forget", 0.3),
            (3.4, "kill", 0),
            (3.9, "start"),
            (6.4, "outage", 1.6),
        ],
    },
    "one who knows is cut off for a lease": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (3.3, "forget", 0.3),
            (3.4, "kill", 0),
            (3.9, "start"),
            (4.5, "cut", 1, 1.9),
        ],
    },
    "the leader itself is cut off": {
        "seed": 0,
        "ttl": 2,
        "procs": 1,
        "empty": False,
        "events": [
            (3.3, "forget", 2.0),
            (3.9, "start"),
            (5.0, "cut", 0, 2.6),
        ],
    },
    "the end is not heard cut": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (4.0, "end"),
            (4.1, "cut", 0, 1.1),
        ],
    },
    "outage longer than 5 s": {
        "seed": 1,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (4.0, "outage", 9.0),
            (4.5, "end"),
        ],
    },
    "put back as the run ends": {
        "seed": 0,
        "ttl": 2,
        "procs": 2,
        "empty": False,
        "events": [
            (3.0, "stop", "L", 2.5),
            (9.0, "restore", 0.0, 4.4),
            (9.01, "end"),
        ],
    },
    "put back between grant and take two hold": {
        "seed": 0,
        "ttl": 2,
        "procs": 3,
        "empty": False,
        "events": [
            (4.0, "kill", "L"),
            (9.0, "restore", 3.0, 3.287),
        ],
    },
    "the same mod revision of another last": {
        "seed": 1,
        "ttl": 2,
        "procs": 3,
        "empty": True,
        "events": [
            (7.0, "kill", 0),
            (7.0, "before", 1, "grant", 16.0),
            (14.0, "forget", 0.0),
            (18.0, "kill", 2),
        ],
    },
    "the same mod revision and members never find it": {
        "seed": 1,
        "ttl": 2,
        "procs": 3,
        "empty": True,
        "events": [
            (7.0, "kill", 0),
            (7.0, "before", 1, "grant", 16.0),
            (14.0, "forget", 0.0),
            (18.0, "kill", 2),
        ],
    },
}


@pytest.mark.parametrize("name", ONCE_FOUND)
def test_what_was_found_once(name: str) -> None:
    assert not run(ONCE_FOUND[name]).finds


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
