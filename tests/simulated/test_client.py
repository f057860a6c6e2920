"""A trainer's side: calls made again until they are answered, snapshots sent again, routes, and loading of values."""

import dataclasses
import functools
import gc
import queue
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from conftest import wait_until
from harness import Scenario, SimulatedCluster, check_parity, small_tables
from virtual_session import VirtualSession

from torch_ecrec.client.client import Client
from torch_ecrec.client.session import Session
from torch_ecrec.errors import ClusterUnavailable, TrainersLost
from torch_ecrec.layout.routing import no_bags
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.messages import Placement, SlotPlace
from torch_ecrec.protocol.wire import Malformed, Ok, Refused, Unknown
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import RETRY_S, Node


class FakePort:
    """Keeps calls until the test ends them."""

    def __init__(self):
        self.calls, self.timers = [], []

    def call(self, peer, request, timeout_s, done):
        self.calls.append((peer, request, done))

    def later(self, delay_s, action):
        self.timers.append((delay_s, action))

    def now_s(self):
        return 0.0

    def tell(self, message):
        raise AssertionError(message)

    def fire(self):
        timers, self.timers = self.timers, []
        for _, action in timers:
            action()
        return [delay_s for delay_s, _ in timers]


def placement(epoch, *incarnations):
    names = [f"s{i}.{incarnation}" for i, incarnation in enumerate(incarnations)]
    places = [SlotPlace(name, incarnation, True) for name, incarnation in zip(names, incarnations, strict=True)]
    return Placement(epoch, tuple(places))


@pytest.fixture
def node():
    node = Node("me", FakePort(), 1.0)
    node.run(node.place, placement(1, 0, 0, 0))
    return node


def ask(node, slot=1, **kinds):
    got = []
    node.run(lambda: node.ask(slot, lambda i: wire.Versions(slot, i), got.append, **kinds))
    return got


def test_a_call_is_made_again_until_it_is_answered_and_answered_once(node):
    got = ask(node)
    (peer, request, done), *_ = node.port.calls
    assert peer == "s1.0" and request == wire.Versions(1, 0)
    done(Unknown("no answer"))
    assert node.port.fire() == [RETRY_S]
    node.port.calls[1][2](Ok(Refused("not yet")))
    assert node.port.fire() == [2 * RETRY_S], "ever slower"
    assert len(node.port.calls) == 3
    answer = wire.VersionsAre({0: 1})
    node.port.calls[0][2](Ok(answer))
    node.port.calls[2][2](Ok(wire.VersionsAre({})))
    assert got == [answer], "the answer of an earlier attempt counts, and no other after it"
    assert node.port.fire() == [] and not node.calls


@pytest.mark.parametrize("run", [Node.run, Node.run_if_idle])
def test_who_is_interrupted_as_a_turn_begins_leaves_the_node_to_others(node, run):
    """Ctrl-C comes where Python looks for signals: as a function is called, too."""

    def interrupt(frame, event, argument):
        if frame.f_code is Node._turn.__code__:
            sys.settrace(before)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(node, lambda: None)
    finally:
        sys.settrace(before)
    assert node.run_if_idle(lambda: None), "nobody has it"


def test_only_the_newest_attempt_asks_for_another(node):
    ask(node)
    node.run(node.place, placement(2, 0, 1, 0))
    assert [peer for peer, _, _ in node.port.calls] == ["s1.0", "s1.1"]
    node.port.calls[0][2](Unknown("eof"))
    assert node.port.timers == []
    node.port.calls[1][2](Unknown("eof"))
    assert len(node.port.fire()) == 1 and len(node.port.calls) == 3


def test_a_new_placement_sends_again_what_was_under_way_to_slots_that_moved(node):
    got = ask(node)
    ask(node, slot=2)
    assert not node.place(placement(1, 5, 5, 5)), "not newer"
    node.run(node.place, placement(2, 0, 1, 0))
    assert [(peer, r.incarnation) for peer, r, _ in node.port.calls] == [("s1.0", 0), ("s2.0", 0), ("s1.1", 1)]
    node.port.calls[0][2](Ok(wire.VersionsAre({})))
    assert got == [], "a replaced incarnation cannot speak for the present one"
    node.port.calls[2][2](Ok(wire.VersionsAre({0: 1})))
    assert got == [wire.VersionsAre({0: 1})]


