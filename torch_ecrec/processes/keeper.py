"""A process above another one, torchrun say, that keeps hold of all that descends from it, and ends with all of that.

    python keeper.py COMMAND ARGS...

What a trainer has started, workers of a `DataLoader` or other programs, lives on when the trainer is killed, and has no
parent then. Linux gives it to the nearest ancestor that takes orphans in (a *subreaper*): this process. When the
command has ended, so does what it has left, and then this process, with the same exit code. So it does when its
standard input closes: whoever has started it is gone, however that ended.

It is run as a file and imports nothing of ours, so that it is there at once and wherever it is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TICK_S = 0.01
LIMIT_S = 10.0  # what SIGKILL does not end waits in the kernel, for a disk that does not answer
CANNOT_START = 126  # a shell's
LOST = 1  # the exit code where nobody is left to ask for it


def states_below(root: int) -> dict[int, str]:
    """Returns the processes under `root`, each with its state ("Z": it has ended). Linux only; elsewhere none."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", where the name may hold anything
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append((int(stat.parent.name), state))
    found: dict[int, str] = {}
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += [pid for pid, _ in below]
    return found


def end_below(root: int) -> None:
    """Ends all that descends from a process, which starts nothing more itself: looks until there is nothing."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        found = states_below(root)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if all(state in "ZX" for state in found.values()):
            return
        time.sleep(TICK_S)


def main(command: list[str]) -> int:
    """Runs a command; returns its exit code, as a shell has it, once nothing is left of it."""
    with contextlib.suppress(AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to all processes of a job: it is the last
        if signal.getsignal(number) is not signal.SIG_IGN:  # which what is started here would be given, too
            signal.signal(number, _wake)
    signal.signal(signal.SIGCHLD, _wake)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        lacks = "; see `torch-ecrec doctor --only processes,memory`" if error.errno == errno.EAGAIN else ""
        print(f"torch-ecrec: {command[0]} cannot be started: {error.strerror}{lacks}", file=sys.stderr)
        return CANNOT_START
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 4096):
            end_below(os.getpid())
            return LOST
        if woken in ready:
            os.read(woken, 4096)
            if (status := _reaped().get(process.pid)) is not None:
                end_below(os.getpid())
                _reaped()
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _wake(*_: object) -> None:
    """A signal handler: `select` returns, and no more."""


def _reaped() -> dict[int, int]:
    """Returns how the children have ended that have, orphans too."""
    found = {}
    with contextlib.suppress(ChildProcessError):  # it has none
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
