"""TorchRec's training pipelines with its test models: what they give is what a plain loop gives, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec_oracle as oracle
from shards import whole
from torch import nn
from torchrec.distributed.test_utils.emb_sharder import TestEBCSharder as Sharder
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.test_utils import get_free_port, init_distributed_single_host

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    oracle.swap()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(get_free_port()))
    made = init_distributed_single_host(backend="gloo", rank=0, world_size=1)
    yield made
    oracle.restore()
    oracle.leave()
    dist.destroy_process_group(made)


def tables(prefix: str, count: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=100 * (i + 1),
            embedding_dim=4 * (i + 1),
            name=f"{prefix}table_{i}",
            feature_names=[f"{prefix}feature_{i}"],
        )
        for i in range(count)
    ]


TABLES, WEIGHTED = tables("", 4), tables("weighted_", 2)


def batches(count: int) -> list[ModelInput]:
    torch.manual_seed(5)
    return [
        ModelInput.generate(batch_size=8, world_size=1, num_float_features=10, tables=TABLES, weighted_tables=WEIGHTED)[
            0
        ]
        for _ in range(count)
    ]


def sharded(module: nn.Module, group: Any) -> tuple[Any, Any]:
    """The model, and what steps its dense part."""
    model = oracle.model_class()(
        copy.deepcopy(module),
        env=ShardingEnv.from_process_group(group),
        init_data_parallel=False,
        device=CPU,
        sharders=[Sharder("table_wise", "fused", {"learning_rate": 0.1})],
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))


def unsharded() -> nn.Module:
    torch.manual_seed(4)
    return TestSparseNN(tables=TABLES, weighted_tables=WEIGHTED, dense_device=CPU, sparse_device=torch.device("meta"))


@pytest.mark.parametrize(
    ("pipeline_class", "execute_all"),
    [
        (TrainPipelineBase, True),
        (TrainPipelineSparseDist, True),
        (TrainPipelineSparseDist, False),
        (TrainPipelineSparseDistLite, True),
    ],
)
def test_a_pipeline_trains_as_a_plain_loop(pipeline_class: Any, execute_all: bool, group: Any) -> None:
    module, data = unsharded(), batches(7)
    plain, optimizer = sharded(module, group)
    piped, piped_optimizer = sharded(module, group)
    piped.load_state_dict(plain.state_dict())
    more = {"execute_all_batches": execute_all} if pipeline_class is TrainPipelineSparseDist else {}
    pipeline = pipeline_class(piped, piped_optimizer, CPU, **more)
    given = iter(data)
    for batch in data[: 7 if execute_all else 5]:
        optimizer.zero_grad()
        loss, prediction = plain(batch)
        loss.backward()
        optimizer.step()
        assert torch.equal(pipeline.progress(given), prediction)
    if pipeline_class is not TrainPipelineBase:
        assert len(pipeline._pipelined_modules) == 2  # weighted or not
    for name, values in plain.state_dict().items():
        if isinstance(values, torch.Tensor) and oracle.mode() != "stock":
            assert torch.equal(whole(piped.state_dict()[name]), whole(values)), name


def test_a_pipeline_of_evaluation_gives_what_the_model_does(group: Any) -> None:
    module, data = unsharded(), batches(4)
    plain, _ = sharded(module, group)
    piped, optimizer = sharded(module, group)
    piped.load_state_dict(plain.state_dict())
    pipeline = EvalPipelineSparseDist(piped, optimizer, CPU)
    given = iter(data)
    with torch.no_grad():
        for batch in data:
            assert torch.equal(pipeline.progress(given), plain(batch)[1])
        with pytest.raises(StopIteration):
            pipeline.progress(given)
