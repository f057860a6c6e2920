"""What the alternative costs: a restart of plain TorchRec from a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_ecrec.bench.recovery_figures import rows_per_table
from torch_ecrec.bench.recovery_processes import START_LIMIT_S, START_LIMIT_S_PER_GB, CaseWatch, Stopped, Workers

LEAVE_BYTES = 1 << 30  # of the disk, when a checkpoint is written


def from_checkpoint(gigabytes: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a restart of plain TorchRec from a checkpoint takes; `skipped` says why if it was not measured.

    Raises:
        Stopped: the trainers failed, or what was loaded is not what was saved.
    """
    result: dict[str, Any] = {"gigabytes": gigabytes, "skipped": None}
    free, needed = shutil.disk_usage(arguments.out).free, int(gigabytes * 1.05e9) + LEAVE_BYTES
    if free < needed:
        result["skipped"] = f"{free / 1e9:.1f} GB free on the disk of {arguments.out}, {needed / 1e9:.1f} GB needed"
        return result
    folder = arguments.out / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    log = arguments.out / "logs" / f"checkpoint-{gigabytes:g}-GB.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    rows, limit_s = rows_per_table(gigabytes), START_LIMIT_S + START_LIMIT_S_PER_GB * gigabytes
    trainers, name = arguments.trainers, f"{gigabytes:g} GB, checkpoint"

    @contextlib.contextmanager
    def running(option: str, seed: int) -> Iterator[CaseWatch]:
        watch = CaseWatch(trainers, 0, name, log)
        with Workers(arguments, "torchrec", rows, log, watch.on_line, {}, [option, str(folder.resolve())], seed):
            yield watch

    def wait_for(watch: CaseWatch, fact: str) -> list[float]:
        watch.wait(lambda: all(fact in facts for facts in watch.facts), limit_s, f"'{fact}' from all trainers")
        return [facts[fact] for facts in watch.facts]

    try:
        with running("--save", arguments.seed) as watch:
            result["save_s"] = max(wait_for(watch, "saved_s"))
            saved = wait_for(watch, "sample")
        result["checkpoint_bytes"] = forget_pages(folder)
        begin_s = time.time()
        with running("--load", arguments.seed + 1) as watch:
            ready_s = max(wait_for(watch, "ready"))
            result["start_s"] = ready_s - begin_s
            result["load_s"] = max(wait_for(watch, "loaded_s"))
            loaded = wait_for(watch, "sample")
            if loaded != saved:
                raise Stopped(f"{name}: what was loaded is not what was saved: {loaded}, {saved}")
            watch.wait(lambda: len(watch.steps.times) > 1, limit_s, "the first steps")
        result["redo_s"] = arguments.checkpoint_interval_s / 2
        result["until_training_s"] = result["start_s"] + result["load_s"]
        result["until_caught_up_s"] = result["until_training_s"] + result["redo_s"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def forget_pages(folder: Path) -> int:
    """Takes files out of the page cache, so that reading them reads the disk; returns their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # Linux
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total
