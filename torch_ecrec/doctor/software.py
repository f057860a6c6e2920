"""Checks of what is installed: Python, the packages, whether they load together, compiled kernels, settings.

FBGEMM's extension loads under one release of torch each. So a *set* is what belongs together; two are tested (`SETS`,
which requirements/ has as files). Loading is tried in another process (`trial.py`): what crashes there is a finding.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ecrec.doctor import trial
from torch_ecrec.doctor.findings import Finding
from torch_ecrec.processes.children import with_own_path
from torch_ecrec.runtime.installed import SETS, TESTED, Set, release, set_of_torch
from torch_ecrec.spec.settings import Settings

LOAD_S = 60.0  # TorchRec takes 3 s, and a slow file system several times that
KERNELS_S = 90  # that compiling all of them takes, of a core
PYTHON_LEAST, PYTHON_TESTED = (3, 11), (3, 13)
OTHERS = {  # modules that the package and TorchRec need beside the set, and the distributions that bring them
    "numpy": "numpy>=2",
    "numba": "numba>=0.61",
    "msgspec": "msgspec>=0.19",
    "fsspec": "fsspec",
    "xxhash": "xxhash>=3",
    "zstandard": "zstandard>=0.22",
    "tensordict": "tensordict",
    "torchmetrics": "torchmetrics==1.0.3",
    "pyre_extensions": "pyre-extensions",
    "tqdm": "tqdm",
    "iopath": "iopath",
}
NAMES = {"torch": "torch", "fbgemm_gpu": "FBGEMM", "torchrec": "TorchRec"}


# Python -----------------------------------------------------------------------------------------------


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Whether this release of Python is one that is tested."""
    here, short = ".".join(map(str, version)), version[:2]
    wanted = "Python 3.11, 3.12 or 3.13"
    again = "make an environment with another Python: `make setup PYTHON=/path/to/python3.11`, or python3.11 -m venv"
    if short < PYTHON_LEAST:
        return Finding("python", "ERROR", f"Python {here} is too old", wanted, again)
    if short > PYTHON_TESTED:
        return Finding("python", "WARN", f"Python {here} is not tested", wanted, again)
    return Finding("python", "OK", f"Python {here}")


# the packages -----------------------------------------------------------------------------------------


@dataclass
class Trial:
    """Keeps what a process that tries something has said, and how it ended.

    Attributes:
        said: in order.
        code: its exit code; of a signal: negative; None: it has not ended in time.
        error: the last line of its standard error.
    """

    said: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = 0
    error: str = ""

    def last(self, name: str, default: Any = None) -> Any:
        """Returns what was said last under a name."""
        return next((one[name] for one in reversed(self.said) if name in one), default)

    @property
    def died_at(self) -> str:
        """The package that it was loading when it died or hung; "": none."""
        return str(self.said[-1]["loads"]) if self.said and "loads" in self.said[-1] else ""

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.code is None:
            return f"has not ended within {LOAD_S:g} s"
        if self.code < 0:
            return f"crashed: {signal.strsignal(-self.code)} ({signal.Signals(-self.code).name})"
        return f"ended with exit code {self.code}{': ' if self.error else ''}{self.error}"


def try_out(words: Sequence[str], limit_s: float = LOAD_S) -> Trial:
    """Runs `trial.py` with these words in another process, which finds modules where this one does."""
    command = [sys.executable, "-P", "-W", "ignore", str(Path(trial.__file__)), *words]
    code: int | None
    try:
        done = subprocess.run(
            command, env=with_own_path({**os.environ}), stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s
        )
        code, out, error = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, error = None, late.stdout or b"", late.stderr or b""
    lines = out.decode(errors="replace").splitlines()
    said = [json.loads(line.removeprefix(trial.MARK)) for line in lines if line.startswith(trial.MARK)]
    return Trial(said, code, (error.decode(errors="replace").strip().splitlines() or [""])[-1][:300])


def packages() -> list[Finding]:
    """Whether the packages are installed, belong together, and load."""
    return judge_packages(try_out(["packages", *OTHERS]), tuple(sys.version_info[:3]))


def judge_packages(tried: Trial, version: tuple[int, ...]) -> list[Finding]:
    """Judges what trying to load the packages has given.

    Args:
        version: Python's.
    """
    if not tried.said or "versions" not in tried.said[0]:
        step = f"run `{sys.executable} -c 'import torch'`, and mend what it says; or make a new environment"
        return [Finding("packages", "ERROR", f"looking for packages {tried.end}", "a process that ends", step)]
    versions: dict[str, str] = tried.said[0]["versions"]
    lacking: list[str] = tried.said[0]["lacking"]
    for one in tried.said:  # what was loaded counts: it may lie before what is installed
        if "loaded" in one and one["version"]:
            name = one["loaded"] if one["loaded"] != "fbgemm_gpu" else _fbgemm_of(versions)
            versions = {**versions, name: one["version"]}
    gpu = bool(tried.last("cuda") or ("fbgemm-gpu" in versions and "fbgemm-gpu-cpu" not in versions))
    right = set_for(versions, version)
    findings = []
    missing = [NAMES[name] for name in trial.LOADED if name in lacking]
    if missing:
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        findings.append(Finding("packages", "ERROR", found, str(right), right.pip(gpu)))
    if others := [name for name in lacking if name in OTHERS]:
        found = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not installed"
        line = f"python -m pip install {' '.join(_quoted(OTHERS[name]) for name in others)}"
        findings.append(Finding("packages", "ERROR", found, "what torch-ecrec and TorchRec need", line))
    if {"fbgemm-gpu", "fbgemm-gpu-cpu"} <= versions.keys():
        findings.append(
            Finding(
                "packages",
                "ERROR",
                "fbgemm-gpu and fbgemm-gpu-cpu are both installed: the one has overwritten files of the other",
                "one of them",
                f"python -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {right.pip(gpu)}",
            )
        )
    failed, why = tried.last("failed", ""), str(tried.last("why", ""))
    if not failed and tried.died_at:
        failed, why = tried.died_at, tried.end
    have = _have(versions)
    if failed:
        at = tried.last("at", "")
        found = f"{NAMES.get(failed, failed)} ({at}) does not load: {' '.join(why.split())[:300]} (installed: {have})"
        line = right.pip(gpu)
        if _set_of(versions) == right:  # its files are not what they were
            line = line.replace("install ", "install --force-reinstall --no-deps ", 1)
        if why.startswith("MemoryError") or "failed to map segment" in why:
            line = "ulimit -v unlimited, or end other processes: there is not enough memory to load it"
        findings.append(Finding("packages", "ERROR", found, str(right), line))
    elif not missing:
        findings.append(_judge_set(versions, have, right, gpu))
    return findings


