"""`bench messages` in short: what it writes; never how fast anything is."""

import argparse
import json
from pathlib import Path

import pytest

from torch_ecrec.bench import messages
from torch_ecrec.protocol.encoding import WIRE


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    messages.add_arguments(parser)
    return messages.run(parser.parse_args(list(map(str, words))))


def test_it_measures_a_push_that_can_be_read_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "CALLS", 3)
    assert run("--slabs", 1, 26, "--repeats", 2, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "messages.json").read_text())["rows"]
    assert [row["slabs"] for row in rows] == [1, 26]
    for row in rows:
        push = messages._push(row["slabs"])
        (body, tensors), _ = WIRE.encode(push)
        assert len(body) == row["body_bytes"] and len(tensors) == row["tensors"]
        assert all(row[f"{name} us"] > 0 for name in messages.COLUMNS) and all(name in printed for name in row)


def test_sizes_are_checked(tmp_path: Path) -> None:
    for words in (("--repeats", 0), ("--slabs", 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            run(*words, "--out", tmp_path)
