"""Measures the network between two hosts: connecting, round trips, and bandwidth in both directions.

    listener (`doctor --listen`)                       caller (`doctor --to`)
                                    <---- MAGIC, nonce
    MAGIC, nonce, proof             ---->
                                    <---- proof
    MAGIC                           ---->
    one byte                        <---> ECHO, as often as it likes up to `ECHOES_MOST`
                                    <---- TAKE, pieces, an empty one
    how many bytes have come        ---->
                                    <---- GIVE, for so many milliseconds
    pieces, an empty one            ---->

A piece is its length (4 bytes) and as many bytes. The proofs are those of `transport/secret.py`, made of the cluster's
secret and of a word that no other channel uses, so that none of them can be passed on to another one. Without a secret
it listens where this host alone gets to, and takes everybody for a friend.

Invariants, of the listener.
- A *stranger*, who has not proved that he knows the secret, is sent a nonce and a proof, and may send 72 bytes within
  `PROVE_S`. Of more than `STRANGERS_MOST` the one goes who came first, so that there is always room for the next.
- A friend has `CALL_S` in all, `PAUSE_S` between two of his bytes, and `BYTES_MOST` in each direction. Friends are
  served one after the other, since two at a time would measure each other.
- Nothing that anybody sends is kept, and nothing of it is run.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch_ecrec.doctor.cluster import connect
from torch_ecrec.doctor.findings import Finding, duration
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.observe.words import size
from torch_ecrec.runtime.addresses import family_of, interfaces, is_loopback, parse_address, text_of
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import Settings, own_secret
from torch_ecrec.transport.secret import (
    CALLER,
    LISTENER,
    NONCE_BYTES,
    PROOF_BYTES,
    draw,
    is_proof,
    proof,
    secret_at,
    why_open,
)

MAGIC = b"ECRdoc1\n"  # another one for every change to what is said here
CONTEXT = b"doctor"
ECHO, TAKE, GIVE = b"e", b"t", b"g"
PORT = 29499
PIECE_BYTES = 1 << 18
BYTES_MOST = 32 << 30
ECHOES, ECHOES_MOST = 50, 1000
MEASURE_S = 2.0  # of each direction
GIVE_MOST_S = 10.0
PROVE_S, PAUSE_S, CALL_S = 5.0, 5.0, 40.0
STRANGERS_MOST = 32
LISTEN_S = 600.0
FAR_S = 0.005  # of a round trip: a step waits for two at least
_LENGTH, _COUNT, _MILLISECONDS = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<I")


class Refused(ClusterUnavailable):
    """Who was called, or who calls, does not know this process's secret."""


