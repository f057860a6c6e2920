"""Ctrl-C and SIGTERM for a command that has started processes: an exception, and a mark in case it gets lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_interrupted = threading.Event()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what runs in this context as Ctrl-C does: with everything it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        _interrupted.set()  # the exception is lost where Python ignores exceptions, in a destructor say
        raise KeyboardInterrupt

    _interrupted.clear()
    before = signal.signal(signal.SIGTERM, interrupt)
    before_int = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_int)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if a signal came since `sigterm_interrupts` was entered, whatever became of it."""
    if _interrupted.is_set():
        raise KeyboardInterrupt
