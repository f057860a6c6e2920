"""What is read of the modules that are served, before they are sharded: their tables, and where the weights are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection
COLLECTIONS: tuple[type[nn.Module], ...] = (EmbeddingBagCollection, EmbeddingCollection)
FOLDERS = {EmbeddingBagCollection: "embedding_bags", EmbeddingCollection: "embeddings"}
"""What a collection calls the module of its tables; their weights are saved as <folder>.<table>.weight."""

_NOT_SERVED = (
    "use_virtual_table",
    "enable_embedding_update",
    "stash_weights",
    "pruning_indices_remapping",
    "input_dim",
)


def configs_of(module: Collection) -> Sequence[BaseEmbeddingConfig]:
    """Its tables, in their order."""
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs()


def weight_of(module: Collection, table: str) -> nn.Parameter:
    """(rows, D) on any device, meta included."""
    tables = module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings
    weight: nn.Parameter = tables[table].weight
    return weight


def pooling_of(config: BaseEmbeddingConfig) -> PoolingType:
    """`NONE`: each id's row is handed out as it is."""
    return config.pooling if isinstance(config, EmbeddingBagConfig) else PoolingType.NONE


def is_default(config: BaseEmbeddingConfig) -> bool:
    """Whether `init_fn` is the uniform one that TorchRec's configs fill in."""
    fn: Any = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    return isinstance(fn, functools.partial) and fn.func is nn.init.uniform_ and not fn.args and fn.keywords == bounds


def check_config(config: BaseEmbeddingConfig) -> None:
    """Refuses a table that the servers cannot hold.

    Raises:
        ValueError: names the table and what it wants.
    """
    if config.data_type is not DataType.FP32:
        raise ValueError(f"table {config.name}: data type {config.data_type} is not supported; supported is FP32")
    if isinstance(config, EmbeddingBagConfig) and config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"table {config.name}: pooling {config.pooling} is not supported; supported are SUM and MEAN")
    for name in _NOT_SERVED:
        if (value := getattr(config, name, None)) not in (None, False):
            raise ValueError(f"table {config.name}: `{name}`={value!r} is not supported; leave it out")
