"""The table of checks, and how they are run.

    findings = examine(asked)

Most checks run at the same time. Those that measure (`alone`) come afterwards, one by one, since what else computes
would be in what they measure. A check that has not ended within its limit, or that raises, gives a finding that says
so; it cannot be stopped, so its thread is left behind, and the process may end all the same.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch_ecrec.doctor import cluster, link, machine, software, store
from torch_ecrec.doctor.findings import Finding
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import Settings

LOOK_S = 0.1
LINE_MOST = 78  # on a narrow terminal a longer line would wrap, and stay
CLEAR = "\r\x1b[K"  # the line of a terminal


@dataclass(frozen=True)
class Asked:
    """Says what is to be examined, and for which cluster.

    Args:
        settings: of this process; without those that are wrong.
        wrong: why each of these is, by the name of its variable.
        join: the coordinator, or etcd's address; "": none.
        checkpoint: the URL of a store; "": none.
        to: where another host's doctor listens; "": nowhere.
        members: processes of the whole cluster. `here`: those of them on this host.
        root: where /proc and /sys are.
    """

    settings: Settings = field(default_factory=Settings)
    wrong: dict[str, str] = field(default_factory=dict)
    join: str = ""
    checkpoint: str = ""
    to: str = ""
    members: int = 8
    here: int = 8
    root: Path = Path("/")


@dataclass(frozen=True)
class Check:
    """A check of the table.

    Args:
        name: for people.
        run: gives its findings.
        limit_s: it is taken for hanging after so long.
        alone: it measures, and nothing else runs meanwhile.
    """

    name: str
    run: Callable[[Asked], Sequence[Finding]]
    limit_s: float = 10.0
    alone: bool = False


CHECKS = (  # in the order of what is printed
    Check("python", lambda asked: [software.python()]),
    Check("packages", lambda asked: software.packages(), software.LOAD_S + 10),
    Check("kernels", lambda asked: [software.kernels()], software.LOAD_S + 10),
    Check("settings", lambda asked: software.settings(asked.settings, asked.wrong)),
    Check("shared-memory", lambda asked: machine.shared_memory(asked.settings)),
    Check("open-files", lambda asked: [machine.open_files(asked.members)]),
    Check("processes", lambda asked: [machine.processes(asked.here, asked.root)]),
    Check(
        "memory",
        lambda asked: [machine.memory(asked.settings, asked.here, asked.root), *machine.addresses(asked.settings)],
    ),
    Check("cores", lambda asked: [machine.cores(asked.here, asked.root)]),
    Check("host-name", lambda asked: [machine.host_name()]),
    Check("checkpoints", lambda asked: store.place(asked.checkpoint), store.LIMIT_S + 10),
    Check("coordinator", lambda asked: cluster.coordinator(asked.join), cluster.LIMIT_S, alone=True),
    Check("link", lambda asked: link.to_host(asked.to, asked.settings), link.CALL_S + 10, alone=True),
)


def named(text: str) -> list[Check]:
    """Returns the checks with these names, "coordinator,link", in the order of the table; of "", all of them.

    Raises:
        ValueError: there is no check of such a name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [one.name for one in CHECKS]
    for name in names:
        require(name in known, f"there is no check {name!r}; there are: {', '.join(known)}")
    return [one for one in CHECKS if not names or one.name in names]


def examine(asked: Asked, checks: Sequence[Check] = CHECKS, terminal: IO[str] | None = None) -> list[Finding]:
    """Runs the checks; returns all their findings, in the order of the table.

    Args:
        terminal: is told which checks run, in one line that is removed in the end; None: nobody is.
    """
    found: dict[str, Sequence[Finding]] = {}
    together = [one for one in checks if not one.alone]
    for some in (together, *([one] for one in checks if one.alone)):
        found |= _run(some, asked, terminal)
    if terminal is not None:
        print(CLEAR, end="", file=terminal, flush=True)
    return [finding for one in checks for finding in found[one.name]]


def _run(checks: Sequence[Check], asked: Asked, terminal: IO[str] | None) -> dict[str, Sequence[Finding]]:
    ended: queue.SimpleQueue[tuple[str, Sequence[Finding]]] = queue.SimpleQueue()
    began_s = time.monotonic()
    for check in checks:
        Worker(_work(check, asked, ended), f"doctor: {check.name}", log_error).start()
    found: dict[str, Sequence[Finding]] = {}
    left = {check.name: check for check in checks}
    told = ""
    while left:
        if terminal is not None and told != (told := f"checks: {', '.join(left)} ..."[:LINE_MOST]):
            print(f"{CLEAR}{told}", end="", file=terminal, flush=True)
        try:
            name, findings = ended.get(timeout=LOOK_S)
        except queue.Empty:
            passed_s = time.monotonic() - began_s
            for hung in [one for one in left.values() if passed_s > one.limit_s]:
                found[left.pop(hung.name).name] = [_hung(hung)]
        else:
            if left.pop(name, None) is not None:  # else it was given up
                found[name] = findings
    return found


def _work(check: Check, asked: Asked, ended: queue.SimpleQueue[tuple[str, Sequence[Finding]]]) -> Callable[[], None]:
    def work() -> None:
        try:
            findings = check.run(asked)
        except Exception as error:  # the seam: a check that fails is a finding, and no end of the others
            findings = [_failed(check, error)]
        ended.put((check.name, findings))

    return work


def _hung(check: Check) -> Finding:
    return Finding(
        check.name,
        "ERROR",
        f"this check hangs: it has not ended within {check.limit_s:g} s",
        "an answer",
        "look at what it asks (a file system, a name server, a network that drops packets), and run doctor again",
    )


def _failed(check: Check, error: Exception) -> Finding:
    return Finding(
        check.name,
        "ERROR",
        f"this check itself failed: {type(error).__name__}: {error}",
        "a finding",
        "report it, with this line, as an error of torch-ecrec",
    )


def terminal_of(stream: IO[str] = sys.stderr) -> IO[str] | None:
    """Returns the stream if it is a terminal; else None."""
    return stream if stream.isatty() else None
