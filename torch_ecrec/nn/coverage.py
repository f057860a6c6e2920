"""Which modules of a model the servers serve, and which would be lost with a trainer. Checked before anything is built.

    served       `EmbeddingBagCollection`, also inside a `FeatureProcessedEmbeddingBagCollection`;
                 `EmbeddingCollection`; the fused forms of both, and those with managed collisions (`remapping.py`)
    dense        every other parameter: data-parallel, in the snapshot
    unprotected  what TorchRec would keep in the trainers, one part in each: lost with a trainer

The last kind is refused by name. Who wants it all the same says so (`UNPROTECTED`): these modules are then TorchRec's,
sharded by the plan that was given, or by one of TorchRec's planner.

A plan *chooses* if it puts a table on the servers (`OURS`): then it says of every collection that it names
whose it is. A collection is sharded as a whole. One that the plan makes data-parallel is dense, and in the snapshot. A
plan that does not choose was made for TorchRec alone, and where served tables lie is the servers' business.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardedModule, ShardingPlan, ShardingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torch_ecrec.compat.torch import attached_optimizers
from torch_ecrec.compat.torchrec import collection_of, inner_sharders
from torch_ecrec.nn.remapping import why_not_served
from torch_ecrec.state_dicts.kinds import COLLECTIONS, KINDS, Collection
from torch_ecrec.state_dicts.unsharded import inside_of

ERASURE_CODED = "erasure_coded"  # our sharding type
OURS = {ERASURE_CODED: "auto", **{f"{ERASURE_CODED}_{kind}": kind for kind in ("table_wise", "row_wise")}}
"""Our sharding types, and how a table of each is placed on the slots (`layout/placing.py`)."""
UNPROTECTED = ("refuse", "snapshot", "allow", "reset")
"""What becomes of what nobody protects.

    refuse    it is named, and nothing is built
    snapshot  collections that a plan leaves to TorchRec, on a CPU, are kept whole with every snapshot of the trainers,
              and brought back; other things are refused
    allow     it is TorchRec's; after a loss of trainers `attach` refuses to go on
    reset     it is TorchRec's; after a loss of trainers it is as the script has made it
