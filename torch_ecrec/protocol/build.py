"""What two builds must have alike to serve one cluster together: the protocol, and all that is declared below.

    protocol      1: what words and bytes mean; see `PROTOCOL`
    Push          Push(slot: int -1..281474976710656, ..., positions: list[1-D int64], ...) -> Acknowledged   7c9d02e1
    word Ready    {"type": "ready"}: Ready(slot: int ge=0, ..., at: int | NoneType = None)       of the control channel
    JobSpec       JobSpec(tables: tuple[TableSpec, ...], ...); TableSpec(name: str, ...); ...
    Numba         its version: another one may compile the same kernel to other bits
    bits of adam  what the kernels give on fixed vectors (`processes/kernel_bits.py`)

The version of the release is none of it: a patch that leaves all of this as it is works together with the one before,
so that a cluster changes from one to the other server by server. Digests are told where a process joins the cluster,
and in the first bytes of each connection. Who differs is told in what; nothing is misread. The order of a message's
fields counts, since they travel without names. What is compatible with what: docs/protocol.md, "Builds".
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import torch_ecrec
from torch_ecrec.protocol.encoding import WIRE, Vocabulary, answers_of
from torch_ecrec.protocol.wire import TensorOf
from torch_ecrec.spec import experiment
from torch_ecrec.spec.job import JobSpec

PROTOCOL = 1
"""Raised by a release that means something else by the same declarations, by a word or the bytes of a frame, and by one
that declares others or gives other bits: of that `tests/unit/test_build.py` reminds."""
BITS = "bits of "
WORD = "word "
DIGEST_BYTES = 16
REMEDY = "They cannot serve one cluster: end it, and start all of it with one build"
_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


@dataclass(frozen=True)
class Build:
    """Describes what two builds must have alike, as this process has it or as another has told it.

    Attributes:
        version: of the package, for people. It may differ.
        messages: the protocol, and digest of each message's declaration, by the name of its class; of the job's.
    """

    version: str
    messages: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> bytes:
        """(`DIGEST_BYTES`,) of all that must be alike."""
        said = json.dumps(sorted(self.messages.items()))
        return hashlib.blake2b(said.encode(), digest_size=DIGEST_BYTES).digest()

    def difference(self, other: Build) -> str:
        """Returns, in words, how another build differs from this one; "" if it does not."""
        names = sorted({name for name, _ in set(self.messages.items()) ^ set(other.messages.items())})
        if not names:
            return ""
        same = other.version == self.version
        versions = f"the same version {self.version}" if same else f"version {other.version[:40]}, here {self.version}"
        protocols = [str(build.messages.get("protocol", "none"))[:40] for build in (other, self)]
        if protocols[0] != protocols[1]:
            return f"{versions}; protocol {protocols[0]}, here {protocols[1]}"
        return f"{versions}, but not the same: {', '.join(names)[:400]}"

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
    declared |= {"JobSpec": specification(JobSpec)}
    digests = {name: _digest(text) for name, text in declared.items()}
    return {"protocol": str(PROTOCOL), "Numba": importlib.metadata.version("numba"), **digests}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def digests_of_words(kinds: Sequence[type[Any]]) -> dict[str, str]:
    """Returns a digest for each declared word of the control channel: fields, defaults, and the type that it says."""
    return {f"{WORD}{kind.__name__}": _digest(_word(kind)) for kind in kinds}


def _word(kind: type[Any]) -> str:
    defaults = list(map(repr, kind.__struct_defaults__))
    return f"{kind.__struct_config__.tag}: {declaration(kind)} = {defaults}"


def specification(kind: type[Any]) -> str:
    """Returns the fields of a dataclass, and of all that are in them, as text."""
    hints = typing.get_type_hints(kind)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    fields = ", ".join(f"{name}: {_text(hint)}" for name, hint in hints.items())
    inside = [
        part for hint in hints.values() for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)
    ]
    return "; ".join([f"{kind.__name__}({fields})", *(specification(part) for part in inside)])  # type: ignore[arg-type]


def declaration(kind: type[Any]) -> str:
    """Returns all that a message's bytes depend on, in one line."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = ", ".join(f"{name}: {_text(hints[name])}" for name in kind.__struct_fields__)
    answers = answers_of(kind) if "__orig_bases__" in vars(kind) else ()
    then = f" -> {' | '.join(sorted(answer.__name__ for answer in answers))}" if answers else ""
    return f"{kind.__name__}({fields}){then}"


def _text(hint: Any) -> str:
    """Returns a type as text that is the same in every version of Python and of msgspec."""
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


def is_declared(name: str) -> bool:
    """Returns whether what a process tells under this name is of its declarations: neither bits, nor of an
    experiment."""
    return not name.startswith((experiment.PREFIX, BITS))


def bits_told(told: Mapping[str, str]) -> dict[str, str]:
    """Selects, of all that a process tells, the digests of what its kernels compute on fixed vectors; by name."""
    return {name: digest for name, digest in told.items() if name.startswith(BITS)}


def refusal(own: Build, version: object, told: object) -> str:
    """Returns why a process of that version, whose messages are `told`, may not be here; "": it may, as far as this
    goes."""
    if isinstance(told, dict) and told:
        declared = {str(name): str(digest) for name, digest in told.items() if is_declared(str(name))}
        if difference := own.difference(Build(str(version), declared)):
            return f"joins a cluster of another build: {difference}. {REMEDY}"
    return ""


def other_bits(version: str, bits: Mapping[str, str], other_version: str, other: Mapping[str, str]) -> str:
    """Returns why a process whose kernels give `bits` may not be where others give `other`; "": it may. Who tells none
    has not
    computed them: it is a tool."""
    names = sorted({name for name, _ in set(bits.items()) ^ set(other.items())}) if bits and other else []
    if not names:
        return ""
    of = "the same version" if version == other_version else f"version {version[:40]}, there {other_version[:40]}"
    return f"its kernels give other bits than those of this cluster ({of}): {', '.join(names)[:400]}. {REMEDY}"
