"""What a trainer returns whose script catches nothing."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPTS = {  # and the exit code, and what is said
    "raise DataLoss('slots 1 and 2')": (3, "DataLoss: slots 1 and 2"),
    "reasons.append(TrainersLost('rank 1')); raise RuntimeError('all-reduce')": (5, "TrainersLost: rank 1"),
    "threading.Timer(0.3, lambda: reasons.append(DataLoss('slot 1'))).start(); raise RuntimeError('reset')": (
        3,
        "DataLoss: slot 1",
    ),
    "raise RuntimeError('its own')": (1, "RuntimeError: its own"),
    "raise ValueError('its own')": (1, "ValueError: its own"),
    "reasons.append(DataLoss('slot 1')); raise SystemExit(7)": (7, ""),
    "reasons.append(DataLoss('caught'))": (0, ""),
}
# Each script is the main program of a fork of a process that has loaded what all of them need.
PROGRAM = """
import json, os, sys, tempfile, threading
from torch_ecrec.errors import DataLoss, TrainersLost
from torch_ecrec.processes.launch import _exit_with_reason
found, script = {}, None
for one in json.loads(sys.argv[1]):
    said = tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(said.fileno(), 2)
        script = one
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    found[one] = code, said.read()
if script is None:
    print(json.dumps(found))
else:
    reasons = _exit_with_reason().reasons
    exec(script)
"""


@functools.cache
def ended() -> dict[str, tuple[int, str]]:
    """By script, the exit code and what it has said."""
    words = [sys.executable, "-c", PROGRAM, json.dumps(list(SCRIPTS))]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found: dict[str, tuple[int, str]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_exit_code_is_that_of_the_reason(script: str) -> None:
    """Also if a collective fails first, and the reason arrives a little later."""
    code, said = ended()[script]
    assert code == SCRIPTS[script][0], said
    assert SCRIPTS[script][1] in said
