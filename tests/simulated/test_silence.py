"""Members are silent together, for a moment or for long, and nobody has died: nothing is lost that cannot be repaired.

The real protocol runs in the simulated cluster; `tests/support/silence_runs.py` has the situations and what a point is:
every set of servers, trainers and the coordinator, without network or frozen, for lengths around each limit, from every
message of a run on, alone and with the death of a server. Every run ends with the bits of the undisturbed one.

In every run of the tests some points, spread evenly; with `-m slow` more of them, in turns.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable

import pytest
import silence_runs
from coordinator_harness import Harness
from harness import SimulatedCluster
from harness.links import BEAT_S, COORDINATOR, Links, Outage
from silence_runs import PLAIN, SITUATIONS, Point, Watched, run_at

from torch_ecrec.coordinator.silence import Silence

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
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_more_silences(situation: str) -> None:
    found = sweep(situation, range(7, silence_runs.count(situation), MORE))
    assert found["stood still"] > 0.1 * found.total()


# what the issue named -----------------------------------------------------------------------------

NAMED = [
    *(Point("steps", 50, Outage(frozenset({"server-1", "server-2"}), seconds)) for seconds in (2.2, 3.3, 4.5, 8.0)),
    Point("steps", 50, Outage(frozenset({COORDINATOR}), 12.0)),
    Point("steps", 50, Outage(frozenset({COORDINATOR}), 16.0)),
    Point("steps", 50, Outage(frozenset({"server-0", "server-1", "server-2"}), 14.0, frozen=True)),
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
        links.cut_at(50, Outage(frozenset({one}), 4.0 + i))
    run = cluster.go()
    assert links.healed and run.fatal is None
    assert not [event for event in run.events if event["event"] == "lost"]


MOMENTS_S = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
PAIRS = [("server-1", "server-2"), ("server-0", "server-1"), ("server-0", "server-1", "server-2", "trainer-0")]


@pytest.mark.parametrize("seconds", MOMENTS_S)
def test_who_comes_back_after_a_moment_but_later_than_others_is_not_given_up(seconds: float) -> None:
    """Kernels send again in growing pauses, which began at different times: one is heard at once, the other is silent
    for as long again."""
    for message in (31, 45, 50):
        for group in PAIRS:
            cluster = Watched(PLAIN)
            cluster.links = links = Links(cluster)
            links.cut_at(message, Outage(frozenset(group), seconds))
            run = cluster.go()
            lost = [event for event in run.events if event["event"] == "lost"]
            assert links.healed and not lost, f"{message}, {group}: {lost}"


def test_when_the_time_is_up_they_are_given_up() -> None:
    cluster = SimulatedCluster(dataclasses.replace(PLAIN, standstill_s=5.0))
    links = Links(cluster)
    links.cut_at(50, Outage(frozenset({"server-1", "server-2"}), 30.0))
    run = cluster.go()
    assert run.fatal is not None and "lost together" in run.fatal
    stands = [event for event in run.events if event["event"] == "stands_still"]
    assert stands and stands[0]["left_s"] == 5.0 and set(stands[-1]["members"]) == {"server-1", "server-2"}


def test_after_a_moment_who_fell_silent_together_with_who_is_back_is_waited_for() -> None:
    """Two were silent for a second; one is back, and the kernel of the other tries again in a moment."""
    h = Harness()
    h.start()

    def pass_time(seconds: float, silent: Collection[str]) -> list[str]:
        for _ in range(round(seconds / BEAT_S)):
            h.now_s += BEAT_S
            for name in [name for name, member in h.core.members.items() if member.alive and name not in silent]:
                h.say(name, type="beat", unreachable=list(silent) if name == "server-0" else [])
            h.core.on_tick(h.now_s)
        return [event["member"] for event in h.events if event["event"] == "lost"]

    assert not pass_time(10.0, ())
    assert not pass_time(1.0, ("server-1", "server-2"))
    assert not pass_time(1.25, ("server-2",)), "as long again, and a little"
    assert pass_time(2.0, ("server-2",)) == ["server-2"], "it does not come back"
