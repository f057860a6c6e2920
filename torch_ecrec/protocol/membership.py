"""How a process becomes a member of its cluster, stays one, and leaves: the rules, without clocks, threads and sockets.

    rules = Membership(join, "10.0.0.1:29400", pace, now_s)
    rules.step(now_s)                       # Connect(120.0): look for the coordinator, and connect
    rules.connected(now_s, led=0)
    rules.take()                            # [Say(Join(...))]
    rules.heard(now_s, {"type": "welcome", ...})
    rules.take()                            # [Build(Welcome(...))]: the node, and what carries its messages
    rules.built("10.0.0.2:4711")
    rules.take()                            # [Say(Listens(...))]

Whoever drives them says what happens (`connected`, `missed`, `heard`, `closed`, `built`, `leave`), with the time, does
what `take` gives, in that order, and asks with `step` what is next. There are three drivers: `Member` in
`processes/member.py`, with threads and sockets; the simulated cluster, and the search over all states of a small one,
in `tests/harness`.

Terms. A member that *looks* has no connection with its coordinator, and goes on without it. A *stranger* is a
coordinator of another cluster, or one that does not know our secret. A coordinator is *silent* if nothing comes back
from where it was, not even that nobody listens there.

Rules.
- Who joins asks until a coordinator answers, for `Pace.give_up_s`: one that ends meanwhile is replaced.
- The end of its connection is the end of nothing for a member: it looks, and rejoins. It gives up after `give_up_s`.
  Time in which the coordinator is silent does not count, for up to `Pace.stands_s`: perhaps it is this process that is
  cut off.
- A search is over when the coordinator has said "rejoined", no earlier: one that ends each connection is none.
- A trainer that is done stays until a coordinator has heard so, whose word is `Left`; for `FAREWELL_S` at most.
- Nonsense ends the membership with `ClusterUnavailable`, which says what came.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from torch_ecrec.errors import (
    CheckpointError,
    ClusterError,
    ClusterUnavailable,
    DataLoss,
    Fenced,
    JoinRefused,
    TrainersLost,
)
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import NO_SECRET, Address, Role
from torch_ecrec.protocol.messages import BadMessage
from torch_ecrec.spec.experiment import Experiment
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import STANDS_S, Settings

CLOSE_S = 1.0  # how long a server that ends waits for a connection to say so
FAREWELL_S = 30.0  # how long a trainer that is done stays for the coordinator, or the next one, to hear it
AGAIN_LEAST_S, AGAIN_MOST_S = 0.05, 1.0  # between two attempts to join, where connections end at once
LOOK_S, LOOK_PART = 10.0, 0.25  # whether anybody answers there, is looked at so often, and in such parts of `give_up_s`
ANY_CODE = messages.WantedCode()
NO_EXPERIMENT = Experiment()
ENDS: dict[str, type[ClusterError]] = {
    "data_loss": DataLoss,
    "checkpoint": CheckpointError,
    "trainers_lost": TrainersLost,
    "fenced": Fenced,
}


def join_of(
    role: Role,
    session_id: str,
    pid: int,
    *,
    rank: int = -1,
    job: JobSpec | None = None,
    code: messages.WantedCode = ANY_CODE,
    domain: str = "",
    launch: str = "",
    relaunched: bool = False,
    again: bool = False,
    draining: bool = False,
    address: Address | None = None,
    led: int = 0,
    experiment: Experiment = NO_EXPERIMENT,
    bits: Mapping[str, str] | None = None,
) -> messages.Join:
    """Returns what a process of this build says to join; the fields are those of `messages.Join`.

    `bits`: what its kernels give on fixed vectors (`processes/kernel_bits.py`); None: it has not computed them.

    Raises:
        ValueError: no process can be so: a trainer without a job, say.
    """
    build = messages.whole_build()
    return messages.Join(
        version=build.version,
        messages={**build.messages, **(bits or {}), **experiment.variables()},
        role=role,
        session_id=session_id,
        pid=pid,
        rank=rank,
        job=job,
        code=code,
        domain=domain,
        launch=launch,
        relaunched=relaunched,
        again=again,
        draining=draining,
        address=address,
        led=led,
    )


@dataclass(frozen=True)
class Pace:
    """How long a member looks for its coordinator, and how often, in seconds.

    Attributes:
        give_up_s: it looks for so long, and asks to join for so long.
        stands_s: so long, where nothing comes back.
        least_s, most_s: between two attempts, where connections end at once; the latter where a stranger is found.
    """

    give_up_s: float
    stands_s: float
    least_s: float
    most_s: float

    @property
    def look_s(self) -> float:
        """How long one attempt may take, once it is a member."""
        return min(LOOK_S, LOOK_PART * self.give_up_s)


def pace_of(settings: Settings) -> Pace:
    """Returns that of a real process."""
    return Pace(settings.give_up_s, settings.standstill_s or STANDS_S, AGAIN_LEAST_S, AGAIN_MOST_S)


# what is next -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """The coordinator is to be found and connected with, within `limit_s`: `connected` or `missed` follows."""

    limit_s: float


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done until then, if nothing happens."""

    until_s: float


