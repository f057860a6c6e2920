"""Strangers at the acceptor of the data plane, and descriptors that run out."""

import collections
import contextlib
import errno
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import wait_until
from greeting import hello_of
from socket_pair import (
    WAIT_S,
    Pair,
    both,
    files_open,
    pair_of,
    read_end,
)

from torch_ecrec.protocol import wire
from torch_ecrec.transport import acceptor
from torch_ecrec.transport.acceptor import STRANGERS_MOST
from torch_ecrec.transport.sockets import NO_NAME

PROMPTLY_S = 20.0  # by itself, on whatever machine


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request) as pair:
        yield pair


def stranger(pair: Pair, within_host: bool = False) -> socket.socket:
    """Connected to b, and says nothing."""
    address = pair.b._address
    if within_host:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address.name}")
        return sock
    return socket.create_connection(address.place, WAIT_S)


def reader_threads() -> int:
    return sum(thread.name.startswith("from ") for thread in threading.enumerate())


def refuse_accepts(monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> list[int]:
    """The next calls of `accept` fail; returns the numbers of the errors that were raised."""
    raised: list[int] = []
    accept = socket.socket.accept

    def refusing(self: socket.socket) -> Any:
        if len(raised) < times:
            raised.append(number)
            raise OSError(number, os.strerror(number))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refusing)
    return raised


@both
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_accepting_goes_on_after_an_error(pair: Pair, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = refuse_accepts(monkeypatch, 3, number)
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    assert raised == [number] * 3
    pair.form()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_members_connect_again_when_there_were_no_more_descriptors(pair: Pair) -> None:
    """Strangers, in another process, have used all of them up."""
    code = "import socket, sys; held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(60)]; "
    code += "print('held', flush=True); sys.stdin.read()"
    host, port = pair.b._address.place
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = subprocess.Popen(
        [sys.executable, "-c", code, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_open() + 20, before[1]))
        assert strangers.stdout is not None and strangers.stdin is not None
        assert strangers.stdout.readline() == b"held\n"
        short = "cannot accept a connection"
        wait_until(lambda: pair.b.complaints.counts.get(short, 0) > 0, WAIT_S, "b had no more descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        strangers.communicate(b"", WAIT_S)
    pair.form()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


@both
def test_members_connect_while_a_thousand_strangers_come_and_go(pair: Pair) -> None:
    """They cost no threads, and no more descriptors than there is room for strangers."""
    within_host = pair.b._address.name != NO_NAME
    stop = threading.Event()
    come: list[int] = []

    def be_strange(which: int) -> None:
        held: collections.deque[socket.socket] = collections.deque()
        while not (stop.is_set() and len(come) >= 1000):
            sock = stranger(pair, within_host and len(come) % 2 == 0)
            come.append(which)
            with contextlib.suppress(OSError):  # b has made room already
                sock.send([b"", b"x", b"GET / HTTP/1.0\r\n\r\n", hello_of() + bytes(32)][len(come) % 4])
            held.append(sock)
            if len(held) > 100:
                held.popleft().close()
        for sock in held:
            sock.close()

    threads_before = reader_threads()
    acceptor = pair.b._acceptor
    assert acceptor is not None
    with ThreadPoolExecutor(3) as threads:
        strange = [threads.submit(be_strange, i) for i in range(3)]
        try:
            wait_until(lambda: len(come) > 400, WAIT_S, "strangers come")
            for _ in range(5):
                pair.form()
                # While its hello is late, a member may have to make room, too; then it calls again.
                wait_until(lambda: isinstance(pair.call(wire.Versions(0, 0)), wire.Ok), WAIT_S, "a is let in")
                wait_until(lambda: reader_threads() <= threads_before + 1, WAIT_S, "only a's connection has a thread")
                assert len(acceptor._strangers) <= STRANGERS_MOST
        finally:
            stop.set()  # else they go on, and the pool waits for them without end
        for one in strange:
            one.result(WAIT_S)
    assert pair.b.complaints.counts["a stranger's connection is closed"] > 500
    wait_until(lambda: not acceptor._strangers, WAIT_S, "nobody is left at the acceptor")
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_the_stranger_that_has_kept_silent_longest_makes_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "STRANGERS_MOST", 3)
    assert pair.b._acceptor is not None
    held = []
    for count in range(1, 6):
        held.append(stranger(pair))
        wait_until(lambda: len(pair.b._acceptor._strangers) == min(count, 3), PROMPTLY_S, "it is seen")  # noqa: B023
    assert read_end(held[0]) == b"" and read_end(held[1]) == b""
    held[2].setblocking(False)
    with pytest.raises(BlockingIOError):
        held[2].recv(1)
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    for sock in held:
        sock.close()


def test_a_try_whose_end_was_lost_on_the_way_is_no_complaint(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members try whether they reach a host, and reset that connection: it is sent once, and networks lose packets."""
    monkeypatch.setattr(acceptor, "HELLO_S", 0.2)
    with stranger(pair) as silent, stranger(pair) as half:
        half.sendall(hello_of()[:4])
        assert read_end(silent) == read_end(half) == b""
    assert pair.b.complaints.counts["a stranger's connection is closed"] == 1


def test_a_log_is_not_filled_by_strangers(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with stranger(pair) as sock:
                sock.sendall(hello_of() + bytes(32))
                read_end(sock)
        counts = pair.b.complaints.counts
    assert counts["a stranger's connection is closed"] == 200
    assert sum("a stranger's connection" in record.message for record in caplog.records) <= 2
