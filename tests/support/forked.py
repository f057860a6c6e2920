"""Processes that tests start, forked from one that has loaded torch, TorchRec and the kernels: each begins at once.

    process = forked.start("cluster_child", [orders], environment, stdout=PIPE, stderr=log)    a module of tests/support
    process = forked.start("torch_ecrec", ["serve", "--join", join], environment, inside=host)  on a host of a test
    forked.call(two_trainers, 2, str(tmp_path))        a function of a test's module, with 0 and 1, and the path

Tests that start torchrun, `torch-ecrec up`, `demo` or a user's script give each process an interpreter of its own, as
users do.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conftest import KEPT, wait_until
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


def begin(
    function: Callable[..., None],
    number: int,
    *words: str,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Child:
    """Calls `function(number, *words)` of a module of the tests in a process; see `start`."""
    orders = json.dumps([inspect.getfile(function), function.__name__, sys.path, words])
    return start("called_child", [orders, str(number)], os.environ, stdout, stderr)


def call(function: Callable[..., None], processes: int, *words: str, limit_s: float = 600.0) -> None:
    """Calls `function(i, *words)` in as many processes, at the same time. The first that fails ends all.

    Raises:
        AssertionError: with what it has printed; or a hang.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        children = []
        for i, log in enumerate(logs):
            child = begin(function, i, *words, stdout=log.fileno(), stderr=log.fileno())
            stack.callback(end, child)
            children.append(child)

        def are_over() -> bool:
            codes = [child.poll() for child in children]
            return any(codes) or None not in codes

        wait_until(are_over, limit_s, f"the end of {function.__name__}")
        for i, (child, log) in enumerate(zip(children, logs, strict=True)):
            log.seek(0)
            assert not child.returncode, f"{function.__name__}({i}) ended with {child.returncode}:\n{log.read()}"


def end(child: Child) -> None:
    """Kills it, and closes what leads to it."""
    child.kill()
    child.wait(60)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
