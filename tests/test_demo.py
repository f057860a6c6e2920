"""The demo: what it makes of its arguments and of a coordinator's messages, and a few real runs of it.

The runs are small, but real: processes, SIGKILL, exit codes.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import MARK, ROOT, leftover, wait_for_none

from torch_ecrec.cli.main import main, parser
from torch_ecrec.demo import criteo, report, run, training
from torch_ecrec.demo.kills import KillSpec, parse_kills
from torch_ecrec.demo.plot import draw, spread, throughput
from torch_ecrec.demo.report import Record, format_kill, format_status, format_summary
from torch_ecrec.demo.result import assemble, differences
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.spec.job import CodeSpec

RUN_LIMIT_S = 800.0  # only a hang reaches it, and the next
END_LIMIT_S = 300.0


# --- arguments -------------------------------------------------------------------------------------------------------


def test_kills_are_parsed_and_sorted_by_step() -> None:
    kills = parse_kills(["server:2@9~+5", "server:0@3", "server:1@7+12"], slots=3, steps=10)
    assert kills == [
        KillSpec("server:0@3", "server", 0, 3, False, 0),
        KillSpec("server:1@7+12", "server", 1, 7, False, 12),
        KillSpec("server:2@9~+5", "server", 2, 9, True, 5),
    ]
    assert parse_kills(["none"], slots=3, steps=10) == []
    assert [kill.text for kill in parse_kills(None, slots=3, steps=120)] == ["server:1@60"]
    assert [kill.text for kill in parse_kills(None, slots=1, steps=3)] == ["server:0@1"]
    assert parse_kills(None, slots=3, steps=1) == []


def test_trainers_and_the_coordinator_may_be_killed_as_well() -> None:
    texts = ["coordinator@41~+7", "trainer:1@40", "coordinator@40", "trainer:0@42~", "trainer:1@43+12"]
    assert parse_kills(texts, slots=1, steps=60, trainers=2) == [
        KillSpec("trainer:1@40", "trainer", 1, 40, False, 0),
        KillSpec("coordinator@40", "coordinator", 0, 40, False, 0),
        KillSpec("coordinator@41~+7", "coordinator", 0, 41, True, 7),
        KillSpec("trainer:0@42~", "trainer", 0, 42, True, 0),
        KillSpec("trainer:1@43+12", "trainer", 1, 43, False, 12),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1@5", "must be server:SLOT@STEP"),
        ("server:1", "must be server:SLOT@STEP"),
        ("server:1@5+", "must be server:SLOT@STEP"),
        ("server:-1@5", "must be server:SLOT@STEP"),
        ("server:3@5", "slots are 0 to 2, got 3"),
        ("server:1@10", "the step must be from 1 to 9, got 10"),
        ("server:1@0", "the step must be from 1 to 9, got 0"),
        ("trainer:2@5", "`--kill trainer:2@5`: trainers are 0 to 1, got 2"),
        ("trainer:0@10~", "`--kill trainer:0@10~`: the step must be from 1 to 9, got 10"),
        ("coordinator@0", "`--kill coordinator@0`: the step must be from 1 to 9, got 0"),
        ("trainer@5", "trainer:RANK@..., coordinator@... or none, got 'trainer@5'"),
        ("coordinator:0@5", "coordinator@... or none, got 'coordinator:0@5'"),
    ],
)
def test_a_bad_kill_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_kills([text], slots=3, steps=10, trainers=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-k", "3"], "needs as many slots, got 3"),
        (["-r", "0"], "`r` must be at least 1, got 0"),
        (["--steps", "0"], "`steps` must be at least 1, got 0"),
        (["--trainers", "0"], "`trainers` must be at least 1, got 0"),
        (["--batch-size", "-1"], "`batch-size` must be at least 1, got -1"),
        (["--spares", "-1"], "`spares` must be at least 0, got -1"),
        (["--kill", "server:9@5"], "slots are 0 to 2, got 9"),
        (["--kill", "trainer:3@5", "--trainers", "3"], "`--kill trainer:3@5`: trainers are 0 to 2, got 3"),
        (["--data", "none.tsv"], "none.tsv: no such file"),
        (["--data", "bad.tsv"], "bad.tsv, line 3: 39 columns, expected 40"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    criteo.write_synthetic("bad.tsv", rows=3, seed=0)
    lines = Path("bad.tsv").read_text().splitlines()
    Path("bad.tsv").write_text("\n".join([*lines[:2], lines[2].rpartition("\t")[0]]) + "\n")

    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(training, "Supervisor", start)
    monkeypatch.setattr(run, "warm", start)
    assert main(["demo", "--out", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# --- what a coordinator says -----------------------------------------------------------------------------------------


def event(time_s: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "event", "event": kind, "time_s": time_s, **more}


def steps(first: int, last: int, begin_s: float, step_s: float = 0.1, trainers: int = 2) -> list[dict[str, Any]]:
    """Progress of all trainers, step after step, the last of them 10 ms behind."""
    return [
        {"type": "progress", "trainer": t, "step": s, "loss": 0.5, "time_s": begin_s + (s - first) * step_s + 0.01 * t}
        for s in range(first, last + 1)
        for t in range(trainers)
    ]


def joined(time_s: float, member: str, pid: int) -> dict[str, Any]:
    role, number = member.partition("_")[0].split("-")
    rank = int(number) if role == "trainer" else -1
    return event(time_s, "joined", member=member, role=role, rank=rank, pid=pid)


JOINED = [
    *(joined(0.0, f"server-{i}", 100 + i) for i in range(4)),
    *(joined(0.4, f"trainer-{i}", 200 + i) for i in range(2)),
]
PLACED = event(0.5, "placed", epoch=1, slots=[["server-0", 0], ["server-1", 0], ["server-2", 0]])


def recovery(at_s: float, lost: str, slot: int, to: str, slots: list[list[Any]]) -> list[dict[str, Any]]:
    """The coordinator's events from the loss of a slot to its rebuild 0.5 s later."""
    incarnation = slots[slot][1]
    return [
        event(at_s + 0.02, "lost", member=lost, why="its connection ended", slots=[slot]),
        event(at_s + 0.03, "re-placed", epoch=1, slots=slots),
        event(at_s + 0.05, "re-hosted", slot=slot, incarnation=incarnation),
        event(at_s + 0.50, "slot rebuilt", slot=slot, incarnation=incarnation),
    ]


