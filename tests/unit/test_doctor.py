"""What `torch-ecrec doctor` makes of what it reads: limits, control groups, packages that were tried; how checks are
run; and what strangers and friends may do at the listener of a link. The faults themselves are made in
tests/processes/test_doctor_faults.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, wait_until

from torch_ecrec.cli.main import main
from torch_ecrec.doctor import examination, link, machine, software, store
from torch_ecrec.doctor.examination import CHECKS, Asked, Check, examine, named
from torch_ecrec.doctor.findings import (
    WIDTH,
    Finding,
    diagnosis_of,
    format_diagnosis,
    json_of,
    of_json,
    verdict,
)
from torch_ecrec.doctor.software import SETS, Trial
from torch_ecrec.observe.words import size
from torch_ecrec.processes import limits
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.secret import CALLER, NONCE_BYTES, PROOF_BYTES, proof

LIMIT_S = 60.0  # for anything at all: only a hang reaches it
SECRET = "a secret of this test 0123"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCH_ECREC_")]:
        monkeypatch.delenv(name)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_a_diagnosis_is_as_bad_as_its_worst_finding() -> None:
    well, odd, bad = (
        Finding("a", "OK", "x"),
        Finding("b", "WARN", "y", "z", "do b"),
        Finding("c", "ERROR", "y", "z", "do c"),
    )
    for findings, level, first in (
        ([], "OK", "OK: torch-ecrec runs here"),
        ([well], "OK", "OK: torch-ecrec runs here"),
        ([odd, well], "WARN", "WARN: torch-ecrec runs here; to be looked at: b"),
        ([bad, bad, well], "ERROR", "ERROR: torch-ecrec cannot run so; to be mended: c"),
        ([odd, bad], "ERROR", "ERROR: torch-ecrec cannot run so; to be mended: c; also look at: b"),
    ):
        one = diagnosis_of(findings, 1.0)
        assert one.level == level and verdict(one) == first == format_diagnosis(one).splitlines()[0]
        assert of_json(json.loads(json.dumps(json_of(one)))) == one
        assert json_of(one)["type"] == "diagnosis" and json_of(one)["version"]
    assert "do b" in format_diagnosis(diagnosis_of([odd], 1.0))
    with pytest.raises(ValueError, match="level"):
        of_json({**json_of(diagnosis_of([], 0.0)), "level": "GOOD"})


def test_long_findings_are_wrapped_and_commands_are_whole() -> None:
    command = f"python -m pip install {'x' * 130}"
    text = format_diagnosis(diagnosis_of([Finding("a", "WARN", "word " * 60, "z", f"run {command}")], 0.0))
    assert "x" * 130 in text
    assert all(len(line) <= WIDTH for line in text.splitlines() if "xxx" not in line and "torch-ecrec 0" not in line)
    assert (size(64 << 20), size(1023), size(3 << 40)) == ("64.0 MiB", "1023 B", "3.0 TiB")


# --- how checks are run ----------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_fails_is_a_finding_and_no_end_of_the_others() -> None:
    over = threading.Event()

    def hang(_: Asked) -> list[Finding]:
        assert over.wait(LIMIT_S)
        return [Finding("hangs", "OK", "too late")]

    def fail(_: Asked) -> list[Finding]:
        raise KeyError("who")

    terminal = io.StringIO()
    checks = [
        Check("hangs", hang, 0.3),
        Check("fails", fail),
        Check("well", lambda _: [Finding("well", "OK", "x")]),
        Check("none", lambda _: []),
        Check("last", lambda _: [Finding("last", "OK", "y")], alone=True),
    ]
    found = examine(Asked(), checks, terminal)
    over.set()
    assert [(one.check, one.level) for one in found] == [
        ("hangs", "ERROR"),
        ("fails", "ERROR"),
        ("well", "OK"),
        ("last", "OK"),
    ]
    assert "this check hangs: it has not ended within 0.3 s" in found[0].found and found[0].remedy
    assert "this check itself failed: KeyError: 'who'" in found[1].found
    shown = terminal.getvalue()
    assert "checks: hangs" in shown and "checks: last ..." in shown and shown.endswith(examination.CLEAR)


def test_what_measures_runs_alone() -> None:
    runs: set[str] = set()
    beside: list[tuple[str, set[str]]] = []

    def check(name: str, alone: bool) -> Check:
        def run(_: Asked) -> list[Finding]:
            runs.add(name)
            time.sleep(0.05)
            beside.append((name, set(runs)))
            runs.remove(name)
            return []

        return Check(name, run, alone=alone)

    examine(Asked(), [check("a", True), check("b", False), check("c", True), check("d", False)])
    assert sorted(name for name, _ in beside) == ["a", "b", "c", "d"], "each once"
    assert dict(beside)["a"] == {"a"} and dict(beside)["c"] == {"c"}
    assert [name for name, _ in beside][2:] == ["a", "c"], "those that measure come last"


def test_checks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.name for one in named("link, cores")] == ["cores", "link"] and tuple(named("")) == CHECKS
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    assert {one.name for one in CHECKS if one.alone} == {"coordinator", "link"}
    assert main(["doctor", "--only", "cors"]) == 2
    assert "there is no check 'cors'; there are: python, packages" in capsys.readouterr().err
    for words in (["--members", "0"], ["--here", "x"], ["--listen", "--to", "a"]):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *words])
        assert ended.value.code == 2


# --- packages --------------------------------------------------------------------------------------------------------


def test_the_tested_sets_are_those_of_the_requirements() -> None:
    def pinned(path: Path) -> str:
        return next(line.partition("==")[2] for line in path.read_text().splitlines() if re.match(r"[a-z-]+==", line))

    folders = sorted((ROOT / "requirements").glob("torch-*"))
    found = [tuple(pinned(folder / f"{name}.txt") for name in ("torch", "fbgemm", "torchrec")) for folder in folders]
    assert found == [(one.torch, one.fbgemm, one.torchrec) for one in SETS]
    setup = (ROOT / "setup.py").read_text()
    needed = setup[setup.index("install_requires=[") : setup.index("extras_require=")]
    assert set(re.findall(r'"([^"]+)",', needed)) - {"torch>=2.13.0,<2.15"} == set(software.OTHERS.values())
    assert 'python_requires=">=3.11"' in setup and software.PYTHON_LEAST == (3, 11)


@pytest.mark.parametrize(
    ("version", "level"), [((3, 10, 2), "ERROR"), ((3, 11, 0), "OK"), ((3, 13, 9), "OK"), ((3, 14, 0), "WARN")]
)
def test_releases_of_python(version: tuple[int, ...], level: str) -> None:
    one = software.python(version)
    assert one.level == level and ".".join(map(str, version)) in one.found
    assert bool(one.remedy) is (level != "OK")


def test_the_set_that_is_nearest() -> None:
    for torch, python, set_ in (
        ("2.13.0+cu126", (3, 11), SETS[0]),
        ("2.14.0", (3, 11), SETS[1]),
        ("2.13.1", (3, 13), SETS[0]),
        ("", (3, 12), SETS[0]),
        ("", (3, 13), SETS[1]),
        ("2.1.0", (3, 11), SETS[0]),
    ):
        assert software.set_for({"torch": torch} if torch else {}, python) == set_


def test_a_package_that_hangs_as_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    tried = software.try_out(["packages"], 3.0)
    assert tried.code is None and tried.died_at == "torch"
    (one,) = software.judge_packages(tried, (3, 11))
    assert one.level == "ERROR" and "torch" in one.found and "does not load: has not ended within" in one.found


def test_a_process_that_says_nothing() -> None:
    (one,) = software.judge_packages(Trial([], -9, "x"), (3, 11))
    assert one.level == "ERROR" and "crashed: Killed (SIGKILL)" in one.found and one.remedy
    assert "exit code 3: Boom" in software.judge_kernels(Trial([{"loads": "kernels"}], 3, "Boom")).found


@pytest.mark.parametrize(
    "why", ["ImportError: libtorch_cpu.so: failed to map segment from shared object", "MemoryError: "]
)
def test_a_package_that_has_no_room_is_not_installed_anew(why: str) -> None:
    said = [
        {"versions": {"torch": "2.13.0"}, "lacking": []},
        {"loads": "torch", "at": "x"},
        {"failed": "torch", "why": why},
    ]
    (one,) = software.judge_packages(Trial(said, 0, ""), (3, 11))
    assert one.level == "ERROR" and "ulimit -v" in one.remedy and "pip" not in one.remedy


# --- limits ----------------------------------------------------------------------------------------------------------

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "members", "level", "do"),
    [
        (NONE, NONE, 8, "OK", ""),
        (1024, 1024, 8, "OK", ""),
        (416, 416, 8, "OK", ""),
        (415, 4096, 8, "WARN", "ulimit -n 416"),
        (1024, 1024, 1000, "ERROR", "LimitNOFILE=4384"),
        (1024, NONE, 200, "WARN", "ulimit -n 1184"),
        (90, 90, 8, "ERROR", "--ulimit nofile=416:416"),
    ],
)
def test_open_files(soft: int, hard: int, members: int, level: str, do: str) -> None:
    one = machine.judge_open_files(soft, hard, members)
    assert one.level == level and do in one.remedy


def test_processes() -> None:
    assert machine.judge_processes([], 8, 4).level == "OK"
    assert machine.judge_processes([(1000, 100, "ulimit -u")], 8, 4).level == "OK"
    one = machine.judge_processes([(4096, 100, "ulimit -u"), (300, 100, "pids.max of its control group")], 8, 4)
    assert one.level == "WARN" and "pids.max of its control group is 300" in one.found
    assert "docker run --pids-limit 356" in one.remedy
    one = machine.judge_processes([(200, 100, "ulimit -u")], 8, 4)
    assert one.level == "ERROR" and "ulimit -u 356" in one.remedy


@pytest.mark.parametrize(
    ("soft", "level"), [(NONE, None), (8 << 30, None), (4 << 30, "WARN"), (1_200_000 << 10, "ERROR")]
)
def test_addresses(soft: int, level: str | None) -> None:
    found = machine.judge_addresses(soft, Settings())
    assert [one.level for one in found] == ([level] if level else [])
    assert all("ulimit -v" in one.found and "ulimit -v unlimited" in one.remedy for one in found)


def test_threads_of_a_user(tmp_path: Path) -> None:
    for pid, (user, threads) in {"1": (0, 5), "20": (1000, 7), "21": (1000, 2)}.items():
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "status").write_text(f"Name:\tx:y\nUid:\t{user}\t{user}\nThreads:\t{threads}\n")
    (tmp_path / "proc" / "22").mkdir()
    assert machine._threads_of_user(1000, tmp_path) == 9
    assert machine._threads_of_user(os.geteuid(), Path("/")) >= 1


def files(root: Path, **found: str) -> Path:
    """Files below a root; `__` in a name stands for a `/`."""
    for name, text in found.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    """The least limit counts, be it of the own group or of one above."""
    group = tmp_path / "sys/fs/cgroup/a.slice/b.scope"
    files(tmp_path, proc__self__cgroup="0::/a.slice/b.scope\n", proc__meminfo=f"MemAvailable: {64 << 20} kB\n")
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    (group / "pids.max").write_text("700\n")
    (group / "pids.current").write_text("7\n")
    above = group.parent
    (above / "memory.max").write_text(f"{3 * GIB}\n")
    (above / "memory.current").write_text(f"{2 * GIB}\n")
    (above / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (above / "cpu.max").write_text("150000 100000\n")
    assert limits.memory_limits(tmp_path) == [(3 * GIB, GIB)]
    assert limits.pids_limits(tmp_path) == [(700, 7)]
    assert limits.cpu_quota(tmp_path) == 1.5
    one = machine.memory(Settings(), 8, tmp_path)
    assert one.level == "WARN" and "2.0 GiB left of its control group's limit, 3.0 GiB" in one.found
    assert "--here" in one.remedy and machine.memory(Settings(), 4, tmp_path).level == "OK"
    (above / "memory.current").write_text(f"{3 * GIB + GIB // 2}\n")
    assert machine.memory(Settings(), 2, tmp_path).level == "ERROR"


def test_control_groups_of_version_1_in_a_container(tmp_path: Path) -> None:
    """The path that the kernel tells is one of the host, and what is mounted is the container's own group."""
    files(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/abc\n3:pids:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
        proc__meminfo=f"MemTotal: {8 << 20} kB\nMemAvailable: {8 << 20} kB\nHugePages_Total: 0\n",
    )
    top = tmp_path / "sys/fs/cgroup"
    for name in ("memory", "pids", "cpu"):
        (top / name).mkdir(parents=True)
    (top / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (top / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (top / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert limits.memory_limits(tmp_path) == [] and limits.cpu_quota(tmp_path) is None
    assert limits.pids_limits(tmp_path) == []
    (top / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (top / "memory" / "memory.usage_in_bytes").write_text(f"{GIB // 4}\n")
    (top / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (top / "pids" / "pids.max").write_text("max\n")
    assert limits.memory_limits(tmp_path) == [(GIB, GIB // 4)] and limits.cpu_quota(tmp_path) == 0.5
    assert limits.pids_limits(tmp_path) == []


def test_memory_of_nobody_knows(tmp_path: Path) -> None:
    one = machine.memory(Settings(), 1, tmp_path)
    assert one.level == "WARN" and one.remedy and limits.cpu_quota(tmp_path) is None
    assert machine.memory(Settings(), 1, Path("/")).figures["left_bytes"] > 0


@pytest.mark.parametrize(
    ("there", "allowed", "quota", "level", "do"),
    [
        (8, 8, None, "OK", ""),
        (8, 4, 4.0, "OK", ""),
        (8, 8, 2.5, "WARN", "export OMP_NUM_THREADS=2"),
        (8, 8, 0.5, "WARN", "export OMP_NUM_THREADS=1"),
        (8, 1, None, "WARN", "taskset -c"),
    ],
)
def test_cores(there: int, allowed: int, quota: float | None, level: str, do: str) -> None:
    one = machine.judge_cores(there, allowed, quota, 8)
    assert one.level == level and do in one.remedy


def test_dev_shm() -> None:
    assert machine.judge_dev_shm((GIB, GIB), "2.0 GiB").level == "OK"
    assert "--shm-size" in machine.judge_dev_shm((64 << 20, 64 << 20), "none").remedy
    assert "remove what is left" in machine.judge_dev_shm((8 * GIB, 1 << 20), "none").remedy
    one = machine.judge_dev_shm("No such file or directory", "none")
    assert one.level == "WARN" and "mount -t tmpfs tmpfs /dev/shm" in one.remedy


def test_memory_that_cannot_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a seccomp profile that does not know memfd_create."""

    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    assert all("memfd" not in one.found for one in machine.shared_memory(Settings()))
    monkeypatch.setattr(os, "memfd_create", refuse)
    one = machine.shared_memory(Settings())[0]
    assert one.level == "WARN" and "memfd_create: Function not implemented" in one.found and "seccomp" in one.remedy
    assert "memfd" not in machine.shared_memory(Settings(shared_memory_bytes=0))[0].found


def test_names_of_this_host() -> None:
    own = ["127.0.0.1", "10.0.0.7"]
    assert machine.judge_host_name("a", ["10.0.0.7"], own, "").level == "OK"
    assert machine.judge_host_name("a", ["10.0.0.7", "127.0.0.1"], own, "").level == "OK"
    for found, why, says in (
        (["127.0.1.1"], "", "a is 127.0.1.1, here alone; this host has 10.0.0.7"),
        (["::1", "127.0.0.1"], "", "here alone"),
        (["10.0.0.9"], "", "a is 10.0.0.9, another host's"),
        ([], "Name or service not known", "a does not resolve (Name or service not known)"),
    ):
        one = machine.judge_host_name("a", found, own, why)
        assert one.level == "WARN" and says in one.found and "torch-ecrec up --host 10.0.0.7" in one.remedy
    assert "no address but loopback ones" in machine.judge_host_name("a", [], ["127.0.0.1"], "x").found


# --- settings --------------------------------------------------------------------------------------------------------


def test_all_settings_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.examine_environment() == (Settings(), {})
    monkeypatch.setenv("TORCH_ECREC_LEASE_S", "-1")
    monkeypatch.setenv("TORCH_ECREC_GIVE_UP_S", "7")
    monkeypatch.setenv("TORCH_ECREC_JION", "a:1")
    monkeypatch.setenv("TORCH_ECREC_INSECURE_RPC", "yes")
    good, wrong = Settings.examine_environment()
    assert good == Settings(give_up_s=7.0)
    assert wrong.keys() == {f"TORCH_ECREC_{name}" for name in ("LEASE_S", "JION", "INSECURE_RPC")}
    found = {one.found: one for one in software.settings(good, wrong)}
    assert all(one.level == "ERROR" for one in found.values()) and len(found) == 3
    near = next(one for text, one in found.items() if "JION" in text)
    assert near.remedy == "export TORCH_ECREC_JOIN=... in its place, and unset TORCH_ECREC_JION"


# --- the place of checkpoints ----------------------------------------------------------------------------------------


def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, asked = threading.Event(), threading.Event()

    def hang(*_: object) -> Finding:
        asked.set()
        assert over.wait(LIMIT_S)
        return Finding("checkpoints", "OK", "too late")

    monkeypatch.setattr(store, "_try", hang)
    monkeypatch.setattr(store, "LIMIT_S", 0.2)
    (one,) = store.place(str(tmp_path))
    over.set()
    assert asked.is_set() and one.level == "ERROR" and "hangs: no answer within 0.2 s" in one.found
    assert re.search(r"remove \.torch-ecrec-doctor-[0-9a-f]{16} there, should it stay", one.remedy)


@pytest.mark.parametrize(
    ("method", "gives", "says"),
    [
        ("list", [], "what was written is not listed"),
        ("read", b"other", "what was read is not what was written"),
        ("exists", True, "what was removed is still there"),
    ],
)
def test_a_store_that_is_not_consistent(
    method: str, gives: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_ecrec.storage.location import Location

    monkeypatch.setattr(Location, method, lambda *_: gives)
    (one,) = store.place(str(tmp_path))
    assert one.level == "ERROR" and says in one.found and "shows at once" in one.remedy
    assert not list(tmp_path.iterdir()), "the probe is removed all the same"


def test_a_store_from_which_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ecrec.errors import StoreUnavailable
    from torch_ecrec.storage.location import Location

    def fail(*_: object) -> bytes:
        raise StoreUnavailable("cannot read x: broken") from PermissionError(13, "Permission denied")

    monkeypatch.setattr(Location, "read", fail)
    (one,) = store.place(str(tmp_path))
    assert one.level == "ERROR" and "broken" in one.found and "give this user permission" in one.remedy
    assert not list(tmp_path.iterdir())


# --- the listener of a link ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listener() -> Iterator[tuple[link.LinkListener, list[str]]]:
    said: list[str] = []
    one = link.LinkListener("127.0.0.1", 0, said.append)
    thread = threading.Thread(target=one.serve, args=(LIMIT_S,))
    thread.start()
    try:
        yield one, said
    finally:
        one.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def until_end(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    sock.settimeout(LIMIT_S)
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            got += part
    return got


def call(address: tuple[str, int], secret: bytes, context: bytes = link.CONTEXT) -> socket.socket:
    """Goes through the beginning with a listener, as one who knows that secret. `context`: of which channel."""
    sock = socket.create_connection(address, LIMIT_S)
    mine = bytes(NONCE_BYTES)
    sock.sendall(link.MAGIC + mine)
    said = b""
    while len(said) < len(link.MAGIC) + NONCE_BYTES + PROOF_BYTES:
        said += sock.recv(1 << 10)
    theirs = said[len(link.MAGIC) :][:NONCE_BYTES]
    sock.sendall(proof(secret, CALLER, mine, theirs, context))
    return sock


def test_a_friend_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    with listener() as (one, said):
        found = link.measure(one.address, 0.2)
        assert found.there > 0 and found.back > 0 and found.trip_s > 0 and found.connect_s > 0
        wait_until(lambda: any("has sent" in line for line in said), LIMIT_S, "it has told")
    judged = link.judge("there", found, Settings(rebuild_bytes_per_s=0.0))
    assert judged.figures["there_bytes_per_s"] == found.there


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1 << 16),
        link.MAGIC + bytes(NONCE_BYTES) + bytes(PROOF_BYTES) + link.GIVE + b"\xff" * 4,
        link.MAGIC + bytes(NONCE_BYTES - 1),
    ],
    ids=["http", "zeros", "another proof", "cut off"],
)
def test_a_stranger_gets_nothing(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    with listener() as (one, said):
        with socket.create_connection(one.address, LIMIT_S) as sock:
            with contextlib.suppress(OSError):  # it has hung up already
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
            got = until_end(sock)
        assert len(got) <= len(link.MAGIC) + NONCE_BYTES + PROOF_BYTES and SECRET.encode() not in got
        wait_until(lambda: any("does not know the secret" in line for line in said), LIMIT_S, "it was told")
        assert link.measure(one.address, 0.05).there > 0, "friends go on"


def test_a_proof_for_another_channel_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    with listener() as (one, said):
        with call(one.address, SECRET.encode(), context=b"") as sock:
            assert until_end(sock) == b""
        wait_until(lambda: any("does not know the secret" in line for line in said), LIMIT_S, "it was told")


def test_strangers_that_say_nothing_leave_room_for_friends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of too many goes at once, and the others when their time is up."""
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    monkeypatch.setattr(link, "PROVE_S", 2 * LIMIT_S)
    monkeypatch.setattr(link, "PAUSE_S", 2 * LIMIT_S)
    with listener() as (one, _), contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(one.address, LIMIT_S)) for _ in range(link.STRANGERS_MOST)
        ]
        assert link.measure(one.address, 0.05).there > 0
        assert until_end(silent[0]) == b"", "it was hung up on"
    monkeypatch.setattr(link, "PROVE_S", 0.1)
    with listener() as (one, _), socket.create_connection(one.address, LIMIT_S) as sock:
        assert until_end(sock) == b"", "its time is up"


@pytest.mark.parametrize(
    "says",
    [
        lambda sock: sock.sendall(link.TAKE + (link.PIECE_BYTES + 1).to_bytes(4, "little")),
        lambda sock: sock.sendall(b"?"),
        lambda sock: sock.sendall(link.TAKE + bytes(4) + link.TAKE + (5).to_bytes(4, "little") + bytes(9) + link.TAKE),
    ],
    ids=["a large piece", "another word", "twice"],
)
def test_a_friend_that_says_too_much_is_hung_up_on(
    says: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    with listener() as (one, said):
        with call(one.address, SECRET.encode()) as sock:
            says(sock)
            until_end(sock)
        wait_until(lambda: any("agreed" in line for line in said), LIMIT_S, "it was told")


def test_what_a_friend_may_send_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BYTES_MOST", 4 * link.PIECE_BYTES)
    with listener() as (one, said):
        found = link.measure(one.address, 0.05)
        assert found.there > 0
        with call(one.address, b"") as sock:
            piece = link.PIECE_BYTES.to_bytes(4, "little") + bytes(link.PIECE_BYTES)
            with contextlib.suppress(OSError):
                sock.sendall(link.TAKE + piece * 5)
            until_end(sock)
        wait_until(lambda: any("more than was agreed" in line for line in said), LIMIT_S, "it was told")
        monkeypatch.setattr(link, "CALL_S", 0.2)
        with call(one.address, b"") as sock:
            assert until_end(sock) == link.MAGIC, "its time is up"


def test_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert link.listening_place("") == ("127.0.0.1", link.PORT)
    assert link.listening_place("10.0.0.1") == ("10.0.0.1", link.PORT)
    assert link.listening_place("10.0.0.1:7") == ("10.0.0.1", 7)
    assert link.listening_place("[fd00::1]") == ("fd00::1", link.PORT)
    assert link.listening_place("[fd00::1]:7") == ("fd00::1", 7)
    with pytest.raises(ValueError, match="others can reach"):
        link.listening_place("0.0.0.0")
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    monkeypatch.setattr(link, "interfaces", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.7")])
    assert link.listening_place("") == ("10.0.0.7", link.PORT)
