"""Reading ahead: the same items in the same order, no further than it may, errors in their place, and an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from torch_ecrec.errors import StoreUnavailable
from torch_ecrec.storage import store_probe
from torch_ecrec.storage.store_probe import read_ahead

WITHIN_S = 60.0


def test_items_come_in_order_none_included() -> None:
    items = [3, None, "x", b""]
    assert list(read_ahead(iter(items), 2)) == items
    assert list(read_ahead(iter([]), 2)) == []


def test_it_reads_while_others_are_used_and_no_further() -> None:
    drawn, reached = [], threading.Event()

    def items() -> Iterator[int]:
        for i in range(100):
            drawn.append(i)
            if i == 3:
                reached.set()
            yield i

    found = read_ahead(items(), 3)
    assert next(found) == 0
    assert reached.wait(WITHIN_S), "nothing is read before it is asked for"
    assert max(drawn) <= 3, "one is used, three are held"
    assert list(found) == list(range(1, 100))


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("a hole in the file")

    found = read_ahead(items(), 8)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="a hole in the file"):
        next(found)


def test_who_stops_early_ends_the_thread() -> None:
    drawn = []

    def items() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    before = set(threading.enumerate())
    found = read_ahead(items(), 2)
    next(found)
    (reader,) = set(threading.enumerate()) - before
    found.close()
    reader.join(WITHIN_S)
    assert not reader.is_alive() and len(drawn) <= 4


def test_a_store_that_hangs_is_no_store(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store_probe, "QUIET_S", 0.1)
    monkeypatch.setattr(store_probe, "LIMIT_S", 0.3)
    goes_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert goes_on.wait(WITHIN_S)
        yield 2

    found = read_ahead(items(), 2, "s3://there")
    assert next(found) == 1
    with pytest.raises(StoreUnavailable, match=r"s3://there has given nothing for 0\.3 s: it hangs"):
        next(found)
    assert "s3://there has given nothing for 0.1 s; waits up to 0.3 s" in caplog.text
    goes_on.set()
