"""LARS: a learning rate for each row, a = lr * eta * |w| / (|g| + d * |w|); m = momentum * m + a * (g + d * w); w -= m.

g is a row's gradient, summed over all trainers, d the weight decay, m the row's `momentum1`. As FBGEMM's
`OptimType.LARS_SGD`; You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017. Where
|g| + d * |w| is 0, a is 0: FBGEMM divides 0 by 0 then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records.blocks import sum_of_squares
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row


@kernel(error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, momentum, eta, decay = values_H[0], values_H[1], values_H[2], values_H[3]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        length = np.sqrt(sum_of_squares(records_PW, position, dim))
        below = np.sqrt(sum_of_squares(gradients_UD, i, dim)) + decay * length
        rate = lr * eta * length / below if below != 0 else np.float32(0)
        for j in range(dim):
            k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
            old, old_m = records_PW[position, j], records_PW[position, k]
            new_m = momentum * old_m + rate * (gradients_UD[i, j] + decay * old)
            new = old - new_m
            records_PW[position, k] = new_m
            records_PW[position, j] = new
            delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="lars_sgd",
    fixed={"momentum": 0.9, "eta": 0.001, "weight_decay": 0.0},
    state=(StateField("momentum1"),),
    kernel=_step,
    classes=("torchrec.optim.optimizers.LarsSGD",),
    types=("LARS_SGD",),
)
