"""The status of a cluster: what is declared is what is told and read, and what a member reports is strict."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, get_args

import coordinator_words
import pytest
from coordinator_harness import TABLES, Harness
from coordinator_words import healthy, member, slot_report
from msgspec.structs import replace

import torch_ecrec
from torch_ecrec.observe.text import TABLES_SHOWN, format_status
from torch_ecrec.processes.launch import Lacking
from torch_ecrec.protocol import bounds, messages
from torch_ecrec.protocol.messages import BadMessage, Placement
from torch_ecrec.protocol.status import (
    Complaint,
    Connections,
    Gathering,
    Late,
    ProcessReport,
    Report,
    SpreadStatus,
    Status,
    TableStatus,
    Trained,
    WaitedFor,
    json_of,
    of_message,
)
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import POOLINGS, WIRES

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
    assert shown["slots"][0] == {
        **{"slot": 0, "server": "server-0", "incarnation": 0, "healthy": True, "filling": None}
    }
    assert shown["members"][2]["report"] == {"awaits": [1]}, "what a member does not say is absent"


def test_what_a_coordinator_says_is_its_status() -> None:
    h = Harness().start()
    said = h.core.status(h.now_s)
    assert of_message(json.loads(json.dumps(json_of(said)))) == said and said.healthy and len(said.servers) == 4


def test_a_newer_coordinator_may_say_more_anywhere() -> None:
    """Also within what members report, which is strict where a member says it."""
    waits = WaitedFor(1.0, 3, 0.1, {"server-0": 0.5})
    report = replace(REPORT, process=ProcessReport("a", 1, 2, 3), trained=Trained(5, 6), waits=waits)
    said = replace(SAID, members=[member("server-1", slow=Late(0.9, 0.5, 0.01), report=report)])
    said = replace(said, gathering=Gathering((1, 2), (3, 4)))
    shown = json.loads(json.dumps(json_of(said)))
    one = shown["members"][0]
    parts = [shown, one, shown["code"], shown["slots"][0], shown["unreachable"][0], shown["gathering"], one["slow"]]
    parts += [one["report"], one["report"]["slots"][0]]
    parts += [one["report"][name] for name in ("connections", "process", "trained", "waits")]
    for part in parts:
        part["of_tomorrow"] = {"x": [1]}
    assert of_message(shown) == said
    with pytest.raises(BadMessage, match="of_tomorrow"):
        messages.from_member({"type": "beat", "report": one["report"]})


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


def started(*tables: TableSpec, **report: str) -> Status:
    """What a coordinator says of three slots and these tables, once a trainer has reported that."""
    h = Harness(trainers=1)
    h.job = JobSpec(tables or TABLES, CodeSpec(3, 2, 1), 1)
    h.start()
    h.say("trainer-0", type="beat", report=report)
    said = h.core.status(h.now_s)
    assert of_message(json.loads(json.dumps(json_of(said)))) == said
    return said


WHOLE = TableSpec("whole", 60, 4, -1.0, 1.0, sharding="table_wise", pooling_factor=10.0)
DEALT = TableSpec("dealt", 90, 4, -1.0, 1.0, sharding="auto")


def test_a_status_says_where_tables_lie_and_whether_their_bags_are_pooled() -> None:
    spread = started(WHOLE, DEALT).spread
    assert spread is not None and spread.tables == [
        TableStatus(name="whole", rows=60, dim=4, slots=[(0, 0)], pooled=True),
        TableStatus(name="dealt", rows=90, dim=4, slots=[(1, 2)], pooled=False),
    ]
    assert sum(spread.load) == pytest.approx(3, abs=1e-3) and spread.load[0] > 2.9, "long bags of one table"
    assert sum(spread.records) == pytest.approx(3, abs=1e-3) and max(spread.records) < 1.25
    assert Harness().core.status(0.0).spread is None, "no trainer has come"


@pytest.mark.parametrize(
    ("report", "pooled"),
    [
        ({}, [True, False]),
        ({"wire": "float32", "pooling": "parts"}, [True, True]),
        ({"wire": "float32", "pooling": "whole"}, [True, False]),
        ({"wire": "float32", "pooling": "rows"}, [False, False]),
        ({"wire": "bfloat16", "pooling": "parts"}, [False, False]),
    ],
)
def test_a_status_says_which_bags_slots_pool_as_trainers_have_it(report: dict[str, str], pooled: list[bool]) -> None:
    spread = started(WHOLE, DEALT, **report).spread
    assert spread is not None and [table.pooled for table in spread.tables] == pooled
    assert get_args(bounds.WireName) == WIRES and get_args(bounds.PoolingName) == POOLINGS


def test_tables_of_a_status_as_text() -> None:
    lines = format_status(started(WHOLE, DEALT)).splitlines()
    at = next(i for i, line in enumerate(lines) if "lies on" in line)
    assert [re.split("  +", line.strip()) for line in lines[at : at + 4]] == [
        ["table", "rows", "dim", "lies on", "long bags"],
        ["whole", "60", "4", "slot 0", "pooled there"],
        ["dealt", "90", "4", "slots 1-2", "as rows"],
        [""],
    ]
    head = next(i for i, line in enumerate(lines) if "load/mean" in line)
    assert lines[head].endswith("  records/mean  load/mean") and re.search(r"  1\.\d\d +2\.9\d$", lines[head + 1])
    two = TableStatus(name="t", rows=2, dim=4, slots=[(0, 1), (4, 4)], pooled=False)
    runs = coordinator_words.status(spread=SpreadStatus([two], [], []))
    assert "slots 0-1, 4" in format_status(runs)


@pytest.mark.parametrize(("more", "shown"), [(0, True), (1, False)])
def test_many_tables_are_shown_when_asked_for(more: int, shown: bool) -> None:
    said = started(*(TableSpec(f"t{i}", 40, 4, -1.0, 1.0, sharding="auto") for i in range(TABLES_SHOWN + more)))
    text = format_status(said)
    assert ("t0 " in text) == shown and ("torch-ecrec status --tables" in text) != shown
    assert "t0 " in format_status(said, tables=True) and "--tables" not in format_status(said, tables=True)


def test_a_server_says_once_what_the_cluster_lacks_when_that_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    """Seven servers that were started together said it seven times each."""
    caplog.set_level(logging.INFO)
    lacking = Lacking("1.2.3.4:5")
    for there in range(1, 6):
        lacking.on_control(Gathering((there, 5), (0, 2)))
    lacking.look()
    assert not caplog.messages, "more may come"
    for _ in range(3):
        lacking.look()
    (said,) = caplog.messages
    assert said.startswith("the cluster has not begun: 5 of 5 servers and 0 of 2 trainers are there")
    lacking.on_control(Gathering((5, 5), (1, 2)))
    lacking.on_control(messages.Placed(Placement(1, ())))
    for _ in range(3):
        lacking.look()
    assert caplog.messages == [said], "it has begun"
