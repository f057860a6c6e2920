"""What chaos and the demo compare finds one wrong step, late in a run: their own script, over a simulated cluster.

`torch-ecrec chaos --check-power STEPS` does the same with real processes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Scenario, SimulatedCluster, simulation
from virtual_session import VirtualSession

from examples import dlrm_criteo
from torch_ecrec.demo import criteo
from torch_ecrec.demo.chaos import power
from torch_ecrec.demo.result import differences
from torch_ecrec.processes import launch
from torch_ecrec.server.spoiling import SAID
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import SPOILS, Settings

STEPS, LATE = 400, 380
LONG, LATE_IN_LONG = 1500, 1425
CODE = CodeSpec(3, 2, 1)

pytestmark = pytest.mark.usefixtures("process_group")


class Trained:
    """A run of the script: its figures, and what servers have said of the step that was spoiled."""

    def __init__(self, figures: dict[str, Any], told: list[dict[str, Any]]) -> None:
        self.figures, self.told = figures, told

    @property
    def losses(self) -> list[list[float]]:
        """Of each step, that of each trainer."""
        return [[loss] for loss in self.figures["losses"]]

    def share(self, what: str) -> float:
        """Of the records of the step, that have changed."""
        return sum(one[what] for one in self.told) / sum(one["records"] for one in self.told)


Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So few lines that each comes 600 times in a long run where they come again."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    criteo.write_synthetic(path, rows=100, seed=3)
    return path


@pytest.fixture
def train(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Train]:
    """`train(kind, *words, long=False)`: the script, with one step of training spoiled."""
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)

    def run(kind: str, *words: str, long: bool = False) -> Trained:
        steps, late = (LONG, LATE_IN_LONG) if long else (STEPS, LATE)

        def connect(job: JobSpec, *_: Any, **_more: Any) -> VirtualSession:
            cluster = SimulatedCluster(Scenario(tables=job.tables, code=CODE, trainers=1, spares=0, late=0.0))
            while not cluster.clients:
                assert cluster.network.clock.advance()
            session = VirtualSession(next(iter(cluster.clients.values())), lambda message: None, lambda: None)
            session.cluster = cluster
            return session

        def settings(**values: Any) -> Settings:
            return Settings(**values, spoil=kind, spoil_step=late)

        caplog.clear()
        report = tmp_path / f"{kind}.json"
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(simulation, "Settings", settings)
            patch.setattr(launch, "connect", connect)
            script = ["dlrm_criteo.py", "--data", str(rows), "--steps", str(steps), "--batch-size", "32"]
            patch.setattr(sys, "argv", [*script, "--rows-per-table", "500", "--report", str(report), *words])
            dlrm_criteo.main()
        figures = json.loads(report.with_suffix(".0.json").read_text())
        said = [record.getMessage() for record in caplog.records]
        return Trained(figures, [json.loads(text.partition(SAID)[2]) for text in said if SAID in text])

    yield run


def compared(one: Trained, other: Trained) -> list[str]:
    """As chaos and the demo do it."""
    return differences(*({"digest": run.figures["digest"], "losses": run.losses} for run in (one, other)))


def test_one_wrong_step_late_in_a_run_is_found(train: Train) -> None:
    right = train("look", "--redraw")
    assert len(right.told) == CODE.slots and right.share("changed") == right.share("weights") == 1.0
    assert right.share("state") > 0.99
    first, last = power.median_losses(right.losses) or (0.0, 0.0)
    assert first > 0.6 and last > 0.5 and power.faded(right.losses) == []
    for kind in SPOILS[1:]:
        wrong = train(kind, "--redraw")
        (told,) = wrong.told
        assert (told["slot"], told["kind"], told["records"] > 0) == (0, kind, kind != "drop"), "of the only trainer"
        different = compared(wrong, right)
        assert different and different[0].startswith("digest"), f"{kind} came out as EQUAL"
        assert wrong.figures["losses"][:LATE] == right.figures["losses"][:LATE], (
            "it was late, and nothing else is wrong"
        )


@pytest.mark.slow
def test_where_lines_come_again_a_record_that_lost_a_step_is_the_same_and_the_loss_says_so(train: Train) -> None:
    """Why they do not: all that was known by heart is equal to anything."""
    right = train("look", long=True)
    assert right.share("changed") < 0.95 and right.share("state") < 0.01
    assert "the loss has faded" in power.faded(right.losses)[0]
    assert compared(train("back", long=True), right) == [], "nobody would know"
