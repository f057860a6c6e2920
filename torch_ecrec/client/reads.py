"""What a trainer asks of slots and changes nothing with: rows of a step, whole records, stored snapshots.

    lookup(routes)   the weights of some rows after step - 1, from every slot that has some: one part from each
    read(route)      whole records (weights, then optimizer state) after step - 1
    stored(slot)     the snapshots of the dense model that a slot keeps

Each gives its answer to a callback, once all slots concerned have answered; nothing here waits.

Also here: which answers to believe and which refusals to give up at, since both need the job alone.

Shape legend: U unique rows of a slab, D embedding dim, B record bytes; lists hold one tensor per slab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.layout.routing import Parts, Route, route
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.messages import Placement
from torch_ecrec.protocol.pieces import Gathering
from torch_ecrec.protocol.waits import Round, SlotWaits
from torch_ecrec.protocol.wellformed import MessageValidator
from torch_ecrec.protocol.wire import Answer
from torch_ecrec.records.quantised import MORE_BYTES
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import Node, Port, RetryingCall


def _raise(error: BaseException) -> None:
    raise error


class SlotReads(Node):
    """A node that knows a job and reads its records as of the step before the present one. Call it inside `run`.

    Args:
        name, port: see `Node`.
        job: what is trained.
        settings: `wire` says whether weights that are looked up are rounded to bfloat16.
    """

    def __init__(self, name: str, port: Port, job: JobSpec, settings: Settings) -> None:
        super().__init__(name, port, settings.call_timeout_s)
        self.job, self.settings = job, settings
        self.slots = job.code.slots
        self.layouts = [layout_of(job.code.slots, job.code.k, job.code.parities, slab.rows) for slab in job.slabs]
        self.validator = MessageValidator(job, self.layouts)
        self.bfloat16 = settings.wire == "bfloat16"
        self.step = 1  # the one being worked on, as the messages count
        self._lookups: list[RetryingCall[Any]] = []  # of this step
        self.waits = SlotWaits(port.now_s, self.host_of)
        self._rounds: list[Round] = []  # of this step
        self.on_error: Callable[[BaseException], None] = _raise  # called, inside run, with what cannot be answered

    def fault_of_answer(self, request: wire.Request[Any], answer: Answer) -> str | None:
        placement = self.placement
        assert placement is not None, "it has asked somebody"
        return self.validator.fault_of_answer(request, answer, lambda slot: placement.slots[slot].incarnation)

    def gives_up(self, request: wire.Request[Any], refusal: wire.Malformed) -> bool:
        """One that is malformed as it was sent would be refused for ever; what was spoilt on its way is sent again."""
        placement = self.placement
        assert placement is not None, "it has asked somebody"
        try:
            WIRE.decode_request(WIRE.encode(request)[0])
            fault = self.validator.fault_of_request(request, None, lambda slot: placement.slots[slot].incarnation)
        except (TypeError, ValueError) as error:
            fault = str(error)
        if fault is not None:
            self.on_error(ValueError(f"slot {request.slot} refuses a {type(request).__name__}: {refusal.reason}"))
        return fault is not None

    def route(self, slab: int, rows_U: Tensor) -> Route:
        """Where different rows (U,) int64 of a slab live."""
        return route(self.layouts[slab], rows_U)

    def lookup(self, routes: Sequence[Route], done: Callable[[list[Parts]], None], int8: bool = False) -> None:
        """Weights of the routed rows after step - 1, per slab, to `done`.

        Args:
            int8: they come as (U, D + 8) uint8, quantised row by row (`records/quantised.py`).
        """
        bfloat16 = self.bfloat16 and not int8
        step = self.step
        asked = [slot for slot in range(self.slots) if any(len(route.positions[slot]) for route in routes)]
        answers: dict[int, wire.Rows] = {}
        begun = self.waits.begin(asked)
        self._rounds.append(begun)

        def ask(slot: int) -> None:
            positions = [route.positions[slot] for route in routes]

            def on_answer(answer: wire.Rows | wire.Forgotten) -> None:
                if isinstance(answer, wire.Forgotten):
                    if step == self.step:  # else it was asked ahead for nothing, and nobody waits for it
                        self.on_error(LookupError(answer.reason))
                    return
                answers[slot] = answer
                self.waits.answered(begun, slot)
                if len(answers) == len(asked):
                    done(self._in_order(routes, answers, int8))

            self._lookups.append(
                self.ask(slot, lambda i: wire.Lookup(slot, i, step, positions, bfloat16, int8), on_answer)
            )

        if not asked:
            done(self._in_order(routes, answers, int8))
        for slot in asked:
            ask(slot)

    def _in_order(self, routes: Sequence[Route], answers: dict[int, wire.Rows], int8: bool) -> list[Parts]:
        weights = []
        for s, (slab, there) in enumerate(zip(self.job.slabs, routes, strict=True)):
            parts = [answers[slot].weights[s] for slot in sorted(answers)]
            if there.rank is not None or not parts:
                dtype = torch.uint8 if int8 else torch.bfloat16 if self.bfloat16 else torch.float32
                width = slab.dim + MORE_BYTES if int8 else slab.dim
                out_UD = torch.empty((len(there.rows), width), dtype=dtype, device="cpu")
                parts = [there.join(parts, out_UD) if parts else out_UD]
            weights.append(parts)
        return weights

    def end_lookups(self) -> None:
        """Gives up the lookups of this step that are under way: later they could not be answered any more."""
        for lookup in self._lookups:
            lookup.cancel()
        for one in self._rounds:
            self.waits.end(one)
        self._lookups, self._rounds = [], []

    def place(self, placement: Placement) -> bool:
        newer = super().place(placement)
        if newer:
            self.waits.end_all()
        return newer

    def read(self, slab: int, route: Route, done: Callable[[Tensor], None]) -> None:
        """(U, B) record bytes of the routed rows after step - 1, to `done`."""
        step = self.step - 1
        asked = [slot for slot in range(self.slots) if len(route.positions[slot])]
        answers: dict[int, Tensor] = {}

        def finish() -> None:
            out_UB = torch.empty((len(route.rows), self.job.slabs[slab].schema.nbytes), dtype=torch.uint8, device="cpu")
            done(route.join([answers[s] for s in asked], out_UB) if asked else out_UB)

        def ask(slot: int) -> None:
            def on_answer(answer: wire.Records | wire.Forgotten) -> None:
                if isinstance(answer, wire.Forgotten):
                    self.on_error(LookupError(answer.reason))
                    return
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

        def on_answer(answer: wire.Snapshots) -> None:
            if got.take(answer):
                done(got.all())
            else:
                ask()

        ask()
