"""The parts that the kernels of all optimizers share: the loop over blocks, and sums of squares in a fixed order.

A file in `optimizers/` has one kernel, which steps a block of records:

    step(records_PW, positions_U, gradients_UD, values_H, delta_UW)

    records_PW    (P, W) float32, changed in place
    positions_U   (U,) int64, which records, without duplicates
    gradients_UD  (U, D) float32, summed over the trainers; scratch when the kernel has used them
    values_H      (H,) float32, the hyperparameters of this step: see `SparseOptimizer.of_step`
    delta_UW      (U, W) uint32, written: old XOR new of the records' bytes

Arithmetic is float32, in a fixed order, one thread, without fast-math or fused multiply-add: a step may be made again
on another host, to the same bits.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from torch_ecrec.codec import vectors
from torch_ecrec.codec.field import WORD_BYTES
from torch_ecrec.codec.seals import seal_rows
from torch_ecrec.codec.vectors import I32, I64, ir, tools
from torch_ecrec.records.halves import load_block, store_block
from torch_ecrec.records.merge import BLOCK, sum_block
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import AHEAD, LINE_BYTES, prefetch_row
from torch_ecrec.runtime.row_sums import row_address

PAST_CACHE_WORDS = 1 << 21  # of deltas: nobody will find as many in a cache, so they are not written into one


def _type_copy_past_cache(context: Any, target: Any, source: Any, words: Any) -> Any:
    """The intrinsic `copy_past_cache(target, source, words)`: copies words without reading what they overwrite."""

    def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, words = args
        line_words = LINE_BYTES // WORD_BYTES
        past = builder.module.add_metadata([I32(1)])

        def copy(offset: Any, kind: Any) -> None:
            at = [
                builder.inttoptr(builder.add(start, builder.shl(offset, I64(2))), kind.as_pointer())
                for start in (target, source)
            ]
            value = builder.load(at[1], align=WORD_BYTES)
            if kind is I32:
                builder.store(value, at[0], align=WORD_BYTES)
            else:
                builder.store(value, at[0], align=LINE_BYTES).set_metadata("nontemporal", past)

        into_line = builder.lshr(builder.and_(builder.neg(target), I64(LINE_BYTES - 1)), I64(2))
        short = builder.icmp_signed("<", words, into_line)
        first = builder.select(short, words, into_line)
        whole = builder.add(first, builder.and_(builder.sub(words, first), I64(-line_words)))
        for begin, end, step, kind in (
            (I64(0), first, 1, I32),
            (first, whole, line_words, ir.VectorType(I32, line_words)),
            (whole, words, 1, I32),
        ):
            with tools.for_range_slice(builder, begin, end, I64(step)) as (offset, _):
                copy(offset, kind)
        builder.fence("seq_cst")  # such stores are not ordered with others by themselves
        return compiler.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


copy_past_cache: Any = intrinsic(_type_copy_past_cache)


def _all_blocks(
    records_PW: Any, positions_V: Any, gradients: Any, dim: Any, values_H: Any, delta_VW: Any, seals_V: Any
) -> None:
    """The template of every `blockwise` kernel, in which the kernel's own step replaces `_step`."""
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    words = records_PW.shape[1]
    past_cache = positions_V.shape[0] * words > PAST_CACHE_WORDS
    delta_NW = np.empty((BLOCK if past_cache else 0, words), np.uint32)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        sums = sum_ND[: last - first]
        for v in range(first - AHEAD, first):  # the step of a block asks for its later rows only
            prefetch_row(records_PW, positions_V, v)
        sum_block(gradients, first, seen_N, sums)
        deltas = delta_NW[: last - first] if past_cache else delta_VW[first:last]
        _step(records_PW, positions_V[first:last], sums, values_H, deltas)
        if seals_V.shape[0]:  # while the deltas are in the cache
            seal_rows(deltas, seals_V[first:last])
        if past_cache:
            copy_past_cache(row_address(delta_VW, first), row_address(deltas, 0), (last - first) * words)


def _all_blocks_of_halves(
    words_PM: Any,
    halves_PH: Any,
    positions_V: Any,
    gradients: Any,
    dim: Any,
    bfloat16: Any,
    values_H: Any,
    delta_VM: Any,
    seals_V: Any,
) -> None:
    """The template for records of 16-bit weights: a block's numbers are float32 while it is stepped."""
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    width = words_PM.shape[1] - (dim + 1) // 2 + dim
    numbers_NW, scratch_NW = np.empty((BLOCK, width), np.float32), np.empty((BLOCK, width), np.uint32)
    every_N = np.arange(BLOCK)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        count, positions_N = last - first, positions_V[first:last]
        for v in range(first - AHEAD, first):
            prefetch_row(words_PM, positions_V, v)
        sum_block(gradients, first, seen_N, sum_ND[:count])
        load_block(halves_PH, words_PM, positions_N, bfloat16, dim, numbers_NW.view(np.uint32))
        _step(numbers_NW, every_N[:count], sum_ND[:count], values_H, scratch_NW)
        bits_NW = numbers_NW.view(np.uint32)
        store_block(bits_NW, bfloat16, dim, halves_PH, words_PM, positions_N, delta_VM[first:last])
        if seals_V.shape[0]:
            seal_rows(delta_VM[first:last], seals_V[first:last])


