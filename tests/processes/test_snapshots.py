"""The copies of dense snapshots from one holder to another, over real connections."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import wait_until
from torch import nn

from torch_ecrec.nn.dense import DenseSnapshot, load_
from torch_ecrec.protocol import pieces, wire
from torch_ecrec.runtime import shared
from torch_ecrec.server.snapshots import SnapshotStore
from torch_ecrec.transport.sockets import SocketTransport

WAIT_S = 300.0  # for anything at all: only a hang reaches it


class Holder:
    """A slot that keeps snapshots, as far as its `SnapshotStore` knows it: beside another one."""

    def __init__(self, index: int, trainers: int) -> None:
        self.life, self.dead, self.ready = (index, 1), False, True
        self.held = SimpleNamespace(job=SimpleNamespace(trainers=trainers), sealed=True)
        self.snapshot_slots = (0, 1)
        self.load_end = None
        self.met: list[tuple[int, int]] = []
        self.answers: list[Any] = []
        self.lock = threading.RLock()
        self.store = SnapshotStore(self, self, self)
        self.transport = SocketTransport(str(index), self.handle, "127.0.0.1")

    def handle(self, request: Any, reply: Callable[[Any], None]) -> None:
        def noted(answer: Any) -> None:
            self.answers.append(answer)
            reply(answer)

        with self.lock:
            self.store.on_fetch(request, noted)

    def ask_once(self, slot: int, make: Callable[[int], Any], done: Callable[[Any], None]) -> None:
        def on_outcome(outcome: wire.Outcome) -> None:
            answer = outcome.answer if isinstance(outcome, wire.Ok) else None
            with self.lock:
                done(None if isinstance(answer, wire.Refused) else answer)

        self.transport.call(str(slot), make(1), WAIT_S, on_outcome)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        def locked() -> None:
            with self.lock:
                action()

        timer = threading.Timer(delay_s, locked)
        timer.daemon = True
        timer.start()

    def known_incarnations(self) -> list[int]:
        return [1, 1]

    def meet(self, slot: int, incarnation: int) -> None:
        self.met.append((slot, incarnation))

    def on_snapshots_copied(self) -> None:
        pass


@pytest.fixture(params=["tcp", "shared"])
def holders(request: pytest.FixtureRequest) -> Iterator[list[Holder]]:
    shared.enable(256 << 20 if request.param == "shared" else 0)
    found = [Holder(i, trainers=8) for i in range(2)]
    try:
        for holder in found:
            holder.transport.follow(1, {str(i): one.transport.endpoint for i, one in enumerate(found)})
        yield found
    finally:
        for holder in found:
            holder.dead = True
            holder.transport.close()
        shared.enable(0)


def same(a: Holder, b: Holder) -> bool:
    return a.store.parts.keys() == b.store.parts.keys() and all(
        header == b.store.parts[key][0] and torch.equal(payload, b.store.parts[key][1])
        for key, (header, payload) in a.store.parts.items()
    )


def test_a_rebuilt_holder_gets_the_parts_of_many_trainers(holders: list[Holder]) -> None:
    """1,000 parameters with AdamW, 8 trainers, 30 steps. With an index in every part these were 69 MiB of headers in
    one message, which no frame takes: the new holder asked again and again, for ever."""
    new, old = holders
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for trainer in range(8):
        packer = DenseSnapshot(model, trainer, 8)
        packer.use([optimizer])
        old.store.parts[1, trainer] = packer.pack(1, b"own" * trainer)[::-1]  # type: ignore[assignment]
    one = dict(old.store.parts)
    for step, trainer in itertools.product(range(2, 31), range(8)):
        header, payload = one[1, trainer]
        old.store.parts[step, trainer] = header[:1] + header[1:], payload.clone()
    new.store.copy_all()
    wait_until(lambda: new.store.complete, WAIT_S, "not all snapshots were copied")
    assert not new.store.lacks_all and same(new, old) and (0, 1) in old.met
    other = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    restored = torch.optim.AdamW(other.parameters())
    parts = [new.store.parts[30, trainer][::-1] for trainer in range(8)]
    assert load_(other, [restored], parts, 5) == 1  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_large_parts_come_in_answers_of_bounded_size(holders: list[Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 20)
    new, old = holders
    for trainer in range(8):
        payload = torch.from_numpy(shared.empty((3_000_000 + trainer,), "u1")).random_(0, 256)
        old.store.parts[7, trainer] = [7, trainer], payload
    new.store.copy_all()
    wait_until(lambda: new.store.complete, WAIT_S, "not all snapshots were copied")
    assert same(new, old)
    assert len(old.answers) == 23
    assert all(sum(payload.nbytes for payload in answer.payloads) <= 1 << 20 for answer in old.answers)


def test_an_answer_that_makes_no_sense_is_none(holders: list[Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, from the beginning; a request that makes no sense is refused."""
    new, old = holders
    old.store.parts[7, 0] = [7], torch.arange(100, dtype=torch.uint8)
    cut = pieces.cut
    wrong = [
        wire.Snapshots([7], [0], [[7]], []),
        wire.Snapshots([7], [0], [[7]], [torch.zeros(1, dtype=torch.uint8)], [1, 2]),
    ]
    monkeypatch.setattr("torch_ecrec.server.snapshots.cut", lambda *args: wrong.pop() if wrong else cut(*args))
    new.store.copy_all()
    wait_until(lambda: new.store.complete, WAIT_S, "not all snapshots were copied")
    assert not wrong and same(new, old)
    refused: list[Any] = []
    old.store.on_fetch(wire.FetchSnapshots(1, 1, -1, begin=[1, 2]), refused.append)
    assert isinstance(refused[0], wire.Refused) and "`begin` must be 3 integers" in refused[0].reason
