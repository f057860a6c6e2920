"""Threads whose exceptions are reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Worker(threading.Thread):
    """A thread that runs `work` once it is started, and reports what it raises.

    Args:
        work: what it does.
        name: of the thread.
        on_error: gets what the work raised, on that thread. It has no caller: else the work would end unnoticed, and
            with it all that it was there for. `log_error`, where nobody waits for it.
        daemon: the process may end before the work has.
    """

    def __init__(
        self, work: Callable[[], None], name: str, on_error: Callable[[BaseException], object], daemon: bool = True
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work, self._on_error = work, on_error

    def run(self) -> None:
        """Runs the work, and passes an exception of it to `on_error`."""
        try:
            self._work()
        except Exception as error:  # the seam: nobody else would hear of it
            self._on_error(error)
        finally:
            del self._work, self._on_error  # as a plain thread drops them: they may keep much


def log_error(error: BaseException) -> None:
    """Logs an error with its stack: an `on_error` for `Worker`."""
    log.error("thread %s ended: %r", threading.current_thread().name, error, exc_info=error)
