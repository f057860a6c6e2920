"""The state of modules beside tensors: modes, plain attributes, generators, what they give as extra state of theirs
(`get_extra_state`), and which parameters are trained.

    settings = ModuleSettings(model)     # the settings as they are now
    changed = settings.changed()         # what differs since, by path
    settings.load_(changed)              # in a model that is made anew

Only what has changed is kept and put back: what a script sets when it builds its model, it sets again after a restart.
Modules that shard or wrap others are left out, since they belong to the libraries; so are attributes that hold more
than one number, string or flag: a module that changes those is for the script to attach.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from torch_ecrec.compat.torch import own_parameters
from torch_ecrec.nn.dense import Replicated, WithTables
from torch_ecrec.nn.placeholder import TableParameter, are_trained
from torch_ecrec.resume.random_states import GENERATORS, set_state_of, state_of
from torch_ecrec.resume.values import decode, encode

_PLAIN = frozenset({bool, int, float, complex, str})  # and NumPy's numbers
_USUAL = frozenset({dict, OrderedDict, set, list, tuple, type(None)})  # what hooks and the like are in
_LIBRARIES = ("torch_ecrec.", "torchrec.distributed.", "torch.nn.parallel.")
_EXTRA = "extra state"
_TRAINED = "requires_grad of "
_OF_TABLE = "requires_grad of table "  # under the path of the model


class ModuleSettings:
    """The settings of a model's modules as they were at construction. Modules added later are not covered."""

    def __init__(self, model: nn.Module) -> None:
        self._of_path = {
            path: module for path, module in model.named_modules() if not type(module).__module__.startswith(_LIBRARIES)
        }
        usual = nn.Module.get_extra_state
        self._with_extra = {path: one for path, one in self._of_path.items() if type(one).get_extra_state is not usual}
        made = [module for module in model.modules() if isinstance(module, (WithTables, Replicated))]
        self._collections = sorted(line for module in made for line in module.made_with())
        self._tables = {name: p for name, p in model.named_parameters() if isinstance(p, TableParameter)}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {("", _OF_TABLE + name): name for name in self._tables} | {
            (path, _TRAINED + name): names[id(parameter)]
            for path, module in self._of_path.items()
            for name, parameter in own_parameters(module).items()
            if id(parameter) in names
        }
        self._first: dict[tuple[str, str], Any] = {}
        self._first = {(path, name): value for path, values in self.changed().items() for name, value in values.items()}

    @property
    def checksum(self) -> int:
        """Of torch's own modules and of what they were made with: numbers, flags and words, without their modes; and of
        how collections make outputs of rows.

        Of others nothing is said: what a user's module notes about itself may differ in each life.
        """
        torchs = {path for path, module in self._of_path.items() if type(module).__module__.startswith("torch.nn.")}
        kinds = [(path, type(self._of_path[path]).__qualname__) for path in torchs]
        made = [
            (path, name, repr(value))
            for (path, name), value in self._first.items()
            if path in torchs and type(value) in _PLAIN and name != "training" and not name.startswith(_TRAINED)
        ]
        return zlib.crc32(repr([sorted([*kinds, *made]), self._collections]).encode())

    @property
    def frozen(self) -> list[str]:
        """The parameters that were not trained at construction, by name."""
        return sorted(name for key, name in self._names.items() if self._first.get(key) is False)

    def frozen_otherwise(self, before: Iterable[str], changed: Mapping[str, Mapping[str, Any]]) -> str:
        """Names what is trained now and was not in another life, or the other way; "": nothing.

        Args:
            before: `frozen` of that life.
            changed: what it had changed by then, and `load_` restores.
        """
        restored = {self._names.get((path, name)) for path, values in changed.items() for name in values}
        names = sorted(({*before} ^ {*self.frozen}) - restored)
        return f"{', '.join(names[:8])}{', ...' if names[8:] else ''}"

    def changed(self) -> dict[str, dict[str, Any]]:
        """Returns the settings that differ from those at construction: path of a module -> name -> value.

        It is called for every snapshot, so it does little for each attribute.

        Raises:
            TypeError: the extra state of a module cannot be kept, with its name.
        """
        found: dict[str, dict[str, Any]] = {}
        first, missing = self._first, object()
        for path, module in self._of_path.items():
            for name, value in vars(module).items():
                kind = type(value)
                if kind in _PLAIN or (kind not in _USUAL and isinstance(value, np.generic)):
                    before = first.get((path, name), missing)
                    if type(before) is not kind or value != before:
                        found.setdefault(path, {})[name] = value
                elif value is None and first.get((path, name)) is not None:  # it was a number, say
                    found.setdefault(path, {})[name] = None
                elif kind not in _USUAL and isinstance(value, GENERATORS):
                    state = encode(state_of(value), name)
                    if state != first.get((path, name)):
                        found.setdefault(path, {})[name] = state
            for name, parameter in own_parameters(module).items():
                if parameter is not None:
                    key = _TRAINED + name
                    if parameter.requires_grad != first.get((path, key)):
                        found.setdefault(path, {})[key] = parameter.requires_grad
        for path, module in self._with_extra.items():
            if (extra := _extra_of(module)) != first.get((path, _EXTRA)):
                found.setdefault(path, {})[_EXTRA] = extra
        for name, trains in zip(self._tables, are_trained(self._tables.values()), strict=True):
            if trains != first.get(("", _OF_TABLE + name)):
                found.setdefault("", {})[_OF_TABLE + name] = trains
        return found

    def load_(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores what `changed` returned, and resets all other settings to their values at construction.

        Raises:
            ValueError: the model has no such module.
        """
        for path in changed:
            if path and path not in self._of_path:
                raise ValueError(f"the model has no module {path!r}, which it had when the snapshot was taken")
        late = {(path, name): value for path, values in changed.items() for name, value in values.items()}
        for (path, name), value in (self._first | late).items():
            if name.startswith(_OF_TABLE):
                self._tables[name.removeprefix(_OF_TABLE)].requires_grad_(value)
                continue
            module = self._of_path[path]
            if name.startswith(_TRAINED):
                module.get_parameter(name.removeprefix(_TRAINED)).requires_grad_(value)
            elif name == _EXTRA:
                if value != _extra_of(module):
                    module.set_extra_state(decode(value))
            elif type(value) is bytes:
                set_state_of(getattr(module, name), decode(value))
            else:
                setattr(module, name, value)


def _extra_of(module: nn.Module) -> bytes:
    return encode(module.get_extra_state(), f"extra state of {type(module).__name__}")
