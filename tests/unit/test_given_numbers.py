"""Every number, flag and word that a user may give: NumPy's and a tensor's is Python's own, bit for bit, and what is
none is refused by name.

Places are found by looking: fields of records, signatures, hyperparameters. One that is new is visited, or a test fails
until somebody has said here what it is.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_session import FakeSession
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from models import CPU, META, Net, batch_of, collection, job_of, shard, table
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import planners
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, get_default_sharders, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torch_ecrec
from torch_ecrec import checkpoint, planner
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.nn import parallel
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import all_table_specs, job_names
from torch_ecrec.nn.table_optimizers import optimizer_spec
from torch_ecrec.overhead.model import Costs
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Servers, Topology
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.resume.reader import Reader
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.settings import Settings

pytestmark = pytest.mark.usefixtures("process_group")
OBJECT = object()
"""Of an argument: no number, flag or word."""
PACKAGE = Path(torch_ecrec.__file__).parent


def others(value: Any) -> list[tuple[Any, Any]]:
    """The same as NumPy and torch have it, each with the plain value that it means."""
    if isinstance(value, list):
        made = [others(one) for one in value]
        return [([given for given, _ in pair], [plain for _, plain in pair]) for pair in zip(*made, strict=True)]
    if isinstance(value, str):
        return [(np.str_(value), value)]
    found: list[tuple[Any, Any]] = [(np.array(value), value)]
    if isinstance(value, bool):
        return [*found, (np.bool_(value), value), (torch.tensor(value, device="cpu"), value)]
    if isinstance(value, int):
        found += [(np.int64(value), value), (torch.tensor(value, dtype=torch.int64, device="cpu"), value)]
        return found if value >= 1 << 31 else [*found, (np.int32(value), value)]
    short = float(np.float32(value))
    return [
        *found,
        (np.float64(value), value),
        (np.float32(value), short),
        (torch.tensor(value, dtype=torch.float64, device="cpu"), value),
        (torch.tensor(value, dtype=torch.float32, device="cpu"), short),
    ]


def wrong(value: Any) -> list[Any]:
    """What cannot be meant where `value` may be given."""
    if isinstance(value, bool):
        return ["yes", 2, np.zeros(2, np.bool_)]
    if isinstance(value, int):
        return ["3", 2.5, np.float64(3.0), math.nan, np.arange(2), torch.arange(2, device="cpu"), [1]]
    if isinstance(value, float):
        return ["0.1", True, math.nan, np.float32(math.nan), np.zeros(2), [0.5], None, 1j]
    return [5, np.zeros(2), None]


def examples(known: Mapping[str, Any]) -> list[Any]:
    """Parameters of a test: name, what is given, and what it means."""
    return [
        pytest.param(name, given, plain, id=f"{name}-{i}")
        for name, value in known.items()
        if value is not OBJECT
        for i, (given, plain) in enumerate(others(value))
    ]


def outcome(function: Callable[[], Any]) -> str:
    """What comes of it, types and all (`repr` of NumPy's numbers names their type), or how it is refused."""
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = function()
        return f"{found!r} {sorted(str(one.message) for one in told if one.category is UserWarning)}"
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


# records ------------------------------------------------------------------------------------------------

TABLE = TableSpec("t", 7, 4, -0.3, 0.7)
RECORDS: list[Any] = [
    CodeSpec(4, 2, 1),
    TABLE,
    JobSpec((TABLE,), CodeSpec(), 2, 5),
    Settings(join="h:1", call_timeout_s=0.3, again=1),
    Servers(memory_bytes=1 << 30),
    CheckpointSettings(url="/c", every_steps=10, bytes_per_s=0.3, beyond="partial", saver="mfu", portion=0.3),
    ClusterSettings(CodeSpec(), 1, lease_s=0.3),
    Costs(5, 0.3, 0.1, 0.1, 0.1),
]
_ALIASES = {"CheckpointPolicy", "Beyond", "CheckpointSaver", "TransportName"}  # words, of which there are a few
_INNER = {
    "Experiment",
    "Shape",
    "Layout",
    "Nodes",
    "Piece",
    "InitialRecords",
    "Merged",
    "Field",
    "Schema",
    "Scale",  # of a command line
}
"""Records that look at what they are made of, and are made of what others have taken."""


def fields_of(record: Any) -> Iterator[tuple[str, Any]]:
    """Those that users give as a number, a flag or a word."""
    for field in dataclasses.fields(record):
        declared, value = str(field.type).removesuffix(" | None"), getattr(record, field.name)
        if declared in ("int", "float", "str", "bool", "Flag"):
            assert value is not None, f"{type(record).__name__}.{field.name}: give it a value in RECORDS"
            assert type(value).__name__ == declared.replace("Flag", "int")
            yield field.name, value


OF_RECORDS = [(record, name, value) for record in RECORDS for name, value in fields_of(record)]


def named(one: tuple[Any, str, Any]) -> str:
    return f"{type(one[0]).__name__}.{one[1]}"


@pytest.mark.parametrize("one", OF_RECORDS, ids=named)
def test_a_field_of_a_record_is_pythons_own(one: tuple[Any, str, Any]) -> None:
    record, name, value = one
    for given, plain in others(value):
        found = dataclasses.replace(record, **{name: given})
        expected = dataclasses.replace(record, **{name: plain})
        assert repr(found) == repr(expected) and found == expected and hash(found) == hash(expected)
        assert msgspec.json.encode(found) == msgspec.json.encode(expected)
        assert json.dumps(dataclasses.asdict(found)) == json.dumps(dataclasses.asdict(expected))
    if isinstance(value, float) and value in range(1 << 20):  # an int is the same number, and the same text
        assert repr(dataclasses.replace(record, **{name: int(value)})) == repr(record)


@pytest.mark.parametrize("one", OF_RECORDS, ids=named)
def test_another_kind_in_a_field_of_a_record_is_refused_by_name(one: tuple[Any, str, Any]) -> None:
    record, name, value = one
    declared = {field.name: str(field.type) for field in dataclasses.fields(record)}[name]
    for bad in wrong(value) + ([True] if declared == "int" else []):
        if bad is None and declared.endswith("None"):
            continue
        with pytest.raises((ValueError, TypeError), match=f"`{name}( of table .*)?` must be"):
            dataclasses.replace(record, **{name: bad})


def test_a_flag_may_be_a_bool() -> None:
    for given in (True, np.bool_(True), torch.tensor(True, device="cpu"), 1, np.int64(1)):
        assert repr(Settings(again=given)) == repr(Settings(again=1))
        assert Settings(again=given).environment() == Settings(again=1).environment()


@pytest.mark.smoke  # looks at all of the package
def test_every_record_that_looks_at_its_fields_takes_them() -> None:
    """Or is inside: who adds one says which."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "__post_init__" in text else ():
            if isinstance(node, ast.ClassDef) and "dataclass" in "".join(map(ast.unparse, node.decorator_list)):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == "__post_init__":
                        found[node.name] = "take_fields(self" in ast.unparse(part)
    assert {name for name, takes in found.items() if not takes} == _INNER
    assert {name for name, takes in found.items() if takes} == {type(record).__name__ for record in RECORDS}


@pytest.mark.parametrize("kind", NAMES)
def test_hyperparameters_of_a_spec(kind: str) -> None:
    known = {"lr": 0.3, "max_gradient": 0.3, **{name: 0.3 for name in optimizer(kind).fixed}}
    known |= {name: choices[-1] for name, choices in optimizer(kind).choices.items()}
    for name, value in known.items():
        for given, plain in [*others(value), (1, 1.0)]:
            if plain == 1.0 and name in optimizer(kind).below:
                continue
            found, expected = OptimizerSpec(kind, **{name: given}), OptimizerSpec(kind, **{name: plain})
            assert repr(found) == repr(expected) and hash(found) == hash(expected)
            assert json.dumps(dataclasses.asdict(found)) == json.dumps(dataclasses.asdict(expected))
        for bad in wrong(value):
            if bad is not None or name != "max_gradient":
                with pytest.raises((ValueError, TypeError), match=f"`{name}` must be a number"):
                    OptimizerSpec(kind, **{name: bad})
        if name != "max_gradient":
            with pytest.raises(ValueError, match=f"`{name}`.* must be"):
                OptimizerSpec(kind, **{name: math.inf})
    assert repr(OptimizerSpec(np.str_(kind))) == repr(OptimizerSpec(kind))


def test_bounds_are_finite() -> None:
    for name, value in (("low", -math.inf), ("high", math.inf)):
        with pytest.raises(ValueError, match=f"`{name} of table t` must be finite, got"):
            dataclasses.replace(TABLE, **{name: value})


# tables -------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "num_embeddings": 11,
    "embedding_dim": 8,
    "name": "wide",
    "data_type": OBJECT,
    "feature_names": ["f2", "f0"],
    "weight_init_max": 0.3,
    "weight_init_min": -0.7,
    "num_embeddings_post_pruning": 11,
    "init_fn": OBJECT,
    "need_pos": False,
    "input_dim": 8,  # refused, by name
    "total_num_buckets": 1,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": OBJECT,
    "enable_embedding_update": False,
    "stash_weights": False,
    "pooling": OBJECT,
}


def test_all_fields_of_configs_are_known() -> None:
    found = {field.name for kind in (EmbeddingBagConfig, EmbeddingConfig) for field in dataclasses.fields(kind)}
    assert found == set(CONFIG)


def trained(device: torch.device, sequences: bool, **of_table: Any) -> tuple[Any, ...]:
    """All that a table with such a config becomes: its spec, what is looked up, trained, saved and described."""
    given = {"name": "wide", "num_embeddings": 11, "embedding_dim": 8, "feature_names": ["f2", "f0"], **of_table}
    torch.manual_seed(0)
    made: nn.Module
    if sequences:
        made = EmbeddingCollection(tables=[EmbeddingConfig(**given)], device=device)
    else:
        made = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**given), table("b", 7, 8, "f1")], device=device)
    apply_optimizer_in_backward(torch.optim.Adagrad, made.parameters(), {"lr": 0.3})
    module = nn.ModuleDict({"ebc": made})
    job = job_of(module)
    session = FakeSession(job)
    model: Any = DistributedModelParallel(module, device=CPU, session=session)
    looked_up = []
    for seed in range(2):
        out = model.module["ebc"](batch_of(3, seed).sparse_features).wait()
        values = torch.cat([one.values() for one in out.values()]) if sequences else out.values()
        values.square().sum().backward()
        looked_up.append(values.detach().numpy().tobytes())
    saved = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
    described = msgspec.msgpack.encode(job.to_json())
    records = [numbers.numpy().tobytes() for numbers in session.records]
    return repr(job), described, job.digest, looked_up, records, saved, str(model)


@pytest.mark.parametrize(
    ("device", "sequences"), [(CPU, False), (META, False), (META, True)], ids=["cpu", "meta", "sequences"]
)
@pytest.mark.parametrize(("name", "given", "plain"), examples(CONFIG))
def test_a_number_of_a_table(name: str, given: Any, plain: Any, device: torch.device, sequences: bool) -> None:
    if name == "num_embeddings_post_pruning" and sequences:
        pytest.skip("TorchRec has it for bags alone")
    found = outcome(lambda: trained(device, sequences, **{name: given}))
    if found.startswith("TypeError: uniform_(): argument"):
        pytest.skip("TorchRec's own module does not take it")
    assert found == outcome(lambda: trained(device, sequences, **{name: plain}))
    assert ("is not supported; leave it out" in found) == (name == "input_dim"), found


def test_another_kind_of_bound_is_refused_by_name() -> None:
    """What TorchRec's own modules let pass: those of tables that the script draws itself."""
    for bad in (math.nan, math.inf, "0.1", np.zeros(2)):
        made = EmbeddingBagConfig(
            name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"], weight_init_max=bad, init_fn=nn.init.ones_
        )
        module = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[made], device=CPU)})
        with pytest.raises((ValueError, TypeError), match="`high of table t` must be"):
            all_table_specs(module, {"ebc": module["ebc"]}, job_names({"ebc": module["ebc"]}))  # type: ignore[dict-item]


