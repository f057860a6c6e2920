"""One process each of a small cluster, as a machine that events drive: the real core, and nothing around it.

A `Process` gets one event at a time (`on`) and leaves what it says in `out`. It has no clock and no randomness, so what
it does follows from its birth and the events since. `exploration` puts these together in every order.

Events (kind, what): `request` (a `Call`), `answer` (token, answer), `end` (token: the one asked is gone), `loss` (step,
trainer, loss), `told` (a message of the coordinator), `time` (pauses are over), `rejoin` (a new coordinator is there);
at the coordinator `heard` (name, message), `lost` (name), `lease` (name: silent for too long), `complaints` (pairs that
cannot reach each other), `drain` (server), `join`, `start` (all trainers), `time`.

What is in `out`: ("request", `Call`), ("answer", asker, token, answer), ("loss", to, step, trainer, loss), ("tell",
message), and of the coordinator ("send", name, message), ("born", rank, name), ("fence", name).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from harness.fingerprint import fingerprint
from harness.result import SimulationResult
from harness.scenario import (
    NO_LEASE_S,
    Scenario,
    dense_after,
    gradients_of,
    load_all,
    loss_of,
    payload_of,
)
from harness.simulation import simulate
from harness.tiers import AskedStore, AskedTier, tier_of
from harness.trainer_scripts import Looked, asks_ahead, routes_of
from harness.verification import BOUNDS, parity_of, steps_kept, stripes_of
from torch_ecrec.client.client import Client
from torch_ecrec.client.reads import LookUp
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.suspicion import CUT_S
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import membership, messages
from torch_ecrec.protocol.membership import Membership, Pace, join_of
from torch_ecrec.protocol.wire import A, Answer, Ok, Outcome, Request, Unknown
from torch_ecrec.server.service import Host
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import Node

PACE = Pace(give_up_s=120.0, stands_s=3600.0, least_s=0.0, most_s=0.0)  # no time passes for a member
LATER_S = 1000.0  # any limit of the coordinator is over by then


@dataclass(frozen=True)
class Call:
    """A request under way. `token`: which of the sender's calls it is; follows from what is asked."""

    sender: str
    receiver: str
    token: str
    request: Request[Any] = field(compare=False)


@dataclass
class Oracle:
    """What an undisturbed run gives: the records of each table group after each step, lookups, losses, dense values."""

    records: list[list[np.ndarray]]  # [step][table group]: (rows, B) uint8; the first steps load initial values
    run: SimulationResult

    @staticmethod
    def of(scenario: Scenario) -> Oracle:
        """Runs the simulated cluster for 0, 1, ... steps; its records after fewer steps are those on the way."""
        runs = [simulate(with_fields(scenario, steps=0, loads=scenario.loads[:n])) for n in range(len(scenario.loads))]
        runs += [simulate(with_fields(scenario, steps=steps)) for steps in range(scenario.steps + 1)]
        return Oracle(
            [[table_group.contiguous().view(torch.uint8).numpy() for table_group in run.records] for run in runs],
            runs[-1],
        )


@dataclass(eq=False)
class Reply:
    """What a request is answered with, now or later."""

    process: Process
    asker: str
    token: str

    def __call__(self, answer: Answer) -> None:
        self.process.out.append(("answer", self.asker, self.token, answer))


