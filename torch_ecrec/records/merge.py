"""Merges the gradients that several trainers send for the same records.

A part of a trainer has gradients of records, or of *bags*: of the sums that a slot made of its records (`Shard.pool`).
A record's gradient is then the sum of its bags' gradients, one for each id that names it.

    positions 7 2 7, lengths 2 1, gradients a b     record 2 gets a, record 7 gets a + b

Invariants. Gradients of one record are added in list (trainer) order, ((g0 + g1) + g2), so that the bits do not depend
on who came first. What one part has for a record is summed before that, in the order of its ids. The first one is
copied: 0 + (-0.0) would not be -0.0. So the bits are the same in whichever form the gradients come.

Gradients of bags are summed in place, in registers: the ids of all parts are sorted by position, part and bag, and
then each record's are a *run* of the sorted ids for each part that has it.

Shapes: D weights, U records of a part, V records of merged parts, T parts, G bags, N ids of bags, R runs.

Does not know slots, steps or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from torch_ecrec.records.positions import Floats, Positions, check_bags, require_ascending
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import addresses, as_float, pointer
from torch_ecrec.runtime.row_sums import row_address, sum_table_rows
from torch_ecrec.runtime.sorting import WORD_BITS, sort_by_bits

BLOCK = 256  # records whose gradients are summed at a time


@dataclass(frozen=True)
class Bags:
    """Gradients of bags, which one trainer sends for the records in them.

    Args:
        positions: (N,) int32 or int64, the records of all bags, bag by bag: in any order, also several times.
        lengths: (G,) int32, how many each bag has, at least 1. Their sum is N.
        weights: (N,) float32, by which an id's record was multiplied in its bag; None: by none.
        gradients: (G, D) float32, or uint16 that is bfloat16.
    """

    positions: NDArray[Any]
    lengths: NDArray[np.int32]
    weights: Floats | None
    gradients: NDArray[Any]


Part = tuple[Positions, NDArray[Any]] | Bags


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
def _sum_runs(places: Any, runs: Any, first: Any, sum_VD: Any) -> None:
    """sum[v] = the gradients of the bags of record first + v, run by run. See `Merged.arguments`.

    Nothing is prefetched: records of a table follow each other, so its bags are in a cache after the first few.
    """
    address_T, bfloat16_T = places
    weighted_T, bag_N, weight_N, start_R, part_R, run_V = runs
    dim = sum_VD.shape[1]
    other_1D = np.empty((1, dim), np.float32)
    of_floats, of_halves = carray(pointer(0), 0, np.float32), carray(pointer(0), 0, np.uint16)
    for v in range(sum_VD.shape[0]):
        for r in range(run_V[first + v], run_V[first + v + 1]):
            begin, end, t = start_R[r], start_R[r + 1], part_R[r]
            table, row_bytes = address_T[t], 2 * dim if bfloat16_T[t] else 4 * dim
            is_first = r == run_V[first + v]
            out = row_address(sum_VD, v) if is_first else row_address(other_1D, 0)
            if bfloat16_T[t]:
                sum_table_rows(out, dim, table, row_bytes, of_halves, bag_N, weight_N, weighted_T[t], begin, end)
            else:
                sum_table_rows(out, dim, table, row_bytes, of_floats, bag_N, weight_N, weighted_T[t], begin, end)
            if not is_first:
                for j in range(dim):
                    sum_VD[v, j] += other_1D[0, j]


@kernel()
def sum_block(gradients: Any, first: Any, seen_V: Any, sum_VD: Any) -> None:
    """sum[v] = the gradients of record first + v, part by part.

    Args:
        gradients: `Merged.arguments`.
        first: of the block.
        seen_V: scratch.
        sum_VD: (V, D) float32 of the block's records, written.
    """
    address_T, rows_T, bfloat16_T, index_TV, weighted_T, bag_N, weight_N, start_R, part_R, run_V = gradients
    count, dim = sum_VD.shape
    if run_V.shape[0]:
        _sum_runs((address_T, bfloat16_T), (weighted_T, bag_N, weight_N, start_R, part_R, run_V), first, sum_VD)
        return
    seen_V[:count] = False
    for t in range(address_T.shape[0]):
        index_V = index_TV[t, first : first + count]
        if bfloat16_T[t]:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.uint16), index_V, seen_V, sum_VD)
        else:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.float32), index_V, seen_V, sum_VD)


@kernel()
def _words(positions_N: Any, lengths_G: Any, part: Any, bag_bits: Any, bits: Any, word_N: Any) -> None:
    """Writes the words of one part's ids to be sorted: position, part and bag, these two in the lowest `bits` bits."""
    n = 0
    for g in range(lengths_G.shape[0]):
        low = np.uint64(part << bag_bits | g)
        for _ in range(lengths_G[g]):
            word_N[n] = np.uint64(positions_N[n]) << np.uint64(bits) | low
            n += 1


