"""One training over several hosts, disturbed at random: its cluster, its watch, and the events of hosts, links,
coordinators and etcd, beside those of one host (`run.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.demo.chaos import disturbances, host_events
from torch_ecrec.demo.chaos.host_events import World
from torch_ecrec.demo.chaos.hosted import COORDINATORS, MEETING_PORT, PORT, HostedCluster, Service, lacking
from torch_ecrec.demo.chaos.run import ChaosRun, send
from torch_ecrec.demo.chaos.schedule import role_of
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import Cluster, Trainers, example
from torch_ecrec.processes.children import end_tree
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing.hosts import Host, Hosts
from torch_ecrec.transport.etcd import EtcdKeys, EtcdUnavailable, Leader, Place

CONNECT_S = 180.0  # for a coordinator that is started again where its host has come back
START_S = 480.0  # for the first step: all these processes start on one machine
STALL_S = 450.0  # for a step: trainers whose host was lost start again
WHOLE_S = 300.0
ASK_ETCD_S = 1.0


class HostsChaos(ChaosRun):
    """One disturbed training over `arguments.hosts` hosts. It is watched from one more host.

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
        self.connect_s = CONNECT_S
        self.record.excused = set()
        self._world = World(
            self.record, code, arguments.hosts, self._host_that_leads, range(1 if etcd is None else COORDINATORS)
        )

    @property
    def _leads(self) -> str:
        """The address of the coordinator that led last, as far as is known."""
        return (self.watch.address if self.watch is not None else "") or self._hosts[0].address

    @property
    def _leader(self) -> Leader | None:
        """The coordinator with which this process is connected; None if it is with none."""
        return None if self.watch is None else self.watch.leader

    def _host_that_leads(self) -> int:
        return next(host.number for host in self._hosts if host.address == self._leads)

    # the cluster, and watching it ---------------------------------------------------------------

    @property
    def _hosted(self) -> HostedCluster:
        assert isinstance(self._cluster, HostedCluster)
        return self._cluster

    @property
    def _watches_from(self) -> Host:
        """The host from which training is watched, and which no event hits."""
        return self._hosts[self.arguments.hosts]

    def execute(self) -> None:
        with Hosts(self.arguments.hosts + 1) as self._hosts:
            try:
                super().execute()
            finally:
                self.release()

    def within(self, action: Callable[[], None]) -> None:
        self._watches_from.within(action)

    def start_cluster(self) -> Cluster:
        arguments = self.arguments
        cluster = HostedCluster(
            self._hosts, self.code, arguments.spares, arguments.without_spare, self.logs, self.environment, self._etcd
        )
        cluster.leads = lambda: self._leads
        return cluster

    @contextlib.contextmanager
    def start_trainers(self, cluster: Cluster) -> Iterator[Trainers]:
        with self._hosted.trainers(self.arguments.trainers, self.arguments.max_restarts, self.script()) as trainers:
            yield trainers
        self.release()

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

    def _lacks(self) -> list[str]:
        found = super()._lacks()
        if not self._hosted.complete:
            found.append("a process is not there")
        if self._leader is None:
            found.append("the coordinator does not answer")
        elif why := lacking(self.record.status, self.code.slots + self.arguments.spares):
            found.append(why)
        return found

    # what happens -------------------------------------------------------------------------------

    def _action_of(self, kind: str) -> Callable[[str, float], None]:
        actions: dict[str, Callable[[str, float], None]] = {
            "kill-host": self._kill_host,
            "cut": self._cut,
            "cut-trainers": self._cut,
            "slow-link": self._bad_link,
            "lossy-link": self._bad_link,
            "kill-leader": self._take_leader,
            "stop-leader": self._take_leader,
            "kill-etcd": self._take_etcd,
            "stop-etcd": self._take_etcd,
            "blip": self._blip,
            "unplug-coordinator": self._unplug_coordinator,
            "wrong-coordinator": self._wrong_coordinator,
        }
        if self._etcd is not None:
            actions["kill-coordinator"] = self._kill_a_coordinator
        return actions.get(kind) or super()._action_of(kind)

    def _excuse(self, names: Collection[str]) -> None:
        """Notes that these members may be lost now. Called with the lock."""
        self.record.excused = {*(self.record.excused or ()), *names}

    @property
    def _alive(self) -> list[int]:
        return [host.number for host in self._hosts if host.alive and host is not self._watches_from]

    def _kill_host(self, kind: str, since_s: float) -> None:
        world, record = self._world, self.record
        with self._lock:
            hosts = world.may_die(self._left_to_lose, self._alive)
            if not hosts:
                return
            host, length_s = self._random.choice(hosts), self._random.choice(host_events.AWAY_S)
            there, time_s = world.on(host), time.time()
            self._left_to_lose -= len(world.slots_on(host))
            self._excuse(world.lost_with(host))
            for slot in world.slots_on(host):
                record.on_kill(kind, "server", slot, time_s)
            for rank in world.ranks_on(host):
                record.on_kill(kind, "trainer", rank, time_s)
            if self._hosted.leader.host == host:
                self._leaderless = True
                self._on_kill_of_leader(kind, time_s)
            self._hit.update(there)
            killed = self._hosted.kill_host(host, time.monotonic() + length_s)

            def felt() -> str:
                with self._lock:
                    found = world.felt_of_loss(there, time_s)
                return found and f"{killed} processes were killed; {found}"

            self._begin(kind, host, f"host {host} ({', '.join(there)})", since_s, length_s, felt, lambda: None)

    def _on_kill_of_leader(self, kind: str, time_s: float) -> None:
        self._hit.add("coordinator")
        self.record.pids["coordinator"] = self._hosted.coordinator.pid
        self.record.on_kill(kind, "coordinator", 0, time_s)

    def _cut(self, kind: str, since_s: float) -> None:
        world, trainers = self._world, kind == "cut-trainers"
        with self._lock:
            pairs = world.may_be_cut(self._left_to_lose, self._alive, trainers)
            if not pairs:
                return
            one, other = self._random.choice(pairs)
            one_way = self._random.random() < 0.5
            length_s = self._random.choice(host_events.CUT_TRAINERS_S if trainers else host_events.CUT_S)
            self._left_to_lose -= max(len(world.slots_on(one)), len(world.slots_on(other)))
            names = world.lost_by_cut(one, other)
            self._excuse(names)
            at_ends, before = {*world.on(one), *world.on(other)}, set(self.record.lost)
            self._hit.update(at_ends)

            def felt() -> str:
                with self._lock:
                    if trainers:
                        return world.felt_as_unresolved(one, other)
                    return world.felt_of_cut(one, other, at_ends, before)

            def end() -> None:
                self._hosts[one].reach(self._hosts[other])
                self._hosts[other].reach(self._hosts[one])

            what = f"from host {one} to host {other}" if one_way else f"between hosts {one} and {other}"
            self._begin(kind, [one, other], what, since_s, length_s, felt, end)
        (self._hosts.cut_one_way if one_way else self._hosts.cut)(one, other)

    def _bad_link(self, kind: str, since_s: float) -> None:
        how: dict[str, float] = self._random.choice(host_events.SLOW if kind == "slow-link" else host_events.LOSSY)
        with self._lock:
            hosts = self._world.busy(self._alive)
        if not hosts:
            return
        number = self._random.choice(hosts)
        host, length_s = self._hosts[number], self._random.choice(host_events.LINK_S)
        host.link(**how, seed=self.arguments.seed)

        def felt() -> str:
            met = host.held_up() if host.alive else 0
            return f"{met} packets were held up or lost" if met >= host_events.MET_LEAST else ""

        told = ", ".join(f"{name} {value:g}" for name, value in how.items())
        with self._lock:
            if self._leaderless:  # who is behind it may be late at the next coordinator
                self._excuse(self._world.lost_with(number))
            self._begin(kind, number, f"host {number} ({told})", since_s, length_s, felt, host.link)

    # nobody dies -----------------------------------------------------------------------------------

    def _blip(self, kind: str, since_s: float) -> None:
        """Takes the network from hosts that together have more slots than the code repairs, for a moment."""
        with self._lock:
            hosts = [number for number in self._alive if number != self._hosted.leader.host]
            sets = [
                chosen
                for count in range(1, len(hosts) + 1)
                for chosen in itertools.combinations(hosts, count)
                if sum(len(self._world.slots_on(host)) for host in chosen) > self.code.parities
            ]
            if not sets:
                return
            chosen = self._random.choice(sets)
            length_s = self._random.choice(host_events.BLIP_S)
            self._unplug(kind, chosen, [name for host in chosen for name in self._world.on(host)], since_s, length_s)

    def _unplug_coordinator(self, kind: str, since_s: float) -> None:
        """Takes the network from the leader's host, for longer than a lease."""
        with self._lock:
            host = self._hosted.leader.host
            length_s = self._lease_s + self._random.choice(host_events.UNPLUG_S)
            if self._etcd is not None:  # another leads, and may place what is there elsewhere
                self._on_kill_of_leader(kind, time.time())
                self._excuse(self._world.on(host))
            self._unplug(kind, [host], (), since_s, length_s)

    def _unplug(self, kind: str, hosts: Sequence[int], names: Sequence[str], since_s: float, length_s: float) -> None:
        """Takes the network from hosts. Called with the lock.

        `names`: the members that must be silent then. If there are none, the coordinator must be.
        """
        began_s = time.time()

        def felt() -> str:
            with self._lock:
                return disturbances.felt_as_silence(self.record.status, names, began_s)

        def end() -> None:
            for host in hosts:
                self._hosts[host].plug_in()

        self._begin(kind, list(hosts), f"hosts {', '.join(map(str, hosts))}", since_s, length_s, felt, end, exact=True)
        for host in hosts:
            self._hosts[host].unplug()

    def _wrong_coordinator(self, kind: str, since_s: float) -> None:
        """Kills the coordinator, and starts another cluster's, with another code, in its place for a while."""
        service = self._hosted.leader
        with self._lock:
            if service.process is None or not service.runs:
                return
            pid, length_s = service.process.pid, self._random.choice(host_events.WRONG_S)
            number = sum(entry["event"] == kind for entry in self.schedule)
            self._on_kill_of_leader(kind, time.time())
            self._hosted.hold_back(service, math.inf)
        send(pid, signal.SIGKILL)
        service.process.wait()  # its port is free
        host, log = self._hosts[service.host], self.logs / f"{kind}-{number}.log"
        with log.open("wb") as out:
            wrong = host.start(self._hosted.another_coordinator(service), stdout=out, stderr=out)

        def listens() -> None:
            socket.create_connection((host.address, PORT), timeout=disturbances.LOOK_S).close()

        def felt() -> str:
            if wrong.poll() is not None:
                said = log.read_text(errors="replace").splitlines()
                return f"it ended with {wrong.returncode}: {said[-1] if said else ''}"
            with contextlib.suppress(OSError):
                self._watches_from.within(listens)
                return "it listened"
            return ""

        def end() -> None:
            end_tree(wrong)
            self._hosted.hold_back(service, 0.0)

        with self._lock:
            self._begin(kind, service.host, f"host {service.host} (pid {wrong.pid})", since_s, length_s, felt, end)

    def _launch(self, log: Path, script: Sequence[str]) -> subprocess.Popen[Any]:
        """Starts another job on the host from which training is watched, which nothing else uses."""
        host = self._watches_from
        meet = f"{host.address}:{MEETING_PORT}"
        words = disturbances.another_job(self._hosted.join, self.arguments.trainers, meet, script)
        with log.open("wb") as out:
            return host.start(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=example()[1], env=self._hosted.environment
            )

    # who leads -------------------------------------------------------------------------------------

    def _take_leader(self, kind: str, since_s: float) -> None:
        if kind == "stop-leader" and any(role_of(other) == "etcd" for other in self._kinds):
            return  # nobody else could lead
        with self._lock:
            service, leader = self._hosted.leader, self._leader
            if "coordinator" in self._hit or leader is None or service.process is None or not service.runs:
                return
            pid, revision = service.process.pid, leader.revision
            stops = kind == "stop-leader"
            length_s = self._random.choice(host_events.STOP_LEADER_S) if stops else 0.0
            self._on_kill_of_leader(kind, time.time())

            def felt() -> str:
                leads = self._leader
                new = leads is not None and leads.revision > revision
                return f"{self._hosted.leader.name} leads" if new else ""

            end = (lambda: send(pid, signal.SIGCONT)) if stops else (lambda: None)
            self._begin(kind, service.host, f"{service.name} (pid {pid})", since_s, length_s, felt, end)
        send(pid, signal.SIGSTOP if stops else signal.SIGKILL)

    def _kill_a_coordinator(self, kind: str, since_s: float) -> None:
        """Kills one of the coordinators: the one that leads, or one that stands by."""
        service = self._random.choice(self._hosted.of("coordinator"))
        if service is self._hosted.leader:
            self._take_leader(kind, since_s)
            return
        if service.process is None or not service.runs:
            return
        pid = service.process.pid
        with self._lock:
            self._begin(
                kind, service.host, f"{service.name} (pid {pid}), which stood by", since_s, 0.0,
                self._again(service), lambda: None,
            )  # fmt: skip
        send(pid, signal.SIGKILL)

    @staticmethod
    def _again(service: Service) -> Callable[[], str]:
        starts = service.starts
        return lambda: f"it was started again, {service.starts}" if service.starts > starts and service.runs else ""

    def _take_etcd(self, kind: str, since_s: float) -> None:
        """Kills or stops one etcd, or a majority of them."""
        running = [one for one in self._hosted.of("etcd") if one.runs and self._hosts[one.host].alive]
        chosen = self._random.sample(running, min(self._random.randint(1, 3), len(running)))
        if not chosen:
            return
        length_s, stops = self._random.choice(host_events.ETCD_AWAY_S), kind == "stop-etcd"
        pids = [one.process.pid for one in chosen if one.process is not None]
        address = self._hosted.etcd_addresses[chosen[0].host]
        asked = EtcdKeys(Place("http", (address,), "chaos"), ASK_ETCD_S)

        def felt() -> str:
            try:
                self._watches_from.within(asked.look)
            except EtcdUnavailable as error:
                return str(error)
            return ""

        def end() -> None:
            for pid in pids if stops else ():
                send(pid, signal.SIGCONT)

        for one, pid in zip(chosen, pids, strict=True):
            if not stops:
                self._hosted.hold_back(one, time.monotonic() + length_s)
            send(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        names = ", ".join(one.name for one in chosen)
        with self._lock:
            self._begin(kind, [one.host for one in chosen], names, since_s, length_s, felt, end)
