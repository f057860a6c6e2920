"""Trainers that have not the memory for half of a table build, train, save and load it, over real servers.

What malloc keeps of freed memory counts for the limit, so it is told to keep little (docs/checkpoints.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import SUPPORT

from torch_ecrec.processes.launch import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0
TRAINERS, ROWS = 2, 2_350_000  # of 64 numbers: 600 MB


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_table_larger_than_a_trainers_memory(tmp_path: Path) -> None:
    with Supervisor(CodeSpec(3, 2, 1), logs=tmp_path / "logs") as cluster:
        environment = {**os.environ, "TORCH_ECREC_JOIN": cluster.join, "OMP_NUM_THREADS": "1"}
        environment |= {"WORLD_SIZE": str(TRAINERS), "LOCAL_WORLD_SIZE": str(TRAINERS)}
        environment |= {"TORCH_ECREC_KEEP_FREED_BYTES": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        logs = [(tmp_path / f"trainer-{rank}.log").open("wb") for rank in range(TRAINERS)]
        children = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(SUPPORT / "small_child.py"), str(rank), str(TRAINERS)]
                + [str(ROWS), str(tmp_path)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=logs[rank],
            )
            for rank in range(TRAINERS)
        ]
        try:
            codes = [child.wait(LIMIT_S) for child in children]
        finally:
            for child, log in zip(children, logs, strict=True):
                if child.poll() is None:
                    child.kill()
                    child.wait(30)
                log.close()
    assert codes == [0] * TRAINERS, [(tmp_path / f"trainer-{rank}.log").read_text()[-3000:] for rank in range(TRAINERS)]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(TRAINERS)]
    print(seen)
    assert all(each["refused"] for each in seen), "half of the table fits: the limit shows nothing"
    assert seen[0]["before"] == seen[0]["after"] != seen[0]["between"]
    assert all(each["held"] <= each["may_hold"] for each in seen), "shared memory counts, too"
