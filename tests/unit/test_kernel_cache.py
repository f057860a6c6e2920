"""Kernels in the cache on disk: never one of other sources, whoever starts when; loaded where one is there.

The oracle is what a process computes that compiles everything itself.
"""

import ast
import ctypes
import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
from numba.core import caching
from places import ROOT
from test_architecture import MODULES, imports, module_of, trees

from torch_ecrec.runtime import kernel_cache
from torch_ecrec.runtime.kernel_cache import Entries, kernel, source_files

LIMIT_S = 300  # only a hang reaches it

INNER = """
import numba
from torch_ecrec.runtime.kernel_cache import kernel

CONSTANT = 10

@kernel(inline="always")
def spliced(x):
    return x + 1

@kernel()
def called(x):
    return x + 100

called_of_numba = numba.njit(cache=True)(called.py_func)
"""
OUTER = """
import numba
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.records.inner import CONSTANT, called, called_of_numba, spliced

@kernel()
def outer(x):
    return spliced(x) + called(x) + CONSTANT

@numba.njit(cache=True)
def outer_of_numba(x):
    return called_of_numba(x)
"""
RUN = """
import json
from torch_ecrec.records import outer
kinds = {"ours": outer.outer, "numba's": outer.outer_of_numba}
said = {name: [kernel(0), sum(kernel.stats.cache_hits.values())] for name, kernel in kinds.items()}
print(json.dumps({**said, "folder": str(outer.outer.stats.cache_path)}))
"""


