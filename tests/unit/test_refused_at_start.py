"""What cannot be is refused at the start, by name, with what to do: settings, places, what is not installed."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch.optim import Optimizer

from torch_ecrec.cli import status
from torch_ecrec.cli.arguments import tell_of_memory
from torch_ecrec.cli.main import main
from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn import script_checks
from torch_ecrec.processes import keeper, launch
from torch_ecrec.processes.children import reasons, tail
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.settings import Settings, _require_known
from torch_ecrec.storage.location import require_place, require_writable
from torch_ecrec.transport.control import DESCRIPTORS

# settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [field.name.upper() for field in dataclasses.fields(Settings)])
def test_every_setting_is_known_and_its_misspelling_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"JOIN": "127.0.0.1:1"}
    default = {field.name.upper(): field.default for field in dataclasses.fields(Settings)}[name]
    monkeypatch.setenv(f"TORCH_ECREC_{name}", values.get(name, str(default)))
    Settings.from_environment()
    monkeypatch.setenv(f"TORCH_ECREC_{name[:-1]}", "1")
    with pytest.raises(ValueError, match=rf"TORCH_ECREC_{name[:-1]} is no setting .* did you mean TORCH_ECREC_\w+"):
        Settings.from_environment()


def test_what_the_package_sets_or_reads_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is started by us with a variable of ours takes it."""
    written = re.compile(r"\bTORCH_ECREC_[A-Z][A-Z_]*[A-Z]\b")
    sources = [*(ROOT / "torch_ecrec").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    names = {name for path in sources for name in written.findall(path.read_text(encoding="utf-8"))}
    assert len(names) >= 8 and "TORCH_ECREC_LOSS_MARK" in names
    _require_known(names)


def test_a_word_that_is_like_none_gets_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_QQQ", "1")
    with pytest.raises(ValueError, match=r"there are TORCH_ECREC_JOIN, .*TORCH_ECREC_CHECKPOINT_MEMORY_BYTES"):
        Settings.from_environment()


def test_a_command_refuses_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_ECREC_JION", "127.0.0.1:1")
    assert main(["status"]) == 2
    assert "TORCH_ECREC_JION is no setting of torch_ecrec; did you mean TORCH_ECREC_JOIN?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("Unable to allocate 8.00 TiB"), "there is not enough memory: Unable to allocate 8.00 TiB\n"),
        (MemoryError(), "there is not enough memory\n"),
        (OverflowError("int too large"), "int too large\n"),
        (OSError(errno.EMFILE, "Too many open files"), r"`ulimit -n`\); `torch-ecrec doctor --only open-files` says"),
        (OSError(errno.EAGAIN, "Try again"), r"`ulimit -u`, .*`torch-ecrec doctor --only processes,memory` says"),
        (RuntimeError("can't start new thread"), r"`ulimit -u`, .*`torch-ecrec doctor --only processes,memory` says"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), r"not enough memory \(`ulimit -v`"),
    ],
)
def test_what_a_machine_has_no_room_for_is_one_line(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(status, "run", fail)
    assert main(["status"]) == (1 if isinstance(error, (ImportError, RuntimeError)) else 2)
    said = capsys.readouterr().err
    assert re.search(says, said) and said.count("\n") == 1


def test_a_server_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a connection with every member, as the coordinator has."""

    class Began(Exception):
        pass

    def begin() -> None:
        raise Began

    monkeypatch.setattr(launch, "warm", begin)
    monkeypatch.setattr(launch.allocator, "keep_freed", lambda most_bytes: True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        with pytest.raises(Began):
            launch.run_server(Settings(join="127.0.0.1:1"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(DESCRIPTORS, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("number", "advice"), [(errno.EAGAIN, "; see `torch-ecrec doctor"), (errno.ENOENT, "")])
def test_trainers_that_cannot_be_started_are_one_line(
    number: int, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "words")

    monkeypatch.setattr(keeper.subprocess, "Popen", fail)
    for name in ("signal", "set_wakeup_fd"):
        monkeypatch.setattr(keeper.signal, name, lambda *_, **__: None)
    monkeypatch.setattr(keeper.ctypes, "CDLL", lambda _: None)  # which would make this process a subreaper
    assert keeper.main(["torchrun"]) == keeper.CANNOT_START
    said = capsys.readouterr().err
    assert said.startswith(f"torch-ecrec: torchrun cannot be started: words{advice}") and said.count("\n") == 1


def test_an_error_of_ours_is_not_taken_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("no limit")

    monkeypatch.setattr(status, "run", fail)
    with pytest.raises(RuntimeError, match="no limit"):
        main(["status"])


def test_a_folder_that_is_gone_is_named_before_torch_fails_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["doctor"]) == 2
    assert "the folder in which this was started is gone" in capsys.readouterr().err


# places for checkpoints ---------------------------------------------------------------------------------------------

BUCKETS = ["s3:/bucket/a", "s3:bucket/a", "s3/bucket", "gs:bucket", "GS:/b", "bucket/run1", "my-bucket/a/b", "az/b"]
FOLDERS = ["/data/ckpt", "ckpt", "./new/ckpt", "~/ckpt", "there/ckpt", "s3://bucket/a", "file:///x", "memory://a"]


@pytest.mark.parametrize("url", BUCKETS)
def test_a_bucket_without_its_scheme_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a bucket is named with its scheme \(\w+://[^:/]") as refused:
        require_place(url)
    assert str(tmp_path) in str(refused.value), "and what it would have been"


@pytest.mark.parametrize("url", FOLDERS)
def test_folders_and_urls_are_places(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    require_place(url)


@pytest.mark.parametrize("url", ["./b\udcffd", "s3://bucket/b\udcffd", "file:///b\udcffd"])
def test_a_place_whose_name_is_no_text_is_refused(url: str) -> None:
    """The status of a cluster that checkpoints there could not be read by anybody."""
    with pytest.raises(ValueError, match=r"must have a name in UTF-8, got '.*b\\udcffd'"):
        require_place(url)


def test_a_relative_place_in_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "b\udcffd").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="must have a name in UTF-8"):
        require_place("ckpt")


@pytest.mark.parametrize("domain", ["b\udcffd", "row1/ra\nck"])
def test_a_failure_domain_is_text(domain: str) -> None:
    with pytest.raises(ValueError, match=f"printable characters together, got {re.escape(repr(domain))}"):
        Settings(failure_domain=domain)


@pytest.mark.parametrize("command", ["up", "coordinator", "demo"])
def test_commands_refuse_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", "s3:/bucket/a", "--checkpoint-every", "5"]
    assert main([command, *words]) == 2
    assert "a bucket is named with its scheme (s3://bucket/a)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "coordinator"])
def test_a_place_that_cannot_be_written_ends_them_before_anything_is_started(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    words = ["--checkpoint", str(tmp_path / "file" / "ckpt"), "--checkpoint-every", "5"]
    assert main([command, *words]) == CheckpointError.exit_code
    assert f"cannot write {tmp_path / 'file' / 'ckpt'}" in capsys.readouterr().err


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    require_writable(str(tmp_path / "new" / "ckpt"))
    assert os.listdir(tmp_path / "new" / "ckpt") == []


# what is not installed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["torchrec", "fbgemm_gpu"])
@pytest.mark.parametrize(
    "what",
    [
        ["-m", "torch_ecrec", "demo"],
        ["-m", "torch_ecrec", "chaos", "--minutes", "1"],
        ["-m", "torch_ecrec", "rehearse", "--", "train.py"],
        ["-m", "torch_ecrec", "run", "--", "train.py"],
        ["-c", "from torch_ecrec import DistributedModelParallel"],
        ["-c", "import torch_ecrec.planner"],
        ["-c", "import torch_ecrec.checkpoint"],
        ["-c", "import torch_ecrec.model_parallel"],
    ],
    ids=lambda words: words[2] if words[0] == "-m" else words[1].split()[-1],
)
def test_what_is_not_installed_is_named_with_what_installs_it(what: list[str], missing: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *what],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    name = {"torchrec": "TorchRec", "fbgemm_gpu": "FBGEMM"}[missing]
    assert done.returncode == 1 and f"{name} is not installed; on a CPU: python -m pip install torch==" in done.stderr
    assert sorted(os.listdir(tmp_path)) in (["sitecustomize.py"], ["__pycache__", "sitecustomize.py"]), "nothing began"


COSTS = "--hosts 20 --mtbf-hours 99 --save 60 --load 60 --restart 60 --stall 1 --repair 60 --parity-share 0.01"


@pytest.mark.parametrize(
    ("missing", "words"),
    [("psutil", "bench placement"), ("psutil", "chaos --minutes 1"), ("matplotlib", f"plan {COSTS} --plot a.png")],
)
def test_a_package_of_an_extra_is_named_with_the_extra(missing: str, words: str, tmp_path: Path) -> None:
    """Also of a benchmark, which is imported for its arguments."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "torch_ecrec", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith(f"torch-ecrec: this needs the package {missing}: pip install 'torch-ecrec[demo]'\n")
    assert "Traceback" not in done.stderr


# an optimizer without parameters ------------------------------------------------------------------------------------


def test_tables_on_the_servers_are_named_where_an_optimizer_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_checks, "_tables", [])
    monkeypatch.setattr(Optimizer, "__init__", Optimizer.__init__)
    script_checks.explain_empty_optimizers(["t_cat_10"])
    script_checks.explain_empty_optimizers(["t_cat_11", "t_cat_10"])
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam):
        with pytest.raises(ValueError, match="optimizer got an empty parameter list") as refused:
            kind([], lr=0.1)
        [note] = refused.value.__notes__
        assert "the tables t_cat_10, t_cat_11 are on its servers" in note
        kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="learning rate") as other:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=-1.0)
    assert not hasattr(other.value, "__notes__")


