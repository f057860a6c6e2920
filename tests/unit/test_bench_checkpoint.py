"""The arithmetic of `bench checkpoint`."""

from pathlib import Path
from typing import Any

import pytest
from benches import parse

from torch_ecrec.bench import checkpoint as figures


def block(ends_s: list[float], spans_s: list[list[float]], sizes: dict[str, int], cpu_s: float = 1.0) -> dict[str, Any]:
    return {
        "begin_s": 0.0,
        "ends_s": ends_s,
        "spans_s": spans_s,
        "bytes": list(sizes.values()),
        "kinds": list(sizes),
        "cpu_s": cpu_s,
    }


DOCUMENTED = block([1, 2, 4, 6, 7], [[2.5, 5]], {"full": 600})
STEADY = block([1, 2, 3, 4, 5], [], {})


def test_the_steps_before_and_beside_a_checkpoint() -> None:
    assert figures.durations(DOCUMENTED) == [1, 1, 2, 2, 1]
    assert figures.before(DOCUMENTED) == [0, 1]
    assert figures.beside(DOCUMENTED) == [2, 3]
    found = figures.figures(DOCUMENTED, samples=10)
    assert found["before_samples_per_s"] == 10 and found["writing_samples_per_s"] == 5
    assert found["samples_per_s"] == pytest.approx(50 / 7) and found["written_s"] == 2.5
    assert (found["longest_step_s"], found["median_step_s"], found["cpu_s_per_step"]) == (2, 1, 0.2)


def test_a_block_without_a_checkpoint_is_all_before() -> None:
    found = figures.figures(STEADY, samples=10)
    assert found["before_samples_per_s"] == found["samples_per_s"] == 10
    assert found["writing_samples_per_s"] is None and found["written_s"] is None
    assert found["longest_step_s"] == 1


def test_the_longest_step_is_one_beside_the_checkpoint() -> None:
    slow_elsewhere = block([5, 6, 7, 8], [[6.5, 7.5]], {"full": 1})
    assert figures.figures(slow_elsewhere, 1)["longest_step_s"] == 1
    over_at_once = block([1, 2], [[2.5, 3]], {"full": 1})
    assert figures.figures(over_at_once, 1)["longest_step_s"] is None, "written when the turn was over"


def measured() -> dict[str, list[dict[str, Any]]]:
    increment = block([1, 2, 3, 4, 5], [[1.5, 2.5]], {"incremental": 120})
    return {
        "k2r1": [STEADY, block([2, 4, 6, 8, 10], [], {})],
        "k2r1+full": [DOCUMENTED, block([1, 2, 3, 4, 5], [[1.5, 2.5]], {"full": 800})],
        "k2r1+incremental": [increment, block([2, 4, 6, 8, 10], [[3, 5]], {"incremental": 80})],
        "k2r1+incremental:4": [block([1, 2, 3], [[1.5, 2.5]], {"full": 99})] * 2,
    }


BASE_OF = {way: "k2r1" for way in measured()}


def test_ratios_are_within_a_turn() -> None:
    lines = {line["way"]: line for line in figures.rows(measured(), BASE_OF, samples=10)}
    full = lines["k2r1+full"]
    assert full["/ before"] == pytest.approx((0.5 + 1) / 2)
    assert full["/ without"] == pytest.approx((5 / 10 + 10 / 5) / 2)
    assert full["longest / median step"] == pytest.approx((2 + 1) / 2)
    assert full["full MB"] == pytest.approx(700e-6) and full["increment MB"] is None
    assert lines["k2r1"]["/ before"] is None and lines["k2r1"]["whole turn / without"] == 1
    assert lines["k2r1+incremental"]["increment MB"] == pytest.approx(100e-6)
    assert full["/ before, ±"] is None, "of two turns"


