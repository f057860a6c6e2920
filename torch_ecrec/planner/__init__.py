"""TorchRec's planner with erasure-coded servers: `planner.py`. One import line changes.

from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
"""

# ruff: noqa: E402  (what is missing is said before something fails to load it)

from torch_ecrec.runtime.installed import require_torchrec

require_torchrec()

from torchrec.distributed.planner import ParameterConstraints, Topology

from torch_ecrec.planner.estimates import Servers
from torch_ecrec.planner.planner import EmbeddingShardingPlanner
from torch_ecrec.planner.report import Report

__all__ = ["EmbeddingShardingPlanner", "ParameterConstraints", "Report", "Servers", "Topology"]
