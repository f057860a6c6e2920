"""16-bit weights in records: float16 and bfloat16, and their conversion from and to float32.

    record of float16, D = 3, state of 1     w0 w0 w1 w1 w2 w2 00 00 s0 s0 s0 s0     12 bytes
    its numbers (float32)                    w0 w1 w2 s0

A weight is float32 wherever anything is computed, and rounded when it is stored: to nearest, to even in a tie, as torch
does, and never at random, so that a step may be made again to the same bits. All but NaN comes back as it was; a NaN
that is rounded becomes the quiet one. State is float32 in any record. Conversion is done with integers, and with sums
of floats that are normal numbers: it does not depend on what the processor does with subnormal ones.

Shapes: P and U records, B bytes, M words of 4 bytes, W numbers, D weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.codec.field import as_words
from torch_ecrec.records.positions import Bytes, Floats, Positions
from torch_ecrec.records.schema import Schema
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import prefetch_row

_INFINITE = np.uint32(0x7F800000)
_LEAST_NORMAL = np.uint32(0x38800000)  # 2^-14 as float32: the least normal float16
_BEYOND = np.uint32(0x47800000)  # 2^16: the first power of two that float16 has not
_STEP = np.uint32(0x3F000000)  # 0.5: float32 of that size lie 2^-24 apart, as subnormal float16 do
_LEAST_NORMAL_F, _STEP_F = np.float32(2.0**-14), np.float32(0.5)


@kernel()
def float16_of(bits: Any) -> Any:
    """Rounds the bits of a float32 to those of a float16."""
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))  # another bias, half a step
    small = np.uint32(np.float32(size.view(np.float32) + _STEP_F).view(np.uint32) - _STEP)
    large = np.uint32(0x7E00) if size > _INFINITE else np.uint32(0x7C00)
    result = large if size >= _BEYOND else (small if size < _LEAST_NORMAL else normal)
    return np.uint16(result | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel()
def of_float16(half: Any) -> Any:
    """Converts the bits of a float16 to those of a float32."""
    bits = np.uint32(half)
    shifted = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(0x38000000))
    small = np.float32(np.uint32(shifted + _LEAST_NORMAL).view(np.float32) - _LEAST_NORMAL_F).view(np.uint32)
    large = np.uint32(shifted | _INFINITE)
    finite = small if shifted < np.uint32(0x00800000) else normal
    result = large if shifted >= np.uint32(0x0F800000) else finite
    return np.uint32(result | np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16)))


@kernel()
def bfloat16_of(bits: Any) -> Any:
    """Rounds the bits of a float32 to those of a bfloat16."""
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > _INFINITE
    return np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@kernel()
def load_weights(halves_PH: Any, position: Any, bfloat16: Any, out_UW: Any, u: Any, dim: Any) -> None:
    """out[u, :dim] = the bits of the weights of a record."""
    if bfloat16:
        for j in range(dim):
            out_UW[u, j] = np.uint32(np.uint32(halves_PH[position, j]) << np.uint32(16))
    else:
        for j in range(dim):
            out_UW[u, j] = of_float16(halves_PH[position, j])


@kernel()
def store_weights(values_UW: Any, u: Any, bfloat16: Any, out_PH: Any, position: Any, dim: Any) -> None:
    """Rounds the weights of `values[u]` into a record."""
    if bfloat16:
        for j in range(dim):
            out_PH[position, j] = bfloat16_of(values_UW[u, j])
    else:
        for j in range(dim):
            out_PH[position, j] = float16_of(values_UW[u, j])


@kernel()
def load_block(halves_PH: Any, words_PM: Any, positions_U: Any, bfloat16: Any, dim: Any, out_UW: Any) -> None:
    """Loads the bits of all numbers of some records, as float32."""
    first = (dim + 1) // 2
    for u in range(positions_U.shape[0]):
        prefetch_row(words_PM, positions_U, u)
        position = positions_U[u]
        load_weights(halves_PH, position, bfloat16, out_UW, u, dim)
        for j in range(words_PM.shape[1] - first):
            out_UW[u, dim + j] = words_PM[position, first + j]


@kernel()
def store_block(
    values_UW: Any,
    bfloat16: Any,
    dim: Any,
    halves_PH: Any,
    words_PM: Any,
    positions_U: Any,
    delta_UM: Any,
) -> None:
    """Rounds and stores all numbers of some records; delta = old XOR new of their bytes."""
    first = (dim + 1) // 2
    for u in range(positions_U.shape[0]):
        position = positions_U[u]
        for j in range(words_PM.shape[1]):
            delta_UM[u, j] = words_PM[position, j]
        store_weights(values_UW, u, bfloat16, halves_PH, position, dim)
        for j in range(words_PM.shape[1] - first):
            words_PM[position, first + j] = values_UW[u, dim + j]
        for j in range(words_PM.shape[1]):
            delta_UM[u, j] ^= words_PM[position, j]


@kernel()
def _gather(halves_PH: Any, words_PM: Any, positions_U: Any, bfloat16: Any, out_UD: Any) -> None:
    for u in range(positions_U.shape[0]):
        prefetch_row(words_PM, positions_U, u)
        load_weights(halves_PH, positions_U[u], bfloat16, out_UD, u, out_UD.shape[1])


def gather_weights(records_PB: Bytes, positions_U: Positions, schema: Schema, out_UD: Floats) -> None:
    """Gathers the weights of records whose weights have 16 bits. Not checked: that the positions are records."""
    bits_UD = out_UD.view(np.uint32)
    _gather(records_PB.view(np.uint16), records_PB.view(np.uint32), positions_U, schema.bfloat16, bits_UD)


def numbers_of(records_UB: Bytes, schema: Schema) -> Floats:
    """Returns the numbers in records: weights, then optimizer state.

    Args:
        records_UB: (U, B) uint8.
        schema: theirs.

    Returns:
        (U, W) float32: weights, then state; the memory of `records_UB` where weights are float32 and it is contiguous.

    Raises:
        ValueError: another shape or dtype.
    """
    _check("records_UB", records_UB, schema.nbytes, np.uint8)
    words_UM = as_words(records_UB)
    if not schema.halves:
        return words_UM.view(np.float32)
    numbers_UW = np.empty((len(words_UM), schema.width), np.float32)
    every = np.arange(len(words_UM))
    bits_UW = numbers_UW.view(np.uint32)
    load_block(words_UM.view(np.uint16), words_UM, every, schema.bfloat16, schema.dim, bits_UW)
    return numbers_UW


def records_of(numbers_UW: Floats, schema: Schema) -> Bytes:
    """Returns the records that hold these numbers, with weights rounded to their dtype.

    Args:
        numbers_UW: (U, W) float32: weights, then state.
        schema: of the records.

    Returns:
        (U, B) uint8; the memory of `numbers_UW` where weights are float32 and it is contiguous.

    Raises:
        ValueError: another shape or dtype.
    """
    _check("numbers_UW", numbers_UW, schema.width, np.float32)
    numbers_UW = np.ascontiguousarray(numbers_UW)
    if not schema.halves:
        return numbers_UW.view(np.uint8)
    words_UM = np.zeros((len(numbers_UW), schema.nbytes // 4), np.uint32)
    halves_UH, delta_UM, every = words_UM.view(np.uint16), np.empty_like(words_UM), np.arange(len(words_UM))
    store_block(numbers_UW.view(np.uint32), schema.bfloat16, schema.dim, halves_UH, words_UM, every, delta_UM)
    return words_UM.view(np.uint8)


def _check(name: str, values: np.ndarray, columns: int, dtype: Any) -> None:
    if values.ndim != 2 or values.shape[1] != columns or values.dtype != dtype:
        wanted = f"`{name}` must be {np.dtype(dtype)} of {columns} columns"
        raise ValueError(f"{wanted}, got {values.dtype} of {values.shape}")


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    for weights in ("float16", "bfloat16"):
        schema = Schema.of(1, weights=weights)
        records_UB = records_of(np.zeros((1, 1), np.float32), schema)
        numbers_of(records_UB, schema)
        gather_weights(records_UB, np.zeros(1, np.int64), schema, np.zeros((1, 1), np.float32))
