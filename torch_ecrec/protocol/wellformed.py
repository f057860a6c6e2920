"""Whether a message can be one of this job: looked at before it changes anything.

`encoding.py` has seen to the types. Here is what only those can judge who know the job: that a table group, a slot or a
trainer exists, that positions are some of the slot's, that tensors have as many rows as they belong together, that a
step is one that somebody could be at. Example: slot 2 has 40 records of table group 0; a lookup of its position 40
would make the slot's handler raise, and with that end the server. It is refused instead, with "position 40 of table
group 0: slot 2 has 40 records".

Both sides look: a host at requests (`fault_of_request`), whoever asks at answers (`fault_of_answer`). Both are pure.
Fields are judged by their names, so that a message which gets a `trainer` is judged by that at once.

Does not know state but for how far a slot is: whether a message is too late, stale or repeated, the protocol says. Nor
does it notice lies: another value that could be true is believed.

Shape legend: U records, D embedding dim, B record bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.layout.stripes import Layout, SharedRun
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.wire import Answer, Refused, Request
from torch_ecrec.records.positions import check_bags, require_ascending
from torch_ecrec.records.quantised import MORE_BYTES
from torch_ecrec.runtime.kernels import first_outside
from torch_ecrec.spec.job import JobSpec

STEPS_AHEAD = 1024  # of a slot that is ready: trainers are ahead by a window, which is 2 unless somebody says otherwise
ASKS_MOST = 1024  # lookups with a push: one of each sharded module of a model
LIVES_AHEAD = 64  # of the placement that is known: it may be some losses old

STEPS = ("step", "floor", "base", "cut", "acknowledged", "resumable", "folded")
# A field that names another slot, and the one that has its incarnation
OTHERS = {"source": "source_incarnation", "lost": "lost_incarnation", "holder": "holder_incarnation"}

Lives = Callable[[int], int]  # slot -> its incarnation


class Fault(ValueError):
    """Why a message is not one of this job."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Fault(message)


