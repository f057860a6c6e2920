"""Trainers of `bench recovery`, and what is known of a cluster while it trains."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench.places import Here
from torch_ecrec.bench.recovery_figures import Steps
from torch_ecrec.demo.report import Record
from torch_ecrec.observe import events
from torch_ecrec.processes.children import tail
from torch_ecrec.runtime.threads import Worker, log_error

START_LIMIT_S = 240.0  # to the first step, and
START_LIMIT_S_PER_GB = 60.0


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Servers and trainers that a benchmark takes things from."""
    parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
    parser.add_argument("--spares", type=int, default=1, metavar="P", help="servers in reserve (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe (default 1)")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")


class Stopped(RuntimeError):
    """A measurement did not come to its end; the message says which and why."""


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
        place: where they run; None: here.
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
        place: Here | None = None,
    ) -> None:
        self._on_line = on_line
        self._processes: list[subprocess.Popen[str]] = []
        place = place or Here()
        command = [sys.executable, "-P", "-m", "torch_ecrec.bench.recovery_worker", "--backend", backend, *more]
        command += ["--trainers", str(arguments.trainers), "--rows", str(rows)]
        command += ["--batch-size", str(arguments.batch_size), "--seed", str(seed)]
        command += ["--zipf", str(arguments.zipf)]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        told = {**os.environ, **quiet, **place.meeting(), **environment}
        try:
            for trainer in range(arguments.trainers):
                with log.open("ab") as errors:
                    process = place.start_trainer(
                        trainer,
                        [*command, "--trainer", str(trainer)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=told,
                        start_new_session=True,  # Ctrl-C reaches us, and we end them
                    )
                self._processes.append(process)
                Worker(functools.partial(self._read, trainer, process), f"trainer {trainer}", log_error).start()
        except BaseException:
            self.close()
            raise

    def _read(self, trainer: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_line(trainer, json.loads(line))
        self._on_line(trainer, {})

    def tell(self, order: str) -> None:
        """Writes a line to each; one that has ended is noticed elsewhere."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{order}\n")
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


class CaseWatch:
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
        self.roster: list[str] = []  # who is there
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
            event = self.record.on_message(message)
            if isinstance(event, events.RosterIs):
                self.roster = event.members
            elif isinstance(event, events.Lost):
                self.gone.add(event.member)
            self.changed.notify_all()

    def on_closed(self, reason: str) -> None:
        with self.changed:
            self.coordinator_gone = reason
            self.changed.notify_all()

    def spares(self) -> int:
        """Servers that could take over now."""
        busy = {server for server, _ in self.record.places} | self.gone
        return sum(self.record.roles.get(name) == "server" and name not in busy for name in self.roster)

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