# what a log says ----------------------------------------------------------------------------------------------------

LOG = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]:     import torchrec
[rank0]: ModuleNotFoundError: No module named 'torchrec'
W1 elastic: Sending process 2 closing signal
Traceback (most recent call last):
  File "run.py", line 905, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_the_reason_is_the_trainers_and_not_torchruns(tmp_path: Path) -> None:
    log = tmp_path / "trainers.log"
    log.write_text(LOG + "\n".join(f"line {i}" for i in range(40)))
    assert reasons(LOG.splitlines()) == ["ModuleNotFoundError: No module named 'torchrec'"]
    assert tail(log).endswith("the last exception of a trainer:\n  ModuleNotFoundError: No module named 'torchrec'")
    assert reasons(["nothing", "happened"]) == [] and "line" not in tail(tmp_path / "none")


# jobs that differ ---------------------------------------------------------------------------------------------------

TABLE = TableSpec("a", 30, 4, -1.0, 1.0, OptimizerSpec("adam", lr=0.1, eps=1e-3))
CHANGES = {
    "`rows` is 30 there, 31 here": {"rows": 31},
    "`dim` is 4 there, 8 here": {"dim": 8},
    "`low` is -1.0 there, -2.0 here": {"low": -2.0},
    "`high` is 1.0 there, 3.0 here": {"high": 3.0},
    "`weights` is 'float32' there, 'float16' here": {"weights": "float16"},
    "`lr` of its optimizer is 0.1 there, 0.2 here": {"optimizer": OptimizerSpec("adam", lr=0.2, eps=1e-3)},
    "`eps` of its optimizer is 0.001 there, 0.01 here": {"optimizer": OptimizerSpec("adam", lr=0.1, eps=1e-2)},
    "`max_gradient` of its optimizer is None there, 2.0 here": {
        "optimizer": OptimizerSpec("adam", lr=0.1, max_gradient=2.0, eps=1e-3)
    },
    "`kind` of its optimizer is 'adam' there, 'sgd' here": {"optimizer": OptimizerSpec("sgd", lr=0.1)},
}


