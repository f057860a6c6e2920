"""A script in the form of TorchRec's golden training example, in one file, after docs/migrate.md's two changes.

A DLRM of `torchrec.models`, made-up rows by `RandomRecDataset`, tables on the meta device with an attached optimizer, a
plan by TorchRec's planner, `TrainPipelineSparseDist` until the rows are over. Run: torchrun golden_child.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec.model_parallel import DistributedModelParallel, get_default_sharders

FEATURES = [f"cat_{i}" for i in range(5)]
ROWS, DIM, BATCHES = 300, 16, 30


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in FEATURES
    ]
    train = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=13,
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[32, 1],
            dense_device=device,
        )
    )
    apply_optimizer_in_backward(RowWiseAdagrad, train.model.sparse_arch.parameters(), {"lr": 0.05})
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"))
    plan = planner.collective_plan(train, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=train, device=device, plan=plan)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(
        parameters,
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    rows = RandomRecDataset(
        keys=FEATURES,
        batch_size=32,
        hash_size=ROWS,
        manual_seed=1 + dist.get_rank(),
        ids_per_feature=2,
        num_dense=13,
        num_batches=BATCHES,
    )
    loader = DataLoader(rows, batch_size=None, batch_sampler=None, num_workers=0)
    batches = model.attach(optimizer=optimizer, reader=loader)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    for _ in batches.epochs(1):
        iterator = iter(batches)
        while True:
            try:
                pipeline.progress(iterator)
            except StopIteration:
                break
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
