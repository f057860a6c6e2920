"""How long a thread had a CPU core, and how long it waited for one, as the system counts it."""

from __future__ import annotations

import time
from collections.abc import Callable


def ran_s(thread: int | None) -> float:
    """Returns the CPU time of a thread so far, in seconds; 0 if the system does not tell.

    `thread` is its native number.
    """
    return _times(thread)[0]


def wanted_s(thread: int | None) -> float:
    """Returns how long a thread had a core or waited for one, in seconds.

    If the system does not tell, it is the CPU time of the whole process.
    """
    times = _times(thread)
    return sum(times) if any(times) else time.process_time()


def process_wanted_s(process: int) -> float:
    """Returns `wanted_s` of another process's main thread; 0 if the system does not tell."""
    return sum(_times(process, str(process)))


def _times(thread: int | None, process: str = "self") -> tuple[float, float]:
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError):  # no such system; or the thread has ended
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


class Idle:
    """Measures for how long something has not computed, by repeated looks; from the first look on.

    Args:
        wanted_s: how long it has had a core, or waited for one.
        pause_s: between two looks.
        share: the share of a core below which it does not compute.
    """

    def __init__(self, wanted_s: Callable[[], float], pause_s: float, share: float) -> None:
        self._ask, self._pause_s, self._share = wanted_s, pause_s, share
        self._before: tuple[float, float] | None = None
        self.seconds = 0.0

    def look(self) -> float:
        """Looks again; returns for how many seconds it has not computed."""
        now_s, wanted_s = time.monotonic(), self._ask()
        looked_s, before_s = self._before or (now_s, wanted_s)
        passed_s = min(now_s - looked_s, 2 * self._pause_s)  # not while this process was stopped
        self.seconds = 0.0 if wanted_s - before_s > self._share * passed_s else self.seconds + passed_s
        self._before = now_s, wanted_s
        return self.seconds
