"""Actions after a delay."""

from __future__ import annotations

import threading

import pytest

from torch_ecrec.transport.timers import Timers


@pytest.mark.parametrize("delay_s", [1e10, 1e300, float("inf")])
def test_what_is_due_in_centuries_holds_up_nothing_else(delay_s: float) -> None:
    """Such is the pause after a portion of a rebuild whose limit is close to 0."""
    errors, done = list[BaseException](), threading.Event()
    timers = Timers(errors.append)
    try:
        timers.later(delay_s, lambda: errors.append(AssertionError("too early")))
        timers.later(0.01, done.set)
        assert done.wait(30.0), errors
    finally:
        timers.close()
    assert not errors
