"""What is known of a cluster over hosts while it trains and things are taken from it: steps, statuses, events.

Everything is watched from a host that nothing happens to. A status is asked for ten times a second, of whoever leads;
what is told meanwhile of losses and repairs comes as events, by the coordinator's clock, which is this machine's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_ecrec.bench.recovery_processes import CaseWatch, Stopped
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.observe import events
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.testing.hosts import Host
from torch_ecrec.transport.control import ControlClient
from torch_ecrec.transport.etcd import Leader
from torch_ecrec.transport.whereabouts import follow, reach, whereabouts

ASK_S = 0.1  # between two statuses
CONNECT_S = 2.0  # for one attempt; then the next
TICK_S = 0.05  # between two looks at a condition


class OutageWatch(CaseWatch):
    """Use as a context manager once the cluster has begun to start. `changed` guards all attributes.

    Args:
        trainers, slots: how many.
        log: the trainers'.
        join: the coordinator, as members are told.
        host: from which it is watched.

    Attributes:
        told: events with the moment of each, by `time.time()`; of one kind, some may lack while no coordinator leads.
        unhealthy_s: moments of statuses that had a slot which is not healthy.
        leader: who is connected with; None: nobody.
        tick: called by `until`, many times a second, on its thread.
    """

    def __init__(self, trainers: int, slots: int, log: Path, join: str, host: Host) -> None:
        super().__init__(trainers, slots, "outages", log)
        self._host, self._where = host, host.within(lambda: whereabouts(join))
        self.told: list[tuple[float, events.AnyEvent]] = []
        self.unhealthy_s: list[float] = []
        self.leader: Leader | None = None
        self.tick: Callable[[], None] = lambda: None
        self._client: ControlClient | None = None
        self._over = threading.Event()
        self._asking = Worker(self._ask, "outage-watch", log_error)

    # what arrives -------------------------------------------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        with self.changed:
            event = self.record.on_message(message)
            if event is not None:
                self.told.append((message["time_s"], event))
            elif message.get("type") == "status" and (status := self.record.status) is not None:
                if not all(slot.healthy for slot in status.slots):
                    self.unhealthy_s.append(status.time_s)
            self.changed.notify_all()

    def on_closed(self, reason: str) -> None:
        with self.changed:
            self.leader = None

    def _on_other(self, reason: str) -> None:
        """Another leads than the one that is connected with, whose host may be gone."""
        with self.changed:
            client, self.leader = self._client, None
        if client is not None:
            client.close()

    def _ask(self) -> None:
        while not self._over.wait(ASK_S):
            with self.changed:
                client, connected = self._client, self.leader is not None
            if not connected or client is None:
                with contextlib.suppress(ClusterUnavailable):  # nobody leads yet: the next turn tries again
                    self._host.within(self._connect)
            else:
                client.send({"type": "status"})

    def _connect(self) -> None:
        def connect(leader: Leader, limit_s: float) -> ControlClient:
            return ControlClient(*leader.address, self.on_message, self.on_closed, limit_s)

        client, leader = reach(self._where, CONNECT_S, connect)
        with self.changed:
            self._client, self.leader = client, leader
        client.send({"type": "watch"})

    # what is asked ------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        """Servers are to be lost here, so only an end of everything is trouble."""
        if self.record.fatal is not None:
            return f"the cluster has stopped: {self.record.fatal['reason']}"
        if self.ended:
            return f"trainer {self.ended[0]} has ended at step {self.steps.newest}"
        return None

    def until(self, lacks: Callable[[], str], limit_s: float, what: str) -> float:
        """Until nothing lacks; `lacks` says what does, and is called with `changed` held. Returns when, `time.time()`.

        Raises:
            Stopped: not within `limit_s`, or all has ended.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            self.tick()
            with self.changed:
                lacking, trouble = lacks(), self.trouble()
                if not lacking:
                    return time.time()
                if trouble is not None or time.monotonic() > deadline_s:
                    why = trouble or f"not within {limit_s:g} s: {lacking}"
                    raise Stopped(f"waiting for {what}: {why}; see {self.log.parent}")
                self.changed.wait(TICK_S)

    def trains(self, seconds: float, limit_s: float) -> tuple[float, float]:
        """Lets it train for so long; begin and end, all steps until which are known."""
        begin_s = time.time()

        def lacks() -> str:
            times = self.steps.times
            return "" if times and times[-1] >= begin_s + seconds else f"training, at step {len(times)}"

        self.until(lacks, seconds + limit_s, "steps")
        return begin_s, begin_s + seconds

    def __enter__(self) -> OutageWatch:
        self._host.within(lambda: follow(self._where, self._over, lambda: self.leader, self._on_other, log_error))
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._asking.join()
        if self._client is not None:
            self._client.close()
