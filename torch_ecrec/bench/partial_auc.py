"""What partial recovery does to a model's quality: AUC on Criteo rows beside exact recovery, over several seeds.

A small DLRM is trained on the first rows of a file and scored on the last fifth, its tables in `--slots` slots with
real records, a real optimizer and real savers, as in the emulation of `partial.py`: no cluster, no messages, no files.
When a slot fails, it takes what was saved of it; "exact" loses nothing. Of one seed, all ways have the same initial
model, batches and failures, so what differs by way is what was lost; seeds differ in all three.

    AUC        mean over seeds, and their standard deviation
    - exact    the same of the differences from exact recovery, seed by seed

Shapes: N rows of a batch, C = 26 categories of each, U table rows that they have, D weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_ecrec.bench.emulation import EmulatedSlot, Job
from torch_ecrec.demo import criteo
from torch_ecrec.demo.criteo import CATEGORIES, INTEGERS, Clicks
from torch_ecrec.overhead.model import HOUR_S
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.positions import Positions
from torch_ecrec.records.savers import SAVERS
from torch_ecrec.runtime.checks import require, require_int

WAYS = ("exact", *SAVERS)
HIDDEN = 64
RATE, DENSE_RATE = 0.05, 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench partial` takes for this."""
    group = parser.add_argument_group("AUC", "of a model that is trained with these losses; left out without --data")
    group.add_argument("--data", metavar="FILE", help="Criteo rows (.tsv or .tsv.gz)")
    group.add_argument("--seeds", type=int, default=5, help="trainings of each way (default 5)")
    group.add_argument("--epochs", type=int, default=1, help="over the rows (default 1)")
    group.add_argument("--batch-size", type=int, default=50, help="rows of a step (default 50)")
    group.add_argument("--rows-per-table", type=int, default=2000, help="of 26 tables (default 2000)")


@dataclass(frozen=True)
class Training:
    """How the models are trained.

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
        """Makes the workload of so many rows, with saves as often as in the emulation. Raises ValueError, TypeError for
        what cannot be."""
        for name in ("seeds", "epochs", "batch_size", "rows_per_table"):
            require_int(name, getattr(arguments, name), 1)
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
    """DLRM without its tables."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        vectors = 1 + CATEGORIES
        self.bottom = nn.Sequential(nn.Linear(INTEGERS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), nn.ReLU())
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.pairs: Tensor

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(N, 13) and (N, C, D) to (N,) logits."""
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
        """Distinct rows (U,) of a batch, ascending, and (N, C) where each of its categories is among them."""
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
        """One step; returns how many rows it has changed."""
        gradients_UD = gradients.numpy()
        for index, slot in enumerate(self.slots):
            mine = rows_U % self._slots == index
            batch = merge([(rows_U[mine] // self._slots, np.ascontiguousarray(gradients_UD[mine]))])
            slot.shard.apply_(self._spec, batch, RATE, step, {})
            slot.note(batch.positions)
        return len(rows_U)


def train(training: Training, train_on: Clicks, test_on: Clicks, way: str, seed: int) -> tuple[float, float]:
    """AUC on other rows, and the share of all updates of rows that failures have thrown away."""
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
    return _score(model, tables, test_on), lost / updates


def _score(model: Model, tables: Tables, test_on: Clicks) -> float:
    rows_U, at_NC = tables.rows_of(test_on)
    with torch.no_grad():
        scores = model(torch.from_numpy(test_on.dense), tables.lookup(rows_U)[at_NC])
    return criteo.auc(test_on.labels, scores.numpy())


def compare(
    arguments: argparse.Namespace, job: Job, interval_s: float, told: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """A row of each way. `interval_s`: between saves of everything. `told`: gets a line after each seed.

    Raises:
        ValueError: the file is none of Criteo's, or a number cannot be.
    """
    clicks = criteo.read(arguments.data, arguments.rows_per_table)
    train_on, test_on = clicks.split()
    training = Training.of(arguments, job, interval_s, len(train_on))
    torch.set_num_threads(1)  # models this small are slower with more, and their sums depend on it
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(job.seed, job.seed + arguments.seeds):
        for way in WAYS:
            found[way].append(train(training, train_on, test_on, way, seed))
        told(f"seed {seed}: " + ", ".join(f"{way} {found[way][-1][0]:.4f}" for way in WAYS))
    exact = [area for area, _ in found["exact"]]
    return [_row(way, [a for a, _ in found[way]], exact, [lost for _, lost in found[way]]) for way in WAYS]


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
