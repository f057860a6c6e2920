"""Weights in 8, 4, 3 or 2 bits, row by row: `weight = bias + code * scale`, with both numbers of each row.

    row      -1.0   0.5   0.0   2.0        2 bits: codes 0 to 3
    bias     -1.0, scale  (2.0 - -1.0) / 3 = 1.0
    codes       0     2     1     3        1.5 is a tie, and goes to the even 2
    comes back as -1.0  1.0  0.0  2.0

Uniform asymmetric quantisation: the least and the greatest weight of a row come back to within rounding, the others
within half a scale. `Quantised` keeps scales, biases and codes apart, as a checkpoint does (Check-N-Run, NSDI 2022,
without its greedy search for a narrower range). Codes lie in the row's bytes from the lowest bit up; a row begins with
a byte of its own. A row that has NaN or infinity, or whose weights span too much, cannot be written so: it is told.

Rows may travel to evaluations in FBGEMM's fused 8-bit row-wise form, `pack` and `unpack`:

    row of 3     q0 q1 q2 | scale, a float32 | bias, a float32          11 bytes

By FBGEMM's formulas, in float32: q is (weight - bias) * (255 / (range + 1e-8)), rounded to nearest, to even in a tie.
So a weight comes back within range / 510 + 1e-8 of itself, and what float32 rounds. A row with NaN or infinity, or
whose range float32 cannot hold, comes back as NaN as a whole. (What FBGEMM makes of it depends on the processor.)

A weight comes back as `bias + code * scale`, rounded once.

Shapes: N or U rows, D weights, C = ceil(D * bits / 8) bytes of codes, B = D + 8 bytes of a packed row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.records.positions import Bytes, Floats
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import fused_multiply_add

MORE_BYTES = 8  # of scale and bias, in a packed row
_LEAST_RANGE = np.float32(1e-8)
_TO_NEAREST = np.float32(12582912.0)  # 1.5 * 2^23: numbers from there on are whole, so the sum with one is rounded
_INFINITE = np.int32(0x7F800000)  # bits of float32


class Quantised(NamedTuple):
    """Rows, quantised.

    Attributes:
        scale_N, bias_N: (N,) float32.
        codes_NC: (N, C) uint8.
        good_N: (N,) uint8: 0 for a row that cannot be quantised; its codes mean nothing.
    """

    scale_N: Floats
    bias_N: Floats
    codes_NC: Bytes
    good_N: Bytes


def code_bytes(dim: int, bits: int) -> int:
    """C: bytes of a row's codes."""
    return -(-dim * bits // 8)


@kernel()
def _in_order(word: Any) -> Any:
    """Maps the bits of a float32 to an int32 that sorts like the number, with NaN beyond infinity; and back."""
    return np.int32(word ^ (np.int32(word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel(inline="always")
def _range(words_NW: Any, i: Any, dim: Any, words_2: Any) -> Any:
    """The bits of a row's greatest and least weight, into `words_2`; returns whether all are finite."""
    least = greatest = _in_order(words_NW[i, 0])
    for j in range(dim):  # of integers, so that it is done in vectors
        word = _in_order(words_NW[i, j])
        least, greatest = min(least, word), max(greatest, word)
    words_2[0], words_2[1] = _in_order(greatest), _in_order(least)
    return greatest < _INFINITE and least > ~_INFINITE


@kernel()
def _quantise(
    weights_NW: Any,
    words_NW: Any,
    dim: Any,
    bits: Any,
    floats_2: Any,
    words_2: Any,
    scale_N: Any,
    bias_N: Any,
    codes_NC: Any,
    good_N: Any,
) -> None:
    """Args: `words_NW` and `words_2` are the same memory as the array before, int32."""
    levels = (1 << bits) - 1
    for i in range(weights_NW.shape[0]):
        finite = _range(words_NW, i, dim, words_2)
        high, low = np.float64(floats_2[0]), np.float64(floats_2[1])
        scale = np.float32((high - low) / levels)
        good = finite and np.isfinite(np.float32(low + np.float64(scale) * levels))
        good_N[i] = good
        if not good:
            continue
        scale_N[i], bias_N[i] = scale, floats_2[1]
        factor = 1.0 / np.float64(scale) if scale > 0 else 0.0
        if not np.isfinite(factor):  # of a scale that is nearly nothing
            factor = 0.0
        held = np.uint32(0)
        filled = 0
        place = 0
        for j in range(dim):
            code = int(np.rint((np.float64(weights_NW[i, j]) - low) * factor))
            held |= np.uint32(min(max(code, 0), levels) << filled)
            filled += bits
            if filled >= 8:
                codes_NC[i, place] = np.uint8(held & np.uint32(255))
                held >>= np.uint32(8)
                filled -= 8
                place += 1
        if filled:
            codes_NC[i, place] = np.uint8(held)


@kernel(error_model="numpy")
def _pack(weights_UD: Any, words_UD: Any, floats_2: Any, words_2: Any, out_UB: Any) -> None:
    """Packs rows as `_quantise` does, by FBGEMM's formulas: 8 bits a weight, then scale and bias in float32.

    `words_UD` and `words_2` are views of the arrays before them, int32.
    """
    dim, levels = weights_UD.shape[1], np.float32(255)
    for u in range(weights_UD.shape[0]):
        finite = _range(words_UD, u, dim, words_2)
        bias = floats_2[1]
        span = np.float32(floats_2[0] - bias)
        floats_2[0] = span / levels
        if finite and span < np.float32(np.inf):
            by = np.float32(levels / np.float32(span + _LEAST_RANGE))
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
def _ends(packed_UB: Any, dim: Any, ends_2U: Any) -> None:
    """The bits of scales and of biases, uint32."""
    for u in range(packed_UB.shape[0]):
        for i in range(2):
            ends_2U[i, u] = 0
            for byte in range(4):
                ends_2U[i, u] |= np.uint32(packed_UB[u, dim + 4 * i + byte]) << np.uint32(8 * byte)


@kernel()
def _restore(scale_N: Any, bias_N: Any, codes_NC: Any, dim: Any, bits: Any, out_ND: Any) -> None:
    """Codes are the first bytes of each row of `codes_NC`."""
    levels = np.uint32((1 << bits) - 1)
    for i in range(out_ND.shape[0]):
        scale, bias = scale_N[i], bias_N[i]
        if bits == 8:
            for j in range(dim):
                out_ND[i, j] = fused_multiply_add(np.float32(codes_NC[i, j]), scale, bias)
            continue
        held = np.uint32(0)
        filled = 0
        place = 0
        for j in range(dim):
            if filled < bits:
                held |= np.uint32(np.uint32(codes_NC[i, place]) << np.uint32(filled))
                place += 1
                filled += 8
            out_ND[i, j] = fused_multiply_add(np.float32(held & levels), scale, bias)
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
        dim: D, at least 1.
        bits: 2, 3, 4 or 8.
    """
    rows, pair = len(weights_NW), np.empty(2, np.float32)
    scale_N, bias_N = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    codes_NC, good_N = np.zeros((rows, code_bytes(dim, bits)), np.uint8), np.zeros(rows, np.uint8)
    words = weights_NW.view(np.int32), pair.view(np.int32)
    _quantise(weights_NW, words[0], dim, bits, pair, words[1], scale_N, bias_N, codes_NC, good_N)
    return Quantised(scale_N, bias_N, codes_NC, good_N)


def restore(scale_N: Floats, bias_N: Floats, codes_NC: Bytes, dim: int, bits: int) -> Floats:
    """The weights that codes stand for, (N, D) float32, fresh. Arrays as of `Quantised`, contiguous."""
    weights_ND = np.empty((len(scale_N), dim), np.float32)
    _restore(scale_N, bias_N, codes_NC, dim, bits, weights_ND)
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


def pack(weights_UD: Floats) -> Bytes:
    """Rows in 8 bits a weight, as they travel to evaluations.

    Args:
        weights_UD: (U, D) float32, contiguous, D at least 1.

    Returns:
        (U, D + 8) uint8, fresh; to be sent.
    """
    rows, dim = weights_UD.shape
    out_UB = shared.empty((rows, dim + MORE_BYTES), np.uint8)
    pair = np.empty(2, np.float32)
    _pack(weights_UD, weights_UD.view(np.int32), pair, pair.view(np.int32), out_UB)
    return out_UB


def unpack(packed_UB: Bytes) -> Floats:
    """The weights that packed rows stand for.

    Args:
        packed_UB: (U, D + 8) uint8, contiguous, as `pack` gives them.

    Returns:
        (U, D) float32, fresh.

    Raises:
        ValueError: they have no weights.
    """
    dim = packed_UB.shape[1] - MORE_BYTES
    require(dim > 0, f"`packed_UB` must have more than {MORE_BYTES} bytes in a row, got {packed_UB.shape[1]}")
    ends_2U = np.empty((2, len(packed_UB)), np.uint32)
    _ends(packed_UB, dim, ends_2U)
    return restore(ends_2U[0].view(np.float32), ends_2U[1].view(np.float32), packed_UB, dim, 8)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    weights_11 = np.zeros((1, 1), np.float32)
    unpack(pack(weights_11))
    found = quantise(weights_11, 1, 8)
    restored_11 = restore(found.scale_N, found.bias_N, found.codes_NC, 1, 8)
    differ_(weights_11, restored_11, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
