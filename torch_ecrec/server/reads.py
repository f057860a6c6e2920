"""What trainers read of a slot: weights for a step, and whole records as of a step.

A read waits until the steps before it are applied and the records are there. It is shown the records as of its step,
also when later ones have been applied, as far as the log goes back.

Shape legend: U records, D embedding dim, W numbers in a record; lists hold one array per slab.
"""

from __future__ import annotations

import torch

from torch_ecrec.durability.context import Reply, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.records.halves import numbers_of
from torch_ecrec.records.quantised import pack
from torch_ecrec.runtime.tensors import as_tensor


class Reads:
    """Lookups and exports of one slot."""

    def __init__(self, slot: SlotContext, scrubber: Scrubber) -> None:
        self.slot, self.scrubber, self.held = slot, scrubber, slot.held

    def on_lookup(self, request: wire.Lookup, reply: Reply[wire.Rows | wire.Forgotten]) -> None:
        """Weights as they are after the step before the request's."""
        held, rule = self.held, self.held.rule
        positions = [p.numpy() for p in request.positions]

        def attempt() -> wire.Rows | wire.Forgotten | None:
            before = request.step - 1
            if rule.applied < before or self.slot.is_missing(positions):
                return None
            if before < held.log.floor and before < rule.applied:
                return self._forgotten(before)
            weights = []
            for s, (shard, rows) in enumerate(zip(held.shards, positions, strict=True)):
                if rule.applied == before:
                    weights.append(as_tensor(shard.gather_weights(rows, request.bfloat16, request.int8)))
                else:
                    numbers_UW = numbers_of(held.records_as_of(s, rows, before), shard.schema)
                    weight_UD = torch.from_numpy(numbers_UW[:, : shard.schema.dim].copy())
                    if request.int8:
                        weight_UD = torch.from_numpy(pack(weight_UD.numpy()))
                    weights.append(weight_UD.bfloat16() if request.bfloat16 else weight_UD)
            return wire.Rows(weights)

        self.slot.park(attempt, reply)

    def on_export(self, request: wire.Export, reply: Reply[wire.Records | wire.Forgotten]) -> None:
        """Whole records as of a step; parities only when nothing is under way (they are for checks)."""
        held, rule = self.held, self.held.rule
        positions = request.positions.numpy()
        asked = [positions if s == request.slab else positions[:0] for s in range(len(held.shards))]

        def attempt() -> wire.Records | wire.Forgotten | None:
            if request.parity:
                self.scrubber.look(request.slab, True, positions)
                whole = self.slot.whole and all(step >= request.step for step in rule.folded.values())
                parity = held.shards[request.slab].gather(positions, parity=True) if whole else None
                return None if parity is None else wire.Records(torch.from_numpy(parity))
            if request.step < held.log.floor and request.step < rule.applied:
                return self._forgotten(request.step)
            if rule.applied < request.step or self.slot.is_missing(asked, looked=True):
                return None
            return wire.Records(torch.from_numpy(held.records_as_of(request.slab, positions, request.step)))

        self.slot.park(attempt, reply)

    def _forgotten(self, step: int) -> wire.Forgotten:
        """Nobody who takes part in training asks for a step before the watermark, but by a copy that comes late."""
        index, floor = self.held.index, self.held.log.floor
        return wire.Forgotten(f"slot {index} cannot show step {step}: its log begins after step {floor}")
