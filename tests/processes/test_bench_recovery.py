"""`bench recovery`: its arithmetic, its waiting, and one real run with a kill and a checkpoint."""

import argparse
import csv
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MARK, leftover, wait_for_none

from torch_ecrec.bench import (
    recovery,
    recovery_figures,
    recovery_report,
    recovery_trial,
    recovery_worker,
    workload,
)
from torch_ecrec.bench.recovery_checkpoint import from_checkpoint
from torch_ecrec.bench.recovery_figures import FIGURES, RECORD_BYTES, TABLES, Case, Steps
from torch_ecrec.bench.recovery_processes import CaseWatch, Stopped
from torch_ecrec.demo.report import Kill
from torch_ecrec.spec.job import CodeSpec

END_LIMIT_S = 300.0


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    recovery.add_arguments(parser)
    return parser.parse_args(words)


# --- pure parts ------------------------------------------------------------------------------------------------------


def test_cases_are_sizes_by_limits_and_one_idle_each() -> None:
    found = [case.name for case in recovery_figures.cases([1.0, 0.5], [0.0, 50.0], None, True)]
    assert found == [
        "1 GB, no limit",
        "1 GB, 50 MB/s",
        "1 GB, idle",
        "0.5 GB, no limit",
        "0.5 GB, 50 MB/s",
        "0.5 GB, idle",
    ]
    found = [case.name for case in recovery_figures.cases([1.0, 0.5], [0.0, 50.0], 0.5, False)]
    assert found == ["1 GB, no limit", "0.5 GB, no limit", "0.5 GB, 50 MB/s"]
    assert [case.idle for case in recovery_figures.cases([1.0], [], None, True)] == [True]


@pytest.mark.parametrize("gigabytes", [0.02, 1.0, 8.0])
def test_the_tables_have_the_size_asked_for(gigabytes: float) -> None:
    rows = recovery_figures.rows_per_table(gigabytes)
    assert TABLES * rows * RECORD_BYTES == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(("slots", "k", "r"), [(3, 2, 1), (5, 3, 2), (7, 4, 1)])
def test_bytes_of_the_slots_add_up(slots: int, k: int, r: int) -> None:
    rows = 1000
    sizes = [recovery_figures.slot_bytes(CodeSpec(slots, k, r), rows, slot) for slot in range(slots)]
    stripes = -(-TABLES * rows // k)
    assert sum(data for data, _ in sizes) == TABLES * rows * RECORD_BYTES
    assert sum(parity for _, parity in sizes) == stripes * r * RECORD_BYTES


def steps_of(*trainers: list[tuple[float, float]]) -> Steps:
    steps = Steps(len(trainers))
    for trainer, times in enumerate(trainers):
        for begin_s, end_s in times:
            steps.add(trainer, begin_s, end_s)
    return steps


def test_a_step_is_complete_when_the_last_trainer_has_it() -> None:
    steps = steps_of([(0.0, 1.0), (1.0, 2.0), (2.0, 3.5)], [(0.0, 1.5), (1.5, 1.75)])
    assert steps.times == [1.5, 2.0]
    assert steps.newest == 3


def test_the_first_step_begun_after_a_kill() -> None:
    steps = steps_of([(0.0, 1.0), (1.0, 2.0), (2.5, 3.0)], [(0.0, 1.0), (1.4, 2.0), (2.0, 4.0)])
    assert steps.first_begun_after(-1.0) == 1.0
    assert steps.first_begun_after(0.5) == 2.0
    assert steps.first_begun_after(1.2) == 4.0, "one trainer had begun step 2 already"
    assert steps.first_begun_after(2.2) is None, "one trainer had begun step 3 already"
    assert Steps(2).first_begun_after(0.0) is None


def test_a_step_counts_in_part() -> None:
    steps = steps_of([(t - 1.0, t) for t in (1.0, 2.0, 3.0, 5.0, 6.0)])
    assert steps.rate(1.0, 3.0) == pytest.approx(1.0)
    assert steps.rate(3.0, 5.0) == pytest.approx(0.5)
    assert steps.rate(2.5, 4.0) == pytest.approx((0.5 + 0.5) / 1.5)
    assert steps.rate(5.0, 7.0) is None, "nobody knows what comes after the last step"
    assert steps.rate(0.0, 2.0) is None and steps.rate(3.0, 3.0) is None and Steps(1).rate(0.0, 1.0) is None


def test_the_longest_pause() -> None:
    steps = steps_of([(t - 0.5, t) for t in (1.0, 2.0, 2.5, 5.0, 5.2, 9.0)])
    assert steps.stall_s(2.6, 5.0) == 2.5
    assert steps.stall_s(2.6, 5.2) == 2.5
    assert Steps(1).stall_s(0.0, 1.0) is None


def kill_at(kill_s: float) -> Kill:
    times: dict[str, Any] = {"detected_s": kill_s + 0.01, "rehosted": {1: kill_s + 0.5}, "rebuilt": {1: kill_s + 2.5}}
    return Kill("a kill", "server", 1, "server-1", 7, 0, 1, kill_s, {1: 0}, **times)


def test_figures_of_a_kill() -> None:
    """Ten steps a second, half as many in the 2.5 s of the rebuild."""
    times = [t / 10 for t in range(100)] + [10.0 + t / 5 for t in range(13)]
    times += [12.5 + t / 10 for t in range(1, 100)]
    steps = steps_of([(t - 0.05, t) for t in times])
    figures = recovery_figures.figures_of(
        kill_at(10.0), steps, 14.0, (5.0, 15.0, 20.0), 100, (200_000_000, 100_000_000)
    )
    assert set(figures) == set(FIGURES)
    wanted = {"detected_s": 0.01, "rehosted_s": 0.5, "rebuilt_s": 2.5, "spare_s": 4.0, "rebuild_s": 2.0}
    wanted |= {"lost_mb": 300.0, "lost_data_mb": 200.0, "lost_mb_per_s": 150.0, "lost_data_mb_per_s": 100.0}
    wanted |= {"first_step_s": 0.2, "stall_s": 0.2, "before_samples_per_s": 1000.0, "after_samples_per_s": 1000.0}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)
    assert figures["during_samples_per_s"] == pytest.approx(500.0, rel=0.03)
    assert figures["during_share"] == pytest.approx(0.5, rel=0.03)


