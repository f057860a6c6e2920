"""Tables that are loaded in training: a step of its own, as safe as any other, and none of training.

The oracle is the undisturbed run: what is read before each load, every lookup, loss, record, parity and dense snapshot
must be bit-equal to it, whoever is lost, at every message.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from faults import (
    CODES,
    KINDS,
    SEEDS,
    THREE_TWO,
    WAYS,
    WIDTHS,
    check,
    found,
    hunt_at,
    oracle,
    points,
    runs_of,
    sweep,
    sweep_loads,
)
from harness import Scenario, simulate, simulation
from harness.network import CRASH_COORDINATOR
from harness.scenario import Load, touched

from torch_ecrec.client.client import Client
from torch_ecrec.server.inbox import Inbox

BEFORE, WITHIN, AFTER = (0, True), (1, False), (1, True)  # the first step; one has ended, or has not
OVERWRITES = (
    (*BEFORE, Load(0, 0, 9, writers="rows")),
    (*WITHIN, Load(0, 4, 12, change=True)),
    (*WITHIN, Load(1, 3, 8, writers="all")),
    (*AFTER, Load(0, 15, 20, change=True, writers="columns")),
    (2, False, Load(1, 2, 9, change=True, writers="rows")),
    (2, True, Load(0, 0, 25, change=True, writers="rows")),
)
TRAINING = Scenario(steps=3, spares=2, overwrites=OVERWRITES)
RETURNING = dataclasses.replace(TRAINING, trainers_return=True)


def test_what_is_loaded_is_what_the_rows_hold():
    """The oracle itself: rows that no gradient reaches after a load."""
    plain, loaded = simulate(Scenario(steps=0)), simulate(dataclasses.replace(TRAINING, pooled=False))
    first, last = OVERWRITES[0][2], OVERWRITES[-1][2]
    assert torch.equal(loaded.overwritten[0, 0], plain.records[0][first.first : first.end])
    trained = set(touched(TRAINING, 3, 0)[0]) | set(touched(TRAINING, 3, 1)[0])
    rows = [row for row in range(last.first, last.end) if row not in trained]
    assert len(rows) > 3
    expected = last.values(loaded.overwritten[len(OVERWRITES) - 1, 0])
    assert torch.equal(loaded.records[0][rows], expected[rows])
    for number in range(len(OVERWRITES)):
        assert torch.equal(loaded.overwritten[number, 0], loaded.overwritten[number, 1]), "all trainers read the same"


@pytest.mark.parametrize("writers", ("first", "columns", "all"))
def test_it_does_not_matter_who_writes_what_of_a_load(writers):
    """Trainer 0 everything; each trainer some bytes of every record; all of them everything: the last one's counts."""
    changed = tuple((*when, dataclasses.replace(load, writers=writers)) for *when, load in OVERWRITES)
    for scenario in (TRAINING, dataclasses.replace(TRAINING, trainers=3)):
        check(dataclasses.replace(scenario, overwrites=changed)).check_against(oracle(scenario))


@pytest.mark.parametrize("code", CODES[1:], ids=str)
def test_the_bits_do_not_depend_on_the_code(code):
    training = dataclasses.replace(TRAINING, pooled=False)
    simulate(dataclasses.replace(training, code=code)).check_against(simulate(training))


def test_steps_of_training_are_counted_without_loads():
    run = oracle(TRAINING)
    assert run.losses.keys() == {(step, i) for step in (1, 2, 3) for i in (0, 1)}
    assert max(run.snapshots) == (3, 1), "kept under the step of training"
    lost = check(dataclasses.replace(RETURNING, trainer_kills=((1, 2),)))
    told = [event["step"] for event in lost.events if event["event"] == "resumable"]
    assert told == lost.resumed and told[0] in (1, 2), "people are told of steps of training"


@WIDTHS
@KINDS
def test_whoever_is_lost_at_any_message(kinds, every):
    sweep_loads(RETURNING, kinds, every)


@WIDTHS
def test_whoever_is_lost_where_snapshots_are_rare(every):
    """Steps that load lie before the snapshot that training goes on from, and behind it."""
    scenario = dataclasses.replace(RETURNING, steps=4, snapshot_every=2)
    _, became, _ = sweep(scenario, kinds=("crash_sender", "crash_receiver"), every=3 * every)
    print(points(became))


@WIDTHS
def test_the_coordinator_or_two_servers_are_lost(every):
    _, became, _ = sweep(dataclasses.replace(TRAINING, steps=2), kinds=(CRASH_COORDINATOR,), every=every)
    assert became[CRASH_COORDINATOR]["fired"]
    wide = dataclasses.replace(RETURNING, code=THREE_TWO, steps=2, spares=3, kills=((2, 1),))
    _, became, _ = sweep(wide, kinds=("crash_sender",), every=4 * every)
    print(points(became))


def test_a_window_of_one_step_does_not_wait_for_itself(monkeypatch):
    """A load that follows a step takes over its snapshot before it waits for the step."""
    settings = simulation.Settings

    monkeypatch.setattr(simulation, "Settings", lambda **fields: settings(**fields, window_steps=1))
    check(TRAINING)


@SEEDS
@pytest.mark.parametrize("way", WAYS)
def test_random_schedules(way, seeds):
    kills = Counter()
    for run in runs_of(way, seeds, (0.01, 0.03, 0.05), steps=3, overwrites=OVERWRITES):
        kills["servers"] += run.kills
        kills["trainers"] += run.trainer_kills
    print(dict(kills))
    assert kills["servers"] >= seeds


# mutations ----------------------------------------------------------------------------------------


def writes_as_they_come(patch):
    """Of what several trainers write, that which came last counts, and not that of the last of them."""
    patch.setattr(Inbox, "due", as_they_come(Inbox.due))


def as_they_come(due):
    def unordered(self, step):
        found = due(self, step)
        return list(self.loads[step].values()) if isinstance(found, list) else found

    return unordered


def one_load_is_enough(patch):
    """A step is due when one trainer has loaded and the others have not said anything."""

    def eager(self, step):
        found = due(self, step)
        return list(self.loads[step].values()) if found is None and self.loads.get(step) else found

    due = Inbox.due
    patch.setattr(Inbox, "due", eager)


def snapshot_is_waited_for(patch):
    """The step before waits for a snapshot that is taken after the load."""
    patch.setattr(Client, "without_snapshot", lambda self: None)


def loads_count(patch):
    """A step that loads counts as one of training."""
    pass_, load = Client.pass_, Client.load

    def counted(self, *args):
        (load if args else pass_)(self, *args)
        self.done += self.load_end is not None

    patch.setattr(Client, "pass_", counted)
    patch.setattr(Client, "load", counted)


RETURN = dict(steps=3, spares=2, overwrites=OVERWRITES, trainers_return=True)
MUTATIONS = {
    snapshot_is_waited_for: hunt_at("Load", "drop", **RETURN),
    loads_count: hunt_at("Load", "crash_sender", **RETURN),
    writes_as_they_come: hunt_at("Load", "drop", **RETURN),
    one_load_is_enough: hunt_at("Load", "drop", **RETURN),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate):
    found(mutate, MUTATIONS[mutate])
