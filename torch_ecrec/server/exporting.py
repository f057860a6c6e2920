"""How a slot is copied to another server while it goes on, and handed over there: the side that gives.

    FetchChanged(0)   somebody begins to copy: from now on it is noted what changes
    Copy              records and parities as they are now, in portions
    FetchChanged(n)   what has changed since the turn before, to be copied once more; again, until it is little
    HandOver          the slot stops, and gives the rest: what has changed since, its logs, where it stands

A stopped slot answers nobody else. It goes on itself as soon as a newer placement leaves it where it is, or an era
begins: the coordinator made that, and lets nobody take the slot over on the strength of what was given before. So
there is one of it at every moment, and none only between `HandOver` and the next placement.

Nothing of a slot is lost by this, nothing is decoded, and no holder has to catch up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torch_ecrec.durability.context import Reply, SlotContext
from torch_ecrec.durability.policy import Durability
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import Refused
from torch_ecrec.records.positions import Positions
from torch_ecrec.records.touched import Touched
from torch_ecrec.server.importing import SlotImport
from torch_ecrec.server.process import ServerProcess
from torch_ecrec.server.snapshots import SnapshotStore

MoveRequest = wire.FetchChanged | wire.Copy | wire.HandOver


class SlotExport:
    """Gives one life of a slot to another server; idle while nobody copies it."""

    def __init__(
        self,
        slot: SlotContext,
        host: ServerProcess,
        scrubber: Scrubber,
        durability: Durability,
        snapshots: SnapshotStore,
    ) -> None:
        self.slot, self.host, self.held = slot, host, slot.held
        self.scrubber, self.durability, self.snapshots = scrubber, durability, snapshots
        self.stopped = False
        self._turn = -1
        self._changed = wire.Changed([], [])  # the answer of that turn

    def end(self) -> None:
        """Ends the export, as nobody copies the slot any more; if it has stopped, it goes on."""
        self._turn = -1
        for shard in self.held.shards:
            shard.touched = None
        if self.stopped:
            self.stopped = False
            self.durability.connect()
            self.slot.progress()

    def handle(self, request: wire.Request[Any], reply: Reply[wire.Answer]) -> None:
        """Answers a request of who copies the slot; or of anybody, while it has stopped."""
        placement = self.host.placement
        if not isinstance(request, MoveRequest):
            if isinstance(request, wire.FetchSnapshots):
                self.snapshots.on_fetch(request, reply)
            else:
                reply(Refused("the slot moves"))
        elif placement is None or placement.epoch != request.epoch or self.host.frozen:
            reply(Refused("this move is over, or not known yet"))
        elif not self.slot.whole:
            reply(Refused("something of it is missing"))
        elif isinstance(request, wire.FetchChanged):
            self._on_fetch_changed(request, reply)
        elif self._turn < 0:
            reply(Refused("nobody has begun to copy this slot"))
        elif isinstance(request, wire.Copy):
            self._on_copy(request, reply)
        else:
            self._on_hand_over(reply)

    def _on_fetch_changed(self, request: wire.FetchChanged, reply: Reply[wire.Changed]) -> None:
        if request.turn not in (self._turn, self._turn + 1):
            reply(Refused(f"turn {request.turn} does not follow on {self._turn}"))  # also a late copy of turn 0
            return
        if request.turn != self._turn:
            if request.turn == 0:
                for shard in self.held.shards:
                    shard.touched = Touched(shard.data_rows, shard.parity_rows)
            self._turn = request.turn
            data, parities = self._touched(False, take=True), self._touched(True, take=True)
            self._changed = wire.Changed(_tensors(data), _tensors(parities))
        reply(self._changed)

    def _touched(self, parity: bool, take: bool) -> list[Positions]:
        """Returns the positions of each table group that have changed, ascending."""
        found = []
        for shard in self.held.shards:
            assert shard.touched is not None
            found.append(shard.touched.take(parity) if take else shard.touched.look(parity))
        return found

    def _on_copy(self, request: wire.Copy, reply: Reply[wire.Records]) -> None:
        then = partial(self._copy, request, reply)
        self.slot.once_read(request.table_group, request.parity, request.positions.numpy(), then, reply)

    def _copy(self, request: wire.Copy, reply: Reply[wire.Records], read: Any) -> None:
        positions_U = request.positions.numpy()
        records_UB = self.scrubber.gather(request.table_group, request.parity, positions_U, read)
        if self.held.missing.lacks(request.table_group, request.parity, positions_U):
            reply(Refused("missing, or damaged and being repaired"))
            return
        if self.scrubber.came_whole(request.table_group, request.parity):
            reply(wire.Records(torch.from_numpy(records_UB)))
        else:
            reply(Refused("read wrongly from a disk"))

    def _on_hand_over(self, reply: Reply[wire.Handed]) -> None:
        slot = self.slot
        data, parities = self._touched(False, take=False), self._touched(True, take=False)
        for table_group, (data_U, parities_U) in enumerate(zip(data, parities, strict=True)):
            self.scrubber.look(table_group, False, data_U)
            self.scrubber.look(table_group, True, parities_U)
        if not slot.whole or slot.going_back_to is not None or not self.snapshots.complete:
            reply(Refused("something of it is missing, or not durable yet"))
            return
        records = self._records(False, data), self._records(True, parities)
        kinds = [(table_group, parity) for table_group in range(len(data)) for parity in (False, True)]
        if not all([self.scrubber.came_whole(*kind) for kind in kinds]):
            reply(Refused("read wrongly from a disk"))
            return
        if not self.stopped:
            self.stopped = True
            self.durability.stop()
        reply(self._all(data, parities, *records))

    def _all(
        self,
        data: list[Positions],
        parities: list[Positions],
        data_records: list[torch.Tensor],
        parity_records: list[torch.Tensor],
    ) -> wire.Handed:
        slot, held, rule = self.slot, self.held, self.held.rule
        kept = self.durability.kept()
        logs = {held.index: held.log, **dict(sorted(kept.logs.items()))}
        entries = [log.get(step) for log in logs.values() for step in range(log.floor + 1, log.last + 1)]
        return wire.Handed(
            applied=rule.applied,
            acknowledged=rule.acknowledged,
            load_steps=slot.load_steps,
            incarnations=slot.known_incarnations(),
            folded=dict(rule.folded),
            catch_up=dict(rule.catch_up),
            attached=dict(kept.attached),
            resumable=dict(rule.resumable),
            newest=self.snapshots.most,
            logs=list(logs),
            floors=[log.floor for log in logs.values()],
            steps=[log.last - log.floor for log in logs.values()],
            positions=[_tensors([positions_U for positions_U, _ in entry]) for entry in entries],
            deltas=[[torch.from_numpy(deltas_UB) for _, deltas_UB in entry] for entry in entries],
            data=_tensors(data),
            data_records=data_records,
            parities=_tensors(parities),
            parity_records=parity_records,
        )

    def take_over(self, arrival: SlotImport) -> None:
        """This life goes on as the one before, which has stopped, on another server: takes its logs and snapshots."""
        handed = arrival.handed
        assert handed is not None
        floors = dict(zip(handed.logs[1:], handed.floors[1:], strict=True))
        logs = self.durability.take_over(floors, handed.attached)
        at = 0
        every = (self.held.log, *logs.values())
        for log, count in zip(every, handed.steps, strict=True):
            for positions, deltas in zip(
                handed.positions[at : at + count], handed.deltas[at : at + count], strict=True
            ):
                log.append(log.last + 1, [part.numpy() for part in positions], [part.numpy() for part in deltas])
            at += count
        self.snapshots.take_over(arrival.snapshots, handed.newest)

    def _records(self, parity: bool, positions: Sequence[Positions]) -> list[torch.Tensor]:
        shards = self.held.shards
        return [
            torch.from_numpy(shards[table_group].gather(at_U, parity)) for table_group, at_U in enumerate(positions)
        ]


def _tensors(positions: Sequence[Positions]) -> list[torch.Tensor]:
    return [torch.from_numpy(positions_U) for positions_U in positions]
