"""Bits that flip in the memory of real servers: found, named, repaired, and no bit of the run differs."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import test_cluster
from conftest import wait_until
from test_cluster import LIMIT_S, STEPS, Cluster, Status, check, cluster

from torch_ecrec.spec.job import CodeSpec

undisturbed = test_cluster.undisturbed

FLIPPED = {"TORCH_ECREC_FLIP_ON_SIGNAL": "1", "TORCH_ECREC_RECORD_CHECKS": "use"}
FLIP = re.compile(r"a bit is flipped: slot (\d+), (\w+), table (\w+), row (\d+), member (\d+)")
FOUND = re.compile(
    r"slot (\d+), step \d+: damaged: 1 \((\w+)\), first member (\d+) of the stripe of row (\d+) of table (\w+)"
)


def mended(status: Status) -> int:
    return sum(slot.mended for m in status.members if m.alive for slot in (m.report.slots or ()))


def flip(running: Cluster, slot: int, parity: bool) -> None:
    status = running.supervisor.status()
    (pid,) = [m.pid for m in status.members if m.name == status.slots[slot].server]
    os.kill(pid, signal.SIGUSR2 if parity else signal.SIGUSR1)


def said(logs: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """What was flipped, and what was found: slot, what it is, table, row, member."""
    text = "".join(log.read_text(errors="replace") for log in sorted(logs.glob("*.log")))
    found = [(slot, what, table, row, member) for slot, what, member, row, table in FOUND.findall(text)]
    return sorted(FLIP.findall(text)), sorted(found)


def test_flips_are_found_named_and_repaired(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    with cluster(tmp_path, CodeSpec(3, 2, 1), environment=FLIPPED, steps=STEPS, hold=(10, 40, 70)) as running:
        trainer, flips = running.children[0], 0
        for step in (10, 40, 70):
            assert trainer.expect("held") == f"step {step}"
            for slot in range(3):
                for parity in (False, True):
                    flip(running, slot, parity)
                    flips += 1
                    running.wait_for(f"flip {flips} is repaired", lambda status, flips=flips: mended(status) == flips)
            trainer.tell("go")
        results = [child.result() for child in running.children]
        status = running.supervisor.status()
        assert not any(place.incarnation for place in status.slots), "nobody was lost for it"
        check(results, undisturbed, parities=1)
        wait_until(lambda: len(said(tmp_path)[1]) == flips, LIMIT_S, "logs say what was found")
        flipped, found = said(tmp_path)
        assert flipped == found
