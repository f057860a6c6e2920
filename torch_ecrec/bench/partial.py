"""CPR's emulation, scaled: what failures cost a training of many hours by each way, and what partial recovery loses.

    full          at a failure all go back to the last save; saves at Young's interval
    everything    partial recovery: the slot that failed takes what was saved of it; saved as seldom as the portion of
                  lost samples allows
    mfu ssu scar  the same, and between two saves of everything, every r-th part of the interval, a portion r of each
                  slot's rows, which that saver picks (`records/savers.py`)

Real records, steps of a real optimizer and real savers; time is not: `--steps` steps stand for `--hours`, and what a
save, a load and a restart cost is said (`--save`, `--load`, `--restart`) or taken from a run that has measured it
(`--measured`). Failures are drawn evenly over the time, each of one slot, the same ones for every way. There is no
cluster: no messages, no files; and the rows that a batch has are made up (Zipf).

Overhead is time that trains nothing new, over time that does. Lost updates: of all changes of a row by a step, those
that a failure threw away, so that one sees what a saver is good for; lost change: L2 of what the weights lost with
them, over all failures.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_ecrec.bench import partial_auc
from torch_ecrec.bench.emulation import COSTS, EmulatedSlot, Job, interval_of
from torch_ecrec.bench.record import header, markdown, table, write
from torch_ecrec.overhead.model import HOUR_S, young_interval_s
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.savers import SAVERS

PUBLISHED = "published (CPR, abstract): full recovery 8.2 to 8.5 %, CPR-MFU and CPR-SSU 0.53 to 0.68 %"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench partial`."""
    parser.add_argument("--hours", type=float, default=56.0, help="of training (default 56, as in CPR)")
    parser.add_argument("--failures", type=int, default=2, help="in that time (default 2)")
    parser.add_argument("--slots", type=int, default=8, help="of which a failure takes one (default 8)")
    parser.add_argument("--pls", type=float, default=0.1, help="portion of samples that may be lost (default 0.1)")
    parser.add_argument("--portion", type=float, default=0.125, help="r of the savers (default 0.125)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="result.json of `torch-ecrec demo`")
    for name in COSTS:
        parser.add_argument(f"--{name.removesuffix('_s')}", type=float, metavar="S", help="seconds that one costs")
    parser.add_argument("--steps", type=int, default=560, help="that stand for the hours (default 560)")
    parser.add_argument("--rows", type=int, default=20_000, help="of each slot")
    parser.add_argument("--touched", type=int, default=1000, help="draws of rows of a slot in a step")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--optimizer", choices=NAMES, default="rowwise_adagrad")
    parser.add_argument("--seed", type=int, default=0, help="of failures, rows and gradients")
    parser.add_argument("--out", type=Path, default=Path("build/partial"), metavar="DIR", help="gets partial.json")
    partial_auc.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a table, and writes it.

    Raises:
        ValueError, TypeError: a number cannot be, or a cost is not known.
    """
    job = Job.of(arguments)
    ways = [full(job), *(emulate(job, name) for name in SAVERS)]
    rows = [way.to_row() for way in ways]
    print(f"{job.hours:g} h, {len(job.failures)} failures, {job.slots} slots, lost samples allowed {job.pls:g}")
    print(table(rows))
    print(PUBLISHED)
    write(arguments.out, "partial", {"header": header(), "costs": job.costs}, rows)
    if arguments.data is not None:
        areas = partial_auc.compare(arguments, job, interval_of(job), print)
        print(markdown(areas))
        write(arguments.out, "partial-auc", {"header": header(), "costs": job.costs}, areas)
    return 0


@dataclass
class Way:
    """What one way has cost and lost.

    Attributes:
        interval_h: between two saves of everything.
        saves: time for writing, as a share of the training time; `down`: for loads and restarts; `again`: done again.
        lost_samples: the portion; `lost_updates`: as a share; `lost_change`: L2.
        memory: of the saver, the most of any slot, as a share of the weights' bytes.
        note_share: time of noting a step, over that of the step's own update; `pick_ms`: of one slot. None: no saver.
    """

    name: str
    interval_h: float
    saves: float = 0.0
    down: float = 0.0
    again: float = 0.0
    lost_samples: float = 0.0
    lost_updates: float = 0.0
    lost_change: float = 0.0
    memory: float = 0.0
    note_share: float | None = None
    pick_ms: float | None = None

    @property
    def total(self) -> float:
        """The whole overhead: the sum of its parts."""
        return self.saves + self.down + self.again

    def to_row(self) -> dict[str, Any]:
        """Returns the row of the table, as people read it."""
        return {
            "way": self.name,
            "overhead %": 100 * self.total,
            "saves %": 100 * self.saves,
            "down %": 100 * self.down,
            "again %": 100 * self.again,
            "interval h": self.interval_h,
            "lost samples %": 100 * self.lost_samples,
            "lost updates %": 100 * self.lost_updates,
            "lost change": self.lost_change,
            "memory %": 100 * self.memory,
            "note / step %": None if self.note_share is None else 100 * self.note_share,
            "pick ms": self.pick_ms,
        }


def full(job: Job) -> Way:
    """All go back at each failure. Nothing is lost, so nothing is computed: only time counts."""
    interval_s = young_interval_s(job.costs["save_s"], job.failures_per_s)
    step_s = job.hours * HOUR_S / job.steps
    total_s = job.hours * HOUR_S
    down_s = len(job.failures) * (job.costs["load_s"] + job.costs["restart_s"])
    again_s = sum((step * step_s) % interval_s for step, _ in job.failures)
    return Way(
        "full",
        interval_s / HOUR_S,
        int(total_s / interval_s) * job.costs["save_s"] / total_s,
        down_s / total_s,
        again_s / total_s,
    )


def emulate(job: Job, name: str) -> Way:
    """Partial recovery with one saver: steps are made, and rows saved and lost.

    Raises:
        ValueError: an interval is less than a step.
    """
    interval_s = interval_of(job)
    every = job.steps_of(interval_s, "the interval between two saves")
    portion = 1.0 if name == "everything" else job.portion
    some = every if name == "everything" else job.steps_of(portion * interval_s, "a portion of the interval")
    zeros_PD = np.zeros((job.rows, job.dim), np.float32)
    spec = optimizer(job.optimizer)
    slots = [EmulatedSlot(name, job.optimizer, zeros_PD, job.portion, job.seed + index) for index in range(job.slots)]
    way, apply_s, note_s, picks_s = Way(name, interval_s / HOUR_S), 0.0, 0.0, list[float]()
    updates = lost_updates = saved_rows = 0
    squares = lost_samples = 0.0
    last_save, failures = 0, list(job.failures)
    for step in range(1, job.steps + 1):
        for index, slot in enumerate(slots):
            batch = job.batch(step, index)
            begin_s = time.perf_counter()
            slot.shard.apply_(spec, batch, 0.05, step, {})
            applied_s = time.perf_counter()
            slot.saver.note(batch.positions)
            note_s += time.perf_counter() - applied_s
            apply_s += applied_s - begin_s
            slot.since_P[batch.positions] += 1
            updates += len(batch.positions)
        while failures and failures[0][0] == step:
            lost, square = slots[failures.pop(0)[1]].lose()
            lost_updates, squares = lost_updates + lost, squares + square
            lost_samples += (step - last_save) / job.slots / job.steps
        if step % every == 0:
            last_save = step
            for slot in slots:
                slot.save_everything()
                saved_rows += job.rows
        elif step % some == 0:
            for slot in slots:
                way.memory = max(way.memory, slot.saver.memory_bytes / (4 * job.rows * job.dim))
                begin_s = time.perf_counter()
                rows_N = slot.pick()
                picks_s.append(time.perf_counter() - begin_s)
                slot.save(rows_N)
                saved_rows += len(rows_N)
    total_s = job.hours * HOUR_S
    way.saves = saved_rows / (job.rows * job.slots) * job.costs["save_s"] / total_s
    way.down = len(job.failures) * (job.costs["load_s"] + job.costs["restart_s"]) / total_s
    way.lost_samples, way.lost_updates, way.lost_change = lost_samples, lost_updates / updates, squares**0.5
    way.note_share = note_s / apply_s
    way.pick_ms = 1e3 * float(np.median(picks_s)) if picks_s else None
    return way