NOTHING = Wait(math.inf)


# what is to be done -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """It is to be said on the newest connection; what is said while there is none is lost."""

    word: messages.Join | messages.Rejoin | messages.Listens


@dataclass(frozen=True)
class SayLeave:
    """`messages.Leave` is to be said there, with the last figures."""


@dataclass(frozen=True)
class Build:
    """The node and its transport are to be made; `built` follows."""

    welcome: messages.Welcome


@dataclass(frozen=True)
class Follow:
    """The transport is to be told who is there. If that cannot be, `nonsense` follows."""

    roster: messages.Roster


@dataclass(frozen=True)
class Tell:
    """It is for the node."""

    word: messages.FromCoordinator


@dataclass(frozen=True)
class Close:
    """The newest connection is to be given up."""


@dataclass(frozen=True)
class End:
    """It is over, with the reason: the process is no member any more, or has become none."""

    error: BaseException


@dataclass(frozen=True)
class Note:
    """It is for the log. `level`: as `logging` has it. `refused`: the coordinator refused a message."""

    level: int
    text: str
    refused: bool = False


@dataclass(frozen=True)
class Die:
    """The process is to end at once, as by SIGKILL: nobody hears of it."""


Effect = Say | SayLeave | Build | Follow | Tell | Close | End | Note | Die


