"""What trainers read of a slot: weights for a step, and whole records as of a step.

A read waits until the steps before it are applied and the records are there. It is shown the records as of its step,
also when later ones have been applied, as far as the log goes back.

Shape legend: U records, D embedding dim, W numbers in a record; lists hold one array per table group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from torch_ecrec.durability.context import Reply, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.records.halves import numbers_of
from torch_ecrec.records.quantised import pack
from torch_ecrec.records.shard import pool_numbers
from torch_ecrec.runtime.tensors import as_tensor
from torch_ecrec.server.apply import with_bags

READS_MOST = 8  # of what a disk gives wrongly, and rightly when it is looked at


class Reads:
    """Lookups and exports of one slot."""

    def __init__(self, slot: SlotContext, scrubber: Scrubber) -> None:
        self.slot, self.scrubber, self.held = slot, scrubber, slot.held

    def on_lookup(self, request: wire.Lookup, reply: Reply[wire.Rows | wire.Forgotten]) -> None:
        """Weights as they are after the step before the request's."""
        before = request.step - 1
        look_up = self._lookup_of(request, before, request.int8)

        def attempt() -> wire.Rows | wire.Forgotten | None:
            return self._forgotten(before) if self._has_forgotten(before) else look_up()

        self.slot.park(attempt, reply)

    def on_push(self, request: wire.Push, reply: Reply[wire.Acknowledged]) -> None:
        """Answers a push that carries lookups, once its step is applied: with the weights after that step, and with the
        last step up to it that is acknowledged."""
        rule, step = self.held.rule, request.step
        lookups = [self._lookup_of(ask, step, int8=False) for ask in request.then]

        def attempt() -> wire.Acknowledged | None:
            if self._has_forgotten(step):
                return wire.Acknowledged(step, [], self.slot.wants_hints) if rule.is_acknowledged(step) else None
            found = [rows for look_up in lookups if (rows := look_up()) is not None]
            through = min(step, rule.acknowledged)
            return wire.Acknowledged(through, found, self.slot.wants_hints) if len(found) == len(lookups) else None

        self.slot.park(attempt, reply)

    def _has_forgotten(self, step: int) -> bool:
        return step < self.held.log.floor and step < self.held.rule.applied

    def _lookup_of(self, asked: wire.Lookup | wire.Ask, step: int, int8: bool) -> Callable[[], wire.Rows | None]:
        """Returns what gives the rows as of a step that the log knows; None as long as they are not there."""
        held, rule = self.held, self.held.rule
        positions = [p.numpy() for p in asked.positions]
        touched = with_bags(positions, asked.bags)
        if rule.applied < step:
            self.slot.expect(touched)

        def look_up() -> wire.Rows | None:
            if rule.applied < step or self.slot.is_missing(touched):
                return None
            weights = []
            for s, (shard, rows) in enumerate(zip(held.shards, positions, strict=True)):
                if rule.applied == step:
                    weights.append(as_tensor(shard.gather_weights(rows, asked.bfloat16, int8)))
                else:
                    numbers_UW = numbers_of(held.records_as_of(s, rows, step), shard.schema)
                    weight_UD = torch.from_numpy(numbers_UW[:, : shard.schema.dim].copy())
                    if int8:
                        weight_UD = torch.from_numpy(pack(weight_UD.numpy()))
                    weights.append(weight_UD.bfloat16() if asked.bfloat16 else weight_UD)
            pooled = [
                self._pooled(table_group, bags, step, asked.bfloat16) for table_group, bags in enumerate(asked.bags)
            ]
            return wire.Rows(weights, pooled)

        return look_up

    def _pooled(self, table_group: int, bags: wire.Bags, step: int, bfloat16: bool) -> torch.Tensor:
        """Returns the sums (G, D) of some bags as of a step that the log knows."""
        held = self.held
        positions_N, lengths_G = bags.positions.numpy(), bags.lengths.numpy()
        factors_N = None if bags.factors is None else bags.factors.numpy()
        shard = held.shards[table_group]
        if held.rule.applied == step:
            return as_tensor(shard.pool(positions_N, lengths_G, factors_N, bfloat16))
        different_U, at_N = np.unique(positions_N.astype(np.int64), return_inverse=True)
        numbers_UW = numbers_of(held.records_as_of(table_group, different_U, step), shard.schema)
        pooled_GD = torch.from_numpy(pool_numbers(numbers_UW, shard.schema.dim, at_N, lengths_G, factors_N))
        return pooled_GD.bfloat16() if bfloat16 else pooled_GD

    def on_export(self, request: wire.Export, reply: Reply[wire.Records | wire.Forgotten]) -> None:
        """Answers with whole records as of a step; with parities only when nothing is under way (they are for
        checks)."""
        held, rule = self.held, self.held.rule
        positions = request.positions.numpy()
        asked = [positions if s == request.table_group else positions[:0] for s in range(len(held.shards))]

        def attempt() -> wire.Records | wire.Forgotten | None:
            if request.parity:
                self.scrubber.look(request.table_group, True, positions)
                for _ in range(READS_MOST):
                    if not self.slot.whole or any(step < request.step for step in rule.folded.values()):
                        return None
                    parity = held.shards[request.table_group].gather(positions, parity=True)
                    if self.scrubber.came_whole(request.table_group, True):
                        return wire.Records(torch.from_numpy(parity))
                return None
            if request.step < held.log.floor and request.step < rule.applied:
                return self._forgotten(request.step)
            if rule.applied < request.step or self.slot.is_missing(asked, looked=True):
                return None
            return wire.Records(torch.from_numpy(held.records_as_of(request.table_group, positions, request.step)))

        self.slot.park(attempt, reply)

    def _forgotten(self, step: int) -> wire.Forgotten:
        """Returns the answer for a step that the log does not reach. Nobody who takes part in training asks for one
        before the watermark, but by a copy that comes late."""
        index, floor = self.held.index, self.held.log.floor
        return wire.Forgotten(f"slot {index} cannot show step {step}: its log begins after step {floor}")