def _judge_set(versions: Mapping[str, str], have: str, right: Set, gpu: bool) -> Finding:
    here = _set_of(versions)
    torch, fbgemm = here.torch, here.fbgemm
    if here in SETS:
        return Finding("packages", "OK", f"{have} load together, and are a tested set")
    if any(one.fbgemm == fbgemm and one.torch != torch for one in SETS) and any(one.torch == torch for one in SETS):
        found = f"FBGEMM {fbgemm} is built for another torch than {torch} ({have})"
        return Finding("packages", "ERROR", found, str(right), right.pip(gpu))
    return Finding("packages", "WARN", f"{have} load together, and are not a tested set", TESTED, right.pip(gpu))


def set_for(versions: Mapping[str, str], version: tuple[int, ...]) -> Set:
    """Returns the tested set that is nearest to what is installed: that of its torch, else the one for this Python."""
    newest = SETS[-1] if version[:2] >= (3, 13) else SETS[0]
    return set_of_torch(versions.get("torch", "")) or newest


def _set_of(versions: Mapping[str, str]) -> Set:
    """Returns the releases that are installed; "" of one that is not."""
    torch, fbgemm, torchrec = (release(versions.get(name, "")) for name in ("torch", _fbgemm_of(versions), "torchrec"))
    return Set(torch, fbgemm, torchrec)


def _fbgemm_of(versions: Mapping[str, str]) -> str:
    return "fbgemm-gpu" if "fbgemm-gpu" in versions and "fbgemm-gpu-cpu" not in versions else "fbgemm-gpu-cpu"


def _have(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in trial.DISTRIBUTIONS if name in versions) or "nothing"


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if ">" in requirement else requirement


# kernels ----------------------------------------------------------------------------------------------


def kernels() -> Finding:
    """Whether all kernels are compiled, and their cache can be written."""
    return judge_kernels(try_out(["kernels"]))


def judge_kernels(tried: Trial) -> Finding:
    """Judges what trying to load the kernels has given."""
    folder, unwritable = tried.last("folder", ""), tried.last("unwritable", "")
    cost = f"each process that starts compiles what it needs, all of it {KERNELS_S} s of a core"
    if tried.last("disabled"):
        found = "NUMBA_DISABLE_JIT is set: nothing is compiled, and Python does the work of kernels, slowly"
        return Finding("kernels", "ERROR", found, "compiled kernels", "unset NUMBA_DISABLE_JIT")
    if tried.last("compiled"):
        return Finding("kernels", "OK", f"compiled, in {folder}{_but(unwritable)}")
    if missing := tried.last("missing", ""):
        found = f"not compiled ({missing.partition('-')[0]}, say): {cost}"
        if unwritable:
            found = f"not compiled, and {folder} cannot be written ({unwritable}): {cost}, and keeps none of it"
            step = (
                f"run `torch-ecrec warm` as a user who may write {folder}, or export NUMBA_CACHE_DIR=FOLDER, one that"
            )
            return Finding(
                "kernels", "ERROR", found, "compiled kernels", f"{step} this user may write, and torch-ecrec warm"
            )
        return Finding("kernels", "WARN", found, f"compiled kernels in {folder}", "torch-ecrec warm")
    return Finding(
        "kernels",
        "ERROR",
        f"loading the kernels {tried.end}",
        "compiled kernels",
        "mend what the findings on packages say; then torch-ecrec warm",
    )


def _but(unwritable: str) -> str:
    return f" (which this user cannot write: {unwritable}; it need not)" if unwritable else ""


# settings ---------------------------------------------------------------------------------------------


def settings(good: Settings, wrong: Mapping[str, str]) -> list[Finding]:
    """Whether the variables TORCH_ECREC_... exist and can be what they say; `wrong`: those that do not, and why."""
    findings = []
    for name, why in wrong.items():
        near = (
            why.rpartition("did you mean ")[2].rstrip("?") if "is no setting" in why and "did you mean" in why else ""
        )
        step = f"export {near}=... in its place, and unset {name}" if near else f"unset {name}, or give it such a value"
        findings.append(Finding("settings", "ERROR", why, "variables that exist, with values that can be", step))
    if good.experiment:
        found = f"an experiment gives up what is promised: {'; '.join(good.experiment.gives_up())}"
        names = " ".join(good.experiment.variables())
        findings.append(
            Finding("settings", "WARN", found, "no experiment, where a job is to be safe", f"unset {names}")
        )
    others = {name: getattr(good, name) for name in Settings.__dataclass_fields__}
    changed = [f"{name}={value}" for name, value in others.items() if value != getattr(Settings(), name)]
    if not findings:
        findings.append(Finding("settings", "OK", f"{', '.join(changed) or 'all as by default'}"))
    return findings
