"""The order in which a collection gives out its features: the columns of a `KeyedTensor`, or the keys of a dict.

TorchRec's sharded collections have the order of their shards, not that of the module. Four tables of a feature each,
table-wise on trainers 0, 1, 0 and 1:

    unsharded    f0, f1, f2, f3
    sharded      f0, f2, f1, f3        by kind of sharding, then trainer, then what FBGEMM runs as one kernel

A dense layer behind `.values()` has its weights in that order, and no checkpoint says so. The rule here:

    a plan is given    the order is TorchRec's of that plan; a checkpoint of another order is refused by name
    none is given      the module's; that of a checkpoint which is loaded before the first step is taken over
    once it trains     it stays: a checkpoint of another order is refused by name

TorchRec's own code says which order a plan has (`order_of`). How a folder of `torch.distributed.checkpoint` has its
tables sharded, and on which trainers, is in its metadata; so is what a state dict of ours was saved with (`RECORD`).
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

from torch_ecrec.compat.torch import EnumerableShardingSpec, ShardMetadata, copy_attached
from torch_ecrec.errors import CheckpointError
from torch_ecrec.state_dicts.kinds import Collection
from torch_ecrec.state_dicts.unsharded import configs_of, weight_of

log = logging.getLogger(__name__)

RECORD = "torch_ecrec_columns"  # of the chunks of a table in DCP's metadata: the order that it was saved with
_FILE = re.compile(r"__(\d+)_\d+\.distcp$")  # DCP's name of a file that a trainer has written
_META = torch.device("meta")
_OF_KIND = {
    ShardingType.ROW_WISE.value: "rows",
    ShardingType.TABLE_ROW_WISE.value: "rows",
    ShardingType.COLUMN_WISE.value: "columns",
    ShardingType.TABLE_COLUMN_WISE.value: "columns",
    ShardingType.GRID_SHARD.value: "grid",
}

Entries = Mapping[str, ParameterSharding]


@dataclass(frozen=True)
class Placed:
    """How a table is divided into parts, in a checkpoint or by a plan.

    Args:
        kind: "whole" in one part, in "rows", "columns" or a "grid"; "plain" where TorchRec's fused optimizer has no
            state of it, as it has of others: a table that is data-parallel.
        trainers: the trainer that wrote each part, in the order of the parts.
        parts: for each part its first row and column, and its numbers of rows and columns.
    """

    kind: str
    trainers: tuple[int, ...] = ()
    parts: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True)
class Found:
    """Holds what a checkpoint tells of the order of one collection's columns.

    Args:
        said: the order that was recorded with it; None: none was.
        placed: the parts of each table; None: it does not tell which trainer wrote which part.
        trainers: the number of trainers that wrote the checkpoint.
        stepped: whether it has state of TorchRec's fused optimizer.
    """

    said: tuple[str, ...] | None = None
    placed: Mapping[str, Placed] | None = None
    trainers: int = 1
    stepped: bool = False

    @property
    def is_of_one(self) -> bool:
        """Whether one process wrote it, and no order was recorded: how tables were sharded is not known then."""
        return self.said is None and self.placed is not None and self.trainers == 1

    def plain(self) -> dict[str, Any]:
        """Returns it as dicts and lists."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    @staticmethod
    def of_plain(found: Mapping[str, Any]) -> Found:
        """Inverts `plain`. Raises ValueError if `found` is no such dict."""
        return msgspec.convert(found, Found)


