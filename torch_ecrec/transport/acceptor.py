"""Accepts connections, and holds them until the peer has proved that it is a member: one thread for all of them.

A member says hello at once: magic, a nonce, the digest of its build, its name. It is told another nonce, with the proof
that who listens here is who it looks for, and shows its own (`secret.py`): so each has the cluster's secret and the key
of who listens. Who has shown it gets a thread of its own. If it is of another build it is told which build is here
(`OTHER_BUILD`); nothing that it sends is read. Everybody else costs a descriptor, for `HELLO_S` at most, and of them
there are `STRANGERS_MOST`: when one more comes, the one that has kept silent longest goes. So a member gets in as long
as fewer than `STRANGERS_MOST` come in the time that its hello takes.

Accepting never ends before `close`: where a descriptor or memory is missing, one stranger is given up, and if there is
none, it pauses.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_ecrec.protocol.build import DIGEST_BYTES, Build
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.transport.complaints import Complaints
from torch_ecrec.transport.control import tune
from torch_ecrec.transport.frames import HEADER, MAGIC, OTHER_BUILD
from torch_ecrec.transport.reachability import SHORT
from torch_ecrec.transport.secret import CALLER, LISTENER, NONCE_BYTES, PROOF_BYTES, draw, is_proof, proof

KEY_BYTES = 16
HELLO = struct.Struct(f"<4s{NONCE_BYTES}s{DIGEST_BYTES}s100s")  # magic, nonce, digest of the build, the caller's name
CHALLENGE = struct.Struct(f"<4s{NONCE_BYTES}s{PROOF_BYTES}s")  # magic, nonce, proof: what a hello is answered with
HELLO_S = 10.0
STRANGERS_MOST = 128
ACCEPTS_AT_ONCE = 16  # then those that have come are heard
PAUSE_S = 0.05


@dataclass(eq=False)
class _Stranger:
    sock: socket.socket
    until_s: float
    said: bytearray = field(default_factory=bytearray)
    ours: bytes = b""  # nonce, once it has said hello


class Acceptor:
    """Listens for connections, and hands over those of proven members.

    Args:
        listeners: its own from now on.
        shared: what a member knows (`secret.data_key`).
        build: of this process.
        admit: `admit(sock, caller)` of who has said hello, by name; the socket blocks, and is the callee's. On the
            acceptor's thread: it must not wait.
        visited: gets the host of everybody who connects from another one.
        complaints: told why a peer was refused.
        on_error: gets what goes wrong here; the acceptor stays open.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        shared: bytes,
        build: Build,
        admit: Callable[[socket.socket, str], None],
        visited: Callable[[str], None],
        complaints: Complaints,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._listeners, self._shared, self._build, self._admit = list(listeners), shared, build, admit
        self._visited, self._complaints, self._on_error = visited, complaints, on_error
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._wake, self._woken = socket.socketpair()
        self._ends = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._resume_s: float | None = None  # when a pause ends: nobody is accepted until then
        for listener in self._listeners:
            listener.setblocking(False)
        self._listen()
        belongs_here(self)

    def on_forked(self) -> None:
        """Closes all sockets in a forked child, so that it keeps neither the port nor a stranger's connection."""
        self._ends = True
        for sock in (*self._listeners, *(stranger.sock for stranger in self._strangers), self._wake, self._woken):
            sock.close()
        self._selector.close()

    def close(self) -> None:
        """Ends `run`, which closes listeners and unproven connections. May be called again."""
        if not self._ends:
            with contextlib.suppress(OSError):  # another thread has ended it meanwhile
                self._wake.send(b"x")  # first: `run` closes it as soon as it sees that it ends
            self._ends = True

    def run(self) -> None:
        """Accepts and checks connections until `close`. Runs on the acceptor's own thread."""
        try:
            while not self._ends:
                try:
                    self._look()
                except Exception as error:  # the seam: nobody could connect any more
                    self._on_error(error)
        finally:
            for stranger in list(self._strangers):
                self._leave(stranger)
            for sock in (*self._listeners, self._wake, self._woken):
                sock.close()
            self._selector.close()

    def _look(self) -> None:
        ready = [key for key, _ in self._selector.select(self._patience_s())]
        for key in ready:
            if key.data is not None:
                self._hear(key.data)  # before those who come now make room for themselves
        for listener in self._listeners:
            if any(key.fileobj is listener for key in ready):
                self._accept(listener)
        now_s = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if stranger.until_s <= now_s]:
            if stranger.said:
                self._turn_away(stranger, f"said no hello within {HELLO_S:g} s")
            else:  # perhaps a member's try (reachability.py), whose end was lost on the way: a reset is sent once
                self._leave(stranger)
        if self._resume_s is not None and now_s >= self._resume_s:
            self._listen()

    def _patience_s(self) -> float | None:
        times = [stranger.until_s for stranger in list(self._strangers)[:1]]
        times += [self._resume_s] if self._resume_s is not None else []
        return max(min(times) - time.monotonic(), 0.0) if times else None

    # listening ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._resume_s = None
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause(self) -> None:
        if self._resume_s is None:
            self._resume_s = time.monotonic() + PAUSE_S
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in SHORT:
                    self._complaints.add("cannot accept a connection", error)
                    if self._strangers:
                        self._turn_away(next(iter(self._strangers)), "makes room")
                    else:
                        self._pause()
                        return
                continue  # else it is the error of one who had connected, and is gone
            if not isinstance(address, (str, bytes)):  # else it is within this host
                self._visited(address[0])
            self._come(sock)

    def _come(self, sock: socket.socket) -> None:
        if len(self._strangers) >= STRANGERS_MOST:
            self._turn_away(next(iter(self._strangers)), "said no hello before too many others came")
        stranger = _Stranger(sock, time.monotonic() + HELLO_S)
        self._strangers[stranger] = None
        try:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, stranger)
        except OSError as error:  # it is gone
            self._turn_away(stranger, error)
            return
        self._hear(stranger)

    # who has come -----------------------------------------------------------------------------------

    def _hear(self, stranger: _Stranger) -> None:
        if stranger not in self._strangers:
            return  # turned away since it was seen to speak
        try:
            said = stranger.sock.recv(HELLO.size + PROOF_BYTES * bool(stranger.ours) - len(stranger.said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._turn_away(stranger, error) if stranger.said else self._leave(stranger)
            return
        if not said:  # a peer that said nothing only tried to reach this host (reachability.py)
            self._turn_away(stranger, "left without a hello") if stranger.said else self._leave(stranger)
            return
        stranger.said += said
        if len(stranger.said) == HELLO.size and not stranger.ours:
            self._challenge(stranger)
        elif len(stranger.said) == HELLO.size + PROOF_BYTES:
            self._judge(stranger)

    def _challenge(self, stranger: _Stranger) -> None:
        magic, theirs, _, _ = HELLO.unpack(stranger.said)
        if magic != MAGIC:
            self._turn_away(stranger, "not a member of this cluster")
            return
        stranger.ours = draw()
        shown = proof(self._shared, LISTENER, theirs, stranger.ours)
        try:
            stranger.sock.send(CHALLENGE.pack(MAGIC, stranger.ours, shown))  # there is room: nothing was sent before
        except OSError as error:  # it is gone
            self._turn_away(stranger, error)
            return
        self._hear(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        hello, shown = bytes(stranger.said[: HELLO.size]), bytes(stranger.said[HELLO.size :])
        _, theirs, digest, caller = HELLO.unpack(hello)
        if not is_proof(shown, self._shared, CALLER, theirs, stranger.ours, hello):
            self._turn_away(stranger, "not a member of this cluster")
        elif digest != self._build.digest:
            self._tell_build(stranger)
        else:
            self._forget(stranger)
            self._let_in(stranger.sock, caller.rstrip(b"\0").decode(errors="replace"))

    def _let_in(self, sock: socket.socket, caller: str) -> None:
        try:
            sock.setblocking(True)
            if sock.family != socket.AF_UNIX:
                tune(sock)
        except OSError as error:  # it is gone
            self._complaints.add("a member's connection is closed", error)
            sock.close()
            return
        self._admit(sock, caller)

    def _tell_build(self, stranger: _Stranger) -> None:
        told = self._build.told()
        with contextlib.suppress(OSError):  # it is gone; else there is room for this, as little was sent before
            stranger.sock.send(HEADER.pack(OTHER_BUILD, 0, 0, len(told), 0) + told)
        self._turn_away(stranger, "a member of another build of torch_ecrec, with other messages")

    def _turn_away(self, stranger: _Stranger, why: object) -> None:
        self._complaints.add("a stranger's connection is closed", why)
        self._leave(stranger)

    def _leave(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        with contextlib.suppress(KeyError):  # it was not there yet
            self._selector.unregister(stranger.sock)
