"""The writer, the manifests and a restore, without a cluster: what a slot gives is what a cluster begins with."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from conftest import wait_until
from kept import random_records, read_by_slots, small_job, unreadable

from torch_ecrec.cli.main import main
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.processes import checkpoint_files, restore_source
from torch_ecrec.processes.checkpoint_files import FileCheckpointWriter, FileManifests, FileWriting
from torch_ecrec.protocol import bounds, messages
from torch_ecrec.server.capture import Portion
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import check_rows
from torch_ecrec.storage.listing import Listing
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import MANIFEST, NOTE_MOST, NOTES_MOST, decode, encode
from torch_ecrec.storage.tensor_file import TensorFile

LIMIT_S = 300.0  # for a thread: only a hang reaches it
JOB = small_job(trainers=2)


class Answer:
    """What somebody is told from another thread."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.values: tuple[Any, ...] = ()

    def __call__(self, *values: Any) -> None:
        self.values = values
        self._told.set()

    def wait(self) -> tuple[Any, ...]:
        assert self._told.wait(LIMIT_S)
        return self.values


def order_of(url: str, done: int, base: str = "", run: str = "run", **encoding: Any) -> messages.Capture:
    folder = f"{done:012d}-{run}-1-{done}"
    return messages.Capture(1, done + 5, done, 0, base, url, folder, encoding, 0.0)


def slots_of(table_group: int) -> Any:
    """Of each row of a table group, its slot."""
    layout = layout_of(JOB.code.slots, JOB.code.k, JOB.code.parities, JOB.table_groups[table_group].rows)
    return layout.locate(np.arange(layout.rows))[0]


def write(
    url: str, order: messages.Capture, truth: list[Any], swapped: bool = False, every: int = 1, dense: bool = True
) -> dict[int, dict[str, Any]]:
    """All slots' parts, as they tell them. `swapped`: two slots have each other's rows. `every`: so many rows are left
    out between two. `dense`: slot 0 writes the dense model."""
    told = {}
    for slot in range(JOB.code.slots):
        of = {0: 1, 1: 0}.get(slot, slot) if swapped else slot
        rows = [np.flatnonzero(slots_of(s) == of)[::every] for s in range(len(truth))]
        portions = [Portion(s, rows[s], r[rows[s]]) for s, r in enumerate(truth)]
        parts = [((order.step, t), ([order.done, t], torch.full((9,), t, dtype=torch.uint8))) for t in range(2)]
        done, left = Answer(), iter(portions)
        FileCheckpointWriter(lambda act: act()).write(
            order,
            slot,
            JOB.table_groups,
            lambda size, left=left: next(left, None),
            parts if dense and slot == 0 else (),
            done,
            done,
        )
        (said,) = done.wait()
        assert isinstance(said, dict), said
        told[slot] = said
    return told


def manifests_of(url: str, **more: Any) -> FileManifests:
    return FileManifests(CheckpointSettings(**{"url": url, "every_steps": 1, **more}), lambda: JOB, lambda act: act())


@pytest.mark.parametrize("encoding", [{}, {"zstd": 3}, {"bits": 8}], ids=["exact", "zstd", "bits"])
def test_what_slots_write_is_what_a_cluster_begins_with(tmp_path: Path, encoding: dict[str, int]) -> None:
    url, truth = str(tmp_path), random_records(JOB, 3)
    order, answer = order_of(url, 40, **encoding), Answer()
    manifests = manifests_of(url, encoding=tuple(encoding.items()))
    manifests.commit(Finished(order.folder, order.step, 40, "", write(url, order, truth), 0), answer)
    assert answer.wait() == (None, True)
    restored, spec = restore_source.find(url, "") or pytest.fail("it is there")
    rounded = [(40, f"weights are those of checkpoint {order.folder}, rounded to 8 bits")] if "bits" in encoding else []
    assert restored == messages.Restored(url, order.folder, 40, inexact=rounded) and spec == JOB
    found, _ = read_by_slots(restored, JOB)
    same = [np.array_equal(a, b) for a, b in zip(found, truth, strict=True)]
    assert same == ([True, True] if "bits" not in encoding else [False, True]), (
        "three weights of 16 bits stay as they are"
    )
    dense = restore_source.dense_model(restored)
    assert [(payload.tolist(), header) for payload, header in dense] == [([t] * 9, [40, t]) for t in range(2)]
    (manifest,) = Catalog(url).checkpoints()
    assert set(manifest.errors) == ({"a", "b", "c"} if "bits" in encoding else set())
    newest = Answer()
    manifests.newest("run", None, newest)
    assert newest.wait() == ((restored, JOB), "")


