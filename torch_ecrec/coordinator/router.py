"""Who is on which connection, and what may be said on it: between the control channel and the `Coordinator`.

Pure, as the coordinator is: connections are objects with `send`, `admit` and `close`; the time is an argument; whatever
takes time (`probe`) is asked for, and answered by a call. The real process (`coordination.run_coordinator`) and the
simulated cluster run this very code.

Terms: *stranger*: a connection of nobody who has joined. *held*: a `join` that waits until members of a coordinator
before have had the time to come back, or until trainers of another launch have ended (`launches.py`). *away*: a member
whose connection has ended and whose end is not known.
*silent*: one that has a connection, and has said nothing for a while.

Invariants.
- Nothing is looked at that `messages.from_member` has not converted. What is refused changes nothing: its sender is
  told why, it is counted, and the connection of a stranger is closed.
- A name has one connection at most, and a connection one name.
- The end of a connection is not the end of a member: a switch, a proxy or a firewall ends connections of processes
  that are well. The process is asked (`probe`), again and again: nobody listens where it did, so it is gone, and is
  lost at once; its host does not answer, then it is silent (`silence.py`); somebody listens, then it has until the end
  of its lease to come back.
- Who is silent is asked, too, long before its lease ends: one that answers that it computes is heard of by that, though
  it says nothing itself. Any other answer says nothing of a member that has a connection.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from torch_ecrec.coordinator.admission import FENCED, WENT_BACK
from torch_ecrec.coordinator.asked import SILENT_PART, SILENT_S, AskedMembers
from torch_ecrec.coordinator.checkpointing import Manifests, Restorable
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.coordinator.launches import RESTART_S
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages, status
from torch_ecrec.protocol.bounds import SHOWN_MOST, Address
from torch_ecrec.protocol.messages import BadMessage, ForLeader, FromCoordinator, Join, OtherBuild, Rejoin
from torch_ecrec.protocol.status import Recent, Refusal, Status
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.liveness import COMPUTES, GONE, UNREACHABLE

Message = dict[str, Any]
RECENT_MOST = 10  # events that a status has
REFUSED_SHOWN_S = 1.0  # refusals are told to the log once in so long at most, with how many there were
UNKNOWN_YET = "it is not known yet whether there is a checkpoint to begin with"
GIVEN_UP = "the job of this cluster was given up before anything was trained, and another one has come"
NOBODY_LEFT = "the coordinator was started again, and nobody who knows what was trained came back"
WHY_LOST = "its connection ended, and its process is gone"


class Peer(Protocol):
    """A connection to the coordinator. Implemented by `transport/control.py:LineConnection`, and in memory by
    `tests/harness/membership.py:VirtualConnection`."""

    @property
    def peer(self) -> str:
        """Where it comes from, for messages."""

    def send(self, message: Message) -> None:
        """Sends; nothing if it has ended."""

    def admit(self) -> None:
        """Lets more be sent on it, and silence: it is a member's or a watcher's from now on."""

    def close(self) -> None:
        """Ends it, after what was sent."""


class Router:
    """The coordinator with its connections.

    Args:
        settings: of the cluster.
        probe: `probe(name, number, address)` asks whether a process listens there; its answer is a call of `on_probed`.
        announce: gets every event as an object of JSON (`observe/events.py`), for the log.
        stop: the coordinator is to end, soon.
        refuse_to_lead: it is to end, soon, so that one of the code that it is given can take its place; and why.
        stamp: adds the time of day to what people see.
        joins_from_s: until then, joins are held.
        first_held_s: with `looks`, the first that comes is held for so long: members of before look for a coordinator
            once a second, and may come behind it.
        looks: what the cluster begins with is not known yet: joins are held until `begin_with` says, or until members
            of before have rejoined who know what is trained.
        manifests: writes manifests of checkpoints; None: nobody does.
        led: since which revision of etcd this coordinator leads. Who enters, stops the cluster, drains a server or asks
            for a checkpoint, and means one that led before, is not heard: while this one stood by, the words waited at
            its port, and are not true, or not wanted, any more. Who was given its address (0) means nobody else, and is
            heard.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        probe: Callable[[str, int, Address], None],
        announce: Callable[[Message], None],
        stop: Callable[[], None] = lambda: None,
        refuse_to_lead: Callable[[str, CodeSpec], None] = lambda why, code: None,
        stamp: Callable[[Message], Message] = lambda message: message,
        joins_from_s: float = 0.0,
        first_held_s: float = 0.0,
        looks: bool = False,
        manifests: Manifests | None = None,
        led: int = 0,
    ) -> None:
        self.core = Coordinator(settings, self._send, self._tell_watchers, manifests)
        self._settings, self._manifests, self._looks = settings, manifests, looks
        self._found: tuple[Restorable | None, int] | None = None  # what was looked for
        self._hindrance = self._trouble = ""  # why there is nothing to begin with; why that is not known yet
        self._looks_back = False  # for the checkpoint that the cluster goes back to
        self._looks_for: Coordinator | None = None  # whose lost slots are to begin anew
        self.refused = 0  # messages, since the start
        self._announce, self._stop, self._stamp = announce, stop, stamp
        self._refuse_to_lead, self._refuses = refuse_to_lead, False
        self._turned_away: set[str] = set()  # session ids of members of other clusters
        self._joins_from_s, self._first_held_s, self._led = joins_from_s, first_held_s, led
        self._connections: dict[str, Peer] = {}
        self._names: dict[Peer, str] = {}
        self._held: dict[Peer, Join] = {}
        self._blocked: dict[Peer, float] = {}  # of these, who waits for other trainers' end: since when
        self.told_fatal_s = 0.0  # when somebody was told last that the cluster has stopped
        self._watchers: dict[Peer, None] = {}
        self._asked = AskedMembers(probe)
        self._recent: deque[Recent] = deque(maxlen=RECENT_MOST)
        self._last_refused: tuple[str, str, float] | None = None  # whose, why and when
        self._refusals, self._told_s = 0, -REFUSED_SHOWN_S  # that the log was not told of yet; when it was told last

    # out ----------------------------------------------------------------------------------------

    def _send(self, name: str, message: FromCoordinator) -> None:
        if name in self._connections:
            self._say(self._connections[name], message)

    @staticmethod
    def _say(peer: Peer, message: FromCoordinator) -> None:
        peer.send(messages.json_of(message))

    def _tell_watchers(self, event: Event) -> None:
        shown = events.json_of(event)
        self._announce(shown)
        if not isinstance(event, events.MINOR):
            self._recent.append(Recent(float(self._stamp({}).get("time_s", 0.0)), shown))
        for watcher in list(self._watchers):
            watcher.send(self._stamp({"type": "event", **shown}))

    # in -----------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: Message, now_s: float) -> None:
        """Handles a JSON object that has arrived on a connection."""
        name = self._names.get(peer)
        try:
            word = messages.from_member(message)
        except BadMessage as error:
            kind = "other_build" if isinstance(error, OtherBuild) else "refused"
            if message.get("type") == "compare":
                self._say_no(peer, str(error), kind)  # who asks before it joins has made no mistake
            else:
                self.refuse(peer, str(error), now_s, kind)
            return
        if isinstance(word, ForLeader) and self._is_of_before(word):
            why = f"{message['type']}: for the coordinator that led from {word.led} on"
            self._count_refused(why, peer, now_s, late=True)
            peer.close()  # and nothing else: whoever still waits there looks again who leads
        elif isinstance(word, (Join, Rejoin)):
            if name is not None or peer in self._held:
                self.refuse(peer, f"{message['type']}: said before on this connection", now_s)
            elif isinstance(word, Join):
                if self._looks and not self._held:  # this one may have been cut off until now, and others come behind
                    self._joins_from_s = max(self._joins_from_s, now_s + self._first_held_s)
                self._held[peer] = word
                peer.admit()  # it may have to be silent for a while
                self._say_trouble([peer])
            else:
                self._rejoin(peer, word, now_s)
            self._let_in(now_s)
        elif isinstance(word, (messages.AskStatus, messages.Watch)):
            if isinstance(word, messages.Watch):
                self._watchers[peer] = None
                peer.admit()
            self._say_status(peer, now_s)
        elif isinstance(word, (messages.Drain, messages.Compare, messages.AskCheckpoint)):
            if isinstance(word, messages.Drain):
                why = self.drain(word.what, word.undo)
            elif isinstance(word, messages.Compare):
                why = self.core.build_refusal(word) or ""
            else:
                why = self.core.checkpoint(word.after)
            if why:  # somebody's mistake, who is told: nothing is wrong with the cluster
                self._say_no(peer, why)
            else:
                self._say_status(peer, now_s)
        elif isinstance(word, messages.Stop):
            self.core.stop("stopped", "stopped")
            self._stop()
        elif name is None:
            self.refuse(peer, f"not a question: {message['type']!r}", now_s)
        else:
            objection = self.core.on_message(name, word, now_s)
            if objection is not None:
                self.refuse(peer, f"{message['type']}: {objection}", now_s)
            elif isinstance(word, messages.Progress):
                for watcher in list(self._watchers):
                    watcher.send(self._stamp(message))
            self._look_beyond()

    def drain(self, what: str, undo: bool) -> str:
        """Begins to move all slots off a server, or a failure domain; returns why not, or "". `undo`: ends that."""
        if self.core.regathering:
            return "members of the coordinator before come first"
        return self.core.drain(what, undo)

    def kill(self, name: str) -> str:
        """Tells a member to end at once; returns why it cannot be told, or ""."""
        member = self.core.members.get(name)
        if member is not None and member.present and name not in self._connections:
            return f"{name} has no connection just now: it cannot be told"
        return self.core.kill(name)

    def _is_of_before(self, word: ForLeader) -> bool:
        """Returns whether a message was meant for another leader, which has led before."""
        return word.led not in (0, self._led)

    def refuse(self, peer: Peer, reason: str, now_s: float, kind: str = "refused") -> None:
        """Ignores what arrived: tells its sender why, and writes to the log from time to time."""
        self._say_no(peer, reason, kind)
        self._count_refused(reason, peer, now_s)

    def _say_no(self, peer: Peer, reason: str, kind: str = "refused") -> None:
        self._say(peer, messages.Refused(kind, reason))
        if peer not in self._names and peer not in self._held and peer not in self._watchers:
            peer.close()

    def _count_refused(self, reason: str, peer: Peer, now_s: float, late: bool = False) -> None:
        """Counts a refusal, and shows it from time to time. `late`: it is usual after a change of coordinators, and
        nobody has to look at it."""
        self.refused += 1
        self._refusals += 1
        who = self._names.get(peer, peer.peer)
        if not late:
            self._last_refused = who, reason, now_s
        if now_s >= self._told_s + REFUSED_SHOWN_S:
            self._told_s, count, self._refusals = now_s, self._refusals, 0
            self._tell_watchers(events.MessagesRefused(who, reason, count))

    def _look_beyond(self) -> None:
        """Looks for a checkpoint, if more is lost than can be repaired."""
        if self.core.goes_back and not self._looks_back and self._settings.checkpoint.beyond == "stop":
            self._go_back(self._settings.restore, "none was named")  # see `RunningJob.begins_as_told`
        elif self.core.goes_back and not self._looks_back:
            assert self._manifests is not None  # whoever wants to go back has checkpoints written
            self._looks_back = True
            self._manifests.newest(self.core.run, self.core.restored, self._go_back)
        elif self.core.recovers_partly and self._looks_for is not self.core:
            assert self._manifests is not None  # likewise
            core = self._looks_for = self.core
            self._manifests.newest(
                core.run, core.restored, lambda found, why: self._restore_partly(core, found, why), read=False
            )

    def _restore_partly(self, core: Coordinator, found: Restorable | None, why: str) -> None:
        """Slots that are lost beyond repair begin anew, from that checkpoint."""
        self._looks_for = None
        if core is self.core:
            core.restore_partly(found, why)
            self._look_beyond()

    def begin_with(self, restore: Restorable | None, term: int, now_s: float) -> None:
        """Says what the cluster begins with if no member comes back that knows the training; see `ClusterSettings`."""
        self._found = restore, term
        self._let_in(now_s)

    def cannot_begin(self, why: str, now_s: float) -> None:
        """Notes that there is nothing to begin with. Who joins is told so, until members of before, or `begin_with`,
        come."""
        self._hindrance = why
        self._let_in(now_s)

    def cannot_look(self, why: str) -> None:
        """Notes that it is still not known what the cluster begins with. Who joins is told so, and waits."""
        if why != self._trouble:
            self._trouble = why
            self._say_trouble(self._held)

    def _say_trouble(self, peers: Iterable[Peer]) -> None:
        if self._trouble and self.looks:
            for peer in peers:
                self._say(peer, messages.Waits(f"{UNKNOWN_YET}: {self._trouble}"))

    @property
    def looks(self) -> bool:
        """It is not known what the cluster begins with, and nobody has come back who would know better."""
        return self._looks and self._found is None and self.core.job is None

    def _go_back(self, found: Restorable | None, why: str) -> None:
        """Goes back to that checkpoint: everybody begins anew, as another member."""
        self._looks_back, before = False, self.core
        reason = before.fatal or ""
        if found is None:
            before.stop(f"{reason}; and there is no checkpoint to go back to: {why}", "data_loss")
            return
        times = 1 + (before.restored.times if before.restored is not None else 0)
        restored = msgspec.structs.replace(found[0], times=times)
        self._begin_anew(dataclasses.replace(self._settings, restore=(restored, found[1])))
        self._tell_watchers(events.WentBeyond(restored.folder, restored.done, reason))

    def _begin_anew(self, settings: ClusterSettings, why: str = WENT_BACK) -> None:
        """Replaces the coordinator's core: whoever is a member joins again, as another."""
        before = self.core
        self.core = Coordinator(settings, self._send, self._tell_watchers, self._manifests, before)
        for name, peer in self._connections.items():
            member = before.members.get(name)  # trainers that were lost are forgotten, and still there to hear it
            kind = "trainers_lost" if member is None or member.role == "trainer" else "fenced"
            self._say(peer, messages.Fatal(kind, why))
        self._forget_members()

    def on_closed(self, peer: Peer, now_s: float) -> None:
        """Called when a connection has ended."""
        self._held.pop(peer, None)
        self._blocked.pop(peer, None)
        self._watchers.pop(peer, None)
        name = self._names.pop(peer, None)
        if name is None:
            return
        del self._connections[name]
        member = self.core.members.get(name)
        if member is None or not member.alive:
            return
        if member.left or member.address is None:
            self.core.on_lost(name, now_s, "its connection ended")
        else:
            self._asked.go_away(name, member.address, now_s)
        self._let_in(now_s)

    def on_probed(self, name: str, number: int, found: str, now_s: float) -> None:
        """Handles the answer to a probe (`transport/liveness.py`). Ignored if the member is back, or was asked
        again."""
        asked = self._asked.take_answer(name, number)
        if asked is None:
            return
        if found == COMPUTES:
            self.core.on_computing(name, asked.address, now_s)
        elif found == GONE and (asked.away or name in self.core.missing()):
            self._asked.forget(name)
            self.core.on_gone(name, asked.address, now_s, WHY_LOST)
        elif asked.away:
            self.core.on_unreachable(name, found == UNREACHABLE, now_s)
        self._let_in(now_s)

    def _silent(self, now_s: float) -> dict[str, Address]:
        """Members that have a connection, and were not heard of for a while: where they listen."""
        limit_s = min(SILENT_S, SILENT_PART * self._settings.lease_s)
        found = {}
        for name, member in self.core.members.items():
            is_silent = member.present and member.silent_s(now_s) > limit_s and name in self._connections
            if is_silent and member.address is not None:
                found[name] = member.address
        return found

    def _lives(self, name: str) -> bool:
        return (member := self.core.members.get(name)) is not None and member.alive

    def on_tick(self, now_s: float) -> None:
        """Looks after what has a time. Called about every quarter of a heartbeat."""
        self.core.on_tick(now_s)
        missing = self.core.missing()
        asked = {**self._silent(now_s), **missing}
        self._asked.look(asked, lambda name: name in missing or self._lives(name), now_s)
        self._let_in(now_s)

    # joining ------------------------------------------------------------------------------------

    def _let_in(self, now_s: float) -> None:
        """Lets those join who wait, unless members of a coordinator before come first."""
        self._look_beyond()
        for peer, join in list(self._held.items()):
            if self._joins_wait(now_s):
                break
            if not self._is_held_back(peer, join, now_s):
                self._blocked.pop(peer, None)
                self._join(peer, self._held.pop(peer), now_s)
        while self._held and self._hindrance and self.looks and not self.core.regathering:
            self._say(self._held.popitem()[0], messages.Refused("data_loss", f"{NOBODY_LEFT}: {self._hindrance}"))

    def _is_held_back(self, peer: Peer, join: Join, now_s: float) -> bool:
        """Returns whether it has to wait for the end of others' trainers; who has waited in vain is told so, and
        refused."""
        hold = None if self.core.refusal(join) is not None else self.core.hold(join, now_s)
        if hold is None:
            return False
        if peer not in self._blocked:
            self._blocked[peer] = now_s
            self._say(peer, messages.Waits(hold.reason))
        elif hold.lives and now_s >= self._blocked[peer] + RESTART_S:
            del self._held[peer], self._blocked[peer]
            self._say(peer, messages.Refused("refused", f"waited {RESTART_S:g} s in vain: {hold.reason}"))
            self._count_refused(f"join: {hold.reason}", peer, now_s)
        return True

    def _joins_wait(self, now_s: float) -> bool:
        if self._refuses:
            return True
        if now_s < self._joins_from_s or self.core.regathering or self._looks_back:
            return True
        self._looks = self._looks and self.core.job is None
        if self._looks and self._found is not None:
            (restore, term), self._looks = self._found, False
            anew = restore is None and not self.core.members
            if restore is not None or (anew and term):
                self._begin_anew(dataclasses.replace(self._settings, restore=restore, term=term))
            if restore is not None:
                self._tell_watchers(events.WentBeyond(restore[0].folder, restore[0].done, NOBODY_LEFT))
            elif anew:
                self._tell_watchers(events.BeganAnew())
        return self._looks

    def _join(self, peer: Peer, join: Join, now_s: float) -> None:
        if (difference := self.core.forgets(join)) is not None:
            self._begin_anew(self._settings, GIVEN_UP)
            self._tell_watchers(events.JobForgotten(difference))
        refusal = self.core.refusal(join)
        if refusal is not None:
            self._note_fatal(now_s)
            self._say(peer, messages.Refused("refused" if self.core.fatal is None else self.core.fatal_kind, refusal))
            if self.core.fatal is None:
                self._count_refused(f"join: {refusal}", peer, now_s)
            return
        name = self.core.member_of_session(join.session_id)
        if name is not None:
            self._bind(name, peer)
            self.core.on_join_again(name, now_s)
        else:
            name = self.core.name_for(join)
            self._bind(name, peer)
            self.core.on_join(name, join, now_s)

    def _rejoin(self, peer: Peer, rejoin: Rejoin, now_s: float) -> None:
        if other := self.core.other_cluster(rejoin):
            if not self.core.gives_way(rejoin, now_s):
                self._turn_away(peer, rejoin, other, now_s)
                return
            self._lead_another(rejoin.run)
        why = self.core.rejoin_refusal(rejoin)
        if why is not None:
            self._note_fatal(now_s)
            self._say(peer, messages.Fatal(*why))
            return
        name, member = rejoin.name, self.core.members.get(rejoin.name)
        if member is not None and member.session_id != rejoin.session_id and name in self._connections:
            self._send(name, messages.Fatal("fenced", FENCED))  # it joins again as another
        self._bind(name, peer)
        self.core.on_rejoin(rejoin, now_s)

    def _note_fatal(self, now_s: float) -> None:
        if self.core.fatal is not None:
            self.told_fatal_s = now_s

    def _turn_away(self, peer: Peer, rejoin: Rejoin, why: str, now_s: float) -> None:
        """Turns away a member of another cluster: it keeps what it has, and goes on looking."""
        refuses = self._refuses or self.core.refuses_to_lead(rejoin)
        self._say(peer, messages.OtherCluster(self.core.run, self._settings.code, why))
        peer.close()
        if rejoin.session_id not in self._turned_away or refuses != self._refuses:
            self._turned_away.add(rejoin.session_id)
            self._tell_watchers(events.TurnedAway(rejoin.name, rejoin.run, rejoin.pid, why, refuses))
        if refuses and not self._refuses:
            self._refuses = True
            who = f"{rejoin.name} (pid {rejoin.pid}) of cluster {rejoin.run} looks for its coordinator here"
            self._refuse_to_lead(f"{who}: {why}", rejoin.code)

    def _lead_another(self, run: str) -> None:
        """Gives up the cluster of those who are back, for another of which more members are there."""
        why = f"more members of {run} look for their coordinator here"
        for peer in list(self._names):
            self._say(peer, messages.OtherCluster(run, self._settings.code, why))
            peer.close()
        for one in self.core.said:
            self._turned_away.add(one.session_id)
            self._tell_watchers(events.TurnedAway(one.name, one.run, one.pid, why, False))
        self.core = Coordinator(self._settings, self._send, self._tell_watchers, self._manifests)
        self._forget_members()

    def _forget_members(self) -> None:
        for members in (self._connections, self._names, self._asked):
            members.clear()

    def _bind(self, name: str, peer: Peer) -> None:
        """Makes this the member's connection; one that it had before is closed."""
        before = self._connections.pop(name, None)
        if before is not None:
            del self._names[before]
            before.close()
        self._connections[name], self._names[peer] = peer, name
        self._asked.forget(name)
        peer.admit()

    def _say_status(self, peer: Peer, now_s: float) -> None:
        peer.send(self._stamp(status.json_of(self.status(now_s))))

    def status(self, now_s: float) -> Status:
        """Returns everything that `torch-ecrec status` shows, but for the time of day."""
        looks = self._looks_back or (self._looks and self.core.job is None)  # also: found, and joins still wait
        why, trouble = (self._hindrance, self._trouble) if self.looks else ("", "")
        whose, reason, at_s = self._last_refused or ("", "", now_s)
        refusal = Refusal(whose, reason[:SHOWN_MOST], round(now_s - at_s, 1)) if self._last_refused else None
        about: dict[str, Any] = {
            "refusal": refusal,
            "looks": looks,
            "cannot_begin": why,
            "store_trouble": trouble,
            "refused_messages": self.refused,
            "recent": list(self._recent),
        }
        return msgspec.structs.replace(self.core.status(now_s), **about)