def test_a_call_to_one_incarnation_waits_for_it_and_ends_with_it(node):
    lost = []
    got = ask(node, bound_to=1, lost=lambda: lost.append(True))
    assert node.port.calls == [] and node.port.fire() == [RETRY_S], "the placement that names it is on its way"
    node.run(node.place, placement(2, 0, 1, 0))
    assert [peer for peer, _, _ in node.port.calls] == ["s1.1"]
    node.run(node.place, placement(3, 0, 2, 0))
    assert lost == [True] and got == [] and len(node.port.calls) == 1 and not node.calls
    node.port.calls[0][2](Ok(wire.VersionsAre({0: 1})))
    node.port.fire()
    assert got == [] and len(node.port.calls) == 1


def test_a_cancelled_call_and_one_asked_once(node):
    got = []
    node.run(lambda: got.append(node.ask(0, lambda i: wire.Versions(0, i), got.append)))
    got[0].cancel()
    node.port.calls[0][2](Ok(wire.VersionsAre({0: 1})))
    assert len(got) == 1
    for outcome, expected in (
        (Unknown("eof"), None),
        (Ok(Refused("no")), None),
        (Ok(wire.Stored(1, [])), wire.Stored(1, [])),
    ):
        once = []
        node.run(lambda once=once: node.ask_once(2, lambda i: wire.Versions(2, i), once.append))
        node.port.calls[-1][2](outcome)
        assert once == [expected]
    assert node.port.timers == []


# a trainer ----------------------------------------------------------------------------------------

JOB = JobSpec(small_tables(), CodeSpec(3, 2, 1), trainers=1)


@pytest.fixture
def client():
    client = Client("trainer-0", FakePort(), JOB, 0, Settings())
    client.run(client.place, placement(1, 0, 0, 0))
    return client


@pytest.mark.parametrize("rows", [[], [5], [0, 1, 2, 3, 11, 24], range(25)])
def test_a_route_splits_and_joins(client, rows):
    rows = torch.tensor(list(rows), dtype=torch.int64)
    route = client.route(0, rows)
    parts = route.split(rows)
    assert len(parts) == 3 and sum(map(len, parts)) == len(rows)
    for slot, part in enumerate(parts):
        slots, positions = client.layouts[0].locate(part.numpy())
        assert (slots == slot).all() and np.array_equal(positions, route.positions[slot].numpy())
    assert torch.equal(route.join(parts, torch.empty_like(rows)), rows)


def push(client, then=()):
    routes = [client.route(s, torch.empty(0, dtype=torch.int64)) for s in range(2)]
    gradients = [torch.empty(0, table_group.dim) for table_group in JOB.table_groups]
    client.run(client.push, routes, gradients, [0.1, 0.1], (), (), then)
    client.run(client.snapshot, torch.zeros(3, dtype=torch.uint8), "{}")


def answer(client, kind, slot, incarnation=0, known=(0, 0, 0)):
    """Answers every call of a kind to one incarnation of a slot, which knows the `known` lives of all."""
    for peer, request, done in list(client.port.calls):
        if isinstance(request, kind) and peer == f"s{slot}.{incarnation}":
            made = wire.Acknowledged(request.step) if kind is wire.Push else wire.Stored(request.step, [*known])
            done(Ok(made))


def test_a_step_is_complete_when_every_slot_has_acknowledged_and_every_holder_stored(client):
    push(client)
    assert [type(r).__name__ for _, r, _ in client.port.calls] == ["Push"] * 3 + ["Snapshot"] * 2
    for slot in range(3):
        answer(client, wire.Push, slot)
    answer(client, wire.Snapshot, 0)
    assert client.complete == 0
    answer(client, wire.Snapshot, 1)
    assert client.complete == 1 and not client.open and not client.calls


def test_a_trainer_runs_two_steps_ahead_and_no_further(client):
    assert client.may_push()
    push(client)
    assert client.may_push()
    push(client)
    assert not client.may_push()
    for slot in range(3):
        answer(client, wire.Push, slot)
    for slot in range(2):
        answer(client, wire.Snapshot, slot)
    assert client.complete == 2 and client.may_push()


