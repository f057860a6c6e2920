"""Runs in which more is lost than parity repairs, with `--beyond partial`, and an oracle of what must come of them.

The oracle replays every push on whole tables, step by step, with the optimizers alone: no slots, no parities. A slot's
records are those of the checkpoint that it began anew with last, and every step since then; else the initial values and
every step. Pushes that trainers made again, after they were lost, count as they were last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from dependent_steps import begin, train
from harness.membership import VirtualConnection
from harness.network import Fault
from harness.scenario import small_tables
from virtual_trainers import Kill, Told, Trainers, TurnsSession

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol.messages import PartialRestore
from torch_ecrec.records import merge
from torch_ecrec.records.shard import Shard
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Settings

STEPS, TRAINERS = 12, 2
JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), TRAINERS, 7)
OVER_S = 1.0  # virtual, after which nothing more comes of a run
WINDOW = Settings().window_steps
PORTION = 1 / 6  # of the rows that prioritised saves have; so they are due every 2 steps, and checkpoints every 12


def script(rank: int, session: TurnsSession) -> None:
    """Its gradients, and its dense number, depend on all that it has looked up."""

    def seen(step: int, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        session.cluster.read[step, rank] = [*zip(rows, [w.clone() for w in weights], strict=True)]  # type: ignore[attr-defined]

    dense, first = begin(rank, session, torch.zeros(1, dtype=torch.float64))
    session.loaded()
    steps = range(first, session.cluster.steps + 1)  # type: ignore[attr-defined]
    train(rank, session, dense, steps, touched=0.4, seen=seen)


class LatestTold(Told):
    """What is told again counts as it was told last: slots that began anew may hold something else by then."""

    def push(self, key: tuple[int, int], told: Any) -> None:
        self.again += key in self.pushes
        self.pushes[key] = told


class Partial(Trainers):
    """Trainers of a cluster with `--beyond partial`."""

    def __init__(
        self,
        most: float = 1.0,
        at_control: dict[int, Kill] | None = None,
        dropped: int = -1,
        saver: str = "everything",
        saves: bool = True,
        **more: Any,
    ) -> None:
        self.most = most
        self.at_control = dict(at_control or {})  # message of the control channel -> who is lost then
        self.marks: dict[str, tuple[int, int]] = {}  # when things were, in messages: data, control
        self.saving: dict[str, set[int]] = {"data": set(), "control": set(), "writes": set()}  # of prioritised saves
        again: dict[str, Any] = {"policy": "consecutive", "again_s": (0.01,), "most_lost_samples": most}
        self.steps, every = (STEPS, 3) if saver == "everything" else (2 * STEPS, 12)
        if saver != "everything":
            again |= {"saver": saver if saves else "everything", "portion": PORTION}
        settings = CheckpointSettings("memory://shelf", every_steps=every, beyond="partial", **again)
        self.read: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        super().__init__(JOB, script, checkpoint=settings, reborn=True, **more)
        self.told = LatestTold()
        self.network.faults = [Fault("drop", dropped)]  # a request, by its number; -1: none
        self.at_write: dict[int, Kill] = {}  # write -> who is lost then
        self.then: Kill | None = None  # who is lost so many messages after the first one
        self.missed: list[Kill] = []  # who was not
        self._over_s = 0.0  # since when nothing is under way
        self.shelf.on_write = self._on_write
        self.tick_often()

    def _on_write(self, number: int, what: str) -> None:
        if number in self.at_write:
            self.kills_to_come.insert(0, self.at_write.pop(number))

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        if number in self.at_control:
            self.kills_to_come.insert(0, self.at_control.pop(number))

    def _kill(self, kill: Kill) -> bool:
        """`beyond`: the hosts of the first slots (if negative, the last), together, once a checkpoint counts; `saved`:
        so, once a prioritised save on it counts, before which nobody goes back; `any`: of one, come what may."""
        if kill.who not in ("beyond", "any", "saved"):
            return super()._kill(kill)
        if not self.plane.lives or not self.coordinator.slots:
            return False
        if kill.who == "saved" and not self._is_saved():
            return False
        if kill.who != "any":
            slots = self.coordinator.slots
            some = slots[: kill.which] if kill.which > 0 else slots[kill.which :]
            servers = {place.server for place in some}
            if not self.shelf.counts or len(servers - self.network.dead) < len(some) or not self.whole():
                return False
        else:
            servers = {self.coordinator.slots[kill.which].server}
        for server in servers - self.network.dead - {""}:
            self.network.kill(server)
        if kill.who != "any":
            self.marks["lost"] = self.now
        return True

    def _done(self) -> bool:
        """`beyond` and `saved` that no checkpoint, or save, has come for until all is over never come to pass."""
        done = super()._done()
        waits = all(kill.who in ("beyond", "saved") for kill in self.kills_to_come)
        if done or not waits or self.finished < self.scenario.trainers or self.ending or not self._is_idle():
            self._over_s = self.network.clock.now_s
        elif self.network.clock.now_s > self._over_s + OVER_S:
            self.missed, self.kills_to_come = self.kills_to_come, []
        return done

    def _is_idle(self) -> bool:
        """Nothing is under way, checkpoints included."""
        writing = not self.plane.lives or self.coordinator._state.checkpointing._running is not None
        return not writing and self.all_settled()

    def _is_saved(self) -> bool:
        """A save is on the newest checkpoint, and all logs begin after it."""
        known, slots = self.coordinator._state.saving.known, self.slots()
        if not known.since or not slots:
            return False
        step = self.shelf.find(known.since[0][0]).step
        return all(slot.ready and slot.log.floor >= step for slot in slots)

    def _idle(self) -> bool:
        if "lost" in self.marks and "whole" not in self.marks and self.events_of("recovered_partly") and self.whole():
            self.marks["whole"] = self.now
        if self.then is not None and self.fired:
            self.kills_to_come.append(dataclasses.replace(self.then, at=self.then.at + self.now[0]))
            self.then = None
        running = self.coordinator._state.checkpointing._running if self.plane.lives else None
        if running is not None and running.save:
            for kind, number in zip(self.saving, (*self.now, self.shelf.writes), strict=True):
                self.saving[kind].add(number)
        return super()._idle()

    @property
    def now(self) -> tuple[int, int]:
        """How many messages were sent: of the data plane, of the control channel."""
        return len(self.network.sent), self.plane.sent

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run.events if event["event"] == kind]


def replay(records: list[np.ndarray], pushes: dict[tuple[int, int], Any], after: int, through: int) -> list[np.ndarray]:
    """Whole tables, (R, B) uint8 of each table group, after some steps more."""
    shards = []
    for table_group, records_RB in zip(JOB.table_groups, records, strict=True):
        shard = Shard(table_group.schema, table_group.rows, 0)
        shard.scatter_(np.arange(table_group.rows), records_RB)
        shards.append(shard)
    for step in range(after + 1, through + 1):
        for s, (table_group, shard) in enumerate(zip(JOB.table_groups, shards, strict=True)):
            parts = []
            for trainer in range(TRAINERS):
                rows, gradients, _ = pushes[step, trainer]
                order = rows[s].argsort()
                parts.append((rows[s][order].numpy(), gradients[s][order].numpy()))
            spec = table_group.optimizer
            shard.apply_(spec.optimizer, merge.merge(parts), 0.1, step, dict(spec.fixed))
    return [
        shard.gather(np.arange(table_group.rows)) for table_group, shard in zip(JOB.table_groups, shards, strict=True)
    ]


@functools.cache
def initial() -> tuple[np.ndarray, ...]:
    """Of each table group (R, B) uint8."""
    return tuple(table_group.initial(JOB.seed).of(np.arange(table_group.rows)) for table_group in JOB.table_groups)


class Oracle:
    """What the tables of a run must hold, worked out from its pushes and from which slots began anew with what."""

    def __init__(self, run: Partial) -> None:
        self.run, self.pushes = run, run.told.pushes
        self.layouts = dataclasses.replace(JOB, code=run.scenario.code).layouts
        self.partial_restores = run.coordinator._state.partial.partial_restores

    def saves(self, slot: int, life: int) -> list[str]:
        """Prioritised saves that a life of a slot has begun with, oldest first."""
        return self.run.shelf.begun.get((slot, life), [])

    def began(self, slot: int, through: int) -> tuple[int, list[np.ndarray]]:
        """Since which step a slot has had every one, and the tables then; as it was after step `through`."""
        lives = [(one.folder, s, life, at) for one in self.partial_restores for s, life, at in one.lives]
        last = [
            (folder, at, self.saves(slot, life))
            for folder, s, life, at in lives
            if s == slot and life and at and at <= through
        ]
        restored, shelf = self.run.coordinator.restored, self.run.shelf
        if restored is not None:
            last.insert(0, (restored.folder, restored.done, []))
        if not last:
            return 0, list(initial())
        folder, at, saves = last[-1]
        if folder in shelf.others:
            return at, [records.numpy() for records in shelf.others[folder]]
        return at, [records.numpy() for records in shelf.records(JOB, shelf.find(folder), saves)]

    def tables(self, through: int, then: int) -> list[np.ndarray]:
        """(R, B) uint8 of each table group after a step; rows of slots that began later, up to `then`, are as they
        began."""
        found = [records_RB.copy() for records_RB in initial()]
        for slot in range(self.run.scenario.code.slots):
            at, records = self.began(slot, then)
            after = replay(records, self.pushes, at, through)
            for table_group, layout in enumerate(self.layouts):
                mine = layout.row_at(slot, np.arange(layout.rows_on(slot)))
                found[table_group][mine] = after[table_group][mine]
        return found

    def lost_samples(self, done: int) -> float:
        """CPR's portion: each slot that began anew lacks the steps between its checkpoint and where it went on."""
        lacks = 0
        for slot in range(self.run.scenario.code.slots):
            missing: set[int] = set()
            history: list[tuple[int, set[int]]] = [(0, set())]
            for one in self.partial_restores:
                for s, _, at in one.lives:
                    if s == slot and at is not None:
                        before = [then for since, then in history if since <= one.done][-1]
                        missing = before | set(range(one.done + 1, at + 1))
                        history.append((at, missing))
            lacks += len(missing)
        return lacks / (self.run.scenario.code.slots * done)


