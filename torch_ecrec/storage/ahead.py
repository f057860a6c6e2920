"""Reads on while what was read is used."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.storage.store_probe import LIMIT_S, answer_of

T = TypeVar("T")

log = logging.getLogger(__name__)


def read_ahead(items: Iterator[T], most: int, where: str = "the store") -> Generator[T, None, None]:
    """The same items in the same order, drawn by a thread of its own, up to `most` before they are asked for.

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
