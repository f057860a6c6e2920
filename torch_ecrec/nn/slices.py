"""Maps the features of a sharded module to table groups, and pools their bags on the host.

    Table   one table of a module and its place in the job: table group, first row
    Slice   the features of a module that live in one table group; makes bags of a batch
    Bags    the bags of one slice of a batch: pools rows into features, and takes their gradients apart

    table `a`: 100 rows, table `b`: 50 rows, same dim and optimizer: one table group of 150 rows
    batch      a: [[7], [7, 2]]   b: [[3], []]       bags of two samples
    asked for  rows [2, 7, 103] of the group         unique, in whatever order the backend likes; first row plus id
    pooled     a: [w7], [w7 + w2]   b: [w103], [0]   sum; mean divides by the number of ids

The arithmetic is `client/pooling.py`'s. Asks nobody for rows.

Shape legend: F features, B batch size, N ids, U unique rows, D embedding dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec.client import pooling
from torch_ecrec.layout.placing import are_long, are_long_in_parts
from torch_ecrec.layout.routing import BagRoute, Homes, Parts, join_bags, route_bags
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.nn.repeats import bag_of_sample, lengths_of
from torch_ecrec.nn.staging import Crossing
from torch_ecrec.records.schema import Schema
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.tensors import as_array

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NO_WEIGHTS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Table:
    """One table of a sharded module. `name` is its name in the module, `job_name` that in the job."""

    name: str
    job_name: str
    table_group: int
    first_row: int
    rows: int
    dim: int
    schema: Schema
    features: tuple[str, ...]
    pooling: PoolingType
    optimizer: str
    home: tuple[int, int] | None = None  # the slot that has all its rows, and where they begin there
    slots: int = 1  # so many have some of its rows, at most

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, both in state dicts and on the servers."""
        return DTYPES[self.schema.weights]


