"""The demo: what it makes of its arguments and of a coordinator's messages, and two real runs of it.

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
from typing import Any

import pytest
from conftest import MARK, ROOT, leftover, wait_for_none

from torch_ecrec.__main__ import main, parser
from torch_ecrec.config import CodeSpec
from torch_ecrec.demo import criteo, report, run
from torch_ecrec.demo.plot import draw, spread, throughput
from torch_ecrec.demo.report import Record, format_kill, format_status, format_summary
from torch_ecrec.demo.run import KillSpec, Run, Terminal, assemble, differences, parse_kills

RUN_LIMIT_S = 240.0
END_LIMIT_S = 5.0


# --- arguments -------------------------------------------------------------------------------------------------------


def test_kills_are_parsed_and_sorted_by_step() -> None:
    kills = parse_kills(["server:2@9~+5", "server:0@3", "server:1@7+12"], slots=3, steps=10)
    assert kills == [
        KillSpec("server:0@3", 0, 3, False, 0),
        KillSpec("server:1@7+12", 1, 7, False, 12),
        KillSpec("server:2@9~+5", 2, 9, True, 5),
    ]
    assert parse_kills(["none"], slots=3, steps=10) == []
    assert [kill.text for kill in parse_kills(None, slots=3, steps=120)] == ["server:1@60"]
    assert [kill.text for kill in parse_kills(None, slots=1, steps=3)] == ["server:0@1"]
    assert parse_kills(None, slots=3, steps=1) == []


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
    ],
)
def test_a_bad_kill_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_kills([text], slots=3, steps=10)


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

    monkeypatch.setattr(run, "Supervisor", start)
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


JOINED = [event(0.0, "joined", member=f"server-{i}", pid=100 + i) for i in range(4)]
PLACED = event(0.5, "placed", slots=[["server-0", 0], ["server-1", 0], ["server-2", 0]])


def recovery(at_s: float, lost: str, slot: int, to: str, slots: list[list[Any]]) -> list[dict[str, Any]]:
    """The coordinator's events from the loss of a slot to its rebuild 0.5 s later."""
    incarnation = slots[slot][1]
    return [
        event(at_s + 0.02, "lost", member=lost, why="its connection ended", slots=[slot]),
        event(at_s + 0.03, "re-placed", slots=slots),
        event(at_s + 0.05, "re-hosted", slot=slot, incarnation=incarnation),
        event(at_s + 0.50, "slot rebuilt", slot=slot, incarnation=incarnation),
    ]


def recorded() -> Record:
    """40 steps of 0.1 s; after step 20 slot 1 is lost, and step 22, the first begun after it, takes 0.3 s longer."""
    record = Record(trainers=2, slots=3)
    for message in [*JOINED, PLACED, *steps(1, 20, 1.0)]:
        record.on_message(message)
    record.on_kill("server:1@20", slot=1, time_s=2.92)
    after = [["server-0", 0], ["server-3", 1], ["server-2", 0]]
    messages = [*steps(21, 21, 3.0), *steps(22, 40, 3.4), *recovery(2.92, "server-1", 1, "server-3", after)]
    for message in sorted(messages, key=lambda message: message["time_s"]):
        record.on_message(message)
    return record


def test_the_timeline_of_a_failure() -> None:
    record = recorded()
    assert record.step == 40 and record.settled
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["server"], entry["pid"], entry["slots_lost"]) == ("server-1", 101, [1])
    assert (entry["step"], entry["first_step"]) == (20, 22)
    assert entry["times"]["kill_s"] == 2.92
    after = entry["after_kill_s"]
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
    for message in [*JOINED, event(0.5, "placed", slots=[["server-0", 0], ["server-1", 0], ["server-1", 0]])]:
        record.on_message(message)
    record.on_message({"type": "progress", "trainer": 0, "step": 1, "time_s": 1.0})
    record.on_kill("server:1@1", slot=1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1, 2]))
    record.on_kill("server:2@1", slot=2, time_s=1.1)
    record.on_message(event(1.2, "re-placed", slots=[["server-0", 0], ["server-3", 1], ["server-3", 1]]))
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
    record.on_kill("server:1@1", slot=1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1]))
    record.on_message(event(1.1, "re-placed", slots=[["server-0", 0], ["server-3", 1], ["server-2", 0]]))
    record.on_kill("server:1@2", slot=1, time_s=1.2)
    record.on_message(event(1.3, "lost", member="server-3", why="", slots=[1]))
    record.on_message(event(1.3, "re-placed", slots=[["server-0", 0], ["server-2", 2], ["server-2", 0]]))
    record.on_message(event(1.9, "slot rebuilt", slot=1, incarnation=2))
    assert [kill.server for kill in record.kills] == ["server-1", "server-3"]
    assert [kill.rebuilt_s for kill in record.kills] == [1.9, 1.9]


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

    monkeypatch.setattr(run.os, "kill", kill)
    return pids


def started_run(tmp_path: Path, *kills: str) -> Run:
    one = Run(arguments_of("--steps", "40"), CodeSpec(), parse_kills(kills, 3, 40), tmp_path, Terminal())
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
    for message in [event(3.0, "moved", slots=moved), *steps(6, 6, 3.0), rebuilt, *steps(7, 7, 3.2)]:
        one._on_message(message)
    assert killed == [101, 100] and one.record.kills[1].step == 7


def test_a_kill_with_a_delay_fires_later(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3+20")
    for message in steps(1, 3, 1.0):
        one._on_message(message)
    assert killed == [] and one.not_fired(), "not at once"
    one._timers[0].join(5.0)
    assert killed == [101] and not one.not_fired()


# --- results ---------------------------------------------------------------------------------------------------------


def finished(tmp_path: Path) -> tuple[argparse.Namespace, Run, Run]:
    arguments = arguments_of("--steps", "40", "--data", "rows.tsv")
    runs = []
    for _ in range(2):
        one = Run(arguments, CodeSpec(), [], tmp_path, Terminal())
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


def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    done = demo(tmp_path, "--kill", "server:1@10")
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert len(result["kills"]) == 1, "the kill fired"
    (kill,) = result["kills"]
    assert kill["spec"] == "server:1@10" and kill["step"] == 10 and kill["server"] == "server-1"
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


def test_more_losses_than_parities_end_with_exit_code_3(tmp_path: Path) -> None:
    done = demo(tmp_path, "--kill", "server:0@10", "--kill", "server:1@10", "--spares", "0", "--trainers", "1")
    assert done.returncode == 3, done.stderr
    assert "slots [0, 1] are lost together, which (k, r) = (2, 1) cannot repair" in done.stderr
    assert re.search(r"\d+ rows of 26 tables \(table_C1, ", done.stderr)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "cannot repair" in result["error"] and result["equal"] is None
    assert [kill["spec"] for kill in result["kills"]] == ["server:0@10", "server:1@10"], "both fired"
