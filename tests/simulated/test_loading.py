"""Loading is as safe as a step: crashes, losses and delays at every message of it, and reads before training.

As in `test_simulation.py` the oracle is the undisturbed run: what is read while loading, every lookup, loss, record and
parity must be bit-equal to it. Servers that are lost within the contract are replaced and nobody starts again; lost
trainers load again, from what the servers had made, whatever the lost ones had loaded.
"""

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from faults import CODES, THREE_TWO, WAYS, check, found, hunt_at, spread
from harness import Fault, Scenario, SimulatedCluster, check_parity, simulate
from harness.network import CRASH_COORDINATOR, CRASHES, LATES, LOSSES, NOISES
from harness.scenario import LOADS, Load
from thinned import in_turns
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from virtual_session import VirtualSession

from torch_ecrec.client import client as client_module
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import table_specs
from torch_ecrec.protocol import messages, step_rule
from torch_ecrec.server import apply, snapshots
from torch_ecrec.server import slot as slot_module
from torch_ecrec.spec.job import CodeSpec, JobSpec

FEW = LOADS[1:4]  # a value for every row that they read, or the servers' own
LOADING = Scenario(steps=1, spares=2, loads=FEW)
RETURNING = dataclasses.replace(LOADING, trainers_return=True)


def messages_of_loading(scenario: Scenario) -> list[tuple[int, tuple[str, str, str]]]:
    """(number, message) up to the first of training."""
    sent = simulate(scenario).messages
    end = next((i for i, message in enumerate(sent) if message[2] == "Lookup"), len(sent))
    return list(enumerate(sent))[:end]


def sweep(scenario: Scenario, *kinds: tuple[str, ...], every: int = 1) -> tuple[Counter, list]:
    """A run for messages of loading (`spread`) and each of `kinds`, faults that come together; how many fired, and
    (the kind, the message, the run)."""
    fired, runs = Counter(), []
    messages = [message for _, message in messages_of_loading(scenario)]
    for number, together in spread(messages, kinds, every):
        faults = [Fault(kind, number) for kind in together]
        point = f"{' and '.join(together)} at request {number}, {messages[number]}"
        try:
            run = check(scenario, *faults)
        except Exception as error:
            raise AssertionError(f"{point}: {type(error).__name__}: {error}") from error
        assert all(fault.fired != fault.skipped for fault in faults), f"{point}: never came to pass"
        fired[together] += all(fault.fired for fault in faults)
        runs.append((together, messages[number], run))
    print(f"{len(runs)} runs, fired: {dict(fired)}")
    return fired, runs


def by_trainers(runs: list, *together: str) -> int:
    """Of the runs with these faults, those at messages of trainers."""
    return sum(kinds == together and sender.startswith("trainer") for kinds, (sender, _, _), _ in runs)


def singly(*kinds: str) -> list[tuple[str, ...]]:
    return [(kind,) for kind in kinds]


# what is loaded -----------------------------------------------------------------------------------


def test_rows_hold_what_was_loaded_last_or_what_the_servers_gave_them():
    """The oracle itself, worked out without servers."""
    plain, loaded = simulate(Scenario(steps=0)), simulate(Scenario(steps=0, loads=LOADS))
    expected = [records.clone() for records in plain.records]
    for load in LOADS:
        rows = slice(load.first, load.end)
        expected[load.table_group][rows] = load.values(expected[load.table_group][rows])
    for mine, right, before in zip(loaded.records, expected, plain.records, strict=True):
        assert torch.equal(mine, right) and not torch.equal(mine, before)
    assert not loaded.resumed and loaded.longest["log"] > 0


@pytest.mark.parametrize("code", [*CODES[1:], CodeSpec(3, 1, 1, protection="none")], ids=str)
def test_the_bits_do_not_depend_on_the_code(code):
    loading = dataclasses.replace(LOADING, pooled=False)
    simulate(dataclasses.replace(loading, code=code)).check_against(simulate(loading))


# crash points -------------------------------------------------------------------------------------


SOME_POINTS = in_turns("every", 7)


@SOME_POINTS
def test_a_server_dies_at_every_message_of_loading_and_nobody_starts_again(every):
    fired, runs = sweep(LOADING, *singly(*CRASHES), every=every)
    assert {message[2] for _, message, _ in runs} == {"Load", "Export", "Fold"}
    points = Counter(kinds for kinds, _, _ in runs)
    points["crash_sender",] -= by_trainers(runs, "crash_sender")
    assert fired == points and all(points.values())
    assert all(run.trainer_kills == 0 and run.loaded_again == 0 for _, _, run in runs)


