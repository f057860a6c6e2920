"""The policy of the experiment minus2PC: a step is acknowledged as soon as its slot has applied it.

Asynchronous replication: deltas are folded into parities as in `parity.py`, in order, but nobody waits for holders. So
trainers forget a step that nobody but its slot has, and it may be lost with that. Nothing else of parity is left out,
so that what the acknowledgement costs is measured alone. The cut stays, too: stripes fit together after any kill, and
what is lost are whole steps of a slot.

    slot 1 has applied steps 1 to 9 and acknowledged them; its holders have folded 9 and 7; it is lost
    the cut is 7: the first holder takes steps 8 and 9 back. Stripes fit together, as of step 7
    trainers have forgotten pushes 8 and 9 to slot 1. Each tells the new host: up to here I send you nothing any more
    slot 1 *passes over* steps 8 and 9: they change nothing there. Slots 0 and 2 keep their changes of these steps
    trainers push step 10, and training goes on. Two acknowledged steps of slot 1 are lost for good, and are counted

What a kill does. The new host claims the cut first, as with parity. It goes on to the greatest step that a trainer has
been told is acknowledged there (`WhenAcknowledged`, which trainers ask of a new host in this mode; a step that one of
them does not send again can never be complete), or that all servers went back to. When trainers are lost, too, before
they could tell, it agrees to any step that the others can go back to, and passes over what it lacks of it.

Holders that are caught up, in the sense of rule 3, have folded all that was once on all of them, not all that was
acknowledged: else every holder that is a step behind would count as one that is being rebuilt.

A holder that does not answer holds up nobody, so that nothing but memory bounds its source's log, and
`wellformed.STEPS_AHEAD` how many steps may be lost with a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch_ecrec.durability.parity import Parity
from torch_ecrec.records.delta_log import DeltaLog

log = logging.getLogger(__name__)

ANY_STEP = 1 << 48  # later than any that others can go back to


class AcknowledgedWhenApplied(Parity):
    """The `Durability` of a slot whose steps count before its holders have them."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._on_all = 0  # the greatest step that all holders had at once
        self._adopted = self._behind = False  # others may be at a step that this life does not know of yet
        self._forgotten = 0  # a trainer sends nothing up to here any more
        self._lost_steps = 0

    @property
    def settled(self) -> int:
        return self.held.rule.applied

    @property
    def held_by_all(self) -> int:
        return self._on_all

    @property
    def reach(self) -> int:
        return ANY_STEP if self._behind and self.host.load_end is not None else self.held.rule.applied

    @property
    def lost_steps(self) -> int:
        return self._lost_steps

    # the slot's own steps -------------------------------------------------------------------------

    def on_applied(self, step: int) -> None:
        self._behind = False
        super().on_applied(step)

    def on_folded(self, holder: int, before: int, through: int) -> None:
        self._on_all = max(self._on_all, self.held.rule.settled)
        super().on_folded(holder, before, through)

    def on_forgotten(self, step: int) -> None:
        self._behind = False
        self._forgotten = max(self._forgotten, step)
        self._pass_over()

    def _pass_over(self) -> None:
        """Passes over steps that were acknowledged and are lost, so that the slot can go on after them."""
        through, applied = max(self._forgotten, self.host.resume_step), self.held.rule.applied
        if not self.slot.ready or self.host.frozen or through <= applied:
            return
        self._lost_steps += through - applied
        log.warning(
            "slot %d: steps %d to %d were acknowledged, and are lost: goes on after them (experiment minus2PC)",
            self.held.index,
            applied + 1,
            through,
        )
        self.slot.pass_over(through)

    # the slot's life ------------------------------------------------------------------------------

    def adopt(self) -> None:
        self._adopted = self._behind = True
        super().adopt()

    def take_over(self, floors: Mapping[int, int], attached: Mapping[int, int]) -> Mapping[int, DeltaLog]:
        self._adopted = False
        return super().take_over(floors, attached)

    def connect(self) -> None:
        """Meets the other slots anew. All holders have what is before the log; after a cut, all that are caught up have
        what is before that."""
        rule, self._adopted, adopted = self.held.rule, False, self._adopted
        self._on_all = max(self._on_all, rule.applied if adopted else self.held.log.floor)
        super().connect()

    def restore(self) -> None:
        super().restore()
        self._pass_over()

    def stop(self) -> None:
        """Stops, and forgets what trainers have said of lost steps: it counts in their era only."""
        super().stop()
        self._forgotten = 0

    def go_back(self, step: int) -> None:
        super().go_back(step)
        self._on_all = min(self._on_all, step)
