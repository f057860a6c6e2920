"""The mean of dense gradients over the trainers, summed in trainer order wherever an element lies in its bucket.

A ring all-reduce adds an element's values in an order that depends on its place in the bucket, and
`DistributedDataParallel` lays its buckets out anew after its first backward. So trainers that were started again would
sum in another order than those that were not, and differ in the last bit. Here every trainer gets one chunk of all
trainers' gradients, adds them up from trainer 0 on, and gives the sum to all: the bytes of a ring all-reduce, in an
order of its own. Two trainers need nothing of this: a + b is b + a.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class OrderedMean:
    """A communication hook of `DistributedDataParallel`. It reduces one bucket at a time, beside the backward.

    Args:
        group: a process group of the trainers, used for nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._trainers = group, dist.get_world_size(group)
        self._thread = ThreadPoolExecutor(1, "reduce")  # one: all trainers reduce buckets in the order they are given

    def install(self, model: DistributedDataParallel) -> None:
        # A lambda: torch insists on annotations that are classes, not their names, or on none.
        model.register_comm_hook(self, lambda state, bucket: state.hook(bucket))

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_cuda:  # its collectives are put on streams, and do not keep the backward
            on_device: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
            self.reduce_(buffer)
            on_device.set_result(buffer)
            return on_device
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def reduce() -> None:
            try:
                self.reduce_(buffer)
            except Exception as error:  # the seam: the backward raises it
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        self._thread.submit(reduce)
        return future

    def reduce_(self, buffer: Tensor) -> None:
        """Replaces `buffer` (N,) by its mean over the trainers."""
        size = -(-buffer.numel() // self._trainers)
        sent = buffer.new_zeros(self._trainers * size)
        torch.div(buffer, self._trainers, out=sent[: buffer.numel()])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        parts = received.view(self._trainers, size)
        for before, after in itertools.pairwise(parts):
            after += before  # ((g0 + g1) + g2) ...
        dist.all_gather_single(sent, parts[-1].clone(), group=self._group)
        buffer.copy_(sent[: buffer.numel()])
