"""`torch-ecrec status`: asks a cluster's coordinator whether all is well, and what there is.

Exit codes: 0, all is well; 1, somebody should look; 2, training does not go on, and will not by itself, or the command
line cannot be; 4, nobody answers. `--json` has the verdict, for programs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any

from torch_ecrec.cli.arguments import add_join, asks, told_to_wait
from torch_ecrec.cli.output import drop_rest
from torch_ecrec.errors import ClusterUnavailable

HELP = "say whether all is well, and what to do if not: exit code 0 OK, 1 WARN, 2 ERROR, 4 no answer"
WATCH_S, LEAST_S, MOST_S = 2.0, 0.1, 1e9  # no clock of the system waits for much longer than the last
WATCH_ASKED_S = 3.0  # an older answer would look like one of now
ASKED_S = 10.0  # `transport/whereabouts.py:STATUS_S`, which takes a while to load
CLEAR = "\x1b[H\x1b[2J"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_S <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"a number of seconds is from {LEAST_S:g} to {MOST_S:g}, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_join(parser)
    parser.add_argument("--tables", action="store_true", help="show where each table lies, however many there are")
    parser.add_argument("--json", action="store_true", help="print verdict and status as JSON (docs/watching.md)")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        help=f"repeat until Ctrl-C, every SECONDS ({WATCH_S:g} by default)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the status; again and again if it is watched, also while nobody answers."""
    settings, join = asks(arguments)
    if arguments.watch is None:
        with told_to_wait(join, min(ASKED_S, settings.give_up_s)):
            text, code = _ask(join, settings.give_up_s, arguments)
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has read enough: the verdict is the same
            drop_rest()
        return code
    screen = sys.stdout.isatty() and not arguments.json
    while True:
        try:
            text, _ = _ask(join, min(WATCH_ASKED_S, settings.give_up_s), arguments)
        except ClusterUnavailable as error:
            text = json.dumps(_nobody(error)) if arguments.json else f"ERROR: {error}"
        if not arguments.json:
            text = f"{time.strftime('%H:%M:%S')}, every {arguments.watch:g} s, Ctrl-C ends it\n{text}"
        print(f"{CLEAR}{_that_fits(text)}" if screen else text, flush=True)
        time.sleep(arguments.watch)


def _that_fits(text: str) -> str:
    """As much as a terminal shows: the verdict is at the top."""
    size = shutil.get_terminal_size()
    lines = [line if len(line) <= size.columns else f"{line[: size.columns - 1]}…" for line in text.splitlines()]
    room = max(size.lines - 1, 1)
    return "\n".join(lines if len(lines) <= room else [*lines[: room - 1], "…"])


def _nobody(error: ClusterUnavailable) -> dict[str, Any]:
    """Returns a verdict of its own in place of a status, for scripts that read verdicts, where no coordinator
    answers."""
    from torch_ecrec.observe.verdict import SCHEMA

    says = {"level": "ERROR", "says": str(error), "findings": [], "notes": [], "exit_code": error.exit_code}
    return {"schema": SCHEMA, "verdict": says, "error": str(error)}


def _ask(join: str, limit_s: float, arguments: argparse.Namespace) -> tuple[str, int]:
    """Returns what is printed, and the exit code."""
    from torch_ecrec.observe.text import format_status
    from torch_ecrec.observe.verdict import json_of, verdict_of
    from torch_ecrec.transport.whereabouts import status_of

    answer = status_of(join, limit_s)
    verdict = verdict_of(answer, join)
    if arguments.json:
        return json.dumps(json_of(answer, join), indent=None if arguments.watch else 2), verdict.exit_code
    return format_status(answer, arguments.tables, join), verdict.exit_code
