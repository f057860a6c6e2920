"""Partial recovery while other things go wrong: drawn schedules, against the oracle of `partial_runs.py`."""

from __future__ import annotations

from collections import Counter

import pytest
from partial_schedules import draw, run_schedule

SOME, MORE, SEED = 3, 600, 20261129
PARTS = 12  # of the many


def explore(seeds: range) -> Counter[str]:
    """Which events came to pass, in how many runs."""
    found: Counter[str] = Counter()
    for seed in seeds:
        cluster = run_schedule(draw(seed))
        assert cluster.fired, "nothing was lost"
        found.update({event["event"] for event in cluster.run.events})
    print(f"seeds from {seeds.start}: {dict(found)}")
    return found


def test_some_schedules() -> None:
    found = explore(range(SEED, SEED + SOME))
    assert found["recovered_partly"] and found["lost"] == SOME


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_schedules(part: int) -> None:
    seeds = range(SEED + SOME + part, SEED + MORE, PARTS)
    found = explore(seeds)
    for kind in ("recovered_partly", "went_beyond", "regathered", "era", "going back", "saved"):
        assert found[kind] > 0.02 * len(seeds), kind
