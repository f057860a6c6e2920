"""Checkpoints of the simulated cluster: whoever dies at any message or write of one, training has the bits that it had,
and whatever counts as a checkpoint has the bits of its step.

The oracle of a checkpoint after step t is a run of t steps that nothing disturbs. Scribes and manifests are virtual
(`tests/harness/checkpoints.py`); all else is the real code. (How parts are stored: `tests/unit/test_storage_*.py`.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured import PLAIN, POLICIES, Checkpointed, check, with_checkpoints
from harness import Fault, SimulationResult
from harness.membership import VirtualProcess
from harness.network import CRASH_COORDINATOR
from harness.scenario import Load
from thinned import in_turns, thinned

from torch_ecrec.coordinator.checkpointing import choose
from torch_ecrec.protocol.messages import Capture as CaptureOrder
from torch_ecrec.protocol.messages import Due, Placed, Release, Shown
from torch_ecrec.records.captured import Captured
from torch_ecrec.server import checkpoints as checkpoints_module
from torch_ecrec.server.capture import Capture
from torch_ecrec.server.service import Host
from torch_ecrec.spec.job import CodeSpec


def events(run: SimulationResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == kind]


@functools.cache
def healthy(policy: str) -> tuple[int, int, int]:
    """An undisturbed run with checkpoints: its messages, its writes, and how many checkpoints count."""
    cluster = Checkpointed(with_checkpoints(PLAIN, policy))
    run = check(cluster)
    assert not events(run, "checkpoint_void")
    return len(run.messages), cluster.shelf.writes, len(cluster.shelf.counts)


# nobody dies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_each_checkpoint_is_of_its_step_while_training_goes_on(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    keep = Captured.keep
    monkeypatch.setattr(Captured, "keep", lambda self, at, of: (keep(self, at, of), kept.append(len(at)))[0])
    cluster = Checkpointed(with_checkpoints(PLAIN, policy))
    run = check(cluster)
    counts = cluster.shelf.counts
    # Of the step that is due, or of a later one where that is the first that all can show (docs/protocol.md).
    assert len(counts) >= 2 and sum(finished.done % 3 == 0 for finished in counts) > len(counts) / 2
    assert len(kept) > 5, "steps came while it was written"
    assert [bool(finished.base) for finished in counts[:2]] == [False, policy != "full"]
    assert [event["name"] for event in events(run, "checkpointed")] == [finished.folder for finished in counts]


def test_a_checkpoint_of_what_has_changed_has_no_more_than_that() -> None:
    scenario = with_checkpoints(dataclasses.replace(PLAIN, touch=0.02, pooled=False))
    cluster = Checkpointed(scenario)
    check(cluster)
    first, second = cluster.shelf.counts[:2]
    rows = {
        finished.folder: sum(
            len(portion.rows_N)
            for slot in finished.parts
            for portion in cluster.shelf.parts[finished.folder, slot].portions
        )
        for finished in (first, second)
    }
    everything = sum(table_group.rows for table_group in scenario.job.table_groups)
    assert rows[first.folder] == everything > rows[second.folder] > 0


@pytest.mark.parametrize("code", [CodeSpec(5, 3, 2), CodeSpec(3, 1, 1, protection="none"), CodeSpec(2, 1, 1)], ids=str)
def test_with_other_codes(code: CodeSpec) -> None:
    cluster = Checkpointed(with_checkpoints(dataclasses.replace(PLAIN, code=code, reborn=False)))
    check(cluster)
    assert len(cluster.shelf.counts) >= 2


def test_by_time_and_with_snapshots_of_some_steps_only() -> None:
    scenario = with_checkpoints(dataclasses.replace(PLAIN, steps=36, snapshot_every=3), every_steps=0, every_s=0.1)
    cluster = Checkpointed(scenario)
    check(cluster)
    assert len(cluster.shelf.counts) >= 2 and all(finished.done % 3 == 0 for finished in cluster.shelf.counts)


def test_a_step_without_a_snapshot_is_made_up_for_by_the_next_one_that_has() -> None:
    """Also after trainers went back: by 4 steps, where every third is kept, would be by 12."""
    scenario = dataclasses.replace(PLAIN, steps=36, snapshot_every=3)
    dones = {}
    for name, more in {"calm": {}, "disturbed": {"random_trainer_kills": 2}}.items():
        cluster = Checkpointed(with_checkpoints(dataclasses.replace(scenario, **more), every_steps=4))
        check(cluster)
        dones[name] = [finished.done for finished in cluster.shelf.counts]
        assert all(done % 3 == 0 for done in dones[name])
    assert cluster.run.trainer_kills == 2
    assert set(dones["calm"]) - {12, 24, 36} and set(dones["disturbed"]) - {12, 24, 36}, dones


def test_loads_before_and_within_training() -> None:
    loads = dataclasses.replace(PLAIN, loads=(Load(0, 0, 9), Load(1, 0, 5)))
    cluster = Checkpointed(with_checkpoints(loads))
    check(cluster)
    assert len(cluster.shelf.counts) >= 2
    within = dataclasses.replace(PLAIN, overwrites=((4, False, Load(0, 3, 9, writers="rows")),))
    cluster = Checkpointed(with_checkpoints(within, every_steps=4))
    check(cluster)
    first = cluster.shelf.counts[0]
    assert (first.done, first.step) == (4, 5), "what the turn of a step loads belongs to it"


def test_without_snapshots_none_is_written_and_the_status_says_so() -> None:
    cluster = Checkpointed(with_checkpoints(PLAIN, every_steps=100))
    cluster.go()
    told = cluster.coordinator._state.checkpointing
    now_s, number = cluster.network.clock.now_s, len(cluster.shelf.counts)
    told._due = 1000
    told.on_tick(now_s + 1, whole=True)
    assert told._running is not None and told._running.order is None
    for slot in range(3):
        told.on_word(shown(slot, 5, 9, checkpoint=told._running.number), whole=True)
    told.on_tick(now_s + 40, whole=True)
    assert "snapshot" in told.failing and len(cluster.shelf.counts) == number


# somebody dies ------------------------------------------------------------------------------------

ACTS: dict[str, Callable[[Checkpointed, str], None]] = {
    "its server": Checkpointed.kill_server,
    "another server": lambda cluster, what: cluster.kill_server(what, 1),
    "a trainer": lambda cluster, what: cluster.kill_trainer(),
    "the coordinator": lambda cluster, what: cluster.kill_coordinator(),
    "a trainer and a server": lambda cluster, what: (cluster.kill_trainer(), cluster.kill_server(what))[0],
}


def sweep_writes(who: str, policy: str, every: int) -> None:
    """A checkpoint is lost at most, and the next one comes."""
    _, writes, most = healthy(policy)
    became: Counter[int] = Counter()
    numbers = range(0, writes, every)
    for number in numbers:
        cluster = Checkpointed(with_checkpoints(PLAIN, policy), at=number, act=ACTS[who])
        check(cluster)
        assert cluster.fired, number
        became[len(cluster.shelf.counts)] += 1
    print(f"{writes} writes; checkpoints that count: {dict(became)}")
    assert most >= 2 and len(numbers) > 5
    assert sum(count * times for count, times in became.items()) > len(numbers), "most come in spite of it"


@pytest.mark.parametrize(("who", "policy"), thinned(list(ACTS), POLICIES, 3))
def test_somebody_dies_at_writes_of_a_checkpoint(who: str, policy: str) -> None:
    """At portions, and before manifests."""
    sweep_writes(who, policy, every=11)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("who", ACTS)
def test_somebody_dies_at_every_write_of_a_checkpoint(who: str, policy: str) -> None:
    sweep_writes(who, policy, every=1)


def sweep_messages(kind: str, every: int) -> None:
    messages, _, _ = healthy("consecutive")
    numbers = range(0, messages, every)
    counts = 0
    for number in numbers:
        cluster = Checkpointed(with_checkpoints(PLAIN), [Fault(kind, number)])
        check(cluster)
        counts += len(cluster.shelf.counts)
    assert counts > len(numbers)


@pytest.mark.parametrize("kind", ["crash_sender", "crash_receiver", CRASH_COORDINATOR])
def test_somebody_dies_at_messages_while_checkpoints_are_written(kind: str) -> None:
    sweep_messages(kind, every=97)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["crash_sender", "crash_receiver", CRASH_COORDINATOR])
def test_somebody_dies_at_every_message_while_checkpoints_are_written(kind: str) -> None:
    sweep_messages(kind, every=1)


class UntilWritten(Checkpointed):
    """It goes on after the last step until its only checkpoint counts, for a while. `at`, `act`: as ever."""

    SECONDS = 5.0  # virtual

    def __init__(self, at: int = -1, act: Callable[[Checkpointed, str], None] | None = None, **more: Any) -> None:
        super().__init__(with_checkpoints(dataclasses.replace(PLAIN, steps=6, **more), every_steps=4), at=at, act=act)

    def settled(self) -> bool:
        late = self.network.clock.now_s > self.SECONDS
        return super().settled() and (late or bool(self.shelf.counts))


def end_connections(cluster: Checkpointed, what: str) -> None:
    cluster.plane.reset([process.connection for process in cluster.plane.processes if not process.dead])


@pytest.mark.parametrize("coordinators", [1, 2])
def test_a_checkpoint_goes_on_after_all_connections_with_the_coordinator_have_ended(coordinators: int) -> None:
    """For the first time in its life: it is the coordinator that it was."""
    healthy = UntilWritten(coordinators=coordinators)
    check(healthy)
    for at in range(0, healthy.shelf.writes, 3):
        cluster = UntilWritten(at, end_connections, coordinators=coordinators)
        run = check(cluster)
        assert cluster.fired and cluster.network.clock.now_s < 1.0 and not events(run, "checkpoint_void")
        (finished,) = cluster.shelf.counts
        assert finished.done == 4


@pytest.mark.parametrize("who", ["all connections", "the coordinator"])
def test_a_checkpoint_that_is_due_is_written_whoever_has_not_heard_of_that(who: str) -> None:
    """The word is lost with the coordinator, or with the connection. The next one would be due much later."""
    act = end_connections if who == "all connections" else ACTS[who]

    class Lost(UntilWritten):
        lost = 0

        def on_control(self, process: VirtualProcess, word: Any) -> None:
            if isinstance(word, Placed) and not hasattr(self, "tells"):
                self.tells = True
                plane, tell = self.plane, self.plane.tell

                def tell_or_lose(process: VirtualProcess, word: Any) -> None:
                    if isinstance(word, Due) and not self.lost:
                        self.lost += 1
                        act(self, "")
                    tell(process, word)

                plane.tell = tell_or_lose  # type: ignore[method-assign]
            super().on_control(process, word)

    for seed in range(4):
        cluster = Lost(network_seed=seed)
        check(cluster)
        assert cluster.lost and [finished.done >= 4 for finished in cluster.shelf.counts] == [True], seed


def test_the_next_coordinator_writes_what_a_lost_one_had_begun() -> None:
    healthy = UntilWritten()
    check(healthy)
    for at in range(0, healthy.shelf.writes - 1, 3):  # the last one is of the manifest
        cluster = UntilWritten(at, ACTS["the coordinator"])
        check(cluster)
        assert cluster.fired and cluster.run.coordinator_kills == 1 and len(cluster.shelf.counts) == 1, at


def test_a_write_fails() -> None:
    _, writes, _ = healthy("consecutive")
    for number in range(0, writes * 3 // 4, 9):
        scenario = with_checkpoints(PLAIN)
        cluster = Checkpointed(scenario, fails=lambda write, number=number: "no room" if write == number else "")  # type: ignore[misc]
        run = check(cluster)
        (void,) = events(run, "checkpoint_void")
        assert "no room" in void["reason"]


def test_a_store_that_never_works_stops_nothing_and_is_told() -> None:
    cluster = Checkpointed(with_checkpoints(PLAIN), fails=lambda write: "permission denied")
    check(cluster)
    told = cluster.plane.router.status(cluster.network.clock.now_s).checkpoints
    assert not cluster.shelf.counts and "permission denied" in told.failing and told.failing_for_s >= 0


@in_turns("every", 5)
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("counts", [True, False])
def test_a_slot_misses_a_release(counts: bool, policy: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection was gone just then: its next part is there, and holds no less than it would have."""
    tell, missed = Host._on_checkpoint, 0

    def hear(self: Host, word: Any) -> None:
        nonlocal missed
        if isinstance(word, Release) and word.checkpoint == 2 and bool(word.counts) == counts and self.slots:
            missed += 1
        else:
            tell(self, word)

    monkeypatch.setattr(Host, "_on_checkpoint", hear)
    scenario = with_checkpoints(dataclasses.replace(PLAIN, steps=30, touch=0.02), policy)
    for number in [-1] if counts else range(24, 40, every):
        fails = lambda write, number=number: "no room" if write == number else ""  # noqa: E731
        cluster = Checkpointed(scenario, fails=fails)
        run = check(cluster)
        assert len(events(run, "checkpoint_void")) <= (not counts), "a release that was missed costs nothing"
    assert missed >= 3


