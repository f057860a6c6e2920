"""Which of several coordinators leads: a fault at every call, pauses, and outages of etcd.

`Elections` itself asserts at every moment that whoever acts is who etcd says, and that nobody acts after another has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_etcd import TTL_S, Elections, Fault, describe, faults, over

from torch_ecrec.coordinator import election
from torch_ecrec.coordinator.election import FORGOTTEN_LEASES, SETTLED, TICKS, UNKNOWN_LEASES, Candidate, Standing
from torch_ecrec.testing.etcd import VirtualEtcd
from torch_ecrec.testing.standbys import Keys
from torch_ecrec.transport.etcd import COUNTS_MOST, NOBODY, Last, parse_place

SWEPT = 45  # calls
FOLLOWED = 12  # calls after which each of three candidates has seen that one leads


def check(run: Elections) -> Elections:
    """It goes on until after all faults: then one leads, and goes on to."""
    run.until(15.0)
    while run.now_s < run.disturbed_s + run.soon_s:
        run.until(run.disturbed_s + run.soon_s)
    assert sum(one.holds for one in run.candidates) == 1
    led, fired = run.led[-1], len(run.fired)
    run.until(run.now_s + 3 * TTL_S)
    assert fired < len(run.fired) or (run.led[-1] == led and sum(one.holds for one in run.candidates) == 1)
    return run


def test_one_leads_and_the_others_stand_by() -> None:
    run = check(Elections(3))
    assert run.led == [run.candidates[0].id]
    assert [one.standing for one in run.candidates[1:]] == [Standing.STANDBY] * 2
    assert run.candidates[1].leads is not None and run.candidates[1].leads.address == ("host0", 1)


def test_a_run_begins_with_an_etcd_that_knows_nothing() -> None:
    run = Elections(3, empty=True)
    run.until(UNKNOWN_LEASES * TTL_S)
    assert not run.led
    check(run)
    (leads,) = (number for number, one in enumerate(run.candidates) if one.holds)
    assert len(run.led) == 1 and run.word == run.etcd.last.run == f"run{leads}"


@pytest.mark.parametrize("fault", faults(), ids=describe)
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_fault_at_every_call(candidates: int, fault: Fault) -> None:
    for call in range(1, SWEPT):
        run = check(Elections(candidates, {call: fault}))
        assert run.fired == [fault], f"call {call}"


def pairs() -> Iterator[dict[int, Fault]]:
    """What is done late, and what is to undo it is not."""
    for late_s in (0.22, 1.9):
        for call in range(1, SWEPT):
            for gap in (1, 2, 3):
                yield {call: Fault("late", late_s), call + gap: Fault("refused")}
    for hundredths in range(95, 115):  # between a look at who leads and the next attempt
        yield {4: Fault("late", hundredths / 100), **{4 + i: Fault("refused") for i in (1, 2, 3, 4, 7)}}


def test_two_faults_beside_each_other() -> None:
    for moments in pairs():
        check(Elections(2, moments))
        check(Elections(1, moments))


def test_a_leader_that_is_stopped_is_followed_and_never_acts_again() -> None:
    run = Elections(2, pauses=((0, 3.0, 9.0),), replaced=False)
    run.until(2.9)
    first, second = run.candidates
    assert first.holds
    run.until(3.0 + 1.5 * TTL_S)
    assert second.holds and second.again and second.run == first.run == "run0"
    assert not first.holds and first.standing is Standing.LEADING, "it does not know yet"
    run.until(12.0)
    assert first.standing is Standing.FENCED and second.holds


def test_a_leader_alone_that_was_stopped_leads_again() -> None:
    """Nobody has led meanwhile: all that it knows is as it was."""
    run = Elections(1, pauses=((0, 3.0, 9.0),), replaced=False)
    run.until(8.0)
    assert not run.candidates[0].holds and run.etcd.leader is None
    run.until(9.0 + SETTLED * TTL_S)
    assert not run.candidates[0].holds, "somebody who has led meanwhile would say so"
    run.until(9.5 + SETTLED * TTL_S)
    assert run.candidates[0].holds and len(run.led) == 1
    leads = run.candidates[0].leads
    assert leads is not None and 0 < run.candidates[0].led < leads.revision, "it hears what was said to it before"


def test_an_outage_of_etcd_is_no_change() -> None:
    run = Elections(3, {40: Fault("outage", 30.0)})
    run.until(60.0)
    assert run.fired and len(run.led) == 1 and run.candidates[0].holds


def test_standbys_end_with_the_run() -> None:
    run = Elections(2, pauses=((0, 3.0, 99.0),), replaced=False)
    run.until(3.0)
    while run.candidates[0].holds:
        run.until(run.now_s + 0.01)
    assert run.etcd.write(over(run.candidates[0], run.etcd.last), run.etcd.last)
    run.until(run.now_s + 0.5)
    assert run.candidates[1].standing is Standing.OVER


@pytest.mark.parametrize("followed", [True, False])
def test_who_was_followed_begins_no_other_run(followed: bool) -> None:
    """It stands by again, and the run has ended before it has looked."""
    etcd = VirtualEtcd()
    etcd.last = Last("before", "earlier", 3, over=True)

    def candidate(run: str, known: Last = NOBODY) -> Candidate:
        return Candidate(Keys(etcd, lambda: 0.0), ("host0", 1), TTL_S, lambda: run, lambda: 0.0, lambda: run, known)

    first = candidate("run0")
    first.step()
    second = candidate("run1", etcd.last if followed else NOBODY)
    assert first.holds and first.end()
    second.step()
    assert second.standing is (Standing.OVER if followed else Standing.LEADING)
    if not followed:
        assert (second.run, second.began_with, second.again) == ("run1", "run1", False)


PAUSED = [(), ((0, 3.0, 6.0),), ((0, 3.0, 8.5),), ((0, 3.0, 12.0),), ((1, 2.5, 9.3),), ((0, 3.0, 7.5), (2, 5.5, 12.0))]


@pytest.mark.parametrize("pauses", PAUSED, ids=str)
@pytest.mark.parametrize("next_s", [0.0, 0.1, 1.0])
def test_who_has_stood_by_a_run_or_led_it_has_nothing_to_do_with_the_next(
    pauses: tuple[tuple[int, float, float], ...], next_s: float
) -> None:
    """Another begins under its name at once, or a little later; some have slept over all that."""
    for hundredths in range(0, 300, 17):
        run = Elections(3, pauses=pauses)
        run.until(8.0 + hundredths / 100)
        if not any(one.holds for one in run.candidates):
            continue  # just now nobody leads
        ended = run.end()
        run.until(run.now_s + next_s)
        fresh = run.join()
        run.until(30.0)
        others = run.candidates[:-1]
        assert fresh.holds and not fresh.again and run.led == [fresh.id]
        assert all(one.id == ended or one.standing is Standing.OVER for one in others), "they ended with it"


@pytest.mark.parametrize("fault", faults(), ids=describe)
def test_a_run_ends_beside_a_fault(fault: Fault) -> None:
    for gap in range(1, 5):
        run = Elections(3)
        run.until(3.0)
        run.fault(run.calls + gap, fault)
        run.until(3.3)
        while not any(one.holds for one in run.candidates):
            run.until(run.now_s + 0.1)
        ended = run.end()
        run.until(run.now_s + 20.0)
        assert run.fired and all(one.id == ended or one.standing is Standing.OVER for one in run.candidates)


# etcd comes back without what it knew ---------------------------------------------------------------


@pytest.mark.parametrize("out_s", [0.0, 0.3, 1.9, 2.5, 7.0])
@pytest.mark.parametrize("candidates", [1, 3])
def test_an_etcd_that_has_forgotten_everything_is_no_change(candidates: int, out_s: float) -> None:
    """Before the lease is over the leader goes on; after it, it or another regathers. It is one run all along."""
    for call in range(FOLLOWED, SWEPT if candidates > 1 else 24):
        run = check(Elections(candidates, {call: Fault("forgets", out_s)}))
        assert run.fired and run.etcd.last.runs and run.word == run.etcd.last.run == "run0", f"call {call}"
        assert len(run.led) == 1 or (out_s > 1.0 and len(run.led) == 2)
        assert run.etcd.leader is not None and run.etcd.leader.revision > 10 + TICKS, "for members it only grows"
        assert not any(one.forgotten for one in run.candidates)


@pytest.mark.parametrize("fault", [*faults(), Fault("forgets", 0.3), Fault("forgets", 2.5)], ids=describe)
def test_an_etcd_that_has_forgotten_everything_and_another_fault(fault: Fault) -> None:
    for call in range(FOLLOWED, SWEPT, 3):
        for gap in (-3, -2, -1, 1, 2, 3):
            assert check(Elections(2, {call: Fault("forgets", 0.3), call + gap: fault})).word == "run0"


def test_revisions_grow_whenever_etcd_has_forgotten() -> None:
    """Twice: etcd counts from 1 each time."""
    run = Elections(2, {FOLLOWED: Fault("forgets"), FOLLOWED + 60: Fault("forgets")})
    run.until(20.0)
    first, second = run.candidates
    assert len(run.fired) == 2 and first.holds and first.leads is not None
    before = first.leads.revision
    first.resign()
    run.until(run.now_s + run.soon_s)
    assert second.holds and second.again and second.run == "run0"
    assert second.leads is not None and second.leads.revision > before > first.led


@pytest.mark.parametrize("out_s", [0.0, 1.0, 5.0, 9.0])
def test_one_that_has_slept_never_leads_by_what_it_knew(out_s: float) -> None:
    """It was followed meanwhile, and etcd does not know of that any more."""
    for sleeps in range(3000, 9000, 97):
        run = Elections(2, pauses=((0, 3.0, 3.0 + sleeps / 1000),))
        first, second = run.candidates
        run.until(5.9)
        assert second.holds
        run.forget(out_s)
        check(run)
        assert first.standing is Standing.FENCED and not first.holds
        assert first.id not in run.led[1:] and run.word == "run0"


def test_who_stands_by_leads_the_run_if_nobody_says_it_again() -> None:
    run = Elections(2, pauses=((0, 3.0, 99.0),), replaced=False)
    run.until(3.0)
    run.forget()
    run.until(3.0 + FORGOTTEN_LEASES * TTL_S)
    second = run.candidates[1]
    assert second.standing is Standing.STANDBY and second.forgotten
    run.until(3.0 + (FORGOTTEN_LEASES + 1) * TTL_S)
    assert second.holds and second.again and (second.run, second.began_with) == ("run0", "what run0 begins with")


def test_who_stands_by_waits_anew_after_it_has_slept() -> None:
    """etcd had forgotten the run before, was told, and has forgotten it once more."""
    for hundredths in range(0, 60, 3):
        run = Elections(2, pauses=((1, 3.4, 13.0),), replaced=False)
        run.until(3.1)
        run.forget()
        run.until(3.4)
        assert run.candidates[1].forgotten
        run.until(12.3 + hundredths / 100)
        assert run.candidates[0].holds
        run.forget()
        check(run)
        assert len(run.led) == 1


@pytest.mark.parametrize("forgets_s", [0.0, 0.3, 0.6, 1.2, 1.9, 2.5, 5.0])
@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_a_run_begins_once_nobody_who_knows_of_one_leads_it(candidates: int, forgets_s: float) -> None:
    """One that starts while etcd has forgotten a run, whether anybody's lease is over by then or not."""
    for hundredths in range(0, 60, 4):
        run = Elections(candidates)
        run.until(3.0 + hundredths / 100)
        run.forget(forgets_s)
        fresh = run.join()
        check(run)
        assert run.word == "run0" and fresh.known.run == "run0" and (fresh.again or not fresh.holds)


