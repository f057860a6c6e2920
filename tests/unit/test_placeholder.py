"""Tables among a model's parameters: what asks for shapes works as with TorchRec, what asks for rows is refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CPU, META, Net, batch_of, collection, dense_parameters, plain_torchrec, shard, train
from torch import nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torch_ecrec.nn.placeholder import TableParameter

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)


def test_names_shapes_and_counts_are_those_of_torchrec() -> None:
    model, _ = shard(Net(collection("adagrad", device=META)))
    theirs = plain_torchrec(Net(collection("adagrad", device=META)), 1)
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert mine == {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert set(dense_parameters(model)) == set(dense_parameters(theirs)) == {"over.weight", "over.bias"}
    filtered = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    assert {type(parameter) for parameter in filtered.values()} == {TableParameter}


def parameter() -> TableParameter:
    return TableParameter("t", 5, 3)


WITHOUT_ROWS: dict[str, Callable[[TableParameter], Any]] = {
    "shape": lambda p: p.shape == (5, 3) and p.size(0) == 5 and len(p) == 5 and p.ndim == p.dim() == 2,
    "count": lambda p: p.numel() == torch.numel(p) == 15 and p.nbytes == 60,
    "kind": lambda p: p.dtype is torch.float32 and p.is_meta and p.is_floating_point() and p.is_leaf,
    "gradient": lambda p: p.requires_grad and p.grad is None,
    "members": lambda p: p in {p} and p in [p] and p in {p: 1},
    "text": lambda p: repr(p) == str(p) == f"{p}" == "TableParameter(t: 5 x 3, on the servers)",
    "frozen": lambda p: not p.requires_grad_(False).requires_grad,
    "copied": lambda p: copy.deepcopy(p).table == "t",
    "a parameter": lambda p: isinstance(p, nn.Parameter),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1.0) == 0.0,
}


@pytest.mark.parametrize("ask", WITHOUT_ROWS.values(), ids=WITHOUT_ROWS)
def test_what_needs_no_rows_works(ask: Callable[[TableParameter], Any]) -> None:
    assert ask(parameter())


WITH_ROWS: dict[str, Callable[[TableParameter], Any]] = {
    "copy_": lambda p: p.copy_(torch.zeros(5, 3)),
    "uniform_": nn.init.uniform_,
    "fill_": lambda p: p.fill_(1.0),
    "data": lambda p: p.data,
    "data set": lambda p: setattr(p, "data", torch.zeros(5, 3)),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to(torch.float16),
    "numpy": lambda p: p.numpy(),
    "norm": lambda p: p.norm(),
    "add": lambda p: p + 1,
    "__getitem__": lambda p: p[0],
    "__setitem__": lambda p: p.__setitem__(0, 1.0),
    "stack": lambda p: torch.stack([p]),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "save": lambda p: torch.save(p, io.BytesIO()),
}


@pytest.mark.parametrize("what", WITH_ROWS)
def test_what_needs_rows_is_refused_by_name(what: str) -> None:
    with pytest.raises(RuntimeError, match=rf"`{what.split()[0]}` of table t: its rows live on the servers"):
        WITH_ROWS[what](parameter())


def test_initialising_all_parameters_is_refused() -> None:
    model, _ = shard(Net(collection()))
    with pytest.raises(RuntimeError, match="`normal_` of table wide: its rows live on the servers"):
        for each in model.parameters():
            nn.init.normal_(each)
    sharded = model.module.collections[0]
    with pytest.raises(RuntimeError, match="`reset_parameters` of tables wide, small, shared, last"):
        sharded.reset_parameters()
    with pytest.raises(RuntimeError, match="of table wide"):
        model.apply(lambda module: [p.data.zero_() for p in module.parameters()])


def test_a_dense_optimizer_of_all_parameters_trains_the_dense_ones() -> None:
    batches = [batch_of(4, seed) for seed in range(3)]
    losses = []
    for everything in (False, True):
        model, session = shard(Net(collection()))
        given = model.parameters() if everything else dense_parameters(model).values()
        optimizer: Any = torch.optim.Adam(given, lr=0.1)
        losses.append(train(model, batches, optimizer))
        assert session.step == 4
    assert losses[0] == losses[1]


def test_a_write_into_a_state_dict_is_told() -> None:
    model, session = shard(Net(collection("sgd", device=CPU)))
    state = model.state_dict()
    key = "collections.0.embedding_bags.wide.weight"
    state[key].mul_(2)
    before = [records.clone() for records in session.records]
    with pytest.warns(UserWarning, match="weights of table wide in a state dict were changed in place"):
        loss, _ = model(batch_of(4, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, session.records, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
        state[key] = state[key].half()  # a new tensor is nobody's table
        model.state_dict()
        model(batch_of(4, 1))[0].backward()
