"""SGD: w -= lr * g.

g is a row's gradient, summed over all trainers. As FBGEMM's `OptimType.EXACT_SGD`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row


@kernel(error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr = values_H[0]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(gradients_UD.shape[1]):
            old = records_PW[position, j]
            new = old - lr * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


OPTIMIZER = SparseOptimizer(
    name="sgd",
    fixed={},
    state=(),
    kernel=_step,
    classes=("torch.optim.sgd.SGD", "torchrec.optim.optimizers.SGD"),
    types=("EXACT_SGD",),
)