@kernel()
def _places(word_N: Any, low_N: Any, bits: Any) -> None:
    """Puts the place of each word into its lowest `bits` bits, and what was there into `low_N`."""
    mask = np.uint64((1 << bits) - 1)
    for n in range(word_N.shape[0]):
        low_N[n] = word_N[n] & mask
        word_N[n] = word_N[n] & ~mask | np.uint64(n)


@kernel()
def _count_positions(word_N: Any, bits: Any) -> Any:
    """Returns how many different positions sorted words have."""
    count = min(1, word_N.shape[0])
    for n in range(1, word_N.shape[0]):
        count += (word_N[n] ^ word_N[n - 1]) >> np.uint64(bits) != 0
    return count


@kernel()
def _cut(
    word_N: Any,
    bits: Any,
    bag_bits: Any,
    low_of_N: Any,
    weight_of_N: Any,
    position_V: Any,
    bag_N: Any,
    weight_N: Any,
    start_R: Any,
    part_R: Any,
    run_V: Any,
) -> Any:
    """Cuts sorted words into records and runs, and writes the bag and the weight of each; returns the number of runs.

    Whether an id begins a record or a run cannot be foretold, so each writes what would be true if it did.

    Args:
        low_of_N, weight_of_N: part and bag, and weight, by place; empty without weights, if words have part and bag.
        start_R: has room for a run more than there are ids.
    """
    mask, bag_mask = np.uint64((1 << bits) - 1), np.uint64((1 << bag_bits) - 1)
    one = np.uint64(1)
    v, r, before, part_before = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)  # v and r: counted from 1
    start_R[0] = run_V[0] = 0
    for n in range(word_N.shape[0]):
        position, low = word_N[n] >> np.uint64(bits), word_N[n] & mask
        if weight_of_N.shape[0]:
            weight_N[n] = weight_of_N[low]
            low = low_of_N[low]
        part = low >> np.uint64(bag_bits)
        begins = (n == 0) | (position != before)
        v += np.uint64(begins)
        r += np.uint64(begins | (part != part_before))
        before, part_before = position, part
        position_V[v - one] = position
        run_V[v] = r
        part_R[r - one] = part
        start_R[r] = n + 1
        bag_N[n] = low & bag_mask
    return np.int64(r)


@dataclass(frozen=True)
class Runs:
    """The sorted ids of the bags of all parts: record v has the runs from run[v] to run[v + 1].

    Args:
        weighted: (T,) bool, whether the weights of a part's ids count.
        bag: (N,) int32, the bag of each id in its part.
        weight: (N,) float32, by which the bag's gradient counts; (0,) if those of no part do.
        start: (R + 1,) int64, the first id of each run, and the number of ids.
        part: (R,) int32, the part of each run, ascending among the runs of a record.
        run: (V + 1,) int64, the first run of each record, and the number of runs.
    """

    weighted: NDArray[np.bool_]
    bag: NDArray[np.int32]
    weight: Floats
    start: NDArray[np.int64]
    part: NDArray[np.int32]
    run: NDArray[np.int64]


