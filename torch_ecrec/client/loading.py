"""Loading, on the user's thread: records are overwritten, by trainer 0 before training, by all between two steps of it.

    trainer 0   load(...), load(...), end()                         step, step, overwrite(...), step
    others                             end()    training begins     step, step, overwrite(...), step

Before training everybody waits for trainer 0: `end` returns once its own does. What a lost trainer 0 may have loaded is
taken back before the next one loads (`Client.left_behind`). In a cluster that has trained before, all of that does
nothing but wait until the step is known that training goes on after.

In training every trainer calls `overwrite`, at the same place of its loop, with rows of its own or with none: a step of
its own, as safe as any other. A script that was started again and has not asked yet where training goes on (`resumed`)
overwrites nothing, unless no step of training counts: what it would overwrite was trained since.

A cluster that begins with a checkpoint loads that, before training, and whatever a script would load as initial values
counts for nothing. Every trainer reads a share of it, and sends that in portions, each in a step of all. How many there
are is known to all from the start, as shares have known sizes:

    trainer 0   portion   portion   portion   end()     10 rows, 4 at once
    trainer 1   portion   portion   -         end()      7 rows, 4 at once; then it passes

How a load travels, as a step of the protocol, is the client's business.

Shape legend: U unique rows of a slab, M words of a record, b some bytes of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.client.client import LOAD_BYTES, Client
from torch_ecrec.errors import CheckpointError
from torch_ecrec.runtime.tensors import as_array, as_tensor


class Checkpoint(Protocol):
    """What a cluster begins with: `processes/restoring.py:StoredCheckpoint`, `OnShelf` of the simulated trainers."""

    @property
    def done(self) -> int:
        """Steps of training until then."""

    @property
    def inexact(self) -> str | None:
        """Why its records are not those of then, bit for bit; None: they are."""

    def shares(self, trainers: int) -> list[list[int]]:
        """Returns how many rows of each slab each trainer reads. Together they are all that there are; all who ask get
        the same."""

    def records(self, trainer: int, trainers: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every record of a trainer's share once, a block at a time: slab, rows (U,) int64, records (U, B) uint8."""

    def dense(self) -> list[tuple[Tensor, list[int]]]:
        """Every trainer's part of the dense model, in their order: payload and header."""


