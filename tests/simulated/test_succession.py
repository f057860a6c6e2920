"""A coordinator that was started again: what members tell it, and what it makes of that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from coordinator_harness import MEMBERS, Harness, known, rejoin, taken_over, told, word_of
from msgspec.structs import replace

from torch_ecrec.coordinator.admission import FENCED
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.coordinator.suspicion import LEARNS_S
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.protocol.messages import Placement


def test_members_tell_a_new_coordinator_what_they_know() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        assert not after.core.slots
        rejoin(after, known(before, name))
    assert after.places == before.places and after.core.epoch == before.core.epoch + 1 and after.core.load_end == 0
    assert after.core.roster.version == before.core.roster.version, "it has changed nothing"
    assert after.core.era == 0 and after.core.fatal is None
    assert after.server() == "server-1000", "names that were given before may be known to nobody here"
    assert after.core.rejoin_refusal(word_of(known(before, "server-1", session_id="another"))) == ("fenced", FENCED)


def test_after_thousands_of_losses_no_name_is_given_twice() -> None:
    """One that lives would lose its place to a newcomer of its name."""
    before, after, given = Harness().start(), Harness(), set(MEMBERS)
    for _ in range(1500):
        name = before.server()
        assert name not in given
        given.add(name)
        before.lose(name)
    last = before.server()  # a spare
    before.enter()
    given.add(last)
    assert last == "server-0_1504"
    for name in [*MEMBERS, last]:
        rejoin(after, known(before, name))
    after.now_s += 10.0
    after.core.on_tick(after.now_s)
    assert not after.core.regathering and after.core.members[last].present and after.core.fatal is None
    for _ in range(800):
        name = after.server()
        assert name not in given
        given.add(name)
    assert after.core.members[last].session_id == known(before, last)["session_id"]


def test_nor_after_thousands_of_starts_of_the_trainers() -> None:
    job, given = Harness().job, list[str]()
    joins = [join_of("trainer", "x", 1, rank=rank, job=job) for rank in range(2)]
    for term in range(3):
        members = Members(lambda name, word: None, 1.0)
        if term:
            members.follow(term - 1)
        given += [members.name_for(join) for join in [*joins, join_of("server", "y", 1)] for _ in range(2500)]
    assert len(set(given)) == len(given) and "trainer-1_1000_1001" in given
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,100}", name) for name in given)


def come_back(names: Sequence[str], gone: Sequence[str], one_host: bool = False, deaf: str = "") -> Harness:
    """All but who is gone are with the next coordinator, and then say whom they cannot reach. `deaf`: it can."""
    before, after = Harness().start(), Harness()
    for i, name in enumerate(names):
        rejoin(after, known(before, name, address=[f"10.0.0.{1 if one_host else 1 + i}", 1]))
    after.now_s += 0.3
    for name in names:
        assert after.core.regathering
        after.say(name, type="beat", unreachable=[] if name == deaf else list(gone))
    return after


def test_a_server_whose_host_went_with_the_coordinator_s_is_not_waited_for() -> None:
    """Nobody can reach it, on any host: its slots get another as soon as all have said so."""
    after = come_back([name for name in MEMBERS if name != "server-1"], ["server-1"])
    assert not after.core.regathering and after.now_s < REGATHER_S
    assert after.places == ["server-0", "server-3", "server-2"] and after.core.fatal is None and after.core.era == 0
    assert after.core.rejoin_refusal(word_of(known(Harness().start(), "server-1"))) == ("fenced", FENCED)


@pytest.mark.parametrize(
    ("missing", "how"),
    [
        (["server-1"], {"deaf": "server-3"}),
        (["server-1"], {"deaf": "trainer-0"}),
        (["server-1"], {"one_host": True}),
        (["server-1", "server-2"], {}),  # more than parity repairs: for a lease
        (["server-1", "trainer-1"], {}),
    ],
    ids=["one can reach it", "a trainer can", "all are on one host", "beyond parity", "a trainer is missing, too"],
)
def test_who_may_come_back_is_waited_for(missing: list[str], how: dict[str, Any]) -> None:
    after = come_back([name for name in MEMBERS if name not in missing], missing, **how)
    after.core.on_tick(after.now_s)
    assert after.core.regathering and after.core.fatal is None
    after.now_s += REGATHER_S
    after.core.on_tick(after.now_s)
    assert after.core.regathering == (len(missing) == 2 and "server-2" in missing)


def test_who_comes_back_after_all_is_no_loss() -> None:
    """It was behind a link that is there again, and comes before the last has said that it cannot reach it."""
    before, after = Harness().start(), Harness()
    others = [name for name in MEMBERS if name != "server-1"]
    for i, name in enumerate(others):
        rejoin(after, known(before, name, address=[f"10.0.0.{i}", 1]))
    for name in others[:-1]:
        after.say(name, type="beat", unreachable=["server-1"])
    rejoin(after, known(before, "server-1", address=["10.0.0.9", 1]))
    assert not after.core.regathering and after.places == before.places


def test_of_two_behind_one_switch_the_second_is_waited_for_a_moment() -> None:
    """Nobody could reach either, which is more than parity repairs. The switch is there again: both come, and one is
    the first."""
    others = [name for name in MEMBERS if name not in ("server-1", "server-2")]
    before, after = Harness().start(), come_back(others, ["server-1", "server-2"])
    assert after.core.regathering
    rejoin(after, known(before, "server-1", address=["10.0.0.8", 1]))
    assert after.core.regathering, "it has not said that it cannot reach the other"
    after.now_s += 0.1
    rejoin(after, known(before, "server-2", address=["10.0.0.9", 1]))
    assert not after.core.regathering and after.places == before.places and after.core.fatal is None


@pytest.mark.parametrize("second", [True, False])
def test_one_who_is_late_may_not_be_alone(second: bool) -> None:
    """Likewise, when nobody has complained, and only what was lost had made all wait on."""
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        if name not in ("server-1", "server-2"):
            rejoin(after, known(before, name))
    after.now_s += REGATHER_S + 1
    after.core.on_tick(after.now_s)
    assert after.core.regathering, "both lost would be more than parity repairs"
    rejoin(after, known(before, "server-1"))
    assert after.core.regathering
    after.now_s += 0.9 if second else 1.0
    if second:
        rejoin(after, known(before, "server-2"))
    else:
        after.core.on_tick(after.now_s)
    assert not after.core.regathering and after.core.fatal is None
    assert after.places == before.places if second else after.places == ["server-0", "server-1", "server-3"]


def test_who_can_be_reached_again_is_waited_for_again() -> None:
    """Nobody reached two servers, then all do; one comes, and the other may."""
    others = [name for name in MEMBERS if name not in ("server-1", "server-2")]
    before, after = Harness().start(), come_back(others, ["server-1", "server-2"])
    for name in others:
        after.say(name, type="beat", unreachable=[])
    rejoin(after, known(before, "server-1", address=["10.0.0.8", 1]))
    after.say("server-1", type="beat", unreachable=[])
    assert after.core.regathering and after.core.fatal is None


def test_a_slot_that_was_rebuilt_meanwhile_is_whole() -> None:
    """Its host knows, the newest placement does not: the loss of another one is within the contract."""
    before, after = Harness().start(), Harness()
    stale = Placement(before.core.epoch, tuple(replace(p, healthy=i != 1) for i, p in enumerate(before.core.slots)))
    for name in MEMBERS:
        if name != "server-2":
            rejoin(after, known(before, name, placement=messages.json_of(stale)))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.fatal is None and after.places == ["server-0", "server-1", "server-3"]
    assert [place.healthy for place in after.core.slots] == [True, True, False]


def test_a_slot_that_waits_for_a_host_gets_one_of_a_new_coordinator() -> None:
    """The one before could not place it, as nobody was there who could host it; for the new one nobody has to come."""
    before, after = Harness().start(), Harness()
    slots = [
        replace(p, server="", incarnation=1, healthy=False) if p.server == "server-1" else p for p in before.core.slots
    ]
    waiting = messages.json_of(Placement(before.core.epoch + 1, tuple(slots)))
    for name in MEMBERS:
        rejoin(after, known(before, name, placement=waiting, whole=[], incarnations=[]))
    assert "" not in after.places and after.core.slots[1].incarnation == 1 and after.core.fatal is None


def test_a_server_with_two_slots_is_relieved_by_a_new_coordinator() -> None:
    """The one before was gone when the slot was rebuilt, upon which it would have been moved to the spare."""
    after = taken_over()
    assert sorted(set(after.places)) == ["server-0", "server-2"]
    assert not told(after, "server-3", "move"), "nobody has had the time to say whom it cannot reach"
    for _ in range(round(LEARNS_S)):
        after.now_s += 1.0
        after.core.on_tick(after.now_s)
    after.move()
    assert sorted(set(after.places)) == ["server-0", "server-2", "server-3"] and after.core.fatal is None


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


def test_nobody_is_lost_early_where_that_would_be_more_than_parity_repairs() -> None:
    """The coordinator's host has died with a server of it; another member finds its successor later than the others,
    since the network that it had was that host's, too."""
    before, after = Harness().start(), Harness()
    lease_s = after.core._state.members.lease_s
    assert lease_s > REGATHER_S
    for name in MEMBERS:
        if name not in ("server-1", "server-2"):
            rejoin(after, known(before, name))
    begin_s = after.now_s
    for after.now_s in (begin_s + REGATHER_S + 0.1, begin_s + lease_s - 0.1):
        after.core.on_tick(after.now_s)
        assert after.core.regathering and after.core.fatal is None
    rejoin(after, known(before, "server-2"))
    after.now_s += 0.1
    after.core.on_tick(after.now_s)
    assert not after.core.regathering and after.core.fatal is None
    assert after.places == ["server-0", "server-3", "server-2"], "only server-1 is lost"


