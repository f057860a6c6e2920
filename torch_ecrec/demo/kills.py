"""Parses and checks the kills that a demonstration's command line asks for.

server:1@60         the process that hosts slot 1, when step 60 is complete at all trainers
server:1@60+7       7 ms later: in the middle of step 61
server:1@60~        when, from step 60 on, all that former kills took is rebuilt, and no server holds two slots
trainer:0@60        trainer 0 likewise; coordinator@60 the coordinator
all@60              every process of the job at once: coordinator, servers, spares and trainers

What takes more than parity repairs, `all` or more than r servers at one step, is *beyond parity*. It ends the run, as
data loss, unless that is to go back to a checkpoint; then it does not come before a checkpoint counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch_ecrec.runtime.checks import require

_KILL = re.compile(r"(?:(server|trainer):(\d+)|(coordinator|all))@(\d+)(~?)(?:\+(\d+))?")


@dataclass(frozen=True)
class KillSpec:
    """A kill that is asked for. `settled`: it waits until all that former kills took is rebuilt."""

    text: str
    role: str  # "server", "trainer", "coordinator" or "all"
    number: int  # of the slot that the server hosts, or of the trainer
    step: int
    settled: bool
    delay_ms: int


def parse_kills(texts: Sequence[str] | None, slots: int, steps: int, trainers: int = 1) -> list[KillSpec]:
    """Returns the kills by step. None stands for one kill of slot 1 in the middle, ["none"] for no kill.

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
        forms = "server:SLOT@STEP[~][+MS], trainer:RANK@..., coordinator@..., all@... or none"
        require(match is not None, f"`--kill` must be {forms}, got {text!r}")
        assert match is not None
        role, number, step = match[1] or match[3], int(match[2] or 0), int(match[4])
        most, what = (trainers - 1, "trainers") if role == "trainer" else (slots - 1, "slots")
        require(number <= most, f"`--kill {text}`: {what} are 0 to {most}, got {number}")
        require(1 <= step < steps, f"`--kill {text}`: the step must be from 1 to {steps - 1}, got {step}")
        kills.append(KillSpec(text, role, number, step, bool(match[5]), int(match[6] or 0)))
    return sorted(kills, key=lambda kill: kill.step)


def beyond_parity(kills: Collection[KillSpec], r: int) -> list[KillSpec]:
    """Returns the kills that together take more than parity repairs: all, or more than r slots at one step.

    Not seen: servers that are lost at different steps, of which the first is not rebuilt when the next one goes.

    Args:
        r: losses that the code repairs.
    """
    slots = {(kill.step, kill.number) for kill in kills if kill.role == "server" and not kill.settled}
    at_once = Counter(step for step, _ in slots)
    return [
        kill
        for kill in kills
        if kill.role == "all" or (kill.role == "server" and not kill.settled and at_once[kill.step] > r)
    ]


def check_beyond(kills: Sequence[KillSpec], r: int, beyond: str, every_steps: int) -> None:
    """Checks that what is to be killed can be recovered.

    Args:
        r: losses that the code repairs.
        beyond: what follows when more is lost: "stop"; all go back to a "checkpoint"; or "partial", what is lost does.
        every_steps: steps of training between two checkpoints; 0: they are written by time.

    Raises:
        ValueError: nothing would be left of the job, or there can be no checkpoint by then.
    """
    for kill in beyond_parity(kills, r):
        require(
            kill.role != "all" or beyond != "stop",
            f"`--kill {kill.text}` leaves nothing to go on with: add `--checkpoint DIR --checkpoint-every N --beyond"
            " checkpoint`",
        )
        require(
            beyond == "stop" or kill.step > every_steps,
            f"`--kill {kill.text}` is beyond parity, and the first checkpoint is of step {every_steps}: kill later, or"
            " make `--checkpoint-every` less",
        )
