"""What a coordinator is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.protocol.bounds import TransportName
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.runtime.checks import require, take_fields
from torch_ecrec.spec.experiment import Experiment
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import STANDS_BEFORE_CHECKPOINT_S, STANDS_S, WITHOUT_SPARE


@dataclass(frozen=True)
class ClusterSettings:
    """A cluster as its coordinator makes it.

    Args:
        code: code parameters of the cluster; a job brings its tables, not its code.
        spares: servers that are waited for beyond one per slot before slots are placed for the first time.
        without_spare: "survivor" or "wait": who gets the slots of a lost server when there is no spare.
        lease_s: a member that was not heard of for so long is silent: it is given up, if the code repairs it.
        standstill_s: how long training stands for members that are silent, and more than the code repairs together;
            0: a minute where a checkpoint can take over, else an hour.
        transport: what carries the data plane, "sockets" or "rpc": members are told.
        checkpoint: which checkpoints are written.
        restore: the checkpoint that the cluster begins with, and the job that it is of; None: it begins anew.
        drain_slow: the slots of a server that limps (`slowness.py`) move to a spare, as if somebody had drained it.
        experiment: that all of its members take part in.
        term: how many coordinators of this run there were before, as far as its checkpoints tell.
        run_is_known: there was a coordinator of `checkpoint.run` before, and this one takes its place: it leads no
            other cluster, whoever finds it.

    Raises:
        ValueError: `without_spare` is none of these, or the experiment cannot be made with such a cluster.
    """

    code: CodeSpec
    spares: int
    without_spare: str = "survivor"
    lease_s: float = 10.0
    standstill_s: float = 0.0
    transport: TransportName = "sockets"
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    restore: tuple[Restored, JobSpec] | None = None
    term: int = 0
    run_is_known: bool = False
    drain_slow: bool = False
    experiment: Experiment = Experiment()

    def __post_init__(self) -> None:
        take_fields(self)
        wanted = f"`without_spare` must be one of {WITHOUT_SPARE}, got {self.without_spare!r}"
        require(self.without_spare in WITHOUT_SPARE, wanted)
        require(self.standstill_s >= 0, f"`standstill_s` must not be negative, got {self.standstill_s}")
        check_experiment(self.experiment, self.code, self.checkpoint)

    @property
    def stands_s(self) -> float:
        """How long training stands for members that are silent."""
        return self.standstill_s or (STANDS_S if self.checkpoint.beyond == "stop" else STANDS_BEFORE_CHECKPOINT_S)


def check_experiment(experiment: Experiment, code: CodeSpec, checkpoint: CheckpointSettings) -> None:
    """Checks that an experiment can be made with a cluster.

    Raises:
        ValueError: it cannot; says why.
    """
    if not experiment:
        return
    said = " ".join(f"{name}={value}" for name, value in experiment.variables().items())
    require(code.parities > 0, f"{said} says how parity is kept: it cannot go with --protection {code.protection}")
    require(
        not (experiment.keeps_no_dense_snapshots and checkpoint.url),
        f"{said} sends no dense snapshots to the servers, which write them into checkpoints: leave --checkpoint out",
    )
    require(
        checkpoint.beyond != "partial",
        f"{said} cannot go with --beyond partial, which counts on all that the protocol promises",
    )
