"""Small features one by one: TorchRec's unsharded module and ours side by side, in one process.

Each case is a form of collection, a layout of tables, a kind of batch and an optimizer: steps of training with an
evaluation after each. Outputs, their keys and order, and the weights at the end must be TorchRec's. What differs on
purpose is in `ERRORS`. (Sharded TorchRec is compared with elsewhere: `test_oracle_shardings.py` and others.)
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_session import FakeSession
from models import CPU, EPS, LR, OPTIMIZERS, dense_parameters, job_of
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torch_ecrec.nn.parallel import DistributedModelParallel

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)

ROWS, STEPS, MOST = 11, 2, 4

LAYOUTS: dict[str, list[tuple[str, int, list[str]]]] = {  # table, dim, features
    "one": [("t", 4, ["f0"])],
    "two": [("t", 4, ["f1"]), ("u", 4, ["f0"])],
    "dims": [("t", 4, ["f0"]), ("u", 12, ["f1"]), ("v", 8, ["f2"])],
    "shared": [("t", 4, ["f2", "f0"]), ("u", 4, ["f1"])],
    "feature twice": [("t", 4, ["f0", "f1"]), ("u", 4, ["f1"])],
    "many": [(f"t{i}", 4, [f"f{i}"]) for i in range(12)],
}

# --- forms ----------------------------------------------------------------------------------------


def _bag_configs(layout: str, pooling: PoolingType) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=t, num_embeddings=ROWS, embedding_dim=dim, feature_names=names, pooling=pooling)
        for t, dim, names in LAYOUTS[layout]
    ]


def _sequence_configs(layout: str) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name=t, num_embeddings=ROWS, embedding_dim=dim, feature_names=names)
        for t, dim, names in LAYOUTS[layout]
    ]


def _arguments(kind: str) -> dict[str, float]:
    return {"lr": LR} if kind == "sgd" else {"lr": LR, "eps": EPS}


def _attached(module: nn.Module, kind: str) -> nn.Module:
    apply_optimizer_in_backward(OPTIMIZERS[kind], module.parameters(), _arguments(kind))
    return module


def _bags(pooling: PoolingType, weighted: bool = False) -> Callable[[str, str], nn.Module]:
    return lambda layout, kind: _attached(
        EmbeddingBagCollection(tables=_bag_configs(layout, pooling), device=CPU, is_weighted=weighted), kind
    )


def _positions(layout: str, kind: str) -> nn.Module:
    bags: Any = _bags(PoolingType.SUM, weighted=True)(layout, kind)
    names = {name for _, _, features in LAYOUTS[layout] for name in features}
    return FeatureProcessedEmbeddingBagCollection(bags, {n: PositionWeightedModule(64) for n in sorted(names)})


def _sequences(need_indices: bool) -> Callable[[str, str], nn.Module]:
    return lambda layout, kind: _attached(
        EmbeddingCollection(tables=_sequence_configs(layout), device=CPU, need_indices=need_indices), kind
    )


FORMS: dict[str, Callable[[str, str], nn.Module]] = {
    "sums": _bags(PoolingType.SUM),
    "means": _bags(PoolingType.MEAN),
    "weighted sums": _bags(PoolingType.SUM, weighted=True),
    "positions": _positions,
    "fused sums": lambda layout, kind: FusedEmbeddingBagCollection(
        _bag_configs(layout, PoolingType.SUM), OPTIMIZERS[kind], _arguments(kind), device=CPU
    ),
    "sequences": _sequences(need_indices=False),
    "sequences with ids": _sequences(need_indices=True),
}

# --- batches --------------------------------------------------------------------------------------


def _batch(
    names: list[str],
    seed: int,
    weighted: bool,
    *,
    size: int = 5,
    most: int = MOST,
    ids: torch.dtype = torch.int64,
    lengths: torch.dtype = torch.int32,
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda lengths, values: (lengths, values),
    offsets: bool = False,
) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    found_FB = torch.randint(0, most + 1, (len(names), size), generator=random)
    found_FB, values = change(found_FB, torch.randint(0, ROWS, (len(names) * size * most,), generator=random))
    count = int(found_FB.sum())
    weights = torch.rand(count, generator=random) if weighted else None
    flat, values = found_FB.flatten().to(lengths), values[:count].to(ids)
    if offsets:
        ends = torch.cat([torch.zeros(1, dtype=lengths), flat.cumsum(0).to(lengths)])
        return KeyedJaggedTensor(names, values, weights, offsets=ends)
    return KeyedJaggedTensor.from_lengths_sync(names, values, flat, weights)


def _of(**how: Any) -> Callable[[list[str], int, bool], KeyedJaggedTensor]:
    return lambda names, seed, weighted: _batch(names, seed, weighted, **how)


def _first_feature_empty(lengths_FB: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    lengths_FB[0] = 0
    return lengths_FB, values


def _one_bag(lengths_FB: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    full = torch.zeros_like(lengths_FB)
    full[:, 1] = lengths_FB.sum(dim=1)
    return full, values


def _ends(lengths_FB: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return lengths_FB, torch.where(values % 2 == 0, 0, ROWS - 1)


BATCHES: dict[str, Callable[[list[str], int, bool], KeyedJaggedTensor]] = {
    "usual": _of(),
    "ids of int32": _of(ids=torch.int32),
    "lengths of int64": _of(lengths=torch.int64),
    "offsets": _of(offsets=True, lengths=torch.int64),
    "one sample": _of(size=1),
    "no ids": _of(most=0),
    "an empty feature": _of(change=_first_feature_empty),
    "one bag with all": _of(change=_one_bag),
    "one id, again and again": _of(change=lambda lengths, values: (lengths, torch.zeros_like(values) + 3)),
    "first and last rows": _of(change=_ends),
    "more features than tables": lambda names, seed, weighted: _batch(["x", *names, "y"], seed, weighted),
    "another order": lambda names, seed, weighted: _batch(names[::-1], seed, weighted),
    "long bags": _of(most=40),
    "weights": lambda names, seed, _: _batch(names, seed, True),  # in vain where a form has none
    "sizes that change": lambda names, seed, weighted: _batch(names, seed, weighted, size=1 + seed % 3),
}

# --- side by side ---------------------------------------------------------------------------------


def features_of(layout: str) -> list[str]:
    return sorted({name for _, _, features in LAYOUTS[layout] for name in features})


def tensors_of(output: Any) -> dict[str, Tensor]:
    """What a user reads of an output, in its order."""
    if not isinstance(output, dict):  # KeyedTensor, perhaps awaited
        output = output.wait() if hasattr(output, "wait") else output
    if isinstance(output, dict):
        found: dict[str, Tensor] = {}
        for name, jagged in output.items():
            found |= {name: jagged.values(), f"{name} lengths": jagged.lengths().to(torch.int64)}
            if jagged.weights_or_none() is not None:
                found[f"{name} ids"] = jagged.weights()
        return found
    return {**output.to_dict(), "all": output.values()}


def loss_of(output: dict[str, Tensor]) -> Tensor:
    """Weighs each output by its place and key."""
    total = torch.zeros(())
    for number, (name, values) in enumerate(output.items()):
        if values.is_floating_point() and not name.endswith("ids") and name != "all":
            places = torch.linspace(0.5, 1.5, max(1, values.numel()))[: values.numel()].view(values.shape)
            total = total + (torch.tanh(values) * places).sum() * (number + 1) / 7
    return total


def both(form: str, layout: str, kind: str) -> tuple[nn.Module, Any]:
    """TorchRec's, and ours of the same weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(FORMS[form](layout, kind))
    return made[0], DistributedModelParallel(made[1], device=CPU, session=FakeSession(job_of(made[1])))


