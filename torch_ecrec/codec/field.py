"""Arithmetic of GF(2^8) on whole batches of bytes: the inner loops of encode, fold and decode.

Terms. The field is bytes modulo the polynomial 0x11D (the one of galois, ISA-L and klauspost). Addition is XOR, so
every element is its own negative. Example: 2 * 128 = 0x100, which reduces by 0x11D to 0x1D = 29; hence
`PRODUCT[2, 128] == 29`.

How. Multiplying by a constant c is linear over bits: c * x is the XOR of c * 2^b over the bits b set in x, the product
of an 8 x 8 matrix of bits and x. Processors with GFNI have an instruction for just that, on a whole vector of bytes
(`_product`); on others it is eight selections and XORs, which any vector unit does. Numba's compiler does neither by
itself, and a loop over the few words of a record it turns into poor vector code, so the innermost loops are given to it
as vector instructions of LLVM, which are the same for all processors but for that one.

Invariants. Integers only, so the same bits on every CPU. One pass over the source; nothing is allocated in proportion
to it, except for a copy of a source that is not contiguous or not aligned.

Shapes: N rows of the target, U rows of the source, B bytes in a row (a multiple of 4), W words of 4 bytes, K sources,
R results.

Does not know codes, stripes or slots, and does not guard against two threads that write the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from torch_ecrec.codec import vectors
from torch_ecrec.codec.vectors import I8, I32, I64, ir, tools
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import first_outside, prefetch_row

FIELD_SIZE = 256  # elements of GF(2^8), so members of a stripe at most

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]

BYTE = np.dtype(np.uint8)  # comparing a dtype with a class takes longer than checking all the rest

POLYNOMIAL = 0x11D
WORD_BYTES = 4  # records are float32 values, so a row is a whole number of these
VECTOR_WORDS = 16  # 64 bytes: the widest register there is; LLVM makes it several where they are narrower
COMBINED_WORDS = 64  # of every source at a time: enough to hide what it takes to go on to the next source
BLOCK_BYTES = 1 << 15  # bytes of all sources together: they stay in the first-level cache from result to result


def _product_table() -> Bytes:
    """Returns every product, (256, 256) uint8, from powers of the generator 2."""
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


def _factor_table() -> NDArray[np.uint64]:
    """Returns every coefficient c in the two forms that `_product` takes: (256, 2) uint64.

    The first has c * 2^b as byte b; the second is the same matrix of bits as GFNI wants it: transposed, last row first.
    """
    columns = PRODUCT[:, 1 << np.arange(8)]
    bits = np.unpackbits(columns[:, :, None], axis=2, bitorder="little")  # [c, b, i]: bit i of c * 2^b
    rows = np.packbits(bits.transpose(0, 2, 1)[:, ::-1], axis=2, bitorder="little")[:, :, 0]
    table = np.stack([columns, rows], axis=1).astype("<u1").view("<u8")[:, :, 0].astype(np.uint64)
    table.setflags(write=False)
    return table


FACTORS: NDArray[np.uint64] = _factor_table()
FACTOR_BYTES = FACTORS.itemsize * FACTORS.shape[1]

# -------------------------------------------------------------------------------------------------- vector instructions
#
# What follows writes LLVM code, at the time a kernel is compiled. Memory is named by address, so that kernels can work
# on any number of arrays; the functions at the end of the file have checked all that is checked.


def _product(target: Any, builder: Any, words: Any, factor: Sequence[Any]) -> Any:
    """Emits c * words for a vector of words, where `factor` is the row of c in `FACTORS`."""
    kind = ir.VectorType(I8, WORD_BYTES * words.type.count)
    vector = builder.bitcast(words, kind)
    columns, matrix = factor
    if vectors.has_gfni(target):
        matrices = vectors.spread(builder, matrix, max(kind.count, vectors.LEAST_BYTES) // vectors.MATRIX_BYTES)
        return builder.bitcast(vectors.affine(target, builder, vector, matrices), words.type)
    zero = ir.Constant(kind, None)
    product = zero
    for bit in range(8):
        column = vectors.spread(builder, builder.trunc(builder.lshr(columns, I64(8 * bit)), I8), kind.count)
        is_set = builder.icmp_unsigned("!=", builder.and_(vector, ir.Constant(kind, [1 << bit] * kind.count)), zero)
        product = builder.xor(product, builder.select(is_set, column, zero))
    return builder.bitcast(product, words.type)


def _place(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """Emits a pointer to a `kind` that lies `offset` words after an address."""
    moved = builder.add(address, builder.shl(offset, I64(2)))
    return builder.inttoptr(moved, kind.as_pointer())


def _in_vectors(builder: Any, words: Any, most: int, step: Callable[[Any, int], None]) -> None:
    """Emits a loop over all words: `step(offset, count)` emits the code for one vector.

    Vectors are as long as `most`; the rest is done once with half as many words, and so on.
    """
    whole = builder.and_(words, I64(-most))
    with tools.for_range_slice(builder, I64(0), whole, I64(most)) as (offset, _):
        step(offset, most)
    offset, count = whole, most // 2
    while count:
        left = builder.and_(words, I64(count))
        with builder.if_then(builder.icmp_unsigned("!=", left, I64(0))):
            step(offset, count)
        offset, count = builder.add(offset, left), count // 2


def _type_add(is_product: bool) -> Any:
    """The intrinsic `add(target, source, words, columns, matrix)`: *target ^= c * *source.

    c is 1 unless `is_product`.
    """

    def typer(context: Any, target: Any, source: Any, words: Any, columns: Any, matrix: Any) -> Any:
        def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
            changed, read, words, *factor = args

            def step(offset: Any, count: int) -> None:
                kind = ir.VectorType(I32, count)
                place = _place(builder, changed, offset, kind)
                value = builder.load(_place(builder, read, offset, kind), align=WORD_BYTES)
                if is_product:
                    value = _product(compiler, builder, value, factor)
                builder.store(builder.xor(builder.load(place, align=WORD_BYTES), value), place, align=WORD_BYTES)

            _in_vectors(builder, words, VECTOR_WORDS, step)
            return compiler.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.uint64, types.uint64), generate

    return typer


def _type_sum(is_product: bool) -> Any:
    """The intrinsic `sum(target, sources, many, first, words, factors)`: *target = the sum of c[m] * *sources[m].

    `sources` is the address of `many` addresses, `first` the offset in bytes from each of them, `factors` the address
    of `many` rows of `FACTORS`. Every c is 1 unless `is_product`.
    """

    def typer(context: Any, target: Any, sources: Any, many: Any, first: Any, words: Any, factors: Any) -> Any:
        def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
            result, sources, many, first, words, factors = args

            def step(offset: Any, count: int) -> None:
                kind = ir.VectorType(I32, count)
                total = tools.alloca_once(builder, kind)
                builder.store(ir.Constant(kind, None), total)
                with tools.for_range(builder, many) as loop:
                    source = builder.load(_place(builder, sources, builder.shl(loop.index, I64(1)), I64))
                    value = builder.load(_place(builder, builder.add(source, first), offset, kind), align=WORD_BYTES)
                    if is_product:
                        row = builder.shl(loop.index, I64(2))
                        factor = [
                            builder.load(_place(builder, factors, builder.add(row, I64(2 * form)), I64))
                            for form in range(2)
                        ]
                        value = _product(compiler, builder, value, factor)
                    builder.store(builder.xor(builder.load(total), value), total)
                builder.store(builder.load(total), _place(builder, result, offset, kind), align=WORD_BYTES)

            _in_vectors(builder, words, COMBINED_WORDS, step)
            return compiler.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return typer


def _type_has_gfni(context: Any) -> Any:
    """The intrinsic `has_gfni()`: whether a product is as cheap as a XOR; known when a kernel is compiled."""

    def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), vectors.has_gfni(compiler))

    return types.boolean(), generate


_has_gfni: Any = intrinsic(_type_has_gfni)
_add_xor: Any = intrinsic(_type_add(False))
_add_product: Any = intrinsic(_type_add(True))
_sum_xor: Any = intrinsic(_type_sum(False))
_sum_product: Any = intrinsic(_type_sum(True))

# -------------------------------------------------------------------------------------------------------------- kernels


@kernel()
def _xor_rows(target_NW: Any, rows_U: Any, source_UW: Any) -> None:
    words = source_UW.shape[1]
    target, source, none = target_NW.ctypes.data, source_UW.ctypes.data, np.uint64(0)
    for i in range(rows_U.shape[0]):
        prefetch_row(target_NW, rows_U, i)
        row = rows_U[i]
        if row >= 0:
            _add_xor(target + row * words * WORD_BYTES, source + i * words * WORD_BYTES, words, none, none)


@kernel()
def fold_row(target: Any, row: Any, read: Any, words: Any, c: Any, factors: Any) -> None:
    """Row `row` of those at an address ^= c * the words at the address `read`; a negative one is skipped."""
    if row < 0 or c == 0:
        return
    changed, columns, matrix = target + row * words * WORD_BYTES, factors[c, 0], factors[c, 1]
    if c == 1 and not _has_gfni():  # else a branch less to predict
        _add_xor(changed, read, words, columns, matrix)
    else:
        _add_product(changed, read, words, columns, matrix)


@kernel()
def _fold_rows(target_NW: Any, rows_U: Any, source_UW: Any, coefficients_U: Any, factors: Any) -> None:
    words = source_UW.shape[1]
    target, source = target_NW.ctypes.data, source_UW.ctypes.data
    for i in range(rows_U.shape[0]):
        prefetch_row(target_NW, rows_U, i)
        fold_row(target, rows_U[i], source + i * words * WORD_BYTES, words, coefficients_U[i], factors)


@kernel()
def _combine(results_RW: Any, sources_K: Any, coefficients_RK: Any, factors_RKF: Any) -> None:
    """results[i] = the sum over m of coefficients[i, m] * the words at address sources[m].

    All arrays whose addresses are taken come from the caller: Numba frees one of its own after the last mention of it.
    """
    many, words = len(sources_K), results_RW.shape[1]
    is_xor_R = np.ones(len(results_RW), np.bool_)
    for i in range(len(results_RW)):
        for m in range(many):
            is_xor_R[i] &= coefficients_RK[i, m] == 1
    sources, results, factors = sources_K.ctypes.data, results_RW.ctypes.data, factors_RKF.ctypes.data
    block = max(COMBINED_WORDS, BLOCK_BYTES // WORD_BYTES // many // COMBINED_WORDS * COMBINED_WORDS)
    for start in range(0, words, block):
        count = min(block, words - start)
        for i in range(len(results_RW)):
            result, first = results + (i * words + start) * WORD_BYTES, start * WORD_BYTES
            if is_xor_R[i]:
                _sum_xor(result, sources, many, first, count, 0)
            else:
                _sum_product(result, sources, many, first, count, factors + i * many * FACTOR_BYTES)


@kernel()
def _combine_rows(target_NW: Any, rows_U: Any, wanted_N: Any, sources_K: Any, coefficients_K: Any, factors: Any) -> Any:
    """Where row rows[i] is wanted: target[rows[i]] = the sum over m of coefficients[m] * row i at address sources[m].

    `factors` are the rows of `FACTORS` of the coefficients. No row is wanted afterwards; returns how many were.
    """
    words, many = target_NW.shape[1], len(sources_K)
    is_xor = True
    for m in range(many):
        is_xor &= coefficients_K[m] == 1
    target, sources, factors_at = target_NW.ctypes.data, sources_K.ctypes.data, factors.ctypes.data
    count, i = 0, 0
    while i < len(rows_U):
        row = rows_U[i]
        length = 0  # of a run: its rows follow each other in the target as in the sources
        while i + length < len(rows_U) and rows_U[i + length] == row + length and wanted_N[row + length]:
            wanted_N[row + length] = 0
            length += 1
        result, first = target + row * words * WORD_BYTES, i * words * WORD_BYTES
        if length and is_xor:
            _sum_xor(result, sources, many, first, length * words, 0)
        elif length:
            _sum_product(result, sources, many, first, length * words, factors_at)
        count += length
        i += max(length, 1)
    return count


def _check_bytes(name: str, array: Bytes) -> None:
    if array.ndim != 2 or array.dtype != BYTE:
        raise ValueError(f"`{name}` must be a 2-D uint8 array, got {array.ndim}-D {array.dtype}")
    if array.shape[1] % WORD_BYTES:
        raise ValueError(f"`{name}` must have rows of a multiple of {WORD_BYTES} bytes, got {array.shape[1]}")


def _check_target(name: str, array: Bytes) -> None:
    _check_bytes(name, array)
    flags = array.flags
    if not flags.c_contiguous or not flags.writeable or not array.view(np.uint32).flags.aligned:
        raise ValueError(
            f"`{name}` is changed in place, so it must be contiguous, writeable and {WORD_BYTES}-byte aligned"
        )


def as_words(array: Bytes) -> NDArray[np.uint32]:
    """Returns rows of a multiple of 4 bytes as 4-byte words; copies only if not contiguous or not aligned."""
    if array.flags.c_contiguous:
        words = array.view(np.uint32)
        if words.flags.aligned:
            return words
    return np.array(array, order="C").view(np.uint32)


def _in_place(sources: Sequence[Bytes] | Bytes) -> tuple[object, Rows]:
    """Returns sources as words, and their addresses, (K,). The words must be kept while the addresses are used."""
    if isinstance(sources, np.ndarray):
        words = as_words(sources)
        return words, words.ctypes.data + words.strides[0] * np.arange(len(words))
    each = [as_words(source_UB) for source_UB in sources]
    return each, np.array([source_UW.ctypes.data for source_UW in each], np.int64)


def _check_rows(target_NB: Bytes, rows_U: Rows, source_UB: Bytes, low: int = -1) -> None:
    _check_target("target_NB", target_NB)
    _check_bytes("source_UB", source_UB)
    if rows_U.ndim != 1 or rows_U.dtype != np.int64:
        raise ValueError(f"`rows_U` must be a 1-D int64 array, got {rows_U.ndim}-D {rows_U.dtype}")
    if source_UB.shape != (len(rows_U), target_NB.shape[1]):
        wanted = (len(rows_U), target_NB.shape[1])
        raise ValueError(f"`source_UB` must have the shape {wanted} of the rows, got {source_UB.shape}")
    outside = first_outside(rows_U, low, len(target_NB))
    if outside >= 0:
        raise IndexError(f"`rows_U[{outside}]` must be in {low}..{len(target_NB) - 1}, got {rows_U[outside]}")


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
        _xor_rows(as_words(target_NB), np.ascontiguousarray(rows_U), as_words(source_UB))


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
    arguments = checked_fold(target_NB, rows_U, source_UB, coefficients_U)
    if source_UB.size:
        _fold_rows(*arguments, FACTORS)


def checked_fold(
    target_NB: Bytes, rows_U: Rows, source_UB: Bytes, coefficients_U: Bytes
) -> tuple[NDArray[np.uint32], Rows, NDArray[np.uint32], Bytes]:
    """Checks the arguments of `fold_rows_`, and returns them as kernels take them. Raises as `fold_rows_`."""
    _check_rows(target_NB, rows_U, source_UB)
    if coefficients_U.shape != rows_U.shape or coefficients_U.dtype != BYTE:
        got = f"{coefficients_U.dtype} of {coefficients_U.shape}"
        raise ValueError(f"`coefficients_U` must be uint8 of shape {rows_U.shape}, got {got}")
    rows_U, coefficients_U = np.ascontiguousarray(rows_U), np.ascontiguousarray(coefficients_U)
    return as_words(target_NB), rows_U, as_words(source_UB), coefficients_U


def combine(coefficients_RK: Bytes, sources: Sequence[Bytes] | Bytes, name: str = "sources") -> Bytes:
    """Returns sums of products: result[i] is the sum over m of coefficients[i, m] * sources[m].

    Args:
        coefficients_RK: (R, K) uint8.
        sources: K >= 1 arrays (U, B) uint8, or one (K, U, B). Each is read from memory once, however large R is.
        name: of `sources` in errors.

    Returns:
        (R, U, B) uint8, fresh.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    if coefficients_RK.ndim != 2 or coefficients_RK.dtype != BYTE or coefficients_RK.shape[1] != len(sources):
        got = f"{coefficients_RK.dtype} of {coefficients_RK.shape}"
        raise ValueError(f"`coefficients_RK` must be (R, {len(sources)}) uint8, a column for each source, got {got}")
    if len(sources) == 0:
        raise ValueError(f"`{name}` must not be empty")
    shape = sources[0].shape
    for source_UB in sources[:1] if isinstance(sources, np.ndarray) else sources:
        _check_bytes(name, source_UB)
        if source_UB.shape != shape:
            raise ValueError(f"`{name}` must be of one shape, got {source_UB.shape} and {shape}")
    results_RUB = np.empty((len(coefficients_RK), *shape), np.uint8)
    if results_RUB.size:
        words, addresses_K = _in_place(sources)
        results_RW = results_RUB.reshape(len(results_RUB), -1).view(np.uint32)
        coefficients_RK = np.array(coefficients_RK, order="C")  # writable: or it is another signature, compiled then
        _combine(results_RW, addresses_K, coefficients_RK, FACTORS.take(coefficients_RK, axis=0))
        del words  # until here the kernel had their addresses
    return results_RUB


