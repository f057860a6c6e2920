"""Records what each step of a trainer did, for `torch-ecrec rehearse`: only if `TORCH_ECREC_RECORD` names a folder.

What is seen here is what passes between a model and its session, so a `Recorded` session stands between the two:

    forward of training   the batch
    push                  ids, learning rates and gradients of the embeddings
    snapshot              dense parameters, optimizers, buffers, and what is attached, as they are when a step has ended

Gradients that wait for their optimizer are left out: what comes of them is not, and left-over ones do not matter.

A step's forwards are those since the push before, or since the snapshot, if that came later: what was trained on before
a snapshot is not made again after a restart.

At the step that the folder's `hold` names, a trainer waits after its push, once everything that it has sent survives a
loss, until the rehearsal kills it: so it is certain which step training goes on after.
"""

from __future__ import annotations

import logging
import struct
import threading
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.dense import Header, dense_parameters, own_of
from torch_ecrec.observe import trace
from torch_ecrec.observe.rehearsed import is_marked, script_digest
from torch_ecrec.observe.trace import Ended, Held, Kept, Resumed, Trained, Warned, Writer
from torch_ecrec.resume.checksum import checksum_of
from torch_ecrec.resume.tensor_bytes import bytes_of
from torch_ecrec.resume.trainer_state import COUNTERS, DIVISION, GROUPS
from torch_ecrec.resume.values import decode
from torch_ecrec.spec.settings import record_folder, rehearsed_folder, restarts, shares_store

HOLD_LIMIT_S = 600.0
PARTS_OF_STATE = (GROUPS, DIVISION, COUNTERS)

log = logging.getLogger(__name__)


def recorded(session: EmbeddingBackend, model: nn.Module) -> tuple[EmbeddingBackend, Recorder | None]:
    """Returns the session to use, and a recorder of the steps of `model` if the environment asks for one."""
    folder = record_folder()
    if folder is None:
        return session, None
    recorder = Recorder(folder, session, model)
    return cast(EmbeddingBackend, Recorded(session, recorder)), recorder


def tell_unless_rehearsed() -> None:
    """Warns if this script was not rehearsed, and says what that means.

    The library cannot see what a script keeps for itself, so its user should know that nobody has checked that. Only
    the marks of `observe/rehearsed.py` tell that a script was rehearsed. If their folder is missing, it warns, too.
    """
    folder = rehearsed_folder()
    if not is_marked(folder, script_digest()):
        log.warning(
            "this script was not rehearsed as it is (%s has no mark of it): what it keeps for itself and does not"
            " attach, such as a count, a random generator, an average of weights, begins anew when trainers are started"
            " again, and training then goes on otherwise, unnoticed. `torch-ecrec rehearse -- SCRIPT ARGS...` kills its"
            " trainers and says whether it goes on to the same bits",
            folder.resolve(),
        )


def tell_of_shared_store(trainers: int) -> None:
    """Warns if trainers that are started again would hang before anything of ours begins, and nobody could say why."""
    if trainers > 1 and shares_store():
        log.warning(
            "torchrun keeps one store over all starts of the trainers: those that it starts again may meet the"
            " addresses of those before them, and hang or fail in `init_process_group`. Start torchrun with"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone, or with --rdzv-backend c10d; `torch-ecrec run`"
            " does that"
        )


class _Warnings(logging.Handler):
    """Records the library's warnings, however the script has configured its logging.

    Args:
        writer: of the trainer.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(logging.WARNING)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one warning of the log to what is recorded."""
        self._writer.write(Warned(record.getMessage()))


