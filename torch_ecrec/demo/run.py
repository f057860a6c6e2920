"""The demonstration: trains a DLRM on a cluster of processes, kills servers, and compares with the undisturbed run.

    run_demo(arguments)     `torch-ecrec demo`; arguments as in `cli/demo.py`

A *run* is a supervised cluster, trainers under torchrun, and this process, which watches the coordinator: it learns of
every completed step within a millisecond or so, and sends SIGKILL from the thread that learns of it. Kills are written

    server:1@60         the process that hosts slot 1, when step 60 is complete at all trainers
    server:1@60+7       7 ms later: in the middle of step 61
    server:1@60~        when, from step 60 on, all that former kills took is rebuilt, and no server holds two slots

Everything is checked before the first process starts. Whatever ends a run, Ctrl-C included, ends all its processes.
Writes DIR/result.json (docs/demo.md), DIR/recovery.png and DIR/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch_ecrec
from torch_ecrec.demo import criteo, report
from torch_ecrec.errors import ClusterError, ClusterUnavailable, DataLoss
from torch_ecrec.processes.launch import warm
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec
from torch_ecrec.transport.control import ControlClient

HEARTBEAT_S = 0.25  # of the processes of a run, for fresh figures
STATUS_S = 0.25  # between two looks at the cluster's status
TICK_S = 0.05
LINE_S = 2.0  # between two progress lines where they are not overwritten
START_LIMIT_S = 240.0  # for the first step: imports on a slow machine
STALL_LIMIT_S = 150.0  # for one step: longer than a trainer's own patience
STEP_LIMIT_S = 10.0  # for a step, on average
FATAL_GRACE_S = 10.0  # for trainers to end by themselves once the cluster has stopped
SETTLE_S = 20.0  # for a rebuild that goes on when training is over
TAIL_LINES = 15
COORDINATOR_S = 60.0  # for one that is started again, on a busy machine
# Without the first, torchrun (of torch 2.13) keeps one store for all starts of the trainers, with the addresses of
# those that have ended in it.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "numba")

_KILL = re.compile(r"(?:(server|trainer):(\d+)|coordinator)@(\d+)(~?)(?:\+(\d+))?")

log = logging.getLogger(__name__)
_interrupted = threading.Event()


# arguments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KillSpec:
    """A kill that is asked for. `settled`: not before all that former ones took is rebuilt."""

    text: str
    role: str  # "server", "trainer" or "coordinator"
    number: int  # of the slot that the server hosts, or of the trainer
    step: int
    settled: bool
    delay_ms: int


def parse_kills(texts: Sequence[str] | None, slots: int, steps: int, trainers: int = 1) -> list[KillSpec]:
    """The kills asked for, by step; None stands for one of slot 1 in the middle, ["none"] for none.

    Raises:
        ValueError: one is not of the form, or names a slot, a trainer or a step that there is not.
    """
    if texts is None:
        texts = [f"server:{min(1, slots - 1)}@{steps // 2}"] if steps > 1 else []
    if list(texts) == ["none"]:
        return []
    kills = []
    for text in texts:
        match = _KILL.fullmatch(text)
        forms = "server:SLOT@STEP[~][+MS], trainer:RANK@..., coordinator@... or none"
        require(match is not None, f"`--kill` must be {forms}, got {text!r}")
        assert match is not None
        role, number, step = match[1] or "coordinator", int(match[2] or 0), int(match[3])
        most, what = (trainers - 1, "trainers") if role == "trainer" else (slots - 1, "slots")
        require(number <= most, f"`--kill {text}`: {what} are 0 to {most}, got {number}")
        require(1 <= step < steps, f"`--kill {text}`: the step must be from 1 to {steps - 1}, got {step}")
        kills.append(KillSpec(text, role, number, step, bool(match[4]), int(match[5] or 0)))
    return sorted(kills, key=lambda kill: kill.step)


def check(arguments: argparse.Namespace) -> tuple[CodeSpec, list[KillSpec]]:
    """Everything about the arguments that can be wrong, before anything starts. Raises ValueError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)
    require_int("spares", arguments.spares, 0)
    require_int("steps", arguments.steps, 1)
    require_int("batch-size", arguments.batch_size, 1)
    require_int("trainers", arguments.trainers, 1)
    require_int("seed", arguments.seed, 0)
    require_int("snapshot-every", arguments.snapshot_every, 1)
    OptimizerSpec(arguments.optimizer)
    kills = parse_kills(arguments.kill, code.slots, arguments.steps, arguments.trainers)
    if arguments.data is not None:
        lines = len(criteo.read(arguments.data, rows_per_table=1))
        require(lines >= 5, f"{arguments.data}: {lines} lines are too few: a fifth of them is held out")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`--out {arguments.out}` cannot be made: {error.strerror}") from error
    return code, kills


