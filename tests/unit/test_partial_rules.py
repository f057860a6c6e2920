"""The rules of partial recovery: who begins anew, and how much is lost by that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.partial import PartialRecovery, beyond_repair, lost_steps, portion, trimmed
from torch_ecrec.coordinator.regathering import MemberReports
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.protocol.messages import PartialRestore


def partial_restore(done: int, at: int | None, *slots: int) -> PartialRestore:
    return PartialRestore([(slot, 1, at) for slot in slots], "memory://somewhere", "folder", done)


def test_the_example_of_the_module() -> None:
    assert portion([partial_restore(80, 100, 3)], 4, 100) == pytest.approx(0.05)


def test_as_cpr_counts_it_where_nothing_is_lost_twice() -> None:
    """PLS grows by (samples since the checkpoint) / (all samples x nodes) with each node that is lost."""
    found = [partial_restore(20, 25, 0), partial_restore(40, 48, 1, 2), partial_restore(60, 61, 0)]
    cpr = (25 - 20) / (100 * 4) + 2 * (48 - 40) / (100 * 4) + (61 - 60) / (100 * 4)
    assert portion(found, 4, 100) == pytest.approx(cpr)
    assert lost_steps(found, 4) == [6, 8, 8, 0]


def test_what_is_lost_twice_counts_once() -> None:
    assert lost_steps([partial_restore(20, 25, 0), partial_restore(20, 30, 0)], 1) == [10]


def test_a_checkpoint_lacks_what_its_slot_had_lost() -> None:
    """Lost at 25 back to 20; the next checkpoint, of step 28, does not have these 5 either."""
    assert lost_steps([partial_restore(20, 25, 0), partial_restore(28, 30, 0)], 1) == [7]


def test_what_has_not_gone_on_counts_nothing_yet() -> None:
    assert lost_steps([partial_restore(20, None, 0)], 1) == [0] and portion([], 4, 0) == 0.0


def test_steps_that_are_made_again_are_not_lost() -> None:
    """The slot went on after 30, and all trainers go back to 27: steps 28 to 30 will be in it."""
    assert lost_steps(trimmed([partial_restore(20, 30, 0)], 27), 1) == [7]
    state = PartialRecovery(True, 0.1, [partial_restore(20, 30, 0)])
    state.go_back(27)
    assert lost_steps(state.partial_restores, 1) == [7]


def test_a_slot_that_is_lost_again_keeps_where_it_went_on_before() -> None:
    """It lacked 5 steps as the checkpoint of step 28 was written, and has lost 2 more since."""
    again = PartialRestore([(0, 2, None)], "memory://somewhere", "another", 28)
    state = PartialRecovery(True, 0.1, [partial_restore(20, 25, 0), again], reading={0})
    assert state.told == 1
    state.go_on(30)
    assert [one.lives for one in state.partial_restores] == [[(0, 1, 25)], [(0, 2, 30)]]
    assert state.told == 2 and lost_steps(state.partial_restores, 1) == [7]


def test_who_knows_where_slots_went_on_is_believed() -> None:
    """The coordinator has told some servers of an era where all go on, and died."""
    restores = [[partial_restore(20, at, 0)] for at in (None, 25)]
    for heard in (restores, restores[::-1]):
        said = [SimpleNamespace(known=SimpleNamespace(era=1, partial_restores=one)) for one in heard]
        reports = MemberReports(dict(enumerate(said)))  # type: ignore[arg-type]
        assert reports.partial_restores == restores[1] and not reports.reads(0, 1)
    assert MemberReports({"server-0": said[1]}).reads(0, 1)  # type: ignore[dict-item]


def test_a_cluster_that_went_back_keeps_what_its_checkpoint_lacks() -> None:
    before, after = (
        PartialRecovery(True, 0.1, [partial_restore(20, 30, 0), partial_restore(40, 50, 1)]),
        PartialRecovery(True, 0.1),
    )
    after.follow(before, 45)
    assert lost_steps(after.partial_restores, 2) == [10, 0]
    assert all(life == 0 for one in after.partial_restores for _, life, _ in one.lives), (
        "no slot of the next begins anew"
    )


@pytest.mark.parametrize("gone", [{0, 1}, {0, 2}, {1, 4}])
def test_only_slots_of_stripes_that_cannot_be_repaired_begin_anew(gone: set[int]) -> None:
    layouts = [layout_of(7, 2, 1, 70)]  # slots 0 to 2 and 3 to 6 share stripes
    expected = gone if layouts[0].group_of(min(gone)) == layouts[0].group_of(max(gone)) else set()
    assert beyond_repair(layouts, gone, gone) == expected


def test_slots_far_from_the_lost_stripes_are_repaired() -> None:
    layouts = [layout_of(7, 2, 1, 70)]
    assert beyond_repair(layouts, {0, 1, 5}, {0, 1, 5}) == {0, 1}


def test_a_slot_that_shares_a_stripe_with_one_that_begins_anew_does_so_too() -> None:
    """r = 2: slots 0 to 2 are beyond repair in some stripes; 4 could be repaired with parities that they made."""
    layouts = [layout_of(7, 2, 2, 70)]
    assert beyond_repair(layouts, {0, 1, 2, 4}, {0, 1, 2, 4}) == {0, 1, 2, 4}


def test_slots_that_only_lack_parity_keep_their_records() -> None:
    layouts = [layout_of(5, 2, 1, 50)]
    assert beyond_repair(layouts, {0, 1, 2, 3, 4}, {2}) == {2}


def test_a_slot_without_rows_is_no_loss() -> None:
    assert beyond_repair([layout_of(5, 2, 1, 0)], {0, 1}, {0, 1}) == set()


def test_it_begins_as_it_was_told() -> None:
    with pytest.raises(ValueError, match=r"`most_lost_samples` must be from 0 to 1, got 1.5"):
        CheckpointSettings("memory://x", every_steps=1, beyond="partial", most_lost_samples=1.5)
    with pytest.raises(ValueError, match="`beyond` is 'partial', but no checkpoints are written"):
        CheckpointSettings(beyond="partial")
