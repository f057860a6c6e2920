"""`bench seals` in short: what it says; never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_ecrec.cli.main import main


def test_it_measures_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "50", "--touched", "20", "--dim", "4", "--repeats", "2", "--out", str(tmp_path / "out")]
    assert main(["bench", "seals", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["lookup", "step", "log", "fold", "look", "a"]
    assert set(json.loads((tmp_path / "out" / "seals.json").read_text())) == {"no seals", "seals"}
    assert all(len(line.split()) == 3 for line in lines[1:5]) and "GB/s" in lines[-1]


def test_bad_input_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "seals", "--rows", "0", "--out", str(tmp_path / "out")]) == 2
    assert "`rows` must be at least 1, got 0" in capsys.readouterr().err
