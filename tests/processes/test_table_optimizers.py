"""Optimizers as users of TorchRec say them: attached, in `fused_params`, or not at all; beside TorchRec itself."""

import functools
import warnings
from typing import Any

import forked
import pytest
import torch
import torchrec.distributed
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from fbgemm_gpu.tbe.config.optimizer_config import EmainplaceModeDefinition
from models import (
    CPU,
    META,
    Net,
    batch_of,
    compare_shards,
    job_of,
    plain_torchrec,
    seeded,
    seeded_tables,
    shard,
    table,
    train,
)
from shards import all_whole, whole
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import optimizers as torchrec_optimizers
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec.nn.table_optimizers import optimizer_spec
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.spec.job import JobSpec, OptimizerSpec

pytestmark = pytest.mark.usefixtures("process_group")
TYPES, MODES = EmbOptimType, WeightDecayMode
DECAY = {"weight_decay": 0.1, "weight_decay_mode": MODES.L2}


def parameter_with(cls: type | None = None, arguments: dict[str, Any] | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, 2))
    if cls is not None:
        apply_optimizer_in_backward(cls, [parameter], arguments or {})
    return parameter


# what is understood -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
def test_every_class_and_type_means_its_optimizer(kind: str) -> None:
    for path in optimizer(kind).classes:
        module, _, name = path.rpartition(".")
        cls = getattr(__import__(module, fromlist=[name]), name)
        assert optimizer_spec("t", parameter_with(cls, {"lr": 0.5})) == OptimizerSpec(kind, 0.5)
        assert optimizer_spec("t", parameter_with(cls)) == OptimizerSpec(kind, 0.01), "TorchRec's default rate"
        if module == torchrec_optimizers.__name__:  # those of torch take their own arguments only
            assert optimizer_spec("t", parameter_with(cls, {"learning_rate": 0.5})).lr == 0.5
    for name in optimizer(kind).types:
        spec = optimizer_spec("t", parameter_with(), {"optimizer": TYPES[name], "learning_rate": 0.5})
        assert spec == OptimizerSpec(kind, 0.5)


def test_what_torchrec_has_written_into_the_arguments_is_left_out() -> None:
    """A script that has sharded with the same dict before, with TorchRec: that overwrites it, whatever is there."""
    with_type = {"lr": 0.5, "optimizer": EmbOptimType.EXACT_SGD}
    assert optimizer_spec("t", parameter_with(RowWiseAdagrad, with_type)) == OptimizerSpec("rowwise_adagrad", 0.5)


def test_rounding_at_random_is_refused_where_anything_is_rounded() -> None:
    wish = {"stochastic_rounding": True}
    assert optimizer_spec("t", parameter_with(), wish) == OptimizerSpec("sgd", 0.01), "of float32 nothing is rounded"
    assert optimizer_spec("t", parameter_with(), {"stochastic_rounding": False}, "float16").kind == "sgd"
    for fused, attached in ((wish, {}), ({}, wish)):
        with pytest.raises(ValueError, match="table t: `stochastic_rounding` of a table of float16 is not supported"):
            optimizer_spec("t", parameter_with(RowWiseAdagrad, attached), fused, "float16")


def test_a_table_of_which_nobody_says_anything_has_torchrecs_default() -> None:
    assert optimizer_spec("t", parameter_with()) == OptimizerSpec("sgd", 0.01)
    assert optimizer_spec("t", parameter_with(), {"learning_rate": 0.2}) == OptimizerSpec("sgd", 0.2)