def test_nobody_trains_while_idle() -> None:
    figures = recovery_figures.figures_of(kill_at(10.0), Steps(0), 14.0, (5.0, 15.0, 20.0), 100, (2, 1))
    nothing = {
        "first_step_s",
        "stall_s",
        "during_share",
        *(f"{p}_samples_per_s" for p in ("before", "during", "after")),
    }
    assert {name for name, value in figures.items() if value is None} == nothing


def test_ids_of_a_batch_follow_the_law_or_are_uniform() -> None:
    rows, tables, batch = 1001, 3, 256
    seen = {}
    for zipf in (1.05, 0.0):
        shape = workload.Shape(tables=tables, rows=rows, batch=batch, zipf=zipf)
        batches = recovery_worker.Batches(shape, seed=1, trainer=0)
        drawn = [batches.draw().sparse_features for _ in range(20)]
        same = recovery_worker.Batches(shape, seed=1, trainer=0)
        assert torch.equal(same.draw().sparse_features.values(), drawn[0].values()), "the seed decides"
        other = recovery_worker.Batches(shape, seed=1, trainer=1).draw().sparse_features
        assert not torch.equal(other.values(), drawn[0].values()) and not torch.equal(
            drawn[0].values(), drawn[1].values()
        )
        assert drawn[0].keys() == ["C0", "C1", "C2"] and bool((drawn[0].lengths() == 1).all())
        ids = torch.cat([features.values() for features in drawn])
        assert len(ids) == 20 * tables * batch and int(ids.min()) >= 0 and int(ids.max()) < rows
        seen[zipf] = torch.bincount(ids, minlength=rows)
    assert seen[1.05].max() > 0.08 * seen[1.05].sum(), "one row is hot"
    assert seen[0.0].max() < 0.01 * seen[0.0].sum()
    hottest = seen[1.05].topk(3).indices.sort().values
    assert int(hottest.diff().min()) > 1, "hot rows are not neighbours"


