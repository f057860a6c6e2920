"""Dense gradients that wait for their optimizer's step: accumulated over several backwards, or kept for later.

A snapshot between two backwards of one optimizer step would lose them, so it keeps them. So it does with those that no
attached optimizer steps with: they count when all are clipped, or in what the loop does by hand.

Gradients that an optimizer has stepped with are left over: a loop puts them to zero before the next backward, or at
some time. Of these a snapshot keeps only that they are there, and they come back as zeros. That makes a difference for
a parameter that the next backward does not reach: an optimizer with momentum moves it if its gradient is zero, and not
if it has none.

What would not come back is refused: a backward that adds to a gradient that is left over, and an optimizer that steps
with one once more.
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
        self._left: dict[int, int] = {}  # likewise, of those that a snapshot has as zeros
        # A wrapper that calls no `Optimizer.__init__` has no hooks; the optimizer in it has.
        hooked = [optimizer for optimizer in optimizers if hasattr(optimizer, STEP_HOOKS)]
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in hooked]
        self._stepped = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        self._watched: set[int] = set()  # parameters whose new gradients are noticed
        for parameter in self._stepped.values():
            self._watch(parameter)

    def _watch(self, parameter: Tensor) -> bool:
        """Returns whether new gradients of a parameter are noticed: of one that is not trained yet none come."""
        of = id(parameter)
        if of not in self._watched and parameter.requires_grad and not isinstance(parameter, TableParameter):
            self._hooks.append(parameter.register_hook(functools.partial(_before_addition, weakref.ref(self), of)))
            self._watched.add(of)
        return of in self._watched

    def close(self) -> None:
        """Stops watching optimizers. May be called again."""
        for hook in self._hooks:
            hook.remove()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient, of = parameter.grad, id(parameter)
                if gradient is None:
                    continue
                if self._left.pop(of, None) == version_of(gradient) and _is_there(gradient):
                    raise RuntimeError(
                        "an optimizer steps once more with a gradient it has stepped with already: trainers that are"
                        " started again in between would not have it. Call `optimizer.zero_grad()` between an"
                        " optimizer's step and the next backward"
                    )
                if self._watch(parameter):  # else what comes next would be taken for this one
                    self._used[of] = version_of(gradient)

    def check_addition(self, of: int) -> None:
        """Refuses a backward that adds to a gradient with which its optimizer has stepped already."""
        self._left.pop(of, None)
        gradient, used = self._stepped[of].grad, self._used.pop(of, None)
        if gradient is None or used != version_of(gradient) or not _is_there(gradient):
            return
        raise RuntimeError(
            "a backward adds to a gradient that its optimizer has stepped with already: trainers that are started again"
            " in between would not have it. Call `optimizer.zero_grad()` between an optimizer's step and the next"
            " backward"
        )

    def find(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[dict[str, Tensor], dict[str, bool]]:
        """Returns what a snapshot keeps of the gradients of parameters, by the parameter's name.

        Returns:
            Copies of those that no optimizer step has used yet; of the others that are there, whether they are sparse.
        """
        waiting, zeros = {}, {}
        for name, parameter in parameters:
            gradient, of = parameter.grad, id(parameter)
            if gradient is None:
                continue
            used = self._used.get(of) == version_of(gradient)
            if not used and _is_there(gradient):
                waiting[name] = gradient.detach().clone()
                continue
            zeros[name] = gradient.is_sparse
            if used:
                self._left[of] = version_of(gradient)
        return waiting, zeros


def _is_there(gradient: Tensor) -> bool:
    """Returns whether a gradient, dense or sparse, is not zero."""
    return bool(torch.count_nonzero(gradient.coalesce().values() if gradient.is_sparse else gradient))


def _before_addition(me: weakref.ref[WaitingGradients], of: int, _gradient: Tensor) -> None:
    waiting = me()
    if waiting is not None:
        waiting.check_addition(of)


def put_back_(parameters: Mapping[str, nn.Parameter], waiting: Mapping[str, Tensor], zeros: Mapping[str, bool]) -> None:
    """Sets the gradients of parameters to those that `find` has returned; the others have none."""
    for name, parameter in parameters.items():
        parameter.grad = None
        if name in waiting:
            parameter.grad = waiting[name].to(parameter.device, copy=True)
        elif name in zeros:
            layout = torch.sparse_coo if zeros[name] else torch.strided
            parameter.grad = torch.zeros_like(parameter, layout=layout, requires_grad=False)
