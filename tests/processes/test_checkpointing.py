"""Checkpoints of real clusters: everything is killed, or more than parity repairs, and what follows is the same.

The oracle is an undisturbed run without checkpoints: what every trainer looked up in every step, its dense model, and
all records at the end. Trainers are started again by the test, all of them, as torchrun does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import wait_until

from torch_ecrec.errors import TrainersLost
from torch_ecrec.observe.text import format_status
from torch_ecrec.processes.children import Child
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import PartialStatus, SavesStatus
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.manifest import Manifest

LIMIT_S = 300.0  # for anything that is waited for: only a hang reaches it
STEPS, TRAINERS = 60, 2
LEASE_S = 240.0  # nobody is taken for lost who is only slow
ENVIRONMENT = {"TORCH_ECREC_HEARTBEAT_S": "0.2", "TORCH_ECREC_GIVE_UP_S": "240", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TORCH_ECREC_LEASE_S": str(LEASE_S)}
Traces = list[dict[Any, str]]


class Trainers:
    """All trainers of a cluster. `again`: they are started anew as often, when they were lost."""

    def __init__(
        self, join: str, folder: Path, steps: int = STEPS, pause_s: float = 0.03, again: int = 2, digests: bool = False
    ) -> None:
        self._more = {"TORCH_ECREC_TEST_ALL_DIGEST": "1"} if digests else {}
        self._join, self.folder, self._steps, self._pause_s, self._again = join, folder, steps, pause_s, again
        folder.mkdir(parents=True, exist_ok=True)
        self.children: list[Child] = []
        self.lives = 0

    def start(self) -> None:
        self.lives += 1
        more = self._more | {"TORCH_ECREC_JOIN": self._join, "TORCH_ECREC_TEST_PAUSE_S": str(self._pause_s)}
        for rank in range(TRAINERS):
            with (self.folder / f"trainer-{rank}.log").open("ab") as log:
                words = [str(word) for word in (rank, TRAINERS, self._steps, self.folder / f"{rank}.jsonl")]
                environment = {**os.environ, **ENVIRONMENT, **more}
                files = (log.fileno(), log.fileno())
                self.children.append(forked.start("checkpoint_child", words, environment, *files))

    def end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait(30)
        self.children = []

    def wait(self) -> list[int]:
        """Until all are done, starting them again when one is lost; their last exit codes."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            codes = [child.poll() for child in self.children]
            lost = [code for code in codes if code == TrainersLost.exit_code or (code is not None and code < 0)]
            if lost and self.lives <= self._again:
                self.end()
                self.start()
            elif None not in codes:
                return [code for code in codes if code is not None]
            time.sleep(0.02)
        raise AssertionError(f"the trainers did not end: {self.said()}")

    def said(self) -> str:
        return "\n".join((self.folder / f"trainer-{rank}.log").read_text()[-2000:] for rank in range(TRAINERS))

    def steps_of(self, rank: int = 0) -> int:
        """How many steps it has told of."""
        path = self.folder / f"{rank}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def traces(self) -> Traces:
        """Step -> what was told of it, last; what is told again must be the same."""
        found: Traces = []
        for rank in range(TRAINERS):
            mine: dict[Any, str] = {}
            for line in (self.folder / f"{rank}.jsonl").read_text().splitlines():
                step, told = json.loads(line)
                assert mine.setdefault(step, told) == told, f"step {step} of trainer {rank} was another one"
            found.append(mine)
        return found


@contextlib.contextmanager
def cluster(folder: Path, code: CodeSpec, spares: int = 1, **more: Any) -> Iterator[Supervisor]:
    with Supervisor(code, spares, logs=folder / "logs", environment=ENVIRONMENT, **more) as running:
        yield running


def writes_to(store: Path | str, every: str = "10", *more: str) -> list[str]:
    return ["--checkpoint", str(store), "--checkpoint-every", every, *more]


@contextlib.contextmanager
def training(running: Supervisor, folder: Path, **more: Any) -> Iterator[Trainers]:
    trainers = Trainers(running.join, folder, **more)
    try:
        trainers.start()
        yield trainers
    finally:
        trainers.end()


@functools.cache
def undisturbed() -> Traces:
    with (
        tempfile.TemporaryDirectory() as name,
        cluster(Path(name), CodeSpec(3, 2, 1)) as running,
        training(running, Path(name) / "out", pause_s=0.0) as trainers,
    ):
        assert trainers.wait() == [0] * TRAINERS, trainers.said()
        return trainers.traces()


def same_as_undisturbed(trainers: Trainers, first: int = 1) -> None:
    assert trainers.wait() == [0] * TRAINERS, trainers.said()
    for mine, right in zip(trainers.traces(), undisturbed(), strict=True):
        assert mine == {step: told for step, told in right.items() if step == "digest" or step >= first}


def counted(store: Path | str) -> list[Manifest]:
    return Catalog(str(store)).checkpoints()


def step_reached(trainers: Trainers, step: int) -> None:
    wait_until(lambda: trainers.steps_of() >= step, LIMIT_S, f"step {step}")


