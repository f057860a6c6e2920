"""A server or trainer process in the cluster: control connection, heartbeats, transport, and the node they carry.

`Member` drives `protocol/membership.py:Membership`, which has the rules of joining, looking for the coordinator again
and leaving: it has the threads, the sockets and the clock. It builds its node (a `Host` or a `Client`) once it has a
name, says how it is called, tells its transport who is there (`messages.Roster`), and hands the node everything else.
It is its node's real `Port`.

The coordinator knows a member again by its `session_id`, and that its process lives by its `SignOfLife`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.processes.footprint import footprint
from torch_ecrec.processes.heartbeats import Heartbeats
from torch_ecrec.protocol import membership, messages
from torch_ecrec.protocol.membership import Membership, Wait
from torch_ecrec.protocol.status import Report
from torch_ecrec.protocol.wire import A, Outcome, Request
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings, own_secret
from torch_ecrec.transport.calls import Transport
from torch_ecrec.transport.control import ControlClient, NoAnswer
from torch_ecrec.transport.etcd import Leader
from torch_ecrec.transport.liveness import SignOfLife
from torch_ecrec.transport.node import COMPLAINTS, Node
from torch_ecrec.transport.rpc import RpcTransport
from torch_ecrec.transport.secret import NotProved, secret_at
from torch_ecrec.transport.sockets import SocketTransport
from torch_ecrec.transport.timers import Timers
from torch_ecrec.transport.whereabouts import follow, reach, whereabouts

log = logging.getLogger(__name__)

TRANSPORTS: dict[str, type[Transport]] = {"sockets": SocketTransport, "rpc": RpcTransport}  # `config.TRANSPORTS`

# which of the wire's messages carry what, for the figures of bytes sent
KINDS = {
    "Lookup": "lookup",
    "Rows": "lookup",
    "Push": "push",
    "Announce": "lookup",
    "Acknowledged": "lookup",  # rows that a push has asked for; the ids, which were with it, count as that
    "Fold": "fold",
    "Snapshot": "snapshot",
    "Versions": "rebuild",
    "VersionsAre": "rebuild",
    "Fetch": "rebuild",
    "FetchSeals": "scrubbing",
    "Seals": "scrubbing",
    "Records": "rebuild",
    "CutLog": "rebuild",
    "Snapshots": "rebuild",
    "Handed": "rebuild",
}

SAY_FIRST_S, SAY_AGAIN_S = 1.0, 5.0  # that there is no coordinator yet


class Member:
    """One process's membership. Implements `Port`.

    Args:
        settings: `settings.join` names the coordinator.
        join: what this process says of itself; see `membership.join_of`. Its address is added.
        make_node: builds the node, given its name, its port and the cluster's code parameters.
        on_control: gets the coordinator's messages that are not about membership.
        on_end: called once when the cluster ends for this process, with the reason.
        known: what a coordinator that was started again must know of this member.
        report: figures for the coordinator, with every heartbeat.

    The end of the coordinator, or of the connection with it, is not the end of the cluster: the member goes on, and
    rejoins for up to `give_up_s`.

    Raises:
        JoinRefused: the coordinator refused.
        DataLoss: likewise, as the cluster has stopped because of it.
        ClusterUnavailable: it cannot be reached, or did not answer.
    """

    def __init__(
        self,
        settings: Settings,
        join: messages.Join,
        make_node: Callable[[str, Member, CodeSpec], Node],
        on_control: Callable[[messages.FromCoordinator], None],
        on_end: Callable[[BaseException], None],
        known: Callable[[], messages.Known],
        report: Callable[[], Report] = Report,
    ) -> None:
        if settings.join is None:
            raise ValueError("no cluster named: `settings.join` (TORCH_ECREC_JOIN) must be HOST:PORT or etcd://...")
        self.settings, self._on_control, self._on_end = settings, on_control, on_end
        self._make_node, self._known = make_node, known
        self._secret = own_secret()  # as it was first: what is set may change, or its file go
        self.transport: Transport | None = None
        self._timers = Timers(self.on_error)
        self._telling = threading.RLock()  # guards _control: one connection follows another between two messages
        self._control: ControlClient | None = None
        self._changed = threading.Condition()  # guards _rules and _leader; nothing else is done meanwhile
        self._rules = Membership(join, settings.join, membership.pace_of(settings), time.monotonic())
        self._leader: Leader | None = None  # whom the last connection is with
        self._over = threading.Event()  # the membership
        self._sign: SignOfLife | None = None
        self._beats = Heartbeats(settings, self._timers, lambda: self.node, self.on_error)
        try:
            self._where = whereabouts(settings.join)
            follow(self._where, self._over, self._connected_with, self._on_closed, self.on_error)
            self._say_missing(time.monotonic(), SAY_FIRST_S)
            transport = self._join()
        except BaseException:
            self.close()
            raise
        Worker(lambda: self._pursue(lambda: False), "rejoin", self.on_error).start()
        figures = lambda: figures_of(transport, report())  # noqa: E731
        self._beats.begin(self.tell, lambda: self._unreachable(transport), figures, self._sign)

    def _join(self) -> Transport:
        self._pursue(lambda: self._rules.is_joined)
        if self._rules.failure is not None:
            raise self._rules.failure
        assert self.transport is not None
        return self.transport

    @property
    def name(self) -> str:
        return self._rules.name

    @property
    def restarted(self) -> bool:
        """A trainer: the cluster has trained before."""
        return self._rules.restarted

    @property
    def term(self) -> int:
        """Of the coordinator that it has heard last."""
        return self._rules.term

    @property
    def draining(self) -> bool:
        """A server: no slot is to be here."""
        return self._rules.join.draining

    @property
    def restored(self) -> messages.Restored | None:
        """The checkpoint that the cluster began with."""
        return self._rules.restored

    def _say_missing(self, since_s: float, delay_s: float) -> None:
        """As long as there is no coordinator, who looks at the log hears what is waited for, and what starts it."""

        def say() -> None:
            if self._control is not None or self._over.is_set():
                return
            named = self.settings.join or ""
            host, _, port = named.rpartition(":")
            start = (
                f"torch-ecrec coordinator --elect {named} ..."
                if "://" in named
                else (f"torch-ecrec coordinator --host {host} --port {port} ..., or torch-ecrec up --port {port}")
            )
            log.warning(
                "no coordinator answers at %s%s; it is waited for, %.0f of %g s so far. It is started by: %s",
                named,
                "" if "://" in named or _is_known(host) else f", a host that is not known here (`getent hosts {host}`)",
                time.monotonic() - since_s,
                self.settings.give_up_s,
                start,
            )
            self._say_missing(since_s, SAY_AGAIN_S)

        self._timers.later(delay_s, say)

    # Port ---------------------------------------------------------------------------------------

    def call(self, peer: str, request: Request[A], timeout_s: float, done: Callable[[Outcome[A]], None]) -> None:
        assert self.transport is not None
        self.transport.call(peer, request, timeout_s, done)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.later(delay_s, action)

    def now_s(self) -> float:
        return time.monotonic()

    def tell(self, word: messages.OfMember) -> None:
        self._say(word)

    def _say(self, word: messages.OfMember | messages.Join | messages.Rejoin) -> None:
        with self._telling:
            assert self._control is not None
            self._control.send(messages.json_of(word))

    # what is next -------------------------------------------------------------------------------

    def _pursue(self, done: Callable[[], bool]) -> None:
        """Does what the rules say is next, until then or until the membership is over.

        Whoever asks what is next does it: a `Connect` that were left would never be said again.
        """
        while True:
            with self._changed:
                if done():
                    return
                now_s = time.monotonic()
                step = self._rules.step(now_s)
                effects = self._rules.take()
                if over := self._rules.is_over:
                    self._changed.notify_all()  # whoever leaves has nobody to wait for
                if not (effects or over) and isinstance(step, Wait):
                    self._changed.wait(None if math.isinf(step.until_s) else step.until_s - now_s)
                    continue
            self._perform(effects)
            if over:
                self._over.set()
                return
            if not isinstance(step, Wait):
                self._connect(step.limit_s)

    def _connect(self, limit_s: float) -> None:
        """Finds the coordinator, or the one that was started in its place, and says who is there."""

        def connect(leader: Leader, seconds: float) -> ControlClient:
            hears = self._on_message, self._on_closed
            return ControlClient(*leader.address, *hears, seconds, self._on_nonsense, self._secret)

        try:
            control, leader = reach(self._where, limit_s, connect)
        except ClusterUnavailable as error:
            why, silent, stranger = error, isinstance(error, NoAnswer), isinstance(error, NotProved)
            self._let(lambda rules: rules.missed(time.monotonic(), why, silent, stranger))
            return
        with self._telling:  # what is told from now on follows on the new connection, what was told before is known
            known = self._known() if self._rules.is_joined else None
            before, self._control = self._control, control
            with self._changed:
                self._leader = leader
            if self._sign is None and known is None:
                self._listen(control.local_host)
            self._let(lambda rules: rules.connected(time.monotonic(), leader.revision, known))
            if known is not None and self.transport is not None:
                self.tell(messages.Beat(unreachable=self._unreachable(self.transport)))  # there are heartbeats
        if before is not None:
            before.close()
        if self._rules.is_over:  # `close` may have seen the one before
            control.close()

    def _unreachable(self, transport: Transport) -> list[str]:
        """Returns whom this member cannot reach: itself, too, if it has nothing to make connections with. Whether a
        server can be done without is for the coordinator to say; a trainer ends, and is started again."""
        found, lacks = transport.unreachable(), transport.lacks()
        if lacks and self._rules.join.role == "server":
            return [*found, transport.name]
        if lacks:
            self.on_error(ClusterUnavailable(lacks))
        return found

    def _listen(self, host: str) -> None:
        """Listens where the coordinator can ask whether this process lives, once its connection has ended."""
        secret_at(host)  # where it is about to listen
        try:
            self._sign = SignOfLife(host)
        except OSError as error:
            log.warning(
                "cannot listen at %s (%s): the end of the control connection will count as this process's", host, error
            )
            return
        address = self._sign.address
        self._let(lambda rules: rules.listens_at(address))

    def _connected_with(self) -> Leader | None:
        with self._changed:
            return self._leader if self._rules.is_connected else None

    # what happens -------------------------------------------------------------------------------

    def _let(self, event: Callable[[Membership], None]) -> None:
        """Tells the rules what has happened, and does what they say."""
        with self._changed:
            event(self._rules)
            effects, over = self._rules.take(), self._rules.is_over
            self._changed.notify_all()
        self._perform(effects)
        if over:
            self._over.set()

    def _perform(self, effects: list[membership.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, membership.Say):
                self._say(effect.word)
            elif isinstance(effect, membership.SayLeave):
                self.tell(messages.Leave(figures_of(self.transport)))
            elif isinstance(effect, membership.Tell):
                self._on_control(effect.word)
            elif isinstance(effect, membership.Build):
                self._build(effect.welcome)
            elif isinstance(effect, membership.Follow):
                self._follow(effect.roster)
            elif isinstance(effect, membership.Note):
                log.log(effect.level, "%s", effect.text)
            elif isinstance(effect, membership.Die):
                os.kill(os.getpid(), signal.SIGKILL)
            elif isinstance(effect, membership.Close):
                if self._control is not None:
                    self._control.close()
            elif self._rules.failure is None:  # else it is raised where the process joins
                self._on_end(effect.error)

    def _build(self, welcome: messages.Welcome) -> None:
        self.node = self._make_node(self.name, self, welcome.code)
        kind = TRANSPORTS[welcome.transport]
        shared.enable(self.settings.shared_memory_bytes if kind is SocketTransport else 0)
        assert self._control is not None  # it was welcomed there
        transport = self.transport = kind(self.name, self.node.handle, self._control.local_host, self.on_error)
        self._let(lambda rules: rules.built(transport.endpoint))
        if self._over.is_set():  # it took too long, and `close` may not have seen the transport
            transport.close()

    def _follow(self, roster: messages.Roster) -> None:
        assert self.transport is not None
        try:
            self.transport.follow(roster.version, roster.endpoints)
        except ValueError as error:
            self._on_nonsense(f"the coordinator sent what cannot be: roster: {error}")

    def _on_message(self, message: dict[str, Any]) -> None:
        try:
            self._let(lambda rules: rules.heard(message))
        except Exception as error:  # the seam: it is raised where the process joins, or ends its membership
            if self._rules.is_joined:
                self.on_error(error)
            else:
                self.end(error)

    def _on_nonsense(self, reason: str) -> None:
        self._let(lambda rules: rules.nonsense(reason))

    def _on_closed(self, reason: str) -> None:
        self._let(lambda rules: rules.closed(reason))

    def bytes_sent(self) -> dict[str, int]:
        """Bytes of tensors sent so far, by kind: lookup, push, fold, rebuild, snapshot, other."""
        assert self.transport is not None
        return by_kind(self.transport.bytes_sent)

    # the end ------------------------------------------------------------------------------------

    def on_error(self, error: BaseException) -> None:
        """Ends this process's membership with an error of the background, which nobody else could be told."""
        if isinstance(error, ClusterError):  # a full disk, say: its words are for the operator, and stacks are not
            log.error("%s ends: %s", self.name, error)
        else:
            log.error("%s: %r", self.name, error, exc_info=error)
        self.end(error)

    def end(self, error: BaseException) -> None:
        self._let(lambda rules: rules.end(error))

    def close(self) -> None:
        """Leaves the cluster, as `Membership.leave` does; again, it does nothing."""
        stays_s: list[float] = []
        self._let(lambda rules: stays_s.append(rules.leave()))
        with self._changed:
            self._changed.wait_for(lambda: self._rules.has_parted, stays_s[0])
        with self._telling:  # what another thread is saying is said before
            self._let(lambda rules: rules.part())
        self._beats.timers.close()
        self._timers.close()
        if self.transport is not None:
            self.transport.close()
        for one in (self._control, self._sign):
            if one is not None:
                one.close()


def figures_of(transport: Transport | None, report: Report | None = None) -> Report:
    """Returns a report with the figures that every member has; `report`: those of its own, which are added."""
    assert transport is not None
    refused = sum(transport.complaints.counts.values()) + sum(COMPLAINTS.counts.values())
    return replace(
        report or Report(),
        bytes_sent=by_kind(transport.bytes_sent),
        connections=transport.connections(),
        refused_messages=refused,
        process=footprint(),
    )


def by_kind(bytes_sent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by what they were for, of those by the name of a message."""
    kinds = dict.fromkeys([*KINDS.values(), "other"], 0)
    for name, size in bytes_sent.items():
        kinds[KINDS.get(name, "other")] += size
    return kinds


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a process that ended with `error`."""
    return error.exit_code if isinstance(error, ClusterError) else 1


def _is_known(host: str) -> bool:
    """Returns whether a host's name leads to an address here."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except socket.gaierror:
        return False
    return True
