"""`OrderedMean` with three real processes: the same bits wherever an element lies, whenever a trainer was started."""

from __future__ import annotations

import datetime
import os
from functools import reduce
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from models import Net, batch_of, collection, shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from torch_ecrec.nn.reduce import OrderedMean

TRAINERS = 3
LIMIT_S = 600.0  # only a hang reaches it
AS_IN_TORCHREC = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True}
SIZES = [1, 2, 3, 4, 5, 100, 1000, 1001, 3001]


@pytest.mark.smoke
def test_three_trainers(tmp_path: Path) -> None:
    forked.call(three_trainers, TRAINERS, str(tmp_path), limit_s=LIMIT_S)


def three_trainers(trainer: int, folder: str) -> None:
    """All that is checked with three trainers, in one start; a collective that does not end fails on its own."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(trainer), WORLD_SIZE="3", LOCAL_RANK=str(trainer), LOCAL_WORLD_SIZE="3")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=trainer,
        world_size=TRAINERS,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    mean = OrderedMean(dist.new_group())
    for size in SIZES:
        the_mean_is_that_in_trainer_order(mean, trainer, size, torch.float32)
    the_mean_is_that_in_trainer_order(mean, trainer, 1001, torch.float64)
    the_mean_is_that_in_trainer_order(mean, trainer, 1001, torch.bfloat16)
    nothing_beside_the_buffer_is_written(mean, trainer)
    what_is_not_finite_stays_where_it_is(mean, trainer)
    a_late_start_gives_the_same_weights(trainer, {})
    a_late_start_gives_the_same_weights(trainer, AS_IN_TORCHREC)
    a_model_of_three_trainers_uses_it(trainer)
    an_order_that_is_not_that_of_trainers_is_refused(trainer)
    dist.barrier()
    a_lost_trainer_raises_in_the_backward(trainer)


def gradients(size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of each trainer; of magnitudes from 1e-4 to 1e4, so that the order of a sum shows."""
    made = []
    for trainer in range(TRAINERS):
        random = torch.Generator().manual_seed(100 + trainer)
        scale = 10 ** torch.empty(size).uniform_(-4, 4, generator=random)
        made.append((torch.randn(size, generator=random) * scale).to(dtype))
    return made


def in_order(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, [part / TRAINERS for part in parts])


