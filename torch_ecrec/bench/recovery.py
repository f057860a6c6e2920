"""How long a failure takes, phase by phase, what the rebuild costs training, and what a checkpoint would have cost.

    torch-ecrec bench recovery --gigabytes 1 4 8 --kills 5 --rebuild-mb-per-s 0 50 200

A *case* is one cluster of one size with one limit of the rebuild rate, "0.5 GB, 50 MB/s" for example. Trainers take
real steps of a DLRM. At steady state the process that hosts a random slot gets SIGKILL at a random moment, and the
times of all phases are taken (`demo/report.py` says what they are). The next kill waits until everything is healthy, a
spare is there again, and another window of steady training is over. The case `idle` is the unlimited one with the
trainers paused and no process starting: the speed of the rebuild alone.

Figures of a kill: seconds after SIGKILL, but `rebuild_s`, from re-hosted to rebuilt. Lost are the data and parity
records of the slot. Samples per second are of all trainers together: `before` over a window that ends at the kill,
`during` from the kill until all is rebuilt, the pause included, `after` over a window once a spare is there again (the
next kill's `before`). A step counts in part where a window cuts it.

The alternative is measured on plain TorchRec with the same tables: start the processes, load a checkpoint from the
local disk (not from the page cache), redo half an interval between checkpoints; the last is computed.

All processes share this machine: the killed one is started again at once, and its start takes cores from training
while the rebuild runs, as it would not on a host of its own. `--restart rebuilt`, and `idle`, start it once all is
rebuilt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torch_ecrec.bench import record as bench_record
from torch_ecrec.demo.report import Kill, Record, since
from torch_ecrec.errors import ClusterError
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.processes.children import free_port
from torch_ecrec.processes.launch import warm
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.control import ControlClient

MB = 1e6
TABLES, DIM = 26, 64
RECORD_BYTES = optimizer("rowwise_adagrad").schema(DIM).nbytes
WARM_S = 3.0  # of training, not measured
MOMENT_S = 1.0  # a kill comes at a random moment of so many seconds
GRACE_S = 1.0  # after a spare is there again: every process has just formed a new RPC generation
START_LIMIT_S = 240.0  # to the first step, and
START_LIMIT_S_PER_GB = 60.0
DETECT_LIMIT_S = 45.0  # longer than a lease
STEP_LIMIT_S = 150.0  # for one step: longer than a trainer's own patience
REBUILD_LIMIT_S = 120.0  # and twice what it takes at the limit, or at
LEAST_MB_PER_S = 20.0
SPARE_LIMIT_S = 180.0
PAUSE_STEPS = 20  # a pause is announced so far ahead, so that it finds all trainers at the same step
LEAVE_BYTES = 1 << 30  # of the disk, when a checkpoint is written
TAIL_LINES = 15
FIGURES = (
    "detected_s",
    "rehosted_s",
    "first_step_s",
    "stall_s",
    "rebuilt_s",
    "spare_s",
    "rebuild_s",
    "lost_mb",
    "lost_data_mb",
    "lost_mb_per_s",
    "lost_data_mb_per_s",
    "before_samples_per_s",
    "during_samples_per_s",
    "after_samples_per_s",
    "during_share",
)
SHOWN = ("detected_s", "rehosted_s", "first_step_s", "rebuilt_s", "lost_mb", "lost_mb_per_s")
RATES = ("before_samples_per_s", "during_samples_per_s", "after_samples_per_s", "during_share")


class Stopped(RuntimeError):
    """A measurement did not come to its end; the message says which and why."""


# pure: sizes and figures ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One cluster's worth of kills. `mb_per_s`: `Settings.rebuild_bytes_per_s` in 10^6, 0 for no limit."""

    gigabytes: float
    mb_per_s: float
    idle: bool

    @property
    def name(self) -> str:
        limit = f"{self.mb_per_s:g} MB/s" if self.mb_per_s else "no limit"
        return f"{self.gigabytes:g} GB, {'idle' if self.idle else limit}"


