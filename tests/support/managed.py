"""Models with managed collisions, their batches, and TorchRec's own sharding of them in one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torchrec.distributed
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from models import CPU, LR, OPTIMIZERS, SUM
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

POLICIES: dict[str, Any] = {
    "lfu": LFU_EvictionPolicy,
    "lru": functools.partial(LRU_EvictionPolicy, decay_exponent=1.5),
    "distance": DistanceLFU_EvictionPolicy,
    "filtered": functools.partial(DistanceLFU_EvictionPolicy, threshold_filtering_func=average_threshold_filter),
}
SIZES = {"a": 12, "b": 8}  # rows of each table: far fewer than ids
FEATURES = {"a": ["f2", "f0"], "b": ["f1"]}  # another order than the batch's
FOLDER = {"bags": "embedding_bags", "sequences": "embeddings"}
NAMES = ["f0", "f1", "f2"]


def hashed(ids: Tensor, size: int) -> Tensor:
    return (ids * 2654435761 + 17) % size


class Net(nn.Module):
    """Draws at random (dropout), so that a random state that is not put back is seen."""

    def __init__(self, kind: str, policy: str, form: str, interval: int = 2, device: torch.device = CPU) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig if form == "bags" else EmbeddingConfig
        more = {"pooling": SUM} if form == "bags" else {}
        configs = [
            config(name=name, num_embeddings=rows, embedding_dim=4, feature_names=FEATURES[name], **more)
            for name, rows in SIZES.items()
        ]
        tables: Any = (EmbeddingBagCollection if form == "bags" else EmbeddingCollection)(tables=configs, device=device)
        arguments = {"lr": LR} if kind == "sgd" else {"lr": LR, "eps": 1e-8}
        apply_optimizer_in_backward(OPTIMIZERS[kind], tables.parameters(), arguments)
        maps = {
            name: MCHManagedCollisionModule(
                rows,
                device,
                eviction_policy=POLICIES[policy](),
                eviction_interval=interval,
                input_hash_size=1000,
                input_hash_func=hashed if name == "b" else None,
            )
            for name, rows in SIZES.items()
        }
        around = ManagedCollisionEmbeddingBagCollection if form == "bags" else ManagedCollisionEmbeddingCollection
        collected = ManagedCollisionCollection(maps, configs)
        self.managed = around(tables, collected, return_remapped_features=True, allow_in_place_embed_weight_update=True)
        self.form = form
        self.over = nn.Linear(12 if form == "bags" else 4, 1, dtype=torch.float32)
        self.dropped = nn.Dropout(0.1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found, remapped = self.managed(batch.sparse_features)
        if self.form == "bags":
            loss = (self.over(found.values()).squeeze(1) - batch.labels).square().mean()
        else:
            rows = torch.cat([found[name].values() for name in NAMES])
            loss = self.over(rows).square().sum() / len(batch.labels)
        return loss, remapped


def batch_of(size: int, seed: int, most: int = 3) -> Batch:
    """Ids below 60, the lower the more often, and more of the later ones as `seed` grows."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(NAMES) * size,), generator=random, dtype=torch.int32)
    values = (torch.rand(int(lengths.sum()), generator=random, dtype=torch.float32).square() * 60).long() + seed * 3
    sparse = KeyedJaggedTensor.from_lengths_sync(NAMES, values, lengths)
    labels = torch.randn(size, generator=random, dtype=torch.float32)
    return Batch(torch.zeros(size, 1, dtype=torch.float32), sparse, labels)


def together(batches: list[Batch]) -> Batch:
    """One batch: the samples of the first, then those of the second, and so on."""
    values, lengths = [], []
    for name in NAMES:
        for batch in batches:
            values.append(batch.sparse_features[name].values())
            lengths.append(batch.sparse_features[name].lengths())
    sparse = KeyedJaggedTensor.from_lengths_sync(NAMES, torch.cat(values), torch.cat(lengths))
    return Batch(torch.cat([b.dense_features for b in batches]), sparse, torch.cat([b.labels for b in batches]))


def stock(net: Net, env: ShardingEnv | None = None) -> Any:
    """TorchRec's own, in this process alone: its managed collisions are sharded by rows only."""
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder()
        if net.form == "bags"
        else ManagedCollisionEmbeddingCollectionSharder()
    )
    ways = {name: row_wise() for name in SIZES}
    entry = construct_module_sharding_plan(net.managed, ways, sharder, local_size=1, world_size=1, device_type="cpu")
    return torchrec.distributed.DistributedModelParallel(
        net, env=env, device=CPU, plan=ShardingPlan({"managed": entry}), sharders=[sharder]
    )


def reset_on_a_cpu() -> Any:
    """FBGEMM has its kernel that resets weights and momentum on a GPU only: what it does there, in torch."""

    def reset(
        tbe: Any,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        if tbe.optimizer.name != "EXACT_ROWWISE_ADAGRAD":
            return
        for i, table in enumerate(logical_table_ids.tolist()):
            rows = pruned_indices[pruned_indices_offsets[i] : pruned_indices_offsets[i + 1]]
            tbe.split_embedding_weights()[table][rows] = 0
            tbe.split_optimizer_states()[table][0][rows] = 0

    return mock.patch.object(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", reset)


def whole(value: Any) -> Tensor:
    """Of TorchRec's, in one process."""
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
