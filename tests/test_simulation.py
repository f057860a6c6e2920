"""The protocol under faults, on the simulated cluster: crash points of short runs, random schedules, and mutations.

The oracle is the undisturbed run: every lookup, loss, record, optimizer state, dense value and last snapshot must be
bit-equal to it, and the verifiers of `torch_ecrec.testing` must not speak. A fault counts only if it fired; one that
may not (a trainer, a process that is dead, a loss beyond the contract) says so. Seeds are in the messages of failures.

Mutations: each rule of `docs/design.md` is taken out, and some schedule must notice. Not here:
- trainers' words of what is complete that are kept when they go back (`tests/test_step_rule.py` has that);
- a new host that does not know the incarnations of all others from birth: here whatever could do harm through that
  (Attach, Adopt, the next placement) teaches it first, and a server that is dead sends nothing.
"""

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch

from torch_ecrec.client import client as client_module
from torch_ecrec.durability import adoption, folding, holdings, rebuild, streams
from torch_ecrec.durability.parity import Parity
from torch_ecrec.layout import repair
from torch_ecrec.protocol import pieces, step_rule, wire
from torch_ecrec.records import delta_log, merge
from torch_ecrec.records.pages import HUGE_PAGE_BYTES, LEAST_BYTES
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.tensors import as_array
from torch_ecrec.server import apply, service, slot, snapshots
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec
from torch_ecrec.testing import Fault, Scenario, SimulatedCluster, SimulationResult, simulate
from torch_ecrec.transport.local import CRASH_COORDINATOR, CRASHES, FAULTS, LOSSES, Line
from torch_ecrec.transport.node import Node

TWO_ONE = CodeSpec(3, 2, 1)
THREE_TWO = CodeSpec(5, 3, 2)
OTHERS = ((2, 1, 1), (4, 1, 2), (4, 2, 1), (6, 2, 1), (7, 4, 3))  # slots, k, r
CODES = (TWO_ONE, THREE_TWO, *(CodeSpec(*numbers) for numbers in OTHERS))


@functools.cache
def undisturbed(
    code: CodeSpec, steps: int, trainers: int = 2, snapshot_every: int = 1, loads: tuple = ()
) -> SimulationResult:
    """The oracle. Computed before anything is taken out of the protocol."""
    run = simulate(Scenario(code=code, steps=steps, trainers=trainers, snapshot_every=snapshot_every, loads=loads))
    run.check_against(run)
    assert run.kills == 0
    return run


def check(scenario: Scenario, *faults: Fault) -> SimulationResult:
    run = simulate(scenario, faults)
    run.check_against(oracle(scenario))
    return run


def oracle(scenario: Scenario) -> SimulationResult:
    return undisturbed(scenario.code, scenario.steps, scenario.trainers, scenario.snapshot_every, loads=scenario.loads)


# the undisturbed run ------------------------------------------------------------------------------


def test_nothing_but_the_seed_decides_the_bits():
    """Neither slots, k, r, protection, spares nor the order of messages; so the oracle is one and the same."""
    first = undisturbed(TWO_ONE, 4)
    codes = [*CODES, CodeSpec(1, 1, 1, protection="none"), CodeSpec(3, 1, 1, protection="none")]
    for number, code in enumerate(codes):
        simulate(Scenario(code=code, network_seed=number)).check_against(first)
    other = simulate(Scenario(seed=1))
    assert other.losses != first.losses and not torch.equal(other.records[0], first.records[0])


def test_the_oracle_depends_on_every_lookup():
    """A record that differs in one bit after the first step changes the losses and the records that follow."""
    scenario = Scenario(steps=3)
    cluster = SimulatedCluster(scenario)
    while not cluster.run.lookups:
        cluster._run_trainers()
        cluster.network.clock.advance()
    cluster.slots()[0].shards[0].undo_(
        np.zeros(1, np.int64), np.eye(1, cluster.scenario.job.slabs[0].schema.nbytes, dtype=np.uint8)
    )
    cluster.verify = lambda: None  # it would notice first
    with pytest.raises(AssertionError, match=r"parity|differs"):
        cluster.go().check_against(undisturbed(TWO_ONE, 3))


# crash points -------------------------------------------------------------------------------------


