"""A trainer's session of the cluster: what a model's sharded modules talk to, on the user's thread.

`Client` is driven by messages and never waits. A `Session` runs its methods and waits for what they lead to, with a
time limit, and raises what went wrong in the background meanwhile. It counts steps of training, from 1, where the
client counts loads of initial values, too.

Threads: the user's calls all methods but `fail`, `on_control` and `known`, which any thread may call.

Shape legend: U unique rows of a table group, D embedding dim, M words of 4 bytes of a record, b some bytes of one;
lists hold one tensor per table group. Rows are those of the table group: first row of the table in it, plus the id.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ecrec.client.client import Client
from torch_ecrec.client.loading import Loading
from torch_ecrec.client.waiting import Waiting
from torch_ecrec.layout.routing import BagRoute, Parts, Route, arrange
from torch_ecrec.observe.words import format_gathering, trainers_named
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.status import Gathering, Report, Trained, WaitedFor
from torch_ecrec.records.quantised import unpack
from torch_ecrec.runtime.lifetime import belongs_here

log = logging.getLogger(__name__)

AWAITED_SAID_S = 30.0  # between two words of others that are waited for
CLOSED = (
    "this session is closed: the model has left its cluster (`model.close()`), and no row can be looked up, read or"
    " changed any more. Evaluate, and take `state_dict()`, before it is closed"
)
ROUTES_KEPT = 128  # from `arrange` to the push: as many lookups may be made in a step, and for the next


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a cluster has begun with.

    Attributes:
        done: steps of training until then.
        dense: reads every trainer's part of the dense model, in their order: payload (n,) uint8, and header.
    """

    done: int
    dense: Callable[[], list[tuple[Tensor, list[int]]]]


@dataclass(eq=False)
class _Ahead:
    """A lookup made ahead of its time: of the step it belongs to, and the weights and bags once they are here."""

    step: int
    rows: list[Tensor]
    answer: list[tuple[list[Parts], list[Tensor]]] = field(default_factory=list)

    def is_of(self, rows: Sequence[Tensor]) -> bool:
        return all(a is b for a, b in zip(self.rows, rows, strict=True))


