"""TorchRec's planner with our servers: what it proposes, what it puts where, what it tells, what it refuses."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from fake_session import FakeSession
from models import CPU, META, Net, batch_of, collection, job_of, shard, table, train
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import planners, stats
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torch_ecrec import DistributedModelParallel
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Report, Servers, Topology
from torch_ecrec.planner.estimates import cost_of
from torch_ecrec.spec import spread
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.spread import said_of_padding

pytestmark = pytest.mark.usefixtures("process_group")
OURS, WHOLE = (ParameterConstraints(sharding_types=[kind]) for kind in ("erasure_coded", "table_wise"))
EITHER = ParameterConstraints(sharding_types=["erasure_coded", "table_wise"])
GB = 1 << 30


def two() -> Net:
    """A large collection and a small one; nothing of them is in memory."""
    large = collection(
        "rowwise_adagrad", [table("users", 4_000_000, 64, "f0"), table("goods", 1_000_000, 64, "f1")], META
    )
    small = collection("rowwise_adagrad", [table("country", 200, 16, "f2"), table("hour", 24, 16, "f3")], META)
    return Net(large, small)


def planner_of(world_size: int = 2, ddr: int = 64 * GB, **more: Any) -> EmbeddingShardingPlanner:
    topology = Topology(world_size=world_size, compute_device="cpu", ddr_cap=ddr)
    return EmbeddingShardingPlanner(topology=topology, batch_size=512, **more)


def types(module: nn.Module, planner: EmbeddingShardingPlanner) -> dict[str, str]:
    plan = planner.plan(module, get_default_sharders())
    return {name: entry.sharding_type for entries in plan.plan.values() for name, entry in entries.items()}


def test_all_that_is_served_goes_to_the_servers_unless_constraints_say_otherwise() -> None:
    assert set(types(two(), planner_of()).values()) == {"erasure_coded"}
    found = types(two(), planner_of(constraints={"country": WHOLE, "hour": WHOLE}))
    assert found == {"users": "erasure_coded", "goods": "erasure_coded", "country": "table_wise", "hour": "table_wise"}


def test_it_is_proposed_beside_torchrecs_own_types() -> None:
    planner = planner_of(unprotected="allow")
    options = planner._enumerator.enumerate(two(), get_default_sharders())
    kinds = {option.sharding_type for option in options if option.name == "users"}
    assert {"erasure_coded", "data_parallel", "table_wise"} <= kinds
    ours = [option for option in options if option.sharding_type == "erasure_coded"]
    assert len(ours) == 4 and all(len(option.shards) == 2 and option.total_perf > 0 for option in ours)
    whole = next(o for o in options if o.name == "users" and o.sharding_type == "table_wise")
    users = next(option for option in ours if option.name == "users")
    assert [shard.size for shard in users.shards] == [[2_000_000, 64]] * 2
    in_trainers = users.total_storage.ddr
    assert 0 < in_trainers < whole.total_storage.ddr / 100, "tables on the servers are none of the trainers' memory"


@pytest.mark.parametrize("by_constraint", [True, False])
def test_half_as_wide_embeddings_take_half_the_room(by_constraint: bool) -> None:
    """Of what is pooled and its gradients; a plan's word counts, and that of the arguments without one."""

    def storage(dtype: DataType | None, attached: DataType | None = None) -> int:
        module = two()
        if attached is not None:
            for parameter in module.parameters():
                for kwargs in getattr(parameter, "_optimizer_kwargs", []):
                    kwargs["output_dtype"] = attached
        constraints = {"users": ParameterConstraints(sharding_types=["erasure_coded"], output_dtype=dtype)}
        planner = planner_of(constraints=constraints)
        options = planner._enumerator.enumerate(module, get_default_sharders())
        (option,) = (option for option in options if option.name == "users")
        return int(option.shards[0].storage.ddr)

    halved = storage(DataType.FP16) if by_constraint else storage(None, DataType.BF16)
    assert storage(None) - halved == 512 * 64 * 2 * 2  # samples, numbers, bytes less, twice
    assert storage(DataType.FP32, DataType.FP16) == storage(None)


