"""Experiments: their files, factor, cells, folder of results, figures and report. No process is started."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from places import ROOT

from torch_ecrec.bench import faults, record
from torch_ecrec.bench.experiment import Stopped
from torch_ecrec.experiments import catalogue, cells, figures, limits, modes, report, run, scale
from torch_ecrec.experiments.catalogue import Claim, Spec
from torch_ecrec.experiments.cells import Cell, Group
from torch_ecrec.experiments.results import Results
from torch_ecrec.experiments.scale import Scale

SPECS = catalogue.all_specs()


# files ---------------------------------------------------------------------------------------------------------------


def test_the_artefacts_experiments_are_there() -> None:
    normal, recovery = (
        [f"{kind}-{number}" for number in range(1, last)] for kind, last in (("normal", 5), ("recovery", 5))
    )
    assert list(SPECS) == [*normal, *recovery, "accuracy", "cpr"]
    assert SPECS["normal-1"].models == list(scale.MODELS)
    assert [
        claim.figure for spec in SPECS.values() for claim in spec.claims if claim.figure not in figures.FIGURES
    ] == []
    assert catalogue.chosen("all") == list(SPECS.values())
    assert [spec.name for spec in catalogue.chosen("smoke")] == ["normal-1", "recovery-1", "accuracy", "cpr"]
    assert catalogue.chosen("smoke")[0].models == ["Criteo"]


def kind_of(cell: Cell) -> tuple[str, bool, bool]:
    """What of the code runs it."""
    kind = SPECS[cell.experiment].kind
    if SPECS[cell.experiment].is_emulated:
        return kind, cell.mode in ("exact", "full"), False
    mode = modes.parse(cell.mode)
    return kind, bool(mode.interval_s), bool(mode.k)


def test_smoke_visits_each_kind_of_cell() -> None:
    smoked, everything = (
        {kind_of(cell) for group in cells.groups(catalogue.chosen(name)) for cell in group.cells}
        for name in ("smoke", "all")
    )
    assert smoked == everything


def test_failures_change_nothing_of_what_is_exact() -> None:
    found = [cell for group in cells.groups([SPECS["accuracy"]]) for cell in group.cells]
    assert [(cell.failures, cell.seed) for cell in found if cell.mode == "exact"] == [(0, 0), (0, 1), (0, 2)]
    assert len({cell.name for cell in found}) == len(found) == 3 * (1 + 4 * 3)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("normal1", "did you mean normal-1?"),
        ("NORMAL-4", "did you mean normal-4?"),
        ("recovery", "did you mean recovery-"),
        ("al", "did you mean all?"),
        (
            "xyz",
            "(there are normal-1, normal-2, normal-3, normal-4, recovery-1, ",
        ),
    ],
)
def test_an_unknown_experiment_is_refused_with_the_nearest(asked: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        catalogue.chosen(asked)


GOOD = """
title = "What it asks"
shows = "Figure 5"
kind = "undisturbed"
models = ["Criteo"]
modes = ["XDL"]
workers = [2]
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"XDL"', '"XLD"', "unknown mode 'XLD'"),
        ('"Criteo"', '"criteo"', "unknown model 'criteo'; did you mean Criteo?"),
        ("[2]", "[0]", "must be positive"),
        ("[2]", "[]", "no list empty"),
        ("[2]", '["two"]', "Expected `int`, got `str` - at `$.workers[0]`"),
        ('"undisturbed"', '"calm"', "Invalid enum value 'calm' - at `$.kind`"),
        ("workers", "trainers", "unknown field `trainers`"),
        ("title =", "title", "at line 2"),
        ("workers = [2]", 'workers = [2]\n[smoke]\nmodes = ["XLD"]', "unknown mode 'XLD'"),
        ("workers", 'kills = "host"\nworkers', '`kills = "host"` goes with `kind = "kill"`'),
        ('"undisturbed"', '"kill"\nkills = "link"', "Invalid enum value 'link' - at `$.kills`"),
    ],
)
def test_a_file_that_is_no_experiment_is_named_with_the_reason(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert catalogue.read(path).name == "mine"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(says)}"):
        catalogue.read(path)


def test_modes() -> None:
    assert modes.parse("XDL").trained.code == modes.parse("Ckpt-30").trained.code
    k4 = modes.parse("ECRM-k4")
    assert k4.trained.code is not None and (k4.trained.code.k, k4.trained.code.r, k4.trained.snapshot) == (4, 1, True)
    assert modes.parse("Ckpt-30").interval_s == 1800 and modes.parse("Ckpt-60").interval_s == 3600
    less = modes.parse("ECRM-k4-minusNNRep-minus2PC")
    assert not less.trained.snapshot
    assert less.settings == {"TORCH_ECREC_EXPERIMENT_MODE": "minusNNRep-minus2PC"}
    assert modes.parse("ECRM-k4-ranges10").settings == {"TORCH_ECREC_EXPERIMENT_RANGES": "10"}
    assert modes.parse("ECRM-k4-unlimited").settings == {"TORCH_ECREC_REBUILD_BYTES_PER_S": "0"}
    groups = [modes.parse(name).trained.group for name in SPECS["normal-1"].modes]
    assert groups == ["XDL", "Ckpt", "Ckpt", "Ckpt-beside", "ECRM-k2", "ECRM-k4"]  # both intervals are one system
    beside = modes.parse("Ckpt-60-beside")
    assert (beside.interval_s, beside.beside, beside.system) == (3600, True, "Ckpt-beside")
    less_cpu = modes.parse("ECRM-k4-lessCPU")
    assert (less_cpu.limit, less_cpu.trained.group, less_cpu.settings) == ("lessCPU", "ECRM-k4", {})
    for wrong in ("xdl", "Ckpt", "ECRM", "ECRM-k4-minus2PC-minusNNRep", "XDL-minus2PC", "ECRM-k4-ranges"):
        with pytest.raises(ValueError, match="unknown mode"):
            modes.parse(wrong)


