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

A member whose connection ended is not lost yet: `Router` finds out whether its process lives. If it comes back within
its lease ("rejoin", with the `birth` it joined with) it is the member that it was: it is told again what it may have
missed, and says again what may not have arrived.

A coordinator that is started again knows nothing. Members notice the end of the one before, go on without, and tell the
new one what they know ("rejoin"); when everybody of the newest placement has, or `REGATHER_S` later, it goes on from
there: who is missing then is lost. Generation, epoch, era and life only grow, however often it regathers.

Messages come as structs of `messages.py`: types and ranges are right. What else is needed of one (a slot that is
placed, a generation that was formed) is looked at before anything changes; `on_message` returns why it did not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch_ecrec
from torch_ecrec.layout import repair
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import Join, OfMember, OfSlot, Rejoin
from torch_ecrec.protocol.wire import Placement, SlotPlace, training_step
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import WITHOUT_SPARE

Message = dict[str, Any]
FORMING_LIMIT_S = 20.0
REGATHER_S, SPARES_S = 2.5, 0.5  # for all who host a slot or train; then for the others
NAMES_OF_A_LIFE = 1000  # servers that one coordinator names: some of those before may be known to nobody any more
TICK_MOST_S = 2.0  # between two calls of `on_tick`, unless the coordinator itself was stopped
GONE_MOST = 100  # servers that are gone and still shown
NOBODY = "nobody"  # the host of a slot whose host is not known any more
FENCED = "this process was taken for lost, and what it did has been given to another"


