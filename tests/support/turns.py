"""Trainers' scripts as threads that take turns, with a process group: a job of several trainers in one process.

One thread runs at a time. Who waits (for a server, for the other trainers in a collective) lets the others run, in
their order; when all of them wait, time passes (`idle`). So a run is the same in every process: nothing is concurrent.

    turns = Turns(idle=clock.advance)
    with one_process():
        turns.start(0, lambda: train(rank=0, world=2))
        turns.start(1, lambda: train(rank=1, world=2))
        turns.run()

What a process has for itself (states of random generators, the world of `torch.distributed`) each thread has here, too.
The collectives are torch's own for threads (`multi_threaded_pg`), but for how they wait.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from torch_ecrec.nn import parallel, reduce
from torch_ecrec.state_dicts import streamed

TURN_LIMIT_S = 300.0  # reached by a hang only


class Lost(BaseException):
    """The trainer whose thread gets this is lost."""


@dataclass(eq=False)
class _Thread:
    key: Any
    body: Callable[[], None]
    may_go_on: Callable[[], bool]
    lost: Callable[[], bool]
    what: str = "its first turn"
    error: BaseException | None = None
    states: Any = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    collectives: int = 0


def _states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


class Turns:
    """Threads that take turns.

    Args:
        idle: lets something happen when all of them wait; false if nothing can.
    """

    current: Turns

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._idle = idle
        self._threads: list[_Thread] = []
        self._mine = threading.local()
        self._back = threading.Semaphore(0)
        self._meetings: dict[Any, _Meeting] = {}

    def start(self, key: Any, body: Callable[[], None], lost: Callable[[], bool] = lambda: False) -> None:
        """A thread begins when it is its turn. Once `lost` holds, it gets `Lost` where it waits.

        It begins with the random states of now.
        """
        one = _Thread(key, body, lambda: True, lost, states=_states())
        one.thread = threading.Thread(target=self._live, args=[one], daemon=True, name=f"trainer {key}")
        self._threads.append(one)
        self._threads.sort(key=lambda each: each.key)
        one.thread.start()

    def _live(self, me: _Thread) -> None:
        self._mine.thread = me
        me.go.acquire()
        try:
            if not me.lost():
                me.body()
        except Lost:
            pass
        except BaseException as error:  # the thread that runs them raises it
            me.error = error
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            self._threads.remove(me)
            self._back.release()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """In a thread: others go on until `condition` holds."""
        me: _Thread = self._mine.thread
        if me.lost():
            raise Lost
        if condition():
            return
        me.may_go_on, me.what = condition, what
        self._back.release()
        me.go.acquire()
        if me.lost():
            raise Lost

    def run(self, done: Callable[[], bool] = lambda: False) -> None:
        """Until no thread is left, and `done` holds. Raises what a thread has raised."""
        try:
            while self._threads or not done():
                moved = False
                for one in list(self._threads):
                    if one.lost() or one.may_go_on():
                        moved = True
                        self._turn(one)
                if not moved and not self._idle():
                    raise AssertionError(f"stuck: {[(one.key, one.what) for one in self._threads]}")
        finally:
            for one in list(self._threads):  # so that none is left behind
                one.lost = lambda: True
                while one in self._threads:
                    self._turn(one, quiet=True)

    def _turn(self, one: _Thread, quiet: bool = False) -> None:
        mine = _states()
        _set_states(one.states)
        one.go.release()
        assert self._back.acquire(timeout=TURN_LIMIT_S), f"trainer {one.key} hangs in its turn"
        one.states = _states()
        _set_states(mine)
        if one.error is not None and not quiet:
            raise one.error

    def meet(self, kind: Any, group: ProcessLocalGroup) -> _Meeting:
        """The next collective of the running thread in a group."""
        me: _Thread = self._mine.thread
        counts = me.__dict__.setdefault("counts", {})
        number = counts[group.pg_name] = counts.get(group.pg_name, 0) + 1
        key = (me.__dict__["life"], group.pg_name, number)
        if key not in self._meetings:
            self._meetings[key] = _Meeting(self, kind, group.size())
        return self._meetings[key]

    def join(self, rank: int, world: int, life: int) -> None:
        """In a thread: makes its world of `torch.distributed`."""
        self._mine.thread.__dict__["life"] = life
        dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())


class _Meeting:
    """One collective: who comes waits for the others; the last one does the work of all."""

    def __init__(self, turns: Turns, kind: Any, world: int) -> None:
        self._turns, self._kind, self._data = turns, kind, [None] * world
        self._count, self._world = 0, world

    def join(self, rank: int, data: Any) -> Any:
        assert self._data[rank] is None
        self._data[rank] = data
        self._count += 1
        if self._count == self._world:
            self._kind.work(self._data)
        self._turns.until(lambda: self._count == self._world, f"collective {type(self._kind).__name__}")
        return multi_threaded_pg.ret_work(data)


class _Group(ProcessLocalGroup):
    def _get_backend_name(self) -> str:
        """Torch takes any other for one of GPUs."""
        return "gloo"


BACKEND = "turns"
dist.Backend.register_backend(BACKEND, lambda _store, rank, size, _: _Group(rank, size), devices=["cpu"])


class _AtOnce:
    """An executor that does what it is given in the thread that asks."""

    def __init__(self, *_: Any) -> None: ...

    def submit(self, do: Callable[[], None]) -> None:
        do()


def _same_trainers(group: dist.ProcessGroup | None, backend: str | None = None) -> dist.ProcessGroup:
    """As `parallel._same_trainers`, of this backend."""
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group))
    return made


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Within, threads have worlds of `torch.distributed` of their own, whose collectives take turns."""
    with (
        mock.patch.object(sys, "excepthook", sys.excepthook),  # each group puts a rank before it
        mock.patch.object(ProcessLocalGroup, "_start_coll", lambda kind, group: Turns.current.meet(kind, group)),
        mock.patch.object(ProcessLocalGroup, "_end_coll", lambda kind, group: None),
        mock.patch.object(parallel, "_same_trainers", _same_trainers),
        mock.patch.object(reduce, "ThreadPoolExecutor", _AtOnce),
        mock.patch.object(streamed, "_ONE_AT_A_TIME", contextlib.nullcontext()),  # of one process
    ):
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()
        try:
            yield
        finally:
            multi_threaded_pg._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
