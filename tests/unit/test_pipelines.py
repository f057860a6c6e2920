"""Each of TorchRec's pipelines on a CPU, with its own sharding and with ours: as a plain loop, or the same error.

The words of an error are torch's, and those of its CPU build are others than those of its CUDA build without a GPU.
`ON_A_CPU` says which; a release of TorchRec with another class fails here. (`test_oracle_pipelines.py` compares those
that work bit for bit, `test_loops.py` and `test_models.py` lose trainers and servers in them.)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import CPU, LR, LossNet, batch_of, collection, dense_parameters, plain_torchrec, seeded_tables, shard
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    SparseDataDistUtil,
    TorchCompileConfig,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    experimental_pipelines,
    train_pipelines,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
from torchrec.optim.keyed import KeyedOptimizerWrapper

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
warnings.filterwarnings("ignore", category=DeprecationWarning)
STEPS = 5
SITE = {"site_fqn": "over"}
TRAINS, EVALUATES = "trains", "evaluates"
# Of a context for the stream of a device that has none: torch 2.13; 2.14.
NO_STREAM = "unknown parameter type|'Stream' object has no attribute 'device'"
NO_CUDA = "torch.cuda.Stream requires CUDA support|Expected a cuda device, but got: cpu"
NO_PINNING = "pin_memory=True requires a CUDA or other accelerator|Found no NVIDIA driver"
NO_SUCH_STEP = "looks rows up before"  # ours refuses it by name

ON_A_CPU: dict[str, tuple[str, dict[str, Any]]] = {  # what it does there, and its arguments
    "TrainPipelineBase": (TRAINS, {}),
    "TrainPipelinePT2": (TRAINS, {}),
    "TrainPipelineSparseDist": (TRAINS, {}),
    "TrainPipelineSparseDistLite": (TRAINS, {}),
    "TrainPipelineFusedSparseDist": (NO_STREAM, {}),
    "TrainPipelineSemiSync": (NO_STREAM, {}),
    "PrefetchTrainPipelineSparseDist": ("Invalid PrefetchPipelinedForward usage", {}),
    "EvalPipelineSparseDist": (EVALUATES, {}),
    "EvalPipelineFusedSparseDist": (NO_STREAM, {}),
    "StagedTrainPipeline": ("'NoneType' object has no attribute 'device'", {}),
    "TrainPipelineSparseDistCompAutograd": ("Compiled autograd is not compatible with C\\+\\+ DDP Reducer", {}),
    "TrainEvalHybridPipelineBase": (TRAINS, {}),
    "TrainPipelineSparseDistT": (TRAINS, {}),
    "TrainPipelineSparseDistBwdOpt": ("Unsupported awaitable type: Tensor", SITE),
    "TrainPipelineSparseDistOptStash": (NO_CUDA, SITE),
    "TrainPipelineSparseDistEmbStash": (NO_CUDA, SITE),
    "TrainPipelinePrefetchEMS": (NO_CUDA, SITE),
    "EvalPipelineCPUSparse": (NO_PINNING, {}),
}
REFUSED = {"EvalPipelineCPUSparse": NO_SUCH_STEP}  # by ours


def batches() -> Iterator[Batch]:
    return (batch_of(6, seed) for seed in range(STEPS))


def sharded(ours: bool) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    net = LossNet(collection("sgd", seeded_tables()))
    torch.manual_seed(3)
    nn.init.normal_(net.over.weight)
    model = shard(net)[0] if ours else plain_torchrec(net, 1)
    for name, table in model.state_dict().items():  # TorchRec draws new rows
        if "embedding_bags" in name:
            values = table if isinstance(table, torch.Tensor) and ours else table.local_shards()[0].tensor
            values.copy_(torch.linspace(-1, 1, values.numel()).view_as(values))
    return model, KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.SGD(p, lr=LR))


def loop(ours: bool, accumulate: int = 1) -> list[float]:
    model, optimizer = sharded(ours)
    losses = []
    for i, batch in enumerate(batches()):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def evaluated(ours: bool) -> list[float]:
    model, _ = sharded(ours)
    model.eval()
    with torch.no_grad():
        return [float(model(batch)[0]) for batch in batches()]


def drained(pipeline: Any) -> list[float]:
    given, losses = batches(), []
    while len(losses) <= STEPS:
        try:
            loss = pipeline.progress(given)
        except StopIteration:
            break
        losses.append(float(loss))
    return losses


def staged(model: nn.Module) -> Any:
    util = SparseDataDistUtil(model, None)
    stage = PipelineStage("ids", util.start_sparse_data_dist, None, fill_callback=util.wait_sparse_data_dist)
    return train_pipelines.StagedTrainPipeline([stage])


def classes() -> dict[str, type]:
    found = {}
    for module in (train_pipelines, experimental_pipelines):
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, train_pipelines.TrainPipeline) and not inspect.isabstract(cls):
                found[name] = cls
    return found


def run(name: str, ours: bool) -> list[float]:
    model, optimizer = sharded(ours)
    cls, (does, more) = classes()[name], ON_A_CPU[name]
    if does == EVALUATES or name.startswith("Eval"):
        model.eval()
    if name == "StagedTrainPipeline":
        return drained(staged(model))
    if name == "TrainPipelinePT2":
        config = TorchCompileConfig(backend="eager", dynamic=True, compile_on_iter=0)
        more = {"compile_configs": config, "input_transformer": lambda batch: batch}
    return drained(cls(model, optimizer, CPU, **more))


def test_every_pipeline_is_known() -> None:
    assert set(classes()) == set(ON_A_CPU)


def fails(name: str, ours: bool, why: str) -> tuple[type, str]:
    with pytest.raises((RuntimeError, AttributeError, AssertionError, ValueError), match=why) as found:
        run(name, ours)
    return found.type, str(found.value)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_pipeline_does_what_it_does_with_torchrec(name: str) -> None:
    does, _ = ON_A_CPU[name]
    if does == TRAINS:
        assert run(name, ours=False) == loop(ours=False) and run(name, ours=True) == loop(ours=True)
    elif does == EVALUATES:
        assert run(name, ours=False) == evaluated(ours=False) and run(name, ours=True) == evaluated(ours=True)
    else:
        theirs, mine = fails(name, False, does), fails(name, True, REFUSED.get(name, does))
        assert name in REFUSED or mine == theirs


ACCUMULATES: list[Callable[..., Any]] = [TrainPipelineBase, TrainPipelineSparseDist]


@pytest.mark.parametrize("ours", [False, True], ids=["torchrec", "ours"])
@pytest.mark.parametrize("cls", ACCUMULATES)
def test_gradients_are_accumulated_as_by_a_plain_loop(cls: Callable[..., Any], ours: bool) -> None:
    """Of the dense part: tables step in each backward, as with TorchRec."""
    model, optimizer = sharded(ours)
    config = GradientAccumulationConfig(is_enabled=True, num_steps=2)
    wrapped = GradientAccumulationWrapper(cls(model, optimizer, CPU), optimizer, model, config)
    assert drained(wrapped) == loop(ours, accumulate=2)
