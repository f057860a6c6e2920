"""Tables of a checkpoint as a file of safetensors: read by the format's own words, and by its library where it is."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import Shelf

from torch_ecrec.cli.main import main
from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.halves import numbers_of
from torch_ecrec.storage.description import Description
from torch_ecrec.storage.exporting import export


def wanted_of(shelf: Shelf) -> dict[str, Any]:
    """Every tensor, as float32, from the records."""
    found: dict[str, Any] = {}
    for table_group, records in zip(shelf.job.table_groups, shelf.truth, strict=True):
        numbers = numbers_of(records, table_group.schema).copy()
        for table, first in zip(table_group.tables, table_group.first_rows, strict=True):
            for field in table_group.schema.fields:
                columns = slice(*table_group.schema.columns(field.name))
                values = numbers[first : first + table.rows, columns]
                found[f"{table.name}.{field.name}"] = values[:, 0] if field.per_row else values
    return found


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata, and tensors as float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata, end, found = header.pop("__metadata__"), 0, {}
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, following = said["data_offsets"]
        assert begin == end and (8 + size + begin) % 4 == 0, "without holes, and aligned"
        end = following
        dtype = {"F32": np.float32, "F16": np.float16}[said["dtype"]]
        found[name] = np.frombuffer(data[8 + size + begin : 8 + size + end], dtype).reshape(said["shape"])
    assert 8 + size + end == len(data)
    return metadata, found


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(np.asarray(found[name], np.float32), wanted[name]) for name in wanted
    )


def test_tables_with_all_that_they_build_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf, path = Shelf(str(tmp_path / "kept")), tmp_path / "tables.safetensors"
    full = shelf.write(100)
    before = wanted_of(shelf)
    shelf.change(0, [3, 45], 1)
    newest = shelf.write(200, full, [[3, 45], []])
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(path)]) == 0
    assert "the tables of step 200" in capsys.readouterr().out
    metadata, found = read(path)
    described = Description.decoded(metadata.pop("torch_ecrec.describes").encode(), "it")
    assert described.job == shelf.job
    assert metadata == {"torch_ecrec.checkpoint": newest.id, "torch_ecrec.step": "200"}
    assert same(found, wanted_of(shelf)) and found["c.weight"].dtype == np.float16
    assert found["a.momentum1"].shape == (40,) and found["b.weight"].shape == (7, 5)
    words = ["checkpoints", str(tmp_path / "kept"), "--export", str(path), "--step", "100", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 100
    assert same(read(path)[1], before)
    assert sorted(os.listdir(tmp_path)) == ["kept", "tables.safetensors"]


def test_the_library_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    shelf, path = Shelf(str(tmp_path)), tmp_path / "tables.safetensors"
    export(shelf.catalog, shelf.write(1), path)
    assert same(library.load_file(path), wanted_of(shelf))


def test_what_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf, path = Shelf(str(tmp_path / "kept")), tmp_path / "tables.safetensors"
    kept = shelf.write(1)
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "tables.pt")]) == 2
    assert "ends in .safetensors" in capsys.readouterr().err
    for words in (["--step", "1"], ["--format", "dcp"]):
        assert main(["checkpoints", str(tmp_path / "kept"), *words]) == 2
        assert f"{words[0]} says what is exported: it goes with --export" in capsys.readouterr().err
    opaque = ["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "folder"), "--format", "dcp"]
    assert main(opaque) == CheckpointError.exit_code and not (tmp_path / "folder").exists()
    assert "does not say what its tables are called in a model" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="cannot write"):
        export(shelf.catalog, kept, tmp_path / "none" / "tables.safetensors")

    def read_only(*args: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"cannot write .*Read-only"):
        patch.setattr("builtins.open", read_only)
        patch.setattr(Path, "unlink", read_only)  # though there is nothing of that name
        export(shelf.catalog, kept, path)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(os, "posix_fallocate", full)
        export(shelf.catalog, kept, path)
    part = tmp_path / "kept" / kept.id / kept.parts[1].name
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="too early"):
        export(shelf.catalog, kept, path)
    assert os.listdir(tmp_path) == ["kept"]


def test_a_file_system_that_cannot_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    shelf, path = Shelf(str(tmp_path)), tmp_path / "tables.safetensors"
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    export(shelf.catalog, shelf.write(1), path)
    assert same(read(path)[1], wanted_of(shelf))
