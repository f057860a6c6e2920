"""`torch-ecrec chaos --hosts`: services that are started again, and short runs of the whole of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import MARK, leftover, wait_for_none, wait_until
from coordinator_words import healthy, member, status
from msgspec.structs import replace

from torch_ecrec.cli.main import main, parser
from torch_ecrec.demo.chaos import command, host_events, hosted
from torch_ecrec.demo.chaos.hosted import HostedCluster, Runs, Service
from torch_ecrec.demo.chaos.hosts import HostsChaos
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.protocol.status import json_of
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import HOST_EVENTS, LEADER_EVENTS, WORLD_EVENTS
from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Hosts

LIMIT_S = 300.0  # for anything at all: only a hang reaches it
REASON = kit.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SLEEPS = [sys.executable, "-c", "import time; time.sleep(1e6)"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedCluster]:
    """On four hosts and one more, with processes that sleep in the place of ours."""
    monkeypatch.setattr(hosted, "_OURS", SLEEPS)
    with (
        Hosts(5) as hosts,
        HostedCluster(hosts, CodeSpec(3, 2, 1), 2, "survivor", tmp_path, {}, Path("/bin/true")) as one,
    ):
        yield one


def wait_for(cluster: HostedCluster, service: Service, runs: bool) -> None:
    def look() -> bool:
        cluster.look(time.monotonic())
        return service.runs == runs

    wait_until(look, LIMIT_S, f"{service.name} runs: {runs}")


def test_every_service_has_its_host_and_is_started_again(cluster: HostedCluster) -> None:
    places = {one.name: one.host for one in cluster.services}
    assert places == {
        **{f"etcd-{i}": i for i in range(3)},
        **{f"coordinator-{i}": i for i in range(3)},
        **{f"server-{i}": i % 4 for i in range(5)},
    }
    assert cluster.join == "etcd://10.77.0.1:2379,10.77.0.2:2379,10.77.0.3:2379/chaos"
    server = cluster.of("server")[1]
    assert server.process is not None
    wait_until(lambda: cluster.hosts.host_of(server.process.pid) == 1, LIMIT_S, "it is there")
    server.process.kill()
    wait_for(cluster, server, False)
    wait_for(cluster, server, True)
    assert server.starts == 2
    assert cluster.leader.name == "coordinator-0" and cluster.coordinator.pid > 0
    cluster.leads = lambda: cluster.hosts[2].address
    assert cluster.leader.name == "coordinator-2"


def test_what_is_held_back_and_a_host_that_is_away_are_not_started_before_their_time(cluster: HostedCluster) -> None:
    server = cluster.of("server")[2]
    assert server.process is not None
    server.process.kill()
    cluster.hold_back(server, time.monotonic() + 1e6)
    wait_for(cluster, server, False)
    cluster.look(time.monotonic() + 100)
    assert not server.runs
    server.not_before_s = 0.0
    wait_for(cluster, server, True)
    assert cluster.kill_host(2, time.monotonic() + 1e6) >= 2, "a server and a coordinator"
    wait_for(cluster, server, False)
    cluster.look(time.monotonic() + 100)
    assert not server.runs and not cluster.complete and not cluster.hosts[2].alive
    cluster.return_all()
    wait_for(cluster, server, True)
    assert cluster.hosts[2].alive


def test_trainers_are_done_when_all_are(cluster: HostedCluster) -> None:
    with cluster.trainers(2, 10, ["-m", "nothing"]) as runs:
        assert isinstance(runs, Runs)
        found = cluster.of("run")
        assert [one.host for one in found] == [2, 3]
        assert all("--meet" in one.words and "10.77.0.4:29500" in one.words for one in found)
        assert runs.poll() is None
        for one in found:
            one.words = [sys.executable, "-c", ""]
        wait_until(lambda: (cluster.look(time.monotonic()), runs.poll())[1] == 0, LIMIT_S, "both are done")
        assert runs.wait(1.0) == 0


# --- nobody dies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disturbed(cluster: HostedCluster, tmp_path: Path) -> HostsChaos:
    """A run at its beginning: a server on each host and two on the first, trainers on the last two."""
    arguments = parser().parse_args(["chaos", "--hosts", "4", "--events", "blip", "--out", str(tmp_path / "out")])
    one = HostsChaos(arguments, command.check(arguments), tmp_path / "logs", Terminal(), None)
    one.logs.mkdir()
    one._hosts, one._cluster = cluster.hosts, cluster
    cluster.leads = lambda: one._leads
    members = [member(f"server-{i}", pid=10 + i) for i in range(5)]
    members += [member(f"trainer-{i}", pid=20 + i) for i in range(2)]
    for here in members:
        one._world.where[here.name] = here.pid % 10 % 4 + 2 * (here.role == "trainer")
    one._on_message(json_of(status(members=members, slots=healthy(3), time_s=time.time())))
    return one


def unplugged(one: HostsChaos) -> list[int]:
    """Hosts without a link."""
    links = {host.number: host._switch.run("ip", "link", "show", host.port) for host in one._hosts}
    return [number for number, said in links.items() if ",UP" not in said and "<UP" not in said]


def let_pass(one: HostsChaos) -> None:
    """The time of what is under way."""
    for disturbance in one._under_way:
        disturbance.since_s, disturbance.until_s = disturbance.since_s - 1e6, 0.0
    one._look_after(time.monotonic(), 9.0, last=False)


def test_a_blip_takes_more_hosts_than_the_code_repairs_and_never_the_coordinators(disturbed: HostsChaos) -> None:
    one = disturbed
    for number in range(3):
        one._perform(["blip"], 3.5)
        hosts = one.schedule[number]["number"]
        assert unplugged(one) == hosts and len(hosts) > one.code.parities and 0 not in hosts and 4 not in hosts
        (disturbance,) = one._under_way
        assert disturbance.until_s - disturbance.since_s in host_events.BLIP_S
        members = [replace(here, silent_s=2.0 * (one._world.where[here.name] in hosts)) for here in one.record.members]
        one._on_message(json_of(status(members=members, slots=healthy(3), time_s=time.time() + 1.0)))
        let_pass(one)
        assert unplugged(one) == [] and one._under_way == []
        assert one.schedule[number]["felt"].endswith("was silent for 2.0 s")
    assert one.record.excused == set() and one.record.kills == [], "it may cost nobody"


def test_the_coordinators_host_is_unplugged_for_longer_than_a_lease(disturbed: HostsChaos) -> None:
    one = disturbed
    one._perform(["unplug-coordinator"], 3.5)
    (disturbance,) = one._under_way
    assert unplugged(one) == [0] and disturbance.until_s - disturbance.since_s > one._lease_s
    let_pass(one)
    assert unplugged(one) == [] and one.record.kills == [] and one.record.excused == set()
    assert one.not_effective()[0] == "unplug-coordinator at step 0: nobody felt it", "it has said something just now"


def test_a_coordinator_of_another_code_stands_in_the_place_of_the_right_one(disturbed: HostsChaos) -> None:
    one = disturbed
    (right,) = [service for service in one._hosted.of("coordinator") if service.host == 0]
    words = one._hosted.another_coordinator(right)
    at = {option: words[words.index(option) + 1] for option in ("--servers", "-k", "-r", "--port")}
    assert at == {"--servers": "4", "-k": "3", "-r": "1", "--port": str(hosted.PORT)} and right.words != words
    assert right.process is not None
    before = right.process
    one._perform(["wrong-coordinator"], 3.5)
    assert before.poll() is not None and [kill.spec for kill in one.record.kills] == ["wrong-coordinator"]
    one._hosted.look(time.monotonic())
    one._hosted.look(time.monotonic() + 100)
    assert not right.runs, "it is held back"
    (disturbance,) = one._under_way
    wrong = psutil.Process(int(one.schedule[0]["member"].split()[-1][:-1]))
    assert "-k 3" in " ".join(wrong.cmdline())
    wait_until(lambda: one._hosts.host_of(wrong.pid) == 0, LIMIT_S, "it is in its network")
    assert disturbance.felt() == "", "it does not listen: it sleeps"
    wrong.kill()
    wait_until(lambda: disturbance.felt().startswith("it ended with"), LIMIT_S, "it has ended")
    let_pass(one)
    assert one._under_way == [] and one.schedule[0]["felt"].startswith("it ended with")
    wait_for(one._hosted, right, True)
    assert one.record.excused == set()


RUNS = [
    pytest.param("sockets", ["--events", "kill-host,cut,slow-link"], id="hosts"),
    pytest.param("rpc", ["--events", "cut-trainers,lossy-link,kill-host"], id="hosts over rpc"),
    pytest.param("sockets", ["--elect", "--events", "kill-leader,stop-leader,kill-etcd,stop-etcd"], id="leaders"),
    pytest.param("sockets", ["--events", "blip,unplug-coordinator,freeze-all,wrong-coordinator"], id="only silent"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("own_fork_servers")
@pytest.mark.parametrize(("transport", "words"), RUNS)
def test_a_short_run(transport: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_TRANSPORT", transport)
    code = main(["chaos", "--hosts", "4", "--minutes", "0.75", "--seed", "5", *words, "--out", str(tmp_path)])
    result: dict[str, Any] = json.loads((tmp_path / "chaos.json").read_text())
    assert result["error"] is None and result["digest"] is not None
    assert result["differences"] == [] and result["unexpected"] == [] and result["processes_left"] == []
    late = [text for text in result["not_effective"] if "never came" in text]  # how many come is up to the machine
    assert result["not_effective"] == late and (code == 0) == (not late)
    felt = [entry for entry in result["schedule"] if entry["event"] in HOST_EVENTS + LEADER_EVENTS + WORLD_EVENTS]
    assert felt and all(entry["felt"] for entry in felt)
    assert not wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), LIMIT_S)
    assert not list((tmp_path / "logs" / "run").glob("etcd-?")), "what etcd wrote is gone"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_is_told_to_end_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    """All of its processes, twice: with what a pipeline had drawn ahead, and had not trained on."""
    code = main(["chaos", "--minutes", "0.5", "--seed", "5", "--events", "term-all", "--out", str(tmp_path)])
    result: dict[str, Any] = json.loads((tmp_path / "chaos.json").read_text())
    assert code == 0 and result["error"] is None and result["differences"] == [] and result["processes_left"] == []
    assert [entry["event"] for entry in result["schedule"]] == ["term-all"] * 2
