"""A trainer of tests of how trainers end, and of what their forked children keep. Run: python ends_child.py ORDERS

ORDERS is a JSON object: how (below), join (HOST:PORT or null: a local cluster), rank, trainers, store (a file, for the
process group), steps (trained first). It says JSON lines; after {"ready": ...} it goes on with what `how` names.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from cluster_child import job, lookup, touched

from torch_ecrec.client.session import Session
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes import launch
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

LIMIT_S = 600.0
ABORT_S = 2.0
SAVING_S = 3 * ABORT_S


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def save() -> None:
    """What a user does with what there is: nothing of torch, and not at once."""
    say(caught=type(sys.exc_info()[1]).__name__)
    time.sleep(SAVING_S)
    say(saved=True)


def step(session: Session) -> None:
    rows = touched(session, session.step)
    session.push(rows, [part * 0.25 for part in lookup(session, rows)], [0.1] * len(rows))
    session.snapshot(torch.zeros(8, dtype=torch.uint8), [1])


def train(session: Session) -> None:
    """Until it learns that another trainer is gone."""
    while True:
        step(session)


class Ends:
    """One way each to learn that another trainer is gone, or not to."""

    def waits(self, session: Session) -> None:
        threading.Event().wait()

    def catches(self, session: Session) -> None:
        try:
            train(session)
        except ClusterError:
            save()

    def catches_a_collective(self, session: Session) -> None:
        try:
            dist.all_reduce(torch.zeros(4))
        except RuntimeError:
            save()

    def is_busy_with_its_own(self, session: Session) -> None:
        time.sleep(SAVING_S)
        try:
            train(session)
        except ClusterError:
            save()

    def hangs_in_a_collective(self, session: Session) -> None:
        dist.all_reduce(torch.zeros(4))

    def hangs_in_a_backward(self, session: Session) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
        model(torch.ones(2, 4)).sum().backward()

    def hangs_at_its_end(self, session: Session) -> None:
        ThreadPoolExecutor(1).submit(dist.all_reduce, torch.zeros(4))
        train(session)

    def saves_at_its_end(self, session: Session) -> None:
        def save_when_told() -> None:
            while not session.told:
                time.sleep(0.01)
            save()

        ThreadPoolExecutor(1).submit(save_when_told)
        train(session)


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Made by what a worker may use of the package."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        from torch_ecrec.layout.routing import arrange
        from torch_ecrec.layout.stripes import Layout
        from torch_ecrec.runtime import shared

        found, inverse = arrange(Layout(3, 2, 1, 100), torch.tensor([7, 3, 7, index]))
        assert shared.pool() is None and torch.equal(found.rows[inverse], torch.tensor([7, 3, 7, index]))
        shared.empty((1 << 16,), "uint8")[:] = index
        return index, os.getpid()


class Forks:
    """What a trainer with forked children does."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []  # they end their workers when they are gone

    def loader(self, session: Session, persistent: bool) -> None:
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
        )
        epochs = 2 if persistent else 1
        seen: list[int] = []
        for _ in range(epochs):
            batches = iter(loader)
            for _ in range(4 if persistent else 3):
                numbers, _ = next(batches)
                seen += numbers.tolist()
                step(session)
        session.flush()
        self._loaders += [loader, batches]
        assert sorted(seen) == (sorted([*range(8), *range(8)]) if persistent else [*range(6)])
        say(workers=sorted({worker.pid for worker in batches._workers}))
        threading.Event().wait()

    def workers(self, session: Session) -> None:
        self.loader(session, persistent=False)

    def persistent_workers(self, session: Session) -> None:
        self.loader(session, persistent=True)

    def plain_forks(self, session: Session) -> None:
        """Children that end in order, with all that an interpreter does at its end, and use what is not theirs."""
        codes = []
        for use in (False, True):
            child = os.fork()
            if child == 0:
                if use:
                    with contextlib.suppress(RuntimeError):
                        lookup(session, touched(session, session.step))
                        sys.exit(8)
                    session.close()
                sys.exit(7)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for _ in range(5):
            step(session)
        session.flush()
        say(codes=codes)
        session.close()


def too_long() -> None:
    faulthandler.dump_traceback()
    os._exit(1)


def main() -> None:
    limit = threading.Timer(LIMIT_S, too_long)  # not faulthandler's: forked children wait for its thread, in vain
    limit.daemon = True
    limit.start()
    torch.set_num_threads(1)
    launch.ABORT_S = ABORT_S
    orders = json.loads(sys.argv[1])
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()  # the test is gone
    settings = Settings.from_environment(join=orders["join"])
    if orders["trainers"] > 1:
        store = dist.FileStore(orders["store"], orders["trainers"])
        dist.init_process_group("gloo", store=store, rank=orders["rank"], world_size=orders["trainers"])
    session = launch.connect(job(orders["trainers"]), settings, orders["rank"], code=CodeSpec(3, 2, 1))
    session.loaded()
    for _ in range(orders["steps"]):
        step(session)
        if orders["trainers"] > 1:
            dist.all_reduce(torch.zeros(4))
    session.flush()
    say(ready=os.getpid())
    kind: Any = Ends if hasattr(Ends, orders["how"]) else Forks
    getattr(kind(), orders["how"])(session)


if __name__ == "__main__":
    main()
