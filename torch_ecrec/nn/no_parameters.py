"""Explains torch's error for an optimizer without parameters: it names the tables that the servers train.

A script that gives TorchRec's data-parallel tables an optimizer of their own (`in_backward_optimizer_filter` of the
collection's parameters) finds none where the servers serve these tables: they step there. torch says "optimizer got an
empty parameter list" then, and nothing of us.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

EMPTY = "empty parameter list"
_tables: list[str] = []  # of this process's models, on the servers


def explain_empty_optimizers(tables: Sequence[str]) -> None:
    """Adds a note that names these tables to torch's error for an optimizer without parameters, from now on."""
    if not hasattr(Optimizer.__init__, "names_tables"):
        Optimizer.__init__ = _explained(Optimizer.__init__)  # type: ignore[method-assign]
    _tables.extend(table for table in tables if table not in _tables)


def _explained(init: Any) -> Any:
    @functools.wraps(init)
    def explained(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            if EMPTY in str(error):
                names = ", ".join(_tables[:8]) + (", ..." if _tables[8:] else "")
                error.add_note(
                    f"torch_ecrec: the tables {names} are on its servers, which step them in the backward"
                    " (`model.fused_optimizer` has their rates). They give no parameters to an optimizer of the script:"
                    " leave that one out, or give it what remains of the model"
                )
            raise

    explained.names_tables = True  # type: ignore[attr-defined]
    return explained