def test_a_step_without_a_snapshot_holds_none_up_that_come_after_it(client):
    """Two backwards of one forward: the first step has no snapshot, and never will."""
    client.load_end = 0
    routes = [client.route(s, torch.empty(0, dtype=torch.int64)) for s in range(2)]
    client.run(client.push, routes, [torch.empty(0, table_group.dim) for table_group in JOB.table_groups], [0.1, 0.1])
    push(client)
    for slot in range(3):
        answer(client, wire.Push, slot)
    assert client.complete == 1 and client.resumable == 0, "nobody may go back to a step without a snapshot"
    for slot in range(2):
        answer(client, wire.Snapshot, slot)
    assert client.complete == client.resumable == 2 and client.may_push() and not client.open


def test_a_snapshot_that_was_due_within_a_turn_is_due_after_its_last_step(client):
    """Every other step of training is to have one, and each turn of the loop makes the steps 2 and 3, 4 and 5."""
    client.load_end, client.snapshot_every = 0, 2
    routes = [client.route(s, torch.empty(0, dtype=torch.int64)) for s in range(2)]

    def push():
        gradients = [torch.empty(0, table_group.dim) for table_group in JOB.table_groups]
        client.run(client.push, routes, gradients, [0.1, 0.1])
        for slot in range(3):
            answer(client, wire.Push, slot)

    push()
    assert client.complete == 1
    for turn in range(3):
        push()
        push()
        assert client.complete == 2 + 2 * turn, "the last step of the turn waits for its snapshot"
        client.run(client.snapshot, torch.zeros(3, dtype=torch.uint8), "{}")
        for slot in range(2):
            answer(client, wire.Snapshot, slot)
        assert client.complete == client.resumable == 3 + 2 * turn


def test_lookups_that_nobody_waits_for_end_with_their_step(client):
    """Later they could not be answered: they would be asked for ever, and `flush` would wait for them."""
    routes = [client.route(s, torch.arange(3)) for s in range(2)]
    client.run(client.lookup, routes, lambda parts: pytest.fail("nobody waits for it"))
    asked = [done for _, request, done in client.port.calls if isinstance(request, wire.Lookup)]
    assert asked and len(client.calls) == len(asked)
    push(client)
    for slot in range(3):
        answer(client, wire.Push, slot)
    for slot in range(2):
        answer(client, wire.Snapshot, slot)
    assert not client.calls, "a flush would wait for ever"
    for done in asked:
        done(Unknown("no answer"))
    assert client.port.fire() == []


def test_nothing_is_kept_of_lookups_that_are_answered():
    """An evaluation makes any number of them between two pushes; a script that only evaluates never pushes."""
    session = session_over(CodeSpec(3, 2, 1))
    session.client.snapshot_every = 0
    session.loaded()
    answers = []
    for number in range(5):
        rows = [session.arrange(s, torch.arange(number, 13))[0] for s in range(2)]
        parts = session.lookup_parts(rows) if number % 2 else session.lookup_bags(rows, no_bags_of(session))[0]
        answers += [weakref.ref(part) for of_table_group in parts for part in of_table_group]
        del parts
    clock = session.cluster.network.clock  # holds each call until it would have timed out
    end_s = clock.now_s + 2 * session.client.settings.call_timeout_s
    session._wait(lambda: clock.now_s > end_s, "time passes")
    gc.collect()
    assert len(answers) > 10 and not any(answer() is not None for answer in answers)


def no_bags_of(session):
    return [no_bags(session.job.code.slots) for _ in session.job.table_groups]


def test_a_snapshot_is_sent_again_to_the_new_incarnation_of_its_holder(client):
    """Another holder says that there is one: it may have been copied from before it had stored this."""
    push(client)
    for slot in range(3):
        answer(client, wire.Push, slot)
    answer(client, wire.Snapshot, 1)
    answer(client, wire.Snapshot, 0, known=(0, 1, 0))
    assert client.complete == 0, "its new incarnation has not stored it"
    client.run(client.place, placement(2, 0, 1, 0))
    answer(client, wire.Snapshot, 1, 1, known=(0, 1, 0))
    assert client.complete == 1 and not client.calls