def test_an_order_that_comes_again_is_carried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when a drain is undone, say. A part that is written again would lack what the first one had taken."""
    tell, again = Host._on_checkpoint, 0

    def hear(self: Host, word: Any) -> None:
        nonlocal again
        tell(self, word)
        if isinstance(word, CaptureOrder):
            again += 1
            for after_s in (0.003, 0.006, 0.01, 0.02):
                cluster.network.clock.later(after_s, lambda: self.run(tell, self, word))

    monkeypatch.setattr(Host, "_on_checkpoint", hear)
    cluster = Checkpointed(with_checkpoints(dataclasses.replace(PLAIN, steps=30, touch=0.02)))
    check(cluster)
    assert again > 3 and len(cluster.shelf.counts) > 1


# what is chosen -----------------------------------------------------------------------------------


def shown(slot: int, floor: int, applied: int, *snapshots: tuple[int, int, list[int]], checkpoint: int = 1) -> Shown:
    return Shown(slot, 0, checkpoint, applied, floor, list(snapshots))


def test_which_step_is_chosen() -> None:
    whole, part = (7, 6, [0, 1]), (8, 7, [0])
    two = {0: shown(0, 5, 9, whole, part), 1: shown(1, 6, 8)}
    assert choose(two, 2, None) == (7, 6, 0)
    assert choose({**two, 1: shown(1, 8, 9)}, 2, None) is None, "slot 1 cannot show it any more"
    assert choose({**two, 1: shown(1, 5, 6)}, 2, None) is None, "slot 1 has not applied it yet"
    later = {**two, 1: shown(1, 6, 8, (8, 7, [0, 1]))}
    assert choose(later, 2, None) == (8, 7, 1)
    assert choose(later, 2, 6) == (7, 6, 0), "the one that is due, where all can show it"
    assert choose(later, 2, 7) == (8, 7, 1) and choose(later, 2, 8) is None, "that one is still to come"


# the sweep bites ----------------------------------------------------------------------------------


def nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Records that change before the scan comes are written as they are then."""
    patch.setattr(Capture, "before_forgetting", lambda self, positions, deltas: None)


