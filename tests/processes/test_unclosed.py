"""Scripts that close nothing end well; clusters of models that are gone end; what servers say goes to files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_child import job
from places import SUPPORT

from torch_ecrec.errors import JoinRefused
from torch_ecrec.processes import launch
from torch_ecrec.spec.settings import Settings

CHILD = SUPPORT / "unclosed_child.py"
LIMIT_S = 600.0


@contextlib.contextmanager
def started(how: str, folder: Path, rank: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECREC_")}
    paths = os.pathsep.join([str(SUPPORT), str(SUPPORT.parent.parent)])
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LOGS": str(folder / "logs")}
    words = [sys.executable, "-W", "ignore", str(CHILD), how, str(folder / "store"), str(rank)]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        child = subprocess.Popen(words, stdout=out, stderr=err, env=environment)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def said(folder: Path, rank: int = 0) -> dict[str, Any]:
    lines = (folder / f"{rank}.out").read_text().splitlines()
    return {key: value for line in lines for key, value in json.loads(line).items()}


def wait_for(folder: Path, rank: int, key: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while key not in said(folder, rank):
        assert time.monotonic() < deadline_s, (folder / f"{rank}.err").read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_trainer_that_evaluates_after_trainer_0_has_come_to_its_end_is_waited_for(tmp_path: Path) -> None:
    with started("evaluates", tmp_path, 0) as zero, started("evaluates", tmp_path, 1) as one:
        wait_for(tmp_path, 0, "end")
        folder = re.search(r"what its processes say: (\S+)", (tmp_path / "0.err").read_text())
        assert folder is not None and (Path(folder[1]) / "coordinator.log").exists()
        with pytest.raises(subprocess.TimeoutExpired):
            zero.wait(1.5)  # not over: trainer 1 is there
        (tmp_path / "store.over").touch()
        assert one.wait(LIMIT_S) == 0, (tmp_path / "1.err").read_text()[-3000:]
        assert zero.wait(LIMIT_S) == 0, (tmp_path / "0.err").read_text()[-3000:]
    assert said(tmp_path, 1)["looks"] >= 20
    for rank in range(2):
        err = (tmp_path / f"{rank}.err").read_text()
        assert '"event"' not in err and "joined" not in err and "Traceback" not in err, err
    assert not Path(folder[1]).exists()


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_cluster_of_a_model_that_is_gone_ends(tmp_path: Path) -> None:
    with started("dropped", tmp_path) as child:
        assert child.wait(LIMIT_S) == 0, (tmp_path / "0.err").read_text()[-3000:]
    found = said(tmp_path)
    assert found["ended"] >= 4 and found["again"] >= 4 and "end" in found
    assert not list(tmp_path.glob("torch-ecrec-*")), "logs are left"


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_second_model_on_a_named_cluster_is_refused_for_what_it_is(tmp_path: Path) -> None:
    with started("named", tmp_path) as child:
        assert child.wait(LIMIT_S) == 0, (tmp_path / "0.err").read_text()[-3000:]
    assert "this process has a model in the cluster at 127.0.0.1" in said(tmp_path)["refused"]
    closed = said(tmp_path)["closed"]
    assert len(closed) == 3 and all("this session is closed" in told for told in closed), closed


def test_a_cluster_that_this_process_is_in_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_joined", {"127.0.0.1:9"})
    with pytest.raises(
        JoinRefused, match=r"has a model in the cluster at 127\.0\.0\.1:9 already, and a cluster serves"
    ):
        launch.connect(job(1), Settings(join="127.0.0.1:9"))


class _Builds:
    """A session of a trainer whose script ends once the model is built; the cluster begins after some looks."""

    def __init__(self, looks: int) -> None:
        self.client = types.SimpleNamespace(settings=types.SimpleNamespace(give_up_s=LIMIT_S))
        self.looks, self.over, self.closed_after = looks, True, 99

    @property
    def begun(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def close(self) -> None:
        self.closed_after = self.looks


def test_a_trainer_that_only_builds_the_model_stays_until_the_cluster_has_begun() -> None:
    """It is one of those without whom the others would wait for ever."""
    session: Any = _Builds(looks=3)
    launch.abandon(session)
    assert session.closed_after == -1


@pytest.mark.timeout(60)
def test_scrubbing_servers_do_not_keep_a_trainer_that_nobody_needs() -> None:
    """It waited for one that waited for it, as its loop was shorter, for as long as servers scrubbed."""
    looks = 0

    def status() -> Any:
        nonlocal looks
        looks += 1
        report = types.SimpleNamespace(bytes_sent={"lookup": 3, "scrubbing": looks})
        one = types.SimpleNamespace(name="trainer-1", report=report)
        return types.SimpleNamespace(trainers=[one], members=[one])

    cluster: Any = types.SimpleNamespace(status=status)
    launch._wait_for_trainers(cluster, 0.5)
    assert looks > 1
