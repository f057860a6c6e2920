"""The data plane over torch.distributed.rpc. The only module that imports it, beside `compat/rpc.py`.

An RPC world of torch is static: nobody can be replaced in it. So each generation is a world of its own, and the
processes live through it. A world is known to torch by names that carry the generation ("n0:2"), so that nothing of an
old world can be taken for the new one. torch's own way to form one (`init_rpc`) goes through a gloo group and RPCs that
wait without a limit when a member dies; it is not used, and neither is the default process group of the program.

What is sent is a message's bytes and its tensors (`encoding.py`); torch moves the tensors without a copy where it can.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rpc import (  # type: ignore[attr-defined]
    TensorPipeAgent,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    functions,
    rpc_async,
    shutdown,
)
from torch.futures import Future

from torch_ecrec.compat.rpc import init_autograd, is_agent_set, start_agent
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.status import Connections
from torch_ecrec.protocol.wire import Ok, Refused
from torch_ecrec.runtime.addresses import interface_of
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.settings import set_unless_set
from torch_ecrec.transport.generations import Handler, Transport
from torch_ecrec.transport.reachability import Place, open_sockets, refusing
from torch_ecrec.transport.rendezvous import POLL_LEAST_S, POLL_MOST_S, World

# What is sent goes through the socket. On one host torch prefers that the receiver reads the sender's memory ("cma"):
# a sender that leaves a generation frees it, and the receiver then reads something else, and says nothing (measured).
CHANNELS = ["basic"]
SPARE_STORAGE = 1.25  # of a tensor its whole storage is sent: beyond this factor a copy is cheaper
TRANSPORTS = ["uv"]  # sockets. torch's choice on one host is "shm", whose thread polls: a full core per idle process
INTERFACE = "TP_SOCKET_IFNAME"  # whose address an agent takes
LOOK_S = 0.1  # how often tries to reach other hosts are looked at
END_S = 5.0  # for the thread that does

# the callee's side ----------------------------------------------------------------------------------

_active: RpcTransport | None = None  # set by the first join of a transport, cleared by its close
_prepared = False  # what `_prepare_process` does is done once per process


def _prepare_process() -> None:
    global _prepared
    if not _prepared:
        _prepared = True
        init_autograd(0)  # torch's agent insists, though distributed autograd is not used here
        atexit.register(_close_active)


def _listen_at(host: str) -> None:
    """Torch's agent would take the address of the host's name, which may be a loopback one: others would not get there.

    It looks at this once in a process, when the first one is made. Of a host with an IPv6 address it is left alone.
    """
    if ":" in host:
        return
    try:
        set_unless_set(INTERFACE, lambda: interface_of(host))
    except OSError as error:  # the second address of an interface
        raise ClusterUnavailable(f"{error}: say in {INTERFACE} which interface torch's RPC is to listen at") from error


def _close_active() -> None:
    # An agent that still runs when the interpreter ends aborts the process.
    if _active is not None:
        _active.close()


def _compact(encoded: Encoded) -> Encoded:
    """A message with a copy of each tensor that is a small part of its storage."""

    def compact(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().nbytes() > SPARE_STORAGE * tensor.nbytes else tensor

    body, tensors = encoded
    return body, [compact(tensor) for tensor in tensors]


@functions.async_execution  # type: ignore[untyped-decorator]
def _serve(generation: int, encoded: Encoded) -> Future[Encoded]:
    """Entry point of every call, on a thread of the callee's agent. Never raises."""
    future: Future[Encoded] = Future()
    transport = _active
    if transport is None:
        future.set_result(WIRE.encode(Refused("left the cluster"))[0])
    else:
        transport._serve(generation, encoded, lambda answer: future.set_result(_compact(answer)))
    return future


# the transport --------------------------------------------------------------------------------------


def torch_name(member: str, generation: int) -> str:
    """What a member is called in torch's world of `generation`."""
    return f"{member}:{generation}"


