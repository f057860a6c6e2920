"""A limit on the CPU time of processes, by a control group."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from torch_ecrec.testing import cpu_quota
from torch_ecrec.testing.cpu_quota import CpuQuota

WAIT_S = 300.0
needs_a_group = pytest.mark.skipif(bool(cpu_quota.unavailable()), reason=cpu_quota.unavailable())


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait(WAIT_S)


def group_of(pid: int) -> str:
    """The control group of a process that limits its CPU time."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    one = [path for _, controllers, path in lines if "cpu" in controllers.split(",")]
    return one[0] if one else next(path for _, controllers, path in lines if not controllers)


@needs_a_group
def test_processes_wait_for_their_quota_and_are_freed(spinning: subprocess.Popen[bytes]) -> None:
    before = group_of(spinning.pid)
    with CpuQuota(0.1) as quota:
        assert quota.times_met() == 0
        quota.take([spinning.pid, 2**22 + 1])  # one that is not there is passed over
        assert "torch-ecrec-" in group_of(spinning.pid)
        wait_until(lambda: quota.times_met() > 3, WAIT_S, "it waits for its quota")
        path = quota._path
    assert group_of(spinning.pid) == before and not path.exists()
    assert spinning.poll() is None
    quota.close()  # again


def test_why_it_cannot_be_done_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quota, "V1", tmp_path / "v1")
    monkeypatch.setattr(cpu_quota, "V2", tmp_path / "v2")
    assert cpu_quota.unavailable() == "there is no control group for CPU time (/sys/fs/cgroup)"
    with pytest.raises(RuntimeError, match="there is no control group"):
        CpuQuota(0.5)
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "cgroup.subtree_control").write_text("memory pids\n")
    assert cpu_quota.unavailable().startswith("there is no control group")


def test_version_two_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quota, "V1", tmp_path / "v1")
    monkeypatch.setattr(cpu_quota, "V2", tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpuset cpu memory\n")
    quota = CpuQuota(0.5)
    assert (quota._path / "cpu.max").read_text() == "10000 20000"
