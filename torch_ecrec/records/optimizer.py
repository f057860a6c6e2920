"""What a sparse optimizer declares; each is one file in `optimizers/`.

    OPTIMIZER = SparseOptimizer(name="sgd", fixed={}, state=(), kernel=_apply, classes=("torch.optim.sgd.SGD",))

The kernel applies one step to some records of a slab and says what that changed:

    kernel(records_PW, positions_V, gradients, dim, lr, fixed_H, delta_VW)

    records_PW   (P, W) float32, changed in place
    positions_V  (V,) int64, which records, without duplicates
    gradients    `merge.Merged.places()` and index: see `merge.sum_block`
    lr, fixed_H  float32: the learning rate of the step; (H,) the other hyperparameters in the order of `fixed`
    delta_VW     (V, W) uint32, written: old XOR new of the records' bytes

It works block by block (`merge.BLOCK`), so that sums of gradients stay in the cache. Arithmetic is float32, in a fixed
order, one thread, without fast-math or fused multiply-add: a step may be made again on another host, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.records.merge import Merged
from torch_ecrec.records.positions import Bytes, Floats, check_positions
from torch_ecrec.records.schema import Schema, StateField
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require


@dataclass(frozen=True)
class SparseOptimizer:
    """One optimizer.

    Args:
        name: as users and jobs name it; that of its file.
        fixed: hyperparameters that stay for a job, with their defaults (those of FBGEMM); the learning rate travels
            with every step.
        state: what it keeps for a row.
        kernel: see the module.
        classes: of torch and TorchRec that mean it, by module and name.
    """

    name: str
    fixed: Mapping[str, float]
    state: tuple[StateField, ...]
    kernel: Callable[..., None]
    classes: tuple[str, ...]

    def schema(self, dim: int) -> Schema:
        """Records of tables with `dim` weights in a row."""
        return Schema.of(dim, self.state)

    def hyperparameters(self, given: Mapping[str, float]) -> NDArray[np.float32]:
        """(H,) for the kernel, in the order of `fixed`; what is not given has its default.

        Raises:
            ValueError: one that this optimizer does not have.
        """
        unknown = sorted(given.keys() - self.fixed.keys())
        require(
            not unknown, f"optimizer {self.name} has no {', '.join(unknown)}; it has {', '.join(self.fixed) or 'none'}"
        )
        return np.array([given.get(name, default) for name, default in self.fixed.items()], np.float32)

    def update_(
        self,
        records_PW: Floats,
        merged: Merged,
        lr: float,
        fixed: Mapping[str, float] | None = None,
        out: Bytes | None = None,
    ) -> Bytes:
        """Applies one step to some records, in place.

        Args:
            records_PW: (P, W) float32, contiguous, of `schema(D)`. Mutated.
            merged: positions (V,), without duplicates, and gradients (V, D). Must not alias `records_PW`.
            lr: learning rate of this step.
            fixed: hyperparameters other than their defaults.
            out: (V, B) uint8 to put the result in, contiguous and 4-byte aligned; fresh memory without it.

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
        wanted = self.schema(dim).width
        require(width == wanted, f"records of {self.name} with dim {dim} must have {wanted} floats, got {width}")
        positions_V = check_positions(merged.positions, len(records_PW))
        shape = (len(positions_V), 4 * width)
        if out is None:
            out = shared.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"`out` must be contiguous uint8 of shape {shape}, got {out.dtype} of {out.shape}")
        gradients: tuple[Any, ...] = (*merged.places(), merged.index)
        self.kernel(
            records_PW, positions_V, gradients, dim, np.float32(lr), self.hyperparameters(fixed or {}),
            out.view(np.uint32),
        )  # fmt: skip
        return out

    def warm(self) -> None:
        """Compiles or loads the kernel."""
        merged = Merged(np.zeros(1, np.int64), [np.ones((1, 1), np.float32)], np.zeros((1, 1), np.int64))
        self.update_(np.zeros((1, self.schema(1).width), np.float32), merged, 0.1)