def test_the_files_are_named_by_the_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "warm", lambda: None)
    monkeypatch.setattr(recovery, "measure", lambda *_: None)
    words = ["--gigabytes", "1", "--no-checkpoint", "--out", str(tmp_path)]
    assert recovery.run(parse(*words, "--label", "uniform", "--zipf", "0")) == 0
    assert json.loads((tmp_path / "recovery-uniform.json").read_text())["arguments"]["zipf"] == 0.0
    assert not (tmp_path / "recovery.json").exists()
    assert recovery.run(parse(*words)) == 0
    assert json.loads((tmp_path / "recovery.json").read_text())["arguments"]["zipf"] == 1.05


def a_row(case: Case, *detected_s: float) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(FIGURES, 1.0)
    kills = [{**empty, "detected_s": value} for value in detected_s]
    if case.idle:
        kills = [{**kill, "first_step_s": None, "before_samples_per_s": None} for kill in kills]
    return recovery_figures.summary(case, kills)


def test_a_row_has_median_least_and_most() -> None:
    row = a_row(Case(0.5, 50.0, False), 0.3, 0.1, 0.7)
    assert (row["case"], row["mode"], row["kills"]) == ("0.5 GB, 50 MB/s", "training", 3)
    assert [row[f"detected_s_{name}"] for name in ("median", "min", "max")] == [0.3, 0.1, 0.7]
    row = a_row(Case(0.5, 0.0, True), 0.3)
    assert (row["mode"], row["first_step_s_median"]) == ("idle", None)


