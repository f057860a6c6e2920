"""Two socket transports in this process, and what tests send between them."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from greeting import greet, hello_of

from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE, Vocabulary
from torch_ecrec.runtime import shared
from torch_ecrec.transport.frames import Frame
from torch_ecrec.transport.sockets import SocketTransport

HERE = "127.0.0.1"
WAIT_S = 300.0  # for anything at all: only a hang reaches it
SHARED_BYTES = 256 << 20


class _Any:
    """Equal to everything, and contains it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __contains__(self, item: object) -> bool:
        return True

    def __iter__(self) -> Iterator[torch.dtype]:
        return iter(())


AnyTensor: Any = wire.TensorOf("AnyTensor", _Any(), _Any())  # type: ignore[arg-type]


class Parcels(wire.Answer):
    parts: list[AnyTensor]


class Parcel(wire.Request[Parcels | wire.VersionsAre]):
    """A message of these tests: it carries tensors of any kind."""

    parts: list[AnyTensor]


PARCELS = Vocabulary([*WIRE.requests.values(), Parcel])


class Pair:
    """Transports a and b, members of one cluster. b handles with `self.handle`, which a test may replace."""

    def __init__(self) -> None:
        self.versions = itertools.count(1)
        self.handle: Callable[[Any, Any], None] = lambda request, reply: reply(wire.VersionsAre({0: 1}))
        answer = wire.VersionsAre({0: 0})
        self.a = SocketTransport("a", lambda request, reply: reply(answer), HERE, vocabulary=PARCELS)
        self.b = SocketTransport("b", lambda request, reply: self.handle(request, reply), HERE, vocabulary=PARCELS)
        self.form()

    def form(self) -> None:
        """Both leave each other, and are members again: what was between them has ended."""
        for one in (self.a, self.b):
            one.follow(next(self.versions), {one.name: one.endpoint})
        version = next(self.versions)
        for one in (self.a, self.b):
            one.follow(version, {"a": self.a.endpoint, "b": self.b.endpoint})

    def start(self, request: wire.Request, timeout_s: float = WAIT_S) -> Callable[[], wire.Outcome]:
        """Has a call b; what is returned waits for the outcome."""
        ended = threading.Event()
        outcomes: list[wire.Outcome] = []

        def done(outcome: wire.Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self.a.call("b", request, timeout_s, done)

        def outcome() -> wire.Outcome:
            assert ended.wait(timeout_s + WAIT_S), "`done` was not called"
            (found,) = outcomes
            return found

        return outcome

    def call(self, request: wire.Request, timeout_s: float = WAIT_S) -> wire.Outcome:
        return self.start(request, timeout_s)()

    def connect(self, key: bytes | None = None, caller: bytes = b"a", build: bytes | None = None) -> socket.socket:
        """A connection of a stranger to b."""
        sock = socket.create_connection(self.b._address.place, WAIT_S)
        greet(sock, self.b, hello_of(caller, build or self.b.build.digest), key)
        return sock


@contextlib.contextmanager
def pair_of(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Over TCP, or over a Unix socket and with shared memory: tests with `both` have it both ways."""
    shared.enable(SHARED_BYTES if getattr(request, "param", "tcp") == "shared" else 0)
    pair = Pair()
    try:
        yield pair
    finally:
        pair.a.close()
        pair.b.close()
        shared.enable(0)


both = pytest.mark.parametrize("pair", ["tcp", "shared"], indirect=True)
lends = pytest.mark.parametrize("pair", ["shared"], indirect=True)


def parcel(parts: list[torch.Tensor], slot: int = 0) -> Parcel:
    """A request that carries tensors."""
    return Parcel(slot, 0, parts)


def tensors(many: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(many + size)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for _ in range(many)]


def read_end(sock: socket.socket) -> bytes:
    """What a stranger gets before its connection is closed."""
    got = b""
    try:
        while part := sock.recv(1000):
            got += part
    except ConnectionResetError:
        pass
    return got


def as_bytes(frame: Frame, summed: bool = False) -> bytes:
    """What travels; `summed` as on a connection to another host."""
    frame._begin(None, summed)
    return b"".join(frame._parts)


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))
