"""Every order of messages, and every moment of a crash, of a very small cluster: all of its states, each one checked.

    python -m torch_ecrec.testing.exploration                       # all of `EXPLORATIONS`: minutes
    python -m torch_ecrec.testing.exploration --steps 1 --server-crashes 1 --free Push,Fold,Attach --limit 1000000

The core is the real one (`processes.py`). A process is a machine: what it does follows from its state and the event.
So a cluster's state is a tuple of numbers (the state of each process, what is under way), what an event does to a
process is worked out once, and the search goes over tuples. A process in a state is made again, when it is needed, by
giving a new one the events that led there; two states of a process are one if their fingerprints are equal.

Enabled in a state: the arrival of any request, answer or word of the coordinator that is under way (words on one
connection in order); the crash of a server that hosts a slot, of all trainers or of the coordinator, as long as the
budget allows; their start; the end of the lease of a server that lives and goes on, until it hears of it; the end of
the time in which members may come back to a new coordinator, when a host has not yet. A process that dies takes along
everything it has sent, or nothing. Members rejoin in the order of their names, or, as long as a lease may end, one of
them later than others. Time (pauses, limits) passes when nothing is under way.

All orders of all messages are too many: 10^5 states for one step, without any crash. So an exploration names the
messages that are *free*, which arrive at any time; the others arrive at once, in a fixed order. A crash may come
between any two arrivals, of either kind. Names: classes of requests (`wire.py`), also as `Push of trainer 1`, `Fold of
slot 0`; classes of answers, and `answer` for all; `end` (the one asked is gone), `loss` (between trainers); types of
words, also as `placement to server`.

Checked in each state: records as of every step that the logs reach, parities as of what was folded, lookups, losses
and dense values are those of the undisturbed run (I1 to I4, I7); nobody gives up (I5); logs are bounded (I6); what a
trainer counts as complete, every slot has acknowledged; what a source counts as folded by a holder, that one has
folded, and nothing that the source has not applied; the last complete snapshot is on every whole holder. And from
every state the end can be reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torch_ecrec.processes.member import join_message
from torch_ecrec.protocol.wire import training_step
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.testing.fingerprint import fingerprint
from torch_ecrec.testing.processes import Call, Center, Oracle, Process, Server, Trainer
from torch_ecrec.testing.simulation import Load, Scenario

COORDINATOR = "coordinator"
LIVE_PROCESSES = 4000  # kept as they are, so that not every one is made again

Action = tuple[Any, ...]


def tiny(steps: int, loads: int = 0) -> Scenario:
    """Three slots, (2, 1), two trainers, one table of two stripes: a slot with records only, two with parities, too."""
    table = TableSpec("a", rows=4, dim=1, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1))
    return Scenario(
        code=CodeSpec(slots=3, k=2, r=1),
        tables=(table,),
        steps=steps,
        spares=1,
        rebuild_chunk_bytes=1 << 20,
        late=0.0,
        loads=(Load(0, 0, 2), Load(0, 1, 3, change=True))[:loads],
    )


@dataclass(frozen=True)
class Budget:
    """How many crashes of each kind, and how many servers are taken for lost that are not: since their lease ended, or
    since they did not come back to a new coordinator in time."""

    servers: int = 0
    trainers: int = 0
    coordinators: int = 0
    leases: int = 0


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


@dataclass(frozen=True)
class Exploration:
    """What is explored: so many steps, with these crashes, and these messages free; after so many loads (2 at most).

    With loads no trainers may die: those that come load again, and count other steps than the undisturbed run does.
    """

    steps: int
    budget: Budget
    free: frozenset[str]
    loads: int = 0

    def explorer(self) -> Explorer:
        require(not (self.loads and self.budget.trainers), "trainers cannot die where there are `loads`")
        return Explorer(tiny(self.steps, self.loads), self.budget, self.free)


class Violation(AssertionError):
    """What was found, and the actions that lead there."""


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
class Cluster:
    """A state of the whole cluster; numbers are those of the explorer's tables.

    Attributes:
        processes: (name, number of its state), by name; those that live.
        flight: numbers of the messages under way between servers and trainers, ascending.
        lines: (from, to, words), by name: connections with the coordinator that have words under way.
        connected: members that the coordinator has a connection with.
        left: crashes that may still come.
        life: how many coordinators there were before.
    """

    processes: tuple[tuple[str, int], ...]
    flight: tuple[int, ...]
    lines: tuple[tuple[str, str, tuple[int, ...]], ...]
    connected: tuple[str, ...]
    left: Budget
    life: int


class Draft:
    """A state in the making."""

    def __init__(self, state: Cluster) -> None:
        self.processes = dict(state.processes)
        self.flight = list(state.flight)
        self.lines = {(origin, to): list(words) for origin, to, words in state.lines}
        self.connected = set(state.connected)
        self.left, self.life = state.left, state.life

    @property
    def trainers(self) -> list[str]:
        return [name for name in self.processes if name.startswith("trainer")]

    def say(self, origin: str, to: str, word: int) -> None:
        self.lines.setdefault((origin, to), []).append(word)

    def spend(self, kind: str) -> None:
        """One crash less may still come."""
        self.left = replace(self.left, **{kind: getattr(self.left, kind) - 1})

    def finish(self) -> Cluster:
        return Cluster(
            tuple(sorted(self.processes.items())),
            tuple(sorted(self.flight)),
            tuple((*ends, tuple(words)) for ends, words in sorted(self.lines.items()) if words),
            tuple(sorted(self.connected)),
            self.left,
            self.life,
        )


@dataclass
class Explored:
    """What was explored."""

    states: int = 0
    transitions: int = 0
    locals: int = 0  # states of single processes
    worked_out: int = 0  # events worked out by the core
    ends: int = 0
    depth: int = 0
    exhausted: bool = False
    seconds: float = 0.0


class Explorer:
    """Explores one scenario.

    Args:
        scenario: what runs.
        budget: which crashes may come.
        free: names of messages that arrive at any time; the others arrive at once. See the module.
    """

    def __init__(self, scenario: Scenario, budget: Budget, free: Iterable[str]) -> None:
        self.scenario, self.budget, self.free = scenario, budget, frozenset(free)
        self.settings = Settings(rebuild_chunk_bytes=scenario.rebuild_chunk_bytes, rebuild_bytes_per_s=0)
        self.oracle = Oracle.of(scenario)
        self.locals, self.messages, self.words = Table(), Table(), Table()
        self._live: OrderedDict[int, Process] = OrderedDict()
        self._pairs: set[tuple[int, int]] = set()  # states of two processes that were checked together
        self._is_free: list[bool] = []  # of each message
        self.explored = Explored()

    # one process --------------------------------------------------------------------------------

    def _birth(self, name: str, make: Callable[[], Process]) -> int:
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
            self.locals.things[number] = Local(mark, birth, history, _view(process))
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

    def _view(self, number: int) -> dict[str, Any]:
        """What others may see of a process in that state."""
        view: dict[str, Any] = self.locals.things[number].view
        return view

    def _on(self, number: int, kind: str, what: Any, key: int) -> tuple[int, tuple[Any, ...]]:
        """The state after an event (`key` tells it from others of its kind), and what the process says."""
        local: Local = self.locals.things[number]
        known = local.effects.get((kind, key))
        if known is None:
            self.explored.worked_out += 1
            process = self._process(number)
            process.out = []
            process.on(kind, what)
            said = tuple(self._said(process, one) for one in process.out)
            process.out = []
            after = self._number(local.birth, (*local.history, (kind, what)), process)
            known = local.effects[kind, key] = after, said
        return known

    def _message(self, key: Any, message: tuple[Any, ...]) -> int:
        number = self.messages.number(key, message)
        if number == len(self._is_free):
            names = {message[0]}
            if message[0] == "answer":
                names.add(type(message[4]).__name__)
            if message[0] == "request":
                request = message[1].request
                name = type(request).__name__
                source, trainer = getattr(request, "source", -1), getattr(request, "trainer", -1)
                names = {name, f"{name} of slot {source}", f"{name} of trainer {trainer}"}
            self._is_free.append(bool(names & self.free))
        return number

    def _said(self, process: Process, one: tuple[Any, ...]) -> tuple[Any, ...]:
        """With contents as numbers."""
        kind = one[0]
        if kind == "request":
            call: Call = one[1]
            return "flight", call.receiver, self._message((call.sender, call.receiver, call.token), one)
        if kind == "answer":
            _, asker, token, answer = one
            key = process.name, asker, token, fingerprint(answer)
            return "flight", asker, self._message(key, (kind, process.name, asker, token, answer))
        if kind == "loss":
            return "flight", one[1], self._message((process.name, *one), (kind, process.name, *one[1:]))
        if kind == "tell":
            return "tell", self._word(one[1])
        if kind == "send":
            return "send", one[1], self._word(one[2])
        return one

    def _word(self, message: dict[str, Any]) -> int:
        return self.words.number(fingerprint(message), message)

    # the whole ----------------------------------------------------------------------------------

    def begin(self) -> Cluster:
        """All have joined and are placed; trainers have asked for the rows of their first step."""
        scenario = self.scenario
        draft = Draft(Cluster((), (), (), (), self.budget, 0))
        self._start_coordinator(draft)
        for _ in range(scenario.code.slots + scenario.spares):
            self._at(draft, COORDINATOR, "join", join_message(role="server", birth="one"), 0)
        self._at(draft, COORDINATOR, "start", None, 0)
        return self._all_words_heard(draft.finish())

    def _all_words_heard(self, state: Cluster) -> Cluster:
        while state.lines:
            origin, to, _ = state.lines[0]
            state = self.after(state, ("word", origin, to))
        return state

    def _start_coordinator(self, draft: Draft) -> None:
        scenario, life = self.scenario, draft.life
        draft.processes[COORDINATOR] = self._birth(f"{COORDINATOR} {life}", lambda: Center(scenario, life))

    def _at(self, draft: Draft, name: str, kind: str, what: Any, key: int) -> None:
        """An event at a process, and what follows from what it says."""
        draft.processes[name], said = self._on(draft.processes[name], kind, what, key)
        for one in said:
            if one[0] == "flight":
                if one[1] in draft.processes or self.messages.things[one[2]][0] == "request":
                    draft.flight.append(one[2])
            elif one[0] == "tell":
                if name in draft.connected:
                    draft.say(name, COORDINATOR, one[1])
            elif one[0] == "send":
                if one[1] in draft.connected:
                    draft.say(COORDINATOR, one[1], one[2])
            elif one[0] == "born":
                self._born(draft, one[1], one[2])
            elif one[0] == "fence":
                draft.say(COORDINATOR, one[1], self._word({"type": "fenced"}))

    def _born(self, draft: Draft, rank: int, name: str) -> None:
        scenario, settings, oracle = self.scenario, self.settings, self.oracle
        draft.connected.add(name)
        if rank < 0:
            draft.processes[name] = self._birth(name, lambda: Server(name, settings, oracle))
        else:
            restarted = "_" in name
            make = lambda: Trainer(name, rank, restarted, scenario, settings, oracle)  # noqa: E731
            draft.processes[name] = self._birth(name, make)

    def after(self, state: Cluster, action: Action) -> Cluster:
        """The state after an action that is enabled."""
        draft = Draft(state)
        kind = action[0]
        if kind == "message":
            draft.flight.remove(action[1])
            self._arrive(draft, action[1])
        elif kind == "word":
            self._hear(draft, action[1], action[2])
        elif action == ("crash", COORDINATOR):
            draft.spend("coordinators")
            del draft.processes[COORDINATOR]
            draft.lines, draft.connected = {}, set()
        elif kind == "crash":
            _, name, takes_along = action
            draft.spend("trainers" if name == "trainers" else "servers")
            self._end(draft, draft.trainers if name == "trainers" else [name], takes_along)
        elif kind == "lease":
            draft.spend("leases")
            self._at(draft, COORDINATOR, "lease", action[1], self._word({"type": "lease", "name": action[1]}))
        elif kind == "hurry":
            draft.spend("leases")
            self._at(draft, COORDINATOR, "time", None, 0)
        elif kind == "start trainers":
            self._at(draft, COORDINATOR, "start", None, 0)
        elif kind == "start coordinator":
            draft.life += 1
            self._start_coordinator(draft)
        elif kind == "rejoin":
            draft.connected.add(action[1])
            self._at(draft, action[1], "rejoin", None, 0)
        elif kind == "time":
            for name in sorted(draft.processes):
                self._at(draft, name, "time", None, 0)
        return draft.finish()

    def _arrive(self, draft: Draft, number: int) -> None:
        message = self.messages.things[number]
        if message[0] == "request":
            call: Call = message[1]
            if call.receiver in draft.processes:
                self._at(draft, call.receiver, "request", call, number)
            elif call.sender in draft.processes:
                self._at(draft, call.sender, "end", call.token, number)
        elif message[0] == "end":
            self._at(draft, message[1], "end", message[2], number)
        elif message[0] == "answer":
            _, _, asker, token, answer = message
            self._at(draft, asker, "answer", (token, answer), number)
        else:
            _, _, to, *what = message
            self._at(draft, to, "loss", tuple(what), number)
        self._end_those_over(draft)

    def _hear(self, draft: Draft, origin: str, to: str) -> None:
        word = draft.lines[origin, to].pop(0)
        message = self.words.things[word]
        if to == COORDINATOR:
            if message["type"] == "lost":
                self._at(draft, to, "lost", origin, self._word({"type": "lost", "name": origin}))
            else:
                self._at(draft, to, "heard", (origin, message), self._word({"from": origin, "word": word}))
        elif message["type"] == "fenced":
            self._end(draft, draft.trainers if to in draft.trainers else [to], takes_along=False)
        else:
            self._at(draft, to, "told", message, word)
        self._end_those_over(draft)

    def _end_those_over(self, draft: Draft) -> None:
        for name in [name for name, number in draft.processes.items() if self._view(number)["over"]]:
            if name.startswith("trainer"):
                self._end(draft, draft.trainers, takes_along=False)
                continue
            self._end(draft, [name], takes_along=False)
            if COORDINATOR in draft.processes:  # as a new one
                self._at(draft, COORDINATOR, "join", join_message(role="server", birth="one"), 0)

    def _end(self, draft: Draft, names: list[str], takes_along: bool) -> None:
        """Some processes are gone, with what they have under way or without."""
        for name in [name for name in names if name in draft.processes]:
            del draft.processes[name]
            kept, answered = [], set()
            for number in draft.flight:
                origin, to, token = _ends(self.messages.things[number])
                if to == name and self.messages.things[number][0] != "request":
                    continue
                if origin == name and takes_along:
                    continue
                kept.append(number)
                if name in (origin, to):
                    answered.add((origin if to == name else to, token))
            draft.flight = kept
            for other, number in draft.processes.items():
                for token, asked in self._view(number)["calls"]:
                    if asked == name and (other, token) not in answered:
                        draft.flight.append(self._message(("end", other, token), ("end", other, token)))
            draft.lines.pop((COORDINATOR, name), None)
            if name in draft.connected and COORDINATOR in draft.processes:
                draft.say(name, COORDINATOR, self._word({"type": "lost"}))
            draft.connected.discard(name)

    # what may happen ----------------------------------------------------------------------------

    def enabled(self, state: Cluster, is_end: bool) -> list[Action]:
        """Every action that may come next; crashes last, and none once the end is reached."""
        crashes = [] if is_end else list(self._crashes(state))
        urgent = self._first_urgent(state)
        if urgent is not None:
            return [urgent, *crashes]
        names = dict(state.processes)
        actions: list[Action] = [("message", number) for number in dict.fromkeys(state.flight)]
        actions += [("word", origin, to) for origin, to, _ in state.lines]
        trainers = any(name.startswith("trainer") for name in names)
        if COORDINATOR not in names:
            actions.append(("start coordinator",))
        else:
            members = [name for name in names if name != COORDINATOR]
            gone = [name for name in members if name not in state.connected]
            actions += [("rejoin", name) for name in gone[: 2 if state.left.leases else 1]]
            if not trainers and self._view(names[COORDINATOR])["can join"]:
                actions.append(("start trainers",))
        if not actions:
            actions.append(("time",))
        return actions + crashes

    def _first_urgent(self, state: Cluster) -> Action | None:
        for number in state.flight:
            if not self._is_free[number]:
                return "message", number
        for origin, to, words in state.lines:
            kind = self.words.things[words[0]]["type"]
            if not {kind, f"{kind} to {to.partition('-')[0]}"} & self.free:
                return "word", origin, to
        return None

    def _crashes(self, state: Cluster) -> Iterator[Action]:
        left = state.left
        names = [name for name, _ in state.processes]
        if left.servers:
            hosts = [n for n, number in state.processes if self._view(number).get("slots")]
            for name in hosts:
                yield "crash", name, False
                yield "crash", name, True
        if left.trainers and any(name.startswith("trainer") for name in names):
            yield "crash", "trainers", False
            yield "crash", "trainers", True
        if left.coordinators and COORDINATOR in names:
            yield "crash", COORDINATOR
        if left.leases and COORDINATOR in names:
            yield from self._ends_of_leases(state)

    def _ends_of_leases(self, state: Cluster) -> Iterator[Action]:
        """Within the contract: at most r slots are lost or not whole, as the coordinator will see it."""
        code = self.scenario.code
        views = {name: self._view(number) for name, number in state.processes}
        center = views[COORDINATOR]
        for name in sorted({server for server, _ in center["slots placed"]} & views.keys() & set(state.connected)):
            gone = [i for i, (server, healthy) in enumerate(center["slots placed"]) if server == name or not healthy]
            if len(gone) <= code.parities:
                yield "lease", name
        if center["regathering"]:
            back = center["rejoined"] & views.keys()
            _, placed = max((views[name].get("placement", (0, [])) for name in back), default=(0, []))
            gone = [i for i, (server, healthy) in enumerate(placed) if server not in back or not healthy]
            hosts = {name for name, view in views.items() if view.get("slots")}
            if placed and len(gone) <= code.parities and hosts - back:
                yield ("hurry",)

    # what must hold -----------------------------------------------------------------------------

    def is_end(self, state: Cluster) -> bool:
        """Training is over, and every slot is whole and settled."""
        if state.flight or state.lines:
            return False
        views = {name: self._view(number) for name, number in state.processes}
        trainers = [view for name, view in views.items() if name.startswith("trainer")]
        if len(trainers) < self.scenario.trainers or not all(view["done"] for view in trainers):
            return False
        if COORDINATOR not in views or not views[COORDINATOR]["whole"]:
            return False
        slots = [slot for view in views.values() for slot in view.get("slots", {}).values()]
        steps = len(self.scenario.loads) + self.scenario.steps
        return all(slot["whole"] and slot["applied"] == slot["settled"] == steps for slot in slots)

    def check(self, state: Cluster) -> None:
        """What no process can see alone. Raises AssertionError."""
        servers = [number for name, number in state.processes if name.startswith("server")]
        trainers = [number for name, number in state.processes if name.startswith("trainer")]
        for number in servers:
            for other in (*servers, *trainers):
                if (number, other) not in self._pairs:
                    check = _check_slots if other in servers else _check_client
                    check(self._view(number), self._view(other))
                    self._pairs.add((number, other))
        for name, number in state.processes:
            if name == COORDINATOR:
                fatal = self._view(number)["fatal"]
                assert fatal is None, f"the cluster stopped: {fatal}"

    # the search ---------------------------------------------------------------------------------

    def run(self, limit: int = 10**9, seconds: float = 1e9, progress: Callable[[str], None] | None = None) -> Explored:
        """Breadth first, so what is found is found on a shortest way.

        Raises:
            Violation: something that must hold does not; its text lists the actions that lead there.
        """
        begin_s = time.monotonic()
        first = self.begin()
        number_of = {hash(first): 0}  # 64 bits: two states of some millions hardly ever have the same
        parents, depths = array("l", [-1]), array("l", [0])
        actions: list[Action] = [()]  # that led to each state first
        before, behind = array("l"), array("l")  # transitions
        ends: list[int] = []
        todo, explored = deque([first]), self.explored
        while todo:
            if len(number_of) >= limit or time.monotonic() - begin_s > seconds:
                break
            state = todo.popleft()
            number = number_of[hash(state)]
            try:
                self.check(state)
                if is_end := self.is_end(state):
                    ends.append(number)
                enabled = self.enabled(state, is_end)
            except AssertionError as error:
                raise self._violation(error, number, parents, actions) from error
            for action in enabled:
                try:
                    following = self.after(state, action)
                except Exception as error:
                    actions.append(action)
                    parents.append(number)
                    raise self._violation(error, len(actions) - 1, parents, actions) from error
                key = hash(following)
                known = number_of.get(key)
                if known is None:
                    known = number_of[key] = len(number_of)
                    parents.append(number)
                    actions.append(action)
                    depths.append(depths[number] + 1)
                    todo.append(following)
                before.append(number)
                behind.append(known)
            if progress is not None and number % 20_000 == 0:
                progress(f"{len(number_of):,} states, {len(self.locals.things):,} of processes, depth {depths[number]}")
        explored.states, explored.transitions, explored.ends = len(number_of), len(before), len(ends)
        explored.locals, explored.depth = len(self.locals.things), depths[-1]
        explored.exhausted = not todo
        explored.seconds = time.monotonic() - begin_s
        if explored.exhausted:
            self._check_ends(len(number_of), before, behind, ends, parents, actions)
        return explored

    def _check_ends(self, states: int, before: Any, behind: Any, ends: list[int], parents: Any, actions: Any) -> None:
        """From every state the end can be reached."""
        origins, targets = np.frombuffer(before, dtype=np.int64), np.frombuffer(behind, dtype=np.int64)
        good = np.zeros(states, dtype=bool)
        good[ends] = True
        while True:
            more = np.unique(origins[good[targets] & ~good[origins]])
            if not len(more):
                break
            good[more] = True
        if not good.all():
            number = int(np.flatnonzero(~good)[0])
            raise self._violation(AssertionError("the end cannot be reached from here"), number, parents, actions)

    def _violation(self, error: Exception, number: int, parents: Any, actions: Any) -> Violation:
        steps: list[str] = []
        while number > 0:
            steps.append(self.describe(actions[number]))
            number = parents[number]
        lines = "\n  ".join(f"{i:3} {text}" for i, text in enumerate(reversed(steps), 1))
        return Violation(f"{type(error).__name__}: {error}\nafter\n  {lines}")

    def describe(self, action: Action) -> str:
        if action[0] == "message":
            message = self.messages.things[action[1]]
            if message[0] == "request":
                return f"{message[1].sender} -> {message[1].receiver}: {_short(message[1].request)}"
            if message[0] == "answer":
                return f"{message[1]} -> {message[2]}: {_short(message[4])} to {message[3].split()[0]}"
            return " ".join(str(part) for part in message)
        return " ".join(str(part) for part in action)


def _short(value: Any) -> str:
    """A message without its arrays."""
    kept = {k: v for k, v in vars(value).items() if isinstance(v, (int, str, dict)) and not isinstance(v, bool)}
    return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in kept.items())})"


def _ends(message: tuple[Any, ...]) -> tuple[str, str, str]:
    """Sender, receiver, and the token of the call it belongs to."""
    if message[0] == "request":
        return message[1].sender, message[1].receiver, message[1].token
    if message[0] == "end":
        return "", message[1], message[2]
    return message[1], message[2], message[3] if message[0] == "answer" else ""


def _view(process: Process) -> dict[str, Any]:
    """What the search needs to know of a process's state."""
    view: dict[str, Any] = {
        "calls": [(token, peer) for token, (peer, _) in process.calls.items()],
        "over": process.over,
    }
    if isinstance(process, Trainer):
        client = process.node
        snapshot = client.resumable if training_step(client.resumable, client.origin) else 0
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
        view |= {"history": host.history, "snapshot slots": host.snapshot_slots}
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


