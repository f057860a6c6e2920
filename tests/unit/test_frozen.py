"""Frozen tables (`requires_grad=False`) are looked up and not stepped, as unsharded; before or after they are sharded.

TorchRec's fused kernels step them all the same, and refuse the flag on a sharded table.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from attached import END, Trainer, attach, made, passes, same
from models import LR, OPTIMIZERS, Net, batch_of, collection, shard
from shards import local
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)


def weight_of(model: nn.Module, table: str) -> nn.Parameter:
    return next(p for name, p in model.named_parameters() if name.endswith(f"embedding_bags.{table}.weight"))


def rows_of(model: nn.Module, table: str) -> Tensor:
    return next(
        local(value)[0].clone() for name, value in model.state_dict().items() if name.endswith(f"bags.{table}.weight")
    )


SCHEDULE: list[set[str]] = [{"wide"}, {"wide", "last"}, set(), {"shared"}, {"wide", "small", "shared", "last"}, set()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_table_trains_as_unsharded_while_it_is_frozen_and_after(kind: str) -> None:
    original = collection(kind)
    unsharded = EmbeddingBagCollection(tables=original.embedding_bag_configs())
    unsharded.load_state_dict(original.state_dict())
    arguments = {} if kind == "sgd" else {"eps": 1e-8}
    optimizer = OPTIMIZERS[kind](unsharded.parameters(), lr=LR, **arguments)
    original.embedding_bags["wide"].weight.requires_grad_(False)
    model, session = shard(original)
    for step, frozen in enumerate(SCHEDULE):
        for name, bags in unsharded.embedding_bags.items():
            bags.weight.requires_grad_(name not in frozen)
            if step:  # the first is as the script left it before
                weight_of(model, name).requires_grad_(name not in frozen)
        before = {name: rows_of(model, name) for name in unsharded.embedding_bags}
        features = batch_of(6, step, 4).sparse_features
        sums = torch.randn(1, 8 * 2 + 4 + 8 + 4)
        ours = model(features).values()
        (ours * sums).square().sum().backward()
        optimizer.zero_grad()
        theirs = unsharded(features).values()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        if theirs.requires_grad:
            (theirs * sums).square().sum().backward()
            optimizer.step()
        for name, bags in unsharded.embedding_bags.items():
            now = rows_of(model, name)
            torch.testing.assert_close(now, bags.weight.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(now, before[name]) == (name in frozen)
    assert session.step == 1 + len(SCHEDULE)  # also where all are frozen


def test_what_counts_is_the_flag_when_rows_are_looked_up() -> None:
    model, _ = shard(Net(collection()))
    before = rows_of(model, "wide")
    model.module.collections.requires_grad_(False)  # a module of torch around the collection, which lists its tables
    loss, _ = model(batch_of(4, 1))
    weight_of(model, "wide").requires_grad_(True)
    loss.backward()
    assert torch.equal(before, rows_of(model, "wide"))


def test_gradients_of_a_frozen_table_refuse_no_step() -> None:
    model, session = shard(collection())
    weight_of(model, "wide").requires_grad_(False)
    pooled = model(batch_of(4, 1).sparse_features).to_dict()
    (pooled["f1@small"].sum() + pooled["f0"].sum() * float("nan")).backward()
    assert session.step == 2


def run(trainer: Trainer) -> Trainer:
    """The one table is frozen where the script builds its model, and trains from the fourth step on."""
    weight_of(trainer.model, "wide").requires_grad_(False)
    attach(trainer)
    batches = passes(trainer.batches)
    while trainer.model.steps_done < END:
        if trainer.model.steps_done == 3:
            weight_of(trainer.model, "wide").requires_grad_(True)
        trainer.steps(trainer.model.steps_done + 1, batches)
    return trainer


@pytest.mark.parametrize("lost_after", [2, 3, 4, 6])
def test_a_restarted_trainer_freezes_what_was_frozen(lost_after: int) -> None:
    first = run(made())
    again = run(made(first.session, lost_after, seed=2))
    assert first.losses == again.losses and same(first, again)
    table_group, row = first.session.job.place_of_table["wide"]
    begin, third, last = (first.session.after[step][table_group][row : row + 50] for step in (1, 3, END))
    assert torch.equal(begin, third) and not torch.equal(third, last)
