"""Delta logs that change in a server's memory: it ends when it would use them, and the run is the undisturbed one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from harness.scenario import Scenario
from harness.simulation import SimulatedCluster, simulate

from torch_ecrec.errors import MemoryDamaged
from torch_ecrec.protocol import wire
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.node import Node


class DamagedLogs(SimulatedCluster):
    """A cluster in which a bit of a delta log flips, now and then; one at a time that somebody may still use."""

    def __init__(self, scenario: Scenario, flips: range) -> None:
        super().__init__(scenario)
        self.due, self.chance = list(flips), random.Random(scenario.network_seed)
        self.flipped: tuple[str, DeltaLog, int] | None = None  # server, log, step
        self.count, self.ended, self.era = 0, list[str](), 0

    def on_event(self, number: int) -> None:
        due = self.due and number >= self.due[0] and self.whole()
        about_to_undo = any(slot.host.frozen for slot in self.slots()) and self.era != self.coordinator.era
        if (due or about_to_undo) and not self.is_there and self.flip(last=about_to_undo):
            self.due, self.era = self.due[1:], self.coordinator.era

    @property
    def is_there(self) -> bool:
        if self.flipped is None:
            return False
        server, log, step = self.flipped
        return server not in self.network.dead and log.floor < step <= log.last

    def flip(self, last: bool) -> bool:
        """In a server that could be lost now, as it may end by that. `last`: of the last step, which the trainers, who
        are lost, may have to be taken back from."""
        slots = [slot for slot in self.slots() if SimulatedCluster.may_crash(self, self.slots_known[slot.index].server)]
        if not slots:
            return False
        slot = self.chance.choice(slots)
        log = self.chance.choice([slot.log, *slot.durability.folds.logs.values()])  # type: ignore[attr-defined]
        steps = [step for step in range(log.floor + 1, log.last + 1) if any(len(at) for at, _ in log.get(step))]
        if not steps:
            return False
        step = steps[-1] if last else self.chance.choice(steps)
        index, (positions, deltas) = self.chance.choice([(i, e) for i, e in enumerate(log.get(step)) if len(e[0])])
        changed = np.array(deltas)  # others may have the very bytes, in this process
        row, bit = self.chance.randrange(len(positions)), self.chance.randrange(8 * deltas.shape[1])
        changed[row, bit // 8] ^= np.uint8(1 << (bit % 8))
        entry = list(log.get(step))
        entry[index] = (positions, changed)
        log._entries[step - log.floor - 1] = tuple(entry)
        self.flipped, self.count = (self.slots_known[slot.index].server, log, step), self.count + 1
        return True

    def verify(self) -> None:
        if not self.is_there:  # looks at records as of earlier steps, by these logs
            super().verify()

    def may_crash(self, name: str) -> bool:
        return super().may_crash(name) and (not self.is_there or (self.flipped is not None and self.flipped[0] == name))


def run_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why servers ended."""
    calm = Scenario(CodeSpec(6, 2, 2), steps=10, spares=2)
    more = {"network_seed": seed, "reborn": True, "random_trainer_kills": 6, "trainers_return": True}
    cluster = DamagedLogs(dataclasses.replace(calm, **more, kill_probability=0.02), range(60, 3000, 25))
    run = Node.run

    def guarded(self: Node, action: Any, *arguments: Any) -> None:
        try:
            run(self, action, *arguments)
        except MemoryDamaged as error:  # in a process it ends that
            cluster.ended.append(str(error))
            cluster.network.kill(self.name)

    with monkeypatch.context() as patch:
        patch.setattr(Node, "run", guarded)
        result = cluster.go()
    result.check_against(simulate(calm))
    assert cluster.count >= 3
    return cluster.ended


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(16), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_server_whose_log_is_damaged_ends_and_is_replaced(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [text for seed in seeds for text in run_of(seed, monkeypatch)]
    assert len(ended) >= 3, "most logs are forgotten unused"
    assert all("damaged in memory" in text and "of table" in text for text in ended)


def test_the_new_host_of_a_lost_slot_goes_back_less_far_where_the_log_of_a_holder_is_damaged() -> None:
    """With r = 1 nobody else has it: the holder does not end as well, its log begins later."""
    cluster = SimulatedCluster(Scenario(steps=6, snapshot_every=4))
    while not cluster.slots() or cluster.slots()[0].log.last - cluster.slots()[0].log.floor < 3:
        cluster._run_trainers()
        assert cluster.network.clock.advance()
    slots = cluster.slots()
    holder = slots[slots[0].rule.holders[0]]
    log = holder.durability.folds.logs[0]  # type: ignore[attr-defined]
    step = log.floor + 1
    entry = list(log.get(step))
    index = next(i for i, (positions, _) in enumerate(entry) if len(positions))
    changed = np.array(entry[index][1])
    changed[0, 0] ^= 1
    entry[index] = (entry[index][0], changed)
    log._entries[0] = tuple(entry)
    answers: list[Any] = []
    request = wire.Cut(holder.index, 0, 0, 1, False, holder.rule.folded[0])
    holder.meet(0, 1)
    cluster.hosts[cluster.slots_known[holder.index].server].run(holder.handle, request, answers.append)
    (answer,) = answers
    assert isinstance(answer, wire.CutLog) and answer.floor == step and answer.steps[:1] == [step + 1]
