"""Checkpoints of `torch.distributed.checkpoint` for tables larger than the trainers' memory: `nn/checkpoint.py`.

from torch_ecrec import checkpoint
checkpoint.save(model, "checkpoints/7")
checkpoint.load(model, "checkpoints/7")

And what an import of TorchRec's own has to know of a model, without any cluster: `nn/describing.py`.

checkpoint.describe(DLRMTrain(...), "job.json", trainers=2)
"""

from torch_ecrec.nn.checkpoint import load, save
from torch_ecrec.nn.describing import describe

__all__ = ["describe", "load", "save"]
