"""Finds out which other hosts this process cannot reach. The coordinator is told with each heartbeat.

A host is *tried* every `TRY_S`: a connection is asked for, and its kernel answers. It is *silent* since the first try
that nothing came after, and *unreachable* once that is longer than is usual there (`accrual.py`; `SILENT_S` until that
is known). Any answer of its kernel counts, a refusal too, and so does what comes on connections that are there
(`heard_s_ago`): so a process that is busy, stopped or gone, and a link that is slow, are never taken for a cut.
Whether a process lives is for others to find out.

Who is heard anyway, on connections that are there or because it tries itself, need not be tried: it is all the same,
every `HEARD_TRY_S`, since what is usual is learned from tries. So of two hosts that have nothing to say to each other
one tries the other, and in training hardly anybody anybody.

    tried at 0.0, 0.25, ...        answers come within 1 ms, and then none does: unreachable after 0.75
    tried at 0.0, heard at 1.2     silent for 1.2 s, now at most since the try after that; 1.8 s are usual now
    heard at 0.0, 0.1, ... 5.0     tried at 0.0, 1.0, ... 5.0, 5.4, 5.6

Each way counts: without the way there nothing is answered, without the way back no answer comes.

`Reachability` is pure. `Tries` has the sockets; all of it runs on one thread, but `follow` and `unreachable`, and
`close` when that thread has ended.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch_ecrec.runtime.addresses import family_of
from torch_ecrec.transport.accrual import Accrual

TRY_S = 0.25
HEARD_TRY_S = 1.0  # of who is heard anyway
HEARD_PAUSE = 1.5  # of the pauses between tries, without a word: tried again; then the other has been, if it tries
TRY_LIMIT_S = 2.0  # an answer that takes longer counts for nothing; others are asked for meanwhile
SILENT_S = 1.5  # before it is known what is usual
SILENT_LEAST_S, SILENT_MOST_S = 0.75, 5.0
LEAST_TRIES = 3  # in any silence that counts
DOUBT_S = 0.3  # silent for longer: connections that are there are looked at
TRIES_A_SECOND = 40.0  # at most: a large cluster is tried less often
VISITS_MOST = 1024  # between two looks
STALLED_S = 1.0  # between two looks: then this process stood still itself, and the others are given that time
SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # of descriptors, or memory: this process itself

Place = tuple[str, int]  # host, port


class Reachability:
    """Decides from the results of connection attempts which hosts are unreachable. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._tried: dict[str, float] = {}  # host -> when it was, last
        self._came: dict[str, float] = {}  # host -> when something has, without a try
        self._since: dict[str, float] = {}  # host -> the first try that nothing has come after
        self._usual: dict[str, Accrual] = {}  # host -> how long it is silent, as a rule
        self._looked_s: float | None = None

    def keep(self, hosts: Collection[str]) -> None:
        """Sets the hosts that are to be tried from now on."""
        self._tried = {host: self._tried.get(host, -math.inf) for host in hosts}
        self._came = {host: came_s for host, came_s in self._came.items() if host in self._tried}
        self._since = {host: since for host, since in self._since.items() if host in self._tried}
        fresh = {host: Accrual(SILENT_S, SILENT_LEAST_S, SILENT_MOST_S) for host in hosts if host not in self._usual}
        self._usual = {host: self._usual.get(host) or fresh[host] for host in hosts}

    def due(self, now_s: float) -> list[str]:
        """Returns the hosts to try now, and counts them as tried. Call it several times a second."""
        stalled_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if stalled_s > STALLED_S:
            self._since = {host: since + stalled_s for host, since in self._since.items()}
        due = [host for host in self._tried if self._next_s(host) <= now_s]
        for host in due:
            self._tried[host] = now_s
            self._since.setdefault(host, now_s)
        return due

    def untried(self, host: str) -> None:
        """Notes that a host that was due could not be tried: nothing can be said of its silence until it was."""
        self._since.pop(host, None)

    def wanted(self, now_s: float) -> bool:
        """Returns whether to look for data that came without a try: a host is due, or doubtful."""
        return any(self._next_s(host) <= now_s for host in self._tried) or self.doubtful(now_s)

    def came(self, host: str, at_s: float) -> None:
        """Notes that data of a host came, not in answer to a try. Like `heard`, and tries may be rarer."""
        self.heard(host, at_s)
        if host in self._tried:
            self._came[host] = max(at_s, self._came.get(host, at_s))

    def heard(self, host: str, at_s: float) -> None:
        """Notes that something of this host came at `at_s`: its silence has ended."""
        if at_s >= self._since.get(host, at_s + 1.0):
            self._usual[host].ended(at_s - self._since.pop(host))

    def silent(self, now_s: float) -> list[str]:
        """Returns the hosts that were tried and have been silent for longer than is usual for them."""
        tried_s = min(LEAST_TRIES * self._pause_s, SILENT_S)
        silences = ((host, now_s - since) for host, since in self._since.items())
        return [host for host, for_s in silences if for_s > tried_s and self._usual[host].is_suspicious(for_s)]

    def doubtful(self, now_s: float) -> bool:
        """Returns whether a host has been silent for more than `DOUBT_S`, longer than a good one would be."""
        return any(now_s - since > DOUBT_S for since in self._since.values())

    def _next_s(self, host: str) -> float:
        tried_s, pause_s = self._tried[host], self._pause_s
        if not self._usual[host].knows:
            return tried_s + pause_s
        came_s = self._came.get(host, -math.inf)
        return min(max(tried_s + pause_s, came_s + HEARD_PAUSE * pause_s), tried_s + max(HEARD_TRY_S, pause_s))

    @property
    def _pause_s(self) -> float:
        return max(TRY_S, len(self._tried) / TRIES_A_SECOND)