def combine_rows_(
    target_NB: Bytes, rows_U: Rows, wanted_N: Bytes, coefficients_K: Bytes, sources: Sequence[Bytes]
) -> int:
    """target[rows[i]] = the sum over m of coefficients[m] * sources[m][i] where that row is wanted, in place.

    Args:
        target_NB: (N, B) uint8, contiguous. Mutated. Must not alias a source.
        rows_U: (U,) int64, in 0..N-1. Fastest in runs of rows that follow each other.
        wanted_N: (N,) uint8, contiguous, zero where a row is not wanted. Mutated: zero for all `rows_U` afterwards.
        coefficients_K: (K,) uint8.
        sources: K >= 1 arrays (U, B) uint8.

    Returns:
        How many rows were wanted.

    Raises:
        ValueError: a shape or a dtype does not fit.
        IndexError: a row is out of range. Nothing was changed then.
    """
    if coefficients_K.shape != (len(sources),) or coefficients_K.dtype != BYTE or len(sources) == 0:
        got = f"{coefficients_K.dtype} of {coefficients_K.shape}"
        raise ValueError(
            f"`coefficients_K` must be ({len(sources)},) uint8, one or more for as many sources, got {got}"
        )
    if wanted_N.shape != (len(target_NB),) or wanted_N.dtype != BYTE or not wanted_N.flags.c_contiguous:
        got = f"{wanted_N.dtype} of {wanted_N.shape}"
        raise ValueError(f"`wanted_N` must be contiguous uint8 of shape ({len(target_NB)},), got {got}")
    for source_UB in sources:
        _check_rows(target_NB, rows_U, source_UB, 0)
    words, addresses_K = _in_place(sources)
    rows_U, coefficients_K = np.ascontiguousarray(rows_U), np.array(coefficients_K, order="C")  # writable, as above
    factors = FACTORS.take(coefficients_K, axis=0)
    count = _combine_rows(as_words(target_NB), rows_U, wanted_N, addresses_K, coefficients_K, factors)
    del words  # until here the kernel had their addresses
    return int(count)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    target_NB, source_UB, rows_U = np.zeros((2, 4), np.uint8), np.ones((1, 4), np.uint8), np.zeros(1, np.int64)
    xor_rows_(target_NB, rows_U, source_UB)
    fold_rows_(target_NB, rows_U, source_UB, np.full(1, 2, np.uint8))
    combine(np.array([[1, 1], [1, 2]], np.uint8), [source_UB, source_UB])
    combine_rows_(target_NB, rows_U, np.ones(2, np.uint8), np.ones(1, np.uint8), [source_UB])
