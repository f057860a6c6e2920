"""The transports with real processes (transport_child.py): messages, outcomes, rosters that change as members die."""

import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from junk import plain
from transport_child import (
    ANSWER_CLASSES,
    BAD_ANSWER,
    CLOSES,
    LATE,
    NEVER,
    PAIRS,
    PROMPT,
    RAISES,
    REQUEST_CLASSES,
    TWICE,
    same,
    sample,
)

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.processes.member import TRANSPORTS
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.transport.rpc import INTERFACE, _compact

WAIT_S = 300.0  # for anything at all: only a hang reaches it
PROMPTLY_S = 100.0  # by itself, on whatever machine: a third of what a hang takes


class Child:
    """A member process, and the commands it is given."""

    def __init__(self, kind: str, name: str) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child has failed
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [kind, name]
        self.process = forked.start("transport_child", words, environment, subprocess.PIPE, self.log.fileno())
        self.ids = itertools.count()
        self.news = threading.Condition()
        self.answers: dict[int, dict[str, Any]] = {}
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self.news:
                self.answers[answer["id"]] = answer
                self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def start(self, do: str, **arguments: Any) -> int:
        """Gives a command; its answer is had with `answer`."""
        number = next(self.ids)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int) -> Any:
        with self.news:
            come = self.news.wait_for(lambda: number in self.answers or self.ended, WAIT_S)
            answer = self.answers.pop(number, None)
        if answer is None:
            raise AssertionError(f"{self.name} {'ended' if come else 'hangs'}\n{self.stacks()}")
        if "raised" in answer:
            raise AssertionError(f"{self.name}: {answer['raised']}\n{self.stacks()}")
        return answer["value"]

    def ask(self, do: str, **arguments: Any) -> Any:
        return self.answer(self.start(do, **arguments))

    def call(self, peer: "Child | str", slot: int, timeout_s: float = WAIT_S) -> Any:
        return self.ask("call", peer=getattr(peer, "name", peer), slot=slot, timeout_s=timeout_s)

    def stacks(self) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            with self.news:
                self.news.wait_for(lambda: self.ended, 1)
        self.log.seek(0)
        return f"exit code {self.process.poll()}\n{self.log.read()[-8000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def end(self) -> int:
        """Lets the main thread return; the exit code."""
        self.start("end")
        return self.process.wait(WAIT_S)


