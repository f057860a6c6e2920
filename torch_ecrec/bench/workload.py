"""The workload of the training benchmarks: a model of a given shape and its batches, the same for every system.

    embedding-heavy  26 tables x 200,000 rows x 64, one id per bag, Zipf 1.05, batch 1024, MLPs [64] / [64, 1]
    multi-hot        the same with 10 ids per bag
    paper            dim 128, batch 2048, MLPs [512, 256, 128] / [1024, 1024, 512, 256, 1], 100,000 rows per table
    uniform          embedding-heavy with uniform ids: no id repeats, the worst case for a parameter server
    criteo           real Criteo rows (or synthetic ones of the same form), dim 16, 20,000 rows per table
    sequence         histories of 50 items and their categories: a row for each id, Adam; batch 256

All but the last are a DLRM whose tables step by row-wise Adagrad; that of `sequence` weighs the rows of a history by
the dense features (`Histories`).

Batches are drawn before the clock runs and used in turn. Ids of a table follow Zipf's law over its rows, in an order
shuffled per table, so that hot rows are not neighbours. Where steps are without end (`Draws`), the ids of each are a
stretch, begun anywhere, of a pool drawn before: those that follow Zipf's law are scattered over the table, uniform ones
are shifted, so that none comes twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec
from torch_ecrec.demo import criteo
from torch_ecrec.runtime.checks import require_int

CPU = torch.device("cpu")
INTEGERS = 13
POOL = 32  # batches drawn per trainer, used in turn
POOL_BATCHES = {True: 512, False: 32}  # the pool of `Draws` is so many long, by whether ids follow Zipf's law
SCATTER = 2_654_435_761  # a prime: rank * SCATTER % rows is a permutation


@dataclass(frozen=True)
class Shape:
    """The sizes of a DLRM and of its input.

    Args:
        tables, rows, dim: of the embedding tables.
        ids: ids per bag.
        zipf: exponent of Zipf's law that ids follow; 0 for uniform.
        batch: samples per trainer and step.
        bottom, top: layer sizes of the MLPs before and after the interaction; the bottom one ends with `dim`.
        data: Criteo rows ("" for synthetic ones), or None for random ids.
        sequence: a row for each id, not one for each bag, and Adam.
    """

    tables: int = 26
    rows: int = 200_000
    dim: int = 64
    ids: int = 1
    zipf: float = 1.05
    batch: int = 1024
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 1)
    data: str | None = None
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("tables", "rows", "dim", "ids", "batch"):
            require_int(name, getattr(self, name), 1)


SHAPES = {
    "embedding-heavy": Shape(),
    "uniform": Shape(zipf=0.0),
    "multi-hot": Shape(ids=10),
    "paper": Shape(rows=100_000, dim=128, batch=2048, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1)),
    "criteo": Shape(rows=20_000, dim=16, bottom=(64, 16), top=(64, 32, 1), batch=512, data=""),
    "sequence": Shape(tables=2, rows=500_000, ids=50, batch=256, sequence=True),
}


def resized(shape: Shape, **changes: int | str | None) -> Shape:
    """Returns the shape with some sizes replaced, those that are not None. The bottom MLP follows `dim`."""
    known = {name: value for name, value in changes.items() if value is not None}
    if "dim" in known:
        known["bottom"] = (*shape.bottom[:-1], known["dim"])  # type: ignore[assignment]
    return dataclasses.replace(shape, **known)  # type: ignore[arg-type]


def features(shape: Shape) -> list[str]:
    return [f"C{i}" for i in range(shape.tables)]


class Histories(nn.Module):
    """A model that guesses from a history: its rows, weighted by their products with dense features, then an MLP.

    Args:
        rows: gives a `JaggedTensor` for each feature, `shape.ids` rows for each sample.
    """

    def __init__(self, rows: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.rows, self.shape = rows, shape
        self.bottom = MLP(INTEGERS, list(shape.bottom))
        self.top = nn.Sequential(
            MLP((shape.tables + 1) * shape.dim, list(shape.top[:-1])), nn.Linear(shape.top[-2], shape.top[-1])
        )

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        found, query_BD = self.rows(batch.sparse_features), self.bottom(batch.dense_features)
        parts = [query_BD]
        for name in features(self.shape):
            rows_BLD = found[name].values().view(-1, self.shape.ids, self.shape.dim)
            share_BL = torch.softmax(torch.einsum("bld,bd->bl", rows_BLD, query_BD), dim=1)
            parts.append(torch.einsum("bl,bld->bd", share_BL, rows_BLD))
        logits_B = self.top(torch.cat(parts, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach(), batch.labels)


class SparseRows(nn.Module):
    """Torch's own way to a row for each id: `nn.Embedding` with sparse gradients, a copy on every trainer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.names = features(shape)
        self.tables = nn.ModuleList(nn.Embedding(shape.rows, shape.dim, sparse=True) for _ in self.names)

    def forward(self, batch: torchrec.KeyedJaggedTensor) -> dict[str, torchrec.JaggedTensor]:
        found = batch.to_dict()
        return {
            name: torchrec.JaggedTensor(table(found[name].values()), lengths=found[name].lengths())
            for name, table in zip(self.names, self.tables, strict=True)
        }


