"""A trainer with a local cluster of its own, started by `launch.connect`. Run: python embedded_child.py HOW

It says READY once it has trained a step. HOW: `success` closes the session, `failure`
raises without closing anything, `wait` waits to be ended.
"""

import sys
import threading

import torch
from cluster_child import job, lookup, touched

from torch_ecrec.processes import launch
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings


def main() -> None:
    how = sys.argv[1]
    session = launch.connect(job(1), Settings.from_environment(join=None), code=CodeSpec(2, 1, 1))
    session.loaded()
    rows = touched(session, 1)
    session.push(rows, [torch.ones_like(part) for part in lookup(session, rows)], [0.1] * len(rows))
    session.snapshot(torch.zeros(8, dtype=torch.uint8), [1])
    session.flush()
    print("READY", flush=True)
    if how == "wait":
        threading.Event().wait()
    elif how == "failure":
        raise ValueError("as ordered")
    session.close()


if __name__ == "__main__":
    main()
