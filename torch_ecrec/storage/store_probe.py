"""Looks at a store that may hang: a call that never returns keeps its thread, and nobody who waits for it for ever.

StoreProbe   the same question, asked until it is answered
read_ahead   items of a store, read while those before are used
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from torch_ecrec.errors import StoreUnavailable
from torch_ecrec.runtime.threads import Worker, log_error

T = TypeVar("T")

log = logging.getLogger(__name__)

LIMIT_S = 300.0  # for one look at what is small, or one item; `--checkpoint-timeout` where that is less
QUIET_S = 10.0  # without an answer, before somebody is told
MOST = 4  # looks that hang: with more of them an answer of one is waited for


class StoreProbe(Generic[T]):
    """The same question, asked until it is answered.

    Args:
        ask: asks it.
        where: the store, for people.
        limit_s: for one answer.
        tell: gets words on a store that has given none for a while.
    """

    def __init__(self, ask: Callable[[], T], where: str, limit_s: float, tell: Callable[[str], object]) -> None:
        self._ask, self._where, self._limit_s, self._tell = ask, where, limit_s, tell
        self._answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._pending = 0

    def look(self) -> T:
        """Returns the answer; of a look that was given up, too, if it comes now: it is no worse.

        Raises:
            StoreUnavailable: there is none within the limit.
            Exception: what asking has raised.
        """
        if self._pending < MOST:
            self._pending += 1
            Worker(self._work, "look at a store", log_error).start()
        answer = answer_of(self._answers, self._where, self._limit_s, self._tell)
        self._pending -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _work(self) -> None:
        try:
            self._answers.put(self._ask())
        except Exception as error:  # it is raised where it is waited for
            self._answers.put(error)


def answer_of(
    found: queue.SimpleQueue[T], where: str, limit_s: float, tell: Callable[[str], object], none: str = "no answer"
) -> T:
    """Waits for what a store puts into `found`, and returns it. `tell` gets a message if the store is silent for a
    while; `none` says in it what is missing.

    Raises:
        StoreUnavailable: it has given none within the limit.
    """
    quiet_s = min(QUIET_S, limit_s)
    try:
        return found.get(timeout=quiet_s)
    except queue.Empty:
        if quiet_s < limit_s:
            tell(f"{where} has given {none} for {quiet_s:g} s; waits up to {limit_s:g} s")
    try:
        return found.get(timeout=limit_s - quiet_s)
    except queue.Empty:
        raise StoreUnavailable(f"{where} has given {none} for {limit_s:g} s: it hangs") from None


def read_ahead(items: Iterator[T], most: int, where: str = "the store") -> Generator[T, None, None]:
    """Yields the same items in the same order, drawn by a thread of its own, up to `most` before they are asked for.

    What drawing raises is raised in its place. Whoever stops early closes the generator, as a loop that is left does:
    no further item is begun then.

    Raises:
        StoreUnavailable: the store (`where`) has given none for `LIMIT_S`; a call that never returns keeps its thread.
    """
    found = queue.SimpleQueue[tuple[T | None, BaseException | None]]()
    room, unwanted = threading.Semaphore(most), threading.Event()

    def draw() -> None:
        try:
            while room.acquire() and not unwanted.is_set():
                found.put((next(items), None))
        except BaseException as error:  # the end of the items, too: who asked for them hears of it
            found.put((None, error))

    Worker(draw, "reads ahead", log_error).start()
    try:
        while True:
            item, error = answer_of(found, where, LIMIT_S, log.warning, "nothing")
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]  # with no error there is one, and it may be None itself
    finally:
        unwanted.set()
        room.release()
