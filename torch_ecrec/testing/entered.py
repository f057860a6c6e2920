"""`python -m torch_ecrec.testing.entered PID MODULE ARGUMENTS`: what `python -m MODULE ARGUMENTS` would be, on a host.

PID is of the process that keeps it there. For processes that are forked (`processes/fork_server.py`), where `nsenter`
cannot come first.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys


def enter(pid: int) -> None:
    """Takes this thread to the host of a process, as `hosts.py` makes them. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc"):
        with open(f"/proc/{pid}/ns/{kind}") as space:
            if libc.setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    """See above. It has one thread yet."""
    pid, module, *arguments = sys.argv[1:]
    enter(int(pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
