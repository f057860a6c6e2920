"""A router alone, with processes and connections that a test speaks for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from builds import BUILD
from coordinator_harness import nested

from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.router import Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.protocol.bounds import Address
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec

CODE = CodeSpec(3, 2, 1)
JOB = JobSpec((TableSpec("a", 30, 4, -1.0, 1.0),), CODE, 2)
BIRTHS = itertools.count(1)
Message = dict[str, Any]


class Wire:
    """A connection, as a test sees it."""

    def __init__(self, peer: str) -> None:
        self.peer, self.sent = peer, list[Message]()
        self.admitted = self.closed = False

    def send(self, message: Message) -> None:
        if not self.closed:
            self.sent.append(message)

    def admit(self) -> None:
        self.admitted = True

    def close(self) -> None:
        self.closed = True

    def told(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message["type"] == kind]


class Process:
    """What a process knows of its membership."""

    def __init__(self, role: str, rank: int = -1, **start: Any) -> None:
        number = next(BIRTHS)
        self.hello: Message = {
            **BUILD,
            "pid": number,
            "role": role,
            "session_id": f"b{number}",
        }
        self.hello["address"] = ["127.0.0.1", number]
        self.hello |= start
        if rank >= 0:
            self.hello |= {"rank": rank, "job": JOB.to_json(), **start}
        self.wire = Wire(f"process {number}")

    @property
    def name(self) -> str:
        name: str = self.wire.told("welcome")[-1]["name"]
        return name


class Running:
    """A router, its probes and its events."""

    def __init__(
        self,
        joins_from_s: float = 0.0,
        first_held_s: float = 0.0,
        looks: bool = False,
        led: int = 0,
        code: CodeSpec = CODE,
        **settings: Any,
    ) -> None:
        self.probes: list[tuple[str, int, Address]] = []
        self.events: list[Message] = []
        self.refusals: list[tuple[str, CodeSpec]] = []  # to lead
        self.now_s = 0.0
        self.router = Router(
            ClusterSettings(code, 1, **settings),
            probe=lambda *probe: self.probes.append(probe),
            announce=self.events.append,
            refuse_to_lead=lambda why, wanted: self.refusals.append((why, wanted)),
            joins_from_s=joins_from_s,
            first_held_s=first_held_s,
            looks=looks,
            led=led,
        )
        self.processes: list[Process] = []

    @property
    def core(self) -> Coordinator:
        return self.router.core

    def say(self, process: Process, **message: Any) -> None:
        self.router.on_message(process.wire, message, self.now_s)

    def join(self, role: str, rank: int = -1, **start: Any) -> Process:
        process = Process(role, rank, **start)
        self.processes.append(process)
        self.say(process, type="join", **process.hello)
        return process

    def close(self, wire: Wire) -> None:
        wire.closed = True
        self.router.on_closed(wire, self.now_s)

    def rejoin(self, process: Process, **fields: Any) -> Wire:
        """It comes back on another connection."""
        name, member = process.name, self.core.members.get(process.name)
        server = process.hello["role"] == "server"
        placed = [[p.server, p.incarnation, p.healthy] for p in self.core.slots]
        message = {
            **process.hello,
            "type": "rejoin",
            "name": name,
            "code": dataclasses.asdict(CODE),
            "term": self.core.term,
            "endpoint": name,
            "roster": member.roster if member else 1,
            "world": sorted({*self.core.roster.names, name}),
            "job": JOB.to_json(),
            "placement": {"epoch": self.core.epoch, "slots": placed} if placed else None,
            "era": self.core.era,
            "frozen": False,
            "resume_step": 0,
            "done": 0,
            "load_end": 0,
            "whole": [],
            "run": "run",
            "incarnations": [0, 0, 0] if server and placed else [],
            **fields,
        }
        welcome = process.wire.told("welcome")
        process.wire = Wire(process.wire.peer)
        self.router.on_message(process.wire, nested(message), self.now_s)
        process.wire.sent[:0] = welcome  # for its name
        return process.wire

    def answer(self, found: str, name: str | None = None) -> None:
        """The last probe (of that member) is answered."""
        probe = [p for p in self.probes if name in (None, p[0])][-1]
        self.router.on_probed(probe[0], probe[1], found, self.now_s)

    def start(self, **start: Any) -> Running:
        for _ in range(4):
            self.join("server")
        for rank in range(2):
            self.join("trainer", rank, **start)
        self.enter()
        assert self.core.epoch == 1
        return self

    def enter(self) -> None:
        for process in self.processes:
            if process.wire.told("welcome") and not process.wire.closed:
                self.say(process, type="listens", endpoint=process.name)

    def names(self, kind: str) -> list[str]:
        return [event["member"] for event in self.events if event["event"] == kind]