class Recorder:
    """Writes the records of one trainer.

    Args:
        folder: see `observe/trace.py`.
        session: the backend itself.
        model: held weakly.
    """

    def __init__(self, folder: Path, session: EmbeddingBackend, model: nn.Module) -> None:
        self._writer = Writer(folder, session.trainer, restarts())
        self._hold = trace.held_at(folder)
        self._session, self._model = session, weakref.ref(model)
        logging.getLogger(__name__.partition(".")[0]).addHandler(_Warnings(self._writer))
        self._batch = 0  # checksum of the forwards of this step

    def on_forward(self, batch: object) -> None:
        """Notes that a training forward begins with `batch`."""
        self._batch = zlib.crc32(checksum_of(batch).to_bytes(4, "little"), self._batch)

    def on_pushed(self, step: int, rows: Sequence[Tensor], gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Notes that the gradients of a step were sent."""
        values = {
            trace.BATCH: self._batch,
            trace.IDS: _crc(rows),
            trace.RATES: zlib.crc32(struct.pack(f"{len(rates)}d", *rates)),
            trace.GRADIENTS: _crc(gradients),
        }
        self._batch = 0
        self._writer.write(Trained(step, values))
        if step == self._hold:
            self._wait_to_be_killed(step)

    def on_snapshot(self, step: int, payload: Tensor, header: list[int]) -> None:
        """Notes that a snapshot of the dense part after `step` was taken."""
        self._batch = 0
        fields = Header.of(header, payload)
        begin, end = fields.span
        stream, whole = payload[: end - begin], payload[end - begin : end - begin + fields.whole_bytes]
        values = {**self._dense(), trace.OPTIMIZERS: _crc([stream]), trace.BUFFERS: _crc([whole])}
        epoch = None
        if fields.own_bytes:
            own: Any = decode(own_of(payload, header))
            before: Any = decode(own["before"])
            values |= _attached(before["state"])
            epoch = before["reader"]["epoch"] if before["reader"] is not None else None
        self._writer.write(Kept(step, values, epoch))

    def on_resumed(self, step: int) -> None:
        """Notes that training goes on after `step`."""
        self._writer.write(Resumed(step))

    def on_closed(self) -> None:
        """Notes that the model was closed, so that training is over."""
        self._writer.write(Ended(self._dense()))

    def _dense(self) -> dict[str, int]:
        model = self._model()
        parameters = [] if model is None else [parameter for _, parameter in dense_parameters(model)]
        return {trace.DENSE: _crc(parameters)}

    def _wait_to_be_killed(self, step: int) -> None:
        self._session.flush()
        self._writer.write(Held(step))
        threading.Event().wait(HOLD_LIMIT_S)
        raise RuntimeError(f"held after step {step} for {HOLD_LIMIT_S:g} s, and nobody has killed this trainer")


class Recorded:
    """An `EmbeddingBackend` that reports its calls to a recorder and passes them on to the session."""

    def __init__(self, session: EmbeddingBackend, recorder: Recorder) -> None:
        self._session, self._recorder = session, recorder
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def snapshot_every(self) -> int:
        return self._session.snapshot_every

    @snapshot_every.setter
    def snapshot_every(self, steps: int) -> None:
        self._session.snapshot_every = steps

    def push(
        self,
        rows: list[Tensor],
        gradients: list[Tensor],
        rates: list[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        ahead: Sequence[tuple[Sequence[Tensor], Sequence[BagRoute]]] = (),
    ) -> None:
        step = self._session.step
        self._session.push(rows, gradients, rates, bags, bag_gradients, ahead)
        ids = [*rows, *(part for there in bags for part in (*there.positions, *there.lengths))]
        self._recorder.on_pushed(step, ids, [*gradients, *bag_gradients], rates)

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        self._session.snapshot(payload, header)
        self._recorder.on_snapshot(self._session.step - 1, payload, header)

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        step, parts = self._session.resume()
        self._recorder.on_resumed(step)
        return step, parts

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._recorder.on_closed()
        self._session.close()


def _crc(tensors: Iterable[Tensor]) -> int:
    """Returns the CRC-32 of all bytes of some tensors."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(memoryview(bytes_of(tensor.cpu()).numpy()), total)  # type: ignore[arg-type]
    return total


def _attached(state: Mapping[str, bytes]) -> dict[str, int]:
    """Returns a checksum for each name that `TrainerState.encoded` gave."""
    found = {}
    for key, value in state.items():
        name = key if key in PARTS_OF_STATE else f"{trace.ATTACHED}`{key.removeprefix('stateful/')}`"
        found[name] = zlib.crc32(value)
    return found