# the factor ----------------------------------------------------------------------------------------------------------


def test_the_factor_divides_rows_and_times() -> None:
    shape = Scale().shape("Criteo")
    assert shape.tables * shape.rows == pytest.approx(193_132, abs=26) and (shape.dim, shape.batch) == (128, 2048)
    wide = Scale().shape("2S-2D")
    assert wide.rows == pytest.approx(2 * shape.rows, abs=1) and wide.dim == 256 and wide.bottom[-1] == 256
    assert Scale().record_bytes("8S") == pytest.approx(8 * Scale().record_bytes("Criteo"), rel=1e-3)
    assert Scale().time == 60 and Scale(2048).time == 120
    assert Scale(2048).shape("2S").rows == pytest.approx(Scale(1024).shape("Criteo").rows, abs=1)
    assert str(Scale()) == "rows / 1,024, times / 60"
    for wrong in (0, -1, 1 << 21):
        with pytest.raises(ValueError, match="--factor"):
            Scale(wrong)


def test_what_does_not_fit_the_memory_is_refused_with_a_factor_that_fits() -> None:
    needs = [(group.cells[0].model, group.modes, 2) for group in cells.groups([SPECS["normal-1"]])]
    most = max(Scale().memory(*need) for need in needs)
    scale.require_memory(Scale(), needs, most)
    for available in (0.99 * most, 13e9):
        with pytest.raises(ValueError, match=r"8S at rows / 1,024 takes .* GB .*: take --factor") as refused:
            scale.require_memory(Scale(), needs, available)
        factor = int(str(refused.value).rpartition(" ")[2])
        scale.require_memory(Scale(factor), needs, available)
        with pytest.raises(ValueError, match="take --factor"):
            scale.require_memory(Scale(factor // 2), needs, available)
    with pytest.raises(ValueError, match="no factor is small enough"):
        scale.require_memory(Scale(), needs, 1e9)


def test_too_few_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ValueError, match="experiments take 2 cores at least, and here is 1"):
        run.require_machine([SPECS["normal-1"]], Scale())


def test_what_cannot_be_limited_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "require_memory", lambda *_: None)
    monkeypatch.setattr(run, "require_memory", lambda *_: None)
    monkeypatch.setattr(run.hosts, "unavailable", lambda: "")
    monkeypatch.setattr(limits.cpu_quota, "unavailable", lambda: "it takes root")
    with pytest.raises(ValueError, match="normal-2: lessCPU: it takes root"):
        run.require_machine([SPECS["normal-2"]], Scale())
    monkeypatch.setattr(run.hosts, "unavailable", lambda: "no `ip`")
    with pytest.raises(ValueError, match="normal-2: lessNetwork: no `ip`"):
        run.require_machine([SPECS["normal-2"]], Scale())
    run.require_machine([SPECS["normal-2"], SPECS["normal-1"]], Scale())  # its cells fail, and the others run


# figures of cells ----------------------------------------------------------------------------------------------------


def blocks(*rates: float) -> list[dict[str, Any]]:
    return [{"samples_per_s": rate} for rate in rates]


def test_overhead_is_that_of_the_same_turn() -> None:
    base = blocks(100.0, 200.0, 400.0)
    found = cells.figures_of_blocks(modes.parse("ECRM-k4"), blocks(80.0, 160.0, 200.0), base, Scale())
    assert found["overhead"] == {"median": pytest.approx(0.25), "min": pytest.approx(0.25), "max": pytest.approx(1.0)}
    assert found["samples_per_s"]["median"] == 160.0
    assert "overhead" not in cells.figures_of_blocks(modes.parse("XDL"), base, base, Scale())
    assert "overhead" not in cells.figures_of_blocks(modes.parse("ECRM-k4"), base, None, Scale())


def test_a_checkpoint_costs_what_the_store_takes_at_least() -> None:
    saved = [{"samples_per_s": 1.0, "save_s": 3.0, "bytes": 300_000_000}] * 2
    found = cells.figures_of_blocks(modes.parse("Ckpt-30"), saved, blocks(1.0, 1.0), Scale())
    assert found["interval_s"] == 30.0
    medians = {store: spread["median"] for store, spread in found["overhead"].items()}
    assert medians == {"slow store": 12.0 / 30, "store": 3.0 / 30, "fast store": 3.0 / 30}  # the disk's own pace
    hour = cells.figures_of_blocks(modes.parse("Ckpt-60"), saved, None, Scale())
    assert hour["overhead"]["slow store"]["median"] == 12.0 / 60


