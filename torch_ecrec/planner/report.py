"""The report of a plan: TorchRec's, with our tables as "EC" ("EC-TW", "EC-RW"), and the servers' memory and traffic.

TorchRec's table has the trainers: what is in each of them, and their time. Ours is behind it:

    Erasure-coded servers: 4 slots, k = 2, r = 1; 2 trainers
         MB  rows  records  parities   logs  lookups/step  pushes/step  folds/step
    users.t  1000    0.068     0.034  0.109         0.007        0.007       0.007
        all  1000    0.068     0.034  0.109         0.007        0.007       0.007
    largest slot: 0.1 MB of 64.0 MB; logs are for 8 steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.types import Enumerator as AnyEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ParameterSharding

from torch_ecrec.compat.torchrec import ReportedStats, short_names
from torch_ecrec.nn.coverage import ERASURE_CODED
from torch_ecrec.planner.enumerator import Enumerator, costs_of, is_ours, total
from torch_ecrec.planner.estimates import Cost, Fit, fit_of
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.spread import said_of_padding

SHORT = {ERASURE_CODED: "EC", f"{ERASURE_CODED}_table_wise": "EC-TW", f"{ERASURE_CODED}_row_wise": "EC-RW"}
_MEMORY, _TRAFFIC = ("records", "parities", "logs"), ("lookups", "pushes", "folds")
_MB = 1e6


class Report(ReportedStats):
    """A drop-in for TorchRec's `EmbeddingStats`, for plans made by `Enumerator`.

    Attributes:
        servers: the lines about them, of the report that was made last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[str] = []
        self._of: Enumerator | None = None

    def log(self, *args: Any, enumerator: AnyEnumerator | None = None, **more: Any) -> None:
        """Logs the report line by line, as TorchRec's does."""
        self._of = enumerator if isinstance(enumerator, Enumerator) else None
        with short_names(SHORT):  # TorchRec's report knows its own sharding types only
            super().log(*args, enumerator=enumerator, **more)

    def traffic_of(
        self, shard: ParameterSharding, option: ShardingOption, world_size: int
    ) -> tuple[list[int], list[float], list[float]] | None:
        """Returns ranks, and the MB that each sends and receives in a lookup; None if the table is TorchRec's."""
        if not is_ours(option) or self._of is None:
            return None
        served = self._of.served[option.fqn]
        sent, got = (bytes_ / world_size / 2**20 for bytes_ in (served.cost.asked, served.cost.answered))
        return list(shard.ranks or ()), [sent] * world_size, [got] * world_size

    def more_lines(self, plan: Sequence[ShardingOption]) -> list[str]:
        """Returns lines on the memory and traffic of the servers."""
        self.servers = self._servers(plan)
        return ["", *self.servers]

    def _servers(self, plan: Sequence[ShardingOption]) -> list[str]:
        if self._of is None or not (served := costs_of(plan, self._of.served)):
            return ["Erasure-coded servers: no table"]
        servers, sum_ = self._of.servers, total(served)
        code = servers.code
        table = [["MB", "rows", *_MEMORY, *(f"{name}/step" for name in _TRAFFIC)]]
        table += [[name, f"{one.table.rows}", *_figures(one.cost)] for name, one in served.items()]
        table += [["all", f"{sum(one.table.rows for one in served.values())}", *_figures(sum_)]]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        tables = tuple(one.table for one in served.values())
        fit = fit_of(tables, sum_, servers)
        padding = said_of_padding(JobSpec(tables, code, self._of.world_size))
        limit = "" if servers.memory_bytes is None else f" of {servers.memory_bytes / _MB:.1f} MB"
        return [
            f"Erasure-coded servers: {code.words}; {self._of.world_size} trainers",
            *("  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in table),
            f"largest slot: {fit.whole / _MB:.1f} MB{limit}; logs are for {servers.log_steps} steps",
            *([_on_disk(fit)] if fit.on_disk else []),
            *([f"padding: {padding}"] if padding else []),
        ]


def _on_disk(fit: Fit) -> str:
    return (
        f"on its disk: {fit.on_disk / _MB:.1f} MB of records; {fit.in_memory:.0%} are in memory."
        f" The least that it needs is {fit.needed / _MB:.1f} MB"
    )


def _figures(cost: Cost) -> list[str]:
    return [f"{getattr(cost, name) / _MB:.3f}" for name in (*_MEMORY, *_TRAFFIC)]
