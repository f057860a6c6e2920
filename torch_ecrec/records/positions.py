"""Types and checks of record positions and record bytes, as kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import first_outside

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@kernel()
def _ascending(positions_U: Any) -> Any:
    for i in range(1, positions_U.shape[0]):
        if positions_U[i] <= positions_U[i - 1]:
            return False
    return True


def require_ascending(name: str, positions_U: Positions) -> None:
    """Raises `ValueError` unless the positions are 1-D int64, ascending and without duplicates."""
    if positions_U.ndim != 1 or positions_U.dtype != np.int64:
        raise ValueError(f"`{name}` must be a 1-D int64 array, got {positions_U.ndim}-D {positions_U.dtype}")
    if not _ascending(positions_U):
        raise ValueError(f"`{name}` must be ascending without duplicates")


def check_positions(positions_U: Positions, limit: int) -> Positions:
    """Returns `positions_U`, contiguous, once each is known to be in 0..limit-1.

    Raises:
        ValueError: not a 1-D int64 array.
        IndexError: a position is out of range.
    """
    if positions_U.ndim != 1 or positions_U.dtype != np.int64:
        raise ValueError(f"`positions_U` must be a 1-D int64 array, got {positions_U.ndim}-D {positions_U.dtype}")
    positions_U = np.ascontiguousarray(positions_U)
    outside = first_outside(positions_U, 0, limit)
    if outside >= 0:
        raise IndexError(f"position {positions_U[outside]} is out of range: there are {limit} records")
    return positions_U
