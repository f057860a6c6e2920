"""Events of the coordinator: what is declared is what is told, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from torch_ecrec.observe import events
from torch_ecrec.observe.events import AnyEvent, Event, Happened
from torch_ecrec.protocol import messages

EXAMPLES: tuple[tuple[Event, dict[str, Any]], ...] = (
    (
        events.Joined("trainer-1", "trainer", 1, 7),
        {"event": "joined", "member": "trainer-1", "role": "trainer", "rank": 1, "pid": 7},
    ),
    (events.Back("server-0", 7), {"event": "back", "member": "server-0", "pid": 7}),
    (events.Killed("server-2"), {"event": "killed", "member": "server-2"}),
    (
        events.Cut([("server-0", "server-1")], ["server-0"], ""),
        {"event": "cut", "pairs": [["server-0", "server-1"]], "fenced": ["server-0"], "why": ""},
    ),
    (events.AtRisk(["row1/rack3"]), {"event": "at_risk", "domains": ["row1/rack3"]}),
    (
        events.TurnedAway("server-0", "b07004c3", 7, "it is of another", False),
        {
            "event": "turned_away",
            "member": "server-0",
            "run": "b07004c3",
            "pid": 7,
            "why": "it is of another",
            "refuses": False,
        },
    ),
    (
        events.StandsStill(["server-0"], "not heard of for 10 s", None),
        {"event": "stands_still", "members": ["server-0"], "why": "not heard of for 10 s", "left_s": None},
    ),
    (events.GoesOn(), {"event": "goes_on"}),
    (events.MemberLeft("server-0"), {"event": "left", "member": "server-0"}),
    (
        events.Slow("server-0", 0.9, 0.5, 0.01),
        {"event": "slow", "member": "server-0", "share": 0.9, "late_s": 0.5, "usual_s": 0.01},
    ),
    (events.NotSlow("server-0"), {"event": "not_slow", "member": "server-0"}),
    (events.Draining("server-0", "it is slow"), {"event": "draining", "member": "server-0", "why": "it is slow"}),
    (messages.NotExact(7, "a table began anew"), {"event": "not_exact", "step": 7, "what": "a table began anew"}),
    (events.JobForgotten("it has seed 0"), {"event": "job_forgotten", "difference": "it has seed 0"}),
    (
        events.CheckpointBegun("000000000010-a-1", 10, ""),
        {"event": "checkpoint_begun", "name": "000000000010-a-1", "step": 10, "base": ""},
    ),
    (
        events.Checkpointed("000000000010-a-1", 10, "", 99, 0.5),
        {"event": "checkpointed", "name": "000000000010-a-1", "step": 10, "base": "", "bytes": 99, "seconds": 0.5},
    ),
    (
        events.CheckpointVoid(10, "slot 1: no room"),
        {"event": "checkpoint_void", "step": 10, "reason": "slot 1: no room"},
    ),
    (
        events.Saved("000000000012-a-1", 12, "000000000010-a-1", 1234, 0.5),
        {
            "event": "saved",
            "name": "000000000012-a-1",
            "step": 12,
            "base": "000000000010-a-1",
            "bytes": 1234,
            "seconds": 0.5,
        },
    ),
    (
        events.WentBeyond("000000000010-a-1", 10, "slots [0, 1] are lost together"),
        {"event": "went_beyond", "name": "000000000010-a-1", "step": 10, "reason": "slots [0, 1] are lost together"},
    ),
    (events.BeganAnew(), {"event": "began_anew"}),
    (
        events.RecoveredPartly([0, 1], "000000000010-a-1", 10, 12, 0.25, "slots [0, 1] are lost together"),
        {
            "event": "recovered_partly",
            "slots": [0, 1],
            "name": "000000000010-a-1",
            "step": 10,
            "at": 12,
            "lost_samples": 0.25,
            "reason": "slots [0, 1] are lost together",
            "saves": 0,
        },
    ),
    (
        events.Lost("server-0", "it left", [0, 2]),
        {"event": "lost", "member": "server-0", "why": "it left", "slots": [0, 2]},
    ),
    (
        events.RosterIs(2, ["server-0", "trainer-0"]),
        {"event": "roster", "version": 2, "members": ["server-0", "trainer-0"]},
    ),
    (events.Regathering(), {"event": "regathering"}),
    (events.Regathered(3, ["server-0"]), {"event": "regathered", "epoch": 3, "members": ["server-0"]}),
    (events.PlacedFirst(1, [("server-0", 0)]), {"event": "placed", "epoch": 1, "slots": [["server-0", 0]]}),
    (events.PlacedAnew(2, [("", 1)]), {"event": "re-placed", "epoch": 2, "slots": [["", 1]]}),
    (events.Stayed(2, [("server-1", 1)]), {"event": "stayed", "epoch": 2, "slots": [["server-1", 1]]}),
    (events.Drained("server-1"), {"event": "drained", "member": "server-1"}),
    (events.Moved(2, [("server-1", 1)]), {"event": "moved", "epoch": 2, "slots": [["server-1", 1]]}),
    (events.Kept(2, [("server-1", 1)]), {"event": "kept", "epoch": 2, "slots": [["server-1", 1]]}),
    (events.HealthyAgain(2, [("server-1", 1)]), {"event": "rebuilt", "epoch": 2, "slots": [["server-1", 1]]}),
    (messages.Ready(1, 0), {"event": "ready", "slot": 1, "incarnation": 0}),
    (events.Rehosted(1, 2), {"event": "re-hosted", "slot": 1, "incarnation": 2}),
    (events.SlotRebuilt(1, 2), {"event": "slot rebuilt", "slot": 1, "incarnation": 2}),
    (events.EraBegun(1, ["trainer-0_2"]), {"event": "era", "era": 1, "trainers": ["trainer-0_2"]}),
    (events.GoingBack(1, 5, 6), {"event": "going back", "era": 1, "step": 5, "applied": 6}),
    (events.Resumable(1, 5), {"event": "resumable", "era": 1, "step": 5}),
    (
        messages.Damaged(1, 2, "record", [("a", 3, 0)], 1, 0, 7, ""),
        {
            "event": "damaged",
            "slot": 1,
            "incarnation": 2,
            "what": "record",
            "places": [["a", 3, 0]],
            "count": 1,
            "used": 0,
            "step": 7,
            "reason": "",
        },
    ),
    (messages.Mended(1, 2, 3), {"event": "mended", "slot": 1, "incarnation": 2, "count": 3}),
    (messages.Fatal("data_loss", "gone"), {"event": "fatal", "kind": "data_loss", "reason": "gone"}),
    (
        events.MessagesRefused("127.0.0.1:9", "no type", 3),
        {"event": "refused", "from": "127.0.0.1:9", "why": "no type", "messages": 3},
    ),
)


SAID = {messages.Ready, messages.Damaged, messages.Mended, messages.NotExact, messages.Fatal}  # and events, too


def leaves(kind: type[Happened]) -> Iterator[type[Happened]]:
    """Those that are announced: the others are bases."""
    below = kind.__subclasses__()
    yield from [kind] if not below else [leaf for one in below for leaf in leaves(one)]


def test_every_event_can_be_read_and_has_an_example() -> None:
    """One that is announced and cannot be read ends the connection of whoever watches."""
    assert {type(event) for event, _ in EXAMPLES} == set(get_args(AnyEvent)) == {*leaves(Happened), *SAID}
    assert set(get_args(Event)) == {Happened, *SAID}


def test_one_name_is_one_class() -> None:
    """What an event says that is no message, it says under a name of its own."""
    said = {kind.__name__ for kind in (*get_args(messages.FromMember), *get_args(messages.FromCoordinator))}
    assert not said & {kind.__name__ for kind in leaves(Happened)}


@pytest.mark.parametrize(("event", "shown"), EXAMPLES)
def test_an_event_is_shown_and_read_again(event: Event, shown: dict[str, Any]) -> None:
    """Lines of the log and messages to watchers stay what they are: tools of others may read them."""
    line = json.dumps(events.json_of(event))
    assert line == json.dumps(shown), "field by field, in this order"
    assert events.of_message({"type": "event", **json.loads(line), "time_s": 1.5}) == event


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "event", "event": "lots", "member": "server-0"}, "lots"),
        ({"type": "event", "event": "left"}, "member"),
        ({"type": "event", "event": "left", "member": 7}, "str"),
        ({"type": "event"}, "event"),
    ],
)
def test_anything_else_is_no_event(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        events.of_message(message)
