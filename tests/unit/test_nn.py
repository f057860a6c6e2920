"""The sharded module against its oracle, the unsharded `EmbeddingBagCollection`.

The backend is `FakeSession`, tables of records in memory.
"""

from __future__ import annotations

import operator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    FEATURES,
    LR,
    MEAN,
    OPTIMIZERS,
    SUM,
    LossNet,
    Net,
    Oracle,
    batch_of,
    collection,
    dense_parameters,
    optimizer_of,
    shard,
    table,
    tables,
    train,
    train_in_pipeline,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torch_ecrec.compat.torch import queue_callback, timeout_of
from torch_ecrec.nn.dense import load_, unpack
from torch_ecrec.nn.parallel import _same_trainers

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [1, 4])
def test_sharded_equals_unsharded(kind: str, weighted: bool, most: int) -> None:
    configs = tables()
    if weighted:  # torch's own bags cannot take a weighted mean
        for config in configs:
            config.pooling = SUM
    original = collection(kind, configs, is_weighted=weighted)
    oracle = Oracle(original, kind)
    model, session = shard(original)
    for seed in range(4):
        features = batch_of(6, seed, most, weighted).sparse_features
        weights = torch.randn(1, 8 * 2 + 4 + 8 + 4, dtype=torch.float32)
        ours, theirs = model(features), oracle.module(features)
        assert ours.keys() == theirs.keys() == ["f2", "f0", "f1@small", "f1@shared", "f3"]
        assert ours.length_per_key() == theirs.length_per_key()
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6)
        (ours.values() * weights).square().sum().backward()
        oracle.optimizer.zero_grad()
        (theirs.values() * weights).square().sum().backward()
        rows, gradients = session.pushed[-1]
        for config in configs:
            table_group, first = session.job.place_of_table[config.name]
            grad = torch.zeros(session.job.table_groups[table_group].rows, config.embedding_dim, dtype=torch.float32)
            grad[rows[table_group]] = gradients[table_group]
            expected = oracle.module.embedding_bags[config.name].weight.grad
            torch.testing.assert_close(grad[first : first + config.num_embeddings], expected, rtol=1e-4, atol=1e-5)
        oracle.optimizer.step()
        for config in configs:
            expected = oracle.module.embedding_bags[config.name].weight
            torch.testing.assert_close(session.weights(config.name), expected, rtol=1e-4, atol=1e-5, check_device=False)
    assert session.step == 5 and len(session.pushed) == 4


def test_weighted_mean_divides_by_the_number_of_ids() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0", pooling=MEAN)], is_weighted=True)
    rows = original.embedding_bags["t"].weight.detach().clone()
    model, _ = shard(original)
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f0"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([0.5, 2.0, 3.0], dtype=torch.float32)
    )
    expected = torch.stack([(0.5 * rows[1] + 2 * rows[2]) / 2, torch.zeros(4, dtype=torch.float32), 3 * rows[3]])
    torch.testing.assert_close(model(features).values().detach(), expected)


def test_id_weights_get_gradients() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0")], is_weighted=True)
    rows = original.embedding_bags["t"].weight.detach().clone()
    model, _ = shard(original)
    weights = torch.ones(3, dtype=torch.float32, requires_grad=True)
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1, 2, 3]), torch.tensor([2, 1]), weights)
    model(features).values().sum().backward()
    torch.testing.assert_close(weights.grad, rows[[1, 2, 3]].sum(dim=1))


@pytest.mark.parametrize("most", [3, 40])
@pytest.mark.parametrize("altered", ["values", "lengths", "weights"])
def test_a_batch_that_is_altered_after_its_forward_has_the_gradients_of_that_forward(altered: str, most: int) -> None:
    pushed = []
    for alters in (False, True):
        configs = [table(name, 20, 4, name) for name in FEATURES]  # in the batch's order: nobody has to permute it
        model, session = shard(collection("sgd", configs, is_weighted=True))
        features = batch_of(6, 0, most, weighted=True).sparse_features
        given = getattr(features, altered)()
        ours = model(features).values()
        before = given.clone()
        if alters:  # as a reader does that fills the same memory again
            given.copy_(given.flip(0))
            assert not torch.equal(given, before)
        ours.square().sum().backward()
        pushed += session.pushed
    (rows, gradients), (rows_altered, gradients_altered) = pushed
    assert all(torch.equal(a, b) for a, b in zip(rows, rows_altered, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_altered, strict=True))


