"""Defines a sparse optimizer. Each is declared in a file of its own in `optimizers/`.

    OPTIMIZER = SparseOptimizer(name="sgd", fixed={}, state=(), kernel=_step, classes=("torch.optim.sgd.SGD",))

Hyperparameters are of two kinds. *Fixed* ones are the job's. Those that *travel* come with every step: the learning
rate, and the iteration, which is the number of the training step, from 1. Nothing counts iterations: a step that is
made again, after a loss or after going back, is the same iteration. `of_step` makes of both what the kernel is given.

The kernel applies a step to a block of records and says what that changed: see `blocks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.records.blocks import blockwise
from torch_ecrec.records.merge import Merged
from torch_ecrec.records.positions import Bytes, Floats, Positions, check_positions
from torch_ecrec.records.schema import WORD_BYTES, Schema, StateField
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require, take_float

_NO_SEALS = np.empty(0, np.uint32)

OfStep = Callable[[float, int, Mapping[str, float]], Sequence[float]]


def rate_then_fixed(lr: float, iteration: int, fixed: Mapping[str, float]) -> Sequence[float]:
    """Returns the learning rate, then the fixed hyperparameters in their order."""
    return (lr, *fixed.values())


@dataclass(frozen=True)
class SparseOptimizer:
    """A sparse optimizer: its names, hyperparameters, state and kernel.

    Args:
        name: its name for users, in jobs, and of its file.
        fixed: hyperparameters that stay for a job, with their defaults (those of FBGEMM).
        state: what it keeps for a row.
        kernel: steps a block, see `blocks.py`.
        classes: of torch and TorchRec that mean it, by module and name.
        types: FBGEMM's `EmbOptimType`s that mean it, by name.
        of_step: (learning rate, iteration from 1, all of `fixed` in order) -> what the kernel is given as `values_H`.
        below: fixed ones that must be less than this.
        choices: fixed ones that must be one of these.
    """

    name: str
    fixed: Mapping[str, float]
    state: tuple[StateField, ...]
    kernel: Callable[..., None]
    classes: tuple[str, ...]
    types: tuple[str, ...] = ()
    of_step: OfStep = rate_then_fixed
    below: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> Any:
        """The kernel for any number of records."""
        return blockwise(self.kernel)

    @cached_property
    def blocks_of_halves(self) -> Any:
        """The kernel for any number of records whose weights have 16 bits."""
        return blockwise(self.kernel, halves=True)

    def schema(self, dim: int, weights: str = "float32") -> Schema:
        """Returns the schema of tables with `dim` weights of a dtype in a row."""
        return Schema.of(dim, self.state, weights)

    def complete(self, given: Mapping[str, float]) -> dict[str, float]:
        """Returns all fixed hyperparameters in the order of `fixed`, with defaults for those not given.

        Raises:
            ValueError: one that this optimizer does not have, or whose value is out of range.
        """
        unknown = sorted(given.keys() - self.fixed.keys())
        require(
            not unknown, f"optimizer {self.name} has no {', '.join(unknown)}; it has {', '.join(self.fixed) or 'none'}"
        )
        found = {name: take_float(name, given.get(name, default)) for name, default in self.fixed.items()}
        for name, value in found.items():
            require(value >= 0, f"`{name}` must not be negative, got {value}")
            require(value < math.inf, f"`{name}` must be finite, got {value}")
            most = self.below.get(name)
            require(most is None or value < most, f"`{name}` of {self.name} must be less than {most}, got {value}")
            choices = self.choices.get(name)
            require(choices is None or value in choices, f"`{name}` of {self.name} must be one of {choices}: {value}")
        return found

    def values(self, lr: float, iteration: int, fixed: Mapping[str, float]) -> NDArray[np.float32]:
        """Returns the numbers that the kernel gets in a step: (H,) float32.

        Raises:
            ValueError: the iteration is not from 1, or as `complete`.
        """
        require(iteration >= 1, f"`iteration` must be at least 1, got {iteration}")
        return np.array(self.of_step(lr, iteration, self.complete(fixed)), np.float32)

    def update_(
        self,
        records_PW: Floats,
        merged: Merged,
        lr: float,
        iteration: int,
        fixed: Mapping[str, float] | None = None,
        out: Bytes | None = None,
        weights: str = "float32",
        seals_V: SealsOf | None = None,
        at_V: Positions | None = None,
    ) -> Bytes:
        """Applies one optimizer step to some records, in place.

        Args:
            records_PW: (P, W) float32, contiguous: the memory of records of `schema(D, weights)`. Mutated.
            merged: positions (V,), without duplicates, and gradients (V, D). Must not alias `records_PW`.
            lr: learning rate of this step.
            iteration: number of this step of training, from 1.
            fixed: hyperparameters other than their defaults.
            out: (V, B) uint8 to put the result in, contiguous and 4-byte aligned; fresh memory without it.
            weights: their dtype. Those of 16 bits are float32 while they are stepped, and then rounded (`halves.py`).
            seals_V: (V,) uint32 to put the seal of every delta in.
            at_V: (V,) int64, where each record lies in `records_PW`; None: at its position.

        Returns:
            delta_VB: (V, B) uint8, old XOR new of each record's bytes.

        Raises:
            ValueError: a shape, a dtype or a hyperparameter does not fit.
            IndexError: a position is out of range. Nothing was changed then.

        Not checked: that positions are without duplicates. `merge` makes them so.
        """
        if records_PW.ndim != 2 or records_PW.dtype != np.float32 or not records_PW.flags.c_contiguous:
            raise ValueError(f"`records_PW` must be contiguous 2-D float32, got {records_PW.ndim}-D {records_PW.dtype}")
        dim, width = merged.dim, records_PW.shape[1]
        schema = self.schema(dim, weights)
        wanted = schema.nbytes // WORD_BYTES
        require(width == wanted, f"records of {self.name} with dim {dim} must have {wanted} floats, got {width}")
        positions_V = check_positions(merged.positions if at_V is None else at_V, len(records_PW))
        shape = (len(positions_V), 4 * width)
        if out is None:
            out = shared.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"`out` must be contiguous uint8 of shape {shape}, got {out.dtype} of {out.shape}")
        gradients = merged.arguments()
        if seals_V is None:
            seals_V = _NO_SEALS
        elif seals_V.shape != positions_V.shape or seals_V.dtype != np.uint32:
            raise ValueError(f"`seals_V` must be uint32 of {positions_V.shape}, got {seals_V.dtype} of {seals_V.shape}")
        values_H = self.values(lr, iteration, fixed or {})
        if not schema.halves:
            self.blocks(records_PW, positions_V, gradients, dim, values_H, out.view(np.uint32), seals_V)
            return out
        words_PM, halves_PH = records_PW.view(np.uint32), records_PW.view(np.uint16)
        step, more = self.blocks_of_halves, (dim, schema.bfloat16, values_H, out.view(np.uint32), seals_V)
        step(words_PM, halves_PH, positions_V, gradients, *more)
        return out

    def warm(self) -> None:
        """Compiles or loads the kernel."""
        merged = Merged(np.zeros(1, np.int64), [np.ones((1, 1), np.float32)], np.zeros((1, 1), np.int64))
        for weights in ("float32", "float16"):
            words = self.schema(1, weights).nbytes // WORD_BYTES
            self.update_(np.zeros((1, words), np.float32), merged, 0.1, 1, weights=weights)
