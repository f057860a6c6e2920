"""`torch-ecrec checkpoints`: what it lists, verifies, removes and refuses."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kept import Shelf

from torch_ecrec.cli.checkpoints import _age
from torch_ecrec.cli.main import main
from torch_ecrec.observe import progress
from torch_ecrec.observe.progress import Progress
from torch_ecrec.storage import exporting
from torch_ecrec.storage.manifest import MANIFEST, Encoding


def test_a_place_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints at {tmp_path}\n"
    assert main(["checkpoints", str(tmp_path / "none")]) == 7
    assert capsys.readouterr().err == f"torch-ecrec: {tmp_path / 'none'}: no such folder\n"
    assert main(["checkpoints", str(tmp_path), "--remove", "5"]) == 7
    assert "there is no checkpoint of step 5" in capsys.readouterr().err
    assert main(["checkpoints", "nothing://x"]) == 7
    assert "name a folder, or a URL that fsspec knows" in capsys.readouterr().err


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(100)
    shelf.write(200, full, [[1, 2], [3]], Encoding(bits=8))
    left = shelf.parts(300)
    assert main(["checkpoints", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["2", "checkpoints", "at", str(tmp_path)]
    assert lines[1] == ["step", "kind", "base", "size", "rows", "weights", "written", "age", "name"]
    assert lines[2][:3] == ["200", "incremental", "100"] and lines[2][5:8] == ["3", "8", "bits"]
    assert lines[3][:3] == ["100", "full", "-"] and lines[3][5:7] == ["56", "exact"]
    assert "step 200, table a: weights off by" in out and f"interrupted ones: {left.id}" in out
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in said["checkpoints"]] == [200, 100] and said["unfinished"] == [left.id]
    assert said["checkpoints"][0]["errors"]["a"]["largest"] > 0 and "faults" not in said["checkpoints"][0]


def test_verify_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf = Shelf(str(tmp_path))
    first = shelf.write(100)
    above = shelf.write(150, first, [[1], []])
    other = shelf.write(200)
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out.count("  whole") == 3
    for part in first.parts:
        path = tmp_path / first.id / part.name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert main(["checkpoints", str(tmp_path), "--verify", "--json"]) == 7
    faults = {one["name"]: one["faults"] for one in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert len(faults[first.id]) == len(faults[above.id]) == 2 and faults[other.id] == []
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 7
    out = capsys.readouterr().out
    assert out.count("FAULTY (2)") == 2 and f"FAULTY {above.id}: {tmp_path}/{first.id}/slot-0000.part, block" in out
    (tmp_path / first.id / MANIFEST).unlink()
    (tmp_path / other.id / MANIFEST).write_text("{}")
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 7
    out = capsys.readouterr().out
    assert f"builds on {first.id}, which is not at" in out and f"BROKEN {other.id}: " in out


def test_rows_that_are_missing_are_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf = Shelf(str(tmp_path))
    shelf.write(100, rows=[[*range(46)], [*range(9)]])
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 7
    assert "lacks 1 rows, first row 6 of table b" in capsys.readouterr().out


def test_removing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(100)
    above = shelf.write(200, full, [[1], []])
    assert main(["checkpoints", str(tmp_path), "--remove", "100"]) == 7
    assert f"{full.id} is what {above.id} build on: remove these first" in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path), "--remove", "200"]) == 0
    assert capsys.readouterr().out == f"removed {above.id}\n"
    assert [one.id for one in shelf.catalog.checkpoints()] == [full.id]
    assert main(["checkpoints", str(tmp_path), "--remove", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [full.id]} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("span_s", "said"), [(-3, "0 s"), (42, "42 s"), (420, "7 min"), (3 * 3600, "3 h"), (12 * 86400, "12 d")]
)
def test_ages(span_s: float, said: str) -> None:
    assert _age(span_s) == said


@pytest.mark.parametrize("action", ["verify", "export"])
def test_long_actions_count_their_bytes_towards_what_there_is_to_do(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[Progress] = []

    class Counted(Progress):
        def __exit__(self, *error: Any) -> None:
            counted.append(self)
            super().__exit__(*error)

    monkeypatch.setattr(progress, "Progress", Counted)
    shelf = Shelf(str(tmp_path / "store"))
    first = shelf.write(100)
    above = shelf.write(150, first, [[1], []])
    words = ["--verify"] if action == "verify" else ["--export", str(tmp_path / "x.safetensors")]
    assert main(["checkpoints", str(tmp_path / "store"), *words]) == 0
    (one,) = counted
    wanted = (2 * first.bytes if action == "verify" else first.bytes) + above.bytes
    assert one._total == wanted and one._done >= 0.9 * wanted, "what each builds on is read with it"
    assert capsys.readouterr().err == "", "nobody is at a terminal"


def test_a_place_is_named_as_for_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one way for all commands: a path, also below ~, file://, or a bucket with its scheme."""
    Shelf(str(tmp_path / "kept")).write(7)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("kept", "~/kept", f"file://{tmp_path}/kept", str(tmp_path / "kept")):
        assert main(["checkpoints", named]) == 0
        assert "1 checkpoints at" in capsys.readouterr().out
    for named in ("nothing", "~/nothing", f"file://{tmp_path}/nothing"):
        assert main(["checkpoints", named]) == 7
        assert f"{named}: no such folder" in capsys.readouterr().err
    assert main(["checkpoints", "s3:bucket/kept"]) == 2
    assert "a bucket is named with its scheme (s3://bucket/kept)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--export", "--import"])
