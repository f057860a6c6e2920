"""A trainer's side of the data plane: routes rows to slots, keeps pushes until acknowledged, sends them again.

`Client` is the protocol: it never blocks, and runs the same over RPC and in the simulated cluster. `Session` wraps it
for the user's thread: it waits, with a time limit, and raises what went wrong in the background.

A step t of one trainer:
    lookup(rows)   asks every slot concerned for the weights after t - 1
    push(...)      gradients to every slot, empty ones included; ends the step. Not waited for: a trainer may run
                   `window_steps` ahead of what is acknowledged, and keeps what is not
    snapshot(...)  the dense model after t, to the r + 1 snapshot slots

Shape legend: U unique rows of a slab, D embedding dim, W record width in floats, B record bytes; lists hold one tensor
per slab. Rows are slab rows: first row of the table in its slab, plus the id.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.config import JobSpec, Settings
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.layout import Layout
from torch_ecrec.lifetime import belongs_here
from torch_ecrec.route import Parts, Route, arrange, route
from torch_ecrec.transport import wire
from torch_ecrec.transport.node import Node, Port
from torch_ecrec.transport.wire import Answer, Placement

ROUTES_KEPT = 64  # from `arrange` to the push: as many lookups may be made in a step


@dataclass
class _StepState:
    """What is not confirmed yet of one step of this trainer."""

    unacknowledged: set[int]  # slots
    unstored: set[int] | None = None  # snapshot slots; None: its snapshot was not taken yet
    snapshot: tuple[Tensor, str] | None = None
    since: dict[int, int] = field(default_factory=dict)  # snapshot slot -> incarnation that stored it
    least: dict[int, int] = field(default_factory=dict)  # slot -> earlier incarnations have stored it for nothing


class Client(Node):
    """The protocol of one trainer. Call its methods inside `run`.

    Args:
        name, port: see `Node`.
        job: what is trained.
        trainer: this trainer's index, 0 <= trainer < job.trainers.
        snapshot_every: `snapshot` is called after each step that is a multiple of it; such a step is complete only once
            its snapshot is stored. 0: never.
    """

    def __init__(
        self, name: str, port: Port, job: JobSpec, trainer: int, settings: Settings, snapshot_every: int = 1
    ) -> None:
        super().__init__(name, port, settings.call_timeout_s)
        self.job, self.trainer, self.settings = job, trainer, settings
        self.slots = job.code.slots
        self.code = LinearCode(job.code.k, job.code.parities)
        self.layouts = [Layout(job.code.slots, job.code.k, job.code.parities, slab.rows) for slab in job.slabs]
        self.snapshot_slots = range(min(job.code.parities + 1, self.slots))
        self.step = 1
        self.complete = 0  # everything of this trainer up to here is acknowledged and stored
        self.resumable = 0  # the last step up to there after which a snapshot was due: logs must reach back to it
        self.resume_step = 0  # where its era began
        self.snapshot_every = snapshot_every
        self.half = settings.wire == "bfloat16"
        self.open: dict[int, _StepState] = {}
        self.on_change: Callable[[], None] = lambda: None  # called, inside run, when something was confirmed

    def route(self, slab: int, rows_U: Tensor) -> Route:
        return route(self.layouts[slab], rows_U)

    # steps --------------------------------------------------------------------------------------

    def lookup(self, routes: Sequence[Route], done: Callable[[list[Parts]], None]) -> None:
        """Weights of the routed rows after step - 1, per slab, to `done`."""
        step, waiting = self.step, dict.fromkeys(range(self.slots))
        answers: dict[int, wire.Rows] = {}

        def ask(slot: int) -> None:
            positions = [route.positions[slot] for route in routes]

            def on_answer(answer: Answer) -> None:
                assert isinstance(answer, wire.Rows)
                answers[slot] = answer
                if len(answers) == len(waiting):
                    done(self._in_order(routes, answers))

            self.ask(slot, lambda i: wire.Lookup(slot, i, step, self.trainer, positions, self.half), on_answer)

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
                out_UD = torch.empty((len(there.rows), slab.dim), dtype=torch.bfloat16 if self.half else torch.float32)
                parts = [there.join(parts, out_UD) if parts else out_UD]
            weights.append(parts)
        return weights

    def snapshot_due(self, step: int) -> bool:
        """Whether the dense model after `step` is to be kept."""
        return self.snapshot_every > 0 and step % self.snapshot_every == 0

    def may_push(self) -> bool:
        """A trainer runs at most `window_steps` ahead of what is acknowledged."""
        return self.complete >= self.step - self.settings.window_steps

    def push(self, routes: Sequence[Route], gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Sends the gradients (U, D) of this step to every slot and ends the step."""
        step = self.step
        state = self.open[step] = _StepState(unacknowledged=set(range(self.slots)))
        if not self.snapshot_due(step):
            state.unstored = set()
        if self.half:
            gradients = [gradient_UD.bfloat16() for gradient_UD in gradients]
        parts = [route.split(gradient) for route, gradient in zip(routes, gradients, strict=True)]

        def send(slot: int) -> None:
            positions = [route.positions[slot] for route in routes]
            mine = [part[slot] for part in parts]

            def make(incarnation: int) -> wire.Request:
                return wire.Push(slot, incarnation, step, self.trainer, positions, mine, list(rates), self.resumable)

            def on_answer(_: Answer) -> None:
                state.unacknowledged.discard(slot)
                self._advance()

            self.ask(slot, make, on_answer)

        self.step = step + 1
        for slot in range(self.slots):
            send(slot)

    def snapshot(self, payload: Tensor, header: str) -> None:
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
            if self.snapshot_every == 0 or self.snapshot_due(self.complete):
                self.resumable = self.complete
        self.on_change()

    def place(self, placement: Placement) -> bool:
        newer = super().place(placement)
        self.on_change()
        return newer

    def resume(self, era: int, step: int) -> None:
        """Goes on after `step`, in the era that began there. Before anything else."""
        self.era, self.step = era, step + 1
        self.complete = self.resumable = self.resume_step = step

    def known(self, loaded: bool) -> dict[str, Any]:
        """What a coordinator that was started again must know; `loaded`: initial values are there."""
        return {
            "job": self.job.to_json(),
            "placement": self.placement.to_json() if self.placement is not None else None,
            "era": self.era,
            "frozen": False,
            "resume_step": self.resume_step,
            "loaded": loaded,
            "whole": [],
            "incarnations": [],
        }

    # whole records ------------------------------------------------------------------------------

    def read(self, slab: int, route: Route, done: Callable[[Tensor], None]) -> None:
        """(U, B) record bytes of the routed rows after step - 1, to `done`."""
        step = self.step - 1
        asked = [slot for slot in range(self.slots) if len(route.positions[slot])]
        answers: dict[int, Tensor] = {}
        out_UB = torch.empty((len(route.rows), self.job.slabs[slab].record_bytes), dtype=torch.uint8)

        def ask(slot: int) -> None:
            def on_answer(answer: Answer) -> None:
                assert isinstance(answer, wire.Records)
                answers[slot] = answer.records
                if len(answers) == len(asked):
                    done(route.join([answers[s] for s in asked], out_UB))

            self.ask(slot, lambda i: wire.Export(slot, i, slab, step, route.positions[slot]), on_answer)

        if not asked:
            done(out_UB)
        for slot in asked:
            ask(slot)

    def stored(self, slot: int, step: int, done: Callable[[Answer], None]) -> None:
        """The snapshot of a step that a snapshot slot holds (-1: all of them), to `done`."""
        self.ask(slot, lambda i: wire.FetchSnapshots(slot, i, step), done)

    def load(
        self, slab: int, parity: bool, slot: int, positions: Tensor, records: Tensor, done: Callable[[], None]
    ) -> None:
        """Overwrites records or parities of one slot before the first step."""
        self.ask(slot, lambda i: wire.Load(slot, i, slab, parity, positions, records), lambda _: done())


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
    threads go to stderr), or with the error that the background reported.
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
        self._loaded = False
        self._resumed: tuple[int, int] | None = None  # the era, and the step after which this trainer goes on
        self._closed = False
        self._pending_load: dict[int, tuple[Tensor, Tensor]] = {}
        self._loaded_into: tuple[int, ...] | None = None  # incarnations of the slots when loading began
        self._has_told = False  # trainer 0: that it has loaded
        self._routes: deque[Route] = deque(maxlen=ROUTES_KEPT)
        self._ahead: list[_Ahead] = []
        client.on_change = self._notify
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
        return self.client.known(self._loaded)

    def fail(self, error: BaseException) -> None:
        """Something went wrong in the background: the next or present wait raises it."""
        if self._error is None:
            self._error = error
        self._notify()

    def on_control(self, message: dict[str, Any]) -> None:
        """A message of the coordinator to this trainer."""
        if message["type"] == "placement":
            self.client.run(self.client.place, Placement.from_json(message["placement"]))
        elif message["type"] == "loaded":
            self._loaded = True
            self._notify()
        elif message["type"] == "rejoined" and self._has_told:
            self._tell({"type": "loaded"})
        elif message["type"] == "resume" and self._resumed is None:
            self._resumed = message["era"], message["step"]
            self.client.run(self.client.resume, *self._resumed)
            self._notify()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        limit_s = self.client.settings.give_up_s
        deadline = time.monotonic() + limit_s
        with self._changed:
            seen, self._awaited = self._changes, condition
            try:
                while self._error is None and not condition():
                    if self._changes != seen:
                        seen, deadline = self._changes, time.monotonic() + limit_s
                    if time.monotonic() > deadline:
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
        """The step being worked on, from 1."""
        return self.client.step

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

    def lookup(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Weights of rows as they are after the previous step.

        Args:
            rows: per slab, (U,) int64, unique; in the order that `arrange` gave them, they cost least.

        Returns:
            Per slab, (U, D) float32, or bfloat16 if that is the `wire`.
        """
        return [torch.cat(parts) for parts in self.lookup_parts(rows)]

    def lookup_parts(self, rows: Sequence[Tensor]) -> list[Parts]:
        """The same as they came, one part from each slot. Not to be written: they may lie in a server's memory."""
        what = f"lookup of step {self.step}"
        ahead = next((a for a in self._ahead if a.step == self.step and a.is_of(rows)), None)
        if ahead is not None:
            self._ahead.remove(ahead)
            self._wait(lambda: bool(ahead.answer), what)
            return ahead.answer[0]
        weights: list[Parts] = self._run_and_wait(self.client.lookup, self._route(rows), what=what)
        return weights

    def look_ahead(self, rows: Sequence[Tensor]) -> None:
        """Asks for rows that a `lookup` of this step will ask for; does not wait.

        Args:
            rows: the very tensors that `lookup` will be called with. If it is not, the answer is dropped.
        """
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
        routes = self._route(rows)
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

    def snapshot(self, payload: Tensor, header: str) -> None:
        """Replicates this trainer's part of the dense model after the previous step; does not wait."""
        self.client.run(self.client.snapshot, payload, header)

    def snapshots(self, slot: int = 0) -> list[tuple[int, int, str, Tensor]]:
        """What a snapshot slot holds: (step, trainer, header, payload), ascending.

        Args:
            slot: 0 to r. After `flush` each of them holds this trainer's last snapshot.
        """
        if slot not in self.client.snapshot_slots:
            raise ValueError(f"`slot` must be one of the snapshot slots {[*self.client.snapshot_slots]}, got {slot}")
        return self._stored(slot, -1)

    def _stored(self, slot: int, step: int) -> list[tuple[int, int, str, Tensor]]:
        have: wire.Snapshots = self._run_and_wait(self.client.stored, slot, step, what=f"snapshots of slot {slot}")
        return list(zip(have.steps, have.trainers, have.headers, have.payloads, strict=True))

    def resume(self) -> tuple[int, list[tuple[Tensor, str]]]:
        """Where training goes on, in a session that was `restarted`.

        Returns:
            The last step that counts, and the dense model after it: payload and header of every trainer's part, in
            their order. Without parts if it is step 0: the model as it was made.
        """
        self._wait(lambda: self._resumed is not None, "waiting for the servers to go back to a step that all know")
        assert self._resumed is not None
        step = self._resumed[1]
        return step, [(payload, header) for _, _, header, payload in (self._stored(0, step) if step else ())]

    def flush(self) -> None:
        """Waits until everything sent is acknowledged: survives r losses."""
        self._wait(lambda: not self.client.exchanges, f"flush after step {self.step - 1}")

    # whole records ------------------------------------------------------------------------------

    def read(self, slab: int, rows: Tensor) -> Tensor:
        """(U, W) float32 records (weights, then optimizer state) of slab rows (U,) as of the previous step."""
        route = self.client.route(slab, rows)
        records_UB: Tensor = self._run_and_wait(self.client.read, slab, route, what="reading records")
        return records_UB.view(torch.float32)

    def load(self, slab: int, rows: Tensor, records: Tensor) -> None:
        """Overwrites records before the first step, parities included. Trainer 0 only.

        Args:
            slab: which.
            rows: (U,) int64, ascending and unique. Rows may be loaded again: the last values count.
            records: (U, W) float32.
        """
        if self.restarted:
            return
        if self.trainer != 0:
            raise ValueError(f"only trainer 0 loads initial values, this is trainer {self.trainer}")
        if self.step != 1:
            raise ValueError(f"initial values can be loaded before the first step only, this is step {self.step}")
        most = self.client.layouts[slab].rows
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(((rows >= 0) & (rows < most)).all()):
            raise ValueError(f"`rows` must be ascending and unique, from 0 to {most - 1}")
        self._check_nothing_lost()
        values = records.contiguous().view(torch.uint8)
        self._send_load(slab, False, self.client.route(slab, rows), values)
        if self.job.code.parities:
            if slab in self._pending_load:
                before, kept = self._pending_load[slab], ~torch.isin(self._pending_load[slab][0], rows)
                rows, values = torch.cat([before[0][kept], rows]), torch.cat([before[1][kept], values])
                order = torch.argsort(rows, stable=True)
                rows, values = rows[order], values[order]
            self._pending_load[slab] = self._load_parity(slab, rows, values, whole=False)

    def _send_load(self, slab: int, parity: bool, route: Route, values: Tensor) -> None:
        left = [slot for slot in range(self.client.slots) if len(route.positions[slot])]
        parts = route.split(values)
        for slot in left:
            self._run_and_wait(
                self.client.load, slab, parity, slot, route.positions[slot], parts[slot], what="loading initial values"
            )

    def _load_parity(self, slab: int, rows: Tensor, values: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """Encodes and sends the parities of the stripes that are complete in `rows` (ascending); returns the rest.

        With `whole`, members that were not loaded are read from the servers, and nothing is left.
        """
        layout, k = self.client.layouts[slab], self.client.code.k
        stripes, counts = torch.unique_consecutive(rows // k, return_counts=True)
        expected = torch.clamp(layout.rows - stripes * k, max=k)
        done = torch.ones_like(counts, dtype=torch.bool) if whole else counts == expected
        chosen = torch.repeat_interleave(done, counts)
        if bool(done.any()):
            stripes_C = stripes[done]
            data = torch.zeros((len(stripes_C), k, values.shape[1]), dtype=torch.uint8)
            if whole and not bool((counts == expected).all()):
                every = (stripes_C[:, None] * k + torch.arange(k)).flatten()
                every = every[every < layout.rows]
                have = self.read(slab, every).view(torch.uint8)
                data[torch.searchsorted(stripes_C, every // k), every % k] = have
            data[torch.searchsorted(stripes_C, rows[chosen] // k), rows[chosen] % k] = values[chosen]
            parity = self.client.code.encode(data.transpose(0, 1).contiguous().numpy())
            for j in range(self.client.code.n - k):
                base = (stripes_C % layout.slots).numpy()
                slots = layout.member_slot[base, k + j]
                first = layout.parity_first[slots, layout.member_rank[base, k + j]]
                positions = first + (stripes_C // layout.slots).numpy()
                for slot in np.unique(slots).tolist():
                    mine = slots == slot
                    at = torch.from_numpy(np.ascontiguousarray(positions[mine]))
                    part = torch.from_numpy(np.ascontiguousarray(parity[j][mine]))
                    self._run_and_wait(self.client.load, slab, True, slot, at, part, what="loading initial parities")
        return rows[~chosen], values[~chosen]

    def loaded(self) -> None:
        """Ends the loading of initial values; every trainer calls it once and waits for trainer 0."""
        if self.restarted:
            self.resume()
        elif self.trainer == 0:
            for slab, (rows, values) in list(self._pending_load.items()):
                if len(rows):
                    self._load_parity(slab, rows, values, whole=True)
            self._pending_load = {}
            self._check_nothing_lost()
            self._has_told = True
            self._tell({"type": "loaded"})
        self._wait(lambda: self._loaded, "waiting for trainer 0 to load initial values")

    def _check_nothing_lost(self) -> None:
        """A server lost while initial values are loaded takes some of them along: loading has to start again."""
        self._wait(lambda: self.client.placement is not None, "waiting for the cluster")
        assert self.client.placement is not None
        incarnations = tuple(place.incarnation for place in self.client.placement.slots)
        if self._loaded_into is None:
            self._loaded_into = incarnations
        elif self._loaded_into != incarnations:
            raise ClusterUnavailable("a server was lost while the initial values were loaded; start the job again")

    # the rest -----------------------------------------------------------------------------------

    def report(self, **figures: Any) -> None:
        """Tells the coordinator how training goes (step, loss, samples_per_s ...), for status and progress lines."""
        self._tell({"type": "progress", "trainer": self.trainer, **figures})

    def close(self) -> None:
        """Leaves the cluster. Idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close()
