"""A run on servers whose script gives NumPy's numbers and tensors wherever it may: every bit as with Python's own.

`tests/unit/test_given_numbers.py` visits every such place; here some of them go all the way, through messages too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from models import CPU, META, Net, batch_of, dense_parameters, table
from places import ROOT, SUPPORT
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv

from torch_ecrec import CodeSpec, DistributedModelParallel, Settings

STEPS = 4


def trained(whole: Callable[[int], Any], real: Callable[[float], Any], flag: Callable[[bool], Any]) -> dict[str, Any]:
    """What a model is after some steps, made with numbers of these kinds."""
    torch.manual_seed(0)
    configs = [
        table("wide", whole(50), whole(8), "f0", "f1", weight_init_min=real(-0.25), weight_init_max=real(0.75)),
        table("small", whole(7), whole(8), "f2", "f3"),
    ]
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": real(0.125), "eps": real(0.0625), "beta1": real(0.75)}
    fused |= {"gradient_clipping": flag(True), "max_gradient": real(0.5), "weight_decay": real(0.25)}
    settings = Settings(
        window_steps=whole(3), give_up_s=real(60.0), shared_memory_bytes=whole(1 << 26), again=flag(False)
    )
    model = DistributedModelParallel(
        Net(EmbeddingBagCollection(tables=configs, device=META)),
        env=ShardingEnv(whole(1), whole(0), dist.group.WORLD),
        device=CPU,
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        code=CodeSpec(slots=whole(2), k=whole(1), r=whole(1)),
        settings=settings,
        seed=whole(5),
        snapshot_every=whole(2),
    )
    optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.125)
    batches = model.attach(optimizer=optimizer, reader=[batch_of(5, seed) for seed in range(STEPS)])
    losses = []
    for i, batch in batches.enumerate(start=whole(0)):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = real(0.125 * (i + 1))
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for (
        group
    ) in model.fused_optimizer.param_groups:  # a rate stays as the loop has it, and goes on as that: in the digest
        group["lr"] = float(group["lr"])
    model.flush()
    found = {
        "losses": losses,
        "digest": model.digest(),
        "job": model.session.job.digest,
        "spec": str(model.session.job),
    }
    model.close()
    return found


def compare(trainer: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=trainer, world_size=1)
    wanted = trained(int, float, bool)
    assert len(set(wanted["losses"])) == STEPS
    assert trained(np.int64, np.float32, np.bool_) == wanted
    assert trained(torch.tensor, torch.tensor, torch.tensor) == wanted
    dist.destroy_process_group()


def test_numbers_of_every_kind_train_the_same(tmp_path: Path) -> None:
    """In a process of its own, as a script is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECREC_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600.0)
    assert found.returncode == 0, found.stderr[-4000:]


if __name__ == "__main__":
    compare(0, sys.argv[1])
