"""Folds sent: the ordered stream of one slot's deltas to one holder of its parities.

A stream sends steps in order once the holder is attached. A new incarnation on either side detaches it; the source then
attaches again, and the holder says from where (docs/design.md, rules 1 to 5).

A fold carries one part for each slab and each `Run` of the pair (`layout/stripes.py`), slab by slab: the records of a
run lie side by side in the source's log, and so do their parities at the holder, so nothing is copied to split a step.

Shape legend: U records, B record bytes; lists hold one array per slab and run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from torch_ecrec.durability.context import HostContext, Pending
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.protocol import wire


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
        self.runs = [layout.runs(held.index, holder) for layout in held.layouts]

    def stop(self) -> None:
        """Nothing is sent any more until it is attached again."""
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
            self.pump()

        self.attaching = self.host.ask(self.holder, make, done, bound_to=incarnation)

    def pump(self) -> None:
        """Sends every applied step that the holder was not sent yet."""
        while self.attached and self.sent < self.held.rule.applied:
            self.sent += 1
            self._send(self.sent)

    def _send(self, step: int) -> None:
        held = self.held
        incarnation = held.rule.incarnations[self.holder]
        positions, deltas = self._part(step)
        fold = wire.Fold(
            self.holder, incarnation, held.index, held.incarnation, step, held.log.floor, positions, deltas
        )

        def done(answer: wire.Folded) -> None:
            self._on_folded(incarnation, answer.step)

        self.under_way[step] = self.host.ask(self.holder, lambda _: fold, done, bound_to=incarnation)

    def _part(self, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The deltas of a step whose parities the holder has: views of the log."""
        positions, deltas = [], []
        if step < self.held.rule.applied:  # it has waited; what was applied a moment ago is as it was made
            self.held.log.check(step)
        for runs, (positions_U, deltas_UB) in zip(self.runs, self.held.log.get(step), strict=True):
            for run in runs:
                begin, end = np.searchsorted(positions_U, (run.first, run.end))
                positions.append(torch.from_numpy(positions_U[begin:end]))
                deltas.append(torch.from_numpy(deltas_UB[begin:end]))
        return positions, deltas

    def _on_folded(self, incarnation: int, step: int) -> None:
        for done in [t for t in self.under_way if t <= step]:
            self.under_way.pop(done).cancel()
        rule = self.held.rule
        before = rule.confirmed[self.holder]
        rule.on_confirmed(self.holder, incarnation, step)
        self.folded(self.holder, before, rule.confirmed[self.holder])
