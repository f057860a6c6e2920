"""Prioritised saves as files: what a lost slot reads, what is refused, and that nobody takes one for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import wait_until
from kept import random_records
from test_scribe import JOB, LIMIT_S, Answer, committed, ledger_of, order_of, slots_of, write

from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.errors import CheckpointError
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.processes import restoring
from torch_ecrec.processes.part_reader import slot_records
from torch_ecrec.protocol import messages
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.saves import Saves

SOME: dict[str, Any] = {"saver": "mfu", "beyond": "partial", "portion": 0.5, "every_steps": 2}


def saved(ledger: Any, url: str, done: int, truth: list[Any], base: messages.Restored, every: int) -> str:
    """A save of every so-manieth row."""
    order, answer = msgspec.structs.replace(order_of(url, done, base.folder), portion=0.5), Answer()
    parts = write(url, order, truth, every=every, dense=False)
    ledger.commit(Finished(order.folder, order.step, done, base.folder, parts, 0, save=True), answer)
    assert answer.wait() == (None, False)
    return order.folder


def rows_of(slab: int, positions_N: Any) -> Any:
    """Of slot 1."""
    return layout_of(JOB.code.slots, JOB.code.k, JOB.code.parities, JOB.slabs[slab].rows).row_at(1, positions_N)


def renewal(base: messages.Restored, *saves: str) -> messages.Renewal:
    since = [(one, int(one[:12])) for one in saves]
    return messages.Renewal([(1, 2, 70)], base.url, base.folder, base.done, saves=since)


def test_a_slot_takes_each_row_from_the_newest_save_that_has_it(tmp_path: Path) -> None:
    old, middle, new = (random_records(JOB, seed) for seed in (3, 4, 5))
    url = str(tmp_path)
    ledger = ledger_of(url, **SOME)
    full = committed(ledger, url, 40, old)
    first, second = saved(ledger, url, 50, middle, full, 2), saved(ledger, url, 60, new, full, 3)
    counts = dict.fromkeys(("old", "middle", "new"), 0)
    for slab, positions_N, records_NB in slot_records(renewal(full, first, second), JOB, 1):
        rows = np.flatnonzero(slots_of(slab) == 1)
        for row, record in zip(rows_of(slab, positions_N), records_NB, strict=True):
            index = int(np.searchsorted(rows, row))
            where = "new" if index % 3 == 0 else "middle" if index % 2 == 0 else "old"
            counts[where] += 1
            right = {"old": old, "middle": middle, "new": new}[where][slab][row]
            assert np.array_equal(record, right), (slab, row, where)
    assert min(counts.values()) > 0 and sum(counts.values()) == sum(int((slots_of(s) == 1).sum()) for s in range(2))
    for slab, positions_N, records_NB in slot_records(renewal(full), JOB, 1):
        assert np.array_equal(records_NB, old[slab][rows_of(slab, positions_N)]), "without saves"


def test_nobody_begins_with_a_save(tmp_path: Path) -> None:
    """Whoever looks for checkpoints sees the one that they are on; their own place has none, whatever is asked for."""
    url, records = str(tmp_path), random_records(JOB, 3)
    ledger = ledger_of(url, **SOME)
    full = committed(ledger, url, 40, records)
    name = saved(ledger, url, 50, random_records(JOB, 4), full, 2)
    assert restoring.find(url, "") == (full, JOB) == restoring.find("newest", url)
    assert restoring.newest_of("run", url)[0] == (full, JOB)
    for place in (f"{url}@50", f"{url}/saves", f"{url}/saves@50", f"{url}/saves/{name}"):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            restoring.find(place, "")
    newest = Answer()
    ledger.newest("run", None, newest)
    assert newest.wait() == ((full, JOB), "")
    listing = Catalog(f"{url}/saves").listing()
    assert not listing.whole and not listing.broken and listing.unfinished == [name]
    (tmp_path / "saves" / name / "manifest.json").write_bytes((tmp_path / "saves" / name / "save.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"there is no checkpoint at {url}/saves; .* is no manifest"):
        restoring.find(f"{url}/saves", "")


def test_a_checkpoint_that_counts_ends_the_saves_on_the_one_before(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    ledger = ledger_of(url, **SOME)
    full = committed(ledger, url, 40, records)
    before, other = saved(ledger, url, 50, records, full, 2), "000000000050-other-1-50"
    (tmp_path / "saves" / other).mkdir()
    (tmp_path / "saves" / "somebody's").mkdir()
    assert Saves(Catalog(url).location).names() == sorted([before, other])
    committed(ledger, url, 80, records)
    wait_until(lambda: Saves(Catalog(url).location).names() == [other], LIMIT_S, "it stays")
    assert (tmp_path / "saves" / "somebody's").exists(), "what has another name is somebody else's"
    gone = saved(ledger, url, 90, records, full, 2)
    ledger.discard(gone, save=True)
    wait_until(lambda: Saves(Catalog(url).location).names() == [other], LIMIT_S, "it stays")


def test_what_is_altered_missing_or_of_something_else_is_refused(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    ledger = ledger_of(url, **SOME)
    full, later = committed(ledger, url, 40, records), committed(ledger, url, 45, records)
    name = saved(ledger, url, 50, records, full, 2)
    at = tmp_path / "saves" / name

    def read(of: messages.Restored = full) -> None:
        list(slot_records(renewal(of, name), JOB, 1))

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
    ledger.commit(Finished(again.folder, again.step, 60, full.folder, parts, 0, save=True), answer)
    assert "has 5 bytes" in answer.wait()[0] and not (tmp_path / "saves" / again.folder / "save.json").exists()
