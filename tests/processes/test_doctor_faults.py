"""`torch-ecrec doctor` finds faults that are made for it: each run is a process, each fault real where it can be.

A fault is made, the command is run as a user runs it, and the finding must have the right level, name what is wrong,
and say what mends it; the exit code and the text follow. `sound` is the oracle: the same command without the fault.
Packages that lack, that crash or that are of other releases stand in an interpreter of their own (`bare`), which has
nothing but what a test puts there. Faults of a machine are made in namespaces of Linux, and take root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from conftest import ROOT, wait_until
from test_standbys import Etcd, free_port

import torch_ecrec
from torch_ecrec.doctor.findings import Diagnosis, Finding, format_diagnosis, of_json
from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Hosts

LIMIT_S = 300.0  # for anything at all: only a hang reaches it
SECRET, ANOTHER = "a secret of this test 0123", "another secret of it 45678"
OF_MACHINE = {"shared-memory", "open-files", "processes", "memory", "cores", "host-name"}  # may truly be so here


def _namespaces() -> str:
    """Why there are no namespaces for mounts and names here; "": there are."""
    if shutil.which("unshare") is None:
        return "no unshare here"
    done = subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, timeout=LIMIT_S)
    return "" if done.returncode == 0 else "namespaces take root"


REASON = _namespaces()
needs_root = pytest.mark.skipif(bool(REASON), reason=REASON)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a run has said: `code`, and the diagnosis."""

    code: int
    diagnosis: Diagnosis

    def of(self, check: str, level: str) -> Finding:
        """The first finding of a check with that level."""
        found = [one for one in self.diagnosis.findings if one.check == check]
        right = [one for one in found if one.level == level]
        assert right, f"wanted {level} of {check}, got {found}"
        return right[0]

    def bad(self, check: str, level: str, says: str, do: str) -> Finding:
        """The same, not OK: it names the fault, wants something, and the text has its remedy; the exit code follows."""
        one = self.of(check, level)
        assert says in one.found, one
        assert one.wanted and do in one.remedy, one
        text = " ".join(format_diagnosis(self.diagnosis).split())
        assert " ".join(one.remedy.split()) in text and " ".join(one.found.split()) in text
        worst = max((finding.level for finding in self.diagnosis.findings), key=["OK", "WARN", "ERROR"].index)
        assert self.diagnosis.level == worst and self.code == {"WARN": 1, "ERROR": 2}[worst]
        assert text.startswith(f"{worst}: ") and check in text.partition("torch-ecrec")[2].partition(" OK ")[0]
        return one


