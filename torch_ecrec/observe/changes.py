"""What is new in a cluster's verdict, for who does not ask: `torch-ecrec up` prints it at its terminal. Pure.

    changes = Changes()
    changes.lines(verdict, 10.0)    # ["ERROR: training stands: 0 of 2 trainers are there", "  to do: torchrun ..."]
    changes.lines(verdict, 11.0)    # []: that was told
    changes.lines(all_well, 25.0)   # ["OK: training goes on at step 100, ..."]

Invariants.
- A finding is told once as long as it lasts, and once in `AGAIN_S` at most, however often it comes and goes.
- Nothing is told within `LEAST_S` of what was told before: what is over by then is not told at all.
- That a cluster has yet to begin is nothing new to who has just started it.
"""

from __future__ import annotations

import math

from torch_ecrec.observe.verdict import EXIT_CODES, Level, Verdict

LEAST_S = 3.0
AGAIN_S = 60.0
BEGINS = {"gathering", "begins", "looks"}  # findings of a cluster that has just been started


class Changes:
    """Tells what is new in one verdict after the other."""

    def __init__(self) -> None:
        self._level: Level = "OK"  # as told last
        self._known: set[tuple[str, str]] = set()  # findings that were told, and still are so: code and level
        self._told_s: dict[tuple[str, str], float] = {}  # when one was told last
        self._last_s = -math.inf
        self._begun = False

    def lines(self, verdict: Verdict, now_s: float) -> list[str]:
        """Returns what is to be said of a verdict; nothing, if nothing is new."""
        there = {(one.code, one.level) for one in verdict.findings}
        self._begun = self._begun or not {code for code, _ in there} <= BEGINS or verdict.level == "OK"
        if not self._begun or now_s < self._last_s + LEAST_S:
            return []
        self._known &= there
        again_s = now_s - AGAIN_S
        new = [
            one
            for one in verdict.findings
            if (one.code, one.level) not in self._known
            and self._told_s.get((one.code, one.level), -math.inf) <= again_s
        ]
        lines = []
        for one in new:
            self._known.add((one.code, one.level))
            self._told_s[one.code, one.level] = now_s
            lines += [f"{one.level}: {one.what}", f"  to do: {one.remedy}"]
        better = EXIT_CODES[verdict.level] < EXIT_CODES[self._level]
        if not new and better and there <= self._known:
            lines = [f"{verdict.level}: {verdict.says}"]
        if lines:
            self._level, self._last_s = verdict.level, now_s
        return lines
