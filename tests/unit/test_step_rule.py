"""The step rule: what is applied, folded, acknowledged, settled, and what a new incarnation changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_ecrec.protocol.step_rule import FoldVerdict, StepRule, choose_cut


def rule(**overrides: object) -> StepRule:
    values: dict[str, object] = {
        "slot": 0,
        "holders": (1, 2),
        "sources": (1, 2),
        "trainers": 2,
        "incarnations": {0: 0, 1: 0, 2: 0},
        "confirmed": {1: 0, 2: 0},
        "folded": {1: 0, 2: 0},
        "catch_up": {1: 0, 2: 0},
    }
    return StepRule(**{**values, **overrides})  # type: ignore[arg-type]


def apply(r: StepRule, through: int) -> None:
    for step in range(r.applied + 1, through + 1):
        r.on_applied(step)


def test_a_step_is_settled_when_the_last_holder_has_folded_it() -> None:
    r = rule()
    apply(r, 3)
    r.on_confirmed(1, 0, 3)
    assert r.settled == 0 and not r.acknowledge(r.settled)
    r.on_confirmed(2, 0, 2)
    assert r.settled == 2 and r.acknowledge(r.settled) and r.acknowledged == 2
    assert r.is_acknowledged(2) and not r.is_acknowledged(3)


def test_confirmations_are_cumulative_and_never_fall() -> None:
    r = rule()
    apply(r, 5)
    r.on_confirmed(1, 0, 5)
    r.on_confirmed(1, 0, 3)
    assert r.confirmed[1] == 5


def test_the_worked_example_of_the_module() -> None:
    r = rule()
    apply(r, 7)
    r.on_confirmed(1, 0, 7)
    r.on_confirmed(2, 0, 5)
    r.acknowledge(r.settled)
    assert (r.settled, r.acknowledged) == (5, 5)
    assert r.learn(2, 1, floor=4)
    assert (r.settled, r.acknowledged) == (4, 5)
    r.on_confirmed(2, 0, 7)
    assert r.settled == 4, "the old incarnation's confirmation counts for nothing"
    r.on_confirmed(2, 1, 6)
    assert r.settled == 6 and r.acknowledge(r.settled) and r.acknowledged == 6


def test_an_incarnation_is_news_once() -> None:
    r = rule()
    assert r.learn(1, 2, 0)
    assert not r.learn(1, 2, 0) and not r.learn(1, 1, 0)
    assert not r.is_current(1, 1) and r.is_current(1, 2) and r.is_current(1, 3)


def test_logs_are_kept_for_whoever_is_slowest() -> None:
    r = rule()
    apply(r, 6)
    r.on_confirmed(1, 0, 6)
    r.on_confirmed(2, 0, 4)
    r.on_resumable(0, 5)
    assert r.watermark == 0 and r.may_forget() == 0, "trainer 1 has not been heard of"
    r.on_resumable(1, 3)
    assert r.watermark == 3 and r.may_forget() == 3
    r.on_resumable(1, 6)
    assert r.may_forget() == 4


def test_folds_are_judged() -> None:
    r = rule(folded={1: 4})
    assert r.judge_fold(1, 0, 5) is FoldVerdict.NEXT
    assert r.judge_fold(1, 0, 4) is FoldVerdict.DUPLICATE
    assert r.judge_fold(1, 0, 6) is FoldVerdict.EARLY
    assert r.judge_fold(2, 0, 1) is FoldVerdict.UNATTACHED
    r.learn(1, 1, 0)
    assert r.judge_fold(1, 0, 5) is FoldVerdict.STALE
    assert r.judge_fold(1, 1, 5) is FoldVerdict.NEXT


def test_a_holder_catches_up_with_what_the_source_had_acknowledged() -> None:
    r = rule(folded={}, catch_up={})
    assert not r.is_caught_up(1)
    assert r.on_attached(1, base=4, acknowledged=6) and r.folded[1] == 4
    assert not r.is_caught_up(1)
    r.on_folded(1, 5)
    r.on_folded(1, 6)
    assert r.is_caught_up(1)
    assert not r.on_attached(1, base=9, acknowledged=7), "it knows the source: the base is not its"
    assert r.folded[1] == 6 and not r.is_caught_up(1)


def test_without_holders_a_step_is_settled_at_once() -> None:
    r = rule(holders=(), confirmed={})
    apply(r, 2)
    assert r.settled == 2 and r.acknowledge(r.settled)


def test_the_cut_counts_only_holders_that_have_caught_up() -> None:
    assert choose_cut([(9, True), (7, True)]) == 7
    assert choose_cut([(9, True), (3, False), (None, False)]) == 9
    assert choose_cut([(3, False), (None, False)]) is None
    assert choose_cut([]) is None


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(0, 1), st.integers(0, 9)), max_size=40))
def test_acknowledged_never_falls_and_never_leads(confirmations: list[tuple[int, int, int]]) -> None:
    r = rule()
    apply(r, 9)
    for holder, incarnation, step in confirmations:
        r.learn(holder, incarnation, floor=0)
        before = r.acknowledged
        r.on_confirmed(holder, incarnation, step)
        r.acknowledge(r.settled)
        assert before <= r.acknowledged <= r.applied
        assert r.settled <= r.applied
        assert r.may_forget() <= r.settled


def test_going_back_takes_everything_back_that_came_later() -> None:
    """Words of the trainers, too: what they called complete later would let the logs be forgotten too early."""
    r = rule(sources=(1,), folded={1: 5}, catch_up={1: 4}, confirmed={1: 5, 2: 3})
    apply(r, 6)
    r.acknowledge(r.settled)
    r.on_resumable(0, 3)
    r.on_resumable(1, 5)
    r.go_back(4)
    assert (r.applied, r.acknowledged, r.settled) == (4, 3, 3)
    assert r.folded == {1: 4} and r.catch_up == {1: 4} and r.confirmed == {1: 4, 2: 3} and r.resumable == {0: 3, 1: 4}
    assert r.is_due(5)
