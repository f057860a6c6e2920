"""The protocol under faults, on the simulated cluster: every fault at every message of short runs.

The oracle is the undisturbed run: every lookup, loss, record, optimizer state, dense value and last snapshot must be
bit-equal to it, and the verifiers of `tests/harness` must not speak. A fault counts only if it fired; one that
may not (a trainer, a process that is dead, a loss beyond the contract) says so. Seeds are in the messages of failures.

Random schedules are in `test_random_kills.py`, rules taken out in `test_mutations.py`.
"""

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from faults import CODES, IN_TURNS, THREE_TWO, TWO_ONE, WIDTHS, check, oracle, points, spread, sweep, undisturbed
from harness import Fault, Scenario, SimulatedCluster, half_tables, simulate, small_tables
from harness.network import CRASH_COORDINATOR, CRASHES, LATES, LOSSES, NOISES, Line
from thinned import in_turns

from torch_ecrec.durability import holdings, rebuild
from torch_ecrec.durability.parity import Parity
from torch_ecrec.protocol import pieces, wire
from torch_ecrec.records.pages import HUGE_PAGE_BYTES, LEAST_BYTES
from torch_ecrec.records.shard import Shard
from torch_ecrec.server import service
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

# the undisturbed run ------------------------------------------------------------------------------


@pytest.mark.smoke
def test_nothing_but_the_seed_decides_the_bits():
    """Neither slots, k, r, protection, spares nor the order of messages; so the oracle is one and the same.

    But for bags that several slots pool, whose sums are added slot by slot.
    """
    first = simulate(Scenario(pooled=False))
    assert first.asked_ahead == 4, "of the 6 pushes of two trainers that others follow"
    codes = [*CODES, CodeSpec(1, 1, 1, protection="none"), CodeSpec(3, 1, 1, protection="none")]
    for number, code in enumerate(codes):
        simulate(Scenario(code=code, network_seed=number, pooled=False)).check_against(first)
    other = simulate(Scenario(seed=1, pooled=False))
    assert other.losses != first.losses and not torch.equal(other.records[0], first.records[0])


def test_the_oracle_depends_on_every_lookup():
    """A record that differs in one bit after the first step changes the losses and the records that follow."""
    scenario = Scenario(steps=3)
    cluster = SimulatedCluster(scenario)
    while not cluster.run.lookups:
        cluster._run_trainers()
        cluster.network.clock.advance()
    cluster.slots()[0].shards[0].undo_(
        np.zeros(1, np.int64), np.eye(1, cluster.scenario.job.table_groups[0].schema.nbytes, dtype=np.uint8)
    )
    cluster.verify = lambda: None  # it would notice first
    with pytest.raises(AssertionError, match=r"parity|differs"):
        cluster.go().check_against(undisturbed(TWO_ONE, 3))


@IN_TURNS
def test_every_fault_at_every_message_of_a_healthy_run(every):
    healthy, became, where = sweep(Scenario(steps=3), every=every)
    print(points(became))
    assert len(healthy.messages) >= 50
    kinds = {"Lookup", "Push", "Fold", "Snapshot", "WhenAcknowledged"}
    assert {kind for _, _, kind in healthy.messages} == kinds
    assert every > 1 or all(len(numbers) == len(healthy.messages) for numbers in where.values())
    by_trainers = sum(healthy.messages[number][0].startswith("trainer") for number in where["crash_sender"])
    # exactly the crashes of a trainer do not apply
    fired = len(where["crash_sender"]) - by_trainers
    assert became.pop("crash_sender") == {"fired": fired, "skipped": by_trainers} and fired
    for kind, count in became.items():
        assert count == {"fired": len(where[kind])}


RECOVERIES = {
    "a spare takes the slot": Scenario(steps=2, kills=((0, 1),), spares=2),
    "a survivor takes the slot, then the restarted process": Scenario(steps=2, kills=((0, 1),), spares=0, reborn=True),
    "trainers may be lost as well": Scenario(steps=2, kills=((0, 1),), spares=2, trainers_return=True),
    "tables of three dtypes, trainers may be lost as well": Scenario(
        tables=half_tables(), steps=2, kills=((0, 1),), spares=2, trainers_return=True
    ),
}


