"""Schedules of which one must fail once a rule is taken out."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def first_failure(schedules: Mapping[str, Callable[[], object]]) -> str:
    """What the first one that fails says; "" if none does."""
    for name, schedule in schedules.items():
        try:
            schedule()
        except Exception as error:  # whatever it is: a rule is missed by an error, a wrong bit or by no end
            return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return ""
