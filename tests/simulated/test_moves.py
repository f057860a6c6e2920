"""A slot moves to a server that comes while training goes on: nothing is lost by it, whatever happens at any message.

A server is lost, a survivor takes its slot; then a server joins, and the slot moves there. While it does, every slot
stays healthy, so that as many may be lost as ever: any fault may come at any message of the move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from faults import TWO_ONE, WIDTHS, check, oracle, points, sweep
from harness import Fault, Scenario, SimulatedCluster, simulation
from harness.membership import VirtualProcess
from harness.network import CRASHES, FAULTS, LOSSES
from schedules import first_failure

from torch_ecrec.server import exporting, importing
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

LARGER = (TableSpec("a", rows=400, dim=3, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1)),)
OF_A_MOVE = ("FetchChanged", "Copy", "HandOver")
MOVING = Scenario(
    steps=14,
    kills=((0, 1),),
    spares=0,
    reborn=True,
    rebuild_chunk_bytes=64,
    rebuild_bytes_per_s=1e4,  # a move takes some steps
)
SCENARIOS = {
    "one server for each slot": MOVING,
    "trainers may be lost as well": dataclasses.replace(MOVING, trainers_return=True),
    "three parities": dataclasses.replace(MOVING, code=CodeSpec(5, 2, 3)),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server comes while training goes on, and what changed is asked for again and again."""
    monkeypatch.setattr(simulation, "REBORN_S", 0.02)
    monkeypatch.setattr(importing, "LITTLE_BYTES", 50)


def kinds(run: simulation.SimulationResult) -> list[str]:
    return [event["event"] for event in run.events]


def test_a_slot_moves_while_training_goes_on() -> None:
    run = check(MOVING)
    names = [kind for _, _, kind in run.messages]
    first, last = names.index("FetchChanged"), len(names) - 1 - names[::-1].index("HandOver")
    assert names.count("FetchChanged") >= 3, "records changed while they were copied, and were copied again"
    assert {"Push", "Fold", "Lookup"} <= set(names[first:last]), "training went on meanwhile"
    told = kinds(run)
    moved = told.index("moved")
    assert told.index("rebuilt") < moved and told.count("rebuilt") == 1, "nothing is rebuilt for the move"
    assert "Adopt" not in names[first:] and "Versions" not in names[first:]
    placed = run.events[moved]["slots"]
    assert len({server for server, _ in placed}) == TWO_ONE.slots


def test_what_has_changed_is_copied_within_half_of_the_link_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """With portions as small, and pauses, until it does not get less that way; then without pauses."""
    turns, portions, copy = list[bool](), list[tuple[int, int]](), importing.SlotImport._copy
    pause_s = importing.Throttle.pause_s

    def pause(self: importing.Throttle, count: int, within_limit: bool = True) -> float:
        turns.append(within_limit)
        return pause_s(self, count, within_limit)

    def begin(self: importing.SlotImport, table_group: int, parity: bool, positions_U: np.ndarray) -> None:
        portions.append((self._turn, len(positions_U)))
        copy(self, table_group, parity, positions_U)

    monkeypatch.setattr(importing.Throttle, "pause_s", pause)
    monkeypatch.setattr(importing.Throttle, "most_records", lambda self, record_bytes, now_s: 2)
    monkeypatch.setattr(importing.SlotImport, "_copy", begin)
    check(dataclasses.replace(MOVING, rebuild_chunk_bytes=1 << 20, kills=((0, 2),), steps=24))  # disks take some
    assert {within for within in turns} == {True, False}
    assert max(turn for turn, _ in portions) > 1 and {count for _, count in portions} == {1, 2}


class Once(SimulatedCluster):
    """One server comes for those that were lost, and no other."""

    def start_server(self, predecessor: VirtualProcess | None = None) -> None:
        if self.servers_started <= self.scenario.code.slots:
            super().start_server(predecessor)


def check_once(*faults: Fault) -> simulation.SimulationResult:
    run = Once(MOVING, faults).go()
    run.check_against(oracle(MOVING))
    return run


def test_a_slot_that_has_stopped_goes_on_if_nobody_takes_it_over() -> None:
    names = [kind for _, _, kind in check_once().messages]
    fired = 0
    for number in [number for number, name in enumerate(names) if name in ("HandOver", "FetchSnapshots")]:
        for kind in ("crash_sender", "crash_after"):
            fault = Fault(kind, number)
            run = check_once(fault)
            fired += fault.fired and "stayed" in kinds(run)
    assert fired >= 2


class Watched(SimulatedCluster):
    """Looks, at every event, whether a slot counts as lost while one moves."""

    moving = unhealthy = 0

    def on_event(self, number: int) -> None:
        under_way = self.plane.lives and self.coordinator._state.table.moves.current is not None
        self.moving += under_way
        self.unhealthy += under_way and not all(place.healthy for place in self.coordinator.slots)


def test_nothing_counts_as_lost_while_a_slot_moves() -> None:
    cluster = Watched(MOVING)
    cluster.go().check_against(oracle(MOVING))
    assert cluster.moving >= 20 and cluster.unhealthy == 0


def of_each() -> list[Any]:
    """What the sweep below is of: a scenario and kinds of faults, one by one where each takes minutes."""
    some = [
        pytest.param(name, kinds, id=f"{name}-{what}")
        for name in [*SCENARIOS][:2]
        for kinds, what in ((CRASHES, "crashes"), (LOSSES, "losses"))
    ]
    name = "three parities"
    return some + [pytest.param(name, (kind,), marks=pytest.mark.slow, id=f"{name}-{kind}") for kind in FAULTS]