class _Line:
    """A connection with a deadline. Every method raises OSError: a `TimeoutError` when that is over, `ConnectionError`
    when the connection is."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        self._sock, self._until_s = sock, time.monotonic() + limit_s
        self._memory = memoryview(bytearray(PIECE_BYTES))
        self.heard = False  # whether anything has come
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def allow(self, limit_s: float) -> None:
        """Puts the deadline to `limit_s` from now."""
        self._until_s = time.monotonic() + limit_s

    def _wait(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        self._sock.settimeout(min(left_s, PAUSE_S))

    def send(self, data: bytes | memoryview) -> None:
        self._wait()
        self._sock.sendall(data)

    def read(self, count: int) -> bytes:
        """Returns exactly `count` bytes, `PIECE_BYTES` at most."""
        got = 0
        while got < count:
            self._wait()
            more = self._sock.recv_into(self._memory[got:count])
            if not more:
                raise ConnectionError("the other side has hung up")
            self.heard = True
            got += more
        return bytes(self._memory[:count]) if count <= 64 else b""

    def send_pieces(self, for_s: float) -> int:
        """Sends pieces for so long, then an empty one; returns how many bytes they had."""
        piece = _LENGTH.pack(PIECE_BYTES) + bytes(PIECE_BYTES)
        until_s, sent = time.monotonic() + for_s, 0
        while sent + PIECE_BYTES <= BYTES_MOST and (not sent or time.monotonic() < until_s):
            self.send(piece)
            sent += PIECE_BYTES
        self.send(_LENGTH.pack(0))
        return sent

    def take_pieces(self) -> int:
        """Reads pieces until an empty one; returns how many bytes they had. Raises ConnectionError for too many."""
        got = 0
        while count := _LENGTH.unpack(self.read(_LENGTH.size))[0]:
            got += count
            if count > PIECE_BYTES or got > BYTES_MOST:
                raise ConnectionError("it sends more than was agreed")
            self.read(count)
        return got


# who listens ------------------------------------------------------------------------------------------


class LinkListener:
    """Serves who measures. It listens from construction on, and serves in `serve`.

    Args:
        host, port: where; port 0 takes any that is free.
        tell: gets a line for each measurement, and for each stranger.

    Raises:
        ClusterUnavailable: other hosts get there, and there is no secret.
        OSError: nobody can listen there.
    """

    def __init__(self, host: str, port: int, tell: Callable[[str], object]) -> None:
        self._secret = secret_at(host)
        self._tell = tell
        self._serving = threading.Lock()  # one friend at a time
        self._lock = threading.Lock()  # guards the strangers
        self._strangers: dict[socket.socket, None] = {}  # who came first comes first
        try:
            self._socket = socket.create_server((host, port), family=family_of(_address_of(host)), backlog=16)
        except OSError as error:
            why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            told = f"cannot listen for other hosts at {text_of((host, port))}: {why}; name another place"
            raise OSError(error.errno, told) from None
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])

    def serve(self, for_s: float) -> None:
        """Serves for so long, or until `close`."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                self._socket.settimeout(min(left_s, 1.0))
                sock, place = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._socket.fileno() < 0:  # closed
                    return
                time.sleep(0.1)  # no descriptor is left: it waits for one
                continue
            with self._lock:
                self._strangers[sock] = None
                first = next(iter(self._strangers)) if len(self._strangers) > STRANGERS_MOST else None
                if first is not None:
                    self._strangers.pop(first)
                    with contextlib.suppress(OSError):  # its thread closes it
                        first.shutdown(socket.SHUT_RDWR)
            Worker(self._served(sock, text_of(place[:2])), "doctor: caller", log_error).start()

    def close(self) -> None:
        """Stops listening. From any thread."""
        self._socket.close()

    def _served(self, sock: socket.socket, who: str) -> Callable[[], None]:
        def work() -> None:
            with sock:
                try:
                    line = _Line(sock, PROVE_S)
                    if not self._is_friend(line, who):
                        return
                    with self._lock:
                        self._strangers.pop(sock, None)
                    with self._serving:
                        line.allow(CALL_S)
                        line.send(MAGIC)
                        self._tell(f"{who} measures")
                        self._serve(line, who)
                except OSError as error:
                    self._tell(f"{who}: {error.strerror or error}")
                finally:
                    with self._lock:
                        self._strangers.pop(sock, None)

        return work

    def _is_friend(self, line: _Line, who: str) -> bool:
        """Returns whether a caller knows the secret; tells of one who does not, or who is no doctor."""
        with contextlib.suppress(ConnectionError):
            if line.read(len(MAGIC)) == MAGIC:
                theirs, mine = line.read(NONCE_BYTES), draw()
                line.send(MAGIC + mine + proof(self._secret, LISTENER, theirs, mine, CONTEXT))
                if is_proof(line.read(PROOF_BYTES), self._secret, CALLER, theirs, mine, CONTEXT):
                    return True
        if line.heard:  # else somebody has only looked whether anybody listens
            self._tell(f"{who} does not know the secret, or is no doctor: hung up")
        return False

    def _serve(self, line: _Line, who: str) -> None:
        echoes, took, gave = 0, 0, 0
        while True:
            try:
                word = line.read(1)
            except ConnectionError:
                self._tell(f"{who} has sent {size(took)}, and was sent {size(gave)}")
                return
            if word == ECHO and echoes < ECHOES_MOST:
                echoes += 1
                line.send(ECHO)
            elif word == TAKE and not took:
                took = line.take_pieces()
                line.send(_COUNT.pack(took))
            elif word == GIVE and not gave:
                asked_s = _MILLISECONDS.unpack(line.read(_MILLISECONDS.size))[0] / 1000
                gave = line.send_pieces(min(asked_s, GIVE_MOST_S))
            else:
                raise ConnectionError("it says what was not agreed")


def _address_of(host: str) -> str:
    """Returns the address that a host's name has, for its family."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def listening_place(text: str) -> tuple[str, int]:
    """Returns where to listen: the given HOST, or HOST:PORT; "": where other hosts get to, if there is a secret and
    such an address.

    Raises:
        ValueError: it is no address.
    """
    if text:
        return _with_port(text)
    own = [address for _, address in interfaces() if not is_loopback(address)] if own_secret() else []
    return (own[0] if own else "127.0.0.1"), PORT


def _with_port(text: str) -> tuple[str, int]:
    bare = text.startswith("[") and text.endswith("]") if "[" in text else ":" not in text
    return parse_address(f"{text}:{PORT}" if bare else text)


def listen(text: str, tell: Callable[[str], object], for_s: float = LISTEN_S) -> None:
    """Listens for who measures, for so long. Raises as `LinkListener` and `listening_place`."""
    host, port = listening_place(text)
    require(bool(own_secret()) or is_loopback(host), why_open(host))  # a mistake, and nothing to wait for
    listener = LinkListener(host, port, tell)
    where = text_of(listener.address)
    tell(
        f"listens at {where} for {for_s / 60:g} min (Ctrl-C ends it);"
        f" on the other host: torch-ecrec doctor --to {where}"
    )
    if is_loopback(listener.address[0]):
        tell("this host alone gets there: for others, set TORCH_ECREC_SECRET or TORCH_ECREC_SECRET_FILE on both")
    try:
        listener.serve(for_s)
    finally:
        listener.close()


# who calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Holds what was measured between two hosts.

    Args:
        connect_s, trip_s: the least time for a connection, and the median of a byte's there and back.
        there, back: bytes per second, from here to there, and from there to here.
    """

    connect_s: float
    trip_s: float
    there: float
    back: float


