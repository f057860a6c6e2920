"""Tables that are loaded after the model was built and before the first step of training, as a checkpoint is.

Such a load lets the logs go as it advances, so that no snapshot is there to go back to. Trainers that are lost then
begin anew: what the servers have is taken back to initial values, and all is loaded again. The oracle is the
undisturbed run, bit by bit: what is read before each portion, every lookup, loss, record, parity and dense snapshot.
"""

import dataclasses
import functools
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from dependent_steps import begin, train
from faults import (
    KINDS,
    SEEDS,
    THREE_TWO,
    WAYS,
    WIDTHS,
    check,
    found,
    hunt_at,
    oracle,
    runs_of,
    spread,
    sweep_loads,
)
from harness import Fault, Scenario, simulate
from harness.network import CRASH_COORDINATOR, CRASHES
from harness.scenario import LOADS, Load, small_tables
from virtual_trainers import Kill, OnShelf, Trainers, TurnsSession, assert_same_after

from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Session
from torch_ecrec.coordinator import going_back
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol import messages
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Settings

WRITERS = ("rows", "columns", "all", "first")
FEW, MANY = 8, 24  # portions
LOGGED = 4  # steps that a log holds at most where nobody is lost


@functools.cache
def portions(count: int) -> tuple[tuple[int, bool, Load], ...]:
    """Loads before the first step, each a function of what is there, so that none may be left out or come twice."""
    return tuple(
        (0, True, Load(i % 2, i * 3 % 9, i * 3 % 9 + 4, change=i % 3 > 0, writers=WRITERS[i % 4])) for i in range(count)
    )


LATER = ((1, True, Load(0, 0, 9, change=True)), (2, False, Load(1, 3, 8, change=True, writers="rows")))
EARLY = Scenario(steps=2, spares=2, loads=LOADS[:2], overwrites=portions(FEW) + LATER, trainers_return=True)


def messages_before_training(scenario: Scenario) -> list[tuple[int, tuple[str, str, str]]]:
    """(number, message) of the load, up to the first of training."""
    sent = oracle(scenario).messages
    first = next(number for number, message in enumerate(sent) if message[2] == "Lookup")
    begun = next(number for number, message in enumerate(sent) if message[2] == "NoUpdate") - 12
    return [(number, sent[number]) for number in range(max(0, begun), first)]


# how far logs reach -------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot_every", (0, 1, 3))
def test_logs_do_not_keep_what_is_loaded_before_the_first_step(snapshot_every):
    scenario = Scenario(steps=2, overwrites=portions(MANY), snapshot_every=snapshot_every, verify_every=5)
    run = check(scenario)
    assert max(run.longest["log"], run.longest["fold log"]) <= LOGGED, run.longest


def test_what_is_loaded_later_is_kept_until_the_next_snapshot():
    """It is needed to go back: the other side of the rule."""
    later = tuple((1, True, load) for _, _, load in portions(MANY))
    run = check(Scenario(steps=2, overwrites=later, verify_every=5))
    assert run.longest["log"] >= MANY


