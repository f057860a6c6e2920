"""The data plane over torch.distributed.rpc. The only module that imports it, beside `compat/rpc.py`.

An RPC world of torch is static: nobody can be replaced in it. So each roster is a world of its own, a *generation*, and
the processes live through it. A world is known to torch by names that carry the generation ("n0:2-0"), so that nothing
of an old world can be taken for the new one. torch's own way to form one (`init_rpc`) goes through a gloo group, and
RPCs that wait without a limit when a member dies; it is not used, and neither is the program's default process group.

Forming has rounds over a store of a member that all can reach (`rendezvous.py`): all are *there* (until then the world
before goes on, and nothing has a limit: who does not come is given up by the coordinator, and there is another roster),
each leaves it and opens the way into the new one, all are *ready*. Where one of them cannot, all try again. A newer
roster ends all of it.

Nothing is shut while a thread of ours sends through it (`_inside`). Answers to a world that has ended are dropped.

What is sent is a message's bytes and its tensors (`encoding.py`); torch moves the tensors without a copy where it can.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
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
from torch_ecrec.protocol.wire import Ok, Outcome, Refused, Unknown
from torch_ecrec.runtime.addresses import interface_of, is_loopback
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.settings import insecure_rpc, set_unless_set
from torch_ecrec.transport.calls import Call, Handler, Transport, first_line
from torch_ecrec.transport.reachability import open_sockets, refusing
from torch_ecrec.transport.rendezvous import GOES_ON, POLL_LEAST_S, POLL_MOST_S, gather, meet, own_store, store_of

log = logging.getLogger(__name__)

# What is sent goes through the socket. On one host torch prefers that the receiver reads the sender's memory ("cma"):
# a sender that leaves a generation frees it, and the receiver then reads something else, and says nothing (measured).
CHANNELS = ["basic"]
SPARE_STORAGE = 1.25  # of a tensor its whole storage is sent: beyond this factor a copy is cheaper
TRANSPORTS = ["uv"]  # sockets. torch's choice on one host is "shm", whose thread polls: a full core per idle process
INTERFACE = "TP_SOCKET_IFNAME"  # whose address an agent takes
LOOK_S = 0.1  # how often tries to reach other hosts are looked at
END_S = 5.0  # for the threads
FORMING_S = 20.0  # for all to be ready, once all have arrived
AGAIN_S, AGAIN_MOST_S = 0.1, 2.0  # before another try
TROUBLE = "trouble"  # where a member says why it cannot open a world

# the callee's side ----------------------------------------------------------------------------------

_active: RpcTransport | None = None  # set by a transport's construction, cleared by its close
_prepared = False  # what `_prepare_process` does is done once per process


def _prepare_process() -> None:
    global _prepared
    if not _prepared:
        _prepared = True
        init_autograd(0)  # torch's agent insists, though distributed autograd is not used here
        atexit.register(_close_active)


def _listen_at(host: str) -> None:
    """Makes torch's agent listen at `host`. By default it takes the address of the host's name, perhaps a loopback one.

    Torch reads the setting once in a process, when it makes its first agent. For an IPv6 address nothing is set.
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
    """Returns a message in which each tensor that is a small part of its storage is copied."""

    def compact(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().nbytes() > SPARE_STORAGE * tensor.nbytes else tensor

    body, tensors = encoded
    return body, [compact(tensor) for tensor in tensors]


@functions.async_execution  # type: ignore[untyped-decorator]
def _serve(generation: str, encoded: Encoded) -> Future[Encoded]:
    """Handles every call; runs on a thread of the callee's agent. Never raises."""
    future: Future[Encoded] = Future()
    transport = _active
    if transport is None:
        future.set_result(WIRE.encode(Refused("left the cluster"))[0])
    else:
        transport.serve(generation, encoded, lambda answer: future.set_result(_compact(answer)))
    return future


# the transport --------------------------------------------------------------------------------------


class _Overtaken(Exception):
    """A newer roster has come, or the transport was closed."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a member, as text `HOST PORT PORT`: where others try to reach it, and the port of its store.

    A world's members meet at the store of one of them.
    """

    host: str
    port: int
    store_port: int

    @staticmethod
    def parse(text: str) -> Endpoint:
        """Parses an endpoint. Raises ValueError if it is malformed."""
        host, *ports = text.split(" ")
        if not host or len(ports) != 2 or not all(port.isdigit() and 0 < int(port) < 65536 for port in ports):
            raise ValueError(f"an endpoint of torch.distributed.rpc is HOST PORT PORT, got {text!r}")
        return Endpoint(host, int(ports[0]), int(ports[1]))

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.store_port}"


