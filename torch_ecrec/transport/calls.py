"""The data plane as a node sees it: calls to members by name, and answers to their calls.

    transport = SocketTransport("server-3", handle, "10.0.0.3")
    transport.endpoint                                  # told to the others by the coordinator, with its roster
    transport.follow(7, {"server-3": ..., "trainer-0": ...})
    transport.call("trainer-0", request, timeout_s=2.0, done=print)

Nobody waits for anybody: who is in the roster can be called at once, and a new roster ends calls to those alone who are
not in it any more.

Invariants.
- `done` of a call is called exactly once, whatever happens: who takes a call out of where it is kept settles it.
- An exception in `handle` is answered as `Refused("internal: ...")` and handed to `on_error`; so is an answer that
  cannot be sent. What arrives and is no request is refused, what arrives and is no answer makes its call `Unknown`:
  both are complained of, and harm nobody.

How messages travel is left to the subclasses: `sockets.py`, and `rpc.py` for torch.distributed.rpc. Not done here:
retries, leases, the choice of members. A hung peer is noticed by the call's timeout only.
"""

from __future__ import annotations

import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch_ecrec.protocol.build import own_build
from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.status import Connections
from torch_ecrec.protocol.wire import A, Answer, Failed, Malformed, Ok, Outcome, Refused, Request, Unknown
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.transport.complaints import Complaints
from torch_ecrec.transport.reachability import Tries

Handler = Callable[[Request[Any], Callable[[Answer], None]], None]
Back = Callable[[Encoded, str, int], None]  # takes an answer back: encoded, its class, bytes of its tensors

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
LEAST_TIMEOUT_S = 0.001  # 0 would mean "no limit" to torch

log = logging.getLogger(__name__)


class Call:
    """One call under way: the kind of its request, and the callback that gets its outcome."""

    __slots__ = ("done", "kind")

    def __init__(self, kind: type[Request[Any]], done: Callable[[Outcome[Any]], None]) -> None:
        self.kind, self.done = kind, done


