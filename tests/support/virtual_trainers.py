"""Trainers that run models over the simulated cluster, each in a thread that takes turns; and who of all is lost when.

    run = Trainers(job, script, kills=(Kill("server", 1, 40),)).go()

`script(rank, session)` is a trainer's script: it is started again, with a new session, when a trainer is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import Scenario, SimulatedCluster, check_parity
from harness.checkpoints import Shelf
from harness.membership import VirtualProcess
from pooled import as_rows
from torch import Tensor
from turns import Turns, one_process

from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Beginning, Session
from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.protocol.wire import Snapshot
from torch_ecrec.spec.job import CodeSpec, JobSpec

EVENTS_MOST = 50_000
OTHERS = "shelf"  # the folder of a checkpoint of another run


@dataclass(frozen=True)
class Kill:
    """Who is lost: a server, a trainer, or the coordinator. `at`: once so many messages were sent, and as soon as the
    contract lets a server be lost."""

    who: str
    which: int
    at: int


@dataclass
class Told:
    """What a session was told of tables, by step of training and trainer; what is told again must be the same bits."""

    pushes: dict[tuple[int, int], Any] = field(default_factory=dict)
    overwrites: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    again: int = 0

    def push(self, key: tuple[int, int], told: Any) -> None:
        before = self.pushes.setdefault(key, told)
        self.again += before is not told
        assert all(map(_same, _leaves(before), _leaves(told))), f"(step, trainer) {key}: another push than before"

    def sorted_pushes(self) -> dict[tuple[int, int], Any]:
        """By rows: in which order they go depends on the code."""
        return {key: [_by_rows(r, g) for r, g in zip(*told[:2], strict=True)] for key, told in self.pushes.items()}


def _by_rows(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    order = rows.argsort()
    return rows[order], gradients[order]


def _leaves(told: Any) -> list[Any]:
    return [leaf for part in told for leaf in part]


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


class TurnsSession(Session):
    """Waits by letting the other trainers go on, and virtual time pass."""

    cluster: Trainers

    def _wait(self, condition: Callable[[], bool], what: str, patient: bool = False) -> None:
        self.cluster.turns.until(lambda: condition() or self._waiting.failed, what)
        if self._waiting.failed:
            self._waiting.until(condition, what)  # raises it

    def push(
        self,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rates: Sequence[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        ahead: Sequence[tuple[Sequence[Tensor], Sequence[BagRoute]]] = (),
    ) -> None:
        all_rows, of_rows = as_rows(self.job.layouts, rows, gradients, bags, bag_gradients)
        self.cluster.told.push((self.step, self.trainer), ([r.clone() for r in all_rows], of_rows, list(rates)))
        self.cluster.pooled += sum(route.bags for route in bags)
        self.cluster.in_parts += sum(len(all_M := np.concatenate(r.places)) - len(np.unique(all_M)) for r in bags)
        self.cluster.asked_ahead += len(ahead)
        super().push(rows, gradients, rates, bags, bag_gradients, ahead)

    def overwrite(self, table_group: int, rows: Tensor, values: Tensor | None, first_byte: int = 0) -> None:
        told = (table_group, rows.clone(), None if values is None else values.clone(), first_byte)
        self.cluster.told.overwrites.setdefault((self.step, self.trainer), []).append(told)
        super().overwrite(table_group, rows, values, first_byte)


class OnShelf:
    """A checkpoint of a simulated run, for another one to begin with."""

    def __init__(self, shelf: Shelf, job: JobSpec, finished: Finished) -> None:
        self.records, self.done = shelf.records(job, finished), finished.done
        self._dense = shelf.parts[finished.folder, finished.dense_of].dense

    @property
    def beginning(self) -> Beginning:
        """As a trainer's session is given it."""
        return Beginning(self.done, self.dense)

    def dense(self) -> list[tuple[Tensor, list[int]]]:
        return [(payload, header) for _, (header, payload) in sorted(self._dense.items())]


class _Scripts:
    """In place of the scripts that the simulation has of its own."""

    def __init__(self, begin: Callable[[], None], on_welcome: Callable[[int, Client], None]) -> None:
        self.begin, self.on_welcome, self.done = begin, on_welcome, False


