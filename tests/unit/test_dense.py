"""Snapshots of the dense part: what is packed comes back, bit for bit, and nothing less is taken."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from torch_ecrec.nn import dense
from torch_ecrec.nn.dense import DenseSnapshot, Header, load_, own_of, unpack
from torch_ecrec.resume import values

Piece = tuple[Tensor, list[int]]


def dense_model() -> nn.Module:
    first, last = nn.Linear(3, 5, dtype=torch.float32), nn.Linear(5, 1, dtype=torch.float32)
    return nn.Sequential(first, nn.BatchNorm1d(5, dtype=torch.float32), last)


def optimizers_of(model: nn.Sequential) -> list[Optimizer]:
    return [
        torch.optim.Adam(model[0].parameters(), lr=0.1, betas=(0.5, 0.9)),
        SGD([{"params": model[1].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], 0.2, 0.9),
    ]


def step_dense(model: nn.Module, optimizers: list[Optimizer], seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 3, dtype=torch.float32)

    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    closure()
    for optimizer in optimizers:
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
        optimizer.zero_grad()


def packers_of(model: nn.Module, optimizers: Sequence[Optimizer], parts: int) -> list[DenseSnapshot]:
    packers = [DenseSnapshot(model, part, parts) for part in range(parts)]
    for packer in packers:
        packer.use(optimizers)
    return packers


def pieces_of(model: nn.Module, optimizers: Sequence[Optimizer], parts: int = 2, step: int = 1) -> list[Piece]:
    return [packer.pack(step, b"own" * packer.part) for packer in packers_of(model, optimizers, parts)]


def everything(model: nn.Module, optimizers: Sequence[Optimizer]) -> bytes:
    """All that a snapshot must bring back, with types and order; parameters by their place."""
    state: list[Any] = [{name: value.detach() for name, value in model.named_parameters()}]
    state.append({name: value.detach() for name, value in model.named_buffers()})
    for optimizer in optimizers:
        places = {
            id(p): (g, j) for g, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])
        }
        state.append([[p.detach() for p in group["params"]] for group in optimizer.param_groups])
        state.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
        state.append([(places.get(id(key), key), value) for key, value in optimizer.state.items()])
    return values.encode(state, "everything")


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_snapshot_brings_model_and_optimizers_back(parts: int) -> None:
    model = dense_model()
    optimizers = optimizers_of(model)
    packers = [DenseSnapshot(model, part, parts) for part in range(parts)]
    stranger = SGD(dense_model().parameters(), lr=1.0)
    stranger.step()
    step_dense(model, optimizers, 1)
    optimizers[1].param_groups[1]["lr"] = 1 / 3
    step_dense(model, optimizers, 2)
    assert packers[0].optimizers == optimizers
    pieces = [packer.pack(2) for packer in packers]
    headers = [Header.of(header, payload) for payload, header in pieces]
    assert sum(end - begin for begin, end in (header.span for header in headers)) == headers[0].stream_bytes
    other = dense_model()
    others = optimizers_of(other)
    step_dense(other, others, 3)
    assert load_(other, others, pieces[::-1], parts - 1) == 2
    assert everything(other, others) == everything(model, optimizers)
    for seed in (4, 5):
        step_dense(model, optimizers, seed)
        step_dense(other, others, seed)
    assert everything(other, others) == everything(model, optimizers)
    for packer in packers:
        packer.close()
        packer.close()


def test_incomplete_snapshots_are_refused() -> None:
    model = dense_model()
    packers = [DenseSnapshot(model, part, 2) for part in range(2)]
    first, second = (packer.pack(1) for packer in packers)
    with pytest.raises(ValueError, match=r"step 1: need parts 0 to 1, got \[0\]"):
        unpack([first])
    with pytest.raises(ValueError, match=r"need parts 0 to 1, got \[0, 0\]"):
        unpack([first, first])
    with pytest.raises(ValueError, match="one step"):
        unpack([first, packers[1].pack(2)])
    with pytest.raises(ValueError, match="one step"):
        unpack([])
    with pytest.raises(ValueError, match="step 1, part 1: the header is of"):
        unpack([first, (second[0][:-1], second[1])])
    with pytest.raises(ValueError, match=r"the model and the snapshot differ in parameters .*0\.bias"):
        load_(nn.Linear(2, 2), [], [first, second], 0)
    with pytest.raises(ValueError, match="optimizers"):
        load_(dense_model(), optimizers_of(model), [first, second], 0)
    with pytest.raises(ValueError, match="`part` must be at least 0 and less than 2, got 2"):
        load_(dense_model(), [], [first, second], 2)


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    model = dense_model()
    packer = DenseSnapshot(model, 0, 1)
    payload, _ = packer.pack(1)
    kept = payload.clone()
    step_dense(model, optimizers_of(model), 1)
    assert torch.equal(payload, kept)


def test_a_header_is_small_and_of_its_payload_only() -> None:
    """The index is there once, divided among the trainers; a header is as small for any model."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    alone, eight = pieces_of(model, [optimizer], 1), pieces_of(model, [optimizer], 8)
    assert sum(len(payload) for payload, _ in eight) < len(alone[0][0]) + 8 * 200
    for payload, header in eight:
        assert len(values.encode(header, "header")) < 80
        for i in range(len(header)):
            for wrong in (-1, 1 << 60, 1.0, None, "1", True):
                with pytest.raises(ValueError, match="a header must have"):
                    Header.of([*header[:i], wrong, *header[i + 1 :]], payload)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="a header must have"):
            Header.of(header[:-1], payload)
        with pytest.raises(ValueError, match="no part of a snapshot"):
            Header.of([1, 8, 8, *header[3:]], payload)
        for other in (payload[:-1], payload.view(1, -1), payload.to(torch.int32)):
            with pytest.raises(ValueError, match="the header is of"):
                own_of(other, header)


