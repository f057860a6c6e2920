"""One factor scales the paper's models and times to one machine.

    rows / factor             Criteo's 197,767,168 rows are 193,132 at the default of 1,024
    times / (60 * factor / 1,024)   Ckpt-30 saves every 30 s of training there

So a checkpoint is to its interval, and a rebuild to the training beside it, about what they were, if the store, the
network and the processors were slower by the same. They are not: so checkpoints are counted for stores of three named
bandwidths. Dims and the batch stay.

The models: `2S` has twice the rows of Criteo, `2S-2D` rows of twice the dim as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from torch_ecrec.bench import workload
from torch_ecrec.experiments.modes import Mode
from torch_ecrec.records.optimizers import optimizer

ROWS = 193_132 * 1_024  # of Criteo's tables together
TABLES, DIM, BATCH = 26, 128, 2048
DEFAULT_FACTOR = 1_024
TIME = 60.0  # at the default factor
MODELS: Mapping[str, tuple[int, int]] = {  # rows and dim, of Criteo's
    "Criteo": (1, 1),
    "2S": (2, 1),
    "2S-2D": (2, 2),
    "4S": (4, 1),
    "8S": (8, 1),
}
BANDWIDTHS = {"slow store": 25e6, "store": 100e6, "fast store": 400e6}  # bytes/s of all servers together
# What processes take without records. Measured: 1.63 GB for a coordinator, three servers and two workers.
BASE_BYTES, SERVER_BYTES, WORKER_BYTES = 0.5e9, 0.2e9, 0.4e9
SPARE_BYTES = 1.5e9  # for this process and the machine
FACTORS_MOST = 1 << 20


@dataclass(frozen=True)
class Scale:
    """A factor, and what follows from it."""

    factor: int = DEFAULT_FACTOR

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= FACTORS_MOST:
            raise ValueError(f"`--factor` must be from 1 to {FACTORS_MOST:,}, got {self.factor}")

    def __str__(self) -> str:
        return f"rows / {self.factor:,}, times / {self.time:g}"

    @property
    def time(self) -> float:
        """What the paper's times are divided by."""
        return TIME * self.factor / DEFAULT_FACTOR

    def shape(self, model: str, data: str | None = None) -> workload.Shape:
        """Returns a model and its batches.

        Args:
            model: one of `MODELS`.
            data: a file of Criteo rows; None: made-up ones, skewed by Zipf's law.
        """
        rows, dim = MODELS[model]
        width = DIM * dim
        return workload.Shape(
            tables=TABLES,
            rows=max(2, round(ROWS * rows / self.factor / TABLES)),
            dim=width,
            batch=BATCH,
            bottom=(512, 256, width),
            top=(1024, 1024, 512, 256, 1),
            data=data,
        )

    def record_bytes(self, model: str) -> int:
        """Returns the bytes of all records of a model, with optimizer state."""
        shape = self.shape(model)
        return shape.tables * shape.rows * optimizer("rowwise_adagrad").schema(shape.dim).nbytes

    def memory(self, model: str, modes: Sequence[Mode], workers: int) -> float:
        """Returns the bytes that a model takes if these modes are there at once."""
        total = SPARE_BYTES
        for mode in {mode.trained.group: mode for mode in modes}.values():
            code = mode.trained.code
            assert code is not None, "all modes are ours"
            total += self.record_bytes(model) * (1 + (1 / mode.k if mode.k else 0))
            total += BASE_BYTES + code.slots * SERVER_BYTES + workers * WORKER_BYTES
        return total


def require_memory(scale: Scale, needs: Sequence[tuple[str, Sequence[Mode], int]], available: float = 0.0) -> None:
    """Checks that each of these groups fits the memory.

    Args:
        scale: of the run.
        needs: model, modes at once, and workers, of each group.
        available: bytes; 0: what this machine has to give now.

    Raises:
        ValueError: one does not. The message names a factor that fits, if there is one.
    """
    available = available or float(psutil.virtual_memory().available)

    def worst(one: Scale) -> tuple[float, str]:
        return max((one.memory(*need), need[0]) for need in needs)

    most, model = worst(scale)
    if most <= available:
        return
    factor = scale.factor
    while factor < FACTORS_MOST and worst(Scale(factor))[0] > available:
        factor *= 2
    fits = factor < FACTORS_MOST
    raise ValueError(
        f"{model} at rows / {scale.factor:,} takes {most / 1e9:.1f} GB with all its modes at once, and"
        f" {available / 1e9:.1f} GB are free: "
        + (f"take --factor {factor}" if fits else "no factor is small enough; take a machine with more memory")
    )
