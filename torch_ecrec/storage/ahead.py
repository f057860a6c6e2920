"""Reads on while what was read is used."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from torch_ecrec.errors import StoreUnavailable

T = TypeVar("T")

log = logging.getLogger(__name__)

HANGS_S = 300.0  # for one item of a store, before it counts as gone
QUIET_S = 10.0  # before it is told


def read_ahead(items: Iterator[T], most: int, where: str = "the store") -> Generator[T, None, None]:
    """The same items in the same order, drawn by a thread of its own, up to `most` before they are asked for.

    What drawing raises is raised in its place. Whoever stops early closes the generator, as a loop that is left does:
    no further item is begun then.

    Raises:
        StoreUnavailable: the store (`where`) has given none for `HANGS_S`; a call that never returns keeps its thread.
    """
    found = queue.SimpleQueue[tuple[T | None, BaseException | None]]()
    room, unwanted = threading.Semaphore(most), threading.Event()

    def draw() -> None:
        try:
            while room.acquire() and not unwanted.is_set():
                found.put((next(items), None))
        except BaseException as error:  # the end of the items, too: who asked for them hears of it
            found.put((None, error))

    threading.Thread(target=draw, name="reads ahead", daemon=True).start()
    try:
        while True:
            item, error = _next_of(found, where)
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]  # with no error there is one, and it may be None itself
    finally:
        unwanted.set()
        room.release()


def _next_of(found: queue.SimpleQueue[T], where: str) -> T:
    try:
        return found.get(timeout=QUIET_S)
    except queue.Empty:
        log.warning("%s has given nothing for %g s; waits up to %g s", where, QUIET_S, HANGS_S)
    try:
        return found.get(timeout=HANGS_S - QUIET_S)
    except queue.Empty:
        raise StoreUnavailable(f"{where} has given nothing for {HANGS_S:g} s: it hangs") from None
