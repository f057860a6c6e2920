"""A whole cluster in one process on a virtual clock, fault plans, and checks of the contract.

The protocol core here is the one that runs under RPC: `Host`, `Client` and `Coordinator`, over `LocalNetwork`. Trainers
are small functions of what they looked up, so that a wrong read anywhere changes everything that follows.

    run = simulate(Scenario(), faults=[Fault("crash_receiver", 17)])
    run.check_against(simulate(Scenario()))     # raises AssertionError that names what differs

What is checked: every lookup, loss, record, optimizer state and dense value is bit-equal to the undisturbed run (I3,
I4); every parity is the code of its stripe (I1), so no delta was folded twice or not at all (I2); logs and kept pushes
are bounded (I6).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_ecrec import recovery
from torch_ecrec.client import Client, Route
from torch_ecrec.config import CodeSpec, JobSpec, OptimizerSpec, Settings, TableSpec
from torch_ecrec.coordinator import Coordinator
from torch_ecrec.server.service import Host
from torch_ecrec.server.slot import Slot
from torch_ecrec.transport.local import EOF_S, Fault, LocalNetwork

EVENT_LIMIT = 400_000
LIMIT_S = 120.0  # virtual


def small_tables() -> tuple[TableSpec, ...]:
    """Two slabs: one with state, one without; row counts that leave partial stripes and rotations."""
    adagrad = OptimizerSpec("rowwise_adagrad", lr=0.1)
    return (
        TableSpec("a", rows=17, dim=3, low=-1.0, high=1.0, optimizer=adagrad),
        TableSpec("b", rows=8, dim=3, low=-0.5, high=0.5, optimizer=adagrad),
        TableSpec("c", rows=13, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1)),
    )


@dataclass(frozen=True)
class Scenario:
    """What is simulated. `kills`: (slot, step) pairs: the host of the slot dies when that step is complete at a trainer.

    `settle_first`: a kill waits until the cluster is whole again, so that the losses stay within the contract.
    `reborn`: a killed server process starts again and joins.
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
    without_spare: str = "survivor"
    rebuild_chunk_bytes: int = 48
    random_kills: int = 0
    kill_probability: float = 0.01

    @property
    def job(self) -> JobSpec:
        return JobSpec(self.tables, self.code, self.trainers, self.seed)


def touched(scenario: Scenario, step: int, trainer: int) -> list[np.ndarray]:
    """Rows of each slab that a trainer touches in a step: a function of nothing but its arguments."""
    rng = np.random.default_rng([scenario.seed, step, trainer])
    return [np.flatnonzero(rng.random(slab.rows) < 0.4).astype(np.int64) for slab in scenario.job.slabs]


@dataclass
class Run:
    """What came of a simulation."""

    scenario: Scenario
    lookups: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    dense: list[float] = field(default_factory=list)
    records: list[torch.Tensor] = field(default_factory=list)
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    kills: int = 0
    fatal: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def check_against(self, undisturbed: Run) -> None:
        """Raises AssertionError naming the first difference."""
        assert self.fatal is None, f"stopped: {self.fatal}"
        for key, weights in undisturbed.lookups.items():
            for slab, (mine, theirs) in enumerate(zip(self.lookups[key], weights, strict=True)):
                assert torch.equal(mine, theirs), f"lookup of (step, trainer) {key} differs in slab {slab}"
        assert self.losses == undisturbed.losses, "losses differ"
        assert self.dense == undisturbed.dense, "dense values differ"
        for slab, (mine, theirs) in enumerate(zip(self.records, undisturbed.records, strict=True)):
            assert torch.equal(mine, theirs), f"records of slab {slab} differ"


