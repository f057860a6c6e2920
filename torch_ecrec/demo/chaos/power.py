"""`torch-ecrec chaos --check-power STEPS`: would a comparison of two runs find one wrong step, late in one of them?

Trains STEPS steps rightly, and again with a fault each (`server/spoiling.py`), of which nobody is told, in step
`LATE` of them: one push of one trainer is dropped, a step is applied twice, the record that has changed least in that
step is what it was before. Each must come out as DIFFERENT in the digest, which is what chaos and the demo compare. A
model that has learned its samples by heart changes no bit any more, and whatever is compared then is equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.result import arguments_json, differences, versions, without_nan
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.files import write_whole
from torch_ecrec.server.spoiling import SAID
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import SPOILS

LATE = 0.95  # of the steps
STEPS_LEAST = 20
AT_ENDS = 50  # steps, the first and the last ones, whose losses are told
FADED = 0.1  # a loss, of a model that has learned its samples: even guesses have 0.69, and what is drawn has 0.6


def median_losses(losses: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Returns the median losses of the first and the last steps, over all trainers; None where there are none."""
    if not losses:
        return None
    first, last = (
        statistics.median([loss for step in some for loss in step]) for some in (losses[:AT_ENDS], losses[-AT_ENDS:])
    )
    return first, last


def faded(losses: Sequence[Sequence[float]]) -> list[str]:
    """Returns why equal runs with these losses prove little; an empty list if they prove what they should."""
    found = median_losses(losses)
    if found is None or found[1] >= FADED:
        return []
    return [
        f"the loss has faded, from {found[0]:.3g} in the first {AT_ENDS} steps to {found[1]:.3g} in the last: gradients"
        " are so small then that a step which is missing changes few bits, and that nothing differs says little"
    ]


def said(logs: Path) -> list[dict[str, Any]]:
    """Returns what servers have logged about the spoiled step, by slot."""
    lines = [line for log in logs.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
    found = [json.loads(line.partition(SAID)[2]) for line in lines if SAID in line]
    return sorted(found, key=lambda one: one["slot"])


def run_check(arguments: argparse.Namespace, code: CodeSpec) -> int:
    """Runs the check; returns 0 if each fault came out as DIFFERENT, 1 otherwise.

    Args:
        arguments: of the command, checked (`command.check`).
        code: of the cluster.

    Raises:
        ClusterError: a run did not come to its end.
    """
    arguments.steps, out, terminal = arguments.check_power, arguments.out, Terminal()
    late = round(LATE * arguments.steps)
    runs: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    (out / "power.json").unlink(missing_ok=True)
    with sigterm_interrupts(terminal.say):
        warm(tells=True)
        for kind in SPOILS:
            terminal.say(f"{kind} in step {late} of {arguments.steps}:")
            run = DemoRun(arguments, code, [], out / "logs" / kind, terminal)
            run.environment.update({"TORCH_ECREC_SPOIL": kind, "TORCH_ECREC_SPOIL_STEP": str(late)})
            run.execute()
            told, figures = said(run.logs), run.figures()
            if len(told) != (code.slots if kind == SPOILS[0] else 1):
                raise ClusterError(f"{kind} in step {late} was done {len(told)} times; logs: {run.logs}")
            different = differences(figures, runs[SPOILS[0]]) if runs else []
            runs[kind] = {"told": told, "differences": different, **figures}
            if kind == SPOILS[0]:
                faults += faded(figures["losses"])
                terminal.say(_changes(told, figures))
                continue
            seen = [text for text in different if text.startswith("digest")]
            faults += [] if seen else [f"{kind} in step {late} came out as EQUAL"]
            terminal.say(f"{kind}: " + (f"DIFFERENT: {'; '.join(different)}" if seen else "EQUAL: NOBODY WOULD KNOW"))
    result = {
        "versions": versions(),
        "arguments": arguments_json(arguments),
        "step": late,
        "runs": runs,
        "faults": faults,
    }
    write_whole(out / "power.json", (json.dumps(without_nan(result), indent=1, allow_nan=False) + "\n").encode())
    terminal.say(f"written: {out / 'power.json'}")
    if faults:
        terminal.say("NOT TO BE RELIED ON: " + "; ".join(faults))
    return 1 if faults else 0


def _changes(told: Sequence[dict[str, Any]], figures: dict[str, Any]) -> str:
    """Returns how many records the spoiled step changed, and the losses, as text."""
    records, changed, weights, state = (
        sum(one[name] for one in told) for name in ("records", "changed", "weights", "state")
    )
    first, last = median_losses(figures["losses"]) or (0.0, 0.0)
    return (
        f"of {records} records of the step {100 * changed / max(records, 1):.4g} % have changed,"
        f" {100 * weights / max(records, 1):.4g} % in weights and {100 * state / max(records, 1):.4g} % in state;"
        f" median loss of the first {AT_ENDS} steps {first:.3g}, of the last {last:.3g}"
    )
