"""Sparse optimizers as kernels: merge the trainers' gradients, update records in place, return the bytes that changed.

Terms. A *delta* is old XOR new of a record's bytes: the redo for parity and the undo for the record. Example: SGD with
lr = 0.5 and gradient 1.0 takes the weight 1.0 (3f800000) to 0.5 (3f000000); the delta is 00800000, and either value
XOR the delta is the other.

Formulas, in float32, after FBGEMM's split table-batched embeddings (g a row's gradient, summed over all trainers):

- sgd: w -= lr * g
- adagrad: s += g * g; w -= lr * g / (sqrt(s) + eps), element by element
- rowwise_adagrad: s += mean(g * g); w -= lr / (sqrt(s) + eps) * g, one s per row

Invariants. The same bits on every CPU and with every number of threads, since a step may be replayed on another host:
no fast-math, no fused multiply-add, one thread, and a fixed order of summation. Gradients of one record are added in
list (trainer) order, ((g0 + g1) + g2). The sum of squares of a row has 8 lanes: lane l adds the elements l, l + 8, l +
16, ... in order, and the lanes are added as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). Initial weights depend on
(seed, table, row of the table, column) alone, so they do not change with the number of slots or the code.

Shapes: P records, W floats in one, B = 4 W bytes, D weights, U records of a step, V records of merged parts, T tables.

Does not know slots, steps or parity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]
from numpy.typing import NDArray

from torch_ecrec import shared
from torch_ecrec.config import OPTIMIZERS, require
from torch_ecrec.kernels import addresses, as_float, pointer, prefetch_row
from torch_ecrec.storage.shard import Bytes, Floats, Positions, check_positions

Part = tuple[Positions, NDArray[Any]]

BLOCK = 256  # records whose gradients are summed at a time

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


# ---------------------------------------------------------------------------------------------------------------- merge


@njit(nogil=True, cache=True)
def _union(left: Any, right: Any, result: Any) -> Any:
    """Union of two ascending arrays into `result`, which has room for both; returns its length."""
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


@njit(nogil=True, cache=True)
def _find(positions_V: Any, positions_U: Any, index_V: Any) -> None:
    """index[v] = where positions_V[v] is in `positions_U`, both ascending, or -1."""
    u = 0
    for v in range(positions_V.shape[0]):
        if u < positions_U.shape[0] and positions_U[u] == positions_V[v]:
            index_V[v] = u
            u += 1
        else:
            index_V[v] = -1


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _sum_rows(address_T: Any, rows_T: Any, half_T: Any, index_TV: Any, first: Any, seen_N: Any, sum_ND: Any) -> None:
    """sum[n] = the gradients of v = first + n, part by part; parts are float32, or uint16 that is bfloat16."""
    count, dim = sum_ND.shape
    seen_N[:count] = False
    for t in range(address_T.shape[0]):
        index_N = index_TV[t, first : first + count]
        if half_T[t]:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.uint16), index_N, seen_N, sum_ND)
        else:
            _add_part(carray(pointer(address_T[t]), (rows_T[t], dim), np.float32), index_N, seen_N, sum_ND)


@njit(nogil=True, cache=True)
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


@dataclass(frozen=True)
class Merged:
    """Gradients of several trainers, record by record. They are added when they are applied, not before.

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
        """For kernels: address, rows, and whether it is bfloat16, of each part."""
        rows = np.array([len(part) for part in self.parts], np.int64)
        return addresses(self.parts), rows, np.array([part.dtype == np.uint16 for part in self.parts])

    def gradients(self) -> Floats:
        """(V, D) float32, the sums that `update_` applies, ((g0 + g1) + g2)."""
        sum_VD = np.empty((len(self.positions), self.dim), np.float32)
        _sum_rows(*self.places(), self.index, 0, np.empty(len(sum_VD), np.bool_), sum_VD)
        return sum_VD


