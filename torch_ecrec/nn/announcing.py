"""Finds in the next batches of a plain loop what the sharded modules will look up, and announces it to them.

TorchRec's pipelines announce the next batch themselves. In a plain loop over an attached reader nobody does, so the
reader draws it early (`Reader.look_ahead`), at the end of a training forward, and what it has for a module then travels
with the push of the step:

    draw t   forward t   [early draw of t + 1, announced]   backward t: push, with lookups of t + 1   draw t + 1

Where servers have records on disks, batches after it are drawn early and announced, too (`ServedModule.announce`).

Batches have any form. In the first steps a module's features are looked for in the batch that the loop has drawn: at
`["sparse"]`, say. Later the features at that path are announced. The module compares them with those that it gets
(`served.py`), so a wrong guess costs a lookup, and changes nothing.

Not announced: weighted ids, ids that are remapped, those of a module that is called several times in a forward, those
that a loop makes of its batch. Where nothing can be announced, no batch is drawn early.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec.compat.torchrec import collection_of
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.managed import ManagedModule
from torch_ecrec.nn.served import ServedModule
from torch_ecrec.nn.staging import same_ids
from torch_ecrec.resume.checksum import DEPTH_MOST
from torch_ecrec.resume.reader import Reader

LEARNS = 3  # training forwards in which features are looked for
MISSES_MOST = 3  # announcements in a row that were of other ids, before a module gets no more

Path = tuple[tuple[str, Any], ...]
"""The way to features in a batch: each part is "item" with a key or an index, or "attribute" with a name."""


@dataclass
class _Known:
    """Keeps where one module's features were in the batches so far.

    Attributes:
        paths: where its features were in each batch so far; None: it was not called yet.
        calls: in the forward under way.
        once: it never was called twice in a forward.
        misses: announcements in a row that were of other ids.
    """

    paths: list[Path] | None = None
    calls: int = 0
    once: bool = True
    misses: int = 0

    @property
    def path(self) -> Path | None:
        """Where its next features will be; None if that is not known."""
        return self.paths[0] if self.paths and self.once and self.misses < MISSES_MOST else None


class Announcing:
    """Announces the next batch of one reader to the sharded modules of a model.

    Args:
        reader: what `attach` returns.
        model: its modules are told as long as there is hope.
        session: says whether servers have records on disks.
    """

    def __init__(self, reader: Reader, model: nn.Module, session: EmbeddingBackend) -> None:
        self._reader, self._session = reader, session
        modules = list(model.modules())
        inside = {id(collection_of(module)) for module in modules if isinstance(module, ManagedModule)}
        self._known: dict[ServedModule[Any], _Known] = {
            module: _Known()
            for module in modules
            if isinstance(module, ServedModule) and module.can_be_announced and id(module) not in inside
        }
        self._forwards = 0
        self._found: list[tuple[Path, KeyedJaggedTensor]] | None = []  # in the last batch; None: enough was learned
        reader.on_batch = self._on_batch
        for module in self._known:
            module.on_called = functools.partial(self._on_called, module)

    def _on_batch(self, batch: object) -> None:
        self._found = [(path, kjt) for path, kjt in features_in(batch) if kjt.weights_or_none() is None]

    def _on_called(self, module: ServedModule[Any], features: KeyedJaggedTensor, used: bool | None) -> None:
        """Called in a training forward.

        Args:
            features: what the module is called with.
            used: whether they are what was announced; None: nothing was.
        """
        known = self._known[module]
        known.calls += 1
        if used is not None:
            known.misses = 0 if used else known.misses + 1
        if self._found is not None and not self._reader.pipelined:
            here = [path for path, kjt in self._found if _are_same(kjt, features)]
            known.paths = here if known.paths is None else [path for path in known.paths if path in here]

    def after_forward(self) -> None:
        """Called when a training forward has ended: draws next batches if that is of use, and announces them."""
        if not self._known:
            return
        self._forwards += 1
        for known in self._known.values():
            known.once &= known.calls <= 1
            known.calls = 0
        if self._forwards >= LEARNS:
            self._reader.on_batch = self._found = None
        paths = {module: path for module, known in self._known.items() if (path := known.path) is not None}
        if self._reader.pipelined or (self._found is None and not paths):
            self._end()
        elif paths:
            coming = self._reader.look_ahead(self._session.wants_hints)
            for module, path in paths.items():
                found = ((number, _at(batch, path)) for number, batch in coming)
                module.announce(list(itertools.takewhile(lambda one: isinstance(one[1], KeyedJaggedTensor), found)))

    def _end(self) -> None:
        self._reader.on_batch = self._found = None
        for module in self._known:
            module.on_called = None
            module.announce([])
        self._known.clear()


def features_in(batch: object) -> Iterator[tuple[Path, KeyedJaggedTensor]]:
    """Yields all `KeyedJaggedTensor`s in a batch, with their paths."""
    yield from _features_in(batch, ())


def _features_in(value: Any, path: Path) -> Iterator[tuple[Path, KeyedJaggedTensor]]:
    if isinstance(value, KeyedJaggedTensor):
        yield path, value
    elif len(path) == DEPTH_MOST:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _features_in(item, (*path, ("item", key)))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _features_in(item, (*path, ("item", i)))
    elif hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield from _features_in(item, (*path, ("attribute", name)))


def _at(batch: Any, path: Path) -> Any:
    """Returns what is at a path of a batch; None if that batch has nothing there."""
    value = batch
    for way, key in path:
        if way == "attribute":
            value = vars(value).get(key) if hasattr(value, "__dict__") else None
        elif isinstance(value, (Mapping, list, tuple)):
            try:
                value = value[key]
            except LookupError:
                return None
        else:
            return None
    return value


def _are_same(drawn: KeyedJaggedTensor, given: KeyedJaggedTensor) -> bool:
    """Returns whether a module was given features of the batch, or a copy of them on its device."""
    if drawn is given or (drawn.values() is given.values() and drawn.keys() == given.keys()):
        return True
    return same_ids(drawn, given if drawn.device() == given.device() else given.to(drawn.device()))
