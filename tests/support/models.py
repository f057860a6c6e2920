"""Small models of TorchRec, their batches and oracles, and how they are trained in one process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torchrec.distributed
from fake_session import FakeSession
from shards import whole
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import all_table_specs, job_names
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.state_dicts.kinds import COLLECTIONS

warnings.filterwarnings("ignore", category=DeprecationWarning)
CPU, META = torch.device("cpu"), torch.device("meta")
OPTIMIZERS: dict[str, type] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}
LR, EPS = 0.05, 1e-8
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


class Net(nn.Module):
    """One or more collections and a dense layer. The loss is a mean over the batch."""

    def __init__(self, *collections: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        width = sum(c.embedding_dim * len(c.feature_names) for e in collections for c in e.embedding_bag_configs())
        self.keys = [
            sorted(name for names in get_embedding_names_by_table(e.embedding_bag_configs()) for name in names)
            for e in collections
        ]
        self.over = nn.Linear(width, 1, dtype=torch.float32)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = [collection(batch.sparse_features) for collection in self.collections]
        pooled = torch.cat([o[key] for o, keys in zip(outputs, self.keys, strict=True) for key in keys], dim=1)
        logits = torch.tanh(self.over(pooled)).squeeze(1) + batch.dense_features.sum(dim=1)
        return nn.functional.mse_loss(logits, batch.labels), logits


def table(
    name: str, rows: int, dim: int, *features: str, pooling: PoolingType = SUM, **more: Any
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), pooling=pooling, **more
    )


def tables() -> list[EmbeddingBagConfig]:
    """Two dims, two features in a table, a feature in two tables, both poolings, another order than the batch's."""
    return [
        table("wide", 50, 8, "f2", "f0"),
        table("small", 20, 4, "f1", pooling=MEAN),
        table("shared", 30, 8, "f1", pooling=MEAN),
        table("last", 7, 4, "f3"),
    ]


FEATURES = ["f0", "f1", "f2", "f3"]


def batch_of(size: int, seed: int, most: int = 3, weighted: bool = False, rows: int = 7) -> Batch:
    """Bags of 0 to `most` ids below `rows`, with repetitions."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES) * size,), generator=random, dtype=torch.int32)
    count = int(lengths.sum())
    values = torch.randint(0, rows, (count,), generator=random)
    weights = torch.rand(count, generator=random, dtype=torch.float32) if weighted else None
    sparse = KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths, weights)
    dense = torch.randn(size, 2, generator=random, dtype=torch.float32)
    return Batch(dense, sparse, torch.randn(size, generator=random, dtype=torch.float32))


def collection(
    kind: str = "sgd", configs: list[EmbeddingBagConfig] | None = None, device: torch.device = CPU, **more: Any
):
    torch.manual_seed(0)
    made = EmbeddingBagCollection(tables=configs or tables(), device=device, **more)
    arguments = {"lr": LR} if kind == "sgd" else {"lr": LR, "eps": EPS}
    apply_optimizer_in_backward(OPTIMIZERS[kind], made.parameters(), arguments)
    return made


def job_of(module: nn.Module, trainers: int = 1, seed: int = 0, sharders: Any = (), plan: Any = None) -> JobSpec:
    collections = {p: m for p, m in module.named_modules() if type(m) in COLLECTIONS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables without an optimizer, which the model tells again
        specs = all_table_specs(module, collections, job_names(collections), sharders or (), plan)
    return JobSpec(tables=specs, code=CodeSpec(), trainers=trainers, seed=seed)


def shard(
    module: nn.Module, trainers: int = 1, trainer: int = 0, device: torch.device = CPU, **more: Any
) -> tuple[Any, FakeSession]:
    session = FakeSession(job_of(module, trainers, sharders=more.get("sharders")), trainer)
    return DistributedModelParallel(module, device=device, session=session, **more), session


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(in_backward_optimizer_filter(model.named_parameters()))


class Oracle:
    """The same collection in one process, its rows updated by dense torch optimizers."""

    def __init__(self, original: EmbeddingBagCollection, kind: str) -> None:
        self.module = EmbeddingBagCollection(
            tables=original.embedding_bag_configs(), device=CPU, is_weighted=original.is_weighted()
        )
        self.module.load_state_dict(original.state_dict())
        arguments = {} if kind == "sgd" else {"eps": EPS}
        self.optimizer = OPTIMIZERS[kind](self.module.parameters(), lr=LR, **arguments)


# through TorchRec's machinery -------------------------------------------------------------------------


def optimizer_of(model: nn.Module) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adagrad(p, lr=LR))
    return CombinedOptimizer([model.fused_optimizer, dense])


def train(model: nn.Module, batches: list[Batch], optimizer: CombinedOptimizer | None = None) -> list[float]:
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_in_pipeline(model: nn.Module, batches: list[Batch], device: torch.device = CPU) -> list[float]:
    """As `train`, in TorchRec's pipeline, which takes the batches to the device."""
    runner, stream = TrainPipelineSparseDist(model, optimizer_of(model), device), iter(batches)
    return [float(runner.progress(stream)) for _ in batches]


class LossNet(Net):
    """A pipeline returns the second of (loss, output)."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(batch)
        return loss, loss.detach()


def seeded(weight: Tensor, seed: int) -> None:
    with torch.no_grad():
        weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) - 0.5)


def seeded_tables() -> list[EmbeddingBagConfig]:
    configs = tables()
    for i, config in enumerate(configs):
        config.init_fn = functools.partial(seeded, seed=i)
    return configs


def plain_torchrec(module: nn.Module, trainers: int, fused_params: dict[str, Any] | None = None) -> nn.Module:
    plans, sharder = {}, EmbeddingBagCollectionSharder(fused_params=fused_params)
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingBagCollection):
            ranks = {
                c.name: table_wise(rank=i % trainers, compute_kernel="fused")
                for i, c in enumerate(child.embedding_bag_configs())
            }
            plans[path] = construct_module_sharding_plan(child, ranks, sharder, device_type="cpu")
    more = {} if fused_params is None else {"sharders": [sharder]}
    return torchrec.distributed.DistributedModelParallel(module, device=CPU, plan=ShardingPlan(plans), **more)


def compare_shards(ours: Tensor, theirs: Any) -> None:
    """What theirs has here, with all of ours. Every trainer calls it."""
    ours = whole(ours)
    if isinstance(theirs, Tensor) and not hasattr(theirs, "local_shards"):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        return
    assert tuple(theirs.size()) == tuple(ours.shape)
    for piece in theirs.local_shards():
        begin = piece.metadata.shard_offsets[0]
        torch.testing.assert_close(ours[begin : begin + len(piece.tensor)], piece.tensor, rtol=1e-4, atol=1e-6)


def repeated_batch(
    keys: list[str], samples: int, seed: int, most: int = 3, weighted: bool = False, rows: int = 7
) -> KeyedJaggedTensor:
    """Features with batch sizes of their own, fewer bags than samples, some of which nobody has."""
    random = torch.Generator().manual_seed(seed)
    strides = [int(torch.randint(1, samples + 1, (), generator=random)) for _ in keys]
    lengths = torch.randint(0, most + 1, (sum(strides),), generator=random)
    count = int(lengths.sum())
    names = keys[::-1]  # one order for all batches, or TorchRec mixes them up
    index = torch.stack([torch.randint(0, strides[keys.index(name)], (samples,), generator=random) for name in names])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, rows, (count,), generator=random),
        lengths=lengths,
        weights=torch.rand(count, generator=random, dtype=torch.float32) if weighted else None,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(names, index),
    )
