"""How trainers end whose cluster has, and what their forked children keep of them: real processes."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, is_stopped, wait_for_none, wait_until
from places import SUPPORT
from test_cli import command, status_of
from test_cluster import ENVIRONMENT

from torch_ecrec.errors import ClusterError, TrainersLost
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0  # for anything that is waited for: only a hang reaches it
STEPS = 3
LEASE_S = 3.0


class Trainer:
    """A process that runs `ends_child.py`. What it is told to do begins when it has said "ready"."""

    def __init__(self, how: str, join: str | None, rank: int = 0, trainers: int = 1, store: Path | None = None) -> None:
        orders = {"how": how, "join": join, "rank": rank, "trainers": trainers, "store": str(store), "steps": STEPS}
        self.process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "ends_child.py"), json.dumps(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        self.err: list[str] = []
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_err)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self.err.extend(self.process.stderr)

    def expect(self, kind: str) -> Any:
        message = self._said.get(timeout=LIMIT_S)
        assert message is not None and kind in message, f"{message} instead of {kind!r}: {''.join(self.err)}"
        return message[kind]

    def rest(self) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, what it said at last, and standard error."""
        code = self.process.wait(LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)
        messages = [self._said.get_nowait() for _ in range(self._said.qsize())]
        return code, [message for message in messages if message is not None], "".join(self.err)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextlib.contextmanager
def ending(*trainers: Trainer) -> Iterator[None]:
    try:
        yield
    finally:
        for trainer in trainers:
            trainer.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """A cluster for two trainers; each test brings new ones."""
    logs = tmp_path_factory.mktemp("pair")
    environment = {**ENVIRONMENT, "TORCH_ECREC_LEASE_S": str(LEASE_S)}
    with Supervisor(CodeSpec(3, 2, 1), logs=logs, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Supervisor, Path]]:
    """A cluster for one trainer, and its logs; each test brings a new one. Nobody is lost for being silent."""
    logs = tmp_path_factory.mktemp("patient")
    environment = {**ENVIRONMENT, "TORCH_ECREC_LEASE_S": "1000"}
    with Supervisor(CodeSpec(3, 2, 1), logs=logs, environment=environment) as running:
        yield running, logs


CAUGHT = "TrainersLost"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "number", "code", "says"),
    [
        ("catches", signal.SIGKILL, 0, [{"caught": CAUGHT}, {"saved": True}]),
        pytest.param(
            "catches_a_collective",
            signal.SIGKILL,
            0,
            [{"caught": "RuntimeError"}, {"saved": True}],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "is_busy_with_its_own", signal.SIGKILL, 0, [{"caught": CAUGHT}, {"saved": True}], marks=pytest.mark.slow
        ),
        ("saves_at_its_end", signal.SIGKILL, TrainersLost.exit_code, [{"caught": "NoneType"}, {"saved": True}]),
        ("hangs_in_a_collective", signal.SIGSTOP, TrainersLost.exit_code, []),
        pytest.param("hangs_in_a_backward", signal.SIGSTOP, TrainersLost.exit_code, [], marks=SLOW),
        pytest.param("hangs_at_its_end", signal.SIGSTOP, TrainersLost.exit_code, [], marks=SLOW),
    ],
)
def test_a_trainer_that_has_lost_another(
    pair: Supervisor, tmp_path: Path, how: str, number: int, code: int, says: list[Any]
) -> None:
    """It is ended only if it waits for that in vain: what it does once it knows is its own affair, however long."""
    other = Trainer("waits", pair.join, 0, 2, tmp_path / "store")
    trainer = Trainer(how, pair.join, 1, 2, tmp_path / "store")
    with ending(other, trainer):
        other.expect("ready")
        trainer.expect("ready")
        os.kill(other.process.pid, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: is_stopped(other.process.pid), LIMIT_S, "the fault fires")
        assert trainer.rest()[:2] == (code, says), trainer.err
        err = trainer.rest()[2]
        assert ("in vain" in err and "most recent call first" in err) == how.startswith("hangs"), err


# forked children ------------------------------------------------------------------------------------------------------


