"""A call in C that holds the interpreter's lock for longer than a lease, in a trainer or in a server of a real cluster.

Nobody is lost by it: the run is the undisturbed one, bit for bit, without another life of anybody. Who only waits with
the lock held, or is stopped meanwhile, is found as ever. `tests/processes/test_unlocked.py` has the kinds of calls.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import test_cluster
from conftest import ROOT, is_stopped, wait_until
from places import SUPPORT
from test_cluster import STEPS, check, cluster
from test_hangs import host_of

from torch_ecrec.spec.job import CodeSpec

undisturbed = test_cluster.undisturbed
LEASE_S = 4.0
LEASE = {"TORCH_ECREC_LEASE_S": str(LEASE_S)}
STEP = 20
SHORT_S, LONG_S = 1.5 * LEASE_S, 3 * LEASE_S  # more than the 5 s of which the log tells


def in_a_server(how: str) -> dict[str, str]:
    """In the host of slot 1, in a fold."""
    path = f"{SUPPORT / 'stopping'}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "ECREC_TEST_STOP": f"1 0 {STEP + 1}", "ECREC_TEST_STOP_HOW": how}


def said(folder: Path, name: str) -> str:
    return "".join(log.read_text() for log in folder.glob(f"{name}*.log"))


@pytest.mark.timeout(test_cluster.LIMIT_S)
@pytest.mark.parametrize(
    ("who", "seconds"),
    [
        ("trainer", LONG_S),
        ("server", LONG_S),
        pytest.param("trainer", SHORT_S, marks=pytest.mark.slow),
        pytest.param("server", SHORT_S, marks=pytest.mark.slow),
        pytest.param("trainer", 10 * LEASE_S, marks=pytest.mark.slow),
        pytest.param("server", 10 * LEASE_S, marks=pytest.mark.slow),
    ],
)
def test_nobody_is_lost_who_computes(
    tmp_path: Path, undisturbed: list[dict[str, Any]], who: str, seconds: float
) -> None:
    environment = LEASE | (in_a_server(f"spin {seconds}") if who == "server" else {})
    orders: dict[str, Any] = {"steps": STEPS, "compute_step": STEP if who == "trainer" else 0, "compute_s": seconds}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, **orders) as running:
        results = [child.result() for child in running.children]
        status = running.supervisor.status()
        assert [place.incarnation for place in status.slots] == [0, 0, 0] and status.era == 0
        assert all(member.alive or member.left for member in status.members)
        check(results, undisturbed, parities=1)
    assert "a call held the interpreter's lock" in said(tmp_path, who), "the fault fires"


@pytest.mark.timeout(test_cluster.LIMIT_S)
def test_who_is_stopped_meanwhile_is_lost_and_nobody_else(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    orders: dict[str, Any] = {"steps": STEPS, "hold": (STEP,), "compute_step": STEP, "compute_s": 4 * LONG_S}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=LEASE, **orders) as running:
        assert running.children[0].expect("held") == f"step {STEP}"
        pid = host_of(running, 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(pid), test_cluster.LIMIT_S, "it is stopped")
            running.children[0].tell("go")
            status = running.wait_for("its slot is elsewhere", lambda s: s.slots[1].incarnation == 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [member.alive for member in status.members if member.pid != pid] == [True] * 5
        results = [child.result() for child in running.children]
        status = running.supervisor.status()
        assert [place.incarnation for place in status.slots] == [0, 1, 0] and status.era == 0
        check(results, undisturbed, parities=1)
    assert "a call held the interpreter's lock" in said(tmp_path, "trainer"), "the fault fires"


@pytest.mark.slow
@pytest.mark.timeout(test_cluster.LIMIT_S)
def test_a_server_that_only_waits_with_the_lock_held_is_lost(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    """A deadlock. It ends by itself, though none of its Python runs; another is started in its place."""
    environment = LEASE | in_a_server("wait 3000")
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, steps=STEPS, hold=(STEP,)) as running:
        assert running.children[0].expect("held") == f"step {STEP}"
        pid = host_of(running, 1)
        running.children[0].tell("go")
        results = [child.result() for child in running.children]
        status = running.supervisor.status()
        assert [place.incarnation for place in status.slots] == [0, 1, 0]
        assert not next(member.alive for member in status.members if member.pid == pid)
        check(results, undisturbed, parities=1)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), test_cluster.LIMIT_S, "it has ended")
    assert "holds the interpreter's lock, and does not compute" in said(tmp_path, "server")
