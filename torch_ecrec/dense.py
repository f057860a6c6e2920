"""The dense part of a model as bytes: parameters, buffers and the state of its optimizers, in equal parts for the
trainers.

Every trainer holds the same dense state (data parallel), so each hands over one part of it: with 1,000 bytes and 3
trainers, trainer 0 packs bytes [0, 334), 1 [334, 668), 2 [668, 1000). `unpack` joins the parts, `load_` puts them into
a model.

    payload  uint8, contiguous: tensors one behind the other, in the order of the header, without padding
             then what the trainer keeps of its own
    header   JSON: step, part, parts, bytes, begin, own (bytes of that); `tensors` (name, dtype, shape, offset);
             `optimizers`: class, hyperparameters of every group, and state values that are not tensors

Names: `parameter/<fqn>`, `buffer/<fqn>`, `optimizer/<i>/<fqn>/<key>` for state, `optimizer/<i>/<group>/<key>` for
hyperparameters that are tensors. i counts optimizers in the order of their first step.

Optimizers are found without the user's help: a hook that torch runs after every optimizer's step keeps those that own a
parameter of this model. TorchRec's keyed wrappers are passed over in favour of the torch optimizers inside them.

Does not contain embedding rows (the servers hold them), and does not know what a trainer keeps of its own
(`nn/trainer_state.py`). Does not send anything.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torch_ecrec import shared

_SCALARS = (bool, int, float, str, type(None))


class DenseSnapshot:
    """Packs one trainer's part of a model's dense state.

    Args:
        model: held weakly. Parameters that TorchRec has sharded are left out: they differ from trainer to trainer.
        part, parts: which part this trainer packs, 0 <= part < parts.
    """

    def __init__(self, model: nn.Module, part: int, parts: int) -> None:
        if not 0 <= part < parts:
            raise ValueError(f"`part` must be at least 0 and less than `parts`, got {part} of {parts}")
        self.part, self.parts = part, parts
        self._model = weakref.ref(model)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        me = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            snapshot = me()
            if snapshot is not None:
                snapshot._notice(optimizer)

        self._hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, self._hook.remove)

    def close(self) -> None:
        """Stops looking for optimizers. Twice is once."""
        self._hook.remove()

    def _notice(self, optimizer: Optimizer) -> None:
        model = self._model()
        if model is None or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if isinstance(optimizer, KeyedOptimizer):
            return
        dense = {id(parameter) for _, parameter in dense_parameters(model)}
        if any(id(parameter) in dense for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.append(weakref.ref(optimizer))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those found so far, in the order of their first step."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def use(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes these optimizers, in this order, rather than those that are found: those that own a dense parameter."""
        model = self._model()
        assert model is not None
        dense = {id(parameter) for _, parameter in dense_parameters(model)}
        self._hook.remove()
        self._optimizers = [
            weakref.ref(optimizer)
            for optimizer in optimizers
            if any(id(parameter) in dense for group in optimizer.param_groups for parameter in group["params"])
        ]

    def pack(self, step: int, own: bytes = b"") -> tuple[Tensor, str]:
        """This trainer's part of the state after `step`: a fresh buffer that nobody writes to later, and its header.

        Args:
            step: of the header.
            own: what this trainer alone has; kept behind its part, see `own_of`.

        Raises:
            RuntimeError: the model is gone.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this snapshot is gone")
        tensors, optimizers = _collect(model, self.optimizers)
        offsets = list(itertools.accumulate((tensor.nbytes for _, tensor in tensors), initial=0))
        total = offsets.pop()
        size = -(-total // self.parts)
        begin = min(self.part * size, total)
        end = min(begin + size, total)
        payload = torch.from_numpy(shared.empty((end - begin + len(own),), np.uint8))
        if own:
            payload[end - begin :] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        for (_, tensor), offset in zip(tensors, offsets, strict=True):
            low, high = max(begin, offset), min(end, offset + tensor.nbytes)
            if low < high:
                payload[low - begin : high - begin] = _as_bytes(tensor)[low - offset : high - offset]
        index = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
            for (name, tensor), offset in zip(tensors, offsets, strict=True)
        ]
        header = {
            "step": step,
            "part": self.part,
            "parts": self.parts,
            "bytes": total,
            "begin": begin,
            "own": len(own),
            "tensors": index,
            "optimizers": optimizers,
        }
        return payload, json.dumps(header, separators=(",", ":"))


def unpack(parts: Sequence[tuple[Tensor, str]]) -> dict[str, Any]:
    """Joins the parts of one step, in any order.

    Returns:
        `step`, `tensors` (name -> tensor that owns its memory) and `optimizers` (as in the header).

    Raises:
        ValueError: a part is missing, there twice, of another step, or of another length than its header says.
    """
    headers = [json.loads(header) for _, header in parts]
    steps = sorted({header["step"] for header in headers})
    if len(steps) != 1:
        raise ValueError(f"parts of exactly one step are needed, got steps {steps}")
    wanted = headers[0]["parts"]
    if sorted(header["part"] for header in headers) != list(range(wanted)):
        raise ValueError(f"step {steps[0]}: need parts 0 to {wanted - 1}, got {sorted(h['part'] for h in headers)}")
    buffer = torch.empty(headers[0]["bytes"], dtype=torch.uint8)
    filled = 0
    for (part, _), header in sorted(zip(parts, headers, strict=True), key=lambda pair: pair[1]["begin"]):
        payload = part[: part.numel() - header["own"]]
        if header["begin"] != filled or header["tensors"] != headers[0]["tensors"]:
            raise ValueError(f"step {steps[0]}: part {header['part']} does not fit the others")
        if filled + payload.numel() > len(buffer):
            raise ValueError(f"step {steps[0]}: part {header['part']} is too long")
        buffer[filled : filled + payload.numel()] = payload
        filled += payload.numel()
    if filled != len(buffer):
        raise ValueError(f"step {steps[0]}: the parts hold {filled} bytes, the headers say {len(buffer)}")
    tensors = {}
    for name, dtype_name, shape, offset in headers[0]["tensors"]:
        out = torch.empty(shape, dtype=getattr(torch, dtype_name))
        _as_bytes(out).copy_(buffer[offset : offset + out.nbytes])
        tensors[name] = out
    return {"step": steps[0], "tensors": tensors, "optimizers": headers[0]["optimizers"]}


def own_of(payload: Tensor, header: str) -> bytes:
    """What a trainer had given to `pack` as its own."""
    size = json.loads(header)["own"]
    return payload[payload.numel() - size :].numpy().tobytes()


def load_(model: nn.Module, optimizers: Sequence[Optimizer], parts: Sequence[tuple[Tensor, str]]) -> int:
    """Puts a snapshot into a model and its optimizers, in place.

    Args:
        model: of the same architecture. Mutated.
        optimizers: torch optimizers over its dense parameters, in the order in which they first step. Mutated.
        parts: payload and header of every part of one step.

    Returns:
        The step of the snapshot.

    Raises:
        ValueError: names, shapes or optimizers differ; nothing was changed then.
    """
    state = unpack(parts)
    tensors: dict[str, Tensor] = state["tensors"]
    named = dict(dense_parameters(model))
    targets: dict[str, Tensor] = {f"parameter/{name}": parameter for name, parameter in named.items()}
    targets |= {f"buffer/{name}": buffer for name, buffer in _buffers(model)}
    stored = {name for name in tensors if not name.startswith("optimizer/")}
    if stored != targets.keys():
        raise ValueError(f"the model and the snapshot differ in {', '.join(sorted(stored ^ targets.keys()))}")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise ValueError(f"{name}: shape {tuple(target.shape)} here, {tuple(tensors[name].shape)} in the snapshot")
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    if kinds != [entry["class"] for entry in state["optimizers"]]:
        raise ValueError(f"optimizers {kinds} given, {[e['class'] for e in state['optimizers']]} in the snapshot")
    name_of = {id(parameter): name for name, parameter in named.items()}
    for optimizer, entry in zip(optimizers, state["optimizers"], strict=True):
        owned = [[name_of.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        if owned != [group["params"] for group in entry["groups"]]:
            raise ValueError(f"{entry['class']} owns other parameters here than in the snapshot")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    for i, (optimizer, entry) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        _load_optimizer(optimizer, f"optimizer/{i}/", entry, tensors, named)
    step: int = state["step"]
    return step


def _load_optimizer(
    optimizer: Optimizer,
    prefix: str,
    entry: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    named: Mapping[str, nn.Parameter],
) -> None:
    for g, (group, saved) in enumerate(zip(optimizer.param_groups, entry["groups"], strict=True)):
        for key, value in saved["values"].items():
            group[key] = tuple(value) if isinstance(value, list) else value
        for key in saved["tensors"]:
            value, now = tensors[f"{prefix}{g}/{key}"], group.get(key)
            group[key] = value.to(now.device, copy=True) if isinstance(now, Tensor) else value.clone()
    for name, keys in entry["state"].items():
        parameter = named[name]
        state = dict(keys["values"])
        for key, on_device in keys["tensors"].items():
            value = tensors[f"{prefix}{name}/{key}"]
            state[key] = value.to(parameter.device) if on_device else value
        optimizer.state[parameter] = state


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The data-parallel parameters: under TorchRec's DMP without the sharded ones."""
    sharded: set[str] = set()
    if isinstance(model, DistributedModelParallel):
        sharded = set(DistributedModelParallel._sharded_parameter_names(model))
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in sharded)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return iter(model.named_buffers())


