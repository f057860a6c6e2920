"""The parts that Adam and its relatives share: a step's hyperparameters with bias corrections, and both moments.

Moments begin at zero, so after t iterations they are too small by 1 - beta^t, which they are divided by. FBGEMM counts
t over the steps of training, not of a row. Powers are made of multiplications only: the same bits on every host, which
`pow` of a C library does not promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_ecrec.runtime.kernel_cache import kernel

DEFAULTS = {"eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
BELOW = {"beta1": 1.0, "beta2": 1.0}


def power(base: float, exponent: int) -> float:
    """Returns base ** exponent in float64, by squaring; `exponent` is at least 0."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def of_step(lr: float, iteration: int, fixed: Mapping[str, float]) -> Sequence[float]:
    """Returns (lr, eps, weight decay, beta1, 1 - beta1, 1 - beta1^t, beta2, 1 - beta2, 1 - beta2^t) at iteration t."""
    values = [lr, fixed["eps"], fixed["weight_decay"]]
    for beta in (float(np.float32(fixed[name])) for name in ("beta1", "beta2")):  # as kernels have it
        values += [beta, 1.0 - beta, 1.0 - power(beta, iteration)]
    return values


@kernel(error_model="numpy", inline="always")
def step_moments(
    records_PW: Any, position: Any, gradients_UD: Any, i: Any, dim: Any, values_H: Any, delta_UW: Any
) -> None:
    """Updates both moments of record `position` by row i of the gradients. They are fields 1 and 2 of the record.

    It is inlined into the kernel. Steps with sums (a moment per row, the norms of LAMB) are not here: in kernels like
    this they were half as fast (`torch-ecrec bench optimizers`).
    """
    beta1, rest1, beta2, rest2 = values_H[3], values_H[4], values_H[6], values_H[7]
    for j in range(dim):  # a loop for each field: with all in one there are too many arrays for vector code
        k = np.uint64(dim) + np.uint64(j)  # unsigned: else no vector code
        old_m = records_PW[position, k]
        new_m = beta1 * old_m + rest1 * gradients_UD[i, j]
        records_PW[position, k] = new_m
        delta_UW[i, k] = np.float32(old_m).view(np.uint32) ^ np.float32(new_m).view(np.uint32)
    for j in range(dim):
        n = np.uint64(2) * np.uint64(dim) + np.uint64(j)
        g = gradients_UD[i, j]
        old_v = records_PW[position, n]
        new_v = beta2 * old_v + rest2 * (g * g)
        records_PW[position, n] = new_v
        delta_UW[i, n] = np.float32(old_v).view(np.uint32) ^ np.float32(new_v).view(np.uint32)
