"""Checks that a model under `torch.compile` goes on to the same bits after trainers were lost.

What is compiled gives other bits than what is not. And with `dynamic=None`, torch's default, what is compiled depends
on the sizes that came before: a size is a constant until another one is seen. A trainer that goes on after a loss has
not seen what came before. So where trainers may go on, which is where the script has called `attach`,

    what is compiled has `dynamic=True` or `dynamic=False`
    and is compiled from the first training step of a life on, or not at all

or the step is refused. Seen are modules of the model, and the model, that are compiled in place
(`module.compile(...)`), and parts of it that `torch.compile` has replaced. That something else is compiled (the model
from outside, `torch.compile(model)`; a function) is told.

The lookup of rows is never compiled (`served.py`, `managed.py`): dynamo goes around it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_ecrec.compat.torch import compile_settings, dynamic_of, frames_compiled

ADVICE = "compile with dynamic=True or dynamic=False, before the first training step"
NOT_KEPT = "or leave out `attach`, if trainers never go on after a loss"


def _contexts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields names and settings of what is compiled: the model, and modules in it."""
    for name, module in model.named_modules():
        found = compile_settings(module)
        if found is not None:
            yield f"module {name}" if name else "the model", found


class Compiled:
    """Tracks which parts of a model are compiled, as far as that can be seen."""

    def __init__(self) -> None:
        self._frames = -1  # as of the last look
        self._known: dict[int, Any] | None = None  # settings seen at the first one, by id
        self._told = False

    def check(self, model: nn.Module, step: int) -> None:
        """Called before a training forward, in its Python code.

        Args:
            step: the one that it belongs to.

        Raises:
            RuntimeError: a trainer that goes on after a loss would not compile the same.
        """
        frames = frames_compiled()
        if frames == self._frames:
            return
        self._frames = frames
        found = {id(context): (name, context) for name, context in _contexts(model)}
        for name, context in found.values():
            if dynamic_of(context) is None:
                raise RuntimeError(
                    f"{name} is compiled with dynamic=None: what is compiled depends on the sizes of the batches"
                    f" before, so a trainer that goes on after a loss would compute other bits. Please {ADVICE};"
                    f" {NOT_KEPT}"
                )
        if self._known is None:
            self._known = found
            return
        late = [name for key, (name, _) in found.items() if key not in self._known]
        if late:
            raise RuntimeError(
                f"{late[0]} was compiled at step {step}, after training had begun: a trainer that goes on after a loss"
                f" would compute other bits in its first steps. Please {ADVICE} (`compile_on_iter=0` of"
                f" TrainPipelinePT2); {NOT_KEPT}"
            )
        if not found and not self._told:
            self._told = True
            warnings.warn(
                "something was compiled by torch.compile during training, and how cannot be seen: neither the model nor"
                " a module of it was compiled in place. If the training step uses it (`torch.compile(model)`, or a"
                f" function of it), {ADVICE}: else a trainer that goes on after a loss may compute other bits."
                " `model.compile(...)` can be seen",
                stacklevel=2,
            )
