"""From TorchRec to a cluster and back, with real processes: what TorchRec has saved is imported, and a cluster of
another size begins with it. The oracle: the same script in another cluster, which loads the folder for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, wait_until

from torch_ecrec.checkpoint.dcp_import import Folder
from torch_ecrec.cli.main import main
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.storage.catalog import Catalog

LIMIT_S = 400
ENVIRONMENT = {"TORCH_ECREC_LEASE_S": "240", "TORCH_ECREC_GIVE_UP_S": "240", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TORCH_ECREC_HEARTBEAT_S": "0.2"}  # how often a test hears where training is


def run(place: Path, join: str, *words: str, epochs: int = 1, again: int = 0) -> None:
    """The example, by two trainers. `again`: so often they are started anew."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(again), "--monitor-interval", "0.1"]
    command += [str(ROOT / "examples" / "checkpoints.py"), "--epochs", str(epochs), *words]
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


def everything(cluster: Supervisor, trainers: list[int]) -> None:
    """Killed at once; torchrun's agent is none of the cluster's, and starts trainers again."""
    for pid in [*(child.pid for child in cluster.children), *trainers]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def trainers_at(cluster: Supervisor, step: int) -> list[int]:
    """Pids of both trainers, once a slot has applied that step; else none. Nobody answers while all is killed."""
    try:
        status = cluster.status()
    except (OSError, ClusterError):
        return []
    alive = [one.pid for one in status.members if one.role == "trainer" and one.alive and not one.left]
    applied = [slot.step for one in status.members for slot in one.report.slots or ()]
    return alive if len(alive) == 2 and max(applied, default=0) >= step else []


def went_back(logs: Path) -> list[str]:
    """The checkpoints that all went back to, as coordinators have said."""
    said = (logs / "coordinator.log").read_text(errors="replace")
    return re.findall(r'"event": "went_beyond", "name": "([^"]+)"', said)


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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_everything_is_killed_at_once_in_a_run_that_began_with_an_import(tmp_path: Path) -> None:
    """Before it has a checkpoint of its own, and after: it goes on to the bits of a run that nobody disturbed."""
    epochs, every = 40, 400  # of 25 steps
    run(tmp_path, "", "--folder", "theirs", "--backend", "torchrec", "--describe", "job.json")
    store = str(tmp_path / "store")
    words = ["--import", str(tmp_path / "theirs"), "--job", str(tmp_path / "job.json")]
    assert main(["checkpoints", store, *words]) == 0
    imported = Catalog(store).newest().id
    shutil.copytree(store, tmp_path / "own")
    restore = ["--restore", store]
    with Supervisor(CodeSpec(3, 2, 1), environment=ENVIRONMENT, coordinator=restore) as cluster:
        run(tmp_path, cluster.join, "--folder", "wanted", epochs=epochs)
    restore = ["--restore", str(tmp_path / "own"), "--checkpoint", str(tmp_path / "own")]
    restore += ["--checkpoint-every", str(every), "--beyond", "checkpoint"]
    logs, found = tmp_path / "logs", Catalog(str(tmp_path / "own"))
    with (
        Supervisor(CodeSpec(3, 2, 1), logs=logs, environment=ENVIRONMENT, coordinator=restore) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        training = pool.submit(run, tmp_path, cluster.join, "--folder", "found", epochs=epochs, again=4)
        try:
            for kill in (1, 2):
                pids: list[int] = []

                def ready(kill: int = kill, pids: list[int] = pids) -> bool:
                    assert not training.done(), training.exception() or "training was over"
                    own = len(found.checkpoints()) > 1
                    pids[:] = (
                        trainers_at(cluster, 20) if own == (kill == 2) and len(went_back(logs)) == kill - 1 else []
                    )
                    return bool(pids)

                wait_until(ready, LIMIT_S, f"the moment of kill {kill}")
                everything(cluster, pids)
                wait_until(lambda kill=kill: len(went_back(logs)) == kill, LIMIT_S, "another coordinator, with members")
        finally:
            training.result(LIMIT_S)
    first, second = went_back(logs)
    assert first == imported and second != imported and int(second[:12]) % every == 0
    wanted, got = saved(tmp_path / "wanted"), saved(tmp_path / "found")
    assert wanted.keys() == got.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
