"""A virtual clock, an etcd and what happens to both: see `election_explorer.py`, which says what is checked."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import greenlet
from election_processes import Member, Proc

from torch_ecrec.testing.etcd import VirtualEtcd
from torch_ecrec.transport.etcd import NOBODY, EtcdUnavailable, Last, Leader

State = tuple[int, Leader | None, Last, dict[int, tuple[float, float]]]  # of etcd: revision, both keys, leases
NOTHING: State = (1, None, NOBODY, {})
AWAKE_S = 0.5  # a look, and a word, of one that has been stopped
# What cannot be seen where etcd is put back within a moment after somebody took the lead: nobody may know of that yet.
BLIND, BLIND_S = {"two", "revision", "lost", "begun-twice"}, 0.5


class Found(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


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
        was = self.last
        done = super().take(me, address, lease, last)
        if done:
            assert self.leader is not None
            self._note()
            self.run.back_at_an_end = was.over and was == self.run.put_back_to
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
        self.put_back_to, self.back_at_an_end = NOBODY, False  # the last who took the lead found etcd like that
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
                    self.put_back_to = self.etcd.last
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
        if not c.again and c.run in self.begun:
            self.found("begun-twice", f"p{p.number} begins {c.run}")
        if not c.again and c.run not in self.begun:
            on = [r for r in self.begun if r not in self.ended]
            for r in on:
                knows = [q for q in others if q.candidate.known.runs and q.candidate.known.run == r]
                if knows:
                    awake = any(self.now > max(q.stopped_until, q.cut_until) + AWAKE_S for q in knows)
                    kind = "second-over" if self.back_at_an_end else "second" if awake else "second-asleep"
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