def test_what_was_not_exact_is_so_for_whoever_begins_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list, in an export, in what is imported from that, and in what a cluster is told that restores it."""
    url, exported, anew = str(tmp_path / "kept"), tmp_path / "tables.safetensors", str(tmp_path / "anew")
    (tmp_path / "kept").mkdir()
    (tmp_path / "anew").mkdir()
    why = "lost slots took their records from checkpoint 000000000020-run-1-1, of step 20: 0, 1"
    order, answer = order_of(url, 40), Answer()
    parts = write(url, order, random_records(JOB, 3))
    manifests_of(url).commit(Finished(order.folder, 40, 40, "", parts, 0, inexact=[(25, why)]), answer)
    assert answer.wait()[0] is None
    restored, _ = restore_source.find(url, "") or pytest.fail("it is there")
    assert restored.inexact == [(25, why)]
    assert main(["checkpoints", url]) == 0
    assert f"step 40: NOT EXACT from step 25 on: {why}" in capsys.readouterr().out
    assert main(["checkpoints", url, "--export", str(exported)]) == 0
    assert f"NOT EXACT from step 25 on: {why}" in capsys.readouterr().out
    assert TensorFile(exported).metadata["torch_ecrec.inexact"] == f"NOT EXACT: {why}"
    assert main(["checkpoints", anew, "--import", str(exported)]) == 0
    restored, _ = restore_source.find(anew, "") or pytest.fail("it is there")
    assert restored.inexact == [(0, why)]


def test_a_program_that_would_not_tell_it_refuses_what_is_not_exact(tmp_path: Path) -> None:
    """By the format: one that only knows the first would read on, and say nothing."""
    url = str(tmp_path)
    order, answer = order_of(url, 40), Answer()
    parts = write(url, order, random_records(JOB, 3))
    manifests_of(url).commit(Finished(order.folder, 40, 40, "", parts, 0, inexact=[(25, "x")]), answer)
    assert answer.wait()[0] is None
    data = (tmp_path / order.folder / MANIFEST).read_bytes()
    assert data.startswith(b'{"format":2,')
    with pytest.raises(CheckpointError, match="has format 1, and what it says is of format 2"):
        decode(data.replace(b'"format":2', b'"format":1'), "m")
    exact = msgspec.structs.replace(decode(data, "m"), inexact=[])
    assert encode(exact).startswith(b'{"format":1,') and b"inexact" not in encode(exact)
    assert (NOTES_MOST, NOTE_MOST) == (bounds.INEXACT_MOST, bounds.TEXT_MOST), "a cluster can tell all of them"


def asked_for(manifests: FileManifests) -> None:
    """All that was asked of it before is done."""
    answer = Answer()
    manifests.newest("run", None, answer, read=False)
    answer.wait()


def committed(
    manifests: FileManifests, url: str, done: int, truth: list[Any], base: str = "", **how: Any
) -> messages.Restored:
    order, answer = order_of(url, done, base), Answer()
    parts = write(url, order, truth, **how)
    manifests.commit(Finished(order.folder, order.step, done, base, parts, 0), answer)
    assert answer.wait()[0] is None
    asked_for(manifests)  # after its answer it removes what is unfinished, and that the next one is at first
    return messages.Restored(url, order.folder, done)


@pytest.mark.parametrize("code", [JOB.code, CodeSpec(5, 3, 2), CodeSpec(2, 1, 1)], ids=str)
def test_every_slot_reads_its_own_records(tmp_path: Path, code: CodeSpec) -> None:
    """Every row is read by one of them, with its newest value, whichever slots have written the checkpoint."""
    old, new = random_records(JOB, 3), random_records(JOB, 4)
    url, manifests = str(tmp_path), manifests_of(str(tmp_path))
    full = committed(manifests, url, 40, old)
    restored = committed(manifests, url, 80, new, full.folder, every=2)
    changed = [np.isin(np.arange(len(r)), _every_second(s)) for s, r in enumerate(new)]
    found, times = read_by_slots(restored, JobSpec(JOB.tables, code, JOB.trainers, JOB.seed))
    assert all((count == 1).all() for count in times)
    for table_group, records in enumerate(found):
        assert np.array_equal(records, np.where(changed[table_group][:, None], new[table_group], old[table_group]))


def _every_second(table_group: int) -> Any:
    return np.concatenate([np.flatnonzero(slots_of(table_group) == slot)[::2] for slot in range(JOB.code.slots)])


def test_a_row_among_those_of_another_slot_is_refused(tmp_path: Path) -> None:
    """One slot would have it, and another lack it. Whoever reads all finds it where it is."""
    url = str(tmp_path)
    restored = committed(manifests_of(url), url, 40, random_records(JOB, 3), swapped=True)
    with pytest.raises(
        CheckpointError, match=r"row \d+ of table group \d is of slot \d, and stands among those of slot \d"
    ):
        read_by_slots(restored, JOB)
    _, times = read_by_slots(restored, JobSpec(JOB.tables, CodeSpec(5, 3, 2), JOB.trainers, JOB.seed))
    assert all((count == 1).all() for count in times)


def test_every_slot_reads_all_where_parts_are_of_no_slots(tmp_path: Path) -> None:
    url, truth = str(tmp_path), random_records(JOB, 3)
    restored = committed(manifests_of(url), url, 40, truth)
    catalog = Catalog(url)
    manifest = catalog.read(restored.folder)
    parts = [msgspec.structs.replace(part, slot=-1) for part in manifest.parts]
    moved = order_of(url, 50).folder
    (tmp_path / restored.folder).rename(tmp_path / moved)
    (tmp_path / moved / "manifest.json").unlink()
    dense_done = msgspec.structs.replace(manifest, id=moved, done=50, parts=parts)
    catalog.commit(moved, dense_done)
    found, times = read_by_slots(messages.Restored(url, moved, 50), JOB)
    assert all((count == 1).all() for count in times) and all(map(np.array_equal, found, truth))


def test_the_newest_that_is_whole_is_taken(tmp_path: Path) -> None:
    url, truth, manifests = str(tmp_path), random_records(JOB, 3), manifests_of(str(tmp_path))
    for done in (40, 80):
        order, answer = order_of(url, done), Answer()
        manifests.commit(Finished(order.folder, order.step, done, "", write(url, order, truth), 0), answer)
        assert answer.wait()[0] is None
    path = tmp_path / order.folder / "slot-00001"
    path.write_bytes(path.read_bytes()[:-1])
    newest = Answer()
    manifests.newest("run", None, newest)
    assert newest.wait()[0][0].done == 40
    assert restore_source.find(f"{url}@40", "")[0].done == 40  # type: ignore[index]
    with pytest.raises(CheckpointError, match="no checkpoint of step 41"):
        restore_source.find(f"{url}@41", "")
    assert restore_source.find("newest", str(tmp_path / "none")) is None


@pytest.mark.parametrize("fault", ["manifest", "part", "place"])
@pytest.mark.parametrize("read", [True, False])
def test_what_cannot_be_read_for_a_moment_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, read: bool
) -> None:
    """All that was trained since the one before would be lost for it, or the whole job, where there is none before."""
    url, truth, manifests = str(tmp_path), random_records(JOB, 3), manifests_of(str(tmp_path))
    for done in (40, 80):
        newest = committed(manifests, url, done, truth)
    monkeypatch.setattr(checkpoint_files, "LOOK_AGAIN_S", 0.01)
    call = {"manifest": "read", "part": "open_read", "place": "list"}[fault]
    whole, failed = getattr(Location, call), []

    def failing(self: Location, *args: Any) -> Any:
        if (fault == "place" or newest.folder in self.url) and len(failed) < 3:
            failed.append(args)
            raise StoreUnavailable(f"cannot {call} {self.url}: the store is busy")
        return whole(self, *args)

    monkeypatch.setattr(Location, call, failing)
    answer = Answer()
    manifests.newest("run", None, answer, read)
    assert answer.wait() == ((newest, JOB), "")
    assert len(failed) == 3 or (fault, read) == ("part", False), "who looks at manifests only reads no part"


def test_what_cannot_be_read_for_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, truth, manifests = str(tmp_path), random_records(JOB, 3), manifests_of(str(tmp_path))
    older, newest = (committed(manifests, url, done, truth) for done in (40, 80))
    monkeypatch.setattr(checkpoint_files, "UNREAD_S", 0.0)
    for alone in (False, True):
        unreadable(monkeypatch, newest.folder)
        answer = Answer()
        manifests.newest("run", None, answer)
        found, why = answer.wait()
        if alone:
            assert found is None and "the store is busy" in why, why
        else:
            assert found == (older, JOB) and not why
        newest = older


def test_the_newest_of_a_place_where_all_are_altered_is_not_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    only = committed(manifests_of(url), url, 40, random_records(JOB, 3))
    path = tmp_path / only.folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    for wanted in ("newest", url):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*manifest\.json was cut off") as altered:
            restore_source.find(wanted, url)
        assert not isinstance(altered.value, StoreUnavailable)
    unreadable(monkeypatch, only.folder)
    for wanted in ("newest", url):
        with pytest.raises(StoreUnavailable):
            restore_source.find(wanted, url)


@pytest.mark.parametrize("wanted", ["", "newest"])
def test_what_a_run_has_begun_with_is_found_again_whatever_is_newer_there(tmp_path: Path, wanted: str) -> None:
    """By a coordinator in the place of one that died with everybody else, before the run's first own checkpoint."""
    url, truth, manifests = str(tmp_path), random_records(JOB, 3), manifests_of(str(tmp_path))
    begun = committed(manifests, url, 40, truth)
    other = committed(manifests, url, 20, truth)
    wanted = wanted or url
    assert restore_source.find(wanted, url) == (other, JOB)
    assert restore_source.find(wanted, url, begun.folder) == (begun, JOB)
    assert restore_source.find(wanted, url, restore_source.NONE) is None, "it has begun with nothing"
    with pytest.raises(CheckpointError, match="000000000030-gone-1-1"):
        restore_source.find(wanted, url, "000000000030-gone-1-1")


