"""Tables that are loaded before the first step, by real trainers: some die on the way, and nothing differs.

The oracle is the undisturbed run: of each trainer every step, the dense model, and all records, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
from cluster_trainers import ENVIRONMENT
from conftest import wait_until

from torch_ecrec.processes.children import Child
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 240.0  # only a hang reaches it
TRAINERS, STEPS = 2, 4
Deaths = Sequence[tuple[int, int]]  # in each life: which trainer, and as it begins which deed


def nothing(cluster: Supervisor) -> None:
    """Nothing else is lost."""


def lose_a_server(cluster: Supervisor) -> None:
    """One that has a slot."""
    status = cluster.status()
    pids = {member.name: member.pid for member in status.members}
    os.kill(pids[status.slots[1].server], signal.SIGKILL)


def lose_the_coordinator(cluster: Supervisor) -> None:
    """Another takes its place."""
    cluster.coordinator.kill()


def train(
    out: Path, deaths: Deaths = (), meanwhile: Callable[[Supervisor], None] = nothing, **orders: Any
) -> list[dict[str, Any]]:
    """A new cluster, and what each trainer has seen. `meanwhile` is called as a trainer has died."""
    out.mkdir()
    with Supervisor(CodeSpec(3, 2, 1), 1, logs=out / "logs", environment=ENVIRONMENT) as cluster:
        environment = {**os.environ, **ENVIRONMENT, "TORCH_ECREC_JOIN": cluster.join, "WORLD_SIZE": str(TRAINERS)}
        for life, (who, at) in enumerate([*deaths, (0, 0)]):
            children: list[Child] = []
            try:
                for rank in range(TRAINERS):
                    words = {**orders, "out": str(out), "life": life, "steps": STEPS}
                    words |= {"dies_at": at if rank == who else 0}
                    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    with (out / f"{life}-{rank}.log").open("wb") as log:
                        file = log.fileno()
                        children.append(forked.start("early_child", [json.dumps(words)], own, file, file))
                if at:
                    wait_until((out / f"died-{life}").exists, LIMIT_S, f"the end of trainer {who} in life {life}")
                    meanwhile(cluster)
                else:
                    codes = [child.wait(LIMIT_S) for child in children]
                    assert not any(codes), [log.read_text()[-3000:] for log in out.glob(f"{life}-*.log")]
            finally:
                for child in children:  # as torchrun does it
                    forked.end(child)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(TRAINERS)]


OTHERS = [
    ("whole", "before", 0, lose_a_server),
    ("streamed", "after", 2, lose_the_coordinator),
    ("sharded", "before", 1, lose_the_coordinator),
    ("streamed", "before", 0, nothing),
    ("whole", "after", 2, nothing),
]


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("way", "attach", "every", "meanwhile"),
    [("sharded", "after", 1, lose_a_server), *(pytest.param(*how, marks=pytest.mark.slow) for how in OTHERS)],
)
def test_trainers_that_die_while_they_load_and_before_the_first_step(
    way: str, attach: str, every: int, meanwhile: Callable[[Supervisor], None], tmp_path: Path
) -> None:
    """One in the middle of a load, with something else; the next one when all is loaded, as it ends the first step."""
    how = {"way": way, "attach": attach, "every": every, "init": way == "whole"}
    right = train(tmp_path / "undisturbed", **how)
    lives = [seen.pop("life") for seen in right]
    deeds = [life["deeds"] for life in lives]
    assert all(number > 5 * STEPS for number in deeds), "there is no middle"
    found = train(tmp_path / "disturbed", [(1, deeds[1] // 2), (0, deeds[0] - STEPS + 1)], meanwhile, **how)
    lives = [seen.pop("life") for seen in found]
    assert [life["first"] for life in lives] == [0, 0] and lives[0]["deeds"] == deeds[0], "it was not all done again"
    assert [len(seen["trace"]) for seen in found] == [STEPS] * TRAINERS
    assert found == right
