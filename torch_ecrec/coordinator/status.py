"""What `torch-ecrec status` shows: the figures of `protocol/status.py`, from what the coordinator knows."""

from __future__ import annotations

import functools

import torch_ecrec
from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.partial import lost_steps
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.protocol.status import (
    Complaint,
    DomainAtRisk,
    ExperimentStatus,
    Inexactness,
    MemberStatus,
    MoveStatus,
    PartialStatus,
    Rate,
    RegatheringStatus,
    RestoredStatus,
    SlotStatus,
    SpreadStatus,
    Status,
    TableStatus,
    Unresolved,
)
from torch_ecrec.spec.experiment import Experiment
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import POOLINGS
from torch_ecrec.spec.spread import of_mean, spread_of


def status_of(state: ClusterState, now_s: float) -> Status:
    """Returns the status of the cluster. What the `Router` knows is left as if there was nothing to say."""
    job, eras, table = state.job, state.eras, state.table
    back, move = eras.going_back, table.moves.current
    complaints = state.suspicion.complaints(now_s)
    return Status(
        version=torch_ecrec.__version__,
        run=job.run,
        code=job.code,
        transport=state.transport,
        roster=state.roster.version,
        epoch=table.epoch,
        era=eras.number,
        going_back=back is not None,
        resume_step=eras.done if back is None else None if back.step is None else back.done,
        step=state.step,
        finished=state.launches.finished,
        fatal=job.fatal,
        checkpoints=state.checkpointing.status(),
        partial=_partial(state),
        inexact=[Inexactness(step, what) for step, what in job.inexact],
        restored=None if job.restored is None else RestoredStatus(job.restored.folder, job.restored.done),
        unreachable=[Complaint(who, whom, round(for_s, 3)) for who, whom, for_s in complaints],
        at_risk=[DomainAtRisk(domain, slots, why) for domain, (slots, why) in table.at_risk().items()],
        stands_still=state.silence.status(now_s),
        unresolved=Unresolved(*state.suspicion.unresolved),
        gathering=state.gathering(),
        experiment=_experiment(job.experiment),
        tables=len(job.spec.tables) if job.spec else 0,
        slots=[
            SlotStatus(slot, p.server, p.incarnation, p.healthy, state.progress.filling(slot, p.incarnation))
            for slot, p in enumerate(table.slots)
        ],
        spread=None if job.spec is None else _spread(job.spec, _pooling(state)),
        move=None if move is None else MoveStatus(move.slot, move.server),
        members=[_member(state, one, now_s) for one in state.members.by_name.values()],
        wanted_trainers=0 if job.spec is None else job.spec.trainers,
        rate=_rounded_rate(state.progress.rate()) if state.members.present("trainer") else None,
        still_s=_rounded_s(state.progress.still_s(now_s)),
        absent_s=_rounded_s(state.progress.absent_s(now_s)),
        redundancy=table.redundancy(),
        regathering=_regathering(state),
    )


def _rounded_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _rounded_rate(rate: Rate | None) -> Rate | None:
    if rate is None:
        return None
    samples = None if rate.samples_per_s is None else round(rate.samples_per_s, 1)
    return Rate(rate.over_s, round(rate.steps_per_s, 3), samples)


def _regathering(state: ClusterState) -> RegatheringStatus | None:
    if not state.regathering.active:
        return None
    return RegatheringStatus(sorted(state.regathering.said), sorted(state.regathering.missing()))


def _experiment(experiment: Experiment) -> ExperimentStatus | None:
    if not experiment:
        return None
    return ExperimentStatus(experiment.mode, experiment.ranges, experiment.gives_up())


def _pooling(state: ClusterState) -> str:
    """Returns for which tables all trainers have slots pool, one of `POOLINGS`: for none where rows travel rounded."""
    reports = [one.report for one in state.members.present("trainer")]
    if any(report.wire not in (None, "float32") for report in reports):
        return "rows"
    return max(
        (report.pooling for report in reports if report.pooling is not None), key=POOLINGS.index, default="whole"
    )


@functools.lru_cache(maxsize=8)
def _spread(job: JobSpec, pooling: str) -> SpreadStatus:
    spread = spread_of(job)
    tables = [
        TableStatus(
            name=one.table.name,
            rows=one.table.rows,
            dim=one.table.dim,
            slots=one.slots,
            pooled=pooling == "parts" or (pooling == "whole" and one.home is not None),
        )
        for one in spread.tables
    ]
    load, records = ([round(share, 4) for share in of_mean(of).tolist()] for of in (spread.load_S, spread.records_S))
    return SpreadStatus(tables, load, records)


def _member(state: ClusterState, one: MemberRecord, now_s: float) -> MemberStatus:
    return MemberStatus(
        name=one.name,
        role=one.role,
        rank=one.rank,
        pid=one.pid,
        launch=one.launch,
        alive=one.alive,
        left=one.left,
        spare=one.role == "server" and not state.table.hosted_by(one.name),
        draining=one.draining,
        slow=state.slowness.named.get(one.name),
        silent_s=round(now_s - one.heard_s, 3),
        report=one.report,
        address=one.host,
        domain=one.domain,
        gone_s=None if one.gone_s is None else round(now_s - one.gone_s, 3),
        why_gone=one.why_gone,
        version=one.version,
    )


def _partial(state: ClusterState) -> PartialStatus | None:
    """Returns what partial recoveries have lost for good; None if there were none."""
    partial, slots = state.partial, state.job.code.slots
    if not partial.partial_restores:
        return None
    went_on = [at for one in partial.partial_restores for _, _, at in one.lives if at is not None]
    done = max([state.job.step, *went_on])  # a coordinator that was started again may not have heard of any step yet
    last = partial.partial_restores[-1]
    return PartialStatus(
        exact=False,
        times=len(partial.partial_restores),
        lost_samples=round(partial.portion(slots, done), 6),
        of_steps=done,
        lost_steps=lost_steps(partial.partial_restores, slots),
        last=last.folder,
        last_step=last.done,
        last_saves=len(last.saves),
        last_slots=[slot for slot, _, _ in last.lives],
    )