class Membership:
    """The state of one membership, from the first attempt to join to its end.

    Args:
        join: what the process says to join.
        named: where its coordinator is, as a user has named it; for people.
        pace: of its search.
        now_s: the time, as in all other calls, on a clock that never goes back.

    Attributes:
        join: as it is said; `led` is of the coordinator that was found last.
        name: "" until it is welcome.
        code, run, term, restarted, restored, inexact: as it was told.
        roster: the newest that it was told; None: none yet.
        endpoint: how it is called; "" until it is built.
        is_joined: it is welcome, and built. It stays so.
        is_connected: there is a connection, as far as it knows.
        is_leaving: it is done, and says so.
        is_over: it has ended, or has failed to join.
        has_parted: a process that leaves may go: it was heard, or nobody needs to hear.
        failure: why it could not join.
    """

    code: CodeSpec

    def __init__(self, join: messages.Join, named: str, pace: Pace, now_s: float) -> None:
        self.join, self.pace = join, pace
        self.name = self.run = self.endpoint = ""
        self.term = 0
        self.restarted = False
        self.restored: messages.Restored | None = None
        self.inexact: list[tuple[int, str]] = []
        self.roster: messages.Roster | None = None
        self.is_joined = self.is_connected = self.is_leaving = self.is_over = self.has_parted = False
        self.failure: BaseException | None = None
        self._where = f"the coordinator at {named}"
        self._named = named
        self._out: list[Effect] = []
        self._connecting = False  # `connected` or `missed` is to come
        self._cut, self._why_cut = False, ""  # the connection has ended, which `step` has not looked at yet
        self._next_s = now_s  # no attempt before
        # as it joins
        self._deadline_s = now_s + pace.give_up_s
        self._pause_s = pace.least_s
        self._asks = False  # a join was said on the connection
        self._gone = self._waits = ""  # why the connection before has ended; why it waits, as the coordinator says
        # as it looks
        self._looks = False
        self._since_s = 0.0
        self._sought_s: float | None = None  # since when; None: it is with its coordinator
        self._sought_for_s = pace.give_up_s  # so long; time in which nothing comes back from there does not count
        self._why_looks = ""
        self._hears_nothing = False
        self._stranger = ""  # whom it found last, if that was one

    @property
    def looks(self) -> bool:
        """It is a member, and has not heard "rejoined" since its connection ended."""
        return self._sought_s is not None

    def take(self) -> list[Effect]:
        """Returns the effects that have become due since the last call, in order, and forgets them."""
        out, self._out = self._out, []
        return out

    def _note(self, level: int, text: str, refused: bool = False) -> None:
        self._out.append(Note(level, text, refused))

    # what is next -------------------------------------------------------------------------------

    def step(self, now_s: float) -> Connect | Wait:
        """Returns what is to be done next. Must be called after every event, and at the time that the last `Wait`
        named."""
        if self.is_over or self._connecting:
            return NOTHING
        if not self.is_joined:
            return self._step_to_join(now_s)
        if not self._looks:
            if not self._cut:
                return NOTHING
            self._begin_to_look(now_s)
        if now_s < self._next_s:
            return Wait(self._next_s)
        if now_s - self._since_s < self._sought_for_s:
            return self._connect(self.pace.look_s)
        self._judge(now_s, False)
        return NOTHING

    def _connect(self, limit_s: float) -> Connect:
        self._connecting = True
        return Connect(limit_s)

    def _step_to_join(self, now_s: float) -> Connect | Wait:
        if self._asks and self._cut and not self.name:
            self._ask_another(now_s)
        if self.is_over:
            return NOTHING
        if self._asks:
            if now_s < self._deadline_s:
                return Wait(self._deadline_s)
            self.end(ClusterUnavailable(f"{self._where} did not answer in {self.pace.give_up_s:g} s{self._waits}"))
            return NOTHING
        if now_s < self._next_s:
            return Wait(self._next_s)
        return self._connect(max(self._deadline_s - now_s, 0.0) if self._gone else self.pace.give_up_s)

    def _ask_another(self, now_s: float) -> None:
        """Joins again a little later, as the coordinator is gone before it has answered; whoever listens there may end
        each connection at once."""
        self._gone = self._why_cut
        if now_s + self._pause_s > self._deadline_s:
            self.end(ClusterUnavailable(f"{self._where} ended before it answered: {self._gone}"))
            return
        self._note(logging.WARNING, f"{self._where} is gone before it answered ({self._gone}); joins again")
        self._out.append(Close())
        self._asks = self._cut = False
        self._waits = ""
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self.pace.most_s)

    def _begin_to_look(self, now_s: float) -> None:
        self._looks, self._cut, self._why_looks = True, False, self._why_cut
        if self._sought_s is None:
            self._sought_s = self._next_s = now_s
            self._sought_for_s = self.pace.give_up_s
            self._note(
                logging.WARNING,
                f"{self.name}: no connection with the coordinator ({self._why_cut}); goes on, and looks for it",
            )
        else:  # whoever is there may end each connection at once
            self._next_s = now_s + (self.pace.most_s if self._stranger else self.pace.least_s)
        self._since_s = self._sought_s  # a last word on the connection before may end that search, not this one

    def _judge(self, now_s: float, silent: bool) -> None:
        """Decides, after an attempt, whether it goes on looking."""
        for_s, give_up_s, stands_s = now_s - self._since_s, self.pace.give_up_s, self.pace.stands_s
        self._note_silence(silent and for_s < stands_s, stands_s - for_s)
        if self._hears_nothing:
            self._sought_for_s = for_s + give_up_s
        elif for_s >= (give_up_s if silent else self._sought_for_s):
            why = self._stranger or self._why_looks
            self.end(ClusterUnavailable(f"the coordinator is gone ({why}), and none came within {give_up_s:g} s"))

    def _note_silence(self, is_so: bool, left_s: float) -> None:
        """Notes whether nothing comes back from where the coordinator was: perhaps it is this process that is cut off,
        and a trainer has patience, as with members that the coordinator says are silent."""
        if is_so == self._hears_nothing:
            return
        self._hears_nothing = is_so
        if is_so:
            text = f"{self.name}: nothing comes back from there; goes on looking, for {left_s:.0f} s at most"
            self._note(logging.WARNING, text)
        if self.join.role == "trainer":
            names = ["the coordinator, of which nothing is heard"] if is_so else []
            self._out.append(Tell(messages.Stands(names, left_s if is_so else None)))

    # what happens -------------------------------------------------------------------------------

    def listens_at(self, address: Address) -> None:
        """Notes where the process listens for as long as it lives. To be called before it is connected."""
        self.join = replace(self.join, address=address)

    def connected(self, now_s: float, led: int = 0, known: messages.Known | None = None) -> None:
        """Handles a new connection with a coordinator: joins, or rejoins.

        Args:
            led: since when it leads; see `messages.ForLeader`.
            known: what the node knows at this moment; needed once it has joined.
        """
        self._connecting = False
        self.join = replace(self.join, led=led)
        if self.is_over:
            return
        self.is_connected = not self._cut
        if not self.is_joined:
            self._asks = True
            self._out.append(Say(self.join))
            return
        assert known is not None
        self._looks = False
        self._note_silence(False, 0.0)
        self._out.append(Say(self._rejoin(known)))
        if self.is_leaving and self.join.role == "server":
            self._out.append(SayLeave())
            self.has_parted = True

    def _rejoin(self, known: messages.Known) -> messages.Rejoin:
        of_process = {name: getattr(self.join, name) for name in messages.Entering.__struct_fields__}
        roster = self.roster
        return messages.Rejoin(
            **of_process,
            name=self.name,
            code=self.code,
            term=self.term,
            run=self.run,
            endpoint=self.endpoint,
            roster=0 if roster is None else roster.version,
            world=[] if roster is None else list(roster.endpoints),
            addresses={} if roster is None else roster.addresses,
            restored=self.restored,
            inexact=self.inexact,
            known=known,
        )

    def missed(self, now_s: float, error: ClusterUnavailable, silent: bool = False, stranger: bool = False) -> None:
        """Handles an attempt to connect that has failed.

        Args:
            error: why.
            silent: nothing came back from there.
            stranger: whoever is there does not know our secret, or wants one.
        """
        self._connecting = False
        if self.is_over:
            return
        if not self.is_joined:
            if stranger:
                self.end(JoinRefused(str(error)))
            elif not self._gone:
                self.end(error)
            else:
                limit = f"{self.pace.give_up_s:g} s"
                self.end(ClusterUnavailable(f"{self._where} ended ({self._gone}), and none came within {limit}"))
            return
        if stranger:  # another cluster's, or a mistake: our own may come yet
            if str(error) != self._stranger:
                self._note(logging.ERROR, f"{self.name}: {error}; keeps what it has, and looks for its own")
            self._stranger = str(error)
            self._next_s = now_s + self.pace.most_s
        self._judge(now_s, silent)

    def closed(self, reason: str) -> None:
        """Notes that the connection has ended, or was given up."""
        self.is_connected = False
        self._cut, self._why_cut = True, reason

    def built(self, endpoint: str) -> None:
        """Notes that the node is there, and can be called at `endpoint`; tells the coordinator."""
        if not self.is_over:
            self.is_joined, self._asks, self.endpoint = True, False, endpoint
            self._out.append(Say(messages.Listens(endpoint)))

    def heard(self, message: Mapping[str, Any]) -> None:
        """Handles a message of the coordinator."""
        if not (self._asks or self.is_joined):
            return  # on a connection that was given up while this was on its way: nobody there knows it any more
        try:
            self._take(messages.from_coordinator(message))
        except BadMessage as error:
            self.nonsense(f"the coordinator sent what cannot be: {error}")

    def nonsense(self, reason: str) -> None:
        """Ends the membership: what arrived is no message of this protocol, so its sender is not our coordinator."""
        self.end(ClusterUnavailable(reason))

    def end(self, error: BaseException) -> None:
        """Ends the membership with an error. One that leaves need not know why."""
        if self.is_over:
            return
        self.is_over = self.has_parted = True
        if not self.is_joined:
            self.failure = error
        if not self.is_leaving:
            self._out.append(End(error))

    # what the coordinator says ------------------------------------------------------------------

    def _take(self, word: messages.FromCoordinator) -> None:
        if isinstance(word, messages.Welcome):
            self._take_welcome(word)
        elif isinstance(word, messages.Refused):
            self._take_refusal(word)
        elif isinstance(word, messages.Waits):
            self._waits = f": {word.reason}"
            self._note(logging.WARNING, f"waits until the cluster at {self._named} lets it in: {word.reason}")
        elif isinstance(word, messages.Fatal):
            self.end(ENDS.get(word.kind, ClusterUnavailable)(word.reason))
        elif not self.name:
            raise BadMessage(f"{type(word).__name__}: before a welcome")
        elif isinstance(word, messages.KnownInexact):
            self.inexact = word.known
        elif isinstance(word, messages.Roster):
            self._take_roster(word)
        elif isinstance(word, messages.OtherCluster):
            self._turn_away(word)
        elif isinstance(word, messages.Drains):
            if self.join.role != "server":
                raise BadMessage("drains: not to a server")
            self.join = replace(self.join, draining=word.draining)
        elif isinstance(word, messages.Die):
            self._out.append(Die())
        else:
            self._take_word(word)

    def _take_word(self, word: messages.FromCoordinator) -> None:
        """Handles a message that the node hears, too."""
        if isinstance(word, messages.Job):
            self.run = word.run
        elif isinstance(word, messages.Rejoined):
            self.term, self._sought_s, self._stranger = word.term, None, ""
            if self.is_leaving:
                self._out.append(SayLeave())
        elif isinstance(word, messages.Left) and self.is_leaving and self.join.rank in word.trainers:
            self.has_parted = True
        self._out.append(Tell(word))

    def _take_welcome(self, word: messages.Welcome) -> None:
        if self.name:
            raise BadMessage("welcome: said before")
        self.name, self.code, self.run, self.term = word.name, word.code, word.run, word.term
        self.restarted, self.restored = word.restarted, word.restored
        self._out.append(Build(word))

    def _take_refusal(self, word: messages.Refused) -> None:
        if self.is_joined:
            if word.kind == "other_build":  # of a coordinator that was started in place of ours
                self.end(JoinRefused(f"{self._where} takes it for no member: {word.reason}"))
            elif not self.is_over:  # a message, not the membership
                self._note(logging.ERROR, f"{self.name}: the coordinator refused a message: {word.reason}", True)
        elif word.kind == NO_SECRET:
            self.end(JoinRefused(f"{self._where} {word.reason}"))
        else:
            refusal = DataLoss if word.kind == "data_loss" else JoinRefused
            self.end(refusal(f"refused by the cluster at {self._named}: {word.reason}"))

    def _take_roster(self, word: messages.Roster) -> None:
        if self.name not in word.endpoints:
            raise BadMessage(f"roster: {self.name} must be in it, got {', '.join(word.endpoints)}")
        if self.roster is None or word.version > self.roster.version:
            self.roster = word
            self._out.append(Follow(word))

    def _turn_away(self, word: messages.OtherCluster) -> None:
        """Leaves a coordinator that is not that of this member's cluster, and goes on looking."""
        theirs, ours = word.code, self.code
        stranger = f"{self._where} is of another cluster: {word.reason}"
        if stranger != self._stranger:
            self._note(
                logging.ERROR,
                f"{self.name}: {stranger}. It leads {word.run}, (k, r) = ({theirs.k}, {theirs.r}) on {theirs.slots}"
                f" slots; this member is of {self.run}, ({ours.k}, {ours.r}) on {ours.slots} slots, keeps what it has,"
                f" and looks for its own for {self.pace.give_up_s:g} s",
            )
        self._stranger = stranger
        self._out.append(Close())
        self.closed(stranger)

    # the end ------------------------------------------------------------------------------------

    def leave(self) -> float:
        """Says that this member is done. Idempotent.

        The end of a trainer that is not known to be done is a loss: it stays until it is told that it was heard, on
        whichever connection and by whichever coordinator.

        Returns:
            For how long it stays at most, in seconds, unless it `has_parted` before.
        """
        self.is_leaving = True
        is_server = self.join.role == "server"
        self.has_parted |= not self.is_joined or (is_server and self.is_connected)
        if self.is_joined and (self.is_connected or self.has_parted or not is_server):
            self._out.append(SayLeave())  # a server that is just coming back says it then
        return CLOSE_S if is_server else min(FAREWELL_S, self.pace.give_up_s)

    def part(self) -> None:
        """Ends the membership after `leave`: it has stayed for long enough, or was heard."""
        if not self.has_parted and self.join.role == "trainer":
            limit = f"{min(FAREWELL_S, self.pace.give_up_s):g} s"
            self._note(logging.WARNING, f"{self.name}: no coordinator has heard within {limit} that it is done")
        self.is_over = self.has_parted = True
