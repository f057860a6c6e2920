"""What a slot keeps: records (`shard`, in memory of `pages`), how a step changes them (`optim`), what recent steps
changed (`delta_log`)."""

from torch_ecrec.storage import delta_log, optim, shard
from torch_ecrec.storage.delta_log import DeltaLog
from torch_ecrec.storage.optim import initialise_, merge, update_
from torch_ecrec.storage.shard import Shard

__all__ = ["DeltaLog", "Shard", "initialise_", "merge", "update_", "warm"]


def warm() -> None:
    """Compiles or loads every kernel, so that a server does it before it joins."""
    for module in (shard, optim, delta_log):
        module.warm()