class Process:
    """Base. It is the `Port` of its own node."""

    def __init__(self, name: str, role: str, rank: int = -1) -> None:
        self.name, self.role, self.rank = name, role, rank
        self.out: list[tuple[Any, ...]] = []
        self.calls: dict[str, tuple[str, Callable[[Outcome[Any]], None]]] = {}  # token -> who was asked, what then
        self.timers: list[Callable[[], None]] = []
        self.ended = False
        self.node: Node
        self.rules: Membership  # of a member; it is about to be welcomed

    def join(self, join: messages.Join) -> None:
        """It has said that it wants to be a member."""
        self.rules = Membership(join, "the address", PACE, 0.0)
        self.rules.step(0.0)
        self.rules.connected(0.0)
        self.rules.take()

    # Port
    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None:
        token = f"{type(request).__name__} {fingerprint(request)}"
        while token in self.calls:  # the same once more, while the first is not answered
            token = f"{token}+"
        self.calls[token] = peer, done
        self.out.append(("request", Call(self.name, peer, token, request)))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.timers.append(action)

    def now_s(self) -> float:
        return 0.0

    def tell(self, word: messages.OfMember) -> None:
        self.out.append(("tell", messages.json_of(word)))

    # events
    def on(self, kind: str, what: Any) -> None:
        """Handles an event; raises AssertionError if it finds the contract broken."""
        getattr(self, f"on_{kind}")(what)

    def on_request(self, call: Call) -> None:
        self.node.handle(copy.copy(call.request), Reply(self, call.sender, call.token))

    def on_answer(self, what: tuple[str, Answer]) -> None:
        token, answer = what
        if token in self.calls:
            self.calls.pop(token)[1](Ok(answer))

    def on_end(self, token: str) -> None:
        if token in self.calls:
            self.calls.pop(token)[1](Unknown("eof"))

    def on_time(self, _: None) -> None:
        timers, self.timers = self.timers, []
        for action in timers:
            action()

    def on_told(self, message: dict[str, Any]) -> None:
        self.rules.heard(message)
        self._do()

    def _do(self) -> None:
        """What the rules of its membership say is to be done. Nothing is waited for here, and nothing is noted."""
        for effect in self.rules.take():
            if isinstance(effect, membership.Say):
                self.out.append(("tell", messages.json_of(effect.word)))
            elif isinstance(effect, membership.Build):
                self.rules.built(self.name)
                self._do()
            elif isinstance(effect, membership.Tell):
                self.on_control(effect.word)
            elif isinstance(effect, membership.End):
                self.ended = True
            else:
                assert isinstance(effect, (membership.Follow, membership.Note)), effect

    def on_control(self, word: messages.FromCoordinator) -> None:
        raise NotImplementedError

    def on_rejoin(self, _: None) -> None:
        """Tells a coordinator that was started again what it knows."""
        self.rules.closed("eof")
        assert isinstance(self.rules.step(0.0), membership.Connect)
        self.rules.connected(0.0, known=self.known())
        self._do()

    def known(self) -> messages.Known:
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """It was told to end."""
        return self.ended


class Server(Process):
    """A server process, and what must hold of each of its slots at any time.

    Args:
        frames: of each store, the other records being on a disk that answers at any time; None: as pytest says.
    """

    def __init__(self, name: str, settings: Settings, oracle: Oracle, frames: int | None = None) -> None:
        super().__init__(name, "server")
        self.node: Host = Host(name, self, settings)
        self.node.tier = AskedTier(frames, self._ask_disk) if frames else tier_of(frames)
        self._oracle = oracle
        self.join(join_of("server", "one", 0))

    def _ask_disk(self) -> None:
        self.out.append(("disk",))

    def on_disk(self, _: None) -> None:
        assert isinstance(self.node.tier, AskedTier)
        self.node.tier.answer()

    def on_control(self, word: messages.FromCoordinator) -> None:
        self.node.on_control(word)

    def known(self) -> messages.Known:
        return self.node.known()

    def check(self) -> None:
        """I1 to I4 of what is here: it follows from the undisturbed run alone. Raises AssertionError."""
        with AskedStore.checking():
            for slot in [slot for slot in self.node.slots.values() if slot.ready]:
                for table_group, layout in enumerate(slot.layouts):
                    self._check_records(slot, table_group, layout)
                    self._check_parities(slot, table_group, layout)
                for what, steps in steps_kept(slot).items():
                    assert steps <= BOUNDS[what], f"slot {slot.index}: {what} of {steps} steps"

    def _check_records(self, slot: Slot, table_group: int, layout: Layout) -> None:
        positions = np.arange(layout.data_rows(slot.index), dtype=np.int64)
        present = slot.missing.present(table_group, False, positions)
        if present is not None:
            positions = np.flatnonzero(present).astype(np.int64)
        rows = layout.row_at(slot.index, positions)
        for step in range(min(slot.log.floor, slot.rule.applied), slot.rule.applied + 1):
            here, right = slot.held.records_as_of(table_group, positions, step), self._right(step, table_group, rows)
            assert np.array_equal(here, right), f"slot {slot.index}: records as of step {step} are wrong"

    def _right(self, step: int, table_group: int, rows_U: np.ndarray) -> np.ndarray:
        """(U, B) uint8, what these rows are after a step; -1 is padding, which is zeros."""
        records_UB: np.ndarray = self._oracle.records[step][table_group][rows_U]  # fresh
        records_UB[rows_U < 0] = 0
        return records_UB

    def _check_parities(self, slot: Slot, table_group: int, layout: Layout) -> None:
        shard, folded = slot.shards[table_group], slot.rule.folded
        judged_P = np.zeros(shard.parity_rows, dtype=bool)
        records = []
        for stripes in stripes_of(layout, slot.index):
            if not all(member.slot in folded for member in stripes.members):
                continue  # counts from the time that the source is known
            judged_P[stripes.parities_G] = True
            for member in stripes.members:
                rows = layout.row_at(member.slot, member.positions_M)
                records.append((member, self._right(folded[member.slot], table_group, rows)))
        judged = np.flatnonzero(judged_P)
        right = (parity_of(slot, table_group, records)[judged] == shard.gather(judged, parity=True)).all(axis=1)
        present = slot.missing.present(table_group, True, judged)
        if present is not None:
            right |= ~present
        assert right.all(), f"slot {slot.index}: a parity is not the code of its stripe as of {folded}"


