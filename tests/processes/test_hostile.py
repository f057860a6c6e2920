"""Nonsense on the control channel: 10,000 messages that are none, at a coordinator with a live job, and at members.

Valid messages are taken and spoilt: a field of another type, missing, too many, huge, nested; or its bytes.
What the declarations (`messages.py`) still accept is not sent. Nothing may change: not the coordinator's state, not
what members hear, not how fast `status` answers, not the memory. The seed is printed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
from builds import BUILD
from conftest import wait_until
from coordinator_harness import nested
from coordinator_words import slot_report

from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.processes.member import Member
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.protocol.messages import BadMessage, Known
from torch_ecrec.protocol.status import Report
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.control import ControlClient, ControlServer, encode_line, request
from torch_ecrec.transport.node import Node

SEED = 71
MESSAGES = 10_000
WAIT_S = 300.0  # for anything at all: only a hang reaches it
CODE = CodeSpec(3, 2, 1)
JOB = JobSpec((TableSpec("a", 30, 4, -1.0, 1.0),), CODE, 1)
HELLO = {
    **BUILD,
    "pid": 7,
    "session_id": "somebody",
    "address": ["127.0.0.1", 9],
}
PLACEMENT = {"epoch": 1, "slots": [["server-0", 0, True], ["server-1", 0, True], ["server-2", 0, False]]}
REJOIN = nested(
    {
        **HELLO,
        "type": "rejoin",
        "role": "server",
        "name": "server-1",
        "code": {"slots": 3, "k": 2, "r": 1, "protection": "parity"},
        "term": 0,
        "endpoint": "here",
        "roster": 1,
        "world": ["server-0", "server-1", "server-2", "trainer-0"],
        "job": JOB.to_json(),
        "placement": PLACEMENT,
        "era": 0,
        "frozen": False,
        "resume_step": 0,
        "done": 0,
        "load_end": None,
        "whole": [[1, 0]],
        "incarnations": [0, 0, 0],
        "run": "run",
    }
)
TO_THE_COORDINATOR: list[dict[str, Any]] = [
    {**HELLO, "type": "join", "role": "server", "code": {"k": 2, "r": 1, "slots": 3}},
    {**HELLO, "type": "join", "role": "trainer", "rank": 0, "job": JOB.to_json()},
    REJOIN,
    {"type": "status"},
    {"type": "watch"},
    {"type": "stop"},
    {"type": "beat", "report": {"slots": [msgspec.to_builtins(slot_report(0, 0))], "bytes_sent": {"push": 3}}},
    {"type": "leave", "report": {}},
    {"type": "listens", "endpoint": "here"},
    {"type": "ready", "slot": 1, "incarnation": 0},
    {"type": "rebuilt", "slot": 1, "incarnation": 0},
    {"type": "unrecoverable", "slot": 1, "incarnation": 0},
    {
        "type": "reach",
        "slot": 1,
        "incarnation": 0,
        "era": 0,
        "applied": 3,
        "floor": 1,
        "snapshots": [[2, 2, [0]], [3, 3, [0]]],
    },
    {"type": "durable", "slot": 1, "incarnation": 0, "era": 0},
    {"type": "loaded", "load_end": 0},
    {"type": "progress", "trainer": 0, "step": 3, "loss": 0.5},
]
TO_A_MEMBER: list[dict[str, Any]] = [
    {
        "type": "welcome",
        "name": "server-0",
        "code": REJOIN["code"],
        "restarted": False,
        "term": 0,
        "transport": "rpc",
        "run": "run",
    },
    {"type": "roster", "version": 1, "endpoints": {"server-0": "here"}, "addresses": {}},
    {"type": "job", "job": JOB.to_json()},
    {"type": "placement", "placement": PLACEMENT},
    {"type": "era", "era": 1, "step": None, "load_end": None, "done": 0},
    {"type": "rejoined", "term": 1},
    {"type": "left", "trainers": [1]},
    {"type": "fatal", "kind": "fenced", "reason": "a reason"},
]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


WRONG: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda r: r.choice(["", "x", "0", "server-0\n", "\u0000", "x" * 5000, "\U0001f600"]),
    lambda r: r.choice([-1, 0, 1, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**400]),
    lambda r: r.choice([0.5, -1e308, 1e-320]),
    lambda r: r.choice([[], [[]], [0], ["x"] * 3, list(range(1000)), nested(50)]),
    lambda r: r.choice([{}, {"a": 1}, {"type": "join"}, {"": nested(20)}]),
)


def spoil(message: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """The message with one or two things changed, at any depth."""
    spoilt: dict[str, Any] = json.loads(json.dumps(message))
    for _ in range(r.choice([1, 1, 2])):
        where: Any = spoilt
        while True:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            if not keys:
                break
            key = r.choice(keys)
            if isinstance(where[key], (dict, list)) and where[key] and r.random() < 0.6:
                where = where[key]
                continue
            change = r.random()
            if change < 0.15:
                del where[key]
            elif change < 0.3 and isinstance(where, dict):
                where[r.choice(["more", "typ", "__class__", "x" * 300])] = r.choice(WRONG)(r)
            else:
                where[key] = r.choice(WRONG)(r)
            break
    return spoilt


def spoil_bytes(line: bytes, r: random.Random) -> bytes:
    """The line as other bytes, which are no JSON object, or none that ends."""
    at = r.randrange(len(line) - 1)
    return r.choice(
        [
            line[:at] + bytes([r.randrange(128, 256)]) + line[at + 1 :],
            line[:at] + b"\n",
            b"[" * r.choice([10, 5000]) + b"\n",
            line.replace(b":", b":NaN+", 1),
            b"\x00" * 100 + b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
            line.rstrip()[:-1] + b',"type":[]}\n',  # of two, the last counts
            r.randbytes(200).replace(b"\n", b"") + b"\n",
        ]
    )


def is_message(message: dict[str, Any], judge: Callable[[dict[str, Any]], object]) -> bool:
    try:
        judge(message)
    except BadMessage:
        return False
    return True


class Live:
    """A coordinator, and members of a job that is placed; members are connections of this process."""

    def __init__(self) -> None:
        self.server = ControlServer(
            "127.0.0.1",
            0,
            on_message=lambda peer, message: self.router.on_message(peer, message, time.monotonic()),
            on_closed=lambda peer: self.router.on_closed(peer, time.monotonic()),
            on_bad_line=lambda peer, reason: self.router.refuse(peer, reason, time.monotonic()),
        )
        self.events: list[dict[str, Any]] = []
        self.router = Router(
            ClusterSettings(CODE, 0, lease_s=1e6),
            probe=lambda *_: self.probes.append(None),
            announce=self.events.append,
        )
        self.probes: list[None] = []
        self.error: BaseException | None = None
        self.heard: dict[str, queue.Queue[dict[str, Any]]] = {}
        self.members: dict[str, ControlClient] = {}
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.server.serve_forever()
        except BaseException as error:
            self.error = error

    def start(self) -> None:
        for number in range(4):
            role = {"role": "server"} if number < 3 else {"role": "trainer", "rank": 0, "job": JOB.to_json()}
            heard: queue.Queue[dict[str, Any]] = queue.Queue()
            client = ControlClient(*self.server.address, heard.put, lambda reason: None, WAIT_S)
            client.send({**HELLO, "session_id": f"member {number}", "type": "join", **role})
            name = heard.get(timeout=WAIT_S)["name"]
            self.members[name], self.heard[name] = client, heard
        for client in self.members.values():
            client.send({"type": "listens", "endpoint": "here"})
        wait_until(lambda: self.router.core.epoch == 1, WAIT_S, "the job is placed")
        self.status()
        self.drain()

    def drain(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for heard in self.heard.values():
            with contextlib.suppress(queue.Empty):
                while True:
                    found[heard.get_nowait()["type"]] += 1
        return found

    def status(self) -> float:
        """Seconds to an answer: the shortest of some."""
        took = []
        for _ in range(5):
            begin_s = time.perf_counter()
            assert request(*self.server.address, {"type": "status"}, WAIT_S)["fatal"] is None
            took.append(time.perf_counter() - begin_s)
        return min(took)

    def state(self) -> str:
        """Everything that the coordinator knows, but for when it heard of whom."""
        core = self.router.core
        members = [
            (m.name, m.role, m.rank, m.session_id, m.endpoint, m.alive, m.left, m.report) for m in core.members.values()
        ]
        known = (
            members,
            core.slots,
            core.epoch,
            core.roster.version,
            core.roster.names,
            core.era,
            core.load_end,
            core.fatal,
            core.step,
        )
        return repr((known, core.term, core.regathering, core.going_back, core.job, list(self.router._connections)))

    def close(self) -> None:
        for client in self.members.values():
            client.close()
        self.server.close()
        self.thread.join(WAIT_S)
        assert self.error is None


@pytest.fixture
def live() -> Iterator[Live]:
    live = Live()
    try:
        live.start()
        yield live
    finally:
        live.close()


def answer_to(address: tuple[str, int], line: bytes) -> bytes:
    """What a stranger gets for a line, up to the end of its connection."""
    got = b""
    with socket.create_connection(address) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(WAIT_S)
        sock.sendall(line)
        if not line.endswith(b"\n"):
            sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            got += data
    return got


def test_ten_thousand_messages_of_strangers_and_members_change_nothing(live: Live) -> None:
    r = random.Random(SEED)
    process, before, quick_s = psutil.Process(), live.state(), live.status()
    sent: Counter[str] = Counter()
    memory = 0
    while sent["spoilt"] + sent["bytes"] + sent["out of place"] + sent["of members"] < MESSAGES:
        message = r.choice(TO_THE_COORDINATOR)
        kind, spoilt = r.random(), spoil(message, r)
        if kind < 0.15:
            answer = answer_to(live.server.address, spoil_bytes(encode_line(message), r))
            sent["bytes"] += 1
        elif kind < 0.25:  # of members, by a stranger
            if message["type"] in ("join", "rejoin", "status", "watch", "stop"):
                continue
            answer = answer_to(live.server.address, encode_line(message))
            sent["out of place"] += 1
        elif is_message(spoilt, messages.from_member):
            sent["still a message"] += 1
            continue
        elif kind < 0.6:
            live.members[r.choice(["server-1", "trainer-0"])].send(spoilt)
            sent["of members"] += 1
            continue
        else:
            answer = answer_to(live.server.address, encode_line(spoilt))
            sent["spoilt"] += 1
        assert not answer or b'"refused"' in answer, answer
        if sent.total() % 2000 == 0:
            memory = memory or process.memory_info().rss
    print(f"seed {SEED}: {dict(sent)}")
    slow_s = live.status()
    wait_until(
        lambda: sum(heard.qsize() for heard in live.heard.values()) >= sent["of members"], WAIT_S, "all are refused"
    )
    heard = live.drain()
    assert set(heard) == {"refused"} and heard["refused"] == sent["of members"], heard
    assert live.state() == before and live.error is None and not live.probes
    assert live.router.refused >= MESSAGES - sent["bytes"]
    assert slow_s < 5 * quick_s + 0.05, f"status took {quick_s * 1e3:.1f} ms before, {slow_s * 1e3:.1f} ms after"
    assert process.memory_info().rss - memory < 64 << 20
    assert sum(event["event"] == "refused" for event in live.events) <= 2 + time.monotonic()


def test_a_thousand_idle_connections_and_slow_writers(live: Live) -> None:
    """Members go on, and somebody who asks gets an answer, while others only hold connections and dribble."""
    before = live.state()
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            sock = stack.enter_context(socket.create_connection(live.server.address))
            with contextlib.suppress(ConnectionError):  # it was sent away
                sock.sendall(b'{"type": "join", "pid": 1' if number % 2 else b"")
        live.members["server-1"].send({"type": "beat", "report": {"slots": []}})
        wait_until(lambda: live.router.core.members["server-1"].report.slots == [], WAIT_S, "a beat is heard")
        live.status()
        assert len(live.server._connections) < 600
    live.router.core.members["server-1"].report = Report()
    assert live.state() == before


def test_lines_without_end_are_cut_off(live: Live) -> None:
    before = live.state()
    with socket.create_connection(live.server.address) as sock:
        sock.settimeout(WAIT_S)
        with pytest.raises(ConnectionError):
            while True:
                sock.sendall(b"x" * 65536)
    live.status()
    assert live.state() == before


def test_a_job_of_ten_thousand_tables_joins() -> None:
    tables = tuple(TableSpec(f"table_{i:06d}_{'x' * 80}", 100_000, 128, -0.015625, 0.015625) for i in range(10_000))
    job = JobSpec(tables, CODE, 1)
    line = encode_line({**HELLO, "type": "join", "role": "trainer", "rank": 0, "job": job.to_json()})
    live = Live()
    try:
        heard: queue.Queue[dict[str, Any]] = queue.Queue()
        client = ControlClient(*live.server.address, heard.put, lambda reason: None, WAIT_S)
        client.send(json.loads(line))
        assert heard.get(timeout=WAIT_S)["type"] == "welcome", f"{len(line)} bytes"
        client.close()
    finally:
        live.close()


# a coordinator that talks nonsense --------------------------------------------------------------------


class Nonsense:
    """A coordinator that welcomes, and then sends one line."""

    def __init__(self, line: bytes, welcome: bool) -> None:
        self._line, self._welcome = line, welcome
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.join = "{}:{}".format(*self._listener.getsockname())
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                with sock:
                    sock.makefile("rb").readline()
                    if self._welcome:
                        sock.sendall(encode_line({**TO_A_MEMBER[0], "transport": "sockets"}))
                    sock.sendall(self._line)
                    while sock.recv(65536):
                        pass

    def close(self) -> None:
        self._listener.close()


class Idle(Node):
    """A node without anything."""


def end_of_member(line: bytes, welcome: bool) -> BaseException:
    """How a membership ends whose coordinator sends that."""
    coordinator, ends = Nonsense(line, welcome), queue.Queue[BaseException]()
    settings = Settings(join=coordinator.join, give_up_s=5.0, shared_memory_bytes=0)
    try:
        member = Member(
            settings,
            join_of("server", "one", 1),
            make_node=lambda name, port, code: Idle(name, port, 1.0),
            on_control=lambda message: None,
            on_end=ends.put,
            known=lambda: Known(job=None, placement=None, era=0, frozen=False, resume_step=0, done=0, load_end=None),
        )
    except ClusterError as error:
        return error
    finally:
        coordinator.close()
    try:
        return ends.get(timeout=WAIT_S)
    finally:
        member.close()


def test_nonsense_of_a_coordinator_ends_a_membership_with_a_reason() -> None:
    r = random.Random(SEED)
    sent = 0
    while sent < 150:
        message = r.choice(TO_A_MEMBER)
        spoilt = spoil(message, r)
        if r.random() < 0.2:
            line = r.choice([b"hello\n", b"[1]\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"type":NaN}\n'])
        elif is_message(spoilt, messages.from_coordinator):
            continue
        else:
            line = encode_line(spoilt)
        sent += 1
        error = end_of_member(line, welcome=r.random() < 0.8)
        assert isinstance(error, ClusterUnavailable) and "the coordinator sent" in str(error), (line[:200], error)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (TO_A_MEMBER[0] | {"transport": "sockets"}, "said before"),
        (TO_A_MEMBER[1] | {"endpoints": {"server-7": "127.0.0.1 1 00 -"}}, "server-0 must be in it"),
        (TO_A_MEMBER[1] | {"endpoints": {"server-0": "nonsense"}}, "no endpoint"),
    ],
)
def test_messages_that_cannot_be_end_a_membership_too(message: dict[str, Any], words: str) -> None:
    error = end_of_member(encode_line(message), welcome=True)
    assert isinstance(error, ClusterUnavailable) and words in str(error)
