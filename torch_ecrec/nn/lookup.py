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

from torch_ecrec.nn.slices import Bags, Table
from torch_ecrec.nn.staging import Crossing
from torch_ecrec.nn.step import SparseStep


class PooledLookup(torch.autograd.Function):
    """Pools rows from the backend in the forward, and passes their gradients to the step in the backward."""

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
        weights = step.lookup(rows)
        ctx.step, ctx.rows, ctx.bags, ctx.crossings, ctx.ticket = step, rows, bags, crossings, step.ticket()
        ctx.frozen = frozen
        ctx.weights = weights if any(ctx.needs_input_grad[6:]) else None
        return tuple(part.pool(weights[part.slab], crossing) for part, crossing in zip(bags, crossings, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_rows: list[Tensor | None] = [None] * len(ctx.rows)
        of_ids: list[Tensor | None] = [None] * len(gradients)
        all_finite = True
        for i, (part, gradient_BFD) in enumerate(zip(ctx.bags, gradients, strict=True)):
            if gradient_BFD is None:
                continue
            ctx.crossings[i].wait()
            gradient_BFD = part.of_bags(gradient_BFD)
            divisor = ctx.step.gradient_divisor
            of_rows[part.slab], finite = part.rows_backward(gradient_BFD, len(ctx.rows[part.slab]), divisor)
            all_finite &= finite
            if ctx.needs_input_grad[6 + i]:
                of_ids[i] = part.ids_backward(gradient_BFD, ctx.weights[part.slab], divisor)
        rows = ctx.rows
        if ctx.frozen:
            rows, of_rows = _without(ctx.frozen, rows, of_rows)
        ctx.step.receive(ctx.ticket, rows, of_rows, all_finite)
        return (None, None, None, None, None, None, *of_ids)


def _without(
    frozen: Sequence[Table], rows: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the rows (U,) and gradients (U, D) of each slab without those of frozen tables."""
    rows, gradients = list(rows), list(gradients)
    for slab in {table.slab for table in frozen}:
        rows_U, gradient_UD = rows[slab], gradients[slab]
        if gradient_UD is None:
            continue
        keep_U = torch.ones(len(rows_U), dtype=torch.bool, device="cpu")
        for table in frozen:
            if table.slab == slab:
                keep_U &= (rows_U < table.first_row) | (rows_U >= table.first_row + table.rows)
        rows[slab], gradients[slab] = rows_U[keep_U], gradient_UD[keep_U]
    return rows, gradients
