"""Folds received: what a slot keeps of other slots' records, and how it takes folds back.

A slot is a holder of its sources: it folds their deltas into its parities and keeps them, per source, in a fold log:
redo for nobody, undo for cuts, for going back, and for readers.

Shape legend: U records, M of them that changed, B record bytes; lists hold one array per table group and run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.durability.context import HostContext, Reply, SlotContext
from torch_ecrec.durability.holdings import Change, with_coefficient
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.errors import MemoryDamaged
from torch_ecrec.layout.stripes import StripeGroup
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.step_rule import FoldVerdict
from torch_ecrec.protocol.wire import Refused
from torch_ecrec.records.delta_log import DeltaLog


class Folds:
    """Other slots' steps, as far as their parities are on this slot."""

    def __init__(self, slot: SlotContext, host: HostContext, scrubber: Scrubber) -> None:
        self.slot, self.host, self.scrubber, self.held = slot, host, scrubber, slot.held
        held, rule = self.held, self.held.rule
        self.runs = {source: [layout.runs(source, held.index) for layout in held.layouts] for source in rule.sources}
        self._parts = {  # of a fold: table group, run, and with which coefficient
            source: [
                (table_group, run, held.code.coefficients[run.parity, run.member])
                for table_group, runs in enumerate(self.runs[source])
                for run in runs
            ]
            for source in rule.sources
        }
        self.logs = {source: self.new_log(source, 0) for source in rule.folded}
        self.early: dict[int, dict[int, tuple[wire.Fold, Reply[wire.Folded]]]] = {}
        self.attached: dict[int, int] = {}  # source -> its incarnation that attached last; only grows

    def new_log(self, source: int, floor: int) -> DeltaLog:
        """Returns an empty log of a source's folds, after a step."""
        held = self.held
        table_groups = [table_group for table_group, runs in enumerate(self.runs[source]) for _ in runs]  # of each run

        def name_of(run: int, position: int) -> str:
            return held.name_of(source, table_groups[run], position)

        return DeltaLog(len(table_groups), floor, held.sealed, name_of, MemoryDamaged)

    def take_over(self, floors: Mapping[int, int], attached: Mapping[int, int]) -> dict[int, DeltaLog]:
        """Goes on as the folds of a life that has stopped: the logs, still empty, begin after these steps."""
        self.logs = {source: self.new_log(source, floor) for source, floor in floors.items()}
        self.attached = dict(attached)
        return self.logs

    # folds ----------------------------------------------------------------------------------------

    def on_attach(self, request: wire.Attach, reply: Reply[wire.Attached]) -> None:
        rule = self.held.rule
        if not rule.is_current(request.source, request.source_incarnation):
            reply(Refused(f"slot {request.source} has been replaced"))
            return
        if self.host.frozen:  # steps of the source may still have to be undone here
            reply(Refused("the trainers were lost"))
            return
        if rule.on_attached(request.source, request.base, request.acknowledged):
            self.logs[request.source] = self.new_log(request.source, request.base)
        self.attached[request.source] = max(request.source_incarnation, self.attached.get(request.source, 0))
        reply(wire.Attached(rule.folded[request.source]))
        self.slot.check_rebuilt()

    def on_fold(self, request: wire.Fold, reply: Reply[wire.Folded]) -> None:
        rule, source = self.held.rule, request.source
        if self.host.frozen:
            reply(Refused("the trainers were lost"))
            return
        verdict = rule.judge_fold(source, request.source_incarnation, request.step)
        if verdict is FoldVerdict.NEXT:
            self._fold(request)
            reply(wire.Folded(request.step))
            while (turn := self.early.get(source, {}).pop(rule.folded[source] + 1, None)) is not None:
                self._fold(turn[0])
                turn[1](wire.Folded(turn[0].step))
            self.slot.check_rebuilt()
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
        of_deltas = self._fold_in(source, positions, deltas)
        log = self.logs[source]
        log.append(request.step, positions, deltas, of_deltas)
        log.forget(request.floor)
        self.held.rule.on_folded(source, request.step)
        self.slot.tend_tiers()

    def _fold_in(self, source: int, positions: list[np.ndarray], deltas: list[np.ndarray]) -> list[SealsOf | None]:
        """XORs a source's deltas, times their coefficients, into the parities that are there. Its own inverse.

        Returns:
            The seals of the deltas of each run, where they were made.
        """
        held, of_deltas = self.held, list[SealsOf | None]()
        parts = zip(self._parts[source], positions, deltas, strict=True)
        for (table_group, run, coefficient), positions_U, deltas_UB in parts:
            seals_U = None
            if len(positions_U):
                parities = positions_U + run.shift
                present = held.missing.present(table_group, True, parities)
                if present is not None:
                    parities = np.where(present, parities, -1)
                coefficients = np.full(len(parities), coefficient, dtype=np.uint8)
                seals_U = held.shards[table_group].fold_(held.code, parities, deltas_UB, coefficients)
            of_deltas.append(seals_U)
        return of_deltas

    def drop_early(self, source: int) -> None:
        """Folds of a source that wait for their turn will not get it."""
        for _, reply in self.early.pop(source, {}).values():
            reply(Refused(f"fold of slot {source} is void"))

    def drop_all_early(self) -> None:
        """Drops the folds of all sources that came before their turn."""
        for source in list(self.early):
            self.drop_early(source)

    def forget(self, source: int) -> None:
        """Forgets a source whose records begin anew: its next incarnation attaches as to a holder that knows
        nothing."""
        self.drop_early(source)
        self.logs.pop(source, None)
        self.held.rule.forget_source(source)

    def undo_after(self, source: int, cut: int) -> None:
        """Takes back what was folded of a source after `cut`: its new host applies those steps again."""
        rule, log = self.held.rule, self.logs[source]
        while rule.folded[source] > cut:
            entry = log.pop()
            self._fold_in(source, [p for p, _ in entry], [d for _, d in entry])
            rule.on_undone(source)

    def undo_all_after(self, step: int) -> None:
        """Takes back what was folded of all sources after `step`, where the trainers start again."""
        for source in self.logs:
            self.undo_after(source, step)

    # the cut of a lost slot -----------------------------------------------------------------------

    def on_adopt(self, request: wire.Adopt, reply: Reply[wire.Adopted]) -> None:
        rule, lost = self.held.rule, request.lost
        if not rule.is_current(lost, request.lost_incarnation):
            reply(Refused(f"slot {lost} has been replaced"))
        elif lost not in rule.folded:
            reply(wire.Adopted(None, False))
        else:
            reply(wire.Adopted(rule.folded[lost], rule.is_caught_up(lost)))

    def on_cut(self, request: wire.Cut, reply: Reply[wire.CutLog]) -> None:
        rule, lost = self.held.rule, request.lost
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
        log = self.logs[lost]
        if request.cut < log.floor:
            reply(Refused(f"a cut at step {request.cut}, before the log, which begins after step {log.floor}"))
            return
        self.undo_after(lost, request.cut)
        steps = list(range(log.floor + 1, log.last + 1))
        for step in reversed(steps):
            try:
                log.check(step)
            except MemoryDamaged as damage:  # nobody needs it at once: the new host goes back less far
                self.scrubber.on_log(f"{damage}; the log of slot {lost} begins after step {step} now")
                log.forget(step)
                steps = steps[steps.index(step) + 1 :]
                break
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

    # for readers ----------------------------------------------------------------------------------

    def parity_changes(self, table_group: int, group: StripeGroup, other: dict[int, int]) -> list[Change] | None:
        """Returns the changes between parities as folded now and as of the steps `other`; by XOR they work in both
        directions.

        Returns:
            None where the fold logs do not reach.
        """
        held = self.held
        layout, code = held.layouts[table_group], held.code
        changes = []
        for member in range(code.k):
            source = int(layout.member_slot[group.base, member])
            folded = held.rule.folded.get(source)
            if folded is None or not self.logs[source].floor <= other[source] <= folded:
                return None
            if other[source] == folded:
                continue
            runs = self.runs[source][table_group]
            run = next(i for i, run in enumerate(runs) if run.member == member)
            exists = layout.exists(group.base, member, group.rotations)
            positions = np.where(exists, layout.position(group.base, member, group.rotations), -1)
            parts = self.logs[source].parts(table_group * len(runs) + run, positions, other[source], folded)
            coefficient = code.coefficients[group.member - code.k, member]
            changes += [with_coefficient(part, coefficient) for part in parts]
        return changes