def _check_slots(sources: dict[str, Any], holders: dict[str, Any]) -> None:
    """What a source counts as folded by a holder, that one has folded, and nothing that was not applied."""
    if sources["history"] != holders["history"] or sources["history"][1]:
        return
    for i, source in sources["slots"].items():
        for h, holder in holders["slots"].items():
            if h not in source["confirmed"] or not source["ready"] or not holder["ready"]:
                continue
            knows = source["incarnations"].get(h) == holder["incarnation"]
            if knows and holder["incarnations"].get(i) == source["incarnation"] and i in holder["folded"]:
                confirmed, folded = source["confirmed"][h], holder["folded"][i]
                assert folded <= source["applied"], (
                    f"slot {h} has folded step {folded} of {i}, which it has not applied"
                )
                assert confirmed <= folded, f"slot {i} counts step {confirmed} as folded by {h}, which folded {folded}"
                assert source["acknowledged"] <= folded or not holder["reported"], (
                    f"slot {i} acknowledged {source['acknowledged']}, but {h}, which is whole, has folded {folded}"
                )


def _check_client(server: dict[str, Any], trainer: dict[str, Any]) -> None:
    """What a trainer counts as complete, slots that it knows have acknowledged; whole holders have its snapshot."""
    if server["history"] != (trainer["era"], False):
        return
    for index, slot in server["slots"].items():
        if not slot["ready"] or index >= len(trainer["placed"]) or trainer["placed"][index] != slot["incarnation"]:
            continue
        assert trainer["complete"] <= slot["acknowledged"], (
            f"trainer {trainer['rank']} counts step {trainer['complete']} as complete, slot {index} acknowledged"
            f" {slot['acknowledged']}"
        )
        step = trainer["snapshot"]
        if step and slot["reported"] and index in server["snapshot slots"]:
            later = any(key[0] > step and key[1] == trainer["rank"] for key in slot["snapshots"])
            assert later or (step, trainer["rank"]) in slot["snapshots"], (
                f"slot {index} lacks the snapshot of trainer {trainer['rank']} of step {step}, which is complete"
            )


