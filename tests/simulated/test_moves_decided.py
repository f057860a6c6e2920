"""When a slot moves, and which word of a move counts: the coordinator alone."""

from __future__ import annotations

import pytest
from coordinator_harness import MEMBERS, Harness, going_on, known, rejoin, told

from torch_ecrec.protocol.messages import BadMessage
from torch_ecrec.spec.job import CodeSpec


def crowded() -> Harness:
    """Slot 1 is to move from server-0 to server-3."""
    h = Harness(spares=0).start(servers=3)
    h.lose("server-1")
    h.server()
    h.enter()
    h.rebuilt(1)
    assert h.moving() == ("server-3", {"slot": 1, "incarnation": 2, "epoch": h.core.epoch, "era": h.core.era})
    return h


@pytest.mark.parametrize("change", [{"slot": 0}, {"incarnation": 1}, {"incarnation": 3}, {"epoch": 1}, {"era": 1}])
def test_a_word_of_another_move_does_not_count(change: dict[str, int]) -> None:
    h = crowded()
    name, move = h.moving()
    many = len(h.sent)
    for kind in ("level", "arrived"):
        h.say(name, type=kind, **{**move, **change})
    assert len(h.sent) == many and h.places == ["server-0", "server-0", "server-2"]
    h.move()


def test_a_word_of_another_server_does_not_count() -> None:
    h = crowded()
    _, move = h.moving()
    h.say("server-2", type="arrived", **move)
    assert h.places == ["server-0", "server-0", "server-2"]


def test_what_begins_another_placement_ends_the_move() -> None:
    h = crowded()
    name, move = h.moving()
    h.lose("server-2")
    places = h.places
    h.say(name, type="level", **move)
    h.say(name, type="arrived", **move)
    assert h.places == places and h.core.slots[1].incarnation == 1


def test_an_era_ends_the_move() -> None:
    h = crowded()
    name, move = h.moving()
    h.lose("trainer-0")
    h.say(name, type="arrived", **move)
    assert h.places == ["server-0", "server-0", "server-2"] and h.core.slots[1].incarnation == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_where_it_was_to_move_to_is_gone(leaves: bool) -> None:
    """The slot stays, and everybody is told: who gave it may have stopped."""
    h = crowded()
    epoch = h.core.epoch
    if leaves:
        h.say("server-3", type="leave")
    h.lose("server-3")
    assert h.core.epoch == epoch + 1 and [event["event"] for event in h.events].count("stayed") == 1
    assert all(place.healthy for place in h.core.slots)
    h.server()
    h.enter()
    assert h.moving()[0] == "server-4"
    h.move()


@pytest.mark.parametrize("drained_in_between", [False, True])
def test_once_others_are_heard_again_a_slot_moves_that_could_not(drained_in_between: bool) -> None:
    """All were silent, as the coordinator was cut off: where it was to move to, too."""
    h = Harness(lease_s=3.0).start()
    going_on(h, 1.0, {})
    if not drained_in_between:
        assert h.core.drain("server-1", undo=False) == "" and h.moving()[0] == "server-3"
    going_on(h, 5.0, {}, silent=tuple(h.core.members))
    many = len(told(h, "server-3", "move"))
    if drained_in_between:
        assert h.core.drain("server-1", undo=False) == "" and not many, "nobody is heard whom it could move to"
    else:
        assert [event["event"] for event in h.events].count("stayed") == 1
    going_on(h, 1.0, {})
    assert len(told(h, "server-3", "move")) == many + 1
    h.move()
    assert "server-1" not in h.places


def test_who_comes_back_is_told_again() -> None:
    h = crowded()
    name, move = h.moving()
    h.say(name, type="level", **move)
    many = len(h.sent)
    h.core.on_join_again(name, h.now_s)
    assert (name, {"type": "move", **move, "now": True}) in h.sent[many:]


# drains ---------------------------------------------------------------------------------------------


def test_a_server_is_drained_to_spares() -> None:
    h = Harness(spares=1).start(servers=4)
    assert h.core.drain("server-1", undo=False) == ""
    assert h.moving()[0] == "server-3" and h.places == ["server-0", "server-1", "server-2"]
    many = len(h.sent)
    assert h.core.drain("server-1", undo=False) == "" and len(h.sent) == many, "said once more, it changes nothing"
    h.move()
    assert h.places == ["server-0", "server-3", "server-2"]
    assert [event["member"] for event in h.events if event["event"] == "drained"] == ["server-1"]
    h.lose("server-0")
    assert h.places == ["server-2", "server-3", "server-2"], "it gets no other slot"
    h.rebuilt(0)
    assert h.core.drain("server-1", undo=True) == ""
    assert h.moving()[0] == "server-1"
    h.move()
    assert sorted(set(h.places)) == ["server-1", "server-2", "server-3"]


