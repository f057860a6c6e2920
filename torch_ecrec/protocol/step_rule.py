"""The step rule of one slot: which steps are applied, folded, acknowledged, settled, and what may be forgotten.

Pure bookkeeping over integers: no tensors, no clock, no I/O. `docs/design.md` derives each rule; the numbers in
brackets are those of its section "The rules in full".

Terms, for a slot s:
    holder     a slot that keeps parity of some records of s; source: a slot whose records s keeps parity of
    applied    the last step whose gradients s has applied; steps are applied in order
    confirmed  per holder, the last step it has folded: cumulative, because folds of one source go in order [1]
    settled    the last step that every holder has folded: nothing at or before it is ever undone [4]
    acknowledged  the highest `settled` ever seen: told to the trainers, survives r losses
    watermark  every trainer has everything up to here acknowledged: nobody goes back further
    caught up  a holder has folded all that the source had acknowledged when the two met

Example: slot 0 has applied 7; holder 1 confirmed 7, holder 2 confirmed 5. Settled is 5, steps 6 and 7 wait. Holder 2
dies and is replaced: its new incarnation knows nothing, so it starts from the floor of slot 0's log (say 4) and gets 5,
6 and 7 again [5]. `settled` falls to 4, `acknowledged` stays 5: the new holder is caught up once it has folded 5.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_ecrec.protocol.wire import Handed


class FoldVerdict(enum.Enum):
    """The verdict of a holder on a fold that arrives; only `NEXT` is folded."""

    STALE = "from an incarnation that has been replaced"
    UNATTACHED = "from a source that has not attached yet"
    EARLY = "before its turn"
    DUPLICATE = "folded before"
    NEXT = "the next step of its source"


@dataclass
class StepRule:
    """The state of the rule, which only its own methods change.

    `incarnations[x]` is the lowest incarnation of slot x that is still listened to [2].
    """

    slot: int
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    trainers: int
    incarnations: dict[int, int]
    applied: int = 0
    acknowledged: int = 0
    confirmed: dict[int, int] = field(default_factory=dict)
    folded: dict[int, int] = field(default_factory=dict)
    catch_up: dict[int, int] = field(default_factory=dict)
    resumable: dict[int, int] = field(default_factory=dict)

    # as a source --------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Steps are applied in order, each once."""
        return step == self.applied + 1

    def is_acknowledged(self, step: int) -> bool:
        """Returns whether a push of such a step is acknowledged again at once; it is so by any incarnation [8]."""
        return step <= self.acknowledged

    @property
    def settled(self) -> int:
        return min((self.confirmed[h] for h in self.holders), default=self.applied)

    @property
    def watermark(self) -> int:
        return min((self.resumable.get(i, 0) for i in range(self.trainers)), default=0)

    def on_applied(self, step: int) -> None:
        assert self.is_due(step), f"slot {self.slot}: step {step} applied after {self.applied}"
        self.applied = step

    def on_confirmed(self, holder: int, incarnation: int, step: int) -> None:
        """A confirmation of an incarnation that has been replaced counts for nothing [2]."""
        if self.is_current(holder, incarnation):
            self.confirmed[holder] = max(self.confirmed[holder], step)

    def on_resumable(self, trainer: int, step: int) -> None:
        """Notes that a trainer may go on from `step`: what it sent up to there survives. Late messages do nothing."""
        self.resumable[trainer] = max(self.resumable.get(trainer, 0), step)

    def acknowledge(self, through: int) -> bool:
        """Steps up to `through` survive: advances `acknowledged`, to what is applied at most; true if it did."""
        before = self.acknowledged
        self.acknowledged = max(before, min(through, self.applied))
        return self.acknowledged > before

    def adopt(self, cut: int, floor: int) -> None:
        """Goes on after the cut, as the new host of a lost slot; holders are known to have what is before its log
        [3]."""
        self.applied = self.acknowledged = cut
        self.confirmed = dict.fromkeys(self.holders, floor)

    def take_over(self, before: Handed, floor: int) -> None:
        """Goes on as the life before, which has stopped; holders are known to have what is before its log [12]."""
        self.applied, self.acknowledged = before.applied, before.acknowledged
        self.folded, self.catch_up, self.resumable = {**before.folded}, {**before.catch_up}, {**before.resumable}
        for slot, incarnation in enumerate(before.incarnations):
            if slot != self.slot:
                self.incarnations[slot] = max(incarnation, self.incarnations.get(slot, 0))
        self.confirmed = dict.fromkeys(self.holders, floor)

    def go_back(self, step: int) -> None:
        """Takes back every step after `step`, own ones and those of the sources: the trainers start again there [9]."""
        self.applied = min(self.applied, step)
        self.acknowledged = min(self.acknowledged, step)
        for steps in (self.confirmed, self.folded, self.catch_up, self.resumable):
            steps.update({key: min(value, step) for key, value in steps.items()})

    def may_forget(self) -> int:
        """Own deltas up to here serve nobody: not a reader, not a cut, not going back [4]."""
        return min(self.settled, self.watermark)

    # as a holder --------------------------------------------------------------------------------

    def judge_fold(self, source: int, incarnation: int, step: int) -> FoldVerdict:
        if not self.is_current(source, incarnation):
            return FoldVerdict.STALE
        if source not in self.folded:
            return FoldVerdict.UNATTACHED
        if step <= self.folded[source]:
            return FoldVerdict.DUPLICATE
        return FoldVerdict.NEXT if step == self.folded[source] + 1 else FoldVerdict.EARLY

    def on_folded(self, source: int, step: int) -> None:
        """Notes that the next step of a source is folded."""
        self.folded[source] = step

    def on_undone(self, source: int) -> None:
        """Notes that the last step of a source that was folded is taken back."""
        self.folded[source] -= 1

    def is_caught_up(self, source: int) -> bool:
        return source in self.catch_up and self.folded.get(source, -1) >= self.catch_up[source]

    def on_attached(self, source: int, base: int, acknowledged: int) -> bool:
        """Notes that a source (or its new incarnation) has met this holder. True if the holder knew nothing: starts
        from `base`."""
        fresh = source not in self.folded
        if fresh:
            self.folded[source] = base
        self.catch_up[source] = acknowledged
        return fresh

    def forget_source(self, source: int) -> None:
        """Forgets a source whose records begin anew: what was folded of it is of none of its steps [11]."""
        self.folded.pop(source, None)
        self.catch_up.pop(source, None)

    # incarnations -------------------------------------------------------------------------------

    def is_current(self, slot: int, incarnation: int) -> bool:
        return incarnation >= self.incarnations.get(slot, 0)

    def learn(self, slot: int, incarnation: int, floor: int) -> bool:
        """Slot `slot` has a new incarnation: fences the old one. True if it was news.

        As a holder it knows nothing: what it confirmed is void down to `floor`, where this slot's log begins [5].
        """
        if incarnation <= self.incarnations.get(slot, 0):
            return False
        self.incarnations[slot] = incarnation
        if slot in self.holders:
            self.confirmed[slot] = floor
        return True


def choose_cut(reports: Iterable[tuple[int | None, bool]]) -> int | None:
    """Returns the cut of a lost slot: the last step that all holders who are caught up with it have folded [3].

    A holder that is still catching up has folded less than the slot acknowledged, so it says nothing about the cut; it
    gets what it lacks from the new host.

    Args:
        reports: per holder, the last step of the lost slot that it has folded (None: knows nothing) and whether it is
            caught up.

    Returns:
        The cut, or None if no holder is caught up.
    """
    return min((folded for folded, caught_up in reports if caught_up and folded is not None), default=None)
