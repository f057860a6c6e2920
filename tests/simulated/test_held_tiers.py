"""A disk that holds one batch of reads, and all behind it, for as long as others take to be lost and to come back.

A server's reads that training waits for are done one batch after the other, and so are those of the background. Each
batch of a small run is held in turn, and at that moment the server itself, another one, a trainer, the coordinator or
two of them die: whoever waited for these records waits no more, or gets them, and the run is the undisturbed one.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from disk_runs import OnDisks, calm
from harness.result import SimulationResult
from harness.scenario import Scenario
from harness.simulation import simulate
from harness.tiers import SmallTier
from thinned import in_turns

from torch_ecrec.durability.parity import Parity
from torch_ecrec.protocol import wire
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.server import service
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

TABLES = (  # some rows are in memory, most are not
    TableSpec("a", rows=90, dim=3, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1)),
    TableSpec("b", rows=50, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
)
PLAIN = Scenario(tables=TABLES, steps=5, touch=0.12, tier_frames=4, reborn=True, trainers_return=True)
READ_S, HELD_S = 0.002, 3.0  # virtual: for a batch, at most; and for that which is held: all others are back by then
Done = Callable[[], None]


class OneByOne(SmallTier):
    """A tier whose batches are read one after the other: those that training waits for, and the others beside them."""

    def __init__(self, name: str, cluster: Held) -> None:
        super().__init__(cluster.scenario.tier_frames or 0, cluster.disks, lambda: name not in cluster.network.dead)
        self._name, self._cluster = name, cluster
        self._queues: dict[bool, list[tuple[Done, Done, float]]] = {True: [], False: []}

    def run(self, read: Done, then: Done, awaited: bool = True) -> None:
        queue = self._queues[awaited]
        queue.append((read, then, self._cluster.time_for(self._name, awaited)))
        if len(queue) == 1:
            self._begin(queue)

    def _begin(self, queue: list[tuple[Done, Done, float]]) -> None:
        read, then, seconds = queue[0]

        def end() -> None:
            queue.pop(0)
            if self._lives():
                self.disks.asking += 1
                read()
                self.disks.asking -= 1
                self._cluster.network.clock.later(0.0, lambda: then() if self._lives() else None)
            if queue:
                self._begin(queue)

        self._cluster.network.clock.later(seconds, end)


class Held(OnDisks):
    """A cluster in which one batch of reads is held.

    Args:
        scenario: what runs.
        at: the number of the batch; -1: none is held.
        awaited: whether it is of those that training waits for, or of the others.
        lost: who dies at that moment: "self" (the server that asked), "other", "trainer", "coordinator".

    Attributes:
        batches: how many such so far.
        fired: who has died.
    """

    def __init__(
        self, scenario: Scenario, at: int = -1, lost: tuple[str, ...] = (), checks: str = "use", awaited: bool = True
    ) -> None:
        self.batches, self.at, self.awaited, self.lost, self.fired = 0, at, awaited, lost, list[str]()
        self._times = random.Random(7)  # the same until that batch
        super().__init__(scenario, late=True, checks=checks)

    def tier_of(self, name: str) -> Tier | None:
        self.disks.clock = self.network.clock
        return OneByOne(name, self)

    def time_for(self, name: str, awaited: bool) -> float:
        """Returns how long the next batch takes, that this server has asked for."""
        number, self.batches = self.batches, self.batches + (awaited == self.awaited)
        if number != self.at or awaited != self.awaited:
            return self._times.uniform(0.0, READ_S)
        self.network.clock.later(0.0, lambda: self._lose(name))
        return HELD_S

    def _lose(self, name: str) -> None:
        others = [place.server for place in self.slots_known if place.server != name]
        for who in self.lost:
            if who == "coordinator":
                self.kill_coordinator()
                self.fired.append(who)
                continue
            names = {"self": [name], "other": others, "trainer": list(self.clients)}[who]
            victim = next((one for one in names if self.may_crash(one)), None)
            if victim is not None:
                self.network.kill(victim)
                self.fired.append(who)


@functools.cache
def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(scenario)


@functools.cache
def batches(scenario: Scenario, checks: str, awaited: bool = True) -> int:
    cluster = Held(scenario, checks=checks, awaited=awaited)
    cluster.go().check_against(undisturbed(calm(scenario)))
    return cluster.batches


LOST: list[tuple[str, ...]] = [
    *((), ("self",), ("other",), ("trainer",), ("coordinator",)),
    *(("self", "trainer"), ("other", "trainer"), ("trainer", "coordinator"), ("self", "coordinator")),
]


@in_turns("points", 2, 30)
@pytest.mark.parametrize("without_spare", ["survivor", "wait"])
@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "+".join(lost) or "nobody")
def test_whoever_is_lost_while_a_read_is_held_the_run_is_the_same(
    lost: tuple[str, ...], without_spare: str, points: int
) -> None:
    checks = "use" if without_spare == "wait" else "background"
    scenario = dataclasses.replace(PLAIN, without_spare=without_spare, spares=int(without_spare == "wait"))
    assert sweep(scenario, lost, checks, True, points) or not lost


REBUILDING = dataclasses.replace(PLAIN, code=CodeSpec(4, 2, 2), kills=((1, 2),), spares=1)


@in_turns("points", 3, 30)
@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "+".join(lost) or "nobody")
def test_whoever_is_lost_while_a_read_of_a_rebuild_is_held_the_run_is_the_same(
    lost: tuple[str, ...], points: int
) -> None:
    """Records that a new host asked for are given as they are when they were read; steps went on meanwhile."""
    assert sweep(REBUILDING, lost, "use", False, points) or not lost


@pytest.mark.smoke
def test_what_a_step_waits_for_is_not_read_behind_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new host repairs first what a lookup needs; others read that beside the portions of its background."""
    read: list[tuple[bool, bool]] = []  # whether a step waits, and whether the tier knows

    def noted(slot: Slot, reading: Any, done: Done, awaited: bool = True) -> None:
        if asked:
            read.append((asked[-1].awaited, awaited))
        slot.host.read_tier(reading.run, done, awaited)

    def on_fetch(self: Parity, request: wire.Fetch, reply: Any) -> None:
        asked.append(request)
        try:
            fetch(self, request, reply)
        finally:
            asked.pop()

    asked: list[wire.Fetch] = []
    fetch = Parity.on_fetch
    monkeypatch.setattr(Parity, "on_fetch", on_fetch)
    monkeypatch.setattr(Slot, "read_tier", noted)
    Held(REBUILDING).go().check_against(undisturbed(calm(REBUILDING)))
    assert set(read) == {(True, True), (False, False)}