def test_configs_of_plain_numbers_are_the_users_own() -> None:
    configs = [table("wide", 11, 8, "f0", "f1", "f2", "f3")]
    model, _ = shard(nn.Sequential(collection(configs=configs)))
    assert model.module[0].config_of("wide") is configs[0]


# optimizers ---------------------------------------------------------------------------------------------

HYPERPARAMETERS: dict[str, Any] = {
    "lr": 0.3, "learning_rate": 0.3, "eps": 1e-3, "momentum": 0.3, "weight_decay": 0.3, "weight_decay_mode": 2,
    "eta": 0.3, "beta1": 0.3, "beta2": 0.3, "betas": [0.3, 0.7], "max_norm": 0.3, "max_gradient": 0.3,
    "gradient_clipping": True, "stochastic_rounding": True, "lr_decay": 0.3, "initial_accumulator_value": 0.3,
    "dampening": 0.3, "maximize": True, "amsgrad": True, "nesterov": True, "decoupled_weight_decay": True,
    "ar_alpha": 0.3, "ema_beta": 0.3, "min_shrinkage": 0.3,  # from FBGEMM 1.9 on, of an optimizer that is refused
    # how torch computes
    "foreach": True, "fused": True, "differentiable": True, "capturable": True,
    # of FBGEMM: where rows are
    "cache_load_factor": 0.3, "cache_sets": 3, "cache_reserved_memory": 0.3, "enforce_hbm": True,
    "gather_uvm_cache_stats": True, "uvm_non_rowwise_momentum": True, "use_experimental_tbe": True,
    "prefetch_pipeline": True, "uvm_host_mapped": True, "is_qr_tbe": True, "enable_raw_embedding_streaming": True,
}  # fmt: skip
NO_NUMBERS = {
    "embedding_specs", "feature_table_map", "cache_algorithm", "cache_precision", "weights_precision", "output_dtype",
    "optimizer", "record_cache_metrics", "ensemble_mode", "emainplace_mode", "counter_based_regularization",
    "cowclip_regularization", "pooling_mode", "device", "bounds_check_mode", "stats_reporter_config", "table_names",
    "optimizer_state_dtypes", "multipass_prefetch_config", "global_weight_decay", "extra_optimizer_config",
    "tbe_input_multiplexer_config", "embedding_table_index_type", "embedding_table_offset_type",
    "embedding_shard_info", "res_params", "preallocated_host_buffers",
}  # fmt: skip
CLASSES = [(name, path) for name in NAMES for path in optimizer(name).classes]
TYPES = [(name, kind) for name in NAMES for kind in optimizer(name).types]


