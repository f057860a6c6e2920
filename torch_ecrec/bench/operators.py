"""Measures our operators on a batch, beside FBGEMM's and torch's for the same work, in the time of one core.

    range check      ids to rows of the table group; an id that is no row is found
    unique rows      each row of a batch once, and the place of each id among them; ours also sorts them by slot
    to slots         unique rows to the slots that hold them; FBGEMM's bucketises by ranges of rows
    pooled           looked-up rows to bags; its backward makes the gradients of the rows: over the number of trainers,
                     and checked to be finite by ours alone
    sequence         looked-up rows to a row for each id, and back
                     (looked-up rows are a piece from each slot: a rival that wants one table puts them together)
    bfloat16         rows at scattered places of a table, rounded, as they travel if that is the `wire`
    at the slot      bags of records: pooled, and a step of row-wise Adagrad with the gradients of bags, with deltas;
                     FBGEMM's tables on a CPU beside it (the batch has a fourth of the rows)
    8 bits           rows quantised row by row, and back, as they may travel to evaluations (`evaluation_wire`)

Batches follow Zipf's law as those of `bench train` (see `workload.py`). An operator takes what its place in training
hands it, so a rival that wants offsets instead of lengths makes them in its time. What is reused from step to step is
not timed. Times are the thread's own, alternatives take turns: see `codec.py`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.nn import functional

from torch_ecrec.bench import record
from torch_ecrec.bench.codec import interleaved
from torch_ecrec.bench.workload import zipf_ranks
from torch_ecrec.client import pooling
from torch_ecrec.layout import routing
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.observe.progress import counted
from torch_ecrec.records.merge import Bags, merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.quantised import pack, unpack
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.checks import require_int

FEATURES, ROWS, ZIPF = 26, 200_000, 1.05
SLOTS = 3
FATAL = 0  # FBGEMM's BoundsCheckMode
SUM, NO_OUTPUT_DTYPE = 0, 0  # FBGEMM's PoolingMode, SparseType.FP32
RIVALS = ("fbgemm", "torch")
_FBGEMM: Any = torch.ops.fbgemm
COLUMNS = {
    "what": "what",
    "dim": "dim",
    "ids": "ids of a bag",
    "ours_ms": "ours ms",
    "fbgemm_ms": "FBGEMM ms",
    "fbgemm_over_ours": "FBGEMM / ours",
    "fbgemm_same": "same bits",
    "torch_ms": "torch ms",
    "torch_over_ours": "torch / ours",
    "torch_same": "same bits ",
}
NOTES = """ms of one core, a batch of {features} features and {batch} samples: median of {repeats} interleaved blocks.
.../ ours: the median over the blocks of the ratio within a block; above 1 ours is the faster one."""

Call = Callable[[Any], Any]
Alternatives = Mapping[str, tuple[Callable[[], Any], Call]]


@dataclass(frozen=True)
class Case:
    """Alternatives for one piece of work. Each has an untimed preparation, and a call that returns the result.

    `same` makes results comparable; without it they are not compared. A result that takes time to read is a function,
    which is called when it is compared.
    """

    what: str
    alternatives: Alternatives
    same: bool = True


def _nothing() -> None:
    return None


class _Batch:
    """A batch of all features, and the arguments of each operator for it."""

    def __init__(self, batch: int, ids: int, dim: int, rows: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        count = batch * ids
        drawn = [random.permutation(rows)[zipf_ranks(random, count, rows, ZIPF)] for _ in range(FEATURES)]
        self.dim, self.layout = dim, Layout(SLOTS, 2, 1, FEATURES * rows)
        self.lengths_FB = np.full((FEATURES, batch), ids, np.int32)
        self.ids_N = torch.from_numpy(np.concatenate(drawn).astype(np.int64))
        self.first_F, self.rows_F = np.arange(FEATURES) * rows, np.full(FEATURES, rows)
        self.rows_N = self.ids_N + torch.from_numpy(self.first_F).repeat_interleave(count)
        found, self.inverse_N = routing.arrange(self.layout, self.rows_N)
        self.rows_U = found.rows
        self.weights_UD = torch.from_numpy(random.standard_normal((len(self.rows_U), dim), dtype=np.float32))
        self.parts = [part.clone() for part in self.weights_UD.tensor_split(SLOTS)]  # as they come from the slots
        self.weights_N = torch.from_numpy(random.random(len(self.ids_N), dtype=np.float32))
        self.gradient_BFD = torch.from_numpy(random.standard_normal((batch, FEATURES, dim), dtype=np.float32))

    def offsets(self) -> Tensor:
        """Returns the offsets of the bags: (F B + 1,) int64."""
        found: Tensor = _FBGEMM.asynchronous_complete_cumsum(torch.from_numpy(self.lengths_FB).view(-1).long())
        return found

    # ------------------------------------------------------------------------------------------------------------- ids

    def range_check(self) -> Case:
        sizes_F, first_F = torch.from_numpy(self.rows_F), torch.from_numpy(self.first_F)
        out_N = np.empty(len(self.ids_N), np.int64)

        def ours(_: None) -> Tensor:
            assert (
                pooling.to_table_group_rows(self.ids_N.numpy(), self.lengths_FB, self.first_F, self.rows_F, out_N) == -1
            )
            return torch.from_numpy(out_N)

        def shifted() -> Tensor:
            return self.ids_N + first_F.repeat_interleave(torch.from_numpy(self.lengths_FB).sum(1))

        def fbgemm(warning: Tensor) -> Tensor:
            _FBGEMM.bounds_check_indices(sizes_F, self.ids_N, self.offsets(), FATAL, warning)
            return shifted()

        def plain(_: None) -> Tensor:
            sizes_N = sizes_F.repeat_interleave(torch.from_numpy(self.lengths_FB).sum(1))
            assert not bool(((self.ids_N < 0) | (self.ids_N >= sizes_N)).any())
            return shifted()

        made = lambda: torch.zeros(1, dtype=torch.int64)  # noqa: E731
        return Case("range check", {"ours": (_nothing, ours), "fbgemm": (made, fbgemm), "torch": (_nothing, plain)})

    def unique(self) -> Case:
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: routing.arrange(self.layout, self.rows_N)[1]),
            "torch": (_nothing, lambda _: torch.unique(self.rows_N, return_inverse=True)[1]),
        }
        return Case("unique rows", alternatives, same=False)

    def to_slots(self) -> Case:
        count = torch.tensor([len(self.rows_U)])
        block = torch.tensor([-(-self.layout.rows // SLOTS)])

        def ours(_: None) -> object:
            return routing.route(self.layout, self.rows_U)

        def fbgemm(_: None) -> object:
            return _FBGEMM.block_bucketize_sparse_features(count, self.rows_U, False, True, block, SLOTS)

        return Case("to slots", {"ours": (_nothing, ours), "fbgemm": (_nothing, fbgemm)}, same=False)

    # ------------------------------------------------------------------------------------------------------ their rows

    def _pool(self, lengths_FB: np.ndarray, weighted: bool) -> Tensor:
        features, batch = lengths_FB.shape
        out_BFD = torch.empty(batch, features, self.dim)
        per_id_N, mean_F = self.weights_N.numpy(), np.zeros(features, np.bool_)
        parts = [part.numpy() for part in self.parts]
        pooling.pool(parts, self.inverse_N.numpy(), lengths_FB, per_id_N, weighted, mean_F, out_BFD.numpy())
        return out_BFD

    def _pool_backward(self, gradient_BFD: Tensor, lengths_FB: np.ndarray, weighted: bool) -> Tensor:
        mean_F, seen_U = np.zeros(len(lengths_FB), np.bool_), np.zeros(len(self.rows_U), np.bool_)
        out_UD = torch.empty_like(self.weights_UD)
        of_ids = self.inverse_N.numpy(), lengths_FB, self.weights_N.numpy(), weighted, mean_F
        pooling.pool_backward(gradient_BFD.numpy(), *of_ids, np.float32(1), seen_U, out_UD.numpy())
        return out_UD

    def _fbgemm_pool(self, table_UD: Tensor, weighted: bool) -> Tensor:
        """Pools by FBGEMM. All features look into the rows of the batch, as one table."""
        columns_F = torch.arange(FEATURES + 1, dtype=torch.int32) * self.dim
        sizes_F = torch.tensor([0] * FEATURES + [len(table_UD)])  # summed before each feature's table, and all
        weights = self.weights_N if weighted else None
        out: Tensor = _FBGEMM.dense_embedding_codegen_lookup_function(
            table_UD.view(-1), torch.zeros(FEATURES, dtype=torch.int64), columns_F, FEATURES * self.dim, self.dim,
            sizes_F, len(table_UD).bit_length(), self.inverse_N, self.offsets(), SUM, weights, None, NO_OUTPUT_DTYPE,
        )  # fmt: skip
        return out.view(-1, FEATURES, self.dim)

    def _torch_pool(self, table_UD: Tensor, weighted: bool) -> Tensor:
        """Pools by torch, feature by feature, and arranges the result sample by sample, as the model wants it."""
        weights = self.weights_N if weighted else None
        out = functional.embedding_bag(
            self.inverse_N, table_UD, self.offsets(), mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return out.view(FEATURES, -1, self.dim).transpose(0, 1).contiguous()

    def pooled(self, weighted: bool) -> Case:
        name = "pooled, weights of ids" if weighted else "pooled"
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: self._pool(self.lengths_FB, weighted)),
            "fbgemm": (_nothing, lambda _: self._fbgemm_pool(torch.cat(self.parts), weighted)),
            "torch": (_nothing, lambda _: self._torch_pool(torch.cat(self.parts), weighted)),
        }
        return Case(name, alternatives)

    def pooled_backward(self, weighted: bool) -> Case:
        name = "pooled, weights of ids, backward" if weighted else "pooled, backward"
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: self._pool_backward(self.gradient_BFD, self.lengths_FB, weighted)),
            "fbgemm": self._autograd(lambda table_UD: self._fbgemm_pool(table_UD, weighted), self.gradient_BFD),
            "torch": self._autograd(lambda table_UD: self._torch_pool(table_UD, weighted), self.gradient_BFD),
        }
        return Case(name, alternatives)

    def _autograd(self, forward: Callable[[Tensor], Tensor], gradient: Tensor) -> tuple[Callable[[], Any], Call]:
        """Returns preparation and call for the backward alone: the forward is the preparation."""

        def prepare() -> tuple[Tensor, Tensor]:
            table_UD = self.weights_UD.clone().requires_grad_()
            return forward(table_UD), table_UD

        def call(made: tuple[Tensor, Tensor]) -> Tensor:
            with warnings.catch_warnings():  # FBGEMM's makes its graph itself, of which torch does not know
                warnings.simplefilter("ignore", UserWarning)
                (found,) = torch.autograd.grad(made[0], made[1], gradient)
            return found

        return prepare, call

    def sequence(self) -> Case:
        each_1N = np.ones((1, len(self.inverse_N)), np.int32)
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: self._pool(each_1N, False).flatten(1)),
            "fbgemm": (_nothing, lambda _: _FBGEMM.index_select_dim0(torch.cat(self.parts), self.inverse_N)),
            "torch": (_nothing, lambda _: torch.cat(self.parts).index_select(0, self.inverse_N)),
        }
        return Case("sequence", alternatives)

    def sequence_backward(self) -> Case:
        each_1N = np.ones((1, len(self.inverse_N)), np.int32)
        gradient_ND = torch.randn(len(self.inverse_N), self.dim, generator=torch.Generator().manual_seed(0))
        of_torch = self._autograd(lambda table_UD: table_UD.index_select(0, self.inverse_N), gradient_ND)
        fbgemm = lambda table_UD: _FBGEMM.index_select_dim0(table_UD, self.inverse_N)  # noqa: E731
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: self._pool_backward(gradient_ND.view(-1, 1, self.dim), each_1N, False)),
            "fbgemm": self._autograd(fbgemm, gradient_ND),
            "torch": of_torch,
        }
        return Case("sequence, backward", alternatives)

    # ------------------------------------------------------------------------------------------------ bags at the slot

    def at_the_slot(self) -> Iterator[Case]:
        """Yields the forward and the step of a slot that has all tables. Each has a record for 4 rows of the batch."""
        rows_U, index_N = torch.unique(self.rows_N, return_inverse=True)
        starts_F = torch.searchsorted(rows_U, torch.from_numpy(self.first_F))
        count_F = torch.diff(starts_F, append=torch.tensor([len(rows_U)])).tolist()
        positions_N = (4 * index_N).int().numpy()
        bags, lengths_G = self.lengths_FB.shape, self.lengths_FB.reshape(-1)
        local_N = 4 * (index_N - starts_F.repeat_interleave(torch.from_numpy(self.lengths_FB).sum(1)))
        adagrad, eps, lr = optimizer("rowwise_adagrad"), 1e-8, 0.01
        gradient_GD = self.gradient_BFD.transpose(0, 1).reshape(-1, self.dim).contiguous().numpy()
        gradient = self.gradient_BFD.flatten(1)
        weights_PD = torch.rand(4 * len(rows_U), self.dim, generator=torch.Generator().manual_seed(0))

        shard = Shard(adagrad.schema(self.dim), len(weights_PD), 0, sealed=False)
        every_P = np.arange(len(weights_PD))
        state_P1 = np.zeros((len(weights_PD), 1), np.float32)
        shard.scatter_(every_P, np.hstack([weights_PD.numpy(), state_P1]).view(np.uint8))
        specs = [(4 * count, self.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in count_F]
        tables = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=lr, eps=eps
        )
        for table, start, count in zip(tables.split_embedding_weights(), starts_F.tolist(), count_F, strict=True):
            table.copy_(weights_PD[4 * start : 4 * (start + count)])

        def pooled(_: None) -> Callable[[], Tensor]:
            found_GD = shard.pool(positions_N, lengths_G)
            return lambda: torch.from_numpy(found_GD).view(*bags, -1).transpose(0, 1).flatten(1)

        def step(_: None) -> Callable[[], Tensor]:
            shard.apply_(adagrad, merge([Bags(positions_N, lengths_G, None, gradient_GD)]), lr, 1, {"eps": eps})
            return lambda: torch.from_numpy(shard.gather_weights(every_P))

        def fbgemm(_: None) -> Tensor:
            found: Tensor = tables(local_N, self.offsets())
            return found.detach()

        def fbgemm_step(made: Tensor) -> Callable[[], Tensor]:
            torch.autograd.backward(made, gradient)
            return lambda: torch.cat(tables.split_embedding_weights())

        yield Case("pooled at the slot", {"ours": (_nothing, pooled), "fbgemm": (_nothing, fbgemm)})
        forward = lambda: tables(local_N, self.offsets())  # noqa: E731
        yield Case("step of bags at the slot", {"ours": (_nothing, step), "fbgemm": (forward, fbgemm_step)})

    # ------------------------------------------------------------------------------------------------- fewer bits a row

    def bfloat16(self) -> Case:
        shard = Shard(Schema.of(self.dim), 4 * len(self.rows_U), 0)
        places_U = np.arange(len(self.rows_U)) * 4
        shard.scatter_(places_U, self.weights_UD.numpy().view(np.uint8))
        every_P, at_U = np.arange(4 * len(self.rows_U)), torch.from_numpy(places_U)
        source_PD = torch.from_numpy(shard.gather_weights(every_P))

        def ours(_: None) -> Tensor:
            return torch.from_numpy(shard.gather_weights(places_U, True)).view(torch.bfloat16)

        def fbgemm(_: None) -> Tensor:
            rounded: Tensor = _FBGEMM.FloatToBfloat16Quantized(source_PD.index_select(0, at_U))
            return rounded.view(torch.bfloat16)

        def plain(_: None) -> Tensor:
            return source_PD.index_select(0, at_U).bfloat16()

        return Case("bfloat16", {"ours": (_nothing, ours), "fbgemm": (_nothing, fbgemm), "torch": (_nothing, plain)})

    def eight_bits(self) -> Case:
        fbgemm, plain = _FBGEMM.FloatToFused8BitRowwiseQuantized, torch.ops.quantized
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: torch.from_numpy(pack(self.weights_UD.numpy()))),
            "fbgemm": (_nothing, lambda _: fbgemm(self.weights_UD)),
            "torch": (_nothing, lambda _: plain.embedding_bag_byte_prepack(self.weights_UD)),
        }
        return Case("to 8 bits", alternatives)

    def of_eight_bits(self) -> Case:
        packed = _FBGEMM.FloatToFused8BitRowwiseQuantized(self.weights_UD)
        fbgemm, plain = _FBGEMM.Fused8BitRowwiseQuantizedToFloat, torch.ops.quantized
        alternatives: Alternatives = {
            "ours": (_nothing, lambda _: torch.from_numpy(unpack(packed.numpy()))),
            "fbgemm": (_nothing, lambda _: fbgemm(packed)),
            "torch": (_nothing, lambda _: plain.embedding_bag_byte_unpack(packed)),
        }
        return Case("of 8 bits", alternatives)

    def cases(self) -> Iterator[Case]:
        yield from (self.range_check(), self.unique(), self.to_slots())
        for weighted in (False, True):
            yield from (self.pooled(weighted), self.pooled_backward(weighted))
        yield from (self.sequence(), self.sequence_backward())
        yield from self.at_the_slot()
        yield from (self.bfloat16(), self.eight_bits(), self.of_eight_bits())


def _same(result: Tensor, other: Tensor) -> str:
    """Returns "yes" if results are equal, or else how much they differ at most."""
    if result.dtype == other.dtype and torch.equal(result, other):
        return "yes"
    return f"{(result.double() - other.double()).abs().max():.1e}"


def _measure(case: Case, repeats: int) -> dict[str, Any]:
    found = {name: call(prepare()) for name, (prepare, call) in case.alternatives.items()}
    results = {name: result() if callable(result) else result for name, result in found.items()}
    first, *others = results
    times = interleaved(case.alternatives, repeats, 1)
    row: dict[str, Any] = {"what": case.what, "ours_ms": None}
    for name in ("ours", *RIVALS):
        spread = record.spread([1e3 * seconds for seconds in times[name]]) if name in times else {}
        row |= {f"{name}_ms": spread.get("median"), f"{name}_min": spread.get("min"), f"{name}_max": spread.get("max")}
    for rival in RIVALS:
        both = rival in times and "ours" in times
        ratios = [a / b for a, b in zip(times[rival], times["ours"], strict=True)] if both else []
        row[f"{rival}_over_ours"] = statistics.median(ratios) if ratios else None
        row[f"{rival}_same"] = _same(results[first], results[rival]) if case.same and rival in others else None
    return row


def measure(
    dims: Sequence[int], ids: Sequence[int], batch: int, rows: int, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Returns a row for each kind of work, dim, and number of ids in a bag."""
    found = []
    for dim, count in counted("operators: batches", list(itertools.product(dims, ids))):
        of_batch = _Batch(batch, count, dim, rows, seed)
        found += [{**_measure(case, repeats), "dim": dim, "ids": count} for case in of_batch.cases()]
    return found


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table; writes OUT/operators.json and .csv."""
    record.require_counts(arguments, "repeats", "batch_size", "rows")
    for dim in (*arguments.dims, *arguments.ids):
        require_int("dims and ids", dim, 1)
    torch.set_num_threads(1)
    sizes = arguments.batch_size, arguments.rows, arguments.repeats, arguments.seed
    rows = measure(arguments.dims, arguments.ids, *sizes)
    notes = NOTES.format(features=FEATURES, batch=arguments.batch_size, repeats=arguments.repeats).splitlines()
    shown = [record.table([{title: row[key] for key, title in COLUMNS.items()} for row in rows]), *notes]
    content = {"header": record.header(), "repeats": arguments.repeats, "notes": notes}
    return record.finish(arguments.out, "operators", content, rows, shown="\n".join(shown))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench operators`."""
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128], metavar="D", help="weights in a row")
    parser.add_argument("--ids", nargs="+", type=int, default=[1, 10], metavar="N", help="ids of a bag")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples (default 1024)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of each of {FEATURES} tables (default {ROWS:,})")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="interleaved blocks (default 15)")
    parser.add_argument("--seed", type=int, default=0, help="of ids and values")
    parser.add_argument("--out", type=Path, default=Path("build/operators"), metavar="DIR")
