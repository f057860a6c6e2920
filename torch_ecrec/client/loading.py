"""Loading, on the user's thread: records are overwritten, by trainer 0 before training, by all between two steps of it.

    trainer 0   load(...), load(...), end()                         step, step, overwrite(...), step
    others                             end()    training begins     step, step, overwrite(...), step

Before training everybody waits for trainer 0: `end` returns once its own does. What a lost trainer 0 may have loaded is
taken back before the next one loads (`Client.left_behind`). In a cluster that has trained before, all of that does
nothing but wait until the step is known that training goes on after.

In training every trainer calls `overwrite`, at the same place of its loop, with rows of its own or with none: a step of
its own, as safe as any other. A script that was started again and has not asked yet where training goes on (`resumed`)
overwrites nothing, unless no step of training counts: what it would overwrite was trained since.

A cluster that begins with a checkpoint has loaded that before any trainer goes on, and whatever a script would load as
initial values counts for nothing.

How a load travels, as a step of the protocol, is the client's business.

Shape legend: U unique rows of a table group, M words of a record, b some bytes of one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ecrec.client.client import Client


class Loading:
    """The loading of one trainer's session.

    Args:
        client: the protocol.
        wait: returns once a condition holds, as `Session._wait`.
        restarted: the cluster has trained before, or begins with a checkpoint.
    """

    def __init__(self, client: Client, wait: Callable[[Callable[[], bool], str, bool], None], restarted: bool) -> None:
        self._client, self._wait_for, self._was_loaded = client, wait, restarted
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
        if not self._was_loaded:
            return False
        self._wait(lambda: client.resumed, "waiting for the cluster")
        return not client.begins_anew

    def before_reading(self) -> None:
        """Waits until this trainer may read: trainer 0 may while it loads, others once it has loaded all."""
        if self._client.trainer == 0 and not self.restarted:
            self._begin()
        else:
            self._await_load_end()

    def load(self, table_group: int, rows: Tensor, records: Tensor) -> None:
        """Loads rows (U,) int64 with records (U, M) float32, as `Session.load` says."""
        client = self._client
        if self.restarted:
            return
        if client.trainer != 0:
            raise ValueError(f"only trainer 0 loads initial values, this is trainer {client.trainer}")
        if client.load_end is not None:
            step = client.training_step
            raise ValueError(f"initial values are loaded before the first step: loading has ended, at step {step}")
        self._check(table_group, rows)
        self._begin()
        self._send(table_group, rows, records.contiguous().view(torch.uint8))

    def overwrite(self, table_group: int, rows: Tensor, values: Tensor | None, first_byte: int) -> None:
        """Overwrites records of this trainer's part of a step, as `Session.overwrite` says."""
        client = self._client
        if values is not None:
            self._check(table_group, rows)
            width, nbytes = values.shape[1], client.job.table_groups[table_group].schema.nbytes
            if len(values) != len(rows) or not 0 <= first_byte < first_byte + width <= nbytes:
                raise ValueError(
                    f"`values` must have {len(rows)} rows of bytes of records, which have {nbytes},"
                    f" got {tuple(values.shape)} from byte {first_byte}"
                )
        if self.restarted and not self.resumed and client.done:
            return
        client.run(client.without_snapshot)
        if values is not None:
            self._send(table_group, rows, values, first_byte)
        else:
            self._wait(client.may_push, f"loading: step {client.step} is waited for")
            client.run(client.pass_)

    def _check(self, table_group: int, rows: Tensor) -> None:
        most = self._client.layouts[table_group].rows
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(((rows >= 0) & (rows < most)).all()):
            raise ValueError(f"`rows` must be ascending and unique, from 0 to {most - 1}")

    def end(self) -> None:
        """Ends the loading of initial values, as `Session.loaded` says: trainer 0 declares it, the others wait."""
        client = self._client
        if client.trainer == 0 and not self.restarted:
            self._begin()
            self._wait(client.all_acknowledged, "loading initial values")
            client.run(client.end_loading)
        self._await_load_end()

    def _await_load_end(self) -> None:
        """Waits until trainer 0 has said that all is loaded: for as long as its script takes, once the cluster is
        there."""
        client = self._client
        self._wait(lambda: client.resumed, "waiting for the cluster")
        others = client.trainer != 0
        self._wait(lambda: client.load_end is not None, "waiting for trainer 0 to load initial values", others)

    def _begin(self) -> None:
        """Takes back what a lost trainer 0 may have loaded. Called by trainer 0 before it reads or loads."""
        client = self._client
        self._wait(lambda: client.resumed, "waiting for the cluster")
        if client.load_end is None and not self._begun:
            self._begun = True
            for table_group, rows in client.left_behind():
                self._send(table_group, rows, None)

    def _send(self, table_group: int, rows: Tensor, values_Ub: Tensor | None, first_byte: int = 0) -> None:
        client = self._client
        self._wait(client.may_push, f"loading: step {client.step} is waited for")
        client.run(client.load, table_group, client.route(table_group, rows), values_Ub, first_byte)
