"""A digest of everything that a process knows: two processes with one digest behave alike from now on.

Walks the object graph: attributes, containers, arrays, and the variables that functions keep (closures), so that a new
attribute counts without being named here. Objects that are met again are written as the number of their first meeting.
What cannot influence behaviour is left out, and named below with the reason.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from harness.tiers import AskedStore
from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol.wellformed import MessageValidator
from torch_ecrec.records.tiers.tiered import TieredStore
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import RetryingCall

CONSTANT = (
    JobSpec,
    Settings,
    Layout,
    LinearCode,
    MessageValidator,
    types.ModuleType,
    type,
)  # the same in every process of a cluster
IGNORED: Mapping[str, frozenset[str]] = {
    # locks and effects: nothing is held or left between events; the port is walked by itself
    "Node": frozenset({"_lock", "_answers", "_outbox", "port"}),
    # pauses between attempts grow with failures, but time is not measured here
    "RetryingCall": frozenset({"node", "attempt", "failures"}),
    # for whom it waits: told to people, and time is not measured here
    "SlotReads": frozenset({"waits", "awaited", "_stale"}),
    "Host": frozenset({"waits"}),
    # hints: what is in memory, and what is on disk, changes no bits
    "Client": frozenset({"hinted"}),
    "Slot": frozenset({"announced"}),
    "Parity": frozenset({"_rounds"}),
    "Round": frozenset({"out", "others", "since_s", "usual"}),
    "_Repair": frozenset({"attempt", "failures"}),
    "Rebuild": frozenset({"unpaid_bytes"}),
    # its store is walked; how often it was read is told to people
    "Reading": frozenset({"_file"}),
    # how far it has looked, and what was used since: words for people say so, nothing else
    "Scrubber": frozenset({"_used", "_kind", "_next", "scrubbed_bytes", "rounds", "damaged", "mended"}),
    # the same in all states of a process
    "Membership": frozenset({"join", "pace", "_where", "_named"}),
    # where it sends, what it announces, when it was called last, when it heard of a member last: leases end
    # when they are told to; which process a member is, its name says
    "Coordinator": frozenset({"_send", "_announce", "_gathering"}),
    "ClusterState": frozenset({"announce", "slowness", "progress"}),  # the last: figures for people
    "Members": frozenset({"send", "_ticked_s"}),
    "RunningJob": frozenset({"_announce"}),
    "Roster": frozenset({"_announce"}),
    "Suspicion": frozenset({"_beats"}),  # how regularly they come
    "Eras": frozenset({"_announce"}),
    "SlotTable": frozenset({"_announce", "_redundancies"}),  # the last: for people, of what is there
    "MemberRecord": frozenset({"heard_s", "session_id", "gone_s", "why_gone"}),
    # what it said is taken away; the rest is the same in all states of a process, or follows from its phase
    "Process": frozenset({"out", "script", "scenario", "_scenario", "_oracle"}),
}
IN_ORDER: Mapping[str, frozenset[str]] = {
    # who came first is first in the next roster, and gets the next slot
    "Members": frozenset({"by_name"}),
    "Regathering": frozenset({"said"}),
}
NUMBERED = ("RetryingCall", "_Repair")  # attempts are numbered, and only the newest counts


class _Walk:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=12)
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id is given twice

    def write(self, text: str) -> None:
        self.hash.update(text.encode())
        self.hash.update(b"\0")

    def walk(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
            self.write(repr(value))
        elif isinstance(value, CONSTANT):
            self.write(type(value).__name__)
        elif isinstance(value, torch.Tensor):
            self.walk(value.detach().contiguous().view(torch.uint8).numpy() if value.numel() else value.shape)
        elif isinstance(value, np.ndarray):
            self.write(f"{value.dtype}{value.shape}")
            self.hash.update(value.tobytes())
        elif isinstance(value, TieredStore):  # what it holds: where that lies changes nothing
            self.walk(value.look(np.arange(value.rows))[:2])
            if isinstance(value, AskedStore):
                self.walk(value.whereabouts())
        elif id(value) in self.met:
            self.write(f"@{self.met[id(value)]}")
        else:
            self.met[id(value)] = len(self.met)
            self.kept.append(value)
            self._walk_new(value)

    def _walk_new(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self.write("{")
            for key, item in _in_order(value):
                self.walk(key)
                self.walk(item)
            self.write("}")
        elif isinstance(value, (list, tuple, deque, range)):
            self.write("[")
            for item in value:
                self.walk(item)
            self.write("]")
        elif isinstance(value, (set, frozenset)):
            self.walk(sorted(value))
        elif isinstance(value, types.FunctionType):
            self._walk_function(value)
        elif isinstance(value, types.MethodType):
            self.write(value.__func__.__qualname__)
            self.walk(value.__self__)
        elif isinstance(value, types.BuiltinMethodType):
            self.write(value.__qualname__)
            self.walk(value.__self__)
        elif isinstance(value, functools.partial):
            self.walk([value.func, value.args, value.keywords])
        else:
            self._walk_object(value)

    def _walk_function(self, function: types.FunctionType) -> None:
        self.write(function.__qualname__)
        self.walk(function.__defaults__)
        known = variables(function)
        owner: Any = known.get("self")
        if "attempt" in known and type(owner).__name__ in NUMBERED:
            known["attempt"] = bool(known["attempt"] == owner.attempt)
        self.walk(known)

    def _walk_object(self, value: Any) -> None:
        if isinstance(value, msgspec.Struct):
            self.write(type(value).__name__)
            self.walk(msgspec.structs.asdict(value))
            return
        if not hasattr(value, "__dict__"):
            raise TypeError(f"cannot be walked: a {type(value)}")
        self.write(type(value).__name__)
        ignored = frozenset().union(*(IGNORED.get(cls.__name__, frozenset()) for cls in type(value).__mro__))
        for name in sorted(vars(value)):
            if name not in ignored:
                self.write(name)
                item = vars(value)[name]
                in_order = name in IN_ORDER.get(type(value).__name__, ()) and item is not None
                self.walk(list(item.items()) if in_order else item)


def variables(function: types.FunctionType) -> dict[str, Any]:
    """What a function keeps of the scope it was made in."""
    known = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            known[name] = None
    return known


def _in_order(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Items in an order that does not depend on when they were added: what processes do does not (see `IN_ORDER`)."""
    if mapping and isinstance(next(iter(mapping)), RetryingCall):
        return sorted(mapping.items(), key=lambda item: _rank(item[0]))
    try:
        return sorted(mapping.items(), key=lambda item: item[0])
    except TypeError:
        return list(mapping.items())


def _rank(exchange: RetryingCall[Any]) -> str:
    known = {name: value for name, value in variables(exchange.make).items() if isinstance(value, int)}  # type: ignore[arg-type]
    return f"{exchange.slot} {exchange.bound_to} {exchange.make.__qualname__} {known}"


def fingerprint(*values: Any) -> str:
    """The digest, as hexadecimal digits, of what can be reached from `values`."""
    walk = _Walk()
    for value in values:
        walk.walk(value)
    return walk.hash.hexdigest()
