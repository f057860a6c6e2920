"""Adam: m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g^2; w -= lr * (m' / (sqrt(v') + eps) + d * w).

m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at iteration t; g is a row's gradient, summed over all trainers; m is
`momentum1`, v `exp_avg_sq`; d is weight decay, decoupled. Rows that are not in a step stay as they are. As FBGEMM's
`OptimType.ADAM`; Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records import moments
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
