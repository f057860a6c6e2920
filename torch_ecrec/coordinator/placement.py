"""Which server hosts which slot.

A new *epoch* is a new version of that, which everybody is told. A slot whose host is lost goes to a *spare*, a server
of the roster without slots; else to the survivor with the fewest slots, or it waits for a process to come, as
`without_spare` says; its incarnation grows by one. Once all slots are healthy, a spare relieves a server that hosts
several of one: that slot moves while it goes on.

Slots move one at a time. The server that a slot moves to copies it (`server/importing.py`) and says when it is *level*;
told to, it lets the slot stop and takes the rest, and says that it has *arrived*. Then the placement changes: the
slot's next incarnation is there, as healthy as before. Nothing is decoded, nothing counts as lost, and if either server
dies before, it is the loss of one server, or of none that has a slot.

A move is of one placement and one era: whatever begins another ends it, and a word of it that comes later counts for
nothing. So a slot that has stopped may go on as soon as it hears of either.

Pure: events in, messages out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch_ecrec.coordinator import domains
from torch_ecrec.coordinator.checkpointing import Checkpointing, Restorable
from torch_ecrec.coordinator.going_back import Eras
from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.partial import PartialRecovery, beyond_repair
from torch_ecrec.coordinator.roster import Roster
from torch_ecrec.coordinator.silence import Silence
from torch_ecrec.coordinator.suspicion import Suspicion
from torch_ecrec.layout import repair
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import NO_HOST, SlotPlace
from torch_ecrec.protocol.status import UNREADABLE, Redundancy
from torch_ecrec.spec.job import JobSpec


def data_loss(job: JobSpec, gone: Collection[int]) -> str | None:
    """Returns a sentence about the rows that are lost for good with these slots; None if the code repairs all of
    them."""
    lost: dict[str, int] = {}  # table -> rows; a stripe that nothing lies on is no loss
    for table_group, layout in zip(job.table_groups, job.layouts, strict=True):
        if repair.rows_lost(layout, gone):
            for table, first in zip(table_group.tables, table_group.first_rows, strict=True):
                lost[table.name] = repair.rows_lost(layout, gone, first, first + table.rows)
    tables, rows = [name for name in lost if lost[name]], sum(lost.values())
    if not tables:
        return None
    code = job.code
    words = f"(k, r) = ({code.k}, {code.r})" if code.parities else "no protection"
    return (
        f"slots {sorted(gone)} are lost together, which {words} cannot repair: {rows} rows of {len(tables)} tables"
        f" ({', '.join(tables[:4])}{', ...' if len(tables) > 4 else ''})"
    )


class SlotTable:
    """Slots, and the servers that host them.

    Args:
        without_spare: "survivor" or "wait": who gets the slots of a lost server when there is no spare.
        announce: tells observers of an event.

    Attributes:
        epoch: version of the placement; 0: nothing is placed yet.
        slots: by slot; empty until they are placed for the first time.
        moves: slots that go elsewhere although nothing is lost.
    """

    def __init__(
        self,
        without_spare: str,
        job: RunningJob,
        members: Members,
        roster: Roster,
        eras: Eras,
        checkpointing: Checkpointing,
        partial: PartialRecovery,
        suspicion: Suspicion,
        silence: Silence,
        announce: Callable[[Event], None],
    ) -> None:
        self.without_spare, self._silence = without_spare, silence
        self._job, self._members, self._roster, self._eras = job, members, roster, eras
        self._checkpointing, self._partial, self._suspicion, self._announce = (
            checkpointing,
            partial,
            suspicion,
            announce,
        )
        self._risks, self._redundancies = domains.Risks(), domains.Redundancies()
        self.moves = Moves(self, members, eras, suspicion, announce)
        self.epoch = 0
        self.slots: list[SlotPlace] = []

    @property
    def placed(self) -> bool:
        """Slots have been given to servers: there is a job that goes on."""
        return bool(self.slots)

    def hosted_by(self, server: str) -> list[int]:
        """Returns the slots that a server hosts."""
        return [slot for slot, place in enumerate(self.slots) if place.server == server]

    def hosted_by_others(self, servers: Collection[str]) -> list[int]:
        """Slots whose host is none of these; those that wait for a host aside."""
        return [i for i, place in enumerate(self.slots) if place.server != NO_HOST and place.server not in servers]

    def load_of(self, server: str) -> int:
        """Returns how many slots it hosts."""
        return len(self.hosted_by(server))

    def spares(self) -> list[str]:
        """Servers without slots that may get some."""
        draining = self._members.is_draining
        return [server for server in self._heard() if self.load_of(server) == 0 and not draining(server)]

    def _heard(self) -> list[str]:
        """Servers that can be given slots, and were heard of lately."""
        return [server for server in self._roster.servers() if server not in self._silence.quiet]

    def _choose_host(self, slot: int) -> str:
        """Returns the host for a slot: a spare, else the survivor with the fewest slots (or nobody: wait for a process
        to come).

        Who could lately not reach all that it needs comes after all who could, spare or not; then who shares a failure
        domain with slots of the same stripes comes after who does not.
        """
        servers, spares = self._heard(), self.spares()
        servers = [server for server in servers if not self._members.is_draining(server)] or servers
        if self.without_spare == "wait":
            servers = spares
        if not servers:
            return NO_HOST
        where = self._members.domains()

        def rank(server: str) -> tuple[int, tuple[int, ...], int]:
            return self.troubles_of(server), self.shared(slot, server, where), self.load_of(server)

        return min(servers, key=rank)

    def shared(self, slot: int, server: str, where: dict[str, domains.Domain]) -> tuple[int, ...]:
        """Returns how close a slot on that server would be to slots that it must not be lost with; see
        `domains.shared`."""
        code = self._job.code
        if not code.parities:
            return ()
        companions = set(layout_of(code.slots, code.k, code.parities, 1).companions(slot))
        if slot <= code.parities:  # these keep the dense model
            companions |= {*range(code.parities + 1)} - {slot}
        others = [self.slots[i].server for i in sorted(companions) if i < len(self.slots)]
        return domains.shared(server, others, where)

    def at_risk(self) -> dict[str, tuple[list[int], str]]:
        """Returns the failure domains whose loss could not be repaired; see `domains.at_risk`."""
        job, spec = self._job, self._job.spec
        if not self.placed or spec is None or not job.code.parities:
            return {}
        servers, where = [place.server for place in self.slots], self._members.domains()
        return self._risks.look(self.epoch, servers, where, lambda slots: data_loss(spec, slots))

    def redundancy(self) -> Redundancy | None:
        """Returns how much could be lost now without losing data. None if nothing is placed yet, or while a checkpoint
        is restored, which can be read again."""
        job, spec = self._job, self._job.spec
        if not self.placed or spec is None or job.restoring:
            return None
        where = self._members.domains()
        return self._redundancies.look(
            hosted={server: self.hosted_by(server) for server in where},
            domains=where,
            lacking=self.unhealthy() | {slot for one in self._silence.quiet for slot in self.hosted_by(one)},
            spares=len(self.spares()),
            elsewhere=self.without_spare == "survivor",
            most=job.code.r if job.code.parities else 0,
            loss=lambda slots: data_loss(spec, slots),
        )

    def troubles_of(self, server: str) -> int:
        """Returns how many of those that it needs it could lately not reach."""
        return self._suspicion.troubles(server, self.needed(), self._members.by_name)

    def needed(self) -> list[str]:
        """Members that must reach each other: hosts of slots, and trainers."""
        hosts = [member.name for member in self._members.present("server") if self.load_of(member.name)]
        return hosts + [member.name for member in self._members.present("trainer")]

    def may_lose(self, servers: Collection[str]) -> bool:
        """Returns whether the slots of all of these, and of who is silent, could be repaired now, and would find
        hosts."""
        rest = set(self._heard()) - set(servers)
        hosts = rest & set(self.spares()) if self.without_spare == "wait" else rest
        return bool(hosts) and self.repairs({*servers, *self._silence.quiet})

    def repairs(self, servers: Collection[str]) -> bool:
        """Returns whether the code could repair the slots of all of these together, with those that lack records
        already."""
        if self._job.spec is None or self._job.restoring:  # who is lost then reads the checkpoint elsewhere
            return self._job.restoring
        slots = {slot for server in servers for slot in self.hosted_by(server)}
        return data_loss(self._job.spec, self.unhealthy() | slots) is None

    # slots find a host --------------------------------------------------------------------------

    def place_all(self) -> None:
        """Gives every slot a server of its own, for the first time."""
        servers, where = self._roster.servers(), self._members.domains()
        if len(servers) < self._job.code.slots:
            return
        for slot in range(self._job.code.slots):
            best = min(servers, key=lambda one: (self._members.is_draining(one), self.shared(slot, one, where)))
            servers.remove(best)
            self.slots.append(SlotPlace(best, 0, not self._job.restoring))
        self._partial.dense = set(range(len(self.slots)))
        if self._job.restoring:
            self._job.restore()
        self.new_epoch(events.PlacedFirst)

    def lose(self, slots: Collection[int]) -> None:
        """Slots whose host is gone: checks that the code can repair them, then finds them new hosts."""
        self._partial.on_lost(slots)
        if self._partial.pending:
            self._partial.begin(slots, "")  # what follows of that is decided for all of them
        elif self._job.restoring or not self._stop_if_lost(self.unhealthy() | set(slots), slots):
            self.leave(slots)

    def leaving(self, servers: Collection[str]) -> list[int]:
        """Slots without all their records on these servers that would find a host with less trouble to reach others."""
        partial = self._partial
        return [
            i
            for i in sorted(self.unhealthy() - partial.pending - partial.intact)
            if self.slots[i].server in servers
            and (host := self._choose_host(i)) != NO_HOST
            and self.troubles_of(host) < self.troubles_of(self.slots[i].server)
        ]

    def leave(self, slots: Collection[int]) -> None:
        """Gives these slots other hosts, with their next incarnations."""
        for i in slots:
            self._place_anew(i)
        self.new_epoch(events.PlacedAnew)
        if self._eras.going_back is not None:
            self._eras.begin(self._eras.going_back.keeps)

    def _place_anew(self, slot: int) -> None:
        self.slots[slot] = SlotPlace(self._choose_host(slot), self.slots[slot].incarnation + 1, False)

    def unhealthy(self) -> set[int]:
        """Slots that lack a host or records."""
        return {i for i, place in enumerate(self.slots) if not place.healthy} | self._partial.pending

    def _stop_if_lost(self, gone: Collection[int], lost: Collection[int]) -> bool:
        """Returns whether the code cannot repair these slots, `lost` the last of them: then follows what is to
        follow."""
        assert self._job.spec is not None
        if (reason := data_loss(self._job.spec, gone)) is not None:
            self._lose(lost, f"{reason}; {self._job.way_back}")
        return reason is not None

    def _lose(self, lost: Collection[int], reason: str) -> None:
        if self._partial.wanted and self._job.load_end is not None:  # before training, there is nothing to keep
            self._partial.begin(lost, reason)
        else:
            self._job.lose(reason)

    def restore_partly(self, found: Restorable | None, why: str) -> None:
        """Slots that are lost beyond repair begin anew with their records of a checkpoint.

        Args:
            found: the newest one, and the job that it is of; None: there is none, and `why`.
        """
        partial, job, reason = self._partial, self._job, self._partial.reason
        if job.fatal is not None or not partial.pending:
            return
        assert job.spec is not None
        if found is None:
            job.stop(f"{reason}; and there is no checkpoint to take their records from: {why}", "data_loss")
            return
        if job.refusal(found[1], placed=False) is not None:
            job.stop(f"{reason}; and the newest checkpoint, {found[0].folder}, is of another job", "data_loss")
            return
        layouts, gone = job.spec.layouts, self.unhealthy()
        lost = gone - partial.intact
        anew = beyond_repair(layouts, gone, lost) or set(lost)
        if len(anew) == len(self.slots):
            job.lose(f"{reason}; no slot is left that could keep its records")
            return
        for i in sorted(partial.pending | anew):
            self._place_anew(i)
        survivors = {holder for slot in anew for holder in layouts[0].holders(slot)} - lost
        for i in survivors:
            self.slots[i] = SlotPlace(self.slots[i].server, self.slots[i].incarnation, False)
        keepers = set(range(min(job.code.parities + 1, len(self.slots))))
        dense_lost = not (partial.dense - anew) & keepers
        lives: list[tuple[int, int, int | None]] = [(i, self.slots[i].incarnation, None) for i in sorted(anew)]
        restored = found[0]
        saves = self._checkpointing.saving.on(restored.folder)
        partial_restore = messages.PartialRestore(
            lives, restored.url, restored.folder, restored.done, dense_lost, saves
        )
        partial.restore_partly(partial_restore, survivors)
        if dense_lost:
            partial.dense |= keepers
        back = self._eras.going_back
        self._eras.begin(back is None or back.keeps)
        self.new_epoch(events.PlacedAnew)

    def restore_again(self) -> None:
        """Has all slots begin with their records of the checkpoint that the cluster began with, where they are."""
        self._job.restore()
        self._eras.restart()
        self.slots = [SlotPlace(place.server, place.incarnation + 1, False) for place in self.slots]
        self._partial.begin_again(len(self.slots))
        self.new_epoch(events.PlacedAnew)

    def check_restored(self) -> None:
        """Begins training once all slots have their records of that checkpoint, and all parities of them."""
        if self._job.restoring and self.placed and not self.unhealthy():
            self._job.on_restored()
            self._eras.begin(first=True)
            self.new_epoch(events.HealthyAgain)

    def place_waiting(self) -> None:
        """Slots that wait for a process to come get it."""
        changed = False
        for i, place in enumerate(self.slots):
            if place.server == NO_HOST and (host := self._choose_host(i)) != NO_HOST:
                self.slots[i] = SlotPlace(host, place.incarnation, False)
                changed = True
        if changed:
            self.new_epoch(events.PlacedAnew)

    def take_back(self, epoch: int, slots: list[SlotPlace], kept: Mapping[tuple[int, int], bool]) -> None:
        """Takes over the newest placement that members of the coordinator before know. Nobody is told yet.

        Args:
            kept: (slot, incarnation) that have all their records -> whether they have dense snapshots.
        """
        self.epoch, self.slots = epoch, slots
        lives = {i: (i, place.incarnation) for i, place in enumerate(slots)}
        anew = {(slot, life) for one in self._partial.partial_restores for slot, life, _ in one.lives}
        unhealthy = self.unhealthy()
        self._partial.intact = {i for i in unhealthy if lives[i] in kept}
        self._partial.reading = {i for i in unhealthy if lives[i] in anew and lives[i] not in kept}
        self._partial.dense = {i for i in lives if i not in unhealthy or kept.get(lives[i], False)}

    # words of it --------------------------------------------------------------------------------

    def new_epoch(self, event: type[events.NewEpoch]) -> None:
        """Makes the changed placement a new version, and sends it to everybody. `event`: the kind of change."""
        self.epoch += 1
        self._announce(event(self.epoch, [(place.server, place.incarnation) for place in self.slots]))
        if event in (events.PlacedAnew, events.Moved):
            self._checkpointing.on_placed_anew()
        for member in self._members.present():
            self.send_to(member.name)
        self.at_risk()
        if (risks := self._risks.news(self._members.domains())) is not None:
            self._announce(events.AtRisk(risks))

    def send_to(self, name: str) -> None:
        """Tells a member all that it needs to work with the slots."""
        assert self._job.spec is not None
        self._eras.send_to(name)  # before anything can be asked for
        send = self._members.send
        send(name, messages.Job(self._job.spec, self._job.run, self._job.restored))
        send(name, messages.Placed(messages.Placement(self.epoch, tuple(self.slots), self._job.restoring)))
        if self._job.load_end is not None:
            send(name, messages.Loaded(self._job.load_end))
        self._checkpointing.send_to(name)
        self._eras.send_renewed(name)
        self.moves.send_to(name)

    # what hosts say -----------------------------------------------------------------------------

    def is_hosted(self, slot: int, incarnation: int, by: str) -> bool:
        """Returns whether a member hosts this incarnation of a slot, and it is the present one."""
        place = self.slots[slot]
        return place.server == by and place.incarnation == incarnation

    def on_ready(self, slot: int, incarnation: int, at: int | None) -> None:
        """Notes that a slot's new host serves. `at`: if it began anew, the steps of training after which it goes on."""
        self._partial.on_ready(slot, incarnation, at)
        event = events.Rehosted if incarnation else messages.Ready
        self._announce(event(slot, incarnation))

    def on_rebuilt(self, slot: int, incarnation: int, partial_restores: int) -> None:
        """Notes that all records of a slot are there again, as its host said, which knew of so many
        `partial_restores`."""
        place = self.slots[slot]
        if place.healthy or partial_restores < len(self._partial.partial_restores):
            return
        self._partial.on_rebuilt(slot)
        self.slots[slot] = SlotPlace(place.server, incarnation, True)
        if self._job.restoring:
            self.check_restored()
        else:
            self.new_epoch(events.HealthyAgain)
        self._announce(events.SlotRebuilt(slot, incarnation))
        self.moves.rebalance()

    def on_unrecoverable(self, slot: int, reason: str) -> None:
        """Handles what a host has found: nobody has what it needs. `reason`: not even a checkpoint, or records are
        damaged."""
        if self._job.restoring:
            if self._job.fatal is None:
                self._job.lose(f"{UNREADABLE}: {reason}", "checkpoint")
        elif slot in self._partial.reading:
            self._job.lose(f"{self._partial.cause}; the newest checkpoint cannot be read: {reason}")
        elif reason and self._job.fatal is None:
            self._lose({slot}, reason)
        elif not self._stop_if_lost({slot} | self.unhealthy(), {slot}) and self._job.fatal is None:
            self._lose({slot}, f"slot {slot} is lost: no holder of its parities has caught up with it")