@pytest.mark.parametrize("hangs", ["reading", "before"])
def test_a_store_that_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """Who goes back hears that it hangs, once, whether it does while one looks or in what comes before."""
    url, truth = str(tmp_path), random_records(JOB, 3)
    manifests, goes_on, reached = manifests_of(url), threading.Event(), threading.Event()
    committed(manifests, url, 40, truth)
    monkeypatch.setattr(checkpoint_files, "LOOKS_S", 0.05)

    def hanging(*args: Any) -> Any:
        reached.set()
        assert goes_on.wait(LIMIT_S)
        return [] if hangs == "before" else Listing()

    monkeypatch.setattr(Catalog, "clean" if hangs == "before" else "listing", hanging)
    if hangs == "before":
        manifests.discard("000000000050-run-1-50")
        assert reached.wait(LIMIT_S)
    told: list[Any] = []
    answer = Answer()
    manifests.newest("run", None, lambda *values: (told.append(values), answer(*values)))
    assert answer.wait() == (None, f"{url} has given nothing for 0.05 s: it hangs")
    assert reached.wait(LIMIT_S)
    goes_on.set()
    monkeypatch.undo()
    after = Answer()
    manifests.newest("run", None, after)  # comes after the one that hung
    assert after.wait()[0][0].done == 40 and len(told) == 1