_NO_INDICES, _NO_NUMBERS = np.empty(0, np.int64), np.empty(0, np.int32)
_NO_RUNS = Runs(np.empty(0, np.bool_), _NO_NUMBERS, np.empty(0, np.float32), _NO_INDICES, _NO_NUMBERS, _NO_INDICES)


@dataclass(frozen=True)
class Merged:
    """The gradients of several trainers, matched record by record. They are summed when they are applied.

    Args:
        positions: (V,) int64, the records that any part has, ascending.
        parts: in trainer order, gradients of (U, D) records or (G, D) bags: float32, or uint16 that is bfloat16. Kept,
            not copied.
        index: (T, V) int64, where in part t the gradient of record v is, or -1. Has (T, 0) with `runs`.
        runs: where the gradients of each record are, if parts have those of bags.
    """

    positions: Positions
    parts: list[NDArray[Any]]
    index: NDArray[np.int64]
    runs: Runs | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.dtype not in (np.float32, np.uint16) or part.ndim != 2 or part.shape[1] != self.dim:
                raise ValueError(
                    f"parts must be float32 (or bfloat16 as uint16) of one dim, got {part.dtype} {part.shape}"
                )
        shape = (len(self.parts), len(self.positions) if self.runs is None else 0)
        require(self.index.shape == shape, f"`index` must have the shape {shape}, got {self.index.shape}")

    @property
    def dim(self) -> int:
        return int(self.parts[0].shape[1])

    def arguments(self) -> tuple[NDArray[Any], ...]:
        """Returns what kernels take for `gradients`, of the same types in whichever form the parts are.

        That is the address, the rows, and whether it is bfloat16, of each part; the index; and the fields of `Runs`,
        empty without any. The caller keeps this object alive.
        """
        runs = self.runs or _NO_RUNS
        return (
            addresses(self.parts, self.dim, np.float32, np.uint16),
            np.array([len(part) for part in self.parts], np.int64),
            np.array([part.dtype == np.uint16 for part in self.parts]),
            self.index,
            *(runs.weighted, runs.bag, runs.weight, runs.start, runs.part, runs.run),
        )

    def gradients(self) -> Floats:
        """Returns the sums ((g0 + g1) + g2) that an optimizer applies: (V, D) float32."""
        sum_VD = np.empty((len(self.positions), self.dim), np.float32)
        sum_block(self.arguments(), 0, np.empty(len(sum_VD), np.bool_), sum_VD)
        return sum_VD


def merge(parts: Sequence[Part]) -> Merged:
    """Matches the gradients that trainers sent for the same records, in the order of the list.

    Args:
        parts: each is a pair of positions and gradients, (positions_U, gradients_UD): (U,) int64, ascending, no
            duplicates, and (U, D) float32, or uint16 that is bfloat16; or gradients of `Bags`. Any may be empty. A
            trainer that sends both, of some records in one form and of others in the other, has two parts, which
            follow each other: the pair first.

    Raises:
        ValueError: no parts, or a shape, a dtype, a length or the order of positions does not fit.
        IndexError: a position of a bag is negative, or too large for any record.
    """
    require(len(parts) > 0, "`parts` must hold at least one part, got none")
    dim = (parts[0].gradients if isinstance(parts[0], Bags) else parts[0][1]).shape[-1]
    for i, part in enumerate(parts):
        if isinstance(part, Bags):
            _check_bags(f"parts[{i}]", part, dim)
            continue
        positions_U, gradients_UD = part
        require_ascending(f"parts[{i}] positions", positions_U)
        _check_gradients(f"parts[{i}]", gradients_UD, (len(positions_U), dim))
    if any(isinstance(part, Bags) for part in parts):
        return _merge_bags([part if isinstance(part, Bags) else _as_bags(*part) for part in parts])
    rows = [part for part in parts if not isinstance(part, Bags)]
    unions = [np.ascontiguousarray(positions) for positions, _ in rows]
    while len(unions) > 1:  # a tree: the order of integer unions does not matter
        unions = [_union_of(*unions[i : i + 2]) for i in range(0, len(unions), 2)]
    index_TV = np.empty((len(rows), len(unions[0])), np.int64)
    for t, (positions_U, _) in enumerate(rows):
        _find(unions[0], np.ascontiguousarray(positions_U), index_TV[t])
    return Merged(unions[0], [np.ascontiguousarray(gradients) for _, gradients in rows], index_TV)


