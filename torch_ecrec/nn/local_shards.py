"""Tables that TorchRec shards over the trainers: each trainer keeps its shards whole, with its part of a snapshot.

FBGEMM's modules hold the shards: weights, optimizer state, the iteration, the learning rate in force. Some are buffers,
some parameters, and some plain attributes, and TorchRec shows none of them as a module's own, so they are looked for
here: every tensor of every such module, but for private attributes, which are of one forward and made anew by the next.
A trainer that is started again has the same plan, hence the same tensors; else its snapshot is refused by name.

Shards of data-parallel tables are left out: these are parameters of the dense model.

Meant for small tables: every snapshot has all of their bytes, on each of the r + 1 slots that keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule, ShardingType

from torch_ecrec.compat.torch import children_of, own_buffers, own_parameters
from torch_ecrec.compat.torchrec import lookups_of


class LocalShards:
    """The tensors that this trainer holds of some sharded collections.

    Args:
        modules: by path, as TorchRec has made them.

    Raises:
        ValueError: they are not on a CPU.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        elsewhere = [f"{name} ({t.device})" for name, t in self.tensors().items() if t.device.type != "cpu"]
        if elsewhere:
            raise ValueError(
                f"tables that TorchRec shards are kept in snapshots on a CPU, got {', '.join(elsewhere[:3])}; say"
                ' unprotected="allow", or put these tables on the servers'
            )

    def tensors(self) -> dict[str, Tensor]:
        """Returns this trainer's tensors by name. They share memory with the modules."""
        return {
            f"{path}.{i}.{name}": tensor
            for path, module in self._modules.items()
            for i, lookup in enumerate(lookups_of(module))
            if not isinstance(lookup, DistributedDataParallel)
            for name, tensor in _tensors(lookup, "")
        }


def shards_of(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """Returns those of the modules at these paths that TorchRec has sharded."""
    modules = dict(model.named_modules())
    return {path: modules[path] for path in paths if isinstance(modules.get(path), ShardedModule)}


def replicated_tables(module: ShardedModule[Any, Any, Any, Any]) -> list[str]:
    """Returns the parameters' names of data-parallel tables, which TorchRec counts among the sharded ones."""
    plan: Mapping[str, Any] = getattr(module, "module_sharding_plan", {})
    whole = {table for table, entry in plan.items() if entry.sharding_type == ShardingType.DATA_PARALLEL.value}
    return [name for name, _ in module.named_parameters() if whole.intersection(name.split(".")[-2:-1])]


def data_parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the modules that average gradients over the trainers, those of data-parallel tables included."""
    parts = [one for module in model.modules() for one in (module, *lookups_of(module))]
    return [one for one in parts if isinstance(one, DistributedDataParallel)]


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of a module, those included that TorchRec's `named_parameters` and `named_buffers` omit."""
    attributes = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    for name, value in (*own_parameters(module).items(), *own_buffers(module).items(), *attributes):
        if isinstance(value, Tensor):
            yield prefix + name, value.detach()
    for name, child in children_of(module).items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")
