"""Membership and placement: who is there, which slot lives where, and what follows when a process comes or goes.

`Coordinator` is a pure state machine: events in (`on_*`, with the time as an argument), messages out. No sockets, no
clock, no threads: `launch.py` runs it behind a `ControlServer`, the simulated cluster behind virtual messages. It is
never in the path of the data.

Terms: *member*: a server or trainer process that has joined. *generation*: a version of the RPC world, a list of
members; a new one is formed when somebody joins who is not in it, never because somebody died. *epoch*: a version of
the placement. *spare*: a server in the present generation without slots.

Life of a job: servers join -> trainers join with the same job -> a generation is formed -> slots are placed (epoch 1)
-> training. A lost server: its slots go to a spare, else to the survivor with the fewest slots (or wait for a process
to come, as `without_spare` says), epoch + 1, incarnation + 1. A process that joins later becomes a spare in a new
generation; if a server holds several slots and all slots are healthy, one is moved to it.

Lost trainers: whoever supervises them starts all of them again. A new *era* begins at once: servers stop, and say which
steps they can go back to ("reach"); the last that all of them can, and of which the dense model is kept, is where
training goes on; they go back, make it durable, and say so ("durable"); then the new trainers are told ("resume"). A
server that is lost meanwhile begins one more era: its slots' new hosts may not reach as far.

A coordinator that is started again knows nothing. Members notice the end of the one before, go on without, and tell the
new one what they know ("rejoin"); when everybody of the newest placement has, or `REGATHER_S` later, it goes on from
there: who is missing then is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch_ecrec
from torch_ecrec import recovery
from torch_ecrec.config import WITHOUT_SPARE, CodeSpec, JobSpec, require
from torch_ecrec.layout import Layout
from torch_ecrec.transport.wire import Placement, SlotPlace, training_step

Message = dict[str, Any]
FORMING_LIMIT_S = 20.0
REGATHER_S, SPARES_S = 2.5, 0.5  # for all who host a slot or train; then for the others
NAMES_OF_A_LIFE = 1000  # servers that one coordinator names: some of those before may be known to nobody any more
TICK_MOST_S = 2.0  # between two calls of `on_tick`, unless the coordinator itself was stopped
REJOIN_KEYS = {"version", "pid", "name", "role", "rank", "code", "life", "generation", "newest", "world"} | {
    "job", "placement", "era", "frozen", "resume_step", "origin", "whole", "incarnations"
}  # fmt: skip
NOBODY = "nobody"  # the host of a slot whose host is not known any more
FENCED = "this process was taken for lost, and what it did has been given to another"


@dataclass
class Member:
    """A process that has joined. `generation`: the last RPC world it said it is in."""

    name: str
    role: str
    rank: int
    pid: int
    joined_s: float
    heard_s: float
    generation: int = 0
    alive: bool = True
    left: bool = False
    report: Message = field(default_factory=dict)


@dataclass
class GoingBack:
    """What the slots have said since an era began.

    Attributes:
        reach: slot -> its message of that type.
        step: where training goes on, once it is known.
        durable: slots at which it is durable.
    """

    reach: dict[int, Message] = field(default_factory=dict)
    step: int | None = None
    durable: set[int] = field(default_factory=set)


class Coordinator:
    """The decisions. Every `on_*` returns nothing; what is to be sent goes to `send(name, message)`.

    Args:
        code: code parameters of the cluster; a job brings its tables, not its code.
        spares: servers that are waited for beyond one per slot before the first generation is formed.
        store: (host, port) of the store that RPC generations meet at.
        send: sends a message to a member by name.
        announce: tells observers and the log of an event, with its time.
        without_spare: "survivor" or "wait": who gets the slots of a lost server when there is no spare.
        lease_s: a member that was not heard of for so long is taken for lost.
    """

    def __init__(
        self,
        code: CodeSpec,
        spares: int,
        store: tuple[str, int],
        send: Callable[[str, Message], None],
        announce: Callable[[Message], None],
        without_spare: str = "survivor",
        lease_s: float = 10.0,
        transport: str = "sockets",
    ) -> None:
        require(
            without_spare in WITHOUT_SPARE, f"`without_spare` must be one of {WITHOUT_SPARE}, got {without_spare!r}"
        )
        self.code, self.spares, self.store = code, spares, store
        self.send, self.announce = send, announce
        self.without_spare, self.lease_s, self.transport = without_spare, lease_s, transport
        self.members: dict[str, Member] = {}
        self.job: JobSpec | None = None
        self.epoch = 0
        self.slots: list[SlotPlace] = []
        self.generation = 0
        self.world: list[str] = []  # members of the present generation, in rank order
        self.forming_until_s: float | None = None
        self.origin: int | None = None  # the step that training begins after (`wire.py`); None: loading has not ended
        self.fatal: str | None = None
        self.fatal_kind = "stopped"
        self.step = 0
        self.era = 0
        self.resume_step = 0  # where the era began
        self.going_back: GoingBack | None = None
        self.life = 0  # how many coordinators there were before, as far as the members know
        self._names = 0
        self._lives: dict[int, int] = {}  # trainer -> how often it has joined
        self._ticked_s = math.inf
        self._regathered: dict[str, Message] | None = None  # what members that rejoin have said; None: not now
        self._regathering_until_s = 0.0

    # members ------------------------------------------------------------------------------------

    def refusal(self, message: Message) -> str | None:
        """Why a process may not join, or None."""
        if message.get("version") != torch_ecrec.__version__:
            return f"version {message.get('version')} joins a cluster of version {torch_ecrec.__version__}"
        wanted = message.get("code") or {}
        for name, mine in (("k", self.code.k), ("r", self.code.r), ("slots", self.code.slots)):
            if wanted.get(name) is not None and wanted[name] != mine:
                return f"code parameter {name} is {mine} in this cluster, got {wanted[name]}"
        if self.fatal is not None:
            return f"the cluster has stopped: {self.fatal}"
        digest = message.get("job_digest")
        if digest is not None and self.job is not None and digest != self.job.digest:
            return "this cluster trains other tables (the table list, optimizers or seed differ)"
        if message.get("role") == "trainer":
            return self._trainer_refusal(message)
        return None if message.get("role") == "server" else f"not a role: {message.get('role')!r}"

    def _trainer_refusal(self, message: Message) -> str | None:
        try:
            rank, job = int(message["rank"]), JobSpec.from_json({**message["job"], "code": self._code_json()})
        except (KeyError, TypeError, ValueError) as error:
            return f"not a job: {error}"
        if self.job is not None and job.digest != self.job.digest:
            return "this cluster trains other tables (the table list, optimizers, seed or number of trainers differ)"
        if not 0 <= rank < job.trainers:
            return f"trainer rank must be below {job.trainers}, got {rank}"
        return None

    def _code_json(self) -> Message:
        return {"slots": self.code.slots, "k": self.code.k, "r": self.code.r, "protection": self.code.protection}

    def name_for(self, message: Message) -> str:
        """A name for a process that was not refused."""
        if message["role"] == "trainer":
            rank = int(message["rank"])
            life = self._lives[rank] = self._lives.get(rank, 0) + 1
            return f"trainer-{rank}" + (f"_{life}" if life > 1 else "")
        self._names += 1
        return f"server-{self._names - 1}"

    def on_join(self, name: str, message: Message, now_s: float) -> None:
        """A process that was not refused joins under a name from `name_for`."""
        role, rank = message["role"], message.get("rank", -1)
        if role == "trainer" and self.job is None:
            self.job = JobSpec.from_json({**message["job"], "code": self._code_json()})
        same = [m for m in self.members.values() if m.role == role == "trainer" and m.rank == rank]
        if same:
            self._lose_trainers(f"trainer {rank} was started again", now_s)
        member = Member(name, role, rank, message.get("pid", 0), now_s, now_s)
        self.members[name] = member
        restarted = self.origin is not None and role == "trainer"
        welcome = {"type": "welcome", "name": name, "code": self._code_json(), "restarted": restarted}
        self.send(name, {**welcome, "life": self.life, "transport": self.transport})
        self.announce({"event": "joined", "member": name, "role": role, "rank": rank, "pid": member.pid})
        if self.slots:
            self._send_placement(name)
        self._form(now_s)

    # after a restart of the coordinator ---------------------------------------------------------

    @property
    def regathering(self) -> bool:
        """Members of the one before are telling what they know. Whoever joins now would get a name of theirs."""
        return self._regathered is not None

    def rejoin_refusal(self, message: Message) -> tuple[str, str] | None:
        """Why a member of before may not rejoin, with a kind for `fatal`, or None."""
        if not message.keys() >= REJOIN_KEYS:
            return "stopped", f"not a member: {', '.join(sorted(REJOIN_KEYS - message.keys()))} missing"
        if message["version"] != torch_ecrec.__version__:
            return "stopped", f"version {message.get('version')} joins a cluster of version {torch_ecrec.__version__}"
        if self.fatal is not None:
            return self.fatal_kind, f"the cluster has stopped: {self.fatal}"
        if message["code"] != self._code_json():
            return "stopped", f"code parameters are {self._code_json()} in this cluster, got {message['code']}"
        if self._regathered is None and self.slots:
            return "fenced", FENCED
        return None

    def on_rejoin(self, message: Message, now_s: float) -> None:
        """A member of the coordinator before tells what it knows."""
        if self._regathered is None:
            self._regathered, self._regathering_until_s = {}, now_s + REGATHER_S
            self.announce({"event": "regathering"})
        name, role = message["name"], message["role"]
        member = Member(name, role, message["rank"], message["pid"], now_s, now_s, message["generation"])
        self.members[name] = member
        self._regathered[name] = message
        self.announce({"event": "joined", "member": name, "role": role, "rank": member.rank, "pid": member.pid})
        self._end_regathering(now_s)

    def _end_regathering(self, now_s: float) -> None:
        """Goes on as soon as everybody is back who is needed, or the time is up."""
        said = self._regathered
        if not said:
            return
        placements = [Placement.from_json(m["placement"]) for m in said.values() if m["placement"]]
        placement = max(placements, key=lambda p: p.epoch, default=None)
        job = next((JobSpec.from_json(m["job"]) for m in said.values() if m["job"]), None)
        trainers = sum(m["role"] == "trainer" for m in said.values())
        world: list[str] = max(said.values(), key=lambda m: int(m["generation"]))["world"]
        if placement is not None and job is not None and trainers == job.trainers:
            hosts = {place.server for place in placement.slots if place.server}
            if hosts <= said.keys():  # spares may be a little later
                all_here = set(world) <= said.keys()
                self._regathering_until_s = min(self._regathering_until_s, now_s + (0 if all_here else SPARES_S))
        if now_s < self._regathering_until_s:
            return
        self._regathered = None
        self.life = 1 + max(m["life"] for m in said.values())
        self._names = NAMES_OF_A_LIFE * self.life
        self._lives = dict.fromkeys(range(job.trainers if job is not None else 0), NAMES_OF_A_LIFE * self.life)
        self.job = job or self.job
        self.origin = max((m["origin"] for m in said.values() if m["origin"] is not None), default=None)
        self.generation, self.world = max(m["newest"] for m in said.values()), world
        eras = {m["era"] for m in said.values()}
        self.era = max(eras)
        if placement is not None:
            self.epoch, self.slots = placement.epoch, self._as_told(placement.slots, said)
        self.resume_step = max(m["resume_step"] for m in said.values())
        self.announce({"event": "regathered", "epoch": self.epoch, "members": sorted(said)})
        for name in said:
            self.send(name, {"type": "rejoined", "life": self.life})
        if placement is None:
            self._form(now_s)
            return
        assert job is not None
        frozen = any(m["frozen"] for m in said.values())
        strangers = any(m.role == "trainer" and m.name not in said for m in self.members.values())
        if frozen or len(eras) > 1 or trainers < job.trainers or strangers:
            self._lose_trainers("trainers were lost while there was no coordinator", now_s)
        gone = [i for i, place in enumerate(self.slots) if place.server and place.server not in said]
        if gone:
            for server in sorted({self.slots[i].server for i in gone}):
                slots = [i for i in gone if self.slots[i].server == server]
                self.announce({"event": "lost", "member": server, "why": "it did not rejoin", "slots": slots})
            self._lose(gone)
        else:
            self._new_epoch("kept")
        current = all(m.generation == self.generation for m in self._present())
        self._form(now_s, even_if_complete=not current)
        self._place_waiting()  # what waited for the end of a generation: there may be none that ends

    @staticmethod
    def _as_told(slots: Sequence[SlotPlace], said: Mapping[str, Message]) -> list[SlotPlace]:
        """The newest placement that is known, with what its hosts know better.

        A slot may have been rebuilt since. And some may know a later life of it than the placement does, whose host did
        not come back: nobody listens to the life before any more.
        """
        found = list(slots)
        for message in said.values():
            for i, incarnation in message["whole"]:
                if found[i].incarnation == incarnation and found[i].server == message["name"]:
                    found[i] = SlotPlace(found[i].server, incarnation, True)
        for message in said.values():
            for i, incarnation in enumerate(message["incarnations"]):
                if incarnation > found[i].incarnation:
                    found[i] = SlotPlace(NOBODY, incarnation, False)
        return found

    def on_message(self, name: str, message: Message, now_s: float) -> None:
        """Anything that a member says; nothing counts that one says who was taken for lost."""
        if name not in self.members or not self.members[name].alive:
            return
        self.on_heard(name, now_s, message.get("report"))
        kind = message["type"]
        if self._regathered is not None and kind != "leave":
            return  # it will be said again
        if kind == "in_generation":
            self.on_in_generation(name, message["generation"], now_s)
        elif kind == "ready":
            self.on_ready(message["slot"], message["incarnation"])
        elif kind == "rebuilt":
            self.on_rebuilt(message["slot"], message["incarnation"])
        elif kind == "unrecoverable":
            self.on_unrecoverable(message["slot"], message["incarnation"])
        elif kind == "reach":
            self.on_reach(message)
        elif kind == "durable":
            self.on_durable(message)
        elif kind == "loaded":
            self.on_loaded(message["origin"])
        elif kind == "leave":
            self.on_left(name, now_s)
        elif kind == "progress":
            self.on_progress(message)

    def on_heard(self, name: str, now_s: float, report: Message | None = None) -> None:
        """A sign of life, with figures for `status`."""
        member = self.members[name]
        member.heard_s = now_s
        if report is not None:
            member.report = {**member.report, **report}

    def on_left(self, name: str, now_s: float) -> None:
        """A trainer that is done, or a server that ends: what it hosted is lost as if it had been killed."""
        in_training = bool(self._present("trainer")) or self.going_back is not None
        if in_training and any(place.server == name for place in self.slots):
            self.on_lost(name, now_s, "it left")
            return
        self.members[name].left = True
        self.announce({"event": "left", "member": name})
        self._give_up_forming(name, now_s)

    def on_lost(self, name: str, now_s: float, why: str) -> None:
        """A member's connection ended, or its lease ran out."""
        member = self.members.get(name)
        if member is None or not member.alive:
            return
        member.alive = False
        if self._regathered is not None and self._regathered.pop(name, None) is not None:
            del self.members[name]  # as if it had not come back
            return
        if member.left or self.fatal is not None:
            return
        slots = [i for i, place in enumerate(self.slots) if place.server == name]
        self.announce({"event": "lost", "member": name, "why": why, "slots": slots})
        if member.role == "trainer":
            if self.slots:
                self._lose_trainers(f"{name} was lost ({why})", now_s)
            else:
                del self.members[name]
                if name in self.world:  # the generation being formed cannot be completed without it
                    self.generation, self.world, self.forming_until_s = self.generation + 1, [], None
            return
        self._give_up_forming(name, now_s)
        if slots:
            self._lose(slots)

    def on_tick(self, now_s: float) -> None:
        """Called about every `heartbeat_s`: leases, and generations that were not formed in time."""
        slept_s = now_s - self._ticked_s - TICK_MOST_S
        self._ticked_s = now_s
        for member in list(self.members.values()):
            if slept_s > 0:  # this process hung itself: it was not the members who were silent
                member.heard_s += slept_s + TICK_MOST_S
            if member.alive and not member.left and now_s - member.heard_s > self.lease_s:
                self.send(member.name, {"type": "fatal", "kind": "fenced", "reason": FENCED})  # when it wakes up
                self.on_lost(member.name, now_s, f"not heard of for {self.lease_s:g} s")
        if self.forming_until_s is not None and now_s > self.forming_until_s:
            self._give_up_forming(self.world[0], now_s)
        self._end_regathering(now_s)
        self._form(now_s)

    # the RPC world ------------------------------------------------------------------------------

    def _present(self, role: str | None = None) -> list[Member]:
        return [m for m in self.members.values() if m.alive and not m.left and role in (None, m.role)]

    @property
    def _forming(self) -> bool:
        return self.forming_until_s is not None

    def _form(self, now_s: float, even_if_complete: bool = False) -> None:
        """Forms a new generation if somebody who is there is not in the present one."""
        if self._forming or self.fatal is not None or self.job is None or self._regathered is not None:
            return
        servers, trainers = self._present("server"), self._present("trainer")
        if len(trainers) < self.job.trainers:
            trainers = []  # the others are on their way
        if not self.slots and (not trainers or len(servers) < self.code.slots):
            return
        present = servers + trainers
        if not present:
            return
        waited = now_s - max(m.joined_s for m in present)
        if not self.slots and len(servers) < self.code.slots + self.spares and waited < 5.0:
            return  # spares are on their way
        if not even_if_complete and {m.name for m in present} <= set(self.world):
            return
        self.generation += 1
        self.world = [m.name for m in present]
        self.forming_until_s = now_s + FORMING_LIMIT_S
        for name in self.world:
            self.send(
                name,
                {
                    "type": "generation",
                    "generation": self.generation,
                    "members": self.world,
                    "store": list(self.store),
                    "timeout_s": FORMING_LIMIT_S,
                },
            )

    def _give_up_forming(self, name: str, now_s: float) -> None:
        """A world that waits for a member that does not come is formed anew without it."""
        if self._forming and name in self.world:
            self.forming_until_s = None
            self._form(now_s, even_if_complete=True)

    def on_in_generation(self, name: str, generation: int, now_s: float) -> None:
        """A member has joined the RPC world of a generation."""
        self.members[name].generation = generation
        members = [self.members[n] for n in self.world if n in self.members]
        if generation != self.generation or any(m.alive and m.generation != generation for m in members):
            return
        self.forming_until_s = None
        self.announce({"event": "generation", "generation": generation, "members": self.world})
        if not self.slots:
            self._place_all()
        self._place_waiting()
        self._rebalance()
        self._form(now_s)

    # placement ----------------------------------------------------------------------------------

    def _in_world(self) -> list[str]:
        """Servers that can be given slots, in order of arrival."""
        world = set(self.world)
        return [m.name for m in self._present("server") if m.name in world and m.generation == self.generation]

    def _load_of(self, server: str) -> int:
        return sum(place.server == server for place in self.slots)

    def _choose_host(self) -> str | None:
        """A spare, else the survivor with the fewest slots (or nobody: wait for a process to come)."""
        servers = self._in_world()
        spares = [s for s in servers if self._load_of(s) == 0]
        if spares:
            return spares[0]
        if self.without_spare == "wait" or not servers:
            return None
        return min(servers, key=self._load_of)

    def _place_all(self) -> None:
        servers = self._in_world()
        if len(servers) < self.code.slots:
            return
        self.slots = [SlotPlace(servers[i], 0, True) for i in range(self.code.slots)]
        self._new_epoch("placed")

    def _lose(self, slots: list[int]) -> None:
        """Slots whose host died: checks that the code can repair them, then finds them new hosts."""
        gone = {i for i, place in enumerate(self.slots) if not place.healthy} | set(slots)
        if self._is_data_loss(gone):
            return
        for i in slots:
            host = self._choose_host()
            place = self.slots[i]
            self.slots[i] = SlotPlace(host or "", place.incarnation + 1, False)
        self._new_epoch("re-placed")
        if self.going_back is not None:
            self._new_era()

    def _is_data_loss(self, gone: set[int]) -> bool:
        assert self.job is not None
        rows = 0
        tables: list[str] = []
        for slab in self.job.slabs:
            layout = Layout(self.code.slots, self.code.k, self.code.parities, slab.rows)
            if recovery.unrecoverable_bases(layout, gone):
                rows += recovery.rows_lost(layout, gone)
                tables += [table.name for table in slab.tables]
        if not tables:
            return False
        code = f"(k, r) = ({self.code.k}, {self.code.r})" if self.code.parities else "no protection"
        self.stop(
            f"slots {sorted(gone)} are lost together, which {code} cannot repair: {rows} rows of {len(tables)} tables"
            f" ({', '.join(tables[:4])}{', ...' if len(tables) > 4 else ''}); restore a checkpoint",
            "data_loss",
        )
        return True

    def _place_waiting(self) -> None:
        """Slots that wait for a process to come get it."""
        changed = False
        for i, place in enumerate(self.slots):
            if place.server == "" and (host := self._choose_host()) is not None:
                self.slots[i] = SlotPlace(host, place.incarnation, False)
                changed = True
        if changed:
            self._new_epoch("re-placed")

    def _rebalance(self) -> None:
        """A spare takes a slot from a server that holds several, once nothing is being rebuilt."""
        spares = [s for s in self._in_world() if self._load_of(s) == 0]
        crowded = [i for i, place in enumerate(self.slots) if self._load_of(place.server) > 1]
        if not spares or not crowded or not all(place.healthy for place in self.slots) or not self.code.parities:
            return
        if self.going_back is not None:  # later: a new host does not know how far to go back
            return
        i = crowded[-1]
        self.slots[i] = SlotPlace(spares[0], self.slots[i].incarnation + 1, False)
        self._new_epoch("moved")

    def _new_epoch(self, why: str) -> None:
        self.epoch += 1
        self.announce({"event": why, "epoch": self.epoch, "slots": [[p.server, p.incarnation] for p in self.slots]})
        for member in self._present():
            self._send_placement(member.name)

    def _send_placement(self, name: str) -> None:
        assert self.job is not None
        self._send_era(name)  # before anything can be asked for
        self.send(name, {"type": "job", "job": self.job.to_json()})
        self.send(name, {"type": "placement", "placement": Placement(self.epoch, tuple(self.slots)).to_json()})
        if self.origin is not None:
            self.send(name, {"type": "loaded", "origin": self.origin})

    # going back ---------------------------------------------------------------------------------

    def _lose_trainers(self, why: str, now_s: float) -> None:
        """One is lost, and none can go on without it: those that live are told to end, and a new era begins."""
        for member in [m for m in self.members.values() if m.role == "trainer"]:
            if member.alive and not member.left:
                self.send(member.name, {"type": "fatal", "kind": "trainers_lost", "reason": why})
            del self.members[member.name]
        if self.slots:
            self._new_era()
        gone = next((name for name in self.world if name not in self.members), None)
        if gone is not None:
            self._give_up_forming(gone, now_s)

    def _new_era(self) -> None:
        self.era += 1
        self.going_back = GoingBack()
        trainers = [member.name for member in self._present("trainer")]  # those of the new era who are here already
        self.announce({"event": "era", "era": self.era, "trainers": trainers})
        for member in self._present("server"):
            self._send_era(member.name)

    def _send_era(self, name: str) -> None:
        """Servers hear how far they go back as soon as it is known, trainers where they start once it is durable."""
        back = self.going_back
        if self.members[name].role == "server":
            step = self.resume_step if back is None else back.step
            self.send(name, {"type": "era", "era": self.era, "step": step, "origin": self.origin})
        elif back is None:
            self.send(name, {"type": "resume", "era": self.era, "step": self.resume_step, "origin": self.origin})

    def on_reach(self, message: Message) -> None:
        """A slot says which steps it can go back to. When all have, the last that is common is chosen."""
        back, slot = self.going_back, message["slot"]
        if back is None or back.step is not None or message["era"] != self.era:
            return
        if self.slots[slot].incarnation != message["incarnation"]:
            return
        back.reach[slot] = message
        if len(back.reach) < len(self.slots):
            return
        assert self.job is not None
        least = max(said["floor"] for said in back.reach.values())
        most = min(said["applied"] for said in back.reach.values())
        # where the dense model is not needed: it is as it was made
        first = range(least, most + 1) if self.origin is None else [self.origin]
        parts: dict[int, set[int]] = {step: set(range(self.job.trainers)) for step in first}
        for said in back.reach.values():
            for step, trainers in said["snapshots"]:
                parts.setdefault(step, set()).update(trainers)
        least_known = max(least, self.origin or 0)
        known = [s for s, trainers in parts.items() if least_known <= s <= most and len(trainers) == self.job.trainers]
        reach = training_step(least, self.origin), training_step(most, self.origin)
        if not known:
            self.stop(
                f"the trainers were lost, and no dense snapshot of the steps {reach[0]} to {reach[1]} is kept, which"
                " are those that the servers can go back to (snapshots are off?): restore a checkpoint",
                "stopped",
            )
            return
        back.step = max(known)
        step = training_step(back.step, self.origin)
        self.announce({"event": "going back", "era": self.era, "step": step, "applied": reach[1]})
        for member in self._present("server"):
            self._send_era(member.name)

    def on_durable(self, message: Message) -> None:
        """At a slot, the step where training goes on survives r losses. Once it does at all, trainers may start."""
        back, slot = self.going_back, message["slot"]
        if back is None or back.step is None or message["era"] != self.era:
            return
        if self.slots[slot].incarnation != message["incarnation"]:
            return
        back.durable.add(slot)
        if len(back.durable) == len(self.slots):
            self.resume_step, self.going_back = back.step, None
            self.step = training_step(back.step, self.origin)
            self.announce({"event": "resumable", "era": self.era, "step": self.step})
            for member in self._present("trainer"):
                self._send_era(member.name)
            self._rebalance()

    # slots --------------------------------------------------------------------------------------

    def on_ready(self, slot: int, incarnation: int) -> None:
        """A slot's new host serves."""
        if self.slots[slot].incarnation == incarnation:
            self.announce({"event": "re-hosted" if incarnation else "ready", "slot": slot, "incarnation": incarnation})

    def on_rebuilt(self, slot: int, incarnation: int) -> None:
        """All records of a slot are there again."""
        place = self.slots[slot]
        if place.incarnation != incarnation or place.healthy:
            return
        self.slots[slot] = SlotPlace(place.server, incarnation, True)
        self._new_epoch("rebuilt")
        self.announce({"event": "slot rebuilt", "slot": slot, "incarnation": incarnation})
        self._rebalance()

    def on_unrecoverable(self, slot: int, incarnation: int) -> None:
        """A new host found that nobody has what it needs."""
        if self.slots[slot].incarnation != incarnation:
            return
        self._is_data_loss({slot} | {i for i, place in enumerate(self.slots) if not place.healthy})
        if self.fatal is None:
            self.stop(f"slot {slot} is lost: no holder of its parities has caught up with it", "data_loss")

    # the job ------------------------------------------------------------------------------------

    def on_loaded(self, origin: int) -> None:
        """Trainer 0 has loaded the initial values: training begins after that step."""
        self.origin = origin
        for member in self._present():
            self.send(member.name, {"type": "loaded", "origin": origin})

    def on_progress(self, message: Message) -> None:
        self.step = max(self.step, int(message.get("step", 0)))

    def stop(self, reason: str, kind: str) -> None:
        """Ends the job for everybody: kinds are data_loss and stopped."""
        self.fatal, self.fatal_kind = reason, kind
        self.announce({"event": "fatal", "kind": kind, "reason": reason})
        for member in self._present():
            self.send(member.name, {"type": "fatal", "kind": kind, "reason": reason})

    def status(self, now_s: float) -> Message:
        """Everything that `torch-ecrec status` shows."""
        resume_step = self.resume_step if self.going_back is None else self.going_back.step
        return {
            "version": torch_ecrec.__version__,
            "code": self._code_json(),
            "transport": self.transport,
            "generation": self.generation,
            "epoch": self.epoch,
            "era": self.era,
            "resume_step": None if resume_step is None else training_step(resume_step, self.origin),
            "step": self.step,
            "fatal": self.fatal,
            "tables": len(self.job.tables) if self.job else 0,
            "slots": [
                {"slot": i, "server": p.server, "incarnation": p.incarnation, "healthy": p.healthy}
                for i, p in enumerate(self.slots)
            ],
            "members": [
                {
                    "name": m.name,
                    "role": m.role,
                    "pid": m.pid,
                    "alive": m.alive,
                    "left": m.left,
                    "spare": m.role == "server" and self._load_of(m.name) == 0,
                    "silent_s": round(now_s - m.heard_s, 3),
                    "report": m.report,
                }
                for m in self.members.values()
            ],
        }
