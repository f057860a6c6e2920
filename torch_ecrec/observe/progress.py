"""How far a long command is, and how long it still takes: one line at the bottom of a terminal, and nothing elsewhere.

    with Progress("verifies checkpoints", total=3_400_000_000, told=size) as progress:
        progress.add(1 << 20)
    # verifies checkpoints: 34 %, 1.1 GiB of 3.2 GiB, 2 min 5 s left

    for part in counted("bench", parts):        # bench: 3 of 12, 40 s left
        ...

It is on standard error, begins after `QUIET_S`, since most commands are done by then, and is gone in the end. What is
printed meanwhile stands above it; of several, one within the other, the outermost is shown. The time that is left is
that of the part before, for as much as is left: so it is about right where all of it takes alike.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from torch_ecrec.observe.words import duration
from torch_ecrec.runtime.threads import Worker, log_error

T = TypeVar("T")

_showing = threading.Lock()  # held by the one that is shown
QUIET_S = 2.0
EVERY_S = 0.5  # the line is written again, also where nothing has moved
CLEAR = "\r\x1b[K"


class Progress:
    """The line of one long piece of work. Use as a context manager. `add` and `at` may be called from any thread.

    Args:
        what: is done, a clause.
        total: of it, in any unit; 0: not known.
        told: formats an amount of that unit.
        out: where; None: standard error. Nothing is said unless it is a terminal.
        now_s: a clock that never goes back.
    """

    def __init__(
        self,
        what: str,
        total: float,
        told: Callable[[float], str] = lambda count: f"{count:.0f}",
        out: IO[str] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._told, self._now_s = what, total, told, now_s
        self._out = sys.stderr if out is None else out
        self._says = False
        self._lock = threading.Lock()  # guards what is below
        self._done, self._text, self._shown = 0.0, "", False
        self._begun_s = now_s()
        self._over = threading.Event()
        self._under: contextlib.ExitStack = contextlib.ExitStack()

    def add(self, count: float) -> None:
        """Counts so much more as done."""
        with self._lock:
            self._done += count

    def at(self, done: float, total: float | None = None) -> None:
        """Notes how much is done in all. `total`: of so much, as is known by now."""
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total

    def show(self, text: str) -> None:
        """This is the line from now on, in words of the caller; "": none is."""
        with self._lock:
            self._text = text
        if not text:
            self.clear()

    def line(self) -> str:
        """Returns what is said now; "": nothing yet."""
        passed_s = self._now_s() - self._begun_s
        with self._lock:
            total, text = self._total, self._text
            done = min(self._done, total) if total else self._done
        if passed_s < QUIET_S or text:
            return text
        if not done and not total:
            return ""
        if not total:
            return f"{self._what}: {self._told(done)}, {duration(passed_s)} so far"
        share = f"{done / total:.0%}, " if self._told(done) != f"{done:.0f}" else ""
        left = f", {duration(passed_s * (total - done) / done)} left" if done else ""
        return f"{self._what}: {share}{self._told(done)} of {self._told(total)}{left}"

    def clear(self) -> None:
        """Takes the line away, until it is written again: something is about to be printed."""
        with self._lock:
            if self._shown:
                self._shown = False
                print(CLEAR, end="", file=self._out, flush=True)

    def __enter__(self) -> Self:
        self._begun_s = self._now_s()
        self._says = self._out.isatty() and _showing.acquire(blocking=False)
        if self._says:
            self._under.enter_context(contextlib.redirect_stdout(_Above(sys.stdout, self)))
            Worker(self._write, "progress", log_error).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        self._under.close()
        self.clear()
        if self._says:
            self._says = False
            _showing.release()

    def _write(self) -> None:
        while not self._over.wait(EVERY_S):
            if line := self.line():
                most = shutil.get_terminal_size().columns - 1
                with self._lock:
                    if not self._over.is_set():
                        print(f"{CLEAR}{line[:most]}", end="", file=self._out, flush=True)
                        self._shown = True


class _Above:
    """Standard output while there is a line: what is printed stands above that."""

    def __init__(self, out: IO[str], progress: Progress) -> None:
        self._out, self._progress = out, progress

    def write(self, text: str) -> int:
        """Writes, where the line was."""
        self._progress.clear()
        return self._out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yields the items, and says how many are done, and how long the others take."""
    with Progress(what, len(items)) as progress:
        for item in items:
            yield item
            progress.add(1)
