"""The coordinator's events in a file, a line of JSON for each: `--events FILE`.

    {"time_s": 1764271234.567, "event": "left", "member": "server-1"}

A thread of its own writes, so that a disk that hangs holds nobody up. Events that it cannot take are counted, and the
count is an event, too, once it can: {"event": "events_lost", "number": 12}. A file that has grown to `MOST_BYTES` is
renamed to FILE.1, the one before to FILE.2, and so on, `KEPT` of them. A coordinator that is started again goes on in
the same file, on a line of its own: the one before may have been killed in the middle of a line.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections.abc import Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from torch_ecrec.runtime.threads import Worker, log_error

MOST_BYTES = 10 << 20
KEPT = 5
WAITING_MOST = 10_000
END_S = 2.0
TOLD_S = 60.0  # that it cannot write is logged once in so long


def require_writable(path: Path) -> None:
    """Raises OSError, with its name, if events cannot be written to that file."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise OSError(error.errno, f"--events: {path} cannot be written: {error.strerror or error}") from None


class _File(RotatingFileHandler):
    """A rotating log file that raises errors of writing, instead of printing them."""

    def _open(self) -> TextIOWrapper:
        """Opens the file; ends a line that a killed coordinator, or a full disk, has left without its end."""
        file = super()._open()
        if Path(self.baseFilename).is_file() and file.tell():  # no pipe or terminal
            with open(self.baseFilename, "rb") as before:
                before.seek(-1, os.SEEK_END)
                if before.read(1) != b"\n":
                    file.write("\n")
        return file

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # it is called where the error is handled


class EventLog:
    """Writes events to a file.

    Args:
        path: of the file; what is there stays.
        most_bytes, kept: see above.

    Raises:
        OSError: nobody can write there.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, kept: int = KEPT) -> None:
        require_writable(path)
        self._file = _File(path, maxBytes=most_bytes, backupCount=kept, encoding="utf-8", delay=True)
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_MOST)
        self._lost = 0  # of the caller's thread
        self._failed = self._said = 0  # of the writer's: events, and how many of all that are lost it has told of
        self._told_s = -TOLD_S
        self._thread = Worker(self._write, "events", log_error)
        self._thread.start()

    def happened(self, event: Mapping[str, Any]) -> None:
        """Has an event written, soon. Never waits. From one thread."""
        try:
            self._waiting.put_nowait({"time_s": round(time.time(), 3), **event})
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Ends it, once what has happened is written, or after `END_S`."""
        try:
            self._waiting.put(None, timeout=END_S)
        except queue.Full:
            return
        self._thread.join(END_S)

    def _write(self) -> None:
        while (event := self._waiting.get()) is not None:
            lost = self._lost + self._failed - self._said
            if lost and self._put({"time_s": event["time_s"], "event": "events_lost", "number": lost}):
                self._said += lost
            if not self._put(event):
                self._failed += 1
        self._file.close()

    def _put(self, event: dict[str, Any]) -> bool:
        line = json.dumps(event, separators=(", ", ": "))
        try:
            self._file.handle(logging.makeLogRecord({"msg": line, "levelno": logging.INFO, "levelname": "INFO"}))
            return True
        except OSError as error:  # the disk is full, perhaps
            if time.monotonic() > self._told_s + TOLD_S:
                self._told_s = time.monotonic()
                logging.getLogger(__name__).warning("events cannot be written: %s", error)
            return False
