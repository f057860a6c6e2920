"""Checkpoints of `torch.distributed.checkpoint` for tables larger than the trainers' memory: `checkpoint/portions.py`.

from torch_ecrec import checkpoint
checkpoint.save(model, "checkpoints/7")
checkpoint.load(model, "checkpoints/7")

And what an import of TorchRec's own has to know of a model, without any cluster: `checkpoint/describing.py`.

checkpoint.describe(DLRMTrain(...), "job.json", trainers=2)
"""

# ruff: noqa: E402  (what is missing is said before something fails to load it)

from torch_ecrec.runtime.installed import require_torchrec

require_torchrec()

from torch_ecrec.checkpoint.describing import describe
from torch_ecrec.checkpoint.portions import load, save

__all__ = ["describe", "load", "save"]
