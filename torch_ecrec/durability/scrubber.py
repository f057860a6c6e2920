"""Looks for records and parities of one slot that are damaged: that do not fit their seals (`codec/seals.py`).

In the background it goes through all of them, round after round, some bytes at a time (`scrub`); and it looks at those
that are about to be relied on (`look`). What is damaged is named to the coordinator (table, row, member of the stripe),
counts as missing from then on, and is repaired as what is lost with a host is: from k others of its stripe, all as of
one vector of steps. Who needs it waits meanwhile.

A repair gives back what the record would be without the damage, as long as no step has made anything of it. So it is
kept in mind which records were used since they were last seen whole; of those the word says that a step may have used
them, the first that may (each is seen once in a round, so none before the last round began), and that the run may
differ from an undisturbed one from then on. With `Settings.record_checks` "use" records are
looked at whenever they are used, and no step ever uses what is damaged.

Where a stripe is damaged or lost in more than r members, or there is no protection, it says so, and the slot gives up.

Pure: no threads, no clock; who has one calls `scrub`.

Shapes: P records of a table group, U of them asked for, M of them damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from torch_ecrec.durability.context import SlotContext
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import PLACES_MOST, TEXT_MOST
from torch_ecrec.records.positions import Bytes, Positions, mark

log = logging.getLogger(__name__)

PADDING = "(no table)"  # what padding is called, for people, with its cell for a row
Place = tuple[str, int, int]  # table, its row (of a parity: the first row of the stripe), member of the stripe


class Scrubber:
    """Looks for damage in one life of a slot.

    Args:
        slot: whose records and parities they are.
        each_use: records are looked at whenever a step or an evaluation uses them.
        mend: brings damaged records or parities back, as `Durability.mend`.
        compare: compares parities with their stripes, as `Durability.compare`.

    Attributes:
        scrubbed_bytes: looked at in the background, all rounds together.
        rounds: how often it has been through all.
        damaged, mended: records and parities.
        mismatched: parities, of the damaged ones, that were not the code of their stripes.
        beyond: why the slot has given up; "": it has not.
    """

    def __init__(
        self,
        slot: SlotContext,
        each_use: bool,
        mend: Callable[[int, bool, Positions], str],
        compare: Callable[[int, int, int], None],
    ) -> None:
        self._slot, self._held, self._each_use = slot, slot.held, each_use
        self._mend, self._compare = mend, compare
        held = self._held
        self._kinds = [(table_group, parity) for table_group in range(len(held.shards)) for parity in (False, True)]
        self._kind = self._next = 0  # where the round is
        self._reads = False  # a disk reads what is next in the round
        self._used = [np.zeros(shard.data_rows if self._marks else 0, np.bool_) for shard in held.shards]
        self._used_from: tuple[int | None, int | None] = None, None  # the least that was applied at a use: in the round
        # before, and in this one
        self.scrubbed_bytes = self.rounds = self.damaged = self.mended = self.mismatched = 0
        self.beyond = ""

    @property
    def _sealed(self) -> bool:
        return self._held.shards[0].sealed

    @property
    def _marks(self) -> bool:
        """Whether it is kept in mind what was used."""
        return self._sealed and not self._each_use

    # looking ------------------------------------------------------------------------------------

    def on_use(self, positions: list[Positions], looked: bool) -> None:
        """Prepares for data records to be used by a step, or read as they are: looks at them, or keeps in mind that
        they were used.

        Args:
            positions: of each table group, (U,) int64.
            looked: whether to look at them in any case.
        """
        if not self._sealed:
            return
        for table_group, positions_U in enumerate(positions):
            if looked or self._each_use:
                self.look(table_group, False, positions_U)
            if self._marks:
                # what is whole now was whole whenever it was used before
                mark(self._used[table_group], positions_U, not looked)
        before, now = self._used_from
        applied = self._held.rule.applied
        self._used_from = before, applied if now is None else min(now, applied)

    def look(self, table_group: int, parity: bool, positions_U: Positions) -> None:
        """Checks these records (or parities), (U,) int64: those that are damaged become missing, and are repaired."""
        places_M = self._held.shards[table_group].broken(positions_U, parity)
        if len(places_M):
            self._on_found(table_group, parity, np.unique(positions_U[places_M]))

    def gather(self, table_group: int, parity: bool, positions_U: Positions, read: Any) -> Bytes:
        """Returns some records (or parities), (U, B) uint8 fresh, and looks at those that do not fit their seals.

        Args:
            table_group, parity, positions_U: which.
            read: see `Shard.gather_whole`.
        """
        records_UB, broken_M = self._held.shards[table_group].gather_whole(positions_U, parity, read)
        if len(broken_M):
            self.look(table_group, parity, positions_U[broken_M])
        return records_UB

    def came_whole(self, table_group: int, parity: bool) -> bool:
        """Returns whether all records (or parities) that came from a disk since this was asked last fit their seals.

        Those that did not are looked at: they become missing, and are repaired, unless the disk gives them now. Who was
        given them must ask again in both cases.
        """
        damaged_M = self._held.shards[table_group].take_damaged(parity)
        if len(damaged_M):
            self.look(table_group, parity, damaged_M)
        return not len(damaged_M)

    def scrub(self, most_bytes: int) -> int:
        """Looks at the next records or parities: so many bytes at most, but at least one.

        Returns:
            How many bytes it was.
        """
        if not self._sealed or not self._slot.ready or self._slot.dead or self.beyond or self._reads:
            return 0
        left = most_bytes
        for _ in range(len(self._kinds) + 1):  # each once, and the first one again from its beginning
            table_group, parity = self._kinds[self._kind]
            shard = self._held.shards[table_group]
            width, rows = shard.schema.nbytes, shard.parity_rows if parity else shard.data_rows
            end = min(rows, self._next + max(left // width, 1 if left == most_bytes else 0))
            end = self._look_at_run(table_group, parity, self._next, end, left)
            left -= (end - self._next) * width
            self._next = end
            if end < rows:
                break
            self._kind, self._next = (self._kind + 1) % len(self._kinds), 0
            if self._kind == 0:
                self.rounds += 1
                self._used_from = self._used_from[1], None
                break
        self.scrubbed_bytes += most_bytes - left
        return most_bytes - left

    def _look_at_run(self, table_group: int, parity: bool, first: int, end: int, most_bytes: int) -> int:
        """Looks at these, and has those read that are on a disk; returns how far, for so many bytes of the disk."""
        shard = self._held.shards[table_group]
        end, reading = shard.scan(first, end, most_bytes, parity)
        found_M = shard.broken_run(first, end, parity)
        if len(found_M):
            self._on_found(table_group, parity, found_M)
        if parity:
            self._compare(table_group, first, end)
        elif self._marks:
            unread_M = [] if reading is None else reading.positions_A
            used_M = self._used[table_group][unread_M]
            self._used[table_group][first:end] = False
            self._used[table_group][unread_M] = used_M
        if reading is not None:
            self._reads = True
            self._slot.read_tier(reading, partial(self._on_scanned, table_group, parity, reading), awaited=False)
        return end

    def _on_scanned(self, table_group: int, parity: bool, reading: Any) -> None:
        """Records (or parities) that are on a disk only were read."""
        self._reads = False
        if self._slot.dead:
            return
        whole_M, broken_M = self._held.shards[table_group].scanned(reading, parity)
        if self._marks and not parity:
            mark(self._used[table_group], whole_M, False)
        if len(broken_M):
            self.look(table_group, parity, broken_M)

    # what is found ------------------------------------------------------------------------------

    def _on_found(self, table_group: int, parity: bool, positions_M: Positions, what: str = "") -> None:
        """Handles records or parities, ascending, that do not fit their seals; of those that are missing anyway that
        says nothing.

        `what`: as the coordinator is told; "": a record or a parity.
        """
        there_M = self._held.missing.present(table_group, parity, positions_M)
        if there_M is not None:
            positions_M = positions_M[there_M]
        if not len(positions_M) or self.beyond:
            return
        self.damaged += len(positions_M)
        used = int(self._used[table_group][positions_M].sum()) if self._marks and not parity else 0
        reason = self._mend(table_group, parity, positions_M)
        self._say(table_group, parity, positions_M, used, reason, what)
        if reason:
            self._give_up(table_group, parity, positions_M, reason)

    def on_mended(self, count: int) -> None:
        """Counts what was damaged and is what it should be again."""
        self.mended += count
        self._slot.tell(messages.Mended(*self._slot.life, count))

    def on_mismatch(self, table_group: int, positions_M: Positions) -> None:
        """Has parities encoded again that are not the code of their stripes, whose records fit their seals."""
        before = self.damaged
        self._on_found(table_group, True, positions_M, "mismatch")
        self.mismatched += self.damaged - before

    def on_log(self, what: str) -> None:
        """Reports that a delta log is damaged, and what follows from that."""
        self._tell_damaged("delta log", what)

    def on_snapshot(self, step: int, trainer: int) -> None:
        """Reports that a trainer's part of a dense snapshot is damaged; it is not kept any more."""
        self._tell_damaged("dense snapshot", f"the part of trainer {trainer} of step {step}: other holders have it")

    def _tell_damaged(self, what: str, reason: str) -> None:
        log.warning("slot %d: damaged: %s: %s", self._held.index, what, reason)
        step = self._slot.trained(self._held.rule.applied)
        self._slot.tell(messages.Damaged(*self._slot.life, what, [], 1, 0, step, reason[:TEXT_MOST]))

    def on_beyond(self, table_group: int, parity: bool, positions_M: Positions) -> None:
        """Gives up the slot: nobody can give these back, which were damaged, or lost."""
        reason = "too much of their stripes is damaged or lost"
        if not self.beyond:
            self._say(table_group, parity, positions_M, 0, reason)
            self._give_up(table_group, parity, positions_M, reason)

    def _give_up(self, table_group: int, parity: bool, positions_M: Positions, reason: str) -> None:
        table, row, _ = self.places(table_group, parity, positions_M[:1])[0]
        first = f"{len(positions_M)} damaged or lost, first row {row} of table {table}"
        self.beyond = f"{'parities' if parity else 'records'} of slot {self._held.index}: {first}: {reason}"[:TEXT_MOST]
        self.tell_beyond()

    def tell_beyond(self) -> None:
        """Says that the slot has given up, if it has."""
        if self.beyond:
            self._slot.tell(messages.Unrecoverable(*self._slot.life, self.beyond))

    def _say(
        self, table_group: int, parity: bool, positions_M: Positions, used: int, reason: str, what: str = ""
    ) -> None:
        what, index = what or ("parity" if parity else "record"), self._held.index
        applied = self._held.rule.applied
        step = self._slot.trained(
            min(one for one in (applied, *self._used_from) if one is not None) if used else applied
        )
        places = self.places(table_group, parity, positions_M[:PLACES_MOST])
        many, table, row, member = len(positions_M), *places[0]
        more = f"; {used} of them were used since they were last seen whole" if used else ""
        first = f"first member {member} of the stripe of row {row} of table {table}"
        log.warning("slot %d, step %d: damaged: %d (%s), %s%s", index, step, many, what, first, more)
        self._slot.tell(messages.Damaged(*self._slot.life, what, places, many, used, step, reason[:TEXT_MOST]))

    def places(self, table_group: int, parity: bool, positions_U: Positions) -> list[Place]:
        """Returns the names of some records or parities, (U,) int64, for people."""
        held, spec = self._held, self._held.job.table_groups[table_group]
        layout = held.layouts[table_group]
        rows_U, members_U = np.full(len(positions_U), -1), np.empty(len(positions_U), np.int64)
        cells_U = np.empty(len(positions_U), np.int64)
        for group in layout.group(held.index, parity, positions_U):
            members_U[group.where] = group.member
            cells = (group.rotations * layout.slots + group.base) * layout.k
            cells_U[group.where] = cells + (0 if parity else group.member)
            for member in range(layout.k) if parity else (group.member,):  # of a parity: the first row of its stripe
                exists = layout.exists(group.base, member, group.rotations) & (rows_U[group.where] < 0)
                rows_U[group.where[exists]] = layout.rows_of(group.base, member, group.rotations[exists])
        tables_U = np.searchsorted(np.array(spec.first_rows), rows_U, side="right") - 1
        return [
            (spec.tables[table].name[:TEXT_MOST], row - spec.first_rows[table], member)
            if row >= 0
            else (PADDING, cell, member)
            for table, row, member, cell in zip(
                tables_U.tolist(), rows_U.tolist(), members_U.tolist(), cells_U.tolist(), strict=True
            )
        ]
