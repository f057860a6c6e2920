"""When prioritised saves are due, which count, what the next coordinator knows of them, which a lost slot reads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kept import small_job
from schedules import first_failure

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.regathering import MemberReports
from torch_ecrec.coordinator.saving import Saving
from torch_ecrec.protocol.messages import PartialRestore, Saves
from torch_ecrec.server.slot_restore import SlotRestore

STEPS: dict[str, Any] = {"url": "memory://x", "beyond": "partial", "saver": "mfu", "portion": 0.25}


def test_by_steps_after_the_first_checkpoint_and_so_many_at_most() -> None:
    settings = CheckpointSettings(**STEPS, every_steps=8)
    saving = Saving(settings)
    assert settings.saves_every == 2
    saving.due = 2
    assert not saving.is_due(0.0), "there is nothing that it would be on"
    saving.on_checkpoint("c", 8, 0.0)
    assert saving.due is None and not saving.is_due(0.0), "what was due is in it"
    for done in (10, 12, 14, 18):
        saving.due = done
        assert saving.is_due(0.0)
        saving.on_begun(f"s{done}", done)
        assert saving.on_written(0.0) and not saving.is_due(0.0)
    assert saving.on("c") == [("s10", 10), ("s12", 12), ("s14", 14), ("s18", 18)] and saving.on("b") == []
    saving.due = 20
    assert not saving.is_due(0.0), "no checkpoint comes: what is saved on one is bounded"
    saving.on_checkpoint("d", 24, 0.0)
    assert saving.known == Saves("d", 24), "those on the one before are over"


def test_by_time_and_later_after_one_that_failed() -> None:
    saving = Saving(CheckpointSettings(**STEPS, every_s=80.0, again_s=(30.0, 50.0)))
    saving.on_checkpoint("c", 8, 100.0)
    assert not saving.is_due(119.9) and saving.is_due(120.0)
    saving.on_begun("s", 9)
    saving.on_void("no room", 121.0)
    assert saving.status().failing == "no room" and not saving.is_due(150.9) and saving.is_due(151.0)
    saving.on_void("no room", 151.0)
    assert not saving.is_due(200.9) and saving.is_due(201.0)
    saving.on_begun("t", 12)
    assert saving.on_written(202.0) and saving.status().failing == "" and not saving.is_due(221.9)


def test_none_are_wanted_without_a_saver() -> None:
    saving = Saving(CheckpointSettings("memory://x", every_steps=8, beyond="partial"))
    saving.on_checkpoint("c", 8, 0.0)
    saving.due = 10
    assert not saving.wanted and not saving.is_due(1e9)


def test_steps_that_are_taken_back_are_not_saved() -> None:
    saving = Saving(CheckpointSettings(**STEPS, every_steps=8))
    saving.on_checkpoint("c", 8, 0.0)
    for done in (10, 12):
        saving.on_begun(f"s{done}", done)
        assert saving.on_written(0.0)
    saving.on_begun("s14", 14)
    saving.forget_after(11)
    assert saving.on("c") == [("s10", 10)] and saving.known.newest == 10
    assert not saving.on_written(0.0), "one that was being written neither"
    saving.on_begun("s11", 11)
    saving.forget_after(11)
    assert saving.on_written(0.0) and saving.known.newest == 11, "that step is still there"
    saving.forget_after(7)
    assert saving.known == Saves("c", 8), "where training is before the checkpoint, that is found out elsewhere"


def test_the_next_coordinator_asks_those_who_know_where_all_went_on() -> None:
    before, after = Saves("c", 8, [("s10", 10), ("s12", 12)]), Saves("c", 8, [("s10", 10)])
    newer = Saves("d", 16)

    def known(*said: tuple[int, Saves]) -> Saves:
        heard = [SimpleNamespace(known=SimpleNamespace(era=era, saves=saves)) for era, saves in said]
        return MemberReports(dict(enumerate(heard))).saves  # type: ignore[arg-type]

    assert known((2, after), (1, before)) == after, "who has not heard that all went back knows too many"
    assert known((1, after), (1, before)) == before, "who has missed the last one knows too few"
    assert known((1, before), (1, newer), (1, Saves())) == newer
    assert known() == Saves()


class Reader:
    """Notes what is asked for; gives it when told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.cancelled = 0
        self.finish: Callable[[], None] = lambda: None

    def read(self, partial_restore: PartialRestore, job: Any, slot: int, take: Any, done: Any, failed: Any) -> Any:
        self.asked.append([name for name, _ in partial_restore.saves])

        def finish() -> None:
            take(0, np.arange(3), np.zeros((3, 8), np.uint8))
            done()

        self.finish = finish
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def restoring(partial_restore: PartialRestore, **host: Any) -> tuple[SlotRestore, Any, Any, Reader]:
    reader = Reader()
    shard = SimpleNamespace(data_rows=3, scatter_=lambda at, records: None, schema=SimpleNamespace(nbytes=8))
    held = SimpleNamespace(
        job=small_job(),
        index=1,
        shards=[shard],
        layouts=[SimpleNamespace(rows_on=lambda slot: 3)],
        missing=SimpleNamespace(find=lambda: None),
        new_log=lambda floor: SimpleNamespace(append=lambda *entry: None),
    )
    ready: list[tuple[int, int]] = []
    slot = SimpleNamespace(held=held, ready=False, dead=False)
    slot.begin_anew = lambda cut, floor, log, done: ready.append((cut, floor))
    slot.give_up = lambda reason: None
    told = SimpleNamespace(
        reader=reader, placement=None, **{"frozen": True, "resume_step": 0, "done": 0, "floor": 0, **host}
    )
    return SlotRestore(slot, told, partial_restore), told, ready, reader  # type: ignore[arg-type]


