"""Arrays by address, for kernels that work on any number of them: Numba compiles a tuple of arrays once per length.

The caller keeps the arrays alive and knows their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray


def _type_pointer(context: Any, address: Any) -> Any:
    """`pointer(address)` inside a kernel: for `numba.carray`."""
    tools: Any = cgutils  # untyped

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], tools.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_type_pointer)


def addresses(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Where some contiguous arrays begin, (A,) int64."""
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
