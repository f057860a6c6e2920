"""The policy "parity": a step counts once every holder has folded its deltas into the parities that it keeps.

Each slot is a source (its records' deltas go to the holders of their parities, `streams.py`) and a holder (it folds
other slots' deltas into its parities and keeps them for a while, `folding.py`). The new host of a lost slot learns from
the holders where the slot stands (`adoption.py`), and decodes its records and parities from what others have
(`rebuild.py`).

Shape legend: U records, M of them that changed, B record bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, assert_never

import numpy as np
import torch

from torch_ecrec.durability.adoption import Adoption
from torch_ecrec.durability.audit import ParityAudit
from torch_ecrec.durability.context import HostContext, Reply, SlotContext
from torch_ecrec.durability.folding import Folds
from torch_ecrec.durability.holdings import Change
from torch_ecrec.durability.policy import Durability, Kept, PeerRequest
from torch_ecrec.durability.rebuild import Rebuild
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.durability.streams import FoldStream, Parts
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.waits import Round
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.settings import Settings


class Parity(Durability):
    """The `Durability` of a slot whose records are protected by parities on other slots.

    Args:
        slot, host, scrubber, settings: as any policy is given.
        rebuild: how what is missing is brought back.
    """

    def __init__(
        self,
        slot: SlotContext,
        host: HostContext,
        scrubber: Scrubber,
        settings: Settings,
        rebuild: type[Rebuild] = Rebuild,
    ) -> None:
        self.slot, self.host, self.scrubber, self.held = slot, host, scrubber, slot.held
        self.streams = {
            holder: FoldStream(self.held, host, holder, slot.ready, self.on_folded, lambda: self.held_by_all)
            for holder in self.held.rule.holders
        }
        self._rounds: dict[int, Round] = {}  # of steps that not all holders have folded
        self.folds = Folds(slot, host, scrubber)
        self.adoption = Adoption(slot, host)
        self.audit = ParityAudit(slot, host, scrubber)
        self.rebuild = rebuild(slot, host, scrubber, self.folds, settings)

    @property
    def settled(self) -> int:
        """The last step that all holders have folded (rule 4)."""
        return self.held.rule.settled

    @property
    def held_by_all(self) -> int:
        """The greatest step that all holders have had at once: one that has folded less is being rebuilt (rule 3)."""
        return self.held.rule.acknowledged

    @property
    def reach(self) -> int:
        return self.held.rule.applied

    @property
    def caught_up(self) -> bool:
        """With all that the sources have acknowledged (rule 5)."""
        rule = self.held.rule
        return all(rule.is_caught_up(source) for source in rule.sources)

    def kept(self) -> Kept:
        folds = self.folds
        return Kept(folds.logs, folds.attached, max(map(len, folds.early.values()), default=0))

    # the slot's own steps -------------------------------------------------------------------------

    def on_applied(self, step: int) -> None:
        self._rounds[step] = self.host.waits.begin(self.streams)
        parts = Parts(self.held)
        for stream in self.streams.values():
            stream.pump(parts)
        self.slot.on_settled(self.settled)

    def on_forgotten(self, step: int) -> None:
        """Does nothing: what was acknowledged survives."""

    def on_folded(self, holder: int, before: int, through: int) -> None:
        """Notes that a holder has folded the slot's own steps after `before`, up to `through`."""
        settled = self.held.rule.settled
        for step in range(before + 1, through + 1):
            if (one := self._rounds.get(step)) is not None:
                self.host.waits.answered(one, holder)
                if step <= settled:
                    del self._rounds[step]
        if not settled <= before < through:  # else others still have to fold what this one has
            self.slot.on_settled(self.settled)

    def _stop_streams(self) -> None:
        for stream in self.streams.values():
            stream.stop()
        while self._rounds:
            self.host.waits.end(self._rounds.popitem()[1])

    # the slot's life ------------------------------------------------------------------------------

    def adopt(self) -> None:
        self.adoption.begin()

    def take_over(self, floors: Mapping[int, int], attached: Mapping[int, int]) -> Mapping[int, DeltaLog]:
        return self.folds.take_over(floors, attached)

    def connect(self) -> None:
        if not self.host.frozen:
            for stream in self.streams.values():
                stream.attach()

    def restore(self) -> None:
        self.rebuild.start()

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        return self.rebuild.is_missing(positions)

    def mend(self, table_group: int, parity: bool, positions: np.ndarray) -> str:
        self.rebuild.mend(table_group, parity, positions)
        return ""

    def compare(self, table_group: int, first: int, end: int) -> None:
        if not self.host.frozen:
            self.audit.begin(table_group, first, end)

    def stop(self) -> None:
        """Stops sending folds, and drops those that wait for their turn: their steps may be undone."""
        if self.slot.dead:
            self.adoption.cancel()
        elif self.adoption.begun and not self.slot.ready and not self.slot.hopeless:
            self.adopt()
        self._stop_streams()
        self.folds.drop_all_early()

    def go_back(self, step: int) -> None:
        self.folds.undo_all_after(step)

    # other slots ----------------------------------------------------------------------------------

    def meet(self, slot: int, incarnation: int) -> None:
        """Learns the incarnation of another slot; one before it is fenced, on both sides."""
        if not self.held.rule.learn(slot, incarnation, self.held.log.floor):
            return
        self.folds.drop_early(slot)
        if slot in self.streams:
            self.streams[slot].stop()
            if self.slot.ready and not self.host.frozen:
                self.streams[slot].attach()

    def meet_anew(self, slot: int, incarnation: int) -> bool:
        """Forgets what was folded of a slot whose records begin anew: every parity that contains them counts as
        missing."""
        rule = self.held.rule
        if slot not in rule.sources or incarnation <= rule.incarnations.get(slot, 0):
            self.meet(slot, incarnation)
            return False
        self.folds.forget(slot)
        for table_group, runs in enumerate(self.folds.runs[slot]):
            for run in runs:
                self.held.missing.lose(table_group, np.arange(run.first, run.end) + run.shift)
        self.rebuild.begin_anew()
        self.meet(slot, incarnation)
        return True

    def handle(self, request: PeerRequest, reply: Reply[Answer]) -> None:
        match request:
            case wire.Fold():
                self.folds.on_fold(request, reply)
            case wire.Attach():
                self.meet(request.source, request.source_incarnation)
                self.folds.on_attach(request, reply)
            case wire.Adopt():
                self.meet(request.lost, request.lost_incarnation)
                self.folds.on_adopt(request, reply)
            case wire.Cut():
                self.folds.on_cut(request, reply)
            case wire.Versions():
                reply(wire.VersionsAre(dict(self.held.rule.folded)))
            case wire.Fetch():
                self.on_fetch(request, reply)
            case wire.FetchSeals():
                self.audit.on_fetch(request, reply)
            case _:
                assert_never(request)

    def on_fetch(self, request: wire.Fetch, reply: Reply[wire.Records | wire.Damaged]) -> None:
        """Records of one member of some stripes (all with the same base) as of given steps."""
        if not self.slot.ready:
            reply(Refused("not rebuilt yet"))
            return
        then = partial(self._present, request, reply)
        positions_U = request.positions.numpy()
        self.slot.once_read(request.table_group, request.parity, positions_U, then, reply, request.awaited)

    def _present(self, request: wire.Fetch, reply: Reply[wire.Records | wire.Damaged], read: Any) -> None:
        held, positions = self.held, request.positions.numpy()
        table_group, is_parity = request.table_group, request.parity
        records_UB = self.scrubber.gather(table_group, is_parity, positions, read)
        there_U = held.missing.present(table_group, is_parity, positions)
        if there_U is not None and not there_U.all():
            reply(wire.Damaged(torch.from_numpy(np.flatnonzero(~there_U))))
            return
        changes: list[Change] | None
        if is_parity:
            group = held.layouts[table_group].group(held.index, True, positions)[0]
            changes = self.folds.parity_changes(table_group, group, request.as_of)
        else:
            changes = held.data_changes(table_group, positions, request.as_of[held.index])
        if changes is None:
            reply(Refused("cannot present these steps"))
            return
        if not self.scrubber.came_whole(table_group, is_parity):
            reply(Refused("read wrongly from a disk"))
            return
        for rows_M, deltas_MB, coefficients_M in changes:
            held.code.fold_(records_UB, rows_M, deltas_MB, coefficients_M)
        reply(wire.Records(torch.from_numpy(records_UB)))
