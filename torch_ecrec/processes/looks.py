"""Looks at a store that may hang: a call that never returns keeps its thread, and nobody who waits for it for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torch_ecrec.errors import StoreUnavailable

T = TypeVar("T")

LIMIT_S = 300.0  # for one look at what is small; `--checkpoint-timeout` where that is less
QUIET_S = 10.0  # without an answer, before somebody is told
MOST = 4  # looks that hang: with more of them an answer of one is waited for


class Looks(Generic[T]):
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
        """The answer; of a look that was given up, too, if it comes now: it is no worse.

        Raises:
            StoreUnavailable: there is none within the limit.
            Exception: what asking has raised.
        """
        if self._pending < MOST:
            self._pending += 1
            threading.Thread(target=self._work, name="look at a store", daemon=True).start()
        answer = self._await()
        self._pending -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _work(self) -> None:
        try:
            self._answers.put(self._ask())
        except Exception as error:  # it is raised where it is waited for
            self._answers.put(error)

    def _await(self) -> T | Exception:
        told, until_s = self._limit_s <= QUIET_S, time.monotonic() + self._limit_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, left_s if told else min(left_s, QUIET_S)))
            except queue.Empty:
                if told:
                    raise StoreUnavailable(
                        f"{self._where} has given no answer for {self._limit_s:g} s: it hangs"
                    ) from None
            told = True
            self._tell(f"{self._where} has given no answer for {QUIET_S:g} s; waits up to {self._limit_s:g} s")
