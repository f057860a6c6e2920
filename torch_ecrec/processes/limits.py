"""What this process may have of its host, as Linux tells it: memory, cores, threads.

Control groups of both versions count, those above the own one too: a container's limit is at any of them. What is read
below /proc and /sys is read below `root`, so that tests can say what is there. What is not told is left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

UNLIMITED_BYTES = 1 << 60  # a limit of this size is none: version 1 of control groups says 2^63 less a page


def explained(error: Exception) -> Exception:
    """Returns the error with what to do, if it is a limit of this process that names no file; else the error itself."""
    if str(error) == "can't start new thread" or _is(error, errno.EAGAIN):
        what = "no process or thread can be started: there are as many as `ulimit -u`, or a control group, lets be"
        return OSError(f"{what}, or `ulimit -v` leaves no memory; `torch-ecrec doctor --only processes,memory` says it")
    if _is(error, errno.EMFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        doctor = "`torch-ecrec doctor --only open-files` says how many it takes"
        return OSError(f"{os.strerror(errno.EMFILE)}: this process may have {soft} (`ulimit -n`); {doctor}")
    return error


def _is(error: Exception, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number and error.filename is None


def memory_of_host(root: Path) -> tuple[int | None, int | None]:
    """Returns the memory of the host and what is available of it, in bytes; None: it is not known."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    return fields.get("MemTotal"), fields.get("MemAvailable")


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of the control groups that this process is in, for a controller, from its own upward.

    Within a container the path that the kernel tells may be one of the host, which is not there: then what is mounted
    is the container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, names, inside = line.split(":", 2)
        if not names:
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in names.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top / inside.strip("/")
        while folder != top and top in folder.parents:
            if folder.is_dir():
                yield version, folder
            folder = folder.parent
        yield version, top


def _number(path: Path) -> int | None:
    """Returns the number in a file; None: there is no such file, or it says "max"."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def pids_limits(root: Path) -> list[tuple[int, int]]:
    """Returns the limits of processes and threads of the control groups, and how many each has now."""
    found = [(_number(folder / "pids.max"), _number(folder / "pids.current")) for _, folder in _groups("pids", root)]
    return [(limit, now or 0) for limit, now in found if limit is not None]


def memory_limits(root: Path) -> list[tuple[int, int]]:
    """Returns the limits of memory of the control groups, and what each has in use, in bytes.

    What files have been read is not in use: the kernel drops it when the memory is wanted.
    """
    found = []
    for version, folder in _groups("memory", root):
        limit_name, use_name, file_name = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        limit, used = _number(folder / limit_name), _number(folder / use_name)
        if limit is not None and limit < UNLIMITED_BYTES:
            dropped = 0
            with contextlib.suppress(OSError, ValueError):
                stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
                dropped = int(stat.get(file_name, 0))
            found.append((limit, max((used or 0) - dropped, 0)))
    return found


def cpu_quota(root: Path) -> float | None:
    """Returns how many cores the control groups give; None: as many as there are."""
    found = []
    for version, folder in _groups("cpu", root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()[:2]
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # else ValueError of "max"; version 1 says -1
                found.append(int(quota) / int(period))
    return min(found, default=None)
