"""The coordinator dies as hosts are cut off, from all or from some alone; they come back early, late, or in turns.

What is cut heals before a new coordinator may give anybody up whose loss is beyond parity: so no run ends, each has the
bits of the undisturbed one, and of several hosts that come back within a second none is lost.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cut_runs import PLAIN, Patient
from faults import oracle
from harness import SimulationResult
from harness.links import COORDINATOR, Cut, Links

SCENARIO = dataclasses.replace(PLAIN, lease_s=10.0, steps=6)
SERVERS = ("server-0", "server-1", "server-2")
ALL = (*SERVERS, "server-3", "trainer-0", "trainer-1", COORDINATOR)
FROM = {
    "all": ALL,
    "the coordinator": (COORDINATOR,),
    "all but a trainer": tuple(one for one in ALL if one != "trainer-0"),
    "all but a server": tuple(one for one in ALL if one != "server-0"),
    "the coordinator and trainers": (COORDINATOR, "trainer-0", "trainer-1"),
}


PARTS = 7  # of all points; no part of what a point is has as many values, so each part meets all of them


@dataclass(frozen=True)
class Point:
    """What happens. `hosts`: which are cut off; `since`: from whom; `apart_s`: the second heals so much later."""

    message: int
    hosts: tuple[str, ...]
    since: str
    heals_s: float
    apart_s: float
    lost: bool
    dies_s: float

    @property
    def cuts(self) -> Iterator[Cut]:
        for i, host in enumerate(self.hosts):
            for other in FROM[self.since]:
                if other != host and (other not in self.hosts or self.hosts.index(other) > i):
                    yield Cut(host, other, heals_s=self.heals_s + i * self.apart_s, lost=self.lost)


def points() -> Iterator[Point]:
    for message in (3, 40, 90):
        for hosts in (("server-1",), ("server-1", "server-2"), ("server-0", "server-1", "server-2")):
            for since in FROM:
                for heals_s in (0.2, 1.0, 1.7, 2.0, 2.4, 2.6, 3.0, 5.0, 8.0):
                    for apart_s in (0.0, 0.1, 0.4):
                        for lost in (False, True):
                            for dies_s in (0.0, 0.3):
                                yield Point(message, hosts, since, heals_s, apart_s, lost, dies_s)


class Dying(Links):
    """The coordinator dies so long after the first cut."""

    def __init__(self, cluster: Patient, dies_s: float) -> None:
        super().__init__(cluster)
        self.dies_s: float | None = dies_s

    def cut(self, cut: Cut) -> None:
        super().cut(cut)
        if self.dies_s is not None:
            self.cluster.network.clock.later(self.dies_s, self.cluster.kill_coordinator)
            self.dies_s = None


def run_at(point: Point) -> SimulationResult:
    links = Dying(Patient(SCENARIO), point.dies_s)
    for cut in point.cuts:
        links.cut_at(point.message, cut)
    run = links.go()
    assert links.cuts or links.healed, "the fault fires"
    assert run.fatal is None, run.fatal
    run.check_against(oracle(SCENARIO))
    return run


def check(every: int, first: int = 0) -> Counter[str]:
    became: Counter[str] = Counter()
    for point in [*points()][first::every]:
        try:
            run = run_at(point)
            lost = [event["member"] for event in run.events if event["event"] == "lost" and event["slots"]]
            together = run.coordinator_kills and len(point.hosts) > 1
            assert not together or not {*lost} & {*point.hosts}, f"lost: {lost}"
        except Exception as error:
            raise AssertionError(f"{point}: {type(error).__name__}: {error}") from error
        became["over" if not run.coordinator_kills else "lost" if lost else "kept"] += 1  # training was over before
    return became


def test_hosts_that_are_cut_off_as_the_coordinator_dies() -> None:
    found = check(101)
    assert found["kept"] > 8 and found["lost"] > 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(PARTS))
def test_hosts_that_are_cut_off_as_the_coordinator_dies_at_all_points(part: int) -> None:
    found = check(PARTS, part)
    assert found["kept"] > 500 / PARTS and found["lost"] > 100 / PARTS
