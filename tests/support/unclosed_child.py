"""A script that closes no model. Run: python unclosed_child.py HOW STORE RANK (TORCH_ECREC_JOIN is not set)

HOW:
    evaluates   two trainers; trainer 0 ends after three steps, trainer 1 evaluates until trainer 0 has tried to end for
                a while (STORE.over: the test has seen that)
    dropped     one trainer; its first model is dropped, and the cluster of that ends; the second is there at the end
    named       one trainer; a second model on one named cluster is refused; the first one is used after it is closed
It says JSON lines.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from models import CPU, META, Net, batch_of, collection

from torch_ecrec import CodeSpec, DistributedModelParallel, JoinRefused, Settings
from torch_ecrec.processes.supervisor import Supervisor

CODE = CodeSpec(2, 1, 1)
LIMIT_S = 600.0


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def trained(**more: object) -> DistributedModelParallel:
    model = DistributedModelParallel(Net(collection(device=META)), device=CPU, code=CODE, **more)
    for seed in range(3):
        model(batch_of(4, seed))[0].backward()
    return model


def evaluates(store: str, rank: int) -> None:
    model = trained()
    say(trained=rank)
    if rank == 1:
        model.eval()
        looks, deadline_s = 0, time.monotonic() + LIMIT_S
        while not Path(store + ".over").exists() or looks < 20:
            assert time.monotonic() < deadline_s, "nobody said that it is over"
            with torch.no_grad():
                loss, _ = model(batch_of(4, looks))
            assert torch.isfinite(loss)
            looks += 1
            time.sleep(0.02)
        say(looks=looks)


def processes() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def dropped() -> None:
    model = trained()
    first = processes()
    assert len(first) >= 4, first
    del model
    gc.collect()
    deadline_s = time.monotonic() + LIMIT_S
    while set(first) & set(processes()):
        assert time.monotonic() < deadline_s, "the cluster of a model that is gone goes on"
        time.sleep(0.05)
    say(ended=len(first))
    globals()["kept"] = trained()
    say(again=len(processes()))


def named() -> None:
    with Supervisor(CODE, logs=Path(os.environ["LOGS"])) as cluster:
        settings = Settings(join=cluster.join)
        model = trained(settings=settings)
        try:
            trained(settings=settings)
        except JoinRefused as error:
            say(refused=str(error))
        model(batch_of(4, 9))[0].backward()  # goes on
        model.close()
        said: list[str] = []
        for ask in (lambda: model(batch_of(4, 9)), lambda: model.eval()(batch_of(4, 9)), model.state_dict):
            try:
                ask()
            except RuntimeError as error:
                said.append(str(error))
        say(closed=said)


def main() -> None:
    torch.set_num_threads(1)
    how, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    trainers = 2 if how == "evaluates" else 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=trainers)
    if how == "evaluates":
        evaluates(store, rank)
    else:
        {"dropped": dropped, "named": named}[how]()
    say(end=rank)


if __name__ == "__main__":
    main()
