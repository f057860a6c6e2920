"""What lets a coordinator act: that it is the only one, or that it leads among several.

`LeaderLease` stands for the lead of a cluster, in etcd, and keeps it on a thread of its own. `LeaderGate` keeps what
arrives while it is not certain that the process leads, and does it in order once it is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch_ecrec.coordinator.election import RETRY_S, Begin, Candidate, EtcdPutBack, Standing
from torch_ecrec.errors import ClusterError
from torch_ecrec.protocol.messages import whole_build
from torch_ecrec.runtime.addresses import text_of
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.settings import new_run
from torch_ecrec.transport.etcd import EtcdKeys, EtcdUnavailable, Leader, Run, View, parse_place

log = logging.getLogger(__name__)

ENDS_S = 30.0  # for etcd to hear that a run is over
WAITING_MOST = 1000  # things that wait for the lead to be certain again; with more, what says the same again does not
PATIENT = 0.5  # of its lease may an answer of etcd take; where each takes more than a third, nobody can lead


def _elapsed() -> float:
    """Seconds, also those that the host was suspended for: leases end meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaderGate:
    """Does things, in order, while a condition holds. On one thread.

    Args:
        holds: the condition.
    """

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self._number = 0
        self._waiting: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._newest: dict[Hashable, int] = {}  # of what takes the place of one before, which of them waits

    def __len__(self) -> int:
        """How many things wait."""
        return len(self._waiting)

    def do(self, action: Callable[[], None], in_place_of: Hashable = None) -> None:
        """Does it now, or as soon as what came before is done and the condition holds.

        Args:
            action: what to do.
            in_place_of: where so much waits that the condition must have been false for long, the one before with this
                mark is not done any more; None: that is never so.
        """
        self._number += 1
        if in_place_of is not None:
            before, self._newest[in_place_of] = self._newest.get(in_place_of), self._number
            if before is not None and len(self._waiting) >= WAITING_MOST:
                self._waiting.pop(before, None)
        self._waiting[self._number] = action
        self.go_on()

    def go_on(self) -> bool:
        """Does what waits; returns whether nothing does any more, and the condition holds."""
        while self._waiting and self._holds():
            _, action = self._waiting.popitem(last=False)
            action()
        if not self._waiting:
            self._newest.clear()
        return not self._waiting and self._holds()


