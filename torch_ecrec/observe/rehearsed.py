"""Keeps marks of the scripts that were rehearsed here, so that `attach` need not warn of them.

    rehearsal/equal-3f0c9a51d2e84b76   an empty file: a rehearsal of the script of this digest came to EQUAL

The digest is of the file that Python runs, and of nothing else. A script that was changed has to be rehearsed again;
other arguments, or a change in what the script imports, are not noticed.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

DIGITS = 16


def script_digest() -> str:
    """Returns a digest of the script file of this process; "" if there is none (a notebook, `python -c`)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:DIGITS]


def mark(folder: Path, digest: str) -> None:
    """Marks the script of this digest as rehearsed with the result EQUAL. "": marks none."""
    if digest:
        (folder / f"equal-{digest}").touch()


def is_marked(folder: Path, digest: str) -> bool:
    """Returns whether the script of this digest was marked."""
    return bool(digest) and (folder / f"equal-{digest}").exists()