SOME = 5  # in the everyday run, of the widest sweeps
WIDTHS = pytest.mark.parametrize(
    "every", [SOME, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["some", "all"]
)


def spread(messages, kinds, every: int):
    """Yields (number, kind): all with `every` 1, else one in `every`, and the first and last request of each class.

    So every kind of fault meets every class of request that `messages` has; the kinds take turns at what is between.
    """
    last = {name: number for number, (_, _, name) in enumerate(messages)}
    passed = Counter()
    for number, (_, _, name) in enumerate(messages):
        for turn, kind in enumerate(kinds):
            if (passed[name] + turn) % every == 0 or passed[name] == 0 or number == last[name]:
                yield number, kind
        passed[name] += 1


def sweep(scenario: Scenario, kinds=FAULTS, first=0, last=10**9, every=1):
    """A run for every request and kind, or for some (`spread`).

    Returns the run without faults, what became of each kind, and where it was: the request's numbers.
    """
    healthy = check(scenario)
    became = {kind: Counter() for kind in kinds}
    where = {kind: [] for kind in kinds}
    for number, kind in spread(healthy.messages[first : last + 1], kinds, every):
        number += first
        message = healthy.messages[number]
        where[kind].append(number)
        fault = Fault(kind, number)
        point = f"{kind} at request {number}, {message}"
        try:
            run = check(scenario, fault)
        except Exception as error:
            raise AssertionError(f"{point}: {type(error).__name__}: {error}") from error
        assert fault.fired != fault.skipped, f"{point}: never came to pass"
        kills = len(scenario.kills) + len(scenario.trainer_kills) + (fault.fired and kind in CRASHES)
        one_restart = len(scenario.trainer_kills) > 0  # for two trainers that die at one time
        assert kills - one_restart <= run.kills + run.trainer_kills <= kills, point
        # nobody is kept waiting until its time limit runs out, but by a message that was lost
        assert scenario.reborn or kind in ("drop", "lose_answer") or not run.overdue, (
            f"{point}: kept waiting: {[run.messages[i] for i in run.overdue]}"
        )
        became[kind]["fired" if fault.fired else "skipped"] += 1
    return healthy, became, where


def points(became) -> str:
    return f"{sum(sum(c.values()) for c in became.values())} points: " + "; ".join(
        f"{kind} {count['fired']} fired, {count['skipped']} not applicable" for kind, count in became.items()
    )


def test_every_fault_at_every_message_of_a_healthy_run():
    healthy, became, _ = sweep(Scenario(steps=3))
    print(points(became))
    messages = len(healthy.messages)
    assert messages >= 60 and {kind for _, _, kind in healthy.messages} == {"Lookup", "Push", "Fold", "Snapshot"}
    by_trainers = sum(sender.startswith("trainer") for sender, _, _ in healthy.messages)
    # exactly the crashes of a trainer do not apply
    assert became.pop("crash_sender") == {"fired": messages - by_trainers, "skipped": by_trainers}
    for count in became.values():
        assert count == {"fired": messages}


RECOVERIES = {
    "a spare takes the slot": Scenario(steps=2, kills=((0, 1),), spares=2),
    "a survivor takes the slot, then the restarted process": Scenario(steps=2, kills=((0, 1),), spares=0, reborn=True),
    "trainers may be lost as well": Scenario(steps=2, kills=((0, 1),), spares=2, trainers_return=True),
}


@WIDTHS
@pytest.mark.parametrize("name", RECOVERIES)
def test_every_fault_at_every_message_of_a_run_with_a_loss(name, every):
    """Crashes within the contract: not while the loss is being repaired; drops and duplicates at any time."""
    scenario = RECOVERIES[name]
    healthy, became, where = sweep(scenario, every=every)
    print(points(became))
    kinds = {kind for _, _, kind in healthy.messages}
    assert kinds >= {"Adopt", "Cut", "Attach", "Versions", "Fetch"}
    assert "FetchSnapshots" in kinds or scenario.spares == 0  # else the survivor asks itself
    assert every > 1 or all(len(numbers) == len(healthy.messages) for numbers in where.values())
    assert all({healthy.messages[number][2] for number in numbers} == kinds for numbers in where.values())
    for kind in LOSSES:
        assert became[kind] == {"fired": len(where[kind])}
    for kind in CRASHES:
        assert became[kind]["fired"] + became[kind]["skipped"] == len(where[kind])
    least = 8 if every == 1 else 2
    assert became["crash_receiver"]["fired"] >= least and became["crash_after"]["fired"] >= least


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trainers_return", [False, True])
def test_every_fault_while_snapshots_come_in_pieces(trainers_return, monkeypatch):
    """A snapshot of 8 bytes in answers of 3: a fault at each of them, and around them."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3)
    kills = ((0, 1),)
    scenario = Scenario(steps=3, kills=kills, spares=2, trainers_return=trainers_return)
    asked = [i for i, (_, _, kind) in enumerate(check(scenario).messages) if kind == "FetchSnapshots"]
    assert len(asked) >= 6
    healthy, became, _ = sweep(scenario, first=asked[0] - 3, last=asked[-1] + 3)
    print(points(became))
    assert sum(kind == "FetchSnapshots" for _, _, kind in healthy.messages) == len(asked)
    assert all(became[kind]["fired"] >= len(asked) for kind in LOSSES)


def test_a_trainer_dies_at_every_message_it_sends():
    """Torchrun starts all of them again; they go on after a step that all slots and a dense snapshot know."""
    healthy, became, _ = sweep(Scenario(steps=3, trainers_return=True), kinds=CRASHES)
    print(points(became))
    assert became["crash_sender"] == {"fired": len(healthy.messages)}
    dead, resumed = [f"trainer-{i}" for i in range(2)], Counter()
    for number, (sender, _, _) in enumerate(healthy.messages):
        if sender in dead:
            resumed.update(check(Scenario(steps=3, trainers_return=True), Fault("crash_sender", number)).resumed)
    print(f"went on after steps {dict(resumed)}")
    assert {0, 1, 2} <= resumed.keys()


@WIDTHS
@pytest.mark.parametrize("snapshot_every", (1, 2))
def test_every_fault_at_every_message_after_trainers_were_lost(snapshot_every, every):
    """A server, or another trainer, dies while the servers go back; messages get lost, come late or twice."""
    scenario = Scenario(steps=4, spares=2, trainer_kills=((0, 3),), trainers_return=True, snapshot_every=snapshot_every)
    healthy = check(scenario)
    assert healthy.resumed == [3 // snapshot_every * snapshot_every]
    first = next(i for i, m in enumerate(healthy.messages) if m[2] == "Attach")
    last = next(i for i, m in enumerate(healthy.messages) if i > first and m[2] == "Lookup")
    _, became, _ = sweep(scenario, first=max(0, first - 10), last=last, every=every)
    print(points(became))
    assert all(count["fired"] >= (10 if every == 1 else 2) for count in became.values())


class SlowLine(Line):
    """From the coordinator to a member that is slow to read."""

    more_s = 0.0

    def carry(self, action):
        super().carry(lambda: self._clock.later(self.more_s, action))


def dies_first(lost: int):
    """A server dies that has gone back when the others have not yet; yields a text and a function that runs it."""
    scenario = Scenario(steps=4, spares=2, trainer_kills=((0, 3),), trainers_return=True, snapshot_every=2)
    first = next(i for i, m in enumerate(check(scenario).messages) if m[2] == "Attach")

    def run(more_s, number):
        fault = Fault("crash_sender", number)
        cluster = SimulatedCluster(scenario, [fault])
        slow, welcome = {f"server-{other}" for other in {0, 1, 2} - {lost}}, cluster.on_welcome

        def on_welcome(process):
            if process.name in slow:
                line = process.connection._to = SlowLine(cluster.network.clock, f"slow {process.name}")
                line.more_s = more_s
            welcome(process)

        cluster.on_welcome = on_welcome
        cluster.go().check_against(oracle(scenario))
        return fault.fired

    for more_s in (0.008, 0.012, 0.016):
        for number in range(first, first + 10):
            yield f"request {number}, {more_s} s", functools.partial(run, more_s, number)


@pytest.mark.parametrize("lost", range(3))
def test_a_server_dies_that_has_gone_back_when_the_others_have_not_yet(lost):
    """Its new host asks what they have folded: what they say before they go back counts for nothing after it."""
    fired = 0
    for text, run in dies_first(lost):
        try:
            fired += run()
        except Exception as error:
            raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error
    assert fired >= 10


def test_a_cut_made_of_what_was_said_before_and_after_going_back_is_found(monkeypatch):
    handle, freeze = service.Host._handle, Parity.freeze

    def any_time(self, request, reply):
        if isinstance(request, (wire.Adopt, wire.Cut)):
            request.era, request.frozen = self.era, self.frozen
        handle(self, request, reply)

    def go_on(self):
        adopt, self.adopt = self.adopt, lambda: None
        freeze(self)
        self.adopt = adopt

    runs = [run for lost in (2, 1, 0) for run in dies_first(lost)]
    monkeypatch.setattr(service.Host, "_handle", any_time)
    monkeypatch.setattr(Parity, "freeze", go_on)
    for text, run in runs:
        try:
            run()
        except Exception as error:  # whatever it breaks
            print(f"{text}: {type(error).__name__}: {str(error)[:100]}")
            return
    pytest.fail("no run notices that the rule is gone")


COORDINATOR = {
    "a healthy run": Scenario(steps=3),
    "a loss": Scenario(steps=2, kills=((0, 1),), spares=2),
    "lost trainers": Scenario(steps=3, trainer_kills=((0, 2),), trainers_return=True),
}


@pytest.mark.parametrize("name", COORDINATOR)
def test_the_coordinator_dies_at_every_message(name):
    """Another one comes, which knows nothing; members tell it. Without a loss nobody goes back; nobody is fenced."""
    scenario = COORDINATOR[name]
    healthy = check(scenario)
    for number, message in enumerate(healthy.messages):
        try:
            run = check(scenario, Fault(CRASH_COORDINATOR, number))
        except Exception as error:
            raise AssertionError(f"request {number}, {message}: {type(error).__name__}: {error}") from error
        assert run.coordinator_kills == 1 and run.fenced == 0, (number, message)
        assert run.resumed or not scenario.trainer_kills
        assert not run.resumed or scenario.trainer_kills, "nobody was lost"


TWICE = Scenario(code=THREE_TWO, steps=2, spares=3, kills=((1, 1),))


@WIDTHS
def test_a_second_loss_at_every_message_of_a_recovery(every):
    """(3, 2): while the first lost slot is repaired, any other server may die, the new host included."""
    first = next(i for i, m in enumerate(check(TWICE).messages) if m[2] == "Adopt")
    healthy, became, where = sweep(TWICE, kinds=("crash_sender", "crash_receiver"), first=first, every=every)
    print(points(became))
    assert every > 1 or all(len(numbers) == len(healthy.messages) - first for numbers in where.values())
    by_servers = sum(healthy.messages[number][0].startswith("server") for number in where["crash_sender"])
    assert became["crash_sender"]["fired"] == by_servers >= (40 if every == 1 else 8)
    lost = next(event["member"] for event in healthy.events if event["event"] == "lost")
    # by who has not heard of it
    to_the_dead = sum(healthy.messages[number][1] == lost for number in where["crash_receiver"])
    assert became["crash_receiver"] == Counter(fired=len(where["crash_receiver"]) - to_the_dead, skipped=to_the_dead)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("slot_lost", (0, 1))
def test_every_fault_at_every_message_of_other_codes(code, slot_lost):
    _, became, _ = sweep(Scenario(code=code, steps=3, spares=3, kills=((slot_lost, 1),), network_seed=7))
    print(points(became))


# the limit of the rebuild ---------------------------------------------------------------------------


def test_a_rebuild_reads_no_faster_than_its_limit_and_delays_nobody():
    seconds = {}
    for rate in (0.0, 400.0):
        cluster = SimulatedCluster(Scenario(kills=((0, 1),), spares=2))
        cluster.settings = dataclasses.replace(cluster.settings, rebuild_bytes_per_s=rate)
        run = cluster.go()
        run.check_against(undisturbed(TWO_ONE, 4))
        assert run.kills == 1 and not run.overdue
        seconds[rate] = run.seconds
    lost = sum(shard.data_bytes + shard.parity_bytes for shard in cluster.slots()[0].shards)
    unpaid = rebuild.PORTIONS_AT_ONCE * cluster.settings.rebuild_chunk_bytes
    assert seconds[0.0] < 0.5 < TWO_ONE.k * (lost - unpaid) / 400.0 < seconds[400.0] < 10.0, seconds


def test_the_memory_of_a_new_host_is_merged_as_the_background_fills_it(monkeypatch):
    healthy = undisturbed(TWO_ONE, 4)
    made, merged = [], Counter()

    class Spied(Shard):
        def __init__(self, *sizes, scattered):
            super().__init__(*sizes, scattered)
            made.append(scattered)

        def merge_pages(self, begin, end, parity):
            assert 0 <= begin < end <= (self.parity_rows if parity else self.data_rows)
            merged[id(self), parity] += end - begin

    monkeypatch.setattr(holdings, "Shard", Spied)
    cluster = SimulatedCluster(Scenario(kills=((0, 1),), spares=1))
    run = cluster.go()
    run.check_against(healthy)
    mine = cluster.slots()[0].shards
    assert run.kills == 1 and Counter(made) == {False: 3 * len(mine), True: len(mine)}
    assert {key for key, _ in merged} == {id(shard) for shard in mine}
    for shard in mine:
        assert 0 < merged[id(shard), False] <= shard.data_rows and 0 < merged[id(shard), True] <= shard.parity_rows


def test_memory_that_has_pages_of_its_own_is_rebuilt_exactly():
    """Records and parities of more than a few MB, first written here and there by the steps, then by the background."""
    table = TableSpec("a", rows=200_000, dim=32, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1))
    healthy = Scenario(tables=(table,), trainers=1, steps=3, rebuild_chunk_bytes=1 << 20, verify_every=10_000)
    cluster = SimulatedCluster(dataclasses.replace(healthy, kills=((0, 1),)))
    run = cluster.go()
    run.check_against(simulate(healthy))
    (shard,) = cluster.slots()[0].shards
    assert run.kills == 1 and min(shard.data_bytes, shard.parity_bytes) >= LEAST_BYTES
    assert not any(memory._small.any() for memory in shard._memories)
    assert not HUGE_PAGE_BYTES or all(len(memory._small) for memory in shard._memories)


# losses at the limit and beyond -------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(0, 1), (2, 4), (3, 0)])
def test_two_lost_together(pair):
    kills = tuple((slot_lost, 2) for slot_lost in pair)
    for spares, reborn in ((2, False), (0, False), (0, True)):
        run = check(Scenario(code=THREE_TWO, kills=kills, spares=spares, reborn=reborn, settle_first=False))
        assert run.kills == 2


def test_three_lost_one_after_another_on_one_spare_each():
    run = check(Scenario(kills=((0, 1), (1, 2), (0, 3)), spares=3))
    assert run.kills == 3
    events = [event["event"] for event in run.events]
    assert events.count("lost") == events.count("re-placed") == events.count("slot rebuilt") == 3


def test_far_slots_lost_together():
    """Slots 0 and 3 of six are in no stripe together when n is 3: r = 1 repairs both at once."""
    run = check(Scenario(code=CodeSpec(6, 2, 1), kills=((0, 2), (3, 2)), spares=2, settle_first=False))
    assert run.kills == 2


def test_beyond_the_code_it_stops_and_says_what_is_lost():
    run = simulate(Scenario(kills=((0, 2), (1, 2)), settle_first=False))
    assert run.fatal is not None
    for words in ("slots [0, 1] are lost together", "(k, r) = (2, 1)", "rows of 3 tables (a, b, c)", "restore"):
        assert words in run.fatal
    with pytest.raises(AssertionError, match="stopped"):
        run.check_against(undisturbed(TWO_ONE, 4))
    run = simulate(Scenario(code=CodeSpec(3, 2, 1, protection="none"), kills=((1, 2),), settle_first=False))
    assert run.fatal is not None and "no protection" in run.fatal


# random schedules ---------------------------------------------------------------------------------

SCHEDULES = 10  # of each kind below: every code and probability
WAYS = {
    "spares": Scenario(spares=3),
    "survivors": Scenario(spares=0),
    "survivors, then the restarted process": Scenario(spares=0, reborn=True),
    "wait for the restarted process": Scenario(spares=0, reborn=True, without_spare="wait"),
    "spares, in noise": Scenario(spares=3, noise=0.03),
    "restarted processes, in noise": Scenario(spares=1, reborn=True, noise=0.03),
    "trainers as well": Scenario(spares=3, random_trainer_kills=3, trainers_return=True),
    "trainers as well, snapshots now and then": Scenario(
        spares=3, random_trainer_kills=3, trainers_return=True, snapshot_every=3
    ),
    "everybody, survivors, in noise": Scenario(
        spares=0, reborn=True, random_trainer_kills=3, trainers_return=True, noise=0.03, random_coordinator_kills=2
    ),
    "everybody, spares": Scenario(spares=3, random_trainer_kills=2, trainers_return=True, random_coordinator_kills=2),
}


def schedules(way: str, first: int, count: int):
    for seed in range(first, first + count):
        yield dataclasses.replace(
            WAYS[way],
            code=CODES[seed % len(CODES)],
            steps=6,
            network_seed=seed,
            random_kills=3,
            kill_probability=(0.005, 0.02, 0.05)[seed % 3],
        )


def run_schedules(way: str, first: int, count: int) -> None:
    kills, longest = Counter(), {}
    for scenario in schedules(way, first, count):
        try:
            run = check(scenario)
        except Exception as error:
            raise AssertionError(f"{scenario}: {type(error).__name__}: {error}") from error
        assert scenario.reborn or scenario.noise or run.coordinator_kills or not run.overdue, (
            f"{scenario}: kept waiting: {[run.messages[i] for i in run.overdue]}"
        )
        kills[run.kills + run.trainer_kills + run.coordinator_kills] += 1
        longest = {what: max(steps, longest.get(what, 0)) for what, steps in run.longest.items()}
    total = sum(number * times for number, times in kills.items())
    print(f"{count} schedules, {total} kills ({dict(kills)}), kept at most for so many steps: {longest}")
    assert total >= count, "too tame: fewer than one kill per schedule"


@pytest.mark.parametrize("way", WAYS)
def test_random_kills(way):
    run_schedules(way, 0, SCHEDULES)


def test_kills_with_a_bfloat16_wire_are_exact_too():
    scenario = Scenario(wire="bfloat16", steps=6, spares=2)
    undisturbed, full = simulate(scenario), simulate(dataclasses.replace(scenario, wire="float32"))
    assert not torch.equal(undisturbed.records[0], full.records[0]), "nothing was rounded"
    run = simulate(dataclasses.replace(scenario, kills=((1, 2), (0, 4)), noise=0.05))
    assert run.kills == 2
    run.check_against(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_more_random_kills(way):
    run_schedules(way, SCHEDULES, 10)
    run_schedules(way, 1000, 300)


# mutations ----------------------------------------------------------------------------------------

NOISY = dict(steps=6, spares=3, random_kills=3, kill_probability=0.03, noise=0.05)


def hunt(count: int = 100, **kinds):
    """Random schedules to find a mutation with."""
    for seed in range(count):
        yield Scenario(network_seed=seed, **{**NOISY, **kinds}), ()


def hunt_at(name: str, *kinds: str, to: str = "", seeds: int = 20, **scenario):
    """Schedules with faults at every request of a class, or at those to one server."""
    for seed in range(seeds):
        seeded = Scenario(network_seed=seed, **scenario)
        for number, (_, receiver, sent) in enumerate(check(seeded).messages):
            if sent == name and to in ("", receiver):
                yield seeded, tuple(Fault(kind, number) for kind in kinds)


def found(mutate, schedules) -> int:
    """How many runs it takes until one notices the mutation; the same schedule must pass without."""
    for number, (scenario, faults) in enumerate(schedules, 1):
        oracle(scenario)
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                check(scenario, *(dataclasses.replace(fault) for fault in faults))
            except Exception as error:  # whatever it breaks: a verifier, the comparison, or the code itself
                noticed = f"{type(error).__name__}: {str(error)[:150]}"
            else:
                continue
        check(scenario, *faults)
        print(f"found in run {number}, network seed {scenario.network_seed}: {noticed}")
        return number
    pytest.fail("no run notices that the rule is gone")


def no_undo(patch):
    patch.setattr(folding.Folds, "undo_after", lambda self, source, cut: None)


def early_ack(patch):
    patch.setattr(step_rule.StepRule, "settled", property(lambda self: self.applied))


def no_fence(patch):
    patch.setattr(step_rule.StepRule, "is_current", lambda self, index, incarnation: True)


class Newest(dict):
    """A version vector whose data members are to be read as they are now."""


def newest(patch, parity: bool):
    version_vector, on_fetch = repair.version_vector, Parity.on_fetch

    def vector(plan, folded_by):
        steps = version_vector(plan, folded_by)
        repairs_parity = plan.member not in plan.reads and plan.member >= len(plan.sources)
        return Newest(steps) if steps is not None and repairs_parity == parity else steps

    def fetch(self, request, reply):
        if isinstance(request.as_of, Newest) and not request.parity:
            request.as_of = {self.held.index: self.held.rule.applied}
        on_fetch(self, request, reply)

    patch.setattr(rebuild.repair, "version_vector", vector)
    patch.setattr(Parity, "on_fetch", fetch)


def encode_newest(patch):
    newest(patch, parity=True)


def decode_newest(patch):
    newest(patch, parity=False)


def no_roll_forward(patch):
    """A parity is installed as of the steps it was read as of, though its holder has folded more since."""
    patch.setattr(rebuild._Repair, "_roll_forward", lambda self: [])


def stale_confirmation(patch):
    """Confirmations of replaced incarnations count: neither the rule nor the stream turns them away."""

    def on_confirmed(self, holder, incarnation, at):
        self.confirmed[holder] = max(self.confirmed[holder], at)

    def stop(self):
        self.attached = False
        self.under_way, self.attaching = {}, None

    def ask(self, index, make, done, *, bound_to=None, lost=None):
        return node_ask(self, index, make, done)

    node_ask = Node.ask
    patch.setattr(step_rule.StepRule, "on_confirmed", on_confirmed)
    patch.setattr(streams.FoldStream, "stop", stop)
    patch.setattr(Node, "ask", ask)


def snapshots_not_copied(patch):
    patch.setattr(snapshots.SnapshotStore, "copy_all", lambda self: None)


def snapshots_from_an_empty_holder(patch):
    """A new holder hands over its snapshots before it has got them itself."""
    on_fetch = snapshots.SnapshotStore.on_fetch

    def fetch(self, request, reply):
        lacks, self.lacks_all = self.lacks_all, False
        on_fetch(self, request, reply)
        self.lacks_all = lacks

    patch.setattr(snapshots.SnapshotStore, "on_fetch", fetch)


def fold_twice(patch):
    on_fold = folding.Folds.on_fold

    def fold(self, request, reply):
        rule = self.held.rule
        verdict = rule.judge_fold(request.source, request.source_incarnation, request.step)
        if verdict is step_rule.FoldVerdict.DUPLICATE:
            self._fold_in(request.source, [p.numpy() for p in request.positions], [d.numpy() for d in request.deltas])
        on_fold(self, request, reply)

    patch.setattr(folding.Folds, "on_fold", fold)


def fold_unordered(patch):
    """A fold that comes before its turn is folded at once, and the one it overtook is taken for a duplicate."""
    judge = step_rule.StepRule.judge_fold

    def eager(self, source, incarnation, at):
        verdict = judge(self, source, incarnation, at)
        if verdict is step_rule.FoldVerdict.EARLY:
            self.folded[source] = at - 1
            return step_rule.FoldVerdict.NEXT
        return verdict

    patch.setattr(step_rule.StepRule, "judge_fold", eager)
    patch.setattr(delta_log.DeltaLog, "append", lambda self, at, positions, deltas: None)


def merge_as_they_come(patch):
    def merged(self, got):
        return [
            merge.merge([(push.positions[s].numpy(), as_array(push.gradients[s])) for push in got.values()])
            for s in range(len(self.held.shards))
        ]

    patch.setattr(apply.Applier, "_merge", merged)


def no_window(patch):
    patch.setattr(client_module.Client, "may_push", lambda self: True)


def forget_everything(patch):
    """The log ends at what is applied: nobody can be shown, or take back, an earlier step."""
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: self.applied)


def forget_nothing(patch):
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: 0)


def cut_again(patch):
    """A late copy of a cut is obeyed, although the new host has sent folds since."""
    on_cut = folding.Folds.on_cut

    def cut(self, request, reply):
        self.attached = {}
        on_cut(self, request, reply)

    patch.setattr(folding.Folds, "on_cut", cut)


def not_caught_up_counts(patch):
    """The cut is the minimum over all holders, also those that lack what was acknowledged before they came."""

    def choose(reports):
        return min((folded for folded, _ in reports if folded is not None), default=None)

    patch.setattr(adoption, "choose_cut", choose)


def rebuilt_too_early(patch):
    """A new holder calls itself rebuilt before it has caught up."""
    patch.setattr(step_rule.StepRule, "is_caught_up", lambda self, source: True)


def acknowledged_again(patch):
    """A push of a step acknowledged by an earlier incarnation waits to be applied again."""

    def is_acknowledged(self, at):
        return getattr(self, "cut", 0) < at <= self.acknowledged

    patch.setattr(step_rule.StepRule, "is_acknowledged", is_acknowledged)
    become_ready = slot.Slot.become_ready

    def ready(self, cut, floor, log):
        self.rule.cut = cut
        become_ready(self, cut, floor, log)

    patch.setattr(slot.Slot, "become_ready", ready)


def void_stores_count(patch):
    """A snapshot that a lost holder had stored counts for its new host, although that copied another's before."""
    patch.setattr(slot.Slot, "known_incarnations", lambda self: [])


# lost trainers


def no_era(patch):
    """Messages from before the trainers were lost count."""
    handle = service.Host._handle

    def any_era(self, request, reply):
        request.era = self.era
        handle(self, request, reply)

    patch.setattr(service.Host, "_handle", any_era)


def no_freeze(patch):
    """Servers go on until they know the step that they go back to."""
    patch.setattr(slot.Slot, "freeze", lambda self: self.report_reach())
    patch.setattr(service, "TRAINERS_ONLY", ())


def records_not_undone(patch):
    go_back = slot.Slot.go_back

    def keep(self, to):
        every = [np.arange(shard.data_rows) for shard in self.shards]
        held = [shard.gather(rows) for shard, rows in zip(self.shards, every, strict=True)]
        go_back(self, to)
        for shard, rows, before in zip(self.shards, every, held, strict=True):
            shard.scatter_(rows, before)

    patch.setattr(slot.Slot, "go_back", keep)


def parities_not_undone(patch):
    patch.setattr(folding.Folds, "undo_all_after", lambda self, to: None)


def not_made_durable(patch):
    """Trainers start before the step that they start after is folded everywhere and its snapshot is on all holders."""

    def check_durable(self):
        if self.going_back_to is not None:
            self.going_back_to = None
            message = {"type": "durable", "era": self.host.era, "slot": self.index, "incarnation": self.incarnation}
            self.host.tell(message)

    patch.setattr(slot.Slot, "check_durable", check_durable)
    patch.setattr(snapshots.SnapshotStore, "_copy", lambda self: None)


def short_log(patch):
    """The log reaches back to what is settled, although the trainers may have to start before that."""
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: self.settled)


