"""A limit on the CPU time of some processes together, by a control group of Linux: version 1 or 2, and as root.

with CpuQuota(0.5) as quota:      # half a core, for all of them
    quota.take(pids)
    ...
    quota.times_met()             # how often they have had to wait for it
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_US = 20_000  # of a quota: a step waits for a few of them, not for one long pause
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_numbers = itertools.count()


def _root() -> Path | None:
    """Returns where control groups that limit CPU time are made; None: there is no such place."""
    if (V1 / "cpu.cfs_quota_us").exists():
        return V1
    with contextlib.suppress(OSError):
        if "cpu" in (V2 / "cgroup.subtree_control").read_text().split():
            return V2
    return None


def unavailable() -> str:
    """Returns why CPU time cannot be limited here; "": it can be."""
    root = _root()
    if root is None:
        return "there is no control group for CPU time (/sys/fs/cgroup)"
    if not os.access(root, os.W_OK):
        return f"{root} cannot be written: it takes root"
    return ""


class CpuQuota:
    """So many cores for all processes that it takes. Leaving it gives them back to the group above.

    Args:
        cores: more than 0.

    Raises:
        OSError: no group can be made.
        RuntimeError: there is nothing to make one with (`unavailable`).
    """

    def __init__(self, cores: float) -> None:
        root = _root()
        if root is None:
            raise RuntimeError(unavailable())
        self._root, self._path = root, root / f"torch-ecrec-{os.getpid()}-{next(_numbers)}"
        self._path.mkdir()
        quota_us = round(cores * PERIOD_US)
        try:
            if root == V1:
                (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._path / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (self._path / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError:
            self._path.rmdir()
            raise

    def take(self, pids: Iterable[int]) -> None:
        """Limits these processes, with all their threads. Those that have ended are passed over."""
        self._move(self._path, pids)

    def times_met(self) -> int:
        """Returns in how many periods they had to wait."""
        lines = dict(line.split() for line in (self._path / "cpu.stat").read_text().splitlines())
        return int(lines["nr_throttled"])

    @staticmethod
    def _move(group: Path, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Frees its processes, and removes the group. May be called again."""
        while self._path.exists():
            self._move(self._root, map(int, (self._path / "cgroup.procs").read_text().split()))
            with contextlib.suppress(OSError):  # one was forked meanwhile
                self._path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: BaseException | TracebackType | type[BaseException] | None) -> None:
        self.close()
