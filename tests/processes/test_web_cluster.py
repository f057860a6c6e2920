"""What an operator watches of a real cluster: a server is killed and rebuilt, then the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_child import Orders
from cluster_trainers import Child
from conftest import wait_until
from prometheus_client.parser import text_string_to_metric_families
from test_checkpointing import Trainers
from test_cli import Command, command, join, refused, status_of
from test_web import POST, Stream, ask
from watched import SECRET

from torch_ecrec.cli.main import main
from torch_ecrec.processes import launch
from torch_ecrec.web import place

__all__ = ["join"]  # a fixture
LIMIT_S = 300.0  # for anything that is waited for: only a hang reaches it
ENVIRONMENT = {"TORCH_ECREC_HEARTBEAT_S": "0.2", "TORCH_ECREC_LEASE_S": "240", "OMP_NUM_THREADS": "1"}
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Watched:
    """A cluster of `torch-ecrec up`, as Prometheus sees it: no counter falls while one coordinator lives."""

    address: tuple[str, int]
    counted: Values

    def scrape(self) -> Values:
        code, _, text = ask(self, "/metrics")  # type: ignore[arg-type]
        assert code == 200
        families = list(text_string_to_metric_families(text))
        found = {(s.name, tuple(sorted(s.labels.items()))): s.value for one in families for s in one.samples}
        counts = {key: value for key, value in found.items() if key[0].endswith("_total")}
        fallen = {key: (value, counts.get(key)) for key, value in self.counted.items() if counts.get(key, -1.0) < value}
        assert not fallen
        self.counted = counts
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.scrape().get((f"torch_ecrec_{name}", tuple(sorted(labels.items()))), -1.0)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ask(self, "/status.json")[2])  # type: ignore[arg-type]
        return found

    def well(self) -> bool:
        with contextlib.suppress(OSError):
            return ask(self, "/healthz")[0] == 200  # type: ignore[arg-type]
        return False

    def served_by(self, up: Command) -> int:
        """The process that listens there."""
        for one in psutil.Process(up.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(
                    c.status == psutil.CONN_LISTEN and c.laddr.port == self.address[1] for c in one.net_connections()
                ):
                    return one.pid
        raise AssertionError("nobody listens there")


@contextlib.contextmanager
def trainers(join: str, folder: Path, **orders: Any) -> Iterator[list[Child]]:
    children = [Child(Orders(join, trainers=2, **orders), folder)]
    children.append(Child(Orders(join, trainer=1, trainers=2, steps=orders["steps"]), folder))
    try:
        yield children
    finally:
        for child in children:
            child.end()


def test_a_kill_a_rebuild_and_another_coordinator_are_watched(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    words = ["--servers", "3", "-k", "2", "-r", "1", "--spares", "1", "--http", "0", "--events", str(log)]
    with command("up", *words, environment=ENVIRONMENT) as up:
        line = up.read_until(r"cluster at (\S+) \(.*watch it at http://127\.0\.0\.1:(\d+)/; Ctrl-C ends it")
        join, at = line[1], Watched(("127.0.0.1", int(line[2])), {})
        assert at.well() and at.value("leading") == 1 and at.value("slots", state="healthy") == 0
        page = Stream(at)  # type: ignore[arg-type]
        life = page.first("hello")[0]["life"]
        with trainers(join, tmp_path, steps=90, hold=(20, 60, 90), pause_s=0.02) as (trainer, other):
            assert trainer.expect("held") == "step 20"
            up.wait_until("all is well", lambda: at.value("slots", state="healthy") == 3 and at.value("step") >= 20)
            up.wait_until("bytes are counted", lambda: at.value("sent_bytes_total", role="server", kind="fold") > 0)
            folds = at.value("sent_bytes_total", role="server", kind="fold")

            victim = at.status()["slots"][1]["server"]
            pid = next(one["pid"] for one in at.status()["members"] if one["name"] == victim)
            os.kill(pid, signal.SIGKILL)
            trainer.tell("go")
            lost = next(event for event in iter(lambda: page.first("happened")[0], None) if event["event"] == "lost")
            assert lost["member"] == victim and lost["slots"] == [1]
            up.wait_until("another has the slot", lambda: at.value("slot_incarnation", slot="1") == 1)
            up.wait_until("it is whole again", lambda: at.value("slots", state="healthy") == 3)
            assert at.value("slot_rebuilt_ratio", slot="1") == 1 and at.value("members", state="lost") == 1
            assert at.value("sent_bytes_total", role="server", kind="fold") >= folds, "of who is lost, too"
            rebuilt = next(e for e in iter(lambda: page.first("happened")[0], None) if e["event"] == "slot rebuilt")
            assert rebuilt["slot"] == 1
            assert trainer.expect("held") == "step 60"
            assert ask(at, "/drain", "POST", '{"member": "server-77"}', POST)[0] == 409  # type: ignore[arg-type]

            coordinator, last = at.served_by(up), page.last_id
            os.kill(coordinator, signal.SIGKILL)
            at.counted = {}  # as Prometheus expects of another process
            up.wait_until("the port is free, and another has it", lambda: at.well() and at.served_by(up) != coordinator)
            again = Stream(at, last)  # type: ignore[arg-type]
            about = again.first("hello")[0]
            assert about["life"] != life and not about["missed"], "the page can tell"
            assert page.first("never") == [], "and its stream has ended"
            up.wait_until("it knows all", lambda: at.value("slots", state="healthy") == 3)
            trainer.tell("go")
            assert trainer.expect("held") == "step 90"
            up.wait_until("it goes on", lambda: at.value("step") == 90)
            assert at.value("steps_total") <= 30, "what the one before has counted is not counted again"
            sent = [one["report"].get("bytes_sent") or {} for one in at.status()["members"] if one["role"] == "server"]
            assert at.value("sent_bytes_total", role="server", kind="fold") < sum(one.get("fold", 0) for one in sent)
            trainer.tell("go")
            assert trainer.result() and other.result()
        assert up.interrupt(signal.SIGTERM) == 0
        assert again.first("never") == []
        with socket.create_server(at.address):
            pass
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    kinds = [event["event"] for event in events]
    assert [kinds.count(one) for one in ("lost", "slot rebuilt", "regathered")] == [1, 1, 1], kinds
    assert all(event["time_s"] > 1e9 for event in events)


def test_a_checkpoint_now_and_kills_from_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None is due for a long time; a server and a trainer that are killed from there are lost, and training goes on."""
    store, log = tmp_path / "store", tmp_path / "events.jsonl"
    words = ["--servers", "3", "--spares", "1", "--http", "0", "--allow-kill", "--events", str(log)]
    words += ["--checkpoint", str(store), "--checkpoint-every", "100000"]
    with command("up", *words, environment=ENVIRONMENT) as up:
        line = up.read_until(r"cluster at (\S+) \(.*watch it at http://127\.0\.0\.1:(\d+)/; Ctrl-C ends it")
        join, at = line[1], Watched(("127.0.0.1", int(line[2])), {})

        def post(path: str, body: str) -> tuple[int, str]:
            code, _, text = ask(at, path, "POST", body, POST)  # type: ignore[arg-type]
            return code, text

        def states() -> list[str]:
            return [json.loads(line)["event"] for line in log.read_text(encoding="utf-8").splitlines()]

        trainers = Trainers(join, tmp_path / "trainers", steps=10_000)
        try:
            trainers.start()
            up.wait_until("it trains", lambda: at.value("step") >= 3)
            assert main(["checkpoint", "--join", join]) == 0
            out = capsys.readouterr().out
            step = int(re.findall(rf"written: \S+, of step (\d+), at {re.escape(str(store))}\n\Z", out)[0])
            assert step > 0 and len(list(store.glob("*/manifest*"))) == 1, out
            up.wait_until("a later step", lambda: at.value("step") > step)
            assert post("/checkpoint", "{}") == (200, "a checkpoint is being written\n")
            up.wait_until("it counts", lambda: at.status()["checkpoints"]["last_step"] > step)
            assert at.status()["checkpoints"]["asked"] is None

            victim = at.status()["slots"][1]["server"]
            assert post("/kill", json.dumps({"member": victim})) == (200, f"{victim} was killed\n")
            up.wait_until("it is lost", lambda: at.value("members", state="lost") == 1)
            up.wait_until("its slot is whole again", lambda: at.value("slots", state="healthy") == 3)
            code, why = post("/kill", json.dumps({"member": victim}))
            assert code == 409 and f"no member is called '{victim}'" in why
            dead = trainers.children[1]
            assert post("/kill", '{"member": "trainer-1_0"}')[0] == 409
            name = next(m["name"] for m in at.status()["members"] if m["role"] == "trainer" and m["rank"] == 1)
            assert post("/kill", json.dumps({"member": name}))[0] == 200
            assert dead.wait(LIMIT_S) == -signal.SIGKILL
            up.wait_until("that is told", lambda: states().count("killed") == 2 and "era" in states())
        finally:
            trainers.end()
        assert up.interrupt(signal.SIGINT) == 0


