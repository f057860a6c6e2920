"""Every order of messages, and every moment of a crash, of a very small cluster: all of its states, each one checked.

    cd tests; python -m harness.exploration             # all of `EXPLORATIONS`: minutes
    python -m harness.exploration --steps 1 --server-crashes 1 --free Push,Fold,Attach --limit 1000000

The core is the real one (`processes.py`). A process is a machine: what it does follows from its state and the event.
So a cluster's state is a tuple of numbers (the state of each process, what is under way), what an event does to a
process is worked out once, and the search goes over tuples. A process in a state is made again, when it is needed, by
giving a new one the events that led there; two states of a process are one if their fingerprints are equal.

Enabled in a state: the arrival of any request, answer or word of the coordinator that is under way (words on one
connection in order); the crash of a server that hosts a slot, of all trainers or of the coordinator, as long as the
budget allows; their start; the end of the lease of a server that lives and goes on, until it hears of it; the end of
the time in which members may come back to a new coordinator, when a host has not yet; the network between two hosts of
slots fails, one way or both, for good, and they complain of it (a call on such a link ends without an answer); a
server is to be without slots, and one of them moves. A process that dies, or a link that fails, takes along everything
that was sent, or nothing. Members rejoin in the order of their names, or, as long as a lease may end, one of them later
than others. Time (pauses, limits) passes when nothing is under way.

All orders of all messages are too many: 10^5 states for one step, without any crash. So an exploration names the
messages that are *free*, which arrive at any time; the others arrive at once, in a fixed order. A crash may come
between any two arrivals, of either kind. Names: classes of requests (`wire.py`), also as `Push of trainer 1`, `Fold of
slot 0`; classes of answers, and `answer` for all; `end` (the one asked is gone), `loss` (between trainers), `disk` (of
a server: it answers); types of words, also as `placement to server`.

Checked in each state: records as of every step that the logs reach, parities as of what was folded, lookups, losses
and dense values are those of the undisturbed run (I1 to I4, I7); nobody gives up (I5); logs are bounded (I6); what a
trainer counts as complete, every slot has acknowledged; what a source counts as folded by a holder, that one has
folded, and nothing that the source has not applied; the last complete snapshot is on every whole holder. And from
every state the end can be reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

import msgspec
import numpy as np

from harness.actions import Actions
from harness.global_states import COORDINATOR, Budget, GlobalState
from harness.local_states import LocalStates
from harness.pair_checks import check_client, check_slots
from harness.processes import Oracle
from harness.scenario import Load, Scenario
from harness.transitions import Action, Transitions
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec


def tiny(steps: int, loads: int = 0, frames: int | None = None) -> Scenario:
    """Three slots, (2, 1), two trainers, one table of two stripes: a slot with records only, two with parities, too.

    With `frames` of memory for records it is larger, and a step uses few of them: so others go to the disk.
    """
    table = TableSpec(
        "a", rows=12 if frames else 4, dim=1, low=-1.0, high=1.0, optimizer=OptimizerSpec("rowwise_adagrad", lr=0.1)
    )
    return Scenario(
        code=CodeSpec(slots=3, k=2, r=1),
        tables=(table,),
        steps=steps,
        spares=1,
        rebuild_chunk_bytes=1 << 20,
        late=0.0,
        loads=(Load(0, 0, 2), Load(0, 1, 3, change=True))[:loads],
        tier_frames=frames,
        pooled=not frames,
        touch=0.3 if frames else Scenario.touch,
    )


@dataclass(frozen=True)
class Exploration:
    """What is explored: so many steps, with these crashes, and these messages free; after so many loads (2 at most).

    With `frames`, each store of a server has so many records in memory, and the others on a disk, whose answers are
    messages, too.

    With loads no trainers may die: those that come load again, and count other steps than the undisturbed run does.
    """

    steps: int
    budget: Budget
    free: frozenset[str]
    loads: int = 0
    frames: int | None = None

    def explorer(self) -> Explorer:
        require(not (self.loads and self.budget.trainers), "trainers cannot die where there are `loads`")
        return Explorer(tiny(self.steps, self.loads, self.frames), self.budget, self.free)


class Violation(AssertionError):
    """What was found, and the actions that lead there."""


@dataclass
class Explored:
    """What was explored."""

    states: int = 0
    transitions: int = 0
    locals: int = 0  # states of single processes
    worked_out: int = 0  # events worked out by the core
    ends: int = 0
    depth: int = 0
    exhausted: bool = False
    seconds: float = 0.0


class Explorer:
    """Explores one scenario.

    Args:
        scenario: what runs.
        budget: which crashes may come.
        free: names of messages that arrive at any time; the others arrive at once. See the module.
    """

    def __init__(self, scenario: Scenario, budget: Budget, free: Iterable[str]) -> None:
        self.scenario = scenario
        self.states = LocalStates(frozenset(free))
        self.transitions = Transitions(scenario, budget, self.states, Oracle.of(scenario))
        self.actions = Actions(scenario, self.states, frozenset(free), moves=budget.moves > 0)
        self._pairs: set[tuple[int, int]] = set()  # states of two processes that were checked together
        self.explored = Explored()

    # what must hold -----------------------------------------------------------------------------

    def is_end(self, state: GlobalState) -> bool:
        """Training is over, and every slot is whole and settled."""
        if state.flight or state.lines:
            return False
        views = {name: self.states.view(number) for name, number in state.processes}
        trainers = [view for view in views.values() if view["role"] == "trainer"]
        if len(trainers) < self.scenario.trainers or not all(view["done"] for view in trainers):
            return False
        if COORDINATOR not in views or not views[COORDINATOR]["whole"]:
            return False
        slots = [slot for view in views.values() for slot in view.get("slots", {}).values()]
        steps = len(self.scenario.loads) + self.scenario.steps
        return all(slot["whole"] and slot["applied"] == slot["settled"] == steps for slot in slots)

    def check(self, state: GlobalState) -> None:
        """What no process can see alone. Raises AssertionError."""
        numbers = [number for _, number in state.processes]
        servers = [number for number in numbers if self.states.view(number)["role"] == "server"]
        trainers = [number for number in numbers if self.states.view(number)["role"] == "trainer"]
        for number in servers:
            for other in (*servers, *trainers):
                if (number, other) not in self._pairs:
                    check = check_slots if other in servers else check_client
                    check(self.states.view(number), self.states.view(other))
                    self._pairs.add((number, other))
        for name, number in state.processes:
            if name == COORDINATOR:
                fatal = self.states.view(number)["fatal"]
                assert fatal is None, f"the cluster stopped: {fatal}"

    # the search ---------------------------------------------------------------------------------

    def run(self, limit: int = 10**9, seconds: float = 1e9, progress: Callable[[str], None] | None = None) -> Explored:
        """Breadth first, so what is found is found on a shortest way.

        Raises:
            Violation: something that must hold does not; its text lists the actions that lead there.
        """
        begin_s = time.monotonic()
        first = self.transitions.begin()
        number_of = {hash(first): 0}  # 64 bits: two states of some millions hardly ever have the same
        parents, depths = array("l", [-1]), array("l", [0])
        actions: list[Action] = [()]  # that led to each state first
        before, behind = array("l"), array("l")  # transitions
        ends: list[int] = []
        todo, explored = deque([first]), self.explored
        while todo:
            if len(number_of) >= limit or time.monotonic() - begin_s > seconds:
                break
            state = todo.popleft()
            number = number_of[hash(state)]
            try:
                self.check(state)
                if is_end := self.is_end(state):
                    ends.append(number)
                enabled = self.actions.enabled(state, is_end)
            except AssertionError as error:
                raise self._violation(error, number, parents, actions) from error
            for action in enabled:
                try:
                    following = self.transitions.after(state, action)
                except Exception as error:
                    actions.append(action)
                    parents.append(number)
                    raise self._violation(error, len(actions) - 1, parents, actions) from error
                key = hash(following)
                known = number_of.get(key)
                if known is None:
                    known = number_of[key] = len(number_of)
                    parents.append(number)
                    actions.append(action)
                    depths.append(depths[number] + 1)
                    todo.append(following)
                before.append(number)
                behind.append(known)
            if progress is not None and number % 20_000 == 0:
                of_processes = len(self.states.locals.things)
                progress(f"{len(number_of):,} states, {of_processes:,} of processes, depth {depths[number]}")
        explored.states, explored.transitions, explored.ends = len(number_of), len(before), len(ends)
        explored.locals, explored.depth = len(self.states.locals.things), depths[-1]
        explored.exhausted, explored.worked_out = not todo, self.states.worked_out
        explored.seconds = time.monotonic() - begin_s
        if explored.exhausted:
            self._check_ends(len(number_of), before, behind, ends, parents, actions)
        return explored

    def _check_ends(self, states: int, before: Any, behind: Any, ends: list[int], parents: Any, actions: Any) -> None:
        """From every state the end can be reached."""
        origins, targets = np.frombuffer(before, dtype=np.int64), np.frombuffer(behind, dtype=np.int64)
        good = np.zeros(states, dtype=bool)
        good[ends] = True
        while True:
            more = np.unique(origins[good[targets] & ~good[origins]])
            if not len(more):
                break
            good[more] = True
        if not good.all():
            number = int(np.flatnonzero(~good)[0])
            raise self._violation(AssertionError("the end cannot be reached from here"), number, parents, actions)

    def _violation(self, error: Exception, number: int, parents: Any, actions: Any) -> Violation:
        steps: list[str] = []
        while number > 0:
            steps.append(self.describe(actions[number]))
            number = parents[number]
        lines = "\n  ".join(f"{i:3} {text}" for i, text in enumerate(reversed(steps), 1))
        return Violation(f"{type(error).__name__}: {error}\nafter\n  {lines}")

    def describe(self, action: Action) -> str:
        if action[0] == "message":
            message = self.states.messages.things[action[1]]
            if message[0] == "request":
                return f"{message[1].sender} -> {message[1].receiver}: {_short(message[1].request)}"
            if message[0] == "answer":
                return f"{message[1]} -> {message[2]}: {_short(message[4])} to {message[3].split()[0]}"
            return " ".join(str(part) for part in message)
        return " ".join(str(part) for part in action)


def _short(value: Any) -> str:
    """A message without its arrays."""
    kept = {
        k: v
        for k, v in msgspec.structs.asdict(value).items()
        if isinstance(v, (int, str, dict)) and not isinstance(v, bool)
    }
    return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in kept.items())})"


def explore(exploration: Exploration, limit: int = 10**9, seconds: float = 1e9) -> tuple[Explored, str]:
    """Runs it; returns what was explored, and a line of a table (see `HEADER`)."""
    begin_s = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begin_s:5.0f} s: {text}", file=sys.stderr, flush=True)

    found = exploration.explorer().run(limit, seconds, progress)
    budget, free = exploration.budget, ", ".join(sorted(exploration.free)) or "none"
    whole = "" if found.exhausted else "more than "
    crashes = " / ".join(str(number) for number in astuple(budget))
    figures = f"{whole}{found.states:,} | {found.transitions:,} | {found.ends} | {found.depth} | {found.worked_out:,}"
    steps = f"{exploration.loads} + {exploration.steps}" if exploration.loads else exploration.steps
    return found, f"| {steps} | {exploration.frames or 'all'} | {crashes} | {free} | {figures} | {found.seconds:.0f} |"


def arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m harness.exploration", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--loads", type=int, default=0, choices=(0, 1, 2), help="steps that load initial values")
    parser.add_argument("--server-crashes", type=int, default=0)
    parser.add_argument("--trainer-crashes", type=int, default=0, help="each of all trainers together")
    parser.add_argument("--coordinator-crashes", type=int, default=0)
    parser.add_argument("--leases", type=int, default=0, help="servers that are taken for lost and live")
    parser.add_argument("--cuts", type=int, default=0, help="of the network between two servers, for good")
    parser.add_argument("--moves", type=int, default=0, help="of a slot to a spare")
    parser.add_argument("--frames", type=int, help="records of each store in memory, the others on a disk")
    parser.add_argument(
        "--free",
        type=lambda text: frozenset(text.split(",")) - {""},
        metavar="NAME,...",
        help="messages that arrive at any time; without it, all of the module's own explorations are run",
    )
    parser.add_argument("--limit", type=int, default=10**9, help="end after so many states")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    return parser.parse_args()


HEADER = """\
| steps | frames | servers / trainers / coordinators / leases / cuts / moves | free |\
 states | transitions | ends | depth | worked out | s |
