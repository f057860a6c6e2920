"""What a script prints and saves, compared between two runs; and the warnings that a verdict repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_ecrec.rehearsal import outputs
from torch_ecrec.rehearsal.compare import Verdict, with_warnings
from torch_ecrec.rehearsal.outputs import Odd, Output, odds, shape_of

CALM = ["begun", "step 2 loss 0.5", "step 4 loss 0.25", "average 3f2a91c0de, bias -1.5e-03"]


def of(*lives: list[str], files: dict[str, str] | None = None) -> Output:
    return Output({0: lives}, files or {})


def test_a_restarted_script_prints_some_lines_again_and_the_rest_once() -> None:
    assert odds(of(CALM), of(CALM[:2], [CALM[0], *CALM[2:]])) == []
    assert odds(of(CALM), of(CALM[:2], ["goes on after step 3", CALM[0], *CALM[2:]])) == [], "nothing is like it"


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (["begun", CALM[2], "average 77aa91c0de, bias -1.5e-03"], "undisturbed, and prints 'average 77aa91c0de, bias"),
        (["begun", CALM[2]], "undisturbed, and does not print it"),
        (
            ["begun", "step 4 loss 0.26", CALM[3]],
            "prints 'step 4 loss 0.25' undisturbed, and prints 'step 4 loss 0.26'",
        ),
        (["begun", *CALM[2:], "step 6 loss 0.1"], "prints 'step 6 loss 0.1', which it does not undisturbed"),
    ],
    ids=["hash", "missing", "number", "more"],
)
def test_every_way_of_printing_otherwise_is_found(second: list[str], says: str) -> None:
    (odd,) = odds(of(CALM), of(CALM[:2], second))
    assert odd.text.startswith("trainer 0 prints ") and says in odd.text
    assert odds(of(CALM), Output({})) != [], "nothing at all was printed"


def test_lines_that_differ_in_numbers_alone_are_alike() -> None:
    assert shape_of("step 20  loss 0.6931  12,345 samples/s") == shape_of("step 40  loss 1e-7  9,1 samples/s")
    assert shape_of("average 3f2a91c0de") == shape_of("average deadbeefca") != shape_of("average of weights")
    (odd,) = odds(of(["took 3.5 s"]), of(["took 4.5 s"]))
    (noise,) = odds(of(["took 3.5 s"]), of(["took 9 s"]))
    assert odd.like == noise.like == "lines like 'took # s'"


@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        ({"a": "1"}, {"a": "1"}, None),
        ({"a": "1"}, {"a": "2"}, "the file a has other bytes"),
        ({"a": "1"}, {}, "the file a is not written"),
        ({}, {"a": "1"}, "the file a is written only"),
    ],
)
def test_files_are_compared_by_their_bytes(mine: dict[str, str], theirs: dict[str, str], says: str | None) -> None:
    expected = [] if says is None else [Odd("the file a", says)]
    assert odds(of([], files=mine), of([], files=theirs)) == expected


def test_what_was_written_since_is_found_wherever_it_is_below(tmp_path: Path) -> None:
    out = tmp_path / "rehearsal"
    for name in ("kept.txt", "again.txt", "deep/er/old.bin", ".hidden/x", "rehearsal/log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    before = outputs.stamps(tmp_path, out)
    assert set(before) == {"kept.txt", "again.txt", "deep/er/old.bin"}
    (tmp_path / "again.txt").write_text("before, and more")
    (tmp_path / "deep/er/new.bin").write_bytes(b"1")
    (tmp_path / "rehearsal/log").write_text("more")
    (tmp_path / ".hidden/x").write_text("more")
    found = outputs.written(tmp_path, out, before)
    assert set(found) == {"again.txt", "deep/er/new.bin"} and len(set(found.values())) == 2


def test_lines_of_every_start_are_read_but_for_one_that_is_not_whole(tmp_path: Path) -> None:
    for attempt, text in ((0, "begun\nstep 1\nste"), (10, "begun\nstep 3\n"), (2, "begun\nstep 2\n")):
        folder = tmp_path / "run" / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(text)
    assert outputs.printed(tmp_path) == {0: [["begun", "step 1"], ["begun", "step 2"], ["begun", "step 3"]]}


def test_a_verdict_repeats_every_warning_once_for_each_run() -> None:
    equal = Verdict(True, "EQUAL: 3 steps")
    assert with_warnings(equal, {"undisturbed": [], "restarted": []}) == equal
    found = with_warnings(equal, {"undisturbed": ["a"], "restarted": ["b", "a", "b"]})
    assert found.equal and found.text.splitlines()[0] == "EQUAL: 3 steps"
    assert found.text.splitlines()[2:] == ["  undisturbed: a", "  restarted: b", "  restarted: a"]