def names_of(function: Callable[..., Any]) -> set[str]:
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds}


def class_of(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def test_all_hyperparameters_are_known() -> None:
    found = names_of(SplitTableBatchedEmbeddingBagsCodegen.__init__)
    for name, path in CLASSES:
        found |= names_of(class_of(path).__init__) | set(optimizer(name).fixed)
    found -= {"self", "params", "unused"}
    assert found <= {*HYPERPARAMETERS, *NO_NUMBERS}, found - {*HYPERPARAMETERS, *NO_NUMBERS}


def of_class(path: str, arguments: dict[str, Any]) -> str:
    parameter: Any = nn.Parameter(torch.zeros(1, device="cpu"))
    parameter._optimizer_classes, parameter._optimizer_kwargs = [class_of(path)], [arguments]
    return outcome(lambda: optimizer_spec("t", parameter))


def of_params(kind: str, arguments: dict[str, Any]) -> str:
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    wishes = {"optimizer": EmbOptimType[kind], **arguments}
    return outcome(lambda: optimizer_spec("t", parameter, wishes))


def beside(name: str) -> dict[str, Any]:
    """What makes it count."""
    more = {"max_gradient": {"gradient_clipping": True}, "weight_decay": {"weight_decay_mode": 1}}
    return dict(more.get(name, {}))


@pytest.mark.parametrize("way", [*CLASSES, *TYPES], ids=lambda way: way[1].removeprefix("torch"))
def test_a_hyperparameter_as_users_give_it(way: tuple[str, str]) -> None:
    """Attached, or in `fused_params`: taken, without effect, or refused, as Python's own is."""
    kind, where = way
    spec_of = of_class if "." in where else of_params
    for name, value in HYPERPARAMETERS.items():
        for given, plain in others(value):
            for more in ({}, beside(name)):
                assert spec_of(where, {name: given, **more}) == spec_of(where, {name: plain, **more}), name
        if name in optimizer(kind).fixed or name in ("learning_rate", "max_gradient", "gradient_clipping"):
            for bad in wrong(value):
                if bad is not None:  # that is to say nothing
                    found = spec_of(where, {name: bad, **beside(name)})
                    assert found.startswith(("ValueError: table t: ", "TypeError: table t: ")), (name, bad, found)
                    assert f"`{name}`" in found


def test_betas_are_two_numbers() -> None:
    wanted = of_class("torch.optim.adam.Adam", {"betas": (0.3, 0.7)})
    for given in ([0.3, 0.7], np.array([0.3, 0.7]), torch.tensor([0.3, 0.7], dtype=torch.float64, device="cpu")):
        assert of_class("torch.optim.adam.Adam", {"betas": given}) == wanted
    for bad in (0.9, (0.9,), "ab", [0.9, math.nan], np.float64(0.9)):
        assert of_class("torch.optim.adam.Adam", {"betas": bad}).startswith(("ValueError: table t", "TypeError: table"))


def test_a_decay_mode_is_one_of_a_few() -> None:
    for bad in (1.5, 7, math.nan, math.inf, True, "L2", np.float64(1.5)):
        found = of_params("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": bad, "weight_decay": 0.1})
        assert found.startswith("ValueError: table t: `weight_decay_mode`"), found