def example() -> tuple[str, Path]:
    """The training script as a module, and the folder to import it from: beside the package, or in an installed one."""
    root = Path(torch_ecrec.__file__).resolve().parent.parent
    if (root / "examples" / "dlrm_criteo.py").is_file():
        return "examples.dlrm_criteo", root
    return "torch_ecrec.examples.dlrm_criteo", root


def versions() -> dict[str, str]:
    found = {"torch_ecrec": torch_ecrec.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """Lines that stay, and one below them that is overwritten; where it cannot be, it is written now and then."""

    def __init__(self) -> None:
        self._overwrites = sys.stdout.isatty()
        self._shown_s = -math.inf
        self._width = 0  # of the line to be overwritten

    def say(self, text: str = "") -> None:
        print("\r" + " " * self._width + "\r" + text if self._width else text, flush=True)
        self._width = 0

    def progress(self, text: str) -> None:
        now_s = time.monotonic()
        if self._overwrites:
            most = _terminal_width() - 1
            text = text if len(text) <= most else text[: most - 1] + "…"
            print("\r" + text.ljust(self._width), end="", flush=True)
            self._width = len(text)
        elif now_s - self._shown_s >= LINE_S:
            self._shown_s = now_s
            print(text, flush=True)


def _terminal_width() -> int:
    with contextlib.suppress(OSError):
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    return 120


# a run ------------------------------------------------------------------------------------------------


class Run:
    """One training: cluster, trainers, kills.

    Args:
        arguments: of the demo, checked.
        code: of the cluster.
        kills: to do, by step.
        logs: folder for what the processes say.
        terminal: where progress is shown.
    """

    def __init__(
        self, arguments: argparse.Namespace, code: CodeSpec, kills: list[KillSpec], logs: Path, terminal: Terminal
    ) -> None:
        self.arguments, self.code, self.logs, self.terminal = arguments, code, logs, terminal
        self.samples_per_step = arguments.batch_size * arguments.trainers
        self.record = report.Record(arguments.trainers, code.slots)
        self.reports: list[dict[str, Any]] = []  # of the trainers, once they are done
        self._lock = threading.Lock()  # guards what is below, and `record` while the run is on
        self._to_kill = list(kills)
        self._fired = 0
        self._over = False
        self._timers: list[threading.Timer] = []
        self._coordinator_gone: str | None = None
        self._cluster: Supervisor | None = None
        self.environment = {"TORCH_ECREC_HEARTBEAT_S": str(HEARTBEAT_S), "OMP_NUM_THREADS": "1"}
        self._news: list[str] = []  # lines to show
        self._moved_s = time.monotonic()  # when a step was completed last, or chaos disturbed the run

    # the coordinator's messages, on the thread of the connection

    def _on_message(self, message: dict[str, Any]) -> None:
        with self._lock:
            before = self.record.step
            self.record.on_message(message)
            if self.record.step > before:
                self._moved_s = time.monotonic()
                self._start_kills()
            if message.get("type") == "event":
                self._tell(message)

    def _on_closed(self, reason: str) -> None:
        with self._lock:
            if not self._over:
                threading.Thread(target=self._watch_again, args=(reason,), daemon=True).start()

    def _watch_again(self, reason: str) -> None:
        """The coordinator is gone: another one may be on its way."""
        try:
            self._connect()
        except ClusterUnavailable:
            with self._lock:
                self._coordinator_gone = reason

    def _connect(self) -> None:
        assert self._cluster is not None
        self.client = ControlClient(*self._cluster.address, self._on_message, self._on_closed, COORDINATOR_S)
        self.client.send({"type": "watch"})

    def _start_kills(self) -> None:
        """A step was completed: the kills whose time has come."""
        for spec in list(self._to_kill):
            if spec.step > self.record.step:
                return
            if spec.settled and not (self._fired == len(self.record.kills) and self.record.settled):
                continue
            if not spec.delay_ms and self.record.target(spec.role, spec.number) is None:
                continue  # nobody is there at the moment
            self._to_kill.remove(spec)
            self._fired += 1
            if spec.delay_ms:
                timer = threading.Timer(spec.delay_ms / 1000, self._kill_later, [spec])
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            else:
                self._kill(spec)

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
        kill = self.record.on_kill(spec.text, spec.role, spec.number, time.time())
        with contextlib.suppress(ProcessLookupError):  # it hosted another slot that was to be killed at this step
            os.kill(kill.pid, signal.SIGKILL)
        hosted = f", host of slot {spec.number}" if spec.role == "server" else ""
        self._news.append(f"step {kill.step}: kill -9 {kill.pid} ({kill.member}{hosted})")

    def _tell(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "lost" and event["slots"]:
            self._news.append(f"  {event['member']} is lost ({event['why']}), with slots {event['slots']}")
        elif kind == "re-hosted":
            server = self.record.places[event["slot"]][0]
            self._news.append(f"  slot {event['slot']} serves again, on {server}; rebuild begins")
        elif kind == "slot rebuilt":
            self._news.append(f"  slot {event['slot']} is rebuilt")
        elif kind == "lost" and event["member"].startswith("trainer"):
            self._news.append(f"  {event['member']} is lost ({event['why']})")
        elif kind == "resumable":
            self._news.append(f"  servers have gone back to step {event['step']}; torchrun starts all trainers again")
        elif kind == "regathered":
            self._news.append(f"  a new coordinator: {len(event['members'])} members have rejoined")
        elif kind == "joined" and self.record.step:
            self._news.append(f"  {event['member']} has joined (pid {event['pid']})")

    # the whole of it

    def execute(self) -> None:
        """Runs it to its end; `record` and `reports` are complete then.

        Raises:
            DataLoss: more was lost than the code repairs.
            ClusterError: anything else that kept it from its end; the message says what, with the end of a log.
        """
        for file in self.logs.glob("*.log"):
            file.unlink()
        self._moved_s = time.monotonic()
        cluster = Supervisor(
            self.code,
            self.arguments.spares,
            without_spare=self.arguments.without_spare,
            logs=self.logs,
            environment=self.environment,
        )
        self._cluster = cluster
        with cluster:
            self._connect()
            try:
                with self._trainers(cluster.join) as trainers:
                    self._watch(cluster, trainers)
                self._settle()
            finally:
                with self._lock:
                    self._over = True
                for timer in self._timers:
                    timer.cancel()
                self.client.close()
        self._read_reports()

    def _report_path(self, trainer: int) -> Path:
        return self.logs / f"trainer.{trainer}.json"

    @contextlib.contextmanager
    def _trainers(self, join: str) -> Iterator[subprocess.Popen[bytes]]:
        for trainer in range(self.arguments.trainers):
            self._report_path(trainer).unlink(missing_ok=True)
        module, root = example()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.arguments.trainers)]
        command += ["--max-restarts", str(self.arguments.max_restarts), "-m", module]
        command += ["--steps", str(self.arguments.steps), "--batch-size", str(self.arguments.batch_size)]
        command += ["--optimizer", self.arguments.optimizer, "--seed", str(self.arguments.seed)]
        command += ["--snapshot-every", str(self.arguments.snapshot_every)]
        command += ["--report", str((self.logs / "trainer.json").resolve())]
        if self.arguments.data is not None:
            command += ["--data", str(self.arguments.data.resolve())]
        with (self.logs / "trainers.log").open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**os.environ, **self.environment, **FRESH_STORE, "TORCH_ECREC_JOIN": join},
                start_new_session=True,  # Ctrl-C reaches us, and we end them
            )
        try:
            yield process
        finally:
            end_tree(process)

    def on_tick(self) -> None:
        """Called many times a second while the trainers run."""

    def _watch(self, cluster: Supervisor, trainers: subprocess.Popen[bytes]) -> None:
        """Until the trainers are done."""
        steps = self.arguments.steps
        begin_s = asked_s = time.monotonic()
        fatal_s: float | None = None
        while (code := trainers.poll()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainers.wait(TICK_S)
            if _interrupted.is_set():
                raise KeyboardInterrupt
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
                self.client.send({"type": "status"})
            if fatal is None and cluster.ended is not None:
                raise ClusterUnavailable(f"the coordinator ended with {cluster.ended}\n{self._tail()}")
            if fatal is not None:
                fatal_s = fatal_s or now_s
                if now_s - fatal_s > FATAL_GRACE_S:
                    log.warning("trainers did not end within %g s of the end of the cluster", FATAL_GRACE_S)
                    break
            elif idle_s > (STALL_LIMIT_S if step else START_LIMIT_S):
                raise ClusterUnavailable(f"no step was completed for {idle_s:.0f} s, at step {step}\n{self._tail()}")
            elif now_s - begin_s > START_LIMIT_S + STEP_LIMIT_S * steps:
                raise ClusterUnavailable(f"not done within {now_s - begin_s:.0f} s, at step {step}\n{self._tail()}")
        with self._lock:
            fatal = self.record.fatal
            self.terminal.say(self.record.progress_line(steps, self.samples_per_step))
        if fatal is not None and fatal["kind"] == "data_loss":
            raise DataLoss(fatal["reason"])
        if fatal is not None:
            raise ClusterUnavailable(f"{fatal['reason']}\n{self._tail()}")
        if code:
            raise ClusterError(f"the trainers failed (exit code {code})\n{self._tail()}")

    def _settle(self) -> None:
        """Training is over: waits for a rebuild that goes on, and for last figures."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            with self._lock:
                if self.record.whole or self._coordinator_gone or self.record.fatal:
                    break
            time.sleep(TICK_S)
        time.sleep(2 * HEARTBEAT_S)  # the servers' last figures are on their way; nothing says when they are there
        with self._lock:
            seen = self.record.status_count
        self.client.send({"type": "status"})
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
                raise ClusterError(f"trainer {trainer} left no report: {error}\n{self._tail()}") from error
        times = [report["step_ended_s"] for report in self.reports]
        if all(len(of_one) == self.arguments.steps for of_one in times):  # none was started again
            # their own clocks: what a coordinator that was killed did not pass on is in there
            self.record.step_times = [max(ended) for ended in zip(*times, strict=True)]

    def _tail(self) -> str:
        """The end of the trainers' log."""
        path = self.logs / "trainers.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines[-TAIL_LINES:])])

    # results

    def not_fired(self) -> list[str]:
        done = [kill.spec for kill in self.record.kills]
        waiting = [spec.text for spec in self._to_kill]
        return waiting + [f"{self._fired - len(done)} whose moment came too late"] * (self._fired > len(done))

    def figures(self) -> dict[str, Any]:
        """What is compared between runs, as in result.json."""
        reports = self.reports
        losses = [list(step) for step in zip(*(r["losses"] for r in reports), strict=True)] if reports else []
        first = reports[0] if reports else {}
        return {
            "digest": first.get("digest"),
            "losses": losses,
            "auc": first.get("auc"),
            "samples_per_s": first.get("samples_per_s"),
            "step_times_s": self.record.step_times,
        }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def descendants(root: int) -> list[int]:
    """Processes under `root`. Linux only (/proc); elsewhere none."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", where the name may hold anything
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all under it, at once. They hold nothing that must be saved."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # starts no more
    pids = [*descendants(process.pid), process.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


# the demonstration ------------------------------------------------------------------------------------


def differences(run: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two runs that should be the same; nothing where all is equal."""
    found = []
    if run["digest"] is None or run["digest"] != other["digest"]:
        found.append(f"digest {run['digest']} against {other['digest']}")
    if len(run["losses"]) != len(other["losses"]):
        found.append(f"{len(run['losses'])} steps against {len(other['losses'])}")
    pairs = enumerate(zip(run["losses"], other["losses"], strict=False), 1)
    step = next((step for step, (mine, theirs) in pairs if mine != theirs), None)
    if step is not None:
        found.append(f"losses of step {step}: {run['losses'][step - 1]} against {other['losses'][step - 1]}")
    return found


def arguments_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """All but the command's name; paths as text."""
    values = {name: value for name, value in vars(arguments).items() if name != "command"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def assemble(arguments: argparse.Namespace, run: Run, calm: Run | None, error: str | None) -> dict[str, Any]:
    """The contents of result.json; docs/demo.md says what they mean."""
    figures = run.figures()
    undisturbed = calm.figures() if calm is not None else None
    different = differences(figures, undisturbed) if undisturbed is not None else []
    result = {
        "versions": versions(),
        "arguments": arguments_json(arguments),
        "error": error,
        "equal": not different if undisturbed is not None else None,
        "differences": different,
        **figures,
        "undisturbed": undisturbed,
        "kills": [kill.to_json(run.record.step_times) for kill in run.record.kills],
        "throughput": run.record.throughput(run.samples_per_step),
        "servers": run.record.servers(),
        "bytes_sent": run.record.bytes_sent(),
    }
    cleaned: dict[str, Any] = without_nan(result)
    return cleaned


def without_nan(value: Any) -> Any:
    """JSON knows no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: with everything it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        _interrupted.set()  # the exception is lost where Python ignores exceptions, in a destructor say
        raise KeyboardInterrupt

    _interrupted.clear()
    before = signal.signal(signal.SIGTERM, interrupt)
    before_int = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_int)


def run_demo(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit code: 0 only if all kills fired and nothing differs.

    Raises:
        ValueError: bad arguments or a bad data file; nothing was started.
        DataLoss: more was lost than the code repairs.
        ClusterError: a run did not come to its end. In either case result.json says as much in `error`.
    """
    code, kills = check(arguments)
    out, terminal = arguments.out, Terminal()
    for name in ("result.json", "recovery.png"):
        (out / name).unlink(missing_ok=True)
    logging.getLogger("torch_ecrec").setLevel(logging.WARNING)  # what the supervisor does is shown as it happens
    protection = f"(k, r) = ({code.k}, {code.r})" if code.parities else "no protection"
    terminal.say(
        f"DLRM on {arguments.data or 'made-up rows'}: {arguments.steps} steps of {arguments.trainers} x"
        f" {arguments.batch_size} samples, {arguments.optimizer}; {protection}, {code.slots} servers"
        f" and {arguments.spares} spares; kills: {', '.join(kill.text for kill in kills) or 'none'}"
    )
    run = Run(arguments, code, kills, out / "logs" / "run", terminal)
    calm: Run | None = None
    error: str | None = "interrupted"
    with sigterm_interrupts():
        try:
            warm()
            run.execute()
            if arguments.compare:
                terminal.say("\nthe same training, undisturbed:")
                calm = Run(arguments, code, [], out / "logs" / "undisturbed", terminal)
                calm.execute()
            faults = [f"a kill did not fire: {text}" for text in run.not_fired()]
            faults += [text for one in (run, calm) if one is not None for text in one.record.unexpected]
            error = "; ".join(faults) or None
        except ClusterError as failure:
            error = str(failure)
            raise
        except KeyboardInterrupt:
            terminal.say("interrupted; everything that was started has ended")
            raise
        finally:
            done = calm if calm is not None and calm.reports else None
            result = assemble(arguments, run, done, error)
            (out / "result.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
            if not (run.reports and (calm is None or calm.reports)):  # no summary will follow
                for entry in result["kills"]:
                    terminal.say("\n".join(["", *report.format_kill(entry)]))
    terminal.say("\n" + report.format_summary(result))
    terminal.say("written: " + ", ".join(str(path) for path in [out / "result.json", *_picture(result, out)]))
    if error is not None:
        print(f"torch-ecrec: {error}", file=sys.stderr)
    return 0 if error is None and result["equal"] is not False else 1


def _picture(result: dict[str, Any], out: Path) -> list[Path]:
    try:
        from torch_ecrec.demo.plot import draw
    except ImportError as error:
        print(f"no picture: {error} (pip install matplotlib)", file=sys.stderr)
        return []
    draw(result, out / "recovery.png")
    return [out / "recovery.png"]
