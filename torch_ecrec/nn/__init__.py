"""TorchRec's seams: the sharded modules, their sharder, and `DistributedModelParallel`."""

# ruff: noqa: E402  (what is missing is said before something fails to load it)

from torch_ecrec.runtime.installed import require_torchrec

require_torchrec()

from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.bags import ErasureCodedEmbeddingBagCollection
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sequences import ErasureCodedEmbeddingCollection
from torch_ecrec.nn.sharder import ErasureCodedSharder

__all__ = [
    "DistributedModelParallel",
    "EmbeddingBackend",
    "ErasureCodedEmbeddingBagCollection",
    "ErasureCodedEmbeddingCollection",
    "ErasureCodedSharder",
]