def build(shape: Shape, seed: int) -> nn.Module:
    """Returns the model, with tables on the meta device and their optimizer in their backward."""
    names, meta = features(shape), torch.device("meta")
    same = {"embedding_dim": shape.dim, "num_embeddings": shape.rows}
    if shape.sequence:
        rows = torchrec.EmbeddingCollection(
            tables=[torchrec.EmbeddingConfig(name=f"table_{name}", feature_names=[name], **same) for name in names],
            device=meta,
        )
        apply_optimizer_in_backward(torch.optim.Adam, rows.parameters(), {"lr": 0.001})
        torch.manual_seed(seed)
        return Histories(rows, shape)
    bags = torchrec.EmbeddingBagCollection(
        tables=[torchrec.EmbeddingBagConfig(name=f"table_{name}", feature_names=[name], **same) for name in names],
        device=meta,
    )
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.02})
    torch.manual_seed(seed)
    model: nn.Module = DLRMTrain(DLRM(bags, INTEGERS, list(shape.bottom), list(shape.top)))
    return model


def distributed(shape: Shape, backend: str, seed: int, device: torch.device = CPU, kernel: str = "fused") -> nn.Module:
    """Returns the model on all trainers.

    Args:
        backend: "ecrec": tables on our servers; "torchrec": in TorchRec's own trainers; "torch": a copy on each, in
            `DistributedDataParallel`.
        device: of the dense part; of the tables, too, for "torchrec".
        kernel: for "torchrec", how FBGEMM holds the tables, as in `torchrec_plan`.
    """
    if backend == "torch":
        torch.manual_seed(seed)
        return nn.parallel.DistributedDataParallel(Histories(SparseRows(shape), shape))
    model = build(shape, seed)
    if backend == "ecrec":
        return torch_ecrec.DistributedModelParallel(model, device=device, seed=seed)
    plan = torchrec_plan(model, dist.get_world_size(), device, kernel)
    return torchrec.distributed.DistributedModelParallel(model, device=device, plan=plan)  # type: ignore[no-any-return]


def optimizers(model: nn.Module) -> list[Optimizer]:
    """Returns the optimizers to step after the backward: the dense part's first, then the tables', if it has one."""
    sparse = [value for part in model.modules() if isinstance(part, SparseRows) for value in part.parameters()]
    known = {id(value) for value in sparse}
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    found: list[Optimizer] = [torch.optim.Adagrad([v for v in dense.values() if id(v) not in known], lr=0.02)]
    return [*found, torch.optim.SparseAdam(sparse, lr=0.001)] if sparse else found


def torchrec_plan(model: nn.Module, trainers: int, device: torch.device = CPU, kernel: str = "fused") -> ShardingPlan:
    """Returns a table-wise plan that deals tables out in turn. TorchRec's would make small ones data-parallel.

    Args:
        model: has one `EmbeddingBagCollection`.
        trainers: the number of trainers.
        device: of the tables.
        kernel: one of TorchRec's `EmbeddingComputeKernel`: "fused", in the memory of the device; on a GPU also
            "fused_uvm", in the host's memory, which the GPU reads, or "fused_uvm_caching", with a cache on the GPU.
    """
    path, collection = next((p, m) for p, m in model.named_modules() if isinstance(m, torchrec.EmbeddingBagCollection))
    configs = collection.embedding_bag_configs()
    ranks = {one.name: table_wise(rank=i % trainers, compute_kernel=kernel) for i, one in enumerate(configs)}
    entries = construct_module_sharding_plan(
        collection,
        ranks,
        EmbeddingBagCollectionSharder(),
        local_size=trainers,
        world_size=trainers,
        device_type=device.type,
    )
    return ShardingPlan({path: entries})


