"""Prioritised saves in the simulated cluster: a slot that is lost beyond repair takes each row from the newest save
that has it, whoever dies at any message or write of one, and nobody else ever reads them.

The oracle is that of `partial_runs.py`: it replays all pushes, and a slot's records are those of the saves that it
began anew with, on its checkpoint; what is in a save, it works out likewise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from partial_runs import JOB, Oracle, Partial, check
from thinned import thinned
from virtual_trainers import Kill

from torch_ecrec.spec.job import CodeSpec

SAVERS = ("mfu", "ssu", "scar")
CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 2, 1), CodeSpec(5, 2, 2), CodeSpec(4, 2, 1, protection="none")]
CODE = CODES[1]


def lost(code: CodeSpec) -> int:
    """So many slots together are beyond repair."""
    return code.parities + 1


@pytest.mark.parametrize(("code", "saver"), thinned(CODES, SAVERS, 3))
def test_lost_slots_take_what_was_saved_since_the_checkpoint(code: CodeSpec, saver: str) -> None:
    run = Partial(saver=saver, code=code, kills=[Kill("saved", lost(code), 0)]).go()
    check(run)
    (event,) = run.events_of("recovered_partly")
    (partial_restore,), oracle = run.coordinator._state.partial.partial_restores, Oracle(run)
    assert event["saves"] == len(partial_restore.saves) >= 1
    newer = 0
    for slot, life, at in partial_restore.lives:
        used = oracle.saves(slot, life)
        assert used and at is not None
        plain = run.shelf.records(JOB, run.shelf.find(partial_restore.folder))
        some = run.shelf.records(JOB, run.shelf.find(partial_restore.folder), used)
        for table_group, layout in enumerate(oracle.layouts):
            rows = torch.from_numpy(layout.row_at(slot, np.arange(layout.data_rows(slot))))
            newer += int((plain[table_group][rows] != some[table_group][rows]).any(dim=1).sum())
    assert newer > 0, "rows are newer by what was saved"
    status = run.coordinator.status(0.0).checkpoints.saves
    assert (status.saver, status.saves) == (saver, len(run.coordinator._state.saving.known.since))


@pytest.mark.parametrize("saver", SAVERS)
def test_a_save_has_the_portion_of_rows_at_most_and_changed_ones_only(saver: str) -> None:
    run = Partial(saver=saver, code=CODE).go()
    check(run)
    layouts = Oracle(run).layouts
    assert len(run.shelf.saves) >= 2
    for save in run.shelf.saves:
        rows: Counter[tuple[int, int]] = Counter()
        for slot in save.parts:
            part = run.shelf.parts[save.folder, slot]
            assert not part.dense, "it has nothing that a restore could begin with"
            for portion in part.portions:
                rows[slot, portion.table_group] += len(portion.rows_N)
        assert rows.total() > 0
        assert all(
            count <= max(1, layouts[table_group].data_rows(slot) // 6) for (slot, table_group), count in rows.items()
        )


def test_checkpoints_are_the_same_with_saves_and_without() -> None:
    """Byte for byte, incremental ones too: saves have nothing to do with what has changed since the last one."""
    with_saves, without = Partial(saver="mfu", code=CODE).go(), Partial(saver="mfu", code=CODE, saves=False).go()
    check(with_saves)
    assert with_saves.shelf.saves and not without.shelf.saves
    assert with_saves.shelf.counts and without.shelf.counts
    for one in with_saves.shelf.counts:
        other = next(other for other in without.shelf.counts if other.done == one.done)
        mine, theirs = (run.shelf.records(JOB, it) for run, it in ((with_saves, one), (without, other)))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for a, b in zip(with_saves.run.records, without.run.records, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_all_go_back_to_the_checkpoint_and_never_to_a_save() -> None:
    """More lost samples than wanted: to the bits of the run that nothing disturbs."""
    run, right = Partial(saver="mfu", most=0.0, kills=[Kill("saved", 2, 0)]).go(), Partial(saver="mfu").go()
    check(run)
    (event,) = run.events_of("went_beyond")
    assert event["name"] in {one.folder for one in run.shelf.counts} and run.shelf.saves
    assert not run.shelf.begun or not run.events_of("recovered_partly")
    for mine, theirs in zip(run.run.records, right.run.records, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


# somebody dies at one ---------------------------------------------------------------------------------

WHO = {
    "a server": Kill("any", 0, 0),
    "a trainer": Kill("trainer", 1, 0),
    "the coordinator": Kill("coordinator", 0, 0),
}


@functools.cache
def moments(saver: str) -> dict[str, list[int]]:
    """Messages, and writes, of prioritised saves in a run that nothing disturbs."""
    run = Partial(saver=saver, code=CODE).go()
    return {kind: sorted(numbers) for kind, numbers in run.saving.items()}


def sweep(saver: str, who: str, kind: str, every: int, first: int = 0, also: int = 40) -> Counter[str]:
    """One is lost at each of these moments, and later two slots together."""
    count: Counter[str] = Counter()
    found = moments(saver)
    for at in found[kind][first::every]:
        kill = WHO[who]
        kills = [dataclasses.replace(kill, at=at)] if kind == "data" else []
        run = Partial(saver=saver, code=CODE, kills=kills, at_control={at: kill} if kind == "control" else {})
        run.at_write = {at: kill} if kind == "writes" else {}
        run.then = Kill("beyond", 2, also)
        try:
            run.go()
            check(run)
        except BaseException:
            print(saver, who, kind, at, also)
            raise
        count["runs"] += 1
        count["lives"] += run.lives
        count["saves"] += len(run.shelf.saves)
        count["used"] += sum(map(len, run.shelf.begun.values()))
        count["fired"] += run.then is None
        for event in ("recovered_partly", "went_beyond", "going back", "regathered", "checkpoint_void"):
            count[event] += len(run.events_of(event))
    return count


@pytest.mark.parametrize(("who", "kind"), thinned(list(WHO), ["data", "control", "writes"], 3))
def test_somebody_dies_at_moments_of_a_save(who: str, kind: str) -> None:
    count = sweep("mfu", who, kind, every=11)
    print(count)
    assert count["fired"] == count["runs"] >= 3 and count["saves"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["data", "control", "writes"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("saver", SAVERS)
def test_somebody_dies_at_every_moment_of_a_save(saver: str, who: str, kind: str) -> None:
    for also in (0, 40, 80):
        print(count := sweep(saver, who, kind, every=1, also=also))
        assert count["fired"] == count["runs"]
