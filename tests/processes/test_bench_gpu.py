"""`bench gpu` and `make gpu` without a GPU: what is refused, time limits, failing parts, and the report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import parse
from conftest import leftover, wait_for_none
from places import ROOT

from torch_ecrec.bench import gpu
from torch_ecrec.bench.gpu import Outcome, Part, read_exactness, read_rows, read_streams, report, run_part
from torch_ecrec.cli import bench as command
from torch_ecrec.cli import main as cli

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


def python(name: str, code: str, limit_s: float = 60.0, read: Callable[[Path], Any] = lambda folder: []) -> Part:
    """A part that runs a line of Python."""
    return Part(name, f"What of {name}?", limit_s, ["-c", code], read)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


# --- arguments -------------------------------------------------------------------------------------------------------


@no_gpu
def test_without_a_gpu_it_ends_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gpu", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("torch-ecrec: `--device cuda`: torch ")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parts", "streams,warp"], "there is no part 'warp'; there are streams, exactness, overlap"),
        (["--limit", "0"], "`--limit` must be positive, got 0.0"),
    ],
)
def test_bad_arguments_start_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        gpu.run(parse(gpu, "--device", "cpu", *words, "--out", tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_parts_are_commands_that_there_are(device: str, tmp_path: Path) -> None:
    parts = gpu.parts(device, tmp_path)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) and names[:3] == ["streams", "exactness", "overlap"]
    assert device == "cpu" or names[3:] == ["rates", "rates-criteo", "uvm", "uvm-criteo"]
    for part in parts[1:]:
        assert part.command[:2] == ["-m", "torch_ecrec"]
        words = list(part.command[2:])
        told: argparse.Namespace = cli.parser(command.named_in(words)).parse_args(words)
        assert told.device == device and told.out == tmp_path / part.name
    assert str(gpu.TESTS) in parts[0].command and gpu.TESTS == ROOT / "tests" / "unit" / "test_staging.py"


# --- parts -----------------------------------------------------------------------------------------------------------


def test_a_part_that_ends_well_is_read(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "of a run before").touch()
    seen: list[list[Path]] = []

    def read(folder: Path) -> list[dict[str, Any]]:
        seen.append(list(folder.iterdir()))
        return [{"found": 1}]

    one = run_part(python("good", "import sys; print('hello'); print('you', file=sys.stderr)", read=read), tmp_path, 60)
    assert (one.error, one.rows, seen) == ("", [{"found": 1}], [[]]) and 0 < one.seconds < 60
    assert sorted((tmp_path / "good.log").read_text().split()) == ["hello", "you"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; print('torch-ecrec: no rows'); print('later'); sys.exit(4)", "exit code 4: torch-ecrec: no rows"),
        ("raise KeyError('gone')", "exit code 1: KeyError: 'gone'"),
        ("import sys; sys.exit(3)", "exit code 3: it said nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9: it said nothing"),
        ("", "what it left is not as it should be: "),
    ],
)
def test_a_part_that_fails_says_why(code: str, says: str, tmp_path: Path) -> None:
    part = python("bad", code, read=lambda folder: read_rows(folder, "none"))
    one = run_part(part, tmp_path, 60.0)
    assert one.error.startswith(says) and one.rows == []


STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("torch-ecrec: it hangs", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stubborn", [True, False])
def test_a_part_is_ended_at_its_limit_with_all_that_it_started(
    stubborn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "GRACE_S", 0.2 if stubborn else 60.0)
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    polite = "import time\ntry:\n  time.sleep(600)\nexcept KeyboardInterrupt:\n  print('torch-ecrec: it hangs')"
    begin_s = time.monotonic()
    one = run_part(python("slow", STUBBORN if stubborn else polite, limit_s=3.0), tmp_path, 60.0)
    assert one.error == "not done within 3 s: torch-ecrec: it hangs" and time.monotonic() - begin_s < 50.0
    assert not wait_for_none(lambda: leftover(os.getpid(), os.environ["PYTEST_ECREC_SESSION"]), 30.0)


def test_no_part_is_begun_without_time(tmp_path: Path) -> None:
    one = run_part(python("late", "open('begun', 'w')"), tmp_path, 5.0)
    assert one.error == "not begun: 5 s were left of the time for all"
    assert list(tmp_path.iterdir()) == []


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        python("first", "pass", read=lambda folder: [{"figure": 1.5}]),
        python("second", "print('torch-ecrec: two is one too many'); raise SystemExit(1)"),
        python("third", "pass", read=lambda folder: [{"figure": 2.5}]),
    ]
    monkeypatch.setattr(gpu, "parts", lambda device, out: parts)
    monkeypatch.setattr(gpu, "warm", lambda: None)
    assert gpu.run(parse(gpu, "--device", "cpu", "--out", tmp_path)) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(one["part"], bool(one["error"])) for one in found["parts"]] == [
        ("first", False),
        ("second", True),
        ("third", False),
    ]
    assert [row["part"] for row in found["rows"]] == ["first", "second", "third"]
    told = (tmp_path / "gpu.md").read_text()
    assert told == report(found), "made of the JSON alone"
    assert "2 of 3 parts are as they should be; failed: second" in told
    said = capsys.readouterr()
    assert told in said.out and said.err == "torch-ecrec: failed: second\n"
    assert gpu.run(parse(gpu, "--device", "cpu", "--out", tmp_path, "--parts", "third,first")) == 0
    assert [one["part"] for one in json.loads((tmp_path / "gpu.json").read_text())["parts"]] == ["first", "third"]


def test_what_was_found_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> Any:
        raise KeyboardInterrupt

    parts = [python("first", "pass", read=lambda folder: [{"figure": 1}]), python("second", "pass", read=interrupted)]
    monkeypatch.setattr(gpu, "parts", lambda device, out: parts)
    monkeypatch.setattr(gpu, "warm", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(parse(gpu, "--device", "cpu", "--out", tmp_path))
    assert [one["part"] for one in json.loads((tmp_path / "gpu.json").read_text())["parts"]] == ["first"]


# --- what parts leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "skipped", "on_cpu", "on_cuda"),
    [
        (9, 0, "", ""),
        (9, 3, "", "3 of 9 tests were skipped"),
        (3, 3, "no test has run", "no test has run"),
        (0, 0, "no test has run", "no test has run"),
    ],
)
def test_with_a_gpu_no_test_may_be_skipped(ran: int, skipped: int, on_cpu: str, on_cuda: str, tmp_path: Path) -> None:
    text = f'<testsuites><testsuite name="pytest" tests="{ran}" skipped="{skipped}"/></testsuites>'
    (tmp_path / "streams.xml").write_text(text)
    for device, says in (("cpu", on_cpu), ("cuda", on_cuda)):
        if says:
            with pytest.raises(ValueError, match=says):
                read_streams(tmp_path, device)
        else:
            assert read_streams(tmp_path, device) == [{"tests": ran - skipped, "skipped": skipped}]


def test_rows_are_read_from_what_benchmarks_write(tmp_path: Path) -> None:
    kill = {"after_kill_s": {"first_step_s": 0.25, "detected_s": 0.1}}
    runs = [
        {"case": "undisturbed", "error": "", "digest": "ab" * 32, "kills": [], "seconds": 9.0, "throughput": {}},
        {"case": "a kill", "error": "", "digest": "ab" * 32, "kills": [kill], "seconds": 12.0, "throughput": {}},
    ]
    write_json(tmp_path / "exactness.json", {"runs": runs})
    rows = read_exactness(tmp_path)
    assert [row["exact"] for row in rows] == ["yes", "yes"] and len({row["digest"] for row in rows}) == 1
    assert [row["first step after a kill, s"] for row in rows] == [None, 0.25]
    write_json(tmp_path / "train.json", {"rows": [{"system": "k2r1", "step ms": 1.0, "wire MB/step": 2.0}]})
    assert read_rows(tmp_path, "train", gpu.RATE_COLUMNS) == [{"system": "k2r1", "step ms": 1.0}]
    assert read_rows(tmp_path, "train") == [{"system": "k2r1", "step ms": 1.0, "wire MB/step": 2.0}]


# --- the report ------------------------------------------------------------------------------------------------------

HEADER = {
    "processor": "A Processor",
    "cores": 16,
    "memory_gib": 128.0,
    "versions": {"torch": "2.13.0", "fbgemm-gpu": "1.8.0"},
    "commit": "0123456789ab",
    "date": "2026-11-27T12:00:00+00:00",
}
CARD = {
    "name": "A Card",
    "memory_gib": 79.1,
    "capability": "9.0",
    "gpus": 1,
    "cuda": "13.0",
    "driver": "580.1",
    "fbgemm": "CUDA build",
}


def test_the_report_of_given_json() -> None:
    good = Outcome("rates", "How fast?", ["-m", "x"], 41.0, "", [{"system": "k2r1", "rate / torchrec": 0.5}])
    bad = Outcome("uvm", "And then?", ["-m", "x"], 100.0, "not done within 100 s: it hangs", [])
    outcomes = [vars(good), vars(bad)]
    told = report({"header": HEADER, "card": CARD, "device": "cuda", "parts": outcomes})
    assert "A Card, 79.1 GiB, compute capability 9.0; driver 580.1, CUDA 13.0; FBGEMM: CUDA build." in told
    assert "A Processor, 16 cores, 128.0 GiB; torch 2.13.0, fbgemm-gpu 1.8.0; commit 0123456789ab" in told
    assert "**1 of 2 parts are as they should be; failed: uvm.**" in told
    assert "| rates | as it should be | 41.00 |" in told
    assert "| uvm | FAILED: not done within 100 s: it hangs | 100.00 |" in told
    assert "## rates\n\nHow fast?\n\n| system | rate / torchrec |" in told and "| k2r1 | 0.50 |" in told
    assert "## uvm\n\nAnd then?\n\n**Failed: not done within 100 s: it hangs**\n\nWhat it said is in uvm.log." in told
    whole = report({"header": HEADER, "card": None, "device": "cpu", "parts": outcomes[:1]})
    assert "No GPU: the parts were run on the CPU" in whole and "**1 of 1 parts are as they should be.**" in whole


# --- make gpu --------------------------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    told = ["make", "-C", str(ROOT), "--no-print-directory", *words]
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(told, capture_output=True, text=True, env=environment, timeout=120, check=False)


def path_with_card(folder: Path) -> str:
    """A PATH on which `nvidia-smi` finds a GPU."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A Card'\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@no_gpu
