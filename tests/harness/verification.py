"""The contract, checked on the slots of a cluster in this process: parities, acknowledgements, snapshots, bounds.

I1 to I7 are the invariants of docs/protocol.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from harness.scenario import Scenario
from torch_ecrec.client.client import Client
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol.messages import SlotPlace
from torch_ecrec.server.checkpoints import PINNED_STEPS
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.settings import Settings

WINDOW = Settings().window_steps
BOUNDS = {  # in steps: what a slot or a trainer keeps at most
    "open steps": WINDOW,
    "kept pushes": WINDOW,
    "early folds": 2 * WINDOW,
    "log": 4 * WINDOW,
    "fold log": 4 * WINDOW,
    "snapshots": 4 * WINDOW,
}


def load_end_of(clients: Iterable[Client]) -> int:
    """The step that training began after, as far as it is known."""
    return max((client.load_end or 0 for client in clients), default=0)


class Verifier:
    """Looks at a simulated cluster while it runs, from outside all of its processes.

    Args:
        scenario: what runs.
        longest: written: of each thing in `BOUNDS`, the most steps it was kept for.
    """

    def __init__(self, scenario: Scenario, longest: dict[str, int]) -> None:
        self._scenario, self.longest = scenario, longest
        self.acknowledged: dict[tuple[int, int], int] = {}  # (era, slot) -> the most that any life of it acknowledged
        self._clients: Sequence[Client] = ()
        self._placed: Sequence[SlotPlace] = ()

    def check(self, slots: Sequence[Slot], clients: Sequence[Client], placed: Sequence[SlotPlace]) -> None:
        """Checks what must hold at every moment.

        Args:
            slots: the live incarnation of every slot that there is.
            clients: of the trainers that live.
            placed: all slots, as the coordinator knows them.

        Raises:
            AssertionError: something does not hold.
        """
        self._clients, self._placed = clients, placed
        ready = {slot.index: slot for slot in slots if slot.ready}
        for slot in ready.values():
            self._check_acknowledged(slot, ready)
        check_parities_as_of(ready)
        self._check_snapshots(ready)
        self._check_bounds(ready)

    def _check_acknowledged(self, slot: Slot, slots: dict[int, Slot]) -> None:
        rule, index, key = slot.rule, slot.index, (slot.host.era, slot.index)
        if slot.host.frozen:
            return
        before = self.acknowledged.get(key, 0)
        assert rule.acknowledged >= before, (
            f"slot {index} acknowledged {before}, its incarnation {slot.incarnation} knows {rule.acknowledged}"
        )
        self.acknowledged[key] = rule.acknowledged
        for holder in rule.holders:
            if knows(slot, other := slots.get(holder)) and knows(other, slot) and index in other.rule.folded:
                folded = other.rule.folded[index]
                assert rule.confirmed[holder] <= folded, (
                    f"slot {index} counts step {rule.confirmed[holder]} as folded by {holder}, which folded {folded}"
                )
                assert rule.acknowledged <= folded or not self._placed[holder].healthy, (
                    f"slot {index} acknowledged {rule.acknowledged}, but {holder}, which is whole, has folded {folded}"
                )

    def _check_snapshots(self, slots: dict[int, Slot]) -> None:
        """Of the last step that every trainer calls complete, each holder that is whole has the dense snapshot."""
        clients = self._clients if self._scenario.snapshot_every else ()
        step = min((client.resumable for client in clients), default=0)
        in_training = all(client.load_end is not None and client.is_trained(step) for client in clients)
        for holder in range(self._scenario.code.parities + 1) if clients and in_training else ():
            if holder in slots and self._placed[holder].healthy:
                for trainer in range(self._scenario.trainers):
                    assert (step, trainer) in slots[holder].snapshots.parts, (
                        f"slot {holder} lacks the snapshot of trainer {trainer} of step {step}, which is complete"
                    )

    def _check_bounds(self, slots: dict[int, Slot]) -> None:
        longest = self.longest
        for slot in slots.values():
            for what, steps in steps_kept(slot).items():
                longest[what] = max(longest.get(what, 0), steps)
        for client in self._clients:
            longest["open steps"] = max(longest.get("open steps", 0), len(client.open))
        # logs reach back to the last snapshot: they hold what is loaded since the first step of training
        overwrites = [load for after, _, load in self._scenario.overwrites if after > 0]
        more = max(0, self._scenario.snapshot_every - 1) + len(overwrites)
        more += PINNED_STEPS if self._scenario.checkpoint.url else 0
        beyond = {what: steps for what, steps in longest.items() if steps > BOUNDS[what] + more}
        assert not beyond, f"kept for more steps than {BOUNDS}: {beyond}"


def knows(slot: Slot | None, other: Slot | None) -> TypeGuard[Slot]:
    """Whether both are there, neither has gone back before the other, and `slot` knows the present life of `other`."""
    if slot is None or other is None or slot.host.history != other.host.history:
        return False
    return slot.rule.incarnations[other.index] == other.incarnation


def steps_kept(slot: Slot) -> dict[str, int]:
    """For how many steps a slot keeps each thing that `BOUNDS` limits."""
    kept = slot.durability.kept()
    return {
        "log": slot.log.last - slot.log.floor,
        "kept pushes": len(slot.inbox),
        "snapshots": len(slot.snapshots.found()),
        "fold log": kept.steps,
        "early folds": kept.early,
    }


@dataclass(frozen=True, eq=False)
class Member:
    """The data records of one slot that are in the stripes of some parities, all of these of one base.

    Args:
        slot: where the records are.
        positions_M: (M,) int64, their positions there.
        parities_M: (M,) int64, the position of each one's parity, on the slot that holds that.
        coefficient: which of the code's the records are folded with: parity and member.
    """

    slot: int
    positions_M: np.ndarray
    parities_M: np.ndarray
    coefficient: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Stripes:
    """Parities of one slot whose stripes have the same base: their positions (G,), and the members of the stripes."""

    parities_G: np.ndarray
    members: tuple[Member, ...]


@functools.lru_cache(maxsize=4096)
def stripes_of(layout: Layout, holder: int) -> tuple[Stripes, ...]:
    """Returns the stripes that a slot holds parity of, by base. It is cached: many runs have few layouts."""
    found = []
    for group in layout.group(holder, True, np.arange(layout.parity_rows(holder), dtype=np.int64)):
        members = []
        for member in range(layout.k):
            exists_G = layout.exists(group.base, member, group.rotations)
            positions_M = layout.position(group.base, member, group.rotations)[exists_G]
            slot, coefficient = int(layout.member_slot[group.base, member]), (group.member - layout.k, member)
            members.append(Member(slot, positions_M, group.where[exists_G], coefficient))
        found.append(Stripes(group.where, tuple(members)))
    return tuple(found)


def parity_of(holder: Slot, table_group: int, records: Sequence[tuple[Member, np.ndarray]]) -> np.ndarray:
    """(P, B) what the parities of a slot should be, where (M, B) are the records of each of these members."""
    shard, code = holder.shards[table_group], holder.code
    expected_PB = np.zeros((shard.parity_rows, shard.schema.nbytes), dtype=np.uint8)
    if records:
        where = np.concatenate([member.parities_M for member, _ in records])
        factors = [code.coefficients[member.coefficient] for member, _ in records]
        factors_U = np.repeat(factors, [len(records_MB) for _, records_MB in records])
        code.fold_(expected_PB, where, np.concatenate([records_MB for _, records_MB in records]), factors_U)
    return expected_PB


class _DataRecords:
    """The data records of slots, each read once, however many parities it is in."""

    def __init__(self) -> None:
        self._as_of: dict[tuple[int, int, int], np.ndarray] = {}

    def as_of(self, slot: Slot, table_group: int, step: int) -> np.ndarray:
        """(P, B) all of a slot, as they were after a step."""
        key = slot.index, table_group, step
        if key not in self._as_of:
            every = np.arange(slot.shards[table_group].data_rows, dtype=np.int64)
            self._as_of[key] = slot.held.records_as_of(table_group, every, step)
        return self._as_of[key]


def check_parities_as_of(slots: dict[int, Slot]) -> None:
    """I2 at any moment: a parity is the code of its stripe's records as of what its holder has folded of each.

    Looks at the stripes of which nothing is missing and all members know each other's present incarnation.

    Args:
        slots: all that are ready, by index.
    """
    data = _DataRecords()
    for holder in slots.values():
        steps: dict[int, int | None] = {}  # of each source that was looked at; None: it cannot be looked at now
        for table_group, shard in enumerate(holder.shards):
            judged_P, there_P = (np.full(shard.parity_rows, value) for value in (False, True))
            records = []
            for stripes in stripes_of(holder.layouts[table_group], holder.index):
                found = []
                for member in stripes.members:
                    if member.slot not in steps:
                        steps[member.slot] = _step_of(holder, slots.get(member.slot))
                    step = steps[member.slot]
                    if step is None:
                        break
                    source = slots[member.slot]
                    present_M = source.missing.present(table_group, False, member.positions_M)
                    if present_M is not None:
                        there_P[member.parities_M] &= present_M
                    found.append((member, data.as_of(source, table_group, step)[member.positions_M]))
                else:
                    judged_P[stripes.parities_G] = True
                    records += found
            judged = np.flatnonzero(judged_P)
            if not len(judged):
                continue
            present = holder.missing.present(table_group, True, judged)
            here = there_P[judged] if present is None else there_P[judged] & present
            expected = parity_of(holder, table_group, records)[judged]
            wrong = judged[(expected != shard.gather(judged, parity=True)).any(axis=1) & here]
            assert not len(wrong), (
                f"a parity in table group {table_group} on slot {holder.index} is not the code of its stripe as of"
                f" {holder.rule.folded}; positions: {wrong}"
            )


def _step_of(holder: Slot, source: Slot | None) -> int | None:
    """Returns the step of a slot that a holder of its parity has folded, if its records as of then can be looked at."""
    if not (knows(source, holder) and knows(holder, source)) or source.index not in holder.rule.folded:
        return None
    step, applied = holder.rule.folded[source.index], source.rule.applied
    if step > applied and holder.host.frozen:
        return None  # the source went back in an era before, in which this holder was not told where to
    assert step <= applied, f"slot {holder.index} has folded step {step} of {source.index}, not applied"
    return step if step >= min(source.log.floor, applied) else None


def check_parity(slots: Sequence[Slot]) -> None:
    """I1: every parity is the code of its stripe's records; raises AssertionError that names the first that is not."""
    for s, shard in enumerate(slots[0].shards):
        layout, code = slots[0].layouts[s], slots[0].code
        width = shard.schema.nbytes
        stripes = np.arange(layout.stripes, dtype=np.int64)
        base, rotation = stripes % layout.slots, stripes // layout.slots
        data = np.zeros((code.k, layout.stripes, width), dtype=np.uint8)
        for member in range(code.k):
            for stripe in np.flatnonzero(stripes * code.k + member < layout.cells):
                holder = slots[int(layout.member_slot[base[stripe], member])]
                position = layout.first_position(int(base[stripe]), member) + rotation[stripe]
                data[member, stripe] = holder.shards[s].gather(np.array([position]))[0]
        parity = code.encode(data)
        for j in range(code.n - code.k):
            for stripe in stripes:
                holder = slots[int(layout.member_slot[base[stripe], code.k + j])]
                position = layout.first_position(int(base[stripe]), code.k + j) + rotation[stripe]
                here = holder.shards[s].gather(np.array([position]), parity=True)[0]
                assert np.array_equal(here, parity[j, stripe]), (
                    f"parity {j} of stripe {stripe} in table group {s}, on slot {holder.index}, is not the code"
                    " of its stripe"
                )
