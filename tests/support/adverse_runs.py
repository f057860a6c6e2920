"""Runs of the simulated cluster in which several things go wrong after each other, and nothing has to be lost by it.

A `Schedule` says what happens and when: hosts lose their network or stand still, the coordinator's among them; servers,
trainers and coordinators die, or are told to end; servers are drained, or stay after all; a coordinator with another
code, or of another cluster, comes at the address of the right one; trainers of another launch come. Two promises make
every run end well: nobody is killed whose loss the code does not repair together with all that are silent at that
moment, and all that is silent comes back. After them, what was to follow has followed, and nothing is left of it
(`harness/leftovers.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from captured import with_checkpoints
from cut_runs import OVERWRITES, Patient
from faults import THREE_TWO, TWO_ONE, oracle
from harness import Scenario
from harness.leftovers import check_over
from harness.links import BEAT_S, COORDINATOR, ENDS_S, MEMBER_ENDS_S
from harness.membership import HELD_S, Center, VirtualProcess
from harness.scenario import Load
from harness.standbys import Standby, StandbyPlane
from router_harness import Process

from torch_ecrec.coordinator.router import Router
from torch_ecrec.errors import JoinRefused
from torch_ecrec.layout import repair
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.protocol.messages import Known, Placement, SlotPlace
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.reachability import SILENT_S

LEASE_S, STANDS_S = 3.0, 1000.0
FASTER = 2.0  # etcd's time: who leads is followed after a second
STEP_S = 0.7  # virtual, for which a trainer computes
AFTER_S = 6.0  # without trouble, at the end
PLAIN = Scenario(
    code=TWO_ONE,
    steps=8,
    spares=1,
    lease_s=LEASE_S,
    standstill_s=STANDS_S,
    trainers_return=True,
    reborn=True,
    verify_every=400,
)
SITUATIONS = {
    "a spare": PLAIN,
    "no spare": dataclasses.replace(PLAIN, spares=0),
    "two parities": dataclasses.replace(PLAIN, code=THREE_TWO, steps=6),
    "no parity": dataclasses.replace(PLAIN, code=dataclasses.replace(TWO_ONE, protection="none"), spares=1),
    "slow rebuilds": dataclasses.replace(PLAIN, rebuild_chunk_bytes=64, rebuild_bytes_per_s=400.0),
    "wait for a host": dataclasses.replace(PLAIN, without_spare="wait"),
    "checkpoints": with_checkpoints(PLAIN, every_steps=2),
    "loads in training": dataclasses.replace(PLAIN, steps=6, overwrites=OVERWRITES),
    "values are loaded": dataclasses.replace(PLAIN, steps=4, loads=(Load(0, 0, 9), Load(0, 4, 12, change=True))),
    "a noisy network": dataclasses.replace(PLAIN, noise=0.02, snapshot_every=2),
    "others stand by": dataclasses.replace(PLAIN, coordinators=2),
}
# around two heartbeats, a complaint, what is usual, the lease, the end of a connection for members and coordinator
SECONDS = (0.3, 0.8, 1.2, 1.6, 2.2, 2.9, 3.3, 4.2, 5.5, 8.0, 16.0)
DOWN_S = (0.1, 0.1, 0.5, 1.5, 4.0, 12.0)
ANOTHER_CODE, ANOTHER_CLUSTER = "another code", "another cluster"
# what a member knows of a cluster that has not begun
NOTHING = Known(job=None, placement=None, era=0, frozen=False, resume_step=0, done=0, load_end=None)
TERM = 500  # of a wrong coordinator: names of its own


@dataclass(frozen=True)
class Trouble:
    """What happens `after_s` the one before.

    Args:
        kind: see `Adverse.apply`.
        who: numbers of hosts, taken modulo how many there are; -1: the coordinator's.
        seconds: for how long, where it lasts.
    """

    after_s: float
    kind: str
    who: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """All of a run: from which message of the control channel or of the data plane on, and what."""

    situation: str
    shared: bool  # trainers are on hosts of servers
    message: int
    troubles: tuple[Trouble, ...]
    seed: int = 0
    together: bool = False  # the coordinator is on the host of the first server, as with `up`


KINDS = {
    "unplug": 8,
    "freeze": 4,
    "kill server": 3,
    "kill trainer": 2,
    "kill coordinator": 5,
    "term": 1,
    "reset": 3,
    "late probes": 1,
    ANOTHER_CODE: 1,
    ANOTHER_CLUSTER: 1,
    "second launch": 3,
    "kill host": 2,
    "a member of before": 2,
    "drain": 3,
    "undo": 2,
}


def draw(seed: int) -> Schedule:
    """A random one."""
    r = random.Random(f"adverse {seed}")
    troubles = []
    for _ in range(r.choice((2, 3, 3, 4, 5, 6))):
        (kind,) = r.choices(list(KINDS), list(KINDS.values()))
        least = 1 if kind not in ("unplug", "freeze") else r.choice((1, 1, 2, 2, 3, 4, 6))
        who = tuple(sorted(r.sample(range(-1, 8), least)))
        if r.random() < 0.3:
            who = tuple(one for one in who if one >= 0) or (0,)
        seconds = r.choice(DOWN_S if kind in ("kill coordinator", ANOTHER_CODE, ANOTHER_CLUSTER) else SECONDS)
        after_s = r.choice((0.0, 0.1, 0.3, 0.6, 1.0, 1.7, 2.5, 3.2, 4.5, 6.0))
        troubles.append(Trouble(after_s, kind, who, round(seconds * r.uniform(0.9, 1.1), 2)))
    return Schedule(
        r.choice(list(SITUATIONS)),
        r.random() < 0.3,
        r.choice((20, 60, 150, 150, 300)),
        tuple(troubles),
        seed % 7,
        r.random() < 0.3,
    )


class Adverse(Patient):
    """A cluster in which that happens."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.off: dict[int | str, float] = {}  # hosts without network -> since when
        self.frozen: dict[int | str, float] = {}
        self.back_s: dict[int | str, float] = {}
        self.quiet_s = 0.0
        self.computes_until_s: dict[int, float] = {}
        self.waiting: list[tuple[int | str, int | str, Callable[[], None], bool]] = []
        self.down_s, self.wrong, self.wrong_s = 0.1, "", 0.0
        self.intruders: list[VirtualProcess] = []
        self.refusals: list[str] = []
        self.before: dict[VirtualProcess, Known] = {}  # members of an earlier cluster, and what they know
        self.namesakes: set[VirtualProcess] = set()  # of members that a coordinator did not know yet
        self.started, self.seen, self.violations = False, 0, []  # type: ignore[var-annotated]
        self.log: list[str] = []
        self.may_restart = True
        scenario = SITUATIONS[schedule.situation]
        super().__init__(dataclasses.replace(scenario, network_seed=schedule.seed))
        self.network.passes, self.network.held = self._passes, self._hold
        self.plane.passes = lambda process, _: self._open(process.machine, self.chief)
        self.plane.held = lambda process, _, arrive: self._wait(process.machine, self.chief, arrive, control=True)
        self.plane.answers = lambda process: self._reaches(process.machine, self.chief)
        self.plane.is_stopped = lambda: self.chief in self.frozen
        if isinstance(self.plane, StandbyPlane):
            self.plane.faster = FASTER
            self.plane.reaches_etcd = lambda center: self._place_of(center) not in self.off
        self._beat()
        self._right = self.plane.new_router
        self.plane.new_router = self._next_router  # type: ignore[method-assign]

    # hosts --------------------------------------------------------------------------------------

    @property
    def chief(self) -> int | str:
        """The host of the coordinator, or of the one that leads or has led last."""
        return self._place_of(self.plane.center)

    def _place_of(self, center: Center) -> int | str:
        number = center.number if isinstance(center, Standby) else 0
        return number if self.schedule.together else COORDINATOR + "'s stand-by" * number

    def _centers_on(self, hosts: list[int | str]) -> list[Standby]:
        every = self.plane.ports.values() if isinstance(self.plane, StandbyPlane) else ()
        return [one for one in every if one is not None and self._place_of(one) in hosts]

    @property
    def now_s(self) -> float:
        return self.network.clock.now_s

    def hosts_now(self) -> list[int]:
        """Machines, of processes of this cluster that live."""
        return sorted({one.machine for one in self.plane.processes if one in self._own()})

    def _own(self) -> list[VirtualProcess]:
        others = {*self.intruders, *self.before}
        return [one for one in self.plane.processes if not one.dead and one not in others]

    def _open(self, one: int | str, other: int | str) -> bool:
        if {one, other} & self.frozen.keys():
            return False
        return self._reaches(one, other)

    def _reaches(self, one: int | str, other: int | str) -> bool:
        return one == other or not {one, other} & self.off.keys()

    def _machine(self, name: str) -> int | str:
        process = self.process_of.get(name)
        return name if process is None else process.machine

    def _passes(self, sender: str, receiver: str) -> bool:
        if not self.started and len(self.network.sent) >= self.schedule.message:
            self.begin_trouble()
        return self._open(self._machine(sender), self._machine(receiver))

    def _hold(self, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        self._wait(self._machine(sender), self._machine(receiver), arrive)

    def _wait(self, one: int | str, other: int | str, arrive: Callable[[], None], control: bool = False) -> None:
        self.waiting.append((one, other, arrive, control))

    def _release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for one, other, arrive, control in waiting:
            if not self._open(one, other):
                self._wait(one, other, arrive, control)
            elif control:
                arrive()
            else:
                self.network.clock.later(self.network.delay_s(late=True), arrive)

    def _fail(self, kind: dict[int | str, float], hosts: list[int | str], seconds: float) -> None:
        for host in hosts:
            kind.setdefault(host, self.now_s)
        for center in self._centers_on(hosts) if kind is self.frozen else ():
            if not center.stopped:
                self.plane.stop(center, seconds)
        if kind is self.off:
            began = {host: self.off[host] for host in hosts}
            self.network.clock.later(MEMBER_ENDS_S, lambda: self._end_connections(began, at_members=True))
            self.network.clock.later(ENDS_S, lambda: self._end_connections(began, at_members=False))

        def heal() -> None:
            for host in hosts:
                kind.pop(host, None)
                self.back_s[host] = self.now_s
            self._release()

        self.network.clock.later(seconds, heal)

    def _end_connections(self, began: dict[int | str, float], at_members: bool) -> None:
        hosts = {host for host, since_s in began.items() if self.off.get(host) == since_s}
        for process in self.plane.processes:
            connection = process.connection
            ends = {process.machine, self.chief}
            if connection is None or process.dead or len(ends) == 1 or not hosts & ends:
                continue
            if at_members and process.machine not in self.frozen:
                connection.noticed_by_process()
            elif not at_members:
                self.plane.reset([connection])

    # heartbeats ---------------------------------------------------------------------------------

    def _unreachable(self, process: VirtualProcess) -> list[str]:
        own_s = self.off.get(process.machine)
        found = []
        for other in self.plane.processes:
            if not other.name or other.machine == process.machine or other in self.before:
                continue
            since = [s for s in (own_s, self.off.get(other.machine)) if s is not None]
            if since and min(since) <= self.now_s - SILENT_S:
                found.append(other.name)
        return found

    def _beat(self) -> None:
        for process in self.plane.processes:
            self._say_beat(process)
        self.network.clock.later(BEAT_S, self._beat)

    def _say_beat(self, process: VirtualProcess) -> None:
        if process.name and not process.dead and process.machine not in self.frozen:
            self.plane.tell(process, messages.Beat(unreachable=self._unreachable(process)))

    # what happens -------------------------------------------------------------------------------

    def begin_trouble(self) -> None:
        self.started = True
        at_s = 0.0
        for trouble in self.schedule.troubles:
            at_s += trouble.after_s
            self.network.clock.later(at_s, functools.partial(self._happen, trouble))

    def _happen(self, trouble: Trouble) -> None:
        done, self.quiet_s = self.apply(trouble), self.now_s
        self.log.append(f"{self.now_s:.2f} {trouble}: {done}")

    def apply(self, trouble: Trouble) -> str:
        kind, here = trouble.kind, self.hosts_now()
        hosts: list[int | str] = [self.chief if one < 0 else here[one % len(here)] for one in trouble.who]
        hosts = sorted(set(hosts), key=str)
        lives = [one for one in self._own() if one.machine in hosts]
        if kind == "unplug":
            self._fail(self.off, hosts, trouble.seconds)
        elif kind == "freeze":
            self._fail(self.frozen, hosts, trouble.seconds)
        elif kind in ("kill server", "term", "kill host"):
            servers = [one for one in lives if one.role == "server"]
            if kind == "kill host":
                others = [one for one in lives if one.role == "trainer"]
            else:
                servers, others = servers[:1], []
            if not servers or not self._may_lose(servers):
                return "may not"
            if others and (not self.scenario.trainers_return or self.scripts.done):
                return "may not"
            for one in servers:
                if kind == "term" and one.name and one.connection is not None and one.machine not in self.frozen:
                    self.leave(one)
                    self.start_server(one)
                else:
                    self.kill(one)
            for one in others:
                self.kill(one)
            if kind == "kill host":
                self._end_coordinators_on(hosts, trouble.seconds)
        elif kind == "kill trainer":
            there = [one for one in self.ranks if not one.dead]
            if self.scripts.done or not there or self.ending:
                return "may not"
            self.kill(there[trouble.who[0] % len(there)])
        elif kind == "kill coordinator":
            if not self.plane.lives:
                return "is down"
            self._end_coordinator(trouble.seconds)
        elif kind in (ANOTHER_CODE, ANOTHER_CLUSTER):
            if not self.plane.lives or not self._all_know or isinstance(self.plane, StandbyPlane):
                return "may not"
            self.wrong, self.wrong_s = kind, trouble.seconds
            self._end_coordinator(0.1)
        elif kind == "second launch":
            there = [one for one in self.ranks if one.name and not one.dead]
            if len(there) < self.scenario.trainers or self.ending or self.scripts.done:
                return "may not"
            for rank in range(self.scenario.trainers):
                self._intrude(rank)
        elif kind == "a member of before":
            self._come_from_before(trouble.who[0] % self.scenario.code.slots)
        elif kind in ("drain", "undo"):
            servers = [one for one in lives if one.role == "server" and one.name]
            if not servers or not self.plane.lives or self.plane.router.core.regathering:
                return "may not"
            return self.plane.router.core.drain(servers[0].name, undo=kind == "undo") or servers[0].name
        elif kind == "reset":
            self.plane.reset([one.connection for one in self.plane.processes if not one.dead])
        elif kind == "late probes":
            self.plane.late_probes = True
        return f"{hosts}"

    def _intrude(self, rank: int) -> None:
        again = any(one.rank == rank for one in self.intruders)
        self.intruders.append(self.plane.start("trainer", rank, self.scenario.job, launch="another", relaunched=again))

    def _come_from_before(self, slot: int) -> None:
        """A server of an earlier cluster of this job, which stood still as that ended, looks for its coordinator."""
        servers, names = range(self.scenario.code.slots), (f"server-{i}" for i in range(self.scenario.code.slots))
        there = tuple(SlotPlace(name, 0, True) for name in names)
        number = len(self.plane.processes)
        one = VirtualProcess(join_of("server", f"process {number}", number), number, self.now_s)
        one.rules.step(self.now_s)
        one.rules.connected(self.now_s)
        welcome = messages.Welcome(f"server-{slot}", self.scenario.code, False, 0, "sockets", "of before")
        one.rules.heard(messages.json_of(welcome))
        one.rules.built(welcome.name)
        one.rules.heard(messages.json_of(messages.Roster(1, {f"server-{i}": "here" for i in servers})))
        one.rules.closed("its cluster has ended")
        one.rules.take()
        lives, placement = [0 for _ in servers], Placement(1, there)
        about = {"placement": placement, "load_end": 0, "whole": [(slot, 0)], "incarnations": lives}
        self.before[one] = msgspec.structs.replace(NOTHING, job=self.scenario.job, **about)
        self.plane.add(one)

    def silent(self, since_s: float = 0.0) -> set[int | str]:
        return {one for one, s in [*self.off.items(), *self.frozen.items()] if self.now_s - s >= since_s}

    def gone_slots(self, servers: list[VirtualProcess], silent: set[int | str]) -> set[int]:
        names = {one.name for one in servers}
        found = set()
        for i, place in enumerate(self.slots_known):
            process = self.process_of.get(place.server)
            if (
                not place.healthy
                or process is None
                or process.dead
                or process.machine in silent
                or process.name in names
            ):
                found.add(i)
        return found

    def _repairs(self, slots: set[int]) -> bool:
        return not any(repair.unrecoverable_bases(layout, slots) for layout in self.layouts)

    def _may_lose(self, servers: list[VirtualProcess]) -> bool:
        if not self.slots_known:
            return False
        every = set(self.off) | set(self.frozen) | {one for one, s in self.back_s.items() if self.now_s - s < 6.0}
        if not self._repairs(self.gone_slots(servers, every)):
            return False
        left = [one for one in self._own() if one.role == "server" and one not in servers]
        return bool(left)

    # coordinators -------------------------------------------------------------------------------

    @property
    def _all_know(self) -> bool:
        nodes = [*self.hosts.items(), *self.clients.items()]
        named = all(one.name for one in self._own())
        return named and bool(nodes) and all(node.placement for name, node in nodes if name not in self.network.dead)

    def _end_coordinator(self, down_s: float) -> None:
        from harness import membership

        if isinstance(self.plane, StandbyPlane):
            if self.plane.leading is not None:
                self.run.coordinator_kills += 1
                self.plane.end_coordinator(self.plane.leading, down_s)
            return
        before, membership.RESTART_S = membership.RESTART_S, down_s
        self.kill_coordinator()
        membership.RESTART_S = before

    def _end_coordinators_on(self, hosts: list[int | str], down_s: float) -> None:
        for center in self._centers_on(hosts):
            self.run.coordinator_kills += 1
            self.plane.end_coordinator(center, down_s, vanishes=True)
        if self.chief in hosts and not isinstance(self.plane, StandbyPlane):
            self._end_coordinator(down_s)

    def _next_router(self, center: Center, run: str, again: bool, led: int = 0) -> Router:
        kind, self.wrong = self.wrong, ""
        if not kind:
            return self._right(center, run, again, led)
        checkpoint = dataclasses.replace(self.plane.settings.checkpoint, run="another")
        other = CodeSpec(4, 2, 2) if kind == ANOTHER_CODE else self.scenario.code
        settings = dataclasses.replace(self.plane.settings, code=other, checkpoint=checkpoint, spares=0, term=TERM)
        router = Router(
            settings,
            probe=lambda *_: None,
            announce=lambda _: None,
            refuse_to_lead=lambda why, code: self.network.clock.later(0.05, lambda: self._end(router)),
            joins_from_s=self.now_s + HELD_S if kind == ANOTHER_CODE else 0.0,
        )
        if kind == ANOTHER_CLUSTER:
            self._lead(router, other)
        self.network.clock.later(self.wrong_s, lambda: self._end(router))
        return router

    def _lead(self, router: Router, code: CodeSpec) -> None:
        others = [*(Process("server") for _ in range(code.slots)), *(Process("trainer", rank) for rank in range(2))]
        for one in others:
            router.on_message(one.wire, {"type": "join", **one.hello}, self.now_s)
        for one in others:
            router.on_message(one.wire, {"type": "listens", "endpoint": "here"}, self.now_s)
        assert router.core.epoch == 1

    def _end(self, router: Router) -> None:
        if self.plane.router is router and self.plane.lives:
            self._end_coordinator(0.1)

    # the cluster --------------------------------------------------------------------------------

    def _start_trainers(self) -> None:
        self.ending = False
        before = getattr(self, "first_ranks", None)
        servers = [one for one in self.plane.processes if one.role == "server"]
        self.ranks = []
        for i in range(self.scenario.trainers):
            predecessor = before[i] if before else (servers[i] if self.schedule.shared else None)
            one = self.plane.start(
                "trainer",
                i,
                job=self.scenario.job,
                predecessor=predecessor,
                launch="launch",
                relaunched=self.run.trainer_kills > 0,
            )
            self.ranks.append(one)
        if not before:
            self.first_ranks = list(self.ranks)
        self.scripts.begin()

    def on_welcome(self, process: VirtualProcess) -> None:
        if process in self.intruders:
            lives = [one.name or one.number for one in self.ranks if not one.dead]
            assert not process.restarted, f"the second launch is let in, while these of the first live: {lives}"
            return  # a coordinator that has not heard of the first yet
        before = self.process_of.get(process.name)
        if before is not None and not before.dead:
            self.namesakes.add(process)  # nodes have names here, so this one is without
        else:
            super().on_welcome(process)

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        if process in self.intruders:
            assert not isinstance(word, messages.Placed), "the second launch trains"
        elif process in self.before:
            assert not isinstance(word, messages.Placed), "a cluster of before goes on"
        elif process not in self.namesakes:
            super().on_control(process, word)

    def known(self, process: VirtualProcess) -> Known:
        self.network.clock.later(0.0, lambda: self._say_beat(process))  # with a rejoin
        if process in self.before:
            return self.before[process]
        if process in self.namesakes or process in self.intruders:
            return msgspec.structs.replace(NOTHING, job=process.job)
        return super().known(process)

    def on_over(self, process: VirtualProcess, error: BaseException) -> None:
        if process in self.intruders:
            self.plane.end(process)
            if isinstance(error, JoinRefused):
                self.refusals.append(str(error))
            else:
                self._intrude(process.rank)
        elif process in self.before:
            self.plane.end(process)
        elif process in self.namesakes:
            self.plane.end(process)
            if process.role == "server":
                self.start_server(process)
            else:
                self._on_trainer_crash()
        elif isinstance(error, JoinRefused) and process.role == "trainer":
            self.kill(process)
        else:
            super().on_over(process, error)

    def _run_trainers(self) -> bool:
        def waits(rank: int) -> bool:
            one = self.ranks[rank]
            return one.dead or one.machine in self.frozen or self.computes_until_s.get(rank, 0.0) > self.now_s

        self.scripts.go_on(waits)
        return not self.ending and self.scripts.done

    def _after_step(self, trainer: int, step: int) -> None:
        super()._after_step(trainer, step)
        self.computes_until_s[trainer] = self.now_s + STEP_S
        self.network.clock.later(STEP_S, lambda: None)

    def on_event(self, number: int) -> None:
        super().on_event(number)
        if not self.started and self.scripts.done:
            self.begin_trouble()
        intrudes = any(not one.dead for one in self.intruders)
        if self.off or self.frozen or not self.plane.lives or intrudes or self._finds_out():
            self.quiet_s = self.now_s
        self.note()

    def _finds_out(self) -> bool:
        """The coordinator asks who is there, or waits for who cannot reach whom; or a slot moves."""
        state = self.coordinator._state
        return state.regathering.active or state.suspicion.learns or state.table.moves.current is not None

    def note(self) -> None:
        """What the coordinator has announced since the last look."""
        for event in self.run.events[self.seen :]:
            self.log.append(f"{self.now_s:.2f} {event}")
            if event["event"] == "lost" and event["slots"] and self.plane.router.core.slots:
                known = "its process is gone" in event["why"] or "left" in event["why"]
                gone = self.gone_slots([], self.silent(1.4)) | set(event["slots"])
                if not known and not self._repairs(gone):
                    self.violations.append(f"{event} as these were silent: {self.silent(1.4)}, gone {gone}")
        self.seen = len(self.run.events)

    def settled(self) -> bool:
        happened = sum("Trouble" in line for line in self.log)
        if happened < len(self.schedule.troubles):
            return False
        return super().settled() and self.now_s >= self.quiet_s + AFTER_S


def run_schedule(schedule: Schedule) -> Adverse:
    """Runs it. Raises AssertionError that names it if a promise is broken."""
    cluster = Adverse(schedule)
    try:
        run = cluster.go()
        assert run.fatal is None, f"ended: {run.fatal}"
        run.check_against(oracle(cluster.scenario))
        for finished in cluster.shelf.counts:
            there = oracle(dataclasses.replace(cluster.scenario, steps=finished.done))
            for got, right in zip(cluster.shelf.records(cluster.scenario.job, finished), there.records, strict=True):
                assert torch.equal(got.view(torch.float32), right), f"{finished.folder} is not as of its step"
        assert not cluster.violations, cluster.violations
        check_over(cluster)
    except Exception as error:
        cluster.note()
        said = "\n".join(cluster.log[-60:])
        raise AssertionError(f"{schedule}: {type(error).__name__}: {error}\n{said}") from error
    return cluster


def shrink(schedule: Schedule) -> Schedule:
    """Without what is not needed for it to fail."""

    def fails(one: Schedule) -> bool:
        try:
            run_schedule(one)
        except AssertionError:
            return True
        return False

    i = 0
    while i < len(schedule.troubles):
        left = list(schedule.troubles)
        dropped = left.pop(i)
        if i < len(left):
            left[i] = dataclasses.replace(left[i], after_s=left[i].after_s + dropped.after_s)
        shorter = dataclasses.replace(schedule, troubles=tuple(left))
        if left and fails(shorter):
            schedule = shorter
        else:
            i += 1
    for i, trouble in enumerate(schedule.troubles):
        for one in trouble.who if len(trouble.who) > 1 else ():
            who = tuple(other for other in schedule.troubles[i].who if other != one)
            if not who:
                continue
            left = list(schedule.troubles)
            left[i] = dataclasses.replace(left[i], who=who)
            smaller = dataclasses.replace(schedule, troubles=tuple(left))
            if fails(smaller):
                schedule = smaller
    return schedule
