"""`torch-ecrec run`: torchrun as its child, how both end, and when trainers are not started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, wait_until

from torch_ecrec.errors import ClusterError, DataLoss, JoinRefused
from torch_ecrec.processes import children

LIMIT_S = 240.0
RAISES = """
import sys
from torch_ecrec.errors import DataLoss, JoinRefused
from torch_ecrec.processes.launch import _exit_with_reason
open(sys.argv[1], "a").write("started\\n")
_exit_with_reason()
raise {}("this is why")
"""
WAITS = """
import os, sys, time
with open(sys.argv[1] + ".part", "w") as out:
    out.write(str(os.getpid()))
os.replace(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
ENDS = "import os, sys; open(sys.argv[1], 'w').write(os.environ['TORCHELASTIC_RUN_ID']); sys.exit(0)"
MEETS = "import os, sys; open(sys.argv[1], 'w').write(os.environ['MASTER_ADDR'])"


@contextmanager
def running(folder: Path, script: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`torch-ecrec run` of a script, which gets the name of a file."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch_ecrec", "run", *words, "--", str(folder / "script.py"), str(folder / "out")]
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    tree = [psutil.Process(process.pid)]
    try:
        yield process
    finally:
        if process.poll() is None:
            tree += tree[0].children(recursive=True)
        for one in tree:
            if one.is_running():
                one.kill()
        process.wait(LIMIT_S)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("kind", [DataLoss, JoinRefused])
def test_after_data_loss_or_a_refusal_trainers_are_not_started_again(kind: type[ClusterError], tmp_path: Path) -> None:
    with running(tmp_path, RAISES.format(kind.__name__), "--max-restarts", "5") as process:
        assert process.wait(LIMIT_S) == kind.exit_code, (tmp_path / "log").read_text()
    assert (tmp_path / "out").read_text() == "started\n"
    assert "trainers are not started again: this is why" in (tmp_path / "log").read_text()
    assert not list(tmp_path.glob("torch-ecrec-run-*"))


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_end_of_it_is_the_end_of_the_trainers(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, WAITS) as process:
        wait_until((tmp_path / "out").exists, LIMIT_S, "the trainer has started")
        trainer = psutil.Process(int((tmp_path / "out").read_text()))
        torchrun = trainer.parent()
        assert torchrun is not None and torchrun.ppid() == process.pid
        process.send_signal(number)
        assert process.wait(LIMIT_S) != 0
        gone, alive = psutil.wait_procs([trainer, torchrun], LIMIT_S)
        assert not alive and len(gone) == 2


@pytest.mark.smoke
@pytest.mark.timeout(2 * LIMIT_S)
def test_it_returns_what_torchrun_does_and_each_run_is_a_launch_of_its_own(tmp_path: Path) -> None:
    launches = set()
    for _ in range(2):
        with running(tmp_path, ENDS) as process:
            assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
        launches.add((tmp_path / "out").read_text())
    assert len(launches) == 2 and "none" not in launches


@pytest.mark.timeout(2 * LIMIT_S)
def test_trainers_of_one_host_do_not_need_its_name(tmp_path: Path) -> None:
    """A container's name need not resolve; torchrun tells it to trainers to meet at, unless it is told otherwise."""
    with running(tmp_path, MEETS) as process:
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "out").read_text() == "127.0.0.1"
    (tmp_path / "script.py").write_text(MEETS)
    with children.torchrun([str(tmp_path / "script.py"), str(tmp_path / "ours")], tmp_path / "log", {}) as job:
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "ours").read_text() == "127.0.0.1"


LEAVES = """
import os, signal, subprocess, sys
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1] + (".killed" if first else ".ended"), "w") as out:
    out.write(str(left.pid))
if first:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_what_trainers_have_started_ends_with_torchrun(tmp_path: Path) -> None:
    """Programs of a trainer that is killed, and of one that comes to its end: they are nobody's children then."""
    (tmp_path / "script.py").write_text(LEAVES)
    words = ["--max-restarts", "1", str(tmp_path / "script.py"), str(tmp_path / "out")]
    with children.torchrun(words, tmp_path / "log", {}) as job:
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    left = [int((tmp_path / f"out.{how}").read_text()) for how in ("killed", "ended")]
    alive = [pid for pid in left if psutil.pid_exists(pid)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


OWNS = """
import sys, time
from pathlib import Path
from torch_ecrec.processes.children import torchrun
with torchrun([sys.argv[1], sys.argv[2]], Path(sys.argv[2] + ".log"), {}):
    time.sleep(600)
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_trainers_end_with_who_has_started_torchrun_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    out = tmp_path / "out"
    owner = subprocess.Popen([sys.executable, "-c", OWNS, str(tmp_path / "script.py"), str(out)])
    try:
        wait_until(out.exists, LIMIT_S, "the trainer has started")
        below = psutil.Process(owner.pid).children(recursive=True)
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(below, 30.0)
    for one in alive:
        one.kill()
    assert len(below) >= 2 and not alive
