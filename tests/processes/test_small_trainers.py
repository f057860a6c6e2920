"""Trainers that have not the memory for half of a table build, train, save and load it, over real servers.

And servers that begin with a checkpoint need no more memory for it than for training.

What malloc keeps of freed memory counts for the limit, so it is told to keep little (docs/checkpoints.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

from torch_ecrec.processes.launch import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0
TRAINERS, ROWS = 2, 2_350_000  # of 64 numbers: 600 MB
BEGIN_ROWS = ROWS  # of the table that a cluster begins with; 39_062_500 are 10 GB, and 15 GB with parity
SCALE = max(1.0, BEGIN_ROWS / ROWS)
POLL_S = 0.1
LOG_MOST_BYTES = 64 << 20  # of a slot, whatever the rows: some portions of each trainer, its own records' and others'


def run(what: str, folder: Path, rows: int) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """A new cluster with such trainers: what each saw; and steps of slots and bytes of their logs, often."""
    with Supervisor(CodeSpec(3, 2, 1), logs=folder / f"{what}-logs") as cluster:
        environment = {**os.environ, "TORCH_ECREC_JOIN": cluster.join, "OMP_NUM_THREADS": "1"}
        environment |= {"WORLD_SIZE": str(TRAINERS), "LOCAL_WORLD_SIZE": str(TRAINERS)}
        environment |= {"TORCH_ECREC_KEEP_FREED_BYTES": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        logs = [folder / f"{what}-{rank}.log" for rank in range(TRAINERS)]
        children = []
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", str(SUPPORT / "small_child.py"), str(rank), str(TRAINERS)]
                        + [str(rows), str(folder), what],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=out,
                        stderr=out,
                    )
                )
        try:
            reported = poll(cluster, children, LIMIT_S * rows / ROWS)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait(30)
    codes = [child.returncode for child in children]
    assert codes == [0] * TRAINERS, [log.read_text()[-3000:] for log in logs]
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(TRAINERS)], reported


def poll(cluster: Supervisor, children: list[subprocess.Popen[bytes]], limit_s: float) -> list[tuple[int, int]]:
    """Until all have ended: step and bytes of logs that slots report."""
    found, until_s = [], time.monotonic() + limit_s
    while any(child.poll() is None for child in children):
        assert time.monotonic() < until_s, "no end within the limit"
        slots = [slot for member in cluster.status().members for slot in member.report.slots or ()]
        found += [(slot.step, slot.log_bytes) for slot in slots]
        time.sleep(POLL_S)
    return found


def check_limits(seen: list[dict[str, Any]]) -> None:
    assert all(each["refused"] for each in seen), "half of the table fits: the limit shows nothing"
    assert all(each["held"] <= each["may_hold"] for each in seen), "shared memory counts, too"


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_table_larger_than_a_trainers_memory(tmp_path: Path) -> None:
    seen, reported = run("train", tmp_path, ROWS)
    print(seen, f"logs of {max(log_bytes for _, log_bytes in reported) / 1e6:.1f} MB at most: loads in training")
    check_limits(seen)
    assert seen[0]["before"] == seen[0]["after"] != seen[0]["between"]


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S * SCALE)
def test_servers_that_begin_with_a_checkpoint_need_no_more_memory_for_it(tmp_path: Path) -> None:
    saved, _ = run("save", tmp_path, BEGIN_ROWS)
    begun, reported = run("begin", tmp_path, BEGIN_ROWS)
    print(saved, begun)
    check_limits([*saved, *begun])
    assert begun[0]["after"] == saved[0]["before"]
    steps = sorted({step for step, _ in reported})  # nobody trains in it: each is one that loads
    most = max(log_bytes for _, log_bytes in reported)
    print(f"logs of {most / 1e6:.1f} MB at most, seen at {len(steps)} steps of {steps[-1]}")
    assert len([step for step in steps if 0 < step < steps[-1]]) >= 3, "nobody looked while it was loaded"
    assert most <= LOG_MOST_BYTES