def test_empty_bags_and_empty_batches_are_steps_too() -> None:
    model, session = shard(collection())
    before = [records.clone() for records in session.records]
    for size, most in [(3, 0), (0, 0)]:
        values = model(batch_of(size, 0, most).sparse_features).values()
        assert values.shape == (size, 32) and not values.any()
        values.sum().backward()
    assert session.step == 3
    assert all(len(rows) == 0 for push in session.pushed for rows in push[0])
    assert all(torch.equal(a, b) for a, b in zip(before, session.records, strict=True))


def test_duplicate_ids_are_asked_for_once_and_their_gradients_summed() -> None:
    model, session = shard(collection("sgd", [table("t", 10, 4, "f0", "f1")]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([3, 3, 1, 3]), torch.tensor([2, 1, 1, 0]))
    model(features).values().sum().backward()
    rows, gradients = session.pushed[0]
    assert dict(zip(rows[0].tolist(), gradients[0].tolist(), strict=True)) == {1: [1.0] * 4, 3: [3.0] * 4}


# what is a step ---------------------------------------------------------------------------------------


def test_only_a_backward_ends_a_step() -> None:
    model, session = shard(collection())
    features = batch_of(4, 0).sparse_features
    with torch.no_grad():
        model(features).values()
    model.eval()
    model(features).values()
    model.train()
    first = model(features).values().sum()
    second = model(features).values().sum()
    assert session.step == 1 and session.lookups == 4
    second.backward()
    assert session.step == 2
    first.backward()  # later than it should: a step of its own, as in TorchRec
    assert session.step == 3


def test_several_collections_are_one_step() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0"), table("b", 20, 4, "f1")]), collection()
    model, session = shard(Net(first, second))
    loss, _ = model(batch_of(5, 1))
    loss.backward()
    assert session.step == 2 and session.lookups == 2
    assert all(len(rows) for rows in session.pushed[0][0])


def test_a_collection_used_twice_gets_the_sum() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0")])
    model, session = shard(original)
    one, two = (
        KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor(v), torch.tensor([2])) for v in ([1, 2], [2, 5])
    )
    (model(one).values().sum() + 10 * model(two).values().sum()).backward()
    rows, gradients = session.pushed[0]
    assert session.step == 2 and rows[0].tolist() == [1, 2, 5]
    assert gradients[0][:, 0].tolist() == [1.0, 11.0, 10.0]


@pytest.mark.parametrize("trained", [True, False])
def test_a_collection_that_the_model_reaches_past_its_modules_is_named(trained: bool) -> None:
    """It was torch's error about an index, or nothing: the weights of the beginning were used."""
    made = collection() if trained else EmbeddingBagCollection(tables=tables())

    class Past(Net):
        def __init__(self) -> None:
            super().__init__(made)
            self.aside = [made]

        def forward(self, batch: Batch) -> Any:
            return self.aside[0](batch.sparse_features)

    model, _ = shard(Past())
    said = r"collections.0 was called as it was before its tables went to the servers: something holds the Embedding"
    with pytest.raises(RuntimeError, match=said):
        model(batch_of(4, 1))


