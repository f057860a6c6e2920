"""A cluster and its trainers on several hosts, as a user starts them: what holds on one host holds there, bit for bit.

The coordinator and a trainer are on host 0, a server each on hosts 1 to 3, a spare and a trainer on host 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
import pytest
from conftest import ROOT, wait_until

from torch_ecrec.processes.children import Child
from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Hosts

LIMIT_S = 300.0  # for anything that is waited for: only a hang reaches it
PORT, STEPS = 29400, 200
REASON = kit.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
TRAIN = [str(ROOT / "examples" / "dlrm_criteo.py"), "--steps", str(STEPS), "--batch-size", "32"]
TRAIN += ["--rows-per-table", "200", "--embedding-dim", "8"]
COMMON = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Cluster:
    """All processes; their logs are in `folder`."""

    def __init__(self, hosts: Hosts, folder: Path, transport: str, environment: Mapping[str, str]) -> None:
        self.hosts, self.folder = hosts, folder
        self.trainers: list[Child] = []
        self.troubled_s = 0.0  # since when its links are bad
        self.environment = {**os.environ, **COMMON, **environment, "TORCH_ECREC_TRANSPORT": transport}
        self.join = f"{hosts[0].address}:{PORT}"
        code = ["--servers", "3", "-k", "2", "-r", "1", "--spares", "1"]
        self.start(0, "coordinator", ["coordinator", "--host", hosts[0].address, "--port", str(PORT), *code])
        wait_until(lambda: "address" in self.said("coordinator"), LIMIT_S, "the coordinator listens")
        for number in (1, 2, 3, 4):
            self.start(number, f"server-on-{number}", ["serve", "--join", self.join])

    def start(self, number: int, name: str, words: list[str]) -> Child:
        """One of our commands on a host."""
        with (self.folder / f"{name}.log").open("ab") as log:
            files = (log.fileno(), log.fileno())
            return forked.start("torch_ecrec", words, self.environment, *files, inside=self.hosts[number])

    def train_on(self, number: int, more: Sequence[str] = ()) -> Child:
        """The same line on each host with trainers."""
        words = ["run", "--join", self.join, "--nodes", "2", "--meet", self.hosts[0].address, "--", *TRAIN, *more]
        return self.start(number, f"trainer-on-{number}", [*words, "--report", str(self.folder / "report.json")])

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def reports(self) -> list[dict[str, Any]]:
        """Of all trainers, without what depends on the clock."""
        found = [json.loads((self.folder / f"report.{rank}.json").read_text()) for rank in range(2)]
        return [{name: one[name] for name in ("losses", "auc", "dense_digest", "digest")} for one in found]


@contextlib.contextmanager
def cluster(
    folder: Path, transport: str, link: Mapping[str, float], environment: Mapping[str, str]
) -> Iterator[Cluster]:
    folder.mkdir()
    with Hosts(5) as hosts:
        for host in hosts if link else ():
            host.link(**link)
        yield Cluster(hosts, folder, transport, environment)


def trained(
    folder: Path,
    transport: str,
    during: Callable[[Cluster], None],
    more: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    link: Mapping[str, float] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """What the trainers report in the end. `more`: words for the script; `link`: what each host's is like."""
    with cluster(folder, transport, link, environment) as running:
        running.trainers = [running.train_on(number, more) for number in (0, 4)]
        during(running)
        for process in running.trainers:
            assert process.wait(limit_s) == 0, (
                running.said("trainer-on-0")[-3000:] + running.said("coordinator")[-3000:]
            )
        return running.reports()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("hosts") / "undisturbed", "sockets", lambda running: None)


