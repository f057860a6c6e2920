"""Learns from silences that ended how long a silence may be before it is suspicious. Pure.

An accrual failure detector: `phi(t) = -log10 P(a silence that ends is longer than t)`, so that at phi 8 one in 10^8
such judgements is wrong, as far as the past is like the present (Hayashibara et al., "The phi Accrual Failure
Detector", SRDS 2004, section 4: P of the normal distribution with mean and deviation of the last silences). Pauses of
garbage collectors, schedulers and retransmissions have heavier tails than that, and come in bursts. So no silence
counts that is shorter than the longest of the last ones, stretched (as detectors do that take the distribution as it
was seen: Satzger et al., "A New Adaptive Accrual Failure Detector for Dependable Distributed Systems", SAC 2007). One
that was longer than any limit may be was an outage, and teaches nothing: or the next one would be noticed late.

    heartbeats each 0.25 s, deviation 0.01 s      limit 0.75 s (`least_s`)
    the same, and once a pause of 1.2 s           1.8 s, until that is `WINDOW` heartbeats ago
    nothing learned yet                           `first_s`
"""

from __future__ import annotations

from collections import deque
from statistics import NormalDist, fmean, pstdev

PHI = 8.0
WINDOW = 1200  # silences: five minutes of heartbeats
ENOUGH = 20  # before that nothing is known
DEVIATION_LEAST_S = 0.05  # jitter of timers and looks, however steady the peer is
STRETCH = 1.5
DEVIATIONS = NormalDist().inv_cdf(1.0 - 10.0**-PHI)


class Accrual:
    """Learns how long the silences of one peer usually are, and so how long a silence is suspicious.

    Args:
        first_s: the limit until enough is known.
        least_s, most_s: between which it is learned.
    """

    def __init__(self, first_s: float, least_s: float, most_s: float) -> None:
        self._first_s, self._least_s, self._most_s = first_s, least_s, most_s
        self._silences: deque[float] = deque(maxlen=WINDOW)

    def ended(self, silence_s: float) -> None:
        """Notes that a silence ended after `silence_s`."""
        if silence_s <= self._most_s:
            self._silences.append(min(max(silence_s, 0.0), self._most_s / STRETCH))

    @property
    def knows(self) -> bool:
        """Whether enough silences were observed to tell what is usual."""
        return len(self._silences) >= ENOUGH

    @property
    def limit_s(self) -> float:
        """The length of a silence, in seconds, beyond which it is suspicious."""
        if not self.knows:
            return self._first_s
        usual_s = fmean(self._silences) + DEVIATIONS * max(pstdev(self._silences), DEVIATION_LEAST_S)
        return min(max(usual_s, STRETCH * max(self._silences), self._least_s), self._most_s)

    def is_suspicious(self, silence_s: float) -> bool:
        """Returns whether a silence of that length is longer than usual."""
        return silence_s > self._least_s and silence_s > self.limit_s
