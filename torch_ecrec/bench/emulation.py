"""What `partial.py` emulates: a training whose slots fail, and a slot with what was saved of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from torch_ecrec.overhead.model import HOUR_S, Costs, partial_interval_s
from torch_ecrec.overhead.report import measured
from torch_ecrec.records.merge import Merged, merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.positions import Floats, Positions
from torch_ecrec.records.savers import Saver, saver_of
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.checks import require, require_int

COSTS = ("save_s", "load_s", "restart_s")
ZIPF = 1.2


@dataclass(frozen=True)
class Job:
    """What is emulated.

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
        """As the command line says. Raises ValueError, TypeError."""
        for name in ("slots", "failures", "steps", "rows", "touched", "dim"):
            require_int(name, getattr(arguments, name), 1)
        require(arguments.hours > 0, f"`hours` must be positive, got {arguments.hours}")
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
        require(costs["save_s"] > 0, f"`save_s` must be positive, got {costs['save_s']}")
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
        """How often per second any slot fails."""
        return len(self.failures) / (self.hours * HOUR_S)

    def steps_of(self, seconds: float, what: str) -> int:
        """How many steps stand for so long. Raises ValueError where that is less than one."""
        steps = seconds * self.steps / (self.hours * HOUR_S)
        require(steps >= 1, f"{what} is {steps:.2g} steps: raise --steps to {int(self.steps / steps) + 1} or more")
        return round(steps)

    def batch(self, step: int, slot: int) -> Merged:
        """What a step does to a slot: the same for every way."""
        rng = np.random.default_rng((self.seed, step, slot))
        at = np.unique((rng.zipf(ZIPF, self.draws) - 1) % self.rows).astype(np.int64)
        return merge([(at, rng.standard_normal((len(at), self.dim), np.float32))])


class EmulatedSlot:
    """One slot's records, what was saved of them, and its saver.

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
        """As a new host has it: what is there is what was saved."""
        return saver_of(self.name, len(self.everything), self.portion, self.shard.gather_weights, self._seed)

    def note(self, positions_U: Positions) -> None:
        """A step has changed these rows."""
        self.saver.note(positions_U)
        self.since_P[positions_U] += 1

    def save(self, rows_N: Positions) -> None:
        """These rows, which the saver has picked, are durable as they are."""
        self.saved_PB[rows_N] = self.shard.gather(rows_N)
        self.since_P[rows_N] = 0
        self.saver.settle()

    def save_everything(self) -> None:
        """All of them, whatever the saver knows."""
        self.saver.pick(len(self.everything))
        self.save(self.everything)

    def pick(self) -> Positions:
        """The rows of a save of a portion."""
        return self.saver.pick(max(1, int(self.portion * len(self.everything))))

    def save_if_due(self, step: int, every: int, some: int) -> None:
        """Everything every so many steps, and a portion between."""
        if step % every == 0:
            self.save_everything()
        elif step % some == 0 and self.portion < 1:
            self.save(self.pick())

    def lose(self) -> tuple[int, float]:
        """It begins anew with what was saved of it: updates that are lost, and squared L2 of the weights' change."""
        before = self.shard.gather_weights(self.everything)
        self.shard.scatter_(self.everything, self.saved_PB)
        change = before - self.shard.gather_weights(self.everything)
        lost, self.since_P[:] = int(self.since_P.sum()), 0
        self.saver = self._new_saver()
        return lost, float(np.sum(np.square(change, dtype=np.float64)))


def interval_of(job: Job) -> float:
    """Seconds between two saves of everything, as seldom as the portion of lost samples allows."""
    costs = Costs(job.slots, job.slots / job.failures_per_s, k=1, r=max(1, job.slots - 1), **job.costs)  # r: unused
    return partial_interval_s(costs, job.pls)