class WithUnused(nn.Module):
    """A second collection whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (collection("sgd", [table(name, 10, 4, "f0")]) for name in ("a", "b"))
        self.over = nn.Linear(4, 1, dtype=torch.float32)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.over(self.used(features).values()), self.unused(features).values()


def test_a_step_is_sent_before_ddp_waits_for_the_others() -> None:
    """One that loads in place of training waits for this trainer: it was never told that this one trains."""
    model, session = shard(WithUnused())
    sent: list[int] = []
    # as DDP, once the last dense gradient is there, which is before those of the rows
    model.module.over.weight.register_hook(lambda _: queue_callback(lambda: sent.append(len(session.pushed))))
    for step in (1, 2):
        loss, unused = model(batch_of(4, 0).sparse_features)
        loss.sum().backward()
        assert unused.requires_grad and len(session.pushed) == step and sent == [1, 2][:step]


def test_an_unused_collection_does_not_hold_the_step_up() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 4, "f1")])
    model, session = shard(nn.ModuleList([first, second]))
    features = batch_of(5, 1).sparse_features
    used, unused = (child(features).values() for child in model.module)
    used.sum().backward()
    assert session.step == 2 and len(session.pushed[0][0][0]) and not len(session.pushed[0][0][1])
    assert unused.requires_grad


def test_the_push_does_not_wait_for_the_rest_of_the_backward() -> None:
    model, session = shard(collection("sgd", [table("t", 10, 4, "f0")]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1]), torch.tensor([1]))
    bottom = torch.ones(1, dtype=torch.float32, requires_grad=True)
    scaled = bottom * 2  # made before the lookup: its backward comes after that of the lookup
    steps = []
    scaled.register_hook(lambda _: steps.append(session.step))
    for _ in range(2):
        (model(features).values().sum() * scaled).sum().backward(retain_graph=True)
    assert steps == [2, 3]


def test_running_a_graph_twice_is_two_steps() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 4, "f1")])
    model, session = shard(Net(first, second))
    loss, _ = model(batch_of(5, 1))
    loss.backward(retain_graph=True)
    loss.backward()
    assert session.step == 3
    for table_group in range(2):
        assert torch.equal(session.pushed[0][0][table_group], session.pushed[1][0][table_group])
        assert torch.equal(session.pushed[0][1][table_group], session.pushed[1][1][table_group])


class Recomputed(nn.Module):
    """Of three collections, the one in the middle is not kept for the backward: it looks its rows up again there."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collection("sgd", [table(n, 20, 4, "f0")]) for n in "abc")
        self.below = nn.Linear(2, 1, dtype=torch.float32)
        self.reentrant = reentrant

    def forward(self, batch: Batch) -> Tensor:
        first, middle, last = self.collections
        features, below = batch.sparse_features, self.below(batch.dense_features)

        def recomputed(below: Tensor) -> Tensor:
            values: Tensor = middle(features).values()
            return torch.tanh(values * below)

        before = first(features).values()
        if self.reentrant is None:
            between = recomputed(below)
        else:
            between = checkpoint(recomputed, below, use_reentrant=self.reentrant)
        return (before + between + last(features).values()).pow(2).sum()


def test_rows_that_are_looked_up_again_in_the_backward_are_of_its_step() -> None:
    sessions = []
    for reentrant in (None, False):
        model, session = shard(Recomputed(reentrant))
        with torch.no_grad():
            model.module.below.weight.fill_(0.5)
            model.module.below.bias.fill_(0.25)
        for seed in range(3):
            model(batch_of(5, seed, rows=20)).backward()
        assert session.step == 4
        sessions.append(session)
    assert sessions[1].lookups > sessions[0].lookups
    for kept, recomputed in zip(sessions[0].records, sessions[1].records, strict=True):
        assert torch.equal(kept, recomputed)


class Scaled(Net):
    """Gives out a parameter as it is, as models of two towers do with their temperature."""

    def __init__(self) -> None:
        super().__init__(collection())
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float32))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().forward(batch)[0], self.scale


def test_a_parameter_that_a_model_gives_out_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[Tensor] = []
    register = Tensor.register_hook
    monkeypatch.setattr(Tensor, "register_hook", lambda tensor, hook: hooked.append(tensor) or register(tensor, hook))
    model, session = shard(Scaled())
    for seed in range(4):
        loss, scale = model(batch_of(5, seed))
        (loss * scale).backward()
    assert session.step == 5 and model._step._passes == 4
    assert sum(tensor is model.module.scale for tensor in hooked) == 1


