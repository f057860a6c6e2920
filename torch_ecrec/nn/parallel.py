"""`DistributedModelParallel`: TorchRec's own, with the embedding tables on erasure-coded servers.

    model = torch_ecrec.DistributedModelParallel(DLRMTrain(...), device=torch.device("cpu"))

It lists the tables of all collections (of bags, of sequences) in a `JobSpec`, gets a session of the cluster, replaces
the collections' entries in the plan, and leaves the rest to TorchRec: the dense part becomes data-parallel, pipelines
and checkpoints work.

Subclassed, not imitated: TorchRec checks for its own class in many places.

What is neither served nor data-parallel is refused where the model is built (`coverage.py`). A model without tables
is TorchRec's own, and a warning says that nothing of it is kept (`backend.py:NoTables`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Never, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)

from torch_ecrec.compat.torch import (
    IncompatibleKeys,
    ShardedTensor,
    communication_hooks,
    group_of,
    group_with,
    timeout_of,
    tree_leaves,
)
from torch_ecrec.compat.torchrec import ShardedAtAllPaths, is_data_parallel, trainers_of, wrapped_module
from torch_ecrec.nn.attachment import Attachment
from torch_ecrec.nn.attachment_checks import SCHEDULERS
from torch_ecrec.nn.backend import NO_TABLES, EmbeddingBackend, NoTables
from torch_ecrec.nn.coverage import Coverage, check_sharders, coverage_of, is_inside
from torch_ecrec.nn.dense import DenseSnapshot
from torch_ecrec.nn.local_shards import LocalShards, data_parallel, shards_of
from torch_ecrec.nn.recorder import recorded, tell_of_shared_store, tell_unless_rehearsed
from torch_ecrec.nn.reduce import OrderedMean
from torch_ecrec.nn.repeats import samples_of
from torch_ecrec.nn.script_checks import (
    NO_TRACKER,
    averages,
    check_lost_changes,
    check_not_served,
    explain_empty_optimizers,
    refuse_wrappers,
    watch_batches,
)
from torch_ecrec.nn.served import show_tables
from torch_ecrec.nn.sharder import (
    ServedSharding,
    all_table_specs,
    columns_of,
    job_names,
    output_dtypes,
    sharders_for,
    types_in,
)
from torch_ecrec.nn.step import NOT_COPIED, SparseStep
from torch_ecrec.resume.compiled import Compiled
from torch_ecrec.resume.reader import Reader, Stateful
from torch_ecrec.resume.tensor_bytes import TensorsOut, bytes_of
from torch_ecrec.resume.trainer_state import TrainerState, check_optimizers
from torch_ecrec.runtime.checks import plain_copy, require_kind, take_bool, take_int, take_str
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.spec.spread import said_of_padding
from torch_ecrec.state_dicts.kinds import COLLECTIONS
from torch_ecrec.state_dicts.unsharded import configs_of

log = logging.getLogger(__name__)

DIGEST_BYTES = 4 << 20  # of records, read at a time for `digest`


class DistributedModelParallel(ShardedAtAllPaths):
    """A drop-in for `torchrec.distributed.DistributedModelParallel` whose tables survive the loss of servers.

    Args:
        module: the model, unsharded, as in TorchRec.
        env: as in TorchRec.
        device: where the dense part is, as in TorchRec.
        plan: as in TorchRec. A plan made with stock sharders is taken; its entries for what the servers serve are
            replaced.
        sharders: as in TorchRec. Those for modules that the servers do not serve are used.
        init_data_parallel: as in TorchRec.
        init_parameters: as in TorchRec.
        data_parallel_wrapper: as in TorchRec.
        model_tracker_configs: refused: the trackers of TorchRec look into tables that are not in the trainers.
        session: the backend to use. None connects to the cluster that `settings` names, or starts a local one.
        settings: time limits and the cluster's address; None reads the environment.
        code: k, r and number of slots of a local cluster, or that one which is named must have; None takes that one's,
            or the defaults.
        seed: for the tables' initial weights.
        nan_gradients: "raise" refuses a step with NaN or infinite embedding gradients on any trainer, on every trainer,
            with `NonFiniteGradient` out of its backward: no row has changed, and a trainer that skips its optimizer
            step may go on. "pass" applies them, as TorchRec does.
        snapshot_every: the dense part is replicated to the servers after each step that is a multiple of it; 0: never.
        unprotected: what becomes of modules with tables that the servers do not serve, or that the plan leaves to
            TorchRec. "refuse" names them. With others they are TorchRec's: "snapshot" keeps what a plan shards on a CPU
            with every snapshot, as exact as the dense part; "allow" lets a loss of trainers end the training (`attach`
            refuses to go on), "reset" lets it go on with what the script has made anew.

    Attributes:
        coverage: which modules the servers serve.

    Raises:
        ValueError: a collection cannot be served; a module would be protected by nobody; a sharder has a wish that the
            servers do not serve; something was done to a table that would be lost; `session` is of another job.
    """

    _attached: Attachment | None = None
    _closed = _trained = False

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: object | None = None,
        *,
        session: EmbeddingBackend | None = None,
        settings: Settings | None = None,
        code: CodeSpec | None = None,
        seed: int = 0,
        nan_gradients: str = "raise",
        snapshot_every: int = 1,
        unprotected: str = "refuse",
    ) -> None:
        snapshot_every, seed = take_int("snapshot_every", snapshot_every, 0), take_int("seed", seed, 0)
        nan_gradients = take_str("nan_gradients", nan_gradients)
        unprotected = take_str("unprotected", unprotected)
        init_data_parallel = take_bool("init_data_parallel", init_data_parallel)
        init_parameters = take_bool("init_parameters", init_parameters)
        for name, given, kind in (
            ("settings", settings, Settings),
            ("code", code, CodeSpec),
            ("env", env, ShardingEnv),
        ):
            if given is not None:
                require_kind(name, given, kind)
        device = None if device is None else torch.device(device)
        if model_tracker_configs is not None:
            raise ValueError(NO_TRACKER)
        env = _environment() if env is None else plain_copy(env, ("rank", "world_size"))
        others = [s for s in get_default_sharders() if sharders is None] + list(sharders or ())
        check_sharders(others)
        covered = coverage_of(module, plan, others)
        check_lost_changes(module, covered.served, covered.remapping)
        covered.check(unprotected)
        check_not_served(module, type(self).__name__)
        names = job_names(covered.served)
        tables = all_table_specs(module, covered.served, names, others, plan)
        outputs = output_dtypes(module, covered.served, others, plan)
        columns = columns_of(module, covered.served, others, plan)
        connected: EmbeddingBackend | None = None
        if session is None and not tables:
            warnings.warn(NO_TABLES, stacklevel=2)
            session = NoTables(env.rank, env.world_size, snapshot_every)
        elif session is None:
            job = JobSpec(tables=tables, code=code or CodeSpec(), trainers=env.world_size, seed=seed)
            session = connected = _connect(job, settings, code, env.rank, snapshot_every)
        _check_session(session, tables, env)
        if tables and session.trainer == 0 and (padding := said_of_padding(session.job)):
            warnings.warn(padding, stacklevel=2)
        if session.trainer == 0 and plan is not None:
            _tell_of_others_plan(plan, session.job.code)
        session, recorder = recorded(session, self)
        step = SparseStep(session, _group_of_steps(env), nan_gradients, env.process_group)
        wrapper = None if data_parallel_wrapper is None else type(data_parallel_wrapper).__name__
        alike = {  # another trainer with another one would wait for this one, or this one's loss be told too late
            "nan_gradients": nan_gradients,
            "snapshot_every": snapshot_every,
            "unprotected": unprotected,
            "init_data_parallel": init_data_parallel,
            "init_parameters": init_parameters,
            "data_parallel_wrapper": wrapper,
        }
        step.agreement.begin("makes its model", (), ", ".join(f"{n}={value!r}" for n, value in alike.items())).end()
        super().__init__(
            module,
            env=env,
            device=device,
            plan=_plan(covered, plan or _planned(covered, module, env, device, others), env.world_size),
            sharders=[*others, *sharders_for(step, names, others, outputs, columns)],  # the last of a kind counts
            init_data_parallel=init_data_parallel,
            init_parameters=init_parameters,
            data_parallel_wrapper=data_parallel_wrapper,
        )
        watch_batches(self)
        show_tables(self)
        refuse_wrappers()
        explain_empty_optimizers([table.name for table in tables])
        self._step, self.coverage, self._unprotected, self._compiled = step, covered, unprotected, Compiled()
        self._settings = settings
        self._recorder, self._owns_session = recorder, connected is not None  # None but in a rehearsal
        shards = _left_to_torchrec(self.module, step, covered, unprotected)
        every = snapshot_every if session.snapshot_every else 0  # an experiment may be without, whatever is asked for
        self._dense = DenseSnapshot(self, session.trainer, session.trainers, every, shards)
        self._step.on_training_lookup, self._step.may_load = self._keep_dense, self._may_load
        self._abandoned = weakref.finalize(self, _leave, connected)
        self._abandoned.atexit = False

    def init_data_parallel(self) -> None:
        """As in TorchRec, but gradients of three or more trainers are summed in trainer order (`reduce.py`)."""
        before, group = is_data_parallel(self), trainers_of(self)
        with averages(self):
            super().init_data_parallel()
        if not before and group is not None and dist.get_world_size(group) > 2:
            for one in data_parallel(wrapped_module(self)):
                if not communication_hooks(one):  # the user's own stays, see `check_reductions`
                    OrderedMean(_same_trainers(group)).install(one)

    def attach(
        self,
        *,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        lr_scheduler: Stateful | Sequence[Stateful] = (),
        reader: Iterable[Any] | None = None,
        **stateful: Stateful,
    ) -> Reader:
        """Names what must be brought back with the model when trainers are started again; brings it back if they were.

        Every trainer calls it once, before its first step, on the thread that trains:

            batches = model.attach(optimizer=optimizer, lr_scheduler=scheduler, reader=loader)
            for epoch in batches.epochs(3):
                for batch in batches: ...

        A step has ended when the next batch is drawn. After a restart, dense weights,
        optimizers, schedulers, random states, the reader's place and everything else given here are as they were after
        the step that training goes on from (`steps_done`), and the loop goes on in the pass that it was in.

        Weights are loaded before, not after: what `attach` brings back takes precedence over what is loaded.

        What the script keeps for itself and does not name here cannot be seen, and begins anew after a restart. As a
        job begins, trainer 0 warns in the log unless a rehearsal of the script (`torch-ecrec rehearse`) has left its
        mark.

        Args:
            optimizer: all that step the dense parameters; TorchRec's wrappers and combinations as they are. Rates
                of tables come back whether `fused_optimizer` is among them or not.
            lr_scheduler: learning rate schedulers, of tables or of dense parameters.
            reader: where batches come from. With `state_dict` and `load_state_dict` (torchdata's `StatefulDataLoader`
                has them) it is put back by its state; else by drawing again.
                Without a reader, put each step into `with model.step(): ...` if its batch is drawn at random.
            **stateful: anything else with `state_dict` and `load_state_dict`: counters, metrics, a gradient scaler.

        Returns:
            Iterates `reader`, and must be iterated in its place. Without one, it has nothing.

        Raises:
            RuntimeError: called twice, or after the first step; the model has no tables; a scheduler is attached, and
                the optimizer whose rates it sets is neither the tables' nor attached.
            TypeError: something has a state that cannot be kept; the message names it.
            ValueError: other things are attached than when the snapshot was taken, or `wire` or `pooling` is another
                setting than then; nothing was changed.
        """
        if not self.session.job.tables:
            raise RuntimeError(f"`attach` would keep nothing: {NO_TABLES}")
        if self._attached is not None or self._trained:
            raise RuntimeError("`attach` is called once, before the first step")
        self._step.load_written()
        optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        check_optimizers(optimizers)
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        self._step.attached = f"optimizers [{kinds}] attached"
        settings = self._settings or Settings.from_environment()
        schedulers = [lr_scheduler] if isinstance(lr_scheduler, Stateful) else list(lr_scheduler)
        named = {f"{SCHEDULERS}{i}]": scheduler for i, scheduler in enumerate(schedulers)}
        attached = Attachment(
            self,
            self._step,
            self._dense,
            optimizers,
            reader,
            {**named, **stateful},
            own=list(stateful),
            settings=settings,
        )
        if self.session.restarted:
            step, parts = self.session.resume()
            self.coverage.check_loss(step, self._unprotected)
            if (what := self.coverage.lost_by(step, self._unprotected)) is not None:
                self.session.not_exact(what)
            attached.resume(step, parts)
        elif self.session.trainer == 0 and self._recorder is None and self._dense.every:
            tell_unless_rehearsed()
            tell_of_shared_store(self.session.trainers)
        self._attached = attached
        return Reader(()) if attached.reader is None else attached.reader

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Marks one step of a loop that attaches no reader: `with model.step(): ...`.

        What the loop does between two steps counts for the step before. After a restart the first step begins with the
        random states of that moment.
        """
        return contextlib.nullcontext() if self._attached is None else self._attached.step()

    @property
    def steps_done(self) -> int:
        """The number of steps that have ended, those before a restart included; 0 for a model without tables."""
        if self._attached is not None and self._attached.reader is not None:
            self._attached.reader.on_steps_done()
        return self.session.step - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped model, as in TorchRec."""
        if torch.is_grad_enabled() and self.training:
            self._before_training(args, kwargs)
        outputs = super().forward(*args, **kwargs)
        if torch.is_grad_enabled() and self.training:
            self._after_training(outputs)
        return outputs

    @torch.compiler.disable
    def _before_training(self, *batch: Any) -> None:
        """Called before the forward of a training step."""
        self._trained = True
        self.session.trained_on(samples_of(batch, 3))
        self._check_attached()
        if self._attached is not None:
            if self._dense.every:
                self._compiled.check(self, self.session.step)
            self._attached.on_forward(batch)
        if self._recorder is not None:
            self._recorder.on_forward(batch)

    @torch.compiler.disable
    def _after_training(self, outputs: object) -> None:
        """Called after the forward of a training step."""
        self._step.watch(tree_leaves(outputs))
        if self._attached is not None:
            self._attached.after_forward()

    def load_state_dict(
        self, state_dict: Any, prefix: str = "", strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Loads a state dict, as in TorchRec, at any time. Every trainer calls it at the same place of its script.

        Tables may be sharded in any way: each trainer loads the rows that it has. Of a whole table trainer 0's counts.
        In the loop it belongs to the turn that it is in, and survives the same losses. What a script loads before it
        goes on after a restart was trained since: between `attach` and the first step nothing is loaded then. `assign`
        is taken, as `torch.distributed.checkpoint` gives it, and of no effect: values are copied.
        """
        if not self._may_load():
            return IncompatibleKeys([], [])
        keys: IncompatibleKeys = super().load_state_dict(state_dict, prefix, strict)
        if self._attached is not None:
            self._attached.on_loaded()
        return keys

    def full_state_dict(self) -> dict[str, Any]:
        """Returns `state_dict` with whole tensors on the CPU on trainer 0, {} on others. Every trainer calls it.

        It is for `torch.save`, exports and comparisons. Trainer 0 needs memory for all tables, which it reads from the
        servers in portions. The other trainers need none.
        """
        made = _gathered(self._in_form("whole", self.state_dict))
        return made if self._step.session.trainer == 0 else {}

    def full_optim_state_dict(self) -> dict[str, Any]:
        """Returns `fused_optimizer.state_dict()` in the form of `full_state_dict`. Every trainer calls it."""
        made = _gathered(self._in_form("whole", self.fused_optimizer.state_dict))
        return made if self._step.session.trainer == 0 else {}

    def streamed_state_dict(self) -> dict[str, Any]:
        """Returns `state_dict` for `torch_ecrec.checkpoint`: tables hold no rows yet. Every trainer calls it.

        Raises:
            RuntimeError: another one does something else, and would be waited for in vain.
        """
        self._step.open()
        self._step.agreement.on("saves or loads by `torch_ecrec.checkpoint`", ())
        return self._in_form("streamed", self.state_dict)

    def streamed_optim_state_dict(self) -> dict[str, Any]:
        """Returns `fused_optimizer.state_dict()` in the form of `streamed_state_dict`. Every trainer calls it."""
        return self._in_form("streamed", self.fused_optimizer.state_dict)

    def _in_form(self, form: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._step.form = form
        try:
            return make()
        finally:
            self._step.form = "sharded"

    @property
    def session(self) -> EmbeddingBackend:
        """This trainer's connection with the servers."""
        return self._step.session

    @property
    def snapshot_every(self) -> int:
        """Snapshots of the dense part are kept after every so many steps; 0: never. Setting it flushes first."""
        return self._dense.every

    @snapshot_every.setter
    def snapshot_every(self, steps: int) -> None:
        steps = take_int("snapshot_every", steps, 0)
        self.flush()
        self._dense.every = self.session.snapshot_every = steps

    def flush(self) -> None:
        """Waits until all that was sent to the servers so far survives r losses. Every trainer calls it, at any time.

        The dense model after the step under way is sent once that step has ended. If trainers are lost before, they
        make the step again.
        """
        self._step.open()
        self._step.load_written()
        if not self.session.restarted:  # else nothing is kept, or has been trained, before `attach`
            self._keep_dense()
        self.session.flush()

    def close(self) -> None:
        """Flushes, and leaves the cluster if this object joined it. Every trainer calls it; it may be called again."""
        if self._closed:
            return
        self._closed = self._step.closing = True
        self._abandoned.detach()
        try:
            self.flush()
        finally:
            self._dense.close()
            if self._attached is not None:
                self._attached.close()
            if self._owns_session:
                self.session.close()

    def digest(self, tables: bool = True) -> str:
        """Returns the SHA-256 of all model state that this trainer would restore: equal exactly when every bit is.

        Of every record (weights and optimizer state) of every table in row order; of what all trainers have alike
        (dense parameters, all of their optimizers, maps of managed collisions, rates of the tables); and of what this
        trainer has of its own (buffers, what snapshots keep of TorchRec's tables). So two runs have trained the same if
        each trainer's is equal, whatever the placement, the number of servers and the code are. Not in it: what else is
        attached, such as the reader's place or a counter.

        Args:
            tables: whether to read them, all of them: for checks, on one trainer, after `flush`. The others leave them
                out: what they read is the same.

        Raises:
            TypeError: something of an optimizer cannot be kept, so that it has no bytes; says what.
        """
        optimizers = [] if self._attached is None else self._attached.optimizers
        numbers = TrainerState(optimizers, {}, self.fused_optimizer).encoded()
        dense = _parts_of_dense(*self._dense.content())
        return _digest_of(itertools.chain(numbers.values(), dense, _parts_of_tables(self.session) if tables else ()))

    def init_torchrec_delta_tracker(self, *_: Any, **__: Any) -> Never:
        """Raises ValueError: a delta tracker would see no change, since the rows are on the servers."""
        raise ValueError(NO_TRACKER)

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """As in TorchRec where there are no tables.

        Raises:
            TypeError: there are. TorchRec's would raise, too, but without a GPU it leaves `Tensor.__deepcopy__`
                replaced by a function that copies nothing: any later `copy.deepcopy` would share its tensors.
        """
        if self.session.job.tables:
            raise TypeError(NOT_COPIED)
        return cast(DistributedModelParallel, super().copy(device))

    def reshard(self, changed_shard_to_params: Any, sharded_module_fqn: str | None = None) -> Never:
        """Raises ValueError: no trainer holds rows that could move to another trainer."""
        raise ValueError(
            "`reshard` moves tables between trainers, and they are on the servers; `torch-ecrec drain` moves those"
        )

    def _may_load(self) -> bool:
        """Returns whether a load counts: after a restart it does not between `attach` and the first step."""
        if self._attached is None or self._attached.begun or not self.session.restarted or self.session.step == 1:
            return True
        done = self.session.step - 1
        log.warning("training goes on after step %d: what is loaded before the next one was trained since", done)
        return False

    def _check_attached(self) -> None:
        if self.session.restarted and self._attached is None:
            raise RuntimeError(
                "the servers have trained before, and go on from there; call `attach` before the first step, so that"
                " the dense model does, too (or start a new cluster)"
            )

    def _keep_dense(self) -> None:
        """Sends a snapshot of the dense model, if nothing is attached: as it is when the next rows are looked up."""
        self._check_attached()
        if self._attached is None and self._dense.is_due(self.session.step - 1):
            self._step.hand_over(self._dense.pack)


def _gathered(value: Any) -> Any:
    """Replaces the sharded tensors of a state dict by whole ones on trainer 0. Every trainer calls it."""
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _gathered(value[key])
    elif isinstance(value, ShardedTensor):
        # TorchRec's metadata have the default dtype of the script, whatever the shards have
        dtypes: list[Any] = [None] * dist.get_world_size(group := group_of(value))
        dist.all_gather_object(dtypes, [shard.tensor.dtype for shard in value.local_shards()], group)
        dtype = next(one for of_rank in dtypes for one in of_rank)
        first = dist.get_rank(group) == 0
        whole = torch.empty(value.metadata().size, dtype=dtype, device="cpu") if first else None
        value.gather(dst=0, out=whole, dtype=dtype)
        return whole
    return value


def _environment() -> ShardingEnv:
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first, or pass `env`")
    return ShardingEnv.from_process_group(dist.group.WORLD)


def _plan(covered: Coverage, given: ShardingPlan | None, world_size: int) -> ShardingPlan:
    """Joins the given plan for modules that are TorchRec's with our own entries for those that are served."""
    planned = given.plan.items() if given is not None else ()
    plan = {path: entry for path, entry in planned if is_inside(path, covered.left)}
    around = {inside: path for path, inside in covered.remapping.items()}
    for inside, module in covered.served.items():
        kinds = types_in(given, inside, module)
        plan[around.get(inside, inside)] = EmbeddingModuleShardingPlan(
            {
                config.name: ParameterSharding(kinds[config.name], "parameter_server", ranks=list(range(world_size)))
                for config in configs_of(module)
            }
        )
    return ShardingPlan(plan)


def _left_to_torchrec(model: nn.Module, step: SparseStep, covered: Coverage, unprotected: str) -> LocalShards:
    """Returns the tables sharded by TorchRec that snapshots keep; tells `step` of all that TorchRec shards."""
    left = shards_of(model, covered.unprotected)
    step.elsewhere = list(left)
    return LocalShards({path: left[path] for path in covered.planned if unprotected == "snapshot"})


def _planned(
    covered: Coverage,
    module: nn.Module,
    env: ShardingEnv,
    device: torch.device | None,
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> ShardingPlan | None:
    """Returns the plan of TorchRec's planner for the unprotected modules; None if there are none."""
    if not covered.unprotected:
        return None
    sharders = [sharder for sharder in sharders if sharder.module_type not in COLLECTIONS]
    topology = Topology(
        world_size=env.world_size,
        local_world_size=get_local_size(env.world_size),
        compute_device="cpu" if device is None else device.type,
    )
    return EmbeddingShardingPlanner(topology=topology).collective_plan(module, sharders, env.process_group)


def _group_of_steps(env: ShardingEnv) -> dist.ProcessGroup | None:
    """Makes the process group for what `SparseStep` agrees on, on every trainer; None with one trainer."""
    if env.world_size == 1:
        return None
    return _same_trainers(env.process_group, "gloo")


def _same_trainers(group: dist.ProcessGroup | None, backend: str | None = None) -> dist.ProcessGroup:
    """Makes another process group of the same trainers. Each of them calls it.

    If these are all processes, the group is made by all. Torch names a group that only its members make by how many
    groups each of them is in. A script with a group of some of the trainers would then wait for ever here.

    One trainer may be at something else, an evaluation, say, for as long as in the script's own group, or as torch's
    default for the backend if that is longer.
    """
    ranks, limit = dist.get_process_group_ranks(group), timeout_of(group)
    if backend is not None and limit is not None and limit <= dist.default_pg_timeout:
        limit = None
    return group_with(ranks, backend, alone=len(ranks) < dist.get_world_size(), timeout=limit)


def _check_session(session: EmbeddingBackend, tables: tuple[Any, ...], env: ShardingEnv) -> None:
    if (session.trainer, session.trainers) != (env.rank, env.world_size):
        raise ValueError(
            f"the session is of trainer {session.trainer} of {session.trainers},"
            f" but this process is rank {env.rank} of {env.world_size}"
        )
    if session.job.tables != tables:
        raise ValueError(
            f"the session's job has other tables: {[t.name for t in session.job.tables]}"
            f" there, {[t.name for t in tables]} here, or their sizes or optimizers differ"
        )


def _tell_of_others_plan(plan: ShardingPlan, code: CodeSpec) -> None:
    """Warns of a plan that was made for other servers than the cluster has: tables may not fit there."""
    entries = [one for of_one in plan.plan.values() for one in cast(Any, of_one).values()]
    planned = next((one.code for one in entries if isinstance(one, ServedSharding) and one.code), code)
    if planned != code:
        log.warning(
            "the plan was made for %s, and the cluster has %s: what the planner says of memory and traffic is not of it"
            " (training is as exact). Give the planner what there is: Servers(CodeSpec(%d, %d, %d))",
            *(planned.words, code.words, code.slots, code.k, code.r),
        )


def _leave(session: EmbeddingBackend | None) -> None:
    """Leaves the cluster for a session whose model was garbage-collected unclosed, unless the process ends."""
    if session is None:
        return
    from torch_ecrec.client.session import Session
    from torch_ecrec.processes import launch

    if isinstance(session, Session) and not sys.is_finalizing():
        Worker(lambda: launch.abandon(session), "abandoned", log_error).start()


def _connect(
    job: JobSpec, settings: Settings | None, code: CodeSpec | None, trainer: int, snapshot_every: int
) -> EmbeddingBackend:
    """Joins the cluster. Imports are deferred: with a session given, nothing of the cluster is needed."""
    from torch_ecrec.processes import launch

    settings = settings or Settings.from_environment()
    return launch.connect(job, settings, trainer=trainer, code=code, snapshot_every=snapshot_every)


def _digest_of(parts: Iterable[bytes]) -> str:
    """Returns the SHA-256 of some byte strings, each preceded by its length."""
    result = hashlib.sha256()
    for part in parts:
        result.update(len(part).to_bytes(8, "little"))
        result.update(part)
    return result.hexdigest()


def _parts_of_tables(session: EmbeddingBackend) -> Iterator[bytes]:
    """Yields every record of every table in row order, read in chunks."""
    for table in session.job.tables:
        table_group, first = session.job.place_of_table[table.name]
        yield table.name.encode()
        portion = max(1, DIGEST_BYTES // session.job.table_groups[table_group].schema.nbytes)
        for begin in range(0, table.rows, portion):
            rows = torch.arange(begin, min(begin + portion, table.rows), dtype=torch.int64, device="cpu")
            yield session.read(table_group, first + rows).numpy().tobytes()


def _parts_of_dense(index: bytes, tensors: TensorsOut, whole: bytes) -> Iterator[bytes]:
    """Yields the bytes of the dense part that a snapshot keeps, from what `DenseSnapshot.content` returns."""
    yield index
    for tensor in tensors.tensors:
        yield bytes_of(tensor).cpu().numpy().tobytes()
    yield whole