class Trainers(SimulatedCluster):
    """A simulated cluster whose trainers run a script each.

    Args:
        job: its tables; the code is `code`.
        script: (rank, session), of one trainer, from its start.
        kills: who is lost.
        begins: the checkpoint that the cluster begins with, of another run; None: with none.

    Attributes:
        fired: who was, in order.
        lives: how often all trainers were started.
        pooled: bags that slots have pooled, in all pushes.
        in_parts: vectors that several slots have made of one, beyond the first.
    """

    def __init__(
        self,
        job: JobSpec,
        script: Callable[[int, TurnsSession], None],
        *,
        code: CodeSpec | None = None,
        kills: Sequence[Kill] = (),
        begins: OnShelf | None = None,
        **scenario: Any,
    ) -> None:
        self._job, self._begins = job, begins
        if begins is not None:
            scenario["restore"] = Restored("memory://shelf", OTHERS, begins.done), job
        self.turns, self.told, self.script = Turns(self._idle), Told(), script
        self.lives, self.finished, self.pooled, self.in_parts, self.asked_ahead, self.fired = 0, 0, 0, 0, 0, []
        self.kills_to_come = sorted(kills, key=lambda kill: kill.at)
        self.events, self._life = 0, -1
        super().__init__(
            Scenario(
                tables=job.tables,
                trainers=job.trainers,
                seed=job.seed,
                code=code or job.code,
                trainers_return=True,
                rebuild_chunk_bytes=1 << 12,
                **scenario,
            )
        )
        if begins is not None:
            self.shelf.others[OTHERS] = begins.records
        self.scripts = _Scripts(lambda: None, self._begin)  # type: ignore[assignment]

    def tick_often(self) -> None:
        """The coordinator, from now on: the simulation, which is over within a second, does it more rarely."""
        if self.plane.lives:
            self.plane.router.on_tick(self.network.clock.now_s)
        self.network.clock.later(0.02, self.tick_often)

    def go(self) -> Trainers:  # type: ignore[override]
        """Until all scripts are done, everybody was lost who is to be, and all is whole. Checks the parities."""
        Turns.current = self.turns
        with one_process():
            self.turns.run(self._done)
        assert not self.kills_to_come and self.run.fatal is None
        self.run.collect(self.slots())
        check_parity(self.slots())
        return self

    # trainers ---------------------------------------------------------------------------------------

    def _begin(self, rank: int, client: Client) -> None:
        process = self.ranks[rank]
        life = process.number - rank
        if life != self._life:
            self._life, self.finished = life, 0
            self.lives += 1

        def body() -> None:
            self.turns.join(rank, self.scenario.trainers, life)
            session = self.session_of(client, process)
            session.cluster = self
            self.script(rank, session)
            self.finished += 1

        self.turns.start((life, rank), body, lambda: process.dead or process.name in self.network.dead)

    def session_of(self, client: Client, process: VirtualProcess) -> TurnsSession:
        """Of a trainer that was welcomed."""
        beginning = None if process.restored is None else self.checkpoint_of(process.restored.folder).beginning
        return TurnsSession(client, lambda message: None, lambda: None, process.restarted, beginning)

    def checkpoint_of(self, folder: str) -> OnShelf:
        """One that the cluster has begun with: another run's, or its own."""
        if self._begins is not None and folder == OTHERS:
            return self._begins
        return OnShelf(self.shelf, self._job, self.shelf.find(folder))

    def _on_trainer_crash(self) -> None:
        self.finished = 0
        super()._on_trainer_crash()

    def _done(self) -> bool:
        if self.finished < self.scenario.trainers or self.ending:
            return False
        if not self.all_settled():
            return False
        self.kills_to_come = [dataclasses.replace(kill, at=0) for kill in self.kills_to_come]  # no more messages come
        return not self.kills_to_come

    def all_settled(self) -> bool:
        """Whole, and every step applied, folded and acknowledged."""
        if not self.whole() or not all(client.all_survive for client in self.clients.values()):
            return False
        slots = self.slots()
        return len(slots) == self.scenario.code.slots and all(
            slot.whole and slot.rule.applied == slot.rule.settled == slots[0].rule.applied for slot in slots
        )

    # losses -----------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        self.events += 1
        assert self.run.fatal is None, self.run.fatal
        assert self.events < EVENTS_MOST, f"too many events: {self.describe()}"
        for kill in self.kills_to_come:
            if len(self.network.sent) >= kill.at and self._kill(kill):
                self.kills_to_come.remove(kill)
                self.fired.append(dataclasses.replace(kill, at=len(self.network.sent)))
                return True
        return self.network.clock.advance()

    def _kill(self, kill: Kill) -> bool:
        """Whether it came to pass."""
        if kill.who == "coordinator":
            alive = self.plane.lives and bool(self.coordinator.slots)
            if alive:
                self.kill_coordinator()
            return alive
        if kill.who == "trainer":
            process = self.ranks[kill.which % len(self.ranks)]
            if self.ending or process.dead or not process.name:
                return False
            self.kill(process)
            return True
        placed = self.slots_known
        server = placed[kill.which % len(placed)].server if placed else ""
        if not server or not self.may_crash(server):
            return False
        self.network.kill(server)
        return True


def snapshots(cluster: SimulatedCluster) -> int:
    """So many parts of dense snapshots were sent."""
    return sum(name == Snapshot.__name__ for _, _, name in cluster.network.sent)


def assert_same_after(run: Trainers, right: Trainers, done: int) -> None:
    """A run that began after so many steps of another pushed what that one did, and ends with its records."""
    pushes, wanted = run.told.sorted_pushes(), right.told.sorted_pushes()
    assert pushes.keys() == {key for key in wanted if key[0] > done}
    for key, push in pushes.items():
        for (rows, gradients), (right_rows, right_gradients) in zip(push, wanted[key], strict=True):
            assert torch.equal(rows, right_rows) and torch.equal(gradients, right_gradients), key
    for mine, theirs in zip(run.run.records, right.run.records, strict=True):
        assert torch.equal(mine, theirs)