WHOLLY = ("trainers may be lost as well",)  # the others are its variants


@WIDTHS
@pytest.mark.parametrize("name", RECOVERIES)
def test_every_fault_at_every_message_of_a_run_with_a_loss(name, every):
    """Crashes within the contract: not while the loss is being repaired; drops and duplicates at any time."""
    scenario = RECOVERIES[name]
    healthy, became, where = sweep(scenario, every=every, ends="both" if name in WHOLLY else "either")
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
    least = 8 if every == 1 else 2 if name in WHOLLY else 1
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


@IN_TURNS
def test_a_trainer_dies_at_every_message_it_sends(every):
    """Torchrun starts all of them again; they go on after a step that all slots and a dense snapshot know."""
    healthy, became, where = sweep(Scenario(steps=3, trainers_return=True), kinds=CRASHES, every=every)
    print(points(became))
    assert became["crash_sender"] == {"fired": len(where["crash_sender"])}
    sent = [number for number, (sender, _, _) in enumerate(healthy.messages) if sender in ("trainer-0", "trainer-1")]
    resumed = Counter()
    for number in sent[:: min(every, 3)]:
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


def dies_first(lost: int, every: int = 1):
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
        for number in range(first, first + 10, every):
            yield f"request {number}, {more_s} s", functools.partial(run, more_s, number)


@in_turns("every", 2)
@pytest.mark.parametrize("lost", range(3))
def test_a_server_dies_that_has_gone_back_when_the_others_have_not_yet(lost, every):
    """Its new host asks what they have folded: what they say before they go back counts for nothing after it."""
    fired = 0
    for text, run in dies_first(lost, every):
        try:
            fired += run()
        except Exception as error:
            raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error
    assert fired >= 10 // every


def test_a_cut_made_of_what_was_said_before_and_after_going_back_is_found(monkeypatch):
    handle, stop = service.Host._handle, Parity.stop

    def any_time(self, request, reply):
        if isinstance(request, (wire.Adopt, wire.Cut)):
            request.era, request.frozen = self.era, self.frozen
        handle(self, request, reply)

    def go_on(self):
        adopt, self.adopt = self.adopt, lambda: None
        stop(self)
        self.adopt = adopt

    runs = [run for lost in (2, 1, 0) for run in dies_first(lost)]
    monkeypatch.setattr(service.Host, "_handle", any_time)
    monkeypatch.setattr(Parity, "stop", go_on)
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


@IN_TURNS
@pytest.mark.parametrize("name", COORDINATOR)
def test_the_coordinator_dies_at_every_message(name, every):
    """Another one comes, which knows nothing; members tell it. Without a loss nobody goes back; nobody is fenced."""
    scenario = COORDINATOR[name]
    healthy = check(scenario)
    for number, _ in spread(healthy.messages, (CRASH_COORDINATOR,), min(every, 7)):
        message = healthy.messages[number]
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
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kinds", [CRASHES, NOISES, LATES], ids=["crashes", "noises", "lates"])
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("slot_lost", (0, 1))
def test_every_fault_at_every_message_of_other_codes(code, slot_lost, kinds):
    _, became, _ = sweep(Scenario(code=code, steps=3, spares=3, kills=((slot_lost, 1),), network_seed=7), kinds)
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


def test_holders_are_asked_seldom_what_they_have_folded():
    """What one has said serves for all repairs of that step and the next."""
    run = check(Scenario(kills=((0, 1),), spares=2))
    kinds = Counter(message[2] for message in run.messages)
    assert run.kills == 1 and 0 < kinds["Versions"] < kinds["Fetch"] / TWO_ONE.k, kinds


