"""The kinds of modules that the servers serve: one entry for each class of TorchRec's that holds tables.

A kind more is an entry here, and its sharded form in `sharder.py:FORMS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

Bags: TypeAlias = EmbeddingBagCollection | FusedEmbeddingBagCollection
Collection: TypeAlias = Bags | EmbeddingCollection | FusedEmbeddingCollection


@dataclass(frozen=True)
class Kind:
    """A class of TorchRec's modules that the servers serve.

    Args:
        module: the class itself; a subclass is not served.
        stock: TorchRec's own sharder for it. A sharder that shards otherwise is refused.
        folder: what it calls the module of its tables, whose weights are saved as <folder>.<table>.weight; "": its
            tables are those of a module inside it.
        fused: it brings its own optimizer.
        kept: where a plan leaves it to TorchRec, snapshots of the trainers can keep it (`local_shards.py`).
        remaps: it is a module with managed collisions around a collection (`remapping.py`).
    """

    module: type[nn.Module]
    stock: type[ModuleSharder[Any]]
    folder: str = ""
    fused: bool = False
    kept: bool = False
    remaps: bool = False


KINDS = {
    kind.module: kind
    for kind in (
        Kind(EmbeddingBagCollection, EmbeddingBagCollectionSharder, "embedding_bags", kept=True),
        Kind(EmbeddingCollection, EmbeddingCollectionSharder, "embeddings", kept=True),
        Kind(FusedEmbeddingBagCollection, FusedEmbeddingBagCollectionSharder, "embedding_bags", fused=True),
        Kind(FusedEmbeddingCollection, FusedEmbeddingCollectionSharder, "embeddings", fused=True),
        Kind(ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingBagCollectionSharder, remaps=True),
        Kind(ManagedCollisionEmbeddingCollection, ManagedCollisionEmbeddingCollectionSharder, remaps=True),
        Kind(FeatureProcessedEmbeddingBagCollection, FeatureProcessedEmbeddingBagCollectionSharder),
        Kind(ManagedCollisionCollection, ManagedCollisionCollectionSharder),
    )
}
COLLECTIONS: tuple[type[nn.Module], ...] = tuple(module for module, kind in KINDS.items() if kind.folder)
"""The classes that hold tables themselves."""