def recorded() -> Record:
    """40 steps of 0.1 s; after step 20 slot 1 is lost, and step 22, the first begun after it, takes 0.3 s longer."""
    record = Record(trainers=2, slots=3)
    for message in [*JOINED, PLACED, *steps(1, 20, 1.0)]:
        record.on_message(message)
    record.on_kill("server:1@20", "server", 1, time_s=2.92)
    after = [["server-0", 0], ["server-3", 1], ["server-2", 0]]
    messages = [*steps(21, 21, 3.0), *steps(22, 40, 3.4), *recovery(2.92, "server-1", 1, "server-3", after)]
    for message in sorted(messages, key=lambda message: message["time_s"]):
        record.on_message(message)
    return record


def test_the_timeline_of_a_failure() -> None:
    record = recorded()
    assert record.step == 40 and record.settled
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["member"], entry["pid"], entry["slots_lost"]) == ("server-1", 101, [1])
    assert (entry["role"], entry["number"], entry["resumed_after"]) == ("server", 1, None)
    assert (entry["step"], entry["first_step"]) == (20, 22)
    assert entry["times"]["kill_s"] == 2.92
    after = entry["after_kill_s"]
    assert [after.pop(name) for name in ("resumable_s", "rejoined_s")] == [None, None], "of other roles"
    assert after == pytest.approx(
        {"detected_s": 0.02, "rehosted_s": 0.05, "first_step_s": 0.49, "rebuilt_s": 0.5, "stall_s": 0.4}
    )
    text = "\n".join(format_kill(entry))
    order = [text.index(word) for word in ("killed", "detected", "re-hosted", "first step", "rebuilt: fully", "pause")]
    assert order == sorted(order)


def test_throughput_before_during_and_after() -> None:
    rates = recorded().throughput(samples_per_step=10)
    assert rates["before"] == pytest.approx(100, rel=0.05)
    assert rates["after"] == pytest.approx(100, rel=0.05)
    assert rates["rebuild"] == pytest.approx(40)  # steps 21 and 22 in 0.5 s
    assert Record(2, 3).throughput(10) == {"before": None, "rebuild": None, "after": None}


