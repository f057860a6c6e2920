"""What pages are sent: the newest status, the last events, and the steps of the last minutes. Pure; of one thread.

    feed.happened({"event": "left", "member": "server-1"}, 1e9)     # event "3f2a-17"
    feed.since("3f2a-15")                                           # [events 16 and 17]: whoever has missed them

An event's id is the *life* of the feed, a random word for each process, and its number in it. So a page that reconnects
to another coordinator is told from one that has missed a few: it gets all that is there.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from torch_ecrec.observe.text import telling

EVENTS_MOST = 400
EVENTS_MOST_BYTES = 1 << 20  # of all that are kept: placements of large clusters are long
POINTS_MOST = 900  # a quarter of an hour, one a second


@dataclass(frozen=True)
class Kept:
    """An event. `number`: in this life, from 1. `said`: as an object of JSON."""

    number: int
    said: bytes


class Feed:
    """Keeps the latest events, and the progress of training, for pages.

    Args:
        life: a word that no other process has; see above.
    """

    def __init__(self, life: str) -> None:
        self.life, self.number = life, 0  # the last event's
        self._events: deque[Kept] = deque()
        self._bytes = 0
        self._points: deque[tuple[float, int]] = deque(maxlen=POINTS_MOST)

    def happened(self, event: dict[str, Any], time_s: float) -> None:
        """Keeps an event, as the log has it; `time_s`: of the day."""
        self.number += 1
        told = asdict(telling(event))  # its words, for all pages the same as in the log and in `torch-ecrec status`
        said = json.dumps({**event, "time_s": round(time_s, 3), "told": told}, separators=(",", ":")).encode()
        self._events.append(Kept(self.number, said))
        self._bytes += len(said)
        while len(self._events) > EVENTS_MOST or (self._bytes > EVENTS_MOST_BYTES and len(self._events) > 1):
            self._bytes -= len(self._events.popleft().said)

    def reached(self, time_s: float, step: int) -> None:
        """Keeps how far training was then. What is later, by a clock that was set back since, goes: nothing that comes
        would be told from it."""
        while self._points and self._points[-1][0] >= time_s:
            self._points.pop()
        self._points.append((time_s, step))

    def history(self) -> bytes:
        """Returns the steps of the last minutes, as JSON: [[time_s, step], ...]."""
        return json.dumps([[round(time_s, 2), step] for time_s, step in self._points], separators=(",", ":")).encode()

    def id_of(self, number: int) -> str:
        """Returns the id of an event."""
        return f"{self.life}-{number}"

    def number_of(self, last_id: str) -> int:
        """Returns the number of the last event that a page has, by its id; 0: none of this life."""
        life, _, number = last_id.rpartition("-")
        known = life == self.life and number.isascii() and number.isdecimal() and len(number) < 20
        return min(int(number), self.number) if known else 0

    def since(self, number: int) -> list[Kept]:
        """Returns the events after that one, oldest first, as far as they are still there."""
        missed = min(self.number - number, len(self._events))  # mostly 0, and every page asks again and again
        return [self._events[at] for at in range(-missed, 0)]
