"""Failures, drawn at random: what they cost is counted, not computed. Everything takes a seed."""

import numpy as np

from torch_ecrec.overhead.model import Costs


def full_recovery(costs: Costs, interval_s: float, failures: int, seed: int) -> float:
    """Overhead of a run in which each failure takes all back to the last checkpoint."""
    rng = np.random.default_rng(seed)
    lived_s = rng.exponential(1 / costs.failures_per_s, failures)  # from one start to the next failure
    new_s = np.floor(lived_s / (interval_s + costs.save_s)) * interval_s
    all_s = float(np.sum(lived_s + costs.load_s + costs.restart_s))
    return all_s / float(np.sum(new_s)) - 1


def partial_recovery(costs: Costs, interval_s: float, failures: int, seed: int) -> tuple[float, float]:
    """Overhead, and portion of lost samples, where who failed reads its last checkpoint and the others go on."""
    rng = np.random.default_rng(seed)
    ran_s = np.cumsum(rng.exponential(1 / costs.failures_per_s, failures))  # without what failures take
    period_s = interval_s + costs.save_s
    trained_s = np.floor(ran_s / period_s) * interval_s + np.minimum(ran_s % period_s, interval_s)
    lost_s = np.minimum(ran_s % period_s, interval_s) / costs.hosts
    all_s = ran_s[-1] + failures * (costs.load_s + costs.restart_s)
    return float(all_s / trained_s[-1] - 1), float(np.sum(lost_s) / trained_s[-1])


def beyond_parity(costs: Costs, hosts: int, failures: int, seed: int) -> float:
    """Rate at which a failure in one coding group of `hosts` comes while r others of it are being repaired."""
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(costs.mtbf_s / hosts, failures))
    whom = rng.integers(0, hosts, failures)
    last_s = np.full(hosts, -np.inf)  # when each failed last
    found = 0
    for time_s, host in zip(times_s, whom, strict=True):
        last_s[host] = -np.inf
        found += int(np.count_nonzero(last_s > time_s - costs.repair_s)) >= costs.r
        last_s[host] = time_s
    return found / float(times_s[-1])


def parity_and_checkpoints(costs: Costs, interval_s: float, failures: int, seed: int) -> tuple[float, int]:
    """Overhead of parity with checkpoints behind it, of a single coding group; and how often all went back."""
    rng = np.random.default_rng(seed)
    last_s, now_s, lost_s, saved_s, backs = np.full(costs.hosts, -np.inf), 0.0, 0.0, 0.0, 0
    for gap_s, host in zip(
        rng.exponential(1 / costs.failures_per_s, failures), rng.integers(0, costs.hosts, failures), strict=True
    ):
        checkpoints = int((now_s + gap_s - saved_s) / interval_s)
        saved_s += checkpoints * interval_s
        lost_s += checkpoints * costs.save_s
        now_s += gap_s
        last_s[host] = -np.inf
        if np.count_nonzero(last_s > now_s - costs.repair_s) >= costs.r:
            lost_s += now_s - saved_s + costs.load_s + costs.restart_s
            last_s[:], saved_s, backs = -np.inf, now_s, backs + 1
        else:
            last_s[host] = now_s
            lost_s += costs.stall_s + costs.repair_s * (1 - costs.repair_rate)
    return (lost_s + now_s * costs.parity_share) / (now_s - lost_s), backs
