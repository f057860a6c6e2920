"""The control channel: lines, ends of peers, bad lines, threads. One real process, to be killed."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from places import ROOT

from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.spec.settings import Settings, trusted_network
from torch_ecrec.transport import control
from torch_ecrec.transport.control import ControlClient, ControlServer, LineConnection, Lines, encode_line, request
from torch_ecrec.transport.liveness import ALIVE, COMPUTES, GONE, SignOfLife

WAIT_S = 300.0  # for anything at all: only a hang reaches it
PROMPTLY_S = 20.0  # by itself, on whatever machine


class Running:
    """A server on a thread of its own; what its callbacks get is had from queues."""

    def __init__(self, port: int = 0) -> None:
        self.messages: queue.Queue[tuple[LineConnection, dict[str, Any]]] = queue.Queue()
        self.closed: queue.Queue[LineConnection] = queue.Queue()
        self.threads: set[int] = set()
        self.error: BaseException | None = None
        self.server = ControlServer("127.0.0.1", port, self.on_message, self.on_closed)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.serve_forever()
        except BaseException as error:
            self.error = error

    def on_message(self, connection: LineConnection, message: dict[str, Any]) -> None:
        self.threads.add(threading.get_ident())
        if message.get("fail"):
            raise ZeroDivisionError("told to")
        if message.get("echo"):
            connection.send(message)
        self.messages.put((connection, message))

    def on_closed(self, connection: LineConnection) -> None:
        self.threads.add(threading.get_ident())
        self.closed.put(connection)

    def message(self) -> tuple[LineConnection, dict[str, Any]]:
        return self.messages.get(timeout=WAIT_S)

    def stop(self) -> None:
        self.server.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


class Member:
    def __init__(self, address: tuple[str, int], timeout_s: float = WAIT_S) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()
        self.client = ControlClient(*address, self.messages.put, self.reasons.put, timeout_s)


@contextlib.contextmanager
def member(address: tuple[str, int]) -> Iterator[Member]:
    member = Member(address)
    try:
        yield member
    finally:
        member.client.close()


def test_who_has_come_before_it_serves_may_be_turned_away() -> None:
    """Nothing that was said then is heard; who comes from then on is."""
    heard: queue.Queue[dict[str, Any]] = queue.Queue()

    def answer(connection: LineConnection, message: dict[str, Any]) -> None:
        heard.put(message)
        connection.send({"heard": message["number"]})

    server = ControlServer("127.0.0.1", 0, answer, lambda connection: None)
    assert server.turn_away() == 0
    with contextlib.ExitStack() as stack:
        for number in range(3):
            early = stack.enter_context(socket.create_connection(server.address, WAIT_S))
            early.sendall(encode_line({"number": number}))
        assert server.turn_away() == 3
        with contextlib.suppress(ConnectionResetError):
            assert early.recv(1) == b"", "it is told at once"
    serves = threading.Thread(target=server.serve_forever, daemon=True)
    serves.start()
    assert request(*server.address, {"number": 3}, WAIT_S) == {"heard": 3}
    assert heard.get(timeout=WAIT_S) == {"number": 3} and heard.empty()
    server.close()
    serves.join(WAIT_S)


def test_messages_go_both_ways_in_order_on_one_thread(running: Running) -> None:
    sent = [{"echo": True, "number": i, "text": "ä\n\u2028", "list": [1, 2.5, None]} for i in range(50)]
    with member(running.server.address) as first, member(running.server.address) as second:
        for message in sent:
            first.client.send(message)
            second.client.send(message)
        for one in (first, second):
            assert [one.messages.get(timeout=WAIT_S) for _ in sent] == sent
        assert running.threads == {running.thread.ident}
        connection, _ = running.message()
        assert connection.peer.startswith("127.0.0.1:")


def test_large_messages_of_members_cross(running: Running) -> None:
    large = {"echo": True, "text": "x" * 10_000_000}
    with member(running.server.address) as one:
        one.client.send({"echo": True})
        connection, _ = running.message()
        running.server.call_soon(connection.admit)
        assert one.messages.get(timeout=WAIT_S) == {"echo": True}
        one.client.send(large)
        assert one.messages.get(timeout=WAIT_S) == large


def test_lines_are_cut_wherever_the_stream_is() -> None:
    messages = [{"a": 1}, {"b": "\n"}, {}]
    stream = b"".join(map(encode_line, messages))
    for size in (1, 2, 7, len(stream)):
        lines = Lines()
        chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [message for chunk in chunks for message in lines.feed(chunk)] == messages


def test_only_objects_are_sent() -> None:
    with pytest.raises(TypeError, match="`message` must be a dict, got list"):
        encode_line([])  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        encode_line({"x": float("nan")})


@pytest.mark.parametrize(
    "bad", [b"hello\n", b"[1]\n", b"\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"a":NaN}\n', b"x" * 2000]
)
def test_a_bad_line_ends_its_connection_and_nothing_else(
    running: Running, bad: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(bad) == 2000:
        monkeypatch.setattr(control, "STRANGER_LINE_BYTES", 1000)
    with member(running.server.address) as other, socket.create_connection(running.server.address) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(b'{"good": 1}\n' + bad)
        assert running.message()[1] == {"good": 1}
        running.closed.get(timeout=WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(10) == b""
        other.client.send({"echo": True})
        assert other.messages.get(timeout=WAIT_S) == {"echo": True}
    assert "its connection is closed" in caplog.text


def test_a_killed_process_is_noticed_at_once(running: Running) -> None:
    program = (
        "import sys, threading\n"
        "from torch_ecrec.transport.control import ControlClient\n"
        "client = ControlClient('127.0.0.1', int(sys.argv[1]), print, print, 300)\n"
        "client.send({'type': 'hello', 'torch': 'torch' in sys.modules})\n"
        "threading.Event().wait(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(running.server.address[1])], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        connection, message = running.message()
        assert message == {"type": "hello", "torch": False}, "whoever only asks the coordinator does not load torch"
        child.kill()
        killed_s = time.monotonic()
        assert running.closed.get(timeout=WAIT_S) is connection
        assert time.monotonic() - killed_s < PROMPTLY_S
        connection.send({"to": "nobody"})  # the end has been seen: nothing happens
    finally:
        child.kill()
        child.wait(WAIT_S)


def test_the_end_of_the_server_is_told_once_and_last() -> None:
    running = Running()
    one = Member(running.server.address)
    one.client.send({"echo": True})
    assert one.messages.get(timeout=WAIT_S) == {"echo": True}
    running.stop()
    assert one.reasons.get(timeout=WAIT_S) == "the coordinator closed the connection"
    one.client.send({"too": "late"})
    one.client.close()
    assert one.reasons.empty() and running.closed.empty()


def test_closing_a_client_is_not_told_to_itself(running: Running) -> None:
    one = Member(running.server.address)
    one.client.send({"type": "leave"})
    one.client.close()
    one.client.close()
    assert running.message()[1] == {"type": "leave"}  # sent before the end: not lost
    running.closed.get(timeout=WAIT_S)
    assert one.reasons.empty()


def test_last_words_count_although_an_answer_cannot_be_sent_any_more(running: Running) -> None:
    """A server that is busy writes to a member that has left, and fails, before it reads what that one said."""
    one = Member(running.server.address)
    one.client.send({"n": 1})
    connection, _ = running.message()
    busy, left = threading.Event(), threading.Event()

    def write() -> None:
        busy.set()
        assert left.wait(WAIT_S) and connection._transport is not None
        end_s = time.monotonic() + WAIT_S
        while not connection._transport.is_closing():
            assert time.monotonic() < end_s, "it can be written to for ever"
            connection.send({"placement": 1})
            time.sleep(0.001)

    running.server.call_soon(write)
    assert busy.wait(WAIT_S)
    for number in range(3):
        one.client.send({"n": number})
    one.client.send({"type": "leave"})
    one.client.close()
    left.set()
    assert [running.message()[1].get("n") for _ in range(4)] == [0, 1, 2, None]
    assert running.closed.get(timeout=WAIT_S) is connection
    assert running.error is None and running.messages.empty()


def test_a_client_may_close_itself_in_a_callback(running: Running) -> None:
    closed = threading.Event()
    clients: list[ControlClient] = []

    def on_message(message: dict[str, Any]) -> None:
        clients[0].close()
        closed.set()

    clients.append(ControlClient(*running.server.address, on_message, lambda reason: None, WAIT_S))
    clients[0].send({"echo": True})
    assert closed.wait(WAIT_S)
    running.closed.get(timeout=WAIT_S)


def test_an_error_in_a_members_handler_is_the_reason_of_the_end(running: Running) -> None:
    reasons: queue.Queue[str] = queue.Queue()

    def on_message(message: dict[str, Any]) -> None:
        raise KeyError("type")

    client = ControlClient(*running.server.address, on_message, reasons.put, WAIT_S)
    client.send({"echo": True})
    assert "KeyError('type')" in reasons.get(timeout=WAIT_S)
    client.close()


def test_an_error_in_the_servers_handler_ends_serving() -> None:
    running = Running()
    with member(running.server.address) as one:
        one.client.send({"fail": True})
        one.reasons.get(timeout=WAIT_S)
    running.thread.join(WAIT_S)
    assert isinstance(running.error, ZeroDivisionError)
    running.stop()


def test_a_port_in_use_is_named_and_a_freed_one_can_be_had_again() -> None:
    running = Running()
    port = running.server.address[1]
    with member(running.server.address):
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use"):
            Running(port)
        running.stop()  # with a connection that is still open
        Running(port).stop()
    with trusted_network(), pytest.raises(OSError, match="cannot listen on"):
        ControlServer("203.0.113.1", 0, lambda connection, message: None, lambda connection: None)


def test_a_server_that_never_served_frees_its_port() -> None:
    server = ControlServer("127.0.0.1", 0, lambda connection, message: None, lambda connection: None)
    server.close()
    server.close()
    server.call_soon(lambda: None)
    Running(server.address[1]).stop()


def test_actions_run_on_the_servers_thread(running: Running) -> None:
    ran: queue.Queue[tuple[str, int, float]] = queue.Queue()

    def action(name: str) -> Callable[[], None]:
        return lambda: ran.put((name, threading.get_ident(), time.monotonic()))

    start_s = time.monotonic()
    running.server.call_later(0.05, action("later"))
    running.server.call_soon(action("soon"))
    results = [ran.get(timeout=WAIT_S) for _ in range(2)]
    assert [name for name, _, _ in results] == ["soon", "later"]
    assert {thread for _, thread, _ in results} == {running.thread.ident}
    assert results[1][2] - start_s >= 0.049


def test_a_client_waits_for_a_coordinator_that_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    members: queue.Queue[Member] = queue.Queue()
    thread = threading.Thread(target=lambda: members.put(Member(("127.0.0.1", port))), daemon=True)
    thread.start()
    running = Running(port)
    one = members.get(timeout=WAIT_S)
    one.client.send({"type": "hello"})
    assert running.message()[1] == {"type": "hello"}
    one.client.close()
    running.stop()


def test_nobody_there_is_said_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    start_s = time.monotonic()
    with pytest.raises(ClusterUnavailable, match=f"no coordinator at 127.0.0.1:{port} within 0.2 s"):
        Member(("127.0.0.1", port), timeout_s=0.2)
    with pytest.raises(ClusterUnavailable, match="no coordinator"):
        request("127.0.0.1", port, {"type": "status"}, 0.2)
    assert time.monotonic() - start_s < PROMPTLY_S


def test_request_asks_once(running: Running) -> None:
    host, port = running.server.address
    assert request(host, port, {"echo": True, "what": "status"}, WAIT_S) == {"echo": True, "what": "status"}
    running.closed.get(timeout=WAIT_S)
    with pytest.raises(ClusterUnavailable, match="did not answer within"):
        request(host, port, {"echo": False}, 0.2)


def test_a_peer_that_does_not_read_is_cut_off(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BACKLOG_MOST_BYTES", 1_000_000)
    with socket.create_connection(running.server.address) as stuck, member(running.server.address) as other:
        stuck.sendall(b"{}\n")
        connection, _ = running.message()

        def flood() -> None:
            for _ in range(200):
                connection.send({"text": "x" * 100_000})

        running.server.call_soon(flood)
        assert running.closed.get(timeout=WAIT_S) is connection
        other.client.send({"echo": True})
        assert other.messages.get(timeout=WAIT_S) == {"echo": True}


def test_strangers_have_little_to_spend(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many, who was silent longest goes; lines without an end have a limit, all together; no member does."""
    monkeypatch.setattr(control, "STRANGERS_MOST", 20)
    monkeypatch.setattr(control, "STRANGERS_BYTES", 5_000_000)
    with contextlib.ExitStack() as stack, member(running.server.address) as admitted:
        admitted.client.send({"echo": True})
        connection, _ = running.message()
        running.server.call_soon(connection.admit)
        assert admitted.messages.get(timeout=WAIT_S) == {"echo": True}
        strangers = [stack.enter_context(socket.create_connection(running.server.address)) for _ in range(50)]
        for _ in range(30):
            running.closed.get(timeout=WAIT_S)
        for stranger in strangers[-3:]:
            stranger.sendall(b"x" * 2_500_000)
        running.closed.get(timeout=WAIT_S)
        admitted.client.send({"echo": True})
        assert admitted.messages.get(timeout=WAIT_S) == {"echo": True}
        assert running.closed.empty() and len(running.server._connections) == 20


