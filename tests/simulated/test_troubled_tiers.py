"""Servers whose records are on disks that fail, lie, or answer late: the run is the undisturbed one, or says why not.

The n-th read, or the n-th write, of a small run goes wrong, in every way (`harness/tiers.py`), also while servers and
trainers are lost; or many do at random. What cannot be read is mended from its stripe. A disk that cannot be written
ends its server, which is rebuilt elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import pytest
from disk_runs import OnDisks, calm
from harness.result import SimulationResult
from harness.scenario import LOADS, Scenario
from harness.simulation import simulate
from harness.tiers import READS, WRITES
from thinned import in_turns

from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

ADAGRAD = OptimizerSpec("rowwise_adagrad", lr=0.1)
TABLES = (  # some rows are in memory, most are not
    TableSpec("a", rows=90, dim=3, low=-1.0, high=1.0, optimizer=ADAGRAD),
    TableSpec("b", rows=50, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
)
PLAIN = Scenario(tables=TABLES, steps=5, touch=0.12, tier_frames=4, reborn=True, trainers_return=True)
LOSSES = dataclasses.replace(PLAIN, kills=((1, 2),), trainer_kills=((0, 3),), tier_frames=8)
SOME = 3  # points of a sweep, in one turn


@functools.cache
def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(scenario)


def check(cluster: OnDisks) -> str:
    """Runs it, and returns what became of it: "equal", or "beyond" what the code repairs."""
    run = cluster.go()
    if run.fatal is not None:
        assert "damaged or lost" in run.fatal or "lost" in run.fatal, run.fatal
        return "beyond"
    run.check_against(undisturbed(calm(cluster.scenario)))
    assert not any(event["reason"] for event in cluster.told("damaged"))
    return "equal"


@functools.cache
def asked(scenario: Scenario, late: bool) -> tuple[int, int]:
    """How many reads and writes there are."""
    cluster = OnDisks(scenario, late=late)
    assert check(cluster) == "equal"
    assert not cluster.told("damaged") and not cluster.failed
    return cluster.disks.read, cluster.disks.written


def sweep(scenario: Scenario, kind: str, points: int, **about: Any) -> Counter[str]:
    """Runs with one read, or write, that goes wrong: at so many points, as far from each other as can be."""
    late = about.get("late", False)
    count = asked(scenario, late)[kind in WRITES]
    became: Counter[str] = Counter()
    first, every = random.Random(kind).random(), count / points
    for number in sorted({int((first + i) * every) for i in range(points)}):
        twice = range(number, number + (kind not in WRITES) + 1)  # it is tried again
        wrong = {"writes" if kind in WRITES else "reads": dict.fromkeys(twice, kind)}
        cluster = OnDisks(scenario, **wrong, **about)
        try:
            became[check(cluster)] += 1
        except Exception as error:
            raise AssertionError(f"{kind} at {number} of {count}: {type(error).__name__}: {error}") from error
        assert set(cluster.disks.fired) == {kind}
        became["named"] += bool(cluster.told("damaged"))
        became["ended"] += bool(cluster.failed)
    print(kind, dict(became))
    return became


@in_turns("points", SOME, 60)
@pytest.mark.parametrize("kind", READS)
def test_whichever_read_goes_wrong_the_run_is_the_same(kind: str, points: int) -> None:
    became = sweep(PLAIN, kind, points)
    assert not became["beyond"] and (became["named"] or points == SOME), "who reads again may be given what is right"


@in_turns("points", SOME, 60)
@pytest.mark.parametrize("kind", READS)
def test_also_where_reads_are_late_and_servers_and_trainers_are_lost(kind: str, points: int) -> None:
    became = sweep(LOSSES, kind, points, late=True)
    assert became["equal"] >= became["beyond"]


@in_turns("points", SOME, 60)
@pytest.mark.parametrize("kind", WRITES)
def test_whichever_write_goes_wrong_the_run_is_the_same(kind: str, points: int) -> None:
    became = sweep(PLAIN, kind, points)
    assert became["equal"] >= became["beyond"] and (kind != "full" or became["ended"])
    became = sweep(LOSSES, kind, points, late=True)
    assert became["equal"] >= became["beyond"] or (points == SOME and became["equal"]), "few may all be near a kill"


def many(rate: float, seed: int, kinds: tuple[str, ...] = READS) -> dict[int, str]:
    """Reads that go wrong, each with the next one, by which it is tried again."""
    chance, reads = random.Random(seed), dict[int, str]()
    for number in range(20_000):
        if chance.random() < rate:
            reads |= dict.fromkeys((number, number + 1), chance.choice(kinds))
    return reads


@pytest.mark.parametrize("checks", ["use", "background"])
@pytest.mark.parametrize("seed", range(4))
def test_many_reads_go_wrong_while_others_are_lost(seed: int, checks: str) -> None:
    """Two of a stripe at once may be too much for one parity: then it stops and says so."""
    code = CodeSpec(6, 2, 2) if seed % 2 else CodeSpec(3, 2, 1)
    scenario = dataclasses.replace(
        PLAIN, code=code, network_seed=seed, random_kills=1, random_trainer_kills=1, noise=0.01, tier_frames=1 + seed
    )
    cluster = OnDisks(scenario, many(0.005, seed), late=bool(seed % 3), checks=checks)
    assert check(cluster) == "equal" or code.parities == 1
    assert cluster.disks.fired


@pytest.mark.parametrize("late", [False, True])
def test_loads_and_steps_of_records_on_disks(late: bool) -> None:
    reads = many(0.01, 7, ("error", "zeros", "flip"))
    scenario = Scenario(steps=4, loads=LOADS, tier_frames=1, touch=0.1, reborn=True)
    cluster = OnDisks(scenario, reads, late=late)
    assert check(cluster) == "equal" and cluster.disks.fired


def test_full_disks_everywhere_stop_the_run_with_the_reason() -> None:
    cluster = OnDisks(PLAIN, writes=dict.fromkeys(range(1000), "full"))
    run = cluster.go()
    assert run.fatal is not None and len(cluster.failed) >= 2
    assert all("cannot be written: No space left on device" in reason for reason in cluster.failed)
