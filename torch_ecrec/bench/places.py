"""Where the processes of a benchmark's systems run: on this machine as it is, or on several hosts made of it.

    Here()                      one host: processes share memory, and what they send goes over the loopback interface
    OnHosts(5, 1e9)             five hosts with links of 1 Gbit/s: network namespaces (`testing/hosts.py`)

Trainers are dealt out to hosts from the first on, servers from the last on, the coordinator is on the first. So with 2
trainers and 3 servers each process has a host of its own on 5 hosts, and on 3 hosts two have a trainer and a server.
All systems of a run are on the same hosts: those that do not have their turn send heartbeats.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from torch_ecrec.processes.children import Child, free_port, with_own_path
from torch_ecrec.processes.nodes import INTERFACE_VARIABLES
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Host, Hosts

PORTS = range(29400, 32000)  # of coordinators and of trainers that meet, one after the other: hosts are ours alone


def require_hosts() -> None:
    """Raises ValueError, with the reason, where `OnHosts` cannot be."""
    reason = kit.unavailable()
    require(not reason, f"`--hosts`: {reason}")


def meeting_on(host: Host, port: int) -> dict[str, str]:
    """Environment of trainers that meet on a host."""
    return {"MASTER_ADDR": host.address, "MASTER_PORT": str(port), **dict.fromkeys(INTERFACE_VARIABLES, "eth0")}


class Here:
    """This machine. Use as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: BaseException | TracebackType | type[BaseException] | None) -> None:
        """Nothing is to be ended."""

    def cluster(self, code: CodeSpec, logs: Path, settings: dict[str, str], coordinator: Sequence[str]) -> Supervisor:
        """A coordinator and servers. Arguments: as for `Supervisor`."""
        return Supervisor(code, logs=logs, environment=settings, coordinator=coordinator)

    def meeting(self) -> dict[str, str]:
        """Environment of the trainers of one system: where they meet."""
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def local(self, rank: int, trainers: int) -> dict[str, str]:
        """Environment of one of them: which it is on its host, and how many there are."""
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(trainers)}

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Starts a trainer. Arguments: `more` of `subprocess.Popen`."""
        return subprocess.Popen(command, text=True, **more)

    def bytes_sent(self) -> int:
        """What went over the loopback interface so far."""
        interfaces = psutil.net_io_counters(pernic=True)
        return int(interfaces["lo"].bytes_sent) if "lo" in interfaces else 0


class OnHosts(Here):
    """Several hosts. Use as a context manager: leaving ends all that runs there, however it was left.

    Args:
        count: of hosts.
        bits_per_s: of each host's link, in each direction; 0: without limit.

    Raises:
        ValueError: hosts cannot be made here.
    """

    def __init__(self, count: int, bits_per_s: float = 0.0) -> None:
        require_hosts()
        self._ports = iter(PORTS)
        self.hosts = Hosts(count)
        try:
            for host in self.hosts if bits_per_s else ():
                host.link(bits_per_s=bits_per_s)
        except BaseException:
            self.hosts.close()
            raise

    def __exit__(self, *_: BaseException | TracebackType | type[BaseException] | None) -> None:
        self.hosts.close()

    def cluster(self, code: CodeSpec, logs: Path, settings: dict[str, str], coordinator: Sequence[str]) -> Supervisor:
        return _Spread(self.hosts, next(self._ports), code, logs, settings, coordinator)

    def meeting(self) -> dict[str, str]:
        return meeting_on(self.hosts[0], next(self._ports))

    def local(self, rank: int, trainers: int) -> dict[str, str]:
        beside = range(rank % len(self.hosts), trainers, len(self.hosts))
        return {"LOCAL_RANK": str(rank // len(self.hosts)), "LOCAL_WORLD_SIZE": str(len(beside))}

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        return self.hosts[rank % len(self.hosts)].start(command, text=True, **more)

    def bytes_sent(self) -> int:
        """What left all hosts so far."""
        return sum(host.bytes_sent() for host in self.hosts)


class _Spread(Supervisor):
    """A cluster whose servers are on hosts from the last on."""

    def __init__(
        self,
        hosts: Hosts,
        port: int,
        code: CodeSpec,
        logs: Path,
        settings: dict[str, str],
        coordinator: Sequence[str],
    ) -> None:
        self._hosts, self._servers = hosts, itertools.count(1)
        more = {"environment": settings, "logs": logs, "coordinator": coordinator}
        super().__init__(code, host=hosts[0].address, port=port, **more)  # type: ignore[arg-type]

    def start_child(self, name: str, arguments: list[str], stdout: int | None, stderr: int | None) -> Child:
        number = 0 if name == "coordinator" else -next(self._servers) % len(self._hosts)
        if self._forks is not None:
            return self._hosts[number].fork(self._forks, "torch_ecrec", arguments, self.environment, stdout, stderr)
        command = [sys.executable, "-P", "-m", "torch_ecrec", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr}
        return self._hosts[number].start(command, env=with_own_path(self.environment), start_new_session=True, **pipes)

    def status(self) -> Status:
        return self._hosts[0].within(super().status)