class Transport(ABC):
    """Sends calls to members of the cluster, and answers theirs.

    Args:
        name: mine.
        handle: `handle(request, reply)` is called on a thread of the transport for each request; it calls
            `reply(answer)` exactly once, at any later time, from any thread.
        host: the address of this host that others reach; here it listens.
        on_error: gets what `handle`, `done` or the sending of a message raised; logged if not given.
        vocabulary: the messages that are sent and understood.

    Attributes:
        endpoint: what others must know to call this one: a text that only transports of this class understand.

    Raises:
        ClusterUnavailable: it cannot listen there.
    """

    def __init__(
        self,
        name: str,
        handle: Handler,
        host: str,
        on_error: Callable[[BaseException], None] | None = None,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        require(NAME.fullmatch(name) is not None, f"`name` must be 1 to 100 letters, digits, '_' or '-', got {name!r}")
        self.name, self.host, self.endpoint = name, host, ""
        self._handle, self._on_error, self.vocabulary = handle, on_error, vocabulary
        self.build = own_build(vocabulary)
        self.complaints = Complaints(log, name)
        self._tries = Tries()  # a thread of the subclass looks at them, several times a second
        self._callback = threading.local()  # .runs: this thread is in `handle` or `done`

    def unreachable(self) -> list[str]:
        """Returns the names of members on other hosts that this one tries to reach and cannot."""
        return self._tries.unreachable()

    def lacks(self) -> str:
        """Returns for want of what this process has not had, for some time now, the connections that it was to have;
        "": there is nothing that it lacks, as far as is known."""
        return ""

    @property
    @abstractmethod
    def bytes_sent(self) -> dict[str, int]:
        """Bytes of tensors sent so far, before they are packed, by class name of the request or answer."""

    @abstractmethod
    def connections(self) -> Connections:
        """Returns how many connections with other members there are, by kind."""

    @abstractmethod
    def follow(self, version: int, endpoints: Mapping[str, str]) -> None:
        """Takes these as the members from now on, if `version` is newer than any before. Returns at once.

        Args:
            endpoints: by name, mine included, in the same order for everybody.

        Raises:
            ValueError: one is no endpoint; nothing has changed.
        """

    @abstractmethod
    def _send(self, peer: str, call: Call, encoded: Encoded, size: int, timeout_s: float) -> None:
        """Sends a call without blocking; settles it later. `size`: bytes of its tensors.

        Raises:
            ConnectionError: certainly not sent, and not settled.
            TypeError, ValueError: it cannot be sent; likewise.
        """

    @abstractmethod
    def _close(self) -> None:
        """Leaves for good; calls under way end as `Unknown`. May be called again, also by two threads at once."""

    # calls ------------------------------------------------------------------------------------------

    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None:
        """Sends a request; returns at once.

        Args:
            peer: a member's name.
            request: its tensors must not be changed until `done`.
            timeout_s: if no answer has come by then, the outcome is `Unknown`.
            done: called exactly once, on a thread of the transport or on this one, before or after this returns.
                `Failed`: certainly not handled. `Unknown`: time ran out, the peer died or is no member any more.

        Raises:
            TypeError: `request` is not a message of wire.py. Never raises for what happens on the network.
        """
        kind = type(request)
        try:
            encoded, size = self.vocabulary.encode(request)
        except ValueError as error:  # asking again would not help
            self._finish(done, self._unsent(kind, error))
            return
        try:
            self._send(peer, Call(kind, done), encoded, size, max(timeout_s, LEAST_TIMEOUT_S))
        except ConnectionError as error:
            self._finish(done, Failed(first_line(error)))
        except (ValueError, TypeError) as error:
            self._finish(done, self._unsent(kind, error))

    def _unsent(self, kind: type[Request[Any] | Answer], error: Exception) -> Failed:
        """Reports a message that cannot be encoded, and returns the outcome of its call."""
        told = ValueError(f"a {kind.__name__} cannot be sent: {first_line(error)}")
        told.__cause__ = error
        self._report(told)
        return Failed(str(told))

    def _answered(self, call: Call, encoded: Encoded) -> None:
        """Ends a call with this answer."""
        outcome: Outcome[Any]
        try:
            outcome = Ok(self.vocabulary.decode_answer(encoded, call.kind))
        except ValueError as error:
            self.complaints.add("an answer is none", error)
            outcome = Unknown(first_line(error))
        self._finish(call.done, outcome)

    def _finish(self, done: Callable[[Outcome[A]], None], outcome: Outcome[A]) -> None:
        outer = self._enter_callback()
        try:
            done(outcome)
        except Exception as error:  # the seam: it would vanish in a thread of the transport
            self._report(error)
        finally:
            self._callback.runs = outer

    def _enter_callback(self) -> bool:
        """Notes that this thread runs a `handle` or `done`; returns whether it did before."""
        outer: bool = getattr(self._callback, "runs", False)
        self._callback.runs = True
        return outer

    # requests ---------------------------------------------------------------------------------------

    def _serve(self, encoded: Encoded, back: Back) -> None:
        """Handles a request that has come. Never raises."""
        reply = Reply(self, back)
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

    def _answer(self, answer: Answer, back: Back) -> None:
        try:
            encoded, size = self.vocabulary.encode(answer)
            back(encoded, type(answer).__name__, size)
        except (ValueError, TypeError) as error:
            refused = Refused(f"internal: {self._unsent(type(answer), error).reason}")
            back(self.vocabulary.encode(refused)[0], "Refused", 0)

    def _report(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error(error)
        else:
            log.error("%s: %r", self.name, error, exc_info=error)

    def close(self) -> None:
        """Leaves the cluster for good. Calls under way end as `Unknown`. May be called again.

        It waits for calls that are being handled, so it must not be called with a lock that these need. Called from
        `handle` or `done` it does not wait, and the cluster is left soon after.
        """
        if getattr(self._callback, "runs", False):
            Worker(self._close, "close", self._report, daemon=False).start()  # waited for at the end
            return
        self._close()


class Reply:
    """Sends the answer of one request back to its caller. Calling it twice raises RuntimeError."""

    __slots__ = ("_back", "_transport")

    def __init__(self, transport: Transport, back: Back) -> None:
        self._transport, self._back = transport, [back]  # empty once replied; popping is atomic

    def __call__(self, answer: Answer) -> None:
        if not self.unless_replied(answer):
            raise RuntimeError(f"`reply` was called twice, the second time with {type(answer).__name__}")

    def unless_replied(self, answer: Answer) -> bool:
        """Answers, unless an answer was given before; returns whether it has answered."""
        try:
            back = self._back.pop()
        except IndexError:
            return False
        self._transport._answer(answer, back)
        return True


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
