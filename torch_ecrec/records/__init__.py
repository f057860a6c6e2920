"""The records that a slot keeps: their layout in a `schema`, the records in a `shard`, its memory in `pages`.

What they are at first (`initial`), where they lie (`store`, and `tiers/` on a disk), how a step changes them (`merge`,
`optimizer`, `optimizers/`), and what recent steps have changed (`delta_log`), which ones to save first (`savers`). What
only names or describes records (`schema`, the names of optimizers) loads no Numba.
"""

import importlib
from collections.abc import Callable


def warms() -> list[Callable[[], None]]:
    """Returns what compiles or loads every kernel, part by part. A server calls all of it before it joins."""
    from torch_ecrec.records.optimizers import NAMES, optimizer

    modules = ("halves", "quantised", "shard", "merge", "initial", "delta_log", "captured", "tiers.tiered")
    of_modules = [importlib.import_module(f"{__name__}.{module}").warm for module in modules]
    return [*of_modules, *(optimizer(name).warm for name in NAMES)]


def warm() -> None:
    """Compiles or loads every kernel."""
    for part in warms():
        part()
