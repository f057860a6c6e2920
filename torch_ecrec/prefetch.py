"""A hint to the processor for kernels that visit rows scattered over memory much larger than the caches.

What is done to a row outlasts the processor's own look-ahead, so without a hint every row costs a full miss. The hint
is for reading, into the second-level cache, also where the row is about to be changed: asking for ownership at once is
slower (measured on rows of 512 bytes: 7 GB/s of XOR, against 4.5).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

AHEAD = 16  # rows
LINE_BYTES = 64


def _type_prefetch_row(context: Any, array_NW: Any, rows_U: Any, i: Any) -> Any:
    """Prefetches the row of `array_NW` that comes `AHEAD` places after place `i` of `rows_U`, if there is one.

    Written in LLVM's code as a whole: a function of Numba's counts references to its arrays, atomically, at every call,
    which takes ten times as long as the hint.
    """
    tools: Any = cgutils  # untyped
    ir = tools.ir
    byte, word, long = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    hint = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
    read, second_level, data = word(0), word(2), word(1)

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, rows_type, _ = signature.args
        array = target.make_array(array_type)(target, builder, args[0])
        rows = target.make_array(rows_type)(target, builder, args[1])
        function = tools.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0")

        def prefetch(start: Any, offset: Any) -> None:
            builder.call(function, [builder.gep(start, [offset]), read, second_level, data])

        place = builder.add(args[2], long(AHEAD))
        (many,) = tools.unpack_tuple(builder, rows.shape, 1)
        with builder.if_then(builder.icmp_signed("<", place, many)):
            row = builder.load(tools.get_item_pointer(target, builder, rows_type, rows, [place], wraparound=False))
            with builder.if_then(builder.icmp_signed(">=", row, long(0))):
                first = tools.get_item_pointer(target, builder, array_type, array, [row, long(0)], wraparound=False)
                start, row_bytes = (
                    builder.bitcast(first, byte.as_pointer()),
                    tools.unpack_tuple(builder, array.strides)[0],
                )
                with tools.for_range_slice(builder, long(0), row_bytes, long(LINE_BYTES)) as (offset, _):
                    prefetch(start, offset)
                prefetch(start, builder.sub(row_bytes, long(1)))  # a row may end in one line more than its length says
        return target.get_dummy_value()

    return types.void(array_NW, rows_U, types.intp), generate


prefetch_row: Any = intrinsic(_type_prefetch_row)