def what_came_before_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Steps that were applied when the capture begins count as if they belonged to it."""
    patch.setattr(Captured, "keep", lambda self, positions_U, deltas_UB: None)


def marks_begin_at_the_capture(patch: pytest.MonkeyPatch) -> None:
    """Changes between the step and the capture are in no mark."""
    patch.setattr(checkpoints_module, "mark_changed_", lambda marks, held, after: None)


def marks_of_a_void_one_are_lost(patch: pytest.MonkeyPatch) -> None:
    """What a checkpoint that came to nothing had taken is not in the next one."""

    class Numpy:
        maximum = staticmethod(lambda a, b, out: out)

        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

    patch.setattr(checkpoints_module, "np", Numpy())


@pytest.mark.parametrize(
    "mutate", [nothing_is_kept, what_came_before_is_not_kept, marks_begin_at_the_capture, marks_of_a_void_one_are_lost]
)
def test_mutation_is_found(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    _, writes, _ = healthy("consecutive")
    mutate(monkeypatch)
    for number in range(0, writes, 3):
        fails = lambda write, number=number: "no room" if write == number else ""  # noqa: E731
        cluster = Checkpointed(with_checkpoints(PLAIN), fails=fails)
        try:
            check(cluster)
        except AssertionError as error:
            assert "is not as of step" in str(error)
            return
    raise AssertionError("nothing differs")
