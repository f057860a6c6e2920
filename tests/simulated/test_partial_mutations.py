"""Each rule of partial recovery, taken out, is missed: a schedule fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import virtual_trainers
from partial_runs import Partial, check
from schedules import first_failure
from virtual_trainers import Kill

from torch_ecrec.client.client import Client
from torch_ecrec.coordinator import partial, placement
from torch_ecrec.durability.folding import Folds
from torch_ecrec.durability.holdings import Missing
from torch_ecrec.durability.parity import Parity
from torch_ecrec.protocol import messages
from torch_ecrec.server.slot import Slot
from torch_ecrec.server.slot_restore import SlotRestore
from torch_ecrec.spec.job import CodeSpec

pytestmark = pytest.mark.slow  # half a minute for a rule that is missed late
EVENTS_MOST = 8_000  # of a run that ends, a fourth
Patch = Callable[[pytest.MonkeyPatch], None]
CODE = CodeSpec(5, 2, 1)


def schedules() -> list[dict[str, Any]]:
    """Losses of two slots at some steps; with one more server, or a trainer, a little later."""
    found: list[dict[str, Any]] = []
    for at in range(0, 120, 12):
        found.append({"code": CODE, "kills": [Kill("beyond", 2, 190 + at), Kill("server", 3, 0)]})
        found.append({"code": CODE, "kills": [Kill("beyond", 2, 190 + at), Kill("any", 2, 230 + 2 * at)]})
        found.append({"code": CODE, "kills": [Kill("beyond", -2, 190 + at), Kill("trainer", 1, 200 + 2 * at)]})
    return found + slow_survivors() + lost_while_parities_are_made()


def lost_while_parities_are_made() -> list[dict[str, Any]]:
    """A survivor is lost before the parities of the slots that began anew are whole."""
    return [
        {"code": CODE, "kills": [Kill("beyond", 2, 0)], "at_control": {at: Kill("any", 2, 0)}}
        for at in range(110, 330, 7)  # messages of the control channel, from the loss until all is whole again
    ]


@functools.cache
def pushes() -> list[int]:
    """Numbers of some pushes to slots that survive."""
    sent = Partial(code=CODE).go().network.sent
    return [n for n in range(205, 300) if sent[n][2] == "Push" and sent[n][1] in ("server-2", "server-3", "server-4")]


def slow_survivors() -> list[dict[str, Any]]:
    """A push to a survivor is dropped, so that the lost slots had acknowledged a step that it has not applied."""
    found = [(n, n + more) for n in pushes() for more in (19, 25, 28)]
    return [{"code": CODE, "dropped": n, "kills": [Kill("beyond", 2, at)]} for n, at in found]


def parities_stay(patch: pytest.MonkeyPatch) -> None:
    """What holders keep of a slot's records before it began anew counts as of it."""
    patch.setattr(Parity, "meet_anew", lambda self, slot, life: bool(self.meet(slot, life)))


def parities_are_not_encoded_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Missing, "lose", lambda self, table_group, positions_U: None)


def folds_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Folds, "forget", lambda self, source: None)


def same_era(patch: pytest.MonkeyPatch) -> None:
    """Trainers send nothing again to slots that begin anew."""

    def restore_partly(self: Client, word: messages.PartlyRestored) -> None:
        self.era = max(self.era, word.era) if self.resumed else self.era

    patch.setattr(Client, "restore_partly", restore_partly)


def only_what_was_not_acknowledged(patch: pytest.MonkeyPatch) -> None:
    """Of the steps that are not complete, a slot that begins anew gets those alone that the life before had not."""
    before = Client.restore_partly

    def restore_partly(self: Client, word: messages.PartlyRestored) -> None:
        nobody = [msgspec.structs.replace(one, lives=[]) for one in word.partial_restores]
        before(self, msgspec.structs.replace(word, partial_restores=nobody))

    patch.setattr(Client, "restore_partly", restore_partly)


def three_steps_early(patch: pytest.MonkeyPatch) -> None:
    """A slot goes on some steps before the others, which trainers may not have any more."""
    before = SlotRestore.proceed

    def proceed(self: SlotRestore) -> None:
        host = self._host
        step, host.resume_step = host.resume_step, host.resume_step - 3  # type: ignore[misc]
        before(self)
        host.resume_step = step  # type: ignore[misc]

    patch.setattr(SlotRestore, "proceed", proceed)


def one_step_late(patch: pytest.MonkeyPatch) -> None:
    """A slot goes on after a step that others have not applied."""
    before = SlotRestore.proceed

    def proceed(self: SlotRestore) -> None:
        host = self._host
        step, host.resume_step = host.resume_step, host.resume_step + 1  # type: ignore[misc]
        before(self)
        host.resume_step = step  # type: ignore[misc]

    patch.setattr(SlotRestore, "proceed", proceed)


def survivors_count_as_healthy(patch: pytest.MonkeyPatch) -> None:
    """Slots whose parities are gone are taken for whole, and others are repaired from them."""
    before = placement.SlotTable.restore_partly

    def restore_partly(self: Any, found: Any, why: str) -> None:
        healthy = [place.healthy for place in self.slots]
        before(self, found, why)
        anew = {slot for one in self._partial.partial_restores for slot, _, _ in one.lives}
        for i, place in enumerate(self.slots):
            if i not in anew and healthy[i]:
                self.slots[i] = msgspec.structs.replace(place, healthy=True)

    patch.setattr(placement.SlotTable, "restore_partly", restore_partly)


def survivors_do_not_say_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """They were reported as whole before, and are not looked at again."""
    before = Slot.on_partial_restore

    def on_partial_restore(self: Slot, partial_restore: messages.PartialRestore) -> None:
        before(self, partial_restore)
        self.reported = True

    patch.setattr(Slot, "on_partial_restore", on_partial_restore)


def lost_twice_counts_twice(patch: pytest.MonkeyPatch) -> None:
    def lost_steps(partial_restores: Any, slots: int) -> list[int]:
        found = [0] * slots
        for one in partial_restores:
            for slot, _, at in one.lives:
                found[slot] += (at or one.done) - one.done + 1
        return found

    patch.setattr(partial, "lost_steps", lost_steps)


MUTATIONS: list[Any] = [
    parities_stay,
    parities_are_not_encoded_again,
    folds_are_not_forgotten,
    same_era,
    only_what_was_not_acknowledged,
    three_steps_early,
    one_step_late,
    survivors_do_not_say_rebuilt,
    lost_twice_counts_twice,
    survivors_count_as_healthy,
]


def checked() -> dict[str, Callable[[], None]]:
    return {str(schedule): functools.partial(go, schedule) for schedule in schedules()}


def go(schedule: dict[str, Any]) -> None:
    run = Partial(**schedule)
    run.go()
    check(run)


def test_all_schedules_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_trainers, "EVENTS_MOST", EVENTS_MOST)
    assert first_failure(checked()) == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_rule_is_missed(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_trainers, "EVENTS_MOST", EVENTS_MOST)
    mutation(monkeypatch)
    failure = first_failure(checked())
    print(mutation.__name__, failure)
    assert failure != ""