def kill(children: list[subprocess.Popen[Any]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


def servers_of_slots(running: Supervisor) -> list[int]:
    """Pids of the servers that host the slots."""
    status = running.status()
    pids = {member.name: member.pid for member in status.members}
    return [pids[slot.server] for slot in status.slots]


# a checkpoint of a run that goes on elsewhere -------------------------------------------------------


@pytest.mark.timeout(3 * LIMIT_S)
def test_another_cluster_goes_on_after_any_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    policy = ("--checkpoint-policy", "consecutive", "--checkpoint-zstd", "1")
    with cluster(tmp_path, CodeSpec(3, 2, 1), coordinator=writes_to(store, "10", *policy)) as running:
        with training(running, tmp_path / "first") as trainers:
            same_as_undisturbed(trainers)
        wait_until(lambda: running.status().checkpoints.last_step >= 30, LIMIT_S, "the third checkpoint")
        told = running.status().checkpoints
    there = counted(store)
    assert [one.done for one in there][:1] == [told.last_step] and told.failing == ""
    assert len(there) >= 3 and there[0].base == there[1].id and there[-1].base is None
    for one, code in ((there[0], CodeSpec(5, 3, 2)), (there[1], CodeSpec(2, 1, 1))):
        restore = ["--restore", f"{store}@{one.done}"]
        folder = tmp_path / f"from {one.done}"
        with cluster(folder, code, coordinator=restore) as running, training(running, folder, pause_s=0) as trainers:
            same_as_undisturbed(trainers, first=one.done + 1)


# losses beyond parity -------------------------------------------------------------------------------


def everything(running: Supervisor, trainers: Trainers) -> None:
    kill([*running.children, *trainers.children])


def two_servers(running: Supervisor, trainers: Trainers) -> None:
    for pid in servers_of_slots(running)[:2]:
        os.kill(pid, signal.SIGKILL)


def all_servers_and_a_trainer(running: Supervisor, trainers: Trainers) -> None:
    for pid in servers_of_slots(running):
        os.kill(pid, signal.SIGKILL)
    kill(trainers.children[1:])


@pytest.mark.smoke
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "who",
    [
        everything,
        pytest.param(two_servers, marks=pytest.mark.slow),
        pytest.param(all_servers_and_a_trainer, marks=pytest.mark.slow),
    ],
    ids=lambda who: who.__name__,
)
def test_beyond_parity_all_go_back_to_a_checkpoint_by_themselves(
    who: Callable[[Supervisor, Trainers], None], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    arguments = {"coordinator": writes_to(store, "5", "--beyond", "checkpoint")}
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), spares=0, **arguments) as running,
        training(running, tmp_path / "out", pause_s=0.1) as trainers,
    ):
        step_reached(trainers, 12)
        wait_until(lambda: bool(counted(store)), LIMIT_S, "a checkpoint")
        before = trainers.steps_of()
        who(running, trainers)
        same_as_undisturbed(trainers)
        assert trainers.lives >= 2 and before < STEPS, "nobody was lost"


def recovered(running: Supervisor) -> PartialStatus | None:
    """What the status says of partial recoveries, once every slot is whole on a server of its own; else None."""
    status = running.status()
    whole = all(slot.healthy for slot in status.slots)
    return status.partial if whole and len({slot.server for slot in status.slots}) == 3 else None


@pytest.mark.slow  # test_partial.py has the protocol
@pytest.mark.timeout(3 * LIMIT_S)
def test_beyond_parity_the_lost_slots_alone_go_back_and_training_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = {"coordinator": writes_to(store, "5", "--beyond", "partial", "--most-lost-samples", "1")}
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), spares=2, **arguments) as running,
        training(running, tmp_path / "out", pause_s=0.25, again=0, digests=True) as trainers,
    ):
        step_reached(trainers, 8)
        wait_until(lambda: bool(counted(store)), LIMIT_S, "a checkpoint")
        two_servers(running, trainers)
        wait_until(lambda: recovered(running) is not None, LIMIT_S, "two slots from a checkpoint, and all parities")
        told, at = recovered(running), trainers.steps_of()
        assert told.exact is False and told.times == 1 and len(told.last_slots) == 2
        assert told.last_step in {one.done for one in counted(store)} | {5} and at < STEPS
        lost = sum(told.lost_steps)
        assert abs(told.lost_samples - lost / 3 / told.of_steps) < 1e-5
        assert "NOT EXACT" in format_status(running.status())
        os.kill(servers_of_slots(running)[0], signal.SIGKILL)  # which parity repairs again
        assert trainers.wait() == [0] * TRAINERS and trainers.lives == 1, trainers.said()
        digests = [trace["digest"] for trace in trainers.traces()]
        assert digests[0] == digests[1] != undisturbed()[0]["digest"]
        assert recovered(running) is None or recovered(running).lost_steps == told.lost_steps


def saves_of(running: Supervisor) -> SavesStatus:
    """What the status says of prioritised saves."""
    return running.status().checkpoints.saves


