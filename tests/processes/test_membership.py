"""Membership of real processes: connections are reset, a server ends between two trainings, one line of JSON comes.

Between the members and the coordinator lies a proxy of the test, whose connections it can reset, as a switch, a
firewall or a proxy of somebody's network would.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import test_cluster
from builds import BUILD
from cluster_child import Orders
from cluster_trainers import ENVIRONMENT, LEASE_S, LIMIT_S, Child
from test_cluster import STEPS, Cluster

from torch_ecrec.processes.launch import Supervisor
from torch_ecrec.runtime.lifetime import tell_to_end
from torch_ecrec.spec.job import CodeSpec

undisturbed = test_cluster.undisturbed
RESETS = (10, 20, 30)  # steps
TRAINERS = 2
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Proxy:
    """Passes connections on; `reset` ends all that there are."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.accepted = 0
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()  # guards the pairs
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self.accepted += 1
                    self._pairs.append((near, far))
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    @staticmethod
    def _pump(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
        for sock in (a, b):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def connected(self) -> int:
        """Connections that there are, as far as nobody has ended them but `reset`."""
        with self._lock:
            return len(self._pairs)

    def reset(self) -> int:
        """Ends every connection at once; returns how many."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    sock.shutdown(socket.SHUT_RDWR)
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # who accepts is woken
        self._listener.close()
        self.reset()


class BehindProxy(Supervisor):
    """A supervisor whose servers, and whoever asks for `join`, reach the coordinator through a proxy."""

    proxy: Proxy | None = None

    @property
    def join(self) -> str:
        if self.proxy is None:
            self.proxy = Proxy(self.address)
        return "{}:{}".format(*self.proxy.address)

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


@contextlib.contextmanager
def cluster(logs: Path, hold: tuple[int, ...], trainers: int = 1) -> Iterator[tuple[Cluster, BehindProxy]]:
    """Trainer 0 holds; the others wait for it."""
    children: list[Child] = []
    try:
        with BehindProxy(CodeSpec(3, 2, 1), spares=1, logs=logs, environment=ENVIRONMENT) as supervisor:
            try:
                for trainer in range(trainers):
                    holds = hold if trainer == 0 else ()
                    orders = Orders(supervisor.join, trainer=trainer, trainers=trainers, steps=STEPS, hold=holds)
                    children.append(Child(orders, logs))
                yield Cluster(supervisor, children), supervisor
            finally:
                for child in children:
                    child.end()
    except BaseException:
        for log in sorted(logs.glob("*.log")):
            print(f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")
        raise


def test_all_control_connections_reset_at_once_cost_nothing(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    """Nobody died: nobody is lost, no trainer ends, no slot moves; also while steps are made, and twice in a row."""
    with cluster(tmp_path, RESETS, TRAINERS) as (running, supervisor):
        proxy = supervisor.proxy
        assert proxy is not None
        for step in RESETS:
            assert running.children[0].expect("held") == f"step {step}"
            running.wait_for("all are there: four servers, two trainers", lambda _: proxy.connected >= 6)
            before = proxy.accepted
            assert proxy.reset() >= 6
            running.children[0].tell("go")
            if step != RESETS[-1]:
                running.wait_for("all are back", lambda _, before=before: proxy.accepted >= before + 6)  # type: ignore[misc]
            proxy.reset()
        results = [child.result() for child in running.children]
        status = running.wait_for("trainers have left", lambda s: sum(m.left for m in s.members) == TRAINERS)
        assert (status.era, status.fatal) == (0, None)
        assert [place.incarnation for place in status.slots] == [0, 0, 0]
        assert all(member.alive for member in status.members if member.role == "server")
    assert results == undisturbed


def test_a_killed_server_is_noticed_at_once_behind_a_proxy(tmp_path: Path) -> None:
    """Its connection may linger in between; here it ends with it, and the process is asked: no lease is waited for."""
    with cluster(tmp_path, (10,)) as (running, _):
        assert running.children[0].expect("held") == "step 10"
        pids = running.kill(1)
        status = running.wait_until_replaced(pids, 1)
        lost = next(member for member in status.members if member.pid in pids)
        assert not lost.alive and lost.silent_s < LEASE_S / 2
        running.children[0].tell("go")
        for child in running.children:
            child.result()


def test_a_server_told_to_end_between_two_trainings_leaves_its_slot_to_another(tmp_path: Path) -> None:
    """The trainers are down, the servers have gone back: the job may go on, and needs every slot."""
    with cluster(tmp_path, (10,)) as (running, _):
        assert running.children[0].expect("held") == "step 10"
        for child in running.children:
            child.end()
        status = running.wait_for("the servers have gone back", lambda s: s.era > 0 and not s.going_back)
        host = status.slots[1].server
        pid = next(m.pid for m in status.members if m.name == host)
        (stdin,) = [child.stdin for child in running.supervisor.children if child.pid == pid]
        assert stdin is not None
        tell_to_end(stdin.fileno())
        status = running.wait_for(
            "the slot has another host, and is whole",
            lambda s: s.slots[1].server not in ("", host) and all(place.healthy for place in s.slots),
        )
        assert status.fatal is None and status.slots[1].incarnation == 1


def test_one_line_of_json_does_not_end_the_cluster(tmp_path: Path) -> None:
    with Supervisor(CodeSpec(3, 2, 1), logs=tmp_path, environment=ENVIRONMENT) as supervisor:
        running = Cluster(supervisor, [])
        running.wait_for("the servers have joined", lambda s: len(s.members) == 3)
        for line in (
            {
                "type": "join",
                "role": "server",
                **BUILD,
                "code": "x",
            },
            {
                "type": "join",
                "role": "trainer",
                **BUILD,
                "rank": [],
                "job": {},
            },
            {
                "type": "rejoin",
                "name": "server-0",
                **BUILD,
            },
            {"type": "listens", "endpoint": {}},
        ):
            with socket.create_connection(supervisor.address) as sock:
                sock.settimeout(LIMIT_S)
                sock.sendall(json.dumps(line).encode() + b"\n")
                assert b'"refused"' in sock.recv(65536) and sock.recv(65536) == b""
        status = running.wait_for("an answer", lambda _: True)
        assert status.refused_messages == 4 and supervisor.coordinator.poll() is None
        assert len(status.members) == 3 and all(member.alive for member in status.members)
