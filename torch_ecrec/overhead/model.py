"""The share of training time that failures, and the guards against them, cost: by formulas.

*Overhead* is time that trains nothing new, over time that does: 0.05 means that 100 hours of training take 105. Hosts
fail independently, each at a constant rate (a Poisson process): with H hosts of a mean time M between failures there is
one every M / H somewhere. An example: 20 hosts of 1000 hours each, one failure every 50 hours; a checkpoint costs 60 s:

    full checkpoints    every sqrt(2 * 60 s * 50 h) = 1.29 h; 2.6 % for writing them and for work that is done again
    parity              no checkpoint; a pause of seconds for each failure, but all is lost once r + 1 hosts are lost
                        within one repair time
    parity, checkpoints behind it   the same, and checkpoints at the rate at which *that* happens: seldom

Every formula is of first order in (interval / time between failures): right where overheads are small, which is where
one wants to be. `tests/unit/test_overhead.py` holds each against a simulation.

Sources. Young: "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. CPR: Maeng et al.,
"CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial Recovery",
MLSys 2021: overheads of full and partial recovery, portion of lost samples (PLS), and the interval that meets a PLS.
The rate beyond parity is our own derivation (`beyond_rate_per_s`).

Not in it: failures that come together, but for `all_mtbf_s`; failures during a recovery, but for parity; what memory
costs; that an incremental checkpoint costs less than a full one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch_ecrec.runtime.checks import require, require_int, take_fields

HOUR_S, DAY_S = 3600.0, 86400.0
NEVER_S = math.inf


@dataclass(frozen=True)
class Costs:
    """A cluster and the costs of its operations, in seconds unless said otherwise.

    Args:
        hosts: that keep tables; each hosts one slot.
        mtbf_s: mean time between failures of one of them.
        save_s: training time that one checkpoint costs; where training goes on meanwhile, what it loses by that.
        load_s: to read a checkpoint back.
        restart_s: until all processes run again, before anything is read.
        k, r: of the code.
        parity_share: what parity costs each step, as a share of the time of a step without.
        stall_s: how long training pauses at a loss that parity repairs.
        repair_s: until all that was lost is there again; a further loss within it adds to the first.
        repair_rate: of training while it is repaired, as a share of the rate otherwise.
        all_mtbf_s: mean time between events that take all hosts at once (power, a bad deployment).

    Raises:
        ValueError, TypeError: a figure cannot be.
    """

    hosts: int
    mtbf_s: float
    save_s: float
    load_s: float
    restart_s: float
    k: int = 2
    r: int = 1
    parity_share: float = 0.0
    stall_s: float = 0.0
    repair_s: float = 0.0
    repair_rate: float = 1.0
    all_mtbf_s: float = NEVER_S

    def __post_init__(self) -> None:
        take_fields(self)
        for name, least in (("hosts", 1), ("k", 1), ("r", 1)):
            require_int(name, getattr(self, name), least)
        require(
            self.hosts >= self.k + self.r,
            f"({self.k}, {self.r}) needs as many hosts as k + r, got {self.hosts}",
        )
        for name in ("mtbf_s", "all_mtbf_s", "save_s"):
            require(getattr(self, name) > 0, f"`{name}` must be positive, got {getattr(self, name)}")
        for name in ("load_s", "restart_s", "parity_share", "stall_s", "repair_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"`{name}` must not be negative, got {value}")
        require(0 < self.repair_rate <= 1, f"`repair_rate` must be above 0 and at most 1, got {self.repair_rate}")

    @property
    def failures_per_s(self) -> float:
        """How often any of the hosts fails, per second."""
        return self.hosts / self.mtbf_s

    @property
    def disasters_per_s(self) -> float:
        """How often all hosts fail together beyond repair, per second."""
        return 1 / self.all_mtbf_s


@dataclass(frozen=True)
class Overhead:
    """The overhead of one way of fault tolerance, in shares of the time that trains.

    Attributes:
        way: its name.
        interval_s: between two checkpoints; infinite where there are none.
        guard: what is paid all the time: writing checkpoints, parity.
        again: work that is done again after a failure.
        down: time in which nobody trains, or fewer samples are trained, after a failure.
        pls: portion of lost samples, 0 where nothing is lost.
        loses_all_s: mean time until everything is lost for good; infinite where that does not happen.
    """

    way: str
    interval_s: float
    guard: float
    again: float
    down: float
    pls: float = 0.0
    loses_all_s: float = NEVER_S

    @property
    def total(self) -> float:
        """The whole overhead: the sum of its parts."""
        return self.guard + self.again + self.down


def young_interval_s(save_s: float, failures_per_s: float) -> float:
    """Returns the time between checkpoints that costs least: sqrt(2 * T_save / rate) (Young 1974).

    Infinite where nothing fails.
    """
    return math.sqrt(2 * save_s / failures_per_s) if failures_per_s > 0 else math.inf


def checkpoints(way: str, costs: Costs, failures_per_s: float, interval_s: float | None = None) -> Overhead:
    """Returns the overhead of checkpoints to which all processes roll back at each failure.

    T_save / T + rate * (T / 2 + T_load + T_restart) for an interval T: on average a failure comes in the middle of one
    (Young 1974; CPR, the overhead of full recovery).

    Args:
        way: its name.
        costs: of the cluster.
        failures_per_s: after which all go back.
        interval_s: None: the one that costs least.
    """
    interval_s = young_interval_s(costs.save_s, failures_per_s) if interval_s is None else interval_s
    if math.isinf(interval_s):
        return Overhead(way, interval_s, 0.0, 0.0, 0.0)
    down = failures_per_s * (costs.load_s + costs.restart_s)
    return Overhead(way, interval_s, costs.save_s / interval_s, failures_per_s * interval_s / 2, down)


def full(costs: Costs) -> Overhead:
    """Returns the overhead of full recovery: at each failure all roll back to a checkpoint, at Young's interval."""
    return checkpoints("full checkpoints", costs, costs.failures_per_s + costs.disasters_per_s)


