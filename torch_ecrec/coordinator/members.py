"""Who has joined: names, lives, leases.

A name is given once. A server's says how many came before it, a trainer's its rank and how often it was started
(`trainer-1_3`); both leave room for names that a coordinator before has given and that this one does not know of. Where
one coordinator gives more than that room has, names say where its own began, too: `server-0_1000`, `trainer-1_0_1001`.

Does not decide what follows when a member is lost (`departures.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_ecrec.coordinator import domains
from torch_ecrec.protocol.bounds import Address, Role
from torch_ecrec.protocol.build import bits_told
from torch_ecrec.protocol.messages import Drains, Entering, FromCoordinator, Join
from torch_ecrec.protocol.status import Report, is_meant

NAMES_OF_A_TERM = 1000  # numbers of one coordinator's servers begin at a multiple of it, and lives of its trainers
TICK_MOST_S = 2.0  # between two calls of `Members.on_tick`, unless the coordinator itself was stopped
AWAKE_S = 0.4  # after a call of it, others were heard until then
HEARD_S = 1.0  # heard of within that: it is there
GONE_MOST = 100  # servers that are gone and still shown


@dataclass
class MemberRecord:
    """Holds what the coordinator knows of one process that has joined.

    Attributes:
        session_id: a word that only this process says (`messages.Entering`).
        back_s: since when it is heard of again, after a pause of more than `HEARD_S`.
        address: where it listens for as long as it lives; None: it did not say.
        domain: of a server, what it is lost together with; "": it did not say.
        endpoint: how it is called; "": it did not say yet.
        roster: the version of the last roster that it was told.
        alive: not lost. `left`: it said that it is done. `gone_s`: when either came about; `why_gone`: why it is lost.
        draining: of a server: its slots are to move away, and no others come.
        launch: of a trainer; see `launches.py`.
        version: of its package. `bits`: what its kernels give on fixed vectors, by name; none: it did not say.
    """

    name: str
    role: Role
    rank: int
    pid: int
    session_id: str
    joined_s: float
    heard_s: float
    endpoint: str = ""
    roster: int = 0
    alive: bool = True
    left: bool = False
    report: Report = Report()
    back_s: float = -math.inf
    address: Address | None = None
    domain: str = ""
    draining: bool = False
    launch: str = ""
    gone_s: float | None = None
    why_gone: str = ""
    version: str = ""
    bits: Mapping[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Its host's address; "": it did not say."""
        return "" if self.address is None else self.address[0]

    @property
    def where(self) -> str:
        """Its host's address; its own name, if it did not say."""
        return self.host or self.name

    @property
    def present(self) -> bool:
        """Whether it is neither lost nor done."""
        return self.alive and not self.left

    def silent_s(self, now_s: float) -> float:
        """Returns how long it was not heard of."""
        return now_s - self.heard_s