@pytest.mark.parametrize("scope", ["of its history", "of any"])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_an_old_answer_of_a_holder_costs_a_new_attempt_and_nothing_else(scope, seed, monkeypatch):
    """Here the first one serves for ever, while holders are lost themselves, and steps are taken back."""
    given, behind = {}, Counter()

    def folded_by(self, holder):
        history = self.host.history if scope == "of its history" else None
        answer = self._folded.get(holder)
        first = answer and given.setdefault((id(self), holder, history), answer)
        behind[self.held.rule.applied - first[1] if first else 0] += 1
        return first and first[2]

    healthy = Scenario(
        code=THREE_TWO if seed % 2 else TWO_ONE,
        tables=tuple(dataclasses.replace(table, rows=600) for table in small_tables()),
        touch=0.02,
        steps=24,
        tier_frames=0,
    )
    disturbed = dataclasses.replace(
        healthy,
        spares=2,
        reborn=True,
        trainers_return=True,
        rebuild_chunk_bytes=400,
        rebuild_bytes_per_s=40_000.0,
        random_kills=3,
        random_trainer_kills=seed % 3,
        network_seed=seed,
        noise=0.02,
    )
    expected = simulate(healthy)
    monkeypatch.setattr(rebuild.Rebuild, "folded_by", folded_by)
    run = simulate(disturbed)
    run.check_against(expected)
    assert run.kills and max(behind) > 1, "some were of more than a step before"


class Kept:
    """A stand-in for `ReadyMemory`: what it was asked to have ready is, at once."""

    def __init__(self):
        self.sizes, self.taken = (), []

    def prepare(self, sizes):
        self.sizes = tuple(sizes)

    def take(self, size):
        assert any(size <= one for one in self.sizes), (size, self.sizes)
        self.taken.append(size)
        return np.zeros(size, np.uint8)


def test_a_spare_has_memory_ready_for_any_slot_as_long_as_it_has_none():
    kept = {}

    class Cluster(SimulatedCluster):
        def on_welcome(self, process):
            super().on_welcome(process)
            if process.role == "server":
                kept[process.name] = self.hosts[process.name].ready_memory = Kept()

    cluster = Cluster(Scenario(kills=((0, 1),), spares=2, tier_frames=0))
    run = cluster.go()
    run.check_against(undisturbed(TWO_ONE, 4))
    lost = cluster.slots()[0]
    wanted = [size for shard in lost.shards for size in (shard.data_bytes, shard.parity_bytes)]
    by_taken = sorted((one.taken, one.sizes) for one in kept.values())
    assert run.kills == 1 and [taken for taken, _ in by_taken] == [[], [], [], [], wanted]
    spares = [sizes for taken, sizes in by_taken if sizes]
    assert len(spares) == 1 and all(ready >= size for ready, size in zip(spares[0], wanted, strict=True))


def test_the_memory_of_a_new_host_is_merged_as_the_background_fills_it(monkeypatch):
    healthy = undisturbed(TWO_ONE, 4)
    made, merged = [], Counter()

    class Spied(Shard):
        def __init__(self, schema, data_rows, parity_rows, scattered, sealed, stores):
            super().__init__(schema, data_rows, parity_rows, scattered, sealed, stores)
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
    healthy = Scenario(
        tables=(table,), trainers=1, steps=3, rebuild_chunk_bytes=1 << 20, verify_every=10_000, tier_frames=0
    )
    cluster = SimulatedCluster(dataclasses.replace(healthy, kills=((0, 1),)))
    run = cluster.go()
    run.check_against(simulate(healthy))
    (shard,) = cluster.slots()[0].shards
    assert run.kills == 1 and min(shard.data_bytes, shard.parity_bytes) >= LEAST_BYTES
    memories = [store.memory for store in shard._stores]
    assert not any(memory._small.any() for memory in memories)
    assert not HUGE_PAGE_BYTES or all(len(memory._small) for memory in memories)


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
    for words in (
        "slots [0, 1] are lost together",
        "(k, r) = (2, 1)",
        "rows of 3 tables (a, b, c)",
        "no checkpoints are kept",
    ):
        assert words in run.fatal
    with pytest.raises(AssertionError, match="stopped"):
        run.check_against(undisturbed(TWO_ONE, 4))
    run = simulate(Scenario(code=CodeSpec(3, 2, 1, protection="none"), kills=((1, 2),), settle_first=False))
    assert run.fatal is not None and "no protection" in run.fatal


