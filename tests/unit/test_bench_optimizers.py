"""`bench optimizers` on tiny sizes: what it writes; never how fast anything is."""

import pytest
from benches import result, run

from torch_ecrec.bench import optimizers
from torch_ecrec.records.optimizers import NAMES, optimizer


def test_it_measures_every_optimizer_and_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optimizers, "CALL_BYTES", 1 << 14)
    words = ("--dims", 3, 16, "--weights", "float32", "float16", "--repeats", 2, "--memory-mib", 1)
    assert run(optimizers, tmp_path, *words) == 0
    printed = capsys.readouterr().out
    content = result(tmp_path, "optimizers")
    rows = content["rows"]
    assert content["repeats"] == 2 and content["memory_mib"] == 1 and content["header"]["commit"]
    cases = [(kind, dim, weights) for kind in NAMES for dim in (3, 16) for weights in ("float32", "float16")]
    for row, (kind, dim, weights) in zip(rows, cases, strict=True):
        assert (row["optimizer"], row["dim"]) == (kind if weights == "float32" else f"{kind}, float16", dim)
        assert row["record_bytes"] == optimizer(kind).schema(dim, weights).nbytes
        for rate in ("gbps", "memcpy_gbps", "scattered_copy_gbps"):
            assert 0 < row[f"{rate}_min"] <= row[rate] <= row[f"{rate}_max"]
        assert min(row["of_memcpy"], row["of_scattered_copy"], row["million_rows_per_s"]) > 0
        assert row["optimizer"] in printed


def test_sizes_are_checked(tmp_path):
    for words in (("--repeats", 0), ("--memory-mib", 0), ("--dims", 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            run(optimizers, tmp_path, *words)
