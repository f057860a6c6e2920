"""The composition root: coordinator, server and trainer processes, and a supervisor that runs a local cluster of them.

    run_coordinator   one process: membership behind a control server, and the store RPC generations meet at
    run_server        one process: a `Host` on the network
    connect           in a trainer: a `Session`, in the cluster named or in a local one of its own
    Supervisor        starts a coordinator and servers as processes, starts killed servers again, ends them all

A process that was started by a supervisor holds the read end of a pipe to it (its standard input): when the supervisor
is gone, however it ended, the pipe closes and the process ends.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch_ecrec import allocator, codec, layout, pooling, route, storage
from torch_ecrec.client import Client, Session
from torch_ecrec.config import CodeSpec, JobSpec, Settings, require_int, restarts
from torch_ecrec.errors import ClusterError, ClusterUnavailable, DataLoss, Fenced, TrainersLost
from torch_ecrec.member import Member, exit_code_of
from torch_ecrec.router import Router
from torch_ecrec.server.service import Host
from torch_ecrec.transport.control import ControlServer, raise_descriptors, request
from torch_ecrec.transport.node import Node

log = logging.getLogger(__name__)

STOP_S = 3.0  # between a polite and an impolite end of a child
START_S = 60.0
JOINS_HELD_S = 1.0  # after the coordinator's start: less than what a server's takes
REASON_S = 1.0  # for the reason to arrive, once an all-reduce has failed
ABORT_S = 5.0  # from the end of the cluster to that of a trainer that waits for another


def warm() -> None:
    """Compiles the kernels, or loads them from the cache, so that the first step does not."""
    codec.warm()
    layout.warm()
    route.warm()
    pooling.warm()
    storage.warm()


# coordinator ------------------------------------------------------------------------------------------


def _freeze() -> None:
    """Spares the interpreter's end the look at all objects of torch: 0.7 s of a core, and Ctrl-C ends many processes.

    For processes of our own only: garbage that exists now is never collected.
    """
    gc.collect()
    gc.freeze()


def run_coordinator(
    host: str, port: int, code: CodeSpec, spares: int, without_spare: str, settings: Settings, out: IO[str]
) -> int:
    """Runs the coordinator until it is told to stop; prints its address to `out` as a line of JSON once it listens.

    Raises:
        OSError: the port is in use.
    """
    raise_descriptors()
    store = _store_on(host)

    def announce(event: dict[str, Any]) -> None:
        log.info("%s", json.dumps(event))

    def probe(name: str, number: int, address: tuple[str, int]) -> None:
        server.probe(address, lambda found: router.on_probed(name, number, found, time.monotonic()))

    def tick() -> None:
        router.on_tick(time.monotonic())
        server.call_later(settings.heartbeat_s / 4, tick)

    def end() -> None:
        if router.core.fatal is None:
            router.core.stop("the coordinator was told to end", "stopped")  # nobody waits for another then
        server.close()

    server = ControlServer(
        host,
        port,
        on_message=lambda connection, message: router.on_message(connection, message, time.monotonic()),
        on_closed=lambda connection: router.on_closed(connection, time.monotonic()),
        on_bad_line=lambda connection, reason: router.refuse(connection, reason, time.monotonic()),
    )
    router = Router(
        code,
        spares,
        (host, store.port),
        probe=probe,
        announce=announce,
        stop=lambda: server.call_later(0.2, server.close),
        stamp=lambda message: {**message, "time_s": time.time()},
        joins_from_s=time.monotonic() + JOINS_HELD_S,
        without_spare=without_spare,
        lease_s=settings.lease_s,
        transport=settings.transport,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.call_soon(end))
    print(json.dumps({"address": list(server.address)}), file=out, flush=True)
    _freeze()
    server.call_later(0.0, tick)
    server.call_later(JOINS_HELD_S, lambda: router.on_tick(time.monotonic()))  # those who wait are let in
    server.serve_forever()
    return 0


def _store_on(host: str) -> Any:
    """A TCPStore that listens at `host`. Left to itself, torch's listens on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_S),
        master_listen_fd=listener.detach(),  # the store's from now on
    )


