"""A mode of an experiment in a cluster of real processes: chosen by the environment, alike everywhere, and said."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_child import Orders
from cluster_trainers import ENVIRONMENT, Child
from conftest import ROOT
from test_cluster import Cluster

from torch_ecrec.observe.text import format_status
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.protocol.status import json_of
from torch_ecrec.spec.job import CodeSpec

MODE, RANGES = "TORCH_ECREC_EXPERIMENT_MODE", "TORCH_ECREC_EXPERIMENT_RANGES"
IN_MODE = {MODE: "minusNNRep-minus2PC", RANGES: "4"}
STEPS, KILL_AT = 40, 15


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_ecrec", *words],
        env={**os.environ, **ENVIRONMENT, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_cluster_in_a_mode_says_so_refuses_others_and_trains_on_after_a_kill(tmp_path: Path) -> None:
    with Supervisor(CodeSpec(3, 2, 1), spares=1, logs=tmp_path, environment={**ENVIRONMENT, **IN_MODE}) as supervisor:
        refused = command("serve", "--join", supervisor.join)
        assert refused.returncode != 0
        assert (
            f"{MODE} is 'minusNNRep-minus2PC' in this cluster, and not set in the process that joins" in refused.stderr
        )

        first = Orders(supervisor.join, trainers=2, steps=STEPS, hold=(KILL_AT,))
        others = dataclasses.replace(first, trainer=1, hold=())
        children = [Child(orders, tmp_path, IN_MODE) for orders in (first, others)]
        try:
            running = Cluster(supervisor, children)
            assert children[0].expect("held") == f"step {KILL_AT}"
            status = supervisor.status()
            assert json_of(status)["experiment"]["mode"] == IN_MODE[MODE]
            assert json_of(status)["experiment"]["ranges"] == 4
            said = "WARN: EXPERIMENT minusNNRep-minus2PC, ranges=4: a step is acknowledged before"
            (line,) = (line for line in format_status(status).splitlines() if line.startswith(said))
            shown = command("status", "--join", supervisor.join)  # whoever asks is no member
            assert line in shown.stdout, shown

            pids = running.kill(1)
            running.wait_until_replaced(pids, 1)
            children[0].tell("go")
            for child in children:
                child.result()
            status = running.wait_for(
                "slot 1 is rebuilt, and a trainer has said what that may mean",
                lambda s: s.healthy and any("acknowledged steps may be lost" in one.what for one in s.inexact),
            )
            assert status.fatal is None and status.step == STEPS
        finally:
            for child in children:
                child.end()
    for name in ("coordinator.log", "server-0.log"):
        said = (tmp_path / name).read_text()
        assert re.search(r"WARNING.*EXPERIMENT TORCH_ECREC_EXPERIMENT_MODE=minusNNRep-minus2PC", said), said[-2000:]


@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        ({MODE: "minus2pc"}, (), "got 'minus2pc'; did you mean minus2PC?"),
        ({"TORCH_ECREC_EXPERIMENT_MOD": "minus2PC"}, (), f"did you mean {MODE}?"),
        ({RANGES: "-1"}, (), "`experiment_ranges` must be at least 0, got -1"),
        ({MODE: "minus2PC"}, ("--protection", "none"), "cannot go with --protection none"),
        (
            {MODE: "minusNNRep"},
            ("--checkpoint", "file:///tmp/nowhere", "--checkpoint-every", "10"),
            "sends no dense snapshots to the servers, which write them into checkpoints",
        ),
    ],
    ids=["misspelt mode", "misspelt setting", "negative", "no parity", "checkpoints"],
)
def test_what_is_no_mode_is_refused_before_anything_starts(
    environment: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    refused = command("up", *words, **environment)
    assert refused.returncode != 0 and said in refused.stderr, refused