@dataclass
class Move:
    """A slot on its way.

    Args:
        slot: which.
        server: where it moves to.
        incarnation: that begins there.
        epoch, era: when it was begun.
        now: the server was told to let it stop where it is.
    """

    slot: int
    server: str
    incarnation: int
    epoch: int
    era: int
    now: bool = False


class Moves:
    """Which slot moves, and how far it is."""

    def __init__(
        self,
        table: SlotTable,
        members: Members,
        eras: Eras,
        suspicion: Suspicion,
        announce: Callable[[events.Event], None],
    ) -> None:
        self._table, self._members, self._eras, self._announce = table, members, eras, announce
        self._suspicion = suspicion
        self._move: Move | None = None

    @property
    def current(self) -> Move | None:
        """The one that is under way in this placement and era."""
        move = self._move
        is_over = move is None or (move.epoch, move.era) != (self._table.epoch, self._eras.number)
        return None if is_over else move

    def rebalance(self) -> None:
        """Moves a slot to a spare, once all is whole: from a server that drains, or has several, or where more is
        shared."""
        table = self._table
        if not table.slots or table.unhealthy() or self.current is not None:
            return
        if self._eras.going_back is not None:  # later: a new host does not know how far to go back
            return
        if self._move is not None and self._move.epoch == table.epoch:  # an era has ended it: who copies stops, too
            table.new_epoch(events.Stayed)
        if self._suspicion.learns:  # later: a spare may be where others cannot reach it
            return
        spares = [spare for spare in table.spares() if not table.troubles_of(spare)]
        if not spares:
            return
        leaving = [i for i, place in enumerate(table.slots) if self._members.is_draining(place.server)]
        crowded = [i for i, place in enumerate(table.slots) if table.load_of(place.server) > 1]
        where = self._members.domains()
        best = {i: min(spares, key=lambda spare: table.shared(i, spare, where)) for i in range(len(table.slots))}
        closer = [
            i
            for i, place in enumerate(table.slots)
            if place.server in where and table.shared(i, best[i], where) < table.shared(i, place.server, where)
        ]
        for i in (leaving or crowded or closer)[-1:]:
            self._move = Move(i, best[i], table.slots[i].incarnation + 1, table.epoch, self._eras.number)
            self.send_to(best[i])

    def drain(self, what: str, undo: bool) -> str:
        """Slots are to leave some servers; see `Members.drain`. Said once more, it changes nothing."""
        objection = self._members.drain(what, undo)
        move = self.current
        if undo and move is not None:
            self._table.new_epoch(events.Stayed)
        self.rebalance()
        return objection

    def stay(self) -> None:
        """Ends the move under way: the slot stays where it is, and perhaps another move begins."""
        if self.current is not None:
            self._table.new_epoch(events.Stayed)
            self.rebalance()

    def send_to(self, name: str) -> None:
        """Tells a member of the move (once more), if it is the one that copies."""
        move = self.current
        if move is not None and move.server == name:
            self._members.send(name, messages.Move(move.slot, move.incarnation, move.epoch, move.era, move.now))

    def on_word(self, name: str, word: messages.OfMove) -> None:
        """Handles a message from the server that a slot moves to."""
        move, table = self.current, self._table
        if move is None or (name, word.slot, word.incarnation) != (move.server, move.slot, move.incarnation):
            return
        if (word.epoch, word.era) != (move.epoch, move.era):
            return
        if isinstance(word, messages.Arrived):
            before = table.slots[move.slot].server
            table.slots[move.slot] = SlotPlace(move.server, move.incarnation, True)
            table.new_epoch(events.Moved)
            if self._members.is_draining(before) and not table.load_of(before):
                self._announce(events.Drained(before))
            self.rebalance()
        else:
            move.now = True
            self.send_to(name)

    def on_gone(self, name: str) -> None:
        """Handles the loss of a server without slots. If a slot was to move there, it stays, or moves elsewhere."""
        move = self.current
        if move is not None and move.server == name:
            self.stay()