def test_who_leads_is_known_by_a_higher_revision_where_etcd_was_put_back() -> None:
    """To what it was before the last leader, and was away for longer than a lease."""
    run = Elections(2, pauses=((0, 3.0, 9.0),))
    run.until(2.9)
    before = run.etcd.last
    run.until(12.0)
    assert run.candidates[1].holds and run.candidates[1].leads is not None
    newest = run.candidates[1].leads.revision
    run.forget(2.0 * TTL_S)
    run.etcd.last, run.etcd.revision = before, before.revision
    check(run)
    assert run.etcd.leader is not None and run.etcd.leader.revision > newest and run.word == "run0"


def test_what_was_not_read_is_not_written_over() -> None:
    """An etcd that has forgotten everything gives the same revisions again."""
    etcd = VirtualEtcd()
    etcd.last = Last("before", "earlier", 3, over=True)
    another = Last("another", "a run that has begun meanwhile", 3)

    class Slow(Keys):
        def grant(self, ttl_s: int) -> int:
            etcd.last = another
            return super().grant(ttl_s)

    one = Candidate(Slow(etcd, lambda: 0.0), ("host0", 1), TTL_S, lambda: "run0", lambda: 0.0)
    one.step()
    assert etcd.last == another and etcd.leader is None and not one.holds


