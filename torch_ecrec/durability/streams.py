"""Folds sent: the ordered stream of one slot's deltas to one holder of its parities.

A stream sends steps in order once the holder is attached. A new incarnation on either side detaches it; the source then
attaches again, and the holder says from where (docs/design.md, rules 1 to 5).

A fold carries one part for each table group and each `SharedRun` of the pair (`layout/stripes.py`), table group by
table group: the records of a run lie side by side in the source's log, and so do their parities at the holder, so
nothing is copied to split a step. It is split once, and all holders get views of the same parts (`Parts`).

Shape legend: U records, B record bytes; lists hold one array per table group and run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from torch_ecrec.durability.context import HostContext, Pending
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.protocol import wire

Part = tuple[torch.Tensor, torch.Tensor]  # (U,) positions and (U, B) deltas


class Parts:
    """A slot's steps, each split once for all the holders that it is sent to now. Not kept: it holds on to the log.

    Args:
        held: of the slot.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._of_step: dict[int, list[dict[int, Part]]] = {}

    def of(self, step: int) -> list[dict[int, Part]]:
        """Returns what the step changed, for each table group by the member of their stripes that the records are:
        views."""
        found = self._of_step.get(step)
        if found is None:
            found = self._of_step[step] = self._split(step)
        return found

    def _split(self, step: int) -> list[dict[int, Part]]:
        held = self._held
        if step < held.rule.applied:  # it has waited; what was applied a moment ago is as it was made
            held.log.check(step)
        found = []
        for layout, (positions_U, deltas_UB) in zip(held.layouts, held.log.get(step), strict=True):
            cuts = positions_U.searchsorted(layout.data_first[held.index]).tolist()
            members = layout.data_member[held.index].tolist()
            found.append(
                {
                    member: (torch.from_numpy(positions_U[begin:end]), torch.from_numpy(deltas_UB[begin:end]))
                    for member, (begin, end) in zip(members, pairwise(cuts), strict=True)
                }
            )
        return found


class FoldStream:
    """The ordered stream of one slot's deltas to one holder.

    Args:
        held: of the slot.
        host: reaches the holder.
        holder: which slot.
        attached: true at the start of a job, when both know all there is.
        folded: called with the holder, and the last steps that it had folded before and has now, whenever it says so.
        held_by_all: gives the greatest step that all holders have had at once.
    """

    def __init__(
        self,
        held: Holdings,
        host: HostContext,
        holder: int,
        attached: bool,
        folded: Callable[[int, int, int], None],
        held_by_all: Callable[[], int],
    ) -> None:
        self.held_by_all = held_by_all
        self.held, self.host, self.holder, self.attached, self.folded = held, host, holder, attached, folded
        self.sent = 0
        self.under_way: dict[int, Pending] = {}
        self.attaching: Pending | None = None
        # for each part of a fold: table group, and as which member of their stripes the slot has its records
        self.members = [
            (table_group, run.member)
            for table_group, layout in enumerate(held.layouts)
            for run in layout.runs(held.index, holder)
        ]

    def stop(self) -> None:
        """Stops sending, until it is attached again."""
        self.attached = False
        for exchange in [*self.under_way.values(), self.attaching]:
            if exchange is not None:
                exchange.cancel()
        self.under_way, self.attaching = {}, None

    def attach(self) -> None:
        """Meets the holder's present incarnation; folds flow once it has answered."""
        self.stop()
        held = self.held
        incarnation = held.rule.incarnations[self.holder]

        def make(_: int) -> wire.Attach:
            floor, least = held.log.floor, self.held_by_all()
            return wire.Attach(self.holder, incarnation, held.index, held.incarnation, floor, least)

        def done(answer: wire.Attached) -> None:
            self.attaching = None
            self.attached, self.sent = True, answer.folded
            self._on_folded(incarnation, answer.folded)
            self.pump(Parts(held))

        self.attaching = self.host.ask(self.holder, make, done, bound_to=incarnation)

    def pump(self, parts: Parts) -> None:
        """Sends every applied step that the holder was not sent yet. `parts`: of the slot's steps."""
        while self.attached and self.sent < self.held.rule.applied:
            self.sent += 1
            self._send(self.sent, parts.of(self.sent))

    def _send(self, step: int, parts: list[dict[int, Part]]) -> None:
        held = self.held
        incarnation = held.rule.incarnations[self.holder]
        mine = [parts[table_group][member] for table_group, member in self.members]
        positions, deltas = [positions_U for positions_U, _ in mine], [deltas_UB for _, deltas_UB in mine]
        fold = wire.Fold(
            self.holder, incarnation, held.index, held.incarnation, step, held.log.floor, positions, deltas
        )

        def done(answer: wire.Folded) -> None:
            self._on_folded(incarnation, answer.step)

        self.under_way[step] = self.host.ask(self.holder, lambda _: fold, done, bound_to=incarnation)

    def _on_folded(self, incarnation: int, step: int) -> None:
        for done in [t for t in self.under_way if t <= step]:
            self.under_way.pop(done).cancel()
        rule = self.held.rule
        before = rule.confirmed[self.holder]
        rule.on_confirmed(self.holder, incarnation, step)
        self.folded(self.holder, before, rule.confirmed[self.holder])
