"""A run of the demonstration: a supervised cluster, trainers under torchrun, and this process, which kills.

It watches the coordinator: it learns of every completed step within a millisecond or so, and sends SIGKILL from the
thread that learns of it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

import torch

import torch_ecrec
from torch_ecrec.demo import report
from torch_ecrec.demo.catching_up import catch_up
from torch_ecrec.demo.interrupts import raise_if_interrupted
from torch_ecrec.demo.kills import KillSpec, beyond_parity
from torch_ecrec.demo.news import news_of
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.watch import Watch
from torch_ecrec.errors import ClusterError, ClusterUnavailable, DataLoss
from torch_ecrec.processes.children import reasons, tail, torchrun
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.web.place import Place

HEARTBEAT_S = 0.25  # of the processes of a run, for fresh figures
STATUS_S = 0.25  # between two looks at the cluster's status
TICK_S = 0.05
SAME_END = 3  # starts of the trainers that end alike, before a step
START_LIMIT_S = 240.0  # for the first step: imports on a slow machine
STALL_LIMIT_S = 150.0  # for one step: longer than a trainer's own patience
STEP_LIMIT_S = 10.0  # for a step, on average
FATAL_GRACE_S = 10.0  # for trainers to end by themselves once the cluster has stopped
SETTLE_S = 20.0  # for a rebuild that goes on when training is over
COORDINATOR_S = 60.0  # time for a coordinator to be restarted, on a busy machine

log = logging.getLogger(__name__)


def example() -> tuple[str, Path]:
    """Returns the training script as a module, and the folder to import it from: beside the package, or installed."""
    root = Path(torch_ecrec.__file__).resolve().parent.parent
    if (root / "examples" / "dlrm_criteo.py").is_file():
        return "examples.dlrm_criteo", root
    return "torch_ecrec.examples.dlrm_criteo", root


def require_device(device: str) -> None:
    """Raises ValueError if dense layers cannot be on a device ("cpu" or "cuda") of this machine; says what to do."""
    if device == "cpu":
        return
    require(
        torch.version.cuda is not None,
        f"`--device {device}`: torch {torch.__version__} has no CUDA. `make gpu` makes an environment that has it, or"
        " takes that of GPU_PYTHON=/path/to/python; pip must not be told to prefer CPU builds (docs/gpu.md)",
    )
    require(
        torch.cuda.is_available(),
        f"`--device {device}`: torch sees no GPU here. Does `nvidia-smi` show one, with a driver for"
        f" CUDA {torch.version.cuda}? In a container: was it given the GPU?",
    )


class Process(Protocol):
    """A process of a cluster: a `Child` of this host, or `chaos/hosted.py:Service` on others."""

    @property
    def pid(self) -> int:
        """The id of the operating system's process."""


