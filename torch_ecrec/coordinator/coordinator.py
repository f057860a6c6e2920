"""Membership and placement: who is there, which slot lives where, and what follows when a process comes or goes.

`Coordinator` is a pure state machine: events in (`on_*`, with the time as an argument), messages out. No sockets, no
clock, no threads: `coordination.py` runs it behind a `ControlServer`, the simulated cluster behind virtual messages. It
is never in the path of the data.

Terms: *member*: a server or trainer process that has joined. *roster*: who is there, and how each is called; a new
version is told to all whenever somebody comes or goes. *epoch*: a version of the placement. *spare*: a server in the
roster without slots.

Life of a job: servers join -> trainers join with the same job -> all are told the roster -> slots are placed (epoch
1) -> training. A lost server: its slots go to a spare, else to the survivor with the fewest slots (or wait for a
process to come, as `without_spare` says), epoch + 1, incarnation + 1. A process that joins later becomes a spare; if a
server holds several slots and all slots are healthy, one is moved to it.

Lost trainers: whoever supervises them starts all of them again. A new *era* begins at once: servers stop, and say which
steps they can go back to ("reach"); the last that all of them can, and of which the dense model is kept, is where
training goes on; they go back, make it durable, and say so ("durable"); then the new trainers are told ("resume"). A
server that is lost meanwhile begins one more era: its slots' new hosts may not reach as far.

A member whose connection ended is not lost yet: `Router` finds out whether its process lives. If it comes back within
its lease ("rejoin", with the `session_id` it joined with) it is the member that it was: it is told again what it may
have missed, and says again what may not have arrived.

A coordinator that is started again knows nothing. Members notice the end of the one before, go on without, and tell the
new one what they know ("rejoin"); when everybody of the newest placement has, or `REGATHER_S` later, it goes on from
there: who is missing then is lost. Versions of the roster, epoch, era and term only grow, however often it regathers.

Messages come as structs of `messages.py`: types and ranges are right. What else is needed of one (a slot that is
placed) is looked at before anything changes; `on_message` returns why it did not count.

Each concern has a part with its own state (`state.py`): `members.py`, `job.py`, `roster.py`, `going_back.py`,
`placement.py`, `regathering.py`. What concerns several of them is in `admission.py`, `departures.py`,
`succession.py`. Here is what is said to the coordinator, and which part it concerns.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_ecrec.coordinator import admission, departures, succession
from torch_ecrec.coordinator.checkpointing import Manifests, Restorable
from torch_ecrec.coordinator.going_back import GoingBack
from torch_ecrec.coordinator.launches import Hold
from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.roster import Roster
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.coordinator.status import status_of
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import Address
from torch_ecrec.protocol.messages import FromCoordinator, Join, OfMember, OfSlot, Rejoin, SlotPlace
from torch_ecrec.protocol.status import Gathering, Report, Status
from torch_ecrec.spec.job import JobSpec

GATHERING_SAID_S = 5.0  # between two words of it to who waits


class Coordinator:
    """The decisions. What is to be sent goes to `send(name, message)`, what has happened to `announce(event)`.

    Args:
        settings: of the cluster.
        send: sends a message to a member by name.
        announce: tells observers and the log of an event.
        manifests: writes manifests of checkpoints; None: nobody does.
        before: the one that this one takes over from, since its cluster goes back to a checkpoint.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        send: Callable[[str, FromCoordinator], None],
        announce: Callable[[Event], None],
        manifests: Manifests | None = None,
        before: Coordinator | None = None,
    ) -> None:
        self._state = ClusterState(settings, send, announce, manifests)
        if before is not None:
            self._state.follow(before._state)
        self._send, self._announce = send, announce
        self._gathering: tuple[Gathering | None, float] = None, 0.0  # as it was said last, and when
        self.drain = self._state.table.moves.drain

    # what it knows, for who asks ----------------------------------------------------------------

    @property
    def members(self) -> dict[str, MemberRecord]:
        """Who has joined, by name."""
        return self._state.members.by_name

    @property
    def term(self) -> int:
        """How many coordinators there were before, as far as the members know."""
        return self._state.members.term

    @property
    def job(self) -> JobSpec | None:
        """The job that is trained; None until a trainer has joined."""
        return self._state.job.spec

    @property
    def load_end(self) -> int | None:
        """The step that training begins after (`wire.py`); None: loading has not ended."""
        return self._state.job.load_end

    @property
    def step(self) -> int:
        """The last step of training that somebody reported."""
        return self._state.job.step

    @property
    def fatal(self) -> str | None:
        """Why the job has ended for everybody; None: it has not."""
        return self._state.job.fatal

    @property
    def fatal_kind(self) -> str:
        """Which kind of end it is: data_loss or stopped."""
        return self._state.job.fatal_kind

    @property
    def goes_back(self) -> bool:
        """More is lost than can be repaired, and the job is to begin again from a checkpoint."""
        return self._state.job.goes_back

    @property
    def recovers_partly(self) -> bool:
        """Slots are lost beyond repair, and a checkpoint is needed that they begin anew with."""
        return bool(self._state.partial.pending) and self.fatal is None

    def restore_partly(self, found: Restorable | None, why: str) -> None:
        """Has lost slots begin anew. `found`: the newest checkpoint, and the job that it is of; None: there is none."""
        self._state.table.restore_partly(found, why)

    @property
    def restored(self) -> messages.Restored | None:
        """The checkpoint that it began with."""
        return self._state.job.restored

    @property
    def restores(self) -> bool:
        """Slots get their records of that checkpoint, or have no parities of them yet; training has not begun."""
        return self._state.job.restoring

    @property
    def run(self) -> str:
        """The identity of the cluster; see `RunningJob`."""
        return self._state.job.run

    @property
    def roster(self) -> Roster:
        """Who is in the cluster, and how each is called."""
        return self._state.roster

    @property
    def epoch(self) -> int:
        """The version of the placement; 0: nothing is placed yet."""
        return self._state.table.epoch

    @property
    def slots(self) -> list[SlotPlace]:
        """Where each slot lives; empty until they are placed for the first time."""
        return self._state.table.slots

    @property
    def era(self) -> int:
        """The number of the present era."""
        return self._state.eras.number

    @property
    def resume_step(self) -> int:
        """Where the era began: a step of the protocol."""
        return self._state.eras.resume_step

    @property
    def going_back(self) -> GoingBack | None:
        """The return to an earlier step that is under way: what slots have said since the era began. None once the
        first step of the era is durable everywhere."""
        return self._state.eras.going_back

    @property
    def regathering(self) -> bool:
        """Members of the one before are telling what they know. Whoever joins now would get a name of theirs."""
        return self._state.regathering.active

    @property
    def said(self) -> list[Rejoin]:
        """The messages of members that have rejoined since this coordinator started; empty once training goes on."""
        return list(self._state.regathering.said.values())

    def status(self, now_s: float) -> Status:
        """Returns everything that `torch-ecrec status` shows, but for what the `Router` knows."""
        return status_of(self._state, now_s)

    def checkpoint(self, after: int | None) -> str:
        """Asks for a checkpoint now, for a person; see `Checkpointing.ask`."""
        state = self._state
        return state.checkpointing.ask(after, state.step)

    def kill(self, name: str) -> str:
        """Tells a member to die, for somebody who wants to see it. Returns why not, or ""."""
        member = self.members.get(name)
        if member is None or not member.present:
            there = ", ".join(one.name for one in self._state.members.present())
            return f"no member is called {name!r}; there are {there or 'none'}"
        self._announce(events.Killed(name))
        self._send(name, messages.Die())
        return ""

    # joining ------------------------------------------------------------------------------------

    def refusal(self, join: Join) -> str | None:
        """Returns why a process may not join, or None."""
        return admission.join_refusal(self._state, join)

    def hold(self, join: Join, now_s: float) -> Hold | None:
        """Returns why a process that is not refused has to wait, or None."""
        return self._state.launches.hold(join, now_s)

    def forgets(self, join: Join) -> str | None:
        """Returns how the job of who joins differs from an abandoned one here, as `admission.forgets` does; else
        None."""
        return admission.forgets(self._state, join)

    def name_for(self, join: Join) -> str:
        """Returns a new name for a process that was not refused."""
        return self._state.members.name_for(join)

    def member_of_session(self, session_id: str) -> str | None:
        """Returns the name of the member with this session id, unless it is lost or has left."""
        return self._state.members.member_of_session(session_id)

    def on_join(self, name: str, join: Join, now_s: float) -> None:
        """Makes a process that was not refused a member, under a name from `name_for`."""
        state, role, rank = self._state, join.role, join.rank
        state.job.take(join.job)
        again = role == "trainer" and state.members.has_been(rank)
        if again:
            departures.lose_trainers(state, f"trainer {rank} was started again", now_s)
        state.members.add(name, join, now_s)
        self._welcome(name)
        self._tell_standstill(name, now_s)
        self._announce(events.Joined(name, role, rank, join.pid))
        if state.table.placed:
            state.table.send_to(name)
            if state.members.done and role == "server":
                self._send(name, messages.Left(sorted(state.members.done)))
            if again:
                departures.lose_absent(state)
        state.take_in(now_s)
        self._say_gathering(now_s)

    def on_join_again(self, name: str, now_s: float) -> None:
        """Welcomes a member once more whose connection ended before it had read its name; it keeps that name."""
        self.on_heard(name, now_s)
        self._welcome(name)
        if self.members[name].draining:
            self._send(name, messages.Drains(True))
        self._tell_again(name, now_s)

    def _welcome(self, name: str) -> None:
        state, job = self._state, self._state.job
        trained = self.load_end is not None or state.job.restored is not None
        restarted = trained and self.members[name].role == "trainer"
        self._send(name, messages.Welcome(name, job.code, restarted, self.term, state.transport, job.run, job.restored))
        job.tell_inexact(name)

    def _tell_standstill(self, name: str, now_s: float) -> None:
        if self.members[name].role == "trainer" and self._state.silence.stands:
            self._state.silence.send_to(name, now_s)

    def _tell_again(self, name: str, now_s: float) -> None:
        """Sends a member everything that it may have missed while it had no connection."""
        state = self._state
        if state.table.placed:
            state.table.send_to(name)
        elif self.load_end is not None:
            self._send(name, messages.Loaded(self.load_end))
        state.job.tell_inexact(name)
        if state.members.done:
            self._send(name, messages.Left(sorted(state.members.done)))
        self._tell_standstill(name, now_s)
        if name in state.roster.names and self.members[name].roster != state.roster.version:
            state.roster.send_to(name)

    # members that come back, and a coordinator that was started again ---------------------------

    def other_cluster(self, rejoin: Rejoin) -> str:
        """Returns why a member is of another cluster, and is turned away; "": it is of this one."""
        return admission.other_cluster(self._state, rejoin)

    def gives_way(self, rejoin: Rejoin, now_s: float) -> bool:
        """Returns whether the cluster of a member that was turned away is to be led in place of that which
        regathers."""
        return admission.gives_way(self._state, rejoin, now_s)

    def refuses_to_lead(self, rejoin: Rejoin) -> bool:
        """Returns whether this coordinator is to end for a member that it turned away: nobody else is there."""
        return admission.refuses_to_lead(self._state, rejoin)

    def build_refusal(self, word: messages.Compare) -> str | None:
        """Returns why no process of that build may join, or None; see `admission.build_refusal`."""
        return admission.build_refusal(self._state, word)

    def rejoin_refusal(self, rejoin: Rejoin) -> tuple[str, str] | None:
        """Returns why a member may not rejoin, with a kind for `fatal`, or None."""
        return admission.rejoin_refusal(self._state, rejoin)

    def on_rejoin(self, rejoin: Rejoin, now_s: float) -> None:
        """Takes back a member that was not refused: one of this coordinator, or of the one before, which it tells all
        about."""
        state, name = self._state, rejoin.name
        member = state.members.by_name.get(name)
        if not self.regathering and member is not None and member.session_id == rejoin.session_id:
            self.on_heard(name, now_s)
            self._announce(events.Back(name, member.pid))
            self._send(name, messages.Rejoined(self.term))
            member.endpoint, member.roster = rejoin.endpoint, rejoin.roster
            if member.draining != rejoin.draining:  # it was not there to hear it
                self._send(name, messages.Drains(member.draining))
            self._tell_again(name, now_s)
            state.take_in(now_s)
            return
        if not self.regathering:
            state.regathering.begin(now_s, state.members.lease_s)
            self._announce(events.Regathering())
        state.members.add(name, rejoin, now_s)
        member = state.members.by_name[name]
        member.endpoint, member.roster = rejoin.endpoint, rejoin.roster
        state.regathering.add(rejoin, now_s)
        self._tell_standstill(name, now_s)
        self._announce(events.Joined(name, rejoin.role, rejoin.rank, rejoin.pid))
        succession.go_on(state, now_s)

    # what members say ---------------------------------------------------------------------------

    def on_message(self, name: str, word: OfMember, now_s: float) -> str | None:
        """Handles a message of a member. Of one that was taken for lost nothing counts.

        Returns:
            Why it cannot be, where it is not only late; nothing has changed then.
        """
        if name not in self.members or not self.members[name].alive:
            return None
        if self.regathering and not isinstance(word, (messages.Beat, messages.Leave)):
            self.on_heard(name, now_s)
            return None  # it will be said again
        if (objection := admission.objection(self._state, self.members[name], word)) is not None:
            return objection
        self.on_heard(name, now_s, word.report if isinstance(word, (messages.Beat, messages.Leave)) else None)
        if isinstance(word, messages.Beat):
            if word.report.waits is not None:
                self._state.slowness.on_report(name, self.members[name].role == "trainer", word.report.waits)
            succession.on_beat(self._state, name, word, now_s)
        elif isinstance(word, messages.OfMove):
            self._state.table.moves.on_word(name, word)
        elif isinstance(word, OfSlot):
            self._on_slot(name, word)
        elif isinstance(word, messages.Listens):
            self.members[name].endpoint = word.endpoint
            self._state.take_in(now_s)
        elif isinstance(word, messages.Loaded):
            self._state.job.on_loaded(word.load_end)
        elif isinstance(word, messages.NotExact):
            self._state.job.on_inexact(word.step, word.what)
        elif isinstance(word, messages.Leave):
            departures.leave(self._state, name, now_s)
        elif isinstance(word, messages.Progress):
            self._state.job.step = max(self._state.job.step, word.step)
        return None

    def on_heard(self, name: str, now_s: float, report: Report | None = None) -> None:
        """Notes a heartbeat of a member, with its figures for `status`."""
        self._state.silence.on_heard(name, now_s)
        self._state.members.heard(name, now_s, report)

    def missing(self) -> dict[str, Address]:
        """Members of the coordinator before that are not back, and where they listen if they live."""
        return self._state.regathering.missing()

    def on_gone(self, name: str, address: Address, now_s: float, why: str) -> None:
        """Handles the end of a member's process, which is known for certain. `address`: where it listened.

        While members of before come, another process may have that name already.
        """
        if self.regathering and not self._listens_at(name, address):
            self._state.regathering.dead.add(name)
            succession.go_on(self._state, now_s)
        else:
            self.on_lost(name, now_s, why)

    def _listens_at(self, name: str, address: Address) -> bool:
        """Returns whether the member of this name is the process that listens, or listened, there."""
        return name in self.members and self.members[name].address == address

    def on_unreachable(self, name: str, is_so: bool, now_s: float) -> None:
        """Notes that a member's connection has ended. `is_so`: nothing answers where it listens; else its kernel
        does."""
        if name in self.members:
            self._state.silence.on_unreachable(name, is_so)
            departures.act_on_complaints(self._state, now_s)

    def on_computing(self, name: str, address: Address, now_s: float) -> None:
        """Notes that a silent member has answered a probe: it computes, and no thread of it can send heartbeats."""
        if self._listens_at(name, address) and self.members[name].present:
            self.on_heard(name, now_s)
            self._state.suspicion.on_computing(name, now_s)

    def _on_slot(self, name: str, word: OfSlot) -> None:
        """Handles a message from the host of a slot. One about an incarnation that was replaced is late, and
        ignored."""
        table, eras = self._state.table, self._state.eras
        if not table.is_hosted(word.slot, word.incarnation, by=name):
            return
        if isinstance(word, messages.Ready):
            table.on_ready(word.slot, word.incarnation, word.at)
        elif isinstance(word, messages.Rebuilt):
            table.on_rebuilt(word.slot, word.incarnation, word.partial_restores)
        elif isinstance(word, messages.Unrecoverable):
            table.on_unrecoverable(word.slot, word.reason)
        elif isinstance(word, messages.Damaged):
            self._announce(word)
            if word.used:
                what = f"of slot {word.slot}, {word.used} ({word.what}) were damaged, and a step may have used them"
                self._state.job.on_inexact(word.step, what)
        elif isinstance(word, messages.Mended):
            self._announce(word)
        elif isinstance(word, messages.Reach):
            if eras.on_reach(word):
                table.restore_again()
        elif isinstance(word, messages.Durable) and eras.on_durable(word):
            table.moves.rebalance()  # which had to wait for that
        elif isinstance(word, messages.OfCheckpoint):
            self._state.checkpointing.on_word(word, self._state.whole)

    # ends ---------------------------------------------------------------------------------------

    def on_lost(self, name: str, now_s: float, why: str) -> None:
        """Handles the loss of a member: its connection has ended, or its lease has run out."""
        departures.lose(self._state, name, now_s, why)

    def on_tick(self, now_s: float) -> None:
        """Looks after leases and whatever else has a time. Called about every `heartbeat_s`."""
        state = self._state
        state.members.forget_gone()
        state.suspicion.on_tick(state.members.since_tick_s(now_s), now_s)
        state.members.on_tick(now_s)
        departures.act_on_complaints(state, now_s)
        state.checkpointing.on_tick(now_s, state.whole, state.launches.finished)
        state.progress.on_tick(state.members.by_name.values(), state.table.slots, now_s)
        self._name_slow(now_s)
        succession.go_on(state, now_s)
        state.take_in(now_s)
        self._say_gathering(now_s)

    def _say_gathering(self, now_s: float) -> None:
        """Tells those who wait for the cluster to begin whom it lacks: all of them when that changes, trainers
        repeatedly."""
        word, (before, said_s) = self._state.gathering(), self._gathering
        if word is not None and (word != before or now_s >= said_s + GATHERING_SAID_S):
            self._state.members.tell(word, None if word != before else "trainer")
            self._gathering = word, now_s
        elif word is None:
            self._gathering = None, now_s

    def _name_slow(self, now_s: float) -> None:
        """Names servers that training waits for, and has their slots moved away where that is wanted and can be."""
        state, table = self._state, self._state.table
        slowness, move = state.slowness, table.moves.current
        slowness.forget({member.name for member in state.members.present("server")})
        writing = state.checkpointing.writing()
        excused = {place.server for i, place in enumerate(table.slots) if not place.healthy or i in writing}
        excused |= set() if move is None else {move.server, table.slots[move.slot].server}
        new, over = slowness.on_tick({place.server for place in table.slots}, excused, state.silence.quiet, now_s)
        for name in new:
            late = slowness.named[name]
            self._announce(events.Slow(name, *(round(number, 4) for number in (late.share, late.late_s, late.usual_s))))
        for name in over:
            self._announce(events.NotSlow(name))
        for name in slowness.named if state.drains_slow else ():
            if table.load_of(name) and not state.members.is_draining(name) and table.spares():
                self._announce(events.Draining(name, "it is slow"))
                self.drain(name, False)

    def stop(self, reason: str, kind: str) -> None:
        """Ends the job for everybody: kinds are data_loss and stopped."""
        self._state.job.stop(reason, kind)
