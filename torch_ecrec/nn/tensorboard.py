"""What a cluster does, beside a script's own curves in TensorBoard: `torch_ecrec.TensorBoard(model, "runs/1")`."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch_ecrec.errors import ClusterError
from torch_ecrec.observe.scalars import Scalars
from torch_ecrec.observe.text import format_recent
from torch_ecrec.protocol.status import Recent, Status
from torch_ecrec.runtime.checks import require, take_float
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.transport.whereabouts import status_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from torch_ecrec.nn.parallel import DistributedModelParallel

log = logging.getLogger(__name__)

TAG = "torch_ecrec"
LACKING = "torch_ecrec.TensorBoard needs the package tensorboard: pip install 'torch-ecrec[tensorboard]'"
ASKED_S = 3.0  # for one status
SILENT_S = 60.0  # without a status: the cluster has ended


class TensorBoard:
    """Writes what the cluster of a model does as scalars for TensorBoard: one line in a script.

        board = torch_ecrec.TensorBoard(model, "runs/1")

    Steps and samples per second, how many servers may be lost, slots that are healthy or rebuilt, bytes by what for,
    memory, checkpoints, the verdict of `torch-ecrec status` (0 OK, 1 WARN, 2 ERROR), and events as text: all under
    `torch_ecrec/`, by steps of training. A thread of its own asks the coordinator, and training never waits for it.
    Every trainer may make one; only trainer 0 writes. It ends with the process, or by `close`.

    Args:
        model: whose cluster it is.
        to: the folder of TensorBoard's files, or a `SummaryWriter` of the script's, which stays open.
        every_s: seconds between two looks.

    Raises:
        ImportError: the package tensorboard is not installed.
        ValueError: `every_s` is not positive, or the model has no tables on servers.
        TypeError: `to` is neither a folder nor has `add_scalar`.
    """

    def __init__(self, model: DistributedModelParallel, to: str | Path | SummaryWriter, every_s: float = 10.0) -> None:
        every_s = take_float("every_s", every_s)
        require(0 < every_s < math.inf, f"`every_s` must be positive, got {every_s}")
        join: str | None = getattr(model.session, "join", None)
        require(join is not None, "`model` has no tables on servers, so there is no cluster to write of")
        if not isinstance(to, (str, Path)) and not hasattr(to, "add_scalar"):
            raise TypeError(f"`to` must be a folder, or a SummaryWriter, got {type(to).__name__}")
        self._every_s, self._join, self._owns = every_s, join or "", isinstance(to, (str, Path))
        self._process, self._over, self._thread = os.getpid(), threading.Event(), None
        self._scalars, self._told_s = Scalars(), 0.0
        if model.session.trainer != 0:
            return
        self._writer = _writer_at(to, model.session.step - 1) if isinstance(to, (str, Path)) else to
        self._thread = Worker(self._watch, "tensorboard", log_error)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Writes what there is, and ends. May be called again."""
        if self._over.is_set() or self._process != os.getpid():
            return
        self._over.set()
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._thread.join(2 * ASKED_S)
        if self._owns:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _watch(self) -> None:
        heard_s, ends = time.monotonic(), False
        while not ends and time.monotonic() < heard_s + SILENT_S:
            ends = self._over.wait(self._every_s)  # then once more: how it was at the end
            try:
                status = status_of(self._join, ASKED_S)
            except ClusterError:  # another coordinator is being started, or all has ended
                continue
            heard_s = time.monotonic()
            try:
                self._write(status)
            except OSError as error:
                log.warning("TensorBoard's files cannot be written, and are given up: %s", error)
                return

    def _write(self, status: Status) -> None:
        for name, value in self._scalars.of(status).items():
            self._writer.add_scalar(f"{TAG}/{name}", value, status.step)
        told = [one for one in status.recent if one.time_s > self._told_s]
        if told:
            self._told_s = max(one.time_s for one in told)
            self._writer.add_text(f"{TAG}/events", "\n\n".join(map(_as_text, told)), status.step)
        self._writer.flush()


def _as_text(one: Recent) -> str:
    """Returns an event as a line of Markdown in which nothing of it is markup."""
    return f"`{format_recent(one).replace('`', chr(39))}`"


def _writer_at(folder: str | Path, done: int) -> SummaryWriter:
    """Returns a new writer. After a restart, what was written of later steps than `done` is no longer shown."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(LACKING) from error
    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
