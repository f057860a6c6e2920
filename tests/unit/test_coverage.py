"""What of a model the servers serve, and that everything else is refused by name where the model is built."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchrec
from fake_session import FakeSession
from managed import whole
from models import (
    CPU,
    META,
    Net,
    batch_of,
    collection,
    compare_shards,
    job_of,
    plain_torchrec,
    seeded_tables,
    shard,
    table,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    get_default_sharders,
    row_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torch_ecrec.nn.parallel import DistributedModelParallel

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)


class Beside(nn.Module):
    """A collection that is served, another module, and a dense layer."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.bags = collection("sgd", [table("t", 20, 4, "f0")])
        self.other = other
        self.over = nn.Linear(4, 1, dtype=torch.float32)


class Own(DistanceLFU_EvictionPolicy):
    """What it keeps beside what TorchRec's keep, nobody knows."""


def remapped(policy: Any = None, other: Any = None, *features: str) -> ManagedCollisionEmbeddingBagCollection:
    configs = [table("m", 10, 4, *(features or ("f1",)))]
    policy = policy or DistanceLFU_EvictionPolicy()
    module = other or MCHManagedCollisionModule(
        10, CPU, eviction_policy=policy, eviction_interval=1, input_hash_size=100
    )
    return ManagedCollisionEmbeddingBagCollection(
        collection("sgd", configs), ManagedCollisionCollection({"m": module}, configs)
    )


def hashed() -> nn.Module:
    return remapped(None, HashZchManagedCollisionModule(10, CPU, 1))


class Remapping(ManagedCollisionEmbeddingBagCollection):
    pass


def remapped_otherwise() -> nn.Module:
    made = remapped()
    made.__class__ = Remapping
    return made


def quantized() -> nn.Module:
    made = collection("sgd", [table("m", 10, 4, "f1")])
    return quantize_embeddings(nn.Sequential(made), torch.qint8, inplace=True)[0]


class Clipped(EmbeddingBagCollection):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        return super().forward(features)


def subclassed() -> EmbeddingBagCollection:
    return Clipped(tables=[table("m", 10, 4, "f1")], device=CPU)


def attached_dense() -> nn.Module:
    layer = nn.Linear(4, 4)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    return layer


def sharded_before() -> nn.Module:
    session = FakeSession(job_of(collection("sgd", [table("u", 10, 4, "f1")])))
    model = DistributedModelParallel(collection("sgd", [table("u", 10, 4, "f1")]), session=session)
    return model.module


UNPROTECTED = {
    "a map that is filled on a GPU": (hashed, "table m: a map of HashZchManagedCollisionModule is not served"),
    "a policy": (lambda: remapped(Own()), "table m: eviction policy Own is not served"),
    "a filter": (
        lambda: remapped(DistanceLFU_EvictionPolicy(threshold_filtering_func=probabilistic_threshold_filter)),
        "other: ManagedCollisionEmbeddingBagCollection: table m: threshold filter probabilistic_threshold_filter",
    ),
    "a feature twice": (lambda: remapped(None, None, "f1", "f1"), "feature f1 is of several tables"),
    "a remapping subclass": (remapped_otherwise, "other: Remapping is a subclass of ManagedCollisionEmbeddingBagColl"),
    "quantized": (quantized, "other: torchrec.quant.embedding_modules.EmbeddingBagCollection is not served"),
    "a subclass": (subclassed, "other: Clipped is a subclass of EmbeddingBagCollection"),
    "a dense optimizer": (attached_dense, "other.weight: an optimizer that steps in the backward is attached to it"),
    "sharded": (sharded_before, "other: ErasureCodedEmbeddingBagCollection is sharded already"),
}


@pytest.mark.parametrize(("make", "message"), UNPROTECTED.values(), ids=UNPROTECTED)
def test_what_nobody_protects_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        DistributedModelParallel(Beside(make()), session=FakeSession(job_of(Beside(nn.Identity()))))
    assert ('unprotected="allow"' in str(caught.value)) == (make is not sharded_before)  # that has an owner


@pytest.mark.parametrize("unprotected", ["refuse", "allow"])
def test_a_wrapper_within_a_wrapper_is_refused_by_name(unprotected: str) -> None:
    ours, _ = shard(Net(collection()))
    for outer in (ours, Beside(ours)):
        with pytest.raises(ValueError, match=r"(the model|other) is a DistributedModelParallel already"):
            DistributedModelParallel(outer, session=ours.session, unprotected=unprotected)


