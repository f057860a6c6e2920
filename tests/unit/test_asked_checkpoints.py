"""A checkpoint that somebody asks for: when it is begun, of which step it is, and what refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from coordinator_harness import Harness
from router_harness import CODE, Running, Wire

from torch_ecrec.cli.checkpoint import progress
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.settings import ClusterSettings

KEPT = CheckpointSettings("memory://x", every_steps=1000)


class Manifests:
    """Says at once that a manifest is written, or why not."""

    def __init__(self) -> None:
        self.counts: list[Finished] = []
        self.why: str | None = None

    def commit(self, finished: Finished, done: Callable[[str | None, bool], None]) -> None:
        if self.why is None:
            self.counts.append(finished)
        done(self.why, False)

    def discard(self, folder: str, save: bool = False) -> None:
        """Nothing is there."""

    def newest(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nobody goes back")


class Asked(Harness):
    """A cluster that trains, whose slots say what a test wants them to."""

    def __init__(self, **settings: Any) -> None:
        kept = settings.pop("checkpoint", KEPT)
        super().__init__(checkpoint=kept, **settings)
        self.manifests = Manifests()
        self.core = Coordinator(
            ClusterSettings(self.code, 1, checkpoint=kept), self._send, self._announce, self.manifests
        )
        self.start()
        self.say("trainer-0", type="loaded", load_end=0)
        for slot in range(3):
            self.say(self.places[slot], type="ready", slot=slot, incarnation=0)
            self.rebuilt(slot)

    def tick(self, span_s: float = 1.0) -> None:
        self.now_s += span_s
        for name in self.core.members:
            self.core.on_heard(name, self.now_s)
        self.core.on_tick(self.now_s)

    def surveyed(self) -> int | None:
        """The number of the newest survey."""
        found = [word["checkpoint"] for _, word in self.sent if word["type"] == "survey"]
        return found[-1] if found else None

    def shows(self, done: int) -> None:
        """All slots show that step, with the dense model."""
        for slot in range(3):
            word = {"checkpoint": self.surveyed(), "applied": done, "floor": 0, "snapshots": [[done, done, [0, 1]]]}
            self.say(self.places[slot], type="shown", slot=slot, incarnation=0, **word)

    def writes(self) -> None:
        for slot in range(3):
            word = {"checkpoint": self.surveyed(), "part": {"bytes": 1}}
            self.say(self.places[slot], type="written", slot=slot, incarnation=0, **word)

    def asked(self) -> int | None:
        kept = self.core.status(self.now_s).checkpoints
        assert kept is not None
        return kept.asked


def test_one_is_written_at_once_though_none_is_due() -> None:
    h = Asked()
    h.tick()
    assert h.surveyed() is None, "none is due"
    assert h.core.checkpoint(None) == "" and h.asked() == 0
    h.tick()
    h.shows(7)
    h.writes()
    assert [one.done for one in h.manifests.counts] == [7] and h.asked() is None
    number = h.surveyed()
    h.tick(100.0)
    assert h.surveyed() == number, "one was asked for, and one was written"


def test_said_again_it_is_the_same_and_one_of_a_later_step_is_another() -> None:
    h = Asked()
    assert h.core.checkpoint(None) == h.core.checkpoint(0) == ""
    h.tick()
    h.shows(7)
    assert h.core.checkpoint(0) == "", "whoever waits for it says so again and again"
    h.writes()
    number = h.surveyed()
    assert h.core.checkpoint(0) == "" and h.asked() is None, "it is written"
    h.tick(10.0)
    assert h.surveyed() == number
    assert h.core.checkpoint(7) == ""
    h.tick()
    assert h.surveyed() == (number or 0) + 1
    h.shows(7)
    h.tick()
    h.shows(8)
    h.writes()
    assert [one.done for one in h.manifests.counts] == [7, 8] and h.asked() is None


def test_while_one_is_written_the_next_begins_after_it() -> None:
    h = Asked()
    h.core.checkpoint(None)
    h.tick()
    h.shows(7)
    h.say("trainer-0", type="progress", trainer=0, step=20)
    assert h.core.checkpoint(None) == "" and h.asked() == 7, "what is written is of an earlier step than now"
    h.writes()
    assert h.asked() == 7
    h.tick()
    h.shows(20)
    h.writes()
    assert [one.done for one in h.manifests.counts] == [7, 20] and h.asked() is None


def test_one_that_has_all_that_was_trained_is_the_answer() -> None:
    """Whoever asks has it: a periodic one, say, that was written a moment ago."""
    h = Asked()
    h.say("trainer-0", type="progress", trainer=0, step=20)
    h.core.checkpoint(None)
    h.tick()
    h.shows(20)
    h.writes()
    number, kept = h.surveyed(), h.core.status(h.now_s).checkpoints
    assert kept is not None and h.core.checkpoint(None) == "" and h.asked() is None
    assert progress(kept, counts=True) == f"written: {kept.last}, of step 20, at memory://x"
    h.tick(100.0)
    assert h.surveyed() == number, "no other is written"


def test_one_that_fails_is_tried_again_until_it_counts() -> None:
    h = Asked()
    h.core.checkpoint(None)
    h.tick()
    h.manifests.why = "no room"
    h.shows(7)
    h.writes()
    kept = h.core.status(h.now_s).checkpoints
    assert kept is not None and kept.failing == "no room" and kept.asked == 0
    h.manifests.why = None
    h.tick(60.0)
    h.shows(9)
    h.writes()
    assert [one.done for one in h.manifests.counts] == [9] and h.asked() is None


def test_after_the_job_one_is_tried_and_no_later_step_is_no_failure() -> None:
    """By time, of a job whose trainers have left, done: the last step is in a checkpoint, and nobody is warned."""
    h = Asked(checkpoint=CheckpointSettings("memory://x", every_s=10.0))
    h.tick()
    h.tick(10.0)
    h.shows(7)
    h.writes()
    for rank in (0, 1):
        h.say(f"trainer-{rank}", type="leave")
    first = h.surveyed()
    h.tick(10.0)
    assert h.surveyed() not in (None, first), "one more, of what came since"
    h.shows(7)
    for _ in range(60):
        h.tick()
        h.shows(7)
    kept = h.core.status(h.now_s).checkpoints
    assert kept is not None and kept.failing_for_s is None and len(h.manifests.counts) == 1


def test_one_that_is_due_before_the_first_tick_after_all_went_back_has_as_long_as_any_other() -> None:
    """It was void at once: it had begun at time 0."""
    h, before = Asked(checkpoint=CheckpointSettings("memory://x", every_steps=5)), Asked()
    before.tick(5000.0)
    h.core._state.checkpointing.follow(before.core._state.checkpointing)
    h.say(h.places[0], type="due", slot=0, incarnation=0, done=5)
    assert h.surveyed() is not None
    h.tick(5000.25)
    h.shows(5)
    h.writes()
    assert [one.done for one in h.manifests.counts] == [5]


def test_it_waits_until_every_slot_is_whole() -> None:
    h = Asked()
    h.lose(h.places[1])
    assert h.core.checkpoint(None) == "" and h.asked() == 0
    h.tick()
    assert h.surveyed() is None
    h.say(h.places[1], type="ready", slot=1, incarnation=1)
    h.rebuilt(1)
    h.tick()
    assert h.surveyed() is not None


def test_where_none_are_kept_or_all_has_stopped_it_is_refused_by_name() -> None:
    assert "no checkpoints are kept: start the coordinator with --checkpoint URL" in Harness().start().core.checkpoint(
        None
    )
    h = Asked()
    h.core.stop("slots 0, 1 are lost", "data_loss")
    assert h.core.checkpoint(None) == "the cluster has stopped: slots 0, 1 are lost"


@pytest.mark.parametrize("after", [-1, "x", 1.5])
def test_a_word_that_is_none_changes_nothing(after: Any) -> None:
    running, wire = Running(), Wire("tool")
    running.router.on_message(wire, {"type": "checkpoint", "after": after}, 0.0)
    assert wire.told("refused") and wire.closed and running.router.refused == 1


def test_a_tool_is_told_why_not() -> None:
    running, wire = Running(), Wire("tool")
    running.router.on_message(wire, {"type": "checkpoint"}, 0.0)
    assert "no checkpoints are kept" in wire.told("refused")[0]["reason"] and wire.closed
    assert running.router.refused == 0, "nothing is wrong with the cluster"


# --- a member that is to die ------------------------------------------------------------------------------------------


def test_a_member_is_told_to_die_and_that_is_an_event() -> None:
    running = Running(code=CODE).start()
    assert running.router.kill("server-1") == ""
    assert running.processes[1].wire.told("die") == [{"type": "die"}]
    assert [event["member"] for event in running.events if event["event"] == "killed"] == ["server-1"]
    assert "no member is called 'server-9'; there are server-0" in running.router.kill("server-9")
    running.close(running.processes[2].wire)
    assert "no connection" in running.router.kill("server-2")
    assert len([event for event in running.events if event["event"] == "killed"]) == 1