def without_two(**options: Any) -> tuple[Harness, Harness]:
    """The coordinator before, and the next one; two servers are not back, which one parity cannot repair."""
    before, after = Harness().start(), Harness(**options)
    addresses = {name: ["10.0.0.1", 1 + i] for i, name in enumerate(MEMBERS)}
    for name in MEMBERS:
        if name not in ("server-1", "server-2"):
            rejoin(after, known(before, name, addresses=addresses))
    return before, after


def on_tick_after(h: Harness, seconds: float) -> None:
    h.now_s += seconds
    for name in h.core.members:
        h.core.on_heard(name, h.now_s)
    h.core.on_tick(h.now_s)


def test_who_is_missing_and_too_many_is_waited_for_and_then_lost() -> None:
    _, after = without_two(standstill_s=40.0)
    on_tick_after(after, 11.0)
    assert after.core.status(after.now_s).stands_still.why.keys() == {"server-1", "server-2"}
    stands = told(after, "trainer-0", "stands")[-1]
    assert stands["names"] == ["server-1", "server-2"] and 0 < stands["left_s"] <= 40.0
    on_tick_after(after, 25.0)
    assert after.core.regathering and after.core.fatal is None
    on_tick_after(after, 20.0)
    assert not after.core.regathering and after.core.fatal_kind == "data_loss"


