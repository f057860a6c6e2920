"""`torch.compile`: rows are looked up outside of what is compiled; what a restart would compute otherwise is refused.

So are pipelines that look rows up too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import CPU, META, Net, batch_of, collection, shard
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
)
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig, TrainPipelinePT2

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BACKEND = "aot_eager"  # traces as inductor does, and compiles nothing
BATCHES = 5


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Nor counted: torch's counts outlive its reset."""
    for counts in torch._dynamo.utils.counters.values():
        counts.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Over(nn.Linear):
    """A module of the script. One of torch's own that is compiled in place is not compiled: dynamo skips its files."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def made(attached: bool = True, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    """By default, trainers may go on after a loss."""
    torch.manual_seed(1)
    net = Net(collection("rowwise_adagrad", device=META))
    net.over.__class__ = Over
    model, _ = shard(net, **more)
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    if attached:
        model.attach(optimizer=optimizer)
    return model, optimizer


def batches() -> list[Batch]:
    return [batch_of(4, seed) for seed in range(BATCHES)]


def trained(model: Any, call: Callable[[Batch], Any], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss, _ = call(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.flush()
    return losses


def plain() -> tuple[list[float], str]:
    model, optimizer = made()
    return trained(model, model, optimizer), model.digest()


@pytest.mark.parametrize("how", ["outside", "in place", "a part"])
def test_a_compiled_model_trains_as_one_that_is_not(how: str) -> None:
    wanted, digest = plain()
    model, optimizer = made()
    call: Any = model
    if how == "outside":
        call = torch.compile(model, dynamic=False, backend=BACKEND)
    elif how == "in place":
        model.compile(dynamic=True, backend=BACKEND)
    else:
        model.module.over.compile(dynamic=False, backend=BACKEND)
    assert trained(model, call, optimizer) == pytest.approx(wanted, abs=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
    if how == "a part":
        assert model.digest() == digest


@pytest.mark.parametrize("how", ["in place", "a part", "a part, wrapped"])
def test_what_depends_on_the_sizes_before_is_refused(how: str) -> None:
    model, optimizer = made()
    if how == "in place":
        model.compile(backend=BACKEND)
    elif how == "a part":
        model.module.over.compile(backend=BACKEND)
    else:
        model.module.over = torch.compile(model.module.over, backend=BACKEND)
    with pytest.raises(RuntimeError, match=r"is compiled with dynamic=None.*dynamic=True or dynamic=False"):
        trained(model, model, optimizer)


@pytest.mark.parametrize("how", ["outside", "in place", "a part", "late"])
@pytest.mark.parametrize("more", [{"attached": False}, {"snapshot_every": 0}], ids=["not attached", "no snapshots"])
def test_who_never_goes_on_may_compile_as_they_like(more: dict[str, Any], how: str) -> None:
    """Nothing is refused for the sake of restarts, nor told, where the script has not asked for them."""
    model, optimizer = made(**more)
    call: Any = model
    if how == "outside":
        call = torch.compile(model, backend=BACKEND)
    elif how == "in place":
        model.compile(backend=BACKEND)
    elif how == "a part":
        model.module.over.compile(backend=BACKEND)
    losses = []
    for i, batch in enumerate(batches()):
        if i == 2 and how == "late":
            model.module.over.compile(backend=BACKEND)
        optimizer.zero_grad()
        loss, _ = call(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(plain()[0], abs=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"


def test_to_compile_later_is_refused() -> None:
    model, optimizer = made()
    pipeline = TrainPipelinePT2(
        model, optimizer, CPU, TorchCompileConfig(backend=BACKEND, dynamic=True), input_transformer=lambda batch: batch
    )
    stream = iter(batches())
    for _ in range(3):
        pipeline.progress(stream)
    with pytest.raises(RuntimeError, match=r"was compiled at step 4, after training had begun.*compile_on_iter=0"):
        pipeline.progress(stream)


def test_the_pipeline_of_compiled_models() -> None:
    wanted, _ = plain()
    model, optimizer = made()
    configs = TorchCompileConfig(backend=BACKEND, dynamic=True, compile_on_iter=0)
    pipeline = TrainPipelinePT2(model, optimizer, CPU, configs, input_transformer=lambda batch: batch)
    stream, losses = iter(batches()), []
    for batch in batches():
        logits = pipeline.progress(stream)
        losses.append(float(torch.nn.functional.mse_loss(logits.detach(), batch.labels)))
    assert losses == pytest.approx(wanted, abs=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("how", ["outside", "a function"])
def test_what_cannot_be_seen_is_told(how: str) -> None:
    model, optimizer = made()
    hidden = torch.compile(lambda loss: loss * 1.0, backend=BACKEND)
    outside = torch.compile(model, backend=BACKEND)

    def call(batch: Batch) -> Any:
        loss, logits = (outside if how == "outside" else model)(batch)
        return (hidden(loss) if how == "a function" else loss), logits

    with pytest.warns(UserWarning, match="neither the model nor a module of it was compiled in place"):
        trained(model, call, optimizer)


class Stage(EmbeddingPipelinedForward):
    """As TorchRec's pipelines put it into a module; their own do not run on a CPU."""

    def __init__(self) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not reached")


class InSync(InSyncEmbeddingPipelinedForward):
    def __init__(self) -> None: ...


@pytest.mark.parametrize("forward", [Stage(), InSync()], ids=["ahead", "in sync"])
def test_rows_that_are_a_step_old_are_refused(forward: Any) -> None:
    model, _ = made()
    (sharded,) = model.module.collections
    features = batch_of(4, 0).sparse_features
    context = sharded.create_context()
    ids = sharded.input_dist(context, features).wait().wait()
    sharded.forward = forward
    with torch.no_grad():
        sharded.compute(context, ids)  # an evaluation may see any step
    if isinstance(forward, InSync):
        assert sharded.compute(context, ids)[0].requires_grad
        return
    with pytest.raises(RuntimeError, match=r"SemiSync.*before the step before them is over"):
        sharded.compute(context, ids)
