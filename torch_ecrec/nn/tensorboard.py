"""What a cluster does, beside a script's own curves in TensorBoard: `torch_ecrec.TensorBoard(model, "runs/1")`."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch_ecrec.errors import ClusterError
from torch_ecrec.observe.text import format_recent
from torch_ecrec.observe.verdict import EXIT_CODES, verdict_of
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
SIZES = ("record", "parity", "log", "snapshot")  # of a slot's memory


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


class Scalars:
    """Turns one status after the other into scalars. Rates of bytes need the one before.

        scalars.of(status)      # {"steps_per_s": 12.3, "losses_tolerated": 2.0, "slots/healthy": 1.0, ...}

    A part of a name before "/" gathers what belongs in one picture. What is not known is absent.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int, str], int] = {}  # by member, process and what for
        self._at_s = 0.0  # time of day of the status before

    def of(self, status: Status) -> dict[str, float]:
        """Returns the scalars of a status by name."""
        servers = status.servers
        found: dict[str, float | None] = {
            "verdict": float(EXIT_CODES[verdict_of(status).level]),
            "seconds_since_step": status.still_s,
            "members/servers": float(sum(not one.spare for one in servers)),
            "members/spares": float(sum(one.spare for one in servers)),
            "members/trainers": float(len(status.trainers)),
            "silent_s": max((one.silent_s for one in status.members if one.present), default=None),
        }
        if status.rate is not None:
            found |= {"steps_per_s": status.rate.steps_per_s, "samples_per_s": status.rate.samples_per_s}
        if status.redundancy is not None:
            found["losses_tolerated"] = float(status.redundancy.losses)
        if status.slots:
            found["slots/healthy"] = sum(one.healthy for one in status.slots) / len(status.slots)
        if reports := list(status.slot_reports().values()):
            found["slots/rebuilt_least"] = min(one.rebuilt for one in reports)
            found["damaged_records"] = float(sum(one.damaged for one in reports))
            found |= {
                f"memory_bytes/{kind}": float(sum(getattr(one, f"{kind}_bytes") for one in reports)) for kind in SIZES
            }
        if (kept := status.checkpoints) is not None:
            found |= {"checkpoint/age_s": kept.last_age_s, "checkpoint/failing_s": kept.failing_for_s or 0.0}
        found |= self._bytes(status)
        return {name: float(value) for name, value in found.items() if value is not None}

    def _bytes(self, status: Status) -> dict[str, float]:
        """Bytes of tensors a second since the status before, by what they were for."""
        before, at_s = self._sent, self._at_s
        self._sent = {
            (one.name, one.pid, kind): sent
            for one in status.members
            for kind, sent in (one.report.bytes_sent or {}).items()
        }
        self._at_s = status.time_s
        over_s, grown = status.time_s - at_s, Counter[str]()
        for (name, pid, kind), sent in self._sent.items():
            grown[kind] += max(sent - before.get((name, pid, kind), sent), 0)
        return (
            {f"sent_bytes_per_s/{kind}": sent / over_s for kind, sent in grown.items()} if at_s and over_s > 0 else {}
        )
