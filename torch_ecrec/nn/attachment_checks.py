"""Checks that a training loop does nothing with attached objects that a restart could not repeat.

    check_sealed      what is attached moved between `attach` and the first step: that would happen once more
    (when made)       a scheduler is attached, and its optimizer is not kept
    check_schedulers  a scheduler moves rates that are kept, and is not attached itself
    check_reductions  gradients are averaged by what keeps a state, or in an order that follows from the steps before
    check_tracing     a pipeline that traced the model changed it
    check_groups      an optimizer was given parameters after `attach`
    check_replaced    a parameter of the model is another one than at `attach`
    check_shapes      a buffer or parameter of the model has another shape than at `attach`, or was not there
    check_kept        an optimizer keeps in attributes what moves with its steps, or an attached module in buffers and
                      states of metrics that are in no state_dict, and nothing brings them back
    (on every step)   an optimizer that is not attached steps parameters of the model

All are found while training runs undisturbed, long before a restart needs it; of shapes the log is told, since a cache
may have its first one again by then. `attachment.py` says when each is due.
What leaves no trace in anything that is attached (a warm-up around an optimizer, a `ReduceLROnPlateau`) is not seen
here: `torch-ecrec rehearse` finds it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torch_ecrec.compat.torch import communication_hooks, is_scheduled, is_torchs_own, transient_buffers, version_of
from torch_ecrec.compat.torchrec import wrapped_module
from torch_ecrec.nn.dense import buffers_of, dense_parameters
from torch_ecrec.nn.local_shards import data_parallel
from torch_ecrec.nn.module_settings import ModuleSettings
from torch_ecrec.nn.reduce import OrderedMean
from torch_ecrec.resume import optimizer_steps
from torch_ecrec.resume.checksum import checksum_of_all
from torch_ecrec.resume.trainer_state import TrainerState

log = logging.getLogger(__name__)

SCHEDULERS = "lr_scheduler["  # what those are named that `attach` was given as such, before their number
THINGS_MOST, ITEMS_MOST, DEPTH_MOST = 2_000, 32, 3  # that are looked into for a scheduler
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_BEGINS_ANEW = "it would begin anew after a restart. Name it in"
_attached_somewhere: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # to any model of this process


class AttachmentChecks:
    """The checks of one attachment. Each raises a RuntimeError that says what to do instead, or logs a warning.

    Args:
        model: held weakly.
        state: what is attached.
        settings: of the model.
        left_out: gets what is not brought back after a restart, and is trained.
    """

    def __init__(
        self, model: nn.Module, state: TrainerState, settings: ModuleSettings, left_out: Callable[[str], None]
    ) -> None:
        self._model, self._state, self._settings = weakref.ref(model), state, settings
        self._left_out = left_out
        self._closed = False
        self._check_optimizers_are_kept()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(state.dense_optimizers)
        _attached_somewhere.update(state.dense_optimizers)
        optimizer_steps.watch(self._check_known)
        self._sealed = self._seal()
        self._groups = self._groups_now()
        # At `attach`; None: it was told
        self._shapes: dict[str, object] | None = _shapes_of(model, dense_parameters(model))
        self._parameters = {name: id(parameter) for name, parameter in dense_parameters(model)}
        self._attributes: dict[str, int] | None = None  # attributes after the first step
        self._unsaved: list[tuple[str, nn.Module, str]] | None = None  # what they are called, whose they are, which

    def close(self) -> None:
        """Stops watching optimizers. May be called again."""
        self._closed = True

    def _seal(self) -> dict[str, object]:
        """Returns a fingerprint by name (values, versions of tensors) that changes when something attached changes."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this was attached to is gone")
        found: dict[str, object] = {**self._state.encoded(), **self._versions(model)}
        for i, optimizer in enumerate(self._state.dense_optimizers):
            tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
            rates = [str(group.get("lr")) for group in optimizer.param_groups]
            found[f"optimizer {i} ({type(optimizer).__name__})"] = rates, [(id(t), version_of(t)) for t in tensors]
        return found

    @staticmethod
    def _versions(model: nn.Module) -> dict[str, object]:
        return {name: version_of(parameter) for name, parameter in dense_parameters(model)}

    def on_loaded(self, model: nn.Module) -> None:
        """Called after parameters were loaded: a script that goes on after a restart leaves that load out."""
        self._sealed.update(self._versions(model))

    def seal(self) -> None:
        """Notes the state of everything attached. None of it may change until `check_sealed`."""
        self._sealed = self._seal()

    def check_sealed(self, restored: bool) -> None:
        """Checks that nothing attached has changed since `attach`: after a restart it would change once more.

        Args:
            restored: this is after a restart: an error, and not a warning.
        """
        now, before, self._sealed = self._seal(), self._sealed, {}
        names = [name.removeprefix("stateful/") for name in now if now[name] != before.get(name)]
        if not names:
            return
        what = f"{', '.join(names)} changed between `attach` and the first step"
        if restored:
            raise RuntimeError(
                f"{what}, although training goes on from before: what a loop does there happens once more after each"
                " restart. Do it before `attach`, or at the end of a step or a pass; or set it to a value that depends"
                " on nothing but what was brought back"
            )
        log.warning("%s: after a restart that would happen again, and is refused if the values then differ", what)

    def check_schedulers(self) -> None:
        """Checks that a learning rate scheduler made for a kept optimizer is attached, too."""
        attached = _inside(self._state.stateful.values())  # what is attached may keep a scheduler for the user
        scheduled = {id(g) for thing in attached if not isinstance(thing, Optimizer) for g in _groups_of(thing)}
        for optimizer in self._kept_optimizers():
            if is_scheduled(optimizer):
                if any(id(group) not in scheduled for group in optimizer.param_groups):
                    raise RuntimeError(
                        f"a scheduler was made for {type(optimizer).__name__}, but not attached: {_BEGINS_ANEW}"
                        " `attach(lr_scheduler=...)`"
                    )

    def _kept_optimizers(self) -> list[Optimizer]:
        """Returns the optimizers that snapshots keep: those of the model's tables, and all that are attached."""
        named = [thing for thing in self._state.stateful.values() if isinstance(thing, Optimizer)]
        return [*self._state.all_optimizers, *named]

    def _kept_groups(self) -> set[int]:
        return {id(group) for optimizer in self._kept_optimizers() for group in optimizer.param_groups}

    def _check_optimizers_are_kept(self) -> None:
        """Checks that every attached scheduler sets learning rates of an optimizer that snapshots keep."""
        kept = self._kept_groups()
        for name, thing in self._state.stateful.items():
            if name.startswith(SCHEDULERS) or isinstance(thing, LRScheduler):
                if all(id(group) in kept for group in _groups_of(thing)):
                    continue
                raise RuntimeError(
                    f"{name} ({type(thing).__name__}) is attached, but the {type(thing.optimizer).__name__} whose"  # type: ignore[attr-defined]
                    " learning rates it sets is not: they would begin anew after a restart. Name that one, too, in"
                    " `attach(optimizer=[...])`"
                )

    def check_reductions(self) -> None:
        """Checks that dense gradients are averaged alike in every life.

        torch lays its buckets out anew after the first backward of a life. Where three or more trainers' values are
        added depends on the place in a bucket, so do the bits, unless they are added in trainer order (`reduce.py`).
        """
        model = self._model()
        for one in data_parallel(wrapped_module(model)) if isinstance(model, DistributedModelParallel) else ():
            trainers = dist.get_world_size(one.process_group)
            for hook, state in communication_hooks(one):
                keeps = state is not None and not isinstance(state, dist.ProcessGroup)
                if isinstance(state, OrderedMean) or (trainers < 3 and not keeps):
                    continue
                why = (
                    f"keeps a {type(state).__name__}, which nothing brings back"
                    if keeps
                    else f"adds the gradients of {trainers} trainers in an order that is another one after a restart"
                )
                said = f"{hook.__qualname__}, which averages dense gradients, {why}: other bits would follow"
                if not hook.__module__.startswith("torch."):
                    log.warning("%s, unless it is made for that; rehearse the script", said)
                    continue
                raise RuntimeError(
                    f"{said}. Leave it out (`register_comm_hook`, `allreduce_comm_precision`), or leave out `attach`,"
                    " if trainers never go on after a loss"
                )

    def check_tracing(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuses settings that changed while a pipeline was made: it traces the model, at each start again."""
        now = self._settings.changed()
        moved = sorted(
            f"{path}.{name}"
            for path in now.keys() | before.keys()
            for name in now.get(path, {}).keys() | before.get(path, {}).keys()
            if now.get(path, {}).get(name) != before.get(path, {}).get(name)
        )
        if moved:
            raise RuntimeError(
                f"{', '.join(moved)} changed while a pipeline was made, which traces"
                " the model, and would change once more after each restart. Keep counts in a buffer"
                " (`register_buffer`), which tracing leaves alone, and draw from the global generators"
            )

    def check_groups(self) -> None:
        """Checks that no optimizer was given parameters later on: a restart would not restore them."""
        if self._groups != self._groups_now():
            raise RuntimeError(
                "an optimizer was given parameters after `attach`: it would not have them after a restart, where"
                " `attach` comes first again. Add them before `attach`, with `requires_grad` False until they train"
            )

    def check_replaced(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Checks that parameters are those of `attach`: optimizers step these, and a restart brings these back."""
        others = [name for name, parameter in parameters if self._parameters.get(name, id(parameter)) != id(parameter)]
        if others:
            raise RuntimeError(
                f"{', '.join(others)} of the model were replaced after `attach`: no attached optimizer steps what they"
                " are now, and after a restart the first ones would be trained again. Replace parameters before"
                " `attach`; or change them in place (`parameter.copy_(...)`, `load_state_dict` without `assign`)"
            )

    def check_shapes(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Checks that no tensor came, went, or got another shape: a restart does not restore what does not fit.

        Args:
            parameters: the dense ones that the model has now.
        """
        model = self._model()
        if self._shapes is None or model is None or (now := _shapes_of(model, parameters)) == self._shapes:
            return
        names = sorted(name for name, _ in now.items() ^ self._shapes.items())
        self._shapes = None
        log.warning(
            "tensors of the model have other shapes than at `attach` (%s): if trainers are started again, training will"
            " not go on, since the script makes these as they were first. Give them the shapes that they keep, or run"
            " the model once, before `attach`",
            ", ".join(dict.fromkeys(names)),
        )

    def check_kept(self) -> None:
        """Checks that nothing else of what is attached changes with the steps than what a restart restores.

        That is `state`, `param_groups` and a `state_dict` of the optimizer's own, and the `state_dict` of a module.
        """
        now = self._attributes_now()
        before, self._attributes = self._attributes, now
        moved = [name for name, value in now.items() if before is not None and before.get(name, value) != value]
        if moved:
            of_modules = {label for label, _, _ in self._unsaved or ()}
            what_to_do = (
                "its state_dict does not have it. Register the buffer with `persistent=True`; of a metric, call"
                " `persistent(True)` first"
                if of_modules.issuperset(moved)
                else "nothing brings an attribute back. Keep it in the optimizer's `state` or `param_groups`, or give"
                " its class `state_dict` and `load_state_dict`, which have it"
            )
            raise RuntimeError(
                f"{', '.join(moved)} moves with the steps of what is attached, and would begin anew after a restart:"
                f" {what_to_do}"
            )

    def _attributes_now(self) -> dict[str, int]:
        """Returns a checksum for each attribute, by name, that no restart restores.

        They are of attached optimizers that are neither torch's nor TorchRec's and have no `state_dict` of their own,
        and of attached modules.
        """
        if self._unsaved is None:
            modules = [(name, one) for name, one in self._state.stateful.items() if isinstance(one, nn.Module)]
            self._unsaved = [
                (f"`{key}` of {name} ({type(one).__name__})", one, key)
                for name, module in modules
                for one, key in _unsaved_of(module)
            ]
        found = {label: checksum_of_all(getattr(one, key), ()) for label, one, key in self._unsaved}
        for i, optimizer in enumerate(self._state.dense_optimizers):
            kind = type(optimizer)
            if kind.__module__.startswith(("torch.", "torchrec.")) or kind.state_dict is not Optimizer.state_dict:
                continue
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, value in vars(optimizer).items():
                if not is_torchs_own(name) and not isinstance(value, (nn.Module, Optimizer, LRScheduler)):
                    found[f"`{name}` of optimizer {i} ({kind.__name__})"] = checksum_of_all(value, stepped)
        return found

    def _groups_now(self) -> list[list[int]]:
        return [[len(group["params"]) for group in o.param_groups] for o in self._state.dense_optimizers]

    def _check_known(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer that has stepped dense parameters of the model and is not attached."""
        if self._closed or optimizer in self._known or isinstance(optimizer, KeyedOptimizer):
            return
        model = self._model()
        if model is None:
            return
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        name = next((name for name, parameter in dense_parameters(model) if id(parameter) in owned), None)
        if name is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps {name}, but was not attached: its state would be lost when trainers"
                " are started again. Name every optimizer of dense parameters in `attach(optimizer=[...])`"
            )
        self._known.add(optimizer)
        named = any(thing is optimizer for thing in self._state.stateful.values())
        if not named and optimizer not in _attached_somewhere:
            log.warning(
                "%s steps parameters outside the model, and was not attached: neither they nor its state are brought"
                " back after a restart. Attach both by name, `attach(..., other=module, other_optimizer=optimizer)`",
                type(optimizer).__name__,
            )
            self._left_out(f"what {type(optimizer).__name__} steps outside the model is not attached, and began anew")


def _shapes_of(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, object]:
    tensors = (*buffers_of(model), *parameters)
    return {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}


def _unsaved_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields what the `state_dict` of a module leaves out: each time the module within, and the attribute's name."""
    metrics: Any = sys.modules.get("torchmetrics")
    usual = [nn.Module.state_dict, *([metrics.Metric.state_dict] if metrics else [])]
    for one in module.modules():
        kind = type(one)
        if kind.state_dict not in usual or kind.get_extra_state is not nn.Module.get_extra_state:
            continue  # what that has is for the module to say
        if not kind.__module__.startswith("torchrec."):
            yield from ((one, name) for name in sorted(transient_buffers(one)))
            if metrics and isinstance(one, metrics.Metric):
                whole: Any = copy.deepcopy(one)
                whole.persistent(True)
                yield from ((one, name) for name in sorted(whole.state_dict().keys() - one.state_dict().keys()))


def _groups_of(thing: object) -> list[Mapping[str, Any]]:
    """Returns the parameter groups whose learning rates a scheduler or an optimizer sets."""
    optimizer = thing if isinstance(thing, Optimizer) else getattr(thing, "optimizer", None)
    return list(optimizer.param_groups) if isinstance(optimizer, Optimizer) else []


def _inside(things: Iterable[object]) -> list[object]:
    """Returns some objects, and the objects they have as attributes, in lists and in dicts."""
    found: dict[int, object] = {}

    def look(thing: object, left: int) -> None:
        plain = isinstance(thing, (*_PLAIN, type, ModuleType, Tensor))
        if id(thing) in found or plain or len(found) > THINGS_MOST:
            return
        found[id(thing)] = thing
        if left:
            items: Iterable[object] = ()
            if isinstance(thing, (list, tuple)):
                items = thing[:ITEMS_MOST]
            elif isinstance(thing, dict):
                items = itertools.islice(thing.values(), ITEMS_MOST)
            elif not isinstance(thing, nn.Module):
                items = getattr(thing, "__dict__", {}).values()
            for item in list(items):
                look(item, left - 1)

    for thing in things:
        look(thing, DEPTH_MOST)
    return list(found.values())
