"""The event `term-all`: every process of a job with its own cluster is told to end, as `scancel` and systemd do.

SIGTERM goes to torchrun, its trainers, and the coordinator and servers that trainer 0 has started, at one instant. The
script has its own handler: all trainers end the step, save, and leave (`--save` of `examples/dlrm_criteo.py`). For that
they need the servers, which must outlive them. Then nobody may be left, and the job is started again, which goes on
from what was saved. After some such lives it must have come to the bits of the undisturbed run.

A job of its own has no coordinator whose address is known before, so this is no `ChaosRun`: how far it has come is read
from what the script prints.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from torch_ecrec.demo.chaos.run import send
from torch_ecrec.demo.interrupts import raise_if_interrupted
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import START_LIMIT_S, STEP_LIMIT_S, TICK_S, DemoRun, example
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.children import descendants, tail, torchrun
from torch_ecrec.spec.job import CodeSpec

TIMES = 2  # that the job is told to end
GRACE_S = 120.0  # before a scheduler kills what is left; Slurm's is 30, and a machine may be busy
COUNTS_STEPS = ("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")  # a state dict has no count of steps
_STEP = re.compile(r"^(?:\[\w+\]: ?)?step (\d+) ", re.MULTILINE)
_SAVED = re.compile(r"told to end: saved after step (\d+)")


class PreemptedRun(DemoRun):
    """One training in several lives, each of which is told to end.

    Attributes:
        schedule: of each time that all were told to end: seconds since the begin, how many processes (`number`), the
            step that they were at and that after which the script saved, and seconds until all had ended.
        samples: none; as of a `ChaosRun`.
    """

    def __init__(self, arguments: argparse.Namespace, code: CodeSpec, logs: Path, terminal: Terminal) -> None:
        super().__init__(arguments, code, [], logs, terminal)
        self.schedule: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._random = random.Random(arguments.seed)
        self._saved = (logs / "saved").resolve()
        self._begin_s = time.time()

    def execute(self) -> None:
        """Runs the training to its end; then `reports` are complete.

        Raises:
            ClusterError: a life of the job did not come to its end, or did not save.
        """
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        steps, done = self.arguments.steps, 0
        for life in range(TIMES + 1):
            until = None if life == TIMES else self._random.randint(done + 1, done + (steps - done) // 2)
            done = self._live(life, until) or done
        self._read_reports()

    def release(self) -> None:
        """Does nothing: no event of this run lasts."""

    def script(self) -> list[str]:
        return [*super().script(), "--save", str(self._saved)]

    def _live(self, life: int, until: int | None) -> int | None:
        """Runs one life to its end, or until it is told to end at a step; returns the step after which it saved."""
        self._life_log = self.logs / f"trainers-{life}.log"
        words = ["--nproc-per-node", str(self.arguments.trainers), "--max-restarts", "0", *self.script()]
        patient = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_S))}  # torchrun kills after 30 s otherwise
        with torchrun(words, self._life_log, {**self.environment, **patient}, example()[1]) as job:
            self.terminal.say(f"life {life}" + (f": told to end after step {until}" if until is not None else ""))
            limit_s = time.monotonic() + START_LIMIT_S + STEP_LIMIT_S * self.arguments.steps
            while job.poll() is None and (until is None or self._step() < until):
                raise_if_interrupted()
                if time.monotonic() > limit_s:
                    raise ClusterError(f"life {life} did not come to its end in time\n{tail(self._log)}")
                time.sleep(TICK_S)
            if until is None:
                if job.returncode:
                    raise ClusterError(f"life {life} ended with {job.returncode}\n{tail(self._log)}")
                return None
            if job.poll() is not None:
                raise ClusterError(f"life {life} ended before it was told to\n{tail(self._log)}")
            return self._tell_all(job)

    def _tell_all(self, job: subprocess.Popen[bytes]) -> int:
        pids, at_s = [*descendants(job.pid), job.pid], time.monotonic()
        entry = {
            "s": time.time() - self._begin_s,
            "event": "term-all",
            "role": "job",
            "number": len(pids),
            "pid": job.pid,
        }
        self.schedule.append({**entry, "step": self._step(), "saved": None, "seconds": 0.0})
        for pid in pids:
            send(pid, signal.SIGTERM)
        while left := [pid for pid in pids if _lives(pid)]:
            job.poll()
            if time.monotonic() - at_s > GRACE_S:
                raise ClusterError(
                    f"{len(left)} of {len(pids)} processes did not end in {GRACE_S:g} s\n{tail(self._log)}"
                )
            time.sleep(TICK_S)
        saved = _SAVED.search(self._log.read_text(errors="replace"))
        if saved is None or not (self._saved / "newest").exists():
            raise ClusterError(
                f"told to end, all {len(pids)} processes of it, the job could not save\n{tail(self._log)}"
            )
        self.schedule[-1].update(saved=int(saved[1]), seconds=time.monotonic() - at_s)
        self.terminal.say(f"  all {len(pids)} processes were told to end: saved after step {saved[1]}, nobody is left")
        return int(saved[1])

    @property
    def _log(self) -> Path:
        return self._life_log

    def _step(self) -> int:
        """Returns the last step that the script has reported."""
        found = _STEP.findall(self._log.read_text(errors="replace"))
        return int(found[-1]) if found else 0

    def not_effective(self) -> list[str]:
        """Returns the times that all were to be told to end, and were not."""
        lacking = TIMES - len(self.schedule)
        return [f"term-all came {len(self.schedule)} times of {TIMES}"] if lacking else []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
