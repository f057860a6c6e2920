"""Standard output that nobody reads to its end, or that cannot be written: which of two errors it is, and its end.

An `OSError` tells no more than that some disk is full. Once `name_errors` was called, one of standard output names it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

NAME = "standard output"


def name_errors() -> None:
    """Makes errors of standard output name it, but for the one that its reader is gone, which has a type of its own."""
    for what in ("write", "flush"):
        setattr(sys.stdout, what, _named(getattr(sys.stdout, what)))


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, NAME) from None

    return call


def drop_rest() -> None:
    """Lets what is left in the buffer of standard output go nowhere, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
