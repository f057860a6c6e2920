"""Random schedules for the election of coordinators (`coordinator/election.py`), and what must hold at every moment.

    found = run(schedule(7, "forget1")).finds

    PYTHONPATH=tests/support python -m election_explorer --profile mix --seeds 0:2000 --shrink 2

The real `Candidate` runs in *processes* (fibers: greenlet) on a virtual clock, against an etcd that behaves as the real
one does in what matters here: revisions that also leases' ends increase, lease ids that are never used twice, leases
that begin anew when etcd is started again, a transaction that compares first. A call has three moments: it is sent, it
takes effect, its answer is read. A process that is stopped (SIGSTOP) stands still at whichever comes next; what it has
sent takes effect all the same. Members look who leads as `transport/whereabouts.py:Elected` does, and keep or leave
connections as `is_followed` says.

A schedule is a list of events `(at_s, kind, *what)`; all else follows from the seed of the jitter, so that a schedule
can be shrunk by leaving events out. Kinds:

    fault p kind s    the next call of process p: refused, unanswered, late (by s), slow (half of s before its effect)
    cut p s           no call of p arrives for s
    outage s          etcd answers nobody for s; its leases begin anew then
    forget s          likewise, and it is empty then
    restore s back    likewise, and it is as it was `back` seconds before
    stop p s          SIGSTOP for s
    before p call s   SIGSTOP for s, just before it sends its next call of that name
    pace p s          every call of p takes s from now on, half of it before its effect
    begins p s        what a run begins with takes p so long to find
    kill p / term p   it ends; it is told to end
    start             one more process, that knows nothing
    end               whoever acts is told that the run is over (members hear that at once)
    skew p s          its clock is s further (before it starts)

What is checked:

    two        two processes that are not stopped both `hold`
    second     a run begins while one goes on, and a live process knows of that one
    second-asleep  likewise, and all who know of it are stopped or cut off at that moment
    begun-twice    a run begins that somebody has led
    untrue     a process ends as if its run were over, and it is not
    led-on     an ended run is led after its end has been written to etcd (`led-on-untold`: before that could be said)
    led-on-ever    likewise, long after all faults
    revision   somebody leads whose revision is not larger than any that members have seen of another leader
    nobody     long after all faults, nobody leads though a process lives (`many`: several hold)
    lost       long after all faults, a member is not with who leads
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import greenlet

from torch_ecrec.coordinator import election
from torch_ecrec.coordinator.election import RETRY_S, Candidate, Standing
from torch_ecrec.processes.leadership import ENDS_S, PATIENT
from torch_ecrec.testing.etcd import VirtualEtcd
from torch_ecrec.transport.etcd import NOBODY, SLOWER, EtcdUnavailable, Last, Leader

State = tuple[int, Leader | None, Last, dict[int, tuple[float, float]]]  # of etcd: revision, both keys, leases

# What cannot be seen where etcd is put back within a moment after somebody took the lead: nobody may know of that yet.
BLIND, BLIND_S = {"two", "revision", "lost", "begun-twice"}, 0.5
NOTHING: State = (1, None, NOBODY, {})


class Found(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


# etcd ---------------------------------------------------------------------------------------------


class Etcd(VirtualEtcd):
    """With what it was before, to be put back to, and revisions that the ends of leases increase."""

    def __init__(self, run: World) -> None:
        super().__init__()
        self.run, self.history = run, list[tuple[float, State]]()
        self.put_back(NOTHING)

    def _note(self) -> None:
        self.history.append((self.run.now, (self.revision, self.leader, self.last, dict(self.leases))))

    def _drop(self, lease: int) -> None:
        if self.leader is not None and self.leader.lease == lease:
            self.revision += 1
        super()._drop(lease)
        self._note()

    def grant(self, ttl_s: float, now_s: float) -> int:
        found = super().grant(ttl_s, now_s)
        self._note()
        return found

    def revoke(self, lease: int) -> None:
        if lease not in self.leases:
            raise EtcdUnavailable("requested lease not found")
        super().revoke(lease)

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
        done = super().take(me, address, lease, last)
        if done:
            assert self.leader is not None
            self._note()
            self.run.on_take(self.leader, self.last)
        return done

    def write(self, said: Last, last: Last) -> bool:
        done = super().write(said, last)
        if done:
            self._note()
            if said.over:
                self.run.over_written.add(said.run)
        return done

    def put_back(self, to: State) -> None:
        self.revision, self.leader, self.last, leases = to
        self.leases = dict(leases)
        self.start_again()

    def start_again(self) -> None:
        """Leases begin anew."""
        self.leases = {lease: (ttl_s, self.run.now + ttl_s) for lease, (ttl_s, _) in self.leases.items()}
        self._note()

    def before(self, at_s: float) -> State:
        """What it knew then."""
        return next((state for noted_s, state in reversed(self.history) if noted_s <= at_s), NOTHING)


# processes ----------------------------------------------------------------------------------------


class Keys:
    """Of one process."""

    def __init__(self, proc: Proc) -> None:
        self.p, self.e = proc, proc.world.etcd

    def look(self) -> tuple[Leader | None, Last]:
        return self.p.call("look", self.e.look)

    def grant(self, ttl: int) -> int:
        return self.p.call("grant", lambda: self.e.grant(ttl, self.p.world.now))

    def renew(self, lease: int) -> bool:
        return self.p.call("renew", lambda: self.e.renew(lease, self.p.world.now))

    def revoke(self, lease: int) -> None:
        with contextlib.suppress(EtcdUnavailable):
            self.p.call("revoke", lambda: self.e.revoke(lease))

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
        return self.p.call("take", lambda: self.e.take(me, address, lease, last))

    def write(self, said: Last, last: Last) -> bool:
        return self.p.call("end" if said.over else "write", lambda: self.e.write(said, last))


class Proc:
    def __init__(self, world: World, number: int, skew: float = 0.0) -> None:
        self.world, self.number, self.skew = world, number, skew
        self.dead = False
        self.why = ""
        self.stopped_until = 0.0
        self.cut_until = 0.0
        self.faults: list[tuple[str, float]] = []
        self.before: list[tuple[str, float]] = []
        self.pace = 0.0
        self.limit = world.ttl / 4  # of a call, as `EtcdKeys` has it, of one address
        self.stop_said = False  # the run is over
        self.term = False
        self.begins_s = 0.0
        self.idle = False
        self.closing = False  # it serves nobody any more
        self.known = NOBODY
        self.lives = 0
        self.candidate: Candidate | None = None
        self.fresh()
        self.token = 0
        self.fiber = greenlet.greenlet(self.main, world.hub)
        world.at(world.now, lambda: self.resume(0))

    def fresh(self) -> None:
        self.lives += 1
        w, n = self.world, self.number
        self.candidate = Candidate(
            Keys(self),
            (f"host{n}", 1),
            w.ttl,
            f"run{n}.{self.lives}",
            lambda: w.now + self.skew,
            self.begins,
            self.known,
            lambda: 1e9 + w.now + w.lag[n % 7],
        )
        w.names[self.candidate.id] = f"p{n}.{self.lives}"
        w.procs_of[self.candidate.id] = self

    def begins(self) -> str:
        if self.begins_s:
            self.sleep(self.begins_s)
        return "what it begins with"

    @property
    def is_cut(self) -> bool:
        return self.world.now < self.cut_until

    @property
    def paused(self) -> bool:
        return self.world.now < self.stopped_until

    @property
    def holds(self) -> bool:
        return (
            not self.dead
            and not self.paused
            and not self.closing
            and self.candidate is not None
            and self.candidate.holds
        )

    # fibers
    def sleep(self, seconds: float) -> None:
        self.token += 1
        token = self.token
        self.world.at(self.world.now + max(seconds, 0.0), lambda: self.resume(token))
        self.world.hub.switch()
        if self.dead:
            raise greenlet.GreenletExit

    def resume(self, token: int) -> None:
        if self.dead or token != self.token:
            return
        if self.paused:
            self.world.at(self.stopped_until, lambda: self.resume(token))
            return
        self.fiber.parent = self.world.hub
        self.fiber.switch()

    def wake(self) -> None:
        """`Event.wait` ends."""
        if self.idle and not self.paused:
            self.resume(self.token)

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        w = self.world
        kind, more = self.faults.pop(0) if self.faults else ("none", 0.0)
        j = w.jitter
        for i, (what, seconds) in enumerate(self.before):
            if what == name:
                del self.before[i]
                w.tell(f"p{self.number} is stopped before {name}, for {seconds:g} s")
                self.stopped_until = w.now + seconds
                break
        self.sleep(0.0001 + j.choice((0.0, 0.0005, 0.003)))  # until it is sent
        one, two = j.uniform(0.0005, 0.006), j.uniform(0.0005, 0.006)
        if self.pace:
            one, two = self.pace / 2, self.pace / 2
        if kind == "slow":
            one, two = more / 2, more / 2
        if kind == "refused" or kind == "late":
            if kind == "late":
                w.at(w.now + more, lambda: w.effect(do, self, name, late=True))
            self.sleep(one)
            raise EtcdUnavailable(kind)
        limit = self.limit
        box: list[Any] = []

        def effect() -> None:
            box.append(w.effect(do, self, name))

        w.at(w.now + one, effect)
        if one + two > limit:
            self.sleep(limit)
            self.limit = min(2 * limit, PATIENT * w.ttl)
            w.tell(f"p{self.number} {name} -> no answer in {limit:g} s")
            raise EtcdUnavailable("timeout")
        self.sleep(one + two)
        assert box, "effect before answer"
        ok, found = box[0]
        if kind == "unanswered" or not ok:
            if not ok and str(found) == "cut" and w.jitter.random() < 0.5:  # nothing refuses its connection
                self.sleep(limit)
                self.limit = min(2 * limit, PATIENT * w.ttl)
            w.tell(f"p{self.number} {name} -> no answer ({kind if ok else found})")
            raise EtcdUnavailable(kind if ok else str(found))
        self.limit = min(max(SLOWER * (one + two), w.ttl / 4), PATIENT * w.ttl)
        w.tell(f"p{self.number} {name} -> {w.short(found)}")
        return found

    def main(self) -> None:
        w = self.world
        try:
            while True:
                c = self.candidate
                assert c is not None
                if self.term or self.stop_said:
                    self.close(self.stop_said)
                    return
                before = c.standing
                try:
                    wait = c.step()
                except EtcdUnavailable:
                    wait = RETRY_S
                if c.standing is not before:
                    w.tell(
                        f"p{self.number} {before.value} -> {c.standing.value} run {c.run} led {c.led} again {c.again}"
                    )
                if c.standing is Standing.LEADING and before is Standing.STANDBY:
                    w.on_leads(self)
                if c.standing is Standing.OVER:
                    w.on_over(self)
                    self.finish("over")
                    return
                if c.standing is Standing.FENCED and not self.stop_said and not self.term:
                    self.known = c.known
                    self.sleep(w.jitter.uniform(0.02, 0.2))
                    self.fresh()
                    continue
                self.idle = not (self.term or self.stop_said)
                if self.idle:
                    self.sleep(wait)
                self.idle = False
        except greenlet.GreenletExit:
            return

    def close(self, over: bool) -> None:
        """As `_Coordinator.run` and `Office.close`."""
        c = self.candidate
        assert c is not None
        w = self.world
        if over:
            self.sleep(0.2)
        self.closing = True
        if over:
            until = w.now + ENDS_S
            while True:
                try:
                    found = c.end()
                    w.tell(f"p{self.number} end -> {found}")
                    if found:
                        break
                    c.step()
                except EtcdUnavailable:
                    if w.now > until:
                        break
                self.sleep(RETRY_S)
        c.resign()
        self.finish("told to end")

    def finish(self, why: str) -> None:
        self.dead, self.why = True, why
        self.world.gone(self)

    def kill(self) -> None:
        if not self.dead:
            self.finish("killed")


class Member:
    """`Elected`, and a connection."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.newest = world, 0
        self.with_: tuple[Proc, str, int] | None = None
        world.at(0.25 * world.jitter.random(), self.look)

    def look(self, again: bool = True) -> None:
        w = self.world
        if again:
            w.at(w.now + 0.25, self.look)
        if w.out:
            return
        found = w.etcd.leader
        if found is None or found.revision < self.newest:
            return
        self.newest = found.revision
        if self.with_ is None or found.revision > self.with_[2]:
            proc = w.procs_of[found.id]
            if not proc.dead and proc.candidate is not None and proc.candidate.id == found.id:
                self.with_ = (proc, found.id, found.revision)
            else:
                self.with_ = None


