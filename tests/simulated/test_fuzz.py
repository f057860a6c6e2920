"""Hostile and broken messages at every port and decoder of the data plane: training goes on as if nothing had come.

Simulated: beside every request comes a broken copy, and answers are broken on their way; and any request at all, lies
included, makes no handler raise. Real: a small cluster in this process trains over its sockets while its ports get
hellos, frames, notes, files and requests that are none. Sizes are for every day; `-m slow` has more.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from conftest import wait_until
from greeting import greet, hello_of
from harness import Scenario, SimulatedCluster, half_tables, simulate, small_tables
from harness.result import SimulationResult
from junk import mutated, read, same

from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Session
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.messages import Placement, SlotPlace
from torch_ecrec.protocol.wire import Refused
from torch_ecrec.runtime import shared
from torch_ecrec.server.service import Host
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.frames import DTYPES, HEADER, MAGIC, PACKED, Frame, FrameReader, is_between_hosts
from torch_ecrec.transport.sockets import NO_NAME, SocketTransport
from torch_ecrec.transport.timers import Timers

WAIT_S = 300.0  # for anything at all: only a hang reaches it
EVERY_DAY, AT_LENGTH = 300, 10_000  # messages to each port

sizes = pytest.mark.parametrize(
    "many", [EVERY_DAY, pytest.param(AT_LENGTH, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)


# simulated ------------------------------------------------------------------------------------------


class Breaker:
    """Breaks messages of a simulated cluster. What is broken and could be true still (a lie) is not let through."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.requests: Counter[str] = Counter()  # what became of those that were added
        self.answers: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._of: dict[int, wire.Request] = {}
        handle, believed = Host.handle, Host._believed
        breaker = self

        def break_requests(host: Host, request: wire.Request, reply: Callable[[Any], None]) -> None:
            breaker.add_broken(host, request, handle)
            handle(host, request, reply)

        def break_answers(node: Any, peer: str, request: wire.Request, outcome: Any) -> Any:
            if isinstance(outcome, wire.Ok) and breaker.rng.random() < 0.2:
                broken = breaker.broken_answer(node, request, outcome.answer)
                if broken is not None:
                    outcome = broken
            return believed(node, peer, request, outcome)

        monkeypatch.setattr(Host, "handle", break_requests)
        monkeypatch.setattr("torch_ecrec.transport.node.Node._believed", break_answers)

    def add_broken(self, host: Host, request: wire.Request, handle: Any) -> None:
        broken = read(mutated(request, self.rng))
        if broken is None or not isinstance(broken, wire.Request):
            self.requests["no message"] += 1
            return
        slot = host.slots.get(broken.slot)
        if slot is not None and slot.incarnation == broken.incarnation and host._fault_of(slot, broken) is None:
            self.requests["lies"] += 1
            return
        answers: list[Any] = []
        handle(host, broken, answers.append)
        (answer,) = answers
        assert isinstance(answer, Refused), (broken, answer)
        self.requests["refused"] += 1
        self.kinds[type(broken).__name__] += 1

    def broken_answer(self, node: Any, request: wire.Request, answer: Any) -> Any:
        broken = read(mutated(answer, self.rng), request)
        if broken is None or not isinstance(broken, wire.Answer):
            self.answers["no message"] += 1
            return wire.Unknown("no message")
        if node.fault_of_answer(request, broken) is None:
            self.answers["lies"] += 1
            return None
        self.answers["not believed"] += 1
        self.kinds[type(broken).__name__] += 1
        return wire.Ok(broken)