class Trainer(Process):
    """A trainer of the simulated cluster: looks up, pushes, exchanges losses with the others, takes its snapshot."""

    def __init__(
        self, name: str, rank: int, restarted: bool, scenario: Scenario, settings: Settings, oracle: Oracle
    ) -> None:
        super().__init__(name, "trainer", rank)
        self.restarted = restarted
        self.node: Client = Client(name, self, scenario.job, rank, settings, scenario.snapshot_every)
        self._scenario, self._oracle = scenario, oracle
        self.got: list[Any] = []
        self.rows: list[Looked] = []  # that were looked up for this step
        self.losses: dict[int, dict[int, float]] = {}
        self.dense = 1.0
        self.phase: tuple[str, int] = "placement", 0
        self.join(join_of("trainer", "one", 0, rank=rank, job=scenario.job))
        self.script = self._script()
        self.ready = next(self.script)

    def on(self, kind: str, what: Any) -> None:
        super().on(kind, what)
        while self.phase[0] != "done" and not self.ended and self.ready():
            try:
                self.ready = next(self.script)
            except StopIteration:
                self.phase = "done", self._scenario.steps

    def on_control(self, word: messages.FromCoordinator) -> None:
        self.node.on_control(word)

    def on_loss(self, what: tuple[int, int, float]) -> None:
        step, trainer, loss = what
        self.losses.setdefault(step, {})[trainer] = loss

    def known(self) -> messages.Known:
        return self.node.known()

    def _script(self) -> Iterator[Callable[[], bool]]:
        """Yields conditions to wait for, as the simulated cluster's trainers do."""
        job, client, rank, known = self._scenario.job, self.node, self.rank, self._oracle.run
        yield lambda: client.placement is not None
        self.phase = "resume", 0
        yield lambda: client.resumed
        if rank == 0 and client.load_end is None:
            self.phase = "load", 0
            yield from load_all(client, self._scenario.loads)
        yield lambda: client.load_end is not None
        assert client.load_end is not None
        done = client.resume_done
        if done:
            self.phase, self.got = ("restore", done), []
            client.run(client.stored, 0, client.resume_step, self.got.append)
            yield lambda: bool(self.got)
            stored = self.got[0]
            self.dense = float(stored.payloads[stored.trainers.index(rank)].view(torch.float64))
        asked = False  # with the push before
        for step in range(done + 1, self._scenario.steps + 1):
            self.phase, self.got = ("look up", step), []
            routes, bags = routes_of(self._scenario, step, rank, client)
            if not asked:
                self.rows = []
                client.run(client.lookup_bags, routes, bags, lambda *looked: self.rows.append(looked))
            yield lambda: bool(self.rows)
            weights = [*(torch.cat(parts) for parts in self.rows[0][0]), *self.rows[0][1]]
            for table_group, (mine, right) in enumerate(zip(weights, known.lookups[step, rank], strict=True)):
                assert torch.equal(mine, right), (
                    f"trainer {rank}: lookup of step {step} is wrong in table group {table_group}"
                )
            loss = loss_of(weights, self.dense)
            assert loss == known.losses[step, rank], f"trainer {rank}: loss of step {step} is wrong"
            self.phase = "push", step
            yield client.may_push
            gradients = gradients_of(weights, step, rank, self.dense)
            rates, table_groups = [table_group.optimizer.lr for table_group in job.table_groups], len(job.table_groups)
            self.rows, then = [], list[LookUp]()
            if asked := step < self._scenario.steps and asks_ahead(step, rank):
                coming = routes_of(self._scenario, step + 1, rank, client)
                then.append(client.ahead(*coming, lambda *looked: self.rows.append(looked)))
            client.run(client.push, routes, gradients[:table_groups], rates, bags, gradients[table_groups:], then)
            self.phase, self.got = ("exchange losses", step), []
            for other in range(job.trainers):
                if other != rank:
                    name = self.name.replace(f"trainer-{rank}", f"trainer-{other}", 1)
                    self.out.append(("loss", name, step, rank, loss))
            self.losses.setdefault(step, {})[rank] = loss
            yield lambda step=step: len(self.losses[step]) == job.trainers  # type: ignore[misc]
            self.dense = dense_after(self.dense, self.losses.pop(step))
            assert self.dense == known.dense[step], f"trainer {rank}: dense model after step {step} is wrong"
            if client.snapshot_due:
                client.run(client.snapshot, payload_of(self.dense), [client.done])


