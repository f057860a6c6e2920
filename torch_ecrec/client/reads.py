"""What a trainer asks of slots and changes nothing with: rows of a step, whole records, stored snapshots.

    lookup(routes)   the weights of some rows after step - 1, from every slot that has some: one part from each
    read(route)      whole records (weights, then optimizer state) after step - 1
    stored(slot)     the snapshots of the dense model that a slot keeps

Each gives its answer to a callback, once all slots concerned have answered; nothing here waits.

Also here: which answers to believe and which refusals to give up at, since both need the job alone.

Shape legend: U unique rows of a table group, D embedding dim, B record bytes; lists hold one tensor per table group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.layout.routing import BagRoute, Parts, Route, route, route_bags
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


def bags_at(bags: Sequence[BagRoute], slot: int) -> list[wire.Bags]:
    """Returns the parts of bags that a slot is to pool, one of each table group; [] if none of the bags has an id
    there."""
    if not any(len(there.lengths[slot]) for there in bags):
        return []
    return [
        wire.Bags(there.positions[slot], there.lengths[slot], None if there.factors is None else there.factors[slot])
        for there in bags
    ]


def positions_at(routes: Sequence[Route], bags: Sequence[BagRoute], slot: int) -> list[Tensor]:
    """Returns all positions at a slot of some rows, and of bags: (N,) int64 of each table group, in no order."""
    found = [route.positions[slot] for route in routes]
    for table_group, there in enumerate(bags):
        if len(there.positions[slot]):
            found[table_group] = torch.cat([found[table_group], there.positions[slot].to(torch.int64)])
    return found


class LookUp:
    """A lookup under way: what is asked of which slots, and what has come of it.

    Args:
        job: what is trained.
        step: the rows are as of the step before.
        routes, bags: per table group; no bags at all where none are to be pooled.
        done: called once, with the weights and the sums of bags per table group, when all slots have answered.
        bfloat16, int8: how the weights travel.
    """

    def __init__(
        self,
        job: JobSpec,
        step: int,
        routes: Sequence[Route],
        bags: Sequence[BagRoute],
        done: Callable[[list[Parts], list[Tensor]], None],
        bfloat16: bool,
        int8: bool = False,
    ) -> None:
        self.job, self.step, self.routes, self.bags, self.done = job, step, routes, bags, done
        self.bfloat16, self.int8 = bfloat16 and not int8, int8
        self.round: Round | None = None  # from when it is on its way
        self.over = False  # given up before all had answered: nobody waits for it any more
        self.calls: list[RetryingCall[Any]] = []  # its messages, but for those that travel with a push
        self.asked = [slot for slot in range(job.code.slots) if self._is_asked(slot)]
        self._answers: dict[int, wire.Rows] = {}

    def _is_asked(self, slot: int) -> bool:
        some_rows = any(len(route.positions[slot]) for route in self.routes)
        return some_rows or any(len(there.lengths[slot]) for there in self.bags)

    def ask_of(self, slot: int) -> wire.Ask:
        """Returns the lookup of one slot in the form that travels with the push of the step before."""
        positions = [route.positions[slot] for route in self.routes]
        return wire.Ask(positions, self.bfloat16, bags_at(self.bags, slot))

    def request_to(self, slot: int, incarnation: int) -> wire.Lookup:
        """Returns the lookup of one slot as a message of its own."""
        ask = self.ask_of(slot)
        return wire.Lookup(slot, incarnation, self.step, ask.positions, ask.bfloat16, self.int8, ask.bags)

    def take(self, slot: int, answer: wire.Rows) -> None:
        """Takes the answer of one slot to its part of a read."""
        self._answers[slot] = answer

    @property
    def is_answered(self) -> bool:
        """Whether all slots that were asked have answered, if any were."""
        return len(self._answers) == len(self.asked)

    def finish(self) -> None:
        """Hands over what was looked up, once it is answered."""
        self.done(self._in_order(), self._pooled())

    def _in_order(self) -> list[Parts]:
        answers, weights = self._answers, []
        for s, (table_group, there) in enumerate(zip(self.job.table_groups, self.routes, strict=True)):
            parts = [answers[slot].weights[s] for slot in sorted(answers)]
            if there.rank is not None or not parts:
                dtype = torch.uint8 if self.int8 else torch.bfloat16 if self.bfloat16 else torch.float32
                width = table_group.dim + MORE_BYTES if self.int8 else table_group.dim
                out_UD = torch.empty((len(there.rows), width), dtype=dtype, device="cpu")
                parts = [there.join(parts, out_UD) if parts else out_UD]
            weights.append(parts)
        return weights

    def _pooled(self) -> list[Tensor]:
        """Returns the bags (G, D) of each table group, from what slots have pooled."""
        found = []
        for s, (table_group, there) in enumerate(
            zip(self.job.table_groups, self.bags, strict=True) if self.bags else ()
        ):
            nothing = torch.empty((0, table_group.dim), dtype=torch.float32, device="cpu")
            answers = (self._answers.get(slot) for slot in range(self.job.code.slots))
            parts = [answer.pooled[s] if answer is not None and answer.pooled else nothing for answer in answers]
            found.append(there.join(parts, table_group.dim))
        return found


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
        self.layouts = job.layouts
        self.validator = MessageValidator(job, self.layouts)
        self.bfloat16 = settings.wire == "bfloat16"
        self.step = 1  # the one being worked on, as the messages count
        self._lookups: dict[LookUp, None] = {}  # of this step, under way: an evaluation may make any number in one
        self.waits = SlotWaits(port.now_s, self.host_of)
        self.on_error: Callable[[BaseException], None] = _raise  # called, inside run, with what cannot be answered

    def fault_of_answer(self, request: wire.Request[Any], answer: Answer) -> str | None:
        placement = self.placement
        assert placement is not None, "it has asked somebody"
        return self.validator.fault_of_answer(request, answer, lambda slot: placement.slots[slot].incarnation)

    def gives_up(self, request: wire.Request[Any], refusal: wire.Malformed) -> bool:
        """Returns whether a refused request is given up: one that is malformed as it was sent would be refused for
        ever; one that was spoilt on its way is sent again."""
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

    def route(self, table_group: int, rows_U: Tensor) -> Route:
        """Returns where different rows (U,) int64 of a table group live."""
        return route(self.layouts[table_group], rows_U)

    def route_bags(
        self, table_group: int, rows_N: Tensor, lengths_G: Tensor, factors_N: Tensor | None = None
    ) -> BagRoute:
        """Returns where the rows (N,) int64 of bags live; see `layout.routing.route_bags`."""
        return route_bags(self.layouts[table_group], rows_N, lengths_G, factors_N)

    def lookup(self, routes: Sequence[Route], done: Callable[[list[Parts]], None], int8: bool = False) -> None:
        """Weights of the routed rows after step - 1, per table group, to `done`.

        Args:
            int8: they come as (U, D + 8) uint8, quantised row by row (`records/quantised.py`).
        """
        self._look_up(LookUp(self.job, self.step, routes, [], lambda weights, _: done(weights), self.bfloat16, int8))

    def lookup_bags(
        self, routes: Sequence[Route], bags: Sequence[BagRoute], done: Callable[[list[Parts], list[Tensor]], None]
    ) -> None:
        """As `lookup`, and the sums (G, D) float32 of bags of each table group, which slots pool."""
        self._look_up(LookUp(self.job, self.step, routes, bags, done, self.bfloat16))

    def _look_up(self, one: LookUp) -> None:
        def ask(slot: int) -> None:
            def on_answer(answer: wire.Rows | wire.Forgotten) -> None:
                if isinstance(answer, wire.Rows):
                    self._take_rows(one, slot, answer)
                elif not one.over:  # else it was asked ahead for nothing, and nobody waits for it
                    self.on_error(LookupError(answer.reason))

            one.calls.append(self.ask(slot, lambda life: one.request_to(slot, life), on_answer))

        self._begin(one)
        for slot in one.asked:
            ask(slot)

    def _begin(self, one: LookUp) -> None:
        """Notes that a lookup is on its way."""
        one.round = self.waits.begin(one.asked)
        if one.asked:
            self._lookups[one] = None
        else:
            one.finish()

    def _take_rows(self, one: LookUp, slot: int, answer: wire.Rows) -> None:
        assert one.round is not None, "it was asked for"
        self.waits.answered(one.round, slot)
        if one.over:
            return
        one.take(slot, answer)
        if one.is_answered:
            del self._lookups[one]
            one.finish()

    def end_lookups(self) -> None:
        """Gives up the lookups of this step that are under way: later they could not be answered any more."""
        for one in self._lookups:
            assert one.round is not None, "it is on its way"
            one.over = True
            for call in one.calls:
                call.cancel()
            self.waits.end(one.round)
        self._lookups.clear()

    def place(self, placement: Placement) -> bool:
        newer = super().place(placement)
        if newer:
            self.waits.end_all()
        return newer

    def read(self, table_group: int, route: Route, done: Callable[[Tensor], None]) -> None:
        """Gives (U, B) record bytes of the routed rows after step - 1 to `done`."""
        step = self.step - 1
        asked = [slot for slot in range(self.slots) if len(route.positions[slot])]
        answers: dict[int, Tensor] = {}

        def finish() -> None:
            out_UB = torch.empty(
                (len(route.rows), self.job.table_groups[table_group].schema.nbytes), dtype=torch.uint8, device="cpu"
            )
            done(route.join([answers[s] for s in asked], out_UB) if asked else out_UB)

        def ask(slot: int) -> None:
            def on_answer(answer: wire.Records | wire.Forgotten) -> None:
                if isinstance(answer, wire.Forgotten):
                    self.on_error(LookupError(answer.reason))
                    return
                answers[slot] = answer.records
                if len(answers) == len(asked):
                    finish()

            self.ask(slot, lambda i: wire.Export(slot, i, table_group, step, route.positions[slot]), on_answer)

        if not asked:
            finish()
        for slot in asked:
            ask(slot)

    def stored(self, slot: int, step: int, done: Callable[[wire.Snapshots], None]) -> None:
        """Gives the snapshot of a step that a snapshot slot holds (-1: all of them) to `done`."""
        got = Gathering(step)

        def ask() -> None:
            self.ask(slot, lambda i: wire.FetchSnapshots(slot, i, step, begin=got.begin(i)), on_answer)

        def on_answer(answer: wire.Snapshots) -> None:
            if got.take(answer):
                done(got.all())
            else:
                ask()

        ask()
