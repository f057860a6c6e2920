"""Emits vector instructions of LLVM when a kernel is compiled: shared by the field and the seals.

Numba's compiler turns a loop over the few words of a record into poor vector code, so the innermost loops are given to
it as vectors. They are the same for all processors but for one instruction: GFNI's, an 8 x 8 matrix of bits times every
byte of a vector.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils

tools: Any = cgutils  # untyped
ir: Any = tools.ir
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)

LEAST_BYTES, MATRIX_BYTES = 16, 8  # of a vector that GFNI takes, and of it for each matrix


def spread(builder: Any, value: Any, count: int) -> Any:
    """Emits a vector with the same value `count` times."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))


def pick(builder: Any, vector: Any, first: int, count: int) -> Any:
    """Emits `count` elements of a vector from `first` on; after its end it goes on at its start."""
    places = [place % vector.type.count for place in range(first, first + count)]
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, count), places))


def features(target: Any) -> set[str]:
    """Returns the CPU features for which Numba compiles. They are part of the key of its cache."""
    return set(target.codegen().magic_tuple()[2].split(","))


def has_gfni(target: Any) -> bool:
    """Returns whether the CPU has GFNI, which `affine` needs."""
    return "+gfni" in features(target)


def affine(target: Any, builder: Any, vector: Any, matrices: Any) -> Any:
    """Emits a bit matrix times every byte of a vector, in registers as wide as the processor has them.

    Args:
        target, builder: of the code.
        vector: of bytes, 4 or more.
        matrices: of i64, one for every 8 of them, as `FACTORS` has them; of the first 16 at least.
    """
    has = features(target)
    widest = 64 if "+avx512f" in has else 32 if "+avx" in has else LEAST_BYTES
    count = vector.type.count
    if count > widest:
        half = count // 2
        parts = [
            affine(
                target,
                builder,
                pick(builder, vector, first, half),
                pick(builder, matrices, first // MATRIX_BYTES, max(half, LEAST_BYTES) // MATRIX_BYTES),
            )
            for first in (0, half)
        ]
        return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, count), list(range(count))))
    if count < LEAST_BYTES:
        return pick(builder, affine(target, builder, pick(builder, vector, 0, LEAST_BYTES), matrices), 0, count)
    kind = vector.type
    function = tools.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind, I8]), f"llvm.x86.vgf2p8affineqb.{8 * count}"
    )
    return builder.call(function, [vector, builder.bitcast(matrices, kind), I8(0)])
