"""Seals: checksums of 4 bytes, by which a flipped bit of a record or parity is found. Deltas update them.

A record is W words of 4 bytes. Its seal is one word, byte by byte a sum over GF(2^8):

    seal = sum over i of c(i) * word(i)          c(i) not 0, and other for each word of up to 900 bytes

So the seal is linear over the field, as the code is: that of `a XOR b` is the XOR of their seals, that of `c * a` is c
times the seal of a. Hence what a delta adds to a record's seal is the delta's own seal, and the seal of a parity is the
code of its stripe's seals. A record that was changed behind its seal's back stays visibly wrong, whatever deltas are
added later: record and seal differ by the seal of the damage.

What is found: each of the four bytes of a seal is the check symbol of a Reed-Solomon code over every fourth byte of the
record. Damage to one byte of every four, so any flipped bit, is always found. More than one damaged byte among the same
fourth escapes once in 255 times, all of them together, at random, once in 2^32.

How. 16 words at a time, as Horner's rule does it: all sums times the generator 2, plus the next 16 words. At the end
lane l counts 2^(16 l) times. What is left of a record, fewer than 16 words, goes into fixed lanes in pieces of 8, 4, 2
and 1. A CRC, which processors have an instruction for, is linear over bits only: not under the coefficients of a
parity.

Shapes: N rows of a target, U rows of a source, B bytes in a row (a multiple of 4), W words.

Does not know codes, slots or steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from torch_ecrec.codec import vectors
from torch_ecrec.codec.field import FACTORS, POLYNOMIAL, PRODUCT, WORD_BYTES, as_words, checked_fold, fold_row
from torch_ecrec.codec.vectors import I8, I32, I64, ir, tools
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import first_outside, prefetch, prefetch_row

SEAL_BYTES = 4
LANES = 16  # words at a time: 64 bytes
SEALS_AHEAD = 64  # are prefetched: there is little to do for each, and it takes as long to come as a record

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
SealsOf = NDArray[np.uint32]


def _powers() -> list[int]:
    """Returns the powers of the generator 2, from the 0th to the 254th."""
    found, element = [], 1
    for _ in range(255):
        found.append(element)
        element = int(PRODUCT[2, element])
    return found


POWERS = _powers()

_WORDS, _BYTES = ir.VectorType(I32, LANES), ir.VectorType(I8, LANES * WORD_BYTES)


def _each(value: int) -> Any:
    """Emits a vector with the same byte 64 times."""
    return ir.Constant(_BYTES, [I8(value)] * _BYTES.count)


def _doubled(target: Any, builder: Any, words: Any) -> Any:
    """Emits 2 * every byte of 16 words."""
    vector = builder.bitcast(words, _BYTES)
    if vectors.has_gfni(target):
        matrices = ir.Constant(ir.VectorType(I64, LANES // 2), [I64(int(FACTORS[2, 1]))] * (LANES // 2))
        return builder.bitcast(vectors.affine(target, builder, vector, matrices), _WORDS)
    carried = builder.select(builder.icmp_signed("<", vector, _each(0)), _each(POLYNOMIAL & 0xFF), _each(0))
    return builder.bitcast(builder.xor(builder.add(vector, vector), carried), _WORDS)


def _power(lane: int, more: int = 0) -> int:
    """Returns 2^(16 l + more) in the field of seals."""
    return POWERS[(LANES * lane + more) % 255]


def _weighed(target: Any, builder: Any, words: Any) -> Any:
    """Emits every byte of lane l times 2^(16 l)."""
    vector, total = builder.bitcast(words, _BYTES), _each(0)
    if vectors.has_gfni(target):  # a matrix is of two lanes: of each product every other lane counts
        products = []
        for odd in (0, 1):
            matrices = [I64(int(FACTORS[_power(lane + odd), 1])) for lane in range(0, LANES, 2)]
            of_both = vectors.affine(target, builder, vector, ir.Constant(ir.VectorType(I64, LANES // 2), matrices))
            products.append(builder.bitcast(of_both, _WORDS))
        places = [I32(lane + LANES * (lane % 2)) for lane in range(LANES)]
        return builder.shuffle_vector(*products, ir.Constant(ir.VectorType(I32, LANES), places))
    for bit in range(8):
        counts = [I8(_power(lane, bit)) for lane in range(LANES) for _ in range(WORD_BYTES)]
        is_set = builder.icmp_unsigned("!=", builder.and_(vector, _each(1 << bit)), _each(0))
        total = builder.xor(total, builder.select(is_set, ir.Constant(_BYTES, counts), _each(0)))
    return builder.bitcast(total, _WORDS)


def _summed(builder: Any, words: Any) -> Any:
    """Emits the XOR of all 16 words, an i32."""
    count = LANES
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, count), [I32(i) for i in places]))
            for places in (range(count), range(count, 2 * count))
        ]
        words = builder.xor(*halves)
    return builder.extract_element(words, I32(0))


def _type_seal(context: Any, source: Any, words: Any) -> Any:
    """The intrinsic `seal_at(source, words)`: the seal, uint32, of `words` words at an address."""

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, words = args

        def load(offset: Any, kind: Any) -> Any:
            place = builder.inttoptr(builder.add(source, builder.shl(offset, I64(2))), kind.as_pointer())
            return builder.load(place, align=WORD_BYTES)

        total, rest = tools.alloca_once(builder, _WORDS), tools.alloca_once(builder, _WORDS)
        for place in (total, rest):
            builder.store(ir.Constant(_WORDS, None), place)
        whole = builder.and_(words, I64(-LANES))
        with tools.for_range_slice(builder, I64(0), whole, I64(LANES)) as (offset, _):
            doubled = _doubled(target, builder, builder.load(total))
            builder.store(builder.xor(doubled, load(offset, _WORDS)), total)
        offset, count = whole, LANES // 2
        while count:
            left = builder.and_(words, I64(count))
            with builder.if_then(builder.icmp_unsigned("!=", left, I64(0))):
                kind = ir.VectorType(I32, count)
                first = LANES - 2 * count
                places = [lane - first if first <= lane < first + count else count for lane in range(LANES)]
                mask = ir.Constant(_WORDS, [I32(place) for place in places])
                piece = builder.shuffle_vector(load(offset, kind), ir.Constant(kind, None), mask)
                builder.store(builder.xor(builder.load(rest), piece), rest)
            offset, count = builder.add(offset, left), count // 2
        both = builder.xor(_doubled(target, builder, builder.load(total)), builder.load(rest))
        return _summed(builder, _weighed(target, builder, both))

    return types.uint32(types.intp, types.intp), generate


seal_at: Any = intrinsic(_type_seal)

# -------------------------------------------------------------------------------------------------------------- kernels


@kernel()
def seal_rows(rows_UW: Any, seals_U: Any) -> None:
    """Writes the seal of every row of words."""
    start, words = rows_UW.ctypes.data, rows_UW.shape[1]
    for i in range(rows_UW.shape[0]):
        seals_U[i] = seal_at(start + i * words * WORD_BYTES, words)


@kernel()
def _seal_some(rows_NW: Any, positions_U: Any, seals_N: Any) -> None:
    """Writes the seals of some rows beside those of the others."""
    start, words = rows_NW.ctypes.data, rows_NW.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(rows_NW, positions_U, i)
        row = positions_U[i]
        seals_N[row] = seal_at(start + row * words * WORD_BYTES, words)


@kernel()
def _times(product: Any, coefficient: Any, seal: Any) -> Any:
    """Returns c times a seal, byte by byte. `product` is the field's table of products."""
    result = np.uint32(0)
    for shift in (0, 8, 16, 24):
        byte = product[coefficient, (seal >> np.uint32(shift)) & np.uint32(0xFF)]
        result |= np.uint32(byte) << np.uint32(shift)
    return result


