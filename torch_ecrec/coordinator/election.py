"""One of several coordinators of a cluster: when it leads, and until when it may act.

The rule is pure. A `Candidate` says what to ask etcd next, and is told the answer and the time. Who asks is
`processes/leadership.py`. etcd has two keys of a cluster (`transport/etcd.py`): `leader`, with a lease, and `run`.

    ask() -> Look        answer(view): nobody leads, and it has watched for a lease
    ask() -> Grant       answer(7): its lease
    ask() -> Take        both keys become its own in one transaction, if neither has changed since the look
    ask() -> Look        answer(view): `leader` is its own, by lease 7
    ask() -> Renew       answer(True): it leads, and acts until 1.8 s after it asked, with a lease of 2 s

Invariants.
- *One acts.* A leader acts until `MARGIN` of its lease is over, counted by its own clock from before it asked for the
  renewal. etcd counts from later, and gives the lead to nobody else before the lease is over. A process that was
  stopped, or cannot reach etcd, finds its time over before it does anything.
- *A lease that is lost is a lead that is lost.* Its owner is fenced, for ever. One that could not reach etcd, and finds
  its lease there again, leads on: nobody has led meanwhile.
- *What was asked and not answered may have been done.* The next thing after it is a look.
- *A run ends once.* Who has stood by it, or has led it, has nothing to do with the next one of that name: it ends, too.
- *Whoever was out of touch watches first.* Nobody takes the lead, or acts again, before its looks have shown the same
  `run` for a lease, none of them more than a lease after the one before. A lease alone needs no such wait. It is for an
  etcd that has lost its data, or was put back to a backup: who led by what is gone has stopped acting by then.
- *An etcd that was put back is noticed*: its revision falls, it is another cluster, or `run` is gone. Whoever has seen
  more ends with `EtcdPutBack`, and is to be started again.

Not seen: an etcd put back to a moment ago, when somebody had just taken the lead; then two may act for as long as
`MARGIN` of a lease.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch_ecrec.errors import ClusterError
from torch_ecrec.transport.etcd import Run, View

POLL_S = 0.2  # between two looks of a standby
RETRY_S = 0.2  # after etcd did not answer
RENEWS = 4  # times in a lease
MARGIN = 0.9  # of a lease in which its owner acts
FRESH = 0.5  # of a lease: how old a look may be when the lease is renewed because of it


class EtcdPutBack(ClusterError):
    """etcd knows less than it has said before: it has lost its data, or was put back to a backup."""


class Keys(Protocol):
    """The keys of one cluster in etcd. Implemented by `transport/etcd.py:EtcdKeys`, and in memory by
    `tests/harness/etcd.py:VirtualEtcd`."""

    def look(self) -> View: ...

    def grant(self, ttl_s: int) -> int: ...

    def renew(self, lease: int) -> bool: ...

    def take(self, address: tuple[str, int], lease: int, ttl_s: int, run: Run, seen: int) -> None: ...


@dataclass(frozen=True)
class Look:
    """Asks who leads, and which run."""

    def of(self, keys: Keys) -> View:
        return keys.look()


@dataclass(frozen=True)
class Begin:
    """Asks what a new run begins with: not of etcd. It may take as long as it likes."""


@dataclass(frozen=True)
class Grant:
    """Asks for a lease of `ttl_s` seconds."""

    ttl_s: int

    def of(self, keys: Keys) -> int:
        return keys.grant(self.ttl_s)


@dataclass(frozen=True)
class Take:
    """Takes the lead, if nobody has it, and `run` is what it was at revision `seen`. The answer counts for nothing."""

    address: tuple[str, int]
    lease: int
    ttl_s: int
    run: Run
    seen: int

    def of(self, keys: Keys) -> None:
        keys.take(self.address, self.lease, self.ttl_s, self.run, self.seen)


@dataclass(frozen=True)
class Renew:
    """Renews a lease; answered by whether it was still there."""

    lease: int

    def of(self, keys: Keys) -> bool:
        return keys.renew(self.lease)


Question = Look | Begin | Grant | Take | Renew


class Standing(Enum):
    """The standing of a candidate. It only moves forward, in this order."""

    STANDBY = "standby"
    LEADING = "leading"
    FENCED = "fenced"  # it has led, and its lease is lost
    OVER = "over"  # the run that it stood by, or has led, has ended


class Candidate:
    """One of several coordinators.

    Args:
        id: a word that no other candidate has, or has had.
        address: where it listens, once it leads.
        ttl_s: length of its lease, in seconds. The same for all candidates: each waits for leases of that length.
        word: of the run, if it is the first to lead one; else the run has a word.
        known: what etcd has said to this process before. It goes on with that run, and begins no other.
        build: of its process, which those who stand by compare with theirs.

    Attributes:
        standing: what it is.
        view: what etcd has said last; None: nothing yet.
        lease: by which it leads, or tries to; 0: none yet.
        again: somebody has led the run before it.
        stood_by: somebody else has led while it looked, and not only until the lease of one that was gone has ended.
        run: the word of the run that it leads; `began_with`: the checkpoint that this began with.
        led: the revision since when it leads, by which members know it; 0: it has not led.
    """

    def __init__(
        self, id: str, address: tuple[str, int], ttl_s: int, word: str, known: View | None = None, build: str = ""
    ) -> None:
        self.id, self._address, self._ttl_s, self._word, self._build = id, address, ttl_s, word, build
        self.standing, self.view, self.lease = Standing.STANDBY, known, 0
        self.again, self.run, self.began_with, self.led = False, "", "", 0
        self.stood_by, self._first_s = known is not None, math.inf  # its first look was answered
        self._question: Question = Look()
        self._asked_s = self._looked_s = self._acts_until_s = -math.inf  # its question; the last look was answered
        self._watched_s = math.inf  # since when looks, never more than a lease apart, have shown the same run
        self._begins: tuple[Run | None, str] | None = None  # in the place of which run, and with what

    def holds(self, now_s: float) -> bool:
        """Returns whether it may act at this time: it leads, and nobody else can."""
        return self.standing is Standing.LEADING and now_s < self._acts_until_s

    def ask(self, now_s: float) -> Question:
        """Returns what to ask now. Either `answer` or `fail` comes next."""
        self._asked_s = now_s
        return self._question

    def fail(self) -> float:
        """Notes that etcd did not answer. Returns in how many seconds to ask again."""
        self._question = Look()
        return RETRY_S

    def answer(self, found: Any, now_s: float) -> float:
        """Takes the answer to the last question, which is here now. Returns in how many seconds to ask the next one.

        Raises:
            EtcdPutBack: etcd knows less than it has said before.
        """
        question, self._question = self._question, Look()
        match question:
            case Look():
                return self._on_view(found, now_s)
            case Begin():
                assert self.view is not None, "it has looked before"
                self._begins = self.view.run, found
            case Grant() if now_s <= self._looked_s + self._ttl_s:
                self.lease, self._question = found, self._take(found)
            case Renew():
                return self._on_renewed(found, now_s)
        return 0.0

    def resign(self) -> None:
        """Ends its lead. Whoever then gives its lease back lets another lead at once."""
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED

    def _on_view(self, view: View, now_s: float) -> float:
        known = self.view
        if known is not None and not view.follows(known):
            raise EtcdPutBack(
                f"etcd was put back to an earlier state, or has lost its data (revision {view.revision} of cluster"
                f" {view.cluster:x}, after {known.revision} of {known.cluster:x}): start all coordinators again"
            )
        self.view, run, was = view, view.run, None if known is None else known.run
        if was is not None and not was.over and (run is None or run.over or run.word != was.word):
            self.standing = Standing.OVER
            return POLL_S
        changed = known is None or (run != was and (run is None or run.leader != self.id))
        if changed or now_s > self._looked_s + self._ttl_s:
            self._watched_s = now_s
        self._looked_s, self._first_s = now_s, min(self._first_s, now_s)
        self.stood_by |= view.leader is not None and view.leader.id != self.id and now_s > self._first_s + self._ttl_s
        if view.leader is not None and (view.leader.id, view.leader.lease) == (self.id, self.lease):
            self._question = Renew(self.lease)
            return 0.0
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED
        if view.leader is not None or not self._has_watched or self.standing is not Standing.STANDBY:
            return POLL_S
        begins = not view.runs and (self._begins is None or self._begins[0] != run)
        self._question = Begin() if begins else Grant(self._ttl_s)
        return 0.0

    @property
    def _has_watched(self) -> bool:
        return self._looked_s >= self._watched_s + self._ttl_s

    def _take(self, lease: int) -> Take:
        assert self.view is not None, "it has looked before"
        seen = self.view.run
        if seen is not None and not seen.over:
            self.again, run = True, dataclasses.replace(seen, leader=self.id, build=self._build)
        else:
            assert self._begins is not None, "that was asked before"
            self.again, run = False, Run(self._word, self.id, self._begins[1], build=self._build)
        return Take(self._address, lease, self._ttl_s, run, 0 if seen is None else seen.revision)

    def _on_renewed(self, was_there: bool, now_s: float) -> float:
        if not was_there:
            if self.standing is Standing.LEADING:
                self.standing = Standing.FENCED
            return RETRY_S
        if self._asked_s > self._looked_s + FRESH * self._ttl_s:
            return 0.0  # it was stopped meanwhile: that the lead is its own may not be so any more
        view = self.view
        assert view is not None and view.leader is not None and view.run is not None, "the lead was its own"
        self.standing, self.led = Standing.LEADING, view.leader.revision
        self.run, self.began_with = view.run.word, view.run.began_with
        if self._has_watched:
            self._acts_until_s = self._asked_s + MARGIN * self._ttl_s
        return max(self._asked_s + self._ttl_s / RENEWS - now_s, 0.0)