UNDERSTOOD: dict[str, tuple[type | None, dict[str, Any], dict[str, Any], OptimizerSpec]] = {
    "eps": (torch.optim.Adagrad, {"lr": 1, "eps": 0.1}, {}, OptimizerSpec("adagrad", 1.0, eps=0.1)),
    "no decay": (RowWiseAdagrad, {"weight_decay": 0.0}, {}, OptimizerSpec("rowwise_adagrad")),
    "decay": (
        RowWiseAdagrad, DECAY, {}, OptimizerSpec("rowwise_adagrad", weight_decay=0.1, weight_decay_mode=1),
    ),
    "decay by number": (
        None, {}, {"optimizer": TYPES.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1, "weight_decay_mode": 2},
        OptimizerSpec("rowwise_adagrad", weight_decay=0.1, weight_decay_mode=2),
    ),
    "norm": (RowWiseAdagrad, {"max_norm": 2}, {}, OptimizerSpec("rowwise_adagrad", max_norm=2.0)),
    "betas": (
        torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "foreach": True}, {},
        OptimizerSpec("adam", 0.1, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1),
    ),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, {}, OptimizerSpec("momentum_sgd", 0.1, momentum=0.5)),
    "lars": (
        torchrec_optimizers.LarsSGD, {"lr": 0.1, "momentum": 0.5, "eta": 0.1, "weight_decay": 0.2}, {},
        OptimizerSpec("lars_sgd", 0.1, momentum=0.5, eta=0.1, weight_decay=0.2),
    ),
    "decay that is decoupled anyhow": (
        None, {}, {"optimizer": TYPES.LAMB, "weight_decay": 0.1, "weight_decay_mode": MODES.DECOUPLE},
        OptimizerSpec("lamb", weight_decay=0.1),
    ),
    "fused alone": (
        None, {}, {"optimizer": TYPES.ADAM, "learning_rate": 0.3, "beta1": 0.5, "weight_decay": 0.1},
        OptimizerSpec("adam", 0.3, beta1=0.5, weight_decay=0.1),
    ),
    "attached wins, key by key": (
        torch.optim.Adagrad, {"lr": 0.1}, {"optimizer": TYPES.ADAM, "learning_rate": 0.3, "eps": 0.2},
        OptimizerSpec("adagrad", 0.1, eps=0.2),
    ),
    "clipping": (
        torch.optim.SGD, {"lr": 0.1}, {"gradient_clipping": True, "max_gradient": 0.5},
        OptimizerSpec("sgd", 0.1, max_gradient=0.5),
    ),
    "clipping by default": (
        torchrec_optimizers.SGD, {"lr": 0.1, "gradient_clipping": True}, {},
        OptimizerSpec("sgd", 0.1, max_gradient=1.0),
    ),
    "FBGEMM's defaults": (
        torch.optim.SGD, {"lr": 0.1},
        {"eps": 1e-8, "beta1": 0.9, "momentum": 0.9, "weight_decay_mode": MODES.NONE, "emainplace_mode": None},
        OptimizerSpec("sgd", 0.1),
    ),
    "where rows are kept": (
        torch.optim.SGD, {"lr": 0.1},
        {
            "cache_load_factor": 0.1, "cache_algorithm": CacheAlgorithm.LRU, "cache_precision": DataType.FP32,
            "output_dtype": SparseType.FP32, "stochastic_rounding": False, "prefetch_pipeline": True,
            "bounds_check_mode": BoundsCheckMode.FATAL, "optimizer_state_dtypes": {"momentum1": SparseType.FP32},
        },
        OptimizerSpec("sgd", 0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_keys_are_honoured(name: str) -> None:
    cls, arguments, fused_params, wanted = UNDERSTOOD[name]
    given = dict(fused_params)
    assert optimizer_spec("t", parameter_with(cls, arguments), fused_params) == wanted
    assert fused_params == given, "what is the user's stays"
    job = job_of(Net(made(cls, arguments)), sharders=[EmbeddingBagCollectionSharder(fused_params=fused_params)])
    assert JobSpec.from_json(job.to_json()) == job and job.tables[0].optimizer == wanted


REFUSED: dict[str, tuple[type | None, dict[str, Any], dict[str, Any], str]] = {
    "another class": (torch.optim.RMSprop, {}, {}, "table t: optimizer RMSprop is not supported; supported are .*Adam"),
    "decay of SGD": (torch.optim.SGD, {"weight_decay": 0.1}, {}, "sgd with weight_decay=0.1 is not"),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {}, "momentum_sgd with nesterov=True"),
    "momentum of fused SGD": (None, {}, {"optimizer": TYPES.EXACT_SGD, "momentum": 0.5}, "sgd with momentum=0.5"),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, {}, "adam with amsgrad=True"),
    "decay of Adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1}, {}, "weight_decay=0.1 .* it has `lr`, `eps`"),
    "decay without a mode": (RowWiseAdagrad, {"weight_decay": 0.1}, {}, "no effect without `weight_decay_mode`"),
    "L2 decay of Adam": (torchrec_optimizers.Adam, DECAY, {}, "optimizer adam with weight_decay_mode=1.0 is not"),
    "negative": (torchrec_optimizers.Adam, {"eps": -1.0}, {}, "`eps` must not be negative"),
    "beta of one": (None, {}, {"optimizer": TYPES.ADAM, "beta2": 1.0}, "`beta2` of adam must be less than 1"),
    "max without clipping": (None, {}, {"max_gradient": 0.5}, "no effect without `gradient_clipping=True`"),
    "clipping to zero": (
        None, {}, {"gradient_clipping": True, "max_gradient": 0.0}, "`max_gradient` must be positive",
    ),
    "8 bits output": (torch.optim.SGD, {}, {"output_dtype": SparseType.INT8}, "`output_dtype`=.* is not supported"),
    "half weights": (torch.optim.SGD, {}, {"weights_precision": DataType.FP16}, "`weights_precision`="),
    "half state": (torch.optim.Adam, {}, {"optimizer_state_dtypes": {"momentum1": SparseType.FP16}}, "is float32"),
    "ids made good": (None, {}, {"bounds_check_mode": BoundsCheckMode.WARNING}, "`bounds_check_mode`=WARNING is not"),
    "ids made good, by number": (None, {}, {"bounds_check_mode": 2}, "`bounds_check_mode`=2 is not"),
    "no dtypes": (None, {}, {"optimizer_state_dtypes": "FP16"}, "`optimizer_state_dtypes`=FP16 is not"),
    "no decay mode": (RowWiseAdagrad, {}, {"weight_decay_mode": "L2"}, "`weight_decay_mode` L2 is not"),
    "unknown": (torch.optim.SGD, {}, {"nonsense": 3}, "sgd with nonsense=3 is not supported"),
    "counters": (
        RowWiseAdagrad, {}, {"weight_decay_mode": MODES.COUNTER}, "`weight_decay_mode` COUNTER .* NONE, L2, DECOUPLE",
    ),
    "counters' settings": (
        RowWiseAdagrad, {}, {"counter_based_regularization": CounterBasedRegularizationDefinition()},
        "counter_based_regularization=",
    ),
    "cowclip": (RowWiseAdagrad, {}, {"weight_decay_mode": MODES.COWCLIP}, "COWCLIP is not supported"),
    "global": (RowWiseAdagrad, {}, {"weight_decay_mode": MODES.DECOUPLE_GLOBAL}, "DECOUPLE_GLOBAL is not supported"),
    "ema": (
        None, {}, {"optimizer": TYPES.EMAINPLACE_ROWWISE_ADAGRAD, "emainplace_mode": EmainplaceModeDefinition()},
        "EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD is not supported: it moves every row .* EmbOptimType.ADAM",
    ),
    "ensemble": (None, {}, {"optimizer": TYPES.ENSEMBLE_ROWWISE_ADAGRAD}, "ENSEMBLE_ROWWISE_ADAGRAD is not supported"),
    "not exact": (None, {}, {"optimizer": TYPES.SGD}, "EmbOptimType.SGD is not supported"),
    "none": (None, {}, {"optimizer": TYPES.NONE}, "EmbOptimType.NONE is not supported: gradients of tables go to"),
    "a name": (None, {}, {"optimizer": "adam"}, "must be an `EmbOptimType`, got 'adam'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    cls, arguments, fused_params, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        optimizer_spec("t", parameter_with(cls, arguments), fused_params)
    with pytest.raises(ValueError, match=message.removeprefix("table t: ")):
        shard(Net(made(cls, arguments)), sharders=[EmbeddingBagCollectionSharder(fused_params=fused_params)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"lr": 0.1, "beta1": 0.95, "beta2": 0.999},
            "`beta1`=0.95 of tables has no effect, as with FBGEMM: rowwise",
        ),
        ({"eta": 0.5, "beta2": 0.9}, "`beta2`=0.9, `eta`=0.5 of tables has no effect"),
    ],
)
def test_numbers_of_other_optimizers_are_told_to_have_no_effect(arguments: dict[str, Any], told: str) -> None:
    """Scripts that build any optimizer give them to each; FBGEMM looks at them in those that have them."""
    with pytest.warns(UserWarning, match=told):
        found = optimizer_spec("t", parameter_with(RowWiseAdagrad, arguments))
    assert found == OptimizerSpec("rowwise_adagrad", arguments.get("lr", 0.01))


