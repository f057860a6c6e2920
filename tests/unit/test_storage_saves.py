"""Prioritised saves as files: what a lost slot reads, what is refused, and that nobody takes one for a checkpoint."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import wait_until
from kept import random_records
from test_checkpoint_files import JOB, LIMIT_S, Answer, asked_for, committed, manifests_of, order_of, slots_of, write
from xxhash import xxh3_128_hexdigest

from torch_ecrec.cli.main import main
from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.errors import CheckpointError
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.processes import restore_source
from torch_ecrec.processes.part_reader import slot_records
from torch_ecrec.protocol import messages
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.saves import Saves

SOME: dict[str, Any] = {"saver": "mfu", "beyond": "partial", "portion": 0.5, "every_steps": 2}


def saved(manifests: Any, url: str, done: int, truth: list[Any], base: messages.Restored, every: int) -> str:
    """A save of every so-manieth row."""
    order, answer = msgspec.structs.replace(order_of(url, done, base.folder), portion=0.5), Answer()
    parts = write(url, order, truth, every=every, dense=False)
    manifests.commit(Finished(order.folder, order.step, done, base.folder, parts, 0, save=True), answer)
    assert answer.wait() == (None, False)
    return order.folder


def rows_of(table_group: int, positions_N: Any) -> Any:
    """Of slot 1."""
    return layout_of(JOB.code.slots, JOB.code.k, JOB.code.parities, JOB.table_groups[table_group].rows).row_at(
        1, positions_N
    )


def partial_restore(base: messages.Restored, *saves: str) -> messages.PartialRestore:
    since = [(one, int(one[:12])) for one in saves]
    return messages.PartialRestore([(1, 2, 70)], base.url, base.folder, base.done, saves=since)


def test_a_slot_takes_each_row_from_the_newest_save_that_has_it(tmp_path: Path) -> None:
    old, middle, new = (random_records(JOB, seed) for seed in (3, 4, 5))
    url = str(tmp_path)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, old)
    first, second = saved(manifests, url, 50, middle, full, 2), saved(manifests, url, 60, new, full, 3)
    counts = dict.fromkeys(("old", "middle", "new"), 0)
    for table_group, positions_N, records_NB in slot_records(partial_restore(full, first, second), JOB, 1):
        rows = np.flatnonzero(slots_of(table_group) == 1)
        for row, record in zip(rows_of(table_group, positions_N), records_NB, strict=True):
            index = int(np.searchsorted(rows, row))
            where = "new" if index % 3 == 0 else "middle" if index % 2 == 0 else "old"
            counts[where] += 1
            right = {"old": old, "middle": middle, "new": new}[where][table_group][row]
            assert np.array_equal(record, right), (table_group, row, where)
    assert min(counts.values()) > 0 and sum(counts.values()) == sum(int((slots_of(s) == 1).sum()) for s in range(2))
    for table_group, positions_N, records_NB in slot_records(partial_restore(full), JOB, 1):
        assert np.array_equal(records_NB, old[table_group][rows_of(table_group, positions_N)]), "without saves"


def test_nobody_begins_with_a_save(tmp_path: Path) -> None:
    """Whoever looks for checkpoints sees the one that they are on; their own place has none, whatever is asked for."""
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    name = saved(manifests, url, 50, random_records(JOB, 4), full, 2)
    assert restore_source.find(url, "") == (full, JOB) == restore_source.find("newest", url)
    assert restore_source.newest_of("run", url)[0] == (full, JOB)
    for place in (f"{url}@50", f"{url}/saves", f"{url}/saves@50", f"{url}/saves/{name}"):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            restore_source.find(place, "")
    newest = Answer()
    manifests.newest("run", None, newest)
    assert newest.wait() == ((full, JOB), "")
    listing = Catalog(f"{url}/saves").listing()
    assert not listing.whole and not listing.broken and listing.unfinished == [name]
    (tmp_path / "saves" / name / "manifest.json").write_bytes((tmp_path / "saves" / name / "save.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"there is no checkpoint at {url}/saves; .* is no manifest"):
        restore_source.find(f"{url}/saves", "")


def test_manifests_of_before_are_read_and_none_in_the_place_of_the_other(tmp_path: Path) -> None:
    """Those of saves said neither their kind nor what no save has; those of checkpoints had another order of fields."""
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    name = saved(manifests, url, 50, random_records(JOB, 4), full, 2)
    checkpoint, save = tmp_path / full.folder / "manifest.json", tmp_path / "saves" / name / "save.json"
    of_checkpoint, of_save = checkpoint.read_bytes(), save.read_bytes()
    before = Catalog(url).read(full.folder), Saves(Location(url)).read(name)
    first = ("id", "done", "kind", "base", "job", "parts", "encoding", "written_s", "step", "order", "began_with")
    rewrite(checkpoint, [*first, "version"])
    rewrite(save, ["id", "done", "step", "base", "job", "parts", "encoding", "written_s", "version"])
    assert checkpoint.read_bytes() != of_checkpoint and save.read_bytes() != of_save
    assert (Catalog(url).read(full.folder), Saves(Location(url)).read(name)) == before
    assert [*slot_records(partial_restore(full, name), JOB, 1)]
    for file, data, why in ((checkpoint, save.read_bytes(), "its kind is save"), (save, of_checkpoint, "is full")):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{file.name} is no manifest of what belongs there: .*{why}"):
            (Catalog(url).read if file is checkpoint else Saves(Location(url)).read)(file.parent.name)


def rewrite(path: Path, fields: list[str]) -> None:
    """A manifest with these fields of it, in this order."""
    said = json.loads(path.read_bytes())["manifest"]
    body = msgspec.json.encode({field: said[field] for field in fields})
    path.write_bytes(b'{"format":1,"xxh3_128":"%s","manifest":%s}' % (xxh3_128_hexdigest(body).encode(), body))


def test_a_checkpoint_that_counts_ends_the_saves_on_the_one_before(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    before, other = saved(manifests, url, 50, records, full, 2), "000000000050-other-1-50"
    (tmp_path / "saves" / other).mkdir()
    (tmp_path / "saves" / "somebody's").mkdir()
    assert Saves(Catalog(url).location).names() == sorted([before, other])
    committed(manifests, url, 80, records)
    wait_until(lambda: Saves(Catalog(url).location).names() == [other], LIMIT_S, "it stays")
    assert (tmp_path / "saves" / "somebody's").exists(), "what has another name is somebody else's"
    gone = saved(manifests, url, 90, records, full, 2)
    manifests.discard(gone, save=True)
    wait_until(lambda: Saves(Catalog(url).location).names() == [other], LIMIT_S, "it stays")


def test_what_is_altered_missing_or_of_something_else_is_refused(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full, later = committed(manifests, url, 40, records), committed(manifests, url, 45, records)
    name = saved(manifests, url, 50, records, full, 2)
    at = tmp_path / "saves" / name

    def read(of: messages.Restored = full) -> None:
        list(slot_records(partial_restore(of, name), JOB, 1))

    read()
    with pytest.raises(CheckpointError, match=f"is on {full.folder}, not on {later.folder}"):
        read(later)
    part, manifest = (at / "slot-00001").read_bytes(), (at / "save.json").read_bytes()
    (at / "slot-00001").write_bytes(part[:-9] + bytes([part[-9] ^ 1]) + part[-8:])
    with pytest.raises(CheckpointError, match="slot-00001"):
        read()
    (at / "slot-00001").write_bytes(part)
    (at / "save.json").write_bytes(manifest.replace(b'"done":50', b'"done":51'))
    with pytest.raises(CheckpointError, match=r"save\.json was altered"):
        read()
    (at / "save.json").unlink()
    with pytest.raises(CheckpointError, match=r"save\.json"):
        read()
    (at / "save.json").write_bytes(manifest)
    for part_file in ("slot-00000", "slot-00001"):
        (at / part_file).write_bytes((at / part_file).read_bytes()[:-1])
    again, answer = msgspec.structs.replace(order_of(url, 60, full.folder), portion=0.5), Answer()
    parts = write(url, again, records, dense=False)
    (tmp_path / "saves" / again.folder / "slot-00000").write_bytes(b"short")
    manifests.commit(Finished(again.folder, again.step, 60, full.folder, parts, 0, save=True), answer)
    assert "has 5 bytes" in answer.wait()[0] and not (tmp_path / "saves" / again.folder / "save.json").exists()


def names_at(url: str) -> list[str]:
    return Saves(Catalog(url).location).names()


def test_they_are_listed_under_their_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full, later = committed(manifests, url, 40, records), committed(manifests, url, 45, records)
    on_full, on_later = saved(manifests, url, 50, records, full, 2), saved(manifests, url, 60, records, later, 3)
    left, lost = (
        "000000000070-run-1-70",
        saved(manifests, url, 80, records, messages.Restored(url, "9" * 12 + "-x", 9), 2),
    )
    (tmp_path / "saves" / left).mkdir()
    assert main(["checkpoints", url]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    listed = [row[:3] for row in rows[2:6]]
    assert listed == [["45", "full", "-"], ["60", "save", "45"], ["40", "full", "-"], ["50", "save", "40"]]
    assert rows[0][0] == "2" and rows[3][-1] == f"saves/{on_later}" and f"interrupted ones: saves/{left}" in out
    assert f"saves/{lost} is on 999999999999-x, which is not there: nothing can use it" in out
    assert main(["checkpoints", url, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (save,) = said["checkpoints"][1]["saves"]
    on_disk = sum(path.stat().st_size for path in (tmp_path / "saves" / on_full).glob("slot-*"))
    assert save["name"] == on_full and save["bytes"] == on_disk and save["rows"] > 0 and "faults" not in save
    others = said["other_saves"]
    assert [one["name"] for one in others["whole"]] == [lost] and others["unfinished"] == [left]


def test_verify_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    name, other = saved(manifests, url, 50, records, full, 2), saved(manifests, url, 60, records, full, 2)
    assert main(["checkpoints", url, "--verify"]) == 0
    assert capsys.readouterr().out.count("  whole") == 3
    path = tmp_path / "saves" / name / "slot-00001"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert main(["checkpoints", url, "--verify"]) == 7
    assert f"FAULTY saves/{name}: {path}, block" in (out := capsys.readouterr().out) and out.count("  whole") == 2
    (tmp_path / "saves" / other / "save.json").write_text("{}")
    assert main(["checkpoints", url]) == 7
    assert f"BROKEN saves/{other}: " in capsys.readouterr().out


def test_with_a_checkpoint_those_on_it_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full, later = committed(manifests, url, 40, records), committed(manifests, url, 45, records)
    name, stays = saved(manifests, url, 50, records, full, 2), saved(manifests, url, 60, records, later, 3)
    assert main(["checkpoints", url, "--remove", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [full.folder, f"saves/{name}"]}
    assert names_at(url) == [stays]


def test_a_run_that_is_over_takes_its_own_away(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    saved(manifests, url, 50, records, full, 2)
    left, other = "000000000060-run-1-60", "000000000050-other-1-50"
    for name in (left, other):
        (tmp_path / "saves" / name).mkdir()
    manifests.end("run", LIMIT_S)
    assert names_at(url) == [other] and Catalog(url).newest().id == full.folder


def test_what_a_killed_run_has_left_goes_with_the_next_ones_checkpoint_whatever_its_saver(tmp_path: Path) -> None:
    """Only where the next one has begun with a checkpoint of it: what else is there may be in use."""
    url, records = str(tmp_path), random_records(JOB, 3)
    full = committed(manifests_of(url), url, 40, records)
    left, other = saved(manifests_of(url, **SOME), url, 50, records, full, 2), "000000000050-other-1-50"
    (tmp_path / "saves" / other).mkdir()
    for began_with, stays in ((None, [left, other]), (full, [other])):
        order, answer = order_of(url, 60 + len(stays), run=f"next{len(stays)}"), Answer()
        manifests = manifests_of(url)
        parts = write(url, order, records)
        manifests.commit(Finished(order.folder, order.step, order.done, "", parts, 0, began_with), answer)
        assert answer.wait()[0] is None
        asked_for(manifests)
        assert sorted(names_at(url)) == sorted(stays)


def test_a_store_that_hangs_does_not_keep_a_run_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, reached = threading.Event(), threading.Event()

    def hanging(self: Saves) -> list[str]:
        reached.set()
        assert goes_on.wait(LIMIT_S)
        return []

    monkeypatch.setattr(Saves, "names", hanging)
    manifests_of(str(tmp_path), **SOME).end("run", 0.05)
    assert reached.wait(LIMIT_S)
    goes_on.set()