class Slice:
    """The features of one module that live in one table group, in the order of the module's output.

    Args:
        places: the column of each feature in the output, its name and its table.
        max_gradient: see `OptimizerSpec`.
    """

    def __init__(
        self, table_group: int, dim: int, places: Sequence[tuple[int, str, Table]], max_gradient: float | None = None
    ) -> None:
        self.table_group, self.dim, self.limit = table_group, dim, math.inf if max_gradient is None else max_gradient
        self.columns = [column for column, _, _ in places]  # position of each feature among the module's outputs
        self.features = [feature for _, feature, _ in places]
        self.tables = [table for _, _, table in places]
        self.first_F = np.array([table.first_row for table in self.tables], np.int64)
        self.rows_F = np.array([table.rows for table in self.tables], np.int64)
        self.mean_F = np.array([table.pooling is PoolingType.MEAN for table in self.tables])
        whole = [(f, *table.home, table.rows) for f, table in enumerate(self.tables) if table.home is not None]
        whole.sort(key=lambda home: home[1])  # by slot: what is pooled there comes, and goes, in a piece
        self.homes = Homes(*np.array(whole, np.int64).reshape(-1, 4).T.copy())
        self.dealt_D = np.array([f for f, table in enumerate(self.tables) if table.home is None], np.int64)
        _, firsts_T, self._table_D = np.unique(self.first_F[self.dealt_D], return_index=True, return_inverse=True)
        dealt = [self.tables[f] for f in self.dealt_D[firsts_T].tolist()]
        self._rows_T = np.array([table.rows for table in dealt], np.int64)
        self._slots_T = np.array([table.slots for table in dealt], np.int64)

    def bags(
        self,
        features: KeyedJaggedTensor,
        weighted: bool,
        arrange: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        repeats: tuple[list[str], Tensor] | None = None,
        layouts: Sequence[Layout] = (),
        pooling: str = "rows",
    ) -> tuple[Tensor, Bags]:
        """Returns the unique rows of the table group (U,) of the ids of `features`, in this slice's order, and how they
        are pooled.

        Args:
            repeats: the batch's inverse indices, if its features have batch sizes of their own.
            layouts: of each table group, where slots may pool.
            pooling: of which tables they may; see `EmbeddingBackend.pooling`.

        Raises:
            ValueError: an id is not a row of its table, or an inverse index no bag of its feature.
        """
        # Copies, which the backward reads: a reader may fill the batch's memory with the next one before.
        per_id_N = features.weights().to("cpu", torch.float32, copy=True).contiguous() if weighted else None
        ids_N, lengths_FB = _ids_of(features), lengths_of(features).copy()
        index_FN = None if repeats is None else bag_of_sample(repeats, self.features, features.stride_per_key())
        pooled = None
        if pooling != "rows" and (per_id_N is None or not per_id_N.requires_grad):
            whole = self._is_long(lengths_FB)
            dealt_P = self._long_dealt(lengths_FB) if pooling == "parts" else self.dealt_D[:0]
            layout = layouts[self.table_group]
            if (whole or len(dealt_P)) and _fits(layout):
                pooled, ids_N, lengths_FB, per_id_N = self._split(ids_N, lengths_FB, per_id_N, layout, whole, dealt_P)
        rows_U, inverse_N = arrange(self.table_group, self._rows(ids_N, lengths_FB))
        inverse, of_slice = inverse_N.numpy(), (self.mean_F, self.limit, index_FN)
        return rows_U, Bags(self.table_group, self.dim, inverse, lengths_FB, per_id_N, *of_slice, pooled)

    def _is_long(self, lengths_FB: np.ndarray) -> bool:
        """Returns whether one vector for each bag of the whole tables is clearly less than their rows."""
        of_whole = lengths_FB[self.homes.feature_P]
        return bool(are_long(of_whole.sum(), np.count_nonzero(of_whole))) and bool(of_whole.any())

    def _long_dealt(self, lengths_FB: np.ndarray) -> np.ndarray:
        """Returns the features of those tables on several slots for whose bags a vector from each slot is clearly less
        than their rows.

        It depends on the batch alone: sums of parts have other bits than a sum of rows, and a step that is made again
        must choose alike. All features of a table go the same way, since a push has each row once.
        """
        lengths_DB = lengths_FB[self.dealt_D]
        ids_T, bags_T = np.zeros((2, len(self._rows_T)), np.int64)
        np.add.at(ids_T, self._table_D, lengths_DB.sum(axis=1))
        np.add.at(bags_T, self._table_D, np.count_nonzero(lengths_DB, axis=1))
        long_T = are_long_in_parts(ids_T, self._rows_T, bags_T, self._slots_T)
        chosen: np.ndarray = self.dealt_D[(long_T & (bags_T > 0))[self._table_D]]
        return chosen

    def _split(
        self,
        ids_N: Tensor,
        lengths_FB: np.ndarray,
        per_id_N: Tensor | None,
        layout: Layout,
        whole: bool,
        dealt_P: np.ndarray,
    ) -> tuple[PooledBags, Tensor, np.ndarray, Tensor | None]:
        """Takes the bags that slots pool apart: returns them, and ids, lengths and weights of the others.

        Args:
            layout: of the table group.
            whole: those of all whole tables are pooled.
            dealt_P: features of other tables whose bags are pooled.
        """
        routes = []
        if whole:
            factors_N = _NO_WEIGHTS if per_id_N is None else per_id_N.numpy()
            there = self.homes.route(layout.slots, ids_N.numpy(), lengths_FB, factors_N)
            if isinstance(there, int):
                raise self._out_of_range(ids_N, lengths_FB, there)
            routes.append(there)
        ends_F = lengths_FB.sum(axis=1).cumsum()

        def of(values_N: Tensor, features_P: np.ndarray) -> Tensor:
            spans = [(int(ends_F[f]) - int(lengths_FB[f].sum()), int(ends_F[f])) for f in features_P.tolist()]
            return torch.cat([values_N[begin:end] for begin, end in spans]) if spans else values_N[:0]

        if len(dealt_P):
            only_FB = np.zeros_like(lengths_FB)
            only_FB[dealt_P] = lengths_FB[dealt_P]
            rows_N = self._rows(of(ids_N, dealt_P), only_FB)
            lengths_G = torch.from_numpy(np.ascontiguousarray(lengths_FB[dealt_P], np.int32).reshape(-1))
            factors = None if per_id_N is None else of(per_id_N, dealt_P)
            routes.append(route_bags(layout, rows_N, lengths_G, factors))
        feature_P = np.concatenate([self.homes.feature_P if whole else dealt_P[:0], dealt_P])
        lengths_PB = np.ascontiguousarray(lengths_FB[feature_P], np.int32)
        tables = [self.tables[f] for f in feature_P.tolist()]
        pooled = PooledBags(tables, feature_P, lengths_PB, join_bags(routes))
        rest = np.setdiff1d(np.arange(len(self.tables)), feature_P)
        rest_FB = lengths_FB.copy()
        rest_FB[feature_P] = 0
        return pooled, of(ids_N, rest), rest_FB, None if per_id_N is None else of(per_id_N, rest)

    def ids(
        self, features: KeyedJaggedTensor, arrange: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Bags]:
        """Like `bags`, but each id is a bag of its own. Those of one feature follow those of the feature before."""
        rows_U, inverse_N, _ = self._unique(features, arrange)
        each_1N = np.ones((1, len(inverse_N)), np.int32)
        return rows_U, Bags(self.table_group, self.dim, inverse_N, each_1N, None, np.zeros(1, np.bool_), self.limit)

    def _unique(
        self, features: KeyedJaggedTensor, arrange: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Returns unique rows of the table group (U,), the index of each id's row among them (N,), and ids per bag (F,
        B)."""
        lengths_FB = lengths_of(features)
        rows_U, inverse_N = arrange(self.table_group, self._rows(_ids_of(features), lengths_FB))
        return rows_U, inverse_N.numpy(), lengths_FB

    def _rows(self, ids_N: Tensor, lengths_FB: np.ndarray) -> Tensor:
        """Returns the row in the table group of each id (N,)."""
        rows_N = np.empty(len(ids_N), np.int64)
        at = pooling.to_table_group_rows(ids_N.numpy(), lengths_FB, self.first_F, self.rows_F, rows_N)
        if at >= 0:
            raise self._out_of_range(ids_N, lengths_FB, at)
        return torch.from_numpy(rows_N)

    def _out_of_range(self, ids_N: Tensor, lengths_FB: np.ndarray, at: int) -> ValueError:
        feature = int((lengths_FB.sum(axis=1).cumsum() <= at).sum())
        table = self.tables[feature]
        return ValueError(
            f"id {int(ids_N[at])} of feature {self.features[feature]} is out of range:"
            f" table {table.name} has {table.rows} rows"
        )


@dataclass
class PooledBags:
    """Those bags of a slice that slots pool, of P of its features: bag p * B + b is that of feature p and sample b.

    Args:
        tables: of each feature.
        feature_P: which of the slice's features these are: slot by slot, ascending on each.
        lengths_PB: int32, ids per bag.
        there: where the rows live.
    """

    tables: list[Table]
    feature_P: np.ndarray
    lengths_PB: np.ndarray
    there: BagRoute

    def as_rows(
        self, gradient_GD: Tensor, layout: Layout, arrange: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns unique rows (U,) and their gradients (U, D), from those of the sums: what a slot makes of them.

        Args:
            layout: of the table group.
        """
        slots = range(len(self.there.positions))
        of_slots = [layout.row_at(slot, self.there.positions[slot].numpy().astype(np.int64)) for slot in slots]
        rows_U, inverse_N = arrange(self.tables[0].table_group, torch.from_numpy(np.concatenate(of_slots)))
        factors = [] if self.there.factors is None else self.there.factors
        of_rows_UD = torch.empty((len(rows_U), gradient_GD.shape[1]), dtype=torch.float32, device="cpu")
        pooling.pool_backward(
            torch.cat(self.there.split(gradient_GD)).numpy()[:, None],
            inverse_N.numpy(),
            torch.cat(self.there.lengths).numpy()[None],
            torch.cat(factors).numpy() if factors else _NO_WEIGHTS,
            bool(factors),
            np.zeros(1, np.bool_),
            np.float32(1),
            np.zeros(len(rows_U), np.bool_),
            of_rows_UD.numpy(),
        )
        return rows_U, of_rows_UD


