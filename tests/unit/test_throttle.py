"""How fast the background of a rebuild reads, over links of several rates: the rule alone, in virtual time."""

from __future__ import annotations

import heapq

import pytest

from torch_ecrec.durability.throttle import BURST_S, MOST_PROBE_BYTES, PROBE_AGAIN_S, SHARE, Asked, Throttle

READS, CHUNK = 4, 4 << 20
LATENCY_S = 0.002  # until a portion begins to arrive


HERE = 0.2  # of each portion is there already


def rate_of(throttle: Throttle, within_limit: bool = True) -> float:
    """Returns how many bytes/s may be read; 0: as many as there are."""
    pause_s = throttle.pause_s(10_000, within_limit)
    return 10_000 / pause_s if pause_s else 0.0


def probe(throttle: Throttle, took_s: float, now_s: float) -> None:
    count = READS * throttle.portion_bytes(now_s)
    asked = throttle.ask(count, now_s)
    assert asked.is_probe
    throttle.arrive(asked, count, now_s + took_s)


class Link:
    """A rebuild that reads over one link: portions arrive one after another, at its rate.

    Attributes:
        waits_s: how long who asked for a little at some moment, every 10 ms, would have waited for the link.
    """

    def __init__(self, bytes_per_s: float, limit: float, slow_s: float = 0.0, every: int = 0) -> None:
        self.throttle = Throttle(limit, CHUNK, READS)
        self.bytes_per_s, self.slow_s, self.every = bytes_per_s, slow_s, every
        self.now_s = self.free_s = 0.0
        self.read = self.under_way = self.portions = 0
        self.coming: list[tuple[float, int, Asked]] = []
        self.waits_s: list[float] = []
        self.sizes: list[int] = []

    def go(self, until_s: float) -> Link:
        """Reads until then, as `Rebuild` does: at most three portions at once, one until it is known how fast."""
        coming = self.coming
        next_s, look_s = self.now_s, self.now_s
        while self.now_s < until_s:
            at_once = 3 if self.throttle.knows else 1
            if self.under_way < at_once and next_s <= self.now_s:
                count = int((1 - HERE) * READS * self.throttle.portion_bytes(self.now_s))
                asked = self.throttle.ask(count, self.now_s)
                self.portions += 1
                busy_s = self.slow_s if self.every and self.portions % self.every else 0.0  # its host has other work
                self.free_s = max(self.free_s, self.now_s + LATENCY_S + busy_s) + count / self.bytes_per_s
                heapq.heappush(coming, (self.free_s, count, asked))
                self.sizes.append(count)
                self.under_way += 1
                next_s = self.now_s + self.throttle.pause_s(count)
                continue
            moments = [look_s] + [s for s, _, _ in coming[:1]] + ([next_s] if self.under_way < at_once else [])
            self.now_s = min(moment for moment in moments if moment >= self.now_s)
            if look_s <= self.now_s:
                self.waits_s.append(max(0.0, self.free_s - self.now_s))
                look_s += 0.01
            while coming and coming[0][0] <= self.now_s:
                _, count, asked = heapq.heappop(coming)
                self.throttle.arrive(asked, count, self.now_s)
                self.read += count
                self.under_way -= 1
        return self