def check(run: Partial) -> None:
    """After a run: records, lookups and the portion of lost samples are what the oracle says (`go` checks parities)."""
    oracle = Oracle(run)
    for table_group, right_RB in enumerate(oracle.tables(run.steps, run.steps)):
        mine_RB = run.run.records[table_group].numpy().view(np.uint8)
        wrong = np.flatnonzero((mine_RB != right_RB).any(axis=1))
        slots = oracle.layouts[table_group].locate(wrong)[0]
        assert not len(wrong), (
            f"table group {table_group}: rows {wrong} of slots {slots} differ; {oracle.partial_restores}"
        )
    _check_reads(run, oracle)
    _check_begun(run, oracle)
    if run.lives == 1:
        _check_checkpoints(run, oracle)
    status = run.coordinator.status(run.network.clock.now_s).partial
    if oracle.partial_restores:
        went_on = max(at or 0 for one in oracle.partial_restores for _, _, at in one.lives)
        assert went_on <= status.of_steps <= run.steps
        assert abs(status.lost_samples - oracle.lost_samples(status.of_steps)) < 1e-6
        assert status.exact is False
    _check_told(run, oracle)


def _check_told(run: Partial, oracle: Oracle) -> None:
    """Whatever slots have gone on with a checkpoint was announced, and was no more than may be lost."""
    told = run.events_of("recovered_partly")
    assert all(event["lost_samples"] <= run.most and event["reason"] for event in told), told
    for one in oracle.partial_restores:
        for slot, _, at in one.lives:
            event = [event for event in told if event["name"] == one.folder and slot in event["slots"]]
            assert at is None or event, f"slot {slot} of {one} has gone on, and no event says so: {told}"


