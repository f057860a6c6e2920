"""The state that a training loop attaches to its model: when a step ends, what is kept of it, and how it is restored.

**The rule.** A step has ended when the next one begins, and not before: until then the loop may still step schedulers,
count, evaluate, wait. The next one begins

    with a draw          the call for a batch from what `attach` returned, once there is one: at the end of a pass, the
                         next step begins in the next pass
    with a forward       where a pipeline of TorchRec's draws ahead, at the end of a pass: it has nothing left to draw;
                         where it draws between a backward and the optimizers' step (`TrainPipelineSparseDistLite`)
    with `model.step()`  in a loop without a reader: `with model.step(): ...` around each step
    with a forward       in a loop that has neither. What made its batch comes before then, so that has to be the same
                         without what is brought back: another batch after a restart is an error

Then a snapshot of the step before is taken, of everything as it is *before* the draw, random states included. After a
restart the loop runs again from its top, and comes to the same draw, where the random states are put back. What a loop
does between `attach` and its first draw is done twice then, so it must not move what is attached: that is looked at.

Several backwards between two draws are several steps of the servers; after a restart all of them are made again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from torch_ecrec.nn.announcing import Announcing
from torch_ecrec.nn.attachment_checks import AttachmentChecks
from torch_ecrec.nn.dense import DenseSnapshot, dense_parameters, load_, own_of
from torch_ecrec.nn.gradients import WaitingGradients, put_back_
from torch_ecrec.nn.imported import begin_with_
from torch_ecrec.nn.module_settings import ModuleSettings
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.resume import arithmetic
from torch_ecrec.resume.checksum import checksum_of
from torch_ecrec.resume.loop import LoopInspector
from torch_ecrec.resume.random_states import random_states, set_random_states
from torch_ecrec.resume.reader import Reader, Stateful
from torch_ecrec.resume.trainer_state import TrainerState
from torch_ecrec.resume.values import decode, encode
from torch_ecrec.runtime.checks import plain
from torch_ecrec.spec.settings import Settings

OTHERWISE = "torch may compute other bits than before the restart"
OTHER_MODULES = (
    "torch's modules in the model, or what they or its collections were made with (the `p` of a dropout, the pooling or"
    " output dtype of a table, how ids are remapped), are others than before the restart: the script was changed"
)
OTHER_FROZEN = "%s: trained now and not before the restart, or the other way: the script was changed"
log = logging.getLogger(__name__)

STEPS_OF_A_DRAW = 64  # of more, the log is told once
STEPS_UNSEEN = 64  # likewise, of steps whose forwards nobody has seen, and of backwards that are no steps


class Attachment:
    """Keeps what `DistributedModelParallel.attach` was given after each step, and restores it after a restart.

    Args:
        model: held weakly.
        step: hands snapshots over, and has the backend.
        dense: packs the model's dense part, and says after which steps; told of the optimizers.
        optimizers, reader, stateful: as given to `attach`, schedulers among `stateful`.
        own: names of those among `stateful` that are the user's: they may count passes, and batches.
        settings: of this process.

    Raises:
        TypeError: a part of its state cannot be kept.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        step: SparseStep,
        dense: DenseSnapshot,
        optimizers: Sequence[Optimizer],
        reader: Iterable[Any] | None,
        stateful: Mapping[str, Stateful],
        own: Sequence[str],
        settings: Settings,
    ) -> None:
        self._model, self._dense = weakref.ref(model), dense
        self._step, self._session = step, step.session
        self._state = TrainerState(optimizers, stateful, model.fused_optimizer)
        self._own = own
        self._inspector = inspector = LoopInspector(self._counters, attached=bool(own))
        self._arithmetic = arithmetic.of_settings(settings, self._session.job.code)
        self._process = arithmetic.of_process()
        self._arithmetic_then: Mapping[str, Any] | None = None  # of torch; put back when the first step begins
        self.reader = None if reader is None else Reader(reader, self._on_draw, inspector, settings.look_ahead)
        self._announcing: Announcing | None = None
        if self.reader is not None and self.reader.looks_ahead:
            self._announcing = Announcing(self.reader, model, step.session)
        self._settings = ModuleSettings(model)
        self._modules = self._settings.checksum
        if optimizers:
            dense.use(self._state.dense_optimizers)
        dense.counters = self._state.counters
        dense.check()
        self.begun = False  # a step of this life has
        self._drawn_at: int | None = 0  # the step of the last draw; None: that many steps follow it was told
        self._seen_at: int | None = self._session.step  # of the last forward, in a loop without a reader; None: told
        self._counted_at: tuple[int, int] | None = self._session.step, step.passes  # None: it was told
        step.on_pushed.append(self._look_at_unseen_steps)
        self._in_step = self._closed = False
        self._random: dict[str, Any] | None = None  # to be put back when the first step begins
        self._expected: int | None = None  # checksum of its batch
        self._restored = False
        # what training goes on with; None: nothing was kept of the step that it goes on from
        self._settings_then: Mapping[str, Mapping[str, Any]] | None = None
        self._gradients_then: tuple[Mapping[str, Tensor], Mapping[str, bool]] = {}, {}  # see `WaitingGradients.find`
        self._buffers_then: Mapping[str, Tensor] = {}
        # those at the first draw of this life, until the first forward
        self._settings_at_first: Mapping[str, Mapping[str, Any]] | None = None
        self._gradients = WaitingGradients(self._state.dense_optimizers)
        step.on_pushed.append(inspector.on_push)
        self._checks = AttachmentChecks(model, self._state, self._settings, self._on_left_out)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that were attached, in the order given."""
        return self._state.attached

    def close(self) -> None:
        """Stops watching optimizers. May be called again."""
        if self.reader is not None and not self._closed:
            self.reader.check_end()
        self._closed = True
        self._checks.close()
        self._gradients.close()

    def _on_left_out(self, what: str) -> None:
        """Reports that something trained was in no snapshot: after the restart it is as the script has made it."""
        if self._restored and self._session.step > 1:
            self._session.not_exact(what)

    # when a step begins ---------------------------------------------------------------------------

    def _on_draw(self) -> Callable[[int | None], None] | None:
        """Called before the reader draws a batch. If that begins a step, the step before is kept once a batch came."""
        self._begin()
        if self._drawn_at is not None:
            self._drawn_at = self._session.step
        if not self._is_due() or (self.reader is not None and self.reader.within_step):
            return None
        self._inspector.on_keep()
        before = self._before(at_forward=False)
        return lambda checksum: self._keep(before, checksum)

    def on_forward(self, batch: object) -> None:
        """Called when a training forward begins.

        Args:
            batch: what it is called with.

        Raises:
            RuntimeError: the loop cannot be brought back, or trains on another batch after a restart than before.
        """
        if self.reader is not None:
            if self.reader.pipelined and self._settings_at_first is not None:
                self._checks.check_tracing(self._settings_at_first)
            self._settings_at_first = None
            self.reader.on_batch_given(batch)
            if self.reader.pipelined and self._is_due():
                self._keep(self._before(at_forward=True), None)
            self.reader.on_forward()
            self._look_at_steps_since_draw()
        elif not self._in_step:
            self._begin_without_reader(lambda: checksum_of(batch))
        self._look_at_backwards_without_step()

    def after_forward(self) -> None:
        """Called when a training forward has ended."""
        if self._announcing is not None:
            self._announcing.after_forward()

    def _look_at_steps_since_draw(self) -> None:
        if self._drawn_at is None or self._session.step - self._drawn_at < STEPS_OF_A_DRAW:
            return
        self._drawn_at = None
        log.warning(
            "%d steps were trained since a batch was drawn. A snapshot is taken when the next one is: until then the"
            " servers' logs grow, and a restart makes all these steps again. To train on one batch, attach a reader"
            " that gives it again (`itertools.repeat(batch)`)",
            STEPS_OF_A_DRAW,
        )

    def _look_at_unseen_steps(self) -> None:
        """Called when a step was pushed. In a loop without a reader only a forward, or `model.step()`, begins one."""
        if self.reader is not None or self._seen_at is None or not self._dense.every:
            return
        if self._session.step - self._seen_at >= STEPS_UNSEEN:
            self._seen_at = None
            log.warning(
                "%d steps were trained by forwards that begin no step, of a model in `eval()`, or of `model.module`: no"
                " snapshot is taken of them, the servers' logs grow, and a restart makes all of them again. Call the"
                " model itself, in `train()`, or put each step into `with model.step(): ...`",
                STEPS_UNSEEN,
            )

    def _look_at_backwards_without_step(self) -> None:
        """Called in a training forward. A backward that reaches no row is no step: after it nothing is kept."""
        if self._counted_at is None or not self._dense.every:
            return
        step, passes = self._counted_at
        if self._session.step != step:
            self._counted_at = self._session.step, self._step.passes
        elif self._step.passes - passes >= STEPS_UNSEEN:
            self._counted_at = None
            log.warning(
                "%d backwards since step %d have reached no row of a table (are the embeddings detached, or looked up"
                " under `torch.no_grad()`?): they are no steps, so that no snapshot is taken, and a restart makes all"
                " of them again. Freeze tables with `requires_grad_(False)` in place of that",
                STEPS_UNSEEN,
                step - 1,
            )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Marks one step of a loop that attached no reader. With a reader, its draws mark where steps begin.

        Raises:
            RuntimeError: within another one.
        """
        if self._in_step:
            raise RuntimeError("`model.step()` within `model.step()`: one step at a time")
        if self.reader is None:
            self._begin_without_reader(lambda: None)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _begin_without_reader(self, checksum: Callable[[], int | None]) -> None:
        """Begins a step, unless this is a further forward of the step under way."""
        self._seen_at = None if self._seen_at is None else self._session.step
        self._begin()
        if self._random is not None:
            set_random_states(self._random)
            self._random = None
            if self._expected is not None and checksum() not in (None, self._expected):
                raise RuntimeError(
                    "the model is trained on another batch than before the restart: it depends on something that was"
                    " not brought back, such as random draws before the forward. Put each step into"
                    " `with model.step(): ...`, which brings random states back first; or attach the reader"
                )
        if self._is_due():
            self._keep(self._before(at_forward=False), checksum())

    def on_loaded(self) -> None:
        """Called after a state dict was loaded into the model."""
        if not self.begun:
            self._checks.on_loaded(self._live_model)

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            if self._arithmetic_then is not None:
                for inexact in arithmetic.set_of_torch(self._arithmetic_then):
                    self._session.not_exact(f"{OTHERWISE}: {inexact}")
            if self._settings_then is not None:
                self._load_what_loops_reset(self._settings_then)
            self._settings_at_first = self._settings.changed()
            self._checks.check_sealed(self._restored and self._session.step > 1)
            self._checks.check_schedulers()
            self._checks.check_reductions()

    def _load_what_loops_reset(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores again what a loop may change before its first step: gradients, buffers, settings of modules."""
        self._settings.load_(settings)
        model = self._live_model
        if any(self._gradients_then):
            put_back_(dict(dense_parameters(model)), *self._gradients_then)
        with torch.no_grad():
            for name, buffer in self._what_moves(model):
                if name in self._buffers_then:
                    buffer.copy_(self._buffers_then[name])
        self._gradients_then, self._buffers_then = ({}, {}), {}

    def _what_moves(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers, and tables that TorchRec shards. An evaluation may change both: FBGEMM counts forwards."""
        yield from model.named_buffers()
        yield from self._dense.shards.tensors().items()

    def _is_due(self) -> bool:
        return self._dense.is_due(self._session.step - 1)

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = {}

        def look(value: object, name: str) -> None:
            value = plain(value)
            if isinstance(value, int) and not isinstance(value, bool):
                found[name] = value
            elif isinstance(value, Mapping):
                for key, item in value.items():
                    look(item, f"{name}.{key}")

        for name in self._own:
            look(self._state.stateful[name].state_dict(), name)
        return found

    # what is kept ---------------------------------------------------------------------------------

    @property
    def _live_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this was attached to is gone")
        return model

    def _before(self, at_forward: bool) -> bytes:
        """Encodes everything that drawing a batch may change, as it is now."""
        return encode(
            {
                "random": random_states() if self.reader is None else None,
                "reader": None if self.reader is None else self.reader.saved(at_forward),
                "state": self._state.encoded(),
                "settings": self._settings.changed(),
                "arithmetic": [arithmetic.of_torch(), self._arithmetic],
                "made": self._modules,
                "frozen": self._settings.frozen,
                "kinds": self._state.kinds,
                "process": self._process,
            },
            "attached",
        )

    def _keep(self, before: bytes, checksum: int | None) -> None:
        """Hands this trainer's part of the step before to the servers."""
        parameters = list(dense_parameters(self._live_model))
        self._checks.check_groups()
        self._checks.check_replaced(parameters)
        self._checks.check_shapes(parameters)
        self._checks.check_kept()
        waiting, zeros = self._gradients.find(parameters)
        own = encode(
            {
                "before": before,
                "checksum": checksum,
                "gradients": waiting,
                "zero gradients": zeros,
                "dense": checksum_of([parameter.detach() for _, parameter in parameters]),
            },
            "attached",
        )
        self._step.hand_over(lambda step: self._dense.pack(step, own))

    # restarts -------------------------------------------------------------------------------------

    def resume(self, step: int, parts: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Restores everything as it was after `step`. Step 0 stands for the state as the script made or imported it.

        Args:
            parts: payload and header of every trainer's snapshot of that step; of step 0, what a checkpoint has that
                was imported (`imported.py`).

        Raises:
            ValueError: other things are attached than when the snapshot was taken, or numbers are rounded otherwise;
                nothing was changed.
            RuntimeError: nothing was attached then, or the trainers had trained different dense models.
        """
        self._dense.last = step
        self._restored = True
        if step == 0:
            if parts:
                begin_with_(self._live_model, self._dense.optimizers, parts)
                self._checks.seal()
            return
        kept = [own_of(*part) for part in parts]
        if not all(kept):
            raise RuntimeError(
                f"training cannot go on after step {step}: nothing was attached when that snapshot was taken"
            )
        owns: list[Any] = [decode(own) for own in kept]
        if len({own["dense"] for own in owns}) != 1:
            raise RuntimeError(
                f"training cannot go on after step {step}: the trainers' dense parameters differed from each other then"
                " (are their gradients not averaged?), and each keeps a part for all"
            )
        own = owns[self._session.trainer]
        before: Any = decode(own["before"])
        if "arithmetic" in before:  # an earlier build has not kept it
            self._arithmetic_then, settings_then = before["arithmetic"]
            if inexact := arithmetic.check_settings(settings_then, self._arithmetic):
                self._session.not_exact(inexact)
        for other in arithmetic.differences(before.get("process", self._process), self._process):
            self._session.not_exact(f"{OTHERWISE}: {other}")
        self._state.check(
            self._state.decoded(before["state"]),
            ["reader"] * ((before["reader"] is None) != (self.reader is None)),
            before.get("kinds"),  # an earlier build has kept neither these nor the next two
        )
        if before.get("made", self._modules) != self._modules:
            self._session.not_exact(OTHER_MODULES)
        if frozen := self._settings.frozen_otherwise(before.get("frozen", self._settings.frozen), before["settings"]):
            self._session.not_exact(OTHER_FROZEN % frozen)
        if self.reader is not None:
            self.reader.load(before["reader"], own["checksum"])
        self._random, self._expected = before["random"], own["checksum"]
        model = self._live_model
        load_(model, self._dense.optimizers, parts, self._session.trainer, self._dense.shards)
        self._gradients_then = own["gradients"], own.get("zero gradients", {})  # an earlier build has kept no zeros
        put_back_(dict(dense_parameters(model)), *self._gradients_then)
        self._buffers_then = {name: buffer.detach().clone() for name, buffer in self._what_moves(model)}
        self._state.load_(self._state.decoded(before["state"]))
        settings: Mapping[str, Mapping[str, Any]] = before["settings"]
        self._settings.load_(settings)
        self._settings_then = settings
        self._checks.seal()
