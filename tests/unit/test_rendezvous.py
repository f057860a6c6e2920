"""Members of a world of torch RPC find a store that all of them reach, whoever cannot reach whom."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from torch_ecrec.transport import rendezvous
from torch_ecrec.transport.rendezvous import gather

MEMBERS = ["a", "b", "c", "d"]
PAIRS = list(itertools.combinations(MEMBERS, 2))
LIMIT_S = 60.0


class _Overtaken(Exception):
    """What `check` raises."""


@pytest.fixture(autouse=True)
def looks_further_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rendezvous, "WIDEN_S", 0.01)
    yield


def met(cut: set[tuple[str, str]], first: str, ended: threading.Event) -> tuple[dict[str, str], list[threading.Thread]]:
    """Where each member has met the others, filled by threads, one a member. `cut`: pairs that cannot connect."""
    stores: dict[str, Store] = {member: HashStore() for member in MEMBERS}
    found: dict[str, str] = {}

    def run(name: str) -> None:
        def store_at(other: str) -> Store:
            if (name, other) in cut or (other, name) in cut:
                raise RuntimeError(f"{name} cannot reach {other}")
            return stores[other]

        def check() -> None:
            if ended.is_set():
                raise _Overtaken

        try:
            found[name], store = gather(name, MEMBERS, first, store_at, lambda *why: None, check)
            assert store is stores[found[name]]
        except _Overtaken:
            pass

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in MEMBERS]
    for thread in threads:
        thread.start()
    return found, threads


@pytest.mark.parametrize("first", ["a", "c"])
def test_they_meet_wherever_one_is_reached_by_all(first: str) -> None:
    """Every set of pairs that cannot reach each other."""
    impossible = 0
    for count in range(len(PAIRS) + 1):
        for cut in itertools.combinations(PAIRS, count):
            reached = [one for one in MEMBERS if not any(one in pair for pair in cut)]
            ended = threading.Event()
            found, threads = met(set(cut), first, ended)
            if not reached:  # nobody may go on; that takes a moment in which nothing happens
                impossible += 1
                threads[0].join(0.05)
                assert not found, (cut, found)
                ended.set()
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive(), cut
            if reached:
                assert set(found) == set(MEMBERS) and len(set(found.values())) == 1, (cut, found)
                assert next(iter(found.values())) in reached
                assert first not in reached or count or next(iter(found.values())) == first
    assert 0 < impossible < 2 ** len(PAIRS)
