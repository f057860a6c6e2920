"""The private names of TorchRec."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.trackers.raw_id_tracker import RawIdTracker
from torchrec.distributed.planner import stats
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints, Partitioner, ShardingOption, Topology
from torchrec.distributed.types import LazyAwaitable, ModuleSharder, ParameterSharding, ShardedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim.fused import EmptyFusedOptimizer

__all__ = [
    "COLLECTION",
    "MAPS",
    "TRACKERS",
    "ListedEnumerator",
    "Ready",
    "ReportedStats",
    "ShardedAtAllPaths",
    "collection_of",
    "collection_processed",
    "eviction_of",
    "eviction_policy_of",
    "features_of_tables",
    "inner_sharders",
    "is_data_parallel",
    "load_map_",
    "lookups_of",
    "mapped_features",
    "maps_of",
    "mark_as_stepped",
    "modules_of_maps",
    "returns_remapped",
    "set_parts",
    "sharded_names",
    "short_names",
    "state_of_map",
    "threshold_filter_of",
    "topology_of",
    "trainers_of",
    "wrapped_module",
]

W = TypeVar("W")


TRACKERS: tuple[type[Any], ...] = (ModelDeltaTrackerTrec, RawIdTracker)
"""What notes which rows of a sharded model change. No public package names them."""


# the sharded model ----------------------------------------------------------------------------------


class ShardedAtAllPaths(DistributedModelParallel):
    """TorchRec's model wrapper, which shards a module that has several paths once, and puts it at all of them.

    TorchRec's own leaves it unsharded under the second name in one parent, since it looks into `named_children`, which
    passes that over. The method that replaces modules is private; the constructor calls it.
    """

    def _init_dmp(self, module: nn.Module) -> nn.Module:
        places = [
            (p, name, child) for p in list(module.modules()) for name, child in p._modules.items() if child is not None
        ]
        sharded: nn.Module = super()._init_dmp(module)
        made = {id(child): new for p, name, child in places if (new := p._modules[name]) is not child}
        for parent, name, child in places:
            if id(child) in made:
                setattr(parent, name, made[id(child)])
        return sharded


def is_data_parallel(model: DistributedModelParallel) -> bool:
    """Returns whether a model's dense part is data-parallel already (`init_data_parallel`)."""
    return bool(model._ddp_wrapped)


def wrapped_module(model: DistributedModelParallel) -> nn.Module:
    """Returns the module that a model runs, gradient averaging included. `model.module` is what that wraps."""
    found: nn.Module = model._dmp_wrapped_module
    return found


def trainers_of(model: DistributedModelParallel) -> dist.ProcessGroup | None:
    """Returns the process group of the trainers of a model. It is no public attribute."""
    found: dist.ProcessGroup | None = model._env.process_group
    return found


def sharded_names(model: nn.Module) -> set[str]:
    """Returns the names of parameters that TorchRec's `DistributedModelParallel` takes for sharded.

    It makes data-parallel what is not among them. Publicly it says so of itself only, once it is made.
    """
    return set(DistributedModelParallel._sharded_parameter_names(model))


def lookups_of(module: nn.Module) -> list[nn.Module]:
    """Returns a module for each way in which TorchRec sharded some tables of a collection; none for other modules.

    They are in no list of modules, and so in nothing that `modules()` gives.
    """
    return list(getattr(module, "_lookups", ())) if isinstance(module, ShardedModule) else []


def inner_sharders(sharder: ModuleSharder[Any]) -> list[Any]:
    """Returns the sharders in a wrapper's sharder: for the collection in it, and for its maps."""
    names = ("_ebc_sharder", "_e_sharder", "_mc_sharder")
    return [inner for name in names if (inner := getattr(sharder, name, None)) is not None]


def mark_as_stepped(parameter: nn.Parameter) -> None:
    """Makes TorchRec's `in_backward_optimizer_filter` omit a parameter that is stepped in the backward.

    The mark is torch's, for what `apply_optimizer_in_backward` has attached; no function makes it alone.
    """
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]