@pytest.mark.parametrize("says", CHANGES)
def test_what_differs_is_named_field_by_field(says: str) -> None:
    other = dataclasses.replace(TABLE, **CHANGES[says])
    told = JobSpec((TABLE,), CodeSpec(), 2).difference(JobSpec((other,), CodeSpec(), 2))
    assert told.startswith("table a differs: ") and says in told
    assert "TableSpec(" not in told and "OptimizerSpec(" not in told
    changed = sum(getattr(TABLE, field.name) != getattr(other, field.name) for field in dataclasses.fields(TABLE))
    assert changed > 1 or "kind" in says or told.count(" there, ") == 1, "and nothing else"


def test_of_many_tables_that_differ_one_is_shown_and_the_others_are_counted() -> None:
    tables = [tuple(dataclasses.replace(TABLE, name=f"t{i}", rows=rows) for i in range(5)) for rows in (30, 31)]
    told = JobSpec(tables[0], CodeSpec(), 2).difference(JobSpec(tables[1], CodeSpec(), 2))
    assert told == "table t0 differs: `rows` is 30 there, 31 here; 4 more tables differ"


@pytest.mark.parametrize(("servers", "memory"), [(1, 5 << 30), (3, 2 << 30), (2, 2 << 30)])
def test_more_memory_than_is_left_is_told(
    servers: int, memory: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux would kill servers with a tier one by one, and nobody says why."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    tell_of_memory(Settings(tier=str(tmp_path), tier_memory_bytes=memory), servers, tmp_path)
    said = capsys.readouterr().err
    assert ("4.0 GiB of the 8.0 GiB of this host" in said) == (servers * memory > 4 << 30), said
