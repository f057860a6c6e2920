"""A cluster of real processes under small trainers of the tests (`cluster_child.py`): SIGKILL at named points.

The oracle is an undisturbed run: every lookup of every trainer, and at the end every record, bit for bit. It does not
depend on the number of servers or on the code, so that one serves all runs.
"""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from builds import BUILD
from cluster_child import Orders
from cluster_trainers import ENVIRONMENT, LIMIT_S, Child
from conftest import ROOT, wait_until

from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import Status, json_of
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import TRANSPORTS
from torch_ecrec.transport.control import ControlClient, request

STEPS = 100
TRAINERS = 2


class Cluster:
    """A supervised cluster and its trainers."""

    def __init__(self, supervisor: Supervisor, children: list[Child]) -> None:
        self.supervisor, self.children = supervisor, children

    def wait_for(self, what: str, condition: Callable[[Status], bool]) -> Status:
        """The first status that meets the condition."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(ClusterError):
                status = self.supervisor.status()
                if condition(status):
                    return status
            if time.monotonic() > end_s:
                pytest.fail(f"not within {LIMIT_S:g} s: {what}; last seen: {json.dumps(json_of(status), indent=1)}")
            time.sleep(0.05)

    def kill(self, *slots: int) -> list[int]:
        """SIGKILLs the processes that host these slots, all at once; returns their pids."""
        status = self.supervisor.status()
        pids = {member.name: member.pid for member in status.members}
        doomed = [pids[status.slots[slot].server] for slot in slots]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        return doomed

    def wait_until_replaced(self, pids: list[int], *slots: int) -> Status:
        """The kill has fired: the coordinator has lost these processes, and the slots begin a new life elsewhere.

        A slot has no server while one that has joined cannot be called yet.
        """
        status = self.wait_for(
            f"the loss of {pids}",
            lambda s: (
                not any(m.alive for m in s.members if m.pid in pids)
                and len(s.slots) > max(slots)
                and all(s.slots[slot].server for slot in slots)
            ),
        )
        for slot in slots:
            assert status.slots[slot].incarnation >= 1, status.slots
        return status


@contextlib.contextmanager
def cluster(
    logs: Path,
    code: CodeSpec,
    spares: int = 0,
    trainers: int = TRAINERS,
    environment: dict[str, str] | None = None,
    waits: bool = False,
    supervisor: type[Supervisor] = Supervisor,
    **orders: Any,
) -> Iterator[Cluster]:
    """Only trainer 0 holds and pauses: the others wait for it, a step ahead at most. Shows the logs on failure.

    `environment` is for the servers and the coordinator. `waits`: nobody starts a server in place of one that died,
    and its slots wait for one.
    """
    children: list[Child] = []
    try:
        more = {"restart": False, "without_spare": "wait"} if waits else {}
        environment = {**ENVIRONMENT, **(environment or {})}
        with supervisor(code, spares, logs=logs, environment=environment, **more) as supervising:
            try:
                first = Orders(supervising.join, trainers=trainers, **orders)
                for trainer in range(trainers):
                    mine = first if trainer == 0 else dataclasses.replace(first, trainer=trainer, hold=(), pause_s=0.0)
                    children.append(Child(mine, logs))
                yield Cluster(supervising, children)
            finally:
                for child in children:
                    child.end()
    except BaseException:
        for log in sorted(logs.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-40:]
            print("\n".join([f"--- the end of {log.name}", *lines]))
        raise


@functools.cache
def run_undisturbed(logs: Path) -> list[dict[str, Any]]:
    with cluster(logs, CodeSpec(3, 2, 1), steps=STEPS) as running:
        results = [child.result() for child in running.children]
        status = running.supervisor.status()
    assert status.era == 0 and not any(place.incarnation for place in status.slots), "undisturbed"
    assert {member.report.wire for member in status.members} == {"float32", None}, "trainers say it, servers do not"
    assert status.spread is not None and [table.name for table in status.spread.tables] == ["a", "b", "c", "d"]
    assert all(table.slots == [(0, 2)] and not table.pooled for table in status.spread.tables), "dealt out"
    return results


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every trainer reports of a run without kills; one run for all modules that ask."""
    logs = tmp_path_factory.getbasetemp() / "undisturbed"
    logs.mkdir(exist_ok=True)
    return run_undisturbed(logs)


