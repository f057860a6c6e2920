"""What benchmarks read off kills and outages: arithmetic, tables and pictures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches import steps_of

from torch_ecrec.bench import faults, outages, recovery
from torch_ecrec.bench.experiment import Steps
from torch_ecrec.bench.faults import CUT, DRAIN, HOST, KILL, KILLED, KINDS
from torch_ecrec.bench.recovery import RECORD_BYTES, TABLES, Case
from torch_ecrec.demo.report import Kill
from torch_ecrec.spec.job import CodeSpec

# --- kills -----------------------------------------------------------------------------------------------------------


def test_cases_are_sizes_by_limits_and_one_idle_each() -> None:
    names = [case.name for case in recovery.cases([1.0, 0.5], [0.0, 50.0], None, True)]
    assert names == [f"{size} GB, {how}" for size in ("1", "0.5") for how in ("no limit", "50 MB/s", "idle")]
    names = [case.name for case in recovery.cases([1.0, 0.5], [0.0, 50.0], 0.5, False)]
    assert names == ["1 GB, no limit", "0.5 GB, no limit", "0.5 GB, 50 MB/s"]
    assert [case.idle for case in recovery.cases([1.0], [], None, True)] == [True]
    names = [case.name for case in recovery.cases([1.0], [0.0], None, True, share=0.25)]
    assert names == [f"1 GB, {how}{memory}" for how in ("no limit", "idle") for memory in ("", ", 25 % in memory")]
    names = [case.name for case in recovery.cases([1.0], [0.0], None, True, share=0.25, in_memory=False)]
    assert names == [f"1 GB, {how}, 25 % in memory" for how in ("no limit", "idle")]


@pytest.mark.parametrize("gigabytes", [0.02, 1.0, 8.0])
def test_the_tables_have_the_size_asked_for(gigabytes: float) -> None:
    rows = recovery.rows_per_table(gigabytes)
    assert TABLES * rows * RECORD_BYTES == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(("slots", "k", "r"), [(3, 2, 1), (5, 3, 2), (7, 4, 1)])
def test_bytes_of_the_slots_add_up(slots: int, k: int, r: int) -> None:
    rows, code = 26_000, CodeSpec(slots, k, r)
    sizes = [faults.slot_bytes(code, rows, RECORD_BYTES, slot) for slot in range(slots)]
    assert sum(data for data, _ in sizes) == rows * RECORD_BYTES
    assert sum(parity for _, parity in sizes) == -(-rows // k) * r * RECORD_BYTES


def kill_at(kill_s: float) -> Kill:
    times: dict[str, Any] = {"detected_s": kill_s + 0.01, "rehosted": {1: kill_s + 0.5}, "rebuilt": {1: kill_s + 2.5}}
    return Kill("a kill", "server", 1, "server-1", 7, 0, 1, kill_s, {1: 0}, **times)


def test_figures_of_a_kill() -> None:
    """Ten steps a second, half as many in the 2.5 s of the rebuild."""
    times = [t / 10 for t in range(100)] + [10.0 + t / 5 for t in range(13)]
    times += [12.5 + t / 10 for t in range(1, 100)]
    steps = steps_of([(t - 0.05, t) for t in times])
    windows_s, lost = (5.0, 15.0, 20.0), (200_000_000, 100_000_000)
    figures = faults.figures_of_kill(kill_at(10.0), steps, 14.0, windows_s, 100, lost, 0.01)
    assert set(figures) == set(KILLED)
    wanted = {"detected_s": 0.01, "rehosted_s": 0.5, "rebuilt_s": 2.5, "spare_s": 4.0, "rebuild_s": 2.0}
    wanted |= {"lost_mb": 300.0, "lost_data_mb": 200.0, "lost_mb_per_s": 150.0, "lost_data_mb_per_s": 100.0}
    wanted |= {"first_step_s": 0.2, "stall_s": 0.2, "before_samples_per_s": 1000.0, "after_samples_per_s": 1000.0}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)
    assert figures["during_samples_per_s"] == pytest.approx(500.0, rel=0.03)
    assert figures["during_share"] == figures["calm_share"] == pytest.approx(0.5, rel=0.03)
    noisy = faults.figures_of_kill(kill_at(10.0), steps, 14.0, windows_s, 100, lost, 0.05)
    assert noisy == {**figures, "stolen": 0.05, "calm_share": None}
    memory = [(4.0, 9_000_000), (5.0, 3_000_000), (9.0, 2_000_000), (11.0, 4_000_000), (12.0, 0), (13.0, 8_000_000)]
    told = faults.figures_of_kill(kill_at(10.0), steps, 14.0, windows_s, 100, lost, 0.01, memory)
    assert told == {**figures, "before_memory_mb": 3.0, "during_memory_mb": 4.0}


def test_what_others_get_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 0.0, "steal": 7.0}
    monkeypatch.setattr(faults.psutil, "cpu_times", lambda: SimpleNamespace(steal=now["steal"]))
    monkeypatch.setattr(faults.time, "monotonic", lambda: now["s"])
    monkeypatch.setattr(faults.os, "cpu_count", lambda: 2)
    stolen = faults.Stolen()
    assert stolen.share() == 0.0
    now.update(s=10.0, steal=7.5)
    assert stolen.share() == 0.025
    monkeypatch.setattr(faults.psutil, "cpu_times", SimpleNamespace)  # not on Linux
    assert faults.Stolen().share() == 0.0


def test_nobody_trains_while_idle() -> None:
    figures = faults.figures_of_kill(kill_at(10.0), Steps(0), 14.0, (5.0, 15.0, 20.0), 100, (2, 1), 0.0)
    rates = {f"{phase}_samples_per_s" for phase in ("before", "during", "after")}
    assert {name for name, value in figures.items() if value is None} == {
        "first_step_s", "stall_s", "during_share", "calm_share", *rates, "before_memory_mb", "during_memory_mb"
    }  # fmt: skip


def a_row(case: Case, *detected_s: float) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(KILLED, 1.0)
    kills = [{**empty, "detected_s": value} for value in detected_s]
    if case.idle:
        kills = [{**kill, "first_step_s": None, "before_samples_per_s": None} for kill in kills]
    return recovery.summary(case, kills)


def test_a_row_has_median_least_and_most() -> None:
    row = a_row(Case(0.5, 50.0, False), 0.3, 0.1, 0.7)
    assert (row["case"], row["mode"], row["kills"]) == ("0.5 GB, 50 MB/s", "training", 3)
    assert [row[f"detected_s_{name}"] for name in ("median", "min", "max")] == [0.3, 0.1, 0.7]
    row = a_row(Case(0.5, 0.0, True), 0.3)
    assert (row["mode"], row["first_step_s_median"]) == ("idle", None)


def test_what_is_printed_and_drawn_of_kills(tmp_path: Path) -> None:
    rows = [a_row(Case(1.0, 0.0, False), 0.3), a_row(Case(1.0, 50.0, False), 0.1), a_row(Case(1.0, 0.0, True), 0.2)]
    text = recovery.tables(rows)
    assert "over 2 kills in training" in text and "1 GB, idle" in text
    recovery.draw(rows).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert recovery.tables([]) == ""


def test_a_case_on_a_disk_stands_beside_the_same_in_memory() -> None:
    """Not beside one of another size or limit; a figure that one of both lacks has no ratio."""
    rows = [a_row(Case(1.0, 0.0, False), 0.3), a_row(Case(2.0, 0.0, False, 0.25), 0.3), a_row(Case(1.0, 0.0, True), 1)]
    assert recovery.beside_memory(rows) == []
    tiered = a_row(Case(1.0, 0.0, False, 0.25), 0.3) | {"lost_mb_per_s_median": 0.5}
    (line,) = recovery.beside_memory([*rows, tiered])
    assert line["case"] == "1 GB, no limit, 25 % in memory" and line["lost_mb_per_s / in memory"] == 0.5
    (line,) = recovery.beside_memory([*rows, a_row(Case(1.0, 0.0, True, 0.1), 1)])
    assert line["first_step_s / in memory"] is None
    assert "beside the same case in memory" in recovery.tables([*rows, tiered])


# --- outages ---------------------------------------------------------------------------------------------------------

# Ten steps of 1 s, a pause of 3 s in which a server goes at 10.5, steps of 1 s, and one of 2 s for no reason.
ENDS_S = [*range(1, 11), *range(13, 30), 31, 32]
RUN = steps_of(list(zip([0, *ENDS_S], ENDS_S, strict=False)))
EVENT: dict[str, Any] = {
    "before_s": (2.0, 10.0),
    "event_s": 10.5,
    "after_s": (14.0, 22.0),
    "control_s": (23.0, 31.5),
    "detected": 11.0,
    "placed": 11.5,
    "repaired": 14.0,
    "unhealthy": 3,
}


def test_what_an_event_says() -> None:
    found = faults.figures_of_outage(EVENT, RUN)
    assert found["longest_s"] == 3.0 and found["median_s"] == 1.0 and found["calm_s"] == 2.0
    assert found["longest / median"] == 3.0 and found["calm / median"] == 2.0
    assert (found["detected_s"], found["placed_s"], found["repaired_s"]) == (0.5, 1.0, 3.5)
    assert found["steps_per_s"] == pytest.approx(1.0) and found["after / before"] == pytest.approx(1.0)
    assert found["during / around"] is None and found["unhealthy"] == 3


def test_a_drain_has_a_rate_of_its_own() -> None:
    found = faults.figures_of_outage({**EVENT, "detected": None, "during_s": (10.0, 14.0)}, RUN)
    around = (8 + 8 + (RUN.rate(23.0, 31.5) or 0.0) * 8.5) / (8 + 8 + 8.5)
    assert around < 1.0 and found["during / around"] == pytest.approx(0.5 / around)
    assert found["detected_s"] is None


def test_the_worst_counts_where_it_is_wanted() -> None:
    events = [faults.figures_of_outage(EVENT, RUN), {**faults.figures_of_outage(EVENT, RUN), "longest_s": 0.25}]
    aims = {line["figure"]: line for line in outages.targets({KILL: events, HOST: events})}
    kill = aims[f"{KINDS[KILL]}: longest_s, worst"]
    assert (kill["wanted"], kill["measured"], kill["reached"]) == ("<= 0.5", 3.0, "no")
    assert aims[f"{KINDS[HOST]}: longest_s, worst"]["reached"] == "yes"
    assert aims[f"{KINDS[DRAIN]}: unhealthy, worst"]["reached"] == "-", "it was not measured"
    (line,) = outages.rows({KILL: events, CUT: []})
    assert line["times"] == 2 and line["longest_s"] == 1.625 and line["longest_s worst"] == 3.0
