"""`bench checkpoint` for real, at a tiny shape: what it writes; never how fast anything is."""

import argparse
import csv
import json
import os
from pathlib import Path

import pytest
from conftest import MARK, leftover, wait_for_none

from torch_ecrec.bench import checkpoint, checkpoint_figures

END_LIMIT_S = 300.0
WAYS = ["k2r1", "k2r1+incremental", "torchrec", "torchrec+save", "torchrec+async"]


@pytest.mark.slow
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    checkpoint.add_arguments(parser)
    words = ["--ways", ",".join(WAYS), "--rows", "2000", "--dim", "8", "--batch-size", "16", "--blocks", "1"]
    words += ["--every", "8", "--trainers", "2", "--restore-bytes", "1e6", "--out", str(tmp_path)]
    assert checkpoint.run(parser.parse_args(words)) == 0
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"

    result = json.loads((tmp_path / "checkpoint-embedding-heavy.json").read_text())
    assert result["header"]["cores"] == os.cpu_count() and result["shape"]["rows"] == 2000
    blocks = {way: found for way, (found,) in result["blocks"].items()}
    assert list(blocks) == WAYS
    for way, block in blocks.items():
        assert len(block["ends_s"]) == 8 and min(checkpoint_figures.durations(block)) > 0
        written = "+" in way
        assert len(block["spans_s"]) == len(block["bytes"]) == int(written), "one checkpoint in each turn"
        assert all(first < last for first, last in block["spans_s"])
    assert blocks["k2r1+incremental"]["kinds"] == ["incremental"]
    table_bytes = 26 * 2000 * 4 * 9
    assert 0 < blocks["k2r1+incremental"]["bytes"][0] < table_bytes / 4, "few rows were touched in eight steps"
    for way in ("torchrec+save", "torchrec+async"):
        assert blocks[way]["kinds"] == ["full"] and blocks[way]["bytes"][0] > table_bytes

    restored = result["restore"]
    assert restored["checkpoint_bytes"] > restored["table_bytes"] == pytest.approx(1e6, rel=0.01)
    for start in ("restored", "begun_anew"):
        assert 0 < restored[start]["imported_s"] < restored[start]["built_s"] < restored[start]["first_step_s"]

    with open(tmp_path / "checkpoint-embedding-heavy.csv", newline="") as file:
        assert [row["way"] for row in csv.DictReader(file)] == WAYS
    assert (tmp_path / "checkpoint-embedding-heavy.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "turn 1/1" in printed and "restore of 0.001 GB" in printed
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".md", ".png"}
    told = (tmp_path / "checkpoint-embedding-heavy.md").read_text()
    assert "| k2r1+incremental |" in told and "| figure | wanted | measured | reached |" in told
