"""`bench report`: what is made of the benchmarks' files, and what is said of those that are missing."""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from benches import parse
from test_docs import broken

from torch_ecrec.bench import codec, operators, optimizers, record, recovery, report, scaling, train
from torch_ecrec.bench.experiment import parse_mode
from torch_ecrec.bench.faults import KILLED
from torch_ecrec.bench.report import BEGIN, END, MADE_BY, TARGETS, Figure, NotMeasured, Target

PNG = b"\x89PNG"
SYSTEMS = ("torchrec", "none", "k2r1", "k2r1+snap", "k4r1", "k4r2", "k2r1:bf16")


def run(source: Path, out: Path) -> int:
    return report.run(parse(report, "--from", source, "--out", out))


def leave(folder: Path, name: str, content: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    record.write(folder, name, {"header": record.header(), **content}, rows)
    (folder / f"{name}.png").write_bytes(PNG)


def block(rate: float) -> dict[str, Any]:
    return {
        "samples_per_s": rate,
        "step_ms": 1e5 / rate,
        "cpu_s_per_step": 10 / rate,
        "server_cpu_s_per_step": 4 / rate,
        "wire_bytes": 1e6,
        "rss_bytes": 1e9,
        "waits_share": 0.25,
        "sent": {"lookup": 1000, "fold": 500},
        "server_bytes": {"record_bytes": 1000, "parity_bytes": 250, "log_bytes": 10},
    }


def leave_training(folder: Path, shape: str, rates: dict[str, list[float]]) -> None:
    """As `bench train` does it: by its own `summarise` and `rows`."""
    systems = [parse_mode(name) for name in rates]
    blocks = {name: [block(rate) for rate in some] for name, some in rates.items()}
    made_of = {"tables": 26, "rows": 200, "dim": 64, "ids": 1, "zipf": 1.05, "batch": 32, "data": None}
    result = {
        "shape": {"name": shape, **made_of, "bottom": [64], "top": [64, 1]},
        "trainers": 2,
        "steps_per_block": {name: 8 for name in rates},
        "checkpoint_every": 100,
        **train.summarise(systems, blocks),
    }
    leave(folder, f"train-{shape}", result, train.rows(result))


def leave_recovery(folder: Path, error: str | None = None) -> None:
    cases = []
    for case, first_step_s in (
        (recovery.Case(1.0, 0.0, False), [0.2, 0.4, 0.3]),
        (recovery.Case(1.0, 50.0, False), [0.9]),
        (recovery.Case(1.0, 0.0, True), [None]),
    ):
        kills = [{**dict.fromkeys(KILLED, 2.0), "first_step_s": value} for value in first_step_s]
        cases.append((case, kills))
    content = {
        "arguments": {"zipf": 1.05},
        "cases": [{"case": case.name, "kills": kills} for case, kills in cases],
        "error": error,
    }
    leave(folder, "recovery", content, [recovery.summary(case, kills) for case, kills in cases])


def leave_codec(folder: Path) -> None:
    rows = []
    for what in ("fold", "encode"):
        for width in (64, 260):
            row = dict.fromkeys(codec.COLUMNS)
            rows.append(
                {**row, "what": what, "k": 2, "r": 1, "record_bytes": width, "place": "memory", "gbps": 5.0}
                | {"of_memcpy": 0.5 if width == 260 else 0.1}
            )
    leave(folder, "codec", {"notes": ["a note."]}, rows)


def leave_operators(folder: Path) -> None:
    row = {**dict.fromkeys(operators.COLUMNS), "what": "pooled", "dim": 64, "fbgemm_over_ours": 0.625}
    leave(folder, "operators", {"notes": ["of operators."]}, [row])


def leave_optimizers(folder: Path) -> None:
    row = {**dict.fromkeys(optimizers.COLUMNS), "optimizer": "adam", "dim": 64, "gbps": 7.25}
    leave(folder, "optimizers", {"notes": ["another note."]}, [row])


def leave_scaling(folder: Path) -> None:
    figures = ("step_ms", "cpu_ms", "wire_mb", "sent_mb", "messages", "resident_gb", "memory_of_records")
    ours = dict.fromkeys(figures, 3.0)
    point = scaling.Point()
    content = {
        "tables": 26,
        "base": {"rows": 20_000, "dim": 64, "batch": 512, "trainers": 2, "servers": 3, "k": 2, "r": 1},
        "axes": scaling.AXES,
        "columns": scaling.COLUMNS,
        "fan_out_columns": scaling.FAN_OUT_COLUMNS,
        "left_out": [{"point": "k2r1-huge", "reason": "needs about 99.0 GB of memory\nmore"}],
        "fan_out": [scaling.fan_out(8, 2, 1)],
    }
    leave(folder, "scaling", content, [scaling.row_of("rows", 520_000, point, ours, ours)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a file of each kind; two shapes are missing."""
    folder = tmp_path / "measured"
    rates = {name: [100.0, 110.0, 90.0] for name in SYSTEMS}
    leave_training(folder, "embedding-heavy", {**rates, "k2r1": [90.0, 88.0, 80.0]})
    leave_training(folder, "embedding-heavy-codes", rates)
    leave_training(folder, "paper", rates)
    leave_training(folder, "paper-snapshot", {**rates, "k2r1+snap": [95.0, 95.0, 95.0]})
    leave_training(folder, "multi-hot", {"torchrec": [100.0], "none": [70.0]})
    leave_recovery(folder)
    leave_codec(folder)
    leave_optimizers(folder)
    leave_operators(folder)
    leave_scaling(folder)
    return folder


def lines(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_the_documents(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    out.mkdir()
    (out / "scaling.md").write_text(f"# Scaling\n\nprose\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    (out / "performance-notes.md").write_text("## Notes\n\nby hand\n")
    assert run(source, out) == 0

    text = (out / "performance.md").read_text()
    assert text.startswith(MADE_BY) and text.endswith("## Notes\n\nby hand\n")
    assert (
        "**Not measured**: train-embedding-heavy-servers.json, train-embedding-heavy-transports.json,"
        " train-embedding-heavy-pipeline.json, train-uniform.json, train-criteo.json, train-sequence.json,"
        " recovery-uniform.json were missing." in text
    )
    assert "there was no train-uniform.json. `torch-ecrec bench train --shape uniform` makes it." in text
    assert f"commit {record.header()['commit']}" in text and f"{os.cpu_count()} cores" in text
    assert "26 tables x 200 rows x 64, 1 id per bag, Zipf 1.05, batch 32 on each of 2 trainers" in text
    processor = record.header()["processor"].replace("(R)", "").replace(" Processor", "")
    line = lines(text, "| samples/s, k2r1 / none, embedding-heavy ")
    assert line.endswith(f"| at least 0.98 | 0.88 (0.8 to 0.9, median 0.889) | no | {processor} |")
    assert "train-multi-hot.json has no k2r1 |" in lines(text, "| samples/s, k2r1 / torchrec, multi-hot ")
    assert "0.05 (" in lines(text, "| share of samples/s for the dense snapshot")
    assert "| 0.35 (0.2 to 0.9) |" in lines(text, "| first step after a kill, s, median")
    assert "| 0.9 |" in lines(text, "| first step after a kill, s, worst")
    assert "| 0.5 |" in lines(text, "| fold (2, 1), GB/s / memcpy")
    assert "codec.json has no fold of (4, 2)" in lines(text, "| fold (4, 2), GB/s / memcpy")
    assert "| 1.26 |" in lines(text, "| memory / records, k4r1")
    assert "1 GB, idle" in text and "Records of 260 bytes" in text and "ISA-L" not in text, "empty columns are left out"

    page = (out / "scaling.md").read_text()
    assert page.startswith(f"# Scaling\n\nprose\n\n{BEGIN}\n{MADE_BY}\n") and page.endswith(f"{END}\n\nafter\n")
    assert "old" not in page.splitlines() and "| 520,000 |" in page and "| 8 | (2, 1) | 2 | 2 | 2 | 7 |" in page
    assert "- k2r1-huge: needs about 99.0 GB of memory\n" in page and "### By dim\n\n**Not measured.**" in page

    assert "of operators." in text and "0.62" in lines(text, "| pooled | 64")
    assert "another note." in text and "| adam | 64 | - | 7.25 |" in text
    for name in ("train-paper", "recovery", "codec", "scaling"):
        for suffix in ("json", "csv", "png"):
            assert (out / "performance" / f"{name}.{suffix}").read_bytes() == (source / f"{name}.{suffix}").read_bytes()
    assert not (out / "performance" / "train-uniform.json").exists()
    for document in out.glob("*.md"):
        assert not broken(document, root=out)


def test_the_same_again_from_what_was_copied(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    run(source, out)
    first = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    shutil.rmtree(source)
    run(out / "performance", out)
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first


def test_what_is_not_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_recovery(tmp_path / "in")
    out = tmp_path / "docs"
    assert run(tmp_path / "in", out) == 0
    others = [name for name in report.NAMES if name != "recovery"]
    text = (out / "performance.md").read_text()
    for name in others:
        assert f"{name}.json" in text
    assert all("not measured: " in target.row({})["measured"] for target in TARGETS)
    assert "bench codec` makes it" in text and "bench scaling` makes it" in (out / "scaling.md").read_text()
    assert not broken(out / "performance.md", root=out)
    assert capsys.readouterr().err.count("missing: ") == len(others)


def test_a_folder_without_results_replaces_no_page(tmp_path: Path) -> None:
    out, empty = tmp_path / "docs", tmp_path / "empty"
    out.mkdir()
    empty.mkdir()
    (out / "performance.md").write_text("measured")
    with pytest.raises(ValueError, match=f"no results of benchmarks in {empty}"):
        run(empty, out)
    assert [path.name for path in out.iterdir()] == ["performance.md"]
    assert (out / "performance.md").read_text() == "measured"


def test_what_did_not_come_to_its_end_is_said(tmp_path: Path) -> None:
    leave_recovery(tmp_path / "in", error="a case: waiting for spares: not within 9 s\nthe end of a log")
    (tmp_path / "in" / "recovery.png").unlink()
    run(tmp_path / "in", tmp_path / "docs")
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert "**It did not come to its end**: a case: waiting for spares: not within 9 s\n" in text
    assert "There was no recovery.png." in text and "the end of a log" not in text


def test_files_of_different_commits_are_said(source: Path, tmp_path: Path) -> None:
    path = source / "codec.json"
    content = json.loads(path.read_text())
    content["header"]["commit"] = "0123456789ab"
    path.write_text(json.dumps(content))
    run(source, tmp_path / "docs")
    assert "The files are of different commits: 0123456789ab, " in (tmp_path / "docs" / "performance.md").read_text()


@pytest.mark.parametrize(
    ("least", "most", "target", "reached"),
    [
        (None, None, "none set", "-"),
        (0.9, None, "at least 0.9", "yes"),
        (0.92, None, "at least 0.92", "no"),
        (None, 0.92, "at most 0.92", "yes"),
        (None, 0.9, "at most 0.9", "no"),
        (0.5, 0.95, "at least 0.5 and at most 0.95", "yes"),
        (0.0, None, "at least 0", "yes"),
    ],
)
def test_a_target_is_reached_or_not(least: float | None, most: float | None, target: str, reached: str) -> None:
    row = Target("a figure", "a file", lambda _: Figure(0.91, 0.8, 1.0), least, most).row({})
    assert row == {
        "figure": "a figure",
        "target": target,
        "measured": "0.91 (0.8 to 1)",
        "reached": reached,
        "processor": "-",
    }


def test_what_is_not_measured_is_not_reached() -> None:
    def figure(_: report.Contents) -> Figure:
        raise NotMeasured("no file")

    row = Target("a figure", "a file", figure, least=1.0).row({})
    assert (row["target"], row["measured"], row["reached"]) == ("at least 1", "not measured: no file", "-")


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    with pytest.raises(ValueError, match="no such folder"):
        run(tmp_path / "none", out)
    source = tmp_path / "in"
    source.mkdir()
    (source / "codec.json").write_text("{")
    with pytest.raises(ValueError, match=r"codec\.json is not JSON"):
        run(source, out)
    (source / "codec.json").write_text("[1]")
    with pytest.raises(ValueError, match="was not left by a benchmark"):
        run(source, out)
    (source / "codec.json").unlink()
    leave_recovery(source)
    out.mkdir()
    (out / "scaling.md").write_text(f"# Scaling\n{END}\n{BEGIN}\n")
    with pytest.raises(ValueError, match="must have the markers"):
        run(source, out)
    assert [path.name for path in out.iterdir()] == ["scaling.md"]


def test_it_reads_what_the_benchmarks_write() -> None:
    """The names that the tables show are those of the benchmarks' rows."""
    row = recovery.summary(recovery.Case(1.0, 0.0, False), [dict.fromkeys(KILLED, 1.0)])
    assert {*report.RECOVERY, *report.RATES} <= set(row)
    shapes = set(importlib.import_module("torch_ecrec.bench.workload").SHAPES)
    assert set(report.SHAPES) == shapes | {
        "embedding-heavy-codes",
        "embedding-heavy-servers",
        "embedding-heavy-transports",
        "embedding-heavy-pipeline",
        "paper-snapshot",
    }
