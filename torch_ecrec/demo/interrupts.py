"""Turns Ctrl-C and SIGTERM into an exception, and a mark in case it gets lost, for commands that start processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_interrupted = threading.Event()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM end what runs in this context as Ctrl-C does, with all that it started."""
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
    """Raises KeyboardInterrupt if a signal came in `sigterm_interrupts`, even if its exception got lost."""
    if _interrupted.is_set():
        raise KeyboardInterrupt
