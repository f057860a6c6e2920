"""`torch_ecrec.TensorBoard` in a script: what TensorBoard itself reads of the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from places import SUPPORT

LIMIT_S = 600.0  # only a hang reaches it


def test_a_script_shows_its_cluster_by_one_line(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = [sys.executable, "-P", str(SUPPORT / "board_child.py"), str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ECREC_HEARTBEAT_S": "0.2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    shown = accumulators.EventAccumulator(str(tmp_path / "runs"))
    shown.Reload()
    tags = shown.Tags()
    assert {"torch_ecrec/steps_per_s", "torch_ecrec/losses_tolerated", "torch_ecrec/slots/healthy"} <= set(
        tags["scalars"]
    )
    steps = [one.step for one in shown.Scalars("torch_ecrec/slots/healthy")]
    assert steps == sorted(steps) and len(set(steps)) > 3 and steps[-1] == 60
    assert shown.Scalars("torch_ecrec/slots/healthy")[-1].value == 1.0
    assert shown.Scalars("torch_ecrec/losses_tolerated")[-1].value == 1.0
    assert any(one.value > 0 for one in shown.Scalars("torch_ecrec/sent_bytes_per_s/push"))
    assert "torch_ecrec/events/text_summary" in tags["tensors"]
