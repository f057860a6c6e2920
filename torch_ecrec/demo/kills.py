"""Kills that a demonstration is asked for, as words of its command line.

server:1@60         the process that hosts slot 1, when step 60 is complete at all trainers
server:1@60+7       7 ms later: in the middle of step 61
server:1@60~        when, from step 60 on, all that former kills took is rebuilt, and no server holds two slots
trainer:0@60        trainer 0 likewise; coordinator@60 the coordinator
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ecrec.runtime.checks import require

_KILL = re.compile(r"(?:(server|trainer):(\d+)|coordinator)@(\d+)(~?)(?:\+(\d+))?")


@dataclass(frozen=True)
class KillSpec:
    """A kill that is asked for. `settled`: not before all that former ones took is rebuilt."""

    text: str
    role: str  # "server", "trainer" or "coordinator"
    number: int  # of the slot that the server hosts, or of the trainer
    step: int
    settled: bool
    delay_ms: int


def parse_kills(texts: Sequence[str] | None, slots: int, steps: int, trainers: int = 1) -> list[KillSpec]:
    """The kills asked for, by step; None stands for one of slot 1 in the middle, ["none"] for none.

    Raises:
        ValueError: one is not of the form, or names a slot, a trainer or a step that there is not.
    """
    if texts is None:
        texts = [f"server:{min(1, slots - 1)}@{steps // 2}"] if steps > 1 else []
    if list(texts) == ["none"]:
        return []
    kills = []
    for text in texts:
        match = _KILL.fullmatch(text)
        forms = "server:SLOT@STEP[~][+MS], trainer:RANK@..., coordinator@... or none"
        require(match is not None, f"`--kill` must be {forms}, got {text!r}")
        assert match is not None
        role, number, step = match[1] or "coordinator", int(match[2] or 0), int(match[3])
        most, what = (trainers - 1, "trainers") if role == "trainer" else (slots - 1, "slots")
        require(number <= most, f"`--kill {text}`: {what} are 0 to {most}, got {number}")
        require(1 <= step < steps, f"`--kill {text}`: the step must be from 1 to {steps - 1}, got {step}")
        kills.append(KillSpec(text, role, number, step, bool(match[4]), int(match[5] or 0)))
    return sorted(kills, key=lambda kill: kill.step)
