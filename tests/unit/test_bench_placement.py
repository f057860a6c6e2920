"""`bench placement`: what it prints, writes and draws is the placement of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_ecrec.bench.placement import draw, job_of
from torch_ecrec.cli.main import main
from torch_ecrec.demo.criteo import CARDINALITIES
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.spread import spread_of


def test_criteo_on_five_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "placement", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "1 id in a bag (short: as rows)"
        and "20 ids in a bag (long: pooled where a table is whole)" in lines
    )
    written = json.loads((tmp_path / "placement.json").read_text())
    of_table = {(row["bag"], row["table"]): row for row in written["rows"]}
    assert len(of_table) == 2 * len(CARDINALITIES) and of_table[1, "C3"]["lies_on"] == "slots 0-4"
    assert (of_table[20, "C16"]["pooled"], of_table[1, "C16"]["pooled"]) == (True, False)
    for bag in (1, 20):
        slots = [row for row in written["slots"] if row["bag"] == bag]
        whole = [row for (of, _), row in of_table.items() if of == bag and row["lies_on"].startswith("slot ")]
        assert sum(row["whole_tables"] for row in slots) == len(whole)
        assert sum(row["record_bytes"] for row in slots) == sum(CARDINALITIES) * (16 + 1) * 4
        assert max(row["load_of_mean"] for row in slots) <= 1.1
    assert (tmp_path / "placement.png").stat().st_size > 10_000


def test_bars_are_as_high_as_the_slots_are_full() -> None:
    spread = spread_of(job_of([100, 40, 9], 1.0, CodeSpec(3, 2, 1), 4, "table_wise"))
    records, load = draw({1.0: spread}, "title").axes
    by_slot: dict[int, float] = {}
    for bar in records.patches:
        slot = round(bar.get_x() + bar.get_width() / 2)
        by_slot[slot] = max(by_slot.get(slot, 0.0), bar.get_y() + bar.get_height())
    assert list(by_slot.values()) == pytest.approx([100 * 20 / 1e6] * 3), "with padding"
    named = [text.get_text() for text in records.texts if text.get_text().startswith("C")]
    assert sorted(named) == ["C1", "C2", "C3"] and len(load.texts) >= 3


def test_bad_input_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "placement", "--rows", "5", "0", "--out", str(tmp_path)]) == 2
    assert "`rows` must be positive, got 0" in capsys.readouterr().err