def test_what_arrives_otherwise_is_refused_and_nothing_is_changed() -> None:
    """Bits that flip in headers or payloads: the values of tensors apart, which nobody can tell, a ValueError."""
    model = dense_model()
    optimizers = optimizers_of(model)
    step_dense(model, optimizers, 1)
    pieces = pieces_of(model, optimizers, 3)
    rng, refused = random.Random(5), 0
    other = dense_model()
    others = optimizers_of(other)
    before = everything(other, others)
    for i in range(600):
        mutated = [(payload.clone(), list(header)) for payload, header in pieces]
        payload, header = mutated[rng.randrange(3)]
        if i % 3 == 0:
            header[rng.randrange(len(header))] += rng.choice([-1, 1, 3, 1 << 20])
        else:
            index_bytes = pieces[0][1][4]
            payload[rng.randrange(min(len(payload), index_bytes))] ^= 1 << rng.randrange(8)
        try:
            load_(other, others, mutated, 0)
        except ValueError:
            refused += 1
            assert everything(other, others) == before
        else:
            other = dense_model()
            others = optimizers_of(other)
            before = everything(other, others)
    assert refused > 400, refused


def test_trainers_that_hold_different_things_are_noticed() -> None:
    model = dense_model()
    optimizers = optimizers_of(model)
    pieces = pieces_of(model, optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.25
    with pytest.raises(ValueError, match="part 1 does not fit the others"):
        unpack([pieces[0], pieces_of(model, optimizers)[1]])


# whatever an optimizer keeps ----------------------------------------------------------------------


class Nested(SGD):
    """Keeps lists, dicts and more of tensors for a parameter, as second-order optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    past = state.setdefault("past", [])
                    past.append((p.grad.clone(), len(past)))
                    del past[:-3]
                    blocks = state.setdefault("blocks", OrderedDict(scale=np.float32(0.5), inner={"sums": [None]}))
                    blocks["inner"]["sums"].append(p.grad.sum())
                    blocks["scale"] *= np.float32(0.9)
                    total = sum(grad * (1 + place) for grad, place in past)
                    p.sub_(float(blocks["scale"]) * group["lr"] * total * float(sum(blocks["inner"]["sums"][1:])))


class Global(SGD):
    """Keeps something under a name, and something that is two parameters' both."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload, operator]
        shared = self.state.setdefault(("all", 1), {"sum": torch.zeros(1)})  # type: ignore[call-overload]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    shared["sum"] += p.grad.abs().sum()
                    self.state[p]["shared"] = shared["sum"]
                    p.sub_(group["lr"] * p.grad / self.state["count"] / self.state[p]["shared"])  # type: ignore[index]


class Beside(SGD):
    """Counts in an attribute, which its `state_dict` has."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 1.0 / self.count
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), amsgrad=True, capturable=False),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), t0=1),
    "LBFGS": lbfgs,
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), momentum_decay=0.1),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "SGD": lambda m: SGD(m.parameters(), 0.1, 0.9),
    "named": lambda m: SGD(m.named_parameters(), 0.1, 0.9),
    "Nested": lambda m: Nested(m.parameters(), 0.01),
    "Global": lambda m: Global(m.parameters(), 0.1),
    "Beside": lambda m: Beside(m.parameters(), 0.1, 0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    model = dense_model()
    optimizers = [OPTIMIZERS[name](model)]
    for seed in range(5):
        step_dense(model, optimizers, seed)
    pieces = pieces_of(model, optimizers)
    other = dense_model()
    others = [OPTIMIZERS[name](other)]
    load_(other, others, pieces, 1)
    assert everything(other, others) == everything(model, optimizers)
    for seed in range(5, 9):
        step_dense(model, optimizers, seed)
        step_dense(other, others, seed)
    assert everything(other, others) == everything(model, optimizers)
    with pytest.raises(AssertionError):
        assert everything(dense_model(), optimizers) == everything(model, optimizers)


def test_hyperparameters_come_back_as_they_were() -> None:
    """Types included; keys that have appeared are there, and those that have gone are not."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    group = optimizer.param_groups[0]
    group["lr"] = np.float32(0.1) * np.float32(0.5)
    group["betas"] = [0.1, (2, None)]
    group["words"] = {"b": {"c": np.int64(3)}, "a": torch.tensor([1.0, -0.0])}
    group["initial_lr"] = float("nan")
    del group["maximize"]
    other = nn.Linear(2, 1)
    restored = SGD(other.parameters(), lr=0.5, momentum=0.9)
    now = restored.param_groups[0]
    load_(other, [restored], pieces_of(model, [optimizer]), 0)
    assert restored.param_groups[0] is now and list(now) == list(group) and "maximize" not in now
    assert type(now["lr"]) is np.float32 and type(now["betas"]) is list and type(now["betas"][1]) is tuple
    assert everything(other, [restored]) == everything(model, [optimizer])


def test_state_that_has_gone_does_not_stay() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    restored = SGD(other.parameters(), lr=0.5, momentum=0.9)
    other(torch.ones(1, 2)).sum().backward()
    restored.step()
    load_(other, [restored], pieces_of(model, [optimizer]), 0)
    assert not restored.state and everything(other, [restored]) == everything(model, [optimizer])


def test_one_tensor_in_two_places_is_one_again() -> None:
    model, other = dense_model(), dense_model()
    optimizers, others = [Global(model.parameters(), 0.1)], [Global(other.parameters(), 0.1)]
    step_dense(model, optimizers, 1)
    load_(other, others, pieces_of(model, optimizers), 0)
    state: Any = others[0].state
    assert all(state[p]["shared"] is state["all", 1]["sum"] for p in other.parameters())


# the model ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied weights, a buffer that is not persistent, one that is none, dtypes and orders in memory of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.convolution = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.small = nn.Parameter(torch.rand(3).bfloat16())
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.none = nn.Parameter(torch.rand(0, 3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("strided", torch.rand(3, 4).T)


def test_odd_models_come_back() -> None:
    torch.manual_seed(1)
    model = Odd()
    model.seen += 5
    model.flag.fill_(True)
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    torch.manual_seed(2)
    other = Odd()
    restored = torch.optim.Adam(other.parameters())
    load_(other, [restored], pieces_of(model, [optimizer], 3), 0)
    assert everything(other, [restored]) == everything(model, [optimizer])
    assert other.b.weight is other.a.weight and other.seen[0] == 5 and other.flag
    assert restored.state[other.convolution.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_what_differs_between_trainers_is_each_ones_own() -> None:
    """Buffers are not reduced over the trainers (running means are of each one's batches); nor are parameters that are
    not the model's."""
    made, snapshots = [], []
    for trainer in range(2):
        torch.manual_seed(9)
        model, extra = dense_model(), nn.Parameter(torch.full((3,), float(trainer)))
        optimizer = SGD([*model.parameters(), extra], 0.1, 0.9)
        model[1].running_mean += 1 + trainer
        extra.grad = torch.full((3,), trainer - 0.5)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        made.append((model, optimizer, extra))
        snapshots.append(packers_of(model, [optimizer], 2)[trainer].pack(4, bytes([trainer])))
    for trainer, (model, optimizer, extra) in enumerate(made):
        other, other_extra = dense_model(), nn.Parameter(torch.zeros(3))
        restored = SGD([*other.parameters(), other_extra], 0.1, 0.9)
        load_(other, [restored], snapshots, trainer)
        assert everything(other, [restored]) == everything(model, [optimizer])
        assert torch.equal(other_extra, extra) and own_of(*snapshots[trainer]) == bytes([trainer])
        state = unpack(snapshots).buffers(trainer)
        assert torch.equal(state["1.running_mean"], model[1].running_mean)


def test_an_optimizer_of_other_parameters_alone_is_kept_if_it_is_given() -> None:
    model, extra = dense_model(), nn.Parameter(torch.ones(2))
    optimizer = SGD([extra], 0.1, 0.9)
    extra.grad = torch.ones(2)
    optimizer.step()
    other = nn.Parameter(torch.zeros(2))
    restored = SGD([other], 0.1, 0.9)
    load_(dense_model(), [restored], pieces_of(model, [optimizer, optimizer]), 1)
    assert torch.equal(other, extra) and torch.equal(restored.state[other]["momentum_buffer"], torch.ones(2))


def test_an_optimizer_may_own_sharded_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are no part of the dense snapshot; a state of them, which would be, is refused by name."""
    monkeypatch.setattr(dense, "_sharded_names", lambda model: {"0.weight"})
    model, other = dense_model(), dense_model()
    optimizer, restored = SGD(model.parameters(), 0.1), SGD(other.parameters(), 0.1)
    step_dense(model, [optimizer], 1)
    pieces = pieces_of(model, [optimizer])
    load_(other, [restored], pieces, 0)
    assert "0.weight" not in unpack(pieces).parameters
    assert torch.equal(model[0].bias, other[0].bias) and not torch.equal(model[0].weight, other[0].weight)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(5, 3)
    with pytest.raises(TypeError, match=r"the state of a parameter of shape \(5, 3\) whose rows the servers hold"):
        pieces_of(model, [optimizer])


# refused ------------------------------------------------------------------------------------------


def refusals() -> list[tuple[str, Callable[[nn.Module, Optimizer], Any]]]:
    class Own:
        pass

    def hyper(value: Any) -> Callable[[nn.Module, Optimizer], Any]:
        return lambda model, optimizer: optimizer.param_groups[1].update(fn=value)

    def state(value: Any) -> Callable[[nn.Module, Optimizer], Any]:
        return lambda model, optimizer: optimizer.state[model[2].bias].update(deep=[{"x": (1, value)}])

    def loses(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.state[model[2].bias] = {"x": 1}
        del optimizer.param_groups[1]["params"][1]

    def raises(model: nn.Module, optimizer: Optimizer) -> None:
        def hook(optimizer: Optimizer, state: Any) -> None:
            raise RuntimeError("consolidate first")

        optimizer.register_state_dict_post_hook(hook)

    name = r"optimizer 0 \(SGD\)"
    return [
        (rf"^{name}, group 1\['fn'\]: a function cannot be kept", hyper(refusals)),
        (rf"^{name}, group 1\['fn'\]: a .*Own cannot be kept", hyper(Own())),
        (rf"^{name}, state of 2.bias\['deep'\]\[0\]\['x'\]\[1\]: a .*Own cannot be kept", state(Own())),
        (rf"^{name}, state of 2.bias.*: a tensor of layout sparse_coo cannot be kept", state(torch.eye(2).to_sparse())),
        (rf"^{name}, state\['k'\]: a .*Own cannot be kept", lambda m, o: o.state.update(k=Own())),
        (rf"^{name}, key of its state: a .*Own cannot be kept", lambda m, o: o.state.update({Own(): 1})),
        (rf"^{name}: the state of a parameter of shape \(1,\) that is in none of its groups cannot be kept", loses),
        (rf"^{name} cannot be kept: its state_dict says consolidate first", raises),
        (
            r"^the dense state\['parameters'\]\['1.odd'\]: a tensor on device meta cannot be kept",
            lambda m, o: m[1].register_parameter("odd", nn.Parameter(torch.ones(2, device="meta"))),
        ),
        (
            r"^the dense state\['buffers'\]\['1.odd'\]: a tensor of layout sparse_coo cannot be kept",
            lambda m, o: m[1].register_buffer("odd", torch.eye(2).to_sparse()),
        ),
    ]


@pytest.mark.parametrize("case", range(len(refusals())))
def test_what_cannot_be_kept_is_refused_by_name(case: int) -> None:
    """Before the first step by `check`, and whenever it appears by `pack`."""
    wanted, spoil = refusals()[case]
    model = dense_model()
    optimizer = optimizers_of(model)[1]
    packer = packers_of(model, [optimizer], 1)[0]
    packer.check()
    spoil(model, optimizer)
    with pytest.raises(TypeError, match=wanted):
        packer.check()
    with pytest.raises(TypeError, match=wanted):
        packer.pack(1)


def test_restoring_is_all_or_nothing() -> None:
    """Whatever does not fit is said before anything is changed."""
    torch.manual_seed(3)
    model = dense_model()
    optimizers = optimizers_of(model)
    step_dense(model, optimizers, 1)
    pieces = pieces_of(model, optimizers)

    def other(change: Callable[[nn.Module, list[Optimizer]], Any], message: str) -> None:
        fresh = dense_model()
        fresh_optimizers = optimizers_of(fresh)
        change(fresh, fresh_optimizers)
        before = everything(fresh, fresh_optimizers)
        with pytest.raises(ValueError, match=message):
            load_(fresh, fresh_optimizers, pieces, 0)
        assert everything(fresh, fresh_optimizers) == before

    other(lambda m, o: o.reverse(), r"optimizers \['SGD', 'Adam'\] given, \['Adam', 'SGD'\] in the snapshot")
    other(lambda m, o: o.pop(), "optimizers")
    other(lambda m, o: o[1].param_groups.reverse(), "SGD owns other parameters")
    other(lambda m, o: o[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "SGD owns other parameters")
    other(lambda m, o: m[2].register_buffer("more", torch.ones(1)), "differ in buffers 2.more")
    other(lambda m, o: m[2].to(torch.float64), r"parameters 2.weight: shape \(1, 5\), torch.float64 here; .*float32")
    other(lambda m, o: setattr(m[1], "running_mean", torch.ones(6)), r"buffers 1.running_mean: shape \(6,\), .* \(5,\)")


def test_a_lazy_model_is_kept_once_it_has_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    packer = DenseSnapshot(model, 0, 1)
    packer.check()
    model(torch.ones(1, 3))
    piece = packer.pack(1)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"parameters 0.weight: has no shape yet"):
        load_(lazy, [], [piece], 0)
    lazy(torch.ones(1, 3))
    load_(lazy, [], [piece], 0)
    assert everything(lazy, []) == everything(model, [])


def test_the_model_of_a_snapshot_may_go() -> None:
    model = dense_model()
    packer = DenseSnapshot(copy.deepcopy(model), 0, 1)
    for call in (packer.check, lambda: packer.pack(1)):
        with pytest.raises(RuntimeError, match="the model of this snapshot is gone"):
            call()
