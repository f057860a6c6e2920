"""What a trainer returns whose script catches nothing; and what commands return where there is no room to say why."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest
from conftest import ROOT

from torch_ecrec.cli import up
from torch_ecrec.cli.main import main
from torch_ecrec.errors import DataLoss
from torch_ecrec.processes import launch, supervisor
from torch_ecrec.processes.nodes import Nodes

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


# where nothing can be said -------------------------------------------------------------------------------------------


def full() -> contextlib.redirect_stderr[TextIO]:
    """Standard error is a file on a disk that is full."""
    return contextlib.redirect_stderr(open("/dev/full", "w", buffering=1))


class Ended:
    """A cluster whose data is lost, with the disk that its servers share."""

    ended, join, http, address = DataLoss.exit_code, "127.0.0.1:1", None, ("127.0.0.1", 1)
    failed = "server process 12 ended with 10: a disk is full"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Ended:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`up` has such a cluster."""
    monkeypatch.setattr(supervisor, "Supervisor", Ended)
    monkeypatch.setattr(launch, "warm", lambda **_: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_up_ends_with_the_reason_all_the_same(lost: None) -> None:
    with full():
        assert main(["up", "--quiet"]) == 3


@pytest.mark.parametrize(
    ("store", "restored", "ends"),
    [
        ("b", "a@10", "--checkpoint b --restore newest; if none is there yet, with --restore a@10"),
        ("b", "b@10", "--checkpoint b --restore newest"),
        ("b", "newest", "--checkpoint b --restore newest"),
        ("", "a", "no checkpoints were kept. Begin with --restore a, as before"),
    ],
)
def test_up_says_what_to_begin_with(store: str, restored: str, ends: str) -> None:
    assert up._why(3, store, "", restored).endswith(ends)


def test_the_last_line_of_up_names_the_disk_that_was_full(lost: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--quiet"]) == 3
    assert "ended with 3: data is lost (server process 12 ended with 10: a disk is full), " in capsys.readouterr().err


def test_run_ends_with_the_reason_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "import os, pathlib, time; pathlib.Path(os.environ['TORCH_ECREC_LOSS_MARK']).touch(); time.sleep(60)"
    monkeypatch.setattr(Nodes, "command", lambda *_: [sys.executable, "-c", lost])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with full():
            assert main(["run", "--", "-m", "train"]) == 3
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
