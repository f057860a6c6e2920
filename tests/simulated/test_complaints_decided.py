"""What the coordinator does about members that cannot reach each other."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import Harness, going_on, taken_over, told

from torch_ecrec.coordinator.suspicion import REMEMBERED_S
from torch_ecrec.observe.text import telling
from torch_ecrec.protocol.status import Unresolved
from torch_ecrec.spec.job import CodeSpec


def cut_events(h: Harness) -> list[dict[str, Any]]:
    return [event for event in h.events if event["event"] == "cut"]


def test_one_of_two_is_fenced_and_its_slot_goes_to_a_spare() -> None:
    h = Harness().start()
    going_on(h, 1.0, {"server-1": ["server-2"]})
    assert not cut_events(h) and h.core.epoch == 1
    going_on(h, 1.0, {"server-1": ["server-2"]})
    assert [event["fenced"] for event in cut_events(h)] == [["server-1"]]
    assert [word["kind"] for word in told(h, "server-1", "fatal")] == ["fenced"]
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.slots[1].incarnation == 1
    h.rebuilt(1)
    going_on(h, 60.0, {})
    assert len(cut_events(h)) == 1 and h.core.slots[1].healthy


def test_a_spare_that_cannot_reach_a_host_is_never_fenced_and_chosen_last() -> None:
    h = Harness().start()
    cut = {"server-0": ["server-3"], "server-3": ["server-0"]}
    going_on(h, 20.0, cut)
    assert not cut_events(h) and len([e for e in h.events if e["event"] == "lost"]) == 0
    h.lose("server-1")
    assert h.places == ["server-0", "server-0", "server-2"] or h.places == ["server-0", "server-2", "server-2"]
    assert "server-3" not in h.places
    h.rebuilt(1)
    going_on(h, 5.0, cut)
    assert "server-3" not in h.places, "nor is a slot moved to it"


@pytest.mark.parametrize("joins", ["before", "after"])
def test_the_next_coordinator_hears_of_a_cut_before_it_moves_a_slot(joins: str) -> None:
    """A spare that a trainer cannot reach is in the roster that it takes over, or comes into the next one."""
    spare = "server-3"
    after = taken_over(without=(spare,) if joins == "after" else ())
    if joins == "after":
        spare = after.server()
        after.core.on_tick(after.now_s)
        after.enter()
    assert spare in after.core.roster.names and not after.core.regathering
    going_on(after, 0.5, {})
    going_on(after, 20.0, {"trainer-1": [spare]})
    assert not cut_events(after) and not told(after, spare, "move")
    going_on(after, REMEMBERED_S + 1.0, {})
    assert told(after, spare, "move"), "the link is whole again"


def test_one_that_stands_still_hears_of_a_cut_before_it_moves_a_slot() -> None:
    """What was said meanwhile waits to be read: of a cut that it has to learn of, and of one that it knew of."""
    after, cut = taken_over(), {"trainer-1": ["server-3"]}
    going_on(after, 0.5, {})
    for stands_still_s in (4.0, REMEMBERED_S + 1.0):
        after.now_s += stands_still_s
        after.core.on_tick(after.now_s)
        assert not told(after, "server-3", "move"), "nobody was heard"
        going_on(after, 5.0, cut)
        assert not cut_events(after) and not told(after, "server-3", "move")
    going_on(after, REMEMBERED_S + 1.0, {})
    assert told(after, "server-3", "move"), "the link is whole again"


def test_more_than_can_be_repaired_is_said_and_not_guessed_at() -> None:
    h = Harness().start()
    cut = {"server-0": ["server-1", "server-2"], "server-1": ["server-2"]}
    going_on(h, 10.0, cut)
    [event] = cut_events(h)
    assert event["fenced"] == [] and "repaired" in event["why"]
    assert h.core.fatal is None and h.places == ["server-0", "server-1", "server-2"]
    status = h.core.status(h.now_s)
    assert len(status.unreachable) == 3 and "repaired" in status.unresolved.why
    going_on(h, 1.0, {})
    assert h.core.status(h.now_s).unresolved == Unresolved([], "")


def test_a_server_that_a_trainer_cannot_reach_goes_and_trainers_never_do() -> None:
    h = Harness().start()
    going_on(h, 3.0, {"trainer-0": ["server-2", "trainer-1"]})
    assert [event["fenced"] for event in cut_events(h)] == [["server-2"], []]
    assert cut_events(h)[1]["pairs"] == [["trainer-0", "trainer-1"]] or cut_events(h)[1]["pairs"] == [
        ("trainer-0", "trainer-1")
    ]
    assert not told(h, "trainer-0", "fatal") and not told(h, "trainer-1", "fatal")


def test_a_server_that_has_nothing_to_make_connections_with_goes_where_it_can_be_repaired() -> None:
    """It says so itself. Its end, as it is, could lose what another one's rebuild still needs."""
    h = Harness().start()
    going_on(h, 3.0, {"server-2": ["server-2"]})
    assert [event["fenced"] for event in cut_events(h)] == [["server-2"]]
    (lost,) = [event for event in h.events if event["event"] == "lost"]
    assert lost["member"] == "server-2" and "no threads or descriptors" in lost["why"]
    assert telling(cut_events(h)[0]).says.startswith("members cannot reach each other: server-2 and anybody; given up")
    going_on(h, 5.0, {"server-0": ["server-0"]})
    assert h.places[0] == "server-0", "slot 2 is not whole yet"
    assert h.core.status(h.now_s).unresolved.pairs == [("server-0", "server-0")]
    going_on(h, 3.0, {"trainer-0": ["trainer-0"]})
    assert not told(h, "trainer-0", "fatal")