@needs_make
def test_make_gpu_installs_nothing_without_a_gpu() -> None:
    there = (ROOT / ".venv-gpu").exists()
    ended = make("gpu")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: no GPU here: nvidia-smi lists none.")
    assert (ROOT / ".venv-gpu").exists() == there


@needs_make
def test_make_gpu_says_what_a_given_python_lacks(tmp_path: Path) -> None:
    ended = make("gpu", f"GPU_PYTHON={sys.executable} -I -S", path=path_with_card(tmp_path))
    assert ended.returncode == 2
    assert f"error: {sys.executable}: No module named 'torch' (wanted: requirements/cpu.txt" in ended.stderr


@needs_make
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_make_gpu_refuses_a_torch_without_cuda(tmp_path: Path) -> None:
    ended = make("gpu", f"GPU_PYTHON={sys.executable}", path=path_with_card(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    said, _makes_own = ended.stderr.splitlines()
    assert said.startswith(f"error: torch {torch.__version__} of {sys.executable} has no CUDA. If pip brought it")


@needs_make
def test_make_gpu_runs_what_it_was_asked_with_a_given_python(tmp_path: Path) -> None:
    """What stands in the place of the python notes what it is told, and has everything."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path / "told"}\n')
    python.chmod(0o755)
    ended = make("gpu", f"GPU_PYTHON={python}", "ARGS=--parts streams", path=path_with_card(tmp_path))
    assert ended.returncode == 0, ended.stderr
    checked, ran = (tmp_path / "told").read_text().split("-m torch_ecrec ")
    assert checked.startswith("-W ignore -c import logging, sys") and ran == "bench gpu --parts streams\n"


@needs_make
def test_the_environment_of_make_gpu_has_the_cuda_build(tmp_path: Path) -> None:
    for build, other in (("fbgemm-gpu", "fbgemm"), ("fbgemm", "fbgemm-gpu")):
        told = make("-n", f"VENV={tmp_path / 'venv'}", f"FBGEMM={build}", "TORCH=2.13", "setup")
        assert told.returncode == 0, told.stderr
        assert f"-r requirements/torch-2.13/{build}.txt" in told.stdout
        assert f"-r requirements/torch-2.13/{other}.txt" not in told.stdout
    for number in ("2.13", "2.14"):
        folder = ROOT / "requirements" / f"torch-{number}"
        (cpu,) = (line for line in (folder / "fbgemm.txt").read_text().splitlines() if not line.startswith("#"))
        assert cpu.replace("-cpu==", "==") in (folder / "fbgemm-gpu.txt").read_text().splitlines(), "the same release"
