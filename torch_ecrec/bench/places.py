"""The place in which a benchmark's processes run: this machine as it is, or several hosts made of it.

    Here()                      one host: processes share memory, and what they send goes over the loopback interface
    OnHosts(5, 1e9)             five hosts with links of 1 Gbit/s: network namespaces (`testing/hosts.py`)
    Apart(code, 1, 2, etcd)     each process on a host of its own, services that are started again, one spare, two
                                trainers; hosts and links may be taken

On `OnHosts` trainers are dealt out to hosts from the first on, servers from the last on, the coordinator is on the
first. So with 2 trainers and 3 servers each process has a host of its own on 5 hosts, and on 3 hosts two have a trainer
and a server. All parts that run at once are on the same hosts: those that do not have their turn send heartbeats.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from torch_ecrec.demo.chaos.hosted import COORDINATORS, MEETING_PORT, Homes, HostedCluster
from torch_ecrec.processes.children import Child, free_port, with_own_path
from torch_ecrec.processes.nodes import INTERFACE_VARIABLES
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Host, Hosts

T = TypeVar("T")

PORTS = range(29400, 32000)  # of coordinators and of trainers that meet, one after the other: hosts are ours alone
LOOK_S = 0.2  # between two looks at whether a service has ended


def require_hosts() -> None:
    """Raises ValueError, with the reason, if hosts cannot be made here."""
    reason = kit.unavailable()
    require(not reason, f"`--hosts`: {reason}")


def _meeting_on(host: Host, port: int) -> dict[str, str]:
    """Returns the environment of trainers that meet on a host."""
    return {"MASTER_ADDR": host.address, "MASTER_PORT": str(port), **dict.fromkeys(INTERFACE_VARIABLES, "eth0")}


class Here:
    """This machine, as a place for processes. Use as a context manager.

    Attributes:
        takes_hosts: servers are taken together with their hosts, so that losses are no trouble.
    """

    takes_hosts = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: BaseException | TracebackType | type[BaseException] | None) -> None:
        """Does nothing: there is nothing to end."""

    def cluster(
        self,
        code: CodeSpec,
        logs: Path,
        settings: Mapping[str, str],
        coordinator: Sequence[str] = (),
        spares: int = 0,
        restart: bool = True,
    ) -> Any:
        """Returns a coordinator and servers, as a context manager: a `Supervisor`, whose arguments it takes.

        On `Apart` it is another class.
        """
        return Supervisor(code, spares, restart=restart, logs=logs, environment=dict(settings), coordinator=coordinator)

    def look(self, cluster: Any) -> None:
        """Called many times a second by whoever waits: restarts what must be restarted."""

    def complete(self, cluster: Any) -> bool:
        """Returns whether all that is to run there does, as far as is known."""
        return True

    def within(self, action: Callable[[], T]) -> T:
        """Calls a function from where the cluster can be watched."""
        return action()

    def meeting(self) -> dict[str, str]:
        """Returns the environment that tells the trainers of one mode where they meet."""
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def local(self, rank: int, trainers: int) -> dict[str, str]:
        """Returns the environment that tells a trainer its number on its host, and how many there are."""
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(trainers)}

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Starts a trainer. `more`: arguments of `subprocess.Popen`."""
        return subprocess.Popen(command, text=True, **more)

    def bytes_sent(self) -> int:
        """Returns the bytes sent over the loopback interface so far."""
        interfaces = psutil.net_io_counters(pernic=True)
        return int(interfaces["lo"].bytes_sent) if "lo" in interfaces else 0