def test_a_process_with_two_slots_is_one_loss_of_both() -> None:
    record = Record(trainers=1, slots=3)
    for message in [*JOINED, event(0.5, "placed", epoch=1, slots=[["server-0", 0], ["server-1", 0], ["server-1", 0]])]:
        record.on_message(message)
    record.on_message({"type": "progress", "trainer": 0, "step": 1, "time_s": 1.0})
    record.on_kill("server:1@1", "server", 1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1, 2]))
    record.on_kill("server:2@1", "server", 2, time_s=1.1)
    record.on_message(event(1.2, "re-placed", epoch=1, slots=[["server-0", 0], ["server-3", 1], ["server-3", 1]]))
    record.on_message(event(1.3, "re-hosted", slot=1, incarnation=1))
    assert record.kills[0].rehosted_s is None, "slot 2 is not there yet"
    record.on_message(event(1.4, "re-hosted", slot=2, incarnation=1))
    for kill in record.kills:
        assert (kill.lost, kill.detected_s, kill.rehosted_s, kill.rebuilt_s) == ({1: 0, 2: 0}, 1.1, 1.4, None)
    assert not record.settled


def test_a_new_host_that_is_lost_too_ends_the_first_recovery_later() -> None:
    record = Record(trainers=1, slots=3)
    for message in [*JOINED, PLACED]:
        record.on_message(message)
    record.on_kill("server:1@1", "server", 1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1]))
    record.on_message(event(1.1, "re-placed", epoch=1, slots=[["server-0", 0], ["server-3", 1], ["server-2", 0]]))
    record.on_kill("server:1@2", "server", 1, time_s=1.2)
    record.on_message(event(1.3, "lost", member="server-3", why="", slots=[1]))
    record.on_message(event(1.3, "re-placed", epoch=1, slots=[["server-0", 0], ["server-2", 2], ["server-2", 0]]))
    record.on_message(event(1.9, "slot rebuilt", slot=1, incarnation=2))
    assert [kill.member for kill in record.kills] == ["server-1", "server-3"]
    assert [kill.rebuilt_s for kill in record.kills] == [1.9, 1.9]


def watched() -> Record:
    """15 steps of 0.1 s, the last of them complete at 2.41."""
    record = Record(trainers=2, slots=3)
    for message in [*JOINED, PLACED, *steps(1, 15, 1.0)]:
        record.on_message(message)
    record.pids["coordinator"] = 99
    return record


TRAINERS_LOST = [
    event(2.43, "lost", member="trainer-1", why="its connection ended", slots=[]),
    event(2.44, "era", era=1, trainers=[]),
    event(2.9, "resumable", era=1, step=14),
]
TRAINERS_BACK = [joined(7.0, "trainer-1_2", 211), joined(7.2, "trainer-0_2", 210)]


def test_the_timeline_of_the_loss_of_a_trainer() -> None:
    record = watched()
    kill = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    assert (kill.member, kill.pid, kill.step, kill.lost) == ("trainer-1", 201, 15, {})
    lost, era, resumable = TRAINERS_LOST
    record.on_message(lost)
    assert kill.detected_s == 2.43
    record.on_message(era)
    assert kill.detected_s == 2.43, "the first of the two counts"
    assert record.target("trainer", 0) is None and record.target("trainer", 1) is None, "all are started again"
    record.on_message(resumable)
    assert (kill.resumable_s, kill.resumed_after, kill.rejoined_s) == (2.9, 14, None)
    first, last = TRAINERS_BACK
    record.on_message(first)
    assert kill.rejoined_s is None and not record.whole and not record.settled
    record.on_message(last)
    assert kill.rejoined_s == 7.2 and record.settled and record.unexpected == []
    assert record.target("trainer", 1) == "trainer-1_2"

    for message in steps(15, 20, 8.0):
        record.on_message(message)
    assert record.step == 20 and len(record.step_times) == 20, "a step that is done again counts once"
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["role"], entry["number"], entry["member"], entry["slots_lost"]) == ("trainer", 1, "trainer-1", [])
    assert (entry["resumed_after"], entry["first_step"]) == (14, 17)
    after = entry["after_kill_s"]
    assert after["rehosted_s"] is None and after["rebuilt_s"] is None
    assert {name: time_s for name, time_s in after.items() if time_s is not None} == pytest.approx(
        {"detected_s": 0.01, "resumable_s": 0.48, "rejoined_s": 4.78, "first_step_s": 5.79, "stall_s": 5.7}
    )
    text = "\n".join(format_kill(entry))
    words = ["killed: trainer-1, pid 201, at step 15", "detected", "gone back to step 14", "all trainers again"]
    order = [text.index(word) for word in [*words, "(17) complete at all trainers", "pause"]]
    assert order == sorted(order)
    assert "host of slot" not in text and "rebuilt" not in text and "(not)" not in text