def test_what_is_printed_and_drawn(tmp_path: Path) -> None:
    rows = [a_row(Case(1.0, 0.0, False), 0.3), a_row(Case(1.0, 50.0, False), 0.1), a_row(Case(1.0, 0.0, True), 0.2)]
    taken = {"save_s": 1.0, "start_s": 6.0, "load_s": 2.0, "until_training_s": 8.0, "redo_s": 900.0}
    done = {"gigabytes": 1.0, "skipped": None, "until_caught_up_s": 908.0, **taken}
    skipped = {"gigabytes": 4.0, "skipped": "no room"}
    text = recovery_report.tables(rows, [done, skipped], 1800.0)
    assert "over 2 kills in training" in text and "1 GB, idle" in text
    assert (
        "not run but computed: half of an interval of 1800 s" in text and "4 GB, checkpoint: skipped: no room" in text
    )
    recovery_report.draw(rows, [done, skipped], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert recovery_report.tables([], [], 1800.0) == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gigabytes", "0"], "`--gigabytes` must be positive, got 0.0"),
        (["--kills", "0"], "`kills` must be at least 1, got 0"),
        (["--rebuild-mb-per-s", "-1"], "`--rebuild-mb-per-s` must not be negative"),
        (["--throttled-gigabytes", "2"], "`--throttled-gigabytes` must be one of"),
        (["-k", "3"], "needs as many slots, got 3"),
        (["--steady-s", "0"], "`steady_s` must be positive"),
    ],
)
def test_bad_arguments_start_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        recovery.run(parse(*words, "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


# --- waiting ---------------------------------------------------------------------------------------------------------


def watch_of(tmp_path: Path) -> CaseWatch:
    (tmp_path / "trainers.log").write_text("last words\n")
    return CaseWatch(2, 3, "a case", tmp_path / "trainers.log")


def test_a_wait_ends_when_it_is_met_or_hopeless_or_over(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    threading.Timer(0.05, watch.on_line, [0, {"ready": 1.0}]).start()
    watch.wait(lambda: "ready" in watch.facts[0], 10.0, "trainer 0")
    with pytest.raises(Stopped, match=r"a case: waiting for a miracle: not within 0 s, at step 0\n.*\n *last words"):
        watch.wait(lambda: False, 0.01, "a miracle")
    threading.Timer(0.05, watch.on_line, [1, {}]).start()
    with pytest.raises(Stopped, match="trainer 1 has ended at step 0"):
        watch.wait(lambda: False, 10.0, "a miracle")


def test_a_lost_cluster_is_told(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    watch.on_closed("gone")
    assert watch.trouble() == "the coordinator is gone: gone"
    watch.on_message({"type": "event", "event": "fatal", "kind": "data_loss", "reason": "too much", "time_s": 1.0})
    assert watch.trouble() == "the cluster has stopped: too much"


def test_spares_are_servers_of_the_roster_that_host_nothing_and_live(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    members = [*(f"server-{i}" for i in range(5)), "trainer-0"]
    for pid, member in enumerate(members):
        role = member.partition("-")[0]
        who = {"member": member, "role": role, "rank": 0 if role == "trainer" else -1, "pid": pid}
        watch.on_message({"type": "event", "event": "joined", "time_s": 0.5, **who})
    watch.on_message({"type": "event", "event": "roster", "version": 1, "members": members, "time_s": 1.0})
    slots = [[f"server-{i}", 0] for i in range(3)]
    watch.on_message({"type": "event", "event": "placed", "epoch": 1, "slots": slots, "time_s": 1.0})
    assert watch.spares() == 2
    lost = {"type": "event", "event": "lost", "member": "server-4", "slots": [], "why": "killed", "time_s": 2.0}
    watch.on_message(lost)
    assert watch.spares() == 1


# --- the alternative -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(recovery.shutil, "disk_usage", lambda _: usage._replace(free=2_000_000_000))
    result = from_checkpoint(4.0, parse("--out", str(tmp_path)))
    assert result == {"gigabytes": 4.0, "skipped": result["skipped"]}
    assert "2.0 GB free" in result["skipped"] and "5.3 GB needed" in result["skipped"]


# --- a real run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--gigabytes",
        "0.02",
        "--kills",
        "1",
        "--batch-size",
        "128",
        "--rebuild-mb-per-s",
        "20",
        "--steady-s",
        "1",
    ]
    words += ["--no-idle", "--no-checkpoint", "--out", str(tmp_path), "--json", str(tmp_path / "more" / "copy.json")]
    assert recovery.run(parse(*words)) == 0, capsys.readouterr().err
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"

    result = json.loads((tmp_path / "recovery.json").read_text())
    assert json.loads((tmp_path / "more" / "copy.json").read_text()) == result
    assert result["error"] is None and result["header"]["cores"] == os.cpu_count()
    (case,) = result["cases"]
    (kill,) = case["kills"]  # the kill fired
    assert case["case"] == "0.02 GB, 20 MB/s"
    assert kill["server"] == f"server-{kill['slot']}" and kill["pid"] > 0
    assert 0 < kill["detected_s"] < kill["rehosted_s"] < kill["rebuilt_s"] < kill["spare_s"]
    assert kill["stall_s"] > 0 and 0 < kill["first_step_s"] < kill["spare_s"]
    assert kill["lost_mb"] == pytest.approx(10.0, rel=0.01), "a third of the data, and of the parity"
    assert kill["lost_data_mb"] == pytest.approx(20 / 3, rel=0.01)
    assert 0 < kill["lost_mb_per_s"] < 40, "not far from the limit, which counts what is read, in few portions"
    assert all(kill[f"{phase}_samples_per_s"] > 0 for phase in ("before", "during", "after"))

    with open(tmp_path / "recovery.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["case"] == case["case"] and float(row["rebuilt_s_median"]) == kill["rebuilt_s"]
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    assert "over 1 kills in training" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_checkpoint(tmp_path: Path) -> None:
    restart = from_checkpoint(0.02, parse("--batch-size", "128", "--out", str(tmp_path)))
    assert restart["skipped"] is None and restart["checkpoint_bytes"] >= 0.99 * 20_000_000
    assert restart["save_s"] > 0 and restart["start_s"] > 0 and restart["load_s"] > 0 and restart["redo_s"] == 900.0
    assert restart["until_caught_up_s"] == restart["start_s"] + restart["load_s"] + 900.0
    assert not (tmp_path / "checkpoint").exists()


def test_a_training_that_ends_is_an_error_with_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that cannot start: the reason is in the message, what was measured in the file, nothing goes on."""
    monkeypatch.setattr(recovery_trial, "rows_per_table", lambda _: 0)
    words = ["--gigabytes", "0.02", "--kills", "1", "--no-checkpoint", "--no-idle", "--out", str(tmp_path)]
    words += ["--servers", "2", "-k", "1", "--spares", "0", "--trainers", "1"]
    assert recovery.run(parse(*words)) == 1
    result = json.loads((tmp_path / "recovery.json").read_text())
    assert "waiting for the first step: trainer" in result["error"] and "has ended at step 0" in result["error"]
    assert "ValueError" in result["error"], "the end of the trainers' log"
    assert result["rows"] == [] and list((tmp_path / "logs").rglob("trainers.log"))