def test_the_next_coordinator_knows_who_is_drained() -> None:
    """A server that was told says so, and says that it is so no more."""
    before = Harness(spares=1).start(servers=4)
    for undo in (False, True):
        assert before.core.drain("server-1", undo) == ""
    assert told(before, "server-1", "drains") == [
        {"type": "drains", "draining": True},
        {"type": "drains", "draining": False},
    ]
    for draining in (True, False):
        after = Harness(spares=1)
        for name in MEMBERS:
            rejoin(
                after,
                known(before, name, world=MEMBERS, **({"draining": True} if name == "server-1" and draining else {})),
            )
        after.now_s += 10
        after.core.on_tick(after.now_s)
        assert after.core.members["server-1"].draining == draining
        assert (
            after.places == before.places and bool([1 for _, word in after.sent if word["type"] == "move"]) == draining
        )
        if draining:
            assert after.moving() == ("server-3", {"slot": 1, "incarnation": 1, "epoch": after.core.epoch, "era": 0})


def test_who_was_away_when_it_was_drained_hears_it_on_its_return() -> None:
    h = Harness(spares=1).start(servers=4)
    h.core.drain("server-1", undo=False)
    many = len(h.sent)
    rejoin(h, known(h, "server-1"))
    assert ("server-1", {"type": "drains", "draining": True}) in h.sent[many:]
    many = len(h.sent)
    rejoin(h, known(h, "server-1", draining=True))
    assert "drains" not in [word["type"] for _, word in h.sent[many:]]
    h.core.on_join_again("server-1", h.now_s)
    assert told(h, "server-1", "drains") == [{"type": "drains", "draining": True}] * 3


def test_a_cluster_that_begins_anew_puts_no_slot_on_who_is_drained() -> None:
    """All have gone back to a checkpoint, or a server was fenced: it joins as another, and says that it was drained."""
    h = Harness(spares=1)
    for draining in (True, False, False, False):
        h.join(role="server", **({"draining": True} if draining else {}))
    for rank in range(2):
        h.trainer(rank)
    h.now_s += 10
    h.core.on_tick(h.now_s)
    h.enter()
    assert sorted(h.places) == ["server-1", "server-2", "server-3"] and h.core.members["server-0"].draining
    with pytest.raises(BadMessage, match="a trainer that is drained"):
        h.trainer(0, draining=True)


def test_without_a_spare_a_drain_waits_for_a_server() -> None:
    h = Harness(spares=0).start(servers=3)
    assert h.core.drain("server-1", undo=False) == ""
    assert not [word for _, word in h.sent if word["type"] == "move"]
    h.server()
    h.enter()
    assert h.moving()[0] == "server-3"
    h.move()
    assert h.places == ["server-0", "server-3", "server-2"]


def test_a_failure_domain_is_drained_slot_by_slot() -> None:
    h = Harness(CodeSpec(5, 3, 2), spares=2).start(domains=["r/a", "r/a", "r/b", "r/bb", "r/c", "r/d", "r/e"])
    assert h.core.drain("r/a", undo=False) == ""
    before = set(h.places) & {"server-0", "server-1"}
    for _ in before:
        h.move()
    assert before and not {"server-0", "server-1"} & set(h.places) and "server-3" in h.places
    assert {event["member"] for event in h.events if event["event"] == "drained"} == before


def test_what_nobody_is_called_is_refused() -> None:
    h = Harness().start()
    assert "no server is called 'server-9'" in h.core.drain("server-9", undo=False)
    assert "there are server-0, server-1, server-2, server-3" in h.core.drain("", undo=False)
    assert Harness().core.drain("server-0", undo=False).endswith("; there are none yet")


def test_undone_a_drain_leaves_what_has_not_moved() -> None:
    h = Harness(spares=1).start(servers=4)
    h.core.drain("server-1", undo=False)
    name, move = h.moving()
    h.core.drain("server-1", undo=True)
    h.say(name, type="arrived", **move)
    assert h.places == ["server-0", "server-1", "server-2"]
    assert not any(member.draining for member in h.core.members.values())
