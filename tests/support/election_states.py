"""Every state that two candidates and etcd can get into, within a few leases: the rule of `coordinator/election.py`.

    explore(led(), ticks=4)       # raises AssertionError, which tells the way to the state that is wrong

Time passes in ticks, `TTL` to a lease. Between two ticks anybody may do one thing: ask, if it is due; hear the answer,
or that there is none. What was not answered may be done by etcd later. Nobody has to do anything: so a process that is
stopped anywhere, for any time, is among the ways. etcd may lose all its data; that it is put back to a copy is for who
begins an exploration. Who is fenced stands by again; who notices that etcd was put back is started again.

States are equal that differ by the time of day alone; each is visited once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from harness.etcd import VirtualEtcd

from torch_ecrec.coordinator.election import Begin, Candidate, EtcdPutBack, Grant, Look, Renew, Standing, Take
from torch_ecrec.transport.etcd import EtcdUnavailable, View

TTL = 2  # ticks of a lease


class Etcd(VirtualEtcd):
    """It can be copied."""

    def copy(self) -> Etcd:
        new = copy.copy(self)
        new.leases = dict(self.leases)
        return new


class Process:
    """A candidate, and what it has asked: it is copied, and the copy changes."""

    def __init__(self, number: int, life: int = 0, known: View | None = None) -> None:
        self.number, self.life, self.due, self.ended = number, life, 0.0, False
        self.one = Candidate(f"c{number}.{life}", (f"host{number}", 1), TTL, f"run{number}.{life}", known)
        self.asked: Any = None
        self.answer: tuple[Any] | None = None  # on its way
        self.late: Any = None  # what etcd may do yet, although it was not answered

    def copy(self) -> Process:
        new = copy.copy(self)
        new.one = copy.copy(self.one)
        return new


class State:
    """Where all are."""

    def __init__(self, candidates: int = 2) -> None:
        self.now, self.etcd, self.losses = 0, Etcd(lambda: 0), 0
        self.processes = tuple(Process(i) for i in range(candidates))
        self.backup: Etcd | None = None
        self.newest = (0, "")  # revision and id of who has led last

    def key(self) -> Hashable:
        """What all that may come follows from: times as of now, and which revision is newer, not which it is."""
        now = self.now
        views = [p.one.view for p in self.processes] + [p.answer[0] for p in self.processes if p.answer is not None]
        shown = [one for one in (self.etcd, *views) if isinstance(one, (Etcd, View))]
        revisions = {0, self.newest[0], *(p.one.led for p in self.processes), *(one.revision for one in shown)}
        for one in shown:
            revisions |= {what.revision for what in (one.leader, one.run) if what is not None}
        rank = {revision: i for i, revision in enumerate(sorted(revisions))}

        def said(one: Any) -> Hashable:
            if not isinstance(one, (Etcd, View)):
                return one
            leader, run = one.leader, one.run
            return (
                None if leader is None else (leader.id, leader.lease, rank[leader.revision]),
                None if run is None else (run.word, run.leader, run.over, rank[run.revision]),
                rank[one.revision],
            )

        return (
            tuple(self._key(p, said, rank) for p in self.processes),
            said(self.etcd),
            tuple((lease, until - now) for lease, (_, until) in self.etcd.leases.items()),
            (rank[self.newest[0]], self.newest[1], self.losses),
        )

    def _key(self, process: Process, said: Callable[[Any], Hashable], rank: dict[int, int]) -> Hashable:
        one, asked, late = process.one, process.asked, process.late
        looked = max(one._looked_s - self.now, -TTL - 1)
        return (
            one.id,
            one.standing,
            said(one.view),
            one.lease if one.lease in self.etcd.leases else 0,
            looked,
            max(one._watched_s - self.now, looked - TTL),
            max(one._acts_until_s - self.now, 0),
            type(one._question),
            None if one._begins is None else said(View(run=one._begins[0])),
            rank[one.led],
            max(process.due - self.now, 0),
            type(asked),
            max(one._asked_s - self.now, -TTL) if isinstance(asked, Renew) else 0,
            rank.get(asked.seen, -1) if isinstance(asked, Take) else 0,
            None if process.answer is None else said(process.answer[0]),
            None if late is None else (late.lease, late.run.word, rank.get(late.seen, -1)),
        )

    def change(self, number: int = -1) -> tuple[State, Any]:
        """A copy, in which a process may change, and etcd."""
        new = copy.copy(self)
        new.etcd = self.etcd.copy()
        new.etcd.clock = lambda: new.now
        if number < 0:
            return new, None
        process = self.processes[number].copy()
        new.processes = (*self.processes[:number], process, *self.processes[number + 1 :])
        return new, process

    # what may happen ----------------------------------------------------------------------------

    def next(self, losses: int) -> Iterator[tuple[str, State]]:
        """What may be next before the next tick."""
        for number, process in enumerate(self.processes):
            if process.asked is None:
                if process.due <= self.now:
                    yield self.ask(number)
            else:
                yield self.fail(number)
                yield self.hear(number)
            if process.late is not None:
                yield self.take_late_effect(number)
        if self.losses < losses:
            yield self.lose()

    def tick(self) -> State:
        new, _ = self.change()
        new.now += 1
        new.etcd.expire()
        new.forget_late()
        return new

    def ask(self, number: int) -> tuple[str, State]:
        """What is asked is done at once, and heard later; to take the lead is done later. The worst for who waits."""
        new, process = self.change(number)
        process.asked = process.one.ask(new.now)
        if isinstance(process.asked, (Look, Grant, Renew)):
            process.answer = (new.do(process.asked),)
        return f"{process.one.id} asks {process.asked}", new

    def do(self, question: Any) -> Any:
        match question:
            case Begin():
                return "none"
            case Grant():
                used = self.forget_leases()
                self.etcd._next = next(i for i in range(99) if i + 1 not in used)
                return self.etcd.grant(TTL)
            case _:
                return question.of(self.etcd)

    def forget_leases(self) -> set[int]:
        """Those that nobody has. Returns the others."""
        used = {p.one.lease for p in self.processes} | {p.late.lease for p in self.processes if p.late is not None}
        used |= {p.answer[0] for p in self.processes if p.answer is not None and isinstance(p.asked, Grant)}
        if self.etcd.leader is not None:
            used.add(self.etcd.leader.lease)
        if self.backup is not None and self.backup.leader is not None:
            used.add(self.backup.leader.lease)
        self.etcd.leases = {lease: about for lease, about in self.etcd.leases.items() if lease in used}
        return used

    def forget_late(self) -> None:
        """What would be refused, since its lease has ended."""
        for number, process in enumerate(self.processes):
            if process.late is not None and process.late.lease not in self.etcd.leases:
                _, new = self.change(number)
                new.late = None
                self.processes = (*self.processes[:number], new, *self.processes[number + 1 :])

    def fail(self, number: int) -> tuple[str, State]:
        new, process = self.change(number)
        if isinstance(process.asked, Take):
            process.late = process.asked
        process.asked = process.answer = None
        process.one.fail()
        process.due = new.now + 1
        new.forget_leases()
        return f"{process.one.id} has no answer", new

    def take_late_effect(self, number: int) -> tuple[str, State]:
        new, process = self.change(number)
        question, process.late = process.late, None
        with contextlib.suppress(EtcdUnavailable):
            new.do(question)
        return f"etcd does {question}, late", new

    def hear(self, number: int) -> tuple[str, State]:
        new, process = self.change(number)
        try:
            (found,) = process.answer or (new.do(process.asked),)
        except EtcdUnavailable:
            return self.fail(number)
        process.answer, process.asked, one = None, None, process.one
        try:
            process.due = new.now + (one.answer(found, new.now) > 0)
            again, known = one.standing is Standing.FENCED, one.view
        except EtcdPutBack:
            again, known = True, None
        if again:
            started = Process(number, process.life + 1, known)
            started.late = process.late
            new.processes = (*new.processes[:number], started, *new.processes[number + 1 :])
        return f"{one.id} hears {found}: {one.standing.value}", new

    def lose(self) -> tuple[str, State]:
        """All that it had, unless there is a backup."""
        new, _ = self.change()
        new.losses, new.backup = self.losses + 1, None
        if self.backup is None:
            new.etcd.forget()
            return "etcd loses its data", new
        new.etcd = self.backup.copy()
        new.etcd.clock = lambda: new.now
        new.etcd.leases = {lease: (TTL, new.now + TTL) for lease in new.etcd.leases}
        return "etcd is put back to its backup", new

    # what must hold -----------------------------------------------------------------------------

    def check(self) -> None:
        acting = [p.one for p in self.processes if p.one.holds(self.now)]
        assert len(acting) <= 1, f"{[one.id for one in acting]} act"
        for one in acting:
            leader = self.etcd.leader
            if not self.losses:
                assert leader is not None and leader.id == one.id, f"{one.id} acts, and {leader} leads"
            if one.id != self.newest[1]:
                assert one.led > self.newest[0] or self.losses, f"{one.id} has a revision of before"
                self.newest = one.led, one.id


def explore(begin: State, ticks: int, losses: int = 0) -> int:
    """Visits every state within so many ticks; returns how many there are.

    Raises:
        AssertionError: in one of them something does not hold.
    """
    seen: dict[Hashable, tuple[Hashable, str]] = {begin.key(): (None, "")}
    layer = [begin]
    for tick in range(ticks + 1):
        states, at_end = layer, list[State]()
        while states:
            state = states.pop()
            at_end.append(state)
            for what, new in state.next(losses):
                _visit(new, state, what, seen, states)
        layer = []
        for state in at_end if tick < ticks else ():
            _visit(state.tick(), state, "a tick", seen, layer)
    return len(seen)


def _visit(
    new: State, before: State, what: str, seen: dict[Hashable, tuple[Hashable, str]], found: list[State]
) -> None:
    try:
        new.check()
    except AssertionError as error:
        way, key = [what], before.key()
        while key is not None:
            key, said = seen[key]
            way.append(said)
        raise AssertionError("\n".join([str(error), *reversed(way)])) from error
    key = new.key()
    if key not in seen:
        seen[key] = before.key(), what
        found.append(new)


def go_on(state: State, ticks: int, stopped: int = -1) -> State:
    """So many ticks without a fault, but that one process may be stopped."""
    for _ in range(ticks):
        state = state.tick()
        while (new := _step(state, stopped)) is not None:
            state = new
            state.check()
    return state


def _step(state: State, stopped: int) -> State | None:
    for number, process in enumerate(state.processes):
        if number != stopped and process.asked is not None:
            return state.hear(number)[1]
        if number != stopped and process.due <= state.now:
            return state.ask(number)[1]
    return None


def led(candidates: int = 2) -> State:
    """The first one leads, and the others have watched it for longer than a lease."""
    state = go_on(State(candidates), 5 * TTL)
    assert state.processes[0].one.holds(state.now)
    return state
