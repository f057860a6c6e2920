"""Tables among a model's parameters: what asks for shapes works as with TorchRec, what asks for rows is refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_session import FakeSession
from models import CPU, META, Net, batch_of, collection, dense_parameters, plain_torchrec, shard, train
from shards import local
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec import DistributedModelParallel
from torch_ecrec.nn.placeholder import TableParameter
from torch_ecrec.state_dicts import given

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)


def test_names_shapes_and_counts_are_those_of_torchrec() -> None:
    model, _ = shard(Net(collection("adagrad", device=META)))
    theirs = plain_torchrec(Net(collection("adagrad", device=META)), 1)
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert mine == {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    plain = {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}  # a module of torch
    assert plain == {name: tuple(parameter.shape) for name, parameter in theirs.module.named_parameters()} == mine
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


def test_a_model_is_not_copied_and_trains_on() -> None:
    model, _ = shard(Net(collection()))
    for whole in (model, model.module, model.module.collections[0]):
        with pytest.raises(TypeError, match=r"cannot be copied .*: copy it before it is sharded, or copy .* dense"):
            copy.deepcopy(whole)
    with pytest.raises(TypeError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(model)
    average = torch.optim.swa_utils.AveragedModel(model.module.over)
    train(model, [batch_of(4, 0)])
    average.update_parameters(model.module.over)


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
    "grad": lambda p: setattr(p, "grad", torch.zeros(5, 3, device="meta")),
}


@pytest.mark.parametrize("what", WITH_ROWS)
def test_what_needs_rows_is_refused_by_name(what: str) -> None:
    with pytest.raises(RuntimeError, match=rf"`{what.split()[0]}` of table t: its rows live on the servers"):
        WITH_ROWS[what](parameter())


def test_a_table_is_not_replaced() -> None:
    model, _ = shard(Net(collection()))
    sharded = model.module.collections[0]
    with pytest.raises(RuntimeError, match="`weight` of table wide: its rows live on the servers"):
        sharded.embedding_bags["wide"].weight = nn.Parameter(torch.zeros(50, 8))
    with pytest.raises(RuntimeError, match="table wide cannot be replaced: its rows live on the servers"):
        sharded.embedding_bags["wide"] = nn.EmbeddingBag(50, 8)
    assert list(sharded.embedding_bags) == ["wide", "small", "shared", "last"]


def test_resharding_is_refused() -> None:
    model, _ = shard(Net(collection()))
    with pytest.raises(ValueError, match="`reshard` moves tables between trainers"):
        model.reshard({}, "collections.0")


def test_initialising_all_parameters_is_refused() -> None:
    model, _ = shard(Net(collection()))
    with pytest.raises(RuntimeError, match="`normal_` of table wide: its rows live on the servers"):
        for each in model.parameters():
            nn.init.normal_(each)
    with pytest.raises(RuntimeError, match="of table wide"):
        model.apply(lambda module: [p.data.zero_() for p in module.parameters()])
    with pytest.raises(RuntimeError, match="`normal_` of table wide: its rows live on the servers"):
        for each in model.module.parameters():
            nn.init.normal_(each)


def test_what_moves_a_model_leaves_placeholders_alone() -> None:
    model, _ = shard(Net(collection()))
    before = dict(model.named_parameters())
    model.to(torch.float64).to("cpu").double()
    model.module.share_memory()
    for name, parameter in model.named_parameters():
        assert (parameter is before[name] and parameter.dtype is torch.float32) == ("embedding_bags" in name)


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


def test_parameters_are_reset_as_the_configs_say() -> None:
    model, session = shard(Net(collection("adagrad", device=META)))
    train(model, [batch_of(4, 0)], torch.optim.SGD(dense_parameters(model).values(), lr=0.1))
    trained, states = (
        model.full_state_dict(),
        [records[:, table_group.dim :].clone() for records, table_group in zip_table_groups(session)],
    )
    DistributedModelParallel._reset_parameters(model)
    for name, values in model.full_state_dict().items():
        if "embedding_bags" in name:
            assert not torch.equal(values, trained[name])
            assert values.abs().max() <= len(values) ** -0.5
    assert all(
        torch.equal(r[:, s.dim :], state) for (r, s), state in zip(zip_table_groups(session), states, strict=True)
    )


def zip_table_groups(session: Any) -> Any:
    return zip(session.records, session.job.table_groups, strict=True)


def test_a_module_looks_like_torchrecs() -> None:
    model, _ = shard(Net(collection("adagrad", device=META)))
    theirs: Any = plain_torchrec(Net(collection("adagrad", device=META)), 1)
    mine, other = model.module.collections[0], theirs.module.collections[0]
    assert isinstance(mine, ShardedEmbeddingBagCollection)
    assert not isinstance(mine, ShardedEmbeddingCollection)
    assert list(mine.embedding_bags) == list(other.embedding_bags)
    assert mine.embedding_bags["wide"].weight is dict(mine.named_parameters())["embedding_bags.wide.weight"]
    assert set(mine.module_sharding_plan) == set(other.module_sharding_plan)
    assert set(mine.sharded_parameter_names()) == set(other.sharded_parameter_names())
    names = "collections.0.embedding_bags.wide.weight"
    assert names in set(DistributedModelParallel._sharded_parameter_names(model))


def test_the_first_batch_is_validated_as_by_torchrec() -> None:
    model, _ = shard(Net(collection("sgd", device=CPU)))
    twice = KeyedJaggedTensor(keys=["f0", "f0"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="keys must be unique"):
        model.module.collections[0](twice)


def test_a_model_without_tables_is_torchrecs_own() -> None:
    """Parameters that exist stay as they are, those on meta are made, it trains; what needs servers is refused."""
    with pytest.warns(
        UserWarning, match="the model holds no EmbeddingBagCollection and no EmbeddingCollection to serve"
    ):
        model = DistributedModelParallel(nn.Linear(3, 1, device="meta"))
    assert not model.module.weight.is_meta
    before = model.module.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.module.weight.detach(), before - 0.1 * 2)
    assert set(model.state_dict()) == {"weight", "bias"}
    with pytest.raises(RuntimeError, match="`attach` would keep nothing: the model holds no"):
        model.attach(optimizer=optimizer)
    assert len(model.digest()) == 64
    model.close()


def test_a_write_into_a_state_dict_changes_the_table() -> None:
    """As with TorchRec, for as long as the table is what the state dict says; later ones are told."""
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    (values,) = local(model.state_dict()[key])
    doubled = values.clone() * 2
    values.mul_(2)
    assert torch.equal(model.full_state_dict()[key], doubled)
    values[0] = 7.0
    doubled[0] = 7.0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch_of(4, 0))
        assert torch.equal(model.full_state_dict()[key], doubled)
    loss, _ = model(batch_of(4, 0))
    loss.backward()
    trained = model.full_state_dict()[key]
    values.zero_()
    with pytest.warns(UserWarning, match="table wide in a state dict was changed in place, and the table was not"):
        model(batch_of(4, 1))
    assert torch.equal(model.full_state_dict()[key], trained)


def test_a_write_within_a_step_is_told() -> None:
    """Before its forward it counts, after it does not; also where people train in evaluation's mode."""
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    for mode in (True, False):
        model.train(mode)
        state = model.state_dict()
        local(state[key])[0].fill_(3.0)
        loss, _ = model(batch_of(4, 0))
        local(state[key])[0].fill_(4.0)
        loss.backward()
        with pytest.warns(UserWarning, match="table wide in a state dict was changed in place, and the table was not"):
            model(batch_of(4, 1))
        assert model.full_state_dict()[key][49].eq(3.0).all(), "no batch has it"