def start_at_settled(patch):
    """A new holder gets the steps that are not settled, rather than all that may be undone."""
    on_attach = folding.Folds.on_attach

    def attach(self, request, reply):
        request.base = max(request.base, request.acknowledged)
        on_attach(self, request, reply)

    patch.setattr(folding.Folds, "on_attach", attach)


LOSING = dict(random_trainer_kills=3, trainers_return=True, steps=8, kill_probability=0.01)

MUTATIONS = {
    no_undo: hunt(),
    early_ack: hunt(),
    no_fence: hunt_at("Fold", "late", "crash_sender", verify_every=1),
    encode_newest: hunt(),
    decode_newest: hunt(),
    no_roll_forward: hunt(),
    stale_confirmation: hunt_at("Fold", "late_answer", "crash_after", verify_every=1),
    snapshots_not_copied: hunt(),
    snapshots_from_an_empty_holder: hunt(
        code=CodeSpec(4, 1, 2), kills=((0, 2), (1, 2)), settle_first=False, random_kills=0, noise=0.0
    ),
    fold_twice: hunt(),
    fold_unordered: hunt(),
    merge_as_they_come: hunt(trainers=3),
    no_window: hunt(),
    forget_everything: hunt(),
    forget_nothing: hunt(steps=12),
    cut_again: hunt_at("Cut", "duplicate", kills=((0, 1),)),
    not_caught_up_counts: hunt_at(
        "Fold", "late", "crash_sender", to="server-5", code=THREE_TWO, spares=3, steps=5, kills=((1, 3),)
    ),
    rebuilt_too_early: hunt_at("Fold", "drop", to="server-3", steps=5, kills=((1, 3),), rebuild_chunk_bytes=1 << 20),
    acknowledged_again: hunt(),
    void_stores_count: hunt_at("Snapshot", "late", kills=((0, 1), (0, 3)), steps=5, verify_every=1),
    no_era: hunt(**LOSING, late=0.3),
    no_freeze: hunt(200, **LOSING, late=0.2),
    records_not_undone: hunt(**LOSING),
    parities_not_undone: hunt(**LOSING),
    not_made_durable: hunt(**LOSING),
    short_log: hunt(**LOSING),
    start_at_settled: hunt(**LOSING),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate):
    found(mutate, MUTATIONS[mutate])
