"""Trainers tell slots with tiers, or that are being rebuilt, what they will look up in later steps: hints, which change
when records are read or repaired, and nothing else.

Hints are lost, late, repeated, and of what nobody looks up (`trainer_scripts.announced`); servers, trainers and the
coordinator die at each of them, and reads take their time. Every run is the undisturbed one in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from disk_runs import OnDisks, calm
from harness import Fault, SimulatedCluster, simulate
from harness.network import CRASH_COORDINATOR, FAULTS
from harness.result import SimulationResult
from harness.scenario import Load, Scenario
from harness.tiers import SmallTier
from thinned import in_turns

from torch_ecrec.protocol import wire
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.server import announced
from torch_ecrec.server.announced import Announcements
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.job import OptimizerSpec, TableSpec

TABLES = (  # 40 records of a slot, and 20
    TableSpec("a", rows=120, dim=3, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1)),
    TableSpec("b", rows=60, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
)
PLAIN = Scenario(tables=TABLES, steps=9, touch=0.08, tier_frames=18, reborn=True, trainers_return=True)


MANY = tuple(dataclasses.replace(table, rows=900) for table in TABLES)
LARGE = dataclasses.replace(PLAIN, tables=MANY, touch=0.02, tier_frames=100, trainers=1, steps=60, asks_ahead=False)


class Late(OnDisks):
    """A cluster whose reads take their time, with faults."""

    def __init__(self, scenario: Scenario, faults: list[Fault]) -> None:
        super().__init__(scenario, late=True)
        self.network.faults = faults

    def on_event(self, number: int) -> None:
        super().on_event(number)
        for slot in self.slots():
            for table_group, shard in enumerate(slot.shards):
                assert slot.announced.announced(table_group) <= shard.frames // 2, (
                    "announced records have half of the frames"
                )


@functools.cache
def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(scenario)


@functools.cache
def messages(scenario: Scenario) -> list[int]:
    """The numbers of all announcements of a run without faults."""
    run = Late(scenario, []).go()
    run.check_against(undisturbed(calm(scenario)))
    return [number for number, (_, _, kind) in enumerate(run.messages) if kind == "Announce"]


@in_turns("every", 9)
@pytest.mark.parametrize("kind", [*FAULTS, CRASH_COORDINATOR])
def test_whatever_happens_to_an_announcement_the_run_is_the_same(kind: str, every: int) -> None:
    numbers, became = messages(PLAIN), Counter[str]()
    assert len(numbers) > 20
    for number in numbers[len(kind) % every :: every]:
        fault = Fault(kind, number)
        run = Late(PLAIN, [fault]).go()
        run.check_against(undisturbed(calm(PLAIN)))
        became["fired" if fault.fired else "skipped" if fault.skipped else "neither"] += 1
    assert became["fired"] and not became["neither"]


@in_turns("seeds", 3, 40)
def test_whoever_is_lost_the_run_is_the_same(seeds: int) -> None:
    kills = Counter[str]()
    for seed in range(seeds):
        scenario = dataclasses.replace(
            PLAIN,
            steps=14,
            network_seed=seed,
            noise=0.02,
            random_kills=2,
            random_trainer_kills=1 + seed % 2,
            random_coordinator_kills=seed % 2,
            overwrites=() if seed % 3 else ((4, True, Load(0, 3, 30)),),
        )
        run = Late(scenario, []).go()
        run.check_against(undisturbed(calm(scenario)))
        kills += {"servers": run.kills, "trainers": run.trainer_kills}
        assert run.announced
    assert kills["servers"] and kills["trainers"]


def test_records_that_were_announced_are_there_when_they_are_looked_up() -> None:
    """Fewer lookups find any of their records on the disk than without; nothing is sent to slots without tiers."""
    waits = {}
    for ahead in (1, 4):
        scenario = dataclasses.replace(LARGE, announces=ahead)
        cluster = Waits(scenario)
        cluster.go().check_against(undisturbed(calm(scenario)))
        waits[ahead] = cluster.waits
        assert (cluster.run.announced > 0) == (ahead > 1)
    assert waits[4] <= waits[1] / 2, waits
    healthy = simulate(dataclasses.replace(PLAIN, tier_frames=0))
    assert not healthy.announced and "Announce" not in {kind for _, _, kind in healthy.messages}


def test_records_that_were_announced_are_repaired_when_they_are_looked_up() -> None:
    """Fewer lookups find any of their records missing than without."""
    waits = {}
    for ahead in (1, 4):
        scenario = dataclasses.replace(LARGE, tier_frames=0, announces=ahead, kills=((0, 10),))
        cluster = Waits(dataclasses.replace(scenario, rebuild_bytes_per_s=20e3))
        cluster.go().check_against(undisturbed(calm(scenario)))
        waits[ahead] = cluster.waits
        assert cluster.run.kills == 1 and (cluster.run.announced > 0) == (ahead > 1)
    assert waits[4] < 0.7 * waits[1], waits  # two of seven are not announced, nor are those of the first steps


class Waits(SimulatedCluster):
    """A cluster whose disks take a while. It counts the lookups that had to wait for one, or for a repair."""

    def __init__(self, scenario: Scenario) -> None:
        self.waits = 0
        super().__init__(scenario)

    def tier_of(self, name: str) -> Tier | None:
        if not self.scenario.tier_frames:
            return None
        tier: Any = SmallTier(self.scenario.tier_frames or 0)
        tier.run = lambda read, then, awaited=True: self.network.clock.later(0.002, lambda: (read(), then()))
        return tier  # type: ignore[no-any-return]

    def on_event(self, number: int) -> None:
        for slot in self.slots():
            if not hasattr(slot.reads, "counted"):
                slot.reads.counted = True  # type: ignore[attr-defined]
                slot.reads._lookup_of = functools.partial(self._look, slot, slot.reads._lookup_of)  # type: ignore[method-assign]

    def _look(self, slot: Slot, make: Any, asked: Any, step: int, int8: bool) -> Any:
        for table_group, (shard, positions) in enumerate(zip(slot.shards, asked.positions, strict=True)):
            store: Any = shard.stores[0]
            if shard.in_memory:
                if slot.missing.lacks(table_group, False, positions.numpy()):
                    self.waits += 1
                    break
                continue
            frames = store._frame_P[positions.numpy()]
            places = store._place_P[positions.numpy()]
            if ((frames < 0) & store._written(places)).any():
                self.waits += 1
                break
        return make(asked, step, int8)


# one slot -----------------------------------------------------------------------------------------


def trained() -> tuple[SimulatedCluster, Slot]:
    """A slot some of whose records are on the disk; nobody announces anything but a test."""
    cluster = SimulatedCluster(dataclasses.replace(PLAIN, announces=1, steps=12, pooled=False))
    cluster.go()
    slot = cluster.slots()[1]
    assert slot.tiered and not slot.announced._of_step
    return cluster, slot


def away(slot: Slot, many: int) -> np.ndarray:
    """So many records of table group 0 that are on the disk only."""
    below = slot.shards[0].stores[0].below()
    assert len(below) >= many
    return below[:many]


def announce(slot: Slot, later: int, positions: np.ndarray) -> None:
    of_table_group = [torch.from_numpy(positions), torch.empty(0, dtype=torch.int64)]
    request = wire.Announce(slot.index, slot.incarnation, slot.rule.applied + later, of_table_group)
    answers: list[Any] = []
    slot.host.run(slot.handle, request, answers.append)
    assert answers == [wire.Announced()]


def change(slot: Slot, positions: np.ndarray) -> None:
    """What a step does to a slot's records, its disk and its announcements."""
    shard = slot.shards[0]
    shard.overwrite_(positions, shard.gather(positions))
    slot.rule.applied += 1
    slot.announced.on_applied(slot.rule.applied)


