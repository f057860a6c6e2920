"""The status of a cluster: what is declared is what is told and read, and what a member reports is strict."""

from __future__ import annotations

import json
from typing import Any

import coordinator_words
import pytest
from coordinator_harness import Harness
from coordinator_words import healthy, member, slot_report

import torch_ecrec
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import BadMessage
from torch_ecrec.protocol.status import Complaint, Connections, Late, Report, json_of, of_message

REPORT = Report([slot_report(1, 0)], {"push": 3}, Connections(tcp=2))
SLOW = member("server-1", slow=Late(0.9, 0.5, 0.01), report=REPORT)
SAID = coordinator_words.status(
    slots=healthy(3),
    members=[member("server-0"), SLOW, member("trainer-0", report=Report(awaits=[1]))],
    unreachable=[Complaint("server-0", "server-1", 2.5)],
    time_s=1e9,
)


def test_a_status_is_shown_and_read_again() -> None:
    shown = json.loads(json.dumps(json_of(SAID)))
    assert of_message(shown) == SAID
    assert shown["type"] == "status" and list(shown) == ["type", *SAID.__struct_fields__], "in this order"
    assert shown["slots"][0] == {"slot": 0, "server": "server-0", "incarnation": 0, "healthy": True}
    assert shown["members"][2]["report"] == {"awaits": [1]}, "what a member does not say is absent"


def test_what_a_coordinator_says_is_its_status() -> None:
    h = Harness().start()
    said = h.core.status(h.now_s)
    assert of_message(json.loads(json.dumps(json_of(said)))) == said and said.healthy and len(said.servers) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "refused"}, "refused"),
        ({"era": "1"}, "era"),
        ({"members": [{"name": "server-0"}]}, "role"),
        ({"version": "0.0.1", "slots": None}, "of torch-ecrec 0.0.1, here "),
    ],
    ids=["another message", "a type", "a member", "another version"],
)
def test_anything_else_is_no_status(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of_message({**json_of(SAID), "version": torch_ecrec.__version__, **change})


def test_a_figure_that_is_lacking_is_named_and_one_of_a_newer_coordinator_is_left_out() -> None:
    shown = json_of(SAID)
    assert of_message({**shown, "of_tomorrow": 1}) == SAID
    del shown["going_back"]
    with pytest.raises(ValueError, match="going_back"):
        of_message(shown)


def test_what_a_member_does_not_say_again_holds() -> None:
    first = Report(bytes_sent={"push": 3}, awaits=[1], refused_messages=2)
    assert first.followed_by(Report(bytes_sent={"push": 4}, awaits=[])) == Report(
        bytes_sent={"push": 4}, awaits=[], refused_messages=2
    )


@pytest.mark.parametrize("change", [{"step": -1}, {"rebuilt": 1.5}, {"rebuild": 0.5}, {"slot": "0"}, {"ready": None}])
def test_what_a_member_reports_is_strict(change: dict[str, Any]) -> None:
    beat = messages.json_of(messages.Beat(Report([slot_report(0, 0)])))
    assert messages.from_member(beat) == messages.Beat(Report([slot_report(0, 0)]))
    beat["report"]["slots"][0] |= change
    with pytest.raises(BadMessage, match="beat"):
        messages.from_member(beat)
