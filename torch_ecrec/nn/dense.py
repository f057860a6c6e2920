"""The dense part of a model as bytes: parameters and optimizer state, divided equally among the trainers.

Every trainer holds the same dense state (data parallel), so each hands over one part of it: with 1,000 bytes and 3
trainers, trainer 0 packs bytes [0, 334), 1 [334, 668), 2 [668, 1000). What may differ from trainer to trainer (buffers,
say the running means of a BatchNorm; parameters that are not the model's; tables that TorchRec shards, see
`local_shards.py`) each keeps whole, with its part. `unpack`
joins the parts, `load_` puts them into a model.

    stream   what all trainers have: the index, then the tensors one behind the other, without padding
    index    `values.encode` of all that is not a tensor: names, dtypes, shapes, where each tensor lies; of every
             optimizer its class, the hyperparameters of its groups, and what it has in `state`, whatever that is
    payload  uint8, contiguous: a trainer's part of the stream, what it keeps whole, what else it was given as its own
    header   a few integers (`Header`). Says nothing of the model: the index does, which is there once, not per trainer

A part is of use with all the others of its step only. That they are of one index is checked by its digest.

Kept exactly, or refused by name (TypeError): nothing of an optimizer's `state` and `param_groups` is left out. What an
optimizer keeps elsewhere, in attributes of its own, is kept if its `state_dict` has it.

Optimizers are found without the user's help: a hook that torch runs after every optimizer's step keeps those that own a
parameter of this model. TorchRec's keyed wrappers are passed over in favour of the torch optimizers inside them.

Does not contain embedding rows (the servers hold them), and does not know what a trainer keeps of its own
(`nn/attachment.py`). Does not send anything.
"""

from __future__ import annotations

import abc
import bisect
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from torch_ecrec.compat.torch import children_of, has_state_dict_hooks, own_buffers, own_parameters
from torch_ecrec.compat.torchrec import sharded_names
from torch_ecrec.nn.local_shards import LocalShards, replicated_tables
from torch_ecrec.resume import optimizer_steps, values
from torch_ecrec.resume.tensor_bytes import TensorsIn, TensorsOut, bytes_of
from torch_ecrec.runtime import shared
from torch_ecrec.state_dicts.columns import Columns, Found

NUMBERS_MOST = 1 << 48  # of a header; the transport takes no larger ones
_USUAL = {"state", "param_groups"}  # of an optimizer's state_dict


class Replicated(abc.ABC):
    """A module whose state, beside its parameters, is the same on all trainers. Its buffers belong to that state."""

    @abc.abstractmethod
    def made_with(self) -> list[str]:
        """Returns, for each table, what decides how that state moves."""

    @abc.abstractmethod
    def replicated_state(self) -> dict[str, Any]:
        """Returns that state. Tensors are shared with the module: they are encoded before they change."""

    @abc.abstractmethod
    def load_replicated_state(self, state: Mapping[str, Any]) -> None:
        """Restores that state. Raises ValueError, and changes nothing, if it does not fit."""


class WithTables(abc.ABC):
    """A module whose embedding rows are on the servers."""

    @abc.abstractmethod
    def keys_of_tables(self) -> dict[str, tuple[str, str]]:
        """Returns, by table name in the job, its weights' key in the module's state dict and its name there."""

    @abc.abstractmethod
    def made_with(self) -> list[str]:
        """Returns, for each table, what decides which outputs its rows make, beside their order."""

    columns: Columns
    """The order of the features that it gives out: a dense layer behind it has its weights in that order."""


