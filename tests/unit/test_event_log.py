"""Events in a file: lines of JSON, rotated by size, written by a thread that holds nobody up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from torch_ecrec.observe import event_log
from torch_ecrec.observe.event_log import EventLog, require_writable

WAIT_S = 300.0  # only a hang reaches it


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_lines_of_json_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for life in range(2):
        log = EventLog(path)
        log.happened({"event": "left", "member": f"server-{life}", "why": "100 % of it\nand more: ü"})
        log.close()
    found = lines(path)
    assert [one["member"] for one in found] == ["server-0", "server-1"] and found[0]["why"].endswith("ü")
    assert next(iter(found[0])) == "time_s" and found[0]["time_s"] <= found[1]["time_s"]


def test_the_first_event_is_not_joined_to_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time_s": 1.0, "event": "left"}\n{"time_s": 2.0, "ev', encoding="utf-8")  # it was killed there
    log = EventLog(path)
    log.happened({"event": "joined"})
    log.close()
    before, half, after = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(before)["event"] == "left" and half.endswith('"ev') and json.loads(after)["event"] == "joined"


def test_a_file_that_has_grown_is_renamed_and_some_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, most_bytes=1000, kept=2)
    for number in range(200):
        log.happened({"event": "left", "number": number})
    log.close()
    files = sorted(one.name for one in tmp_path.iterdir())
    assert files == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    assert all((tmp_path / one).stat().st_size <= 1000 for one in files)
    numbers = [one["number"] for name in reversed(files) for one in lines(tmp_path / name)]
    assert numbers == list(range(numbers[0], 200)), "the last ones, in order"


def test_a_disk_that_hangs_holds_nobody_up_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hangs, goes_on = tmp_path / "events.jsonl", threading.Event(), threading.Event()
    monkeypatch.setattr(event_log, "WAITING_MOST", 5)
    log = EventLog(path)
    put = log._put

    def slow(event: dict[str, Any]) -> bool:
        hangs.set()
        assert goes_on.wait(WAIT_S)
        return put(event)

    monkeypatch.setattr(log, "_put", slow)
    log.happened({"event": "first"})
    assert hangs.wait(WAIT_S)
    for number in range(12):
        log.happened({"event": "left", "number": number})  # returns
    goes_on.set()
    log.close()
    found = lines(path)
    assert [one["event"] for one in found] == ["first", "events_lost", *["left"] * 5]
    assert found[1]["number"] == 7 and [one["number"] for one in found[2:]] == list(range(5))


def test_a_disk_that_is_full_for_a_while_loses_events_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    open_file, full, tried = log._file._open, threading.Event(), threading.Semaphore(0)
    full.set()

    def fail() -> Any:
        tried.release()
        if full.is_set():
            raise OSError(28, "No space left on device")
        return open_file()

    monkeypatch.setattr(log._file, "_open", fail)
    log.happened({"event": "one"})
    log.happened({"event": "two"})
    for _ in range(3):  # the last one tells of the first, and fails as well
        assert tried.acquire(timeout=WAIT_S)
    full.clear()
    log.happened({"event": "three"})
    log.close()
    found = lines(path)
    assert found[-1]["event"] == "three" and [one["event"] for one in found].count("events_lost") <= 1
    told = sum(one.get("number", 0) for one in found)
    assert told + sum(one["event"] in ("one", "two") for one in found) == 2, "each is there, or counted"
    assert caplog.text.count("events cannot be written") == 1


def test_a_path_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--events: .*none/x cannot be written: No such file"):
        require_writable(tmp_path / "none" / "x")
    with pytest.raises(OSError, match="Is a directory"):
        EventLog(tmp_path)
    require_writable(tmp_path / "x")
