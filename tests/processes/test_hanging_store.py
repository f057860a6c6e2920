"""A store whose calls never return, and a coordinator that is started again: it says so, and goes on once they do."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from cluster_trainers import ENVIRONMENT
from conftest import ROOT, wait_until
from places import SUPPORT
from test_checkpointing import LIMIT_S
from test_standbys import Etcd
from test_started_again import by_hand

from torch_ecrec.coordinator.router import UNKNOWN_YET
from torch_ecrec.errors import CheckpointError
from torch_ecrec.observe.text import format_status
from torch_ecrec.processes.children import Child as Process
from torch_ecrec.processes.children import free_port
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.transport.control import request
from torch_ecrec.transport.etcd import EtcdKeys, parse_place
from torch_ecrec.transport.whereabouts import ask_status


@pytest.fixture
def hangs(tmp_path: Path) -> Iterator[Path]:
    """While it is there, the store hangs. Whoever hangs writes a line to it."""
    path = tmp_path / "hangs"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def environment(hangs: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{SUPPORT / 'hanging'}{os.pathsep}{ROOT}", "ECREC_TEST_HANGS": str(hangs)}


@contextlib.contextmanager
def joining(folder: Path, port: int) -> Iterator[Process]:
    """A server that joins; what it says is in server.log."""
    with (folder / "server.log").open("ab") as log:
        words = ["serve", "--join", f"127.0.0.1:{port}"]
        server = forked.start("torch_ecrec", words, {**os.environ, **ENVIRONMENT}, log.fileno(), log.fileno())
    try:
        yield server
    finally:
        server.kill()
        server.wait()


@pytest.mark.timeout(LIMIT_S)
def test_who_is_started_again_says_that_the_store_hangs_and_begins_once_it_answers(tmp_path: Path, hangs: Path) -> None:
    store = f"hanging://{tmp_path}/store"
    words = ["--checkpoint", store, "--checkpoint-every", "5", "--checkpoint-timeout", "1", "--again", "--run", "mine"]
    words += ["--began-with", "none"]
    port = free_port()
    with by_hand(tmp_path, port, words, environment(hangs)) as coordinator:

        def status() -> str:
            return format_status(ask_status(("127.0.0.1", port), LIMIT_S))

        wait_until(lambda: "has given no answer for 1 s: it hangs" in status(), LIMIT_S, "it says so")
        assert "looks for a checkpoint to begin with" in status() and coordinator.poll() is None
        wait_until(lambda: hangs.read_text().count("hangs") > 1, LIMIT_S, "it goes on looking")
        with joining(tmp_path, port) as server:
            place = f"127.0.0.1:{port}"
            waits = f"waits until the cluster at {place} lets it in: {UNKNOWN_YET}: {store} has given no answer"
            wait_until(lambda: waits in (tmp_path / "server.log").read_text(), LIMIT_S, "who joins says so, too")
            assert server.poll() is None
            hangs.unlink()
            wait_until(lambda: " joined " in (tmp_path / "server.log").read_text(), LIMIT_S, "it is let in")
        hello = messages.json_of(join_of("server", "b", os.getpid(), domain="here"))
        assert request("127.0.0.1", port, hello, LIMIT_S)["type"] == "welcome", "it begins"
    assert "given no answer for 1 s: it hangs" in (tmp_path / "by hand.log").read_text()


@pytest.mark.timeout(LIMIT_S)
def test_who_is_started_with_a_store_that_hangs_ends_and_says_so(tmp_path: Path, hangs: Path) -> None:
    words = ["--checkpoint", f"hanging://{tmp_path}/store", "--checkpoint-every", "5", "--checkpoint-timeout", "1"]
    with by_hand(tmp_path, 0, [*words, "--restore", "newest"], environment(hangs)) as coordinator:
        assert coordinator.wait(LIMIT_S) == CheckpointError.exit_code
    said = (tmp_path / "by hand.log").read_text()
    assert hangs.read_text(), "the fault fires"
    assert f"hanging://{tmp_path}/store has given no answer for 1 s: it hangs" in said and "Traceback" not in said


@pytest.mark.timeout(LIMIT_S)
def test_one_that_is_told_to_end_while_it_looks_leads_nobody(tmp_path: Path, hangs: Path) -> None:
    """It looks what to begin with, to lead then. The end that it was told was forgotten once it led."""
    etcd = Etcd(tmp_path)
    try:
        elect = f"etcd://127.0.0.1:{etcd.client}/ads"
        words = ["--elect", elect, "--checkpoint", f"hanging://{tmp_path}/store", "--checkpoint-every", "5"]
        with by_hand(tmp_path, 0, [*words, "--restore", "newest"], environment(hangs)) as coordinator:
            wait_until(lambda: "hangs" in hangs.read_text(), LIMIT_S, "it looks")
            coordinator.send_signal(signal.SIGTERM)
            hangs.unlink()
            assert coordinator.wait(LIMIT_S) == 0
        found = EtcdKeys(parse_place(elect), 5.0).look()
        assert not found.runs and found.leader is None, "it has never led"
    finally:
        etcd.kill()
