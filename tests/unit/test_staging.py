"""The way between the host and the device of the dense model.

Without a GPU, streams whose copies are made only when somebody waits for them stand in for CUDA's: what is read too
early is read wrong. With one, the same model is trained on it.
"""

from __future__ import annotations

import contextlib
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CPU, FEATURES, LossNet, batch_of, collection, repeated_batch, shard, train, train_in_pipeline
from torch import Tensor

from torch_ecrec.nn import staging
from torch_ecrec.nn.bags import ErasureCodedEmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("process_group")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class LateStreams:
    """Copies to the host are made when an event is waited for, all that were asked for before it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.copied, self.log = 0, []
        patch.setattr(torch.cuda, "Stream", lambda device: self)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.log.append("held"))
        patch.setattr(staging, "_to_pinned", self.later)
        patch.setattr(staging.Crossing, "empty", lambda crossing, *shape: torch.empty(shape, dtype=torch.float32))
        patch.setattr(staging.Staging, "has", lambda staging, tensor: staging.pins)

    def wait_stream(self, other: Any) -> None:
        self.log.append("follow")

    def later(self, tensor: Tensor) -> Tensor:
        here = torch.full(tensor.shape, -1, dtype=tensor.dtype)  # no row has this id
        if tensor.is_floating_point():
            here.fill_(torch.nan)
        self.pending.append((here, tensor.clone()))
        return here

    def record_event(self) -> Any:
        pending, self.pending = self.pending, []

        def synchronize() -> None:
            for here, tensor in pending:
                here.copy_(tensor)
            self.copied += len(pending)

        return SimpleNamespace(synchronize=synchronize)


def to_late_streams(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ErasureCodedEmbeddingBagCollection):
            module._staging.device, module._staging.pins = torch.device("cpu", 0), True


@pytest.mark.parametrize("pipeline", [False, True])
def test_what_crosses_is_waited_for(pipeline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch_of(8, seed) for seed in range(5)]
    plain, plain_session = shard(LossNet(collection("rowwise_adagrad")))
    expected = train(plain, batches)
    streams = LateStreams(monkeypatch)
    model, session = shard(LossNet(collection("rowwise_adagrad")))
    to_late_streams(model)
    losses = train_in_pipeline(model, batches) if pipeline else train(model, batches)
    assert losses == expected
    assert all(map(torch.equal, session.records, plain_session.records))
    assert streams.copied == 5 * (2 + 2), "ids and lengths, and gradients of two dims"
    assert streams.log.count("held") == 5 * (2 + 2 + 2), "and the pooled values"


def test_inverse_indices_cross_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch_of(5, seed) for seed in range(3)]
    for seed, batch in enumerate(batches):
        batch.sparse_features = repeated_batch(FEATURES, 5, seed)
    plain, plain_session = shard(LossNet(collection("rowwise_adagrad")))
    expected = train(plain, batches)
    streams = LateStreams(monkeypatch)
    model, session = shard(LossNet(collection("rowwise_adagrad")))
    to_late_streams(model)
    assert train(model, batches) == expected
    assert all(map(torch.equal, session.records, plain_session.records))
    assert streams.copied == 3 * (3 + 2), "ids, lengths and inverse indices, and gradients of two dims"


def test_a_look_without_gradients_crosses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = shard(LossNet(collection()))
    batch = batch_of(8, 0)
    with torch.no_grad():
        expected = model(batch)[1]
        streams = LateStreams(monkeypatch)
        to_late_streams(model)
        assert torch.equal(model(batch)[1], expected)
    assert streams.copied == 2


def test_on_the_cpu_nothing_is_copied() -> None:
    crossing = staging.Staging(CPU).crossing()
    tensor = crossing.empty(2, 3)
    assert crossing.over(tensor) is tensor and not tensor.is_pinned()
    features = batch_of(4, 0).sparse_features
    assert staging.Staging(CPU).ids(features).wait() is features


def test_other_devices_are_copied_to() -> None:
    crossing = staging.Staging(torch.device("meta")).crossing()
    assert crossing.over(crossing.empty(2, 3)).device.type == "meta"


@needs_gpu
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_a_dense_model_on_a_gpu(ids_on: str) -> None:
    """Losses and rows as on the CPU, but for how a GPU sums."""
    gpu, batches = torch.device("cuda", 0), [batch_of(64, seed) for seed in range(8)]
    plain, plain_session = shard(LossNet(collection("rowwise_adagrad")))
    expected = train(plain, batches)
    model, session = shard(LossNet(collection("rowwise_adagrad")), device=gpu)
    there = [batch.to(gpu) for batch in batches]
    if ids_on == "cpu":
        for batch, original in zip(there, batches, strict=True):
            batch.sparse_features = original.sparse_features
    losses = train(model, there)
    assert model(there[0])[1].device == gpu
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(session.records, plain_session.records, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@needs_gpu
def test_training_on_a_gpu_repeats_itself() -> None:
    gpu, ends = torch.device("cuda", 0), []
    for pipeline in (False, True):
        model, session = shard(LossNet(collection("rowwise_adagrad")), device=gpu)
        batches = [batch_of(64, seed) for seed in range(8)]
        if pipeline:
            losses = train_in_pipeline(model, batches, gpu)
        else:
            losses = train(model, [batch.to(gpu) for batch in batches])
        ends.append((losses, session.records))
    assert operator.eq(*(losses for losses, _ in ends))
    assert all(map(torch.equal, *(records for _, records in ends)))
