"""What `torch-ecrec up` says of itself: what is new in a verdict, once, and that it is over."""

from __future__ import annotations

from typing import Literal

from torch_ecrec.observe.changes import AGAIN_S, LEAST_S, Changes
from torch_ecrec.observe.verdict import EXIT_CODES, Finding, Verdict

WELL = Verdict("OK", "training goes on", [], [])


def verdict(*codes: str) -> Verdict:
    """One with these findings: in capitals an ERROR, else a WARN."""
    found = [Finding("ERROR" if one.isupper() else "WARN", one.lower(), f"{one} is so", f"mend {one}") for one in codes]
    found.sort(key=lambda one: -EXIT_CODES[one.level])
    level: Literal["OK", "WARN", "ERROR"] = found[0].level if found else "OK"
    return Verdict(level, found[0].what if found else "all is well", found, [])


def test_what_is_new_is_told_once_with_what_to_do_and_when_it_is_over() -> None:
    changes = Changes()
    assert changes.lines(WELL, 0.0) == []
    assert changes.lines(verdict("disk"), 10.0) == ["WARN: disk is so", "  to do: mend disk"]
    assert changes.lines(verdict("disk"), 20.0) == changes.lines(verdict("disk"), 2000.0) == []
    assert changes.lines(verdict("disk", "NET"), 2010.0) == ["ERROR: NET is so", "  to do: mend NET"]
    assert changes.lines(verdict("disk"), 2020.0) == ["WARN: disk is so"], "the worst is over"
    assert changes.lines(WELL, 2030.0) == ["OK: training goes on"] and changes.lines(WELL, 2040.0) == []


def test_what_gets_worse_is_told_again() -> None:
    changes = Changes()
    assert changes.lines(verdict("trainers"), 0.0)[0] == "WARN: trainers is so"
    assert changes.lines(verdict("TRAINERS"), 70.0)[0] == "ERROR: TRAINERS is so"


def test_what_comes_and_goes_is_told_once_a_minute() -> None:
    changes, told = Changes(), list[str]()
    for at in range(0, 240, 2):
        told += changes.lines(verdict("NET") if at % 4 else WELL, float(at))
    assert told.count("ERROR: NET is so") == 240 / AGAIN_S
    assert told.count("OK: training goes on") == 240 / AGAIN_S


def test_what_is_over_at_once_is_not_told_after_something_else() -> None:
    changes = Changes()
    assert changes.lines(verdict("disk"), 10.0)
    assert changes.lines(verdict("disk", "NET"), 10.0 + LEAST_S / 2) == []
    assert changes.lines(verdict("disk"), 10.0 + LEAST_S) == []


def test_that_it_has_yet_to_begin_is_nothing_new_but_later_it_is() -> None:
    changes = Changes()
    assert changes.lines(verdict("looks"), 0.0) == changes.lines(verdict("gathering"), 10.0) == []
    assert changes.lines(WELL, 20.0) == []
    assert changes.lines(verdict("gathering"), 30.0), "all begin again after a checkpoint"


def test_a_cluster_that_cannot_begin_is_told_at_once() -> None:
    assert Changes().lines(verdict("gathering", "NOTHING_TO_BEGIN_WITH"), 0.0)[0].startswith("ERROR: NOTHING")