@pytest.mark.parametrize("given", [0.3, np.float64(0.3), np.float32(0.25), np.int64(1), torch.tensor(0.25)], ids=repr)
def test_a_learning_rate_of_a_loop(given: Any) -> None:
    """What a schedule sets: it travels with every step."""
    model, session = shard(nn.Sequential(collection("adagrad")))
    for group in model.fused_optimizer.param_groups:
        group["lr"] = given
    model(batch_of(3, 0).sparse_features).values().sum().backward()
    assert repr(session.rates) == repr([[float(given)] * len(session.job.table_groups)])


@pytest.mark.parametrize("bad", ["0.1", True, None, np.zeros(2), math.nan], ids=repr)
def test_a_learning_rate_that_is_none(bad: Any) -> None:
    model, _ = shard(nn.Sequential(collection("adagrad")))
    model.fused_optimizer.param_groups[0]["lr"] = bad
    with pytest.raises(ValueError, match=r"the learning rate of tables wide.* must be finite, got"):
        model(batch_of(3, 0).sparse_features).values().sum().backward()


# plans --------------------------------------------------------------------------------------------------

LIMITS: dict[str, Any] = {
    "sharding_types": ["erasure_coded"],
    "compute_kernels": ["fused"],
    "min_partition": 4,
    "pooling_factors": [0.3],
    "num_poolings": [1.3],
    "batch_sizes": [33],
    "is_weighted": True,
    "cache_params": OBJECT,
    "enforce_hbm": True,
    "stochastic_rounding": True,
    "bounds_check_mode": OBJECT,
    "feature_names": ["f0"],
    "output_dtype": OBJECT,
    "device_group": "cpu",
    "key_value_params": OBJECT,
    "use_virtual_table": False,
}
PLANNER: dict[str, Any] = {
    "topology": OBJECT,
    "batch_size": 33,
    "servers": OBJECT,
    "unprotected": "refuse",
    "proposer": OBJECT,
    "partitioner": OBJECT,
    "stats": OBJECT,
    "constraints": OBJECT,
    "callbacks": OBJECT,
    "enumerator": OBJECT,  # ours, always
    "storage_reservation": OBJECT,
    "performance_model": OBJECT,
    "debug": True,
    "timeout_seconds": 30,
    "plan_loader": OBJECT,
}


