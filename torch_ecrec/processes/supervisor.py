"""A local cluster as child processes: starts a coordinator and servers, starts again what dies, ends them all.

A child holds the read end of a pipe to this process (its standard input): when this process is gone, however it ended,
the pipe closes and the child ends. So nothing is left behind, whatever happens here. A word on the pipe tells it to end
in order; SIGTERM and SIGINT do not, which schedulers send to every process of a job: who serves outlives whom it
serves. Who is told itself waits for its trainers first (`await_trainers`).

Which ends are final is told from the exit code, or the signal (then it is negative):

    server       0 told to end, 2 refused, 3 data is lost; after any other, 4 (nobody answered) included, another may do
    coordinator  0 told to end, 3 data is lost, 7 what it was to begin with cannot be read, 9 members of another cluster
                 have found it; after any other, the next one finds the members where the one before left them

Another is started at once, but after pauses of up to 30 s where one after the other ends soon after its start. When
the coordinator does not come up again in `COORDINATOR_TRIES`, there will be no other: `Supervisor.ended`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch_ecrec.errors import CheckpointError, ClusterError, ClusterUnavailable, DataLoss, OtherCluster, TierFailed
from torch_ecrec.processes.children import Child, await_end, tail, with_own_path
from torch_ecrec.processes.fork_server import ForkServer, is_available
from torch_ecrec.processes.limits import explained
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.addresses import parse_host, text_of
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.runtime.lifetime import belongs_here, tell_to_end
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.job import SLOTS_MOST, CodeSpec
from torch_ecrec.spec.settings import NONE, new_run
from torch_ecrec.transport.whereabouts import ask_status
from torch_ecrec.web.place import Place

log = logging.getLogger(__name__)

STOP_S = 3.0  # between a polite and an impolite end of a child
START_S = 60.0
COORDINATOR = "coordinator"  # its name
POLL_S = 0.2
QUICK_S = 10.0  # a process that lived for less has ended soon after its start
PAUSES_S = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the next start, by how many have ended soon
COORDINATOR_TRIES = 7
STAYS = "told to end: waits until %s have ended, for %g s at most; told again, or by SIGINT, it ends at once"
NO_ROOM = (OSError, MemoryError, RuntimeError)  # the last: no thread can be started
FINAL = (0, 2, 3)  # exit codes of a server
FINAL_OF_COORDINATOR = (0, DataLoss.exit_code, CheckpointError.exit_code, OtherCluster.exit_code)
LOADED = (  # before processes are forked
    "torch_ecrec.processes.launch:warm",
    "torch_ecrec.processes.kernel_bits:kernel_bits",
    "torch_ecrec.processes.coordination",
)
LOADED_FOR_HTTP = "torch_ecrec.web.server"  # so that a coordinator that takes the place of another is there at once


@dataclass
class _Life:
    """A child. `quick`: how many before it, one after the other, have ended soon after their start."""

    name: str
    child: Child
    since_s: float
    quick: int = 0

    def next_quick(self) -> int:
        return self.quick + 1 if time.monotonic() - self.since_s < QUICK_S else 0


class Supervisor:
    """A local cluster: a coordinator and servers as child processes.

    Args:
        code: code parameters; one server per slot.
        spares: servers beyond that.
        host, port: where the coordinator listens; port 0 takes a free one.
        without_spare: see `Coordinator`.
        restart: start processes again that died, the coordinator at the same address; see above.
        logs: folder for the children's standard error; None lets them write to ours.
        environment: extra environment for the children.
        told: whether this process was told to end; asked while the cluster starts, which ends with KeyboardInterrupt
            then. (A handler that raises may do so in the middle of the start of a process.)
        coordinator: more arguments of the coordinator's command line.
        http: where the coordinator serves metrics, status and a page; None: nowhere. The port of the first one, which
            may be any that is free, is that of all others.

    Use as a context manager: leaving ends all children, by their pids.

    Raises:
        OSError: the port is in use, or the logs cannot be written.
        ClusterUnavailable: the coordinator did not start.
    """

    def __init__(
        self,
        code: CodeSpec,
        spares: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        without_spare: str = "survivor",
        restart: bool = True,
        logs: Path | None = None,
        environment: dict[str, str] | None = None,
        told: Callable[[], bool] = lambda: False,
        coordinator: Sequence[str] = (),
        http: Place | None = None,
    ) -> None:
        require_int("spares", spares, 0, SLOTS_MOST)
        host = parse_host(host)
        self.code, self.spares, self.restart, self.logs, self.http = code, spares, restart, logs, http
        # a peer that dies is routine here: RPC's own complaints would drown what matters
        self.environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **(environment or {})}
        self._told, self._run, self._began_with = told, new_run(), ""
        self._lock = threading.Lock()  # guards the lives
        self._lives: list[_Life] = []
        self._supervising: threading.Thread | None = None
        self._stop = threading.Event()
        self._started = 0
        self._due: list[tuple[float, int]] = []  # servers to be started: when, and `_Life.quick`
        self.ended: int | None = None  # exit code of the coordinator, once there will be no other
        self.failed = ""  # which server was the last that its disk has ended, and how
        if logs is not None:
            prepare_logs(logs)
        self._rules = ["--servers", str(code.slots), "--spares", str(spares), "-k", str(code.k), "-r", str(code.r)]
        self._rules += ["--protection", code.protection, "--without-spare", without_spare, *coordinator]
        loaded = LOADED if http is None else (*LOADED, LOADED_FOR_HTTP)
        self._forks = ForkServer.shared(loaded, self.environment) if is_available() else None
        belongs_here(self)
        try:
            self.coordinator = self._start_coordinator(host, port)
            self.address = self._read_address()
            for _ in range(code.slots + spares):
                self._raise_if_told()
                self.start_server()
            self._supervising = Worker(self._supervise, "supervisor", self._on_error)
            self._supervising.start()
        except BaseException:
            self.close()
            raise

    @property
    def join(self) -> str:
        """Returns the coordinator's address as HOST:PORT, for `--join`."""
        return text_of(self.address)

    @property
    def begins_anew(self) -> bool:
        """Whether its coordinator has found no checkpoint to begin with, or was told of none."""
        return self._began_with == NONE

    @property
    def children(self) -> list[Child]:
        """The processes that live, as far as is known: the coordinator, then servers."""
        with self._lock:
            return [life.child for life in self._lives]

    # starting -----------------------------------------------------------------------------------

    def _start(self, name: str, arguments: list[str], stdout: int | None = None, quick: int = 0) -> _Life:
        if self.logs is not None:
            self.logs.mkdir(exist_ok=True)  # who tidies temporary folders may have removed it
        error = open(self._log_of(name), "ab") if self.logs is not None else None  # noqa: SIM115
        try:
            written = None if error is None else error.fileno()
            child = self.start_child(name, [*arguments, "--end-with-parent"], stdout or written, written)
        finally:
            if error is not None:
                error.close()
        life = _Life(name, child, time.monotonic(), quick)
        with self._lock:
            self._lives.append(life)
        return life

    def start_child(self, name: str, arguments: list[str], stdout: int | None, stderr: int | None) -> Child:
        """Starts a process; who wants them elsewhere than here overrides this.

        Args:
            name: "coordinator", or "server-N", N counting from 0.
            arguments: of `torch-ecrec`.
            stdout, stderr: files, None for this process's own; `subprocess.PIPE` for the first.
        """
        if self._forks is not None:
            look = self._raise_if_told
            return self._forks.start("torch_ecrec", arguments, self.environment, stdout, stderr, look)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "torch_ecrec", *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=with_own_path(self.environment),
            start_new_session=True,  # Ctrl-C reaches us, and we end them
        )

    def _log_of(self, name: str) -> Path:
        assert self.logs is not None
        return self.logs / f"{name}.log"

    def _start_coordinator(self, host: str, port: int, quick: int = 0) -> Child:
        arguments = ["coordinator", "--host", host, "--port", str(port), *self._rules]
        again = ["--again", "--began-with", self._began_with]
        arguments += [] if self.http is None else ["--http", str(self.http)]
        arguments += ["--run", self._run, *(again if self._supervising is not None else [])]
        return self._start(COORDINATOR, arguments, stdout=subprocess.PIPE, quick=quick).child

    def _read_address(self) -> tuple[str, int]:
        """Returns the coordinator's address, or the reason why there is none."""
        assert self.coordinator.stdout is not None
        out: IO[bytes] = self.coordinator.stdout
        said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def read() -> None:
            with contextlib.suppress(ValueError, OSError):  # closed behind our back
                said.put(out.readline())
                for line in out:  # it leads the cluster of members that have found it: so is the next one to
                    self._run = str(json.loads(line)["run"])

        Worker(read, "address", log_error).start()
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(queue.Empty):
                line = said.get(timeout=POLL_S)
                break
            self._raise_if_told()
            if self._stop.is_set() or time.monotonic() > deadline_s:
                raise ClusterUnavailable(f"the coordinator did not start within {START_S:g} s")
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise OSError(answer["error"])
            if self.http is not None:
                self.http = Place(str(answer["http"][0]), int(answer["http"][1]))
            self._began_with = str(answer["began_with"])  # whatever is newer there when another takes its place
            return str(answer["address"][0]), int(answer["address"][1])
        except (ValueError, TypeError, LookupError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.coordinator.wait(STOP_S)
            where = f"; {tail(self._log_of('coordinator'))}" if self.logs is not None else ""
            code = self.coordinator.returncode
            raise ClusterUnavailable(f"the coordinator did not start (exit code {code}){where}") from error

    def _raise_if_told(self) -> None:
        if self._supervising is None and self._told():
            raise KeyboardInterrupt

    def start_server(self, quick: int = 0) -> Child:
        """Starts one more. `quick`: see `_Life`."""
        self._started += 1
        return self._start(f"server-{self._started - 1}", ["serve", "--join", self.join], quick=quick).child

    # starting again -----------------------------------------------------------------------------

    def _supervise(self) -> None:
        while self.ended is None and not self._stop.wait(POLL_S):
            with self._lock:
                dead = [life for life in self._lives if life.child.poll() is not None]
                self._lives = [life for life in self._lives if life not in dead]
            for life in dead:
                if life.child is self.coordinator:
                    self._on_coordinator_end(life)
                else:
                    self._on_server_end(life)
            self._start_due()

    def _on_error(self, error: BaseException) -> None:
        """Ends all processes after an error of the supervisor: nobody would start again what ends."""
        log.error("who ends is not started again any more: %r", error, exc_info=error)
        self.ended = ClusterError.exit_code

    def _on_server_end(self, life: _Life) -> None:
        code = life.child.returncode
        if not self.restart or code == 0:
            return
        why = self._last_words(life.name) if code > 0 else ""  # who was killed has not said why
        if code == TierFailed.exit_code:
            said = why or ": the disk of its tier is full or fails"
            self.failed = f"server process {life.child.pid} ended with {code}{said}"
        if code in FINAL:
            log.error("server process %d ended with %d, and is not started again%s", life.child.pid, code, why)
            return
        quick = life.next_quick()
        pause_s = _pause_s(quick)
        when = f" in {pause_s:g} s" if pause_s else ""
        log.info("server process %d ended with %d; starting another%s%s", life.child.pid, code, when, why)
        self._due.append((time.monotonic() + pause_s, quick))

    def _last_words(self, name: str) -> str:
        """Returns the last line of a child's log; "" where it has none, since it speaks where this process does."""
        lines: list[str] = []
        if self.logs is not None:
            with contextlib.suppress(OSError):
                lines = self._log_of(name).read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if lines else ""

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for entry in [entry for entry in self._due if entry[0] <= now_s]:
            if self._stop.is_set():
                return
            self._due.remove(entry)
            try:
                self.start_server(entry[1])
            except NO_ROOM as error:  # no memory, no files, no room for a log: perhaps later
                quick = entry[1] + 1
                log.error("a server cannot be started: %s; tries again in %g s", explained(error), _pause_s(quick))
                self._due.append((now_s + _pause_s(quick), quick))

    def _on_coordinator_end(self, life: _Life) -> None:
        """Tries to put another in its place; else `ended` says that there will be none."""
        code = life.child.returncode
        if not self.restart or code in FINAL_OF_COORDINATOR:
            self.ended = code
            return
        log.warning("the coordinator ended with %d; starting another", code)
        quick = life.next_quick()
        while quick <= COORDINATOR_TRIES and not self._stop.wait(_pause_s(quick)):
            try:
                self.coordinator = self._start_coordinator(*self.address, quick=quick)
                self._read_address()
                return
            except (*NO_ROOM, ClusterError) as error:
                log.error("it did not start: %s", explained(error))
            self._forget(self.coordinator)
            quick += 1
        self.ended = code

    def _forget(self, child: Child) -> None:
        """Ends a child that is not what it should be, and no longer counts it among the children."""
        child.kill()
        child.wait()
        with self._lock:
            self._lives = [life for life in self._lives if life.child is not child]

    # the rest -----------------------------------------------------------------------------------

    def status(self) -> Status:
        """Returns the cluster's status, from its coordinator. Raises ClusterUnavailable: it did not answer within 10
        s."""
        return ask_status(self.address)

    def close(self) -> None:
        """Ends all children: politely, then with SIGKILL. Idempotent."""
        self._stop.set()
        if self._supervising is not None and self._supervising.ident is not None:
            self._supervising.join()  # else it might start another one behind our back
        with self._lock:
            lives = list(self._lives)
        coordinators = [life.child for life in lives if life.name == COORDINATOR]
        servers = [life.child for life in lives if life.name != COORDINATOR]
        for children in (coordinators, servers):  # in this order: it would take servers that leave before it for lost
            for child in children:
                if child.poll() is None and child.stdin is not None:
                    tell_to_end(child.stdin.fileno())
            await_end(children, STOP_S)
        for life in lives:
            _close_pipes(life.child)
        forks, self._forks = self._forks, None
        if forks is not None:
            forks.close()

    def on_forked(self) -> None:
        """Lets go of the processes in a forked child: they are its parent's, and go with that."""
        lives, self._lives, self._lock = self._lives, [], threading.Lock()
        self._supervising = None
        for life in lives:
            for pipe in (life.child.stdin, life.child.stdout):
                raw = getattr(pipe, "raw", None)  # without the lock of what is around it
                if raw is not None:
                    raw.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def await_trainers(status: Callable[[], Status], limit_s: float, over: Callable[[], bool], name: str = "") -> None:
    """Returns once no trainer is there, or `over`, or after `limit_s`.

    For who serves and was told to end, as the trainers were, perhaps: what they save then they save from who serves.
    A coordinator that was started again shows no trainers until they are back: that says nothing.

    Args:
        status: asks the coordinator; may raise ClusterError: another one is being started, perhaps.
        limit_s: at most.
        over: whether there is nothing to wait for any more.
        name: of who waits: a server that was drained, and has no slot, is needed by nobody.
    """
    deadline_s = time.monotonic() + limit_s
    waits_for: list[str] = []
    while not over() and time.monotonic() < deadline_s:
        with contextlib.suppress(ClusterError):
            found = status()
            there = [one.name for one in found.trainers]
            drained = any(one.name == name and one.draining and one.spare for one in found.members)
            is_back = found.regathering is None and (not name or any(one.name == name for one in found.members))
            if drained or (is_back and not there):
                return
            if there and there != waits_for:
                log.info(STAYS, ", ".join(there), limit_s)
                waits_for = there
        time.sleep(POLL_S)


def _close_pipes(child: Child) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _pause_s(quick: int) -> float:
    return PAUSES_S[min(quick, len(PAUSES_S) - 1)]


def prepare_logs(folder: Path) -> None:
    """Makes a folder for logs. Raises OSError, with its name, if nobody can write there."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"the logs cannot be written to {folder}: {error.strerror or error}") from error
