"""Clusters of the simulation that write checkpoints, and what must be true of each that counts.

The oracle of a checkpoint after step t is a run of t steps that nothing disturbs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Fault, Scenario, SimulatedCluster, SimulationResult, simulate

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings

PLAIN = Scenario(steps=24, touch=0.1, spares=2, reborn=True, trainers_return=True)
POLICIES = ("full", "consecutive", "one-shot")


def with_checkpoints(scenario: Scenario, policy: str = "consecutive", **more: Any) -> Scenario:
    settings = CheckpointSettings("memory://x", **{"every_steps": 3, "policy": policy, "again_s": (0.01,), **more})
    return dataclasses.replace(scenario, checkpoint=settings)


@functools.cache
def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(dataclasses.replace(scenario, checkpoint=CheckpointSettings()))


class Checkpointed(SimulatedCluster):
    """A cluster that writes checkpoints, in which something happens at a write.

    Args:
        at: number of the write. `act`: what happens then; it gets the cluster and what was written.
    """

    def __init__(
        self,
        scenario: Scenario,
        faults: Sequence[Fault] = (),
        at: int = -1,
        act: Callable[[Checkpointed, str], None] | None = None,
        fails: Callable[[int], str] = lambda write: "",
    ) -> None:
        super().__init__(scenario, faults)
        self.fired, self.shelf.failing = False, fails

        def on_write(number: int, what: str) -> None:
            if number == at and act is not None:
                self.fired = True
                act(self, what)

        self.shelf.on_write = on_write
        self._tick()

    def _tick(self) -> None:
        """More often than the simulation does by itself, which is over within a second."""
        if self.plane.lives:
            self.plane.router.on_tick(self.network.clock.now_s)
        self.network.clock.later(0.01, self._tick)

    def kill_server(self, what: str, host: int = 0) -> None:
        """Of the slot that has written, or another one; where the contract allows it."""
        slot = (int(what.split()[-1]) if what[-1].isdigit() else 0) + host
        server = self.slots_known[slot % len(self.slots_known)].server
        if self.may_crash(server):
            self.network.kill(server)

    def kill_trainer(self) -> None:
        if self.may_crash(self.ranks[0].name):
            self.kill(self.ranks[0])


def check(cluster: Checkpointed) -> SimulationResult:
    """Runs it to its end: the run is the undisturbed one, and each checkpoint that counts is of its step."""
    run = cluster.go()
    check_result(cluster, run)
    return run


def check_result(cluster: Checkpointed, run: SimulationResult) -> None:
    """Raises AssertionError; see `check`."""
    scenario = cluster.scenario
    run.check_against(undisturbed(scenario))
    last = 0
    for finished in cluster.shelf.counts:
        assert finished.done > last, "checkpoints go forward"
        last = finished.done
        before = tuple(load for load in scenario.overwrites if load[0] <= finished.done)
        there = undisturbed(dataclasses.replace(scenario, steps=finished.done, overwrites=before))
        for got, right in zip(cluster.shelf.records(scenario.job, finished), there.records, strict=True):
            assert torch.equal(got.view(torch.float32), right), f"{finished.folder} is not as of step {finished.done}"
        dense = cluster.shelf.parts[finished.folder, finished.dense_of].dense
        assert set(dense) == set(range(scenario.trainers))
        assert all(header[0] == finished.done for header, _ in dense.values())