def planned(limits: dict[str, Any] | None = None, **more: Any) -> str:
    def plan() -> tuple[Any, ...]:
        constraints = None if limits is None else {"wide": ParameterConstraints(**limits)}
        topology = Topology(world_size=2, compute_device="cpu")
        report = planner.Report()
        made = EmbeddingShardingPlanner(topology=topology, constraints=constraints, stats=[report], **more)
        module = nn.Sequential(collection("adagrad", [table("wide", 500, 8, "f0")], META))
        found = made.plan(module, get_default_sharders())
        costs = {name: one.cost for name, one in made._enumerator.served.items()}
        return str(found), costs, made._batch_size, made._enumerator._limits, report.servers

    return outcome(plan)


def test_all_that_a_planner_takes_is_known() -> None:
    assert {field.name for field in dataclasses.fields(ParameterConstraints)} == set(LIMITS)
    found = names_of(EmbeddingShardingPlanner.__init__) | names_of(planners.EmbeddingShardingPlanner.__init__)
    assert found - {"self"} == set(PLANNER)


@pytest.mark.parametrize(("name", "given", "plain"), examples(LIMITS))
def test_a_limit_of_a_table(name: str, given: Any, plain: Any) -> None:
    found, wanted = planned({name: given}), planned({name: plain})
    assert found == wanted and "erasure_coded" in found


