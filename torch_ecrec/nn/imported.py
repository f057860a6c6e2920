"""The dense model of an imported checkpoint: what TorchRec saved of it becomes the snapshot of step 0.

A snapshot of a cluster has all that a script attaches, and brings it back. This one has what a folder of DCP has under
the model's names, and of its optimizers; so `attach` puts that there, and leaves the rest as the script has made it:
random states, the reader's place, schedulers, hyperparameters. Its optimizers are one entry, without a class:

    over.0.weight -> {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}

With no tensor in it, the script has the dense model, too, and loads it before `attach` or not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_ecrec.compat.torch import own_buffers, transient_buffers
from torch_ecrec.nn.dense import buffers_of, dense_parameters, further_names, meet_columns, part_of, unpack
from torch_ecrec.records.positions import Bytes
from torch_ecrec.resume import values
from torch_ecrec.resume.tensor_bytes import TensorsOut, bytes_of
from torch_ecrec.state_dicts.columns import Found

log = logging.getLogger(__name__)

CLASS = "imported"
_INSTEAD = "Import the tables alone (--tables-only), and load the dense model in the script, before `attach`"


def packed(
    trainers: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    tables: Mapping[str, tuple[str, str]],
    columns: Mapping[str, Found] | None = None,
) -> list[tuple[list[int], Bytes]]:
    """Returns every trainer's part of the imported dense model: its header, and its payload (n,) uint8.

    Args:
        trainers: how many.
        tensors: parameters and buffers, by name.
        state: of optimizers, by the parameter's name.
        tables, columns: as of `State`.
    """
    out = TensorsOut()
    entry = {
        "class": CLASS,
        "params": [],
        "groups": [],
        "state": [(name, None, values.encode(dict(of_one), name, out)) for name, of_one in state.items()],
        "more": values.encode({}, CLASS),
    }
    index = values.encode(
        {
            "parameters": dict(tensors),
            "replicated": {},
            "optimizers": [entry] if state else [],
            "tables": dict(tables),
            "columns": {path: found.plain() for path, found in (columns or {}).items()},
        },
        "the dense state",
        out,
    )
    whole = values.encode({"buffers": {}, "shards": {}, "optimizers": []}, "the dense state")
    parts = [part_of(0, (trainer, trainers), (index, out, whole)) for trainer in range(trainers)]
    return [(header, np.asarray(payload)) for payload, header in parts]


def begin_with_(
    model: nn.Module, optimizers: Sequence[Optimizer], parts: Sequence[tuple[Tensor, Sequence[int]]]
) -> None:
    """Loads the imported state into a model and its optimizers, in place.

    Args:
        model: mutated.
        optimizers: torch's, over its dense parameters. Mutated.
        parts: payload and header of every trainer's part.

    Raises:
        ValueError: names, shapes or dtypes differ, or state is of a parameter that none of `optimizers` steps; nothing
            was changed then.
        CheckpointError: features came in another order than the model's plan has them; nothing was changed either.
    """
    found = unpack(parts)
    state: dict[str, Mapping[str, Any]] = {}
    for entry in found.optimizers:
        state |= {place: values.decode(data, found.tensors, "cpu") for place, _, data in entry["state"]}
    if not found.parameters and not state:
        log.info("the checkpoint that training begins with has tables only: the dense model is the script's")
        return meet_columns(model, found)
    targets, further = dict(dense_parameters(model)) | dict(buffers_of(model)), further_names(model)
    given = _under_first_names(found.parameters, further)
    _check(targets, given, _passing(model))
    stepped = _state_of(model, optimizers, {further.get(name, name): of_one for name, of_one in state.items()})
    meet_columns(model, found)
    with torch.no_grad():
        for name, value in given.items():
            targets[name].copy_(value)
    for optimizer, parameter, of_one in stepped:
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if value.dim() else value for key, value in of_one.items()
        }


def _under_first_names(given: Mapping[str, Tensor], further: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns tensors that state dicts have under several names under the first. Raises ValueError where they differ
    from each other: of a model that has several in place of one."""
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        first = further.get(name, name)
        if not _same(found.setdefault(first, value), value):
            raise ValueError(
                f"the checkpoint has other numbers in {name} than in {first}, which are one tensor of the model."
                f" {_INSTEAD}"
            )
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one is other or (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(bytes_of(one), bytes_of(other))


def _check(targets: Mapping[str, Tensor], given: Mapping[str, Tensor], passing: Collection[str]) -> None:
    lacks, more = sorted(targets.keys() - given.keys() - set(passing)), sorted(given.keys() - targets.keys())
    if lacks or more:
        raise ValueError(
            f"the dense model of the checkpoint is another one: it lacks {', '.join(lacks) or 'nothing'}, and has"
            f" {', '.join(more) or 'nothing'} that the model has not. {_INSTEAD}"
        )
    for name, value in given.items():
        target = targets[name]
        if is_lazy(target):
            raise ValueError(f"{name} has no shape yet; run the model once before `attach`")
        here, there = (tuple(target.shape), target.dtype), (tuple(value.shape), value.dtype)
        if here != there:
            raise ValueError(
                f"{name} is {here[1]} of shape {here[0]} here, the checkpoint has {there[1]} of {there[0]}"
            )


def _passing(model: nn.Module) -> set[str]:
    """Returns the names of non-persistent buffers. State dicts lack them, and so TorchRec's checkpoints do."""
    passing = {id(own_buffers(one)[name]) for one in model.modules() for name in transient_buffers(one)}
    return {name for name, buffer in buffers_of(model) if id(buffer) in passing}


def _state_of(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Mapping[str, Any]]
) -> list[tuple[Optimizer, nn.Parameter, Mapping[str, Any]]]:
    """Pairs optimizers and parameters with their imported state. Raises ValueError as `begin_with_`."""
    names = {id(parameter): name for name, parameter in dense_parameters(model)}
    stepped = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None and name in state:
                    stepped.append((optimizer, parameter, state[name]))
    left = sorted(state.keys() - {names[id(parameter)] for _, parameter, _ in stepped})
    if left:
        raise ValueError(
            f"the checkpoint has optimizer state of {', '.join(left)}, which no attached optimizer steps: name all in"
            " `attach(optimizer=...)`, or import without it (--tables-only)"
        )
    return stepped
