"""Routes the ids of a batch: from ids to unique rows, sorted by slot and by position there.

Example: rows [7, 2, 7] of a table group on slots 2, 0, 2 (row 7 at position 4 of slot 2, row 2 at position 1 of slot 0)
    rows      [2, 7]               unique, by slot and position: the order in which weights come and gradients go
    inverse   [1, 0, 1]            rows[inverse] is what was asked about
    positions [[1], [], [4]]       per slot, ascending

Bags that slots pool (`BagRoute`) are split otherwise: each slot gets its ids of a bag in their order, with repetitions.

Shapes: N ids of a batch, U unique rows, S slots, G bags, M bags of all slots, one with ids on several counted for each.

Does not know where slots live, and asks nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ecrec.layout.stripes import Layout
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import as_float
from torch_ecrec.runtime.sorting import WORD_BITS, sort_by_bits
from torch_ecrec.runtime.tensors import as_array, as_tensor

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
def _order(key_U: Any, key_bits: Any, index_bits: Any, order_U: Any) -> None:
    """Writes the indices that sort keys of `key_bits` bits. Key and index must fit into a word together."""
    count = key_U.shape[0]
    word_U = np.empty(count, np.uint64)
    for u in range(count):
        word_U[u] = np.uint64(key_U[u]) << np.uint64(index_bits) | np.uint64(u)
    sorted_U = sort_by_bits(word_U, np.empty(count, np.uint64), index_bits, index_bits + key_bits)
    mask = np.uint64((1 << index_bits) - 1)
    for u in range(count):
        order_U[u] = np.int64(sorted_U[u] & mask)


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
    """The unique rows of one table group, and where they live.

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
    if key_bits + index_bits <= WORD_BITS:
        order_U = np.empty(count, np.int64)
        _order(key_U, key_bits, index_bits, order_U)
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
        layout: of the table group.
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


@kernel()
def _count_bags(slot_N: Any, lengths_G: Any, ids_S: Any, bags_S: Any, last_S: Any) -> None:
    """Counts the ids of each slot, and the bags that have an id there. `last_S` is scratch, all -1."""
    n = 0
    for g in range(lengths_G.shape[0]):
        for _ in range(lengths_G[g]):
            slot = slot_N[n]
            ids_S[slot] += 1
            if last_S[slot] != g:
                last_S[slot] = g
                bags_S[slot] += 1
            n += 1


@kernel()
def _split_bags(
    slot_N: Any,
    position_N: Any,
    lengths_G: Any,
    factors_N: Any,
    next_id_S: Any,
    next_bag_S: Any,
    last_S: Any,
    out_N: Any,
    out_factors_N: Any,
    out_lengths_M: Any,
    place_M: Any,
) -> None:
    """Writes the ids of each slot, in their order, and of each bag that has some there how many, and which bag it is.

    `next_id_S` and `next_bag_S` begin as where those of each slot begin; `last_S` is scratch, all -1.
    """
    n = 0
    for g in range(lengths_G.shape[0]):
        for _ in range(lengths_G[g]):
            slot = slot_N[n]
            at = next_id_S[slot]
            next_id_S[slot] = at + 1
            out_N[at] = position_N[n]
            if factors_N.shape[0]:
                out_factors_N[at] = factors_N[n]
            if last_S[slot] != g:
                last_S[slot] = g
                place_M[next_bag_S[slot]] = g
                out_lengths_M[next_bag_S[slot]] = 0
                next_bag_S[slot] += 1
            out_lengths_M[next_bag_S[slot] - 1] += 1
            n += 1


@kernel()
def _add_bags(part_MD: Any, place_M: Any, seen_G: Any, out_GD: Any) -> None:
    """Adds bags at their places, in place: out[place[m]] += part[m]. The first one of a bag is copied: 0 + (-0.0) would
    not be -0.0."""
    for m in range(place_M.shape[0]):
        g = place_M[m]
        if seen_G[g]:
            for j in range(out_GD.shape[1]):
                out_GD[g, j] += as_float(part_MD[m, j])
        else:
            seen_G[g] = True
            for j in range(out_GD.shape[1]):
                out_GD[g, j] = as_float(part_MD[m, j])


