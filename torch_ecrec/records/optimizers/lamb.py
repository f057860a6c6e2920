"""LAMB: Adam's step, u = m' / (sqrt(v') + eps) + d * w, as long as the row is: w -= lr * |w| / |u| * u.

m = b1 * m + (1 - b1) * g and v = b2 * v + (1 - b2) * g^2, with m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at iteration
t; g is a row's gradient, summed over all trainers; m is `momentum1`, v `exp_avg_sq`; d is weight decay. As FBGEMM's
`OptimType.LAMB`; You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020. A
row with u = 0 stays as it is: FBGEMM divides by 0 then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records import moments
from torch_ecrec.records.blocks import sum_of_squares
from torch_ecrec.records.moments import step_moments
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row


@kernel(error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, eps, decay = values_H[0], values_H[1], values_H[2]
    corrected1, corrected2 = values_H[5], values_H[8]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        step_moments(records_PW, position, gradients_UD, i, dim, values_H, delta_UW)
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            n = k + np.uint64(dim)
            below = np.sqrt(records_PW[position, n] / corrected2) + eps
            gradients_UD[i, j] = records_PW[position, k] / corrected1 / below + decay * records_PW[position, j]
        size = np.sqrt(sum_of_squares(gradients_UD, i, dim))
        rate = lr * (np.sqrt(sum_of_squares(records_PW, position, dim)) / size) if size != 0 else np.float32(0)
        for j in range(dim):
            old = records_PW[position, j]
            new = old - rate * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="lamb",
    fixed=moments.DEFAULTS,
    state=(StateField("momentum1"), StateField("exp_avg_sq")),
    kernel=_step,
    classes=("torchrec.optim.optimizers.LAMB",),
    types=("LAMB",),
    of_step=moments.of_step,
    below=moments.BELOW,
)
