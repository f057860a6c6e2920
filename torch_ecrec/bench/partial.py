"""Emulates CPR scaled down: what failures cost a training of many hours by each way, and what partial recovery loses.

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

With `--data` also what that does to a model's quality: a small DLRM is trained on the first rows of a file and scored
on the last fifth, its tables in `--slots` slots as above. When a slot fails, it takes what was saved of it; "exact"
loses nothing. Of one seed, all ways have the same initial model, batches and failures; seeds differ in all three.

    AUC        mean over seeds, and their standard deviation
    - exact    the same of the differences from exact recovery, seed by seed

Shapes: P rows of a slot, N rows of a batch, C = 26 categories of each, U table rows that they have, D weights.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_ecrec.bench.record import header, markdown, require_counts, require_positive, table, write
from torch_ecrec.demo import criteo
from torch_ecrec.demo.criteo import CATEGORIES, INTEGERS, Clicks
from torch_ecrec.observe.progress import counted
from torch_ecrec.overhead.model import HOUR_S, Costs, partial_interval_s, young_interval_s
from torch_ecrec.overhead.report import measured
from torch_ecrec.records.merge import Merged, merge
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.positions import Floats, Positions
from torch_ecrec.records.savers import SAVERS, Saver, saver_of
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.checks import require

PUBLISHED = "published (CPR, abstract): full recovery 8.2 to 8.5 %, CPR-MFU and CPR-SSU 0.53 to 0.68 %"
COSTS = ("save_s", "load_s", "restart_s")
ZIPF = 1.2
WAYS = ("exact", *SAVERS)  # of the second table
HIDDEN = 64
RATE, DENSE_RATE = 0.05, 0.05

# what is emulated -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The training that is emulated, and its failures.

    Attributes:
        costs: seconds, by the names in `COSTS`.
        failures: (step during which it comes, slot), in order of time.
        draws: rows that a slot's step draws; `rows`: of a slot.
    """

    hours: float
    slots: int
    pls: float
    portion: float
    costs: dict[str, float]
    steps: int
    rows: int
    draws: int
    dim: int
    optimizer: str
    seed: int
    failures: list[tuple[int, int]]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Job:
        """Makes the job from the command line. Raises ValueError or TypeError."""
        require_counts(arguments, "slots", "failures", "steps", "rows", "touched", "dim")
        require_positive(arguments, "hours")
        for name in ("pls", "portion"):
            value = getattr(arguments, name)
            require(0 < value < 1, f"`{name}` must be above 0 and below 1, got {value}")
        costs = {} if arguments.measured is None else measured(arguments.measured)
        said = {name: getattr(arguments, name.removesuffix("_s")) for name in COSTS}
        costs |= {name: value for name, value in said.items() if value is not None}
        missing = [f"--{name.removesuffix('_s')}" for name in COSTS if name not in costs]
        require(
            not missing, f"{', '.join(missing)}: say what it costs, or name a run that has measured it (`--measured`)"
        )
        require(0 < costs["save_s"] < math.inf, f"`save_s` must be positive, got {costs['save_s']}")
        require(min(costs["load_s"], costs["restart_s"]) >= 0, "`load_s` and `restart_s` must not be negative")
        rng = np.random.default_rng(arguments.seed)
        at = sorted(int(step) for step in rng.integers(1, arguments.steps + 1, arguments.failures))
        return Job(
            hours=arguments.hours,
            slots=arguments.slots,
            pls=arguments.pls,
            portion=arguments.portion,
            costs={name: costs[name] for name in COSTS},
            steps=arguments.steps,
            rows=arguments.rows,
            draws=arguments.touched,
            dim=arguments.dim,
            optimizer=arguments.optimizer,
            seed=arguments.seed,
            failures=[(step, int(rng.integers(arguments.slots))) for step in at],
        )

    @property
    def failures_per_s(self) -> float:
        """How often any of the slots fails, per second."""
        return len(self.failures) / (self.hours * HOUR_S)

    def steps_of(self, seconds: float, what: str) -> int:
        """Returns how many steps stand for so many seconds. Raises ValueError if that is less than one."""
        steps = seconds * self.steps / (self.hours * HOUR_S)
        require(steps >= 1, f"{what} is {steps:.2g} steps: raise --steps to {int(self.steps / steps) + 1} or more")
        return round(steps)

    def batch(self, step: int, slot: int) -> Merged:
        """Returns a step's gradients for a slot, which are the same for every way."""
        rng = np.random.default_rng((self.seed, step, slot))
        at = np.unique((rng.zipf(ZIPF, self.draws) - 1) % self.rows).astype(np.int64)
        return merge([(at, rng.standard_normal((len(at), self.dim), np.float32))])


