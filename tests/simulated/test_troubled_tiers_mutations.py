"""Each rule of records on disks, taken out, is missed: a schedule fails.

Not here: that a record's count is kept when its frame goes. Without it other records are in memory, and no bit differs:
it costs speed only (`test_what_counts_cost_is_speed_only`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_troubled_tiers as runs
import tiered_pairs as pairs
from disk_runs import OnDisks
from schedules import first_failure

from torch_ecrec.codec import seals
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import Use
from torch_ecrec.records.tiers import tiered
from torch_ecrec.records.tiers.kernels import ABSENT, DIRTY, PENDING
from torch_ecrec.records.tiers.log import SegmentLog
from torch_ecrec.records.tiers.tiered import TieredStore

Patch = Callable[[pytest.MonkeyPatch], None]


def do(seed: int) -> None:
    pairs.Doing(pairs.tiny(30, 3, 5), seed).go(150)


def lies(kind: str) -> None:
    runs.sweep(runs.PLAIN, kind, 3)


SCHEDULES: dict[str, Callable[[], object]] = {
    **{f"doing {seed}": lambda seed=seed: do(seed) for seed in range(12)},  # type: ignore[misc]
    "place": pairs.check_a_place_that_others_had_meanwhile,
    "cleaning": pairs.check_cleaning_that_cannot_read,
    "places": pairs.check_zeros_and_other_records,
    **{kind: lambda kind=kind: lies(kind) for kind in ("flip", "error", "zeros", "lost")},  # type: ignore[misc]
    **{
        f"many {seed}": lambda seed=seed: runs.test_many_reads_go_wrong_while_others_are_lost(seed, "background")  # type: ignore[misc]
        for seed in range(4)
    },
}


def frames_in_use_go(patch: pytest.MonkeyPatch) -> None:
    pick = TieredStore._pick

    def picked(self: TieredStore, want: int, before: int, pinned: bool = False) -> Any:
        return pick(self, want, self._call + 1, pinned)

    patch.setattr(TieredStore, "_pick", picked)


def what_the_step_changes_goes(patch: pytest.MonkeyPatch) -> None:
    """And not only what the one before it has changed."""
    pick = TieredStore._pick_any

    def picked(self: TieredStore, want: int, before: int) -> Any:
        self._call += 1
        frames = pick(self, want, before)
        self._call -= 1
        return frames

    patch.setattr(TieredStore, "_pick_any", picked)


def what_is_dirty_is_dropped(patch: pytest.MonkeyPatch) -> None:
    before = TieredStore._is
    patch.setattr(TieredStore, "_is", lambda self, flag, at_V: before(self, flag, at_V) & (flag != DIRTY))


def a_place_that_was_let_go_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentLog, "versions", lambda self, places_U: np.zeros(len(places_U), np.int64))


def folds_are_taken_for_records(patch: pytest.MonkeyPatch) -> None:
    """What is pending is read without what is below."""

    def settle(self: TieredStore, frames_V: Any) -> None:
        self._meta_F[frames_V, 1] = self._meta_F[frames_V, 1] & ~np.uint32(PENDING) | np.uint32(DIRTY)

    patch.setattr(TieredStore, "_settle", settle)


def what_is_replaced_stays_pending(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(tiered._STATES, Use.REPLACE, (np.uint32(DIRTY), np.uint32(0xFFFFFFFF)))


def cleaning_forgets_what_has_a_frame(patch: pytest.MonkeyPatch) -> None:
    """As if a frame were as good as the file: it is not, unless it is dirty."""
    before = TieredStore._clean

    def clean(self: TieredStore) -> None:
        chosen_S = self._log.to_clean()
        if chosen_S is not None:
            (at,) = np.nonzero((self._frame_P >= 0) & (self._place_P != tiered.NO_PLACE))
            at = at[chosen_S[self._place_P[at] // self._log.per_segment]]
            self._log.let_go(self._place_P[at].astype(np.int64))
            self._place_P[at] = tiered.NO_PLACE
        before(self)

    patch.setattr(TieredStore, "_clean", clean)


def what_comes_late_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Over a record that has a frame, and was changed there."""

    def arrive(self: TieredStore, reading: Any) -> None:
        frames_A = self._frame_P[reading.positions_A]
        self._frame_P[reading.positions_A[frames_A < 0]] = ABSENT
        (some,) = np.nonzero(frames_A >= 0)
        self._records_FB[frames_A[some]] = reading.records_AB[some]
        self._seals_F[frames_A[some]] = reading.seals_A[some]

    patch.setattr(TieredStore, "arrive", arrive)


def seals_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    before = SegmentLog.read

    def read(self: SegmentLog, places_U: Any, seals_U: Any, into_XB: Any, at_U: Any, apart: bool = False) -> Any:
        before(self, places_U, seals_U, into_XB, at_U, apart)
        seals_U[:] = seals.seals_of(into_XB[at_U])
        return np.zeros(len(places_U), np.bool_)

    patch.setattr(SegmentLog, "read", read)


def who_was_given_damage_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scrubber, "came_whole", lambda self, table_group, parity: True)


def nothing_is_brought_before_it_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "bring", lambda self, positions_U: None)


def cleaning_loses_what_it_cannot_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredStore, "_on_unclean", lambda self, *_: None)


MUTATIONS: tuple[Patch, ...] = (
    frames_in_use_go,
    what_the_step_changes_goes,
    what_is_dirty_is_dropped,
    a_place_that_was_let_go_is_taken,
    folds_are_taken_for_records,
    what_is_replaced_stays_pending,
    cleaning_forgets_what_has_a_frame,
    what_comes_late_is_taken,
    seals_are_not_checked,
    who_was_given_damage_is_not_told,
    nothing_is_brought_before_it_is_used,
    cleaning_loses_what_it_cannot_read,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_schedules_pass_as_it_is() -> None:
    assert first_failure(SCHEDULES) == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_without_a_rule_some_schedule_fails(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    for late in (False, True):  # the oracles, before anything is taken out
        runs.asked(runs.PLAIN, late)
    mutation(monkeypatch)
    found = first_failure(SCHEDULES)
    print(found)
    assert found and "TypeError" not in found, "a rule is missed, and not who takes it out"


def test_what_counts_cost_is_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that are lost when a record goes: every bit is the same."""
    before = TieredStore._put_away

    def put_away(self: TieredStore, frames_V: Any) -> None:
        positions_V = self._positions_of(frames_V)
        before(self, frames_V)
        self._count_P[positions_V] = 0

    monkeypatch.setattr(TieredStore, "_put_away", put_away)
    for seed in range(3):
        do(seed)
    assert runs.check(OnDisks(runs.PLAIN)) == "equal"
