"""Benchmarks as tests run them: their command lines, what they refuse, and that they leave no process."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import MARK, leftover, wait_for_none

from torch_ecrec.bench.experiment import Steps

END_LIMIT_S = 300.0


def parse(benchmark: ModuleType, *words: object) -> argparse.Namespace:
    """What the command line of a benchmark says."""
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def run(benchmark: ModuleType, out: Path, *words: object) -> int:
    """Runs a benchmark; its exit code. Nothing that it has started may be left."""
    code: int = benchmark.run(parse(benchmark, *words, "--out", out))
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"
    return code


def result(out: Path, name: str) -> dict[str, Any]:
    """The JSON that a benchmark has left, beside a CSV with the same rows and, if there is one, a picture."""
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    with open(out / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(row) for row in found["rows"]]
    picture = out / f"{name}.png"
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    return found


def refuses(benchmark: ModuleType, words: list[str], says: str, folder: Path) -> None:
    """A command line is refused with these words, and nothing is started or written."""
    out = folder / "out"
    with pytest.raises(ValueError, match=re.escape(says)):
        benchmark.run(parse(benchmark, *words, "--out", out))
    assert not out.exists()


def steps_of(*trainers: list[tuple[float, float]]) -> Steps:
    """Steps of each trainer, when each of them began and ended."""
    steps = Steps(len(trainers))
    for trainer, times in enumerate(trainers):
        for begin_s, end_s in times:
            steps.add(trainer, begin_s, end_s)
    return steps
