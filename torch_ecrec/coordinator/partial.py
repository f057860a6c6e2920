"""Partial recovery: more is lost than parity repairs, and only those slots go back to a checkpoint.

    pending    a checkpoint is looked for; what else is lost meanwhile is lost beyond repair, too, if it is
    reading    slots that begin anew with their records of it
    intact     slots with all their records whose parities are not whole yet: they survive, but protect nobody

After K. Maeng et al., "CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with
Partial Recovery" (MLSys 2021). It is not exact: what was trained since the checkpoint is lost in those slots. How much
that is, CPR's portion of lost samples says: samples whose updates are lost, weighted by the share of the
slots that lost them. Samples are counted in steps here.

    4 slots; step 100: one is lost, the checkpoint is of step 80    portion = (100 - 80) / 4 / 100 = 5 %

Pure: what begins, and when, is for `SlotTable` and `Eras` to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from torch_ecrec.layout import repair
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol.bounds import TEXT_MOST
from torch_ecrec.protocol.messages import PartialRestore


def beyond_repair(layouts: Iterable[Layout], gone: Collection[int], lost: Collection[int]) -> set[int]:
    """Returns which lost slots begin anew.

    Args:
        gone: slots that cannot help to repair others.
        lost: those of them without their records.

    Returns:
        Those with a row in a stripe that the code cannot repair; and those that share a stripe with one of these, whose
        parities will say nothing of them.
    """
    found: set[int] = set()
    shared: list[set[int]] = []
    for layout in layouts:
        members = [{int(slot) for slot in of_base} for of_base in layout.member_slot]
        shared += members
        for base in repair.unrecoverable_bases(layout, gone):
            data = [int(slot) for slot in layout.member_slot[base, : layout.k]]
            rows = [slot for j, slot in enumerate(data) if layout.exists(base, j, np.zeros(1, np.int64))[0]]
            found.update(slot for slot in rows if slot in lost)
    while True:
        more = {slot for of_base in shared if of_base & found for slot in of_base if slot in lost} - found
        if not more:
            return found
        found |= more


def lost_steps(partial_restores: Sequence[PartialRestore], slots: int) -> list[int]:
    """Returns by slot how many steps of training its records lack.

    A step that a slot lacks counts once, also if the slot was lost again before the next checkpoint; what a checkpoint
    lacks, a slot that begins with it lacks, too.
    """
    lacks: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(slots)]  # (from which step on, how many)
    for partial_restore in partial_restores:
        for slot, _, at in partial_restore.lives:
            if at is not None:
                then = [many for since, many in lacks[slot] if since <= partial_restore.done][-1]
                lacks[slot].append((at, then + max(0, at - partial_restore.done)))
    return [history[-1][1] for history in lacks]


def portion(partial_restores: Sequence[PartialRestore], slots: int, done: int) -> float:
    """Returns the portion of lost samples, of all until now. `done`: steps of training."""
    return sum(lost_steps(partial_restores, slots)) / slots / done if done else 0.0


def trimmed(partial_restores: Sequence[PartialRestore], done: int) -> list[PartialRestore]:
    """Returns partial restores after training went back: steps after `done` are made again, and count in every slot
    that is there."""

    def earlier(at: int | None) -> int | None:
        return None if at is None else min(at, done)

    lives = [[(slot, life, earlier(at)) for slot, life, at in one.lives] for one in partial_restores]
    return [msgspec.structs.replace(one, lives=its) for one, its in zip(partial_restores, lives, strict=True)]


@dataclass
class PartialRecovery:
    """Holds what the coordinator knows of partial recoveries: those that were, and the one under way.

    Attributes:
        wanted: it is what follows when more is lost than can be repaired.
        most: the portion of lost samples beyond which all go back to the checkpoint.
        partial_restores: all of this run.
        pending: slots that were lost since more was lost than can be repaired; a checkpoint is looked for.
        reason: why, for people.
        reading: slots that begin anew and do not serve yet.
        intact: slots that are not healthy and have all their records.
        dense: slots that have the dense snapshots that they should have.
        why: the reason of the last one.
    """

    wanted: bool = False
    most: float = 1.0
    partial_restores: list[PartialRestore] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    reason: str = ""
    reading: set[int] = field(default_factory=set)
    intact: set[int] = field(default_factory=set)
    dense: set[int] = field(default_factory=set)
    why: str = ""

    def on_lost(self, slots: Collection[int]) -> None:
        """Notes that the hosts of these slots are gone."""
        for known in (self.reading, self.intact, self.dense):
            known.difference_update(slots)

    def begin(self, lost: Collection[int], reason: str) -> None:
        """Notes slots that are lost beyond repair, perhaps with others that were lost before."""
        self.pending |= set(lost)
        self.reason = self.reason or reason

    def restore_partly(self, partial_restore: PartialRestore, survivors: Collection[int]) -> None:
        """Slots begin anew. `survivors`: those that keep their records, and lose parities by that."""
        self.partial_restores.append(partial_restore)
        slots = {slot for slot, _, _ in partial_restore.lives}
        self.pending, self.reason, self.why = set(), "", self.reason
        self.reading |= slots
        self.intact = (self.intact | set(survivors)) - slots
        self.dense -= slots

    def on_ready(self, slot: int, incarnation: int, at: int | None) -> None:
        """Notes that a slot serves."""
        if slot not in self.reading:
            return
        self.reading.discard(slot)
        self.intact.add(slot)
        self._go_on({(slot, incarnation)}, at)

    def on_rebuilt(self, slot: int) -> None:
        """Notes that nothing of a slot is missing any more."""
        self.intact.discard(slot)
        self.dense.add(slot)

    def go_on(self, at: int) -> None:
        """Notes where the slots that read a checkpoint will begin. `at`: steps of training.

        A life before the present one stays as it was: what was lost with it is lost, or it never went on.
        """
        present = {slot: life for one in self.partial_restores for slot, life, _ in one.lives}
        self._go_on({(slot, present[slot]) for slot in self.reading}, at)

    def _go_on(self, lives: Collection[tuple[int, int]], at: int | None) -> None:
        self.partial_restores = [
            msgspec.structs.replace(
                one, lives=[(s, life, at if (s, life) in lives else was) for s, life, was in one.lives]
            )
            for one in self.partial_restores
        ]

    def go_back(self, done: int) -> None:
        """Notes that training goes on after so many steps of it, which is earlier than it was."""
        self.partial_restores = trimmed(self.partial_restores, done)
        self.go_on(done)

    def begin_again(self, slots: int) -> None:
        """Has all slots, so many, begin with a checkpoint; nothing that was lost before counts."""
        self.pending, self.reading, self.intact, self.dense = set(), set(), set(), set(range(slots))
        self.reason = ""

    def follow(self, before: PartialRecovery, done: int) -> None:
        """Takes over from a cluster that went back to a checkpoint: what that lacks is lacking."""
        kept = [[(slot, 0, at) for slot, _, at in one.lives if at and at <= done] for one in before.partial_restores]
        self.partial_restores = [
            msgspec.structs.replace(one, lives=lives)
            for one, lives in zip(before.partial_restores, kept, strict=True)
            if lives
        ]

    def portion(self, slots: int, done: int) -> float:
        """Returns the portion of lost samples, of so many slots, after so many steps of training."""
        return portion(self.partial_restores, slots, done)

    def notes(self, done: int) -> list[tuple[int, str]]:
        """Returns since which steps of training records are not exact, and why: as a checkpoint after so many steps is
        to say it."""
        found = []
        for one in self.partial_restores:
            lives = [(slot, at) for slot, _, at in one.lives if at is not None and at <= done]
            slots = ", ".join(str(slot) for slot, _ in lives)
            what = f"lost slots took their records from checkpoint {one.folder}, of step {one.done}: {slots}"
            found += [(max(at for _, at in lives), what[:TEXT_MOST])] if lives else []
        return found

    @property
    def told(self) -> int:
        """The number of partial restores, the oldest, that somebody was told of: some slot goes on by a later one only
        once it goes on by those."""
        went_on = [i for i, one in enumerate(self.partial_restores) if any(at is not None for _, _, at in one.lives)]
        return went_on[-1] + 1 if went_on else 0

    @property
    def cause(self) -> str:
        """What was lost last, for people."""
        return self.why or "slots were lost beyond repair, as a coordinator before this one has found"

    @property
    def read_from(self) -> int:
        """Steps of training that the slots which read will have, at most."""
        reading = [one.done for one in self.partial_restores for slot, _, _ in one.lives if slot in self.reading]
        return max(reading, default=0)
