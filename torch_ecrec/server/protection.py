"""Parity between slots: folds sent as a source, folds received as a holder, and the cut of a lost slot.

Each slot is a source (its records' deltas go to the holders of their parities) and a holder (it folds other slots'
deltas into its parities and keeps them, per source, in a fold log: redo for nobody, undo for cuts and readers).

One `FoldStream` per holder sends steps in order once the holder is attached. A new incarnation on either side detaches
it; the source then attaches again, and the holder says from where (docs/design.md, rules 1 to 5).

Without protection there are no holders and no sources, and every step is settled as soon as it is applied.

A fold carries one part for each slab and each `SharedRun` of the pair (layout.py), slab by slab: the records of one lie
side by side in the source's log, and so do their parities at the holder, so nothing is copied to split a step.

Shape legend: U records, M of them that changed, B record bytes; lists hold one array per slab and run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_ecrec.layout.stripes import StripeGroup
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.step_rule import FoldVerdict, choose_cut
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.transport.node import Exchange

if TYPE_CHECKING:
    from torch_ecrec.server.slot import Slot

Reply = Callable[[Answer], None]
# To be folded into some records: (M,) int64 indices of those that changed, (M, B) deltas, (M,) coefficients
Change = tuple[np.ndarray, np.ndarray, np.ndarray]
logger = logging.getLogger(__name__)


class FoldStream:
    """The ordered stream of one slot's deltas to one holder."""

    def __init__(self, slot: Slot, holder: int, attached: bool) -> None:
        self.slot, self.holder, self.attached = slot, holder, attached
        self.sent = 0
        self.under_way: dict[int, Exchange] = {}
        self.attaching: Exchange | None = None
        self.runs = [layout.runs(slot.index, holder) for layout in slot.layouts]

    def stop(self) -> None:
        self.attached = False
        for exchange in [*self.under_way.values(), self.attaching]:
            if exchange is not None:
                exchange.cancel()
        self.under_way, self.attaching = {}, None

    def attach(self) -> None:
        """Meets the holder's present incarnation; folds flow once it has answered."""
        self.stop()
        slot = self.slot
        incarnation = slot.rule.incarnations[self.holder]

        def make(_: int) -> wire.Request:
            floor, acknowledged = slot.log.floor, slot.rule.acknowledged
            return wire.Attach(self.holder, incarnation, slot.index, slot.incarnation, floor, acknowledged)

        def done(answer: Answer) -> None:
            assert isinstance(answer, wire.Attached)
            self.attaching = None
            self.attached, self.sent = True, answer.folded
            self._on_folded(incarnation, answer.folded)
            self.pump()

        self.attaching = slot.host.ask(self.holder, make, done, bound_to=incarnation)

    def pump(self) -> None:
        """Sends every applied step that the holder was not sent yet."""
        while self.attached and self.sent < self.slot.rule.applied:
            self.sent += 1
            self._send(self.sent)

    def _send(self, step: int) -> None:
        slot = self.slot
        incarnation = slot.rule.incarnations[self.holder]
        positions, deltas = self._part(step)
        fold = wire.Fold(
            self.holder, incarnation, slot.index, slot.incarnation, step, slot.log.floor, positions, deltas
        )

        def done(answer: Answer) -> None:
            assert isinstance(answer, wire.Folded)
            self._on_folded(incarnation, answer.step)

        self.under_way[step] = slot.host.ask(self.holder, lambda _: fold, done, bound_to=incarnation)

    def _part(self, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The deltas of a step whose parities the holder has: views of the log."""
        positions, deltas = [], []
        for runs, (positions_U, deltas_UB) in zip(self.runs, self.slot.log.get(step), strict=True):
            for run in runs:
                begin, end = np.searchsorted(positions_U, (run.first, run.end))
                positions.append(torch.from_numpy(positions_U[begin:end]))
                deltas.append(torch.from_numpy(deltas_UB[begin:end]))
        return positions, deltas

    def _on_folded(self, incarnation: int, step: int) -> None:
        for done in [t for t in self.under_way if t <= step]:
            self.under_way.pop(done).cancel()
        self.slot.rule.on_confirmed(self.holder, incarnation, step)
        self.slot.acknowledge()


class Protection:
    """What a slot does to protect others' records and to have its own protected."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        rule = slot.rule
        self.streams = {holder: FoldStream(slot, holder, slot.ready) for holder in rule.holders}
        self.runs = {source: [layout.runs(source, slot.index) for layout in slot.layouts] for source in rule.sources}
        self.fold_logs = {source: self._new_log(source, 0) for source in rule.folded}
        self.early: dict[int, dict[int, tuple[wire.Fold, Reply]]] = {}
        self.adopting: list[Exchange] = []
        self.attached: dict[int, int] = {}  # source -> its incarnation that attached last; only grows

    def _new_log(self, source: int, floor: int) -> DeltaLog:
        return DeltaLog(sum(len(runs) for runs in self.runs[source]), floor=floor)

    @property
    def log_bytes(self) -> int:
        return sum(log.bytes for log in self.fold_logs.values())

    def stop(self) -> None:
        for stream in self.streams.values():
            stream.stop()
        for exchange in self.adopting:
            exchange.cancel()
        for source in list(self.early):
            self._drop_early(source)

    # as a source --------------------------------------------------------------------------------

    def on_applied(self, step: int) -> None:
        for stream in self.streams.values():
            stream.pump()

    def attach_all(self) -> None:
        for stream in self.streams.values():
            stream.attach()

    def meet(self, slot: int, incarnation: int) -> None:
        """Another slot has a new incarnation: the old one is fenced, on both sides."""
        if not self.slot.rule.learn(slot, incarnation, self.slot.log.floor):
            return
        self._drop_early(slot)
        if slot in self.streams:
            self.streams[slot].stop()
            if self.slot.ready and not self.slot.host.frozen:
                self.streams[slot].attach()

    # going back ---------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Nothing is sent any more, and what waits for its turn will not get it: those steps may be taken back."""
        if not self.slot.ready and not self.slot.hopeless:
            self.adopt()
        for stream in self.streams.values():
            stream.stop()
        for source in list(self.early):
            self._drop_early(source)

    def undo_all_after(self, step: int) -> None:
        for source in self.fold_logs:
            self.undo_after(source, step)

    # as a holder --------------------------------------------------------------------------------

    def on_attach(self, request: wire.Attach, reply: Reply) -> None:
        self.meet(request.source, request.source_incarnation)
        rule = self.slot.rule
        if not rule.is_current(request.source, request.source_incarnation):
            reply(Refused(f"slot {request.source} has been replaced"))
            return
        if self.slot.host.frozen:  # steps of the source may still have to be undone here
            reply(Refused("the trainers were lost"))
            return
        if rule.on_attached(request.source, request.base, request.acknowledged):
            self.fold_logs[request.source] = self._new_log(request.source, request.base)
        self.attached[request.source] = max(request.source_incarnation, self.attached.get(request.source, 0))
        reply(wire.Attached(rule.folded[request.source]))
        self.slot.rebuild.check_done()

    def on_fold(self, request: wire.Fold, reply: Reply) -> None:
        rule, source = self.slot.rule, request.source
        if self.slot.host.frozen:
            reply(Refused("the trainers were lost"))
            return
        verdict = rule.judge_fold(source, request.source_incarnation, request.step)
        if verdict is FoldVerdict.NEXT:
            self._fold(request)
            reply(wire.Folded(request.step))
            while (turn := self.early.get(source, {}).pop(rule.folded[source] + 1, None)) is not None:
                self._fold(turn[0])
                turn[1](wire.Folded(turn[0].step))
            self.slot.rebuild.check_done()
        elif verdict is FoldVerdict.DUPLICATE:
            reply(wire.Folded(rule.folded[source]))
        elif verdict is FoldVerdict.EARLY:
            waiting = self.early.setdefault(source, {})
            if request.step in waiting:
                waiting[request.step][1](Refused("sent again"))
            waiting[request.step] = (request, reply)
        else:
            reply(Refused(f"fold of step {request.step} is {verdict.value}"))

    def _fold(self, request: wire.Fold) -> None:
        source = request.source
        positions = [p.numpy() for p in request.positions]
        deltas = [d.numpy() for d in request.deltas]
        self._fold_in(source, positions, deltas)
        log = self.fold_logs[source]
        log.append(request.step, positions, deltas)
        log.forget(request.floor)
        self.slot.rule.folded[source] = request.step

    def _fold_in(self, source: int, positions: list[np.ndarray], deltas: list[np.ndarray]) -> None:
        """XORs a source's deltas, times their coefficients, into the parities that are there. Its own inverse."""
        code = self.slot.code
        parts = [(slab, run) for slab, runs in enumerate(self.runs[source]) for run in runs]
        for (slab, run), positions_U, deltas_UB in zip(parts, positions, deltas, strict=True):
            if len(positions_U):
                parities = positions_U + run.shift
                present = self.slot.rebuild.parity_present(slab, parities)
                if present is not None:
                    parities = np.where(present, parities, -1)
                coefficient = code.coefficients[run.parity, run.member]
                coefficients = np.full(len(parities), coefficient, dtype=np.uint8)
                self.slot.shards[slab].fold_(code, parities, deltas_UB, coefficients)

    def _drop_early(self, source: int) -> None:
        for _, reply in self.early.pop(source, {}).values():
            reply(Refused(f"fold of slot {source} is void"))

    # the cut of a lost slot, at a holder --------------------------------------------------------------

    def on_adopt(self, request: wire.Adopt, reply: Reply) -> None:
        self.meet(request.lost, request.lost_incarnation)
        rule, lost = self.slot.rule, request.lost
        if not rule.is_current(lost, request.lost_incarnation):
            reply(Refused(f"slot {lost} has been replaced"))
        elif lost not in rule.folded:
            reply(wire.Adopted(None, False))
        else:
            reply(wire.Adopted(rule.folded[lost], rule.is_caught_up(lost)))

    def on_cut(self, request: wire.Cut, reply: Reply) -> None:
        rule, lost = self.slot.rule, request.lost
        if not rule.is_current(lost, request.lost_incarnation):
            reply(Refused(f"slot {lost} has been replaced"))
            return
        if self.attached.get(lost, 0) >= request.lost_incarnation:
            # It has had its answer: this is a late copy, and to undo now would take back what it sent since.
            reply(Refused(f"slot {lost} has its cut already"))
            return
        if lost not in rule.folded:
            reply(wire.CutLog([], [], [], floor=0, caught_up=False))
            return
        log = self.fold_logs[lost]
        if request.cut < log.floor:
            reply(Refused(f"a cut at step {request.cut}, before the log, which begins after step {log.floor}"))
            return
        self.undo_after(lost, request.cut)
        steps = list(range(log.floor + 1, log.last + 1))
        entries = [log.get(step) for step in steps]
        reply(
            wire.CutLog(
                steps,
                [[torch.from_numpy(positions_U) for positions_U, _ in entry] for entry in entries],
                [[torch.from_numpy(deltas_UB) for _, deltas_UB in entry] for entry in entries],
                floor=log.floor,
                caught_up=rule.is_caught_up(lost),
            )
        )

    def undo_after(self, source: int, cut: int) -> None:
        """Takes back what was folded of a source after `cut`: its new host applies those steps again."""
        rule, log = self.slot.rule, self.fold_logs[source]
        while rule.folded[source] > cut:
            entry = log.pop()
            self._fold_in(source, [p for p, _ in entry], [d for _, d in entry])
            rule.folded[source] -= 1

    # the cut of a lost slot, at its new host ----------------------------------------------------------

    def adopt(self) -> None:
        """Asks every holder what it has folded of this slot; the cut follows from that.

        Asks again when an era begins meanwhile: all that counts for one cut is said before anybody goes back, or after.
        """
        slot, reports = self.slot, {}
        for exchange in self.adopting:
            exchange.cancel()
        holders = slot.rule.holders

        def ask(holder: int) -> Exchange:
            def done(answer: Answer) -> None:
                assert isinstance(answer, wire.Adopted)
                reports[holder] = (answer.folded, answer.caught_up)
                if len(reports) == len(holders):
                    cut = choose_cut(reports.values())
                    if cut is None:
                        slot.give_up()
                    else:
                        self._cut(cut)

            def make(incarnation: int) -> wire.Request:
                return wire.Adopt(holder, incarnation, slot.index, slot.incarnation, slot.host.frozen)

            return slot.host.ask(holder, make, done)

        logger.info("slot %d: new host, asks slots %s what they have folded", slot.index, list(holders))
        self.adopting = [ask(holder) for holder in holders]

    def _cut(self, cut: int) -> None:
        slot, logs = self.slot, {}
        holders = slot.rule.holders

        def ask(holder: int) -> Exchange:
            def done(answer: Answer) -> None:
                assert isinstance(answer, wire.CutLog)
                logs[holder] = answer
                if len(logs) == len(holders):
                    self._on_logs(cut, {h: log for h, log in logs.items() if log.caught_up})

            def make(incarnation: int) -> wire.Request:
                return wire.Cut(holder, incarnation, slot.index, slot.incarnation, slot.host.frozen, cut)

            return slot.host.ask(holder, make, done)

        logger.info("slot %d: cut at step %d", slot.index, cut)
        self.adopting = [ask(holder) for holder in holders]

    def _on_logs(self, cut: int, logs: dict[int, wire.CutLog]) -> None:
        """Puts this slot's own log together: each holder has the deltas of the records it keeps parity of."""
        slot = self.slot
        if self._members(logs) < self._members(slot.rule.holders):
            slot.give_up()
            return
        floor = min(cut, max(log.floor for log in logs.values()))
        own = DeltaLog(len(slot.shards), floor=floor)
        for step in range(floor + 1, cut + 1):
            at = [(h, log, log.steps.index(step)) for h, log in logs.items()]
            positions, deltas = [], []
            for slab in range(len(slot.shards)):
                of_slab = {h: self._of_slab(slot.index, h, slab) for h in logs}
                every = np.concatenate([part.numpy() for h, log, i in at for part in log.positions[i][of_slab[h]]])
                parts = np.concatenate([part.numpy() for h, log, i in at for part in log.deltas[i][of_slab[h]]])
                positions_U, first = np.unique(every, return_index=True)  # with r > 1 several holders have the same
                positions.append(positions_U)
                deltas.append(np.ascontiguousarray(parts[first]))
            own.append(step, positions, deltas)
        self.adopting = []
        logger.info("slot %d: serves, %d recent steps in its log", slot.index, cut - floor)
        slot.become_ready(cut, floor, own)

    def _members(self, holders: Iterable[int]) -> set[int]:
        """As which members of their stripes this slot has records whose parities are on these holders."""
        runs = [run for layout in self.slot.layouts for h in holders for run in layout.runs(self.slot.index, h)]
        return {run.member for run in runs if run.first < run.end}

    def _of_slab(self, source: int, holder: int, slab: int) -> slice:
        """Which parts of a fold are of one slab."""
        runs = len(self.slot.layouts[slab].runs(source, holder))
        return slice(slab * runs, (slab + 1) * runs)

    # reads for recovery -------------------------------------------------------------------------

    def on_versions(self, _request: wire.Versions, reply: Reply) -> None:
        reply(wire.VersionsAre(dict(self.slot.rule.folded)))

    def on_fetch(self, request: wire.Fetch, reply: Reply) -> None:
        """Records of one member of some stripes (all with the same base) as of given steps."""
        slot, positions = self.slot, request.positions.numpy()
        slab, is_parity = request.slab, request.parity
        if not slot.ready or slot.rebuild.lacks(slab, is_parity, positions):
            reply(Refused("not rebuilt yet"))
            return
        changes: list[Change] | None
        if is_parity:
            group = slot.layouts[slab].group(slot.index, True, positions)[0]
            changes = self.parity_changes(slab, group, request.as_of)
        else:
            changes = self.data_changes(slab, positions, request.as_of[slot.index])
        if changes is None:
            reply(Refused("cannot present these steps"))
            return
        records_UB = slot.shards[slab].gather(positions, parity=is_parity)
        for rows_M, deltas_MB, coefficients_M in changes:
            slot.code.fold_(records_UB, rows_M, deltas_MB, coefficients_M)
        reply(wire.Records(torch.from_numpy(records_UB)))

    def data_changes(self, slab: int, positions: np.ndarray, step: int) -> list[Change] | None:
        """What moves data records between what is applied now and `step`; None where the log does not reach."""
        log, applied = self.slot.log, self.slot.rule.applied
        if step == applied:
            return []
        if not log.floor <= step < applied:
            return None
        return [with_coefficient(part, 1) for part in log.parts(slab, positions, step, applied)]

    def parity_changes(self, slab: int, group: StripeGroup, other: dict[int, int]) -> list[Change] | None:
        """What moves parities between what is folded now and the steps `other` (either direction: XOR).

        Returns:
            None where the fold logs do not reach.
        """
        slot, code = self.slot, self.slot.code
        layout = slot.layouts[slab]
        changes = []
        for member in range(code.k):
            source = int(layout.member_slot[group.base, member])
            folded = slot.rule.folded.get(source)
            if folded is None or not self.fold_logs[source].floor <= other[source] <= folded:
                return None
            if other[source] == folded:
                continue
            runs = self.runs[source][slab]
            run = next(i for i, run in enumerate(runs) if run.member == member)
            exists = layout.exists(group.base, member, group.rotations)
            positions = np.where(exists, layout.position(group.base, member, group.rotations), -1)
            parts = self.fold_logs[source].parts(slab * len(runs) + run, positions, other[source], folded)
            coefficient = code.coefficients[group.member - code.k, member]
            changes += [with_coefficient(part, coefficient) for part in parts]
        return changes


def with_coefficient(part: tuple[np.ndarray, np.ndarray], coefficient: int) -> Change:
    rows_M, deltas_MB = part
    return rows_M, deltas_MB, np.full(len(rows_M), coefficient, dtype=np.uint8)
