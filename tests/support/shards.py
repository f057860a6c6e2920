"""Sharded tensors of state dicts, as tests look at them and change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor


def local(value: Any) -> list[Tensor]:
    """What this trainer has of a tensor."""
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def whole(value: Any) -> Tensor:
    """All of a tensor, on every trainer; every trainer calls it."""
    if not isinstance(value, ShardedTensor):
        return value.detach()
    mine = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    out = torch.full(tuple(value.size()), torch.nan, dtype=value.dtype)
    for offsets, tensor in (shard for part in parts for shard in part):
        out[tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))] = tensor
    return out


def all_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a state dict, however deep."""
    return {key: all_whole(value) if isinstance(value, Mapping) else _whole(value) for key, value in state.items()}


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) else value


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Another tensor, sharded in the same way."""
    if not isinstance(value, ShardedTensor):
        return change(value)
    made = value.clone()
    for tensor in local(made):
        tensor.copy_(change(tensor))
    return made
