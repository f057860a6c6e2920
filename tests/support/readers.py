"""Readers of every kind, and loops that draw from them, for tests of which batch comes next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_ecrec.resume.loop import PIPELINES
from torch_ecrec.resume.reader import Reader
from torch_ecrec.resume.values import decode, encode

PASS = 4


class Passes:
    """Stateful: 100 * pass + place."""

    def __init__(self) -> None:
        self.turn, self.place = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < PASS:
            self.place += 1
            yield 100 * self.turn + self.place
        self.turn, self.place = self.turn + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn, self.place = state["turn"], state["place"]


class Growing:
    """No state that anybody could see: goes on where it was in every pass."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(PASS):
            self.place += 1
            yield self.place


class Numbers(Dataset[Tensor]):
    def __init__(self, augmented: str = "") -> None:
        self.augmented = augmented

    def __len__(self) -> int:
        return PASS

    def __getitem__(self, index: int) -> Tensor:
        noise = {"": lambda: 0.0, "torch": lambda: float(torch.rand(())), "random": random.random}[self.augmented]()
        return torch.tensor(index + noise)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(PASS):
            yield torch.rand(())


def loader(**more: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(), batch_size=1, **more)


MADE: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: list(range(PASS)),
    "range": lambda: range(PASS),
    "stateful": Passes,
    "growing": Growing,
    "generator": lambda: (i for i in range(50)),
    "loader": loader,
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([0.1, 0.4, 0.2, 0.3], PASS)),
    "augmented": lambda: DataLoader(Numbers("torch"), shuffle=True),
    "workers": lambda: DataLoader(Numbers("random"), shuffle=True, num_workers=2),
    "kept workers": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "torchdata": lambda: StatefulDataLoader(Numbers(), shuffle=True),
    "torchdata own generator": lambda: StatefulDataLoader(
        Numbers(), shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "torchdata workers": lambda: StatefulDataLoader(Numbers(), shuffle=True, num_workers=2),
}
WITH_WORKERS = {"workers", "kept workers", "torchdata workers"}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Loop:
    """Draws and forwards, as a training loop has them; `saved[n]` goes on with the batch after n that were used."""

    def __init__(self, kind: str, saved: Any = None) -> None:
        self.reader = Reader(MADE[kind](), self._on_draw)
        self.saved: dict[int, bytes] = {}
        self.used = 0
        self.seen: list[Any] = []
        if saved is not None:
            state: Any = decode(saved)
            self.used = state["used"]
            self.reader.load(state["reader"], state["checksum"])

    def _on_draw(self) -> Callable[[int | None], None]:
        kept = self.reader.saved()
        used = self.used

        def then(checksum: int | None) -> None:
            self.saved[used] = encode({"reader": kept, "checksum": checksum, "used": used}, "loop")

        return then

    def run(self, turns: int) -> Loop:
        """So many batches, pass after pass, with draws from the global generators before and after each."""
        for _ in self.reader.epochs(99):
            for batch in self.reader:
                self.seen.append((torch.as_tensor(batch).tolist(), random.random(), float(torch.rand(()))))
                self.reader.on_forward()
                self.used += 1
                float(np.random.rand())
                if self.used == turns:
                    return self
        return self


def close(loop: Loop | Ahead) -> None:
    """Ends the workers of a loader that was left."""
    batches: Any = loop.reader._reader
    shut = getattr(getattr(batches, "_iterator", None), "_shutdown_workers", None)
    current = loop.reader._current
    for end in (shut, getattr(current.batches if current else None, "_shutdown_workers", None)):
        if end is not None:
            end()


class Ahead:
    """Draws as TorchRec's pipelines do."""

    def __init__(self, kind: str, depth: int, saved: bytes | None = None) -> None:
        self.used, self.saved, self.seen = 0, {}, []  # type: ignore[var-annotated]
        self.reader = Reader(MADE[kind](), self._on_draw)
        if saved is not None:
            state: Any = decode(saved)
            self.used = state["used"]
            self.reader.load(state["reader"], state["checksum"])
        # its calls come from a module of that name
        scope: dict[str, Any] = {"__name__": PIPELINES + ".train_pipelines"}
        exec("def draw(stream):\n    return next(stream, None)", scope)
        self.draw, self.depth = scope["draw"], depth

    def _on_draw(self) -> Any:
        kept, used = self.reader.saved(), self.used
        return lambda checksum: self._keep(used, kept, checksum)

    def _keep(self, used: int, kept: dict[str, Any], checksum: int | None) -> None:
        if used not in self.saved:
            self.saved[used] = encode({"reader": kept, "checksum": checksum, "used": used}, "loop")

    def run(self, passes: int) -> Ahead:
        for _ in self.reader.epochs(passes):
            stream, queue, ended = iter(self.reader), [], False
            while True:
                while len(queue) <= self.depth and not ended:
                    batch = self.draw(stream)
                    ended = batch is None
                    queue += [] if ended else [batch]
                if not queue:
                    break
                if self.used not in self.saved and self.used:
                    self._keep(self.used, self.reader.saved(at_forward=True), None)
                self.reader.on_forward()
                self.seen.append((torch.as_tensor(queue.pop(0)).tolist(), random.random(), float(torch.rand(()))))
                self.used += 1
        return self
