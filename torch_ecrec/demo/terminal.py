"""Shows the progress of a long command."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator

LINE_S = 2.0  # between two progress lines where they are not overwritten


class Terminal:
    """Prints lines that stay, and one below them that is overwritten. In a file, the latter is written now and then."""

    def __init__(self) -> None:
        self._overwrites = sys.stdout.isatty()
        self._shown_s = -math.inf
        self._width = 0  # of the line to be overwritten

    def say(self, text: str = "") -> None:
        print("\r" + " " * self._width + "\r" + text if self._width else text, flush=True)
        self._width = 0

    def progress(self, text: str) -> None:
        now_s = time.monotonic()
        if self._overwrites:
            most = _terminal_width() - 1
            text = text if len(text) <= most else text[: most - 1] + "…"
            print("\r" + text.ljust(self._width), end="", flush=True)
            self._width = len(text)
        elif now_s - self._shown_s >= LINE_S:
            self._shown_s = now_s
            print(text, flush=True)


@contextlib.contextmanager
def warnings_only() -> Iterator[None]:
    """Meanwhile the log says no more than warnings: the command itself shows which processes end and begin again."""
    logger = logging.getLogger("torch_ecrec")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _terminal_width() -> int:
    with contextlib.suppress(OSError):
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    return 120