def steps_of(model: nn.Module, batches: list[KeyedJaggedTensor]) -> Iterator[dict[str, Tensor]]:
    """What it gives in each step, and in an evaluation after it."""
    dense = dense_parameters(model).values()
    optimizer = torch.optim.SGD(dense, lr=LR) if dense else None
    for batch in batches:
        found = tensors_of(model.train()(batch))
        loss_of(found).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        yield {name: values.detach().clone() for name, values in found.items()}
        with torch.no_grad():
            evaluated = tensors_of(model.eval()(batch))
        yield evaluated


_SEQUENCES = tuple(form for form in FORMS if "sequences" in form)
_FITS = [
    *(("usual", layout, form) for layout, form in itertools.product(LAYOUTS, FORMS)),
    *((batch, "shared", form) for batch, form in itertools.product(BATCHES, FORMS) if batch != "usual"),
]
CASES = [
    (batch, layout, form, "rowwise_adagrad") for batch, layout, form in _FITS
    if not (layout == "dims" and form in _SEQUENCES)  # TorchRec: one dimension for all tables of sequences
] + [("usual", "feature twice", form, kind) for form, kind in itertools.product(FORMS, ("sgd", "adagrad"))]  # fmt: skip


@pytest.mark.parametrize(("batch", "layout", "form", "kind"), CASES, ids=[", ".join(case) for case in CASES])
def test_as_torchrec(batch: str, layout: str, form: str, kind: str) -> None:
    theirs, ours = both(form, layout, kind)
    weighted = form == "weighted sums"
    batches = [BATCHES[batch](features_of(layout), seed, weighted) for seed in range(STEPS)]
    for wanted, found in zip(steps_of(theirs, batches), steps_of(ours, batches), strict=True):
        assert list(found) == list(wanted)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    end = ours.full_state_dict()
    for name, weights in theirs.state_dict().items():
        torch.testing.assert_close(end[name], weights, rtol=1e-4, atol=1e-5)


