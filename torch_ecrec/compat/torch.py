"""The private names of torch (those of torch.distributed.rpc are in rpc.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves as tree_leaves

__all__ = [
    "DCP_PICKLES",
    "STEP_HOOKS",
    "VERSION",
    "EnumerableShardingSpec",
    "FakeTensorMode",
    "IncompatibleKeys",
    "NoTorchFunction",
    "OwnState",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "attached_arguments",
    "attached_optimizers",
    "backward_pass",
    "children_of",
    "chunk_of_shard",
    "chunk_of_tensor",
    "communication_hooks",
    "compile_settings",
    "copy_attached",
    "dynamic_of",
    "flatten_state_dict",
    "frames_compiled",
    "group_of",
    "group_with",
    "has_state_dict_hooks",
    "has_tensor_hooks",
    "is_scheduled",
    "is_torchs_own",
    "is_transformed",
    "local_shape_and_offset",
    "module_hooks",
    "next_index_of",
    "nnpack_enabled",
    "own_buffers",
    "own_parameters",
    "place_in_file",
    "plain_torch_function",
    "queue_callback",
    "set_element",
    "set_next_index",
    "sharded_of",
    "tensor_without_memory",
    "timeout_of",
    "transient_buffers",
    "tree_leaves",
    "version_of",
    "write_item_of_shard",
    "write_item_of_tensor",
]

T = TypeVar("T", bound=Tensor)

NoTorchFunction = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not asked."""

plain_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass whose results are plain tensors."""


def tensor_without_memory(cls: type[T], shape: torch.Size, dtype: torch.dtype) -> T:
    """Makes a tensor of a subclass that has a shape and a dtype, and no values."""
    made: T = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
    return made


def backward_pass() -> int:
    """Returns the number of the backward pass that this thread is in, different for each; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Makes autograd call this at the end of the backward pass under way, after those queued before."""
    Variable._execution_engine.queue_callback(callback)


def sharded_of(shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> Tensor:
    """Makes a `ShardedTensor` from this process's shards and the description of the whole, without communication."""
    made: Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        list(shards), metadata, process_group=group
    )
    return made


def group_of(sharded: Any) -> dist.ProcessGroup:
    """Returns the process group that shares a `ShardedTensor`."""
    found: dist.ProcessGroup = sharded._process_group
    return found


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Returns how long a collective call in a group (None: the default one) may take, as `init_process_group` was told;
    None if that is not known. No public name says it, and `new_group` gives another group torch's default."""
    found: list[timedelta] = []
    asked: Any = dist.group.WORLD if group is None else group
    for device in getattr(asked, "_device_types", ()):
        try:
            options = getattr(asked._get_backend(device), "options", None)  # Gloo's and NCCL's have some
        except RuntimeError:  # no backend of this group is for that device
            continue
        if isinstance(limit := getattr(options, "_timeout", None), timedelta):
            found.append(limit)
    return max(found, default=None)


