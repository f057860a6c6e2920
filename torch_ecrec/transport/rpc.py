"""The data plane over torch.distributed.rpc, in generations. The only module that imports torch.distributed.rpc.

An RPC world of torch is static: nobody can be replaced in it. So the world is formed anew, as a *generation*, whenever
its members change, and the processes that stay live through it. Example: n0 to n3 are generation 1; n3 is killed and n4
started; everyone calls `join(2, ["n0", "n1", "n2", "n4"], ...)`. What n0 had under way in generation 1 ends as
`Unknown` at once, and 0.1 s later n0 reaches n4. A world is known to torch by names that carry the generation
("n0:2"), so that nothing of an old world can be taken for the new one.

Forming has three rounds over the coordinator's store, each under the same deadline: all members *arrived* (nothing
of torch's blocks before that), agents *started* and exchanged addresses, all *ready*. torch's own way (`init_rpc`)
goes through a gloo group and RPCs that wait without a limit when a member dies; it is not used, and neither is the
default process group of the program.

Invariants.
- `done` of a call is called exactly once, whatever happens to the world: every call is in `_calls` until it is settled,
  and whoever takes it out settles it.
- No agent is shut down while a thread of ours is inside it (`_inside`). Answers to an ended generation are dropped.
- An exception in `handle` is answered as `Refused("internal: ...")` and handed to `on_error`.

On the wire a message is (class name, field values); torch's pickler takes the tensors out of it and moves them without
a copy where it can. Only classes of `wire` are ever built from what arrives.

Not done here: retries, leases, the choice of members. A hung peer is noticed by the call's timeout only.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.autograd import _init as init_autograd  # type: ignore[attr-defined]
from torch.distributed.rpc import (  # type: ignore[attr-defined]
    TensorPipeAgent,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    _is_current_rpc_agent_set,
    _set_and_start_rpc_agent,
    functions,
    rpc_async,
    shutdown,
)
from torch.futures import Future

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.transport import wire
from torch_ecrec.transport.wire import Answer, Failed, Ok, Outcome, Refused, Request, Unknown

Handler = Callable[[Request, Callable[[Answer], None]], None]
Encoded = tuple[str, tuple[Any, ...]]

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")  # torch allows 128 characters, and the generation is added
LEAST_TIMEOUT_S = 0.001  # 0 would mean "no limit" to torch
POLL_LEAST_S, POLL_MOST_S = 0.002, 0.02
# What is sent goes through the socket. On one host torch prefers that the receiver reads the sender's memory ("cma"):
# a sender that leaves a generation frees it, and the receiver then reads something else, and says nothing (measured).
CHANNELS = ["basic"]
TRANSPORTS = ["uv"]  # sockets. torch's choice on one host is "shm", whose thread polls: a full core per idle process
SPARE_STORAGE = 1.25  # torch sends a tensor's whole storage: beyond this factor a copy is cheaper

# messages -> plain values ---------------------------------------------------------------------------


def _wire_classes(base: type) -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(wire).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == wire.__name__
    }


REQUESTS = _wire_classes(Request)
ANSWERS = _wire_classes(Answer)
_FIELDS = {
    name: tuple(field.name for field in dataclasses.fields(cls)) for name, cls in {**REQUESTS, **ANSWERS}.items()
}


def _compact(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu().contiguous()
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() > SPARE_STORAGE * tensor.nbytes:
        return tensor.clone()
    return tensor


def _plain(value: Any) -> tuple[Any, int]:
    """`value` as plain data with compact tensors, and the number of bytes in its tensors."""
    if value is None or isinstance(value, (int, float, str)):
        return value, 0
    if isinstance(value, Tensor):
        tensor = _compact(value)
        return tensor, tensor.nbytes
    if isinstance(value, (list, tuple)):
        pairs = [_plain(item) for item in value]
        return [item for item, _ in pairs], sum(size for _, size in pairs)
    if isinstance(value, dict):
        pairs = [_plain(item) for item in value.values()]
        return dict(zip(value, (item for item, _ in pairs), strict=True)), sum(size for _, size in pairs)
    raise TypeError(f"a message holds plain values and tensors, got {type(value).__name__}")


def encode(message: Request | Answer) -> tuple[Encoded, int]:
    """A message as (class name, field values), and the number of bytes in its tensors.

    Tensors are shared with the message, not copied, unless they are strided or a small part of their storage: leave
    them unchanged until the call has ended.
    """
    kind = type(message).__name__
    if REQUESTS.get(kind, ANSWERS.get(kind)) is not type(message):
        raise TypeError(f"`message` must be of a class in wire.py, got {kind}")
    values: list[Any] = []
    total = 0
    for name in _FIELDS[kind]:
        value = getattr(message, name)
        if type(value) is not int:  # most fields are
            value, size = _plain(value)
            total += size
        values.append(value)
    return (kind, tuple(values)), total


def decode(encoded: Encoded, classes: dict[str, type]) -> Any:
    """The message that was encoded. Raises ValueError if it is none of `classes`."""
    kind, values = encoded
    cls = classes.get(kind)
    if cls is None:
        raise ValueError(f"unknown message {kind!r}; the processes run different versions")
    return cls(**dict(zip(_FIELDS[kind], values, strict=True)))


# the callee's side ----------------------------------------------------------------------------------

_active: RpcTransport | None = None  # set by the first join of a transport, cleared by its close
_prepared = False  # what `_prepare_process` does is done once per process


def _prepare_process() -> None:
    global _prepared
    if not _prepared:
        _prepared = True
        init_autograd(0)  # torch's agent insists, though distributed autograd is not used here
        atexit.register(_close_active)


def _close_active() -> None:
    # An agent that still runs when the interpreter ends aborts the process.
    if _active is not None:
        _active.close()


@functions.async_execution  # type: ignore[untyped-decorator]
def _serve(generation: int, encoded: Encoded) -> Future[Encoded]:
    """Entry point of every call, on a thread of the callee's agent. Never raises."""
    future: Future[Encoded] = Future()
    transport = _active
    if transport is None:
        future.set_result(encode(Refused("left the cluster"))[0])
    else:
        transport._serve(generation, encoded, future)
    return future