@kernel()
def _clear_rest(seen_G: Any, out_GD: Any) -> None:
    """Clears out[g] = 0 where nothing was added."""
    for g in range(seen_G.shape[0]):
        if not seen_G[g]:
            for j in range(out_GD.shape[1]):
                out_GD[g, j] = 0


@kernel()
def _take_bags(source_GD: Any, place_M: Any, out_MD: Any) -> None:
    """Copies bags by their places, in place: out[m] = source[place[m]]."""
    for m in range(place_M.shape[0]):
        for j in range(source_GD.shape[1]):
            out_MD[m, j] = source_GD[place_M[m], j]


@dataclass
class BagRoute:
    """The bags of one table group, and where their ids live. Each slot has those bags of which it has an id.

    Args:
        bags: how many, empty ones included.
        positions: per slot, (n,) int32, one bag behind the other, ids in their order.
        lengths: per slot, (g,) int32, at least 1 each.
        factors: per slot, (n,) float32, the weight of each id; None: they have none.
        places: per slot, (g,) int64, ascending: which of the bags these are.
    """

    bags: int
    positions: list[Tensor]
    lengths: list[Tensor]
    factors: list[Tensor] | None
    places: list[NDArray[np.int64]]

    @property
    def ids(self) -> int:
        """How many ids the bags have."""
        return sum(map(len, self.positions))

    def factors_on(self, slot: int) -> Tensor:
        """Returns the weight (n,) float32 of each id on a slot: 1 where ids have none."""
        if self.factors is not None:
            return self.factors[slot]
        return torch.ones(len(self.positions[slot]), dtype=torch.float32, device="cpu")

    def _in_order(self) -> list[int] | None:
        """Returns where each slot's bags begin, if these are all bags, those of one slot behind the other's."""
        starts = [0]
        for place_M in self.places:
            first, end = starts[-1], starts[-1] + len(place_M)
            if end > first and (place_M[0] != first or place_M[-1] != end - 1):  # they ascend
                return None
            starts.append(end)
        return starts if starts[-1] == self.bags else None

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Returns the bags (G, D) float32 of the sums that slots have made, (g, D) each, added in the order of slots.

        Those of empty bags are zeros.
        """
        arrays = [as_array(part) for part in parts]
        if self._in_order() is not None and all(array.dtype == np.float32 for array in arrays):
            return torch.from_numpy(np.concatenate(arrays))
        out_GD, seen_G = np.empty((self.bags, dim), np.float32), np.zeros(self.bags, np.bool_)
        for array, place_M in zip(arrays, self.places, strict=True):
            _add_bags(array, place_M, seen_G, out_GD)
        _clear_rest(seen_G, out_GD)
        return torch.from_numpy(out_GD)

    def split(self, gradient_GD: Tensor) -> list[Tensor]:
        """Returns the gradients of each slot's bags, (g, D), from those of all, (G, D) float32.

        They are views if each bag is on one slot, and bags are in the order of slots.
        """
        if len(gradient_GD) != self.bags:  # the kernel reads where it is told
            raise ValueError(f"{len(gradient_GD)} gradients for {self.bags} bags")
        starts = self._in_order()
        if starts is not None:
            return _parts(gradient_GD.contiguous(), starts)
        place_M = np.concatenate(self.places)
        out_MD = shared.empty((len(place_M), gradient_GD.shape[1]), np.float32)  # sent
        _take_bags(as_array(gradient_GD.contiguous()), place_M, out_MD)
        return _parts(torch.from_numpy(out_MD), [0, *itertools.accumulate(map(len, self.places))])


def no_bags(slots: int) -> BagRoute:
    """Returns a route of no bags."""
    ids, places = torch.empty(0, dtype=torch.int32, device="cpu"), np.empty(0, np.int64)
    return BagRoute(0, [ids] * slots, [ids] * slots, None, [places] * slots)


def join_bags(routes: Sequence[BagRoute]) -> BagRoute:
    """Returns the route of all bags of some routes of one table group, at least one, those of the first before the
    others."""
    if len(routes) == 1:
        return routes[0]
    slots = range(len(routes[0].places))
    firsts = [0, *itertools.accumulate(route.bags for route in routes)]
    factors = None
    if any(route.factors is not None for route in routes):
        factors = [torch.cat([route.factors_on(slot) for route in routes]) for slot in slots]
    return BagRoute(
        bags=firsts[-1],
        positions=[torch.cat([route.positions[slot] for route in routes]) for slot in slots],
        lengths=[torch.cat([route.lengths[slot] for route in routes]) for slot in slots],
        factors=factors,
        places=[
            np.concatenate([first + route.places[slot] for first, route in zip(firsts, routes, strict=False)])
            for slot in slots
        ],
    )


def route_bags(layout: Layout, rows_N: Tensor, lengths_G: Tensor, factors_N: Tensor | None = None) -> BagRoute:
    """Returns where the ids of bags live.

    Args:
        layout: of the table group.
        rows_N: (N,) int64 on the CPU: the rows of all bags, one bag behind the other.
        lengths_G: (G,) int32, rows in each bag, 0 or more. Their sum is N.
        factors_N: (N,) float32, the weight of each; None: they have none.

    Raises:
        ValueError: lengths do not sum to N, or a slot has so many records that a position does not fit into 32 bits.

    Not checked: that rows are in 0..layout.rows-1. The caller does.
    """
    lengths = np.ascontiguousarray(lengths_G.numpy())
    if int(lengths.sum(dtype=np.int64)) != len(rows_N) or (len(lengths) and int(lengths.min()) < 0):
        raise ValueError(f"lengths of bags must not be negative, and sum to {len(rows_N)}")
    if int(layout.data_first[:, -1].max()) > np.iinfo(np.int32).max:
        raise ValueError("bags of tables with 2^31 and more records on a slot cannot be pooled there")
    slot_N, position_N = layout.locate(rows_N.numpy())
    ids_S, bags_S = np.zeros((2, layout.slots), np.int64)
    _count_bags(slot_N, lengths, ids_S, bags_S, np.full(layout.slots, -1))
    factors = np.empty(0, np.float32) if factors_N is None else np.ascontiguousarray(factors_N.detach().numpy())
    made = _BagsBySlot(ids_S, bags_S, factors_N is not None)
    last_S = np.full(layout.slots, -1)
    _split_bags(slot_N, position_N, lengths, factors, *made.starts(), last_S, *made.outs)
    return made.route(len(lengths))


class _BagsBySlot:
    """Room for the bags of each slot, one slot behind the other, and the route that is made of it once it is filled.

    Args:
        ids_S, bags_S: how many ids and bags each slot has.
        weighted: whether ids have weights.
    """

    def __init__(self, ids_S: NDArray[np.int64], bags_S: NDArray[np.int64], weighted: bool) -> None:
        self._ids, self._bags = ([0, *itertools.accumulate(many_S.tolist())] for many_S in (ids_S, bags_S))
        ids, bags, self._weighted = self._ids[-1], self._bags[-1], weighted
        self.outs = (
            shared.empty((ids,), np.int32),  # positions
            shared.empty((ids if weighted else 0,), np.float32),
            shared.empty((bags,), np.int32),  # lengths
            np.empty(bags, np.int64),  # places
        )

    def starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns where the ids and the bags of each slot begin."""
        return np.array(self._ids[:-1], np.int64), np.array(self._bags[:-1], np.int64)

    def route(self, bags: int) -> BagRoute:
        """Returns the route of so many bags, empty ones included."""
        positions_N, factors_N, lengths_M, place_M = self.outs
        return BagRoute(
            bags=bags,
            positions=_parts(torch.from_numpy(positions_N), self._ids),
            lengths=_parts(torch.from_numpy(lengths_M), self._bags),
            factors=_parts(torch.from_numpy(factors_N), self._ids) if self._weighted else None,
            places=[place_M[first:end] for first, end in itertools.pairwise(self._bags)],
        )


