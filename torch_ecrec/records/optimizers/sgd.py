"""SGD: w -= lr * g.

g is a row's gradient, summed over all trainers. As FBGEMM's `OptimType.EXACT_SGD`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from torch_ecrec.records.merge import BLOCK, sum_block
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.runtime.kernels import prefetch_row


@njit(nogil=True, cache=True, error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, lr: Any, delta_UW: Any) -> None:
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(gradients_UD.shape[1]):
            old = records_PW[position, j]
            new = old - lr * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@njit(nogil=True, cache=True)
def _apply(records_PW: Any, positions_V: Any, gradients: Any, dim: Any, lr: Any, fixed_H: Any, delta_VW: Any) -> None:
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        sums = sum_ND[: last - first]
        sum_block(gradients, first, seen_N, sums)
        _step(records_PW, positions_V[first:last], sums, lr, delta_VW[first:last])


OPTIMIZER = SparseOptimizer(
    name="sgd",
    fixed={},
    state=(),
    kernel=_apply,
    classes=("torch.optim.sgd.SGD", "torchrec.optim.optimizers.SGD"),
)
