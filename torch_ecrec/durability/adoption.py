"""The new host of a lost slot finds out where the slot stands: the cut, and the slot's own log up to it.

It asks every holder what it has folded of the slot (`Adopt`). The cut is the last step that all who are caught up have
folded; holders undo what they folded later and hand their logs over (`Cut`). From these the slot's log is put together,
and the slot serves (docs/design.md, rule 3).

Shape legend: U records; lists hold one array per table group and run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from torch_ecrec.durability.context import HostContext, Pending, SlotContext
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.step_rule import choose_cut

logger = logging.getLogger(__name__)


class Adoption:
    """The adoption of one life of a slot; idle until it begins."""

    def __init__(self, slot: SlotContext, host: HostContext) -> None:
        self.slot, self.host, self.held = slot, host, slot.held
        self.asked: list[Pending] = []
        self.begun = False

    def cancel(self) -> None:
        for exchange in self.asked:
            exchange.cancel()

    def begin(self) -> None:
        """Asks every holder what it has folded of this slot; the cut follows from that.

        Asks again when an era begins meanwhile: all that counts for one cut is said before anybody goes back, or after.
        """
        held, reports = self.held, {}
        self.begun = True
        self.cancel()
        holders = held.rule.holders

        def ask(holder: int) -> Pending:
            def done(answer: wire.Adopted) -> None:
                reports[holder] = (answer.folded, answer.caught_up)
                if len(reports) == len(holders):
                    cut = choose_cut(reports.values())
                    if cut is None:
                        self.slot.give_up()
                    else:
                        self._cut(cut)

            def make(incarnation: int) -> wire.Adopt:
                return wire.Adopt(holder, incarnation, held.index, held.incarnation, self.host.frozen)

            return self.host.ask(holder, make, done)

        logger.info("slot %d: new host, asks slots %s what they have folded", held.index, list(holders))
        self.asked = [ask(holder) for holder in holders]

    def _cut(self, cut: int) -> None:
        held, logs = self.held, {}
        holders = held.rule.holders

        def ask(holder: int) -> Pending:
            def done(answer: wire.CutLog) -> None:
                logs[holder] = answer
                if len(logs) == len(holders):
                    self._on_logs(cut, {h: log for h, log in logs.items() if log.caught_up})

            def make(incarnation: int) -> wire.Cut:
                return wire.Cut(holder, incarnation, held.index, held.incarnation, self.host.frozen, cut)

            return self.host.ask(holder, make, done)

        logger.info("slot %d: cut at step %d", held.index, cut)
        self.asked = [ask(holder) for holder in holders]

    def _on_logs(self, cut: int, logs: dict[int, wire.CutLog]) -> None:
        """Puts this slot's own log together: each holder has the deltas of the records it keeps parity of."""
        held = self.held
        if self._members(logs) < self._members(held.rule.holders):
            self.slot.give_up()
            return
        floor = min(cut, max(log.floor for log in logs.values()))
        own = held.new_log(floor)
        for step in range(floor + 1, cut + 1):
            at = [(h, log, log.steps.index(step)) for h, log in logs.items()]
            positions, deltas = [], []
            for table_group in range(len(held.shards)):
                of_table_group = {h: self._of_table_group(h, table_group) for h in logs}
                every = np.concatenate(
                    [part.numpy() for h, log, i in at for part in log.positions[i][of_table_group[h]]]
                )
                parts = np.concatenate([part.numpy() for h, log, i in at for part in log.deltas[i][of_table_group[h]]])
                positions_U, first = np.unique(every, return_index=True)  # with r > 1 several holders have the same
                positions.append(positions_U)
                deltas.append(np.ascontiguousarray(parts[first]))
            own.append(step, positions, deltas)
        self.asked = []
        logger.info("slot %d: serves, %d recent steps in its log", held.index, cut - floor)
        self.slot.become_ready(cut, floor, own)

    def _members(self, holders: Iterable[int]) -> set[int]:
        """As which members of their stripes this slot has records whose parities are on these holders."""
        runs = [run for layout in self.held.layouts for h in holders for run in layout.runs(self.held.index, h)]
        return {run.member for run in runs if run.first < run.end}

    def _of_table_group(self, holder: int, table_group: int) -> slice:
        """Returns which parts of a fold to a holder are of one table group."""
        runs = len(self.held.layouts[table_group].runs(self.held.index, holder))
        return slice(table_group * runs, (table_group + 1) * runs)
