"""What this build's kernels give on fixed vectors: how two builds find that they would not give the same bits.

    kernel_bits()        # {"bits of adam": "5f0c31d2a4be9977", ..., "bits of the code": "cb73a48e5e29122c", ...}

A slot may move to a server of another build, and its parities stay with servers of the first. So both must make the
same records of the same gradients, to the last bit. Every process says these digests when it joins, and the
coordinator compares them (`coordinator/admission.py`); an optimizer that differs is refused by its name.

The vectors have rows whose lengths are and are not those of whole vectors of the processor, all dtypes of weights,
several trainers and steps, and every hyperparameter at its default and at another value. They are made of integers
alone, the same with every release of NumPy. What they do not show is for who changes a kernel to say, by `PROTOCOL`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_ecrec.client import pooling
from torch_ecrec.codec import packing, seals
from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.layout.placing import Piece
from torch_ecrec.layout.routing import arrange
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol.build import BITS
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import Bags, Part, merge
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import ITEM_BYTES, Schema
from torch_ecrec.records.shard import Shard
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.spread import spread_of

DIMS = (1, 13, 64)
ROWS = 19
STEPS = 3
Array = NDArray[Any]


@functools.cache
def kernel_bits() -> dict[str, str]:
    """Returns a digest of what each kind of kernel gives, by a name that begins with `build.BITS`.

    Of kernels that are loaded (`launch.warm`) it takes a fraction of a second; otherwise they are compiled first.
    """
    made: dict[str, Callable[[], Iterator[Any]]] = {
        "initial values": _initial,
        "merged gradients": _merged,
        "the code": _code,
        "the layout": _layout,
        "looked up rows": _rows,
        "pooling": _pooling,
        **{name: functools.partial(_steps, optimizer(name)) for name in NAMES},
    }
    return {f"{BITS}{name}": _digest(parts()) for name, parts in made.items()}


def digest_of_steps(one: SparseOptimizer) -> str:
    """Returns a digest of an optimizer: the layout of its records, and what some steps make of them."""
    return _digest(_steps(one))


def _digest(parts: Iterator[Any]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = isinstance(part, np.ndarray)
        said = f"{part.dtype.str}{part.shape}" if array else repr(part)
        found.update(f"\n{len(said)} {said}\n".encode())
        if array:
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def _integers(count: int, salt: int) -> NDArray[np.uint64]:
    """Returns so many well mixed integers: the multiplicative hash of Knuth, twice."""
    found = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt << 20)) * np.uint64(0x9E3779B97F4A7C15)
    return (found ^ (found >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _numbers(rows: int, dim: int, salt: int) -> NDArray[np.float32]:
    """(rows, dim) float32 in [-1, 1), of 24 bits each."""
    found = (_integers(rows * dim, salt) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return found.reshape(rows, dim)


def _some(salt: int, step: int) -> NDArray[np.int64]:
    """Positions of some of the rows, ascending."""
    return np.flatnonzero(_integers(ROWS, salt) % np.uint64(step + 2) != 0).astype(np.int64, copy=False)


def _first(schema: Schema, seed: int = 5) -> InitialRecords:
    return InitialRecords(schema, seed, (0, 7), (-0.25, 0.5), (0.25, 2.0), (0, 3))


def _initial() -> Iterator[Any]:
    for weights in ITEM_BYTES:
        for dim in DIMS:
            rows = np.concatenate([np.arange(-1, ROWS - 2), [1 << 33]]).astype(np.int64)
            yield _first(Schema.of(dim, (), weights)).of(rows)


def _steps(one: SparseOptimizer) -> Iterator[Any]:
    """Steps of an optimizer: the layout of its records, and what they, the deltas and the seals are after each."""
    other = {name: default if default > 0 else 0.03125 for name, default in one.fixed.items()}
    other |= {name: other[name] * most / 2 for name, most in one.below.items()}
    other |= {name: max(choices) for name, choices in one.choices.items()}
    yield list(one.fixed.items())
    for weights in ITEM_BYTES:
        for dim in DIMS:
            schema = one.schema(dim, weights)
            yield [(field.name, field.values, field.per_row, field.dtype, field.nbytes) for field in schema.fields]
            for fixed in (one.fixed, other):
                records_PB = _first(schema).of(np.arange(ROWS, dtype=np.int64))
                for step in range(1, STEPS + 1):
                    parts = []
                    for trainer in range(3):
                        positions_U = _some(trainer, step)
                        parts.append((positions_U, _numbers(len(positions_U), dim, 10 * step + trainer)))
                    merged = merge(parts)
                    seals_V = np.zeros(len(merged.positions), np.uint32)
                    records_PW = records_PB.view(np.float32)
                    yield one.update_(records_PW, merged, 0.05, step, fixed, weights=weights, seals_V=seals_V)
                    yield seals_V
                    yield records_PB


def _merged() -> Iterator[Any]:
    for dim in DIMS:
        pairs: list[Part] = []
        for trainer in range(3):
            positions_U = _some(trainer, 1)
            pairs.append((positions_U, _numbers(len(positions_U), dim, trainer)))
        lengths_G = np.array([2, 5, 1, 8], np.int32)
        ids_N = (_integers(int(lengths_G.sum()), 3) % np.uint64(ROWS)).astype(np.int64)
        bags: list[Part] = [
            Bags(ids_N, lengths_G, weights, _numbers(len(lengths_G), dim, 7)) for weights in _weights(len(ids_N))
        ]
        for parts in (pairs, bags, [*pairs, *bags]):
            merged = merge(parts)
            yield merged.positions
            yield merged.gradients()


def _weights(count: int) -> list[Array | None]:
    return [None, _numbers(1, count, 9)[0]]


def _code() -> Iterator[Any]:
    """Parities, what is decoded of them, seals, and how bytes are packed."""
    for k, r in ((1, 1), (2, 1), (3, 2), (10, 4)):
        code = LinearCode(k, r)
        data_KUB = _integers(k * 5 * 7, k).view(np.uint8).reshape(k, 5, 7 * 8)
        parity_RUB = code.encode(data_KUB)
        yield code.coefficients
        yield parity_RUB
        lost = min(r, k)
        have = [*range(lost, k), *range(k, k + lost)]
        yield code.decode(have, [*data_KUB[lost:], *parity_RUB[:lost]], 0)
        target_NB, seals_N = parity_RUB[-1].copy(), seals.seals_of(parity_RUB[-1])
        rows_U, coefficients_U = np.array([3, -1, 0], np.int64), np.array([1, 7, 200], np.uint8)
        yield code.fold_(target_NB, rows_U, data_KUB[0, :3].copy(), coefficients_U, seals_N)
        yield target_NB
        yield seals_N
    values = (_integers(1 << 10, 4) >> np.uint64(48)).astype(np.uint32).view(np.uint8)
    yield packing.pack(values)


def _layout() -> Iterator[Any]:
    for slots, k, r, rows in ((1, 1, 0, 9), (3, 2, 1, 100), (6, 3, 2, 101), (23, 4, 2, 500)):
        layout = Layout(slots, k, r, rows)
        yield from (layout.stripes, layout.member_slot, layout.member_rank, layout.data_base, layout.parity_base)
        yield from layout.locate(np.arange(rows))
        yield [layout.row_at(slot, np.arange(layout.rows_on(slot))).tolist() for slot in range(slots)]
    placed = Layout(4, 2, 1, 30, (Piece(10, (2,)), Piece(20, (0, 1, 3))))
    yield from placed.locate(np.arange(30))
    route, index = arrange(Layout(3, 2, 1, 100), torch.from_numpy((_integers(50, 6) % np.uint64(100)).astype(np.int64)))
    yield [positions.tolist() for positions in route.positions]
    yield index.numpy()
    tables = tuple(
        TableSpec(f"t{i}", 50 * (i + 1), 4, -1.0, 1.0, sharding=sharding, pooling_factor=1.0 + i)
        for i, sharding in enumerate(("auto", "table_wise", "row_wise", "auto", "table_wise"))
    )
    yield repr([one.slots for one in spread_of(JobSpec(tables, CodeSpec(4, 2, 1), 2, 1)).tables])


def _rows() -> Iterator[Any]:
    """Rows as they travel, and bags that are pooled where they lie."""
    positions_U = _some(1, 1)
    ids_N, lengths_G = np.concatenate([positions_U, positions_U[::-1]]), np.array([3, 2, 1], np.int32)
    lengths_G = np.append(lengths_G, np.int32(len(ids_N) - lengths_G.sum()))
    for weights in ITEM_BYTES:
        for dim in DIMS:
            schema = Schema.of(dim, (), weights)
            shard = Shard(schema, ROWS, 0)
            shard.scatter_(np.arange(ROWS), _first(schema).of(np.arange(ROWS)))
            yield shard.gather_weights(positions_U)
            yield shard.gather_weights(positions_U, bfloat16=True)
            yield shard.gather_weights(positions_U, int8=True)
            for factors in _weights(len(ids_N)):
                yield shard.pool(ids_N, lengths_G, factors)


def _pooling() -> Iterator[Any]:
    """The trainers' side of pooling, forth and back."""
    lengths_FB = np.array([[2, 0, 5], [1, 3, 4]], np.int32)
    ids_N = (_integers(int(lengths_FB.sum()), 8) % np.uint64(ROWS)).astype(np.int64)
    for dim in DIMS:
        rows_UD, grad_BFD = _numbers(ROWS, dim, 2), _numbers(6, dim, 3).reshape(3, 2, dim)
        for factors in _weights(len(ids_N)):
            weighted, mean_F = factors is not None, np.array([factors is None, False])
            per_id_N = np.zeros(0, np.float32) if factors is None else factors
            out_BFD = np.empty((3, 2, dim), np.float32)
            pooling.pool(
                [rows_UD[:7].copy(), rows_UD[7:].copy()], ids_N, lengths_FB, per_id_N, weighted, mean_F, out_BFD
            )
            yield out_BFD
            seen_U, back_UD = np.zeros(ROWS, np.bool_), np.zeros((ROWS, dim), np.float32)
            pooling.pool_backward(
                grad_BFD, ids_N, lengths_FB, per_id_N, weighted, mean_F, np.float32(3), seen_U, back_UD
            )
            yield back_UD[seen_U]