class Center(Process):
    """The coordinator's process. Without a `Router`: no connection ends here but with its process."""

    def __init__(self, scenario: Scenario, term: int) -> None:
        super().__init__("coordinator", "coordinator")
        self.scenario, self.first = scenario, term == 0
        self.core = Coordinator(
            scenario.cluster,
            send=lambda name, message: self.out.append(("send", name, messages.json_of(message))),
            announce=lambda event: None,
        )

    def on_join(self, join: messages.Join) -> None:
        refusal = self.core.refusal(join)
        assert refusal is None, refusal
        name = self.core.name_for(join)
        self.out.append(("born", join.rank, name))
        self.core.on_join(name, replace(join, session_id=name), 0.0)

    def on_start(self, _: None) -> None:
        """All trainers join, in the order of their ranks."""
        for rank in range(self.scenario.trainers):
            self.on_join(join_of("trainer", "one", 0, rank=rank, job=self.scenario.job))

    def on_heard(self, what: tuple[str, dict[str, Any]]) -> None:
        name, word = what[0], messages.from_member(what[1])
        if isinstance(word, messages.OfMember):
            objection = self.core.on_message(name, word, 0.0)
            assert objection is None, objection
        elif isinstance(word, messages.Rejoin) and self.core.rejoin_refusal(word) is None:
            self.core.on_rejoin(word, 0.0)
        else:
            self.out.append(("fence", name))

    def on_lost(self, name: str) -> None:
        self.core.on_lost(name, 0.0, "eof")

    def on_lease(self, name: str) -> None:
        """A member was silent for too long, whether it lives or not."""
        self.core.members[name].heard_s = -2 * NO_LEASE_S
        self.core.on_tick(0.0)

    def on_complaints(self, pairs: Sequence[tuple[str, str]]) -> None:
        """These cannot reach each other, and have said so for so long that the coordinator decides."""
        accused = {name: [b if a == name else a for a, b in pairs if name in (a, b)] for pair in pairs for name in pair}
        for now_s in (0.0, CUT_S / 2, CUT_S):  # with no pause that would say that they were silent
            for name in [name for name in self.core.members if name in accused]:
                self.core.on_message(name, messages.Beat(unreachable=accused[name]), now_s)
        self.core.on_tick(CUT_S)
        for name in [name for name in self.core.members if name in accused]:
            self.core.on_message(name, messages.Beat(unreachable=[]), CUT_S)

    def on_drain(self, server: str) -> None:
        """A server is to be without slots."""
        self.core.drain(server, False)

    def on_time(self, _: None) -> None:
        self.core.on_tick(LATER_S)

    @property
    def can_join(self) -> bool:
        """Not while it waits for those who were there before."""
        return self.first or bool(self.core.slots)
