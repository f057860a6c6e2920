"""Methods of TorchRec's `DistributedModelParallel` that look for tables in the trainers: refused by name."""

from __future__ import annotations

from typing import Any, Never

NO_TRACKER = (
    "trackers of TorchRec (`model_tracker_configs`, `init_torchrec_delta_tracker`) look for tables in the trainers, and"
    " would find none; leave them out"
)


class RefusedMethods:
    """A part of our `DistributedModelParallel`, before TorchRec's."""

    def init_torchrec_delta_tracker(self, *_: Any, **__: Any) -> Never:
        """Refused: it would track nothing."""
        raise ValueError(NO_TRACKER)

    def reshard(self, changed_shard_to_params: Any, sharded_module_fqn: str | None = None) -> Never:
        """Refused: no trainer has rows that could move to another one."""
        raise ValueError(
            "`reshard` moves tables between trainers, and they are on the servers; `torch-ecrec drain` moves those"
        )