def test_a_clock_that_is_wrong_for_a_moment_leaves_revisions_for_all_who_lead_after_it() -> None:
    etcd, year_2200 = VirtualEtcd(), 7.26e9
    etcd.last = Last("before", "earlier", 3, over=True)
    for number, time_s in enumerate((year_2200, 1.8e9, 1.8e9)):
        one = Candidate(
            Keys(etcd, lambda: 0.0), ("host", 1), TTL_S, lambda: "run", lambda: 0.0, time_of_day=lambda s=time_s: s
        )
        before = etcd.last.since
        one.step()
        assert one.holds and before < one.led < COUNTS_MOST, number
        assert one.end()
        one.resign()


def test_who_is_deposed_by_a_mark_is_waited_for_also_where_the_run_ends_then() -> None:
    """One whose clock is slow leads by a state that etcd was put back to; a mark deposes it, and the end of the run
    takes the mark's place."""
    etcd, now = VirtualEtcd(), [100.0]
    etcd.last = Last("before", "earlier", 3, over=True)

    def candidate(name: str, slow_s: float = 0.0) -> Candidate:
        keys, words = Keys(etcd, lambda: now[0]), lambda: f"run of {name}"
        return Candidate(keys, (name, 1), TTL_S, words, lambda: now[0], time_of_day=lambda: 1.8e9 + now[0] - slow_s)

    def until_it_holds(one: Candidate) -> None:
        while not one.holds:
            now[0] += 0.2
            etcd.expire(now[0])
            one.step()

    slow, follows, stands_by = candidate("slow", 3600.0), candidate("follows"), candidate("stands by")
    for one in (slow, follows, stands_by):
        one.step()
    was = etcd.revision, etcd.leader, etcd.last
    until_it_holds(follows)
    stands_by.step()
    etcd.revision, etcd.leader, etcd.last = was
    assert etcd.leader is not None
    etcd.leases = {etcd.leader.lease: (TTL_S, now[0] + TTL_S)}
    until_it_holds(slow)
    stands_by.step()
    assert etcd.last.mark and etcd.last.deposed and follows.end() and etcd.last.over
    another = candidate("another")
    another.step()
    assert slow.holds and not another.holds
    until_it_holds(another)
    assert not slow.holds


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_who_has_taken_the_lead_and_hears_that_it_has_not_keeps_it(lost: int) -> None:
    """An address took it, its answer did not come, and the next address was asked the same."""
    etcd = VirtualEtcd()
    etcd.last = Last("before", "earlier", 3, over=True)

    class Twice(Keys):
        def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
            return [super(Twice, self).take(me, address, lease, last) for _ in range(lost + 1)][-1]

    one = Candidate(Twice(etcd, lambda: 0.0), ("host0", 1), TTL_S, lambda: "run0", lambda: 0.0)
    one.step()
    assert one.holds and not one.again and one.run == "run0"


