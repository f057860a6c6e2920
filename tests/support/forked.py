"""Processes that tests start, forked from one that has loaded torch, TorchRec and the kernels: each begins at once.

    process = forked.start("cluster_child", [orders], environment, stdout=PIPE, stderr=log)    a module of tests/support
    process = forked.start("torch_ecrec", ["serve", "--join", join], environment, inside=host)  on a host of a test

Tests that start torchrun, `torch-ecrec up`, `demo` or a user's script give each process an interpreter of its own, as
users do.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from conftest import KEPT
from places import ROOT, SUPPORT

from torch_ecrec.processes.children import Child
from torch_ecrec.processes.fork_server import ForkServer, is_available
from torch_ecrec.processes.supervisor import LOADED
from torch_ecrec.testing.hosts import Host

PATH = f"{ROOT}{os.pathsep}{SUPPORT}"


OWN = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@functools.cache
def _forks(*more: str) -> ForkServer:
    """One that is kept for all tests, with more loaded than servers need."""
    KEPT.append(made := ForkServer((*LOADED, *more), {**os.environ, **OWN}))
    return made


def start(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    inside: Host | None = None,
) -> Child:
    """Starts `python -m module *words`. Its standard input is a pipe.

    Args:
        environment: all that it has, and where our modules are.
        stdout: a file, `subprocess.PIPE`, or None: ours. `stderr`: likewise, no pipe.
        inside: the host that it is on.
    """
    environment = {**environment, "PYTHONPATH": PATH}
    if is_available():
        more = () if module == "torch_ecrec" else ("torchrec", "torch_ecrec.nn.parallel")  # which sets up logging, too
        forks = _forks(*more)
        if inside is not None:
            return inside.fork(forks, module, words, environment, stdout, stderr)
        return forks.start(module, words, environment, stdout, stderr)
    command = [sys.executable, "-m", module, *words]
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr, "env": environment}
    return subprocess.Popen(command, **how) if inside is None else inside.start(command, **how)