def cases(gigabytes: Sequence[float], limits: Sequence[float], throttled: float | None, idle: bool) -> list[Case]:
    """All cases, sizes first.

    Args:
        gigabytes: sizes of all records, in 10^9 bytes.
        limits: of the rebuild rate in 10^6 bytes/s, 0 for none.
        throttled: the only size at which limits other than 0 are measured; None for all.
        idle: whether the rebuild is also measured alone.
    """
    found = []
    for size in gigabytes:
        found += [Case(size, limit, False) for limit in limits if not limit or throttled in (None, size)]
        found += [Case(size, 0.0, True)] * idle
    return found


def rows_per_table(gigabytes: float) -> int:
    """Rows of each table so that all records together have `gigabytes` * 10^9 bytes."""
    return max(1, round(gigabytes * 1e9 / (TABLES * RECORD_BYTES)))


def slot_bytes(code: CodeSpec, rows: int, slot: int) -> tuple[int, int]:
    """Bytes of data and of parity records on a slot; `rows` per table."""
    layout = Layout(code.slots, code.k, code.parities, TABLES * rows)
    return RECORD_BYTES * layout.data_rows(slot), RECORD_BYTES * layout.parity_rows(slot)


class Steps:
    """When each trainer's steps began and ended. Times in seconds since the epoch, steps from 1."""

    def __init__(self, trainers: int) -> None:
        self._begun: list[list[float]] = [[] for _ in range(trainers)]
        self._ended: list[list[float]] = [[] for _ in range(trainers)]
        self.times: list[float] = []  # [i]: when step i + 1 was complete at all trainers

    def add(self, trainer: int, begin_s: float, end_s: float) -> None:
        """The next step of a trainer."""
        self._begun[trainer].append(begin_s)
        self._ended[trainer].append(end_s)
        while len(self.times) < min(map(len, self._ended)):
            self.times.append(max(ended[len(self.times)] for ended in self._ended))

    @property
    def newest(self) -> int:
        """The last step that some trainer has completed."""
        return max(map(len, self._ended))

    def first_begun_after(self, time_s: float) -> float | None:
        """When the first step was complete that all trainers began after `time_s`; None if it is not yet."""
        for i in range(len(self.times) - 1, -1, -1):
            if min(begun[i] for begun in self._begun) <= time_s:
                return self.times[i + 1] if i + 1 < len(self.times) else None
        return self.times[0] if self.times else None

    def rate(self, begin_s: float, end_s: float) -> float | None:
        """Steps per second in a window; a step counts in part where the window cuts it. None if it is not covered."""
        if end_s <= begin_s or len(self.times) < 2 or not (self.times[0] <= begin_s and end_s <= self.times[-1]):
            return None
        first, last = np.interp([begin_s, end_s], self.times, np.arange(len(self.times)))
        return float(last - first) / (end_s - begin_s)

    def stall_s(self, begin_s: float, end_s: float) -> float | None:
        """The longest time between two completed steps, from the last before `begin_s` to the one at `end_s`."""
        times = np.asarray(self.times)
        around = times[max(0, int(np.searchsorted(times, begin_s)) - 1) : int(np.searchsorted(times, end_s, "right"))]
        return float(np.diff(around).max()) if len(around) > 1 else None


def figures_of(
    kill: Kill, steps: Steps, spare_s: float, windows_s: tuple[float, float, float], samples: int, lost: tuple[int, int]
) -> dict[str, float | None]:
    """All `FIGURES` of one kill.

    Args:
        kill: with all its times but `first_step_s`, which is the trainers' to say.
        steps: of the trainers.
        spare_s: when a spare was there again.
        windows_s: begin of the window before the kill, begin and end of the one after.
        samples: in one step of all trainers.
        lost: bytes of data and of parity records.
    """
    start_s, rehosted_s, rebuilt_s = kill.kill_s, kill.rehosted_s, kill.rebuilt_s
    assert rehosted_s is not None and rebuilt_s is not None
    first_step_s = steps.first_begun_after(start_s)
    rebuild_s = rebuilt_s - rehosted_s
    spans = {
        "before": (windows_s[0], start_s),
        "during": (start_s, rebuilt_s),
        "after": (windows_s[1], windows_s[2]),
    }
    rates = {name: steps.rate(*span) for name, span in spans.items()}
    before, during = rates["before"], rates["during"]
    return {
        "detected_s": since(kill.detected_s, start_s),
        "rehosted_s": since(rehosted_s, start_s),
        "first_step_s": since(first_step_s, start_s),
        "stall_s": steps.stall_s(start_s, first_step_s) if first_step_s is not None else None,
        "rebuilt_s": since(rebuilt_s, start_s),
        "spare_s": since(spare_s, start_s),
        "rebuild_s": rebuild_s,
        "lost_mb": sum(lost) / MB,
        "lost_data_mb": lost[0] / MB,
        "lost_mb_per_s": sum(lost) / MB / rebuild_s,
        "lost_data_mb_per_s": lost[0] / MB / rebuild_s,
        **{f"{name}_samples_per_s": None if rate is None else rate * samples for name, rate in rates.items()},
        "during_share": during / before if during is not None and before else None,
    }