def test_nothing_survives_a_moment_too_early(client):
    """The user's thread looks without the client's lock (`flush`), between any two lines of a turn."""
    early = []

    def look(frame, event, argument):
        if client.all_survive:
            early.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return look

    def looked_at(turn, *args):
        before = sys.gettrace()
        sys.settrace(look)
        try:
            turn(*args)
        finally:
            sys.settrace(before)

    rows = torch.arange(13)
    of_slot_2 = rows[torch.from_numpy(client.layouts[0].locate(rows.numpy())[0] == 2)]
    coming = [client.route(0, of_slot_2), client.route(1, torch.empty(0, dtype=torch.int64))]
    push(client, [client.ahead(coming, [], lambda weights, bags: None)])
    for slot in range(2):
        answer(client, wire.Push, slot)
        answer(client, wire.Snapshot, slot)
    weights = [torch.zeros(len(route.rows), group.dim) for route, group in zip(coming, JOB.table_groups, strict=True)]
    looked_at(client.port.calls[2][2], Ok(wire.Acknowledged(0, [wire.Rows(weights)])))
    assert not client.calls and not early, "its answer came, and it is not acknowledged"
    looked_at(client.run, client.place, placement(2, 0, 0, 1))
    assert len(client.calls) == 1 and not early, "it is sent to the new host"
    answer(client, wire.Push, 2, 1)
    assert client.all_survive
    push(client)
    for slot, incarnation in enumerate((0, 0, 1)):
        answer(client, wire.Push, slot, incarnation)
    answer(client, wire.Snapshot, 1)
    looked_at(functools.partial(answer, client, wire.Snapshot, 0, known=(0, 1, 1)))
    assert len(client.calls) == 1 and not early, "a snapshot is sent again"
    client.run(client.place, placement(3, 0, 1, 1))
    answer(client, wire.Snapshot, 1, 1, known=(0, 1, 1))
    assert client.all_survive and client.complete == 2


def test_a_stored_of_the_old_incarnation_that_comes_late_does_not_count_for_the_new_one(client):
    push(client)
    answer(client, wire.Snapshot, 0)
    client.run(client.place, placement(2, 0, 1, 0))
    for slot, incarnation in ((0, 0), (1, 1), (2, 0)):
        answer(client, wire.Push, slot, incarnation)
    answer(client, wire.Snapshot, 1, 0)
    assert client.complete == 0
    answer(client, wire.Snapshot, 1, 1)
    assert client.complete == 1


# what is malformed --------------------------------------------------------------------------------


def ask_for(client, rows, errors):
    """Looks rows of table group 0 up, as they are; returns the answer's way back."""
    client.on_error = errors.append
    route = client.route(0, torch.tensor([0]))
    slot = next(slot for slot in range(3) if len(route.positions[slot]))
    route.positions[slot] = torch.tensor(rows)
    nothing = client.route(1, torch.empty(0, dtype=torch.int64))
    client.run(client.lookup, [route, nothing], lambda parts: pytest.fail("there is no answer"))
    return client.port.calls[-1][2]


@pytest.mark.parametrize("rows", [[1 << 40], [0.5]], ids=["of no job", "of no message"])
def test_a_request_that_is_malformed_is_an_error_at_once(client, rows):
    errors = []
    done = ask_for(client, rows, errors)
    done(Ok(Malformed("the reason")))
    (error,) = errors
    assert isinstance(error, ValueError) and "refuses a Lookup: the reason" in str(error)
    assert client.port.fire() == [] and not client.calls, "it is not made again"


def test_a_request_that_was_spoilt_on_its_way_is_made_again(client):
    errors = []
    done = ask_for(client, [0], errors)
    done(Ok(Malformed("position 1099511627776 of table group 0")))
    assert client.port.fire() == [RETRY_S] and len(client.port.calls) == 2 and not errors


# the wait for trainer 0 ---------------------------------------------------------------------------


