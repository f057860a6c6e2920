"""One of several coordinators of a cluster: when it leads, and until when it may.

Pure but for `Keys`, which asks etcd (`transport/etcd.py`); the clock is given. Each `step` is one thing to do next.

Invariants.
- *One leads.* A leader acts while `holds` alone: until `MARGIN` of its lease is over, counted from before it asked for
  it, so that it stops before etcd can give the lease to another. A process that was stopped, or cannot reach etcd,
  finds its time over by its own clock before it does anything.
- *An outage of etcd is no change.* A leader whose lease has ended leads again, as it is, if nobody has led since: the
  key `last` says so. Otherwise it is fenced, for ever.
- *Nor is an etcd that has forgotten everything.* Nobody removes `last`, and who stands by remembers it. Where it is
  gone, who leads and holds its lease says it all again; nobody can have led since. One whose lease is over may have
  been followed: it is fenced. If nobody says it again by when no lease of before can last, who stands by leads, as
  after any other leader; and only later one that knows of no run begins one.
- *A run ends once.* Who has stood by it, or led it, has nothing to do with the next one of that name: it ends, too.
- What was asked and not answered may have been done: it is found out before anything is asked again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from torch_ecrec.transport.etcd import NOBODY, Last, Leader

POLL_S = 0.2  # between two looks of a standby
RETRY_S = 0.2  # after etcd did not answer
RENEWS = 4  # times in a lease
MARGIN = 0.9  # of a lease in which its owner acts
FORGOTTEN_LEASES = 1.5  # for who leads to say again what etcd has forgotten, before who stands by leads
UNKNOWN_LEASES = 2.5  # likewise, before a run begins: by then who knows of one that etcd has forgotten leads it
BEYOND = 1 << 40  # revisions: of any leader that is not known, by an etcd that has forgotten it


class Keys(Protocol):
    """What etcd has of a cluster; see `transport/etcd.py:EtcdKeys`."""

    def leader(self) -> Leader | None: ...

    def last(self) -> Last: ...

    def grant(self, ttl_s: int) -> int: ...

    def renew(self, lease: int) -> bool: ...

    def revoke(self, lease: int) -> None: ...

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool: ...


class Standing(Enum):
    """What a candidate is. It only goes forward."""

    STANDBY = "standby"
    LEADING = "leading"
    FENCED = "fenced"  # another has led since it did
    OVER = "over"  # a standby: the run that it stood by, or that it had led before, has ended


class Candidate:
    """One of them.

    Args:
        keys: what etcd has.
        address: where it listens, once it leads.
        ttl_s: of its lease.
        run: the word of the run, if it is the first to lead; else the run has one.
        clock: seconds, which never go back.
        begins: what the run begins with, if it is the first to lead; asked for then. Else the run began with something,
            whatever is there now.
        known: who has led, as this process has seen before. It goes on with that run, and begins no other.

    Attributes:
        standing: what it is.
        again: somebody has led before it.
        began_with: the checkpoint that the run began with.
        leads: who leads, as it has seen last.
        led: the revision since when this one has led first; 0: it has not.
        known: who has led its run last, as it has seen.
    """

    def __init__(
        self,
        keys: Keys,
        address: tuple[str, int],
        ttl_s: int,
        run: str,
        clock: Callable[[], float],
        begins: Callable[[], str] = lambda: "none",
        known: Last = NOBODY,
    ) -> None:
        self._keys, self._address, self._ttl_s, self._clock = keys, address, ttl_s, clock
        self.id, self.run, self.began_with, self._begins_with = uuid.uuid4().hex, run, "", begins
        self._own_run, self.known = run, known
        self._newest = known.since  # of the revisions of leaders that it has seen
        self._followed = known.runs  # somebody leads, or has led, the run that it stands by
        self._ended = False  # that run
        self.standing = Standing.STANDBY
        self.again = False
        self.leads: Leader | None = None
        self.led = 0
        self._nothing_s: float | None = None  # since when etcd knows nothing, as far as it was asked
        self._empty_s = 0.0  # when it said so last
        self._lease, self._asked_s, self._until_s = 0, 0.0, 0.0

    @property
    def holds(self) -> bool:
        """It may act: it leads, and nobody else can."""
        return self.standing is Standing.LEADING and self._clock() < self._until_s

    @property
    def forgotten(self) -> bool:
        """etcd knew nothing of a run that there is, when it was asked last."""
        return self._nothing_s is not None and self.known.runs

    @property
    def begins(self) -> bool:
        """It is about to begin a run: etcd knew of none, when it was asked last."""
        return self._nothing_s is not None and not self.known.runs

    def step(self) -> float:
        """Does the next thing; returns after how many seconds it is to be called again.

        Raises:
            EtcdUnavailable: etcd does not answer; likewise after `RETRY_S`.
        """
        if self.standing is Standing.STANDBY:
            return self._campaign()
        if self.standing is Standing.LEADING:
            return self._keep()
        return POLL_S

    def _campaign(self) -> float:
        self._look()
        last = self._last() if self.leads is None else NOBODY
        if self._ended or (self._followed and last.over):
            self.standing = Standing.OVER
            return POLL_S
        if self.leads is None:
            leases = FORGOTTEN_LEASES if self.forgotten else UNKNOWN_LEASES
            if self._nothing_s is not None and self._clock() < self._nothing_s + leases * self._ttl_s:
                return POLL_S
            if self.known.id != self.id:
                self.again = self.known.runs
                self.run = self.known.run if self.again else self._own_run
                self.began_with = self.known.began_with if self.again else self._begins_with()
            self._ask_for_it(last)
        return self._lead(self._asked_s) if self._has_it else POLL_S

    def _keep(self) -> float:
        asked_s = self._clock()
        if self._has_it and self._keys.renew(self._lease):
            return self._lead(asked_s)
        self.leads = None
        was_forgotten, last = self.forgotten, self._last()
        if not (self.holds if self.forgotten else last.id == self.id):
            self.standing = Standing.FENCED
            return POLL_S
        if self.forgotten and not was_forgotten:
            return RETRY_S  # once, so that it is told
        self._look()
        if self.leads is None:
            self._ask_for_it(last)
        return self._lead(self._asked_s) if self._has_it else RETRY_S

    @property
    def _has_it(self) -> bool:
        """The key is this one's, by the lease that it renews."""
        leads = self.leads
        return leads is not None and leads.id == self.id and leads.lease == self._lease

    def _look(self) -> None:
        self.leads = self._keys.leader()
        if self.leads is not None:
            self._followed, self._nothing_s = True, None
            self._newest = max(self._newest, self.leads.revision)
            if self.leads.revision != self.known.since:
                self._last()

    def _last(self) -> Last:
        last, now_s = self._keys.last(), self._clock()
        if last.id:
            self._nothing_s = None
            if self.known.runs and (last.over or last.run != self.known.run):
                self._ended = True
            else:
                self.known, self._newest = last, max(self._newest, last.since)
        else:
            if self._nothing_s is None or now_s > self._empty_s + self._ttl_s:  # meanwhile it may have known something
                self._nothing_s = now_s
            self._empty_s = now_s
        return last

    def _ask_for_it(self, last: Last) -> None:
        before, self._lease = self._lease, 0
        if before:  # of an attempt that was not answered, or one that has ended
            self._keys.revoke(before)
        asked_s = self._clock()
        self._lease = self._keys.grant(self._ttl_s)
        self._asked_s = asked_s
        if not self._keys.take(self.after(last), self._address, self._lease, last):
            refused, self._lease = self._lease, 0
            self._keys.revoke(refused)
        self._look()

    def after(self, last: Last) -> Last:
        """What etcd has in the place of `last`, once this one leads. Where it knows less than this one, revisions begin
        beyond those that anybody has seen."""
        counts_from = last.counts_from if last.since >= self._newest else self._newest + BEYOND
        return Last(self.id, self.run, 0, self.began_with, counts_from)

    def resign(self) -> None:
        """Another may lead at once. Nothing else may be asked of this one."""
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED
        if self._lease:  # also of one that does not know whether it leads
            self._keys.revoke(self._lease)

    def _lead(self, asked_s: float) -> float:
        assert self.leads is not None, "it leads by what it has looked at"
        self.led = self.led or self.leads.revision
        self.standing, self._until_s = Standing.LEADING, asked_s + MARGIN * self._ttl_s
        return self._ttl_s / RENEWS