def test_a_coordinator_that_ended_between_roster_and_placement_and_then_all_are_lost() -> None:
    """Members know who is there, and not where slots are: the next coordinator places them, without who is gone."""
    before, after = Harness().start(), Harness()
    there = ["server-0", "server-1", "trainer-0", "trainer-1"]
    for name in there:
        rejoin(after, known(before, name, placement=None, load_end=None))
    on_tick_after(after, REGATHER_S + 1.0)
    assert not after.core.regathering and after.core.epoch == 0 and set(after.core.roster.names) == set(there)
    for name in ("trainer-1", "trainer-0", "server-1"):
        after.lose(name)
    assert after.core.roster.names == ["server-0"]
    later = [after.server(), after.server()]
    for rank in range(2):
        after.trainer(rank)
    after.enter()
    on_tick_after(after, 10.0)
    assert after.core.epoch == 1 and sorted(after.places) == sorted(["server-0", *later])


def test_who_is_missing_and_known_to_be_dead_is_not_waited_for() -> None:
    before, after = without_two()
    assert set(after.core.missing()) == {"server-1", "server-2"}
    after.core.on_gone("server-1", after.core.missing()["server-1"], after.now_s, "gone")
    on_tick_after(after, 11.0)
    assert after.core.regathering and after.core.fatal is None, "server-2 may be back"
    rejoin(after, known(before, "server-2"))
    on_tick_after(after, 0.1)
    assert not after.core.regathering and after.places == ["server-0", "server-3", "server-2"]
    _, after = without_two()
    for name in ("server-1", "server-2"):
        after.core.on_gone(name, after.core.missing()[name], after.now_s, "gone")
    on_tick_after(after, REGATHER_S + 0.1)
    assert not after.core.regathering and after.core.fatal_kind == "data_loss"


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


