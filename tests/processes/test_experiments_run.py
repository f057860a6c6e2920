"""`torch-ecrec experiments run`: real cells, of each kind, at a factor so large that they take seconds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torch_ecrec.bench import workload
from torch_ecrec.experiments import catalogue, cells, limits, run, scale
from torch_ecrec.experiments.results import Results
from torch_ecrec.experiments.scale import Scale
from torch_ecrec.testing import cpu_quota, hosts

FACTOR = 1 << 14  # 453 rows a table; Ckpt-30 saves each 1.9 s


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a small dense model: what is tested is not how long they take."""
    shape = Scale.shape

    def smaller(self: Scale, model: str, data: str | None = None) -> workload.Shape:
        whole = shape(self, model, data)
        return dataclasses.replace(whole, batch=64, bottom=(16, whole.dim), top=(16, 1))

    monkeypatch.setattr(Scale, "shape", smaller)


def found_in(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    results = Results.open(folder)
    them = [cell for group in results.groups for cell in group.cells]
    found = {(cell.experiment, cell.mode): json.loads(results.path(cell).read_text()) for cell in them}
    assert [one["error"] for one in found.values()] == [None] * len(found)
    return {key: one["figures"] for key, one in found.items()}


def only(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """`chosen` gives this experiment, changed."""
    spec = msgspec.structs.replace(catalogue.all_specs()[name].smoked(), **changes)
    monkeypatch.setattr(run, "chosen", lambda _: [spec])


def test_modes_train_undisturbed_in_turns(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SAVED_BESIDE", 64)  # small steps: many, so that some are beside a checkpoint
    only(monkeypatch, "normal-1", modes=["XDL", "Ckpt-30", "Ckpt-60", "Ckpt-30-beside", "ECRM-k2"], seconds=0.3)
    assert run.begin("normal-1", FACTOR, None, tmp_path) == 0
    found = found_in(tmp_path)
    assert all(len(one["blocks"]) == 2 and one["samples_per_s"]["min"] > 0 for one in found.values())
    half, hour = found["normal-1", "Ckpt-30"], found["normal-1", "Ckpt-60"]
    assert half["blocks"] == hour["blocks"], "one system has both"
    assert hour["interval_s"] == 2 * half["interval_s"] == pytest.approx(3600 / Scale(FACTOR).time)
    assert half["bytes"]["min"] > 0.9 * Scale(FACTOR).record_bytes("Criteo") and half["save_s"]["min"] > 0
    costs = [half["overhead"][store]["median"] for store in scale.BANDWIDTHS]
    assert costs == sorted(costs, reverse=True) and costs[0] > 0
    beside = found["normal-1", "Ckpt-30-beside"]
    assert beside["bytes"]["min"] == half["bytes"]["min"] and all("lost_s" in block for block in beside["blocks"])
    # Of the longer one: that it has begun may be heard late on a busy machine.
    assert beside["save_s"]["max"] > 0.9 * beside["bytes"]["min"] / scale.BANDWIDTHS["store"], "at that store's pace"
    assert not any("store" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.skipif(bool(limits.unavailable("lessNetwork") or limits.unavailable("lessCPU")), reason="it takes root")
def test_servers_have_less_in_some_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit is met, or its cell would fail."""
    spec = msgspec.structs.replace(catalogue.all_specs()["normal-2"], models=["Criteo"], repeats=1, seconds=0.5)
    monkeypatch.setattr(run, "chosen", lambda _: [spec])
    assert run.begin("normal-2", FACTOR, None, tmp_path) == 0
    assert all(one["samples_per_s"]["median"] > 0 for one in found_in(tmp_path).values())
    assert not list(cpu_quota.V1.glob("torch-ecrec-*")) and not list(cpu_quota.V2.glob("torch-ecrec-*"))


def test_after_a_kill_one_goes_on_and_one_goes_back(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "recovery-1", seconds=1.0)
    assert run.begin("recovery-1", FACTOR, None, tmp_path) == 0
    found = found_in(tmp_path)
    ours, theirs = found["recovery-1", "ECRM-k2"], found["recovery-1", "Ckpt-30"]
    assert ours["pid"] > 0 and ours["rebuilt_s"] > 0 and ours["share"] > 0
    steps = [step for _, step in ours["progress"]]
    assert steps == sorted(steps), "nothing is trained again"
    assert theirs["redone"] > 0 and theirs["caught_up_s"] > theirs["first_step_s"] > 0
    steps = [step for _, step in theirs["progress"]]
    assert steps != sorted(steps), "it goes back"
    assert theirs["share"] == 0.0 and theirs["recovered_s"] == theirs["caught_up_s"]


@pytest.mark.skipif(bool(hosts.unavailable()), reason="it takes root")
def test_hosts_die_with_their_links(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both modes the same slots, and without two-phase commit, too, all is repaired after it."""
    spec = msgspec.structs.replace(catalogue.all_specs()["recovery-3"], repeats=2)
    monkeypatch.setattr(run, "chosen", lambda _: [spec])
    assert run.begin("recovery-3", FACTOR, None, tmp_path) == 0
    found = {mode: one for (_, mode), one in found_in(tmp_path).items()}
    assert [len(one["kills"]) for one in found.values()] == [2, 2]
    slots = [[kill["slot"] for kill in one["kills"]] for one in found.values()]
    assert slots[0] == slots[1]
    assert all(kill["rebuilt_s"] > kill["detected_s"] > 0 for one in found.values() for kill in one["kills"])
    assert found["ECRM-k4"]["lost_steps"] == found["ECRM-k4"]["wrong_stripes"] == 0


def test_emulated_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact runs lose nothing; the same cell run twice is the same."""
    only(monkeypatch, "accuracy")
    for folder in ("one", "two"):
        assert run.begin("accuracy", FACTOR, None, tmp_path / folder) == 0
    texts = [
        {path.name: path.read_text() for path in (tmp_path / folder / "cells").rglob("*.json")}
        for folder in ("one", "two")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 4
    lost = {name: json.loads(text)["figures"]["lost"] for name, text in texts[0].items()}
    assert all((share == 0) == ("exact" in name) for name, share in lost.items())
    only(monkeypatch, "cpr")
    assert run.begin("cpr", FACTOR, None, tmp_path / "cpr") == 0
    found = found_in(tmp_path / "cpr")
    assert found["cpr", "full"]["overhead"] > found["cpr", "mfu"]["overhead"] > 0
