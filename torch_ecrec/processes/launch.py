"""The composition root of servers and trainers; `coordination.py` has the coordinator's.

run_server        one process: a `Host` on the network
connect           in a trainer: a `Session`, in the cluster named or in a local one of its own (`supervisor.py`)
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import hashlib
import logging
import os
import queue
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from torch_ecrec import codec, records
from torch_ecrec.client import pooling
from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Beginning, Session
from torch_ecrec.errors import ClusterError, DataLoss, Fenced, JoinRefused, TrainersLost
from torch_ecrec.layout import routing, stripes
from torch_ecrec.observe.progress import counted
from torch_ecrec.observe.words import format_gathering
from torch_ecrec.processes.checkpoint_files import FileCheckpointWriter
from torch_ecrec.processes.footprint import host_name, room
from torch_ecrec.processes.kernel_bits import kernel_bits
from torch_ecrec.processes.member import Member, exit_code_of
from torch_ecrec.processes.nodes import leave_mark
from torch_ecrec.processes.part_reader import FileReader
from torch_ecrec.processes.restore_source import dense_model
from torch_ecrec.processes.supervisor import Supervisor, await_trainers
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.protocol.messages import WantedCode
from torch_ecrec.protocol.status import Gathering, Report
from torch_ecrec.records.pages import ReadyMemory
from torch_ecrec.records.tiers.trouble import trouble_signals
from torch_ecrec.runtime import allocator, byte_sums, unlocked
from torch_ecrec.runtime.lifetime import end_at_once, end_if_it_hangs, ends_within, freeze, on_signals
from torch_ecrec.server.service import Host
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import LAUNCH_MOST, Settings, loss_mark, restarts, torchrun_launch
from torch_ecrec.storage import row_ids, seen
from torch_ecrec.transport.control import raise_descriptors
from torch_ecrec.transport.node import Node
from torch_ecrec.transport.whereabouts import status_of

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # before a store that could not be read is read again
JOINS_HELD_S = 1.0  # after the coordinator's start: less than what a server's takes
REASON_S = 1.0  # for the reason to arrive, once an all-reduce has failed
WAKE_S = 1.0  # a signal may come to another thread than the one that waits, and does not wake it
LEAVE_S = 30.0  # for the last acknowledgements, where nobody has waited for them
WAITS_S = 5.0  # before it is told that other trainers are waited for
LOGS = "torch-ecrec-logs-"  # folders with logs of local clusters, where temporary files are; then who has made it
LOGS_KEPT = 3  # of trainers that were interrupted
LET_GO_S = 30.0  # of slots, once a membership is over: one that was taken for lost may hang, and its memory is wanted
KEPT_SHARE, KEPT_LEAST_BYTES = 16, 8 << 20  # of a tier's memory, what is freed and kept for the next step
ABORT_S = 5.0  # for which a trainer may wait for others in vain, once the cluster has ended


def warm(tells: bool = False) -> None:
    """Compiles the kernels, or loads them from the cache, so that the first step does not.

    `tells`: a person waits for it at a terminal, who is told how far it is.
    """
    parts = [codec.warm, stripes.warm, routing.warm, pooling.warm, *records.warms(), row_ids.warm, seen.warm]
    parts += [byte_sums.warm, unlocked.warm]
    for part in counted("kernels are compiled or loaded", parts) if tells else parts:
        part()


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
    raise_descriptors()
    most_bytes = settings.keep_freed_bytes
    if settings.tier:  # what is freed and kept is memory that nobody has counted
        most_bytes = min(most_bytes, max(KEPT_LEAST_BYTES, settings.tier_memory_bytes // KEPT_SHARE))
    allocator.keep_freed(most_bytes)
    warm()
    freeze()
    if settings.experiment:
        log.warning("EXPERIMENT %s", settings.experiment)
    reason, draining = _serve_once(settings, code, draining=False)
    while isinstance(reason, Fenced):
        log.warning("%s; joins again", reason)
        gc.collect()  # the slots of before
        reason, draining = _serve_once(settings, code, draining)
    return 0 if isinstance(reason, KeyboardInterrupt) else exit_code_of(reason)


def _serve_once(settings: Settings, code: dict[str, int | None] | None, draining: bool) -> tuple[BaseException, bool]:
    """One membership, from joining to its end; returns why it ended, and whether the server was drained.

    Told to end by SIGTERM, it stays for trainers that are there, for `grace_s`. Told before it has joined, the second
    time, or by SIGINT, it ends at once.
    """
    ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()  # its `put` may come in the middle of a `get`
    hosts: list[Host] = []
    lacking = Lacking(settings.join or "")

    def make(name: str, member: Member, _: CodeSpec) -> Node:
        def run(action: Callable[[], None]) -> None:
            hosts[0].run(action)

        hosts.append(host := Host(name, member, settings, FileCheckpointWriter(run), FileReader(run)))
        host.term = member.term
        if host.tier is not None:
            host.tier.on_error = member.on_error
        if settings.spare_memory:
            host.ready_memory = ReadyMemory(room)
        return hosts[0]

    def on_control(word: messages.FromCoordinator) -> None:
        lacking.on_control(word)
        hosts[0].on_control(word)

    member = Member(
        settings,
        join_of(
            "server",
            uuid.uuid4().hex,
            os.getpid(),
            code=WantedCode() if code is None else WantedCode(code["k"], code["r"], code["slots"]),
            domain=settings.failure_domain or host_name(),
            experiment=settings.experiment,
            bits=kernel_bits(),
            draining=draining,
        ),
        make,
        on_control=on_control,
        on_end=ends.put,
        report=lambda: hosts[0].report() if hosts else Report(),
        known=lambda: hosts[0].known(),
    )
    on_signals(lambda number, _: ends.put(KeyboardInterrupt(number)))
    log.info("%s joined %s (pid %d)", member.name, settings.join, os.getpid())
    for host in hosts:
        host.start_scrubbing()
    if settings.flip_on_signal:
        signal.signal(signal.SIGUSR1, lambda *_: hosts[0].flip(parity=False))
        signal.signal(signal.SIGUSR2, lambda *_: hosts[0].flip(parity=True))
        _trouble_on_signals(hosts[0])
    reason = _first_of(ends, lacking)
    if isinstance(reason, KeyboardInterrupt) and reason.args == (signal.SIGTERM,):
        join = settings.join or ""  # `Member` has seen that it is there
        limit_s, name = settings.grace_s, member.name
        await_trainers(lambda: status_of(join, settings.give_up_s), limit_s, lambda: not ends.empty(), name)
    on_signals(end_at_once)
    while not ends.empty():  # told to end just before, when the reason was another
        reason = later if isinstance(later := ends.get(), KeyboardInterrupt) else reason
    with ends_within(LET_GO_S, f"{member.name} did not let go of its slots", Fenced.exit_code):
        member.close()
        if hosts:
            hosts[0].end()
    if not isinstance(reason, KeyboardInterrupt):
        log.info("%s ends: %s", member.name, reason)
    return reason, member.draining


def _trouble_on_signals(host: Host) -> None:
    """Has signals bring the disk of its tier into trouble, where it has one."""
    if host.tier is not None and (trouble := host.tier.trouble) is not None:
        for kind, number in trouble_signals().items():
            flips = kind == "flip"
            signal.signal(number, lambda *_, k=kind, f=flips: host.flip_below() if f else trouble.begin(k))


class Lacking:
    """Logs what a cluster lacks that has not begun, once that is the same at two looks: while all are started, it
    changes with each of them.

    Args:
        join: the cluster's address.
    """

    def __init__(self, join: str) -> None:
        self._join, self._now, self._before, self._told = join, "", "", ""

    def on_control(self, word: messages.FromCoordinator) -> None:
        """Handles a message of the coordinator."""
        if isinstance(word, Gathering):
            self._now = format_gathering(word.servers, word.trainers, self._join)
        elif isinstance(word, messages.Placed):
            self._now = ""

    def look(self) -> None:
        """Is called every `WAKE_S`."""
        now = self._now
        if now and now == self._before != self._told:
            self._told = now
            log.info("the cluster has not begun%s", now)
        self._before = now


def _first_of(ends: queue.SimpleQueue[BaseException], lacking: Lacking) -> BaseException:
    while True:
        with contextlib.suppress(queue.Empty):
            return ends.get(timeout=WAKE_S)
        lacking.look()


# trainer ----------------------------------------------------------------------------------------------


def connect(
    job: JobSpec,
    settings: Settings | None = None,
    trainer: int = 0,
    code: CodeSpec | None = None,
    snapshot_every: int = 1,
) -> Session:
    """Joins the cluster that `settings.join` names as one of its trainers; without a name, trainer 0 starts one.

    That local one is shut down when trainer 0 closes its session and the others are done, and goes with its process
    however that ends. All trainers must be on one host for it, in one default process group. What its processes say
    goes to files, in a folder that trainer 0 names on standard error; it is removed after an orderly end.

    A session that nobody closes is left at the end of the process, unless an exception ends that.

    Args:
        job: tables, seed and number of trainers; its code parameters are replaced by the cluster's.
        settings: None reads the environment.
        trainer: this trainer's index.
        code: of a local cluster; None takes the defaults. A cluster that is named has its own, and refuses another.
        snapshot_every: `Session.snapshot` will be called after each step that is a multiple of it; 0: never.

    Raises:
        JoinRefused, ClusterUnavailable: see `Member`. JoinRefused also if this process is in the named cluster already.
    """
    settings = settings or Settings.from_environment()
    if settings.join is not None and settings.join in _joined:
        raise JoinRefused(
            f"this process has a model in the cluster at {settings.join} already, and a cluster serves one. Close that"
            " model first, put both into one DistributedModelParallel, or give each a cluster of its own"
            " (`Settings(join=None)`, without TORCH_ECREC_JOIN)"
        )
    if settings.experiment:
        log.warning("EXPERIMENT %s", settings.experiment)
    allocator.keep_freed(settings.keep_freed_bytes)
    warm()
    own: Supervisor | None = None
    if is_own := settings.join is None:
        own, address = _start_local(job, trainer, code or CodeSpec(), settings)
        settings = dataclasses.replace(settings, join=address)
    return _Trainer(job, settings, trainer, code, snapshot_every, own, is_own).join()


def abandon(session: Session) -> None:
    """Leaves the cluster for a user who did not: waits for what was sent, for a while, and raises nothing.

    A cluster begins once all trainers are there. One that ends before, since its script only builds the model, stays
    until then: the others would wait for it.
    """
    _wait(lambda: session.begun, session.client.settings.give_up_s)
    if not _wait(lambda: session.over, LEAVE_S):
        session.not_exact(
            f"trainer {session.trainer} left, and its last steps were not acknowledged within {LEAVE_S:g} s"
        )
    session.close()


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    """Returns whether it has come true in time. Looks again and again: a session has no word for this."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


