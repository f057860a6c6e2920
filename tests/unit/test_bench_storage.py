"""`bench storage` in short: what it writes; never how fast anything is."""

from pathlib import Path

import pytest
from benches import result, run

from torch_ecrec.bench import storage


def test_it_measures_parts_and_leaves_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    assert run(storage, tmp_path, "--folders", kept, "--megabytes", 1, "--repeats", 1) == 0
    printed = capsys.readouterr().out
    rows = result(tmp_path, "storage")["rows"]
    assert [(row["bits"], row["zstd"]) for row in rows] == [(0, 0), (8, 0), (4, 0), (0, 1)]
    assert all(row[f"{name} GB/s"] > 0 and name in printed for row in rows for name in storage.COLUMNS)
    assert all(row["write ns/B"] > 0 for row in rows)
    assert rows[0]["file MB"] == 1.0 and rows[2]["file MB"] < rows[1]["file MB"] < 0.4
    assert not list(kept.iterdir())


def test_sizes_are_checked(tmp_path: Path) -> None:
    for words in (("--repeats", 0), ("--megabytes", 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            run(storage, tmp_path, *words)
