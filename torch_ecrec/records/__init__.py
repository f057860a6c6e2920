"""The records that a slot keeps: their layout in a `schema`, the records in a `shard`, its memory in `pages`.

What they are at first (`initial`), where they lie (`store`, and `tiers/` on a disk), how a step changes them (`merge`,
`optimizer`, `optimizers/`), and what recent steps have changed (`delta_log`), which ones to save first (`savers`). What
only names or describes records (`schema`, the names of optimizers) loads no Numba.
"""

import importlib


def warm() -> None:
    """Compiles or loads every kernel. A server calls it before it joins."""
    from torch_ecrec.records.optimizers import NAMES, optimizer

    for module in ("halves", "quantised", "shard", "merge", "initial", "delta_log", "captured", "tiers.tiered"):
        importlib.import_module(f"{__name__}.{module}").warm()
    for name in NAMES:
        optimizer(name).warm()
