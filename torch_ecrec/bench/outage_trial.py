"""Events of `bench outages`: one cluster over hosts, in training, from which hosts, links and leaders are taken.

Each server, trainer, coordinator and etcd has a host of its own. After an event nothing comes back until all slots are
healthy and training has gone on for a while: what it costs to start processes again is none of the event's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench import outage_figures
from torch_ecrec.bench.outage_figures import CUT, DRAIN, HOST, KILL, LEADER, LEADER_AND_SERVER, ONE_WAY
from torch_ecrec.bench.outage_watch import OutageWatch
from torch_ecrec.bench.places import Here, meeting_on
from torch_ecrec.bench.recovery_figures import rows_per_table
from torch_ecrec.bench.recovery_processes import START_LIMIT_S, START_LIMIT_S_PER_GB, Stopped, Workers
from torch_ecrec.demo.chaos.hosted import COORDINATORS, MEETING_PORT, Homes, HostedCluster, lacking
from torch_ecrec.observe import events
from torch_ecrec.processes.children import await_end
from torch_ecrec.protocol.status import Status
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing.hosts import Hosts
from torch_ecrec.transport.etcd import Leader

WARM_S = 3.0  # of training, not measured
MOMENT_S = 1.0  # an event comes at a random moment of so many seconds
REPAIR_LIMIT_S, WHOLE_LIMIT_S, STEP_LIMIT_S, DRAIN_LIMIT_S = 120.0, 180.0, 120.0, 400.0
LOOK_S = 0.2  # between two looks at whether a service has ended
AROUND_S = 3.0  # of steps before an event, and after all is over, in the picture
END_S = 3.0


class TrainerHosts(Here):
    """Trainers have a host each."""

    def __init__(self, hosts: Hosts, numbers: Sequence[int]) -> None:
        self._hosts, self._numbers = hosts, numbers

    def meeting(self) -> dict[str, str]:
        return meeting_on(self._hosts[self._numbers[0]], MEETING_PORT)

    def start_trainer(self, rank: int, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        return self._hosts[self._numbers[rank]].start(command, text=True, **more)


class Trial:
    """One cluster, its trainers, and what happens to them. Use as a context manager.

    Args:
        arguments: of the benchmark.
        code: of the cluster.
        gigabytes: of all records, in 10^9 bytes.
        etcd: etcd's server, for coordinators that are elected; None: there is one.
        logs: folder for what processes say.
    """

    def __init__(
        self, arguments: argparse.Namespace, code: CodeSpec, gigabytes: float, etcd: Path | None, logs: Path
    ) -> None:
        self.arguments, self.code, self.gigabytes, self.etcd, self.logs = arguments, code, gigabytes, etcd, logs
        self.rng = random.Random(arguments.seed)
        self._stack = contextlib.ExitStack()
        self._looked_s = 0.0
        self._looks = True  # services that have ended are started again

    def __enter__(self) -> Trial:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        arguments, servers = self.arguments, self.code.slots + self.arguments.spares
        coordinators = COORDINATORS if self.etcd else 1
        sizes = [COORDINATORS if self.etcd else 0, coordinators, servers, arguments.trainers]
        firsts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        of_etcd, of_coordinators, of_servers, of_trainers = (
            range(first, first + size) for first, size in zip(firsts, sizes, strict=False)
        )
        self.logs.mkdir(parents=True, exist_ok=True)
        self.hosts = self._stack.enter_context(Hosts(firsts[-1] + 1))
        self.watches_from = self.hosts[firsts[-1]]
        environment = {"OMP_NUM_THREADS": "1"}
        homes = Homes(of_servers, of_coordinators, of_etcd)
        self.cluster = self._stack.enter_context(
            HostedCluster(
                self.hosts,
                self.code,
                arguments.spares,
                "survivor",
                self.logs,
                environment,
                self.etcd,
                homes,
                etcd_times=(),  # its own: nothing happens to it here
            )
        )
        log = self.logs / "trainers.log"
        join = self.cluster.join
        self.watch = OutageWatch(arguments.trainers, self.code.slots, log, join, self.watches_from)
        self._stack.enter_context(self.watch)
        self.watch.tick = self._tick
        place, told = TrainerHosts(self.hosts, of_trainers), {**environment, "TORCH_ECREC_JOIN": join}
        rows, seed = rows_per_table(self.gigabytes), arguments.seed
        self._stack.enter_context(
            Workers(arguments, "ecrec", rows, log, self.watch.on_line, told, seed=seed, place=place)
        )
        limit_s = START_LIMIT_S + START_LIMIT_S_PER_GB * self.gigabytes
        self.watch.until(lambda: "" if self.watch.steps.times else "no step yet", limit_s, "the first step")
        self._become_whole()
        self.watch.trains(WARM_S, STEP_LIMIT_S)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._looks and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self.cluster.look(now_s)

    def _become_whole(self) -> None:
        """Everything comes back that was taken."""
        self.hosts.mend()
        self.cluster.return_all()
        self._looks = True

        def lacks() -> str:
            status = self.watch.record.status
            if not self.cluster.complete or self.watch.leader is None:
                return "a process is not there, or nobody leads"
            if status is None or not status.healthy:
                return "slots that are not healthy"
            return lacking(status, self.code.slots + self.arguments.spares)

        self.watch.until(lacks, WHOLE_LIMIT_S, "all to be whole again")

    # one event ----------------------------------------------------------------------------------

    @property
    def _status(self) -> Status:
        """The last one. Called with the lock, once all were whole."""
        assert self.watch.record.status is not None
        return self.watch.record.status

    def _incarnations(self) -> list[int]:
        return [one.incarnation for one in self._status.slots]

    def _host_of(self, slot: int) -> int:
        """On which host the server of a slot runs. Called with the lock."""
        status = self._status
        host = self.hosts.host_of(status.member(status.slots[slot].server).pid)
        if host is None:
            raise Stopped(f"slot {slot} has no server")
        return host

    def event(self, kind: str) -> dict[str, Any]:
        """Makes one happen, waits until all is repaired, then whole again, then as long without one; its figures.

        Raises `Stopped`.
        """
        watch, steady_s = self.watch, self.arguments.steady_s
        before_s = watch.trains(steady_s, STEP_LIMIT_S)
        time.sleep(self.rng.uniform(0.0, MOMENT_S))
        with watch.changed:
            slots = self.rng.sample(range(self.code.slots), 2)
            ends = [self._host_of(slot) for slot in slots]
            lives, leader, told = self._incarnations(), watch.leader, len(watch.told)
            watch.unhealthy_s.clear()
        self._looks = kind == DRAIN
        found: dict[str, Any] = {"kind": kind, "before_s": before_s, "event_s": time.time(), "hosts": ends}
        if kind == DRAIN:
            found |= self._drain(slots[0])
        else:
            self._take(kind, ends)
            hit = {HOST: slots[:1], KILL: slots[:1], LEADER_AND_SERVER: slots[:1], LEADER: []}.get(kind, slots)
            lacks = self._repaired(found["event_s"], hit, lives, leader if kind in outage_figures.ELECTED else None)
            found["repaired"] = watch.until(lacks, REPAIR_LIMIT_S, f"repair after {kind}")
        found["after_s"] = watch.trains(steady_s, STEP_LIMIT_S)
        with watch.changed:
            news = watch.told[told:]
            lost = [one for _, one in news if isinstance(one, events.Lost) and one.slots]
            found["unhealthy"] = len(watch.unhealthy_s) + len(lost)  # what is repaired between two statuses counts, too
            first = min((s for s, one in news if isinstance(one, (events.Lost, events.Cut))), default=None)
            placed = min((s for s, one in news if isinstance(one, events.PlacedAnew)), default=None)
            found |= {"detected": first, "placed": placed}
        self._become_whole()
        since_s, until_s = found["event_s"] - AROUND_S, found["after_s"][1]
        found["control_s"] = watch.trains(until_s - found["event_s"], STEP_LIMIT_S)
        with watch.changed:
            times = list(watch.steps.times)
            found |= outage_figures.figures(found, watch.steps)
        found["step_ends_s"] = [s - found["event_s"] for s in times if since_s <= s <= until_s]
        found["events"] = [(s - found["event_s"], events.json_of(one)) for s, one in news]
        return found

    def _repaired(
        self, event_s: float, slots: Sequence[int], lives: Sequence[int], leader: Leader | None
    ) -> Callable[[], str]:
        """What lacks until these slots (one of them, of several) have new lives, another leads, and all are healthy."""

        def lacks() -> str:
            status, leads = self.watch.record.status, self.watch.leader
            if status is None or status.time_s <= event_s or not status.slots:
                return "a status of now"
            if leader is not None and (leads is None or leads.revision <= leader.revision):
                return "another leader"
            if slots and not any(status.slots[slot].incarnation > lives[slot] for slot in slots):
                return f"another host of one of the slots {list(slots)}"
            return "" if status.healthy else "slots that are not healthy"

        return lacks

    def _take(self, kind: str, ends: Sequence[int]) -> None:
        """What happens, to the hosts of two slots or to the leader's."""
        if kind == HOST:
            self.hosts[ends[0]].unplug()
        elif kind == KILL:
            for pid in self.hosts[ends[0]].processes():
                os.kill(pid, signal.SIGKILL)
        elif kind == CUT:
            self.hosts.cut(*ends)
        elif kind == ONE_WAY:
            self.hosts.cut_one_way(*ends)
        else:
            assert kind in (LEADER, LEADER_AND_SERVER) and self.watch.leader is not None
            address = self.watch.leader.address[0]
            leads = next(host.number for host in self.hosts if host.address == address)
            for number in [leads, *ends[:1]] if kind == LEADER_AND_SERVER else [leads]:
                self.cluster.kill_host(number, float("inf"))

    # draining -----------------------------------------------------------------------------------

    def _drain(self, slot: int) -> dict[str, Any]:
        """All slots leave the server of this one, by the command; the window of it, and the bytes that were there."""
        with self.watch.changed:
            name = self._status.slots[slot].server
            reports = self._status.member(name).report.slots or ()
        held = sum(one.record_bytes + one.parity_bytes + one.log_bytes for one in reports)
        begin_s = time.time()
        self._command("drain", name)
        end_s = time.time()
        self._command("drain", name, "--undo")
        return {"during_s": (begin_s, end_s), "repaired": end_s, "held_bytes": held}

    def _command(self, *words: str) -> None:
        """Runs `torch-ecrec` beside the watch, until it ends. Raises `Stopped` if it fails, or takes too long."""
        said = self.logs / "commands.log"
        with said.open("ab") as out:
            command = [sys.executable, "-P", "-m", "torch_ecrec", *words, "--join", self.cluster.join]
            process = self.watches_from.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            self.watch.until(
                lambda: "" if process.poll() is not None else "its end", DRAIN_LIMIT_S, f"`torch-ecrec {words[0]}`"
            )
        finally:
            if process.poll() is None:
                process.terminate()
            await_end([process], END_S)
        if process.returncode:
            raise Stopped(f"`torch-ecrec {' '.join(words)}` ended with {process.returncode}; see {said}")
