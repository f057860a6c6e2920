"""Servers that hang (SIGSTOP) and wake up again (SIGCONT), under real processes: nobody ever uses what they did.

Longer ones, at any moment and of trainers too, come with `torch-ecrec chaos`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_cluster
from conftest import ROOT, is_stopped, wait_until
from places import SUPPORT
from test_cluster import STEPS, Cluster, Status, check, cluster

from torch_ecrec.spec.job import CodeSpec

undisturbed = test_cluster.undisturbed
LEASE_S = 3.0
STOPPED_STEP = 20
LEASE = {"TORCH_ECREC_LEASE_S": str(LEASE_S)}


def host_of(running: Cluster, slot: int) -> int:
    status = running.supervisor.status()
    pids = {member.name: member.pid for member in status.members}
    return int(pids[status.slots[slot].server])


@pytest.mark.parametrize(
    ("seconds", "in_fold"),
    [
        (1.0, False),
        pytest.param(5.0, True, marks=pytest.mark.slow),
        pytest.param(1.0, True, marks=pytest.mark.slow),
        pytest.param(5.0, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: (
        {False: "between messages", True: "in a fold"}[value] if isinstance(value, bool) else f"{value} s"
    ),
)
def test_a_server_that_hangs(tmp_path: Path, undisturbed: list[dict[str, Any]], seconds: float, in_fold: bool) -> None:
    """For less than a lease: all wait for it. For longer: its slot lives elsewhere when it wakes up, what it goes on
    with is refused, and it joins again, as a spare."""
    environment = dict(LEASE)
    if in_fold:
        environment |= {"PYTHONPATH": f"{SUPPORT / 'stopping'}{os.pathsep}{ROOT}"}
        environment |= {"ECREC_TEST_STOP": f"1 0 {STOPPED_STEP + 1}"}
    orders: dict[str, Any] = {"steps": STEPS, "hold": (STOPPED_STEP,)}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, **orders) as running:
        trainer = running.children[0]
        assert trainer.expect("held") == f"step {STOPPED_STEP}"
        pid = host_of(running, 1)
        if not in_fold:
            os.kill(pid, signal.SIGSTOP)
        try:
            trainer.tell("go")
            wait_until(lambda: is_stopped(pid), test_cluster.LIMIT_S, "the fault fires: it stops")
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        results = [child.result() for child in running.children]

        def back(status: Status) -> bool:
            mine = [m for m in status.members if m.pid == pid and m.alive]
            return bool(mine) and (seconds < LEASE_S or mine[0].spare)

        status = running.wait_for("it is there again", back)
        incarnations = [place.incarnation for place in status.slots]
        assert incarnations == ([0, 0, 0] if seconds < LEASE_S else [0, 1, 0])
        check(results, undisturbed, parities=1)


@pytest.mark.slow
@pytest.mark.timeout(test_cluster.LIMIT_S)
def test_a_server_whose_node_hangs_for_ever(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    """Its process runs on and could say that it lives: a deadlock in a fold, say. Its slot is rebuilt elsewhere, and
    the process ends, so that another has its memory."""
    environment = LEASE | {"PYTHONPATH": f"{SUPPORT / 'stopping'}{os.pathsep}{ROOT}"}
    environment |= {"ECREC_TEST_STOP": f"1 0 {STOPPED_STEP + 1}", "ECREC_TEST_STOP_HOW": "hang"}
    orders: dict[str, Any] = {"steps": STEPS, "hold": (STOPPED_STEP,)}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, **orders) as running:
        trainer = running.children[0]
        assert trainer.expect("held") == f"step {STOPPED_STEP}"
        pid = host_of(running, 1)
        trainer.tell("go")
        results = [child.result() for child in running.children]
        assert [place.incarnation for place in running.supervisor.status().slots] == [0, 1, 0]
        check(results, undisturbed, parities=1)
        wait_until(lambda: not psutil.pid_exists(pid), test_cluster.LIMIT_S, "it has ended")
        assert "did not let go of its slots within" in "".join(log.read_text() for log in tmp_path.glob("server-*.log"))
