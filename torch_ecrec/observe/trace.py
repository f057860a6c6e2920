"""The trace of a rehearsed trainer: JSON lines that tell what each step did. Each start of a trainer has a file.

    FOLDER/0.12345.1f3a.jsonl   of trainer 0, process 12345
    FOLDER/hold                 the step at which trainers stop and wait to be killed; absent: none

A line is written by one call of the system, so what a killed process has noted is there; a last line that is not whole
is left out. Values are checksums by name (`ORDER` has the names), and say nothing but whether two runs are the same.

Does not compute checksums (`nn/recorder.py`), and does not compare them (`rehearsal/compare.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from torch_ecrec.observe.rehearsed import script_digest
from torch_ecrec.runtime.files import write_whole

HOLD = "hold"
ATTACHED = "attached "  # before the name of something attached

# Names of values, in the order in which one follows from those before.
BATCH, IDS, RATES, GRADIENTS = "batch", "embedding ids", "tables' learning rates", "gradients of the embeddings"
TRAINED = (BATCH, IDS, RATES, GRADIENTS)
DENSE, OPTIMIZERS, BUFFERS = "dense parameters", "state of the dense optimizers", "buffers"
KEPT = (DENSE, OPTIMIZERS, BUFFERS)
ORDER = (*TRAINED, *KEPT)


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The first line of each file.

    Attributes:
        life: how often torchrun had started the trainers before.
        script: the digest of the script that the trainer runs (`rehearsed.py`); "": not known.
    """

    trainer: int
    life: int
    pid: int
    script: str = ""


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Training goes on after this step."""

    step: int


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """The gradients of a step were sent. `values`: those named in `TRAINED`."""

    step: int
    values: Mapping[str, int]


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """A step had ended, and a snapshot was taken. `values`: those named in `KEPT`, and of what is attached.

    Attributes:
        epoch: the pass that the next batch is of; None: not known.
    """

    step: int
    values: Mapping[str, int]
    epoch: int | None = None


class Held(msgspec.Struct, frozen=True, tag="held"):
    """This trainer waits to be killed, with the gradients of this step sent."""

    step: int


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    """The library has logged a warning."""

    text: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The script has closed the model. `values`: of the dense parameters."""

    values: Mapping[str, int]


Record = Begun | Resumed | Trained | Kept | Held | Warned | Ended


class Writer:
    """Writes the trace of one start of a trainer, to a new file in a folder."""

    def __init__(self, folder: Path, trainer: int, life: int) -> None:
        name = f"{trainer}.{os.getpid()}.{os.urandom(2).hex()}.jsonl"
        self._file = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encoder = msgspec.json.Encoder()
        self.write(Begun(trainer, life, os.getpid(), script_digest()))

    def write(self, record: Record) -> None:
        os.write(self._file, self._encoder.encode(record) + b"\n")


class Tail:
    """Reads the traces of all trainers in a folder, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoder = msgspec.json.Decoder(Record)
        self._read: dict[Path, int] = {}  # bytes
        self.records: dict[Path, list[Record]] = {}  # by file: all so far

    def look(self) -> bool:
        """Reads the lines that are new; returns whether there were any.

        Raises:
            ValueError: a line is no record.
        """
        found = False
        for path in sorted(self._folder.glob("*.jsonl")):
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                found, self._read[path] = True, at + len(whole) + 1
                records = self.records.setdefault(path, [])
                records += [self._decoder.decode(line) for line in whole.splitlines()]
        return found


def hold_at(folder: Path, step: int | None) -> None:
    """Makes trainers that start from now on stop after this step; None: they do not stop."""
    path = folder / HOLD
    if step is None:
        path.unlink(missing_ok=True)
        return
    write_whole(path, str(step).encode())


def held_at(folder: Path) -> int | None:
    """Returns the step that `hold_at` has set, or None."""
    path = folder / HOLD
    return int(path.read_text()) if path.exists() else None