@pytest.mark.parametrize(("given", "then"), [(300, 300), (1, 30)])
def test_trainers_wait_for_each_other_as_long_as_in_the_group_of_the_script(given: int, then: int) -> None:
    """One of them evaluates for hours, say, and the script has told torch so; at least as long as torch's default."""
    (alone, minutes) = dist.new_group([0], timeout=timedelta(minutes=given)), timedelta(minutes=then)
    for found, wanted in (
        (timeout_of(_same_trainers(alone, "gloo")), minutes),
        (timeout_of(_same_trainers(alone)), timedelta(minutes=given)),
    ):  # torch 2.14 takes from it what it took to make the group
        assert found is not None and abs(found - wanted) < timedelta(seconds=9)


def test_a_backward_within_a_backward_that_ends_a_step_is_refused() -> None:
    """It would be a step of its own, and of the outer one the gradients that have come so far would be lost."""
    model, _ = shard(Recomputed(True))
    with pytest.raises(RuntimeError, match="Take use_reentrant=False, or leave tables out of what is recomputed"):
        model(batch_of(5, 1, rows=20)).backward()


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    first, second = collection("sgd", [table("a", 20, 4, "f0")]), collection("sgd", [table("b", 20, 4, "f0")])
    model, session = shard(nn.ModuleList([first, second]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1]), torch.tensor([1]))

    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    breaks, gathered = (child(features).values() for child in model.module)
    breaks.register_hook(fail)  # made first, so its gradient comes last
    with pytest.raises(ConnectionError):
        (breaks.sum() + gathered.sum()).backward()
    del breaks, gathered
    model.module[1](features).values().sum().backward()
    push, session.push = session.push, fail
    with pytest.raises(ConnectionError):
        model.module[1](features).values().sum().backward()
    session.push = push
    model.module[1](features).values().sum().backward()
    assert session.step == 3
    assert [gradients[0].tolist() for _, gradients in session.pushed] == [[[1.0] * 4]] * 2


def test_the_pipeline_equals_the_plain_loop() -> None:
    batches = [batch_of(8, seed) for seed in range(6)]
    ends, losses = [], []
    for pipeline in (False, True):
        model, session = shard(LossNet(collection("rowwise_adagrad")))
        losses.append(train_in_pipeline(model, batches) if pipeline else train(model, batches))
        assert session.step == 7
        used = dict(session.looked_up)
        assert [step for step, _ in session.ahead] == ([2, 3, 4, 5, 6] if pipeline else [])
        assert all(rows is used[step] or all(map(operator.is_, rows, used[step])) for step, rows in session.ahead)
        ends.append((session.records, list(dense_parameters(model).values())))
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
    for plain, piped in zip(ends[0][0] + ends[0][1], ends[1][0] + ends[1][1], strict=True):
        assert torch.equal(plain, piped)


def test_a_scheduler_changes_the_rate_of_the_next_backward() -> None:
    configs = tables()
    original = collection("sgd", configs)
    model, session = shard(Net(original))
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.SGD(p, lr=1.0))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    assert [len(group["params"]) for group in model.fused_optimizer.param_groups] == [2, 2]
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.5**step
        model(batch_of(3, step))[0].backward()
        optimizer.step()
    assert session.rates == [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    scheduler.step()
    model(batch_of(3, 3))[0].backward()
    assert session.rates[-1] == pytest.approx([0.025, 0.025])


def test_tables_of_one_table_group_need_one_rate() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 8, "f1")])
    model, _ = shard(Net(first, second))
    model.fused_optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(ValueError, match=r"tables a, b share one optimizer but got learning rates 1\.0 and 0\.05"):
        model(batch_of(3, 0))[0].backward()


# the dense part -------------------------------------------------------------------------------------------


