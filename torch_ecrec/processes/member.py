"""A server or trainer process in the cluster: control connection, heartbeats, transport, and the node they carry.

`Member` joins the coordinator, builds its node (a `Host` or a `Client`) once it has a name, says how it is called,
tells its transport who is there (`messages.Roster`), and hands the node everything else. It is its node's real `Port`.

The end of its connection is the end of nothing: it connects again and rejoins. The same coordinator knows it by its
`birth`, and that its process lives by its `SignOfLife`; the next one takes what it says. Either answers "rejoined",
upon which it says again what may not have arrived. What the coordinator sends is converted by
`messages.from_coordinator`: nonsense ends the membership with `ClusterUnavailable`, which says what came. A coordinator
of another cluster ("other_cluster") is none: the member says so, keeps what it has, and goes on looking for its own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from torch_ecrec.errors import (
    CheckpointError,
    ClusterError,
    ClusterUnavailable,
    DataLoss,
    Fenced,
    JoinRefused,
    TrainersLost,
)
from torch_ecrec.processes.heartbeats import Heartbeats
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.build import own_build
from torch_ecrec.protocol.messages import BadMessage
from torch_ecrec.protocol.status import Report
from torch_ecrec.protocol.wire import A, Outcome, Request
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import STANDS_S, Settings
from torch_ecrec.transport.calls import Transport
from torch_ecrec.transport.control import NO_SECRET, ControlClient, NoAnswer
from torch_ecrec.transport.etcd import Leader
from torch_ecrec.transport.liveness import SignOfLife
from torch_ecrec.transport.node import COMPLAINTS, Node
from torch_ecrec.transport.rpc import RpcTransport
from torch_ecrec.transport.secret import NotProved, secret_at
from torch_ecrec.transport.sockets import SocketTransport
from torch_ecrec.transport.timers import Timers
from torch_ecrec.transport.whereabouts import follow, reach, whereabouts

log = logging.getLogger(__name__)

CLOSE_S = 1.0  # how long a server that ends waits for a connection to say so
FAREWELL_S = 30.0  # how long a trainer that is done stays for the coordinator, or the next one, to hear it

TRANSPORTS: dict[str, type[Transport]] = {"sockets": SocketTransport, "rpc": RpcTransport}  # `config.TRANSPORTS`

# which of the wire's messages carry what, for the figures of bytes sent
KINDS = {
    "Lookup": "lookup",
    "Rows": "lookup",
    "Push": "push",
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
REJOIN_LEAST_S, REJOIN_MOST_S = 0.05, 1.0  # between two attempts to join, where connections end at once
LOOK_S, LOOK_PART = 10.0, 0.25  # whether anybody answers there, is looked at so often, and in such parts of `give_up_s`
ENDS: dict[str, type[ClusterError]] = {
    "data_loss": DataLoss,
    "checkpoint": CheckpointError,
    "trainers_lost": TrainersLost,
    "fenced": Fenced,
}


class Member:
    """One process's membership. Implements `Port`.

    Args:
        settings: `settings.join` names the coordinator.
        hello: what this process says of itself: role, and rank and job for a trainer.
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
        hello: dict[str, Any],
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
        self.name = ""
        self.restarted = False  # a trainer: the cluster has trained before
        self.restored: messages.Restored | None = None  # the checkpoint that the cluster began with
        self._inexact: list[tuple[int, str]] = []  # what has made the run so, as it was told
        self.transport: Transport | None = None
        self._timers = Timers(self.on_error)
        self._answered = threading.Event()  # or the connection has ended
        self._failure: Exception | None = None  # why it cannot join
        self._gone = self._waits = ""  # before it has answered: why the connection ended; why it waits, as it says
        self._ended = self._leaving = False
        self._lock = threading.Lock()  # guards _ended and _leaving
        self._over = threading.Event()  # the membership
        self._parted = threading.Event()  # the coordinator has heard that this trainer is done, or all has ended
        self._roster: messages.Roster | None = None  # the newest that it was told
        self._telling = threading.RLock()  # guards _control: one connection follows another between two messages
        self._connected, self._cut = threading.Event(), threading.Event()
        self._why_cut = ""
        self._sought_s: float | None = None  # since when it looks for its coordinator; None: it is with it
        self._sought_for_s = settings.give_up_s  # so long; time in which nothing comes back from there does not count
        self._hears_nothing = False  # as it looks
        self._stranger = ""  # whom it found last, if that was another cluster's
        self._beats = Heartbeats(settings, self._timers, lambda: self.node, self.on_error)
        self._control: ControlClient | None = None
        self._leader: Leader | None = None  # whom the last connection is with
        self._sign: SignOfLife | None = None
        self._hello = {**hello, "birth": uuid.uuid4().hex}
        try:
            self._where = whereabouts(settings.join)
            follow(self._where, self._over, self._connected_with, self._on_closed, self.on_error)
            transport = self._join()
        except BaseException:
            self.close()
            raise
        Worker(self._stay_connected, "rejoin", self.on_error).start()
        figures = lambda: figures_of(transport, report())  # noqa: E731
        self._beats.begin(self.tell, transport.unreachable, figures, self._sign)

    def _join(self) -> Transport:
        """Asks until a coordinator answers: one that ends meanwhile is replaced, as for a member that has joined."""
        limit_s = self.settings.give_up_s
        deadline_s = time.monotonic() + limit_s
        where = f"the coordinator at {self.settings.join}"
        left_s, pause_s, gone = limit_s, REJOIN_LEAST_S, ""
        self._say_missing(time.monotonic(), SAY_FIRST_S)
        while True:
            try:
                control = self._connect(left_s)
            except NotProved as error:
                raise JoinRefused(str(error)) from error
            except ClusterUnavailable as error:
                if not gone:
                    raise
                raise ClusterUnavailable(f"{where} ended ({gone}), and none came within {limit_s:g} s") from error
            self._control = control
            self._connected.set()
            if self._sign is None:
                secret_at(control.local_host)  # where it is about to listen
                self._sign = _sign_of_life(control.local_host)
                self._hello["address"] = list(self._sign.address) if self._sign is not None else None
            control.send(join_message(**self._hello))
            if not self._answered.wait(max(deadline_s - time.monotonic(), 0.0)):
                raise ClusterUnavailable(f"{where} did not answer in {limit_s:g} s{self._waits}")
            if self._failure is not None:
                raise self._failure
            if self.transport is not None:
                return self.transport
            gone = self._gone
            if time.monotonic() + pause_s > deadline_s:
                raise ClusterUnavailable(f"{where} ended before it answered: {gone}")
            log.warning("%s is gone before it answered (%s); joins again", where, gone)
            control.close()  # nothing of it comes any more
            self._answered.clear()
            self._cut.clear()
            self._gone = self._waits = ""
            time.sleep(pause_s)  # nothing else to do: whoever listens there now may end each connection at once
            pause_s = min(2 * pause_s, REJOIN_MOST_S)
            left_s = max(deadline_s - time.monotonic(), 0.0)

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
                "no coordinator answers at %s; it is waited for, %.0f of %g s so far. It is started by: %s",
                named,
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
        with self._telling:
            assert self._control is not None
            self._control.send(messages.json_of(word))

    # the coordinator ----------------------------------------------------------------------------

    def _connect(self, limit_s: float) -> ControlClient:
        def connect(leader: Leader, seconds: float) -> ControlClient:
            return ControlClient(*leader.address, self._on_message, self._on_closed, seconds, self._on_nonsense)

        control, leader = reach(self._where, limit_s, connect)
        self._leader, self._hello["led"] = leader, leader.revision
        return control

    def _connected_with(self) -> Leader | None:
        return self._leader if self._connected.is_set() else None

    def _on_message(self, message: dict[str, Any]) -> None:
        try:
            self._take(messages.from_coordinator(message))
        except BadMessage as error:
            self._on_nonsense(f"the coordinator sent what cannot be: {error}")
        except Exception as error:  # the seam: it is raised where the process joins, or ends its membership
            (self.on_error if self._answered.is_set() else self._fail_to_join)(error)

    def _take(self, word: messages.FromCoordinator) -> None:
        if isinstance(word, messages.Welcome):
            self._take_welcome(word)
        elif isinstance(word, messages.Refused):
            if self._answered.is_set() and word.kind == "other_build":  # of a coordinator started in place of ours
                self.end(JoinRefused(f"the coordinator at {self.settings.join} takes it for no member: {word.reason}"))
                return
            if self._over.is_set():
                return
            if self._answered.is_set():  # a message, not the membership
                log.error("%s: the coordinator refused a message: %s", self.name, word.reason)
                return
            if word.kind == NO_SECRET:
                self._fail_to_join(JoinRefused(f"the coordinator at {self.settings.join} {word.reason}"))
                return
            refusal = DataLoss if word.kind == "data_loss" else JoinRefused
            self._fail_to_join(refusal(f"refused by the cluster at {self.settings.join}: {word.reason}"))
        elif isinstance(word, messages.Waits):
            self._waits = f": {word.reason}"
            log.warning("waits until the cluster at %s lets it in: %s", self.settings.join, word.reason)
        elif isinstance(word, messages.Fatal):
            error = ENDS.get(word.kind, ClusterUnavailable)(word.reason)
            self.end(error) if self._answered.is_set() else self._fail_to_join(error)
        elif self.transport is None:
            raise BadMessage(f"{type(word).__name__}: before a welcome")
        elif isinstance(word, messages.KnownInexact):
            self._inexact = word.known
        elif isinstance(word, messages.Roster):
            self._take_roster(self.transport, word)
        elif isinstance(word, messages.OtherCluster):
            self._turn_away(word)
        else:
            if isinstance(word, messages.Job):
                self._run = word.run
            if isinstance(word, messages.Rejoined):
                self._life, self._sought_s, self._stranger = word.life, None, ""
                if self._leaving:
                    self._say_leave()
            elif isinstance(word, messages.Left) and self._leaving and self._hello.get("rank") in word.trainers:
                self._parted.set()
            self._on_control(word)

    def _take_welcome(self, word: messages.Welcome) -> None:
        if self.transport is not None:
            raise BadMessage("welcome: said before")
        self.name, self.restarted, self.restored, self._run = word.name, word.restarted, word.restored, word.run
        self._code, self._life = dataclasses.asdict(word.code), word.life
        self.node = self._make_node(self.name, self, word.code)
        kind = TRANSPORTS[word.transport]
        shared.enable(self.settings.shared_memory_bytes if kind is SocketTransport else 0)
        assert self._control is not None  # it was welcomed there
        self.transport = kind(self.name, self.node.handle, self._control.local_host, self.on_error)
        self.tell(messages.Listens(self.transport.endpoint))
        self._answered.set()

    def _take_roster(self, transport: Transport, word: messages.Roster) -> None:
        """Raises BadMessage: this member is not in it, or nobody can be called so."""
        if self.name not in word.endpoints:
            raise BadMessage(f"roster: {self.name} must be in it, got {', '.join(word.endpoints)}")
        if self._roster is not None and word.version <= self._roster.version:
            return  # it was told before
        try:
            transport.follow(word.version, word.endpoints)
        except ValueError as error:
            raise BadMessage(f"roster: {error}") from error
        self._roster = word

    def _turn_away(self, word: messages.OtherCluster) -> None:
        """Whoever leads there is not the coordinator of this member's cluster."""
        code = word.code
        stranger = f"the coordinator at {self.settings.join} is of another cluster: {word.reason}"
        if stranger != self._stranger:
            log.error(
                "%s: %s. It leads %s, (k, r) = (%d, %d) on %d slots; this member is of %s, (%d, %d) on %d slots, keeps"
                " what it has, and looks for its own for %g s",
                *(self.name, stranger, word.run, code.k, code.r, code.slots),
                *(self._run, self._code["k"], self._code["r"], self._code["slots"], self.settings.give_up_s),
            )
        self._stranger = stranger
        if self._control is not None:
            self._control.close()
        self._on_closed(stranger)

    def _on_nonsense(self, reason: str) -> None:
        """What arrived is no message of this protocol: whoever sent it is not the coordinator of this cluster."""
        (self.end if self._answered.is_set() else self._fail_to_join)(ClusterUnavailable(reason))

    def _on_closed(self, reason: str) -> None:
        self._why_cut = reason
        self._connected.clear()
        self._cut.set()
        if self.transport is None:
            self._gone = self._gone or reason
            self._answered.set()

    def _fail_to_join(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._answered.set()

    def _stay_connected(self) -> None:
        while True:
            self._cut.wait()
            self._cut.clear()
            with self._lock:
                if self._ended:
                    return
            self._rejoin(self._why_cut)

    def _rejoin(self, reason: str) -> None:
        """Finds the coordinator again, or the one that is started in its place, and tells it what is known here."""
        since_s = self._sought_s  # a last word on the connection before may end that search, not this one
        if since_s is None:
            since_s = self._sought_s = time.monotonic()
            self._sought_for_s = self.settings.give_up_s
            log.warning("%s: no connection with the coordinator (%s); goes on, and looks for it", self.name, reason)
        else:  # whoever is there may end each connection at once
            self._over.wait(REJOIN_MOST_S if self._stranger else REJOIN_LEAST_S)
        give_up_s, stands_s = self.settings.give_up_s, self.settings.standstill_s or STANDS_S
        while True:
            for_s, silent = time.monotonic() - since_s, False
            try:
                if for_s < self._sought_for_s:
                    control = self._connect(min(LOOK_S, LOOK_PART * give_up_s))
                    break
            except ClusterUnavailable as error:
                for_s, silent = time.monotonic() - since_s, isinstance(error, NoAnswer)
                if isinstance(error, NotProved):  # another cluster's, or a mistake: our own may come yet
                    if str(error) != self._stranger:
                        log.error("%s: %s; keeps what it has, and looks for its own", self.name, error)
                    self._stranger = str(error)
                    self._over.wait(REJOIN_MOST_S)
            self._note_silence(silent and for_s < stands_s, stands_s - for_s)
            if self._hears_nothing:
                self._sought_for_s = for_s + give_up_s
            elif for_s >= (give_up_s if silent else self._sought_for_s):
                why = f"the coordinator is gone ({self._stranger or reason}), and none came within {give_up_s:g} s"
                self.end(ClusterUnavailable(why))
            if self._over.is_set():
                return
        self._note_silence(False, 0.0)
        assert self.transport is not None
        with self._telling:  # what is told from now on follows on the new connection, what was told before is known
            message = rejoin_message(
                self._known(),
                hello=self._hello,
                name=self.name,
                code=self._code,
                life=self._life,
                endpoint=self.transport.endpoint,
                roster=self._roster,
                restored=self.restored,
                run=self._run,
                inexact=self._inexact,
            )
            before, self._control = self._control, control
            with self._lock:
                ended = self._ended
            if not ended:
                control.send(message)
                control.send(
                    messages.json_of(messages.Beat(unreachable=self.transport.unreachable()))
                )  # there are heartbeats
        if before is not None:
            before.close()
        if ended:
            control.close()
        elif not self._cut.is_set():
            self._connected.set()

    def _note_silence(self, is_so: bool, left_s: float) -> None:
        """Whether nothing comes back from where the coordinator was: perhaps it is this process that is cut off, and a
        trainer has patience, as with members that the coordinator says are silent."""
        if is_so == self._hears_nothing:
            return
        self._hears_nothing = is_so
        if is_so:
            log.warning("%s: nothing comes back from there; goes on looking, for %.0f s at most", self.name, left_s)
        if self._hello["role"] == "trainer":
            names = ["the coordinator, of which nothing is heard"] if is_so else []
            self._on_control(messages.Stands(names, left_s if is_so else None))

    def bytes_sent(self) -> dict[str, int]:
        """Bytes of tensors sent so far, by kind: lookup, push, fold, rebuild, snapshot, other."""
        assert self.transport is not None
        return by_kind(self.transport.bytes_sent)

    # the end ------------------------------------------------------------------------------------

    def on_error(self, error: BaseException) -> None:
        """Something went wrong where nobody could be told: it ends this process's membership."""
        log.error("%s: %r", self.name, error, exc_info=error)
        self.end(error)

    def end(self, error: BaseException) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            leaving = self._leaving
        self._over.set()
        self._parted.set()
        if not leaving:  # one that is done need not know
            self._on_end(error)

    def close(self) -> None:
        """Leaves. Idempotent.

        The end of a trainer that is not known to be done is a loss: it stays until it is told that it was heard, on
        whichever connection and by whichever coordinator, for `FAREWELL_S` at most.
        """
        with self._lock:
            ended, self._leaving = self._ended, True
        if self.transport is not None:
            if not ended and self._hello["role"] == "server":
                self._connected.wait(CLOSE_S)  # it may be just coming back
            self._say_leave()
            limit_s = min(FAREWELL_S, self.settings.give_up_s)
            if not ended and self._hello["role"] == "trainer" and not self._parted.wait(limit_s):
                log.warning("%s: no coordinator has heard within %g s that it is done", self.name, limit_s)
        with self._lock:
            self._ended = True
        self._over.set()
        self._beats.timers.close()
        self._timers.close()
        if self.transport is not None:
            self.transport.close()
        self._cut.set()
        for one in (self._control, self._sign):
            if one is not None:
                one.close()

    def _say_leave(self) -> None:
        self.tell(messages.Leave(figures_of(self.transport)))


def figures_of(transport: Transport | None, report: Report | None = None) -> Report:
    """What every member reports, beside figures of its own."""
    assert transport is not None
    refused = sum(transport.complaints.counts.values()) + sum(COMPLAINTS.counts.values())
    return replace(
        report or Report(),
        bytes_sent=by_kind(transport.bytes_sent),
        connections=transport.connections(),
        refused_messages=refused,
    )


def by_kind(bytes_sent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by what they were for, of those by the name of a message."""
    kinds = dict.fromkeys([*KINDS.values(), "other"], 0)
    for name, size in bytes_sent.items():
        kinds[KINDS.get(name, "other")] += size
    return kinds


def join_message(**hello: Any) -> dict[str, Any]:
    """What a process says to join; `hello`: its role, and what else the coordinator wants to know of one."""
    build = own_build()
    return {"type": "join", "version": build.version, "messages": build.messages, "pid": os.getpid(), **hello}


def rejoin_message(
    known: messages.Known,
    *,
    hello: Mapping[str, Any],
    name: str,
    code: Mapping[str, Any],
    life: int,
    endpoint: str,
    roster: messages.Roster | None,
    restored: messages.Restored | None,
    run: str,
    inexact: Sequence[tuple[int, str]] = (),
) -> dict[str, Any]:
    """What a member tells a coordinator that it has lost for a moment, or that was started again.

    Args:
        known: what its node knows (`Host.known`, `Client.known`).
        hello: what it said when it joined: role, birth, address, `led` of this coordinator, a trainer's rank.
        name, code: as it was told.
        life: of the coordinator before, as it said.
        endpoint: how it is called.
        roster: the newest that it was told.
        restored: the checkpoint that the cluster began with.
        run, inexact: as it was told.
    """
    of_process = {name: value for name, value in hello.items() if name not in ("job", "code")}  # as it knows them now
    return {
        **join_message(**of_process),
        "type": "rejoin",
        "name": name,
        "code": code,
        "life": life,
        "endpoint": endpoint,
        "roster": 0 if roster is None else roster.version,
        "world": [] if roster is None else list(roster.endpoints),
        "addresses": {} if roster is None else {member: list(at) for member, at in roster.addresses.items()},
        "restored": None if restored is None else messages.json_of(restored),
        "run": run,
        "inexact": list(inexact),
        "known": messages.json_of(known),
    }


def _sign_of_life(host: str) -> SignOfLife | None:
    """Where the coordinator can ask whether this process lives, once its connection has ended."""
    try:
        return SignOfLife(host)
    except OSError as error:
        log.warning(
            "cannot listen at %s (%s): the end of the control connection will count as this process's", host, error
        )
        return None


def exit_code_of(error: BaseException) -> int:
    """What a process returns that ended with `error`."""
    return error.exit_code if isinstance(error, ClusterError) else 1