def _ids(change: Callable[[Tensor], Tensor]) -> Callable[[KeyedJaggedTensor], KeyedJaggedTensor]:
    return lambda batch: KeyedJaggedTensor.from_lengths_sync(batch.keys(), change(batch.values()), batch.lengths())


def _too_large(ids: Tensor) -> Tensor:
    ids[0] = ROWS
    return ids


def _negative(ids: Tensor) -> Tensor:
    ids[0] = -1
    return ids


ERRORS: dict[str, tuple[Callable[[KeyedJaggedTensor], KeyedJaggedTensor], str]] = {
    "an id too large": (_ids(_too_large), "id 11 of feature f. is out of range: "),
    "a negative id": (_ids(_negative), "id -1 of feature f. is out of range: "),
    "ids of float": (_ids(lambda ids: ids.float()), "ids must be int64 or int32, got torch.float32"),
    "a feature that is not there": (lambda batch: batch.permute([0, 1]), "the batch lacks features f2; it has f0, f1"),
}


@pytest.mark.parametrize("form", ["sums", "means", "fused sums", "sequences"])
@pytest.mark.parametrize("what", ERRORS)
def test_errors_of_both(what: str, form: str) -> None:
    """What TorchRec cannot do, ours says by name; the next batch is none the worse for it.

    FBGEMM looks up row 0 for an id that is too large, and rounds ids, where TorchRec's own unfused modules refuse them.
    """
    change, message = ERRORS[what]
    theirs, ours = both(form, "shared", "sgd")
    names = features_of("shared")
    lenient = form == "fused sums" and what in ("an id too large", "ids of float")
    refused = pytest.raises((RuntimeError, IndexError, KeyError, ValueError))
    with contextlib.nullcontext() if lenient else refused:
        tensors_of(theirs(change(BATCHES["usual"](names, 0, False))))
    with pytest.raises(ValueError, match=message):
        tensors_of(ours(change(BATCHES["usual"](names, 0, False))))
    found = tensors_of(ours(BATCHES["usual"](names, 0, False)))
    assert loss_of(found).isfinite()