# the world ----------------------------------------------------------------------------------------


class World:
    def __init__(
        self,
        seed: int,
        ttl: int,
        procs: int,
        events: list[tuple[Any, ...]],
        empty: bool,
        verbose: bool = False,
        ignored: frozenset[str] = frozenset(),
    ):
        self.ignored = ignored
        self.jitter = random.Random(seed)
        self.ttl, self.now, self.verbose = ttl, 0.0, verbose
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.hub = greenlet.getcurrent()
        self.etcd = Etcd(self)
        self.names: dict[str, str] = {}
        self.procs_of: dict[str, Proc] = {}
        self.procs: list[Proc] = []
        self.over_written: set[str] = set()
        self.ended: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        self.max_seen = (0, "")
        self.down = 0
        self.taken_s, self.blind = -math.inf, False
        self.finds: list[Found] = []
        if not empty:
            self.etcd.put_back((5, None, Last("before", "earlier", 5, over=True), {}))
        self.lag = [self.jitter.uniform(-0.5, 0.5) for _ in range(7)]  # of the times of day
        skews = {e[2]: e[3] for e in events if e[1] == "skew"}
        self.skews = skews
        for i in range(procs):
            self.at(0.05 * i, lambda i=i: self.start())
        self.members = [Member(self, i) for i in range(3)]
        self.last_event = 0.0
        for event in events:
            if event[1] != "skew":
                self.at(event[0], lambda event=event: self.do(event))
                more = (
                    event[-1]
                    if event[1] in ("fault", "before")
                    else event[3]
                    if event[1] in ("cut", "stop")
                    else event[2]
                    if event[1] in ("outage", "forget", "restore")
                    else 0.0
                )
                if event[1] == "stop" and more > 1e6:
                    more = 0.0
                self.last_event = max(self.last_event, event[0] + more)
        self.stop_at = self.last_event + 9 * ttl + 6.0

    def found(self, kind: str, why: str) -> None:
        if kind not in self.ignored and not (self.blind and kind in BLIND):
            raise Found(kind, why)

    # time
    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (when, next(self.count), do))

    def go(self) -> World:
        try:
            while self.queue and self.queue[0][0] <= self.stop_at:
                when, _, do = heapq.heappop(self.queue)
                if when > self.now:
                    self.check()  # with what was before
                    self.now = when
                    if not self.out:
                        self.etcd.expire(self.now)
                do()
            self.now = self.stop_at
            self.at_end()
        except Found as found:
            self.finds.append(found)
            self.tell(f"FOUND {found}")
        finally:
            for p in self.procs:
                p.dead = True
                if p.fiber and not p.fiber.dead:
                    p.fiber.parent = greenlet.getcurrent()
                    p.fiber.throw(greenlet.GreenletExit)
        return self

    @property
    def out(self) -> bool:
        return self.down > 0

    def tell(self, what: str) -> None:
        if self.verbose:
            print(f"{self.now:8.3f} {what}")

    def short(self, found: Any) -> str:
        if isinstance(found, Leader):
            return f"leader {self.names.get(found.id, found.id)} rev {found.revision} lease {found.lease}"
        if isinstance(found, Last):
            state = f"{found.mark}{' over' if found.over else ''}"
            return f"last {self.names.get(found.id, found.id)} run {found.run} since {found.since} {state}"
        return str(found)

    # calls
    def effect(self, do: Callable[[], Any], proc: Proc, name: str, late: bool = False) -> tuple[bool, Any]:
        if self.out or self.now < proc.cut_until:
            return False, EtcdUnavailable("cut")
        self.etcd.expire(self.now)
        try:
            found = do()
        except EtcdUnavailable as error:
            return False, error
        if late:
            self.tell(f"p{proc.number} {name} (late) -> {self.short(found)}")
        return True, found

    # events
    def start(self) -> None:
        n = len(self.procs)
        self.procs.append(Proc(self, n, self.skews.get(n, 0.0)))
        self.tell(f"p{n} starts")

    def do(self, event: tuple[Any, ...]) -> None:
        kind, what = event[1], event[2:]
        self.tell(f"* {event}")
        if kind in ("fault", "cut", "stop", "kill", "term", "begins", "before", "pace"):
            who = what[0]
            if who == "L":
                leading = [p for p in self.procs if p.holds]
                proc = leading[0] if leading else None
            else:
                proc = self.procs[who] if who < len(self.procs) else None
            if proc is None or proc.dead:
                return
            if kind == "fault":
                proc.faults.append((what[1], what[2]))
            elif kind == "cut":
                proc.cut_until = max(proc.cut_until, self.now + what[1])
            elif kind == "stop":
                proc.stopped_until = max(proc.stopped_until, self.now + what[1])
            elif kind == "begins":
                proc.begins_s = what[1]
            elif kind == "before":
                proc.before.append((what[1], what[2]))
            elif kind == "pace":
                proc.pace = what[1]
            elif kind == "kill":
                proc.kill()
            elif kind == "term":
                proc.term = True
                proc.wake()
        elif kind in ("outage", "forget", "restore"):
            self.down += 1

            def back(kind: str = kind, event: tuple[Any, ...] = event) -> None:
                self.down -= 1
                if kind == "forget":
                    self.etcd.put_back(NOTHING)
                elif kind == "restore":
                    self.blind = self.blind or self.taken_s > event[0] - BLIND_S
                    self.etcd.put_back(self.etcd.before(event[0] - event[3]))
                else:
                    self.etcd.start_again()
                self.tell(f"etcd is back: leader {self.short(self.etcd.leader)} {self.short(self.etcd.last)}")

            self.at(self.now + what[0], back)
        elif kind == "start":
            self.start()
        elif kind == "end":
            for p in self.procs:
                if p.holds and not p.stop_said:
                    p.stop_said = True
                    assert p.candidate is not None
                    self.ended[p.candidate.run] = self.now
                    self.tell(f"p{p.number} is told that run {p.candidate.run} is over")
                    p.wake()  # its thread ends its present step first
                    break

    # what happens
    def on_take(self, leader: Leader, last: Last) -> None:
        self.taken_s = self.now
        if leader.id != self.max_seen[1] and leader.revision <= self.max_seen[0] and self.max_seen[0]:
            newest, of = self.max_seen
            if last.run in self.begun and any(m.newest >= leader.revision for m in self.members):
                self.found("revision", f"{self.names[leader.id]} has {leader.revision}, {self.names[of]} had {newest}")
        if leader.revision > self.max_seen[0]:
            self.max_seen = (leader.revision, leader.id)

    def on_leads(self, p: Proc) -> None:
        c = p.candidate
        assert c is not None
        if c.run in self.ended:
            self.found("led-on" if c.run in self.over_written else "led-on-untold", f"p{p.number} leads {c.run}")
        others = [q for q in self.procs if q is not p and not q.dead and q.candidate is not None]
        if not c.again and c.run in self.begun and any(q.candidate.known.run == c.run for q in others):
            self.found("begun-twice", f"p{p.number} begins {c.run}")
        if not c.again and c.run not in self.begun:
            on = [r for r in self.begun if r not in self.ended]
            for r in on:
                knows = [q for q in others if q.candidate.known.runs and q.candidate.known.run == r]
                if knows:
                    kind = "second" if any(not q.paused and not q.is_cut for q in knows) else "second-asleep"
                    self.found(kind, f"p{p.number} begins {c.run}, and {[q.number for q in knows]} know of {r}")
            self.begun[c.run] = self.now
            for r in on:  # nobody is left who knows: accepted, and members of before do not follow it
                self.ended[r] = self.now
                self.over_written.add(r)
                for m in self.members:
                    m.newest, m.with_ = 0, None
                    m.look(again=False)
                self.max_seen = (0, "")
        self.begun.setdefault(c.run, self.now)

    def on_over(self, p: Proc) -> None:
        c = p.candidate
        assert c is not None
        known = c.known.run if c.known.runs else ""
        if known and known not in self.ended and known in self.begun:
            self.found("untrue", f"p{p.number} ends as if {known} were over")

    def gone(self, p: Proc) -> None:
        for m in self.members:
            if m.with_ is not None and m.with_[0] is p:
                m.with_ = None

    def check(self) -> None:
        holding = [p for p in self.procs if p.holds]
        for m in self.members:  # who is fenced has closed its connections
            if m.with_ is not None:
                c = m.with_[0].candidate
                if not m.with_[0].paused and c is not None and c.id != m.with_[1]:
                    m.with_ = None
        if len(holding) > 1:
            self.found(
                "two", " and ".join(f"p{p.number} ({self.names[p.candidate.id]})" for p in holding if p.candidate)
            )

    def at_end(self) -> None:
        alive = [p for p in self.procs if not p.dead and not p.paused]
        if not alive:
            return  # who has ended as if a run were over was looked at then
        holding = [p for p in alive if p.holds]
        if len(holding) != 1:
            kind = "nobody" if not holding else "many"
            self.found(kind, f"{[(p.number, p.candidate.standing.value) for p in alive]}")
        assert holding[0].candidate is not None
        if holding[0].candidate.run in self.ended:
            self.found("led-on-ever", f"p{holding[0].number} leads {holding[0].candidate.run}, which is over")
        me = holding[0].candidate.id
        leader = self.etcd.leader
        if leader is None or leader.id != me:
            self.found("nobody", f"p{holding[0].number} acts, and etcd says {self.short(leader)}")
        for m in self.members:
            if m.with_ is None or m.with_[1] != me:
                follows = m.with_ and self.names[m.with_[1]]
                why = f"a member that has seen {m.newest} is with {follows}, not with {self.names[me]}"
                self.found("lost", f"{why} since {leader.revision}")


