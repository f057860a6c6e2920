"""TorchRec's seams: the sharded module, its sharder, and `DistributedModelParallel`."""

from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.bags import ErasureCodedEmbeddingBagCollection
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sequences import ErasureCodedEmbeddingCollection
from torch_ecrec.nn.sharder import ErasureCodedSequenceSharder, ErasureCodedSharder

__all__ = [
    "DistributedModelParallel",
    "EmbeddingBackend",
    "ErasureCodedEmbeddingBagCollection",
    "ErasureCodedEmbeddingCollection",
    "ErasureCodedSequenceSharder",
    "ErasureCodedSharder",
]