"""
_TWO_WAYS = "the same collection is reached with its ids remapped and without; make it one of them"
_KEPT = tuple(module for module, kind in KINDS.items() if kind.kept)
_REMAPPING = tuple(module for module, kind in KINDS.items() if kind.remaps)


@dataclass(frozen=True)
class Coverage:
    """How each module of a model is protected: by the servers, by snapshots, or not at all.

    Args:
        served: by path: those whose tables go to the servers.
        remapping: path -> that of the collection in it, which is one of `served`: modules with managed collisions.
        unprotected: path -> why it is not protected; "" is the model itself.
        planned: unprotected collections that the plan leaves to TorchRec: snapshots may keep these.
        dense: paths of collections that the plan makes data-parallel.
        sharded: unprotected modules that something else has sharded before.
    """

    served: dict[str, Collection]
    unprotected: dict[str, str]
    remapping: dict[str, str]
    planned: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()

    @property
    def left(self) -> list[str]:
        """Returns the paths of the modules that are left to TorchRec."""
        return [*self.unprotected, *self.dense]

    def check(self, unprotected: str) -> None:
        """Raises if a module is unprotected, unless the user has allowed that.

        Raises:
            ValueError: names each module, with the reason.
        """
        if unprotected not in UNPROTECTED:
            raise ValueError(f"`unprotected` must be one of {', '.join(UNPROTECTED)}, got {unprotected!r}")
        kept = set(self.planned) if unprotected == "snapshot" else set()
        wrong = {path: reason for path, reason in self.unprotected.items() if path not in kept}
        if wrong and unprotected in ("refuse", "snapshot"):
            small = bool(self.planned) and unprotected == "refuse"
            allowed = not wrong.keys() <= set(self.sharded)  # these are to be given as they were before
            raise ValueError(
                "a lost trainer would lose what the servers do not serve:\n"
                + "\n".join(f"  {path or 'the model'}: {reason}" for path, reason in wrong.items())
                + '\nTo train it without protection, as TorchRec does, say unprotected="allow"' * allowed
                + ('; to keep small tables with every snapshot of the trainers, unprotected="snapshot"' * small)
            )

    def check_loss(self, step: int, unprotected: str) -> None:
        """Checks, after trainers were lost, whether training may go on after a step without the unprotected modules.

        Raises:
            RuntimeError: what they had alone was lost with them.
        """
        if self.unprotected and unprotected == "allow" and step > 0:
            raise RuntimeError(
                f"training cannot go on after step {step}: {', '.join(self.unprotected)} were in the trainers alone,"
                ' unprotected, and are lost. Begin again with a new cluster; or say unprotected="reset" to go on with'
                " these as the script has made or loaded them, which gives other results"
            )

    def lost_by(self, step: int, unprotected: str) -> str | None:
        """Returns a notice of which trained state is lost when training goes on after `step`; None if none is.

        The user has allowed the loss by `unprotected="reset"`. The notice is for others who read the run's figures.
        """
        if not self.unprotected or unprotected != "reset" or step == 0:
            return None
        names = ", ".join(path or "the model" for path in self.unprotected)
        return f'unprotected="reset": as the script has made or loaded them, what was trained is lost: {names}'


def coverage_of(module: nn.Module, plan: ShardingPlan | None, sharders: Sequence[ModuleSharder[nn.Module]]) -> Coverage:
    """Returns how each module of a model is protected, given a plan.

    Args:
        module: the model, not sharded.
        plan: as given to `DistributedModelParallel`.
        sharders: those for modules that are not served.

    Raises:
        ValueError: a `DistributedModelParallel`, TorchRec's or ours, is in the model.
    """
    planned = plan.plan if plan is not None else {}
    chosen = planned if chooses(plan) else {}
    tables_of = {sharder.module_type for sharder in (*get_default_sharders(), *sharders)}
    served: dict[str, Collection] = {}
    unprotected: dict[str, str] = {}
    remapping: dict[str, str] = {}
    remapped: set[int] = set()  # these modules, and the collections in them
    by_plan: list[str] = []
    dense: list[str] = []
    sharded: list[str] = []

    def look(path: str, child: nn.Module) -> None:
        if isinstance(child, DistributedModelParallel):
            raise ValueError(
                f"{path or 'the model'} is a DistributedModelParallel already, which has sharded its tables; give the"
                " model as it was before, to one DistributedModelParallel"
            )
        if isinstance(child, ShardedModule):
            sharded.append(path)
        reason = None if _is_served(child) else _reason(child, tables_of, path in planned)
        types = _types_of(path, chosen) if _is_served(child) else {}
        if type(child) in _KEPT and set(types.values()) == {ShardingType.DATA_PARALLEL.value}:
            dense.append(path)
        elif types:
            by_plan.append(path)
            listed = ", ".join(f"{table} ({kind})" for table, kind in types.items())
            unprotected[path] = f"the plan leaves its tables to TorchRec: {listed}"
        elif reason is not None:
            unprotected[path] = reason
        elif isinstance(child, BaseManagedCollisionEmbeddingCollection):
            inside = collection_of(child)
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
                if attached_optimizers(parameter):
                    unprotected[_join(path, name)] = (
                        "an optimizer that steps in the backward is attached to it, whose state is in no snapshot;"
                        " attach those to the tables only"
                    )
            for name, inner in child.named_children():
                look(_join(path, name), inner)

    look("", module)
    kept = (path for path in by_plan if type(module.get_submodule(path)) in _KEPT)
    return Coverage(served, unprotected, remapping, tuple(kept), tuple(dense), tuple(sharded))


def chooses(plan: ShardingPlan | None) -> bool:
    """Returns whether a plan says which tables are on the servers."""
    entries = plan.plan.values() if plan is not None else ()
    return any(table.sharding_type in OURS for entry in entries for table in cast(Any, entry).values())


def _types_of(path: str, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sharding types of the tables of a collection that a plan leaves to TorchRec; none if it leaves none.

    Raises:
        ValueError: the plan leaves some of its tables to TorchRec, and not the others.
    """
    types = {table: entry.sharding_type for table, entry in chosen.get(path, {}).items()}
    ours = [table for table, kind in types.items() if kind in OURS]
    if ours and len(ours) < len(types):
        raise ValueError(several_sides(path, ours, [table for table in types if table not in ours]))
    return {} if ours else types


