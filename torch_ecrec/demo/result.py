"""The result of a demonstration: result.json, and the differences between two runs that should be equal."""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch_ecrec
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.errors import ClusterError
from torch_ecrec.web.place import Place

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "numba")


def versions() -> dict[str, str]:
    """Returns the versions of this package, of Python, and of the libraries that are installed."""
    found = {"torch_ecrec": torch_ecrec.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@contextlib.contextmanager
def beside_failure() -> Iterator[None]:
    """Keeps a result that cannot be written from taking the place of why the run failed: it is told, and no more.

    Raises:
        ClusterError: the run has not failed.
    """
    failure = sys.exception()
    try:
        yield
    except OSError as error:
        told = f"{error.strerror}" + (f": {error.filename!r}" if error.filename else "")
        if failure is None:
            raise ClusterError(f"the run has ended, and its result cannot be written: {told}") from error
        print(f"torch-ecrec: {told}", file=sys.stderr)


def differences(run: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns the differences between two runs that should be equal; none if all is equal."""
    found = []
    if run["digest"] is None or run["digest"] != other["digest"]:
        found.append(f"digest {run['digest']} against {other['digest']}")
    if len(run["losses"]) != len(other["losses"]):
        found.append(f"{len(run['losses'])} steps against {len(other['losses'])}")
    pairs = enumerate(zip(run["losses"], other["losses"], strict=False), 1)
    step = next((step for step, (mine, theirs) in pairs if mine != theirs), None)
    if step is not None:
        found.append(f"losses of step {step}: {run['losses'][step - 1]} against {other['losses'][step - 1]}")
    return found


def arguments_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns all arguments but the command's name; paths and addresses as text."""
    values = {name: value for name, value in vars(arguments).items() if name != "command"}
    return {name: str(value) if isinstance(value, (Path, Place)) else value for name, value in values.items()}


def assemble(arguments: argparse.Namespace, run: DemoRun, calm: DemoRun | None, error: str | None) -> dict[str, Any]:
    """Returns the contents of result.json; docs/contributing/demo-result.md says what they mean."""
    figures = run.figures()
    undisturbed = calm.figures() if calm is not None else None
    different = differences(figures, undisturbed) if undisturbed is not None else []
    result = {
        "versions": versions(),
        "arguments": arguments_json(arguments),
        "error": error,
        "equal": not different if undisturbed is not None else None,
        "differences": different,
        **figures,
        "undisturbed": undisturbed,
        "kills": [kill.to_json(run.record.step_times) for kill in run.record.kills],
        "checkpoints": [asdict(one) for one in run.record.checkpoints],
        "checkpoints_void": [asdict(one) for one in run.record.void],
        "went_back": [asdict(one) for one in run.record.went_back],
        "recovered_partly": [asdict(one) for one in run.record.recovered_partly],
        "trained": run.record.trained,
        "throughput": run.record.throughput(run.samples_per_step),
        "servers": run.record.servers(),
        "bytes_sent": run.record.bytes_sent(),
    }
    cleaned: dict[str, Any] = without_nan(result)
    return cleaned


def without_nan(value: Any) -> Any:
    """Returns a value with null for numbers that are not finite: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value
