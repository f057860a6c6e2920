"""SGD with momentum: m = momentum * m + (g + d * w); w -= lr * m, with weight decay d, on the rows of a step only.

g is a row's gradient, summed over all trainers; m its `momentum1`. As `torch.optim.SGD` does on rows that have
gradients in every step. FBGEMM's `EXACT_SGD` has no momentum; TorchRec takes and drops it.
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
    lr, momentum, decay = values_H[0], values_H[1], values_H[2]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            old, old_m = records_PW[position, j], records_PW[position, k]
            new_m = momentum * old_m + (gradients_UD[i, j] + decay * old)
            new = old - lr * new_m
            records_PW[position, k] = new_m
            records_PW[position, j] = new
            delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="momentum_sgd",
    fixed={"momentum": 0.9, "weight_decay": 0.0},
    state=(StateField("momentum1"),),
    kernel=_step,
    classes=(),
)
