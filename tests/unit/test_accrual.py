"""How long a silence is normal: learned of arrivals that are steady, in bursts, with pauses, of a loaded machine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from statistics import NormalDist

import pytest

from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.suspicion import SILENT_S, Suspicion
from torch_ecrec.transport.accrual import ENOUGH, STRETCH, WINDOW, Accrual
from torch_ecrec.transport.reachability import Reachability

FIRST_S, LEAST_S, MOST_S = 1.5, 0.75, 5.0
BEAT_S = 0.25


def accrual(silences: Iterable[float] = ()) -> Accrual:
    one = Accrual(FIRST_S, LEAST_S, MOST_S)
    for silence_s in silences:
        one.ended(silence_s)
    return one


def wrong(silences: list[float]) -> int:
    """How many of these silences, all of which ended, were taken for one that does not."""
    one, found = accrual(), 0
    for silence_s in silences:
        found += one.is_suspicious(silence_s)
        one.ended(silence_s)
    return found


def steady(rng: random.Random) -> Iterator[float]:
    while True:
        yield BEAT_S + rng.uniform(0.0, 0.02)


def bursts(rng: random.Random) -> Iterator[float]:
    """A slow reader: nothing for up to 1.2 s, and then all at once."""
    while True:
        pause_s = rng.uniform(0.6, 1.2)
        yield pause_s
        yield from [0.001] * (int(pause_s / BEAT_S) - 1)


def pauses(rng: random.Random) -> Iterator[float]:
    """A garbage collector that stops everything for 1.3 s, now and then."""
    while True:
        yield 1.0 + rng.uniform(0.2, 0.3) if rng.random() < 0.02 else BEAT_S + rng.uniform(0.0, 0.02)


def loaded(rng: random.Random) -> Iterator[float]:
    """Eight processes to a core: each heartbeat waits its turn, and delays have a long tail."""
    while True:
        yield BEAT_S + rng.expovariate(1 / 0.15)


def lossy(rng: random.Random) -> Iterator[float]:
    """100 ms each way, and one of 50 packets is lost: sent again after 0.2, 0.4, ... s more."""
    while True:
        again = 0
        while rng.random() < 0.04:
            again += 1
        yield BEAT_S + rng.uniform(0.0, 0.01) + 0.4 * ((1 << again) - 1)


def test_nothing_is_known_at_first() -> None:
    assert accrual().limit_s == accrual([0.25] * (ENOUGH - 1)).limit_s == FIRST_S
    assert accrual([0.25] * ENOUGH).limit_s == LEAST_S


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("arrivals", [steady, bursts, pauses, loaded, lossy], ids=lambda one: one.__name__)
def test_few_silences_that_end_are_taken_for_one_that_does_not(arrivals, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Of 30 minutes of heartbeats; and then a second witness is asked still."""
    found = arrivals(random.Random(seed))
    silences = [next(found) for _ in range(7200)]
    assert wrong(silences) <= (0 if arrivals in (steady, bursts) else 5)
    assert accrual(silences[:WINDOW]).limit_s <= MOST_S


def test_a_quiet_network_is_fast_and_a_loaded_one_slow() -> None:
    limits = {}
    for arrivals in (steady, bursts, loaded):
        found = arrivals(random.Random(1))
        limits[arrivals.__name__] = accrual(next(found) for _ in range(WINDOW)).limit_s
    assert limits["steady"] == LEAST_S < FIRST_S and 1.0 < limits["loaded"] < 3.0 and limits["bursts"] > 1.4


def test_a_pause_is_remembered_and_forgotten() -> None:
    one = accrual([BEAT_S] * WINDOW)
    one.ended(1.2)
    assert one.limit_s == pytest.approx(1.2 * STRETCH)
    for _ in range(WINDOW):
        one.ended(BEAT_S)
    assert one.limit_s == LEAST_S


def test_no_silence_is_normal_that_is_longer_than_the_most() -> None:
    one = accrual([MOST_S] * WINDOW)
    assert one.limit_s == MOST_S and one.is_suspicious(MOST_S + 0.01)


def test_an_outage_that_ended_does_not_hide_the_next_one() -> None:
    """A host that was cut off for ten seconds was given 5 s for five minutes, where its answers come at once."""
    one = accrual([BEAT_S] * ENOUGH)
    one.ended(10.0)
    assert one.limit_s == LEAST_S


def test_the_limit_is_where_phi_is_8() -> None:
    """Where deviations are large, and the longest is not much longer than others."""
    one = accrual([0.5, 1.5] * ENOUGH)
    later = 1.0 - NormalDist(1.0, 0.5).cdf(one.limit_s)
    assert -math.log10(later) == pytest.approx(8.0, abs=0.01)


def test_a_host_whose_answers_come_at_once_is_unreachable_soon() -> None:
    hosts, now_s = Reachability(), 0.0
    hosts.keep(["x"])
    while now_s < 10.0:
        for host in hosts.due(now_s):
            hosts.heard(host, now_s + 0.001)
        now_s += 0.1
        assert hosts.silent(now_s) == []
    gone_s = now_s
    while not hosts.silent(now_s):
        hosts.due(now_s)
        now_s += 0.1
    assert now_s - gone_s <= 1.2 < SILENT_S


def test_a_member_that_was_regular_is_missed_soon_and_another_is_not() -> None:
    known = {name: MemberRecord(name, "server", -1, 1, name, 0.0, 0.0, address=(name, 1)) for name in ("a", "b", "c")}
    suspicion, rng = Suspicion(), random.Random(3)
    now_s, due = 0.0, {"a": 0.0, "b": 0.0, "c": 0.0}
    while now_s < 60.0:
        for name in [name for name in due if due[name] <= now_s]:
            suspicion.on_beat(name, [], known, now_s)
            known[name].heard_s = now_s
            due[name] = now_s + BEAT_S + (rng.expovariate(1 / 0.15) if name == "b" else 0.0)
        now_s += 0.05
    assert suspicion.limit_s("c") == LEAST_S and suspicion.limit_s("b") > 1.0 and suspicion.limit_s("?") == SILENT_S
    suspicion.on_beat("a", ["b", "c"], known, now_s)
    known["d"] = MemberRecord("d", "server", -1, 1, "d", 0.0, 0.0, address=("d", 1))
    known["b"].heard_s = known["c"].heard_s = now_s
    known["a"].heard_s = known["d"].heard_s = now_s + 0.6
    assert suspicion.silent(known, now_s + 0.7) == {}
    assert suspicion.silent(known, now_s + 0.8) == {"c": "a"}, "b is like that"