@SOME_POINTS
def test_every_message_of_loading_is_lost_late_or_repeated(every):
    fired, runs = sweep(LOADING, *singly(*LOSSES), every=every)
    assert fired == Counter(kinds for kinds, _, _ in runs) and len(fired) == len(LOSSES)


@SOME_POINTS
def test_the_coordinator_dies_at_every_message_of_loading(every):
    _, runs = sweep(LOADING, (CRASH_COORDINATOR,), every=min(every, 3))
    assert all(run.coordinator_kills == 1 and run.fenced == 0 and not run.loaded_again for _, _, run in runs)


@SOME_POINTS
def test_a_trainer_dies_at_every_message_of_loading_also_together_with_a_server(every):
    """What the first life had loaded is taken back; the second one loads all of it again."""
    both = ("crash_sender", "crash_receiver")
    fired, runs = sweep(RETURNING, both[:1], both, every=min(every, 3))
    assert sum(run.loaded_again for _, _, run in runs) >= (10 if every == 1 else 5)
    lost = [run for _, _, run in runs if run.loaded_again]
    assert all(run.resumed == [] for run in lost), "nothing was loaded once training may begin"
    assert fired[both] == by_trainers(runs, *both)


@SOME_POINTS
def test_two_servers_die_at_every_message_of_loading(every):
    """(3, 2): sender and receiver of a fold; the receiver of a load and that of the next."""
    scenario = dataclasses.replace(LOADING, code=THREE_TWO, spares=3, loads=FEW[2:])
    fired, _ = sweep(scenario, ("crash_sender", "crash_receiver"), every=every)
    assert fired["crash_sender", "crash_receiver"] >= (15 if every == 1 else 3)
    pairs = 0
    loads = [number for number, message in messages_of_loading(scenario) if message[2] == "Load"]
    for number in loads[:: min(every, 2)]:
        run = check(scenario, Fault("crash_receiver", number), Fault("crash_after", number + 1))
        pairs += run.kills == 2
    assert pairs >= (5 if every == 1 else 2)


BEFORE = (Load(0, 0, 25, change=True), Load(1, 0, 13), Load(0, 10, 25))


def test_nothing_is_left_behind_of_what_only_the_lost_trainers_loaded():
    scenario = dataclasses.replace(RETURNING, loads_before=BEFORE)
    again = 0
    for number, (sender, _, kind) in messages_of_loading(scenario):
        if sender == "trainer-0" and kind in ("Load", "Export"):
            run = check(scenario, Fault("crash_sender", number))
            again += run.loaded_again
    assert again >= 5


def test_many_loads_keep_no_more_than_steps_do():
    """The verifier looks at the bounds all along; trainer 0's word lets the logs go, though the others say nothing."""
    run = check(dataclasses.replace(LOADING, loads=LOADS * 4, verify_every=5))
    assert run.longest["log"] >= 2


# through the public API ---------------------------------------------------------------------------