@kernel()
def _fold_rows(
    target_NW: Any,
    rows_U: Any,
    source_UW: Any,
    coefficients_U: Any,
    factors: Any,
    product: Any,
    seals_N1: Any,
    of_source_U: Any,
) -> None:
    """Folds and seals in one pass over the source: its rows are in the cache when they are sealed."""
    words = source_UW.shape[1]
    target, source = target_NW.ctypes.data, source_UW.ctypes.data
    for i in range(rows_U.shape[0]):
        prefetch_row(target_NW, rows_U, i)
        prefetch_row(seals_N1, rows_U, i)
        row, c, read = rows_U[i], coefficients_U[i], source + i * words * WORD_BYTES
        fold_row(target, row, read, words, c, factors)
        seal = seal_at(read, words)
        of_source_U[i] = seal
        if row >= 0:
            seals_N1[row, 0] ^= seal if c == 1 else _times(product, c, seal)


@kernel()
def _xor(seals_N: Any, rows_U: Any, seals_U: Any) -> None:
    start, count = seals_N.ctypes.data, rows_U.shape[0]
    for i in range(count):
        if i + SEALS_AHEAD < count:
            prefetch(start + rows_U[i + SEALS_AHEAD] * SEAL_BYTES, SEAL_BYTES)
        if rows_U[i] >= 0:
            seals_N[rows_U[i]] ^= seals_U[i]


