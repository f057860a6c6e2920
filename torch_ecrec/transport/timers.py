"""A thread that runs a node's actions after a delay: its retries and pauses."""

from __future__ import annotations

import atexit
import heapq
import threading
import time
from collections.abc import Callable

from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker

END_S = 5.0


class Timers:
    """Runs actions after a delay, on one daemon thread, in order of their time.

    Args:
        on_error: gets what an action raised; the thread goes on.
        name: of the thread.
    """

    def __init__(self, on_error: Callable[[BaseException], None], name: str = "timers") -> None:
        self._on_error = on_error
        self._changed = threading.Condition()  # guards all below
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._closed = False
        self._thread = Worker(self._run, name, on_error)
        self._thread.start()
        atexit.register(self.close)
        belongs_here(self)

    def on_forked(self) -> None:
        """Marks the timers as closed in a forked child, which has no such thread."""
        self._changed, self._closed = threading.Condition(), True
        atexit.unregister(self.close)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + delay_s, self._count, action))
            self._changed.notify()

    @property
    def thread_id(self) -> int:
        """The thread's number, as the system gives it."""
        return self._thread.native_id or 0

    def close(self) -> None:
        """Drops the actions that are not due yet. Waits for the one that runs, unless that one calls this."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    left_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(left_s if left_s is None else min(left_s, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                action = heapq.heappop(self._due)[2]
            try:
                action()
            except Exception as error:  # the seam: a failed action must not stop the others
                self._on_error(error)
