"""A link fails at every message of whatever goes on, for a moment, for seconds or for good, alone and with a crash.

The real protocol runs in the simulated cluster; `tests/support/cut_runs.py` has the situations (steps, a rebuild, a
move, a load, a checkpoint, ...) and what a point of them is. The links: any two servers, a server and a trainer, the
coordinator and any of them; each way, and both. Every run ends, with the bits of the undisturbed one. Nobody is fenced,
and nobody lost who lives, for a cut that heals before it is noticed; for one that does not, one server at most is.

In every run of the tests some points, spread evenly; with `-m slow`, in parts that take turns, all of those without a
crash, and of the (hundreds of times as many) pairs of a cut and a crash one in so many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import cut_runs
import pytest
from cut_runs import CRASHES, OFFSETS, SITUATIONS, Cut, Point, run_at
from harness import simulation, tiers
from harness.links import COORDINATOR

from torch_ecrec.coordinator import departures
from torch_ecrec.coordinator.placement import SlotTable
from torch_ecrec.coordinator.suspicion import Suspicion
from torch_ecrec.server import importing

PARTS = 8  # of each situation
LARGE = {  # situation, and whether somebody dies besides: more parts, so that each takes some minutes, with tiers too
    ("two parities", False): 17,  # primes, as below
    ("a move", False): 127,
    ("a move", True): 41,
    ("a checkpoint", False): 31,
    ("a checkpoint", True): 17,
}
SOME = {False: 3_989, True: 99_991}  # one in so many, by default; with a crash. Primes: nothing is met in step
MORE = {False: 31, True: 997}
WIDE = {False: 1, True: 97}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server comes in place of a lost one while training goes on, and a move asks again for what has changed."""
    monkeypatch.setattr(simulation, "REBORN_S", 0.02)
    monkeypatch.setattr(importing, "LITTLE_BYTES", 50)


def sweep(situation: str, numbers: Iterable[int], crashes: bool) -> Counter[str]:
    became = Counter(run_at(cut_runs.point(situation, number, crashes)) for number in numbers)
    print(situation, dict(became))
    return became


@pytest.mark.parametrize("crashes", [False, True], ids=["alone", "with a crash"])
def test_some_cuts_in_every_situation(crashes: bool) -> None:
    every, all_of_them, first = SOME[crashes], Counter(), 0
    for situation in SITUATIONS:
        first += 101
        found = sweep(situation, range(first, cut_runs.count(situation, crashes), every), crashes)
        assert found.total() - found["not reached"] >= 3
        all_of_them += found
    assert all_of_them["fenced"] >= 2 and all_of_them["beyond"] <= 0.06 * all_of_them.total()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("crashes", [False, True], ids=["alone", "with a crash"])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("situation", SITUATIONS)
def test_more_cuts(situation: str, part: int, crashes: bool) -> None:
    every = MORE[crashes]
    numbers = range(7 + every * part, cut_runs.count(situation, crashes), every * PARTS)
    found = sweep(situation, numbers, crashes)
    assert found.total() - found["not reached"] > 100 / PARTS and found["beyond"] <= 0.06 * found.total()


def all_parts() -> list[Any]:
    """Of all situations: situation, which part, of how many, with a crash."""
    found = []
    for situation in SITUATIONS:
        for crashes, name in ((False, "alone"), (True, "with a crash")):
            parts = LARGE.get((situation, crashes), PARTS)
            for part in range(parts):
                found.append(pytest.param(situation, part, parts, crashes, id=f"{situation}-{part}-{name}"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("situation", "part", "parts", "crashes"), all_parts())
def test_all_cuts(situation: str, part: int, parts: int, crashes: bool) -> None:
    """Of those with a crash one in so many."""
    every = WIDE[crashes]
    found = sweep(situation, range(every * part, cut_runs.count(situation, crashes), every * parts), crashes)
    assert found["fenced"] > 0.02 * found.total() and found["beyond"] <= 0.06 * found.total()


# what the sweep has found -------------------------------------------------------------------------


def test_a_slot_that_cannot_be_repaired_where_it_is_leaves() -> None:
    """A survivor rebuilds a slot, and is cut off from a server that it needs: neither may be fenced. A spare comes."""
    point = Point("a move", 36, Cut("server-1", "server-2"))
    assert run_at(point) == "fenced", "and then one is, once that slot is whole elsewhere"


KNEW_OF_THE_CUT = [  # and died before a slot moved to where the fenced server had been
    Point("a move", 82, Cut("trainer-1", "server-2", True), ("crash_coordinator", 40)),
    Point("a move", 125, Cut("server-2", "trainer-0", True), ("crash_coordinator", 80)),
]


@pytest.mark.parametrize("point", KNEW_OF_THE_CUT)
def test_the_next_coordinator_moves_no_slot_where_it_cannot_be_reached(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "FRAMES", 0)  # reads of disks come between: it would be another moment
    assert run_at(point) == "fenced"
    monkeypatch.setattr(Suspicion, "follow", lambda *_: None)
    with pytest.raises(AssertionError, match="more than one was fenced"):
        run_at(point)


def of_hand_over() -> list[Point]:
    """The link is cut between where a slot moves to and where it is, which has stopped and been asked for the rest."""
    run = cut_runs.check(cut_runs.cluster_of("a move"))
    at = [i for i, (_, _, name) in enumerate(run.messages) if name == "HandOver"]
    here, there = run.messages[at[0]][:2]
    return [Point("a move", i, Cut(there, here, one_way)) for i in at for one_way in (False, True)]


def test_a_slot_that_has_stopped_to_move_goes_on_if_its_new_host_cannot_be_reached() -> None:
    assert len([run_at(point) for point in of_hand_over()]) >= 2


@pytest.mark.parametrize("rule", ["slots stay where they cannot be repaired", "a move waits for the network"])
def test_without_the_rule_training_stands(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = of_hand_over() if rule.startswith("a move") else [Point("a move", 36, Cut("server-1", "server-2"))]
    if rule.startswith("a move"):
        monkeypatch.setattr(departures, "_end_move", lambda *_: None)
    else:
        monkeypatch.setattr(SlotTable, "leaving", lambda *_: [])
    with pytest.raises(AssertionError, match="stuck"):
        for point in points:
            run_at(point)


def test_what_the_points_are() -> None:
    """Each is met once."""
    situation = "initial values"
    every = {cut_runs.point(situation, number, False) for number in range(cut_runs.count(situation, False))}
    assert len(every) == cut_runs.count(situation, False)
    assert {point.cut.heals_s for point in every} == {None, cut_runs.BLIP_S, cut_runs.LONG_S}
    assert any(COORDINATOR in (point.cut.one, point.cut.other) and point.cut.one_way for point in every)
    some = [cut_runs.point(situation, number, True) for number in range(0, 10_000, 97)]
    assert {point.crash for point in some} == {(kind, offset) for kind in CRASHES for offset in OFFSETS}