def test_each_block_that_is_read_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large checkpoint takes as long as it takes: what is bounded is the time without a block."""
    shelf = random_records(JOB, 3)
    url, manifests = str(tmp_path), manifests_of(str(tmp_path))
    committed(manifests, url, 40, shelf)
    (manifest,) = Catalog(url).checkpoints()
    blocks = 0

    def beat() -> None:
        nonlocal blocks
        blocks += 1

    assert check_rows(Catalog(url), manifest, beat) == sum(table_group.rows for table_group in JOB.table_groups)
    assert blocks == sum(part.blocks - 2 - len(part.dense) for part in manifest.parts) > 3


def test_what_earlier_attempts_left_goes_and_what_may_run_stays(tmp_path: Path) -> None:
    url, truth = str(tmp_path), random_records(JOB, 3)
    orders = {number: order_of(url, number) for number in (8, 9, 10)}
    parts = {number: write(url, order, truth) for number, order in orders.items()}
    others = order_of(url, 11, run="others").folder
    (tmp_path / others).mkdir()
    manifests, answer, again = manifests_of(url), Answer(), Answer()
    manifests.commit(Finished(orders[9].folder, orders[9].step, 9, "", parts[9], 0), answer)
    assert answer.wait()[0] is None
    manifests.newest("run", None, again)  # comes after what is removed
    again.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [orders[9].folder, orders[10].folder, others]


def test_what_is_of_another_run_is_neither_gone_back_to_nor_removed(tmp_path: Path) -> None:
    """A folder that was used before, without `--restore`: its steps are of another history."""
    url, truth = str(tmp_path), random_records(JOB, 3)

    def commit(manifests: FileManifests, done: int, run: str, began_with: messages.Restored | None = None) -> str:
        order, answer = order_of(url, done, run=run), Answer()
        manifests.commit(Finished(order.folder, order.step, done, "", write(url, order, truth), 0, began_with), answer)
        assert answer.wait()[0] is None
        return order.folder

    def newest(manifests: FileManifests, run: str, began_with: messages.Restored | None = None) -> Any:
        found = Answer()
        manifests.newest(run, began_with, found)
        return found.wait()

    manifests = manifests_of(url, keep=1)
    old = commit(manifests, 70, "old")
    assert newest(manifests, "new") == (None, "none was written")
    began_with = messages.Restored(url, old, 70)
    assert newest(manifests, "new", began_with)[0][0] == began_with
    first = commit(manifests, 10, "new")
    assert newest(manifests, "new", began_with)[0][0].folder == first
    other = commit(manifests_of(url, keep=1), 20, "other")
    assert newest(manifests, "new")[0][0].folder == first and sorted(p.name for p in tmp_path.iterdir()) == [
        first,
        other,
        old,
    ]
    # a coordinator in the place of one that died, when everybody else died, too
    assert restore_source.newest_of("none", url) == (None, 1)
    for run, folder in (("old", old), ("new", first)):
        found, term = restore_source.newest_of(run, url)
        assert found is not None and found[0].folder == folder and term == 2, "names of its attempts are new"
    # one that began with a checkpoint goes on with its history: that counts among what is kept
    following = manifests_of(url, keep=1)
    last = commit(following, 80, "next", began_with)
    assert newest(following, "next", began_with)[0][0].folder == last
    assert sorted(path.name for path in tmp_path.iterdir()) == [first, other, last]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = Answer()
    FileCheckpointWriter(lambda act: act()).write(
        order_of(str(tmp_path / "file"), 1), 0, JOB.table_groups, lambda size: None, (), failed, failed
    )
    assert "a file is where a folder is wanted" in failed.wait()[0]
    order, answer = order_of(str(tmp_path / "kept"), 1), Answer()
    parts = write(str(tmp_path / "kept"), order, random_records(JOB, 1))
    (tmp_path / "kept" / order.folder / "slot-00000").unlink()
    manifests_of(str(tmp_path / "kept")).commit(Finished(order.folder, order.step, 1, "", parts, 0), answer)
    assert "it is not there" in answer.wait()[0] and not Catalog(str(tmp_path / "kept")).checkpoints()


def test_no_write_is_begun_where_one_before_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs has one thread of each slot, however often a checkpoint is tried."""
    monkeypatch.setattr(checkpoint_files, "HANGS_S", 0.05)
    hangs, reached, writer = threading.Event(), threading.Event(), FileCheckpointWriter(lambda act: act())

    class Hanging(checkpoint_files.PartWriter):
        def write(self, *args: Any) -> int:
            reached.set()
            assert hangs.wait(LIMIT_S)
            return super().write(*args)

    class Held:
        """What a portion is taken from, as a slot is."""

        def portion(self, _: int) -> Portion | None:
            return Portion(0, np.arange(4), random_records(JOB, 3)[0][:4])

    def begin(next_portion: Callable[[int], Portion | None], told: Answer) -> FileWriting:
        return writer.write(order_of(str(tmp_path), 10), 0, JOB.table_groups, next_portion, (), told, told)

    held = Held()
    gone = weakref.ref(held)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "PartWriter", Hanging)
        first = begin(held.portion, Answer())
        assert reached.wait(LIMIT_S)
    first.cancel()
    del held
    gc.collect()
    assert gone() is None, "what hangs in the store keeps no slot in memory"
    for _ in range(3):
        refused = Answer()
        begin(lambda _: None, refused)
        assert "still hangs there" in refused.wait()[0]
    hangs.set()
    while "still hangs" in str((said := _one_more(begin))[0]):  # it takes a moment to end
        pass
    assert isinstance(said[0], dict), said