class Columns:
    """The order of one collection's features. A checkpoint may change it until training begins.

    Args:
        module: the collection. Not kept.
        path: where it is in the model, for messages.
        entries: by table, what a given plan says; empty: no plan was given, or it leaves the order to us.
        fused_params: as of the sharder that was given for it.

    Attributes:
        keys: the features in the order of the output.
        begun: whether training has begun, so that the order stays.
        on_changed: called when the order has changed.
    """

    def __init__(
        self,
        module: Collection,
        path: str = "",
        entries: Entries | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        self._twin, self._path, self._fused_params = _twin_of(module), path or "the model", dict(fused_params or {})
        self._module_order = tuple(
            name for names in get_embedding_names_by_table(list(configs_of(module))) for name in names
        )
        self._tables = [config.name for config in configs_of(module)]
        several = len(self._module_order) > 1 and self._is_torchrecs(entries or {})
        self._planned = dict(entries or {}) if several else {}
        planned = self._order_of(self._planned) if self._planned else None
        self.keys: tuple[str, ...] = planned or self._module_order
        self.begun = False
        self.on_changed: Callable[[], None] = lambda: None

    def _is_torchrecs(self, entries: Entries) -> bool:
        kinds = {kind.value for kind in ShardingType}
        return all(name in entries and entries[name].sharding_type in kinds for name in self._tables)

    def _order_of(self, entries: Entries) -> tuple[str, ...] | None:
        """Returns TorchRec's order under these entries; None, with a warning, if TorchRec would not shard so."""
        try:
            found = tuple(order_of(self._twin, entries, self._fused_params))
            if sorted(found) != sorted(self._module_order):
                raise ValueError(f"it has {', '.join(found)}")
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            warnings.warn(
                f"{self._path}: TorchRec shards nothing as this plan has it ({type(error).__name__}: {error}), so that"
                " its order of columns is not known: features come in the order of the module",
                stacklevel=2,
            )
            return None
        return found

    # checkpoints ------------------------------------------------------------------------------------

    def meet(self, found: Found) -> None:
        """Called when a checkpoint is about to be loaded: takes over its order of features.

        Raises:
            CheckpointError: it has another one, and a plan was given, or training has begun.
        """
        if len(self.keys) < 2:
            return
        orders = self._orders(found)
        stays = bool(self._planned) or self.begun
        theirs = self.keys if not orders or (stays and self.keys in orders) else orders[0]
        if not orders or len(set(orders)) > 1 or (found.is_of_one and not self._planned):
            warnings.warn(
                f"{self._path}: the checkpoint does not say for sure in which order its features come"
                f" ({' or '.join(map(_listed, dict.fromkeys(orders))) or 'nothing is known'}); it is taken for"
                f" {_listed(theirs)}. If that is another one, and a dense layer behind `.values()` is loaded with it,"
                " give `DistributedModelParallel` the plan that it was trained with",
                stacklevel=2,
            )
        if self.keys == theirs:
            return
        if stays:
            why = "as the plan has it" if self._planned else "as it was trained so far"
            raise CheckpointError(  # and no ValueError, which DCP takes for one of its own
                f"{self._path}: the features of the checkpoint come in the order {_listed(theirs)}, and here in"
                f" {_listed(self.keys)}, {why}: a dense layer behind `.values()` would meet other columns. Give"
                " `DistributedModelParallel` the plan that the checkpoint was trained with, or none, and load it before"
                " the first step: then its order is taken over"
            )
        log.warning(
            "%s: features come in the order of the checkpoint from now on, %s, and not in %s: the dense layers behind"
            " `.values()` that are loaded with it were trained so",
            self._path,
            _listed(theirs),
            _listed(self.keys),
        )
        self.keys = theirs
        self.on_changed()

    def begin(self) -> None:
        """Called after a training step: from now on the order stays."""
        self.begun = True

    def _orders(self, found: Found) -> list[tuple[str, ...]]:
        """Returns the orders that the checkpoint may have, the likeliest first; none if nothing is known."""
        if found.said is not None:
            return [found.said] if sorted(found.said) == sorted(self._module_order) else []
        placed = found.placed
        if placed is None or any(name not in placed for name in self._tables):
            return []
        mine = {name: placed[name] for name in self._tables}
        if self._planned and all(_fits(self._planned[name], one) for name, one in mine.items()):
            return [self.keys]
        kinds = {one.kind for one in mine.values()}
        if "grid" in kinds:
            return []
        likely = self._order_of(_entries(mine, found.trainers))
        orders = [likely]
        if found.is_of_one:  # an unsharded module's, perhaps
            orders = [self._module_order, likely]
        elif kinds == {"rows"}:  # ours, perhaps, from where the record was lost
            orders.append(self._module_order)
        elif kinds == {"whole"} and not found.stepped:  # all data-parallel, perhaps
            orders.append(self._order_as(mine, "plain", found.trainers))
        elif {"whole", "columns"} <= kinds:  # by columns, perhaps, all of them on one trainer
            orders.append(self._order_as(mine, "columns", found.trainers))
        return [order for order in orders if order is not None]

    def _order_as(self, placed: Mapping[str, Placed], kind: str, trainers: int) -> tuple[str, ...] | None:
        """Returns TorchRec's order if all tables that are in one part were sharded as `kind`."""
        other = {name: replace(one, kind=kind) if one.kind == "whole" else one for name, one in placed.items()}
        return self._order_of(_entries(other, trainers))


def order_of(module: Collection, entries: Entries, fused_params: Mapping[str, Any]) -> list[str]:
    """Returns the output keys of TorchRec's sharded module in their order, computed by TorchRec's own code.

    Args:
        module: tables on the meta device; what is attached to its parameters is changed.
        entries: of all tables, as a plan has them.
        fused_params: of the sharder.
    """
    planned = copy.deepcopy(dict(entries))
    world = 1 + max(trainer for entry in planned.values() for trainer in entry.ranks or [0])
    env = ShardingEnv(world_size=world, rank=0, pg=None)
    params = dict(fused_params)
    shardings: list[Any]
    if isinstance(module, EmbeddingBagCollection):
        bags = ShardedEmbeddingBagCollection
        infos = bags.create_grouped_sharding_infos(module, planned, "embedding_bags.", params)
        shardings = [bags.create_embedding_bag_sharding(some, env, _META, True) for some in infos.values()]
    else:
        rows = ShardedEmbeddingCollection
        infos = rows.create_grouped_sharding_infos(module, planned, params)
        shardings = [rows.create_embedding_sharding(kind, some, env, _META) for kind, some in infos.items()]
    return list(dict.fromkeys(name for sharding in shardings for name in sharding.embedding_names()))


def found_in(metadata: Metadata, keys: Mapping[str, str]) -> Found | None:
    """Returns what a checkpoint of DCP tells of a collection's columns; None if it lacks one of the tables.

    Args:
        keys: by table, the name of its weights in the checkpoint.
    """
    saved: dict[str, Any] = {name: metadata.state_dict_metadata.get(key) for name, key in keys.items()}
    if not all(isinstance(one, TensorStorageMetadata) for one in saved.values()):
        return None
    names = {key: name for name, key in keys.items()}
    wrote: dict[str, dict[tuple[int, ...], int | None]] = {name: {} for name in keys}
    world = 1
    for index, place in (metadata.storage_data or {}).items():
        written = _FILE.search(str(getattr(place, "relative_path", "")))
        trainer = int(written[1]) if written else None
        world = max(world, 1 + (trainer or 0))
        if index.fqn in names:
            wrote[names[index.fqn]][tuple(index.offset or (0, 0))] = trainer
    chunks = [(name, chunk) for name, one in saved.items() for chunk in one.chunks]
    said = next((vars(chunk)[RECORD] for _, chunk in chunks if RECORD in vars(chunk)), None)
    stepped = _stepped(metadata, keys)
    placed: dict[str, Placed] = {}
    for name, one in saved.items():
        parts = sorted((*chunk.offsets, *chunk.sizes) for chunk in one.chunks)
        trainers = [wrote[name].get(part[:2]) for part in parts]
        if not parts or None in trainers:
            return Found(said, None, world, bool(stepped))
        rows, columns = ({part[i] for part in parts} for i in (0, 1))
        kind = "whole" if len(parts) == 1 else "rows" if len(columns) == 1 else "columns" if len(rows) == 1 else "grid"
        if kind == "whole" and stepped and name not in stepped:
            kind = "plain"
        placed[name] = Placed(kind, tuple(t for t in trainers if t is not None), tuple(parts))
    return Found(said, placed, world, bool(stepped))


def _stepped(metadata: Metadata, keys: Mapping[str, str]) -> set[str]:
    """Returns the tables with state of TorchRec's fused optimizer. Data-parallel tables have none."""
    ends = {f"{'.'.join(key.split('.')[-3:])}.{name}": name for name, key in keys.items()}  # embedding_bags.t.weight.t
    found = set()
    for name in metadata.state_dict_metadata:
        words = name.split(".")
        for i in range(4, len(words)):
            table = ends.get(".".join(words[i - 4 : i]))
            if table is not None:
                found.add(table)
    return found


def noted(items: Sequence[WriteItem], keys: Sequence[str]) -> list[WriteItem]:
    """Records an order in DCP's metadata of a table's saved parts. Other readers ignore it."""
    for item in items:
        assert item.tensor_data is not None, "of a table"
        vars(item.tensor_data.chunk)[RECORD] = tuple(keys)  # strings, that are read without this program
    return list(items)


def _fits(entry: ParameterSharding, placed: Placed) -> bool:
    """Returns whether a checkpoint has a table divided as a plan says."""
    trainers = tuple(entry.ranks or ())
    if entry.sharding_type == ShardingType.DATA_PARALLEL.value:
        return placed.kind in ("whole", "plain")
    if placed.kind in ("whole", "plain"):
        return trainers == placed.trainers
    return placed.kind == _OF_KIND.get(entry.sharding_type) and sorted(trainers) == sorted(set(placed.trainers))


def _entries(placed: Mapping[str, Placed], world: int) -> dict[str, ParameterSharding]:
    """Returns the likeliest plan by which TorchRec would have saved tables divided so."""
    return {name: _entry(one, world) for name, one in placed.items()}


def _entry(placed: Placed, world: int) -> ParameterSharding:
    if placed.kind == "plain":
        kind, kernel = ShardingType.DATA_PARALLEL, EmbeddingComputeKernel.DENSE
        return ParameterSharding(kind.value, kernel.value, list(range(world)))
    kind, trainers, parts = ShardingType.TABLE_WISE, list(placed.trainers), list(placed.parts)
    if placed.kind == "columns":
        kind = ShardingType.COLUMN_WISE
    elif placed.kind == "rows" and set(trainers) == set(range(world)):
        kind = ShardingType.ROW_WISE
    elif placed.kind == "rows":  # on one host of several: in the order of the hosts, as if each were one trainer
        trainers = trainers[:1]
    shards = [
        ShardMetadata([row, column], [rows, columns], f"rank:{trainer}/cpu")
        for trainer, (row, column, rows, columns) in zip(trainers, parts, strict=False)
    ]
    return ParameterSharding(
        kind.value, EmbeddingComputeKernel.FUSED.value, trainers, sharding_spec=EnumerableShardingSpec(shards)
    )


def _twin_of(module: Collection) -> Collection:
    """Returns a collection of the same tables on the meta device, with attached optimizers of its own."""
    configs: list[Any] = [copy.copy(config) for config in configs_of(module)]
    for config in configs:
        config.init_fn = None
    twin: Any
    if configs and isinstance(configs[0], EmbeddingBagConfig):
        twin = EmbeddingBagCollection(configs, module.is_weighted(), _META)  # type: ignore[operator]
    else:
        twin = EmbeddingCollection(configs, _META)
    for config in configs:
        copy_attached(weight_of(module, config.name), weight_of(twin, config.name))
    return twin  # type: ignore[no-any-return]


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) if len(keys) <= 12 else f"{', '.join(keys[:12])} and {len(keys) - 12} more"
