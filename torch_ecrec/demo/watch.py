"""A watcher's connection with the coordinator that leads a cluster, made again whenever it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.transport.control import ControlClient
from torch_ecrec.transport.etcd import Leader
from torch_ecrec.transport.whereabouts import follow, reach, whereabouts


class Watch:
    """Watches a cluster. Use as a context manager: entering connects.

    Args:
        join: the cluster, as its members are told.
        on_message: gets every message, on a thread of the connection.
        limit_s: to connect, each time.
        within: calls a function where the cluster can be reached from.
        on_closed: gets why a connection has ended; another one is tried already.
        on_gone: likewise, where nobody answers any more.

    Attributes:
        leader: with whom there is a connection; None: with nobody at the moment.
        address: of the last one; "" before the first.

    Raises:
        ClusterUnavailable: on entering: nobody answers within `limit_s`.
    """

    def __init__(
        self,
        join: str,
        on_message: Callable[[dict[str, Any]], None],
        limit_s: float,
        within: Callable[[Callable[[], None]], None] = lambda action: action(),
        on_closed: Callable[[str], None] = lambda reason: None,
        on_gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.leader: Leader | None = None
        self.address = ""
        self._join, self._limit_s, self._within = join, limit_s, within
        self._on_message, self._on_closed, self._on_gone = on_message, on_closed, on_gone
        self._over = threading.Event()
        self._connecting = threading.Lock()  # one attempt at a time
        self._client: ControlClient | None = None

    def __enter__(self) -> Self:
        self._within(self._begin)
        return self

    def _begin(self) -> None:
        self._where = whereabouts(self._join)
        self._connect()
        follow(self._where, self._over, lambda: self.leader, self._on_other, log_error)

    def _connect(self) -> None:
        with self._connecting:
            client, self.leader = reach(
                self._where,
                self._limit_s,
                lambda leader, limit_s: ControlClient(*leader.address, self._on_message, self._on_end, limit_s),
            )
            self._client, self.address = client, self.leader.address[0]
            client.send({"type": "watch"})

    def _on_end(self, reason: str) -> None:
        """Called when a connection has ended: another coordinator may lead, or be about to."""
        self.leader = None
        if not self._over.is_set():
            self._on_closed(reason)
            Worker(lambda: self._connect_again(reason), "watch", log_error).start()

    def _on_other(self, reason: str) -> None:
        """Called when another coordinator leads than the connected one, whose host may be gone."""
        assert self._client is not None
        self._client.close()
        self._on_end(reason)

    def _connect_again(self, reason: str) -> None:
        try:
            self._within(self._connect)
        except ClusterUnavailable:
            self._on_gone(reason)
        if self._over.is_set():
            self.close()

    def ask(self) -> None:
        """Asks for a status, which comes as a message."""
        if self._client is not None:
            self._client.send({"type": "status"})

    def close(self) -> None:
        """Ends the connection, for good. May be called again."""
        self._over.set()
        if self._client is not None:
            self._client.close()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
