"""What scripts say of tables in other places than an optimizer: in a plan, and of tables that are their own to step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from models import CPU, META, Net, batch_of, collection, dense_parameters, shard, table, train
from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)

PATH = "collections.0"
TABLES = ("wide", "small", "shared", "last")


def plan_of(path: str = PATH, tables: tuple[str, ...] = TABLES, **of_wide: Any) -> ShardingPlan:
    """As a planner makes it, with a wish for the table `wide`."""
    entries = {name: ParameterSharding("table_wise", "fused", ranks=[0]) for name in tables}
    entries["wide"] = ParameterSharding(**{"sharding_type": "table_wise", "compute_kernel": "fused", **of_wide})
    return ShardingPlan({path: EmbeddingModuleShardingPlan(entries)})


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"output_dtype": DataType.INT8}, "table wide: `output_dtype`=.*INT8 is not supported; supported are FP32"),
        ({"bounds_check_mode": BoundsCheckMode.WARNING}, "table wide: `bounds_check_mode`="),
    ],
)
def test_a_wish_of_a_plan_that_is_not_honoured_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(Net(collection()), plan=plan_of(**wish))


def test_a_wish_of_a_plan_for_a_wrapper_is_refused() -> None:
    bags = collection(configs=[table("wide", 7, 4, "f0")], is_weighted=True)
    module = nn.ModuleDict(
        {"fp": FeatureProcessedEmbeddingBagCollection(bags, {"f0": PositionWeightedModule(3)})}  # type: ignore[dict-item]
    )
    with pytest.raises(ValueError, match="table wide: `output_dtype`="):
        shard(module, plan=plan_of("fp", ("wide",), output_dtype=DataType.INT8))


def test_wishes_of_a_plan_that_change_no_number_are_taken() -> None:
    plan = plan_of(output_dtype=DataType.FP32, stochastic_rounding=True, enforce_hbm=True)
    model, session = shard(Net(collection("adagrad")), plan=plan)
    assert len(train(model, [batch_of(4, 0)])) == 1 and session.step == 2


SCRIPTS = [{"sharding_type": "data_parallel", "compute_kernel": "dense"}, {"compute_kernel": "dense"}]


@pytest.mark.parametrize("planned", SCRIPTS, ids=["data-parallel", "dense"])
def test_a_table_that_the_plan_leaves_to_the_script_is_served_and_told(planned: Any) -> None:
    """TorchRec's filter would give it to an optimizer of the script; the servers step it, and say so."""
    with pytest.warns(UserWarning, match=r"step them in the backward: wide \(adagrad\)\. Attach the optimizer"):
        model, session = shard(Net(collection("adagrad")), plan=plan_of(**planned))
    undisturbed, _ = shard(Net(collection("adagrad")))
    assert set(dense_parameters(model)) == {"over.weight", "over.bias"}
    batches = [batch_of(4, seed) for seed in range(3)]
    assert train(model, batches) == train(undisturbed, batches) and session.step == 4


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD], ids=lambda cls: cls.__name__)
def test_an_optimizer_of_all_parameters_keeps_nothing_of_tables(kind: Any) -> None:
    """As scripts give them: what it makes for a table at once (Adagrad's sums) has no rows, and is never touched."""
    ends = []
    for everything in (False, True):
        model, session = shard(Net(collection("adagrad")))
        named = dict(model.named_parameters()) if everything else dense_parameters(model)
        optimizer: Any = KeyedOptimizerWrapper(named, lambda given: kind(given, lr=0.1))
        model.attach(optimizer=optimizer)
        ends.append(train(model, [batch_of(4, seed) for seed in range(3)], optimizer))
        model.flush()
        assert session.step == 4
    assert ends[0] == ends[1]


def test_a_collection_without_attached_optimizers_may_be_used_after_it_was_sharded() -> None:
    """As with TorchRec: the script has it still, and quantises or compares it. The other one's memory is let go of."""
    kept, taken = (Net(collection("sgd", [table("t", 5, 4, "f0")])).collections[0] for _ in range(2))
    for weight in kept.parameters():
        del weight._optimizer_classes
    before = kept.embedding_bags["t"].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a table without an optimizer
        model, _ = shard(kept)
    assert torch.equal(kept.embedding_bags["t"].weight, before)
    assert torch.equal(model.full_state_dict()["embedding_bags.t.weight"], before)
    shard(taken)
    assert taken.embedding_bags["t"].weight.shape == (0, 4)


def test_what_an_optimizer_makes_beside_a_placeholder_has_no_rows() -> None:
    model, _ = shard(Net(collection("adagrad", device=META)), device=CPU)
    for weight in model.module.collections.parameters():
        for made in (torch.zeros_like(weight), torch.full_like(weight, 0.5), torch.empty_like(weight)):
            assert made.is_meta and made.shape == weight.shape and type(made) is torch.Tensor