class Installed:
    """A copy of the package, with two modules more; processes that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "torch_ecrec" / "records"
        shutil.copytree(ROOT / "torch_ecrec", folder / "torch_ecrec", ignore=shutil.ignore_patterns("__pycache__"))
        (self.records / "inner.py").write_text(INNER)
        (self.records / "outer.py").write_text(OUTER)

    def change_inner(self, old: str, new: str) -> None:
        source = (self.records / "inner.py").read_text()
        assert source.count(old) == 1
        (self.records / "inner.py").write_text(source.replace(old, new))

    def run(self) -> dict:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            env={**environment, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["folder"] == str(self.records / "__pycache__"), "another torch_ecrec than the copy was run"
        return said

    def entries(self) -> set[str]:
        """Of `outer`."""
        return {path.name for path in (self.records / "__pycache__").glob("outer.outer-*.nbc")}


def test_a_change_of_what_a_kernel_calls_is_a_change_of_the_kernel(tmp_path):
    installed = Installed(tmp_path)
    first = installed.run()
    assert (first["ours"], first["numba's"]) == ([111, 0], [100, 0])
    entries = installed.entries()
    assert len(entries) == 1
    again = installed.run()
    assert (again["ours"], again["numba's"]) == ([111, 1], [100, 1]), "each was loaded"

    installed.change_inner("return x + 100", "return x + 200")
    changed = installed.run()
    assert changed["numba's"] == [100, 1], "Numba looks at other files by itself now: is kernel_cache.py still needed?"
    assert changed["ours"] == [211, 0]
    assert len(installed.entries()) == 1 and not installed.entries() & entries, "the old one is gone"

    installed.change_inner("return x + 1\n", "return x + 2\n")
    installed.change_inner("CONSTANT = 10", "CONSTANT = 20")
    assert installed.run()["ours"] == [222, 0]
    assert installed.run()["ours"] == [222, 1]
    assert len(installed.entries()) == 1


def test_numba_itself_may_load_old_data_while_a_changed_kernel_is_saved(tmp_path, monkeypatch):
    """Why entries are files of their own: the race of processes that start after an upgrade, step by step."""
    folder = str(tmp_path)
    caching.IndexDataCacheFile(folder, "f.py311", "old sources").save("key", "old code")
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", lambda *_: None)  # one process is as far as this
    caching.IndexDataCacheFile(folder, "f.py311", "new sources").save("key", "new code")
    other = caching.IndexDataCacheFile(folder, "f.py311", "new sources")
    assert other.load("key") == "old code", "Numba has no such race any more: is `Entries` still needed?"


def test_an_entry_is_whole_or_not_there(tmp_path, monkeypatch):
    old, new, other = "0" * 16, "1" * 16, Entries(tmp_path, "f.py311", "1" * 16)
    Entries(tmp_path, "f.py311", old).save("key", "old code")
    assert other.load("key") is None
    seen = []
    replace = os.replace

    def meanwhile(part, path):
        seen.append(other.load("key"))
        replace(part, path)

    monkeypatch.setattr(os, "replace", meanwhile)
    Entries(tmp_path, "f.py311", new).save("key", "new code")
    assert seen == [None], "another process looked while it was saved"
    assert other.load("key") == "new code"
    assert len(list(tmp_path.iterdir())) == 1, "the old one is gone, and what was written first"


def test_an_entry_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        Entries(tmp_path, "f.py311", "0" * 16).save("key", "code")
    assert not list(tmp_path.iterdir())


def test_only_entries_of_other_sources_are_removed(tmp_path):
    old, new = "0" * 16, "1" * 16
    Entries(tmp_path, "f.py311", old).save("key", "of f")
    Entries(tmp_path, "renamed.py311", old).save("key", "of a function that there is no longer")
    Entries(tmp_path, "f.py312", old).save("key", "another interpreter's")
    users = ["f.py311.1.nbc", "f.py311.nbi", "f.cpython-311.pyc", f"f.py311.{old}.nbc"]
    for name in users:
        (tmp_path / name).write_bytes(b"")
    first, second = Entries(tmp_path, "f.py311", new), Entries(tmp_path, "g.py311", new)
    first.save("key", "of f")
    second.save("key", "of g")
    first.save("another key", "of f, for another signature")
    left = {path.name for path in tmp_path.iterdir()} - set(users)
    assert sorted(name.rpartition(".")[0].rpartition(".")[0] for name in left) == [
        f"f.py311.{new}",
        f"f.py311.{new}",
        f"f.py312.{old}",
        f"g.py311.{new}",
    ]
    assert (first.load("key"), first.load("another key")) == ("of f", "of f, for another signature")
    first.flush()
    assert first.load("key") is None and first.load("another key") is None
    assert second.load("key") == "of g"
    assert all((tmp_path / name).exists() for name in users)


def test_an_entry_of_another_key_is_not_taken(tmp_path):
    entries = Entries(tmp_path, "f.py311", "0" * 16)
    entries.save("key", "code")
    entries._path("key").rename(entries._path("another"))
    assert entries.load("another") is None


def test_options_are_numbas_and_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    def halved(x):
        return x / 2

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    made, plain = kernel(error_model="numpy", inline="always")(halved), numba.njit(nogil=True)(halved)
    assert made.targetoptions == {**plain.targetoptions, "error_model": "numpy", "inline": "always"}
    assert made(3.0) == 1.5 and not made.stats.cache_hits
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    again = kernel(error_model="numpy", inline="always")(halved)
    assert again(3.0) == 1.5 and sum(again.stats.cache_hits.values()) == 1
    again.recompile()
    assert again(3.0) == 1.5 and len(list(tmp_path.rglob("*.nbc"))) == 1


def test_the_cache_is_the_users_where_the_sources_may_not_be_written(tmp_path, monkeypatch):
    def read_only(_):
        raise PermissionError("read-only")

    def doubled(x):
        return x * 2

    monkeypatch.setattr(caching.InTreeCacheLocator, "ensure_cache_path", read_only)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel()(doubled)(2) == 4
    (entry,) = tmp_path.rglob("*.nbc")
    assert kernel_cache.digest_of_sources() in entry.name
    again = kernel()(doubled)
    assert again(2) == 4 and sum(again.stats.cache_hits.values()) == 1


def test_numba_may_be_told_not_to_compile(monkeypatch):
    def same(x):
        return x

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert kernel()(same) is same


def test_the_digest_is_of_names_bytes_and_numba(tmp_path, monkeypatch):
    def digest():
        return kernel_cache.digest_of_sources.__wrapped__()

    for room in kernel_cache.ROOMS:
        (tmp_path / room).mkdir()
    for name in kernel_cache.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path)
    seen = [digest()]
    for change in (
        lambda: (tmp_path / "codec" / "field.py").write_text("b = 1\n"),
        lambda: (tmp_path / "codec" / "field.py").write_text("b = 2\n"),
        lambda: (tmp_path / "codec" / "field.py").rename(tmp_path / "codec" / "moved.py"),
        lambda: monkeypatch.setattr(numba, "__version__", "another"),
    ):
        change()
        seen.append(digest())
    assert len(set(seen)) == 5
    assert digest() == seen[-1]


# --- what the digest covers, read from the source --------------------------------------------------------------------


@pytest.mark.smoke  # looks at all of the package
def test_the_digest_covers_every_module_of_kernels_and_what_these_import():
    """A function or a constant inside a kernel comes from a module that its own module imports, or one behind that."""
    defining = {name for name, tree in trees().items() for target, _ in imports(tree) if target.startswith("numba")}
    defining |= {
        name
        for name, tree in trees().items()
        for target, _ in imports(tree)
        if target == "torch_ecrec.runtime.kernel_cache.kernel"
    }
    assert len(defining) > 20
    sources = source_files()
    covered = {name for name, path in MODULES.items() if path in sources}
    assert defining - {"torch_ecrec.bench.codec"} <= covered, "name its room in kernel_cache.ROOMS"
    for name in covered:
        targets = {module_of(target) for target, _ in imports(trees()[name], for_types=False)}
        assert {target for target in targets if target is not None} <= covered | {"torch_ecrec"}, name


@pytest.mark.smoke  # looks at all of the package
def test_every_kernel_is_one_of_ours():
    """`cache=True` is said nowhere, nor is Numba's own decorator, but in a benchmark that keeps nothing."""
    for name, tree in trees().items():
        cached = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "cache"]
        assert not cached, f"{name}: lines {cached}"
        spelled = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}
        if spelled & {"njit", "jit", "vectorize", "guvectorize", "stencil", "cfunc"}:
            assert name in ("torch_ecrec.runtime.kernel_cache", "torch_ecrec.bench.codec"), name