@dataclass
class Bags:
    """The bags of a batch that belong to one slice, and how their rows are pooled.

    Args:
        table_group, dim: of the slice.
        inverse_N: index of each id's row among the rows looked up.
        lengths_FB: ids per bag.
        per_id_N: weight of each id, or None.
        mean_F: bool, whether a feature is averaged.
        limit: gradients of pooled values are clamped to plus or minus this.
        index_FN: for each feature, the bag of each of N samples; None: sample i has bag i.
        pooled: the bags of those features that slots pool, which have no ids in the fields above.
    """

    table_group: int
    dim: int
    inverse_N: np.ndarray
    lengths_FB: np.ndarray
    per_id_N: Tensor | None
    mean_F: np.ndarray
    limit: float = math.inf
    index_FN: np.ndarray | None = None
    pooled: PooledBags | None = None

    def _weights(self) -> np.ndarray:
        return _NO_WEIGHTS if self.per_id_N is None else self.per_id_N.detach().numpy()

    def pool(self, weights: Parts, crossing: Crossing, sums: Tensor | None = None) -> Tensor:
        """Pools rows that were looked up to (B, F, D), or repeated to (N, F, D), in memory of the crossing.

        Args:
            sums: (G, D), what slots have pooled.
        """
        features, batch = self.lengths_FB.shape
        shape = (batch, features, self.dim)
        if self.index_FN is None:
            out_BFD = crossing.empty(*shape)
        else:
            out_BFD = torch.empty(shape, dtype=torch.float32, device="cpu")
        weighted = self.per_id_N is not None
        pooling.pool(
            [as_array(part) for part in weights],
            self.inverse_N,
            self.lengths_FB,
            self._weights(),
            weighted,
            self.mean_F,
            out_BFD.numpy(),
        )
        if self.pooled is not None:
            assert sums is not None, "they were looked up"
            feature_P, lengths_PB = self.pooled.feature_P, self.pooled.lengths_PB
            pooling.place_bags(sums.numpy(), feature_P, lengths_PB, self.mean_F, out_BFD.numpy())
        if self.index_FN is None:
            return out_BFD
        out_NFD = crossing.empty(self.index_FN.shape[1], features, self.dim)
        pooling.repeat_bags(out_BFD.numpy(), self.index_FN, out_NFD.numpy())
        return out_NFD

    def sums_backward(self, gradient_BFD: Tensor, divisor: int) -> tuple[Tensor, bool]:
        """Returns gradients (G, D) of the sums that slots have made, and whether those of all rows will be finite."""
        pooled = self.pooled
        assert pooled is not None, "slots have pooled"
        if self.limit < math.inf:
            gradient_BFD, divisor = (gradient_BFD / divisor).clamp_(-self.limit, self.limit), 1
        out_GD = torch.from_numpy(shared.empty((pooled.there.bags, self.dim), np.float32))  # sent
        of_bags = pooled.feature_P, pooled.lengths_PB, self.mean_F
        most = pooling.bags_backward(gradient_BFD.numpy(), *of_bags, np.float32(divisor), out_GD.numpy())
        factors = pooled.there.factors
        heaviest = 1.0 if factors is None else max(float(some.abs().max()) for some in factors if len(some))
        bound = float(most) * heaviest * pooled.there.ids  # of a row that all ids name
        return out_GD, bound < float(np.finfo(np.float32).max)

    def of_bags(self, gradient: Tensor) -> Tensor:
        """Returns gradients (B, F, D) of the bags, from gradients of what `pool` returned."""
        gradient = gradient.contiguous()
        if self.index_FN is None:
            return gradient
        features, batch = self.lengths_FB.shape
        out_BFD = torch.zeros(batch, features, self.dim, dtype=torch.float32, device="cpu")
        pooling.sum_repeats(gradient.numpy(), self.index_FN, out_BFD.numpy())
        return out_BFD

    def rows_backward(self, gradient_BFD: Tensor, rows: int, divisor: int) -> tuple[Tensor, bool]:
        """Returns gradients (U, D) of the rows from those of pooled values, and whether all are finite.

        Gradients are divided by `divisor`, then clamped.
        """
        if self.limit < math.inf:
            gradient_BFD, divisor = (gradient_BFD / divisor).clamp_(-self.limit, self.limit), 1
        out_UD = torch.from_numpy(shared.empty((rows, self.dim), np.float32))  # sent
        finite = pooling.pool_backward(
            gradient_BFD.numpy(),
            self.inverse_N,
            self.lengths_FB,
            self._weights(),
            self.per_id_N is not None,
            self.mean_F,
            np.float32(divisor),
            np.zeros(rows, np.bool_),
            out_UD.numpy(),
        )
        return out_UD, bool(finite)

    def ids_backward(self, gradient_BFD: Tensor, weights: Parts, divisor: int) -> Tensor:
        """Returns gradients (N,) of the per-id weights. Pooled gradients are clamped to the limit times `divisor`."""
        if self.limit < math.inf:
            gradient_BFD = gradient_BFD.clamp(-self.limit * divisor, self.limit * divisor)
        out_N = torch.empty(len(self.inverse_N), dtype=torch.float32, device="cpu")
        pooling.per_id_backward(
            gradient_BFD.numpy(),
            as_array(torch.cat(weights)),
            self.inverse_N,
            self.lengths_FB,
            self.mean_F,
            out_N.numpy(),
        )
        return out_N


def without(
    frozen: Sequence[Table], rows: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the rows (U,) and gradients (U, D) of each table group without those of frozen tables."""
    rows, gradients = list(rows), list(gradients)
    for table_group in {table.table_group for table in frozen}:
        rows_U, gradient_UD = rows[table_group], gradients[table_group]
        if gradient_UD is None:
            continue
        keep_U = torch.ones(len(rows_U), dtype=torch.bool, device="cpu")
        for table in frozen:
            if table.table_group == table_group:
                keep_U &= (rows_U < table.first_row) | (rows_U >= table.first_row + table.rows)
        rows[table_group], gradients[table_group] = rows_U[keep_U], gradient_UD[keep_U]
    return rows, gradients


def _fits(layout: Layout) -> bool:
    """Returns whether positions have 32 bits at most, as messages have those of ids in bags."""
    return int(layout.data_first[:, -1].max()) <= np.iinfo(np.int32).max


def _ids_of(features: KeyedJaggedTensor) -> Tensor:
    return features.values().detach().cpu().contiguous()  # here already, but for ids with weights