class _Trainer:
    """A trainer process: its membership and its session, and how both end.

    Args:
        code: what it insists on; None: whatever the cluster has.
        own: the local cluster that it has started; None: it has started none.
        is_own: the cluster is such a one, of this trainer or of another of its script.
    """

    def __init__(
        self,
        job: JobSpec,
        settings: Settings,
        trainer: int,
        code: CodeSpec | None,
        snapshot_every: int,
        own: Supervisor | None,
        is_own: bool,
    ) -> None:
        self._wanted = WantedCode()
        if code is not None:
            protection: Any = code.protection  # `CodeSpec` has checked it
            self._wanted = WantedCode(code.k, code.r, code.slots, protection)
        self._job, self._settings, self._trainer, self._snapshot_every = job, settings, trainer, snapshot_every
        self._own, self._is_own = own, is_own
        self._process, self._thread = os.getpid(), threading.current_thread()
        self._sessions: list[Session] = []  # one, once the process is welcome
        self._ending = _exit_with_reason()

    def join(self) -> Session:
        """Joins the cluster. Raises what `Member` raises."""
        Member(
            self._settings,
            self._join(),
            self._make,
            on_control=lambda word: self._sessions[0].on_control(word),
            on_end=self._on_end,
            report=lambda: replace(
                self._sessions[0].figures(), wire=self._settings.wire, pooling=self._settings.pooling
            ),
            known=lambda: self._sessions[0].known(),
        )
        if self._own is None and self._settings.join is not None:
            _joined.add(self._settings.join)
        atexit.register(self._at_exit)
        return self._sessions[0]

    def _join(self) -> messages.Join:
        """Returns the message by which this trainer joins, with its launch; see `coordinator/launches.py`.

        A launch that the user has named has no count of its starts: whoever says its word again may take its place.
        """
        settings = self._settings
        launch = settings.launch or torchrun_launch()
        return join_of(
            "trainer",
            uuid.uuid4().hex,
            os.getpid(),
            rank=self._trainer,
            code=self._wanted,
            job=self._job,
            launch=launch if len(launch) <= LAUNCH_MOST else hashlib.sha256(launch.encode()).hexdigest(),
            relaunched=bool(settings.launch) or restarts() > 0,
            again=bool(settings.again),
            experiment=settings.experiment,
            bits=kernel_bits(),
        )

    def _at_exit(self) -> None:
        """Nobody has closed the session. After an exception it counts as lost: all are started again then."""
        if os.getpid() == self._process and not self._ending.raised:
            abandon(self._sessions[0])

    def _make(self, name: str, member: Member, code: CodeSpec) -> Node:
        agreed = JobSpec(self._job.tables, code, self._job.trainers, self._job.seed)
        client = Client(name, member, agreed, self._trainer, self._settings, self._snapshot_every)
        restored, begins = member.restored, None
        if restored is not None:
            begins = Beginning(restored.done, functools.partial(dense_model, restored))
            for inexact in restored.inexact:
                log.warning("NOT EXACT from step %d on: %s", *inexact)
        session = Session(client, member.tell, lambda: self._close(member), member.restarted, begins, self._is_own)
        self._sessions.append(session)
        session.look_out()
        return client

    def _close(self, member: Member) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the session is its parent's
        self._ending.reasons.clear()
        atexit.unregister(self._at_exit)
        member.close()
        _joined.discard(self._settings.join or "")
        if self._own is not None:
            _wait_for_trainers(self._own, self._settings.give_up_s)
            self._own.close()
            if self._own.logs is not None:
                shutil.rmtree(self._own.logs, ignore_errors=True)

    def _on_end(self, error: BaseException) -> None:
        sessions = self._sessions
        if isinstance(error, ClusterError):
            self._ending.reasons.append(error)
        if sessions:
            sessions[0].fail(error)
        if isinstance(error, (TrainersLost, DataLoss, Fenced)):
            told = lambda: bool(sessions) and sessions[0].told  # noqa: E731
            end_if_it_hangs(self._thread, told, ABORT_S, str(error), error.exit_code)


