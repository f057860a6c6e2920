"""`bench messages` in short: what it writes; never how fast anything is."""

from pathlib import Path

import numpy as np
import pytest
from benches import result, run

from torch_ecrec.bench import messages, packing
from torch_ecrec.codec.packing import pack
from torch_ecrec.demo import criteo
from torch_ecrec.protocol.encoding import WIRE

SMALL = ("--batch-size", 64, "--rows-per-table", 50, "--dim", 64, "--slots", 2, "--steps", 2, 40)


def test_it_measures_a_push_that_can_be_read_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "CALLS", 3)
    monkeypatch.setattr(packing, "MADE_UP", 6400)
    assert run(messages, tmp_path, "--table-groups", 1, 26, "--repeats", 2, *SMALL) == 0
    printed = capsys.readouterr().out
    rows = result(tmp_path, "messages")["rows"]
    assert [row["table_groups"] for row in rows] == [1, 26]
    for row in rows:
        push = messages._push(row["table_groups"])
        (body, tensors), _ = WIRE.encode(push)
        assert len(body) == row["body_bytes"] and len(tensors) == row["tensors"]
        assert all(row[f"{name} us"] > 0 for name in messages.COLUMNS) and all(name in printed for name in row)


@pytest.mark.parametrize("made_up", [True, False])
def test_it_packs_the_deltas_of_a_training(
    made_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of a file that come again and again: a model that knows them makes small steps."""
    monkeypatch.setattr(messages, "CALLS", 1)
    monkeypatch.setattr(packing, "CALLS", 1)
    monkeypatch.setattr(packing, "MADE_UP", 6400)
    criteo.write_synthetic(tmp_path / "clicks.tsv", 128, 0)
    data = () if made_up else ("--data", tmp_path / "clicks.tsv")
    assert run(messages, tmp_path, "--table-groups", 1, "--repeats", 1, *SMALL, *data) == 0
    printed = capsys.readouterr().out
    first, last = result(tmp_path, "messages")["packing"]
    assert (first["step"], last["step"]) == (2, 40) and all(name in printed for name in last)
    assert first["passes"] == (0.0 if made_up else 1.0) and last["passes"] == (0.4 if made_up else 20.0)
    assert last["words %"] < first["words %"] <= 100 * 17 / 16
    for row in (first, last):
        assert row["left %"] <= 100 and row["pack ms/MB"] > 0
        assert (row["unpack ms/MB"] is None) == (row["packed %"] == 0)
    if not made_up:
        assert last["packed %"] == 100 and abs(last["left %"] - last["words %"]) < 0.01


def test_the_size_of_packed_words_is_that_of_what_is_packed() -> None:
    for size in (640, 643):
        values = np.arange(size // 4 + 1, dtype=np.uint32).view(np.uint8)[:size]
        packed = pack(values)
        assert packed is not None and packing._as_words(values) == len(packed)


def test_sizes_are_checked(tmp_path: Path) -> None:
    for words in (("--repeats", 0), ("--table-groups", 0), ("--steps", 0), ("--dim", 0), ("--slots", 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            run(messages, tmp_path, *words)
