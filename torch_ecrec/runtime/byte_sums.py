"""A sum of some memory's bytes, by which changes are found at the speed of reading.

Words of 4 bytes are dealt to 64 lanes in turn; each lane is `sum = (sum xor word) * prime`, and the lanes' sums are
summed likewise. Every step can be undone, so that a change of one word always changes the sum, and others do but for
one in 2^32. No protection against who wants to be mistaken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import pointer

_LANES = 64
_PRIME = np.uint32(0x9E3779B1)


@kernel()
def _sum(address: Any, count: Any, sums_L: Any) -> Any:
    rounds = count // (4 * _LANES)
    words_RL = carray(pointer(address), (rounds, _LANES), np.uint32)
    for r in range(rounds):
        for lane in range(_LANES):
            sums_L[lane] = np.uint32((sums_L[lane] ^ words_RL[r, lane]) * _PRIME)
    total = np.uint32(count & 0xFFFFFFFF)
    for lane in range(_LANES):
        total = np.uint32((total ^ sums_L[lane]) * _PRIME)
    bytes_N = carray(pointer(address), count, np.uint8)
    for i in range(rounds * 4 * _LANES, count):
        total = np.uint32((total ^ np.uint32(bytes_N[i])) * _PRIME)
    return total


def sum_of_bytes(address: int, count: int) -> int:
    """Returns the sum of `size` bytes at an address that is a multiple of 4. Not checked: that they are there.

    It takes an address, since a tensor that was once viewed as a NumPy array cannot be resized any more.
    """
    return int(_sum(address, count, np.arange(_LANES, dtype=np.uint32)))


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    data = np.zeros(4 * _LANES + 1, np.uint8)
    sum_of_bytes(data.ctypes.data, len(data))