def several_sides(path: str, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Returns the error message for a collection that a plan splits between the servers and TorchRec."""
    return (
        f"{path or 'the model'}: a collection is sharded as a whole, but {', '.join(ours)} are to be on the servers,"
        f" and {', '.join(theirs)} with TorchRec. Make two collections of it, one with the tables of each side, give"
        " both the same batch, and join what they return"
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_served(module: nn.Module) -> bool:
    """Returns whether a module is served, or only wraps a served one, whatever a plan says of it."""
    if isinstance(module, BaseManagedCollisionEmbeddingCollection) and type(module) in _REMAPPING:
        return why_not_served(module) is None
    return type(module) in (*COLLECTIONS, FeatureProcessedEmbeddingBagCollection)


def _reason(module: nn.Module, tables_of: set[type[nn.Module]], planned: bool) -> str | None:
    """Returns why a module is unprotected; None if nothing speaks against it."""
    name = type(module).__name__
    if isinstance(module, ShardedModule):
        return f"{name} is sharded already; give the model as it was before"
    if isinstance(module, BaseManagedCollisionEmbeddingCollection) and type(module) in _REMAPPING:
        return f"{name}: {why_not_served(module)}"
    for served in (*COLLECTIONS, *_REMAPPING):
        if isinstance(module, served):
            return (
                f"{name} is a subclass of {served.__name__}, and the servers would not do what it does otherwise;"
                f" use {served.__name__} itself"
            )
    if isinstance(module, (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection)):
        return f"{name} prunes rows by what its own trainer has looked up, so that trainers would ask for others"
    if type(module) in tables_of:
        full = f"{type(module).__module__}.{name}"  # quantised ones have the names of others
        return f"{full} is not served; {', '.join(cls.__name__ for cls in COLLECTIONS)} are"
    if planned:
        return f"the plan shards this {name} over the trainers; leave it out of the plan"
    return None


def check_sharders(sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Refuses settings of a served module's sharder that the servers do not support. Placement is theirs to choose.

    Warns of quantised collectives, and of `fused_params` for fused collections: they have no effect.

    Raises:
        ValueError: names the sharder and its wish.
    """
    for sharder in sharders:
        kind = KINDS.get(sharder.module_type)
        if kind is None:
            continue
        name = type(sharder).__name__
        if type(sharder).shard is not kind.stock.shard:
            raise ValueError(
                f"sharder {name} has a `shard` of its own, not TorchRec's for {sharder.module_type.__name__}: the"
                " servers would not do what it does otherwise; leave it out"
            )
        check_sharders(inner_sharders(sharder))
        if kind.fused and getattr(sharder, "fused_params", None):
            warnings.warn(
                f"`fused_params` of sharder {name} have no effect, as with TorchRec: a fused collection has its own"
                " optimizer, with which it was made",
                stacklevel=3,
            )
        if getattr(sharder, "qcomm_codecs_registry", None):
            warnings.warn(
                f"sharder {name} has a `qcomm_codecs_registry`, which has no effect: nothing of the tables goes through"
                ' collectives here (`Settings(wire="bfloat16")` halves what lookups and gradients send)',
                stacklevel=3,
            )


def is_inside(path: str, owners: Iterable[str]) -> bool:
    """Returns whether a path is one of `owners`, or below one."""
    return any(owner == "" or path == owner or path.startswith(f"{owner}.") for owner in owners)
