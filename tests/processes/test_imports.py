"""From TorchRec to a cluster and back, with real processes: what TorchRec has saved is imported, and a cluster of
another size begins with it. The oracle: the same script in another cluster, which loads the folder for itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from torch_ecrec.cli.main import main
from torch_ecrec.nn.dcp_import import Folder
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 400
ENVIRONMENT = {"TORCH_ECREC_LEASE_S": "240", "TORCH_ECREC_GIVE_UP_S": "240", "OMP_NUM_THREADS": "1"}


def run(place: Path, join: str, *words: str) -> None:
    """The example, by two trainers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "checkpoints.py"), "--epochs", "1", *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    joins = {"TORCH_ECREC_JOIN": join} if join else {}
    done = subprocess.run(
        command,
        cwd=place,
        env={**os.environ, **ENVIRONMENT, **joins, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def saved(folder: Path) -> dict[str, torch.Tensor]:
    found = Folder(folder)
    return {name: found.whole(name) for name in found.tensors}


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_cluster_of_another_size_trains_on_from_what_torchrec_has_saved(tmp_path: Path) -> None:
    run(tmp_path, "", "--folder", "theirs", "--backend", "torchrec", "--describe", "job.json")
    shutil.copytree(tmp_path / "theirs", tmp_path / "loaded")
    words = ["--import", str(tmp_path / "theirs"), "--job", str(tmp_path / "job.json")]
    store = str(tmp_path / "store")
    assert main(["checkpoints", store, *words]) == 0
    with Supervisor(CodeSpec(3, 2, 1), environment=ENVIRONMENT) as cluster:
        run(tmp_path, cluster.join, "--folder", "loaded", "--load")
    with Supervisor(CodeSpec(5, 3, 2), environment=ENVIRONMENT, coordinator=["--restore", store]) as cluster:
        run(tmp_path, cluster.join, "--folder", "imported")
    before, wanted, found = (saved(tmp_path / name) for name in ("theirs", "loaded", "imported"))
    assert before.keys() == wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(found[name], before[name]) for name in wanted)