@dataclass(frozen=True)
class _World:
    """An open world of torch.distributed.rpc. `generation`: the roster's version, and the number of tries before."""

    generation: str
    workers: Mapping[str, WorkerInfo]


def torch_name(member: str, generation: str) -> str:
    """Returns the name of a member in torch's world of `generation`."""
    return f"{member}:{generation}"


class RpcTransport(Transport):
    """The `Transport` over torch.distributed.rpc. Only one is open in a process at a time.

    Args:
        threads: RPC threads. They run `handle` and most `done`s, so neither should block for long.

    Raises:
        RuntimeError: torch.distributed.rpc is in use in this process already.
    """

    def __init__(
        self,
        name: str,
        handle: Handler,
        host: str,
        on_error: Callable[[BaseException], None] | None = None,
        threads: int = 8,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        global _active
        super().__init__(name, handle, host, on_error, vocabulary)
        if threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}")
        if not is_loopback(host) and not insecure_rpc():
            raise ClusterUnavailable(
                f"torch.distributed.rpc runs what it is sent by whoever reaches {host}, which other hosts do:"
                " TORCH_ECREC_TRANSPORT=sockets does not; or allow it for all processes by --insecure-rpc or"
                " TORCH_ECREC_INSECURE_RPC=1, on a network that you trust"
            )
        if _active is not None or is_agent_set():
            raise RuntimeError("torch.distributed.rpc is in use in this process already")
        try:
            _listen_at(host)
            self._refusing = refusing(host)  # an agent that is tried at its own port hears nobody from then on
            self._store, store_port = own_store(host)
        except OSError as error:
            raise ClusterUnavailable(f"cannot listen for other members at {host}: {error}") from error
        _active = self
        _prepare_process()
        self._own = Endpoint(host, self._refusing.getsockname()[1], store_port)
        self.endpoint = str(self._own)
        self._stores: dict[Endpoint, TCPStore] = {}  # of others; torch looks up their names for each connection
        self._rpc_threads = threads
        self._polling: Store | None = None  # of the agent, which may ask it as long as it lives
        self._gate, self._changed = _gate()  # guards all below; threads that send or form wake the second
        self._roster: tuple[int, dict[str, Endpoint]] = (0, {})
        self._world: _World | None = None  # where calls go; None between generations
        self._serving = ""  # the generation whose requests are handled and answered; set before its world is formed
        self._closed = False
        self._inside = 0  # threads that send
        self._calls: dict[int, Call] = {}
        self._next = 0  # ticket
        self._sent: Counter[str] = Counter()
        self._ended = threading.Event()
        belongs_here(self)
        self._workers = [Worker(self._look, "tries", self._report), Worker(self._form_all, "worlds", self._report)]
        for worker in self._workers:
            worker.start()

    def on_forked(self) -> None:
        """Marks the transport as closed in a forked child, which is in no world."""
        global _active
        self._gate, self._changed = _gate()
        self._world, self._serving, self._inside, self._closed, self._calls = None, "", 0, True, {}
        self._tries.close()
        atexit.unregister(_close_active)  # the agent's threads are the parent's
        _active = None

    def connections(self) -> Connections:
        world = self._world
        return Connections(rpc=0 if world is None else len(world.workers) - 1)  # torch's own affair

    @property
    def bytes_sent(self) -> dict[str, int]:
        with self._gate:
            return dict(self._sent)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._tries.look(open_sockets(), time.monotonic(), in_doubt=True)

    # calls ------------------------------------------------------------------------------------------

    def _send(self, peer: str, call: Call, encoded: Encoded, size: int, timeout_s: float) -> None:
        with self._gate:
            world = self._world
            if world is None or peer not in world.workers:
                raise ConnectionError(f"{peer} is in no world with this one yet, or not any more")
            ticket, self._next = self._next, self._next + 1
            self._calls[ticket] = call
            self._sent[call.kind.__name__] += size
            self._inside += 1
        try:
            worker, args = world.workers[peer], (world.generation, _compact(encoded))
            future = rpc_async(worker, _serve, args=args, timeout=timeout_s)
            future.add_done_callback(lambda ended: self._on_ended(ticket, ended))
        except (RuntimeError, ConnectionError) as error:
            self._settle(ticket, Unknown(first_line(error)))
        finally:
            self._step_out()

    def _on_ended(self, ticket: int, ended: Future[Encoded]) -> None:
        """Called by torch, on a thread of its own, when a call has ended."""
        with self._gate:
            if (call := self._calls.pop(ticket, None)) is None:
                return  # the generation has ended, and with it what owns the value
            self._inside += 1
        outcome: Outcome[Any]
        try:
            outcome = Ok(self.vocabulary.decode_answer(ended.value(), call.kind))
        except ValueError as error:
            self.complaints.add("an answer is none", error)
            outcome = Unknown(first_line(error))
        except (RuntimeError, TypeError) as error:
            outcome = Unknown(first_line(error))
        finally:
            self._step_out()
        self._finish(call.done, outcome)

    def _settle(self, ticket: int, outcome: Unknown) -> None:
        with self._gate:
            call = self._calls.pop(ticket, None)
        if call is not None:
            self._finish(call.done, outcome)

    def serve(self, generation: str, encoded: Encoded, way: Callable[[Encoded], None]) -> None:
        """Handles a request; `way` takes the answer back. Never raises."""

        def back(answer: Encoded, kind: str, size: int) -> None:
            with self._gate:
                if generation != self._serving:
                    return
                self._sent[kind] += size
                self._inside += 1
            try:
                way(answer)
            finally:
                self._step_out()

        if generation != self._serving:
            way(self.vocabulary.encode(Refused(f"not in generation {generation}"))[0])
            return
        self._serve(encoded, back)

    def _step_out(self) -> None:
        with self._gate:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    # worlds -----------------------------------------------------------------------------------------

    def follow(self, version: int, endpoints: Mapping[str, str]) -> None:
        parsed = {name: Endpoint.parse(text) for name, text in endpoints.items()}
        with self._gate:
            if version <= self._roster[0] or self._closed:
                return
            self._roster = version, parsed
            self._changed.notify_all()
        self._tries.follow({name: (one.host, one.port) for name, one in parsed.items()}, self._own.host)

    def _form_all(self) -> None:
        """Forms the world of each roster, or of the newest if several have come. Runs on a thread of its own."""
        formed = 0
        while True:
            with self._gate:
                while self._roster[0] == formed and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                formed, members = self._roster
            try:
                self._form(formed, members)
            except _Overtaken:
                if self._world is None:  # what was opened halfway
                    self._leave()

    def _check(self, version: int) -> None:
        if self._closed or self._roster[0] != version:
            raise _Overtaken

    def _form(self, version: int, members: Mapping[str, Endpoint]) -> None:
        names, attempt, at = list(members), 0, ""
        check = lambda: self._check(version)  # noqa: E731
        while True:
            check()
            generation = f"{version}-{attempt}"
            at, shared = self._gather(generation, members, at or names[0], check)
            self._leave()
            world, trouble = self._open(generation, names, shared, check)
            if trouble:
                self._give_up(shared, trouble)
            verdict = self._ready(shared, names, trouble, check)
            if verdict == GOES_ON and world is not None:
                with self._gate:
                    check()
                    self._world = world
                return
            log.warning("%s: generation %s was not formed: %s", self.name, generation, verdict)
            self._leave()
            self._ended.wait(min(AGAIN_S * 2**attempt, AGAIN_MOST_S))
            attempt += 1

    def _gather(
        self, generation: str, members: Mapping[str, Endpoint], first: str, check: Callable[[], None]
    ) -> tuple[str, Store]:
        """Waits until all members are at one store; returns whose it is, and what is of this generation in it."""

        def store_at(member: str) -> Store:
            endpoint = members[member]
            if endpoint != self._own and endpoint not in self._stores:
                self._stores[endpoint] = store_of(endpoint.host, endpoint.store_port)
            store = self._store if endpoint == self._own else self._stores[endpoint]
            return PrefixStore(f"generation-{generation}", store)

        def lost(member: str, error: Exception) -> None:  # perhaps it is gone
            log.warning("%s: generation %s is not formed yet: %s", self.name, generation, first_line(error))
            self._stores.pop(members[member], None)
            self._ended.wait(AGAIN_S)

        return gather(self.name, list(members), first, store_at, lost, check)

    def _give_up(self, shared: Store, trouble: str) -> None:
        """Tells the members that open the same world that this one cannot, so that none waits for it."""
        try:
            shared.set(TROUBLE, trouble)
        except (RuntimeError, OSError) as error:  # the others wait for `FORMING_S`
            log.warning("%s: the others cannot be told: %s", self.name, first_line(error))

    def _ready(self, shared: Store, names: list[str], trouble: str, check: Callable[[], None]) -> str:
        """Says that this member is ready, or why not, and returns the verdict that all members get.

        A member that has said it is ready stays so until it knows the verdict.
        """
        while True:
            try:
                return meet(shared, "ready", self.name, names, trouble, check, FORMING_S)
            except (RuntimeError, OSError) as error:
                log.warning("%s: the store at which all meet cannot be reached: %s", self.name, first_line(error))
                self._ended.wait(AGAIN_S)
                check()

    def _open(
        self, generation: str, names: list[str], shared: Store, check: Callable[[], None]
    ) -> tuple[_World | None, str]:
        """Opens a world: from now on calls may come. Returns it, or why it cannot be opened."""
        with self._gate:
            self._serving = generation  # before anything is open: a peer may be ready sooner
        options = TensorPipeRpcBackendOptions(
            num_worker_threads=self._rpc_threads, _transports=TRANSPORTS, _channels=CHANNELS
        )

        def go_on() -> None:
            check()
            if shared.check([TROUBLE]):
                raise ClusterUnavailable(f"another member cannot open it: {shared.get(TROUBLE).decode()}")

        self._polling = _PollingStore(shared, go_on, time.monotonic() + FORMING_S)
        try:
            mine = torch_name(self.name, generation)
            agent = TensorPipeAgent(self._polling, mine, names.index(self.name), len(names), options, {}, [])
            start_agent(agent)
            workers = {name: agent.get_worker_info(torch_name(name, generation)) for name in names}
        except (RuntimeError, OSError, _Overtaken) as error:
            return None, first_line(error) or "overtaken"
        return _World(generation, workers), GOES_ON

    def _leave(self) -> None:
        """Leaves the present world. Calls under way end as `Unknown`."""
        with self._gate:
            self._world, self._serving = None, ""
            calls, self._calls = self._calls, {}
        for call in calls.values():
            self._finish(call.done, Unknown("the generation ended"))
        with self._gate:
            self._changed.wait_for(lambda: not self._inside)
        if is_agent_set():
            shutdown(graceful=False)

    # the end ----------------------------------------------------------------------------------------

    def _close(self) -> None:
        global _active
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._ended.set()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join(LOOK_S + END_S)
        if _active is self:
            self._leave()
            _active = None
        self._refusing.close()
        self._tries.close()


def _gate() -> tuple[threading.RLock, threading.Condition]:
    """Returns a lock and a condition over it. Messages take the lock: taking the condition costs twice as much."""
    lock = threading.RLock()
    return lock, threading.Condition(lock)


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
