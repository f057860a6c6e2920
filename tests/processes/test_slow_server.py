"""A real server that runs for a fiftieth of the time is named, and nobody else; a trainer that is elsewhere for longer
than others would wait for a cluster ends nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_trainers import ENVIRONMENT
from test_cluster import cluster

from torch_ecrec.observe.text import format_status
from torch_ecrec.spec.job import CodeSpec

STOPPED_S, RUNS_S = 0.49, 0.01  # of each half second: it is heard of once a second, and so never quiet
GIVE_UP_S = 60.0


@contextlib.contextmanager
def limping(pid: int) -> Iterator[None]:
    """The process runs for a fiftieth of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(RUNS_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_server_at_two_percent_is_named_and_nobody_else(tmp_path: Path) -> None:
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, steps=100_000, hold=(5,), pause_s=0.01) as running:
        trainer = running.children[0]
        assert trainer.expect("held") == "step 5"
        status = running.supervisor.status()
        name = status.slots[1].server
        pid = next(member.pid for member in status.members if member.name == name)
        trainer.tell("go")
        with limping(pid):
            status = running.wait_for("a name", lambda s: any(member.slow for member in s.members))
        assert [member.name for member in status.members if member.slow] == [name]
        text = format_status(status)
        assert f"SLOW: training waits for {name} " in text and f"torch-ecrec drain {name}" in text
        log = (tmp_path / "coordinator.log").read_text(errors="replace")
        assert [line.count(f'"member": "{name}"') for line in log.splitlines() if '"event": "slow"' in line] == [1]
        assert "WARNING" in next(line for line in log.splitlines() if '"event": "slow"' in line)


@pytest.mark.slow  # it waits for longer than a cluster is waited for, which is longer than processes take to start
def test_a_trainer_that_is_elsewhere_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TORCH_ECREC_GIVE_UP_S", f"{GIVE_UP_S:g}")
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, steps=12, hold=(5,)) as running:
        elsewhere, waits = running.children
        assert elsewhere.expect("held") == "step 5"
        running.wait_for("who is awaited", lambda s: any(m.report.awaits == [0] for m in s.members))
        assert "waits for trainer 0" in format_status(running.supervisor.status())
        time.sleep(1.5 * GIVE_UP_S)
        assert waits.process.poll() is None, "it waits, however long"
        elsewhere.tell("go")
        for child in running.children:
            child.result()
        log = (tmp_path / "trainer-1.log").read_text(errors="replace")
        assert "waits for trainer 0, whose script is at something else" in log
