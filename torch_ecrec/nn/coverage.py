"""Which modules of a model the servers serve, and which nobody would protect: said before anything is built.

    served       `EmbeddingBagCollection`, also inside a `FeatureProcessedEmbeddingBagCollection`
    dense        every other parameter: data-parallel, in the snapshot
    unprotected  what TorchRec would keep in the trainers, one part in each: lost with a trainer

The last kind is refused by name. Who wants it all the same says so (`unprotected="allow"`): these modules are then
TorchRec's, sharded by the plan that was given, or by one of TorchRec's planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardedModule, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

UNPROTECTED = ("refuse", "allow")
_REMAPPING = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)


@dataclass(frozen=True)
class Coverage:
    """What becomes of the modules of a model.

    Args:
        served: by path: those whose tables go to the servers.
        unprotected: path -> why nobody protects it; "" is the model itself.
    """

    served: dict[str, EmbeddingBagCollection]
    unprotected: dict[str, str]

    def check(self, unprotected: str) -> None:
        """Refuses a model that has nothing to serve, and what is unprotected unless that is allowed.

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
        if not self.served:
            raise ValueError("the module holds no EmbeddingBagCollection: there is nothing to serve")


def coverage_of(module: nn.Module, plan: ShardingPlan | None, sharders: Sequence[ModuleSharder[nn.Module]]) -> Coverage:
    """Looks at every module of a model, and at what a given plan says of it.

    Args:
        module: the model, not sharded.
        plan: as given to `DistributedModelParallel`.
        sharders: those for modules that are not served.
    """
    planned = plan.plan if plan is not None else {}
    tables_of = {sharder.module_type for sharder in (*get_default_sharders(), *sharders)}
    served: dict[str, EmbeddingBagCollection] = {}
    unprotected: dict[str, str] = {}

    def look(path: str, child: nn.Module) -> None:
        reason = None if _is_served(child) else _reason(child, tables_of, path in planned)
        if reason is not None:
            unprotected[path] = reason
        elif type(child) is EmbeddingBagCollection:
            if id(child) not in map(id, served.values()):  # at two paths it is one
                served[path] = child
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
    return Coverage(served, unprotected)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_served(module: nn.Module) -> bool:
    """Whether it is served, or nothing but a wrapper of what is: whatever a plan says of it."""
    return type(module) in (EmbeddingBagCollection, FeatureProcessedEmbeddingBagCollection)


def _reason(module: nn.Module, tables_of: set[type[nn.Module]], planned: bool) -> str | None:
    """Why nobody protects a module; None: nothing is known against it."""
    name = type(module).__name__
    if isinstance(module, ShardedModule):
        return f"{name} is sharded already; give the model as it was before"
    if isinstance(module, _REMAPPING):
        return f"{name} remaps ids on each trainer for itself, so trainers would not mean the same rows"
    if isinstance(module, EmbeddingBagCollection):
        return (
            f"{name} is a subclass of EmbeddingBagCollection, and the servers would not do what it does otherwise;"
            " use EmbeddingBagCollection itself"
        )
    if type(module) in tables_of:
        return f"{name} is not served; EmbeddingBagCollection is"
    if planned:
        return f"the plan shards this {name} over the trainers; leave it out of the plan"
    return None


def check_sharders(sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Refuses what a sharder for `EmbeddingBagCollection` wants and the servers do not do.

    Raises:
        ValueError: names the sharder and its wish.
    """
    for sharder in sharders:
        if sharder.module_type is not EmbeddingBagCollection:
            continue
        name = type(sharder).__name__
        if type(sharder) is not EmbeddingBagCollectionSharder:
            raise ValueError(
                f"sharder {name} is not TorchRec's own for EmbeddingBagCollection: the servers would not do what it"
                " does otherwise; leave it out"
            )
        if sharder.qcomm_codecs_registry:
            raise ValueError(
                f"sharder {name} has a `qcomm_codecs_registry`: nothing of the tables goes through collectives here;"
                " leave it out (TORCH_ECREC_WIRE_DTYPE=bfloat16 makes lookups and gradients smaller)"
            )


def is_inside(path: str, owners: Iterable[str]) -> bool:
    """Whether a path is one of `owners` or below one."""
    return any(owner == "" or path == owner or path.startswith(f"{owner}.") for owner in owners)
