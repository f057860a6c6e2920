"""Coordinators that stand by: the lead moves on at every message of whole runs, and comes back to who has led before.

Router, election and coordinator are the real ones (`tests/harness/standbys.py`). At a message the leader is
killed, its host vanishes, it hangs, or it leaves the lead; a server may die before, with it or between; then the next
leader goes likewise, and the lead is with the first one's port again, where words of members and of tools have waited
since. The oracle is the undisturbed run, bit by bit: nobody is lost who lives, nobody fenced, no slot has two hosts, no
member is told a placement of the past, and what tools had said to another leader is not done.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from harness import Scenario, SimulationResult
from harness.links import COORDINATOR, Cut, Links
from harness.membership import VirtualProcess
from led_runs import BOTH, FORGETS, HOST, SERVER, Happening, LedRun, went
from schedules import first_failure

from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.coordinator.router import Router
from torch_ecrec.protocol import messages
from torch_ecrec.transport.reachability import SILENT_S

SCENARIO = Scenario(steps=4, reborn=True, spares=2)
SEED, SAMPLED = 20261124, 10
HEALS_S = 4.0
CHAINS: dict[str, tuple[str, ...]] = {
    "there and back": ("killed", "killed"),
    "it leads again": ("killed, leads again", "killed"),
    "a server dies between": ("killed", SERVER, "killed"),
    "a server dies before": (SERVER, "killed", "killed"),
    "a server dies with it": (BOTH, "killed"),
    "a server dies with it, another between": (BOTH, SERVER, "killed"),
    "it hangs": ("hangs", SERVER, "hangs"),
    "it hangs for a moment": ("hangs for a moment", SERVER, "hangs for a moment"),
    "its host vanishes": ("its host vanishes", SERVER, "its host vanishes"),
    "its host vanishes with a server": (HOST, "killed, late back"),
    "it is late back": ("killed, late back", SERVER, "killed, late back"),
    "it leaves": ("resigns", SERVER, "resigns"),
    "it hangs, then is killed": ("hangs", SERVER, "killed", "killed"),
    "etcd forgets": (FORGETS, SERVER, "killed"),
    "etcd forgets, twice": ("killed", FORGETS, "hangs", FORGETS, "killed"),
}


@functools.cache
def undisturbed() -> SimulationResult:
    run = LedRun(SCENARIO).go()
    run.check_against(run)
    return run


def happenings(chain: str, which: int = -1, plane: str = "control", number: int = 0) -> list[Happening]:
    """Of a chain one comes at a message, the others when all is quiet."""
    return [Happening(kind, plane, number) if i == which else Happening(kind) for i, kind in enumerate(CHAINS[chain])]


@functools.cache
def points(chain: str) -> list[tuple[int, str, int]]:
    """Every message of a chain that each of its happenings may come at."""
    spans = went(SCENARIO, happenings(chain), undisturbed()).spans
    return [(i, plane, at) for i, span in enumerate(spans) for plane, most in span.items() for at in range(most)]


def go(chain: str, point: tuple[int, str, int], coordinators: int = 2, tools: bool = True) -> LedRun:
    return went(SCENARIO, happenings(chain, *point), undisturbed(), coordinators=coordinators, tools=tools)


def sweep(chain: str, sampled: int | None, **how: Any) -> Counter[str]:
    """`sampled`: at so many messages; None: at all."""
    became: Counter[str] = Counter()
    every = points(chain)
    for point in every if sampled is None else random.Random(f"{SEED} {chain}").sample(every, sampled):
        run = go(chain, point, **how)
        became.update(runs=1, back=run.led[-1] in run.led[:-1], asked=run.asked, refused=run.refused)
    return became


@pytest.mark.parametrize("chain", CHAINS)
def test_the_lead_moves_on_and_comes_back(chain: str) -> None:
    became = sweep(chain, SAMPLED)
    print(f"seed {SEED}: {dict(became)}")
    assert became["runs"] == SAMPLED
    kinds = CHAINS[chain]
    if kinds[0] == "killed":
        assert became["back"] and became["asked"] >= SAMPLED and became["refused"] >= 6 * became["back"]


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    """It went with the leader's host, so that nobody can reach it; or died alone, and its host says so."""
    for kind in (HOST, BOTH):
        run = went(SCENARIO, [Happening(kind)], undisturbed())
        assert run.run.seconds < REGATHER_S, f"{kind}: {run.run.seconds:.1f} s"


class Late(LedRun):
    """It goes on until somebody is fenced. `regathered_s`: when the last leader had heard all that it waits for."""

    regathered_s = 0.0

    def settled(self) -> bool:
        return self.run.fenced > 0 and super().settled()

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        super().on_control(process, word)
        if isinstance(word, messages.Rejoined):
            self.regathered_s = self.network.clock.now_s


@pytest.mark.parametrize("at", [20, 45, 60])
def test_who_was_not_waited_for_and_lives_is_fenced(at: int) -> None:
    """A server is cut off from all as the leader's host vanishes. It comes back, and believes that it hosts a slot."""
    cluster = Late(SCENARIO, [Happening("its host vanishes", "data", at)])
    links = Links(cluster)
    for other in ("server-1", "server-2", "server-3", "server-4", "trainer-0", "trainer-1", COORDINATOR):
        links.cut_at(at, Cut("server-0", other, heals_s=HEALS_S))
    run = links.go()
    run.check_against(undisturbed())
    lost = [event["member"] for event in run.events if event["event"] == "lost"]
    assert cluster.happenings[0].fired and links.healed == 7 and lost == ["server-0"] and run.fenced == 1
    assert SILENT_S < cluster.regathered_s < REGATHER_S < HEALS_S


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("coordinators", [2, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_lead_moves_on_at_every_message(chain: str, coordinators: int) -> None:
    became = sweep(chain, None, coordinators=coordinators)
    print(dict(became))
    assert became["runs"] == len(points(chain)) > 150


def test_without_a_fault_one_leads_all_along() -> None:
    run = went(SCENARIO, [], undisturbed(), coordinators=3)
    assert run.led == [0] and run.run.coordinator_kills == 0 and not run.refused


# mutations ----------------------------------------------------------------------------------------


def members_of_before_are_heard(patch: pytest.MonkeyPatch) -> None:
    """Whoever enters is heard, whichever leader that was meant for."""
    before = Router._is_of_before
    entering = messages.Entering
    patch.setattr(Router, "_is_of_before", lambda self, word: not isinstance(word, entering) and before(self, word))


def tools_of_before_are_heard(patch: pytest.MonkeyPatch) -> None:
    before = Router._is_of_before
    entering = messages.Entering
    patch.setattr(Router, "_is_of_before", lambda self, word: isinstance(word, entering) and before(self, word))


def checked(tools: bool) -> dict[str, Callable[[], object]]:
    """The chains that come back, when all is quiet, and at some messages."""
    found: dict[str, Callable[[], object]] = {}
    for chain in ("a server dies between", "there and back"):
        for point in [(-1, "control", 0), *random.Random(SEED).sample(points(chain), 10)]:
            found[f"{chain} {point}"] = functools.partial(go, chain, point, tools=tools)
    return found


@pytest.mark.parametrize(
    ("mutation", "tools"), [(members_of_before_are_heard, False), (tools_of_before_are_heard, True)]
)
def test_a_rule_is_missed(
    mutation: Callable[[pytest.MonkeyPatch], None], tools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = checked(tools)  # without the mutation
    mutation(monkeypatch)
    failure = first_failure(schedules)
    print(mutation.__name__, failure)
    assert failure != ""