@pytest.mark.parametrize(
    "wrapper",
    [torchrec.distributed.DistributedModelParallel, DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel],
)
def test_another_wrapper_around_what_is_served_is_refused_by_name(wrapper: type[nn.Module]) -> None:
    """Around `model.module` TorchRec's and torch's began: nothing was kept of such a model's steps, without a word."""
    ours, _ = shard(Net(collection()))
    for outer in (ours, Beside(ours), ours.module, Beside(ours.module), ours.module.collections[0]):
        with pytest.raises(RuntimeError, match=f"^{wrapper.__name__} is put around a {type(outer).__name__} whose"):
            wrapper(module=outer)
    DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="DistributedModelParallel is put around a Beside whose tables are on"):
        DistributedModelParallel(Beside(ours.module), session=ours.session, unprotected="allow")


class Recorded(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: Tensor) -> Tensor:
        return self.tables(KeyedJaggedTensor(["f0"], ids, lengths=torch.ones_like(ids))).values()


def test_what_records_a_model_is_refused_by_name() -> None:
    made = EmbeddingBagCollection(tables=[table("t", 20, 4, "f0")], device=CPU)
    model = shard(Recorded(made))[0].module
    for record in (
        lambda: torch.jit.script(model),
        lambda: torch.jit.trace(model, torch.arange(3)),
        lambda: torch.fx.symbolic_trace(nn.Sequential(model.tables)),
    ):
        with pytest.raises(RuntimeError, match="cannot record a lookup of rows that are on the servers"):
            record()


def test_all_that_is_unprotected_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)other\.0: Clipped.*other\.1: torchrec\.quant"):
        DistributedModelParallel(
            Beside(nn.ModuleList([subclassed(), quantized()])), session=FakeSession(job_of(Beside(nn.Identity())))
        )


def table_wise_plan(name: str, rows: int) -> EmbeddingModuleShardingPlan:
    return EmbeddingModuleShardingPlan({name: ParameterSharding("table_wise", "dense", ranks=[0])})


def test_a_plan_for_what_is_around_a_collection_is_refused() -> None:
    plan = ShardingPlan({"collections": table_wise_plan("wide", 50)})
    with pytest.raises(ValueError, match="collections: the plan shards this ModuleList over the trainers"):
        shard(Net(collection()), plan=plan)


def test_a_plan_for_a_dense_layer_is_refused() -> None:
    plan = ShardingPlan({"over": table_wise_plan("weight", 1)})
    with pytest.raises(ValueError, match="over: the plan shards this Linear over the trainers"):
        shard(Net(collection()), plan=plan)


def test_what_is_allowed_is_torchrecs_planned_by_its_planner() -> None:
    """A subclass: its planner shards none, so that it is data-parallel."""
    module = Beside(subclassed())
    job = job_of(Beside(nn.Identity()))
    model = DistributedModelParallel(module, session=FakeSession(job), unprotected="allow", device=CPU)
    assert isinstance(model.module.other, Clipped) and set(model.plan.plan) == {"bags"}
    features = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    (model.module.bags(features)["f0"].sum() + model.module.other(features)["f1"].sum()).backward()
    assert model.session.step == 2


def test_what_is_allowed_is_sharded_by_the_plan_that_is_given() -> None:
    module = Beside(hashed())
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    entry = construct_module_sharding_plan(module.other, {"m": row_wise()}, sharder, local_size=1, device_type="cpu")
    plan = ShardingPlan({"other": entry})
    module.third = remapped()  # one of the same kind that is served
    module.third._embedding_module = collection("sgd", [table("third", 10, 4, "f1")])
    named = Beside(nn.Identity())
    named.third = module.third
    job = job_of(named)
    model = DistributedModelParallel(module, session=FakeSession(job), plan=plan, unprotected="allow", device=CPU)
    assert type(model.module.third).__name__ == "ErasureCodedManagedCollisionEmbeddingBagCollection"
    assert [t.name for t in model.session.job.tables] == ["t", "third"]  # the collection inside is not ours
    assert type(model.module.other).__name__ == "ShardedManagedCollisionEmbeddingBagCollection"


def test_unprotected_is_one_of_four() -> None:
    with pytest.raises(ValueError, match="`unprotected` must be one of refuse, snapshot, allow, reset, got 'yes'"):
        shard(Net(collection()), unprotected="yes")


