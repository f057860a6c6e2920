"""One of several coordinators of a cluster: when it leads, and until when it may.

Pure but for `Keys`, which asks etcd (`transport/etcd.py`); the clock is given. Each `step` is one thing to do next.

Invariants.
- *One leads.* A leader acts while `holds` alone: until `MARGIN` of its lease is over, counted from before it asked for
  it, so that it stops before etcd can give the lease to another. A process that was stopped, or cannot reach etcd,
  finds its time over by its own clock before it does anything.
- *An outage of etcd is no change.* A leader whose lease has ended leads again, as it is, if nobody has led since: the
  key `last` says so. Otherwise it is fenced, for ever.
- *Nor is an etcd that has forgotten everything.* Nobody removes `last`. Where it is gone, who leads says it all again:
  who holds its lease at once, who does not only when nobody has done so for the length of one. Who stands by a run
  waits for that: it does not know what the leader knew, and to begin anew would be another run.
- What was asked and not answered may have been done: it is found out before anything is asked again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from torch_ecrec.transport.etcd import Last, Leader

POLL_S = 0.2  # between two looks of a standby
RETRY_S = 0.2  # after etcd did not answer
RENEWS = 4  # times in a lease
MARGIN = 0.9  # of a lease in which its owner acts


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
    OVER = "over"  # a standby: the run that it stood by has ended


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
        followed: somebody is known to have led the run: once that is over, this one does not begin another.

    Attributes:
        standing: what it is.
        again: somebody has led before it.
        began_with: the checkpoint that the run began with.
        leads: who leads, as it has seen last.
        led: the revision since when this one has led first; 0: it has not.
    """

    def __init__(
        self,
        keys: Keys,
        address: tuple[str, int],
        ttl_s: int,
        run: str,
        clock: Callable[[], float],
        begins: Callable[[], str] = lambda: "none",
        followed: bool = False,
    ) -> None:
        self._keys, self._address, self._ttl_s, self._clock = keys, address, ttl_s, clock
        self.id, self.run, self.began_with, self._begins = uuid.uuid4().hex, run, "", begins
        self.standing = Standing.STANDBY
        self.again = False
        self.leads: Leader | None = None
        self.led = 0
        self._forgotten_s: float | None = None  # since when etcd knows nothing of a run that there is
        self._newest = 0  # of the revisions of leaders that it has seen
        self._lease, self._asked_s, self._until_s = 0, 0.0, 0.0
        self._followed = followed

    @property
    def holds(self) -> bool:
        """It may act: it leads, and nobody else can."""
        return self.standing is Standing.LEADING and self._clock() < self._until_s

    @property
    def forgotten(self) -> bool:
        """etcd knew nothing of a run that there is, when it was asked last."""
        return self._forgotten_s is not None

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
        if self.leads is None:
            last = self._last()
            if self._followed and not last.runs:
                self.standing = Standing.OVER if last.over else Standing.STANDBY
                return POLL_S
            if last.id != self.id:
                self.again = last.runs
                self.run = last.run if last.runs else self.run
                self.began_with = last.began_with if last.runs else self._begins()
            self._ask_for_it(last)
        return self._lead(self._asked_s) if self._has_it else POLL_S

    def _keep(self) -> float:
        asked_s = self._clock()
        if self._has_it and self._keys.renew(self._lease):
            return self._lead(asked_s)
        self.leads = None
        told, last = self.forgotten, self._last()
        if last.id != self.id and not self.forgotten:
            self.standing = Standing.FENCED
            return POLL_S
        if self._forgotten_s is not None:
            others_first = not self.holds and self._clock() < self._forgotten_s + self._ttl_s
            if others_first or not told:
                return RETRY_S
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
            self._followed, self._forgotten_s = True, None
            self._newest = max(self._newest, self.leads.revision)

    def _last(self) -> Last:
        last = self._keys.last()
        if last.id or not self._followed:
            self._forgotten_s = None
        elif self._forgotten_s is None:
            self._forgotten_s = self._clock()
        return last

    def _ask_for_it(self, last: Last) -> None:
        before, self._lease = self._lease, 0
        if before:  # of an attempt that was not answered, or one that has ended
            self._keys.revoke(before)
        asked_s = self._clock()
        self._lease = self._keys.grant(self._ttl_s)
        self._asked_s = asked_s
        counts_from = last.counts_from if last.id else self._newest
        me = Last(self.id, self.run, 0, self.began_with, counts_from)
        if not self._keys.take(me, self._address, self._lease, last):
            refused, self._lease = self._lease, 0
            self._keys.revoke(refused)
        self._look()

    def resign(self) -> None:
        """Another may lead at once. Nothing else may be asked of this one."""
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED
            if self._lease:
                self._keys.revoke(self._lease)

    def _lead(self, asked_s: float) -> float:
        assert self.leads is not None, "it leads by what it has looked at"
        self.led = self.led or self.leads.revision
        self.standing, self._until_s = Standing.LEADING, asked_s + MARGIN * self._ttl_s
        return self._ttl_s / RENEWS
