"""The coordinator's decisions: who may join, when a world is formed, who gets a lost slot, when everything stops."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from typing import Any

import pytest

import torch_ecrec
from torch_ecrec.coordinator.admission import FENCED
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.coordinator.world import FORMING_LIMIT_S
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import BadMessage, Join, Rejoin
from torch_ecrec.protocol.wire import Placement
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

TABLES = (TableSpec("a", 30, 4, -1.0, 1.0), TableSpec("b", 20, 8, -1.0, 1.0, OptimizerSpec("adagrad")))


class Harness:
    """A coordinator, what it sent and what it announced."""

    def __init__(self, code: CodeSpec | None = None, spares: int = 1, trainers: int = 2, **options: Any) -> None:
        self.code = code or CodeSpec(3, 2, 1)
        self.job = JobSpec(TABLES, self.code, trainers)
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.core = Coordinator(ClusterSettings(self.code, spares, ("here", 1), **options), self._send, self._announce)
        self.now_s = 0.0
        self.births = 0

    def _send(self, name: str, message: messages.FromCoordinator) -> None:
        self.sent.append((name, messages.json_of(message)))

    def _announce(self, event: Event) -> None:
        self.events.append(events.json_of(event))

    def message(self, **fields: Any) -> dict[str, Any]:
        self.births += 1
        return {"type": "join", "version": torch_ecrec.__version__, "pid": 1, "birth": f"birth {self.births}", **fields}

    def join(self, **fields: Any) -> str:
        join = messages.from_member(self.message(**fields))
        assert isinstance(join, Join)
        assert self.core.refusal(join) is None
        name = self.core.name_for(join)
        self.core.on_join(name, join, self.now_s)
        return name

    def why_not(self, **fields: Any) -> str | None:
        """Why a process may not join: its message is none, or the coordinator does not want it."""
        try:
            join = messages.from_member(self.message(**fields))
        except BadMessage as error:
            return str(error)
        assert isinstance(join, Join)
        return self.core.refusal(join)

    def server(self) -> str:
        return self.join(role="server")

    def trainer(self, rank: int) -> str:
        return self.join(role="trainer", rank=rank, job=self.job.to_json())

    def enter(self) -> None:
        """Everybody who is told of a generation enters it."""
        for name in self.core.world:
            if self.core.members[name].alive:
                self.say(name, type="in_generation", generation=self.core.generation)

    def say(self, name: str, **message: Any) -> str | None:
        """What a member says; returns why it cannot be, if so."""
        word = messages.from_member(message)
        assert isinstance(word, messages.OfMember)
        return self.core.on_message(name, word, self.now_s)

    def start(self, servers: int = 4) -> Harness:
        for _ in range(servers):
            self.server()
        for rank in range(self.job.trainers):
            self.trainer(rank)
        self.now_s += 10
        self.core.on_tick(self.now_s)
        self.enter()
        assert self.core.epoch == 1
        return self

    def rebuilt(self, slot: int) -> None:
        self.say(self.places[slot], type="rebuilt", slot=slot, incarnation=self.core.slots[slot].incarnation)

    @property
    def places(self) -> list[str]:
        return [place.server for place in self.core.slots]

    def lose(self, name: str) -> None:
        self.core.on_lost(name, self.now_s, "eof")


def test_a_world_is_formed_when_everybody_is_there() -> None:
    h = Harness()
    for _ in range(4):
        h.server()
    h.trainer(0)
    assert h.core.generation == 0
    h.trainer(1)
    assert h.core.generation == 1 and len(h.core.world) == 6
    assert h.core.epoch == 0, "nothing is placed before all are in it"
    h.enter()
    assert h.places == ["server-0", "server-1", "server-2"]
    assert [m["placement"]["epoch"] for n, m in h.sent if m["type"] == "placement" and n == "trainer-1"] == [1]


def test_spares_are_waited_for_but_not_for_ever() -> None:
    h = Harness()
    for _ in range(3):
        h.server()
    h.trainer(0)
    h.trainer(1)
    assert h.core.generation == 0
    h.now_s = 6.0
    h.core.on_tick(h.now_s)
    assert h.core.generation == 1


def test_a_spare_gets_a_lost_slot() -> None:
    h = Harness().start()
    h.lose("server-1")
    assert h.places == ["server-0", "server-3", "server-2"]
    assert h.core.slots[1].incarnation == 1 and not h.core.slots[1].healthy
    h.rebuilt(1)
    assert h.core.slots[1].healthy and h.core.epoch == 3


def test_a_report_of_a_former_incarnation_is_not_believed() -> None:
    h = Harness().start()
    h.lose("server-1")
    h.say("server-3", type="rebuilt", slot=1, incarnation=0)
    assert not h.core.slots[1].healthy


def test_a_survivor_takes_over_and_a_newcomer_relieves_it_when_all_is_whole() -> None:
    h = Harness(spares=0).start(servers=3)
    h.lose("server-1")
    assert h.places == ["server-0", "server-0", "server-2"]
    h.server()
    h.enter()
    assert h.places == ["server-0", "server-0", "server-2"], "not while the slot is being rebuilt"
    h.rebuilt(1)
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.slots[1].incarnation == 2


def test_lost_slots_can_wait_for_the_process_that_comes_back() -> None:
    h = Harness(spares=0, without_spare="wait").start(servers=3)
    h.lose("server-2")
    assert h.places == ["server-0", "server-1", ""]
    h.server()
    assert h.places[2] == ""
    h.enter()
    assert h.places == ["server-0", "server-1", "server-3"]


def test_more_losses_than_r_stop_everything_and_say_what_is_gone() -> None:
    h = Harness().start()
    h.lose("server-1")
    h.lose("server-2")
    assert h.core.fatal is not None
    for word in ("slots [1, 2]", "(k, r) = (2, 1)", "rows", "2 tables (a, b)"):
        assert word in h.core.fatal
    fatal = [(n, m["kind"]) for n, m in h.sent if m["type"] == "fatal"]
    assert ("trainer-0", "data_loss") in fatal and ("server-0", "data_loss") in fatal
    assert "has stopped" in str(h.why_not(role="server"))


def test_two_losses_are_within_r_two() -> None:
    h = Harness(CodeSpec(5, 3, 2), spares=2).start(servers=7)
    h.lose("server-0")
    h.lose("server-1")
    assert h.core.fatal is None and h.places[:2] == ["server-5", "server-6"]
    h.lose("server-5")  # slot 0 again: still the same two slots
    assert h.core.fatal is None and h.core.slots[0].incarnation == 2
    h.lose("server-2")
    assert h.core.fatal is not None


def test_without_protection_any_loss_is_final() -> None:
    h = Harness(CodeSpec(3, 2, 1, "none")).start()
    h.lose("server-0")
    assert h.core.fatal is not None and "no protection" in h.core.fatal


def test_a_spare_that_dies_is_no_loss() -> None:
    h = Harness().start()
    h.lose("server-3")
    assert h.core.fatal is None and h.core.epoch == 1
    h.lose("server-1")
    assert h.places == ["server-0", "server-0", "server-2"]


def test_a_world_is_formed_anew_when_a_member_dies_while_it_forms() -> None:
    h = Harness()
    for _ in range(5):
        h.server()
    h.trainer(0)
    h.trainer(1)
    assert h.core.generation == 1
    h.lose("server-0")
    assert h.core.generation == 2 and "server-0" not in h.core.world
    h.enter()
    assert h.places == ["server-1", "server-2", "server-3"]


def test_a_world_that_is_not_formed_in_time_is_given_up() -> None:
    h = Harness()
    for _ in range(4):
        h.server()
    h.trainer(0)
    h.trainer(1)
    h.now_s += FORMING_LIMIT_S + 1
    for name in h.core.members:
        h.core.on_heard(name, h.now_s)
    h.core.on_tick(h.now_s)
    assert h.core.generation == 2


def test_a_late_entry_into_an_old_generation_counts_for_nothing() -> None:
    h = Harness().start()
    h.server()
    assert h.core.generation == 2
    h.say("server-4", type="in_generation", generation=1)
    assert h.core.members["server-4"].generation == 1
    h.lose("server-1")
    assert h.places[1] != "server-4", "it is not in the present world yet"


def test_leases() -> None:
    h = Harness(lease_s=20.0).start()
    for now_s in range(11, 35):
        for name in h.core.members:
            if name != "server-1":
                h.core.on_heard(name, now_s)
        h.core.on_tick(now_s)
    assert [e["member"] for e in h.events if e["event"] == "lost"] == ["server-1"]
    assert h.places[1] == "server-3"


def reach(h: Harness, slot: int, applied: int, floor: int = 0, **fields: Any) -> None:
    """A slot says which steps it can go back to; it holds the dense snapshots of the last two that it has applied."""
    kept = [[step, list(range(h.job.trainers))] for step in range(max(1, applied - 1), applied + 1)]
    message = {"era": h.core.era, "incarnation": h.core.slots[slot].incarnation, "snapshots": kept, **fields}
    h.say(h.places[slot], type="reach", slot=slot, applied=applied, floor=floor, **message)


def durable(h: Harness, slot: int) -> None:
    incarnation = h.core.slots[slot].incarnation
    h.say(h.places[slot], type="durable", era=h.core.era, slot=slot, incarnation=incarnation)


def told(h: Harness, name: str, kind: str) -> list[dict[str, Any]]:
    return [message for member, message in h.sent if member == name and message["type"] == kind]


def test_lost_trainers_are_awaited_while_the_servers_go_back() -> None:
    h = Harness().start()
    h.say("trainer-0", type="loaded", origin=0)
    h.lose("trainer-1")
    assert h.core.fatal is None and h.core.era == 1
    assert [m["kind"] for m in told(h, "trainer-0", "fatal")] == ["trainers_lost"], "it cannot go on alone"
    assert told(h, "server-0", "era")[-1] == {"type": "era", "era": 1, "step": None, "origin": 0}
    for slot, applied in enumerate((7, 6, 8)):
        reach(h, slot, applied)
    assert h.core.going_back is not None and h.core.going_back.step == 6, "all reach it, and a snapshot is kept"
    assert told(h, "server-2", "era")[-1]["step"] == 6
    durable(h, 0)
    durable(h, 1)
    names = [h.trainer(0), h.trainer(1)]
    assert names == ["trainer-0_2", "trainer-1_2"]
    assert all(told(h, name, "welcome")[-1]["restarted"] for name in names)
    assert not told(h, names[0], "resume"), "slot 2 is not there yet"
    durable(h, 2)
    assert told(h, names[0], "resume") == [{"type": "resume", "era": 1, "step": 6, "origin": 0}]
    assert h.core.going_back is None


def test_trainers_that_come_late_are_told_at_once() -> None:
    h = Harness().start()
    h.lose("trainer-1")
    for slot in range(3):
        reach(h, slot, 5)
        durable(h, slot)  # too early, for the first two: nobody knows the step yet
    for slot in range(2):
        durable(h, slot)
    assert h.core.going_back is None
    name = h.trainer(0)
    assert told(h, name, "resume")[-1]["step"] == 5


def test_a_server_lost_meanwhile_begins_another_era() -> None:
    h = Harness().start()
    h.lose("trainer-0")
    for slot in range(3):
        reach(h, slot, 9)
    h.lose("server-1")
    assert h.core.era == 2 and h.core.going_back is not None and h.core.going_back.step is None
    reach(h, 0, 9)
    reach(h, 2, 9)
    reach(h, 1, 4, era=1)  # of the era before
    reach(h, 1, 4, incarnation=0)  # of a host that was replaced
    assert h.core.going_back.step is None
    h.say(h.places[1], type="reach", era=2, slot=1, incarnation=1, applied=4, floor=0, snapshots=[[4, [0, 1]]])
    assert h.core.going_back.step == 4, "its new host knows no more than four steps"


def test_without_a_snapshot_that_all_can_go_back_to_the_job_ends() -> None:
    h = Harness().start()
    h.say("trainer-0", type="loaded", origin=0)
    h.lose("trainer-0")
    for slot in range(3):
        reach(h, slot, 20, floor=15, snapshots=[[16, [0]]])  # of one trainer only
    assert h.core.fatal is not None and "no dense snapshot of the steps 15 to 20" in h.core.fatal


def test_trainers_that_left_are_done_and_new_ones_go_on_from_there() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1"):
        h.say(name, type="leave")
        h.lose(name)
    assert h.core.fatal is None and h.core.era == 0
    h.trainer(0)
    assert h.core.era == 1 and h.core.going_back is not None


def test_others_hear_of_trainer_0_that_leaves_without_loading() -> None:
    """They wait for what it loads, for as long as it is there."""
    h = Harness().start()
    h.say("trainer-0", type="leave")
    assert [m["kind"] for m in told(h, "trainer-1", "fatal")] == ["trainers_lost"]
    assert "left before it had loaded" in told(h, "trainer-1", "fatal")[0]["reason"]
    h.lose("trainer-1")
    assert h.core.era == 1, "the next ones go on where these were"
    loaded = Harness().start()
    loaded.say("trainer-0", type="loaded", origin=2)
    loaded.say("trainer-0", type="leave")
    assert not told(loaded, "trainer-1", "fatal")


def test_nothing_is_moved_while_the_servers_go_back() -> None:
    h = Harness(spares=0).start(3)
    h.lose("server-0")
    h.rebuilt(0)
    assert h.places == ["server-1", "server-1", "server-2"]
    h.lose("trainer-0")
    h.server()
    h.enter()
    assert h.places == ["server-1", "server-1", "server-2"], "a new host would not know how far to go back"
    for slot in range(3):
        reach(h, slot, 3)
    for slot in range(3):
        durable(h, slot)
    assert h.places == ["server-1", "server-3", "server-2"]


def test_who_was_silent_for_a_lease_is_fenced_unless_the_coordinator_slept() -> None:
    h = Harness(lease_s=10.0).start()
    for _ in range(8):
        h.now_s += 1.0
        for name in ("server-0", "server-2", "server-3", "trainer-0", "trainer-1"):
            h.say(name, type="beat")
        h.core.on_tick(h.now_s)
    h.now_s += 60.0  # it was stopped
    h.core.on_tick(h.now_s)
    assert h.places[1] == "server-1"
    for _ in range(11):
        h.now_s += 1.0
        for name in ("server-0", "server-2", "server-3", "trainer-0", "trainer-1"):
            h.say(name, type="beat")
        h.core.on_tick(h.now_s)
    assert h.places[1] == "server-3" and [m["kind"] for m in told(h, "server-1", "fatal")] == ["fenced"]
    h.say("server-1", type="rebuilt", slot=1, incarnation=1)
    assert not h.core.slots[1].healthy, "nothing that it says counts"


# a coordinator that was started again -------------------------------------------------------------


def known(h: Harness, name: str, **fields: Any) -> dict[str, Any]:
    """What a member of `h` tells another coordinator."""
    member = h.core.members[name]
    placement = Placement(h.core.epoch, tuple(h.core.slots)).to_json() if h.core.slots else None
    message = {"type": "rejoin", "name": name, "role": member.role, "rank": member.rank, "code": asdict(h.code)}
    message |= {"generation": member.generation, "newest": member.generation, "world": h.core.world}
    message |= {
        "life": h.core.life,
        "job": h.job.to_json(),
        "placement": placement,
        "era": 0,
        "frozen": False,
        "resume_step": 0,
        "whole": [[i, p.incarnation] for i, p in enumerate(h.core.slots) if p.server == name and p.healthy],
        "incarnations": [p.incarnation for p in h.core.slots] if member.role == "server" else [],
        "birth": member.birth,
    }
    return h.message(**{**message, "origin": 0, **fields})


def word_of(message: dict[str, Any]) -> Rejoin:
    word = messages.from_member(message)
    assert isinstance(word, Rejoin)
    return word


def rejoin(h: Harness, message: dict[str, Any]) -> None:
    word = word_of(message)
    assert h.core.rejoin_refusal(word) is None
    h.core.on_rejoin(word, h.now_s)


MEMBERS = ("server-0", "server-1", "server-2", "server-3", "trainer-0", "trainer-1")


def test_members_tell_a_new_coordinator_what_they_know() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        assert not after.core.slots
        rejoin(after, known(before, name))
    assert after.places == before.places and after.core.epoch == before.core.epoch + 1 and after.core.origin == 0
    assert after.core.generation == before.core.generation, "the RPC world goes on"
    assert after.core.era == 0 and after.core.fatal is None
    assert after.server() == "server-1000", "names that were given before may be known to nobody here"
    assert after.core.rejoin_refusal(word_of(known(before, "server-1", birth="another"))) == ("fenced", FENCED)


def test_a_slot_that_was_rebuilt_meanwhile_is_whole() -> None:
    """Its host knows, the newest placement does not: the loss of another one is within the contract."""
    before, after = Harness().start(), Harness()
    stale = Placement(before.core.epoch, tuple(replace(p, healthy=i != 1) for i, p in enumerate(before.core.slots)))
    for name in MEMBERS:
        if name != "server-2":
            rejoin(after, known(before, name, placement=stale.to_json()))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.fatal is None and after.places == ["server-0", "server-1", "server-3"]
    assert [place.healthy for place in after.core.slots] == [True, True, False]


def test_a_slot_that_waits_for_a_host_gets_one_of_a_new_coordinator() -> None:
    """The one before could not place it, as a generation was being formed; for the new one nothing has to be formed."""
    before, after = Harness().start(), Harness()
    slots = [
        replace(p, server="", incarnation=1, healthy=False) if p.server == "server-1" else p for p in before.core.slots
    ]
    waiting = Placement(before.core.epoch + 1, tuple(slots)).to_json()
    for name in MEMBERS:
        rejoin(after, known(before, name, placement=waiting, whole=[], incarnations=[]))
    assert "" not in after.places and after.core.slots[1].incarnation == 1 and after.core.fatal is None


def test_a_life_that_only_others_know_of_is_not_given_again() -> None:
    """Slot 1 was placed anew, and its new host has told a holder so; neither the host nor its placement come back."""
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        if name != "server-3":
            lives = {"incarnations": [0, 4, 0]} if name == "server-2" else {}
            rejoin(after, known(before, name, **lives))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.slots[1].incarnation == 5 and not after.core.slots[1].healthy
    assert [place.incarnation for place in after.core.slots] == [0, 5, 0] and after.core.fatal is None


def test_who_does_not_come_back_is_lost() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        if name != "server-1":
            rejoin(after, known(before, name))
    assert not after.core.slots
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.places == ["server-0", "server-3", "server-2"] and after.core.slots[1].incarnation == 1
    assert after.core.era == 0


@pytest.mark.parametrize(
    "change",
    [
        {"trainer-1": None},  # died meanwhile
        {"server-0": {"frozen": True, "era": 1}},
        {"server-0": {"era": 1}, "server-1": {"era": 1}, "server-2": {"era": 1}, "server-3": {"era": 1}},
    ],
)
def test_lost_trainers_begin_an_era_at_the_new_coordinator(change: dict[str, dict[str, Any] | None]) -> None:
    """Also where the servers had gone back, and the trainers had not been told."""
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        fields = change.get(name, {})
        if fields is not None:
            rejoin(after, known(before, name, **fields))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.going_back is not None and after.core.era > max((f or {}).get("era", 0) for f in change.values())
    assert not [m for m in after.core.members.values() if m.role == "trainer"]


def test_a_member_without_a_world_does_not_end_the_waiting() -> None:
    before, after = Harness().start(), Harness()
    rejoin(after, known(before, "server-3", placement=None, job=None, world=[], generation=0, newest=0))
    after.core.on_tick(after.now_s)
    for name in MEMBERS:
        if name != "server-3":
            rejoin(after, known(before, name))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.places == before.places and after.core.fatal is None


def test_a_generation_that_was_being_formed_is_not_asked_for_again() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        rejoin(after, known(before, name, newest=2))
    assert after.core.generation == 3 and after.core.world == list(MEMBERS)


def test_the_coordinator_outlives_a_training_whose_servers_have_left() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1", "server-0", "server-1", "server-2", "server-3"):
        h.say(name, type="leave")
    h.now_s += 1
    h.core.on_tick(h.now_s)
    assert h.core.fatal is None


def test_a_server_that_leaves_in_mid_training_is_lost() -> None:
    h = Harness().start()
    h.say("server-1", type="leave")
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.slots[1].incarnation == 1
    h.lose("server-1")  # its connection ends, too
    assert h.core.slots[1].incarnation == 1
    for name in ("trainer-0", "trainer-1", "server-0"):
        h.say(name, type="leave")
    assert h.places[0] == "server-0", "training is over"


def test_loaded_reaches_all_trainers_also_late_ones() -> None:
    h = Harness().start()
    h.say("trainer-0", type="loaded", origin=0)
    assert {n for n, m in h.sent if m["type"] == "loaded"} == set(h.core.members), "servers tell the next coordinator"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "server", "version": "0.0.0"}, ["version 0.0.0", torch_ecrec.__version__]),
        ({"role": "server", "code": {"k": 3}}, ["k is 2", "got 3"]),
        ({"role": "server", "code": {"r": 2}}, ["r is 1", "got 2"]),
        ({"role": "server", "code": {"slots": 7}}, ["slots is 3", "got 7"]),
        ({"role": "trainer", "rank": 2}, ["below 2", "got 2"]),
        ({"role": "trainer", "rank": 1, "job": {}}, ["tables", "job"]),
        ({"role": "trainer", "rank": 1, "job": None}, ["not a job"]),
        ({"role": "observer"}, ["observer"]),
        ({}, ["role"]),
    ],
)
def test_refusals_say_why(fields: dict[str, Any], words: list[str]) -> None:
    h = Harness().start()
    job = {"job": h.job.to_json()} if fields.get("role") == "trainer" else {}
    reason = h.why_not(**{**job, **fields})
    assert reason is not None
    for word in words:
        assert word in reason


def test_trainers_of_another_job_are_refused() -> None:
    h = Harness()
    h.trainer(0)
    other = JobSpec((TableSpec("a", 31, 4, -1.0, 1.0),), h.code, 2)
    reason = h.why_not(role="trainer", rank=1, job=other.to_json())
    assert reason is not None and "other tables" in reason


def test_status_shows_everything() -> None:
    h = Harness().start()
    h.say("server-0", type="beat", report={"slots": []})
    h.say("trainer-0", type="progress", trainer=0, step=7)
    status = h.core.status(h.now_s)
    assert status["step"] == 7 and status["generation"] == 1 and status["epoch"] == 1
    assert [m["spare"] for m in status["members"] if m["role"] == "server"] == [False, False, False, True]
    assert status["slots"][1] == {"slot": 1, "server": "server-1", "incarnation": 0, "healthy": True}


def test_a_host_lost_before_it_has_rebuilt_is_still_one_loss() -> None:
    h = Harness(spares=2).start(5)
    h.lose("server-1")
    h.lose("server-3")
    assert h.places[1] == "server-4" and h.core.slots[1].incarnation == 2 and h.core.fatal is None
    h.lose("server-0")
    assert h.core.fatal is not None and "slots [0, 1]" in h.core.fatal


def test_a_survivor_with_two_slots_takes_both_along() -> None:
    h = Harness(CodeSpec(5, 3, 2), spares=0).start(5)
    h.lose("server-0")
    assert h.places == ["server-1", "server-1", "server-2", "server-3", "server-4"]
    h.lose("server-1")
    assert h.places == ["server-2", "server-3", "server-2", "server-3", "server-4"]
    assert [place.incarnation for place in h.core.slots] == [2, 1, 0, 0, 0] and h.core.fatal is None


def test_a_new_host_that_finds_nothing_stops_everything() -> None:
    h = Harness().start()
    h.lose("server-1")
    h.say("server-3", type="unrecoverable", slot=1, incarnation=0)
    assert h.core.fatal is None, "said of an earlier life"
    h.say("server-3", type="unrecoverable", slot=1, incarnation=1)
    assert h.core.fatal is not None and "slot 1" in h.core.fatal and h.events[-1]["kind"] == "data_loss"


def test_a_trainer_that_dies_while_the_first_world_forms_may_come_back() -> None:
    h = Harness(spares=0)
    for _ in range(3):
        h.server()
    h.trainer(0)
    h.trainer(1)
    assert h.core.generation == 1
    h.lose("trainer-0")
    h.say("server-0", type="in_generation", generation=1)  # it was under way
    assert h.core.epoch == 0 and h.core.fatal is None
    h.trainer(0)
    h.enter()
    assert h.core.epoch == 1 and {"trainer-0_2", "trainer-1"} <= set(h.core.world)


def test_a_slot_lost_while_a_world_forms_is_placed_when_it_has_formed() -> None:
    h = Harness(spares=0).start(3)
    h.server()
    assert h.core.generation == 2
    h.lose("server-0")
    assert h.places[0] == "" and h.core.slots[0].incarnation == 1 and h.core.generation == 3
    h.enter()
    assert h.places[0] == "server-3" and h.core.slots[0].incarnation == 1 and not h.core.slots[0].healthy


# what a member that is there no more, or was never, leaves behind -----------------------------------


def go_back(h: Harness) -> None:
    """All slots reach step 5, and make it durable."""
    for slot in range(len(h.places)):
        reach(h, slot, 5)
    for slot in range(len(h.places)):
        durable(h, slot)
    assert h.core.going_back is None and h.core.resume_step == 5


def test_a_server_that_leaves_while_trainers_are_awaited_is_lost() -> None:
    """They were lost, all is durable: nobody is there, nobody goes back, and the job goes on all the same."""
    h = Harness().start()
    h.lose("trainer-0")
    go_back(h)
    h.say("server-1", type="leave")
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.slots[1].incarnation == 1
    assert h.core.going_back is None and h.core.resume_step == 5, "that step survives r losses"


def test_a_server_that_left_after_training_is_missing_when_training_goes_on() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1", "server-1"):
        h.say(name, type="leave")
        h.lose(name)
    assert h.places[1] == "server-1" and not [e for e in h.events if e["event"] == "lost"], "a clean end is quiet"
    h.trainer(0)
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.going_back is not None


def test_a_server_that_leaves_while_members_come_back_is_not_given_its_slots() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS[:-1]:
        rejoin(after, known(before, name))
    after.say("server-1", type="leave")
    rejoin(after, known(before, MEMBERS[-1]))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.places == ["server-0", "server-3", "server-2"] and after.core.fatal is None


def test_slots_that_share_no_row_may_be_lost_together() -> None:
    """One row on six slots: of most stripes there is nothing to lose, however many of their members are gone."""
    h = Harness(CodeSpec(6, 2, 1), spares=0)
    h.job = JobSpec((TableSpec("t", 1, 4, -1.0, 1.0),), h.code, 2)
    h.start(6)
    h.lose("server-4")
    h.lose("server-5")
    assert h.core.fatal is None and {place.server for place in h.core.slots[4:]} <= set(h.core.members) - {"server-4"}
    h.lose("server-0")
    assert h.core.fatal is None or "1 rows of 1 tables (t)" in h.core.fatal


def test_only_tables_that_lose_rows_are_named() -> None:
    h = Harness(CodeSpec(6, 2, 1), spares=0)
    h.job = JobSpec((TableSpec("one", 1, 4, -1.0, 1.0), TableSpec("many", 200, 4, -1.0, 1.0)), h.code, 2)
    h.start(6)
    h.lose("server-3")
    h.lose("server-4")
    assert h.core.fatal is not None and "of 1 tables (many)" in h.core.fatal


def test_versions_never_become_less() -> None:
    """A generation was formed here before members of the one before came, and another regathering follows it."""
    before, after = Harness(), Harness()
    for _ in range(4):
        before.server()
    for rank in range(2):
        before.trainer(rank)
    first = known(before, "server-0", generation=7, newest=7, life=3, era=2, world=["server-0"], placement=None)
    rejoin(after, first)
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert (after.core.generation, after.core.life, after.core.era) == (7, 4, 2) and after.core.origin is not None
    late = {
        "generation": 2,
        "newest": 2,
        "life": 0,
        "era": 0,
        "world": ["server-1"],
        "placement": None,
        "origin": None,
    }
    rejoin(after, known(before, "server-1", **late))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert (after.core.generation, after.core.life, after.core.era) == (7, 4, 2) and after.core.origin is not None
    assert after.server() == "server-4000" and after.trainer(0) == "trainer-0_4001"


def test_a_world_that_was_formed_and_not_placed_is_formed_again() -> None:
    """The coordinator died between the last entry and the word of it: nobody waits for an entry any more."""
    before, after = Harness(), Harness()
    for _ in range(4):
        before.server()
    for rank in range(2):
        before.trainer(rank)
    world = {"generation": 1, "newest": 1, "placement": None, "whole": [], "incarnations": [], "origin": None}
    for name in MEMBERS:
        rejoin(after, known(before, name, **world))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.generation == 2
    after.enter()
    assert after.core.epoch == 1 and "" not in after.places


def test_of_two_that_come_back_under_one_name_the_one_that_hosts_stays() -> None:
    before = Harness().start()
    nobody = {"birth": "another", "placement": None, "incarnations": [], "generation": 0, "newest": 0}
    hosts, empty = known(before, "server-1"), known(before, "server-1", **nobody)
    for first, second, stays in ((hosts, empty, False), (empty, hosts, True)):
        after = Harness()
        rejoin(after, known(before, "server-0"))
        rejoin(after, first)
        assert (after.core.rejoin_refusal(word_of(second)) is None) == stays


SAYS: tuple[dict[str, Any], ...] = (
    {"type": "beat", "report": {"slots": []}},
    {"type": "in_generation", "generation": 0},
    {"type": "in_generation", "generation": 1},
    {"type": "in_generation", "generation": 2},
    *({"type": kind, "slot": s, "incarnation": i} for kind in ("ready", "rebuilt") for s in (0, 9) for i in (0, 1)),
    {"type": "unrecoverable", "slot": 9, "incarnation": 0},
    {"type": "unrecoverable", "slot": 1, "incarnation": 5},
    *({"type": "durable", "slot": s, "incarnation": 0, "era": e} for s in (0, 9) for e in (0, 7)),
    {"type": "reach", "slot": 9, "incarnation": 0, "era": 0, "applied": 1, "floor": 0, "snapshots": []},
    {"type": "reach", "slot": 0, "incarnation": 0, "era": 0, "applied": 1, "floor": 0, "snapshots": [[1, [99]]]},
    {"type": "loaded", "origin": 0},
    {"type": "progress", "trainer": 0, "step": 1},
    {"type": "progress", "trainer": 9, "step": 1},
    {"type": "leave", "report": {}},
)


def states() -> dict[str, Harness]:
    """A coordinator in every state that it can be in."""
    found = {"nobody": Harness(), "gathering": Harness(), "forming": Harness(), "training": Harness().start()}
    found["gathering"].server()
    for h in (found["forming"],):
        for _ in range(4):
            h.server()
        for rank in range(2):
            h.trainer(rank)
        assert h.core.generation == 1 and not h.core.slots
    found["a server is lost"] = Harness().start()
    found["a server is lost"].lose("server-1")
    found["asking"] = Harness().start()
    found["asking"].lose("trainer-0")
    found["undoing"] = Harness().start()
    found["undoing"].lose("trainer-0")
    for slot in range(3):
        reach(found["undoing"], slot, 5)
    found["resumable"] = Harness().start()
    found["resumable"].lose("trainer-0")
    go_back(found["resumable"])
    found["regathering"] = Harness()
    for name in MEMBERS[:3]:
        rejoin(found["regathering"], known(found["training"], name))
    found["over"] = Harness().start()
    for name in ("trainer-0", "trainer-1"):
        found["over"].say(name, type="leave")
    found["stopped"] = Harness().start()
    found["stopped"].core.stop("stopped", "stopped")
    return found


def test_anybody_may_say_anything_at_any_time() -> None:
    """Whatever it is and whenever: a coordinator that goes on. What is refused, or said by nobody, changes nothing."""
    tried = 0
    for state, harness in states().items():
        for message in SAYS:
            for who in ("server-0", "server-1", "server-3", "trainer-0", "nobody"):
                h = copy.deepcopy(harness)
                before = repr((h.core.slots, h.core.epoch, h.core.era, h.core.generation, h.core.members.keys()))
                refused = h.say(who, **message)
                tried += 1
                if refused is not None or who not in h.core.members:
                    now = repr((h.core.slots, h.core.epoch, h.core.era, h.core.generation, h.core.members.keys()))
                    assert now == before or message["type"] == "leave", (state, who, message)
                h.now_s += 100.0
                h.core.on_tick(h.now_s)
                h.core.status(h.now_s)
    assert tried == len(states()) * len(SAYS) * 5
