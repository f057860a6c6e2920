"""Names of torch and TorchRec that they promise nobody: all that we import of them, in one place.

A name is private here if it, or a module that it comes from, begins with an underscore. Another release may move it or
give it another meaning; `tests/unit/test_compat.py` says of each what we need of it, and so what to look at first when
the pinned set moves. What only one class of theirs has (an attribute that we read, a method that we override) stands
where it is used. `transport/rpc.py` has those of `torch.distributed.rpc`, which nobody else knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata as ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec as EnumerableShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element as set_element
from torch.distributed.checkpoint.planner_helpers import _chunk_for_shard as chunk_of_shard
from torch.distributed.checkpoint.planner_helpers import _create_chunk_from_tensor as chunk_of_tensor
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_shard as write_item_of_shard
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor as write_item_of_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._pytree import tree_leaves as tree_leaves
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import stats

__all__ = [
    "EnumerableShardingSpec",
    "FakeTensorMode",
    "IncompatibleKeys",
    "NoTorchFunction",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "backward_pass",
    "chunk_of_shard",
    "chunk_of_tensor",
    "flatten_state_dict",
    "group_of",
    "local_shape_and_offset",
    "plain_torch_function",
    "queue_callback",
    "set_element",
    "sharded_names",
    "sharded_of",
    "short_name",
    "tensor_without_memory",
    "tree_leaves",
    "write_item_of_shard",
    "write_item_of_tensor",
]

T = TypeVar("T", bound=Tensor)

NoTorchFunction = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not asked."""

plain_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass whose results are plain tensors."""


def tensor_without_memory(cls: type[T], shape: torch.Size, dtype: torch.dtype) -> T:
    """A tensor of a subclass that says what it is, and has no values."""
    made: T = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
    return made


def backward_pass() -> int:
    """Which backward pass this thread is in: another number for each; -1 outside."""
    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Inside a backward pass: has autograd call it at its end, after those that were queued before."""
    Variable._execution_engine.queue_callback(callback)


def sharded_of(shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> Tensor:
    """A `ShardedTensor` of what this process has of it and what it is as a whole; no process asks another."""
    made: Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        list(shards), metadata, process_group=group
    )
    return made


def group_of(sharded: Any) -> dist.ProcessGroup:
    """The processes that share a `ShardedTensor`."""
    found: dist.ProcessGroup = sharded._process_group
    return found


def sharded_names(model: nn.Module) -> set[str]:
    """Parameters of a model that TorchRec's `DistributedModelParallel` takes for sharded, by name."""
    return set(DistributedModelParallel._sharded_parameter_names(model))


@contextlib.contextmanager
def short_name(kind: str, name: str) -> Iterator[None]:
    """Within, TorchRec's report of a plan knows the short name of one more sharding type."""
    theirs = stats._get_sharding_type_abbr
    stats._get_sharding_type_abbr = lambda one: name if one == kind else theirs(one)
    try:
        yield
    finally:
        stats._get_sharding_type_abbr = theirs
