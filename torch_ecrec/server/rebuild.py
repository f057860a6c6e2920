"""Repair of a lost slot on its new host: on first touch, and the rest in the background.

Owns which records and parities are missing. A `_Repair` is one attempt for records whose stripes share a base: ask the
parities that will be read what they stand for, read k members as of one version vector, decode, roll forward by the own
logs, install what is still missing (`recovery.py` has the rules). An attempt that is refused (a log no longer reaches
back, a member is not rebuilt itself) is planned anew after a pause; installing is idempotent.

Nobody waits for a lock and nothing is frozen: members undo newer steps for the reader.

Shape legend: U records, B record bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_ecrec import recovery
from torch_ecrec.layout import StripeGroup
from torch_ecrec.transport import wire
from torch_ecrec.transport.node import RETRY_S
from torch_ecrec.transport.wire import Answer

if TYPE_CHECKING:
    from torch_ecrec.server.slot import Slot


class Rebuild:
    """What is missing of a slot, and its repair.

    Args:
        slot: the slot.
        whole: true if nothing is missing (a slot at the start of a job).
    """

    def __init__(self, slot: Slot, whole: bool) -> None:
        self.slot = slot
        self.stopped = False
        self.reported = whole
        self.snapshots_missing = 0
        # (slab, parity) -> per position; both only lose entries while the slot lives
        self.missing: dict[tuple[int, bool], np.ndarray] = {}
        self.asked: dict[tuple[int, bool], np.ndarray] = {}
        self.total = self.remaining = 0
        if not whole:
            for slab, shard in enumerate(slot.shards):
                for parity, count in ((False, len(shard.records)), (True, len(shard.parity))):
                    self.missing[slab, parity] = np.ones(count, dtype=bool)
                    self.asked[slab, parity] = np.zeros(count, dtype=bool)
                    self.total += count
            self.remaining = self.total
        self.portions = self._portions()

    @property
    def whole(self) -> bool:
        return self.remaining == 0 and self.slot.ready

    @property
    def done_fraction(self) -> float:
        return 1.0 if self.total == 0 else 1.0 - self.remaining / self.total

    def stop(self) -> None:
        self.stopped = True

    # what is there ------------------------------------------------------------------------------

    def lacks(self, slab: int, parity: bool, positions: np.ndarray) -> bool:
        return self.remaining > 0 and bool(self.missing[slab, parity][positions].any())

    def parity_present(self, slab: int, positions: np.ndarray) -> np.ndarray | None:
        """(U,) bool, or None if all are."""
        return None if self.remaining == 0 else ~self.missing[slab, True][positions]

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        """Whether any of these data records (per slab) is missing; if so, their repair starts now."""
        if self.remaining == 0:
            return False
        missing = False
        for slab, positions_U in enumerate(positions):
            gone = positions_U[self.missing[slab, False][positions_U]]
            if len(gone):
                missing = True
                self.repair(slab, False, np.unique(gone))
        return missing

    # repair -------------------------------------------------------------------------------------

    def repair(self, slab: int, parity: bool, positions: np.ndarray) -> list[_Repair]:
        """Starts the repair of those that nobody repairs yet."""
        asked = self.asked[slab, parity]
        positions = np.ascontiguousarray(positions[~asked[positions]])
        asked[positions] = True
        layout = self.slot.layouts[slab]
        return [
            _Repair(self, slab, parity, positions[group.where])
            for group in layout.group(self.slot.index, parity, positions)
        ]

    def start(self) -> None:
        """The slot is ready: copies the dense snapshots of other holders and starts the background rebuild."""
        slot = self.slot
        others = [h for h in slot.host.snapshot_slots if h != slot.index]
        if slot.index in slot.host.snapshot_slots and others:
            self.snapshots_missing = 1
            self._copy_snapshots(others, 0)
        self._next_portion()

    def _copy_snapshots(self, others: list[int], turn: int) -> None:
        """Asks the other holders in turn: one of them is whole as long as at most r are lost."""
        if self.stopped:
            return
        holder = others[turn % len(others)]

        def done(answer: Answer | None) -> None:
            if self.stopped:
                return
            if not isinstance(answer, wire.Snapshots):
                self.slot.host.later(RETRY_S, lambda: self._copy_snapshots(others, turn + 1))
                return
            for step, trainer, header, payload in zip(
                answer.steps, answer.trainers, answer.headers, answer.payloads, strict=True
            ):
                self.slot.snapshots.setdefault((step, trainer), (header, payload))
            self.snapshots_missing = 0
            self.check_done()

        self.slot.host.ask_once(holder, lambda i: wire.FetchSnapshots(holder, i), done)

    def _portions(self) -> Iterator[tuple[int, bool, np.ndarray]]:
        """Everything that is missing, in portions whose records share a rank, so a base."""
        chunk = self.slot.settings.rebuild_chunk_bytes
        for slab, parity in self.missing:
            layout, width = self.slot.layouts[slab], 4 * self.slot.job.slabs[slab].width
            firsts = (layout.parity_first if parity else layout.data_first)[self.slot.index].tolist()
            for begin, behind in itertools.pairwise(firsts):
                for first, end in recovery.portions(behind - begin, width, chunk):
                    yield slab, parity, np.arange(begin + first, begin + end, dtype=np.int64)

    def _next_portion(self) -> None:
        if self.stopped:
            return
        for slab, parity, positions in self.portions:
            todo = positions[self.missing[slab, parity][positions]]
            repairs = self.repair(slab, parity, todo)
            if repairs:
                (repair,) = repairs
                repair.then = self._pace(repair)
                return
        self.check_done()

    def _pace(self, repair: _Repair) -> Callable[[], None]:
        """Continues after a portion no faster than the limit allows."""
        rate = self.slot.settings.rebuild_bytes_per_s
        pause_s = repair.price_bytes / rate if rate else 0.0
        return lambda: self.slot.host.later(pause_s, self._next_portion)

    def install(self, slab: int, parity: bool, positions: np.ndarray, values_UB: np.ndarray) -> None:
        """Puts repaired records in place, those that are still missing."""
        missing = self.missing[slab, parity]
        still = missing[positions]
        self.slot.shards[slab].scatter_(positions[still], values_UB[still], parity=parity)
        missing[positions] = False
        self.asked[slab, parity][positions] = False
        self.remaining -= int(still.sum())
        self.slot.progress()
        self.check_done()

    def check_done(self) -> None:
        """Rebuilt: nothing missing, and caught up with all that the sources have acknowledged (rule 5)."""
        if self.reported or self.stopped or not self.whole or self.snapshots_missing:
            return
        rule = self.slot.rule
        if all(rule.is_caught_up(source) for source in rule.sources):
            self.reported = True
            self.slot.host.tell({"type": "rebuilt", "slot": self.slot.index, "incarnation": self.slot.incarnation})


class _Repair:
    """The repair of some records of one slab that share a rank; tries until they are installed or the slot is gone."""

    def __init__(self, rebuild: Rebuild, slab: int, parity: bool, positions: np.ndarray) -> None:
        self.rebuild, self.slot, self.slab, self.parity = rebuild, rebuild.slot, slab, parity
        self.positions = np.ascontiguousarray(positions)
        self.layout = self.slot.layouts[slab]
        self.group: StripeGroup = self.layout.group(self.slot.index, parity, self.positions)[0]
        self.price_bytes = 0
        self.failures = 0
        self.attempt = 0
        self.then: Callable[[], None] | None = None
        self.begin()

    def begin(self) -> None:
        if self.rebuild.stopped:
            return
        self.attempt += 1
        slot, host = self.slot, self.slot.host
        self.plan = recovery.plan_repair(self.layout, self.group.base, self.group.member, host.unhealthy_slots())
        self.price_bytes = self.plan.read_bytes(len(self.positions), 4 * slot.job.slabs[self.slab].width)
        self.folded: dict[int, wire.VersionsAre] = {}
        self.records: dict[int, wire.Records] = {}
        if not self.plan.parities:
            self._fetch()
        for holder in self.plan.parities:
            host.ask_once(holder, partial(wire.Versions, holder), self._unless_over(partial(self._on_versions, holder)))

    def _unless_over(self, then: Callable[[Any], None]) -> Callable[[Answer | None], None]:
        """An answer counts only for the attempt that asked for it; a refusal ends the attempt."""
        attempt = self.attempt

        def done(answer: Answer | None) -> None:
            if attempt != self.attempt or self.rebuild.stopped:
                return
            if answer is None:
                self._again()
            else:
                then(answer)

        return done

    def _on_versions(self, holder: int, answer: wire.VersionsAre) -> None:
        self.folded[holder] = answer
        if len(self.folded) == len(self.plan.parities):
            self._fetch()

    def _on_records(self, member: int, answer: wire.Records) -> None:
        self.records[member] = answer
        if len(self.records) == len(self.plan.reads):
            self._install()

    def _again(self) -> None:
        """What it read did not fit together or was not there: a new attempt, a little later."""
        self.attempt += 1
        self.failures += 1
        self.slot.host.later(min(RETRY_S * self.failures, 0.5), self.begin)

    def _fetch(self) -> None:
        known = [answer.folded for answer in self.folded.values()]
        if self.parity:
            known.append(dict(self.slot.rule.folded))
        vector = recovery.version_vector(self.plan, known)
        if vector is None:
            self._again()
            return
        self.vector = vector
        base, rotations = self.group.base, self.group.rotations
        for member in self.plan.reads:
            holder = int(self.layout.member_slot[base, member])
            exists = self.layout.exists(base, member, rotations)
            positions = self.layout.position(base, member, rotations)[exists]
            done = self._unless_over(partial(self._on_records, member))
            if len(positions):
                parity, at = member >= self.layout.k, torch.from_numpy(positions)
                make = partial(self._fetch_of, holder, parity=parity, positions=at)
                self.slot.host.ask_once(holder, make, done)
            else:
                done(wire.Records(torch.empty((0, 4 * self.slot.job.slabs[self.slab].width), dtype=torch.uint8)))

    def _fetch_of(self, holder: int, incarnation: int, parity: bool, positions: torch.Tensor) -> wire.Request:
        return wire.Fetch(holder, incarnation, self.slab, parity, positions, self.vector)

    def _install(self) -> None:
        slot, base, rotations = self.slot, self.group.base, self.group.rotations
        width = 4 * slot.job.slabs[self.slab].width
        values = []
        for member in self.plan.reads:
            exists = self.layout.exists(base, member, rotations)
            records_UB = np.zeros((len(rotations), width), dtype=np.uint8)  # members that do not exist are zero
            records_UB[exists] = self.records[member].records.numpy()
            values.append(records_UB)
        record_UB = slot.code.decode(list(self.plan.reads), values, self.group.member)
        if not self._roll_forward_(record_UB):
            self._again()
            return
        self.attempt += 1  # nothing that still arrives counts
        self.rebuild.install(self.slab, self.parity, self.positions, record_UB)
        if self.then is not None:
            self.then()

    def _roll_forward_(self, record_UB: np.ndarray) -> bool:
        """From the steps it was read as of to where this slot stands, by its own logs; false if they do not reach."""
        slot = self.slot
        if self.parity:
            return slot.protection.move_parity_(record_UB, self.slab, self.group, self.vector)
        step = self.vector[slot.index]
        if step > slot.rule.applied or (step < slot.log.floor and step != slot.rule.applied):
            return False
        # only steps up to the cut can have changed a record that is still missing
        change = slot.log.changes(self.slab, self.positions, step, slot.rule.applied)
        if change is not None:
            still = self.rebuild.missing[self.slab, False][self.positions]
            change[~still] = 0
            np.bitwise_xor(record_UB, change, out=record_UB)
        return True
