"""A coordinator that takes the place of one that died, when what its run began with is not to be had any more.

The oracle is an undisturbed run, as in `test_checkpointing.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from test_checkpointing import (
    ENVIRONMENT,
    LIMIT_S,
    STEPS,
    Trainers,
    cluster,
    counted,
    everything,
    same_as_undisturbed,
    step_reached,
    training,
    writes_to,
)

from torch_ecrec.errors import CheckpointError
from torch_ecrec.observe.text import format_status
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec


def another_coordinator(running: Supervisor) -> None:
    before = running.coordinator.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: running.coordinator.pid != before or running.ended is not None, LIMIT_S, "another coordinator")
    assert running.ended is None


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_healthy_run_goes_on_after_what_it_began_with_was_removed(tmp_path: Path) -> None:
    """`--checkpoint-keep` removes it as soon as the run has newer ones: members know all that is needed."""
    with training_without_its_beginning(tmp_path) as (running, trainers, begin, _):
        another_coordinator(running)
        assert trainers.steps_of() < STEPS - begin, "training was over"
        same_as_undisturbed(trainers, first=begin + 1)
        assert trainers.lives == 1 and running.ended is None
        assert running.status().restored.step == begin


@contextlib.contextmanager
def training_without_its_beginning(
    folder: Path, restart: bool = True
) -> Iterator[tuple[Supervisor, Trainers, int, list[str]]]:
    """A run whose first checkpoint is removed: its cluster, its trainers, the step, and the coordinator's words."""
    store, begin = begun_with_a_checkpoint(folder)
    words = [*writes_to(store, "10", "--checkpoint-keep", "1"), "--restore", f"{store}@{begin}"]
    with (
        cluster(folder / "second", CodeSpec(3, 2, 1), coordinator=words, restart=restart) as running,
        training(running, folder / "second" / "out", pause_s=0.2) as trainers,
    ):
        wait_until(lambda: begin not in [one.done for one in counted(store)], LIMIT_S, "it is removed")
        yield running, trainers, begin, words


def begun_with_a_checkpoint(folder: Path) -> tuple[Path, int]:
    """A store with a checkpoint of another run, and its step."""
    store = folder / "store"
    with cluster(folder, CodeSpec(3, 2, 1), coordinator=writes_to(store, "10")) as running:
        with training(running, folder / "first", steps=12) as trainers:
            assert trainers.wait() == [0, 0], trainers.said()
        wait_until(lambda: bool(counted(store)), LIMIT_S, "a checkpoint")
    return store, counted(store)[0].done


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_coordinator_that_is_started_again_by_hand_needs_no_checkpoint_either(tmp_path: Path) -> None:
    """With the same words as the first one, and nothing that says that there was one."""
    with training_without_its_beginning(tmp_path, restart=False) as (running, trainers, begin, words):
        os.kill(running.coordinator.pid, signal.SIGKILL)
        with by_hand(tmp_path, running.address[1], words) as coordinator:
            same_as_undisturbed(trainers, first=begin + 1)
            assert trainers.lives == 1 and coordinator.poll() is None
    assert f"there is no checkpoint of step {begin}" in (tmp_path / "by hand.log").read_text()


@contextlib.contextmanager
def by_hand(
    folder: Path, port: int, words: list[str], more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator. `more`: of its environment."""
    command = [sys.executable, "-m", "torch_ecrec", "coordinator", "--servers", "3", "-k", "2", "-r", "1", *words]
    with (folder / "by hand.log").open("wb") as log:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **(more or {})}
        child = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_checkpoint_that_is_passed_over_for_members_that_are_back_is_named(tmp_path: Path) -> None:
    """A coordinator that is started by hand with --restore, where a cluster has lost its own."""
    store, begin = begun_with_a_checkpoint(tmp_path)
    with (
        cluster(tmp_path / "second", CodeSpec(3, 2, 1), restart=False) as running,
        training(running, tmp_path / "second" / "out", pause_s=0.2) as trainers,
    ):
        step_reached(trainers, 5)
        os.kill(running.coordinator.pid, signal.SIGKILL)
        with by_hand(tmp_path, running.address[1], ["--restore", str(store)]):
            same_as_undisturbed(trainers)
    said = (tmp_path / "by hand.log").read_text()
    assert f"go on with what they have: --restore {store} is passed over" in said and begin


@pytest.mark.timeout(LIMIT_S)
def test_where_nobody_comes_back_it_ends_and_says_what_is_missing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with by_hand(tmp_path, 0, ["--restore", f"{store}@30"]) as coordinator:
        assert coordinator.wait(LIMIT_S) == CheckpointError.exit_code
    said = (tmp_path / "by hand.log").read_text()
    assert said.count(f"there is no checkpoint of step 30 at {store}; there are: none") == 2 and "Traceback" not in said
    assert "Members of a coordinator before may know better: ends in 10 s" in said


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_with_beyond_stop_nobody_begins_anew_when_everything_was_killed(tmp_path: Path) -> None:
    """Neither at the beginning nor with what the run began with: it would write over the run's checkpoints."""
    store = tmp_path / "store"
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), coordinator=writes_to(store, "5")) as running,
        training(running, tmp_path / "out", pause_s=0.1) as trainers,
    ):
        step_reached(trainers, 12)
        wait_until(lambda: bool(counted(store)), LIMIT_S, "a checkpoint")
        everything(running, trainers)
        there = {one.id: one.parts for one in counted(store)}
        assert trainers.wait() == [3, 3], trainers.said()
        newest = max(int(name[:12]) for name in there)
        assert f"begin another with --restore {store}@{newest}, the newest checkpoint" in trainers.said()
        assert "has nothing to begin with, and refuses whoever joins: more is lost" in format_status(running.status())
    assert {one.id: one.parts for one in counted(store)} == there
    with (
        cluster(tmp_path / "next", CodeSpec(3, 2, 1), coordinator=["--restore", f"{store}@{newest}"]) as running,
        training(running, tmp_path / "next" / "out", pause_s=0) as trainers,
    ):
        same_as_undisturbed(trainers, first=newest + 1)