class Ready(LazyAwaitable[W]):
    """An awaitable whose result is there already."""

    def __init__(self, value: W) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> W:
        return self._value


# wrappers around collections ------------------------------------------------------------------------

COLLECTION = "_embedding_module"
"""Attribute with the collection in a module with managed collisions: part of its tables' names in state dicts."""

MAPS = "_managed_collision_collection"
"""Attribute with the maps of such a module: part of their names in state dicts."""


def collection_of(module: nn.Module) -> Any:
    """Returns the collection in a module with managed collisions (`COLLECTION`)."""
    return getattr(module, COLLECTION)


def maps_of(module: nn.Module) -> Any:
    """Returns the maps of a module with managed collisions (`MAPS`)."""
    return getattr(module, MAPS)


def returns_remapped(module: BaseManagedCollisionEmbeddingCollection) -> bool:
    """Returns whether a module with managed collisions returns the remapped ids, too."""
    return bool(module._return_remapped_features)


def collection_processed(module: FeatureProcessedEmbeddingBagCollection) -> nn.Module:
    """Returns the collection in a module that processes features."""
    found: nn.Module = module._embedding_bag_collection
    return found


# maps of ids ----------------------------------------------------------------------------------------


def mapped_features(maps: ManagedCollisionCollection) -> list[str]:
    """Returns the features whose ids are remapped, in the order in which `features_of_tables` counts them."""
    return list(maps._feature_names)


def features_of_tables(maps: ManagedCollisionCollection) -> list[int]:
    """Returns the number of features of each table, in the order of `modules_of_maps`."""
    return list(maps._table_feature_splits)


def modules_of_maps(maps: ManagedCollisionCollection) -> nn.ModuleDict:
    """Returns the map of each table, by name. Other maps may be put there."""
    found: nn.ModuleDict = maps._managed_collision_modules
    return found


def eviction_policy_of(module: MCHManagedCollisionModule) -> Any:
    """Returns the policy that chooses which ids lose their rows."""
    return module._eviction_policy


def eviction_of(module: MCHManagedCollisionModule) -> str:
    """Returns what ids are hashed to, when they lose their rows, and the policy for that with its numbers, as text."""
    policy = module._eviction_policy
    numbers = sorted((name, value) for name, value in vars(policy).items() if isinstance(value, (int, float)))
    return f"{module._input_hash_size} {module._eviction_interval} {type(policy).__name__} {numbers}"


def threshold_filter_of(policy: Any) -> Callable[..., Any] | None:
    """Returns the filter of an eviction policy that decides which ids enter a map; None if it has none."""
    found: Callable[..., Any] | None = policy._threshold_filtering_func
    return found


_NUMBERS = (
    *("_input_history_buffer_size", "_current_history_buffer_offset"),
    *("_current_iter", "_last_eviction_iter", "_evicted"),
)


def state_of_map(module: MCHManagedCollisionModule) -> dict[str, Any]:
    """Returns all state on which a map's future depends. It is shared with the module: copy it before that changes.

    Its `state_dict` lacks the ids since the map was last changed, and the counters.

    Returns:
        map: the state dict. history: ids (N,) int64 since the last change under "", when they came under other names;
        empty where none are kept. numbers: counters, by name.
    """
    used = module._current_history_buffer_offset
    history = {}
    if module._input_history_buffer_size >= 0:
        history = {name: values[:used] for name, values in module._history_metadata.items()}
        history[""] = module._history_accumulator[:used]
    return {
        "map": dict(module.state_dict()),
        "history": history,
        "numbers": {name: getattr(module, name) for name in _NUMBERS},
    }


