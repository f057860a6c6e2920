"""Of all pairs of two parameters a part that has each of them; the others are marked slow, and run in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def thinned(first: Sequence[Any], second: Sequence[Any], every: int) -> list[Any]:
    """Of pairs every so-manieth, along diagonals; `every` is at most as many as either has."""
    return [
        pytest.param(a, b, marks=[] if (i + j) % every == 0 else [pytest.mark.slow])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
