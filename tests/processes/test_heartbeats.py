"""Heartbeats: they wait for nothing that computes, and stop where the member hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import test_member
from conftest import wait_until
from test_member import LIMIT_S, WELCOME, Coordinator, join

from torch_ecrec.errors import Fenced
from torch_ecrec.processes import heartbeats as module
from torch_ecrec.processes.heartbeats import HANGS_S, Pulse
from torch_ecrec.processes.member import Member
from torch_ecrec.runtime import cores
from torch_ecrec.spec.settings import Settings

threads = test_member.threads
QUIET_S = 1.5  # six heartbeats
Joined: TypeAlias = tuple[Coordinator, Member]


@pytest.fixture
def joined(threads: None) -> Iterator[Joined]:
    """A member that may send heartbeats, and who gets them."""
    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    member = join(coordinator)
    yield coordinator, member
    member.close()
    coordinator.end()


def beats(coordinator: Coordinator, count: int) -> None:
    """Waits for so many from now on."""
    while not coordinator.told.empty():
        coordinator.told.get()
    for _ in range(count):
        assert coordinator.told.get(timeout=LIMIT_S / 2)["type"] == "beat"


def is_silent(coordinator: Coordinator) -> bool:
    """Whether nothing comes for several heartbeats."""
    try:
        coordinator.told.get(timeout=QUIET_S)
    except queue.Empty:
        return True
    return False


def in_the_node(member: Member, action: Callable[[], object]) -> None:
    threading.Thread(target=lambda: member.node.run(action), daemon=True).start()


def in_its_timers(member: Member, action: Callable[[], object]) -> None:
    member.later(0.0, lambda: action() and None)


@pytest.mark.parametrize("where", [in_the_node, in_its_timers])
def test_a_heartbeat_waits_for_nothing_that_is_computed(joined: Joined, where: Callable[..., None]) -> None:
    """The node draws the first values of a table of many GB, say, and its timers wait for it."""
    coordinator, member = joined
    began, over = threading.Event(), threading.Event()

    def compute() -> None:
        began.set()
        while not over.is_set():
            sum(range(1000))

    where(member, compute)
    assert began.wait(LIMIT_S), "the fault fires"
    beats(coordinator, int(4 * HANGS_S / 0.25))
    over.set()


@pytest.mark.parametrize("where", [in_the_node, in_its_timers])
def test_who_hangs_falls_silent_until_it_goes_on(joined: Joined, where: Callable[..., None]) -> None:
    """A deadlock: nobody would ever take it for lost, and training would wait for it."""
    coordinator, member = joined
    began, over = threading.Event(), threading.Event()
    where(member, lambda: (began.set(), over.wait(LIMIT_S)))
    assert began.wait(LIMIT_S), "the fault fires"
    wait_until(lambda: is_silent(coordinator), LIMIT_S, "no heartbeats")
    over.set()
    beats(coordinator, 3)


def test_who_cannot_even_hear_that_it_was_taken_for_lost_ends(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What the coordinator says waits for the node, too."""
    ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    monkeypatch.setattr(module, "end_with_stacks", lambda text, code: ends.put((text, code)))
    monkeypatch.setattr(module, "ENDS_S", -Settings().lease_s + 2.0)
    _, member = request.getfixturevalue("joined")  # with these
    began, over = threading.Event(), threading.Event()
    in_the_node(member, lambda: (began.set(), over.wait(LIMIT_S)))
    assert began.wait(LIMIT_S), "the fault fires"
    assert ends.get(timeout=LIMIT_S) == ("torch-ecrec: this process has hung for 2 s", Fenced.exit_code)
    over.set()


def test_one_that_was_stopped_does_not_take_that_for_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up, and finds that its pulse is not back, and that it has not computed."""
    now_s, sent = [1000.0], []
    monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(module, "wanted_s", lambda thread: 0.0)
    timers: Any = SimpleNamespace(thread_id=0, later=lambda delay_s, action: sent.append(action))
    node: Any = SimpleNamespace(turn_of=0, run=lambda action: action())
    pulse = Pulse(timers, lambda: node, 0.25)
    assert pulse.beats() and len(sent) == 1, "the pulse is sent, and does not come back"
    now_s[0] += 1000.0
    assert pulse.beats(), "it slept"

    def later() -> bool:
        now_s[0] += 0.25
        return pulse.beats()

    assert [later() for _ in range(3)] == [True, False, False], "awake, it hangs"
    sent.pop()()
    assert later() and len(sent) == 1, "and goes on"
