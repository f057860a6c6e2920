"""Calls in C that hold the interpreter's lock all the time: no Python runs in any thread of the process."""

from __future__ import annotations

import ctypes
import random
import re
import time
from collections.abc import Callable


def spin(seconds: float) -> None:
    """Computes. (No step of it is of the interpreter, which would let others run in between.)"""
    next(filter((time.monotonic() + seconds).__lt__, iter(time.monotonic, None)))


def wait(seconds: float) -> None:
    """Waits."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def _again(call: Callable[[int], object], size: int, seconds: float) -> None:
    """One call, large enough to take so long, as far as smaller ones tell."""
    while True:
        began_s = time.monotonic()
        call(size)
        if (took_s := time.monotonic() - began_s) >= seconds:
            return
        size = int(size * max(1.5, min(4.0, 1.2 * seconds / max(took_s, 1e-3))))


def _sort(size: int) -> None:
    sorted(random.Random(0).randbytes(size))


def _match(size: int) -> None:
    re.search("a*b", "a" * size)  # the square of it


KINDS: dict[str, Callable[[float], None]] = {
    "spins": spin,
    "sorts": lambda seconds: _again(_sort, 1 << 22, seconds),
    "matches": lambda seconds: _again(_match, 1 << 14, seconds),
}