class EmulatedSlot:
    """One slot's records, what was saved of them, and the saver.

    Args:
        name: of the saver.
        optimizer_name: of the records.
        weights_PD: (P, D) float32, as they begin; optimizer state is zeros.
        portion: of the rows that the saver saves at a time.
        seed: of the saver.
    """

    def __init__(self, name: str, optimizer_name: str, weights_PD: Floats, portion: float, seed: int) -> None:
        rows, dim = weights_PD.shape
        self.name, self.portion, self._seed = name, 1.0 if name == "everything" else portion, seed
        self.shard = Shard(optimizer(optimizer_name).schema(dim), rows, 0, sealed=False)
        self.everything: Positions = np.arange(rows, dtype=np.int64)
        records_PB = self.shard.gather(self.everything)
        records_PB.view(np.float32)[:, :dim] = weights_PD
        self.shard.scatter_(self.everything, records_PB)
        self.saved_PB = records_PB
        self.since_P = np.zeros(rows, np.int64)  # steps that have changed a row since it was saved
        self.saver = self._new_saver()

    def _new_saver(self) -> Saver:
        """Makes a saver as a new host has it: the present records count as saved."""
        return saver_of(self.name, len(self.everything), self.portion, self.shard.gather_weights, self._seed)

    def note(self, positions_U: Positions) -> None:
        """Notes that a step has changed these rows."""
        self.saver.note(positions_U)
        self.since_P[positions_U] += 1

    def save(self, rows_N: Positions) -> None:
        """Saves these rows as they are. The saver has picked them."""
        self.saved_PB[rows_N] = self.shard.gather(rows_N)
        self.since_P[rows_N] = 0
        self.saver.settle()

    def save_everything(self) -> None:
        """Saves all rows, whatever the saver knows."""
        self.saver.pick(len(self.everything))
        self.save(self.everything)

    def pick(self) -> Positions:
        """Returns the rows of the next save of a portion."""
        return self.saver.pick(max(1, int(self.portion * len(self.everything))))

    def save_if_due(self, step: int, every: int, some: int) -> None:
        """Saves everything every so many steps, and a portion in between."""
        if step % every == 0:
            self.save_everything()
        elif step % some == 0 and self.portion < 1:
            self.save(self.pick())

    def lose(self) -> tuple[int, float]:
        """Restores the slot from what was saved. Returns the updates lost, and the squared L2 change of the weights."""
        before = self.shard.gather_weights(self.everything)
        self.shard.scatter_(self.everything, self.saved_PB)
        change = before - self.shard.gather_weights(self.everything)
        lost, self.since_P[:] = int(self.since_P.sum()), 0
        self.saver = self._new_saver()
        return lost, float(np.sum(np.square(change, dtype=np.float64)))


def interval_of(job: Job) -> float:
    """Returns the seconds between two saves of everything, as many as the portion of lost samples allows."""
    costs = Costs(job.slots, job.slots / job.failures_per_s, k=1, r=max(1, job.slots - 1), **job.costs)  # r: unused
    return partial_interval_s(costs, job.pls)


# time and updates ---------------------------------------------------------------------------------------


@dataclass
class Way:
    """The costs and losses of one way.

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
    """Returns the costs of full recovery: all roll back at each failure. Nothing is lost, so only time is computed."""
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
    """Emulates partial recovery with one saver: makes steps, saves rows and loses them.

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
            slot.shard.apply_(spec, batch, RATE, step, {})
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


