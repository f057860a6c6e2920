"""The sweep of loops: trainers lost at any step of whatever loop people write go on to the same bits, or are refused.

The session is in memory, so that thousands of loops can be run; `test_attach.py` has the single cases, and
`test_cluster.py`, `test_demo_runs.py` and chaos the real processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from loops import (
    ATTACHED,
    DRAWS,
    DRIVERS,
    EVALS,
    FLUSHES,
    LOADS,
    MODULES,
    MOVES,
    OPTIMIZERS,
    PUSHES,
    READERS,
    STYLES,
    TABLES,
    TRACING,
    Loop,
    Run,
    _one_pass,
    resumed,
    same,
    undisturbed,
)
from thinned import drawn_for, thinned

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


COUNTED: dict[str, int] = {"loops": 0, "lives": 0}


def check(loop: Loop) -> None:
    """Every step that training can go on from, and 0; refused by name if a scheduler is not attached."""
    if loop.refused:
        with pytest.raises(RuntimeError, match="not attached: it would begin anew after a restart"):
            undisturbed(loop)
        return
    assert not loop.forgotten, "it goes on otherwise"
    first = undisturbed(loop)
    steps = [0, *sorted(first.session.snapshots)]
    done = first.session.step - 1
    if loop.losses == 1:  # else a turn has several steps, and a snapshot is of the last
        ended = list(range(0, max(done, 1), loop.snapshot_every))
        last = [done] if loop.pass_over_every or loop.nan_at else []  # the last batch may have ended it, and no more
        assert steps in (ended, ended + last), "a step has ended when the next one begins"
    for step in steps:
        again = resumed(loop, first, step)
        assert again.trace == first.trace, f"after step {step}: another trace"
        assert same(first, again), f"after step {step}: another state"
    COUNTED["loops"] += 1
    COUNTED["lives"] += len(steps)


def exact_or_refused(loop: Loop) -> Loop:
    """With all attached whose lack nothing tells of."""
    return loop if loop.refused else dataclasses.replace(loop, attached=loop.attached | loop.forgotten)


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(some) for size in range(len(names) + 1) for some in itertools.combinations(names, size)]


@pytest.mark.parametrize(("reader", "driver"), thinned(READERS, DRIVERS, 4))
def test_every_reader_in_every_driver(reader: str, driver: str) -> None:
    check(Loop(reader=reader, driver=driver, schedule=frozenset({"step", "pass"}), draws=frozenset({"after", "pass"})))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_forward_that_alters_its_batch_is_refused(reader: str, driver: str) -> None:
    """None of these readers is known to give copies: a list gives the batch again, altered; a new list does not."""
    with pytest.raises(RuntimeError, match=r"batch 0 of pass 0 was altered in place .*`batch.dense`"):
        undisturbed(Loop(reader=reader, driver=driver, batches=4, alters=True))


@pytest.mark.parametrize("then", ["another pass", "a plain loop"])
@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver != "plain"])
def test_a_pipeline_that_is_left_with_batches_that_it_has_drawn_is_refused(
    driver: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those were never trained on, and after a restart they would have been."""
    loop = Loop(driver=driver, batches=5, epochs=3, leave_after=2)
    if then == "a plain loop":
        passes = iter([loop])

        def first_in_a_pipeline(run: Run) -> None:
            run.loop = next(passes, dataclasses.replace(loop, driver="plain"))
            _one_pass(run)

        monkeypatch.setattr("loops._one_pass", first_in_a_pipeline)
    who = "a loop" if then == "a plain loop" else "another pipeline"
    with pytest.raises(
        RuntimeError, match=rf"left with \d batches that it has drawn and not trained on, and {who} draws"
    ):
        undisturbed(loop)
    monkeypatch.undo()
    check(dataclasses.replace(loop, epochs=1))  # the last pass may be left


@pytest.mark.parametrize("fails", ["forward", "between", "optimizer"])
@pytest.mark.parametrize("fails_after", [1, 2, 3, 6])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_step_that_fails_and_a_loop_that_goes_on(driver: str, fails_after: int, fails: str) -> None:
    """A plain loop goes on with the next batch. A pipeline trains on the same one again, and perhaps leaves one out: it
    is refused, by TorchRec itself where that has looked rows up; or it ends, and is brought back."""
    loop = Loop(driver=driver, batches=4, fails_after=fails_after, fails=fails)
    try:
        assert "failed" in undisturbed(loop).trace
    except (RuntimeError, AssertionError) as refused:
        assert driver != "plain" and re.search("trains on a batch again|Invalid PipelinedForward usage", str(refused))
        return
    check(loop)


@pytest.mark.parametrize("begins", ["zero", "evaluate", "load"])
def test_what_a_pass_begins_with_is_done_once_more_and_changes_nothing(begins: str) -> None:
    more = frozenset({"generator", "attribute"})
    check(Loop(begins=frozenset({begins}), batches=4, accumulate=3, zero="after", numbered=True, modules=more))


def test_what_is_not_loaded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(begins=frozenset({"load"}))
    first = undisturbed(loop)
    assert "was trained since" not in caplog.text, "the first life loads what it says, after `attach`, too"
    resumed(loop, first, 0)
    assert "was trained since" not in caplog.text, "nothing was trained"
    resumed(loop, first, 2)
    assert "training goes on after step 2: what is loaded before the next one was trained since" in caplog.text


@pytest.mark.parametrize("attached", subsets(("tables", "warm-up", "exponential", "plateau")))
def test_whatever_a_push_carries_comes_back_whatever_is_attached(attached: frozenset[str]) -> None:
    """All that moves it at once; each alone in every way is in the sweep below."""
    pushes = frozenset(PUSHES)
    check(exact_or_refused(Loop(tables="adam", pushes=pushes, attached=attached | {"schedule"}, batches=2)))
    kept = pushes - (set(ATTACHED) - attached)
    check(Loop(tables="adam", pushes=kept, attached=attached, schedule=frozenset(), batches=2))


