"""A coordinator alone, with members that a test speaks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from builds import BUILD
from msgspec.structs import replace

from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import BadMessage, Join, Placement, Rejoin
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

TABLES = (TableSpec("a", 30, 4, -1.0, 1.0), TableSpec("b", 20, 8, -1.0, 1.0, OptimizerSpec("adagrad")))


class Harness:
    """A coordinator, what it sent and what it announced."""

    def __init__(self, code: CodeSpec | None = None, spares: int = 1, trainers: int = 2, **options: Any) -> None:
        self.code = code or CodeSpec(3, 2, 1)
        self.job = JobSpec(TABLES, self.code, trainers)
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.core = Coordinator(ClusterSettings(self.code, spares, **options), self._send, self._announce)
        self.now_s = 0.0
        self.births = 0

    def _send(self, name: str, message: messages.FromCoordinator) -> None:
        self.sent.append((name, messages.json_of(message)))

    def _announce(self, event: Event) -> None:
        self.events.append(events.json_of(event))

    def message(self, **fields: Any) -> dict[str, Any]:
        self.births += 1
        return {
            "type": "join",
            **BUILD,
            "pid": 1,
            "session_id": f"session {self.births}",
            **fields,
        }

    def join(self, **fields: Any) -> str:
        join = messages.from_member(self.message(**fields))
        assert isinstance(join, Join)
        assert self.core.refusal(join) is None
        name = self.core.name_for(join)
        self.core.on_join(name, join, self.now_s)
        return name

    def why_not(self, **fields: Any) -> str | None:
        """Why a process may not join: its message is none, or the coordinator does not want it."""
        try:
            join = messages.from_member(self.message(**fields))
        except BadMessage as error:
            return str(error)
        assert isinstance(join, Join)
        return self.core.refusal(join)

    def server(self) -> str:
        return self.join(role="server")

    def trainer(self, rank: int, **fields: Any) -> str:
        return self.join(role="trainer", rank=rank, job=self.job.to_json(), **fields)

    def enter(self) -> None:
        """Everybody who is there and has not said yet how it is called says so."""
        for member in list(self.core.members.values()):
            if member.present and not member.endpoint:
                self.say(member.name, type="listens", endpoint=member.name)

    def say(self, name: str, **message: Any) -> str | None:
        """What a member says; returns why it cannot be, if so."""
        word = messages.from_member(message)
        assert isinstance(word, messages.OfMember)
        return self.core.on_message(name, word, self.now_s)

    def start(self, servers: int = 4, domains: Sequence[str] = ()) -> Harness:
        """All have joined and entered. `domains`: of the servers, in the order in which they come."""
        for domain in domains or [""] * servers:
            self.join(role="server", domain=domain)
        for rank in range(self.job.trainers):
            self.trainer(rank)
        self.now_s += 10
        self.core.on_tick(self.now_s)
        self.enter()
        assert self.core.epoch == 1
        return self

    def rebuilt(self, slot: int) -> None:
        self.say(self.places[slot], type="rebuilt", slot=slot, incarnation=self.core.slots[slot].incarnation)

    def moving(self) -> tuple[str, dict[str, Any]]:
        """The last server that was told to copy a slot, and how that is called."""
        name, word = [(name, word) for name, word in self.sent if word["type"] == "move"][-1]
        return name, {key: word[key] for key in ("slot", "incarnation", "epoch", "era")}

    def move(self) -> None:
        """It does."""
        (name, move), before = self.moving(), self.places
        self.say(name, type="level", **move)
        assert self.sent[-1] == (name, {"type": "move", **move, "now": True}) and self.places == before
        self.say(name, type="arrived", **move)
        assert self.places != before and all(place.healthy for place in self.core.slots)

    @property
    def places(self) -> list[str]:
        return [place.server for place in self.core.slots]

    def lose(self, name: str) -> None:
        self.core.on_lost(name, self.now_s, "eof")


def reach(h: Harness, slot: int, applied: int, floor: int = 0, **fields: Any) -> None:
    """A slot says which steps it can go back to; it holds the dense snapshots of the last two that it has applied."""
    kept = [[step, step, list(range(h.job.trainers))] for step in range(max(1, applied - 1), applied + 1)]
    message = {"era": h.core.era, "incarnation": h.core.slots[slot].incarnation, "snapshots": kept, **fields}
    h.say(h.places[slot], type="reach", slot=slot, applied=applied, floor=floor, **message)


def durable(h: Harness, slot: int) -> None:
    incarnation = h.core.slots[slot].incarnation
    h.say(h.places[slot], type="durable", era=h.core.era, slot=slot, incarnation=incarnation)


def going_on(h: Harness, seconds: float, cuts: dict[str, list[str]], silent: tuple[str, ...] = ()) -> None:
    """Everybody beats four times a second, with these complaints."""
    for _ in range(round(4 * seconds)):
        h.now_s += 0.25
        for member in list(h.core.members.values()):
            if member.present and member.name not in silent:
                accused = [name for name in cuts.get(member.name, []) if name in h.core.members]
                h.say(member.name, type="beat", unreachable=accused)
        h.core.on_tick(h.now_s)


def told(h: Harness, name: str, kind: str) -> list[dict[str, Any]]:
    return [message for member, message in h.sent if member == name and message["type"] == kind]


def known(h: Harness, name: str, **fields: Any) -> dict[str, Any]:
    """What a member of `h` tells another coordinator."""
    member = h.core.members[name]
    placement = messages.json_of(Placement(h.core.epoch, tuple(h.core.slots))) if h.core.slots else None
    message = {"type": "rejoin", "name": name, "role": member.role, "rank": member.rank, "code": asdict(h.code)}
    message |= {"endpoint": name, "roster": member.roster, "world": list(h.core.roster.names) or [name]}
    message |= {
        "term": h.core.term,
        "job": h.job.to_json(),
        "placement": placement,
        "era": 0,
        "frozen": False,
        "resume_step": 0,
        "done": 0,
        "whole": [[i, p.incarnation] for i, p in enumerate(h.core.slots) if p.server == name and p.healthy],
        "incarnations": [p.incarnation for p in h.core.slots] if member.role == "server" else [],
        "session_id": member.session_id,
        "run": "run",
    }
    return nested(h.message(**{**message, "load_end": 0, **fields}))


def nested(message: dict[str, Any]) -> dict[str, Any]:
    """A `rejoin` whose fields are given side by side: what its node knows is an object of its own."""
    inner = {name: value for name, value in message.items() if name in messages.Known.__struct_fields__}
    return {**{name: value for name, value in message.items() if name not in inner}, "known": inner}


def word_of(message: dict[str, Any]) -> Rejoin:
    word = messages.from_member(message)
    assert isinstance(word, Rejoin)
    return word


def rejoin(h: Harness, message: dict[str, Any]) -> None:
    word = word_of(message)
    assert h.core.rejoin_refusal(word) is None
    h.core.on_rejoin(word, h.now_s)


MEMBERS = ("server-0", "server-1", "server-2", "server-3", "trainer-0", "trainer-1")


def taken_over(without: tuple[str, ...] = ()) -> Harness:
    """The next coordinator: slots 0 and 1 are on one server, and a spare might have one of them."""
    before, after = Harness().start(), Harness()
    slots = [
        replace(place, server="server-0", incarnation=1) if i == 1 else place
        for i, place in enumerate(before.core.slots)
    ]
    placement = messages.json_of(Placement(before.core.epoch + 2, tuple(slots)))
    members = [name for name in MEMBERS if name not in ("server-1", *without)]
    for name in members:
        rejoin(after, known(before, name, placement=placement, world=members))
    return after


def go_back(h: Harness) -> None:
    """All slots reach step 5, and make it durable."""
    for slot in range(len(h.places)):
        reach(h, slot, 5)
    for slot in range(len(h.places)):
        durable(h, slot)
    assert h.core.going_back is None and h.core.resume_step == 5