def check(results: list[dict[str, Any]], undisturbed: list[dict[str, Any]], parities: int) -> None:
    """All lookups and all records are those of the undisturbed run, and every holder has the last dense snapshots."""
    for trainer, (mine, theirs) in enumerate(zip(results, undisturbed, strict=True)):
        assert mine["lookups"] == theirs["lookups"], f"a lookup of trainer {trainer} differs"
        assert mine["snapshots"] == [[slot, [True]] for slot in range(parities + 1)]
        assert mine["snapshot_bytes"] > 0
    assert results[0]["digest"] == undisturbed[0]["digest"], "records differ"


@pytest.mark.smoke
def test_the_undisturbed_run(undisturbed: list[dict[str, Any]]) -> None:
    assert re.fullmatch("[0-9a-f]{64}", undisturbed[0]["digest"])
    assert len({result["lookups"] for result in undisturbed}) == TRAINERS, "they train on different rows"
    check(undisturbed, undisturbed, parities=1)


def listen_at_loopback_only(running: Cluster) -> None:
    """The coordinator, the servers and the trainers."""
    pids = [child.process.pid for child in running.children] + [child.pid for child in running.supervisor.children]
    places = {
        pid: {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN}
        for pid in pids
    }
    assert len(pids) == 7 and all(ips == {"127.0.0.1"} for ips in places.values()), places


@pytest.mark.smoke
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_server_is_replaced_and_comes_back_as_a_spare(
    tmp_path: Path, undisturbed: list[dict[str, Any]], transport: str
) -> None:
    """The spare takes the slot; the process that is started again joins while training goes on, and
    takes the slot that is lost next. All listen at loopback only."""
    first, second = 20, 90
    environment = {"TORCH_ECREC_TRANSPORT": transport}
    orders: dict[str, Any] = {"steps": STEPS, "hold": (first, second), "pause_s": 0.1}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, **orders) as running:
        assert running.supervisor.status().transport == transport
        trainer = running.children[0]
        assert trainer.expect("held") == f"step {first}"
        listen_at_loopback_only(running)
        known = {member.pid for member in running.supervisor.status().members}
        pids = running.kill(1)
        trainer.tell("go")
        running.wait_until_replaced(pids, 1)

        def back(status: Status) -> bool:
            return status.roster >= 3 and bool(spares(status)) and all(s.healthy for s in status.slots)

        def spares(status: Status) -> list[int]:
            return [m.pid for m in status.members if m.spare and m.alive and m.report.slots == []]

        status = running.wait_for("the restarted process is a spare", back)
        trainer.tell("fast")
        running.wait_for("training goes on", lambda status: first < status.step)
        # The other trainer is a step ahead at most.
        assert status.step <= second + 1, "and it was not over when that process joined"
        (spare,) = spares(status)
        assert spare not in known, "a process that was not there before"

        assert trainer.expect("held") == f"step {second}"
        pids = running.kill(0)
        status = running.wait_until_replaced(pids, 0)
        hosts = {m.name: m.pid for m in status.members}
        assert hosts[status.slots[0].server] == spare, "it has taken the slot"
        trainer.tell("go")
        check([child.result() for child in running.children], undisturbed, parities=1)


