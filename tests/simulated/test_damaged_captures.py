"""Bits flip in servers while they write a checkpoint: none that counts has one of them, and the next one comes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flipped_runs import Flipped, name_of
from test_captures import PLAIN, Checkpointed, check, events, healthy, with_checkpoints

from torch_ecrec.coordinator import checkpointing
from torch_ecrec.server.capture import Capture
from torch_ecrec.server.scrubber import Scrubber

REASON = "records are damaged, and being repaired; the next checkpoint has them"


@pytest.fixture(autouse=True)
def _asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that repairs records cannot show a step; the whole run takes a second."""
    monkeypatch.setattr(checkpointing, "SURVEY_S", 0.02)


class FlippedAtWrite(Checkpointed, Flipped):
    """A cluster in which a bit of a record flips at a write. Nobody looks for it before training is over but those who
    use a record, and those who write it.

    Args:
        at: number of the write.
        policy: of checkpoints.
        checks: `Settings.record_checks`.
    """

    def __init__(self, at: int, policy: str, checks: str = "use") -> None:
        super().__init__(with_checkpoints(PLAIN, policy), at=at, act=lambda cluster, what: self.flip())
        self.settings = dataclasses.replace(self.settings, record_checks=checks)
        self.scrubs, self.share = "last", 0.0
        self.chance.seed(at)

    def voided(self) -> list[dict[str, Any]]:
        return [event for event in events(self.run, "checkpoint_void") if event["reason"].endswith(REASON)]


def flip_at(at: int, policy: str) -> FlippedAtWrite:
    cluster = FlippedAtWrite(at, policy)
    check(cluster)
    (flip,) = cluster.flipped
    assert cluster.names() == [name_of(*flip)], "found once, and named"
    assert cluster.all_mended()
    return cluster


def numbers(policy: str, every: int) -> range:
    """Of writes, but for those of the last checkpoints: a void one is to be followed."""
    return range(0, healthy(policy)[1] * 2 // 3, every)


@pytest.mark.parametrize("policy", ["full", "consecutive"])
def test_a_checkpoint_is_given_up_for_a_record_that_is_damaged(policy: str) -> None:
    void = 0
    for at in numbers(policy, 4):
        cluster = flip_at(at, policy)
        void += len(cluster.voided())
        counts = len(cluster.shelf.counts)
        assert counts >= healthy(policy)[2] - len(cluster.voided()) - 1, "one is lost at most"
    print(f"{void} given up")
    assert void >= 3


def test_what_is_written_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, taken out: a checkpoint that counts has a bit that had flipped."""
    look = Scrubber.look

    def blind(self: Scrubber, slab: int, parity: bool, positions_U: Any) -> None:
        if self._slot.checkpoints._capture is None:
            look(self, slab, parity, positions_U)

    monkeypatch.setattr(Scrubber, "look", blind)
    with pytest.raises(AssertionError):
        for at in numbers("full", 1):
            flip_at(at, "full")


def test_a_step_that_changes_a_damaged_record_gives_the_checkpoint_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks in the background a step uses it, and the capture is the first to see it: the slot goes on."""
    found, before_forgetting = [], Capture.before_forgetting

    def seen(self: Capture, *changed: Any) -> None:
        damaged = sum(len(damage) for damage in self._held.missing.damaged.values())
        before_forgetting(self, *changed)
        found.append(sum(len(damage) for damage in self._held.missing.damaged.values()) > damaged)

    monkeypatch.setattr(Capture, "before_forgetting", seen)
    for at in numbers("full", 1):
        cluster = FlippedAtWrite(at, "full", checks="background")
        cluster.go()
        assert cluster.all_mended() and len(cluster.shelf.counts) >= healthy("full")[2] - len(cluster.voided()) - 1
        if any(found):
            assert cluster.voided()
            return
    raise AssertionError("no step did")
