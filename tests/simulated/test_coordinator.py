"""The coordinator's decisions: who may join, who is told of whom, who gets a lost slot, when everything stops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from builds import BUILD
from coordinator_harness import MEMBERS, Harness, go_back, known, reach, rejoin, told

import torch_ecrec
from torch_ecrec.protocol.status import SlotStatus
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec


def test_slots_are_placed_when_everybody_is_there() -> None:
    h = Harness()
    for _ in range(4):
        h.server()
    h.trainer(0)
    h.enter()
    assert h.core.roster.version == 0
    h.trainer(1)
    assert h.core.roster.version == 0 and h.core.epoch == 0, "nothing is placed before all can be called"
    h.enter()
    assert h.core.roster.version == 1 and len(h.core.roster.names) == 6
    assert h.places == ["server-0", "server-1", "server-2"]
    assert [m["placement"]["epoch"] for n, m in h.sent if m["type"] == "placement" and n == "trainer-1"] == [1]


def test_spares_are_waited_for_but_not_for_ever() -> None:
    h = Harness()
    for _ in range(3):
        h.server()
    h.trainer(0)
    h.trainer(1)
    h.enter()
    assert h.core.roster.version == 0
    h.now_s = 6.0
    h.core.on_tick(h.now_s)
    assert h.core.roster.version == 1


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
    assert h.places == ["server-0", "server-0", "server-2"], "not before it is there"
    h.move()
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


def test_everybody_is_told_whenever_somebody_comes_or_goes() -> None:
    h = Harness().start()
    everybody = ["server-0", "server-1", "server-2", "server-3", "trainer-0", "trainer-1"]
    assert list(told(h, "trainer-1", "roster")[-1]["endpoints"]) == h.core.roster.names == everybody
    h.server()
    assert h.core.roster.version == 1, "nobody can call it yet"
    h.enter()
    assert {name: told(h, name, "roster")[-1]["version"] for name in h.core.roster.names} == dict.fromkeys(
        ["server-0", "server-1", "server-2", "server-3", "server-4", "trainer-0", "trainer-1"], 2
    )
    h.lose("server-1")
    assert "server-1" not in told(h, "trainer-0", "roster")[-1]["endpoints"] and h.core.roster.version == 3
    assert "server-1" not in told(h, "server-0", "roster")[-1]["endpoints"]
    h.lose("trainer-0")
    assert list(told(h, "server-0", "roster")[-1]["endpoints"]) == ["server-0", "server-2", "server-3", "server-4"]


def test_a_server_comes_into_a_running_job_without_a_word_of_anybody_else() -> None:
    """Nobody waits for anybody: it is there with its own word, and has the next slot."""
    h = Harness(spares=0).start(3)
    name = h.server()
    before = len(h.sent)
    h.say(name, type="listens", endpoint="here")
    assert {kind for _, kind in {(m, w["type"]) for m, w in h.sent[before:]}} == {"roster"}
    h.lose("server-1")
    assert h.places == ["server-0", name, "server-2"]


def test_who_has_not_said_how_it_is_called_gets_no_slot() -> None:
    h = Harness().start()
    h.server()
    h.lose("server-1")
    h.lose("server-3") if "server-3" not in h.places else None
    assert "server-4" not in h.places
    assert h.core.members["server-4"].roster == 0 and h.core.roster.version > 1


def test_a_member_lost_before_slots_are_placed_is_missing() -> None:
    h = Harness()
    for _ in range(5):
        h.server()
    h.trainer(0)
    h.lose("server-0")
    h.trainer(1)
    h.enter()
    assert h.places == ["server-1", "server-2", "server-3"] and "server-0" not in h.core.roster.names


def test_leases() -> None:
    h = Harness(lease_s=20.0).start()
    for now_s in range(11, 35):
        for name in h.core.members:
            if name != "server-1":
                h.core.on_heard(name, now_s)
        h.core.on_tick(now_s)
    assert [e["member"] for e in h.events if e["event"] == "lost"] == ["server-1"]
    assert h.places[1] == "server-3"


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
    h.say("trainer-0", type="loaded", load_end=0)
    assert {n for n, m in h.sent if m["type"] == "loaded"} == set(h.core.members), "servers tell the next coordinator"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"role": "server", "version": "0.0.0", "messages": {**BUILD["messages"], "protocol": "0"}},
            ["version 0.0.0", torch_ecrec.__version__, "protocol 0"],
        ),
        ({"role": "server", "code": {"k": 3}}, ["k is 2", "got 3"]),
        ({"role": "server", "code": {"r": 2}}, ["r is 1", "got 2"]),
        ({"role": "server", "code": {"slots": 7}}, ["slots is 3", "got 7"]),
        ({"role": "trainer", "rank": 1, "code": {"protection": "none"}}, ["protection is parity", "got none"]),
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
    assert reason is not None and "another job: it has tables ['b'] that this job lacks" in reason


def test_status_shows_everything() -> None:
    h = Harness().start()
    h.say("server-0", type="beat", report={"slots": []})
    h.say("trainer-0", type="progress", trainer=0, step=7)
    status = h.core.status(h.now_s)
    assert status.step == 7 and status.roster == 1 and status.epoch == 1
    assert [m.spare for m in status.members if m.role == "server"] == [False, False, False, True]
    assert status.slots[1] == SlotStatus(1, "server-1", 0, True)


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


def test_a_trainer_that_dies_before_slots_are_placed_may_come_back() -> None:
    h = Harness(spares=0)
    for _ in range(3):
        h.server()
    h.trainer(0)
    h.trainer(1)
    h.lose("trainer-0")
    h.enter()
    assert h.core.epoch == 0 and h.core.fatal is None
    h.trainer(0)
    h.enter()
    assert h.core.epoch == 1 and {"trainer-0_2", "trainer-1"} <= set(h.core.roster.names)


def test_a_slot_that_waits_for_a_host_gets_the_next_that_can_be_called() -> None:
    h = Harness(spares=0, without_spare="wait").start(3)
    h.server()
    h.lose("server-0")
    assert h.places[0] == "" and h.core.slots[0].incarnation == 1
    h.enter()
    assert h.places[0] == "server-3" and h.core.slots[0].incarnation == 1 and not h.core.slots[0].healthy


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


SAYS: tuple[dict[str, Any], ...] = (
    {"type": "beat", "report": {"slots": []}},
    {"type": "listens", "endpoint": "here"},
    {"type": "listens", "endpoint": "there"},
    *({"type": kind, "slot": s, "incarnation": i} for kind in ("ready", "rebuilt") for s in (0, 9) for i in (0, 1)),
    {"type": "unrecoverable", "slot": 9, "incarnation": 0},
    {"type": "unrecoverable", "slot": 1, "incarnation": 5},
    *({"type": "durable", "slot": s, "incarnation": 0, "era": e} for s in (0, 9) for e in (0, 7)),
    {"type": "reach", "slot": 9, "incarnation": 0, "era": 0, "applied": 1, "floor": 0, "snapshots": []},
    {"type": "reach", "slot": 0, "incarnation": 0, "era": 0, "applied": 1, "floor": 0, "snapshots": [[1, 1, [99]]]},
    {"type": "loaded", "load_end": 0},
    {"type": "not_exact", "step": 3, "what": "a table begins anew"},
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
        assert not h.core.slots
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
                before = repr((h.core.slots, h.core.epoch, h.core.era, h.core.roster.version, h.core.members.keys()))
                refused = h.say(who, **message)
                tried += 1
                if refused is not None or who not in h.core.members:
                    now = repr((h.core.slots, h.core.epoch, h.core.era, h.core.roster.version, h.core.members.keys()))
                    assert now == before or message["type"] == "leave", (state, who, message)
                h.now_s += 100.0
                h.core.on_tick(h.now_s)
                h.core.status(h.now_s)
    assert tried == len(states()) * len(SAYS) * 5
