"""Arithmetic of GF(2^8) on whole batches of bytes: the inner loops of encode, fold and decode.

Terms. The field is bytes modulo the polynomial 0x11D (the one of galois, ISA-L and klauspost). Addition is XOR, so
every element is its own negative. Example: 2 * 128 = 0x100, which reduces by 0x11D to 0x1D = 29; hence
`PRODUCT[2, 128] == 29`.

How. Multiplying by a constant c is linear over bits: c * x is the XOR of c * 2^b over the bits b set in x. The kernels
look at 4 bytes at a time: `(x >> b) & 0x01010101` is bit b of every byte, and times the byte c * 2^b it is that byte
wherever the bit is set, with no carry between bytes. A compiler turns this into vector code, which it cannot do for
table look-ups (measured: 14 GB/s against 1.3 GB/s in cache).

Invariants. Integers only, so the same bits on every CPU. One pass over the source; nothing is allocated in proportion
to it.

Shapes: N rows of the target, U rows of the source, B bytes in a row (a multiple of 4).

Does not know codes, stripes or slots, and does not guard against two threads that write the same row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from torch_ecrec.prefetch import prefetch_row

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]

POLYNOMIAL = 0x11D
WORD_BYTES = 4  # records are float32 values, so a row is a whole number of these


def _product_table() -> Bytes:
    """(256, 256) uint8: every product, from powers of the generator 2."""
    powers = np.zeros(255, np.int64)
    logarithms = np.zeros(256, np.int64)
    element = 1
    for exponent in range(255):
        powers[exponent], logarithms[element] = element, exponent
        element <<= 1
        if element & 0x100:
            element ^= POLYNOMIAL
    table = powers[(logarithms[:, None] + logarithms[None, :]) % 255].astype(np.uint8)
    table[0, :] = table[:, 0] = 0
    table.setflags(write=False)
    return table


PRODUCT: Bytes = _product_table()
# (256, 8) uint32: c * 2^b for every coefficient c and bit b, in the width the kernels multiply in.
_BIT_PRODUCT = np.ascontiguousarray(PRODUCT[:, 1 << np.arange(8)].astype(np.uint32))


@njit(nogil=True, cache=True)
def _first_outside(rows_U: Any, low: Any, limit: Any) -> Any:
    """Index of the first row outside [low, limit), or -1."""
    for i in range(rows_U.shape[0]):
        if rows_U[i] < low or rows_U[i] >= limit:
            return i
    return -1


@njit(nogil=True, cache=True)
def _times(x: Any, t0: Any, t1: Any, t2: Any, t3: Any, t4: Any, t5: Any, t6: Any, t7: Any) -> Any:
    """c * x on 4 bytes, where t is the row of c in `_BIT_PRODUCT`; all uint32."""
    ones = np.uint32(0x01010101)
    product = np.uint32((x & ones) * t0)
    product ^= np.uint32(((x >> np.uint32(1)) & ones) * t1)
    product ^= np.uint32(((x >> np.uint32(2)) & ones) * t2)
    product ^= np.uint32(((x >> np.uint32(3)) & ones) * t3)
    product ^= np.uint32(((x >> np.uint32(4)) & ones) * t4)
    product ^= np.uint32(((x >> np.uint32(5)) & ones) * t5)
    product ^= np.uint32(((x >> np.uint32(6)) & ones) * t6)
    product ^= np.uint32(((x >> np.uint32(7)) & ones) * t7)
    return product


@njit(nogil=True, cache=True)
def _xor_rows(target_NW: Any, rows_U: Any, source_UW: Any) -> None:
    for i in range(rows_U.shape[0]):
        prefetch_row(target_NW, rows_U, i)
        row = rows_U[i]
        if row >= 0:
            for j in range(source_UW.shape[1]):
                target_NW[row, j] ^= source_UW[i, j]


@njit(nogil=True, cache=True)
def _fold_rows(target_NW: Any, rows_U: Any, source_UW: Any, coefficients_U: Any, bit_product: Any) -> None:
    t = bit_product
    for i in range(rows_U.shape[0]):
        prefetch_row(target_NW, rows_U, i)
        row = rows_U[i]
        c = coefficients_U[i]
        if row < 0 or c == 0:
            continue
        if c == 1:
            for j in range(source_UW.shape[1]):
                target_NW[row, j] ^= source_UW[i, j]
        else:
            t0, t1, t2, t3, t4, t5, t6, t7 = t[c, 0], t[c, 1], t[c, 2], t[c, 3], t[c, 4], t[c, 5], t[c, 6], t[c, 7]
            for j in range(source_UW.shape[1]):
                target_NW[row, j] ^= _times(source_UW[i, j], t0, t1, t2, t3, t4, t5, t6, t7)


@njit(nogil=True, cache=True)
def _multiply_add(target_W: Any, source_W: Any, t: Any) -> None:
    """target ^= c * source, where `t` is the row of c in `_BIT_PRODUCT`."""
    t0, t1, t2, t3, t4, t5, t6, t7 = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    for j in range(source_W.shape[0]):
        target_W[j] ^= _times(source_W[j], t0, t1, t2, t3, t4, t5, t6, t7)


@njit(nogil=True, cache=True)
def _xor(target_W: Any, source_W: Any) -> None:
    for j in range(source_W.shape[0]):
        target_W[j] ^= source_W[j]


def _check_bytes(name: str, array: Bytes) -> None:
    if array.ndim != 2 or array.dtype != np.uint8:
        raise ValueError(f"`{name}` must be a 2-D uint8 array, got {array.ndim}-D {array.dtype}")
    if array.shape[1] % WORD_BYTES:
        raise ValueError(f"`{name}` must have rows of a multiple of {WORD_BYTES} bytes, got {array.shape[1]}")


def _check_target(name: str, array: Bytes) -> None:
    _check_bytes(name, array)
    aligned = array.__array_interface__["data"][0] % WORD_BYTES == 0
    if not array.flags.c_contiguous or not array.flags.writeable or not aligned:
        raise ValueError(
            f"`{name}` is changed in place, so it must be contiguous, writeable and {WORD_BYTES}-byte aligned"
        )


def _as_words(array: Bytes) -> NDArray[np.uint32]:
    """As 4-byte words; copied only where it is not contiguous or not aligned."""
    if not array.flags.c_contiguous or array.__array_interface__["data"][0] % WORD_BYTES:
        array = np.array(array, order="C")
    return array.view(np.uint32)


def _check_rows(target_NB: Bytes, rows_U: Rows, source_UB: Bytes) -> None:
    _check_target("target_NB", target_NB)
    _check_bytes("source_UB", source_UB)
    if rows_U.ndim != 1 or rows_U.dtype != np.int64:
        raise ValueError(f"`rows_U` must be a 1-D int64 array, got {rows_U.ndim}-D {rows_U.dtype}")
    if source_UB.shape != (len(rows_U), target_NB.shape[1]):
        wanted = (len(rows_U), target_NB.shape[1])
        raise ValueError(f"`source_UB` must have the shape {wanted} of the rows, got {source_UB.shape}")
    outside = _first_outside(rows_U, -1, len(target_NB))
    if outside >= 0:
        raise IndexError(f"`rows_U[{outside}]` must be in -1..{len(target_NB) - 1}, got {rows_U[outside]}")


def xor_rows_(target_NB: Bytes, rows_U: Rows, source_UB: Bytes) -> None:
    """target[rows[i]] ^= source[i] for every i, in place.

    Args:
        target_NB: (N, B) uint8, contiguous. Mutated. Must not alias `source_UB`.
        rows_U: (U,) int64, in 0..N-1; -1 skips a row. A row that comes twice is changed twice.
        source_UB: (U, B) uint8.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a row is out of range. Nothing was changed then.
    """
    _check_rows(target_NB, rows_U, source_UB)
    if source_UB.size:
        _xor_rows(_as_words(target_NB), np.ascontiguousarray(rows_U), _as_words(source_UB))


def fold_rows_(target_NB: Bytes, rows_U: Rows, source_UB: Bytes, coefficients_U: Bytes) -> None:
    """target[rows[i]] ^= coefficients[i] * source[i] for every i, in place.

    Args:
        target_NB: (N, B) uint8, contiguous. Mutated. Must not alias `source_UB`.
        rows_U: (U,) int64, in 0..N-1; -1 skips a row. A row that comes twice is changed twice.
        source_UB: (U, B) uint8.
        coefficients_U: (U,) uint8; 1 is as fast as `xor_rows_`, 0 skips a row.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a row is out of range. Nothing was changed then.
    """
    _check_rows(target_NB, rows_U, source_UB)
    if coefficients_U.shape != rows_U.shape or coefficients_U.dtype != np.uint8:
        got = f"{coefficients_U.dtype} of {coefficients_U.shape}"
        raise ValueError(f"`coefficients_U` must be uint8 of shape {rows_U.shape}, got {got}")
    if source_UB.size:
        rows_U, coefficients_U = np.ascontiguousarray(rows_U), np.ascontiguousarray(coefficients_U)
        _fold_rows(_as_words(target_NB), rows_U, _as_words(source_UB), coefficients_U, _BIT_PRODUCT)


def multiply_add_(target_UB: Bytes, source_UB: Bytes, coefficient: int) -> None:
    """target ^= coefficient * source, in place.

    Args:
        target_UB: (U, B) uint8, contiguous. Mutated. Must not alias `source_UB`.
        source_UB: (U, B) uint8.
        coefficient: 0..255; 1 is a plain XOR, 0 does nothing.

    Raises:
        ValueError: a shape, a dtype or the coefficient does not fit.
    """
    _check_target("target_UB", target_UB)
    _check_bytes("source_UB", source_UB)
    if source_UB.shape != target_UB.shape:
        raise ValueError(f"`source_UB` must have the shape {target_UB.shape} of the target, got {source_UB.shape}")
    if not 0 <= coefficient < 256:
        raise ValueError(f"`coefficient` must be in 0..255, got {coefficient}")
    if coefficient == 0 or source_UB.size == 0:
        return
    target_W, source_W = _as_words(target_UB).reshape(-1), _as_words(source_UB).reshape(-1)
    if coefficient == 1:
        _xor(target_W, source_W)
    else:
        _multiply_add(target_W, source_W, _BIT_PRODUCT[coefficient])


def warm() -> None:
    """Compiles or loads every kernel."""
    target_NB, source_UB, rows_U = np.zeros((2, 4), np.uint8), np.ones((1, 4), np.uint8), np.zeros(1, np.int64)
    xor_rows_(target_NB, rows_U, source_UB)
    fold_rows_(target_NB, rows_U, source_UB, np.full(1, 2, np.uint8))
    for coefficient in (1, 2):
        multiply_add_(target_NB[:1], source_UB, coefficient)
