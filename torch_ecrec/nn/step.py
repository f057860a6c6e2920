"""One optimizer step of the embeddings: from the lookups of its forward to the single push of its backward.

`SparseStep` is shared by all sharded modules of a model: an optimizer step ends once per backward, however many modules
took part. A *lookup in training* is one made with grad enabled; others read and change nothing.

Invariants. One backward pass is one push, of every trainer, also when it has no rows. A refused step (non-finite
gradients) is refused by all trainers, before anything is sent.

Does not pool, and knows no modules: `lookup.py` and `served.py` do.

Shape legend: U unique rows, D embedding dim; lists hold one tensor per table group.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torchrec.distributed.comm_ops import get_gradient_division

from torch_ecrec.compat.torch import backward_pass, queue_callback
from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.layout.routing import BagRoute, Parts, join_bags, no_bags
from torch_ecrec.nn.agreement import TRAINS, Agreement
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.slices import Bags, PooledBags, Table, without
from torch_ecrec.runtime.checks import plain, shown
from torch_ecrec.state_dicts.shares import Shares

NAN_GRADIENTS = ("raise", "pass")
NOT_COPIED = (
    "a model cannot be copied (`copy.deepcopy`, `model.copy`, `AveragedModel`) once its tables are on the servers,"
    " which have them once: copy it before it is sharded, or copy and average dense modules of it only; the rows of"
    " tables are in `model.state_dict()`"
)


class Ticket:
    """Stands for one training lookup. Its autograd graph holds it, so that a forward thrown away keeps no step open.

    Args:
        owner: whoever has the tables that were looked into.
        made_in: the backward pass within which the lookup was made; -1: in a forward, as it should be.
    """

    def __init__(self, owner: object, made_in: int) -> None:
        self.owner, self.made_in, self.answered = owner, made_in, False


class SparseStep:
    """Collects the gradients of one model's sharded modules, and sends them as one optimizer step.

    A backward pass ends the step. The gradients are sent as soon as every waiting lookup has got its gradient, so that
    the servers work while the rest of the backward runs. If some output was not used in the loss, they are sent when
    the pass is over, before DDP waits for the dense gradients of other trainers.

    Args:
        session: the backend.
        group: a process group of the trainers, used for nothing else; None with one trainer.
        tables_group: the process group of sharded tensors in state dicts; with one trainer these are plain.
        nan_gradients: "raise" refuses a step in which any trainer has a NaN or infinite gradient: `NonFiniteGradient`
            on every trainer when its backward is over, nothing sent. "pass" sends them, as TorchRec does.
    """

    def __init__(
        self,
        session: EmbeddingBackend,
        group: dist.ProcessGroup | None = None,
        nan_gradients: str = "raise",
        tables_group: dist.ProcessGroup | None = None,
    ) -> None:
        if nan_gradients not in NAN_GRADIENTS:
            raise ValueError(f"`nan_gradients` must be one of {', '.join(NAN_GRADIENTS)}, got {nan_gradients!r}")
        self.session, self.agreement = session, Agreement(session, group, looks=nan_gradients != "raise")
        self.may_load: Callable[[], bool] = lambda: True  # whether tables that are loaded now count
        self.on_training_lookup: Callable[[], None] = lambda: None  # called before the first row of a step is asked for
        self.on_written: list[Callable[[str], None]] = []  # load what was written into state dicts (`load_written`)
        self.shares = Shares(session.trainer, session.trainers, tables_group if session.trainers > 1 else None)
        self.closing = False  # this trainer leaves, and others may not: no more collective calls
        self.elsewhere: list[str] = []  # modules that TorchRec steps in the backward, even in a step refused here
        self.form = "sharded"  # form of tables in the state dict being made; see `TablesState.read`
        self.optimizers: list[
            tuple[Sequence[int], Optimizer]
        ] = []  # group i has the learning rate of table group i of these
        self.frozen: list[Callable[[], Sequence[Table]]] = []  # tables that are looked up and not stepped
        self.coming: list[Callable[[], tuple[list[Tensor], list[BagRoute]] | None]] = []  # what goes with a push
        self.on_pushed: list[Callable[[], None]] = []  # called when the rows of the next step may be asked for
        self._refuses_nan = nan_gradients == "raise"
        self._has_met = False  # a step of this life was agreed on; those that pass NaN on agree on the first one only
        self.attached = "nothing attached"  # words for what trainers keep shares of, and must have alike
        self._open = False
        self._waiting: weakref.WeakSet[Ticket] = weakref.WeakSet()  # training lookups without a gradient so far
        self._pass = -1  # id of the backward pass that the fields below belong to
        self._gathered: list[tuple[list[Tensor], Sequence[Tensor | None]]] = []
        self._owners: list[object] = []  # likewise, of their tickets
        self._sums: list[tuple[PooledBags, Tensor, Sequence[Table]]] = []  # likewise, of what slots have pooled
        self._finite = True  # all that was gathered
        self._passes = 0  # backwards through what training forwards of the model gave; alike on all trainers
        self._counted = -1  # id of the last of them
        self._watched: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # outputs that stay
        self._sent = False
        self._repeated = False  # it runs a graph again (retain_graph): nothing tells when it is complete
        self._refusal: NonFiniteGradient | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseStep:
        """Refused, as for any module that holds it (`AveragedModel`, say): the copy would train the same rows.

        Raises:
            TypeError: unless there are no tables.
        """
        if not self.session.job.tables:
            return copy.copy(self)
        raise TypeError(NOT_COPIED)

    def open(self) -> None:
        """Called before anything is read or loaded. The first call ends the loading of initial weights: a barrier."""
        if not self._open:
            self.session.loaded()
            self._open = True

    @property
    def passes(self) -> int:
        """The number of backward passes so far through what training forwards of the model gave."""
        return self._passes

    def watch(self, outputs: Sequence[object]) -> None:
        """Called after a training forward with its output: counts the backward passes through it.

        A trainer whose forward looked up no row pushes nothing in its backward. The others would take its next push for
        that one's, and all would then train on gradients of different steps.
        """
        for output in outputs:
            if not isinstance(output, Tensor) or not output.requires_grad or self._watched.get(id(output)) is output:
                continue
            if output.grad_fn is None:  # a parameter, given out as it is: hooks of it stay
                self._watched[id(output)] = output
            output.register_hook(self._count_pass)

    def _count_pass(self, _: Tensor) -> None:
        task = backward_pass()
        if task != self._counted:
            self._passes += 1
            self._counted = task
            # Registered before any gradient is there, this runs before DDP's own, which waits for the other trainers:
            # one that does something else learns from this step's push that the others train.
            queue_callback(lambda: self._send() if self._pass == task else None)

    def load_written(self, when: str = "all") -> None:
        """Called before a read: loads what was written into state dicts in place. That is a step of all trainers.

        Args:
            when: "all": every trainer calls it here. "training": those that have a state dict do, while the others
                train. "alone": perhaps no other one does, so that with several trainers nothing can be loaded.
                "evaluation": likewise, and many such calls follow each other.
        """
        if when == "training" and not self._refuses_nan:
            when = "alone"  # others would not be met: they agree on nothing
        for load in () if self.closing else self.on_written:
            load(when)

    def hand_over(self, pack: Callable[[int], tuple[Tensor, list[int]]]) -> None:
        """Sends this trainer's part of the dense snapshot of the last step to the servers.

        Writes into state dicts belong to that step, so they are loaded before: a script that resumes there does not
        write them again. With several trainers such writes are refused, since not all of them may come here.

        Args:
            pack: step -> payload and header.
        """
        self.load_written("alone")
        self.session.snapshot(*pack(self.session.step - 1))

    def routes(self, bags: Sequence[Bags]) -> list[BagRoute]:
        """Returns the bags of each table group that slots pool; nothing if there are none."""
        if all(part.pooled is None for part in bags):
            return []
        routes = [no_bags(self.session.job.code.slots) for _ in self.session.job.table_groups]
        for part in bags:
            if part.pooled is not None:
                routes[part.table_group] = part.pooled.there
        return routes

    def lookup(
        self, rows: list[Tensor], bags: Sequence[Bags], evaluation: bool = False
    ) -> tuple[list[Parts], list[Tensor]]:
        """Returns weights (U, D) per table group, in parts, and the sums (G, D) that slots have made of bags, if any.

        With `evaluation` no gradients will follow.
        """
        self.open()
        routes = self.routes(bags)
        if routes:
            return self.session.lookup_bags(rows, routes)
        return self.session.lookup_parts(rows, evaluation), []

    def ticket(self, owner: object) -> Ticket:
        """Returns a ticket for a training lookup. It waits for its gradient until its autograd graph is gone.

        Args:
            owner: whoever has the tables that were looked into. Others have others.
        """
        ticket = Ticket(owner, backward_pass())
        self._waiting.add(ticket)
        return ticket

    @property
    def gradient_divisor(self) -> int:
        """The divisor of row gradients, as in TorchRec: the number of trainers, or 1 if that is switched off."""
        return self.session.trainers if get_gradient_division() else 1

    def receive(
        self,
        ticket: Ticket,
        rows: list[Tensor],
        gradients: Sequence[Tensor | None],
        finite: bool,
        sums: Sequence[tuple[PooledBags, Tensor]] = (),
        frozen: Sequence[Table] = (),
    ) -> None:
        """Called within a backward with gradients (U, D) of one lookup, per table group; None where the loss uses none.

        Args:
            finite: whether they all are.
            sums: bags that slots have pooled, and the gradients (G, D) of their sums.
            frozen: tables that are not trained.

        Raises:
            RuntimeError: it is a backward within a backward, of what was looked up there: one step would be several.
        """
        task = backward_pass()
        if ticket.made_in not in (-1, task):
            raise RuntimeError(
                "rows were looked up again within a backward, and their gradients come in a backward of its own"
                " (`torch.utils.checkpoint` with use_reentrant=True): one backward would be several steps, and the"
                " gradients of other tables would be lost. Take use_reentrant=False, or leave tables out of what is"
                " recomputed"
            )
        if task != self._pass:
            self._pass, self._gathered, self._sent, self._repeated, self._refusal = task, [], False, False, None
            self._finite, self._sums, self._owners = True, [], []
            # Callbacks run in the order of their arrival. DDP adds its own during the pass; being last leaves DDP ready
            # for the next forward when this one raises.
            queue_callback(lambda: queue_callback(self._end_pass))
        self._repeated |= ticket.answered
        ticket.answered = True
        self._waiting.discard(ticket)
        self._gathered.append((rows, gradients))
        self._owners.append(ticket.owner)
        self._sums += [(part, gradient_GD, frozen) for part, gradient_GD in sums]
        self._finite &= finite
        if not self._waiting and not self._repeated:
            self._send()

    def _end_pass(self) -> None:
        self._send()
        self._pass = -1
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _send(self) -> None:
        if self._sent:
            return
        self._sent = True
        bags, of_bags = self._take_sums()
        rows, gradients = self._merge()
        finite = self._finite and len(self._gathered) < 2  # a sum may overflow
        self._gathered = []
        rates = self.rates()
        meets, self._has_met = self._refuses_nan or not self._has_met, True
        refused = self.check_finite(rows, gradients, finite, rates) if meets else None
        ahead = [asked for coming in self.coming if (asked := coming()) is not None]  # while the others come to agree
        self._refusal = refused() if refused is not None else None
        if self._refusal is not None:
            return
        self.session.push(rows, gradients, rates, bags, of_bags, ahead)
        for look_ahead in self.on_pushed:
            look_ahead()

    def begin_load(self, what: str, portions: int) -> int:
        """Begins a load of tables, on every trainer. It takes as many steps as the trainer with most portions has.

        Returns:
            That number.

        Raises:
            RuntimeError: another trainer trains, or loads something else.
        """
        most, *_ = self.agreement.on(f"loads {what}", [portions])
        return most

    def agree_on_written(self, names: Set[str]) -> Set[str] | None:
        """Returns the names of the tables into which any trainer has written, by its state dicts.

        Returns:
            None if not all trainers ask: others train, and have no state dict. Nobody has written anything then.

        Raises:
            RuntimeError: not all trainers ask, and one that does has written something.
        """
        self.open()  # or others might wait for trainer 0 in their first lookup, and trainer 0 here for them
        tables = [table.name for table in self.session.job.tables]
        flags = self.agreement.on_written([int(name in names) for name in tables])
        return None if flags is None else {name for name, flag in zip(tables, flags, strict=True) if flag}

    def _take_sums(self) -> tuple[list[BagRoute], list[Tensor]]:
        """Returns the bags of each table group that slots have pooled, and the gradients of their sums; nothing if none
        are.

        They become gradients of rows where these are needed here: to add those of several lookups into the same tables,
        to leave out frozen tables, or to find what is not finite.
        """
        table_groups, sums, owners = self.session.job.table_groups, self._sums, self._owners
        self._sums, self._owners = [], []
        once = len({id(owner) for owner in owners}) == len(owners)
        kept: list[list[tuple[BagRoute, Tensor]]] = [[] for _ in table_groups]
        for part, gradient_GD, frozen in sums:
            table_group, names = part.tables[0].table_group, {table.job_name for table in frozen}
            if once and self._finite and not any(table.job_name in names for table in part.tables):
                kept[table_group].append((part.there, gradient_GD))
                continue
            rows: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu") for _ in table_groups]
            of_rows: list[Tensor | None] = [None for _ in table_groups]
            rows[table_group], of_rows[table_group] = part.as_rows(
                gradient_GD, self.session.job.layouts[table_group], self.session.arrange
            )
            self._gathered.append(without(frozen, rows, of_rows) if frozen else (rows, of_rows))
        if not any(kept):
            return [], []
        none = no_bags(self.session.job.code.slots)
        routes = [
            join_bags([route for route, _ in of_table_group]) if of_table_group else none for of_table_group in kept
        ]
        gradients = [
            torch.cat(
                [
                    torch.empty(0, table_group.dim, dtype=torch.float32, device="cpu"),
                    *(of_bags for _, of_bags in of_table_group),
                ]
            )
            if len(of_table_group) != 1
            else of_table_group[0][1]
            for table_group, of_table_group in zip(table_groups, kept, strict=True)
        ]
        return routes, gradients

    def _merge(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns rows and gradients per table group. Where several lookups asked for a row, its gradients are summed.

        They are summed in the order in which they came.
        """
        rows, gradients = [], []
        for s, table_group in enumerate(self.session.job.table_groups):
            parts = [(r[s], g) for r, gradients_S in self._gathered if (g := gradients_S[s]) is not None and len(r[s])]
            if len(parts) == 1:
                rows_U, gradient_UD = parts[0][0], parts[0][1].contiguous()
            elif parts:
                rows_U, inverse_N = torch.unique(torch.cat([r for r, _ in parts]), return_inverse=True)
                gradient_UD = torch.zeros(len(rows_U), table_group.dim, dtype=torch.float32, device="cpu")
                gradient_UD.index_add_(0, inverse_N, torch.cat([g for _, g in parts]))
            else:
                rows_U = torch.empty(0, dtype=torch.int64, device="cpu")
                gradient_UD = torch.empty(0, table_group.dim, dtype=torch.float32, device="cpu")
            rows.append(rows_U)
            gradients.append(gradient_UD)
        return rows, gradients

    def check_finite(
        self, rows: list[Tensor], gradients: list[Tensor], finite: bool, rates: list[float]
    ) -> Callable[[], NonFiniteGradient | None]:
        """Begins to agree with the other trainers on whether the step is refused.

        Args:
            rows, gradients: of this trainer, per table group.
            finite: whether these gradients all are.
            rates: learning rates, per table group.

        Returns:
            What waits for the others, and returns why the step is refused, the same on every trainer; None: it is not.
            It raises RuntimeError where another trainer does not train, or with other learning rates (the servers take
            trainer 0's), other tables frozen, another `snapshot_every`, other optimizers attached, or
            after more or fewer backward passes.
        """
        job = self.session.job
        flags = [0] * len(job.tables)
        for table_group, rows_U, gradient_UD in zip(job.table_groups, rows, gradients, strict=True):
            if not finite and self._refuses_nan:
                bad_rows = rows_U[~torch.isfinite(gradient_UD).all(dim=1)]
                first_rows_T = torch.tensor(table_group.first_rows, dtype=torch.int64, device="cpu")
                at = torch.bucketize(bad_rows, first_rows_T, right=True) - 1
                for table in at.unique().tolist():
                    flags[table_group.table_indices[table]] = 1
        frozen = sorted(table.job_name for tables in self.frozen for table in tables())
        alike = f"learning rates {rates}" + (f" or the frozen tables {', '.join(frozen)}" if frozen else "")
        alike += f" or the {self._passes} backward passes so far (rows must be looked up for each, on every trainer)"
        alike += f" or snapshot_every={self.session.snapshot_every} or {self.attached}"
        meeting = self.agreement.begin(TRAINS, flags, alike)
        return lambda: self._refusal_of(meeting.end())

    def _refusal_of(self, flags: list[int]) -> NonFiniteGradient | None:
        """Returns why a step is refused, by the tables that have a flag; None if none has."""
        names = [table.name for table, flag in zip(self.session.job.tables, flags, strict=True) if flag]
        if not names:
            return None
        others = f" on the servers; {', '.join(self.elsewhere)} have stepped all the same" if self.elsewhere else ""
        return NonFiniteGradient(
            f"step {self.session.step}: gradients of {', '.join(names)} hold NaN or infinity;"
            f" nothing of the step was applied{others}."
            ' DistributedModelParallel(..., nan_gradients="pass") applies them, as TorchRec does'
        )

    def rates(self) -> list[float]:
        """Returns the current learning rate of each table group.

        Raises:
            ValueError: tables that share one have several, it is not finite, or another hyperparameter was changed.
        """
        rates: dict[int, float] = {}
        for table_groups, optimizer in self.optimizers:
            for table_group, group in zip(table_groups, optimizer.param_groups, strict=True):
                for name, value in self.session.job.table_groups[table_group].optimizer.fixed:
                    if plain(group.get(name, value)) != value:
                        raise ValueError(
                            f"`{name}` of the fused optimizer was changed from {value} to {group[name]}: of a job that"
                            " runs, the servers take other learning rates only"
                        )
                given = plain(group["lr"])
                if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
                    names = ", ".join(table.name for table in self.session.job.table_groups[table_group].tables)
                    raise ValueError(f"the learning rate of tables {names} must be finite, got {shown(given)}")
                lr = float(given)
                if rates.setdefault(table_group, lr) != lr:
                    names = ", ".join(table.name for table in self.session.job.table_groups[table_group].tables)
                    raise ValueError(
                        f"tables {names} share one optimizer but got learning rates {rates[table_group]} and {lr}"
                    )
        return [rates[table_group] for table_group in range(len(self.session.job.table_groups))]