_joined: set[str] = set()  # named clusters that this process is a trainer of


@dataclasses.dataclass
class _Ending:
    """How this process ends. `reasons`: where to put it when the cluster ends; `raised`: by an exception."""

    reasons: list[ClusterError] = dataclasses.field(default_factory=list)
    raised: bool = False


def _exit_with_reason() -> _Ending:
    """From now on, an exception that nobody catches ends this process with the exit code of what ended the cluster.

    That may be another one: an all-reduce with a trainer that ended a moment before raises first.
    """
    ending = _Ending()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ending.raised = True
        before(kind, error, trace)
        known = [error] if isinstance(error, ClusterError) else ending.reasons
        deadline_s = time.monotonic() + REASON_S
        while not known and isinstance(error, RuntimeError) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if known and isinstance(error, Exception):
            reason = known[0]
            if reason is not error:
                with contextlib.suppress(OSError):  # no room for it, say
                    print(f"torch-ecrec: {type(reason).__name__}: {reason}", file=sys.stderr)
            if isinstance(reason, (DataLoss, JoinRefused)) and (mark := loss_mark()) is not None:
                with contextlib.suppress(OSError):
                    leave_mark(mark, reason)
            raise SystemExit(reason.exit_code)

    sys.excepthook = hook
    return ending


