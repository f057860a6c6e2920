"""What a trainer returns whose script catches nothing."""

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = """
import threading
from torch_ecrec.errors import DataLoss, TrainersLost
from torch_ecrec.processes.launch import _exit_with_reason
reasons = _exit_with_reason().reasons
{script}
"""


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("raise DataLoss('slots 1 and 2')", 3, "DataLoss: slots 1 and 2"),
        ("reasons.append(TrainersLost('rank 1')); raise RuntimeError('all-reduce')", 5, "TrainersLost: rank 1"),
        (
            "threading.Timer(0.3, lambda: reasons.append(DataLoss('slot 1'))).start(); raise RuntimeError('reset')",
            3,
            "DataLoss: slot 1",
        ),
        ("raise RuntimeError('its own')", 1, "RuntimeError: its own"),
        ("raise ValueError('its own')", 1, "ValueError: its own"),
        ("reasons.append(DataLoss('slot 1')); raise SystemExit(7)", 7, ""),
        ("reasons.append(DataLoss('caught'))", 0, ""),
    ],
)
def test_the_exit_code_is_that_of_the_reason(script: str, code: int, says: str) -> None:
    """Also if a collective fails first, and the reason arrives a little later."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(script=script)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == code, run.stderr
    assert says in run.stderr
