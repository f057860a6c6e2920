"""What slots make of bags, made again from rows, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.client import pooling
from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.layout.stripes import Layout


def _ids_on(layout: Layout, route: BagRoute, slot: int) -> tuple[Any, Any, Any]:
    """Of a slot's ids: the row in the table group (N,), the bags' lengths (g,), the weights (N,): one bag behind the
    other."""
    rows_N = layout.row_at(slot, route.positions[slot].numpy().astype(np.int64))
    factors_N = np.empty(0, np.float32) if route.factors is None else route.factors[slot].numpy()
    return rows_N, route.lengths[slot].numpy(), factors_N


def sums_of(layout: Layout, route: BagRoute, weights_of: Any, dim: int) -> Tensor:
    """The sums (G, D) of bags: those of each slot's ids, added in the order of slots. `weights_of`: rows (N,) ->
    (N, D) float32."""
    out_GD, seen_G = np.zeros((route.bags, dim), np.float32), np.zeros(route.bags, np.bool_)
    for slot, place_M in enumerate(route.places):
        rows_N, lengths_M, factors_N = _ids_on(layout, route, slot)
        if not len(rows_N):
            continue
        part_MFD = np.zeros((len(place_M), 1, dim), np.float32)
        more = factors_N, bool(len(factors_N)), np.zeros(1, np.bool_)
        parts = [weights_of(torch.from_numpy(rows_N)).contiguous().numpy()]
        pooling.pool(parts, np.arange(len(rows_N)), lengths_M[None], *more, part_MFD)
        before_MD = np.where(seen_G[place_M, None], out_GD[place_M], np.float32(-0.0))
        out_GD[place_M] = before_MD + part_MFD[:, 0]
        seen_G[place_M] = True
    return torch.from_numpy(out_GD)


def rows_of_bags(layout: Layout, route: BagRoute, gradient_GD: Tensor) -> tuple[Tensor, Tensor]:
    """Unique rows (U,) and their gradients (U, D), as a trainer makes them of the gradients of its bags."""
    of_slots = [_ids_on(layout, route, slot) for slot in range(layout.slots)]
    rows_N, lengths_M, factors_N = (np.concatenate(parts) for parts in zip(*of_slots, strict=True))
    rows_U, inverse_N = torch.unique(torch.from_numpy(rows_N), return_inverse=True)
    out_UD = np.zeros((len(rows_U), gradient_GD.shape[1]), np.float32)
    if len(rows_U):
        of_bags, seen_U = gradient_GD.numpy()[np.concatenate(route.places)][:, None], np.zeros(len(rows_U), np.bool_)
        more = factors_N, bool(len(factors_N)), np.zeros(1, np.bool_), np.float32(1), seen_U, out_UD
        pooling.pool_backward(of_bags, inverse_N.numpy(), lengths_M[None], *more)
    return rows_U, torch.from_numpy(out_UD)


def as_rows(
    layouts: Sequence[Layout],
    rows: Sequence[Tensor],
    gradients: Sequence[Tensor],
    bags: Sequence[BagRoute],
    bag_gradients: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The rows and gradients of a push with those of its bags."""
    rows, gradients = list(rows), list(gradients)
    for table_group, (route, gradient_GD) in enumerate(zip(bags, bag_gradients, strict=True)):
        more_U, more_UD = rows_of_bags(layouts[table_group], route, gradient_GD)
        assert not np.intersect1d(more_U.numpy(), rows[table_group].numpy()).size, "rows and bags of the same table"
        rows[table_group], gradients[table_group] = (
            torch.cat([rows[table_group], more_U]),
            torch.cat([gradients[table_group], more_UD]),
        )
    return rows, gradients
