"""Routes the ids of a batch: from ids to unique rows, sorted by slot and by position there.

Example: rows [7, 2, 7] of a slab on slots 2, 0, 2 (row 7 at position 4 of slot 2, row 2 at position 1 of slot 0)
    rows      [2, 7]               unique, by slot and position: the order in which weights come and gradients go
    inverse   [1, 0, 1]            rows[inverse] is what was asked about
    positions [[1], [], [4]]       per slot, ascending

Shapes: N ids of a batch, U unique rows, S slots.

Does not know where slots live, and asks nobody.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ecrec.layout.stripes import Layout
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.tensors import as_array, as_tensor

_WORD_BITS = 64
_DIGIT_BITS = 8  # of a pass of the sort: its counts stay in the first-level cache
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiplicative hashing (Knuth, TAOCP 3, 6.4)


@kernel()
def _unique(rows_N: Any, shift: Any, table: Any, unique_N: Any, index_N: Any) -> Any:
    """Numbers the distinct rows in the order of their first appearance; returns how many there are.

    `table` has 2^(64 - shift) entries, all -1: an open-addressing hash table of indices into `unique_N`.
    """
    count = 0
    mask = table.shape[0] - 1
    for i in range(rows_N.shape[0]):
        row = rows_N[i]
        place = np.int64((np.uint64(row) * np.uint64(_GOLDEN)) >> np.uint64(shift))
        while True:
            known = table[place]
            if known < 0:
                table[place] = count
                unique_N[count] = row
                index_N[i] = count
                count += 1
                break
            if unique_N[known] == row:
                index_N[i] = known
                break
            place = (place + 1) & mask
    return count


@kernel()
def _radix_order(key_U: Any, key_bits: Any, index_bits: Any, order_U: Any) -> None:
    """Returns the indices that sort distinct keys of `key_bits` bits. Key and index must fit into 64 bits together.

    Least significant digits first (Knuth, TAOCP 3, 5.2.5).
    """
    count = key_U.shape[0]
    now_U, next_U = np.empty(count, np.uint64), np.empty(count, np.uint64)
    for u in range(count):
        now_U[u] = np.uint64(key_U[u]) << np.uint64(index_bits) | np.uint64(u)
    mask = np.uint64((1 << _DIGIT_BITS) - 1)
    for shift in range(index_bits, index_bits + key_bits, _DIGIT_BITS):
        first_D = np.zeros((1 << _DIGIT_BITS) + 1, np.int64)
        for u in range(count):
            first_D[np.int64(now_U[u] >> np.uint64(shift) & mask) + 1] += 1
        for d in range(1 << _DIGIT_BITS):
            first_D[d + 1] += first_D[d]
        for u in range(count):
            digit = np.int64(now_U[u] >> np.uint64(shift) & mask)
            next_U[first_D[digit]] = now_U[u]
            first_D[digit] += 1
        now_U, next_U = next_U, now_U
    for u in range(count):
        order_U[u] = np.int64(now_U[u] & np.uint64((1 << index_bits) - 1))


@kernel()
def _reorder(
    order_U: Any, rows_U: Any, key_U: Any, bits: Any, sorted_U: Any, position_U: Any, rank_U: Any, start_S: Any
) -> None:
    """Writes rows and positions in the order of their keys, where each row went, and where each slot begins.

    A key is a position in its lowest `bits` bits, and the slot above.
    """
    slot = 0
    for i in range(order_U.shape[0]):
        u = order_U[i]
        key = key_U[u]
        sorted_U[i] = rows_U[u]
        position_U[i] = key & ((1 << bits) - 1)
        rank_U[u] = i
        while slot <= key >> bits:
            start_S[slot] = i
            slot += 1
    while slot < start_S.shape[0]:
        start_S[slot] = order_U.shape[0]
        slot += 1


@kernel()
def _relabel(index_N: Any, rank_U: Any) -> None:
    for i in range(index_N.shape[0]):
        index_N[i] = rank_U[index_N[i]]


@kernel()
def _place(target_UB: Any, rank_U: Any, source_UB: Any) -> None:
    for u in range(rank_U.shape[0]):
        for byte in range(source_UB.shape[1]):
            target_UB[rank_U[u], byte] = source_UB[u, byte]


def _parts(values: Tensor, starts: list[int]) -> list[Tensor]:
    """Returns slices of a tensor, each with a storage of its own size, so that the slice alone is sent."""
    array = as_array(values)
    return [as_tensor(array[first:end]) for first, end in itertools.pairwise(starts)]


Parts = list[Tensor]  # (u, D) each: end to end they are the (U, D) values of a route's rows, in their order


@dataclass
class Route:
    """The unique rows of one slab, and where they live.

    Args:
        rows: (U,) int64, in the order in which their values are given and taken.
        rank: (U,) int64, place of each of `rows` in the order by slot and position; None if that is their order.
        starts: (S + 1) where each slot's part begins in that order.
        positions: per slot, (u,) int64, ascending.
    """

    rows: Tensor
    rank: Tensor | None
    starts: list[int]
    positions: list[Tensor]

    def split(self, values: Tensor) -> list[Tensor]:
        """Returns the part of `values` (U, ...) of each slot. They are views if rows are in the order by slot.

        Raises:
            ValueError: they are not as many as the rows.
        """
        if len(values) != self.starts[-1]:  # the kernel writes where it is told
            raise ValueError(f"{len(values)} values for {self.starts[-1]} rows")
        values = values.contiguous()
        if self.rank is not None and len(values):
            ordered = torch.empty_like(values)
            target_UB, source_UB = (as_array(part.view(len(part), -1).view(torch.uint8)) for part in (ordered, values))
            _place(target_UB, self.rank.numpy(), source_UB)
            values = ordered
        return _parts(values, self.starts)

    def join(self, parts: list[Tensor], out: Tensor) -> Tensor:
        """Joins parts of slots into `out`: the inverse of `split`. Parts of slots without rows may be missing."""
        if self.rank is None:
            return torch.cat(parts, out=out)
        return torch.index_select(torch.cat(parts), 0, self.rank, out=out)


def _sorted(layout: Layout, rows_U: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], list[int], list[Tensor]]:
    count = len(rows_U)
    slot_U, key_U = layout.locate(rows_U)
    position_bits, index_bits = int(layout.data_first[:, -1].max()).bit_length(), count.bit_length()
    key_bits = position_bits + layout.slots.bit_length()
    key_U |= slot_U << position_bits
    if key_bits + index_bits <= _WORD_BITS:
        order_U = np.empty(count, np.int64)
        _radix_order(key_U, key_bits, index_bits, order_U)
    else:
        order_U = np.argsort(key_U)
    sorted_U, rank_U = np.empty((2, count), np.int64)
    position_U = shared.empty((count,), np.int64)  # sent
    start_S = np.empty(layout.slots + 1, np.int64)
    _reorder(order_U, rows_U, key_U, position_bits, sorted_U, position_U, rank_U, start_S)
    starts: list[int] = start_S.tolist()
    return sorted_U, rank_U, starts, _parts(torch.from_numpy(position_U), starts)


def arrange(layout: Layout, rows_N: Tensor) -> tuple[Route, Tensor]:
    """Returns the distinct ones of some rows, ordered by slot and position.

    Args:
        layout: of the slab.
        rows_N: (N,) int64 on the CPU.

    Returns:
        A route, and inverse_N (N,) int64: route.rows[inverse_N] is `rows_N`.

    Not checked: that rows are in 0..layout.rows-1. The caller does.
    """
    rows = np.ascontiguousarray(rows_N.numpy())
    bits = max(1, 2 * len(rows) - 1).bit_length()  # at most half full
    table = np.full(1 << bits, -1, np.int32)
    unique_N, index_N = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    count = _unique(rows, 64 - bits, table, unique_N, index_N)
    sorted_U, rank_U, starts, positions = _sorted(layout, unique_N[:count])
    _relabel(index_N, rank_U)
    return Route(torch.from_numpy(sorted_U), None, starts, positions), torch.from_numpy(index_N)


def route(layout: Layout, rows_U: Tensor) -> Route:
    """Returns where distinct rows live. Values go in the order of `rows_U`, (U,) int64."""
    _, rank_U, starts, positions = _sorted(layout, np.ascontiguousarray(rows_U.numpy()))
    return Route(rows_U, torch.from_numpy(rank_U), starts, positions)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    arrange(Layout(1, 1, 0, 1), torch.zeros(1, dtype=torch.int64, device="cpu"))
    _place(np.zeros((1, 1), np.uint8), np.zeros(1, np.int64), np.zeros((1, 1), np.uint8))
