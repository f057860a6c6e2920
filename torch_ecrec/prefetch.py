"""A hint to the processor for kernels that visit rows scattered over memory much larger than the caches.

What is done to a row outlasts the processor's own look-ahead, so without a hint every row costs a full miss (measured:
3 to 4 times slower). The only place that touches LLVM beneath Numba.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

AHEAD = 8  # rows


def _type_prefetch(context: Any, array: Any, row: Any, column: Any) -> Any:
    """Hints that array[row, column] is about to be changed. LLVM's portable prefetch: no effect but on time."""

    tools: Any = cgutils  # untyped
    ir = tools.ir

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = target.make_array(signature.args[0])(target, builder, args[0])
        place = [args[1], args[2]]
        pointer = tools.get_item_pointer(target, builder, signature.args[0], view, place, wraparound=False)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        hint = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = tools.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(pointer, byte), word(1), word(3), word(1)])
        return target.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


_prefetch: Any = intrinsic(_type_prefetch)


@njit(nogil=True, cache=True)
def prefetch_row(array_NW: Any, rows_U: Any, i: Any) -> None:
    """Prefetches the row of `array_NW`, in 4-byte words, that comes `AHEAD` places after place `i`, if there is one."""
    if i + AHEAD < rows_U.shape[0]:
        row = rows_U[i + AHEAD]
        if row >= 0:
            for j in range(0, array_NW.shape[1], 16):  # 64 bytes
                _prefetch(array_NW, row, j)
            _prefetch(array_NW, row, array_NW.shape[1] - 1)
