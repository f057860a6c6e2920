"""The sweep of models: whatever is trained, with whatever code, has the bits of the undisturbed run, whoever is lost.

Random models (`random_models.py`) are trained by one to three trainers over the simulated cluster
(`virtual_trainers.py`), each by a script as people write one: a plain loop, or one of TorchRec's pipelines. The
undisturbed run is compared with TorchRec's unsharded modules (`unsharded.py`), every other one with the undisturbed,
bit for bit: losses, what was looked up, dense gradients and weights, maps, and every record. So is a plain loop with
the pipeline.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from harness import tiers
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_models import (
    DRIVERS,
    FUSED,
    KINDS,
    LOADS,
    STARTS,
    TRACING,
    Model,
    Optimized,
    Part,
    Tables,
)
from random_training import WAYS, End, job_for, restore, save, train
from thinned import drawn_for
from torch import Tensor
from unsharded import Unsharded
from virtual_trainers import Kill, Trainers

from torch_ecrec.client.session import Session
from torch_ecrec.nn import slices, tables_state
from torch_ecrec.nn.managed import ManagedModule
from torch_ecrec.nn.module_settings import ModuleSettings
from torch_ecrec.nn.slices import Slice
from torch_ecrec.records.optimizers import NAMES
from torch_ecrec.resume.reader import Reader
from torch_ecrec.server.apply import Applier
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.state_dicts import streamed

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:tables .* have no optimizer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
warnings.filterwarnings("ignore", category=DeprecationWarning)

COUNTED: Counter[str] = Counter()


@dataclasses.dataclass(frozen=True)
class Life:
    """How a model is trained once more: with which code, on how many servers, and who is lost when.

    Args:
        lost: who, which of them, and when: a share of the messages that the undisturbed run has sent.
    """

    code: CodeSpec = CodeSpec(3, 2, 1)
    spares: int = 1
    network_seed: int = 0
    noise: float = 0.0
    lost: tuple[tuple[str, int, float], ...] = ()
    reborn: bool = False


def run(
    model: Model, life: Life, messages: int = 0, looks: bool = False, pooling: str = "parts"
) -> tuple[dict[int, End], Trainers]:
    ends: dict[int, End] = {}
    kills = [Kill(who, which, int(at * messages)) for who, which, at in life.lost]
    cluster = Trainers(
        job_for(model),
        lambda rank, session: train(model, session, ends.__setitem__, looks),
        code=life.code,
        kills=kills,
        spares=life.spares,
        network_seed=life.network_seed,
        noise=life.noise,
        reborn=life.reborn,
        snapshot_every=model.snapshot_every,
        pooling=pooling,
    )
    cluster.go()
    fired = Counter(kill.who for kill in cluster.fired)
    assert fired == Counter(who for who, _, _ in life.lost)
    assert fired["server"] <= cluster.run.kills and fired["coordinator"] == cluster.run.coordinator_kills
    COUNTED["lives"] += 1
    COUNTED.update(f"{who}s lost" for who in fired.elements())
    COUNTED["steps made again"] += cluster.told.again
    COUNTED["bags pooled by slots"] += cluster.pooled
    COUNTED["in parts"] += cluster.in_parts
    COUNTED["lookups with a push"] += cluster.asked_ahead
    return ends, cluster


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check(model: Model, lives: list[Life]) -> None:
    """The undisturbed run against unsharded TorchRec; the plain loop's, and each life, against the undisturbed run.

    Slots pool bags of any length; where they pool some of whole tables, the run is also compared with one in which they
    pool none. Bags of tables on several slots are pooled, too, if all lives have one code: others add in another order.
    """
    codes = {life.code for life in lives} or {Life().code}
    pooling = "parts" if len(codes) == 1 and not model.exact else "whole"
    code = codes.pop() if pooling == "parts" else Life().code
    every = {"are_long": lambda ids, bags: ids >= 0, "are_long_in_parts": lambda ids, rows, bags, slots: ids >= 0}
    with mock.patch.multiple(slices, **every):
        healthy = _check(model, lives, code, pooling)
        COUNTED["models with parts"] += healthy.in_parts > 0
        if healthy.in_parts:
            healthy = _check(model, [], code, "whole")
        if healthy.pooled:
            COUNTED["of rows alone"] += 1
            assert not _check(model, [], code, "rows", healthy).pooled


def _check(model: Model, lives: list[Life], code: CodeSpec, pooling: str, pooled: Trainers | None = None) -> Trainers:
    first, healthy = run(model, Life(code), looks=True, pooling=pooling)
    assert pooling == "parts" or not healthy.in_parts
    oracle = Unsharded(model, job_for(model), first, healthy.told)
    oracle.check()
    assert healthy.lives == 1 and oracle.compared > model.steps
    COUNTED["models"] += 1
    COUNTED["exact"] += model.exact
    COUNTED[model.driver] += 1
    more = [(model, life) for life in lives]
    if model.driver != "plain":
        more.insert(0, (dataclasses.replace(model, driver="plain"), Life(code)))
    for other, life in more:
        ends, cluster = run(other, life, len(healthy.network.sent), pooling=pooling)
        for rank, end in first.items():
            for name in ("trace", "digest", "dense", "maps"):
                what = f"{other.driver}, {life}: {name} of trainer {rank}"
                assert same(getattr(ends[rank], name), getattr(end, name)), what
        assert same(cluster.told.sorted_pushes(), healthy.told.sorted_pushes())
        assert same(cluster.run.records, healthy.run.records)
    if pooled is not None:
        assert same(pooled.told.sorted_pushes(), healthy.told.sorted_pushes())
        assert same(pooled.run.records, healthy.run.records)
    return healthy


# what is drawn ------------------------------------------------------------------------------------

HYPERPARAMETERS: dict[str, dict[str, tuple[float, ...]]] = {
    "sgd": {},
    "momentum_sgd": {"momentum": (0.9, 0.3), "weight_decay": (0.0, 0.02)},
    "adagrad": {"eps": (1e-8, 1e-3)},
    "rowwise_adagrad": {"eps": (1e-8, 0.07)},
    "lars_sgd": {"momentum": (0.9, 0.2), "eta": (0.001, 0.3), "weight_decay": (0.0, 0.01)},
    "adam": {"eps": (1e-8, 1e-3), "beta1": (0.9, 0.3), "beta2": (0.999, 0.7), "weight_decay": (0.0, 0.05)},
    "partial_rowwise_adam": {"eps": (1e-8, 1e-3), "beta1": (0.9, 0.1), "beta2": (0.999, 0.5)},
    "lamb": {"eps": (1e-8, 1e-2), "beta1": (0.9, 0.5), "weight_decay": (0.0, 0.1)},
    "partial_rowwise_lamb": {"eps": (1e-8, 1e-2), "beta2": (0.999, 0.9), "weight_decay": (0.0, 0.1)},
}


@st.composite
def optimizers(draw: Any, kinds: tuple[str, ...]) -> Optimized:
    kind = draw(st.sampled_from(kinds))
    if kind == "default":
        return Optimized("default")
    fixed = tuple((name, draw(st.sampled_from(values))) for name, values in HYPERPARAMETERS.get(kind, {}).items())
    return Optimized(kind, draw(st.sampled_from([0.05, 0.5, 0.003])), fixed)


FROZEN = (*[frozenset[int]()] * 4, frozenset({1}), frozenset({1, 2}), frozenset({2, 3}), frozenset({1, 2, 3, 4}))


@st.composite
def parts(draw: Any, most_tables: int, exact: bool, once: bool) -> Part:
    kind = draw(st.sampled_from(EXACT if exact else KINDS))
    count = draw(st.integers(1, most_tables))
    managed, fused, pools = kind.startswith("managed"), kind.startswith("fused"), "sequences" not in kind
    dim = 4 if fused else draw(st.integers(1, 9))
    names = iter(f"f{i}" for i in range(100))
    sure = FUSED if fused else (*NAMES, "default")
    one = draw(optimizers(sure))
    dims = st.just(dim) if not pools else st.sampled_from([4, 8]) if fused else st.integers(1, 9)
    starts = st.sampled_from(["servers", "drawn", "drawn"] if kind == "fused sequences" else STARTS)
    tables: list[Tables] = []
    for _ in range(count):
        features = [next(names) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
        if tables and not managed and draw(st.sampled_from([False, False, True])):
            features.append(tables[0].features[0])  # a feature of two tables
        tables.append(
            Tables(
                rows=draw(st.integers(4, 12) if managed else st.sampled_from([1, 2, 3, 5, 17, 40])),
                dim=draw(dims),
                features=tuple(features),
                dtype="float32" if fused else draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"])),
                mean=pools and kind not in ("weighted", "processed") and draw(st.booleans()),
                start=draw(starts),
                optimized=one if fused or draw(st.booleans()) else draw(optimizers(sure)),
                frozen=draw(st.sampled_from(FROZEN)),
                sharding=draw(st.sampled_from(["auto", "table_wise"])),
            )
        )
    asks = 1 if once else draw(st.sampled_from([1, 1, 2, 3]))
    return Part(
        kind=kind,
        tables=tuple(tables),
        asks=asks,
        unused=asks > 1 and draw(st.booleans()),
        again=draw(st.sampled_from([False, False, True])),
        repeats=not managed and kind != "processed" and draw(st.sampled_from([False, False, True])),
        int32=not managed and draw(st.sampled_from([False, False, True])),
        policy=draw(st.sampled_from(["lfu", "lru", "distance", "filtered"])) if managed else "lfu",
        interval=draw(st.integers(1, 3)) if managed else 2,
    )


DECAYS: tuple[tuple[tuple[str, float], ...], ...] = (
    (("weight_decay", 0.1), ("weight_decay_mode", 1.0)),
    (("weight_decay", 0.02), ("weight_decay_mode", 2.0), ("eps", 1e-3)),
    (("max_norm", 0.6),),
)


def of_sharder(part: Part) -> Part:
    """Its tables have the optimizer that a sharder gives."""
    tables = tuple(dataclasses.replace(table, optimized=Optimized("default")) for table in part.tables)
    return dataclasses.replace(part, tables=tables)


EXACT = tuple(kind for kind in KINDS if kind != "processed" and not kind.startswith("managed"))


@st.composite
def models(draw: Any, most_parts: int = 3, most_tables: int = 4) -> Model:
    exact = draw(st.sampled_from([False, False, True]))
    steps = draw(st.integers(2, 4))
    loads = draw(st.lists(st.tuples(st.integers(0, steps), st.sampled_from(LOADS)), max_size=2))
    given = draw(st.sampled_from([None, None, *(Optimized("rowwise_adagrad", 0.05, decay) for decay in DECAYS)]))
    clip = draw(st.sampled_from([None, None, 0.03]))
    driver = draw(st.sampled_from(["plain", *DRIVERS]))
    drawn = draw(st.lists(parts(most_tables, exact, driver in TRACING), min_size=1, max_size=most_parts))
    if given is not None:  # it says what all tables of bags have
        drawn = [of_sharder(part) if part.of_sharder else part for part in drawn]
    return Model(
        parts=tuple(drawn),
        given=given,
        clip=clip,
        trainers=1 if exact else draw(st.sampled_from([1, 1, 2, 3])),
        steps=steps,
        seed=draw(st.integers(0, 99)),
        once=exact or draw(st.booleans()),
        loads=tuple(sorted(loads)),
        looks=draw(st.frozensets(st.integers(1, steps), max_size=2)),
        snapshot_every=draw(st.sampled_from([1, 1, 2])),
        schedule=draw(st.booleans()),
        output=draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"])),
        driver=driver,
    )


CODES = (
    CodeSpec(3, 2, 1),
    CodeSpec(2, 1, 1),
    CodeSpec(4, 2, 2),
    CodeSpec(5, 3, 2),
    CodeSpec(7, 4, 1),
    CodeSpec(5, 2, 3),
    CodeSpec(4, 1, 3),
)


@st.composite
def lives(draw: Any) -> Life:
    code = draw(st.sampled_from(CODES))
    who = st.sampled_from(["server", "server", "trainer", "coordinator"])
    when = st.integers(0, 90).map(lambda percent: percent / 100)
    return Life(
        code=code,
        spares=draw(st.integers(0, 3)),
        network_seed=draw(st.integers(0, 999)),
        noise=draw(st.sampled_from([0.0, 0.0, 0.03])),
        lost=tuple(draw(st.lists(st.tuples(who, st.integers(0, 9), when), min_size=1, max_size=4))),
        reborn=True,
    )


SWEEP = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("part", [0, 2, 4, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 3))])
def test_any_model_is_trained_as_unsharded_and_to_the_same_bits_whoever_is_lost(part: int) -> None:
    """The same in every run."""

    @seed(part)
    @settings(max_examples=4, database=None, **SWEEP)
    @given(models(), st.lists(lives(), min_size=1, max_size=2), st.booleans())
    def check_some(model: Model, more: list[Life], alike: bool) -> None:
        check(model, [dataclasses.replace(life, code=more[0].code) for life in more] if alike else more)

    check_some()
    print(dict(COUNTED))


# mutations ----------------------------------------------------------------------------------------


def maps_stay(patch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again has the maps that it was made with."""
    patch.setattr(ManagedModule, "load_replicated_state", lambda self, state: None)


