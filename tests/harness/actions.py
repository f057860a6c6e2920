"""What may come next in a state of a cluster, for the search over all of them (`exploration.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from harness.global_states import COORDINATOR, GlobalState
from harness.local_states import LocalStates
from harness.scenario import Scenario
from harness.transitions import Action


class Actions:
    """The actions that are enabled in a state: crashes and ends of leases within the contract.

    Args:
        scenario: what runs.
        states: of single processes.
        free: names of messages that arrive at any time; the others arrive at once. See `exploration.py`.
        moves: slots do: then links fail that lead to where one moves to. (Others, without a move, are explored apart.)
    """

    def __init__(self, scenario: Scenario, states: LocalStates, free: frozenset[str], moves: bool = False) -> None:
        self.scenario, self.states, self.free, self.moves = scenario, states, free, moves

    def enabled(self, state: GlobalState, is_end: bool) -> list[Action]:
        """Every action that may come next; crashes last, and none once the end is reached."""
        crashes = [] if is_end else list(self._crashes(state))
        urgent = self._first_urgent(state)
        if urgent is not None:
            return [urgent, *crashes]
        names = dict(state.processes)
        actions: list[Action] = [("message", number) for number in dict.fromkeys(state.flight)]
        actions += [("word", origin, to) for origin, to, _ in state.lines]
        trainers = self.states.of_role("trainer", state.processes)
        if COORDINATOR not in names:
            actions.append(("start coordinator",))
        else:
            members = [name for name in names if name != COORDINATOR]
            gone = [name for name in members if name not in state.connected]
            actions += [("rejoin", name) for name in gone[: 2 if state.left.leases else 1]]
            if not trainers and self.states.view(names[COORDINATOR])["can join"]:
                actions.append(("start trainers",))
        if not actions:
            actions.append(("time",))
        return actions + crashes

    def _first_urgent(self, state: GlobalState) -> Action | None:
        for number in state.flight:
            if not self.states.is_free[number]:
                return "message", number
        for origin, to, words in state.lines:
            kind = self.states.words.things[words[0]]["type"]
            if not {kind, f"{kind} to {to.partition('-')[0]}"} & self.free:
                return "word", origin, to
        return None

    def _crashes(self, state: GlobalState) -> Iterator[Action]:
        left = state.left
        names = [name for name, _ in state.processes]
        if left.servers:
            hosts = [n for n, number in state.processes if self.states.view(number).get("slots")]
            for name in hosts:
                yield "crash", name, False
                yield "crash", name, True
        if left.trainers and self.states.of_role("trainer", state.processes):
            yield "crash", "trainers", False
            yield "crash", "trainers", True
        if left.coordinators and COORDINATOR in names:
            yield "crash", COORDINATOR
        if left.leases and COORDINATOR in names:
            yield from self._ends_of_leases(state)
        if COORDINATOR in names:
            yield from self._cuts_and_moves(state)

    def _cuts_and_moves(self, state: GlobalState) -> Iterator[Action]:
        """The network fails between two hosts of slots; they complain; a server is to be without slots."""
        center = self.states.view(dict(state.processes)[COORDINATOR])
        placed = {server for server, _ in center["slots placed"]} & set(state.connected)
        arriving = {name for name, number in state.processes if self.states.view(number).get("arriving")}
        if state.left.cuts:
            pairs = product(arriving, sorted(placed)) if self.moves else combinations(sorted(placed), 2)
            for one, other in pairs:
                ways = ((one, other),), ((other, one),), ((one, other), (other, one))
                yield from (("cut", cut, takes_along) for cut in ways for takes_along in (False, True))
        if any((placed | arriving).issuperset(pair) for pair in state.cuts):
            yield ("complain",)
        if state.left.moves:
            yield from (("drain", server) for server in sorted(placed))

    def _ends_of_leases(self, state: GlobalState) -> Iterator[Action]:
        """Within the contract: at most r slots are lost or not whole, as the coordinator will see it."""
        code = self.scenario.code
        views = {name: self.states.view(number) for name, number in state.processes}
        center = views[COORDINATOR]
        for name in sorted({server for server, _ in center["slots placed"]} & views.keys() & set(state.connected)):
            gone = [i for i, (server, healthy) in enumerate(center["slots placed"]) if server == name or not healthy]
            if len(gone) <= code.parities:
                yield "lease", name
        if center["regathering"]:
            back = center["rejoined"] & views.keys()
            _, placed = max((views[name].get("placement", (0, [])) for name in back), default=(0, []))
            gone = [i for i, (server, healthy) in enumerate(placed) if server not in back or not healthy]
            hosts = {name for name, view in views.items() if view.get("slots")}
            if placed and len(gone) <= code.parities and hosts - back:
                yield ("hurry",)
