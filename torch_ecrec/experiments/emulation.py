"""Cells without a cluster: what `bench partial` emulates of CPR's ways of recovery.

    accuracy   a small DLRM is trained on one pass over rows, and loses slots; its AUC and log loss after that
    emulated   what failures and guards against them cost 56 hours of training, as a share of it

"exact" stands for parity, and for going back to a checkpoint as well: both end with the bits of the run that lost
nothing, so it is run once for each seed, without failures.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_ecrec.bench import partial
from torch_ecrec.demo import criteo
from torch_ecrec.records.savers import SAVERS

EXACT, FULL = "exact", "full"
LINES = 40_000  # of made-up rows, where there is no file


def require_way(name: str) -> None:
    """Raises ValueError unless there is such a way of recovery."""
    if name not in (EXACT, FULL, *SAVERS):
        raise ValueError(f"unknown way {name!r}; there are {EXACT}, {FULL}, {', '.join(SAVERS)}")


def _arguments(options: Sequence[str], seed: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    partial.add_arguments(parser)
    return parser.parse_args([*options, "--seed", str(seed)])


def cost(options: Sequence[str], way: str, seed: int) -> dict[str, Any]:
    """Returns `overhead`, what a way of recovery costs as a share of the training time, and its parts.

    Args:
        options: of `bench partial`.
        way: of recovery, `FULL` or a saver.
        seed: of failures, rows and gradients.
    """
    job = partial.Job.of(_arguments(options, seed))
    found = partial.full(job) if way == FULL else partial.emulate(job, way)
    return {"overhead": found.total, **dataclasses.asdict(found)}


def quality(options: Sequence[str], way: str, seed: int, failures: int, data: str | None) -> dict[str, Any]:
    """Trains a model with failures; returns `auc`, `log_loss`, and `lost`, the share of updates lost.

    Args:
        options, seed: as for `cost`.
        way: of recovery, `EXACT` or a saver.
        failures: in one training. Of `EXACT` none is made to happen.
        data: a file of Criteo rows; None: made-up ones.
    """
    arguments = _arguments(options, seed)
    arguments.failures = max(failures, 1)
    job = partial.Job.of(arguments)
    clicks = (
        criteo.synthetic(LINES, seed, arguments.rows_per_table)
        if data is None
        else criteo.read(data, arguments.rows_per_table)
    )
    train_on, test_on = clicks.split()
    training = partial.Training.of(arguments, job, partial.interval_of(job), len(train_on))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small are slower with more, and their sums depend on it
    try:
        return dataclasses.asdict(partial.train(training, train_on, test_on, way, seed))
    finally:
        torch.set_num_threads(threads)
