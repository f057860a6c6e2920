"""A trainer's side of the data plane: routes rows to slots, keeps pushes until acknowledged, sends them again.

`Client` is the protocol: it never blocks, and runs the same over RPC and in the simulated cluster. `Session` wraps it
for the user's thread: it waits, with a time limit, and raises what went wrong in the background.

A step t of one trainer:
    lookup(rows)   asks every slot concerned for the weights after t - 1
    push(...)      gradients to every slot, empty ones included; ends the step. Not waited for: a trainer may run
                   `window_steps` ahead of what is acknowledged, and keeps what is not
    snapshot(...)  the dense model after t, to the r + 1 snapshot slots

Initial values are loaded in steps, too: `load` on trainer 0 is to the slots what `push` is of all trainers. Training
begins after the last of them, the `origin`. `Client` counts steps as the messages do; `Session` counts those of
training, from 1.

Shape legend: U unique rows of a slab, D embedding dim, W record width in floats, B record bytes; lists hold one tensor
per slab. Rows are slab rows: first row of the table in its slab, plus the id.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.errors import ClusterUnavailable, TrainersLost
from torch_ecrec.layout.routing import Parts, Route, arrange, route
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import REQUESTS, decode, encode
from torch_ecrec.protocol.pieces import Gathering
from torch_ecrec.protocol.wellformed import Judge
from torch_ecrec.protocol.wire import Answer, Placement
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import Exchange, Node, Port

log = logging.getLogger(__name__)

LOAD_BYTES = 4 << 20  # of records in one step that loads
ROUTES_KEPT = 64  # from `arrange` to the push: as many lookups may be made in a step


def _raise(error: BaseException) -> None:
    raise error


@dataclass
class _StepState:
    """What is not confirmed yet of one step of this trainer."""

    unacknowledged: set[int]  # slots
    unstored: set[int] | None = None  # snapshot slots; None: its snapshot was not taken yet
    snapshot: tuple[Tensor, list[int]] | None = None
    since: dict[int, int] = field(default_factory=dict)  # snapshot slot -> incarnation that stored it
    least: dict[int, int] = field(default_factory=dict)  # slot -> earlier incarnations have stored it for nothing


class Client(Node):
    """The protocol of one trainer. Call its methods inside `run`.

    Args:
        name, port: see `Node`.
        job: what is trained.
        trainer: this trainer's index, 0 <= trainer < job.trainers.
        snapshot_every: `snapshot` is called after each step of training that is a multiple of it; such a step is
            complete only once its snapshot is stored. 0: never.
    """

    def __init__(
        self, name: str, port: Port, job: JobSpec, trainer: int, settings: Settings, snapshot_every: int = 1
    ) -> None:
        super().__init__(name, port, settings.call_timeout_s)
        self.job, self.trainer, self.settings = job, trainer, settings
        self.slots = job.code.slots
        self.layouts = [Layout(job.code.slots, job.code.k, job.code.parities, slab.rows) for slab in job.slabs]
        self.judge = Judge(job, self.layouts)
        self.snapshot_slots = range(min(job.code.parities + 1, self.slots))
        self.step = 1
        self.complete = 0  # everything of this trainer up to here is acknowledged and stored
        self.resumable = 0  # the last step up to there after which a snapshot was due: logs must reach back to it
        self.resume_step = 0  # where its era began
        self.resumed = False  # whether that is known: nothing is asked of a slot before
        self.origin: int | None = None  # the step that training begins after; None: initial values are being loaded
        self.ended_loading = False  # trainer 0: the coordinator was told
        self.snapshot_every = snapshot_every
        self.bfloat16 = settings.wire == "bfloat16"
        self.open: dict[int, _StepState] = {}
        self._lookups: list[Exchange] = []  # of this step
        self.on_change: Callable[[], None] = lambda: None  # called, inside run, when something was confirmed
        self.on_error: Callable[[BaseException], None] = _raise  # called, inside run, with what cannot be answered

    def fault_of_answer(self, request: wire.Request, answer: Answer) -> str | None:
        placement = self.placement
        assert placement is not None, "it has asked somebody"
        return self.judge.fault_of_answer(request, answer, lambda slot: placement.slots[slot].incarnation)

    def gives_up(self, request: wire.Request, refusal: wire.Malformed) -> bool:
        """One that is malformed as it was sent would be refused for ever; what was spoilt on its way is sent again."""
        placement = self.placement
        assert placement is not None, "it has asked somebody"
        try:
            decode(encode(request)[0], REQUESTS)
            fault = self.judge.fault_of_request(request, None, lambda slot: placement.slots[slot].incarnation)
        except (TypeError, ValueError) as error:
            fault = str(error)
        if fault is not None:
            self.on_error(ValueError(f"slot {request.slot} refuses a {type(request).__name__}: {refusal.reason}"))
        return fault is not None

    def route(self, slab: int, rows_U: Tensor) -> Route:
        return route(self.layouts[slab], rows_U)

    # from the coordinator -----------------------------------------------------------------------

    def on_control(self, message: dict[str, Any]) -> None:
        """A message of the coordinator. Types: placement, resume, loaded, rejoined; others are not for the protocol."""
        if message["type"] == "placement":
            self.run(self.place, Placement.from_json(message["placement"]))
        elif message["type"] == "resume":
            self.run(self.resume, message["era"], message["step"], message["origin"])
        elif message["type"] == "loaded":
            self.run(self.begin_training, message["origin"])
        elif message["type"] == "rejoined" and self.ended_loading:
            self.run(self.end_loading)  # in case the coordinator before did not hear it

    def place(self, placement: Placement) -> bool:
        newer = super().place(placement)
        self.on_change()
        return newer

    def resume(self, era: int, step: int, origin: int | None) -> None:
        """Goes on after `step`, in the era that began there. Before anything else; only the first time counts."""
        if self.resumed:
            return
        self.era, self.step = era, step + 1
        self.complete = self.resumable = self.resume_step = step
        self.resumed, self.origin = True, origin
        self.on_change()

    def begin_training(self, origin: int) -> None:
        """The initial values are there, as of step `origin`."""
        if self.origin is None:
            self.step, self.complete, self.resumable = origin + 1, origin, origin
            self.origin = origin  # the last: the user's thread waits for it
        self.on_change()

    def known(self) -> dict[str, Any]:
        """What a coordinator that was started again must know."""
        return {
            "job": self.job.to_json(),
            "placement": self.placement.to_json() if self.placement is not None else None,
            "era": self.era,
            "frozen": False,
            "resume_step": self.resume_step,
            "origin": self.origin,
            "whole": [],
            "incarnations": [],
        }

    # initial values -----------------------------------------------------------------------------

    def left_behind(self) -> Iterator[tuple[int, Tensor]]:
        """What is to be loaded first, as the servers make it: slab and rows, in portions.

        Before this trainer another one may have loaded something, and was lost. Every row, then; else none.
        """
        for slab, spec in enumerate(self.job.slabs if self.resume_step else ()):
            rows = max(1, LOAD_BYTES // spec.schema.nbytes)
            for first in range(0, spec.rows, rows):
                yield slab, torch.arange(first, min(first + rows, spec.rows))

    def load(self, slab: int, route: Route, records: Tensor | None) -> None:
        """A step of trainer 0 before training: overwrites the routed rows.

        Args:
            slab: which.
            route: of the rows.
            records: (U, B) uint8, copied; None: as the servers initialise these rows.
        """
        parts = route.split(records) if records is not None else [None] * self.slots
        step = self.step

        def make(slot: int, incarnation: int) -> wire.Request:
            positions = route.positions[slot]
            return wire.Load(slot, incarnation, step, slab, positions, parts[slot], self.resumable)

        self._send_step(make)

    def all_acknowledged(self) -> bool:
        """Whether everything that this trainer has sent survives r losses."""
        return self.complete == self.step - 1

    def end_loading(self) -> None:
        """Tells the coordinator that everything is loaded, once all is acknowledged; that one tells everybody."""
        self.ended_loading = True
        self.tell({"type": "loaded", "origin": self.step - 1 if self.origin is None else self.origin})

    # steps --------------------------------------------------------------------------------------

    def lookup(self, routes: Sequence[Route], done: Callable[[list[Parts]], None]) -> None:
        """Weights of the routed rows after step - 1, per slab, to `done`."""
        step, waiting = self.step, dict.fromkeys(range(self.slots))
        answers: dict[int, wire.Rows] = {}

        def ask(slot: int) -> None:
            positions = [route.positions[slot] for route in routes]

            def on_answer(answer: Answer) -> None:
                if isinstance(answer, wire.Forgotten):
                    if step == self.step:  # else it was asked ahead for nothing, and nobody waits for it
                        self.on_error(LookupError(answer.reason))
                    return
                assert isinstance(answer, wire.Rows)
                answers[slot] = answer
                if len(answers) == len(waiting):
                    done(self._in_order(routes, answers))

            self._lookups.append(
                self.ask(slot, lambda i: wire.Lookup(slot, i, step, positions, self.bfloat16), on_answer)
            )

        waiting = {s: None for s in waiting if any(len(route.positions[s]) for route in routes)}
        if not waiting:
            done(self._in_order(routes, answers))
        for slot in waiting:
            ask(slot)

    def _in_order(self, routes: Sequence[Route], answers: dict[int, wire.Rows]) -> list[Parts]:
        weights = []
        for s, (slab, there) in enumerate(zip(self.job.slabs, routes, strict=True)):
            parts = [answers[slot].weights[s] for slot in sorted(answers)]
            if there.rank is not None or not parts:
                dtype = torch.bfloat16 if self.bfloat16 else torch.float32
                out_UD = torch.empty((len(there.rows), slab.dim), dtype=dtype)
                parts = [there.join(parts, out_UD) if parts else out_UD]
            weights.append(parts)
        return weights

    def snapshot_due(self, step: int) -> bool:
        """Whether the dense model after `step` is to be kept. Before training there is nothing to keep."""
        done = wire.training_step(step, self.origin)
        return done > 0 and self.snapshot_every > 0 and done % self.snapshot_every == 0

    def may_push(self) -> bool:
        """A trainer runs at most `window_steps` ahead of what is acknowledged."""
        return self.complete >= self.step - self.settings.window_steps

    def without_snapshot(self) -> None:
        """The step before has none, and never will: this one ends in the same turn of the user's loop."""
        state = self.open.get(self.step - 1)
        if state is not None and state.unstored is None:
            state.unstored = set()
            self._advance()

    def push(self, routes: Sequence[Route], gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Sends the gradients (U, D) of this step to every slot and ends the step.

        Lookups of it that are under way are given up: nobody waits for them, and once later steps are applied they
        could not be answered any more.
        """
        for lookup in self._lookups:
            lookup.cancel()
        self._lookups = []
        self.without_snapshot()
        step = self.step
        if self.bfloat16:
            gradients = [gradient_UD.bfloat16() for gradient_UD in gradients]
        parts = [route.split(gradient) for route, gradient in zip(routes, gradients, strict=True)]

        def make(slot: int, incarnation: int) -> wire.Request:
            positions = [route.positions[slot] for route in routes]
            mine = [part[slot] for part in parts]
            return wire.Push(slot, incarnation, step, self.trainer, positions, mine, list(rates), self.resumable)

        self._send_step(make)

    def _send_step(self, make: Callable[[int, int], wire.Request]) -> None:
        """Sends what `make` gives for each slot and incarnation until all have acknowledged it; ends the step."""
        step = self.step
        state = self.open[step] = _StepState(unacknowledged=set(range(self.slots)))
        if not self.snapshot_due(step):
            state.unstored = set()

        def send(slot: int) -> None:
            def on_answer(_: Answer) -> None:
                state.unacknowledged.discard(slot)
                self._advance()

            self.ask(slot, lambda incarnation: make(slot, incarnation), on_answer)

        self.step = step + 1
        for slot in range(self.slots):
            send(slot)

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Sends this trainer's part of the dense model after step - 1 to the snapshot slots."""
        step = self.step - 1

        state = self.open.get(step)
        if state is None:
            return  # complete already: a snapshot of it cannot be needed
        state.snapshot = (payload, header)
        state.unstored = set(self.snapshot_slots)
        for slot in self.snapshot_slots:
            self._send_snapshot(step, state, slot)

    def _send_snapshot(self, step: int, state: _StepState, slot: int) -> None:
        assert state.snapshot is not None and state.unstored is not None
        unstored, (payload, header) = state.unstored, state.snapshot
        unstored.add(slot)
        sent_to = -1

        def make(incarnation: int) -> wire.Request:
            nonlocal sent_to
            sent_to = incarnation
            return wire.Snapshot(slot, incarnation, step, self.trainer, payload, header)

        def on_answer(answer: Answer) -> None:
            assert isinstance(answer, wire.Stored)
            state.since[slot] = sent_to
            for other, incarnation in enumerate(answer.incarnations):
                state.least[other] = max(incarnation, state.least.get(other, 0))
            unstored.discard(slot)
            for holder in [h for h, since in state.since.items() if since < state.least[h]]:
                # The one that answers knows a later life of that holder, which has copied what there was before.
                del state.since[holder]
                self._send_snapshot(step, state, holder)
            self._advance()

        self.ask(slot, make, on_answer)

    def _advance(self) -> None:
        """Moves `complete` over the steps of which nothing is open, and lets go of what they kept."""
        while (state := self.open.get(self.complete + 1)) is not None:
            if state.unacknowledged or state.unstored or state.unstored is None:
                break
            self.complete += 1
            del self.open[self.complete]
            if self.origin is None or self.snapshot_every == 0 or state.snapshot is not None:
                self.resumable = self.complete
        self.on_change()

    # whole records ------------------------------------------------------------------------------

    def read(self, slab: int, route: Route, done: Callable[[Tensor], None]) -> None:
        """(U, B) record bytes of the routed rows after step - 1, to `done`."""
        step = self.step - 1
        asked = [slot for slot in range(self.slots) if len(route.positions[slot])]
        answers: dict[int, Tensor] = {}

        def finish() -> None:
            out_UB = torch.empty((len(route.rows), self.job.slabs[slab].schema.nbytes), dtype=torch.uint8)
            done(route.join([answers[s] for s in asked], out_UB) if asked else out_UB)

        def ask(slot: int) -> None:
            def on_answer(answer: Answer) -> None:
                if isinstance(answer, wire.Forgotten):
                    self.on_error(LookupError(answer.reason))
                    return
                assert isinstance(answer, wire.Records)
                answers[slot] = answer.records
                if len(answers) == len(asked):
                    finish()

            self.ask(slot, lambda i: wire.Export(slot, i, slab, step, route.positions[slot]), on_answer)

        if not asked:
            finish()
        for slot in asked:
            ask(slot)

    def stored(self, slot: int, step: int, done: Callable[[wire.Snapshots], None]) -> None:
        """The snapshot of a step that a snapshot slot holds (-1: all of them), to `done`."""
        got = Gathering(step)

        def ask() -> None:
            self.ask(slot, lambda i: wire.FetchSnapshots(slot, i, step, begin=got.begin(i)), on_answer)

        def on_answer(answer: Answer) -> None:
            assert isinstance(answer, wire.Snapshots)
            if got.take(answer):
                done(got.all())
            else:
                ask()

        ask()


@dataclass(eq=False)
class _Ahead:
    """A lookup made ahead of its time: of the step it belongs to, and the weights once they are here."""

    step: int
    rows: list[Tensor]
    answer: list[list[Parts]] = field(default_factory=list)

    def is_of(self, rows: Sequence[Tensor]) -> bool:
        return all(a is b for a, b in zip(self.rows, rows, strict=True))


class Session:
    """What a model's sharded modules talk to: blocking calls on one trainer's thread.

    Args:
        client: the protocol.
        tell: sends a message to the coordinator.
        on_close: called once by `close`.
        restarted: the cluster has trained before: `resume` says from where on. Loading does nothing then.

    Every wait ends within `settings.give_up_s` seconds of the last progress with `ClusterUnavailable` (stacks of all
    threads go to stderr), or with the error that the background reported. Only that ends the wait for another trainer's
    script, which may load for hours: that the trainer is lost, or has left, or that the cluster has ended.
    """

    def __init__(
        self,
        client: Client,
        tell: Callable[[dict[str, Any]], None],
        on_close: Callable[[], None],
        restarted: bool = False,
    ) -> None:
        self.client = client
        self.restarted = restarted
        self.job, self.trainer, self.trainers = client.job, client.trainer, client.job.trainers
        self._tell, self._on_close = tell, on_close
        self._changed = threading.Condition()
        self._changes = 0
        self._awaited: Callable[[], bool] | None = None  # what the user's thread waits for
        self._error: BaseException | None = None
        self._loads = False  # trainer 0 has begun to
        self._closed = False
        self._routes: deque[Route] = deque(maxlen=ROUTES_KEPT)
        self._ahead: list[_Ahead] = []
        client.on_change, client.on_error = self._notify, self.fail
        self.told = False  # what went wrong in the background has been raised to the user
        belongs_here(self)

    # the background -----------------------------------------------------------------------------

    def _notify(self) -> None:
        """Something changed. Wakes the user's thread only if it can go on: most changes are not what it waits for."""
        with self._changed:
            self._changes += 1
            if self._awaited is not None and (self._error is not None or self._awaited()):
                self._changed.notify_all()

    def known(self) -> dict[str, Any]:
        """What a coordinator that was started again must know."""
        return self.client.known()

    def fail(self, error: BaseException) -> None:
        """Something went wrong in the background: the next or present wait raises it."""
        if self._error is None:
            self._error = error
        self._notify()

    def on_control(self, message: dict[str, Any]) -> None:
        """A message of the coordinator to this trainer."""
        self.client.on_control(message)
        if self.restarted and self.client.resumed and self.client.origin is None:
            self.fail(TrainersLost("nobody is left who knows that initial values had been loaded; start again"))

    def _wait(self, condition: Callable[[], bool], what: str, patient: bool = False) -> None:
        """Returns once `condition` holds. `patient`: without progress it says so in the log, and waits on."""
        limit_s = self.client.settings.give_up_s
        begin_s = time.monotonic()
        deadline = begin_s + limit_s
        with self._changed:
            seen, self._awaited = self._changes, condition
            try:
                while self._error is None and not condition():
                    if self._changes != seen:
                        seen, deadline = self._changes, time.monotonic() + limit_s
                    if time.monotonic() > deadline and patient:
                        deadline = time.monotonic() + limit_s
                        log.warning("%s: for %g s so far", what, time.monotonic() - begin_s)
                    elif time.monotonic() > deadline:
                        faulthandler.dump_traceback(file=sys.stderr)
                        raise ClusterUnavailable(f"{what}: no progress for {limit_s:g} s")
                    self._changed.wait(0.5)
            finally:
                self._awaited = None
        if self._error is not None:
            self.told = True
            raise self._error

    def on_forked(self) -> None:
        """In a forked child: this session is its parent's."""
        self._changed, self.client._lock = threading.Condition(), threading.Lock()
        self._error = RuntimeError("a session cannot be used in a forked child of its process")

    def _run_and_wait(self, action: Callable[..., None], *args: Any, what: str) -> Any:
        """Runs a client method whose last argument is a callback; returns what the callback gets."""
        result: list[Any] = []

        def done(*values: Any) -> None:
            result.append(values[0] if values else None)
            self._notify()

        self.client.run(action, *args, done)
        self._wait(lambda: bool(result), what)
        return result[0]

    # steps --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step of training being worked on, from 1."""
        return max(1, wire.training_step(self.client.step, self.client.origin))

    def _check_training(self) -> None:
        if self.client.origin is None:
            raise RuntimeError("training has not begun: every trainer calls `loaded` before its first step")

    def _route(self, rows: Sequence[Tensor]) -> list[Route]:
        """Routes rows, those that `arrange` gave at no cost."""
        routes = []
        for slab, rows_U in enumerate(rows):
            known = next((route for route in self._routes if route.rows is rows_U), None)
            routes.append(known if known is not None else self.client.route(slab, rows_U))
        return routes

    def arrange(self, slab: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The different ones among some rows, in the order that costs least to look up and push.

        Args:
            slab: which.
            rows: (N,) int64, with repetitions.

        Returns:
            unique (U,) and inverse (N,), int64: unique[inverse] is `rows`.
        """
        found, inverse_N = arrange(self.client.layouts[slab], rows)
        self._routes.append(found)
        return found.rows, inverse_N

    def lookup_parts(self, rows: Sequence[Tensor]) -> list[Parts]:
        """Weights of rows as they are after the previous step.

        Args:
            rows: per slab, (U,) int64, unique; in the order that `arrange` gave them, they cost least.

        Returns:
            Per slab, one part (u, D) from each slot, float32, or bfloat16 if that is the `wire`; end to end they are
            in the order of `rows`. Not to be written: they may lie in a server's memory.
        """
        self._check_training()
        what = f"lookup of step {self.step}"
        ahead = next((a for a in self._ahead if a.step == self.step and a.is_of(rows)), None)
        if ahead is not None:
            self._ahead.remove(ahead)
            self._wait(lambda: bool(ahead.answer), what)
            return ahead.answer[0]
        weights: list[Parts] = self._run_and_wait(self.client.lookup, self._route(rows), what=what)
        return weights

    def look_ahead(self, rows: Sequence[Tensor]) -> None:
        """Asks for rows that a `lookup_parts` of this step will ask for; does not wait.

        Args:
            rows: the very tensors that `lookup_parts` will be called with. If it is not, the answer is dropped.
        """
        self._check_training()
        ahead = _Ahead(self.step, list(rows))

        def done(weights: list[Parts]) -> None:
            ahead.answer.append(weights)
            self._notify()

        self._ahead.append(ahead)
        self.client.run(self.client.lookup, self._route(rows), done)

    def push(self, rows: Sequence[Tensor], gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Sends this trainer's gradients and ends the step.

        Args:
            rows: per slab, (U,) int64, unique; in the order that `arrange` gave them, they cost least.
            gradients: per slab, (U, D) float32, summed over this trainer's batch.
            rates: learning rate per slab.

        Waits only if `window_steps` steps are not acknowledged yet.
        """
        self._check_training()
        routes = self._route(rows)
        self.client.run(self.client.without_snapshot)
        self._wait(self.client.may_push, f"push of step {self.step}: earlier steps are not acknowledged")
        self.client.run(self.client.push, routes, list(gradients), list(rates))
        self._routes.clear()
        self._ahead.clear()

    @property
    def snapshot_every(self) -> int:
        """A snapshot is expected after each step that is a multiple of it; 0: never. Set it after a `flush` only."""
        return self.client.snapshot_every

    @snapshot_every.setter
    def snapshot_every(self, steps: int) -> None:
        self.client.snapshot_every = steps

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Replicates this trainer's part of the dense model after the previous step; does not wait."""
        if not all(isinstance(number, int) for number in header):
            raise TypeError(f"`header` must be a list of int, got {header!r}")
        self.client.run(self.client.snapshot, payload, header)

    def snapshots(self, slot: int = 0) -> list[tuple[int, int, list[int], Tensor]]:
        """What a snapshot slot holds: (step, trainer, header, payload), ascending.

        Args:
            slot: 0 to r. After `flush` each of them holds this trainer's last snapshot.
        """
        if slot not in self.client.snapshot_slots:
            raise ValueError(f"`slot` must be one of the snapshot slots {[*self.client.snapshot_slots]}, got {slot}")
        return self._stored(slot, -1)

    def _stored(self, slot: int, step: int) -> list[tuple[int, int, list[int], Tensor]]:
        have: wire.Snapshots = self._run_and_wait(self.client.stored, slot, step, what=f"snapshots of slot {slot}")
        steps = [wire.training_step(step, self.client.origin) for step in have.steps]
        return list(zip(steps, have.trainers, have.headers, have.payloads, strict=True))

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        """Where training goes on, in a session that was `restarted`.

        Returns:
            The last step that counts, and the dense model after it: payload and header of every trainer's part, in
            their order. Without parts if it is step 0: the model as it was made.
        """
        client = self.client
        self._wait(lambda: client.resumed, "waiting for the servers to go back to a step that all know")
        step = wire.training_step(client.resume_step, client.origin)
        stored = self._stored(0, client.resume_step) if step else ()
        return step, [(payload, header) for _, _, header, payload in stored]

    def flush(self) -> None:
        """Waits until everything sent is acknowledged: survives r losses."""
        self._wait(lambda: not self.client.exchanges, f"flush after step {self.step - 1}")

    # whole records ------------------------------------------------------------------------------

    def read(self, slab: int, rows: Tensor) -> Tensor:
        """(U, W) float32 records (weights, then optimizer state) of slab rows (U,) as of the previous step.

        Before training, on trainer 0: with all that it has loaded so far. Other trainers wait until it has loaded all;
        in a session that was `restarted` it is as of the step that training goes on after.
        """
        if self.trainer == 0 and not self.restarted:
            self._begin_loading()
        else:
            self._await_origin()
        route = self.client.route(slab, rows)
        records_UB: Tensor = self._run_and_wait(self.client.read, slab, route, what="reading records")
        return records_UB.view(torch.float32)

    def _await_origin(self) -> None:
        """Until trainer 0 has loaded all: for as long as its script takes, once the cluster is there."""
        self._wait(lambda: self.client.resumed, "waiting for the cluster")
        others = self.trainer != 0
        self._wait(lambda: self.client.origin is not None, "waiting for trainer 0 to load initial values", others)

    def _begin_loading(self) -> None:
        """Trainer 0, before it reads or loads: what a lost trainer 0 may have loaded is taken back."""
        client = self.client
        self._wait(lambda: client.resumed, "waiting for the cluster")
        if client.origin is None and not self._loads:
            self._loads = True
            for slab, rows in client.left_behind():
                self._load(slab, rows, None)

    def _load(self, slab: int, rows: Tensor, records: Tensor | None) -> None:
        self._wait(self.client.may_push, f"loading initial values: step {self.client.step} is waited for")
        self.client.run(self.client.load, slab, self.client.route(slab, rows), records)

    def load(self, slab: int, rows: Tensor, records: Tensor) -> None:
        """Overwrites records before the first step. Trainer 0 only; does nothing in a session that was `restarted`.

        Does not wait until it survives a loss: `loaded` does.

        Args:
            slab: which.
            rows: (U,) int64, ascending and unique. Rows may be loaded again: the last values count.
            records: (U, W) float32. Copied.

        Raises:
            ValueError: on another trainer, after `loaded`, or `rows` are not as they must be.
        """
        if self.restarted:
            return
        if self.trainer != 0:
            raise ValueError(f"only trainer 0 loads initial values, this is trainer {self.trainer}")
        if self.client.origin is not None:
            raise ValueError(f"initial values are loaded before the first step: loading has ended, at step {self.step}")
        most = self.client.layouts[slab].rows
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(((rows >= 0) & (rows < most)).all()):
            raise ValueError(f"`rows` must be ascending and unique, from 0 to {most - 1}")
        self._begin_loading()
        self._load(slab, rows, records.contiguous().view(torch.uint8))

    def loaded(self) -> None:
        """Ends the loading of initial values; every trainer calls it once and waits for trainer 0.

        What was loaded survives r losses from then on.
        """
        if self.trainer == 0 and not self.restarted:
            self._begin_loading()
            self._wait(self.client.all_acknowledged, "loading initial values")
            self.client.run(self.client.end_loading)
        self._await_origin()

    # the rest -----------------------------------------------------------------------------------

    def report(self, **figures: Any) -> None:
        """Tells the coordinator how training goes (step, loss, samples_per_s ...), for status and progress lines."""
        self._tell({"type": "progress", "trainer": self.trainer, **figures})

    def close(self) -> None:
        """Leaves the cluster. Idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close()
