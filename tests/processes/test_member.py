"""Joining: a member asks until a coordinator answers, whatever ends meanwhile."""

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_ecrec.errors import ClusterUnavailable, DataLoss, JoinRefused, TierFailed
from torch_ecrec.processes.member import Member
from torch_ecrec.protocol import membership, messages
from torch_ecrec.protocol.membership import Membership, join_of
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.control import ControlServer, LineConnection
from torch_ecrec.transport.node import COMPLAINTS, Node

LIMIT_S = 300.0  # for anything at all: only a hang reaches it
WELCOME = {
    "type": "welcome",
    "name": "server-7",
    "code": {"slots": 3, "k": 2, "r": 1, "protection": "parity"},
    "restarted": False,
    "term": 0,
    "transport": "sockets",
    "run": "run",
}


class Coordinator:
    """Does with each join what `on_join` says; may be killed and started again at its address."""

    def __init__(self, on_join: Callable[[LineConnection, int], None]) -> None:
        self.joins = 0
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._on_join = on_join
        self.port = 0
        self.start()

    def start(self) -> None:
        self.server = ControlServer("127.0.0.1", self.port, self._on_message, lambda connection: None)
        self.port = self.server.address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.server.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _on_message(self, connection: LineConnection, message: dict[str, Any]) -> None:
        self.told.put(message)
        if message["type"] == "join":
            self.joins += 1
            self._on_join(connection, self.joins)

    def wait_for_join(self) -> None:
        assert self.told.get(timeout=LIMIT_S)["type"] == "join"


SERVER = join_of("server", "one", os.getpid())
JOB = JobSpec((TableSpec("a", rows=4, dim=1, low=0.0, high=1.0),), CodeSpec(3, 2, 1), 2)
TRAINER = join_of("trainer", "one", os.getpid(), rank=0, job=JOB)
NOTHING = messages.Known(job=JOB, placement=None, era=0, frozen=False, resume_step=0, done=0, load_end=None)


def join(
    coordinator: Coordinator,
    give_up_s: float = LIMIT_S,
    make: Callable[..., Node] | None = None,
    on_end: Callable[[BaseException], None] = lambda error: None,
    on_control: Callable[[messages.FromCoordinator], None] = lambda word: None,
    hello: messages.Join = SERVER,
) -> Member:
    settings = Settings(join=f"127.0.0.1:{coordinator.port}", give_up_s=give_up_s, shared_memory_bytes=0)

    def node(name: str, member: Member, code: CodeSpec) -> Node:
        return Node(name, member, 1.0)

    return Member(settings, hello, make or node, on_control=on_control, on_end=on_end, known=lambda: NOTHING)