def test_what_fits_in_the_trainers_is_cheaper_there_and_what_does_not_goes_to_the_servers() -> None:
    found = types(two(), planner_of(unprotected="allow", ddr=GB // 2))
    assert {found["users"], found["goods"]} == {"erasure_coded"}
    assert "erasure_coded" not in (found["country"], found["hour"])


def test_servers_that_are_too_small_are_told() -> None:
    servers = Servers(CodeSpec(4, 2, 1), memory_bytes=GB // 8)
    with pytest.raises(
        PlannerError, match=r"collections\.0\.users.* take \d+ bytes of the server of a slot, which has"
    ):
        planner_of(servers=servers).plan(two(), get_default_sharders())
    enough = cost_of(job_of(two()).tables[0], 512, 2, servers).memory  # of one table, on all of them
    assert enough > 4 * servers.memory_bytes
    large = {"users": EITHER, "goods": EITHER}
    found = types(two(), planner_of(servers=servers, constraints=large))
    assert found == {"users": "table_wise", "goods": "table_wise", "country": "erasure_coded", "hour": "erasure_coded"}


def test_servers_with_a_disk_take_more_than_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    report, servers = Report(), Servers(CodeSpec(4, 2, 1), memory_bytes=GB // 8, tier=True)
    found = types(two(), planner_of(servers=servers, stats=report))
    assert set(found.values()) == {"erasure_coded"}
    (line,) = [line for line in report.servers if "on its disk" in line]
    assert re.match(r"on its disk: \d+\.\d MB of records; \d+% are in memory\. The least that it needs is ", line)
    tiny = dataclasses.replace(servers, memory_bytes=GB // 128)
    with pytest.raises(PlannerError, match=r"take \d+ bytes of the server of a slot, .* a larger k, or leave tables"):
        planner_of(servers=tiny).plan(two(), get_default_sharders())
    with pytest.raises(ValueError, match="needs `memory_bytes`"):
        Servers(tier=True)


def test_a_plan_that_protects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan leaves every table to TorchRec, and protects nothing"):
        planner_of(unprotected="allow").plan(Net(collection()), get_default_sharders())


def test_tables_of_one_collection_on_both_sides_are_refused_by_name() -> None:
    message = (
        r"collections\.1: a collection is sharded as a whole, but hour are to be on the servers, and country with"
        r" TorchRec\. Make two collections of it"
    )
    with pytest.raises(ValueError, match=message):
        planner_of(constraints={"country": WHOLE}).plan(two(), get_default_sharders())


def test_constraints_of_tables_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """TorchRec passes over them: a misspelt table would be protected by nothing, and nobody would know."""
    limits = {"users": OURS, "userz": OURS}
    assert types(two(), planner_of(constraints=limits))
    assert "constraints name tables that the model, as it is sharded, does not have: userz;" in caplog.text
    caplog.clear()
    del limits["userz"]
    assert types(two(), planner_of(constraints=limits)) and "constraints name" not in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            lambda: planner_of(servers={"memory_bytes": 5}),
            "`servers` must be a Servers, .*: pass Servers(memory_bytes=5)",
        ),
        (lambda: Servers(code={"slots": 4}), "`code` must be a CodeSpec, got {'slots': 4}: pass CodeSpec(slots=4)"),  # type: ignore[arg-type]
        (
            lambda: planner_of(constraints={"users": {"min_partition": 4}}),
            "`constraint of table users` must be a Param",
        ),
        (lambda: planner_of(constraints=[OURS]), "`constraints` must be a dict, by names of tables, got "),
        (lambda: EmbeddingShardingPlanner(topology={"world_size": 2}), "`topology` must be a Topology, got "),  # type: ignore[arg-type]
        (lambda: DistributedModelParallel(two(), settings={"join": "a:1"}), "`settings` .*: pass Settings(join='a:1')"),  # type: ignore[arg-type]
        (lambda: DistributedModelParallel(two(), code={"slots": 4}), "`code` must be a CodeSpec, got "),  # type: ignore[arg-type]
    ],
)
def test_a_dict_in_place_of_what_it_describes_is_refused_by_name(given: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(says).replace(r"\.\*", ".*")):
        given()


@pytest.mark.parametrize(
    "given", [{"num_poolings": [1.0, 2.0]}, {"batch_sizes": [4, 5]}, {"num_poolings": [1.0], "batch_sizes": [4, 5]}]
)
def test_lists_of_a_constraint_of_different_lengths_are_refused_by_name(given: dict[str, Any]) -> None:
    """Which TorchRec, that takes one pooling factor if none is given, finds in the midst of its planning."""
    with pytest.raises(
        ValueError, match=r"the constraint of table users has 1 `pooling_factors`, .*2 `.*pass each of them"
    ):
        planner_of(constraints={"users": ParameterConstraints(**given)})
    equal = {"pooling_factors": [3.0, 4.0], **{name: [1, 2] for name in given}}
    types(two(), planner_of(constraints={"users": ParameterConstraints(**equal)}))


@pytest.mark.parametrize("name", ["pooling_factors", "num_poolings"])
def test_no_number_of_ids_is_infinite(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name} of table t` are \\[inf\\]"):
        planner_of(constraints={"t": ParameterConstraints(**{name: [math.inf]})})


def test_unprotected_is_one_of_four() -> None:
    with pytest.raises(ValueError, match="`unprotected` must be one of refuse, snapshot, allow, reset, got 'yes'"):
        planner_of(unprotected="yes")


def test_its_report_has_our_tables_and_what_the_servers_hold_and_carry(caplog: pytest.LogCaptureFixture) -> None:
    report, theirs = Report(), stats._get_sharding_type_abbr
    servers = Servers(CodeSpec(4, 2, 1), memory_bytes=8 * GB)
    with caplog.at_level(logging.INFO, stats.logger.name):
        planner_of(servers=servers, constraints={"country": WHOLE, "hour": WHOLE}, stats=report).plan(
            two(), get_default_sharders()
        )
    assert stats._get_sharding_type_abbr is theirs
    text = [record.getMessage() for record in caplog.records]
    (users,) = (line.split() for line in text if "collections.0.users" in line and "customized_kernel" in line)
    assert users[2] == "EC"
    assert any("EC: 2" in line and "TW: " in line for line in text), "shards of a rank, by type"
    title, head, *rows, last = report.servers
    assert title == "Erasure-coded servers: 4 slots, k = 2, r = 1; 2 trainers"
    assert all(any(line in logged for logged in text) for line in report.servers)
    names = ["records", "parities", "logs", "lookups", "pushes", "folds"]
    assert head.split() == ["MB", "rows", *names[:3], *(f"{name}/step" for name in names[3:])]
    job = job_of(two())
    costs = {table.name: cost_of(table, 512, 2, servers) for table in job.tables[:2]}
    for row in rows[:2]:
        path, _, *figures = row.split()
        cost = costs[path.removeprefix("collections.0.")]
        assert [float(figure) for figure in figures] == [
            pytest.approx(getattr(cost, name) / 1e6, abs=1e-3) for name in names
        ]
    assert rows[2].split()[:2] == ["all", "5000000"] and "of 8589.9 MB" in last


@pytest.mark.parametrize("kind", ["erasure_coded", "erasure_coded_table_wise"])
def test_padding_of_a_table_that_must_be_whole_is_reported_and_the_model_warns_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 of the 80 rows of its table group, on 3 slots."""
    monkeypatch.setattr(spread, "PADDING_LEAST_BYTES", 1)
    report, module = Report(), Net(collection())
    constraints = {"wide": ParameterConstraints(sharding_types=[kind])}
    planner = planner_of(world_size=1, servers=Servers(CodeSpec(3, 2, 1)), constraints=constraints, stats=report)
    plan = planner.plan(module, get_default_sharders())
    padding = said_of_padding(job := job_of(module, plan=plan))
    assert report.servers[8:] == ([f"padding: {padding}"] if padding else [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedModelParallel(module, device=CPU, session=FakeSession(job), plan=plan)
    assert [str(one.message) for one in caught if "table_wise" in str(one.message)] == [padding] * bool(padding)
    assert padding.startswith("table wide is whole") == kind.endswith("table_wise") == bool(padding)


def test_a_plan_for_other_servers_than_the_clusters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its tables may not fit there: nobody else looks."""
    for code, told in ((CodeSpec(3, 2, 1), 0), (CodeSpec(5, 3, 2), 1)):
        caplog.clear()
        module = Net(collection())
        plan = planner_of(world_size=1, servers=Servers(code)).plan(module, get_default_sharders())
        DistributedModelParallel(module, device=CPU, session=FakeSession(job_of(module, plan=plan)), plan=plan)
        said = [
            one for one in caplog.messages if one.startswith("the plan was made for 5 slots, k = 3, r = 2, and the")
        ]
        assert len(said) == told
    assert said[0].endswith("Give the planner what there is: Servers(CodeSpec(3, 2, 1))")


def test_a_plan_without_servers_is_reported_as_such() -> None:
    """By TorchRec's own planner, which knows nothing of them."""
    report = Report()
    topology = Topology(world_size=2, compute_device="cpu")
    planners.EmbeddingShardingPlanner(topology=topology, stats=report).plan(two(), get_default_sharders())
    assert report.servers == ["Erasure-coded servers: no table"]


class Kinds(nn.Module):
    """Of every kind that a planner sees in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection("sgd", [table("b", 100, 8, "f0")])
        self.weighted = FeatureProcessedEmbeddingBagCollection(
            collection("sgd", [table("w", 100, 8, "f1")], is_weighted=True), {"f1": PositionWeightedModule(4)}
        )
        config = EmbeddingConfig(
            name="s", num_embeddings=100, embedding_dim=8, feature_names=["f2"], data_type=DataType.FP16
        )
        self.rows = EmbeddingCollection(tables=[config], device=CPU)


def test_every_kind_of_collection_is_planned_and_the_model_takes_the_plan() -> None:
    module = Kinds()
    planner = planner_of(world_size=1)
    assert types(module, planner) == dict.fromkeys("bws", "erasure_coded")
    assert set(planner._enumerator.served) == {"bags.b", "weighted.w", "rows.s"}
    plan = planner.plan(module, get_default_sharders())
    with pytest.warns(UserWarning, match="have no optimizer"):
        model, session = shard(module, plan=plan)
    assert [spec.name for spec in session.job.tables] == ["b", "w", "s"]
    assert "weighted" not in model.plan.plan  # its tables are the servers', under its collection's name


def test_torchrecs_planner_itself_does_as_before() -> None:
    """A plan that does not choose was made for TorchRec alone: what is served is served."""
    topology = Topology(world_size=1, compute_device="cpu")
    module = Net(collection())
    plan = planners.EmbeddingShardingPlanner(topology=topology).plan(module, get_default_sharders())
    model, session = shard(module, plan=plan)
    assert len(train(model, [batch_of(6, 1)])) == 1 and session.step == 2
