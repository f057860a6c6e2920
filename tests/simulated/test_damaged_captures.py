"""Bits flip in servers while they write a checkpoint: none that counts has one of them, and the next one comes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from flipped_runs import Flipped, name_of
from harness import tiers
from test_captures import PLAIN, Checkpointed, check, events, healthy, with_checkpoints
from thinned import in_turns

from torch_ecrec.coordinator import checkpointing
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.records.captured import KEPT, Captured
from torch_ecrec.server.checkpoints import SlotCheckpoints

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
        most = 2 if tiers.FRAMES else 1  # a disk makes a repair longer
        assert counts >= healthy(policy)[2] - len(cluster.voided()) - most, "one is lost at most"
    print(f"{void} given up")
    assert void >= 3


def test_what_is_written_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, taken out: a checkpoint that counts has a bit that had flipped."""
    look = Scrubber.look

    def blind(self: Scrubber, table_group: int, parity: bool, positions_U: Any) -> None:
        if self._slot.checkpoints._capture is None:
            look(self, table_group, parity, positions_U)

    monkeypatch.setattr(Scrubber, "look", blind)
    with pytest.raises(AssertionError):
        for at in numbers("full", 1):
            flip_at(at, "full")


def test_a_step_that_changes_a_damaged_record_gives_the_checkpoint_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks in the background a step uses it, and the capture is the first to see it: the slot goes on."""
    found, portion = [], Captured.portion

    def seen(self: Captured, most: int, read: Any) -> Any:
        positions_M, records_MB, broken_U = portion(self, most, read)
        found.extend(self._marks_P[broken_U] == KEPT)
        return positions_M, records_MB, broken_U

    monkeypatch.setattr(Captured, "portion", seen)
    for at in numbers("full", 1):
        cluster = FlippedAtWrite(at, "full", checks="background")
        cluster.go()
        assert cluster.all_mended() and len(cluster.shelf.counts) >= healthy("full")[2] - len(cluster.voided()) - 1
        if any(found):
            assert cluster.voided()
            return
    raise AssertionError("no step did")


# what was kept ----------------------------------------------------------------------------------------


class KeptFlipped(Checkpointed):
    """A cluster in which, at a write, a bit flips of a record that is kept for a checkpoint and was not given yet."""

    def __init__(self, at: int, policy: str) -> None:
        super().__init__(with_checkpoints(PLAIN, policy), at=at, act=lambda cluster, what: self.flip())
        self.chance, self.name = random.Random(at), ""

    def flip(self) -> None:
        found = []
        for slot in self.slots():
            capture = slot.checkpoints._capture
            for table_group, captured in enumerate(capture._captured if capture is not None else []):
                kept = np.flatnonzero(captured._marks_P == KEPT)
                found += [(slot, table_group, captured, int(at)) for at in kept[kept >= captured.next]]
        if found:
            slot, table_group, captured, at = self.chance.choice(found)
            piece, row = divmod(int(captured._number_P[at]), captured._piece_rows)
            byte = self.chance.randrange(captured._pieces[piece].shape[1])  # its seal's, too
            captured._pieces[piece][row, byte] ^= 1 << self.chance.randrange(8)
            self.name = slot.held.name_of(slot.index, table_group, at)

    def voided(self) -> list[str]:
        reasons = [event["reason"] for event in events(self.run, "checkpoint_void")]
        return [reason for reason in reasons if "was damaged in memory where it was kept for it" in reason]


@in_turns("every", 5, 2)
@pytest.mark.parametrize("policy", ["full", "consecutive"])
def test_a_checkpoint_is_given_up_for_a_record_that_was_damaged_where_it_was_kept(policy: str, every: int) -> None:
    flipped = 0
    for at in numbers(policy, every):
        cluster = KeptFlipped(at, policy)
        check(cluster)
        assert not events(cluster.run, "damaged"), "what is trained is whole"
        if cluster.name:
            (reason,) = cluster.voided()
            assert cluster.name in reason
            assert len(cluster.shelf.counts) >= healthy(policy)[2] - 2
        flipped += bool(cluster.name)
    print(f"{flipped} flipped")
    assert flipped >= 3


def test_what_was_kept_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, taken out: a checkpoint that counts has a bit that had flipped."""
    monkeypatch.setattr(SlotCheckpoints, "_on_broken", lambda self, table_group, positions_U: None)
    with pytest.raises(AssertionError):
        for at in numbers("full", 1):
            check(KeptFlipped(at, "full"))
