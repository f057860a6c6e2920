"""A restore, where servers begin with zeros in the place of initial values: coordinators that are lost before there is
a placement and after, a slot that moves before the restore has ended, two servers lost in it, tables of 16 bits, slots
without rows. All ends as in the run that the checkpoint is of.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dependent_steps import begin, train
from harness.membership import VirtualProcess
from harness.scenario import half_tables, small_tables
from virtual_trainers import Kill, OnShelf, Trainers, TurnsSession, assert_same_after

from torch_ecrec.client import loading
from torch_ecrec.client.client import Client
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

STEPS, TRAINERS = 6, 2
ADAM, SGD = OptimizerSpec("adam", lr=0.1), OptimizerSpec("sgd", lr=0.1)
TINY = (TableSpec("a", 1, 3, -1, 1, ADAM, "float16"), TableSpec("b", 2, 5, -1, 1, SGD, "bfloat16"))  # fewer than slots
JOBS = {"plain": small_tables(), "halves": half_tables(), "tiny": TINY}
CODE, TWO_PARITIES = CodeSpec(3, 2, 1), CodeSpec(5, 3, 2)


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_BYTES", 7 * 16)


def script(rank: int, session: TurnsSession) -> None:
    dense, first = begin(rank, session, torch.zeros(1, dtype=torch.float64))
    session.loaded()
    train(rank, session, dense, range(first, STEPS + 1), touched=0.5)


def job_of(tables: str) -> JobSpec:
    return JobSpec(JOBS[tables], CODE, TRAINERS, 7)


@functools.cache
def written(tables: str) -> tuple[Trainers, OnShelf]:
    settings = CheckpointSettings("memory://shelf", every_steps=2)
    run = Trainers(job_of(tables), script, checkpoint=settings).go()
    middle = next(finished for finished in run.shelf.counts if 2 <= finished.done < STEPS)
    return run, OnShelf(run.shelf, job_of(tables), middle)


class Restoring(Trainers):
    """A cluster that begins with it.

    Args:
        coordinators: at which events one is lost, placement or not.
        drains_at: after how many messages a slot's server is drained.
    """

    def __init__(
        self,
        tables: str,
        code: CodeSpec = CODE,
        coordinators: tuple[int, ...] = (),
        drains_at: int | None = None,
        **more: Any,
    ) -> None:
        self._checkpoint, self.early = written(tables)[1], 0  # coordinators, before there was a placement
        self.restoring = self.moved = 0  # losses, moves before the restore had ended
        self._coordinators, self._drains_at = list(coordinators), drains_at
        begins = Restored("memory://shelf", "shelf", self._checkpoint.done), job_of(tables)
        super().__init__(job_of(tables), script, code=code, restore=begins, **more)

    def session_of(self, client: Client, process: VirtualProcess) -> TurnsSession:
        return TurnsSession(client, lambda message: None, lambda: None, process.restarted, self._checkpoint)

    def _idle(self) -> bool:
        if self._coordinators and self.events >= self._coordinators[0] and self.plane.lives:
            self._coordinators.pop(0)
            self.early += not self.coordinator.slots
            self.kill_coordinator()
        if self._drains_at is not None and len(self.network.sent) >= self._drains_at and self.coordinator.slots:
            assert not self.coordinator.drain(self.coordinator.slots[1].server, False)
            self._drains_at = None
        if self.coordinator.origin is None:
            self.moved = sum(event["event"] == "moved" for event in self.run.events)
        return super()._idle()

    def _kill(self, kill: Kill) -> bool:
        fired = super()._kill(kill)
        self.restoring += fired and self.coordinator.origin is None
        return fired


def check(run: Restoring, tables: str) -> None:
    """All is as in the run that the checkpoint is of; and every server knew that it began with one."""
    right, checkpoint = written(tables)
    assert all(host.judge.begins > 0 for name, host in run.hosts.items() if host.job and name not in run.network.dead)
    assert_same_after(run, right, checkpoint.done)


@pytest.mark.parametrize("tables", JOBS)
@pytest.mark.parametrize("code", [CODE, TWO_PARITIES, CodeSpec(4, 2, 1, protection="none")], ids=str)
def test_it_goes_on_whatever_the_tables(tables: str, code: CodeSpec) -> None:
    check(Restoring(tables, code).go(), tables)


def test_coordinators_are_lost_before_there_is_a_placement() -> None:
    early = 0
    for first in range(0, 40, 3):
        run = Restoring("plain", coordinators=(first, first + 2, first + 40), spares=1, reborn=True).go()
        check(run, "plain")
        early += run.early
        assert run.run.coordinator_kills == 3
    assert early > 10


@pytest.mark.parametrize("tables", ["plain", "tiny"])
def test_two_servers_are_lost_in_a_restore_with_two_parities(tables: str) -> None:
    restoring = 0
    for at in range(10, 200, 19):
        kills = [Kill("server", 1, at), Kill("server", 3, at + 2)]
        run = Restoring(tables, TWO_PARITIES, kills=kills, spares=2, reborn=True).go()
        check(run, tables)
        assert len(run.fired) == 2
        restoring += run.restoring
    assert restoring > 4


def test_a_slot_moves_before_the_restore_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is drained gives its slot to a spare, while records still arrive."""
    monkeypatch.setattr(loading, "LOAD_BYTES", 16)
    moved = 0
    for at in range(0, 240, 23):
        run = Restoring("plain", drains_at=at, spares=1).go()
        check(run, "plain")
        moved += run.moved
    assert moved > 5