def held_by(pid: int, other: int) -> set[str]:
    """Files that both processes have open, but for standard ones and what multiprocessing gave the child."""

    def files(of: int) -> set[str]:
        found = set()
        for entry in Path(f"/proc/{of}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry))
        return found

    return {name for name in files(pid) & files(other) if name.startswith(("socket:", "anon_inode:"))}


def era_of(running: Supervisor) -> int:
    with contextlib.suppress(ClusterError):
        return running.status().era
    return -1


@pytest.mark.parametrize("how", ["workers", "persistent_workers"])
def test_workers_do_not_hide_the_end_of_their_trainer(patient: tuple[Supervisor, Path], how: str) -> None:
    """They live on (stopped, they cannot even look for their parent), and keep nothing open that ends with it."""
    running, logs = patient
    trainer = Trainer(how, running.join)
    with ending(trainer):
        pid = trainer.expect("ready")
        workers = trainer.expect("workers")
        assert len(workers) == 2
        connections = [c for worker in workers for c in psutil.Process(worker).net_connections("tcp")]
        assert not [c for c in connections if c.status == psutil.CONN_LISTEN], "no listener"
        assert running.address not in [tuple(c.raddr) for c in connections], "no connection to the coordinator"
        assert len(held_by(pid, workers[0])) <= 2, "the connection to torch's store, and numba's or torch's own"
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        try:
            (member,) = [m for m in running.status().members if m.pid == pid]
            era, log = running.status().era, (logs / "coordinator.log").read_text()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: era_of(running) == era + 1, LIMIT_S, "the coordinator notices")
            assert all(is_stopped(worker) for worker in workers)
            said = (logs / "coordinator.log").read_text().removeprefix(log)
            assert member.name in said and "its connection ended" in said
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)


def test_workers_do_not_hold_a_cluster_of_their_trainer() -> None:
    """Trainer 0 of a script without a cluster is killed: its servers see the end of their supervisor."""
    trainer = Trainer("workers", None)
    with ending(trainer):
        pid = trainer.expect("ready")
        workers = trainer.expect("workers")
        servers = [child for child in psutil.Process(pid).children(recursive=True) if child.pid not in workers]
        assert len(servers) == 6, "what forks them, a coordinator, three servers, a spare"
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            left = psutil.wait_procs(servers, timeout=LIMIT_S)[1]
            assert not left and all(is_stopped(worker) for worker in workers)
        finally:
            for process in [*workers, *(server.pid for server in servers)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("local", [False, pytest.param(True, marks=SLOW)], ids=["cluster", "local cluster"])
def test_a_forked_child_ends_in_order(request: pytest.FixtureRequest, local: bool) -> None:
    """With everything that is done at an interpreter's end, and without harm to its parent; it has no session."""
    trainer = Trainer("plain_forks", None if local else request.getfixturevalue("patient")[0].join)
    with ending(trainer):
        trainer.expect("ready")
        assert trainer.expect("codes") == [7, 7]
        assert trainer.rest()[0] == 0, trainer.err


def test_a_process_that_is_stopped_when_its_parent_ends_ends_too() -> None:
    """It cannot act; nobody may be left who would continue it: the end of the pipe does."""
    code = "from torch_ecrec.runtime.lifetime import end_with_parent; end_with_parent(True); print('ready', flush=True)"
    words = [sys.executable, "-P", "-c", f"{code}; import time; time.sleep(3600)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            os.kill(child.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(child.pid), LIMIT_S, "the fault fires")
            child.stdin.close()
            assert child.wait(LIMIT_S) == 0
        finally:
            child.kill()


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "started"])
def test_stopped_servers_do_not_outlive_a_cluster_that_is_killed(forks: bool) -> None:
    """As a test that is cut off by a time limit: its process is killed, and it had stopped some of its servers."""
    code = "from torch_ecrec.processes import supervisor\n" + "supervisor.is_available = lambda: False\n" * (not forks)
    program = ["-c", f"{code}from torch_ecrec.cli.main import main\nmain()"]
    with command("up", "--servers", "3", "--spares", "0", program=program) as up:
        join = up.read_until(r"cluster at (\S+) \(")[1]
        up.wait_until("servers", lambda: len(status_of(join).servers) == 3)
        stopped = [one.pid for one in status_of(join).servers[:2]]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda pid=pid: is_stopped(pid), LIMIT_S, "the fault fires")  # type: ignore[misc]
        os.kill(up.process.pid, signal.SIGKILL)
        left = wait_for_none(up.living, LIMIT_S)
        assert not left, left
