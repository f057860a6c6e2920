"""What two processes must have alike to work together: the package's version, and all that is declared below.

    Push      Push(slot: int -1..281474976710656, ..., positions: list[1-D int64], ...) -> Acknowledged      7c9d02e1
    JobSpec   JobSpec(tables: tuple[TableSpec, ...], ...); TableSpec(name: str, ...); ...
    kernels   the sources of all kernels: others may give other bits

Of each a digest is told: where a process joins the cluster, and in the first bytes of each connection. Who differs is
told in what; nothing is misread. The order of a message's fields counts, since they travel without names. What is
compatible with what: docs/protocol.md, "Builds".
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

import torch_ecrec
from torch_ecrec.protocol.encoding import WIRE, Vocabulary, answers_of
from torch_ecrec.protocol.wire import TensorOf
from torch_ecrec.runtime.kernel_cache import digest_of_sources
from torch_ecrec.spec import experiment
from torch_ecrec.spec.job import JobSpec

DIGEST_BYTES = 16
_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


@dataclass(frozen=True)
class Build:
    """What two builds must have alike: of this process, or of one that has told it.

    Attributes:
        version: of the package.
        messages: digest of each message's declaration, by the name of its class; of the job's; of the kernels.
    """

    version: str
    messages: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> bytes:
        """(`DIGEST_BYTES`,) of all of it."""
        said = json.dumps([self.version, sorted(self.messages.items())])
        return hashlib.blake2b(said.encode(), digest_size=DIGEST_BYTES).digest()

    def difference(self, other: Build) -> str:
        """What another build has otherwise, in words; "" if nothing."""
        if other.version != self.version:
            return f"version {other.version[:40]}, here {self.version}"
        names = sorted({name for name, _ in set(self.messages.items()) ^ set(other.messages.items())})
        return f"the same version {self.version}, but not the same: {', '.join(names)[:400]}" if names else ""

    def told(self) -> bytes:
        """For a process that seems to be of another build."""
        return json.dumps({"version": self.version, "messages": dict(self.messages)}).encode()

    def difference_told(self, told: bytes) -> str:
        """The same of one that has told what it is."""
        try:
            return self.difference(msgspec.json.decode(told, type=Build))
        except msgspec.MsgspecError:
            return "it does not say which"


def own_build(vocabulary: Vocabulary = WIRE) -> Build:
    """Returns the build of this process."""
    return Build(torch_ecrec.__version__, _digests(vocabulary))


@functools.lru_cache(maxsize=16)
def _digests(vocabulary: Vocabulary) -> Mapping[str, str]:
    declared = {name: declaration(kind) for name, kind in {**vocabulary.requests, **vocabulary.answers}.items()}
    declared |= {"JobSpec": specification(JobSpec), "kernels": digest_of_sources()}
    return {name: hashlib.blake2b(text.encode(), digest_size=4).hexdigest() for name, text in declared.items()}


def specification(kind: type[Any]) -> str:
    """The fields of a dataclass, and of all that are in them."""
    hints = typing.get_type_hints(kind)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    fields = ", ".join(f"{name}: {_text(hint)}" for name, hint in hints.items())
    inside = [
        part for hint in hints.values() for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)
    ]
    return "; ".join([f"{kind.__name__}({fields})", *(specification(part) for part in inside)])  # type: ignore[arg-type]


def declaration(kind: type[Any]) -> str:
    """All that a message's bytes depend on, in one line."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = ", ".join(f"{name}: {_text(hints[name])}" for name in kind.__struct_fields__)
    answers = answers_of(kind) if "__orig_bases__" in vars(kind) else ()
    then = f" -> {' | '.join(sorted(answer.__name__ for answer in answers))}" if answers else ""
    return f"{kind.__name__}({fields}){then}"


def _text(hint: Any) -> str:
    """A type, the same in every version of Python and of msgspec."""
    if isinstance(hint, TensorOf):
        return str(hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = [f"{name}={getattr(meta, name)}" for meta in parts[1:] for name in _BOUNDS]
        return " ".join([_text(parts[0]), *(bound for bound in bounds if not bound.endswith("=None"))])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_text, parts))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, include_extras=True)
        return f"{hint.__name__}({', '.join(f'{name}: {_text(hints[name])}' for name in hint.__struct_fields__)})"
    name: str = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(_text, parts))}]" if parts else name


def is_of_experiment(name: str) -> bool:
    """Whether what a process tells under this name is no declaration, but which experiment it takes part in."""
    return name.startswith(experiment.PREFIX)


def refusal(version: object, told: object) -> str:
    """Why a process of that version, whose messages are `told`, may not be here; "": it may, as far as this goes."""
    if version != torch_ecrec.__version__:
        return f"version {str(version)[:40]} joins a cluster of version {torch_ecrec.__version__}"
    if isinstance(told, dict) and told:
        declared = {str(name): str(digest) for name, digest in told.items() if not is_of_experiment(str(name))}
        other = Build(str(version), declared)
        if difference := own_build().difference(other):
            return f"joins a cluster of another build: {difference}"
    return ""