class Net(nn.Module):
    """Table a brings its own weights, b is initialised by the servers; they share a table group, and one stripe."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name="a", num_embeddings=501, embedding_dim=4, feature_names=["fa"]),
            EmbeddingBagConfig(name="b", num_embeddings=500, embedding_dim=4, feature_names=["fb"]),
        ]
        if own:
            tables[0].init_fn = lambda weights: weights.fill_(7.5)
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        self.over = nn.Linear(8, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.tanh(self.over(self.tables(features).values())).mean()


NAMES = [f"tables.embedding_bags.{table}.weight" for table in "ab"]


def model_over(cluster: SimulatedCluster, own: bool = True, restarted: bool = False) -> DistributedModelParallel:
    torch.manual_seed(5)
    session = VirtualSession(next(iter(cluster.clients.values())), lambda message: None, lambda: None, restarted)
    session.cluster = cluster
    return DistributedModelParallel(Net(own), device=torch.device("cpu"), session=session)


def new_cluster() -> SimulatedCluster:
    """Of one trainer, for the tables of `Net`; the scripts of its own trainers do not run."""
    job = JobSpec(tuple(table_specs(Net().tables, {"a": "a", "b": "b"})), CodeSpec(3, 2, 1), 1)
    cluster = SimulatedCluster(Scenario(tables=job.tables, trainers=1, spares=2, rebuild_chunk_bytes=1 << 20))
    while not cluster.clients:  # until the trainer has joined
        assert cluster.network.clock.advance()
    return cluster


def other_life(cluster: SimulatedCluster) -> None:
    """The trainer is killed, and another one joins."""
    (name,) = cluster.clients
    cluster.network.kill(name)
    while not cluster.clients or name in cluster.clients:
        assert cluster.network.clock.advance()


def lose(cluster: SimulatedCluster, index: int) -> None:
    cluster.network.kill(cluster.slots_known[index].server)


def until_whole(cluster: SimulatedCluster) -> None:
    for _ in range(20_000):
        if cluster.whole() and all(slot.whole for slot in cluster.slots()) and len(cluster.slots()) == 3:
            return
        cluster.network.clock.advance()
    raise AssertionError(f"not whole: {cluster.describe()}")


def features(step: int) -> KeyedJaggedTensor:
    rng = np.random.default_rng(step)
    lengths = torch.ones(32, dtype=torch.int64)
    return KeyedJaggedTensor(["fa", "fb"], torch.from_numpy(rng.integers(0, 500, 32)), lengths=lengths)


def train(model: DistributedModelParallel, steps: int) -> None:
    for step_number in range(model.steps_done, steps):
        model(features(step_number)).backward()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("trainer", (False, True), ids=("", "and the trainer"))
def test_a_server_lost_before_the_first_batch_is_replaced(index, trainer):
    """A table with an `init_fn` was loaded; its parity is that of a table that the servers initialised, too."""
    healthy, cluster = new_cluster(), new_cluster()
    right = model_over(healthy).full_state_dict()
    assert bool((right[NAMES[0]] == 7.5).all()) and not bool((right[NAMES[1]] == 7.5).any())
    model = model_over(cluster)
    lose(cluster, index)
    if trainer:
        other_life(cluster)
        model = model_over(cluster)
    until_whole(cluster)
    assert cluster.run.kills == 1
    for name, table in right.items():
        assert torch.equal(model.full_state_dict()[name], table), name
    check_parity(cluster.slots())


@pytest.mark.usefixtures("process_group")
def test_what_the_next_life_does_not_load_is_as_the_servers_made_it():
    cluster, plain = new_cluster(), new_cluster()
    model_over(cluster)
    other_life(cluster)
    mine, right = (model_over(each, own=False).full_state_dict() for each in (cluster, plain))
    assert all(torch.equal(mine[name], right[name]) for name in NAMES)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("loses", (False, True), ids=("", "while a slot is lost"))
def test_a_script_that_loads_before_it_attaches_may_be_restarted(loses):
    """Its reads and loads before `attach` killed one server after the other, and DataLoss ended the job."""
    saved = model_over(new_cluster()).full_state_dict()
    ends = {}
    for disturbed in (False, True):
        cluster = new_cluster()
        model = model_over(cluster)
        model.load_state_dict(dict(saved))
        model.flush()
        model.attach()
        train(model, 12 if disturbed else 20)
        if disturbed:
            model.flush()
            assert min(slot.log.floor for slot in cluster.slots()) > 0, "the logs have let go of the first step"
            if loses:
                lose(cluster, 1)
            other_life(cluster)
            model = model_over(cluster, restarted=True)
            model.load_state_dict(dict(saved))
            model.flush()
            assert not torch.equal(model.full_state_dict()[NAMES[0]], saved[NAMES[0]]), "it is where training goes on"
            model.attach()
            assert model.steps_done == 11 and model.session.step == 12, "no step after the 12th had begun"
            train(model, 20)
        ends[disturbed] = model.full_state_dict()
        until_whole(cluster)
        assert cluster.run.fatal is None and cluster.run.kills == (loses and disturbed)
    for name, table in ends[False].items():
        assert torch.equal(ends[True][name], table), name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("told", (False, True), ids=("", "told that values had been loaded"))
def test_a_script_that_loads_before_its_first_step_begins_anew(told):
    """What it loads is not in the logs any more: its next life is built, read and loaded as its first one was."""
    states = {}
    for lives in (1, 2):
        cluster = new_cluster()
        for life in range(1, lives + 1):
            if life == 2:
                assert min(slot.log.floor for slot in cluster.slots()) > cluster.load_end > 0
                other_life(cluster)
            model = model_over(cluster, restarted=told and life == 2)
            states[lives, life, "built"] = built = model.full_state_dict()
            assert not model.session.restarted and bool((built[NAMES[0]] == 7.5).all())
            for turn in range(6):
                model.load_state_dict({name: table * turn for name, table in built.items()})
            model.flush()
        model.attach()
        train(model, 6)
        states[lives, lives, "trained"] = model.full_state_dict()
    for life, when in ((1, "built"), (2, "built"), (2, "trained")):
        for name, table in states[1, 1, when].items():
            assert torch.equal(states[2, life, when][name], table), (life, when, name)


# random schedules ---------------------------------------------------------------------------------


def schedules(way, first, count):
    for seed in range(first, first + count):
        yield dataclasses.replace(
            WAYS[way],
            code=CODES[seed % len(CODES)],
            steps=2,
            loads=LOADS,
            network_seed=seed,
            random_kills=3,
            kill_probability=(0.01, 0.03, 0.05)[seed % 3],
        )


def run_schedules(way, first, count):
    kills, again = Counter(), 0
    for scenario in schedules(way, first, count):
        try:
            run = check(scenario)
        except Exception as error:
            raise AssertionError(f"{scenario}: {type(error).__name__}: {error}") from error
        kills[run.kills + run.trainer_kills + run.coordinator_kills] += 1
        again += run.loaded_again
    print(f"{count} schedules, kills {dict(kills)}, loaded again {again} times")
    assert sum(number * times for number, times in kills.items()) >= count
    return again


def test_random_kills():
    assert run_schedules("everybody, spares", 20, 20) >= 2


def test_hosts_go_back_in_different_eras():
    """One is told where to in the first era, another only in the second: until then it holds more than was applied."""
    run_schedules("everybody, survivors, in noise", 1149, 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("way", WAYS)
def test_more_random_kills(way):
    run_schedules(way, 1000, 300)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "kinds",
    [
        singly(*CRASHES),
        [(CRASH_COORDINATOR,), ("crash_sender", "crash_receiver")],
        singly(*NOISES),
        singly(*LATES),
    ],
    ids=["crashes", "coordinator and pairs", "noises", "lates"],
)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_fault_at_every_message_of_other_codes(code, kinds):
    sweep(dataclasses.replace(RETURNING, code=code, spares=3, loads=LOADS, network_seed=5), *kinds)


# mutations ----------------------------------------------------------------------------------------


def no_reset(patch):
    """A new life loads on top of what the one before has loaded."""
    patch.setattr(client_module.Client, "left_behind", lambda self: iter(()))


def no_delta(patch):
    """Records are overwritten, and nobody is told of the change."""
    load_ = apply.Applier.load_

    def silent(self, load):
        change = load_(self, load)
        return change and (change[0], [np.zeros_like(deltas_UB) for deltas_UB in change[1]])

    patch.setattr(apply.Applier, "load_", silent)


def not_waited_for(patch):
    """Training may begin before what was loaded is acknowledged."""
    patch.setattr(client_module.Client, "all_acknowledged", lambda self: True)


def no_word_for_all(patch):
    """A load speaks for trainer 0 only: logs grow until the others begin."""
    on_resumable = step_rule.StepRule.on_resumable
    patch.setattr(
        step_rule.StepRule,
        "on_resumable",
        lambda self, trainer, at: on_resumable(self, trainer, at) if trainer == 0 else None,
    )


def not_said_again(patch):
    """A new coordinator is not told that all is loaded."""
    on_control = client_module.Client.on_control

    def deaf(self, word):
        if not isinstance(word, messages.Rejoined):
            on_control(self, word)

    patch.setattr(client_module.Client, "on_control", deaf)


def dense_model_wanted(patch):
    """Also before training a dense snapshot is waited for, which nobody takes."""
    is_whole = snapshots.SnapshotStore.is_whole
    patch.setattr(snapshots.SnapshotStore, "is_whole", lambda self, at: bool(is_whole(self, at) and self.parts))


def loads_as_they_come(patch):
    """A load is applied although the one before has not come: what it overtakes counts for nothing."""

    def eager(self, request, reply):
        if request.step > self.rule.applied + 1:
            self.inbox.put(msgspec.structs.replace(request, step=self.rule.applied + 1))
        on_load(self, request, reply)

    on_load = slot_module.Slot._on_load
    patch.setattr(slot_module.Slot, "_on_load", eager)


TWO_LIVES = dict(steps=1, spares=2, loads=FEW, trainers_return=True)
MUTATIONS = {
    no_reset: hunt_at("Load", "crash_sender", **TWO_LIVES),
    no_delta: hunt_at("Load", "drop", **TWO_LIVES),
    not_waited_for: hunt_at("Load", "crash_receiver", **TWO_LIVES),
    no_word_for_all: hunt_at("Load", "drop", **{**TWO_LIVES, "loads": LOADS * 3}),
    not_said_again: hunt_at("Fold", CRASH_COORDINATOR, **TWO_LIVES),
    dense_model_wanted: hunt_at("Load", "crash_sender", **TWO_LIVES),
    loads_as_they_come: hunt_at("Load", "drop", **{**TWO_LIVES, "loads": (Load(0, 0, 9), Load(0, 5, 14))}),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate):
    found(mutate, MUTATIONS[mutate])