class Header(NamedTuple):
    """Describes the payload that it goes with. It is sent and kept as a list of integers."""

    step: int
    part: int  # 0 <= part < parts
    parts: int
    stream_bytes: int  # bytes of all parts together
    index_bytes: int  # the first ones of the stream
    digest: int  # hash of the index
    whole_bytes: int  # in the payload, behind the part of the stream: what this trainer keeps whole
    own_bytes: int  # in the payload, last

    @property
    def span(self) -> tuple[int, int]:
        """Returns the byte range [begin, end) of the stream that this part holds."""
        size = -(-self.stream_bytes // self.parts)
        begin = min(self.part * size, self.stream_bytes)
        return begin, min(begin + size, self.stream_bytes)

    @staticmethod
    def of(numbers: Sequence[int], payload: Tensor) -> Header:
        """Returns the header that came with a payload.

        Raises:
            ValueError: it is no header, or that of another payload.
        """
        fields = Header._fields
        if len(numbers) != len(fields) or not all(type(n) is int and 0 <= n <= NUMBERS_MOST for n in numbers):
            raise ValueError(f"a header must have {len(fields)} integers from 0 to {NUMBERS_MOST}, got {numbers!r}")
        header = Header(*numbers)
        if header.part >= header.parts or header.index_bytes > header.stream_bytes:
            raise ValueError(f"no part of a snapshot has this header: {header}")
        begin, end = header.span
        size = end - begin + header.whole_bytes + header.own_bytes
        if payload.dtype != torch.uint8 or payload.dim() != 1 or len(payload) != size:
            raise ValueError(
                f"step {header.step}, part {header.part}: the header is of {size} bytes,"
                f" got {payload.dtype} of shape {tuple(payload.shape)}"
            )
        return header


class DenseSnapshot:
    """Packs one trainer's part of a model's dense state.

    Args:
        model: held weakly. Parameters that TorchRec has sharded are left out: they differ from trainer to trainer.
        part, parts: which part this trainer packs, 0 <= part < parts.
        every: it is kept after each step that is a multiple of it (see `is_due`); 0: never. Its users ask; may be set.
        shards: what this trainer has of tables that TorchRec shards.

    Attributes:
        last: the step that was kept last, or that training goes on after.
        counters: parameters under which wrappers count (warm-up does) in the `state` of an optimizer that does not own
            them: `TrainerState` keeps that. None: nothing is attached, and nobody will go back to a snapshot.
    """

    def __init__(
        self, model: nn.Module, part: int, parts: int, every: int = 1, shards: LocalShards | None = None
    ) -> None:
        if not 0 <= part < parts:
            raise ValueError(f"`part` must be at least 0 and less than `parts`, got {part} of {parts}")
        self.part, self.parts, self.every, self.last = part, parts, every, 0
        self._model = weakref.ref(model)
        self.shards = LocalShards({}) if shards is None else shards
        self.counters: Sequence[Tensor] | None = None
        self._further: dict[str, str] | None = None  # names; once they were looked for
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._looks = True
        optimizer_steps.watch(self._notice)

    def close(self) -> None:
        """Stops watching for optimizers. May be called again."""
        self._looks = False

    def _notice(self, optimizer: Optimizer) -> None:
        model = self._model()
        if not self._looks or model is None or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if isinstance(optimizer, KeyedOptimizer):
            return
        dense = {id(parameter) for _, parameter in dense_parameters(model)}
        if any(id(parameter) in dense for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.append(weakref.ref(optimizer))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers found so far, in the order of their first step."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def use(self, optimizers: Sequence[Optimizer]) -> None:
        """Uses these optimizers, in this order, instead of those that are found."""
        self._looks = False
        once = {id(optimizer): optimizer for optimizer in optimizers}
        self._optimizers = [weakref.ref(optimizer) for optimizer in once.values()]

    def is_due(self, step: int) -> bool:
        """Returns whether the state after `step` has yet to be kept.

        A turn of a loop may make several steps. If one within it is a multiple of `every`, the last of the turn stands
        for it.
        """
        return self.every > 0 and step // self.every > self.last // self.every

    def check(self) -> None:
        """Raises unless all state that there is now can be kept. The first steps may add more: `pack` checks again.

        Raises:
            TypeError: something cannot be kept; says what.
            RuntimeError: the model is gone.
        """
        self.content()

    def content(self) -> tuple[bytes, TensorsOut, bytes]:
        """Returns the state as it is now: the index, the tensors it refers to, and what this trainer keeps whole.

        Raises:
            TypeError, RuntimeError: as `check`.
        """
        model = self._the_model()
        if self._further is None:
            self._further = further_names(model)
        return _collect(model, self.optimizers, self.shards, self.counters, self._further)

    def pack(self, step: int, own: bytes = b"") -> tuple[Tensor, list[int]]:
        """Returns this trainer's part of the state after `step` and its header. The part is a new buffer of its own.

        Args:
            step: of the header.
            own: what this trainer alone has; kept behind its part, see `own_of`.

        Raises:
            TypeError: something cannot be kept; says what.
            RuntimeError: the model is gone.
        """
        index, out, whole = self.content()
        self.last = step
        return part_of(step, (self.part, self.parts), (index, out, whole), own)

    def _the_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this snapshot is gone")
        return model


def part_of(
    step: int, place: tuple[int, int], content: tuple[bytes, TensorsOut, bytes], own: bytes = b""
) -> tuple[Tensor, list[int]]:
    """Returns one trainer's part of what all trainers have alike, in a new buffer, and its header.

    Args:
        step: of the header.
        place: which part, of how many.
        content: the index, the tensors behind it, what this trainer keeps whole.
        own: what it has besides.
    """
    (part, parts), (index, out, whole) = place, content
    stream_bytes = len(index) + out.bytes
    header = Header(step, part, parts, stream_bytes, len(index), _digest(index), len(whole), len(own))
    begin, end = header.span
    payload = shared.empty((end - begin + len(whole) + len(own),), np.uint8)
    behind = memoryview(payload)[end - begin :]  # type: ignore[arg-type]
    behind[: len(whole)], behind[len(whole) :] = whole, own
    if begin < len(index):
        mine = index[begin:end]
        payload[: len(mine)] = np.frombuffer(mine, np.uint8)
    found = torch.from_numpy(payload)
    first = bisect.bisect_right(out.offsets, begin - len(index)) - 1
    for i in range(max(first, 0), bisect.bisect_left(out.offsets, end - len(index))):
        tensor, offset = out.tensors[i], len(index) + out.offsets[i]
        low, high = max(begin, offset), min(end, offset + tensor.nbytes)
        if low < high:
            found[low - begin : high - begin] = bytes_of(tensor)[low - offset : high - offset]
    return found, list(header)


# reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A snapshot whose parts were joined. Optimizers: `class`, `groups`, `state`, `more`, encoded by `_collect`."""

    step: int
    parameters: dict[str, Tensor]  # by name
    replicated: dict[str, dict[str, Any]]  # by path of the module
    optimizers: list[dict[str, Any]]
    tensors: TensorsIn  # those of the optimizers
    whole: list[bytes]  # what each trainer has kept whole
    tables: dict[str, tuple[str, str]]  # see `WithTables`, with the path of the module before the key
    columns: dict[str, Found]  # by path of a module with tables: the order of its features
    further: dict[str, str]  # see `further_names`

    def buffers(self, part: int) -> dict[str, Tensor]:
        """Returns the buffers of a trainer, by name."""
        found: dict[str, Tensor] = values.decode(self.whole[part], device="cpu")["buffers"]
        return found


def unpack(parts: Sequence[tuple[Tensor, Sequence[int]]]) -> State:
    """Joins the parts of one step's snapshot, given in any order.

    Raises:
        ValueError: a part is missing, there twice, of another step or model, or not what its header says.
    """
    pairs = sorted(((Header.of(numbers, payload), payload) for payload, numbers in parts), key=lambda pair: pair[0])
    steps = sorted({header.step for header, _ in pairs})
    if len(steps) != 1:
        raise ValueError(f"parts of exactly one step are needed, got steps {steps}")
    step, first = steps[0], pairs[0][0]
    there = [header.part for header, _ in pairs]
    if there != list(range(first.parts)):
        raise ValueError(f"step {step}: need parts 0 to {first.parts - 1}, got {there}")
    for header, _ in pairs:
        if header[2:6] != first[2:6]:
            raise ValueError(
                f"step {step}: part {header.part} does not fit the others; were the dense state's names, shapes,"
                " hyperparameters or other plain values not the same on all trainers?"
            )
    spans = [(header, payload, header.span[1] - header.span[0]) for header, payload in pairs]
    stream = torch.cat([payload[:size] for _, payload, size in spans])
    index = stream[: first.index_bytes].numpy().tobytes()
    if _digest(index) != first.digest:
        raise ValueError(f"step {step}: the index is not the one that was packed")
    tensors = TensorsIn(stream[first.index_bytes :])
    content = values.decode(index, tensors, "cpu")
    whole = [payload[size : size + header.whole_bytes].numpy().tobytes() for header, payload, size in spans]
    wanted = {"parameters", "replicated", "optimizers", "tables"}
    if type(content) is not dict or content.keys() - {"columns", "further"} != wanted:
        raise ValueError(f"step {step}: the index is not one of a dense state")
    try:
        columns = {path: Found.of_plain(found) for path, found in content.pop("columns", {}).items()}
        further = {str(name): str(first) for name, first in content.pop("further", {}).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"step {step}: the index does not say in which order features come: {error}") from error
    return State(step, tensors=tensors, whole=whole, columns=columns, further=further, **content)


def own_of(payload: Tensor, header: Sequence[int]) -> bytes:
    """Returns the bytes that a trainer gave to `pack` as its own. Raises ValueError for another payload's header."""
    size = Header.of(header, payload).own_bytes
    return payload[payload.numel() - size :].numpy().tobytes()


def load_(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    parts: Sequence[tuple[Tensor, Sequence[int]]],
    part: int,
    shards: LocalShards | None = None,
) -> int:
    """Restores a model and its optimizers from a snapshot, in place.

    Args:
        model: of the same architecture. Mutated.
        optimizers: torch optimizers over its dense parameters, in the order in which they first step. Mutated.
        parts: payload and header of every part of one step.
        part: the part that this trainer had packed. State that differs from trainer to trainer is taken from it.
        shards: what it has of tables that TorchRec shards. Mutated.

    Returns:
        The step of the snapshot.

    Raises:
        ValueError: names, shapes, dtypes or optimizers differ; nothing was changed then.
        CheckpointError: features came in another order than the model's plan has them; nothing was changed either.
    """
    state = unpack(parts)
    if not 0 <= part < len(state.whole):
        raise ValueError(f"`part` must be at least 0 and less than {len(state.whole)}, got {part}")
    try:
        copies, saved = _fitting(model, optimizers, state, part, shards or LocalShards({}))
    except (LookupError, TypeError, AttributeError) as error:  # bytes of another program
        raise ValueError(f"step {state.step}: not what a trainer keeps: {error!r}") from error
    for one in saved:
        one.load_more()
    for path, module in _replicated(model):
        module.load_replicated_state(state.replicated[path])
    with torch.no_grad():
        for target, value in copies:
            target.copy_(value)
    for one in saved:
        one.load_()
    return state.step


_Copies = list[tuple[Tensor, Tensor]]  # to, from


def _fitting(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, part: int, shards: LocalShards
) -> tuple[_Copies, list[_SavedOptimizer]]:
    """Returns which values go where, and the saved optimizers. Changes nothing; raises ValueError as `load_` does."""
    whole = values.decode(state.whole[part], device="cpu")
    copies = _copies("parameters", dict(dense_parameters(model)), state.parameters)
    copies += _copies("buffers", dict(buffers_of(model)), whole["buffers"])
    copies += _copies("tables of TorchRec", shards.tensors(), whole["shards"])
    paths = {path for path, _ in _replicated(model)}
    if state.replicated.keys() != paths:
        differ = ", ".join(sorted(state.replicated.keys() ^ paths))
        raise ValueError(f"the model and the snapshot differ in what trainers have alike: {differ}")
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    if kinds != [entry["class"] for entry in state.optimizers]:
        raise ValueError(f"optimizers {kinds} given, {[e['class'] for e in state.optimizers]} in the snapshot")
    names = {id(parameter): name for name, parameter in dense_parameters(model)}
    saved = [
        _SavedOptimizer(optimizer, entry, mine, state.tensors, names)
        for optimizer, entry, mine in zip(optimizers, state.optimizers, whole["optimizers"], strict=True)
    ]
    for one in saved:
        copies += one.strangers
    meet_columns(model, state)
    return copies, saved


def _copies(kind: str, targets: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> _Copies:
    """Pairs each target tensor with its stored value. Raises ValueError if names, shapes or dtypes differ."""
    if stored.keys() != targets.keys():
        differ = ", ".join(sorted(stored.keys() ^ targets.keys()))
        raise ValueError(f"the model and the snapshot differ in {kind} {differ}")
    for name, target in targets.items():
        if is_lazy(target):
            raise ValueError(f"{kind} {name}: has no shape yet; run the model once before")
        here, there = (tuple(target.shape), target.dtype), (tuple(stored[name].shape), stored[name].dtype)
        if here != there:
            raise ValueError(
                f"{kind} {name}: shape {here[0]}, {here[1]} here; shape {there[0]}, {there[1]} in the snapshot"
            )
    return [(target, stored[name]) for name, target in targets.items()]


class _SavedOptimizer:
    """The saved state of one optimizer, decoded and checked to fit it.

    Args:
        optimizer: where it belongs.
        entry, whole: of the index, and of what the trainer has kept whole.
        tensors: of the index.
        names: of the model's parameters, by id.

    Raises:
        ValueError: the optimizer owns other parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        entry: Mapping[str, Any],
        whole: Mapping[str, Any],
        tensors: TensorsIn,
        names: Mapping[int, str],
    ) -> None:
        self.optimizer, self._tensors = optimizer, tensors
        groups = optimizer.param_groups
        if _owned(optimizer, names) != entry["params"]:
            raise ValueError(f"{entry['class']} owns other parameters here than in the snapshot")
        owned: dict[Any, Tensor] = {}
        for places, group in zip(entry["params"], groups, strict=True):
            owned |= zip(places, group["params"], strict=True)
        self.strangers = _copies(
            f"parameters of {entry['class']}",
            {str(place): owned[place] for place in whole["values"]},
            {str(place): value for place, value in whole["values"].items()},
        )
        everywhere = list(owned.values())
        self.groups = [
            self._decoded(data, group["params"]) for data, group in zip(entry["groups"], groups, strict=True)
        ]
        self.more = self._decoded(entry["more"], everywhere)
        self.state: list[tuple[Any, Any]] = []
        for place, key, data in entry["state"]:
            if place is None:
                self.state.append((values.decode(key), self._decoded(data, everywhere)))
            else:
                data = whole["state"][place] if data is None else data
                self.state.append((owned[place], self._decoded(data, [owned[place]])))

    def _decoded(self, data: bytes, parameters: Sequence[Tensor]) -> Any:
        """Decodes a value. What was on a CUDA device moves to the device of the parameters."""
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        return values.decode(data, self._tensors, device)

    def load_more(self) -> None:
        """Loads the optimizer's other state by its own `load_state_dict`, which may raise."""
        if self.more:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **self.more})

    def load_(self) -> None:
        for group, hyper in zip(self.optimizer.param_groups, self.groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **hyper})
        self.optimizer.state.clear()
        for target, value in self.state:
            self.optimizer.state[target] = value