@kernel()
def _broken(rows_NW: Any, seals_N: Any, positions_U: Any, broken_U: Any) -> Any:
    """broken[i] = whether row positions[i] does not fit its seal; returns how many."""
    start, words, count = rows_NW.ctypes.data, rows_NW.shape[1], 0
    for i in range(positions_U.shape[0]):
        prefetch_row(rows_NW, positions_U, i)
        row = positions_U[i]
        broken_U[i] = seal_at(start + row * words * WORD_BYTES, words) != seals_N[row]
        count += broken_U[i]
    return count


@kernel()
def _gather(rows_NW: Any, seals_N: Any, positions_U: Any, copies_UW: Any, broken_U: Any) -> Any:
    """copies[i] = row positions[i]; otherwise as `_broken`. Each row is read from memory once."""
    start, words, count = rows_NW.ctypes.data, rows_NW.shape[1], 0
    for i in range(positions_U.shape[0]):
        prefetch_row(rows_NW, positions_U, i)
        row = positions_U[i]
        for j in range(words):
            copies_UW[i, j] = rows_NW[row, j]
        broken_U[i] = seal_at(start + row * words * WORD_BYTES, words) != seals_N[row]
        count += broken_U[i]
    return count


@kernel()
def _broken_run(rows_NW: Any, seals_N: Any, first: Any, broken_U: Any) -> Any:
    """As `_broken`, for the rows from `first` on, as many as `broken_U` has."""
    start, words, count = rows_NW.ctypes.data, rows_NW.shape[1], 0
    for i in range(broken_U.shape[0]):
        broken_U[i] = seal_at(start + (first + i) * words * WORD_BYTES, words) != seals_N[first + i]
        count += broken_U[i]
    return count


def _words(name: str, values_UB: Bytes) -> NDArray[np.uint32]:
    """Returns `as_words` of an array whose shape and dtype are checked. Raises ValueError."""
    if values_UB.ndim != 2 or values_UB.dtype != np.uint8 or values_UB.shape[1] % WORD_BYTES:
        wanted = f"`{name}` must be 2-D uint8 of rows of a multiple of {WORD_BYTES} bytes"
        raise ValueError(f"{wanted}, got {values_UB.dtype} of {values_UB.shape}")
    return as_words(values_UB)


def _check_seals(seals_N: SealsOf, count: int) -> None:
    if seals_N.dtype != np.uint32 or seals_N.shape != (count,):
        raise ValueError(f"`seals_N` must be uint32 of shape {(count,)}, got {seals_N.dtype} of {seals_N.shape}")


def _check_rows(name: str, rows_U: Rows, low: int, limit: int) -> Rows:
    if rows_U.ndim != 1 or rows_U.dtype != np.int64:
        raise ValueError(f"`{name}` must be a 1-D int64 array, got {rows_U.ndim}-D {rows_U.dtype}")
    rows_U = np.ascontiguousarray(rows_U)
    outside = first_outside(rows_U, low, limit)
    if outside >= 0:
        raise IndexError(f"`{name}[{outside}]` must be in {low}..{limit - 1}, got {rows_U[outside]}")
    return rows_U


def seals_of(values_UB: Bytes) -> SealsOf:
    """Returns the seal of every row.

    Args:
        values_UB: (U, B) uint8.

    Returns:
        (U,) uint32, fresh.

    Raises:
        ValueError: another shape or dtype.
    """
    words_UW = _words("values_UB", values_UB)
    seals_U = np.zeros(len(words_UW), np.uint32)
    if words_UW.size:
        seal_rows(words_UW, seals_U)
    return seals_U


def seal_(rows_NB: Bytes, positions_U: Rows, seals_N: SealsOf) -> None:
    """Seals some rows anew, where they lie.

    Args:
        rows_NB: (N, B) uint8, contiguous.
        positions_U: (U,) int64, in 0..N-1.
        seals_N: (N,) uint32, theirs. Mutated.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a position is out of range. Nothing was changed then.
    """
    _check_seals(seals_N, len(rows_NB))
    positions_U = _check_rows("positions_U", positions_U, 0, len(rows_NB))
    if len(positions_U) and rows_NB.size:
        _seal_some(_words("rows_NB", rows_NB), positions_U, seals_N)


def xor_(seals_N: SealsOf, rows_U: Rows, seals_U: SealsOf) -> None:
    """seals[rows[i]] ^= seals_U[i], in place: as `xor_rows_` does it to the rows, by deltas that have these seals.

    Args:
        seals_N: (N,) uint32. Mutated.
        rows_U: (U,) int64, in 0..N-1; -1 skips one.
        seals_U: (U,) uint32.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a row is out of range. Nothing was changed then.
    """
    _check_seals(seals_N, len(seals_N))
    _check_seals(seals_U, len(rows_U))
    rows_U = _check_rows("rows_U", rows_U, -1, len(seals_N))
    if len(rows_U):
        _xor(seals_N, rows_U, seals_U)


