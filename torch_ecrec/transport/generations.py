"""The data plane as a node sees it: calls to named processes, whose members change from one *generation* to the next.

Example: n0 to n3 are generation 1; n3 is killed and n4 started; all call `join(2, ["n0", "n1", "n2", "n4"], ...)`.
What n0 had under way in generation 1 ends as `Unknown` at once, and some milliseconds later n0 reaches n4.

Forming has rounds over the coordinator's store (`rendezvous.py`), all under the same deadline: all members have
*arrived*, and are of one build (until then the generation before goes on), each leaves it and opens the way into the
new one, all are *ready*.

Invariants.
- `done` of a call is called exactly once, whatever happens to the world: every call is in `_calls` until it is settled,
  and whoever takes it out settles it.
- Nothing is shut while a thread of ours sends through it (`_inside`). Answers to an ended generation are dropped.
- An exception in `handle` is answered as `Refused("internal: ...")` and handed to `on_error`; so is an answer that
  cannot be sent. What arrives and is no request is refused, what arrives and is no answer makes its call `Unknown`:
  both are complained of, and harm nobody.

How messages travel is left to the subclasses: `sockets.py`, and `rpc.py` for torch.distributed.rpc. Not done here:
retries, leases, the choice of members. A hung peer is noticed by the call's timeout only.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.build import own_build
from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.status import Connections
from torch_ecrec.protocol.wire import A, Answer, Failed, Malformed, Outcome, Refused, Request, Unknown
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.transport.complaints import Complaints
from torch_ecrec.transport.reachability import Tries
from torch_ecrec.transport.rendezvous import LEAST_TIMEOUT_S, Rendezvous, World, check_name, first_line, remaining

Handler = Callable[[Request[Any], Callable[[Answer], None]], None]
_Call = tuple[type[Request[Any]], Callable[[Outcome[Any]], None]]  # what was asked, and who waits for its end

log = logging.getLogger(__name__)


class Way(ABC):
    """How messages travel: what a subclass of `Transport` fills in. `_open` and `_shut` are never called at once."""

    def __init__(self) -> None:
        self._tries = Tries()  # a thread of the subclass looks at them, several times a second

    def unreachable(self) -> list[str]:
        """Members of other hosts that this one cannot reach though it tries, by name."""
        return self._tries.unreachable()

    @abstractmethod
    def connections(self) -> Connections:
        """Those that there are with other members."""

    @abstractmethod
    def _send(self, world: World, peer: str, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        """Sends a call, without blocking; later `_settle(ticket, ...)`.

        Raises:
            ConnectionError: certainly not sent.
            RuntimeError: something else went wrong.
        """

    @abstractmethod
    def _claim(self, store: tuple[str, int]) -> str:
        """Gets what this process needs for any world; returns what the other members must know of it.

        Raises:
            RuntimeError: this process cannot have it.
        """

    @abstractmethod
    def _open(self, world: World, shared: Store, said: Sequence[str], deadline_s: float) -> None:
        """All have arrived: opens the way to them. From now on calls may come.

        Args:
            shared: what members of this generation tell each other.
            said: what `_claim` returned to each member.
        """

    @abstractmethod
    def _shut(self) -> None:
        """Leaves the world that `_open` was last called for. Nothing where there is none; may be called again."""

    @abstractmethod
    def _end(self) -> None:
        """The transport is closed for good."""


class Transport(Way):
    """Calls to named processes of the current generation.

    Args:
        name: mine, among the members.
        handle: `handle(request, reply)` is called on a thread of the transport for each request; it calls
            `reply(answer)` exactly once, at any later time, from any thread.
        on_error: gets what `handle`, `done` or the sending of a message raised; logged if not given.
        vocabulary: the messages that are sent and understood.

    `join` and `close` wait for calls that are being sent: do not call them with a lock held that these need.
    """

    def __init__(
        self,
        name: str,
        handle: Handler,
        on_error: Callable[[BaseException], None] | None = None,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        super().__init__()
        check_name("name", name)
        self.name = name
        self._handle = handle
        self._on_error = on_error
        self.vocabulary = vocabulary
        self.build = own_build(vocabulary)
        self.complaints = Complaints(log, name)
        self._callback = threading.local()  # .runs: this thread is in `handle` or `done`
        self._joining = threading.Lock()  # held by the join or close under way; taken before _gate
        self._rendezvous = Rendezvous(name, self._check_wanted)  # under _joining
        self._gate, self._nobody_inside = _gate()  # guards all below; threads that send wake the second
        self._world: World | None = None  # where calls go; None between generations
        self._serving = 0  # the generation whose requests are handled and answered; set before its world is formed
        self._newest = 0  # the highest generation ever asked for; only grows
        self._wanted = 0  # the highest that is known of, asked for or told by `overtake`; only grows
        self._closed = False
        self._inside = 0  # threads that send
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._bytes_sent: Counter[str] = Counter()

    def on_forked(self) -> None:
        """In a forked child, which is in no world: closed."""
        self._joining, (self._gate, self._nobody_inside) = threading.Lock(), _gate()
        self._world, self._serving, self._inside, self._closed, self._calls = None, 0, 0, True, {}
        self._tries.close()

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
        """Bytes of tensors sent so far, before they are packed, by class name of the request or answer."""
        with self._gate:
            return dict(self._bytes_sent)

    # calls ------------------------------------------------------------------------------------------

    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None:
        """Sends a request; returns at once.

        Args:
            peer: a member's name.
            request: its tensors must not be changed until `done`.
            timeout_s: without an answer by then, the outcome is `Unknown`.
            done: called exactly once, on a thread of the transport or on this one, before or after this returns.
                `Failed`: certainly not handled. `Unknown`: time ran out, the peer died or the generation ended.

        Raises:
            TypeError: `request` is not a message of wire.py. Never raises for what happens on the network.
        """
        kind = type(request)
        try:
            encoded, size = self.vocabulary.encode(request)
        except ValueError as error:
            self._finish(done, self._unsent(kind, error))
            return
        with self._gate:
            world = self._world
            known = world is not None and peer in world.members
            if known:
                ticket = self._next_call
                self._next_call += 1
                self._calls[ticket] = kind, done
                self._bytes_sent[kind.__name__] += size
                self._inside += 1
        if world is None or not known:
            reason = "between generations" if world is None else f"{peer} is not in generation {world.generation}"
            self._finish(done, Failed(reason))
            return
        try:
            self._send(world, peer, ticket, encoded, max(timeout_s, LEAST_TIMEOUT_S))
        except (RuntimeError, ConnectionError) as error:
            failure = (Failed if isinstance(error, ConnectionError) else Unknown)(first_line(error))
            self._settle(ticket, lambda _: failure)
        except (ValueError, TypeError) as error:  # asking again would not help
            unsent = self._unsent(kind, error)
            self._settle(ticket, lambda _: unsent)
        finally:
            self._step_out()

    def _unsent(self, kind: type[Request[Any] | Answer], error: Exception) -> Failed:
        """A message that nobody could read."""
        told = ValueError(f"a {kind.__name__} cannot be sent: {first_line(error)}")
        told.__cause__ = error
        self._report(told)
        return Failed(str(told))

    def _settle(self, ticket: int, outcome: Callable[[type[Request[Any]]], Outcome[Any]]) -> None:
        """A call has ended; nothing if it had before. `outcome` is asked for while the world cannot be shut."""
        with self._gate:
            call = self._calls.pop(ticket, None)
            if call is None:
                return  # the generation has ended, and with it what owns the value
            kind, done = call
            self._inside += 1
        try:
            found = outcome(kind)
        except ValueError as error:
            self.complaints.add("an answer is none", error)
            found = Unknown(first_line(error))
        except (RuntimeError, TypeError) as error:
            found = Unknown(first_line(error))
        finally:
            self._step_out()
        self._finish(done, found)

    def _finish(self, done: Callable[[Outcome[A]], None], outcome: Outcome[A]) -> None:
        outer = self._enter_callback()
        try:
            done(outcome)
        except Exception as error:  # the seam: it would vanish in a thread of the transport
            self._report(error)
        finally:
            self._callback.runs = outer

    def _enter_callback(self) -> bool:
        """This thread runs a `handle` or `done`; returns whether it did before."""
        outer: bool = getattr(self._callback, "runs", False)
        self._callback.runs = True
        return outer

    # requests ---------------------------------------------------------------------------------------

    def _serve(self, generation: int, encoded: Encoded, way: Callable[[Encoded], None]) -> None:
        """A request has come; `way` takes the answer back. Never raises."""
        reply = Reply(self, generation, way)
        if generation != self._serving:
            reply(Refused(f"not in generation {generation}"))
            return
        try:
            request = self.vocabulary.decode_request(encoded)
        except ValueError as error:
            self.complaints.add("a request is none", error)
            reply(Malformed(f"not a request: {first_line(error)}"))
            return
        outer = self._enter_callback()
        try:
            self._handle(request, reply)
        except Exception as error:  # the seam: the caller gets a reason instead of waiting for its timeout
            reply.unless_replied(Refused(f"internal: {first_line(error)}"))
            self._report(error)
        finally:
            self._callback.runs = outer

    def _answer(self, generation: int, answer: Answer, way: Callable[[Encoded], None]) -> None:
        try:
            encoded, size = self.vocabulary.encode(answer)
        except (TypeError, ValueError) as error:
            self._report(error)
            answer = Refused(f"internal: {first_line(error)}")
            encoded, size = self.vocabulary.encode(answer)
        with self._gate:
            if generation != self._serving:
                return
            self._bytes_sent[type(answer).__name__] += size
            self._inside += 1
        try:
            way(encoded)
        except (ValueError, TypeError) as error:
            reason = self._unsent(type(answer), error).reason
            way(self.vocabulary.encode(Refused(f"internal: {reason}"))[0])
        finally:
            self._step_out()

    def _step_out(self) -> None:
        with self._gate:
            self._inside -= 1
            if not self._inside:
                self._nobody_inside.notify_all()

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
            RuntimeError: called from `handle` or `done`, or the subclass cannot be used in this process.
        """
        if getattr(self._callback, "runs", False):
            raise RuntimeError("`join` was called from `handle` or `done`, which it would wait for")
        world = World(generation, tuple(members))
        world.check(self.name)
        deadline_s = time.monotonic() + timeout_s
        with self._gate:
            if generation <= self._newest:
                raise ValueError(f"`generation` must be higher than {self._newest}, got {generation}")
            self._newest = generation
            self._wanted = max(self._wanted, generation)
        with self._joining:
            self._check_wanted(generation)
            mine = self._claim(store)
            left = False
            try:
                connection = self._rendezvous.connect(store, deadline_s)
                shared = PrefixStore(f"generation-{generation}", connection)
                said = self._rendezvous.arrive(shared, world, self.build, mine, deadline_s)
                self._leave()
                left = True
                connection.set_timeout(remaining(deadline_s))
                with self._gate:
                    self._serving = generation  # before anything is open: a peer may be ready sooner
                self._open(world, shared, said, deadline_s)
                self._rendezvous.meet(shared, "ready", world, "", deadline_s)
                self._rendezvous.keep(store, connection)
                with self._gate:
                    self._check_wanted(generation)
                    self._world = world
            except (RuntimeError, OSError) as error:  # time-outs and lost connections, of the store or on the way
                if left:
                    self._leave()
                if isinstance(error, ClusterUnavailable):
                    raise
                raise ClusterUnavailable(f"generation {generation} was not formed: {first_line(error)}") from error

    def overtake(self, generation: int) -> None:
        """Ends a join that waits for a lower generation: nobody forms that one any more."""
        with self._gate:
            self._wanted = max(self._wanted, generation)

    def close(self) -> None:
        """Leaves the cluster for good. Calls under way end as `Unknown`. May be called again.

        Called from `handle` or `done` it does not wait: the cluster is left soon after.
        """
        with self._gate:
            self._closed = True
        if getattr(self._callback, "runs", False):
            Worker(self.close, "close", self._report, daemon=False).start()  # waited for at the end
            return
        with self._joining:
            self._leave()
            self._rendezvous.close()
            self._end()
            self._tries.close()

    def _check_wanted(self, generation: int) -> None:
        if self._closed:
            raise ClusterUnavailable("the transport was closed")
        if generation < self._wanted:
            raise ClusterUnavailable(f"generation {generation} was overtaken by {self._wanted}")

    def _leave(self) -> None:
        with self._gate:
            world, self._world = self._world, None
            self._serving = 0
            calls, self._calls = self._calls, {}
        reason = Unknown("the generation ended" if world is None else f"generation {world.generation} ended")
        for _, done in calls.values():
            self._finish(done, reason)
        with self._gate:
            self._nobody_inside.wait_for(lambda: not self._inside)
        self._shut()


def _gate() -> tuple[threading.RLock, threading.Condition]:
    """A lock, and who waits with it: taken for each message, and to take a condition itself costs twice as much."""
    lock = threading.RLock()
    return lock, threading.Condition(lock)


class Reply:
    """The way back to one caller. Calling it twice raises RuntimeError."""

    def __init__(self, transport: Transport, generation: int, way: Callable[[Encoded], None]) -> None:
        self._transport, self._generation = transport, generation
        self._lock = threading.Lock()
        self._way: Callable[[Encoded], None] | None = way  # None once replied

    def __call__(self, answer: Answer) -> None:
        if not self.unless_replied(answer):
            raise RuntimeError(f"`reply` was called twice, the second time with {type(answer).__name__}")

    def unless_replied(self, answer: Answer) -> bool:
        with self._lock:
            way, self._way = self._way, None
        if way is None:
            return False
        self._transport._answer(self._generation, answer, way)
        return True
