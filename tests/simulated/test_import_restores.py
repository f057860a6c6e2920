"""A cluster that begins with a checkpoint that was imported, of step 0: whoever is lost at any message, training goes
on as in a cluster whose trainer 0 has loaded the same records, and every trainer is given the imported dense part.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dependent_steps import begin, train
from harness.membership import VirtualProcess
from harness.scenario import small_tables
from kept import random_records, read_by_slots
from thinned import in_turns
from virtual_trainers import Kill, Trainers, TurnsSession

from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Beginning
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.checkpointing import Restorable
from torch_ecrec.processes.checkpoint_files import FileManifests
from torch_ecrec.processes.restore_source import dense_model
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.records.positions import Bytes
from torch_ecrec.records.schema import Field
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.storage import importing
from torch_ecrec.storage.catalog import Catalog

STEPS, TRAINERS = 5, 2
JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), TRAINERS, 7)
DENSE = 0.625
CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(2, 1, 1)]


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "PORTION_BYTES", 5 * 16)


@functools.cache
def records() -> list[Any]:
    """Positive numbers: optimizers take roots of their state."""
    return [np.abs(found.view(np.float32)).view(np.uint8) for found in random_records(JOB, 3)]


class FromMemory:
    """The tables of `records`; a `Source`."""

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        table_group, first_row = JOB.place_of_table[table]
        begin, end = JOB.table_groups[table_group].schema.bytes_of(field.name)
        found: Bytes = records()[table_group][first_row + first : first_row + last, begin:end]
        return found


class Imported:
    """What was imported, as those read it who begin with it: servers records, trainers the dense model."""

    def __init__(self, restored: Restored) -> None:
        self.restored, self.done = restored, restored.done
        self.beginning = Beginning(restored.done, functools.partial(dense_model, restored))
        self.records = [torch.from_numpy(records_RB) for records_RB in read_by_slots(restored, JOB)[0]]


@functools.cache
def imported() -> Imported:
    url = "memory://imported"
    layouts = JOB.layouts
    dense = np.frombuffer(np.float64(DENSE).tobytes(), np.uint8)
    parts = [([0], dense)] * TRAINERS
    manifest = importing.write(
        Catalog(url), JOB, FromMemory(), parts, lambda table_group, rows: layouts[table_group].locate(rows)[0]
    )
    return Imported(Restored(url, manifest.id, 0))


def script(rank: int, session: TurnsSession) -> None:
    """A script that loads for itself, or is given what was imported. Its gradients depend on all that it has seen."""
    dense, first = begin(rank, session, torch.full((1,), DENSE, dtype=torch.float64))
    if not session.restarted and rank == 0:
        for table_group, records_RB in enumerate(records()):
            session.load(table_group, torch.arange(len(records_RB)), torch.from_numpy(records_RB).view(torch.float32))
    session.loaded()
    train(rank, session, dense, range(first, STEPS + 1))


class Restoring(Trainers):
    """Trainers of a cluster that begins with it."""

    def __init__(self, code: CodeSpec, **more: Any) -> None:
        super().__init__(JOB, script, code=code, restore=(imported().restored, JOB), **more)
        self.shelf.others[imported().restored.folder] = imported().records

    def checkpoint_of(self, folder: str) -> Any:
        return imported() if folder == imported().restored.folder else super().checkpoint_of(folder)


@functools.cache
def loaded() -> Trainers:
    return Trainers(JOB, script).go()


def check(run: Trainers) -> None:
    pushes, wanted = run.told.sorted_pushes(), loaded().told.sorted_pushes()
    assert pushes.keys() == wanted.keys() and len(pushes) == STEPS * TRAINERS
    for key, push in pushes.items():
        for (rows, gradients), (right_rows, right_gradients) in zip(push, wanted[key], strict=True):
            assert torch.equal(rows, right_rows) and torch.equal(gradients, right_gradients), key
    for mine, theirs in zip(run.run.records, loaded().run.records, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_training_is_that_of_a_cluster_that_has_loaded_the_same(code: CodeSpec) -> None:
    check(Restoring(code).go())


def test_the_records_matter() -> None:
    """The oracle is none of a run that has not loaded them."""
    other = Trainers(dataclasses.replace(JOB, seed=8), lambda rank, session: unloaded(rank, session)).go()
    assert not all(map(torch.equal, other.run.records, loaded().run.records))


def unloaded(rank: int, session: TurnsSession) -> None:
    session.load = lambda *_: None  # type: ignore[method-assign]
    script(rank, session)


LOST = {
    "server": [("server", 1)],
    "trainer": [("trainer", 0)],
    "coordinator and trainer": [("coordinator", 0), ("trainer", 1)],
}


def sweep(code: CodeSpec, every: int, *lost: tuple[str, int]) -> Counter[str]:
    fired: Counter[str] = Counter()
    for at in range(0, len(Restoring(code).go().network.sent), every):
        run = Restoring(code, kills=[Kill(who, which, at) for who, which in lost], spares=2, reborn=True).go()
        check(run)
        fired.update(kill.who for kill in run.fired)
    return fired


@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_at_messages_of_it(who: str) -> None:
    fired = sweep(CodeSpec(3, 2, 1), 17, *LOST[who])
    assert all(fired[name] > 5 for name, _ in LOST[who]), fired


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("code", CODES[:2], ids=str)
@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_at_every_message_of_it(who: str, code: CodeSpec) -> None:
    print(sweep(code, 1, *LOST[who]))


# beyond parity --------------------------------------------------------------------------------------------

WITHIN_S = 300.0  # for the manifests's thread: only a hang reaches it


@functools.cache
def somebody_elses() -> str:
    """The newest at the place: another import, of other numbers, which this run has not begun with."""
    imported()
    layouts = JOB.layouts
    parts = [([0], np.zeros(8, np.uint8))] * TRAINERS
    catalog = Catalog("memory://imported")
    other = importing.write(
        catalog, JOB, Nothing(), parts, lambda table_group, rows: layouts[table_group].locate(rows)[0]
    )
    assert catalog.newest().id == other.id != imported().restored.folder
    return other.id


class Nothing:
    """Tables of zeros; a `Source`."""

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        return None


class Beyond(Restoring):
    """More is lost than parity repairs: all go back to the run's newest checkpoint, or to the one that was imported.

    Which one that is, the manifests of real processes says, unless the run has one of its own.
    """

    def __init__(self, code: CodeSpec = JOB.code, own_after: int = 1000, **more: Any) -> None:
        somebody_elses()
        again: dict[str, Any] = {"every_steps": own_after, "beyond": "checkpoint", "again_s": (0.01,)}
        super().__init__(code, checkpoint=CheckpointSettings("memory://imported", **again), **more)
        self.backs: list[str] = []  # to which, each time
        self.restoring = 0  # losses that were none: servers were restoring still
        files = FileManifests(CheckpointSettings("memory://imported", **again), lambda: JOB, lambda act: act())
        own = self.shelf.newest

        def newest(run: str, began_with: Restored | None, done: Callable[[Restorable | None, str], None]) -> None:
            def found(restorable: Restorable | None, why: str) -> None:
                self.backs.append(why if restorable is None else restorable[0].folder)
                done(restorable, why)

            if self.shelf.counts:
                own(run, None, found)
                return
            told: list[Any] = []
            ended = threading.Event()
            files.newest(run, began_with, lambda *values: (told.append(values), ended.set()))  # type: ignore[func-returns-value]
            assert ended.wait(WITHIN_S)
            self.shelf.later((0.0002, 0.006), "newest", lambda _: found(*told[0]))

        self.shelf.newest = newest  # type: ignore[method-assign, assignment]
        self.tick_often()

    def session_of(self, client: Client, process: VirtualProcess) -> TurnsSession:
        assert process.restored is not None, "it has begun with one"
        return super().session_of(client, process)

    def _kill(self, kill: Kill) -> bool:
        if kill.who != "beyond":
            return super()._kill(kill)
        servers = {place.server for place in self.coordinator.slots[: kill.which]}
        if len(servers) < kill.which or not self.plane.lives or self.coordinator.goes_back:
            return False
        self.restoring += self.restores
        for server in servers - self.network.dead:
            self.network.kill(server)
        return True


LATER = {
    "nobody": [],
    "trainer": [("trainer", 1)],
    "coordinator": [("coordinator", 0)],
    "beyond again": [("beyond", 2)],
}


def sweep_beyond(every: int, *more: tuple[str, int], later: int = 40, own_after: int = 1000) -> Counter[str]:
    fired: Counter[str] = Counter()
    messages = len(Restoring(JOB.code).go().network.sent) * (2 if own_after < STEPS else 1)
    for at in range(0, messages, every):
        kills = [Kill("beyond", 2, at), *(Kill(who, which, at + later) for who, which in more)]
        run = Beyond(own_after=own_after, reborn=True, kills=kills).go()
        check(run)
        fired.update(kill.who for kill in run.fired)
        fired["to the imported one"] += run.backs.count(imported().restored.folder)
        fired["to its own"] += sum(folder in {one.folder for one in run.shelf.counts} for folder in run.backs)
        fired["beyond"] -= run.restoring
        assert fired["to the imported one"] + fired["to its own"] == fired["beyond"], run.backs
    return fired


@in_turns("every", 35, 19)
@pytest.mark.parametrize("who", LATER)
def test_when_all_is_lost_before_the_first_own_checkpoint_all_go_back_to_the_imported_one(who: str, every: int) -> None:
    """To that one: not to the newest at the place, which is another's."""
    fired, least = sweep_beyond(every, *LATER[who]), 6 if every == 19 else 3
    print(fired)
    assert fired["to the imported one"] == fired["beyond"] >= least
    assert all(fired[name] >= least for name, _ in LATER[who])


def test_once_there_is_an_own_one_they_go_back_to_that() -> None:
    fired = sweep_beyond(17, own_after=1)
    print(fired)
    assert fired["to the imported one"] > 2 and fired["to its own"] > 2
