"""The supervisor of a local cluster: what it starts again and how soon, and what it says when it cannot start."""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import wait_until
from kept import Shelf
from places import SUPPORT
from test_cli import command

from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.processes import supervisor as under_test
from torch_ecrec.processes.children import Child
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import MemberStatus
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0  # only a hang reaches it
CODE = CodeSpec(2, 1, 1)
ENVIRONMENT = {"TORCH_ECREC_HEARTBEAT_S": "0.2", "OMP_NUM_THREADS": "1"}
FAKES = SUPPORT / "ending"


@contextlib.contextmanager
def without_threads(name: str, times: int) -> Iterator[list[str]]:
    """So many threads of that name cannot be started."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name and len(refused) < times:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield refused
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def cluster(logs: Path, fakes: str = "", forks: bool = True, **environment: str) -> Iterator[Supervisor]:
    """`fakes`: what `ending/sitecustomize.py` lets the children do; each has an interpreter of its own then."""
    more = {**ENVIRONMENT, **environment}
    if fakes:
        more |= {"PYTHONPATH": str(FAKES), "ECREC_TEST_END": fakes}
    available = under_test.is_available
    under_test.is_available = lambda: forks and not fakes and available()
    try:
        with Supervisor(CODE, logs=logs, environment=more) as running:
            yield running
    finally:
        under_test.is_available = available


def living(running: Supervisor) -> list[MemberStatus]:
    with contextlib.suppress(ClusterError):
        return [member for member in running.status().members if member.alive]
    return []


def starts(logs: Path) -> list[int]:
    """The numbers of all servers that were started, in the place of others too."""
    return sorted(int(path.stem.partition("-")[2]) for path in logs.glob("server-*.log"))


def test_a_coordinator_is_told_what_the_one_before_has_begun_with(tmp_path: Path) -> None:
    """Not what is the newest there by then: another run may have left it."""
    shelf = Shelf(str(tmp_path / "store"))
    begun = shelf.write(100)
    with Supervisor(CODE, environment=ENVIRONMENT, coordinator=["--restore", str(tmp_path / "store")]) as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        first = running.coordinator.pid
        shelf.write(50)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.coordinator.pid != first and len(living(running)) == 2, LIMIT_S, "another one")
        words = psutil.Process(running.coordinator.pid).cmdline()
        assert words[words.index("--began-with") + 1] == begun.id


def test_a_server_that_reached_nobody_is_started_again(tmp_path: Path) -> None:
    """It ended with 4, since the coordinator hung: another one joins when that goes on."""
    with cluster(tmp_path, TORCH_ECREC_GIVE_UP_S="4") as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        victim = living(running)[0].pid
        coordinator = running.coordinator.pid
        os.kill(coordinator, signal.SIGSTOP)
        try:
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: 2 in starts(tmp_path), LIMIT_S, "another is started")
            said = tmp_path / "server-2.log"
            wait_until(lambda: "did not answer in 4 s" in said.read_text(), LIMIT_S, "the fault fires: it ends with 4")
            wait_until(lambda: 3 in starts(tmp_path), LIMIT_S, "and another is started")
        finally:
            os.kill(coordinator, signal.SIGCONT)
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers again")


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_final_end(tmp_path: Path, code: int) -> None:
    """Told to end, refused, or data is lost: another server would do no better."""
    with cluster(tmp_path, fakes=f"serve {code} 100") as running:
        servers = [psutil.Process(child.pid) for child in running.children[1:]]
        wait_until(lambda: len(running.children) == 1, LIMIT_S, "all servers have ended, and it has seen that")
        assert len(servers) == 2
        time.sleep(3 * under_test.POLL_S)  # in which a wrong one would be started
        assert starts(tmp_path) == [0, 1] and running.ended is None


def test_a_server_whose_disk_is_gone_is_back_with_it_and_the_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (disk := tmp_path / "disk").mkdir()
    tier = {"TORCH_ECREC_TIER": str(disk), "TORCH_ECREC_TIER_MEMORY_BYTES": str(64 << 20)}
    with cluster(tmp_path / "logs", **tier) as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        disk.rmdir()
        os.kill(living(running)[0].pid, signal.SIGKILL)
        said = f": torch-ecrec: `tier` must be a folder that exists, got {disk}: make it"
        wait_until(lambda: said in caplog.text, LIMIT_S, "another one has ended, too")
        assert re.search(r"ended with 10; starting another( in [\d.]+ s)?" + re.escape(said), caplog.text)
        assert f"ended with 10{said}" in running.failed
        disk.mkdir()
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers again")


@pytest.mark.parametrize("how", ["4", pytest.param("-6", marks=pytest.mark.slow)])
def test_servers_that_end_soon_are_started_after_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whatever their end; at once the first time. In the end they come."""
    monkeypatch.setattr(under_test, "QUICK_S", LIMIT_S)  # soon, on whatever machine
    due: list[float] = []
    pause_of: Callable[[int], float] = under_test._pause_s
    monkeypatch.setattr(under_test, "_pause_s", lambda quick: due.append(pause_of(quick)) or pause_of(quick))  # type: ignore[func-returns-value]
    with cluster(tmp_path, fakes=f"serve {how} 4") as running:
        wait_until(lambda: starts(tmp_path) == [0, 1, 2, 3, 4, 5], LIMIT_S, "four of six ended as ordered")
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
    assert sorted(due) == [0.0, 0.0, 0.5, 0.5]


