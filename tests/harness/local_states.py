"""The states of single processes, for the search over all states of a cluster (`exploration.py`).

A process is a machine: what it does follows from its state and the event. A process in a state is made again, when it
is needed, by giving a new one the events that led there; two states are one if their fingerprints are equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.fingerprint import fingerprint
from harness.global_states import Table
from harness.processes import Call, Center, Process, Server, Trainer

LIVE_PROCESSES = 4000  # kept as they are, so that not every one is made again


@dataclass
class Birth:
    """How a process begins: `make` gives a new one."""

    make: Callable[[], Process]
    key: str


@dataclass
class Local:
    """One state of one process: the birth and the events that lead there; what others may see of it."""

    mark: str  # its fingerprint
    birth: Birth
    history: tuple[tuple[str, Any], ...]
    view: dict[str, Any]
    effects: dict[tuple[str, int], tuple[int, tuple[Any, ...]]] = field(default_factory=dict)


class LocalStates:
    """The states of single processes, and what events make of them, each worked out once.

    Args:
        free: names of messages that arrive at any time; the others arrive at once. See `exploration.py`.
    """

    def __init__(self, free: frozenset[str]) -> None:
        self._free = free
        self.locals, self.messages, self.words = Table(), Table(), Table()
        self.is_free: list[bool] = []  # of each message
        self.worked_out = 0  # events
        self._live: OrderedDict[int, Process] = OrderedDict()

    def birth(self, name: str, make: Callable[[], Process]) -> int:
        """The first state of a process."""
        birth = Birth(make, name)
        process = make()
        return self._number(birth, (), process)

    def _number(self, birth: Birth, history: tuple[tuple[str, Any], ...], process: Process) -> int:
        mark = fingerprint(process)
        known = len(self.locals.things)
        number = self.locals.number((birth.key, mark), None)
        if number == known:
            if isinstance(process, Server):
                process.check()
            self.locals.things[number] = Local(mark, birth, history, view_of(process))
        self._live[number] = process
        while len(self._live) > LIVE_PROCESSES:
            self._live.popitem(last=False)
        return number

    def _process(self, number: int) -> Process:
        """A process in that state; it may be changed."""
        process = self._live.pop(number, None)
        if process is None:
            local = self.locals.things[number]
            process = local.birth.make()
            for kind, what in local.history:
                process.on(kind, what)
                process.out = []
            if fingerprint(process) != local.mark:
                raise RuntimeError(
                    f"{process.name}: the same events lead to another state: something was not looked at"
                )
        return process

    def view(self, number: int) -> dict[str, Any]:
        """What others may see of a process in that state."""
        view: dict[str, Any] = self.locals.things[number].view
        return view

    def of_role(self, role: str, processes: Iterable[tuple[str, int]]) -> list[str]:
        """Names of those with a role, of (name, number of its state)."""
        return [name for name, number in processes if self.view(number)["role"] == role]

    def on(self, number: int, kind: str, what: Any, key: int) -> tuple[int, tuple[Any, ...]]:
        """The state after an event (`key` tells it from others of its kind), and what the process says."""
        local: Local = self.locals.things[number]
        known = local.effects.get((kind, key))
        if known is None:
            self.worked_out += 1
            process = self._process(number)
            process.out = []
            process.on(kind, what)
            said = tuple(self._said(process, one) for one in process.out)
            process.out = []
            after = self._number(local.birth, (*local.history, (kind, what)), process)
            known = local.effects[kind, key] = after, said
        return known

    def message(self, key: Any, message: tuple[Any, ...]) -> int:
        """The number of a message between servers and trainers; `key` tells it from others."""
        number = self.messages.number(key, message)
        if number == len(self.is_free):
            names = {message[0]}
            if message[0] == "answer":
                names.add(type(message[4]).__name__)
            if message[0] == "request":
                request = message[1].request
                name = type(request).__name__
                source, trainer = getattr(request, "source", -1), getattr(request, "trainer", -1)
                names = {name, f"{name} of slot {source}", f"{name} of trainer {trainer}"}
            self.is_free.append(bool(names & self._free))
        return number

    def _said(self, process: Process, one: tuple[Any, ...]) -> tuple[Any, ...]:
        """With contents as numbers."""
        kind = one[0]
        if kind == "request":
            call: Call = one[1]
            return "flight", call.receiver, self.message((call.sender, call.receiver, call.token), one)
        if kind == "answer":
            _, asker, token, answer = one
            key = process.name, asker, token, fingerprint(answer)
            return "flight", asker, self.message(key, (kind, process.name, asker, token, answer))
        if kind == "loss":
            return "flight", one[1], self.message((process.name, *one), (kind, process.name, *one[1:]))
        if kind == "disk":
            return "flight", process.name, self.message((kind, process.name), (kind, process.name))
        if kind == "tell":
            return "tell", self.word(one[1])
        if kind == "send":
            return "send", one[1], self.word(one[2])
        return one

    def word(self, message: dict[str, Any]) -> int:
        """The number of a word from or to the coordinator."""
        return self.words.number(fingerprint(message), message)


def view_of(process: Process) -> dict[str, Any]:
    """What the search needs to know of a process's state."""
    view: dict[str, Any] = {
        "role": process.role,
        "calls": [(token, peer) for token, (peer, _) in process.calls.items()],
        "over": process.over,
    }
    if isinstance(process, Trainer):
        client = process.node
        in_training = client.load_end is not None and client.is_trained(client.resumable)
        snapshot = client.resumable if in_training else 0
        view |= {"done": process.phase[0] == "done", "complete": client.complete, "snapshot": snapshot}
        view |= {"era": client.era, "rank": process.rank}
        view["placed"] = [place.incarnation for place in client.placement.slots] if client.placement is not None else []
    elif isinstance(process, Center):
        core = process.core
        slots = core.slots
        view |= {
            "fatal": core.fatal,
            "can join": process.can_join,
            "slots placed": [(place.server, place.healthy) for place in slots],
        }
        view |= {"regathering": core.regathering, "rejoined": set(core.members)}
        view["whole"] = bool(slots) and core.going_back is None and all(place.healthy for place in slots)
    elif isinstance(process, Server):
        host = process.node
        view |= {"history": host.history, "snapshot slots": host.snapshot_slots, "arriving": bool(host.arrivals)}
        if host.placement is not None:
            places = [(place.server, place.healthy) for place in host.placement.slots]
            view["placement"] = host.placement.epoch, places
        view["slots"] = {
            slot.index: {
                "incarnation": slot.incarnation,
                "ready": slot.ready,
                "reported": slot.reported,
                "whole": slot.whole and slot.going_back_to is None,
                "applied": slot.rule.applied,
                "settled": slot.rule.settled,
                "acknowledged": slot.rule.acknowledged,
                "confirmed": dict(slot.rule.confirmed),
                "folded": dict(slot.rule.folded),
                "incarnations": dict(slot.rule.incarnations),
                "snapshots": set(slot.snapshots.parts),
            }
            for slot in host.slots.values()
        }
    return view