@pytest.mark.parametrize("name", ["pooling_factors", "num_poolings", "batch_sizes"])
def test_a_limit_that_is_no_number(name: str) -> None:
    for bad in (["a"], [math.nan], [np.zeros(2)], 3.0, "ab", [-1.0]):
        with pytest.raises((ValueError, TypeError), match=f"`{name} of table wide`"):
            EmbeddingShardingPlanner(
                topology=Topology(world_size=2, compute_device="cpu"),
                constraints={"wide": ParameterConstraints(**{name: bad})},  # type: ignore[arg-type]
            )
    assert planned({name: np.array(LIMITS[name])}) == planned({name: LIMITS[name]})


@pytest.mark.parametrize(("name", "given", "plain"), examples(PLANNER))
def test_a_number_of_a_planner(name: str, given: Any, plain: Any) -> None:
    found, wanted = planned(**{name: given}), planned(**{name: plain})
    assert found == wanted and "Error" not in found


def test_ranks_of_a_plan() -> None:
    def built(rank: Any) -> Any:
        module = Net(collection("adagrad"))
        ranks = {config.name: table_wise(rank=rank) for config in module.collections[0].embedding_bag_configs()}
        sharder = EmbeddingBagCollectionSharder()
        entries = construct_module_sharding_plan(module.collections[0], ranks, sharder, device_type="cpu")
        model, _ = shard(module, plan=ShardingPlan({"collections.0": entries}))
        return model

    wanted = built(0)
    for rank, _ in others(0):
        if not isinstance(rank, (np.ndarray, torch.Tensor)):  # TorchRec takes these for no ranks
            model = built(rank)
            assert repr(model.module) == repr(wanted.module) and str(model.plan) == str(wanted.plan)
            assert list(model.state_dict()) == list(wanted.state_dict())


