"""Processes that this one starts: ports for them, torchrun, all that descends from one, and their end.

For those who run trainers: the demonstration, rehearsals, benchmarks. Servers and coordinators have a `Supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from torch_ecrec.processes import keeper

TAIL_LINES = 15
TRACEBACK, ELASTIC = "Traceback (most recent call last)", "torch.distributed.elastic."
# How trainers of one host meet. Left to itself, torchrun tells them the host's name. A container's need not resolve:
# they would ask for it in vain, and say nothing but torch's warnings.
STANDALONE = ("--standalone", "--local-addr", "127.0.0.1")
KEEPER = (sys.executable, "-I", "-S", os.path.abspath(keeper.__file__))
_RANK = re.compile(r"^\[(rank|default)?\d+\]:\s?")  # before each line of a trainer's
# Without the first, torchrun (of torch 2.13) keeps one store for all starts of the trainers, with the addresses of
# those that have ended in it.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def with_own_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which an interpreter (`python -P`) finds modules where this process does, in the same
    order.

    Left to itself, `python -m` looks first in the folder where it is started: a user's `queue.py` there would take the
    place of Python's, which a script in another folder does not see.
    """
    seen = [os.path.abspath(folder or ".") for folder in sys.path if isinstance(folder, str)]
    given = [os.path.abspath(folder) for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    more = [folder for folder in given if folder not in seen]  # that who starts it wants there
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*more, *seen]))}


def script_words(script: Sequence[str]) -> list[str]:
    """Returns what names a script for torchrun: FILE ARGS..., or -m MODULE ARGS...; others stay as they are.

    Behind `--`: else torchrun takes the script's `--n` or `--log` for an option of its own that is written in short,
    which may be one of several, and refuses it.
    """
    own = [word for word in script[:1] if word in ("-m", "--module")]
    rest = script[len(own) :]
    return [*own, *(["--"] if rest and not rest[0].startswith("-") else []), *rest]


class Child(Protocol):
    """A process that this one has had started: a `subprocess.Popen`, or `fork_server.py:Forked`."""

    @property
    def pid(self) -> int:
        """Its number; another's, perhaps, once it has ended."""

    @property
    def returncode(self) -> int | Any:
        """The exit code that `poll` has returned last."""

    @property
    def stdin(self) -> IO[Any] | None:
        """The writing end of a pipe to it, if there is one."""

    @property
    def stdout(self) -> IO[Any] | None:
        """The reading end of a pipe from it, if there is one."""

    def poll(self) -> int | None:
        """Returns the exit code (of a signal: negative), or None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int, /) -> None:
        """Sends a signal, unless it has ended."""

    def terminate(self) -> None:
        """Asks the process to end, by SIGTERM."""

    def kill(self) -> None:
        """Ends the process at once, by SIGKILL."""


@contextlib.contextmanager
def torchrun(
    words: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Trainers under torchrun, on this host; leaving ends them, however many times they were started, and whatever they
    have started themselves. The end of this process does, too, however it ends (`keeper.py`).

    Args:
        words: what follows `torchrun` and how trainers of one host meet.
        log: file for what torchrun and, unless `words` redirect it, the trainers say.
        environment: extra environment.
        cwd: where they run; None: where this process does.

    Yields:
        the process above torchrun, which ends as torchrun does.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*KEEPER, sys.executable, "-P", "-m", "torch.distributed.run", *STANDALONE, *words],
            stdin=subprocess.PIPE,  # closed by the end of this process
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, **FRESH_STORE, **environment},
            start_new_session=True,  # Ctrl-C reaches us, and we end them
        )
    try:
        yield process
    finally:
        end_tree(process)
        if process.stdin is not None:
            process.stdin.close()


def await_end(children: Sequence[Child], limit_s: float) -> None:
    """Waits for processes that were asked to end; those that still run after `limit_s` are killed."""
    deadline = time.monotonic() + limit_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def descendants(root: int) -> list[int]:
    """Processes under `root`. Linux only (/proc); elsewhere none."""
    return list(keeper.states_below(root))


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all under it, at once. They hold nothing that must be saved."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # starts no more
    keeper.end_below(process.pid)
    process.kill()
    process.wait()


def tail(path: Path) -> str:
    """Returns the end of a log; and the last exception in it that is not torchrun's own, which says no more than that a
    child has failed."""
    text = path.read_text(errors="replace") if path.exists() else ""
    told, found = end_of(text, str(path)), reasons(text.splitlines())
    return told if not found or found[-1] in told else f"{told}\nthe last exception of a trainer:\n  {found[-1]}"


def end_of(text: str, name: str) -> str:
    """Returns the last lines of a text, under its name."""
    return "\n".join([f"the end of {name}:", *(f"  {line}" for line in text.splitlines()[-TAIL_LINES:])])


def reasons(lines: Sequence[str]) -> list[str]:
    """Returns the last line of each traceback in a log, in their order: the exceptions of trainers, torchrun's own left
    out."""
    found, within = [], False
    for line in (_RANK.sub("", line) for line in lines):
        if line.startswith(TRACEBACK):
            within = True
        elif within and line and not line[0].isspace():
            within = False
            if not line.startswith(ELASTIC):
                found.append(line)
    return found
