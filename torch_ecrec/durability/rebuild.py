"""Repair of a lost slot on its new host: on first touch, and the rest in the background.

A `_Repair` is one attempt for records whose stripes share a base: ask the parities that will be read what they stand
for, read k members as of one version vector, decode what is still missing into place, roll it forward by the own logs
(`layout/repair.py` has the rules). An attempt that is refused (a log no longer reaches back, a member is not rebuilt
itself) is planned anew after a pause; installing is idempotent.

The background goes through the slot in portions, some of them at once. Every byte that is read counts against the
limit, also for records that a request waits for; but only the background waits for the limit (`throttle.py`).

Nobody waits for a lock and nothing is frozen: members undo newer steps for the reader.

Shape legend: U records, M of them that changed, B record bytes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from torch_ecrec.durability.context import HostContext, SlotContext
from torch_ecrec.durability.folding import Folds
from torch_ecrec.durability.holdings import Change
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.durability.throttle import Throttle
from torch_ecrec.layout import repair
from torch_ecrec.layout.stripes import StripeGroup
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import A
from torch_ecrec.spec.settings import Settings

RETRY_S = 0.02  # pause before the first new attempt; later ones wait for longer
RETRY_MOST_S = 0.5
PORTIONS_AT_ONCE = 3  # so that a new host and those it reads from work at the same time


class Rebuild:
    """The repair of what is missing of a slot.

    Args:
        slot: which; `slot.held.missing` says what is missing.
        host: the process that hosts it.
        scrubber: of the slot, as `folds`.
        settings: chunk size and limit of the background rebuild.
    """

    def __init__(
        self, slot: SlotContext, host: HostContext, scrubber: Scrubber, folds: Folds, settings: Settings
    ) -> None:
        self.slot, self.host, self.scrubber, self.folds, self.settings = slot, host, scrubber, folds, settings
        self.held, self.missing = slot.held, slot.held.missing
        self.portions: deque[tuple[int, bool, int, int]] = deque()
        self.begin_anew()
        self.throttle = Throttle(settings.rebuild_bytes_per_s, settings.rebuild_chunk_bytes, slot.held.code.k)
        self.portions_under_way = 0
        self.pausing = False
        self.unpaid_bytes = 0  # read, or about to be, since the last pause; negative: paid for, and not read
        # Of each holder, what it had folded when it was asked last: the host's history and the slot's own step then
        self._folded: dict[int, tuple[tuple[int, bool], int, wire.VersionsAre]] = {}

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        """Returns whether any of these data records (per table group) is missing; if so, their repair starts now."""
        if self.missing.remaining == 0:
            return False
        missing = False
        for table_group, positions_U in enumerate(positions):
            missing |= self._wait_for(table_group, False, positions_U)
        return missing

    def _wait_for(self, table_group: int, parity: bool, positions_U: np.ndarray) -> bool:
        """Starts the repair of those of these that are missing, where nobody has; returns whether any is."""
        new = self.missing.wait_for(table_group, parity, positions_U)
        if new is None:
            return False
        for group in self.held.layouts[table_group].group(self.held.index, parity, new):
            _Repair(self, table_group, parity, new[group.where], group)
        return True

    def begin_anew(self) -> None:
        """Has the background go through everything once more when it is started, as more is missing than before."""
        self.portions = deque(self._portions())

    def mend(self, table_group: int, parity: bool, positions: np.ndarray) -> None:
        """Repairs these, which are damaged: from now on they are missing, and their repair starts at once.

        Args:
            table_group: of which table group.
            parity: whether they are parities.
            positions: (U,) int64, ascending.
        """
        self.missing.damage(table_group, parity, positions)
        self._wait_for(table_group, parity, positions)

    # repair -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the background rebuild, as the slot is ready."""
        self._next_portions()

    def _portions(self) -> Iterator[tuple[int, bool, int, int]]:
        """Yields everything in runs of positions that share a rank, so a base."""
        chunk = self.settings.rebuild_chunk_bytes
        for table_group, parity in self.missing.kinds:
            layout, width = self.held.layouts[table_group], self.held.shards[table_group].schema.nbytes
            firsts = (layout.parity_first if parity else layout.data_first)[self.held.index].tolist()
            for begin, behind in itertools.pairwise(firsts):
                for first, end in repair.portions(behind - begin, width, chunk):
                    yield table_group, parity, begin + first, begin + end

    def _next_portions(self) -> None:
        """Starts as many portions as may be under way, no faster than the limit allows."""
        limited = self._is_limited()
        at_once = PORTIONS_AT_ONCE if self.throttle.knows or not limited else 1
        while not self.slot.dead and not self.pausing and self.portions_under_way < at_once:
            if not self._start_portion():
                self.slot.check_rebuilt()
                return
            if limited:
                self.pausing = True
                self.host.later(self.throttle.pause_s(self.unpaid_bytes), self._after_pause)
            self.unpaid_bytes = min(0, self.unpaid_bytes)  # what was read while nobody trained costs nothing later

    def _is_limited(self) -> bool:
        return bool(self.throttle.limit) and self.host.load_end is not None  # else nobody trains yet

    def _after_pause(self) -> None:
        self.pausing = False
        self._next_portions()

    def _start_portion(self) -> bool:
        """Starts the repair of the next portion of which something is missing that nobody repairs; false if none is."""
        limited, now_s = self._is_limited(), self.host.now_s()
        while self.portions:
            table_group, parity, first, end = self.portions.popleft()
            positions = self.missing.lost(table_group, parity, first, end)
            if limited:
                most = self.throttle.most_records(self.held.shards[table_group].schema.nbytes, now_s)
                if len(positions) > most:
                    rest = int(positions[most])
                    self.portions.appendleft((table_group, parity, rest, end))
                    positions, end = positions[:most], rest
            if len(positions):
                self.missing.on_repair(table_group, parity, positions)
                (group,) = self.held.layouts[table_group].group(self.held.index, parity, positions)
                self.portions_under_way += 1
                _Repair(self, table_group, parity, positions, group, self._on_portion)
                # while its records are on their way, and with the node's lock released: milliseconds on a busy host
                self.host.emit(partial(self.held.shards[table_group].merge_pages, first, end, parity))
                return True
        return False

    def _on_portion(self) -> None:
        self.portions_under_way -= 1
        self._next_portions()

    def folded_by(self, holder: int) -> wire.VersionsAre | None:
        """Returns what a holder has folded at least, by its answer in this step or the one before; None: it must be
        asked.

        An older answer serves as well, as long as logs reach back so far: who reads is shown the steps that it names.
        """
        history, applied, answer = self._folded.get(holder, (None, 0, None))
        known = history == self.host.history and applied >= self.held.rule.applied - 1
        return answer if known else None

    def on_folded_by(self, holder: int, answer: wire.VersionsAre) -> None:
        """Notes what a holder has said that it has folded."""
        self._folded[holder] = self.host.history, self.held.rule.applied, answer

    def on_read(self, count: int) -> None:
        """Notes that so many bytes are read for a repair; negative: that they are not, after all."""
        self.unpaid_bytes += count

    def on_installed(self, table_group: int, parity: bool, positions: np.ndarray, count: int, awaited: bool) -> None:
        """Notes that none of these is missing any more; `count` of them were, and somebody may have waited for one."""
        mended = self.missing.on_installed(table_group, parity, positions, count)
        if mended:
            self.scrubber.on_mended(mended)
        if awaited or self.missing.remaining == 0:
            self.slot.progress()
        self.slot.check_rebuilt()