def means_are_sums(patch: pytest.MonkeyPatch) -> None:
    init = Slice.__init__

    def summing(self: Slice, *args: Any) -> None:
        init(self, *args)
        self.mean_F[:] = False

    patch.setattr(Slice, "__init__", summing)


def hosts_count(patch: pytest.MonkeyPatch) -> None:
    """A host takes the number of steps that it has made for the iteration."""
    update_ = Applier.update_

    def counted(self: Any, step: int, pushes: Any) -> Any:
        self.made = getattr(self, "made", 0) + 1
        return update_(self, step, {**pushes, 0: msgspec.structs.replace(pushes[0], iteration=self.made)})

    patch.setattr(Applier, "update_", counted)


def thawed_late(patch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again has tables frozen as the script begins."""
    load_ = ModuleSettings.load_

    def without_tables(self: ModuleSettings, changed: Any) -> None:
        kept = {
            path: {name: value for name, value in values.items() if not name.startswith("requires_grad of table")}
            for path, values in changed.items()
        }
        load_(self, kept)

    patch.setattr(ModuleSettings, "load_", without_tables)


def parts_once(patch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again makes the sums of bags that its slots have made before."""
    pooling = Session.pooling

    def chosen(self: Session, evaluation: bool) -> str:
        return "rows" if self.restarted else pooling(self, evaluation)

    patch.setattr(Session, "pooling", chosen)


ADAM = Optimized("adam", 0.05, (("beta1", 0.5),))
MUTATIONS: dict[Any, Part] = {
    maps_stay: Part("managed bags", (Tables(6, 4, ("f0",)),), interval=1),
    means_are_sums: Part("bags", (Tables(5, 4, ("f0",), mean=True),)),
    parts_once: Part("bags", (Tables(90, 4, ("f0", "f1")),)),
    thawed_late: Part("bags", (Tables(6, 4, ("f0",), frozen=frozenset({1})),)),
    hosts_count: Part("sequences", (Tables(40, 3, ("f0", "f1"), optimized=ADAM),)),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model((MUTATIONS[mutate],), steps=4, seed=3)
    lives = [Life(lost=(("trainer", 0, 0.7), ("server", 0, 0.4)))]
    check(model, lives)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, AttributeError)):  # a history without its buffer
        check(model, lives)