@kernel()
def _route_whole(
    ids_N: Any,
    lengths_FB: Any,
    feature_P: Any,
    slot_P: Any,
    first_P: Any,
    rows_P: Any,
    order_P: Any,
    factors_N: Any,
    next_id_S: Any,
    next_bag_S: Any,
    out_N: Any,
    out_factors_N: Any,
    out_lengths_M: Any,
    place_M: Any,
) -> Any:
    """Writes positions, lengths and bags of each slot as `_split_bags` does, for tables that are whole on one.

    Args:
        order_P: indices that sort `feature_P`.

    Returns:
        The index of the first id that is no row of its table, or -1.
    """
    features, batch = lengths_FB.shape
    n, q = 0, 0
    for f in range(features):
        count = 0
        for b in range(batch):
            count += lengths_FB[f, b]
        if q < feature_P.shape[0] and feature_P[order_P[q]] == f:
            p = order_P[q]
            slot, first, rows = slot_P[p], first_P[p], rows_P[p]
            least, most = 0, 0
            for i in range(n, n + count):
                least, most = min(least, ids_N[i]), max(most, ids_N[i])
            if least < 0 or most >= rows:
                for i in range(n, n + count):
                    if ids_N[i] < 0 or ids_N[i] >= rows:
                        return i
            at, m = next_id_S[slot], next_bag_S[slot]
            for i in range(count):
                out_N[at + i] = ids_N[n + i] + first
            if factors_N.shape[0]:
                for i in range(count):
                    out_factors_N[at + i] = factors_N[n + i]
            for b in range(batch):
                if lengths_FB[f, b] > 0:
                    out_lengths_M[m] = lengths_FB[f, b]
                    place_M[m] = p * batch + b
                    m += 1
            next_id_S[slot], next_bag_S[slot] = at + count, m
            q += 1
        n += count
    return -1