# server -----------------------------------------------------------------------------------------------


def run_server(settings: Settings, code: dict[str, int | None] | None = None) -> int:
    """Runs one server process until the cluster ends; returns its exit code.

    When it was taken for lost, since it hung for longer than a lease, it lets go of everything and joins as a new one.

    Args:
        settings: `settings.join` names the coordinator.
        code: code parameters this server insists on (k, r, slots), for a refusal where the cluster's differ.

    Raises:
        JoinRefused, ClusterUnavailable: see `Member`.
    """
    allocator.keep_freed(settings.keep_freed_bytes)
    warm()
    _freeze()
    while isinstance(reason := _serve_once(settings, code), Fenced):
        log.warning("%s; joins again", reason)
        gc.collect()  # the slots of before
    return 0 if isinstance(reason, KeyboardInterrupt) else exit_code_of(reason)


def _serve_once(settings: Settings, code: dict[str, int | None] | None) -> BaseException:
    """One membership, from joining to its end; returns why it ended."""
    ended = threading.Event()
    reasons: list[BaseException] = []

    def on_end(error: BaseException) -> None:
        reasons.append(error)
        ended.set()

    hosts: list[Host] = []

    def make(name: str, member: Member, _: CodeSpec) -> Node:
        hosts.append(Host(name, member, settings))
        return hosts[0]

    member = Member(
        settings,
        {"role": "server", "code": code or {}},
        make,
        on_control=lambda message: hosts[0].on_control(message),
        on_end=on_end,
        report=lambda: hosts[0].status() if hosts else {},
        known=lambda: hosts[0].known(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: on_end(KeyboardInterrupt()))
    log.info("%s joined %s (pid %d)", member.name, settings.join, os.getpid())
    while not ended.wait(1.0):
        pass
    reason = reasons[0]
    member.close()
    if not isinstance(reason, KeyboardInterrupt):
        log.info("%s ends: %s", member.name, reason)
    return reason


# trainer ----------------------------------------------------------------------------------------------


def connect(
    job: JobSpec,
    settings: Settings | None = None,
    trainer: int = 0,
    code: CodeSpec | None = None,
    snapshot_every: int = 1,
) -> Session:
    """Joins the cluster that `settings.join` names as one of its trainers; without a name, trainer 0 starts one.

    That local one is shut down when trainer 0 closes its session, and goes with its process however that ends. All
    trainers must be on one host for it, in one default process group.

    Args:
        job: tables, seed and number of trainers; its code parameters are replaced by the cluster's.
        settings: None reads the environment.
        trainer: this trainer's index.
        code: of a local cluster; None takes the defaults. A cluster that is named has its own.
        snapshot_every: `Session.snapshot` will be called after each step that is a multiple of it; 0: never.

    Raises:
        JoinRefused, ClusterUnavailable: see `Member`.
    """
    settings = settings or Settings.from_environment()
    allocator.keep_freed(settings.keep_freed_bytes)
    warm()
    own: Supervisor | None = None
    if settings.join is None:
        own, address = _start_local(job, trainer, code or CodeSpec(), settings)
        settings = dataclasses.replace(settings, join=address)
    clients: list[Client] = []
    sessions: list[Session] = []
    reasons = _exit_with_reason()

    def make(name: str, member: Member, code: CodeSpec) -> Node:
        agreed = JobSpec(job.tables, code, job.trainers, job.seed)
        clients.append(Client(name, member, agreed, trainer, settings, snapshot_every))
        sessions.append(Session(clients[0], member.tell, lambda: close(member), member.restarted))
        return clients[0]

    def close(member: Member) -> None:
        reasons.clear()
        member.close()
        if own is not None:
            _wait_for_trainers(own)
            own.close()

    def on_end(error: BaseException) -> None:
        if isinstance(error, ClusterError):
            reasons.append(error)
        if sessions:
            sessions[0].fail(error)
        if isinstance(error, (TrainersLost, DataLoss, Fenced)):
            _end_soon(error)

    Member(
        settings,
        {"role": "trainer", "rank": trainer, "job": job.to_json()},
        make,
        on_control=lambda message: sessions[0].on_control(message),
        on_end=on_end,
        known=lambda: sessions[0].known(),
    )
    return sessions[0]


def _exit_with_reason() -> list[ClusterError]:
    """From now on, an exception that nobody catches ends this process with the exit code of what ended the cluster.

    That may be another one: an all-reduce with a trainer that ended a moment before raises first.

    Returns:
        Where to put the reason when the cluster ends for this process.
    """
    reasons: list[ClusterError] = []
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        known = [error] if isinstance(error, ClusterError) else reasons
        deadline_s = time.monotonic() + REASON_S
        while not known and isinstance(error, RuntimeError) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if known and isinstance(error, Exception):
            reason = known[0]
            if reason is not error:
                print(f"torch-ecrec: {type(reason).__name__}: {reason}", file=sys.stderr)
            raise SystemExit(reason.exit_code)

    sys.excepthook = hook
    return reasons


def _end_soon(error: BaseException) -> None:
    """Ends this process if it does not by itself: its thread may be waiting for a lost trainer, without a limit."""

    def end() -> None:
        print(f"torch-ecrec: {error}; this process did not end within {ABORT_S:g} s of it", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(exit_code_of(error))

    timer = threading.Timer(ABORT_S, end)
    timer.daemon = True
    timer.start()


def _start_local(job: JobSpec, trainer: int, code: CodeSpec, settings: Settings) -> tuple[Supervisor | None, str]:
    """Trainer 0 starts a local cluster, of its own settings, and tells the others its address."""
    import torch.distributed as dist

    if job.trainers > 1 and not dist.is_initialized():
        raise ValueError("no cluster named (TORCH_ECREC_JOIN) and no process group to share a local one in")
    if trainer == 0 and restarts() > 0:
        log.warning(
            "trainers were started again, and the servers that they had started had ended with them: training begins at"
            " step 1. Servers that outlive trainers: torch-ecrec up, and TORCH_ECREC_JOIN"
        )
    own = Supervisor(code, spares=1, restart=True, environment=settings.environment()) if trainer == 0 else None
    if own is not None:
        atexit.register(own.close)
    address = [own.join if own is not None else ""]
    if job.trainers > 1:
        dist.broadcast_object_list(address, src=0)
    return own, address[0]


def _wait_for_trainers(cluster: Supervisor) -> None:
    """Until no trainer is left, 10 s at most."""
    for _ in range(100):
        try:
            members = cluster.status()["members"]
        except OSError:
            return
        if not any(m["role"] == "trainer" and m["alive"] and not m["left"] for m in members):
            return
        time.sleep(0.1)


# supervisor -------------------------------------------------------------------------------------------


def await_end(children: Sequence[subprocess.Popen[Any]], limit_s: float) -> None:
    """Waits for processes that were asked to end; those that still run after `limit_s` are killed."""
    deadline = time.monotonic() + limit_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Supervisor:
    """A local cluster: a coordinator and servers as child processes.

    Args:
        code: code parameters; one server per slot.
        spares: servers beyond that.
        host, port: where the coordinator listens; port 0 takes a free one.
        without_spare: see `Coordinator`.
        restart: start a server again that died by itself, and the coordinator, at the same address, if it was killed.
        logs: folder for the children's standard error; None lets them write to ours.
        environment: extra environment for the children.

    Use as a context manager: leaving ends all children, by their pids.

    Raises:
        OSError: the port is in use.
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
    ) -> None:
        require_int("spares", spares, 0)
        self.code, self.spares, self.restart, self.logs = code, spares, restart, logs
        # a peer that dies is routine here: RPC's own complaints would drown what matters
        self._environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **(environment or {})}
        self._lock = threading.Lock()  # guards the children
        self._children: list[subprocess.Popen[Any]] = []
        self._supervising: threading.Thread | None = None
        self._stop = threading.Event()
        self._started = 0
        self.ended: int | None = None  # exit code of the coordinator, once there will be no other
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._rules = ["--servers", str(code.slots), "--spares", str(spares), "-k", str(code.k), "-r", str(code.r)]
        self._rules += ["--protection", code.protection, "--without-spare", without_spare]
        self.coordinator = self._start_coordinator(host, port)
        try:
            self.address = self._read_address()
            for _ in range(code.slots + spares):
                self.start_server()
        except BaseException:
            self.close()
            raise
        self._supervising = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervising.start()

    @property
    def join(self) -> str:
        """HOST:PORT of the coordinator."""
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def children(self) -> list[subprocess.Popen[Any]]:
        """The processes that live, as far as is known: the coordinator, then servers."""
        with self._lock:
            return list(self._children)

    def _start(self, name: str, arguments: list[str], stdout: int | None = None) -> subprocess.Popen[Any]:
        error = open(self.logs / f"{name}.log", "ab") if self.logs is not None else None  # noqa: SIM115
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "torch_ecrec", *arguments, "--end-with-parent"],
                stdin=subprocess.PIPE,
                stdout=stdout if stdout is not None else error,
                stderr=error,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches us, and we end them
            )
        finally:
            if error is not None:
                error.close()
        with self._lock:
            self._children.append(child)
        return child

    def _start_coordinator(self, host: str, port: int) -> subprocess.Popen[Any]:
        arguments = ["coordinator", "--host", host, "--port", str(port), *self._rules]
        return self._start("coordinator", arguments, stdout=subprocess.PIPE)

    def _read_address(self) -> tuple[str, int]:
        """The coordinator's address, or the reason why there is none."""
        result: list[str] = []
        assert self.coordinator.stdout is not None
        out = self.coordinator.stdout
        reader = threading.Thread(target=lambda: result.append(out.readline().decode()), daemon=True)
        reader.start()
        reader.join(START_S)
        if not result or not result[0]:
            code = self.coordinator.wait(STOP_S) if result else None
            raise ClusterUnavailable(f"the coordinator did not start (exit code {code})")
        answer = json.loads(result[0])
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["address"][0], int(answer["address"][1])

    def start_server(self) -> subprocess.Popen[Any]:
        self._started += 1
        return self._start(f"server-{self._started - 1}", ["serve", "--join", self.join])

    def _supervise(self) -> None:
        """Starts processes again that were killed. After a server's own exit codes another try would be useless."""
        while not self._stop.wait(0.2):
            with self._lock:
                dead = [c for c in self._children if c.poll() is not None]
                self._children = [c for c in self._children if c not in dead]
            for child in dead:
                if child is self.coordinator:
                    if not self.restart or child.returncode >= 0 or self._stop.is_set():
                        self.ended = child.returncode
                        return
                    log.warning("the coordinator was killed (%d); starting another", child.returncode)
                    self.coordinator = self._start_coordinator(*self.address)
                    try:
                        self._read_address()
                    except (OSError, ClusterUnavailable) as error:
                        log.error("it did not start: %s", error)
                        self.ended = child.returncode
                        return
                    continue
                if self.restart and not self._stop.is_set() and child.returncode not in (0, 2, 3, 4):
                    log.info("server process %d ended with %d; starting another", child.pid, child.returncode)
                    self.start_server()

    def status(self) -> dict[str, Any]:
        return request(*self.address, {"type": "status"}, timeout_s=10.0)

    def close(self) -> None:
        """Ends all children: politely, then with SIGKILL. Idempotent."""
        self._stop.set()
        if self._supervising is not None:
            self._supervising.join()  # else it might start another one behind our back
        with self._lock:
            children = list(self._children)
        for child in children:
            if child.poll() is None:
                child.terminate()
        await_end(children, STOP_S)
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
            if child.stdout is not None:
                child.stdout.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