def _start_local(job: JobSpec, trainer: int, code: CodeSpec, settings: Settings) -> tuple[Supervisor | None, str]:
    """Starts a local cluster in trainer 0, of its own settings, and tells the others its address."""
    import torch.distributed as dist

    if job.trainers > 1 and not dist.is_initialized():
        raise ValueError("no cluster named (TORCH_ECREC_JOIN) and no process group to share a local one in")
    if trainer == 0 and restarts() > 0:
        log.warning(
            "trainers were started again, and the servers that they had started had ended with them: training begins at"
            " step 1. Servers that outlive trainers: torch-ecrec up, and TORCH_ECREC_JOIN"
        )
    own: Supervisor | None = None
    if trainer == 0:
        logs = _logs_folder()
        with contextlib.suppress(OSError):
            print(f"torch-ecrec: a cluster of this process's own; what its processes say: {logs}", file=sys.stderr)
        own = Supervisor(code, spares=1, restart=True, logs=logs, environment=settings.environment())
        atexit.register(own.close)
    address = [own.join if own is not None else ""]
    if job.trainers > 1:
        dist.broadcast_object_list(address, src=0)
    return own, address[0]


def _logs_folder() -> Path:
    """Makes a new folder for logs. Trainers that were interrupted leave theirs, for who looks for a reason: the newest
    few stay."""
    left = []
    for one in Path(tempfile.gettempdir()).glob(f"{LOGS}[0-9]*-*"):
        with contextlib.suppress(OSError):  # another process was first
            found, maker = one.lstat(), one.name.removeprefix(LOGS).partition("-")[0]
            mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if mine and not Path(f"/proc/{maker}").exists():
                left.append((found.st_mtime, one))
    for _, one in sorted(left, reverse=True)[LOGS_KEPT:]:
        shutil.rmtree(one, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{LOGS}{os.getpid()}-"))


def _wait_for_trainers(cluster: Supervisor, limit_s: float) -> None:
    """Waits until no trainer is left: another one may still evaluate. It waits as long as they look rows up, and
    `limit_s` more: what servers do by themselves, scrubbing, does not count."""
    deadline_s, told = time.monotonic() + limit_s, time.monotonic() + WAITS_S
    seen: list[dict[str, int]] = []
    while time.monotonic() < deadline_s:
        try:
            status = cluster.status()
        except ClusterError:  # another coordinator is being started
            if cluster.ended is not None:
                return
            time.sleep(0.1)
            continue
        there = [one.name for one in status.trainers]
        if not there:
            return
        sent = [{**(one.report.bytes_sent or {}), "scrubbing": 0} for one in status.members]
        if sent != seen:
            seen, deadline_s = sent, time.monotonic() + limit_s
        if time.monotonic() > told:
            told = float("inf")
            log.warning("the cluster ends once %s has left it; that is waited for", ", ".join(there))
        time.sleep(0.1)
