"""A web server with a cluster that a test makes up, without torch: `watched()` serves it in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import coordinator_words
import msgspec
from coordinator_words import member, slot_report
from msgspec.structs import replace

from torch_ecrec.protocol.status import CheckpointsStatus, Filling, HostStatus, Redundancy, Report, SlotStatus, Status
from torch_ecrec.web.place import Place
from torch_ecrec.web.server import Cluster, WebServer

ANYWHERE = Place("127.0.0.1", 0)
SECRET = "correct-horse-battery-staple"


class MadeUp:
    """A coordinator that says what a test wants, on another thread.

    Attributes:
        status: that it says. `asked`: how often it did. `drains`, `checkpoints`, `kills`: what it was asked for.
        why: it refuses these. `may_kill`: somebody has allowed it.
        silent: it does not answer.
    """

    def __init__(self, status: Status | None = None) -> None:
        self.status = whole() if status is None else status
        self.asked, self.drains, self.why, self.silent = 0, list[tuple[str, bool]](), "", False
        self.checkpoints, self.kills, self.may_kill = 0, list[str](), False
        self.step: Callable[[Status], Status] = lambda status: status  # before each answer

    def cluster(self, again: bool = False) -> Cluster:
        def answer(done: Callable[[Any], None], what: Callable[[], Any]) -> None:
            if not self.silent:
                threading.Thread(target=lambda: done(what()), daemon=True).start()

        def status() -> bytes:
            self.asked += 1
            self.status = self.step(self.status)
            return msgspec.json.encode(self.status)

        def drain(what: str, undo: bool) -> str:
            self.drains.append((what, undo))
            return self.why

        def checkpoint() -> str:
            self.checkpoints += 1
            return self.why

        def kill(name: str) -> str:
            self.kills.append(name)
            return self.why

        return Cluster(
            lambda done: answer(done, status),
            lambda what, undo, done: answer(done, lambda: drain(what, undo)),
            lambda done: answer(done, checkpoint),
            (lambda name, done: answer(done, lambda: kill(name))) if self.may_kill else None,
            "10.0.0.1:29400",
            again,
        )


@contextlib.contextmanager
def watched(made_up: MadeUp | None = None, place: Place = ANYWHERE) -> Iterator[WebServer]:
    """A server that leads that cluster; None: it stands by."""
    server = WebServer(place)
    server.start()
    try:
        if made_up is not None:
            server.lead(made_up.cluster())
        yield server
    finally:
        server.close()


def reports(slot: int, incarnation: int = 0, step: int = 10, **more: Any) -> Report:
    """What a server of one slot reports."""
    sizes = {"record_bytes": 40_000_000, "parity_bytes": 20_000_000, "log_bytes": 3_000_000, "snapshot_bytes": 500_000}
    report = replace(slot_report(slot, incarnation), step=step, acknowledged=step - 1, watermark=step - 2, **sizes)
    return Report([replace(report, **more)], {"lookup": 50_000_000 + slot, "fold": 20_000_000, "snapshot": 1_000_000})


def whole(slots: int = 3, step: int = 100, **more: Any) -> Status:
    """A cluster that trains: a server for each slot, a spare, two trainers."""
    servers = [member(f"server-{i}", report=reports(i, step=step)) for i in range(slots)]
    trainers = [member(f"trainer-{i}", report=Report(bytes_sent={"push": 7_000_000, "lookup": 9})) for i in range(2)]
    kept = CheckpointsStatus("s3://bucket/run", "step-90", 90, 42.0, "", "", None, None)
    fields = {
        "slots": [SlotStatus(i, f"server-{i}", 0, True) for i in range(slots)],
        "members": [*servers, member(f"server-{slots}", spare=True), *trainers],
        "step": step,
        "checkpoints": kept,
        "time_s": 1.8e9,
        "epoch": 1,
        "tables": 4,
        "redundancy": Redundancy(
            1, 1, 1, True, [HostStatus("a", [f"server-{i}" for i in range(slots)], [], False, "")]
        ),
        "wanted_trainers": 2,
    }
    return coordinator_words.status(**{**fields, **more})


def rebuilding(status: Status, share: float) -> Status:
    """The same once server-1 was lost, and the spare has its slot, of which that share is there."""
    servers = {one.name: one for one in status.members}
    slots = len(status.slots)
    servers["server-1"] = replace(servers["server-1"], alive=False)
    report = reports(1, 1, status.step, rebuilt=share)
    servers[f"server-{slots}"] = replace(servers[f"server-{slots}"], spare=False, report=report)
    places = [
        replace(one, server=f"server-{slots}", incarnation=1, healthy=False, filling=Filling(share, 1e6, 20.0))
        if one.slot == 1
        else one
        for one in status.slots
    ]
    return replace(status, slots=places, members=list(servers.values()), epoch=2)
