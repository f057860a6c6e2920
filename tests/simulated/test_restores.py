"""A cluster that begins with a checkpoint, in the simulated cluster: whoever is lost at any message of the restore or
after it, training goes on as in the run that the checkpoint is of.

The checkpoints are written by one run, by the code that writes real ones; the restoring clusters have other codes. What
is compared: every push, the dense number that depends on all steps before, and all records.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from dependent_steps import begin, train
from harness.scenario import small_tables
from thinned import in_turns
from virtual_trainers import Kill, OnShelf, Trainers, TurnsSession, assert_same_after

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.spec.job import CodeSpec, JobSpec

STEPS, TRAINERS = 9, 2
JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), TRAINERS, 7)


def script(rank: int, session: TurnsSession) -> None:
    """Its gradients, and its dense number, depend on all that it has looked up."""
    dense, first = begin(rank, session, torch.zeros(1, dtype=torch.float64))
    session.loaded()
    train(rank, session, dense, range(first, STEPS + 1))


class Restoring(Trainers):
    """Trainers of a cluster that begins with a checkpoint."""

    def __init__(self, checkpoint: OnShelf, code: CodeSpec, **more: Any) -> None:
        super().__init__(JOB, script, code=code, begins=checkpoint, **more)


class Beyond(Trainers):
    """More is lost than parity repairs, once a checkpoint counts: all go back to the newest one."""

    def __init__(self, **more: Any) -> None:
        again: dict[str, Any] = {"every_steps": 2, "policy": "consecutive", "beyond": "checkpoint", "again_s": (0.01,)}
        super().__init__(JOB, script, checkpoint=CheckpointSettings("memory://shelf", **again), **more)
        self.tick_often()

    def _kill(self, kill: Kill) -> bool:
        if kill.who == "coordinator" and not self.shelf.counts:
            return False  # training may be over before another one has written any
        if kill.who != "beyond":
            return super()._kill(kill)
        servers = {place.server for place in self.coordinator.slots[: kill.which]}
        if not self.shelf.counts or len(servers) < kill.which or not self.plane.lives or self.coordinator.goes_back:
            return False
        for server in servers - self.network.dead:
            self.network.kill(server)
        return True


@functools.cache
def written() -> tuple[Trainers, OnShelf]:
    """The run that nothing disturbs, with its checkpoint of a step in the middle."""
    settings = CheckpointSettings("memory://shelf", every_steps=3, policy="consecutive")
    run = Trainers(JOB, script, checkpoint=settings).go()
    middle = next(finished for finished in run.shelf.counts if 3 <= finished.done < STEPS)
    return run, OnShelf(run.shelf, JOB, middle)


def check(run: Trainers) -> None:
    """After the checkpoint, all is as in the run that it is of."""
    right, checkpoint = written()
    assert_same_after(run, right, checkpoint.done)


CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(2, 1, 1), CodeSpec(4, 2, 1, protection="none")]


@pytest.mark.parametrize("code", CODES, ids=str)
def test_it_goes_on_bit_for_bit_whatever_the_code(code: CodeSpec) -> None:
    _, checkpoint = written()
    run = Restoring(checkpoint, code).go()
    check(run)
    assert run.lives == 1 and not run.told.overwrites


@pytest.mark.parametrize("who", ["server", "trainer"])
def test_a_new_host_counts_steps_of_training_from_the_checkpoint_on(who: str) -> None:
    """Before it has made one: a status named another step of it, and what was damaged too early a one."""
    run = Restoring(written()[1], CodeSpec(3, 2, 1), kills=[Kill(who, 0, 80)], spares=1, reborn=True).go()
    for slot in run.slots():
        slot.load_steps = None
        assert slot.trained(slot.rule.applied) == STEPS


@functools.cache
def messages_of(code: CodeSpec) -> int:
    return len(Restoring(written()[1], code).go().network.sent)


def sweep(code: CodeSpec, every: int, *lost: tuple[str, int]) -> Counter[str]:
    """Somebody is lost at each of these messages."""
    fired: Counter[str] = Counter()
    for at in range(0, messages_of(code), every):
        run = Restoring(
            written()[1], code, kills=[Kill(who, which, at) for who, which in lost], spares=2, reborn=True
        ).go()
        check(run)
        fired.update(kill.who for kill in run.fired)
        fired["lives"] += run.lives
    return fired


LOST = {
    "server": [("server", 1)],
    "trainer": [("trainer", 0)],
    "coordinator": [("coordinator", 0)],
    "trainer and server": [("trainer", 1), ("server", 0)],
    "coordinator and trainer": [("coordinator", 0), ("trainer", 0)],
}


@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_at_messages_of_a_restore(who: str) -> None:
    fired = sweep(CodeSpec(3, 2, 1), 23, *LOST[who])
    print(fired)
    assert all(fired[name] > 5 for name, _ in LOST[who])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("code", CODES[:2], ids=str)
@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_at_every_message_of_a_restore(who: str, code: CodeSpec) -> None:
    print(sweep(code, 1, *LOST[who]))


@functools.cache
def messages_beyond() -> int:
    run = Beyond(reborn=True).go()
    check_all(run)
    return len(run.network.sent)


def check_all(run: Trainers) -> None:
    """The whole run is the undisturbed one; what was done again was the same (`Told`)."""
    right = written()[0]
    pushes, wanted = run.told.sorted_pushes(), right.told.sorted_pushes()
    assert pushes.keys() == wanted.keys()
    for mine, theirs in zip(run.run.records, right.run.records, strict=True):
        assert torch.equal(mine, theirs)


def sweep_beyond(every: int, *more: tuple[str, int], later: int = 40) -> Counter[str]:
    """Two hosts of slots are lost together at each of these messages, and somebody else so many messages later."""
    fired: Counter[str] = Counter()
    for at in range(0, messages_beyond(), every):
        kills = [Kill("beyond", 2, at), *(Kill(who, which, at + later) for who, which in more)]
        run = Beyond(reborn=True, kills=kills).go()
        check_all(run)
        fired.update(kill.who for kill in run.fired)
        fired["went back"] += sum(event["event"] == "went_beyond" for event in run.run.events)
        fired["steps made again"] += run.told.again
    return fired


LATER: dict[str, list[tuple[str, int]]] = {
    "nobody": [],
    "server": [("server", 2)],
    "trainer": [("trainer", 1)],
    "beyond again": [("beyond", 3)],
    "coordinator": [("coordinator", 0)],
}


@pytest.mark.parametrize("who", LATER)
def test_beyond_parity_all_go_back_to_the_newest_checkpoint(who: str) -> None:
    fired = sweep_beyond(29, *LATER[who])
    print(fired)
    points = fired["beyond"] // 2 if who == "beyond again" else fired["beyond"]
    assert fired["went back"] >= points > 4 and fired["steps made again"] > points


@in_turns("every", 61, 29)
@pytest.mark.parametrize("later", [-40, -5, 1, 3, 5, 8, 12])
def test_a_coordinator_is_lost_shortly_before_or_after(later: int, every: int) -> None:
    """The next one knows whose checkpoints are its run's, although it has written none."""
    fired = sweep_beyond(every, ("coordinator", 0), later=later)
    print(fired)
    least = 4 if every == 29 else 2
    assert fired["beyond"] >= least and fired["coordinator"] >= least


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("who", LATER)
def test_beyond_parity_at_every_message(who: str) -> None:
    print(sweep_beyond(1, *LATER[who]))


def test_another_job_is_refused_by_name() -> None:
    """Other tables, optimizers, seed or number of trainers."""
    run = Restoring(written()[1], CodeSpec(3, 2, 1))
    job = JobSpec(JOB.tables[:-1], JOB.code, TRAINERS, JOB.seed)
    refusal = run.coordinator.refusal(join_of("trainer", "one", 0, rank=0, job=job))
    assert (
        refusal is not None
        and "the checkpoint shelf is of another job: it has tables ['c'] that this job lacks" in refusal
        and "start it anew without `--restore`, or with that of a checkpoint of this job" in refusal
    )
    assert run.coordinator._state.job.refusal(JOB) is None
