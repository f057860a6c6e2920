"""A member process for tests of the transports. Commands come as JSON lines on stdin, answers go to stdout.

Run: python transport_child.py KIND NAME, KIND being one of `TRANSPORTS`, or "sockets+shared".

What its handler does with a request depends on the request's slot:

    slot < 100      answers with the slot-th answer class's sample, if the request equals its own class's sample
    PROMPT          answers `VersionsAre` at once
    LATE            answers when told to `release`, from another thread
    NEVER           keeps the request
    RAISES          raises ValueError("boom")
    BAD_ANSWER      answers with a message that cannot be sent
    TWICE           answers twice
    CLOSES          closes its transport from the handler, then answers
"""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import typing
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from junk import Says

from torch_ecrec.processes.member import TRANSPORTS
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.tensors import as_array
from torch_ecrec.transport import rpc
from torch_ecrec.transport.sockets import SocketTransport

WAIT_S = 240.0  # less than the test waits for an answer
PROMPT, LATE, NEVER, RAISES, BAD_ANSWER, TWICE, CLOSES = range(100, 107)
REQUEST_CLASSES = [cls for _, cls in sorted(WIRE.requests.items())]
ANSWER_CLASSES = [cls for _, cls in sorted(WIRE.answers.items())]
PAIRS = [(asks, answer) for asks, answers in WIRE.answers_to.items() for answer in answers]


def sample(cls: type, **given: Any) -> Any:
    """A message with every field filled according to its type, the same in every process."""
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {name: _fill(hints[name], seed) for seed, name in enumerate(cls.__struct_fields__)}  # type: ignore[attr-defined]
    return cls(**{**values, **given})