class MessageValidator:
    """Judges the messages of one job: whether their values can be.

    Args:
        job: what is trained.
        layouts: of its table groups.
        begins: steps of training that were done when the cluster began.
    """

    def __init__(self, job: JobSpec, layouts: Sequence[Layout], begins: int = 0) -> None:
        self.job, self.layouts, self.begins = job, tuple(layouts), begins
        self._parts: dict[
            tuple[int, int], list[tuple[int, SharedRun]]
        ] = {}  # (source, holder) -> those of a fold; only grows

    def fault_of_request(self, request: Request[Any], applied: int | None, lives: Lives) -> str | None:
        """Returns why a request cannot be answered by anybody, or None.

        Args:
            request: its slot is one of the job's.
            applied: the last step that the slot has applied; None while it does not know.
            lives: the incarnation of a slot, as it is known.
        """
        try:
            self._check_fields(request, applied, lives)
            particular = _REQUESTS.get(type(request))
            if particular is not None:
                particular(self, request)
        except Fault as fault:
            return str(fault)
        return None

    def fault_of_answer(self, request: Request[Any], answer: Answer, lives: Lives) -> str | None:
        """Returns why an answer cannot be one to this request, or None. `lives` as for requests."""
        if isinstance(answer, Refused):
            return None
        try:
            if not isinstance(answer, WIRE.answers_to[type(request)]):
                raise Fault(f"{type(answer).__name__} is no answer to a {type(request).__name__}")
            for name in _steps_of(type(answer)):
                step = getattr(answer, name)
                if isinstance(step, int) and step < 0:
                    raise Fault(f"`{name}` must not be negative, got {step}")
            particular = _ANSWERS.get(type(answer))
            if particular is not None:
                particular(self, request, answer, lives)
        except Fault as fault:
            return str(fault)
        return None

    # fields that mean the same in every request -----------------------------------------------------

    def _check_fields(self, request: Request[Any], applied: int | None, lives: Lives) -> None:
        slots = self.job.code.slots
        numbers, others, steps = _fields_of(type(request))
        for name in numbers:
            value, limit = (
                getattr(request, name),
                self.job.trainers if name == "trainer" else len(self.job.table_groups),
            )
            if not 0 <= value < limit:
                raise Fault(f"`{name}` must be in 0..{limit - 1}, got {value}")
        for name in others:
            other, life = getattr(request, name), OTHERS[name]
            if name == "holder" and other == -1:
                continue  # a trainer asks
            if not 0 <= other < slots or other == request.slot:
                raise Fault(f"`{name}` must be another slot, got {other}")
            most, incarnation = lives(other) + LIVES_AHEAD, getattr(request, life)
            if not 0 <= incarnation <= most:
                raise Fault(f"`{life}` must be in 0..{most}, got {incarnation}")
        for name in steps:
            step = getattr(request, name)
            if step < 0:
                raise Fault(f"`{name}` must not be negative, got {step}")
            if applied is not None and step > applied + STEPS_AHEAD:
                most = applied + STEPS_AHEAD
                raise Fault(f"`{name}` must be at most {most}, got {step}: the slot is at step {applied}")
        if isinstance(request, wire.Part):
            check(request.resumable < request.step, f"`resumable` must be before step {request.step}")

    # requests ---------------------------------------------------------------------------------------

    def _check_lookup(self, request: wire.Lookup) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")
        check(not (request.bfloat16 and request.int8), "`bfloat16` and `int8` must not both be asked for")
        self._check_count("positions", request.positions)
        check(not (request.int8 and request.bags), "`int8` must not be asked for with `bags`")
        self._check_asked(request.slot, request)

    def _check_push(self, request: wire.Push) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")
        self._check_count("positions", request.positions)
        self._check_count("gradients", request.gradients)
        self._check_count("rates", request.rates)
        first, last = self.begins + 1, self.begins + request.step
        good = first <= request.iteration <= last
        check(good, f"`iteration` must be in {first}..{last}, got {request.iteration}")
        for table_group, (positions_U, gradients_UD) in enumerate(
            zip(request.positions, request.gradients, strict=True)
        ):
            self._check_ascending(
                positions_U, 0, self.layouts[table_group].data_rows(request.slot), f"table group {table_group}"
            )
            _check_shape(
                "gradients", table_group, gradients_UD, (len(positions_U), self.job.table_groups[table_group].dim)
            )
        self._check_bags(request.slot, request.bags)
        wanted = len(request.bags)
        check(
            len(request.bag_gradients) == wanted, f"`bag_gradients` must be {wanted}, got {len(request.bag_gradients)}"
        )
        for table_group, (bags, gradients_GD) in enumerate(zip(request.bags, request.bag_gradients, strict=True)):
            _check_shape(
                "bag_gradients", table_group, gradients_GD, (len(bags.lengths), self.job.table_groups[table_group].dim)
            )
        check(len(request.then) <= ASKS_MOST, f"`then` must be at most {ASKS_MOST} lookups, got {len(request.then)}")
        for ask in request.then:
            self._check_count("positions", ask.positions)
            self._check_asked(request.slot, ask)

    def _check_load(self, request: wire.Load) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")
        rows = self.layouts[request.table_group].data_rows(request.slot)
        self._check_ascending(request.positions, 0, rows, f"table group {request.table_group}")
        check(not request.alone or request.trainer == 0, f"`trainer` must be 0 if `alone`, got {request.trainer}")
        first, records, (many, nbytes) = (
            request.first_byte,
            request.records,
            self._records(request.table_group, request.positions),
        )
        if records is None:
            check(first == 0, f"`first_byte` must be 0 without `records`, got {first}")
            return
        width = records.shape[1]
        check(
            first >= 0 and 1 <= width <= nbytes - first,
            f"`records` must be bytes of {nbytes}, got {width} from {first}",
        )
        _check_shape("records", request.table_group, records, (many, width))

    def _check_announce(self, request: wire.Announce) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")
        self._check_count("positions", request.positions)
        for table_group, positions_N in enumerate(request.positions):
            self._check_inside(table_group, request.slot, positions_N)

    def _check_when(self, request: wire.WhenAcknowledged) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")

    def _check_no_update(self, request: wire.NoUpdate) -> None:
        check(request.step >= 1, f"`step` must be at least 1, got {request.step}")

    def _check_snapshot(self, request: wire.Snapshot) -> None:
        first, last = self.begins + 1, self.begins + request.step
        good = bool(request.header) and first <= request.header[0] <= last
        check(good, f"`header` must begin with steps of training, {first} to {last}, got {request.header[:1]}")

    def _check_export(self, request: wire.Export) -> None:
        self._check_inside(request.table_group, request.slot, request.positions, request.parity)

    def _check_fold(self, request: wire.Fold) -> None:
        if request.step < 1:  # of each step there are many: a message is made for a fault only
            raise Fault(f"`step` must be at least 1, got {request.step}")
        if request.floor >= request.step:
            raise Fault(f"`floor` must be before step {request.step}, got {request.floor}")
        self._check_parts(request.source, request.slot, request.positions, request.deltas)

    def _check_fetch(self, request: wire.Fetch) -> None:
        table_group, layout = request.table_group, self.layouts[request.table_group]
        self._check_inside(table_group, request.slot, request.positions, request.parity)
        sources: Iterable[int] = [request.slot]
        if request.parity:
            groups = layout.group(request.slot, True, request.positions.numpy())
            check(len(groups) == 1, f"`positions` must be parities of one base, got {len(groups)}")
            sources = layout.member_slot[groups[0].base, : layout.k].tolist()
        lacking = [source for source in sources if request.as_of.get(source, -1) < 0]
        check(not lacking, f"`as_of` must have a step of slots {lacking}")

    def _check_fetch_seals(self, request: wire.FetchSeals) -> None:
        self._check_inside(request.table_group, request.slot, request.positions)

    def _check_fetch_changed(self, request: wire.FetchChanged) -> None:
        check(request.turn >= 0, f"`turn` must not be negative, got {request.turn}")

    def _check_copy(self, request: wire.Copy) -> None:
        self._check_inside(request.table_group, request.slot, request.positions, request.parity)

    # answers ----------------------------------------------------------------------------------------

    def _check_rows(self, request: wire.Lookup, answer: wire.Rows, lives: Lives) -> None:
        self._check_looked_up(request, answer, request.int8)

    def _check_looked_up(self, asked: wire.Lookup | wire.Ask, answer: wire.Rows, int8: bool) -> None:
        self._check_count("weights", answer.weights)
        dtype = torch.uint8 if int8 else torch.bfloat16 if asked.bfloat16 else torch.float32
        more = MORE_BYTES if int8 else 0
        for table_group, (positions_U, weights_UD) in enumerate(zip(asked.positions, answer.weights, strict=True)):
            _check_shape(
                "weights", table_group, weights_UD, (len(positions_U), self.job.table_groups[table_group].dim + more)
            )
            check(weights_UD.dtype == dtype, f"`weights[{table_group}]` must be {dtype}, got {weights_UD.dtype}")
        wanted = len(asked.bags)
        check(len(answer.pooled) == wanted, f"`pooled` must be {wanted}, got {len(answer.pooled)}")
        for table_group, (bags, pooled_GD) in enumerate(zip(asked.bags, answer.pooled, strict=True)):
            _check_shape("pooled", table_group, pooled_GD, (len(bags.lengths), self.job.table_groups[table_group].dim))
            check(pooled_GD.dtype == dtype, f"`pooled[{table_group}]` must be {dtype}, got {pooled_GD.dtype}")

    def _check_records(self, request: wire.Export | wire.Fetch | wire.Copy, answer: wire.Records, lives: Lives) -> None:
        _check_shape(
            "records", request.table_group, answer.records, self._records(request.table_group, request.positions)
        )

    def _check_awaited(self, request: wire.WhoIsAwaited, answer: wire.Awaited, lives: Lives) -> None:
        check(answer.step >= 1, f"`step` must be at least 1, got {answer.step}")
        good = all(0 <= trainer < self.job.trainers for trainer in answer.trainers)
        check(good, f"`trainers` must be below {self.job.trainers}, got {answer.trainers}")

    def _check_seals(self, request: wire.FetchSeals, answer: wire.Seals, lives: Lives) -> None:
        wanted = len(request.positions)
        check(len(answer.seals) == wanted, f"`seals` must be {wanted}, got {len(answer.seals)}")

    def _check_damaged(self, request: wire.Fetch | wire.Copy, answer: wire.Damaged, lives: Lives) -> None:
        check(len(answer.places) > 0, "`places` must not be empty")
        self._check_ascending(answer.places, 0, len(request.positions), "places")

    def _check_acknowledged(
        self, request: wire.Part | wire.WhenAcknowledged, answer: wire.Acknowledged, lives: Lives
    ) -> None:
        asked = request.then if isinstance(request, wire.Push) else []
        if not answer.rows:
            check(answer.step == request.step, f"`step` must be {request.step}, got {answer.step}")
            return
        check(answer.step <= request.step, f"`step` must be at most {request.step}, got {answer.step}")
        check(len(answer.rows) == len(asked), f"`rows` must be of {len(asked)} lookups, got {len(answer.rows)}")
        for ask, rows in zip(asked, answer.rows, strict=True):
            self._check_looked_up(ask, rows, int8=False)

    def _check_stored(self, request: wire.Snapshot, answer: wire.Stored, lives: Lives) -> None:
        check(answer.step == request.step, f"`step` must be {request.step}, got {answer.step}")
        slots = self.job.code.slots
        check(len(answer.incarnations) == slots, f"`incarnations` must be {slots}, got {len(answer.incarnations)}")
        for slot, life in enumerate(answer.incarnations):
            most = lives(slot) + LIVES_AHEAD
            check(0 <= life <= most, f"`incarnations[{slot}]` must be in 0..{most}, got {life}")

    def _check_cut_log(self, request: wire.Cut, answer: wire.CutLog, lives: Lives) -> None:
        many, first = len(answer.steps), answer.floor + 1
        check(len(answer.positions) == len(answer.deltas) == many, "`steps`, `positions` and `deltas` must be as many")
        check(answer.steps == list(range(first, first + many)), f"`steps` must begin with {first}, without a gap")
        if answer.caught_up and answer.floor < request.cut:
            check(answer.floor + many >= request.cut, f"`steps` must reach step {request.cut}")
        for positions, deltas in zip(answer.positions, answer.deltas, strict=True):
            self._check_parts(request.lost, request.slot, positions, deltas)

    def _check_versions(self, request: wire.Versions, answer: wire.VersionsAre, lives: Lives) -> None:
        for source, step in answer.folded.items():
            good = 0 <= source < self.job.code.slots and step >= 0
            check(good, f"`folded` must have steps of slots, got {source}: {step}")

    def _check_snapshots(self, request: wire.FetchSnapshots, answer: wire.Snapshots, lives: Lives) -> None:
        many = {len(parts) for parts in (answer.steps, answer.trainers, answer.headers, answer.payloads)}
        check(len(many) == 1, "`steps`, `trainers`, `headers` and `payloads` must be as many")
        for step, trainer in zip(answer.steps, answer.trainers, strict=True):
            good = step >= 0 and 0 <= trainer < self.job.trainers
            check(good, f"there is no snapshot of step {step} of trainer {trainer}")

    def _check_changed(self, request: wire.FetchChanged, answer: wire.Changed, lives: Lives) -> None:
        for parity, name in ((False, "data"), (True, "parities")):
            self._check_moved(name, request.slot, getattr(answer, name), parity)

    def _check_handed(self, request: wire.HandOver, answer: wire.Handed, lives: Lives) -> None:
        slots, layouts = self.job.code.slots, self.layouts
        for parity, name, of in ((False, "data", "data_records"), (True, "parities", "parity_records")):
            self._check_moved(name, request.slot, getattr(answer, name), parity)
            self._check_count(of, getattr(answer, of))
            for table_group, records_UB in enumerate(getattr(answer, of)):
                _check_shape(
                    of, table_group, records_UB, self._records(table_group, getattr(answer, name)[table_group])
                )
        check(len(answer.incarnations) == slots, f"`incarnations` must be {slots}, got {len(answer.incarnations)}")
        sources = layouts[0].sources(request.slot)
        for name in ("folded", "catch_up", "attached"):
            good = set(getattr(answer, name)) <= set(sources) and min(getattr(answer, name).values(), default=0) >= 0
            check(good, f"`{name}` must have steps of slots {list(sources)}")
        good = all(0 <= trainer < self.job.trainers and step >= 0 for trainer, step in answer.resumable.items())
        check(good, "`resumable` must have steps of trainers")
        check(0 <= answer.acknowledged <= answer.applied, f"`acknowledged` must be in 0..{answer.applied}")
        logs, entries = answer.logs, sum(max(0, count) for count in answer.steps)
        check(logs == [request.slot, *sorted(answer.folded)], f"`logs` must be the slot's and its sources', got {logs}")
        check(len(answer.floors) == len(answer.steps) == len(logs), "`floors` and `steps` must be one of each log")
        check(len(answer.positions) == len(answer.deltas) == entries, "`positions` and `deltas` must be as many")
        at = 0
        for log, floor, count in zip(logs, answer.floors, answer.steps, strict=True):
            last = answer.applied if log == request.slot else answer.folded[log]
            check(floor >= 0 and count >= 0 and floor + count == last, f"the log of slot {log} must end at step {last}")
            for positions, deltas in zip(
                answer.positions[at : at + count], answer.deltas[at : at + count], strict=True
            ):
                if log == request.slot:
                    self._check_own_entry(log, positions, deltas)
                else:
                    self._check_parts(log, request.slot, positions, deltas)
            at += count

    # parts of messages ------------------------------------------------------------------------------

    def _records(self, table_group: int, positions_U: Tensor) -> tuple[int, int]:
        return len(positions_U), self.job.table_groups[table_group].schema.nbytes

    def _check_count(self, name: str, values: Sequence[object]) -> None:
        wanted = len(self.job.table_groups)
        check(len(values) == wanted, f"`{name}` must be one of each of {wanted} table groups, got {len(values)}")

    def _check_asked(self, slot: int, asked: wire.Lookup | wire.Ask) -> None:
        for table_group, positions_U in enumerate(asked.positions):
            self._check_inside(table_group, slot, positions_U)
        self._check_bags(slot, asked.bags)

    def _check_bags(self, slot: int, bags: Sequence[wire.Bags]) -> None:
        if not bags:
            return
        self._check_count("bags", bags)
        for table_group, one in enumerate(bags):
            factors_N = None if one.factors is None else one.factors.numpy()
            records = self.layouts[table_group].data_rows(slot)
            try:
                check_bags("", one.positions.numpy(), one.lengths.numpy(), factors_N, records)
            except (ValueError, IndexError) as error:
                raise Fault(f"`bags` of table group {table_group}: {error}") from error

    def _check_inside(self, table_group: int, slot: int, positions_U: Tensor, parity: bool = False) -> None:
        layout = self.layouts[table_group]
        limit = layout.parity_rows(slot) if parity else layout.data_rows(slot)
        outside = first_outside(positions_U.numpy(), 0, limit)
        if outside >= 0:
            kind = "parities" if parity else "records"
            raise Fault(
                f"position {int(positions_U[outside])} of table group {table_group}: slot {slot} has {limit} {kind}"
            )

    def _check_ascending(self, positions_U: Tensor, first: int, end: int, where: str) -> None:
        ascending_U = positions_U.numpy()
        if not len(ascending_U):
            return
        try:
            require_ascending("positions", ascending_U)
        except ValueError as error:
            raise Fault(f"{error} ({where})") from error
        low, high = ascending_U[0], ascending_U[-1]
        if low < first or high >= end:
            raise Fault(f"positions must be in {first}..{end - 1}, got {low}..{high} ({where})")

    def _check_moved(self, name: str, slot: int, positions: Sequence[Tensor], parity: bool) -> None:
        self._check_count(name, positions)
        for table_group, positions_U in enumerate(positions):
            layout = self.layouts[table_group]
            rows = layout.parity_rows(slot) if parity else layout.data_rows(slot)
            self._check_ascending(positions_U, 0, rows, f"`{name}` of table group {table_group}")

    def _check_own_entry(self, slot: int, positions: Sequence[Tensor], deltas: Sequence[Tensor]) -> None:
        self._check_moved("positions", slot, positions, parity=False)
        self._check_count("deltas", deltas)
        for table_group, (positions_U, deltas_UB) in enumerate(zip(positions, deltas, strict=True)):
            _check_shape("deltas", table_group, deltas_UB, self._records(table_group, positions_U))

    def _check_parts(self, source: int, holder: int, positions: Sequence[Tensor], deltas: Sequence[Tensor]) -> None:
        """Checks the changes that one step made in a source, for a holder: one part for each table group and run of the
        pair."""
        parts = self._parts.get((source, holder))
        if parts is None:
            parts = [
                (table_group, run)
                for table_group, layout in enumerate(self.layouts)
                for run in layout.runs(source, holder)
            ]
            self._parts[source, holder] = parts
        if not len(positions) == len(deltas) == len(parts):
            wanted = f"must have {len(parts)} parts"
            raise Fault(f"{wanted}, got {len(positions)} of positions and {len(deltas)} of deltas")
        for (table_group, run), positions_U, deltas_UB in zip(parts, positions, deltas, strict=True):
            self._check_ascending(positions_U, run.first, run.end, f"table group {table_group}")
            _check_shape("deltas", table_group, deltas_UB, self._records(table_group, positions_U))


