"""The state of a whole cluster as a tuple of numbers, for the search over all of them (`exploration.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Budget:
    """How many crashes of each kind, and how many servers are taken for lost that are not: since their lease ended, or
    since they did not come back to a new coordinator in time. `cuts`: how often the network between two hosts of slots
    fails, for good; `moves`: how often a slot is to leave the server that it is on."""

    servers: int = 0
    trainers: int = 0
    coordinators: int = 0
    leases: int = 0
    cuts: int = 0
    moves: int = 0


class Table:
    """Numbers for things that are equal."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._number: dict[Any, int] = {}

    def number(self, key: Any, thing: Any) -> int:
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self.things)
            self.things.append(thing)
        return found


@dataclass(frozen=True)
class GlobalState:
    """A state of the whole cluster; numbers are those of the explorer's tables.

    Attributes:
        processes: (name, number of its state), by name; those that live.
        flight: numbers of the messages under way between servers and trainers, ascending.
        lines: (from, to, words), by name: connections with the coordinator that have words under way.
        connected: members that the coordinator has a connection with.
        left: crashes that may still come.
        term: how many coordinators there were before.
        cuts: (from, to): nothing passes.
    """

    processes: tuple[tuple[str, int], ...]
    flight: tuple[int, ...]
    lines: tuple[tuple[str, str, tuple[int, ...]], ...]
    connected: tuple[str, ...]
    left: Budget
    term: int
    cuts: tuple[tuple[str, str], ...] = ()


class Draft:
    """A state in the making."""

    def __init__(self, state: GlobalState) -> None:
        self.processes = dict(state.processes)
        self.flight = list(state.flight)
        self.lines = {(origin, to): list(words) for origin, to, words in state.lines}
        self.connected = set(state.connected)
        self.left, self.term, self.cuts = state.left, state.term, set(state.cuts)

    def say(self, origin: str, to: str, word: int) -> None:
        self.lines.setdefault((origin, to), []).append(word)

    def spend(self, kind: str) -> None:
        """One crash less may still come."""
        self.left = replace(self.left, **{kind: getattr(self.left, kind) - 1})

    def finish(self) -> GlobalState:
        return GlobalState(
            tuple(sorted(self.processes.items())),
            tuple(sorted(self.flight)),
            tuple((*ends, tuple(words)) for ends, words in sorted(self.lines.items()) if words),
            tuple(sorted(self.connected)),
            self.left,
            self.term,
            tuple(sorted(self.cuts)),
        )
