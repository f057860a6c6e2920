"""Which servers limp: training waits for them, while most others have long answered. Pure: the time is an argument.

Every trainer reports for whom it has waited with lookups, and for how long it could not go on since earlier steps were
not acknowledged; every server for whom it has waited with folds (`protocol/waits.py`). What they say is added up over
windows of `WINDOW_S`. Trainers that could not go on have waited for a server for as long as most other servers have
waited for its folds, at most. A window speaks against a server if

- of the time of the trainers that worked on steps, on average, at least `SHARE` was waited for it, and
- its answers came at least `LEAST_S` after those of most others, and `RATIO` times later than those took: as they took
  at the trainer that waited least for all alike, since such a wait is one for another trainer.

It is named after `WINDOWS` such windows in a row: no pause of less than `(WINDOWS - 2) * WINDOW_S` is taken for
limping. It is cleared after as many in which nothing comes near that (`CALM` of each limit). A server that is
*excused*, as it rebuilds, moves slots or writes a checkpoint, is neither named nor cleared meanwhile. A window counts
neither for nor against a server that was *quiet* in it, as one is now and then that hardly runs; nor for or against
anybody if no trainer worked on a step in it, or the coordinator itself stood still.

Example: three servers, two trainers. c has 2 % of a core, and each step waits 0.5 s for it: late for 0.9 of the time,
0.5 s for each lookup, and the others take 0.01 s. After 20 s it is named; nobody else ever has a window against it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from torch_ecrec.coordinator.members import TICK_MOST_S
from torch_ecrec.protocol.status import Late, WaitedFor

WINDOW_S = 5.0
WINDOWS = 4
SHARE = 0.5
LEAST_S = 0.05
RATIO = 3.0
CALM = 0.5


NOT_LATE = Late(0.0, 0.0, 0.0)


def exceeds(late: Late, of_limits: float) -> bool:
    """Returns whether all limits are reached, or so much of each."""
    least_s = max(LEAST_S, RATIO * late.usual_s)
    return late.share >= of_limits * SHARE and late.late_s >= of_limits * least_s


@dataclass
class _Sums:
    over_s: float = 0.0
    lookups: int = 0
    usual_s: float = 0.0
    held_s: float = 0.0


class Slowness:
    """Adds up what trainers have waited for in this window, and names the servers that were slow in many.

    Attributes:
        named: servers that limp, and how they were waited for in the last window that counted.
    """

    def __init__(self) -> None:
        self.named: dict[str, Late] = {}
        self._trainers: dict[str, _Sums] = {}
        self._servers: dict[str, _Sums] = {}
        self._late_s: dict[str, dict[str, float]] = {}  # server -> who waited for it -> seconds
        self._against: dict[str, int] = {}  # windows, one after the other
        self._calm: dict[str, int] = {}  # likewise
        self._excused: set[str] = set()  # at some time of this window
        self._quiet: set[str] = set()  # likewise
        self._ends_s: float | None = None
        self._ticked_s = 0.0

    def on_report(self, name: str, trains: bool, waits: WaitedFor) -> None:
        """Adds what one trainer or server has waited for since its last report."""
        sums = (self._trainers if trains else self._servers).setdefault(name, _Sums())
        sums.over_s += waits.over_s
        sums.lookups += waits.lookups
        sums.usual_s += waits.usual_s
        sums.held_s += waits.held_s
        for server, late_s in waits.late_s.items():
            of = self._late_s.setdefault(server, {})
            of[name] = of.get(name, 0.0) + late_s

    def on_tick(
        self, servers: Collection[str], excused: Collection[str], quiet: Collection[str], now_s: float
    ) -> tuple[list[str], list[str]]:
        """Ends a window when its time is up, and names servers that were slow in many. Called as time passes.

        Args:
            servers: those that host slots.
            excused: of these, who has other things to do.
            quiet: who says nothing at all.

        Returns:
            Who is named from now on, and who is no more.
        """
        still, self._ticked_s = now_s - self._ticked_s > TICK_MOST_S, now_s
        self._excused.update(excused)
        self._quiet.update(quiet)
        if self._ends_s is None or still:
            self._begin(now_s, excused, quiet)
            return [], []
        if now_s < self._ends_s:
            return [], []
        found = self._close(set(servers))
        self._begin(now_s, excused, quiet)
        return found

    def forget(self, present: Collection[str]) -> None:
        """Forgets members that are gone."""
        for known in (self.named, self._against, self._calm):
            for server in [server for server in known if server not in present]:
                del known[server]

    def _begin(self, now_s: float, excused: Collection[str], quiet: Collection[str]) -> None:
        self._ends_s = now_s + WINDOW_S
        self._trainers, self._servers, self._late_s = {}, {}, {}
        self._excused, self._quiet = set(excused), set(quiet)

    def _close(self, servers: set[str]) -> tuple[list[str], list[str]]:
        new, over = [], []
        if (late := self._look()) is None:
            return [], []
        for server in sorted(servers - self._excused - self._quiet):
            seen = late.get(server, NOT_LATE)
            self._against[server] = self._against.get(server, 0) + 1 if exceeds(seen, 1.0) else 0
            self._calm[server] = self._calm.get(server, 0) + 1 if not exceeds(seen, CALM) else 0
            if server in self.named and exceeds(seen, CALM):
                self.named[server] = seen
            if server not in self.named and self._against[server] >= WINDOWS:
                self.named[server] = seen
                new.append(server)
            elif server in self.named and self._calm[server] >= WINDOWS:
                del self.named[server]
                over.append(server)
        for server in self._excused:
            self._against[server] = self._calm[server] = 0
        return new, over

    def _look(self) -> dict[str, Late] | None:
        """Returns how each server was waited for in this window; None: nobody can say."""
        witnesses = {
            name: sums
            for name, sums in self._trainers.items()
            if sums.over_s > 0 and (sums.lookups or sums.held_s or any(name in of for of in self._late_s.values()))
        }
        if not witnesses:
            return None
        usual_s = min(sums.usual_s / max(sums.lookups, 1) for sums in witnesses.values())
        found = {}
        for server, of in self._late_s.items():
            behind = self._behind(server, of)
            waited = {
                name: of.get(name, 0.0) + min(sums.held_s, behind * sums.over_s) for name, sums in witnesses.items()
            }
            shares = [waited[name] / sums.over_s for name, sums in witnesses.items()]
            each_s = [waited[name] / max(sums.lookups, 1) for name, sums in witnesses.items()]
            share = min(sum(shares) / len(shares), 1.0)
            found[server] = Late(share, sum(each_s) / len(each_s), usual_s)
        return found

    def _behind(self, server: str, of: dict[str, float]) -> float:
        """Returns the part of their time, 0 to 1, that most other servers have waited for this one's folds."""
        others = [
            of.get(name, 0.0) / sums.over_s
            for name, sums in self._servers.items()
            if name != server and sums.lookups + of.get(name, 0.0) > 0 and sums.over_s > 0
        ]
        return min(statistics.median_low(others), 1.0) if others else 0.0
