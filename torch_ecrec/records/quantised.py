"""Weights quantised row by row to 8 bits each, a form in which rows may travel to evaluations.

    row of 3     q0 q1 q2 | scale, a float32 | bias, a float32          11 bytes
    weight       q * scale + bias, one rounding

FBGEMM's fused 8-bit row-wise form, by its formulas: the bias is the row's least weight, the scale is range / 255, and
q is (weight - bias) * (255 / (range + 1e-8)), rounded to nearest, to even in a tie. So a weight comes back within
range / 510 + 1e-8 of itself, and what float32 rounds.

A row with a NaN or an infinite weight, or whose range float32 cannot hold, comes back as NaN as a whole. (What FBGEMM
makes of it depends on the processor.)

Shapes: U rows, D weights, B = D + 8 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.records.positions import Bytes, Floats
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import fused_multiply_add

MORE_BYTES = 8  # of scale and bias
_LEVELS = np.float32(255)
_LEAST_RANGE = np.float32(1e-8)
_TO_NEAREST = np.float32(12582912.0)  # 1.5 * 2^23: numbers from there on are whole, so the sum with one is rounded
_INFINITE = np.int32(0x7F800000)  # bits of float32


@kernel()
def _in_order(word: Any) -> Any:
    """Maps the bits of a float32 to an int32 that sorts like the number, with NaN beyond infinity; and back."""
    return np.int32(word ^ (np.int32(word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel(error_model="numpy")
def _quantise(weights_UD: Any, words_UD: Any, floats_2: Any, words_2: Any, out_UB: Any) -> None:
    """Quantises rows to 8 bits a weight, followed by scale and bias.

    `words_UD` and `words_2` are views of the arrays before them, int32.
    """
    dim = weights_UD.shape[1]
    for u in range(weights_UD.shape[0]):
        least = greatest = _in_order(words_UD[u, 0])
        for j in range(dim):  # of integers, so that it is done in vectors
            word = _in_order(words_UD[u, j])
            least, greatest = min(least, word), max(greatest, word)
        words_2[0], words_2[1] = _in_order(greatest), _in_order(least)
        bias = floats_2[1]
        span = np.float32(floats_2[0] - bias)
        floats_2[0] = span / _LEVELS
        good = greatest < _INFINITE and least > ~_INFINITE and span < np.float32(np.inf)
        if good:
            by = np.float32(_LEVELS / np.float32(span + _LEAST_RANGE))
            for j in range(dim):
                level = np.float32(np.float32(np.float32(weights_UD[u, j] - bias) * by) + _TO_NEAREST)
                out_UB[u, j] = np.uint8(np.int32(level - _TO_NEAREST))
        else:
            floats_2[0] = np.float32(np.nan)
            out_UB[u, :dim] = 0
        for i in range(2):
            for byte in range(4):
                out_UB[u, dim + 4 * i + byte] = np.uint8((words_2[i] >> np.int32(8 * byte)) & np.int32(0xFF))


@kernel()
def _restore(quantised_UB: Any, floats_2: Any, bits_2: Any, out_UD: Any) -> None:
    dim = out_UD.shape[1]
    for u in range(out_UD.shape[0]):
        for i in range(2):
            bits_2[i] = 0
            for byte in range(4):
                bits_2[i] |= np.uint32(quantised_UB[u, dim + 4 * i + byte]) << np.uint32(8 * byte)
        scale, bias = floats_2[0], floats_2[1]
        for j in range(dim):
            out_UD[u, j] = fused_multiply_add(np.float32(quantised_UB[u, j]), scale, bias)


def quantise(weights_UD: Floats) -> Bytes:
    """Quantises rows to 8 bits a weight.

    Args:
        weights_UD: (U, D) float32, contiguous, D at least 1.

    Returns:
        (U, D + 8) uint8, fresh; to be sent.
    """
    rows, dim = weights_UD.shape
    out_UB = shared.empty((rows, dim + MORE_BYTES), np.uint8)
    pair = np.empty(2, np.float32)
    _quantise(weights_UD, weights_UD.view(np.int32), pair, pair.view(np.int32), out_UB)
    return out_UB


def restore(quantised_UB: Bytes) -> Floats:
    """Returns the weights that quantised rows stand for.

    Args:
        quantised_UB: (U, D + 8) uint8, as `quantise` gives them.

    Returns:
        (U, D) float32, fresh.

    Raises:
        ValueError: they have no weights.
    """
    rows, width = quantised_UB.shape
    require(width > MORE_BYTES, f"`quantised_UB` must have more than {MORE_BYTES} bytes in a row, got {width}")
    out_UD, pair = np.empty((rows, width - MORE_BYTES), np.float32), np.empty(2, np.float32)
    _restore(quantised_UB, pair, pair.view(np.uint32), out_UD)
    return out_UD


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    restore(quantise(np.zeros((1, 1), np.float32)))