class Loading:
    """The loading of one trainer's session.

    Args:
        client: the protocol.
        wait: returns once a condition holds, as `Session._wait`.
        restarted: the cluster has trained before, or begins with a checkpoint.
        not_exact: says that the run is not, and why.
        checkpoint: that one.
    """

    def __init__(
        self,
        client: Client,
        wait: Callable[[Callable[[], bool], str, bool], None],
        restarted: bool,
        not_exact: Callable[[str], None],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._client, self._wait_for, self._was_loaded, self._checkpoint = client, wait, restarted, checkpoint
        self._not_exact = not_exact
        self._begun = False  # this trainer has begun to load
        self.resumed = False  # the script knows where training goes on

    def _wait(self, condition: Callable[[], bool], what: str, patient: bool = False) -> None:
        self._wait_for(condition, what, patient)

    @property
    def restarted(self) -> bool:
        """Whether training goes on from what the servers have, or from a checkpoint.

        Trainers that join while it is chosen where they go on are told that values had been loaded. Whether those count
        is waited for; if not, all begin anew, as in a new cluster.
        """
        client = self._client
        if self._checkpoint is not None or not self._was_loaded:
            return self._was_loaded
        self._wait(lambda: client.resumed, "waiting for the cluster")
        return not client.begins_anew

    def before_reading(self) -> None:
        """Trainer 0 may read while it loads; others once it has loaded all."""
        if self._client.trainer == 0 and not self.restarted:
            self._begin()
        elif self._checkpoint is not None:
            self.end()
        else:
            self._await_origin()

    def load(self, slab: int, rows: Tensor, records: Tensor) -> None:
        """See `Session.load`: rows (U,) int64, records (U, M) float32."""
        client = self._client
        if self.restarted:
            return
        if client.trainer != 0:
            raise ValueError(f"only trainer 0 loads initial values, this is trainer {client.trainer}")
        if client.origin is not None:
            step = client.training_step
            raise ValueError(f"initial values are loaded before the first step: loading has ended, at step {step}")
        self._check(slab, rows)
        self._begin()
        self._send(slab, rows, records.contiguous().view(torch.uint8))

    def overwrite(self, slab: int, rows: Tensor, values: Tensor | None, first_byte: int) -> None:
        """See `Session.overwrite`."""
        client = self._client
        if values is not None:
            self._check(slab, rows)
            width, nbytes = values.shape[1], client.job.slabs[slab].schema.nbytes
            if len(values) != len(rows) or not 0 <= first_byte < first_byte + width <= nbytes:
                raise ValueError(
                    f"`values` must have {len(rows)} rows of bytes of records, which have {nbytes},"
                    f" got {tuple(values.shape)} from byte {first_byte}"
                )
        if self.restarted and not self.resumed and client.done:
            return
        client.run(client.without_snapshot)
        if values is not None:
            self._send(slab, rows, values, first_byte)
        else:
            self._wait(client.may_push, f"loading: step {client.step} is waited for")
            client.run(client.pass_)

    def _check(self, slab: int, rows: Tensor) -> None:
        most = self._client.layouts[slab].rows
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(((rows >= 0) & (rows < most)).all()):
            raise ValueError(f"`rows` must be ascending and unique, from 0 to {most - 1}")

    def end(self) -> None:
        """See `Session.loaded`."""
        client = self._client
        if self._checkpoint is not None and self._awaits_checkpoint():
            self._restore(self._checkpoint)
            self._wait(client.all_acknowledged, "restoring a checkpoint", True)
            if client.trainer == 0:
                client.run(client.end_loading)
        elif client.trainer == 0 and not self.restarted:
            self._begin()
            self._wait(client.all_acknowledged, "loading initial values")
            client.run(client.end_loading)
        self._await_origin()

    def _await_origin(self) -> None:
        """Until trainer 0 has said that all is loaded: for as long as its script takes, once the cluster is there."""
        client = self._client
        self._wait(lambda: client.resumed, "waiting for the cluster")
        others = client.trainer != 0
        self._wait(lambda: client.origin is not None, "waiting for trainer 0 to load initial values", others)

    def _begin(self) -> None:
        """Trainer 0, before it reads or loads: what a lost trainer 0 may have loaded is taken back."""
        client = self._client
        self._wait(lambda: client.resumed, "waiting for the cluster")
        if client.origin is None and not self._begun:
            self._begun = True
            for slab, rows in client.left_behind():
                self._send(slab, rows, None)

    def _awaits_checkpoint(self) -> bool:
        """Whether nobody has loaded it so far."""
        self._wait(lambda: self._client.resumed, "waiting for the cluster")
        return self._client.origin is None and not self._begun

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Sends this trainer's share of the checkpoint. All send all records, so that nothing is left of what others
        may have loaded before. Waits for other trainers, which may read for long."""
        client = self._client
        self._begun = client.restores = True
        most_rows = [max(1, LOAD_BYTES // slab.schema.nbytes) for slab in client.job.slabs]
        shares = checkpoint.shares(client.job.trainers)
        steps = [sum(-(-rows // most) for rows, most in zip(share, most_rows, strict=True)) for share in shares]
        sent, given = 0, [0] * len(most_rows)
        for slab, rows_U, records_UB in _portions(checkpoint.records(client.trainer, client.job.trainers), most_rows):
            order_U = np.argsort(rows_U.numpy(), kind="stable")  # a part's rows are a few runs that ascend
            in_order_UB = as_tensor(np.take(as_array(records_UB), order_U, axis=0))
            self._send(slab, as_tensor(rows_U.numpy()[order_U]), in_order_UB, patient=True)
            sent, given[slab] = sent + 1, given[slab] + len(rows_U)
        mine = shares[client.trainer]
        if given != mine:
            raise CheckpointError(
                f"of each slab, {given} rows were read of a checkpoint, {mine} are this trainer's share"
            )
        if (what := checkpoint.inexact) is not None:
            self._not_exact(what)
        for _ in range(max(steps) - sent):
            self._wait(client.may_push, f"restoring: step {client.step} is waited for", True)
            client.run(client.pass_)

    def _send(
        self, slab: int, rows: Tensor, values_Ub: Tensor | None, first_byte: int = 0, patient: bool = False
    ) -> None:
        client = self._client
        self._wait(client.may_push, f"loading: step {client.step} is waited for", patient)
        client.run(client.load, slab, client.route(slab, rows), values_Ub, first_byte)


def _portions(
    blocks: Iterator[tuple[int, Tensor, Tensor]], most_rows: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of any size as portions of exactly `most_rows` of their slab, with what is left of each slab at the end.

    So their number follows from that of the rows. Of each slab, less than a portion and a block is held.
    """
    held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in most_rows]
    counts = [0] * len(most_rows)
    for slab, rows_U, records_UB in blocks:
        held[slab].append((rows_U, records_UB))
        counts[slab] += len(rows_U)
        most = most_rows[slab]
        if counts[slab] >= most:
            rows, records = (torch.cat(parts) for parts in zip(*held[slab], strict=True))
            whole = counts[slab] // most * most
            for first in range(0, whole, most):
                yield slab, rows[first : first + most], records[first : first + most]
            counts[slab] -= whole
            held[slab] = [(rows[whole:].clone(), records[whole:].clone())] if counts[slab] else []
    for slab, left in enumerate(held):
        if left:
            rows, records = (torch.cat(parts) for parts in zip(*left, strict=True))
            yield slab, rows, records