def test_what_a_checkpoint_beside_training_takes() -> None:
    """Steps of 1 s; the two beside a checkpoint of 3 s take 1.5 s each: a third of the rate is lost for 3 s."""
    block = {"begin_s": 0.0, "ends_s": [1.0, 2.0, 3.5, 5.0, 6.0], "spans_s": [[2.0, 5.0]], "bytes": [300_000_000]}
    found = cells.figures_beside(block, 100)
    assert found == {
        "samples_per_s": pytest.approx(100.0),
        "save_s": 3.0,
        "bytes": 300_000_000,
        "lost_s": pytest.approx(1.0),
    }
    assert cells.figures_beside({**block, "spans_s": [[6.5, 7.0]]}, 100) is None, "it began too late"
    assert cells.figures_beside({**block, "spans_s": [[-1.0, 7.0]]}, 100) is None, "nothing to compare with"


def test_a_checkpoint_beside_training_costs_the_same_into_each_store_that_takes_it_in_time() -> None:
    saved = [{"samples_per_s": 1.0, "save_s": 10.0, "bytes": 900_000_000, "lost_s": lost_s} for lost_s in (0.3, 0.6)]
    found = cells.figures_of_blocks(modes.parse("Ckpt-30-beside"), saved, blocks(1.0, 1.0), Scale())
    assert set(found["overhead"]) == {"store", "fast store"}, "25 MB/s take 36 s, and it is due every 30 s"
    assert found["overhead"]["store"]["median"] == pytest.approx(0.45 / 30)
    assert figures.overhead(found, "slow store") is None and figures.overhead(found) == pytest.approx(0.015)
    hour = cells.figures_of_blocks(modes.parse("Ckpt-60-beside"), saved, None, Scale())
    assert hour["overhead"]["slow store"]["median"] == pytest.approx(0.45 / 60)


def test_recovered_is_when_training_is_where_it_would_be() -> None:
    ours = {"rebuilt_s": 2.0, "first_step_s": 0.5, "during_share": 0.9, "progress": [(-1.0, 1), (1.0, 2)]}
    assert cells.figures_of_recovery(modes.parse("ECRM-k2"), ours)["recovered_s"] == 2.0
    assert cells.figures_of_recovery(modes.parse("ECRM-k2"), {**ours, "first_step_s": 2.5})["recovered_s"] == 2.5
    back = {"caught_up_s": 30.0, "first_step_s": 12.0, "progress": []}
    found = cells.figures_of_recovery(modes.parse("Ckpt-30"), back)
    assert (found["recovered_s"], found["share"]) == (30.0, 0.0)  # what is trained again is not new


def test_of_several_kills_what_was_lost_adds_up() -> None:
    kills = [
        {
            "recovered_s": took_s,
            "share": share,
            "lost_steps": lost,
            "wrong_stripes": 0,
            "progress": [(0.0, i)],
            "server": "x",
        }
        for i, (took_s, share, lost) in enumerate([(1.0, 0.9, 0), (3.0, None, 2), (2.0, 0.7, 1)])
    ]
    found = cells.figures_of_kills(kills)
    assert (found["recovered_s"], found["share"], found["lost_steps"]) == (2.0, pytest.approx(0.8), 3)
    assert found["progress"] == [(0.0, 0)] and [one["lost_steps"] for one in found["kills"]] == [0, 2, 1]
    assert all("progress" not in one for one in found["kills"])


def test_what_hosts_have_counted_before_is_not_counted_again() -> None:
    def told(slot: int, incarnation: int, lost_steps: int, wrong_stripes: int = 0) -> Any:
        return SimpleNamespace(slot=slot, incarnation=incarnation, lost_steps=lost_steps, wrong_stripes=wrong_stripes)

    turns = cells.Recovering(faults.Kill(0.5, 0))
    assert turns.news([told(0, 1, 2), told(1, 0, 0)]) == (2, 0)
    assert turns.news([told(0, 1, 2), told(1, 1, 1)]) == (1, 0)
    assert turns.news([told(0, 1, 2, 3), told(1, 1, 1)]) == (0, 3)
    assert turns.news([told(0, 2, 0), told(1, 1, 1)]) == (0, 0)  # another host of slot 0 begins at none


def test_no_wrong_stripe_is_said_only_after_a_whole_round() -> None:
    def reports(*rounds: int) -> Any:
        found = {slot: SimpleNamespace(incarnation=1, scrub_rounds=one) for slot, one in enumerate(rounds)}
        return SimpleNamespace(slot_reports=lambda: found)

    seen = SimpleNamespace(places=[("a", 1), ("b", 1)], status=reports(7, 0))
    lacks = cells.unlooked(SimpleNamespace(record=seen))  # type: ignore[arg-type]
    assert lacks().endswith("[0, 1]")
    seen.status = reports(9, 1)  # slot 1 was in the middle of its first
    assert lacks().endswith("[1]")
    seen.status = reports(9, 2)
    assert lacks() == ""
    seen.places[1] = ("c", 2)  # another life: nobody has told anything of it
    assert lacks().endswith("[1]")