def _check_begun(run: Partial, oracle: Oracle) -> None:
    """Which saves a slot has begun with: the oldest of those on its checkpoint, none of a step after it went on."""
    for one in oracle.partial_restores:
        on = [save for save in run.shelf.saves if save.base == one.folder]
        for slot, life, at in one.lives:
            used = oracle.saves(slot, life) if life else []
            assert used == [name for name, _ in one.saves][: len(used)]
            assert all(run.shelf.find(name) in on and run.shelf.find(name).done <= (at or 0) for name in used)


def _went_on(partial_restore: PartialRestore) -> int:
    """Steps of training after which slots went on by it; 0: none did."""
    return max(at or 0 for _, _, at in partial_restore.lives)


def _check_checkpoints(run: Partial, oracle: Oracle) -> None:
    """Each holds what the slots held: before some began anew, and after it. So does each save, of the rows it has."""
    going = {step for one in oracle.partial_restores for _, _, at in one.lives if at for step in range(at - WINDOW, at)}
    for finished in run.shelf.counts:
        if finished.done not in going:  # of these, a checkpoint may be of before or of after
            before = [one for one in oracle.partial_restores if one.done < finished.done]
            began = [one.folder for one in before if 0 < _went_on(one) <= finished.done]
            assert len(finished.inexact) == len(began), (finished, began)
            for (step, what), folder in zip(finished.inexact, began, strict=True):
                assert folder in what and step <= finished.done
            right = oracle.tables(finished.done, finished.done)
            for table_group, mine_RB in enumerate(run.shelf.records(JOB, finished)):
                assert np.array_equal(mine_RB.numpy(), right[table_group]), (
                    f"{finished.folder}, table group {table_group}"
                )
    for save in run.shelf.saves:
        if save.done not in going:
            right = oracle.tables(save.done, save.done)
            for slot in save.parts:
                for portion in run.shelf.parts[save.folder, slot].portions:
                    assert np.array_equal(portion.records_NB, right[portion.table_group][portion.rows_N]), (
                        f"{save}, {slot}"
                    )


def _check_reads(run: Partial, oracle: Oracle) -> None:
    """Every trainer has read one state: of each row the oracle's, but for what was under way when slots were lost."""
    began = [oracle.began(slot, run.steps)[0] for slot in range(run.scenario.code.slots)]
    for step in range(1 + (0 if run._begins is None else run._begins.done), run.steps + 1):
        tables = oracle.tables(step - 1, run.steps)
        for trainer in range(TRAINERS):
            for table_group, (rows, weights) in enumerate(run.read[step, trainer]):
                right = tables[table_group].view(np.float32)[rows.numpy(), : weights.shape[1]]
                slots = oracle.layouts[table_group].locate(rows.numpy())[0]
                known = np.array([began[slot] == 0 or step > began[slot] + WINDOW + 1 for slot in slots], bool)
                same = (right.view(np.int32) == weights.numpy().view(np.int32)).all(axis=1)
                assert same[known].all(), (
                    f"(step, trainer) {step, trainer}: table group {table_group}, rows {rows[~same & known]}"
                )
