"""The demonstration: trains a DLRM on a cluster of processes, kills servers, and compares with the undisturbed run.

    run_demo(arguments)     `torch-ecrec demo`; arguments as in `cli/demo.py`, kills as in `kills.py`

Everything is checked before the first process starts. Whatever ends a run, Ctrl-C included, ends all its processes.
Writes DIR/result.json (docs/contributing/demo-result.md), DIR/recovery.png and DIR/logs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch_ecrec.demo import criteo, report
from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.kills import KillSpec, check_beyond, parse_kills
from torch_ecrec.demo.result import assemble, beside_failure
from torch_ecrec.demo.terminal import Terminal, warnings_only
from torch_ecrec.demo.training import DemoRun, require_device
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.files import write_whole
from torch_ecrec.spec.job import SLOTS_MOST, TRAINERS_MOST, CodeSpec, OptimizerSpec

NUMBER_MOST = (1 << 31) - 1  # of steps, and of what is drawn for each: more than any machine has room for
SEED_MOST = (1 << 63) - 1  # that of torch's generators


def check(arguments: argparse.Namespace) -> tuple[CodeSpec, list[KillSpec]]:
    """Checks all arguments before anything starts. Raises ValueError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)
    require_int("spares", arguments.spares, 0, SLOTS_MOST)
    require_int("steps", arguments.steps, 1, NUMBER_MOST)
    require_int("batch-size", arguments.batch_size, 1, NUMBER_MOST)
    require_int("ids", arguments.ids, 1, NUMBER_MOST)
    require_int("trainers", arguments.trainers, 1, TRAINERS_MOST)
    require_int("seed", arguments.seed, 0, SEED_MOST)
    require_int("snapshot-every", arguments.snapshot_every, 1, NUMBER_MOST)
    require_int("max-restarts", arguments.max_restarts, 0, NUMBER_MOST)
    OptimizerSpec(arguments.optimizer)
    require_device(arguments.device)
    kills = parse_kills(arguments.kill, code.slots, arguments.steps, arguments.trainers)
    every_steps, _ = arguments.checkpoint_every or (0, 0.0)
    check_beyond(kills, code.parities, arguments.beyond, every_steps)
    require(every_steps < arguments.steps, f"`--checkpoint-every {every_steps}`: there are {arguments.steps} steps")
    require(
        not arguments.checkpoint_bits,
        "`--checkpoint-bits`: weights of fewer bits are others after a restore, and the demo compares bit for bit",
    )
    if arguments.data is not None:
        lines = len(criteo.read(arguments.data, rows_per_table=1))
        require(lines >= 5, f"{arguments.data}: {lines} lines are too few: a fifth of them is held out")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`--out {arguments.out}` cannot be made: {error.strerror}") from error
    return code, kills


@warnings_only()
def run_demo(
    arguments: argparse.Namespace,
    checkpoints: Sequence[str] = (),
    servers: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs the demonstration; returns the exit code.

    It is 0 only if all kills were made and nothing differs, except for what `--beyond partial` may lose.

    Args:
        arguments: of the command.
        checkpoints: what a coordinator is told of the checkpoints that it is to write; the undisturbed run has none.
        servers: more of their environment; the undisturbed run has none of it.

    Raises:
        ValueError: bad arguments or a bad data file; nothing was started.
        DataLoss: more was lost than the code repairs.
        ClusterError: a run did not come to its end. In either case result.json says as much in `error`.
    """
    code, kills = check(arguments)
    out, terminal = arguments.out, Terminal()
    for name in ("result.json", "recovery.png"):
        (out / name).unlink(missing_ok=True)
    protection = f"(k, r) = ({code.k}, {code.r})" if code.parities else "no protection"
    bags = f", {arguments.ids} ids in a bag" if arguments.ids > 1 else ""
    terminal.say(
        f"DLRM on {arguments.data or 'made-up rows'}: {arguments.steps} steps of {arguments.trainers} x"
        f" {arguments.batch_size} samples{bags}, {arguments.optimizer}; {protection}, {code.slots} servers"
        f" and {arguments.spares} spares; kills: {', '.join(kill.text for kill in kills) or 'none'}"
    )
    run = DemoRun(arguments, code, kills, out / "logs" / "run", terminal, checkpoints, servers, arguments.http)
    calm: DemoRun | None = None
    error: str | None = "interrupted"
    with sigterm_interrupts(terminal.say):
        try:
            warm(tells=True)
            run.execute()
            if arguments.compare:
                terminal.say("\nthe same training, undisturbed:")
                calm = DemoRun(arguments, code, [], out / "logs" / "undisturbed", terminal, http=run.http)
                calm.execute()
            faults = [f"a kill did not fire: {text}" for text in run.not_fired()]
            faults += [text for one in (run, calm) if one is not None for text in one.record.unexpected]
            error = "; ".join(faults) or None
        except ClusterError as failure:
            error = str(failure)
            raise
        finally:
            done = calm if calm is not None and calm.reports else None
            result = assemble(arguments, run, done, error)
            with beside_failure():
                write_whole(out / "result.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
            if not (run.reports and (calm is None or calm.reports)):  # no summary will follow
                for entry in result["kills"]:
                    terminal.say("\n".join(["", *report.format_kill(entry)]))
    terminal.say("\n" + report.format_summary(result))
    terminal.say("written: " + ", ".join(str(path) for path in [out / "result.json", *_picture(result, out)]))
    if error is not None:
        print(f"torch-ecrec: {error}", file=sys.stderr)
    as_asked = result["equal"] is not False or bool(result["recovered_partly"])  # the latter is told as NOT EXACT
    return 0 if error is None and as_asked else 1


def _picture(result: dict[str, Any], out: Path) -> list[Path]:
    try:
        from torch_ecrec.demo.plot import draw
        from torch_ecrec.demo.plot_steps import draw_steps
    except ImportError as error:
        print(f"no picture: {error} (pip install matplotlib)", file=sys.stderr)
        return []
    (draw_steps if result["went_back"] else draw)(result, out / "recovery.png")
    return [out / "recovery.png"]