def test_silent_strangers_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STRANGER_IDLE_S", 0.2)
    running = Running()
    with socket.create_connection(running.server.address) as silent:
        silent.sendall(b'{"half of')
        running.closed.get(timeout=WAIT_S)
    running.stop()


def test_no_more_descriptors_are_survived() -> None:
    """Accepting fails while strangers have them all; those who were there go on, and it succeeds when they are gone."""
    program = (
        "import resource, socket, sys, threading\n"
        "from torch_ecrec.transport.control import ControlServer\n"
        "server = ControlServer('127.0.0.1', 0, lambda c, m: c.send(m), lambda c: None)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "print(server.address[1], flush=True)\n"
        "server.serve_forever()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert child.stdout is not None and child.stderr is not None
        address = ("127.0.0.1", int(child.stdout.readline()))
        with member(address) as early, contextlib.ExitStack() as stack:
            early.client.send({"a": 1})
            assert early.messages.get(timeout=WAIT_S) == {"a": 1}
            for _ in range(60):
                stack.enter_context(socket.create_connection(address))
            assert any("out of system resource" in line for line in child.stderr)
            early.client.send({"a": 2})
            assert early.messages.get(timeout=WAIT_S) == {"a": 2}
        assert request(*address, {"a": 3}, WAIT_S) == {"a": 3}
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


def test_a_probe_tells_the_living_from_the_dead(running: Running) -> None:
    found: queue.Queue[str] = queue.Queue()
    door = SignOfLife("127.0.0.1")
    for _ in range(100):  # accepted each time
        running.server.call_soon(lambda: running.server.probe(door.address, found.put))
        assert found.get(timeout=WAIT_S) in (ALIVE, COMPUTES)  # the latter where this process waits for a core
    door.close()
    door.close()
    running.server.call_soon(lambda: running.server.probe(door.address, found.put))
    assert found.get(timeout=WAIT_S) == GONE


def test_a_forked_child_holds_no_sign_of_life(running: Running) -> None:
    """Neither the listener nor the control connection: else a trainer that is killed would live on in its workers."""
    program = (
        "import os, sys, time\n"
        "from torch_ecrec.transport.control import ControlClient\n"
        "from torch_ecrec.transport.liveness import SignOfLife\n"
        "client = ControlClient('127.0.0.1', int(sys.argv[1]), print, print, 300)\n"
        "door = SignOfLife('127.0.0.1')\n"
        "child = os.fork()\n"
        "if child:\n"
        "    client.send({'type': 'hello', 'child': child, 'address': list(door.address)})\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(running.server.address[1])], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    connection, message = running.message()
    try:
        found: queue.Queue[str] = queue.Queue()
        address = (message["address"][0], message["address"][1])
        running.server.call_soon(lambda: running.server.probe(address, found.put))
        assert found.get(timeout=WAIT_S) in (ALIVE, COMPUTES)
        parent.kill()
        assert running.closed.get(timeout=WAIT_S) is connection
        running.server.call_soon(lambda: running.server.probe(address, found.put))
        assert found.get(timeout=WAIT_S) == GONE
        os.kill(message["child"], 0)  # it lives
    finally:
        parent.kill()
        parent.wait(WAIT_S)
        os.kill(message["child"], signal.SIGKILL)


def test_a_coordinator_that_does_not_read_holds_no_member_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SEND_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Member(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        with accepted:
            start_s = time.monotonic()
            for _ in range(200):
                one.client.send({"text": "x" * 100_000})
            assert "cannot send to the coordinator" in one.reasons.get(timeout=WAIT_S)
            assert time.monotonic() - start_s < PROMPTLY_S
        one.client.close()


def test_control_needs_no_torch() -> None:
    source = (ROOT / "torch_ecrec" / "transport" / "control.py").read_text()
    assert "import torch" not in source.replace("from torch_ecrec", "")
    assert json.loads(encode_line({"a": 1})) == {"a": 1}


def test_a_host_that_is_away_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, the kernel asks after 1, 3, 7, 15, 31 s: members would find the next coordinator one by one."""
    now_s, limits = [100.0], []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        limits.append(timeout)
        now_s[0] += timeout
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(control.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(control.time, "sleep", lambda pause_s: now_s.__setitem__(0, now_s[0] + pause_s))
    with pytest.raises(ClusterUnavailable, match=r"no coordinator at 10\.0\.0\.1:7700 within 20 s: timed out"):
        control._connect("10.0.0.1", 7700, 20.0)
    assert len(limits) >= 13 and max(limits) == control.ATTEMPT_S < REGATHER_S - control.RETRY_MOST_S


def test_a_member_gives_a_silent_connection_up_in_time_for_the_next_coordinator() -> None:
    """What it has sent is not acknowledged, since the host is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server, control._connect(*server.getsockname(), WAIT_S) as sock:
        limit_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 1000 * control.UNANSWERED_BY_COORDINATOR_S < 1000 * Settings().lease_s