def measure(address: tuple[str, int], for_s: float = MEASURE_S) -> Measured:
    """Measures the way to a listener, for so long in each direction.

    Raises:
        Refused: it does not know our secret, or we do not know its.
        ClusterUnavailable: who listens there is no doctor.
        OSError: the connection broke, or it took too long.
    """
    secret = own_secret()
    began_s = time.monotonic()
    with socket.create_connection(address, PAUSE_S) as sock:
        connect_s = time.monotonic() - began_s
        line = _Line(sock, CALL_S)
        mine = draw()
        try:
            line.send(MAGIC + mine)
            if line.read(len(MAGIC)) != MAGIC:
                raise ConnectionError("what it says is no doctor's")
            theirs, shown = line.read(NONCE_BYTES), line.read(PROOF_BYTES)
        except OSError as error:
            raise ClusterUnavailable(f"who listens at {text_of(address)} is no doctor: {error}") from error
        if not is_proof(shown, secret, LISTENER, mine, theirs, CONTEXT):
            raise Refused(f"the doctor at {text_of(address)} has another secret than this process")
        line.send(proof(secret, CALLER, mine, theirs, CONTEXT))
        if line.read(len(MAGIC)) != MAGIC:
            raise Refused(f"the doctor at {text_of(address)} does not take the secret of this process")
        trips = sorted(_trip_s(line) for _ in range(ECHOES))
        began_s = time.monotonic()
        line.send(TAKE)
        line.send_pieces(for_s)
        there = _COUNT.unpack(line.read(_COUNT.size))[0] / (time.monotonic() - began_s)
        began_s = time.monotonic()
        line.send(GIVE + _MILLISECONDS.pack(round(1000 * for_s)))
        back = line.take_pieces() / (time.monotonic() - began_s)
    return Measured(connect_s, trips[len(trips) // 2], there, back)


def _trip_s(line: _Line) -> float:
    began_s = time.monotonic()
    line.send(ECHO)
    line.read(1)
    return time.monotonic() - began_s


def to_host(to: str, settings: Settings) -> list[Finding]:
    """Examines the network to a host where `doctor --listen` runs; "": none is to be."""
    if not to:
        return []
    listens = "torch-ecrec doctor --listen on the other host, and --to with the address that it prints"
    try:
        address = _with_port(to)
    except ValueError as error:
        return [_bad(str(error), "HOST or HOST:PORT", listens)]
    if (away := connect(address)[1]) is not None:
        step = away.remedy if "resolve" in away.found or "answer" in away.found else listens
        return [_bad(away.found, "a doctor that listens", step)]
    try:
        return [judge(text_of(address), measure(address), settings)]
    except Refused as error:
        step = "set TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE, to the same on both hosts"
        return [_bad(str(error), "the same secret here and there", step)]
    except (ClusterUnavailable, ValueError) as error:
        return [_bad(str(error), "a doctor that listens", listens)]
    except OSError as error:
        step = "look at the link: `ip -s link`, `ping`, and whether a firewall ends connections that carry much"
        return [_bad(f"the connection with {text_of(address)} broke: {error}", "a connection that stays", step)]


def _bad(found: str, wanted: str, remedy: str) -> Finding:
    return Finding("link", "ERROR", found, wanted, remedy)


def judge(where: str, measured: Measured, settings: Settings) -> Finding:
    """Judges what was measured: a rebuild is to read as fast as it may, and a step not to wait for long."""
    slower = min(measured.there, measured.back)
    found = (
        f"{where}: connects in {duration(measured.connect_s)}, round trip {duration(measured.trip_s)},"
        f" {measured.there / 1e6:,.0f} MB/s there, {measured.back / 1e6:,.0f} MB/s back"
    )
    figures = {
        "connect_s": measured.connect_s,
        "round_trip_s": measured.trip_s,
        "there_bytes_per_s": measured.there,
        "back_bytes_per_s": measured.back,
    }
    wanted = (
        f"{settings.rebuild_bytes_per_s / 1e6:,.0f} MB/s, that a rebuild may read (TORCH_ECREC_REBUILD_BYTES_PER_S),"
        f" and round trips of at most {duration(FAR_S)}"
    )
    if slower < settings.rebuild_bytes_per_s:
        step = (
            "look at the link's speed (ethtool DEVICE) and at who else uses it; a rebuild over it takes half of it, and"
            " longer than it could"
        )
        return Finding("link", "WARN", found, wanted, step, figures)
    if measured.trip_s > FAR_S:
        return Finding("link", "WARN", found, wanted, "take hosts of one network, or of one zone", figures)
    return Finding("link", "OK", found, figures=figures)