@WIDTHS
@pytest.mark.parametrize(("name", "kinds"), of_each())
def test_every_fault_at_every_message_of_a_move(name: str, kinds: tuple[str, ...], every: int) -> None:
    scenario = SCENARIOS[name]
    names = [kind for _, _, kind in check(scenario).messages]
    first, last = names.index("FetchChanged"), len(names) - 1 - names[::-1].index("HandOver")
    variant = name == "one server for each slot" and kinds is not CRASHES  # the next one has all that it has
    ends = "either" if variant else "both"
    healthy, became, where = sweep(scenario, kinds, first, last + 8, every, ends)
    print(points(became))
    for kind in kinds:
        hit = {healthy.messages[number][2] for number in where[kind]}
        assert set(OF_A_MOVE) <= hit
        assert became[kind]["fired"] >= 2


# rules taken out ----------------------------------------------------------------------------------


def nothing_is_noted(patch: pytest.MonkeyPatch) -> None:
    """What changes while it is copied is not copied again."""
    patch.setattr(exporting.Touched, "note", lambda self, parity, positions_U: None)


def parities_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    note = exporting.Touched.note

    def records(self: exporting.Touched, parity: bool, positions_U: np.ndarray) -> None:
        if not parity:
            note(self, parity, positions_U)

    patch.setattr(exporting.Touched, "note", records)


def it_does_not_stop(patch: pytest.MonkeyPatch) -> None:
    """What it gives is of one moment, and it goes on after that."""

    def hand_over(self: exporting.SlotExport, reply: Any) -> None:
        reply(self._all(self._touched(False, take=False), self._touched(True, take=False)))

    patch.setattr(exporting.SlotExport, "_on_hand_over", hand_over)


def turns_are_not_numbered(patch: pytest.MonkeyPatch) -> None:
    """An answer that was lost is not given again."""
    fetch = exporting.SlotExport._on_fetch_changed

    def newest(self: exporting.SlotExport, request: Any, reply: Any) -> None:
        self._turn = request.turn - 1
        fetch(self, request, reply)

    patch.setattr(exporting.SlotExport, "_on_fetch_changed", newest)


def a_late_copy_begins_anew(patch: pytest.MonkeyPatch) -> None:
    fetch = exporting.SlotExport._on_fetch_changed

    def begin(self: exporting.SlotExport, request: Any, reply: Any) -> None:
        if request.turn == 0:
            self._turn = -1
        fetch(self, request, reply)

    patch.setattr(exporting.SlotExport, "_on_fetch_changed", begin)


def it_never_goes_on(patch: pytest.MonkeyPatch) -> None:
    """Stopped, it waits for ever, although the server that it was to move to is gone."""
    end = exporting.SlotExport.end

    def stays(self: exporting.SlotExport) -> None:
        if not self.stopped:
            end(self)

    patch.setattr(exporting.SlotExport, "end", stays)


RULES = (
    nothing_is_noted,
    parities_are_not_noted,
    it_does_not_stop,
    turns_are_not_numbered,
    a_late_copy_begins_anew,
    it_never_goes_on,
)


@pytest.mark.parametrize("mutate", RULES, ids=lambda mutate: mutate.__name__)
def test_without_a_rule_something_differs(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, Callable[[], object]] = {}
    for seed in (0, 5, 14) if mutate is a_late_copy_begins_anew else range(8):  # in these a copy is late
        scenario = dataclasses.replace(MOVING, network_seed=seed, tier_frames=0)  # the seeds are of runs in memory
        if mutate is a_late_copy_begins_anew:  # with steps that change few records
            few = tuple(table.unplaced() for table in MOVING.tables)
            scenario = dataclasses.replace(scenario, pooled=False, asks_ahead=False, tables=few)
        if mutate is turns_are_not_numbered:  # with records that few steps change, and one answer that is lost
            more = {
                "tables": LARGER,
                "rebuild_chunk_bytes": 1 << 10,
                "rebuild_bytes_per_s": 1e5,
                "call_timeout_s": 0.03,
            }
            scenario = dataclasses.replace(scenario, **more)
        runs[f"seed {seed}"] = partial(check, scenario)
        oracle(scenario)
        if mutate not in (a_late_copy_begins_anew, turns_are_not_numbered):
            continue
        names = [kind for _, _, kind in check(scenario).messages]
        if mutate is a_late_copy_begins_anew:
            at = names.index("FetchChanged")
            runs[f"seed {seed}, twice"] = partial(check, scenario, Fault("duplicate", at))
        if mutate is turns_are_not_numbered:
            asked = [number for number, name in enumerate(names) if name == "FetchChanged"]
            runs |= {f"seed {seed}, {i} lost": partial(check, scenario, Fault("lose_answer", i)) for i in asked}
    if mutate is it_never_goes_on:
        at = [kind for _, _, kind in check_once().messages].index("HandOver")
        runs = {kind: partial(check_once, Fault(kind, at)) for kind in ("crash_sender", "crash_after")}
    mutate(monkeypatch)
    missed = first_failure(runs)
    print(missed)
    assert missed


def test_events_of_a_move_that_came_to_nothing() -> None:
    """Where the server dies that copies, the slot stays, and moves to the next that comes."""
    scenario = dataclasses.replace(MOVING, steps=24)
    names = [kind for _, _, kind in check(scenario).messages]
    fault = Fault("crash_sender", names.index("Copy"))
    run = check(scenario, fault)
    assert fault.fired
    told = kinds(run)
    assert told.index("stayed") < told.index("moved")
