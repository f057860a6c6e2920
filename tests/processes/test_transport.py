"""The transports with real processes (transport_child.py): messages, outcomes, generations formed while members die."""

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

from torch_ecrec.processes.member import TRANSPORTS
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.build import own_build
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.transport.rpc import _compact

WAIT_S = 300.0  # for anything at all: only a hang reaches it
PROMPTLY_S = 100.0  # by itself, on whatever machine: a third of what a hang takes


class Child:
    """A member process, and the commands it is given."""

    def __init__(self, kind: str, name: str, store_port: int) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child has failed
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [kind, name, str(store_port)]
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
    """Children that live through all tests of this module, in one new generation after another."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.generation = 0
        self.names = (f"n{i}" for i in itertools.count())
        self.children: list[Child] = []

    def take(self, count: int) -> list[Child]:
        """That many living children, started if need be."""
        self.children = [child for child in self.children if child.process.poll() is None]
        while len(self.children) < count:
            self.another()
        return self.children[:count]

    def another(self) -> Child:
        child = Child(self.kind, next(self.names), self.store.port)
        self.children.append(child)
        return child

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def start_join(
        self, children: list[Child], members: list[str], timeout_s: float = WAIT_S, **more: Any
    ) -> list[int]:
        arguments = {"generation": self.next_generation(), "members": members, "timeout_s": timeout_s, **more}
        return [child.start("join", **arguments) for child in children]

    def form(self, children: list[Child], timeout_s: float = WAIT_S, **more: Any) -> float:
        """Forms the next generation of these; the time it took the slowest."""
        numbers = self.start_join(children, [child.name for child in children], timeout_s, **more)
        results = [child.answer(number) for child, number in zip(children, numbers, strict=True)]
        assert [result["error"] for result in results] == [None] * len(children)
        return max(result["took_s"] for result in results)


SHARED = "sockets+shared"
# What goes through shared memory are the tensors of messages: it makes no difference to how generations are formed.
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
def test_arguments_are_checked(kind: str) -> None:
    with pytest.raises(ValueError, match="`name`"):
        TRANSPORTS[kind]("a b", lambda request, reply: None)
    transport = TRANSPORTS[kind]("a", lambda request, reply: None)
    with pytest.raises(ValueError, match="a among them"):
        transport.join(1, ["b", "c"], ("127.0.0.1", 1), 1)
    with pytest.raises(ValueError, match="`generation` must be higher than 0"):
        transport.join(0, ["a"], ("127.0.0.1", 1), 1)
    outcomes: list[wire.Outcome] = []
    transport.call("b", wire.Versions(0, 0), 1, outcomes.append)
    assert outcomes == [wire.Failed("between generations")]
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
    assert status["generation"] == cluster.generation and status["members"] == [a.name, b.name]
    assert set(status["bytes_sent"]) == set(result["through"])
    assert status["bytes_sent"]["Push"] > 0 == status["bytes_sent"]["Acknowledged"]


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
    assert error.startswith("TypeError")
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


def test_members_of_different_builds_form_no_generation(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    version = b.ask("be_of_version", version="9.9.9")
    numbers = cluster.start_join([a, b], [a.name, b.name], WAIT_S)
    results = [child.answer(number) for child, number in zip((a, b), numbers, strict=True)]
    assert f"{b.name} run another build of torch_ecrec than {a.name}" in results[0]["error"]
    assert f"{a.name} run another build of torch_ecrec than {b.name} (version 9.9.9)" in results[1]["error"]
    assert a.call(b, PROMPT)["outcome"] == "Ok", "the generation before goes on"
    b.ask("be_of_version", version=version)
    cluster.form([a, b])


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


# generations ----------------------------------------------------------------------------------------


@with_shared_memory
def test_a_member_is_replaced_while_the_others_go_on(cluster: Cluster) -> None:
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
    print(f"generation of 4 formed in {took_s:.3f} s")

    ended = survivors[0].answer(kept)
    # Over rpc, that the other one has left may be noticed first.
    assert ended["outcome"] == "Unknown" and ("ended" in ended["detail"] or "EOF" in ended["detail"])
    assert survivors[1].ask("release") == 1  # an answer to the generation before: dropped
    for child in survivors:
        assert all(child.ask("wait_hammered", peer=other.name, more=20) for other in survivors if other is not child)
        assert child.call(new, PROMPT)["outcome"] == "Ok"
        assert new.call(child, PROMPT)["outcome"] == "Ok"
    for child in survivors:
        counts = child.ask("stop_hammer")
        assert counts[victim.name]["Failed"] > 0  # it is no member any more
        assert child.ask("status")["calls"] == 0
        assert child.ask("wait_errors", count=0) == []


def test_a_generation_without_one_of_its_members_fails_in_time(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    for members in ([a.name, b.name, "ghost"], ["ghost", a.name, b.name]):
        # Enough for a busy machine to connect to the store, which is within it.
        for child, number in zip([a, b], cluster.start_join([a, b], members, timeout_s=3), strict=True):
            result = child.answer(number)
            assert "not arrived in time: ghost" in result["error"], result
            assert result["took_s"] < 3 + PROMPTLY_S
        assert a.call(b, PROMPT)["outcome"] == "Ok", "the generation before goes on until all have arrived"
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def leave_signs(cluster: Cluster, last_sign: str) -> None:
    """What a ghost leaves in the store of the next generation that comes as far as `last_sign`, and no further.

    The later ones are of torch's agent; the other transport does not look at them.
    """
    ghost = dist.PrefixStore(f"generation-{cluster.generation + 1}", cluster.store)
    if last_sign:
        said = "127.0.0.1 1" if cluster.kind == "rpc" else f"127.0.0.1 1 {bytes(16).hex()} -"
        ghost.set("arrived/ghost", f"{own_build().digest.hex()} {said}")
    if last_sign in ("named", "started"):
        ghost.set("names/2", f"ghost:{cluster.generation + 1}")
    if last_sign == "started":
        ghost.set(f"addrs/ghost:{cluster.generation + 1}", "127.0.0.1")


@pytest.mark.parametrize("last_sign", ["arrived", "named", "started"])
def test_a_member_that_dies_while_joining_fails_the_generation_in_time(cluster: Cluster, last_sign: str) -> None:
    """The store shows a ghost that came as far as `last_sign` and no further."""
    a, b = cluster.take(2)
    members = [a.name, b.name, "ghost"]
    leave_signs(cluster, last_sign)
    numbers = cluster.start_join([a, b], members, timeout_s=1)
    for child in (a, b):
        time.sleep(0.3)
        start_s = time.monotonic()
        child.answer(child.start("status"))  # it waits for the ghost, and nothing else does
        assert time.monotonic() - start_s < PROMPTLY_S
    for child, number in zip([a, b], numbers, strict=True):
        result = child.answer(number)
        assert result["error"] is not None
        assert result["took_s"] < 1 + PROMPTLY_S
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok" == b.call(a, PROMPT)["outcome"]


@pytest.mark.parametrize(
    ("place", "before", "first"),
    [("arrived", False, False), ("ready", True, False), ("ready", True, True), ("ready", False, False)],
)
def test_a_member_killed_in_the_middle_of_joining(cluster: Cluster, place: str, before: bool, first: bool) -> None:
    """All have arrived, and its way is not open; or it is; or the others believe it ready. The next generation forms.

    The first of the members is the one that the others wait for in every round.
    """
    a, b, victim = cluster.take(3)
    cluster.form([a, b, victim])
    victim.ask("die_in_join", place=place, before=before)
    members = [victim, a, b] if first else [a, b, victim]
    numbers = cluster.start_join(members, [member.name for member in members], timeout_s=2)
    joins = dict(zip(members, numbers, strict=True))
    assert victim.process.wait(WAIT_S) == -signal.SIGKILL
    for child in (a, b):
        result = child.answer(joins[child])
        # Only of a member that has said that it is ready can the others take it that it lives.
        assert result["error"] is not None or (place, before, first) == ("ready", False, False)
        assert result["took_s"] < 2 + PROMPTLY_S
    with victim.news:
        assert victim.news.wait_for(lambda: victim.ended, WAIT_S) and joins[victim] not in victim.answers
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok" == b.call(a, PROMPT)["outcome"]


def test_a_newer_generation_overtakes_one_that_waits(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    waiting = cluster.start_join([a, b], [a.name, b.name, "ghost"], timeout_s=WAIT_S)
    start_s = time.monotonic()
    while not cluster.store.check([f"generation-{cluster.generation}/arrived/{name.name}" for name in (a, b)]):
        assert time.monotonic() - start_s < WAIT_S
    cluster.form([a, b])
    for child, number in zip([a, b], waiting, strict=True):
        assert "overtaken" in child.answer(number)["error"]
    assert time.monotonic() - start_s < PROMPTLY_S
    assert a.call(b, PROMPT)["outcome"] == "Ok"


@pytest.mark.parametrize("last_sign", ["", "arrived", "named", "started"])
def test_a_join_that_nobody_needs_any_more_ends(cluster: Cluster, last_sign: str) -> None:
    """On the word that there is a newer generation, before it is joined: one thread joins them one by one."""
    a, b = cluster.take(2)
    members = [a.name, b.name, "ghost"]
    leave_signs(cluster, last_sign)
    waiting = cluster.start_join([a, b], members, timeout_s=WAIT_S)
    time.sleep(0.5)
    start_s = time.monotonic()
    for child, number in zip([a, b], waiting, strict=True):
        child.answer(child.start("overtake", generation=cluster.generation + 1))
        assert "overtaken" in child.answer(number)["error"]
    assert time.monotonic() - start_s < PROMPTLY_S
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def test_the_store_may_go_and_come_back(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    cluster.form([a, b], store_port=port)
    del store
    assert a.call(b, PROMPT)["outcome"] == "Ok"
    members = [a.name, b.name]
    for child, number in zip([a, b], cluster.start_join([a, b], members, timeout_s=1, store_port=port), strict=True):
        result = child.answer(number)
        assert (
            result["error"] is not None and result["took_s"] < 1 + PROMPTLY_S
        )  # torch looks at its time limit now and then
    for _ in range(2):  # a new coordinator at the old address; the members' connections to the one before are dead
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        cluster.form([a, b], store_port=port)
        del store
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def test_the_default_process_group_is_not_disturbed(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    for number, child in [(child.start("default_group", rank=i, world=2), child) for i, child in enumerate((a, b))]:
        child.answer(number)
    for _ in range(2):
        cluster.form([a, b])
        for number, child in [(child.start("all_reduce"), child) for child in (a, b)]:
            assert child.answer(number) == [2, 2, 2]
    assert a.call(b, PROMPT)["outcome"] == "Ok"


def test_generations_leave_nothing_behind(cluster: Cluster) -> None:
    a, b = cluster.take(2)
    cluster.form([a, b])
    assert a.call(b, PROMPT)["outcome"] == "Ok"
    before = a.ask("status")["threads"]
    for _ in range(20):
        cluster.form([a, b])
        assert a.call(b, PROMPT)["outcome"] == "Ok"
    assert a.ask("status")["threads"] <= before + 2


def test_processes_end_without_crash(cluster: Cluster) -> None:
    """No `close`, calls under way both ways, a member of a living generation; and a close from a handler."""
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