@dataclass
class Homes:
    """Where those of a slice's features live whose tables are whole on one slot.

    Args:
        feature_P: which of the features these are, those of a slot ascending.
        slot_P, first_P: the slot of each, and the position there of its table's first row. The others follow it.
        rows_P: how many rows the table has.
    """

    feature_P: NDArray[np.int64]
    slot_P: NDArray[np.int64]
    first_P: NDArray[np.int64]
    rows_P: NDArray[np.int64]

    def route(
        self, slots: int, ids_N: NDArray[Any], lengths_FB: NDArray[Any], factors_N: NDArray[np.float32]
    ) -> BagRoute | int:
        """Returns what `route_bags` returns for the bags of these features, bag p * B + b being that of sample b.

        Args:
            slots: how many there are.
            ids_N: int32 or int64, of all features, one bag behind the other.
            lengths_FB: ids per bag, of all features.
            factors_N: float32, the weight of each id; empty: they have none.

        Returns:
            The route; or the index of the first id that is no row of its table.

        Raises:
            ValueError: a position does not fit into 32 bits.
        """
        if len(self.first_P) and int((self.first_P + self.rows_P).max()) > np.iinfo(np.int32).max:
            raise ValueError("bags of tables with 2^31 and more records on a slot cannot be pooled there")
        lengths_PB = lengths_FB[self.feature_P]
        ids_S, bags_S = np.zeros((2, slots), np.int64)
        np.add.at(ids_S, self.slot_P, lengths_PB.sum(axis=1))
        np.add.at(bags_S, self.slot_P, np.count_nonzero(lengths_PB, axis=1))
        made = _BagsBySlot(ids_S, bags_S, len(factors_N) > 0)
        homes = self.feature_P, self.slot_P, self.first_P, self.rows_P, np.argsort(self.feature_P)
        bad = _route_whole(ids_N, lengths_FB, *homes, factors_N, *made.starts(), *made.outs)
        return int(bad) if bad >= 0 else made.route(lengths_PB.size)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    arrange(Layout(1, 1, 0, 1), torch.zeros(1, dtype=torch.int64, device="cpu"))
    some, one = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.ones(1, dtype=torch.int32, device="cpu")
    there = route_bags(Layout(1, 1, 0, 1), some, one, torch.ones(1, dtype=torch.float32, device="cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        there.join([torch.zeros(1, 1, dtype=dtype, device="cpu")], 1)
    zero, sums = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    _add_bags(sums, zero, np.zeros(1, np.bool_), sums.copy())  # of bags that are not in the order of slots
    _take_bags(sums, zero, sums.copy())
    for ids in (np.zeros(1, np.int32), np.zeros(1, np.int64)):
        for lengths in (np.ones((1, 1), np.int32), np.ones((1, 1), np.int64)):
            Homes(zero, zero, zero, zero + 1).route(1, ids, lengths, np.empty(0, np.float32))
    _place(np.zeros((1, 1), np.uint8), np.zeros(1, np.int64), np.zeros((1, 1), np.uint8))