def test_a_checkpoint_where_none_is_kept(join: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(
        ["checkpoint", "--join", join], "no checkpoints are kept: start the coordinator with --checkpoint URL", capsys
    )


def test_up_says_at_its_terminal_what_is_wrong_and_when_it_is_over(tmp_path: Path) -> None:
    """Nobody has asked: trainers are lost and come back, then two servers at once, beyond parity."""
    with command("up", "--servers", "3", "--spares", "0", environment=ENVIRONMENT) as up:
        join = up.read_until(r"cluster at (\S+) \(")[1]

        def said(text: str) -> bool:
            return any(re.search(text, line) for line in up.err)

        trainers = Trainers(join, tmp_path, steps=10_000, pause_s=0.1)
        try:
            trainers.start()
            up.wait_until("it trains", lambda: status_of(join).step >= 3)
            trainers.end()
            up.wait_until(
                "it says so", lambda: said(r"\d\d:\d\d:\d\d WARN: training stands: 0 of 2 trainers are there")
            )
            up.wait_until("and what to do", lambda: said(r"^  to do: torchrun starts lost trainers again"))
            trainers.start()
            up.wait_until("and that it is over", lambda: said(r"\d\d:\d\d:\d\d OK: training goes on"))
            status = status_of(join)
            for place in status.slots[:2]:
                os.kill(status.member(place.server).pid, signal.SIGKILL)
            up.wait_until(
                "it says so", lambda: said(r"ERROR: STOPPED: slots 0, 1 are lost|ERROR: STOPPED: slots \[0, 1\]")
            )
            assert said(r"no checkpoints are kept \(--checkpoint URL"), "what can be done where there are none"
            up.wait_until("all of it", lambda: said(r"^  to do: end its processes"))
            assert sum("ERROR: STOPPED" in line for line in up.err) == 1, "once"
        finally:
            trainers.end()
        assert up.interrupt(signal.SIGINT) == 0


# --- refused at the start ---------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(launch, "warm", start)
    monkeypatch.delenv("TORCH_ECREC_SECRET", raising=False)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", ["up", "coordinator"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--http", "0.0.0.0:0"], "--http 0.0.0.0:0: whoever reaches it could drain servers"),
        (["--http", "10.0.0.1:9464"], "ssh -L 9464:127.0.0.1:9464"),
        (["--allow-kill"], "--allow-kill is of the live page, and none is served: add --http PORT"),
        (["--events", "/nowhere/at/all"], "--events: /nowhere/at/all cannot be written: No such file or directory"),
        (["--events", "/"], "--events: / cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_watched(name: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused([name, *words], says, capsys)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", ["up", "coordinator"])
