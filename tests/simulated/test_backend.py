"""What the nn layer relies on of its backend, held against every one there is: the real session and that of the tests.

    real   `Session` over the simulated cluster: three servers, records on all of them, parity
    fake   `FakeSession`: tables in memory, with which the nn layer is tested

Expected values come from neither: they are worked out here, from what was read before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from fake_session import FakeSession
from harness import Scenario, SimulatedCluster
from torch import Tensor
from virtual_session import VirtualSession

from torch_ecrec.client.session import Session
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.recorder import Recorded
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec

JOB = JobSpec(
    (
        TableSpec("a", 31, 4, -1.0, 1.0, OptimizerSpec("sgd", 0.5)),
        TableSpec("b", 20, 4, -1.0, 1.0, OptimizerSpec("sgd", 0.5)),
        TableSpec("c", 17, 8, -1.0, 1.0, OptimizerSpec("rowwise_adagrad", 0.1, eps=1e-8)),
        TableSpec("d", 13, 4, -1.0, 1.0, OptimizerSpec("adagrad", 0.1, eps=1e-8)),
    ),
    CodeSpec(3, 2, 1),
    trainers=1,
)
TABLE_GROUPS = range(len(JOB.table_groups))
RATES = [0.5, 0.1, 0.25]


class Lives(Protocol):
    """One trainer's backend, and that of its next life."""

    session: Any

    def die(self) -> None:
        """The trainer is lost; `session` is that of another one, which takes its place."""


class Real:
    def __init__(self) -> None:
        self.cluster = SimulatedCluster(Scenario(tables=JOB.tables, code=JOB.code, trainers=1, spares=2))
        self.session = self._joined("", restarted=False)

    def _joined(self, before: str, restarted: bool) -> VirtualSession:
        while not self.cluster.clients or before in self.cluster.clients:
            assert self.cluster.network.clock.advance()
        (client,) = self.cluster.clients.values()
        session = VirtualSession(client, lambda message: None, lambda: None, restarted)
        session.cluster = self.cluster
        return session

    def die(self) -> None:
        (name,) = self.cluster.clients
        self.cluster.network.kill(name)
        self.session = self._joined(name, restarted=True)


class Fake:
    def __init__(self) -> None:
        self.session = FakeSession(JOB)

    def die(self) -> None:
        self.session = FakeSession(JOB, before=self.session, step=self.session.step - 1)


@pytest.fixture(params=[Real, Fake])
def lives(request: pytest.FixtureRequest) -> Lives:
    lives: Lives = request.param()
    return lives


@pytest.fixture
def session(lives: Lives) -> Any:
    """Ready to train."""
    lives.session.loaded()
    return lives.session


def every(table_group: int) -> Tensor:
    return torch.arange(JOB.table_groups[table_group].rows)


def all_records(session: EmbeddingBackend) -> list[Tensor]:
    return [session.read(table_group, every(table_group)).clone() for table_group in TABLE_GROUPS]