def test_a_ratio_stands_beside_that_of_the_same_steps_without_a_checkpoint() -> None:
    """The machine is half as fast from the third step on, for both: that is not the checkpoint's doing."""
    written, plain = block([1, 2, 4, 6, 8.5], [[2.5, 9]], {"full": 1}), block([1, 2, 4, 6, 8], [], {})
    lines = figures.rows({"k2r1": [plain] * 4, "k2r1+full": [written] * 4}, BASE_OF, samples=10)
    full = next(line for line in lines if line["way"] == "k2r1+full")
    assert full["/ before"] == pytest.approx(6 / 6.5 * 0.5)
    assert full["same steps without"] == pytest.approx(0.5)
    assert full["/ before, ±"] == full["same steps, ±"] == 0
    assert lines[0]["same steps without"] is None, "nothing was written"


def test_the_notch_of_a_median() -> None:
    assert figures.notch([1, 2, 3]) is None
    assert figures.notch([4, 1, 3, 2, 5]) == pytest.approx(1.57 * (4.5 - 1.5) / 5**0.5)


RESTORED = {
    "table_bytes": 2e9,
    "restored": {"imported_s": 3.0, "built_s": 8.0, "first_step_s": 12.0},
    "begun_anew": {"imported_s": 3.0, "built_s": 4.0, "first_step_s": 4.5},
}


def test_what_is_wanted_stands_beside_what_was_measured() -> None:
    aims = {aim["figure"]: aim for aim in figures.targets(measured(), BASE_OF, 10, RESTORED)}
    assert len(aims) == len(figures.WANTED) + 1
    writing = aims["k2r1+full: samples/s while writing / before"]
    assert (writing["wanted"], writing["measured"], writing["reached"]) == (">= 0.97", 0.75, "no")
    size = aims["k2r1+incremental: bytes / full"]
    assert (size["wanted"], size["measured"], size["reached"]) == ("<= 0.167", pytest.approx(1 / 7), "yes")
    nothing = aims["k2r1+incremental:4: bytes / full"]
    assert (nothing["measured"], nothing["reached"]) == (None, "-"), "it wrote no increment"
    restore = aims["restore of 2 GB to the first step, s after the imports"]
    assert (restore["wanted"], restore["measured"], restore["reached"]) == ("<= 10", 9.0, "yes")


def test_ours_beside_torchrecs_saves() -> None:
    """By what each leaves of its own system's throughput, in the same turn; and by bytes."""
    theirs = {
        "torchrec": [STEADY],
        "torchrec+save": [block([2, 4, 6, 8, 10], [[1, 2]], {"full": 700})],
        "torchrec+async": [block([1, 2, 3, 4, 6.25], [[1, 2]], {"full": 720})],
    }
    ours = {"k2r1": [STEADY], "k2r1+full": [block([1, 2, 3, 4, 5.5], [[1, 2]], {"full": 710})]}
    base_of = {way: way.split("+")[0] for way in (*theirs, *ours)}
    aims = {aim["figure"]: aim for aim in figures.targets(theirs | ours, base_of, 10, None)}
    left = aims["k2r1+full: whole turn / without, beside TorchRec's best"]
    assert (left["wanted"], left["measured"], left["reached"]) == (">= 0.8", pytest.approx(5 / 5.5), "yes")
    size = aims["k2r1+full: MB, beside TorchRec's least"]
    assert (size["wanted"], size["measured"], size["reached"]) == ("<= 0.0007", pytest.approx(0.00071), "no")
    missing = aims["k2r1+incremental: whole turn / without, beside TorchRec's best"]
    assert (missing["measured"], missing["reached"]) == (None, "-")


def test_what_was_not_measured_is_not_said_to_be_reached() -> None:
    aims = figures.targets({"k2r1": [STEADY]}, {"k2r1": "k2r1"}, 10, None)
    assert len(aims) == len(figures.WANTED) and {aim["reached"] for aim in aims} == {"-"}


def test_the_picture(tmp_path: Path) -> None:
    figures.draw("a shape", measured(), 10).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_ways_by_their_names() -> None:
    _, ways = figures.check(parse(figures))
    assert [way.name for way in ways] == figures.DEFAULT.split(",")
    by_name = {way.name: way for way in ways}
    assert by_name["k2r1+incremental:4"].options == figures.OPTIONS["incremental:4"]
    assert by_name["torchrec+async"].saves == "async" and by_name["torchrec+async"].group == "torchrec"
    assert by_name["k2r1+full"].group == "k2r1+full" and by_name["k2r1"].group == "k2r1"