def test_a_host_that_is_silent_for_all_is_lost_before_its_lease_ends() -> None:
    h = Harness(lease_s=10.0).start()
    begin_s = h.now_s
    while h.places[1] == "server-1":
        going_on(h, 0.25, {"server-0": ["server-1"]} if h.now_s > begin_s + 1.5 else {}, silent=("server-1",))
        assert h.now_s < begin_s + 2.5
    h = Harness(lease_s=10.0).start()
    going_on(h, 5.0, {}, silent=("server-1",))
    assert h.places[1] == "server-1", "nobody complains: it hangs, or is slow, and has its lease"


@pytest.mark.parametrize("trains", ["nobody", "one", "all"])
def test_who_hears_one_host_of_many_may_be_cut_off_with_it_unless_all_trainers_are_there(trains: str) -> None:
    """Two slots are on that host, which is enough to repair the third."""
    h = taken_over()
    going_on(h, 1.0, {})
    assert h.places == ["server-0", "server-0", "server-2"] and h.core.slots[1].healthy
    beside = {"nobody": (), "one": ("trainer-0",), "all": ("trainer-0", "trainer-1")}[trains]
    for name in beside:
        h.core.members[name].address = "server-0", 2
    others = h.core.members.keys() - {"server-0", *beside}
    going_on(h, 60.0, {}, silent=tuple(others))
    given_up = {event["member"] for event in h.events if event["event"] == "lost"}
    assert given_up == (set(others) if trains == "all" else set())
    assert bool(h.core.status(h.now_s).stands_still) == (trains != "all")
    if trains != "all":
        going_on(h, 6.0, {}, silent=("server-2",))
        assert [event["member"] for event in h.events if event["event"] == "lost"] == ["server-2"], "others are heard"


def test_a_coordinator_that_stood_still_reads_what_others_said_first() -> None:
    h = Harness(lease_s=10.0).start()
    going_on(h, 10.0, {})
    h.now_s += 1.0
    h.say("server-0", type="beat", unreachable=["server-1"])
    assert h.places[1] == "server-1", "its word is not read yet"
    h.say("server-1", type="beat")
    h.core.on_tick(h.now_s)
    assert h.places[1] == "server-1"
    going_on(h, 1.0, {"server-0": ["server-1"]}, silent=("server-1",))
    assert h.places[1] == "server-1", "as it seemed to be for a second before"
    going_on(h, 0.75, {"server-0": ["server-1"]}, silent=("server-1",))
    assert h.places[1] != "server-1"


def test_of_one_that_nobody_reaches_some_complain_first() -> None:
    """Not the first who does is fenced, although its name comes first."""
    h = Harness().start()
    going_on(h, 1.0, {"server-0": ["server-2"]})
    going_on(h, 2.0, {"server-0": ["server-2"], "server-1": ["server-2"], "trainer-1": ["server-2"]})
    assert [event["fenced"] for event in cut_events(h)] == [["server-2"]]
    assert h.places == ["server-0", "server-1", "server-3"]


def test_a_slot_that_lacks_records_leaves_who_cannot_reach_what_it_needs() -> None:
    """Neither of the two may be fenced while it does; once it is whole, one is."""
    h = Harness(spares=0).start(servers=3)
    h.lose("server-0")
    host, other = ("server-1", "server-2") if h.places[0] == "server-1" else ("server-2", "server-1")
    h.server()
    h.enter()
    going_on(h, 3.0, {host: [other], other: [host]})
    assert h.places[0] == "server-3" and h.core.slots[0].incarnation == 2, h.places
    assert not [name for event in cut_events(h) for name in event["fenced"]]
    h.rebuilt(0)
    going_on(h, 1.0, {host: [other], other: [host]})
    assert [event["fenced"] for event in cut_events(h) if event["fenced"]] == [[min(host, other)]]


def test_a_move_ends_where_its_ends_cannot_reach_each_other() -> None:
    h = Harness(spares=0).start(servers=3)
    h.lose("server-0")
    h.rebuilt(0)
    h.server()
    h.enter()
    move = h.core._state.table.moves.current
    assert move is not None and move.server == "server-3"
    going_on(h, 2.0, {"server-3": [h.places[move.slot]]})
    assert h.core._state.table.moves.current is None and "stayed" in [event["event"] for event in h.events]
    epoch = h.core.epoch
    going_on(h, 20.0, {"server-3": [h.places[move.slot]]})
    assert h.core.epoch == epoch, "it is not begun again while that lasts"
    going_on(h, 31.0, {})
    assert h.core._state.table.moves.current is not None, "but when that was long ago"


def test_nobody_is_fenced_whose_slot_would_find_no_host() -> None:
    h = Harness(spares=0, without_spare="wait").start(servers=3)
    going_on(h, 5.0, {"server-0": ["server-1"]})
    assert [event["fenced"] for event in cut_events(h)] == [[]] and h.core.epoch == 1


def test_two_are_fenced_where_the_code_allows_it() -> None:
    h = Harness(CodeSpec(6, 2, 2), spares=2).start(servers=8)
    going_on(h, 3.0, {"server-0": ["server-1"], "server-2": ["server-3"]})
    assert [event["fenced"] for event in cut_events(h)] == [["server-0", "server-2"]]
    assert h.core.fatal is None
