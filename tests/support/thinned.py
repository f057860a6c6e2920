"""What of a test runs every day: the rest is marked slow, and runs in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest


def thinned(first: Sequence[Any], second: Sequence[Any], every: int) -> list[Any]:
    """Of all pairs of two parameters every so-manieth, along diagonals; `every` is at most as many as either has."""
    return [
        pytest.param(a, b, marks=[] if (i + j) % every == 0 else [pytest.mark.slow])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def in_turns(name: str, some: Any, all_of_them: Any = 1) -> pytest.MarkDecorator:
    """A parameter that is one thing every day, and another in turns: how wide a sweep is, say, where 1 is all of it."""
    return pytest.mark.parametrize(name, [some, pytest.param(all_of_them, marks=pytest.mark.slow)], ids=["some", "all"])


def drawn_for(part: int) -> Callable[[Any], Any]:
    """Draws other examples for each part of a long test, the same in every run; new ones with profile `explore`."""
    return hypothesis.seed(part) if hypothesis.settings().derandomize else lambda test: test
