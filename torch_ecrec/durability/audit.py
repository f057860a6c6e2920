"""Whether parities are the code of their stripes: compared by seals, as of one vector of steps.

A parity's seal is the code of its stripe's seals (`codec/seals.py`). So who holds parities asks for the seals of their
stripes' data records, 4 bytes each, as of the steps that it has folded of them, and puts them together. Where they do
not fit although every record fits its own seal, a delta was folded wrongly, twice or not at all: no bit of memory has
changed, but a repair would give wrong bytes. The data is what trainers see, so the parity is encoded again.

An answer counts only if nothing was taken back and nobody was replaced since it was asked for; what could not be
compared now is in the next round.

Shapes: U parities whose stripes share a base, M of them that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from torch_ecrec.codec import seals
from torch_ecrec.durability.context import HostContext, Reply, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.layout.stripes import StripeGroup
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import Refused


class ParityAudit:
    """The comparisons of one life of a slot, as a holder and as a source."""

    def __init__(self, slot: SlotContext, host: HostContext, scrubber: Scrubber) -> None:
        self.slot, self.host, self.scrubber, self.held = slot, host, scrubber, slot.held

    def begin(self, table_group: int, first: int, end: int) -> None:
        """Asks for what is needed to compare the parities from `first` to `end`, which is not one of them."""
        held, positions = self.held, np.arange(first, end)
        there = held.missing.present(table_group, True, positions)
        if there is not None:
            positions = positions[there]
        if held.sealed and len(positions):
            for group in held.layouts[table_group].group(held.index, True, positions):
                self._compare(table_group, positions[group.where], group)

    def _compare(self, table_group: int, positions_U: np.ndarray, group: StripeGroup) -> None:
        held, base = self.held, group.base
        layout, code, rule = held.layouts[table_group], held.code, held.rule
        sources = [int(slot) for slot in layout.member_slot[base, : layout.k]]
        if any(source not in rule.folded for source in sources):
            return
        known = self.host.history, {source: rule.incarnations[source] for source in sources}
        left_U = held.shards[table_group].seals_at(
            positions_U, parity=True
        )  # of these: what no member accounts for yet
        if not self.scrubber.came_whole(table_group, True):
            return  # in the next round
        answers: dict[int, wire.Seals] = {}

        def done(member: int, answer: wire.Seals | None) -> None:
            if answer is None or self.slot.dead:
                return  # in the next round
            answers[member] = answer
            now = self.host.history, {source: rule.incarnations[source] for source in sources}
            if len(answers) < layout.k or now != known:
                return
            for one, found in answers.items():
                exists = layout.exists(base, one, group.rotations)
                coefficient = int(code.coefficients[group.member - layout.k, one])
                left_U[exists] ^= seals.times(coefficient, found.seals.numpy().view(np.uint32))
            wrong_M = positions_U[left_U != 0]
            if len(wrong_M):
                self.scrubber.on_mismatch(table_group, wrong_M)

        for member, source in enumerate(sources):
            exists = layout.exists(base, member, group.rotations)
            at = torch.from_numpy(layout.position(base, member, group.rotations)[exists])
            if len(at):
                make: Callable[[int], wire.FetchSeals] = partial(
                    self._ask_for, source, table_group, at, rule.folded[source]
                )
                self.host.ask_once(source, make, partial(done, member))
            else:
                answers[member] = wire.Seals(torch.empty(0, dtype=torch.int32, device="cpu"))

    def _ask_for(self, source: int, table_group: int, at: torch.Tensor, step: int, incarnation: int) -> wire.FetchSeals:
        return wire.FetchSeals(source, incarnation, table_group, at, step)

    def on_fetch(self, request: wire.FetchSeals, reply: Reply[wire.Seals]) -> None:
        """Seals of data records as of a step."""
        held, positions_U = self.held, request.positions.numpy()
        if not held.sealed or not self.slot.ready or held.missing.lacks(request.table_group, False, positions_U):
            reply(Refused("seals are not kept, or records are missing"))
            return
        changes = held.data_changes(request.table_group, positions_U, request.step)
        if changes is None:
            reply(Refused("cannot present this step"))
            return
        seals_U = held.shards[request.table_group].seals_at(positions_U)
        if not self.scrubber.came_whole(request.table_group, False):
            reply(Refused("read wrongly from a disk"))
            return
        for rows_M, deltas_MB, _ in changes:
            seals_U[rows_M] ^= seals.seals_of(deltas_MB)
        reply(wire.Seals(torch.from_numpy(seals_U.view(np.int32))))