# feature processors: served -------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self, device: torch.device = CPU, unlike: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [table("t", 20, 8, "f0", "f1")]
        if unlike:  # in width; one feature is of two tables
            tables = [table("t", 20, 8, "f1"), table("u", 20, 4, "f1"), table("v", 20, 8, "f0")]
        self.tables = FeatureProcessedEmbeddingBagCollection(
            collection("sgd", tables, device=device, is_weighted=True),
            {name: PositionWeightedModule(4).float() for name in ("f0", "f1")},
        )
        self.over = nn.Linear(
            sum(config.embedding_dim * len(config.feature_names) for config in tables), 1, dtype=torch.float32
        )
        with torch.no_grad():
            for processor in self.tables._feature_processors.values():
                processor.position_weight.uniform_(0.5, 1.5)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values()).square().mean()


def two_features(seed: int) -> KeyedJaggedTensor:
    features = batch_of(6, seed).sparse_features
    return KeyedJaggedTensor.from_jt_dict({name: features[name] for name in ("f0", "f1")})


@pytest.mark.parametrize("planned", [False, True])
def test_feature_processors_are_trained_as_unsharded(planned: bool) -> None:
    oracle, module = Weighted(), Weighted()
    plan = None
    if planned:  # as TorchRec's planner makes it: the wrapper is named, not the collection in it
        topology = Topology(world_size=1, compute_device="cpu")
        plan = EmbeddingShardingPlanner(topology=topology).plan(module, get_default_sharders())
        assert set(plan.plan) == {"tables"}
    model, _ = shard(module, plan=plan)
    assert set(model.plan.plan) == {"tables._embedding_bag_collection"}
    dense = [p for name, p in oracle.named_parameters() if "embedding_bags" not in name]
    weight = oracle.tables._embedding_bag_collection.embedding_bags["t"].weight
    theirs = [torch.optim.SGD(dense, lr=0.1), torch.optim.SGD([weight], lr=0.05)]
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(5):
        expected, loss = oracle(two_features(seed)), model(two_features(seed))
        torch.testing.assert_close(loss, expected)
        for optimizer in (*theirs, mine):
            optimizer.zero_grad()
        expected.backward()
        loss.backward()
        for optimizer in (*theirs, mine):
            optimizer.step()
    for name in ("f0", "f1"):
        torch.testing.assert_close(
            model.module.tables._feature_processors[name].position_weight,
            oracle.tables._feature_processors[name].position_weight,
        )
    key = "tables._embedding_bag_collection.embedding_bags.t.weight"
    torch.testing.assert_close(model.full_state_dict()[key], weight.detach())


@pytest.mark.parametrize("keys", ["as it is", "turned"])
def test_feature_processors_of_tables_that_differ_in_width_are_trained_as_unsharded(keys: str) -> None:
    """Each table group takes some of the features, one of them for two tables: gradients of all weights come back."""
    oracle, module = Weighted(unlike=True), Weighted(unlike=True)
    module.load_state_dict(oracle.state_dict())
    model, _ = shard(module)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    collection_of = oracle.tables._embedding_bag_collection
    for bag in collection_of.embedding_bags.values():
        bag.weight.requires_grad_(True)
    tables = list(collection_of.parameters())
    dense = [p for name, p in oracle.named_parameters() if "embedding_bags" not in name]
    theirs = [torch.optim.SGD(dense, lr=0.1), torch.optim.SGD(tables, lr=0.05)]
    for seed in range(4):
        features = two_features(seed)
        if keys == "turned":
            features = features.permute([1, 0])
        expected, loss = oracle(features), model(features)
        torch.testing.assert_close(loss, expected)
        for optimizer in (*theirs, mine):
            optimizer.zero_grad()
        expected.backward()
        loss.backward()
        for optimizer in (*theirs, mine):
            optimizer.step()
    state = model.full_state_dict()
    for name, values in oracle.state_dict().items():
        torch.testing.assert_close(state[name], values)


# sharders and trackers ------------------------------------------------------------------------------------


class Custom(EmbeddingBagCollectionSharder):
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the tables are on servers")


class OwnMaps(ManagedCollisionCollectionSharder):
    shard = Custom.shard


