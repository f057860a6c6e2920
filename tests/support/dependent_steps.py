"""A trainer's script for the simulated cluster: one number, no model; every step depends on all that it has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from virtual_trainers import TurnsSession

Seen = Callable[[int, Sequence[Tensor], Sequence[Tensor]], None]


def begin(rank: int, session: TurnsSession, dense: Tensor) -> tuple[Tensor, int]:
    """The dense number, (1,) float64, and the first step to make: as of its snapshot where training has begun."""
    if not session.restarted:
        return dense, 1
    done, parts = session.resume()
    if parts:  # after step 0 in a cluster that was not restored there are none
        payload, header = parts[rank]
        assert header == [done]
        dense = payload.clone().view(torch.float64)
    return dense, done + 1


def train(
    rank: int,
    session: TurnsSession,
    dense: Tensor,
    steps: range,
    touched: float = 0.3,
    seen: Seen = lambda step, rows, weights: None,
) -> None:
    """Makes these steps.

    Args:
        rank: of the trainer.
        session: its own.
        dense: (1,) float64: part of every gradient and snapshot, and changed by every lookup.
        steps: which.
        touched: the portion of each table group's rows that a step looks up.
        seen: is told of each lookup: step, rows and weights of each table group.
    """
    for step in steps:
        rng = np.random.default_rng([step, rank])
        rows = [
            torch.from_numpy(np.flatnonzero(rng.random(table_group.rows) < touched))
            for table_group in session.job.table_groups
        ]
        weights = [torch.cat(parts) for parts in session.lookup_parts(rows)]
        seen(step, rows, weights)
        dense = dense * 0.5 + sum(float(part.double().sum()) for part in weights)
        session.push(rows, [torch.sin(part * 3 + step + dense).float() for part in weights], [0.1] * len(rows))
        session.snapshot(dense.view(torch.uint8).clone(), [step])
    session.flush()
