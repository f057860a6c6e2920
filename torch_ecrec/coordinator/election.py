"""One of several coordinators of a cluster: when it leads, and until when it may.

Pure but for `Keys`, which asks etcd (`transport/etcd.py`); the clock is given. Each `step` is one thing to do next.

A leader says again and again that it is there (a beat). Who stands by leads once it has seen no beat for a lease. The
lease is counted here, not by etcd, which grants none shorter than one and a half times as long as its own elections may
take, and looks twice a second whether one has ended.

Invariants.
- *One leads.* A leader acts while `holds` alone: until `MARGIN` of the lease is over, counted from before it asked for
  its last beat. Who stands by counts from after it has seen that beat, so from later, and leads only if there has been
  none since (one transaction says so). A process that was stopped, or cannot reach etcd, finds its time over by its own
  clock before it does anything. Clocks need not agree, but run equally fast, within `1 - MARGIN`.
- *An outage of etcd is no change.* A leader that could not beat leads on, as it is, if nobody has led since. Time in
  which etcd did not answer who stands by is no silence of the leader.
- What was asked and not answered may have been done: it is found out before anything is asked again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from torch_ecrec.transport.etcd import EtcdUnavailable, Term

POLL_S = 0.2  # between two looks of a standby
RETRY_S = 0.2  # after etcd did not answer
BEATS = 4  # in a lease
MARGIN = 0.9  # of a lease in which its owner acts


class Keys(Protocol):
    """What etcd has of a cluster; see `transport/etcd.py:EtcdKeys`."""

    def term(self) -> Term: ...

    def take(self, me: Term, before: Term) -> bool: ...

    def beat(self, mine: Term) -> bool: ...

    def leave(self, mine: Term) -> None: ...


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
        lease_s: of silence, after which another leads.
        run: the word of the run, if it is the first to lead; else the run has one.
        clock: seconds, which never go back.
        begins: what the run begins with, if it is the first to lead; asked for then. Else the run began with something,
            whatever is there now.
        followed: somebody is known to have led: if etcd has nobody, the run is over.

    Attributes:
        standing: what it is.
        again: somebody has led before it.
        began_with: the checkpoint that the run began with.
        seen: who leads, or has led last, as it has seen last.
    """

    def __init__(
        self,
        keys: Keys,
        address: tuple[str, int],
        lease_s: float,
        run: str,
        clock: Callable[[], float],
        begins: Callable[[], str] = lambda: "none",
        followed: bool = False,
    ) -> None:
        self._keys, self._address, self._lease_s, self._clock = keys, address, lease_s, clock
        self.id, self.run, self.began_with, self._begins = uuid.uuid4().hex, run, "", begins
        self.standing = Standing.STANDBY
        self.again = False
        self.seen, self._followed = Term(), followed
        self._until_s = 0.0
        self._silence = _Silence(lease_s)

    @property
    def holds(self) -> bool:
        """It may act: it leads, and nobody else can."""
        return self.standing is Standing.LEADING and self._clock() < self._until_s

    @property
    def led(self) -> int:
        """The revision since when this one leads; 0: it does not."""
        return self.seen.revision if self.standing is Standing.LEADING else 0

    def step(self) -> float:
        """Does the next thing; returns after how many seconds it is to be called again.

        Raises:
            EtcdUnavailable: etcd does not answer; likewise after `RETRY_S`.
        """
        try:
            if self.standing is Standing.STANDBY:
                return self._campaign()
            if self.standing is Standing.LEADING:
                return self._beat()
        except EtcdUnavailable:
            self._silence.begin_anew()
            raise
        return POLL_S

    def _campaign(self) -> float:
        silent = self._look()
        if self._followed and not self.seen.revision:
            self.standing = Standing.OVER
            return POLL_S
        if self.seen.id != self.id and silent:
            before = self.seen
            self.run, self.again = before.run or self.run, before.revision > 0
            self.began_with = before.began_with if self.again else self._begins()
            self._keys.take(Term(self.id, self.run, self.began_with, self._address), before)
            self._look()
        return self._beat() if self.seen.id == self.id else POLL_S

    def _look(self) -> bool:
        """Looks who leads; whether nobody does any more."""
        asked_s = self._clock()
        self.seen = self._keys.term()
        self._followed = self._followed or self.seen.revision > 0
        lasted = self._silence.on_look(self.seen, asked_s, self._clock())
        return self.seen.address is None or lasted

    def _beat(self) -> float:
        asked_s = self._clock()
        if not self._keys.beat(self.seen):
            self.standing = Standing.FENCED
            return POLL_S
        self.standing, self._until_s = Standing.LEADING, asked_s + MARGIN * self._lease_s
        return self._lease_s / BEATS

    def resign(self) -> None:
        """Another may lead at once. Nothing else may be asked of this one."""
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED
            self._keys.leave(self.seen)


class _Silence:
    """For how long a leader has not beaten, as one who stands by sees it.

    A look that takes long for once may have met an outage in which the leader could not beat either: it counts anew
    from there. Where every look takes long, that is how etcd is.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.begin_anew()

    def begin_anew(self) -> None:
        self._last: Term | None = None
        self._since_s = 0.0
        self._was_slow = True  # what follows an outage may be slow

    def on_look(self, seen: Term, asked_s: float, now_s: float) -> bool:
        """Whether a lease has gone by without a beat."""
        slow = now_s - asked_s > self._lease_s / BEATS
        if seen != self._last or (slow and not self._was_slow):
            self._last, self._since_s = seen, now_s
        self._was_slow = slow
        return now_s - self._since_s >= self._lease_s
