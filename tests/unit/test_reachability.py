"""Who is taken for unreachable, who never is, and who goes when two cannot reach each other."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import socket
from collections.abc import Collection

import pytest
from conftest import wait_until

from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.suspicion import (
    CUT_S,
    PAUSE_LEAST_S,
    REMEMBERED_S,
    SILENT_S,
    Suspicion,
    smallest_cover,
)
from torch_ecrec.transport import reachability
from torch_ecrec.transport.accrual import ENOUGH
from torch_ecrec.transport.reachability import Reachability, Tries, heard_s_ago, refusing
from torch_ecrec.transport.rpc import Endpoint

LOOK_S = 0.1


def silence(answers: list[float], until_s: float, delay_s: float = 0.0, looks: Collection[float] = ()) -> list[float]:
    """When a host was unreachable, whose answers come at these times, or to each try after so long."""
    hosts = Reachability()
    hosts.keep(["x"])
    coming, found = sorted(answers), []
    for now_s in looks or [i * LOOK_S for i in range(round(until_s / LOOK_S))]:
        while coming and coming[0] <= now_s:
            hosts.heard("x", coming.pop(0))
        if hosts.due(now_s) and delay_s:
            coming.append(now_s + delay_s)
        found += [now_s] if hosts.silent(now_s) else []
    return found


def test_who_answers_is_never_unreachable_however_late() -> None:
    for delay_s in (0.01, 0.3, 0.9, 1.3):
        assert silence([], 60.0, delay_s) == []
    assert silence([i * 1.2 for i in range(50)], 60.0) == [], "bytes that come now and then are enough"


def test_who_says_nothing_is_unreachable_until_it_does() -> None:
    found = silence([0.2, 5.0], 6.0)
    assert found[0] == pytest.approx(0.3 + reachability.SILENT_S + LOOK_S) and found[-1] < 5.0
    assert len(found) == round((found[-1] - found[0]) / LOOK_S) + 1, "without a break"


def test_who_stood_still_itself_accuses_nobody_of_it() -> None:
    before = [i * LOOK_S for i in range(7)]
    assert silence([0.0], 0, looks=[*before, 10.6, 10.7, 10.8]) == []
    assert silence([0.0], 0, looks=[*before, 10.6, *(10.6 + i * LOOK_S for i in range(1, 20))]), "but later, it does"


def test_hosts_that_are_not_tried_any_more_are_forgotten() -> None:
    hosts = Reachability()
    hosts.keep(["x", "y"])
    assert hosts.due(0.0) == ["x", "y"] and hosts.due(0.1) == []
    hosts.heard("nobody", 0.1)
    hosts.keep(["y"])
    assert hosts.due(0.9) == ["y"] and hosts.silent(1.8) == ["y"]


def test_a_large_cluster_is_tried_less_often() -> None:
    hosts = Reachability()
    hosts.keep([str(i) for i in range(400)])
    tries = sum(len(hosts.due(i * LOOK_S)) for i in range(100))
    assert tries <= reachability.TRIES_A_SECOND * 10 + 400


def tried(came: Collection[float], until_s: float, answers_s: float = 0.01) -> tuple[list[float], list[float]]:
    """When a host is tried that is known well, and from when on unreachable; it says something at these times.

    Args:
        until_s: it answers tries up to then, after so long.
    """
    hosts, coming, answers = Reachability(), sorted(came), [answers_s]
    hosts.keep(["x"])
    for _ in range(ENOUGH):
        hosts._usual["x"].ended(answers_s)
    tries, unreachable = [], []
    for i in range(round((until_s + 10.0) / LOOK_S)):
        now_s = i * LOOK_S
        while answers and answers[0] <= now_s:
            hosts.heard("x", answers.pop(0))
        while coming and coming[0] <= now_s:
            hosts.came("x", coming.pop(0))
        if hosts.due(now_s):
            tries.append(now_s)
            answers += [now_s + answers_s] if now_s <= until_s else []
        unreachable += [now_s] if hosts.silent(now_s) else []
    return tries, unreachable


def test_who_is_heard_anyway_is_tried_once_a_second() -> None:
    """To learn what is usual there; and as often as others once it falls silent."""
    tries, unreachable = tried([i / 20 for i in range(400)], 20.0)
    assert len([at_s for at_s in tries if at_s <= 20.0]) == 21
    assert len([at_s for at_s in tries if 20.5 < at_s <= 25.0]) >= 14
    assert len([at_s for at_s in tried([], 20.0)[0] if at_s <= 20.0]) >= 66
    assert 20.0 + reachability.SILENT_LEAST_S < unreachable[0] <= 20.0 + 2 * reachability.SILENT_LEAST_S
    assert len(unreachable) >= 80, "without a break"


def test_who_falls_silent_is_found_out_in_time_however_it_was_heard() -> None:
    """Each rate of what comes, regular or not, up to each moment; and never while it comes or answers."""
    rng = random.Random(0)
    for pause_s in (0.01, 0.1, 0.2, 0.3, 0.4, 0.7, 1.1, 3.0):
        for end in range(40):
            until_s, came, at_s = 10.0 + end / 20, [], 0.0
            while (at_s := at_s + pause_s * rng.uniform(0.5, 1.5)) < until_s:
                came.append(at_s)
            _, unreachable = tried(came, until_s)
            last_s = max([until_s, *came[-1:]])
            limit_s = reachability.SILENT_LEAST_S + reachability.HEARD_PAUSE * reachability.TRY_S + 3 * LOOK_S
            assert last_s < unreachable[0] <= last_s + limit_s, (pause_s, until_s)


def test_of_a_host_that_is_not_known_yet_much_is_learned_soon() -> None:
    hosts = Reachability()
    hosts.keep(["x"])
    tries = 0
    for i in range(100):
        hosts.came("x", i * LOOK_S)
        if hosts.due(i * LOOK_S):
            tries += 1
            hosts.heard("x", i * LOOK_S + 0.01)
    assert ENOUGH <= tries <= ENOUGH + 6, "in ten seconds"


def test_what_comes_of_who_is_no_host_here_is_nothing() -> None:
    hosts = Reachability()
    hosts.keep(["x"])
    hosts.came("nobody", 0.0)
    hosts.keep(["nobody"])
    assert hosts.due(0.1) == ["nobody"]


def test_of_two_hosts_that_say_nothing_else_one_tries_the_other() -> None:
    """Whoever is tried has heard the other, and waits for longer than who tries."""
    ends = {"a": Reachability(), "b": Reachability()}
    tries = {"a": 0, "b": 0}
    for name, hosts in ends.items():
        other = "b" if name == "a" else "a"
        hosts.keep([other])
        for _ in range(ENOUGH):
            hosts._usual[other].ended(0.0)
    for i in range(200):
        for name, hosts in ends.items():
            other = "b" if name == "a" else "a"
            now_s = (i + (name == "b") / 2) * LOOK_S
            if hosts.due(now_s):
                tries[name] += 1
                ends[other].came(name, now_s)
                hosts.heard(other, now_s)
            assert not hosts.silent(now_s)
    assert 60 <= sum(tries.values()) <= 80, "in twenty seconds: half of what each for itself would do"


def test_a_host_answers_also_where_nobody_listens_or_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does: a process that hangs, or is gone, is not unreachable."""
    with socket.create_server(("127.0.0.1", 0)) as hangs, socket.create_server(("127.0.0.1", 0)) as gone:
        places = [hangs.getsockname(), gone.getsockname()]
        gone.close()
        for place in places:
            tries, heard = Tries(), []
            monkeypatch.setattr(tries._hosts, "heard", lambda host, at_s, heard=heard: heard.append(host))
            tries.follow({"server-1": place})
            times = itertools.count(0, 0.01)
            wait_until(lambda: (tries.look([], next(times)), bool(heard))[1], 60.0, "an answer")  # noqa: B023
            assert tries.unreachable() == []
            tries.close()