def require_fbgemm_cuda() -> None:
    """Raises ValueError unless FBGEMM's operators run on a GPU, as those of TorchRec's tables must. Needs a GPU."""
    try:
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int32, device="cuda"))
    except NotImplementedError as error:
        raise ValueError(
            "TorchRec's tables on a GPU need FBGEMM's CUDA build, fbgemm-gpu; here is a CPU build, fbgemm-gpu-cpu"
        ) from error


def zipf_ranks(rng: np.random.Generator, count: int, rows: int, exponent: float) -> Any:
    """Draws ranks 0..rows-1 with probability proportional to (rank + 1)^-exponent; uniform for exponent 0."""
    if exponent == 0:
        return rng.integers(0, rows, count)
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(weights, rng.random(count) * weights[-1])


def batches(shape: Shape, trainer: int, trainers: int, seed: int, count: int = POOL) -> list[Batch]:
    """Returns the pool of `count` batches of one trainer."""
    names = features(shape)
    pool = []
    if shape.data is not None:
        lines = count * trainers * shape.batch
        clicks = criteo.read(Path(shape.data), shape.rows) if shape.data else criteo.synthetic(lines, seed, shape.rows)
        for i in range(count):
            first = (i * trainers + trainer) * shape.batch
            some = clicks[(first + np.arange(shape.batch)) % len(clicks)]
            ids = torch.from_numpy(some.categories.astype(np.int64)).t().reshape(-1)
            lengths = torch.ones(len(ids), dtype=torch.int32)
            sparse = torchrec.KeyedJaggedTensor.from_lengths_sync(names, ids, lengths)
            pool.append(Batch(torch.from_numpy(some.dense), sparse, torch.from_numpy(some.labels)))
        return pool
    order = np.stack([np.random.default_rng([seed, t]).permutation(shape.rows) for t in range(shape.tables)])
    rng = np.random.default_rng([seed, 1_000_003, trainer])
    per_table = shape.batch * shape.ids
    lengths = torch.full((shape.tables * shape.batch,), shape.ids, dtype=torch.int32)
    for _ in range(count):
        ranks = zipf_ranks(rng, shape.tables * per_table, shape.rows, shape.zipf).reshape(shape.tables, per_table)
        ids = torch.from_numpy(np.take_along_axis(order, ranks, axis=1).reshape(-1))
        dense = torch.from_numpy(rng.standard_normal((shape.batch, INTEGERS), dtype=np.float32))
        labels = torch.from_numpy(rng.integers(0, 2, shape.batch).astype(np.float32))
        pool.append(Batch(dense, torchrec.KeyedJaggedTensor.from_lengths_sync(names, ids, lengths), labels))
    return pool


class Draws:
    """Draws batches of one trainer, without end: one id per bag; dense features and labels are always the same.

    Args:
        shape: of the model; one with an id per bag.
        trainer, seed: draws differ with either.
    """

    def __init__(self, shape: Shape, trainer: int, seed: int) -> None:
        self._shape, self._seeds, self._names = shape, [seed, trainer], features(shape)
        rng = np.random.default_rng(self._seeds)
        self._count = shape.tables * shape.batch
        ranks = zipf_ranks(rng, POOL_BATCHES[shape.zipf > 0] * self._count, shape.rows, shape.zipf)
        self._pool = (ranks * SCATTER % shape.rows if shape.zipf > 0 else ranks).astype(np.int32)
        self._lengths = torch.ones(self._count, dtype=torch.int32)
        self._dense = torch.from_numpy(rng.standard_normal((shape.batch, INTEGERS), dtype=np.float32))
        self._labels = torch.from_numpy(rng.integers(0, 2, shape.batch).astype(np.float32))

    def __call__(self, number: int) -> Batch:
        """Returns the batch of that number, from 0."""
        rng, rows = np.random.default_rng([*self._seeds, number]), self._shape.rows
        first = int(rng.integers(0, len(self._pool) - self._count + 1))
        shift = 0 if self._shape.zipf > 0 else int(rng.integers(0, rows))
        ids = torch.from_numpy((self._pool[first : first + self._count].astype(np.int64) + shift) % rows)
        return Batch(
            self._dense, torchrec.KeyedJaggedTensor.from_lengths_sync(self._names, ids, self._lengths), self._labels
        )


class Reader:
    """Iterates batches by number, for ever, and keeps its place. `draw`: gives the batch of a number, from 0."""

    def __init__(self, draw: Callable[[int], Batch]) -> None:
        self.draw, self.drawn = draw, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.drawn += 1
            yield self.draw(self.drawn - 1)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]