class LeaderLease:
    """The lead of a cluster.

    Args:
        elect: `etcd://...`.
        address: where this coordinator listens.
        lease_s: of its lease: so long after its end another leads. At least what etcd grants, by default 2. The same
            for all of them: each waits for leases of that length.
        begins: what the run begins with, if it is the first to lead. It may take long.
        known: what etcd has said to this process before.

    Attributes:
        candidate: what is known of the lead and of the run. Only the thread that keeps the lead changes it.

    Raises:
        ValueError: `elect` has not that form.
        ClusterError: the package for etcd is not installed.
    """

    def __init__(
        self, elect: str, address: tuple[str, int], lease_s: int, begins: Callable[[], str], known: View | None
    ) -> None:
        self._elect, self._lease_s, self._begins = elect, lease_s, begins
        # Several addresses and a renewal must fit into the lease; where each answer is slow, at least one must.
        place = parse_place(elect)
        self._keys = EtcdKeys(place, lease_s / (4 * len(place.addresses)), PATIENT * lease_s)
        self._build = whole_build()
        self._told_build = self._build.told().decode()
        self.candidate = Candidate(uuid.uuid4().hex, address, lease_s, new_run(), known, build=self._told_build)
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: dict[int, str] = {}  # by level, what was told last

    @property
    def holds(self) -> bool:
        """It leads, and nobody else can."""
        return self.candidate.holds(_elapsed())

    def stand(self, on_look: Callable[[], None], withdrawn: Callable[[], bool] = lambda: False) -> Standing:
        """Stands by until it leads, or the run is over, or it is withdrawn.

        Args:
            on_look: called each time that it has looked whether it leads, also when it does.
            withdrawn: asked before each look. No event, since a signal may set it: that could come as it is waited for.

        Raises:
            EtcdPutBack: etcd knows less than it has said to this process before.
            ClusterError: who leads has a lease of another length, or the run is of a build that this one is not
                compatible with.
        """
        while self.candidate.standing is Standing.STANDBY and not withdrawn():
            wait_s = self._step()
            on_look()
            view = self.candidate.view
            leads = None if view is None else view.leader
            if self.candidate.standing is Standing.STANDBY and view is not None and view.run is not None:
                self._compare(view.run)  # also while nobody leads: it would be the next one
            if self.candidate.standing is Standing.STANDBY and leads is not None:
                if leads.ttl_s != self._lease_s:
                    self._refuse(leads)
                self._tell(f"stands by at {self._elect}: {text_of(leads.address)} leads")
            if self.candidate.standing is Standing.STANDBY:
                time.sleep(wait_s)  # until its next look, at most `POLL_S`
        return self.candidate.standing

    def _compare(self, run: Run) -> None:
        """Members of a run that is not over, and its checkpoints, are of the build that has led it."""
        if run.over or not run.build or run.build == self._told_build:
            return
        if difference := self._build.difference_told(run.build.encode()):
            raise ClusterError(
                f"this coordinator may not stand by at {self._elect}: the cluster there is of another build"
                f" ({difference}). Start one of its build. Or end that cluster, and start all of it with this one;"
                " where nobody of it is left to end, under another name of `--elect`"
            )

    def _refuse(self, leads: Leader) -> None:
        who = f"{text_of(leads.address)}, which leads at {self._elect}"
        raise ClusterError(
            f"all coordinators of a cluster need the same lease: {who}, has --leader-lease {leads.ttl_s},"
            f" and this one {self._lease_s}"
        )

    def keep(self, on_fenced: Callable[[], None], hangs: Callable[[], bool]) -> None:
        """Renews the lease from now on.

        Args:
            on_fenced: called on another thread, once, when the lease is lost, or the run is over; when etcd was put
                back; or when it cannot go on for a defect, which costs it the lead.
            hangs: whether who leads does nothing any more. Then the lease ends, and another leads.
        """

        def step() -> float:
            if not hangs():
                return self._step()
            self._tell("the coordinator's own thread does nothing any more: its lease ends", logging.WARNING)
            return RETRY_S

        def keep() -> None:
            while not self._ends.wait(step()):
                if self.candidate.standing is not Standing.LEADING:
                    on_fenced()
                    return

        def on_error(error: BaseException) -> None:
            if isinstance(error, EtcdPutBack):
                log.error("the lead at %s is lost: %s", self._elect, error)
            else:
                log.error("the lead at %s cannot be kept", self._elect, exc_info=error)
            on_fenced()

        self._thread = Worker(keep, "lead", on_error)
        self._thread.start()

    def _step(self) -> float:
        """Asks the next question; returns in how many seconds to ask another."""
        question = self.candidate.ask(_elapsed())
        try:
            found = self._begins() if isinstance(question, Begin) else question.of(self._keys)
        except EtcdUnavailable as error:
            self._tell(str(error), logging.WARNING)
            return self.candidate.fail()
        wait_s = self.candidate.answer(found, _elapsed())
        if self.candidate.standing is Standing.LEADING:
            self._tell(f"leads at {self._elect}")
        return wait_s

    def _tell(self, what: str, level: int = logging.INFO) -> None:
        """Logs something; the same thing once."""
        if what != self._told.get(level):
            if level > logging.INFO:  # that it is well is told once more
                self._told.clear()
            self._told[level] = what
            log.log(level, "%s", what)

    def close(self, over: bool) -> None:
        """Gives up the lead, for another, or (`over`) for nobody any more: those who stand by end, too."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if over:
            self._end()
        self.candidate.resign()
        if self.candidate.lease:  # also of one that does not know whether it leads
            with contextlib.suppress(EtcdUnavailable):  # it ends by itself then
                self._keys.revoke(self.candidate.lease)

    def _end(self) -> None:
        """Notes in etcd that the run is over, whoever leads it by now. One that stands by, and is not told so, leads on
        a run that nobody trains."""
        deadline_s = time.monotonic() + ENDS_S
        while True:
            try:
                run = self._keys.look().run
                if run is None or run.over or run.word != self.candidate.run or self._keys.end(run):
                    return
                self._step()  # it keeps the lead until then
            except EtcdPutBack as error:
                log.warning("%s. Those who stand by are not told that the run is over", error)
                return
            except EtcdUnavailable as error:
                self._tell(f"etcd does not hear that the run is over: {error}", logging.WARNING)
                if time.monotonic() > deadline_s:
                    log.warning("those who stand by at %s are not told that the run is over", self._elect)
                    return
            time.sleep(RETRY_S)  # there is nothing to wait for but etcd
