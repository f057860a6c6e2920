"""The lookup of a batch in training, as an autograd function: rows pooled going forward, their gradients going back.

    forward    the step's backend is asked for the rows; they are pooled
    backward   the gradients of the bags become those of rows, and go to the step, but for those of frozen tables; it
               sends them once it has all

Shape legend: F features, B batch size, N ids, U unique rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_ecrec.layout.routing import Parts
from torch_ecrec.nn.slices import Bags, PooledBags, Table, without
from torch_ecrec.nn.staging import Crossing
from torch_ecrec.nn.step import SparseStep


class PooledLookup(torch.autograd.Function):
    """Pools rows from the backend in the forward, and passes their gradients to the step in the backward."""

    # anchor: a tensor of the module that looks up, which needs a gradient.
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        step: SparseStep,
        rows: list[Tensor],
        bags: list[Bags],
        crossings: list[Crossing],
        frozen: Sequence[Table],
        *per_id: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights, sums = step.lookup(rows, bags)
        ctx.step, ctx.rows, ctx.bags, ctx.crossings, ctx.ticket = step, rows, bags, crossings, step.ticket(anchor)
        ctx.frozen = frozen
        ctx.weights = weights if any(ctx.needs_input_grad[6:]) else None
        return tuple(pool_all(weights, sums, bags, crossings))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_rows: list[Tensor | None] = [None] * len(ctx.rows)
        of_ids: list[Tensor | None] = [None] * len(gradients)
        of_sums: list[tuple[PooledBags, Tensor]] = []
        all_finite = True
        for i, (part, gradient_BFD) in enumerate(zip(ctx.bags, gradients, strict=True)):
            if gradient_BFD is None:
                continue
            ctx.crossings[i].wait()
            gradient_BFD = part.of_bags(gradient_BFD)
            divisor = ctx.step.gradient_divisor
            of_rows[part.table_group], finite = part.rows_backward(
                gradient_BFD, len(ctx.rows[part.table_group]), divisor
            )
            all_finite &= finite
            if part.pooled is not None:
                sums_GD, finite = part.sums_backward(gradient_BFD, divisor)
                of_sums.append((part.pooled, sums_GD))
                all_finite &= finite
            if ctx.needs_input_grad[6 + i]:
                of_ids[i] = part.ids_backward(gradient_BFD, ctx.weights[part.table_group], divisor)
        rows = ctx.rows
        if ctx.frozen:
            rows, of_rows = without(ctx.frozen, rows, of_rows)
        ctx.step.receive(ctx.ticket, rows, of_rows, all_finite, of_sums, ctx.frozen)
        return (None, None, None, None, None, None, *of_ids)


def pool_all(
    weights: Sequence[Parts], sums: Sequence[Tensor], bags: Sequence[Bags], crossings: Sequence[Crossing]
) -> list[Tensor]:
    """Returns the pooled features of each slice, from what was looked up of each table group."""
    return [
        part.pool(weights[part.table_group], crossing, sums[part.table_group] if part.pooled is not None else None)
        for part, crossing in zip(bags, crossings, strict=True)
    ]
