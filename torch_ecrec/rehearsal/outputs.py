"""What two runs of a script print, and which files they write: a pure comparison, and the reading of a folder.

A trainer that is restarted prints and saves what it printed and saved undisturbed: each line of the undisturbed run by
some life, and none that is like one of those but for its numbers. A line that has no like among them (that it goes on
after step 12, say) is no difference. Where two undisturbed runs differ, too (speeds, times of day), a line or a file
says nothing, and is named as not compared; lines are alike there that differ in numbers only.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NUMBER = re.compile(r"[-+]?\b\d[\w.:+-]*|\b[0-9a-f]{6,}\b")
SKIPPED = ("__pycache__", "node_modules")  # folders; and those whose name begins with a dot
SHOWN = 160  # characters of a line

Stamp = tuple[int, int, int]  # when a file was written, its size, its number


@dataclass(frozen=True)
class Output:
    """The lines that one run has printed, and the files that it has written.

    Attributes:
        printed: for each trainer and each of its lives, the lines on its standard output.
        files: what was written below the folder that the script was started in: path -> hash.
    """

    printed: Mapping[int, Sequence[Sequence[str]]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """The number of lines printed."""
        return sum(len(lines) for lives in self.printed.values() for lines in lives)


@dataclass(frozen=True)
class Odd:
    """A difference. `text`: in words. `like`: the same for differences that two undisturbed runs show as well."""

    like: str
    text: str


def shape_of(line: str) -> str:
    """Returns a line with its numbers replaced by `#`."""
    return NUMBER.sub("#", line).strip()


def odds(calm: Output, other: Output) -> list[Odd]:
    """Returns how another run's output differs from that of the undisturbed one."""
    found = [odd for trainer in calm.printed for odd in _printed(trainer, calm, other)]
    for name in sorted({*calm.files, *other.files}):
        mine, theirs = calm.files.get(name), other.files.get(name)
        if mine != theirs:
            what = "is not written" if theirs is None else "is written only" if mine is None else "has other bytes"
            found.append(Odd(f"the file {name}", f"the file {name} {what}"))
    return found


def _printed(trainer: int, calm: Output, other: Output) -> Iterator[Odd]:
    expected = [line for lines in calm.printed[trainer] for line in lines]
    printed = [line for lines in other.printed.get(trainer, ()) for line in lines]
    shapes = {shape_of(line) for line in expected}
    known, seen = set(expected), set(printed)
    wrong: dict[str, str] = {}  # like those that are expected
    for line in printed:
        if line not in known and shape_of(line) in shapes:
            wrong.setdefault(shape_of(line), line)
    for line in expected:
        if line not in seen:
            shape = shape_of(line)
            instead = f"prints {_shown(wrong.pop(shape))}" if shape in wrong else "does not print it"
            yield Odd(_like(shape), f"trainer {trainer} prints {_shown(line)} undisturbed, and {instead}")
    for shape, line in wrong.items():
        yield Odd(_like(shape), f"trainer {trainer} prints {_shown(line)}, which it does not undisturbed")


def _like(shape: str) -> str:
    return f"lines like {_shown(shape)}"


def _shown(line: str) -> str:
    return repr(line if len(line) <= SHOWN else line[:SHOWN] + "...")


def told(some: Collection[str], most: int = 5) -> str:
    """Returns the first of these, each once, and how many more there are, as text."""
    names = list(dict.fromkeys(some))
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


# looking ------------------------------------------------------------------------------------------


def stamps(folder: Path, without: Path) -> dict[str, Stamp]:
    """Returns every file below a folder, except hidden folders and `without`."""
    found = {}
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and name[0] != "." and Path(at, name) != without]
        for name in names:
            path = Path(at, name)
            try:
                seen = path.lstat()
            except FileNotFoundError:  # the file was temporary and is gone
                continue
            found[str(path.relative_to(folder))] = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
    return found


def written(folder: Path, without: Path, before: Mapping[str, Stamp]) -> dict[str, str]:
    """Returns the files that were written since `stamps` were taken: path -> hash."""
    now = stamps(folder, without)
    return {name: _hash(folder / name) for name, stamp in sorted(now.items()) if before.get(name) != stamp}


def _hash(path: Path) -> str:
    if not path.is_file():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def printed(logs: Path) -> dict[int, list[list[str]]]:
    """Returns the whole lines that each trainer printed in each of its starts. `logs` are torchrun's."""
    found: dict[int, list[list[str]]] = {}
    paths = logs.glob("*/attempt_*/*/stdout.log")
    for path in sorted(paths, key=lambda path: int(path.parent.parent.name.removeprefix("attempt_"))):
        lines = path.read_text(errors="replace").rpartition("\n")[0]
        found.setdefault(int(path.parent.name), []).append([line.rstrip() for line in lines.splitlines()])
    return dict(sorted(found.items()))