MOMENTS = st.dictionaries(st.integers(1, 150), st.sampled_from(faults()), max_size=6)
PAUSES = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.0, 12.0), st.floats(0.1, 9.0)).map(lambda p: (p[0], p[1], p[1] + p[2])),
    max_size=4,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 3), MOMENTS, PAUSES)
def test_any_faults_and_pauses(
    candidates: int, moments: dict[int, Fault], pauses: list[tuple[int, float, float]]
) -> None:
    check(Elections(candidates, moments, tuple(pauses)))


# mutations ----------------------------------------------------------------------------------------


def counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """The lease is taken to begin when etcd has answered."""
    lead = Candidate._lead
    patch.setattr(Candidate, "_lead", lambda self, asked_s: lead(self, self._clock()))


def acts_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(election, "MARGIN", 1000.0)


def forgets_who_was_last(patch: pytest.MonkeyPatch) -> None:
    """A leader whose lease has ended leads again, whoever has led since."""

    def keep(self: Candidate) -> float:
        asked_s = self._clock()
        last = self._look()
        if self._has_it and self._keys.renew(self._lease):
            return self._lead(asked_s)
        return self._take(last) if self.leads is None else election.RETRY_S

    patch.setattr(Candidate, "_keep", keep)


def believes_any_lease(patch: pytest.MonkeyPatch) -> None:
    """It takes a key of its own for one that its lease keeps."""
    patch.setattr(Candidate, "_has_it", property(lambda self: self.leads is not None and self.leads.id == self.id))


