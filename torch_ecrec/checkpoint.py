"""Checkpoints of `torch.distributed.checkpoint` for tables larger than the trainers' memory: `nn/checkpoint.py`.

from torch_ecrec import checkpoint
checkpoint.save(model, "checkpoints/7")
checkpoint.load(model, "checkpoints/7")
"""

from torch_ecrec.nn.checkpoint import load, save

__all__ = ["load", "save"]
