"""Chaos: what comes at one instant, whom events of hosts may hit and cost, and by what they are felt."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import coordinator_words
import pytest
from coordinator_words import healthy
from msgspec.structs import replace

from torch_ecrec.demo.catching_up import catch_up
from torch_ecrec.demo.chaos import power
from torch_ecrec.demo.chaos.disturbances import FELT_S, LOOK_S, Disturbance, felt_as_silence
from torch_ecrec.demo.chaos.host_events import World
from torch_ecrec.demo.chaos.run import ChaosRun
from torch_ecrec.demo.chaos.schedule import COMBINED, EVERY_KIND, MUST_COME, at_one_instant, role_of
from torch_ecrec.demo.report import Record
from torch_ecrec.protocol.status import Complaint, RegatheringStatus, SlotStatus, Status, Unresolved, json_of
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import CHAOS_EVENTS, FLIP_EVENTS, HOST_EVENTS, LEADER_EVENTS

# --- at one instant --------------------------------------------------------------------------------------------------


def test_every_kind_takes_something() -> None:
    roles = {kind: role_of(kind) for kind in EVERY_KIND}
    assert roles["kill-host"] == "host" and roles["cut"] == roles["cut-trainers"] == "cut"
    assert roles["kill-leader"] == roles["stop-leader"] == roles["kill-coordinator"] == "coordinator"
    assert roles["kill-etcd"] == roles["stop-etcd"] == "etcd" and roles["slow-link"] == roles["lossy-link"] == "link"
    assert all(roles.values())


@pytest.mark.parametrize(("r", "trainers"), [(1, 2), (2, 3)])
def test_at_one_instant_no_more_than_is_tolerated(r: int, trainers: int) -> None:
    chance, most = random.Random(3), {"server": r, "trainer": trainers}
    possible = [*CHAOS_EVENTS, *HOST_EVENTS, *LEADER_EVENTS, *FLIP_EVENTS]
    seen: Counter[str] = Counter()
    for _ in range(3000):
        kinds = at_one_instant(possible, MUST_COME, most, chance)
        roles = Counter(map(role_of, kinds))
        assert kinds and all(count <= most.get(role, 1) for role, count in roles.items())
        assert len(kinds) == 1 or set(kinds) <= set(COMBINED), "bits flip alone"
        seen.update(kinds)
    assert set(seen) == set(possible)


def test_a_disk_is_full_only_for_who_has_written_to_it_since_the_last_instant() -> None:
    hosts = ["server-0", "server-1", "server-2"]
    run: Any = SimpleNamespace(
        code=CodeSpec(3, 2, 1),
        record=SimpleNamespace(target=lambda role, number: hosts[number]),
        _random=random.Random(5),
        _written_bytes=lambda: {("server-0", 0): 8, ("server-1", 1): 9, ("server-2", 2): 0},
        _written_before={("server-0", 0): 8, ("server-1", 1): 8, ("server-2", 2): 0},
    )
    assert {ChaosRun._victim(run, "disk-full") for _ in range(20)} == {(1, "server-1")}
    assert {ChaosRun._victim(run, "disk-slow") for _ in range(20)} == {(0, "server-0"), (1, "server-1")}
    assert {ChaosRun._victim(run, "flip-record") for _ in range(20)} == set(enumerate(hosts))
    run._written_before = run._written_bytes()
    assert ChaosRun._victim(run, "disk-full") is None


def test_what_must_come_and_has_not_comes_at_every_second_instant_at_least() -> None:
    chance, came, instants = random.Random(1), set[str](), 0
    possible = [*CHAOS_EVENTS, *HOST_EVENTS, *LEADER_EVENTS]
    while not came >= {*HOST_EVENTS, *LEADER_EVENTS}:
        came.update(at_one_instant(possible, came, {"server": 1, "trainer": 2}, chance))
        instants += 1
    assert instants < 40
    assert at_one_instant([], (), {}, chance) == []
    assert all(at_one_instant(["cut"], (), {}, chance) == ["cut"] for _ in range(20)), "one cut at a time"


# --- who is where ----------------------------------------------------------------------------------------------------


NAMES = ("server-0", "server-1", "server-2", "server-3", "trainer-0", "trainer-1")


def status(*, without: tuple[str, ...] = (), **more: Any) -> Status:
    members = [coordinator_words.member(name, alive=name not in without) for name in NAMES]
    about: dict[str, Any] = {"time_s": time.time(), "members": members, "slots": healthy(3)}
    return coordinator_words.status(**{**about, **more})


def say(record: Record, said: dict[str, Any] | Status) -> None:
    record.on_message(said if isinstance(said, dict) else json_of(said))
    if isinstance(said, Status):
        catch_up(record, said)


@pytest.fixture
def world() -> World:
    """A server on each of four hosts, the last a spare; trainers on hosts 2 and 3; the coordinator on host 0."""
    record = Record(trainers=2, slots=3)
    record.excused = set()
    say(record, status())
    where = {**{f"server-{i}": i for i in range(4)}, "trainer-0": 2, "trainer-1": 3}
    return World(record, CodeSpec(3, 2, 1), 4, lambda: 0, {0}, where)


def test_who_is_on_a_host(world: World) -> None:
    assert world.on(2) == ["server-2", "trainer-0"] and world.on(2, "server") == ["server-2"]
    assert [world.slots_on(host) for host in range(4)] == [[0], [1], [2], []]
    assert [world.ranks_on(host) for host in range(4)] == [[], [], [0], [1]]
    say(world.record, {"type": "event", "event": "lost", "member": "server-2", "why": "x", "slots": [2], "time_s": 1.0})
    assert world.on(2) == ["trainer-0"]


def test_whom_an_event_may_hit(world: World) -> None:
    alive = range(4)
    assert world.may_die(1, alive) == [0, 1, 2, 3] and world.may_die(0, alive) == [3], "a spare's host costs nothing"
    assert world.busy(alive) == [0, 1, 2, 3]
    del world.where["trainer-1"]
    assert world.busy(alive) == [0, 1, 2], "a spare has little to send"
    world.where["trainer-1"] = 3
    pairs = world.may_be_cut(1, alive, trainers=False)
    assert len(pairs) == 10 and (2, 3) not in pairs and (0, 1) in pairs and (1, 0) in pairs
    assert world.may_be_cut(1, alive, trainers=True) == [(2, 3), (3, 2)]
    assert world.may_be_cut(0, alive, trainers=True) == []
    world.leads = lambda: 2
    assert world.may_be_cut(1, alive, trainers=True) == [], "nobody could say that it is unresolved"


def test_whom_an_event_may_cost(world: World) -> None:
    assert world.lost_with(1) == {"server-1"}
    assert world.lost_with(2) == {"server-2", "trainer-0", "trainer-1"}, "none can go on without another"
    assert world.lost_by_cut(1, 2) == {"server-1", "server-2"}, "no trainer is fenced for a cut"
    assert world.lost_by_cut(0, 1) == {"server-0", "server-1"}
    world.may_lead = {0, 1}
    assert "trainer-0" in world.lost_by_cut(1, 2), "it may lead any time"
    assert world.lost_by_cut(0, 2) == {"server-0", "server-2", "trainer-0", "trainer-1"}, "it hears nothing"


# --- by what it is felt ----------------------------------------------------------------------------------------------


def test_a_loss_is_felt_once_the_coordinator_has_said_so_since(world: World) -> None:
    since_s = time.time()
    say(world.record, status(without=("server-1",), time_s=since_s - 1))
    assert world.felt_of_loss(["server-1"], since_s) == "", "said before"
    say(world.record, status(without=("server-1",), time_s=since_s + 1))
    assert world.felt_of_loss(["server-1", "server-2"], since_s) == ""
    assert world.felt_of_loss(["server-1"], since_s) == "lost: server-1"
    say(world.record, status(slots=[], time_s=since_s + 2))
    assert world.felt_of_loss(["server-1"], since_s) == "", "a coordinator that knows nothing yet"


def test_a_cut_is_felt_by_complaints_between_its_ends_or_a_loss_there(world: World) -> None:
    ends = ["server-1", "server-2", "trainer-0"]
    assert world.felt_of_cut(1, 2, ends, ()) == ""
    say(world.record, status(unreachable=[Complaint("server-0", "server-1", 2.0)]))
    assert world.felt_of_cut(1, 2, ends, ()) == "", "other hosts"
    say(world.record, status(unreachable=[Complaint("trainer-0", "server-1", 2.0)]))
    assert world.felt_of_cut(1, 2, ends, ()) == "trainer-0 cannot reach server-1"
    lost = {"type": "event", "event": "lost", "member": "server-2", "why": "silent", "slots": [2], "time_s": 1.0}
    say(world.record, status())
    say(world.record, lost)
    assert world.felt_of_cut(1, 2, ends, ()) == "server-2 is lost: silent"
    assert world.felt_of_cut(1, 2, ends, ("server-2",)) == "", "before"


def test_a_cut_is_felt_by_who_cannot_join_a_coordinator_at_its_other_end(world: World) -> None:
    ends = ["server-0", "server-2", "trainer-0"]
    say(world.record, status(without=("trainer-0",), slots=[]))
    assert world.felt_of_cut(0, 2, ends, ()) == "", "it does not know yet who there is"
    say(world.record, status(without=("trainer-0",), regathering=RegatheringStatus([], ["trainer-0"])))
    assert world.felt_of_cut(0, 2, ends, ()) == "", "it awaits all of before"
    say(world.record, status(without=("trainer-0",)))
    assert world.felt_of_cut(0, 2, ends, ()) == "trainer-0 has not joined the coordinator that leads"
    assert world.felt_of_cut(1, 2, ends, ()) == "", "the coordinator is elsewhere"
    assert world.felt_of_cut(0, 2, ends, ("trainer-0",)) == "", "it was lost before"


def test_what_cannot_be_resolved_must_be_said_of_trainers(world: World) -> None:
    why = "trainers cannot reach each other"
    say(world.record, status(unresolved=Unresolved([("server-2", "server-3")], why)))
    assert world.felt_as_unresolved(2, 3) == ""
    say(world.record, status(unresolved=Unresolved([("trainer-1", "trainer-0")], why)))
    assert world.felt_as_unresolved(2, 3) == f"trainer-0 and trainer-1: {why}" and world.felt_as_unresolved(1, 2) == ""


@pytest.mark.parametrize(
    ("silent_s", "elapsed_s", "felt"),
    [(0.3, 0.5, False), (0.8, 1.0, True), (0.8, 4.0, False), (5.0, 8.0, True)],
    ids=["a heartbeat", "at once", "not for long", "long"],
)
def test_silence_is_felt_where_it_is_longer_than_heartbeats_and_as_long_as_it_lasts(
    silent_s: float, elapsed_s: float, felt: bool
) -> None:
    silent = {"server-1": silent_s}
    said = status(members=[coordinator_words.member(name, silent_s=silent.get(name, 0.0)) for name in NAMES])
    since_s = time.time() - elapsed_s
    assert (felt_as_silence(said, ["server-1"], since_s) != "") == felt
    assert felt_as_silence(said, ["server-2"], since_s) == "", "another"
    assert felt_as_silence(replace(said, time_s=since_s - 1), ["server-1"], since_s) == "", "said before"


def test_a_coordinator_that_says_nothing_is_felt_too() -> None:
    since_s = time.time() - 8.0
    assert felt_as_silence(status(), (), since_s) == ""
    assert felt_as_silence(status(time_s=since_s), (), since_s).startswith("the coordinator has said nothing for 8.")
    assert felt_as_silence(None, (), time.time()) == "", "it has just begun"


def test_a_disturbance_that_is_exact_ends_with_its_time_felt_or_not() -> None:
    one = Disturbance({"felt": ""}, 10.0, 12.0, felt=lambda: "", end=lambda: None, exact=True)
    assert not one.is_over(11.9) and one.is_over(12.0) and one.entry["felt"] == ""
    patient = Disturbance({"felt": ""}, 10.0, 12.0, felt=lambda: "", end=lambda: None, limit_s=500.0)
    assert not patient.is_over(11.0 + FELT_S) and patient.is_over(511.0)


def test_a_disturbance_lasts_until_it_was_felt_but_not_for_ever() -> None:
    said = [""]
    one = Disturbance({"felt": ""}, since_s=10.0, until_s=15.0, felt=lambda: said[0], end=lambda: None)
    assert not one.is_over(16.0)
    said[0] = "by this"
    assert not one.is_over(16.0 + LOOK_S / 2), "it does not look all the time"
    assert one.is_over(16.0 + 2 * LOOK_S) and one.entry["felt"] == "by this"
    never = Disturbance({"felt": ""}, since_s=10.0, until_s=15.0, felt=lambda: "", end=lambda: None)
    assert not never.is_over(9.0 + FELT_S) and never.is_over(11.0 + FELT_S)
    early = Disturbance({"felt": ""}, since_s=10.0, until_s=15.0, felt=lambda: "by this", end=lambda: None)
    assert not early.is_over(12.0) and early.is_over(15.0)


# --- what nobody may lose, and what nobody watched -------------------------------------------------------------------


def test_who_is_lost_without_an_excuse_is_unexpected_trainers_too(world: World) -> None:
    def lose(name: str, slots: list[int]) -> None:
        message = {"type": "event", "event": "lost", "member": name, "why": "x", "slots": slots, "time_s": 1.0}
        say(world.record, message)

    world.record.excused = {"server-1", "trainer-0"}
    lose("server-1", [1])
    lose("trainer-0", [])
    lose("server-3", [])
    assert world.record.unexpected == [], "a spare that is lost costs nothing"
    lose("server-2", [2])
    lose("trainer-1", [])
    assert [text.split()[0] for text in world.record.unexpected] == ["server-2", "trainer-1"]


def test_what_was_rebuilt_while_nobody_watched_is_taken_from_the_status(world: World) -> None:
    record = world.record
    server, trainer = record.on_kill("kill-host", "server", 1, 5.0), record.on_kill("kill-host", "trainer", 0, 5.0)
    slots = healthy(3)
    slots[1] = SlotStatus(1, "server-3", 1, False)
    say(record, status(slots=slots, time_s=7.0))
    assert server.detected_s == 7.0 and server.rehosted_s is None and trainer.detected_s is None
    slots[1] = SlotStatus(1, "server-3", 1, True)
    say(record, status(slots=slots, time_s=8.0))
    assert (server.rehosted_s, server.rebuilt_s) == (8.0, 8.0) and trainer.rejoined_s is None
    members = [coordinator_words.member(name) for name in (*NAMES[:4], "trainer-0_2", "trainer-1")]
    again = status(slots=slots, time_s=9.0, members=members)
    say(record, replace(again, going_back=True))
    assert trainer.rejoined_s is None
    say(record, again)
    assert (trainer.detected_s, trainer.rejoined_s) == (9.0, 9.0)
    assert record.trainers == {0: "trainer-0_2", 1: "trainer-1"}


def test_a_loss_that_has_faded_is_told_and_guesses_are_not() -> None:
    fading = [[0.7 * 0.9**step, 0.7 * 0.9**step] for step in range(200)]
    (text,) = power.faded(fading)
    assert text.startswith("the loss has faded, from 0.") and "that nothing differs says little" in text
    assert power.faded([[0.69, 0.61]] * 200) == power.faded([]) == []
    assert power.median_losses([[0.5], [0.7]]) == (0.6, 0.6)