def fold_rows_(target_NB: Bytes, rows_U: Rows, deltas_UB: Bytes, coefficients_U: Bytes, seals_N: SealsOf) -> SealsOf:
    """Folds deltas into the target as `field.fold_rows_` does, and updates the target's seals.

    Args:
        target_NB, rows_U, deltas_UB, coefficients_U: as there.
        seals_N: (N,) uint32, of the target. Mutated.

    Returns:
        (U,) uint32, the seal of every delta, fresh.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a row is out of range. Nothing was changed then.
    """
    _check_seals(seals_N, len(target_NB))
    arguments = checked_fold(target_NB, rows_U, deltas_UB, coefficients_U)
    of_deltas_U = np.zeros(len(rows_U), np.uint32)
    if deltas_UB.size:
        _fold_rows(*arguments, FACTORS, PRODUCT, seals_N.reshape(-1, 1), of_deltas_U)
    return of_deltas_U


def times(coefficient: int, seals_U: SealsOf) -> SealsOf:
    """Returns the seals of records multiplied by `coefficient` (0 to 255), given their seals: (U,) uint32, fresh."""
    return PRODUCT[coefficient, np.ascontiguousarray(seals_U).view(np.uint8)].view(np.uint32)


def broken(rows_NB: Bytes, seals_N: SealsOf, positions_U: Rows) -> Rows:
    """Returns which of some rows do not fit their seals.

    Args:
        rows_NB: (N, B) uint8, contiguous.
        seals_N: (N,) uint32, theirs.
        positions_U: (U,) int64, in 0..N-1.

    Returns:
        (M,) int64, ascending indices into `positions_U`, fresh.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a position is out of range.
    """
    _check_seals(seals_N, len(rows_NB))
    positions_U = _check_rows("positions_U", positions_U, 0, len(rows_NB))
    broken_U = np.zeros(len(positions_U), np.bool_)
    if len(positions_U) and _broken(_words("rows_NB", rows_NB), seals_N, positions_U, broken_U):
        return np.flatnonzero(broken_U).astype(np.int64, copy=False)
    return np.empty(0, np.int64)


def gather(rows_NB: Bytes, seals_N: SealsOf, positions_U: Rows, copies_UB: Bytes) -> Rows:
    """Copies some rows, and returns which of them do not fit their seals.

    Args:
        rows_NB, seals_N, positions_U: as of `broken`.
        copies_UB: (U, B) uint8, contiguous. Mutated.

    Returns, raises: as `broken`; nothing was copied if it raises.
    """
    _check_seals(seals_N, len(rows_NB))
    positions_U = _check_rows("positions_U", positions_U, 0, len(rows_NB))
    if copies_UB.shape != (len(positions_U), rows_NB.shape[1]) or not copies_UB.flags.c_contiguous:
        wanted = (len(positions_U), rows_NB.shape[1])
        raise ValueError(f"`copies_UB` must be contiguous, of shape {wanted}, got {copies_UB.shape}")
    broken_U = np.zeros(len(positions_U), np.bool_)
    words_NW, copies_UW = _words("rows_NB", rows_NB), _words("copies_UB", copies_UB)
    if len(positions_U) and _gather(words_NW, seals_N, positions_U, copies_UW, broken_U):
        return np.flatnonzero(broken_U).astype(np.int64, copy=False)
    return np.empty(0, np.int64)


def broken_run(rows_NB: Bytes, seals_N: SealsOf, first: int, end: int) -> Rows:
    """Returns which rows in [first, end) do not fit their seals: (M,) int64, ascending rows, fresh."""
    _check_seals(seals_N, len(rows_NB))
    if not 0 <= first <= end <= len(rows_NB):
        raise IndexError(f"rows {first}..{end} of {len(rows_NB)}")
    broken_U = np.zeros(end - first, np.bool_)
    if end > first and _broken_run(_words("rows_NB", rows_NB), seals_N, first, broken_U):
        return first + np.flatnonzero(broken_U).astype(np.int64, copy=False)
    return np.empty(0, np.int64)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    rows_NB, positions_U = np.ones((2, 4), np.uint8), np.zeros(1, np.int64)
    seals_N = seals_of(rows_NB)
    fold_rows_(np.zeros((2, 4), np.uint8), positions_U, rows_NB[:1], np.full(1, 2, np.uint8), seals_N)
    xor_(seals_N, positions_U, seals_N[:1].copy())
    seal_(rows_NB, positions_U, seals_N)
    broken(rows_NB, seals_N, positions_U)
    gather(rows_NB, seals_N, positions_U, rows_NB[:1].copy())
    broken_run(rows_NB, seals_N, 0, 1)
