"""Runs of the simulated cluster in which members are silent together, and nobody of them has died.

A `Point` says who is silent, how (without network, or frozen), from which message on and for how long, and whether a
server dies besides. `run_at` runs it, compares with the undisturbed run bit by bit, and looks at who was lost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, combinations

from cut_runs import Patient
from faults import THREE_TWO, TWO_ONE, oracle
from harness import Fault, Scenario, SimulatedCluster, SimulationResult
from harness.links import COORDINATOR, Links, Outage

from torch_ecrec.layout import repair

LEASE_S, STANDS_S = 3.0, 60.0
PLAIN = Scenario(code=TWO_ONE, steps=3, spares=1, lease_s=LEASE_S, standstill_s=STANDS_S, trainers_return=True)
SITUATIONS = {
    "steps": PLAIN,
    "no spare": dataclasses.replace(PLAIN, spares=0),
    "two parities": dataclasses.replace(PLAIN, code=THREE_TWO, steps=2),
    "no parity": dataclasses.replace(PLAIN, code=dataclasses.replace(TWO_ONE, protection="none"), spares=0),
    "a rebuild": dataclasses.replace(PLAIN, kills=((2, 1),), spares=2),
    "a going-back": dataclasses.replace(PLAIN, trainer_kills=((1, 1),)),
    "wait for a host": dataclasses.replace(PLAIN, without_spare="wait", reborn=True),
}
# around a complaint (1.5), the lease, the end of a member's connection (4), of the coordinator's (15)
SECONDS = (0.4, 1.2, 1.7, 2.2, 2.9, 3.3, 4.5, 8.0, 16.0)
AFTER_S = 8.0
DEATHS = (None, -20, 5, 60)  # of a server, in messages from the beginning of the silence


@dataclass(frozen=True)
class Point:
    """What happens in a run. `death`: see `DEATHS`."""

    situation: str
    message: int
    outage: Outage
    death: int | None = None


class Watched(Patient):
    """It goes on after the last step, until what follows of a silence has followed."""

    links: Links | None = None
    quiet_s = 0.0  # since when nothing fails

    def settled(self) -> bool:
        if self.links is not None and (self.links.cuts or self.links.frozen):
            self.quiet_s = self.network.clock.now_s
        return super().settled() and self.network.clock.now_s >= self.quiet_s + AFTER_S


def cluster_of(situation: str, death: int | None = None) -> Watched:
    faults = [] if death is None else [Fault("crash_receiver", max(0, death))]
    return Watched(SITUATIONS[situation], faults)


@functools.cache
def length_of(situation: str) -> int:
    """Requests of a run in which nobody is silent."""
    return len(cluster_of(situation).go().messages)


@functools.cache
def groups_of(situation: str) -> tuple[frozenset[str], ...]:
    """Every set of servers with slots, one or both trainers, and the coordinator, that may be silent together."""
    slots = SITUATIONS[situation].code.slots
    who = [*(f"server-{i}" for i in range(slots)), "trainer-0", "trainer-1", COORDINATOR]
    return tuple(map(frozenset, chain.from_iterable(combinations(who, size) for size in range(1, len(who) + 1))))


def count(situation: str) -> int:
    """How many points there are."""
    return length_of(situation) * len(groups_of(situation)) * 2 * len(SECONDS) * len(DEATHS)


def point(situation: str, number: int) -> Point:
    """One of them. What changes fastest is the death, then how and how long, the group, and last the message."""
    number, death = divmod(number, len(DEATHS))
    number, frozen = divmod(number, 2)
    number, seconds = divmod(number, len(SECONDS))
    groups = groups_of(situation)
    message, group = divmod(number, len(groups))
    return Point(situation, message, Outage(groups[group], SECONDS[seconds], bool(frozen)), DEATHS[death])


def run_at(point: Point) -> str:
    """What came of it: "nothing", "stood still", "lost", "not reached", "beyond".

    Raises:
        AssertionError: it differs, does not end, or somebody was lost who must not be; the text names the point.
    """
    death = None if point.death is None else point.message + point.death
    cluster = cluster_of(point.situation, death)
    cluster.links = links = Links(cluster)
    links.cut_at(point.message, point.outage)
    try:
        return _became(point, cluster, links, cluster.go())
    except Exception as error:
        events = "\n".join(str(event) for event in cluster.run.events[-20:])
        raise AssertionError(f"{point}: {type(error).__name__}: {error}\n{events}") from error


def _became(point: Point, cluster: SimulatedCluster, links: Links, run: SimulationResult) -> str:
    kinds = [event["event"] for event in run.events]
    lost = [event for event in run.events if event["event"] == "lost"]
    given_up = [event for event in lost if "its process is gone" not in event["why"]]
    if run.fatal is not None:  # one was given up while that could be repaired, and then another died
        assert point.death is not None and run.kills, f"ended, though nobody died: {run.fatal}"
        assert given_up and not may_not_lose(cluster, {e["member"] for e in given_up}), run.fatal
        return "beyond"
    run.check_against(oracle(cluster.scenario))
    if not links.cuts and not links.frozen and not links.healed:
        return "not reached"
    slots_lost = {slot for event in given_up for slot in event["slots"]}
    assert is_repairable(cluster, slots_lost), f"given up together: {given_up}"
    if point.outage.hosts == {COORDINATOR}:
        assert not given_up, "a coordinator that is cut off itself gives nobody up"
    silent_servers = {name for name in point.outage.hosts if name.startswith("server")}
    if point.death is None and may_not_lose(cluster, silent_servers):
        assert not [event for event in given_up if event["slots"]], "more than the code repairs were given up"
    return "stood still" if "stands_still" in kinds else "lost" if given_up else "nothing"


def may_not_lose(cluster: SimulatedCluster, servers: Collection[str]) -> bool:
    """Whether these, with the slots that they had at first, are more than the code repairs together."""
    placed = next((event["slots"] for event in cluster.run.events if event["event"] == "placed"), [])
    return not is_repairable(cluster, {i for i, (server, _) in enumerate(placed) if server in servers})


def is_repairable(cluster: SimulatedCluster, slots: Collection[int]) -> bool:
    return not any(repair.unrecoverable_bases(layout, slots) for layout in cluster.layouts)