def _check_gradients(name: str, gradients: NDArray[Any], shape: tuple[int, int]) -> None:
    if gradients.dtype not in (np.float32, np.uint16) or gradients.shape != shape:
        raise ValueError(
            f"gradients of {name} must be float32 (or bfloat16 as uint16) of shape {shape},"
            f" got {gradients.dtype} of {gradients.shape}"
        )


def _check_bags(name: str, bags: Bags, dim: int) -> None:
    check_bags(f"{name} ", bags.positions, bags.lengths, bags.weights)
    _check_gradients(name, bags.gradients, (len(bags.lengths), dim))


def _as_bags(positions_U: Positions, gradients_UD: NDArray[Any]) -> Bags:
    """Returns gradients of records as those of bags of one record each: the same sums."""
    return Bags(positions_U, np.ones(len(positions_U), np.int32), None, gradients_UD)


def _merge_bags(parts: Sequence[Bags]) -> Merged:
    """Merges parts that were checked. All of a record are found by one sort of the ids of all."""
    count, bag_bits = sum(len(part.positions) for part in parts), max(len(part.lengths) for part in parts).bit_length()
    limit = 1 + max((int(part.positions.max()) for part in parts if len(part.positions)), default=0)
    weighted_T = np.array([part.weights is not None for part in parts])
    weighted, bits = bool(weighted_T.any()), bag_bits + len(parts).bit_length()
    if weighted:
        bits = max(bits, count.bit_length())
    if limit.bit_length() + bits > WORD_BITS:
        raise IndexError(f"position {limit - 1} is out of range: no slot has as many records")
    word_N, low_of_N = np.empty(count, np.uint64), np.empty(count if weighted else 0, np.uint64)
    weight_of_N = np.empty(len(low_of_N), np.float32)
    first = 0
    for t, part in enumerate(parts):
        ids = slice(first, first + len(part.positions))
        positions, lengths = np.ascontiguousarray(part.positions), np.ascontiguousarray(part.lengths)
        _words(positions, lengths, t, bag_bits, bits, word_N[ids])
        if part.weights is not None:
            weight_of_N[ids] = part.weights
        first = ids.stop
    if weighted:
        _places(word_N, low_of_N, bits)
    word_N = sort_by_bits(word_N, np.empty_like(word_N), bits, bits + limit.bit_length())
    position_V = shared.empty((_count_positions(word_N, bits),), np.int64)
    bag_N, weight_N = np.empty(count, np.int32), np.empty_like(weight_of_N)
    start_R, part_R = np.empty(count + 1, np.int64), np.empty(count, np.int32)
    run_V = np.empty(len(position_V) + 1, np.int64)
    of_places = low_of_N, weight_of_N
    runs = _cut(word_N, bits, bag_bits, *of_places, position_V, bag_N, weight_N, start_R, part_R, run_V)
    found = Runs(weighted_T, bag_N, weight_N, start_R[: runs + 1], part_R[:runs], run_V)
    gradients = [np.ascontiguousarray(part.gradients) for part in parts]
    return Merged(position_V, gradients, np.empty((len(parts), 0), np.int64), found)


def _union_of(left: Positions, right: Positions | None = None) -> Positions:
    if right is None:
        return left
    result = shared.empty((len(left) + len(right),), np.int64)
    count = _union(left, right, result)
    return result[:count]


def warm() -> None:
    """Compiles or loads every kernel of this module, for positions of 32 and 64 bits."""
    position, gradient = np.zeros(1, np.int64), np.ones((1, 1), np.float32)
    merge([(position, gradient), (position, gradient)]).gradients()
    for dtype in (np.int32, np.int64):
        for weights in (None, np.ones(1, np.float32)):
            merge([Bags(position.astype(dtype), np.ones(1, np.int32), weights, gradient)]).gradients()