# what is called -----------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "DistributedModelParallel": {
        "module": OBJECT, "env": OBJECT, "device": OBJECT, "plan": OBJECT, "sharders": OBJECT,
        "init_data_parallel": True, "init_parameters": True, "data_parallel_wrapper": OBJECT,
        "model_tracker_configs": OBJECT, "session": OBJECT, "settings": OBJECT, "code": OBJECT, "seed": 3,
        "nan_gradients": "pass", "snapshot_every": 3, "unprotected": "allow",
    },
    "attach": {"optimizer": OBJECT, "lr_scheduler": OBJECT, "reader": OBJECT},
    "load_state_dict": {"state_dict": OBJECT, "prefix": "", "strict": False, "assign": True},
    "digest": {"tables": False},
    "describe": {
        "model": OBJECT, "path": OBJECT, "trainers": 3, "plan": OBJECT, "sharders": OBJECT, "seed": 3,
        "unprotected": "allow",
    },
    "load": {"model": OBJECT, "checkpoint_id": OBJECT, "more": OBJECT, "storage_reader": OBJECT},
    "save": {"model": OBJECT, "checkpoint_id": OBJECT, "more": OBJECT, "storage_writer": OBJECT},
    "epochs": {"number": 3},
    "enumerate": {"start": 3},
}  # fmt: skip
METHODS = ("attach", "load_state_dict", "digest")


def test_all_that_users_call_is_known() -> None:
    public = {name: getattr(torch_ecrec, name) for name in torch_ecrec.__all__ if name != "__version__"}
    others = {name for name, kind in public.items() if not issubclass(kind, Exception)}
    assert others == {"CodeSpec", "DistributedModelParallel", "Settings", "TensorBoard"}
    assert names_of(torch_ecrec.TensorBoard.__init__) - {"self"} == {"model", "to", "every_s"}, "test_scalars.py"
    assert set(planner.__all__) == {
        "EmbeddingShardingPlanner", "ParameterConstraints", "Report", "Servers", "Topology",
    }  # fmt: skip
    assert not names_of(planner.Report.__init__) - {"self"}
    called: dict[str, Callable[..., Any]] = {name: getattr(checkpoint, name) for name in checkpoint.__all__}
    called["DistributedModelParallel"] = DistributedModelParallel.__init__
    ours = {
        name
        for name, method in vars(DistributedModelParallel).items()
        if inspect.isfunction(method) and not name.startswith("_") and names_of(method) - {"self"}
    }
    assert ours - {"copy", "reshard"} == set(METHODS), "those are refused, whatever they are given"
    called |= {name: getattr(DistributedModelParallel, name) for name in METHODS}
    called |= {"epochs": Reader.epochs, "enumerate": Reader.enumerate}
    for name, function in called.items():
        assert names_of(function) - {"self"} == set(ARGUMENTS[name]), name
    assert set(called) == set(ARGUMENTS)


