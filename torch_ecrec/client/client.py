"""A trainer's side of the data plane: keeps what it has sent until all slots have acknowledged it, and sends it again.

`Client` is the protocol of one trainer: it never blocks and knows no threads, so the same code runs over a network and
in the simulated cluster. `session.py` waits for it, on the user's thread.

A step t of one trainer:
    lookup(rows)   asks every slot concerned for the weights after t - 1 (`reads.py`)
    push(...)      gradients to every slot, empty ones included; ends the step. Not waited for: a trainer may run
                   `window_steps` ahead of what is acknowledged, and keeps what is not. Lookups of the next step, where
                   they are known, travel with it, and their rows come with its answer, perhaps before it is
                   acknowledged: later answers say so, or whoever waits for it asks (`settle`)
    snapshot(...)  the dense model after t, to the r + 1 snapshot slots

Values are loaded in steps, too. Before training, `load` on trainer 0 is to the slots what `push` is of all trainers;
training begins after the last of them, the `load_end`. Later every trainer calls `load` or `pass_` in such a step.
`Client` counts steps as the messages do; `Session` counts those of training, from 1.

The dense model may be kept after each step. A step that begins before the one before has ended (in the same turn of the
user's loop) takes over from that one: the snapshot, if one was due, is of all of them, and nobody goes back between
them.

Shape legend: U unique rows of a table group, D embedding dim, B record bytes; lists hold one tensor per table group.
Rows are those of the table group: first row of the table in it, plus the id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.client.reads import LookUp, SlotReads, bags_at, positions_at
from torch_ecrec.layout.routing import BagRoute, Parts, Route
from torch_ecrec.observe.words import trainers_named
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.bounds import TEXT_MOST
from torch_ecrec.protocol.messages import Placement
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import Port, RetryingCall

LOAD_BYTES = 8 << 20  # of records in one step that loads
LOOK_MOST_S = 5.0  # between two looks at whether others are waited for
SHORTER = (
    "If its loop is shorter than that of this one, give all trainers as many batches: leave some out, or give a trainer"
    " without ids an empty KeyedJaggedTensor"
)


@dataclass
class _StepState:
    """Holds what is not confirmed yet of one step of this trainer. A slot that has acknowledged its part is in neither
    `calls` nor `ran_ahead` any more."""

    calls: dict[int, RetryingCall[wire.Acknowledged]] = field(default_factory=dict)  # slot -> its part, under way
    ran_ahead: dict[int, int] = field(default_factory=dict)  # slot -> incarnation that has applied it, and no more yet
    unstored: set[int] | None = None  # snapshot slots; None: its snapshot was not taken yet
    snapshot: tuple[Tensor, list[int]] | None = None
    make: Callable[[int, int], wire.Part] | None = None  # of a slot and its incarnation; kept for slots that begin anew
    since: dict[int, int] = field(default_factory=dict)  # snapshot slot -> incarnation that stored it
    least: dict[int, int] = field(default_factory=dict)  # slot -> earlier incarnations have stored it for nothing


class Client(SlotReads):
    """The protocol of one trainer. Call its methods inside `run`.

    Args:
        name, port: see `Node`.
        job: what is trained.
        trainer: this trainer's index, 0 <= trainer < job.trainers.
        snapshot_every: `snapshot` is called after each step of training that is a multiple of it, or after a later one
            with which its turn of the user's loop ends; that step is complete only once its snapshot is stored. 0:
            never.
    """

    def __init__(
        self, name: str, port: Port, job: JobSpec, trainer: int, settings: Settings, snapshot_every: int = 1
    ) -> None:
        super().__init__(name, port, job, settings)
        self.trainer = trainer
        self.snapshot_slots = range(min(job.code.parities + 1, self.slots))
        self.complete = 0  # everything of this trainer up to here is acknowledged and stored
        self.resumable = 0  # the last step up to there that needs no snapshot, or has one: logs must reach back to it
        self.resume_step = self.resume_done = 0  # where its era began, and the steps of training until then
        self.begins_anew = True  # initial values are loaded in it
        self.resumed = False  # whether that is known: nothing is asked of a slot before
        self.load_end: int | None = None  # the step that training begins after; None: initial values are being loaded
        self.done = 0  # steps of training that are done
        self.first_trained: int | None = None  # from there on, the dense model is not as the script builds it
        self.left: list[int] = []  # trainers that are done: for a coordinator that is started again
        self.ended_loading = False  # trainer 0: the coordinator was told
        self.snapshot_every = 0 if settings.experiment.keeps_no_dense_snapshots else snapshot_every
        self._settles = False  # somebody waits until all is acknowledged
        self._settling: dict[int, tuple[int, RetryingCall[wire.Acknowledged]]] = {}  # slot -> step, and who asks
        self._acknowledged: dict[int, int] = {}  # slot -> the last step that it has acknowledged
        self.hinted: set[int] = set()  # slots that want to be told early of lookups, as they said last
        self._owed = False  # a snapshot was due after the step before, and is due after the one that takes over
        self.open: dict[int, _StepState] = {}
        self.partial_restores: list[messages.PartialRestore] = []  # slots that began anew, in this run
        self.inexact: list[tuple[int, str]] = []  # what this trainer has said of that
        self.awaited: list[int] = []  # trainers without whom nothing here goes on, as the slots said last
        self._stale: set[RetryingCall[Any]] = set()  # what was out at the last look
        self.on_awaited: Callable[[], None] = lambda: None  # called, inside run, now and then while it is so
        self.on_change: Callable[[], None] = lambda: None  # called, inside run, when something was confirmed

    # from the coordinator -----------------------------------------------------------------------

    def on_control(self, word: messages.FromCoordinator) -> None:
        """Handles a message of the coordinator; one about membership is not for the protocol, and ignored."""
        match word:
            case messages.Placed():
                self.run(self.place, word.placement)
            case messages.Resume():
                self.run(self.resume, word.era, word.step, word.load_end, word.done)
            case messages.PartlyRestored():
                self.run(self.restore_partly, word)
            case messages.Loaded():
                self.run(self.begin_training, word.load_end)
            case messages.Left():
                self.left = word.trainers
            case messages.Rejoined():
                self.run(self._tell_again)

    def place(self, placement: Placement) -> bool:
        before = [] if self.placement is None else self.placement.slots
        newer = super().place(placement)
        if newer and self.settings.experiment.acknowledges_when_applied:
            for slot, (old, new) in enumerate(zip(before, placement.slots, strict=False)):
                if new.incarnation > old.incarnation:
                    self._tell_forgotten(slot)
        for state in self.open.values() if newer else ():
            for slot, incarnation in list(state.ran_ahead.items()):
                if incarnation != placement.slots[slot].incarnation:  # only what is acknowledged is there for certain
                    self._send_to(slot, state)
        self.on_change()
        return newer

    def _tell_forgotten(self, slot: int) -> None:
        """Tells a slot's new host up to which step it is sent nothing any more, so that it passes over what it lacks of
        these: the slot may have been lost with steps that it had acknowledged (experiment minus2PC)."""
        last = max(self.complete, self._acknowledged.get(slot, 0))
        if last > 0:
            self.ask(slot, lambda incarnation: wire.WhenAcknowledged(slot, incarnation, last), lambda answer: None)
        if self.trainer == 0:
            self.not_exact(f"slot {slot} has another host: acknowledged steps may be lost (experiment minus2PC)")

    def resume(self, era: int, step: int, load_end: int | None, done: int) -> None:
        """Goes on after `step`, with `done` steps of training, in the era that began there.

        Before anything else; only the first time counts. Where initial values were loaded since, training begins after
        them: a coordinator that was started again says both at once.
        """
        if self.resumed:
            return
        last = max(step, load_end or 0)
        self.era, self.step, self.resume_step = era, last + 1, step
        self.complete = self.resumable = last
        self.done = self.resume_done = done
        self.first_trained = step if load_end is not None and step > load_end else None
        self.begins_anew = load_end is None or step < load_end
        self.resumed, self.load_end = True, load_end
        self.on_change()

    def begin_training(self, load_end: int) -> None:
        """Begins training: the initial values are there, as of step `load_end`."""
        if self.load_end is None:
            self.step, self.complete, self.resumable = load_end + 1, load_end, load_end
            self.load_end = load_end  # the last: the user's thread waits for it
        self.on_change()

    def restore_partly(self, word: messages.PartlyRestored) -> None:
        """Sends what is not complete to slots that have begun anew, which do not know what they acknowledged before. In
        that era, all that is under way is asked once more."""
        news, self.partial_restores = word.partial_restores[len(self.partial_restores) :], word.partial_restores
        if not self.resumed or word.era <= self.era:
            return
        self.era = word.era
        anew = sorted({slot for partial_restore in news for slot, _, _ in partial_restore.lives})
        for step, state in self.open.items():
            for slot in anew:
                if slot not in state.calls:
                    self._send_to(slot, state)
                if state.snapshot is not None and state.unstored is not None and slot in self.snapshot_slots:
                    if slot not in state.unstored:
                        self._send_snapshot(step, state, slot)
        for exchange in list(self.calls):
            exchange.failures = 0
            exchange.send()
        self.on_change()

    def known(self) -> messages.Known:
        """Returns what this trainer knows of the run, for a coordinator that was started again."""
        return messages.Known(
            job=self.job,
            placement=self.placement,
            era=self.era,
            frozen=False,
            resume_step=self.resume_step,
            done=self.resume_done,
            load_end=self.load_end,
            partial_restores=self.partial_restores,
            left=self.left,
        )

    # loading ------------------------------------------------------------------------------------

    def left_behind(self) -> Iterator[tuple[int, Tensor]]:
        """Yields rows whose initial values must be made again before loading begins: table group and rows, in portions.

        Before this trainer another one may have loaded something, or trained, and was lost. Every row, then; else none.
        """
        for table_group, spec in enumerate(self.job.table_groups if self.resume_step else ()):
            rows = max(1, LOAD_BYTES // spec.schema.nbytes)
            for first in range(0, spec.rows, rows):
                yield table_group, torch.arange(first, min(first + rows, spec.rows), dtype=torch.int64, device="cpu")

    def load(self, table_group: int, route: Route, records: Tensor | None, first_byte: int = 0) -> None:
        """Sends a step that overwrites the routed rows. In training every other trainer calls it or `pass_`.

        Args:
            table_group: which.
            route: of the rows.
            records: (U, b) uint8, copied; None: as the servers initialise these rows.
            first_byte: of each record, that is written; b of them are.
        """
        parts = route.split(records) if records is not None else [None] * self.slots
        step, alone = self.step, self.load_end is None
        before = functools.partial(self._resumable_before, step)

        def make(slot: int, incarnation: int) -> wire.Load:
            positions = route.positions[slot]
            return wire.Load(
                slot, incarnation, step, self.trainer, table_group, positions, first_byte, parts[slot], before(), alone
            )

        self._send_step(make, self._take_over())

    def pass_(self) -> None:
        """Takes part in a step in which others load, and this trainer does not."""
        step = self.step

        def make(slot: int, incarnation: int) -> wire.NoUpdate:
            return wire.NoUpdate(slot, incarnation, step, self.trainer, self._resumable_before(step))

        self._send_step(make, self._take_over())

    def _resumable_before(self, step: int) -> int:
        """As told with a step that loads: one that is sent once more may be the last before training, when that has
        begun already, as everybody else knows of its end."""
        return min(self.resumable, step - 1)

    def _take_over(self) -> bool:
        """Returns whether the snapshot that was due after the step before is due after this one, which ends with it."""
        self.end_lookups()
        self.without_snapshot()
        owed, self._owed = self._owed, False
        return owed

    def all_acknowledged(self) -> bool:
        """Returns whether everything that this trainer has sent survives r losses."""
        return self.complete == self.step - 1

    def end_loading(self) -> None:
        """Tells the coordinator that everything is loaded, once all is acknowledged; that one tells everybody."""
        self.ended_loading = True
        self.tell(messages.Loaded(self.step - 1 if self.load_end is None else self.load_end))

    def not_exact(self, what: str) -> None:
        """Tells the coordinator what makes this run another than one that nothing has happened to."""
        self.inexact.append((self.done, what[:TEXT_MOST]))
        self.tell(messages.NotExact(self.done, what[:TEXT_MOST]))

    def _tell_again(self) -> None:
        """Tells the coordinator again what the one before may not have heard."""
        if self.ended_loading:
            self.end_loading()
        for step, what in self.inexact:
            self.tell(messages.NotExact(step, what))

    # others -------------------------------------------------------------------------------------

    def look_out(self) -> None:
        """Finds out now and then, from now on, for which trainers this one waits, if it does. Their scripts may do
        other things for as long as they like: they are there as long as the coordinator has them for members, and this
        one waits with patience (`on_change`), as long as every slot that it waits for answers."""
        stale, self._stale = self._stale & self.calls.keys(), set(self.calls)
        slots = sorted({exchange.slot for exchange in stale})
        if slots and self.placement is not None:
            self._ask_awaited(slots, self._take_awaited)
        if not slots:
            self.awaited = []
        if self.placement is not None and self.placement.restoring:
            self.on_change()  # for as long as it takes: whoever cannot read the checkpoint says so
        self.later(min(LOOK_MOST_S, self.settings.give_up_s / 4), self.look_out)

    def overtaken(self, done: Callable[[bool], None]) -> None:
        """Finds out whether another trainer has sent its part of the step that is worked on here, and this one has
        not."""

        def on_answers(answers: list[wire.Awaited | None]) -> None:
            (answer,) = answers
            mine = answer is not None and answer.step == self.step and self.trainer in answer.trainers
            done(mine and answer is not None and len(answer.trainers) < self.job.trainers)

        if self.placement is None or self.load_end is None:  # initial values are trainer 0's to send
            done(False)
        else:
            self._ask_awaited([0], on_answers)

    def _ask_awaited(self, slots: Sequence[int], done: Callable[[list[wire.Awaited | None]], None]) -> None:
        """Asks slots for whose part of their next step they wait; None stands for one that did not answer."""
        answers: dict[int, wire.Awaited | None] = {}

        def ask(slot: int) -> None:
            def on_answer(answer: wire.Awaited | None) -> None:
                answers[slot] = answer
                if len(answers) == len(slots):
                    done(list(answers.values()))

            self.ask_once(slot, lambda incarnation: wire.WhoIsAwaited(slot, incarnation), on_answer)

        for slot in slots:
            ask(slot)

    def _take_awaited(self, answers: list[wire.Awaited | None]) -> None:
        """Notes which trainers this one waits for, from the answers of all slots."""
        there = [answer.trainers for answer in answers if answer is not None]
        others = {trainer for trainers in there if self.trainer not in trainers for trainer in trainers}
        gone = sorted(others.intersection(self.left))  # who is done never does its part
        self.awaited = sorted(others) if len(there) == len(answers) and not gone else []
        if gone:
            who = trainers_named(gone)
            self.on_error(
                RuntimeError(f"step {self.training_step} waits for {who}, which left the cluster, done. {SHORTER}")
            )
        elif self.awaited:
            self.on_awaited()
            self.on_change()

    # steps --------------------------------------------------------------------------------------

    @property
    def training_step(self) -> int:
        """The step of training being worked on, from 1."""
        return self.done + 1

    def is_trained(self, step: int) -> bool:
        """Returns whether a step of training is among those up to `step`: to go on from there takes the dense model of
        then."""
        return self.first_trained is not None and step >= self.first_trained

    @property
    def snapshot_due(self) -> bool:
        """Whether the dense model is to be kept now that a step has been pushed, and its turn has ended."""
        return self.snapshot_every > 0 and self.done % self.snapshot_every == 0

    def may_push(self) -> bool:
        """Returns whether the next push may be sent: a trainer runs at most `window_steps` ahead of what is
        acknowledged."""
        return self.complete >= self.step - self.settings.window_steps

    def without_snapshot(self) -> None:
        """Notes that the step before has no snapshot, and never will: this one ends in the same turn of the user's
        loop."""
        state = self.open.get(self.step - 1)
        if state is not None and state.unstored is None:
            state.unstored, self._owed = set(), True
            self._advance()

    def ahead(
        self, routes: Sequence[Route], bags: Sequence[BagRoute], done: Callable[[list[Parts], list[Tensor]], None]
    ) -> LookUp:
        """Returns a lookup of the step after this one, to travel with the push of this one; else as `lookup_bags`."""
        return LookUp(self.job, self.step + 1, routes, bags, done, self.bfloat16)

    def announce(self, later: int, routes: Sequence[Route], bags: Sequence[BagRoute]) -> None:
        """Tells slots that want hints what a later lookup will ask for, once.

        Args:
            later: so many steps after the one that is worked on.
            routes, bags: as for `lookup_bags`.
        """
        step = self.step + later

        def tell(slot: int, positions: list[Tensor]) -> None:
            self.ask_once(slot, lambda life: wire.Announce(slot, life, step, positions), lambda answer: None)

        for slot in sorted(self.hinted):
            positions = positions_at(routes, bags, slot)
            if any(map(len, positions)):
                tell(slot, positions)

    def push(
        self,
        routes: Sequence[Route],
        gradients: Sequence[Tensor],
        rates: Sequence[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        then: Sequence[LookUp] = (),
    ) -> None:
        """Sends the gradients (U, D) of rows, and (G, D) of bags, of this step to every slot and ends the step.

        With it go the lookups `then`, which `ahead` has made.

        Lookups of this step that are under way are given up: nobody waits for them, and once later steps are applied
        they could not be answered any more.
        """
        self.end_lookups()
        self.without_snapshot()
        step, iteration = self.step, self.done + 1
        if self.bfloat16:
            gradients = [gradient_UD.bfloat16() for gradient_UD in gradients]
        parts = [route.split(gradient) for route, gradient in zip(routes, gradients, strict=True)]
        of_bags = [there.split(gradient) for there, gradient in zip(bags, bag_gradients, strict=True)]
        if self.bfloat16:
            of_bags = [[part.bfloat16() for part in of_table_group] for of_table_group in of_bags]

        def make(slot: int, incarnation: int) -> wire.Push:
            positions = [route.positions[slot] for route in routes]
            mine = [part[slot] for part in parts]
            told = bags_at(bags, slot)
            told_gradients = [of_table_group[slot] for of_table_group in of_bags] if told else []
            return wire.Push(
                slot=slot,
                incarnation=incarnation,
                step=step,
                trainer=self.trainer,
                positions=positions,
                gradients=mine,
                rates=list(rates),
                iteration=iteration,
                resumable=self.resumable,
                bags=told,
                bag_gradients=told_gradients,
            )

        self.done, owed, self._owed = iteration, self._owed, False
        self.first_trained = step if self.first_trained is None else self.first_trained
        self._send_step(make, self.snapshot_due or owed, then)

    def _send_step(
        self, make: Callable[[int, int], wire.Part], snapshot_due: bool, then: Sequence[LookUp] = ()
    ) -> None:
        """Sends what `make` gives for each slot and incarnation until all have acknowledged it; ends the step."""
        state = self.open[self.step] = _StepState(make=make)
        if not snapshot_due:
            state.unstored = set()
        self.step += 1
        self._settles = False
        for one in then:
            self._begin(one)
        for slot in range(self.slots):
            self._send_to(slot, state, [one for one in then if slot in one.asked])

    def _send_to(self, slot: int, state: _StepState, then: Sequence[LookUp] = ()) -> None:
        make_part = state.make
        assert make_part is not None

        def make(incarnation: int) -> wire.Part:
            part = make_part(slot, incarnation)
            if isinstance(part, wire.Push):
                part.then = [one.ask_of(slot) for one in then if not one.over]
            return part

        def on_answer(answer: wire.Acknowledged) -> None:
            state.ran_ahead[slot] = state.calls[slot].incarnation  # first: see `all_survive`
            del state.calls[slot]
            for one, rows in zip(then, answer.rows, strict=False):  # none of those that are over
                self._take_rows(one, slot, rows)
            if then and not answer.rows and not all(one.over for one in then):
                self.on_error(LookupError(f"slot {slot} cannot show step {answer.step} any more"))
            self._acknowledge(slot, answer)
            if self._settles or self._is_late(slot):
                self._settle(slot)
            self._advance()

        state.calls[slot] = self.ask(slot, make, on_answer)
        state.ran_ahead.pop(slot, None)

    def _acknowledge(self, slot: int, answer: wire.Acknowledged) -> None:
        """Notes up to which step everything survives, as a slot has said."""
        through = answer.step
        (self.hinted.add if answer.wants_hints else self.hinted.discard)(slot)
        self._acknowledged[slot] = max(through, self._acknowledged.get(slot, 0))
        for state in [state for step, state in self.open.items() if step <= through]:
            state.ran_ahead.pop(slot, None)
            if (call := state.calls.pop(slot, None)) is not None:
                call.cancel()

    def _is_late(self, slot: int) -> bool:
        """Returns whether the next push would have to wait for what a slot has not acknowledged.

        Every answer looks: so whoever waits until it may push need not ask.
        """
        last = self.step - self.settings.window_steps
        due = (state for step, state in self.open.items() if step <= last)
        return any(slot in state.calls or slot in state.ran_ahead for state in due)

    def settle(self) -> None:
        """Asks slots that have acknowledged a part only, since somebody waits until all that was sent is
        acknowledged."""
        self._settles = True
        for slot in range(self.slots):
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        steps = [step for step, state in self.open.items() if slot in state.ran_ahead]
        asked, call = self._settling.get(slot, (0, None))
        if not steps or asked >= steps[-1]:
            return
        if call is not None:
            call.cancel()
        last = steps[-1]

        def on_answer(answer: wire.Acknowledged) -> None:
            self._settling.pop(slot, None)
            self._acknowledge(slot, answer)
            self._advance()

        self._settling[slot] = last, self.ask(slot, lambda life: wire.WhenAcknowledged(slot, life, last), on_answer)

    @property
    def all_survive(self) -> bool:
        """Whether nothing is under way, and nothing that ran ahead is left to be acknowledged.

        On any thread: what is not acknowledged is in one of these at every moment of a turn, and looked for in the
        order in which it moves from one to the next.
        """
        steps = list(self.open.values())
        return not self.calls and not any(state.calls or state.ran_ahead or state.unstored for state in steps)

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

        def make(incarnation: int) -> wire.Snapshot:
            nonlocal sent_to
            sent_to = incarnation
            return wire.Snapshot(slot, incarnation, step, self.trainer, payload, header)

        def on_answer(answer: wire.Stored) -> None:
            state.since[slot] = sent_to
            for other, incarnation in enumerate(answer.incarnations):
                state.least[other] = max(incarnation, state.least.get(other, 0))
            again = [h for h, since in state.since.items() if since < state.least[h]]
            for holder in again:
                # The one that answers knows a later life of that holder, which has copied what there was before.
                del state.since[holder]
                self._send_snapshot(step, state, holder)
            if slot not in again:
                unstored.discard(slot)
            self._advance()

        self.ask(slot, make, on_answer)

    def _advance(self) -> None:
        """Moves `complete` over the steps of which nothing is open, and lets go of what they kept."""
        while (state := self.open.get(self.complete + 1)) is not None:
            if state.calls or state.ran_ahead or state.unstored or state.unstored is None:
                break
            self.complete += 1
            del self.open[self.complete]
            if state.snapshot is not None or self.snapshot_every == 0 or not self.is_trained(self.complete):
                self.resumable = self.complete
        self.on_change()
