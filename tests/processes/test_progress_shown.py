"""How far a long command is, on a real terminal (a pty), and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LIMIT_S = 300.0  # only a hang reaches it


SCRIPT = """
import sys, time
from torch_ecrec.observe import progress
progress.QUIET_S, progress.EVERY_S = 0.0, 0.02
with progress.Progress("work", 2) as one:
    one.add(1)
    time.sleep(0.2)
    print("a result", flush=True)
    input()
"""


def test_a_real_terminal_and_a_pipe() -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-P", "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        os.close(theirs)
        said = b""
        while not re.search(rb"work: 1 of 2, [0-9.]+ s left.*\r\x1b\[Ka result\r\n.*work: 1 of 2", said, re.DOTALL):
            said += os.read(ours, 4096)
        os.write(ours, b"\n")
        assert child.wait(LIMIT_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    piped = subprocess.run(words, input=b"\n", capture_output=True, env=environment, timeout=LIMIT_S, check=True)
    assert (piped.stdout, piped.stderr) == (b"a result\n", b"")


@pytest.mark.slow
def test_the_first_compilation_says_how_far_it_is(tmp_path: Path) -> None:
    """A minute of a core. With what is kept then it takes a moment, and nothing is said."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for compiles in (True, False):
        ours, theirs = pty.openpty()
        words = [sys.executable, "-P", "-m", "torch_ecrec", "warm"]
        with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT) as child:
            os.close(theirs)
            said = b""
            try:
                while piece := os.read(ours, 4096):
                    said += piece
            except OSError:  # nobody has it open any more
                pass
            finally:
                os.close(ours)
            assert child.wait(LIMIT_S) == 0
        if compiles:
            assert re.search(rb"kernels are compiled or loaded: \d+ of \d+, [^\r]+ left", said), said