def random_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(session: EmbeddingBackend, seed: int) -> list[Tensor]:
    """Unique rows of each table group, as the nn layer has them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        session.arrange(s, torch.randint(0, table_group.rows, (12,), generator=generator))[0]
        for s, table_group in enumerate(JOB.table_groups)
    ]


def weights(session: EmbeddingBackend, rows: list[Tensor]) -> list[Tensor]:
    return [torch.cat(parts).clone() for parts in session.lookup_parts(rows)]


def step(session: EmbeddingBackend, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """One step: what was pushed. Snapshots are due."""
    rows = batch(session, seed)
    gradients = [random_of(seed, *w.shape) for w in weights(session, rows)]
    session.push(rows, gradients, RATES)
    session.snapshot(torch.tensor([seed, 2, 3], dtype=torch.uint8), [session.step - 1, seed])
    return rows, gradients


# the form -----------------------------------------------------------------------------------------


METHODS = sorted(name for name, value in vars(EmbeddingBackend).items() if inspect.isfunction(value) and name[0] != "_")
ATTRIBUTES = [*EmbeddingBackend.__annotations__, "step", "restarted"]


@pytest.mark.parametrize("cls", [Session, FakeSession])
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_those_of_the_protocol(cls: type, name: str) -> None:
    assert _form(getattr(cls, name)) == _form(getattr(EmbeddingBackend, name))


@pytest.mark.parametrize("name", sorted(vars(Recorded).keys() & set(METHODS)))
def test_what_a_recorder_passes_on_is_of_the_protocol(name: str) -> None:
    assert _form(vars(Recorded)[name]) == _form(getattr(EmbeddingBackend, name))


def _form(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters; whoever has more cannot be called with less."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_the_protocol_is_not_empty() -> None:
    assert {"lookup_parts", "push", "resume"} < set(METHODS) and {"job", "restarted"} < set(ATTRIBUTES)


def test_attributes(lives: Lives) -> None:
    session = lives.session
    assert all(hasattr(session, name) for name in ATTRIBUTES)
    assert session.job.tables == JOB.tables and (session.trainer, session.trainers) == (0, 1)
    assert session.step == 1 and session.restarted is False and session.snapshot_every == 1
    session.snapshot_every = 3
    assert session.snapshot_every == 3


# rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[], [5], [7, 2, 7, 30, 50, 2, 0, 50]], ids=len)
def test_arranged_rows_are_unique_and_can_be_put_back(lives: Lives, rows: list[int]) -> None:
    asked = torch.tensor(rows, dtype=torch.int64)
    unique, inverse = lives.session.arrange(0, asked)
    assert unique.dtype == inverse.dtype == torch.int64 and sorted(unique.tolist()) == sorted(set(rows))
    assert torch.equal(unique[inverse], asked)


@pytest.mark.parametrize("arranged", [True, False])
def test_a_lookup_gives_the_weights_in_the_order_of_its_rows(session: Any, arranged: bool) -> None:
    rows = batch(session, 1) if arranged else [torch.tensor([9, 0, 4, 12]) for _ in TABLE_GROUPS]
    records = all_records(session)
    for _ in range(2):
        found = session.lookup_parts(rows)
        for s, table_group in enumerate(JOB.table_groups):
            assert found[s] and all(
                part.dtype == torch.float32 and part.shape[1] == table_group.dim for part in found[s]
            )
            assert torch.equal(torch.cat(found[s]), records[s][rows[s], : table_group.dim])
    assert session.step == 1, "a lookup ends nothing"


def test_a_lookup_of_no_rows_has_parts_all_the_same(session: Any) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    for rows in ([nothing for _ in TABLE_GROUPS], [nothing, torch.tensor([3]), nothing]):
        found = session.lookup_parts(rows)
        assert [torch.cat(parts).shape for parts in found] == [
            (len(r), table_group.dim) for r, table_group in zip(rows, JOB.table_groups, strict=True)
        ]


def test_rows_that_are_asked_for_ahead_are_those_of_the_lookup(session: Any) -> None:
    step(session, 1)
    rows, others = batch(session, 2), batch(session, 3)
    right = weights(session, rows), weights(session, others)
    session.look_ahead(rows)
    assert session.step == 2
    assert all(map(torch.equal, weights(session, others), right[1])), "another lookup in between"
    assert all(map(torch.equal, weights(session, rows), right[0]))
    session.look_ahead(rows)
    session.push(rows, [torch.zeros_like(w) for w in right[0]], RATES)
    assert session.step == 3, "nobody took what was asked for"


# steps --------------------------------------------------------------------------------------------


def test_a_push_ends_the_step_and_moves_what_it_names(session: Any) -> None:
    """Three steps of three optimizers, worked out here."""
    expected = all_records(session)
    for number in range(1, 4):
        rows, gradients = step(session, number)
        assert session.step == number + 1
        for s, (table_group, rows_U, gradient_UD) in enumerate(zip(JOB.table_groups, rows, gradients, strict=True)):
            records, dim = expected[s][rows_U], table_group.dim
            scale = torch.ones(1)
            if table_group.optimizer.kind != "sgd":
                squares = gradient_UD.square()
                records[:, dim:] += squares.mean(1, keepdim=True) if records.shape[1] == dim + 1 else squares
                scale = records[:, dim:].sqrt() + 1e-8
            records[:, :dim] -= RATES[s] * gradient_UD / scale
            expected[s][rows_U] = records
        for s, found in enumerate(all_records(session)):
            torch.testing.assert_close(found, expected[s], rtol=1e-5, atol=1e-6)
            untouched = torch.ones(len(found), dtype=torch.bool)
            untouched[rows[s]] = False
            expected[s][~untouched] = found[~untouched]
            assert torch.equal(found[untouched], expected[s][untouched])


def test_a_push_without_rows_is_a_step(session: Any) -> None:
    before = all_records(session)
    session.push(
        [torch.empty(0, dtype=torch.int64) for _ in TABLE_GROUPS],
        [torch.empty(0, s.dim) for s in JOB.table_groups],
        RATES,
    )
    assert session.step == 2 and all(map(torch.equal, all_records(session), before))


def test_a_flush_may_be_called_at_any_time(session: Any) -> None:
    session.flush()
    step(session, 1)
    session.flush()
    session.flush()
    assert session.step == 2


def test_a_session_may_be_closed_twice(session: Any) -> None:
    step(session, 1)
    session.close()
    session.close()


# initial values -----------------------------------------------------------------------------------


def test_what_is_loaded_is_read_and_looked_up(lives: Lives) -> None:
    session = lives.session
    before = all_records(session)
    rows = torch.tensor([2, 3, 40])
    values = random_of(5, 3, before[0].shape[1])
    session.load(0, rows, values)
    given = values.clone()
    values.zero_()
    before[0][rows] = given
    assert all(map(torch.equal, all_records(session), before)), "copied, and nothing else has changed"
    session.load(0, rows[:1], given[1:2])
    before[0][2] = given[1]
    session.loaded()
    assert all(map(torch.equal, all_records(session), before)), "the last values count"
    assert torch.equal(weights(session, [rows, rows[:2], rows[:2]])[0], before[0][rows, : JOB.table_groups[0].dim])
    assert session.step == 1


def test_nobody_trains_before_loading_has_ended_nor_loads_after_it(lives: Lives) -> None:
    session, rows = lives.session, [torch.tensor([1]) for _ in TABLE_GROUPS]
    gradients = [torch.zeros(1, table_group.dim) for table_group in JOB.table_groups]
    for action in (
        lambda: session.lookup_parts(rows),
        lambda: session.look_ahead(rows),
        lambda: session.push(rows, gradients, RATES),
    ):
        with pytest.raises(RuntimeError, match="calls `loaded`"):
            action()
    record = torch.zeros(1, JOB.table_groups[0].schema.width)
    for bad in ([51], [-1]):
        with pytest.raises(ValueError, match="`rows` must be"):
            session.load(0, torch.tensor(bad), record)
    with pytest.raises(ValueError, match="`rows` must be"):
        session.load(0, torch.tensor([3, 2]), record.repeat(2, 1))
    session.loaded()
    with pytest.raises(ValueError, match="before the first step"):
        session.load(0, torch.tensor([0]), record)


# loads in training ---------------------------------------------------------------------------------


def test_what_is_overwritten_in_training_is_read_and_looked_up(session: Any) -> None:
    """Also by a lookup whose rows were asked for before; and it is no step."""
    step(session, 1)
    rows = batch(session, 2)
    before = all_records(session)
    session.look_ahead(rows)
    values = random_of(5, JOB.table_groups[0].rows, before[0].shape[1])
    session.overwrite(0, every(0), values.view(torch.uint8))
    before[0] = values.clone()
    values.zero_()
    assert all(map(torch.equal, all_records(session), before)), "copied, and nothing else has changed"
    assert torch.equal(weights(session, rows)[0], before[0][rows[0], : JOB.table_groups[0].dim])
    assert session.step == 2
    step(session, 2)
    assert session.step == 3


def test_some_bytes_of_records_may_be_overwritten(session: Any) -> None:
    """Of table group 1, rows of 8 weights and one number of state: weights 2 to 4, then the state; then nothing at
    all."""
    step(session, 1)
    before, rows = all_records(session), torch.tensor([3, 4, 16])
    values = random_of(6, 3, 4)
    session.overwrite(1, rows, values[:, :3].contiguous().view(torch.uint8), 2 * 4)
    session.overwrite(1, rows[1:], values[1:, 3:].contiguous().view(torch.uint8), 8 * 4)
    session.overwrite(1, rows[:0], None)
    before[1][rows, 2:5] = values[:, :3]
    before[1][rows[1:], 8] = values[1:, 3]
    assert all(map(torch.equal, all_records(session), before)) and session.step == 2


def test_bad_overwrites_are_refused(lives: Lives) -> None:
    session, record = lives.session, torch.zeros(1, JOB.table_groups[0].schema.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="calls `loaded`"):
        session.overwrite(0, torch.tensor([1]), record)
    session.loaded()
    for bad in ([51], [-1], [3, 2]):
        with pytest.raises(ValueError, match="`rows` must be"):
            session.overwrite(0, torch.tensor(bad), record.repeat(len(bad), 1))
    for rows, values, first in ([1, 2], record, 0), ([1], record, 1), ([1], record, -1), ([1], record[:, :0], 0):
        with pytest.raises(ValueError, match=r"`values` must have [12] rows of bytes of records, which"):
            session.overwrite(0, torch.tensor(rows), values, first)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("ended", [False, True], ids=["in the step", "after it"])
def test_the_next_life_has_what_was_overwritten_if_the_step_ended_with_it(
    lives: Lives, steps: int, ended: bool
) -> None:
    """It makes again what came after; before it asks where it goes on, it overwrites nothing that was trained."""
    session = lives.session
    session.loaded()
    for number in range(1, steps):
        step(session, number)
    rows = batch(session, 7)
    if steps:
        session.push(rows, [torch.ones_like(w) for w in weights(session, rows)], RATES)
    values = random_of(5, 5, JOB.table_groups[0].schema.width)
    plain = all_records(session)
    snapshot = torch.tensor([steps, 2, 3], dtype=torch.uint8), [steps, steps]
    if ended and steps:
        session.snapshot(*snapshot)
    session.overwrite(0, torch.arange(5), values.view(torch.uint8))
    if not ended and steps:
        session.snapshot(*snapshot)
        plain[0][:5] = values
    session.flush()
    lives.die()
    session = lives.session
    session.loaded()
    session.overwrite(0, torch.arange(5), (values + 1).view(torch.uint8))
    if not steps:
        plain[0][:5] = values + 1
    assert session.resume()[0] == steps
    assert all(map(torch.equal, all_records(session), plain))
    session.overwrite(0, torch.arange(5), (values + 2).view(torch.uint8))
    plain[0][:5] = values + 2
    assert all(map(torch.equal, all_records(session), plain)) and session.step == steps + 1


# restarts -----------------------------------------------------------------------------------------


def test_a_header_is_a_list_of_int(session: Any) -> None:
    session.push(
        [torch.empty(0, dtype=torch.int64) for _ in TABLE_GROUPS],
        [torch.empty(0, s.dim) for s in JOB.table_groups],
        RATES,
    )
    with pytest.raises(TypeError, match="`header` must be a list of int"):
        session.snapshot(torch.zeros(1, dtype=torch.uint8), [1, "no"])


@pytest.mark.parametrize("steps", [0, 3])
def test_the_next_life_goes_on_after_the_last_step(lives: Lives, steps: int) -> None:
    session = lives.session
    session.loaded()
    for number in range(1, steps + 1):
        step(session, number)
    session.flush()
    before = all_records(session)
    lives.die()
    session = lives.session
    assert session.restarted is True
    session.load(0, torch.tensor([0, 1]), torch.zeros(2, JOB.table_groups[0].schema.width))  # does nothing
    done, parts = session.resume()
    assert done == steps
    assert [(payload.tolist(), list(header)) for payload, header in parts] == ([([3, 2, 3], [3, 3])] if steps else [])
    session.loaded()
    assert session.step == steps + 1 and all(map(torch.equal, all_records(session), before))
    step(session, steps + 1)
    session.flush()
    assert session.step == steps + 2