class Cluster(Protocol):
    """The cluster of a run: a `Supervisor`, or `chaos/hosted.py:HostedCluster` over several hosts.

    Use it as a context manager.

    Use as a context manager.

    Attributes:
        join: what its trainers join.
        ended: the coordinator's exit code, once there will be no other.
        failed: which server was the last that its disk has ended, and how; "": none.
    """

    ended: int | None
    failed: str

    @property
    def join(self) -> str: ...

    @property
    def coordinator(self) -> Process:
        """The process of the coordinator that leads."""

    @property
    def children(self) -> Sequence[Process]:
        """The processes of the cluster."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None: ...


class Trainers(Protocol):
    """The launcher of the trainers, which restarts them: torchrun, or `chaos/hosted.py:Runs` on several hosts."""

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""

    def wait(self, timeout: float) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""


class DemoRun:
    """One training of the demonstration: its cluster, its trainers, and its kills.

    Who runs it elsewhere than on this host overrides `start_cluster`, `start_trainers` and `within`.

    Args:
        arguments: of the demo, checked.
        code: of the cluster.
        kills: to do, by step.
        logs: folder for what the processes say.
        terminal: where progress is shown.
        checkpoints: what a coordinator is told of the checkpoints that it is to write (`checkpoint_arguments`).
        servers: more of the environment of servers (`tier_environment`).
        http: where the live page is served; None: nowhere. Once it runs, with the port that was free.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        code: CodeSpec,
        kills: list[KillSpec],
        logs: Path,
        terminal: Terminal,
        checkpoints: Sequence[str] = (),
        servers: Mapping[str, str] = MappingProxyType({}),
        http: Place | None = None,
    ) -> None:
        self._servers = dict(servers)
        self._checkpoints, self.http = list(checkpoints), http
        goes_back = "--beyond" in self._checkpoints and "stop" not in self._checkpoints
        self._beyond = beyond_parity(kills, code.parities) if goes_back else []  # not before there is a checkpoint
        self.arguments, self.code, self.logs, self.terminal = arguments, code, logs, terminal
        self.samples_per_step = arguments.batch_size * arguments.trainers
        self.record = report.Record(arguments.trainers, code.slots)
        self.reports: list[dict[str, Any]] = []  # of the trainers, once they are done
        self._lock = threading.Lock()  # guards what is below, and `record` while the run is on
        self._to_kill = list(kills)
        self._waiting: list[KillSpec] = []  # for a checkpoint: those that were told
        self._fired = 0
        self._over = False
        self._timers: list[threading.Timer] = []
        self._coordinator_gone: str | None = None
        self._cluster: Cluster | None = None
        self.watch: Watch | None = None  # once it runs
        self.start_limit_s, self.stall_limit_s, self.connect_s = START_LIMIT_S, STALL_LIMIT_S, COORDINATOR_S
        self.environment = {"TORCH_ECREC_HEARTBEAT_S": str(HEARTBEAT_S), "OMP_NUM_THREADS": "1"}
        self._news: list[str] = []  # lines to show
        self._moved_s = time.monotonic()  # when a step was completed last, or chaos disturbed the run

    # the coordinator's messages, on the thread of the connection

    def _on_message(self, message: dict[str, Any]) -> None:
        with self._lock:
            before, trained = self.record.step, len(self.record.trained)
            event = self.record.on_message(message)
            if message.get("type") == "status" and self.record.status is not None:
                catch_up(self.record, self.record.status)
            if self.record.step > before or len(self.record.trained) > trained:
                self._moved_s = time.monotonic()
                self._start_kills()
            self._news += news_of(event, self.record) if event is not None else []

    def _on_gone(self, reason: str) -> None:
        """Called when the coordinator is gone, and there is no other."""
        with self._lock:
            self._coordinator_gone = reason

    def _start_kills(self) -> None:
        """Called when a step was completed: starts the kills whose time has come."""
        for spec in list(self._to_kill):
            if spec.step > self.record.step:
                return
            if spec.settled and not (self._fired == len(self.record.kills) and self.record.settled):
                continue
            if not spec.delay_ms and self.record.target(spec.role, spec.number) is None:
                continue  # nobody is there at the moment
            if spec in self._beyond and not self.record.checkpoints:
                self._wait_for_checkpoint(spec)
                continue
            self._to_kill.remove(spec)
            self._fired += 1
            if spec.delay_ms:
                timer = threading.Timer(spec.delay_ms / 1000, self._kill_later, [spec])
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            else:
                self._kill(spec)

    def _wait_for_checkpoint(self, spec: KillSpec) -> None:
        """Lets a kill wait for a complete checkpoint. Training goes on, and its next step looks again."""
        if spec not in self._waiting:
            self._waiting.append(spec)
            self._news.append(f"step {self.record.step}: {spec.text} waits for the first checkpoint")

    def _kill_later(self, spec: KillSpec) -> None:
        with self._lock:
            if not self._over:
                self._kill(spec)

    def _kill(self, spec: KillSpec) -> None:
        if self.record.target(spec.role, spec.number) is None:  # lost a moment ago: wait until somebody has come
            self._fired -= 1
            self._to_kill.insert(0, spec)
            return
        assert self._cluster is not None
        self.record.pids["coordinator"] = self._cluster.coordinator.pid
        if spec.role == "all":
            self._kill_all(spec)
            return
        kill = self.record.on_kill(spec.text, spec.role, spec.number, time.time())
        assert kill.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it hosted another slot that was to be killed at this step
            os.kill(kill.pid, signal.SIGKILL)
        hosted = f", host of slot {spec.number}" if spec.role == "server" else ""
        self._news.append(f"step {kill.step}: kill -9 {kill.pid} ({kill.member}{hosted})")

    def _kill_all(self, spec: KillSpec) -> None:
        """Kills every process of the job. What restarts them stays: this process and torchrun."""
        assert self._cluster is not None
        pids = [child.pid for child in self._cluster.children]
        pids += [self.record.pids[name] for name in self.record.trainers.values()]
        kill = self.record.on_kill(spec.text, spec.role, spec.number, time.time())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(pid, signal.SIGKILL)
        self._news.append(f"step {kill.step}: kill -9 {' '.join(map(str, pids))} (everybody)")

    # the whole of it

    def execute(self) -> None:
        """Runs the training to its end; then `record` and `reports` are complete.

        Raises:
            DataLoss: more was lost than the code repairs.
            ClusterError: anything else that kept it from its end; the message says what, with the end of a log.
        """
        for file in self.logs.glob("*.log"):
            file.unlink()
        self._moved_s = time.monotonic()
        self._cluster = cluster = self.start_cluster()
        self.watch = Watch(cluster.join, self._on_message, self.connect_s, self.within, on_gone=self._on_gone)
        with cluster, self.watch as watch:
            try:
                for trainer in range(self.arguments.trainers):
                    self._report_path(trainer).unlink(missing_ok=True)
                with self.start_trainers(cluster) as trainers:
                    self._watch(cluster, trainers, watch)
                self._settle(watch)
            finally:
                with self._lock:
                    self._over = True
                for timer in self._timers:
                    timer.cancel()
        self._read_reports()

    def within(self, action: Callable[[], None]) -> None:
        """Calls a function from where the cluster can be watched."""
        action()

    def start_cluster(self) -> Cluster:
        """Returns the coordinator and the servers. The caller uses them as a context manager."""
        found = Supervisor(
            self.code,
            self.arguments.spares,
            without_spare=self.arguments.without_spare,
            logs=self.logs,
            environment={**self.environment, **self._servers},
            coordinator=self._checkpoints,
            http=self.http,
        )
        self.http = found.http
        if self.http is not None:
            self.terminal.say(f"watch it at {self.http.url}")
        return found

    def start_trainers(self, cluster: Cluster) -> AbstractContextManager[Trainers]:
        """Starts the trainers. Leaving the context ends them."""
        told = {**self.environment, "TORCH_ECREC_JOIN": cluster.join}
        words = ["--nproc-per-node", str(self.arguments.trainers), "--max-restarts", str(self.arguments.max_restarts)]
        return torchrun([*words, *self.script()], self._log, told, example()[1])

    def _report_path(self, trainer: int) -> Path:
        return self.logs / f"trainer.{trainer}.json"

    def script(self) -> list[str]:
        """Returns the arguments of torchrun that name the script."""
        arguments = self.arguments
        words = ["-m", example()[0], "--redraw", "--steps", str(arguments.steps)]
        words += ["--batch-size", str(arguments.batch_size), "--ids", str(arguments.ids)]
        words += ["--optimizer", arguments.optimizer, "--seed", str(arguments.seed)]
        words += ["--snapshot-every", str(arguments.snapshot_every), "--device", arguments.device]
        words += ["--report", str((self.logs / "trainer.json").resolve())]
        if arguments.data is not None:
            words += ["--data", str(arguments.data.resolve())]
        return words

    @property
    def _log(self) -> Path:
        """The file with what the trainers print."""
        return self.logs / "trainers.log"

    def on_tick(self) -> None:
        """Called many times a second while the trainers run."""

    def _watch(self, cluster: Cluster, trainers: Trainers, watch: Watch) -> None:
        """Watches until the trainers are done."""
        steps = self.arguments.steps
        begin_s = asked_s = time.monotonic()
        fatal_s: float | None = None
        while (code := trainers.poll()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainers.wait(TICK_S)
            raise_if_interrupted()
            self.on_tick()
            now_s = time.monotonic()
            with self._lock:
                news, self._news = self._news, []
                line = self.record.progress_line(steps, self.samples_per_step)
                idle_s, step, fatal = now_s - self._moved_s, self.record.step, self.record.fatal
            for text in news:
                self.terminal.say(text)
            self.terminal.progress(line)
            if now_s - asked_s >= STATUS_S:
                asked_s = now_s
                watch.ask()
                if not step and not self._fired:
                    self._raise_if_it_cannot_start()
            if fatal is None and cluster.ended is not None:
                raise ClusterUnavailable(f"the coordinator ended with {cluster.ended}\n{tail(self._log)}")
            if fatal is not None:
                fatal_s = fatal_s or now_s
                if now_s - fatal_s > FATAL_GRACE_S:
                    log.warning("trainers did not end within %g s of the end of the cluster", FATAL_GRACE_S)
                    break
            elif idle_s > (self.stall_limit_s if step else self.start_limit_s):
                raise ClusterUnavailable(f"no step was completed for {idle_s:.0f} s, at step {step}\n{tail(self._log)}")
            elif now_s - begin_s > self.start_limit_s + STEP_LIMIT_S * steps:
                raise ClusterUnavailable(f"not done within {now_s - begin_s:.0f} s, at step {step}\n{tail(self._log)}")
        with self._lock:
            fatal = self.record.fatal
            self.terminal.say(self.record.progress_line(steps, self.samples_per_step))
        if fatal is not None and fatal["kind"] == "data_loss":
            raise DataLoss(fatal["reason"] + (f"; {cluster.failed}" if cluster.failed else ""))
        if fatal is not None:
            raise ClusterUnavailable(f"{fatal['reason']}\n{tail(self._log)}")
        if code:
            raise ClusterError(f"the trainers failed (exit code {code})\n{tail(self._log)}")

    def _raise_if_it_cannot_start(self) -> None:
        """Raises if trainers ended with the same exception at each start: they would at the next one, too."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        why, count = max(Counter(reasons(lines)).items(), key=lambda one: one[1], default=("", 0))
        if count >= SAME_END * self.arguments.trainers:
            raise ClusterError(f"the trainers cannot start: {why}\n{tail(self._log)}")

    def _settle(self, watch: Watch) -> None:
        """Waits after training for a rebuild that goes on, and for the last figures."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            with self._lock:
                if self.record.whole or self._coordinator_gone or self.record.fatal:
                    break
            time.sleep(TICK_S)
        time.sleep(2 * HEARTBEAT_S)  # the servers' last figures are on their way; nothing says when they are there
        with self._lock:
            seen = self.record.status_count
        watch.ask()
        while time.monotonic() < until_s + 2.0:
            with self._lock:
                if self.record.status_count > seen or self._coordinator_gone:
                    break
            time.sleep(TICK_S)
        with self._lock:
            news, self._news = self._news, []
        for text in news:
            self.terminal.say(text)

    def _read_reports(self) -> None:
        for trainer in range(self.arguments.trainers):
            try:
                self.reports.append(json.loads(self._report_path(trainer).read_text()))
            except (OSError, ValueError) as error:
                raise ClusterError(f"trainer {trainer} left no report: {error}\n{tail(self._log)}") from error
        times = [report["step_ended_s"] for report in self.reports]
        if all(len(of_one) == self.arguments.steps for of_one in times):  # none was started again
            # their own clocks: what a coordinator that was killed did not pass on is in there
            self.record.step_times = [max(ended) for ended in zip(*times, strict=True)]

    # results

    def not_fired(self) -> list[str]:
        done = [kill.spec for kill in self.record.kills]
        waiting = [spec.text for spec in self._to_kill]
        return waiting + [f"{self._fired - len(done)} whose moment came too late"] * (self._fired > len(done))

    def figures(self) -> dict[str, Any]:
        """Returns the figures that runs are compared by, as in result.json."""
        reports = self.reports
        losses = [list(step) for step in zip(*(r["losses"] for r in reports), strict=True)] if reports else []
        first = reports[0] if reports else {}
        return {
            "digest": _digest_of_all(report.get("digest") for report in reports),
            "losses": losses,
            "auc": first.get("auc"),
            "samples_per_s": first.get("samples_per_s"),
            "step_times_s": self.record.step_times,
        }


def _digest_of_all(digests: Iterable[str | None]) -> str | None:
    """Returns the SHA-256 of all trainers' digests, in order; None if one is missing."""
    found = list(digests)
    if not found or None in found:
        return None
    return hashlib.sha256(" ".join(map(str, found)).encode()).hexdigest()