def test_of_two_state_dicts_the_one_that_was_written_counts() -> None:
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    older, newer = model.state_dict(), model.state_dict()
    local(newer[key])[0].fill_(1.0)
    assert model.full_state_dict()[key].eq(1.0).all()
    local(older[key])[0].fill_(2.0)
    with pytest.warns(UserWarning, match="was changed in place, and the table was not"):
        model(batch_of(4, 0))
    assert model.full_state_dict()[key].eq(1.0).all()


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": lambda values: values.numpy()[3].fill(7.0),
    "data": lambda values: values.data[3].fill_(7.0),
    "detached memory": lambda values: memoryview(values.numpy()).cast("B").__setitem__(5, 1),
    "dlpack": lambda values: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(values))[49, 7].fill_(7.0),
    "the last byte": lambda values: values.numpy().view("uint8").reshape(-1).__setitem__(-1, 1),
}
NOTICED_BY: dict[str, Callable[[Any], object]] = {
    "a forward of training": lambda model: model(batch_of(4, 0)),
    "an evaluation": lambda model: torch.no_grad()(model.eval())(batch_of(4, 0)),
    "flush": lambda model: model.flush(),
    "full_state_dict": lambda model: model.full_state_dict(),
}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "let go of"])
@pytest.mark.parametrize("noticed_by", NOTICED_BY)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_past_torch_changes_the_table_too(way: str, noticed_by: str, kept: bool) -> None:
    model, session = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    before = model.full_state_dict()[key]
    state = model.state_dict()
    (values,) = local(state[key])
    version = values._version
    WAYS[way](values)
    assert way == "dlpack" or values._version == version, "torch has not noticed"
    wanted = values.clone()
    if not kept:
        del state, values
    NOTICED_BY[noticed_by](model)
    table_group, first = session.job.place_of_table[key.split(".")[-2]]
    stored = session.read(table_group, torch.arange(first, first + 50))[:, :8]
    assert torch.equal(stored, wanted) and not torch.equal(wanted, before)
    assert torch.equal(model.full_state_dict()[key], wanted)


