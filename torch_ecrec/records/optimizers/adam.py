"""Adam: m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g^2; w -= lr * (m' / (sqrt(v') + eps) + d * w).

m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at iteration t; g is a row's gradient, summed over all trainers; m is
`momentum1`, v `exp_avg_sq`; d is weight decay, decoupled. Rows that are not in a step stay as they are. As FBGEMM's
`OptimType.ADAM`; Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from torch_ecrec.records import moments
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernels import prefetch_row


@njit(nogil=True, cache=True, error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, eps, decay = values_H[0], values_H[1], values_H[2]
    beta1, rest1, corrected1 = values_H[3], values_H[4], values_H[5]
    beta2, rest2, corrected2 = values_H[6], values_H[7], values_H[8]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(dim):  # a loop for each field: with all in one there are too many arrays for vector code
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            old_m = records_PW[position, k]
            new_m = beta1 * old_m + rest1 * gradients_UD[i, j]
            records_PW[position, k] = new_m
            delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
        for j in range(dim):
            n = np.uint64(2) * np.uint64(dim) + np.uint64(j)
            g = gradients_UD[i, j]
            old_v = records_PW[position, n]
            new_v = beta2 * old_v + rest2 * (g * g)
            records_PW[position, n] = new_v
            delta_UW[i, n] = np.float32(old_v).view(np.uint32) ^ np.float32(new_v).view(np.uint32)
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)
            n = k + np.uint64(dim)
            old = records_PW[position, j]
            below = np.sqrt(records_PW[position, n] / corrected2) + eps
            new = old - lr * (records_PW[position, k] / corrected1 / below + decay * old)
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="adam",
    fixed=moments.DEFAULTS,
    state=(StateField("momentum1"), StateField("exp_avg_sq")),
    kernel=_step,
    classes=("torch.optim.adam.Adam", "torchrec.optim.optimizers.Adam"),
    types=("ADAM",),
    of_step=moments.of_step,
    below=moments.BELOW,
)
