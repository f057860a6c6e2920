"""The modes of experiments (`spec/experiment.py`) keep every promise of the contract but those that they name.

`PROMISES` has a check for each promise of `docs/design.md`; `BROKEN` says which ones a mode gives up. Both directions
are tests: what is listed fails, and what is not listed passes. Parity, which gives up nothing, is one of the modes.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
from faults import THREE_TWO, TWO_ONE
from harness import Fault, Scenario, SimulatedCluster, SimulationResult
from harness.verification import check_parities_as_of

from torch_ecrec.durability import locked_ranges
from torch_ecrec.durability.acknowledged_when_applied import AcknowledgedWhenApplied
from torch_ecrec.durability.parity import Parity
from torch_ecrec.spec.experiment import MODES, Experiment

PARITY = Experiment()
TWO_PC, NN_REP, BOTH = map(Experiment, MODES)
RANGES, WITH_RANGES = Experiment(ranges=3), Experiment("minus2PC", ranges=3)
EXPERIMENTS = (PARITY, TWO_PC, NN_REP, BOTH, RANGES, WITH_RANGES)
KILLED = Scenario(steps=6, spares=2)
SEEDS = range(6)


def name_of(experiment: Experiment) -> str:
    return "+".join([experiment.mode or "parity", *(["ranges"] if experiment.ranges else [])])


class Watched(SimulatedCluster):
    """A cluster of which only some of the invariants are looked at while it runs."""

    def __init__(self, scenario: Scenario, faults=(), looks: Callable[["Watched"], None] = lambda cluster: None):
        self.looks = looks
        super().__init__(scenario, faults)

    def verify(self) -> None:
        self.looks(self)

    @property
    def lost_steps(self) -> int:
        return sum(slot.durability.lost_steps for slot in self.slots())

    @property
    def wrong_stripes(self) -> int:
        return sum(slot.scrubber.mismatched for slot in self.slots())


def run_in(experiment: Experiment, scenario: Scenario, *faults: Fault, looks=lambda cluster: None):
    """Runs a scenario in a mode, and returns the cluster, at its end, and what came of it."""
    scenario = dataclasses.replace(scenario, experiment=experiment)
    if experiment.keeps_no_dense_snapshots:
        scenario = dataclasses.replace(scenario, snapshot_every=0)
    cluster = Watched(scenario, faults, looks)
    return cluster, cluster.go()


@functools.cache
def undisturbed(experiment: Experiment, scenario: Scenario) -> SimulationResult:
    """What parity gives where nothing happens, kept as this mode keeps dense snapshots."""
    calm = Scenario(code=scenario.code, steps=scenario.steps, touch=scenario.touch)
    if experiment.keeps_no_dense_snapshots:
        calm = dataclasses.replace(calm, snapshot_every=0)
    run = SimulatedCluster(calm).go()
    assert run.kills == run.trainer_kills == 0
    return run


@functools.cache
def folds(experiment: Experiment, scenario: Scenario = KILLED) -> list[int]:
    """The numbers of the requests that carry folds, where nothing happens."""
    _, run = run_in(experiment, scenario)
    return [number for number, (_, _, kind) in enumerate(run.messages) if kind == "Fold"]


def killed_runs(experiment: Experiment, looks=lambda cluster: None):
    """Yields runs in which a server dies while it folds: before others have what it has applied, or after that."""
    for number in folds(experiment)[::3]:
        for kind in ("crash_sender", "crash_receiver", "crash_after"):
            fault = Fault(kind, number)
            cluster, run = run_in(experiment, KILLED, fault, looks=looks)
            assert fault.fired and run.kills == 1
            yield cluster, run


@dataclasses.dataclass(frozen=True)
class Killed:
    """What became of one of the `killed_runs`. `known_less`: why a later life of a slot knew less; "": none did."""

    run: SimulationResult
    settled: bool
    wrong_stripes: int
    lost_steps: int
    known_less: str


@functools.cache
def killed(experiment: Experiment) -> list[Killed]:
    """What became of all `killed_runs`: several promises are about them."""
    known_less: list[str] = []

    def looks(cluster: Watched) -> None:
        verifier, ready = cluster.verifier, {slot.index: slot for slot in cluster.slots() if slot.ready}
        verifier._clients, verifier._placed = list(cluster.clients.values()), cluster.slots_known
        try:
            for slot in ready.values():
                verifier._check_acknowledged(slot, ready)
        except AssertionError as error:
            known_less.append(str(error))

    found = []
    for cluster, run in killed_runs(experiment, looks):
        least = known_less[0] if known_less else ""
        found.append(Killed(run, cluster.settled(), cluster.wrong_stripes, cluster.lost_steps, least))
        known_less.clear()
    return found


# promises -----------------------------------------------------------------------------------------


def bits_do_not_depend_on_the_mode(experiment: Experiment) -> None:
    """I7: undisturbed, and in whatever order messages come."""
    for seed in SEEDS:
        for code in (TWO_ONE, THREE_TWO):
            scenario = Scenario(code=code, network_seed=seed)
            run_in(experiment, scenario)[1].check_against(undisturbed(experiment, scenario))


def parities_are_the_code_of_their_stripes(experiment: Experiment) -> None:
    """I1, after servers were lost; `go` looks at all of them at its end."""
    for became in killed(experiment):
        assert became.run.fatal is None and became.settled and became.wrong_stripes == 0


def a_change_is_folded_once_or_not_at_all(experiment: Experiment) -> None:
    """I2: parities are the code of their stripes as of what their holders have folded, at every moment."""

    def looks(cluster: Watched) -> None:
        check_parities_as_of({slot.index: slot for slot in cluster.slots() if slot.ready})

    for seed in SEEDS:
        scenario = Scenario(
            steps=8, spares=2, reborn=True, random_kills=2, network_seed=seed, verify_every=5, noise=0.02
        )
        assert run_in(experiment, scenario, looks=looks)[1].kills


def training_goes_on_after_a_server_is_lost(experiment: Experiment) -> None:
    """Half of I3: whatever came of it, every trainer makes every step."""
    for run in (became.run for became in killed(experiment)):
        assert run.fatal is None
        assert run.losses.keys() == {(step, trainer) for step in range(1, KILLED.steps + 1) for trainer in range(2)}


def what_was_acknowledged_survives(experiment: Experiment) -> None:
    """I2 and I3: no later life of a slot knows less than was acknowledged."""
    for became in killed(experiment):
        assert not became.known_less and became.lost_steps == 0


def all_is_exact_after_a_server_is_lost(experiment: Experiment) -> None:
    """I3 and I4: every lookup, loss, record and dense value is that of the undisturbed run."""
    for became in killed(experiment):
        became.run.check_against(undisturbed(experiment, KILLED))


def all_is_exact_after_trainers_are_lost(experiment: Experiment) -> None:
    """I3, of trainers: they go on from a snapshot, and the servers go back to its step."""
    for step in (3, 4):
        scenario = Scenario(steps=6, spares=2, trainers_return=True, trainer_kills=((1, step),))
        _, run = run_in(experiment, scenario)
        assert run.trainer_kills == 1
        run.check_against(undisturbed(experiment, scenario))


def more_than_r_losses_are_the_end(experiment: Experiment) -> None:
    """I5: it says what is lost, and does not go on with wrong bytes."""
    scenario = Scenario(steps=4, spares=0, kills=((0, 2), (1, 2)), settle_first=False)
    _, run = run_in(experiment, scenario)
    assert run.fatal is not None and "lost" in run.fatal


def memory_is_bounded(experiment: Experiment) -> None:
    """I6: logs hold a few steps, and nothing else grows, though a holder lacks a fold for the time of many steps."""

    def looks(cluster: Watched) -> None:
        verifier = cluster.verifier
        verifier._clients = list(cluster.clients.values())
        verifier._check_bounds({slot.index: slot for slot in cluster.slots() if slot.ready})

    scenario = Scenario(steps=16, verify_every=5)
    for number in folds(experiment, scenario)[6:12]:
        fault = Fault("drop", number)
        run_in(experiment, scenario, fault, looks=looks)
        assert fault.fired


PROMISES = {
    check.__name__: check
    for check in (
        bits_do_not_depend_on_the_mode,
        parities_are_the_code_of_their_stripes,
        a_change_is_folded_once_or_not_at_all,
        training_goes_on_after_a_server_is_lost,
        what_was_acknowledged_survives,
        all_is_exact_after_a_server_is_lost,
        all_is_exact_after_trainers_are_lost,
        more_than_r_losses_are_the_end,
        memory_is_bounded,
    )
}
OF_TWO_PC = {
    "what_was_acknowledged_survives",
    "all_is_exact_after_a_server_is_lost",
    "memory_is_bounded",  # who waits for no holder is held back by none: what one has not folded yet is kept
}
OF_NN_REP = {"all_is_exact_after_trainers_are_lost"}
BROKEN = {
    PARITY: set(),
    TWO_PC: OF_TWO_PC,
    NN_REP: OF_NN_REP,
    BOTH: OF_TWO_PC | OF_NN_REP,
    RANGES: set(),
    WITH_RANGES: OF_TWO_PC,
}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name_of)
def test_a_mode_breaks_exactly_the_promises_that_it_gives_up(experiment, promise):
    if promise not in BROKEN[experiment]:
        PROMISES[promise](experiment)
        return
    with pytest.raises(AssertionError):
        PROMISES[promise](experiment)


def test_the_list_names_promises_that_there_are():
    assert BROKEN.keys() == set(EXPERIMENTS)
    assert all(broken <= PROMISES.keys() for broken in BROKEN.values())


# minus2PC -----------------------------------------------------------------------------------------


def test_acknowledged_steps_are_lost_at_some_crash_points_and_with_parity_at_none():
    lost = {experiment: [became.lost_steps for became in killed(experiment)] for experiment in (TWO_PC, PARITY)}
    print({name_of(experiment): counts for experiment, counts in lost.items()})
    assert any(lost[TWO_PC]) and not all(lost[TWO_PC]), "a loss that others have folded all of loses nothing"
    assert not any(lost[PARITY])


def test_a_slot_that_lost_steps_passes_over_them_and_says_so():
    for cluster, run in killed_runs(TWO_PC):
        told = [event["what"] for event in run.events if event["event"] == "not_exact"]
        assert len(told) == 1 and "acknowledged steps may be lost" in told[0], "NOT EXACT, said once"
        if cluster.lost_steps:
            break
    slots = cluster.slots()
    (behind,) = [slot for slot in slots if slot.durability.lost_steps]
    assert {slot.rule.applied for slot in slots} == {KILLED.steps}, "all slots end at the same step"
    assert behind.figures().lost_steps == behind.durability.lost_steps <= KILLED.steps
    assert isinstance(behind.durability, AcknowledgedWhenApplied)


def test_trainers_lost_with_a_server_hang_nobody():
    """They forget what they were told, and no later trainer sends it: servers agree on a step all the same."""
    became, both = [], 0
    for number in folds(TWO_PC)[::2]:
        for rank in range(2):
            scenario = dataclasses.replace(KILLED, trainers_return=True, trainer_kills=((rank, 2),))
            fault = Fault("crash_sender", number)
            cluster = Watched(dataclasses.replace(scenario, experiment=TWO_PC), [fault])
            try:
                run = cluster.go()
            except AssertionError as error:  # trainers of the harness compare what they see again with what they saw
                assert "another value after going back" in str(error)
                became.append("another value")
                continue
            assert run.fatal is None and run.trainer_kills >= 1 and (fault.fired or fault.skipped)
            both += run.kills == 1  # else the sender was a trainer, or a fold of a life that was over
            became.append(cluster.lost_steps)
    assert both > 5 and any(became)


# minusNNRep ---------------------------------------------------------------------------------------


def test_no_dense_snapshot_is_sent_whatever_the_script_asks_for():
    """And trainers that are lost end the job, with a reason that names the mode."""
    for experiment, wanted in ((NN_REP, False), (PARITY, True)):
        run = Watched(Scenario(experiment=experiment)).go()
        assert ("Snapshot" in {kind for _, _, kind in run.messages}) == wanted
    scenario = Scenario(experiment=NN_REP, steps=8, trainers_return=True, trainer_kills=((0, 6),))
    run = Watched(scenario).go()
    assert run.fatal is not None and "experiment minusNNRep, which a lost trainer ends" in run.fatal


# ranges -------------------------------------------------------------------------------------------


SLOW = Scenario(steps=6, kills=((0, 2),), spares=1, rebuild_bytes_per_s=3000.0, touch=0.2)


class Rebuilding(SimulatedCluster):
    """Looks at the new host of slot 0 at each event while records of it are missing."""

    def __init__(self, scenario: Scenario) -> None:
        self.seen: list[tuple[int, int]] = []  # (steps applied, records missing)
        self.opened: list[tuple[bool, bool]] = []  # (first record waits, last record waits)
        super().__init__(scenario)

    def on_event(self, number: int) -> None:
        for slot in self.slots():
            if slot.index == 0 and slot.incarnation == 1 and slot.ready and not slot.missing.has_all_data:
                self.seen.append((slot.rule.applied, slot.missing.remaining))
                rebuild = slot.durability.rebuild
                if isinstance(rebuild, locked_ranges.LockedRebuild):
                    waits = [
                        rebuild.is_missing([np.array([at]), *(np.empty(0, np.int64) for _ in slot.shards[1:])])
                        for at in (0, slot.shards[0].data_rows - 1)
                    ]
                    self.opened.append((waits[0], waits[1]))


def test_who_needs_a_locked_range_waits_and_without_locks_it_is_repaired_first():
    ends = {}
    for experiment in (PARITY, RANGES):
        cluster = Rebuilding(dataclasses.replace(SLOW, experiment=experiment))
        run = cluster.go()
        run.check_against(undisturbed(experiment, SLOW))
        assert run.kills == 1 and cluster.seen
        assert all(isinstance(slot.durability, Parity) for slot in cluster.slots())
        ends[experiment] = max(applied for applied, _ in cluster.seen) - cluster.seen[0][0]
        if experiment.ranges:
            assert (False, True) in cluster.opened, "the first range is given while the last is locked"
            assert (True, False) not in cluster.opened
    print({name_of(experiment): steps for experiment, steps in ends.items()})
    assert ends[PARITY] > ends[RANGES], "steps that were made while records were missing"


def test_ranges_are_whole_one_after_another():
    """Of every table group and for any number of ranges: no two are decoded at once."""
    begun = []

    class Noted(locked_ranges.LockedRebuild):
        def _next_range(self) -> bool:
            assert self.portions_under_way == 0
            begun.append(self._number)
            return super()._next_range()

    for ranges in (1, 2, 7, 1000):
        begun.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch_ecrec.durability.LockedRebuild", Noted)
            experiment = Experiment(ranges=ranges)
            run = SimulatedCluster(dataclasses.replace(KILLED, kills=((0, 2),), experiment=experiment)).go()
        run.check_against(undisturbed(experiment, KILLED))
        assert run.kills == 1 and set(begun) >= set(range(ranges + 1))
