"""A folder of results: a file for each cell, so that a run that was interrupted goes on where it was.

DIR/run.json                       what is run: the experiments, factor, data, commit
DIR/cells/EXPERIMENT/CELL.json     figures of a cell, or why it failed
DIR/logs                           of the processes of cells that failed
DIR/*.png                          the figures (`figures.py`)
DIR/lock                           held by the one process that runs cells
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import torch_ecrec
from torch_ecrec.bench import record
from torch_ecrec.experiments.catalogue import Spec
from torch_ecrec.experiments.cells import Cell, Group, groups
from torch_ecrec.experiments.scale import Scale
from torch_ecrec.runtime.files import write_whole
from torch_ecrec.spec.settings import Settings

HEADER = ("processor", "cores", "memory_gib", "commit", "date", "command")  # of it, what a report shows

NEEDED = {  # figures that every cell of a kind has
    "undisturbed": {"samples_per_s", "blocks"},
    "kill": {"recovered_s", "first_step_s", "share", "before_samples_per_s", "after_samples_per_s", "progress"},
    "accuracy": {"auc", "log_loss", "lost"},
    "emulated": {"overhead", "saves", "down", "again"},
}


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder is the result of.

    Attributes:
        name: as it was asked for: an experiment, "all", or "smoke".
        factor: of `scale.py`.
        data: a file of Criteo rows, as it was named; None: made-up ones.
        header: machine, versions, commit, date and command.
        specs: the experiments.
        settings: of all processes, that are not the default ones: variables of the environment that it was begun in.
        code: a digest of this package's sources; "": it was begun when none was made.
        rows: a digest of the file's content; "": likewise, or there is no file.
    """

    name: str
    factor: int
    data: str | None
    header: dict[str, Any]
    specs: list[Spec]
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    code: str = ""
    rows: str = ""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets no other process begin a run in a folder, or run its cells, within the block. Makes the folder.

    A process that ends lets go, however it ends.

    Raises:
        ValueError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process runs the cells of {folder}: wait for its end, or name another folder"
            ) from None
        yield


