"""What a loop keeps in its variables, as numbers that can be compared: what moves there is lost with the trainer.

    variables = Variables(known)
    variables.of(frame)         name -> Variable, of a frame and of its `self`
    variables.sums(frame)       name -> checksum, of all functions of the script that are being run

Looked into are numbers, strings, tensors, containers, objects of the script, closures and iterators, all of it to a
limit of things. What is *known* is left out, with all that is in it: the model, the reader, and whatever is attached.
Nothing is called that an object may have made its own (no `state_dict`): a look changes nothing and asks no server.
"""

from __future__ import annotations

import abc
import gc
import io
import itertools
import logging
import operator
import random
import sysconfig
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from torch_ecrec.nn.checksum import checksum_of
from torch_ecrec.nn.random_states import GENERATORS, state_of

THINGS_MOST = 200  # that are looked at in one variable,
SUMMED_MOST = 200  # and in all that sums are made of, with every snapshot
TENSORS_MOST = 16  # likewise
ITEMS_MOST = 32  # of a container, at each of its ends;
SUMMED_ITEMS_MOST = 4  # likewise for sums
COPIED_MOST = 10_000  # of a mapping; of a larger one its size alone
DEPTH_MOST = 5
FRAMES_MOST = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_OPAQUE = (type, ModuleType, BuiltinFunctionType, CodeType, FrameType, logging.Filterer, io.IOBase, threading.Thread)
_NAMES = (type, abc.ABCMeta, ModuleType, BuiltinFunctionType)
_LEFT_OUT = (Optimizer, DataLoader, Dataset)  # optimizers have checks of their own; readers are drawn from
_OURS = ("torch_ecrec.", "torchrec.", "torch.distributed", "torch.nn.parallel", "torch.profiler", "torch.utils.")
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_NOT_THE_SCRIPTS = (*_LIBRARIES, __file__.rpartition("/nn/")[0], "<frozen")
_HIDING = (map, filter, zip, enumerate, itertools.chain, itertools.cycle, itertools.islice, itertools.starmap)


@dataclass
class Variable:
    """One of a loop's, as it was looked at.

    Attributes:
        sum: changes when it does; 0: nothing of it can be compared.
        number: its value, if it is a whole number.
        generators: the generators in it and their random states, by path.
        attachable: it has state_dict and load_state_dict.
        hidden: an iterator over something else than the reader, and nothing tells how far it has come.
    """

    sum: int
    number: int | None
    generators: Mapping[str, tuple[Any, Any]]
    attachable: bool
    hidden: bool


class Variables:
    """Looks at variables.

    Args:
        known: what is brought back, or is the reader's or the model's: left out.
    """

    def __init__(self, known: Iterable[object] = ()) -> None:
        self._ids = {id(thing) for thing in known}  # not held: the model holds what this is part of

    def of(self, frame: FrameType) -> dict[str, Variable]:
        """Of a frame, and of its `self`. Of what all functions of a module see: generators alone."""
        found = {}
        for name, value in self._in(frame):
            look = _Look(self._ids, THINGS_MOST)
            look.at(value, name, 0)
            number = int(value) if type(value) is int or isinstance(value, np.integer) else None
            hidden = isinstance(value, _HIDING) and not _leads_to_us(value)
            found[name] = Variable(look.sum, number, look.generators, _is_attachable(value), hidden)
        return found

    def _in(self, frame: FrameType) -> Iterator[tuple[str, Any]]:
        if frame.f_locals is not frame.f_globals:
            for name, value in list(frame.f_globals.items()):
                if isinstance(value, GENERATORS) and id(value) not in self._ids:
                    yield name, value
        for name, value in list(frame.f_locals.items()):
            if type(value) in _NAMES or (type(value) is FunctionType and value.__closure__ is None):
                continue  # a script has many, and they do not move
            if name not in ("self", "_") and not name.startswith("__") and id(value) not in self._ids:
                yield name, value
        owner = frame.f_locals.get("self")
        if id(owner) not in self._ids:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if id(value) not in self._ids:
                    yield f"self.{name}", value

    def sums(self, frame: FrameType | None) -> dict[str, int]:
        """Of the script's frames from this one on outwards. Made for every snapshot, so it is quick."""
        found: dict[str, int] = {}
        left = SUMMED_MOST
        for _ in range(FRAMES_MOST):
            if frame is None:
                break
            if not frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
                for name, value in self._in(frame):
                    look = _Look(self._ids, min(left, THINGS_MOST), SUMMED_ITEMS_MOST)
                    look.at(value, name, 0)
                    left -= look.things
                    for path, (_, state) in look.generators.items():
                        look.add(f"{path} {state!r}".encode())
                    if look.sum and left > 0:
                        found.setdefault(f"`{name}` in {frame.f_code.co_name}", look.sum)
            frame = frame.f_back
        return found