@pytest.fixture
def threads() -> Iterator[None]:
    """What failed to join leaves no thread."""
    before = set(threading.enumerate())
    yield
    end_s = time.monotonic() + LIMIT_S
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("ends", [1, 3])
def test_a_coordinator_that_ends_while_somebody_joins(ends: int) -> None:
    """A supervisor starts another one; who was joining asks that."""

    def on_join(connection: LineConnection, number: int) -> None:
        if number <= ends:
            connection.close()
        else:
            connection.send(WELCOME)

    coordinator = Coordinator(on_join)
    member = join(coordinator)
    assert (member.name, coordinator.joins) == ("server-7", ends + 1)
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TierFailed("the disk is full"), "server-7 ends: the disk is full\n"),
        (KeyError("a bug"), "in raises\n    raise error\n"),
    ],
)
def test_what_ends_a_member_is_said_with_a_stack_only_where_it_is_a_bug(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise error

    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    member = join(coordinator)
    with pytest.raises(type(error)):
        raises()
    member.on_error(error)
    member.close()
    coordinator.end()
    assert said in caplog.text and ("Traceback" in caplog.text) == isinstance(error, KeyError)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("hello", [SERVER, TRAINER], ids=["server", "trainer"])
@pytest.mark.parametrize("event", ["listens_at", "connected", "heard", "built"])
def test_whatever_has_just_happened_as_the_connection_ends(
    event: str, hello: messages.Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for the coordinator sees both at once, and is not the thread that does so next."""
    name = "server-7" if hello is SERVER else "trainer-0"
    coordinator = Coordinator(lambda connection, number: connection.send({**WELCOME, "name": name}))
    happens, cut, ends = getattr(Membership, event), threading.Event(), queue.Queue[BaseException]()

    def happens_and_is_cut(rules: Membership, *more: Any) -> None:
        happens(rules, *more)
        if not cut.is_set():
            cut.set()
            rules.closed("as ordered")

    def wait_for_rejoin() -> None:
        while coordinator.told.get(timeout=LIMIT_S)["type"] != "rejoin":
            pass

    monkeypatch.setattr(Membership, event, happens_and_is_cut)
    member = join(coordinator, hello=hello, on_end=ends.put)
    assert cut.is_set() and member.name == name
    if event in ("heard", "built"):  # it is a member by then
        wait_for_rejoin()
    coordinator.end()
    coordinator.start()
    wait_for_rejoin()  # and it looks for the next one, too
    assert ends.empty()
    member.end(ClusterUnavailable("the test is over"))
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("then", ["", "empty", "another secret, of 2027"])
def test_a_secret_whose_file_goes_or_changes_costs_no_member(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret of this test 0123")
    monkeypatch.delenv("TORCH_ECREC_SECRET", raising=False)
    monkeypatch.setenv("TORCH_ECREC_SECRET_FILE", str(file))
    connections: list[LineConnection] = []

    def welcome(connection: LineConnection, number: int) -> None:
        connections.append(connection)
        connection.send(WELCOME)

    coordinator = Coordinator(welcome)

    def wait_for_rejoin() -> None:
        while (word := coordinator.told.get(timeout=LIMIT_S))["type"] != "rejoin":
            assert word["type"] != "ended", word

    member = join(coordinator, on_end=lambda error: coordinator.told.put({"type": "ended", "error": error}))
    file.unlink()
    if then:
        file.write_text(then)
    coordinator.server._loop.call_soon_threadsafe(connections[0].close)
    wait_for_rejoin()
    if then.startswith("another"):  # a coordinator that begins now has that one
        coordinator.end()
        coordinator.start()
        wait_for_rejoin()
    member.end(ClusterUnavailable("the test is over"))
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_another_coordinator_comes_a_while_later() -> None:
    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME) if number == 2 else None)
    joined: queue.Queue[Member] = queue.Queue()
    thread = threading.Thread(target=lambda: joined.put(join(coordinator)), daemon=True)
    thread.start()
    coordinator.wait_for_join()  # it is kept waiting, as by one that regathers its members
    coordinator.end()
    coordinator.start()
    member = joined.get(timeout=LIMIT_S)
    assert (member.name, coordinator.joins) == ("server-7", 2)
    member.close()
    thread.join(LIMIT_S)
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_nobody_comes_in_its_place() -> None:
    def on_join(connection: LineConnection, number: int) -> None:
        coordinator.server.close()

    coordinator = Coordinator(on_join)
    with pytest.raises(ClusterUnavailable, match=r"ended \(.*\), and none came within 1 s"):
        join(coordinator, give_up_s=1.0)


@pytest.mark.usefixtures("threads")
def test_one_that_ends_every_connection() -> None:
    coordinator = Coordinator(lambda connection, number: connection.close())
    begin_s = time.monotonic()
    with pytest.raises(ClusterUnavailable, match="before it answered"):
        join(coordinator, give_up_s=2.0)
    assert 2 <= coordinator.joins <= 12, "with pauses between"
    assert time.monotonic() - begin_s >= 1.0
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_one_that_does_not_answer() -> None:
    coordinator = Coordinator(lambda connection, number: None)
    with pytest.raises(ClusterUnavailable, match=r"did not answer in 0\.5 s"):
        join(coordinator, give_up_s=0.5)
    assert coordinator.joins == 1
    coordinator.end()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kind", "error"), [("refused", JoinRefused), ("stopped", JoinRefused), ("data_loss", DataLoss)]
)
def test_a_refusal_is_final(kind: str, error: type[Exception]) -> None:
    """Also if the connection ends right after it."""

    def on_join(connection: LineConnection, number: int) -> None:
        connection.send({"type": "refused", "kind": kind, "reason": "as ordered"})
        connection.close()

    coordinator = Coordinator(on_join)
    with pytest.raises(error, match="as ordered"):
        join(coordinator)
    assert coordinator.joins == 1
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_what_goes_wrong_in_a_welcome_is_raised() -> None:
    """And nothing is tried again: it would go wrong again."""

    def make(name: str, member: Member, code: CodeSpec) -> Node:
        raise MemoryError("as ordered")

    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    with pytest.raises(MemoryError, match="as ordered"):
        join(coordinator, make=make)
    assert coordinator.joins == 1
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_a_coordinator_of_another_build_in_place_of_ours_ends_the_membership() -> None:
    """Rather than that both meet and part for ever."""
    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    ends: queue.Queue[BaseException] = queue.Queue()
    member = join(coordinator, on_end=ends.put)
    on_message = coordinator._on_message

    def refuse(connection: LineConnection, message: dict[str, Any]) -> None:
        if message["type"] == "rejoin":
            try:
                messages.from_member({**message, "messages": {**message["messages"], "Push": "another"}})
            except messages.OtherBuild as error:
                connection.send(messages.json_of(messages.Refused("other_build", str(error))))
            connection.close()
        else:
            on_message(connection, message)

    coordinator.end()
    coordinator._on_message = refuse  # type: ignore[method-assign]
    coordinator.start()
    error = ends.get(timeout=LIMIT_S)
    assert isinstance(error, JoinRefused) and "not the same: Push. They cannot" in str(error)
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_what_is_refused_on_the_data_plane_is_told_with_each_heartbeat() -> None:
    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    member = join(coordinator)

    def told() -> int:
        while (message := coordinator.told.get(timeout=LIMIT_S))["type"] != "beat":
            pass
        figures: int = messages.from_member(message).report.refused_messages
        return figures

    before = told()
    assert member.transport is not None
    member.transport.complaints.add("a request is none", "as ordered")
    COMPLAINTS.add("a request is refused", "as ordered")
    end_s = time.monotonic() + LIMIT_S
    while told() != before + 2:
        assert time.monotonic() < end_s
    member.close()
    coordinator.end()


class Deaf(Coordinator):
    """One that a trainer has joined. Its connection ends with its "leave" unheard; the next one hears it."""

    def __init__(self, dies: bool) -> None:
        self.heard = threading.Event()
        self.dies, self.rejoins = dies, 0
        super().__init__(lambda connection, number: connection.send({**WELCOME, "name": "trainer-0"}))

    def _on_message(self, connection: LineConnection, message: dict[str, Any]) -> None:
        super()._on_message(connection, message)
        if message["type"] == "rejoin":
            self.rejoins += 1
            connection.send({"type": "rejoined", "term": 1})
        elif message["type"] == "leave" and not self.rejoins:
            self.server.close() if self.dies else connection.close()
        elif message["type"] == "leave":
            connection.send({"type": "left", "trainers": [1]})
            connection.send({"type": "left", "trainers": [0, 1]})
            self.heard.set()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dies", [False, True])
def test_a_trainer_that_is_done_stays_until_that_was_heard(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ended before, or its coordinator did: who ends then is taken for lost."""
    monkeypatch.setattr(membership, "FAREWELL_S", LIMIT_S)
    coordinator, ends = Deaf(dies), queue.Queue[BaseException]()
    member = join(coordinator, on_end=ends.put, hello=TRAINER)
    closing = threading.Thread(target=member.close, daemon=True)
    closing.start()
    if dies:
        coordinator._thread.join(LIMIT_S)
        coordinator.start()
    assert coordinator.heard.wait(LIMIT_S), "it has ended, and nobody knows why"
    closing.join(LIMIT_S)
    assert not closing.is_alive() and ends.empty()
    coordinator.end()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("how", ["nobody answers", "all has ended"])
def test_a_trainer_that_is_done_ends_in_the_end(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def on_join(connection: LineConnection, number: int) -> None:
        connections.append(connection)
        connection.send({**WELCOME, "name": "trainer-0"})

    connections: list[LineConnection] = []
    coordinator, ends = Coordinator(on_join), queue.Queue[BaseException]()
    member = join(coordinator, 0.5 if how == "nobody answers" else LIMIT_S, on_end=ends.put, hello=TRAINER)
    closing = threading.Thread(target=member.close, daemon=True)
    closing.start()
    while coordinator.told.get(timeout=LIMIT_S)["type"] != "leave":
        pass
    if how == "all has ended":
        fatal = {"type": "fatal", "kind": "stopped", "reason": "as ordered"}
        coordinator.server.call_soon(lambda: connections[0].send(fatal))
    closing.join(LIMIT_S)
    assert not closing.is_alive() and ends.empty(), "one that is done is told of no end"
    assert ("no coordinator has heard within 0.5 s" in caplog.text) == (how == "nobody answers")
    coordinator.end()


@contextlib.contextmanager
def nothing_comes_back(port: int) -> Iterator[None]:
    """From that port: nobody accepts, and the kernel drops who asks, once those that may wait do."""
    with contextlib.ExitStack() as sockets:
        listener, spare, *waiting = [sockets.enter_context(socket.socket()) for _ in range(10)]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for one in (spare, *waiting):
            one.setblocking(False)
        for one in waiting:
            one.connect_ex(("127.0.0.1", port))
        if not select.select([], waiting, [], 1.0)[1]:  # the one for whom there is room is a member: it was faster
            member, _ = listener.accept()
            spare.connect_ex(("127.0.0.1", port))  # before it looks again
            member.close()
        yield


@pytest.mark.usefixtures("threads")
def test_time_in_which_nothing_comes_back_is_no_time_in_which_there_is_no_coordinator() -> None:
    """A trainer has patience meanwhile, though nobody tells it so; and whoever is there then may come and go."""
    give_up_s = 2.0
    heard: queue.Queue[messages.FromCoordinator] = queue.Queue()
    ends: queue.Queue[BaseException] = queue.Queue()
    coordinator = Deaf(dies=False)
    member = join(coordinator, give_up_s, on_end=ends.put, on_control=heard.put, hello=TRAINER)
    coordinator.end()
    with nothing_comes_back(coordinator.port):
        stands = heard.get(timeout=LIMIT_S)
        assert (
            isinstance(stands, messages.Stands) and stands.names and stands.left_s is not None and stands.left_s > 3000
        )
        time.sleep(1.5 * give_up_s)
        assert ends.empty() and heard.empty()
    on_message, closed = coordinator._on_message, threading.Event()

    def close(connection: LineConnection, message: dict[str, Any]) -> None:
        connection.close()
        closed.set()

    coordinator._on_message = close  # type: ignore[method-assign]
    coordinator.start()
    assert closed.wait(LIMIT_S)
    coordinator.end()
    time.sleep(0.3 * give_up_s)
    coordinator._on_message = on_message  # type: ignore[method-assign]
    coordinator.start()
    told = heard.get(timeout=LIMIT_S)
    assert told == messages.Stands([], None)
    while not isinstance(told, messages.Rejoined):
        told = heard.get(timeout=LIMIT_S)
    assert ends.empty()
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_a_coordinator_of_another_cluster_is_looked_at_for_so_long_and_no_longer() -> None:
    ends: queue.Queue[BaseException] = queue.Queue()
    coordinator = Coordinator(lambda connection, number: connection.send(WELCOME))
    member = join(coordinator, 1.5, on_end=ends.put)
    coordinator.end()
    on_message = coordinator._on_message
    other = messages.OtherCluster("another", CodeSpec(4, 2, 2), "as ordered")

    def turn_away(connection: LineConnection, message: dict[str, Any]) -> None:
        on_message(connection, message)
        connection.send(messages.json_of(other))
        connection.close()

    coordinator._on_message = turn_away  # type: ignore[method-assign]
    coordinator.start()
    error = ends.get(timeout=LIMIT_S)
    assert isinstance(error, ClusterUnavailable) and "is of another cluster: as ordered" in str(error)
    member.close()
    coordinator.end()


@pytest.mark.usefixtures("threads")
def test_a_last_word_of_the_connection_before_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another leads, as is seen beside the connection, on which the one before still says "rejoined"."""
    monkeypatch.setattr(membership, "AGAIN_LEAST_S", 1.0)  # the word comes within that
    connections: queue.Queue[LineConnection] = queue.Queue()

    class Slow(Coordinator):
        def _on_message(self, connection: LineConnection, message: dict[str, Any]) -> None:
            super()._on_message(connection, message)
            if message["type"] in ("join", "rejoin"):
                connections.put(connection)

    coordinator, ends = Slow(lambda connection, number: connection.send(WELCOME)), queue.Queue[BaseException]()
    words = queue.Queue[messages.FromCoordinator]()
    member = join(coordinator, on_end=ends.put, on_control=words.put)
    first = connections.get(timeout=LIMIT_S)
    coordinator.server.call_soon(first.close)
    slow = connections.get(timeout=LIMIT_S)  # it hears "rejoined" only when it is to look for another
    member._on_closed("another leads now")
    coordinator.server.call_soon(lambda: slow.send({"type": "rejoined", "term": 1}))
    assert isinstance(words.get(timeout=LIMIT_S), messages.Rejoined)
    found = connections.get(timeout=LIMIT_S)
    coordinator.server.call_soon(lambda: found.send({"type": "rejoined", "term": 1}))
    assert isinstance(words.get(timeout=LIMIT_S), messages.Rejoined)
    assert ends.empty() and not member._rules.looks
    member.close()
    coordinator.end()


def test_where_nobody_looks_any_more_the_membership_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the thread that looks for a coordinator would vanish with that thread."""
    coordinator, ends = Coordinator(lambda connection, number: connection.send(WELCOME)), queue.Queue[BaseException]()
    member = join(coordinator, on_end=ends.put)
    monkeypatch.setattr(member, "_connect", lambda limit_s: {}[limit_s])
    member._on_closed("as ordered")
    assert isinstance(ends.get(timeout=LIMIT_S), KeyError)
    member.close()
    coordinator.end()


def test_who_leaves_is_woken_when_the_search_for_a_coordinator_ends() -> None:
    """Nobody is left to hear it. It waited on for as long as it would stay for one."""

    class Rules:
        has_parted = is_over = False

        def step(self, now_s: float) -> membership.Wait:
            self.has_parted = self.is_over = True
            return membership.NOTHING

        def take(self) -> list[membership.Effect]:
            return []

    member, waits, woken = object.__new__(Member), threading.Event(), threading.Event()
    member._changed, member._over = threading.Condition(), threading.Event()
    member._rules = rules = Rules()  # type: ignore[assignment]

    def leave() -> None:
        with member._changed:
            waits.set()
            member._changed.wait_for(lambda: rules.has_parted, LIMIT_S)
        woken.set()

    threading.Thread(target=leave, daemon=True).start()
    assert waits.wait(LIMIT_S)
    member._pursue(lambda: False)
    assert woken.wait(20.0)


@pytest.mark.parametrize("role", ["server", "trainer"])
def test_who_has_nothing_to_make_connections_with_says_so_or_ends(role: str) -> None:
    errors: list[BaseException] = []
    member = SimpleNamespace(_rules=SimpleNamespace(join=SimpleNamespace(role=role)), on_error=errors.append)
    lacks = "can't start new thread"
    transport = SimpleNamespace(name="me", unreachable=lambda: ["other"], lacks=lambda: lacks)
    found = Member._unreachable(member, transport)  # type: ignore[arg-type]
    assert found == (["other", "me"] if role == "server" else ["other"])
    assert [str(error) for error in errors] == ([] if role == "server" else [lacks])
    lacks = ""
    assert Member._unreachable(member, transport) == ["other"] and len(errors) < 2  # type: ignore[arg-type]
