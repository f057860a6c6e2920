"""Lives of processes and of connections: every fault of the control plane, at every message of whole short runs.

The cluster is the simulated one, its router and coordinator the real ones. Each run goes from nothing to trained:
servers and trainers join, all are told of each other, slots are placed, steps are made; in some, a server dies, or
trainers do.
At a message, of the control channel or of the data plane, one thing happens: a connection is reset, or all of them
are; a process dies, or ends by SIGTERM; the coordinator dies, or dies later, and one process hears nothing from now on.
The oracle is the undisturbed run, bit by bit. Whoever lives is not to be lost, and no run ends before its end: each
fault is within what the contract survives.

Alone, each fault comes at each message; in pairs, at two, of which every run tries a sample of its own seed (`-m slow`:
many more). What may not happen (one loss too many at a time) is counted as not applicable.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from harness import Scenario, SimulatedCluster, SimulationResult
from harness.membership import VirtualConnection, VirtualProcess
from harness.scenario import Load
from thinned import in_turns

from torch_ecrec.spec.job import CodeSpec, TableSpec

RESETS = ("reset", "reset all", "reset all, probes late")
STALLS = tuple(f"crash coordinator, deaf for {ms} ms" for ms in (20, 100))
CRASHES = ("crash", "leave", "crash coordinator", *STALLS)
KINDS = RESETS + CRASHES
HEALTHY = Scenario(steps=2, reborn=True, trainers_return=True)
EARLY = tuple((0, True, Load(i % 2, i, i + 5, change=True, writers="rows")) for i in range(6))
SCENARIOS = {
    "healthy": HEALTHY,
    "a server is lost": dataclasses.replace(HEALTHY, kills=((0, 1),)),
    "the trainers are lost": dataclasses.replace(HEALTHY, trainer_kills=((1, 1),)),
    "tables are loaded early": dataclasses.replace(HEALTHY, steps=1, overwrites=EARLY),
    "values are loaded": dataclasses.replace(HEALTHY, steps=1, loads=(Load(0, 0, 9), Load(1, 0, 5))),
}
SEED = 20261122
PAIRS = 20


@dataclasses.dataclass
class LifeFault:
    """At message `number` of a plane ("control" or "data"), something of `kind` happens to who is at one end of it."""

    kind: str
    plane: str
    number: int
    fired: bool = False
    skipped: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.plane} message {self.number}"


class Lives(SimulatedCluster):
    """A simulated cluster in which things happen to members."""

    def __init__(self, scenario: Scenario, faults: Sequence[LifeFault]) -> None:
        self.faults, self.leaving = faults, set[str]()
        super().__init__(scenario)
        send = self.network.send

        def send_and_see(sender: str, *rest: Any) -> None:
            number, alive = len(self.network.sent), sender not in self.network.dead
            send(sender, *rest)
            if alive:
                self.happen("data", number, self.process_of[sender])

        self.network.send = send_and_see  # type: ignore[method-assign]

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        self.happen("control", number, connection.process)

    def happen(self, plane: str, number: int, process: VirtualProcess) -> None:
        for fault in self.faults:
            if (fault.plane, fault.number) == (plane, number) and not fault.fired:
                fault.fired = True
                fault.skipped = not self.apply(fault.kind, process)

    def apply(self, kind: str, process: VirtualProcess) -> bool:
        """False if it may not be."""
        if kind == "crash coordinator":
            self.kill_coordinator()
        elif kind in STALLS:
            if process.connection is not None:
                process.connection.stalled = True
            self.network.clock.later(float(kind.split()[-2]) / 1000, self.kill_coordinator)
        elif kind == "reset":
            self.plane.reset([process.connection])
        elif kind in RESETS:
            self.plane.late_probes |= kind != "reset all"
            self.plane.reset([one.connection for one in self.plane.processes if not one.dead])
        elif process.dead or (process.name and not self.may_crash(process.name)):
            return False
        elif process.role == "server" and self.leaving and not self._is_rid_of(self.leaving):
            return False  # what that one hosts is about to be lost
        elif kind == "crash":
            self.kill(process)
        else:
            if process.role != "server" or not process.name:
                return False
            self.leaving.add(process.name)
            self.leave(process)
        return True

    def _is_rid_of(self, leaving: Collection[str]) -> bool:
        """All slots are whole, and none is where somebody leaves, with what it hosts."""
        return self.whole() and not any(place.server in leaving for place in self.slots_known)


@functools.cache
def undisturbed(name: str) -> SimulationResult:
    run = Lives(dataclasses.replace(SCENARIOS[name], spares=2), ()).go()
    run.check_against(run)
    return run


def live(name: str, faults: Sequence[LifeFault]) -> SimulationResult:
    """A run with faults, which must end as the one without. Raises AssertionError that names them."""
    point = f"{name}: {' and '.join(map(str, faults))}"
    cluster = Lives(dataclasses.replace(SCENARIOS[name], spares=2), faults)
    try:
        run = cluster.go()
        run.check_against(undisturbed(name))
    except Exception as error:
        events = "\n".join(str(event) for event in cluster.run.events[-12:])
        raise AssertionError(f"{point}: {type(error).__name__}: {error}\n{events}") from error
    if all(fault.kind in RESETS or fault.skipped for fault in faults):
        died = len(SCENARIOS[name].kills) + len(SCENARIOS[name].trainer_kills)
        lost = [event["member"] for event in run.events if event["event"] == "lost"]
        eras = sum(event["event"] == "era" for event in run.events)
        assert run.fenced == 0 and len(lost) <= died and eras <= died, f"{point}: {lost} are lost, {eras} eras"
    return run


def points(name: str) -> list[tuple[str, int]]:
    """Every message of the undisturbed run: plane, number."""
    run = undisturbed(name)
    return [("control", i) for i in range(run.control_messages)] + [("data", i) for i in range(len(run.messages))]


def sweep(name: str, kinds: Sequence[str], every: int = 1) -> Counter[str]:
    became: Counter[str] = Counter()
    for kind in kinds:
        for plane, number in points(name)[::every]:
            fault = LifeFault(kind, plane, number)
            live(name, [fault])
            assert fault.fired, f"{fault}: never came to pass"
            became[f"{kind}: {'not applicable' if fault.skipped else 'fired'}"] += 1
    return became


def sample(name: str, count: int, seed: int) -> Counter[str]:
    """Pairs of faults at two messages, drawn at random."""
    every = list(itertools.product(KINDS, points(name)))
    r, became = random.Random(f"{name} {seed}"), Counter[str]()
    for _ in range(count):
        faults = [LifeFault(kind, *point) for kind, point in r.sample(every, 2)]
        live(name, faults)
        became[f"{sum(fault.fired and not fault.skipped for fault in faults)} fired"] += 1
    return became


THIRD = in_turns("every", 3)


@THIRD
@pytest.mark.parametrize("kind", KINDS)
def test_everything_may_happen_at_every_message_of_a_run(kind: str, every: int) -> None:
    became = sweep("healthy", [kind], every)
    print(dict(became))
    number = len(points("healthy")[::every])
    assert became[f"{kind}: fired"] == number - became[f"{kind}: not applicable"] > 30 // every
    assert kind == "leave" or not became[f"{kind}: not applicable"], "only servers are told to end"


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_things_may_happen(name: str) -> None:
    became = sample(name, PAIRS, SEED)
    print(f"seed {SEED}: {dict(became)}")
    assert became["2 fired"] > PAIRS // 2


def test_members_that_lost_their_connection_come_back() -> None:
    """What the resets of the sweep rely on: there is something to be lost, and it is told again."""
    backs: Counter[str] = Counter()
    for plane, number in points("healthy")[::5]:
        run = live("healthy", [LifeFault("reset all", plane, number)])
        backs.update(event["event"] for event in run.events if event["event"] in ("back", "lost", "regathering"))
    assert backs["back"] > 50 and not backs["lost"] and not backs["regathering"], backs


class Together(Lives):
    """The hosts of two slots die together."""

    pair = (0, 1)

    def apply(self, kind: str, process: VirtualProcess) -> bool:
        for slot in self.pair if self.slots_known else ():
            self.kill(self.process_of[self.slots_known[slot].server])
        return bool(self.slots_known)


@pytest.mark.parametrize("pair", [(2, 3), (3, 5), (4, 5), (5, 0)])
def test_more_than_r_slots_lost_together_without_a_row_are_no_loss(pair: tuple[int, int]) -> None:
    """Three rows on six slots: on some, there is only parity, or nothing. Where no row is lost, training goes on."""
    scenario = Scenario(code=CodeSpec(6, 2, 1), tables=(TableSpec("t", 3, 4, -1.0, 1.0),), spares=3, steps=3)
    undisturbed = Lives(scenario, ()).go()
    for number in range(0, len(undisturbed.messages), 12):
        fault = LifeFault("together", "data", number)
        cluster = Together(scenario, [fault])
        cluster.pair = pair
        run = cluster.go()
        run.check_against(undisturbed)
        assert fault.fired and not fault.skipped and run.kills == 2


@THIRD
@pytest.mark.parametrize("kind", ["reset all", "crash coordinator", *STALLS])
def test_the_coordinator_dies_while_values_are_loaded_and_some_have_not_heard(kind: str, every: int) -> None:
    """Who hears for the first time from the next one that all is loaded, begins after what was loaded, as the others.

    (All other kinds at all messages of loading: `test_loading.py`.)
    """
    became = sweep("values are loaded", [kind], every)
    print(dict(became))
    assert became[f"{kind}: fired"] == len(points("values are loaded")[::every]) > 60 // every


class Noting(Lives):
    """Notes how many control messages there had been when the fault came."""

    said = 0

    def apply(self, kind: str, process: VirtualProcess) -> bool:
        self.said = self.plane.sent
        return super().apply(kind, process)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_may_happen_while_all_begin_anew(kind: str, every: int) -> None:
    """A trainer is lost in a load before the first step; then something else happens, at any message that follows."""
    name, became = "tables are loaded early", Counter[str]()
    sent = undisturbed(name).messages
    at = [number for number, (sender, _, kind) in enumerate(sent) if (sender, kind) == ("trainer-1", "Load")][-5]
    first = LifeFault("crash", "data", at)
    cluster = Noting(dataclasses.replace(SCENARIOS[name], spares=2), [first])
    anew = cluster.go()
    assert anew.loaded_again == 1
    later = [("control", i) for i in range(cluster.said, anew.control_messages)]
    later += [("data", i) for i in range(at + 1, len(anew.messages))]
    for plane, number in later[::every]:
        fault = LifeFault(kind, plane, number)
        live(name, [dataclasses.replace(first, fired=False, skipped=False), fault])
        assert fault.fired, f"{fault}: never came to pass"
        became["not applicable" if fault.skipped else "fired"] += 1
    print(dict(became))
    assert became["fired"] > (10 if every == 1 else 5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["a server is lost", "the trainers are lost"])
def test_everything_may_happen_at_every_message_of_a_recovery(name: str) -> None:
    print(dict(sweep(name, KINDS)))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_things_may_happen_at_many_more_messages(name: str) -> None:
    print(dict(sample(name, 2000, SEED + 1)))