@pytest.mark.parametrize("answers", [True, False])
def test_without_descriptors_nothing_is_said_of_others(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that cannot reach each other a server goes: it would be the wrong one, and then the next."""

    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(reachability, "_answered", lambda sock, place: True if answers else None)
    tries, times = Tries(), itertools.count(0, 0.1)
    tries.follow({"server-1": ("127.0.0.1", 9)})
    for _ in range(5):
        tries.look([], next(times))
    with monkeypatch.context() as patch:
        patch.setattr(reachability.socket, "socket", short)
        for _ in range(100):
            tries.look([], next(times))
            assert tries.unreachable() == []
    for _ in range(100):
        tries.look([], next(times))
    assert tries.unreachable() == ([] if answers else ["server-1"]), "it is tried again"
    tries.close()


def test_who_cannot_even_ask_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without IPv6, say."""

    def none(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(reachability.socket, "socket", none)
    tries = Tries()
    tries.follow({"server-1": ("::2", 9)})
    for at in range(30):
        tries.look([], 0.1 * at)
    assert tries.unreachable() == ["server-1"]


def test_a_connection_says_when_something_came() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        found = heard_s_ago(one)
        assert found is not None and found[0] == "127.0.0.1" and 0 <= found[1] < 60
        assert heard_s_ago(server) is None, "it listens"
    assert heard_s_ago(one) is None, "it is closed"
    with socket.socketpair()[0] as within_host:
        assert heard_s_ago(within_host) is None


def test_sockets_are_not_looked_for_without_descriptors() -> None:
    """Who looks is the thread that tries others: it goes on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        assert list(reachability.open_sockets()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_sockets_of_this_process_are_found_and_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        for _ in range(2):  # the copies are closed, and nothing else
            names = [sock.getsockname() for sock in reachability.open_sockets() if sock.family == socket.AF_INET]
            assert one.getsockname() in names and server.getsockname() in names
        before = len(os.listdir("/proc/self/fd"))
        found = [heard_s_ago(sock) for sock in reachability.open_sockets()]
        assert "127.0.0.1" in [host for host, _ in filter(None, found)]
        assert len(os.listdir("/proc/self/fd")) == before
        one.sendall(b"there")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_refuses_is_tried_and_answers(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(host) as sock:
        place = sock.getsockname()[:2]
        tries, heard = Tries(), []
        monkeypatch.setattr(tries._hosts, "heard", lambda host, at_s: heard.append(host))
        endpoint = Endpoint.parse(f"{place[0]} {place[1]} 9")
        tries.follow({"server-1": (endpoint.host, endpoint.port)})
        times = itertools.count(0, 0.01)
        wait_until(lambda: (tries.look([], next(times)), bool(heard))[1], 60.0, "an answer")
        tries.close()
        assert heard[0] == host


@pytest.mark.parametrize("said", ["", "host", "host 1", " 12 1", "host 99999 1", "host 0 1", "host 1 -1", "host 1 1 1"])
def test_what_is_no_endpoint_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="is HOST PORT PORT"):
        Endpoint.parse(said)


# the coordinator's side -----------------------------------------------------------------------------


def members(*names: str, heard_s: float = 0.0) -> dict[str, MemberRecord]:
    return {
        name: MemberRecord(name, "server", -1, 1, name, 0.0, heard_s, address=(f"host of {name}", 1)) for name in names
    }


def test_silence_needs_two_witnesses() -> None:
    known, suspicion = members("a", "b", "c", heard_s=10.0), Suspicion()
    known["b"].heard_s = 10.0 - SILENT_S
    assert suspicion.silent(known, 10.0) == {}, "its lease decides"
    suspicion.on_beat("a", ["b", "c"], known, 10.0)
    assert suspicion.silent(known, 10.0) == {"b": "a"}, "c is heard"
    known["a"].heard_s = 8.0
    assert suspicion.silent(known, 10.0) == {}, "who complained is silent itself"
    known["a"].heard_s = 10.0
    suspicion.on_beat("a", [], known, 10.0)
    assert suspicion.silent(known, 10.0) == {}, "it is reached again"


def test_a_coordinator_that_hears_nobody_of_other_hosts_accuses_none_of_them() -> None:
    """A trainer beside it cannot reach them either: it is their own network that is gone."""
    known, suspicion = members("beside", "b", "c", "d", heard_s=10.0), Suspicion()
    suspicion.on_beat("beside", ["b", "c", "d"], known, 12.0)
    for now_s in (10.8, 12.0, 16.0):
        known["beside"].heard_s = now_s
        assert suspicion.silent(known, now_s) == {}
    known["d"].heard_s = 15.9
    assert suspicion.silent(known, 16.0) == {"b": "beside", "c": "beside"}
    del known["b"], known["d"]
    suspicion.forget_gone(known, 16.0)
    assert suspicion.silent(known, 16.0) == {"c": "beside"}, "there is no third host"


def test_a_coordinator_that_has_stood_still_hears_what_was_said_before_and_accuses_nobody_of_it() -> None:
    """Its own network may have gone meanwhile: who is heard of as it wakes may be as silent as the accused."""
    known, suspicion = members("beside", "b", "c", heard_s=10.0), Suspicion()
    suspicion.on_beat("beside", ["b"], known, 14.0)
    suspicion.on_tick(since_s=4.0, now_s=14.0)
    known["beside"].heard_s = known["c"].heard_s = 14.0
    assert suspicion.silent(known, 14.5) == {}
    known["beside"].heard_s = 14.0 + SILENT_S + 0.5
    assert suspicion.silent(known, 14.0 + SILENT_S + 0.5) == {}, "c has said nothing since"
    known["c"].heard_s = 14.0 + SILENT_S
    assert suspicion.silent(known, 14.0 + SILENT_S + 0.5) == {"b": "beside"}


def test_a_cut_is_one_when_it_lasts_and_both_are_heard() -> None:
    known, suspicion = members("a", "b"), Suspicion()
    for quarter in range(16):
        now_s = quarter / 4
        known["a"].heard_s = known["b"].heard_s = now_s
        suspicion.on_beat("b", [] if quarter == 4 else ["a", "nobody"], known, now_s)
        assert suspicion.cuts(known, now_s) == ([("b", "a")] if now_s >= 1.25 + CUT_S else [])
    known["a"].heard_s = now_s - 1.1
    assert suspicion.cuts(known, now_s) == []
    known["a"].alive = False
    suspicion.forget_gone(known, now_s)
    assert suspicion.complaints(now_s) == []


def test_troubles_outlive_names_and_end() -> None:
    known, suspicion = members("a", "b", "c"), Suspicion()
    suspicion.on_beat("a", ["b"], known, 0.0)
    known["d"] = MemberRecord("d", "server", -1, 1, "d", 1.0, 1.0, address=("host of a", 1))
    assert suspicion.troubles("d", ["b", "c", "d"], known) == 1 == suspicion.troubles("b", ["a", "c"], known)
    assert suspicion.troubles("d", ["c"], known) == 0
    suspicion.forget_gone(known, REMEMBERED_S)
    assert suspicion.troubles("d", ["b"], known) == 0


def test_fences_become_rare() -> None:
    suspicion, now_s, times = Suspicion(), 0.0, []
    while now_s < 200:
        if suspicion.may_fence(now_s):
            suspicion.fenced(now_s)
            times.append(now_s)
        now_s += 0.25
    assert len(times) == 7 and times[:3] == [0.0, PAUSE_LEAST_S, 3 * PAUSE_LEAST_S]


def test_the_cover_is_the_least_of_all() -> None:
    """Against every subset, for every graph of four servers and a trainer."""
    names, slots = ["a", "b", "c", "d", "t"], {"a": 2, "b": 1, "c": 1, "d": 1, "t": 0}
    every = list(itertools.combinations(names, 2))
    for number in range(1, 1 << len(every)):
        pairs = [pair for i, pair in enumerate(every) if number >> i & 1]
        found = smallest_cover(pairs, slots.__getitem__, lambda some: sum(slots[s] for s in some) <= 2)
        subsets = [set(s) for size in range(1, 4) for s in itertools.combinations("abcd", size)]
        good = [s for s in subsets if all(s & set(p) for p in pairs) and sum(slots[n] for n in s) <= 2]
        least = min((len(s), sum(slots[n] for n in s), sorted(s)) for s in good) if good else (0, 0, [])
        assert (len(found), sum(slots[n] for n in found), sorted(found)) == least, pairs