def test_two_servers_killed_together(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    """(k, r) = (3, 2), without spares: the survivors take the slots; two of three snapshot holders go."""
    with cluster(tmp_path, CodeSpec(5, 3, 2), steps=STEPS, hold=(20,)) as running:
        assert running.children[0].expect("held") == "step 20"
        pids = running.kill(0, 1)
        assert len(set(pids)) == 2
        running.children[0].tell("go")
        running.wait_until_replaced(pids, 0, 1)
        check([child.result() for child in running.children], undisturbed, parities=2)


def test_loaded_values_survive_every_server(tmp_path: Path) -> None:
    """Rows loaded in parts and twice read back; then every slot is lost in turn, so that every record is decoded from
    the parities of what was loaded, at last from rebuilt ones."""
    # With as many spares, no process ever hosts two slots.
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=2, trainers=1, load=True, reads=4) as running:
        (trainer,) = running.children
        for turn, slot in enumerate([None, 1, 0, 2]):
            assert trainer.expect("held") == f"read {turn}"
            pids = [] if slot is None else running.kill(slot)
            trainer.tell("go")
            assert trainer.expect("read") == [True] * 3, f"slot killed: {slot}"
            if slot is not None:
                running.wait_until_replaced(pids, slot)
            running.wait_for("all is rebuilt", lambda s: all(p.healthy and p.server for p in s.slots))
        trainer.result()


def test_servers_lost_while_values_are_loaded_are_replaced(tmp_path: Path) -> None:
    """Nobody starts again, and everything is what was loaded: also what was under way."""
    # With as many spares, no process ever hosts two slots.
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=4, trainers=1, load=True, hold_load=True, reads=1) as running:
        (trainer,) = running.children
        for table_group in range(3):
            assert trainer.expect("held") == f"loading {table_group}"
            pids = running.kill(table_group)
            trainer.tell("go")
            running.wait_until_replaced(pids, table_group)
            running.wait_for("all is rebuilt", lambda s: all(p.healthy and p.server for p in s.slots))
        assert trainer.expect("held") == "read 0"
        status = running.supervisor.status()
        assert status.step == status.resume_step == status.era == 0
        running.kill(0)
        trainer.tell("go")
        assert trainer.expect("read") == [True] * 3
        trainer.result()


def test_whoever_joins_while_members_rejoin_gets_a_name_that_nobody_has() -> None:
    """The coordinator does not know before the end which names its predecessor gave."""
    said: dict[str, queue.Queue[dict[str, Any]]] = {who: queue.Queue() for who in ("old", "new")}
    command = [sys.executable, "-m", "torch_ecrec", "coordinator", "--servers", "3", "-k", "2", "-r", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        host, port = json.loads(process.stdout.readline())["address"]
        clients = {who: ControlClient(host, port, said[who].put, lambda _: None, LIMIT_S) for who in said}
        hello = {
            **BUILD,
            "pid": os.getpid(),
            "role": "server",
            "rank": -1,
            "session_id": "one",
        }
        known = {
            "job": None,
            "placement": None,
            "era": 0,
            "frozen": False,
            "resume_step": 0,
            "done": 0,
            "load_end": None,
        }
        world = {"run": "run", "term": 0, "endpoint": "here", "roster": 1, "world": ["server-0", "server-1"]}
        plain = {"slots": 3, "k": 2, "r": 1, "protection": "parity"}
        clients["old"].send({**hello, **world, "known": known, "type": "rejoin", "name": "server-0", "code": plain})
        wait_until(
            lambda: "server-0" in str(request(host, port, {"type": "status"}, timeout_s=LIMIT_S)),
            LIMIT_S,
            "the coordinator has heard of the member that rejoins",
        )
        clients["new"].send({**hello, "type": "join", "session_id": "another"})
        rejoined, welcome = said["old"].get(timeout=LIMIT_S), said["new"].get(timeout=LIMIT_S)
        assert (rejoined["type"], rejoined["term"]) == ("rejoined", 1)
        assert (welcome["type"], welcome["name"]) == ("welcome", "server-1000")
        for client in clients.values():
            client.close()
    finally:
        process.terminate()
        process.wait(LIMIT_S)