def test_a_write_past_torch_that_comes_too_late_is_told() -> None:
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    (values,) = local(model.state_dict()[key])
    model(batch_of(4, 0))[0].backward()
    trained = model.full_state_dict()[key]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch_of(4, 1))
    values.numpy().fill(0.0)
    with pytest.warns(UserWarning, match="table wide in a state dict was changed in place, and the table was not"):
        model(batch_of(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch_of(4, 1))  # once
    assert torch.equal(model.full_state_dict()[key], trained)


def test_an_evaluation_looks_once_at_all_of_a_large_tensor_and_training_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "WHOLE_BYTES", 16)
    monkeypatch.setattr(given, "PART", 4)
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    (values,) = local(model.state_dict()[key])

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            model.eval()(batch_of(4, 0))
        return model._step.session.read(0, torch.arange(50))[:, :8]

    values.numpy()[3, 1] = 5.0
    assert torch.equal(evaluate(), values), "the first look"
    evaluate()
    values.numpy()[3, 1] = 6.0
    assert not torch.equal(evaluate(), values), "is not in the part"
    values.numpy().fill(2.0)
    assert torch.equal(evaluate(), values), "is in any part"
    values.numpy()[3, 1] = 7.0
    evaluate()
    model.train()(batch_of(4, 0))
    assert torch.equal(model._step.session.read(0, torch.arange(50))[:, :8], values)


def test_a_tensor_whose_memory_was_taken_away_is_not_looked_at() -> None:
    model, _ = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    right, state = model.full_state_dict()[key], model.state_dict()
    local(state[key])[0].untyped_storage().resize_(0)
    model(batch_of(4, 0))
    assert torch.equal(model.full_state_dict()[key], right)
    model(batch_of(4, 0))[0].backward()
    model(batch_of(4, 0))


def test_optimizer_state_may_be_written_in_place() -> None:
    model, _ = shard(Net(collection("adagrad", device=CPU)))
    states = model.fused_optimizer.state_dict()["state"]
    for of_table in states.values():
        for values in of_table.values():
            local(values)[0].fill_(0.5)
    for of_table in model.full_optim_state_dict()["state"].values():
        assert all(values.eq(0.5).all() for values in of_table.values())


def test_what_is_written_before_attach_is_loaded_before_it_and_not_after_a_restart() -> None:
    model, session = shard(Net(collection("sgd", device=CPU)))
    key = "collections.0.embedding_bags.wide.weight"
    local(model.state_dict()[key])[0].fill_(1.0)
    model.attach()
    assert model.full_state_dict()[key].eq(1.0).all()
    for seed in range(2):
        with model.step():
            model(batch_of(3, seed))[0].backward()
    assert list(session.snapshots) == [1]
    trained = session.after[1][0].clone()
    later = FakeSession(session.job, before=session, step=1)
    again = DistributedModelParallel(Net(collection("sgd", device=CPU)), session=later)
    local(again.state_dict()[key])[0].fill_(2.0)
    again.load_state_dict(again.state_dict() | {key: torch.full((50, 8), 3.0, dtype=torch.float32)})
    assert torch.equal(later.records[0], trained), "it was trained since"
