"""Real processes at the address of a cluster that is not theirs, and trainers of another launch.

All pairs are visited in `tests/unit/test_identity.py`, and all moments in `tests/simulated/test_identities.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster_child import Orders
from cluster_trainers import ENVIRONMENT, LIMIT_S, Child
from conftest import ROOT, wait_until

from torch_ecrec.errors import ClusterError, DataLoss, JoinRefused, OtherCluster
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

CODE, STEPS, HOLD = CodeSpec(3, 2, 1), 40, 10
SETTINGS = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def supervised(logs: Path, restart: bool = True) -> Iterator[Supervisor]:
    with Supervisor(CODE, logs=logs, environment=ENVIRONMENT, restart=restart) as running:
        yield running


@contextlib.contextmanager
def launched(running: Supervisor, logs: Path, launch: str, more: str = "", **orders: object) -> Iterator[list[Child]]:
    """Two trainers; the first holds after a step."""
    environment = {"TORCH_ECREC_LAUNCH": launch, **({more: "1"} if more else {})}
    children: list[Child] = []
    try:
        for trainer in range(2):
            hold = (HOLD,) if trainer == 0 and not orders else ()
            one = Orders(running.join, trainer, 2, STEPS, hold)
            children.append(Child(one, logs, environment, f"{launch}-{trainer}.log"))
        yield children
    finally:
        for child in children:
            child.end()


def undisturbed(folder: Path) -> dict[str, object]:
    """What such a run comes to."""
    folder.mkdir()
    with supervised(folder) as running, launched(running, folder, "alone", hold=False) as children:
        results = [child.result() for child in children]
    return {"digest": results[0]["digest"], "lookups": [one["lookups"] for one in results]}


def went_on(children: Sequence[Child]) -> dict[str, object]:
    children[0].tell("go")
    results = [child.result() for child in children]
    return {"digest": results[0]["digest"], "lookups": [one["lookups"] for one in results]}


def is_led(running: Supervisor) -> bool:
    """A coordinator is there that knows where slots are."""
    try:
        return bool(running.status().epoch)
    except (OSError, ClusterError):
        return False


@contextlib.contextmanager
def coordinator(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        command = [sys.executable, "-m", "torch_ecrec", "coordinator", *words]
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **SETTINGS})
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT_S)


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_coordinator_with_a_wrong_line_of_shell_history(tmp_path: Path) -> None:
    """It ends, and says which line is right; that one goes on with every process, and every bit."""
    wanted = undisturbed(tmp_path / "undisturbed")
    with supervised(tmp_path, restart=False) as running, launched(running, tmp_path, "a") as children:
        children[0].expect("held")
        servers = {one.pid for one in running.status().members if one.role == "server"}
        os.kill(running.coordinator.pid, signal.SIGKILL)
        wait_until(lambda: running.ended is not None, LIMIT_S, "the end of the coordinator is known")
        wrong = ["--servers", "4", "-k", "2", "-r", "2", "--port", str(running.address[1])]
        with coordinator(wrong, tmp_path / "wrong.log") as child:
            assert child.wait(LIMIT_S) == OtherCluster.exit_code, (tmp_path / "wrong.log").read_text()
        said = (tmp_path / "wrong.log").read_text()
        assert "refuses to lead" in said and "Traceback" not in said
        (right,) = re.findall(r"torch-ecrec coordinator (.*) \.\.\.;", said)
        with coordinator(right.split(), tmp_path / "right.log") as child:
            wait_until(lambda: is_led(running), LIMIT_S, "all are back")
            assert went_on(children) == wanted
            status = running.status()
            assert {one.pid for one in status.members if one.role == "server" and one.alive} == servers
            assert child.poll() is None and status.era == 0
        assert "of another cluster: code parameters" in "".join(one.log.read_text() for one in children)
        assert '"event": "lost"' not in (tmp_path / "right.log").read_text()


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_second_job_in_a_cluster(tmp_path: Path) -> None:
    """While the first trains, the second is refused by name; so is the next one, once the first has ended."""
    with supervised(tmp_path) as running, launched(running, tmp_path, "a") as children:
        children[0].expect("held")
        pids = [child.process.pid for child in children]
        with launched(running, tmp_path, "b", hold=False) as second:
            assert [child.process.wait(LIMIT_S) for child in second] == [JoinRefused.exit_code] * 2
        for child in second:
            said = child.log.read_text()
            assert "waits until the cluster" in said and any(f"pid {pid} at 127.0.0.1" in said for pid in pids), said
        went_on(children)
        status = running.status()
        assert status.era == 0 and status.finished and status.step == STEPS
        with launched(running, tmp_path, "c", hold=False) as third:
            assert [child.process.wait(LIMIT_S) for child in third] == [JoinRefused.exit_code] * 2
        said = third[0].log.read_text()
        assert f"has ended: all its trainers were done, after step {STEPS}." in said and "--again" in said
        assert running.status().era == 0
        with launched(running, tmp_path, "d", "TORCH_ECREC_AGAIN", hold=False):
            wait_until(lambda: running.status().era == 1, LIMIT_S, "it is trained on")


@pytest.mark.timeout(3 * LIMIT_S)
def test_after_data_loss_the_coordinator_ends_once_all_who_ask_were_told(tmp_path: Path) -> None:
    """And its supervisor (`up`, say) starts no other, which would begin anew."""
    with supervised(tmp_path) as running:
        with launched(running, tmp_path, "a") as children:
            children[0].expect("held")
            status = running.status()
            pids = {one.name: one.pid for one in status.members}
            for slot in (0, 1):
                os.kill(pids[status.slots[slot].server], signal.SIGKILL)
            wait_until(lambda: running.status().fatal is not None, LIMIT_S, "data is lost")
            children[0].tell("go")
            assert [child.process.wait(LIMIT_S) for child in children] == [DataLoss.exit_code] * 2
        with launched(running, tmp_path, "b", hold=False) as children:
            assert [child.process.wait(LIMIT_S) for child in children] == [DataLoss.exit_code] * 2
        wait_until(lambda: running.ended is not None, LIMIT_S, "the coordinator ends")
        assert running.ended == DataLoss.exit_code
