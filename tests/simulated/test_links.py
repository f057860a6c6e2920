"""Links that fail in the simulated cluster: a cut at every message of a short run, between every two that talk.

Training goes on to the bits of the undisturbed run, whoever is fenced; nothing hangs. That a cut was one is looked at:
the coordinator tells of it, or of a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from faults import TWO_ONE, oracle
from harness import Scenario, SimulatedCluster, SimulationResult
from harness.links import COORDINATOR, Cut, Links

from torch_ecrec.coordinator import departures
from torch_ecrec.coordinator.placement import SlotTable
from torch_ecrec.coordinator.suspicion import Suspicion

SCENARIO = Scenario(code=TWO_ONE, steps=3, spares=1)
HOSTS = ["server-0", "server-1", "server-2"]
WAYS = ("both", "there", "back")
EVERY = pytest.mark.parametrize(
    "every", [29, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])], ids=["some", "all"]
)


def cut(scenario: Scenario, message: int, one: str, other: str, way: str = "both") -> SimulationResult:
    """A run with that link cut from that message on, equal to the undisturbed one."""
    links = Links(SimulatedCluster(scenario))
    links.cut_at(message, Cut(*((one, other) if way != "back" else (other, one)), one_way=way != "both"))
    run = links.go()
    assert links.cuts, f"no cut at {message}"
    run.check_against(oracle(scenario))
    return run


def points(every: int, others: list[str], ways: tuple[str, ...] = WAYS) -> Iterator[tuple[int, str, str, str]]:
    messages = len(oracle(SCENARIO).messages)
    found = [
        (m, one, other, way)
        for m in range(messages)
        for one in HOSTS
        for other in others
        for way in ways
        if one < other or other not in HOSTS
    ]
    yield from found[::every]


def became(run: SimulationResult) -> str:
    kinds = Counter(event["event"] for event in run.events)
    assert kinds["cut"] <= 1, "more than once"
    fenced = [event["fenced"] for event in run.events if event["event"] == "cut"]
    assert all(len(names) == 1 and names[0].startswith("server") for names in fenced), fenced
    return "fenced" if fenced else "lost" if kinds["lost"] else "unnoticed"


@EVERY
def test_a_cut_between_two_servers_at_every_message(every: int) -> None:
    found = Counter(became(cut(SCENARIO, *point)) for point in points(every, HOSTS))
    print(found)
    assert found["fenced"] > 0.6 * found.total(), "the rest was over before anybody needed that link"


@EVERY
def test_a_cut_between_a_server_and_a_trainer_at_every_message(every: int) -> None:
    found = Counter(became(cut(SCENARIO, *point)) for point in points(every, ["trainer-0", "trainer-1"]))
    print(found)
    assert found["fenced"] > 0.6 * found.total()


@EVERY
def test_a_cut_between_a_server_and_the_coordinator_at_every_message(every: int) -> None:
    """Nobody complains: it goes on until the end of its lease, and after."""
    found = Counter(became(cut(SCENARIO, *point)) for point in points(every, [COORDINATOR], ("both",)))
    print(found)
    assert not found["fenced"]


def test_a_fenced_server_that_is_still_cut_off_is_a_spare_and_stays_one() -> None:
    """Long enough that it has come back, with a host that dies: its slot goes to a survivor, not to that spare."""
    scenario = Scenario(code=TWO_ONE, steps=6, spares=1)
    cluster = SimulatedCluster(scenario)
    links = Links(cluster)
    links.cut_at(20, Cut("server-0", "server-1"))
    run = links.go()
    run.check_against(oracle(scenario))
    assert run.fenced == 1
    assert "server-4" not in [place.server for place in cluster.slots_known]
    assert [event["fenced"] for event in run.events if event["event"] == "cut"] == [["server-0"]]


def test_a_cut_and_then_a_loss() -> None:
    """Once the fenced slot is whole again: the next lost one goes to a survivor, not to the spare that is cut off."""
    hosts = Counter()
    for message in range(3, len(oracle(SCENARIO).messages), 41):
        scenario = Scenario(code=TWO_ONE, steps=6, spares=1, kills=((2, 4),), settle_first=True, network_seed=message)
        links = Links(SimulatedCluster(scenario))
        links.cut_at(message, Cut("server-0", "server-1"))
        run = links.go()
        run.check_against(oracle(scenario))
        assert run.kills == 1
        assert sum(event["event"] == "cut" for event in run.events) <= 1
        hosts.update(place.server for place in links.cluster.slots_known)
    assert "server-4" not in hosts and hosts["server-3"] and hosts["server-1"]


def nobody_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspicion, "on_beat", lambda *_: None)


def nobody_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "act_on_complaints", lambda *_: None)


def fenced_in_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "fence", lambda *_: None)


@pytest.mark.parametrize("take_out", [nobody_complains, nobody_is_fenced, fenced_in_name_only])
def test_without_the_rule_training_stands(
    take_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle(SCENARIO)
    take_out(monkeypatch)
    with pytest.raises((RuntimeError, AssertionError), match=r"stuck|too many|more than once"):
        became(cut(SCENARIO, 30, "server-0", "server-1"))


def test_without_memory_of_troubles_the_slot_goes_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle(SCENARIO)
    monkeypatch.setattr(SlotTable, "troubles_of", lambda *_: 0)
    with pytest.raises(AssertionError):
        test_a_cut_and_then_a_loss()