def group_with(
    ranks: Sequence[int], backend: str | None = None, alone: bool = False, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Makes a group of some trainers, of which this process is one; each of them calls it.

    `new_group` is public. From torch 2.14 on its declared type is that of a private number, too, which it gives who is
    not in the group.

    Args:
        ranks: of the trainers, in the default group.
        backend: None: that of the default group.
        alone: only these trainers call it; else all of the default group do.
        timeout: None: torch's default for the backend.
    """
    made: Any = dist.new_group(ranks, timeout, backend, use_local_synchronization=alone)
    found: dist.ProcessGroup = made
    return found


def is_transformed() -> bool:
    """Returns whether this thread is within a transform of `torch.func`, whose tensors have no memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


nnpack_enabled: Callable[[], bool] = torch._C._get_nnpack_enabled
"""Returns whether convolutions may use NNPACK. Publicly `torch.backends.nnpack.set_flags` says it, and changes it."""


# tensors --------------------------------------------------------------------------------------------

VERSION = "_version"
"""Attribute of a tensor: the number of writes in place so far. torch's notes on autograd describe it; no other name."""


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor, or another one with its memory, was written to in place so far (`VERSION`)."""
    return tensor._version


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Returns whether a tensor has hooks for its gradient, of either kind. No public name lists them.

    `_post_accumulate_grad_hooks` is there since torch 2.1.
    """
    return any(getattr(tensor, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def place_in_file(fake: Tensor) -> int | None:
    """Returns the byte offset of a tensor's memory in a file of `torch.save`, read under `FakeTensorMode`.

    None: the file does not have it as it is. There is no public way to read a part of a file without its tensors.
    """
    found: int | None = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
    return found


# modules --------------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the dict of a module's own parameters, by attribute. Parameters may be put into it.

    `named_parameters(recurse=False)` may be another one of a subclass (TorchRec's leaves some out), leaves out what has
    a second name, and cannot be written to.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dict of a module's own buffers, by attribute. `named_buffers` differs as `named_parameters` does."""
    return module._buffers


def transient_buffers(module: nn.Module) -> set[str]:
    """Returns the names of a module's buffers that are in no state dict (`persistent=False`)."""
    return module._non_persistent_buffers_set


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns a module's children, by attribute. `named_children` omits the second name of one that has two."""
    return module._modules


def module_hooks(module: nn.Module) -> list[str]:
    """Returns the kinds of hooks that a module has, under torch's names. No public name lists hooks.

    `_backward_pre_hooks` is there since torch 2.0.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [kind for kind in kinds if getattr(module, kind)]


class OwnState(nn.Module):
    """A module with state outside of parameters. It stays as it is when the model is moved or gets another dtype.

    `state_dict`, `load_state_dict` and `to` of the model around it ask only these private methods of a module within.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> OwnState:
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.save_state(destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():  # torch's own method calls them, too
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.load_state(state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def save_state(self, destination: dict[str, Any], prefix: str) -> None:
        """Puts the state into `destination`, under names that begin with `prefix`."""
        raise NotImplementedError

    def load_state(
        self,
        state: Mapping[str, Any],
        prefix: str,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Loads the state under names that begin with `prefix`, and adds names and errors to the lists."""
        raise NotImplementedError


def communication_hooks(parallel: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Returns the hooks that sum gradients (`register_comm_hook`), with their states. No public name lists them."""
    return list(parallel._comm_hooks)


# optimizers -----------------------------------------------------------------------------------------

STEP_HOOKS = "_optimizer_step_post_hooks"
"""Attribute of an optimizer whose `Optimizer.__init__` was called, without which `register_step_post_hook` fails."""


def is_torchs_own(attribute: str) -> bool:
    """Returns whether torch itself gives optimizers an attribute of this name: for hooks, schedulers, scalers."""
    known = {"defaults", "state", "param_groups", "step", "_opt_called", "_step_count", "grad_scale", "found_inf"}
    return attribute in known or attribute.startswith("_optimizer_")


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Returns whether hooks add to an optimizer's `state_dict()`. No public name lists them."""
    return bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))


def is_scheduled(optimizer: Optimizer) -> bool:
    """Returns whether a learning rate scheduler was made for an optimizer: only a mark on `step` shows it."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def attached_optimizers(parameter: Tensor) -> list[tuple[type, Mapping[str, Any]]]:
    """Returns the optimizers that `apply_optimizer_in_backward` attached, as classes with arguments.

    Both write `_optimizer_classes` and `_optimizer_kwargs`, where TorchRec's sharded modules find them; there is no
    public way to ask.
    """
    classes, arguments = getattr(parameter, "_optimizer_classes", ()), getattr(parameter, "_optimizer_kwargs", ())
    return list(zip(classes, arguments, strict=False))  # a script that takes an optimizer off may leave its arguments


def attached_arguments(parameter: Tensor) -> Mapping[str, Any]:
    """Returns the arguments of the first attached optimizer. TorchRec reads them even if its class was removed."""
    found: Mapping[str, Any] = next(iter(getattr(parameter, "_optimizer_kwargs", ())), {})
    return found


def copy_attached(given: Tensor, to: Tensor) -> None:
    """Attaches the optimizers of one parameter to another, with copied arguments, so that TorchRec reads them."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if (found := getattr(given, name, None)) is not None:
            setattr(to, name, [dict(one) if isinstance(one, dict) else one for one in found])


# torch.compile --------------------------------------------------------------------------------------


def frames_compiled() -> int:
    """Returns how many Python frames dynamo has looked at in this process; 0 if it was not loaded.

    `torch.compiler` has no such number, and `torch._dynamo.utils.counters` is empty unless it is asked for.
    """
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if convert_frame is None else int(convert_frame.FRAME_COUNTER)


def compile_settings(module: nn.Module) -> Any:
    """Returns the settings with which a module was compiled, by `torch.compile` or `module.compile`; or None.

    Nothing public says whether a module is compiled.
    """
    found = getattr(module, "dynamo_ctx", None)
    if found is not None:
        return found
    for cell in getattr(module._compiled_call_impl, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "_dynamic"):
            return cell.cell_contents
    return None


def dynamic_of(settings: Any) -> bool | None:
    """Returns the argument `dynamic` in the settings of a compiled module."""
    found: bool | None = settings._dynamic
    return found


# readers --------------------------------------------------------------------------------------------


def next_index_of(batches: Any) -> Callable[[], Any]:
    """Returns the function that gives a `DataLoader`'s iterator the indices of its next batch. A call skips the batch.

    Publicly a batch is skipped by loading it.
    """
    found: Callable[[], Any] = batches._next_index
    return found


def set_next_index(batches: Any, next_index: Callable[[], Any]) -> None:
    """Makes the iterator of a `DataLoader` call `next_index` from now on."""
    batches._next_index = next_index


# checkpoints ----------------------------------------------------------------------------------------

DCP_PICKLES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset({"_MEM_FORMAT_ENCODING"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"TensorProperties", "MEM_FORMAT_ENCODING"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
}
"""Private names that the file `.metadata` of `torch.distributed.checkpoint` has in it, by module. The second module is
in folders of older releases only. The file is a pickle: these names are its format."""
