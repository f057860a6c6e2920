"""What a cluster begins with when its coordinator was started again and nobody came back who knows what was trained."""

from __future__ import annotations

import functools
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until
from kept import random_records, unreadable
from test_checkpoint_files import JOB, committed, manifests_of

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.processes import coordination
from torch_ecrec.processes.coordination import Coordination
from torch_ecrec.processes.restore_source import find, find_again
from torch_ecrec.spec.settings import NONE, Settings
from torch_ecrec.storage.catalog import Catalog


def test_it_is_what_the_run_began_with_whatever_is_newer_there(tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    began = committed(manifests_of(url), url, 40, records)
    committed(manifests_of(url), url, 80, records)
    for wanted in ("newest", url, f"{url}@40"):
        assert find_again("mine", url, "stop", wanted, began.folder) == ((began, JOB), 1)
        assert find_again("mine", "", "stop", wanted if wanted != "newest" else url, began.folder) == ((began, JOB), 0)
    assert find_again("mine", url, "stop", "newest", NONE) == (None, 1), "there was none, and now there is"
    assert find_again("mine", "", "stop", "", NONE) == (None, 0)


def test_of_a_run_with_checkpoints_nobody_begins_anew_with_beyond_stop(tmp_path: Path) -> None:
    """It would take their names, too, and write over them."""
    url, records = str(tmp_path), random_records(JOB, 3)
    began = committed(manifests_of(url), url, 40, records)
    newest = committed(manifests_of(url), url, 80, records)
    for wanted, known in ((f"{url}@40", began.folder), ("newest", NONE), ("", NONE)):
        with pytest.raises(
            CheckpointError, match=f"--beyond stop .* begin another with --restore {url}@80, the newest"
        ):
            find_again("run", url, "stop", wanted, known)
        assert find_again("run", url, "checkpoint", wanted, known)[0] == (newest, JOB)


def test_whoever_has_started_it_again_may_name_the_newest_checkpoint_of_the_run(tmp_path: Path) -> None:
    """As the refusal says: of several coordinators, etcd knows the run for as long as its name is used."""
    url, records = str(tmp_path), random_records(JOB, 3)
    began = committed(manifests_of(url), url, 40, records)
    newest = committed(manifests_of(url), url, 80, records)
    for wanted in ("newest", url, f"{url}@80", f"{url}/@80"):
        assert find_again("run", url, "stop", wanted, began.folder, asked=True) == ((newest, JOB), 2)
    for wanted in ("", f"{url}@40"):
        with pytest.raises(CheckpointError, match=f"--restore {url}@80, the newest .* another name in --elect"):
            find_again("run", url, "stop", wanted, began.folder, asked=True)


def test_a_run_whose_checkpoints_are_altered_is_none_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    file = tmp_path / committed(manifests_of(url), url, 40, random_records(JOB, 3)).folder / "manifest.json"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"done":40', b'"done":41'))
    lists: list[str] = []
    listing = Catalog.listing
    monkeypatch.setattr(Catalog, "listing", lambda self: (lists.append(self.url), listing(self))[1])
    with pytest.raises(CheckpointError, match=r"of this run's none can be read: .*manifest\.json was altered"):
        find_again("run", url, "stop", "", NONE)
    assert lists == [url], "a store with many checkpoints takes its time"
    assert find_again("run", url, "checkpoint", "", NONE) == (None, 2), "passed over, with a word, and not written over"
    unreadable(monkeypatch, file.parent.name)
    with pytest.raises(StoreUnavailable):
        find_again("run", url, "checkpoint", "", NONE)


def test_what_is_gone_is_named_and_what_cannot_be_read_is_another_matter(tmp_path: Path) -> None:
    url, records = str(tmp_path / "store"), random_records(JOB, 3)
    began = committed(manifests_of(url), url, 40, records)
    (tmp_path / "store").rename(tmp_path / "away")
    for beyond in ("stop", "checkpoint"):
        with pytest.raises(CheckpointError, match=f"the run began with checkpoint {began.folder}, .* bring it") as gone:
            find_again("mine", url, beyond, url, began.folder)  # type: ignore[arg-type]
        assert not isinstance(gone.value, StoreUnavailable)
        (tmp_path / "store").write_text("where the folder was")
        with pytest.raises(StoreUnavailable):
            find_again("mine", url, beyond, url, began.folder)  # type: ignore[arg-type]
        (tmp_path / "store").unlink()
    shutil.move(tmp_path / "away", tmp_path / "store")
    assert find_again("mine", url, "stop", url, began.folder)[0] == (began, JOB)


@pytest.mark.parametrize(("wanted", "known"), [("newest", ""), ("", "000000000040-run-1-40")])
def test_a_coordinator_that_does_not_know_what_the_run_began_with_does_not_guess(
    tmp_path: Path, wanted: str, known: str
) -> None:
    url = str(tmp_path)
    committed(manifests_of(url), url, 40, random_records(JOB, 3))
    assert find(wanted or url, url) is not None, "it could"
    with pytest.raises(CheckpointError, match="was not told which checkpoint the run began with"):
        find_again("mine", url, "checkpoint", wanted, known)


@pytest.mark.parametrize("ends", ["it leads no more", "somebody is left"])
def test_who_leads_no_more_looks_no_more(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has lost its lease stands by in the same process, and said again and again that it looks."""

    def hangs(*_: object) -> None:
        looked.append(1)
        raise StoreUnavailable("it hangs")

    monkeypatch.setattr(coordination, "find_again", hangs)
    monkeypatch.setattr(coordination, "LOOK_AGAIN_S", 1e6 if ends == "it leads no more" else 0.0)
    looked: list[int] = []
    told, over = Coordination("127.0.0.1", 0, JOB.code, 0, "wait", Settings()), threading.Event()
    router = SimpleNamespace(looks=True)
    of = SimpleNamespace(_told=told, _router=router, _over_for_it=over, _say_trouble=lambda why: None)
    look: Any = functools.partial(coordination._Coordinator._look_for, of, told.checkpoint, "", False)  # type: ignore[arg-type]
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    wait_until(lambda: bool(looked), 60.0, "it looks")
    if ends == "it leads no more":
        over.set()
    else:
        router.looks = False
    thread.join(20.0)
    assert not thread.is_alive()
