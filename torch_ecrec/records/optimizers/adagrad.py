"""Adagrad: s += g * g; w -= lr * g / (sqrt(s) + eps), element by element.

g is a row's gradient, summed over all trainers; s its `momentum1`. As FBGEMM's `OptimType.EXACT_ADAGRAD`; Duchi, Hazan
and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row


@kernel(error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, eps = values_H[0], values_H[1]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(dim):
            # Unsigned: a sum that might be negative would count from the end, and the loop would not be vector code.
            k = np.uint64(dim) + np.uint64(j)
            gradient = gradients_UD[i, j]
            old_state = records_PW[position, k]
            new_state = old_state + gradient * gradient
            old = records_PW[position, j]
            new = old - lr * gradient / (np.sqrt(new_state) + eps)
            records_PW[position, k] = new_state
            records_PW[position, j] = new
            delta_UW[i, k] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="adagrad",
    fixed={"eps": 1e-8},
    state=(StateField("momentum1"),),
    kernel=_step,
    classes=("torch.optim.adagrad.Adagrad", "torchrec.optim.optimizers.Adagrad"),
    types=("EXACT_ADAGRAD",),
)
