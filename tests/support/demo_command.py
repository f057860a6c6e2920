"""The command `demo` on a few made-up rows, with all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import MARK, leftover, wait_for_none
from places import ROOT

from torch_ecrec.demo import criteo

RUN_LIMIT_S = 800.0  # only a hang reaches it, and the next
END_LIMIT_S = 300.0


def demo(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command on a few made-up rows, and asserts that nothing is left of it."""
    criteo.write_synthetic(out / "rows.tsv", rows=1000, seed=3)
    command = [sys.executable, "-m", "torch_ecrec", "demo", "--data", str(out / "rows.tsv"), "--out", str(out)]
    done = subprocess.run(
        [*command, "--steps", "30", "--batch-size", "32", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    print(done.stdout, done.stderr)
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"
    return done