# schedules ----------------------------------------------------------------------------------------

PROFILES = {
    # kinds with weights; forget/restore at most so many
    "plain": dict(forget=0, restore=0, end=0),
    "forget1": dict(forget=1, restore=0, end=0),
    "forget1e": dict(forget=1, restore=0, end=1),
    "forget2": dict(forget=2, restore=0, end=0),
    "restore1": dict(forget=0, restore=1, end=0),
    "mix": dict(forget=2, restore=2, end=2),
    "ends": dict(forget=0, restore=0, end=3),
    # nothing stops for ever or for long; calls, etcd, deaths only
    "forget1calm": dict(forget=1, restore=0, end=0, calm=True),
    "forget2calm": dict(forget=3, restore=0, end=0, calm=True),
    "restore1calm": dict(forget=0, restore=1, end=0, calm=True),
    "endscalm": dict(forget=0, restore=0, end=3, calm=True),
}


def schedule(seed: int, profile: str) -> dict[str, Any]:
    r = random.Random(f"{seed} {profile}")
    about = PROFILES[profile]
    calm = about.get("calm", False)
    ttl = r.choice((2, 2, 2, 3, 5, 10))
    procs = r.choice((1, 2, 2, 3, 3, 4))
    length = r.uniform(4, 14) * ttl / 2
    empty = r.random() < 0.3
    begin = 1.0 + (election.UNKNOWN_LEASES * ttl if empty else 0.0)
    events: list[tuple[Any, ...]] = []
    for p in range(procs + 3):
        if r.random() < 0.3:
            events.append((0.0, "skew", p, r.choice((-1000.0, 0.7, 1e6))))

    def when() -> float:
        return round(r.uniform(begin if r.random() < 0.8 else 0.0, begin + length), 3)

    hot = [when() for _ in range(2)]  # things happen close to each other

    def near() -> float:
        if r.random() >= 0.7:
            return when()
        return max(0.0, round(r.choice(hot) + r.uniform(-0.7, 1.7) * r.choice((0.2, 1.0, ttl / 2)), 3))

    def who() -> str | int:
        return "L" if r.random() < 0.4 else r.randrange(procs + 2)

    spans = [0.0, 0.1, 0.3, 0.6, 0.8 * ttl, 0.95 * ttl, 1.1 * ttl, 1.6 * ttl, 2.2 * ttl, 3 * ttl]
    short = [0.1, 0.2, 0.4, 0.7] if calm else spans
    for _ in range(r.randrange(0, 7)):
        kind = r.choice(("refused", "unanswered", "late", "slow"))
        events.append((near(), "fault", who(), kind, r.choice(short)))
    for _ in range(r.randrange(0, 3)):
        events.append((near(), "cut", who(), r.choice(short)))
    for _ in range(r.randrange(0, 2)):
        events.append((near(), "outage", r.choice(spans)))
    for _ in range(about["forget"]):
        events.append((near(), "forget", r.choice(spans)))
    for _ in range(about["restore"]):
        events.append((near(), "restore", r.choice(spans), round(r.uniform(0, length + begin), 2)))
    if not calm:
        for _ in range(r.randrange(0, 4)):
            events.append(
                (near(), "stop", who(), r.choice(spans + [1e9]) if r.random() < 0.8 else r.uniform(0, 4 * ttl))
            )
        if r.random() < 0.1:
            events.append((near(), "begins", who(), r.choice(spans)))
        for _ in range(r.randrange(0, 2)):
            events.append(
                (near(), "before", who(), r.choice(("look", "write", "grant", "take", "renew", "end")), r.choice(spans))
            )
    for _ in range(r.randrange(0, 3)):
        events.append((near(), r.choice(("kill", "kill", "term")), who()))
    for _ in range(r.randrange(0, 4)):
        events.append((near(), "start"))
    for _ in range(about["end"]):
        if r.random() < 0.7:
            events.append((near(), "end"))
            if r.random() < 0.5:
                events.append((near(), "start"))
    return dict(seed=seed, ttl=ttl, procs=procs, empty=empty, events=sorted(events, key=lambda e: e[0]))


