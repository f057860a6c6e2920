"""`bench scaling`: counts against brute force, what is measured once and what is left out, what it writes."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from benches import result as read
from benches import run

from torch_ecrec.bench import experiment, scaling
from torch_ecrec.bench.experiment import Mode, Part, Stopped
from torch_ecrec.bench.places import Here
from torch_ecrec.bench.scaling import FULL, QUICK, SWEEPS, Point
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.spec.job import CodeSpec

# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "r"), [(1, 1), (2, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize("more", [0, 1, 2, 5, 9])
def test_holders_are_those_of_the_layout(k: int, r: int, more: int) -> None:
    layout = Layout(k + r + more, k, r, 1000)
    holders = scaling.holders_of(layout.member_slot, k)
    assert [tuple(sorted(some)) for some in holders] == [layout.holders(slot) for slot in range(layout.slots)]
    together = scaling.holders_of(scaling.one_group(layout.slots, layout.n), k)
    assert {len(some) for some in together} == {layout.n - 1}, "in a rotation, the neighbours"


@pytest.mark.parametrize(("slots", "k", "r"), [(3, 2, 1), (8, 2, 1), (9, 2, 2), (7, 1, 2)])
def test_fatal_sets_by_trying_all(slots: int, k: int, r: int) -> None:
    stripes = [set(members) for members in Layout(slots, k, r, 0).member_slot.tolist()]
    fatal = [lost for lost in itertools.combinations(range(slots), r + 1) if any(set(lost) <= s for s in stripes)]
    assert scaling.fatal_sets(Layout(slots, k, r, 0).member_slot, r) == len(fatal)
    assert scaling.fan_out(slots, k, r)["fatal"] == len(fatal) / math.comb(slots, r + 1)


def test_the_example_of_the_docstring() -> None:
    fan = scaling.fan_out(8, 2, 1)
    assert (fan["folds"], fan["folds_one_group"], fan["folds_anywhere"], fan["groups"]) == (2, 2, 7, 2)
    assert [round(28 * fan[key]) for key in ("fatal", "fatal_one_group", "fatal_anywhere")] == [12, 16, 28]
    assert fan["requests"] == 16 and fan["folds_of_all"] == 16


@pytest.mark.parametrize(("k", "r"), scaling.FAN_OUT_CODES)
def test_folds_do_not_grow_with_the_servers(k: int, r: int) -> None:
    fans = [scaling.fan_out(servers, k, r) for servers in scaling.FAN_OUT_SERVERS if servers >= k + r]
    assert {fan["folds"] for fan in fans} == {k + r - 1}
    assert all(fan["fatal"] <= fan["fatal_one_group"] <= 1 for fan in fans)


def test_messages_of_a_step() -> None:
    assert scaling.messages(Point()) == 2 * 2 * 3 + 3 * 2
    assert scaling.messages(Point().bare) == 12
    assert scaling.messages(Point(servers=8, k=4, r=2, trainers=3)) == 2 * 3 * 8 + 8 * 5


# --- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_point_can_be_built(plan: scaling.Plan) -> None:
    assert set(plan.values) == set(SWEEPS) == set(scaling.AXES)
    for sweep in SWEEPS:
        for value in plan.values[sweep]:
            point = plan.point(sweep, value)
            assert point.code.parities == point.r and point.bare.code.parities == 0
            assert point.bare.bare == point.bare and point.bare.servers == point.servers
            Layout(point.servers, point.code.k, point.code.parities, 1)
            Layout(point.servers, point.bare.code.k, point.bare.code.parities, 1)
            assert (point.shape.rows, point.shape.dim, point.shape.bottom[-1]) == (point.rows, point.dim, point.dim)
    for sweep in ("dim", "batch", "trainers", "servers"):
        assert plan.base in [plan.point(sweep, value) for value in plan.values[sweep]], "sweeps share the base"


def test_a_sweep_changes_one_thing() -> None:
    assert FULL.point("rows", 520_000) == FULL.base
    assert FULL.point("rows", 2_000_000).rows == round(2_000_000 / 26)
    assert FULL.point("code", (6, 2)) == Point(servers=8, k=6, r=2)
    assert {FULL.point("code", value).bare for value in FULL.values["code"]} == {Point(servers=8, parity=False)}


def test_memory_needed() -> None:
    point = Point(rows=1_000_000)
    records = 26_000_000 * 4 * 65
    assert records * 1.5 < scaling.needed_bytes(point) < records * 1.5 + 4e9
    assert scaling.needed_bytes(point) - scaling.needed_bytes(point.bare) == records / 2


# --- a run, with clusters made up ------------------------------------------------------------------------------------


class Made:
    """In the place of `Running`: CPU time is proportional to batch, a fifth more with parity; some points fail."""

    started: ClassVar[list[str]] = []
    fail_servers = 0

    def __init__(self, part: Part, folder: Path, place: Here) -> None:
        assert part.mode.code is not None and not part.mode.snapshot
        self.code, self.shape = part.mode.code, part.model.shape

    def __enter__(self) -> "Made":
        Made.started.append(f"{self.code.parities} {self.code.slots} {self.shape.rows} {self.shape.batch}")
        if self.code.slots == Made.fail_servers:
            raise Stopped("k2r1: trainer 0 gave no answer")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def block(self, steps: int, mode: Mode, checkpoint_every: int = 0) -> dict[str, Any]:
        assert steps >= 3 and checkpoint_every == 0
        factor = 1.2 if self.code.parities else 1.0
        cpu_s = 1e-4 * self.shape.batch * factor
        figures = {"samples_per_s": 100.0, "step_ms": 500 * cpu_s, "cpu_s_per_step": cpu_s, "wire_bytes": 1e6 * factor}
        held = {"record_bytes": 100, "parity_bytes": 50 * self.code.parities, "log_bytes": 1}
        sent = {"lookup": 4e5, "push": 4e5, "fold": 2e5 * self.code.parities}
        figures["server_cpu_s_per_step"] = cpu_s / 2
        return {**figures, "rss_bytes": 10**9, "server_bytes": held, "sent": sent}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Made]:
    monkeypatch.setattr(Made, "started", [])
    monkeypatch.setattr(Made, "fail_servers", 0)
    monkeypatch.setattr(experiment, "Running", Made)
    monkeypatch.setattr(experiment, "warm", lambda: None)
    return Made


def free(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    memory = SimpleNamespace(available=int(gigabytes * 1e9), total=int(gigabytes * 1e9))
    monkeypatch.setattr(scaling.psutil, "virtual_memory", lambda: memory)


def test_what_it_measures_and_writes(
    tmp_path: Path, fake: type[Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1000)
    assert run(scaling, tmp_path, "--blocks", 2, "--seconds", 0.1, "--warmup", 3, "--least-steps", 3) == 0
    result = read(tmp_path, "scaling")
    assert result["left_out"] == []
    assert len(result["points"]) == len(fake.started), "each point once"
    assert len(fake.started) < 2 * len(result["rows"]), "sweeps share points"
    rows = result["rows"]
    assert [(row["sweep"], row["value"]) for row in rows] == [
        (sweep, scaling.value_name(sweep, value)) for sweep in SWEEPS for value in FULL.values[sweep]
    ]
    for row in rows:
        assert row["cpu_of_none"] == pytest.approx(1.2) and row["none_cpu_ms"] == pytest.approx(0.1 * row["batch"])
        assert row["wire_mb"] == pytest.approx(1.2) and row["none_wire_mb"] == pytest.approx(1.0)
        assert row["sent_of_none"] == pytest.approx(1 + 0.25 * row["r"])
        assert row["messages"] > row["none_messages"] == 2 * row["trainers"] * row["servers"]
        assert row["memory_of_records"] == pytest.approx(1.01 + 0.5 * row["r"]) and row["steps"] >= 6
    assert set(result["columns"]) <= set(rows[0]) and set(result["fan_out_columns"]) <= set(result["fan_out"][0])
    assert (tmp_path / "scaling.png").stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert "by samples per trainer and step:" in printed and "fan-out, counted from the layout" in printed


def test_what_does_not_fit_is_left_out_and_said(
    tmp_path: Path, fake: type[Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 8)
    assert run(scaling, tmp_path, "--sweeps", "rows", "--warmup", 3) == 0
    result = read(tmp_path, "scaling")
    assert [row["value"] for row in result["rows"]] == ["200,000", "520,000", "2,000,000", "6,000,000"]
    assert [out["point"].partition("-")[0] for out in result["left_out"]] == ["none", "k2r1"]
    assert all("GB of memory, 8.0 GB are free" in out["reason"] for out in result["left_out"])
    assert "left out: needs about" in capsys.readouterr().err


def test_a_point_that_fails_does_not_end_the_others(
    tmp_path: Path, fake: type[Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1000)
    fake.fail_servers = 3
    assert run(scaling, tmp_path, "--quick", "--sweeps", "servers", "--warmup", 3) == 1
    result = read(tmp_path, "scaling")
    assert [row["value"] for row in result["rows"]] == ["6"]
    assert [out["reason"] for out in result["left_out"]] == ["failed: k2r1: trainer 0 gave no answer"] * 2
    assert "a point failed" in capsys.readouterr().err


def test_without_protection_unknown_ratios_are_empty() -> None:
    ours = dict.fromkeys(("step_ms", "cpu_ms", "wire_mb", "sent_mb", "messages", "resident_gb"), 1.0)
    row = scaling.row_of("code", (4, 2), Point(servers=8, k=4, r=2), ours, None)
    assert (row["value"], row["cpu_of_none"], row["none_cpu_ms"], row["cpu_ms"]) == ("(4, 2)", None, None, 1.0)


def test_the_fan_out_alone_starts_nothing(tmp_path: Path, fake: type[Made]) -> None:
    assert run(scaling, tmp_path, "--sweeps") == 0
    assert fake.started == []
    result = read(tmp_path, "scaling")
    assert result["rows"] == [] and len(result["fan_out"]) > 10
    assert (tmp_path / "scaling.png").stat().st_size > 5_000


def test_codes_are_as_named() -> None:
    assert Point(servers=8, k=6, r=2).code == CodeSpec(8, 6, 2)
    assert Point(servers=8, parity=False).code == CodeSpec(8, 2, 1, "none")
    assert np.array_equal(scaling.one_group(3, 2), [[0, 1], [1, 2], [2, 0]])