def test_each_step_is_snapshotted_once_with_its_optimizer() -> None:
    model, session = shard(Net(collection("adagrad")))
    optimizer = optimizer_of(model)
    train(model, [batch_of(6, seed) for seed in range(3)], optimizer)
    assert sorted(session.snapshots) == [1, 2]
    with torch.no_grad():
        model(batch_of(6, 0))
    assert sorted(session.snapshots) == [1, 2]
    model.flush()
    model.flush()
    model.close()
    assert sorted(session.snapshots) == [1, 2, 3] and session.flushed == 3 and not session.closed
    state = unpack([session.snapshots[3]])
    for name, parameter in dense_parameters(model).items():
        assert torch.equal(state.parameters[name], parameter)
    assert [entry["class"] for entry in state.optimizers] == ["Adagrad"]
    # put back into a fresh model, it goes on as the first one does
    other, _ = shard(Net(collection("adagrad")))
    fresh = torch.optim.Adagrad(dense_parameters(other).values(), lr=LR)
    assert load_(other, [fresh], [session.snapshots[3]], 0) == 3
    for name, parameter in dense_parameters(other).items():
        assert torch.equal(parameter, dense_parameters(model)[name])
        assert torch.equal(fresh.state[parameter]["sum"], optimizer.state[dense_parameters(model)[name]]["sum"])


@pytest.mark.parametrize(
    "change",
    [
        lambda model, adam: model.norm.running_mean.add_(1),
        lambda model, adam: model.over.bias.data.add_(1),
        lambda model, adam: next(iter(adam.state.values()))["exp_avg_sq"].add_(1),
        lambda model, adam: adam.param_groups[0].update(lr=0.5),
        lambda model, adam: model.fused_optimizer.param_groups[0].update(lr=0.5),
        lambda model, adam: model.session.records[0][3].add_(1),
    ],
    ids=["buffer", "weight", "optimizer state", "rate", "rate of tables", "record"],
)
def test_the_digest_changes_with_whatever_a_trainer_would_bring_back(change: Any) -> None:
    model, _ = shard(WithBuffer(collection("adagrad")))
    model.module.norm(torch.rand(4, 32, dtype=torch.float32)).sum()
    adam = torch.optim.Adam(dense_parameters(model).values(), lr=LR)
    for seed in range(2):
        adam.zero_grad()
        model(batch_of(6, seed)).backward()
        adam.step()
    before = model.digest(), model.digest(tables=False)
    assert before == (model.digest(), model.digest(tables=False)) and before[0] != before[1]
    model.norm, model.over = model.module.norm, model.module.over
    with torch.no_grad():
        change(model, adam)
    assert model.digest() != before[0]


class WithBuffer(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.norm, self.over = (
            tables,
            nn.BatchNorm1d(32, dtype=torch.float32),
            nn.Linear(32, 1, dtype=torch.float32),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.over(self.norm(self.tables(batch.sparse_features).values())).tanh().sum()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("does", ["trains", "has a state dict"])
def test_a_trainer_whose_others_have_ended_is_told_what_to_do(
    does: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with torch's word that a connection was closed; one that saves alone, with advice on batches."""

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    model, _ = shard(Net(collection()))
    model._step.agreement._group = object()
    all_reduce = closed if at_once else lambda *_, **__: SimpleNamespace(wait=closed)
    monkeypatch.setattr("torch_ecrec.nn.agreement.dist.all_reduce", all_reduce)
    loss, _ = model(batch_of(4, 0))
    with pytest.raises(RuntimeError, match="Connection closed") as caught:
        loss.backward() if does == "trains" else model.full_state_dict()
    notes = "".join(caught.value.__notes__)
    assert f"step 1: this trainer {does}, and another one has ended, or was lost" in notes
    assert ("as many batches" in notes) == (does == "trains")


def test_a_trainer_whose_others_train_instead_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trainers train without meetings each waited for the other. What was seen once may come just now."""
    model, session = shard(Net(collection()), nan_gradients="pass")
    model._step.agreement._group = object()
    seen = [True, False, True, True]
    monkeypatch.setattr(session, "overtaken", lambda: seen.pop(0))
    monkeypatch.setattr("torch_ecrec.nn.agreement.LOOK_S", 0.0)
    monkeypatch.setattr(
        "torch_ecrec.nn.agreement.dist.all_reduce", lambda *_, **__: SimpleNamespace(is_completed=lambda: False)
    )
    with pytest.raises(RuntimeError, match="1: this trainer has a state dict, and another one has trained meanwhile"):
        model.full_state_dict()
    assert not seen
