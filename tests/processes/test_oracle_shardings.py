"""One step of TorchRec's test models, sharded, against the same model unsharded: their comparison, with our class.

Every case says what it wants of a sharding; where our rows lie is not theirs to say, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchrec_oracle as oracle
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils import test_sharding as shardings
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.test_utils import get_free_port

SHARDINGS = {"table_wise": "fused", "row_wise": "fused", "column_wise": "fused", "data_parallel": "dense"}
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int32": dict.fromkeys(("indices_dtype", "offsets_dtype", "lengths_dtype"), torch.int32) | {"use_offsets": True},
    "variable batch": {"variable_batch_size": True},
    "batch per feature": {"variable_batch_per_feature": True},
    "FP16": {"data_type": DataType.FP16},
}
CASES = [
    (world, sharding, weighted, pooling, given)
    for world in (1, 2)
    for sharding in SHARDINGS
    for weighted in (True, False)
    for pooling in (PoolingType.SUM, PoolingType.MEAN)
    for given in INPUTS
    if not (weighted and given == "batch per feature")  # their batches of that kind have no weights
]


def tables(count: int, pooling: PoolingType, data_type: DataType, prefix: str = "") -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=10 * (i % 4 + 1),
            embedding_dim=8 * (i % 4 + 2),
            name=f"{prefix}table_{i}",
            feature_names=[f"{prefix}feature_{i % 4}"],  # two features are of two tables
            pooling=pooling,
            data_type=data_type,
        )
        for i in range(count)
    ]


def groups(configs: list[EmbeddingBagConfig]) -> dict[str, list[str]]:
    shared = {config.feature_names[0] for config in configs[4:]}
    names = [(config.feature_names[0], config.name) for config in configs]
    return {"group_0": [f"{feature}@{table}" if feature in shared else feature for feature, table in names]}


def run(world: int, sharding: str, weighted: bool, pooling: PoolingType, given: dict[str, Any]) -> None:
    more = dict(given)
    data_type = more.pop("data_type", DataType.FP32)
    configs = tables(6, pooling, data_type)
    arguments: dict[str, Any] = {
        "model_class": TestSparseNN,
        "tables": configs,
        "weighted_tables": tables(2, PoolingType.SUM, data_type, "weighted_") if weighted else None,
        "embedding_groups": groups(configs),
        "sharders": [shardings.create_test_sharder("embedding_bag_collection", sharding, SHARDINGS[sharding])],
        "constraints": {config.name: ParameterConstraints(min_partition=4) for config in configs},
        "backend": "gloo",
        "optim": EmbOptimType.EXACT_SGD,
        **more,
    }
    if world == 2:
        oracle.PROCESSES.call(shardings.sharding_single_rank_test, **arguments)
    else:
        shardings.sharding_single_rank_test(rank=0, world_size=1, **arguments)


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    yield
    oracle.leave()
    oracle.PROCESSES.close()


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    oracle.swap()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(get_free_port()))
    yield
    oracle.restore()


WAYS: list[list[Any]] = [[1, 2], list(SHARDINGS), [True, False], [PoolingType.SUM, PoolingType.MEAN], list(INPUTS)]


def some(case: tuple[Any, ...]) -> Any:
    """Of all cases a third every day, along diagonals, so that each value is there."""
    number = sum(values.index(value) for values, value in zip(WAYS, case, strict=True))
    return pytest.param(*case, marks=[] if number % 3 == 0 else [pytest.mark.slow])


@pytest.mark.parametrize(
    ("world", "sharding", "weighted", "pooling", "given"),
    [some(case) for case in CASES],
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_a_sharded_model_is_the_unsharded_one(
    world: int, sharding: str, weighted: bool, pooling: PoolingType, given: str
) -> None:
    run(world, sharding, weighted, pooling, INPUTS[given])