# writing ------------------------------------------------------------------------------------------


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that all trainers have alike: dense ones, and tables that TorchRec replicates."""
    sharded = _sharded_names(model)
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in sharded)


def _sharded_names(model: nn.Module) -> set[str]:
    if not isinstance(model, DistributedModelParallel):
        return set()
    return sharded_names(model) - {
        f"{path}.{name}" if path else name
        for path, module in model.module.named_modules()
        if isinstance(module, ShardedModule)
        for name in replicated_tables(module)
    }


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields buffers, non-persistent ones too, but not replicated ones or those that TorchRec makes of its plan."""
    kinds = (Replicated, ShardedModule)
    apart = {id(buffer) for module in model.modules() if isinstance(module, kinds) for buffer in module.buffers()}
    return ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in apart)


def _replicated(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules that all trainers have alike, with their paths."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Replicated))


def further_names(model: nn.Module) -> dict[str, str]:
    """Returns the other names of what has several (tied weights, a module that is used twice), with the first: dense
    parameters, buffers, tables. Snapshots have each once, state dicts under all of its names."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    first = {id(tensor): name for name, tensor in (*dense_parameters(model), *buffers_of(model))}
    found: dict[str, str] = {}
    for path, module in all_paths(root, stop=ShardedModule):
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            here = f"{path}.{name}" if path else name
            if (known := first.get(id(tensor), here)) != here:
                found[here] = known
    of_tables = with_tables(model)
    for path, known in further_paths(root, of_tables).items():
        for key, _ in of_tables[known].keys_of_tables().values():
            found[f"{path}.{key}"] = f"{known}.{key}"
    return found


def all_paths(
    module: nn.Module, path: str = "", stop: type[nn.Module] | tuple[()] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules under all of their paths, where `named_modules` has each once. `stop`: these are left out, and
    what is in them."""
    if isinstance(module, stop):
        return
    yield path, module
    for name, child in children_of(module).items():
        if child is not None:
            yield from all_paths(child, f"{path}.{name}" if path else name, stop)


def further_paths(root: nn.Module, modules: Mapping[str, Any]) -> dict[str, str]:
    """Returns the other paths of some modules, with the first, by which `modules` has them."""
    first = {id(module): path for path, module in modules.items()}
    every = ((path, first.get(id(module), path)) for path, module in all_paths(root))
    return {path: known for path, known in every if path != known}


def tables_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Returns what TorchRec's state dicts call the tables on the servers: who exports a checkpoint has no model."""
    return {
        job_name: (f"{path}.{key}" if path else key, name)
        for path, module in with_tables(model).items()
        for job_name, (key, name) in module.keys_of_tables().items()
    }


def with_tables(model: nn.Module) -> dict[str, WithTables]:
    """Returns the modules whose rows are on the servers, by path as in TorchRec's state dicts."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    return {path: module for path, module in root.named_modules() if isinstance(module, WithTables)}


def meet_columns(model: nn.Module, state: State) -> None:
    """Makes features come out in the order they had when a snapshot was taken.

    Raises:
        CheckpointError: the plan of the model has them in another one.
    """
    for path, module in with_tables(model).items():
        if path in state.columns:
            module.columns.meet(state.columns[path])


_Place = str | tuple[int, int]  # a parameter: its name in the model, or else its group and place in an optimizer


def _owned(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[_Place]]:
    """Returns, for every parameter group, the names of its parameters."""
    return [
        [names.get(id(parameter), (g, j)) for j, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _digest(index: bytes) -> int:
    """Returns a 48-bit hash of the index, so that it is at most `NUMBERS_MOST`."""
    return int.from_bytes(hashlib.blake2b(index, digest_size=6).digest(), "little")


def _collect(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    shards: LocalShards,
    counters: Sequence[Tensor] | None,
    further: Mapping[str, str],
) -> tuple[bytes, TensorsOut, bytes]:
    """Returns the index, the tensors it refers to, and what this trainer keeps whole."""
    out, sharded_names = TensorsOut(), _sharded_names(model)
    parameters, names, sharded = {}, {}, set()
    for name, parameter in model.named_parameters():
        if name in sharded_names:
            sharded.add(id(parameter))
            continue
        names[id(parameter)] = name
        if not is_lazy(parameter):
            parameters[name] = parameter.detach()
    apart = None if counters is None else {id(parameter) for parameter in counters}
    entries: list[dict[str, Any]] = []
    wholes: list[dict[str, Any]] = []
    for i, optimizer in enumerate(optimizers):
        name = f"optimizer {i} ({type(optimizer).__name__})"
        entry, whole = _collect_optimizer(optimizer, name, names, sharded, apart, out)
        entries.append(entry)
        wholes.append(whole)
    replicated = {path: module.replicated_state() for path, module in _replicated(model)}
    columns = {path: Found(module.columns.keys).plain() for path, module in with_tables(model).items()}
    content = {
        "parameters": parameters,
        "replicated": replicated,
        "optimizers": entries,
        "tables": tables_of(model),
        "columns": columns,
        **({"further": dict(further)} if further else {}),  # an earlier build takes the others
    }
    index = values.encode(content, "the dense state", out)
    buffers = {name: buffer.detach() for name, buffer in buffers_of(model)}
    whole = {"buffers": buffers, "shards": shards.tensors(), "optimizers": wholes}
    return index, out, values.encode(whole, "the dense state")


def _collect_optimizer(
    optimizer: Optimizer,
    name: str,
    names: Mapping[int, str],
    sharded: set[int],
    apart: set[int] | None,
    out: TensorsOut,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the optimizer's entry of the index, and its state of parameters that are not the model's.

    Each trainer keeps the latter whole.
    """
    params = _owned(optimizer, names)
    entry: dict[str, Any] = {"class": type(optimizer).__name__, "params": params, "groups": [], "state": []}
    whole: dict[str, Any] = {"values": {}, "state": {}}
    places: dict[int, _Place] = {}
    for g, (owned, group) in enumerate(zip(params, optimizer.param_groups, strict=True)):
        hyper = {key: value for key, value in group.items() if key != "params"}
        entry["groups"].append(values.encode(hyper, f"{name}, group {g}", out))
        for place, parameter in zip(owned, group["params"], strict=True):
            places[id(parameter)] = place
            if not isinstance(place, str) and id(parameter) not in sharded:
                whole["values"][place] = parameter.detach()
    state: Mapping[Any, Any] = optimizer.state  # an optimizer may keep there what is of no parameter
    for key, value in state.items():
        if not isinstance(key, Tensor):
            kept = values.encode(key, f"{name}, key of its state")
            entry["state"].append((None, kept, values.encode(value, f"{name}, state[{key!r}]", out)))
            continue
        if id(key) in sharded and _is_without_rows(value):
            continue
        found = places.get(id(key))
        ours = found is not None or id(key) in names or id(key) in sharded
        if not ours and (apart is None or id(key) in apart):
            continue
        if found is None or (id(key) in sharded and value):
            why = "that is in none of its groups" if found is None else "whose rows the servers hold"
            why += "" if ours else " (a wrapper counts there? attach that wrapper)"
            raise TypeError(f"{name}: the state of a parameter of shape {tuple(key.shape)} {why} cannot be kept")
        if found in whole["values"]:
            whole["state"][found] = values.encode(value, f"{name}, state of parameter {found}")
            entry["state"].append((found, None, None))
        else:
            entry["state"].append((found, None, values.encode(value, f"{name}, state of {found}", out)))
    entry["more"] = values.encode(_beside_state(optimizer, name), f"{name}, state_dict", out)
    return entry, whole


def _is_without_rows(state: Any) -> bool:
    """Returns whether optimizer state belongs to a table's placeholder, which the optimizer never steps."""
    return isinstance(state, dict) and any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _beside_state(optimizer: Optimizer, name: str) -> dict[str, Any]:
    """Returns what only the optimizer's `state_dict` holds, if its class overrides that or has hooks on it; else {}."""
    if type(optimizer).state_dict is Optimizer.state_dict and not has_state_dict_hooks(optimizer):
        return {}
    try:
        return {key: value for key, value in optimizer.state_dict().items() if key not in _USUAL}
    except (NotImplementedError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be kept: its state_dict says {error}") from error