def _check_shape(name: str, table_group: int, tensor: Tensor, wanted: tuple[int, int]) -> None:
    if tensor.shape != wanted:
        raise Fault(f"`{name}` of table group {table_group} must have shape {wanted}, got {tuple(tensor.shape)}")


@functools.cache
def _steps_of(kind: type[Answer]) -> list[str]:
    """Returns which fields of a class of answers are steps."""
    return [name for name in STEPS if name in kind.__struct_fields__]


@functools.cache
def _fields_of(kind: type[Request[Any]]) -> tuple[list[str], list[str], list[str]]:
    """Returns which fields a class of requests has of those that mean the same in all: numbers, other slots, steps."""

    def of(names: Iterable[str]) -> list[str]:
        return [name for name in names if name in kind.__struct_fields__]

    return of(("trainer", "table_group")), of(OTHERS), of(STEPS)


_REQUESTS: dict[type[Request[Any]], Callable[..., None]] = {
    wire.Lookup: MessageValidator._check_lookup,
    wire.Push: MessageValidator._check_push,
    wire.Announce: MessageValidator._check_announce,
    wire.WhenAcknowledged: MessageValidator._check_when,
    wire.Load: MessageValidator._check_load,
    wire.NoUpdate: MessageValidator._check_no_update,
    wire.Snapshot: MessageValidator._check_snapshot,
    wire.Export: MessageValidator._check_export,
    wire.Fold: MessageValidator._check_fold,
    wire.Fetch: MessageValidator._check_fetch,
    wire.FetchSeals: MessageValidator._check_fetch_seals,
    wire.FetchChanged: MessageValidator._check_fetch_changed,
    wire.Copy: MessageValidator._check_copy,
}
_ANSWERS: dict[type[Answer], Callable[..., None]] = {
    wire.Rows: MessageValidator._check_rows,
    wire.Records: MessageValidator._check_records,
    wire.Damaged: MessageValidator._check_damaged,
    wire.Awaited: MessageValidator._check_awaited,
    wire.Seals: MessageValidator._check_seals,
    wire.Acknowledged: MessageValidator._check_acknowledged,
    wire.Stored: MessageValidator._check_stored,
    wire.CutLog: MessageValidator._check_cut_log,
    wire.VersionsAre: MessageValidator._check_versions,
    wire.Snapshots: MessageValidator._check_snapshots,
    wire.Changed: MessageValidator._check_changed,
    wire.Handed: MessageValidator._check_handed,
}
