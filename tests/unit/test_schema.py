"""Every public method that TorchRec's classes have is there in ours, with parameters that their callers may use.

TorchRec holds itself to its signatures by `torchrec.schema.utils`, which is in its wheel; its list of classes is not.
Annotations are left out: ours are of Python 3.10 and later, and mypy holds them.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder, ShardedFusedEmbeddingCollection
from torchrec.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.optim.fused import FusedOptimizer
from torchrec.schema.utils import is_signature_compatible

import torch_ecrec
from torch_ecrec import planner
from torch_ecrec.nn import bags, managed, sequences, sharder
from torch_ecrec.nn.tables_state import ServerOptimizer
from torch_ecrec.state_dicts.kinds import KINDS

# What is made by DistributedModelParallel, and by nobody else, takes other things to be made of.
MADE_BY_US = {"__init__"}
FUSED = {"fused_params"}  # of the script's sharder: ours asks that one
RESHARDS = {"reshard", "sharded_module_type"}  # tables that move between trainers while they train: none are there
LOOKUPS = {  # into TorchRec's lookups, shards and collectives, which the module does not have
    "create_grouped_sharding_infos",
    "create_rocksdb_hard_link_snapshot",
    "init_data_parallel",
    "register_post_lookup_tracker_fn",
    "register_post_odist_tracker_fn",
    "shardings",
}
BAGS = LOOKUPS | {"create_embedding_bag_sharding", "extend_shard_name", "update_shards"}
SEQUENCES = LOOKUPS | {"create_embedding_sharding", "write_dist"}  # and its way to write rows in a forward
MANAGED = (LOOKUPS & {"register_post_lookup_tracker_fn", "register_post_odist_tracker_fn", "shardings"}) | {
    "sync_hash_zch_weights"  # of a module that is refused
}
PAIRS: list[tuple[type[Any], type[Any], set[str]]] = [
    (DistributedModelParallel, torch_ecrec.DistributedModelParallel, {"init_torchrec_delta_tracker"}),  # refused
    (EmbeddingShardingPlanner, planner.EmbeddingShardingPlanner, MADE_BY_US),  # by name, and without `enumerator`
    (EmbeddingBagCollectionSharder, sharder.ErasureCodedSharder, MADE_BY_US | FUSED | RESHARDS),
    (EmbeddingCollectionSharder, sharder.ErasureCodedSharder, MADE_BY_US | FUSED | RESHARDS - {"reshard"}),
    (FusedEmbeddingBagCollectionSharder, sharder.ErasureCodedSharder, MADE_BY_US | FUSED),
    (FusedEmbeddingCollectionSharder, sharder.ErasureCodedSharder, MADE_BY_US | FUSED),
    (
        ManagedCollisionEmbeddingBagCollectionSharder,
        sharder.ErasureCodedManagedSharder,
        MADE_BY_US | FUSED,
    ),
    (
        ManagedCollisionEmbeddingCollectionSharder,
        sharder.ErasureCodedManagedSharder,
        MADE_BY_US | FUSED | RESHARDS - {"reshard"},
    ),
    (ShardedEmbeddingBagCollection, bags.ErasureCodedEmbeddingBagCollection, MADE_BY_US | BAGS),
    (ShardedFusedEmbeddingBagCollection, bags.ErasureCodedFusedEmbeddingBagCollection, MADE_BY_US | BAGS),
    (ShardedEmbeddingCollection, sequences.ErasureCodedEmbeddingCollection, MADE_BY_US | SEQUENCES),
    (ShardedFusedEmbeddingCollection, sequences.ErasureCodedFusedEmbeddingCollection, MADE_BY_US | SEQUENCES),
    (
        ShardedManagedCollisionEmbeddingBagCollection,
        managed.ErasureCodedManagedCollisionEmbeddingBagCollection,
        MADE_BY_US | MANAGED,
    ),
    (
        ShardedManagedCollisionEmbeddingCollection,
        managed.ErasureCodedManagedCollisionEmbeddingCollection,
        MADE_BY_US | MANAGED,
    ),
    (FusedOptimizer, ServerOptimizer, MADE_BY_US),
]


def erased(function: Any) -> inspect.Signature:
    """Names, kinds and defaults."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def names_of(theirs: type[Any]) -> list[str]:
    """Public ones that are more than any module's or object's."""
    usual = set(dir(object)) - {"__init__"}
    names = [name for name in dir(theirs) if (name == "__init__" or not name.startswith("_")) and name not in usual]
    return [name for name in names if getattr(theirs, name) is not getattr(nn.Module, name, None)]


def differs(theirs: type[Any], ours: type[Any], name: str) -> bool:
    """Whether ours lacks it, or takes other parameters."""
    wanted, found = getattr(theirs, name), getattr(ours, name, None)
    if not inspect.isfunction(wanted) or found is None:
        return not hasattr(ours, name)
    return not inspect.isfunction(found) or not is_signature_compatible(erased(wanted), erased(found))


@pytest.mark.parametrize(("theirs", "ours", "exceptions"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_methods_and_parameters_are_torchrecs(theirs: type[Any], ours: type[Any], exceptions: set[str]) -> None:
    names = names_of(theirs)
    assert len(names) >= 4, "it looks at nothing"
    assert {name for name in names if differs(theirs, ours, name)} == exceptions


def test_every_kind_that_is_served_has_a_form_and_a_sharder() -> None:
    served = {kind.module for kind in KINDS.values() if kind.folder or kind.remaps}
    assert served == set(sharder.FORMS)
    backend: Any = None
    assert {one.module_type for one in sharder.sharders_for(backend, {}, [])} == served


def test_a_signature_that_differs_is_seen() -> None:
    class Theirs:
        def method(self, one: int, two: int = 2) -> None: ...

    class Ours:
        def method(self, one: int, other: int = 2) -> None: ...

    class More:
        def method(self, one: int, two: int = 2, *, three: int = 3) -> None: ...

    assert differs(Theirs, Ours, "method") and differs(Theirs, object, "method")
    assert not differs(Theirs, More, "method") and not differs(Theirs, Theirs, "method")