def rebuilt_after(refused_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds until a lost slot is rebuilt, from when others answer it: so long they have nothing to give."""
    more = {"rebuild_bytes_per_s": 4000.0, "rebuild_chunk_bytes": 64, "snapshot_every": 50}
    cluster = SimulatedCluster(Scenario(steps=400, kills=((0, 3),), verify_every=1 << 30, **more))
    clock, fetch, begun_s = cluster.network.clock, Parity.on_fetch, list[float]()

    def refuse(self: Parity, request: wire.Fetch, reply: Any) -> None:
        begun_s.append(clock.now_s)
        if clock.now_s < begun_s[0] + refused_s:
            reply(wire.Refused("not now"))
        else:
            fetch(self, request, reply)

    with monkeypatch.context() as patch:
        patch.setattr(Parity, "on_fetch", refuse)
        while not begun_s or not cluster.whole():
            cluster._run_trainers()
            assert clock.advance()
    assert cluster.run.kills == 1
    return clock.now_s - begun_s[0] - refused_s


def test_what_could_not_be_read_is_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a rebuild is one of bytes that are read: attempts that came to nothing hold up nobody afterwards."""
    at_once_s, later_s = (rebuilt_after(refused_s, monkeypatch) for refused_s in (0.0, 20.0))
    assert later_s < at_once_s + 1.0  # the pause between two attempts is half a second


def test_what_is_read_while_nobody_trains_is_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is lost before training begins: what is left of it then does not wait for what was read before."""
    whole_s = rebuilt_after(0.0, monkeypatch)
    limited, start, portions = rebuild.Rebuild._is_limited, rebuild.Rebuild._start_portion, Counter[bool]()

    def start_portion(self: rebuild.Rebuild) -> bool:
        started = start(self)
        portions[started] += 1
        return started

    monkeypatch.setattr(rebuild.Rebuild, "_start_portion", start_portion)
    monkeypatch.setattr(rebuild.Rebuild, "_is_limited", lambda self: portions[True] >= 6 and limited(self))
    assert rebuilt_after(0.0, monkeypatch) < 0.5 * whole_s and portions[True] > 6


def test_portions_are_as_large_as_they_may_be_wherever_some_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests have waited for is in no portion, and makes none smaller: a small one shows nothing of a link."""
    monkeypatch.setattr(rebuild.Throttle, "most_records", lambda self, record_bytes, now_s: 3)
    sizes, start = Counter[int](), rebuild._Repair.__init__

    def begin(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        sizes[len(self.positions)] += self.then is not None

    monkeypatch.setattr(rebuild._Repair, "__init__", begin)
    tables = tuple(dataclasses.replace(table, rows=200) for table in small_tables())
    healthy = Scenario(tables=tables, touch=0.05, steps=12, rebuild_bytes_per_s=4e4, rebuild_chunk_bytes=1 << 20)
    run = simulate(dataclasses.replace(healthy, kills=((0, 1),)))
    run.check_against(simulate(healthy))
    runs = 2 * 2 * (TWO_ONE.k + TWO_ONE.r)  # of records and of parities of each table group, for each rank
    assert run.kills == 1 and sizes[3] > 3 * runs and sum(sizes.values()) - sizes[3] <= runs, sizes


def test_what_does_not_arrive_in_time_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link: a portion, or what a step touches, takes longer than a call may, each time that it is asked."""
    fetch, late = Parity.on_fetch, Counter[bool]()

    def slowly(self: Parity, request: wire.Fetch, reply: Any) -> None:
        takes_s = 0.02 * len(request.positions)
        late[takes_s > scenario.call_timeout_s] += 1
        self.host.later(takes_s, lambda: fetch(self, request, reply))

    tables = tuple(dataclasses.replace(table, rows=150) for table in small_tables())
    healthy = Scenario(tables=tables, rebuild_chunk_bytes=1 << 20)
    scenario = dataclasses.replace(healthy, kills=((0, 1),))
    monkeypatch.setattr(Parity, "on_fetch", slowly)
    run = simulate(scenario)
    run.check_against(simulate(healthy))
    assert run.kills == 1 and late[True] and late[False]