def merge(parts: Sequence[Part]) -> Merged:
    """Brings together the gradients that trainers sent for the same records, in the order of the list.

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


# --------------------------------------------------------------------------------------------------------------- update


@njit(nogil=True, cache=True, error_model="numpy")
def _sgd(records_PW: Any, positions_U: Any, gradients_UD: Any, lr: Any, delta_UW: Any) -> None:
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(gradients_UD.shape[1]):
            old = records_PW[position, j]
            new = old - lr * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@njit(nogil=True, cache=True, error_model="numpy")
def _adagrad(records_PW: Any, positions_U: Any, gradients_UD: Any, lr: Any, eps: Any, delta_UW: Any) -> None:
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        for j in range(dim):
            # Unsigned: a sum that might be negative would count from the end, and the loop would not be vector code.
            k = np.uint64(dim) + np.uint64(j)
            gradient = gradients_UD[i, j]
            old_state = records_PW[position, k]
            new_state = old_state + gradient * gradient
            old = records_PW[position, j]
            new = old - lr * gradient / (np.sqrt(new_state) + eps)
            records_PW[position, k] = new_state
            records_PW[position, j] = new
            delta_UW[i, k] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_of_squares(values_UD: Any, i: Any) -> Any:
    """Of row i: 8 lanes, then a fixed tree; see the head of the module."""
    v = values_UD
    zero = np.float32(0)
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    whole = v.shape[1] // 8 * 8
    for j in range(0, whole, 8):
        a += v[i, j] * v[i, j]
        b += v[i, j + 1] * v[i, j + 1]
        c += v[i, j + 2] * v[i, j + 2]
        d += v[i, j + 3] * v[i, j + 3]
        e += v[i, j + 4] * v[i, j + 4]
        f += v[i, j + 5] * v[i, j + 5]
        g += v[i, j + 6] * v[i, j + 6]
        h += v[i, j + 7] * v[i, j + 7]
    rest = v.shape[1] - whole
    if rest > 0:
        a += v[i, whole] * v[i, whole]
    if rest > 1:
        b += v[i, whole + 1] * v[i, whole + 1]
    if rest > 2:
        c += v[i, whole + 2] * v[i, whole + 2]
    if rest > 3:
        d += v[i, whole + 3] * v[i, whole + 3]
    if rest > 4:
        e += v[i, whole + 4] * v[i, whole + 4]
    if rest > 5:
        f += v[i, whole + 5] * v[i, whole + 5]
    if rest > 6:
        g += v[i, whole + 6] * v[i, whole + 6]
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


@njit(nogil=True, cache=True, error_model="numpy")
def _rowwise_adagrad(records_PW: Any, positions_U: Any, gradients_UD: Any, lr: Any, eps: Any, delta_UW: Any) -> None:
    dim = gradients_UD.shape[1]
    for i in range(positions_U.shape[0]):
        prefetch_row(records_PW, positions_U, i)
        position = positions_U[i]
        old_state = records_PW[position, dim]
        new_state = old_state + _sum_of_squares(gradients_UD, i) / np.float32(dim)
        records_PW[position, dim] = new_state
        delta_UW[i, dim] = np.float32(old_state).view(np.uint32) ^ np.float32(new_state).view(np.uint32)
        multiplier = lr / (np.sqrt(new_state) + eps)
        for j in range(dim):
            old = records_PW[position, j]
            new = old - multiplier * gradients_UD[i, j]
            records_PW[position, j] = new
            delta_UW[i, j] = np.float32(old).view(np.uint32) ^ np.float32(new).view(np.uint32)


@njit(nogil=True, cache=True)
def _apply(
    kind: Any,
    records_PW: Any,
    positions_V: Any,
    address_T: Any,
    rows_T: Any,
    half_T: Any,
    index_TV: Any,
    dim: Any,
    lr: Any,
    eps: Any,
    delta_VW: Any,
) -> None:
    """Sums and applies block by block: the sums stay in the cache."""
    sum_ND, seen_N = np.empty((BLOCK, dim), np.float32), np.empty(BLOCK, np.bool_)
    for first in range(0, positions_V.shape[0], BLOCK):
        last = min(first + BLOCK, positions_V.shape[0])
        sums, some, delta = sum_ND[: last - first], positions_V[first:last], delta_VW[first:last]
        _sum_rows(address_T, rows_T, half_T, index_TV, first, seen_N, sums)
        if kind == 0:
            _sgd(records_PW, some, sums, lr, delta)
        elif kind == 1:
            _adagrad(records_PW, some, sums, lr, eps, delta)
        else:
            _rowwise_adagrad(records_PW, some, sums, lr, eps, delta)


def update_(kind: str, records_PW: Floats, merged: Merged, lr: float, eps: float, out: Bytes | None = None) -> Bytes:
    """Applies one step of a sparse optimizer to some records, in place.

    Args:
        kind: "sgd", "adagrad" or "rowwise_adagrad".
        records_PW: (P, W) float32, contiguous, W = D + state floats of `kind`. Mutated.
        merged: positions (V,), without duplicates, and gradients (V, D). Must not alias `records_PW`.
        lr: learning rate of this step.
        eps: added to the root of the Adagrad state.
        out: (V, B) uint8 to put the result in, contiguous and 4-byte aligned; fresh memory without it.

    Returns:
        delta_VB: (V, B) uint8, old XOR new of each record's bytes.

    Raises:
        ValueError: unknown `kind`, or a shape or a dtype does not fit.
        IndexError: a position is out of range. Nothing was changed then.

    Not checked: that positions are without duplicates. `merge` makes them so.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {kind!r}; expected one of {', '.join(OPTIMIZERS)}")
    if records_PW.ndim != 2 or records_PW.dtype != np.float32 or not records_PW.flags.c_contiguous:
        raise ValueError(f"`records_PW` must be contiguous 2-D float32, got {records_PW.ndim}-D {records_PW.dtype}")
    dim, width = merged.dim, records_PW.shape[1]
    wanted = dim + {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[kind]
    require(width == wanted, f"records of {kind} with dim {dim} must have {wanted} floats, got {width}")
    positions_V = check_positions(merged.positions, len(records_PW))
    shape = (len(positions_V), 4 * width)
    if out is None:
        out = shared.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"`out` must be contiguous uint8 of shape {shape}, got {out.dtype} of {out.shape}")
    rate, epsilon = np.float32(lr), np.float32(eps)
    number = OPTIMIZERS.index(kind)
    places = merged.places()
    _apply(number, records_PW, positions_V, *places, merged.index, dim, rate, epsilon, out.view(np.uint32))
    return out