def explore(exploration: Exploration, limit: int = 10**9, seconds: float = 1e9) -> tuple[Explored, str]:
    """Runs it; returns what was explored, and a line of a table (see `HEADER`)."""
    begin_s = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begin_s:5.0f} s: {text}", file=sys.stderr, flush=True)

    found = exploration.explorer().run(limit, seconds, progress)
    budget, free = exploration.budget, ", ".join(sorted(exploration.free)) or "none"
    whole = "" if found.exhausted else "more than "
    crashes = f"{budget.servers} / {budget.trainers} / {budget.coordinators} / {budget.leases}"
    figures = f"{whole}{found.states:,} | {found.transitions:,} | {found.ends} | {found.depth} | {found.worked_out:,}"
    steps = f"{exploration.loads} + {exploration.steps}" if exploration.loads else exploration.steps
    return found, f"| {steps} | {crashes} | {free} | {figures} | {found.seconds:.0f} |"


def arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m torch_ecrec.testing.exploration", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--loads", type=int, default=0, choices=(0, 1, 2), help="steps that load initial values")
    parser.add_argument("--server-crashes", type=int, default=0)
    parser.add_argument("--trainer-crashes", type=int, default=0, help="each of all trainers together")
    parser.add_argument("--coordinator-crashes", type=int, default=0)
    parser.add_argument("--leases", type=int, default=0, help="servers that are taken for lost and live")
    parser.add_argument(
        "--free",
        type=lambda text: frozenset(text.split(",")) - {""},
        metavar="NAME,...",
        help="messages that arrive at any time; without it, all of the module's own explorations are run",
    )
    parser.add_argument("--limit", type=int, default=10**9, help="end after so many states")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    return parser.parse_args()


