"""What this process takes of its host, for `torch-ecrec status`: memory, against what it may take at most."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from torch_ecrec.protocol.status import ProcessReport

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 of control groups says about 2**63 where there is no limit
HOST_MOST = 200  # characters of a host's name


def footprint(proc: Path = PROC, groups: Path = GROUPS) -> ProcessReport:
    """Returns what this process takes. What the system does not tell is 0.

    Args:
        proc: where the kernel tells of processes and memory.
        groups: where it tells of control groups, of either version.
    """
    of = [one for one in (_of_host(proc), *_of_groups(proc, groups)) if one[0]]
    limit, used = min(of, key=lambda one: one[0] - one[1], default=(0, 0))  # the one with the least room
    return ProcessReport(host_name(), _resident(proc), limit, used)


def host_name() -> str:
    """Returns the name of this host, as text: the kernel takes any bytes for one."""
    return socket.gethostname().encode(errors="surrogateescape").decode(errors="replace")[:HOST_MOST]


def _resident(proc: Path) -> int:
    try:
        return int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _of_host(proc: Path) -> tuple[int, int]:
    """Limit and use of the host's memory."""
    found = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            found[name] = int(size.split()[0]) * 1024
        return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]
    except (OSError, ValueError, IndexError, KeyError):
        return 0, 0


def _of_groups(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """Limit and use of each control group with a limit that this process is in, in its own view of them."""
    found = []
    for folder in _folders(proc, groups):
        for limits, uses, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limits)
            if 0 < limit < UNLIMITED:  # what the kernel would drop before it ends a process is free
                found.append((limit, max(_number(folder / uses) - _stat(folder / "memory.stat", idle), 0)))
    return found


def _folders(proc: Path, groups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        root = groups if not controllers else groups / "memory"
        if not controllers or "memory" in controllers.split(","):
            own = root / path.lstrip("/")
            found += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return found


def _number(file: Path) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0  # "max": no limit


def _stat(file: Path, name: str) -> int:
    try:
        found = dict(line.split(None, 1) for line in file.read_text().splitlines() if " " in line)
        return int(found.get(name, 0))
    except (OSError, ValueError):
        return 0
