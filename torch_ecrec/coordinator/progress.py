"""How fast training goes, and how fast slots get what they lack, from what members report. Pure.

The time is an argument. What was reported is looked at on every tick, and kept for `WINDOW_S`; a rate is that between
the oldest and the newest look. It begins anew where training goes back, and where a slot has another host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TypeVar

from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.protocol.messages import SlotPlace
from torch_ecrec.protocol.status import Filling, Rate, SlotReport

WINDOW_S = 10.0  # what a rate is of
LEAST_S = 0.9  # of less there is none
PAUSE_S = 0.2  # between two looks that are kept


_Look = TypeVar("_Look", tuple[float, int], tuple[float, float, int])


class Progress:
    """Follows how training and repairs have advanced of late.

    Attributes:
        step: the last step of training that is known to be done; it falls when training goes back.
    """

    def __init__(self) -> None:
        self.step = 0
        self._stepped_s: float | None = None  # when it grew last, or slots were placed, or it was looked at first
        self._placed, self._trainers = False, 0
        self._absent_s: float | None = None  # when a trainer was gone last
        self._steps: deque[tuple[float, int]] = deque()
        self._samples: deque[tuple[float, int]] = deque()
        self._filled: dict[tuple[int, int], deque[tuple[float, float, int]]] = {}  # slot, incarnation -> share, bytes

    def on_tick(self, members: Collection[MemberRecord], slots: list[SlotPlace], now_s: float) -> None:
        """Looks at what members have reported."""
        said, present = reports(members, slots), sum(one.role == "trainer" and one.present for one in members)
        if slots and not self._placed:
            self._placed, self._stepped_s = True, now_s
        if present < self._trainers or (self._absent_s is None and not present):
            self._absent_s = now_s
        self._trainers = present
        trainers = [one.report.trained for one in members if one.role == "trainer" and one.report.trained is not None]
        step = max([report.step for report in said.values()] + [one.step for one in trainers], default=self.step)
        if step < self.step:
            self._steps.clear()
            self._samples.clear()
        elif step > self.step or self._stepped_s is None:
            self._stepped_s = now_s
        self.step = step
        if step:  # 0: nobody has said where training is, or began again with a checkpoint
            _note(self._steps, (now_s, step))
        samples = sum(one.samples for one in trainers)
        if self._samples and samples < self._samples[-1][1]:  # one of them was started again
            self._samples.clear()
        if trainers:
            _note(self._samples, (now_s, samples))
        lacking = {(i, place.incarnation) for i, place in enumerate(slots) if not place.healthy}
        self._filled = {life: seen for life, seen in self._filled.items() if life in lacking}
        for life in lacking:
            if (report := said.get(life[0])) is not None:
                size = report.record_bytes + report.parity_bytes
                _note(self._filled.setdefault(life, deque()), (now_s, report.rebuilt, size))

    def still_s(self, now_s: float) -> float | None:
        """Seconds since a step was last done, or since this coordinator began; None: it has not looked yet."""
        return None if self._stepped_s is None else now_s - self._stepped_s

    def absent_s(self, now_s: float) -> float | None:
        """Seconds since there was a trainer less, or since this coordinator began without one; None: not yet."""
        return None if self._absent_s is None else now_s - self._absent_s

    def rate(self) -> Rate | None:
        """Returns how fast training goes; None if it is not known yet, or nothing was trained of late."""
        over_s, steps = _grown(self._steps)
        if over_s < LEAST_S or not steps:
            return None
        sampled_s, samples = _grown(self._samples)
        samples_per_s = samples / sampled_s if sampled_s >= LEAST_S and samples else None
        return Rate(round(over_s, 3), steps / over_s, samples_per_s)

    def filling(self, slot: int, incarnation: int) -> Filling | None:
        """Returns how this incarnation of a slot gets what it lacks; None: its host has not said anything yet."""
        seen = self._filled.get((slot, incarnation))
        if not seen:
            return None
        (first_s, first, _), (last_s, share, size) = seen[0], seen[-1]
        over_s, grown = last_s - first_s, share - first
        if over_s < LEAST_S or grown < 0:
            return Filling(share, None, None)
        return Filling(share, grown * size / over_s, (1 - share) * over_s / grown if grown else None)


def reports(members: Collection[MemberRecord], slots: list[SlotPlace]) -> dict[int, SlotReport]:
    """Returns the last report of each slot's present incarnation, by its present host; keyed by slot."""
    lives = {(i, place.server, place.incarnation) for i, place in enumerate(slots)}
    return {
        report.slot: report
        for one in members
        for report in one.report.slots or ()
        if (report.slot, one.name, report.incarnation) in lives
    }


def _note(seen: deque[_Look], now: _Look) -> None:
    if len(seen) > 1 and now[0] < seen[-2][0] + PAUSE_S:
        seen[-1] = now
    else:
        seen.append(now)
    while len(seen) > 2 and seen[1][0] < now[0] - WINDOW_S:
        seen.popleft()


def _grown(seen: deque[tuple[float, int]]) -> tuple[float, int]:
    """Returns over how many seconds a counter has grown, and by how much."""
    return (seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]) if seen else (0.0, 0)
