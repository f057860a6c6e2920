"""A whole cluster in one process on a virtual clock, fault plans, and checks of the contract.

The protocol core here is the one that runs for real: `Host` and `Client` over `LocalNetwork`, `Router` and
`Coordinator` over `ControlPlane`. Trainers are small functions of what they looked up, so that a wrong read anywhere
changes everything that follows.

    run = simulate(Scenario(), faults=[Fault("crash_receiver", 17)])
    run.check_against(simulate(Scenario()))     # raises AssertionError that names what differs

What is checked at the end: every lookup, loss, record, optimizer state, dense value and snapshot is bit-equal to the
undisturbed run (I3, I4); every parity is the code of its stripe (I1). Verifiers ride along (`verify`), now and
then: every parity is the code of its stripe as of what its holder has folded, so no delta was folded
twice or not at all (I2); nothing acknowledged is lost; logs, kept pushes and snapshots are bounded (I6); the last
complete snapshot is on all its holders.

Faults and random kills stay within the contract: with those who are lost or not rebuilt yet, no stripe misses more
than r members. Which of them fired is in the result.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from harness.checkpoints import Shelf
from harness.membership import RESTART_S, ControlPlane, VirtualConnection, VirtualProcess
from harness.network import Fault, LocalNetwork
from harness.result import SimulationResult
from harness.scenario import Scenario
from harness.standbys import StandbyPlane
from harness.tiers import tier_of
from harness.trainer_scripts import TrainerScripts
from harness.verification import Verifier, check_parity, load_end_of
from torch_ecrec.client.client import Client
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.errors import Fenced, TrainersLost
from torch_ecrec.layout import repair
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import SlotPlace
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.server.service import Host
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.settings import Settings

EVENT_LIMIT = 400_000
ENDING_S = 0.02  # from a trainer's death to that of the others, at most; new ones start `RESTART_S` later
REBORN_S = 0.5  # from a server's death to the start of another in its place
LIMIT_S = 120.0  # virtual


class SimulatedCluster:
    """A running simulation; `simulate` is the short way."""

    def __init__(self, scenario: Scenario, faults: Sequence[Fault] = ()) -> None:
        self.scenario = scenario
        self.run = SimulationResult(scenario)
        self.settings = Settings(
            call_timeout_s=scenario.call_timeout_s,
            rebuild_chunk_bytes=scenario.rebuild_chunk_bytes,
            rebuild_bytes_per_s=scenario.rebuild_bytes_per_s,
            move_bytes_per_s=scenario.rebuild_bytes_per_s,
            wire=scenario.wire,
            pooling=scenario.pooling,
            experiment_mode=scenario.experiment.mode,
            experiment_ranges=scenario.experiment.ranges,
        )
        self.network = LocalNetwork(
            scenario.network_seed,
            crash=self._on_crash,
            crash_coordinator=self.kill_coordinator,
            may_crash=self.may_crash,
            faults=list(faults),
            noise=scenario.noise,
            late=scenario.late,
        )
        self.layouts = scenario.job.layouts
        self.shelf = Shelf(self.network.clock, scenario.network_seed, scenario.job)
        kind = StandbyPlane if scenario.coordinators > 1 else ControlPlane
        self.plane: ControlPlane = kind(
            scenario.cluster,
            scenario.network_seed,
            self.network.clock,
            handlers=self,
            announce=self.run.events.append,
            manifests=self.shelf,
        )
        if isinstance(self.plane, StandbyPlane):
            self.plane.stand_by(scenario.coordinators)
        self.process_of: dict[str, VirtualProcess] = {}  # by name
        self.verifier = Verifier(scenario, self.run.longest)
        self.random = random.Random(scenario.network_seed * 7919 + 1)
        self.hosts: dict[str, Host] = {}
        self.clients: dict[str, Client] = {}
        self.kills = list(scenario.kills)
        self.trainer_kills = list(scenario.trainer_kills)
        self.ending = False  # a trainer died: the others are being ended, and all started again
        self.random_coordinator_kills = scenario.random_coordinator_kills
        self.placed: list[SlotPlace] = []  # as the coordinator knew them last
        self._restores = False  # likewise
        self.servers_started = 0
        for _ in range(scenario.code.slots + scenario.spares):
            self.start_server()
        self.ranks: list[VirtualProcess] = []  # the trainers, by rank
        self.scripts = TrainerScripts(scenario, self.run, self._after_step)
        self._start_trainers()

    # processes ----------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        return self.plane.core

    @property
    def slots_known(self) -> list[SlotPlace]:
        """The coordinator's placement, or that of the one before while it does not know."""
        if self.coordinator.slots:
            self.placed, self._restores = self.coordinator.slots, self.coordinator.restores
        return self.placed

    @property
    def restores(self) -> bool:
        """As the coordinator said last: slots get their records of the checkpoint that the cluster begins with."""
        return bool(self.slots_known) and self._restores

    def kill_coordinator(self) -> None:
        """It is gone, and another one comes soon, which knows nothing."""
        if self.plane.lives:
            self.placed = list(self.slots_known)
            self.run.coordinator_kills += 1
            self.plane.kill_coordinator()

    def start_server(self, predecessor: VirtualProcess | None = None) -> None:
        """A server process starts, and joins. `predecessor`: one on whose host it runs."""
        domains = self.scenario.domains or ("",)
        domain = domains[self.servers_started % len(domains)] if predecessor is None else predecessor.domain
        self.plane.start("server", predecessor=predecessor, domain=domain)
        self.servers_started += 1

    def _start_trainers(self) -> None:
        """All of them, as torchrun does."""
        self.ending = False
        job, (launch, relaunched) = self.scenario.job, self.launch()
        start = functools.partial(self.plane.start, "trainer", job=job, launch=launch, relaunched=relaunched)
        self.ranks = [start(i) for i in range(self.scenario.trainers)]
        self.scripts.begin()

    def launch(self) -> tuple[str, bool]:
        """What the trainers that start now say of their launch, and whether it has started its trainers before."""
        return "launch", self.run.trainer_kills > 0

    def known(self, process: VirtualProcess) -> messages.Known:
        """What its node tells a coordinator that it rejoins."""
        name = process.name
        return self.hosts[name].known() if process.role == "server" else self.clients[name].known()

    def on_welcome(self, process: VirtualProcess) -> None:
        """A process has its name: its node is built."""
        name, rank = process.name, process.rank
        self.process_of[name] = process
        # A coordinator that nobody left has heard of may have given that name before: births tell the two apart.
        self.network.dead.discard(name)
        port = self.network.port(name, lambda word: self.plane.tell(process, word))
        if process.role == "server":
            host = self.hosts[name] = Host(name, port, self.settings)
            host.term, host.tier = process.rules.term, self.tier_of(name)
            host.reader = self.shelf.reader(host, lambda: name not in self.network.dead)
            host.writer = self.shelf.writer(host, lambda: name not in self.network.dead)
            self.network.handlers[name] = host.handle
            return
        self.clients[name] = Client(name, port, self.scenario.job, rank, self.settings, self.scenario.snapshot_every)
        self.scripts.on_welcome(rank, self.clients[name])

    def tier_of(self, name: str) -> Tier | None:
        """The tier of a server; None: it has none."""
        return tier_of(self.scenario.tier_frames)

    def on_control(self, process: VirtualProcess, word: messages.FromCoordinator) -> None:
        """The coordinator says something to a node."""
        name = process.name
        if name in self.hosts:
            self.hosts[name].on_control(word)
        elif name in self.clients:
            self.clients[name].on_control(word)

    def on_over(self, process: VirtualProcess, error: BaseException) -> None:
        """Its membership has ended. Who came too late, and has been taken for lost, joins as another."""
        if isinstance(error, Fenced):
            self.run.fenced += 1
            self.plane.end(process)
            self.network.dead.add(process.name)
            if process.role == "server":
                self.start_server(process)
            else:
                self._on_trainer_crash()
        elif isinstance(error, TrainersLost):
            self.kill(process)
        else:
            self.run.fatal = str(error)

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        """Message `number` of the control channel is on its way: nothing happens, unless a test says so."""

    def on_event(self, number: int) -> None:
        """Event `number` of the run is next: nothing happens, unless a test says so."""

    def kill(self, process: VirtualProcess) -> None:
        """The process is gone, whether it has a name or not."""
        if process.name:
            self.network.kill(process.name)
        elif not process.dead:
            self._on_end(process)

    # faults -------------------------------------------------------------------------------------

    def may_crash(self, name: str) -> bool:
        """Within the contract: with the slots that are lost or not rebuilt, no stripe misses more than r members."""
        if name in self.network.dead:
            return False
        if name in self.clients:  # any trainer at any time, while there are any who are not done
            return self.scenario.trainers_return and not self.scripts.done
        if name not in self.hosts:
            return False
        placed = enumerate(self.slots_known)
        if self.restores:  # who is lost reads the checkpoint elsewhere
            return True
        gone = {i for i, p in placed if not p.healthy or p.server in self.network.dead or p.server == name}
        return not any(repair.unrecoverable_bases(layout, gone) for layout in self.layouts)

    def _on_crash(self, name: str) -> None:
        """The network does not know the process any more."""
        self._on_end(self.process_of[name])

    def _on_end(self, process: VirtualProcess) -> None:
        self.plane.end(process)
        if process.role == "trainer":
            self._on_trainer_crash()
            return
        self.run.kills += 1
        if self.scenario.reborn:
            self.network.clock.later(REBORN_S, self.start_server)

    def leave(self, process: VirtualProcess) -> None:
        """A server is told to end, and says so; its supervisor starts no other."""
        self.run.leaves += 1
        self.plane.leave(process)
        self.network.dead.add(process.name)

    def _on_trainer_crash(self) -> None:
        """Torchrun ends the others, a little later, and starts all of them again."""
        if self.ending:
            return
        self.ending = True
        self.run.trainer_kills += 1

        def end_all() -> None:
            for process in self.ranks:
                self.kill(process)
            self.clients = {}
            self.network.clock.later(RESTART_S, self._start_trainers)

        self.network.clock.later(self.random.uniform(0.0, ENDING_S), end_all)

    def whole(self) -> bool:
        """Every slot is there, rebuilt, and known to be."""
        placed = self.coordinator.slots if self.plane.lives else []
        return bool(placed) and all(p.healthy and p.server not in self.network.dead for p in placed)

    def settled(self) -> bool:
        """Nothing is under way: every step applied everywhere, folded everywhere and acknowledged."""
        if not self.whole() or not all(client.all_survive for client in self.clients.values()):
            return False
        slots, scenario = self.slots(), self.scenario
        last = self.load_end + scenario.steps + len(scenario.overwrites)
        return len(slots) == self.scenario.code.slots and all(
            s.whole and s.rule.applied == s.rule.settled == last for s in slots
        )

    @property
    def load_end(self) -> int:
        """The step that training began after, as far as it is known."""
        return load_end_of(self.clients.values())

    def slots(self) -> list[Slot]:
        """The live incarnation of every slot, in order."""
        found = [
            host.slots[i]
            for i, place in enumerate(self.slots_known)
            if (host := self.hosts.get(place.server)) is not None
            and place.server not in self.network.dead
            and i in host.slots
        ]
        return found

    # trainers -----------------------------------------------------------------------------------

    def _after_step(self, trainer: int, step: int) -> None:
        if (trainer, step) in self.trainer_kills:
            self.trainer_kills.remove((trainer, step))
            self.kill(self.ranks[trainer])
        if trainer == 0:
            # Of earlier steps, too: whoever starts again after a step does not end it once more.
            for kill in [kill for kill in self.kills if kill[1] <= step]:
                self._kill_when_allowed(kill)

    def _kill_when_allowed(self, kill: tuple[int, int]) -> None:
        if kill not in self.kills:
            return
        host = self.slots_known[kill[0]].server
        if not self.scenario.settle_first or (self.whole() and self.may_crash(host)):
            self.kills.remove(kill)
            self.network.kill(host)
        else:
            self.network.clock.later(0.001, lambda: self._kill_when_allowed(kill))

    def _run_trainers(self) -> bool:
        """Until all of them wait; returns whether they are done."""
        self.scripts.go_on(lambda rank: self.ranks[rank].dead)
        return not self.ending and self.scripts.done

    def go(self) -> SimulationResult:
        """Runs to the end; raises RuntimeError, with the state of every slot, if it gets stuck."""
        random_kills, trainer_kills = self.scenario.random_kills, self.scenario.random_trainer_kills
        for event in range(EVENT_LIMIT):
            self.on_event(event)
            done = self._run_trainers()
            placed = self.slots_known
            if self.run.fatal is not None:
                break
            if self.random_coordinator_kills and placed and not done and self.plane.lives:
                if self.random.random() < self.scenario.kill_probability:
                    self.random_coordinator_kills -= 1
                    self.kill_coordinator()
            if random_kills and placed and not done and self.random.random() < self.scenario.kill_probability:
                victim = placed[self.random.randrange(len(placed))].server
                if self.may_crash(victim):
                    random_kills -= 1
                    self.network.kill(victim)
            if trainer_kills and placed and not done and self.random.random() < self.scenario.kill_probability:
                names = [name for name in self.clients if name not in self.network.dead]
                if names and not self.ending:
                    trainer_kills -= 1
                    self.network.kill(self.random.choice(names))
            if event % self.scenario.verify_every == 0:
                self.verify()
            if done and not self.kills and self.settled():
                break
            if not self.network.clock.advance() or self.network.clock.now_s > LIMIT_S:
                raise RuntimeError(f"stuck at {self.network.clock.now_s:.1f} s: {self.describe()}")
        else:
            raise RuntimeError(f"too many events: {self.describe()}")
        self.run.messages, self.run.seconds = self.network.sent, self.network.clock.now_s
        self.run.overdue, self.run.control_messages = self.network.overdue, self.plane.sent
        if self.run.fatal is None:
            self.verify()
            self.run.collect(self.slots())
            check_parity(self.slots())
        return self.run

    def describe(self) -> str:
        """State of every slot, for messages."""
        clients = [(c.name, c.step, c.complete, len(c.calls)) for c in self.clients.values()]
        rules = [(s.index, s.incarnation, s.ready, s.rule, s.missing.remaining, len(s.waiting)) for s in self.slots()]
        return f"trainers {clients}; slots {rules}; placement {self.coordinator.slots}"

    def verify(self) -> None:
        """What must hold at every moment; raises AssertionError."""
        self.verifier.check(self.slots(), list(self.clients.values()), self.slots_known)


def simulate(scenario: Scenario, faults: Sequence[Fault] = ()) -> SimulationResult:
    """Runs a scenario to its end; see `SimulationResult.check_against`."""
    return SimulatedCluster(scenario, faults).go()
