"""From one build to the next, server by server, then the coordinator, while training goes on.

The next build is a copy of this one, with another version and other sources, of kernels, too. Others differ from it by
what no cluster survives, a field of a message and a constant of an optimizer, and are refused before anything moves.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builds import BUILD, copy_of_build, environment_of, run_build
from cluster_trainers import LIMIT_S
from test_cluster import STEPS, Cluster, check, cluster, run_undisturbed

from torch_ecrec.observe.verdict import verdict_of
from torch_ecrec.processes.children import Child
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import MemberStatus, Status
from torch_ecrec.spec.job import CodeSpec

HERE, NEXT = BUILD["version"], "9.9.1"
HARMLESS = {
    "records/merge.py": ("def warm() -> None:", "# A comment is no other bit.\ndef warm() -> None:"),
    "server/service.py": (
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nLATER = 1\n",
    ),
}
FROZEN = "    frozen: bool  # whether the new host waits"
OTHER_MESSAGE = {"protocol/wire.py": (FROZEN, f"    more: Count\n{FROZEN}")}
OTHER_CONSTANT = {"records/optimizers/adagrad.py": ('fixed={"eps": 1e-8}', 'fixed={"eps": 1e-7}')}


class Upgrading(Supervisor):
    """Starts processes of a copy from when it is told of one."""

    copy: Path | None = None

    def start_child(self, name: str, arguments: list[str], stdout: int | None, stderr: int | None) -> Child:
        if self.copy is None:
            return super().start_child(name, arguments, stdout, stderr)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "torch_ecrec", *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**self.environment, "PYTHONPATH": str(self.copy)},
            start_new_session=True,
        )


class Upgrade:
    """`torch-ecrec upgrade` of a copy, under way."""

    def __init__(self, copy: Path, join: str) -> None:
        command = [sys.executable, "-P", "-m", "torch_ecrec", "upgrade", "--join", join]
        self.process = subprocess.Popen(command, env=environment_of(copy), stdout=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def finished(self) -> str:
        """All that it has said, once it has ended by itself."""
        while (line := self._lines.get(timeout=LIMIT_S)) is not None:
            self.said.append(line)
        assert self.process.wait(LIMIT_S) == 0
        return "".join(self.said)


@pytest.fixture
def upgrade() -> Iterator[list[Upgrade]]:
    begun: list[Upgrade] = []
    yield begun
    for one in begun:
        one.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    logs = tmp_path_factory.getbasetemp() / "undisturbed"
    logs.mkdir(exist_ok=True)
    return run_undisturbed(logs)


def of_version(status: Status, version: str, spare: bool) -> list[MemberStatus]:
    return [one for one in status.servers if one.version == version and one.spare == spare]


def refused(running: Cluster, copy: Path, *says: str) -> None:
    """Both who asks and who joins is refused, and nothing is moved or marked."""
    before, join = running.supervisor.status(), running.supervisor.join
    commands = [["-m", "torch_ecrec", command, "--join", join] for command in ("upgrade", "serve")]
    with ThreadPoolExecutor() as threads:
        asked, joined = threads.map(lambda command: run_build(copy, *command), commands)
    assert asked.returncode == 2 and "this build may not serve the cluster at" in asked.stderr
    assert joined.returncode == 2 and "refused by the cluster at" in joined.stderr
    for text in says:
        assert text in asked.stderr and text in joined.stderr
    after = running.supervisor.status()
    assert after.slots == before.slots and after.move is None and not any(one.draining for one in after.members)
    assert {one.name for one in after.members} == {one.name for one in before.members}


def test_all_servers_then_the_coordinator_while_training_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, Any]], upgrade: list[Upgrade]
) -> None:
    later = copy_of_build(tmp_path / "next", NEXT, HARMLESS)
    message = copy_of_build(tmp_path / "message", NEXT, OTHER_MESSAGE)
    constant = copy_of_build(tmp_path / "constant", NEXT, OTHER_CONSTANT)
    holds = (10, 25, 40, 55, 90)
    orders: dict[str, Any] = {"steps": STEPS, "hold": holds, "pause_s": 0.05}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, waits=True, supervisor=Upgrading, **orders) as running:
        trainer, supervisor = running.children[0], running.supervisor
        assert isinstance(supervisor, Upgrading)
        assert trainer.expect("held") == "step 10"
        refused(running, message, f"version {NEXT}, here {HERE}, but not the same: Adopt. They cannot serve")
        refused(running, constant, f"(version {NEXT}, there {HERE}): bits of adagrad. They cannot serve")
        full = run_build(later, "-m", "torch_ecrec", "upgrade", "--join", supervisor.join)
        (spare,) = of_version(supervisor.status(), HERE, spare=True)
        assert f"version {NEXT} may serve the cluster" in full.stdout
        assert full.returncode == 2 and f"nothing was moved: no server of version {NEXT} is there" in full.stderr
        assert f"end {spare.name} (pid {spare.pid} on " in full.stderr and not spare.draining

        supervisor.copy = later
        replace(running, spare)
        running.wait_for("a server of the next build", lambda status: bool(of_version(status, NEXT, spare=True)))
        upgrade.append(Upgrade(later, supervisor.join))
        for slot in range(3):
            trainer.tell("go")
            assert trainer.expect("held") == f"step {holds[slot + 1]}"
            status = running.wait_for("one that is drained", lambda status: bool(drained(status)))
            assert any(note.startswith(f"several versions are at work: {HERE}: ") for note in verdict_of(status).notes)
            replace(running, drained(status)[0])
        said = upgrade[0].finished()
        assert "slots on servers of other versions: " in said
        assert "upgraded: no slot is on a server of another version" in said and f"{HERE}: trainer-0" in said
        assert "then start the coordinator again" in said and "trainer-0, trainer-1: of another version until" in said

        status = supervisor.status()
        assert all(place.healthy and place.incarnation == 1 for place in status.slots), "moved, not lost"
        assert {place.server for place in status.slots} == {one.name for one in of_version(status, NEXT, spare=False)}
        assert status.version == HERE and status.era == 0

        supervisor.restart = True  # as who keeps a coordinator running does
        os.kill(supervisor.coordinator.pid, signal.SIGKILL)
        status = running.wait_for("all are back", is_back)
        assert not any(place.incarnation > 1 for place in status.slots), "nothing was lost meanwhile"
        trainer.tell("fast")
        trainer.tell("go")
        assert trainer.expect("held") == "step 90"
        trainer.tell("go")
        check([child.result() for child in running.children], undisturbed, parities=1)


def drained(status: Status) -> list[MemberStatus]:
    """Servers of this build that have no slot any more."""
    return [one for one in of_version(status, HERE, spare=True) if one.draining]


def is_back(status: Status) -> bool:
    """A coordinator of the next build leads, and all who were there have told it what they know."""
    return status.version == NEXT and status.healthy and len(status.trainers) == 2 and status.regathering is None


def replace(running: Cluster, one: MemberStatus) -> None:
    """Ends a server without slots, and starts one of the next build in its place."""
    os.kill(one.pid, signal.SIGKILL)
    running.wait_for(f"the end of {one.name}", lambda status: one.name not in {m.name for m in status.servers})
    running.supervisor.start_server()
