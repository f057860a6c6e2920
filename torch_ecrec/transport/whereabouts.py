"""Finds the coordinator from what a user has named: `HOST:PORT`, or `etcd://...` for whichever leads.

    where = whereabouts("etcd://10.0.0.1:2379/ads")
    leader = where.find(10.0)           # as soon as somebody leads, if that takes no longer than so many seconds

One that was named is where it was named. Whoever leads may change: `look` tells at once what etcd has, and `revision`
of `Leader` is another for each leader. etcd answers by its newest state, so what is looked up later is newer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol import status
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.addresses import parse_address, text_of
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.transport.control import request
from torch_ecrec.transport.etcd import FORM, EtcdKeys, EtcdUnavailable, Leader, View, parse_place

C = TypeVar("C")
LOOK_S = 0.25  # between two looks at who leads
STATUS_S = 10.0  # for an answer
ATTEMPT_S = 1.0  # for a connection, where another may lead meanwhile
ASK_S = 1.0  # of each address of etcd
PATIENT_S = 5.0  # of all of them together, where etcd is slow: coordinators are as patient


class Whereabouts(Protocol):
    """Finds the coordinator: `Named` has its address, `Elected` asks etcd.

    Attributes:
        changes: whether another coordinator may take its place.
    """

    changes: bool

    def find(self, limit_s: float) -> Leader:
        """Returns the coordinator; waits for one if there is none.

        Raises:
            ClusterUnavailable: none was found within `limit_s`.
        """

    def look(self) -> Leader | None:
        """Returns the coordinator of this moment; None if there is none, or it cannot be known."""


class Named:
    """A coordinator at a fixed address."""

    changes = False

    def __init__(self, text: str) -> None:
        self._leader = Leader(parse_address(text), 0)

    def find(self, limit_s: float) -> Leader:
        return self._leader

    def look(self) -> Leader | None:
        return self._leader


class Record(Protocol):
    """The record in etcd of who leads: `transport/etcd.py:EtcdKeys`, `tests/harness/etcd.py:VirtualEtcd`."""

    def look(self) -> View: ...


class Elected:
    """Finds the coordinator that leads, from any thread. `record`: replaces the keys in etcd that `text` names."""

    changes = True

    def __init__(self, text: str, record: Record | None = None) -> None:
        self._text, self._keys = text, record or _keys_of(text)
        self._lock = threading.Lock()  # of a session of HTTP
        self._why = ""

    def look(self) -> Leader | None:
        with self._lock:
            try:
                found = self._keys.look().leader
            except EtcdUnavailable as error:
                self._why = str(error)
                return None
            self._why = "nobody leads"
            return found

    def find(self, limit_s: float) -> Leader:
        deadline_s = time.monotonic() + limit_s
        while (found := self.look()) is None:
            if time.monotonic() + LOOK_S > deadline_s:
                raise ClusterUnavailable(f"no coordinator of {self._text} within {limit_s:g} s: {self._why}")
            time.sleep(LOOK_S)
        return found


def _keys_of(text: str) -> EtcdKeys:
    place = parse_place(text)
    return EtcdKeys(place, ASK_S, PATIENT_S / len(place.addresses))


def whereabouts(text: str) -> Whereabouts:
    """Returns how to find the coordinator, given `HOST:PORT` or `etcd://...`.

    Raises:
        ValueError: it is neither.
        ClusterError: the package for etcd is not installed.
    """
    if text.startswith(("etcd://", "etcds://")):
        return Elected(text)
    try:
        return Named(text)
    except ValueError as error:
        raise ValueError(f"{error}, or {FORM}") from None


def require_whereabouts(text: str) -> None:
    """Raises ValueError unless `text` names a coordinator. Contacts nobody."""
    if text.startswith(("etcd://", "etcds://")):
        parse_place(text)
    else:
        whereabouts(text)


def reach(where: Whereabouts, limit_s: float, connect: Callable[[Leader, float], C]) -> tuple[C, Leader]:
    """Connects with the coordinator; returns the connection and the coordinator.

    Args:
        connect: `connect(leader, seconds)`; raises ClusterUnavailable if there is no answer in that time.

    Raises:
        ClusterUnavailable: not within `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        leader = where.find(max(deadline_s - time.monotonic(), 0.0))
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            return connect(leader, min(left_s, ATTEMPT_S) if where.changes else limit_s), leader
        except ClusterUnavailable:
            if not where.changes or time.monotonic() > deadline_s:
                raise


def status_of(join: str, limit_s: float) -> Status:
    """Asks the coordinator for its status. Raises ClusterUnavailable after `limit_s`, or 10 s if that is less."""
    ask = lambda leader, seconds: ask_status(leader.address, seconds)  # noqa: E731
    return reach(whereabouts(join), min(STATUS_S, limit_s), ask)[0]


def ask_status(address: tuple[str, int], timeout_s: float = STATUS_S) -> Status:
    """Asks the coordinator at this address for its cluster's status.

    Raises:
        ClusterUnavailable: no answer within `timeout_s`, or one that is no status of this version.
    """
    answer = request(*address, {"type": "status"}, timeout_s)
    try:
        return status.of_message(answer)
    except ValueError as error:
        raise ClusterUnavailable(f"the coordinator at {text_of(address)} answered with {error}") from error


def is_followed(mine: Leader | None, leads: Leader | None) -> bool:
    """Returns whether another coordinator leads than `mine`, with which there is a connection.

    It is False where either is None: there is no connection, or it is not known who leads.

    Args:
        leads: what etcd has said after the connection was made. Its revision is smaller where etcd was put back.
    """
    return leads is not None and mine is not None and leads.revision != mine.revision


def follow(
    where: Whereabouts,
    over: threading.Event,
    connected: Callable[[], Leader | None],
    on_other: Callable[[str], None],
    on_error: Callable[[BaseException], object],
) -> None:
    """Watches, on a thread of its own, whether another coordinator leads than the one connected with.

    The host of one that led may be gone, or its process may hang: neither ends a connection.

    Args:
        connected: returns the coordinator that is connected with; None: there is no connection.
        on_other: gets the reason to give it up.
        on_error: gets the error that ended the watching.
    """

    def watch() -> None:
        while not over.wait(LOOK_S):
            mine, leads = connected(), where.look()
            if is_followed(mine, leads) and connected() is mine:  # else there is another connection by now
                assert leads is not None
                on_other(f"the coordinator at {text_of(leads.address)} leads now")

    if where.changes:
        Worker(watch, "leader", on_error).start()