HEADER = """\
| steps | servers / trainers / coordinators / leases | free | states | transitions | ends | depth | worked out | s |
|---|---|---|---|---|---|---|---|---|"""
NONE: frozenset[str] = frozenset()
EXPLORATIONS = (
    Exploration(1, Budget(), frozenset({"Push", "Fold", "Snapshot"})),
    Exploration(1, Budget(servers=1), frozenset({"Push of trainer 1", "Fold of slot 0", "placement to server"})),
    Exploration(2, Budget(servers=1), frozenset({"Fold of slot 0", "placement to server"})),
    Exploration(2, Budget(trainers=1), frozenset({"era"})),
    Exploration(2, Budget(trainers=1), frozenset({"Fold of slot 0"})),
    Exploration(2, Budget(trainers=1), frozenset({"Snapshot of trainer 1"})),
    Exploration(3, Budget(trainers=1), frozenset({"Push of trainer 1"})),
    Exploration(1, Budget(leases=1), frozenset({"fatal", "placement", "Fold of slot 0"})),
    Exploration(2, Budget(leases=1), frozenset({"fatal", "placement"})),
    Exploration(2, Budget(servers=1, trainers=1), NONE),
    Exploration(2, Budget(coordinators=1), frozenset({"Fold of slot 0"})),
    Exploration(1, Budget(coordinators=1, leases=1), NONE),
    Exploration(1, Budget(servers=1, coordinators=1), NONE),
    Exploration(1, Budget(trainers=1, coordinators=1), NONE),
    Exploration(1, Budget(servers=1, trainers=1, coordinators=1), NONE),
    Exploration(0, Budget(), frozenset({"Load", "Fold"}), loads=2),
    Exploration(0, Budget(servers=1), frozenset({"Fold of slot 0"}), loads=2),
    Exploration(0, Budget(coordinators=1), frozenset({"loaded"}), loads=1),
)


def main() -> int:
    """Runs what the arguments ask for; prints a table in Markdown. Returns 1 if something does not hold."""
    args = arguments()
    chosen: Iterable[Exploration] = EXPLORATIONS
    if args.free is not None:
        budget = Budget(args.server_crashes, args.trainer_crashes, args.coordinator_crashes, args.leases)
        chosen = [Exploration(args.steps, budget, args.free, args.loads)]
    print(HEADER, flush=True)
    for exploration in chosen:
        try:
            print(explore(exploration, args.limit, args.seconds)[1], flush=True)
        except Violation as violation:
            print(f"{exploration}: found: {violation}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