class Cluster:
    """Children that live through all tests of this module, with one roster after another."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.version = 0
        self.names = (f"n{i}" for i in itertools.count())
        self.children: list[Child] = []

    def take(self, count: int) -> list[Child]:
        """That many living children, started if need be."""
        self.children = [child for child in self.children if child.process.poll() is None]
        while len(self.children) < count:
            self.another()
        return self.children[:count]

    def another(self) -> Child:
        child = Child(self.kind, next(self.names))
        self.children.append(child)
        return child

    def tell(self, children: list[Child], dies: Child | None = None, **others: str) -> None:
        """Tells them the next roster: they, and `others`, with how each is called. `dies`: of it, and says nothing."""
        self.version += 1
        endpoints = {**{child.name: child.ask("endpoint") for child in children}, **others}
        for number, child in [
            (child.start("follow", version=self.version, endpoints=endpoints), child) for child in children
        ]:
            if child is not dies:
                child.answer(number)

    def form(self, children: list[Child]) -> float:
        """As `tell`; returns once each has reached all others, and itself: the time it took the slowest."""
        self.tell(children)
        names = [child.name for child in children]
        numbers = [(child.start("reach", version=self.version, peers=names), child) for child in children]
        return max(child.answer(number) for number, child in numbers)

    @property
    def over_rpc(self) -> bool:
        return self.kind == "rpc"

    def ghost(self) -> str:
        """How somebody would be called who is not there."""
        return "127.0.0.1 1 1" if self.over_rpc else f"127.0.0.1 1 {bytes(16).hex()} -"


SHARED = "sockets+shared"
# What goes through shared memory are the tensors of messages: it makes no difference to who is there.
with_shared_memory = pytest.mark.parametrize("cluster", [*TRANSPORTS, SHARED], indirect=True)


@pytest.fixture(scope="module", params=[*TRANSPORTS, pytest.param(SHARED, marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param)
    try:
        cluster.take(5)
        yield cluster
    finally:
        for child in cluster.children:
            child.kill()
            child.log.close()


# messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*REQUEST_CLASSES, *ANSWER_CLASSES], ids=lambda cls: cls.__name__)
def test_messages_are_written_and_read(cls: type) -> None:
    message = sample(cls)
    encoded, size = WIRE.encode(message)
    _, tensors = encoded
    assert size == sum(tensor.nbytes for tensor in tensors)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors)
    asks = next((asks for asks, answer in PAIRS if answer is cls), None)
    assert same(WIRE.decode_answer(encoded, asks) if asks else WIRE.decode_request(encoded), message)


def test_only_messages_are_encoded_and_decoded() -> None:
    with pytest.raises(TypeError, match="SlotPlace"):
        WIRE.encode(messages.SlotPlace("a", 1, True))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plain values and tensors, got object"):
        WIRE.encode(wire.Records(object()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown message 'Placement'"):
        WIRE.decode_request(plain(["Placement", 1, []]))
    with pytest.raises(ValueError, match="unknown message 'Rows'"):
        WIRE.decode_request(plain(["Rows", []]))
    with pytest.raises(ValueError, match="1 tensors came, and it has 0"):
        WIRE.decode_request((WIRE.encode(wire.Versions(0, 0))[0][0], [torch.zeros(1)]))
    with pytest.raises(ValueError, match="not a Records"):
        WIRE.decode_answer((WIRE.encode(wire.Records(torch.zeros(1, 1)))[0][0], [None]), wire.Fetch)  # type: ignore[list-item]


@pytest.mark.parametrize("asks", REQUEST_CLASSES, ids=lambda cls: cls.__name__)
def test_a_request_is_answered_by_what_it_declares_only(asks: type) -> None:
    declared = [answer for one, answer in PAIRS if one is asks]
    assert wire.Refused in declared and wire.Malformed in declared and len(declared) > 2
    for answer in ANSWER_CLASSES:
        encoded, _ = WIRE.encode(sample(answer))
        if answer in declared:
            assert type(WIRE.decode_answer(encoded, asks)) is answer
        else:
            with pytest.raises(ValueError, match=f"{answer.__name__} is no answer to a {asks.__name__}: "):
                WIRE.decode_answer(encoded, asks)


def test_large_tensors_are_not_copied() -> None:
    records = torch.zeros(1000, 64, dtype=torch.uint8)
    (_, tensors), size = WIRE.encode(wire.Records(records))
    assert tensors[0].data_ptr() == records.data_ptr()
    assert size == 64_000


def test_torch_rpc_is_not_given_what_is_a_small_part_of_its_storage() -> None:
    """It would send the whole storage."""
    large = torch.arange(100)
    body, [few, most] = _compact((b"x", [large[:3], large[:90]]))
    assert few.untyped_storage().nbytes() == few.nbytes and few.tolist() == [0, 1, 2]
    assert most.data_ptr() == large.data_ptr() and body == b"x"


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_arguments_are_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")  # as torch's RPC leaves it in a process
    with pytest.raises(ValueError, match="`name`"):
        TRANSPORTS[kind]("a b", lambda request, reply: None, "127.0.0.1")
    with pytest.raises(ClusterUnavailable, match=r"192\.0\.2\.1"):
        TRANSPORTS[kind]("a", lambda request, reply: None, "192.0.2.1")
    transport = TRANSPORTS[kind]("a", lambda request, reply: None, "127.0.0.1")
    try:
        for said in ("", "nonsense", "127.0.0.1 x y", "127.0.0.1 1 zz -", "127.0.0.1 70000 1"):
            with pytest.raises(ValueError):
                transport.follow(1, {"a": transport.endpoint, "b": said})
        outcomes: list[wire.Outcome] = []
        transport.call("b", wire.Versions(0, 0), 1, outcomes.append)
        (outcome,) = outcomes
        assert isinstance(outcome, wire.Failed), "nothing has changed"
    finally:
        transport.close()


@with_shared_memory
def test_every_message_crosses(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    for sender, receiver in ((a, b), (b, a), (a, a)):
        result = sender.ask("round_trips", peer=receiver.name)
        assert result["wrong"] == []
        assert result["through"] == sorted(cls.__name__ for cls in [*REQUEST_CLASSES, *ANSWER_CLASSES])
    status = a.ask("status")
    assert set(status["bytes_sent"]) == set(result["through"])
    assert status["bytes_sent"]["Push"] > 0 == status["bytes_sent"]["Stored"]


# outcomes -------------------------------------------------------------------------------------------


@with_shared_memory
def test_late_answers_block_no_thread(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    numbers = [a.start("call", peer=b.name, slot=LATE, timeout_s=WAIT_S) for _ in range(30)]  # of 8 threads
    assert b.ask("wait_kept", count=30)
    assert a.call(b, PROMPT)["outcome"] == "Ok"
    assert b.ask("release") == 30
    assert {a.answer(number)["outcome"] for number in numbers} == {"Ok"}


def test_time_out_is_unknown(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    result = a.call(b, NEVER, timeout_s=0.5)
    assert result["outcome"] == "Unknown" and 0.4 < result["took_s"] < 0.5 + PROMPTLY_S
    assert b.ask("release") == 1  # too late: nothing comes of it
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def test_errors_in_a_handler_are_answered_and_recorded(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    result = a.call(b, RAISES)
    assert result["outcome"] == "Ok" and "Refused(reason='internal: boom')" in result["detail"]
    assert b.ask("wait_errors", count=1) == ["ValueError('boom')"]
    result = a.call(b, BAD_ANSWER)
    assert result["outcome"] == "Ok" and "Refused(reason='internal: " in result["detail"]
    (error,) = b.ask("wait_errors", count=1)
    assert "a Records cannot be sent: a message holds plain values and tensors" in error
    result = a.call(b, TWICE)
    assert result["outcome"] == "Ok" and result["detail"] == "VersionsAre(folded={1: 1})"
    (error,) = b.ask("wait_errors", count=1)
    assert "called twice" in error


def test_what_is_no_message_is_refused_with_a_reason_and_counted(cluster: Cluster) -> None:
    """Nobody ends, and the next call is as any."""
    a, b = cluster.take(2)
    cluster.form([a, b])
    before = [child.ask("status")["complaints"] for child in (a, b)]
    a.ask("say", values=["Versions", "x", 0, 0])
    result = a.call(b, PROMPT)
    assert (
        "Malformed(reason='not a request: not a Versions: Expected `int`, got `str` - at `slot`')" in result["detail"]
    )
    assert b.ask("status")["complaints"]["a request is none"] == before[1].get("a request is none", 0) + 1
    a.ask("say", values=None)
    b.ask("say", values=["Acknowledged", 1])
    result = a.call(b, PROMPT)
    assert result["outcome"] == "Unknown"
    assert result["detail"] == "Acknowledged is no answer to a Versions: VersionsAre is"
    assert a.ask("status")["complaints"]["an answer is none"] == before[0].get("an answer is none", 0) + 1
    b.ask("say", values=None)
    assert a.call(b, PROMPT)["outcome"] == "Ok"
    assert a.ask("wait_errors", count=0) == b.ask("wait_errors", count=0) == []


def test_strangers_are_failed_calls(cluster: Cluster) -> None:
    a, b, c = cluster.take(3)
    cluster.form([a, b])
    assert a.call(c, PROMPT)["outcome"] == "Failed"
    assert a.call("nobody", PROMPT)["outcome"] == "Failed"
    b.ask("close")
    assert b.call(a, PROMPT)["outcome"] == "Failed"
    result = a.call(b, PROMPT)
    assert result["outcome"] in ("Failed", "Unknown") and result["took_s"] < PROMPTLY_S
    assert b.end() == 0


@with_shared_memory
def test_killed_peer_ends_calls_at_once(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    number = a.start("call", peer=b.name, slot=NEVER, timeout_s=WAIT_S)
    assert b.ask("wait_kept", count=1)
    killed_s = time.monotonic()
    b.kill()
    assert a.answer(number)["outcome"] == "Unknown"
    assert time.monotonic() - killed_s < PROMPTLY_S
    result = a.call(b, PROMPT)
    assert result["outcome"] in ("Failed", "Unknown") and result["took_s"] < PROMPTLY_S


# rosters --------------------------------------------------------------------------------------------


@with_shared_memory
def test_a_member_is_replaced_while_the_others_go_on(cluster: Cluster) -> None:
    """Over connections of our own, calls between those who stay go on as if nothing had happened."""
    *members, new = cluster.take(5)
    cluster.form(members)
    for child in members:
        child.ask("hammer", peers=[other.name for other in members if other is not child])
    for child in members:
        assert all(child.ask("wait_hammered", peer=other.name, more=20) for other in members if other is not child)
    survivors, victim = members[:3], members[3]
    kept = survivors[0].start("call", peer=survivors[1].name, slot=LATE, timeout_s=WAIT_S)
    assert survivors[1].ask("wait_kept", count=1)

    victim.kill()
    for child in survivors:  # the survivors still reach each other
        assert all(child.ask("wait_hammered", peer=other.name, more=20) for other in survivors if other is not child)
    took_s = cluster.form([*survivors, new])
    print(f"all have reached the new one after {took_s:.3f} s")

    assert survivors[1].ask("release") == 1
    ended = survivors[0].answer(kept)
    if (
        cluster.over_rpc
    ):  # an answer to the generation before: dropped. That the other one has left may be noticed first
        assert ended["outcome"] == "Unknown" and ("ended" in ended["detail"] or "EOF" in ended["detail"])
    else:
        assert ended["outcome"] == "Ok", ended
    for child in survivors:
        assert all(child.ask("wait_hammered", peer=other.name, more=20) for other in survivors if other is not child)
        assert child.call(new, PROMPT)["outcome"] == "Ok"
        assert new.call(child, PROMPT)["outcome"] == "Ok"
    for child in survivors:
        counts = child.ask("stop_hammer")
        assert counts[victim.name]["Failed"] > 0  # it is no member any more
        if not cluster.over_rpc:
            for other in survivors:
                lost = {} if other is child else counts[other.name]
                assert not lost.get("Failed") and not lost.get("Unknown"), "nobody waits for anybody"
        assert child.ask("status")["calls"] == 0
        assert child.ask("wait_errors", count=0) == []


def test_calls_to_who_is_no_member_any_more_end_at_once(cluster: Cluster) -> None:
    """Also if it lives, and only stands still: nobody waits for what it was asked."""
    a, b, c = cluster.take(3)
    cluster.form([a, b, c])
    number = a.start("call", peer=c.name, slot=NEVER, timeout_s=WAIT_S)
    assert c.ask("wait_kept", count=1)
    back = c.start("call", peer=a.name, slot=NEVER, timeout_s=WAIT_S)
    assert a.ask("wait_kept", count=1)
    os.kill(c.process.pid, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        cluster.form([a, b])
        ended = a.answer(number)
        assert ended["outcome"] == "Unknown" and time.monotonic() - start_s < PROMPTLY_S
        assert a.call(c, PROMPT)["outcome"] == "Failed"
    finally:
        os.kill(c.process.pid, signal.SIGCONT)
    if not cluster.over_rpc:  # torch notices nothing before it is asked something
        assert c.answer(back)["outcome"] == "Unknown"
        assert c.call(a, PROMPT)["outcome"] in ("Failed", "Unknown"), "it is not heard any more"
        a.ask("release")
        cluster.form([a, b, c])  # given up by mistake, it is a member as before
        assert c.call(a, PROMPT)["outcome"] == "Ok" == a.call(c, PROMPT)["outcome"]
    c.ask("release")
    a.ask("release")
    if cluster.over_rpc:
        c.kill()


def test_who_is_in_the_roster_and_not_there_holds_up_nobody(cluster: Cluster) -> None:
    """Over torch RPC, the world before goes on until all have arrived in the next one."""
    a, b = cluster.take(2)
    cluster.form([a, b])
    cluster.tell([a, b], ghost=cluster.ghost())
    for _ in range(3):
        assert a.call(b, PROMPT)["outcome"] == "Ok" == b.call(a, PROMPT)["outcome"]
        assert a.call("ghost", PROMPT, timeout_s=30)["outcome"] in ("Failed", "Unknown")
    cluster.form([a, b])
    cluster.tell([a, b], aghost=cluster.ghost())
    cluster.form([b, a])


def test_an_older_roster_is_not_followed(cluster: Cluster) -> None:
    a, b, c = cluster.take(3)
    cluster.form([a, b, c])
    for version in (cluster.version - 1, cluster.version):
        a.ask("follow", version=version, endpoints={a.name: a.ask("endpoint")})
    assert a.call(c, PROMPT)["outcome"] == "Ok"


only_rpc = pytest.mark.parametrize("cluster", ["rpc"], indirect=True)


@only_rpc
@pytest.mark.parametrize(
    ("place", "before", "first"),
    [("arrived", False, False), ("ready", True, False), ("ready", True, True), ("ready", False, False)],
)
def test_a_member_killed_while_a_world_is_formed(cluster: Cluster, place: str, before: bool, first: bool) -> None:
    """All have arrived, and its way is not open; or it is; or the others believe it ready. The next one is formed.

    The first of the members is the one that the others wait for in every round.
    """
    a, b, victim = cluster.take(3)
    cluster.form([a, b, victim])
    victim.ask("die_at", place=place, before=before)
    cluster.tell([victim, a, b] if first else [a, b, victim], dies=victim)
    assert victim.process.wait(WAIT_S) == -signal.SIGKILL
    start_s = time.monotonic()
    for child in (a, b):
        child.ask("status")  # it waits for the dead one, and nothing else of it does
    assert time.monotonic() - start_s < PROMPTLY_S
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok" == b.call(a, PROMPT)["outcome"]


@only_rpc
@pytest.mark.parametrize("who", [0, 1])
def test_a_world_that_one_cannot_open_is_tried_again_by_all(cluster: Cluster, who: int) -> None:
    members = cluster.take(3)
    members[who].ask("cannot_open", times=2)
    cluster.form(members)


@only_rpc
def test_the_next_world_does_not_need_the_first_member_of_the_one_before(cluster: Cluster) -> None:
    a, b, c = cluster.take(3)
    cluster.form([a, b, c])
    a.kill()
    assert b.call(c, PROMPT)["outcome"] == "Ok", "nor does this one, once it is formed"
    cluster.form([b, c])


def test_the_default_process_group_is_not_disturbed(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"world": 2, "port": store.port}
    for number, child in [(child.start("default_group", rank=i, **told), child) for i, child in enumerate((a, b))]:
        child.answer(number)
    for _ in range(2):
        cluster.form([a, b])
        for number, child in [(child.start("all_reduce"), child) for child in (a, b)]:
            assert child.answer(number) == [2, 2, 2]
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def test_rosters_leave_nothing_behind(cluster: Cluster) -> None:
    a, b, c = cluster.take(3)
    cluster.form([a, b])
    before = a.ask("status")["threads"]
    for _ in range(10):
        cluster.form([a, b, c])
        cluster.form([a, b])
    assert a.ask("status")["threads"] <= before + 2


def test_processes_end_without_crash(cluster: Cluster) -> None:
    """No `close`, calls under way both ways, a member of a living cluster; and a close from a handler."""
    a, b, c = cluster.take(3)
    cluster.form([a, b, c])
    a.start("call", peer=b.name, slot=NEVER, timeout_s=WAIT_S)
    a.start("hammer", peers=[b.name])
    b.start("call", peer=a.name, slot=NEVER, timeout_s=WAIT_S)
    assert a.ask("wait_kept", count=1) and b.ask("wait_kept", count=1)
    assert a.end() == 0, a.stacks()
    assert c.call(b, CLOSES)["outcome"] in ("Ok", "Unknown")
    assert b.end() == 0, b.stacks()
    assert c.end() == 0, c.stacks()
