"""Which modules of a model the servers serve, and which nobody would protect: said before anything is built.

    served       `EmbeddingBagCollection`, also inside a `FeatureProcessedEmbeddingBagCollection`;
                 `EmbeddingCollection`; the fused forms of both, and those with managed collisions (`remapping.py`)
    dense        every other parameter: data-parallel, in the snapshot
    unprotected  what TorchRec would keep in the trainers, one part in each: lost with a trainer

The last kind is refused by name. Who wants it all the same says so (`unprotected="allow"`): these modules are then
TorchRec's, sharded by the plan that was given, or by one of TorchRec's planner.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardedModule, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from torch_ecrec.nn.remapping import why_not_served
from torch_ecrec.nn.unsharded import COLLECTIONS, Collection, inside_of

UNPROTECTED = ("refuse", "allow")
_TWO_WAYS = "the same collection is reached with its ids remapped and without; make it one of them"
_STOCK: dict[type[nn.Module], type[ModuleSharder[Any]]] = {
    EmbeddingBagCollection: EmbeddingBagCollectionSharder,
    FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder,
    EmbeddingCollection: EmbeddingCollectionSharder,
    FusedEmbeddingBagCollection: FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollection: FusedEmbeddingCollectionSharder,
    ManagedCollisionEmbeddingBagCollection: ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollection: ManagedCollisionEmbeddingCollectionSharder,
}
"""TorchRec's own sharders for what is served; of others nobody knows what they would do."""
_REMAPPING: tuple[type[BaseManagedCollisionEmbeddingCollection], ...] = (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)


@dataclass(frozen=True)
class Coverage:
    """What becomes of the modules of a model.

    Args:
        served: by path: those whose tables go to the servers.
        remapping: path -> that of the collection in it, which is one of `served`: modules with managed collisions.
        unprotected: path -> why nobody protects it; "" is the model itself.
    """

    served: dict[str, Collection]
    unprotected: dict[str, str]
    remapping: dict[str, str]

    def check(self, unprotected: str) -> None:
        """Refuses what is unprotected, unless that is allowed.

        Raises:
            ValueError: names each module, with the reason.
        """
        if unprotected not in UNPROTECTED:
            raise ValueError(f"`unprotected` must be one of {', '.join(UNPROTECTED)}, got {unprotected!r}")
        if self.unprotected and unprotected == "refuse":
            raise ValueError(
                "a lost trainer would lose what the servers do not serve:\n"
                + "\n".join(f"  {path or 'the model'}: {reason}" for path, reason in self.unprotected.items())
                + '\nTo train it without protection, as TorchRec does, say unprotected="allow"'
            )


def coverage_of(module: nn.Module, plan: ShardingPlan | None, sharders: Sequence[ModuleSharder[nn.Module]]) -> Coverage:
    """Looks at every module of a model, and at what a given plan says of it.

    Args:
        module: the model, not sharded.
        plan: as given to `DistributedModelParallel`.
        sharders: those for modules that are not served.
    """
    planned = plan.plan if plan is not None else {}
    tables_of = {sharder.module_type for sharder in (*get_default_sharders(), *sharders)}
    served: dict[str, Collection] = {}
    unprotected: dict[str, str] = {}
    remapping: dict[str, str] = {}
    remapped: set[int] = set()  # these modules, and the collections in them

    def look(path: str, child: nn.Module) -> None:
        reason = None if _is_served(child) else _reason(child, tables_of, path in planned)
        if reason is not None:
            unprotected[path] = reason
        elif isinstance(child, _REMAPPING):
            inside = child._embedding_module
            if id(child) not in remapped and id(inside) in map(id, served.values()):
                unprotected[path] = _TWO_WAYS
            elif id(child) not in remapped:
                remapping[path] = inside_of(path)
                served[remapping[path]] = inside
                remapped.update((id(child), id(inside)))
        elif id(child) in remapped:
            unprotected[path] = _TWO_WAYS
        elif type(child) in COLLECTIONS:
            if id(child) not in map(id, served.values()):  # at two paths it is one
                served[path] = cast(Collection, child)
        else:
            for name, parameter in child.named_parameters(recurse=False):
                if getattr(parameter, "_optimizer_classes", None):
                    unprotected[_join(path, name)] = (
                        "an optimizer that steps in the backward is attached to it, whose state is in no snapshot;"
                        " attach those to the tables only"
                    )
            for name, inner in child.named_children():
                look(_join(path, name), inner)

    look("", module)
    return Coverage(served, unprotected, remapping)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_served(module: nn.Module) -> bool:
    """Whether it is served, or nothing but a wrapper of what is: whatever a plan says of it."""
    if isinstance(module, _REMAPPING) and type(module) in _REMAPPING:
        return why_not_served(module) is None
    return type(module) in (*COLLECTIONS, FeatureProcessedEmbeddingBagCollection)


def _reason(module: nn.Module, tables_of: set[type[nn.Module]], planned: bool) -> str | None:
    """Why nobody protects a module; None: nothing is known against it."""
    name = type(module).__name__
    if isinstance(module, ShardedModule):
        return f"{name} is sharded already; give the model as it was before"
    if isinstance(module, _REMAPPING) and type(module) in _REMAPPING:
        return f"{name}: {why_not_served(module)}"
    for served in (*COLLECTIONS, *_REMAPPING):
        if isinstance(module, served):
            return (
                f"{name} is a subclass of {served.__name__}, and the servers would not do what it does otherwise;"
                f" use {served.__name__} itself"
            )
    if type(module) in tables_of:
        full = f"{type(module).__module__}.{name}"  # quantised ones have the names of others
        return f"{full} is not served; {', '.join(cls.__name__ for cls in COLLECTIONS)} are"
    if planned:
        return f"the plan shards this {name} over the trainers; leave it out of the plan"
    return None


def check_sharders(sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Refuses what a sharder for a served module wants and the servers do not do; where tables lie is their business.

    Quantised collectives are told to have no effect.

    Raises:
        ValueError: names the sharder and its wish.
    """
    for sharder in sharders:
        if sharder.module_type not in _STOCK:
            continue
        name = type(sharder).__name__
        if type(sharder).shard is not _STOCK[sharder.module_type].shard:
            raise ValueError(
                f"sharder {name} has a `shard` of its own, not TorchRec's for {sharder.module_type.__name__}: the"
                " servers would not do what it does otherwise; leave it out"
            )
        if getattr(sharder, "qcomm_codecs_registry", None):
            warnings.warn(
                f"sharder {name} has a `qcomm_codecs_registry`, which has no effect: nothing of the tables goes through"
                ' collectives here (`Settings(wire="bfloat16")` halves what lookups and gradients send)',
                stacklevel=3,
            )


def is_inside(path: str, owners: Iterable[str]) -> bool:
    """Whether a path is one of `owners` or below one."""
    return any(owner == "" or path == owner or path.startswith(f"{owner}.") for owner in owners)
