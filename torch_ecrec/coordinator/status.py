"""What `torch-ecrec status` shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch_ecrec
from torch_ecrec.coordinator.partial import lost_steps
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.protocol.messages import json_of


def partial_status(state: ClusterState) -> dict[str, Any] | None:
    """What was lost for good; None where nothing was."""
    partial, slots = state.partial, state.job.code.slots
    if not partial.renewals:
        return None
    went_on = [at for one in partial.renewals for _, _, at in one.lives if at is not None]
    done = max([state.job.step, *went_on])  # a coordinator that was started again may not have heard of any step yet
    last = partial.renewals[-1]
    return {
        "exact": False,
        "times": len(partial.renewals),
        "lost_samples": round(partial.portion(slots, done), 6),
        "of_steps": done,
        "lost_steps": lost_steps(partial.renewals, slots),
        "last": last.folder,
        "last_step": last.done,
        "last_saves": len(last.saves),
        "last_slots": [slot for slot, _, _ in last.lives],
    }


def status_of(state: ClusterState, now_s: float) -> dict[str, Any]:
    """Everything, as an object of JSON."""
    job, eras, table = state.job, state.eras, state.table
    back = eras.going_back
    resume_step = eras.done if back is None else None if back.step is None else back.done
    return {
        "version": torch_ecrec.__version__,
        "run": job.run,
        "code": dataclasses.asdict(job.code),
        "transport": state.transport,
        "generation": state.world.generation,
        "epoch": table.epoch,
        "era": eras.number,
        "going_back": eras.going_back is not None,
        "resume_step": resume_step,
        "step": job.step,
        "finished": state.launches.finished,
        "fatal": job.fatal,
        "checkpoints": state.checkpointing.status(),
        "partial": partial_status(state),
        "inexact": [{"step": step, "what": what} for step, what in job.inexact],
        "restored": {"folder": job.restored.folder, "step": job.restored.done} if job.restored else None,
        "unreachable": [
            {"who": who, "whom": whom, "for_s": round(for_s, 3)}
            for who, whom, for_s in state.suspicion.complaints(now_s)
        ],
        "at_risk": [{"domain": domain, "slots": slots, "why": why} for domain, (slots, why) in table.at_risk().items()],
        "stands_still": state.silence.status(now_s),
        "unresolved": {"pairs": state.suspicion.unresolved[0], "why": state.suspicion.unresolved[1]},
        "gathering": None if (lacking := state.gathering()) is None else json_of(lacking),
        "tables": len(job.spec.tables) if job.spec else 0,
        "slots": [
            {"slot": i, "server": p.server, "incarnation": p.incarnation, "healthy": p.healthy}
            for i, p in enumerate(table.slots)
        ],
        "move": None if (move := table.moves.current) is None else {"slot": move.slot, "server": move.server},
        "members": [
            {
                "name": m.name,
                "role": m.role,
                "rank": m.rank,
                "pid": m.pid,
                "launch": m.launch,
                "alive": m.alive,
                "left": m.left,
                "spare": m.role == "server" and not table.hosted_by(m.name),
                "draining": m.draining,
                "slow": None if (late := state.slowness.named.get(m.name)) is None else dataclasses.asdict(late),
                "silent_s": round(now_s - m.heard_s, 3),
                "report": m.report,
            }
            for m in state.members.by_name.values()
        ],
    }
