"""Silences, deaths, coordinators and launches together: nobody is lost who need not be, all bits are the same.

`tests/support/adverse_runs.py` has what may happen, and draws it. In every run of the tests some schedules; with
`-m slow` many more. What has been found like that stands here, as small as it fails.
"""

from __future__ import annotations

from collections import Counter

import pytest
from adverse_runs import Schedule, Trouble, draw, run_schedule

from torch_ecrec.coordinator.launches import Launches

SOME, MORE, SEED = 5, 1500, 20261126
PARTS = 12  # of the many

FOUND = {
    "a second launch comes as trainers that are all back are told to end": Schedule(
        "slow rebuilds",
        False,
        60,
        (
            Trouble(0.0, "second launch", (6,), 2.64),
            Trouble(1.0, "kill trainer", (5,), 0.29),
            Trouble(0.0, "unplug", (3, 5), 2.65),
            Trouble(1.7, "kill coordinator", (6,), 0.09),
        ),
        0,
    ),
    "one that was back and is silent again counts with those who are missing": Schedule(
        "wait for a host",
        False,
        150,
        (
            Trouble(4.2, "freeze", (3,), 5.47),
            Trouble(1.0, "kill coordinator", (3,), 0.53),
            Trouble(1.3, "freeze", (6,), 3.14),
        ),
        1,
    ),
    "a second launch comes as trainers do not come back to the next coordinator": Schedule(
        "slow rebuilds",
        False,
        150,
        (
            Trouble(0.3, "kill coordinator", (7,), 4.33),
            Trouble(0.3, "second launch", (5,)),
            Trouble(3.5, "unplug", (1, 4), 15.24),
        ),
        3,
    ),
    "a second launch comes while trainers are away": Schedule(
        "a spare",
        True,
        60,
        (
            Trouble(0.6, "second launch", (4,), 6.01),
            Trouble(0.1, "reset", (2,), 3.04),
            Trouble(6.0, "unplug", (5,), 5.56),
            Trouble(2.5, "kill coordinator", (4,), 0.1),
        ),
        5,
    ),
    "a second launch comes to a coordinator that stood still before it heard of anybody": Schedule(
        "slow rebuilds",
        False,
        150,
        (
            Trouble(0.3, "kill coordinator", (7,), 4.33),
            Trouble(0.3, "second launch", (5,)),
            Trouble(3.5, "unplug", (2,), 15.24),
            Trouble(0.0, "freeze", (-1,), 5.17),
        ),
        3,
    ),
    "a slot was to move as the coordinator is cut off from all": Schedule(
        "loads in training",
        True,
        60,
        (
            Trouble(1.0, "unplug", (-1, 0, 3, 6), 16.09),
            Trouble(0.1, "drain", (0,)),
        ),
    ),
    "a coordinator that learns who cannot reach whom moves no slot yet": Schedule(
        "no spare",
        False,
        300,
        (
            Trouble(0.0, "unplug", (4, 5), 5.3),
            Trouble(4.5, "late probes", (0,), 5.89),
            Trouble(0.1, "kill coordinator", (6,), 3.79),
            Trouble(3.2, "undo", (0,), 16.09),
        ),
        2,
    ),
    "a trainer has the name of one that a coordinator before has known, and whose process is gone": Schedule(
        "values are loaded",
        False,
        60,
        (
            Trouble(0.3, "kill coordinator", (7,), 1.6),
            Trouble(1.0, "kill trainer", (1,), 0.81),
            Trouble(0.1, "kill server", (6,), 5.1),
            Trouble(0.1, "unplug", (-1, 1, 2, 3, 4, 5), 7.57),
        ),
        4,
    ),
    "a coordinator is cut off with the one server that has two slots": Schedule(
        "values are loaded",
        False,
        300,
        (
            Trouble(0.1, "unplug", (2,), 2.67),
            Trouble(0.1, "drain", (3,), 5.25),
            Trouble(1.7, "unplug", (0,), 8.14),
        ),
        3,
        together=True,
    ),
    "a coordinator that is cut off with two slots is started again": Schedule(
        "others stand by",
        False,
        20,
        (
            Trouble(8.0, "unplug", (1, 2), 4.23),
            Trouble(3.2, "unplug", (5, 6), 7.95),
            Trouble(0.1, "kill coordinator", (6,), 4.18),
        ),
        1,
        together=True,
    ),
    "a coordinator stands still as its own network goes": Schedule(
        "slow rebuilds",
        False,
        150,
        (
            Trouble(0.1, "freeze", (1,), 5.39),
            Trouble(1.0, "freeze", (6,), 3.83),
            Trouble(0.6, "unplug", (-1,), 7.27),
        ),
        4,
        together=True,
    ),
    "an era ends a move, and no other move begins": Schedule(
        "loads in training",
        False,
        60,
        (
            Trouble(0.0, "undo", (2,), 4.5),
            Trouble(3.2, "reset", (-1,), 1.1),
            Trouble(0.0, "drain", (6,), 3.01),
            Trouble(0.0, "unplug", (0, 1, 4), 2.24),
            Trouble(0.1, "kill trainer", (2,), 3.12),
        ),
        6,
    ),
}


def explore(seeds: range) -> Counter[str]:
    """Which events came to pass, in how many runs."""
    found: Counter[str] = Counter()
    for seed in seeds:
        cluster = run_schedule(draw(seed))
        found.update({event["event"] for event in cluster.run.events})
        found["refused a second launch"] += bool(cluster.refusals)
    print(f"seeds from {seeds.start}: {dict(found)}")
    return found


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    run_schedule(FOUND[name])


def test_without_the_rule_a_second_launch_takes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launches, "dismiss", lambda *_: None)
    with pytest.raises(AssertionError, match="the second launch is let in"):
        run_schedule(FOUND["a second launch comes while trainers are away"])


def test_some_schedules() -> None:
    found = explore(range(SEED, SEED + SOME))
    assert found["stands_still"] and found["regathering"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_schedules(part: int) -> None:
    """In parts that take turns: whole, it takes longer than any turn, and so did not run."""
    seeds = range(SEED + SOME + part, SEED + MORE, PARTS)
    found = explore(seeds)
    for kind in ("stands_still", "regathering", "lost", "era", "refused a second launch"):
        assert found[kind] > 0.02 * len(seeds), kind