class Session:
    """Connects a model's sharded modules with the servers, by calls that block the trainer's thread.

    Args:
        client: the protocol.
        tell: sends a message to the coordinator.
        on_close: called once by `close`.
        restarted: initial values had been loaded when this trainer joined.
        begins: with which checkpoint the cluster has begun, `restarted` then; None: it has begun anew.
        own: the cluster is the script's own, which has started it.

    Every wait ends within `settings.give_up_s` seconds of the last progress with `ClusterUnavailable` (stacks of all
    threads go to stderr), or with the error that the background reported. While the coordinator says that training
    stands for members that are silent, there is no such limit. Only that ends the wait for another trainer's
    script, which may load for hours: that the trainer is lost, or has left, or that the cluster has ended.
    """

    def __init__(
        self,
        client: Client,
        tell: Callable[[messages.Progress], None],
        on_close: Callable[[], None],
        restarted: bool = False,
        begins: Beginning | None = None,
        own: bool = False,
    ) -> None:
        self.client, self._own = client, own
        self._begins = begins
        self.job, self.trainer, self.trainers = client.job, client.trainer, client.job.trainers
        self._tell, self._on_close = tell, on_close
        self._waiting = Waiting(client.settings.give_up_s)
        self._closed = False
        self._routes: deque[Route] = deque(maxlen=ROUTES_KEPT)
        self._ahead: list[_Ahead] = []
        self._later: list[tuple[int, list[Route]]] = []  # of what was announced: its step, and where its rows live
        self._loading = Loading(client, self._wait, restarted)
        client.on_change, client.on_error, client.on_awaited = self._waiting.notify, self.fail, self._say_awaited
        self._said_s = -math.inf
        self._samples = 0
        belongs_here(self)

    # the background -----------------------------------------------------------------------------

    def known(self) -> messages.Known:
        """Returns what this trainer knows of the run, for a coordinator that was started again."""
        return self.client.known()

    def figures(self) -> Report:
        """Returns the figures that heartbeats carry: how far this trainer is, for whom it waits, and has waited."""
        found: list[WaitedFor] = []
        self.client.run_if_idle(lambda: found.append(self.client.waits.take()))
        trained = Trained(self.client.done, self._samples)
        return Report(waits=found[0] if found else None, awaits=self.client.awaited, trained=trained)

    def fail(self, error: BaseException) -> None:
        """Has the next or present wait raise this error of the background."""
        self._waiting.fail(error)

    @property
    def join(self) -> str | None:
        """Where its coordinator is; None: nobody has said."""
        return self.client.settings.join

    @property
    def told(self) -> bool:
        """Whether an error of the background has been raised to the user."""
        return self._waiting.told

    def on_control(self, word: messages.FromCoordinator) -> None:
        """Handles a message of the coordinator to this trainer."""
        if isinstance(word, messages.Stands):
            self._waiting.stand(word.names, word.left_s)
        elif isinstance(word, messages.Rejoined):  # whoever is there now says it again, if it is so
            self._waiting.stand([], None)
        elif isinstance(word, Gathering):
            join = None if self._own else self.client.settings.join or ""
            lacking = format_gathering(word.servers, word.trainers, join)
            self._waiting.hint = lacking
            log.warning("the cluster has not begun%s", lacking)
        elif isinstance(word, messages.Placed):
            self._waiting.hint = ""
            before = self.client.placement
            if word.placement.restoring and (before is None or not before.restoring):
                log.warning("servers read the checkpoint to begin with: `torch-ecrec status` says how far they are")
        self.client.on_control(word)

    def look_out(self) -> None:
        """Names others that are waited for, from now on; see `Client.look_out`. Called once, where there is a clock."""
        self.client.run(self.client.look_out)

    def overtaken(self) -> bool:
        """Returns whether another trainer has sent its part of the step that is worked on, and this one has not."""
        found: bool = self._run_and_wait(self.client.overtaken, what="who has sent its part of this step")
        return found

    def _say_awaited(self) -> None:
        now_s = self.client.port.now_s()
        if now_s < self._said_s + AWAITED_SAID_S:
            return
        self._said_s = now_s
        log.warning(
            "step %d waits for %s, whose script is at something else, an evaluation, say; and waits on",
            self.client.training_step,
            trainers_named(self.client.awaited),
        )

    def on_forked(self) -> None:
        """Ends this session in a forked child: it is its parent's."""
        self._waiting.renew(RuntimeError("a session cannot be used in a forked child of its process"))
        self.client._lock = threading.Lock()

    def _wait(self, condition: Callable[[], bool], what: str, patient: bool = False) -> None:
        self._waiting.until(condition, what, patient)

    def _run_and_wait(self, action: Callable[..., None], *args: Any, what: str) -> Any:
        """Runs a client method whose last argument is a callback; returns what the callback gets."""
        result: list[Any] = []

        def done(*values: Any) -> None:
            result.append(values[0] if values else None)
            self._waiting.notify()

        self.client.run(action, *args, done)
        self._wait(lambda: bool(result), what)
        return result[0]

    # steps --------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: it is closed, something went wrong, or all that was sent survives."""
        return self._closed or self._waiting.failed or self.client.all_survive

    @property
    def restarted(self) -> bool:
        """The cluster has trained before: `resume` says from where on. Initial values are not loaded then.

        False where all begin anew: trainers were lost, and nothing that had been trained was safe yet.
        """
        return self._loading.restarted

    @property
    def begun(self) -> bool:
        """Whether the cluster can do without this trainer: all are there, or were, or this one's part is over."""
        return self._closed or self._waiting.failed or self.client.resumed

    @property
    def step(self) -> int:
        """The step of training being worked on, from 1."""
        return self.client.training_step

    def _check_training(self) -> None:
        if self._closed:
            raise RuntimeError(CLOSED)
        if self.client.load_end is None:
            raise RuntimeError("training has not begun: every trainer calls `loaded` before its first step")

    def _route(self, rows: Sequence[Tensor]) -> list[Route]:
        """Routes rows, those that `arrange` gave at no cost."""
        routes, all_known = [], [*self._routes, *(route for _, announced in self._later for route in announced)]
        for table_group, rows_U in enumerate(rows):
            known = next((route for route in all_known if route.rows is rows_U), None)
            routes.append(known if known is not None else self.client.route(table_group, rows_U))
        return routes

    def arrange(self, table_group: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the different ones among some rows, in the order that costs least to look up and push.

        Args:
            table_group: which.
            rows: (N,) int64, with repetitions.

        Returns:
            unique (U,) and inverse (N,), int64: unique[inverse] is `rows`.
        """
        found, inverse_N = arrange(self.client.layouts[table_group], rows)
        self._routes.append(found)
        return found.rows, inverse_N

    def lookup_parts(self, rows: Sequence[Tensor], evaluation: bool = False) -> list[Parts]:
        """Weights of rows as they are after the previous step.

        Args:
            rows: per table group, (U,) int64, unique; in the order that `arrange` gave them, they cost least.
            evaluation: no gradient comes of it: they may travel as `evaluation_wire` of the settings says.

        Returns:
            Per table group, one part (u, D) from each slot, float32, or bfloat16 if that is the `wire`; end to end they
            are in the order of `rows`. Not to be written: they may lie in a server's memory.
        """
        self._check_training()
        what = f"lookup of step {self.step}"
        ahead = self._taken_ahead(rows)
        if ahead is not None:
            return ahead[0]
        int8 = self._as_int8(evaluation)
        lookup = functools.partial(self.client.lookup, int8=int8)
        weights: list[Parts] = self._run_and_wait(lookup, self._route(rows), what=what)
        if int8:
            return [[torch.from_numpy(unpack(part_UB.numpy())) for part_UB in parts] for parts in weights]
        return weights

    def _taken_ahead(self, rows: Sequence[Tensor]) -> tuple[list[Parts], list[Tensor]] | None:
        """Waits for the lookup of these rows that was made ahead; None if there was none."""
        ahead = next((a for a in self._ahead if a.step == self.step and a.is_of(rows)), None)
        if ahead is None:
            return None
        self._ahead.remove(ahead)
        self._wait(lambda: bool(ahead.answer), f"lookup of step {self.step}")
        return ahead.answer[0]

    def pooling(self, evaluation: bool) -> str:
        """Returns of which tables slots may pool bags, one of `POOLINGS`: of none where rows travel rounded.

        Args:
            evaluation: of a model in evaluation, whose rows may come as 8 bits a weight.
        """
        return "rows" if self.client.bfloat16 or self._as_int8(evaluation) else self.client.settings.pooling

    def _as_int8(self, evaluation: bool) -> bool:
        return evaluation and self.client.settings.evaluation_wire == "int8"

    def lookup_bags(self, rows: Sequence[Tensor], bags: Sequence[BagRoute]) -> tuple[list[Parts], list[Tensor]]:
        """Weights of rows as `lookup_parts`, and the sums of bags that the slots pool.

        Args:
            rows: as for `lookup_parts`.
            bags: per table group.

        Returns:
            The weights, and per table group (G, D) float32, the sums.
        """
        self._check_training()
        ahead = self._taken_ahead(rows)
        if ahead is not None:
            return ahead

        def look_up(done: Callable[[tuple[list[Parts], list[Tensor]]], None]) -> None:
            self.client.lookup_bags(self._route(rows), bags, lambda *looked: done(looked))

        found: tuple[list[Parts], list[Tensor]] = self._run_and_wait(look_up, what=f"lookup of step {self.step}")
        return found

    def look_ahead(self, rows: Sequence[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        """Asks for what a `lookup_parts` or `lookup_bags` of this step will ask for; does not wait.

        Args:
            rows: the very tensors that it will be called with. If it is not, the answer is dropped.
            bags: those of `lookup_bags`.
        """
        self._check_training()
        ahead, done = self._ahead_of(self.step, rows)
        self._ahead.append(ahead)
        self.client.run(self.client.lookup_bags, self._route(rows), bags, done)

    @property
    def wants_hints(self) -> bool:
        """Whether some server wants to know what later steps will look up: of what it has not in memory."""
        return bool(self.client.hinted)

    def announce(self, later: int, rows: Sequence[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        """Tells the servers what a lookup of a later step will ask for, so that they read or repair it meanwhile.

        It is a hint: nothing comes of it but time.

        Args:
            later: so many steps after this one.
            rows, bags: as for `look_ahead`; of the same tensors that lookup knows where they live.
        """
        self._check_training()
        routes = self._route(rows)
        self._later.append((self.step + later, routes))
        self.client.run(self.client.announce, later, routes, bags)

    def _ahead_of(
        self, step: int, rows: Sequence[Tensor]
    ) -> tuple[_Ahead, Callable[[list[Parts], list[Tensor]], None]]:
        """Returns a lookup ahead of its time, and what is called with its answer."""
        ahead = _Ahead(step, list(rows))

        def done(weights: list[Parts], pooled: list[Tensor]) -> None:
            ahead.answer.append((weights, pooled))
            self._waiting.notify()

        return ahead, done

    def push(
        self,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rates: Sequence[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        ahead: Sequence[tuple[Sequence[Tensor], Sequence[BagRoute]]] = (),
    ) -> None:
        """Sends this trainer's gradients and ends the step.

        Args:
            rows: per table group, (U,) int64, unique; in the order that `arrange` gave them, they cost least.
            gradients: per table group, (U, D) float32, summed over this trainer's batch.
            rates: learning rate per table group.
            bags, bag_gradients: per table group, bags of other rows, and the gradients (G, D) float32 of their sums.
            ahead: what lookups of the next step will ask for, where that is known: rows and bags as for `look_ahead`.
                It is asked for in the same messages.

        Waits only if `window_steps` steps are not acknowledged yet.
        """
        self._check_training()
        routes = self._route(rows)
        self.client.run(self.client.without_snapshot)
        if not self.client.may_push():
            self.client.run(self.client.waits.held, True)
            self._wait(self.client.may_push, f"push of step {self.step}: earlier steps are not acknowledged")
            self.client.run(self.client.waits.held, False)
        coming = [
            (self._route(its_rows), its_bags, *self._ahead_of(self.step + 1, its_rows)) for its_rows, its_bags in ahead
        ]
        then = [self.client.ahead(its_routes, its_bags, done) for its_routes, its_bags, _, done in coming]
        self.client.run(self.client.push, routes, list(gradients), list(rates), bags, bag_gradients, then)
        self._routes.clear()
        self._routes.extend(route for its_routes, *_ in coming for route in its_routes)
        self._ahead = [one for _, _, one, _ in coming]
        self._later = [(step, announced) for step, announced in self._later if step >= self.step]

    @property
    def snapshot_every(self) -> int:
        """A snapshot is expected after each step that is a multiple of it, or after a later one with which its turn
        ends; 0: never. Set it after a `flush` only."""
        return self.client.snapshot_every

    @snapshot_every.setter
    def snapshot_every(self, steps: int) -> None:
        experiment = self.client.settings.experiment
        if steps and experiment.keeps_no_dense_snapshots:
            raise ValueError(
                f"`snapshot_every` must be 0 in the experiment {experiment.mode}, which keeps no dense snapshots,"
                f" got {steps}: unset TORCH_ECREC_EXPERIMENT_MODE to keep some"
            )
        self.client.snapshot_every = steps

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Replicates this trainer's part of the dense model after the previous step; does not wait."""
        if not all(isinstance(number, int) for number in header):
            raise TypeError(f"`header` must be a list of int, got {header!r}")
        self.client.run(self.client.snapshot, payload, header)

    def _stored(self, slot: int, step: int) -> list[tuple[int, int, list[int], Tensor]]:
        have: wire.Snapshots = self._run_and_wait(self.client.stored, slot, step, what=f"snapshots of slot {slot}")
        return list(zip(have.steps, have.trainers, have.headers, have.payloads, strict=True))

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        """Returns where training goes on, in a session that was `restarted`.

        Returns:
            The last step that counts, and the dense model after it: payload and header of every trainer's part, in
            their order. Without parts if it is step 0: the model as it was made.
        """
        client = self.client
        self._wait(lambda: client.resumed, "waiting for the servers to go back to a step that all know")
        begins = self._begins
        if begins is not None and client.resume_done == begins.done:
            self._loading.end()
            self._loading.resumed = True
            return begins.done, begins.dense()
        stored = self._stored(0, client.resume_step) if client.resume_done else ()
        self._loading.resumed = True
        return client.resume_done, [(payload, header) for _, _, header, payload in stored]

    def flush(self) -> None:
        """Waits until everything sent is acknowledged: survives r losses."""
        if self._closed and self.client.all_survive:
            return
        self.client.run(self.client.settle)
        self._wait(lambda: self.client.all_survive, f"flush after step {self.step - 1}")

    # whole records, and initial values ------------------------------------------------------------

    def read(self, table_group: int, rows: Tensor) -> Tensor:
        """Returns (U, M) float32, the memory of records (weights, then optimizer state) of rows of the table group (U,)
        after the last step.

        Where weights have 16 bits two of them are a word: `records.halves.numbers_of` takes them apart.

        Before training, on trainer 0: with all that it has loaded so far. Other trainers wait until it has loaded all;
        in a session that was `restarted` it is as of the step that training goes on after.
        """
        self._loading.before_reading()
        route = self.client.route(table_group, rows)
        records_UB: Tensor = self._run_and_wait(self.client.read, table_group, route, what="reading records")
        return records_UB.view(torch.float32)

    def load(self, table_group: int, rows: Tensor, records: Tensor) -> None:
        """Overwrites records before the first step. Trainer 0 only; does nothing in a session that was `restarted`.
        Does not wait until it survives a loss: `loaded` does.

        Args:
            table_group: which.
            rows: (U,) int64, ascending and unique. Rows may be loaded again: the last values count.
            records: (U, M) float32, the memory of records. Copied.

        Raises:
            ValueError: on another trainer, after `loaded`, or `rows` are not as they must be.
        """
        self._loading.load(table_group, rows, records)

    def overwrite(self, table_group: int, rows: Tensor, values: Tensor | None, first_byte: int = 0) -> None:
        """Overwrites records between two steps of training: every trainer calls it at the same place of its loop.

        Lookups and reads after it have what was written; lookups before it, with gradients to come, keep what they
        have. It survives r losses once it is acknowledged (`flush`); if trainers are lost before the step has ended
        that it belongs to, it is taken back, and they make it again. In a session that was `restarted` it does nothing
        before `resume`, unless no step of training counts.

        Args:
            table_group, rows: which, (U,) int64, ascending and unique; each trainer's own.
            values: (U, b) uint8, copied: bytes of each record from `first_byte` on. None: this trainer writes nothing.
                What several write becomes what the last of them wrote.

        Raises:
            ValueError: `rows` or `values` are not as they must be.
            RuntimeError: before `loaded`.
        """
        self._check_training()
        self._loading.overwrite(table_group, rows, values, first_byte)
        self._routes.clear()
        self._ahead.clear()

    def loaded(self) -> None:
        """Ends the loading of initial values; every trainer calls it once and waits for trainer 0.

        What was loaded survives r losses from then on.
        """
        self._loading.end()

    # the rest -----------------------------------------------------------------------------------

    def trained_on(self, samples: int) -> None:
        """Notes that this trainer trains on so many samples more, for figures."""
        self._samples += samples

    def not_exact(self, what: str) -> None:
        """Notes that from here on this run is not, or may not be, what an undisturbed one is: by a warning, an event,
        and a line of `torch-ecrec status`.

        Args:
            what: has happened, the same on every trainer that says it; of more than 200 characters the first count.
        """
        log.warning("NOT EXACT from step %d on: %s", self.client.done, what)
        self.client.run(self.client.not_exact, what)

    def report(self, **figures: Any) -> None:
        """Tells the coordinator how training goes (step, loss, samples_per_s ...), for status and progress lines."""
        self._tell(messages.Progress(self.trainer, figures.pop("step", 0), figures))

    def close(self) -> None:
        """Leaves the cluster. May be called again. Whatever else is asked of the session then is refused at once."""
        if not self._closed:
            self._closed = True
            try:
                self._on_close()
            finally:
                self._waiting.fail(RuntimeError(CLOSED))
