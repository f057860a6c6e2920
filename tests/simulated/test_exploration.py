"""Every state of very small clusters, and rules without which some of them are wrong."""

import mutations
import pytest
import test_troubled_tiers_mutations as of_tiers
from harness import exploration
from harness.exploration import Budget, Exploration, Violation
from harness.tiers import AskedTier

from torch_ecrec.coordinator import departures

FOLDS = frozenset({"Fold of slot 0"})
PUSHES = FOLDS | {"Push of trainer 1"}
DISK = frozenset({"disk"})
SMALL = {
    "nobody dies": Exploration(1, Budget(), frozenset({"Push of trainer 1", "Fold", "Snapshot of trainer 1"})),
    "a server": Exploration(1, Budget(servers=1), FOLDS),
    "a server, pushes late": Exploration(1, Budget(servers=1), PUSHES),
    "a server, in two steps": Exploration(2, Budget(servers=1), frozenset()),  # rows travel with the first's pushes
    "a server, in two steps, pushes late": Exploration(2, Budget(servers=1), frozenset({"Push of trainer 0"})),
    "the trainers, in one step": Exploration(1, Budget(trainers=1), FOLDS),
    "the trainers": Exploration(2, Budget(trainers=1), FOLDS),
    "a zombie": Exploration(1, Budget(leases=1), FOLDS | {"fatal", "Push of trainer 1"}),
    "the coordinator": Exploration(2, Budget(coordinators=1), FOLDS),
    "a cut": Exploration(1, Budget(cuts=1), frozenset()),
    "loading": Exploration(0, Budget(), FOLDS | {"Load"}, loads=2),
    "a server while loading": Exploration(0, Budget(servers=1), FOLDS, loads=1),
    "the coordinator while loading": Exploration(0, Budget(coordinators=1), frozenset({"loaded"}), loads=1),
    "a server and the coordinator": Exploration(1, Budget(servers=1, coordinators=1), frozenset()),
    "two records in memory": Exploration(5, Budget(), DISK, frames=2),
    "a server, one record in memory": Exploration(3, Budget(servers=1), DISK, frames=1),
}
ON_DISK = Exploration(4, Budget(), DISK, frames=1)
# Larger; what is to be found is found early.
HEARD_LATE = Exploration(1, Budget(leases=1), frozenset({"Folded", "placement to server"}))


LONG = (  # half a minute
    "a server, pushes late",
    "a server, in two steps, pushes late",
    "a zombie",
    "the trainers",
    "a server and the coordinator",
    "a server, one record in memory",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in SMALL])
def test_all_states_hold(name: str) -> None:
    found, line = exploration.explore(SMALL[name])
    print(line)
    assert found.exhausted and found.ends and found.states > 1000
    assert found.ends == 1 or name != "nobody dies", "that time has passed is no other end"


def test_records_come_from_disks_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an exploration with few frames shows nothing."""
    asked: list[object] = []
    before = AskedTier.answer
    monkeypatch.setattr(AskedTier, "answer", lambda self: (asked.append(self), before(self)))
    found = ON_DISK.explorer().run()
    assert found.exhausted and len(asked) > 20


@pytest.mark.parametrize(
    ("mutate", "explored"),
    [
        pytest.param(mutations.stale_confirmation, HEARD_LATE, marks=pytest.mark.slow),  # found by schedules every day
        (mutations.no_fence, SMALL["a zombie"]),
        (mutations.no_undo, SMALL["a server"]),
        (mutations.early_ack, SMALL["a server"]),
        pytest.param(mutations.no_fence, SMALL["a server, pushes late"], marks=pytest.mark.slow),
        (mutations.no_era, SMALL["the trainers"]),
        (mutations.records_not_undone, SMALL["the trainers"]),
        (mutations.parities_not_undone, SMALL["the trainers"]),
        (of_tiers.frames_in_use_go, ON_DISK),
        (of_tiers.what_is_dirty_is_dropped, ON_DISK),
        (of_tiers.folds_are_taken_for_records, ON_DISK),
        (of_tiers.what_comes_late_is_taken, ON_DISK),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mutation_is_found(mutate, explored, monkeypatch):
    explorer = explored.explorer()  # it knows what an undisturbed run gives
    mutate(monkeypatch)
    with pytest.raises(Violation) as found:
        explorer.run(seconds=600)
    print(found.value)


def test_a_slot_moves_and_all_states_hold() -> None:
    """Few of them, but at the end it is elsewhere."""
    explorer = Exploration(1, Budget(moves=1), exploration.OF_A_MOVE).explorer()
    found = explorer.run()
    assert found.exhausted and found.ends and found.states > 500
    placed = [local.view["slots placed"] for local in explorer.states.locals.things if "slots placed" in local.view]
    assert {server for places in placed for server, _ in places} == {f"server-{i}" for i in range(4)}


def test_a_cut_that_nothing_is_done_about_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = SMALL["a cut"].explorer()
    monkeypatch.setattr(departures, "act_on_complaints", lambda *_: None)
    with pytest.raises(Violation, match="the end cannot be reached") as found:
        explorer.run(seconds=600)
    assert "cut" in str(found.value)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(len(exploration.EXPLORATIONS)))
def test_all_states_of_larger_ones_hold(number):
    found, line = exploration.explore(exploration.EXPLORATIONS[number])
    print(line)
    assert found.exhausted and found.ends