def summary(case: Case, kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A flat row: median, least and most of every figure over the kills; None where a figure does not apply."""
    row: dict[str, Any] = {
        "case": case.name,
        "gigabytes": case.gigabytes,
        "mode": "idle" if case.idle else "training",
        "limit_mb_per_s": case.mb_per_s,
        "kills": len(kills),
    }
    for figure in FIGURES:
        values = [kill[figure] for kill in kills if kill[figure] is not None]
        spread = bench_record.spread(values) if values else dict.fromkeys(("median", "min", "max"))
        row |= {f"{figure}_{name}": value for name, value in spread.items()}
    return row


# processes --------------------------------------------------------------------------------------------


class Workers:
    """Trainer processes (`recovery_worker.py`). Use as a context manager: leaving ends them, by their pids.

    Args:
        arguments: of the benchmark.
        backend: "ecrec" or "torchrec".
        rows: of each table.
        log: file for what they say, appended to.
        on_line: `on_line(trainer, message)`, on a thread for each; `{}` when its output has ended.
        environment: extra environment.
        more: further arguments.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        backend: str,
        rows: int,
        log: Path,
        on_line: Callable[[int, dict[str, Any]], None],
        environment: Mapping[str, str],
        more: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self._on_line = on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "torch_ecrec.bench.recovery_worker", "--backend", backend, *more]
        command += ["--trainers", str(arguments.trainers), "--port", str(free_port()), "--rows", str(rows)]
        command += ["--batch-size", str(arguments.batch_size), "--seed", str(seed)]
        command += ["--zipf", str(arguments.zipf)]
        try:
            for trainer in range(arguments.trainers):
                with log.open("ab") as errors:
                    process = subprocess.Popen(
                        [*command, "--trainer", str(trainer)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
                        start_new_session=True,  # Ctrl-C reaches us, and we end them
                    )
                self._processes.append(process)
                threading.Thread(target=self._read, args=[trainer, process], daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _read(self, trainer: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_line(trainer, json.loads(line))
        self._on_line(trainer, {})

    def tell(self, order: str) -> None:
        """Writes a line to each; one that has ended is noticed elsewhere."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{order}\n".encode())
                process.stdin.flush()

    def close(self) -> None:
        """Ends them at once: they hold nothing that must be saved. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watch:
    """What a running case is known to do. Its methods are for threads; `changed` guards all attributes.

    Args:
        trainers, slots: how many.
        name: of what is measured, for messages.
        log: the trainers', whose end is shown when something went wrong.
    """

    def __init__(self, trainers: int, slots: int, name: str, log: Path) -> None:
        self.changed = threading.Condition()
        self.name, self.log = name, log
        self.record = Record(trainers, slots)
        self.steps = Steps(trainers)
        self.facts: list[dict[str, Any]] = [{} for _ in range(trainers)]  # what each trainer said, steps aside
        self.ended: list[int] = []  # trainers whose output has ended
        self.world: list[str] = []  # members of the RPC generation
        self.gone: set[str] = set()  # members that were lost
        self.coordinator_gone: str | None = None

    def on_line(self, trainer: int, message: dict[str, Any]) -> None:
        with self.changed:
            if not message:
                self.ended.append(trainer)
            elif "step" in message:
                self.steps.add(trainer, message["begin_s"], message["end_s"])
            else:
                self.facts[trainer] |= message
            self.changed.notify_all()

    def on_message(self, message: dict[str, Any]) -> None:
        with self.changed:
            self.record.on_message(message)
            if message.get("event") == "generation":
                self.world = message["members"]
            elif message.get("event") == "lost":
                self.gone.add(message["member"])
            self.changed.notify_all()

    def on_closed(self, reason: str) -> None:
        with self.changed:
            self.coordinator_gone = reason
            self.changed.notify_all()

    def spares(self) -> int:
        """Servers that could take over now."""
        hosts = {server for server, _ in self.record.places}
        return sum(name.startswith("server") and name not in hosts | self.gone for name in self.world)

    def trouble(self) -> str | None:
        """Why nothing more can come of this."""
        if self.record.fatal is not None:
            return f"the cluster has stopped: {self.record.fatal['reason']}"
        if self.record.unexpected:
            return self.record.unexpected[0]
        if self.coordinator_gone is not None:
            return f"the coordinator is gone: {self.coordinator_gone}"
        if self.ended:
            return f"trainer {self.ended[0]} has ended at step {self.steps.newest}"
        return None

    def wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until `condition` holds, which is called with `changed` held. Raises `Stopped` if it does not in time."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.trouble() is not None, limit_s)
            met, trouble, step = condition(), self.trouble(), self.steps.newest
        if not met:
            reason = trouble or f"not within {limit_s:.0f} s, at step {step}"
            raise Stopped(f"{self.name}: waiting for {what}: {reason}\n{tail(self.log)}")


def tail(path: Path) -> str:
    """The end of a log."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines[-TAIL_LINES:])])


# kills ------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """One case while it runs: its cluster, its trainers, its kills."""

    case: Case
    code: CodeSpec
    arguments: argparse.Namespace
    cluster: Supervisor
    workers: Workers
    watch: Watch
    rng: random.Random
    rows: int
    kills: list[dict[str, Any]] = field(default_factory=list)

    def _whole(self) -> bool:
        return self.watch.record.settled and self.watch.spares() >= self.arguments.spares

    def _steady(self) -> tuple[float, float]:
        """Lets it train for a window that ends at a random moment: (its begin, its end)."""
        begin_s = time.time()
        until_s = begin_s + self.arguments.steady_s + self.rng.uniform(0.0, MOMENT_S)
        self.watch.wait(
            lambda: bool(self.watch.steps.times) and self.watch.steps.times[-1] >= until_s,
            self.arguments.steady_s + MOMENT_S + STEP_LIMIT_S,
            "a window of steady training",
        )
        return begin_s, until_s

    def run(self) -> None:
        """All kills; what was measured stays in `kills` if one of them fails."""
        watch = self.watch
        start_limit_s = START_LIMIT_S + START_LIMIT_S_PER_GB * self.case.gigabytes
        watch.wait(lambda: len(watch.steps.times) > 0, start_limit_s, "the first step")
        first_s = watch.steps.times[0]
        watch.wait(lambda: watch.steps.times[-1] > first_s + WARM_S, WARM_S + STEP_LIMIT_S, "the first seconds")
        watch.wait(self._whole, SPARE_LIMIT_S, "spares")
        before_s, _ = self._steady()
        for number in range(1, self.arguments.kills + 1):
            if self.case.idle:
                self._pause()
            kill, lost = self._kill(number)
            spare_s = self._recover(kill, lost)
            if self.case.idle:
                self.workers.tell("go")
            time.sleep(GRACE_S)
            after_s, end_s = self._steady()
            with watch.changed:
                steps = Steps(0) if self.case.idle else watch.steps  # nobody trained: rates and steps mean nothing
                samples = self.arguments.batch_size * self.arguments.trainers
                figures = figures_of(kill, steps, spare_s, (before_s, after_s, end_s), samples, lost)
            before_s = after_s
            self.kills.append(
                {"slot": kill.number, "server": kill.member, "pid": kill.pid, "kill_s": kill.kill_s, **figures}
            )
            print(f"  {self.case.name}, kill {number}: {kill_line(figures)}", flush=True)

    def _pause(self) -> None:
        watch = self.watch
        with watch.changed:
            for facts in watch.facts:
                facts.pop("paused", None)
            step = watch.steps.newest + PAUSE_STEPS
        self.workers.tell(f"pause {step}")
        watch.wait(lambda: all("paused" in facts for facts in watch.facts), STEP_LIMIT_S, "all trainers to pause")
        time.sleep(self.rng.uniform(0.5, 0.5 + MOMENT_S))  # for what is still under way to end

    def _kill(self, number: int) -> tuple[Kill, tuple[int, int]]:
        """SIGKILL to the host of a random slot: the kill, and the bytes of data and parity lost."""
        watch, slot = self.watch, self.rng.randrange(self.code.slots)
        with watch.changed:
            server = watch.record.places[slot][0]
            if not self._whole() or not server:
                raise Stopped(f"{watch.name}: kill {number} did not fire: the cluster is not whole; {watch.trouble()}")
            kill = watch.record.on_kill(f"{self.case.name}, kill {number}", "server", slot, time.time())
            try:
                os.kill(kill.pid, signal.SIGKILL)
            except ProcessLookupError:
                raise Stopped(f"{watch.name}: kill {number} did not fire: no process {kill.pid}") from None
        sizes = [slot_bytes(self.code, self.rows, lost) for lost in kill.lost]
        return kill, (sum(data for data, _ in sizes), sum(parity for _, parity in sizes))

    def _recover(self, kill: Kill, lost: tuple[int, int]) -> float:
        """Waits for every phase; returns when all was whole again, with a spare."""
        watch = self.watch
        what = f"{kill.member} (pid {kill.pid}, host of slot {kill.number}) was killed; its"
        watch.wait(lambda: kill.detected_s is not None, DETECT_LIMIT_S, f"{what} detection")
        watch.wait(lambda: kill.rehosted_s is not None, STEP_LIMIT_S, f"{what} slot on another host")
        if not self.case.idle:
            watch.wait(
                lambda: watch.steps.first_begun_after(kill.kill_s) is not None, STEP_LIMIT_S, f"{what} first step after"
            )
        mb_per_s = min(self.case.mb_per_s or LEAST_MB_PER_S, LEAST_MB_PER_S)
        limit_s = REBUILD_LIMIT_S + 2 * self.code.k * sum(lost) / MB / mb_per_s
        watch.wait(lambda: kill.rebuilt_s is not None, limit_s, f"{what} rebuild")
        if not self.cluster.restart:
            self.cluster.start_server()
        watch.wait(self._whole, SPARE_LIMIT_S, "a spare")
        return time.time()


def kill_line(figures: Mapping[str, float | None]) -> str:
    """A kill in one line."""

    def of(name: str, form: str) -> str:
        value = figures[name]
        return "-" if value is None else form.format(value)

    return (
        f"detected {of('detected_s', '{:.3f}')}, re-hosted {of('rehosted_s', '{:.3f}')}, first step"
        f" {of('first_step_s', '{:.3f}')}, rebuilt {of('rebuilt_s', '{:.2f}')} s; {of('lost_mb', '{:.0f}')} MB at"
        f" {of('lost_mb_per_s', '{:.0f}')} MB/s; {of('before_samples_per_s', '{:,.0f}')} samples/s before,"
        f" {of('during_samples_per_s', '{:,.0f}')} during, {of('after_samples_per_s', '{:,.0f}')} after"
    )


def measure(case: Case, code: CodeSpec, arguments: argparse.Namespace, kills: list[dict[str, Any]]) -> None:
    """Runs a case; appends what it measured to `kills`, kill by kill.

    Raises:
        Stopped: a kill did not fire, or training or the rebuild stopped.
        ClusterError: the cluster did not start.
    """
    logs = arguments.out / "logs" / "".join(c if c.isalnum() else "-" for c in case.name)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    limit = {"TORCH_ECREC_REBUILD_BYTES_PER_S": str(case.mb_per_s * MB), "OMP_NUM_THREADS": "1"}
    watch = Watch(arguments.trainers, code.slots, case.name, logs / "trainers.log")
    restart = arguments.restart == "at-once" and not case.idle
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Supervisor(code, arguments.spares, restart=restart, logs=logs, environment=limit))
        client = ControlClient(*cluster.address, watch.on_message, watch.on_closed, timeout_s=10.0)
        stack.callback(client.close)
        client.send({"type": "watch"})
        rows = rows_per_table(case.gigabytes)
        environment = {**limit, "TORCH_ECREC_JOIN": cluster.join}
        workers = stack.enter_context(
            Workers(arguments, "ecrec", rows, watch.log, watch.on_line, environment, seed=arguments.seed)
        )
        rng = random.Random(f"{arguments.seed} {case.name}")
        Trial(case, code, arguments, cluster, workers, watch, rng, rows, kills).run()


# the alternative --------------------------------------------------------------------------------------


def from_checkpoint(gigabytes: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a restart of plain TorchRec from a checkpoint takes; `skipped` says why if it was not measured.

    Raises:
        Stopped: the trainers failed, or what was loaded is not what was saved.
    """
    result: dict[str, Any] = {"gigabytes": gigabytes, "skipped": None}
    free, needed = shutil.disk_usage(arguments.out).free, int(gigabytes * 1.05e9) + LEAVE_BYTES
    if free < needed:
        result["skipped"] = f"{free / 1e9:.1f} GB free on the disk of {arguments.out}, {needed / 1e9:.1f} GB needed"
        return result
    folder = arguments.out / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    log = arguments.out / "logs" / f"checkpoint-{gigabytes:g}-GB.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    rows, limit_s = rows_per_table(gigabytes), START_LIMIT_S + START_LIMIT_S_PER_GB * gigabytes
    trainers, name = arguments.trainers, f"{gigabytes:g} GB, checkpoint"

    @contextlib.contextmanager
    def running(option: str, seed: int) -> Iterator[Watch]:
        watch = Watch(trainers, 0, name, log)
        with Workers(arguments, "torchrec", rows, log, watch.on_line, {}, [option, str(folder.resolve())], seed):
            yield watch

    def wait_for(watch: Watch, fact: str) -> list[float]:
        watch.wait(lambda: all(fact in facts for facts in watch.facts), limit_s, f"'{fact}' from all trainers")
        return [facts[fact] for facts in watch.facts]

    try:
        with running("--save", arguments.seed) as watch:
            result["save_s"] = max(wait_for(watch, "saved_s"))
            saved = wait_for(watch, "sample")
        result["checkpoint_bytes"] = forget_pages(folder)
        begin_s = time.time()
        with running("--load", arguments.seed + 1) as watch:
            ready_s = max(wait_for(watch, "ready"))
            result["start_s"] = ready_s - begin_s
            result["load_s"] = max(wait_for(watch, "loaded_s"))
            loaded = wait_for(watch, "sample")
            if loaded != saved:
                raise Stopped(f"{name}: what was loaded is not what was saved: {loaded}, {saved}")
            watch.wait(lambda: len(watch.steps.times) > 1, limit_s, "the first steps")
        result["redo_s"] = arguments.checkpoint_interval_s / 2
        result["until_training_s"] = result["start_s"] + result["load_s"]
        result["until_caught_up_s"] = result["until_training_s"] + result["redo_s"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def forget_pages(folder: Path) -> int:
    """Takes files out of the page cache, so that reading them reads the disk; returns their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # Linux
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


# results ----------------------------------------------------------------------------------------------


def tables(rows: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]], interval_s: float) -> str:
    """What is printed at the end."""
    head = ("case", "kills")
    blocks = []
    for title, figures in (("after the kill", SHOWN), ("samples per second", RATES)):
        shown = [{c: row[c] for c in head} | {f: row[f"{f}_median"] for f in figures} for row in rows]
        blocks.append(f"{title} (medians):\n{bench_record.table(shown)}" if shown else "")
    training = [row for row in rows if row["mode"] == "training"]
    if training:
        lines = [
            f"  {figure:12} least {min(row[f'{figure}_min'] for row in training):.3f},"
            f" most {max(row[f'{figure}_max'] for row in training):.3f}"
            for figure in ("detected_s", "rehosted_s", "first_step_s", "stall_s")
            if all(row[f"{figure}_max"] is not None for row in training)
        ]
        blocks.append(f"over {sum(row['kills'] for row in training)} kills in training:\n" + "\n".join(lines))
    measured = [c for c in checkpoints if c["skipped"] is None]
    if measured:
        columns = ["gigabytes", "save_s", "start_s", "load_s", "until_training_s", "redo_s", "until_caught_up_s"]
        blocks.append(
            "restart of plain TorchRec from a checkpoint on the local disk; redo_s is not run but computed: half of an"
            f" interval of {interval_s:g} s:\n{bench_record.table(measured, columns)}"
        )
    blocks += [f"{c['gigabytes']:g} GB, checkpoint: skipped: {c['skipped']}" for c in checkpoints if c["skipped"]]
    return "\n\n".join(block for block in blocks if block)


def draw(rows: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture: times of the phases by size, and throughput in each phase by rate limit.

    Raises:
        ImportError: no matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.6), dpi=150, layout="constrained")
    times, rates = figure.subplots(1, 2)

    def spread(axes: Any, at: Sequence[float], of: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
        middle = [row[f"{name}_median"] for row in of]
        low = [row[f"{name}_median"] - row[f"{name}_min"] for row in of]
        high = [row[f"{name}_max"] - row[f"{name}_median"] for row in of]
        axes.errorbar(at, middle, yerr=[low, high], capsize=3, **style)

    free = [row for row in rows if row["mode"] == "training" and not row["limit_mb_per_s"]]
    idle = [row for row in rows if row["mode"] == "idle"]
    colors = {"detected_s": "#7b8794", "rehosted_s": "#2563eb", "first_step_s": "#059669", "rebuilt_s": "#f59e0b"}
    labels = {
        "detected_s": "detected",
        "rehosted_s": "re-hosted",
        "first_step_s": "first step begun after it",
        "rebuilt_s": "rebuilt",
    }
    for name, color in colors.items():
        some = [row for row in free if row[f"{name}_median"] is not None]
        if some:
            spread(times, [r["gigabytes"] for r in some], some, name, marker="o", color=color, label=labels[name])
    if idle:
        spread(
            times,
            [row["gigabytes"] for row in idle],
            idle,
            "rebuilt_s",
            marker="s",
            linestyle="--",
            color="#b45309",
            label="rebuilt, trainers idle",
        )
    loaded = [c for c in checkpoints if c["skipped"] is None]
    if loaded:
        at = [c["gigabytes"] for c in loaded]
        style = {"marker": "x", "linestyle": ":"}
        times.plot(at, [c["until_training_s"] for c in loaded], color="#dc2626", label="TorchRec: start, load", **style)
        label = "TorchRec: start, load, redo (computed)"
        times.plot(at, [c["until_caught_up_s"] for c in loaded], color="#7f1d1d", label=label, **style)
    times.set(title="Time after SIGKILL, rebuild not limited", xlabel="records in the cluster (GB)", ylabel="seconds")
    times.set_yscale("log")
    times.set_xlim(left=0.0)
    times.grid(True, which="major", color="#e4e7eb")
    if free or idle or loaded:
        times.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)

    training = [row for row in rows if row["mode"] == "training"]
    width = 0.26
    for i, (phase, color) in enumerate((("before", "#9aa5b1"), ("during", "#f59e0b"), ("after", "#86c7a3"))):
        name = f"{phase}_samples_per_s"
        pairs = [(n, row) for n, row in enumerate(training) if row[f"{name}_median"] is not None]
        some, at = [row for _, row in pairs], [n + (i - 1) * width for n, _ in pairs]
        label = "kill to rebuilt" if phase == "during" else phase
        rates.bar(at, [row[f"{name}_median"] for row in some], width, color=color, label=label)
        spread(rates, at, some, name, fmt="none", ecolor="#1f2933")
    rates.set_xticks(range(len(training)), [row["case"].replace(", ", "\n") for row in training], fontsize=8)
    rates.set(title="Throughput by limit of the rebuild rate", ylabel="samples/s, all trainers")
    rates.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    figure.suptitle("Medians over the kills of a case; bars from the least to the most", fontsize=9)
    figure.savefig(path)


# the benchmark ----------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> CodeSpec:
    """Everything about the arguments that can be wrong, before anything starts. Raises ValueError, TypeError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r)
    require_int("spares", arguments.spares, 0)
    for name in ("trainers", "batch_size", "kills"):
        require_int(name.replace("_", "-"), getattr(arguments, name), 1)
    for name in ("steady_s", "checkpoint_interval_s"):
        require(getattr(arguments, name) > 0, f"`{name}` must be positive, got {getattr(arguments, name)}")
    for size in arguments.gigabytes:
        require(size > 0, f"`--gigabytes` must be positive, got {size}")
    require(arguments.zipf >= 0, f"`--zipf` must not be negative, got {arguments.zipf}")
    for limit in arguments.rebuild_mb_per_s:
        require(limit >= 0, f"`--rebuild-mb-per-s` must not be negative, got {limit}")
    size = arguments.throttled_gigabytes
    require(
        size is None or size in arguments.gigabytes,
        f"`--throttled-gigabytes` must be one of {arguments.gigabytes}, got {size}",
    )
    return code


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes recovery.json, .csv and .png, with the label in their names, to `arguments.out`.

    Returns:
        0, or 1 if a kill did not fire or something stopped; what was measured until then is written, with the reason
        in `error`, and the processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    code = check(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    todo = cases(arguments.gigabytes, arguments.rebuild_mb_per_s, arguments.throttled_gigabytes, not arguments.no_idle)
    measured: list[tuple[Case, list[dict[str, Any]]]] = []
    checkpoints: list[dict[str, Any]] = []
    error: str | None = "interrupted"
    header = bench_record.header()
    name = "-".join(filter(None, ("recovery", arguments.label)))
    try:
        warm()
        for case in todo:
            print(f"{case.name}: {arguments.kills} kills", flush=True)
            measured.append((case, []))
            measure(case, code, arguments, measured[-1][1])
        for gigabytes in () if arguments.no_checkpoint else arguments.gigabytes:
            print(f"{gigabytes:g} GB: restart of plain TorchRec from a checkpoint", flush=True)
            checkpoints.append(from_checkpoint(gigabytes, arguments))
        error = None
    except (Stopped, ClusterError) as failure:
        error = str(failure)
    finally:
        rows = [summary(case, kills) for case, kills in measured if kills]
        content = {
            "header": header,
            "arguments": {n: str(v) if isinstance(v, Path) else v for n, v in vars(arguments).items()},
            "tables": TABLES,
            "dim": DIM,
            "record_bytes": RECORD_BYTES,
            "cases": [{"case": case.name, "kills": kills} for case, kills in measured],
            "checkpoints": checkpoints,
            "error": error,
        }
        bench_record.write(arguments.out, name, content, rows)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(arguments.out / f"{name}.json", arguments.json)
    print("\n" + tables(rows, checkpoints, arguments.checkpoint_interval_s))
    try:
        if rows:
            draw(rows, checkpoints, arguments.out / f"{name}.png")
    except ImportError as missing:
        print(f"no picture: {missing} (pip install matplotlib)", file=sys.stderr)
    if error is not None:
        print(f"torch-ecrec: {error}\nlogs: {arguments.out / 'logs'}", file=sys.stderr)
    return 0 if error is None else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench recovery`."""
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[1.0, 4.0, 8.0], metavar="GB", help="of records, without parity"
    )
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="in each case")
    parser.add_argument(
        "--rebuild-mb-per-s",
        type=float,
        nargs="*",
        default=[0.0, 50.0, 200.0],
        metavar="MB",
        help="limits of the background rebuild, which counts the k records that it reads for each; 0 for none",
    )
    parser.add_argument(
        "--throttled-gigabytes", type=float, metavar="GB", help="measure limits other than 0 at this size only"
    )
    parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
    parser.add_argument("--spares", type=int, default=1, metavar="P", help="servers in reserve (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe (default 1)")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument("--batch-size", type=int, default=1024, metavar="B", help="samples per trainer and step")
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        metavar="A",
        help="exponent of the law that ids follow (default 1.05); 0 for uniform ones, so that hardly any row"
        " that a step asks for was repaired before: the worst case for training during a rebuild",
    )
    parser.add_argument("--steady-s", type=float, default=8.0, metavar="S", help="training measured around each kill")
    parser.add_argument(
        "--restart",
        choices=["at-once", "rebuilt"],
        default="at-once",
        help="when the killed process is started again: its start takes cores that a host of its own would have",
    )
    parser.add_argument("--no-idle", action="store_true", help="do not measure the rebuild with paused trainers")
    parser.add_argument("--no-checkpoint", action="store_true", help="do not measure a restart of plain TorchRec")
    parser.add_argument(
        "--checkpoint-interval-s", type=float, default=1800.0, metavar="S", help="half of it is redone (computed)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="added to the names of the files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="another copy of the JSON")
    parser.add_argument("--out", type=Path, default=Path("build/recovery"), metavar="DIR")