def _collect(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[list[tuple[str, Tensor]], list[dict[str, Any]]]:
    """Every tensor of the state under its name, and everything else as JSON values."""
    named = list(dense_parameters(model))
    tensors: list[tuple[str, Tensor]] = [(f"parameter/{name}", parameter.detach()) for name, parameter in named]
    tensors += [(f"buffer/{name}", buffer.detach()) for name, buffer in _buffers(model)]
    name_of = {id(parameter): name for name, parameter in named}
    entries = []
    for i, optimizer in enumerate(optimizers):
        groups, states = [], {}
        for g, group in enumerate(optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key != "params"}
            in_tensors = [key for key, value in hyper.items() if isinstance(value, Tensor)]
            tensors += [(f"optimizer/{i}/{g}/{key}", hyper[key].detach()) for key in in_tensors]
            values = {key: value for key, value in hyper.items() if _is_plain(value)}
            names = [name_of.get(id(parameter)) for parameter in group["params"]]
            groups.append({"params": names, "values": values, "tensors": in_tensors})
            for name, parameter in zip(names, group["params"], strict=True):
                state = optimizer.state.get(parameter)
                if name is None or not state:
                    continue
                mine = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                tensors += [(f"optimizer/{i}/{name}/{key}", value.detach()) for key, value in mine.items()]
                states[name] = {
                    "tensors": {key: value.device == parameter.device for key, value in mine.items()},
                    "values": {key: value for key, value in state.items() if _is_plain(value)},
                }
        entries.append({"class": type(optimizer).__name__, "groups": groups, "state": states})
    return tensors, entries


def _is_plain(value: Any) -> bool:
    """Whether JSON brings a value back as it was (lists become tuples)."""
    return isinstance(value, _SCALARS) or (isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes (uint8, one dimension) of a tensor, where it is: a view of a contiguous one, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
