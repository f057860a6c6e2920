"""What a coordinator leaves at the place of its checkpoints when the run is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LIMIT_S = 120.0


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_a_coordinator_that_is_told_to_end_removes_the_saves_of_its_run(
    tmp_path: Path, number: signal.Signals, stays: bool
) -> None:
    """Nobody can use them any more. One that is killed may be followed by one that can; others are not its."""
    mine, others = "000000000050-mine-1-3", "000000000050-other-1-3"
    for name in (mine, others):
        (tmp_path / "saves" / name).mkdir(parents=True)
        (tmp_path / "saves" / name / "slot-00000").write_bytes(b"records")
    words = ["--checkpoint", str(tmp_path), "--checkpoint-every", "100", "--checkpoint-saver", "mfu"]
    command = [sys.executable, "-m", "torch_ecrec", "coordinator", *words, "--beyond", "partial", "--run", "mine"]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        assert child.stdout is not None
        assert "address" in json.loads(child.stdout.readline())
        child.send_signal(number)
        assert child.wait(LIMIT_S) == (-number if stays else 0)
    finally:
        child.kill()
        child.communicate()
    left = {path.name for path in (tmp_path / "saves").iterdir()}
    assert left == ({mine, others} if stays else {others})
    told = f"prioritised save {mine} was removed: the run is over" in (tmp_path / "log").read_text()
    assert told is not stays
