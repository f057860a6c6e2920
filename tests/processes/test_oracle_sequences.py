"""One step of TorchRec's model with an `EmbeddingCollection`, alone and beside bags, against the same model unsharded.

The comparison is theirs, as in `test_oracle_shardings.py`, with our class.
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
from torchrec.distributed.test_utils.test_model import TestMixedEmbeddingSparseArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.test_utils import get_free_port

SHARDINGS = {"table_wise": "fused", "row_wise": "fused", "column_wise": "fused", "data_parallel": "dense"}
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int32": dict.fromkeys(("indices_dtype", "offsets_dtype", "lengths_dtype"), torch.int32) | {"use_offsets": True},
    "one sample": {"batch_size": 1},
    "FP16": {"data_type": DataType.FP16},
}
CASES = [
    (world, sharding, beside_bags, given)
    for world in (1, 2)
    for sharding in SHARDINGS
    for beside_bags in (False, True)
    for given in INPUTS
]


def run(world: int, sharding: str, beside_bags: bool, given: dict[str, Any]) -> None:
    more = dict(given)
    data_type = more.pop("data_type", DataType.FP32)
    tables: list[Any] = [
        EmbeddingConfig(
            num_embeddings=10 * (i + 1),
            embedding_dim=16,
            name=f"table_{i}",
            feature_names=[f"feature_{i}"],
            data_type=data_type,
        )
        for i in range(4)
    ]
    if beside_bags:
        tables += [
            EmbeddingBagConfig(
                num_embeddings=11, embedding_dim=8, name=f"bags_{i}", feature_names=[f"bag_{i}"], data_type=data_type
            )
            for i in range(2)
        ]
    kinds = ["embedding_collection", *(["embedding_bag_collection"] if beside_bags else [])]
    arguments: dict[str, Any] = {
        "model_class": TestMixedEmbeddingSparseArch,
        "tables": tables,
        "embedding_groups": {},
        "sharders": [shardings.create_test_sharder(kind, sharding, SHARDINGS[sharding]) for kind in kinds],
        "constraints": {config.name: ParameterConstraints(min_partition=4) for config in tables},
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


@pytest.mark.parametrize(("world", "sharding", "beside_bags", "given"), CASES)
def test_a_sharded_model_of_sequences_is_the_unsharded_one(
    world: int, sharding: str, beside_bags: bool, given: str
) -> None:
    run(world, sharding, beside_bags, INPUTS[given])
