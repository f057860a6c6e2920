"""A restore: coordinators that are lost before there is
a placement and after, a server that is drained, whoever is lost while servers read, a store that fails, tables of 16
bits, slots without rows. All ends as in the run that the checkpoint is of.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dependent_steps import begin, train
from harness.scenario import half_tables, small_tables
from virtual_trainers import Kill, OnShelf, Trainers, TurnsSession, assert_same_after

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.server.slot_restore import AGAIN_S
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

STEPS, TRAINERS = 6, 2
ADAM, SGD = OptimizerSpec("adam", lr=0.1), OptimizerSpec("sgd", lr=0.1)
TINY = (TableSpec("a", 1, 3, -1, 1, ADAM, "float16"), TableSpec("b", 2, 5, -1, 1, SGD, "bfloat16"))  # fewer than slots
JOBS = {"plain": small_tables(), "halves": half_tables(), "tiny": TINY}
CODE, TWO_PARITIES = CodeSpec(3, 2, 1), CodeSpec(5, 3, 2)


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
        at_read: who is lost at which read of the store.
        moved: slots that moved, and how many of them before the restore had ended.
    """

    def __init__(
        self,
        tables: str,
        code: CodeSpec = CODE,
        coordinators: tuple[int, ...] = (),
        drains_at: int | None = None,
        at_read: dict[int, Kill] | None = None,
        **more: Any,
    ) -> None:
        self.early = 0  # coordinators, before there was a placement
        self.restoring, self.drained = 0, False  # losses before the restore had ended; whether that was in it
        self._at_read = dict(at_read or {})
        self._coordinators, self._drains_at = list(coordinators), drains_at
        super().__init__(job_of(tables), script, code=code, begins=written(tables)[1], **more)
        self.shelf.on_write = self._on_read
        self.reads = 0

    def _on_read(self, number: int, what: str) -> None:
        if "read" in what:
            if self.reads in self._at_read:
                self.kills_to_come.insert(0, self._at_read.pop(self.reads))
            self.reads += 1

    def _idle(self) -> bool:
        if self._coordinators and self.events >= self._coordinators[0] and self.plane.lives:
            self._coordinators.pop(0)
            self.early += not self.coordinator.slots
            self.kill_coordinator()
        if self._drains_at is not None and len(self.network.sent) >= self._drains_at and self.coordinator.slots:
            assert not self.coordinator.drain(self.coordinator.slots[1].server, False)
            self._drains_at, self.drained = None, self.coordinator.restores
        return super()._idle()

    def _kill(self, kill: Kill) -> bool:
        restoring = self.restores
        fired = super()._kill(kill)
        self.restoring += fired and restoring
        return fired


def check(run: Restoring, tables: str) -> None:
    """All is as in the run that the checkpoint is of; and every server knew that it began with one."""
    right, checkpoint = written(tables)
    assert all(
        host.validator.begins > 0 for name, host in run.hosts.items() if host.job and name not in run.network.dead
    )
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
    for at in range(2, 200, 11):
        kills = [Kill("server", 1, at), Kill("server", 3, at + 2)]
        run = Restoring(tables, TWO_PARITIES, kills=kills, spares=2, reborn=True).go()
        check(run, tables)
        assert len(run.fired) == 2
        restoring += run.restoring
    assert restoring > 4


def test_a_server_that_is_drained_in_a_restore_gives_its_slot_away_when_that_has_ended() -> None:
    """What it hands over can be read: fewer steps were made here than of training, and no number of them was let in."""
    drained = 0
    for at in range(0, 60, 3):
        run = Restoring("plain", drains_at=at, spares=1).go()
        check(run, "plain")
        moved = sum(event["event"] == "moved" for event in run.run.events)
        assert moved == 1 or not run.drained
        drained += run.drained
    assert drained > 5


LOST = {
    "server": [Kill("server", 1, 0)],
    "two servers": [Kill("server", 0, 0), Kill("server", 2, 0)],
    "all servers": [Kill("server", which, 0) for which in range(3)],
    "trainer": [Kill("trainer", 1, 0)],
    "coordinator": [Kill("coordinator", 0, 0)],
    "coordinator and server": [Kill("coordinator", 0, 0), Kill("server", 1, 0)],
    "trainer and coordinator": [Kill("trainer", 0, 0), Kill("coordinator", 0, 0)],
}


@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_while_servers_read(who: str) -> None:
    """At every read, of a coordinator's next one too: more together than parity repairs, since it is not needed."""
    restoring = 0
    for at in range(Restoring("plain").go().reads):
        reads = {at + i: kill for i, kill in enumerate(LOST[who])}
        run = Restoring("plain", at_read=reads, spares=2, reborn=True).go()
        check(run, "plain")
        assert run.fired or at + len(reads) > run.reads
        restoring += run.restoring
    assert restoring >= 9 - len(LOST[who])


@pytest.mark.parametrize("read", range(0, 9, 2))
def test_a_store_that_cannot_be_read_now_is_asked_again(read: int) -> None:
    run = Restoring("plain")
    run.shelf.hangs = True
    run.shelf.failing = lambda number: "it hangs" if number == read else ""
    check(run.go(), "plain")
    assert run.lives == 1 and run.network.clock.now_s > AGAIN_S


def test_a_checkpoint_that_cannot_be_read_ends_the_cluster_by_name() -> None:
    run, where = Restoring("plain"), "s3://bucket/folder" * 20
    run.shelf.failing = lambda number: f"{where}/slot-00001 was altered: what to do" if number == 5 else ""
    why = f"the checkpoint to begin with cannot be read: {where}/slot-00001 was altered: what to do"
    with pytest.raises(AssertionError, match=why):
        run.go()
    assert run.coordinator.fatal_kind == "checkpoint"
