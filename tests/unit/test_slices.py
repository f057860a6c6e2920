"""Which bags slots pool, of one slice of a module: by their lengths, by where their tables lie, and by the setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec.layout.routing import arrange
from torch_ecrec.nn.slices import Bags, Slice, Table
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

BATCH = 8
SGD = OptimizerSpec("sgd")


def made(tables: dict[str, tuple[int, str, dict[str, int]]], pooling: str) -> Bags:
    """Bags of a batch. Of each table (rows, sharding, ids of a bag by feature)."""
    specs = [TableSpec(name, rows, 4, 0.0, 0.0, SGD, sharding=how) for name, (rows, how, _) in tables.items()]
    job = JobSpec(tuple(specs), CodeSpec(3, 2, 1), 1)
    (table_group,), places = job.table_groups, []
    for name, (rows, _, bags) in tables.items():
        _, first = job.place_of_table[name]
        more: Any = {"home": job.home_of(name), "slots": len(job.slots_of(name))}
        one = Table(name, name, 0, first, rows, 4, table_group.schema, tuple(bags), PoolingType.SUM, SGD.kind, **more)
        places += [(len(places) + i, feature, one) for i, feature in enumerate(bags)]
    lengths = [ids for _, _, bags in tables.values() for ids in bags.values() for _ in range(BATCH)]
    rows_of = {feature: table.rows for _, feature, table in places}
    values = [torch.arange(BATCH * ids) * 7 % rows_of[f] for _, _, bags in tables.values() for f, ids in bags.items()]
    batch = KeyedJaggedTensor([f for _, f, _ in places], torch.cat(values), lengths=torch.tensor(lengths))
    _, found = Slice(0, 4, places).bags(
        batch, False, lambda s, rows: unrouted(job, s, rows), layouts=job.layouts, pooling=pooling
    )
    return found


def unrouted(job: JobSpec, table_group: int, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    route, inverse_N = arrange(job.layouts[table_group], rows_N)
    return route.rows, inverse_N


def pooled(found: Bags) -> list[int]:
    """Features whose bags slots pool; no others have their ids among the rows."""
    features = [] if found.pooled is None else found.pooled.feature_P.tolist()
    assert not found.lengths_FB[features].any()
    return sorted(features)


WHOLE = {"whole": (200, "table_wise", {"f": 3})}


@pytest.mark.parametrize(
    ("ids", "rows", "pooling", "wanted"),
    [
        ({"g": 6}, 1000, "parts", [0, 1]),
        ({"g": 5}, 1000, "parts", [0]),  # two for each of three slots are six
        ({"g": 6}, 1000, "whole", [0]),
        ({"g": 6}, 1000, "rows", []),
        ({"g": 9, "h": 3}, 1000, "parts", [0, 1, 2]),  # all features of a table go the same way
        ({"g": 9, "h": 2}, 1000, "parts", [0]),
        ({"g": 6}, 47, "parts", [0]),  # 48 vectors of 47 rows
        ({"g": 6}, 48, "parts", [0, 1]),
    ],
)
def test_what_slots_pool_follows_from_the_batch_and_the_setting(
    ids: dict[str, int], rows: int, pooling: str, wanted: list[int]
) -> None:
    tables = {**WHOLE, "dealt": (rows, "row_wise", ids)}
    assert pooled(made(tables, pooling)) == wanted


@pytest.mark.parametrize(("rows", "wanted"), [(1 << 30, [0]), (1 << 32, [])])
def test_bags_of_tables_with_more_records_than_messages_can_name_travel_as_rows(rows: int, wanted: list[int]) -> None:
    """Of 2^31 on a slot. Nothing is allocated for them here."""
    found = made({"huge": (rows, "table_wise", {"f": 3})}, "whole")
    assert pooled(found) == wanted and len(found.inverse_N) == (0 if wanted else 3 * BATCH)
