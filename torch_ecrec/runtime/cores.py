"""How long a thread has had a core, and how long it has waited for one, as the system counts it."""

from __future__ import annotations

import time
from collections.abc import Callable


def ran_s(thread: int | None) -> float:
    """How long a thread has had a core so far. `thread`: its native number; 0 where the system does not say."""
    return _times(thread)[0]


def wanted_s(thread: int | None) -> float:
    """How long it has had a core, or waited for one. Where the system does not say, what the whole process has had."""
    times = _times(thread)
    return sum(times) if any(times) else time.process_time()


def process_wanted_s(process: int) -> float:
    """Likewise, of another process's main thread; 0 where the system does not say."""
    return sum(_times(process, str(process)))


def _times(thread: int | None, process: str = "self") -> tuple[float, float]:
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError):  # no such system; or the thread has ended
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


class Idle:
    """For how long something has not computed, as somebody looks at it again and again; from the first look on.

    Args:
        wanted_s: how long it has had a core, or waited for one.
        pause_s: between two looks.
        share: of a core: what wants less does not compute.
    """

    def __init__(self, wanted_s: Callable[[], float], pause_s: float, share: float) -> None:
        self._ask, self._pause_s, self._share = wanted_s, pause_s, share
        self._before: tuple[float, float] | None = None
        self.seconds = 0.0

    def look(self) -> float:
        """Looks again, and returns for how many seconds it has not computed by now."""
        now_s, wanted_s = time.monotonic(), self._ask()
        looked_s, before_s = self._before or (now_s, wanted_s)
        passed_s = min(now_s - looked_s, 2 * self._pause_s)  # not while this process was stopped
        self.seconds = 0.0 if wanted_s - before_s > self._share * passed_s else self.seconds + passed_s
        self._before = now_s, wanted_s
        return self.seconds