def test_several_optimizers_of_a_table_are_refused() -> None:
    parameter = parameter_with(torch.optim.SGD)
    apply_optimizer_in_backward(torch.optim.Adam, [parameter], {})
    with pytest.raises(ValueError, match="table t: it has several optimizers, SGD and Adam; one is supported"):
        optimizer_spec("t", parameter)


# whole models -----------------------------------------------------------------------------------------


def made(cls: type | None = None, arguments: dict[str, Any] | None = None) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=seeded_tables(), device=META)
    if cls is not None:
        apply_optimizer_in_backward(cls, collection.parameters(), arguments or {})
    return collection


BESIDE_TORCHREC: dict[str, tuple[type | None, dict[str, Any], dict[str, Any]]] = {
    "nothing said": (None, {}, {}),
    "a rate": (None, {}, {"learning_rate": 0.3}),
    "SGD": (None, {}, {"optimizer": TYPES.EXACT_SGD, "learning_rate": 0.3}),
    "Adagrad": (None, {}, {"optimizer": TYPES.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-4}),
    "row-wise": (None, {}, {"optimizer": TYPES.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-4}),
    "both": (RowWiseAdagrad, {"lr": 0.2}, {"optimizer": TYPES.EXACT_SGD, "learning_rate": 0.1, "eps": 1e-4}),
    "clipped": (torch.optim.SGD, {"lr": 0.5}, {"gradient_clipping": True, "max_gradient": 0.01}),
    "clipped, row-wise": (RowWiseAdagrad, {"lr": 0.1}, {"gradient_clipping": True, "max_gradient": 0.01}),
}  # fmt: skip


