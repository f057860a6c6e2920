"""Messages whose values are what their classes declare, and that cannot be of this job: refused, before anything."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from harness import Scenario, SimulatedCluster
from junk import plain

from torch_ecrec.client.client import Client
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.messages import Placement, SlotPlace
from torch_ecrec.protocol.wire import Ok, Refused, Unknown
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport import complaints
from torch_ecrec.transport.node import Node

SLOT, SOURCE = 1, 0


def bags(positions: list[int], lengths: list[int], factors: list[float] | None = None) -> wire.Bags:
    """Bags of some positions."""
    weights = None if factors is None else torch.tensor(factors)
    return wire.Bags(torch.tensor(positions, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), weights)


BAGS = [bags([0, 2, 2], [2, 1]), bags([1], [1], [0.5])]


def training() -> SimulatedCluster:
    """A cluster in the middle of training, all of whose slots have let go of their first steps."""
    cluster = SimulatedCluster(Scenario(code=CodeSpec(3, 2, 1), steps=8))
    while min((slot.log.floor for slot in cluster.slots()), default=0) < 3:
        cluster._run_trainers()
        assert cluster.network.clock.advance()
    return cluster


@pytest.fixture(scope="module")
def cluster() -> SimulatedCluster:
    return training()


def host_of(cluster: SimulatedCluster, slot: int) -> Any:
    return next(host for host in cluster.hosts.values() if slot in host.slots)


def ones(*positions: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int64)


def valid(cluster: SimulatedCluster) -> dict[str, wire.Request]:
    """A request of each kind that slot 1 could answer, now or later."""
    host = host_of(cluster, SLOT)
    slot, job = host.slots[SLOT], host.job
    step = slot.rule.applied + 1
    positions = [ones(0, 2), ones(1)]
    gradients = [
        torch.zeros(len(p), table_group.dim) for p, table_group in zip(positions, job.table_groups, strict=True)
    ]
    of_bags = [
        torch.zeros(len(bags.lengths), table_group.dim)
        for bags, table_group in zip(BAGS, job.table_groups, strict=True)
    ]
    runs = [(table_group, run) for table_group, layout in enumerate(host.layouts) for run in layout.runs(SOURCE, SLOT)]
    parts = [torch.arange(run.first, run.end) for _, run in runs]
    widths = [job.table_groups[table_group].schema.nbytes for table_group, _ in runs]
    deltas = [torch.zeros((len(p), width), dtype=torch.uint8) for p, width in zip(parts, widths, strict=True)]
    sources = {source: step for source in range(3)}
    return {
        "Lookup": wire.Lookup(SLOT, 0, step + 5, positions, bags=BAGS),
        "Push": wire.Push(
            SLOT,
            0,
            step + 5,
            0,
            positions,
            gradients,
            [0.1, 0.1],
            1,
            0,
            BAGS,
            of_bags,
            [wire.Ask(positions, False, BAGS)],
        ),
        "Announce": wire.Announce(SLOT, 0, step + 5, [ones(2, 0, 2), ones(1)]),
        "WhenAcknowledged": wire.WhenAcknowledged(SLOT, 0, step + 5),
        "Load": wire.Load(SLOT, 0, step + 5, 1, 0, ones(0, 2), 0, None, 0, False),
        "NoUpdate": wire.NoUpdate(SLOT, 0, step + 5, 1, 0),
        "Snapshot": wire.Snapshot(SLOT, 0, step, 0, torch.zeros(3, dtype=torch.uint8), [step]),
        "Export": wire.Export(SLOT, 0, 0, step + 5, positions[0]),
        "WhoIsAwaited": wire.WhoIsAwaited(SLOT, 0),
        "Fold": wire.Fold(SLOT, 0, SOURCE, 0, step + 5, step - 1, parts, deltas),
        "Attach": wire.Attach(SLOT, 0, SOURCE, 0, 0, 0),
        "Adopt": wire.Adopt(SLOT, 0, SOURCE, 0, False),
        "Cut": wire.Cut(SLOT, 0, SOURCE, 0, False, step),
        "Versions": wire.Versions(SLOT, 0),
        "Fetch": wire.Fetch(SLOT, 0, 0, True, ones(0), sources, False),
        "FetchSeals": wire.FetchSeals(SLOT, 0, 0, ones(0), step - 1),
        "FetchSnapshots": wire.FetchSnapshots(SLOT, 0, -1, 2, 0),
        "FetchChanged": wire.FetchChanged(SLOT, 0, 0, 0),
        "Copy": wire.Copy(SLOT, 0, 0, 0, True, ones(0, 1)),
        "HandOver": wire.HandOver(SLOT, 0, 0),
    }


HUGE = 1 << 40
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("Announce", {"step": 0}, "`step` must be at least 1"),
    ("Announce", {"step": HUGE}, "`step` must be at most"),
    ("Announce", {"positions": [ones(0)]}, "`positions` must be one of each of 2 table groups, got 1"),
    ("Announce", {"positions": [ones(), ones(1, -1)]}, "position -1 of table group 1"),
    ("Lookup", {"step": 0}, "`step` must be at least 1"),
    ("Lookup", {"step": HUGE}, "`step` must be at most"),
    ("Push", {"trainer": 2}, r"`trainer` must be in 0\.\.1, got 2"),
    ("Push", {"trainer": -1}, "`trainer` must be"),
    ("Lookup", {"bfloat16": True, "int8": True}, "`bfloat16` and `int8` must not both be asked for"),
    ("Lookup", {"positions": [ones(0)]}, "`positions` must be one of each of 2 table groups, got 1"),
    ("Lookup", {"positions": [ones(0, -1), ones()]}, "position -1 of table group 0"),
    ("Lookup", {"positions": [ones(0), ones(HUGE)]}, f"position {HUGE} of table group 1: slot 1 has"),
    ("Lookup", {"bags": BAGS[:1]}, "`bags` must be one of each of 2 table groups, got 1"),
    ("Lookup", {"int8": True}, "`int8` must not be asked for with `bags`"),
    ("Lookup", {"bags": [BAGS[0], bags([99], [1])]}, "`bags` of table group 1: .*99"),
    ("Lookup", {"bags": [BAGS[0], bags([-1], [1])]}, "`bags` of table group 1: .*-1"),
    ("Lookup", {"bags": [BAGS[0], bags([0, 1], [2, 0])]}, "`bags` of table group 1: lengths must be at least 1, got 0"),
    (
        "Lookup",
        {"bags": [BAGS[0], bags([0, 1], [1])]},
        "`bags` of table group 1: lengths must sum to 2 positions, got 1",
    ),
    ("Lookup", {"bags": [BAGS[0], bags([0, 1], [2], [1.0])]}, "`bags` of table group 1: weights must be 2"),
    ("Push", {"bags": [BAGS[0], bags([99], [1])]}, "`bags` of table group 1: .*99"),
    ("Push", {"bag_gradients": [torch.zeros(2, 3)]}, "`bag_gradients` must be 2, got 1"),
    ("Push", {"bag_gradients": [torch.zeros(1, 3), torch.zeros(1, 2)]}, r"must have shape \(2, 3\), got \(1, 3\)"),
    ("Push", {"step": 0, "resumable": -1}, "`resumable` must not be negative"),
    ("Push", {"step": HUGE}, "`step` must be at most"),
    ("Push", {"resumable": -1}, "`resumable` must not be negative"),
    ("Push", {"resumable": 900}, "`resumable` must be before step"),
    ("Push", {"positions": [ones(2, 0), ones(1)]}, "must be ascending without duplicates"),
    ("Push", {"positions": [ones(2, 2), ones(1)]}, "must be ascending without duplicates"),
    ("Push", {"positions": [ones(0, HUGE), ones(1)]}, r"positions must be in 0\.\."),
    ("Push", {"positions": [ones(-3, 1), ones(1)]}, r"positions must be in 0\.\."),
    ("Push", {"gradients": [torch.zeros(2, 3)]}, "`gradients` must be one of each"),
    ("Push", {"gradients": [torch.zeros(2, 4), torch.zeros(1, 2)]}, r"must have shape \(2, 3\), got \(2, 4\)"),
    ("Push", {"gradients": [torch.zeros(1, 3), torch.zeros(1, 2)]}, r"must have shape \(2, 3\), got \(1, 3\)"),
    ("Push", {"rates": [0.1]}, "`rates` must be one of each"),
    ("Push", {"iteration": 0}, r"`iteration` must be in 1\.\."),
    ("Push", {"iteration": HUGE}, r"`iteration` must be in 1\.\."),
    ("Push", {"then": [wire.Ask([ones(0)])]}, "`positions` must be one of each of 2 table groups, got 1"),
    (
        "Push",
        {"then": [wire.Ask([ones(0), ones()]), wire.Ask([ones(), ones(HUGE)])]},
        f"position {HUGE} of table group 1",
    ),
    (
        "Push",
        {"then": [wire.Ask([ones(), ones()], False, BAGS[:1])]},
        "`bags` must be one of each of 2 table groups, got 1",
    ),
    ("Push", {"then": [wire.Ask([ones(), ones()])] * 1025}, "`then` must be at most 1024 lookups, got 1025"),
    ("WhenAcknowledged", {"step": 0}, "`step` must be at least 1"),
    ("WhenAcknowledged", {"step": HUGE}, "`step` must be at most"),
    ("Load", {"step": HUGE}, "`step` must be at most"),
    ("Load", {"table_group": 2}, "`table_group` must be in"),
    ("Load", {"positions": ones(0, HUGE)}, r"positions must be in 0\.\."),
    ("Load", {"positions": ones(2, 0)}, "must be ascending"),
    ("Load", {"trainer": 2}, "`trainer` must be in"),
    ("Load", {"alone": True}, "`trainer` must be 0 if `alone`, got 1"),
    ("Load", {"first_byte": 4}, "`first_byte` must be 0 without `records`"),
    ("Load", {"records": torch.zeros(1, 5, dtype=torch.uint8)}, "`records` of table group 0 must have shape"),
    ("Load", {"records": torch.zeros(2, 0, dtype=torch.uint8)}, "`records` must be bytes of 16, got 0 from 0"),
    ("Load", {"records": torch.zeros(2, 17, dtype=torch.uint8)}, "`records` must be bytes of 16, got 17 from 0"),
    ("Load", {"records": torch.zeros(2, 4, dtype=torch.uint8), "first_byte": 13}, "got 4 from 13"),
    ("Load", {"records": torch.zeros(2, 4, dtype=torch.uint8), "first_byte": -1}, "got 4 from -1"),
    ("Load", {"resumable": 900}, "`resumable` must be before step"),
    ("NoUpdate", {"step": HUGE}, "`step` must be at most"),
    ("NoUpdate", {"trainer": 2}, "`trainer` must be in"),
    ("NoUpdate", {"resumable": 900}, "`resumable` must be before step"),
    ("Snapshot", {"header": []}, "`header` must begin with steps of training"),
    ("Snapshot", {"header": [HUGE]}, "`header` must begin with steps of training"),
    ("Snapshot", {"step": HUGE}, "`step` must be at most"),
    ("Snapshot", {"trainer": 7}, "`trainer` must be"),
    ("Export", {"table_group": 2}, r"`table_group` must be in 0\.\.1, got 2"),
    ("Export", {"table_group": -1}, "`table_group` must be"),
    ("Export", {"step": -1}, "`step` must not be negative"),
    ("Export", {"positions": ones(HUGE)}, "position"),
    ("Export", {"parity": True, "positions": ones(99)}, "position 99 of table group 0: slot 1 has 5 parities"),
    ("Export", {"step": 0}, "cannot show step 0"),
    ("Fold", {"source": SLOT}, "`source` must be another slot, got 1"),
    ("Fold", {"source": 3}, "`source` must be another slot"),
    ("Fold", {"source_incarnation": HUGE}, "`source_incarnation` must be"),
    ("Fold", {"step": HUGE}, "`step` must be at most"),
    ("Fold", {"floor": 1000}, "`floor` must be before step"),
    ("Fold", {"positions": []}, "must have 2 parts, got 0 of positions"),
    ("Fold", {"deltas": []}, "and 0 of deltas"),
    ("Fold", {"positions": [ones(HUGE), ones(0)]}, "positions must be in"),
    ("Attach", {"source": 9}, "`source` must be another slot"),
    ("Attach", {"source_incarnation": HUGE}, "`source_incarnation` must be"),
    ("Attach", {"base": HUGE}, "`base` must be at most"),
    ("Attach", {"acknowledged": HUGE}, "`acknowledged` must be at most"),
    ("Adopt", {"lost": SLOT}, "`lost` must be another slot"),
    ("Adopt", {"lost_incarnation": HUGE}, "`lost_incarnation` must be"),
    ("Cut", {"cut": HUGE}, "`cut` must be at most"),
    ("Cut", {"cut": 0, "lost_incarnation": 1}, "before the log"),
    ("Fetch", {"table_group": 5}, "`table_group` must be"),
    ("Fetch", {"positions": ones()}, "parities of one base, got 0"),
    ("Fetch", {"positions": ones(77)}, "position 77 of table group 0"),
    ("Fetch", {"as_of": {}}, "`as_of` must have a step of slots"),
    ("Fetch", {"parity": False, "as_of": {2: 3}}, r"`as_of` must have a step of slots \[1\]"),
    ("FetchSeals", {"table_group": 5}, "`table_group` must be"),
    ("FetchSeals", {"positions": ones(77)}, "position 77 of table group 0"),
    ("FetchSeals", {"step": -1}, "`step` must not be negative"),
    ("FetchChanged", {"turn": -1}, "`turn` must not be negative"),
    ("FetchChanged", {"epoch": 7}, "this move is over, or not known yet"),
    ("FetchChanged", {"epoch": 1, "turn": 3}, "turn 3 does not follow on -1"),
    ("Copy", {"table_group": 5}, "`table_group` must be"),
    ("Copy", {"positions": ones(77)}, "position 77 of table group 0: slot 1 has 5 parities"),
    ("Copy", {"epoch": 1}, "nobody has begun to copy this slot"),
    ("HandOver", {"epoch": 1}, "nobody has begun to copy this slot"),
    ("FetchSnapshots", {"holder": 3}, "`holder` must be another slot"),
    ("FetchSnapshots", {"holder_incarnation": HUGE}, "`holder_incarnation` must be"),
]


@pytest.mark.parametrize(("kind", "changes", "says"), BROKEN)
def test_a_request_that_cannot_be_of_this_job_is_refused(
    kind: str, changes: dict[str, Any], says: str, cluster: SimulatedCluster
) -> None:
    request = msgspec.structs.replace(valid(cluster)[kind], **changes)
    host = host_of(cluster, SLOT)
    known = host.known(), [slot.figures() for slot in host.slots.values()]
    answers: list[Any] = []
    host.handle(request, answers.append)
    (answer,) = answers
    assert isinstance(answer, (Refused, wire.Forgotten)), answer
    with pytest.raises(ValueError, match=says):
        raise ValueError(answer.reason)
    assert (host.known(), [slot.figures() for slot in host.slots.values()]) == known, "nothing has changed"


def test_requests_of_each_kind_are_let_in(cluster: SimulatedCluster) -> None:
    host = host_of(cluster, SLOT)
    requests = valid(cluster)
    assert {*requests, "Load"} == set(WIRE.requests)
    for request in requests.values():
        assert host._fault_of(host.slots[SLOT], request) is None


def test_a_base_class_is_no_message() -> None:
    with pytest.raises(ValueError, match="unknown message 'Request'"):
        WIRE.decode_request(plain(["Request", 0, 0, 0]))
    with pytest.raises(ValueError, match="unknown message 'Answer'"):
        WIRE.decode_answer(plain(["Answer"]), wire.Lookup)


def test_who_serves_no_requests_refuses_them(cluster: SimulatedCluster) -> None:
    """A trainer has a port, too."""
    answers: list[Any] = []
    next(iter(cluster.clients.values())).handle(wire.Versions(0, 0), answers.append)
    assert isinstance(answers[0], Refused) and "serves no requests" in answers[0].reason


# answers --------------------------------------------------------------------------------------------

HANDED: list[tuple[dict[str, Any], str]] = [
    ({"data": [ones(0, 1)]}, "`data` must be one of each of 2 table groups, got 1"),
    ({"data": [ones(1, 0), ones()]}, "ascending"),
    ({"data": [ones(0, 1), ones()]}, "`data_records` of table group 0 must have shape"),
    ({"parities": [ones(99), ones()]}, "positions must be in"),
    ({"parity_records": []}, "`parity_records` must be one of each"),
    ({"incarnations": [0]}, "`incarnations` must be 3, got 1"),
    ({"folded": {1: 3}}, "`folded` must have steps of slots"),
    ({"catch_up": {0: -1}}, "`catch_up` must have steps of slots"),
    ({"attached": {9: 0}}, "`attached` must have steps of slots"),
    ({"resumable": {5: 0}}, "`resumable` must have steps of trainers"),
    ({"acknowledged": 1 << 20}, "`acknowledged` must be in"),
    ({"logs": [0, 1, 2]}, "`logs` must be the slot's and its sources'"),
    ({"floors": [0]}, "must be one of each log"),
    ({"steps": [0, 0, 0]}, "must be as many"),
    ({"positions": []}, "must be as many"),
    ({"floors": [0, 0, 0]}, "the log of slot 1 must end at step"),
]


@pytest.mark.parametrize(("changes", "says"), HANDED)
def test_a_slot_that_cannot_be_is_not_taken_over(changes: dict[str, Any], says: str) -> None:
    cluster = training()
    host, slot = host_of(cluster, SLOT), host_of(cluster, SLOT).slots[SLOT]
    while not slot.whole or not slot.snapshots.complete:
        assert cluster.network.clock.advance()
    answers: list[Any] = []
    epoch = host.placement.epoch
    for request in (wire.FetchChanged(SLOT, 0, epoch, 0), wire.HandOver(SLOT, 0, epoch)):
        host.handle(request, answers.append)
    other = host_of(cluster, SOURCE)
    assert other.fault_of_answer(request, answers[1]) is None
    fault = other.fault_of_answer(request, msgspec.structs.replace(answers[1], **changes))
    with pytest.raises(ValueError, match=says):
        raise ValueError(fault)


class Calls:
    """A way out that keeps calls until the test ends them."""

    def __init__(self) -> None:
        self.under_way: list[Any] = []
        self.timers: list[Any] = []

    def call(self, peer: str, request: wire.Request, timeout_s: float, done: Any) -> None:
        self.under_way.append((request, done))

    def later(self, delay_s: float, action: Any) -> None:
        self.timers.append(action)

    def now_s(self) -> float:
        return 0.0

    def tell(self, message: dict[str, Any]) -> None:
        pass


def trainer() -> tuple[Client, Calls]:
    calls = Calls()
    client = Client("t", calls, Scenario(code=CodeSpec(3, 2, 1)).job, 0, Settings())
    client.run(client.place, Placement(1, tuple(SlotPlace(f"s{i}", 0, True) for i in range(3))))
    return client, calls


@pytest.mark.parametrize(
    "answer",
    [
        wire.Rows([]),
        wire.Rows([torch.zeros(1, 3)]),
        wire.Rows([torch.zeros(1, 3), torch.zeros(1, 1)]),
        wire.Rows([torch.zeros(1, 3), torch.zeros(2, 2)]),
        wire.Rows([torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.bfloat16)]),
        wire.Rows([torch.zeros(1, 3), torch.zeros(1, 10, dtype=torch.uint8)]),
        wire.Acknowledged(1),
        wire.VersionsAre({}),
    ],
)
def test_an_answer_that_is_none_is_asked_for_again(answer: wire.Answer) -> None:
    client, calls = trainer()
    got: list[Any] = []
    first = [torch.from_numpy(layout.row_at(SLOT, np.zeros(1, np.int64))) for layout in client.layouts]
    routes = [client.route(table_group, row) for table_group, row in enumerate(first)]
    client.run(client.lookup, routes, got.append)
    ((request, done),) = calls.under_way
    done(Ok(answer))
    assert not got and len(calls.timers) == 1, "it is asked again, a little later"
    calls.timers[0]()
    _, done = calls.under_way[1]
    done(Ok(wire.Rows([torch.ones(1, 3), torch.ones(1, 2)])))
    assert len(got) == 1 and bool((got[0][0][0] == 1).all())
    assert isinstance(client._believed("s0", request, Ok(answer)), Unknown)


ROWS = wire.Rows([torch.ones(1, 3), torch.ones(1, 2)])


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        (wire.Acknowledged(5), True),
        (wire.Acknowledged(4), False),
        (wire.Acknowledged(4, [ROWS]), True),
        (wire.Acknowledged(5, [ROWS]), True),
        (wire.Acknowledged(6, [ROWS]), False),
        (wire.Acknowledged(-1, [ROWS]), False),
        (wire.Acknowledged(4, [ROWS, ROWS]), False),
        (wire.Acknowledged(4, [wire.Rows([torch.ones(2, 3), torch.ones(1, 2)])]), False),
        (wire.Acknowledged(4, [wire.Rows([torch.ones(1, 3), torch.ones(1, 2).bfloat16()])]), False),
    ],
)
def test_what_a_push_is_answered_with(answer: wire.Acknowledged, good: bool) -> None:
    client, _ = trainer()
    nothing = [torch.zeros(0, table_group.dim) for table_group in client.job.table_groups]
    push = wire.Push(0, 0, 5, 0, [ones(), ones()], nothing, [0.1, 0.1], 5, 0, then=[wire.Ask([ones(0), ones(0)])])
    assert isinstance(client._believed("s0", push, Ok(answer)), Ok if good else Unknown)


@pytest.mark.parametrize(
    ("step", "trainers", "good"), [(1, [], True), (7, [0, 1], True), (0, [], False), (1, [2], False)]
)
def test_who_is_awaited_is_a_trainer(step: int, trainers: list[int], good: bool) -> None:
    client, _ = trainer()
    answer = Ok(wire.Awaited(step, trainers))
    assert isinstance(client._believed("s0", wire.WhoIsAwaited(0, 0), answer), Ok if good else Unknown)


def test_a_refusal_is_believed() -> None:
    client, _ = trainer()
    refusal = Ok(Refused("not now"))
    assert client._believed("s0", wire.Versions(0, 0), refusal) is refusal
    assert Node.fault_of_answer(client, wire.Versions(0, 0), wire.Acknowledged(1)) is None


def test_all_that_is_refused_is_counted_and_some_of_it_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(complaints.time, "monotonic", lambda: now_s[0])
    told = complaints.Complaints(logging.getLogger("test"), "s1")
    with caplog.at_level(logging.WARNING, "test"):
        for i in range(1000):
            told.add("a request is none", f"number {i}")
        told.add("an answer is none", "another kind")
        now_s[0] = complaints.LOG_EVERY_S
        told.add("a request is none", "the last")
    assert told.counts == {"a request is none": 1001, "an answer is none": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "s1: a request is none: number 0",
        "s1: an answer is none: another kind",
        "s1: a request is none: the last (999 more like it since the last was told)",
    ]
