"""One training over several hosts: its cluster, who watches it, and when it is whole."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch_ecrec.demo.chaos.host_events import World
from torch_ecrec.demo.chaos.hosted import COORDINATORS, HostedCluster, lacking
from torch_ecrec.demo.chaos.run import ChaosRun
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import Cluster, Trainers
from torch_ecrec.runtime.threads import log_error
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing.hosts import Host, Hosts
from torch_ecrec.transport.control import ControlClient
from torch_ecrec.transport.etcd import Leader
from torch_ecrec.transport.whereabouts import follow, reach, whereabouts

CONNECT_S = 180.0  # for a coordinator that is started again where its host has come back
START_S = 480.0  # for the first step: all these processes start on one machine
STALL_S = 450.0  # for a step: trainers whose host was lost start again
WHOLE_S = 300.0


class HostsRun(ChaosRun):
    """One training over `arguments.hosts` hosts, and one more from which it is watched. They are there while it runs.

    Args:
        etcd: etcd's server, for coordinators that stand by; None: there is one coordinator.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        code: CodeSpec,
        logs: Path,
        terminal: Terminal,
        etcd: Path | None,
    ) -> None:
        super().__init__(arguments, code, logs, terminal)
        self._etcd = etcd
        self._hosts: Hosts
        self.start_limit_s, self.stall_limit_s, self.whole_limit_s = START_S, STALL_S, WHOLE_S
        self.record.excused = set()
        self._leader: Leader | None = None  # whom the watcher is connected with
        self._leads = ""  # the last one that it was
        self._world = World(
            self.record, code, arguments.hosts, self._host_that_leads, range(1 if etcd is None else COORDINATORS)
        )
        self._over_event = threading.Event()
        self._left_to_lose = code.parities  # slots, at this instant
        self._leaderless = False  # nobody leads for a while, by what came at this instant

    def _host_that_leads(self) -> int:
        return next(host.number for host in self._hosts if host.address == self._leads)

    # the cluster, and watching it ---------------------------------------------------------------

    @property
    def _hosted(self) -> HostedCluster:
        assert isinstance(self._cluster, HostedCluster)
        return self._cluster

    @property
    def _watches_from(self) -> Host:
        """A host that nothing happens to."""
        return self._hosts[self.arguments.hosts]

    def execute(self) -> None:
        with Hosts(self.arguments.hosts + 1) as self._hosts:
            self._leads = self._hosts[0].address
            try:
                super().execute()
            finally:
                self._over_event.set()
                self.release()

    def start_cluster(self) -> Cluster:
        arguments = self.arguments
        cluster = HostedCluster(
            self._hosts, self.code, arguments.spares, arguments.without_spare, self.logs, self.environment, self._etcd
        )
        cluster.leads = lambda: self._leads
        self._where = whereabouts(cluster.join)
        return cluster

    @contextlib.contextmanager
    def start_trainers(self, cluster: Cluster) -> Iterator[Trainers]:
        self._watches_from.within(
            lambda: follow(self._where, self._over_event, lambda: self._leader, self._on_other_leader, log_error)
        )
        with self._hosted.trainers(self.arguments.trainers, self.arguments.max_restarts, self.script()) as trainers:
            yield trainers
        self.release()

    def connect(self) -> None:
        def connect() -> tuple[ControlClient, Leader]:
            return reach(
                self._where,
                CONNECT_S,
                lambda leader, limit_s: ControlClient(*leader.address, self._on_message, self._on_closed, limit_s),
            )

        self.client, self._leader = self._watches_from.within(connect)
        self._leads = self._leader.address[0]
        self.client.send({"type": "watch"})

    def _on_closed(self, reason: str) -> None:
        self._leader = None
        super()._on_closed(reason)

    def _on_other_leader(self, reason: str) -> None:
        """Another leads than the one that is watched, whose host may be gone."""
        self._leader = None
        self.client.close()
        self._on_closed(reason)

    # when ---------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        now_s = time.monotonic()
        self._hosted.look(now_s)
        with self._lock:
            new = [(name, pid) for name, pid in self.record.pids.items() if name not in self._world.where]
        for name, pid in new:
            host = self._hosts.host_of(pid)
            if host is not None:
                self._world.where[name] = host
        super().on_tick()

    def _is_whole(self) -> bool:
        return super()._is_whole() and not self._lacking()

    def _lacking(self) -> str:
        """What is not there again; "": nothing. Called with the lock."""
        if self._under_way:
            return f"{self._under_way[0].entry['event']} is under way"
        if not self._hosted.complete:
            return "a process is not there"
        if self._leader is None:
            return "the coordinator does not answer"
        return lacking(self.record.status, self.code.slots + self.arguments.spares)

    def _lacks(self) -> str:
        with self._lock:
            return f" ({self._lacking() or 'slots or trainers'}){super()._lacks()}"
