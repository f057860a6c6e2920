"""Coordinators that are candidates, and members that look for whoever leads, in a world of `election_world.py`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

from torch_ecrec.coordinator.election import RETRY_S, Candidate, Standing
from torch_ecrec.processes.leadership import ENDS_S, PATIENT
from torch_ecrec.transport.etcd import NOBODY, SLOWER, EtcdUnavailable, Last, Leader, allowed_s

if TYPE_CHECKING:
    from election_world import World


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
        self.lives, self.words = 0, itertools.count()
        self.candidate: Candidate | None = None
        self.fresh()
        self.token = 0
        self.fiber = greenlet.greenlet(self.main, world.hub)
        world.at(world.now, lambda: self.resume(0))

    def fresh(self) -> None:
        self.lives += 1
        self.begins_to_lead = False
        w, n = self.world, self.number
        self.candidate = Candidate(
            Keys(self),
            (f"host{n}", 1),
            w.ttl,
            lambda: f"run{n}.{next(self.words)}",
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

    def allow(self, limit: float) -> None:
        ttl = self.world.ttl
        self.limit = allowed_s(limit, self.limit, ttl / 4, PATIENT * ttl)

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
            if kind == "twice":  # as `EtcdKeys` asks the next address
                box[0] = w.effect(do, self, name)
            if kind == "echo":
                w.at(w.now + more, lambda: w.effect(do, self, name, late=True))

        w.at(w.now + one, effect)
        if one + two > limit:
            self.sleep(limit)
            self.allow(2 * limit)
            w.tell(f"p{self.number} {name} -> no answer in {limit:g} s")
            raise EtcdUnavailable("timeout")
        self.sleep(one + two)
        assert box, "effect before answer"
        ok, found = box[0]
        if kind == "unanswered" or not ok:
            if not ok and str(found) == "cut" and w.jitter.random() < 0.5:  # nothing refuses its connection
                self.sleep(limit)
                self.allow(2 * limit)
            w.tell(f"p{self.number} {name} -> no answer ({kind if ok else found})")
            raise EtcdUnavailable(kind if ok else str(found))
        self.allow(SLOWER * (one + two))
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
                self.begins_to_lead |= c.standing is Standing.LEADING and before is Standing.STANDBY
                if self.begins_to_lead and self.holds:  # else it has read an old answer, and may do nothing yet
                    self.begins_to_lead = False
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