def test_a_library_that_is_lacking(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(place.NEEDED, "no_such_module", "no-such-package")
    refused([name, "--http", "0"], "--http needs no-such-package: pip install 'torch-ecrec[http]'", capsys)


def test_a_port_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with command("up", "--servers", "3", "--http", str(port)) as up:
            assert up.process.wait(LIMIT_S) == 2
            wait_until(lambda: any("is in use" in line for line in up.err), LIMIT_S, "it says why")
            assert any(f"--http: port {port} on 127.0.0.1 is in use" in line for line in up.err)


def test_a_coordinator_alone_says_where_and_asks_for_the_secret() -> None:
    words = ["--servers", "3", "--http", "127.0.0.1:0"]
    with command("coordinator", *words, environment={"TORCH_ECREC_SECRET": SECRET}) as coordinator:
        port = int(coordinator.read_until(r'"http": \["127.0.0.1", (\d+)\]')[1])
        at = Watched(("127.0.0.1", port), {})
        assert ask(at, "/metrics")[0] == 401  # type: ignore[arg-type]
        assert ask(at, "/metrics", headers={"Authorization": f"Bearer {SECRET}"})[0] == 200  # type: ignore[arg-type]
        coordinator.process.kill()
        coordinator.process.wait(LIMIT_S)
        with socket.create_server(at.address):
            pass
        assert not any(SECRET in line for line in coordinator.err)
