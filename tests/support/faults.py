"""Runs of the simulated cluster against the undisturbed one: every fault at every message, or random schedules."""

import dataclasses
import functools
from collections import Counter

import pytest
from harness import Fault, Scenario, SimulationResult, half_tables, simulate, small_tables
from harness.network import CRASH_COORDINATOR, CRASHES, FAULTS, LOSSES
from thinned import in_turns

from torch_ecrec.spec.job import CodeSpec

TWO_ONE = CodeSpec(3, 2, 1)
THREE_TWO = CodeSpec(5, 3, 2)
OTHERS = ((2, 1, 1), (4, 1, 2), (4, 2, 1), (6, 2, 1), (7, 4, 3))  # slots, k, r
CODES = (TWO_ONE, THREE_TWO, *(CodeSpec(*numbers) for numbers in OTHERS))


@functools.cache
def undisturbed(
    code: CodeSpec,
    steps: int,
    trainers: int = 2,
    snapshot_every: int = 1,
    loads: tuple = (),
    overwrites: tuple = (),
    tables: tuple = small_tables(),
    pooled: bool = True,
) -> SimulationResult:
    """The oracle. Computed before anything is taken out of the protocol."""
    more = {
        "snapshot_every": snapshot_every,
        "loads": loads,
        "overwrites": overwrites,
        "tables": tables,
        "pooled": pooled,
    }
    run = simulate(Scenario(code=code, steps=steps, trainers=trainers, **more))
    run.check_against(run)
    assert run.kills == 0
    return run


def check(scenario: Scenario, *faults: Fault) -> SimulationResult:
    run = simulate(scenario, faults)
    run.check_against(oracle(scenario))
    return run


def oracle(scenario: Scenario) -> SimulationResult:
    more = {
        "loads": scenario.loads,
        "overwrites": scenario.overwrites,
        "tables": scenario.tables,
        "pooled": scenario.pooled,
    }
    return undisturbed(scenario.code, scenario.steps, scenario.trainers, scenario.snapshot_every, **more)


# crash points -------------------------------------------------------------------------------------


SOME = 47  # in the everyday run, of the widest sweeps
WIDTHS = pytest.mark.parametrize(
    "every", [SOME, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])], ids=["some", "all"]
)

IN_TURNS = in_turns("every", SOME)
KINDS = pytest.mark.parametrize("kinds", [CRASHES, LOSSES], ids=["crashes", "losses"])  # all `FAULTS`


def spread(messages, kinds, every: int, ends: str = "both"):
    """Yields (number, kind): all with `every` 1, else one in `every`, and the first and last request of each class.

    So every kind of fault meets every class of request that `messages` has; the kinds take turns at what is between.

    Args:
        ends: "either": a kind meets the first request of a class or the last. For a variant of what another sweep has.
    """
    last = {name: number for number, (_, _, name) in enumerate(messages)}
    passed = Counter()
    for number, (_, _, name) in enumerate(messages):
        is_end = passed[name] == 0, number == last[name]
        for turn, kind in enumerate(kinds):
            if (passed[name] + turn) % every == 0 or (any(is_end) if ends == "both" else is_end[turn % 2]):
                yield number, kind
        passed[name] += 1


def sweep_loads(scenario: Scenario, kinds, every: int) -> None:
    """Of a run whose trainers load: servers and trainers are lost, or messages are lost, late or repeated."""
    healthy, became, _ = sweep(scenario, kinds, every=every)
    print(points(became))
    assert {"Load", "NoUpdate", "Push", "Snapshot", "Fold", "Export"} <= {name for _, _, name in healthy.messages}
    assert all(became[kind]["fired"] for kind in kinds)


def sweep(scenario: Scenario, kinds=FAULTS, first=0, last=10**9, every=1, ends="both"):
    """A run for every request and kind, or for some (`spread`).

    Returns the run without faults, what became of each kind, and where it was: the request's numbers.
    """
    healthy = check(scenario)
    became = {kind: Counter() for kind in kinds}
    where = {kind: [] for kind in kinds}
    for number, kind in spread(healthy.messages[first : last + 1], kinds, every, ends):
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
        # Nobody is kept waiting until its time limit runs out, but by a message that was lost; or, if the coordinator
        # dies as training begins, by a trainer that hears of that from the next one.
        begins = kind == CRASH_COORDINATOR and number < 2 * scenario.trainers * scenario.code.slots
        assert scenario.reborn or kind in ("drop", "lose_answer") or begins or not run.overdue, (
            f"{point}: kept waiting: {[run.messages[i] for i in run.overdue]}"
        )
        became[kind]["fired" if fault.fired else "skipped"] += 1
    return healthy, became, where


def points(became) -> str:
    return f"{sum(sum(c.values()) for c in became.values())} points: " + "; ".join(
        f"{kind} {count['fired']} fired, {count['skipped']} not applicable" for kind, count in became.items()
    )


# random schedules ---------------------------------------------------------------------------------

SCHEDULES = 20  # of each kind below: every code and probability
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

SEEDS = in_turns("seeds", 2, 6)


def seeds_of(way: str, count: int) -> range:
    """So many; where they are few, others for each way: so that every code and probability is among them."""
    first = count * list(WAYS).index(way) if count < 5 else 0
    return range(first, first + count)


def runs_of(way: str, count: int, often, **fields):
    """A run for each of so many seeds, each with another code and another of these probabilities of a loss."""
    for seed in seeds_of(way, count):
        fields |= dict(code=CODES[seed % len(CODES)], kill_probability=often[seed % 3], network_seed=seed)
        yield check(dataclasses.replace(WAYS[way], **fields, random_kills=3))


def schedules(way: str, first: int, count: int):
    for seed in range(first, first + count):
        yield dataclasses.replace(
            WAYS[way],
            code=CODES[seed % len(CODES)],
            steps=6,
            network_seed=seed,
            random_kills=3,
            kill_probability=(0.005, 0.02, 0.05)[seed % 3],
            tables=half_tables() if seed % 4 == 3 else small_tables(),
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


# mutations ----------------------------------------------------------------------------------------

NOISY = dict(steps=6, spares=3, random_kills=3, kill_probability=0.03, noise=0.05)


def hunt(count: int = 100, begin: int = 0, **kinds):
    """Random schedules to find a mutation with. `begin`: the seed that is known to find it comes first."""
    for seed in (*range(begin, count), *range(begin)):
        yield Scenario(network_seed=seed, **{**NOISY, **kinds}), ()


def hunt_at(name: str, *kinds: str, to: str = "", seeds: int = 20, begin: int = 0, late: int = 0, **scenario):
    """Schedules with faults at every request of a class, or at those to one server.

    Args:
        begin: as in `hunt`.
        late: the first so many of a class come last.
    """
    for seed in (*range(begin, seeds), *range(begin)):
        seeded = Scenario(network_seed=seed, **scenario)
        messages = enumerate(check(seeded).messages)
        numbers = [number for number, (_, receiver, sent) in messages if sent == name and to in ("", receiver)]
        for number in (*numbers[late:], *numbers[:late]):
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