def built(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> str:
    """What a model that joins a cluster hands over, and what it is then."""
    joined: list[Any] = []

    def connect(job: JobSpec, *arguments: Any) -> FakeSession:
        joined.append((job.digest, job, arguments))
        return FakeSession(job)

    monkeypatch.setattr(parallel, "_connect", connect)

    def build() -> Any:
        module = Net(collection("adagrad", device=META))
        model = DistributedModelParallel(module, **{"device": CPU, **arguments})
        model(batch_of(3, 0))[0].backward()
        return joined, model.snapshot_every, model._unprotected, model._step._refuses_nan, model._ddp_wrapped, model

    return outcome(build)


@pytest.mark.parametrize(("name", "given", "plain"), examples(ARGUMENTS["DistributedModelParallel"]))
def test_a_number_of_a_model(monkeypatch: pytest.MonkeyPatch, name: str, given: Any, plain: Any) -> None:
    found = built(monkeypatch, **{name: given})
    assert found == built(monkeypatch, **{name: plain}) and "Error" not in found


@pytest.mark.parametrize("name", [n for n, v in ARGUMENTS["DistributedModelParallel"].items() if v is not OBJECT])
def test_another_kind_given_to_a_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for bad in wrong(ARGUMENTS["DistributedModelParallel"][name]):
        found = built(monkeypatch, **{name: bad})
        assert found.startswith(f"TypeError: `{name}` must be"), (bad, found)


def test_where_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of an environment; and a device by its name."""
    wanted = built(monkeypatch)
    assert built(monkeypatch, device="cpu") == wanted
    for (world, _), (rank, _) in zip(others(1), others(0), strict=True):
        env = ShardingEnv(world, rank, dist.group.WORLD)
        assert built(monkeypatch, env=env) == wanted
        assert env.world_size is world and env.rank is rank, "the user's own stays"


def test_how_often_the_dense_part_is_kept() -> None:
    model, session = shard(Net(collection("adagrad")))
    for given, plain in others(3):
        model.snapshot_every = given
        assert repr((model.snapshot_every, session.snapshot_every)) == repr((plain, plain))
    for bad in wrong(3):
        with pytest.raises(TypeError, match="`snapshot_every` must be an int"):
            model.snapshot_every = bad
    with pytest.raises(ValueError, match="`snapshot_every` must be at least 0"):
        model.snapshot_every = np.int64(-1)


@pytest.mark.parametrize("name", ["trainers", "seed", "unprotected"])
def test_a_number_of_a_description(tmp_path: Path, name: str) -> None:
    module, value = Net(collection("adagrad", device=META)), ARGUMENTS["describe"][name]
    for given, plain in others(value):
        arguments: dict[str, Any] = {"trainers": 2}
        checkpoint.describe(module, tmp_path / "given", **(arguments | {name: given}))
        checkpoint.describe(module, tmp_path / "plain", **(arguments | {name: plain}))
        assert (tmp_path / "given").read_bytes() == (tmp_path / "plain").read_bytes()
    for bad in wrong(value):
        if bad is not None:
            with pytest.raises(TypeError, match=f"`{name}` must be"):
                checkpoint.describe(module, tmp_path / "bad", **({"trainers": 2} | {name: bad}))


def test_a_number_of_a_loop() -> None:
    for given, plain in others(3):
        model, _ = shard(Net(collection("adagrad")))
        batches = model.attach(reader=[batch_of(3, 0), batch_of(3, 1)])
        assert repr(batches.epochs(given)) == repr(range(plain))
        assert [repr(i) for i, _ in batches.enumerate(start=given)] == ["3", "4"]
    for bad in wrong(3):
        with pytest.raises(TypeError, match="`number` must be an int"):
            batches.epochs(bad)
        with pytest.raises(TypeError, match="`start` must be an int"):
            next(batches.enumerate(start=bad))


@pytest.mark.parametrize("given", [np.bool_(False), np.array(False), torch.tensor(False, device="cpu")], ids=repr)
def test_a_flag_of_a_method(given: Any) -> None:
    model, _ = shard(Net(collection("adagrad")))
    assert model.digest(tables=given) == model.digest(tables=False) != model.digest()
    found = model.load_state_dict({"other": torch.zeros(1, device="cpu")}, strict=given)
    assert len(found.missing_keys) == 4


# what is attached ---------------------------------------------------------------------------------------


class Counter:
    """Counts passes, as a script may: with NumPy's number."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        self.kind, self.passes = kind, kind(0)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, torch.tensor, np.array])
def test_passes_may_be_counted_with_any_number(kind: Callable[[int], Any]) -> None:
    """A loop that counts its passes in something attached begins with the right one after a restart."""
    model, _ = shard(Net(collection("adagrad")))
    counter = Counter(kind)
    batches = model.attach(reader=[batch_of(3, seed) for seed in range(2)], counter=counter)
    while counter.passes < 2:
        for batch in batches:
            model(batch)[0].backward()
        counter.passes = counter.passes + kind(1)
    assert int(counter.passes) == 2
