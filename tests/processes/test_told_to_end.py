"""SIGTERM to every process of a job, as `scancel`, systemd or an init sends it: who serves outlives whom it serves.

The script's own handler saves, as it does with stock TorchRec. Everything ends soon after, and nothing is left.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_child import Orders
from cluster_trainers import Child
from conftest import ROOT, wait_for_none
from places import SUPPORT
from test_cli import LIMIT_S, Command, command, status_of

from torch_ecrec.processes.children import FRESH_STORE

END_S = 300.0  # only a hang reaches it
PATH = {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
CODE = ["--servers", "2", "-k", "1", "--spares", "0"]
SERVERS = 2
SLOW = {"BEFORE_SAVING_S": "2"}  # whoever ends at once has ended by then


def all_of(started: Command) -> list[int]:
    process = psutil.Process(started.process.pid)
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def tell(pids: list[int], number: signal.Signals = signal.SIGTERM) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def trainers(folder: Path, join: str) -> Any:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SUPPORT / "told_child.py")]
    environment = {**PATH, **FRESH_STORE, **SLOW, **({"TORCH_ECREC_JOIN": join} if join else {})}
    return command(program=[*words, str(folder)], environment=environment)


@contextlib.contextmanager
def cluster(kind: str) -> Iterator[tuple[str, list[Command]]]:
    """What the trainers join, and the processes that serve them."""
    with contextlib.ExitStack() as stack:
        if kind == "own":
            yield "", []
        elif kind == "up":
            up = stack.enter_context(command("up", *CODE))
            yield up.read_until(r"cluster at (\S+)")[1], [up]
        else:
            coordinator = stack.enter_context(command("coordinator", *CODE))
            port = coordinator.read_until(r'"address": \["127.0.0.1", (\d+)\]')[1]
            join = f"127.0.0.1:{port}"
            yield join, [coordinator, *(stack.enter_context(command("serve", "--join", join)) for _ in range(SERVERS))]


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("whom", ["all", pytest.param("torchrun", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["own", "up", "apart"])
def test_a_script_that_saves_when_it_is_told_to_end(kind: str, whom: str, tmp_path: Path) -> None:
    with cluster(kind) as (join, serving), trainers(tmp_path / "saved", join) as script:
        for _ in range(2):
            script.read_until("READY")
        who = all_of(script) if whom == "all" else [script.process.pid]
        tell([*(pid for one in serving for pid in all_of(one) if whom == "all"), *who])
        for _ in range(2):
            script.read_until("SAVED")
        assert not wait_for_none(script.living, END_S), f"left running after {END_S:g} s"
        for one in reversed(serving):
            if whom != "all":
                tell([one.process.pid])
            assert not wait_for_none(one.living, END_S) and one.wait() == 0, one.err
            assert (whom != "all") or any("told to end: waits until" in line for line in one.err), one.err
    assert (tmp_path / "saved" / ".metadata").exists() and list((tmp_path / "saved").glob("*.distcp"))


@contextlib.contextmanager
def holding(join: str, folder: Path) -> Iterator[None]:
    """A trainer that stays."""
    child = Child(Orders(join, steps=20, hold=(5,)), folder)
    try:
        assert child.expect("held") == "step 5"
        yield
    finally:
        child.end()


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("then", ["told again", "interrupted", "the grace is over"])
def test_up_waits_no_longer_than_it_is_let(then: str, tmp_path: Path) -> None:
    grace = "1" if then == "the grace is over" else "3000"
    with command("up", *CODE, "--grace", grace) as up, holding(up.read_until(r"cluster at (\S+)")[1], tmp_path):
        tell(all_of(up))
        up.wait_until("it waits", lambda: any("waits until trainer-0 have ended" in line for line in up.err))
        if then != "the grace is over":
            tell([up.process.pid], signal.SIGTERM if then == "told again" else signal.SIGINT)
        assert not wait_for_none(up.living, END_S) and up.wait() == 0


def test_a_server_of_up_is_not_ended_by_a_signal(tmp_path: Path) -> None:
    """Of each process, at once: it says whose word it waits for, and serves on."""
    with command("up", *CODE) as up:
        join = up.read_until(r"cluster at (\S+)")[1]
        with holding(join, tmp_path):
            before = {one.pid for one in status_of(join).members}
            below = all_of(up)[1:]
            tell(below, signal.SIGUSR1)  # without a word: it is not for them
            tell(below, signal.SIGUSR2)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                tell(below, number)
                what = f"torch-ecrec: {number.name} does not end process"
                up.wait_until(what, lambda: sum(what in line for line in up.err) >= SERVERS + 1)  # noqa: B023
            assert all_of(up)[1:] == below and {one.pid for one in status_of(join).members} == before
            status = status_of(join)
            assert all(one.alive for one in status.members) and status.fatal is None
        tell([up.process.pid])
        assert not wait_for_none(up.living, END_S) and up.wait() == 0
