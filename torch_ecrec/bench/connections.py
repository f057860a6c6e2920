"""Measures the CPU time that our connection takes at both ends, between two processes that do nothing else.

One process calls the other, `--at-once` calls at a time; each call is a push whose tensors have so many bytes, and is
answered by a few. In training a step of one of three slots has messages of 0.7 to 2.5 MB.

    us/call       user and system time of both processes for a call of that size
    ms/MB         what it costs more than the smallest one, for each MB more
    MB/s          of bytes pushed, by the clock
    bare          the same of plain sockets, whose bytes nobody looks at: what is the kernel's, of any transport

With `--hosts` the two are on two hosts made of network namespaces, else both are here and TCP goes over loopback; no
memory is shared in either case. Sizes take turns, and so do ours and plain sockets. Times hold what the kernel does in
the processes' names: its part of TCP mostly, but for what it leaves to threads of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ecrec.bench import record
from torch_ecrec.bench.places import Here, OnHosts
from torch_ecrec.observe.progress import counted
from torch_ecrec.processes.children import await_end
from torch_ecrec.protocol import wire
from torch_ecrec.runtime import allocator
from torch_ecrec.runtime.addresses import own_host
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.sockets import SocketTransport

BYTES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
DIM = 64
KEPT = 4  # pushes that are sent in turn: the next one's bytes were not just read
NAMES = ("caller", "callee")
BARE = "the port of the plain socket"
LIMIT_S = 120.0  # for a block: only a hang reaches it
BLOCK_BYTES = 64 << 20  # pushed in a block, about
CALLS_MOST = 1000

# an end: `python -m torch_ecrec.bench.connections NAME HOST PORT` -------------------------------------


class End:
    """One of the two processes. The caller has the store at which they meet."""

    def __init__(self, name: str, store: tuple[str, int]) -> None:
        allocator.keep_freed(Settings().keep_freed_bytes)
        torch.set_num_threads(1)
        self.store = TCPStore(*store, is_master=name == NAMES[0], wait_for_workers=False)
        self.transport = SocketTransport(name, self._handle, own_host(store))
        self.store.set(name, self.transport.endpoint)
        self.transport.follow(1, {one: self.store.get(one).decode() for one in NAMES})
        self._pushes: dict[int, list[wire.Push]] = {}  # by size: to draw them takes longer than to send them
        self._bare: BareCaller | None = None
        if name == NAMES[0]:
            self._bare = BareCaller(store[0], self.store)
        else:
            answer_bare_calls(store[0], self.store)

    @staticmethod
    def _handle(request: wire.Request[Any], reply: Callable[[wire.Answer], None]) -> None:
        reply(wire.Acknowledged(1))

    def block(self, size: int, calls: int, at_once: int, bare: bool) -> dict[str, Any]:
        """Makes `calls` calls; returns the seconds they took by the clock."""
        if bare:
            assert self._bare is not None, "the caller is told"
            return {"seconds": self._bare.block(size, calls, at_once)}
        if size not in self._pushes:
            self._pushes[size] = [_push(size) for _ in range(KEPT)]
        pushes = self._pushes[size]
        outcomes: queue.SimpleQueue[wire.Outcome[wire.Acknowledged]] = queue.SimpleQueue()
        begin_s = time.perf_counter()
        for call in range(calls + at_once):
            if call >= at_once:
                outcome = outcomes.get(timeout=LIMIT_S)
                if not isinstance(outcome, wire.Ok):
                    raise RuntimeError(f"a call has failed: {outcome}")
            if call < calls:
                self.transport.call(NAMES[1], pushes[call % KEPT], LIMIT_S, outcomes.put)
        return {"seconds": time.perf_counter() - begin_s}

    def serve(self) -> None:
        """Obeys lines on its input until they end."""
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            said = self.block(**asked["block"]) if "block" in asked else {"cpu_s": time.process_time()}
            print(json.dumps(said), flush=True)
        self.transport.close()
        if self._bare is not None:
            self._bare.close()


class BareCaller:
    """The caller's end of a plain socket. A message follows its length, and is answered by 8 bytes."""

    def __init__(self, host: str, store: TCPStore) -> None:
        with socket.create_server((host, 0)) as listener:
            listener.settimeout(LIMIT_S)
            store.set(BARE, str(listener.getsockname()[1]))
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._messages: dict[int, list[bytes]] = {}

    def block(self, size: int, calls: int, at_once: int) -> float:
        """Makes `calls` calls; returns the seconds they took by the clock."""
        if size not in self._messages:
            self._messages[size] = [size.to_bytes(8, "little") + random.randbytes(size) for _ in range(KEPT)]
        messages, answer = self._messages[size], bytearray(8)
        begin_s = time.perf_counter()
        for call in range(calls + at_once):
            if call >= at_once:
                require(self._socket.recv_into(answer, 8, socket.MSG_WAITALL) == 8, "the other end has ended")
            if call < calls:
                self._socket.sendall(messages[call % KEPT])
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Closes the connection; the other end then ends, too."""
        self._socket.close()


def answer_bare_calls(host: str, store: TCPStore) -> None:
    """Answers a `BareCaller`, on a thread that ends with it. It reads into the same memory each time."""
    sock = socket.create_connection((host, int(store.get(BARE))), LIMIT_S)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer() -> None:
        length, memory = bytearray(8), bytearray()
        while sock.recv_into(length, 8, socket.MSG_WAITALL) == 8:
            size = int.from_bytes(length, "little")
            if len(memory) != size:
                memory = bytearray(size)
            sock.recv_into(memory, size, socket.MSG_WAITALL)
            sock.sendall(length)

    Worker(answer, "answers", log_error).start()


def _push(size: int) -> wire.Push:
    rows = max(size // (4 * DIM + 8), 1)
    return wire.Push(0, 1, 2, 0, [torch.arange(rows)], [torch.randn(rows, DIM)], [0.01], 2, 0)


# both ---------------------------------------------------------------------------------------------


class Pair:
    """Both processes. Use as a context manager."""

    def __init__(self, place: Here) -> None:
        where = place.meeting()
        command = [sys.executable, "-P", "-m", "torch_ecrec.bench.connections"]
        at, pipes = [where["MASTER_ADDR"], where["MASTER_PORT"]], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes = [place.start_trainer(rank, [*command, name, *at], **pipes) for rank, name in enumerate(NAMES)]

    def __enter__(self) -> Pair:
        for process in self.processes:
            self._answer(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended
                process.stdin.close()
        await_end(self.processes, LIMIT_S)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        out, found = process.stdout, queue.SimpleQueue[str]()
        assert out is not None
        Worker(lambda: found.put(out.readline()), "answers", log_error).start()
        try:
            line = found.get(timeout=LIMIT_S)
        except queue.Empty as error:
            raise RuntimeError("one end gave no answer in time") from error
        if not line:
            raise RuntimeError("one end has ended; see above")
        return dict(json.loads(line))

    def ask(self, which: int, message: dict[str, Any]) -> dict[str, Any]:
        process = self.processes[which]
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        return self._answer(process)

    def cpu_s(self) -> list[float]:
        """Returns the seconds of CPU time that each process has taken so far."""
        return [self.ask(which, {"cpu": True})["cpu_s"] for which in range(len(NAMES))]


def measure(pair: Pair, sizes: Sequence[int], at_once: int, repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each size, ours beside plain sockets: medians over the blocks."""
    turns = [(size, bare) for size in sizes for bare in (False, True)]
    found: dict[tuple[int, bool], list[list[float]]] = {turn: [] for turn in turns}
    for repeat in counted("connections: blocks", range(-1, repeats)):  # the first is for warming up
        for size, bare in turns:
            calls = max(min(BLOCK_BYTES // size, CALLS_MOST), at_once)
            before = pair.cpu_s()
            block = {"size": size, "calls": calls, "at_once": at_once, "bare": bare}
            seconds = pair.ask(0, {"block": block})["seconds"]
            spent = [after - first for after, first in zip(pair.cpu_s(), before, strict=True)]
            if repeat >= 0:
                one = [1e6 * spent[0] / calls, 1e6 * spent[1] / calls, calls * size / 1e6 / seconds]
                found[size, bare].append(one)
    least = min(sizes)
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"bytes": size}
        for kind, bare in (("", False), ("bare ", True)):
            caller_us, callee_us, rate = (statistics.median(one) for one in zip(*found[size, bare], strict=True))
            base_us = statistics.median(one[0] + one[1] for one in found[least, bare])
            per_mb = (caller_us + callee_us - base_us) / 1e3 / ((size - least) / 1e6) if size > least else None
            said = {"us/call": caller_us + callee_us, "caller us": caller_us, "callee us": callee_us}
            said |= {"MB/s": rate, "ms/MB": per_mb}
            row |= {kind + name: value for name, value in said.items()}
        rows.append(row)
    return rows


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table; writes OUT/connections.json and .csv."""
    record.require_counts(arguments, "repeats", "at_once")
    for size in arguments.bytes:
        require_int("bytes", size, 1)
    require(arguments.link_gbit >= 0, f"`--link-gbit` must not be negative, got {arguments.link_gbit}")
    require(arguments.hosts or not arguments.link_gbit, "`--link-gbit` goes with `--hosts`")
    with OnHosts(2, 1e9 * arguments.link_gbit) if arguments.hosts else Here() as place, Pair(place) as pair:
        rows = measure(pair, arguments.bytes, arguments.at_once, arguments.repeats)
    names = ("hosts", "link_gbit", "at_once", "repeats")
    content = {"header": record.header(), **{name: getattr(arguments, name) for name in names}}
    return record.finish(arguments.out, "connections", content, rows, shown=record.table(rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench connections`."""
    sizes: Sequence[int] = list(BYTES)
    parser.add_argument("--bytes", nargs="+", type=int, default=sizes, metavar="B", help="of tensors in a push")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="calls under way (default 3)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="blocks of each size (default 7)")
    parser.add_argument("--hosts", action="store_true", help="on two hosts of network namespaces (needs root)")
    parser.add_argument(
        "--link-gbit", type=float, default=0.0, metavar="G", help="rate of their links (default: no limit)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/connections"), metavar="DIR")


if __name__ == "__main__":
    End(sys.argv[1], (sys.argv[2], int(sys.argv[3]))).serve()
