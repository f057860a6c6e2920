"""The line that says how far a long command is: on a terminal only, above it what is printed, gone in the end."""

from __future__ import annotations

import io
import threading

import pytest
from conftest import wait_until

from torch_ecrec.observe import progress
from torch_ecrec.observe.progress import Progress, counted
from torch_ecrec.observe.words import size

LIMIT_S = 300.0  # only a hang reaches it


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_said() -> None:
    clock = Clock()
    one = Progress("verifies", 4 << 30, size, io.StringIO(), clock)
    with one:
        one.add(1 << 30)
        clock.now_s = 1.9
        assert one.line() == "", "most is done by then"
        clock.now_s = 20.0
        assert one.line() == "verifies: 25%, 1.0 GiB of 4.0 GiB, 60 s left"
        one.add(10 << 30)
        assert one.line() == "verifies: 100%, 4.0 GiB of 4.0 GiB, 0.0 s left", "an estimate of all was too low"
        one.show("slot 1 30%")
        assert one.line() == "slot 1 30%"
    counts = Progress("parts", 3, out=io.StringIO(), now_s=clock)
    with counts:
        assert counts.line() == ""
        clock.now_s += 30.0
        assert counts.line() == "parts: 0 of 3", "nobody knows yet how long one takes"
        counts.at(1)
        assert counts.line() == "parts: 1 of 3, 60 s left"
    unknown = Progress("reads", 0, size, io.StringIO(), clock)
    with unknown:
        clock.now_s += 200.0
        assert unknown.line() == "", "nothing is known"
        unknown.add(2048)
        assert unknown.line() == "reads: 2.0 KiB, 3 min 20 s so far"


def test_nothing_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with Progress("work", 3):
        assert threading.active_count() == before, "nobody writes"
        print("a result")
    assert capsys.readouterr() == ("a result\n", "")


def test_on_a_terminal_it_is_shown_and_gone_and_what_is_printed_stands_above(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    terminal, clock = Terminal(), Clock()
    with Progress("work", 4, out=terminal, now_s=clock) as one:
        clock.now_s = 10.0
        one.add(2)
        wait_until(lambda: "work: 2 of 4, 10 s left" in terminal.getvalue(), LIMIT_S, "the line")
        with Progress("inner", 2, out=terminal, now_s=clock) as inner:
            inner.add(1)
            clock.now_s = 20.0
            print("a result")
            length = len(terminal.getvalue())
            wait_until(lambda: len(terminal.getvalue()) > length, LIMIT_S, "it is written again")
    assert "inner" not in terminal.getvalue(), "one line at a time: the outermost"
    assert terminal.getvalue().endswith(progress.CLEAR) and capsys.readouterr().out == "a result\n"
    with Progress("next", 1, out=terminal, now_s=clock):
        wait_until(lambda: "next: 0 of 1" in terminal.getvalue(), LIMIT_S, "another one, later")


def test_items_are_counted_also_where_the_loop_is_left() -> None:
    assert list(counted("work", [1, 2, 3])) == [1, 2, 3]
    for item in counted("work", range(5)):
        if item == 2:
            break
    assert not progress._showing.locked()