def sweep(scenario: Scenario, lost: tuple[str, ...], checks: str, awaited: bool, points: int) -> int:
    """Holds some batches, one in each run; returns in how many somebody was lost then."""
    count, fired = batches(scenario, checks, awaited), 0
    first = random.Random(repr(lost)).random()
    for at in sorted({int((first + i) * count / points) for i in range(points)}):
        cluster = Held(scenario, at, lost, checks, awaited)
        try:
            run = cluster.go()
            assert run.fatal is None, run.fatal
            run.check_against(undisturbed(calm(scenario)))
        except Exception as error:
            raise AssertionError(f"batch {at} of {count}: {type(error).__name__}: {error}") from error
        assert cluster.batches > at, "it was held"
        fired += bool(cluster.fired)
    return fired


class Flips(OnDisks):
    """The new host of a lost slot is told to flip a bit before it has rebuilt the slot."""

    def __init__(self, below: bool) -> None:
        super().__init__(dataclasses.replace(PLAIN, kills=((1, 2),), steps=12), checks="use")
        self.below, self.asked = below, 0

    @property
    def may_be_damaged(self) -> bool:
        return self.asked > 0

    def on_event(self, number: int) -> None:
        super().on_event(number)
        for host in self.hosts.values() if not self.asked else ():
            slots: list[Any] = list(host.slots.values())
            if slots and slots[0].incarnation and host.name not in self.network.dead:
                assert not slots[0].whole
                self.asked += 1
                host.flip_below() if self.below else host.flip(parity=False)


@pytest.mark.parametrize("below", [False, True])
def test_a_bit_flips_once_there_is_one_to_flip(
    below: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chaos waits for it to be found: one that never flipped would be waited for for ever."""
    monkeypatch.setattr(service, "FLIP_AGAIN_S", 0.002)
    monkeypatch.setattr(service, "FLIPPED_READ_S", 0.0)
    cluster = Flips(below)
    run = cluster.go()
    run.check_against(undisturbed(calm(cluster.scenario)))
    assert cluster.asked == 1 and "no bit is flipped yet" in caplog.text and "a bit is flipped" in caplog.text
    assert [event["count"] for event in cluster.told("damaged")] == [1] and cluster.told("mended")