# quality ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The options of the models' training.

    Attributes:
        rows: of each table.
        every: steps between two saves of everything; `some`: between those of a portion.
        job: slots, failures a run, optimizer and dimension.
    """

    rows: int
    epochs: int
    batch: int
    steps: int
    every: int
    some: int
    job: Job

    @staticmethod
    def of(arguments: argparse.Namespace, job: Job, interval_s: float, trained: int) -> Training:
        """Makes the workload of so many rows, with saves as often as in the emulation.

        Raises ValueError if there are too few for that.
        """
        steps = arguments.epochs * (trained // arguments.batch_size)
        every = round(interval_s / (job.hours * HOUR_S) * steps)
        some = round(job.portion * every)
        require(
            some >= 1,
            f"a portion of the interval is {job.portion * every:.2g} of {steps} steps: more --epochs, or a smaller"
            " --batch-size",
        )
        return Training(arguments.rows_per_table, arguments.epochs, arguments.batch_size, steps, every, some, job)


class Model(nn.Module):
    """A DLRM without its tables."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        vectors = 1 + CATEGORIES
        self.bottom = nn.Sequential(nn.Linear(INTEGERS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), nn.ReLU())
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.pairs: Tensor

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Maps dense features (N, 13) and embeddings (N, C, D) to logits (N,)."""
        below = self.bottom(dense)
        all_NVD = torch.cat([below[:, None], embedded], dim=1)
        products = (all_NVD @ all_NVD.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        found: Tensor = self.top(torch.cat([below, products], dim=1)).squeeze(1)
        return found


class Tables:
    """All rows of all tables, striped over the slots: row i is on slot i % slots."""

    def __init__(self, training: Training, name: str, seed: int) -> None:
        job, rng = training.job, np.random.default_rng((seed, 1))
        self._rows, self._slots, self._dim = training.rows, job.slots, job.dim
        whole = rng.uniform(-1, 1, (CATEGORIES * training.rows, job.dim)).astype(np.float32)
        whole /= math.sqrt(training.rows)
        self.slots = []
        for index in range(job.slots):
            weights = whole[index :: job.slots]
            self.slots.append(EmulatedSlot(name, job.optimizer, weights, job.portion, seed + index))
        self._spec = optimizer(job.optimizer)

    def rows_of(self, clicks: Clicks) -> tuple[Positions, Tensor]:
        """Returns a batch's distinct rows (U,), ascending, and (N, C), the index of each category among them."""
        all_NC = clicks.categories.astype(np.int64) + self._rows * np.arange(CATEGORIES)
        rows_U, inverse = np.unique(all_NC, return_inverse=True)
        return rows_U, torch.from_numpy(inverse.reshape(all_NC.shape))

    def lookup(self, rows_U: Positions) -> Tensor:
        """Returns the weights of some rows, (U, D) float32."""
        weights = np.empty((len(rows_U), self._dim), np.float32)
        for index, slot in enumerate(self.slots):
            mine = rows_U % self._slots == index
            weights[mine] = slot.shard.gather_weights(rows_U[mine] // self._slots)
        return torch.from_numpy(weights)

    def update(self, rows_U: Positions, gradients: Tensor, step: int) -> int:
        """Applies one step; returns how many rows it has changed."""
        gradients_UD = gradients.numpy()
        for index, slot in enumerate(self.slots):
            mine = rows_U % self._slots == index
            batch = merge([(rows_U[mine] // self._slots, np.ascontiguousarray(gradients_UD[mine]))])
            slot.shard.apply_(self._spec, batch, RATE, step, {})
            slot.note(batch.positions)
        return len(rows_U)


@dataclass(frozen=True)
class Trained:
    """A model's quality on test rows, and the share of all updates of rows that failures have lost."""

    auc: float
    log_loss: float
    lost: float


def train(training: Training, train_on: Clicks, test_on: Clicks, way: str, seed: int) -> Trained:
    """Trains a model with failures, recovering in this way: "exact", or with one of `SAVERS`."""
    torch.manual_seed(seed)
    job, exact = training.job, way == "exact"
    model, tables = Model(job.dim), Tables(training, "everything" if exact else way, seed)
    dense_optimizer = torch.optim.Adagrad(model.parameters(), lr=DENSE_RATE)
    rng = np.random.default_rng((seed, 2))
    failures: dict[int, list[int]] = {}
    for at in [] if exact else rng.integers(1, training.steps + 1, len(job.failures)):
        failures.setdefault(int(at), []).append(int(rng.integers(job.slots)))
    order, step, updates, lost = np.random.default_rng((seed, 3)), 0, 0, 0
    for _ in range(training.epochs):
        shuffled = order.permutation(len(train_on))
        for first in range(0, len(train_on) - training.batch + 1, training.batch):
            step += 1
            batch = train_on[shuffled[first : first + training.batch]]
            rows_U, at_NC = tables.rows_of(batch)
            weights = tables.lookup(rows_U).requires_grad_()
            logits = model(torch.from_numpy(batch.dense), weights[at_NC])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
            dense_optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            dense_optimizer.step()
            assert weights.grad is not None
            updates += tables.update(rows_U, weights.grad, step)
            lost += sum(tables.slots[slot].lose()[0] for slot in failures.get(step, ()))
            for slot in [] if exact else tables.slots:
                slot.save_if_due(step, training.every, training.some)
    return Trained(*_score(model, tables, test_on), lost / updates)


def _score(model: Model, tables: Tables, test_on: Clicks) -> tuple[float, float]:
    rows_U, at_NC = tables.rows_of(test_on)
    with torch.no_grad():
        scores = model(torch.from_numpy(test_on.dense), tables.lookup(rows_U)[at_NC])
        log_loss = nn.functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(test_on.labels))
    return criteo.auc(test_on.labels, scores.numpy()), float(log_loss)


def prepare(arguments: argparse.Namespace, job: Job) -> tuple[Training, Clicks, Clicks]:
    """Returns what `compare` trains: the workload, the rows for it, and those that are held out.

    Raises:
        ValueError, TypeError: the file is none of Criteo's, or a number cannot be.
    """
    require_counts(arguments, "seeds", "epochs", "batch_size", "rows_per_table")
    train_on, test_on = criteo.read(arguments.data, arguments.rows_per_table).split()
    return Training.of(arguments, job, interval_of(job), len(train_on)), train_on, test_on


def compare(job: Job, seeds: int, training: Training, train_on: Clicks, test_on: Clicks) -> list[dict[str, Any]]:
    """Returns a row for each way; prints a line after each seed."""
    torch.set_num_threads(1)  # models this small are slower with more, and their sums depend on it
    found: dict[str, list[Trained]] = {way: [] for way in WAYS}
    for seed in counted("partial: seeds", range(job.seed, job.seed + seeds)):
        for way in WAYS:
            found[way].append(train(training, train_on, test_on, way, seed))
        print(f"seed {seed}: " + ", ".join(f"{way} {found[way][-1].auc:.4f}" for way in WAYS))
    exact = [one.auc for one in found["exact"]]
    return [_row(way, [one.auc for one in found[way]], exact, [one.lost for one in found[way]]) for way in WAYS]


def _row(way: str, areas: Sequence[float], exact: Sequence[float], lost: Sequence[float]) -> dict[str, Any]:
    differences = [mine - theirs for mine, theirs in zip(areas, exact, strict=True)]
    return {
        "way": way,
        "AUC": float(np.mean(areas)),
        "sd": _deviation(areas),
        "- exact": float(np.mean(differences)),
        "sd of that": _deviation(differences),
        "lost updates %": 100 * float(np.mean(lost)),
    }


def _deviation(values: Sequence[float]) -> float | None:
    """Returns the standard deviation of a sample; None for a single number."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# the command ------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench partial`."""
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
    group = parser.add_argument_group("AUC", "of a model that is trained with these losses; left out without --data")
    group.add_argument("--data", metavar="FILE", help="Criteo rows (.tsv or .tsv.gz)")
    group.add_argument("--seeds", type=int, default=5, help="trainings of each way (default 5)")
    group.add_argument("--epochs", type=int, default=1, help="over the rows (default 1)")
    group.add_argument("--batch-size", type=int, default=50, help="rows of a step (default 50)")
    group.add_argument("--rows-per-table", type=int, default=2000, help="of 26 tables (default 2000)")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table, and writes it.

    Raises:
        ValueError, TypeError: a number cannot be, or a cost is not known.
    """
    job = Job.of(arguments)
    prepared = None if arguments.data is None else prepare(arguments, job)
    ways = [full(job), *(emulate(job, name) for name in counted("partial: savers", list(SAVERS)))]
    rows = [way.to_row() for way in ways]
    print(f"{job.hours:g} h, {len(job.failures)} failures, {job.slots} slots, lost samples allowed {job.pls:g}")
    print(table(rows))
    print(PUBLISHED)
    write(arguments.out, "partial", {"header": header(), "costs": job.costs}, rows)
    if prepared is not None:
        areas = compare(job, arguments.seeds, *prepared)
        print(markdown(areas))
        write(arguments.out, "partial-auc", {"header": header(), "costs": job.costs}, areas)
    return 0
