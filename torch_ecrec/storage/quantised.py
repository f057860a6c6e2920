"""Weights in 8, 4, 3 or 2 bits, row by row: `weight = zero + code * scale`, asymmetric, with both numbers of each row.

    row      -1.0   0.5   0.0   2.0        2 bits: codes 0 to 3
    zero     -1.0, scale  (2.0 - -1.0) / 3 = 1.0
    codes       0     2     1     3        1.5 is a tie, and goes to the even 2
    comes back as -1.0  1.0  0.0  2.0

The least and the greatest weight of a row come back to within rounding, the others within half a scale: uniform
asymmetric quantisation as in Check-N-Run (NSDI 2022), without its greedy search for a narrower range.
Codes lie in the row's bytes from the lowest bit up; a row begins with a byte of its own.

A row that has NaN or infinity, or whose weights span too much, cannot be written so: it is told, and written exactly.

Shapes: N rows, D weights, C = ceil(D * bits / 8) bytes of codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.records.positions import Bytes, Floats
from torch_ecrec.runtime.kernel_cache import kernel


class Quantised(NamedTuple):
    """Rows, quantised.

    Attributes:
        scale_N, zero_N: (N,) float32.
        codes_NC: (N, C) uint8.
        good_N: (N,) uint8: 0 for a row that cannot be quantised; its codes mean nothing.
    """

    scale_N: Floats
    zero_N: Floats
    codes_NC: Bytes
    good_N: Bytes


def code_bytes(dim: int, bits: int) -> int:
    """C: bytes of a row's codes."""
    return -(-dim * bits // 8)


@kernel()
def _quantise(weights_NW: Any, dim: Any, bits: Any, scale_N: Any, zero_N: Any, codes_NC: Any, good_N: Any) -> None:
    levels = (1 << bits) - 1
    for i in range(weights_NW.shape[0]):
        low = high = weights_NW[i, 0]
        finite = True
        for j in range(dim):
            weight = weights_NW[i, j]
            finite &= np.isfinite(weight)
            low = min(low, weight)
            high = max(high, weight)
        scale = np.float32((np.float64(high) - np.float64(low)) / levels)
        top = np.float32(np.float64(low) + np.float64(scale) * levels)
        good = finite and np.isfinite(top)
        good_N[i] = good
        if not good:
            continue
        scale_N[i], zero_N[i] = scale, low
        factor = 1.0 / np.float64(scale) if scale > 0 else 0.0
        if not np.isfinite(factor):  # of a scale that is nearly nothing
            factor = 0.0
        held = np.uint32(0)
        filled = 0
        place = 0
        for j in range(dim):
            code = int(np.rint((np.float64(weights_NW[i, j]) - np.float64(low)) * factor))
            held |= np.uint32(min(max(code, 0), levels) << filled)
            filled += bits
            if filled >= 8:
                codes_NC[i, place] = np.uint8(held & np.uint32(255))
                held >>= np.uint32(8)
                filled -= 8
                place += 1
        if filled:
            codes_NC[i, place] = np.uint8(held)


@kernel()
def _restore(scale_N: Any, zero_N: Any, codes_NC: Any, dim: Any, bits: Any, out_ND: Any) -> None:
    levels = np.uint32((1 << bits) - 1)
    for i in range(out_ND.shape[0]):
        scale, zero = np.float64(scale_N[i]), np.float64(zero_N[i])
        held = np.uint32(0)
        filled = 0
        place = 0
        for j in range(dim):
            if filled < bits:
                held |= np.uint32(np.uint32(codes_NC[i, place]) << np.uint32(filled))
                place += 1
                filled += 8
            out_ND[i, j] = np.float32(zero + scale * (held & levels))
            held >>= np.uint32(bits)
            filled -= bits


@kernel()
def _differ(before_NW: Any, after_ND: Any, table_N: Any, largest_T: Any, squares_T: Any) -> None:
    for i in range(after_ND.shape[0]):
        largest = squares = 0.0
        for j in range(after_ND.shape[1]):
            difference = abs(np.float64(before_NW[i, j]) - np.float64(after_ND[i, j]))
            largest = max(largest, difference)
            squares += difference * difference
        largest_T[table_N[i]] = max(largest_T[table_N[i]], largest)
        squares_T[table_N[i]] += squares


def quantise(weights_NW: Floats, dim: int, bits: int) -> Quantised:
    """Quantises the first `dim` numbers of each row.

    Args:
        weights_NW: (N, W) float32, contiguous, W >= dim.
        dim: D.
        bits: 2, 3, 4 or 8.
    """
    rows = len(weights_NW)
    scale_N, zero_N = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    codes_NC, good_N = np.zeros((rows, code_bytes(dim, bits)), np.uint8), np.zeros(rows, np.uint8)
    _quantise(weights_NW, dim, bits, scale_N, zero_N, codes_NC, good_N)
    return Quantised(scale_N, zero_N, codes_NC, good_N)


def restore(scale_N: Floats, zero_N: Floats, codes_NC: Bytes, dim: int, bits: int) -> Floats:
    """The weights that codes stand for, (N, D) float32. Arrays as of `Quantised`, contiguous."""
    weights_ND = np.empty((len(scale_N), dim), np.float32)
    _restore(scale_N, zero_N, codes_NC, dim, bits, weights_ND)
    return weights_ND


def differ_(
    before_NW: Floats,
    after_ND: Floats,
    table_N: NDArray[np.int64],
    largest_T: NDArray[np.float64],
    squares_T: NDArray[np.float64],
) -> None:
    """Adds to what is known of each table: the largest absolute difference of a weight, the sum of their squares.

    Args:
        before_NW, after_ND: (N, W) and (N, D) float32: weights, and what became of them.
        table_N: (N,) which table a row is of.
        largest_T, squares_T: (T,) changed.
    """
    _differ(before_NW, after_ND, table_N, largest_T, squares_T)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    weights_NW = np.zeros((1, 1), np.float32)
    found = quantise(weights_NW, 1, 8)
    restored_ND = restore(found.scale_N, found.zero_N, found.codes_NC, 1, 8)
    differ_(weights_NW, restored_ND, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