def test_pauses_grow_to_a_limit() -> None:
    pauses = [under_test._pause_s(quick) for quick in range(20)]
    assert pauses == sorted(pauses) and pauses[:2] == [0.0, 0.0] and set(pauses[8:]) == {30.0}


@pytest.mark.smoke
@pytest.mark.parametrize("how", [pytest.param("1", marks=pytest.mark.slow), "-9"])
def test_a_coordinator_that_fails_is_replaced(tmp_path: Path, how: str) -> None:
    """Killed, or ended by a mistake of its own: its members find the next one where it was."""
    with cluster(tmp_path, TORCH_ECREC_GIVE_UP_S="90") as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        names = {member.name for member in living(running)}
        before = running.coordinator
        os.kill(before.pid, signal.SIGKILL)
        if how == "1":
            before.wait()
            before.returncode = 1
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "its members are back")
        assert running.coordinator.pid != before.pid and running.ended is None
        assert {member.name for member in living(running)} == names


def test_without_a_thread_to_read_its_address_a_coordinator_is_tried_again(tmp_path: Path) -> None:
    """At the limit of processes, say. Whoever starts processes again goes on."""
    with cluster(tmp_path) as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        before = running.coordinator.pid
        with without_threads("address", 1) as refused:
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: bool(refused), LIMIT_S, "the fault fires")
            wait_until(lambda: running.coordinator.pid != before and len(living(running)) == 2, LIMIT_S, "another one")
        os.kill(living(running)[0].pid, signal.SIGKILL)
        wait_until(lambda: 2 in starts(tmp_path), 60.0, "it goes on to start processes again")
        assert running.ended is None


def test_a_coordinator_that_does_not_come_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "PAUSES_S", (0.0, 0.0, 0.1))
    with cluster(tmp_path, forks=False) as running:
        running.environment |= {"PYTHONPATH": str(FAKES), "ECREC_TEST_END": "coordinator 1 100"}
        os.kill(running.coordinator.pid, signal.SIGKILL)
        wait_until(lambda: running.ended is not None, LIMIT_S, "it gives up")
        assert running.ended == -signal.SIGKILL
    assert running.coordinator.returncode == 1


