"""What decides the bits of a step beside its numbers: settings of torch, and ours of what travels.

    of_torch()     is kept with each snapshot, and brought back where the first step begins
    of_settings()  likewise kept; a process has them for its life, so others are refused (other slots are told)

A job that is started again with another OMP_NUM_THREADS would add up in another order, and say nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

SLOTS = "slots"
log = logging.getLogger(__name__)


def of_torch() -> dict[str, Any]:
    """Returns the settings of torch on which sums and roundings depend, by name."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "precision of matrix products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms, warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def set_of_torch(kept: Mapping[str, Any]) -> None:
    """Restores what `of_torch` returned, and logs what has been otherwise."""
    now = of_torch()
    others = [f"{name}: {kept[name]}, not {now[name]}" for name in now if kept[name] != now[name]]
    if not others:
        return
    log.warning("settings of torch are those of before the restart again, as other bits would follow: %s", others)
    torch.set_num_threads(kept["threads"])
    torch.set_default_dtype(getattr(torch, kept["default dtype"]))
    torch.set_float32_matmul_precision(kept["precision of matrix products"])
    torch.use_deterministic_algorithms(
        kept["deterministic algorithms"], warn_only=kept["deterministic algorithms, warnings only"]
    )


def of_settings(settings: Settings, code: CodeSpec) -> dict[str, str]:
    """Returns those of our settings on which bits depend, by their variables, and the slots where they decide some.

    Sums of whole bags have the same bits, whoever makes them.
    """
    in_parts = settings.pooling == "parts" and settings.wire == "float32"  # of rows that are rounded slots sum none
    found = {
        "TORCH_ECREC_WIRE": settings.wire,
        "TORCH_ECREC_EVALUATION_WIRE": settings.evaluation_wire,
        "TORCH_ECREC_POOLING": "parts" if in_parts else "whole",
    }
    return found | ({SLOTS: code.words} if in_parts else {})


def check_settings(kept: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Checks that settings are those of before a restart.

    Returns:
        What is not exact from here on: the job goes on in another cluster, on purpose; "": all is.

    Raises:
        ValueError: a setting is another one; all are named.
    """
    others = [name for name in now if name != SLOTS and kept[name] != now[name]]
    if others:
        raise ValueError(
            f"training went on with {', '.join(f'{name}={kept[name]}' for name in others)}, and this trainer has"
            f" {', '.join(now[name] for name in others)}, with which other bits would follow: start all trainers with"
            " what they had"
        )
    if kept.get(SLOTS) == now.get(SLOTS):
        return ""
    return f"{now[SLOTS]} sum bags in parts, and round otherwise than the {kept[SLOTS]} of before"
