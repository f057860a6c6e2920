"""Who training waits for most is named, and nobody else: which servers limp, how many, when, what happens beside."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from coordinator_harness import Harness
from harness import Scenario, SimulatedCluster

from torch_ecrec.coordinator.slowness import WINDOW_S, WINDOWS, Slowness
from torch_ecrec.observe.text import format_status
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.status import Report, WaitedFor
from torch_ecrec.protocol.waits import ServerWaits
from torch_ecrec.spec.job import CodeSpec

BEAT_S = 1.0
DELAYS_S = 0.02, 0.06  # of messages: a step takes a fifth of a second, and few make a virtual minute
LIMPS_S = 0.1  # for each message: a step takes more than a second
NAMED_S = WINDOWS * WINDOW_S
LONG_S = NAMED_S + 2 * WINDOW_S  # in which who limps is named


@pytest.fixture(autouse=True)
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.network.DELAY_S", DELAYS_S)
    monkeypatch.setattr("harness.network.LATE_S", DELAYS_S)


class Limping(dict[str, Callable[..., None]]):
    """The handlers of a network: what some servers do takes them long, one message after the other.

    Args:
        cluster: whose.
        who: servers.
        from_s, until_s: when they limp.
    """

    def __init__(self, cluster: SimulatedCluster, who: Collection[str], from_s: float, until_s: float) -> None:
        super().__init__(cluster.network.handlers)
        self._network, self._who, self._from_s, self._until_s = cluster.network, who, from_s, until_s
        self._free_s: dict[str, float] = {}

    def __getitem__(self, name: str) -> Callable[..., None]:
        handle, clock = super().__getitem__(name), self._network.clock
        free_s = self._free_s.get(name, 0.0)
        if name not in self._who or not (self._from_s <= clock.now_s < self._until_s or clock.now_s < free_s):
            return handle

        def handle_late(*words: Any) -> None:
            self._free_s[name] = max(clock.now_s, free_s) + LIMPS_S
            clock.later(self._free_s[name] - clock.now_s, lambda: name in self._network.dead or handle(*words))

        return handle_late


class Watched(SimulatedCluster):
    """A cluster whose members send heartbeats, trainers with those for whom they waited."""

    def __init__(self, scenario: Scenario, who: Collection[str], from_s: float = 1.0, until_s: float = 1e9) -> None:
        super().__init__(scenario)
        self.network.handlers = Limping(self, who, from_s, until_s)
        self._beat()

    def _beat(self) -> None:
        for name, client in self.clients.items():
            if name not in self.network.dead:
                report = Report(waits=client.waits.take())
                self.plane.tell(self.process_of[name], messages.Beat(report))
        for name, host in self.hosts.items():
            if name not in self.network.dead:
                self.plane.tell(self.process_of[name], messages.Beat(host.report()))
        self.network.clock.later(BEAT_S, self._beat)

    def go_for(self, seconds: float) -> Watched:
        """So many, of a run that is not at its end then."""
        while self.network.clock.now_s < seconds:
            assert not self._run_trainers(), "it has more steps than that"
            assert self.network.clock.advance()
        self.verify()
        return self

    def told(self, kind: str) -> list[str]:
        return [event["member"] for event in self.run.events if event["event"] == kind]


SMALL = Scenario(steps=1000, call_timeout_s=10.0, asks_ahead=False)  # who limps does so by the message
FOUR = replace(SMALL, code=CodeSpec(4, 2, 2))


@pytest.mark.parametrize(
    ("slow", "trainers"), [("server-0", 1), ("server-1", 1), ("server-2", 1), ("server-0", 2), ("server-1", 3)]
)
def test_the_one_that_limps_is_named_and_nobody_else(slow: str, trainers: int) -> None:
    cluster = Watched(replace(SMALL, trainers=trainers), [slow]).go_for(LONG_S)
    assert cluster.told("slow") == [slow]


def test_two_of_four_that_limp_are_named() -> None:
    who = ["server-1", "server-2"]
    cluster = Watched(FOUR, who).go_for(LONG_S)
    assert sorted(cluster.told("slow")) == who


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_nobody_is_named_where_all_are_well(noise: float) -> None:
    """Nor where messages are lost now and then, which makes somebody wait for a time limit."""
    cluster = Watched(replace(SMALL, noise=noise, call_timeout_s=1.0), [])
    assert not cluster.go_for(LONG_S).told("slow")


def test_nobody_is_named_where_all_are_as_slow() -> None:
    cluster = Watched(SMALL, [f"server-{i}" for i in range(4)])
    assert not cluster.go_for(LONG_S).told("slow")


@pytest.mark.parametrize("slot", [0, 1])
def test_what_is_lost_beside_it_changes_nothing(slot: int) -> None:
    """The host of a slot dies meanwhile: if it is the one that limps, nobody does any more."""
    cluster = Watched(replace(SMALL, kills=((slot, 12),), reborn=True), ["server-1"]).go_for(2 * LONG_S)
    assert cluster.run.kills == 1 and cluster.told("slow") == ["server-1"] * (slot != 1)


def test_it_is_drained_where_that_is_wanted_and_a_spare_is_there() -> None:
    cluster = Watched(replace(SMALL, drain_slow=True), ["server-1"]).go_for(LONG_S + 10.0)
    assert cluster.told("slow") == cluster.told("draining") == cluster.told("drained") == ["server-1"]
    assert [place.server for place in cluster.coordinator.slots] == ["server-0", "server-3", "server-2"]


# the coordinator's judgement, word by word -------------------------------------------------------------------------


class Judged(Harness):
    """A coordinator that is told for whom its trainers have waited, second by second."""

    def seconds(self, count: int, **late_s: float) -> Judged:
        """So many pass. `late_s`: of each second, for how long which server was late; 2 lookups are made in each."""
        for _ in range(count):
            self.second()
            said = {name.replace("_", "-"): value for name, value in late_s.items()}
            waits = {"over_s": 1.0, "lookups": 2, "usual_s": 0.01, "late_s": said}
            for rank in range(self.job.trainers):
                self.say(f"trainer-{rank}", type="beat", report={"waits": waits})
        return self

    def second(self) -> None:
        """One passes, in which servers say that they live."""
        for _ in range(4):
            self.now_s += 0.25
            self.core.on_tick(self.now_s)
        for member in self.core.members.values():
            if member.role == "server" and member.alive:
                self.say(member.name, type="beat")

    def named(self) -> list[str]:
        return [event["member"] for event in self.events if event["event"] == "slow"]


ENOUGH = int(LONG_S)


def test_the_judgement_takes_all_its_windows() -> None:
    h = Judged()
    h.start()
    h.seconds(int(NAMED_S) - 1, server_1=0.9)
    assert not h.named()
    h.seconds(int(2 * WINDOW_S), server_1=0.9)
    assert h.named() == ["server-1"]
    member = next(m for m in h.core.status(h.now_s).members if m.name == "server-1")
    assert msgspec.structs.asdict(member.slow) == {
        "share": pytest.approx(0.9),
        "late_s": pytest.approx(0.45),
        "usual_s": 0.005,
    }
    text = format_status(h.core.status(h.now_s))
    assert "SLOW: training waits for server-1 90% of the time" in text and "torch-ecrec drain server-1" in text
    assert "serving, slow" in text


@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.4])
def test_who_is_not_waited_for_most_of_the_time_is_not_named(late_s: float) -> None:
    h = Judged()
    h.start()
    assert not h.seconds(3 * ENOUGH, server_1=late_s).named()


@pytest.mark.parametrize(
    ("held_s", "late_s", "named"),
    [
        (0.6, {"server-0": 0.9, "server-2": 0.8}, True),
        (0.6, {"server-0": 0.9, "server-2": 0.1}, False),  # the way between the two is slow
        (0.6, {"server-1": 0.9}, False),  # it does not judge itself
        (0.05, {"server-0": 0.9, "server-2": 0.9}, False),  # hardly anything waits for acknowledgments
        (0.6, {}, False),  # all are as slow
    ],
)
def test_trainers_that_wait_for_acknowledgments_wait_for_whom_servers_name(
    held_s: float, late_s: dict[str, float], named: bool
) -> None:
    h = Judged()
    h.start()
    for _ in range(ENOUGH):
        for rank in range(h.job.trainers):
            late = {"server-1": 0.1}
            waits = {"over_s": 1.0, "lookups": 1, "usual_s": 0.01, "late_s": late, "held_s": held_s}
            h.say(f"trainer-{rank}", type="beat", report={"waits": waits})
        for rank in range(3):
            late = {"server-1": late_s.get(f"server-{rank}", 0.0)}
            waits = {"over_s": 1.0, "lookups": 1, "usual_s": 0.01, "late_s": late}
            h.say(f"server-{rank}", type="beat", report={"waits": waits})
        h.second()
    assert h.named() == ["server-1"] * named


def test_windows_in_which_it_is_quiet_do_not_clear_it() -> None:
    """A server that hardly runs is not heard of now and then."""
    slowness, named = Slowness(), list[str]()
    for tick in range(2 * ENOUGH * 4):
        slowness.on_report("trainer-0", True, WaitedFor(0.25, 1, 0.01, {"server-1": 0.2}))
        quiet = {"server-1"} if tick % 40 == 10 else set()
        named += slowness.on_tick({"server-0", "server-1", "server-2"}, (), quiet, 0.25 * tick)[0]
    assert named == ["server-1"]


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("spares", [0, 1])
def test_it_is_drained_where_somebody_can_take_its_slots_and_that_is_wanted(wanted: bool, spares: int) -> None:
    h = Judged(spares=spares, drain_slow=wanted)
    h.start(servers=3 + spares)
    h.seconds(ENOUGH, server_1=0.9)
    assert h.named() == ["server-1"]
    assert h.core.members["server-1"].draining == (wanted and spares > 0)
    assert [e["member"] for e in h.events if e["event"] == "draining"] == ["server-1"] * (wanted and spares > 0)


def test_who_is_well_again_is_named_no_more() -> None:
    h = Judged()
    h.start()
    h.seconds(ENOUGH, server_1=0.9).seconds(ENOUGH, server_1=0.4)
    assert "not_slow" not in [event["event"] for event in h.events], "not as soon as it is a little better"
    h.seconds(ENOUGH)
    assert [event["member"] for event in h.events if event["event"] == "not_slow"] == ["server-1"]
    assert h.seconds(ENOUGH, server_1=0.9).named() == ["server-1", "server-1"]


@pytest.mark.parametrize("begin", range(5))
@pytest.mark.parametrize("seconds", range(1, 11))
def test_a_pause_that_is_shorter_than_a_lease_is_no_limp(begin: int, seconds: int) -> None:
    """Whatever part of which windows it fills."""
    h = Judged()
    h.start()
    assert not h.seconds(begin + 5).seconds(seconds, server_1=1.0).seconds(ENOUGH).named()


@pytest.mark.parametrize("who", [("server_0",), ("server_2",), ("server_0", "server_1"), ("server_1", "server_2")])
@pytest.mark.parametrize("begin", range(5))
def test_all_who_limp_are_named_whenever_they_begin(begin: int, who: tuple[str, ...]) -> None:
    h = Judged()
    h.start()
    h.seconds(begin).seconds(ENOUGH, **dict.fromkeys(who, 0.8))
    assert h.named() == [name.replace("_", "-") for name in who]


def test_who_rebuilds_is_not_called_slow_for_that() -> None:
    h = Judged()
    h.start()
    h.lose("server-1")
    assert not h.seconds(ENOUGH, server_3=0.9).named(), "it rebuilds slot 1"
    h.rebuilt(1)
    assert h.seconds(ENOUGH, server_3=0.9).named() == ["server-3"], "it has long been done, and is late all the same"


def test_who_is_to_have_a_slot_or_to_give_one_is_not_called_slow_for_that() -> None:
    h = Judged()
    h.start()
    h.core.drain("server-0", False)
    assert not h.seconds(ENOUGH, server_0=0.9, server_3=0.6).named()


def test_a_coordinator_that_stood_still_judges_nobody() -> None:
    h = Judged()
    h.start()
    for _ in range(10):
        h.seconds(4, server_1=0.9)
        h.now_s += 3.0
    assert not h.named()


def test_one_trainer_that_waits_is_outvoted_by_those_that_do_not() -> None:
    """It is the way between the two that is slow, or the trainer."""
    h = Judged(trainers=3)
    h.start()
    for _ in range(ENOUGH):
        for rank in range(3):
            late = {"server-1": 0.9} if rank == 0 else {}
            waits = {"over_s": 1.0, "lookups": 2, "usual_s": 0.01, "late_s": late}
            h.say(f"trainer-{rank}", type="beat", report={"waits": waits})
        h.second()
    assert not h.named()


# what a trainer notes -----------------------------------------------------------------------------------------------


def test_a_server_is_late_once_half_of_the_others_have_answered() -> None:
    waits = ServerWaits(0.0)
    one = waits.asked(["a", "b", "c"], 1.0)
    waits.answered(one, "b", 1.2)
    waits.answered(one, "c", 1.3)
    waits.answered(one, "a", 2.2)
    found = waits.take(5.0)
    assert (found.over_s, found.lookups, found.usual_s) == (5.0, 1, pytest.approx(0.2))
    assert found.late_s == {"a": pytest.approx(1.0), "c": pytest.approx(0.1)}
    assert waits.take(6.0) == WaitedFor(1.0, 0, 0.0, {})


def test_an_answer_that_is_out_counts_before_it_comes_and_once() -> None:
    waits = ServerWaits(0.0)
    one, two = waits.asked(["a", "b"], 0.0), waits.asked(["a", "b"], 0.5)
    waits.answered(one, "b", 1.0)
    waits.answered(two, "b", 1.0)
    assert waits.take(2.0).late_s == {"a": 1.0}, "two wait for it, and a second has passed"
    waits.answered(one, "a", 3.0)
    waits.answered(two, "a", 4.0)
    assert waits.take(4.0).late_s == {"a": 2.0}


def test_what_is_given_up_is_waited_for_no_longer() -> None:
    for end in (lambda waits, one: waits.end(one, 2.0), lambda waits, one: waits.end_all(2.0)):
        waits = ServerWaits(0.0)
        one = waits.asked(["a", "b", "b"], 0.0)
        waits.answered(one, "b", 0.5)
        assert waits.take(0.6).late_s == {}, "b has another slot, whose answer is out"
        waits.answered(one, "b", 1.0)
        end(waits, one)
        waits.answered(one, "a", 9.0)
        assert waits.take(10.0).late_s == {"a": 1.0}


def test_of_one_server_nobody_can_say_that_it_is_late() -> None:
    waits = ServerWaits(0.0)
    waits.answered(waits.asked(["a", "a"], 0.0), "a", 1.0)
    assert waits.take(2.0) == WaitedFor(2.0, 0, 0.0, {})
