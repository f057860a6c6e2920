"""How a slot is copied to this server, and goes on here: the side that takes (`exporting.py` has the words).

One `SlotImport` for each slot that the coordinator moves here. It reads everything once, in portions, then again what
has changed, until that is little; then it says "level". Told to, it lets the slot stop there, takes the rest, copies
the dense snapshots and says "arrived". The next placement says whether the slot is here from now on; any other
placement, or an era, and what was copied goes.

Shapes: U records, B record bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from torch_ecrec.durability.context import Pending
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.durability.throttle import Throttle
from torch_ecrec.layout import repair
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.pieces import Gathering, Key, Part
from torch_ecrec.records.positions import Positions
from torch_ecrec.server.process import ServerProcess
from torch_ecrec.spec.settings import Settings

logger = logging.getLogger(__name__)

PORTIONS_AT_ONCE = 2  # so that both sides work at the same time
LITTLE_BYTES = 1 << 20  # of records that have changed: the rest is had at once
TURNS_MOST = 8  # after which it is had at once in any case: what changes, changes as fast as it is copied


class SlotImport:
    """A slot on its way here.

    Args:
        host: the process.
        held: what the slot's next life will have; nothing is in it yet.
        word: the coordinator's.
        settings: of the process; its limit of moves counts for the first time that all is read, and half of what links
            carry (`durability/throttle.py`) until a turn has more than half as much as the one before it.
    """

    def __init__(self, host: ServerProcess, held: Holdings, word: messages.Move, settings: Settings) -> None:
        self.host, self.held, self.word, self.settings = host, held, word, settings
        self.handed: wire.Handed | None = None
        self.snapshots: dict[Key, Part] = {}
        self.arrived = self.level = False
        self._turn = 0
        self._portions: deque[tuple[int, bool, Positions]] = deque()
        self._under_way: list[Pending] = []
        self._throttle = Throttle(settings.move_bytes_per_s, settings.rebuild_chunk_bytes, reads=1)
        self._copying = 0
        self._pausing = self._over = self._handing = False
        self._unpaid_bytes = self._last_bytes = 0  # read since the last pause; in this turn
        self._limited = bool(self._throttle.limit)  # in this turn
        logger.info("slot %d: is copied here, while it goes on where it is", word.slot)
        self._next_turn()

    def cancel(self) -> None:
        """Ends the import: nothing of it counts any more."""
        self._over = True
        for pending in self._under_way:
            pending.cancel()

    def on_word(self, word: messages.Move) -> None:
        """Handles the coordinator's order to copy the slot, which it may repeat."""
        if self.arrived:
            self._tell(messages.Arrived)
        elif self.level and not word.now:
            self._tell(messages.Level)
        elif self.level and word.now and not self._handing:
            self._handing = True
            self._ask(lambda life: wire.HandOver(self.word.slot, life, epoch=self.word.epoch), self._on_handed)

    def _tell(self, kind: type[messages.Level | messages.Arrived]) -> None:
        word = self.word
        self.host.tell(kind(word.slot, word.incarnation, word.epoch, word.era))

    def _ask(self, make: Callable[[int], wire.Request[Any]], done: Callable[[Any], None]) -> None:
        asked: list[Pending] = []

        def answered(answer: wire.Answer) -> None:
            for pending in asked:
                self._under_way.remove(pending)  # all of them together hold as much as the slot has positions
            if not self._over:
                done(answer)

        asked.append(self.host.ask(self.word.slot, make, answered, bound_to=self.word.incarnation - 1))
        self._under_way += asked

    # copies -------------------------------------------------------------------------------------

    def _next_turn(self) -> None:
        turn, word = self._turn, self.word
        self._ask(lambda life: wire.FetchChanged(word.slot, life, epoch=word.epoch, turn=turn), self._on_changed)

    def _on_changed(self, answer: wire.Changed) -> None:
        changed = {False: answer.data, True: answer.parities}
        if self._turn == 0:
            self._portions = deque(self._all())
        else:
            some = (
                (table_group, parity, at.numpy())
                for parity, found in changed.items()
                for table_group, at in enumerate(found)
            )
            self._portions = deque(self._cut(some))
        shards, before = self.held.shards, self._last_bytes
        self._last_bytes = sum(len(at) * shards[table_group].schema.nbytes for table_group, _, at in self._portions)
        self._turn += 1
        if self._turn > 2 and self._last_bytes > before / 2:  # (the first turn has all, changed or not)
            self._limited = False  # what changes must not outrun it
        self._next_portions()

    def _all(self) -> Iterator[tuple[int, bool, Positions]]:
        for table_group, shard in enumerate(self.held.shards):
            for parity, rows in ((False, shard.data_rows), (True, shard.parity_rows)):
                for first, end in repair.portions(rows, shard.schema.nbytes, self.settings.rebuild_chunk_bytes):
                    yield table_group, parity, np.arange(first, end)

    def _cut(self, some: Iterable[tuple[int, bool, Positions]]) -> Iterator[tuple[int, bool, Positions]]:
        for table_group, parity, positions_U in some:
            nbytes = self.held.shards[table_group].schema.nbytes
            for first, end in repair.portions(len(positions_U), nbytes, self.settings.rebuild_chunk_bytes):
                yield table_group, parity, positions_U[first:end]

    def _next_portions(self) -> None:
        """As many as may be under way, no faster than they may; then the next turn, or the end of turns."""
        throttle, limited = self._throttle, self._limited
        at_once = PORTIONS_AT_ONCE if throttle.knows or not limited else 1
        while self._portions and not self._pausing and self._copying < at_once:
            table_group, parity, positions_U = self._portions.popleft()
            most = throttle.most_records(self.held.shards[table_group].schema.nbytes, self.host.now_s())
            if len(positions_U) > most:
                self._portions.appendleft((table_group, parity, positions_U[most:]))
                positions_U = positions_U[:most]
            self._copy(table_group, parity, positions_U)
            if limited:
                self._pausing = True
                pause_s = throttle.pause_s(self._unpaid_bytes, within_limit=self._turn == 1)
                self.host.later(pause_s, self._after_pause)
                self._unpaid_bytes = 0
        if self._portions or self._copying or self._pausing:
            return
        if self._turn > TURNS_MOST or (self._turn > 1 and self._last_bytes <= LITTLE_BYTES):
            self.level = True
            self._tell(messages.Level)
        else:
            self._next_turn()

    def _after_pause(self) -> None:
        self._pausing = False
        if not self._over:
            self._next_portions()

    def _copy(self, table_group: int, parity: bool, positions_U: Positions) -> None:
        shard, word = self.held.shards[table_group], self.word
        count = len(positions_U) * shard.schema.nbytes
        self._copying += 1
        self._unpaid_bytes += count
        asked = self._throttle.ask(count, self.host.now_s())

        def make(life: int) -> wire.Copy:
            at = torch.from_numpy(positions_U)
            return wire.Copy(word.slot, life, epoch=word.epoch, table_group=table_group, parity=parity, positions=at)

        def done(answer: wire.Records) -> None:
            self._throttle.arrive(asked, count, self.host.now_s())
            shard.scatter_(positions_U, answer.records.numpy(), parity)
            self._copying -= 1
            self._next_portions()

        self._ask(make, done)
        if self._turn == 1:  # a run, while its records are on their way
            first, end = int(positions_U[0]), int(positions_U[-1]) + 1
            self.host.emit(partial(shard.merge_pages, first, end, parity))

    # the rest -----------------------------------------------------------------------------------

    def _on_handed(self, answer: wire.Handed) -> None:
        self.handed = answer
        kinds = ((False, answer.data, answer.data_records), (True, answer.parities, answer.parity_records))
        for parity, positions, records in kinds:
            for shard, positions_U, records_UB in zip(self.held.shards, positions, records, strict=True):
                shard.scatter_(positions_U.numpy(), records_UB.numpy(), parity)
        self._gather(Gathering(-1))

    def _gather(self, got: Gathering) -> None:
        """Copies the dense snapshots that the slot kept; it has stopped, so they do not change."""

        def make(life: int) -> wire.FetchSnapshots:
            return wire.FetchSnapshots(self.word.slot, life, of=-1, begin=got.begin(life))

        def done(answer: wire.Snapshots) -> None:
            try:
                all_here = got.take(answer)
            except ValueError:  # no answer to what was asked: from the beginning
                self._gather(Gathering(-1))
                return
            if all_here:
                self.snapshots, self.arrived = got.parts, True
                logger.info("slot %d: all of it is here, after %d turns", self.word.slot, self._turn)
                self._tell(messages.Arrived)
            else:
                self._gather(got)

        self._ask(make, done)

    def settle(self) -> Holdings:
        """Returns what the slot's next incarnation has, at the step where the one before has stopped: it is here from
        now on."""
        handed, held = self.handed, self.held
        assert handed is not None and self.arrived
        held.take_over(handed, handed.floors[0])
        return held
