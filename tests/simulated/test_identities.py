"""Other coordinators at the address of a cluster, and other launches in it, at every message of whole short runs.

In place of the coordinator comes one that was started with another code, or one that leads another cluster; then one
as it should be. Or the trainers of another launch come, also just before those of the first die. The oracle is the
undisturbed run, bit by bit: nobody is lost by it, no step is made again that need not be, and nobody else trains.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from harness.membership import HELD_S, Center, VirtualProcess
from router_harness import Process
from test_lives import SCENARIOS, LifeFault, Lives, points, undisturbed
from thinned import in_turns

from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.errors import JoinRefused
from torch_ecrec.spec.job import CodeSpec

OTHER_CODES = {"another code": CodeSpec(4, 2, 2), "another cluster": None, "another cluster, code": CodeSpec(4, 3, 1)}
SECOND = ("second launch", "second launch, then a trainer dies")
WRONG_S = 0.4  # virtual: until the right coordinator is in the place of the wrong one, at the latest
TERM = 500  # of the wrong coordinator: names of its own
DIES_S = 0.1  # from the second launch to the death of a trainer of the first
EVERY = in_turns("every", 11)


class Disturbed(Lives):
    """A cluster that others take for theirs.

    Attributes:
        refused_to_lead: so many wrong coordinators did.
        intruders: trainers of the second launch.
    """

    def __init__(self, *args: Any) -> None:
        self.wrong, self.refused_to_lead = "", 0
        self.intruders: list[VirtualProcess] = []
        self.refusals: list[str] = []
        super().__init__(*args)
        self._right = self.plane.new_router
        self.plane.new_router = self._next_router  # type: ignore[method-assign]

    def apply(self, kind: str, process: VirtualProcess) -> bool:
        if kind in OTHER_CODES:
            if not self.plane.lives or not self._all_know:
                return False
            self.wrong = kind
            self.kill_coordinator()
            return True
        there = [one for one in getattr(self, "ranks", []) if one.name and not one.dead]
        if len(there) < self.scenario.trainers or self.ending or self.scripts.done:
            return False
        job = self.scenario.job
        for rank in range(self.scenario.trainers):
            self.intruders.append(self.plane.start("trainer", rank, job, launch="another", relaunched=True))
        if kind != "second launch":
            victim = there[0]
            self.network.clock.later(DIES_S, lambda: self.may_crash(victim.name) and self.kill(victim))
        return True

    @property
    def _all_know(self) -> bool:
        """Where slots are: a server that does not has nothing to keep, and may be taken for another cluster's spare."""
        nodes = [*self.hosts.items(), *self.clients.items()]
        return bool(nodes) and all(node.placement for name, node in nodes if name not in self.network.dead)

    def _next_router(self, center: Center, run: str, again: bool, led: int = 0) -> Router:
        kind, self.wrong = self.wrong, ""
        if not kind:
            return self._right(center, run, again, led)
        checkpoint = dataclasses.replace(self.plane.settings.checkpoint, run="another")
        code = OTHER_CODES[kind] or self.scenario.code
        settings: ClusterSettings = dataclasses.replace(
            self.plane.settings, code=code, checkpoint=checkpoint, spares=0, term=TERM
        )
        now_s = self.network.clock.now_s
        router = Router(
            settings,
            probe=lambda *_: None,
            announce=lambda _: None,
            refuse_to_lead=self._give_way,
            joins_from_s=now_s + HELD_S if kind == "another code" else 0.0,
        )
        if kind != "another code":
            lead(router, code, now_s)
        self.network.clock.later(WRONG_S, lambda: self._end(router))
        return router

    def _give_way(self, why: str, code: CodeSpec) -> None:
        assert code == self.scenario.code, why
        self.refused_to_lead += 1
        router = self.plane.router
        self.network.clock.later(0.05, lambda: self._end(router))

    def _end(self, router: Router) -> None:
        if self.plane.router is router:
            self.kill_coordinator()

    def on_welcome(self, process: VirtualProcess) -> None:
        assert process not in self.intruders, "the second launch trains"
        super().on_welcome(process)

    def on_over(self, process: VirtualProcess, error: BaseException) -> None:
        if process in self.intruders:
            self.refusals.append(str(error))
            self.plane.end(process)
        elif isinstance(error, JoinRefused) and process.role == "trainer":
            self.kill(process)  # torchrun starts it again
        else:
            super().on_over(process, error)

    @property
    def strangers(self) -> int:
        """So often did a member meet the coordinator of another cluster."""
        return sum(process.strangers for process in self.plane.processes)


