"""Reports every step of every torch optimizer in this process to those who ask for it.

torch keeps its global hooks in a dictionary that it iterates during a step: one that is taken out meanwhile, by the
garbage collector perhaps, breaks that. So there is one hook of ours, which stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_watchers: list[weakref.WeakMethod[Callable[[Optimizer], None]]] = []
_hooked = False


def watch(watcher: Callable[[Optimizer], None]) -> None:
    """Calls a bound method after every step, as long as its object lives. The step raises what the method raises."""
    global _hooked
    _watchers.append(weakref.WeakMethod(watcher))
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _watchers[:] = [watcher for watcher in _watchers if watcher() is not None]
    for watcher in list(_watchers):
        method = watcher()
        if method is not None:
            method(optimizer)