class Tries:
    """Tries to reach hosts: opens non-blocking connections, and closes each as soon as it is answered."""

    def __init__(self) -> None:
        self._hosts = Reachability()
        self._wanted: dict[str, Place] = {}  # by member; replaced as a whole
        self._places: dict[str, Place] = {}  # by host
        self._known: dict[str, Place] | None = None  # what `_places` was made of
        self._under_way: list[tuple[str, socket.socket, float]] = []  # host; until when
        self._visits: deque[tuple[str, float]] = deque(maxlen=VISITS_MOST)  # host; when
        self._unreachable: frozenset[str] = frozenset()  # hosts

    def follow(self, places: Mapping[str, Place], own_host: str = "") -> None:
        """Sets the members and their addresses. Members on this process's own host are not tried. From any thread."""
        self._wanted = {name: place for name, place in places.items() if place[0] != own_host}

    def visited(self, host: str) -> None:
        """Notes that this host has connected, which shows that both directions work. From any thread."""
        self._visits.append((host, time.monotonic()))

    def unreachable(self) -> list[str]:
        """Returns the members that cannot be reached, ordered by name. From any thread."""
        hosts = self._unreachable
        return sorted(name for name, place in self._wanted.items() if place[0] in hosts)

    def look(self, connections: Iterable[socket.socket], now_s: float, in_doubt: bool = False) -> None:
        """Continues the tries: reads answers, and begins those that are due.

        Args:
            connections: the open ones, with any peers.
            in_doubt: it takes long to find them, so that it is only done for a host that is silent.
        """
        if self._known is not self._wanted:
            self._known = self._wanted
            self._places = {place[0]: place for place in self._known.values()}
            self._hosts.keep(self._places)
        waiting = []
        for host, sock, until_s in self._under_way:
            answered = _answered(sock, self._places.get(host))
            if answered:
                self._hosts.heard(host, now_s)
            if answered is not None or now_s > until_s:
                sock.close()
            else:
                waiting.append((host, sock, until_s))
        self._under_way = waiting
        while self._visits:
            self._hosts.came(*self._visits.popleft())
        if self._hosts.doubtful(now_s) if in_doubt else self._hosts.wanted(now_s):
            for connection in connections:
                found = heard_s_ago(connection)
                if found is not None:
                    self._hosts.came(found[0], time.monotonic() - found[1])
        for host in self._hosts.due(now_s):
            try:
                self._under_way.append((host, _try(self._places[host]), now_s + TRY_LIMIT_S))
            except OSError as error:  # nobody there was asked
                if error.errno in SHORT:
                    self._hosts.untried(host)
        self._unreachable = frozenset(self._hosts.silent(now_s))

    def close(self) -> None:
        """Ends the tries. May be called again."""
        self._wanted = {}
        self._unreachable = frozenset()
        for _, sock, _ in self._under_way:
            sock.close()
        self._under_way = []


def refusing(host: str) -> socket.socket:
    """Reserves a port at this address at which nobody listens, so that the kernel refuses whoever tries it.

    It is for transports whose own port would take a try for a caller. Raises OSError.
    """
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    return sock


def _try(place: Place) -> socket.socket:
    """Begins to connect. Raises OSError where this process cannot, for want of descriptors or of a protocol."""
    sock = socket.socket(family_of(place[0]), socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it leaves nothing behind
    sock.connect_ex(place)
    return sock


def _answered(sock: socket.socket, place: Place | None) -> bool | None:
    """Returns whether a try was answered: True if it was, False if it never will be, None if not yet."""
    if place is None:
        return False
    found = sock.connect_ex(place)
    if found in (errno.EINPROGRESS, errno.EALREADY):
        return None
    return found in (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED)


def open_sockets() -> Iterator[socket.socket]:
    """Yields a copy of each open socket of this process, whoever opened it. It is closed at the next one."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # no more descriptors, or another system: what is open is not known
        names = os.listdir("/proc/self/fd")
    for name in names:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
            try:
                sock = socket.socket(fileno=copy)
            except OSError:  # meanwhile something else
                os.close(copy)
                raise
            with sock:
                yield sock


_TCP_INFO_BYTES = 60  # of struct tcp_info (linux/tcp.h): its first byte is the state,
_ESTABLISHED = 1
_LAST_RECEIVED = struct.Struct("=II")  # at byte 52: milliseconds since data and since an acknowledgement came


def heard_s_ago(sock: socket.socket) -> tuple[str, float] | None:
    """Returns the peer's host of a TCP connection, and the seconds since its kernel last sent something.

    It is None if `sock` is no TCP connection, or no longer one, or if the system does not tell.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return None
    with contextlib.suppress(OSError):  # it has ended
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES and info[0] == _ESTABLISHED:
            return str(sock.getpeername()[0]), min(_LAST_RECEIVED.unpack_from(info, 52)) / 1000.0
    return None