class Waiting:
    """Trainer 1 of two, in `loaded`, on a thread of its own."""

    def __init__(self, give_up_s):
        job = dataclasses.replace(JOB, trainers=2)
        self.session = Session(Client("trainer-1", FakePort(), job, 1, Settings(give_up_s=give_up_s)), print, print)
        self.outcome = queue.Queue()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        try:
            self.outcome.put(self.session.loaded())
        except Exception as error:
            self.outcome.put(error)

    def until_it_has_waited(self, caplog, times):
        self.session.on_control(messages.Resume(0, 0, None, 0))
        self.thread.start()
        told = "waiting for trainer 0 to load initial values: for"
        wait_until(lambda: caplog.text.count(told) >= times, 60.0, "it says that it waits")
        assert self.outcome.empty()


def test_trainer_0_may_load_for_longer_than_give_up_s(caplog):
    """Its script reads a checkpoint, say: nobody hears of it meanwhile."""
    waiting = Waiting(give_up_s=0.05)
    waiting.until_it_has_waited(caplog, times=2)
    waiting.session.on_control(messages.Loaded(3))
    assert waiting.outcome.get(timeout=60.0) is None and waiting.session.client.load_end == 3


def test_the_wait_for_trainer_0_ends_with_the_cluster(caplog):
    waiting = Waiting(give_up_s=0.05)
    waiting.until_it_has_waited(caplog, times=1)
    waiting.session.fail(TrainersLost("trainer-0 was lost"))
    assert isinstance(waiting.outcome.get(timeout=60.0), TrainersLost)


def test_a_cluster_that_does_not_come_is_not_waited_for_longer_than_give_up_s():
    waiting = Waiting(give_up_s=0.05)
    waiting.thread.start()
    error = waiting.outcome.get(timeout=60.0)
    assert isinstance(error, ClusterUnavailable) and "waiting for the cluster: no progress for 0.05 s" in str(error)


# a session that is closed --------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["lookup_parts", "look_ahead", "push", "read", "load", "overwrite", "loaded", "resume"])
def test_a_closed_session_refuses_at_once_what_is_asked_of_it(ask):
    """Nobody would answer: it would wait as for a cluster that is silent, and then say that this one is."""
    left = []
    client = Client("trainer-0", FakePort(), JOB, 0, Settings(give_up_s=0.05))
    session = Session(client, print, lambda: left.append(client))
    session.close()
    session.close()
    assert left == [client]
    rows, one = [torch.arange(1) for _ in JOB.table_groups], torch.zeros(1, 1)
    arguments = {
        "lookup_parts": (rows,),
        "look_ahead": (rows,),
        "push": (rows, [one for _ in rows], [0.1 for _ in rows]),
        "read": (0, rows[0]),
        "load": (0, rows[0], one),
        "overwrite": (0, rows[0], None),
    }
    with pytest.raises(RuntimeError, match=r"this session is closed: .*before it is closed"):
        getattr(session, ask)(*arguments.get(ask, ()))
    session.flush()  # nothing is left of what was sent


# initial values over the simulated cluster --------------------------------------------------------


def session_over(code: CodeSpec) -> VirtualSession:
    cluster = SimulatedCluster(Scenario(code=code, steps=0, trainers=1, noise=0.02, network_seed=3))
    while "trainer-0" not in cluster.clients:
        cluster.network.clock.advance()
    session = VirtualSession(cluster.clients["trainer-0"], lambda message: None, lambda: None)
    session.cluster = cluster
    session._wait(lambda: session.client.placement is not None and len(cluster.slots()) == code.slots, "start")
    return session


def lookup(session, rows):
    return [torch.cat(parts) for parts in session.lookup_parts(rows)]


