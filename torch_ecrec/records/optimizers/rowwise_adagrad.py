"""Row-wise Adagrad: s += mean(g * g); w -= lr / (sqrt(s) + eps) * g, with one s per row.

g is a row's gradient, summed over all trainers; s its `momentum1`. As FBGEMM's `OptimType.EXACT_ROWWISE_ADAGRAD`.

The sum of squares of a row has 8 lanes: lane l adds the elements l, l + 8, l + 16, ... in order, and the lanes are
added as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from torch_ecrec.records.merge import BLOCK, sum_block
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.schema import StateField
from torch_ecrec.runtime.kernels import prefetch_row


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_of_squares(values_UD: Any, i: Any) -> Any:
    """Of row i: 8 lanes, then a fixed tree."""
    v = values_UD
    zero = np.float32(0)
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    whole = v.shape[1] // 8 * 8
    for j in range(0, whole, 8):
        a += v[i, j] * v[i, j]
        b += v[i, j + 1] * v[i, j + 1]
        c += v[i, j + 2] * v[i, j + 2]
        d += v[i, j + 3] * v[i, j + 3]
        e += v[i, j + 4] * v[i, j + 4]
        f += v[i, j + 5] * v[i, j + 5]
        g += v[i, j + 6] * v[i, j + 6]
        h += v[i, j + 7] * v[i, j + 7]
    rest = v.shape[1] - whole
    if rest > 0:
        a += v[i, whole] * v[i, whole]
    if rest > 1:
        b += v[i, whole + 1] * v[i, whole + 1]
    if rest > 2:
        c += v[i, whole + 2] * v[i, whole + 2]
    if rest > 3:
        d += v[i, whole + 3] * v[i, whole + 3]
    if rest > 4:
        e += v[i, whole + 4] * v[i, whole + 4]
    if rest > 5:
        f += v[i, whole + 5] * v[i, whole + 5]
    if rest > 6:
        g += v[i, whole + 6] * v[i, whole + 6]
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


@njit(nogil=True, cache=True, error_model="numpy")
def _step(records_PW: Any, positions_U: Any, gradients_UD: Any, lr: Any, eps: Any, delta_UW: Any) -> None:
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        old_state = records_PW[position, dim]
        new_state = old_state + _sum_of_squares(gradients_UD, i) / np.float32(dim)
        records_PW[position, dim] = new_state
        delta_UW[i, dim] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
        multiplier = lr / (np.sqrt(new_state) + eps)
        for j in range(dim):
            old = records_PW[position, j]
            new = old - multiplier * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@njit(nogil=True, cache=True)
def _apply(records_PW: Any, positions_V: Any, gradients: Any, dim: Any, lr: Any, fixed_H: Any, delta_VW: Any) -> None:
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        sums = sum_ND[: last - first]
        sum_block(gradients, first, seen_N, sums)
        _step(records_PW, positions_V[first:last], sums, lr, fixed_H[0], delta_VW[first:last])


OPTIMIZER = SparseOptimizer(
    name="rowwise_adagrad",
    fixed={"eps": 1e-8},
    state=(StateField("momentum1", per_row=True),),
    kernel=_apply,
    classes=("torchrec.optim.rowwise_adagrad.RowWiseAdagrad",),
)