def events_of(running: Cluster, kind: str) -> list[dict[str, Any]]:
    """What the coordinator has told of that kind."""
    lines = [line for line in running.said("coordinator").splitlines() if f'"event": "{kind}"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def hosts_of_slots(running: Cluster) -> list[int]:
    """By slot, as they were placed first."""
    names = [server for server, _ in events_of(running, "placed")[0]["slots"]]
    said = {number: running.said(f"server-on-{number}") for number in (1, 2, 3, 4)}
    return [next(number for number in said if f"{name} joined" in said[number]) for name in names]


def a_server_host_dies(running: Cluster) -> None:
    """A host that has a slot and no trainer, in the middle of training."""
    wait_until(lambda: "step 20 " in running.said("trainer-on-0"), LIMIT_S, "training")
    number = next(n for n in (1, 2, 3) if n in hosts_of_slots(running))
    assert running.hosts[number].die() == 1
    assert all(process.poll() is None for process in running.trainers), "training was over before"
    wait_until(lambda: '"event": "lost"' in running.said("coordinator"), LIMIT_S, "it is lost")


def a_trainer_host_dies(running: Cluster) -> None:
    """With a server that has a slot, or is a spare; it comes back empty, and is given its two lines again."""
    assert running.hosts[4].die() >= 3, "a server, torchrun and a trainer"
    assert running.trainers[0].poll() is None, "training was over before"
    running.hosts[4].come_back()
    running.start(4, "server-on-4", ["serve", "--join", running.join])
    running.trainers[1] = running.train_on(4)


def both(running: Cluster) -> None:
    """One after the other."""
    a_server_host_dies(running)
    wait_until(lambda: '"event": "rebuilt"' in running.said("coordinator"), LIMIT_S, "its slot is whole again")
    a_trainer_host_dies(running)


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("transport", ["sockets", pytest.param("rpc", marks=pytest.mark.slow)])
def test_hosts_die_and_nothing_differs(transport: str, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    assert undisturbed[0]["digest"] is not None and len(undisturbed[0]["losses"]) == STEPS
    assert trained(tmp_path / "disturbed", transport, both) == undisturbed


LEASE_S = 3.0  # where members are silent for longer


def they_are_silent_for_a_while(running: Cluster) -> None:
    """Two servers' hosts without network, all servers stopped, the coordinator's host without network: nobody dies."""

    def steps_later(step: int, what: str) -> None:
        wait_until(lambda: f"step {step} " in running.said("trainer-on-0"), LIMIT_S, what)
        assert all(process.poll() is None for process in running.trainers), "training was over before"

    steps_later(20, "training")
    servers = [number for number in hosts_of_slots(running) if number != 4]
    running.hosts[servers[0]].unplug()
    running.hosts[servers[1]].unplug()
    wait_until(lambda: len(events_of(running, "stands_still")) == 1, LIMIT_S, "two servers are silent")
    running.hosts[servers[0]].plug_in()
    running.hosts[servers[1]].plug_in()
    steps_later(60, "training goes on with both")
    stopped = [pid for number in (1, 2, 3) for pid in running.hosts[number].processes()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: len(events_of(running, "stands_still")) >= 2, LIMIT_S, "all servers are silent")
    steps_later(100, "training goes on with all")
    running.hosts[0].unplug()
    time.sleep(LEASE_S + 2.0)  # the length of the outage: nobody can tell that it is long enough
    running.hosts[0].plug_in()


@pytest.mark.timeout(3 * LIMIT_S)
def test_nobody_is_lost_who_is_only_silent(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    found: list[Cluster] = []

    def during(running: Cluster) -> None:
        found.append(running)
        they_are_silent_for_a_while(running)

    environment = {"TORCH_ECREC_LEASE_S": str(LEASE_S)}
    assert trained(tmp_path / "silent", "sockets", during, environment=environment) == undisturbed
    assert not events_of(found[0], "lost") and not events_of(found[0], "cut")


GIVE_UP_S = 12.0


@pytest.mark.slow  # test_member.py has the rule
@pytest.mark.timeout(3 * LIMIT_S)
def test_nobody_is_lost_who_hears_nothing_for_longer_than_anybody_waits(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The coordinator's host without network: nobody can tell the trainer elsewhere that training stands."""

    def during(running: Cluster) -> None:
        wait_until(lambda: "step 20 " in running.said("trainer-on-0"), LIMIT_S, "training")
        running.hosts[0].unplug()
        time.sleep(1.5 * GIVE_UP_S + LEASE_S)  # the length of the outage, as above
        assert all(process.poll() is None for process in running.trainers), "training was over before"
        running.hosts[0].plug_in()

    found: list[Cluster] = []
    environment = {"TORCH_ECREC_LEASE_S": str(LEASE_S), "TORCH_ECREC_GIVE_UP_S": str(GIVE_UP_S)}
    disturbed = trained(
        tmp_path / "deaf",
        "sockets",
        lambda running: (found.append(running), during(running))[1],
        environment=environment,
    )
    assert disturbed == undisturbed and not events_of(found[0], "lost")
    assert "nothing comes back from there" in found[0].said("trainer-on-4")


LOAD = 8  # at least: processes that compute and nothing else are added to what the machine does anyway
DELAY_S, LOSS = 0.05, 0.01  # of each host's link: a way from one to another has two
CALM_STEPS = int(os.environ.get("TORCH_ECREC_TEST_CALM_STEPS", "200"))  # more: a longer look


@contextlib.contextmanager
def burning() -> Iterator[None]:
    missing = max(0, LOAD - int(os.getloadavg()[0]))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(missing)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.slow
@pytest.mark.timeout(1500 if CALM_STEPS <= 200 else 0)  # a longer look has `limit_s` below alone
def test_nobody_is_lost_by_delay_loss_and_load(tmp_path: Path) -> None:
    """100 ms each way, one of 50 packets lost, and a load of 8."""

    def during(running: Cluster) -> None:
        wait_until(lambda: "step 20 " in running.said("trainer-on-0"), LIMIT_S, "training")
        running.troubled_s = time.monotonic()

    found: list[Cluster] = []
    with burning():
        trained(
            tmp_path / "calm",
            "sockets",
            lambda one: (found.append(one), during(one))[1],
            more=["--steps", str(CALM_STEPS)],
            limit_s=3000.0,
            link={"delay_s": DELAY_S, "loss": LOSS},
        )
    [running] = found
    for_s = time.monotonic() - running.troubled_s
    lost, cuts = events_of(running, "lost"), events_of(running, "cut")
    print(f"{for_s:.0f} s of it, {CALM_STEPS} steps: lost {lost}, cuts {cuts}")
    assert not lost and not cuts and for_s > 30.0


@pytest.mark.slow  # test_links.py has the protocol, test_hosts.py the tries
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("transport", ["sockets", "rpc"])
@pytest.mark.parametrize("cut", ["both ways", "one way"])
def test_two_servers_that_cannot_reach_each_other(
    cut: str, transport: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The coordinator and the trainers reach both. One of the two is fenced, and never gets a slot again."""

    def during(running: Cluster) -> None:
        wait_until(lambda: "step 20 " in running.said("trainer-on-0"), LIMIT_S, "training")
        one, other = [number for number in hosts_of_slots(running) if number != 4][:2]
        running.hosts.cut_one_way(one, other)
        if cut == "both ways":
            running.hosts.cut_one_way(other, one)
        assert all(process.poll() is None for process in running.trainers), "training was over before"
        wait_until(lambda: bool(events_of(running, "cut")), LIMIT_S, "one is fenced")

    found: list[Cluster] = []
    assert (
        trained(tmp_path / "cut", transport, lambda running: (found.append(running), during(running))[1]) == undisturbed
    )
    [cut_event] = events_of(found[0], "cut")
    lost = events_of(found[0], "lost")
    assert len(cut_event["fenced"]) == 1 and [event["member"] for event in lost] == cut_event["fenced"]
    assert "cannot reach each other" in lost[0]["why"] and len(lost[0]["slots"]) == 1