SINCE = [("s10", 10), ("s12", 12), ("s14", 14)]


def test_saves_are_read_once_it_is_known_up_to_where_nobody_goes_back() -> None:
    """Steps of training are those of the protocol less 5 here."""
    one, host, ready, reader = restoring(PartialRestore([(1, 2, None)], "memory://x", "c", 8, saves=SINCE))
    one.begin()
    one.proceed()
    assert reader.asked == [], "it is not known where all go on"
    host.frozen, host.resume_step, host.done, host.floor = False, 21, 16, 18
    one.proceed()
    assert reader.asked == [["s10", "s12"]], "the floor is after step 13 of training"
    one.proceed()
    assert len(reader.asked) == 1 and not ready
    host.frozen = True  # trainers are lost, too, and all go back
    reader.finish()
    assert not ready
    host.frozen, host.resume_step, host.done, host.floor = False, 16, 11, 16
    one.proceed()
    assert reader.asked[1:] == [["s10"]] and reader.cancelled == 1 and not ready, "what was read is of later steps"
    reader.finish()
    assert ready == [(16, 16)]


def test_without_saves_it_reads_at_once() -> None:
    one, host, ready, reader = restoring(PartialRestore([(1, 2, None)], "memory://x", "c", 8))
    one.begin()
    assert reader.asked == [[]]
    reader.finish()
    host.frozen, host.resume_step, host.done, host.floor = False, 21, 16, 18
    one.proceed()
    assert ready == [(21, 18)] and len(reader.asked) == 1


# each rule is missed ----------------------------------------------------------------------------------


def all_saves_are_read(patch: pytest.MonkeyPatch) -> None:
    """Also those of steps to before which others may have to go back."""
    patch.setattr(SlotRestore, "_told", lambda self: self.partial_restore)


def read_before_it_is_known_where(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotRestore, "begin", lambda self: self._ask(self.partial_restore))


def not_read_anew(patch: pytest.MonkeyPatch) -> None:
    """All went back, and what was read before is taken."""
    ask = SlotRestore._ask
    patch.setattr(SlotRestore, "_ask", lambda self, wanted: ask(self, wanted) if self._asked is None else None)


def saves_outlive_their_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Rows of before a checkpoint count in the place of its own."""

    def on_checkpoint(self: Saving, folder: str, done: int, now_s: float) -> None:
        self.known = Saves(folder, done, self.known.since)
        self._wait(now_s)

    patch.setattr(Saving, "on_checkpoint", on_checkpoint)


def of_any_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Saving, "on", lambda self, base: list(self.known.since))


def steps_that_were_taken_back_stay_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Saving, "forget_after", lambda self, done: None)


def the_one_being_written_is_not_void(patch: pytest.MonkeyPatch) -> None:
    def forget_after(self: Saving, done: int) -> None:
        self.known = self.known.until(done)

    patch.setattr(Saving, "forget_after", forget_after)


def whoever_knows_most_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Also who has not heard that all went back."""

    def saves(self: MemberReports) -> Saves:
        return max((one.saves for one in self.said.values()), key=lambda s: (s.done, s.newest), default=Saves())

    patch.setattr(MemberReports, "saves", property(saves))


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    all_saves_are_read,
    read_before_it_is_known_where,
    not_read_anew,
    saves_outlive_their_checkpoint,
    of_any_checkpoint,
    steps_that_were_taken_back_stay_saved,
    the_one_being_written_is_not_void,
    whoever_knows_most_is_believed,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_rule_is_missed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    tests = (
        test_by_steps_after_the_first_checkpoint_and_so_many_at_most,
        test_steps_that_are_taken_back_are_not_saved,
        test_the_next_coordinator_asks_those_who_know_where_all_went_on,
        test_saves_are_read_once_it_is_known_up_to_where_nobody_goes_back,
    )
    assert first_failure({test.__name__: test for test in tests}) != ""