class Placed(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def test_wishes_of_a_sharder_are_not_passed_over() -> None:
    with pytest.raises(ValueError, match="sharder Custom has a `shard` of its own"):
        shard(Net(collection()), sharders=[Custom()])
    codec: Any = {"forward": object()}
    shard(Net(collection()), sharders=[Placed()])
    with pytest.warns(UserWarning, match="has a `qcomm_codecs_registry`, which has no effect"):
        shard(Net(collection()), sharders=[EmbeddingBagCollectionSharder(qcomm_codecs_registry=codec)])
    with pytest.warns(UserWarning, match="`fused_params` of sharder FusedEmbeddingBagCollectionSharder have no effect"):
        shard(Net(collection()), sharders=[FusedEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})])


@pytest.mark.parametrize(
    "sharder",
    [
        FeatureProcessedEmbeddingBagCollectionSharder(Custom()),
        ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=Custom()),
        ManagedCollisionEmbeddingBagCollectionSharder(mc_sharder=OwnMaps()),
    ],
    ids=["processed", "collection", "map"],
)
def test_wishes_of_a_sharder_in_a_sharder_are_not_passed_over(sharder: Any) -> None:
    with pytest.raises(ValueError, match=r"sharder (Custom|OwnMaps) has a `shard` of its own"):
        shard(Net(collection()), sharders=[sharder])


def test_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="trackers of TorchRec"):
        shard(Net(collection()), model_tracker_configs=object())
    model, _ = shard(Net(collection()))
    with pytest.raises(ValueError, match="trackers of TorchRec"):
        model.init_torchrec_delta_tracker(object())


class Holder(nn.Module):
    """TorchRec itself loses the second of two names in one parent."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.held = tables


class Twice(nn.Module):
    def __init__(self, beside: bool) -> None:
        super().__init__()
        tables = collection("sgd", seeded_tables(), META)
        self.one, self.two = (tables, tables) if beside else (Holder(tables), Holder(tables))
        torch.manual_seed(1)
        self.over = nn.Linear(
            sum(c.embedding_dim * len(c.feature_names) for c in seeded_tables()), 1, dtype=torch.float32
        )

    def forward(self, batch: Batch) -> Tensor:
        found = []
        for where in (self.one, self.two):
            rows = getattr(where, "held", where)(batch.sparse_features)
            found.append(torch.cat([rows[key] for key in sorted(rows.keys())], dim=1))
        return (self.over(found[0] + found[1].tanh()).squeeze(1) - batch.labels).square().mean()


@pytest.mark.parametrize("beside", [False, True])
def test_a_collection_at_two_paths_is_trained_as_one_and_named_as_by_torchrec(beside: bool) -> None:
    oracle, (mine, session) = plain_torchrec(Twice(beside=False), 1), shard(Twice(beside))
    first, second = (getattr(where, "held", where) for where in (mine.module.one, mine.module.two))
    assert first is second and len(session.job.tables) == 4
    for seed in range(4):
        expected, loss = oracle(batch_of(6, seed)), mine(batch_of(6, seed))
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
    assert session.step == 5

    def bare(names: Any) -> list[str]:
        return sorted(name.replace(".held", "") for name in names)

    assert bare(mine.state_dict()) == bare(oracle.state_dict())
    assert bare(n for n, _ in mine.named_parameters()) == bare(n for n, _ in oracle.named_parameters())
    assert bare(mine.fused_optimizer.params) == bare(oracle.fused_optimizer.params)
    theirs = {name.replace(".held", ""): value for name, value in oracle.state_dict().items()}
    for name, value in mine.state_dict().items():
        compare_shards(value, theirs[name.replace(".held", "")])
    mine.load_state_dict({name: value * 0.5 for name, value in mine.state_dict().items()})
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value * 2, whole(theirs[name.replace(".held", "")]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_collection_with_its_ids_remapped_and_without_is_refused(first: bool) -> None:
    module = Beside(remapped())
    module.plain = module.other._embedding_module
    if not first:
        module = nn.Sequential(module.plain, module.other)
    with pytest.raises(ValueError, match="the same collection is reached with its ids remapped and without"):
        shard(module)


def test_a_collection_at_two_paths_is_one() -> None:
    shared = collection()
    net = Net(shared)
    net.again = shared
    model, session = shard(net)
    assert model.module.again is model.module.collections[0]
    assert [t.name for t in session.job.tables] == ["wide", "small", "shared", "last"]
