"""Which rows were given already, a bit each.

Shapes: N rows of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime.kernel_cache import kernel


@kernel()
def _mark(rows_N: Any, begin: Any, end: Any, given: Any, seen: Any, fresh_N: Any) -> Any:
    twice = -1
    for i in range(rows_N.shape[0]):
        row = rows_N[i]
        inside = begin <= row < end
        fresh_N[i] = inside
        if not inside:
            continue
        place, bit = (row - begin) >> 3, np.uint8(1 << ((row - begin) & 7))
        if seen[place] & bit and twice < 0:
            twice = row
        seen[place] |= bit
        fresh_N[i] = not given[place] & bit
    return twice


def mark_(rows_N: Positions, begin: int, end: int, given: Bytes, seen: Bytes, fresh_N: NDArray[np.bool_]) -> int:
    """Marks rows as seen.

    Args:
        rows_N: (N,) int64, contiguous.
        begin, end: rows outside are passed over.
        given: a bit for each row from `begin`, the lowest of a byte first: of what need not be given any more.
        seen: likewise, of what came before; changed.
        fresh_N: (N,) gets which rows are inside and were not given.

    Returns:
        The first row that was seen before; -1: none.
    """
    return int(_mark(rows_N, begin, end, given, seen, fresh_N))


def warm() -> None:
    """Compiles or loads the kernel of this module."""
    bits = np.zeros(1, np.uint8)
    mark_(np.zeros(1, np.int64), 0, 1, bits, bits.copy(), np.zeros(1, np.bool_))
