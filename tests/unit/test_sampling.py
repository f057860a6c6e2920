"""Tests take turns, nothing is forgotten, and nothing is left for the next."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import refuse_long_ones
from places import ROOT
from process_state import differences, put_back, state
from sampling import SLOW_LIMIT_S, SLOW_TURNS, TAKE_TURNS, TIER_FRAMES, TURNS, frames_of, kept


def test_some_turns_visit_everything_and_each_has_about_as_much() -> None:
    names = [f"tests/a.py::test_{i}" for i in range(200)] + [f"tests/b.py::test[{i}]" for i in range(100)]
    always = {"tests/a.py::test_7", "tests/b.py::test[3]"}
    turns = [kept(names, turn, str, lambda name: name not in always) for turn in range(TURNS)]
    assert set().union(*turns) == set(names)
    assert sum(map(len, turns)) == len(names) + len(always) * (TURNS - 1), "each once, but for what always runs"
    assert all(always <= set(turn) and sorted(turn, key=names.index) == turn for turn in turns)
    assert all(len(names) / TURNS / 2 < len(turn) < 2 * len(names) / TURNS for turn in turns)
    assert kept(names, TURNS, str, lambda name: name not in always) == turns[0]


def test_what_takes_turns_is_there() -> None:
    assert not [name for name in sorted(TAKE_TURNS) if not (ROOT / "tests" / name).exists()]


def test_each_turn_has_its_tiers_and_the_first_none() -> None:
    assert frames_of(0) == 0 and {frames_of(turn) for turn in range(TURNS)} == set(TIER_FRAMES)
    for turn in range(TURNS):
        for apart in (TURNS, SLOW_TURNS):
            assert {frames_of(turn + apart * i) for i in range(len(TIER_FRAMES))} == set(TIER_FRAMES)


def test_a_slow_test_that_is_too_long_for_a_turn_is_refused() -> None:

    def item(limit_s: float) -> Any:
        marks = {"timeout": pytest.mark.timeout(limit_s).mark}
        return SimpleNamespace(nodeid="tests/a.py::test_of_hours", get_closest_marker=marks.get)

    refuse_long_ones([item(SLOW_LIMIT_S)])
    with pytest.raises(pytest.UsageError, match=r"cut these into parts: .*test_of_hours"):
        refuse_long_ones([item(SLOW_LIMIT_S), item(SLOW_LIMIT_S + 1)])


@pytest.mark.smoke
def test_what_a_test_leaves_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's that runs the tests after it: a level of our logger made one of them wait in vain."""
    before = state()
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("torch_ecrec"), "level", logging.ERROR)
        patch.setenv("TORCH_ECREC_JOIN", "127.0.0.1:1")
        patch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, _: tensor)
        torch.set_grad_enabled(False)
        left = differences(before, state())
        torch.set_grad_enabled(True)
    assert [line.split(":")[0] for line in left] == [
        "gradients",
        "logger",
        "os.environ, TORCH_ECREC_JOIN",
        "torch.Tensor, __deepcopy__",
    ]
    assert not differences(before, state())
    monkeypatch.setenv("OF_TORCHREC", "1")
    monkeypatch.setattr(logging.getLogger("torch_ecrec"), "handlers", [logging.NullHandler()])
    assert len(differences(before, state())) == 2
    put_back(before)
    assert not differences(before, state())
