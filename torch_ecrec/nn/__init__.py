"""TorchRec's seams: the sharded module, its sharder, and `DistributedModelParallel`."""

from torch_ecrec.nn.embedding import EmbeddingBackend, ErasureCodedEmbeddingBagCollection
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import ErasureCodedSharder

__all__ = [
    "DistributedModelParallel",
    "EmbeddingBackend",
    "ErasureCodedEmbeddingBagCollection",
    "ErasureCodedSharder",
]
