"""Looks at a store that may hang: bounded, and said."""

import threading

import pytest

from torch_ecrec.errors import StoreUnavailable
from torch_ecrec.storage import store_probe as module
from torch_ecrec.storage.store_probe import MOST, StoreProbe

LIMIT_S = 60.0


class Store:
    """Hangs until it is told to go on; counts who asks."""

    def __init__(self) -> None:
        self.asked, self.goes_on = 0, threading.Event()

    def ask(self) -> str:
        self.asked += 1
        assert self.goes_on.wait(LIMIT_S)
        return "found"


def test_an_answer_and_an_error_come_as_they_are() -> None:
    assert StoreProbe(lambda: 7, "there", LIMIT_S, print).look() == 7
    with pytest.raises(ZeroDivisionError):
        StoreProbe(lambda: 1 // 0, "there", LIMIT_S, print).look()


def test_a_store_that_hangs_is_told_from_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.05)
    store, told = Store(), []
    looks = StoreProbe(store.ask, "s3://there", 0.3, told.append)
    for _ in range(MOST + 3):
        with pytest.raises(StoreUnavailable, match=r"s3://there has given no answer for 0\.3 s: it hangs"):
            looks.look()
    assert store.asked == MOST, "the fault fires, and the threads that hang do not grow without end"
    assert told == ["s3://there has given no answer for 0.05 s; waits up to 0.3 s"] * (MOST + 3)
    store.goes_on.set()
    assert looks.look() == "found"
