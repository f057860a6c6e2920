"""Pooling of looked-up rows into features and back, as kernels over a whole batch.

A *bag* is the ids of one feature in one sample. Bags come feature by feature, as in a `KeyedJaggedTensor`; pooled
values go out sample by sample, which is the form that the model wants, so that nothing is transposed afterwards.

    pooled[b, f] = (sum over n in bag (f, b) of weight[n] * row[inverse[n]]) / divisor[f, b]

Invariants. One order of summation: the ids of a bag in their order; the gradients of a row in the order of the ids that
named it, over all bags. The first value is copied, not added to zero, so that -0.0 stays.

Sums of several ids are made in registers, a block of columns at a time (`runtime/row_sums.py`), which changes no bit.

Rows that were looked up are float32, or uint16 that is bfloat16; all else is float32.

Shapes: U rows, D dim, N ids, F features, B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import AHEAD, addresses, as_float, check_memory, pointer, prefetch, prefetch_row
from torch_ecrec.runtime.row_sums import row_address, sum_rows

_AHEAD_BYTES = 8192  # of rows that are asked for early; fewer than AHEAD rows come too late
_NOT_FINITE = 0x7F800000  # the exponent bits of a float32 are all ones


@kernel()
def to_table_group_rows(ids_N: Any, lengths_FB: Any, first_F: Any, rows_F: Any, out_N: Any) -> Any:
    """Computes out = id + first row of its feature's table; returns the index of the first id that is no row, or -1."""
    n = 0
    for f in range(lengths_FB.shape[0]):
        count = 0
        for b in range(lengths_FB.shape[1]):
            count += lengths_FB[f, b]
        first, rows = first_F[f], rows_F[f]
        for i in range(n, n + count):
            if ids_N[i] < 0 or ids_N[i] >= rows:
                return i
            out_N[i] = ids_N[i] + first
        n += count
    return -1


@kernel()
def _row_addresses(address_P: Any, rows_P: Any, row_bytes: Any, out_U: Any) -> None:
    u = 0
    for p in range(address_P.shape[0]):
        for i in range(rows_P[p]):
            out_U[u] = address_P[p] + i * row_bytes
            u += 1


def pool(
    parts: Sequence[NDArray[Any]],
    inverse_N: NDArray[Any],
    lengths_FB: NDArray[Any],
    per_id_N: NDArray[Any],
    weighted: bool,
    mean_F: NDArray[Any],
    out_BFD: NDArray[Any],
) -> None:
    """Pools rows into bags.

    Args:
        parts: (u, D) each, contiguous, at least one: the rows are these, one part behind the other.
        weighted: whether `per_id_N` counts.
        mean_F: which features divide by their length.
        out_BFD: float32, overwritten.

    Raises:
        ValueError: the memory of an array that is handed over by address is not what the kernel takes it for.
    """
    features, batch, dim = *lengths_FB.shape, out_BFD.shape[-1]
    check_memory("out_BFD", out_BFD, (batch, features, dim), np.float32)
    check_memory("parts[0]", parts[0], (len(parts[0]), dim), np.float32, np.uint16)
    check_memory("inverse_N", inverse_N, (len(inverse_N),), np.int64)
    check_memory("per_id_N", per_id_N, (len(inverse_N) if weighted else len(per_id_N),), np.float32)
    address_U = np.empty(sum(map(len, parts)), np.int64)
    rows_P = np.array([len(part) for part in parts], np.int64)
    _row_addresses(addresses(parts, dim, parts[0].dtype), rows_P, parts[0].shape[1] * parts[0].itemsize, address_U)
    _pool(address_U, parts[0][:0, 0], inverse_N, lengths_FB, per_id_N, weighted, mean_F, out_BFD)


