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

import types
from typing import Any

import numpy as np

from torch_ecrec.codec.seals import seal_rows
from torch_ecrec.records.halves import load_block, store_block
from torch_ecrec.records.merge import BLOCK, sum_block
from torch_ecrec.runtime.kernel_cache import kernel


def _all_blocks(
    records_PW: Any, positions_V: Any, gradients: Any, dim: Any, values_H: Any, delta_VW: Any, seals_V: Any
) -> None:
    """The template of every `blockwise` kernel, in which the kernel's own step replaces `_step`."""
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        sums = sum_ND[: last - first]
        sum_block(gradients, first, seen_N, sums)
        _step(records_PW, positions_V[first:last], sums, values_H, delta_VW[first:last])
        if seals_V.shape[0]:  # while the deltas are in the cache
            seal_rows(delta_VW[first:last], seals_V[first:last])


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
    loop = types.FunctionType(code, {**globals(), "_step": step, "__name__": of.__module__}, name)
    loop.__qualname__, loop.__module__ = name, of.__module__
    return kernel()(loop)


@kernel(error_model="numpy")
def sum_of_squares(values_UD: Any, i: Any, dim: Any) -> Any:
    """Returns the sum of squares of the first `dim` values of row i, in a fixed order.

    Lane l of 8 adds the elements l, l + 8, l + 16, ... in order. The lanes are added as ((0 + 4) + (2 + 6)) + ((1 + 5)
    + (3 + 7)).
    """
    v = values_UD
    zero = np.float32(0)
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    whole = dim // 8 * 8
    for j in range(0, whole, 8):
        a += v[i, j] * v[i, j]
        b += v[i, j + 1] * v[i, j + 1]
        c += v[i, j + 2] * v[i, j + 2]
        d += v[i, j + 3] * v[i, j + 3]
        e += v[i, j + 4] * v[i, j + 4]
        f += v[i, j + 5] * v[i, j + 5]
        g += v[i, j + 6] * v[i, j + 6]
        h += v[i, j + 7] * v[i, j + 7]
    rest = dim - whole
    if rest > 0:
        a += v[i, whole] * v[i, whole]
    if rest > 1:
        b += v[i, whole + 1] * v[i, whole + 1]
    if rest > 2:
        c += v[i, whole + 2] * v[i, whole + 2]
    if rest > 3:
        d += v[i, whole + 3] * v[i, whole + 3]
    if rest > 4:
        e += v[i, whole + 4] * v[i, whole + 4]
    if rest > 5:
        f += v[i, whole + 5] * v[i, whole + 5]
    if rest > 6:
        g += v[i, whole + 6] * v[i, whole + 6]
    return ((a + e) + (c + g)) + ((b + f) + (d + h))
