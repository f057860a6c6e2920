"""What trainers have announced: records that lookups of later steps will ask for.

What is missing begins to be repaired at once. What is on a disk begins to be read, so that it is in memory when it is
asked for, and stays there until the step is applied. Example: step 7 is applied last, and trainer 0 announces position
40 for its lookup of step 10.

    announced    40 is on the disk: it begins to be read
    8, 9         are applied: 40 stays, whatever else goes
    10           is applied: 40 goes before long, as others do

An announcement is a hint. It says nothing that another message does not say again, so it may be lost, come late, twice,
or be of what nobody looks up: bits do not depend on it. It counts for `STEPS_MOST` steps at most, and all of a table
group for half of its frames: what comes beyond that is let go. Where steps are taken back, all are forgotten.
"""

from __future__ import annotations

import itertools

import numpy as np

from torch_ecrec.durability.context import SlotContext
from torch_ecrec.protocol import wire
from torch_ecrec.spec.settings import LOOK_AHEAD_MOST

STEPS_MOST = 2 * LOOK_AHEAD_MOST  # after the step that was applied last: trainers are some ahead of that
SHARE = 2  # a half of the frames of each table group


class Announcements:
    """The announcements of one slot, of steps that are not applied yet."""

    def __init__(self, slot: SlotContext) -> None:
        self.slot = slot
        # of each step, and each message: the positions of every table group, (N,) int64, in no order, with repetitions
        self._of_step: dict[int, list[list[np.ndarray]]] = {}

    def on_announce(self, request: wire.Announce) -> None:
        """Has what is missing repaired, and what is on the disk read, as far as there is room for it."""
        shards, applied = self.slot.held.shards, self.slot.held.rule.applied
        if not self.slot.ready or not applied < request.step <= applied + STEPS_MOST:
            return
        expected = [positions.numpy() for positions in request.positions]
        kept = [positions[:0] for positions in expected]
        for table_group, shard in enumerate(shards):
            if shard.in_memory:
                continue
            if self.announced(table_group) + len(expected[table_group]) <= shard.frames // SHARE:
                kept[table_group] = expected[table_group]
            expected[table_group] = kept[table_group]
        if any(map(len, kept)):
            self._of_step.setdefault(request.step, []).append(kept)
            self._pin()
        if any(map(len, expected)):
            self.slot.expect(expected, later=True)

    def announced(self, table_group: int) -> int:
        """Returns how many positions of a table group are announced, repetitions included."""
        return sum(len(taken[table_group]) for of_step in self._of_step.values() for taken in of_step)

    def on_applied(self, step: int) -> None:
        """Lets go of what was announced of an applied step, and of no other."""
        past = [other for other in self._of_step if other <= step]
        for other in past:
            del self._of_step[other]
        if past:
            self._pin()

    def forget(self) -> None:
        """Forgets all announcements: who announced is lost, or begins anew."""
        self._of_step.clear()
        self._pin()

    def _pin(self) -> None:
        every = list(itertools.chain.from_iterable(self._of_step.values()))
        for table_group, shard in enumerate(self.slot.held.shards):
            shard.pin([taken[table_group] for taken in every if len(taken[table_group])])
