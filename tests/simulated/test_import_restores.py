"""A cluster that begins with a checkpoint that was imported, of step 0: whoever is lost at any message, training goes
on as in a cluster whose trainer 0 has loaded the same records, and every trainer is given the imported dense part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from dependent_steps import begin, train
from kept import random_records
from virtual_trainers import Kill, Trainers, TurnsSession

from torch_ecrec.client import loading
from torch_ecrec.client.client import Client
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.processes.restoring import StoredCheckpoint
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.records.positions import Bytes
from torch_ecrec.records.schema import Field
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.storage import importing
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.testing.membership import VirtualProcess
from torch_ecrec.testing.scenario import small_tables

STEPS, TRAINERS = 5, 2
JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), TRAINERS, 7)
DENSE = 0.625
CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(2, 1, 1)]


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_BYTES", 7 * 16)
    monkeypatch.setattr(importing, "PORTION_BYTES", 5 * 16)


@functools.cache
def records() -> list[Any]:
    """Positive numbers: optimizers take roots of their state."""
    return [np.abs(found.view(np.float32)).view(np.uint8) for found in random_records(JOB, 3)]


class FromMemory:
    """The tables of `records`; a `Source`."""

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        slab, first_row = JOB.place_of_table[table]
        begin, end = JOB.slabs[slab].schema.bytes_of(field.name)
        found: Bytes = records()[slab][first_row + first : first_row + last, begin:end]
        return found


@functools.cache
def imported() -> StoredCheckpoint:
    url = "memory://imported"
    layouts = [layout_of(JOB.code.slots, JOB.code.k, JOB.code.parities, slab.rows) for slab in JOB.slabs]
    dense = np.frombuffer(np.float64(DENSE).tobytes(), np.uint8)
    parts = [([0], dense)] * TRAINERS
    manifest = importing.write(Catalog(url), JOB, FromMemory(), parts, lambda slab, rows: layouts[slab].locate(rows)[0])
    return StoredCheckpoint(Restored(url, manifest.id, 0))


def script(rank: int, session: TurnsSession) -> None:
    """A script that loads for itself, or is given what was imported. Its gradients depend on all that it has seen."""
    dense, first = begin(rank, session, torch.full((1,), DENSE, dtype=torch.float64))
    if not session.restarted and rank == 0:
        for slab, records_RB in enumerate(records()):
            session.load(slab, torch.arange(len(records_RB)), torch.from_numpy(records_RB).view(torch.float32))
    session.loaded()
    train(rank, session, dense, range(first, STEPS + 1))


class Restoring(Trainers):
    """Trainers of a cluster that begins with it."""

    def __init__(self, code: CodeSpec, **more: Any) -> None:
        begins = Restored("memory://imported", imported()._restored.folder, 0), JOB
        super().__init__(JOB, script, code=code, restore=begins, **more)

    def session_of(self, client: Client, process: VirtualProcess) -> TurnsSession:
        return TurnsSession(client, lambda message: None, lambda: None, process.restarted, imported())


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
    fired = sweep(CodeSpec(3, 2, 1), 29, *LOST[who])
    assert all(fired[name] > 5 for name, _ in LOST[who]), fired


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("code", CODES[:2], ids=str)
@pytest.mark.parametrize("who", LOST)
def test_somebody_is_lost_at_every_message_of_it(who: str, code: CodeSpec) -> None:
    print(sweep(code, 1, *LOST[who]))
