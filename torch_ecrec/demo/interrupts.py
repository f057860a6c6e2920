"""Turns Ctrl-C, SIGTERM and SIGHUP into an exception, and a mark in case it gets lost.

For commands that start processes. Trainers have a session of their own, which no signal to this process, or of its
terminal, reaches: nothing else would end them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_interrupted = threading.Event()


@contextlib.contextmanager
def sigterm_interrupts(say: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Makes SIGTERM, and SIGHUP of a terminal that ends, end what runs in this context as Ctrl-C does, with all that it
    started.

    `nohup` has SIGHUP ignored, and so it stays.

    Args:
        say: is told, where that has happened, that nothing is left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        _interrupted.set()  # the exception is lost where Python ignores exceptions, in a destructor say
        raise KeyboardInterrupt

    _interrupted.clear()
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in ends}
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; everything that was started has ended")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if a signal came in `sigterm_interrupts`, even if its exception got lost."""
    if _interrupted.is_set():
        raise KeyboardInterrupt