def test_a_coordinator_that_ends_at_its_start(tmp_path: Path) -> None:
    others = {child.pid for child in psutil.Process().children()}  # multiprocessing's own tracker, after other tests
    logs = tmp_path / "logs"
    expected = rf"the coordinator did not start \(exit code 7\); the end of {logs}/coordinator.log:"
    with pytest.raises(ClusterUnavailable, match=expected), cluster(logs, fakes="coordinator 7 100"):
        pass
    assert not {child.pid for child in psutil.Process().children()} - others


@pytest.mark.parametrize("what", ["a file", "under a file"])
def test_logs_that_cannot_be_written(tmp_path: Path, what: str) -> None:
    """Said before anything starts."""
    (tmp_path / "file").write_text("")
    logs = tmp_path / "file" if what == "a file" else tmp_path / "file" / "logs"
    with command("up", "--logs", str(logs)) as up:
        assert up.wait() == 2
        (line,) = up.err
        assert line.startswith(f"torch-ecrec: the logs cannot be written to {logs}: ") and not up.living()


@pytest.mark.slow
def test_logs_without_room(tmp_path: Path) -> None:
    """A full disk: what cannot be written is lost, and nothing else."""
    with cluster(tmp_path, fakes="room 0 100") as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        victim = living(running)[0].pid
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: len(living(running)) == 2 and victim not in {m.pid for m in living(running)}, LIMIT_S, "replaced"
        )
    assert not any(path.stat().st_size for path in tmp_path.glob("*.log"))


def test_the_folder_of_the_logs_is_gone(tmp_path: Path) -> None:
    """With its disk, no server can be started for a while: it is tried again. A tidied folder is made again."""
    logs, away = tmp_path / "disk" / "logs", tmp_path / "away"
    with cluster(logs) as running:
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers")
        logs.parent.rename(away)
        os.kill(living(running)[0].pid, signal.SIGKILL)
        wait_until(lambda: bool(running._due and running._due[0][1]), LIMIT_S, "the fault fires: it cannot be started")
        away.rename(logs.parent)
        wait_until(lambda: len(living(running)) == 2, LIMIT_S, "two servers again")
        shutil.rmtree(logs)
        before = running.coordinator.pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running.coordinator.pid != before and len(living(running)) == 2, LIMIT_S, "another one")
        assert (logs / "coordinator.log").exists() and running.ended is None


def test_close_does_not_wait_for_a_coordinator(tmp_path: Path) -> None:
    """One that was killed is to be replaced, and the next one does not come up."""
    others = {child.pid for child in psutil.Process().children()}  # multiprocessing's own tracker, after other tests
    with cluster(tmp_path, forks=False) as running:
        before = running.coordinator
        running.environment |= {"PYTHONPATH": str(FAKES), "ECREC_TEST_END": "coordinator hang 100"}
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: running.coordinator is not before, LIMIT_S, "another is started")
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 2 * under_test.STOP_S + 20
    assert not {child.pid for child in psutil.Process().children()} - others


SLOW_TO_END = """
import json, os, sys, time
if sys.argv[1] == "coordinator":
    print(json.dumps({"address": ["127.0.0.1", 1], "began_with": "none"}), flush=True)
os.read(0, 1)
time.sleep(0.5 if sys.argv[1] == "coordinator" else 0.0)
print(sys.argv[1], file=open(sys.argv[2], "a"))
"""


class Recorded(Supervisor):
    """Children that say when they end; a coordinator takes its time."""

    def start_child(self, name: str, arguments: list[str], stdout: int | None, stderr: int | None) -> Child:
        assert self.logs is not None
        words = [sys.executable, "-I", "-S", "-c", SLOW_TO_END, name, str(self.logs / "ends")]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def test_servers_are_told_to_end_once_the_coordinator_has_ended(tmp_path: Path) -> None:
    """It would take those that leave before it for lost, and tell the trainers of a loss of data that there is not."""
    with Recorded(CODE, logs=tmp_path):
        pass
    ends = (tmp_path / "ends").read_text().split()
    assert ends[0] == "coordinator" and sorted(ends[1:]) == ["server-0", "server-1"]