class _Repair:
    """The repair of some records of one table group that share a rank; tries until they are installed or the slot is
    gone."""

    def __init__(
        self,
        rebuild: Rebuild,
        table_group: int,
        parity: bool,
        positions: np.ndarray,
        group: StripeGroup,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.rebuild, self.slot, self.host, self.held = rebuild, rebuild.slot, rebuild.host, rebuild.held
        self.table_group, self.parity = table_group, parity
        self.positions, self.group, self.then = positions, group, then
        self.layout = self.held.layouts[table_group]
        self.width = self.held.shards[table_group].schema.nbytes
        self.failures = 0
        self.attempt = 0
        self.gone: dict[int, np.ndarray] = {}  # member -> (U,) of which stripes its host has none, as it said last
        self.gone_before: dict[int, np.ndarray] = {}  # likewise, when they were too many
        self.begin()

    def begin(self) -> None:
        if self.slot.dead:
            return
        self.attempt += 1
        self.begun_s = self.host.now_s()
        host, base = self.host, self.group.base
        self.plan = repair.plan_repair(self.layout, base, self.group.member, self._doubtful())
        self.rebuild.on_read(self.plan.read_bytes(len(self.positions), self.width))
        self.folded: dict[int, wire.VersionsAre] = {}
        self.records: dict[int, wire.Records] = {}
        asked = []
        for holder in self.plan.parities:
            known = self.rebuild.folded_by(holder) if not self.failures else None
            if known is not None:
                self.folded[holder] = known
            else:
                asked.append(holder)
        if not asked:
            self._fetch()
        for holder in asked:
            host.ask_once(holder, partial(wire.Versions, holder), self._unless_over(partial(self._on_versions, holder)))

    def _doubtful(self) -> set[int]:
        """Returns the slots to read from last: those that have said that they lack something of this. Before them come
        those that are not rebuilt yet, of which as many are asked as it takes."""
        layout = self.layout
        slot_of = [int(slot) for slot in layout.member_slot[self.group.base]]
        others = [member for member in range(layout.n) if member != self.group.member and member not in self.gone]
        unhealthy = set(self.host.unhealthy_slots())
        unsure = [slot_of[member] for member in others if slot_of[member] in unhealthy]
        asked = max(0, layout.k - (len(others) - len(unsure)))
        return {*unsure[asked:], *(slot_of[member] for member in self.gone)}

    def _unless_over(self, then: Callable[[A], None]) -> Callable[[A | None], None]:
        """Wraps what handles an answer: it counts only for the attempt that asked for it; a refusal ends the
        attempt."""
        attempt, history = self.attempt, self.host.history

        def done(answer: A | None) -> None:
            is_late = attempt != self.attempt or history != self.host.history
            if is_late and isinstance(answer, wire.Records):
                self.rebuild.on_read(answer.records.numel())  # for nothing, and read all the same
            if attempt != self.attempt or self.slot.dead:
                return
            if answer is None or is_late:
                self._again()
            else:
                then(answer)

        return done

    def _on_versions(self, holder: int, answer: wire.VersionsAre) -> None:
        self.folded[holder] = answer
        self.rebuild.on_folded_by(holder, answer)
        if len(self.folded) == len(self.plan.parities):
            self._fetch()

    def _on_records(self, member: int, answer: wire.Records | wire.Damaged) -> None:
        if isinstance(answer, wire.Damaged):
            self._on_gone(member, answer)
            return
        self.gone.pop(member, None)
        self.gone_before.pop(member, None)
        self.records[member] = answer
        if len(self.records) == len(self.plan.reads):
            count = sum(answer.records.numel() for answer in self.records.values())
            self.rebuild.throttle.arrive(self.asked, count, self.host.now_s())
            self._install()

    def _on_gone(self, member: int, answer: wire.Damaged) -> None:
        """Handles a member that is not there, of some stripes. With others that are not, it may be more than the code
        repairs.

        Its host may have said so a while before others did. So they are too many once all have said it again.
        """
        exists = np.flatnonzero(self.layout.exists(self.group.base, member, self.group.rotations))
        self.gone[member] = np.isin(np.arange(len(self.positions)), exists[answer.places.numpy()])
        beyond = self._too_many(self.gone)
        if not beyond.any():
            self._again()
        elif not (beyond := beyond & self._too_many(self.gone_before)).any():
            self.gone, self.gone_before = {}, self.gone
            self._again()
        else:
            self.attempt += 1
            self.rebuild.scrubber.on_beyond(self.table_group, self.parity, self.positions[beyond])

    def _too_many(self, gone: dict[int, np.ndarray]) -> np.ndarray:
        """Returns (U,) bool, which stripes lack more members than the code repairs: these and the one to repair."""
        still = self.held.missing.are(self.table_group, self.parity, self.positions)
        counts = np.sum([np.zeros(len(self.positions), np.int64), *gone.values()], axis=0)
        too_many: np.ndarray = still & (counts + 1 > self.layout.n - self.layout.k)
        return too_many

    def _again(self) -> None:
        """Tries the repair again a little later, since what it read did not fit together or was not there."""
        read = sum(answer.records.numel() for answer in self.records.values())
        self.rebuild.on_read(read - self.plan.read_bytes(len(self.positions), self.width))
        self.attempt += 1
        self.failures += 1
        if len(self.positions) > 1 and self.host.now_s() - self.begun_s >= self.rebuild.settings.call_timeout_s:
            half = len(self.positions) // 2  # as much as this may never arrive in time, over a slow link
            self._repair(slice(half), lambda: self._repair(slice(half, None), self.then))
        else:
            self.host.later(min(RETRY_S * self.failures, RETRY_MOST_S), self.begin)

    def _repair(self, part: slice, then: Callable[[], None] | None) -> None:
        """Has others repair some of it."""
        positions = self.positions[part]
        (group,) = self.layout.group(self.held.index, self.parity, positions)
        _Repair(self.rebuild, self.table_group, self.parity, positions, group, then)

    def _fetch(self) -> None:
        known = [answer.folded for answer in self.folded.values()]
        if self.parity:
            known.append(dict(self.held.rule.folded))
        vector = repair.version_vector(self.plan, known)
        if vector is None:
            self._again()
            return
        self.vector = vector
        count = self.plan.read_bytes(len(self.positions), self.width)
        self.asked = None if self.then is None else self.rebuild.throttle.ask(count, self.host.now_s())
        base, rotations = self.group.base, self.group.rotations
        for member in self.plan.reads:
            holder = int(self.layout.member_slot[base, member])
            exists = self.layout.exists(base, member, rotations)
            positions = self.layout.position(base, member, rotations)[exists]
            done = self._unless_over(partial(self._on_records, member))
            if len(positions):
                parity, at = member >= self.layout.k, torch.from_numpy(positions)
                make = partial(self._fetch_of, holder, parity=parity, positions=at)
                self.host.ask_once(holder, make, done)
            else:
                done(wire.Records(torch.empty((0, self.width), dtype=torch.uint8, device="cpu")))

    def _fetch_of(self, holder: int, incarnation: int, parity: bool, positions: torch.Tensor) -> wire.Fetch:
        return wire.Fetch(holder, incarnation, self.table_group, parity, positions, self.vector, self.then is None)

    def _install(self) -> None:
        changes = self._roll_forward()
        if changes is None:
            self._again()
            return
        self.attempt += 1  # nothing that still arrives counts
        held, positions, missing = self.held, self.positions, self.held.missing
        shard, kind = held.shards[self.table_group], (self.table_group, self.parity)
        # of those that are not missing any more, what is there already stands for the newest step
        moved = [np.where(missing.are(*kind, positions[rows_M]), positions[rows_M], -1) for rows_M, _, _ in changes]
        awaited = missing.is_awaited(*kind, positions)
        reads, values = self.plan.reads, [self._values(member) for member in self.plan.reads]
        count = shard.install_(held.code, positions, missing.of(*kind), reads, values, self.group.member, self.parity)
        for rows_M, (_, deltas_MB, coefficients_M) in zip(moved, changes, strict=True):
            shard.fold_(held.code, rows_M, deltas_MB, coefficients_M, self.parity)
        self.rebuild.on_installed(*kind, positions, count, awaited)
        if self.then is not None:
            self.then()

    def _values(self, member: int) -> np.ndarray:
        """Returns (U, B) a member of every stripe, zeros where the last stripe lacks it."""
        records_UB = self.records[member].records.numpy()
        if len(records_UB) < len(self.positions):
            exists = self.layout.exists(self.group.base, member, self.group.rotations)
            present_UB, records_UB = records_UB, np.zeros((len(exists), self.width), dtype=np.uint8)
            records_UB[exists] = present_UB
        return records_UB

    def _roll_forward(self) -> list[Change] | None:
        """Returns what leads from the steps it was read as of to where this slot stands, by its own logs; None if they
        do not reach."""
        if self.parity:
            return self.rebuild.folds.parity_changes(self.table_group, self.group, self.vector)
        # only steps up to the cut can have changed a record that is still missing
        return self.held.data_changes(self.table_group, self.positions, self.vector[self.held.index])
