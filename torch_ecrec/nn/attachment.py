"""What a trainer has attached: when a step has ended, what is kept of it, and how it is brought back.

**The rule.** A step has ended when the next one begins, and not before: until then the loop may still step schedulers,
count, evaluate, wait. The next one begins

    with a draw          the call for a batch from what `attach` returned, once there is one: at the end of a pass, the
                         next step begins in the next pass
    with a forward       where a pipeline of TorchRec's draws ahead, at the end of a pass: it has nothing left to draw
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
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torch_ecrec.nn import optimizer_steps
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.checksum import checksum_of
from torch_ecrec.nn.dense import DenseSnapshot, dense_parameters, load_, own_of
from torch_ecrec.nn.gradients import WaitingGradients, put_back_
from torch_ecrec.nn.loop import Judge
from torch_ecrec.nn.module_settings import ModuleSettings
from torch_ecrec.nn.random_states import random_states, set_random_states
from torch_ecrec.nn.reader import Reader, Stateful
from torch_ecrec.nn.trainer_state import TrainerState
from torch_ecrec.nn.values import decode, encode

if TYPE_CHECKING:
    from torch_ecrec.nn.parallel import DistributedModelParallel

log = logging.getLogger(__name__)


_attached_somewhere: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # to any model of this process


class Attachment:
    """What `DistributedModelParallel.attach` was given.

    Args:
        model: held weakly.
        dense: packs its dense part; told of the optimizers.
        optimizers, reader, stateful: as given to `attach`, schedulers among `stateful`.
        own: names of those among `stateful` that are the user's: they may count passes, and batches.

    Raises:
        TypeError: something of it cannot be kept.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense: DenseSnapshot,
        optimizers: Sequence[Optimizer],
        reader: Iterable[Any] | None,
        stateful: Mapping[str, Stateful],
        own: Sequence[str],
    ) -> None:
        self._model, self._dense = weakref.ref(model), dense
        self._session: EmbeddingBackend = model.session
        self._state = TrainerState(optimizers, stateful)
        self._own = own
        judge = Judge(self._counters, [stateful[name] for name in own])
        self.reader = None if reader is None else Reader(reader, self._on_draw, judge)
        self._settings = ModuleSettings(model)
        if optimizers:
            dense.use(self._state.dense_optimizers)
        dense.check()
        self.begun = False  # a step of this life has
        self._snapshotted = 0
        self._in_step = self._closed = False
        self._random: dict[str, Any] | None = None  # to be put back when the first step begins
        self._expected: int | None = None  # checksum of its batch
        self._restored = False
        self._settings_then: Mapping[str, Mapping[str, Any]] = {}  # those that training goes on with
        self._settings_at_first: Mapping[str, Mapping[str, Any]] | None = (
            None  # draw of this life, until the first forward
        )
        self._gradients = WaitingGradients(self._state.dense_optimizers)
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(self._state.dense_optimizers)
        _attached_somewhere.update(self._state.dense_optimizers)
        optimizer_steps.watch(self._check_known)
        self._sealed = self._seal()
        self._groups = self._groups_now()

    def close(self) -> None:
        """Looks at optimizers no more. Twice is once."""
        if self.reader is not None and not self._closed:
            self.reader.check_end()
        self._closed = True
        self._gradients.close()

    # when a step begins ---------------------------------------------------------------------------

    def _on_draw(self) -> Callable[[int | None], None] | None:
        """A batch is about to be drawn. If that begins a step, the one before is kept once there is a batch."""
        self._begin()
        if not self._is_due():
            return None
        before = self._before(at_forward=False)
        return lambda checksum: self._keep(before, checksum)

    def on_forward(self, batch: object) -> None:
        """A training forward begins.

        Args:
            batch: what it is called with.

        Raises:
            RuntimeError: the loop cannot be brought back, or trains on another batch after a restart than before.
        """
        if self.reader is not None:
            if self.reader.pipelined and self._settings_at_first is not None:
                self._check_tracing(self._settings_at_first)
            self._settings_at_first = None
            if self.reader.pipelined and self._is_due():
                self._keep(self._before(at_forward=True), None)
            self.reader.on_forward()
        elif not self._in_step:
            self._begin_without_reader(lambda: checksum_of(batch))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step of a loop without a reader; with one, draws say when steps begin.

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
        """A step begins, or perhaps a forward more of the same one."""
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

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            if self._restored:
                self._settings.load_(self._settings_then)
            self._settings_at_first = self._settings.changed()
            self._check_sealed()
            self._check_schedulers()

    def _is_due(self) -> bool:
        step, every = self._session.step - 1, self._live_model.snapshot_every
        return step > self._snapshotted and every > 0 and step % every == 0

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = {}

        def look(value: object, name: str) -> None:
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
    def _live_model(self) -> DistributedModelParallel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this was attached to is gone")
        return model

    def _before(self, at_forward: bool) -> bytes:
        """All that a draw may move, as it is now."""
        return encode(
            {
                "random": random_states() if self.reader is None else None,
                "reader": None if self.reader is None else self.reader.saved(at_forward),
                "state": self._state.encoded(),
                "settings": self._settings.changed(),
            },
            "attached",
        )

    def _keep(self, before: bytes, checksum: int | None) -> None:
        """Hands this trainer's part of the step before to the servers."""
        self._check_groups()
        model, step = self._live_model, self._session.step - 1
        parameters = list(dense_parameters(model))
        own = encode(
            {
                "before": before,
                "checksum": checksum,
                "gradients": self._gradients.find(parameters),
                "dense": checksum_of([parameter.detach() for _, parameter in parameters]),
            },
            "attached",
        )
        self._session.snapshot(*self._dense.pack(step, own))
        self._snapshotted = step

    # restarts -------------------------------------------------------------------------------------

    def resume(self, step: int, parts: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Brings everything back as it was after `step`, which may be 0: as it was made.

        Args:
            parts: payload and header of every trainer's snapshot of that step.

        Raises:
            ValueError: other things are attached than when the snapshot was taken; nothing was changed then.
            RuntimeError: nothing was attached then, or the trainers had trained different dense models.
        """
        self._snapshotted = step
        self._restored = True
        if step == 0:
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
        self._state.check(
            self._state.decoded(before["state"]), ["reader"] * ((before["reader"] is None) != (self.reader is None))
        )
        if self.reader is not None:
            self.reader.load(before["reader"], own["checksum"])
        self._random, self._expected = before["random"], own["checksum"]
        model = self._live_model
        load_(model, self._dense.optimizers, parts, self._session.trainer)
        for _, parameter in dense_parameters(model):
            parameter.grad = None
        put_back_(dict(dense_parameters(model)), own["gradients"])
        self._state.load_(self._state.decoded(before["state"]))
        self._settings_then = before["settings"]
        self._settings.load_(self._settings_then)
        self._sealed = self._seal()

    # what is refused ------------------------------------------------------------------------------

    def _seal(self) -> dict[str, object]:
        """Changes when something that is attached does, by name: values, and versions of tensors."""
        found: dict[str, object] = dict(self._state.encoded())
        for name, parameter in dense_parameters(self._live_model):
            found[name] = parameter._version
        for i, optimizer in enumerate(self._state.dense_optimizers):
            tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
            rates = [str(group.get("lr")) for group in optimizer.param_groups]
            found[f"optimizer {i} ({type(optimizer).__name__})"] = rates, [(id(t), t._version) for t in tensors]
        return found

    def _check_sealed(self) -> None:
        """Nothing that is attached may have moved since `attach`: after a restart that happens once more."""
        now, before, self._sealed = self._seal(), self._sealed, {}
        names = [name.removeprefix("stateful/") for name in now if now[name] != before.get(name)]
        if not names:
            return
        what = f"{', '.join(names)} changed between `attach` and the first step"
        if self._restored:
            raise RuntimeError(
                f"{what}, although training goes on from before: what a loop does there happens once more after each"
                " restart. Do it before `attach`, or at the end of a step or a pass; or set it to a value that depends"
                " on nothing but what was brought back"
            )
        log.warning("%s: after a restart that would happen again, and is refused if the values then differ", what)

    def _check_schedulers(self) -> None:
        """A scheduler that changes what is attached is attached, too."""
        held: list[Any] = list(self._state.stateful.values())
        for thing in list(held):  # what is attached may keep a scheduler for the user
            held += getattr(thing, "__dict__", {}).values()
        known = {id(getattr(thing, "optimizer", None)) for thing in held}
        for optimizer in self._state.all_optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in known:
                raise RuntimeError(
                    f"a scheduler was made for {type(optimizer).__name__}, but not attached: it would begin anew after"
                    " a restart. Name it in `attach(lr_scheduler=...)`"
                )

    def _check_tracing(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """A pipeline runs the model's Python code when it is made: what that counts, it would count again."""
        now = self._settings.changed()
        moved = sorted(
            f"{path}.{name}"
            for path in now.keys() | before.keys()
            for name in now.get(path, {}).keys() | before.get(path, {}).keys()
            if now.get(path, {}).get(name) != before.get(path, {}).get(name)
        )
        if moved:
            raise RuntimeError(
                f"{', '.join(moved)} changed while a pipeline was made, which traces"
                " the model, and would change once more after each restart. Keep counts in a buffer"
                " (`register_buffer`), which tracing leaves alone, and draw from the global generators"
            )

    def _check_groups(self) -> None:
        """Parameters that an optimizer was given later would not be brought back."""
        if self._groups != self._groups_now():
            raise RuntimeError(
                "an optimizer was given parameters after `attach`: it would not have them after a restart, where"
                " `attach` comes first again. Add them before `attach`, with `requires_grad` False until they train"
            )

    def _groups_now(self) -> list[list[int]]:
        return [[len(group["params"]) for group in o.param_groups] for o in self._state.dense_optimizers]

    def _check_known(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if self._closed or optimizer in self._known or isinstance(optimizer, KeyedOptimizer):
            return
        model = self._model()
        if model is None:
            return
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        name = next((name for name, parameter in dense_parameters(model) if id(parameter) in owned), None)
        if name is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps {name}, but was not attached: its state would be lost when trainers"
                " are started again. Name every optimizer of dense parameters in `attach(optimizer=[...])`"
            )
        self._known.add(optimizer)
        named = any(thing is optimizer for thing in self._state.stateful.values())
        if not named and optimizer not in _attached_somewhere:
            log.warning(
                "%s steps parameters outside the model, and was not attached: neither they nor its state are brought"
                " back after a restart. Attach both by name, `attach(..., other=module, other_optimizer=optimizer)`",
                type(optimizer).__name__,
            )
