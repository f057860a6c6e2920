"""What `torch-ecrec doctor` has found: findings, and all of them together, as text and as JSON.

A *finding* is of one check: OK; WARN, it runs, and something is not as it should be; ERROR, it does not run so. A
*diagnosis* is of one call of the command, and as bad as its worst finding.

    diagnosis_of([Finding("kernels", "WARN", "not compiled", remedy="torch-ecrec warm")], 1.2).level     # "WARN"
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

import torch_ecrec
from torch_ecrec.observe.verdict import EXIT_CODES, Level
from torch_ecrec.processes.footprint import host_name

NAME_WIDTH, WIDTH = 16, 120


class Finding(Struct, frozen=True, omit_defaults=True):
    """Tells what one check has found, and how to mend it.

    Attributes:
        check: its name; a check may have several findings.
        level: how bad it is.
        found: what is there.
        wanted: what should be; "": what is there is as it should be.
        remedy: the command or the step that mends it; "": there is nothing to mend.
        figures: what was measured, in seconds, bytes and counts as the names say.
    """

    check: str
    level: Level
    found: str
    wanted: str = ""
    remedy: str = ""
    figures: dict[str, float] = {}


class Diagnosis(Struct, frozen=True, kw_only=True, tag_field="type", tag="diagnosis"):
    """All findings of one call. `--json` prints it as it is.

    Attributes:
        version: of the package.
        host: the name of this machine. `python`: the interpreter that was examined.
        level: of the worst finding.
        findings: in the order of the checks.
        took_s: how long all of it took.
    """

    version: str
    host: str
    python: str
    level: Level
    findings: list[Finding]
    took_s: float


def worst(findings: Sequence[Finding]) -> Level:
    """Returns the level of the worst finding; OK if there is none."""
    return max((one.level for one in findings), key=lambda level: EXIT_CODES[level], default="OK")


def diagnosis_of(findings: Sequence[Finding], took_s: float) -> Diagnosis:
    """Puts the findings of all checks together, as one diagnosis of this host."""
    return Diagnosis(
        version=torch_ecrec.__version__,
        host=host_name(),
        python=sys.executable,
        level=worst(findings),
        findings=list(findings),
        took_s=round(took_s, 3),
    )


def json_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns the diagnosis as an object of JSON."""
    found: dict[str, Any] = msgspec.to_builtins(diagnosis)
    return found


def of_json(said: object) -> Diagnosis:
    """Reads what `json_of` has given. Raises ValueError if it is no diagnosis; what another version adds is ignored."""
    return msgspec.convert(said, Diagnosis)


def verdict(diagnosis: Diagnosis) -> str:
    """Returns the first line of the text: the level, and which checks it comes from."""
    checks = {
        level: list(dict.fromkeys(one.check for one in diagnosis.findings if one.level == level))
        for level in EXIT_CODES
    }
    if diagnosis.level == "ERROR":
        more = f"; also look at: {', '.join(checks['WARN'])}" if checks["WARN"] else ""
        return f"ERROR: torch-ecrec cannot run so; to be mended: {', '.join(checks['ERROR'])}{more}"
    if diagnosis.level == "WARN":
        return f"WARN: torch-ecrec runs here; to be looked at: {', '.join(checks['WARN'])}"
    return "OK: torch-ecrec runs here"


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as a table for people: a line for what is well, and below what is not, how to mend it."""
    lines = [verdict(diagnosis), ""]
    for one in diagnosis.findings:
        lines += _wrapped(f"{one.level:5}  {one.check:{NAME_WIDTH}}", one.found)
        for name, text in (("wanted", one.wanted), ("do", one.remedy)):
            if text and one.level != "OK":
                lines += _wrapped(f"{'':7}{'':{NAME_WIDTH}}{name:>6}: ", text)
    about = f"torch-ecrec {diagnosis.version}, {diagnosis.python}, host {diagnosis.host}; took {diagnosis.took_s:.1f} s"
    return "\n".join([*lines, "", about])


def _wrapped(head: str, text: str) -> list[str]:
    """Returns lines of `text` behind `head`, none longer than `WIDTH`. Commands and URLs are not cut."""
    if not head.endswith(" "):
        head += " "
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def duration(seconds: float) -> str:
    """Formats a short time for people: 0.00042 -> "0.42 ms"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
