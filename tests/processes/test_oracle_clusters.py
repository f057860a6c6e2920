"""TorchRec's own tests again, each model in a cluster of processes that `torch-ecrec up` starts and trainers join."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from places import ROOT

LIMIT_S = 1400.0  # only a hang reaches it
# The tests, which of them, and how many there are.
WHICH = {
    "test_oracle_model_parallel.py": ("", 17),
    "test_oracle_pipelines.py": ("", 5),
    "test_oracle_sequences.py": ("row_wise and (plain or FP16)", 8),
    "test_oracle_shardings.py": ("column_wise and True and SUM", 8),
}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", WHICH)
def test_they_pass_over_clusters_of_their_own(name: str) -> None:
    which, count = WHICH[name]
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", f"tests/processes/{name}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_ECREC_")}
    environment |= {"TORCH_ECREC_ORACLE": "up", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_ECREC_ORACLE_EXAMPLES"] = "1"  # of arguments that are drawn, each with clusters of its own
    done = subprocess.run(
        [*words, "-k", which, f"--timeout={LIMIT_S:g}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) == count, done.stdout[-1000:]
