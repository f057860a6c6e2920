"""Events that last for a while: how long, and by what effect each was felt. Those of the job and the store are here.

A *disturbance* lasts for the time that was drawn for it, and until it was felt, `Disturbance.limit_s` at most; or for
its time and no longer, where more of it would be another event (`exact`). What nobody has felt fails the run.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ecrec.demo.report import Void
from torch_ecrec.protocol.status import Status

FELT_S = 90.0  # for a disturbance to be felt, on a busy machine
LOOK_S = 0.5  # between two looks at whether it was felt
QUIET_S = 0.7  # a member not heard of for so long is silent (heartbeats are 0.25 s apart) ...
QUIET_SHARE = 0.5  # ... and for so much of the time since it began
FROZEN_S = (2.0, 5.0)  # all servers, so much longer than the lease
REFUSED_LIMIT_S = 300.0  # for another job to be refused: it may wait for the end of the first one's trainers before
STORE_FELT_S = 240.0  # for the store's trouble to be felt: a checkpoint is tried a minute after the last one, at most
SLOW_OPENS = 5  # opens of files that had to wait
AT_END = "training was over before"
REFUSAL = "JoinRefused"  # what another job's trainers end with


@dataclass
class Disturbance:
    """An event that is under way.

    Args:
        entry: of the schedule.
        since_s, until_s: when it began, and how long it lasts at least (monotonic).
        felt: by what it was felt, "" if it was not yet.
        end: ends it.
        exact: it ends with its time, felt or not.
        limit_s: for it to be felt.
        at_end: by what it was felt where training was over first; "": that fails the run.
        beside: other events go on meanwhile.
    """

    entry: dict[str, Any]
    since_s: float
    until_s: float
    felt: Callable[[], str]
    end: Callable[[], None]
    exact: bool = False
    limit_s: float = FELT_S
    at_end: str = AT_END
    beside: bool = False
    looked_s: float = 0.0

    def is_over(self, now_s: float) -> bool:
        """Returns whether it may end. Looks first whether it was felt."""
        if not self.entry["felt"] and (self.exact or now_s - self.looked_s >= LOOK_S):
            self.looked_s, self.entry["felt"] = now_s, self.felt()
        late = now_s - self.since_s > self.limit_s
        return now_s >= self.until_s and (self.exact or late or bool(self.entry["felt"]))


def felt_as_silence(status: Status | None, names: Collection[str], since_s: float) -> str:
    """Returns a text if one of these members, or the coordinator, was silent for a while; "" if not.

    Args:
        status: the last one; None: there is none yet.
        names: of members.
        since_s: when their silence began (time of day).
    """
    now_s = time.time()
    least_s = max(QUIET_S, QUIET_SHARE * (now_s - since_s))
    said_s = 0.0 if status is None else status.time_s
    if not names and now_s - max(said_s, since_s) >= least_s:
        return f"the coordinator has said nothing for {now_s - said_s:.1f} s"
    for member in status.members if status is not None and said_s > since_s else ():
        if member.name in names and member.alive and member.silent_s >= least_s:
            return f"{member.name} was silent for {member.silent_s:.1f} s"
    return ""


def felt_as_refusal(code: int | None, log: Path) -> str:
    """Returns the line in which another job was refused; "" while it runs (`code` is None), or ended otherwise."""
    if not code:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in lines if REFUSAL in line), "")


def felt_by_the_store(kind: str, waited: int, void: Sequence[Void]) -> str:
    """Returns a text if opens had to wait, or a checkpoint failed by this trouble's own error; "" if not.

    Args:
        kind: of `STORE_EVENTS`.
        waited: opens, since it began.
        void: checkpoints that have come to nothing since.
    """
    if kind == "slow-store":
        return f"{waited} opens had to wait" if waited >= SLOW_OPENS else ""
    error = os.strerror(errno.ENOSPC if kind == "full-disk" else errno.ENOTDIR)
    return next((one.reason for one in void if error in one.reason), "")


def another_job(join: str, trainers: int, meet: str, script: Sequence[str]) -> list[str]:
    """Returns the command line of another launch that names the same cluster.

    Args:
        join: the cluster.
        trainers: of the job, as many as the first one has.
        meet: HOST:PORT of torchrun's store.
        script: with arguments, other than the first one's.
    """
    words = [sys.executable, "-P", "-m", "torch_ecrec", "run", "--join", join, "--nproc-per-node", str(trainers)]
    return [*words, "--meet", meet, "--job", "another", "--max-restarts", "0", "--", *script]
