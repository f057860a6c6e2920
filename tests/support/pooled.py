"""What slots make of bags, made again from rows: bags of whole tables, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.client import pooling
from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.layout.stripes import Layout


def _ids(layout: Layout, route: BagRoute) -> tuple[Tensor, Any, Any]:
    """The row in the table group of each id (N,), the bags' lengths (G,), the weights of ids (N,): one bag behind the
    other."""
    rows: dict[int, Any] = {}
    factors: dict[int, Any] = {}
    for slot, places in enumerate(route.places):
        if not len(places):
            continue
        ends = np.cumsum(route.lengths[slot].numpy())[:-1]
        of_slot = layout.row_at(slot, route.positions[slot].numpy().astype(np.int64))
        assert not rows.keys() & set(places.tolist()), "a bag of a whole table is on one slot"
        rows.update(zip(places.tolist(), np.split(of_slot, ends), strict=True))
        if route.factors is not None:
            factors.update(zip(places.tolist(), np.split(route.factors[slot].numpy(), ends), strict=True))
    lengths_G = np.array([len(rows.get(g, ())) for g in range(route.bags)], np.int32)
    rows_N = np.concatenate([rows[g] for g in sorted(rows)]) if rows else np.empty(0, np.int64)
    factors_N = np.concatenate([factors[g] for g in sorted(factors)]) if factors else np.empty(0, np.float32)
    return torch.from_numpy(rows_N), lengths_G, factors_N


def sums_of(layout: Layout, route: BagRoute, weights_of: Any, dim: int) -> Tensor:
    """The sums (G, D) of bags. `weights_of`: rows (N,) -> (N, D) float32."""
    rows_N, lengths_G, factors_N = _ids(layout, route)
    out_GFD = np.zeros((route.bags, 1, dim), np.float32)
    if len(rows_N):
        index = np.arange(len(rows_N))
        none = np.zeros(1, np.bool_)
        parts = [weights_of(rows_N).contiguous().numpy()]
        pooling.pool(parts, index, lengths_G[None], factors_N, bool(len(factors_N)), none, out_GFD)
    return torch.from_numpy(out_GFD[:, 0])


def rows_of_bags(layout: Layout, route: BagRoute, gradient_GD: Tensor) -> tuple[Tensor, Tensor]:
    """Unique rows (U,) and their gradients (U, D), as a trainer makes them of the gradients of its bags."""
    rows_N, lengths_G, factors_N = _ids(layout, route)
    rows_U, inverse_N = torch.unique(rows_N, return_inverse=True)
    out_UD = np.zeros((len(rows_U), gradient_GD.shape[1]), np.float32)
    if len(rows_U):
        of_bags, seen_U = gradient_GD.numpy()[:, None], np.zeros(len(rows_U), np.bool_)
        more = factors_N, bool(len(factors_N)), np.zeros(1, np.bool_), np.float32(1), seen_U, out_UD
        pooling.pool_backward(of_bags, inverse_N.numpy(), lengths_G[None], *more)
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
