"""What an action (an arrival, a crash, a start) makes of a cluster's state, for the search over all of them."""

from __future__ import annotations

from typing import Any

from harness.global_states import COORDINATOR, Budget, Draft, GlobalState
from harness.local_states import LocalStates
from harness.processes import Call, Center, Oracle, Server, Trainer
from harness.scenario import Scenario
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.spec.settings import Settings

Action = tuple[Any, ...]


class Transitions:
    """What an action makes of a cluster's state.

    Args:
        scenario: what runs.
        budget: which crashes may come.
        states: of single processes.
        oracle: what an undisturbed run gives.
    """

    def __init__(self, scenario: Scenario, budget: Budget, states: LocalStates, oracle: Oracle) -> None:
        self.scenario, self.budget, self.states, self.oracle = scenario, budget, states, oracle
        self.settings = Settings(
            rebuild_chunk_bytes=scenario.rebuild_chunk_bytes, rebuild_bytes_per_s=0, move_bytes_per_s=0
        )

    def begin(self) -> GlobalState:
        """All have joined and are placed; trainers have asked for the rows of their first step."""
        scenario = self.scenario
        draft = Draft(GlobalState((), (), (), (), self.budget, 0))
        self._start_coordinator(draft)
        for _ in range(scenario.code.slots + scenario.spares):
            self._at(draft, COORDINATOR, "join", join_of("server", "one", 0), 0)
        self._at(draft, COORDINATOR, "start", None, 0)
        return self._all_words_heard(draft.finish())

    def _all_words_heard(self, state: GlobalState) -> GlobalState:
        while state.lines:
            origin, to, _ = state.lines[0]
            state = self.after(state, ("word", origin, to))
        return state

    def _start_coordinator(self, draft: Draft) -> None:
        scenario, term = self.scenario, draft.term
        draft.processes[COORDINATOR] = self.states.birth(f"{COORDINATOR} {term}", lambda: Center(scenario, term))

    def _at(self, draft: Draft, name: str, kind: str, what: Any, key: int) -> None:
        """An event at a process, and what follows from what it says."""
        draft.processes[name], said = self.states.on(draft.processes[name], kind, what, key)
        for one in said:
            if one[0] == "flight":
                if one[1] in draft.processes or self.states.messages.things[one[2]][0] == "request":
                    draft.flight.append(self._as_it_arrives(draft, one[2]))
            elif one[0] == "tell":
                if name in draft.connected:
                    draft.say(name, COORDINATOR, one[1])
            elif one[0] == "send":
                if one[1] in draft.connected:
                    draft.say(COORDINATOR, one[1], one[2])
            elif one[0] == "born":
                self._born(draft, one[1], one[2])
            elif one[0] == "fence":
                draft.say(COORDINATOR, one[1], self.states.word({"type": "fenced"}))

    def _as_it_arrives(self, draft: Draft, number: int) -> int:
        """A message that is sent. Where nothing passes, it is the end of its call: the time limit of whoever asked."""
        message = self.states.messages.things[number]
        origin, to, token = _ends(message)
        if (origin, to) not in draft.cuts:
            return number
        end = "end", origin if message[0] == "request" else to, token
        return self.states.message(end, end)

    def _born(self, draft: Draft, rank: int, name: str) -> None:
        scenario, settings, oracle = self.scenario, self.settings, self.oracle
        frames = scenario.tier_frames
        draft.connected.add(name)
        if rank < 0:
            draft.processes[name] = self.states.birth(name, lambda: Server(name, settings, oracle, frames))
        else:
            restarted = "_" in name
            make = lambda: Trainer(name, rank, restarted, scenario, settings, oracle)  # noqa: E731
            draft.processes[name] = self.states.birth(name, make)

    def after(self, state: GlobalState, action: Action) -> GlobalState:
        """The state after an action that is enabled."""
        draft = Draft(state)
        kind = action[0]
        if kind == "message":
            draft.flight.remove(action[1])
            self._arrive(draft, action[1])
        elif kind == "word":
            self._hear(draft, action[1], action[2])
        elif action == ("crash", COORDINATOR):
            draft.spend("coordinators")
            del draft.processes[COORDINATOR]
            draft.lines, draft.connected = {}, set()
        elif kind == "crash":
            _, name, takes_along = action
            draft.spend("trainers" if name == "trainers" else "servers")
            self._end(draft, self._trainers(draft) if name == "trainers" else [name], takes_along)
        elif kind == "lease":
            draft.spend("leases")
            self._at(draft, COORDINATOR, "lease", action[1], self.states.word({"type": "lease", "name": action[1]}))
        elif kind == "hurry":
            draft.spend("leases")
            self._at(draft, COORDINATOR, "time", None, 0)
        elif kind == "cut":
            draft.spend("cuts")
            draft.cuts |= {*action[1]}
            if action[2]:
                draft.flight = [self._as_it_arrives(draft, number) for number in draft.flight]
        elif kind == "complain":
            pairs = sorted({tuple(sorted(pair)) for pair in draft.cuts})
            self._at(draft, COORDINATOR, "complaints", pairs, self.states.word({"type": "complaints", "pairs": pairs}))
        elif kind == "drain":
            draft.spend("moves")
            self._at(draft, COORDINATOR, "drain", action[1], self.states.word({"type": "drain", "what": action[1]}))
        elif kind == "start trainers":
            self._at(draft, COORDINATOR, "start", None, 0)
        elif kind == "start coordinator":
            draft.term += 1
            self._start_coordinator(draft)
        elif kind == "rejoin":
            draft.connected.add(action[1])
            self._at(draft, action[1], "rejoin", None, 0)
        elif kind == "time":
            for name in sorted(draft.processes):
                self._at(draft, name, "time", None, 0)
        return draft.finish()

    def _arrive(self, draft: Draft, number: int) -> None:
        message = self.states.messages.things[number]
        if message[0] == "request":
            call: Call = message[1]
            if call.receiver in draft.processes:
                self._at(draft, call.receiver, "request", call, number)
            elif call.sender in draft.processes:
                self._at(draft, call.sender, "end", call.token, number)
        elif message[0] == "end":
            self._at(draft, message[1], "end", message[2], number)
        elif message[0] == "disk":
            self._at(draft, message[1], "disk", None, number)
        elif message[0] == "answer":
            _, _, asker, token, answer = message
            self._at(draft, asker, "answer", (token, answer), number)
        else:
            _, _, to, *what = message
            self._at(draft, to, "loss", tuple(what), number)
        self._end_those_over(draft)

    def _hear(self, draft: Draft, origin: str, to: str) -> None:
        word = draft.lines[origin, to].pop(0)
        message = self.states.words.things[word]
        if to == COORDINATOR:
            if message["type"] == "lost":
                self._at(draft, to, "lost", origin, self.states.word({"type": "lost", "name": origin}))
            else:
                self._at(draft, to, "heard", (origin, message), self.states.word({"from": origin, "word": word}))
        elif message["type"] == "fenced":
            trainers = self._trainers(draft)
            self._end(draft, trainers if to in trainers else [to], takes_along=False)
        else:
            self._at(draft, to, "told", message, word)
        self._end_those_over(draft)

    def _trainers(self, draft: Draft) -> list[str]:
        return self.states.of_role("trainer", draft.processes.items())

    def _end_those_over(self, draft: Draft) -> None:
        views = {name: self.states.view(number) for name, number in draft.processes.items()}
        for name, view in views.items():
            if not view["over"]:
                continue
            if view["role"] == "trainer":
                self._end(draft, self._trainers(draft), takes_along=False)
                continue
            self._end(draft, [name], takes_along=False)
            if COORDINATOR in draft.processes:  # as a new one, on the same host
                known = set(draft.processes)
                self._at(draft, COORDINATOR, "join", join_of("server", "one", 0), 0)
                for heir in set(draft.processes) - known:
                    ends = {name: heir}
                    draft.cuts |= {(ends.get(one, one), ends.get(other, other)) for one, other in draft.cuts}

    def _end(self, draft: Draft, names: list[str], takes_along: bool) -> None:
        """Some processes are gone, with what they have under way or without."""
        for name in [name for name in names if name in draft.processes]:
            del draft.processes[name]
            kept, answered = [], set()
            for number in draft.flight:
                origin, to, token = _ends(self.states.messages.things[number])
                if to == name and self.states.messages.things[number][0] != "request":
                    continue
                if origin == name and takes_along:
                    continue
                kept.append(number)
                if name in (origin, to):
                    answered.add((origin if to == name else to, token))
            draft.flight = kept
            for other, number in draft.processes.items():
                for token, asked in self.states.view(number)["calls"]:
                    if asked == name and (other, token) not in answered:
                        draft.flight.append(self.states.message(("end", other, token), ("end", other, token)))
            draft.lines.pop((COORDINATOR, name), None)
            if name in draft.connected and COORDINATOR in draft.processes:
                draft.say(name, COORDINATOR, self.states.word({"type": "lost"}))
            draft.connected.discard(name)


def _ends(message: tuple[Any, ...]) -> tuple[str, str, str]:
    """Sender, receiver, and the token of the call it belongs to."""
    if message[0] == "request":
        return message[1].sender, message[1].receiver, message[1].token
    if message[0] == "end":
        return "", message[1], message[2]
    if message[0] == "disk":
        return "", message[1], ""
    return message[1], message[2], message[3] if message[0] == "answer" else ""
