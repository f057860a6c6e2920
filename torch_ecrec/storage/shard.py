"""The records of one slab on one slot, and the parity records beside them.

Terms. A *record* is `width` float32 values: `dim` weights, then the optimizer's state; as bytes it is 4 * width long.
Example: dim = 2 with row-wise Adagrad has width 3; the weights (1.0, -2.0) with state 0.5 are the 12 bytes 00 00 80 3f
00 00 00 c0 00 00 00 3f. A parity record has the same length but is bytes only: XORs of records are no numbers.

Invariants. `bytes` is the memory of `records`, seen as bytes. Positions are checked before anything is read or
written. Bytes move unchanged, NaNs included.

Shapes: P data records, Q parity records, W floats and B bytes in a record, D weights, U positions asked for.

Does not know rows, stripes or steps, and does not lock: the server owns the order of reads and writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from torch_ecrec import shared
from torch_ecrec.config import require, require_int
from torch_ecrec.kernels import first_outside, prefetch_row
from torch_ecrec.storage.pages import Memory

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@njit(nogil=True, cache=True)
def _gather(source_PW: Any, positions_U: Any, result_UV: Any) -> None:
    """result[i] = the leading words of source[positions[i]]."""
    for i in range(positions_U.shape[0]):
        prefetch_row(source_PW, positions_U, i)
        position = positions_U[i]
        for j in range(result_UV.shape[1]):
            result_UV[i, j] = source_PW[position, j]


@njit(nogil=True, cache=True)
def _gather_half(source_PW: Any, positions_U: Any, result_UV: Any) -> None:
    """The same, rounded from float32 to bfloat16, to nearest and to even in a tie, as torch does; NaN stays NaN."""
    for i in range(positions_U.shape[0]):
        prefetch_row(source_PW, positions_U, i)
        position = positions_U[i]
        for j in range(result_UV.shape[1]):
            bits = source_PW[position, j]
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            result_UV[i, j] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@njit(nogil=True, cache=True)
def scatter(target_PW: Any, positions_U: Any, values_UW: Any) -> None:
    """target[positions[i]] = values[i]. Not checked: that the positions are rows of the target."""
    for i in range(positions_U.shape[0]):
        prefetch_row(target_PW, positions_U, i)
        position = positions_U[i]
        for j in range(values_UW.shape[1]):
            target_PW[position, j] = values_UW[i, j]


def check_positions(positions_U: Positions, limit: int) -> Positions:
    """`positions_U`, contiguous, once every one of them is known to be in 0..limit-1.

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


def as_words(values_UB: Bytes) -> NDArray[np.uint32]:
    """A (U, B) uint8 array as (U, B / 4) uint32; copied only where it is not contiguous or not aligned."""
    if not values_UB.flags.c_contiguous or values_UB.__array_interface__["data"][0] % 4:
        values_UB = np.array(values_UB, order="C")
    return values_UB.view(np.uint32)


class Shard:
    """One slab's records on one slot; zeros at first.

    Args:
        data_rows: number of data records.
        parity_rows: number of parity records.
        dim: weights in a record.
        width: floats in a record, optimizer state included.
        scattered: records are first written here and there; `merge_pages` is called before many in a row are.

    Attributes:
        records: (P, W) float32.
        bytes: (P, B) uint8, the same memory.
        parity: (Q, B) uint8.
    """

    def __init__(self, data_rows: int, parity_rows: int, dim: int, width: int, scattered: bool = False) -> None:
        require_int("data_rows", data_rows, 0)
        require_int("parity_rows", parity_rows, 0)
        require_int("dim", dim, 1)
        require_int("width", width, dim)
        self.dim = dim
        self.width = width
        self._memories = [Memory(rows * 4 * width, scattered) for rows in (data_rows, parity_rows)]
        self.bytes, self.parity = (memory.array.reshape(-1, 4 * width) for memory in self._memories)
        self.records: Floats = self.bytes.view(np.float32)

    @property
    def nbytes(self) -> int:
        """Memory held: data and parity."""
        return self.records.nbytes + self.parity.nbytes

    def merge_pages(self, begin: int, end: int, parity: bool = False) -> None:
        """Nearly all records from `begin` to `end` are to be written now. See `Memory.merge`."""
        record_bytes = 4 * self.width
        self._memories[parity].merge(begin * record_bytes, end * record_bytes)

    def gather_weights(self, positions_U: Positions, half: bool = False) -> NDArray[Any]:
        """Weights of some records.

        Args:
            positions_U: (U,) int64.
            half: round to bfloat16.

        Returns:
            (U, D) float32, or uint16 that is bfloat16; fresh.

        Raises:
            IndexError: a position is out of range.
        """
        positions_U = check_positions(positions_U, len(self.records))
        if half:
            halves_UD = shared.empty((len(positions_U), self.dim), np.uint16)
            _gather_half(self.records.view(np.uint32), positions_U, halves_UD)
            return halves_UD
        weights_UD = shared.empty((len(positions_U), self.dim), np.float32)
        _gather(self.records.view(np.uint32), positions_U, weights_UD.view(np.uint32))
        return weights_UD

    def gather(self, positions_U: Positions, parity: bool = False) -> Bytes:
        """Bytes of some data records, or of some parity records.

        Returns:
            (U, B) uint8, fresh.

        Raises:
            IndexError: a position is out of range.
        """
        source_PB = self.parity if parity else self.bytes
        positions_U = check_positions(positions_U, len(source_PB))
        values_UB = shared.empty((len(positions_U), source_PB.shape[1]), np.uint8)
        _gather(source_PB.view(np.uint32), positions_U, values_UB.view(np.uint32))
        return values_UB

    def scatter_(self, positions_U: Positions, values_UB: Bytes, parity: bool = False) -> None:
        """Overwrites some data records, or some parity records, in place.

        Args:
            positions_U: (U,) int64. Where one comes twice, the last value stays.
            values_UB: (U, B) uint8.
            parity: whether the positions are of parity records.

        Raises:
            ValueError: `values_UB` has another shape or dtype.
            IndexError: a position is out of range. Nothing was changed then.
        """
        target_PB = self.parity if parity else self.bytes
        positions_U = check_positions(positions_U, len(target_PB))
        shape = (len(positions_U), target_PB.shape[1])
        require(
            values_UB.shape == shape and values_UB.dtype == np.uint8,
            f"`values_UB` must be uint8 of shape {shape}, got {values_UB.dtype} of {values_UB.shape}",
        )
        scatter(target_PB.view(np.uint32), positions_U, as_words(values_UB))

    def overwrite_(self, positions_U: Positions, values_UB: Bytes) -> Bytes:
        """Overwrites some data records, in place; returns what that changed, as an optimizer's step does.

        Args:
            positions_U: (U,) int64, no duplicates.
            values_UB: (U, B) uint8.

        Returns:
            (U, B) uint8, old XOR new; fresh.

        Raises:
            ValueError, IndexError: see `scatter_`. Nothing was changed then.
        """
        deltas_UB = self.gather(positions_U)
        self.scatter_(positions_U, values_UB)
        np.bitwise_xor(deltas_UB, values_UB, out=deltas_UB)
        return deltas_UB


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    shard = Shard(2, 2, 1, 2)
    positions_U = np.zeros(1, np.int64)
    shard.gather_weights(positions_U)
    shard.gather_weights(positions_U, half=True)
    shard.scatter_(positions_U, shard.gather(positions_U))