def _fill(hint: Any, seed: int) -> Any:
    if isinstance(hint, wire.TensorOf):
        return _tensor(hint, seed)
    if typing.get_origin(hint) is typing.Annotated:
        return _fill(typing.get_args(hint)[0], seed)
    if hint in (int, float, str, bool):
        return {int: 2**40 + seed, float: math.pi + seed, str: f"text {seed} \u00e4", bool: seed % 2 == 1}[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [_fill(parts[0], seed + i) for i in range(3 + seed % 2)]
    if origin is dict:
        return {i: _fill(parts[1], seed + i) for i in range(4)}
    if type(None) in parts:
        return None if seed % 2 else _fill(parts[0], seed)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(*(_fill(hints[name], seed + i) for i, name in enumerate(hint.__struct_fields__)))
    raise TypeError(f"no sample of {hint}")


def _tensor(wanted: wire.TensorOf, seed: int) -> torch.Tensor:
    """As declared; among others, a small part of its storage, none of it, strided, a parameter, not a number."""
    dtype = wanted.dtypes[seed % len(wanted.dtypes)]
    if wanted.rank == 1:
        numbers = torch.arange(120).remainder(100).add(seed).to(dtype)
        return [numbers, numbers[3:10], numbers[:0], numbers[::7]][seed % 4]
    numbers = torch.arange(60, dtype=torch.float32).mul(1.7).sub(seed).view(6, 10)
    if not dtype.is_floating_point:
        return numbers.view(torch.uint8).view(-1, 16)[:3]
    special = torch.tensor([[float("nan"), -0.0, float("inf")]])
    parameter = torch.nn.Parameter(numbers[:2].clone())
    return [numbers, torch.empty((0, 5)), numbers.t()[::2], parameter, special][seed % 5].to(dtype)


def same(a: Any, b: Any) -> bool:
    """Equal in type, and bit for bit where there are tensors."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [as_array(tensor.detach()).tobytes() for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]
    if type(a) is not type(b):
        return False
    if isinstance(a, msgspec.Struct):
        return all(map(same, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


class Child:
    def __init__(self, kind: str, name: str) -> None:
        self.errors: list[str] = []
        self.kept: list[Any] = []  # replies not made yet
        self.handled = threading.Condition()  # guards kept and errors
        self.out = threading.Lock()
        self.hammering = False
        self.pause = threading.Event()  # never set
        self.hammers: list[threading.Thread] = []
        kind, _, lends = kind.partition("+")
        if lends:
            shared.LEAST_BYTES = 1
            shared.enable(64 << 20)
        self.transport = TRANSPORTS[kind](name, self.handle, "127.0.0.1", on_error=self.on_error)

    def handle(self, request: Any, reply: Any) -> None:
        if request.slot < 100:
            equal = same(request, sample(type(request), slot=request.slot))
            reply(sample(ANSWER_CLASSES[request.slot]) if equal else wire.Refused(f"differs: {request}"))
        elif request.slot == PROMPT:
            reply(wire.VersionsAre({1: 2}))
        elif request.slot in (LATE, NEVER):
            with self.handled:
                self.kept.append(reply)
                self.handled.notify_all()
        elif request.slot == RAISES:
            raise ValueError("boom")
        elif request.slot == BAD_ANSWER:
            reply(wire.Records(object()))  # type: ignore[arg-type]
        elif request.slot == TWICE:
            reply(wire.VersionsAre({1: 1}))
            reply(wire.VersionsAre({1: 2}))
        elif request.slot == CLOSES:
            self.transport.close()
            reply(wire.VersionsAre({}))

    def on_error(self, error: BaseException) -> None:
        with self.handled:
            self.errors.append(repr(error))
            self.handled.notify_all()

    def call(self, peer: str, request: Any, timeout_s: float) -> wire.Outcome:
        ended = threading.Event()
        outcomes: list[wire.Outcome] = []

        def done(outcome: wire.Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self.transport.call(peer, request, timeout_s, done)
        if not ended.wait(timeout_s + WAIT_S):
            raise TimeoutError(f"`done` was not called: {peer} {request}")
        (outcome,) = outcomes
        return outcome

    # commands: each runs on its own thread and returns what is printed

    def do_endpoint(self) -> Any:
        return self.transport.endpoint

    def do_follow(self, version: int, endpoints: dict[str, str]) -> Any:
        self.transport.follow(version, endpoints)

    def do_reach(self, version: int, peers: list[str]) -> Any:
        """Calls each until it answers, over torch RPC in the world of that roster; returns how long that took."""
        start_s = time.monotonic()
        while isinstance(self.transport, rpc.RpcTransport) and not self._is_in(version):
            if time.monotonic() > start_s + WAIT_S:
                raise TimeoutError(f"the world of roster {version} was not formed")
            self.pause.wait(0.01)
        for peer in peers:
            while not isinstance(self.call(peer, wire.Versions(PROMPT, 0), 5), wire.Ok):
                if time.monotonic() > start_s + WAIT_S:
                    raise TimeoutError(f"{peer} does not answer")
                self.pause.wait(0.01)
        return time.monotonic() - start_s

    def _is_in(self, version: int) -> bool:
        assert isinstance(self.transport, rpc.RpcTransport)
        world = self.transport._world
        return world is not None and world.generation.startswith(f"{version}-")

    def do_die_at(self, place: str, before: bool) -> Any:
        """The next time that this process is to say something at `place`, it dies: before it has, or right after.

        At "arrived", which is where members gather, it does so once all are there.
        """
        meet, gather = rpc.meet, rpc.gather

        def gather_and_die(*all_of: Any) -> Any:
            found = gather(*all_of)
            if place == "arrived":
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        def meet_and_die(shared: Any, here: str, *rest: Any) -> Any:
            if here == place:
                if not before:
                    shared.set(f"{place}/{self.transport.name}", f"says {rest[2]}")
                os.kill(os.getpid(), signal.SIGKILL)
            return meet(shared, here, *rest)

        rpc.meet, rpc.gather = meet_and_die, gather_and_die

    def do_cannot_open(self, times: int) -> Any:
        """So many of the next worlds cannot be opened here."""
        agent, left = rpc.TensorPipeAgent, [times]

        def fail(*arguments: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("no world today")
            return agent(*arguments)

        rpc.TensorPipeAgent = fail

    def do_call(self, peer: str, slot: int, timeout_s: float) -> Any:
        start_s = time.monotonic()
        outcome = self.call(peer, wire.Versions(slot, 0), timeout_s)
        reason = outcome.answer if isinstance(outcome, wire.Ok) else outcome.reason
        return {"outcome": type(outcome).__name__, "detail": str(reason), "took_s": time.monotonic() - start_s}

    def do_say(self, values: Any) -> Any:
        """From now on it sends that for each message; None: what it should."""
        self.transport.vocabulary = WIRE if values is None else Says(values)

    def do_round_trips(self, peer: str) -> Any:
        """All requests and answers; returns the classes that came through and what did not."""
        through, wrong = set(), []
        for asks, answer in PAIRS:
            request, expected = sample(asks, slot=ANSWER_CLASSES.index(answer)), sample(answer)
            outcome = self.call(peer, request, WAIT_S)
            if isinstance(outcome, wire.Ok) and same(outcome.answer, expected):
                through |= {type(request).__name__, type(expected).__name__}
            else:
                wrong.append(f"{request}: {outcome}")
        return {"through": sorted(through), "wrong": wrong}

    def do_wait_kept(self, count: int) -> Any:
        """Returns when `count` requests wait for their answer."""
        with self.handled:
            return self.handled.wait_for(lambda: len(self.kept) >= count, WAIT_S)

    def do_release(self) -> Any:
        with self.handled:
            kept, self.kept = self.kept, []
        for reply in kept:
            reply(wire.VersionsAre({}))
        return len(kept)

    def do_hammer(self, peers: list[str]) -> Any:
        """Starts a thread per peer that calls it all the time."""
        self.hammering = True
        self.counts = {peer: {"Ok": 0, "Failed": 0, "Unknown": 0} for peer in peers}
        self.progress = threading.Condition()
        self.hammers = [threading.Thread(target=self._hammer, args=(peer,), daemon=True) for peer in peers]
        for thread in self.hammers:
            thread.start()

    def _hammer(self, peer: str) -> None:
        while self.hammering:
            outcome = self.call(peer, wire.Versions(PROMPT, 0), 5)
            with self.progress:
                self.counts[peer][type(outcome).__name__] += 1
                self.progress.notify_all()
            self.pause.wait(0.002)  # leaves the machine to others

    def do_wait_hammered(self, peer: str, more: int) -> Any:
        """Returns when `peer` has answered that many more calls."""
        with self.progress:
            least = self.counts[peer]["Ok"] + more
            return self.progress.wait_for(lambda: self.counts[peer]["Ok"] >= least, WAIT_S)

    def do_stop_hammer(self) -> Any:
        self.hammering = False
        for thread in self.hammers:
            thread.join(WAIT_S)
        return self.counts

    def do_status(self) -> Any:
        return {
            "bytes_sent": self.transport.bytes_sent,
            "complaints": self.transport.complaints.counts,
            "calls": self._calls(),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def _calls(self) -> int:
        """How many are under way."""
        if isinstance(self.transport, SocketTransport):
            return sum(len(channel._calls) for channel in self.transport._channels.values())
        assert isinstance(self.transport, rpc.RpcTransport)
        return len(self.transport._calls)

    def do_wait_errors(self, count: int) -> Any:
        with self.handled:
            self.handled.wait_for(lambda: len(self.errors) >= count, WAIT_S)
            errors, self.errors = self.errors, []
            return errors

    def do_default_group(self, rank: int, world: int, port: int) -> Any:
        store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def do_all_reduce(self) -> Any:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        return ones.tolist()

    def do_close(self) -> Any:
        self.transport.close()

    def run(self, command: dict[str, Any]) -> None:
        arguments = {key: value for key, value in command.items() if key not in ("id", "do")}
        try:
            answer = {"id": command["id"], "value": getattr(self, f"do_{command['do']}")(**arguments)}
        except Exception as error:
            answer = {"id": command["id"], "raised": repr(error)}
        with self.out:
            print(json.dumps(answer), flush=True)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # the test asks for the stacks before it gives up
    child = Child(sys.argv[1], sys.argv[2])
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":  # the main thread returns; what still runs must not keep or crash the process
            break
        threading.Thread(target=child.run, args=(command,), daemon=True).start()


if __name__ == "__main__":
    main()