def partial_interval_s(costs: Costs, pls: float) -> float:
    """Returns the checkpoint interval at which a portion of samples is lost: 2 * PLS * hosts / rate (CPR).

    A failure loses half an interval's work on one host of all: rate * (T / 2) / hosts of the samples.
    """
    return 2 * pls * costs.hosts / costs.failures_per_s


def partial(costs: Costs, pls: float) -> Overhead:
    """Returns the overhead of partial recovery (CPR): a failed host alone reads its last checkpoint. Not exact.

    T_save / T + rate * (T_load + T_restart): no work is done again, it is lost. Of events that take all hosts all work
    since the checkpoint is done again, as with full recovery.

    Args:
        pls: the portion of samples that may be lost.

    Raises:
        ValueError: it is not above 0 and below 1.
    """
    require(0 < pls < 1, f"`pls` must be above 0 and below 1, got {pls}")
    interval_s = partial_interval_s(costs, pls)
    whole = checkpoints("", costs, costs.disasters_per_s, interval_s)
    down = costs.failures_per_s * (costs.load_s + costs.restart_s)
    return Overhead("partial recovery", interval_s, whole.guard, whole.again, whole.down + down, pls)


def group_sizes(hosts: int, n: int) -> list[int]:
    """Returns the hosts of each coding group, within which stripes of n records stay: n to 2n (`layout/stripes.py`)."""
    groups = max(1, -(-hosts // (2 * n)))
    edges = [hosts * group // groups for group in range(groups + 1)]
    return [after - before for before, after in itertools.pairwise(edges)]


def beyond_rate_per_s(costs: Costs) -> float:
    """Returns how often more than r hosts of a coding group are lost in one repair time, or all hosts at once.

    Each host fails at the rate f = 1 / mtbf_s, and what it had is there again repair_s later. At any moment one is
    being repaired with the probability p = 1 - exp(-f * repair_s), independently of the others. A failure of one of g
    hosts is one too many if r or more of the g - 1 others are being repaired (a Poisson process sees averages):

        rate of a group = g * f * P(Binomial(g - 1, p) >= r)

    An example: g = 6, r = 1, a failure every 1000 h each, 60 s for a repair: p = 1.7e-5, one in 228 years. For r = 1
    and small p it is g * (g - 1) * f^2 * repair_s, the rate known of mirrored disks. It is an upper bound: not all
    r + 1 hosts of a group need have records of one stripe, and one more failure after that, in the same repair time,
    counts again.
    """
    per_host = 1 / costs.mtbf_s
    p = -math.expm1(-per_host * costs.repair_s)
    rate = costs.disasters_per_s
    for size in group_sizes(costs.hosts, costs.k + costs.r):
        others = size - 1
        enough = sum(
            math.comb(others, lost) * p**lost * (1 - p) ** (others - lost) for lost in range(costs.r, others + 1)
        )
        rate += size * per_host * enough
    return rate


def _repairs(costs: Costs) -> float:
    """Returns the training time that repairs take: at each failure a pause, then a lower rate for a while."""
    return costs.failures_per_s * (costs.stall_s + costs.repair_s * (1 - costs.repair_rate))


def parity(costs: Costs) -> Overhead:
    """Returns the overhead of parity alone. No work is redone; a loss beyond repair loses everything."""
    rate = beyond_rate_per_s(costs)
    loses_all_s = 1 / rate if rate > 0 else NEVER_S
    return Overhead("parity", math.inf, costs.parity_share, 0.0, _repairs(costs), loses_all_s=loses_all_s)


def parity_and_checkpoints(costs: Costs) -> Overhead:
    """Returns the overhead of parity with checkpoints, at Young's interval for the rate of losses beyond repair."""
    behind = checkpoints("", costs, beyond_rate_per_s(costs))
    guard, down = costs.parity_share + behind.guard, _repairs(costs) + behind.down
    return Overhead("parity and checkpoints", behind.interval_s, guard, behind.again, down)


def all_ways(costs: Costs, pls: float | None = None) -> list[Overhead]:
    """Returns the overhead of each way. Partial recovery is included only if a portion of samples may be lost."""
    ways = [full(costs), parity(costs), parity_and_checkpoints(costs)]
    return ways if pls is None else [ways[0], partial(costs, pls), *ways[1:]]


def choose(ways: list[Overhead]) -> tuple[Overhead, str]:
    """Returns the way with the least overhead of those that never lose everything, and why, in a sentence."""
    safe = [way for way in ways if math.isinf(way.loses_all_s)]
    best = min(safe, key=lambda way: way.total)
    others = sorted((way for way in safe if way is not best), key=lambda way: way.total)
    than = ", ".join(f"{way.way} {_percent(way.total)}" for way in others)
    why = f"{best.way}: {_percent(best.total)} of the training time, against {than}"
    if best.pls:
        exact = min((way for way in safe if not way.pls), key=lambda way: way.total)
        why += f"; it loses {_percent(best.pls)} of the samples, and {exact.way} loses none"
    alone = [way for way in ways if not math.isinf(way.loses_all_s)]
    if alone and not best.pls:
        why += f"; {alone[0].way} alone would lose everything once in {duration(alone[0].loses_all_s)}"
    return best, why + "."


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def duration(seconds: float) -> str:
    """Formats seconds for people: 90 -> "1.5 min"."""
    if math.isinf(seconds):
        return "never"
    for unit, length_s in (("years", 365.25 * DAY_S), ("days", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return (
                f"{seconds / length_s:,.3g} {unit}" if seconds < 1e4 * length_s else f"{seconds / length_s:.1e} {unit}"
            )
    return f"{seconds:.3g} s"
