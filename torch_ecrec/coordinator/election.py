"""One of several coordinators of a cluster: when it leads, and until when it may.

Pure but for `Keys`, which asks etcd (`transport/etcd.py`); the clocks are given. Each `step` is one thing to do next.

Invariants.
- *One leads.* A leader acts while `holds` alone: until `MARGIN` of its lease is over, counted from before it asked for
  it, so that it stops before etcd can give the lease to another; and a lease counts only if etcd has just said that the
  lead is still its own. A process that was stopped, or cannot reach etcd, finds its time over by its own clock before
  it does anything.
- *An outage of etcd is no change.* A leader whose lease has ended leads again, as it is, if nobody has led since: the
  key `last` says so. Otherwise it is fenced, for ever.
- *Nor is an etcd that has forgotten everything, or was put back to an earlier state.* Whoever knows more than etcd says
  so at once, with a *mark* in the place of `last`; from then on nobody leads. Who led and held its lease when it marked
  leads again, as it is: nobody can have led since. One whose lease was over by then may have been followed: it is
  fenced. Others lead once a mark has stood for `FORGOTTEN_LEASES`, when no lease of before can last. A run that nobody
  knows of begins with a mark, too: who knows of one writes over it, within `UNKNOWN_LEASES` in which etcd answered.
- *A run ends once.* Who has stood by it, or led it, has nothing to do with the next one of that name: it ends, too.
  Each try to begin one has a word of its own, so that no two runs have the same.
- *Nothing is written but over what was read.* What `last` has is never written twice, so that who was stopped in
  between writes nothing, whatever etcd has been put back to.
- *Revisions grow*, by what this one has seen and by the time of day (a hybrid logical clock: S. Kulkarni et al.,
  "Logical Physical Clocks", OPODIS 2014): also where etcd and all who knew are gone.
- What was asked and not answered may have been done: it is found out before anything is asked again.
"""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from torch_ecrec.transport.etcd import BEGINS, COUNTS_MOST, GOES_ON, NOBODY, Last, Leader

POLL_S = 0.2  # between two looks of a standby
RETRY_S = 0.2  # after etcd did not answer
RENEWS = 4  # times in a lease
MARGIN = 0.9  # of a lease in which its owner acts
SETTLED = 1.0  # leases: for who knows more than etcd to say so, or to stop
STOOD = 1.0  # leases, with looks, before who stands by takes the lead where etcd says that nobody has it
LOOKED = 0.5  # of a lease: so old may be what etcd has said when it is renewed
FORGOTTEN_LEASES = 1.5  # after a mark: who was deposed by it has stopped, and who led before has led again
UNKNOWN_LEASES = 2.5  # likewise, before a run begins: by then who knows of one has marked it
TICKS = 1 << 20  # revisions in a millisecond of the time of day
TIME_MOST = COUNTS_MOST - (1 << 56)  # in 2107: a clock that says later leaves revisions for all who lead after it


class Keys(Protocol):
    """What etcd has of a cluster: `transport/etcd.py:EtcdKeys`, `testing/standbys.py:Keys`."""

    def look(self) -> tuple[Leader | None, Last]: ...

    def grant(self, ttl_s: int) -> int: ...

    def renew(self, lease: int) -> bool: ...

    def revoke(self, lease: int) -> None: ...

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool: ...

    def write(self, said: Last, last: Last) -> bool: ...


class Standing(Enum):
    """What a candidate is. It only goes forward."""

    STANDBY = "standby"
    LEADING = "leading"
    FENCED = "fenced"  # another has led since it did, or may have
    OVER = "over"  # the run that it stood by, or has led, has ended