class RpcTransport(Transport):
    """See `Transport`. One per process is active at a time.

    Args:
        threads: RPC threads. They run `handle` and most `done`s, so neither should block for long.
    """

    def __init__(
        self,
        name: str,
        handle: Handler,
        on_error: Callable[[BaseException], None] | None = None,
        threads: int = 8,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        super().__init__(name, handle, on_error, vocabulary)
        if threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}")
        self._threads = threads
        self._polling: Store | None = None  # of the agent, which may ask it as long as it lives
        self._workers: dict[str, WorkerInfo] = {}
        self._refusing: socket.socket | None = None  # an agent that is tried at its own port hears nobody from then on
        self._ended = threading.Event()
        self._looks: threading.Thread | None = None  # at the tries; from the first generation on
        belongs_here(self)

    def on_forked(self) -> None:
        global _active
        super().on_forked()
        atexit.unregister(_close_active)  # the agent's threads are the parent's
        _active = None

    def _claim(self, store: tuple[str, int]) -> str:
        global _active
        if _active is None and not is_agent_set():
            _active = self
        if _active is not self:
            raise RuntimeError("torch.distributed.rpc is in use in this process already")
        if self._refusing is None:
            try:
                self._refusing = refusing(store)
            except OSError as error:
                raise ClusterUnavailable(f"there is no port for other hosts to try: {error}") from error
        host, port = self._refusing.getsockname()[:2]
        _listen_at(host)
        return f"{host} {port}"

    def _end(self) -> None:
        global _active
        if _active is self:
            _active = None
        self._ended.set()
        if self._looks is not None and self._looks is not threading.current_thread():
            self._looks.join(LOOK_S + END_S)
        if self._refusing is not None:
            self._refusing.close()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._tries.look(open_sockets(), time.monotonic(), in_doubt=True)

    def _open(self, world: World, shared: Store, said: Sequence[str], deadline_s: float) -> None:
        generation, rank = world.generation, world.members.index(self.name)
        _prepare_process()
        options = TensorPipeRpcBackendOptions(
            num_worker_threads=self._threads, _transports=TRANSPORTS, _channels=CHANNELS
        )
        self._polling = _PollingStore(shared, lambda: self._check_wanted(generation), deadline_s)
        name = torch_name(self.name, generation)
        agent = TensorPipeAgent(self._polling, name, rank, len(world.members), options, {}, [])
        start_agent(agent)
        self._workers = {member: agent.get_worker_info(torch_name(member, generation)) for member in world.members}
        places = {name: place_of(text) for name, text in zip(world.members, said, strict=True)}
        self._tries.follow(places, places[self.name][0])
        if self._looks is None:
            self._looks = Worker(self._look, "tries", self._report)
            self._looks.start()

    def _shut(self) -> None:
        if _active is self and is_agent_set():
            shutdown(graceful=False)

    def connections(self) -> Connections:
        return Connections(rpc=max(len(self.members) - 1, 0))  # torch's own affair

    def _send(self, world: World, peer: str, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        future = rpc_async(self._workers[peer], _serve, args=(world.generation, _compact(encoded)), timeout=timeout_s)
        decode = self.vocabulary.decode_answer
        future.add_done_callback(lambda ended: self._settle(ticket, lambda kind: Ok(decode(ended.value(), kind))))


def place_of(said: str) -> Place:
    """Returns where a member is to be tried, as it has told.

    Raises:
        ClusterUnavailable: it is no place.
    """
    host, _, port = said.partition(" ")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterUnavailable(f"a member told no place: {said!r}")
    return host, int(port)


class _PollingStore(Store):  # type: ignore[misc]
    """A store whose `get` waits for the key by polling.

    The agent gets the names and addresses of all members while it is made, and torch holds the interpreter's lock all
    that time: if one of them hangs just then, nothing else of this process would run, its heartbeat included.

    Args:
        store: what is asked.
        check: called now and then; raises to end the waiting.
        deadline_s: of time.monotonic.
    """

    def __init__(self, store: Store, check: Callable[[], None], deadline_s: float) -> None:
        super().__init__()
        self._inner, self._check, self._deadline_s = store, check, deadline_s

    def set(self, key: str, value: Any) -> None:  # bytes, when torch calls it
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._inner.compare_set(key, expected.decode(), desired.decode()))

    def get(self, key: str) -> bytes:
        pause_s = POLL_LEAST_S
        while not self._inner.check([key]):
            self._check()
            if time.monotonic() > self._deadline_s:
                raise ClusterUnavailable(f"{key} did not appear in time")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_MOST_S)
        return bytes(self._inner.get(key))
