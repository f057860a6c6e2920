"""Hyperparameters of Adam and its relatives in a step: both betas with what they leave, and the bias corrections.

Moments begin at zero, so after t iterations they are too small by 1 - beta^t, which they are divided by. FBGEMM counts
t over the steps of training, not of a row. Powers are made of multiplications only: the same bits on every host, which
`pow` of a C library does not promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

DEFAULTS = {"eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
BELOW = {"beta1": 1.0, "beta2": 1.0}


def power(base: float, exponent: int) -> float:
    """base ** exponent in float64, by squaring; `exponent` is from 0."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def of_step(lr: float, iteration: int, fixed: Mapping[str, float]) -> Sequence[float]:
    """(lr, eps, weight decay, beta1, 1 - beta1, 1 - beta1^t, beta2, 1 - beta2, 1 - beta2^t) at iteration t."""
    values = [lr, fixed["eps"], fixed["weight_decay"]]
    for beta in (float(np.float32(fixed[name])) for name in ("beta1", "beta2")):  # as kernels have it
        values += [beta, 1.0 - beta, 1.0 - power(beta, iteration)]
    return values
