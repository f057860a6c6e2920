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
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TICK_S = 0.01
LIMIT_S = 10.0  # what SIGKILL does not end waits in the kernel, for a disk that does not answer
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


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    end_below(os.getpid())
    os._exit(LOST)


def main(command: list[str]) -> int:
    """Runs a command; returns its exit code, as a shell has it, once nothing is left of it."""
    with contextlib.suppress(AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to all processes of a job: it is the last
        if signal.getsignal(number) is not signal.SIG_IGN:  # which what is started here would be given, too
            signal.signal(number, lambda *_: None)
    nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    started = os.posix_spawn(command[0], command, os.environ, file_actions=nothing)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        ended, status = os.wait()  # also orphans
        if ended == started:
            end_below(os.getpid())
            with contextlib.suppress(ChildProcessError):  # until it has none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
