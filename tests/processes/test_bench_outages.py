"""`bench outages` for real, with little to train: what it writes; never how fast anything is."""

import argparse
import json
import os
from pathlib import Path

import pytest
from conftest import MARK, leftover, wait_for_none

from torch_ecrec.bench import outages
from torch_ecrec.testing import hosts as kit

END_LIMIT_S = 300.0
REASON = kit.unavailable()


@pytest.mark.slow
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    outages.add_arguments(parser)
    words = ["--events", "kill,cut,drain", "--repeats", "1", "--steady-s", "1", "--gigabytes", "0.01"]
    words += ["--drain-gigabytes", "0.01", "--out", str(tmp_path)]
    assert outages.run(parser.parse_args(words)) == 0
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"
    result = json.loads((tmp_path / "outages.json").read_text())
    assert result["error"] is None and {kind: len(some) for kind, some in result["events"].items()} == {
        "kill": 1,
        "cut": 1,
        "drain": 1,
    }
    (killed,), (drained,) = result["events"]["kill"], result["events"]["drain"]
    assert 0 < killed["detected_s"] <= killed["placed_s"] < killed["repaired_s"]
    assert killed["longest_s"] > 0 and drained["unhealthy"] == 0 and drained["held_bytes"] > 0
    assert (tmp_path / "outages.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "drain, 1/1" in printed and "reached" in printed
