"""Runs of the simulated cluster with coordinators that stand by, in which one thing after another happens.

    run = LedRun(STEPS, [Happening("killed", "control", 17), Happening("a server dies"), Happening("killed")])
    run.go()
    run.check(undisturbed)

A happening comes at a message, counted from when whoever leads has begun to, or from the one before if that changed no
leader; at the latest once nothing is under way any more. Trainers wait after a step of their own for each that is still
to come, so that training goes on between them and after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness import Scenario, SimulatedCluster, SimulationResult
from harness.links import BEAT_S
from harness.membership import VirtualConnection, VirtualProcess
from harness.standbys import AGAIN_S, FASTER, TTL_S, Standby, StandbyPlane

from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.succession import UNKNOWN_HOST
from torch_ecrec.coordinator.suspicion import SILENT_LEAST_S
from torch_ecrec.protocol import messages

LONG = 1 << 30  # later than any message: once nothing is under way
HUNG_S = 2.5 * TTL_S / FASTER  # until after another leads
GONE_S = 4 * TTL_S / FASTER
OTHERS_LEAD_S = 1.5 * TTL_S / FASTER  # what it looks for first takes longer than its lease
SOON_S = 0.01
LEADERS = (
    "killed",
    "killed, leads again",
    "killed, late back",
    "its host vanishes",
    "hangs",
    "hangs for a moment",
    "resigns",
)
FOLLOWED = tuple(kind for kind in LEADERS if kind != "hangs for a moment")  # after which another leads
SERVER = "a server dies"
BOTH = "killed, and a server dies"
HOST = "its host vanishes, with a server"
FORGETS = "etcd forgets"  # all that it knew, and coordinators, which notice it, end and are started again
LOSE = (SERVER, BOTH, HOST)  # a server
AT_ONCE = ("killed", "killed, leads again", BOTH)  # its port is there again before anybody else leads


@dataclasses.dataclass
class Happening:
    """At message `number` of a plane ("control" or "data")."""

    kind: str
    plane: str = "control"
    number: int = LONG
    fired: bool = False

    def __str__(self) -> str:
        return self.kind + (f" at {self.plane} message {self.number}" if self.number < LONG else " when all is quiet")


class LedRun(SimulatedCluster):
    """One of them.

    Args:
        coordinators: how many there are.
        tools: where a leader is killed or hangs, tools look who leads, and say "stop" and "drain" to it, just then.

    Attributes:
        asked: how many words of tools went to one that did not act.
        led: numbers of the ports of who has led, in order.
        spans: how many messages of each plane came before each happening, counted as `Happening.number` is.
    """

    def __init__(
        self, scenario: Scenario, happenings: Sequence[Happening] = (), coordinators: int = 2, tools: bool = True
    ) -> None:
        self.happenings, self._tools = list(happenings), tools
        self._next, self._counted = 0, {"control": 0, "data": 0}
        self._waits_for = 0  # leaderships
        self.asked, self.killed = 0, set[str]()
        self.led: list[int] = [0]
        self.spans: list[dict[str, int]] = []
        self._routers: list[Router] = []
        self._vanished: list[str] = []
        self._steps: dict[int, int] = {}
        super().__init__(dataclasses.replace(scenario, coordinators=coordinators))
        self.standbys.on_leadership = self._on_leadership
        self._routers.append(self.plane.router)
        send = self.network.send

        def send_and_see(*what: Any) -> None:
            send(*what)
            self._see("data", len(self.network.sent))

        self.network.send = send_and_see  # type: ignore[method-assign]

    @property
    def standbys(self) -> StandbyPlane:
        assert isinstance(self.plane, StandbyPlane)
        return self.plane

    @property
    def refused(self) -> int:
        """How many words any leader did not hear."""
        return sum(router.refused for router in self._routers)

    # when ---------------------------------------------------------------------------------------

    @property
    def _pending(self) -> bool:
        return self._next < len(self.happenings)

    @property
    def _led(self) -> bool:
        """Somebody leads since what happened last."""
        return self.standbys.leaderships >= self._waits_for

    def _on_leadership(self, center: Standby) -> None:
        self.led.append(center.number)
        self._routers.append(center.router)
        self._count_from_here()

    def _count_from_here(self) -> None:
        self._counted = {"control": self.plane.sent, "data": len(self.network.sent)}

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        self._see("control", number + 1)

    def _see(self, plane: str, sent: int) -> None:
        if not self._pending or not self._led:
            return
        happening = self.happenings[self._next]
        if happening.plane == plane and sent - self._counted[plane] > happening.number:
            self._fire(happening)

    def on_event(self, number: int) -> None:
        if self._pending and self._quiet():
            self._fire(self.happenings[self._next])

    def _quiet(self) -> bool:
        """Nothing is under way: all trainers wait for what happens next."""
        trained = len(self._steps) == self.scenario.trainers and all(self._holds(i) for i in self._steps)
        if not trained or not self._led or self.coordinator.regathering or not self.whole():
            return False
        for client in self.clients.values():
            client.run(client.settle)  # who waits here asked for rows ahead, perhaps, and sends nothing more
        return all(client.all_survive for client in self.clients.values())

    def _holds(self, trainer: int) -> bool:
        return self._steps.get(trainer, 0) >= min(1 + self._next, self.scenario.steps)

    def _after_step(self, trainer: int, step: int) -> None:
        self._steps[trainer] = step
        super()._after_step(trainer, step)

    def _run_trainers(self) -> bool:
        self.scripts.go_on(lambda rank: self.ranks[rank].dead or (self._pending and self._holds(rank)))
        return self.scripts.done

    def settled(self) -> bool:
        return not self._pending and super().settled()

    # what ---------------------------------------------------------------------------------------

    def _fire(self, happening: Happening) -> None:
        center = self.standbys.leading
        victim = self._victim() if happening.kind in LOSE else None
        if (center is None and happening.kind != SERVER) or (victim is None and happening.kind in LOSE):
            return  # not now: when all is quiet
        happening.fired, self._next = True, self._next + 1
        now = {"control": self.plane.sent, "data": len(self.network.sent)}
        self.spans.append({plane: now[plane] - self._counted[plane] for plane in now})
        self._count_from_here()
        if happening.kind in (*FOLLOWED, BOTH, HOST, FORGETS):
            self._waits_for = self.standbys.leaderships + 1
        if victim is not None:
            self.killed.add(victim)
            self.network.kill(victim)
        if happening.kind == HOST and victim is not None:
            self._vanished.append(victim)
            self.network.clock.later(SILENT_LEAST_S / FASTER, self._beat)
        if center is not None and happening.kind != SERVER:
            self._end_leader(happening.kind, center)

    def _victim(self) -> str | None:
        """The host of a slot that may be lost."""
        hosts = [place.server for place in self.slots_known]
        return next((name for name in hosts if self.may_crash(name)), None)

    def _end_leader(self, kind: str, center: Standby) -> None:
        plane = self.standbys
        if kind == FORGETS:
            plane.etcd.forget()
        elif kind == "hangs for a moment":
            plane.stop(center, 0.4 * TTL_S / FASTER)
        elif kind == "hangs":
            plane.stop(center, HUNG_S)
        elif kind == "resigns":
            plane.resign(center, AGAIN_S, OTHERS_LEAD_S)
        else:
            back_s = AGAIN_S if kind in AT_ONCE else GONE_S
            looks_in_s = OTHERS_LEAD_S if kind in ("killed", BOTH) else 0.0
            plane.end_coordinator(center, back_s, kind in ("its host vanishes", HOST), looks_in_s)
        if self._tools and kind in (*AT_ONCE, "hangs"):
            self.network.clock.later(SOON_S, self._ask)

    def _beat(self) -> None:
        """All others have noticed that they cannot reach who is on that host, and say so in every heartbeat."""
        for process in self.plane.processes:
            if process.name and not process.dead:
                self.plane.tell(process, messages.Beat(unreachable=self._vanished))
        self.network.clock.later(BEAT_S / FASTER, self._beat)

    def _ask(self) -> None:
        """Tools have looked who leads, and speak to that one: it does not lead any more, and is there again."""
        server = next((place.server for place in self.slots_known if place.server), "server-0")
        for word in ({"type": "stop"}, {"type": "drain", "what": server, "undo": False}):
            if self.standbys.leading is None:
                self.asked += self.standbys.ask(word) is not None

    # what must hold -----------------------------------------------------------------------------

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        """Nobody is told a placement by one that leads which is older than what he knows."""
        node = self.hosts.get(process.name) or self.clients.get(process.name)
        if isinstance(word, messages.Placed) and node is not None and node.placement is not None:
            told, known = word.placement.epoch, node.placement.epoch
            assert told >= known, f"{process.name} knows placement {known}, and is told {told}"
        super().on_control(process, word)

    def verify(self) -> None:
        super().verify()
        hosts: dict[tuple[int, int], str] = {}
        for name, host in self.hosts.items():
            for slot in host.slots.values() if name not in self.network.dead else ():
                key = slot.index, slot.incarnation
                other = hosts.setdefault(key, name)
                assert other == name, f"(slot, incarnation) {key} is at {other} and at {name}"

    def check(self, undisturbed: SimulationResult) -> None:
        """It ended as the run without anything did, and nobody was lost but who died. Raises AssertionError."""
        assert all(one.fired for one in self.happenings), [str(one) for one in self.happenings if not one.fired]
        self.run.check_against(undisturbed)
        lost = [event["member"] for event in self.run.events if event["event"] == "lost"]
        allowed = {*self.killed, UNKNOWN_HOST} if self.killed else set()
        assert set(lost) <= allowed and not self.run.fenced, f"{lost} are lost, {self.run.fenced} fenced"
        assert not any(event["event"] in ("era", "drained") for event in self.run.events)
        assert not any(member.draining for member in self.coordinator.members.values()), "a drain of before is heard"
        assert self.run.fatal is None


def went(scenario: Scenario, happenings: Sequence[Happening], undisturbed: SimulationResult, **how: Any) -> LedRun:
    """A run that was good. Raises AssertionError that names what happened in it."""
    cluster = LedRun(scenario, happenings, **how)
    try:
        cluster.go()
        cluster.check(undisturbed)
    except Exception as error:
        events = "\n".join(str(event) for event in cluster.run.events[-12:])
        point = " and ".join(map(str, happenings))
        raise AssertionError(f"{point}: {type(error).__name__}: {error}\n{events}") from error
    return cluster
