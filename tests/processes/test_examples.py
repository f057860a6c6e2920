"""The scripts of `examples/`, as a user runs them: trainers and a server are killed, and no step is another one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from torch_ecrec.cli.main import main

LIMIT_S = 400
# All that are written for torchrun alone; `dlrm_criteo.py` is the demo's.
REHEARSED = {
    "checkpoints.py": (50, ["--folder", "saved"]),  # steps, arguments
    "mixed_planner.py": (15, ["--batch-size", "2000", "--epochs", "3"]),
    "sequential.py": (12, ["--batch-size", "500", "--epochs", "3"]),
    "two_tower.py": (12, ["--batch-size", "2000", "--epochs", "3"]),
}


def test_every_example_is_run() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py", "dlrm_criteo.py"}
    assert scripts == set(REHEARSED)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("script", sorted(REHEARSED))
def test_an_example_goes_on_bit_for_bit(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of it, with a server. All steps, the evaluation and the end are compared."""
    steps, arguments = REHEARSED[script]
    monkeypatch.chdir(tmp_path)
    words = ["--nproc-per-node", "2", "--at", "8", "--server-too", "--steps", "0", "--limit-s", str(LIMIT_S)]
    code = main(["rehearse", *words, "--", str(ROOT / "examples" / script), *arguments])
    said = capfd.readouterr().out
    assert code == 0, said
    assert f"EQUAL: {steps} steps of 2 trainers, 1 restart" in said, said


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_checkpoints_go_from_us_to_torchrec_and_back(tmp_path: Path) -> None:
    """What is held out is predicted as before, whoever loads it; TorchRec and we train on alike."""

    def run(*words: str, trainers: int = 2) -> list[float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainers)]
        command += [str(ROOT / "examples" / "checkpoints.py"), "--epochs", "1", *words]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return [float(value) for value in re.findall(r"^(?:loaded|saved): (\S+)$", done.stdout, re.M)]

    (first,) = run("--folder", "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    loaded, theirs = run("--folder", "one", "--load", "--backend", "torchrec")
    again, ours = run("--folder", "two", "--load")
    assert loaded == again == first != theirs and ours == pytest.approx(theirs, rel=1e-3)
    back, _ = run("--folder", "one", "--load", trainers=1)
    assert back == theirs