@pytest.mark.parametrize("rate", [12.5e6, 37.5e6, 125e6])
def test_over_a_link_slower_than_the_limit_a_rebuild_takes_half_and_others_hardly_wait(rate: float) -> None:
    link = Link(rate, limit=400e6).go(20.0)
    assert 0.35 * rate < link.read / 20.0 < 0.65 * rate
    waits_s = sorted(link.waits_s)
    # The least portion takes 42 ms over the slowest link, and the least probe 168 ms.
    assert sum(waits_s) / len(waits_s) < 1.5 * BURST_S and waits_s[len(waits_s) * 9 // 10] < 3 * BURST_S
    assert max(link.sizes) <= READS * MOST_PROBE_BYTES


def test_over_a_fast_link_the_limit_is_what_holds() -> None:
    link = Link(1.25e9, limit=80e6).go(10.0)
    assert 0.95 * 80e6 < link.read / 10.0 < 1.05 * 80e6
    assert max(link.sizes) == int((1 - HERE) * READS * CHUNK), "portions are as large as they may be"


def test_hosts_that_are_slow_now_and_then_are_no_slow_link() -> None:
    """Three of four portions find their host at work for 100 ms; the fastest of some probes counts."""
    link = Link(1.25e9, limit=40e6, slow_s=0.1, every=4).go(30.0)
    assert link.read / 30.0 > 0.7 * 40e6


def test_a_link_that_becomes_slow_is_noticed_and_one_that_becomes_fast_again() -> None:
    link = Link(1.25e9, limit=400e6).go(5.0)
    assert rate_of(link.throttle) == pytest.approx(400e6)
    link.bytes_per_s = 25e6
    link.go(11.0)  # four probes, the first of which waits for portions of a fast link
    assert rate_of(link.throttle) < 1.2 * SHARE * 25e6
    link.bytes_per_s = 1.25e9
    link.go(20.0)
    assert rate_of(link.throttle) == pytest.approx(400e6)


def test_after_a_link_has_stood_still_a_rebuild_goes_on_soon_whatever_it_found() -> None:
    """The first probe was under way meanwhile; requests have waited for many records, which count."""
    throttle = Throttle(400e6, CHUNK, READS)
    probe(throttle, 5.0, 0.0)
    assert rate_of(throttle) < 2e6
    assert throttle.pause_s(200_000_000) == PROBE_AGAIN_S
    assert throttle.pause_s(4_000_000_000) == pytest.approx(10.0), "the limit is one of all that is read"
    probe(throttle, 0.05, 5.0 + PROBE_AGAIN_S)
    assert rate_of(throttle) > 10e6


def test_what_requests_wait_for_is_no_slowness_of_the_link() -> None:
    throttle = Throttle(400e6, CHUNK, READS)
    count = READS * throttle.portion_bytes(0.0)
    asked = throttle.ask(count, 0.0)
    throttle.arrive(None, 3 * count, 0.3)
    throttle.arrive(asked, count, 0.4)
    assert rate_of(throttle) == pytest.approx(SHARE * 4 * count / 0.4)


def test_what_has_changed_is_copied_at_half_of_a_link_whatever_the_limit_of_moves() -> None:
    throttle = Throttle(1e6, CHUNK, 1)
    assert rate_of(throttle) == pytest.approx(1e6) and rate_of(throttle, within_limit=False) == 0
    probe_bytes = throttle.portion_bytes(0.0)
    throttle.arrive(throttle.ask(probe_bytes, 0.0), probe_bytes, 0.1)
    assert rate_of(throttle) == pytest.approx(1e6)
    assert rate_of(throttle, within_limit=False) == pytest.approx(SHARE * probe_bytes / 0.1)


def test_what_is_too_small_says_nothing_of_a_link() -> None:
    """The first run of a slot may be of a few records: what it takes is its host's time, not the link's."""
    throttle = Throttle(400e6, CHUNK, READS)
    throttle.arrive(throttle.ask(1000, 0.0), 1000, 0.005)
    assert not throttle.knows and rate_of(throttle) == pytest.approx(400e6)
    count = READS * throttle.portion_bytes(0.005)
    throttle.arrive(throttle.ask(count, 0.005), count, 0.025)
    assert throttle.knows and rate_of(throttle) == pytest.approx(0.5 * count / 0.02)


def test_without_a_limit_nothing_is_measured() -> None:
    throttle = Throttle(0, CHUNK, READS)
    asked = throttle.ask(10, 1.0)
    throttle.arrive(asked, 10, 2.0)
    assert throttle.knows and rate_of(throttle) == 0 and throttle.portion_bytes(1.0) == CHUNK


def test_a_chunk_smaller_than_all_portions_stays_what_it_is() -> None:
    throttle = Throttle(100.0, 48, READS)
    for moment in range(40):
        assert throttle.portion_bytes(moment) == 48
        throttle.arrive(throttle.ask(48 * READS, moment), 48 * READS, moment + 0.5)
    assert rate_of(throttle) == pytest.approx(100.0), "no slower than what any link carries"
