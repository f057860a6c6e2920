"""The user's thread waits for what the background brings about: with a time limit, and for errors, too."""

from __future__ import annotations

import faulthandler
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence

from torch_ecrec.errors import ClusterUnavailable

log = logging.getLogger(__name__)


class Waiting:
    """One thread calls `until`; any thread `notify` and `fail`.

    Args:
        limit_s: a wait without any change for so long fails.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._changes = 0
        self._awaited: Callable[[], bool] | None = None
        self._error: BaseException | None = None
        self._patient_until_s = -math.inf
        self.hint = ""  # what is known of why nothing comes
        self.told = False  # the error has been raised

    @property
    def failed(self) -> bool:
        """Whether there is nothing to wait for any more: an error."""
        return self._error is not None

    def renew(self, error: BaseException) -> None:
        """Makes whatever waits or will wait fail, in a forked child."""
        self._changed, self._error = threading.Condition(), error

    def fail(self, error: BaseException) -> None:
        """Has the next or present wait raise this error; the first one counts."""
        if self._error is None:
            self._error = error
        self.notify()

    def notify(self) -> None:
        """Notes that something changed. Wakes the user's thread only if it can go on: most changes are not what it
        waits for."""
        with self._changed:
            self._changes += 1
            if self._awaited is not None and (self._error is not None or self._awaited()):
                self._changed.notify_all()

    def stand(self, names: Sequence[str], left_s: float | None) -> None:
        """Notes for whom the cluster waits, and for how long at most (None: until it hears of them): before that no
        wait fails for want of progress. Nobody: it goes on."""
        with self._changed:
            self._changes += 1
            stood = self._patient_until_s > -math.inf
            self._patient_until_s = time.monotonic() + (math.inf if left_s is None else left_s) if names else -math.inf
        if names:
            limit = "until they are back" if left_s is None else f"for {left_s:g} s at most"
            log.warning("training stands still: the cluster waits for %s, %s", ", ".join(names), limit)
        elif stood:
            log.warning("training goes on: the cluster waits for nobody any more")

    def until(self, condition: Callable[[], bool], what: str, patient: bool = False) -> None:
        """Returns once `condition` holds. `patient`: without progress it says so in the log, and waits on."""
        limit_s = self._limit_s
        begin_s = time.monotonic()
        deadline = begin_s + limit_s
        with self._changed:
            seen, self._awaited = self._changes, condition
            try:
                while self._error is None and not condition():
                    if self._changes != seen:
                        seen, deadline = self._changes, time.monotonic() + limit_s
                    if time.monotonic() > deadline and patient:
                        deadline = time.monotonic() + limit_s
                        log.warning("%s: for %g s so far", what, time.monotonic() - begin_s)
                    elif time.monotonic() > max(deadline, self._patient_until_s):
                        faulthandler.dump_traceback(file=sys.stderr)
                        raise ClusterUnavailable(f"{what}: no progress for {limit_s:g} s{self.hint}")
                    self._changed.wait(0.5)
            finally:
                self._awaited = None
        if self._error is not None:
            self.told = True
            raise self._error