def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(scenario)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(100, 160), marks=[pytest.mark.slow])])
def test_broken_requests_and_answers_change_nothing(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """With servers and trainers that die meanwhile, so that every kind of message is among them."""
    requests: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in seeds:
        code = CodeSpec(5, 3, 2) if seed % 2 else CodeSpec(3, 2, 1)
        with monkeypatch.context() as patch:
            tables = half_tables() if seed % 3 == 2 else small_tables()
            oracle = undisturbed(Scenario(code=code, steps=6, tables=tables))
            breaker = Breaker(seed, patch)
            scenario = Scenario(
                code=code,
                tables=tables,
                steps=6,
                network_seed=seed,
                kills=((1, 2), (0, 4)),
                reborn=True,
                trainer_kills=((0, 3),),
            )
            run = simulate(scenario)
        run.check_against(oracle)
        assert run.kills and run.trainer_kills
        requests += breaker.requests
        answers += breaker.answers
        kinds += breaker.kinds
    print(f"requests {dict(requests)}, answers {dict(answers)}, refused or not believed {dict(kinds)}")
    assert requests["refused"] > 100 * len(seeds) and answers["not believed"] > 10 * len(seeds)
    common = {"Lookup", "Push", "Snapshot", "Fold", "Attach", "Adopt", "Cut", "Fetch", "FetchSnapshots", "Rows"}
    assert common | {"Records", "Acknowledged", "Stored", "CutLog", "Snapshots"} <= set(kinds), "every kind was there"


@pytest.mark.parametrize("many", [4000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_request_makes_a_handler_raise(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, lies included; of a host in the middle of training, and of one that is being rebuilt."""
    rng = random.Random(many)
    seen: Counter[str] = Counter()
    for seed in itertools.count():
        if sum(seen.values()) >= many:
            break
        kept: list[tuple[Host, wire.Request]] = []
        with monkeypatch.context() as patch:
            handle = Host.handle

            def keep(host: Host, request: wire.Request, reply: Any, handle: Any = handle, kept: Any = kept) -> None:
                kept.append((host, request))
                handle(host, request, reply)

            patch.setattr(Host, "handle", keep)
            scenario = Scenario(code=CodeSpec(4, 2, 2), network_seed=seed, kills=((1, 2),), trainer_kills=((0, 3),))
            cluster = SimulatedCluster(scenario)
            for _ in range(rng.randrange(100, 1500)):
                cluster._run_trainers()
                if not cluster.network.clock.advance():
                    break
        alive = [(host, request) for host, request in kept if host.name not in cluster.network.dead]
        for _ in range(200):
            host, request = rng.choice(alive)
            broken = read(mutated(request, rng))
            if not isinstance(broken, wire.Request):
                seen["no message"] += 1
                continue
            mine = host.slots.get(broken.slot)
            if mine is not None and rng.random() < 0.9:  # what is stale is refused before anybody looks at it
                broken.incarnation, broken.era = mine.incarnation, host.era
            answers: list[Any] = []
            try:
                host.handle(broken, answers.append)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {broken}") from error
            seen[type(answers[0]).__name__ if answers else "waits"] += 1
    print(dict(seen))
    assert seen["Malformed"] > many // 10 and len(seen) > 5


# real -----------------------------------------------------------------------------------------------


class Port:
    """A node's way out, without a coordinator."""

    def __init__(self, name: str, errors: list[BaseException]) -> None:
        self.timers = Timers(errors.append)
        self.handle: Callable[[Any, Any], None] = lambda request, reply: reply(Refused("not yet"))
        handle = lambda request, reply: self.handle(request, reply)  # noqa: E731
        self.transport = SocketTransport(name, handle, "127.0.0.1", errors.append)

    def call(self, peer: str, request: wire.Request, timeout_s: float, done: Any) -> None:
        self.transport.call(peer, request, timeout_s, done)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.timers.later(delay_s, action)

    def now_s(self) -> float:
        return time.monotonic()

    def tell(self, message: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.timers.close()
        self.transport.close()


class Live:
    """Servers and a trainer of a small job over real sockets, in this process."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        code = CodeSpec(3, 2, 1)
        self.job = JobSpec(small_tables(), code, 1, 0)
        settings = Settings(call_timeout_s=5.0)
        names = [f"s{i}" for i in range(code.slots)]
        self.ports = {name: Port(name, self.errors) for name in [*names, "t"]}
        self.hosts = [Host(name, self.ports[name], settings) for name in names]
        self.client = Client("t", self.ports["t"], self.job, 0, settings, snapshot_every=0)
        for node in [*self.hosts, self.client]:
            self.ports[node.name].handle = node.handle
        for port in self.ports.values():
            port.transport.follow(1, {name: one.transport.endpoint for name, one in self.ports.items()})
        placement = Placement(1, tuple(SlotPlace(name, 0, True) for name in names))
        for host in self.hosts:
            host.on_control(messages.Job(self.job, "run"))
            host.on_control(messages.Placed(placement))
        self.client.run(self.client.place, placement)
        self.session = Session(self.client, lambda message: None, lambda: None)
        for node in [*self.hosts, self.session]:  # what a coordinator would say
            node.on_control((messages.Era if node is not self.session else messages.Resume)(0, 0, 0, 0))
            node.on_control(messages.Loaded(0))
        self.session.loaded()

    def step(self) -> None:
        number = self.session.step
        rng = np.random.default_rng(number)
        rows = [
            torch.from_numpy(np.flatnonzero(rng.random(table_group.rows) < 0.5))
            for table_group in self.job.table_groups
        ]
        weights = [torch.cat(parts) for parts in self.session.lookup_parts(rows)]
        self.session.push(rows, [torch.sin(w * 3 + number) for w in weights], [0.1] * len(rows))

    def digest(self) -> str:
        self.session.flush()
        found = hashlib.sha256()
        for table_group, spec in enumerate(self.job.table_groups):
            found.update(self.session.read(table_group, torch.arange(spec.rows)).numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        for port in self.ports.values():
            port.close()


@contextlib.contextmanager
def live(shares: bool) -> Iterator[Live]:
    shared.enable(64 << 20 if shares else 0)
    cluster = Live()
    try:
        yield cluster
    finally:
        cluster.close()
        shared.enable(0)


def dial(live: Live, rng: random.Random, within_host: bool) -> tuple[socket.socket, SocketTransport]:
    """A connection to one of the servers, and which."""
    transport = live.ports[f"s{rng.randrange(3)}"].transport
    address = transport._address
    if within_host:
        assert address.name != NO_NAME
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address.name}")
    else:
        sock = socket.create_connection(address.place, WAIT_S)
    sock.settimeout(WAIT_S)
    return sock, transport


def bytes_of(message: wire.Request) -> bytes:
    frame = Frame(7, WIRE.encode(message)[0])
    frame._begin(None, between_hosts=True)
    return b"".join(frame._parts)


def bad_hello(good: bytes, rng: random.Random) -> bytes:
    """Nonsense, a part of one, one without a proof, and one that was changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(100))
    if kind == 1:
        return good[: rng.randrange(len(good))]
    if kind == 2:
        return good + rng.randbytes(rng.randrange(2000))
    which = rng.randrange(len(good))
    return good[:which] + bytes([good[which] ^ (1 << rng.randrange(8))]) + good[which + 1 :]


def bad_frame(rng: random.Random) -> bytes:
    """Of a request that only reads: what is whole by chance does no harm."""
    positions = [torch.arange(rng.randrange(3)) for _ in range(2)]
    good = bytes_of(wire.Lookup(rng.randrange(3), 0, 1, positions))
    kind = rng.randrange(8)
    if kind == 7:  # a tensor as if it were packed
        values, size = rng.choice((0, 16, 100, 1000)), rng.choice((0, 5, 20, 26, 300, 1 << 50))
        table = struct.pack("<4Q", PACKED | DTYPES.index(torch.uint8), 1, values, size)
        head = HEADER.pack(MAGIC, 0, len(table), 1, 7) + table + b"x" + rng.randbytes(min(size, 300))
        return head + xxhash.xxh3_64(head).digest()
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 300))
    if kind == 1:
        return good[: rng.randrange(1, len(good))]
    if kind == 2:
        numbers = [rng.choice((0, 1, 1 << 14, 64 << 20, (64 << 20) + 1, (1 << 32) - 1)) for _ in range(3)]
        return HEADER.pack(MAGIC, *numbers, 7) + rng.randbytes(rng.randrange(100))
    if kind == 3:
        body = rng.randbytes(rng.randrange(1, 200))
        return HEADER.pack(MAGIC, 0, 0, len(body), 7) + body
    if kind == 4:
        depth = rng.choice((10, 2000, 100_000))  # an array in an array
        body = b"\x92\xa6Lookup" + b"\x91" * depth + b"\xc0"
        return HEADER.pack(MAGIC, 0, 0, len(body), 7) + body
    if kind == 5:
        notes = struct.pack("<4I", *(rng.choice((0, 1, 2, 1 << 20, (1 << 32) - 1)) for _ in range(4)))
        notes += rng.randbytes(8 * rng.randrange(12))
        _, _, of_table, of_body, ticket = HEADER.unpack(good[: HEADER.size])
        return HEADER.pack(MAGIC, len(notes), of_table, of_body, ticket) + notes + good[HEADER.size :]
    changed = bytearray(good)
    for _ in range(rng.choice((1, 1, 3))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def a_file(rng: random.Random) -> int:
    """One that may be shown, is too short, may be shortened, or is none."""
    kind = rng.randrange(4)
    if kind == 0:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, rng.choice((0, 100, 65536)))
    if kind == 1:
        shared.fcntl.fcntl(fd, shared.fcntl.F_ADD_SEALS, shared.fcntl.F_SEAL_SHRINK)
    return fd


def hang_up(sock: socket.socket) -> None:
    """Says that nothing more comes, and waits until the other side has closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    sock.close()


def fuzz_hellos(live: Live, many: int, within_host: bool, rng: random.Random) -> None:
    for _ in range(many):
        sock, _ = dial(live, rng, within_host)
        with contextlib.suppress(OSError):
            sock.sendall(bad_hello(hello_of(b"t"), rng))
        if rng.random() < 0.1:
            hang_up(sock)
        else:
            sock.close()


def fuzz_frames(live: Live, many: int, within_host: bool, rng: random.Random) -> None:
    for _ in range(many):
        sock, transport = dial(live, rng, within_host)
        frame = bad_frame(rng)
        files = [a_file(rng) for _ in range(rng.choice((0, 1, 1, 2, 5)))] if within_host else []
        with contextlib.suppress(OSError):
            greet(sock, transport, hello_of(b"t"))
            if files:
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(files)}i", *files))]
                frame = frame[socket.socket.sendmsg(sock, [frame], control) :]
            if rng.random() < 0.02:  # slowly
                for i in range(0, min(len(frame), 200), 20):
                    sock.sendall(frame[i : i + 20])
            else:
                sock.sendall(frame)
        for fd in files:
            os.close(fd)
        hang_up(sock)


def valid_requests(live: Live, slot: int) -> list[wire.Request]:
    """One of each kind for a slot that is whole, at about the step it is at."""
    host, job = live.hosts[slot], live.job
    step, layouts = host.slots[slot].rule.applied + 1, host.layouts
    positions = [torch.arange(min(3, layout.data_rows(slot))) for layout in layouts]
    gradients = [
        torch.zeros(len(p), table_group.dim) for p, table_group in zip(positions, job.table_groups, strict=True)
    ]
    source = host.slots[slot].rule.sources[0]
    runs = [(table_group, run) for table_group, layout in enumerate(layouts) for run in layout.runs(source, slot)]
    parts = [torch.arange(run.first, run.end) for _, run in runs]
    deltas = [
        torch.zeros((len(p), job.table_groups[table_group].schema.nbytes), dtype=torch.uint8)
        for p, (table_group, _) in zip(parts, runs, strict=True)
    ]
    one = positions[0][:1]
    return [
        wire.Lookup(slot, 0, step, positions),
        wire.Lookup(slot, 0, step, positions, int8=True),
        wire.Push(slot, 0, step, 0, positions, gradients, [0.1] * len(positions), step, step - 1),
        wire.Export(slot, 0, 0, step, positions[0]),
        wire.Fold(slot, 0, source, 0, step, step - 1, parts, deltas),
        wire.Attach(slot, 0, source, 0, 0, 0),
        wire.Adopt(slot, 0, source, 0, False),
        wire.Cut(slot, 0, source, 0, False, step),
        wire.Versions(slot, 0),
        wire.Fetch(slot, 0, 0, False, one, {slot: step}, False),
        wire.FetchSeals(slot, 0, 0, one, step - 1),
        wire.FetchSnapshots(slot, 0, -1),
        wire.WhoIsAwaited(slot, 0),
    ]


def fuzz_requests(live: Live, many: int, within_host: bool, rng: random.Random) -> Counter[str]:
    """Broken requests in whole frames, over one connection: each is refused, and the connection stays."""
    became: Counter[str] = Counter()
    transport = live.ports["s1"].transport
    sock = socket.create_connection(transport._address.place, WAIT_S)
    greet(sock, transport, hello_of(b"t"))
    reader = FrameReader(sock)
    host = live.hosts[1]
    while sum(became.values()) - became["lies"] < many:
        request = rng.choice(valid_requests(live, 1))
        encoded = mutated(request, rng)
        message = read(encoded)
        if isinstance(message, wire.Request):
            slot = host.slots.get(message.slot)
            stale = slot is None or slot.incarnation != message.incarnation or message.era != host.era
            if not stale and (same(message, request) or host._fault_of(slot, message) is None):
                became["lies"] += 1
                continue
        try:
            frame = Frame(7, encoded)
        except TypeError:  # an integer that does not travel
            became["cannot be sent"] += 1
            continue
        while not frame.send_to(sock, None, is_between_hosts(sock)):
            time.sleep(0)
        answer = reader.read()
        assert answer is not None and isinstance(WIRE.decode_answer(answer[1], wire.Versions), Refused), (
            encoded,
            answer,
        )
        became[type(message).__name__ if message is not None else "no message"] += 1
    sock.close()
    return became


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("what", ["rows", "dtype"])
def test_a_trainers_own_malformed_request_ends_it_at_once(what: str) -> None:
    """With the reason of the server, rather than after `give_up_s` without one."""
    with live(False) as cluster:
        cluster.step()
        job, row = cluster.job, torch.tensor([0, 1])
        rows = [torch.ones_like(row) if what == "rows" else row for _ in job.table_groups]
        gradients = [torch.ones(len(row), table_group.dim) for table_group in job.table_groups]
        if what == "dtype":
            gradients = [gradient.double() for gradient in gradients]
        with pytest.raises(ValueError, match=r"slot \d refuses a Push: not a request"):
            cluster.session.push(rows, gradients, [0.1] * len(rows))
            cluster.session.flush()
        assert not cluster.errors


@sizes
@pytest.mark.parametrize("shares", [False, True], ids=["tcp", "unix"])
def test_training_goes_on_under_broken_messages(many: int, shares: bool) -> None:
    """The records are those of a run that nobody disturbed; nobody ends; no thread, file or memory is left behind."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with live(shares) as cluster:
        for _ in range(20):
            cluster.step()
        fuzz_frames(cluster, 50, shares, random.Random(seed))  # what is made once has been made
        files, threads, memory = files_open(), threading.active_count(), resident_bytes()
        started_s, before = time.monotonic(), cluster.session.step
        with ThreadPoolExecutor(3) as pool:
            fuzzers = [
                pool.submit(fuzz, cluster, many, shares, random.Random(seed + i))
                for i, fuzz in enumerate((fuzz_hellos, fuzz_frames, fuzz_requests))
            ]
            while not all(fuzzer.done() for fuzzer in fuzzers):
                cluster.step()
            took_s = time.monotonic() - started_s
            results = [fuzzer.result() for fuzzer in fuzzers]
        trained = cluster.session.step - before
        for _ in range(20):
            cluster.step()
        steps = cluster.session.step - 1
        digest = cluster.digest()
        assert not cluster.errors, cluster.errors
        wait_until(lambda: threading.active_count() <= threads + 1, WAIT_S, "its threads have ended")
        gc.collect()
        wait_until(lambda: files_open() <= files + 8, WAIT_S, "its files are closed")
        grown = resident_bytes() - memory
        complaints: Counter[str] = Counter()
        for port in cluster.ports.values():
            complaints += Counter(port.transport.complaints.counts)
    print(
        f"{many} to each of three ports in {took_s:.1f} s, {trained} steps meanwhile; memory + {grown >> 20} MiB;"
        f" requests {dict(results[2])}; complaints {dict(complaints)}"
    )
    assert grown < 100 << 20
    assert complaints["a stranger's connection is closed"] > many // 2
    with live(shares) as calm:
        started_s = time.monotonic()
        for _ in range(steps):
            calm.step()
        print(f"undisturbed: {steps} steps in {time.monotonic() - started_s:.1f} s")
        assert calm.digest() == digest