class Candidate:
    """One of them.

    Args:
        keys: what etcd has.
        address: where it listens, once it leads.
        ttl_s: of its lease.
        words: a new word for a run, whenever it is about to be the first to lead one; else the run has one.
        clock: seconds, which never go back, and go on while the host sleeps.
        begins: what the run begins with, if it is the first to lead; asked for then, however long that takes. Else the
            run began with something, whatever is there now.
        known: who has led, as this process has seen before. It goes on with that run, and begins no other.
        time_of_day: seconds since 1970.

    Attributes:
        standing: what it is.
        again: somebody has led before it.
        run: the word of the run that it leads; `began_with`: the checkpoint that this began with.
        leads: who leads, as it has seen last.
        led: the revision since when this one has led first; 0: it has not.
        known: who has led its run last, as it has seen, or what was marked of it.
    """

    def __init__(
        self,
        keys: Keys,
        address: tuple[str, int],
        ttl_s: int,
        words: Callable[[], str],
        clock: Callable[[], float],
        begins: Callable[[], str] = lambda: "none",
        known: Last = NOBODY,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._keys, self._address, self._ttl_s, self._clock, self._time_of_day = (
            keys,
            address,
            ttl_s,
            clock,
            time_of_day,
        )
        self.id, self.run, self.began_with = uuid.uuid4().hex, "", ""
        self._words, self._begins_with = words, begins
        self._found = NOBODY, ""  # what was there as it was looked for what a run begins with, and what was found
        self.known = known
        self._newest = known.since  # of the revisions of leaders that it has seen
        self._knows_less, self._ended = False, False  # etcd, than this one; the run that it stands by, or leads
        self.standing = Standing.STANDBY
        self.again = False
        self.leads: Leader | None = None
        self.led = 0
        self._last, self._asked_last_s, self._looked_s = NOBODY, 0.0, 0.0  # what was there last; when it was
        self._stood_s = 0.0  # how long that has been there, with looks that were never a lease apart
        self._since, self._marked = 0, ""  # revision since when it leads now; what it has marked as its own
        self._lease, self._asked_s, self._renewed_s = 0, 0.0, -math.inf

    @property
    def holds(self) -> bool:
        """It may act: it leads, and nobody else can."""
        return self.standing is Standing.LEADING and self._clock() < self._renewed_s + MARGIN * self._ttl_s

    @property
    def forgotten(self) -> bool:
        """etcd knew nothing of a run that there is, or not who has led it last, when it was asked last."""
        return self.known.runs and (self._knows_less or bool(self._last.mark))

    @property
    def begins(self) -> bool:
        """It is about to begin a run: etcd knew of none, when it was asked last."""
        return not self.known.runs and self._last.mark == BEGINS

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
        last = self._look()
        if self._ended:
            self.standing = Standing.OVER
            return POLL_S
        if self._knows_less:
            self._mark(last)
            return POLL_S
        if not last.runs and self._found[0] != last and self._may_take():
            self._found = last, self._begins_with()
            last = self._look()  # that may have taken longer than a lease
        if self._may_take() and (last.runs or self._found[0] == last):
            self.again = last.runs
            self.run, self.began_with = (last.run, last.began_with) if last.runs else (self._words(), self._found[1])
            return self._take(last)
        return self._lead(self._asked_s) if self._has_it else POLL_S

    def _keep(self) -> float:
        last = self._look()
        if self._has_it and not self._knows_less and not self._ended:
            asked_s = self._clock()
            if not self._is_fresh:
                return 0.0
            renewed = self._keys.renew(self._lease)
            if renewed and self._lasts:
                return self._lead(asked_s)
            if renewed and not self._settled:
                return RETRY_S
        if self._ended:
            self.standing = Standing.OVER
        elif self._may_take():
            return self._take(last)
        elif self._knows_less or (last.mark and last.id != self._marked and last.since <= self._since):
            marked = self._mark(last) if self.holds or self._knows_less else ""
            if self.holds:  # still: it may have been stopped meanwhile
                self._marked = marked
            else:
                self.standing = Standing.FENCED
        elif last.id != self.id and not (last.id == self._marked and self._lasts):
            self.standing = Standing.FENCED
        return RETRY_S

    def _may_take(self) -> bool:
        """By what etcd has just said: nobody leads, and nobody can have led who is not known of."""
        last = self._last
        if self._knows_less or self._ended or (self.leads is not None and self.leads.id != self.id):
            return False
        if self.standing is Standing.STANDBY:
            return self.leads is None and self._stood_s >= _patience(last) * self._ttl_s
        if last.id == self.id:
            return self._settled
        deposed_s = FORGOTTEN_LEASES * self._ttl_s if last.deposed else 0.0
        return last.id == self._marked and self._lasts and self._stood_s >= deposed_s

    @property
    def _is_fresh(self) -> bool:
        """It was not stopped since it looked: a lease that it renews is the one that it has the lead by."""
        return self._clock() <= self._asked_last_s + LOOKED * self._ttl_s

    @property
    def _lasts(self) -> bool:
        """What etcd says has been there since its own lease lasted, and it has looked at least once in a lease."""
        return self._looked_s - self._stood_s < self._renewed_s + self._ttl_s

    @property
    def _settled(self) -> bool:
        """Nobody has led since, as etcd says, for so long that who knows more has said it, or has stopped."""
        return self._lasts or self._stood_s >= SETTLED * self._ttl_s

    @property
    def _has_it(self) -> bool:
        """The key is this one's, by the lease that it renews."""
        leads = self.leads
        return leads is not None and leads.id == self.id and leads.lease == self._lease

    def _look(self) -> Last:
        asked_s = self._clock()
        self.leads, last = self._keys.look()
        now_s = self._clock()
        stood_s = now_s - self._looked_s
        self._stood_s = self._stood_s + stood_s if last == self._last and stood_s <= self._ttl_s else 0.0
        self._last, self._asked_last_s, self._looked_s = last, asked_s, now_s
        self._knows_less = not last.id or last.since < self._newest
        if not self._knows_less:
            self._newest = last.since
            if self.known.runs and (last.over or last.run != self.known.run):
                self._ended = True
            elif last.mark != BEGINS:
                self.known = last
        return last

    def _mark(self, last: Last) -> str:
        """Says what etcd does not know: of the run that goes on, or that one begins. Returns the mark's id."""
        known = self.known if self.known.runs else NOBODY
        mark = Last(
            id=uuid.uuid4().hex,
            run=known.run,
            began_with=known.began_with,
            counts_from=self._newest,
            mark=GOES_ON if known.runs else BEGINS,
            deposed=self.leads is not None or last.deposed,
        )
        self._keys.write(mark, last)
        return mark.id

    def _take(self, last: Last) -> float:
        before, self._lease = self._lease, 0
        if before:  # of an attempt that was not answered, or one that has ended
            self._keys.revoke(before)
            if self._look() != last or not self._may_take():
                return RETRY_S
        asked_s = self._clock()
        self._lease = self._keys.grant(self._ttl_s)
        self._asked_s = asked_s
        was_stopped = self._clock() > self._asked_last_s + self._ttl_s  # etcd may say again what it said before that
        taken = not was_stopped and self._keys.take(self._me(last), self._address, self._lease, last)
        self._look()  # also where it was refused: it may have been asked twice, and done the first time
        if not self._has_it:
            if not taken:
                refused, self._lease = self._lease, 0
                self._keys.revoke(refused)
            return 0.0 if self._knows_less else RETRY_S  # that is said at once
        asked_s = self._clock()  # where etcd is slow, much of the lease is over
        return self._lead(asked_s if self._is_fresh and self._keys.renew(self._lease) else self._asked_s)

    def _me(self, last: Last) -> Last:
        """What etcd has in the place of `last`, once this one leads."""
        by_time = min(int(1000 * self._time_of_day()) * TICKS, TIME_MOST)
        counts_from = max(last.counts_from, self._newest, by_time)
        return Last(self.id, self.run, 0, self.began_with, counts_from, ttl_s=self._ttl_s)

    def end(self) -> bool:
        """The run that it has led is over: says so, whoever leads it by now. Returns whether that is known.

        Raises:
            EtcdUnavailable: etcd does not answer.
        """
        last = self._look()
        if not self._knows_less and (last.over or last.run != self.run):
            return True
        deposed = last.deposed or (self.leads is not None and self.leads.id != self.id)
        return self._keys.write(dataclasses.replace(self._me(last), over=True, deposed=deposed), last)

    def resign(self) -> None:
        """Another may lead at once. Nothing else may be asked of this one."""
        if self.standing is Standing.LEADING:
            self.standing = Standing.FENCED
        if self._lease:  # also of one that does not know whether it leads
            self._keys.revoke(self._lease)

    def _lead(self, asked_s: float) -> float:
        assert self.leads is not None, "it leads by what it has looked at"
        if self._last.id == self.id:  # else it leads on, as it was
            self.run, self.began_with = self._last.run, self._last.began_with
        self._since = self.leads.revision
        self.led = self.led or self._since
        self.standing, self._renewed_s = Standing.LEADING, asked_s
        return max(asked_s + self._ttl_s / RENEWS - self._clock(), 0.0)


def _patience(last: Last) -> float:
    """For how many leases that must have been there, before who stands by leads."""
    if last.over:
        return FORGOTTEN_LEASES if last.deposed else 0.0
    return {GOES_ON: FORGOTTEN_LEASES, BEGINS: UNKNOWN_LEASES, "": STOOD if last.runs else 0.0}[last.mark]