def run(s: dict[str, Any], verbose: bool = False) -> World:
    events, ignored = [tuple(e) for e in s["events"]], frozenset(s.get("ignored", ()))
    world = World(s["seed"], s["ttl"], s["procs"], events, s["empty"], verbose, ignored)
    world.stop_at = s.get("until", world.stop_at)
    return world.go()


def kind_of(s: dict[str, Any]) -> str:
    finds = run(s).finds
    return finds[0].kind if finds else ""


def shrink(s: dict[str, Any], kind: str) -> dict[str, Any]:
    changed = True
    while changed:
        changed = False
        for i in range(len(s["events"])):
            less = {**s, "events": s["events"][:i] + s["events"][i + 1 :]}
            if kind_of(less) == kind:
                s, changed = less, True
                break
        if not changed and s["procs"] > 1:
            less = {**s, "procs": s["procs"] - 1}
            if kind_of(less) == kind:
                s, changed = less, True
    return s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="plain", choices=PROFILES)
    parser.add_argument("--seeds", default="0:500")
    parser.add_argument("--shrink", type=int, default=0, help="so many of each kind")
    parser.add_argument("--show", default="", help="a schedule as JSON, told in full")
    parser.add_argument("--kinds", default="", help="only these are shrunk")
    args = parser.parse_args()
    if args.show:
        for found in run(json.loads(args.show), verbose=True).finds:
            print(found)
        return
    first, last = map(int, args.seeds.split(":"))
    became: Counter[str] = Counter()
    shrunk: Counter[str] = Counter()
    for seed in range(first, last):
        s = schedule(seed, args.profile)
        try:
            found = run(s).finds
        except Exception as error:
            print("ERROR", seed, repr(error), json.dumps(s))
            raise
        kind = found[0].kind if found else "good"
        became[kind] += 1
        if kind != "good" and shrunk[kind] < args.shrink and (not args.kinds or kind in args.kinds.split(",")):
            shrunk[kind] += 1
            less = shrink(s, kind)
            print(run(less).finds[0], json.dumps(less), flush=True)
    print(args.profile, dict(became))


if __name__ == "__main__":
    main()