def doctor(
    *words: str,
    python: str = sys.executable,
    within: Sequence[str] = (),
    path: Sequence[Path] = (),
    cwd: Path | None = None,
    **variables: str,
) -> Answer:
    """Runs `torch-ecrec doctor --json` with these words.

    Args:
        python: the interpreter.
        within: what runs it: `unshare` and the like.
        path: before the package, where modules are found.
        variables: of the environment, beside this process's, which names no settings of ours.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
    done = subprocess.run(
        [*within, python, "-P", "-m", "torch_ecrec", "doctor", "--json", *words],
        env={**environment, **variables},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout, done.stderr
    answer = Answer(done.returncode, of_json(json.loads(done.stdout)))
    assert answer.diagnosis.version == torch_ecrec.__version__
    assert done.returncode == {"OK": 0, "WARN": 1, "ERROR": 2}[answer.diagnosis.level]
    return answer


def in_namespace(script: str, *flags: str) -> list[str]:
    """What runs a command in a namespace of mounts, and others, after a shell script has changed it."""
    return ["unshare", "-m", *flags, "sh", "-ec", f'{script}\nexec "$@"', "sh"]


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without any package, but for msgspec, without which no command can be read."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return str(folder / "bin" / "python")


def package(place: Path, module: str, name: str, version: str, source: str = "") -> None:
    """Puts a package there, as pip would."""
    (place / module).mkdir(parents=True)
    (place / module / "__init__.py").write_text(f"__version__ = {version!r}\n{source}\n")
    about = place / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


TORCH = "class _Fbgemm: asynchronous_complete_cumsum = 1\nclass ops: fbgemm = _Fbgemm\nclass version: cuda = None"


def a_set(place: Path, torch: str = "2.13.0", fbgemm: str = "1.8.0", torchrec: str = "1.8.0", **sources: str) -> Path:
    """Packages that are there and load, with nothing in them."""
    package(place, "torch", "torch", torch, sources.get("torch", TORCH))
    package(place, "fbgemm_gpu", sources.get("build", "fbgemm-gpu-cpu"), fbgemm, sources.get("fbgemm", ""))
    package(place, "torchrec", "torchrec", torchrec, sources.get("torchrec", ""))
    for name in ("numpy", "numba", "fsspec", "xxhash", "zstandard", "tensordict", "pyre_extensions", "tqdm", "iopath"):
        package(place, name, name, "1.0")
    package(place, "torchmetrics", "torchmetrics", "1.0.3")
    return place


def test_a_tested_set_is_well(bare: str, tmp_path: Path) -> None:
    """The oracle of those below. (A build says what it is behind a plus.)"""
    for at, versions in enumerate((("2.13.0+cpu", "1.8.0", "1.8.0"), ("2.14.1", "1.9.0+cpu", "1.9.2"))):
        place = a_set(tmp_path / str(at), *versions)
        answer = doctor("--only", "packages", python=bare, path=[place])
        assert answer.code == 0, answer
        assert "load together, and are a tested set" in answer.of("packages", "OK").found


def test_nothing_is_installed(bare: str) -> None:
    """Not even torch: doctor says so, and what brings it. All checks run: what needs packages says that they lack."""
    answer = doctor(python=bare)
    do = "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 && python -m pip install --no-deps torchrec==1.8.0"
    if sys.version_info >= (3, 13):
        do = "pip install torch==2.14.1 fbgemm-gpu-cpu==1.9.0 && python -m pip install --no-deps torchrec==1.9.2"
    answer.bad("packages", "ERROR", "torch and FBGEMM and TorchRec are not installed", do)
    others = [one for one in answer.diagnosis.findings if one.check == "packages"][1]
    assert (
        others.found.startswith("numpy, numba, fsspec, xxhash") and "'numpy>=2' 'numba>=0.61' fsspec" in others.remedy
    )
    answer.bad("kernels", "ERROR", "No module named 'num", "mend what the findings on packages say")
    assert answer.of("python", "OK") and answer.of("settings", "OK")
    store = doctor("--only", "checkpoints", "--checkpoint", "/tmp/x", python=bare)
    store.bad("checkpoints", "ERROR", "No module named 'fsspec'", "mend what the findings on packages say")


def test_not_even_msgspec(bare: str, tmp_path: Path) -> None:
    """No command can be read without it: one line says what brings it."""
    empty = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True, timeout=LIMIT_S)
    done = subprocess.run(
        [str(empty / "bin" / "python"), "-P", "-m", "torch_ecrec", "doctor"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    said = "torch-ecrec: msgspec is not installed; this brings it: python -m pip install msgspec\n"
    assert done.stderr == said and not done.stdout


def test_torchrec_is_missing(bare: str, tmp_path: Path) -> None:
    place = a_set(tmp_path, "2.14.1", "1.9.0", "1.9.2")
    shutil.rmtree(place / "torchrec")
    shutil.rmtree(place / "torchrec-1.9.2.dist-info")
    answer = doctor("--only", "packages", python=bare, path=[place])
    answer.bad("packages", "ERROR", "TorchRec is not installed", "python -m pip install --no-deps torchrec==1.9.2")


def test_fbgemm_of_another_torch(bare: str, tmp_path: Path) -> None:
    place = a_set(tmp_path, fbgemm="1.9.0")
    one = doctor("--only", "packages", python=bare, path=[place]).bad(
        "packages", "ERROR", "FBGEMM 1.9.0 is built for another torch than 2.13.0", "fbgemm-gpu-cpu==1.8.0"
    )
    assert one.wanted == "torch 2.13.0 with FBGEMM 1.8.0 and TorchRec 1.8.0"


def test_a_foreign_fbgemm_before_the_real_torch(tmp_path: Path) -> None:
    """The package on the path is another one than pip has installed, and brings no operators: torch itself says so."""
    package(tmp_path, "fbgemm_gpu", "fbgemm-gpu-cpu", "1.9.0")
    answer = doctor("--only", "packages", path=[tmp_path])
    answer.bad(
        "packages",
        "ERROR",
        f"FBGEMM ({tmp_path}/fbgemm_gpu/__init__.py) does not load: AttributeError",
        "pip install torch==",
    )


def test_an_untested_set(bare: str, tmp_path: Path) -> None:
    place = a_set(tmp_path, "2.15.0", "1.10.0", "1.10.0")
    one = doctor("--only", "packages", python=bare, path=[place]).bad(
        "packages", "WARN", "torch 2.15.0, fbgemm-gpu-cpu 1.10.0, torchrec 1.10.0 load together", "pip install torch=="
    )
    assert "torch 2.13.0 with FBGEMM 1.8.0" in one.wanted and "torch 2.14.1 with FBGEMM 1.9.0" in one.wanted


def test_both_builds_of_fbgemm(bare: str, tmp_path: Path) -> None:
    """The CUDA one overwrites the other's files, as TorchRec's metadata has pip do it."""
    place = a_set(tmp_path)
    package(place / "more", "else", "fbgemm-gpu", "1.8.0")
    shutil.move(place / "more" / "fbgemm_gpu-1.8.0.dist-info", place)
    answer = doctor("--only", "packages", python=bare, path=[place])
    answer.bad("packages", "ERROR", "fbgemm-gpu and fbgemm-gpu-cpu are both installed", "pip uninstall -y fbgemm-gpu")


def test_an_extension_that_crashes(bare: str, tmp_path: Path) -> None:
    """It takes its process with it, and doctor goes on."""
    a_set(tmp_path)
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text("import ctypes\nctypes.string_at(0)\n")
    answer = doctor("--only", "packages,cores", python=bare, path=[tmp_path])
    answer.bad("packages", "ERROR", "does not load: crashed: Segmentation fault (SIGSEGV)", "--force-reinstall")
    assert [one.check for one in answer.diagnosis.findings] == ["packages", "cores"]


def test_an_extension_with_an_undefined_symbol(bare: str, tmp_path: Path) -> None:
    a_set(tmp_path, build="fbgemm-gpu")
    lines = "raise OSError('fbgemm_gpu_config.so: undefined symbol: _ZN3c10')\n"
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text(lines)
    one = doctor("--only", "packages", python=bare, path=[tmp_path]).bad(
        "packages", "ERROR", "undefined symbol: _ZN3c10", "torch==2.13.0 fbgemm-gpu==1.8.0 torchrec==1.8.0"
    )
    assert "&&" not in one.remedy, "with a GPU TorchRec's metadata is right"


# --- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_that_are_not_compiled(tmp_path: Path) -> None:
    answer = doctor("--only", "kernels", NUMBA_CACHE_DIR=str(tmp_path))
    one = answer.bad("kernels", "WARN", "not compiled", "torch-ecrec warm")
    assert str(tmp_path) in one.wanted
    assert not list(tmp_path.rglob("*.nbc")), "it has compiled none"


@needs_root
def test_kernels_that_are_not_compiled_and_nowhere_to_keep_them(tmp_path: Path) -> None:
    """Folders beside the sources cannot be written, as in an image that is mounted read-only, and nor can others."""
    (tmp_path / f"torch-ecrec-kernels-{os.geteuid()}").write_text("in the way")
    mounts = [f"mount -t tmpfs -o ro tmpfs {folder}" for folder in sorted((ROOT / "torch_ecrec").rglob("__pycache__"))]
    assert mounts
    answer = doctor(
        *("--only", "kernels"),
        within=in_namespace("\n".join(mounts)),
        HOME="/proc/nothing",
        XDG_CACHE_HOME="/proc/nothing",
        TMPDIR=str(tmp_path),
    )
    one = answer.bad("kernels", "ERROR", "cannot be written (Read-only file system)", "NUMBA_CACHE_DIR=FOLDER")
    assert "torch-ecrec warm" in one.remedy


def test_kernels_that_are_switched_off() -> None:
    answer = doctor("--only", "kernels", NUMBA_DISABLE_JIT="1")
    answer.bad("kernels", "ERROR", "NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT")


# --- the machine -----------------------------------------------------------------------------------------------------


@needs_root
def test_a_small_dev_shm() -> None:
    """As Docker makes it."""
    answer = doctor("--only", "shared-memory", within=in_namespace("mount -t tmpfs -o size=64m tmpfs /dev/shm"))
    one = answer.bad("shared-memory", "WARN", "/dev/shm has 64.0 MiB", "docker run --shm-size=1g")
    assert one.figures["total_bytes"] == 64 << 20
    enough = in_namespace("mount -t tmpfs -o size=300m tmpfs /dev/shm")
    assert doctor("--only", "shared-memory", within=enough).code == 0
    full = f"{'mount -t tmpfs -o size=1g tmpfs /dev/shm'}\nhead -c 900m /dev/zero > /dev/shm/left"
    left = doctor("--only", "shared-memory", within=in_namespace(full))
    left.bad("shared-memory", "WARN", "124.0 MiB of it free", "remove what is left in /dev/shm")


@pytest.mark.parametrize(("limit", "level"), [(200, "WARN"), (80, "ERROR")])
def test_few_open_files(limit: int, level: str) -> None:
    within = ["sh", "-ec", f'ulimit -n {limit}\nexec "$@"', "sh"]
    answer = doctor("--only", "open-files", within=within)
    answer.bad("open-files", level, f"limit {limit} (hard: {limit})", "LimitNOFILE=416")
    soft = ["sh", "-ec", f'ulimit -S -n {limit}\nexec "$@"', "sh"]
    doctor("--only", "open-files", within=soft).bad("open-files", level, f"limit {limit}", "ulimit -n 416")
    assert (
        doctor("--only", "open-files", "--members", "2", within=["sh", "-ec", 'ulimit -n 392\nexec "$@"', "sh"]).code
        == 0
    )


@needs_root
def test_a_host_name_that_does_not_resolve() -> None:
    name = "no-such-host.invalid"
    script = f"{sys.executable} -c 'import socket; socket.sethostname(\"{name}\")'"
    answer = doctor("--only", "host-name", within=in_namespace(script, "-u"))
    answer.bad("host-name", "WARN", f"{name} does not resolve", "torch-ecrec up --host")
    assert answer.diagnosis.host == name


@needs_root
def test_a_host_name_that_is_a_loopback_address(tmp_path: Path) -> None:
    """As Debian and many containers write it."""
    (tmp_path / "hosts").write_text("127.0.1.1 trainer-7\n")
    script = f"mount --bind {tmp_path / 'hosts'} /etc/hosts"
    script += f"\n{sys.executable} -c 'import socket; socket.sethostname(\"trainer-7\")'"
    answer = doctor("--only", "host-name", within=in_namespace(script, "-u"))
    answer.bad("host-name", "WARN", "trainer-7 is 127.0.1.1, here alone", "/etc/hosts")


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_that_are_misspelt_or_cannot_be() -> None:
    """All of them, not the first alone; those that are right count."""
    variables = {"TORCH_ECREC_LEASE_SEC": "5", "TORCH_ECREC_WINDOW_STEPS": "many", "TORCH_ECREC_TRANSPORT": "udp"}
    answer = doctor("--only", "settings,link", **variables, TORCH_ECREC_GIVE_UP_S="77", TORCH_ECREC_SECRET="short")
    answer.bad(
        "settings", "ERROR", "TORCH_ECREC_LEASE_SEC is no setting", "export TORCH_ECREC_LEASE_S=... in its place"
    )
    found = {one.remedy.partition(",")[0]: one.found for one in answer.diagnosis.findings}
    assert "must be a number, got 'many'" in found["unset TORCH_ECREC_WINDOW_STEPS"]
    assert "must be one of sockets, rpc, got 'udp'" in found["unset TORCH_ECREC_TRANSPORT"]
    assert "16 characters or more" in found["unset TORCH_ECREC_SECRET"] and len(found) == 4
    assert answer.code == 2
    well = doctor("--only", "settings", TORCH_ECREC_GIVE_UP_S="77")
    assert well.code == 0 and well.of("settings", "OK").found == "give_up_s=77.0"


def test_an_experiment_is_told_of() -> None:
    answer = doctor("--only", "settings", TORCH_ECREC_EXPERIMENT_MODE="minus2PC")
    answer.bad(
        "settings", "WARN", "a step is acknowledged before it survives a loss", "unset TORCH_ECREC_EXPERIMENT_MODE"
    )


# --- the place of checkpoints ----------------------------------------------------------------------------------------


def test_a_store_that_is_well_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    for place in (tmp_path, tmp_path / "not" / "yet"):
        answer = doctor("--only", "checkpoints", "--checkpoint", str(place))
        assert answer.code == 0 and "written, listed, read and removed" in answer.of("checkpoints", "OK").found
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@needs_root
def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    within = in_namespace(f"mount -t tmpfs -o ro tmpfs {tmp_path}")
    answer = doctor("--only", "checkpoints", "--checkpoint", str(tmp_path), within=within)
    answer.bad("checkpoints", "ERROR", "the file system is read-only: name another place", f"ls -ld {tmp_path}")


@needs_root
def test_a_store_that_is_full(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}\nhead -c 1m /dev/zero > {tmp_path}/full"
    answer = doctor("--only", "checkpoints", "--checkpoint", str(tmp_path), within=in_namespace(script))
    answer.bad("checkpoints", "ERROR", "there is no room", f"df {tmp_path}")


def test_a_store_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = doctor("--only", "checkpoints", "--checkpoint", str(tmp_path / "file" / "ckpt"))
    answer.bad("checkpoints", "ERROR", "a file is where a folder is wanted", "or name another place")


@pytest.mark.parametrize(
    ("url", "says", "do"),
    [
        ("nope://bucket/x", "Protocol not known: nope", "name the place otherwise: a folder of this machine, s3://"),
        ("s3:/bucket/x", "a bucket is named with its scheme (s3://bucket/x)", "name the place otherwise"),
    ],
)
def test_a_scheme_that_is_not_known(url: str, says: str, do: str, tmp_path: Path) -> None:
    doctor("--only", "checkpoints", "--checkpoint", url, cwd=tmp_path).bad("checkpoints", "ERROR", says, do)


def test_s3_without_its_package(tmp_path: Path) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError('not installed')\n")
    answer = doctor("--only", "checkpoints", "--checkpoint", "s3://bucket/x", path=[tmp_path])
    answer.bad("checkpoints", "ERROR", "Install s3fs", "python -m pip install 'torch-ecrec[s3]'")


# --- the coordinator -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def coordinator(before: str = "", variables: Mapping[str, str] = {}) -> Iterator[str]:
    """A real one, after some lines of Python; yields its address."""
    source = f"import sys, torch_ecrec\n{before}\nfrom torch_ecrec.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", source, "coordinator", "--host", "127.0.0.1"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**clean, "PYTHONPATH": str(ROOT), **variables}
    )
    try:
        assert child.stdout is not None
        said = json.loads(child.stdout.readline())
        host, port = said["stands_by"] if "stands_by" in said else said["address"]
        yield f"{host}:{port}"
    finally:
        child.kill()
        child.communicate()


def ask(join: str, **variables: str) -> Answer:
    return doctor("--only", "coordinator", "--join", join, **variables)


@contextlib.contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who listens, and does that with each connection; yields the address, and must have been called."""
    called = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threading.Thread(target=talk, args=(sock,), daemon=True).start()

        def talk(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                if sock.recv(1 << 16):
                    called.set()
                    answer(sock)
                    while sock.recv(1 << 16):  # until the other hangs up
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        assert called.is_set(), "nobody has asked it"
        listener.shutdown(socket.SHUT_RDWR)


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize(
    "says",
    [HTTP, b'{"type":"welcome","version":"%b"}\n' % torch_ecrec.__version__.encode(), b"\0\xff" * 40, b""],
    ids=["http", "json", "bytes", "none"],
)
def test_a_stranger_where_the_coordinator_is_to_be(says: bytes, secret: str) -> None:
    variables = {"TORCH_ECREC_SECRET": secret} if secret else {}
    with stranger(lambda sock: sock.sendall(says)) as where:
        answer = ask(where, **variables)
    if secret and says.startswith(b"{"):  # it speaks as one without a secret would
        answer.bad("coordinator", "ERROR", "is none of this cluster", "TORCH_ECREC_SECRET")
    else:
        do = "name its address and port; torch-ecrec up"
        answer.bad("coordinator", "ERROR", f"somebody listens at {where}, who does not answer as a coordinator", do)


def test_nobody_listens_at_the_coordinators_address() -> None:
    port = free_port()
    answer = ask(f"127.0.0.1:{port}")
    answer.bad(
        "coordinator", "ERROR", f"nobody listens at 127.0.0.1:{port}: Connection refused", "torch-ecrec up --host"
    )


@pytest.mark.parametrize(
    ("join", "says", "do"),
    [
        ("no-such-host.invalid:29400", "no-such-host.invalid does not resolve", "/etc/hosts"),
        ("10.0.0.1", "an address must be HOST:PORT", "--join 10.0.0.1:29400"),
        ("0.0.0.0:29400", "is no address that others can reach", "--join 10.0.0.1:29400"),
        ("etcd://10.0.0.1", "etcd must be named as etcd://HOST:PORT", "--join etcd://"),
    ],
)
def test_a_name_that_leads_nowhere(join: str, says: str, do: str) -> None:
    ask(join).bad("coordinator", "ERROR", says, do)
    doctor("--only", "coordinator", TORCH_ECREC_JOIN=join).bad("coordinator", "ERROR", says, do)


def test_secrets_that_differ() -> None:
    with coordinator(variables={"TORCH_ECREC_SECRET": SECRET}) as where:
        ask(where, TORCH_ECREC_SECRET=ANOTHER).bad("coordinator", "ERROR", "it has another secret", "sha256sum FILE")
        ask(where).bad("coordinator", "ERROR", "which this process does not know", "set TORCH_ECREC_SECRET")
        assert ask(where, TORCH_ECREC_SECRET=SECRET).code == 0
    with coordinator() as where:
        ask(where, TORCH_ECREC_SECRET=SECRET).bad("coordinator", "ERROR", "it has none", "nothing where it has none")


@pytest.mark.parametrize(("off_s", "says"), [(-300.0, "300.0 s behind"), (300.0, "300.0 s ahead of")])
def test_a_clock_that_is_off(off_s: float, says: str) -> None:
    """The coordinator's own: its process reads another time of day."""
    with coordinator(f"import time\nnow = time.time\ntime.time = lambda: now() + {off_s}") as where:
        one = ask(where).of("clock", "WARN")
        assert abs(one.figures["off_s"] - off_s) <= 1 + one.figures["unsure_s"]
    if one.figures["unsure_s"] < 0.05:
        assert says in one.found
    assert "timedatectl set-ntp true" in one.remedy and one.wanted


def test_a_coordinator_of_another_version() -> None:
    other = "import torch_ecrec.protocol.build as build; torch_ecrec.__version__ = '0.0.9'"
    with coordinator(other) as where:
        assert ask(where).code == 0, "which may serve together with this one"
    with coordinator(f"{other}; build.PROTOCOL = 0") as where:
        answer = ask(where)
    one = answer.bad("coordinator", "ERROR", "is a coordinator of version 0.0.9", "pip install torch-ecrec==0.0.9")
    assert torch_ecrec.__version__ in one.found and "; protocol 1, here 0" in one.found


def test_etcd(tmp_path: Path) -> None:
    """It is not there; then nobody leads; then one does, and a second address of etcd is dead."""
    nobody = ask("etcd://127.0.0.1:1/ads")
    nobody.bad("coordinator", "ERROR", "etcd does not answer", "etcdctl --endpoints 127.0.0.1:1 endpoint health")
    (tmp_path / "etcd3gw").mkdir()
    (tmp_path / "etcd3gw" / "__init__.py").write_text("raise ImportError('not installed')\n")
    lacks = doctor("--only", "coordinator", "--join", "etcd://127.0.0.1:1/ads", path=[tmp_path])
    lacks.bad("coordinator", "ERROR", "etcd needs a package", "pip install 'torch-ecrec[etcd]'")
    etcd = Etcd(tmp_path)
    try:
        join = f"etcd://127.0.0.1:{etcd.client}/ads"
        ask(join).bad("coordinator", "ERROR", "nobody leads ads", f"torch-ecrec coordinator --elect {join}")
        with coordinator("sys.argv += ['--elect', %r]" % join) as where:  # noqa: UP031 - braces are Python's there
            wait_until(lambda: ask(join).code == 0, LIMIT_S, "it leads")
            led = ask(join)
            assert f"{where} leads ads" in led.of("coordinator", "OK").found and led.code == 0
            two = ask(f"etcd://127.0.0.1:{etcd.client},127.0.0.1:1/ads")
            two.bad("coordinator", "WARN", "etcd: nobody listens at 127.0.0.1:1", "start etcd there")
    finally:
        etcd.kill()


# --- the link --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listens(within: Sequence[str] = (), *words: str, **variables: str) -> Iterator[tuple[str, list[str]]]:
    """`doctor --listen`; yields where, and what it prints from then on."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    child = subprocess.Popen(
        [
            *within,
            sys.executable,
            "-P",
            "-m",
            "torch_ecrec",
            "doctor",
            "--listen",
            *(words or (f"127.0.0.1:{free_port()}",)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**clean, "PYTHONPATH": str(ROOT), **variables},
    )
    said: list[str] = []
    try:
        assert child.stdout is not None
        where = child.stdout.readline().partition("--to ")[2].strip()
        assert where

        def read() -> None:
            assert child.stdout is not None
            said.extend(iter(child.stdout.readline, ""))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield where, said
    finally:
        child.terminate()
        child.wait(LIMIT_S)
        child.kill()


def test_the_link_of_two_hosts() -> None:
    if reason := kit.unavailable():
        pytest.skip(reason)
    secret = {"TORCH_ECREC_SECRET": SECRET}
    with Hosts(2) as hosts:
        here, there = hosts[0], hosts[1]
        enter = [list(host._space.enter([])) for host in (here, there)]
        with listens(enter[1], f"{there.address}:29499", **secret) as (where, _):
            words = ("--only", "link", "--to", there.address)
            fast = doctor(*words, within=enter[0], TORCH_ECREC_REBUILD_BYTES_PER_S="1e5", **secret)
            assert fast.of("link", fast.diagnosis.level).figures["there_bytes_per_s"] > 1e6
            there.link(bits_per_s=80e6, delay_s=0.02)
            slow = doctor(*words, within=enter[0], **secret)
            one = slow.bad("link", "WARN", f"{where}: connects in", "a rebuild over it takes half of it")
            assert 1e5 < one.figures["there_bytes_per_s"] < 12e6 and one.figures["back_bytes_per_s"] < 12e6
            assert one.figures["round_trip_s"] > 0.02
            few = doctor(*words, within=enter[0], TORCH_ECREC_REBUILD_BYTES_PER_S="1e4", **secret)
            few.bad("link", "WARN", "round trip", "take hosts of one network")


def test_the_link_takes_the_secret() -> None:
    with listens(TORCH_ECREC_SECRET=SECRET) as (where, said):
        words = ("--only", "link", "--to", where)
        for variables in ({}, {"TORCH_ECREC_SECRET": ANOTHER}):
            doctor(*words, **variables).bad("link", "ERROR", "has another secret", "the same on both hosts")
        friend = doctor(*words, TORCH_ECREC_SECRET=SECRET, TORCH_ECREC_REBUILD_BYTES_PER_S="1")
        assert friend.of("link", friend.diagnosis.level).figures["back_bytes_per_s"] > 0
    assert sum("does not know the secret" in line for line in said) == 2 and any("has sent" in line for line in said)


def test_nobody_and_a_stranger_at_the_other_end_of_the_link() -> None:
    port = free_port()
    doctor("--only", "link", "--to", f"127.0.0.1:{port}").bad("link", "ERROR", "nobody listens", "doctor --listen")
    with stranger(lambda sock: sock.sendall(HTTP)) as where:
        doctor("--only", "link", "--to", where).bad("link", "ERROR", "is no doctor", "doctor --listen")


def test_other_hosts_get_no_listener_without_a_secret() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torch_ecrec", "doctor", "--listen", "192.0.2.1:29499"],
        env={**{n: v for n, v in os.environ.items() if not n.startswith("TORCH_ECREC_")}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2 and "TORCH_ECREC_SECRET" in done.stderr and not done.stdout


# --- all of it -------------------------------------------------------------------------------------------------------


def test_all_is_well(tmp_path: Path) -> None:
    """But for what this machine truly has: then it is a WARN, of a check of the machine."""
    with coordinator() as where, listens() as (there, _):
        words = ("--join", where, "--checkpoint", str(tmp_path), "--to", there)
        answer = doctor(*words, TORCH_ECREC_REBUILD_BYTES_PER_S="1")
    worse = [one for one in answer.diagnosis.findings if one.level != "OK"]
    assert {one.check for one in worse} <= OF_MACHINE | {"link"}, worse
    assert answer.code == (max(["OK", "WARN", "ERROR"].index(one.level) for one in worse) if worse else 0)
    checks = list(dict.fromkeys(one.check for one in answer.diagnosis.findings))
    machine = ["shared-memory", "open-files", "processes", "memory", "cores", "host-name"]
    assert checks == [
        "python",
        "packages",
        "kernels",
        "settings",
        *machine,
        "checkpoints",
        "coordinator",
        "clock",
        "link",
    ]
    assert not list(tmp_path.iterdir())


def test_the_text_begins_with_the_verdict(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "torch_ecrec", "doctor", "--only", "settings,checkpoints"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    for variables, url, first, code in (
        ({}, str(tmp_path), "OK: torch-ecrec runs here", 0),
        (
            {"TORCH_ECREC_EXPERIMENT_RANGES": "3"},
            str(tmp_path),
            "WARN: torch-ecrec runs here; to be looked at: settings",
            1,
        ),
        (
            {"TORCH_ECREC_EXPERIMENT_RANGES": "3"},
            "nope://x",
            "ERROR: torch-ecrec cannot run so; to be mended: checkpoints; also look at: settings",
            2,
        ),
    ):
        done = subprocess.run(
            [*words, "--checkpoint", url],
            env={**clean, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.stdout.splitlines()[0] == first and done.returncode == code
        assert done.stderr == "", "no progress where nobody looks on"