@pytest.mark.parametrize("who", CRASHES)
def test_logs_are_bounded_whoever_is_lost(who):
    """The verifier looks at the bounds all along."""
    scenario = Scenario(steps=1, spares=2, overwrites=portions(MANY), trainers_return=True, verify_every=5)
    fired, sent = 0, len(oracle(scenario).messages)
    for number in range(40, sent, sent // 6):
        fault = Fault(who, number)
        check(scenario, fault)
        fired += fault.fired
    assert fired >= 5


# crash points -------------------------------------------------------------------------------------


@WIDTHS
@KINDS
def test_whoever_is_lost_at_any_message(kinds, every):
    sweep_loads(EARLY, kinds, every)


@WIDTHS
def test_the_coordinator_is_lost_at_any_message(every):
    numbers, kills = range(0, len(oracle(EARLY).messages), min(every, 17)), 0
    for number in numbers:
        run = check(EARLY, Fault(CRASH_COORDINATOR, number))
        assert run.trainer_kills == run.fenced == run.loaded_again == 0
        kills += run.coordinator_kills
    assert len(numbers) - 3 <= kills <= len(numbers), "the run may end before the last messages arrive"


@WIDTHS
def test_trainers_that_are_lost_begin_anew_and_read_what_the_first_ones_read(every):
    """At every message of the load, alone and with a server; what is read before a portion is looked at in `check`."""
    ends = Counter()
    for number, (sender, _, name) in messages_before_training(EARLY)[:: 1 if every == 1 else 7]:
        for kinds in (("crash_sender",), ("crash_sender", "crash_receiver")) if sender.startswith("trainer") else ():
            faults = [Fault(kind, number) for kind in kinds]
            run = check(EARLY, *faults)
            assert faults[0].fired and faults[-1].fired != faults[-1].skipped, (number, name, kinds)
            ends[len(kinds), "anew" if run.loaded_again else f"after {run.resumed}"] += 1
    print(dict(ends))
    assert min(ends[1, "anew"], ends[2, "anew"]) >= 5


def test_where_logs_reach_back_to_the_initial_values_these_are_not_loaded_again():
    first = next(i for i, (sender, _, _) in enumerate(oracle(EARLY).messages) if sender == "trainer-1")
    run = check(EARLY, Fault("crash_sender", first))
    assert run.trainer_kills == 1 and run.loaded_again == 0 and run.resumed == [0]


@WIDTHS
def test_they_are_lost_again_while_they_load_anew(every):
    """Or somebody else is: at any message that follows the first loss."""
    kinds, fired, twice = ("crash_sender", "crash_receiver", CRASH_COORDINATOR), Counter(), 0
    sent = messages_before_training(EARLY)
    at = next(number for number, (sender, _, name) in sent[len(sent) // 2 :] if (sender, name) == ("trainer-1", "Load"))
    disturbed = check(EARLY, Fault("crash_sender", at))
    assert disturbed.loaded_again == 1
    for number, kind in spread(disturbed.messages[at + 1 :], kinds, every, ends="either"):
        faults = Fault("crash_sender", at), Fault(kind, at + 1 + number)
        run = check(EARLY, *faults)
        assert faults[0].fired and faults[1].fired != faults[1].skipped
        fired[kind] += faults[1].fired
        twice += run.loaded_again == 2
    print(dict(fired), f"{twice} times anew twice")
    assert all(fired[kind] >= 8 for kind in kinds) and twice >= 3


@WIDTHS
def test_two_servers_are_lost_and_the_trainers_with_them(every):
    wide = dataclasses.replace(EARLY, code=THREE_TWO, spares=4, overwrites=portions(FEW))
    sent, ends = messages_before_training(wide), Counter()
    loads = [number for number, (sender, _, name) in sent if name == "Load" and sender.startswith("trainer")]
    for number, later in product(loads[:: 1 if every == 1 else 2], (7, 9)):
        servers = Fault("crash_receiver", number), Fault("crash_after", number + 1)
        run = check(wide, *servers, Fault("crash_sender", number + later))
        ends[run.kills, run.trainer_kills, run.loaded_again] += 1
    print(dict(ends))
    assert sum(count for (kills, _, anew), count in ends.items() if kills == 2 and anew) >= 3


@pytest.mark.parametrize("snapshot_every", (2, 3))
def test_the_first_steps_have_no_snapshot(snapshot_every):
    """Steps of training that are in the logs are made again, however seldom snapshots are."""
    scenario = dataclasses.replace(EARLY, overwrites=portions(FEW), snapshot_every=snapshot_every, steps=3)
    ends = Counter()
    for number, message in enumerate(oracle(scenario).messages):
        if message[2] in ("Push", "Snapshot") and number % 2:
            fault = Fault("crash_sender", number)
            run = check(scenario, fault)
            assert fault.fired
            ends["anew" if run.loaded_again else f"after {run.resumed}"] += 1
    print(dict(ends))
    assert ends["anew"] >= 3


def test_with_snapshots_off_what_was_trained_for_long_is_not_made_again():
    """Logs do not reach back to the first step: nobody would want that."""
    scenario = dataclasses.replace(
        EARLY, overwrites=portions(FEW), snapshot_every=0, steps=40, trainer_kills=((1, 30),)
    )
    run = simulate(scenario)
    assert run.fatal is not None and "no dense snapshot" in run.fatal


@SEEDS
@pytest.mark.parametrize("way", WAYS)
def test_random_schedules(way, seeds):
    kills, anew = Counter(), 0
    loaded = dict(loads=LOADS[:2], overwrites=portions(2 * FEW) + LATER)
    for run in runs_of(way, seeds, (0.01, 0.02, 0.04), steps=2, **loaded):
        kills["servers"] += run.kills
        kills["trainers"] += run.trainer_kills
        anew += run.loaded_again
    print(dict(kills), f"{anew} times anew")
    assert kills["servers"] >= seeds


# sessions -----------------------------------------------------------------------------------------

STEPS, TRAINERS = 4, 2
JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), TRAINERS, 7)


def loading_script(seen, rank, session: TurnsSession):
    """Has initial values of its own, reads, loads all tables twice in portions, each trainer its rows, and trains."""
    dense, first = begin(rank, session, torch.ones(1, dtype=torch.float64))
    if rank == 0:
        spec = session.job.table_groups[1]
        session.load(1, torch.arange(spec.rows), torch.full((spec.rows, spec.schema.nbytes // 4), 0.25))
    session.loaded()
    note_life(seen, rank, session)
    if session.step == 1:
        for turn in range(2):
            read_all(seen, rank, session, turn)
            overwrite_all(rank, session, turn)
    train(rank, session, dense, range(first, STEPS + 1))


def note_life(seen, rank, session):
    """All is loaded, in this life as well."""
    if rank == 0:
        seen["anew"] = seen.get("anew", 0) + (seen.get("loaded", False) and session.client.begins_anew)
        seen["loaded"] = True


def read_all(seen, rank, session, turn):
    for table_group, spec in enumerate(session.job.table_groups):
        read = session.read(table_group, torch.arange(spec.rows)).view(torch.int32)
        assert torch.equal(seen.setdefault((turn, table_group, rank), read), read), "another value than before"


def overwrite_all(rank, session, turn):
    for table_group, spec in enumerate(session.job.table_groups):
        rng = np.random.default_rng([turn, table_group])
        values = torch.from_numpy(rng.random((spec.rows, spec.dim), dtype=np.float32)).view(torch.uint8)
        mine = torch.arange(spec.rows)[rank::2].split(2)
        for rows in mine:
            session.overwrite(table_group, rows, values[rows])
        for _ in range((spec.rows + 3) // 4 - len(mine)):
            session.overwrite(table_group, torch.empty(0, dtype=torch.int64), None)


class LoadingEarly(Trainers):
    """Trainers with such a script, over real sessions; `checkpoint`: that the cluster begins with."""

    def __init__(self, checkpoint=None, **more):
        self.seen = {}
        script = restored_script if checkpoint is not None else loading_script
        super().__init__(JOB, functools.partial(script, self.seen), begins=checkpoint, **more)


def restored_script(seen, rank, session: TurnsSession):
    """Begins with a checkpoint, and loads before its first step, none the less."""
    dense, first = begin(rank, session, torch.ones(1, dtype=torch.float64))
    session.loaded()
    note_life(seen, rank, session)
    if first == session.step == CHECKPOINT_AT + 1:
        read_all(seen, rank, session, 0)
        overwrite_all(rank, session, 0)
    train(rank, session, dense, range(first, CHECKPOINT_AT + STEPS))


CHECKPOINT_AT = 3


def plain_script(rank, session):
    dense, first = begin(rank, session, torch.zeros(1, dtype=torch.float64))
    session.loaded()
    train(rank, session, dense, range(first, CHECKPOINT_AT + 4))


@functools.cache
def written():
    settings = CheckpointSettings("memory://shelf", every_steps=CHECKPOINT_AT, policy="consecutive")
    run = Trainers(JOB, plain_script, checkpoint=settings).go()
    return OnShelf(run.shelf, JOB, next(one for one in run.shelf.counts if one.done == CHECKPOINT_AT))


@functools.cache
def undisturbed(restored: bool):
    return LoadingEarly(written() if restored else None).go()


LOST = {
    "trainer": [("trainer", 1)],
    "trainer and server": [("trainer", 0), ("server", 1)],
    "trainer and coordinator": [("trainer", 0), ("coordinator", 0)],
    "coordinator and trainer, and again": [("coordinator", 0), ("trainer", 1), ("trainer", 0)],
}


PAUSES = (0, 9, 35)  # messages between two that are lost


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.parametrize("restored", (False, True), ids=("", "restored"))
@pytest.mark.parametrize("who", LOST)
def test_sessions_of_trainers_that_are_lost(who, restored, every):
    """A script that was started again does what it did at first: its session does not tell it that values are there."""
    right, became = undisturbed(restored), Counter()
    apart = max(1, every * 2 // 3) if restored else every
    for turn, at in enumerate(range(20, len(right.network.sent), apart)):
        for later in PAUSES if every == 1 and len(LOST[who]) > 1 else PAUSES[turn % 3 :][:1]:
            kills = [Kill(name, which, at + later * i) for i, (name, which) in enumerate(LOST[who])]
            run = LoadingEarly(written() if restored else None, kills=kills, spares=2, reborn=True)
            run.seen.update({key: read for key, read in right.seen.items() if isinstance(key, tuple)})
            run.go()
            assert_same_after(run, right, CHECKPOINT_AT if restored else 0)
            became["fired"] += len(run.fired) == len(kills)
            became["lives"] += run.lives
            anew = all(place.incarnation for place in run.coordinator.slots) if restored else run.seen["anew"] > 0
            became["anew"] += anew
    print(dict(became))
    assert became["lives"] > became["fired"] > 5 and became["anew"] > 3


@pytest.mark.parametrize("welcomed", (False, True))
@pytest.mark.parametrize(
    ("step", "load_end", "counts"),
    [
        (9, 5, True),  # after steps of training, or loads
        (5, 5, True),
        (9, None, False),  # all begin anew
        (9, 12, False),  # likewise, and it hears late: trainer 0 has loaded all again
    ],
)
def test_who_was_told_that_values_are_there_knows_whether_they_count(welcomed, step, load_end, counts):
    """A trainer that joined before they were loaded is never told that they count, however late it hears of them."""
    session = Session(Client("trainer-1", NoPort(), JOB, 1, Settings()), print, print, restarted=welcomed)
    session.on_control(messages.Resume(1, step, load_end, 0))
    assert session.restarted is (welcomed and counts)


class NoPort:
    """Of a trainer that asks nobody."""

    def now_s(self) -> float:
        return 0.0


# mutations ----------------------------------------------------------------------------------------


def logs_reach_back_to_the_load_end(patch):
    """What is loaded before the first step is kept, as before this was thought of."""
    patch.setattr(Client, "is_trained", lambda self, step: self.load_end is not None and step > self.load_end)


def no_reset(patch):
    """What the lost trainers had loaded is left behind."""
    patch.setattr(Client, "left_behind", lambda self: iter(()))


def goes_on_where_they_were(patch):
    """All go back to the last step, and the new trainers are told that all is loaded."""
    choose = going_back.choose_step

    def anywhere(reach, load_end, trainers):
        chosen = choose(reach, load_end, trainers)
        return choose(reach, None, trainers) if chosen is None else chosen

    patch.setattr(going_back, "choose_step", anywhere)


def trained_steps_need_none(patch):
    """Steps of training count as loads do: logs let them go without a snapshot."""
    patch.setattr(Client, "is_trained", lambda self, step: False)


HUNT = dict(steps=2, spares=2, overwrites=portions(FEW), trainers_return=True)
MUTATIONS = {
    no_reset: hunt_at("Load", "crash_sender", late=12, **HUNT),
    goes_on_where_they_were: hunt_at("Load", "crash_sender", late=12, **HUNT),
    trained_steps_need_none: hunt_at("Push", "crash_sender", late=12, **{**HUNT, "steps": 6, "snapshot_every": 3}),
    logs_reach_back_to_the_load_end: hunt_at("Load", "drop", **{**HUNT, "overwrites": portions(MANY), "steps": 1}),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate):
    found(mutate, MUTATIONS[mutate])
