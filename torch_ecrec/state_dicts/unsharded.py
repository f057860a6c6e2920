"""Reads served modules before they are sharded: their tables, and where the weights are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)

from torch_ecrec.compat.torchrec import COLLECTION
from torch_ecrec.runtime.checks import plain_copy
from torch_ecrec.state_dicts.kinds import KINDS, Collection

_WEIGHTS = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_NOT_SERVED = (
    "use_virtual_table",
    "enable_embedding_update",
    "stash_weights",
    "pruning_indices_remapping",
    "input_dim",
)


def folder_of(module: Collection) -> str:
    """Returns the name that a collection gives its tables' module. Weights are saved as <folder>.<table>.weight."""
    return KINDS[type(module)].folder


def own_optimizer(module: Collection) -> Mapping[str, Any] | None:
    """Returns the optimizer that a fused collection was made with, as `fused_params`; None for other collections."""
    if not KINDS[type(module)].fused:
        return None
    assert isinstance(module, (FusedEmbeddingBagCollection, FusedEmbeddingCollection))
    converted = convert_optimizer_type_and_kwargs(module.optimizer_type(), module.optimizer_kwargs())
    assert converted is not None  # its constructor refuses what this does not know
    kind, arguments = converted
    return {"optimizer": kind, **arguments}


def inside_of(path: str) -> str:
    """Returns the path of the collection inside a module with managed collisions."""
    return f"{path}.{COLLECTION}" if path else COLLECTION


def configs_of(module: Collection) -> Sequence[BaseEmbeddingConfig]:
    """Returns the configs of its tables in order. Numbers of NumPy or torch (`ids.max() + 1`) become Python's."""
    bags = isinstance(module, (EmbeddingBagCollection, FusedEmbeddingBagCollection))
    given = module.embedding_bag_configs() if bags else module.embedding_configs()
    return [_plain_config(config) for config in given]


def _plain_config(config: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
    """Returns the config itself, or a copy if something in it is not of Python's own types."""
    made = plain_copy(config, [field.name for field in dataclasses.fields(config)])
    if made is not config and is_default(config):  # with bounds that were made of the rows as they were given
        made.init_fn = None
        made.__post_init__()
    return made


def weight_of(module: Collection, table: str) -> nn.Parameter:
    """Returns a table's weights (rows, D), on any device, meta included."""
    weight: nn.Parameter = getattr(module, folder_of(module))[table].weight
    return weight


def weights_of(config: BaseEmbeddingConfig) -> str:
    """Returns the dtype in which the servers keep a table's weights. `check_config` must have passed it."""
    return _WEIGHTS[config.data_type]


def pooling_of(config: BaseEmbeddingConfig) -> PoolingType:
    """Returns the pooling of a table. `NONE`: each id's row is returned as it is."""
    return config.pooling if isinstance(config, EmbeddingBagConfig) else PoolingType.NONE


def is_default(config: BaseEmbeddingConfig) -> bool:
    """Returns whether `init_fn` is the uniform initialisation that TorchRec's configs fill in."""
    fn: Any = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    return isinstance(fn, functools.partial) and fn.func is nn.init.uniform_ and not fn.args and fn.keywords == bounds


def draw_weights(config: BaseEmbeddingConfig, weights: Tensor) -> Tensor:
    """Draws initial weights (N, D) as a table's config says, with the global generator, into `weights`."""
    if config.init_fn is None:
        return weights.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
    with torch.no_grad():
        drawn = config.init_fn(weights)
    return weights if drawn is None else drawn


def check_config(config: BaseEmbeddingConfig) -> None:
    """Refuses a table that the servers cannot hold.

    Raises:
        ValueError: names the table and what it wants.
    """
    if config.data_type not in _WEIGHTS:
        supported = ", ".join(data_type.name for data_type in _WEIGHTS)
        raise ValueError(
            f"table {config.name}: data type {config.data_type} is not supported; supported are {supported}"
        )
    if isinstance(config, EmbeddingBagConfig) and config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"table {config.name}: pooling {config.pooling} is not supported; supported are SUM and MEAN")
    for name in _NOT_SERVED:
        if (value := getattr(config, name, None)) not in (None, False):
            raise ValueError(f"table {config.name}: `{name}`={value!r} is not supported; leave it out")