@dataclass
class Member:
    """A process that has joined.

    Attributes:
        birth: a word that only this process says (`messages.Entering`).
        generation: the last RPC world it said it is in.
        alive: not lost. `left`: it said that it is done.
    """

    name: str
    role: str
    rank: int
    pid: int
    birth: str
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
        reach: slot -> what it said.
        step: where training goes on, once it is known.
        durable: slots at which it is durable.
    """

    reach: dict[int, messages.Reach] = field(default_factory=dict)
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
        self._regathered: dict[str, Rejoin] | None = None  # what members that rejoin have said; None: not now
        self._regathering_until_s = 0.0

    # members ------------------------------------------------------------------------------------

    def refusal(self, join: Join) -> str | None:
        """Why a process may not join, or None."""
        for name, mine in (("k", self.code.k), ("r", self.code.r), ("slots", self.code.slots)):
            wanted = getattr(join.code, name)
            if wanted is not None and wanted != mine:
                return f"code parameter {name} is {mine} in this cluster, got {wanted}"
        if self.fatal is not None:
            return f"the cluster has stopped: {self.fatal}"
        return None if join.job is None else self._job_refusal(join.job)

    def _job_refusal(self, job: JobSpec) -> str | None:
        if self.job is not None and replace(job, code=self.code).digest != self.job.digest:
            return "this cluster trains other tables (the table list, optimizers, seed or number of trainers differ)"
        return None

    def _code_json(self) -> Message:
        return {"slots": self.code.slots, "k": self.code.k, "r": self.code.r, "protection": self.code.protection}

    def name_for(self, join: Join) -> str:
        """A name for a process that was not refused."""
        if join.role == "trainer":
            life = max(self._lives.get(join.rank, 0), NAMES_OF_A_LIFE * self.life) + 1
            self._lives[join.rank] = life
            return f"trainer-{join.rank}" + (f"_{life}" if life > 1 else "")
        self._names += 1
        return f"server-{self._names - 1}"

    def born_as(self, birth: str) -> str | None:
        """The name of the member that said this word when it joined, unless it is lost or has left."""
        return next((m.name for m in self._present() if m.birth == birth), None)

    def on_join(self, name: str, join: Join, now_s: float) -> None:
        """A process that was not refused joins under a name from `name_for`."""
        role, rank = join.role, join.rank
        if join.job is not None and self.job is None:
            self.job = replace(join.job, code=self.code)
        same = [m for m in self.members.values() if m.role == role == "trainer" and m.rank == rank]
        if same:
            self._lose_trainers(f"trainer {rank} was started again", now_s)
        member = Member(name, role, rank, join.pid, join.birth, now_s, now_s)
        self.members[name] = member
        self._welcome(name)
        self.announce({"event": "joined", "member": name, "role": role, "rank": rank, "pid": member.pid})
        if self.slots:
            self._send_placement(name)
            if same:
                self._lose_absent()
        self._form(now_s)

    def on_join_again(self, name: str, now_s: float) -> None:
        """A member whose connection ended before it had read its name joins once more: it is the one that it was."""
        self.members[name].heard_s = now_s
        self._welcome(name)
        self._tell_again(name, now_s)

    def _welcome(self, name: str) -> None:
        restarted = self.origin is not None and self.members[name].role == "trainer"
        welcome = {"type": "welcome", "name": name, "code": self._code_json(), "restarted": restarted}
        self.send(name, {**welcome, "life": self.life, "transport": self.transport})

    def _tell_again(self, name: str, now_s: float) -> None:
        """All that a member may have missed while it had no connection."""
        if self.slots:
            self._send_placement(name)
        elif self.origin is not None:
            self.send(name, {"type": "loaded", "origin": self.origin})
        if name in self.world and self.members[name].generation != self.generation:
            self._send_generation(name)

    def _lose_absent(self) -> None:
        """Training goes on after its end: servers that left in between, quietly, are missing now."""
        here = {member.name for member in self._present("server")}
        slots = [i for i, place in enumerate(self.slots) if place.server and place.server not in here]
        if slots and self.fatal is None:
            self._lose(slots)

    # members that come back, and a coordinator that was started again ---------------------------

    @property
    def regathering(self) -> bool:
        """Members of the one before are telling what they know. Whoever joins now would get a name of theirs."""
        return self._regathered is not None

    def rejoin_refusal(self, rejoin: Rejoin) -> tuple[str, str] | None:
        """Why a member may not rejoin, with a kind for `fatal`, or None."""
        if self.fatal is not None:
            return self.fatal_kind, f"the cluster has stopped: {self.fatal}"
        if rejoin.code != self.code:
            return "stopped", f"code parameters are {self._code_json()} in this cluster, got {rejoin.code}"
        if rejoin.job is not None and (reason := self._job_refusal(rejoin.job)) is not None:
            return "stopped", reason
        member = self.members.get(rejoin.name)
        unknown = member is None or (member.alive and member.birth != rejoin.birth)
        if self.regathering or (unknown and not self.slots):
            said = self._regathered.get(rejoin.name) if self._regathered is not None else None
            if said is not None and said.birth != rejoin.birth and _newest(rejoin) <= _newest(said):
                return "fenced", FENCED  # somebody of that name is back already, and knows more
            return None
        if member is None or not member.alive or member.left or member.birth != rejoin.birth:
            return "fenced", FENCED
        epoch = rejoin.placement.epoch if rejoin.placement is not None else 0
        if rejoin.newest > self.generation or rejoin.era > self.era or epoch > self.epoch:
            return "fenced", f"{rejoin.name} knows a generation, an era or a placement that there has not been"
        return None

    def on_rejoin(self, rejoin: Rejoin, now_s: float) -> None:
        """A member that was not refused comes back: to this coordinator, or to the next one, which it tells all."""
        name, role = rejoin.name, rejoin.role
        member = self.members.get(name)
        if not self.regathering and member is not None and member.birth == rejoin.birth:
            member.heard_s = now_s
            self.announce({"event": "back", "member": name, "pid": member.pid})
            self.send(name, {"type": "rejoined", "life": self.life})
            if rejoin.generation == self.generation != member.generation:
                self.on_in_generation(name, rejoin.generation, now_s)
            self._tell_again(name, now_s)
            return
        if self._regathered is None:
            self._regathered, self._regathering_until_s = {}, now_s + REGATHER_S
            self.forming_until_s = None  # nobody's entry counts until it is over; then a world is formed anew
            self.announce({"event": "regathering"})
        self.members[name] = Member(name, role, rejoin.rank, rejoin.pid, rejoin.birth, now_s, now_s, rejoin.generation)
        self._regathered[name] = rejoin
        self.announce({"event": "joined", "member": name, "role": role, "rank": rejoin.rank, "pid": rejoin.pid})
        self._end_regathering(now_s)

    def _end_regathering(self, now_s: float) -> None:
        """Goes on as soon as everybody is back who is needed, or the time is up."""
        said = self._regathered
        if said is None or (not said and now_s < self._regathering_until_s):
            return
        placement = max((p for m in said.values() if (p := _placement_of(m))), key=lambda p: p.epoch, default=None)
        job = next((m.job for m in said.values() if m.job is not None), self.job)
        trainers = sum(m.role == "trainer" for m in said.values())
        furthest = max(said.values(), key=lambda m: m.generation, default=None)
        if placement is not None and job is not None and trainers == job.trainers and furthest is not None:
            hosts = {place.server for place in placement.slots if place.server}
            if hosts <= said.keys():  # spares may be a little later
                all_here = set(furthest.world) <= said.keys()
                self._regathering_until_s = min(self._regathering_until_s, now_s + (0 if all_here else SPARES_S))
        if now_s < self._regathering_until_s:
            return
        self._regathered = None
        self._learn(said.values(), job)
        self.announce({"event": "regathered", "epoch": self.epoch, "members": sorted(said)})
        for name in said:
            self.send(name, {"type": "rejoined", "life": self.life})
        if placement is None:
            self._form(now_s, even_if_complete=self._somebody_elsewhere())
            return
        self.epoch, self.slots = placement.epoch, self._as_told(placement.slots, said)
        unsettled = any(m.frozen for m in said.values()) or len({m.era for m in said.values()}) > 1
        strangers = any(m.role == "trainer" and m.name not in said for m in self.members.values())
        if unsettled or job is None or trainers < job.trainers or strangers:
            self._lose_trainers("trainers were lost while there was no coordinator", now_s)
        gone = [i for i, place in enumerate(self.slots) if place.server and place.server not in said]
        if gone:
            for server in sorted({self.slots[i].server for i in gone}):
                slots = [i for i in gone if self.slots[i].server == server]
                self.announce({"event": "lost", "member": server, "why": "it did not rejoin", "slots": slots})
            self._lose(gone)
        else:
            self._new_epoch("kept")
        self._form(now_s, even_if_complete=self._somebody_elsewhere())
        self._place_waiting()  # what waited for the end of a generation: there may be none that ends

    def _somebody_elsewhere(self) -> bool:
        """A member is in another generation than the present one, or in none."""
        return any(m.generation != self.generation for m in self._present())

    def _learn(self, said: Iterable[Rejoin], job: JobSpec | None) -> None:
        """Versions as the members know them. None ever becomes less: this coordinator may have given some, too."""
        for one in said:
            self.life = max(self.life, one.life + 1)
            if one.generation > 0 and one.generation >= self.generation:
                self.world = list(one.world)
            self.generation = max(self.generation, one.newest)
            self.era = max(self.era, one.era)
            self.resume_step = max(self.resume_step, one.resume_step)
            if one.origin is not None:
                self.origin = one.origin
        if job is not None and self.job is None:
            self.job = replace(job, code=self.code)
        self._names = max(self._names, NAMES_OF_A_LIFE * self.life)

    @staticmethod
    def _as_told(slots: Sequence[SlotPlace], said: Mapping[str, Rejoin]) -> list[SlotPlace]:
        """The newest placement that is known, with what its hosts know better.

        A slot may have been rebuilt since. And some may know a later life of it than the placement does, whose host did
        not come back: nobody listens to the life before any more.
        """
        found = list(slots)
        for message in said.values():
            for i, incarnation in message.whole:
                if found[i].incarnation == incarnation and found[i].server == message.name:
                    found[i] = SlotPlace(found[i].server, incarnation, True)
        for message in said.values():
            for i, incarnation in enumerate(message.incarnations):
                if incarnation > found[i].incarnation:
                    found[i] = SlotPlace(NOBODY, incarnation, False)
        return found

    # what members say ---------------------------------------------------------------------------

    def on_message(self, name: str, word: OfMember, now_s: float) -> str | None:
        """Anything that a member says; nothing counts that one says who was taken for lost.

        Returns:
            Why it cannot be, where it is not only late; nothing has changed then.
        """
        if name not in self.members or not self.members[name].alive:
            return None
        if self._regathered is not None and not isinstance(word, (messages.Beat, messages.Leave)):
            self.on_heard(name, now_s)
            return None  # it will be said again
        objection = self._objection(self.members[name], word)
        if objection is not None:
            return objection
        self.on_heard(name, now_s, word.report if isinstance(word, (messages.Beat, messages.Leave)) else None)
        if isinstance(word, OfSlot):
            self._on_slot(name, word)
        elif isinstance(word, messages.InGeneration):
            self.on_in_generation(name, word.generation, now_s)
        elif isinstance(word, messages.Loaded):
            self.on_loaded(word.origin)
        elif isinstance(word, messages.Leave):
            self.on_left(name, now_s)
        elif isinstance(word, messages.Progress):
            self.step = max(self.step, word.step)
        return None

    def _objection(self, member: Member, word: OfMember) -> str | None:
        """Why a member cannot say this, whenever it was sent; None: it may."""
        if isinstance(word, (messages.Loaded, messages.Progress)) and member.role != "trainer":
            return f"{member.name} is no trainer"
        if isinstance(word, messages.Progress) and word.trainer != member.rank:
            return f"`trainer` must be {member.rank}, got {word.trainer}"
        if isinstance(word, messages.InGeneration) and word.generation > self.generation:
            return f"`generation` must be at most {self.generation}, got {word.generation}"
        if isinstance(word, OfSlot):
            if member.role != "server":
                return f"{member.name} is no server"
            if word.slot >= len(self.slots):
                return f"`slot` must be below {len(self.slots)}, got {word.slot}"
        if isinstance(word, messages.Reach) and self.job is not None:
            trainers = {trainer for _, kept in word.snapshots for trainer in kept}
            if trainers and max(trainers) >= self.job.trainers:
                return f"`snapshots`: trainers must be below {self.job.trainers}, got {max(trainers)}"
        return None

    def on_heard(self, name: str, now_s: float, report: messages.Report | None = None) -> None:
        """A sign of life, with figures for `status`."""
        member = self.members[name]
        member.heard_s = now_s
        if report is not None:
            member.report = {**member.report, **messages.json_of(report)}

    def _on_slot(self, name: str, word: OfSlot) -> None:
        """What the host of a slot says of its present incarnation; that of a host before is late."""
        place = self.slots[word.slot]
        if place.server != name or place.incarnation != word.incarnation:
            return
        if isinstance(word, messages.Ready):
            self.on_ready(word.slot, word.incarnation)
        elif isinstance(word, messages.Rebuilt):
            self.on_rebuilt(word.slot, word.incarnation)
        elif isinstance(word, messages.Unrecoverable):
            self.on_unrecoverable(word.slot)
        elif isinstance(word, messages.Reach):
            self.on_reach(word)
        elif isinstance(word, messages.Durable):
            self.on_durable(word)

    def on_left(self, name: str, now_s: float) -> None:
        """A trainer that is done, or a server that ends.

        What a server hosted is lost as if it had been killed, unless training is over: whether trainers are there, go
        back, or are to be started again, the job may go on and needs it. Trainer 0 is not done before it has loaded the
        initial values: others wait for them, for as long as it is there.
        """
        member = self.members[name]
        if member.role == "server":
            if self.regathering or (not self._over and any(place.server == name for place in self.slots)):
                self.on_lost(name, now_s, "it left")
                return
        member.left = True
        if member.rank == 0 and self.slots and self.origin is None:
            reason = f"{name} left before it had loaded the initial values"
            for other in self._present("trainer"):
                self.send(other.name, {"type": "fatal", "kind": "trainers_lost", "reason": reason})
        self.announce({"event": "left", "member": name})
        self._give_up_forming(name, now_s)

    @property
    def _over(self) -> bool:
        """All trainers have said that they are done."""
        trainers = [m for m in self.members.values() if m.role == "trainer"]
        return bool(trainers) and all(m.left for m in trainers) and self.going_back is None

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
        self._forget_gone()
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

    def _forget_gone(self) -> None:
        """Servers that were lost or have left are shown for a while, not for ever."""
        gone = [m.name for m in self.members.values() if m.role == "server" and (m.left or not m.alive)]
        for name in gone[: max(0, len(gone) - GONE_MOST)]:
            del self.members[name]

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
        complete = {m.name for m in present} <= set(self.world)
        if complete and self.slots and not even_if_complete:
            return  # without slots, nobody knows that this world was formed: its end is what places them
        self.generation += 1
        self.world = [m.name for m in present]
        self.forming_until_s = now_s + FORMING_LIMIT_S
        for name in self.world:
            self._send_generation(name)

    def _send_generation(self, name: str) -> None:
        message = {"type": "generation", "generation": self.generation, "members": list(self.world)}
        self.send(name, {**message, "store": list(self.store), "timeout_s": FORMING_LIMIT_S})

    def _give_up_forming(self, name: str, now_s: float) -> None:
        """A world that waits for a member that does not come is formed anew without it."""
        if self._forming and name in self.world:
            self.forming_until_s = None
            self._form(now_s, even_if_complete=True)

    def on_in_generation(self, name: str, generation: int, now_s: float) -> None:
        """A member has joined the RPC world of a generation."""
        if name not in self.world and generation == self.generation:
            return  # it was left out of this one
        self.members[name].generation = max(generation, self.members[name].generation)
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
        lost: dict[str, int] = {}  # table -> rows; a stripe that nothing lies on is no loss
        for slab in self.job.slabs:
            layout = Layout(self.code.slots, self.code.k, self.code.parities, slab.rows)
            if repair.rows_lost(layout, gone):
                for table, first in zip(slab.tables, slab.first_rows, strict=True):
                    lost[table.name] = repair.rows_lost(layout, gone, first, first + table.rows)
        tables, rows = [name for name in lost if lost[name]], sum(lost.values())
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

    def on_reach(self, message: messages.Reach) -> None:
        """A slot says which steps it can go back to. When all have, the last that is common is chosen."""
        back = self.going_back
        if back is None or back.step is not None or message.era != self.era:
            return
        back.reach[message.slot] = message
        if len(back.reach) < len(self.slots):
            return
        assert self.job is not None
        least = max(said.floor for said in back.reach.values())
        most = min(said.applied for said in back.reach.values())
        # where the dense model is not needed: it is as it was made
        first = range(least, most + 1) if self.origin is None else [self.origin]
        parts: dict[int, set[int]] = {step: set(range(self.job.trainers)) for step in first}
        for said in back.reach.values():
            for step, trainers in said.snapshots:
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

    def on_durable(self, message: messages.Durable) -> None:
        """At a slot, the step where training goes on survives r losses. Once it does at all, trainers may start."""
        back = self.going_back
        if back is None or back.step is None or message.era != self.era:
            return
        back.durable.add(message.slot)
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
        self.announce({"event": "re-hosted" if incarnation else "ready", "slot": slot, "incarnation": incarnation})

    def on_rebuilt(self, slot: int, incarnation: int) -> None:
        """All records of a slot are there again."""
        place = self.slots[slot]
        if place.healthy:
            return
        self.slots[slot] = SlotPlace(place.server, incarnation, True)
        self._new_epoch("rebuilt")
        self.announce({"event": "slot rebuilt", "slot": slot, "incarnation": incarnation})
        self._rebalance()

    def on_unrecoverable(self, slot: int) -> None:
        """A new host found that nobody has what it needs."""
        self._is_data_loss({slot} | {i for i, place in enumerate(self.slots) if not place.healthy})
        if self.fatal is None:
            self.stop(f"slot {slot} is lost: no holder of its parities has caught up with it", "data_loss")

    # the job ------------------------------------------------------------------------------------

    def on_loaded(self, origin: int) -> None:
        """Trainer 0 has loaded the initial values: training begins after that step."""
        self.origin = origin
        for member in self._present():
            self.send(member.name, {"type": "loaded", "origin": origin})

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
            "going_back": self.going_back is not None,
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


def _placement_of(rejoin: Rejoin) -> Placement | None:
    said = rejoin.placement
    return None if said is None else Placement(said.epoch, tuple(SlotPlace(*place) for place in said.slots))


def _newest(rejoin: Rejoin) -> tuple[int, int]:
    """How new what a member knows is: epoch, generation."""
    return rejoin.placement.epoch if rejoin.placement is not None else -1, rejoin.generation
