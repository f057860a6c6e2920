"""Which scripts were rehearsed here, so that `attach` need not say that this one was not.

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
    """Of the script that this process runs, as it is on disk; "" where there is no file (a notebook, `python -c`)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:DIGITS]


def mark(folder: Path, digest: str) -> None:
    """Notes that a rehearsal of the script of this digest came to EQUAL; "": of none."""
    if digest:
        (folder / f"equal-{digest}").touch()


def is_marked(folder: Path, digest: str) -> bool:
    """Whether `mark` was called for it."""
    return bool(digest) and (folder / f"equal-{digest}").exists()