def test_make_compiles_again_when_the_digest_is_another():
    (line,) = re.findall(r"^KERNELS := \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {path for pattern in line.split() for path in ROOT.glob(pattern)} == set(source_files())


def test_warm_kernels_are_loaded_by_the_next_process(tmp_path):
    """With two of the package's own."""
    code = """
import json, numpy as np
from torch_ecrec.runtime.kernels import first_outside
from torch_ecrec.records.optimizers import optimizer
rows = np.arange(4)
first_outside(rows, 0, 4)
sgd = optimizer("sgd")
records, delta = np.ones((4, 2), np.float32), np.empty((4, 2), np.uint32)
sgd.kernel(records, rows, np.ones((4, 2), np.float32), np.array([0.1], np.float32), delta)
kernels = [first_outside, sgd.kernel]
stats = [kernel.stats for kernel in kernels]
print(json.dumps([[sum(found.cache_hits.values()), sum(found.cache_misses.values())] for found in stats]))
"""
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert said == [[[0, 1]] * 2, [[1, 0]] * 2]


# --- a cache is no condition ------------------------------------------------------------------------------------------

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
ONLY_OURS = OUTER.partition("@numba")[0].replace("called_of_numba, ", "")
LIMITED = """
import json, logging, sys
logging.basicConfig(format="SAID %(message)s", stream=sys.stderr)
from torch_ecrec.records import outer
print(json.dumps([outer.outer(0), outer.outer.stats.cache_path, sum(outer.outer.stats.cache_hits.values())]))
"""


def limit() -> None:
    """In a child, before it begins: permissions hold for root, too."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


class Limited(Installed):
    """A copy that may only be read, and a user who may write nowhere but where a test says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "installed")
        self.home, self.temporary, self.working = (folder / name for name in ("home", "temporary", "working"))
        for made in (self.home, self.temporary, self.working):
            made.mkdir()
        (self.records / "inner.py").write_text(INNER.partition("called_of_numba")[0])
        (self.records / "outer.py").write_text(ONLY_OURS)
        self.own = self.temporary / f"torch-ecrec-kernels-{os.geteuid()}"
        for path, _, _ in os.walk(self.folder):
            os.chmod(path, 0o555)
        self.home.chmod(0o555)

    def run_limited(self, **environment: str) -> tuple[list, list[str]]:
        """What it says: result, folder, loaded; and what the log says."""
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        more = {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.temporary), "HOME": str(self.home), **environment}
        done = subprocess.run(
            [sys.executable, "-c", LIMITED],
            env={**kept, **more},
            cwd=self.working,
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert not list(self.working.iterdir()), "a folder named ~, say"
        return json.loads(done.stdout), [line for line in done.stderr.splitlines() if line.startswith("SAID")]

    def writable(self) -> None:
        """So that it can be removed."""
        for path, _, _ in os.walk(self.folder):
            os.chmod(path, 0o755)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    installed = Limited(tmp_path)
    yield installed
    installed.writable()


# Where the environment names none and no user has that number, Python leaves a ~ as it is.
HOMES = {"of another": "home", "not there": "home/not-there", "none": "~"}


@pytest.mark.parametrize("home", HOMES)
def test_who_may_write_neither_beside_the_package_nor_at_home_has_a_folder_for_himself(limited, home):
    where = HOMES[home] if home == "none" else str(limited.home.parent / HOMES[home])
    said, log = limited.run_limited(HOME=where)
    assert (said[0], said[2], log) == (111, 0, [])
    assert Path(said[1]).parent == limited.own and limited.own.stat().st_mode & 0o777 == 0o700
    again, log = limited.run_limited(HOME=where)
    assert again == [111, said[1], 1] and not log, "the next process loads it"


def linked(own: Path) -> None:
    own.with_name("other").mkdir(0o700)
    own.symlink_to(own.with_name("other"))


def open_to_others(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


FOREIGN = {"a file": lambda own: own.write_text(""), "a link": linked, "open to others": open_to_others}
if os.geteuid() == 0:
    FOREIGN["another's"] = lambda own: (own.mkdir(0o700), os.chown(own, 12345, 12345))


@pytest.mark.parametrize("what", FOREIGN)
def test_without_any_folder_kernels_are_compiled_and_that_is_said_once(limited, what):
    """What others may write is not read: it would run their code."""
    FOREIGN[what](limited.own)
    said, log = limited.run_limited(NUMBA_CACHE_DIR=str(limited.home / "none"))
    assert said == [111, str(limited.records / "__pycache__"), 0]
    assert len(log) == 1 and "NUMBA_CACHE_DIR=FOLDER" in log[0] and "90 s of a core" in log[0]
    said, log = limited.run_limited(NUMBA_CACHE_DIR=str(limited.temporary / "given"))
    assert said[0] == 111 and said[1].startswith(str(limited.temporary / "given")) and not log


@pytest.mark.parametrize("own", ["own", "none"])
def test_entries_beside_the_package_are_read_by_who_may_not_write_there(limited, own):
    """As in a container whose image was made by root, who has said `torch-ecrec warm`."""
    limited.records.chmod(0o755)
    said, _ = limited.run_limited()
    assert said == [111, str(limited.records / "__pycache__"), 0]
    limited.records.chmod(0o555)
    (limited.records / "__pycache__").chmod(0o555)
    if own == "none":
        limited.own.write_text("a file")
    said, log = limited.run_limited()
    assert said[0] == 111 and said[2] == 1 and not log


def half(entry: bytes) -> bytes:
    return entry[: len(entry) // 2]


DAMAGES = {
    "empty": lambda _: b"",
    "zeros": lambda entry: bytes(len(entry)),
    "cut off": half,
    "something else": lambda _: pickle.dumps(1),
    "another's code": lambda entry: pickle.dumps((pickle.loads(entry)[0], "no code")),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_an_entry_that_a_disk_has_damaged_is_compiled_and_written_anew(tmp_path, monkeypatch, caplog, what):
    def tripled(x):
        return x * 3

    kernel_cache._said.clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel()(tripled)(2) == 6
    (entry,) = tmp_path.rglob("*.nbc")
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGES[what](whole))
    assert kernel()(tripled)(2) == 6
    assert len(caplog.records) == 1 and "not read from" in caplog.text and "NUMBA_CACHE_DIR" in caplog.text
    again = kernel()(tripled)
    assert again(2) == 6 and sum(again.stats.cache_hits.values()) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["write_bytes", "replace", "listdir", "mkdir"])
def test_a_cache_without_room_ends_nobody(tmp_path, monkeypatch, caplog, where):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def tripled(x):
        return x * 3

    def quadrupled(x):
        return x * 4

    kernel_cache._said.clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    made = [kernel()(tripled), kernel()(quadrupled)]
    (folder,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        if where == "mkdir":  # a cleaner has removed the folder
            folder.rmdir()
            patch.setattr(os, "makedirs", full)
        elif where == "write_bytes":
            patch.setattr(Path, "write_bytes", full)
        else:
            patch.setattr(os, where, full)
        assert [one(2) for one in made] == [6, 8]
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text, "once for both"
    assert not list(tmp_path.rglob("*.nbc.*"))