@dataclass(frozen=True)
class Results:
    """A folder with results.

    Args:
        folder: where.
        run: of what.
    """

    folder: Path
    run: Run

    @staticmethod
    def begin(folder: Path, name: str, factor: int, data: str | None, specs: list[Spec]) -> Results:
        """Makes the folder of a new run.

        Raises:
            ValueError: there is another run, or what is left of one; or settings of this environment are wrong.
        """
        path = folder / "run.json"
        if path.exists():
            raise ValueError(
                f"{folder} has the results of another run: go on with `torch-ecrec experiments resume --out {folder}`,"
                " or name another folder with --out"
            )
        if (folder / "cells").exists():
            raise ValueError(
                f"{folder}/cells has cells of a run whose run.json is gone, and they would be taken for this one's:"
                " remove the folder, or name another one with --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(name, factor, data, record.header(), specs, settings_here(), digest_of_code(), digest_of_rows(data))
        _write(path, msgspec.to_builtins(run))
        return Results(folder, run)

    @staticmethod
    def open(folder: Path) -> Results:
        """Opens the folder of a run.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        path = folder / "run.json"
        try:
            run = msgspec.json.decode(path.read_bytes(), type=Run)
            if lacking := [name for name in HEADER if name not in run.header]:
                raise ValueError(f"{path} cannot be read: its header lacks {', '.join(lacking)}")
            return Results(folder, run)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{folder} has no results of experiments: `torch-ecrec experiments run NAME --out {folder}` makes some"
            ) from None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def require_same(self) -> None:
        """Raises ValueError unless this code, its settings and the rows are those which the run was begun with."""
        now, then = record.header()["commit"], self.run.header["commit"]
        if now != then:
            raise ValueError(
                f"{self.folder} was begun with commit {then}, and this is {now}: cells of different code are not put"
                " into one result. Check that commit out, or begin anew with another --out"
            )
        if self.run.code not in ("", digest_of_code()):
            raise ValueError(
                f"{self.folder} was begun with other code: files of this package have changed since, at commit {now}:"
                " cells of different code are not put into one result. Begin anew with another --out"
            )
        if self.run.rows not in ("", digest_of_rows(self.run.data)):
            raise ValueError(
                f"{self.folder} was begun with other rows: {self.run.data} has changed since. Put that file back, or"
                " begin anew with another --out"
            )
        if (here := settings_here()) != self.run.settings:
            raise ValueError(
                f"{self.folder} was begun with {named(self.run.settings)}, and this environment has {named(here)}:"
                " cells of different settings are not put into one result. Set the same, or begin anew with another"
                " --out"
            )

    @property
    def scale(self) -> Scale:
        """The factor of the run."""
        return Scale(self.run.factor)

    @property
    def groups(self) -> list[Group]:
        """All cells of the run, as they run."""
        return groups(self.run.specs)

    def path(self, cell: Cell) -> Path:
        """Returns the file of a cell."""
        return self.folder / "cells" / cell.experiment / f"{cell.name}.json"

    def write(self, cell: Cell, figures: Mapping[str, Any] | None, error: str | None) -> None:
        """Writes what a cell has found, or why it failed."""
        content = {"cell": dataclasses.asdict(cell), "factor": self.run.factor, "error": error, "figures": figures}
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content)

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Returns what `write` has written; None: it has not run.

        Raises:
            ValueError: the file cannot be read, or is not that of the cell in this run.
        """
        path, wanted = self.path(cell), dataclasses.asdict(cell)
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError) as error:
            raise _damaged(path, str(error)) from error
        if not isinstance(found, dict) or not {"cell", "factor", "error", "figures"} <= found.keys():
            raise _damaged(path, "it is not what a cell leaves")
        if (found["cell"], found["factor"]) != (wanted, self.run.factor):
            raise _damaged(path, f"it is of another cell or factor: {found['cell']}, {found['factor']}")
        figures = found["figures"]
        kind = next(spec.kind for spec in self.run.specs if spec.name == cell.experiment)
        if figures is not None and not (isinstance(figures, dict) and NEEDED[kind] <= figures.keys()):
            raise _damaged(path, f"it has not the figures of its kind: {', '.join(sorted(NEEDED[kind]))}")
        return found

    def figures(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the figures of a cell; None: it has not run, or failed."""
        found = self.read(cell)
        return None if found is None else found["figures"]

    def missing(self, group: Group) -> bool:
        """Returns whether a cell of the group has not run to its end."""
        return any(self.figures(cell) is None for cell in group.cells)


def digest_of_code() -> str:
    """Returns a digest of this package's sources. A commit does not tell of files that differ from it, and where the
    package was installed there is none."""
    root, digest = Path(torch_ecrec.__file__).resolve().parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def digest_of_rows(data: str | None) -> str:
    """Returns a digest of a file's content, "" for None. Raises ValueError if it cannot be read."""
    if data is None:
        return ""
    try:
        with open(data, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ValueError(f"{data} cannot be read: {error}") from error


def settings_here() -> dict[str, str]:
    """Returns the settings of this environment that are not the default ones: they hold for all cells alike.

    Raises:
        ValueError: one is wrong, or it is what a mode is to choose for its own cells.
    """
    here, default = Settings.from_environment(join=None), Settings()
    if here.experiment:
        raise ValueError(
            "TORCH_ECREC_EXPERIMENT_MODE and TORCH_ECREC_EXPERIMENT_RANGES would hold for the cells of every mode,"
            " which choose them themselves: unset them"
        )
    plain = default.environment()
    return {name: value for name, value in here.environment().items() if value != plain[name]}


def named(settings: Mapping[str, str]) -> str:
    """Returns some settings as text."""
    return " ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "the default settings"


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} cannot be read: {reason}; remove it, and `resume` runs the cell again")


def _write(path: Path, content: Any) -> None:
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), durable=True)  # a cell takes minutes
