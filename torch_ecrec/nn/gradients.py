"""Dense gradients that wait for their optimizer's step: accumulated over several backwards, or kept for later.

A snapshot between two backwards of one optimizer step would lose them, so it keeps them. Gradients that an optimizer
has stepped with are left over, and are not kept: a loop puts them to zero before the next backward, or at some time. A
backward that adds to them is refused, since after a restart there would be nothing to add to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_ecrec.compat.torch import STEP_HOOKS, version_of
from torch_ecrec.nn.placeholder import TableParameter


class WaitingGradients:
    """Tracks which gradients of a model their optimizers have not used yet.

    Args:
        optimizers: those of the dense parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._used: dict[int, int] = {}  # parameter -> version of its gradient when it was stepped with
        # A wrapper that calls no `Optimizer.__init__` has no hooks; the optimizer in it has.
        hooked = [optimizer for optimizer in optimizers if hasattr(optimizer, STEP_HOOKS)]
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in hooked]
        self._stepped = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        me = weakref.ref(self)
        for parameter in self._stepped.values():
            if parameter.requires_grad and not isinstance(parameter, TableParameter):
                self._hooks.append(parameter.register_hook(functools.partial(_before_addition, me, id(parameter))))

    def close(self) -> None:
        """Stops watching optimizers. May be called again."""
        for hook in self._hooks:
            hook.remove()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._used[id(parameter)] = version_of(parameter.grad)

    def check_addition(self, of: int) -> None:
        """Refuses a backward that adds to a gradient with which its optimizer has stepped already."""
        gradient, used = self._stepped[of].grad, self._used.pop(of, None)
        if gradient is None or used != version_of(gradient) or not torch.count_nonzero(gradient):
            return
        raise RuntimeError(
            "a backward adds to a gradient that its optimizer has stepped with already: trainers that are started again"
            " in between would not have it. Call `optimizer.zero_grad()` between an optimizer's step and the next"
            " backward"
        )

    def find(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Returns copies of the gradients that no optimizer step has used yet, by the parameter's name."""
        found = {}
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self._stepped:
                continue
            if self._used.get(id(parameter)) != version_of(gradient) and bool(torch.count_nonzero(gradient)):
                found[name] = gradient.detach().clone()
        return found


def _before_addition(me: weakref.ref[WaitingGradients], of: int, _gradient: Tensor) -> None:
    waiting = me()
    if waiting is not None:
        waiting.check_addition(of)


def put_back_(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Sets the gradients of parameters to those that `find` has returned."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        parameter.grad = gradient.to(parameter.device, copy=True)
