"""How fast the background of a rebuild, or of a move, reads: within a limit, and half of what its network carries.

Who waits for a record on first touch, or for a lookup, waits behind all that the background has asked for and that has
not arrived. Over a link that is slower than the limit this grew to a second for each step. So the background measures
what arrives: a *probe* is a portion that takes long enough to show it. Other portions ask for as much as arrives in
`BURST_S`, and after each comes a pause as long, so that others find the link free, or nearly so. What was found may be
wrong, or not be so any more: after a probe that found far less than those before comes another at once, and a pause
ends, as far as the limit allows it, when it is time for the next.

Knows no clock and reads nothing: it is told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SHARE = 0.5  # of what arrives; the rest is for training
BURST_S = 0.02  # that a portion takes, about
PROBE_S = 0.1  # that a probe takes, about: longer than a host with other work does to answer
PROBE_AGAIN_S = 2.0  # links, and what others do with them, change
PROBES_KEPT = 4  # the fastest counts: a host that had other work for a moment is no slow link
LEAST_BYTES, LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 128 << 10, 512 << 10, 2 << 20  # of what is rebuilt by a portion
LEAST_BYTES_PER_S = 1e6


@dataclass(frozen=True)
class Asked:
    """What a portion was asked for at.

    Attributes:
        now_s: when.
        arrived: how many bytes had arrived until then, of all portions.
        is_probe: whether it shows how fast they arrive.
    """

    now_s: float
    arrived: int
    is_probe: bool


class Throttle:
    """The rate and the portions of one slot's rebuild, or move.

    Args:
        limit_bytes_per_s: of what is read; 0: there is none, and nothing is measured.
        most_bytes: of records that one portion rebuilds.
        reads: how many bytes are read for each byte that is rebuilt.
    """

    def __init__(self, limit_bytes_per_s: float, most_bytes: int, reads: int) -> None:
        self.limit, self._most, self._reads = limit_bytes_per_s, most_bytes, reads
        self._arrived = 0
        self._probe_s = 0.0  # when the next probe is due
        self._found: deque[float] = deque(maxlen=PROBES_KEPT)  # bytes/s

    @property
    def knows(self) -> bool:
        """Whether it was measured how fast bytes arrive, or need not be: then several portions may be under way.

        Not if it was far less the last time than before: then it is measured again, at once.
        """
        return not self.limit or (bool(self._found) and self._found[-1] >= SHARE * max(self._found))

    def pause_s(self, count: int, within_limit: bool = True) -> float:
        """Returns how long nothing is to be read after so many bytes. `within_limit`: else half of the link counts."""
        if not self.limit or count <= 0:
            return 0.0
        by_limit = count / self.limit if within_limit else 0.0
        return max(by_limit, min(count / self._share, PROBE_AGAIN_S)) if self._found else by_limit

    def portion_bytes(self, now_s: float) -> int:
        """Returns how many bytes of records the next portion may rebuild."""
        if not self.limit:
            return self._most
        if self._probes(now_s):
            return self._probe_bytes()
        return min(self._most, max(LEAST_BYTES, self._arriving_in(BURST_S)))

    def most_records(self, record_bytes: int, now_s: float) -> int:
        """Returns how many records of that size the next portion may rebuild: one at least."""
        return max(1, self.portion_bytes(now_s) // record_bytes)

    def ask(self, count: int, now_s: float) -> Asked:
        """Notes that so many bytes are asked for now, for a portion."""
        if not self.limit:
            return Asked(0.0, 0, False)
        # of a portion, some are there already
        least = self._probe_bytes() // 2 if self._found else min(self._most, LEAST_PROBE_BYTES)
        is_probe = self._probes(now_s) and count >= self._reads * least
        if is_probe:
            self._probe_s = now_s + PROBE_AGAIN_S
        return Asked(now_s, self._arrived, is_probe)

    def arrive(self, asked: Asked | None, count: int, now_s: float) -> None:
        """Notes that so many bytes have arrived: of a portion, or (None) of what a request waits for."""
        if not self.limit:
            return
        self._arrived += count
        if asked is not None and asked.is_probe and now_s > asked.now_s:
            self._found.append((self._arrived - asked.arrived) / (now_s - asked.now_s))

    def _probes(self, now_s: float) -> bool:
        return not self.knows or now_s >= self._probe_s

    def _probe_bytes(self) -> int:
        wanted = max(LEAST_PROBE_BYTES, self._arriving_in(PROBE_S)) if self._found else MOST_PROBE_BYTES
        return min(self._most, MOST_PROBE_BYTES, wanted)

    def _arriving_in(self, seconds: float) -> int:
        """Returns how many bytes of records may be rebuilt from what arrives meanwhile."""
        return int(seconds * max(self._found) / self._reads)

    @property
    def _share(self) -> float:
        """Of the link, as it was found, in bytes/s."""
        return max(LEAST_BYTES_PER_S, SHARE * max(self._found))
