"""TorchRec's planner with erasure-coded servers: `planner.py`. One import line changes.

from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
"""

from torchrec.distributed.planner import ParameterConstraints, Topology

from torch_ecrec.planner.estimates import Servers
from torch_ecrec.planner.planner import EmbeddingShardingPlanner
from torch_ecrec.planner.report import Report

__all__ = ["EmbeddingShardingPlanner", "ParameterConstraints", "Report", "Servers", "Topology"]