def test_steps_that_were_complete_by_the_kill_and_heard_of_later_did_not_begin_after_it() -> None:
    record = watched()
    record.on_kill("server:1@15", "server", 1, time_s=2.75)
    for message in steps(16, 20, 2.5):
        record.on_message(message)
    entry = record.kills[0].to_json(record.step_times)
    done = sum(time_s <= 2.75 for time_s in record.step_times)
    assert 15 < done < 19 and entry["first_step"] == done + 2 and entry["after_kill_s"]["first_step_s"] > 0


def test_a_trainer_that_was_started_again_unnoticed_is_detected_by_the_new_era() -> None:
    record = watched()
    kill = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    record.on_message(TRAINERS_LOST[1])
    assert kill.detected_s == 2.44


def test_what_was_noted_of_one_loss_of_trainers_stays_at_the_next() -> None:
    record = watched()
    record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK, *steps(15, 20, 8.0)]:
        record.on_message(message)
    second = record.on_kill("trainer:0@20", "trainer", 0, time_s=9.0)
    assert (second.member, second.pid) == ("trainer-0_2", 210) and not record.settled
    later = [event(9.1, "era", era=2, trainers=[]), event(9.2, "resumable", era=2, step=19)]
    for message in [*later, joined(9.8, "trainer-0_3", 220), joined(9.9, "trainer-1_3", 221)]:
        record.on_message(message)
    assert [kill.resumed_after for kill in record.kills] == [14, 19]
    assert [kill.rejoined_s for kill in record.kills] == [7.2, 9.9] and record.settled


def test_trainers_that_are_back_stay_when_a_server_is_lost_while_the_others_go_back() -> None:
    record = watched()
    record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, joined(6.0, "trainer-0_2", 210), joined(6.1, "trainer-1_2", 211)]:
        record.on_message(message)
    record.on_message(event(6.5, "era", era=2, trainers=["trainer-0_2", "trainer-1_2"]))
    assert record.trainers == {0: "trainer-0_2", 1: "trainer-1_2"}


def test_the_timeline_of_the_loss_of_a_coordinator() -> None:
    record = watched()
    kill = record.on_kill("coordinator@15", "coordinator", 0, time_s=2.42)
    assert (kill.member, kill.pid, kill.lost) == ("coordinator", 99, {}) and not record.settled
    again = [{**message, "time_s": 5.0} for message in JOINED]
    for message in [*steps(16, 18, 3.0), event(4.9, "regathering"), *again]:
        record.on_message(message)
    assert kill.rejoined_s is None and not record.whole
    members = [message["member"] for message in JOINED]
    record.on_message(event(5.1, "regathered", epoch=2, members=members))
    assert kill.rejoined_s == 5.1 and record.settled and record.unexpected == []
    assert record.places[1] == ("server-1", 0) and record.target("trainer", 1) == "trainer-1"
    entry = kill.to_json(record.step_times)
    assert (entry["role"], entry["number"], entry["resumed_after"]) == ("coordinator", 0, None)
    assert {name: time_s for name, time_s in entry["after_kill_s"].items() if time_s is not None} == pytest.approx(
        {"first_step_s": 0.69, "rejoined_s": 2.68, "stall_s": 0.6}
    )
    lines = format_kill(entry)
    assert "killed: coordinator, pid 99, at step 15" in lines[1]
    assert "first step begun after it (17)" in lines[2] and "all members have rejoined" in lines[3]
    assert len(lines) == 5 and "pause" in lines[4]


def test_the_joining_of_trainers_and_the_regathering_of_a_coordinator_are_kept_apart() -> None:
    record = watched()
    of_trainer = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    of_coordinator = record.on_kill("coordinator@15", "coordinator", 0, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK]:
        record.on_message(message)
    assert (of_trainer.rejoined_s, of_coordinator.rejoined_s) == (7.2, None) and not record.settled
    record.on_message(event(8.0, "regathered", epoch=2, members=[]))
    assert (of_trainer.rejoined_s, of_coordinator.rejoined_s) == (7.2, 8.0) and record.settled


def test_a_trainer_that_ends_by_itself_is_told() -> None:
    """Also after its last step, when it has left: torchrun starts all again, and nothing else is seen of it."""
    record = watched()
    record.on_message(joined(9.0, "trainer-1_2", 211))
    (told,) = record.unexpected
    assert told == "a trainer ended by itself: trainer-1_2 was started again"


def test_a_loss_that_is_not_ours_is_told() -> None:
    record = recorded()
    assert record.unexpected == []
    record.on_message(event(9.0, "lost", member="server-2", why="not heard of for 30 s", slots=[2]))
    record.on_message(event(9.0, "lost", member="server-9", why="a spare", slots=[]))
    assert record.unexpected == ["server-2 was lost though nobody killed it: not heard of for 30 s"]


