"""Types and checks of record positions and record bytes, as kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.runtime.checks import require
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


@kernel()
def mark(flags_P: Any, positions_U: Any, value: Any) -> None:
    """flags[positions[i]] = value. Not checked: that the positions are in 0..P-1."""
    for i in range(positions_U.shape[0]):
        flags_P[positions_U[i]] = value


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


def check_bags(
    of: str, positions_N: NDArray[Any], lengths_G: NDArray[np.int32], weights_N: Floats | None, limit: int | None = None
) -> None:
    """Checks the positions of records in bags, bag by bag.

    Args:
        of: what messages put in front of names, with a space behind.
        positions_N: (N,) int32 or int64, each in 0..limit-1, or not negative if there is no limit.
        lengths_G: (G,) int32, at least 1 each. Their sum is N.
        weights_N: (N,) float32, or None.
        limit: how many records there are.

    Raises:
        ValueError: a shape, a dtype or a length does not fit.
        IndexError: a position is out of range.
    """
    for name, values, dtypes in (
        ("positions", positions_N, (np.int32, np.int64)),
        ("lengths", lengths_G, (np.int32,)),
        ("weights", weights_N, (np.float32,)),
    ):
        if values is not None and (values.ndim != 1 or values.dtype not in dtypes):
            wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise ValueError(f"{of}{name} must be 1-D {wanted}, got {values.ndim}-D {values.dtype}")
    least = int(lengths_G.min(initial=1))
    require(least >= 1, f"{of}lengths must be at least 1, got {least}")
    total = int(lengths_G.sum(dtype=np.int64))
    require(total == len(positions_N), f"{of}lengths must sum to {len(positions_N)} positions, got {total}")
    if weights_N is not None:
        same = len(weights_N) == len(positions_N)
        require(same, f"{of}weights must be {len(positions_N)}, as positions are, got {len(weights_N)}")
    outside = first_outside(positions_N, 0, np.iinfo(np.int64).max if limit is None else limit)
    if outside >= 0:
        there = "it is none of a record" if limit is None else f"there are {limit} records"
        raise IndexError(f"{of}position {positions_N[outside]} is out of range: {there}")
