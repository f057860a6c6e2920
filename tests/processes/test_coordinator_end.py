"""What a coordinator leaves at the place of its checkpoints when its run is over; and it ends when it is told to."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import ROOT, wait_until

from torch_ecrec.coordinator.election import Candidate, Standing
from torch_ecrec.processes import coordination
from torch_ecrec.processes.coordination import Coordination, run_coordinator
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

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


class Fenced:
    """The office of one that leads, is fenced, and is told to end (SIGTERM) as it gives its lease back."""

    holds, stood = True, 0

    def __init__(self, *_: Any) -> None:
        self.candidate = Candidate("id", ("here", 1), 2, "run")
        self.candidate.run, self.candidate.began_with, self.candidate.led = "run", "none", 1

    def stand(self, on_look: Callable[[], None], withdrawn: Callable[[], bool]) -> Standing:
        type(self).stood += 1
        if self.stood == 1:
            return Standing.LEADING
        wait_until(withdrawn, LIMIT_S, "it was told to end, and stands by")
        return Standing.STANDBY

    def keep(self, on_fenced: Callable[[], None], hangs: Callable[[], bool]) -> None:
        threading.Timer(0.1, on_fenced).start()

    def close(self, over: bool) -> None:
        if self.stood == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def one_that_is_fenced(_: int) -> None:
    coordination.LeaderLease = Fenced  # type: ignore[assignment,misc]
    told = Coordination("127.0.0.1", 0, CodeSpec(3, 2, 1), 0, "wait", Settings(), elect="etcd://a/ads")
    assert run_coordinator(told, io.StringIO()) == 0


def test_who_is_told_to_end_as_it_is_fenced_does_not_stand_by_again() -> None:
    """Its server was closed, and what was asked of that was done no more."""
    forked.call(one_that_is_fenced, 1)