# ----------------------------------------------------------------------------------------------------------- initialise


@njit(nogil=True, cache=True)
def _mix(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


@njit(nogil=True, cache=True)
def _initialise(
    records_PW: Any, rows_P: Any, seed: Any, first_T: Any, low_T: Any, high_T: Any, index_T: Any, dim: Any
) -> None:
    golden = np.uint64(_GOLDEN)
    unit = np.float32(2.0**-24)
    table = 0
    for i in range(rows_P.shape[0]):
        row = rows_P[i]
        while table > 0 and row < first_T[table]:
            table -= 1
        while table + 1 < first_T.shape[0] and row >= first_T[table + 1]:
            table += 1
        low, span = low_T[table], high_T[table] - low_T[table]
        key = _mix(seed + golden)
        key = _mix((key ^ np.uint64(index_T[table])) + golden)
        key = _mix((key ^ np.uint64(row - first_T[table])) + golden)
        for j in range(dim):
            key += golden
            records_PW[i, j] = low + span * (np.float32(np.int64(_mix(key) >> np.uint64(40))) * unit)
        for j in range(dim, records_PW.shape[1]):
            records_PW[i, j] = np.float32(0)


def initialise_(
    records_PW: Floats,
    rows_P: Positions,
    seed: int,
    first_rows: NDArray[Any],
    low: NDArray[Any],
    high: NDArray[Any],
    table_indices: NDArray[Any],
    dim: int,
) -> None:
    """Gives records their first weights, uniform in [low, high] of their table; optimizer state is zero. In place.

    Args:
        records_PW: (P, W) float32, contiguous. Mutated.
        rows_P: (P,) int64, the slab row of each record.
        seed: of the job, at least 0; taken modulo 2^64.
        first_rows: (T,) slab row where each table starts, ascending from 0.
        low, high: (T,) bounds of each table.
        table_indices: (T,) index of each table in the job.
        dim: weights in a record.

    Raises:
        ValueError: a shape or a dtype does not fit, or a row is negative.
    """
    if records_PW.ndim != 2 or records_PW.dtype != np.float32 or not records_PW.flags.c_contiguous:
        raise ValueError(f"`records_PW` must be contiguous 2-D float32, got {records_PW.ndim}-D {records_PW.dtype}")
    require(
        rows_P.shape == (len(records_PW),) and rows_P.dtype == np.int64,
        f"`rows_P` must be int64 of shape {(len(records_PW),)}, got {rows_P.dtype} of {rows_P.shape}",
    )
    require(0 < dim <= records_PW.shape[1], f"`dim` must be in 1..{records_PW.shape[1]}, got {dim}")
    tables = len(first_rows)
    require(tables > 0 and first_rows[0] == 0, "`first_rows` must start with 0")
    for name, values in (("low", low), ("high", high), ("table_indices", table_indices)):
        require(len(values) == tables, f"`{name}` must have a value for each of {tables} tables, got {len(values)}")
    require(len(rows_P) == 0 or int(rows_P.min()) >= 0, "`rows_P` must not be negative")
    _initialise(
        records_PW,
        np.ascontiguousarray(rows_P),
        np.uint64(seed % 2**64),
        np.ascontiguousarray(first_rows, dtype=np.int64),
        np.ascontiguousarray(low, dtype=np.float32),
        np.ascontiguousarray(high, dtype=np.float32),
        np.ascontiguousarray(table_indices, dtype=np.int64),
        dim,
    )


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    position, gradient = np.zeros(1, np.int64), np.ones((1, 1), np.float32)
    merged = merge([(position, gradient), (position, gradient)])
    merged.gradients()
    for kind, width in (("sgd", 1), ("adagrad", 2), ("rowwise_adagrad", 2)):
        update_(kind, np.zeros((1, width), np.float32), merged, 0.1, 1e-8)
    bound = np.zeros(1, np.float32)
    initialise_(np.zeros((1, 1), np.float32), position, 0, position, bound, bound, position, 1)