def _one_more(begin: Callable[[Callable[[int], Portion | None], Answer], FileWriting]) -> tuple[Any, ...]:
    told = Answer()
    begin(lambda _: None, told)
    return told.wait()


def test_what_is_left_of_a_void_checkpoint_goes_and_nothing_else(tmp_path: Path) -> None:
    """On a full disk it would keep the next one from being written."""
    url, truth = str(tmp_path), random_records(JOB, 3)
    manifests, answer, other = manifests_of(url), Answer(), order_of(url, 50)
    order = order_of(url, 40)
    manifests.commit(Finished(order.folder, order.step, 40, "", write(url, order, truth), 0), answer)
    answer.wait()
    write(url, other, truth)
    (tmp_path / "mine").mkdir()
    assert (tmp_path / other.folder).is_dir()
    for folder in (other.folder, order.folder):  # the second one counts, whatever anybody says
        manifests.discard(folder)
    wait_until(lambda: not (tmp_path / other.folder).exists(), LIMIT_S, "it is removed")
    found = Answer()
    manifests.newest("run", None, found)  # after all that came before
    assert found.wait()[1] == "" and (tmp_path / order.folder).is_dir() and (tmp_path / "mine").is_dir()


def test_the_default_limit_follows_the_cores_and_counts_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that somebody has said counts what is in the file; the default one, what was done for it."""
    for cores, wanted in ((1, 5e6), (2, 10e6), (64, 100e6)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert checkpoint_files.default_bytes_per_s() == wanted
    spent: list[tuple[int, float]] = []
    monkeypatch.setattr(checkpoint_files.Pace, "spend", lambda self, size, rate, writing: spent.append((size, rate)))
    truth, order = random_records(JOB, 3), order_of(str(tmp_path), 40, bits=2)
    found = []
    for limit in (None, 7.0):
        write(str(tmp_path), msgspec.structs.replace(order, bytes_per_s=limit), truth)
        found.append(sum(size for size, _ in spent))
        assert {rate for _, rate in spent} == {100e6 if limit is None else 7.0}
        spent.clear()
    assert found[0] > found[1] > 0