def lead(router: Router, code: CodeSpec, now_s: float) -> None:
    """It has members of its own, and they train."""
    others = [*(Process("server") for _ in range(code.slots)), *(Process("trainer", rank) for rank in range(2))]
    for one in others:
        router.on_message(one.wire, {"type": "join", **one.hello}, now_s)
    for one in others:
        router.on_message(one.wire, {"type": "listens", "endpoint": "here"}, now_s)
    assert router.core.epoch == 1


def disturb(name: str, kind: str, plane: str, number: int) -> Disturbed:
    """A run in which that happens, and which must end as the one without. Raises AssertionError that names it."""
    fault = LifeFault(kind, plane, number)
    cluster = Disturbed(dataclasses.replace(SCENARIOS[name], spares=2), [fault])
    try:
        run = cluster.go()
        run.check_against(undisturbed(name))
        assert fault.fired
        died = len(SCENARIOS[name].kills) + len(SCENARIOS[name].trainer_kills) + (kind == SECOND[1])
        lost = {event["member"] for event in run.events if event["event"] == "lost"}
        # One that comes in place of a dead one, and joined the wrong coordinator, keeps nothing and joins anew.
        assert len(lost) <= died and run.fenced <= died, f"{lost} are lost, {run.fenced} fenced"
        if not SCENARIOS[name].trainer_kills and kind != SECOND[1]:
            assert not any(event["event"] == "era" for event in run.events), "the trainers went back"
    except Exception as error:
        events = "\n".join(str(event) for event in cluster.run.events[-12:])
        raise AssertionError(f"{name}: {fault}: {type(error).__name__}: {error}\n{events}") from error
    return cluster


def sweep(name: str, kind: str, every: int) -> Counter[str]:
    became: Counter[str] = Counter()
    for plane, number in points(name)[::every]:
        cluster = disturb(name, kind, plane, number)
        became["skipped" if cluster.faults[0].skipped else "fired"] += 1
        became["refused to lead"] += cluster.refused_to_lead
        became["met a stranger"] += cluster.strangers
        became["waited"] += sum(bool(one.waits) for one in cluster.intruders)
    print(f"{name}, {kind}: {dict(became)}")
    return became


@EVERY
@pytest.mark.parametrize("name", ["healthy", "a server is lost", "the trainers are lost"])
@pytest.mark.parametrize("kind", OTHER_CODES)
def test_a_coordinator_of_another_cluster_costs_nothing(name: str, kind: str, every: int) -> None:
    became = sweep(name, kind, every)
    assert became["fired"] >= 30 // every and became["met a stranger"] >= became["fired"]
    assert (became["refused to lead"] > 0) is (kind == "another code")


@EVERY
@pytest.mark.parametrize("name", ["healthy", "a server is lost", "the trainers are lost", "values are loaded"])
@pytest.mark.parametrize("kind", SECOND)
def test_a_second_launch_never_trains(name: str, kind: str, every: int) -> None:
    became = sweep(name, kind, every)
    assert became["waited"] == 2 * became["fired"] >= 40 // every


class AnotherEachTime(Lives):
    """Whoever starts the trainers again does so as another launch: a person, after the end of the one before."""

    starts = 0

    def _start_trainers(self) -> None:
        self.starts += 1
        super()._start_trainers()

    def launch(self) -> tuple[str, bool]:
        return f"launch {self.starts}", False


@EVERY
def test_another_launch_goes_on_once_the_first_has_died(every: int) -> None:
    """At each message a process dies; where it was a trainer, the next trainers are of another launch."""
    others = 0
    for plane, number in points("healthy")[::every]:
        cluster = AnotherEachTime(dataclasses.replace(SCENARIOS["healthy"], spares=2), [])
        cluster.faults = [LifeFault("crash", plane, number)]
        run = cluster.go()
        run.check_against(undisturbed("healthy"))
        others += cluster.starts - 1
    assert others > 20 // every
