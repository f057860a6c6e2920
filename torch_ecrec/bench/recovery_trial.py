"""Kills at steady state: one case of `bench recovery`, from the start of its cluster to its last kill."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_ecrec.bench.recovery_figures import MB, Case, Steps, figures_of, rows_per_table, slot_bytes
from torch_ecrec.bench.recovery_processes import START_LIMIT_S, START_LIMIT_S_PER_GB, CaseWatch, Stopped, Workers
from torch_ecrec.demo.report import Kill
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.control import ControlClient

WARM_S = 3.0  # of training, not measured
MOMENT_S = 1.0  # a kill comes at a random moment of so many seconds
GRACE_S = 1.0  # after a spare is there again: every process has just been told of it
DETECT_LIMIT_S = 45.0  # longer than a lease
STEP_LIMIT_S = 150.0  # for one step: longer than a trainer's own patience
REBUILD_LIMIT_S = 120.0  # and twice what it takes at the limit, or at
LEAST_MB_PER_S = 20.0
SPARE_LIMIT_S = 180.0
PAUSE_STEPS = 20  # a pause is announced so far ahead, so that it finds all trainers at the same step


@dataclass
class Trial:
    """One case while it runs: its cluster, its trainers, its kills."""

    case: Case
    code: CodeSpec
    arguments: argparse.Namespace
    cluster: Supervisor
    workers: Workers
    watch: CaseWatch
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
            assert kill.pid is not None, "of all processes alone it is not known"
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
    watch = CaseWatch(arguments.trainers, code.slots, case.name, logs / "trainers.log")
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
