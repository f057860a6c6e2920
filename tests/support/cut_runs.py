"""Runs of the simulated cluster in which a link fails, alone or with a crash, in the middle of whatever goes on.

A `Point` says what happens: the situation (a rebuild, a move, ...), the link and when it is cut, whether it heals, and
who dies besides. `run_at` runs it, and compares with the undisturbed run, bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from captured import Checkpointed, check_result, with_checkpoints
from faults import THREE_TWO, TWO_ONE, oracle
from harness import Fault, Scenario, SimulatedCluster, SimulationResult
from harness.links import COORDINATOR, Cut, Links
from harness.network import CRASH_COORDINATOR
from harness.scenario import Load

LEASE_S, STANDS_S = 3.0, 8.0
BLIP_S, LONG_S = 0.4, 3.0  # before anybody complains; after somebody was fenced
PLAIN = Scenario(code=TWO_ONE, steps=3, spares=1, lease_s=LEASE_S, standstill_s=STANDS_S)
OVERWRITES = ((0, True, Load(0, 0, 9, writers="rows")), (1, False, Load(0, 4, 12, change=True)))
SITUATIONS = {
    "steps": PLAIN,
    "two parities": dataclasses.replace(PLAIN, code=THREE_TWO, steps=2),
    "a rebuild": dataclasses.replace(PLAIN, kills=((2, 1),), spares=2),
    "a going-back": dataclasses.replace(PLAIN, trainer_kills=((1, 1),), trainers_return=True),
    "initial values": dataclasses.replace(PLAIN, steps=1, loads=(Load(0, 0, 9), Load(0, 4, 12, change=True))),
    "a load": dataclasses.replace(PLAIN, steps=2, overwrites=OVERWRITES),
    "a move": dataclasses.replace(
        PLAIN, steps=16, kills=((0, 1),), spares=0, reborn=True, rebuild_chunk_bytes=64, rebuild_bytes_per_s=1e4
    ),
    "a checkpoint": dataclasses.replace(with_checkpoints(PLAIN), steps=8, touch=0.1, spares=2),
}
CRASHES = ("crash_receiver", "crash_sender", "crash_after", CRASH_COORDINATOR)


@dataclass(frozen=True)
class Point:
    """What happens in a run. `crash`: kind, and how many requests after the cut (or before it)."""

    situation: str
    message: int
    cut: Cut
    crash: tuple[str, int] | None = None

    @property
    def faults(self) -> list[Fault]:
        return [] if self.crash is None else [Fault(self.crash[0], max(0, self.message + self.crash[1]))]


def cluster_of(situation: str, faults: Sequence[Fault] = ()) -> SimulatedCluster:
    scenario = SITUATIONS[situation]
    if any(fault.kind != CRASH_COORDINATOR for fault in faults):
        scenario = dataclasses.replace(scenario, trainers_return=True)
    return Checkpointed(scenario, faults) if scenario.checkpoint.url else Patient(scenario, faults)


class Patient(SimulatedCluster):
    """A server that was to die at a step, and may not by the end of training, does not: a cut has taken its spare."""

    def on_event(self, number: int) -> None:
        if self.kills and self.scripts.done and self.settled():
            self.kills.clear()


def check(cluster: SimulatedCluster) -> SimulationResult:
    """Runs it. If it has not stopped, it is what the undisturbed one is, and so is each checkpoint that counts."""
    run = cluster.go()
    if run.fatal is None:
        if isinstance(cluster, Checkpointed):
            check_result(cluster, run)
        else:
            run.check_against(oracle(cluster.scenario))
    return run


@functools.cache
def length_of(situation: str) -> int:
    """Requests of a run in which no link fails."""
    return len(check(cluster_of(situation)).messages)


def links_of(situation: str) -> list[tuple[str, str, bool]]:
    """Between any two that talk, each way and both; a spare, or a server that comes, is one of them."""
    scenario = SITUATIONS[situation]
    servers = [f"server-{i}" for i in range(scenario.code.slots + max(1, scenario.spares))]
    others = [*servers, *(f"trainer-{i}" for i in range(scenario.trainers)), COORDINATOR]
    found = []
    for i, one in enumerate(servers):
        for other in others[i + 1 :]:
            found += [(one, other, False), (one, other, True), (other, one, True)]
    found += [("trainer-1", COORDINATOR, False), ("trainer-1", COORDINATOR, True), (COORDINATOR, "trainer-1", True)]
    return found


ENDS = ((None, False), (BLIP_S, False), (BLIP_S, True), (LONG_S, False), (LONG_S, True))
OFFSETS = (-20, 0, 5, 25, 80, 200)


def count(situation: str, crashes: bool) -> int:
    """How many points there are."""
    pairs = len(CRASHES) * len(OFFSETS) if crashes else 1
    return length_of(situation) * len(links_of(situation)) * len(ENDS) * pairs


def point(situation: str, number: int, crashes: bool) -> Point:
    """One of them. What changes fastest is the crash, then how the cut ends, the link, and last the message."""
    crash = None
    if crashes:
        number, i = divmod(number, len(CRASHES))
        number, j = divmod(number, len(OFFSETS))
        crash = CRASHES[i], OFFSETS[j]
    number, i = divmod(number, len(ENDS))
    links = links_of(situation)
    message, j = divmod(number, len(links))
    return Point(situation, message, Cut(*links[j], *ENDS[i]), crash)


def run_at(point: Point) -> str:
    """What came of it: "fenced", "lost", "unnoticed", "not reached", "beyond".

    Raises:
        AssertionError: it differs, or does not end; the text names the point.
    """
    faults = point.faults
    cluster = cluster_of(point.situation, faults)
    links = Links(cluster)
    links.cut_at(point.message, point.cut)
    try:
        if is_beyond(point, run := check(cluster)):
            return "beyond"
        return became(point, links, run)
    except Exception as error:
        events = "\n".join(str(event) for event in cluster.run.events[-16:])
        raise AssertionError(f"{point}: {type(error).__name__}: {error}\n{events}") from error


def is_beyond(point: Point, run: SimulationResult) -> bool:
    """It stopped, and had to: a server that the coordinator does not hear of is waited for, and lost in the end, with
    another loss more than one parity repairs. Raises AssertionError if it need not have."""
    if run.fatal is None:
        return False
    lost = [event for event in run.events if event["event"] == "lost" and event["slots"]]
    assert COORDINATOR in (point.cut.one, point.cut.other) and point.cut.heals_s != BLIP_S, run.fatal
    assert sum(len(event["slots"]) for event in lost) > 1 and "lost together" in run.fatal, run.fatal
    return True


def became(point: Point, links: Links, run: SimulationResult) -> str:
    """What came of a run that is right, and what must be so of it besides."""
    kinds = Counter(event["event"] for event in run.events)
    cuts = [event for event in run.events if event["event"] == "cut"]
    assert all(name.startswith("server") for event in cuts for name in event["fenced"]), "a trainer was fenced"
    fenced = sum(bool(event["fenced"]) for event in cuts)
    assert fenced <= 1, "more than one was fenced for one cut"
    if point.cut.heals_s == BLIP_S:
        assert not cuts, "it healed before anybody could know"
        died = run.kills + run.trainer_kills + run.coordinator_kills
        assert died or not kinds["lost"], "somebody was lost though nobody died"
    if not links.cuts and not links.healed:
        return "not reached"
    return "fenced" if fenced else "lost" if kinds["lost"] else "unnoticed"
