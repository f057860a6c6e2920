"""What this process takes of its host, for `torch-ecrec status`: memory, against what it may take at most."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from torch_ecrec.processes.limits import memory_limits, memory_of_host
from torch_ecrec.protocol.status import ProcessReport

HOST_MOST = 200  # characters of a host's name


def footprint(root: Path = Path("/")) -> ProcessReport:
    """Returns what this process takes. What the system does not tell is 0.

    Args:
        root: where /proc and /sys are.
    """
    total, available = memory_of_host(root)
    of = memory_limits(root)
    if total is not None and available is not None:
        of.append((total, total - available))
    limit, used = min(of, key=lambda one: one[0] - one[1], default=(0, 0))  # the one with the least room
    return ProcessReport(host_name(), _resident(root), limit, used)


def room(root: Path = Path("/")) -> tuple[int, int]:
    """Returns the memory that this process may have, and how much of that is in use; (0, 0) if it is not told."""
    report = footprint(root)
    return report.limit_bytes, report.used_bytes


def host_name() -> str:
    """Returns the name of this host, as text: the kernel takes any bytes for one."""
    return socket.gethostname().encode(errors="surrogateescape").decode(errors="replace")[:HOST_MOST]


def _resident(root: Path) -> int:
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
