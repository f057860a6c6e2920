"""A store that hangs while a checkpoint is read from it: by trainers that begin with it, by a server for a slot."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_checkpoint_files import JOB

from torch_ecrec.errors import StoreUnavailable
from torch_ecrec.processes import part_reader, restore_source
from torch_ecrec.processes.part_reader import FileReader
from torch_ecrec.processes.restore_source import dense_model
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.storage import store_probe
from torch_ecrec.storage.catalog import Catalog

WITHIN_S = 60.0


@pytest.fixture
def hangs() -> Iterator[Callable[..., Any]]:
    """A call that does not return while the test lasts."""
    goes_on = threading.Event()

    def hang(*_: object) -> Any:
        assert goes_on.wait(WITHIN_S)
        raise StoreUnavailable("too late")

    yield hang
    goes_on.set()


def test_a_trainer_does_not_wait_for_it_for_ever(
    monkeypatch: pytest.MonkeyPatch, hangs: Callable[..., Any], tmp_path: object
) -> None:
    monkeypatch.setattr(Catalog, "read", hangs)
    monkeypatch.setattr(restore_source, "DENSE_S", 0.2)
    with pytest.raises(StoreUnavailable, match=r"has given no answer for 0\.2 s: it hangs"):
        dense_model(Restored(str(tmp_path), "000000000040-run-1-40", 40))


def test_a_server_that_takes_a_slot_from_it_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, hangs: Callable[..., Any], tmp_path: object
) -> None:
    def records(*_: object) -> Iterator[Any]:
        yield hangs()

    monkeypatch.setattr(part_reader, "slot_records", records)
    monkeypatch.setattr(store_probe, "QUIET_S", 0.1)
    monkeypatch.setattr(store_probe, "LIMIT_S", 0.2)
    failed: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    partial_restore: Any = SimpleNamespace(url=str(tmp_path), folder="000000000040-run-1-40")
    FileReader(lambda action: action()).read(
        partial_restore, JOB, 0, lambda *_: None, lambda: None, lambda *said: failed.put(said)
    )
    assert failed.get(timeout=WITHIN_S) == (f"{tmp_path} has given nothing for 0.2 s: it hangs", True)
