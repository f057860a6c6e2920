"""How long is waited for a cluster to be whole again: without progress, and not for the machine.

A busy machine has a hang and a slow start look alike: a trainer that imports torch while twelve others want the two
cores takes minutes. So time counts only as far as those who are waited for had a core when they wanted one, and begins
anew with every progress. What never gets a core in vain, as whoever hangs, has no more time than on an idle machine.

    passed    longest wait of a process for a core    counts
    0.5 s     0.0 s (all sleep: it hangs)             0.5 s
    0.5 s     0.4 s (one imports, others are served)  0.1 s

Does not know what progress is: who waits has a mark of it, which is another one then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

MOST = 5  # times as long as without progress is waited in all: who comes and goes for ever makes progress, too


def waited_s(pids: Iterable[int]) -> dict[int, float]:
    """Returns for how many seconds the main thread of each process has waited for a core, as far as Linux tells."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat") as file:
            found[pid] = int(file.read().split()[1]) / 1e9
    return found


class Patience:
    """Time in which nothing came nearer, by repeated looks.

    Attributes:
        vain_s: since the last progress.
        all_s: since `begin`.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Waits anew, from the next look on."""
        self.vain_s = self.all_s = 0.0
        self._looked_s: float | None = None
        self._mark: object = None
        self._waited: Mapping[int, float] = {}

    def look(self, now_s: float, mark: object, waited: Mapping[int, float]) -> None:
        """Counts the time since the last look.

        Args:
            now_s: of a clock that only grows.
            mark: of progress.
            waited: by process, for how long each has waited for a core; see `waited_s`.
        """
        if self._looked_s is not None:
            late_s = max((waited[pid] - self._waited.get(pid, 0.0) for pid in waited), default=0.0)
            passed_s = max(0.0, now_s - self._looked_s - late_s)
            self.all_s += passed_s
            self.vain_s = self.vain_s + passed_s if mark == self._mark else 0.0
        self._looked_s, self._mark, self._waited = now_s, mark, waited

    def is_over(self, limit_s: float) -> bool:
        """Returns whether there was no progress for so long, or it was too slow in all."""
        return self.vain_s > limit_s or self.all_s > MOST * limit_s
