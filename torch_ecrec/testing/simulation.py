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

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch

from torch_ecrec.client.client import Client
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.layout import repair
from torch_ecrec.layout.routing import Parts, Route
from torch_ecrec.layout.stripes import Layout, StripeGroup
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import SlotPlace
from torch_ecrec.server.service import Host
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.testing.membership import RESTART_S, Connection, ControlPlane, Process
from torch_ecrec.transport.local import LATE, Fault, LocalNetwork

EVENT_LIMIT = 400_000
ENDING_S = 0.02  # from a trainer's death to that of the others, at most; new ones start `RESTART_S` later
REBORN_S = 0.5  # from a server's death to the start of another in its place
LIMIT_S = 120.0  # virtual
WINDOW = Settings().window_steps
BOUNDS = {  # in steps: what a slot or a trainer keeps at most
    "open steps": WINDOW,
    "kept pushes": WINDOW,
    "early folds": 2 * WINDOW,
    "log": 4 * WINDOW,
    "fold log": 4 * WINDOW,
    "snapshots": 4 * WINDOW,
}


def small_tables() -> tuple[TableSpec, ...]:
    """Two slabs: one with state, one without; row counts that leave partial stripes and rotations."""
    adagrad = OptimizerSpec("rowwise_adagrad", lr=0.1)
    return (
        TableSpec("a", rows=17, dim=3, low=-1.0, high=1.0, optimizer=adagrad),
        TableSpec("b", rows=8, dim=3, low=-0.5, high=0.5, optimizer=adagrad),
        TableSpec("c", rows=13, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
    )


@dataclass(frozen=True)
class Load:
    """Rows first to end - 1 of a slab get other values, or a function of those that they hold (`change`)."""

    slab: int
    first: int
    end: int
    change: bool = False

    def values(self, before_UW: torch.Tensor) -> torch.Tensor:
        """(U, W) what the rows hold then; a changed row keeps its last column, as optimizer state is kept."""
        if self.change:
            after_UW = before_UW * 0.5 + 1.0
            after_UW[:, -1] = before_UW[:, -1]
            return after_UW
        rng = np.random.default_rng([self.slab, self.first, self.end])
        return torch.from_numpy(rng.random(tuple(before_UW.shape), dtype=np.float32) + 0.25)


LOADS = (  # of `small_tables`: table a in portions and some of it twice; stripes that a shares with b; some of c
    Load(0, 0, 9),
    Load(0, 9, 17),
    Load(0, 4, 12, change=True),
    Load(0, 15, 20, change=True),
    Load(1, 3, 8),
    Load(1, 2, 9, change=True),
)


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Args:
        loads: what trainer 0 loads before training, in this order.
        loads_before: what the first trainers load, who are lost before they have loaded all; None: the same.
        kills: (slot, step) pairs: the host of the slot dies when that step is complete at trainer 0.
        settle_first: such a kill waits until the cluster is whole again, so that the losses stay within the contract.
        reborn: a killed server process starts again and joins.
        trainer_kills: (trainer, step) pairs: that trainer dies when it has completed the step.
        random_trainer_kills: so many trainers die at random moments, likewise.
        random_coordinator_kills: the coordinator dies so often, likewise.
        trainers_return: faults may kill trainers; whenever one dies, all of them are ended and started again.
        random_kills: so many servers die at random moments, as often as `kill_probability` says per event.
        noise: how often a request is dropped, its answer lost, or it arrives twice: a probability for each.
        late: how often a request or an answer takes much longer than others.
        verify_every: how many events lie between two looks of the verifiers.
    """

    code: CodeSpec = CodeSpec(slots=3, k=2, r=1)
    tables: tuple[TableSpec, ...] = field(default_factory=small_tables)
    trainers: int = 2
    spares: int = 1
    steps: int = 4
    seed: int = 0
    network_seed: int = 0
    kills: tuple[tuple[int, int], ...] = ()
    settle_first: bool = True
    reborn: bool = False
    trainer_kills: tuple[tuple[int, int], ...] = ()
    random_trainer_kills: int = 0
    trainers_return: bool = False
    random_coordinator_kills: int = 0
    without_spare: str = "survivor"
    rebuild_chunk_bytes: int = 48
    random_kills: int = 0
    kill_probability: float = 0.01
    noise: float = 0.0
    late: float = LATE
    verify_every: int = 60
    call_timeout_s: float = 0.25
    wire: str = "float32"
    snapshot_every: int = 1
    loads: tuple[Load, ...] = ()
    loads_before: tuple[Load, ...] | None = None

    @property
    def job(self) -> JobSpec:
        return JobSpec(self.tables, self.code, self.trainers, self.seed)


def touched(scenario: Scenario, step: int, trainer: int) -> list[np.ndarray]:
    """Rows of each slab that a trainer touches in a step: a function of nothing but its arguments."""
    rng = np.random.default_rng([scenario.seed, step, trainer])
    return [np.flatnonzero(rng.random(slab.rows) < 0.4).astype(np.int64) for slab in scenario.job.slabs]


def loss_of(weights: Sequence[torch.Tensor], dense: float) -> float:
    """A trainer's loss: a function of all that it looked up, and of its dense model, which is one number."""
    return sum(float(weight_UD.double().sum()) for weight_UD in weights) + dense


def gradients_of(weights: Sequence[torch.Tensor], step: int, trainer: int, dense: float) -> list[torch.Tensor]:
    return [torch.sin(weight_UD * 3 + step + trainer + dense) for weight_UD in weights]


def load_all(
    client: Client,
    loads: Sequence[Load],
    on_read: Callable[[int, torch.Tensor], None] = lambda number, records_UW: None,
) -> Iterator[Callable[[], bool]]:
    """What a session of trainer 0 does to load: yields conditions to wait for, as a trainer's script does.

    Args:
        client: of trainer 0, which knows where it resumes.
        loads: in this order.
        on_read: gets the number of a load that changes what there is, and what it has read.
    """
    for slab, rows in client.left_behind():
        yield client.may_push
        client.run(client.load, slab, client.route(slab, rows), None)
    for number, load in enumerate(loads):
        route = client.route(load.slab, torch.arange(load.first, load.end))
        records_UW = torch.zeros(load.end - load.first, client.job.slabs[load.slab].schema.width)
        if load.change:
            read: list[torch.Tensor] = []
            client.run(client.read, load.slab, route, read.append)
            yield lambda read=read: bool(read)  # type: ignore[misc]
            records_UW = read[0].view(torch.float32)
            on_read(number, records_UW)
        yield client.may_push
        client.run(client.load, load.slab, route, load.values(records_UW).view(torch.uint8))
    yield client.all_acknowledged
    client.run(client.end_loading)


def dense_after(dense: float, losses: Mapping[int, float]) -> float:
    """The dense model after a step, given the losses of all trainers."""
    return float(np.tanh(dense + 0.1 * sum(losses[trainer] for trainer in sorted(losses))))


def payload_of(dense: float) -> torch.Tensor:
    """The dense model as bytes, for a snapshot."""
    return torch.tensor([dense], dtype=torch.float64).view(torch.uint8)


@dataclass
class Run:
    """What came of a simulation."""

    scenario: Scenario
    lookups: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    dense: dict[int, float] = field(default_factory=dict)  # after each step
    reads: dict[int, torch.Tensor] = field(default_factory=dict)  # what was read for each load that changes
    records: list[torch.Tensor] = field(default_factory=list)
    snapshots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (step, trainer)
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    kills: int = 0  # of servers
    trainer_kills: int = 0
    coordinator_kills: int = 0
    leaves: int = 0  # of servers, told to end
    control_messages: int = 0
    fenced: int = 0
    resumed: list[int] = field(default_factory=list)  # steps of training after which new trainers went on
    loaded_again: int = 0  # how often new trainers took back what lost ones had loaded
    fatal: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    overdue: list[int] = field(default_factory=list)
    longest: dict[str, int] = field(default_factory=dict)  # of each bounded thing, in steps

    def check_against(self, undisturbed: Run) -> None:
        """Raises AssertionError naming the first difference."""
        assert self.fatal is None, f"stopped: {self.fatal}"
        for number, read in undisturbed.reads.items():
            assert torch.equal(self.reads[number], read), f"what was read for load {number} differs"
        for key, weights in undisturbed.lookups.items():
            for slab, (mine, theirs) in enumerate(zip(self.lookups[key], weights, strict=True)):
                assert torch.equal(mine, theirs), f"lookup of (step, trainer) {key} differs in slab {slab}"
        assert self.losses == undisturbed.losses, "losses differ"
        assert self.dense == undisturbed.dense, "dense values differ"
        for slab, (mine, theirs) in enumerate(zip(self.records, undisturbed.records, strict=True)):
            assert torch.equal(mine, theirs), f"records of slab {slab} differ"
        every = self.scenario.snapshot_every
        last = self.scenario.steps // every * every
        for trainer in range(self.scenario.trainers if last else 0):
            mine, theirs = self.snapshots[last, trainer], undisturbed.snapshots[last, trainer]
            assert torch.equal(mine, theirs), f"the last snapshot of trainer {trainer} differs"


class Cluster:
    """A running simulation; `simulate` is the short way."""

    def __init__(self, scenario: Scenario, faults: Sequence[Fault] = ()) -> None:
        self.scenario = scenario
        self.run = Run(scenario)
        self.settings = Settings(
            call_timeout_s=scenario.call_timeout_s,
            rebuild_chunk_bytes=scenario.rebuild_chunk_bytes,
            wire=scenario.wire,
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
        code, slabs = scenario.code, scenario.job.slabs
        self.layouts = [Layout(code.slots, code.k, code.parities, slab.rows) for slab in slabs]
        self.plane = ControlPlane(
            code,
            scenario.spares,
            scenario.without_spare,
            scenario.network_seed,
            self.network.clock,
            handlers=self,
            announce=self.run.events.append,
        )
        self.process_of: dict[str, Process] = {}  # by name
        self.acknowledged: dict[tuple[int, int], int] = {}  # (era, slot) -> the most that any life of it acknowledged
        self.random = random.Random(scenario.network_seed * 7919 + 1)
        self.hosts: dict[str, Host] = {}
        self.clients: dict[str, Client] = {}
        self.contributions: dict[int, dict[int, float]] = {}
        self.dense_of = [1.0] * scenario.trainers
        self.kills = list(scenario.kills)
        self.trainer_kills = list(scenario.trainer_kills)
        self.ending = False  # a trainer died: the others are being ended, and all started again
        self.random_coordinator_kills = scenario.random_coordinator_kills
        self.placed: list[SlotPlace] = []  # as the coordinator knew them last
        for _ in range(scenario.code.slots + scenario.spares):
            self.start_server()
        self.ranks: list[Process] = []  # the trainers, by rank
        self.trainers: list[Iterator[Callable[[], bool]] | None] = []
        self.ready_to: list[Callable[[], bool]] = []
        self.lives = 0  # of the trainers
        self._start_trainers()

    # processes ----------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        return self.plane.core

    @property
    def slots_known(self) -> list[SlotPlace]:
        """The coordinator's placement, or that of the one before while it does not know."""
        self.placed = self.coordinator.slots or self.placed
        return self.placed

    def kill_coordinator(self) -> None:
        """It is gone, and another one comes soon, which knows nothing."""
        if self.plane.lives:
            self.placed = list(self.slots_known)
            self.run.coordinator_kills += 1
            self.plane.kill_coordinator()

    def start_server(self) -> None:
        """A server process starts, and joins."""
        self.plane.start("server")

    def _start_trainers(self) -> None:
        """All of them, as torchrun does."""
        self.ending = False
        self.contributions = {}
        self.lives += 1
        job = self.scenario.job
        self.ranks = [self.plane.start("trainer", i, job) for i in range(self.scenario.trainers)]
        self.trainers = [iter(()) for _ in self.ranks]
        self.ready_to = [lambda: False] * len(self.ranks)  # until it has a name

    def known(self, process: Process) -> dict[str, Any]:
        """What its node tells a coordinator that it rejoins."""
        name = process.name
        return self.hosts[name].known() if process.role == "server" else self.clients[name].known()

    def on_welcome(self, process: Process) -> None:
        """A process has its name: its node is built."""
        name, rank = process.name, process.rank
        self.process_of[name] = process
        port = self.network.port(name, lambda message: self.plane.tell(process, message))
        if process.role == "server":
            host = self.hosts[name] = Host(name, port, self.settings)
            self.network.handlers[name] = host.handle
            return
        self.clients[name] = Client(name, port, self.scenario.job, rank, self.settings, self.scenario.snapshot_every)
        self.trainers[rank] = self._trainer(rank, name)
        self.ready_to[rank] = lambda: True

    def on_control(self, process: Process, message: dict[str, Any]) -> None:
        """A message of the coordinator for a node."""
        name = process.name
        if name in self.hosts:
            self.hosts[name].on_control(message)
        elif name in self.clients:
            self.clients[name].on_control(message)

    def on_fatal(self, process: Process, message: dict[str, Any]) -> None:
        """It is told to end. Who came too late, and has been taken for lost, joins as another."""
        if message["kind"] == "fenced":
            self.run.fenced += 1
            self.plane.end(process)
            self.network.dead.add(process.name)
            if process.role == "server":
                self.start_server()
            else:
                self._on_trainer_crash()
        elif message["kind"] == "trainers_lost":
            self.kill(process)
        else:
            self.run.fatal = message["reason"]

    def on_sent(self, number: int, connection: Connection) -> None:
        """Message `number` of the control channel is on its way: nothing happens, unless a test says so."""

    def kill(self, process: Process) -> None:
        """The process is gone, whether it has a name or not."""
        if process.name:
            self.network.kill(process.name)
        elif not process.dead:
            self._on_end(process)

    # faults -------------------------------------------------------------------------------------

    def may_crash(self, name: str) -> bool:
        """Within the contract: with the slots that are lost or not rebuilt, no stripe misses more than r members.

        Not before a slot that shares a server is moved to a process that comes back: until it is rebuilt there, the
        move counts as a loss, and the coordinator may decide on it before it hears of this one.
        """
        if name in self.network.dead:
            return False
        if name in self.clients:  # any trainer at any time, while there are any who are not done
            return self.scenario.trainers_return and any(trainer is not None for trainer in self.trainers)
        if name not in self.hosts:
            return False
        servers = [place.server for place in self.slots_known]
        if self.scenario.reborn and len(set(servers)) < len(servers):
            return False
        placed = enumerate(self.slots_known)
        gone = {i for i, p in placed if not p.healthy or p.server in self.network.dead or p.server == name}
        return not any(repair.unrecoverable_bases(layout, gone) for layout in self.layouts)

    def _on_crash(self, name: str) -> None:
        """The network does not know the process any more."""
        self._on_end(self.process_of[name])

    def _on_end(self, process: Process) -> None:
        self.plane.end(process)
        if process.role == "trainer":
            self._on_trainer_crash()
            return
        self.run.kills += 1
        if self.scenario.reborn:
            self.network.clock.later(REBORN_S, self.start_server)

    def leave(self, process: Process) -> None:
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
        if not self.whole() or any(client.exchanges for client in self.clients.values()):
            return False
        slots = self.slots()
        return len(slots) == self.scenario.code.slots and all(
            s.whole and s.rule.applied == s.rule.settled == self.origin + self.scenario.steps for s in slots
        )

    @property
    def origin(self) -> int:
        """The step that training began after, as far as it is known."""
        return max((client.origin or 0 for client in self.clients.values()), default=0)

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

    def _trainer(self, i: int, name: str) -> Iterator[Callable[[], bool]]:
        """Yields conditions to wait for."""
        scenario, job, client = self.scenario, self.scenario.job, self.clients[name]
        yield lambda: client.placement is not None and client.resumed
        self.dense_of[i], done = 1.0, 0
        if client.origin is not None:
            done = client.resume_step - client.origin
            self.run.resumed += [done] if i == 0 else []
        elif i == 0:
            yield from load_all(client, self._loads, self._on_read)
            self.run.loaded_again += client.resume_step > 0
        yield lambda: client.origin is not None
        if done:
            stored: list[wire.Snapshots] = []
            client.run(client.stored, 0, client.resume_step, stored.append)
            yield lambda: bool(stored)
            payload = stored[0].payloads[stored[0].trainers.index(i)]
            self.dense_of[i] = float(payload.view(torch.float64))
        for step in range(done + 1, scenario.steps + 1):
            rows = [torch.from_numpy(r) for r in touched(scenario, step, i)]
            routes: list[Route] = [client.route(s, r) for s, r in enumerate(rows)]
            got: list[list[Parts]] = []
            client.run(client.lookup, routes, got.append)
            yield lambda got=got: bool(got)  # type: ignore[misc]
            weights = [torch.cat(parts) for parts in got[0]]
            self._same(self.run.lookups, (step, i), weights)
            loss = loss_of(weights, self.dense_of[i])
            self._same(self.run.losses, (step, i), loss)
            gradients = gradients_of(weights, step, i, self.dense_of[i])
            yield client.may_push
            client.run(client.push, routes, gradients, [slab.optimizer.lr for slab in job.slabs])
            self.contributions.setdefault(step, {})[i] = loss
            yield lambda step=step: len(self.contributions[step]) == scenario.trainers  # type: ignore[misc]
            self.dense_of[i] = dense_after(self.dense_of[i], self.contributions[step])
            if i == 0:
                self._same(self.run.dense, step, self.dense_of[0])
            if client.snapshot_due(client.step - 1):
                client.run(client.snapshot, payload_of(self.dense_of[i]), [step])
            self._after_step(i, step)

    @property
    def _loads(self) -> tuple[Load, ...]:
        before = self.scenario.loads_before
        return before if before is not None and self.lives == 1 else self.scenario.loads

    def _on_read(self, number: int, records_UW: torch.Tensor) -> None:
        if self._loads is self.scenario.loads:
            self._same(self.run.reads, number, records_UW)

    @staticmethod
    def _same(known: dict[Any, Any], key: Any, value: Any) -> None:
        """Records a value; one that is known from before the trainers went back must be the same."""
        values, before = (v if isinstance(v, list) else [v] for v in (value, known.setdefault(key, value)))
        same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(values, before, strict=True))
        assert same, f"(step, trainer) {key}: another value after going back than before"

    def _after_step(self, trainer: int, step: int) -> None:
        if (trainer, step) in self.trainer_kills:
            self.trainer_kills.remove((trainer, step))
            self.kill(self.ranks[trainer])
        if trainer == 0:
            for kill in [kill for kill in self.kills if kill[1] == step]:
                self._kill_when_allowed(kill)

    def _kill_when_allowed(self, kill: tuple[int, int]) -> None:
        host = self.slots_known[kill[0]].server
        if not self.scenario.settle_first or (self.whole() and self.may_crash(host)):
            self.kills.remove(kill)
            self.network.kill(host)
        else:
            self.network.clock.later(0.001, lambda: self._kill_when_allowed(kill))

    def _run_trainers(self) -> bool:
        moved = True
        while moved:
            moved = False
            for i, (process, trainer) in enumerate(zip(list(self.ranks), list(self.trainers), strict=True)):
                if trainer is not None and not process.dead and self.ready_to[i]():
                    moved = True
                    try:
                        self.ready_to[i] = next(trainer)
                    except StopIteration:
                        self.trainers[i] = None
        return not self.ending and all(trainer is None for trainer in self.trainers)

    def go(self) -> Run:
        """Runs to the end; raises RuntimeError, with the state of every slot, if it gets stuck."""
        random_kills, trainer_kills = self.scenario.random_kills, self.scenario.random_trainer_kills
        for event in range(EVENT_LIMIT):
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
            self._collect()
        return self.run

    def describe(self) -> str:
        """State of every slot, for messages."""
        clients = [(c.name, c.step, c.complete, len(c.exchanges)) for c in self.clients.values()]
        rules = [(s.index, s.incarnation, s.ready, s.rule, s.missing.remaining, len(s.waiting)) for s in self.slots()]
        return f"trainers {clients}; slots {rules}; placement {self.coordinator.slots}"

    # verifiers that ride along -------------------------------------------------------------------

    def verify(self) -> None:
        """What must hold at every moment; raises AssertionError."""
        slots = {slot.index: slot for slot in self.slots() if slot.ready}
        for slot in slots.values():
            self._verify_acknowledged(slot, slots)
            check_parity_as_of(slot, slots)
        self._verify_snapshots(slots)
        self._verify_bounds(slots)

    def _verify_acknowledged(self, slot: Slot, slots: dict[int, Slot]) -> None:
        rule, index, key = slot.rule, slot.index, (slot.host.era, slot.index)
        if slot.host.frozen:
            return
        before = self.acknowledged.get(key, 0)
        assert rule.acknowledged >= before, (
            f"slot {index} acknowledged {before}, its incarnation {slot.incarnation} knows {rule.acknowledged}"
        )
        self.acknowledged[key] = rule.acknowledged
        for holder in rule.holders:
            if knows(slot, other := slots.get(holder)) and knows(other, slot) and index in other.rule.folded:
                folded = other.rule.folded[index]
                assert rule.confirmed[holder] <= folded, (
                    f"slot {index} counts step {rule.confirmed[holder]} as folded by {holder}, which folded {folded}"
                )
                assert rule.acknowledged <= folded or not self.slots_known[holder].healthy, (
                    f"slot {index} acknowledged {rule.acknowledged}, but {holder}, which is whole, has folded {folded}"
                )

    def _verify_snapshots(self, slots: dict[int, Slot]) -> None:
        """Of the last step that every trainer calls complete, each holder that is whole has the dense snapshot."""
        clients = self.clients.values()
        step = min((client.resumable for client in clients), default=0)
        in_training = step > self.origin and all(client.origin is not None for client in clients)
        for holder in range(self.scenario.code.parities + 1) if in_training else ():
            if holder in slots and self.slots_known[holder].healthy:
                for trainer in range(self.scenario.trainers):
                    assert (step, trainer) in slots[holder].snapshots.parts, (
                        f"slot {holder} lacks the snapshot of trainer {trainer} of step {step}, which is complete"
                    )

    def _verify_bounds(self, slots: dict[int, Slot]) -> None:
        longest = self.run.longest
        for slot in slots.values():
            for what, steps in steps_kept(slot).items():
                longest[what] = max(longest.get(what, 0), steps)
        for client in self.clients.values():
            longest["open steps"] = max(longest.get("open steps", 0), len(client.open))
        more = self.scenario.snapshot_every - 1  # logs reach back to the last snapshot
        beyond = {what: steps for what, steps in longest.items() if steps > BOUNDS[what] + more}
        assert not beyond, f"kept for more steps than {BOUNDS}: {beyond}"

    def _collect(self) -> None:
        job, slots = self.scenario.job, self.slots()
        for s, slab in enumerate(job.slabs):
            records = np.zeros((slab.rows, slab.schema.width), dtype=np.float32)
            for slot in slots:
                layout = slot.layouts[s]
                positions = np.arange(layout.data_rows(slot.index), dtype=np.int64)
                records[layout.row_at(slot.index, positions)] = slot.shards[s].gather(positions).view(np.float32)
            self.run.records.append(torch.from_numpy(records))
        for index in range(min(self.scenario.code.parities + 1, len(slots))):
            for (step, trainer), (_, payload) in slots[index].snapshots.parts.items():
                key = step - self.origin, trainer
                known = self.run.snapshots.setdefault(key, payload)
                assert torch.equal(known, payload), f"the snapshots of (step, trainer) {key} differ between slots"
        check_parity(slots)


def knows(slot: Slot | None, other: Slot | None) -> TypeGuard[Slot]:
    """Whether both are there, neither has gone back before the other, and `slot` knows the present life of `other`."""
    if slot is None or other is None or slot.host.history != other.host.history:
        return False
    return slot.rule.incarnations[other.index] == other.incarnation


def steps_kept(slot: Slot) -> dict[str, int]:
    """For how many steps a slot keeps each thing that `BOUNDS` limits."""
    return {
        "log": slot.log.last - slot.log.floor,
        "kept pushes": len(slot.inbox),
        "snapshots": len(slot.snapshots.trainers_of()),
        **slot.durability.steps_kept(),
    }


def parity_of(holder: Slot, slab: int, group: StripeGroup, records: Sequence[np.ndarray]) -> np.ndarray:
    """(G, B) what the parities of a group should be; `records`: per data member, those of the stripes that have it."""
    layout, code = holder.layouts[slab], holder.code
    expected = np.zeros((len(group.where), holder.shards[slab].schema.nbytes), dtype=np.uint8)
    for member, records_MB in enumerate(records):
        rows_M = np.flatnonzero(layout.exists(group.base, member, group.rotations)).astype(np.int64)
        coefficient = code.coefficients[group.member - code.k, member]
        code.fold_(expected, rows_M, records_MB, np.full(len(rows_M), coefficient, dtype=np.uint8))
    return expected


def check_parity_as_of(holder: Slot, slots: dict[int, Slot]) -> None:
    """I2 at any moment: a parity is the code of its stripe's records as of what its holder has folded of each.

    Looks at the stripes of which nothing is missing and all members know each other's present incarnation.
    """
    for slab, shard in enumerate(holder.shards):
        layout, code = holder.layouts[slab], holder.code
        for group in layout.group(holder.index, True, np.arange(shard.parity_rows, dtype=np.int64)):
            here = holder.missing.present(slab, True, group.where)
            there = np.ones(len(group.where), dtype=bool) if here is None else here
            records = []
            for member in range(code.k):
                index = int(layout.member_slot[group.base, member])
                source, step = slots.get(index), holder.rule.folded.get(index)
                if not (knows(source, holder) and knows(holder, source)) or step is None:
                    break
                assert step <= source.rule.applied, (
                    f"slot {holder.index} has folded step {step} of {index}, not applied"
                )
                if step < min(source.log.floor, source.rule.applied):
                    break
                exists = layout.exists(group.base, member, group.rotations)
                positions = layout.position(group.base, member, group.rotations)[exists]
                present = source.missing.present(slab, False, positions)
                if present is not None:
                    there[exists] &= present
                records.append(source.held.records_as_of(slab, positions, step))
            else:
                right = (parity_of(holder, slab, group, records) == shard.gather(group.where, parity=True)).all(axis=1)
                assert (right | ~there).all(), (
                    f"a parity of base {group.base} in slab {slab} on slot {holder.index} is not the code of its stripe"
                    f" as of {holder.rule.folded}"
                )


def check_parity(slots: Sequence[Slot]) -> None:
    """I1: every parity is the code of its stripe's records; raises AssertionError that names the first that is not."""
    for s, shard in enumerate(slots[0].shards):
        layout, code = slots[0].layouts[s], slots[0].code
        width = shard.schema.nbytes
        stripes = np.arange(layout.stripes, dtype=np.int64)
        base, rotation = stripes % layout.slots, stripes // layout.slots
        data = np.zeros((code.k, layout.stripes, width), dtype=np.uint8)
        for member in range(code.k):
            for stripe in np.flatnonzero(stripes * code.k + member < layout.rows):
                holder = slots[int(layout.member_slot[base[stripe], member])]
                position = layout.first_position(int(base[stripe]), member) + rotation[stripe]
                data[member, stripe] = holder.shards[s].gather(np.array([position]))[0]
        parity = code.encode(data)
        for j in range(code.n - code.k):
            for stripe in stripes:
                holder = slots[int(layout.member_slot[base[stripe], code.k + j])]
                position = layout.first_position(int(base[stripe]), code.k + j) + rotation[stripe]
                here = holder.shards[s].gather(np.array([position]), parity=True)[0]
                assert np.array_equal(here, parity[j, stripe]), (
                    f"parity {j} of stripe {stripe} in slab {s}, on slot {holder.index}, is not the code of its stripe"
                )


def simulate(scenario: Scenario, faults: Sequence[Fault] = ()) -> Run:
    """Runs a scenario to its end; see `Run.check_against`."""
    return Cluster(scenario, faults).go()
