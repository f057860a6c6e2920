"""Schedules of what goes wrong around a partial recovery, drawn from seeds: more is lost than parity repairs, and then
servers, trainers and the coordinator are lost, servers are drained or told to end, at any message of it.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

from harness.membership import VirtualConnection
from partial_runs import JOB, Partial, check
from virtual_trainers import Kill, OnShelf

from torch_ecrec.spec.job import CodeSpec

CODES = {
    "3,2,1": CodeSpec(3, 2, 1),
    "5,2,1": CodeSpec(5, 2, 1),
    "7,2,1": CodeSpec(7, 2, 1),
    "5,2,2": CodeSpec(5, 2, 2),
    "none": CodeSpec(4, 2, 1, protection="none"),
}
KINDS = {"any": 5, "trainer": 3, "coordinator": 5, "beyond": 2, "drain": 2, "undo": 1, "leave": 1, "server": 2}
SAVERS = ("everything", "everything", "everything", "mfu", "ssu", "scar")


@dataclass(frozen=True)
class Trouble:
    """What happens so many messages after the one before.

    Args:
        after: messages of the data plane, or of the control channel.
        what: who is lost (`Kill`); or "drain", "undo", "leave": of the server of slot `which`.
    """

    after: int
    control: bool
    what: str
    which: int


@dataclass(frozen=True)
class Schedule:
    """All of a run. `first`: the loss beyond repair. `begins`: the cluster begins with a checkpoint of another run."""

    code: str
    first: Kill
    troubles: tuple[Trouble, ...]
    saver: str = "everything"
    most: float = 1.0
    begins: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def draw(seed: int) -> Schedule:
    """A random one. The coordinator is lost once at most: trainers give up who wait for two that stand still."""
    r = random.Random(f"partial {seed}")
    name, saver = r.choice(list(CODES)), r.choice(SAVERS)
    code = CODES[name]
    protected = code.protection != "none"
    lost = code.parities + 1 if protected else 1
    more: dict[str, Any] = {"spares": r.choice((0, 1, 1, 2)), "network_seed": r.randrange(7)}
    for option, share, values in (
        ("without_spare", 0.3, ("wait",)),
        ("snapshot_every", 0.25, (2, 3)),
        ("coordinators", 0.3, (2, 3)),
        ("rebuild_bytes_per_s", 0.3, (20000.0,)),
        ("tier_frames", 0.15, (3,)),
    ):
        if r.random() < share:
            more[option] = r.choice(values)
    kinds = dict(KINDS) if protected else {kind: KINDS[kind] for kind in KINDS if kind != "server"}
    troubles = []
    for _ in range(r.choice((1, 1, 2, 2, 3, 4))):
        (what,) = r.choices(list(kinds), list(kinds.values()))
        if what == "coordinator":
            del kinds[what]
        control = r.random() < 0.5
        after = r.choice((0, 1, 2, 3, 5, 8, 13, 20, 35, 60) if control else (0, 2, 5, 10, 20, 40, 80, 160, 300))
        which = lost * r.choice((1, -1)) if what == "beyond" else r.randrange(code.slots)
        troubles.append(Trouble(after, control, what, which))
    first = Kill(
        "beyond" if saver == "everything" else "saved", lost * r.choice((1, 1, -1)), r.choice((0, 0, 200, 500))
    )
    most, begins = r.choice((1.0, 1.0, 1.0, 0.1, 0.02)), saver == "everything" and r.random() < 0.2
    return Schedule(name, first, tuple(troubles), saver, most, begins, more)


@functools.cache
def another_run() -> OnShelf:
    """A checkpoint of step 3 of a run that nothing happened to."""
    run = Partial().go()
    return OnShelf(run.shelf, JOB, run.shelf.counts[0])


class Scheduled(Partial):
    """A cluster in which that happens. `log`: what has."""

    def __init__(self, schedule: Schedule) -> None:
        self.troubles, self.log = list(schedule.troubles), list[str]()
        self._last: tuple[int, int] | None = None  # messages, as the last of it happened
        more = {**schedule.more, "begins": another_run() if schedule.begins else None}
        super().__init__(schedule.most, saver=schedule.saver, code=CODES[schedule.code], kills=[schedule.first], **more)

    def on_sent(self, number: int, connection: VirtualConnection) -> None:
        super().on_sent(number, connection)
        self._look()

    def _idle(self) -> bool:
        if self._last is None and self.fired:
            self._last = self.now
        self._look()
        return super()._idle()

    def _look(self) -> None:
        while self._last is not None and self.troubles:
            trouble = self.troubles[0]
            if self.now[trouble.control] < self._last[trouble.control] + trouble.after:
                return
            self._last = self.now
            self.log.append(f"{self.now} {self.troubles.pop(0)}: {self._apply(trouble)}")

    def _apply(self, trouble: Trouble) -> str:
        if trouble.what not in ("drain", "undo", "leave"):
            self.kills_to_come.insert(0, Kill(trouble.what, trouble.which, 0))
            return "as soon as it may"
        slots = self.coordinator.slots if self.plane.lives and not self.coordinator.regathering else []
        server = slots[trouble.which].server if slots else ""
        process = self.process_of.get(server)
        if process is None or process.dead:
            return "nobody is there"
        if trouble.what != "leave":
            return self.coordinator.drain(server, undo=trouble.what == "undo") or server
        if process.connection is None or not self.may_crash(server):
            return "may not"
        self.leave(process)
        self.start_server(process)
        return server

    def _done(self) -> bool:
        done = super()._done()
        if done and self._last is not None:
            self.troubles = []  # no more messages come
        return done


def run_schedule(schedule: Schedule) -> Scheduled:
    """Runs it. Raises AssertionError that names it if records, lookups, or what is told of it, are not right."""
    cluster = Scheduled(schedule)
    try:
        cluster.go()
        check(cluster)
    except Exception as error:
        said = "\n".join([*cluster.log, *map(str, cluster.run.events[-40:])])
        raise AssertionError(f"{schedule}: {type(error).__name__}: {error}\n{said}") from error
    return cluster
