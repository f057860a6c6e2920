"""`sum_rows`, `sum_table_rows` and `row_address`, for kernels: a sum of rows is kept in registers until it is complete.

A loop of Numba's that adds row after row to an array reads and writes that array for each row, and looks each time
whether the two overlap. Here columns are summed in blocks: all rows of the first 64 columns, then of the next 64, what
is left in blocks of 16, of 4 and of one. A row of 70 floats has blocks of 64, 4, 1 and 1 columns.

Invariants. Columns are independent, so the blocks change no bit: each is summed in the order of the rows, the first
value is taken as it is (-0.0 stays), products are rounded before they are added (never fused).

Rows are float32, or uint16 that is bfloat16. Written in LLVM's code, since Numba has no type for a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCKS = ((16, 4), (16, 1), (4, 1), (1, 1))  # lanes of a vector, vectors: widest first, each a multiple of the next

_tools: Any = cgutils  # untyped
_ir = _tools.ir
_FLOAT, _LONG, _WORD, _HALF = _ir.FloatType(), _ir.IntType(64), _ir.IntType(32), _ir.IntType(16)
_FLOAT_BYTES = 4


def _of_lanes(scalar: Any, lanes: int) -> Any:
    return scalar if lanes == 1 else _ir.VectorType(scalar, lanes)


@dataclass(frozen=True)
class _Rows:
    """Emits code that reads rows: `item(i)` is the address of the i-th, `weight(i)` its weight."""

    builder: Any
    is_half: bool
    item: Callable[[Any], Any]
    weight: Callable[[Any], Any]

    def _load(self, row: Any, column: Any, lanes: int) -> Any:
        """Emits code that loads float32 numbers from a column on."""
        builder, stored, itemsize = self.builder, *((_HALF, 2) if self.is_half else (_FLOAT, _FLOAT_BYTES))
        start = builder.add(row, builder.mul(column, _LONG(itemsize)))
        found = builder.load(builder.inttoptr(start, _of_lanes(stored, lanes).as_pointer()), align=itemsize)
        if not self.is_half:
            return found
        words = _of_lanes(_WORD, lanes)
        upper = _WORD(16) if lanes == 1 else _ir.Constant(words, [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(found, words), upper), _of_lanes(_FLOAT, lanes))

    def _in_all_lanes(self, number: Any, lanes: int) -> Any:
        if lanes == 1:
            return number
        nothing = _ir.Constant(_ir.VectorType(_FLOAT, lanes), _ir.Undefined)
        first = self.builder.insert_element(nothing, number, _WORD(0))
        return self.builder.shuffle_vector(first, nothing, _ir.Constant(_ir.VectorType(_WORD, lanes), [0] * lanes))

    def values(self, i: Any, columns: Sequence[Any], lanes: int, weighted: bool) -> list[Any]:
        """Emits code for row i times its weight: `lanes` numbers from each of some columns on."""
        row = self.item(i)
        found = [self._load(row, column, lanes) for column in columns]
        if weighted:
            weight = self._in_all_lanes(self.weight(i), lanes)
            found = [self.builder.fmul(weight, value) for value in found]
        return found


def _sum_blocks(rows: _Rows, out: Any, dim: Any, first: Any, stop: Any, weighted: bool) -> None:
    """Emits code that sums rows [first, stop), at least one, in blocks, and writes the sums at the address `out`."""
    builder, column = rows.builder, _LONG(0)
    for lanes, vectors in BLOCKS:
        end, width = builder.and_(dim, _LONG(-lanes * vectors)), _LONG(lanes * vectors)
        kind = _of_lanes(_FLOAT, lanes)
        sums = [_tools.alloca_once(builder, kind) for _ in range(vectors)]  # LLVM keeps them in registers
        with _tools.for_range_slice(builder, column, end, width) as (start, _):
            columns = [builder.add(start, _LONG(lanes * v)) for v in range(vectors)]
            for total, value in zip(sums, rows.values(first, columns, lanes, weighted), strict=True):
                builder.store(value, total)
            with _tools.for_range_slice(builder, builder.add(first, _LONG(1)), stop, _LONG(1)) as (i, _):
                for total, value in zip(sums, rows.values(i, columns, lanes, weighted), strict=True):
                    builder.store(builder.fadd(builder.load(total), value), total)
            for total, at in zip(sums, columns, strict=True):
                address = builder.add(out, builder.mul(at, _LONG(_FLOAT_BYTES)))
                builder.store(builder.load(total), builder.inttoptr(address, kind.as_pointer()), align=_FLOAT_BYTES)
        column = end


def _item(target: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
    """Emits code that loads array[i]; an integer as one of 64 bits."""
    found = builder.load(_tools.get_item_pointer(target, builder, array_type, array, [i], wraparound=False))
    return builder.sext(found, _LONG) if isinstance(array_type.dtype, types.Integer) else found


def _generate(where: Callable[..., Callable[[Any], Any]], places: int) -> Callable[..., Any]:
    """Returns the generator of an intrinsic: out, dim, what says `where` rows are, kind, index, weights, ...

    Args:
        where: given the arguments of that (their types, then their values), returns the address of row u.
        places: how many arguments that are.
    """

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        rest = 2 + places
        kind, *indices = signature.args[rest : rest + 3]
        arrays = [
            of(target, builder, value)
            for of, value in zip(map(target.make_array, indices), args[rest + 1 : rest + 3], strict=True)
        ]
        address = where(target, builder, signature.args[2:rest], args[2:rest])
        rows = _Rows(
            builder,
            not isinstance(kind.dtype, types.Float),
            lambda i: address(_item(target, builder, indices[0], arrays[0], i)),
            lambda i: _item(target, builder, indices[1], arrays[1], i),
        )
        weighted, first, stop = args[rest + 3 :]
        with builder.if_else(weighted) as (then, otherwise):
            with then:
                _sum_blocks(rows, args[0], args[1], first, stop, True)
            with otherwise:
                _sum_blocks(rows, args[0], args[1], first, stop, False)
        return target.get_dummy_value()

    return generate


def _type_sum_rows(
    context: Any, out: Any, dim: Any, address_U: Any, kind: Any, inverse_N: Any, per_id_N: Any, weighted: Any,
    first: Any, stop: Any,
) -> Any:  # fmt: skip
    """Writes the sum of rows inverse_N[first:stop], each times its weight in `per_id_N` if `weighted`.

    Args:
        out: address of `dim` float32. Overwritten. Must not overlap a row.
        address_U: int64, where each row is; aligned for its items.
        kind: an array of the rows' dtype.
        inverse_N: int32 or int64.
        stop: first < stop.

    Not checked: any of these.
    """

    def where(target: Any, builder: Any, kinds: Any, values: Any) -> Any:
        array = target.make_array(kinds[0])(target, builder, values[0])
        return lambda u: _item(target, builder, kinds[0], array, u)

    each = types.intp, types.intp, address_U, kind, inverse_N, per_id_N, types.boolean, types.intp, types.intp
    return types.void(*each), _generate(where, 1)


sum_rows: Any = intrinsic(_type_sum_rows)


def _type_sum_table_rows(
    context: Any, out: Any, dim: Any, table: Any, row_bytes: Any, kind: Any, inverse_N: Any, per_id_N: Any,
    weighted: Any, first: Any, stop: Any,
) -> Any:  # fmt: skip
    """Does as `sum_rows`, for rows that lie `row_bytes` apart from the address `table` on."""

    def where(target: Any, builder: Any, kinds: Any, values: Any) -> Any:
        return lambda u: builder.add(values[0], builder.mul(u, values[1]))

    each = types.intp, types.intp, types.intp, types.intp, kind, inverse_N, per_id_N, types.boolean
    return types.void(*each, types.intp, types.intp), _generate(where, 2)


sum_table_rows: Any = intrinsic(_type_sum_table_rows)


def _type_row_address(context: Any, array: Any, row: Any) -> Any:
    """Returns the address of a row of an array of any number of dimensions, which must be contiguous.

    Rows are counted through all dimensions but the last. Not checked: that there is such a row.
    """

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        found = target.make_array(kind)(target, builder, args[0])
        row_bytes = builder.mul(_tools.unpack_tuple(builder, found.shape)[-1], found.itemsize)
        return builder.add(builder.ptrtoint(found.data, _LONG), builder.mul(args[1], row_bytes))

    return types.intp(array, types.intp), generate


row_address: Any = intrinsic(_type_row_address)
