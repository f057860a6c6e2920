"""Which of several coordinators leads: a fault at every question, and what follows from it in the end.

`Elections` itself asserts at every moment that whoever acts is who etcd says, and that nobody acts after another has.
All orders of questions and answers are in `test_election_explored.py`.
"""

from __future__ import annotations

import random

import pytest
from elections import TTL_S, Elections, Fault, describe, faults

from torch_ecrec.coordinator.election import Standing
from torch_ecrec.transport.etcd import parse_place

SWEPT = 40  # questions
BEGUN_S = 3.0 * TTL_S  # by then one leads
SOON_S = 3.5 * TTL_S  # for one to lead, once nothing is disturbed any more: a lease ends, and it is watched for another


def check(run: Elections) -> Elections:
    """It goes on until after all faults: then one leads, and goes on to."""
    run.until(4.0 * TTL_S)
    while run.pending:
        run.until(run.now_s + 0.1)
    while run.now_s < run.disturbed_s + SOON_S:
        run.until(run.disturbed_s + SOON_S)
    (acts,) = run.acting()
    run.until(run.now_s + 3 * TTL_S)
    assert run.acting() == [acts]
    return run


def test_one_leads_and_the_others_stand_by() -> None:
    run = check(Elections(3))
    first, *others = run.candidates
    assert run.led == [first.id] and not first.again and first.began_with == "what it begins with"
    assert [one.standing for one in others] == [Standing.STANDBY] * 2
    assert all(one.view is not None and one.view.leader is not None for one in others)


def test_nobody_leads_who_has_not_watched_for_a_lease() -> None:
    run = Elections(3).until(TTL_S)
    assert not run.led and run.etcd.leader is None


@pytest.mark.parametrize("fault", faults(), ids=describe)
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_fault_at_every_question(candidates: int, fault: Fault) -> None:
    for question in range(1, SWEPT):
        run = check(Elections(candidates, {question: fault}))
        assert run.fired == [fault], f"question {question}"


@pytest.mark.parametrize("fault", [Fault("refused"), Fault("unanswered"), Fault("stopped", 2.5)], ids=describe)
def test_two_faults_beside_each_other(fault: Fault) -> None:
    """What is done late, and what comes next goes wrong, too."""
    for late_s in (0.22, 1.9):
        for question in range(1, SWEPT):
            for gap in (1, 2, 3):
                check(Elections(2, {question: Fault("late", late_s), question + gap: fault}))


def test_a_leader_that_ends_is_followed_as_soon_as_its_lease_is_over() -> None:
    for hundredths in range(0, 60, 7):
        run = Elections(2).until(BEGUN_S + hundredths / 100)
        (first,) = run.acting()
        killed_s = run.now_s
        run.candidates.remove(first)
        run.until(killed_s + TTL_S + 0.5)
        (second,) = run.acting()
        assert second.again and second.run == first.run and second.led > first.led
        assert second.began_with == first.began_with


def test_who_has_seen_another_lead_has_stood_by() -> None:
    """Not who was started once all were gone, and found a lease that had not ended yet."""
    run = Elections(2).until(BEGUN_S)
    (first,) = run.acting()
    (standby,) = (one for one in run.candidates if one is not first)
    assert standby.stood_by and not first.stood_by
    run.candidates.clear()
    late = run.join()
    run.until(run.now_s + SOON_S)
    assert run.acting() == [late] and late.again and not late.stood_by


def test_who_resigns_is_followed_at_once() -> None:
    run = Elections(2).until(BEGUN_S)
    (first,) = run.acting()
    first.resign()
    run.etcd.revoke(first.lease)
    assert not run.acting()
    run.candidates.remove(first)
    run.until(run.now_s + 0.5)
    assert len(run.acting()) == 1 and len(run.led) == 2


def test_an_outage_of_etcd_is_no_change() -> None:
    """Its leases begin anew when it is back, so that nobody else has led."""
    run = Elections(3, {60: Fault("outage", 30.0)}).until(28.0)
    assert run.fired and not run.acting()
    run.until(60.0)
    assert len(run.led) == 1 and run.acting() == [run.candidates[0]]


def test_a_leader_that_was_stopped_for_longer_than_its_lease_is_fenced() -> None:
    run = Elections(1, {40: Fault("stopped", 3.0 * TTL_S)})
    (first,) = run.candidates
    check(run)
    (second,) = run.candidates
    assert first.standing is Standing.FENCED and run.led == [first.id, second.id] and second.again


def end(run: Elections) -> str:
    """Whoever leads ends the run. Returns the word of that."""
    while not run.acting():
        run.until(run.now_s + 0.1)
    (acts,), ended = run.acting(), run.etcd.run
    acts.resign()
    assert ended is not None and run.etcd.end(ended) and not run.etcd.end(ended)
    run.led.clear()
    return ended.word


def test_all_end_with_the_run() -> None:
    run = Elections(3).until(BEGUN_S)
    end(run)
    run.until(run.now_s + 1.0)
    assert [one.standing for one in run.candidates] == [Standing.OVER] * 3


@pytest.mark.parametrize("next_s", [0.0, 0.1, 1.0])
def test_who_has_stood_by_a_run_or_led_it_has_nothing_to_do_with_the_next(next_s: float) -> None:
    """Another begins under its name; some have slept over all that."""
    for question in range(60, 72):
        run = Elections(3, {question: Fault("stopped", 12.0)}).until(2.0 * BEGUN_S)
        ended = end(run)
        fresh = run.until(run.now_s + next_s).join()
        run.until(40.0)
        assert run.fired and run.acting() == [fresh] and not fresh.again and fresh.run != ended
        assert all(one.standing is Standing.OVER for one in run.candidates if one is not fresh)


@pytest.mark.parametrize("portion", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("of_a_lease", [0.1, 0.21, 0.29])
@pytest.mark.parametrize("candidates", [1, 2])
def test_slow_answers_do_not_make_the_lead_move(candidates: int, of_a_lease: float, portion: float) -> None:
    """So many of them take so long, and nothing else happens: it is taken once, and held from then on."""
    draws = random.Random(1)
    run = Elections(candidates, pace_s=lambda: (of_a_lease if draws.random() < portion else 0.001) * TTL_S)
    run.until(20.0 * TTL_S)
    for i in range(400):
        run.until((20 + i / 10) * TTL_S)
        assert run.acting(), f"{i}"
    assert len(run.led) == 1


@pytest.mark.parametrize("knows", ["nothing", "less"])
def test_an_etcd_that_was_put_back_is_noticed(knows: str) -> None:
    """Nobody acts for a lease, though all are started again; then one leads."""
    run = Elections(3).until(2.0)
    backup = run.etcd.revision, run.etcd.leader, run.etcd.run, dict(run.etcd.leases)
    run.until(BEGUN_S)
    before = list(run.candidates)
    if knows == "nothing":
        run.etcd.forget()
    else:
        run.etcd.revision, run.etcd.leader, run.etcd.run, run.etcd.leases = backup
    check_acting = run.check
    run.check = lambda: None  # type: ignore[method-assign]  # it may act, although etcd has forgotten it
    run.until(run.now_s + TTL_S)
    assert not run.acting() and all(one not in run.candidates for one in before), "all were started again"
    run.check = check_acting  # type: ignore[method-assign]
    run.led.clear()
    run.until(run.now_s + TTL_S)
    assert len(run.acting()) == 1


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