def inside(things: Iterable[object], depth: int = 3) -> list[object]:
    """Some things, and what they have as attributes, in lists and in dicts."""
    found: dict[int, object] = {}

    def look(thing: object, left: int) -> None:
        if id(thing) in found or isinstance(thing, (*_PLAIN, type, ModuleType, Tensor)) or len(found) > 2_000:
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
        look(thing, depth)
    return list(found.values())


def _is_attachable(value: object) -> bool:
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, (type, *_LEFT_OUT)) and all(hasattr(type(value), name) for name in methods)


def _leads_to_us(value: object, depth: int = 4) -> bool:
    """Whether an iterator draws from what `attach` returned."""
    return type(value).__module__.startswith("torch_ecrec.") or (
        depth > 0
        and isinstance(value, (Iterator, tuple, FrameType))
        and any(_leads_to_us(inner, depth - 1) for inner in gc.get_referents(value))
    )


class _Look:
    """One look at one variable."""

    def __init__(self, known: set[int], most: int, items: int = ITEMS_MOST) -> None:
        self._known, self._seen, self._most, self._items = known, set[int](), most, items
        self._tensors = self.things = 0
        self.sum = 0
        self.generators: dict[str, tuple[Any, Any]] = {}

    def add(self, data: bytes) -> None:
        self.sum = zlib.crc32(data, self.sum)

    def at(self, value: Any, path: str, depth: int) -> None:
        self.things += 1
        if self.things > self._most:
            return
        if isinstance(value, _PLAIN):
            self.add(repr(value).encode("utf-8", "surrogatepass"))
            return
        if id(value) in self._known or id(value) in self._seen:
            return
        if depth > DEPTH_MOST or isinstance(value, _OPAQUE + _LEFT_OUT):
            return
        self._seen.add(id(value))
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):
                self.generators[path] = value, state_of(value)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._at_tensor(value)
        elif isinstance(value, nn.Module):
            self._at_module(value)
        elif isinstance(value, (list, tuple, deque, set, frozenset, Mapping)):
            self._at_container(value, path, depth)
        elif isinstance(value, (FunctionType, MethodType)):
            self._at_function(value, path, depth)
        elif isinstance(value, Iterator):
            self._at_iterator(value, path, depth)
        elif not type(value).__module__.startswith(_OURS):
            for name, item in list(getattr(value, "__dict__", {}).items()):
                self.at(item, f"{path}.{name}", depth + 1)

    def _at_module(self, module: nn.Module) -> None:
        """Its tensors, but for those of the model and of attached optimizers."""
        if any(id(part) in self._known for part in module.modules()):
            return
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if id(tensor) not in self._known:
                self._at_tensor(tensor)

    def _at_tensor(self, tensor: Tensor | np.ndarray[Any, Any]) -> None:
        if type(tensor) in (Tensor, nn.Parameter, np.ndarray) and self._tensors < TENSORS_MOST:
            self._tensors += 1
            self.add(b"%d" % checksum_of(tensor))

    def _at_container(self, value: Any, path: str, depth: int) -> None:
        size = len(value)
        self.add(b"%d" % size)
        if isinstance(value, Mapping):
            pairs = list(value.items()) if size <= COPIED_MOST else []  # copied: other threads may change it
            for key, item in itertools.islice(pairs, self._items):
                self.at(key if isinstance(key, _PLAIN) else None, path, depth + 1)
                self.at(item, f"{path}[{key!r}]", depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            first = min(size, self._items)
            for i in itertools.chain(range(first), range(max(first, size - self._items), size)):
                self.at(value[i], f"{path}[{i}]", depth + 1)

    def _at_function(self, value: FunctionType | MethodType, path: str, depth: int) -> None:
        if isinstance(value, MethodType):
            self.at(value.__self__, path, depth + 1)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                inner = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.at(inner, name, depth + 1)

    def _at_iterator(self, value: Iterator[Any], path: str, depth: int) -> None:
        """How far one has come, where that can be seen."""
        yielded = getattr(value, "_num_yielded", None)  # a DataLoader's
        if isinstance(yielded, int):
            self.add(b"%d" % yielded)
        elif isinstance(value, itertools.count):
            self.add(repr(value).encode())
        elif isinstance(value, GeneratorType):
            frame = value.gi_frame
            if frame is not None and not value.gi_running:
                self.add(b"%d" % frame.f_lasti)
                self.at(dict(frame.f_locals), path, depth + 1)
        elif not type(value).__module__.startswith(_OURS):
            left = operator.length_hint(value, -1) if type(value).__module__ == "builtins" else -1
            self.add(b"%d" % left)
            for name, item in list(getattr(value, "__dict__", {}).items()):
                self.at(item, f"{path}.{name}", depth + 1)