def _step(*_arguments: Any) -> None:
    raise NotImplementedError("each kernel has its own")


def blockwise(step: Any, halves: bool = False) -> Any:
    """Makes a kernel for any number of records from one for a block. Sums of gradients stay in the cache.

        kernel(records_PW, positions_V, gradients, dim, values_H, delta_VW, seals_V)
        kernel(words_PM, halves_PH, positions_V, gradients, dim, bfloat16, values_H, delta_VM, seals_V)  with `halves`

    with `gradients` as for `merge.sum_block`, and (V,) uint32 for the seals of the deltas, or (0,) for none. It counts
    as a function of the step's own file, under the step's name, so that it is kept in the cache apart from others:
    their code is the same, only `_step` is another.

    Args:
        step: see above.
        halves: for records whose weights have 16 bits (`halves.py`), seen as words of 32 bits and as halves of these.
    """
    of, code = step.py_func, (_all_blocks_of_halves if halves else _all_blocks).__code__
    name = f"{'halves' if halves else 'blocks'}_of{of.__name__}"
    code = code.replace(co_filename=of.__code__.co_filename, co_firstlineno=of.__code__.co_firstlineno)
    loop = FunctionType(code, {**globals(), "_step": step, "__name__": of.__module__}, name)
    loop.__qualname__, loop.__module__ = name, of.__module__
    return kernel()(loop)


SQUARE_LANES = 8
_FLOAT, _LANES = ir.FloatType(), ir.VectorType(ir.FloatType(), SQUARE_LANES)


def _type_sum_of_squares(context: Any, values_UD: Any, i: Any, dim: Any) -> Any:
    """The intrinsic `sum_of_squares(values_UD, i, dim)`: of the first `dim` float32 of row i, in a fixed order.

    Lane l of 8 adds the elements l, l + 8, l + 16, ... in order. The lanes are added as ((0 + 4) + (2 + 6)) + ((1 + 5)
    + (3 + 7)). The array is contiguous. Written in LLVM's code: a Numba function adds in 8 scalars, and is called.
    """

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, args[0])
        width = tools.unpack_tuple(builder, array.shape, 2)[1]
        row, dim = builder.gep(array.data, [builder.mul(args[1], width)]), args[2]
        zero, total = ir.Constant(_LANES, [_FLOAT(0.0)] * SQUARE_LANES), tools.alloca_once(builder, _LANES)
        builder.store(zero, total)

        def add(values: Any) -> None:
            builder.store(builder.fadd(builder.load(total), builder.fmul(values, values)), total)

        def at(offset: Any) -> Any:
            return builder.bitcast(builder.gep(row, [offset]), _LANES.as_pointer())

        whole = builder.and_(dim, I64(-SQUARE_LANES))
        with tools.for_range_slice(builder, I64(0), whole, I64(SQUARE_LANES)) as (offset, _):
            add(builder.load(at(offset), align=WORD_BYTES))
        rest = builder.trunc(builder.sub(dim, whole), I32)
        with builder.if_then(builder.icmp_signed("!=", rest, I32(0))):  # to the other lanes this adds 0, no change
            places = ir.Constant(ir.VectorType(I32, SQUARE_LANES), [I32(lane) for lane in range(SQUARE_LANES)])
            are_left = builder.icmp_signed("<", places, vectors.spread(builder, rest, SQUARE_LANES))
            kind = ir.FunctionType(_LANES, [_LANES.as_pointer(), I32, are_left.type, _LANES])
            load = tools.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{SQUARE_LANES}f32.p0")
            add(builder.call(load, [at(whole), I32(WORD_BYTES), are_left, zero]))
        sums = builder.load(total)
        a, b, c, d, e, f, g, h = (builder.extract_element(sums, I32(lane)) for lane in range(SQUARE_LANES))
        even = builder.fadd(builder.fadd(a, e), builder.fadd(c, g))
        return builder.fadd(even, builder.fadd(builder.fadd(b, f), builder.fadd(d, h)))

    return types.float32(values_UD, types.intp, types.intp), generate


sum_of_squares: Any = intrinsic(_type_sum_of_squares)
