"""A folder whose files are named as modules of Python's, and a script below it: our children see what their parent saw.

`python -m`, which starts them, would look there first.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from torch_ecrec.processes import supervisor
from torch_ecrec.processes.fork_server import ForkServer
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0  # only a hang reaches it
BIN = Path(sys.executable).parent
OWNER = """
import json, os, subprocess, sys
sys.path.append(sys.argv[1])
from torch_ecrec.processes.fork_server import ForkServer
from torch_ecrec.processes.supervisor import LOADED
server = ForkServer([one.partition(":")[0] for one in LOADED], dict(os.environ))  # imported, not compiled
child = server.start("seen", (), dict(os.environ), subprocess.PIPE)
found = json.loads(child.stdout.read())
assert child.wait(60) == 0
server.close()
print(json.dumps([[os.path.abspath(one) for one in sys.path], found]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a file for every module of Python's, and `src` with a script and a module of its own."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the project file {name}.py was imported')\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "src" / "owner.py").write_text(OWNER)
    (tmp_path / "elsewhere" / "seen.py").write_text("import json, sys\nprint(json.dumps(sys.path))\n")
    return tmp_path


def environment() -> dict[str, str]:
    """The package is found where it is installed."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TORCH_ECREC_JOIN")}


def test_processes_that_are_forked_see_the_path_of_their_parent(project: Path) -> None:
    words = [sys.executable, "src/owner.py", str(project / "elsewhere")]
    done = subprocess.run(words, cwd=project, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    mine, found = json.loads(done.stdout)
    assert [one for one in dict.fromkeys(found) if one in mine] == list(dict.fromkeys(mine)), "in the same order"
    assert str(project) not in found and str(project / "elsewhere") in found


def test_so_do_those_with_an_interpreter_of_their_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "is_available", lambda: False)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])  # of a script in another folder
    with Supervisor(CodeSpec(2, 1, 1), logs=project / "logs") as cluster:
        assert cluster.status().members is not None


def test_up_and_run_begin_there(project: Path) -> None:
    up = [str(BIN / "torch-ecrec"), "up", "--servers", "2", "-k", "1", "--spares", "0", "--logs", str(project / "logs")]
    with subprocess.Popen(up, cwd=project, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("cluster at ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    (project / "src" / "train.py").write_text("import sys\nprint('path', sys.path[0])\n")
    run = [str(BIN / "torch-ecrec"), "run", "--", "src/train.py"]
    done = subprocess.run(run, cwd=project, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"path {project / 'src'}" in done.stdout


def test_every_interpreter_that_we_start_is_told_not_to_look_where_it_is_started() -> None:
    started = told = 0
    for path in (ROOT / "torch_ecrec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword | ast.FormattedValue) and ast.unparse(node.value) == "sys.executable":
                told += 1  # to people
            words = [ast.unparse(one) for one in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
            if "sys.executable" in words:
                started += 1
                follows = words[words.index("sys.executable") + 1]
                assert follows in ("'-P'", "'-I'"), f"{path}: line {node.lineno}"  # isolated: it does not look, too
    assert started >= 10
    written = sum(path.read_text().count("sys.executable") for path in (ROOT / "torch_ecrec").rglob("*.py"))
    assert started + told == written, "it is written as a list, for this test to find"


LAST_WORDS = {
    "exits": ("import sys; print('why', file=sys.stderr); sys.exit(3)", "3", "why"),
    "is shadowed": (
        "raise SystemExit('the project file x.py was imported')",
        "1",
        "the project file x.py was imported",
    ),
    "is killed": ("import os, sys; print('why', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", "-9", "why"),
    "says nothing": ("import os; os._exit(5)", "5", ""),
    "says much": (
        "import sys; [print(f'line {i}', file=sys.stderr) for i in range(99999)]; sys.exit(3)",
        "3",
        "line 99998",
    ),
}


@pytest.mark.parametrize("how", LAST_WORDS)
def test_the_end_of_what_one_that_forks_has_said_is_in_the_message(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, ended, said = LAST_WORDS[how]
    (tmp_path / "dying.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(("dying",), environment())
    try:
        with pytest.raises(OSError, match="the process that starts others has died") as error:
            server.start("seen", (), environment())
    finally:
        server.close()
    text = str(error.value)
    assert f"(exit code {ended})" in text and said in text and len(text) < 2000
    assert ("the end of what it said" in text) == bool(said)


def test_what_is_said_while_it_loads_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "warns.py").write_text("import sys; print('a warning', file=sys.stderr)")
    (tmp_path / "seen.py").write_text("print('seen')")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(("warns",), environment())
    try:
        for _ in range(2):
            assert server.start("seen", (), environment(), subprocess.PIPE).wait(LIMIT_S) == 0
    finally:
        server.close()
    assert capfd.readouterr().err.count("a warning") == 1
