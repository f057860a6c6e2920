"""Merges the gradients that several trainers send for the same records.

Invariants. Gradients of one record are added in list (trainer) order, ((g0 + g1) + g2), so that the bits do not depend
on who came first. The first one of a record is copied: 0 + (-0.0) would not be -0.0.

Shapes: D weights, U records of a part, V records of merged parts, T parts, N records of a block.

Does not know slots, steps or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from torch_ecrec.records.positions import Floats, Positions, require_ascending
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import addresses, as_float, pointer

Part = tuple[Positions, NDArray[Any]]

BLOCK = 256  # records whose gradients are summed at a time


@kernel()
def _union(left: Any, right: Any, result: Any) -> Any:
    """Writes the union of two ascending arrays to `result`, which has room for both; returns its length."""
    i, j, count = 0, 0, 0
    while i < left.shape[0] and j < right.shape[0]:
        a, b = left[i], right[j]
        result[count] = min(a, b)
        count += 1
        if a <= b:
            i += 1
        if b <= a:
            j += 1
    while i < left.shape[0]:
        result[count] = left[i]
        i += 1
        count += 1
    while j < right.shape[0]:
        result[count] = right[j]
        j += 1
        count += 1
    return count


@kernel()
def _find(positions_V: Any, positions_U: Any, index_V: Any) -> None:
    """index[v] = where positions_V[v] is in `positions_U`, both ascending, or -1."""
    u = 0
    for v in range(positions_V.shape[0]):
        if u < positions_U.shape[0] and positions_U[u] == positions_V[v]:
            index_V[v] = u
            u += 1
        else:
            index_V[v] = -1


@kernel()
def _add_part(part_UD: Any, index_N: Any, seen_N: Any, sum_ND: Any) -> None:
    """sum[n] += part[index[n]]. The first one of a record is copied: 0 + (-0.0) would not be -0.0."""
    for n in range(sum_ND.shape[0]):
        u = index_N[n]
        if u >= 0 and seen_N[n]:
            for j in range(sum_ND.shape[1]):
                sum_ND[n, j] += as_float(part_UD[u, j])
        elif u >= 0:
            seen_N[n] = True
            for j in range(sum_ND.shape[1]):
                sum_ND[n, j] = as_float(part_UD[u, j])


@kernel()
def sum_block(gradients: Any, first: Any, seen_N: Any, sum_ND: Any) -> None:
    """sum[n] = the gradients of record v = first + n, part by part.

    Args:
        gradients: (address_T, rows_T, bfloat16_T, index_TV), `Merged.places()` and its index: parts are float32, or
            uint16 that is bfloat16.
        first: of the block.
        seen_N: scratch.
        sum_ND: (N, D) float32, written.
    """
    address_T, rows_T, bfloat16_T, index_TV = gradients
    count, dim = sum_ND.shape
    seen_N[:count] = False
    for t in range(address_T.shape[0]):
        index_N = index_TV[t, first : first + count]
        if bfloat16_T[t]:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.uint16), index_N, seen_N, sum_ND)
        else:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.float32), index_N, seen_N, sum_ND)


@dataclass(frozen=True)
class Merged:
    """The gradients of several trainers, matched record by record. They are summed when they are applied.

    Args:
        positions: (V,) int64, the records that any part has, ascending.
        parts: in trainer order, (U, D) float32, or uint16 that is bfloat16. Kept, not copied.
        index: (T, V) int64, where in part t the gradient of record v is, or -1.
    """

    positions: Positions
    parts: list[NDArray[Any]]
    index: NDArray[np.int64]

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.dtype not in (np.float32, np.uint16) or part.ndim != 2 or part.shape[1] != self.dim:
                raise ValueError(
                    f"parts must be float32 (or bfloat16 as uint16) of one dim, got {part.dtype} {part.shape}"
                )
        shape = (len(self.parts), len(self.positions))
        require(self.index.shape == shape, f"`index` must have the shape {shape}, got {self.index.shape}")

    @property
    def dim(self) -> int:
        return int(self.parts[0].shape[1])

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The address, the rows, and whether it is bfloat16, of each part, as kernels take them."""
        rows = np.array([len(part) for part in self.parts], np.int64)
        return (
            addresses(self.parts, self.dim, np.float32, np.uint16),
            rows,
            np.array([part.dtype == np.uint16 for part in self.parts]),
        )

    def gradients(self) -> Floats:
        """Returns the sums ((g0 + g1) + g2) that an optimizer applies: (V, D) float32."""
        sum_VD = np.empty((len(self.positions), self.dim), np.float32)
        sum_block((*self.places(), self.index), 0, np.empty(len(sum_VD), np.bool_), sum_VD)
        return sum_VD


def merge(parts: Sequence[Part]) -> Merged:
    """Matches the gradients that trainers sent for the same records, in the order of the list.

    Args:
        parts: (positions_U, gradients_UD) each: (U,) int64, ascending, no duplicates; (U, D) float32, or uint16 that is
            bfloat16. U may be 0.

    Raises:
        ValueError: no parts, or a shape, a dtype or the order of positions does not fit.
    """
    require(len(parts) > 0, "`parts` must hold at least one part, got none")
    dim = parts[0][1].shape[-1]
    for i, (positions_U, gradients_UD) in enumerate(parts):
        require_ascending(f"parts[{i}] positions", positions_U)
        if gradients_UD.dtype not in (np.float32, np.uint16) or gradients_UD.shape != (len(positions_U), dim):
            raise ValueError(
                f"gradients of parts[{i}] must be float32 (or bfloat16 as uint16) of shape {(len(positions_U), dim)},"
                f" got {gradients_UD.dtype} of {gradients_UD.shape}"
            )
    unions = [np.ascontiguousarray(positions) for positions, _ in parts]
    while len(unions) > 1:  # a tree: the order of integer unions does not matter
        unions = [_union_of(*unions[i : i + 2]) for i in range(0, len(unions), 2)]
    index_TV = np.empty((len(parts), len(unions[0])), np.int64)
    for t, (positions_U, _) in enumerate(parts):
        _find(unions[0], np.ascontiguousarray(positions_U), index_TV[t])
    return Merged(unions[0], [np.ascontiguousarray(gradients) for _, gradients in parts], index_TV)


def _union_of(left: Positions, right: Positions | None = None) -> Positions:
    if right is None:
        return left
    result = shared.empty((len(left) + len(right),), np.int64)
    count = _union(left, right, result)
    return result[:count]


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    position, gradient = np.zeros(1, np.int64), np.ones((1, 1), np.float32)
    merge([(position, gradient), (position, gradient)]).gradients()