def load_map_(module: MCHManagedCollisionModule, state: Mapping[str, Any]) -> None:
    """Restores a map from `state_of_map` of a map of the same size."""
    numbers, history = state["numbers"], state["history"]
    for name, values in module.state_dict().items():
        values.copy_(state["map"][name])
    if history:
        size, used = numbers["_input_history_buffer_size"], numbers["_current_history_buffer_offset"]
        module._history_accumulator = _extended(history[""], size)
        for name, _, in_history in module._eviction_policy.metadata_info:
            if in_history:
                values = _extended(history[name], size)
                module.register_buffer(f"_history_{name}", values, persistent=False)
                module._history_metadata[name] = values
        assert used <= size
    for name, value in numbers.items():
        setattr(module, name, value)


def _extended(values_N: Tensor, size: int) -> Tensor:
    whole = torch.zeros(size, dtype=torch.int64, device="cpu")
    whole[: len(values_N)] = values_N
    return whole


# the planner ----------------------------------------------------------------------------------------


class ListedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator of sharding options. A subclass may choose the sharding types of a table.

    Constraints, the public way, allow a table only types that its sharder has.
    """

    @property
    def world_size(self) -> int:
        """The number of trainers that tables are planned for."""
        return int(self._world_size)

    @property
    def local_world_size(self) -> int:
        """The number of trainers on one host."""
        return int(self._local_world_size)

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], sharder_key: str = "") -> list[str]:
        return self.types_for(name, allowed_sharding_types, sharder_key)

    def types_for(self, name: str, allowed: list[str], sharder_key: str) -> list[str]:
        """Returns the sharding types to list for a table.

        Args:
            name: of the table.
            allowed: those that its sharder has.
            sharder_key: of that sharder.
        """
        found: list[str] = super()._filter_sharding_types(name, allowed, sharder_key)
        return found


class ReportedStats(stats.EmbeddingStats):
    """TorchRec's report of a plan. A subclass may extend it, and give figures for shards that TorchRec does not know.

    It is written by one method that calls private ones, into private fields.
    """

    @property
    def lines(self) -> list[str]:
        """The lines of the last report."""
        return list(self._stats_table)

    def _get_shard_stats(
        self,
        shard: ParameterSharding,
        sharding_option: ShardingOption,
        world_size: int,
        local_world_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> tuple[list[int], list[float], list[float]]:
        found = self.traffic_of(shard, sharding_option, world_size)
        if found is None:
            found = super()._get_shard_stats(shard, sharding_option, world_size, local_world_size, constraints)
        return found

    def traffic_of(
        self, shard: ParameterSharding, option: ShardingOption, world_size: int
    ) -> tuple[list[int], list[float], list[float]] | None:
        """Returns ranks, and the MB that each sends and receives in a lookup; None: TorchRec's figures are used."""
        return None

    def _log_hardcoded_compute_kernel_stats(
        self, best_plan: list[ShardingOption], constraints: Mapping[str, ParameterConstraints] | None
    ) -> None:
        super()._log_hardcoded_compute_kernel_stats(best_plan, constraints)
        for line in self.more_lines(best_plan):
            self._stats_table.append(f"# {line: <{self._width - 3}}#")

    def more_lines(self, plan: Sequence[ShardingOption]) -> list[str]:
        """Returns lines for the end of the report."""
        return []


@contextlib.contextmanager
def short_names(names: Mapping[str, str]) -> Iterator[None]:
    """Gives TorchRec's report of a plan the short names of more sharding types, within the block."""
    theirs = stats._get_sharding_type_abbr
    stats._get_sharding_type_abbr = lambda one: names[one] if one in names else theirs(one)
    try:
        yield
    finally:
        stats._get_sharding_type_abbr = theirs


def topology_of(planner: EmbeddingShardingPlanner) -> Topology:
    """Returns the hosts and devices that a planner plans for. It makes them itself if it was given none."""
    return planner._topology


def set_parts(planner: EmbeddingShardingPlanner, enumerator: Enumerator, partitioner: Partitioner) -> None:
    """Replaces parts of a planner. They need the topology that it makes, so they cannot be its arguments."""
    planner._enumerator, planner._partitioner = enumerator, partitioner
