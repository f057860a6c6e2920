"""The sparse optimizers, one file each, which declares `OPTIMIZER`. To add one, add its file and its formula.

Names are those of the files. A file, and with it Numba, is loaded when its optimizer is asked for: who reads a command
line or asks for a cluster's status needs names only.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads Numba
    from torch_ecrec.records.optimizer import SparseOptimizer

NAMES: tuple[str, ...] = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def optimizer(name: str) -> SparseOptimizer:
    """Returns the optimizer of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"unknown optimizer {name!r}; expected one of {', '.join(NAMES)}")
    found: SparseOptimizer = importlib.import_module(f"{__name__}.{name}").OPTIMIZER
    assert found.name == name, f"{name}: its file declares {found}"
    return found


def by_class(cls: type) -> SparseOptimizer | None:
    """Returns the optimizer that a class of torch or TorchRec stands for; None if there is none."""
    path = f"{cls.__module__}.{cls.__qualname__}"
    return next((found for found in map(optimizer, NAMES) if path in found.classes), None)


def by_type(kind: Enum) -> SparseOptimizer | None:
    """Returns the optimizer that an `EmbOptimType` of FBGEMM stands for; None if there is none."""
    return next((found for found in map(optimizer, NAMES) if kind.name in found.types), None)
