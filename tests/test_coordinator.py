"""The coordinator's decisions: who may join, when a world is formed, who gets a lost slot, when everything stops."""

from __future__ import annotations

from typing import Any

import pytest

import torch_ecrec
from torch_ecrec.config import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.coordinator import FORMING_LIMIT_S, Coordinator

TABLES = (TableSpec("a", 30, 4, -1.0, 1.0), TableSpec("b", 20, 8, -1.0, 1.0, OptimizerSpec("adagrad")))


class Harness:
    """A coordinator, what it sent and what it announced."""

    def __init__(self, code: CodeSpec | None = None, spares: int = 1, trainers: int = 2, **options: Any) -> None:
        self.code = code or CodeSpec(3, 2, 1)
        self.job = JobSpec(TABLES, self.code, trainers)
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.core = Coordinator(
            self.code, spares, ("here", 1), lambda n, m: self.sent.append((n, m)), self.events.append, **options
        )
        self.now_s = 0.0

    def message(self, **fields: Any) -> dict[str, Any]:
        return {"version": torch_ecrec.__version__, "pid": 1, **fields}

    def join(self, **fields: Any) -> str:
        message = self.message(**fields)
        assert self.core.refusal(message) is None
        name = self.core.name_for(message)
        self.core.on_join(name, message, self.now_s)
        return name

    def server(self) -> str:
        return self.join(role="server")

    def trainer(self, rank: int) -> str:
        return self.join(role="trainer", rank=rank, job=self.job.to_json())

    def enter(self) -> None:
        """Everybody who is told of a generation enters it."""
        for name in self.core.world:
            if self.core.members[name].alive:
                self.say(name, type="in_generation", generation=self.core.generation)

    def say(self, name: str, **message: Any) -> None:
        self.core.on_message(name, message, self.now_s)

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
    assert h.core.refusal(h.message(role="server")) is not None


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
    for name in h.core.members:
        if name != "server-1":
            h.core.on_heard(name, 100.0)
    h.core.on_tick(100.0)
    assert [e["member"] for e in h.events if e["event"] == "lost"] == ["server-1"]
    assert h.places[1] == "server-3"


def test_a_trainer_that_dies_ends_the_job_and_one_that_leaves_does_not() -> None:
    h = Harness().start()
    h.say("trainer-1", type="leave")
    h.lose("trainer-1")
    assert h.core.fatal is None
    h.lose("trainer-0")
    assert h.core.fatal is not None and "trainer-0" in h.core.fatal


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
    h.say("trainer-0", type="loaded")
    assert {n for n, m in h.sent if m["type"] == "loaded"} == {"trainer-0", "trainer-1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "server", "version": "0.0.0"}, ["version 0.0.0", torch_ecrec.__version__]),
        ({"role": "server", "code": {"k": 3}}, ["k is 2", "got 3"]),
        ({"role": "server", "code": {"r": 2}}, ["r is 1", "got 2"]),
        ({"role": "server", "code": {"slots": 7}}, ["slots is 3", "got 7"]),
        ({"role": "server", "job_digest": "another"}, ["other tables"]),
        ({"role": "trainer", "rank": 2}, ["below 2", "got 2"]),
        ({"role": "trainer", "rank": 0}, ["trainer 0 has joined before"]),
        ({"role": "trainer", "rank": 1, "job": {}}, ["not a job"]),
        ({"role": "trainer", "job": None}, ["not a job"]),
        ({"role": "observer"}, ["not a role"]),
        ({}, ["not a role"]),
    ],
)
def test_refusals_say_why(fields: dict[str, Any], words: list[str]) -> None:
    h = Harness().start()
    message = h.message(**({"job": h.job.to_json()} if fields.get("role") == "trainer" else {}))
    reason = h.core.refusal({**message, **fields})
    assert reason is not None
    for word in words:
        assert word in reason


def test_trainers_of_another_job_are_refused() -> None:
    h = Harness()
    h.trainer(0)
    other = JobSpec((TableSpec("a", 31, 4, -1.0, 1.0),), h.code, 2)
    reason = h.core.refusal(h.message(role="trainer", rank=1, job=other.to_json()))
    assert reason is not None and "other tables" in reason


def test_status_shows_everything() -> None:
    h = Harness().start()
    h.say("server-0", type="beat", report={"slots": []})
    h.say("trainer-0", type="progress", step=7)
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
    h.say("server-3", type="unrecoverable", slot=1)
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
    assert h.core.epoch == 1 and {"trainer-0", "trainer-1"} <= set(h.core.world)


def test_a_slot_lost_while_a_world_forms_is_placed_when_it_has_formed() -> None:
    h = Harness(spares=0).start(3)
    h.server()
    assert h.core.generation == 2
    h.lose("server-0")
    assert h.places[0] == "" and h.core.slots[0].incarnation == 1 and h.core.generation == 3
    h.enter()
    assert h.places[0] == "server-3" and h.core.slots[0].incarnation == 1 and not h.core.slots[0].healthy
