"""Measures what packing saves of deltas and ids sent between hosts, and its time: part of `bench messages`.

A small DLRM, that of `partial_auc.py`, is trained on Criteo rows or made-up ones, its tables in one table group with
real records, rowwise Adagrad's. Where there are fewer rows than the steps take, they come again, as in the demo: a
model that sees rows for the tenth time makes smaller steps. Of some steps the deltas and the ids of their rows are
packed as they would be for `--slots` servers: row i is on slot i % slots, an array of each kind for each.

    passes       how often the rows have been seen after that step
    words %      of the deltas' bytes, those that their packed words have, whether that pays or not
    packed %     of the deltas' bytes, those of arrays that are packed: of the others a sample says that too few bytes
                 would be saved
    left %       of the deltas' bytes, those that are sent; `ids left %`: of the ids'
    ... ms/MB    to pack and unpack the deltas, and to copy them, for each MB of theirs; where none are packed, what it
                 takes to look at the sample

Times are the thread's own, alternatives take turns: see `codec.py`. The arrays are in the caches, as they are when they
have just been made.

Shapes: U table rows that a step changes, B bytes of a record, C = 26 categories.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torch_ecrec.bench.codec import interleaved
from torch_ecrec.bench.partial import Model
from torch_ecrec.bench.record import require_counts
from torch_ecrec.codec.packing import GROUP, GROUP_BYTES, SLACK_BYTES, pack, unpack
from torch_ecrec.demo import criteo
from torch_ecrec.demo.criteo import CATEGORIES, Clicks
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.checks import require_int

OPTIMIZER, RATE, DENSE_RATE = "rowwise_adagrad", 0.02, 0.02  # as in `workload.py`
STEPS = (5, 30, 60, 100)
MADE_UP = 100_000  # rows
CALLS = 20  # timed as one, for the clock
NOTES = """passes: how often the rows were seen by then. words %: what packed words have of the deltas' bytes.
packed %: where that pays; left %: what is sent, in all. ms of one core for each MB, pack with those that are not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench messages` for this part."""
    group = parser.add_argument_group("packing", "of the deltas and ids of a small DLRM in training")
    group.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows; default: made-up rows")
    steps: Sequence[int] = list(STEPS)
    group.add_argument("--steps", nargs="+", type=int, default=steps, metavar="N", help="whose deltas are packed")
    group.add_argument("--batch-size", type=int, default=1024, help="rows of a step (default 1024)")
    group.add_argument("--rows-per-table", type=int, default=20_000, help="of 26 tables (default 20000)")
    group.add_argument("--dim", type=int, default=16, help="weights of a row (default 16)")
    group.add_argument("--slots", type=int, default=3, help="that the rows are spread over (default 3)")


def check(arguments: argparse.Namespace) -> None:
    """Checks arguments before anything is measured. Raises ValueError or TypeError."""
    require_counts(arguments, "batch_size", "rows_per_table", "dim", "slots")
    for step in arguments.steps:
        require_int("steps", step, 1)


def deltas_of(clicks: Clicks, steps: int, batch: int, rows: int, dim: int) -> Iterator[tuple[Positions, Bytes]]:
    """Yields, for each step, the ids (U,) of the rows that it changes, ascending, and their deltas (U, B)."""
    torch.manual_seed(0)
    model, spec, count = Model(dim), optimizer(OPTIMIZER), CATEGORIES * rows
    shard = Shard(spec.schema(dim), count, 0, sealed=False)
    everything = np.arange(count, dtype=np.int64)
    records_PB = shard.gather(everything)
    drawn = np.random.default_rng(0).uniform(-1, 1, (count, dim)) / math.sqrt(rows)
    records_PB.view(np.float32)[:, :dim] = drawn
    shard.scatter_(everything, records_PB)
    dense_optimizer = torch.optim.Adagrad(model.parameters(), lr=DENSE_RATE)
    for step in range(1, steps + 1):
        some = clicks[np.arange((step - 1) * batch, step * batch) % len(clicks)]
        rows_NC = some.categories.astype(np.int64) + rows * np.arange(CATEGORIES)
        rows_U, inverse = np.unique(rows_NC, return_inverse=True)
        weights = torch.from_numpy(shard.gather_weights(rows_U)).requires_grad_()
        logits = model(torch.from_numpy(some.dense), weights[torch.from_numpy(inverse.reshape(rows_NC.shape))])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(some.labels))
        dense_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        dense_optimizer.step()
        assert weights.grad is not None
        merged = merge([(rows_U, weights.grad.numpy())])
        yield merged.positions, shard.apply_(spec, merged, RATE, step, {}).deltas_UB


def _bytes_of(arrays: Sequence[NDArray[Any]]) -> list[Bytes]:
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def _as_words(array: Bytes) -> int:
    """Returns the bytes of an array's packed form."""
    words = array[: len(array) - len(array) % GROUP_BYTES].view(np.uint32)
    more = sum(int(np.count_nonzero(words > most)) for most in (0xFF, 0xFFFF, 0xFFFFFF))
    return len(words) // GROUP + len(words) + more + len(array) % GROUP_BYTES


def _left(arrays: Sequence[Bytes]) -> int:
    """Returns how many bytes are sent of these arrays."""
    return sum(len(array) if (packed := pack(array)) is None else len(packed) for array in arrays)


def _row(ids: Sequence[Bytes], deltas: Sequence[Bytes], repeats: int) -> dict[str, Any]:
    forms = [(pack(array), np.empty_like(array)) for array in deltas]
    slack, copies = np.zeros(SLACK_BYTES, np.uint8), [copy for _, copy in forms]
    packed = [(np.concatenate([found, slack]), values) for found, values in forms if found is not None]

    def pack_all(_: Any) -> None:
        for array in deltas:
            pack(array)

    def unpack_all(_: Any) -> None:
        for array, values in packed:
            unpack(array, len(array) - SLACK_BYTES, values)

    def copy_all(_: Any) -> None:
        for array, copy in zip(deltas, copies, strict=True):
            np.copyto(copy, array)

    nothing = lambda: None  # noqa: E731
    alternatives = {"pack": (nothing, pack_all), "unpack": (nothing, unpack_all), "copy": (nothing, copy_all)}
    times = interleaved(alternatives, repeats, CALLS)
    total, in_packed = sum(map(len, deltas)), sum(len(values) for _, values in packed)
    row: dict[str, Any] = {"delta_bytes": total, "words %": 100 * sum(map(_as_words, deltas)) / total}
    row["packed %"] = 100 * in_packed / total
    row |= {"left %": 100 * _left(deltas) / total, "ids left %": 100 * _left(ids) / sum(map(len, ids))}
    for name, of_bytes in (("pack", total), ("unpack", in_packed), ("copy", total)):
        row[f"{name} ms/MB"] = 1e3 * statistics.median(times[name]) / (of_bytes / 1e6) if of_bytes else None
    return row


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each of `--steps`, in order.

    Raises:
        ValueError: the file is none of Criteo's.
        OSError: it cannot be read.
    """
    batch, slots, of_table = arguments.batch_size, arguments.slots, arguments.rows_per_table
    clicks = criteo.synthetic(MADE_UP, 0, of_table) if arguments.data is None else criteo.read(arguments.data, of_table)
    torch.set_num_threads(1)  # the model is small: with more it is slower, and its sums depend on it
    rows = list[dict[str, Any]]()
    made = deltas_of(clicks, max(arguments.steps), batch, of_table, arguments.dim)
    for step, (rows_U, deltas_UB) in enumerate(made, 1):
        if step in arguments.steps:
            mine = [rows_U % slots == slot for slot in range(slots)]
            ids = _bytes_of([rows_U[some] // slots for some in mine])
            found = _row(ids, _bytes_of([deltas_UB[some] for some in mine]), arguments.repeats)
            rows.append({"step": step, "passes": round(step * batch / len(clicks), 1), **found})
    return rows
