"""When a slot moves, and which word of a move counts: the coordinator alone."""

from __future__ import annotations

import pytest
from coordinator_harness import Harness


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


def test_who_comes_back_is_told_again() -> None:
    h = crowded()
    name, move = h.moving()
    h.say(name, type="level", **move)
    many = len(h.sent)
    h.core.on_join_again(name, h.now_s)
    assert (name, {"type": "move", **move, "now": True}) in h.sent[many:]
