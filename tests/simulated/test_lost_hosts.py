"""A host with several servers dies, all at one moment: what the code repairs of slots, it repairs of hosts."""

from __future__ import annotations

import pytest
from faults import undisturbed
from harness import Scenario, SimulatedCluster
from harness.simulation import SimulationResult

from torch_ecrec.spec.job import CodeSpec

STEPS = 4
EVERY, LOOK_EVERY = 31, 20  # events of a run between two moments that are tried; between two looks of the verifier


class Hosts(SimulatedCluster):
    """Dies: the host of slot 0, once so many events have been, and as soon as all is whole."""

    def __init__(self, scenario: Scenario, at: int) -> None:
        super().__init__(scenario)
        self.at, self.events, self.dead = at, 0, ""

    def verify(self) -> None:
        self.events += 1
        if self.events % LOOK_EVERY == 0:
            super().verify()
        if self.events < self.at or self.dead or not self.slots_known or not self.whole():
            return
        self.dead = self.domain_of(self.slots_known[0].server)
        for name, process in list(self.process_of.items()):
            if process.role == "server" and process.domain == self.dead and name not in self.network.dead:
                self.network.kill(name)

    def domain_of(self, server: str) -> str:
        return self.process_of[server].domain


def run(code: CodeSpec, domains: tuple[str, ...], spares: int, at: int) -> tuple[Hosts, SimulationResult]:
    cluster = Hosts(Scenario(code=code, steps=STEPS, spares=spares, domains=domains, verify_every=1), at)
    return cluster, cluster.go()


@pytest.mark.parametrize(
    ("code", "domains", "spares"),
    [
        (CodeSpec(3, 2, 1), ("h1", "h2", "h3"), 3),  # two servers a host: one of them a spare
        (CodeSpec(3, 2, 1), ("h1", "h1", "h2", "h2", "h3", "h3"), 3),
        (CodeSpec(4, 2, 2), ("h1", "h1", "h2", "h2", "h3", "h3"), 2),  # with two slots on the host that dies
    ],
    ids=["in turns", "side by side", "two slots a host"],
)
def test_at_any_moment_and_nothing_differs(code: CodeSpec, domains: tuple[str, ...], spares: int) -> None:
    healthy, result = run(code, domains, spares, 10**9)
    result.check_against(undisturbed(code, STEPS))
    fired = 0
    for at in range(1, healthy.events, EVERY):
        cluster, result = run(code, domains, spares, at)
        assert result.fatal is None
        result.check_against(undisturbed(code, STEPS))
        fired += bool(cluster.dead)
        if cluster.dead:
            assert cluster.dead not in {cluster.domain_of(place.server) for place in cluster.slots_known}
    assert fired > 5


def test_without_domains_a_host_may_be_more_than_parity_repairs() -> None:
    """The same servers, of which the coordinator does not know where they are."""
    code, where = CodeSpec(3, 2, 1), ("h1", "h1", "h2", "h2", "h3", "h3")

    class Untold(Hosts):
        def domain_of(self, server: str) -> str:
            return where[self.process_of[server].number]

        def verify(self) -> None:
            super().verify()
            if self.dead and self.run.fatal is None:
                for name, process in list(self.process_of.items()):
                    if process.role == "server" and where[process.number] == self.dead:
                        if name not in self.network.dead:
                            self.network.kill(name)

    cluster = Untold(Scenario(code=code, steps=STEPS, spares=3, verify_every=1), 30)
    result = cluster.go()
    assert result.fatal is not None and "are lost together" in result.fatal
