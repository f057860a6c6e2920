"""Partial row-wise LAMB: LAMB with one v per row, v = b2 * v + (1 - b2) * mean(g * g).

u = m' * (1 / (sqrt(v') + eps)) + d * w; w -= lr * |w| / |u| * u, with m = b1 * m + (1 - b1) * g, m' = m / (1 - b1^t)
and v' = v / (1 - b2^t) at iteration t; g is a row's gradient, summed over all trainers; m is `momentum1`, v
`exp_avg_sq`; d is weight decay. As FBGEMM's `OptimType.PARTIAL_ROWWISE_LAMB`. A row with u = 0 stays as it is: FBGEMM
divides by 0 then.
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
        scale = np.float32(1) / (np.sqrt(new_v / corrected2) + eps)
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            old_m = records_PW[position, k]
            new_m = beta1 * old_m + rest1 * gradients_UD[i, j]
            gradients_UD[i, j] = new_m / corrected1 * scale + decay * records_PW[position, j]
            records_PW[position, k] = new_m
            delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
        size = np.sqrt(sum_of_squares(gradients_UD, i, dim))
        rate = lr * (np.sqrt(sum_of_squares(records_PW, position, dim)) / size) if size != 0 else np.float32(0)
        for j in range(dim):
            old = records_PW[position, j]
            new = old - rate * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="partial_rowwise_lamb",
    fixed=moments.DEFAULTS,
    state=(StateField("momentum1"), StateField("exp_avg_sq", per_row=True)),
    kernel=_step,
    classes=("torchrec.optim.optimizers.PartialRowWiseLAMB",),
    types=("PARTIAL_ROWWISE_LAMB",),
    of_step=moments.of_step,
    below=moments.BELOW,
)