MUTATIONS = [
    pytest.param(counts_from_the_answer, marks=pytest.mark.slow),  # missed late
    acts_for_ever,
    forgets_who_was_last,
    pytest.param(believes_any_lease, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(Elections(2, pauses=((0, 3.0, 9.0), (1, 7.5, 13.0)), replaced=False))
        for moments in [*({call: fault} for fault in faults() for call in range(1, SWEPT)), *pairs()]:
            check(Elections(2, moments))
            check(Elections(1, moments))


def leads_again_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Etcd knows nothing any more, so nobody else seems to have led."""

    def keep(self: Candidate) -> float:
        asked_s = self._clock()
        last = self._look()
        if self._has_it and self._keys.renew(self._lease):
            return self._lead(asked_s)
        if last.id not in ("", self.id):
            self.standing = Standing.FENCED
            return election.POLL_S
        return self._take(last) if self.leads is None else election.RETRY_S

    patch.setattr(Candidate, "_keep", keep)


def counts_from_nothing(patch: pytest.MonkeyPatch) -> None:
    """Revisions begin anew with an etcd that has forgotten those of before."""
    patch.setattr(Candidate, "_me", lambda self, last: Last(self.id, self.run, 0, self.began_with))


def does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A run begins as soon as etcd knows nothing."""
    patch.setattr(election, "UNKNOWN_LEASES", 0.0)


def follows_whoever_leads(patch: pytest.MonkeyPatch) -> None:
    """It takes the next run for the one that it has led, or stood by."""

    look = Candidate._look

    def looks(self: Candidate) -> Last:
        self.known = NOBODY
        return look(self)

    patch.setattr(Candidate, "_look", looks)


def test_a_mutation_is_found_where_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    follows_whoever_leads(monkeypatch)
    with pytest.raises(AssertionError):
        for pauses in PAUSED:
            test_who_has_stood_by_a_run_or_led_it_has_nothing_to_do_with_the_next(pauses, 0.0)


@pytest.mark.parametrize(
    "mutate", [leads_again_without_its_lease, counts_from_nothing, does_not_wait], ids=lambda mutate: mutate.__name__
)
def test_mutation_is_found_where_etcd_forgets(mutate, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for out_s in (0.0, 5.0):
            test_one_that_has_slept_never_leads_by_what_it_knew(out_s)
        test_a_run_begins_once_nobody_who_knows_of_one_leads_it(1, 0.0)


# names --------------------------------------------------------------------------------------------


def test_places() -> None:
    found = parse_place("etcd://10.0.0.1:2379,10.0.0.2/ads-1")
    assert found.protocol == "http" and found.name == "ads-1"
    assert found.addresses == (("10.0.0.1", 2379), ("10.0.0.2", 2379))
    assert parse_place("etcds://etcd.example:1/a").protocol == "https"
    assert parse_place("etcds://e/a?ca=/etc/ca.pem&key=k&cert=c").tls == ("/etc/ca.pem", "c", "k")


@pytest.mark.parametrize(
    "text",
    [
        "etcd://10.0.0.1:2379",
        "etcd:///a",
        "etcd://a:b/c",
        "http://a/b",
        "etcd://a/b/c",
        "etcd://a:0/b",
        "etcd://a/b?ca=c",
    ]
    + ["etcds://a/b?other=1", "etcds://a/b?ca"],
)
def test_no_places(text: str) -> None:
    with pytest.raises(ValueError, match="etcd must be named as etcd://"):
        parse_place(text)