class Cluster:
    """A running simulation; `simulate` is the short way."""

    def __init__(self, scenario: Scenario, faults: Sequence[Fault] = ()) -> None:
        self.scenario = scenario
        self.run = Run(scenario)
        self.settings = Settings(call_timeout_s=0.25, rebuild_chunk_bytes=scenario.rebuild_chunk_bytes)
        self.network = LocalNetwork(
            scenario.network_seed, crash=self._on_crash, may_crash=self._may_crash, faults=list(faults)
        )
        self.random = random.Random(scenario.network_seed * 7919 + 1)
        self.hosts: dict[str, Host] = {}
        self.clients: dict[str, Client] = {}
        self.names: dict[str, str] = {}
        self.contributions: dict[int, dict[int, float]] = {}
        self.dense_of = [1.0] * scenario.trainers
        self.kills = list(scenario.kills)
        self.coordinator = Coordinator(
            scenario.code,
            scenario.spares,
            ("virtual", 0),
            send=self._from_coordinator,
            announce=self.run.events.append,
            without_spare=scenario.without_spare,
            lease_s=1e9,
        )
        for _ in range(scenario.code.slots + scenario.spares):
            self.start_server()
        self.trainers = [self._trainer(i) for i in range(scenario.trainers)]
        self.ready_to: list[Callable[[], bool]] = [lambda: True] * scenario.trainers
        for i in range(scenario.trainers):
            self._join_trainer(i)
        self.network.clock.later(1.0, self._tick)

    # processes ----------------------------------------------------------------------------------

    def _message(self, **extra: Any) -> dict[str, Any]:
        import torch_ecrec

        return {"version": torch_ecrec.__version__, "pid": 0, **extra}

    def start_server(self) -> str:
        """A server process joins; returns its name."""
        message = self._message(role="server")
        name = self.coordinator.name_for(message)
        self.coordinator.on_join(name, message, self.network.clock.now_s)
        return name

    def _new_host(self, name: str) -> None:
        port = self.network.port(name, lambda message: self._to_coordinator(name, message))
        host = self.hosts[name] = Host(name, port, self.settings)
        self.network.handlers[name] = host.handle

    def _join_trainer(self, i: int) -> None:
        name = f"trainer-{i}"
        port = self.network.port(name, lambda message: self._to_coordinator(name, message))
        client = self.clients[name] = Client(name, port, self.scenario.job, i, self.settings)
        assert client.name == name
        refusal = self.coordinator.refusal(self._message(role="trainer", rank=i, job=self.scenario.job.to_json()))
        assert refusal is None, refusal
        message = self._message(role="trainer", rank=i, job=self.scenario.job.to_json())
        self.coordinator.on_join(name, message, self.network.clock.now_s)

    def _tick(self) -> None:
        self.coordinator.on_tick(self.network.clock.now_s)
        self.network.clock.later(1.0, self._tick)

    def _from_coordinator(self, name: str, message: dict[str, Any]) -> None:
        """In order, after the same delay for all: a TCP connection each."""
        self.network.clock.later(0.001, lambda: self._deliver(name, message))

    def _deliver(self, name: str, message: dict[str, Any]) -> None:
        if name in self.network.dead:
            return
        kind = message["type"]
        if kind == "welcome" and name.startswith("server"):
            self._new_host(name)
        elif kind == "generation":
            self._to_coordinator(name, {"type": "in_generation", "generation": message["generation"]})
        elif kind == "fatal":
            self.run.fatal = message["reason"]
        elif name in self.hosts:
            self.hosts[name].on_control(message)
        elif kind == "placement":
            from torch_ecrec.transport.wire import Placement

            client = self.clients[name]
            client.run(client.place, Placement.from_json(message["placement"]))

    def _to_coordinator(self, name: str, message: dict[str, Any]) -> None:
        def arrive() -> None:
            kind, c = message["type"], self.coordinator
            if kind == "in_generation":
                c.on_in_generation(name, message["generation"], self.network.clock.now_s)
            elif kind == "ready":
                c.on_ready(message["slot"], message["incarnation"])
            elif kind == "rebuilt":
                c.on_rebuilt(message["slot"], message["incarnation"])
            elif kind == "unrecoverable":
                c.on_unrecoverable(message["slot"])

        self.network.clock.later(0.001, arrive)

    # faults -------------------------------------------------------------------------------------

    def _may_crash(self, name: str) -> bool:
        """Faults kill servers that host slots, within the contract: nothing is being rebuilt, and the code can repair it."""
        if name not in self.hosts or not self.hosts[name].slots or not self.whole():
            return False
        host = self.hosts[name]
        return not any(recovery.unrecoverable_bases(layout, host.slots) for layout in host.layouts)

    def _on_crash(self, name: str) -> None:
        self.run.kills += 1
        self.network.clock.later(EOF_S, lambda: self.coordinator.on_lost(name, self.network.clock.now_s, "eof"))
        if self.scenario.reborn:
            self.network.clock.later(0.5, self.start_server)

    def whole(self) -> bool:
        """Every slot is there, rebuilt, and known to be."""
        placed = self.coordinator.slots
        return bool(placed) and all(p.healthy and p.server not in self.network.dead for p in placed)

    def settled(self) -> bool:
        """Nothing is under way: every step applied everywhere, folded everywhere and acknowledged."""
        if not self.whole() or any(client.exchanges for client in self.clients.values()):
            return False
        slots = self.slots()
        return len(slots) == self.scenario.code.slots and all(
            s.ready and s.rebuild.whole and s.rule.applied == s.rule.settled == self.scenario.steps for s in slots
        )

    def slots(self) -> list[Slot]:
        """The live incarnation of every slot, in order."""
        found = [
            host.slots[i]
            for i, place in enumerate(self.coordinator.slots)
            if (host := self.hosts.get(place.server)) is not None
            and place.server not in self.network.dead
            and i in host.slots
        ]
        return found

    def kill_host_of(self, slot: int) -> None:
        self.network.kill(self.coordinator.slots[slot].server)

    # trainers -----------------------------------------------------------------------------------

    def _trainer(self, i: int) -> Iterator[Callable[[], bool]]:
        """Yields conditions to wait for."""
        scenario, job = self.scenario, self.scenario.job
        yield lambda: self.clients[f"trainer-{i}"].placement is not None
        client = self.clients[f"trainer-{i}"]
        for step in range(1, scenario.steps + 1):
            rows = [torch.from_numpy(r) for r in touched(scenario, step, i)]
            routes: list[Route] = [client.route(s, r) for s, r in enumerate(rows)]
            got: list[list[torch.Tensor]] = []
            client.run(client.lookup, routes, got.append)
            yield lambda got=got: bool(got)  # type: ignore[misc]
            weights = got[0]
            self.run.lookups[step, i] = weights
            loss = float(sum(float(w.double().sum()) for w in weights)) + self.dense_of[i]
            self.run.losses[step, i] = loss
            gradients = [torch.sin(w * 3 + step + i + self.dense_of[i]) for w in weights]
            yield client.may_push
            client.run(client.push, routes, gradients, [slab.optimizer.lr for slab in job.slabs])
            self.contributions.setdefault(step, {})[i] = loss
            yield lambda step=step: len(self.contributions[step]) == scenario.trainers  # type: ignore[misc]
            total = sum(self.contributions[step][j] for j in sorted(self.contributions[step]))
            self.dense_of[i] = float(np.tanh(self.dense_of[i] + 0.1 * total))
            if i == 0:
                self.run.dense.append(self.dense_of[0])
            payload = torch.tensor([self.dense_of[i]], dtype=torch.float64).view(torch.uint8)
            client.run(client.snapshot, payload, f'{{"step": {step}}}')
            self._after_step(i, step)

    def _after_step(self, trainer: int, step: int) -> None:
        if trainer == 0:
            for slot, at in [kill for kill in self.kills if kill[1] == step]:
                self.kills.remove((slot, at))
                self._kill_when_allowed(slot)

    def _kill_when_allowed(self, slot: int) -> None:
        if self.whole() or not self.scenario.settle_first:
            self.kill_host_of(slot)
        else:
            self.network.clock.later(0.001, lambda: self._kill_when_allowed(slot))

    def _run_trainers(self) -> bool:
        moved = True
        while moved:
            moved = False
            for i, trainer in enumerate(self.trainers):
                if trainer is not None and self.ready_to[i]():
                    moved = True
                    try:
                        self.ready_to[i] = next(trainer)
                    except StopIteration:
                        self.trainers[i] = None  # type: ignore[call-overload]
        return all(trainer is None for trainer in self.trainers)

    def go(self) -> Run:
        """Runs to the end; raises RuntimeError, with the state of every slot, if it gets stuck."""
        random_kills = self.scenario.random_kills
        for _ in range(EVENT_LIMIT):
            done = self._run_trainers()
            if self.run.fatal is not None:
                break
            if random_kills and not done and self.random.random() < self.scenario.kill_probability:
                victim = self.coordinator.slots[self.random.randrange(self.scenario.code.slots)].server if self.whole() else ""
                if self._may_crash(victim):
                    random_kills -= 1
                    self.network.kill(victim)
            if done and not self.kills and self.settled():
                break
            if not self.network.clock.advance() or self.network.clock.now_s > LIMIT_S:
                raise RuntimeError(f"stuck at {self.network.clock.now_s:.1f} s: {self.describe()}")
        else:
            raise RuntimeError(f"too many events: {self.describe()}")
        self.run.messages, self.run.seconds = self.network.sent, self.network.clock.now_s
        if self.run.fatal is None:
            self._collect()
        return self.run

    def describe(self) -> str:
        """State of every slot, for messages."""
        clients = [(c.name, c.step, c.complete, len(c.exchanges)) for c in self.clients.values()]
        rules = [(s.index, s.incarnation, s.ready, s.rule, s.rebuild.remaining, len(s.waiting)) for s in self.slots()]
        return f"trainers {clients}; slots {rules}; placement {self.coordinator.slots}"

    def _collect(self) -> None:
        job, slots = self.scenario.job, self.slots()
        for s, slab in enumerate(job.slabs):
            records = np.zeros((slab.rows, slab.width), dtype=np.float32)
            for slot in slots:
                layout = slot.layouts[s]
                positions = np.arange(layout.data_rows(slot.index), dtype=np.int64)
                records[layout.row_at(slot.index, positions)] = slot.shards[s].records
            self.run.records.append(torch.from_numpy(records))
        for index in range(min(self.scenario.code.parities + 1, len(slots))):
            for (step, _), (_, payload) in slots[index].snapshots.items():
                self.run.snapshots[step] = payload
        check_parity(slots)