@pytest.mark.slow  # test_partial_saves.py has the protocol
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("saver", ["mfu", "scar"])
def test_beyond_parity_the_lost_slots_take_what_was_saved_since_the_checkpoint(tmp_path: Path, saver: str) -> None:
    store = tmp_path / "store"
    words = ("--beyond", "partial", "--most-lost-samples", "1", "--checkpoint-saver", saver)
    arguments = {"coordinator": writes_to(store, "20", *words, "--checkpoint-portion", "0.1")}
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), spares=2, **arguments) as running,
        training(running, tmp_path / "out", pause_s=0.25, again=0, digests=True) as trainers,
    ):
        wait_until(lambda: saves_of(running).saves >= 1, LIMIT_S, "a save on a checkpoint")
        saved, (base, *_) = saves_of(running), counted(store)
        at = trainers.steps_of()
        assert saved.saver == saver and saved.last_step > base.done and not saved.failing
        assert len(list((store / "saves").glob("*/save.json"))) >= saved.saves
        slots = [slot for member in running.status().members for slot in member.report.slots or ()]
        assert slots and all(slot.saver_bytes > 0 for slot in slots)
        assert f"saves of 10.0% of the rows ({saver})" in format_status(running.status())
        step_reached(trainers, at + 4)  # so that nobody goes back to before it
        assert len(counted(store)) == 1, "the checkpoint after it came"
        two_servers(running, trainers)
        wait_until(lambda: recovered(running) is not None, LIMIT_S, "two slots from a checkpoint and saves on it")
        told = recovered(running)
        assert told.last == base.id and told.last_step == base.done and told.last_saves >= 1
        assert "saves on it" in format_status(running.status())
        os.kill(servers_of_slots(running)[0], signal.SIGKILL)  # which parity repairs again
        assert trainers.wait() == [0] * TRAINERS and trainers.lives == 1, trainers.said()
        digests = [trace["digest"] for trace in trainers.traces()]
        assert digests[0] == digests[1] != undisturbed()[0]["digest"]
        for one in counted(store):
            assert all(not checked.fault for checked in Catalog(str(store)).verify(one))
        left = "000000000001-" + counted(store)[0].id.split("-")[1] + "-1-9999"  # as of one that was interrupted
        (store / "saves" / left).mkdir()
    assert counted(store) and not list((store / "saves").iterdir()), "the run is over"


@pytest.mark.slow  # test_restores.py has the protocol
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_coordinator_is_lost_while_the_store_cannot_be_read(tmp_path: Path) -> None:
    """The next one would begin with a checkpoint if nobody were left; all are, and need none."""
    store = tmp_path / "store"
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), coordinator=writes_to(store, "5", "--beyond", "checkpoint")) as running,
        training(running, tmp_path / "out", pause_s=0.2) as trainers,
    ):
        wait_until(lambda: bool(counted(store)), LIMIT_S, "a checkpoint")
        store.rename(tmp_path / "gone")
        store.write_text("where the folder was")
        before = running.coordinator.pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running.coordinator.pid != before, LIMIT_S, "another coordinator")
        assert trainers.steps_of() < STEPS, "training was over"
        same_as_undisturbed(trainers)
        assert trainers.lives == 1 and running.ended is None


@pytest.mark.timeout(3 * LIMIT_S)
def test_beyond_parity_without_a_checkpoint_it_ends_and_says_so(tmp_path: Path) -> None:
    arguments = {"coordinator": writes_to(tmp_path / "store", "1000", "--beyond", "checkpoint")}
    with (
        cluster(tmp_path, CodeSpec(3, 2, 1), spares=0, **arguments) as running,
        training(running, tmp_path / "out", pause_s=0.1) as trainers,
    ):
        step_reached(trainers, 5)
        two_servers(running, trainers)
        assert trainers.wait() == [3, 3]
        assert "there is no checkpoint to go back to" in trainers.said()


# what cannot be restored ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_an_altered_checkpoint_is_refused_and_another_job_too(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with cluster(tmp_path, CodeSpec(3, 2, 1), coordinator=writes_to(store, "5")) as running:
        with training(running, tmp_path / "out", steps=20) as trainers:
            assert trainers.wait() == [0] * TRAINERS, trainers.said()
        wait_until(lambda: len(counted(store)) >= 2, LIMIT_S, "two checkpoints")
    newest = counted(store)[0]
    file = store / newest.id / newest.parts[1].name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with (
        cluster(tmp_path / "altered", CodeSpec(3, 2, 1), coordinator=["--restore", str(store)]) as running,
        training(running, tmp_path / "altered" / "out", again=0) as trainers,
    ):
        codes = trainers.wait()
        assert 7 in codes and newest.parts[1].name in trainers.said() and "CheckpointError" in trainers.said()
        wait_until(lambda: running.ended is not None, LIMIT_S, "the coordinator ends, once all who ask were told")
        assert running.ended == 7
    with pytest.raises(OSError, match=r"there is no checkpoint of step 999 at .*; there are: \d+"):
        cluster(tmp_path / "none", CodeSpec(3, 2, 1), coordinator=["--restore", f"{store}@999"]).__enter__()