def values(rows, width, seed):
    return torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("code", [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(4, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "pieces",
    [[(0, 25)], [(0, 10), (10, 25)], [(3, 11)], [(7, 8), (20, 24)], [(10, 25), (0, 10)], [(0, 25), (4, 9)]],
    ids=str,
)
def test_loaded_values_have_their_parity(code, pieces):
    """Whole table groups, parts of them, in any order, rows twice: the last value counts, and every parity fits."""
    session = session_over(code)
    every = torch.arange(25)
    expected = session.read(0, every)
    for number, (first, end) in enumerate(pieces):
        rows = torch.arange(first, end)
        expected[first:end] = values(rows, expected.shape[1], number)
        session.load(0, rows, expected[first:end].clone())
        assert torch.equal(session.read(0, every), expected), "a read has all that was loaded so far"
    session.loaded()
    assert session.step == 1 and session.client.load_end == len(pieces)
    assert torch.equal(session.read(0, every), expected)
    assert torch.equal(session.read(0, torch.tensor([24, 3]).sort().values), expected[[3, 24]])
    check_parity(session.cluster.slots())


def test_bad_loads_are_refused():
    session = session_over(CodeSpec(3, 2, 1))
    with pytest.raises(ValueError, match="`rows`"):
        session.load(0, torch.tensor([25]), torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match="calls `loaded` before its first step"):
        session.lookup_parts([torch.tensor([0])] * 2)
    session.client.trainer = 1
    with pytest.raises(ValueError, match="only trainer 0"):
        session.load(0, torch.tensor([0]), torch.zeros(1, 4))
    session.client.trainer = 0
    session.loaded()
    with pytest.raises(ValueError, match="before the first step: loading has ended, at step 1"):
        session.load(0, torch.tensor([0]), torch.zeros(1, 4))


def test_what_is_loaded_is_copied():
    session = session_over(CodeSpec(3, 2, 1))
    records = torch.ones(25, 4)
    session.load(0, torch.arange(25), records)
    records.zero_()
    assert bool((session.read(0, torch.arange(25)) == 1).all())


def test_a_read_of_a_step_that_is_forgotten_is_an_error_and_harms_nobody():
    """Nobody who takes part asks for one; a copy that comes late may."""
    session = session_over(CodeSpec(3, 2, 1))
    for _ in range(6):
        session.load(0, torch.arange(25), torch.ones(25, 4))
    session.loaded()
    assert min(slot.log.floor for slot in session.cluster.slots()) > 0
    client, errors = session.client, []
    client.step, client.on_error = 1, errors.append
    client.run(client.read, 0, client.route(0, torch.arange(25)), errors.append)
    client.run(client.lookup, [client.route(s, torch.arange(13)) for s in range(2)], errors.append)
    session._wait(lambda: len(errors) == 6 and not client.calls, "every slot answers")
    assert all(isinstance(error, LookupError) and "cannot show step 0" in str(error) for error in errors)
    client.step = 7
    assert bool((session.read(0, torch.arange(25)) == 1).all())


def test_rows_asked_for_ahead_are_those_of_a_lookup_and_asked_for_once():
    ahead, plain = session_over(CodeSpec(3, 2, 1)), session_over(CodeSpec(3, 2, 1))
    batches = [torch.tensor([5, 2, 5, 9]), torch.tensor([2, 9, 11]), torch.tensor([0])]
    weights = {ahead: [], plain: []}
    for session in (ahead, plain):
        session.client.snapshot_every = 0
        session.loaded()
        asked = [[session.arrange(s, rows)[0] for s in range(len(session.job.table_groups))] for rows in batches]
        for step, rows in enumerate(asked):
            found = lookup(session, rows)
            weights[session].append([w.clone() for w in found])
            session.push(
                rows,
                [torch.ones_like(w) for w in found],
                [table_group.optimizer.lr for table_group in session.job.table_groups],
            )
            if session is ahead and step + 1 < len(asked):
                exchanges = len(session.client.calls)
                session.look_ahead(asked[step + 1])
                assert len(session.client.calls) > exchanges
                others = [rows.clone() for rows in asked[step + 1]]
                mine, theirs = lookup(session, others), lookup(session, asked[step + 1])
                assert all(map(torch.equal, mine, theirs)), "other tensors"
                session.look_ahead(asked[step + 1])
        assert session.step == 4
    for one, other in zip(weights[ahead], weights[plain], strict=True):
        assert all(map(torch.equal, one, other))


def test_settings_reach_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local cluster gets those of the trainer that starts it, all but the address."""
    mine = Settings(join="a:1", transport="rpc", wire="bfloat16", lease_s=3.5, window_steps=4, rebuild_bytes_per_s=0.0)
    for name, value in mine.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_ECREC_JOIN", raising=False)
    assert Settings.from_environment() == dataclasses.replace(mine, join=None)
