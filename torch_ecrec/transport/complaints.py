"""Counts what other processes do wrong, and logs some of it.

A stranger may do it a thousand times a second, and a log that fills the disk is a harm of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

LOG_EVERY_S = 10.0  # for each kind


class Complaints:
    """Counts one process's complaints about others by kind, and logs at most one of a kind every `LOG_EVERY_S`.

    Args:
        log: where some are told, as warnings.
        name: of this process.
    """

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log, self._name = log, name
        self._lock = threading.Lock()  # guards all below
        self._counts: Counter[str] = Counter()
        self._told: dict[str, tuple[float, int]] = {}  # kind -> when it was told last, and the count then

    @property
    def counts(self) -> Counter[str]:
        """The number of complaints so far, by kind."""
        with self._lock:
            return Counter(self._counts)

    def add(self, kind: str, why: object) -> None:
        """Counts a complaint, and logs it if none of its kind was logged of late. From any thread."""
        now_s = time.monotonic()
        with self._lock:
            self._counts[kind] += 1
            told_s, count = self._told.get(kind, (-LOG_EVERY_S, 0))
            if now_s - told_s < LOG_EVERY_S:
                return
            self._told[kind] = now_s, self._counts[kind]
            untold = self._counts[kind] - count - 1
        more = f" ({untold} more like it since the last was told)" if untold else ""
        self._log.warning("%s: %s: %s%s", self._name, kind, why, more)
