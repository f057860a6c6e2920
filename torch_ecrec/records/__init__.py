"""What a slot keeps: records of a `schema` in a `shard`, in memory of `pages`.

What they are at first (`initial`), how a step changes them (`merge`, `optimizer`, `optimizers/`), and what recent steps
have changed (`delta_log`).
"""

from torch_ecrec.records import delta_log, initial, merge, shard
from torch_ecrec.records.optimizers import NAMES, optimizer


def warm() -> None:
    """Compiles or loads every kernel, so that a server does it before it joins."""
    for module in (shard, merge, initial, delta_log):
        module.warm()
    for name in NAMES:
        optimizer(name).warm()