# --- when kills fire -------------------------------------------------------------------------------------------------


def arguments_of(*words: str) -> argparse.Namespace:
    return parser().parse_args(["demo", *words])


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids that SIGKILL would have gone to."""
    pids: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        pids.append(pid)

    monkeypatch.setattr(training.os, "kill", kill)
    return pids


def started_run(tmp_path: Path, *kills: str) -> DemoRun:
    one = DemoRun(arguments_of("--steps", "40"), CodeSpec(), parse_kills(kills, 3, 40, 2), tmp_path, Terminal())
    one._cluster = SimpleNamespace(coordinator=SimpleNamespace(pid=99))  # type: ignore[assignment]
    for message in [*JOINED, PLACED]:
        one._on_message(message)
    return one


def test_a_kill_fires_when_its_step_is_complete_at_all_trainers(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:2@3")
    *early, last = steps(1, 3, 1.0)
    for message in early:
        one._on_message(message)
    assert killed == [] and one.not_fired() == ["server:1@3", "server:2@3"]
    one._on_message(last)
    assert killed == [101, 102] and one.not_fired() == []
    assert [kill.step for kill in one.record.kills] == [3, 3]


def test_a_kill_with_a_tilde_waits_for_the_rebuild(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:1@4~", "server:0@5~")
    for message in steps(1, 5, 1.0):
        one._on_message(message)
    assert killed == [101]
    for message in recovery(1.2, "server-1", 1, "server-3", [["server-0", 0], ["server-3", 1], ["server-2", 0]]):
        one._on_message(message)
    assert killed == [101], "at a step, not in between"
    for message in steps(6, 7, 2.0):
        one._on_message(message)
    assert killed == [101, 103], "the new host of slot 1, and the next one waits again"
    assert one.not_fired() == ["server:0@5~"]


def test_a_kill_with_a_tilde_waits_until_no_server_holds_two_slots(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:0@4~")
    survivor = recovery(1.2, "server-1", 1, "server-0", [["server-0", 0], ["server-0", 1], ["server-2", 0]])
    moved = [["server-0", 0], ["server-3", 2], ["server-2", 0]]
    for message in [*steps(1, 3, 1.0), *survivor, *steps(4, 5, 2.0)]:
        one._on_message(message)
    assert killed == [101] and one.record.whole and not one.record.settled
    rebuilt = event(3.1, "slot rebuilt", slot=1, incarnation=2)
    for message in [event(3.0, "moved", epoch=1, slots=moved), *steps(6, 6, 3.0), rebuilt, *steps(7, 7, 3.2)]:
        one._on_message(message)
    assert killed == [101, 100] and one.record.kills[1].step == 7


def test_a_kill_with_a_delay_fires_later(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3+20")
    for message in steps(1, 3, 1.0):
        one._on_message(message)
    assert killed == [] and one.not_fired(), "not at once"
    one._timers[0].join(5.0)
    assert killed == [101] and not one.not_fired()


def test_a_kill_of_any_role_goes_to_the_right_process(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@2", "coordinator@3", "server:2@4")
    for message in steps(1, 4, 1.0):
        one._on_message(message)
    assert killed == [201, 99, 102] and one.not_fired() == []
    assert [kill.member for kill in one.record.kills] == ["trainer-1", "coordinator", "server-2"]


def test_a_new_coordinator_tells_of_itself_twice(tmp_path: Path) -> None:
    """First who has rejoined, then, with its placement, that a new epoch has begun."""
    one = started_run(tmp_path)
    one._on_message(event(3.0, "regathered", epoch=1, members=["server-0", "server-1"]))
    one._on_message(event(3.0, "kept", epoch=2, slots=[["server-0", 0], ["server-1", 0], ["server-2", 0]]))
    assert one._news == ["  a new coordinator: 2 members have rejoined"]


def test_a_kill_of_a_trainer_waits_until_one_is_there(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@3")
    for message in [*steps(1, 2, 1.0), event(1.5, "era", era=1, trainers=[]), *steps(3, 3, 1.6)]:
        one._on_message(message)
    assert killed == [] and one.not_fired() == ["trainer:1@3"]
    for message in [*TRAINERS_BACK, *steps(4, 4, 8.0)]:
        one._on_message(message)
    assert killed == [211] and one.not_fired() == []


def test_a_late_kill_of_a_trainer_that_has_gone_comes_at_a_later_step(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@3+20")
    for message in [*steps(1, 3, 1.0), event(1.5, "era", era=1, trainers=[])]:
        one._on_message(message)
    one._timers[0].join(5.0)
    assert killed == [] and one.not_fired() == ["trainer:1@3+20"]
    for message in [*TRAINERS_BACK, *steps(4, 4, 8.0)]:
        one._on_message(message)
    one._timers[1].join(5.0)
    assert killed == [211] and one.not_fired() == []


def test_a_kill_with_a_tilde_waits_for_trainers_and_for_a_coordinator(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@15", "coordinator@16~", "server:0@17~")
    for message in [*steps(1, 15, 1.0), *TRAINERS_LOST, TRAINERS_BACK[0], *steps(16, 16, 7.1)]:
        one._on_message(message)
    assert killed == [201], "one trainer is missing"
    for message in [TRAINERS_BACK[1], *steps(17, 18, 8.0)]:
        one._on_message(message)
    assert killed == [201, 99] and one.not_fired() == ["server:0@17~"]
    for message in [event(9.0, "regathered", epoch=2, members=[]), *steps(19, 19, 9.1)]:
        one._on_message(message)
    assert killed == [201, 99, 100] and one.not_fired() == []


# --- results ---------------------------------------------------------------------------------------------------------


def finished(tmp_path: Path) -> tuple[argparse.Namespace, DemoRun, DemoRun]:
    arguments = arguments_of("--steps", "40", "--data", "rows.tsv")
    runs = []
    for _ in range(2):
        one = DemoRun(arguments, CodeSpec(), [], tmp_path, Terminal())
        one.record = recorded()
        losses = [0.5 - 0.001 * step for step in range(40)]
        one.reports = [
            {"losses": losses, "auc": math.nan, "samples_per_s": 1234.5, "digest": "abc" if trainer == 0 else None}
            for trainer in range(2)
        ]
        runs.append(one)
    return arguments, runs[0], runs[1]


def test_the_result_has_the_documented_keys(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    result = json.loads(json.dumps(assemble(arguments, disturbed, calm, None), allow_nan=False))
    document = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", document))
    keys = {*result, *result["undisturbed"], *result["kills"][0], *result["throughput"], *result["bytes_sent"]}
    keys |= {*result["kills"][0]["times"], *result["kills"][0]["after_kill_s"]}
    assert keys <= named, f"not documented: {sorted(keys - named)}"
    wanted = {"versions", "arguments", "losses", "auc", "samples_per_s", "digest", "undisturbed", "kills", "servers"}
    assert wanted | {"equal", "bytes_sent", "throughput"} <= set(result)
    assert result["equal"] is True and result["auc"] is None
    assert result["losses"][0] == [0.5, 0.5] and result["arguments"]["data"] == "rows.tsv"
    assert {"torch_ecrec", "python", "torch"} <= set(result["versions"])
    assert "EQUAL" in format_summary(result)


def test_one_loss_in_its_last_bit_is_a_difference(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    calm.reports[1]["losses"] = [*calm.reports[1]["losses"]]
    calm.reports[1]["losses"][6] = math.nextafter(calm.reports[1]["losses"][6], 1)
    result = assemble(arguments, disturbed, calm, None)
    assert result["equal"] is False
    assert result["differences"][0].startswith("losses of step 7: ")
    assert "NOT EQUAL: losses of step 7" in format_summary(result)
    assert assemble(arguments, disturbed, None, None)["equal"] is None


def test_a_missing_digest_is_a_difference() -> None:
    one = {"digest": None, "losses": []}
    assert differences(one, one)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    for kills in (0, 1, 3):
        disturbed.record.kills = [recorded().kills[0]] * kills
        draw(assemble(arguments, disturbed, calm, None), tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").read_bytes()[:4] == b"\x89PNG"
        (tmp_path / "recovery.png").unlink()


def test_kills_of_all_roles_are_drawn(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    one = disturbed.record = watched()
    one.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK, *steps(15, 20, 8.0)]:
        one.on_message(message)
    one.on_kill("coordinator@20", "coordinator", 0, time_s=8.52)
    for message in [*steps(21, 22, 8.6), event(9.9, "regathered", epoch=2, members=[]), *steps(23, 30, 10.0)]:
        one.on_message(message)
    one.on_kill("server:1@30", "server", 1, time_s=10.72)
    after = [["server-0", 0], ["server-3", 1], ["server-2", 0]]
    for message in [*recovery(10.72, "server-1", 1, "server-3", after), *steps(31, 40, 11.3)]:
        one.on_message(message)
    assert one.settled
    everyone = one.kills
    for kills in (everyone[:1], everyone):
        one.kills = kills
        result = assemble(arguments, disturbed, calm, None)
        draw(result, tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").stat().st_size > 10_000
        (tmp_path / "recovery.png").unlink()
        assert all(kill.spec in format_summary(result) for kill in kills)


def test_steps_have_the_trainers_own_times_unless_they_were_started_again(tmp_path: Path) -> None:
    one = DemoRun(arguments_of("--steps", "3"), CodeSpec(), [], tmp_path, Terminal())
    one.record.step_times = [1.0, 3.0, 3.0]  # a coordinator was missing
    for trainer in range(2):
        ended = [1.0 + trainer / 10, 2.0, 3.0 - trainer / 10]
        (tmp_path / f"trainer.{trainer}.json").write_text(json.dumps({"step_ended_s": ended}))
    one._read_reports()
    assert one.record.step_times == [1.1, 2.0, 3.0]
    again = DemoRun(arguments_of("--steps", "3"), CodeSpec(), [], tmp_path, Terminal())
    again.record.step_times = [1.0, 2.5, 3.5]
    (tmp_path / "trainer.1.json").write_text(json.dumps({"step_ended_s": [2.0, 3.0]}))
    again._read_reports()
    assert again.record.step_times == [1.0, 2.5, 3.5]


def test_throughput_over_time_sees_a_pause() -> None:
    times = [i * 0.1 for i in range(50)] + [5.5 + i * 0.1 for i in range(50)]
    at, rate = throughput(times, samples_per_step=10)
    assert rate[at < 4.9] == pytest.approx(100)
    assert rate.min() < 60
    assert rate[at > 6.1] == pytest.approx(100)


def test_labels_are_spread_and_stay_in_order() -> None:
    placed = spread([1.0, 1.0, 1.1, 9.9], least_gap=1.0, low=0.5, high=9.5)
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed[0] >= 0.5 and placed[-1] <= 9.5 + 1e-9
    assert spread([2.0, 5.0], 1.0, 0.0, 10.0) == [2.0, 5.0]


# --- status ----------------------------------------------------------------------------------------------------------

FIGURES = {"step": 7, "watermark": 5, "record_bytes": 3 << 20, "parity_bytes": 2048, "log_bytes": 10}


def member(name: str, role: str = "server", **more: Any) -> dict[str, Any]:
    base = {"name": name, "role": role, "pid": 7, "alive": True, "left": False, "spare": False, "silent_s": 0.25}
    return {**base, "report": {}, **more}


def test_status_as_text() -> None:
    def slot(index: int, incarnation: int, rebuilt: float) -> dict[str, Any]:
        return {"slot": index, "incarnation": incarnation, "rebuilt": rebuilt, "snapshot_bytes": 0, **FIGURES}

    status = {
        "version": "0.1.0",
        "code": {"slots": 3, "k": 2, "r": 1, "protection": "parity"},
        "generation": 2,
        "epoch": 3,
        "step": 7,
        "fatal": None,
        "tables": 26,
        "slots": [
            {"slot": 0, "server": "server-0", "incarnation": 0, "healthy": True},
            {"slot": 1, "server": "server-3", "incarnation": 1, "healthy": False},
            {"slot": 2, "server": "", "incarnation": 1, "healthy": False},
        ],
        "members": [
            member("server-0", report={"slots": [slot(0, 0, 1.0), slot(1, 0, 1.0)]}),
            member("server-3", report={"slots": [slot(1, 1, 0.42)]}),
            member("server-1", alive=False),
            member("server-4", spare=True),
            member("trainer-0", "trainer", left=True),
        ],
    }
    lines = format_status(status).splitlines()
    assert "(k, r) = (2, 1) on 3 slots, 26 tables, epoch 3, RPC generation 2, step 7" in lines[0]
    assert re.search(r"0 +server-0 +0 +healthy +7 +5 +3.0 MiB +2.0 KiB +10 B +0 B", lines[2])
    assert re.search(r"1 +server-3 +1 +rebuilding 42% ", lines[3])
    assert re.search(r"2 +\(nobody\) +1 +waiting +- ", lines[4])
    states = {line.split()[0]: line.split()[3] for line in lines if re.match(r" +(server|trainer)-", line)}
    assert states == {
        "server-0": "serving", "server-3": "serving", "server-1": "lost", "server-4": "spare", "trainer-0": "left"
    }  # fmt: skip
    empty = {**status, "slots": [], "members": [], "fatal": "stopped"}
    assert "STOPPED: stopped" in format_status(empty) and "no slots placed yet" in format_status(empty)
    assert report.slot_figures(empty) == {}


# --- real runs -------------------------------------------------------------------------------------------------------


def demo(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command on a few made-up rows, and asserts that nothing is left of it."""
    criteo.write_synthetic(out / "rows.tsv", rows=1000, seed=3)
    command = [sys.executable, "-m", "torch_ecrec", "demo", "--data", str(out / "rows.tsv"), "--out", str(out)]
    done = subprocess.run(
        [*command, "--steps", "30", "--batch-size", "32", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    print(done.stdout, done.stderr)
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"
    return done


@pytest.mark.slow
def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    """Those of all roles, below, include it."""
    done = demo(tmp_path, "--kill", "server:1@10")
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert len(result["kills"]) == 1, "the kill fired"
    (kill,) = result["kills"]
    assert kill["spec"] == "server:1@10" and kill["step"] == 10 and kill["member"] == "server-1"
    assert (kill["role"], kill["number"], kill["slots_lost"]) == ("server", 1, [1])
    after = kill["after_kill_s"]
    assert 0 < after["detected_s"] < after["rehosted_s"] < after["rebuilt_s"]
    assert after["first_step_s"] > 0
    assert result["equal"] is True and result["error"] is None and result["differences"] == []
    assert re.fullmatch("[0-9a-f]{64}", result["digest"]) and result["digest"] == result["undisturbed"]["digest"]
    assert result["losses"] == result["undisturbed"]["losses"] and len(result["losses"]) == 30
    assert len({tuple(losses) for losses in result["losses"]}) == 30, "it trains"
    assert all(result["bytes_sent"][kind] > 0 for kind in report.KINDS)
    assert sum(server["parity_bytes"] for server in result["servers"]) > 0
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    assert "EQUAL" in done.stdout and "re-hosted" in done.stdout


@pytest.mark.slow  # what a script sees of it: test_exit_codes.py
def test_more_losses_than_parities_end_with_exit_code_3(tmp_path: Path) -> None:
    done = demo(tmp_path, "--kill", "server:0@10", "--kill", "server:1@10", "--spares", "0", "--trainers", "1")
    assert done.returncode == 3, done.stderr
    assert "slots [0, 1] are lost together, which (k, r) = (2, 1) cannot repair" in done.stderr
    assert re.search(r"\d+ rows of 26 tables \(table_C1, ", done.stderr)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "cannot repair" in result["error"] and result["equal"] is None
    assert [kill["spec"] for kill in result["kills"]] == ["server:0@10", "server:1@10"], "both fired"
    log = (tmp_path / "logs" / "run" / "trainers.log").read_text()
    assert "failed (exitcode: 3)" in log and "DataLoss: slots [0, 1] are lost together" in log, (
        "the script catches nothing"
    )


def test_kills_of_a_trainer_the_coordinator_and_a_server_change_nothing(tmp_path: Path) -> None:
    """The coordinator while trainers start again: later, training might be over before the next one is there."""
    texts = ["trainer:1@15", "coordinator@15+1000", "server:0@45~"]
    words = [word for text in texts for word in ("--kill", text)]
    done = demo(tmp_path, "--steps", "60", "--batch-size", "64", *words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert result["equal"] is True and result["error"] is None and result["differences"] == []
    assert result["digest"] == result["undisturbed"]["digest"] and len(result["losses"]) == 60
    assert [kill["spec"] for kill in result["kills"]] == texts, "every kill fired"
    assert [kill["role"] for kill in result["kills"]] == ["trainer", "coordinator", "server"]
    trainer, coordinator, server = result["kills"]
    assert 13 <= trainer["resumed_after"] < 45, "at most a window is taken back; the kill comes when it comes"
    assert trainer["number"] == 1 and trainer["slots_lost"] == []
    after = trainer["after_kill_s"]
    assert 0 < after["detected_s"] < after["resumable_s"] < after["rejoined_s"] < after["first_step_s"]
    assert coordinator["after_kill_s"]["rejoined_s"] > 0, "another one is there"
    assert "a new coordinator: " in done.stdout
    assert server["step"] >= 45 and server["slots_lost"] == [0]
    after = server["after_kill_s"]
    assert 0 < after["detected_s"] < after["rehosted_s"] < after["rebuilt_s"]
    assert result["losses"] == result["undisturbed"]["losses"]
    assert len({tuple(losses) for losses in result["losses"]}) == 60, "it trains"
    assert all(result["bytes_sent"][kind] > 0 for kind in report.KINDS)
    assert sum(server["parity_bytes"] for server in result["servers"]) > 0
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    assert "EQUAL" in done.stdout and "re-hosted" in done.stdout
