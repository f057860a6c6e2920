"""What kernels of several packages share: a prefetch of scattered rows, checks of indices, arrays by address, floats.

Does not know what a row holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from torch_ecrec.runtime.kernel_cache import kernel

AHEAD = 16  # rows
LINE_BYTES = 64  # of the processor's caches

# ------------------------------------------------------------------------------------------------------- scattered rows


def _prefetch(builder: Any, start: Any, row_bytes: Any) -> None:
    """Emits code that prefetches a row for reading, into the second-level cache.

    It is used for rows about to be changed, too: asking for ownership at once is slower (7 GB/s of XOR against 4.5 on
    rows of 512 bytes, when this was written).
    """
    tools: Any = cgutils  # untyped
    ir = tools.ir
    byte, word, long = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    hint = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
    function = tools.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0")
    read, second_level, data = word(0), word(2), word(1)
    begin = builder.ptrtoint(start, long)
    first, end = builder.and_(begin, long(-LINE_BYTES)), builder.add(begin, row_bytes)

    def prefetch(line: Any) -> None:
        builder.call(function, [builder.inttoptr(line, byte.as_pointer()), read, second_level, data])

    at_once = 4 * LINE_BYTES
    whole = builder.add(first, builder.and_(builder.sub(end, first), long(-at_once)))
    with tools.for_range_slice(builder, first, whole, long(at_once)) as (lines, _):
        for offset in range(0, at_once, LINE_BYTES):
            prefetch(builder.add(lines, long(offset)))
    with tools.for_range_slice(builder, whole, end, long(LINE_BYTES)) as (line, _):
        prefetch(line)


def _type_prefetch_row(context: Any, array_NW: Any, rows_U: Any, i: Any) -> Any:
    """Prefetches the row of `array_NW` that comes `AHEAD` places after place `i` of `rows_U`, if there is one.

    It is for kernels that visit rows scattered over memory much larger than the caches. The work on a row outlasts the
    processor's own look-ahead, so that without it every row costs a full miss.

    It is written in LLVM's code: a Numba function would count references to its arrays atomically at every call, which
    takes ten times as long as the prefetch.
    """
    tools: Any = cgutils  # untyped
    ir = tools.ir
    byte, long = ir.IntType(8), ir.IntType(64)

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, rows_type, _ = signature.args
        array = target.make_array(array_type)(target, builder, args[0])
        rows = target.make_array(rows_type)(target, builder, args[1])
        place = builder.add(args[2], long(AHEAD))
        (many,) = tools.unpack_tuple(builder, rows.shape, 1)
        with builder.if_then(builder.icmp_signed("<", place, many)):
            row = builder.load(tools.get_item_pointer(target, builder, rows_type, rows, [place], wraparound=False))
            with builder.if_then(builder.icmp_signed(">=", row, long(0))):
                first = tools.get_item_pointer(target, builder, array_type, array, [row, long(0)], wraparound=False)
                row_bytes = tools.unpack_tuple(builder, array.strides)[0]
                _prefetch(builder, builder.bitcast(first, byte.as_pointer()), row_bytes)
        return target.get_dummy_value()

    return types.void(array_NW, rows_U, types.intp), generate


prefetch_row: Any = intrinsic(_type_prefetch_row)


def _type_prefetch(context: Any, address: Any, row_bytes: Any) -> Any:
    """Prefetches the row at an address. The address is not checked: a prefetch never faults."""
    tools: Any = cgutils  # untyped

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, builder.inttoptr(args[0], tools.voidptr_t), args[1])
        return target.get_dummy_value()

    return types.void(types.intp, types.intp), generate


prefetch: Any = intrinsic(_type_prefetch)


@kernel()
def first_outside(rows_U: Any, low: Any, limit: Any) -> Any:
    """Returns the index of the first row outside [low, limit), or -1."""
    outside = 0
    for i in range(rows_U.shape[0]):  # without a way out, so that it is done in vectors
        outside += (rows_U[i] < low) | (rows_U[i] >= limit)
    if outside:
        for i in range(rows_U.shape[0]):
            if rows_U[i] < low or rows_U[i] >= limit:
                return i
    return -1


# --------------------------------------------------------------------------------------------------- arrays by address


def check_memory(name: str, array: NDArray[Any], shape: tuple[int, ...], *dtypes: Any) -> None:
    """Raises ValueError unless an array is contiguous and aligned, of a shape, and of one of some dtypes."""
    if array.shape != shape or array.dtype not in dtypes or not (array.flags.c_contiguous and array.flags.aligned):
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(
            f"`{name}` must be contiguous {wanted} of shape {shape}, got {array.dtype.name} of shape {array.shape},"
            f" strides {array.strides}"
        )


def _type_pointer(context: Any, address: Any) -> Any:
    """The intrinsic `pointer(address)`: an address as a pointer, for `numba.carray`."""
    tools: Any = cgutils  # untyped

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], tools.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_type_pointer)


def addresses(arrays: Sequence[NDArray[Any]], width: int, *dtypes: Any) -> NDArray[np.int64]:
    """Returns the addresses of some arrays, (A,) int64. The caller keeps the arrays alive.

    Kernels that work on any number of arrays take addresses, since Numba compiles a tuple of arrays once per length. A
    kernel cannot check an address, so the arrays are checked here.

    Args:
        arrays: (any, `width`) each.
        dtypes: each array has one of them.

    Raises:
        ValueError: an array is not contiguous, of another width or dtype.
    """
    for array in arrays:
        check_memory("arrays", array, (len(array), width), *dtypes)
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)


# ------------------------------------------------------------------------------------------------------------ float32


def _type_fused_multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns `a * b + c` of float32 with one rounding, on any processor."""
    tools: Any = cgutils  # untyped

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        real = tools.ir.FloatType()
        kind = tools.ir.FunctionType(real, [real, real, real])
        return builder.call(tools.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(types.float32, types.float32, types.float32), generate


fused_multiply_add: Any = intrinsic(_type_fused_multiply_add)

# ------------------------------------------------------------------------------------------------------------ bfloat16


def as_float(value: Any) -> Any:
    """Returns a number as float32, in kernels. A uint16 is taken for a bfloat16, the upper half of a float32."""


@overload(as_float, inline="always")
def _type_as_float(value: Any) -> Any:
    def is_float(value: Any) -> Any:
        return value

    def is_half(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    return is_float if isinstance(value, types.Float) else is_half
