"""Members are silent together, for a moment or for long, and nobody has died: nothing is lost that cannot be repaired.

The real protocol runs in the simulated cluster; `tests/support/silence_runs.py` has the situations and what a point is:
every set of servers, trainers and the coordinator, without network or frozen, for lengths around each limit, from every
message of a run on, alone and with the death of a server. Every run ends with the bits of the undisturbed one.

In every run of the tests some points, spread evenly; with `-m slow` more of them, in turns.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import pytest
import silence_runs
from silence_runs import PLAIN, SITUATIONS, Point, Watched, run_at

from torch_ecrec.coordinator.silence import Silence
from torch_ecrec.testing import SimulatedCluster
from torch_ecrec.testing.links import COORDINATOR, Links, Outage

SOME, MORE = 49_999, 9_973  # one point in so many; primes: nothing is met in step


def sweep(situation: str, numbers: Iterable[int]) -> Counter[str]:
    became = Counter(run_at(silence_runs.point(situation, number)) for number in numbers)
    print(situation, dict(became))
    return became


def test_some_silences_in_every_situation() -> None:
    all_of_them: Counter[str] = Counter()
    for first, situation in enumerate(SITUATIONS):
        found = sweep(situation, range(101 * first, silence_runs.count(situation), SOME))
        assert found.total() - found["not reached"] >= 2
        all_of_them += found
    assert all_of_them["stood still"] >= 5 and all_of_them["lost"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_more_silences(situation: str) -> None:
    found = sweep(situation, range(7, silence_runs.count(situation), MORE))
    assert found["stood still"] > 0.1 * found.total()


# what the issue named -----------------------------------------------------------------------------

NAMED = [
    *(Point("steps", 60, Outage(frozenset({"server-1", "server-2"}), seconds)) for seconds in (2.2, 3.3, 4.5, 8.0)),
    Point("steps", 60, Outage(frozenset({COORDINATOR}), 12.0)),
    Point("steps", 60, Outage(frozenset({COORDINATOR}), 16.0)),
    Point("steps", 60, Outage(frozenset({"server-0", "server-1", "server-2"}), 14.0, frozen=True)),
    Point("no parity", 15, Outage(frozenset({"server-1"}), 8.0)),
]


@pytest.mark.parametrize("point", NAMED)
def test_nobody_is_lost_who_is_only_silent(point: Point) -> None:
    assert run_at(point) == "stood still"


def test_without_the_rule_all_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given up as it is over its limit, whoever else is silent."""
    monkeypatch.setattr(Silence, "stand", lambda *_: True)
    for point in NAMED:
        with pytest.raises(AssertionError, match="ended, though nobody died"):
            run_at(point)


@pytest.mark.parametrize(
    "group", [("server-1", "server-2"), ("server-0", "server-1", "server-2", "trainer-0", "trainer-1")]
)
def test_who_comes_back_one_after_the_other_is_not_given_up_in_between(group: tuple[str, ...]) -> None:
    """The first is back after 4 s, the next a second later: its lease has long been over then."""
    cluster = Watched(PLAIN)
    cluster.links = links = Links(cluster)
    for i, one in enumerate(group):
        links.cut_at(60, Outage(frozenset({one}), 4.0 + i))
    run = cluster.go()
    assert run.fatal is None and not [event for event in run.events if event["event"] == "lost"]


def test_when_the_time_is_up_they_are_given_up() -> None:
    cluster = SimulatedCluster(dataclasses.replace(PLAIN, standstill_s=5.0))
    links = Links(cluster)
    links.cut_at(60, Outage(frozenset({"server-1", "server-2"}), 30.0))
    run = cluster.go()
    assert run.fatal is not None and "lost together" in run.fatal
    stands = [event for event in run.events if event["event"] == "stands_still"]
    assert stands and stands[0]["left_s"] == 5.0 and set(stands[-1]["members"]) == {"server-1", "server-2"}