def test_a_member_without_a_roster_does_not_end_the_waiting() -> None:
    before, after = Harness().start(), Harness()
    rejoin(after, known(before, "server-3", placement=None, job=None, world=[], roster=0))
    after.core.on_tick(after.now_s)
    for name in MEMBERS:
        if name != "server-3":
            rejoin(after, known(before, name))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.places == before.places and after.core.fatal is None


def test_who_has_not_heard_of_the_newest_roster_is_told_all_of_it() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        rejoin(after, known(before, name, roster=2 if name == "server-1" else 1))
    assert {told(after, name, "roster")[-1]["version"] for name in MEMBERS} == {3}
    assert after.core.roster.version == 3 and after.core.roster.names == list(MEMBERS)


def test_the_coordinator_outlives_a_training_whose_servers_have_left() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1", "server-0", "server-1", "server-2", "server-3"):
        h.say(name, type="leave")
    h.now_s += 1
    h.core.on_tick(h.now_s)
    assert h.core.fatal is None


def test_a_trainer_that_is_done_is_not_missing_to_the_next_coordinator() -> None:
    """Another one still evaluates: it was told who is done, and tells that."""
    before, after = Harness().start(), Harness()
    before.say("trainer-0", type="loaded", load_end=0)
    before.say("trainer-0", type="leave")
    assert told(before, "trainer-1", "left") == told(before, "trainer-0", "left") == [{"type": "left", "trainers": [0]}]
    before.lose("trainer-0")
    for name in MEMBERS:
        if name != "trainer-0":
            rejoin(after, known(before, name, left=[0] if name == "trainer-1" else []))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert not after.core.regathering and after.core.era == 0 and after.core.members["trainer-1"].present
    assert not told(after, "trainer-1", "fatal") and told(after, "trainer-1", "rejoined")


def test_a_trainer_that_leaves_and_ends_while_members_come_back_is_done() -> None:
    before, after = Harness().start(), Harness()
    rejoin(after, known(before, "trainer-0"))
    after.say("trainer-0", type="leave")
    assert told(after, "trainer-0", "left"), "it stays until it is told"
    after.lose("trainer-0")
    for name in MEMBERS:
        if name != "trainer-0":
            rejoin(after, known(before, name))
    assert not after.core.regathering and after.core.era == 0 and not told(after, "trainer-1", "fatal")


def test_a_trainer_that_was_not_heard_to_leave_says_it_again() -> None:
    h = Harness().start()
    for _ in range(2):
        h.say("trainer-1", type="leave")
    assert len(told(h, "trainer-1", "left")) == 2
    assert [event["event"] for event in h.events].count("left") == 1


def test_who_goes_on_without_a_trainer_that_is_done_tells_of_who_comes_later() -> None:
    """Else it could not reach a server that came after that."""
    h = Harness().start()
    h.say("trainer-0", type="loaded", load_end=0)
    h.say("trainer-0", type="leave")
    h.server()
    h.enter()
    assert {"server-4", "trainer-1"} <= set(h.core.roster.names) and "trainer-0" not in h.core.roster.names


