"""Dense gradients that wait for their optimizer's step: accumulated over several backwards, or kept for later.

A snapshot between two backwards of one optimizer step would lose them, so it keeps them. Gradients that an optimizer
has stepped with since are left over, and are not kept: the loop puts them to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class WaitingGradients:
    """Knows which gradients of a model wait.

    Args:
        optimizers: that step dense parameters.
        moment: changes with every training forward and with every backward.
    """

    def __init__(self, optimizers: Sequence[Optimizer], moment: Callable[[], object]) -> None:
        self._moment = moment
        self._owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        self._used: dict[int, tuple[object, int]] = {}  # parameter -> when, and which version of its gradient
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]

    def close(self) -> None:
        """Twice is once."""
        for hook in self._hooks:
            hook.remove()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        moment = self._moment()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._used[id(parameter)] = moment, parameter.grad._version

    def find(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """By the parameter's name, those that wait: copies."""
        moment, found = self._moment(), {}
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self._owned:
                continue
            if self._used.get(id(parameter)) != (moment, gradient._version) and bool(torch.count_nonzero(gradient)):
                found[name] = gradient.detach().clone()
        return found


def put_back_(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Gives parameters the gradients that `find` has found."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        parameter.grad = gradient.to(parameter.device, copy=True)
