"""Membership and placement: who is there, which slot lives where, and what follows when a process comes or goes.

`Coordinator` is a pure state machine: events in (`on_*`, with the time as an argument), messages out. No sockets, no
clock, no threads: `coordination.py` runs it behind a `ControlServer`, the simulated cluster behind virtual messages. It
is never in the path of the data.

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

Each concern has a part with its own state (`state.py`): `members.py`, `job.py`, `world.py`, `going_back.py`,
`placement.py`, `regathering.py`. What concerns several of them is in `admission.py`, `arrivals.py`, `departures.py`,
`succession.py`. Here is what is said to the coordinator, and which part it concerns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_ecrec.coordinator import admission, arrivals, departures, succession
from torch_ecrec.coordinator.checkpointing import Ledger, Restorable
from torch_ecrec.coordinator.going_back import GoingBack
from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.coordinator.status import status_of
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import FromCoordinator, Join, OfMember, OfSlot, Rejoin
from torch_ecrec.protocol.wire import SlotPlace
from torch_ecrec.spec.job import JobSpec


class Coordinator:
    """The decisions. What is to be sent goes to `send(name, message)`, what has happened to `announce(event)`.

    Args:
        settings: of the cluster.
        send: sends a message to a member by name.
        announce: tells observers and the log of an event.
        ledger: writes manifests of checkpoints; None: nobody does.
        before: the one that this one takes over from, since its cluster goes back to a checkpoint.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        send: Callable[[str, FromCoordinator], None],
        announce: Callable[[Event], None],
        ledger: Ledger | None = None,
        before: Coordinator | None = None,
    ) -> None:
        self._state = ClusterState(settings, send, announce, ledger)
        if before is not None:
            self._state.follow(before._state)
        self._send, self._announce = send, announce
        self.drain = self._state.table.moves.drain

    # what it knows, for who asks ----------------------------------------------------------------

    @property
    def members(self) -> dict[str, MemberRecord]:
        """Who has joined, by name."""
        return self._state.members.by_name

    @property
    def life(self) -> int:
        """How many coordinators there were before, as far as the members know."""
        return self._state.members.life

    @property
    def job(self) -> JobSpec | None:
        """What is trained; None until a trainer has joined."""
        return self._state.job.spec

    @property
    def origin(self) -> int | None:
        """The step that training begins after (`wire.py`); None: loading has not ended."""
        return self._state.job.origin

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

    def renew(self, found: Restorable | None, why: str) -> None:
        """Lost slots begin anew. `found`: the newest checkpoint, and the job that it is of; None: there is none."""
        self._state.table.renew(found, why)

    @property
    def restored(self) -> messages.Restored | None:
        """The checkpoint that it began with."""
        return self._state.job.restored

    @property
    def run(self) -> str:
        """See `RunningJob`."""
        return self._state.job.run

    @property
    def generation(self) -> int:
        """The number of the present RPC world."""
        return self._state.world.generation

    @property
    def world(self) -> list[str]:
        """Members of the present generation, in rank order."""
        return self._state.world.names

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
        """What slots have said since the era began; None once its first step is durable everywhere."""
        return self._state.eras.going_back

    @property
    def regathering(self) -> bool:
        """Members of the one before are telling what they know. Whoever joins now would get a name of theirs."""
        return self._state.regathering.active

    def status(self, now_s: float) -> dict[str, Any]:
        """Everything that `torch-ecrec status` shows."""
        return status_of(self._state, now_s)

    # joining ------------------------------------------------------------------------------------

    def refusal(self, join: Join) -> str | None:
        """Why a process may not join, or None."""
        return admission.join_refusal(self._state, join)

    def name_for(self, join: Join) -> str:
        """A name for a process that was not refused."""
        return self._state.members.name_for(join)

    def born_as(self, birth: str) -> str | None:
        """The name of the member that said this word when it joined, unless it is lost or has left."""
        return self._state.members.born_as(birth)

    def on_join(self, name: str, join: Join, now_s: float) -> None:
        """A process that was not refused joins under a name from `name_for`."""
        state, role, rank = self._state, join.role, join.rank
        state.job.take(join.job)
        again = role == "trainer" and state.members.has_been(rank)
        if again:
            departures.lose_trainers(state, f"trainer {rank} was started again", now_s)
        state.members.add(name, join, now_s)
        self._welcome(name)
        self._announce(events.Joined(name, role, rank, join.pid))
        if state.table.placed:
            state.table.send_to(name)
            if again:
                departures.lose_absent(state)
        state.form(now_s)

    def on_join_again(self, name: str, now_s: float) -> None:
        """A member whose connection ended before it had read its name joins once more: it is the one that it was."""
        self._state.members.heard(name, now_s)
        self._welcome(name)
        self._tell_again(name)

    def _welcome(self, name: str) -> None:
        state, job = self._state, self._state.job
        trained = self.origin is not None or state.job.restored is not None
        restarted = trained and self.members[name].role == "trainer"
        self._send(name, messages.Welcome(name, job.code, restarted, self.life, state.transport, job.run, job.restored))

    def _tell_again(self, name: str) -> None:
        """All that a member may have missed while it had no connection."""
        state = self._state
        if state.table.placed:
            state.table.send_to(name)
        elif self.origin is not None:
            self._send(name, messages.Loaded(self.origin))
        if state.members.done and self.members[name].role == "trainer":
            self._send(name, messages.Left(sorted(state.members.done)))
        if name in state.world.names and self.members[name].generation != state.world.generation:
            state.world.send_to(name)

    # members that come back, and a coordinator that was started again ---------------------------

    def rejoin_refusal(self, rejoin: Rejoin) -> tuple[str, str] | None:
        """Why a member may not rejoin, with a kind for `fatal`, or None."""
        return admission.rejoin_refusal(self._state, rejoin)

    def on_rejoin(self, rejoin: Rejoin, now_s: float) -> None:
        """A member that was not refused comes back: to this coordinator, or to the next one, which it tells all."""
        state, name = self._state, rejoin.name
        member = state.members.by_name.get(name)
        if not self.regathering and member is not None and member.birth == rejoin.birth:
            member.heard_s = now_s
            self._announce(events.Back(name, member.pid))
            self._send(name, messages.Rejoined(self.life))
            if rejoin.generation == state.world.generation != member.generation:
                arrivals.enter(state, name, rejoin.generation, now_s)
            self._tell_again(name)
            return
        if not self.regathering:
            state.regathering.begin(now_s, state.members.lease_s)
            state.world.pause()
            self._announce(events.Regathering())
        state.members.add(name, rejoin, now_s, rejoin.generation)
        state.regathering.add(rejoin, now_s)
        self._announce(events.Joined(name, rejoin.role, rejoin.rank, rejoin.pid))
        succession.go_on(state, now_s)

    # what members say ---------------------------------------------------------------------------

    def on_message(self, name: str, word: OfMember, now_s: float) -> str | None:
        """Anything that a member says; nothing counts that one says who was taken for lost.

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
            succession.on_beat(self._state, name, word, now_s)
        elif isinstance(word, messages.OfMove):
            self._state.table.moves.on_word(name, word)
        elif isinstance(word, OfSlot):
            self._on_slot(name, word)
        elif isinstance(word, messages.InGeneration):
            arrivals.enter(self._state, name, word.generation, now_s)
        elif isinstance(word, messages.Loaded):
            self._state.job.on_loaded(word.origin)
        elif isinstance(word, messages.Leave):
            departures.leave(self._state, name, now_s)
        elif isinstance(word, messages.Progress):
            self._state.job.step = max(self._state.job.step, word.step)
        return None

    def on_heard(self, name: str, now_s: float, report: messages.Report | None = None) -> None:
        """A sign of life, with figures for `status`."""
        self._state.members.heard(name, now_s, report)

    def on_computing(self, name: str, now_s: float) -> None:
        """It was silent, was asked, and computes: no thread of its can say so unasked."""
        member = self.members.get(name)
        if member is not None and member.present:
            self.on_heard(name, now_s)
            self._state.suspicion.on_computing(name, now_s)

    def _on_slot(self, name: str, word: OfSlot) -> None:
        """What the host of a slot says of its present incarnation; that of a host before is late."""
        table, eras = self._state.table, self._state.eras
        if not table.is_hosted(word.slot, word.incarnation, by=name):
            return
        if isinstance(word, messages.Ready):
            table.on_ready(word.slot, word.incarnation, word.at)
        elif isinstance(word, messages.Rebuilt):
            table.on_rebuilt(word.slot, word.incarnation, word.renewals)
        elif isinstance(word, messages.Unrecoverable):
            table.on_unrecoverable(word.slot, word.reason)
        elif isinstance(word, messages.Damaged):
            self._announce(events.Damaged(**{name: getattr(word, name) for name in word.__struct_fields__}))
        elif isinstance(word, messages.Mended):
            self._announce(events.Mended(word.slot, word.incarnation, word.count))
        elif isinstance(word, messages.Reach):
            eras.on_reach(word)
        elif isinstance(word, messages.Durable) and eras.on_durable(word):
            table.moves.rebalance()  # which had to wait for that
        elif isinstance(word, messages.OfCheckpoint):
            self._state.checkpointing.on_word(word, self._state.whole)

    # ends ---------------------------------------------------------------------------------------

    def on_lost(self, name: str, now_s: float, why: str) -> None:
        """A member's connection ended, or its lease ran out."""
        departures.lose(self._state, name, now_s, why)

    def on_tick(self, now_s: float) -> None:
        """Called about every `heartbeat_s`: leases, and generations that were not formed in time."""
        state = self._state
        state.members.forget_gone()
        state.suspicion.on_tick(state.members.since_tick_s(now_s))
        for member in state.members.silent(now_s):
            departures.fence(state, member.name, now_s, f"not heard of for {state.members.lease_s:g} s")
        departures.act_on_complaints(state, now_s)
        state.world.give_up_late(now_s, state.table.placed)
        state.checkpointing.on_tick(now_s, state.whole)
        succession.go_on(state, now_s)
        state.form(now_s)

    def stop(self, reason: str, kind: str) -> None:
        """Ends the job for everybody: kinds are data_loss and stopped."""
        self._state.job.stop(reason, kind)
