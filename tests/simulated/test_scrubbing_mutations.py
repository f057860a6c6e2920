"""Each rule of how damage is found and repaired, taken out, is missed: a schedule fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_scrubbing
from flipped_runs import Flipped
from harness import simulation
from harness.scenario import LOADS, Scenario
from schedules import first_failure

from torch_ecrec.codec import seals
from torch_ecrec.durability.holdings import HERE, Missing
from torch_ecrec.durability.parity import Parity
from torch_ecrec.durability.rebuild import Rebuild, _Repair
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import View
from torch_ecrec.server.slot import Slot

pytestmark = pytest.mark.slow
LIMIT_S = 4.0  # virtual; a run that ends takes half of it
Patch = Callable[[pytest.MonkeyPatch], None]

SCHEDULES: dict[str, Callable[[], None]] = {
    "flips": lambda: test_scrubbing.check(Flipped(Scenario(steps=6), test_scrubbing.OFTEN)),
    "parities": lambda: test_scrubbing.test_a_damaged_parity_is_not_decoded_from(0),
    "parities again": lambda: test_scrubbing.test_a_damaged_parity_is_not_decoded_from(1),
    "loads": lambda: test_scrubbing.check(
        Flipped(Scenario(steps=0, loads=LOADS), range(20, 900, 7), parity=0.0, checks="background")
    ),
    "losses": lambda: test_scrubbing.test_flips_while_servers_and_trainers_are_lost(1),
    "two": test_scrubbing.test_two_of_a_stripe_are_repaired_by_two_parities,
    "beyond": test_scrubbing.test_more_than_the_stripe_can_repair_is_the_end_and_says_where,
    "used": test_scrubbing.test_where_a_step_may_have_used_it_already_the_word_says_so,
}


def seals_are_made_anew(patch: pytest.MonkeyPatch) -> None:
    """After a change a record's seal is made of what is there then: damage from before fits."""

    before = Shard._note

    def note(self: Shard, parity: bool, positions_U: np.ndarray, view: View, seals_U: np.ndarray | None) -> None:
        before(self, parity, positions_U, view, None)
        at = view.at_U[view.at_U >= 0]
        if view.seals_X is not None:
            view.seals_X[at] = seals.seals_of(view.records_XB[at])

    patch.setattr(Shard, "_note", note)


def parities_have_no_seals(patch: pytest.MonkeyPatch) -> None:
    before = Shard.broken_run

    def broken_run(self: Shard, first: int, end: int, parity: bool = False) -> np.ndarray:
        return np.empty(0, np.int64) if parity else before(self, first, end, parity)

    patch.setattr(Shard, "broken_run", broken_run)


def readers_are_given_what_is_damaged(patch: pytest.MonkeyPatch) -> None:
    before = Parity.on_fetch

    def on_fetch(self: Parity, request: wire.Fetch, reply: Any) -> None:
        look = self.scrubber.look
        self.scrubber.look = lambda *_: None  # type: ignore[method-assign]
        before(self, request, reply)
        self.scrubber.look = look  # type: ignore[method-assign]

    patch.setattr(Parity, "on_fetch", on_fetch)


def who_reads_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """That a member is damaged: it is asked again and again, as if it were being rebuilt."""
    patch.setattr(_Repair, "_on_damaged", lambda self, member, answer: self._again())


def damage_is_not_missing(patch: pytest.MonkeyPatch) -> None:
    """What is damaged is used until it is repaired, and is written over then."""

    def damage(self: Missing, table_group: int, parity: bool, positions_U: np.ndarray) -> None:
        if not self._states:
            self._count(HERE)
        self.damaged.setdefault((table_group, parity), set()).update(positions_U.tolist())

    patch.setattr(Missing, "damage", damage)


def loads_do_not_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "is_missing", lambda self, positions, looked=False: self.durability.is_missing(positions))


def parities_are_not_mended(patch: pytest.MonkeyPatch) -> None:
    before = Rebuild.mend

    def mend(self: Rebuild, table_group: int, parity: bool, positions: np.ndarray) -> None:
        if not parity:
            before(self, table_group, parity, positions)

    patch.setattr(Rebuild, "mend", mend)


def nobody_keeps_in_mind_what_was_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scrubber, "_marks", property(lambda self: False))


MUTATIONS: list[Patch] = [
    seals_are_made_anew,
    parities_have_no_seals,
    readers_are_given_what_is_damaged,
    who_reads_is_not_told,
    damage_is_not_missing,
    loads_do_not_look,
    parities_are_not_mended,
    nobody_keeps_in_mind_what_was_used,
]


def test_all_schedules_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LIMIT_S", LIMIT_S)
    assert first_failure(SCHEDULES) == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_rule_is_missed(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LIMIT_S", LIMIT_S)
    mutation(monkeypatch)
    failure = first_failure(SCHEDULES)
    print(mutation.__name__, failure)
    assert failure != ""