def test_trainers_that_start_again_after_one_was_done_are_all_new() -> None:
    """Also to a coordinator that has never seen that one."""
    before, after = Harness().start(), Harness()
    for name in MEMBERS[:-1]:
        if name != "trainer-0":
            rejoin(after, known(before, name))
    rejoin(after, known(before, "trainer-1", left=[0]))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert not after.core.regathering and after.core.era == 0
    after.trainer(0)
    assert after.core.era == 1 and told(after, "trainer-1", "fatal")


def test_a_server_that_leaves_while_members_come_back_is_not_given_its_slots() -> None:
    before, after = Harness().start(), Harness()
    for name in MEMBERS[:-1]:
        rejoin(after, known(before, name))
    after.say("server-1", type="leave")
    rejoin(after, known(before, MEMBERS[-1]))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.places == ["server-0", "server-3", "server-2"] and after.core.fatal is None


def test_versions_never_become_less() -> None:
    """A roster was told here before members of the one before came, and another regathering follows it."""
    before, after = Harness(), Harness()
    for _ in range(4):
        before.server()
    for rank in range(2):
        before.trainer(rank)
    first = known(before, "server-0", roster=7, term=3, era=2, world=["server-0"], placement=None)
    rejoin(after, first)
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert (after.core.roster.version, after.core.term, after.core.era) == (7, 4, 2) and after.core.load_end is not None
    late = {
        "roster": 2,
        "term": 0,
        "era": 0,
        "world": ["server-1"],
        "placement": None,
        "load_end": None,
    }
    rejoin(after, known(before, "server-1", **late))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert (after.core.roster.version, after.core.term, after.core.era) == (7, 4, 2) and after.core.load_end is not None
    assert after.server() == "server-4000" and after.trainer(0) == "trainer-0_4001"


def test_slots_that_were_not_placed_yet_are_placed_by_the_next_one() -> None:
    """The coordinator died between the roster and the placement."""
    before, after = Harness(), Harness()
    for _ in range(4):
        before.server()
    for rank in range(2):
        before.trainer(rank)
    world = {"roster": 1, "placement": None, "whole": [], "incarnations": [], "load_end": None}
    for name in MEMBERS:
        rejoin(after, known(before, name, **world))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.roster.version == 2
    after.enter()
    assert after.core.epoch == 1 and "" not in after.places


def test_of_two_that_come_back_under_one_name_the_one_that_hosts_stays() -> None:
    before = Harness().start()
    nobody = {"session_id": "another", "placement": None, "incarnations": [], "roster": 0}
    hosts, empty = known(before, "server-1"), known(before, "server-1", **nobody)
    for first, second, stays in ((hosts, empty, False), (empty, hosts, True)):
        after = Harness()
        rejoin(after, known(before, "server-0"))
        rejoin(after, first)
        assert (after.core.rejoin_refusal(word_of(second)) is None) == stays


def test_who_was_there_before_all_went_back_to_a_checkpoint_is_no_member_any_more() -> None:
    """The coordinator died right after that; a server of before, which knows of later lives of slots, had not heard."""
    went_back = {"url": "memory://x", "folder": "000000000010-x-1", "done": 10, "times": 1}
    before, after = Harness().start(), Harness()
    for name in MEMBERS:
        if name != "server-3":
            rejoin(after, known(before, name, restored=went_back))
    rejoin(after, known(before, "server-3", incarnations=[0, 4, 0]))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert after.core.fatal is None and [place.incarnation for place in after.core.slots] == [0, 0, 0]
    assert after.core.restored is not None and after.core.restored.times == 1
    assert "server-3" not in after.core.members
    assert any(message["kind"] == "fenced" for message in told(after, "server-3", "fatal"))
    late = after.core.rejoin_refusal(word_of(known(before, "trainer-1", session_id="another")))
    assert late is not None and late[0] == "trainers_lost"
