"""Row-wise Adagrad: s += mean(g * g); w -= lr / (sqrt(s) + eps) * g, with one s per row.

g is a row's gradient, summed over all trainers; s its `momentum1`. As FBGEMM's `OptimType.EXACT_ROWWISE_ADAGRAD`, with
its weight decay d by `weight_decay_mode`, m being lr / (sqrt(s) + eps):

    0  none       w = w - m * g
    1  L2         s += mean((g + d * w)^2); w = (1 - m * d) * w - m * g
    2  decoupled  w = (1 - lr * d) * w - m * g

With `max_norm` > 0 a row longer than that is scaled back to it after its step. FBGEMM itself does both on a GPU only,
and leaves them out on a CPU.
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
def _plain(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    """Steps a block without weight decay and norm, which cost a tenth of the speed even when they are 0."""
    lr, eps = values_H[0], values_H[1]
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        old_state = records_PW[position, dim]
        new_state = old_state + sum_of_squares(gradients_UD, i, dim) / np.float32(dim)
        records_PW[position, dim] = new_state
        delta_UW[i, dim] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
        multiplier = lr / (np.sqrt(new_state) + eps)
        for j in range(dim):
            old = records_PW[position, j]
            new = old - multiplier * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@kernel(error_model="numpy")
def _decayed(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    lr, eps, decay, mode, max_norm = values_H[0], values_H[1], values_H[2], values_H[3], values_H[4]
    one = np.float32(1)
    dim = gradients_UD.shape[1]
    decayed_1D = np.empty((1, dim), np.float32)
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        if mode == 1:
            for j in range(dim):
                decayed_1D[0, j] = gradients_UD[i, j] + decay * records_PW[position, j]
            squares = sum_of_squares(decayed_1D, 0, dim)
        else:
            squares = sum_of_squares(gradients_UD, i, dim)
        old_state = records_PW[position, dim]
        new_state = old_state + squares / np.float32(dim)
        records_PW[position, dim] = new_state
        delta_UW[i, dim] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
        multiplier = lr / (np.sqrt(new_state) + eps)
        keep = one
        if mode == 1:
            keep = one - multiplier * decay
        elif mode == 2:
            keep = one - lr * decay
        for j in range(dim):
            old = records_PW[position, j]
            new = keep * old - multiplier * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)
        if max_norm > 0:
            norm = np.sqrt(sum_of_squares(records_PW, position, dim))
            if norm > max_norm:
                scale = max_norm / norm
                for j in range(dim):
                    new = records_PW[position, j]
                    scaled = new * scale
                    records_PW[position, j] = scaled
                    delta_UW[i, j] ^= np.float32(new).view(np.uint32) ^ np.float32(scaled).view(np.uint32)


@kernel()
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, values_H: Any, delta_UW: Any) -> None:
    if values_H[3] == 0 and values_H[4] == 0:
        _plain(records_PW, positions_U, gradients_UD, values_H, delta_UW)
    else:
        _decayed(records_PW, positions_U, gradients_UD, values_H, delta_UW)


OPTIMIZER = SparseOptimizer(
    name="rowwise_adagrad",
    fixed={"eps": 1e-8, "weight_decay": 0.0, "weight_decay_mode": 0.0, "max_norm": 0.0},
    state=(StateField("momentum1", per_row=True),),
    kernel=_step,
    classes=("torchrec.optim.rowwise_adagrad.RowWiseAdagrad",),
    types=("EXACT_ROWWISE_ADAGRAD",),
    choices={"weight_decay_mode": (0.0, 1.0, 2.0)},
)