def end_of(model: nn.Module, trainer: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    losses = train(model, [batch_of(6, 100 * seed + trainer) for seed in range(8)])
    return losses, model.state_dict(), model.fused_optimizer.state_dict()["state"]


def compare_with_torchrec(trainers: int, trainer: int, name: str) -> None:
    cls, arguments, fused_params = BESIDE_TORCHREC[name]
    sharder = EmbeddingBagCollectionSharder(fused_params=dict(fused_params))
    ours, _ = shard(Net(made(cls, arguments)), trainers, trainer, sharders=[sharder])
    losses, rows, state = end_of(ours, trainer)
    their_losses, their_rows, their_state = end_of(
        plain_torchrec(Net(made(cls, arguments)), trainers, dict(fused_params)), trainer
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(their_losses), rtol=1e-5, atol=1e-6)
    assert rows.keys() == their_rows.keys()
    state = all_whole(state)  # by all trainers in one order: theirs have state of their own tables only
    for key, theirs in their_rows.items():
        compare_shards(rows[key], theirs)
    for key, theirs in their_state.items():
        assert state[key].keys() == theirs.keys(), key
        for field in theirs:
            compare_shards(state[key][field], theirs[field])


@pytest.mark.filterwarnings("ignore:tables .* have no optimizer")
@pytest.mark.parametrize("name", BESIDE_TORCHREC)
def test_models_train_as_with_torchrec(name: str) -> None:
    compare_with_torchrec(1, 0, name)


def two_trainers(rank: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in ("clipped", "clipped, row-wise"):
        compare_with_torchrec(2, rank, name)
    dist.destroy_process_group()


def test_two_trainers_clip_as_torchrec_does(tmp_path: Any) -> None:
    """After the division by the number of trainers."""
    forked.call(two_trainers, 2, str(tmp_path / "store"))


def test_clipping_changes_something() -> None:
    ends = []
    for limit in (0.01, 1e9):
        fused = {"gradient_clipping": True, "max_gradient": limit}
        model, _ = shard(
            Net(made(torch.optim.SGD, {"lr": 0.5})), sharders=[EmbeddingBagCollectionSharder(fused_params=fused)]
        )
        ends.append(end_of(model, 0)[1])
    assert not torch.equal(*(whole(end["collections.0.embedding_bags.wide.weight"]) for end in ends))


def test_tables_without_an_optimizer_are_told_once() -> None:
    net = Net(made(), EmbeddingBagCollection(tables=[table("x", 9, 4, "f1")], device=META))
    with pytest.warns(
        UserWarning, match="tables wide, small, shared, last, x have no optimizer, so TorchRec's"
    ) as told:
        shard(net)
    assert sum("no optimizer" in str(warning.message) for warning in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        shard(Net(made()), sharders=[EmbeddingBagCollectionSharder(fused_params={"optimizer": TYPES.EXACT_SGD})])


def with_rates(rates: dict[str, float]) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=seeded_tables(), device=META)
    for name, rate in rates.items():
        apply_optimizer_in_backward(RowWiseAdagrad, collection.embedding_bags[name].parameters(), {"lr": rate})
    return collection


def test_tables_of_one_layout_have_rates_of_their_own() -> None:
    rates = {"wide": 0.5, "shared": 0.01, "small": 0.1, "last": 0.1}  # two of dim 8, two of dim 4
    ours, session = shard(Net(with_rates(rates)))
    assert [(table_group.dim, table_group.optimizer.lr) for table_group in session.job.table_groups] == [
        (8, 0.5),
        (4, 0.1),
        (8, 0.01),
    ]
    (losses, rows, _), (their_losses, theirs, _) = end_of(ours, 0), end_of(plain_torchrec(Net(with_rates(rates)), 1), 0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(their_losses), rtol=1e-5, atol=1e-6)
    for key in theirs:
        compare_shards(rows[key], theirs[key])
    groups = ours.fused_optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.1, 0.01]
    groups[2]["lr"] = 0.0
    before = ours.state_dict()
    train(ours, [batch_of(6, 99)])
    after = ours.state_dict()
    same = {
        name: torch.equal(whole(before[k]), whole(after[k]))
        for name in rates
        for k in [f"collections.0.embedding_bags.{name}.weight"]
    }
    assert same == {"wide": False, "shared": True, "small": False, "last": False}


def test_only_learning_rates_may_change_in_training() -> None:
    model, _ = shard(Net(made(torch.optim.Adam, {"lr": 0.1})))
    train(model, [batch_of(6, 0)])
    model.fused_optimizer.param_groups[0]["beta1"] = 0.5
    with pytest.raises(ValueError, match=r"`beta1` of the fused optimizer was changed from 0\.9 to 0\.5"):
        train(model, [batch_of(6, 1)])


# state ------------------------------------------------------------------------------------------------


def of_kind(kind: str) -> Net:
    found = optimizer(kind)
    if kind == "momentum_sgd":
        return Net(made(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))
    module, _, name = found.classes[-1].rpartition(".")
    return Net(made(getattr(__import__(module, fromlist=[name]), name), {"lr": 0.1}))


@pytest.mark.parametrize("kind", NAMES)
def test_state_travels_under_torchrecs_names(kind: str) -> None:
    """As TorchRec has it: the first is `momentum1`, others as FBGEMM's `get_optimizer_state` calls them."""
    model, session = shard(of_kind(kind))
    assert {table_group.optimizer.kind for table_group in session.job.table_groups} == {kind}
    train(model, [batch_of(6, seed) for seed in range(3)])
    saved, state = model.state_dict(), model.fused_optimizer.state_dict()
    wide = state["state"]["collections.0.embedding_bags.wide.weight"]
    fields = [(f"wide.{field.name}", (50,) if field.per_row else (50, 8)) for field in optimizer(kind).state]
    assert [(name, tuple(value.size())) for name, value in wide.items()] == fields
    assert all(whole(value).any() for value in wide.values())
    assert [name for name, _ in fields][:1] in ([], ["wide.momentum1"])
    other, loaded = shard(of_kind(kind))
    other.load_state_dict(dict(saved))
    other.fused_optimizer.load_state_dict(state)
    for a, b in zip(session.records, loaded.records, strict=True):
        assert torch.equal(a, b)


# other modules ----------------------------------------------------------------------------------------


class Positioned(nn.Module):
    """A feature-processed collection without an optimizer, and sequences without one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = table("t", 20, 8, "f0", "f1", init_fn=functools.partial(seeded, seed=3))
        bags = EmbeddingBagCollection(tables=[config], device=META, is_weighted=True)
        processors = {"f0": PositionWeightedModule(4), "f1": PositionWeightedModule(4)}
        self.tables = FeatureProcessedEmbeddingBagCollection(bags, processors)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        features = batch.sparse_features
        two = KeyedJaggedTensor.from_jt_dict({name: features[name] for name in ("f0", "f1")})
        pooled = self.tables(two).values()
        return pooled.square().mean(), pooled


def test_a_feature_processed_collection_has_the_fused_params_of_its_wrapper() -> None:
    """And is clipped as with TorchRec, gradients of the processors included."""
    fused = {"optimizer": TYPES.EXACT_ADAGRAD, "learning_rate": 0.3, "gradient_clipping": True, "max_gradient": 0.002}
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
    ours, session = shard(Positioned(), sharders=[sharder])
    assert session.job.tables[0].optimizer == OptimizerSpec("adagrad", 0.3, max_gradient=0.002)
    module = Positioned()
    entry = construct_module_sharding_plan(
        module.tables, {"t": table_wise(rank=0, compute_kernel="fused")}, sharder, device_type="cpu"
    )
    plan = ShardingPlan({"tables": entry})
    theirs = torchrec.distributed.DistributedModelParallel(module, device=CPU, plan=plan, sharders=[sharder])
    ends = []
    for model in (ours, theirs):
        dense = [p for name, p in model.named_parameters() if "position_weight" in name]
        optimizer = torch.optim.SGD(dense, lr=0.5)
        for seed in range(6):
            optimizer.zero_grad()
            model(batch_of(6, seed))[0].backward()
            optimizer.step()
        ends.append(model.state_dict())
    assert ends[0].keys() == ends[1].keys() and len(ends[0]) == 3
    for key, value in ends[1].items():
        compare_shards(ends[0][key], value)


def test_sequences_have_the_fused_params_of_their_sharder() -> None:
    config = EmbeddingConfig(name="s", num_embeddings=20, embedding_dim=8, feature_names=["f0"])
    model = nn.ModuleList([EmbeddingCollection(tables=[config], device=META), made()])
    for_sequences = EmbeddingCollectionSharder(fused_params={"optimizer": TYPES.ADAM, "learning_rate": 0.3})
    for_bags = EmbeddingBagCollectionSharder(fused_params={"optimizer": TYPES.LAMB, "beta1": 0.5})
    kinds = {t.name: t.optimizer for t in job_of(model, sharders=[for_bags, for_sequences]).tables}
    lamb = OptimizerSpec("lamb", beta1=0.5)
    assert kinds == {"s": OptimizerSpec("adam", 0.3), **dict.fromkeys(("wide", "small", "shared", "last"), lamb)}
