"""Partial row-wise Adam: Adam with one v per row, v = b2 * v + (1 - b2) * mean(g * g).

m' = m / (1 - b1^t), v' = v / (1 - b2^t) at iteration t; w -= lr * (m' / (sqrt(v') + eps) + d * w). g is a row's
gradient, summed over all trainers; m is `momentum1`, v `exp_avg_sq`; d is weight decay, decoupled. As FBGEMM's
`OptimType.PARTIAL_ROWWISE_ADAM`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records import moments
from torch_ecrec.records.blocks import sum_of_squares
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row


@kernel(error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, eps, decay = values_H[0], values_H[1], values_H[2]
    beta1, rest1, corrected1 = values_H[3], values_H[4], values_H[5]
    beta2, rest2, corrected2 = values_H[6], values_H[7], values_H[8]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        old_v = records_PW[position, 2 * dim]
        new_v = beta2 * old_v + rest2 * (sum_of_squares(gradients_UD, i, dim) / np.float32(dim))
        records_PW[position, 2 * dim] = new_v
        delta_UW[i, 2 * dim] = np.float32(old_v).view(np.uint32) ^ np.float32(new_v).view(np.uint32)
        below = np.sqrt(new_v / corrected2) + eps
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            old, old_m = records_PW[position, j], records_PW[position, k]
            new_m = beta1 * old_m + rest1 * gradients_UD[i, j]
            new = old - lr * (new_m / corrected1 / below + decay * old)
            records_PW[position, k] = new_m
            records_PW[position, j] = new
            delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="partial_rowwise_adam",
    fixed=moments.DEFAULTS,
    state=(StateField("momentum1"), StateField("exp_avg_sq", per_row=True)),
    kernel=_step,
    classes=("torchrec.optim.optimizers.PartialRowWiseAdam",),
    types=("PARTIAL_ROWWISE_ADAM",),
    of_step=moments.of_step,
    below=moments.BELOW,
)