def in_memory(slot: Slot, positions: np.ndarray) -> int:
    store: Any = slot.shards[0].stores[0]
    return int((store._frame_P[positions] >= 0).sum())


def others(slot: Slot, positions: np.ndarray, turn: int) -> np.ndarray:
    rest = np.setdiff1d(np.arange(slot.shards[0].data_rows), positions)
    return np.sort(np.roll(rest, 7 * turn)[:7])


def test_what_is_announced_stays_in_memory_until_its_step_is_applied() -> None:
    _, slot = trained()
    positions = away(slot, 5)
    announce(slot, 4, positions)
    assert in_memory(slot, positions) == 5, "they are read at once"
    for turn in range(4):
        change(slot, others(slot, positions, turn))
        assert in_memory(slot, positions) == 5, f"after {turn + 1} steps"
    assert not slot.announced._of_step
    for turn in range(4, 9):
        change(slot, others(slot, positions, turn))
    assert in_memory(slot, positions) < 5, "it goes as others do"


def test_without_the_pin_it_would_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Announcements, "_pin", lambda self: None)
    with pytest.raises(AssertionError, match=r"after \d steps"):
        test_what_is_announced_stays_in_memory_until_its_step_is_applied()


def test_what_is_announced_has_half_of_the_frames_and_what_comes_beyond_is_let_go() -> None:
    _, slot = trained()
    some = away(slot, 12)
    announce(slot, 3, some[:6])
    announce(slot, 4, some[6:])  # 12 of 18 frames
    assert slot.announced.announced(0) == 6 and in_memory(slot, some[6:]) == 0
    announce(slot, 4, some[6:9])
    assert slot.announced.announced(0) == 9 and in_memory(slot, some) == 9


@pytest.mark.parametrize("later", [-3, 0, announced.STEPS_MOST + 1])
def test_what_is_of_a_step_that_is_over_or_far_away_is_let_go(later: int) -> None:
    _, slot = trained()
    announce(slot, later, away(slot, 2))
    assert not slot.announced._of_step


def test_announcements_end_with_the_trainers() -> None:
    _, slot = trained()
    announce(slot, 2, away(slot, 2))
    assert slot.announced._of_step
    slot.host.run(slot.freeze)
    assert not slot.announced._of_step
