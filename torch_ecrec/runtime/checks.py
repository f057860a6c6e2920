"""What arguments must be, said in one line where they are checked."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises unless `value` is an int with `least <= value <= most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}")
