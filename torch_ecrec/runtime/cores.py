"""How long a thread has had a core, and how long it has waited for one, as the system counts it."""

from __future__ import annotations

import time


def ran_s(thread: int | None) -> float:
    """How long a thread has had a core so far. `thread`: its native number; 0 where the system does not say."""
    return _times(thread)[0]


def wanted_s(thread: int | None) -> float:
    """How long it has had a core, or waited for one. Where the system does not say, what the whole process has had."""
    times = _times(thread)
    return sum(times) if any(times) else time.process_time()


def wanted_s_of(process: int) -> float:
    """Likewise, of another process's main thread; 0 where the system does not say."""
    return sum(_times(process, str(process)))


def _times(thread: int | None, process: str = "self") -> tuple[float, float]:
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError):  # no such system; or the thread has ended
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