|---|---|---|---|---|---|---|---|---|---|"""
NONE: frozenset[str] = frozenset()
OF_A_MOVE = frozenset({"move", "FetchChanged", "Copy", "level", "HandOver", "Handed", "arrived", "placement to server"})
EXPLORATIONS = (
    Exploration(1, Budget(), frozenset({"Push", "Fold", "Snapshot"})),
    Exploration(1, Budget(servers=1), frozenset({"Push of trainer 1", "Fold of slot 0", "placement to server"})),
    Exploration(2, Budget(servers=1), frozenset({"Fold of slot 0", "placement to server"})),
    Exploration(2, Budget(trainers=1), frozenset({"era"})),
    Exploration(2, Budget(trainers=1), frozenset({"Fold of slot 0"})),
    Exploration(2, Budget(trainers=1), frozenset({"Snapshot of trainer 1"})),
    Exploration(3, Budget(trainers=1), frozenset({"Push of trainer 1"})),
    Exploration(1, Budget(leases=1), frozenset({"fatal", "placement", "Fold of slot 0"})),
    Exploration(2, Budget(leases=1), frozenset({"fatal", "placement"})),
    Exploration(2, Budget(servers=1, trainers=1), NONE),
    Exploration(2, Budget(coordinators=1), frozenset({"Fold of slot 0"})),
    Exploration(1, Budget(coordinators=1, leases=1), NONE),
    Exploration(1, Budget(servers=1, coordinators=1), NONE),
    Exploration(1, Budget(trainers=1, coordinators=1), NONE),
    Exploration(1, Budget(servers=1, trainers=1, coordinators=1), NONE),
    Exploration(1, Budget(cuts=1), NONE),
    Exploration(1, Budget(cuts=1), frozenset({"Fold of slot 0", "fatal"})),
    Exploration(1, Budget(moves=1), OF_A_MOVE),
    Exploration(2, Budget(moves=1), OF_A_MOVE),
    Exploration(0, Budget(), frozenset({"Load", "Fold"}), loads=2),
    Exploration(0, Budget(servers=1), frozenset({"Fold of slot 0"}), loads=2),
    Exploration(0, Budget(coordinators=1), frozenset({"loaded"}), loads=1),
    Exploration(3, Budget(servers=1), frozenset({"disk"}), frames=2),
    Exploration(3, Budget(servers=1), frozenset({"disk"}), frames=1),
    Exploration(3, Budget(trainers=1), frozenset({"disk"}), frames=1),
    Exploration(5, Budget(), frozenset({"disk"}), frames=1),
)


def main() -> int:
    """Runs what the arguments ask for; prints a table in Markdown. Returns 1 if something does not hold."""
    args = arguments()
    chosen: Iterable[Exploration] = EXPLORATIONS
    if args.free is not None:
        crashes = args.server_crashes, args.trainer_crashes, args.coordinator_crashes, args.leases
        budget = Budget(*crashes, args.cuts, args.moves)
        chosen = [Exploration(args.steps, budget, args.free, args.loads, args.frames)]
    print(HEADER, flush=True)
    for exploration in chosen:
        try:
            print(explore(exploration, args.limit, args.seconds)[1], flush=True)
        except Violation as violation:
            print(f"{exploration}: found: {violation}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
