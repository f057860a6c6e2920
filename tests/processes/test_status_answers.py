"""`torch-ecrec status` of real clusters in ten states that faults bring them to: verdict, exit code, remedy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_trainers import ENVIRONMENT, LIMIT_S
from conftest import wait_until
from test_cluster import Cluster, cluster

from torch_ecrec.observe.verdict import verdict_of
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import Status, of_message
from torch_ecrec.spec.job import CodeSpec

CODE = CodeSpec(3, 2, 1)
ENDLESS = 1_000_000


def ask(join: str, *more: str) -> tuple[int, str]:
    """What the command says, and its exit code."""
    words = [sys.executable, "-P", "-m", "torch_ecrec", "status", "--join", join, *more]
    environment = {**os.environ, "TORCH_ECREC_GIVE_UP_S": "5"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def answers(join: str, code: int, says: str, remedy: str = "", *more: str) -> str:
    """Waits until it says that, and more anywhere; returns all of it."""
    last: list[str] = []

    def said() -> bool:
        found, text = ask(join)
        last[:] = [f"{found}: {text}"]
        lines = text.splitlines()
        first = says in lines[0] and remedy in (lines[1] if len(lines) > 1 else "")
        return found == code and first and all(one in text for one in more)

    try:
        wait_until(said, LIMIT_S, f"exit code {code} and {says!r}, {remedy!r}, {more}")
    except AssertionError as error:
        raise AssertionError(f"{error}; last: {last}") from None
    return last[0]


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes do not run."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            wait_until(
                lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED, LIMIT_S, "the fault fires"
            )  # type: ignore[misc]
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def hosts(status: Status) -> list[int]:
    """The process of each slot's server."""
    pids = {member.name: member.pid for member in status.members}
    return [pids[place.server] for place in status.slots]


def training(running: Cluster) -> Status:
    assert running.children[0].expect("held") == "step 5"
    running.children[0].tell("go")
    return running.wait_for("a rate", lambda s: s.rate is not None and s.step > 20)


def test_from_an_empty_cluster_to_the_end_of_its_job(tmp_path: Path) -> None:
    with Supervisor(CODE, spares=1, logs=tmp_path, environment=ENVIRONMENT) as empty:
        answers(empty.join, 1, "WARN: the cluster has not begun: 3 of 3 servers and 0 trainers", "TORCH_ECREC_JOIN=")
    code, text = ask(empty.join)
    assert code == 4 and "no coordinator at" in text

    with cluster(tmp_path, CODE, spares=1, steps=400, hold=(5, 300), pause_s=0.01) as running:
        join, status = running.supervisor.join, training(running)
        text = answers(join, 0, "OK: training goes on at step ")
        assert "steps/s" in text and "any 1 of 3 servers may be lost" in text and "server-0 joined" in text
        code, text = ask(join, "--json")
        shown = json.loads(text)
        assert code == 0 and (shown["schema"], shown["verdict"]["level"]) == (1, "OK")
        assert verdict_of(of_message(shown), join).level == "OK"
        assert {member.host for member in status.members} == {os.uname().nodename}
        assert all(one.report.process is not None and one.report.process.resident_bytes for one in status.members)
        assert [one.report.trained is not None for one in status.members] == [
            one.role == "trainer" for one in status.members
        ]

        with stopped(hosts(status)[1]):
            answers(join, 1, f"WARN: {status.slots[1].server} was not heard of for", "given up")
        answers(join, 0, "OK: training goes on")

        before = running.supervisor.coordinator.pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running.supervisor.coordinator.pid != before, LIMIT_S, "another coordinator")
        text = answers(join, 0, "OK: training goes on")
        assert "this coordinator was started in place of another" in text

        assert running.children[0].expect("held") == "step 300"
        running.children[0].tell("go")
        for child in running.children:
            child.result()
        answers(join, 0, "OK: the job has ended: all its trainers were done")


def test_from_a_rebuild_to_the_loss_of_data(tmp_path: Path) -> None:
    slow = {"TORCH_ECREC_REBUILD_BYTES_PER_S": "1", "TORCH_ECREC_REBUILD_CHUNK_BYTES": "64"}  # without an end
    with cluster(tmp_path, CODE, spares=1, steps=ENDLESS, hold=(5,), pause_s=0.01, environment=slow) as running:
        join, status = running.supervisor.join, training(running)
        running.kill(1)
        text = answers(join, 1, "WARN: slot 1 is being rebuilt, ", "training goes on meanwhile")
        assert "no server may be lost now" in text and "was lost: " in text
        running.wait_for("a step since", lambda s: s.step > status.step + 20)
        running.kill(0)
        text = answers(join, 2, "ERROR: STOPPED: slots [0, 1] are lost together", "start the cluster again")


def test_from_a_slot_without_a_server_to_the_loss_of_trainers(tmp_path: Path) -> None:
    with cluster(tmp_path, CODE, steps=ENDLESS, hold=(5,), pause_s=0.01, waits=True) as running:
        join, _ = running.supervisor.join, training(running)
        running.kill(1)
        answers(join, 2, "ERROR: slot 1 has no server, and training waits for it", f"torch-ecrec serve --join {join}")
        running.supervisor.start_server()
        answers(join, 0, "OK: training goes on")
        for child in running.children:
            child.process.kill()
        answers(join, 1, "WARN: training stands: 0 of 2 trainers are there; they go on after step", "torchrun")


@pytest.mark.smoke
def test_training_that_stands_for_silent_servers(tmp_path: Path) -> None:
    lease = {"TORCH_ECREC_LEASE_S": "2"}
    with cluster(tmp_path, CODE, steps=ENDLESS, hold=(5,), pause_s=0.01, environment=lease) as running:
        join, status = running.supervisor.join, training(running)
        with stopped(*hosts(status)[:2]):
            pids = [f"pid {pid} on {os.uname().nodename}" for pid in hosts(status)[:2]]  # one is over its lease first
            answers(join, 2, "ERROR: STANDS STILL, waits for silent members", "see whether their hosts run", *pids)
        answers(join, 0, "OK: training goes on")


def test_a_watch_goes_on_while_nobody_answers(tmp_path: Path) -> None:
    """Every answer is a line of JSON, for who reads it by program; and it ends with Ctrl-C."""
    with Supervisor(CODE, logs=tmp_path, environment=ENVIRONMENT) as running:
        words = [
            sys.executable,
            "-P",
            "-m",
            "torch_ecrec",
            "status",
            "--join",
            running.join,
            "--json",
            "--watch",
            "0.2",
        ]
        environment = {**os.environ, "TORCH_ECREC_GIVE_UP_S": "1"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as watch:
            assert watch.stdout is not None
            try:
                assert json.loads(watch.stdout.readline())["verdict"]["level"] == "WARN"
                running.close()
                while "error" not in json.loads(watch.stdout.readline()):
                    pass
                watch.send_signal(signal.SIGINT)
                assert watch.wait(LIMIT_S) == 130
            finally:
                watch.kill()


@pytest.mark.parametrize("words", [["0"], ["-1"], ["soon"], ["inf"], ["1e10"]])
def test_a_watch_of_no_time_is_refused(words: list[str]) -> None:
    code, text = ask("127.0.0.1:1", "--watch", *words)
    assert code == 2 and "a number of seconds is from 0.1 to 1e+09" in text
