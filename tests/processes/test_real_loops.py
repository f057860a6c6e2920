"""Loops that people write, in real processes: a trainer kills itself and a server is killed; nothing differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

from torch_ecrec.processes.launch import Supervisor
from torch_ecrec.spec.job import CodeSpec

CHILD = SUPPORT / "loop_child.py"
LIMIT_S = 600.0  # only a hang reaches it


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.02)


def train(way: str, out: Path, kill_after: int = 0) -> list[dict[str, Any]]:
    """Two trainers under torchrun, three servers and a spare; what each trainer has seen.

    Those that are disturbed draw batches early where a plain loop lets them, the others never do.
    """
    out.mkdir()
    with Supervisor(CodeSpec(3, 2, 1), spares=1, logs=out / "logs") as cluster:
        environment = {
            **os.environ,
            "TORCH_ECREC_JOIN": cluster.join,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_ECREC_LOOK_AHEAD": "1" if kill_after else "0",
        }
        words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
        words += ["--nproc-per-node", "2", str(CHILD), way, str(out), *([str(kill_after)] if kill_after else [])]
        with (out / "trainers.log").open("wb") as log:
            trainers = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            if kill_after:
                here = out / str(kill_after)
                wait_for(lambda: here.exists() or trainers.poll() is not None, "the step")
                assert here.exists(), (out / "trainers.log").read_text()[-3000:]
                status = cluster.status()
                pids = {member.name: member.pid for member in status.members}
                (out / "go").touch()
                os.kill(pids[status.slots[1].server], signal.SIGKILL)
            code = trainers.wait(LIMIT_S)
            assert code == 0, (out / "trainers.log").read_text()[-3000:]
            if kill_after:
                status = cluster.status()
                assert status.era >= 1 and status.slots[1].incarnation >= 1, "nothing was lost"
        finally:
            if trainers.poll() is None:
                trainers.terminate()
                trainers.wait(30)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def in_turns(way: str, *steps: int) -> list[Any]:
    return [pytest.param(way, step, marks=pytest.mark.slow) for step in steps]


# A minute each; test_loops.py has every loop in memory, test_cluster.py a real one.
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("way", "step"),
    [
        ("rates", 8),
        *in_turns("rates", 5, 12),
        *in_turns("rollback", 8, 5, 12),  # 8 is where one has just been
        *in_turns("checkpoint", 8, 5),
        *in_turns("plain", 8, 6, 13),
        *in_turns("pipeline", 6, 17),
        *in_turns("workers", 8),
        *in_turns("torchdata", 12),
        *in_turns("accumulate", 7),
        *in_turns("managed", 7, 8),  # ids wait for the next change of the map
        *in_turns("mixed", 8, 13),
        *in_turns("mixed-pipeline", 7),
    ],
)
def test_a_loop_with_a_trainer_and_a_server_lost_sees_and_learns_the_same(way: str, step: int, tmp_path: Path) -> None:
    expected = train("plain" if way == "checkpoint" else way, tmp_path / "undisturbed")
    assert all(result["first_life"] for result in expected)
    found = train(way, tmp_path / "disturbed", step)
    assert not any(result.pop("first_life") for result in found), "no trainer was started again"
    assert [result.pop("first_life") for result in expected] == [True, True]
    assert len(expected[0]["trace"]) == 21 and expected[0]["trace"] != expected[1]["trace"]
    assert found == expected
    assert [len(result["whole"]) > 0 for result in found] == [way.startswith("mixed"), False]
    assert not way.startswith("mixed") or found[0]["whole"]["sequences.embeddings.s.weight"][0] == [300, 4]
    assert bool(expected[0]["maps"]) == (way == "managed")
    for name, values in expected[0]["maps"].items():
        if name.endswith("_sorted_raw_ids"):
            assert len(set(values)) > 20 and expected[1]["maps"][name] == values