def test_what_is_exported_or_imported_is_on_this_machine(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder "s3:" of this machine was written, and said to be the bucket."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["checkpoints", "kept", option, "s3://bucket/out.safetensors"])
    said = f"argument {option}: a path on this machine is wanted, got 's3://bucket/out.safetensors'"
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_export_of_what_the_cluster_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = Shelf(str(tmp_path / "kept"))
    first = shelf.write(7)

    def export_late(*_: object) -> int:
        shelf.write(8)
        shelf.catalog.keep(1)
        return written(*_)

    written = exporting.export
    monkeypatch.setattr(exporting, "export", export_late)
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "out.safetensors")]) == 7
    assert f"{first.id} was removed while it was read" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_leaves_nothing_half_written(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C left nothing; SIGTERM and a terminal that closes left a hidden file, as large as all tables."""
    Shelf(str(tmp_path / "kept")).write(7)
    monkeypatch.setattr(exporting, "_fill", lambda *_: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored, and stays so
    request.addfinalizer(lambda: signal.signal(number, before))
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "out.safetensors")]) == 130
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_what_a_killed_export_left_goes_with_the_next_one_to_the_same_file(tmp_path: Path) -> None:
    """SIGKILL leaves a hidden file, as large as all tables; one that is under way stays."""
    Shelf(str(tmp_path / "kept")).write(7)
    names = [".out.safetensors.0123456789ab", ".out.safetensors.ba9876543210", ".out.safetensors.mine"]
    left, under_way, other = (tmp_path / name for name in names)
    for one in (left, under_way, other):
        one.touch()
    child = os.fork()
    if not child:  # killed while it writes
        exporting._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        main(["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "out.safetensors")])
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and not left.exists()
    under_way.touch()
    assert len(list(tmp_path.iterdir())) == 4, "what was killed left one"
    with exporting.held(under_way):
        assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(tmp_path / "out.safetensors")]) == 0
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == [under_way.name, other.name, "kept", "out.safetensors"]


def test_what_an_interrupted_import_left_can_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf = Shelf(str(tmp_path))
    full = shelf.write(100)
    left, base = shelf.parts(0), shelf.write(150, full, [[2], []])
    above = shelf.write(200, base, [[1], []])
    (tmp_path / base.id / "manifest.json").unlink()
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "--remove NAME removes what is left of one" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path), "--remove", base.id]) == 7
    assert f"{base.id} is what {above.id} build on: remove these first" in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path), "--remove", left.id]) == 0
    assert capsys.readouterr().out == f"removed {left.id}\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == [full.id, base.id, above.id]
