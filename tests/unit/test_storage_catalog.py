"""Checkpoints at a place: what counts, what builds on what, what goes; whatever fails, the one before is there."""

import errno
import os
import re
import shutil
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kept import Shelf, small_job, unreadable
from power import Crash, Power

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.storage import chain_reader, location, manifest, policy
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import Encoding, decode, encode

URLS = {
    "folder": lambda folder: str(folder / "deep" / "kept"),
    "memory": lambda folder: f"memory://{uuid.uuid4().hex}/k",
}
each_kind = pytest.mark.parametrize("url_of", URLS.values(), ids=URLS)


# --- what is written, found and read ---------------------------------------------------------------------------------


@each_kind
def test_chains_of_checkpoints(tmp_path: Path, url_of: Callable[[Path], str]) -> None:
    shelf = Shelf(url_of(tmp_path))
    catalog = shelf.catalog
    assert catalog.checkpoints() == []
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        catalog.newest()
    full = shelf.write(100)
    assert shelf.holds(full)
    before = [truth.copy() for truth in shelf.truth]
    shelf.change(0, [3, 4, 44], 1)
    shelf.change(1, [0], 1)
    one = shelf.write(200, full, [[3, 4, 44, 5], [0]])
    assert shelf.holds(one) and one.base == full.id and one.rows == 5
    between = [truth.copy() for truth in shelf.truth]
    shelf.change(0, [4], 2)
    two = shelf.write(300, one, [[4], []])
    assert shelf.holds(two)
    assert [m.id for m in catalog.chain(two)] == [full.id, one.id, two.id]
    assert [m.done for m in catalog.checkpoints()] == [300, 200, 100]
    assert catalog.newest() == two and catalog.at(200) == one
    for older, truth in ((full, before), (one, between)):
        for found, wanted in zip(shelf.read(older), truth, strict=True):
            np.testing.assert_array_equal(found, wanted)
    checked = list(catalog.verify(two))
    assert [c.fault for c in checked] == [""] * 6 and sum(
        c.bytes for c in checked
    ) == two.bytes + one.bytes + full.bytes
    assert chain_reader.check_rows(catalog, two) == sum(table_group.rows for table_group in shelf.job.table_groups)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 250 .*there are: 100, 200, 300"):
        catalog.at(250)


