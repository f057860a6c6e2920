r"""The maps of managed collisions: from ids of any size to rows of a table, the same on every trainer.

A managed collision module learns which ids come often, and gives each a row of its table; an id that has none shares
the last row. Trainers must mean the same row, so every trainer has the whole map, and in training each of them puts the
ids of all trainers into it, in their order, as one process would with their batches put together:

    trainer 0   [7, 900]   \
                             [7, 900, 31] into the map on both   -> 0: rows [2, 0]
    trainer 1   [31]       /                                     -> 1: rows [1]

Nothing is drawn at random, and nothing depends on who does it; after each change of the maps the trainers compare
checksums of them (`managed.py`), so a map that differs, of another CPU perhaps, is an error and never a wrong row. Out
of training a trainer reads the map alone.

A map is state of training: it is in the snapshots of the dense model, split among the trainers, and goes back with it.

Shape legend: F features, N ids.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_ecrec.compat.torchrec import (
    collection_of,
    eviction_of,
    eviction_policy_of,
    features_of_tables,
    load_map_,
    mapped_features,
    maps_of,
    modules_of_maps,
    state_of_map,
    threshold_filter_of,
)

_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
_FILTERS = (None, dynamic_threshold_filter, average_threshold_filter)


def why_not_served(module: BaseManagedCollisionEmbeddingCollection) -> str | None:
    """Returns why the trainers could not remap the ids of a module exactly and alike; None if they can."""
    collection, tables = maps_of(module), collection_of(module)
    if type(tables) not in (EmbeddingBagCollection, EmbeddingCollection):
        return f"tables of {type(tables).__name__} are not served here"
    if type(collection) is not ManagedCollisionCollection:
        return f"maps of {type(collection).__name__} are not served; those of ManagedCollisionCollection are"
    features = mapped_features(collection)
    twice = sorted({name for name in features if features.count(name) > 1})
    if twice:
        return f"feature {', '.join(twice)} is of several tables, as TorchRec's sharding refuses it; give each its own"
    for table, each in modules_of_maps(collection).items():
        reason = _why_not_exact(each)
        if reason is not None:
            return f"table {table}: {reason}"
    return None


def _why_not_exact(module: nn.Module) -> str | None:
    if type(module) is not MCHManagedCollisionModule:
        return (
            f"a map of {type(module).__name__} is not served; one of MCHManagedCollisionModule is (FBGEMM fills that of"
            " HashZchManagedCollisionModule on a GPU only)"
        )
    policy = eviction_policy_of(module)
    if type(policy) not in _POLICIES:
        names = ", ".join(each.__name__ for each in _POLICIES)
        return f"eviction policy {type(policy).__name__} is not served; {names} are"
    wanted = threshold_filter_of(policy)
    function = wanted.func if isinstance(wanted, functools.partial) else wanted
    if function not in _FILTERS:
        name = getattr(function, "__name__", repr(function))
        return (
            f"threshold filter {name} is not served: it may draw at random, on each trainer otherwise;"
            " dynamic_threshold_filter and average_threshold_filter are"
        )
    return None


class Remapping:
    """The managed-collision maps of one collection on one trainer.

    Args:
        collection: its modules are used, and changed; those on the meta device are made on the host.
        gather: every trainer's values (N,) int64, in trainer order; collective.
    """

    def __init__(self, collection: ManagedCollisionCollection, gather: Callable[[Tensor], list[Tensor]]) -> None:
        self._collection, self._gather = collection, gather
        self.features = mapped_features(collection)
        for table, module in self._maps.items():
            if module.device.type == "meta":
                size = module.output_size()
                made = module.rebuild_with_output_id_range((0, size), [0, size], torch.device("cpu"))
                modules_of_maps(collection)[table] = made.train(module.training)

    @property
    def _maps(self) -> dict[str, MCHManagedCollisionModule]:
        return dict(cast(Any, modules_of_maps(self._collection).items()))

    @torch.no_grad()
    def remap(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the rows (N,) of this trainer's ids. In training, the ids of all trainers update the maps first.

        Args:
            features: those of `self.features`, in that order, ids int64 on the host.
        """
        modules = self._maps
        parts = features.split(features_of_tables(self._collection))
        mine = {table: _jagged(table, part) for table, part in zip(modules, parts, strict=True)}
        if self._collection.need_preprocess:
            mine = {table: modules[table].preprocess(part) for table, part in mine.items()}
        if self._collection.training:
            for table, ids_N in self._ids_of_all(features, mine).items():
                everything = JaggedTensor(
                    values=ids_N, lengths=torch.tensor([len(ids_N)], dtype=torch.int64, device="cpu")
                )
                modules[table].profile({table: everything})
        rows = [modules[table].remap(part)[table].values() for table, part in mine.items()]
        return torch.cat(rows)

    def _ids_of_all(
        self, features: KeyedJaggedTensor, mine: Mapping[str, Mapping[str, JaggedTensor]]
    ) -> dict[str, Tensor]:
        """Returns the ids of all trainers by table: feature by feature, in trainer order within each."""
        counts_F = features.length_per_key()
        own = torch.cat(
            [
                torch.tensor(counts_F, dtype=torch.int64, device="cpu"),
                *(part[table].values() for table, part in mine.items()),
            ]
        )
        of_trainers = []
        for message in self._gather(own):
            sizes = message[: len(counts_F)].tolist()
            of_trainers.append(message[len(counts_F) :].split(sizes))
        found, first = {}, 0
        for table, some in zip(mine, features_of_tables(self._collection), strict=True):
            places = range(first, first + some)
            found[table] = torch.cat([ids[place] for place in places for ids in of_trainers])
            first += some
        return found

    def evictions(self) -> dict[str, Tensor]:
        """Returns by table the rows (N,) that were given to other ids since the last call, in TorchRec's order."""
        found = {table: module.evict() for table, module in self._maps.items()}
        return {table: rows_N for table, rows_N in found.items() if rows_N is not None and len(rows_N)}

    def checksum(self, tables: Mapping[str, Any]) -> int:
        """Returns a checksum of the maps of some tables."""
        total = 0
        for table in tables:
            for buffer in self._maps[table].state_dict().values():
                total = zlib.crc32(buffer.numpy(), total)
        return total

    # state ----------------------------------------------------------------------------------------

    def made_with(self) -> list[str]:
        """Returns, for each map, what decides which ids lose their rows, and when."""
        return [f"{table} {eviction_of(module)}" for table, module in self._maps.items()]

    def state(self) -> dict[str, Any]:
        """Returns the state of all maps. Tensors are shared with the maps: they are encoded before they change."""
        return {table: state_of_map(module) for table, module in self._maps.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned.

        Raises:
            ValueError: it is that of other maps; nothing was changed then.
        """
        modules = self._maps
        for table in sorted(state.keys() | modules.keys()):
            here, there = _sizes(state_of_map(modules[table])) if table in modules else None, None
            if table in state:
                there = _sizes(state[table])
            if here != there:
                raise ValueError(f"the map of table {table} is another one in the snapshot: {there}, here {here}")
        for table, module in modules.items():
            load_map_(module, state[table])


def _jagged(table: str, part: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    return {table: JaggedTensor(values=part.values(), lengths=part.lengths())}


def _sizes(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(values) for name, values in state["map"].items()}
