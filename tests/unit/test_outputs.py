"""`output_dtype`: embeddings that come out in 16 bits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from fake_session import FakeSession
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from models import CPU, FEATURES, LR, MEAN, SUM, batch_of, job_of, repeated_batch, table, tables
from shards import whole
from test_planned import plan_of
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torch_ecrec.nn.parallel import DistributedModelParallel

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)

DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}


class Over(nn.Module):
    """A collection and what a script does with its output: a loss of each value by its place, in float32.

    Args:
        dtypes: of each key, to which the script itself rounds the output.
    """

    def __init__(self, tables: nn.Module, dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__()
        self.tables, self.dtypes = tables, dtypes or {}

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Tensor]]:
        output = self.tables(features)
        output = output.wait() if hasattr(output, "wait") else output
        by_key = {k: v.values() for k, v in output.items()} if isinstance(output, dict) else output.to_dict()
        by_key = {key: by_key[key].to(self.dtypes.get(key, by_key[key].dtype)) for key in sorted(by_key)}
        total = torch.zeros((), dtype=torch.float32)
        for number, values in enumerate(by_key.values()):
            places = torch.linspace(0.5, 1.5, max(1, values.numel()))[: values.numel()].view(values.shape)
            total = total + (torch.tanh(values.float()) * places).sum() * (number + 1) / 7
        return total, by_key


def bags(weighted: bool = False) -> nn.Module:
    torch.manual_seed(0)
    configs = tables()
    for config in configs if weighted else ():
        config.pooling = SUM  # unsharded, TorchRec has no weighted mean
    made = EmbeddingBagCollection(tables=configs, device=CPU, is_weighted=weighted)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": LR})
    return made


def sequences() -> nn.Module:
    torch.manual_seed(0)
    configs = [
        EmbeddingConfig(name="words", num_embeddings=30, embedding_dim=8, feature_names=["f0", "f2"]),
        EmbeddingConfig(name="places", num_embeddings=20, embedding_dim=8, feature_names=["f1"]),
    ]
    made = EmbeddingCollection(tables=configs, device=CPU)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": LR})
    return made


def positions() -> nn.Module:
    processors = {name: PositionWeightedModule(8).float() for name in FEATURES}
    return FeatureProcessedEmbeddingBagCollection(bags(weighted=True), processors)  # type: ignore[arg-type]


FORMS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "bags": (bags, EmbeddingBagCollectionSharder, False),
    "weighted bags": (functools.partial(bags, weighted=True), EmbeddingBagCollectionSharder, True),
    "positions": (positions, torchrec.distributed.fp_embeddingbag.FeatureProcessedEmbeddingBagCollectionSharder, True),
    "sequences": (sequences, EmbeddingCollectionSharder, False),
}


def ours(model: Over, **more: Any) -> Any:
    session = FakeSession(job_of(model, sharders=more.get("sharders")))
    return DistributedModelParallel(model, device=CPU, session=session, **more)


def sharder_of(form: str, value: Any) -> Any:
    kind = FORMS[form][1]
    fused_params = {"output_dtype": value}
    return kind(EmbeddingBagCollectionSharder(fused_params)) if form == "positions" else kind(fused_params=fused_params)


def same_training(first: Any, second: Any, batches: list[KeyedJaggedTensor]) -> None:
    """Outputs of training and of an evaluation, losses, dense gradients and tables at the end: bit for bit."""
    for batch in batches:
        (loss, outputs), (other_loss, other_outputs) = first.train()(batch), second.train()(batch)
        assert list(outputs) == list(other_outputs) and torch.equal(loss, other_loss)
        for key, values in outputs.items():
            assert values.dtype == other_outputs[key].dtype and torch.equal(values, other_outputs[key]), key
        loss.backward()
        other_loss.backward()
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        with torch.no_grad():
            (loss, _), (other_loss, _) = first.eval()(batch), second.eval()(batch)
            assert torch.equal(loss, other_loss)
    weights, others = first.full_state_dict(), second.full_state_dict()
    assert weights and list(weights) == list(others)
    assert all(torch.equal(whole(weights[name]), whole(others[name])) for name in weights)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_what_comes_out_is_rounded_once_and_trains_as_if_the_script_rounded_it(form: str, name: str) -> None:
    make, _, weighted = FORMS[form]
    batches = [batch_of(5, seed, weighted=weighted).sparse_features for seed in range(3)]
    keys = Over(make())(batches[0])[1]
    asked = ours(Over(make()), sharders=[sharder_of(form, SparseType.from_dtype(DTYPES[name]))])
    by_script = ours(Over(make(), dict.fromkeys(keys, DTYPES[name])))
    assert all(values.dtype is DTYPES[name] for values in asked(batches[0])[1].values())
    same_training(asked, by_script, batches)


def test_bags_that_several_samples_have_are_rounded_too() -> None:
    asked = ours(Over(bags()), sharders=[sharder_of("bags", SparseType.FP16)])
    by_script = ours(Over(bags(), dict.fromkeys(["f2", "f0", "f1@small", "f1@shared", "f3"], torch.float16)))
    same_training(asked, by_script, [repeated_batch(FEATURES, 4, seed) for seed in range(2)])


@pytest.mark.parametrize("form", ["bags", "weighted bags", "sequences"])
def test_it_is_what_torchrec_gives(form: str) -> None:
    """On a CPU FBGEMM has FP16 of the two. Sums in another order may round to the number beside."""
    make, _, weighted = FORMS[form]
    theirs_of, mine_of = Over(make()), Over(make())
    sharder = sharder_of(form, SparseType.FP16)
    ranks = {
        name: table_wise(rank=0, compute_kernel="fused") for name in sharder.shardable_parameters(theirs_of.tables)
    }
    plan = construct_module_sharding_plan(theirs_of.tables, ranks, sharder, local_size=1, device_type="cpu")
    theirs = torchrec.distributed.DistributedModelParallel(
        theirs_of, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    mine = ours(mine_of, sharders=[sharder])
    mine.load_state_dict(theirs.state_dict())
    for seed in range(4):
        batch = batch_of(5, seed, weighted=weighted).sparse_features
        (loss, outputs), (other_loss, other_outputs) = mine(batch), theirs(batch)
        assert list(outputs) == list(other_outputs)
        for key, values in outputs.items():
            assert values.dtype == other_outputs[key].dtype == torch.float16
            torch.testing.assert_close(values, other_outputs[key], rtol=2**-10, atol=2**-16)
        loss.backward()
        other_loss.backward()
    for key, values in theirs.state_dict().items():
        compare_half_trained(mine.state_dict()[key], values)


def compare_half_trained(mine: Tensor, theirs: Any) -> None:
    """As near as gradients of 11 bits are after four steps."""
    for shard in theirs.local_shards() if hasattr(theirs, "local_shards") else []:
        theirs = shard.tensor
    torch.testing.assert_close(whole(mine), theirs, rtol=1e-3, atol=1e-3 * LR)


def test_tables_of_one_collection_may_differ() -> None:
    """By a plan: each is rounded to its own, and bags are put together as the least that has all."""
    plan = plan_of("tables", output_dtype=DataType.FP16)  # of `wide`: features f2 and f0
    features = batch_of(5, 0).sparse_features
    plain, planned = ours(Over(bags()))(features)[1], ours(Over(bags()), plan=plan)(features)[1]
    assert any(not torch.equal(planned[key], plain[key]) for key in ("f2", "f0"))
    for key, values in planned.items():
        wanted = plain[key].half().float() if key in ("f2", "f0") else plain[key]
        assert values.dtype is torch.float32 and torch.equal(values, wanted)


def test_a_plan_goes_before_the_sharder() -> None:
    plan = plan_of("tables", output_dtype=DataType.FP16)
    sharder = sharder_of("bags", SparseType.BF16)
    features = batch_of(5, 0).sparse_features
    plain = ours(Over(bags()))(features)[1]
    found = ours(Over(bags()), plan=plan, sharders=[sharder])(features)[1]
    for key, values in found.items():  # float16 and bfloat16 together are float32
        half = torch.float16 if key in ("f2", "f0") else torch.bfloat16
        assert values.dtype is torch.float32 and torch.equal(values, plain[key].to(half).float())


def test_of_sequences_each_has_the_dtype_of_its_table() -> None:
    plan = plan_of("tables", ("words", "places"), output_dtype=DataType.FP32)
    plan.plan["tables"]["places"].output_dtype = DataType.BF16  # type: ignore[index]
    del plan.plan["tables"]["wide"]  # type: ignore[attr-defined]
    found = ours(Over(sequences()), plan=plan)(batch_of(5, 0).sparse_features)[1]
    assert {key: values.dtype for key, values in found.items()} == {
        "f0": torch.float32, "f2": torch.float32, "f1": torch.bfloat16
    }  # fmt: skip


@pytest.mark.parametrize("value", [SparseType.INT8, DataType.INT4, "FP16", torch.float16], ids=str)
def test_others_are_refused_by_name(value: Any) -> None:
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "output_dtype": value}
    module = EmbeddingBagCollection(tables=[table("wide", 7, 4, "f0", pooling=MEAN)], device=CPU)
    with pytest.raises(ValueError, match=r"table wide: `output_dtype`=.* is not supported; supported are FP32, FP16"):
        DistributedModelParallel(module, device=CPU, sharders=[EmbeddingBagCollectionSharder(fused_params)])  # type: ignore[list-item]