def the_mean_is_that_in_trainer_order(mean: OrderedMean, trainer: int, size: int, dtype: torch.dtype) -> None:
    parts = gradients(size, dtype)
    expected = in_order(parts)
    if size > 100:
        for other in ([0, 2, 1], [1, 2, 0]):
            assert not torch.equal(in_order([parts[i] for i in other]), expected)
    buffer = parts[trainer].clone()
    mean.reduce_(buffer)
    assert torch.equal(buffer, expected)
    for seed in range(3):  # laid out otherwise
        places = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        buffer = parts[trainer][places]
        mean.reduce_(buffer)
        assert torch.equal(buffer, expected[places])
    for begin in range(0, size, 1 + size // 3):  # in a bucket of its own, with others before or behind it
        buffer = parts[trainer][begin:].clone()
        mean.reduce_(buffer)
        assert torch.equal(buffer, expected[begin:])


def nothing_beside_the_buffer_is_written(mean: OrderedMean, trainer: int) -> None:
    parts = gradients(1000)
    whole = parts[trainer].clone()
    mean.reduce_(whole[7:501])
    assert torch.equal(whole[7:501], in_order(parts)[7:501])
    assert torch.equal(whole[:7], parts[trainer][:7]) and torch.equal(whole[501:], parts[trainer][501:])


def what_is_not_finite_stays_where_it_is(mean: OrderedMean, trainer: int) -> None:
    buffer = torch.ones(10)
    if trainer == 1:
        buffer[3], buffer[8] = float("nan"), float("inf")
    mean.reduce_(buffer)
    assert torch.isfinite(buffer).tolist() == [i not in (3, 8) for i in range(10)]
    assert buffer[3].isnan() and buffer[8] == float("inf")


# in DistributedDataParallel -----------------------------------------------------------------------------


class Layers(nn.Module):
    """Used in another order than they are declared in, so that DDP lays its buckets out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(17, 1), nn.Linear(5, 40), nn.Linear(40, 31)
        self.third = nn.Linear(31, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.third(x)))


class Watched(OrderedMean):
    """Remembers how large the buckets were, in order."""

    def __init__(self) -> None:
        super().__init__(dist.new_group())
        self.sizes: list[int] = []

    def reduce_(self, buffer: Tensor) -> None:
        self.sizes.append(buffer.numel())
        super().reduce_(buffer)


def run(
    trainer: int, begin: int, end: int, start: dict[str, Tensor] | None, options: dict[str, bool]
) -> tuple[dict[str, Tensor], list[int]]:
    """Steps of a model that is made now; returns its weights, and the buckets of the last step."""
    torch.manual_seed(0)
    layers = Layers()
    if start is not None:
        layers.load_state_dict(start)
    model, mean = DistributedDataParallel(layers, bucket_cap_mb=0.002, **options), Watched()
    mean.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, end):
        mean.sizes = []
        random = torch.Generator().manual_seed(10 * step + trainer)
        optimizer.zero_grad()
        model(torch.randn(9, 5, generator=random)).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in layers.state_dict().items()}, mean.sizes


def a_late_start_gives_the_same_weights(trainer: int, options: dict[str, bool]) -> None:
    half, _ = run(trainer, 0, 4, None, options)
    _, early = run(trainer, 0, 5, None, options)
    _, late = run(trainer, 4, 5, half, options)
    elements = sum(value.numel() for value in half.values())
    assert len(early) > 2 and sum(early) == sum(late) == elements
    assert early != late  # the same step, in other buckets: DDP lays them out after its first backward
    whole, _ = run(trainer, 0, 12, None, options)
    rest, _ = run(trainer, 4, 12, half, options)
    for name in whole:
        assert torch.equal(whole[name], rest[name]), name
        assert not torch.equal(whole[name], half[name]), name
        everyone = [torch.empty_like(whole[name]) for _ in range(TRAINERS)]
        dist.all_gather(everyone, whole[name])
        assert all(torch.equal(one, whole[name]) for one in everyone), name


def a_model_of_three_trainers_uses_it(trainer: int) -> None:
    model, _ = shard(Net(collection()), TRAINERS, trainer)
    wrapped = model._dmp_wrapped_module
    assert isinstance(wrapped, DistributedDataParallel)
    ((_, state),) = wrapped._comm_hooks
    assert isinstance(state, OrderedMean)
    model.init_data_parallel()
    assert len(wrapped._comm_hooks) == 1


def an_order_that_is_not_that_of_trainers_is_refused(trainer: int) -> None:
    """TorchRec's own hook for fp16 is added up in another order after a restart: other bits, without a word."""
    wrapper = DefaultDataParallelWrapper(allreduce_comm_precision="fp16")
    model, _ = shard(Net(collection()), TRAINERS, trainer, data_parallel_wrapper=wrapper)
    batches = model.attach(reader=[batch_of(4, trainer)])
    with pytest.raises(RuntimeError, match=r"fp16_compress_hook.* adds the gradients of 3 trainers in an order"):
        next(iter(batches))


def a_lost_trainer_raises_in_the_backward(trainer: int) -> None:
    model, mean = DistributedDataParallel(Layers(), bucket_cap_mb=0.002), Watched()
    mean.install(model)
    model(torch.ones(2, 5)).sum().backward()
    if trainer == TRAINERS - 1:
        dist.destroy_process_group()
        return
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
        model(torch.ones(2, 5)).sum().backward()


# in one process -----------------------------------------------------------------------------------------


def test_an_error_reaches_the_backward(tmp_path: Path) -> None:
    class Fails(OrderedMean):
        def reduce_(self, buffer: Tensor) -> None:
            raise ConnectionError("trainer 2 is gone")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Layers())
        Fails(dist.new_group()).install(model)
        with pytest.raises(Exception, match="trainer 2 is gone"):
            model(torch.ones(2, 5)).sum().backward()
    finally:
        dist.destroy_process_group()
