"""What trainers of a simulated cluster do: look up, push, exchange losses, take snapshots; go on after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.result import SimulationResult
from harness.scenario import (
    Load,
    Scenario,
    bags_of,
    dense_after,
    gradients_of,
    load_all,
    loss_of,
    numbers_in,
    payload_of,
    touched,
)
from torch_ecrec.client.client import Client
from torch_ecrec.client.reads import LookUp
from torch_ecrec.layout.routing import BagRoute, Parts, Route
from torch_ecrec.protocol import wire

Looked = tuple[list[Parts], list[torch.Tensor]]


def asks_ahead(step: int, trainer: int) -> bool:
    """Whether a trainer sends its lookups of the next step with the push of this one, as those with a pipeline do."""
    return (step + trainer) % 3 != 0


def announced(step: int, trainer: int) -> list[int]:
    """Steps whose rows a trainer announces for a lookup: most often that of its step, or twice, none, or another."""
    return {1: [], 4: [step, step], 6: [step + 1000]}.get((3 * step + trainer) % 7, [step])


def routes_of(scenario: Scenario, step: int, trainer: int, client: Client) -> tuple[list[Route], list[BagRoute]]:
    """What a trainer looks up and pushes in a step."""
    rows = [torch.from_numpy(r) for r in touched(scenario, step, trainer)]
    pooled = bags_of(scenario, step, trainer) if scenario.pooled else []
    bags = [client.route_bags(table_group, *of_table_group) for table_group, of_table_group in enumerate(pooled)]
    return [client.route(s, r) for s, r in enumerate(rows)], bags


class TrainerScripts:
    """The trainers of a simulated cluster: each is a generator that yields the conditions it waits for.

    Args:
        scenario: what runs.
        result: gets what they see and compute; what they did before they went back must come out the same.
        on_step: told (trainer, step) when a trainer has completed a step, counted from the first of training.
    """

    def __init__(self, scenario: Scenario, result: SimulationResult, on_step: Callable[[int, int], None]) -> None:
        self._scenario, self._result, self._on_step = scenario, result, on_step
        self._dense_of = [1.0] * scenario.trainers
        self._contributions: dict[int, dict[int, float]] = {}  # step -> trainer -> its loss
        self._lives = 0
        self._scripts: list[Iterator[Callable[[], bool]] | None] = []  # None: done
        self._may_go_on: list[Callable[[], bool]] = []

    def begin(self) -> None:
        """All trainers start (again); each has nothing to do until it has a name."""
        self._contributions = {}
        self._lives += 1
        self._scripts = [iter(()) for _ in range(self._scenario.trainers)]
        self._may_go_on = [lambda: False] * self._scenario.trainers

    def on_welcome(self, trainer: int, client: Client) -> None:
        """A trainer has its name, and its client."""
        self._scripts[trainer] = self._script(trainer, client)
        self._may_go_on[trainer] = lambda: True

    @property
    def done(self) -> bool:
        """Whether all have come to the end of their training."""
        return all(script is None for script in self._scripts)

    def go_on(self, is_dead: Callable[[int], bool]) -> None:
        """Runs those that live until all of them wait, or are done."""
        moved = True
        while moved:
            moved = False
            for i, script in enumerate(list(self._scripts)):
                if script is not None and not is_dead(i) and self._may_go_on[i]():
                    moved = True
                    try:
                        self._may_go_on[i] = next(script)
                    except StopIteration:
                        self._scripts[i] = None

    def _script(self, i: int, client: Client) -> Iterator[Callable[[], bool]]:
        """What trainer i does: yields conditions to wait for."""
        scenario, job = self._scenario, self._scenario.job
        yield lambda: client.placement is not None and client.resumed
        self._dense_of[i], done = 1.0, 0
        if client.load_end is not None:
            done = client.resume_done
            self._result.resumed += [done] if i == 0 else []
        elif i == 0:
            yield from load_all(client, self._loads, self._on_read)
            self._result.loaded_again += client.resume_step > 0
        yield lambda: client.load_end is not None
        if done:
            stored: list[wire.Snapshots] = []
            client.run(client.stored, 0, client.resume_step, stored.append)
            yield lambda: bool(stored)
            payload = stored[0].payloads[stored[0].trainers.index(i)]
            self._dense_of[i] = float(payload.view(torch.float64))
        yield from self._overwrite(i, client, done, ended=True)
        ahead: LookUp | None = None
        for step in range(done + 1, scenario.steps + 1):
            if ahead is None or ahead.step != client.step:  # not asked for with the push before, or overwritten since
                routes, bags = routes_of(scenario, step, i, client)
                got: list[Looked] = []
                client.run(client.lookup_bags, routes, bags, lambda *looked, got=got: got.append(looked))
            yield lambda got=got: bool(got)  # type: ignore[misc]
            weights = [*(torch.cat(parts) for parts in got[0][0]), *got[0][1]]
            self._same(self._result.lookups, (step, i), weights)
            loss = loss_of(weights, self._dense_of[i])
            self._same(self._result.losses, (step, i), loss)
            gradients = gradients_of(weights, step, i, self._dense_of[i])
            if not client.may_push():
                client.run(client.waits.held, True)
                yield client.may_push
                client.run(client.waits.held, False)
            rates, table_groups = [table_group.optimizer.lr for table_group in job.table_groups], len(job.table_groups)
            before, ahead = (routes, bags), None
            if scenario.asks_ahead and step < scenario.steps and asks_ahead(step, i):
                routes, bags = routes_of(scenario, step + 1, i, client)
                got = []
                ahead = client.ahead(routes, bags, lambda *looked, got=got: got.append(looked))
                self._result.asked_ahead += 1
            then = [] if ahead is None else [ahead]
            client.run(
                client.push, before[0], gradients[:table_groups], rates, before[1], gradients[table_groups:], then
            )
            self._announce(i, client, step, first=step == done + 1)
            self._contributions.setdefault(step, {})[i] = loss
            yield lambda step=step: len(self._contributions[step]) == scenario.trainers  # type: ignore[misc]
            self._dense_of[i] = dense_after(self._dense_of[i], self._contributions[step])
            if i == 0:
                self._same(self._result.dense, step, self._dense_of[0])
            yield from self._overwrite(i, client, step, ended=False)
            if client.snapshot_due:
                client.run(client.snapshot, payload_of(self._dense_of[i]), [client.done])
            yield from self._overwrite(i, client, step, ended=True)
            self._on_step(i, step)

    def _announce(self, i: int, client: Client, step: int, first: bool) -> None:
        """Tells slots with tiers of the lookup of one later step; of all until then where it is the `first` time."""
        last = min(step + self._scenario.announces, self._scenario.steps)
        for later in range(step + 2 if first else max(step + 2, step + self._scenario.announces), last + 1):
            for told in announced(later, i) if client.hinted else ():
                client.run(client.announce, later - step - 1, *routes_of(self._scenario, told, i, client))
                self._result.announced += 1

    def _overwrite(self, i: int, client: Client, step: int, ended: bool) -> Iterator[Callable[[], bool]]:
        """What is loaded after a step of training, as a session of trainer i does it."""
        for number, (after, late, load) in enumerate(self._scenario.overwrites):
            if (after, late) != (step, ended):
                continue
            rows = torch.arange(load.first, load.end)
            route = client.route(load.table_group, rows)
            read: list[torch.Tensor] = []
            client.run(client.read, load.table_group, route, read.append)
            yield lambda read=read: bool(read)  # type: ignore[misc]
            schema = client.job.table_groups[load.table_group].schema
            before_UW = numbers_in(read[0], schema)
            self._same(self._result.overwritten, (number, i), before_UW)
            client.run(client.without_snapshot)
            yield client.may_push
            part = load.part(i, self._scenario.trainers, load.values(before_UW), schema)
            if part is None:
                client.run(client.pass_)
            else:
                rows, values_Ub, first_byte = part
                client.run(client.load, load.table_group, client.route(load.table_group, rows), values_Ub, first_byte)

    @property
    def _loads(self) -> tuple[Load, ...]:
        before = self._scenario.loads_before
        return before if before is not None and self._lives == 1 else self._scenario.loads

    def _on_read(self, number: int, records_UW: torch.Tensor) -> None:
        if self._loads is self._scenario.loads:
            self._same(self._result.reads, number, records_UW)

    @staticmethod
    def _same(known: dict[Any, Any], key: Any, value: Any) -> None:
        """Records a value; one that is known from before the trainers went back must be the same."""
        values, before = (v if isinstance(v, list) else [v] for v in (value, known.setdefault(key, value)))
        same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(values, before, strict=True))
        assert same, f"(step, trainer) {key}: another value after going back than before"
