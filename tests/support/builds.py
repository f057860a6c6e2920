"""Builds of the package: what a process of this one says when it joins, and others, as copies of its sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_trainers import ENVIRONMENT, LIMIT_S
from places import ROOT

from torch_ecrec.protocol.messages import whole_build
from torch_ecrec.runtime.kernel_cache import digest_of_sources

DIGEST = "from torch_ecrec.runtime.kernel_cache import digest_of_sources as of; print(of())"
BUILD: dict[str, Any] = {"version": whole_build().version, "messages": whole_build().messages}


def copy_of_build(folder: Path, version: str, changes: Mapping[str, tuple[str, str]]) -> Path:
    """Copies the package, with another version and other sources; returns what is to be in PYTHONPATH.

    What is compiled is copied, too, under the digest of the changed sources: `changes` must leave the code of kernels,
    and the lines where they begin, as they are.

    Args:
        changes: of each file below `torch_ecrec`, a text that it has once, and what is there instead.
    """
    package = folder / "torch_ecrec"
    shutil.copytree(ROOT / "torch_ecrec", package)
    before = BUILD["version"]
    for path, (old, new) in {"__init__.py": (f'"{before}"', f'"{version}"'), **changes}.items():
        source = (package / path).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{path} has {source.count(old)} times {old!r}"
        (package / path).write_text(source.replace(old, new), encoding="utf-8")
    here, there = digest_of_sources(), run_build(folder, "-c", DIGEST).stdout.strip()
    for entry in package.rglob(f"*.{here}.*.nbc"):
        entry.rename(entry.with_name(entry.name.replace(here, there)))
    return folder


def environment_of(folder: Path) -> dict[str, str]:
    """An environment in which the copy is what Python finds."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(folder)}


def run_build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with a copy."""
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environment_of(folder), text=True, capture_output=True, timeout=LIMIT_S)