def check_parity(slots: Sequence[Slot]) -> None:
    """I1: every parity is the code of its stripe's records; raises AssertionError that names the first that is not."""
    for s, shard in enumerate(slots[0].shards):
        layout, code = slots[0].layouts[s], slots[0].code
        width = shard.bytes.shape[1]
        stripes = np.arange(layout.stripes, dtype=np.int64)
        base, rotation = stripes % layout.slots, stripes // layout.slots
        data = np.zeros((code.k, layout.stripes, width), dtype=np.uint8)
        for member in range(code.k):
            for stripe in np.flatnonzero(stripes * code.k + member < layout.rows):
                holder = slots[int(layout.member_slot[base[stripe], member])]
                position = rotation[stripe] * code.k + layout.member_rank[base[stripe], member]
                data[member, stripe] = holder.shards[s].bytes[position]
        parity = code.encode(data)
        for j in range(code.n - code.k):
            for stripe in range(layout.stripes):
                holder = slots[int(layout.member_slot[base[stripe], code.k + j])]
                position = rotation[stripe] * (code.n - code.k) + layout.member_rank[base[stripe], code.k + j]
                assert np.array_equal(holder.shards[s].parity[position], parity[j, stripe]), (
                    f"parity {j} of stripe {stripe} in slab {s}, on slot {holder.index}, is not the code of its stripe"
                )


def simulate(scenario: Scenario, faults: Sequence[Fault] = ()) -> Run:
    """Runs a scenario to its end; see `Run.check_against`."""
    return Cluster(scenario, faults).go()
