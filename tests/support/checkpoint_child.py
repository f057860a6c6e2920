"""A trainer process for tests of checkpoints, without TorchRec.

    python checkpoint_child.py TRAINER TRAINERS STEPS OUT

Joins the cluster of TORCH_ECREC_JOIN, goes on where that is, and writes a line to OUT for each step: the step, and a
digest of what it looked up and of its dense model, which is a number that depends on all steps before. The last line is
a digest of all records: trainer 0's, and with TORCH_ECREC_TEST_ALL_DIGEST every trainer's. Between steps it waits as
long as TORCH_ECREC_TEST_PAUSE_S says.
"""

import faulthandler
import gc
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from cluster_child import job, lookup, read_all, touched

from torch_ecrec.errors import ClusterError
from torch_ecrec.processes import launch
from torch_ecrec.spec.settings import Settings

LIMIT_S = 600.0


def main() -> int:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    trainer, trainers, steps, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    pause_s = float(os.environ.get("TORCH_ECREC_TEST_PAUSE_S", "0"))
    session = launch.connect(job(trainers), Settings.from_environment(), trainer)
    dense, first = torch.zeros(1, dtype=torch.float64), 1
    if session.restarted:
        done, parts = session.resume()
        first = done + 1
        if parts:
            payload, header = parts[trainer]
            assert header == [done]
            dense = payload.clone().view(torch.float64)
    session.loaded()
    gc.freeze()  # the interpreter's end is quicker then
    with out.open("a") as file:
        for step in range(first, steps + 1):
            rows = touched(session, step)
            weights = lookup(session, rows)
            gradients = [part * 0.25 + (step % 7 - 3) * 0.01 + trainer * 0.005 for part in weights]
            session.push(rows, gradients, [0.1] * len(rows))
            dense = dense * 0.5 + sum(float(part.double().sum()) for part in weights)
            session.snapshot(dense.view(torch.uint8).clone(), [step])
            seen = hashlib.sha256(b"".join(part.numpy().tobytes() for part in [*weights, dense]))
            file.write(json.dumps([step, seen.hexdigest()]) + "\n")
            file.flush()
            time.sleep(pause_s)
        session.flush()
        if trainer == 0 or os.environ.get("TORCH_ECREC_TEST_ALL_DIGEST"):
            digest = hashlib.sha256(b"".join(records.numpy().tobytes() for records in read_all(session)))
            file.write(json.dumps(["digest", digest.hexdigest()]) + "\n")
    session.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