@pytest.mark.parametrize("sharding", ["auto", "table_wise"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_every_kind_of_module_in_every_pipeline(driver: str, sharding: str) -> None:
    """In one model, with loads and an evaluation between two steps, and everybody lost."""
    optimized = {kind: Optimized("rowwise_adagrad" if kind.startswith("fused") else "adam") for kind in KINDS}
    parts = [Part(kind, (Tables(6, 4, ("f0",), optimized=optimized[kind], sharding=sharding),)) for kind in KINDS]
    model = Model(tuple(parts), trainers=2, looks=frozenset({2}), loads=((1, "weights"), (3, "written")), driver=driver)
    lost = ("server", 0, 0.3), ("coordinator", 0, 0.6), ("trainer", 1, 0.65), ("trainer", 0, 0.8)
    before = COUNTED.copy()
    check(model, [Life(lost=lost, reborn=True)])
    assert COUNTED["steps made again"] > before["steps made again"]
    assert (COUNTED["lookups with a push"] > before["lookups with a push"]) == (driver == "sparse")


@pytest.mark.parametrize("code", [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2)], ids=str)
@pytest.mark.parametrize("kind", ["bags", "weighted", "fused bags", "managed bags", "processed"])
def test_bags_of_tables_on_several_slots_are_summed_in_parts_to_the_same_bits_whoever_is_lost(
    kind: str, code: CodeSpec
) -> None:
    """Sums and means, beside a whole table, of 16 bits, too; features have batch sizes of their own."""
    tables = (
        Tables(90, 4, ("f0", "f1"), frozen=frozenset({3})),
        Tables(70, 4, ("f2",), mean=kind in ("bags", "fused bags", "managed bags"), dtype="float16"),
        Tables(6, 4, ("f3",)),
    )
    if kind.startswith(("fused", "managed")):
        tables = tuple(dataclasses.replace(table, dtype="float32", frozen=frozenset()) for table in tables)
    part = Part(kind, tables, repeats=kind == "bags")
    model = Model((part,), trainers=2, steps=5, looks=frozenset({2}), clip=0.03)
    lost = ("server", 0, 0.3), ("trainer", 1, 0.5), ("server", 1, 0.6), ("trainer", 0, 0.8)
    before = COUNTED.copy()
    check(model, [Life(code, lost=lost, reborn=True)])
    assert (COUNTED["in parts"] > before["in parts"]) == (kind != "processed"), "weights of ids are learned there"


ONCE = tuple(Part(kind, (Tables(6, 4, ("f0",)),)) for kind in ("bags", "sequences"))


def test_a_plain_loop_over_a_list_sends_one_message_to_a_slot_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once three steps have shown how it goes. The parts of a step share a message, too."""
    sent = {}
    for setting, steps in (("0", 3), ("0", 9), ("auto", 9)):
        monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", setting)
        _, cluster = run(Model(ONCE, trainers=2, steps=steps), Life())
        sent[setting, steps] = Counter(name for _, _, name in cluster.network.sent)
    assert sent["auto", 9]["Push"] == sent["0", 9]["Push"] == 2 * Life().code.slots * 9
    assert sent["auto", 9]["Lookup"] == sent["0", 3]["Lookup"] < sent["0", 9]["Lookup"] / 2


@pytest.mark.parametrize("look_ahead", ["auto", "0"])
def test_a_plain_loop_that_looks_ahead_goes_on_to_the_bits_of_one_that_does_not(
    look_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is lost; with the other setting in every life, too."""
    model = Model(ONCE, trainers=2, steps=9, looks=frozenset({5}), loads=((4, "weights"), (6, "written")))
    monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", "0" if look_ahead == "auto" else "auto")
    first, healthy = run(model, Life())
    monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", look_ahead)
    lost = ("server", 0, 0.5), ("trainer", 0, 0.6), ("server", 1, 0.7), ("trainer", 1, 0.8), ("coordinator", 0, 0.9)
    ends, cluster = run(model, Life(lost=lost, reborn=True), len(healthy.network.sent))
    assert cluster.told.again and (cluster.asked_ahead > 0) == (look_ahead == "auto")
    for rank, end in first.items():
        assert same(ends[rank].trace, end.trace) and same(ends[rank].digest, end.digest)
    assert same(cluster.run.records, healthy.run.records)


LARGER = tuple(Part(kind, (Tables(90, 4, ("f0",)),)) for kind in ("bags", "sequences"))


@pytest.mark.parametrize("look_ahead", ["1", "4"])
def test_servers_with_tiers_are_told_of_later_steps_to_the_same_bits(
    look_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in memory of which nothing is known before, whoever is lost."""
    model = Model(LARGER, trainers=2, steps=10, looks=frozenset({5}), loads=((4, "weights"), (7, "written")))
    monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", "0")
    monkeypatch.setattr(tiers, "FRAMES", 0)
    first, healthy = run(model, Life())
    monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", look_ahead)
    monkeypatch.setattr(tiers, "FRAMES", 12)
    lost = ("server", 0, 0.5), ("trainer", 0, 0.6), ("server", 1, 0.7), ("trainer", 1, 0.8), ("coordinator", 0, 0.9)
    for life in (Life(), Life(lost=lost, reborn=True)):
        ends, cluster = run(model, life, len(healthy.network.sent))
        told = sum(kind == "Announce" for _, _, kind in cluster.network.sent)
        assert (told > 0) == (look_ahead == "4") and bool(cluster.fired) == bool(life.lost)
        for rank, end in first.items():
            assert same(ends[rank].trace, end.trace) and same(ends[rank].digest, end.digest)
        assert same(cluster.run.records, healthy.run.records)


@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_any_model_looks_ahead_in_a_plain_loop_to_the_same_bits(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps enough to see it."""
    ahead = 0

    @seed(examples)
    @settings(max_examples=examples, database=None, **SWEEP)
    @given(models(), lives())
    def check_some(drawn: Model, life: Life) -> None:
        nonlocal ahead
        model = dataclasses.replace(drawn, driver="plain", steps=7)
        monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", "0")
        first, healthy = run(model, Life())
        monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", "auto")
        for again in (Life(), life):
            ends, cluster = run(model, again, len(healthy.network.sent))
            ahead += cluster.asked_ahead
            for rank, end in first.items():
                for name in ("trace", "digest", "dense", "maps"):
                    assert same(getattr(ends[rank], name), getattr(end, name)), name
            assert same(cluster.run.records, healthy.run.records)
            assert same(cluster.told.sorted_pushes(), healthy.told.sorted_pushes())

    check_some()
    assert ahead


@pytest.mark.parametrize("driver", TRACING)
def test_a_pipeline_that_traces_takes_one_lookup_of_a_collection_in_a_step(driver: str) -> None:
    """TorchRec's rule and message, whatever shards the collection; `TrainPipelineBase` takes more."""
    part = Part("bags", (Tables(5, 4, ("f0",)),), asks=2)
    check(Model((part,), driver="base"), [])
    with pytest.raises(AssertionError, match="invoked more than once in the model's forward pass"):
        run(Model((part,), driver=driver), Life())


def test_a_reader_that_knows_no_pipelines_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart it goes on behind the batches that the pipeline has drawn ahead."""
    model = Model((Part("bags", (Tables(6, 4, ("f0",)),)),), steps=4, seed=3, driver="sparse")
    lives = [Life(lost=(("trainer", 0, 0.5),))]
    check(model, lives)
    monkeypatch.setattr(Reader, "pipelined", property(lambda self: False))
    with pytest.raises(AssertionError, match="another push than before"):
        check(model, lives)


# checkpoints --------------------------------------------------------------------------------------


def run_script(model: Model, life: Life, messages: int, script: Any, folder: str, way: str) -> tuple[Any, Trainers]:
    ends: dict[int, Any] = {}
    cluster = Trainers(
        job_for(model),
        lambda rank, session: script(model, session, folder, way, ends.__setitem__),
        code=life.code,
        kills=[Kill(who, which, int(at * messages)) for who, which, at in life.lost if who != "trainer"],
        spares=life.spares,
        network_seed=life.network_seed,
        noise=life.noise,
        reborn=life.reborn,
        snapshot_every=model.snapshot_every,
    ).go()
    COUNTED["lives"] += 1
    COUNTED.update(f"{kill.who}s lost" for kill in cluster.fired)
    return ends[0], cluster


def check_checkpoint(model: Model, trainers: int, way: str, portions: bool, saves: Life, loads: Life) -> None:
    """What some trainers have saved is what others have after they have loaded it, whoever is lost around both."""
    other = dataclasses.replace(model, trainers=trainers, seed=model.seed + 1)
    portion, chunk = (24, 40) if portions else (streamed.PORTION_BYTES, tables_state.CHUNK_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(streamed, "PORTION_BYTES", portion),
        mock.patch.object(tables_state, "CHUNK_BYTES", chunk),
    ):
        saved, first = run_script(model, saves, 200, save, folder, way)
        loaded, second = run_script(other, loads, 200, restore, folder, way)
    assert same(loaded, saved), f"{way}: other records after loading"
    wanted = [who for life in (saves, loads) for who, _, _ in life.lost if who != "trainer"]
    assert Counter(kill.who for kill in (*first.fired, *second.fired)) == Counter(wanted)
    COUNTED["checkpoints"] += 1


def test_a_table_without_state_and_with_fewer_rows_than_trainers_is_loaded_by_dcp() -> None:
    """Its optimizer state is an empty dict. DCP refused it where a trainer had a tensor without shards beside."""
    model = Model((Part("bags", (Tables(1, 4, ("f0",)),)),), trainers=3)
    check_checkpoint(model, 3, "dcp", False, Life(), Life())


@seed(0)
@settings(max_examples=6, database=None, **SWEEP)
@given(models(most_parts=2, most_tables=3), st.integers(1, 3), st.sampled_from(WAYS), st.booleans(), lives(), lives())
def test_any_model_is_saved_and_loaded_by_others_bit_for_bit(
    model: Model, trainers: int, way: str, portions: bool, saves: Life, loads: Life
) -> None:
    check_checkpoint(model, trainers, way, portions, saves, loads)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(10))
def test_hundreds_of_checkpoints(part: int) -> None:
    @drawn_for(part)
    @settings(max_examples=50, **SWEEP)
    @given(models(), st.integers(1, 4), st.sampled_from(WAYS), st.booleans(), lives(), lives())
    def check_some(model: Model, trainers: int, way: str, portions: bool, saves: Life, loads: Life) -> None:
        check_checkpoint(model, trainers, way, portions, saves, loads)

    check_some()
    print(dict(COUNTED))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_models(part: int) -> None:
    @drawn_for(part)
    @settings(max_examples=100, **SWEEP)
    @given(models(most_parts=4, most_tables=6), st.lists(lives(), min_size=1, max_size=3))
    def check_some(model: Model, more: list[Life]) -> None:
        check(model, more)

    check_some()
    print(dict(COUNTED))
