"""A slot begins with its records of a checkpoint: since the whole cluster does, or since it was lost beyond repair.

Where all begin, they do so at step 0 of the protocol. One that was lost goes on at the step where the others are.

    reading    the host's reader gives its records, in any order: those of the checkpoint; or, of rows that prioritised
               saves on it have, of the newest. Which saves, is known once it is known where the slot goes on: those of
               steps that nobody goes back to before of. So with saves it reads then, else at once
    waiting    all are there; servers have stopped (`Host.frozen`), and it is not known yet where they go on
    ready      applied = that step; its log says that nothing has changed since `floor`, so that it can show itself as
               of each step from there on, and go back to it; its parities are encoded anew from what the others hold

What was trained between the checkpoint and the step of the others is lost in a lost slot's records, and nowhere else.

A store that cannot be read now is asked again where the whole cluster waits for it. A slot that was lost says that it
cannot begin, and all go back to a checkpoint.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from torch_ecrec.durability.context import Pending, SlotContext
from torch_ecrec.protocol.bounds import REASON_MOST
from torch_ecrec.protocol.messages import PartialRestore
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.server.process import ServerProcess

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # before a store that could not be read is asked again


class SlotRestore:
    """How one life of a slot begins with records of a checkpoint.

    Attributes:
        at: steps of training after which it went on; None: it does not yet.
        failed: why it never will, "" if it may.
    """

    def __init__(self, slot: SlotContext, host: ServerProcess, partial_restore: PartialRestore) -> None:
        self._patient = host.placement is not None and host.placement.restoring
        self._slot, self._host, self._held, self.partial_restore = slot, host, slot.held, partial_restore
        self._reading: Pending | None = None
        self._asked: PartialRestore | None = None  # what is read, or was
        self._read = False
        self._count = 0
        self.at: int | None = None
        self.failed = ""

    def begin(self) -> None:
        """Asks for the slot's records, if it is known which."""
        if not self.partial_restore.saves:
            self._ask(self.partial_restore)
        elif not self._host.frozen:
            self._ask(self._told())

    def _told(self) -> PartialRestore:
        """Returns what is to be read: the checkpoint, and those saves whose step no slot can go back behind. With a
        later save this slot could not go back."""
        host = self._host
        last = host.done - (host.resume_step - host.floor)
        return msgspec.structs.replace(
            self.partial_restore, saves=[save for save in self.partial_restore.saves if save[1] <= last]
        )

    def _ask(self, wanted: PartialRestore) -> None:
        held, reader = self._held, self._host.reader
        self.cancel()
        self._asked, self._read, self._count = wanted, False, 0
        if reader is None:
            self._on_failed("this process reads no checkpoints", False)
        else:
            take, read, failed = self._take, self._on_read, self._on_failed
            self._reading = reader.read(wanted, held.job, held.index, take, read, failed)

    def _ask_again(self, asked: PartialRestore | None) -> None:
        if asked is not None and asked is self._asked:  # nothing else was asked for since, and it is not over
            self._ask(asked)

    def cancel(self) -> None:
        """This life of the slot is over."""
        self._asked = None
        if self._reading is not None:
            self._reading.cancel()

    @property
    def done_fraction(self) -> float:
        """How much of its records and parities is there."""
        missing = self._held.missing
        return missing.done_fraction if self._slot.ready else self._count / max(1, missing.total)

    def _take(self, table_group: int, positions_N: Positions, records_NB: Bytes) -> None:
        self._held.shards[table_group].scatter_(positions_N, records_NB)
        self._count += len(positions_N)

    def _on_read(self) -> None:
        wanted = sum(layout.rows_on(self._held.index) for layout in self._held.layouts)  # padding is zeros, as it is
        if self._count != wanted:
            has = f"{self.partial_restore.folder} has {self._count} records of slot {self._held.index}, not {wanted}"
            self._on_failed(has, False)
            return
        self._read = True
        self.proceed()

    def _on_failed(self, reason: str, later: bool) -> None:
        """Its records cannot be had. `later`: perhaps they can, later."""
        if later and self._patient:
            asked = self._asked
            log.warning("slot %d: %s; asks again in %g s", self._held.index, reason, AGAIN_S)
            self._host.later(AGAIN_S, lambda: self._ask_again(asked))
        elif not self._read:
            self.failed = reason[:REASON_MOST]
            self._slot.give_up(self.failed)

    def proceed(self) -> None:
        """Goes on with the others as soon as all is read and it is known where."""
        host, held = self._host, self._held
        if self._slot.ready or self._slot.dead or host.frozen:
            return
        if self.partial_restore.saves and self._asked != (told := self._told()):
            self._ask(told)  # for the first time, or all went back since
        if not self._read:
            return
        cut, floor = host.resume_step, host.floor
        log = held.new_log(floor)
        for step in range(floor + 1, cut + 1):
            nothing = [np.empty((0, shard.schema.nbytes), np.uint8) for shard in held.shards]
            log.append(step, [np.empty(0, np.int64) for _ in held.shards], nothing)
        held.missing.find()
        self.at = host.done
        self._slot.begin_anew(cut, floor, log, host.done)