@pytest.mark.parametrize("forgotten", ["plateau", "warm-up"])
def test_what_leaves_no_mark_in_an_optimizer_is_not_told_and_sets_other_rates(forgotten: str) -> None:
    """So a rehearsal finds it."""
    loop = Loop(pushes=frozenset({forgotten}), attached=frozenset(), schedule=frozenset(), batches=2)
    first = undisturbed(loop)
    assert resumed(loop, first, 1).session.rates != first.session.rates


@pytest.mark.parametrize("attached", subsets(("tables",)))
@pytest.mark.parametrize(("pushes", "moves"), thinned(PUSHES, MOVES, 3))
def test_each_number_of_a_push_comes_back_when_a_loop_moves_it(
    pushes: str, moves: str, attached: frozenset[str]
) -> None:
    attached = attached | {pushes} & set(ATTACHED)
    epochs = 3 if (pushes, moves) == ("plateau", "pass") else 2  # it sets a rate once something became worse
    more = {"attached": attached, "schedule": frozenset[str](), "epochs": epochs, "batches": 2}
    loop = Loop(pushes=frozenset({pushes}), moves=moves, **more)
    rates = undisturbed(loop).session.rates
    assert (len({str(rate) for rate in rates}) > 1) == (pushes not in ("division", "frozen")), "they move"
    check(loop)


STAYING = ("iterable", "custom", "stateful", "torchdata", "torchdata own generator")  # what they gave is not put back


def loops(drivers: tuple[str, ...] = DRIVERS) -> st.SearchStrategy[Loop]:
    """Loops that can be brought back exactly."""

    @st.composite
    def loop(draw: Any) -> Loop:
        driver = draw(st.sampled_from(drivers))
        plain = driver == "plain"
        reader = draw(st.sampled_from([*READERS, None] if plain else READERS))
        some = lambda values: draw(st.frozensets(st.sampled_from(values)))  # noqa: E731
        style = draw(st.sampled_from(STYLES))
        batches = draw(st.integers(1, 6))
        passed_over = draw(st.sampled_from([0, 0, 3])) if plain and style != "steps_done" and reader else 0
        accumulate = draw(st.sampled_from([1, 1, 2, 3])) if plain else 1
        zero = draw(st.sampled_from(["before", "late", "after"]))
        if accumulate > 1 and passed_over:
            zero = "after"  # else a gradient that was stepped with is added to, which is refused
        losses = draw(st.sampled_from([1, 1, 2])) if plain and style != "steps_done" else 1
        begins = some(["zero", "evaluate", "load"])
        pushes = some(PUSHES) - ({"frozen"} if style == "steps_done" else set())
        draws, evals, leave_after = (
            some(DRAWS),
            some(EVALS if plain else ("pass",)),
            draw(st.sampled_from([0, 0, 1, 2])),
        )
        leave_after = leave_after if plain and style != "steps_done" else 0
        moves = "after" in draws or "training no_grad" in evals  # generators, from which such a reader draws, too
        refused = (reader == "augmented" and moves) or (leave_after and reader in STAYING)
        found = Loop(
            reader=reader,
            look_ahead=draw(st.sampled_from(["auto"] if refused else ["0", "auto", "1", "4"])),
            driver=driver,
            style=style,
            epochs=draw(st.integers(1, 3)),
            batches=batches,
            leave_after=leave_after,
            optimizers=tuple(draw(st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2))),
            schedule=some(["step", "pass"]),
            flushes=some(FLUSHES),
            loads=some(LOADS),
            in_place=draw(st.booleans()) if "load" not in begins else False,  # parameters move between turns
            draws=draws,
            evals=evals,
            counts=some(["before", "between", "after", "pass"]),
            modules=some(MODULES) - ({"attribute", "generator"} if driver in TRACING else set()),  # refused
            generator=draw(st.booleans()) if reader and plain else False,
            numbered=draw(st.booleans()),
            losses=losses,
            accumulate=accumulate,
            clip=draw(st.booleans()),
            skip_every=draw(st.sampled_from([0, 0, 2, 3])) if plain else 0,
            pass_over_every=passed_over,
            nan_at=draw(st.sampled_from([0, 0, 2])) if plain and style != "steps_done" else 0,
            begins=begins,
            tables=draw(st.sampled_from(sorted(TABLES))),
            pushes=pushes,
            moves=draw(st.sampled_from(MOVES if plain else MOVES[1:])),
            attached=draw(st.sampled_from([frozenset(ATTACHED), frozenset(ATTACHED) - {"tables"}, some(ATTACHED)])),
            zero=zero,
            snapshot_every=draw(st.integers(1, 3)),
        )
        return exact_or_refused(found)

    return loop()


PARTS = 10
SWEEP = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("part", [pytest.param(i, marks=pytest.mark.slow if i > 1 else []) for i in range(PARTS)])
def test_any_loop_goes_on_bit_for_bit(part: int) -> None:
    """The same in every run: a hundred, in parts."""

    @seed(part)
    @settings(max_examples=100 // PARTS, database=None, **SWEEP)
    @given(loops())
    def check_some(loop: Loop) -> None:
        check(loop)

    check_some()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(10, 20))
def test_thousands_of_loops_go_on_bit_for_bit(part: int) -> None:
    """Other loops than those above."""

    @drawn_for(part)
    @settings(max_examples=300, **SWEEP)
    @given(loops())
    def check_some(loop: Loop) -> None:
        check(loop)

    check_some()
    print(COUNTED)