def test_thinned_keeps_both_ends() -> None:
    points = [(float(i), i) for i in range(5000)]
    found = cells.thinned(points)
    assert len(found) == 400 and found[0] == points[0] and found[-1] == points[-1] and found == sorted(found)
    assert cells.thinned(points[:7]) == points[:7]


# a folder of results -------------------------------------------------------------------------------------------------


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def made_up(cell: Cell, kind: str) -> dict[str, Any]:
    """Figures of a cell as it would leave them."""
    if kind == "accuracy":
        lost = 0.0 if cell.mode == "exact" else cell.failures / 100
        return {"auc": 0.75 + cell.seed / 1000 - lost / 10, "log_loss": 0.5, "lost": lost}
    if kind == "emulated":
        return {"overhead": 0.09 if cell.mode == "full" else 0.006, "saves": 0.004, "down": 0.002, "again": 0.0}
    mode = modes.parse(cell.mode)
    if kind == "kill":
        took_s = 20.0 if mode.interval_s else 1.0
        return {
            "recovered_s": took_s,
            "first_step_s": 0.5,
            "share": 0.0 if mode.interval_s else 0.9,
            "before_samples_per_s": 1000.0,
            "after_samples_per_s": 990.0,
            "progress": [(float(i), i) for i in range(-10, 30)],
            "kills": [{"recovered_s": took_s}] * 3,
            **({} if mode.interval_s else {"lost_steps": 2 if "minus2PC" in cell.mode else 0, "wrong_stripes": 0}),
        }
    found: dict[str, Any] = {"samples_per_s": spread(1000.0 - 100 * mode.k / 4), "blocks": []}
    if mode.interval_s:
        stores = {store: spread(0.6 if store == "slow store" else 0.06) for store in scale.BANDWIDTHS}
        if mode.beside:
            stores = {"store": spread(0.04), "fast store": spread(0.04)}
        found |= {"interval_s": 30.0, "save_s": spread(1.0), "bytes": spread(1e8), "overhead": stores}
    elif cell.mode != "XDL":
        found["overhead"] = spread(0.05)
    return found


def filled(folder: Path, name: str = "all") -> Results:
    results = Results.begin(folder, name, 1024, None, catalogue.chosen(name))
    for group in results.groups:
        for cell in group.cells:
            results.write(cell, made_up(cell, group.spec.kind), None)
    return results


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    Results.begin(tmp_path, "smoke", 1024, None, catalogue.chosen("smoke"))
    with pytest.raises(ValueError, match=f"another run: .*experiments resume --out {re.escape(str(tmp_path))}"):
        Results.begin(tmp_path, "all", 1024, None, catalogue.chosen("all"))
    assert Results.open(tmp_path).run.name == "smoke"