class Members:
    """All members, in order of arrival.

    Args:
        send: `send(name, message)` sends a message to a member.
        lease_s: a member that was not heard of for so long is silent (`silence.py`).

    Attributes:
        by_name: those that are there, and servers that are not any more, for a while.
        term: how many coordinators there were before, as far as the members know.
        done: trainers that have left, also those that only a coordinator before has known.
    """

    def __init__(self, send: Callable[[str, FromCoordinator], None], lease_s: float) -> None:
        self.send, self.lease_s = send, lease_s
        self.by_name: dict[str, MemberRecord] = {}
        self.term = 0
        self.done: set[int] = set()
        self._names = 0
        self._lives: dict[int, int] = {}  # trainer -> how often it has joined
        self._ticked_s = math.inf

    def drain(self, what: str, undo: bool) -> str:
        """Marks the servers of this name, or in this failure domain, to be without slots. Returns why not, or ""."""
        here = self.present("server")
        found = [one for one in here if is_meant(what, one.name, one.domain)]
        for one in found:
            if one.draining == undo:
                one.draining = not undo
                self.send(one.name, Drains(one.draining))
        servers = ", ".join(one.name + (f" ({one.domain})" if one.domain else "") for one in here) or "none yet"
        return "" if found else f"no server is called {what!r} or is in such a failure domain; there are {servers}"

    def is_draining(self, name: str) -> bool:
        """Returns whether a server's slots are to move away."""
        return name in self.by_name and self.by_name[name].draining

    def present(self, role: str | None = None) -> list[MemberRecord]:
        """Returns the members that are neither lost nor done. `role`: of this role only."""
        return [member for member in self.by_name.values() if member.present and role in (None, member.role)]

    def domains(self) -> dict[str, domains.Domain]:
        """Returns the failure domains of the servers that are there, by name."""
        return {member.name: domains.parse(member.name, member.domain) for member in self.present("server")}

    @property
    def trainers(self) -> list[MemberRecord]:
        """All trainers that have not been forgotten: done ones, too."""
        return [member for member in self.by_name.values() if member.role == "trainer"]

    def has_been(self, rank: int) -> bool:
        """Returns whether there is a trainer of this rank, or was one that is done."""
        return rank in self.done or any(member.rank == rank for member in self.trainers)

    def tell(self, message: FromCoordinator, role: str | None = None) -> None:
        """Sends a message to all who are present. `role`: of this role only."""
        for member in self.present(role):
            self.send(member.name, message)

    # names --------------------------------------------------------------------------------------

    def name_for(self, join: Join) -> str:
        """Returns a name that nobody has had."""
        first = NAMES_OF_A_TERM * self.term
        if join.role == "trainer":
            life = max(self._lives.get(join.rank, 0), first) + 1
            self._lives[join.rank] = life
            if life - first > NAMES_OF_A_TERM:  # the next coordinator's begin here
                return f"trainer-{join.rank}_{first}_{life - first}"
            return f"trainer-{join.rank}" + (f"_{life}" if life > 1 else "")
        number, self._names = self._names, self._names + 1
        return f"server-{number}" if number - first < NAMES_OF_A_TERM else f"server-{first}_{number - first}"

    def member_of_session(self, session_id: str) -> str | None:
        """Returns the name of the member with this session id, unless it is lost or has left."""
        return next((member.name for member in self.present() if member.session_id == session_id), None)

    def follow(self, term: int) -> None:
        """Notes the term of a coordinator before this one: names and lives begin after its own."""
        self.term = max(self.term, term + 1)
        self._names = max(self._names, NAMES_OF_A_TERM * self.term)

    # coming and going ---------------------------------------------------------------------------

    def add(self, name: str, entering: Entering, now_s: float) -> None:
        """Adds a process that has joined or rejoined, under a name."""
        self.by_name[name] = MemberRecord(
            name,
            entering.role,
            entering.rank,
            entering.pid,
            entering.session_id,
            now_s,
            now_s,
            address=entering.address,
            domain=entering.domain,
            launch=entering.launch,
            version=entering.version,
            draining=entering.draining,
            bits=bits_told(entering.messages),
        )

    def heard(self, name: str, now_s: float, report: Report | None = None) -> None:
        """Notes a heartbeat of a member, with its figures for `status`."""
        member = self.by_name[name]
        if now_s - member.heard_s > HEARD_S:
            member.back_s = now_s
        member.heard_s = now_s
        if report is not None:
            member.report = member.report.followed_by(report)

    def on_tick(self, now_s: float) -> None:
        """Takes time during which this process stood still out of members' silence. To be called about every
        `heartbeat_s`."""
        slept_s = self.since_tick_s(now_s) - TICK_MOST_S
        self._ticked_s = now_s
        if slept_s > 0:  # this process hung itself: it was not the members who were silent
            for member in self.by_name.values():
                member.heard_s += slept_s + TICK_MOST_S

    def since_tick_s(self, now_s: float) -> float:
        """Returns how long ago `on_tick` was called; negative before the first time. If long, this process stood
        still."""
        return now_s - self._ticked_s

    def is_awake(self, now_s: float) -> bool:
        """This process has not stood still just now: what members have said of late, it has heard."""
        return self.since_tick_s(now_s) <= AWAKE_S

    def forget_gone(self) -> None:
        """Servers that were lost or have left are shown for a while, not for ever."""
        gone = [m.name for m in self.by_name.values() if m.role == "server" and not m.present]
        for name in gone[: max(0, len(gone) - GONE_MOST)]:
            del self.by_name[name]