@dataclass(frozen=True)
class World:
    """A generation as torch knows it."""

    generation: int
    members: tuple[str, ...]
    workers: dict[str, WorkerInfo]


def torch_name(member: str, generation: int) -> str:
    """What a member is called in torch's world of `generation`."""
    return f"{member}:{generation}"


class RpcTransport:
    """Calls to named processes of the current generation. One per process is active at a time.

    Args:
        name: mine, among the members.
        handle: `handle(request, reply)` is called on an RPC thread for each request; it calls `reply(answer)` exactly
            once, at any later time, from any thread.
        threads: RPC threads. They run `handle` and most `done`s, so neither should block for long.
        on_error: gets what `handle`, `done` or the encoding of an answer raised; logged if not given.

    `join` and `close` wait for handlers and `done`s that run: do not call them with a lock held that these need.
    """

    def __init__(
        self,
        name: str,
        handle: Handler,
        threads: int = 8,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"`name` must be 1 to 100 letters, digits, '_' or '-', got {name!r}")
        if threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}")
        self.name = name
        self._handle = handle
        self._threads = threads
        self._on_error = on_error
        self._callback = threading.local()  # .runs: this thread is in `handle` or `done`
        self._joining = threading.Lock()  # held by the join or close under way; taken before _gate
        self._polling: Store | None = None  # of the agent, which may ask it as long as it lives
        self._store: tuple[tuple[str, int], TCPStore | None] = (("", 0), None)  # kept between joins; under _joining
        self._gate = threading.Condition()  # guards all below
        self._world: World | None = None  # where calls go; None between generations
        self._serving = 0  # the generation whose requests are handled and answered; set before its world is formed
        self._newest = 0  # the highest generation ever asked for; only grows
        self._wanted = 0  # the highest that is known of, asked for or told by `overtake`; only grows
        self._closed = False
        self._inside = 0  # threads inside the agent
        self._calls: dict[int, Callable[[Outcome], None]] = {}
        self._next_call = 0
        self._bytes_sent: dict[str, int] = {}

    @property
    def newest(self) -> int:
        """The highest generation ever asked for: the next must be higher."""
        return self._newest

    @property
    def generation(self) -> int:
        """The generation joined; 0 between generations."""
        world = self._world
        return 0 if world is None else world.generation

    @property
    def members(self) -> tuple[str, ...]:
        """Who is in the generation joined, by rank; nobody between generations."""
        world = self._world
        return () if world is None else world.members

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes of tensors sent so far, by class name of the request or answer."""
        with self._gate:
            return dict(self._bytes_sent)

    # calls ------------------------------------------------------------------------------------------

    def call(self, peer: str, request: Request, timeout_s: float, done: Callable[[Outcome], None]) -> None:
        """Sends a request; returns at once.

        Args:
            peer: a member's name.
            request: its tensors must not be changed until `done`.
            timeout_s: without an answer by then, the outcome is `Unknown`.
            done: called exactly once, on an RPC thread or on this one, before or after this returns. `Failed`:
                certainly not handled. `Unknown`: time ran out, the peer died or the generation ended.

        Raises:
            TypeError: `request` is not a message of wire.py. Never raises for what happens on the network.
        """
        encoded, size = encode(request)
        with self._gate:
            world = self._world
            worker = None if world is None else world.workers.get(peer)
            if worker is not None:
                ticket = self._next_call
                self._next_call += 1
                self._calls[ticket] = done
                self._count(encoded[0], size)
                self._inside += 1
        if world is None or worker is None:
            reason = "between generations" if world is None else f"{peer} is not in generation {world.generation}"
            self._finish(done, Failed(reason))
            return
        try:
            future = rpc_async(
                worker, _serve, args=(world.generation, encoded), timeout=max(timeout_s, LEAST_TIMEOUT_S)
            )
        except RuntimeError as error:
            with self._gate:
                unsettled = self._calls.pop(ticket, None)
            if unsettled is not None:
                self._finish(unsettled, Unknown(_first_line(error)))
            return
        finally:
            self._step_out()
        future.add_done_callback(lambda ended: self._on_answer(ticket, ended))

    def _on_answer(self, ticket: int, future: Future[Encoded]) -> None:
        with self._gate:
            done = self._calls.pop(ticket, None)
            if done is None:
                return  # the generation has ended, and with it the agent that owns the value
            self._inside += 1
        outcome: Outcome
        try:
            outcome = Ok(decode(future.value(), ANSWERS))
        except (RuntimeError, ValueError, TypeError) as error:
            outcome = Unknown(_first_line(error))
        finally:
            self._step_out()
        self._finish(done, outcome)

    def _finish(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        with self._in_callback():
            try:
                done(outcome)
            except Exception as error:  # the seam: it would vanish in torch's thread
                self._report(error)

    @contextlib.contextmanager
    def _in_callback(self) -> Iterator[None]:
        outer = getattr(self._callback, "runs", False)
        self._callback.runs = True
        try:
            yield
        finally:
            self._callback.runs = outer

    # requests ---------------------------------------------------------------------------------------

    def _serve(self, generation: int, encoded: Encoded, future: Future[Encoded]) -> None:
        reply = Reply(self, generation, future)
        if generation != self._serving:
            reply(Refused(f"not in generation {generation}"))
            return
        with self._in_callback():
            try:
                self._handle(decode(encoded, REQUESTS), reply)
            except Exception as error:  # the seam: the caller gets a reason instead of waiting for its timeout
                reply.unless_replied(Refused(f"internal: {_first_line(error)}"))
                self._report(error)

    def _answer(self, generation: int, answer: Answer, future: Future[Encoded]) -> None:
        try:
            encoded, size = encode(answer)
        except TypeError as error:
            self._report(error)
            encoded, size = encode(Refused(f"internal: {_first_line(error)}"))
        with self._gate:
            if generation != self._serving:
                return
            self._count(encoded[0], size)
            self._inside += 1
        try:
            future.set_result(encoded)
        finally:
            self._step_out()

    def _count(self, kind: str, size: int) -> None:
        self._bytes_sent[kind] = self._bytes_sent.get(kind, 0) + size

    def _step_out(self) -> None:
        with self._gate:
            self._inside -= 1
            if not self._inside:
                self._gate.notify_all()

    def _report(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error(error)
        else:
            log.error("%s: %r", self.name, error, exc_info=error)

    # generations ------------------------------------------------------------------------------------

    def join(self, generation: int, members: Sequence[str], store: tuple[str, int], timeout_s: float) -> None:
        """Forms `generation` together with the other members. Blocks.

        The generation joined before, if any, goes on until all members have arrived, and for good if they do not. A
        join with a higher generation, `overtake` or `close` on another thread ends one that is still waiting.

        Args:
            generation: higher than any before.
            members: all names, mine included, in the same order on every member: a member's index is its rank.
            store: host and port of the coordinator's TCPStore.
            timeout_s: for all of it.

        Raises:
            ClusterUnavailable: not formed within `timeout_s`, or overtaken. Join a higher generation next.
            ValueError: `generation` or `members` cannot be.
            RuntimeError: called from `handle` or `done`, or torch RPC of this process is in other hands.
        """
        if getattr(self._callback, "runs", False):
            raise RuntimeError("`join` was called from `handle` or `done`, which it would wait for")
        world = World(generation, tuple(members), {})
        if self.name not in world.members or len(set(world.members)) != len(world.members):
            raise ValueError(f"`members` must be different names, {self.name} among them, got {list(members)}")
        for member in world.members:
            if not NAME.fullmatch(member):
                raise ValueError(f"`members` must be 1 to 100 letters, digits, '_' or '-', got {member!r}")
        deadline_s = time.monotonic() + timeout_s
        with self._gate:
            if generation <= self._newest:
                raise ValueError(f"`generation` must be higher than {self._newest}, got {generation}")
            self._newest = generation
            self._wanted = max(self._wanted, generation)
        with self._joining:
            self._check_wanted(generation)
            self._claim()
            left = False
            try:
                connection = self._arrive(world, store, deadline_s)  # until all have, the present world serves
                self._leave()
                left = True
                self._form(world, store, connection, deadline_s)
            except RuntimeError as error:  # what the store and the agent raise for time-outs and lost connections
                if left:
                    self._leave()
                if isinstance(error, ClusterUnavailable):
                    raise
                raise ClusterUnavailable(f"generation {generation} was not formed: {_first_line(error)}") from error

    def overtake(self, generation: int) -> None:
        """Ends a join that waits for a lower generation: nobody forms that one any more."""
        with self._gate:
            self._wanted = max(self._wanted, generation)

    def close(self) -> None:
        """Leaves the cluster for good. Calls under way end as `Unknown`. May be called again.

        Called from `handle` or `done` it does not wait: the cluster is left soon after.
        """
        global _active
        with self._gate:
            self._closed = True
        if getattr(self._callback, "runs", False):
            threading.Thread(target=self.close, name="rpc-close").start()
            return
        with self._joining:
            self._leave()
            self._store = (("", 0), None)
            if _active is self:
                _active = None

    def _claim(self) -> None:
        global _active
        if _active is None and not _is_current_rpc_agent_set():
            _active = self
        if _active is not self:
            raise RuntimeError("torch.distributed.rpc is in use in this process already")

    def _check_wanted(self, generation: int) -> None:
        if self._closed:
            raise ClusterUnavailable("the transport was closed")
        if generation < self._wanted:
            raise ClusterUnavailable(f"generation {generation} was overtaken by {self._wanted}")

    def _arrive(self, world: World, store: tuple[str, int], deadline_s: float) -> TCPStore:
        """Returns when all members are at the store."""
        connection = self._connect(store, deadline_s)
        self._meet(PrefixStore(f"generation-{world.generation}", connection), "arrived", world, deadline_s)
        return connection

    def _form(self, world: World, store: tuple[str, int], connection: TCPStore, deadline_s: float) -> None:
        generation, rank = world.generation, world.members.index(self.name)
        shared = PrefixStore(f"generation-{generation}", connection)
        connection.set_timeout(_remaining(deadline_s))
        _prepare_process()
        options = TensorPipeRpcBackendOptions(
            num_worker_threads=self._threads, _transports=TRANSPORTS, _channels=CHANNELS
        )
        self._polling = _PollingStore(shared, lambda: self._check_wanted(generation), deadline_s)
        name = torch_name(self.name, generation)
        agent = TensorPipeAgent(self._polling, name, rank, len(world.members), options, {}, [])
        with self._gate:
            self._serving = generation  # before the agent listens: a peer may be ready sooner
        _set_and_start_rpc_agent(agent)
        for member in world.members:
            world.workers[member] = agent.get_worker_info(torch_name(member, generation))
        self._meet(shared, "ready", world, deadline_s)
        self._store = (store, connection)
        with self._gate:
            self._check_wanted(generation)
            self._world = world

    def _connect(self, store: tuple[str, int], deadline_s: float) -> TCPStore:
        """The connection to the store, the one of the generation before if it still holds.

        torch looks up the name of the store's host, backwards, for every connection it makes: seconds where no name
        server answers.
        """
        address, connection = self._store
        self._store = (store, None)  # until it has served once more
        if connection is not None and address == store:
            connection.set_timeout(_remaining(deadline_s))
            with contextlib.suppress(RuntimeError):
                connection.check(["alive"])
                return connection
        return TCPStore(*store, is_master=False, wait_for_workers=False, timeout=_remaining(deadline_s))

    def _meet(self, shared: Store, place: str, world: World, deadline_s: float) -> None:
        """Returns when all members have come to `place`: the first waits for all of them, the others for its word.

        Polls, since torch's own waiting is neither quiet nor interruptible.
        """
        members = ",".join(world.members)
        shared.set(f"{place}/{self.name}", members)
        leading = self.name == world.members[0]
        awaited = [f"{place}/{member}" for member in world.members] if leading else [f"{place}:all"]
        pause_s = POLL_LEAST_S
        while awaited:
            self._check_wanted(world.generation)
            if shared.check(awaited[-1:]):
                awaited.pop()
            elif time.monotonic() > deadline_s:
                missing = [member for member in world.members if not shared.check([f"{place}/{member}"])]
                raise ClusterUnavailable(
                    f"generation {world.generation}: not {place} in time: {', '.join(missing) or world.members[0]}"
                )
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, POLL_MOST_S)
        if leading:
            shared.set(f"{place}:all", members)
        elif shared.get(f"{place}:all").decode() != members:
            raise ClusterUnavailable(f"generation {world.generation}: members disagree about who is in it")

    def _leave(self) -> None:
        with self._gate:
            world, self._world = self._world, None
            self._serving = 0
            calls, self._calls = self._calls, {}
        reason = Unknown("the generation ended" if world is None else f"generation {world.generation} ended")
        for done in calls.values():
            self._finish(done, reason)
        with self._gate:
            self._gate.wait_for(lambda: not self._inside)
        if _active is self and _is_current_rpc_agent_set():
            shutdown(graceful=False)


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


class Reply:
    """The way back to one caller. Calling it twice raises RuntimeError."""

    def __init__(self, transport: RpcTransport, generation: int, future: Future[Encoded]) -> None:
        self._transport, self._generation = transport, generation
        self._lock = threading.Lock()
        self._future: Future[Encoded] | None = future  # None once replied

    def __call__(self, answer: Answer) -> None:
        if not self.unless_replied(answer):
            raise RuntimeError(f"`reply` was called twice, the second time with {type(answer).__name__}")

    def unless_replied(self, answer: Answer) -> bool:
        with self._lock:
            future, self._future = self._future, None
        if future is None:
            return False
        self._transport._answer(self._generation, answer, future)
        return True


def _remaining(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(deadline_s - time.monotonic(), LEAST_TIMEOUT_S))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