@kernel()
def _pool(
    address_U: Any,
    kind: Any,
    inverse_N: Any,
    lengths_FB: Any,
    per_id_N: Any,
    weighted: Any,
    mean_F: Any,
    out_BFD: Any,
) -> None:
    """As `pool`, with the address of each row, and an empty array of their dtype."""
    dim = out_BFD.shape[2]
    count, row_bytes = inverse_N.shape[0], dim * kind.itemsize
    ahead = max(AHEAD, _AHEAD_BYTES // row_bytes)
    n = 0
    for f in range(lengths_FB.shape[0]):
        for b in range(lengths_FB.shape[1]):
            length = lengths_FB[f, b]
            if length == 0:
                for j in range(dim):
                    out_BFD[b, f, j] = np.float32(0)
            elif length == 1:
                if n + ahead < count:
                    prefetch(address_U[inverse_N[n + ahead]], row_bytes)
                weight_D = carray(pointer(address_U[inverse_N[n]]), dim, kind.dtype)
                if weighted:
                    w = per_id_N[n]
                    for j in range(dim):
                        out_BFD[b, f, j] = w * as_float(weight_D[j])
                else:
                    for j in range(dim):
                        out_BFD[b, f, j] = as_float(weight_D[j])
            else:
                for i in range(n + ahead, min(n + length + ahead, count)):
                    prefetch(address_U[inverse_N[i]], row_bytes)
                out = row_address(out_BFD, b * out_BFD.shape[1] + f)
                sum_rows(out, dim, address_U, kind, inverse_N, per_id_N, weighted, n, n + length)
                if mean_F[f]:
                    divisor = np.float32(length)
                    for j in range(dim):
                        out_BFD[b, f, j] /= divisor
            n += length


@kernel(error_model="numpy")
def pool_backward(
    grad_BFD: Any,
    inverse_N: Any,
    lengths_FB: Any,
    per_id_N: Any,
    weighted: Any,
    mean_F: Any,
    divisor: Any,
    seen_U: Any,
    row_grad_UD: Any,
) -> Any:
    """Gradients of rows: those of their bags over `divisor`, weighted or averaged as in `pool`.

    Args:
        seen_U: bool, all false; says afterwards which rows have a gradient. Every row of a batch gets one.
        row_grad_UD: float32, overwritten.

    Returns:
        Whether all gradients are finite.
    """
    dim = row_grad_UD.shape[1]
    bits_UD = row_grad_UD.view(np.uint32)
    buffer_D = np.empty(dim, np.float32)
    bad = np.uint32(0)
    n = 0
    for f in range(lengths_FB.shape[0]):
        for b in range(lengths_FB.shape[1]):
            length = lengths_FB[f, b]
            if length > 0:
                shared = divisor
                for j in range(dim):
                    buffer_D[j] = grad_BFD[b, f, j] / shared
                if mean_F[f] and length > 1:
                    count = np.float32(length)
                    for j in range(dim):
                        buffer_D[j] /= count
            for i in range(n, n + length):
                prefetch_row(row_grad_UD, inverse_N, i)
                u = inverse_N[i]
                w = per_id_N[i] if weighted else np.float32(1)
                if seen_U[u]:
                    for j in range(dim):
                        row_grad_UD[u, j] += w * buffer_D[j]
                else:
                    seen_U[u] = True
                    for j in range(dim):
                        row_grad_UD[u, j] = w * buffer_D[j]
            n += length
    for u in range(row_grad_UD.shape[0]):
        for j in range(dim):
            bad |= np.uint32((bits_UD[u, j] & np.uint32(_NOT_FINITE)) == np.uint32(_NOT_FINITE))
    return bad == 0


@kernel()
def per_id_backward(grad_BFD: Any, weight_UD: Any, inverse_N: Any, lengths_FB: Any, mean_F: Any, out_N: Any) -> None:
    """Gradients of the ids' own weights: the inner product of each id's row with the gradient of its bag."""
    n = 0
    for f in range(lengths_FB.shape[0]):
        for b in range(lengths_FB.shape[1]):
            length = lengths_FB[f, b]
            for i in range(n, n + length):
                total = np.float32(0)
                for j in range(weight_UD.shape[1]):
                    total += grad_BFD[b, f, j] * as_float(weight_UD[inverse_N[i], j])
                out_N[i] = total / np.float32(length) if mean_F[f] else total
            n += length


@kernel(error_model="numpy")
def place_bags(pooled_GD: Any, feature_P: Any, lengths_PB: Any, mean_F: Any, out_BFD: Any) -> None:
    """Computes out[b, f] = the sum of bag (p, b) that a slot has made, f being feature[p], over its length where f is
    averaged.

    Bags go feature by feature: G = P * B.
    """
    batch = lengths_PB.shape[1]
    for p in range(feature_P.shape[0]):
        f = feature_P[p]
        for b in range(batch):
            g = p * batch + b
            if mean_F[f] and lengths_PB[p, b] > 1:
                divisor = np.float32(lengths_PB[p, b])
                for j in range(out_BFD.shape[2]):
                    out_BFD[b, f, j] = pooled_GD[g, j] / divisor
            else:
                for j in range(out_BFD.shape[2]):
                    out_BFD[b, f, j] = pooled_GD[g, j]


@kernel(error_model="numpy")
def bags_backward(grad_BFD: Any, feature_P: Any, lengths_PB: Any, mean_F: Any, divisor: Any, out_GD: Any) -> Any:
    """Gradients of the sums that `place_bags` was given: those of the bags over `divisor`, and averaged likewise.

    Returns:
        The greatest size of a number among them, NaN if one is.
    """
    batch, bits_GD, most = lengths_PB.shape[1], out_GD.view(np.uint32), np.uint32(0)
    for p in range(feature_P.shape[0]):
        f = feature_P[p]
        for b in range(batch):
            g = p * batch + b
            for j in range(grad_BFD.shape[2]):
                out_GD[g, j] = grad_BFD[b, f, j] / divisor
            if mean_F[f] and lengths_PB[p, b] > 1:
                length = np.float32(lengths_PB[p, b])
                for j in range(grad_BFD.shape[2]):
                    out_GD[g, j] /= length
            if lengths_PB[p, b] > 0:
                for j in range(grad_BFD.shape[2]):  # sizes are ordered as their bits are, NaN last
                    most = max(most, bits_GD[g, j] & np.uint32(0x7FFFFFFF))
    return np.array([most], np.uint32).view(np.float32)[0]


@kernel()
def repeat_bags(pooled_BFD: Any, index_FN: Any, out_NFD: Any) -> None:
    """Computes out[n, f] = pooled[index[f, n], f]: for each sample its bag."""
    for n in range(out_NFD.shape[0]):
        for f in range(out_NFD.shape[1]):
            b = index_FN[f, n]
            for j in range(out_NFD.shape[2]):
                out_NFD[n, f, j] = pooled_BFD[b, f, j]


@kernel()
def sum_repeats(grad_NFD: Any, index_FN: Any, out_BFD: Any) -> None:
    """Gradients of bags from those of the samples that have them, in the order of the samples. `out_BFD` is zeros."""
    for n in range(grad_NFD.shape[0]):
        for f in range(grad_NFD.shape[1]):
            b = index_FN[f, n]
            for j in range(grad_NFD.shape[2]):
                out_BFD[b, f, j] += grad_NFD[n, f, j]


def warm() -> None:
    """Compiles or loads every kernel of this module, for ids and lengths of 32 and 64 bits."""
    floats = np.zeros((1, 1, 1), np.float32)
    index, flags = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    for lengths in (np.ones((1, 1), np.int32), np.ones((1, 1), np.int64)):
        for ids in (np.zeros(1, np.int32), np.zeros(1, np.int64)):
            to_table_group_rows(ids, lengths, index, index + 1, index.copy())
        for rows in (floats[0], np.zeros((1, 1), np.uint16)):
            pool([rows], index, lengths, floats[0, 0], False, flags, floats)
            per_id_backward(floats, rows, index, lengths, flags, floats[0, 0].copy())
        pool_backward(floats, index, lengths, floats[0, 0], False, flags, np.float32(1), flags.copy(), floats[0].copy())
    place_bags(floats[0], index, np.ones((1, 1), np.int32), flags, floats.copy())
    bags_backward(floats, index, np.ones((1, 1), np.int32), flags, np.float32(1), floats[0].copy())
    repeat_bags(floats, index[None], floats.copy())
    sum_repeats(floats, index[None], floats.copy())