def test_each_row_is_given_once_and_only_what_is_wanted(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(1)
    shelf.change(0, range(10, 20), 1)
    two = shelf.write(2, full, [range(10, 20), []])
    rows = [rows_N for table_group, rows_N, _ in chain_reader.records_of(shelf.catalog, two) if table_group == 0]
    assert sorted(np.concatenate(rows).tolist()) == list(range(47))
    found = shelf.read(two, wanted=[(15, 30), (0, 0)])
    np.testing.assert_array_equal(found[0][15:30], shelf.truth[0][15:30])
    assert (found[0][:15] == 255).all() and (found[0][30:] == 255).all() and (found[1] == 255).all()
    found = shelf.read(two, mine=lambda table_group, rows_N: rows_N % 5 == 0)
    np.testing.assert_array_equal(found[0][::5], shelf.truth[0][::5])
    assert (found[0][1::5] == 255).all()
    found = shelf.read(two, slots=[1])
    np.testing.assert_array_equal(found[0][1::2], shelf.truth[0][1::2])
    assert (found[0][::2] == 255).all()
    with pytest.raises(CheckpointError, match=r"no parts of slots \[7\]"):
        shelf.read(two, slots=[1, 7])
    with pytest.raises(ValueError, match="table group 0 has rows 0 to 47, wanted are 40 to 48"):
        shelf.read(two, wanted=[(40, 48), (0, 0)])


def test_quantised_increments_over_an_exact_base(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(1)
    shelf.change(0, [1, 2], 1)
    two = shelf.write(2, full, [[1, 2], []], Encoding(bits=8, zstd=1))
    found = shelf.read(two)
    np.testing.assert_array_equal(np.delete(found[0], [1, 2], 0), np.delete(shelf.truth[0], [1, 2], 0))
    np.testing.assert_array_equal(found[1], shelf.truth[1])
    difference = np.abs(found[0].view(np.float32) - shelf.truth[0].view(np.float32))[:, :5].max()
    assert difference == two.errors["a"].largest and set(two.errors) == {"a"}


def test_newest_is_what_was_committed_last(tmp_path: Path) -> None:
    """Training that went back to step 100 has written step 150 after step 200."""
    shelf = Shelf(str(tmp_path))
    shelf.write(100)
    shelf.write(200)
    later = shelf.write(150)
    assert shelf.catalog.newest() == later and [m.order for m in shelf.catalog.checkpoints()] == [2, 1, 0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_rows_that_are_not_right_are_refused(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path), slots=1)
    lacking = shelf.write(1, rows=[[*range(46)], [*range(3), *range(4, 9)]])
    with pytest.raises(CheckpointError, match=r"lacks 1 rows, first row 6 of table b"):
        shelf.read(lacking)
    above = shelf.write(2, lacking, [[46], []])
    with pytest.raises(CheckpointError, match=r"a full checkpoint, lacks row 6 of table b .* which a newer one has"):
        shelf.read(above)
    twice = shelf.write(3, rows=[[*range(47), 5], [*range(9)]])
    with pytest.raises(CheckpointError, match=r"has row 5 of table a .* twice"):
        shelf.read(twice)
    shelf.truth[0] = np.concatenate([shelf.truth[0], shelf.truth[0][:1]])
    beyond = shelf.write(4, rows=[[*range(48)], [*range(9)]])
    with pytest.raises(CheckpointError, match="beyond its table"):
        shelf.read(beyond)


def test_a_commit_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(1)
    prepared = shelf.parts(2, full)
    part = tmp_path / prepared.id / prepared.parts[1].name
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, \d+ were written"):
        shelf.catalog.commit(prepared.id, prepared)
    part.unlink()
    with pytest.raises(CheckpointError, match="it is not there"):
        shelf.catalog.commit(prepared.id, prepared)
    part.write_bytes(whole)
    other = msgspec.structs.replace(prepared, base="000000000001-nobody")
    with pytest.raises(CheckpointError, match="builds on 000000000001-nobody, which is no checkpoint"):
        shelf.catalog.commit(prepared.id, other)
    with pytest.raises(CheckpointError, match="the manifest is of"):
        shelf.catalog.commit(full.id, prepared)
    assert [m.id for m in shelf.catalog.checkpoints()] == [full.id]
    assert shelf.catalog.commit(prepared.id, prepared).order == 1
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        shelf.catalog.commit(prepared.id, prepared)


def test_what_is_missing_or_altered_is_named_and_the_one_before_is_offered(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(100)
    one = shelf.write(200, full, [[1, 2], []])
    alone = shelf.write(300)
    (tmp_path / one.id / manifest.MANIFEST).write_text("{")
    listing = shelf.catalog.listing()
    assert [m.id for m in listing.whole] == [alone.id, full.id]
    assert [b.folder for b in listing.broken] == [one.id] and "was cut off or altered" in listing.broken[0].reason
    (tmp_path / alone.id / alone.parts[0].name).unlink()
    faults = [checked.fault for checked in shelf.catalog.verify(alone)]
    assert "it is not there" in faults[0] and faults[1] == ""
    (tmp_path / "notes.txt").write_text("not ours")
    renamed = tmp_path / "000000000100-copied"
    (tmp_path / full.id).rename(renamed)
    assert f"has the manifest of {full.id}" in next(b.reason for b in shelf.catalog.listing().broken)
    assert shelf.catalog.clean() == [] and renamed.exists() and (tmp_path / "notes.txt").exists()


def test_a_base_that_is_gone_is_named(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(100)
    one = shelf.write(200, full, [[1, 2], []])
    (tmp_path / full.id / manifest.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"{one.id} builds on {full.id}, which is not at"):
        shelf.catalog.chain(one)
    with pytest.raises(CheckpointError, match="builds on itself"):
        loop = msgspec.structs.replace(one, base=one.id[:-1] + "x")
        (tmp_path / loop.base).mkdir()
        back = msgspec.structs.replace(one, id=loop.base, base=loop.base[:-1] + "y")
        (tmp_path / loop.base / manifest.MANIFEST).write_bytes(encode(back))
        (tmp_path / back.base).mkdir()
        end = msgspec.structs.replace(one, id=back.base, base=loop.base)
        (tmp_path / back.base / manifest.MANIFEST).write_bytes(encode(end))
        shelf.catalog.chain(loop)


def test_how_a_job_differs_is_said(tmp_path: Path) -> None:
    kept, job = Shelf(str(tmp_path)).write(1), small_job()
    chain_reader.require_same_model(kept, job)
    with pytest.raises(CheckpointError, match="is of another job: it has seed 0, this job has 9"):
        chain_reader.require_same_model(kept, replace(job, seed=9))
    assert job.difference(job) == job.difference(replace(job, code=CodeSpec(5, 3, 2))) == ""
    for changed, says in (
        (replace(job, trainers=3), "of 2 trainers, this job has 3"),
        (replace(job, seed=9), "it has seed 0, this job has 9"),
        (replace(job, tables=job.tables[:2]), r"tables \['c'\] that this job lacks"),
        (replace(job, tables=job.tables[::-1]), "another order"),
        (small_job(rows=41), "table a differs: `rows` is 40 there, 41 here"),
    ):
        assert re.search(says, job.difference(changed))
        assert (changed.digest == job.digest) == (job.difference(changed) == "")


# --- manifests -------------------------------------------------------------------------------------------------------


def test_any_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    kept = shelf.write(7, encoding=Encoding(bits=4))
    data = encode(kept)
    assert decode(data, "m") == kept and (tmp_path / kept.id / manifest.MANIFEST).read_bytes() == data
    for place in range(len(data)):
        for bit in (0, 5, 7):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode(bytes(altered), "m")
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            decode(data[:length], "m")
    for more in (data + b" ", b" " + data, data + b"\0", data.replace(b'":', b'": ', 1)):
        with pytest.raises(CheckpointError):
            decode(more, "m")


def test_a_newer_format_is_refused_by_its_number() -> None:
    with pytest.raises(
        CheckpointError, match=r"m has format 3, this program reads formats 1 and 2: use the program that"
    ):
        decode(b'{"format":3,"what":{"nobody":"knows"}}', "m")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("parts", 0, "name"), "../../etc/passwd", "matching regex"),
        (("parts", 0, "name"), "..", "matching regex"),
        (("parts", 0, "name"), "a/b", "matching regex"),
        (("parts", 0, "name"), "manifest.json", "a part is the manifest"),
        (("parts", 0, "name"), "slot-0001.part", "two parts have one name"),
        (("parts", 0, "bytes"), -1, "`int` >= 0"),
        (("parts", 0, "rows"), [1], "not 2 table groups"),
        (("parts", 0, "dense"), [], "dense parts are of trainers"),
        (("id",), "000000000008-a/b", "matching regex"),
        (("base",), "../x", "matching regex"),
        (("base",), "000000000001-x", "a full one has none"),
        (("done",), 8, "its name says another step"),
        (("job", "tables"), [], "`job` is none"),
        (("job",), {}, "`job` is none"),
        (("parts",), [], "length >= 1"),
        (("kind",), "some", "Invalid enum value"),
        (("nobody",), 1, "unknown field"),
        (("written_s",), 1e300, "`float` <= 1"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, says: str) -> None:
    """Its hash is right: somebody has written it so."""
    kept = Shelf(str(tmp_path)).parts(7)
    said = msgspec.to_builtins(kept)
    at = said
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    body = msgspec.json.encode(said)
    envelope = manifest._Envelope(manifest.FORMAT, manifest.xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))
    with pytest.raises(CheckpointError, match=says):
        decode(msgspec.json.encode(envelope), "m")


# --- retention -------------------------------------------------------------------------------------------------------


@each_kind
def test_what_is_kept(tmp_path: Path, url_of: Callable[[Path], str]) -> None:
    shelf = Shelf(url_of(tmp_path))
    catalog = shelf.catalog
    a = shelf.write(1)
    b = shelf.write(2, a, [[1], []])
    c = shelf.write(3)
    d = shelf.write(4, c, [[1], []])
    e = shelf.write(5, d, [[2], []])
    assert catalog.keep(5) == [] and catalog.keep(9) == []
    assert catalog.keep(3) == [b.id, a.id]
    assert catalog.keep(1) == []
    with pytest.raises(CheckpointError, match=f"{c.id} is what {e.id}, {d.id} build on"):
        catalog.remove(c.id)
    with pytest.raises(CheckpointError, match="no checkpoint 000000000009-x"):
        catalog.remove("000000000009-x")
    catalog.remove(e.id)
    assert [m.id for m in catalog.checkpoints()] == [d.id, c.id] and shelf.holds(d)
    assert catalog.location.list() == sorted([c.id, d.id])
    with pytest.raises(ValueError, match="`count` must be at least 1"):
        catalog.keep(0)
    with pytest.raises(CheckpointError, match="is no name of a checkpoint"):
        catalog.folder("../x")


@pytest.mark.parametrize("fault", ["busy", "altered"])
def test_nothing_is_removed_that_one_of_an_unknown_base_may_build_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    shelf = Shelf(str(tmp_path))
    catalog = shelf.catalog
    a = shelf.write(1)
    b = shelf.write(2, a, [[1], []])
    c = shelf.write(3, b, [[2], []])
    d = shelf.write(4, c, [[3], []])
    path = tmp_path / c.id / manifest.MANIFEST
    whole = path.read_bytes()
    if fault == "busy":
        asked = unreadable(monkeypatch, c.id)
    else:
        asked = [c.id]
        path.write_text("{")
    kind = StoreUnavailable if fault == "busy" else CheckpointError
    with pytest.raises(kind, match=f"what {c.id} builds on is not known, and nothing was removed: "):
        catalog.keep(1)
    with pytest.raises(CheckpointError, match=f"{a.id} is what {b.id} build on"):
        catalog.remove(a.id)
    with pytest.raises(CheckpointError, match=f"{b.id} may be what {c.id} builds on, whose manifest cannot be read"):
        catalog.remove(b.id)
    assert asked and catalog.location.list() == [a.id, b.id, c.id, d.id]
    monkeypatch.undo()
    path.write_bytes(whole)
    assert catalog.keep(1) == [] and shelf.holds(d)


def test_what_is_altered_and_nobody_builds_on_keeps_nothing(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    a, b, c = (shelf.write(done) for done in (1, 2, 3))
    (tmp_path / b.id / manifest.MANIFEST).write_text("{")
    assert shelf.catalog.keep(1) == [a.id] and shelf.catalog.location.list() == [b.id, c.id]


def test_what_is_committed_while_one_cannot_be_read_is_newer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training that went back to step 100 writes step 150 while the manifest of step 200 cannot be read."""
    shelf = Shelf(str(tmp_path))
    shelf.write(100)
    before = shelf.write(200)
    asked = unreadable(monkeypatch, before.id)
    later = shelf.write(150)
    assert asked
    with pytest.raises(StoreUnavailable, match=r"is the newest cannot be said: .*the store is busy; or name a step"):
        shelf.catalog.newest()
    with pytest.raises(StoreUnavailable, match=r"no checkpoint of step 200 .*the store is busy"):
        shelf.catalog.at(200)
    assert shelf.catalog.at(150) == later
    monkeypatch.undo()
    assert shelf.catalog.newest() == later, "it was committed last"
    assert shelf.write(160).order > later.order


def test_a_newest_one_that_was_altered_is_passed_over_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(str(tmp_path))
    older, newer = shelf.write(100), shelf.write(200)
    (tmp_path / newer.id / manifest.MANIFEST).write_text("{")
    assert shelf.catalog.newest() == older
    assert f"checkpoint {newer.id} is passed over: " in caplog.text


def test_what_a_restore_remembers_of_rows_is_two_bits_of_each() -> None:
    rows = 1 << 26
    table_group = JobSpec((TableSpec("a", rows, 1, 0, 1, OptimizerSpec("sgd")),), CodeSpec(2, 1, 1), 1).table_groups[0]
    coverage = chain_reader._Coverage(table_group, 0, 0, rows)
    coverage._seen[:] = 0xFF
    tracemalloc.start()
    try:
        coverage.finish("here", every=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < rows / 2, f"{most:,} bytes for {rows:,} rows"
    for rows in (1, 7, 8, 9):
        coverage = chain_reader._Coverage(table_group, 0, 3, 3 + rows)
        coverage._seen[:] = 0xFF
        coverage.finish("here", every=True)
        coverage._seen[-1] &= ~np.uint8(1 << ((rows - 1) % 8))
        with pytest.raises(CheckpointError, match=f"here lacks 1 rows, first row {3 + rows - 1} of table a"):
            coverage.finish("here", every=True)


@each_kind
def test_what_interrupted_attempts_left_is_removed(tmp_path: Path, url_of: Callable[[Path], str]) -> None:
    shelf = Shelf(url_of(tmp_path))
    kept = shelf.write(1)
    left, running = shelf.parts(2), shelf.parts(3)
    assert shelf.catalog.listing().unfinished == sorted([left.id, running.id])
    assert shelf.catalog.clean(lambda name: name == running.id) == [left.id]
    assert shelf.catalog.location.list() == sorted([kept.id, running.id])
    shelf.catalog.commit(running.id, running)
    assert shelf.catalog.clean() == [] and shelf.holds(running) and shelf.holds(kept)


@each_kind
@pytest.mark.parametrize("moment", ["names", "an earlier folder"])
def test_a_listing_finds_what_takes_the_place_of_another_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url_of: Callable[[Path], str], moment: str
) -> None:
    """A cluster removes a checkpoint that was among the names, after one that was not, or that was looked at too early
    (after training went back); with an imported one beside it that stays, "newest" would be that one."""
    shelf = Shelf(url_of(tmp_path))
    imported = shelf.write(0)
    first = shelf.write(5)
    prepared = shelf.parts(4)
    to_come = [prepared] if moment == "an earlier folder" else []
    written: list[str] = []
    list_, exists = Location.list, Location.exists

    def replace_() -> None:
        done = int((written or [first.id])[-1][:12])
        manifest = to_come.pop() if to_come else shelf.parts(done + 1)
        written.append(shelf.catalog.commit(manifest.id, manifest).id)
        shelf.catalog.keep(1, lambda name: name != imported.id)

    def names(self: Location, folder: str = "") -> list[str]:
        found = list_(self, folder)
        if moment == "names" and len(written) < 3:
            with monkeypatch.context() as patch:
                patch.setattr(Location, "list", list_)
                replace_()
        return found

    def looked(self: Location, name: str) -> bool:
        if self.url.endswith(first.id) and not written:
            with monkeypatch.context() as patch:
                patch.setattr(Location, "exists", exists)
                replace_()
        return exists(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Location, "list", names) if moment == "names" else patch.setattr(Location, "exists", looked)
        listing = Catalog(shelf.catalog.url).listing()
    assert [one.id for one in listing.whole] == [written[-1], imported.id]


def test_a_place_that_never_stands_still_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(str(tmp_path))
    shelf.write(1)
    list_ = Location.list

    def names(self: Location, folder: str = "") -> list[str]:
        shelf.parts(len(list_(self)) + 1)
        return list_(self, folder)

    monkeypatch.setattr(Location, "list", names)
    with pytest.raises(StoreUnavailable, match="come and go faster than they can be listed: try again, or when"):
        shelf.catalog.newest()


def test_names_of_attempts_differ_and_sort_by_step(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path))
    names = [catalog.new_folder(done) for done in (9, 10, 10, 200)]
    assert sorted(names)[0] == names[0] and sorted(names)[3] == names[3] and len(set(names)) == 4
    with pytest.raises(ValueError, match="`done` must be at least 0"):
        catalog.new_folder(-1)


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_at_any_call_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies, or the machine loses its power, at every call by which files change."""
    point, seen, made = 0, set(), Shelf(str(tmp_path / "made"))
    made.write(200, made.write(100), [[1], []])
    while True:
        point += 1
        folder = tmp_path / f"{point}"
        shutil.copytree(tmp_path / "made", folder / "kept")
        shelf = Shelf(str(folder / "kept"))
        before = [truth.copy() for truth in shelf.truth]
        with monkeypatch.context() as patch:
            power = Power(folder, patch)
            power.fail_at = point
            shelf.change(0, range(40), 5)
            crashed = False
            try:
                shelf.write(300)
                shelf.catalog.keep(1)
                shelf.parts(400)
                shelf.catalog.clean()
            except Crash:
                crashed = True
        power.after_power_loss(tmp_path / f"{point}-off")
        for place in (folder, tmp_path / f"{point}-off"):
            seen.add(_after_crash(shelf, place / "kept", before))
        if not crashed:
            break
    assert seen == {200, 300} and point > 40


def _after_crash(shelf: Shelf, place: Path, before: list[Any]) -> int:
    """What is there is whole; what is not is removed, and another one can be written. Returns the newest step."""
    survivor = Shelf(str(place))
    catalog = survivor.catalog
    listing = catalog.listing()
    assert not listing.broken
    newest = listing.whole[0]
    survivor.truth = before if newest.done == 200 else [truth.copy() for truth in shelf.truth]
    assert survivor.holds(newest)
    for one in listing.whole:
        assert not any(checked.fault for checked in catalog.verify(one))
    catalog.clean()
    assert catalog.location.list() == sorted(one.id for one in listing.whole)
    assert survivor.holds(survivor.write(500)) and catalog.newest().done == 500
    return newest.done


# --- places that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(12))
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    shelf = Shelf(str(tmp_path))
    kept = shelf.write(1)
    writes = 0
    write = location._LocalWriter.write

    def full(self: Any, view: memoryview) -> None:
        nonlocal writes
        writes += 1
        if writes > failing:
            write(self, view[: len(view) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, view)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="there is no room: free some") as found:
        patch.setattr(location._LocalWriter, "write", full)
        shelf.write(2)
    assert isinstance(found.value.__cause__, OSError) and writes == failing + 1
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert [m.id for m in shelf.catalog.checkpoints()] == [kept.id]
    assert shelf.holds(shelf.write(3))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_device_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    shelf = Shelf(str(tmp_path))
    kept, attempt = shelf.write(1), shelf.parts(2)
    function, calls = getattr(os, call), 0
    for failing in range(1 if call == "replace" else 3):
        calls = 0

        def fail(*args: Any, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise OSError(errno.EIO, "no such luck")
            function(*args)

        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="no such luck; the device fails"):
            patch.setattr(os, call, fail)
            shelf.catalog.commit(attempt.id, attempt)
        assert calls == failing + 1
        assert [m.id for m in shelf.catalog.checkpoints()] == [kept.id], "what is not known to be durable is not there"
        assert manifest.MANIFEST not in shelf.catalog.location.list(attempt.id)
    shelf.catalog.commit(attempt.id, attempt)
    assert shelf.holds(attempt)


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/.*a file is where a folder is wanted"):
        Shelf(str(tmp_path / "file" / "kept")).write(1)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"Permission denied.*; give this user"):
        patch.setattr(Path, "mkdir", forbidden)  # tests may run as root, to whom nothing is forbidden
        Shelf(str(tmp_path / "kept")).write(1)
    with pytest.raises(CheckpointError, match=r"nothing://x: .*name a folder, or a URL that fsspec knows"):
        Catalog("nothing://x")
    with pytest.raises(ValueError, match="must not be empty"):
        Catalog("")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(location.fsspec.core, "url_to_fs", missing)
    with pytest.raises(CheckpointError, match=r"s3://b/c: Install s3fs to access S3; install the package"):
        Catalog("s3://b/c")


# --- files -----------------------------------------------------------------------------------------------------------


@each_kind
def test_files_of_a_place(tmp_path: Path, url_of: Callable[[Path], str]) -> None:
    place = Location(url_of(tmp_path))
    assert place.list() == [] and place.list("none") == [] and not place.exists("a/b")
    writer = place.open_write("a/b")
    assert writer.write(b"hello ") == 6 and writer.write(np.arange(4, dtype=np.int16)) == 8 and writer.write(b"") == 0
    assert not place.exists("a/b")
    writer.close()
    writer.abandon()
    data = b"hello \0\0\1\0\2\0\3\0"
    assert place.exists("a/b") and place.read("a/b") == data and place.size("a/b") == 14
    assert place.read_range("a/b", 3, 4) == data[3:7] and place.read_range("a/b", 12, 9) == data[12:]
    place.write_whole("a/b", b"other")
    place.write_whole("c", b"")
    assert place.read("a/b") == b"other" and place.read("c") == b"" and place.list() == ["a", "c"]
    assert place.below("a").list() == ["b"] and place.below("a").read("b") == b"other"
    lost = place.open_write("a/d")
    lost.write(b"x")
    lost.abandon()
    assert place.list("a") == ["b"]
    for name in ("a", "c", "none"):
        place.remove(name)
    assert place.list() == []
    with pytest.raises(CheckpointError, match="it is not there") as found:
        place.read("a/b")
    assert isinstance(found.value.__cause__, FileNotFoundError)


# --- which kind comes next -------------------------------------------------------------------------------------------


def test_policies() -> None:
    assert [policy.next_kind("full", sizes)[:2] for sizes in ([], [9], [9, 1])] == [("full", None)] * 3
    assert [policy.next_kind("one-shot", s)[:2] for s in ([], [9], [9, 99])] == [
        ("full", None),
        *[("incremental", 0)] * 2,
    ]
    assert policy.next_kind("consecutive", [9, 1, 1])[:2] == ("incremental", 2)
    assert policy.next_kind("consecutive", [9, 1, 8])[:2] == ("full", None)
    assert policy.next_kind("intermittent", [100])[:2] == ("incremental", 0)
    assert policy.next_kind("intermittent", [100, 30, 50])[:2] == ("incremental", 0)  # 180 > 3 * 50
    assert policy.next_kind("intermittent", [100, 30, 50, 60])[:2] == ("full", None)  # 240 <= 4 * 60
    with pytest.raises(ValueError, match="unknown policy 'some'"):
        policy.next_kind("some", [])


def test_intermittent_costs_less_than_either_where_increments_grow() -> None:
    """Increments grow as more rows are touched: 0.2, 0.35, ... of a full one, as in Check-N-Run's figures."""

    def total(name: str) -> int:
        sizes: list[int] = []
        written = 0
        for _ in range(60):
            following = policy.next_kind(name, sizes)
            size = 1000 if following.kind == "full" else int(1000 * (1 - 0.8 ** (len(sizes))))
            sizes = [size] if following.kind == "full" else [*sizes, size]
            written += size
        return written

    assert total("intermittent") < total("one-shot") < total("full")