class OnHosts(Here):
    """Several hosts. Use as a context manager: leaving ends all that runs there, in every case.

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
        self._limit(self.hosts, bits_per_s)

    def _limit(self, hosts: Iterable[Host], bits_per_s: float) -> None:
        try:
            for host in hosts if bits_per_s else ():
                host.link(bits_per_s=bits_per_s)
        except BaseException:
            self.hosts.close()
            raise

    def __exit__(self, *_: BaseException | TracebackType | type[BaseException] | None) -> None:
        self.hosts.close()

    def cluster(
        self,
        code: CodeSpec,
        logs: Path,
        settings: Mapping[str, str],
        coordinator: Sequence[str] = (),
        spares: int = 0,
        restart: bool = True,
    ) -> Any:
        return _Spread(
            self.hosts,
            code,
            spares,
            host=self.hosts[0].address,
            port=next(self._ports),
            restart=restart,
            logs=logs,
            environment=dict(settings),
            coordinator=coordinator,
        )

    def within(self, action: Callable[[], T]) -> T:
        return self.hosts[0].within(action)

    def meeting(self) -> dict[str, str]:
        return _meeting_on(self.hosts[0], next(self._ports))

    def local(self, rank: int, trainers: int) -> dict[str, str]:
        beside = range(rank % len(self.hosts), trainers, len(self.hosts))
        return {"LOCAL_RANK": str(rank // len(self.hosts)), "LOCAL_WORLD_SIZE": str(len(beside))}

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        return self.hosts[rank % len(self.hosts)].start(command, text=True, **more)

    def bytes_sent(self) -> int:
        """Returns the bytes that have left all hosts so far."""
        return sum(host.bytes_sent() for host in self.hosts)


class _Spread(Supervisor):
    """A cluster whose servers are spread over hosts, from the last one on."""

    def __init__(self, hosts: Hosts, code: CodeSpec, spares: int, **more: Any) -> None:
        self._hosts, self._servers = hosts, itertools.count(1)
        super().__init__(code, spares, **more)

    def start_child(self, name: str, arguments: list[str], stdout: int | None, stderr: int | None) -> Child:
        number = 0 if name == "coordinator" else -next(self._servers) % len(self._hosts)
        if self._forks is not None:
            return self._hosts[number].fork(self._forks, "torch_ecrec", arguments, self.environment, stdout, stderr)
        command = [sys.executable, "-P", "-m", "torch_ecrec", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": stderr}
        return self._hosts[number].start(command, env=with_own_path(self.environment), start_new_session=True, **pipes)

    def status(self) -> Status:
        return self._hosts[0].within(super().status)


class Apart(OnHosts):
    """A host for each process, and one from which they are watched. Use as a context manager, for one cluster.

    Args:
        code: of the cluster.
        spares: servers in reserve.
        trainers: how many there are.
        etcd: etcd's server, for coordinators that are elected, each on a host of its own, as etcd is; None: there is
            one coordinator.
        server_bits_per_s: of the link of each server's host, in each direction; 0: without limit.
    """

    takes_hosts = True

    def __init__(
        self, code: CodeSpec, spares: int, trainers: int, etcd: Path | None, server_bits_per_s: float = 0.0
    ) -> None:
        sizes = (COORDINATORS if etcd else 0, COORDINATORS if etcd else 1, code.slots + spares, trainers)
        firsts = list(itertools.accumulate(sizes, initial=0))
        of_etcd, of_coordinators, of_servers, self._trainers = (
            range(first, last) for first, last in itertools.pairwise(firsts)
        )
        super().__init__(firsts[-1] + 1)
        self._limit([self.hosts[number] for number in of_servers], server_bits_per_s)
        self._etcd, self._homes = etcd, Homes(of_servers, of_coordinators, of_etcd)
        self._looked_s = 0.0
        self.looks = True  # what has ended is started again

    def cluster(
        self,
        code: CodeSpec,
        logs: Path,
        settings: Mapping[str, str],
        coordinator: Sequence[str] = (),
        spares: int = 0,
        restart: bool = True,
    ) -> HostedCluster:
        assert not coordinator and restart, "a service is what it is"
        etcd_times = ()  # its own: nothing happens to it here
        return HostedCluster(self.hosts, code, spares, "survivor", logs, settings, self._etcd, self._homes, etcd_times)

    def look(self, cluster: HostedCluster) -> None:
        now_s = time.monotonic()
        if self.looks and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            cluster.look(now_s)

    def complete(self, cluster: HostedCluster) -> bool:
        return cluster.complete

    @property
    def watches_from(self) -> Host:
        """The host from which processes are watched, and to which nothing happens."""
        return self.hosts[len(self.hosts) - 1]

    def within(self, action: Callable[[], T]) -> T:
        return self.watches_from.within(action)

    def meeting(self) -> dict[str, str]:
        return _meeting_on(self.hosts[self._trainers[0]], MEETING_PORT)

    def local(self, rank: int, trainers: int) -> dict[str, str]:
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        return self.hosts[self._trainers[rank]].start(command, text=True, **more)
