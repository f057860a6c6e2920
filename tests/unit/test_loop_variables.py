"""What a loop keeps in its variables: refused where it could be attached, else told, before and after a restart."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from readers import PASS, loader
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_ecrec.nn.loop import Judge
from torch_ecrec.nn.loop_variables import Variables
from torch_ecrec.nn.reader import Reader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
BATCHES = list(range(1, PASS + 1))
TOLD = "in variables of its own, which begin anew after a restart"


class Stopper:
    """Of early stopping, as people write it."""

    def __init__(self) -> None:
        self.best, self.bad = 1e9, 0

    def add(self, value: float) -> None:
        self.best, self.bad = min(value, self.best), self.bad + (value >= self.best)


class Noise:
    def __init__(self) -> None:
        self.inner = {"random": random.Random(1)}

    def draw(self) -> float:
        return self.inner["random"].random()


# generators --------------------------------------------------------------------------------------------


def test_a_generator_in_an_object_is_refused_by_its_path() -> None:
    noise = Noise()
    with pytest.raises(RuntimeError, match=r"draws from `noise\.inner\['random'\]`, a generator of its own"):
        for _batch in Reader([1, 2, 3]):
            noise.draw()


def test_a_generator_in_a_closure_is_refused() -> None:
    rng = np.random.default_rng(1)

    def loop(reader: Reader, draw: Callable[[], float]) -> None:
        for _batch in reader:
            draw()

    with pytest.raises(RuntimeError, match=r"draws from `rng`.*`model.attach\(..., rng=rng\)`"):
        loop(Reader([1, 2, 3]), lambda: float(rng.random()))


def test_a_generator_that_is_drawn_from_between_passes_is_refused() -> None:
    reader, rng = Reader([1, 2]), random.Random(1)
    with pytest.raises(RuntimeError, match="draws from `rng`"):
        for _ in reader.epochs(2):
            rng.random()
            for _batch in reader:
                pass


def test_a_generator_that_is_made_anew_in_each_pass_is_another_one() -> None:
    reader = Reader([1, 2])
    for epoch in reader.epochs(3):
        rng = random.Random(epoch)
        assert rng.getstate()
        for _batch in reader:
            pass


# what has a state --------------------------------------------------------------------------------------


def test_a_gradient_scaler_is_attached() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def loop(reader: Reader) -> None:
        for _batch in reader:
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(RuntimeError, match=r"`scaler` changes with the batches.*`model.attach\(..., scaler=scaler\)`"):
        loop(Reader([1, 2, 3]))
    loop(Reader([1, 2, 3], judge=Judge(attached=[scaler])))


def test_averaged_weights_are_attached() -> None:
    model = nn.Linear(2, 1)
    ema = AveragedModel(model)
    with pytest.raises(RuntimeError, match="`ema` changes with the batches"):
        for _batch in Reader([1, 2, 3], judge=Judge(known=[model, *model.parameters()])):
            with torch.no_grad():
                model.weight.add_(1.0)
            ema.update_parameters(model)


def test_nothing_is_asked_for_its_state() -> None:
    """That of a model would ask the servers for all tables."""

    class Script:
        def state_dict(self) -> dict[str, Any]:
            pytest.fail("asked")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pytest.fail("asked")

    script = Script()
    assert len(list(Reader([1, 2, 3, 4, 5]))) == 5 and script


# what is told ------------------------------------------------------------------------------------------


def told_by(caplog: pytest.LogCaptureFixture, loop: Callable[[Reader], None], reader: Any = range(6)) -> str:
    caplog.clear()
    loop(Reader(reader))
    assert caplog.text.count(TOLD) <= 1
    return next((record.getMessage() for record in caplog.records if TOLD in record.getMessage()), "")


def test_what_moves_with_the_batches_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def numbers(reader: Reader) -> None:
        weight, mean, best, still = 0.0, torch.zeros(()), None, 5.0
        for batch in reader:
            weight += 0.1
            mean.mul_(0.9).add_(batch)
            best = batch if best is None else max(batch, best)
        assert (weight, still, best) and mean is not None

    def objects(reader: Reader) -> None:
        stopper, buffer, rates = Stopper(), [], {"rate": 1.0}
        for batch in reader:
            stopper.add(-batch)
            buffer.append(batch)
            rates["rate"] *= 0.9

    assert "`weight`, `mean`, `best`" in told_by(caplog, numbers)
    assert "`stopper`, `buffer`, `rates`" in told_by(caplog, objects)


def test_a_second_iterator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def loop(reader: Reader) -> None:
        others, endless, numbers = iter(loader()), itertools.cycle([1, 2]), (i for i in range(99))
        through = map(abs, reader)
        for _batch in through:
            assert next(endless) and next(numbers) >= 0
            next(others, None)

    told = told_by(caplog, loop)
    assert "`others`, `endless`, `numbers`" in told and "through" not in told


def test_what_a_turn_makes_itself_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def loop(reader: Reader) -> None:
        for _ in reader.epochs(2):
            for batch in reader:
                loss = float(batch) ** 2
                assert loss >= 0.0

    assert not told_by(caplog, loop)


# after a restart ---------------------------------------------------------------------------------------


def first_life(loop: Callable[[Reader], Iterator[None]], turns: int) -> Any:
    """What is saved as the last of so many turns begins."""
    kept: list[Any] = []
    reader = Reader(BATCHES, lambda: kept.append(reader.saved()))
    turning = loop(reader)
    for _ in range(turns):
        next(turning)
    return kept[-1]


def restarted(loop: Callable[[Reader], Iterator[None]], turns: int) -> None:
    """A loop that is left after so many turns, and begun anew in another life."""
    saved = first_life(loop, turns + 1)
    again = Reader(BATCHES)
    again.load(saved, None)
    next(loop(again))


def test_other_variables_than_before_are_told_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    stopper, factor = [Stopper()], 1.5

    def one_pass(reader: Reader, total: float) -> Iterator[None]:
        for batch in reader:
            yield
            total += factor * batch

    def loop(reader: Reader) -> Iterator[None]:
        best = stopper[0] = Stopper()
        for epoch in reader.epochs(3):
            yield from one_pass(reader, 0.0)
            best.add(-epoch)

    restarted(loop, PASS + 2)
    (told,) = [
        r.getMessage() for r in caplog.records if "variables of the loop are other than before" in r.getMessage()
    ]
    assert "`total` in one_pass" in told and "`best` in loop" in told
    assert "epoch" not in told and "factor" not in told and "reader" not in told


def test_a_loop_whose_variables_are_as_before_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def loop(reader: Reader) -> Iterator[None]:
        size, names = 3, ["a", "b"]
        for epoch in reader.epochs(3):
            scale = 0.5**epoch
            for batch in reader:
                yield
                loss = batch * scale
                assert size and names and loss is not None

    restarted(loop, PASS + 2)
    assert "other than before" not in caplog.text


def test_a_look_is_short_however_much_there_is() -> None:
    many = {i: list(range(100)) for i in range(100_000)}
    tensors = [torch.zeros(10) for _ in range(1000)]
    assert len(many) == 100_000 and len(tensors) == 1000
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        Variables().sums(sys._getframe())
    finally:
        sys.setprofile(None)
    assert calls < 100_000