def test_a_folder_without_results_or_with_broken_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no results of experiments: `torch-ecrec experiments run NAME --out"):
        Results.open(tmp_path)
    (tmp_path / "run.json").write_text('{"name": 3}')
    with pytest.raises(ValueError, match=r"run\.json cannot be read: Expected `str`, got `int`"):
        Results.open(tmp_path)


def test_a_broken_cell_is_named(tmp_path: Path) -> None:
    results = filled(tmp_path, "smoke")
    cell = results.groups[0].cells[0]
    results.path(cell).write_text("{")
    with pytest.raises(ValueError, match=f"{re.escape(str(results.path(cell)))} cannot be read: .*; remove it"):
        results.figures(cell)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "it is not what a cell leaves"),
        ("null", "it is not what a cell leaves"),
        ('{"figures": null}', "it is not what a cell leaves"),
        ({"figures": {}}, "it has not the figures of its kind: after_samples_per_s, "),
        ({"figures": [1]}, "it has not the figures of its kind: "),
        ({"factor": 512}, "it is of another cell or factor: {.*}, 512"),
        ({"cell": {"experiment": "recovery-1"}}, "it is of another cell or factor: {.*}, 1024"),
        (None, "Is a directory"),
    ],
)
def test_a_cell_that_is_no_cell_of_the_run_is_named(content: Any, says: str, tmp_path: Path) -> None:
    """It is JSON, and still nothing that a report could show as this cell of this run."""
    results = filled(tmp_path / "results", "recovery-1")
    path = results.path(results.groups[0].cells[0])
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        text = content if isinstance(content, str) else json.dumps({**json.loads(path.read_text()), **content})
        path.write_text(text)
    page = tmp_path / "evidence.md"
    page.write_text("what was there")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} cannot be read: .*{says}.*; remove it"):
        report.write([results], page)
    assert page.read_text() == "what was there", "and nothing is written over by half of a report"


def test_a_run_without_its_header_is_refused(tmp_path: Path) -> None:
    Results.begin(tmp_path, "smoke", 1024, None, catalogue.chosen("smoke"))
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"commit"', '"kommit"'))
    with pytest.raises(ValueError, match=r"run\.json cannot be read: its header lacks commit"):
        Results.open(tmp_path)


def test_cells_of_a_run_that_is_gone_are_not_taken(tmp_path: Path) -> None:
    filled(tmp_path, "cpr")
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}/cells has cells of a run whose run.json is gone"):
        Results.begin(tmp_path, "cpr", 1024, None, catalogue.chosen("cpr"))


def test_a_full_disk_leaves_no_half_of_a_file_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = filled(tmp_path, "cpr")
    cell = results.groups[0].cells[0]
    path, whole = results.path(cell), results.path(cell).read_text()
    picture = tmp_path / report.picture(SPECS["cpr"])
    there = sorted(tmp_path.rglob("*"))

    def write_bytes(part: Path, content: bytes) -> int:
        part.touch()
        return Path("/dev/full").open("wb", buffering=0).write(content) or 0

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match=f"No space left on device: .*{re.escape(str(path))}"):
        results.write(cell, made_up(cell, "emulated"), None)
    assert path.read_text() == whole
    with pytest.raises(OSError, match=f"No space left on device: .*{re.escape(str(picture))}"):
        report.draw(results)
    assert sorted(tmp_path.rglob("*")) == there, "nothing of what was begun"


def test_what_another_commit_began_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Results.begin(tmp_path, "smoke", 1024, None, catalogue.chosen("smoke"))
    header = {**record.header(), "commit": "123456789abc"}
    monkeypatch.setattr(record, "header", lambda: header)
    with pytest.raises(ValueError, match=r"was begun with commit .* and this is 123456789abc"):
        run.resume(tmp_path)


@pytest.mark.parametrize("commit", ["0123456789ab+", "unknown"])
def test_what_other_files_of_the_same_commit_began_is_not_gone_on_with(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout with changes, or an installed package: the commit says nothing of the code."""
    sources, header = tmp_path / "package", {**record.header(), "commit": commit}
    sources.mkdir()
    (sources / "__init__.py").write_text("")
    monkeypatch.setattr(record, "header", lambda: header)
    monkeypatch.setattr("torch_ecrec.__file__", str(sources / "__init__.py"))
    results = Results.begin(tmp_path / "out", "smoke", 1024, None, catalogue.chosen("smoke"))
    Results.open(results.folder).require_same()
    (sources / "more.py").write_text("changed = True")
    with pytest.raises(ValueError, match="was begun with other code: files of this package have changed since"):
        run.resume(results.folder)


def test_a_run_is_not_gone_on_with_over_other_rows(tmp_path: Path) -> None:
    """The file of that name has changed since: half of the cells would be of other data."""
    data = tmp_path / "rows.tsv"
    data.write_text("0\t1\n")
    results = Results.begin(tmp_path / "out", "smoke", 1024, str(data), catalogue.chosen("smoke"))
    Results.open(results.folder).require_same()
    data.write_text("0\t2\n")
    with pytest.raises(ValueError, match=r"was begun with other rows: .*rows\.tsv has changed since"):
        run.resume(results.folder)
    data.unlink()
    with pytest.raises(ValueError, match=r"rows\.tsv, which .* was begun with, is not there"):
        run.resume(results.folder)


# runs ----------------------------------------------------------------------------------------------------------------

Ran = list[str]
SMOKED = 1 + 2 + 4 + 2  # a group of all modes, cells with a kill, of accuracy, of the emulation
SECOND = "recovery-1, Criteo-Ckpt-30-w2-s0"


def test_a_difference_in_accuracy_is_told_only_beyond_two_standard_errors() -> None:
    def cell(mode: str, seed: int, failures: int) -> Cell:
        return Cell("accuracy", "Criteo", mode, 1, seed, failures)

    def quality(auc: float) -> dict[str, float]:
        return {"auc": auc, "log_loss": 0.5, "lost": 0.02}

    found = {cell("exact", seed, 0): quality(0.75 + seed / 100) for seed in range(3)}
    for seed, (near, off) in enumerate([(0.001, -0.004), (-0.002, -0.005), (0.0015, -0.003)]):
        found[cell("mfu", seed, 1)] = quality(0.75 + seed / 100 + near)
        found[cell("mfu", seed, 5)] = quality(0.75 + seed / 100 + off)
    exact, near_one, off_one = figures.accuracy(found)
    assert (exact["AUC"], exact["failures"]) == ("0.7600", "any") and "differs" not in exact
    assert near_one["differs"] == "no" and off_one["differs"] == "yes"
    assert off_one["AUC - exact"] == pytest.approx(-0.004) and off_one["standard error"] == pytest.approx(
        0.001 / 3**0.5
    )
    assert off_one["lost updates %"] == pytest.approx(2.0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The groups that have run; what they find is made up."""
    names: Ran = []

    def pretend(self: Group, factor: Scale, data: str | None, out: Path) -> dict[str, dict[str, Any]]:
        names.append(self.name)
        (out / "logs").mkdir(parents=True)
        (out / "logs" / "trainers.log").write_text("what they said")
        return {cell.mode: made_up(cell, self.spec.kind) for cell in self.cells}

    monkeypatch.setattr(Group, "run", pretend)
    monkeypatch.setattr(run, "require_machine", lambda specs, scale: None)
    return names


def failing(monkeypatch: pytest.MonkeyPatch, which: int, error: BaseException) -> Callable[[], None]:
    """Has the run of that number fail; returns what ends this."""
    calm, count = Group.run, 0

    def run_or_fail(self: Group, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        found = calm(self, *arguments)
        if count == which + 1:
            raise error
        return found

    monkeypatch.setattr(Group, "run", run_or_fail)
    return lambda: monkeypatch.setattr(Group, "run", calm)


def test_all_cells_run_and_are_told(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.begin("smoke", 4096, None, tmp_path) == 0
    assert len(ran) == SMOKED
    said = capsys.readouterr().out
    assert f"smoke: rows / 4,096, times / 240; {SMOKED} of {SMOKED} groups of cells to run" in said
    assert f"[2/{SMOKED}, about" in said and f"to go] {SECOND}" in said
    assert not (tmp_path / "running").exists() and not (tmp_path / "logs").exists()
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {report.picture(spec) for spec in catalogue.chosen("smoke")}
    assert run.resume(tmp_path) == 0 and len(ran) == SMOKED, "nothing is left"


def test_a_cell_that_fails_is_told_and_the_others_run(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mend = failing(monkeypatch, 1, Stopped("Ckpt-30: waiting for a checkpoint: not within 9 s\nits log"))
    assert run.begin("smoke", 1024, None, tmp_path) == 1
    assert len(ran) == SMOKED
    told = capsys.readouterr()
    assert f"{SECOND} failed: Ckpt-30: waiting for a checkpoint" in told.err
    assert f"1 groups of cells failed; `torch-ecrec experiments resume --out {tmp_path}` runs them again" in told.err
    assert "failed: Ckpt-30: waiting for a checkpoint: not within 9 s" in told.out
    (log,) = tmp_path.glob("logs/*/trainers.log")
    assert log.read_text() == "what they said"
    mend()
    assert run.resume(tmp_path) == 0
    assert ran[SMOKED:] == [SECOND]


def test_a_cell_that_fails_for_any_reason_is_told_and_the_others_run(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a process is gone while its times are read: hours of other cells are still to come."""
    failing(monkeypatch, 1, psutil.NoSuchProcess(17))
    monkeypatch.setattr(run.shutil, "copytree", lambda *_, **__: refuse("No space left on device"))
    assert run.begin("smoke", 1024, None, tmp_path) == 1
    assert len(ran) == SMOKED
    told = capsys.readouterr()
    assert f"{SECOND} failed: NoSuchProcess: " in told.err and "in run_or_fail" in told.err
    assert "not all logs could be kept in" in told.err and "failed: NoSuchProcess: " in told.out


def refuse(why: str) -> None:
    raise OSError(why)


def test_one_process_runs_the_cells_of_a_folder(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would remove each other's folder of what runs, and put both into one result."""
    others: list[str] = []
    pretend = Group.run

    def meanwhile(self: Group, *arguments: Any) -> Any:
        with pytest.raises(ValueError, match="another process runs the cells of") as refused:
            run.resume(tmp_path)
        with pytest.raises(ValueError, match="another process runs the cells of"):
            run.begin("smoke", 1024, None, tmp_path)  # nor writes over what is run
        others.append(str(refused.value))
        return pretend(self, *arguments)

    monkeypatch.setattr(Group, "run", meanwhile)
    assert run.begin("cpr", 1024, None, tmp_path) == 0
    assert len(others) == len(ran) > 0
    assert run.resume(tmp_path) == 0, "the lock is gone with the run"


def test_an_interrupted_run_goes_on_to_the_same_cells(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin("smoke", 1024, None, tmp_path / "whole")
    mend = failing(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.begin("smoke", 1024, None, tmp_path / "cut")
    assert not (tmp_path / "cut" / "running").exists()
    mend()
    assert run.resume(tmp_path / "cut") == 0
    folders = [tmp_path / name / "cells" for name in ("whole", "cut")]
    whole, cut = ({str(path.relative_to(one)): path.read_text() for path in one.rglob("*.json")} for one in folders)
    assert whole == cut and len(whole) == 4 + SMOKED - 1


def test_settings_are_those_of_the_run_or_refused(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the processes of every cell: the report must not show them as if they were the default ones."""
    monkeypatch.setenv("TORCH_ECREC_EXPERIMENT_MODE", "minus2PC")
    with pytest.raises(ValueError, match="would hold for the cells of every mode, which choose them themselves"):
        run.begin("cpr", 1024, None, tmp_path / "refused")
    assert not (tmp_path / "refused").exists() and not ran
    monkeypatch.delenv("TORCH_ECREC_EXPERIMENT_MODE")
    assert run.begin("cpr", 1024, None, tmp_path / "plain") == 0
    monkeypatch.setenv("TORCH_ECREC_WIRE", "bfloat16")
    with pytest.raises(ValueError, match=r"begun with the default settings, and .* has TORCH_ECREC_WIRE=bfloat16: "):
        run.resume(tmp_path / "plain")
    assert run.begin("cpr", 1024, None, tmp_path / "other") == 0 and run.resume(tmp_path / "other") == 0
    plain, other = (Results.open(tmp_path / name) for name in ("plain", "other"))
    assert "; TORCH_ECREC_WIRE=bfloat16; commit" in report.page([other])
    assert "TORCH_ECREC" not in report.page([plain])
    assert figures.run_again(plain, other, SPECS["cpr"]) == [] != figures.run_again(plain, plain, SPECS["cpr"])


def test_bad_data_is_refused_before_anything_is_made(ran: Ran, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("a,b,c\n")
    with pytest.raises(ValueError, match=re.escape(str(data))):
        run.begin("smoke", 1024, data, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not ran


# the report ----------------------------------------------------------------------------------------------------------


def test_the_page_has_every_cell_and_claim(tmp_path: Path) -> None:
    results = filled(tmp_path / "results")
    text = report.page([results])
    for spec in SPECS.values():
        assert f"## {spec.name}: {spec.title}" in text and f"({report.picture(spec)})" in text
        assert spec.theirs in text and all(claim.says in text for claim in spec.claims)
    assert "not run" not in text and "rows / 1,024, times / 60" in text
    report.write([results], tmp_path / "docs" / "evidence.md")
    assert (tmp_path / "docs" / "evidence.md").read_text() == text
    kept = Results.open(tmp_path / "docs" / "evidence" / "all")
    assert report.page([kept]) == text, "the page can be made of what stands beside it"
    assert len(list((tmp_path / "docs").glob("*.png"))) == len(SPECS)


def test_what_has_not_run_or_failed_is_told(tmp_path: Path) -> None:
    results = Results.begin(tmp_path, "recovery-1", 1024, None, catalogue.chosen("recovery-1"))
    assert "not run" in report.page([results]) and "![" not in report.page([results])
    report.write([results], tmp_path / "docs" / "evidence.md")  # there is no folder of cells yet
    first, second = (results.groups[i].cells[0] for i in (0, 1))
    results.write(first, None, "no memory\nand a log")
    results.write(second, made_up(second, "kill"), None)
    lines = report.rows(results, SPECS["recovery-1"])
    assert [line["state"] for line in lines[:3]] == ["failed: no memory", "run", "not run"]
    assert "![" in report.page([results]), "one cell can be drawn"


def test_a_page_of_several_runs_says_what_none_has(tmp_path: Path) -> None:
    runs = [filled(tmp_path / name, name) for name in ("recovery-1", "normal-1")]
    text = report.page(runs)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {spec.name}: {spec.title}" for spec in SPECS.values()
    ]
    assert text.count("**Not run.**") == len(SPECS) - 2
    report.write(runs, tmp_path / "docs" / "evidence.md")
    assert {path.name for path in (tmp_path / "docs" / "evidence").iterdir()} == {"recovery-1", "normal-1"}


def test_the_page_in_docs_is_made_of_its_json() -> None:
    runs = [Results.open(folder) for folder in sorted((ROOT / "docs" / "evidence").iterdir())]
    assert (ROOT / "docs" / "evidence.md").read_text() == report.page(runs)


def test_claims_are_judged_either_way(tmp_path: Path) -> None:
    results = filled(tmp_path)
    reduced, dearer = SPECS["normal-1"].claims
    by = {line["case"]: line for line in report.judged(results, SPECS["normal-1"], reduced)}
    slow, store = by["8S, slow store, Ckpt-30"], by["8S, store, Ckpt-30-beside"]  # the best of both
    assert slow["measured"] == pytest.approx(1 - 0.05 / 0.6) and store["measured"] == pytest.approx(1 - 0.05 / 0.04)
    assert slow["as published"] == slow["as wanted"] == "yes" and store["as published"] == "no"
    lines = report.judged(results, SPECS["normal-1"], dearer)
    assert len(lines) == 5 * 2 and {(line["case"], line["as wanted"]) for line in lines} >= {("2S, ECRM-k2", "no")}
    assert all(line["measured"] == pytest.approx(0.01) for line in lines)
    sooner, lower = SPECS["recovery-1"].claims
    assert [line["measured"] for line in report.judged(results, SPECS["recovery-1"], sooner)] == [20.0] * 10
    judged = report.judged(results, SPECS["recovery-1"], lower)
    assert {(line["as published"], line["as wanted"]) for line in judged} == {
        ("yes", "no")
    }  # 10 % of at most 13, and 7
    (ablation,) = SPECS["normal-4"].claims
    assert {line["published"] for line in report.judged(results, SPECS["normal-4"], ablation)} == {None}
    kept, lost = (report.judged(results, SPECS["recovery-3"], claim) for claim in SPECS["recovery-3"].claims)
    assert [(line["measured"], line["as wanted"]) for line in kept] == [(0, "yes")]
    assert [(line["measured"], line["as wanted"]) for line in lost] == [(2, "yes")]
    (partly,) = SPECS["cpr"].claims
    assert [line["case"] for line in report.judged(results, SPECS["cpr"], partly)] == ["mfu", "ssu"]
    nobody = Claim(source="x", says="y", figure="recovery_speedup", wanted=1.0)
    assert report.judged(results, SPECS["normal-4"], nobody)[0]["case"] == "not run"


def test_a_rival_that_costs_nothing_cannot_be_beaten() -> None:
    cell = Cell("normal-1", "Criteo", "ECRM-k4", 2, 0)
    rival = dataclasses.replace(cell, mode="Ckpt-30-beside")
    found: dict[Cell, dict[str, Any]] = {
        cell: {"overhead": spread(0.02)},
        rival: {"overhead": {"store": spread(-0.01)}},
    }
    assert figures.overhead_reduced(found) == [{"case": "Criteo, store, Ckpt-30-beside", "value": 0.0}]


def test_nothing_is_said_of_an_overhead_that_is_not_known() -> None:
    """Without XDL beside it ours has none: that is not an overhead of nothing."""
    cell = Cell("normal-1", "Criteo", "ECRM-k4", 2, 0)
    rival = dataclasses.replace(cell, mode="Ckpt-30")
    found: dict[Cell, dict[str, Any]] = {cell: {}, rival: {"overhead": {"store": spread(0.05)}}}
    assert figures.overhead_reduced(found) == []


# the same cells, run twice -------------------------------------------------------------------------------------------


def run_with(folder: Path, name: str, rates: dict[str, tuple[float, float, float]], factor: int = 1024) -> Results:
    """A run of which some cells, by their modes, have the rates least, median, most."""
    results = Results.begin(folder, name, factor, None, catalogue.chosen(name))
    for cell in results.groups[0].cells:
        if cell.mode in rates:
            least, median, most = rates[cell.mode]
            figures_of = {"samples_per_s": {"median": median, "min": least, "max": most}, "blocks": []}
            results.write(cell, figures_of, None)
    return results


def test_the_same_cells_run_twice_are_compared(tmp_path: Path) -> None:
    rates = {"ECRM-k4": (90.0, 100.0, 110.0), "ECRM-k4-minus2PC": (99.0, 100.0, 101.0)}
    first = run_with(tmp_path / "one", "normal-4", rates)
    again = {"ECRM-k4": (81.0, 81.0, 81.0), "ECRM-k4-minus2PC": (96.0, 97.0, 98.0), "ECRM-k4-minusNNRep": (1, 1, 1)}
    second = run_with(tmp_path / "two", "normal-4", again)
    lines = figures.run_again(first, second, SPECS["normal-4"])
    assert [(line["mode"], line["differ by"], line["spread"], line["within"]) for line in lines] == [
        ("ECRM-k4", 19.0, 20.0, "yes"), ("ECRM-k4-minus2PC", 3.0, 2.0, "no")
    ]  # fmt: skip
    text = report.page([first, second])
    assert f"**Run again** (commit {second.run.header['commit']}" in text
    assert "1 of 2 cells differ by no more than the spread that they state." in text
    report.write([first, second], tmp_path / "docs" / "evidence.md")
    kept = [Results.open(tmp_path / "docs" / "evidence" / name) for name in ("normal-4", "normal-4-2")]
    assert report.page(kept) == text, "the page can be made of what stands beside it"
    report.write(kept[::-1], tmp_path / "docs" / "evidence.md")
    assert [Results.open(one.folder).figures(lines_of(one)) for one in kept] == [
        second.figures(lines_of(second)), first.figures(lines_of(first))
    ], "each is there, the other way round"  # fmt: skip


def lines_of(results: Results) -> Cell:
    return results.groups[0].cells[0]


def test_cells_of_another_setting_are_not_the_same(tmp_path: Path) -> None:
    first = run_with(tmp_path / "one", "normal-4", {"ECRM-k4": (1.0, 1.0, 1.0)})
    second = run_with(tmp_path / "two", "normal-4", {"ECRM-k4": (1.0, 1.0, 1.0)}, factor=2048)
    assert figures.run_again(first, second, SPECS["normal-4"]) == []
    assert "no cell with the same settings, factor and kind of rows has run in both" in report.page([first, second])
    for other in ({"repeats": 1}, {"link_mbit": 10.0}):
        assert figures.run_again(first, first, msgspec.structs.replace(SPECS["normal-4"], **other)) == []


def test_what_states_no_spread_is_not_judged(tmp_path: Path) -> None:
    killed, emulated = (filled(tmp_path / name, name) for name in ("recovery-1", "accuracy"))
    results = Results.open(killed.folder)
    cell = results.groups[0].cells[0]
    results.write(cell, {**made_up(cell, "kill"), "kills": [{"recovered_s": 20.0}]}, None)
    assert figures.run_again(results, results, SPECS["recovery-1"])[0]["within"] == "-"
    lines = figures.run_again(emulated, emulated, SPECS["accuracy"])
    assert {(line["spread"], line["within"]) for line in lines} == {(0.0, "yes")}


def test_a_cell_file_says_what_it_is_of(tmp_path: Path) -> None:
    results = filled(tmp_path, "smoke")
    cell = results.groups[0].cells[1]
    found = json.loads(results.path(cell).read_text())
    assert found["cell"] == dataclasses.asdict(cell) and found["factor"] == 1024 and found["error"] is None


def test_the_listing_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = run.listing(list(SPECS.values()), Scale())
    for spec in SPECS.values():
        assert re.search(rf"{spec.name} .*{re.escape(spec.title)}", text)
    assert isinstance(SPECS["normal-1"], Spec)
